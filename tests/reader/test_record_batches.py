"""Arrow batches of an epoch: every row of every type once, in the order that ``Order`` says, of any files."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import pqcache
from pqcache.errors import ParquetError, UsageError
from pqcache.reader.epoch import read_record_batches
from pqcache.reader.open_dataset import open_local_dataset
from pqcache.reader.options import BatchOptions
from pqcache.reader.order import EpochShare, Order
from tests.examples import examples
from tests.reader.reading import groups_of, read, read_table, write


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


@pytest.mark.parametrize("shuffle", [True, False])
def test_batches_are_arrays_of_their_own(numbers: Path, shuffle: bool) -> None:
    """Whose lists lie where their offsets say, and which keep no other rows in memory."""
    found = []
    for batch in read_record_batches(numbers, BatchOptions(batch_size=10, shuffle=shuffle, memory=64 << 20)):
        items = batch["items"]
        values, ends = items.flatten().to_pylist(), items.offsets.to_pylist()
        assert [values[low:high] for low, high in pairwise(ends)] == items.to_pylist()
        assert batch.get_total_buffer_size() <= 1.2 * batch.nbytes + 100
        found += batch["id"].to_pylist()
    assert sorted(found) == list(range(1003))


@settings(max_examples=examples(30), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    batch_size=st.sampled_from([1, 3, 32, 100, 999, 5000]),
    lanes=st.sampled_from([1, 2, 4, 12, 60]),
    window=st.integers(1, 17),
    shuffle=st.booleans(),
    start=st.floats(0, 1),
    epoch=st.integers(0, 5),
)
def test_batches_are_what_the_order_says(
    numbers: Path, batch_size: int, lanes: int, window: int, shuffle: bool, start: float, epoch: int
) -> None:
    loader = groups_of(numbers)
    order = Order(
        counts=loader.plan.counts,
        batch_size=batch_size,
        lanes=lanes,
        window=window,
        seed=3,
        epoch=epoch,
        shuffle=shuffle,
    )
    firsts = np.concatenate([[0], np.cumsum(loader.plan.counts)])
    ids = pq.read_table(numbers, partitioning=None)["id"].to_numpy()
    total = order.batches()
    if total > 200:
        start = max(start, 1 - 100 / total)
    share = EpochShare(total=total, lanes=lanes, start=int(total * start))
    indices = []
    for index, batch in read(loader, order, share):
        groups, rows = order.batch(index)
        assert batch["id"].to_pylist() == ids[firsts[groups] + rows].tolist()
        for row in batch.slice(0, 3).to_pylist():
            i = row["id"]
            assert row["text"] == f"t{i}"
            assert row["items"] == [i] * (i % 4)
            assert row["part"] in (0, 1, 2)
        indices.append(index)
    assert indices == list(share.indices())


def test_the_iterator_says_what_reading_takes(numbers: Path) -> None:
    batches = read_record_batches(numbers, BatchOptions(batch_size=50, epoch=3, window=2))
    assert batches.stats().epoch.rows == 0
    first = next(batches)
    begun = batches.stats().epoch
    assert (begun.epoch, begun.seconds is not None) == (3, True)
    assert first.num_rows == 50
    assert begun.rows >= 50
    left = list(batches)
    stats = batches.stats()
    assert (stats.epoch.rows, stats.epoch.batches) == (1003, 21) == (50 + sum(map(len, left)), 1 + len(left))
    assert stats.epoch.row_groups == 14
    assert stats.epoch.waited_seconds is not None
    assert 0 < stats.epoch.waited_seconds <= (stats.epoch.seconds or 0)
    assert batches.stats().epoch.seconds == stats.epoch.seconds  # it has ended
    assert stats.memory_limit_bytes == 2 << 30
    stopped = read_record_batches(numbers, BatchOptions(batch_size=50))
    next(stopped)
    stopped.close()
    assert list(stopped) == []
    assert stopped.stats().epoch.rows < 1003


def test_the_paths_value_wins_and_nulls_are_nulls(tmp_path: Path) -> None:
    write(tmp_path, {"dt=2026-11-01/a.parquet": pa.table({"dt": ["wrong"], "x": [1]})}, 10)
    write(tmp_path, {"dt=__HIVE_DEFAULT_PARTITION__/a.parquet": pa.table({"dt": ["wrong"], "x": [2]})}, 10)
    loader = groups_of(tmp_path)
    (_, batch), *_ = read(loader, Order(counts=loader.plan.counts, batch_size=10, shuffle=False))
    assert batch.to_pydict() == {"x": [1, 2], "dt": ["2026-11-01", None]}


def test_columns_that_are_not_there_are_named(numbers: Path) -> None:
    with pytest.raises(UsageError, match="no column 'nope'"):
        groups_of(numbers, ["nope"])
    with pytest.raises(UsageError, match="twice"):
        groups_of(numbers, ["id", "id"])
    with pytest.raises(UsageError, match="not a list of names"):
        groups_of(numbers, "id")  # type: ignore[arg-type]


def test_files_of_different_schemas(tmp_path: Path) -> None:
    write(tmp_path, {"a.parquet": pa.table({"x": pa.array([1, 2], pa.int32()), "y": [1.0, 2.0]})}, 10)
    write(tmp_path, {"b.parquet": pa.table({"y": pa.array([3], pa.float32()), "x": pa.array([3], pa.int64())})}, 10)
    write(tmp_path, {"c.parquet": pa.table({"x": pa.array([4], pa.int32()), "z": ["new"], "l": [[1]]})}, 10)
    loader = groups_of(tmp_path)
    table = read_table(loader, Order(counts=loader.plan.counts, batch_size=3, shuffle=False))
    assert table.to_pydict() == {
        "x": [1, 2, 3, 4],
        "y": [1.0, 2.0, 3.0, None],
        "z": [None, None, None, "new"],
        "l": [None, None, None, [1]],
    }
    shuffled = read_table(loader, Order(counts=loader.plan.counts, batch_size=3))
    assert shuffled.sort_by("x").to_pydict() == table.to_pydict()


def test_one_file_is_a_dataset(tmp_path: Path) -> None:
    write(tmp_path, {"a.parquet": pa.table({"x": [1, 2, 3]})}, 2)
    loader = groups_of(tmp_path / "a.parquet")
    found = read_table(loader, Order(counts=loader.plan.counts, batch_size=2))
    assert sorted(found["x"].to_pylist()) == [1, 2, 3]


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file"):
        groups_of(tmp_path / "nope")
    with pytest.raises(UsageError, match="no Parquet files"):
        groups_of(tmp_path)
    with pytest.raises(UsageError, match="pqcache sync s3://bucket/x"):
        open_local_dataset("s3://bucket/x")


def test_a_file_that_vanished_or_broke_is_named(tmp_path: Path) -> None:
    tables = {f"{n}.parquet": pa.table({"x": list(range(1000)), "s": [f"{i}" for i in range(1000)]}) for n in range(4)}
    write(tmp_path, tables, 100)
    loader = groups_of(tmp_path)
    order = Order(counts=loader.plan.counts, batch_size=64)
    (tmp_path / "2.parquet").rename(tmp_path / "gone")
    with pytest.raises(ParquetError, match=r"2\.parquet: the file is gone"):
        list(read(loader, order))
    data = bytearray((tmp_path / "gone").read_bytes())
    data[4 : len(data) // 2] = bytes(len(data) // 2 - 4)
    (tmp_path / "2.parquet").write_bytes(data)
    with pytest.raises(ParquetError, match=r"2\.parquet: row group \d+ cannot be read"):
        list(read(groups_of(tmp_path), order))
    write(tmp_path, {"2.parquet": pa.table({"x": list(range(700)), "s": ["a"] * 700})}, 100)
    loader = groups_of(tmp_path)
    write(tmp_path, {"2.parquet": pa.table({"x": list(range(350)), "s": ["a"] * 350})}, 50)
    with pytest.raises(ParquetError, match=r"2\.parquet: was replaced or written to"):
        list(read(loader, Order(counts=loader.plan.counts, batch_size=64)))


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
        loader = groups_of(tmp_path)
        order = Order(counts=loader.plan.counts, batch_size=20, shuffle=shuffle)
        found = read_table(loader, order)
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
