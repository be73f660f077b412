"""The reader without torch: what comes out is what the order says, for every type and any files."""

from __future__ import annotations

import decimal
import gc
import os
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import date, datetime, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import pqcache
from pqcache.errors import ParquetError, UsageError
from pqcache.reader import columns as columns_module
from pqcache.reader.batch_layout import Layout
from pqcache.reader.columns import (
    Column,
    as_typed,
    bytes_of_views,
    compact,
    cut,
    form_of,
    hold,
    is_views,
    join,
    take,
    to_arrow,
)
from pqcache.reader.epoch import batches as epoch_batches
from pqcache.reader.epoch import record_batches
from pqcache.reader.memory_budget import Room, fit, room_for, window_for
from pqcache.reader.open import open_data
from pqcache.reader.order.order import Order, Part
from pqcache.reader.read_plan import View, view_of
from pqcache.reader.row_group_reader import RowGroups
from pqcache.reader.shuffle import gather as blocks_module
from pqcache.reader.shuffle.gather import Frame, gather_long, packed_together
from pqcache.reader.shuffle.scatter import Cards, Source, dealt_cards
from pqcache.system.buffer_pool import Arena, BufferPool


def everything(first: int, rows: int) -> pa.Table:
    """Return a column of every type that Parquet has, with nulls, empties and nesting."""
    ids = range(first, first + rows)
    some = [None if i % 5 == 0 else i for i in ids]
    moment = datetime(2026, 11, 1, tzinfo=timezone.utc)
    columns: dict[str, Any] = {"id": pa.array(ids, pa.int64())}
    for kind in (pa.int8(), pa.uint8(), pa.int16(), pa.uint16(), pa.int32(), pa.uint32(), pa.uint64()):
        columns[str(kind)] = pa.array([i % 100 for i in ids], kind)
        columns[f"{kind} nulls"] = pa.array([None if i is None else i % 100 for i in some], kind)
    columns["half"] = pa.array([np.float16(i % 100) for i in ids], pa.float16())
    columns["float"] = pa.array([i / 3 for i in ids], pa.float32())
    columns["double nulls"] = pa.array([None if i is None else i / 3 for i in some])
    columns["bool"] = pa.array([i % 3 == 0 for i in ids])
    columns["bool nulls"] = pa.array([None if i is None else i % 3 == 0 for i in some])
    columns["decimal"] = pa.array([decimal.Decimal(i) / 100 for i in ids], pa.decimal128(12, 2))
    columns["big decimal"] = pa.array([decimal.Decimal(i * 10**20) for i in ids], pa.decimal128(38, 0))
    columns["huge decimal"] = pa.array([decimal.Decimal(i) for i in ids], pa.decimal256(60, 5))
    columns["date"] = pa.array([date(2026, 1, 1 + i % 28) for i in ids])
    columns["timestamp"] = pa.array([moment.replace(tzinfo=None) for i in ids], pa.timestamp("us"))
    columns["zoned"] = pa.array([None if i is None else moment for i in some], pa.timestamp("ms", "Asia/Seoul"))
    columns["time"] = pa.array([i * 1000 for i in ids], pa.time32("ms"))
    columns["duration"] = pa.array(list(ids), pa.duration("us"))
    columns["string"] = pa.array(["ü" * (i % 30) for i in ids])
    columns["string nulls"] = pa.array([None if i is None else f"row {i}" for i in some])
    columns["large string"] = pa.array([f"{i}" * (i % 7) for i in ids], pa.large_string())
    columns["binary"] = pa.array([bytes([i % 256]) * (i % 40) for i in ids])
    columns["fixed binary"] = pa.array([i.to_bytes(5, "big") for i in ids], pa.binary(5))
    columns["fixed nulls"] = pa.array([None if i is None else i.to_bytes(16, "big") for i in some], pa.binary(16))
    columns["dictionary"] = pa.array([f"c{i % 4}" for i in ids]).dictionary_encode()
    columns["dictionary nulls"] = pa.array([None if i is None else f"c{i % 4}" for i in some]).dictionary_encode()
    columns["list"] = pa.array([list(range(i % 9)) for i in ids], pa.list_(pa.int32()))
    columns["list nulls"] = pa.array([None if i is None else [float(i)] * (i % 4) for i in some])
    columns["items null"] = pa.array([[None, 1] if i % 50 == 7 else [2] * (i % 3) for i in ids], pa.list_(pa.int8()))
    columns["large list"] = pa.array([[i] * (i % 3) for i in ids], pa.large_list(pa.uint16()))
    columns["list of bool"] = pa.array([[True, False][: i % 3] for i in ids])
    columns["list of string"] = pa.array([[f"{i}", "x"][: i % 3] for i in ids])
    columns["list of list"] = pa.array([[[i], [], [1, 2]][: i % 4] for i in ids])
    columns["fixed list"] = pa.array([[i, i + 1, i + 2] for i in ids], pa.list_(pa.float32(), 3))
    columns["fixed list nulls"] = pa.array([None if i is None else [i, i] for i in some], pa.list_(pa.int16(), 2))
    columns["fixed items null"] = pa.array([[i, None] for i in ids], pa.list_(pa.int16(), 2))
    columns["struct"] = pa.array([{"a": i, "b": {"c": f"{i}"}} for i in ids])
    columns["struct nulls"] = pa.array([None if i is None else {"a": i} for i in some])
    columns["map"] = pa.array([[(f"k{i}", i)] * (i % 3) for i in ids], pa.map_(pa.string(), pa.int64()))
    columns["all null"] = pa.nulls(rows)
    tensors = np.arange(first * 6, (first + rows) * 6, dtype=np.float32).reshape(rows, 2, 3)
    columns["tensor"] = pa.FixedShapeTensorArray.from_numpy_ndarray(tensors)
    return pa.table(columns)


