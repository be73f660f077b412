"""What goes wrong on the way from the source to the disk, and what a run that ends there leaves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import pqcache
from pqcache.store.drivers.local import LocalSource
from tests.store.sync.fill.filling import check_same


def write_columns(path: Path, rows: int = 40_000) -> None:
    """Write a row group of six columns of 320 kB, so that columns that are not wanted are not fetched."""
    rng = np.random.default_rng(0)
    table = pa.table({name: rng.integers(0, 1 << 62, rows) for name in "abcdef"})
    path.parent.mkdir(exist_ok=True)
    pq.write_table(table, path, compression="none", use_dictionary=False, data_page_size=1 << 30)


@pytest.mark.parametrize("cut", [{0}, {1}, {2}, {0, 1}, {0, 2, 3}, {0, 1, 2, 3}], ids=str)
def test_a_connection_that_ends_early_in_an_orderly_way(
    cut: set[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A piece of some columns has several ranges at the source; each is complete before the next one is fetched."""
    write_columns(tmp_path / "made" / "part-0.parquet")
    read, begun = LocalSource.read, list[int]()

    def shortened(source: LocalSource, path: str, offset: int, length: int, tag: str = "") -> Iterator[bytes]:
        is_end = offset + length == (tmp_path / "made" / path).stat().st_size
        if not is_end:
            begun.append(length)
        short = not is_end and len(begun) - 1 in cut
        yield from read(source, path, offset, length // 2 if short else length, tag)

    monkeypatch.setattr(LocalSource, "read", shortened)
    pqcache.sync(tmp_path / "made", tmp_path / "cache", columns=["a", "c", "e"], fill=True, jobs=1)
    assert len(begun) == 3 + len(cut), "three ranges, and the rest of each that was cut"
    monkeypatch.undo()
    pqcache.sync(tmp_path / "made", tmp_path / "plain", columns=["a", "c", "e"])
    check_same(tmp_path / "plain", tmp_path / "cache")
