"""Arrow batches of an epoch, of any files."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import pqcache
from pqcache.errors import ParquetError, UsageError
from pqcache.reader.open_dataset import open_local_dataset
from tests.reader.reading import write


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """1,003 rows: 17 row groups of very different sizes, two of them empty, in partitions."""
    root = tmp_path_factory.mktemp("numbers")
    first = 0
    for number, sizes in enumerate([[1, 50, 0, 3], [200], [7, 7, 7, 7], [0], [300, 100], [5, 150, 60, 106, 0]]):
        path = root / f"part={number % 3}" / f"{number}.parquet"
        path.parent.mkdir(exist_ok=True)
        kinds = pa.schema([("id", pa.int64()), ("text", pa.string()), ("items", pa.list_(pa.int32()))])
        with pq.ParquetWriter(path, kinds) as writer:
            for size in sizes:
                ids = range(first, first + size)
                rows = {"id": ids, "text": [f"t{i}" for i in ids], "items": [[i] * (i % 4) for i in ids]}
                writer.write_table(pa.table(rows, schema=kinds), row_group_size=max(1, size))
                first += size
    assert first == 1003
    return root


def epoch(path: Path, **options: Any) -> pa.Table:
    """Return the rows of an epoch."""
    batches = list(pqcache.Cache(path).batches(**options))
    for batch in batches:
        batch.validate(full=True)
    return pa.Table.from_batches(batches)


@pytest.mark.parametrize("shuffle", [True, False])
def test_batches_are_arrays_of_their_own(numbers: Path, shuffle: bool) -> None:
    """Whose lists lie where their offsets say, and which keep no other rows in memory."""
    found = []
    for batch in pqcache.Cache(numbers).batches(batch_size=10, shuffle=shuffle, memory=64 << 20):
        items = batch["items"]
        values, ends = items.flatten().to_pylist(), items.offsets.to_pylist()
        assert [values[low:high] for low, high in pairwise(ends)] == items.to_pylist()
        assert batch.get_total_buffer_size() <= 1.2 * batch.nbytes + 100
        found += batch["id"].to_pylist()
    assert sorted(found) == list(range(1003))


def test_the_iterator_says_what_reading_takes(numbers: Path) -> None:
    batches = pqcache.Cache(numbers).batches(batch_size=50, epoch=3, window=2)
    assert batches.stats().epoch.rows == 0
    first = next(batches)
    begun = batches.stats().epoch
    assert (begun.epoch, begun.seconds is not None) == (3, True)
    assert first.num_rows == 50
    assert begun.rows >= 50
    left = list(batches)
    stats = batches.stats()
    assert (stats.epoch.rows, stats.epoch.batches) == (1003, 21) == (50 + sum(map(len, left)), 1 + len(left))
    assert (stats.epoch.row_groups, stats.memory_limit_bytes) == (14, 2 << 30)
    assert 0 < (stats.epoch.waited_seconds or 0) <= (stats.epoch.seconds or 0)
    assert batches.stats().epoch.seconds == stats.epoch.seconds  # it has ended
    stopped = pqcache.Cache(numbers).batches(batch_size=50)
    next(stopped)
    stopped.close()
    assert list(stopped) == []
    assert stopped.stats().epoch.rows < 1003


def test_the_paths_value_wins_and_nulls_are_nulls(tmp_path: Path) -> None:
    write(tmp_path, {"dt=2026-11-01/a.parquet": pa.table({"dt": ["wrong"], "x": [1]})}, 10)
    write(tmp_path, {"dt=__HIVE_DEFAULT_PARTITION__/a.parquet": pa.table({"dt": ["wrong"], "x": [2]})}, 10)
    assert epoch(tmp_path, shuffle=False).to_pydict() == {"x": [1, 2], "dt": ["2026-11-01", None]}


def test_columns_that_are_not_there_are_named(numbers: Path) -> None:
    with pytest.raises(UsageError, match="no column 'nope'"):
        epoch(numbers, columns=["nope"])
    with pytest.raises(UsageError, match="duplicate name"):
        epoch(numbers, columns=["id", "id"])
    with pytest.raises(UsageError, match="not a list of names"):
        epoch(numbers, columns="id")


def test_files_of_different_schemas(tmp_path: Path) -> None:
    write(tmp_path, {"a.parquet": pa.table({"x": pa.array([1, 2], pa.int32()), "y": [1.0, 2.0]})}, 10)
    write(tmp_path, {"b.parquet": pa.table({"y": pa.array([3], pa.float32()), "x": pa.array([3], pa.int64())})}, 10)
    write(tmp_path, {"c.parquet": pa.table({"x": pa.array([4], pa.int32()), "z": ["new"], "l": [[1]]})}, 10)
    table = epoch(tmp_path, batch_size=3, shuffle=False)
    assert table.to_pydict() == {
        "x": [1, 2, 3, 4],
        "y": [1.0, 2.0, 3.0, None],
        "z": [None, None, None, "new"],
        "l": [None, None, None, [1]],
    }
    assert epoch(tmp_path, batch_size=3).sort_by("x").to_pydict() == table.to_pydict()


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file"):
        epoch(tmp_path / "nope")
    with pytest.raises(UsageError, match="no Parquet files"):
        epoch(tmp_path)
    with pytest.raises(UsageError, match="pqcache sync s3://bucket/x"):
        open_local_dataset("s3://bucket/x")


def test_a_file_that_vanished_or_broke_is_named(tmp_path: Path) -> None:
    table = pa.table({"x": list(range(1000)), "s": [f"{i}" for i in range(1000)]})
    write(tmp_path, {f"{n}.parquet": table for n in range(4)}, 100)
    batches = pqcache.Cache(tmp_path).batches(batch_size=64)
    path, data = tmp_path / "2.parquet", bytearray((tmp_path / "2.parquet").read_bytes())
    path.unlink()
    with pytest.raises(ParquetError, match=r"2\.parquet: the file is gone"):
        list(batches)
    data[4 : len(data) // 2] = bytes(len(data) // 2 - 4)
    path.write_bytes(data)
    with pytest.raises(ParquetError, match=r"2\.parquet: row group \d+ cannot be read"):
        epoch(tmp_path)


class Plain(pa.ExtensionType):
    """A type as a user writes it, with what pyarrow asks for; it has no hash."""

    def __init__(self) -> None:
        super().__init__(pa.int64(), "tests.plain")

    def __arrow_ext_serialize__(self) -> bytes:
        return b""

    @classmethod
    def __arrow_ext_deserialize__(cls, storage: pa.DataType, serialized: bytes) -> Plain:
        return cls()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plain)


@pytest.mark.parametrize("shuffle", [True, False])
def test_types_of_users_and_tensors_with_null_items_in_some_row_groups(tmp_path: Path, shuffle: bool) -> None:
    kind = pa.fixed_shape_tensor(pa.float32(), (2, 2))
    items = [[float(i), None if i == 70 else 1.0, 2.0, 3.0] for i in range(100)]
    table = pa.table(
        {
            "id": range(100),
            "plain": pa.ExtensionArray.from_storage(Plain(), pa.array(range(100), pa.int64())),
            "tensor": pa.ExtensionArray.from_storage(kind, pa.array(items, pa.list_(pa.float32(), 4))),
        }
    )
    pa.register_extension_type(Plain())
    try:
        pq.write_table(table, tmp_path / "a.parquet", row_group_size=25)
        found = epoch(tmp_path, batch_size=20, shuffle=shuffle)
    finally:
        pa.unregister_extension_type("tests.plain")
    assert found.sort_by("id")["tensor"].combine_chunks().storage.to_pylist() == items
    assert found["plain"].type == Plain()


def test_in_file_order_a_rank_decodes_no_row_groups_of_others(tmp_path: Path) -> None:
    batch_size = 2_500
    pq.write_table(pa.table({"id": range(64_000)}), tmp_path / "a.parquet", row_group_size=1_000)
    batches = pqcache.Cache(tmp_path).batches(batch_size=batch_size, shuffle=False, num_replicas=8, rank=3)
    found = [i for batch in batches for i in batch["id"].to_pylist()]
    wanted = [i for i in range(64_000) if i // batch_size % 8 == 3]
    assert found[: len(wanted)] == wanted, "the last round may be padded"
    assert batches.stats().total.row_groups <= len({i // 1_000 for i in found})