def plain(table: pa.Table) -> pa.Table:
    """Return a table as readers give it: dictionaries decoded, one chunk."""
    decoded = [pc.cast(c, c.type.value_type) if pa.types.is_dictionary(c.type) else c for c in table.columns]
    return pa.table(decoded, names=table.column_names).combine_chunks()


def write(root: Path, tables: dict[str, pa.Table], rows: int) -> Path:
    for path, table in tables.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, root / path, row_group_size=rows)
    return root


def read(
    view: View, order: Order, part: Part | None = None, stay: bool = False, places: int = 0
) -> Iterator[tuple[int, pa.RecordBatch]]:
    if part is None:
        part = Part(total=order.batches(), lanes=order.lanes)
    for index, batch in record_batches(view, order, part.indices(), part.total, Room(2, stay, places)):
        batch.validate(full=True)
        yield index, batch


def view(path: Path, columns: list[str] | None = None, filters: Any = None) -> View:
    return view_of(open_data(path)[0], columns, filters)


@pytest.mark.parametrize("shuffle", [True, False])
def test_every_type_comes_through(tmp_path: Path, shuffle: bool) -> None:
    tables = {f"{n}.parquet": everything(n * 100, 100) for n in range(3)}
    write(tmp_path, tables, rows=30)
    seen = view(tmp_path)
    order = Order(counts=seen.counts, batch_size=37, lanes=2, window=3, shuffle=shuffle)
    batches = [batch for _, batch in read(seen, order)]
    found = pa.Table.from_batches(batches)
    expected = plain(pa.concat_tables(tables.values()))
    order_of = np.argsort(found["id"].to_numpy())
    for name in expected.column_names:
        got = found[name].combine_chunks().take(pa.array(order_of))
        assert got.type == expected[name].type, name
        assert got.to_pylist() == expected[name].to_pylist(), name
    if not shuffle:
        assert found["id"].to_pylist() == list(range(300))


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


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
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
    seen = view(numbers)
    order = Order(
        counts=seen.counts, batch_size=batch_size, lanes=lanes, window=window, seed=3, epoch=epoch, shuffle=shuffle
    )
    firsts = np.concatenate([[0], np.cumsum(seen.counts)])
    ids = pq.read_table(numbers, partitioning=None)["id"].to_numpy()
    total = order.batches()
    if total > 200:
        start = max(start, 1 - 100 / total)
    part = Part(total=total, lanes=lanes, start=int(total * start))
    indices = []
    for index, batch in read(seen, order, part):
        groups, rows = order.batch(index)
        assert batch["id"].to_pylist() == ids[firsts[groups] + rows].tolist()
        for row in batch.slice(0, 3).to_pylist():
            i = row["id"]
            assert row["text"] == f"t{i}"
            assert row["items"] == [i] * (i % 4)
            assert row["part"] in (0, 1, 2)
        indices.append(index)
    assert indices == list(part.indices())


def test_padding_comes_from_other_lanes(numbers: Path) -> None:
    seen = view(numbers, ["id"])
    order = Order(counts=seen.counts, batch_size=300, lanes=6, window=4)
    part = Part(total=order.batches(), lanes=6, ranks=6, rank=5)
    (index, batch), *more = read(seen, order, part)
    assert index == 5
    assert not more
    first = next(b for i, b in read(seen, order) if i == 1)
    assert batch.equals(first)


