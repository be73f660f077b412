"""Position delete files and deletion vectors: the rows of one data file, in bounded memory."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyroaring import BitMap64

from pqcache.errors import SourceError
from pqcache.store.drivers.registry import open_source
from pqcache.store.drivers.timeouts import Patience
from pqcache.store.tables import iceberg as iceberg_module
from pqcache.store.tables.base import OpenOptions, StoreFiles
from pqcache.store.tables.deletion_vector import FRAME, DeletionVector
from pqcache.store.tables.iceberg import Deletes, TableAccess


@pytest.fixture
def reads(tmp_path: Path) -> Deletes:
    return Deletes(TableAccess(files=StoreFiles(None, open_source, OpenOptions(patience=Patience(0)))))


def write(path: Path, positions: dict[str, list[int]], **how: Any) -> str:
    pairs = sorted((uri, row) for uri, found in positions.items() for row in found)
    columns = {"file_path": [uri for uri, _ in pairs], "pos": pa.array([row for _, row in pairs], pa.int64())}
    pq.write_table(pa.table(columns), path, **{"row_group_size": 10, **how})
    return str(path)


@pytest.mark.parametrize("most", [1 << 20, 25, 3])
def test_positions_are_those_of_one_data_file(
    reads: Deletes, tmp_path: Path, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(iceberg_module, "_MAX_CACHED", most)
    chance = np.random.default_rng(most)
    positions = [{f"s3://lake/f{i}": chance.integers(0, 2**40, 9).tolist() for i in range(5)} for _ in range(3)]
    files = [write(tmp_path / f"d{n}.parquet", found) for n, found in enumerate(positions)]
    for name in [f"s3://lake/f{i}" for i in range(6)] * 2:
        expected = sorted({row for found in positions for row in found.get(name, [])})
        assert reads.rows_of(name, files).tolist() == expected
        assert sum(map(len, (p for known in reads._cached.values() for p in known.values()))) <= max(most, 45)
    if most < 45:
        assert len(reads._cached) <= 1


def vector(positions: list[int]) -> bytes:
    inside = bytes.fromhex("d1d33964") + BitMap64(positions).serialize()
    return struct.pack(">I", len(inside)) + inside + struct.pack(">I", zlib.crc32(inside))


def test_deletion_vectors_are_ranges_of_a_file(reads: Deletes, tmp_path: Path) -> None:
    first, second = vector([1, 5, 2**33 + 7]), vector([])
    path = tmp_path / "v.puffin"
    path.write_bytes(b"PFA1" + first + second)

    def at(offset: int, data: bytes, rows: int) -> DeletionVector:
        return DeletionVector(rows=rows, size=len(data) - FRAME, place=str(path), offset=offset)

    here = at(4, first, 3)
    assert reads.rows_of("x", [here]).tolist() == [1, 5, 2**33 + 7]
    assert reads.rows_of("x", [at(4 + len(first), second, 0)]).tolist() == []
    both = [here, write(tmp_path / "d.parquet", {"x": [5, 6], "y": [9]})]
    assert reads.rows_of("x", both).tolist() == [1, 5, 6, 2**33 + 7]
    with pytest.raises(
        SourceError, match=r"x: its deletion vector, at 4 of .*/v\.puffin, is damaged: it deletes 3 rows"
    ):
        reads.rows_of("x", [at(4, first, 2)])
    for place in range(len(first)):
        damaged = bytearray(first)
        damaged[place] ^= 0x10
        path.write_bytes(b"PFA1" + damaged)
        with pytest.raises(SourceError, match=r"x: its deletion vector, at 4 of .*, is damaged: .*; check the table"):
            reads.rows_of("x", [here])