def test_partition_columns(numbers: Path) -> None:
    seen = view(numbers, ["part", "id"])
    order = Order(counts=seen.counts, batch_size=100)
    found = pa.Table.from_batches([batch for _, batch in read(seen, order)])
    assert found.column_names == ["part", "id"]
    assert found["part"].type == pa.int64()
    sizes = found.group_by("part").aggregate([("id", "count")]).sort_by("part").to_pydict()
    assert sizes["id_count"] == [54, 600, 349]
    only = view(numbers, ["part"])
    found = pa.Table.from_batches([batch for _, batch in read(only, Order(counts=only.counts, batch_size=100))])
    assert found.num_rows == 1003


def test_the_paths_value_wins_and_nulls_are_nulls(tmp_path: Path) -> None:
    write(tmp_path, {"dt=2026-11-01/a.parquet": pa.table({"dt": ["wrong"], "x": [1]})}, 10)
    write(tmp_path, {"dt=__HIVE_DEFAULT_PARTITION__/a.parquet": pa.table({"dt": ["wrong"], "x": [2]})}, 10)
    seen = view(tmp_path)
    (_, batch), *_ = read(seen, Order(counts=seen.counts, batch_size=10, shuffle=False))
    assert batch.to_pydict() == {"x": [1, 2], "dt": ["2026-11-01", None]}


@pytest.mark.parametrize(
    "filters",
    ["part >= 1 and part < 2", [("part", "==", 1)], [[("part", "==", 1)], [("part", "==", 7)]], pc.field("part") == 1],
)
def test_filters_on_partitions(numbers: Path, filters: Any) -> None:
    seen = view(numbers, ["id"], filters)
    assert int(seen.counts.sum()) == 600
    rows = [i for _, b in read(seen, Order(counts=seen.counts, batch_size=64)) for i in b["id"].to_pylist()]
    assert len(set(rows)) == 600


def test_columns_that_are_not_there_are_named(numbers: Path) -> None:
    with pytest.raises(UsageError, match="no column 'nope'"):
        view(numbers, ["nope"])
    with pytest.raises(UsageError, match="twice"):
        view(numbers, ["id", "id"])
    with pytest.raises(UsageError, match="give a list"):
        view(numbers, "id")  # type: ignore[arg-type]


def test_files_of_different_schemas(tmp_path: Path) -> None:
    write(tmp_path, {"a.parquet": pa.table({"x": pa.array([1, 2], pa.int32()), "y": [1.0, 2.0]})}, 10)
    write(tmp_path, {"b.parquet": pa.table({"y": pa.array([3], pa.float32()), "x": pa.array([3], pa.int64())})}, 10)
    write(tmp_path, {"c.parquet": pa.table({"x": pa.array([4], pa.int32()), "z": ["new"], "l": [[1]]})}, 10)
    seen = view(tmp_path)
    table = pa.Table.from_batches([b for _, b in read(seen, Order(counts=seen.counts, batch_size=3, shuffle=False))])
    assert table.to_pydict() == {
        "x": [1, 2, 3, 4],
        "y": [1.0, 2.0, 3.0, None],
        "z": [None, None, None, "new"],
        "l": [None, None, None, [1]],
    }
    shuffled = pa.Table.from_batches([b for _, b in read(seen, Order(counts=seen.counts, batch_size=3))])
    assert shuffled.sort_by("x").to_pydict() == table.to_pydict()


def test_one_file_is_a_dataset(tmp_path: Path) -> None:
    write(tmp_path, {"a.parquet": pa.table({"x": [1, 2, 3]})}, 2)
    seen = view(tmp_path / "a.parquet")
    assert sorted(x for _, b in read(seen, Order(counts=seen.counts, batch_size=2)) for x in b["x"].to_pylist()) == [
        1,
        2,
        3,
    ]


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file"):
        view(tmp_path / "nope")
    with pytest.raises(UsageError, match="no Parquet files"):
        view(tmp_path)
    with pytest.raises(UsageError, match="pqcache sync s3://bucket/x"):
        open_data("s3://bucket/x")


def test_a_file_that_vanished_or_broke_is_named(tmp_path: Path) -> None:
    tables = {f"{n}.parquet": pa.table({"x": list(range(1000)), "s": [f"{i}" for i in range(1000)]}) for n in range(4)}
    write(tmp_path, tables, 100)
    seen = view(tmp_path)
    order = Order(counts=seen.counts, batch_size=64)
    (tmp_path / "2.parquet").rename(tmp_path / "gone")
    with pytest.raises(ParquetError, match=r"2\.parquet: the file is gone"):
        list(read(seen, order))
    data = bytearray((tmp_path / "gone").read_bytes())
    data[4 : len(data) // 2] = bytes(len(data) // 2 - 4)
    (tmp_path / "2.parquet").write_bytes(data)
    with pytest.raises(ParquetError, match=r"2\.parquet: row group \d+ cannot be read"):
        list(read(view(tmp_path), order))
    write(tmp_path, {"2.parquet": pa.table({"x": list(range(700)), "s": ["a"] * 700})}, 100)
    seen = view(tmp_path)
    write(tmp_path, {"2.parquet": pa.table({"x": list(range(350)), "s": ["a"] * 350})}, 50)
    with pytest.raises(ParquetError, match=r"2\.parquet: row group \d+ has 50 rows where the index has 100"):
        list(read(seen, Order(counts=seen.counts, batch_size=64)))


def test_window_follows_memory() -> None:
    sizes = np.full(100, 10 << 20, np.int64)
    windows = [window_for(sizes, memory << 20, 1) for memory in (56, 64, 100, 1000, 100_000)]
    assert windows == sorted(windows)
    assert windows[0] == 1
    assert windows[-1] == 16
    assert window_for(sizes, 400 << 20, 4) == window_for(sizes, 100 << 20, 1)
    assert window_for(sizes, 20 << 20, 1) == 0
    assert window_for(np.zeros(0, np.int64), 1, 1) == 1


def long_rows(first: int, rows: int) -> pa.Table:
    """Return rows of up to 3 KB, some null or empty, beside short ones."""
    images = [None if i % 7 == 0 else os.urandom(i % 3000) for i in range(first, first + rows)]
    return pa.table(
        {"id": range(first, first + rows), "title": [f"the title of row {i}" for i in range(rows)], "image": images}
    )


@pytest.mark.parametrize("codec", ["none", "snappy"])
def test_long_rows_that_stay_where_they_were_decoded_are_the_same(tmp_path: Path, codec: str) -> None:
    for number in range(3):
        table = long_rows(number * 1000, 300)
        pq.write_table(
            table, tmp_path / f"{number}.parquet", row_group_size=80, compression=codec, use_dictionary=False
        )
    seen = view(tmp_path)
    order = Order(counts=seen.counts, batch_size=33, lanes=2, window=4)
    copied = pa.Table.from_batches([batch for _, batch in read(seen, order)])
    stayed = pa.Table.from_batches([batch for _, batch in read(seen, order, stay=True)])
    assert stayed.equals(copied)
    assert stayed.sort_by("id").select(["image"]).equals(pq.read_table(tmp_path).sort_by("id").select(["image"]))


def fixed_rows(first: int, rows: int) -> pa.Table:
    """Return long rows of fixed width: lists of one length, bytes, nulls in some places, and tensors."""
    ids = np.arange(first, first + rows)
    lists = pa.array((ids[:, None] * 1000 + np.arange(130)).astype(np.int32).reshape(-1))
    tensors = np.arange(first * 200, (first + rows) * 200, dtype=np.float32).reshape(rows, 10, 20)
    some = [None if 400 <= i < 410 else bytes([i % 251]) * 513 for i in ids.tolist()]
    return pa.table(
        {
            "id": ids,
            "list": pa.ListArray.from_arrays(pa.array(np.arange(rows + 1, dtype=np.int32) * 130), lists),
            "bytes": pa.array([bytes([i % 256]) * 600 for i in ids.tolist()], pa.binary(600)),
            "some": pa.array(some, pa.binary(513)),
            "tensor": pa.FixedShapeTensorArray.from_numpy_ndarray(tensors),
        }
    )


@pytest.mark.parametrize("places", [0, 1, 3, 40])
@pytest.mark.parametrize("codec", ["none", "snappy"])
@pytest.mark.parametrize("dense", [False, True])
def test_long_rows_of_fixed_width_are_the_same_where_they_stay(
    tmp_path: Path, places: int, codec: str, dense: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    lent = set()

    def borrow(arena: Arena, size: int) -> Any:
        found = real(arena, size)
        lent.update(
            {name for name, some in seen.arenas.items() if some is arena and arena.offset_of(found) is not None}
        )
        return found

    real = Arena.borrow
    monkeypatch.setattr(Arena, "borrow", borrow)
    for number in range(3):
        table = fixed_rows(number * 300, 300)
        pq.write_table(
            table, tmp_path / f"{number}.parquet", row_group_size=70, compression=codec, use_dictionary=False
        )
    seen = view(tmp_path).densified() if dense else view(tmp_path)
    order = Order(counts=seen.counts, batch_size=33, lanes=2, window=4)
    copied = pa.Table.from_batches([batch for _, batch in read(seen, order)])
    for _ in range(2):
        stayed = pa.Table.from_batches([batch for _, batch in read(seen, order, stay=True, places=places)])
        assert stayed.equals(copied)
    assert plain(stayed).sort_by("id").equals(plain(pq.read_table(tmp_path)).sort_by("id"))
    assert lent == (set() if not places else {"bytes", "some", "tensor"} | ({"list"} if dense else set()))
    for arena in seen.arenas.values():
        assert len(arena._free) == arena.count  # all places came back


def test_an_epoch_that_is_stopped_early_gives_its_places_back(tmp_path: Path) -> None:
    pq.write_table(fixed_rows(0, 900), tmp_path / "a.parquet", row_group_size=50, use_dictionary=False)
    seen = view(tmp_path)
    order = Order(counts=seen.counts, batch_size=7, lanes=1, window=4)
    gc.disable()  # which need not come for that
    try:
        for stop in range(12):
            batches = read(seen, order, stay=True, places=12)
            for _ in range(stop % 4 + 1):
                next(batches)
            batches.close()
            del batches
            for _ in range(100):  # its threads end by themselves
                if all(len(arena._free) == arena.count for arena in seen.arenas.values()):
                    break
                time.sleep(0.05)
            assert [len(arena._free) for arena in seen.arenas.values()] == [12] * len(seen.arenas)
    finally:
        gc.enable()


@pytest.mark.parametrize("places", [2, 4])
def test_long_rows_in_an_arena_are_copied_once(places: int, monkeypatch: pytest.MonkeyPatch) -> None:
    copied = []
    real = blocks_module.hand_column
    monkeypatch.setattr(blocks_module, "hand_column", lambda *given: copied.append(given) or real(*given))
    pool = BufferPool()
    arena = Arena(pool, 10 * 600, places)
    form = form_of(pa.field("x", pa.binary(600)))
    rows = np.arange(3 * 10 * 600).astype(np.uint8).reshape(3, 10, 600)
    orders = [np.random.default_rng(run).permutation(10) for run in range(3)]
    hands = []
    for run, values in enumerate(rows):
        held = arena.borrow(6000).reshape(10, 600)
        held[:] = values
        cards = Cards(np.zeros(0, np.uint8), [], 1)
        cards.long[0] = held[2:], orders[run][orders[run] < 8]
        hands.append((cards, 1, 6))
    order = np.random.default_rng(9).permutation(15)
    out = np.empty((15, 600), np.uint8)
    with ThreadPoolExecutor(1) as threads:
        source = Source(
            load=lambda *_: [],
            forms=[form],
            finish=list,
            memory=pool,
            batches=pool,
            threads=threads,
            ahead=1,
            stay=True,
            arenas={"x": arena},
        )
        gather_long(source, hands, order, 0, out)
    expected = [rows[run][2:][orders[run][orders[run] < 8][1:6]] for run in range(3)]
    assert np.array_equal(out, np.concatenate(expected)[order])
    assert len(copied) == (0 if places >= 3 else 3)  # the third one found no place


def test_only_long_rows_stay_and_only_where_there_is_room(tmp_path: Path) -> None:
    write(tmp_path, {"a.parquet": long_rows(1000, 100)}, rows=100)
    seen = view(tmp_path)
    order = np.arange(99, -1, -1)

    def data_of(column: Column) -> list[int]:
        return [buffer.address for buffer in column.values.buffers()[2:]]

    for stay in (False, True):
        with ThreadPoolExecutor(1) as pool:
            source = Source(
                load=seen.load,
                forms=seen.load_forms,
                finish=list,
                memory=BufferPool(),
                batches=BufferPool(),
                threads=pool,
                ahead=1,
                stay=stay,
            )
            loaded = seen.load(0, 0, 100)
            before = {position: data_of(loaded[position]) for position in (1, 2)}
            (cards,) = dealt_cards(source, loaded, [order], [1])
            assert (data_of(cards.columns[2]) == before[2]) is stay
            assert data_of(cards.columns[1]) != before[1]
    sizes = int(seen.sizes.sum())
    assert room_for(seen, 15 * sizes, 1, 1, 16, 2) == Room(2, stay=True, places=8)
    assert room_for(seen, 5 * sizes, 1, 1, 16, 2) == Room(1, stay=True)
    assert not room_for(seen, 5 * sizes - 1, 1, 1, 16, 2).stay
    assert room_for(seen, 6 * sizes, 1, 1, 16, 1).places == 6
    assert not room_for(seen, 6 * sizes - 1, 1, 1, 16, 1).places
    write(tmp_path, {"a.parquet": long_rows(1000, 800)}, rows=100)
    seen = view(tmp_path)
    half = int(seen.sizes.sum()) // 2  # of eight row groups, one lane of two reads four, and a part of a fifth
    enough = half + 5 * int(seen.sizes.max())
    assert room_for(seen, enough, 1, 2, 16, 1).stay
    assert not room_for(seen, enough - 1, 1, 2, 16, 1).stay
    assert not room_for(seen, enough, 1, 1, 16, 1).stay


@pytest.mark.parametrize("narrow", [False, True])
def test_dense_lists_are_read_page_by_page_and_widened_only_where_they_are_narrower(
    tmp_path: Path, narrow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = np.arange(300 * 256, dtype=np.int32).reshape(300, 256) % (60_000 if narrow else 70_000)
    (tmp_path / "lists").mkdir()
    pq.write_table(
        pa.table({"tokens": pa.array(list(numbers), pa.list_(pa.int32()))}), tmp_path / "lists" / "t.parquet"
    )
    pqcache.repartition(tmp_path / "lists", tmp_path / "dense", row_group_size="64KB", dense=["tokens"], narrow=True)
    seen = view(tmp_path / "dense").densified()
    assert seen.stored["tokens"].dtype == np.dtype("<u2" if narrow else "<u4")
    asked: list[str] = []
    with_pyarrow = RowGroups._read

    def noted(self: RowGroups, file: Any, group: int, wanted: list[str], *rows: int) -> pa.Table:
        asked.extend(wanted)
        return with_pyarrow(self, file, group, wanted, *rows)

    monkeypatch.setattr(RowGroups, "_read", noted)
    (column,) = seen.load(0, 0, 20)
    assert not asked
    typed = as_typed(column, BufferPool())
    assert np.array_equal(typed.values.view(np.int32), numbers[:20])
    assert np.shares_memory(typed.values, column.values) is not narrow


def test_views_are_packed_for_several_whole_batches_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = pa.array([bytes([i]) * (i % 30) for i in range(100)])
    column = hold(rows, form_of(pa.field("x", rows.type)))
    source: Any = SimpleNamespace(layout=Layout(()), batches=BufferPool())
    # a batch that began before, whole ones of 20 rows, and one that goes on in the next stretch
    frames = [Frame(source, 20, whole=True) for _ in range(6)]
    pieces = [(frames[0], 15, 0, 5), *((frame, 0, 5 + 20 * i, 25 + 20 * i) for i, frame in enumerate(frames[1:5]))]
    pieces.append((frames[5], 0, 85, 100))
    for most, found in ((1 << 20, [1, 4, 1]), (2 * bytes_of_views(cut(column, 5, 25)), [1, 2, 1, 1, 1]), (1, [1] * 6)):
        monkeypatch.setattr(blocks_module, "_PACKED", most)
        parts = list(packed_together(column, pieces, None))
        assert [len(some) for _, _, some in parts] == found
        assert [piece for _, _, some in parts for piece in some] == pieces
        for first, part, some in parts:
            assert is_views(part) is (some[0][0] in (frames[0], frames[5]))
            assert to_arrow(part).equals(rows.slice(first, some[-1][3] - first))


def test_large_batches_are_packed_one_by_one_into_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks_module, "NEAR", 300)
    monkeypatch.setattr(columns_module, "NEAR", 300)
    rows = pa.array([bytes([i]) * 20 for i in range(100)])
    column = hold(rows, form_of(pa.field("x", rows.type)))
    shared = BufferPool()
    source: Any = SimpleNamespace(layout=Layout(()), batches=BufferPool())
    pieces = [(Frame(source, 25, whole=True), 0, 25 * i, 25 * i + 25) for i in range(4)]
    parts = list(packed_together(column, pieces, shared))
    assert [len(some) for _, _, some in parts] == [1] * 4
    assert len(shared._alive) == 4
    assert all(to_arrow(part).equals(rows.slice(first, 25)) for first, part, _ in parts)
    del parts
    assert sum(map(len, shared._free.values())) == 4


def test_batches_go_when_they_were_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pq.write_table(pa.table({"id": range(4000), "s": ["x" * 30] * 4000}), tmp_path / "a.parquet", row_group_size=200)
    real = View.load

    def slowly(self: View, *args: Any, **how: Any) -> Any:
        time.sleep(0.02)  # what waits for a row group is there before it
        return real(self, *args, **how)

    monkeypatch.setattr(View, "load", slowly)
    seen = view(tmp_path)
    order = Order(counts=seen.counts, batch_size=10, window=4)
    found = epoch_batches(seen, order, range(order.batches()), order.batches(), Room(1))
    used: list[weakref.ref[Any]] = []
    for _, batch in found:
        used.append(weakref.ref(batch))
        del batch
        assert sum(other() is not None for other in used) <= 10  # of the block that is being made
    assert len(used) == 400


def test_workers_spare_memory_where_it_is_scarce(tmp_path: Path) -> None:
    """Batches are the same then, and what was dealt goes block by block."""
    for number in range(4):
        pq.write_table(long_rows(number * 1000, 1000), tmp_path / f"{number}.parquet", row_group_size=500)
    seen = view(tmp_path)
    order = Order(counts=seen.counts, batch_size=60, window=4)
    total = order.batches()
    rows, held = [], []
    for into in (None, BufferPool()):
        before = pa.total_allocated_bytes()
        found = epoch_batches(seen, order, range(total), total, Room(1), into)
        columns = [next(found)[1].columns() for _ in range(total // 2)][-1]
        time.sleep(0.3)  # until nothing more is made for whoever does not ask
        held.append(pa.total_allocated_bytes() - before)
        rows.append([columns, *(batch.columns() for _, batch in found)])
    for usual, spared in zip(*rows, strict=True):
        assert all(to_arrow(spared[name]).equals(to_arrow(usual[name])) for name in usual)
    assert held[1] < 0.9 * held[0]


def test_row_groups_too_large_for_memory_are_read_in_pieces(tmp_path: Path) -> None:
    table = pa.table({"id": range(20_000), "s": [f"{i}" * 10 for i in range(20_000)]})
    write(tmp_path, {"a.parquet": table.slice(0, 9_000), "b.parquet": table.slice(9_000)}, 9_000)
    whole = view(tmp_path)
    memory = int(whole.sizes.max()) * 3
    with pytest.warns(UserWarning, match="read in 3 pieces, which is slow; run 'pqcache repartition'"):
        window, piece = fit(whole, memory, 1, "shop")
    assert (window, piece) == (4, 3_000)
    assert fit(whole, memory * 100, 1) == (16, 0)
    with pytest.raises(UsageError, match=r"shop: a row group takes .* too much .*pqcache repartition"):
        fit(whole, memory // 1000, 1, "shop")
    pieces = whole.in_pieces(piece)
    assert pieces.counts.tolist() == [3_000, 3_000, 3_000, 3_000, 3_000, 3_000, 2_000]
    assert window_for(pieces.sizes, memory, 1) >= 1
    for lanes in (1, 4):
        order = Order(counts=pieces.counts, batch_size=700, lanes=lanes, window=window)
        starts = np.concatenate([[0], np.cumsum(pieces.counts)])
        seen = []
        for index, batch in read(pieces, order):
            groups, rows = order.batch(index)
            assert batch["id"].to_pylist() == (starts[groups] + rows).tolist()
            assert batch["s"][0].as_py() == f"{batch['id'][0]}" * 10
            seen += batch["id"].to_pylist()
        assert sorted(seen) == list(range(20_000))


def test_sizes_see_through_dictionaries(tmp_path: Path) -> None:
    text = "a rather long string that is stored once per row group"
    write(tmp_path, {"a.parquet": pa.table({"s": [text] * 10_000})}, 5_000)
    seen = view(tmp_path)
    assert (seen.sizes >= 5_000 * len(text)).all()


def test_nothing_is_read_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, {f"{n}.parquet": pa.table({"x": list(range(100))}) for n in range(50)}, 10)
    seen = view(tmp_path)
    read_groups = []
    monkeypatch.setattr(
        "pqcache.reader.row_group_reader.RowGroups.read",
        (lambda whole: lambda self, *a: (read_groups.append(a[0]), whole(self, *a))[1])(
            __import__("pqcache.reader.row_group_reader", fromlist=["RowGroups"]).RowGroups.read
        ),
    )
    batches = record_batches(seen, Order(counts=seen.counts, batch_size=8), range(100), 100, Room(1))
    next(batches)
    batches.close()  # type: ignore[attr-defined]
    assert len(read_groups) < 20


def test_views_of_more_than_two_gigabytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns_module, "_MOST_BYTES", 100)
    for kind in (pa.large_string(), pa.large_binary()):
        array = pa.array(["x" * (i % 60) for i in range(50)], kind).slice(3)
        form = form_of(pa.field("c", kind))
        assert to_arrow(hold(array, form)).equals(array)
    lists = pa.array([list(range(i % 9)) for i in range(50)], pa.list_(pa.int64())).slice(7)
    form = form_of(pa.field("c", lists.type))
    column = hold(lists, form)
    assert to_arrow(column).equals(lists)
    order = np.random.default_rng(0).permutation(43)
    assert to_arrow(compact(take(column, order))).equals(lists.take(pa.array(order)))


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_columns_gather_cut_and_join_like_arrow(data: st.DataObject) -> None:
    table = plain(everything(data.draw(st.integers(0, 1000)), 60))
    name = data.draw(st.sampled_from(table.column_names))
    array = table[name].combine_chunks()
    if isinstance(array, pa.ChunkedArray):
        array = array.chunk(0)
    start = data.draw(st.integers(0, 60))
    array = array.slice(start, data.draw(st.integers(0, 60 - start)))
    form = form_of(pa.field(name, array.type))
    column = hold(array, form)
    rows = np.array(data.draw(st.lists(st.integers(0, max(0, len(array) - 1)), max_size=20 * bool(len(array)))), int)
    expected = array.take(pa.array(rows, pa.int64())).to_pylist()
    assert to_arrow(take(column, rows)).to_pylist() == expected
    assert to_arrow(compact(take(column, rows))).to_pylist() == expected
    half = len(rows) // 2
    assert to_arrow(cut(take(column, rows), half, len(rows))).to_pylist() == expected[half:]
    joined = join([take(column, rows), column, cut(column, 0, 0)], form)
    assert to_arrow(joined).to_pylist() == expected + array.to_pylist()


@pytest.mark.parametrize("shared", [None, BufferPool()])
def test_long_rows_are_packed(shared: BufferPool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns_module, "NEAR", 10_000)  # so that they are copied in pieces
    rng = np.random.default_rng(0)
    values = [rng.bytes(int(n)) for n in rng.choice([0, 3, 12, 13, 5000, 20_000], 200)]
    array = pa.array(values).slice(5)
    column = hold(pa.chunked_array([array.slice(0, 100), array.slice(100)]), form_of(pa.field("b", pa.binary())))
    order = rng.permutation(195)
    expected = array.take(pa.array(order))
    assert to_arrow(take(column, order)).equals(expected)
    again = compact(take(column, order))
    assert to_arrow(again).equals(expected)
    assert to_arrow(cut(again, 50, 195)).equals(expected.slice(50))
    assert columns_module.bytes_of_views(again) == sum(map(len, values[5:]))
    whole = Column(column.form, columns_module.packed(again, shared))
    assert shared is None or len(shared._alive) == 1
    assert to_arrow(cut(whole, 20, 60)).equals(expected.slice(20, 40))


def test_memory_goes_round() -> None:
    pool = BufferPool()
    first = pool.borrow(100_000)
    at = first.ctypes.data
    part = first[10:20].view(np.uint16)
    del first
    assert pool.borrow(100_000).ctypes.data != at, "a part of it is in use"
    del part
    assert pool.borrow(90_000).ctypes.data == at
    assert pool.borrow(10_000).ctypes.data != at, "too large for this"


def test_readers_stop_when_told(numbers: Path) -> None:
    seen = view(numbers)
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    for _ in range(5):
        batches = record_batches(seen, Order(counts=seen.counts, batch_size=10), range(100), 101, Room(2))
        next(batches)
        batches.close()  # type: ignore[attr-defined]
    with ThreadPoolExecutor(1):
        pass
    if before:
        assert len(os.listdir("/proc/self/fd")) < before + 40


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
        seen = view(tmp_path)
        order = Order(counts=seen.counts, batch_size=20, shuffle=shuffle)
        found = pa.Table.from_batches([batch for _, batch in read(seen, order)])
    finally:
        pa.unregister_extension_type("tests.plain")
    assert found.sort_by("id")["tensor"].combine_chunks().storage.to_pylist() == items
    assert found["plain"].type == Plain()
