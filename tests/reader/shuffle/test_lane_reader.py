"""A shuffled epoch: the same batches however they are made, memory that is bounded and comes back, clean ends."""

from __future__ import annotations

import gc
import logging
import os
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

import pqcache
from pqcache.reader import epoch as epoch_module
from pqcache.reader.columns import column_data as columns_module
from pqcache.reader.columns import decoded_together as together_module
from pqcache.reader.columns.batch_layout import FinishedBatch, GatheredBatches
from pqcache.reader.columns.column_data import ColumnData, to_arrow
from pqcache.reader.decode_budget import DecodeBudget
from pqcache.reader.epoch import batches as epoch_batches
from pqcache.reader.order.epoch_order import Ints, Lane, Order
from pqcache.reader.packed_plan import pack_plan
from pqcache.reader.packing.pack import Pack
from pqcache.reader.record_batches import record_batches
from pqcache.reader.row_group_loader import RowGroupLoader
from pqcache.reader.row_group_reader import UseColumn
from pqcache.reader.shuffle import gather as gather_module
from pqcache.reader.shuffle import lane_reader as lane_reader_module
from pqcache.reader.shuffle import scatter as scatter_module
from pqcache.reader.shuffle.scatter import ScatteredColumns
from pqcache.system.buffer_pool import Arena, BufferPool
from tests.reader.reading import everything, loader_of, long_rows, plain, read, read_table, write

KEPT = DecodeBudget(threads=2, decoding=2, keep_decoded=True)


class Watched(RowGroupLoader):
    """A loader that counts what it decodes, ``delay`` seconds later."""

    def __init__(self, loader: RowGroupLoader, delay: float = 0) -> None:
        super().__init__(loader.plan)
        self.delay, self.loads = delay, 0
        self._counting = threading.Lock()

    def load_around(
        self, number: int, low: int, high: int, use: UseColumn | None = None, *, arenas: Mapping[str, Arena] = {}
    ) -> tuple[list[ColumnData], Ints | None]:
        with self._counting:
            self.loads += 1
            loads = self.loads
        self.before(loads)
        return super().load_around(number, low, high, use, arenas=arenas)

    def before(self, loads: int) -> None:
        """Wait before the row group that is decoded as the ``loads``-th one."""
        time.sleep(self.delay)


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


def all_slots_are_free(arena: Arena) -> bool:
    slots = [arena.borrow(arena.size) for _ in range(arena.count)]
    return all(arena.offset_of(slot) is not None for slot in slots)


@pytest.mark.parametrize("codec", ["none", "snappy"])
def test_long_rows_are_the_same_where_they_are_kept_as_decoded(tmp_path: Path, codec: str) -> None:
    tables = {f"{number}.parquet": long_rows(number * 1000, 300) for number in range(3)}
    write(tmp_path, tables, rows=80, compression=codec, use_dictionary=False)
    loader = loader_of(tmp_path)
    order = Order(counts=loader.plan.counts, batch_size=33, lanes=2, window=4)
    copied = read_table(loader, order)
    assert read_table(loader, order, KEPT).equals(copied)
    assert copied.sort_by("id").select(["image"]).equals(pq.read_table(tmp_path).sort_by("id").select(["image"]))


@pytest.mark.parametrize("slots", [0, 1, 3, 40])
@pytest.mark.parametrize("codec", ["none", "snappy"])
@pytest.mark.parametrize("dense", [False, True])
def test_long_rows_of_fixed_width_are_the_same_in_an_arena(tmp_path: Path, slots: int, codec: str, dense: bool) -> None:
    tables = {f"{number}.parquet": fixed_rows(number * 300, 300) for number in range(3)}
    write(tmp_path, tables, rows=70, compression=codec, use_dictionary=False)
    loader = loader_of(tmp_path, dense=dense)
    order = Order(counts=loader.plan.counts, batch_size=33, lanes=2, window=4)
    copied = read_table(loader, order)
    arenas = loader.arenas_for(slots)
    assert set(arenas) == (set() if not slots else {"bytes", "some", "tensor"} | ({"list"} if dense else set()))
    for arena in arenas.values():
        arena.buffer[:] = 0
    for _ in range(2):
        assert read_table(loader, order, replace(KEPT, arena_slots=slots)).equals(copied)
    at_once = replace(KEPT, arena_slots=slots, row_group_bytes=70_000, stretch_bytes=200_000)
    assert read_table(loader, order, at_once).equals(copied), "blocks of several steps are gathered by one call"
    assert plain(copied).sort_by("id").equals(plain(pq.read_table(tmp_path)).sort_by("id"))
    assert all(arena.buffer.any() for arena in arenas.values()), "rows were decoded into it"
    assert all(map(all_slots_are_free, arenas.values()))


def test_an_epoch_that_is_stopped_early_frees_its_memory(tmp_path: Path) -> None:
    pq.write_table(fixed_rows(0, 900), tmp_path / "a.parquet", row_group_size=50, use_dictionary=False)
    loader = loader_of(tmp_path)
    order = Order(counts=loader.plan.counts, batch_size=7, lanes=1, window=4)
    gc.disable()  # it must not be needed for that
    try:
        for stop in range(12):
            batches = record_batches(loader, order, range(100), 100, replace(KEPT, arena_slots=12))
            for _ in range(stop % 4 + 1):
                next(batches)
            batches.close()
            del batches
            for _ in range(100):  # its threads end by themselves
                if all(map(all_slots_are_free, loader.arenas.values())):
                    break
                time.sleep(0.05)
            assert loader.arenas
            assert all(map(all_slots_are_free, loader.arenas.values()))
    finally:
        gc.enable()


def test_epochs_that_are_stopped_early_close_their_files(tmp_path: Path) -> None:
    write(tmp_path, {f"{n}.parquet": long_rows(n * 100, 100) for n in range(10)}, rows=20)
    loader = loader_of(tmp_path)
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    for _ in range(5):
        batches = record_batches(
            loader,
            Order(counts=loader.plan.counts, batch_size=10),
            range(100),
            100,
            DecodeBudget(threads=2, decoding=2),
        )
        next(batches)
        batches.close()
    if before:
        assert len(os.listdir("/proc/self/fd")) < before + 40


@pytest.mark.parametrize("narrow", [False, True])
def test_dense_lists_are_read_from_their_pages(tmp_path: Path, narrow: bool, caplog: pytest.LogCaptureFixture) -> None:
    numbers = np.arange(300 * 256, dtype=np.int32).reshape(300, 256) % (60_000 if narrow else 70_000)
    (tmp_path / "lists").mkdir()
    table = pa.table({"tokens": pa.array(list(numbers), pa.list_(pa.int32()))})
    pq.write_table(table, tmp_path / "lists" / "t.parquet")
    pqcache.repartition(tmp_path / "lists", tmp_path / "dense", row_group_size="64KB", dense=["tokens"], narrow=True)
    with caplog.at_level(logging.DEBUG, "pqcache.reader"):
        loader = loader_of(tmp_path / "dense", dense=True)
        assert loader.plan.stored["tokens"].dtype == np.dtype("<u2" if narrow else "<u4")
        found = read_table(loader, Order(counts=loader.plan.counts, batch_size=50, shuffle=False))
    assert found["tokens"].to_pylist() == numbers.tolist()
    assert "is read by pyarrow" not in caplog.text


_STORED = {  # the type of a list's numbers, the most of them, and how they are stored
    "as narrower numbers": ("int32", 65_535, "uint16"),
    "as much narrower numbers": ("int64", 65_535, "uint16"),
    "with the same bits": ("int32", 2**31 - 1, "uint32"),
    "in short rows": ("int32", 255, "uint8"),
}


@pytest.mark.parametrize("kind", _STORED)
@pytest.mark.parametrize("nulls", [False, True])
@pytest.mark.parametrize(
    "budget",
    [
        DecodeBudget(threads=2, decoding=2),
        KEPT,
        replace(KEPT, arena_slots=2),
        replace(KEPT, arena_slots=40, stretch_bytes=1 << 20),
    ],
)
def test_dense_rows_become_numbers_of_their_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, nulls: bool, budget: DecodeBudget
) -> None:
    monkeypatch.setattr(gather_module, "NEAR", 2000)  # a few rows at a time
    item, most, stored = _STORED[kind]
    numbers = np.random.default_rng(1).integers(0, most, (900, 300), item, endpoint=True)
    table = pa.table({"id": range(900), "tokens": pa.array(list(numbers), pa.list_(pa.type_for_alias(item)))})
    write(tmp_path / "lists", {"t.parquet": table}, rows=100)
    pqcache.repartition(tmp_path / "lists", tmp_path / "dense", row_group_size="40KB", dense=["tokens"], narrow=True)
    if nulls:  # pqcache writes none, but others may who keep a file's metadata
        table = table.set_column(1, "tokens", _with_nulls(table))
        for path in (tmp_path / "dense").rglob("*.parquet"):
            rows = pq.read_table(path)
            pq.write_table(rows.set_column(1, rows.schema.field("tokens"), _with_nulls(rows)), path, row_group_size=30)
    loader = loader_of(tmp_path / "dense", dense=True)
    assert loader.plan.stored["tokens"].dtype == stored
    order = Order(counts=loader.plan.counts, batch_size=33, lanes=2, window=4)
    total = order.batches()
    for into in (None, BufferPool()):
        found: list[dict[str, Any]] = []
        for _, batch in epoch_batches(loader, order, range(total), total, budget, into):
            columns = {name: to_arrow(column) for name, column in batch.columns().items()}
            found += pa.table({name: columns[name] for name in table.column_names}).to_pylist()
        assert len(found) >= 900
        assert {row["id"]: row for row in found} == {row["id"]: row for row in table.to_pylist()}


def _with_nulls(table: pa.Table) -> pa.ChunkedArray:
    return pc.if_else(pc.equal(pc.divide(table["id"], 10), 40), None, table["tokens"])


def test_columns_that_are_not_read_from_their_pages_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [bytes([i]) * 600 for i in range(100)]
    for number, kind in enumerate((pa.binary(600), pa.binary())):
        table = pa.table({"x": pa.array(rows, kind)})
        pq.write_table(table, tmp_path / f"{number}.parquet", compression="brotli" if number else "none")
    loader = loader_of(tmp_path)
    with caplog.at_level(logging.DEBUG, "pqcache.reader"):
        found = read_table(loader, Order(counts=loader.plan.counts, batch_size=50, shuffle=False))
    assert found["x"].to_pylist() == rows * 2
    assert any("'x' is read by pyarrow" in message for message in caplog.messages)


@pytest.mark.parametrize("row_group_bytes", [0, 2000])  # gathered block by block, and many at once
@pytest.mark.parametrize("in_worker", [False, True])
@pytest.mark.parametrize("near", [1, 300, 1 << 20])
@pytest.mark.parametrize("batch_size", [3, 20, 250])
@pytest.mark.parametrize("kept", [0, 1, 10])  # how many times as long texts are that are kept where they were decoded
def test_strings_are_packed_alike_for_one_batch_or_many_at_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    in_worker: bool,
    near: int,
    batch_size: int,
    row_group_bytes: int,
    kept: int,
) -> None:
    monkeypatch.setattr(gather_module, "NEAR", near)
    monkeypatch.setattr(gather_module, "_PACKED", near)
    monkeypatch.setattr(columns_module, "NEAR", near)
    texts = [bytes([i % 256]) * (i % 30) * (kept or 1) for i in range(1000)]
    write(tmp_path, {"a.parquet": pa.table({"id": range(1000), "text": texts})}, rows=100)
    loader = loader_of(tmp_path)
    order = Order(counts=loader.plan.counts, batch_size=batch_size, window=3)
    total = order.batches()
    into = BufferPool() if in_worker else None
    budget, seen = DecodeBudget(threads=1, decoding=1, keep_decoded=kept > 0, row_group_bytes=row_group_bytes), []
    for index, batch in epoch_batches(loader, order, range(total), total, budget, into):
        row_groups, rows = order.batch(index)
        ids = (row_groups * 100 + rows).tolist()
        columns = batch.columns()
        assert to_arrow(columns["id"]).to_pylist() == ids
        assert to_arrow(columns["text"]).to_pylist() == [texts[i] for i in ids]
        seen += ids
    assert sorted(seen) == list(range(1000))


@pytest.mark.parametrize("keep_decoded", [False, True])
@pytest.mark.parametrize("in_worker", [False, True])
@pytest.mark.parametrize("together", [1, 1 << 20])
def test_columns_that_are_scattered_when_they_are_decoded_have_the_same_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_worker: bool, together: int, keep_decoded: bool
) -> None:
    tables = [everything(0, 150), everything(150, 150).drop_columns(["uint16", "string", "struct"])]
    write(tmp_path, {f"{number}.parquet": table for number, table in enumerate(tables)}, rows=70)
    loader, scattered = loader_of(tmp_path), set()
    order = Order(counts=loader.plan.counts, batch_size=17, lanes=2, window=4, seed=5)
    expected = read_table(loader, order)
    add = ScatteredColumns.add_decoded

    def noted(self: ScatteredColumns, position: int, column: ColumnData) -> None:
        scattered.add(position)
        add(self, position, column)

    monkeypatch.setattr(scatter_module, "_SMALL", 0)
    monkeypatch.setattr(together_module, "_TOGETHER", together)
    monkeypatch.setattr(ScatteredColumns, "add_decoded", noted)
    found, total = [], order.batches()
    into = BufferPool() if in_worker else None
    for _, batch in epoch_batches(
        loader, order, range(total), total, DecodeBudget(threads=2, decoding=2, keep_decoded=keep_decoded), into
    ):
        columns = batch.columns()
        found.append(pa.table({name: to_arrow(columns[name]) for name in expected.column_names}))
    assert scattered == set(range(len(loader.forms)))
    assert plain(pa.concat_tables(found)).equals(plain(expected))
    written = plain(pa.concat_tables(tables, promote_options="default"))
    assert plain(expected).sort_by("id").equals(written.select(expected.column_names))


Gathered = list[tuple[range, int]]  # the blocks of each call, and the rows of one


def gathered_blocks(monkeypatch: pytest.MonkeyPatch, path: Path, stretch_bytes: int, **order: int) -> Gathered:
    """Return which blocks are gathered at once in an epoch of 4,000 images of 1,000 bytes, in row groups of 250."""
    images = [bytes([number % 256]) * 1000 for number in range(4000)]
    write(path, {"a.parquet": pa.table({"id": range(4000), "image": images})}, rows=250)
    loader = loader_of(path)
    read_in = Order(counts=loader.plan.counts, batch_size=4, **order)
    monkeypatch.setattr(lane_reader_module, "_TOGETHER", 40_000)
    gathered, gather = [], lane_reader_module.gather

    def noted(context: Any, lane: Lane, blocks: range, *others: Any) -> Any:
        gathered.append((blocks, lane.rows // lane.blocks))
        return gather(context, lane, blocks, *others)

    monkeypatch.setattr(lane_reader_module, "gather", noted)
    budget = DecodeBudget(
        threads=1, decoding=1, keep_decoded=True, row_group_bytes=250_000, stretch_bytes=stretch_bytes
    )
    total, seen = read_in.batches(), []
    for index, batch in epoch_batches(loader, read_in, range(total), total, budget):
        row_groups, rows = read_in.batch(index)
        expected = (row_groups * 250 + rows).tolist()
        assert to_arrow(batch.columns()["id"]).to_pylist() == expected
        assert to_arrow(batch.columns()["image"]).to_pylist() == [images[number] for number in expected]
        seen += expected
    assert sorted(seen) == list(range(4000))
    return gathered


@pytest.mark.parametrize("stretch_bytes", [0, 60_000, 160_000, 1_000_000])
@pytest.mark.parametrize("lanes", [1, 2, 8])
def test_as_much_is_gathered_at_once_as_there_is_memory_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stretch_bytes: int, lanes: int
) -> None:
    gathered = gathered_blocks(monkeypatch, tmp_path, stretch_bytes, lanes=lanes, window=4)
    limit = max(40_000, stretch_bytes)
    assert max((len(blocks) - 1) * 1000 * rows for blocks, rows in gathered) < limit
    if lanes == 1:
        assert max(len(blocks) * 1000 * rows for blocks, rows in gathered) > limit // 2


def test_small_row_groups_are_gathered_several_at_once_but_not_at_the_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gathered = gathered_blocks(monkeypatch, tmp_path, 1_000_000, window=4)
    step = Order(counts=np.full(16, 250), batch_size=4, window=4).blocks_per_step
    counts = [len(blocks) for blocks, _ in gathered]
    assert counts[0] == 1, "the first batch waits for as few row groups as it can"
    assert all(count <= max(1, blocks.start) for count, (blocks, _) in zip(counts, gathered, strict=True))
    assert max(counts) > 2 * step > 10, "a call for each row group would take as long as its rows"


def test_parts_of_a_step_that_are_gathered_by_several_threads_have_about_one_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Order(counts=np.full(16, 250), batch_size=4, window=4).blocks_per_step
    size = 250_000 // step  # of a block
    gathered = gathered_blocks(monkeypatch, tmp_path, (3 * step // 4) * size + 1, window=4)
    counts = {len(blocks) for blocks, _ in gathered if blocks.start >= step and blocks.stop < gathered[-1][0].stop}
    assert counts <= {step // 2, -(-step // 2)}, "not three quarters and a quarter"


@pytest.mark.parametrize("stretches", [3, 9])
def test_stretches_are_gathered_while_the_first_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stretches: int
) -> None:
    """Also where a batch of the stretch before goes on in the first."""
    write(tmp_path, {"a.parquet": pa.table({"x": list(range(3000))})}, 100)
    loader = loader_of(tmp_path)
    order = Order(counts=loader.plan.counts, batch_size=7, window=4)
    together, gather, met = threading.Barrier(stretches), lane_reader_module.gather, set()

    def meeting(context: Any, lane: Lane, blocks: range, *others: Any) -> Any:
        if stretches <= blocks.start < 2 * stretches:
            met.add(blocks)
            together.wait(20)
        return gather(context, lane, blocks, *others)

    monkeypatch.setattr(lane_reader_module, "gather", meeting)
    monkeypatch.setattr(lane_reader_module, "_TOGETHER", 1)
    monkeypatch.setattr(lane_reader_module, "_ROWS_TOGETHER", 1)
    budget = DecodeBudget(threads=stretches, decoding=stretches, stretches=stretches, stretch_bytes=1 << 20)
    total = order.batches()
    batches = record_batches(loader, order, range(total), total, budget)
    assert sorted(row for _, batch in batches for row in batch["x"].to_pylist()) == list(range(3000))
    assert not together.broken
    assert met == {range(block, block + 1) for block in range(stretches, 2 * stretches)}


@pytest.mark.parametrize(("batch_size", "stretch_bytes"), [(64, 100_000), (4, 1000), (4, 0)])
def test_no_more_than_three_stretches_are_on_their_way_where_they_are_larger_than_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch_size: int, stretch_bytes: int
) -> None:
    """A stretch has a batch, and a block, however large these are."""
    images = [bytes([number % 256]) * 10_000 for number in range(1000)]
    write(tmp_path, {"a.parquet": pa.table({"image": images})}, rows=50)
    loader = loader_of(tmp_path)
    order = Order(counts=loader.plan.counts, batch_size=batch_size, window=4)
    most, submit = [0], lane_reader_module.LaneReader._submit_stretch

    def noted(self: lane_reader_module.LaneReader[Any]) -> None:
        submit(self)
        most.append(len(self._ending))

    monkeypatch.setattr(lane_reader_module.LaneReader, "_submit_stretch", noted)
    budget = DecodeBudget(
        threads=16,
        decoding=16,
        keep_decoded=True,
        row_group_bytes=500_000,
        stretch_bytes=stretch_bytes,
        stretches=9,
    )
    for _ in epoch_batches(loader, order, range(order.batches()), order.batches(), budget):
        pass
    assert max(most) == 3


def test_only_what_is_there_and_counted_is_gathered_many_at_once(tmp_path: Path) -> None:
    write(tmp_path, {"a.parquet": pa.table({"tokens": [[1, 2]] * 100})}, rows=100)
    plan, budget = loader_of(tmp_path).plan, DecodeBudget(threads=1, decoding=1, stretch_bytes=1000)
    packed = pack_plan(plan, Pack("tokens", length=8))
    arriving: Any = object()
    stretch_bytes = epoch_module._stretch_bytes
    assert stretch_bytes(budget, plan, None) == 1000
    assert stretch_bytes(budget, plan, arriving) == 0, "batches do not wait for what is not there yet"
    assert stretch_bytes(budget, packed, None) == 0, "ids and padding are made beside what is counted"


def test_of_narrow_rows_not_too_many_are_gathered_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane_reader_module, "_ROWS_TOGETHER", 900)
    gathered = gathered_blocks(monkeypatch, tmp_path, 1 << 30, window=4)
    assert 450 < max(len(blocks) * rows for blocks, rows in gathered) <= 900


def test_batches_are_freed_when_they_are_used(tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": range(4000), "s": ["x" * 30] * 4000}), tmp_path / "a.parquet", row_group_size=200)
    loader = Watched(loader_of(tmp_path), delay=0.02)  # so that batches wait for row groups
    order = Order(counts=loader.plan.counts, batch_size=10, window=4)
    found = epoch_batches(loader, order, range(order.batches()), order.batches(), DecodeBudget(threads=1, decoding=1))
    used: list[weakref.ref[Any]] = []
    for _, batch in found:
        used.append(weakref.ref(batch))
        del batch
        assert sum(other() is not None for other in used) <= 10  # of the block that is being made
    assert len(used) == 400


def test_blocks_are_gathered_beside_the_one_row_group_that_is_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, {f"{n}.parquet": pa.table({"x": list(range(1000))}) for n in range(6)}, 100)
    loader, decoding, beside = Watched(loader_of(tmp_path), delay=0.005), [0], list[int]()
    load, gather = loader.load_around, gather_module.gather

    def noted(*args: Any, **options: Any) -> Any:
        decoding[0] += 1
        assert decoding[0] == 1
        try:
            return load(*args, **options)
        finally:
            decoding[0] -= 1

    def gathered(*args: Any) -> Any:
        time.sleep(0.005)
        beside.append(decoding[0])
        return gather(*args)

    monkeypatch.setattr(loader, "load_around", noted)
    monkeypatch.setattr(lane_reader_module, "gather", gathered)
    order = Order(counts=loader.plan.counts, batch_size=20, window=8)
    total = order.batches()
    rows = [
        batch.rows
        for _, batch in epoch_batches(loader, order, range(total), total, DecodeBudget(threads=2, decoding=1))
    ]
    assert sum(rows) == 6000
    assert any(beside)


@pytest.mark.parametrize(("threads", "decoding", "lanes", "ahead"), [(1, 1, 1, 0), (2, 1, 1, 1), (4, 3, 2, 2)])
def test_row_groups_are_decoded_ahead_where_another_thread_gathers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int, decoding: int, lanes: int, ahead: int
) -> None:
    write(tmp_path, {f"{n}.parquet": pa.table({"x": list(range(100))}) for n in range(6)}, 100)
    loader, seen, context = loader_of(tmp_path), [], epoch_module.ReadContext
    monkeypatch.setattr(epoch_module, "ReadContext", lambda **how: seen.append(how["ahead"]) or context(**how))
    order = Order(counts=loader.plan.counts, batch_size=20, lanes=lanes)
    budget = DecodeBudget(threads=threads, decoding=decoding)
    rows = [batch.rows for _, batch in epoch_batches(loader, order, range(30), 30, budget)]
    assert (sum(rows), seen) == (600, [ahead])


class Held(Watched):
    """A loader that decodes no more than ``free`` row groups until it is released."""

    free = 1

    def __init__(self, loader: RowGroupLoader) -> None:
        super().__init__(loader)
        self.released = threading.Event()

    def before(self, loads: int) -> None:
        assert loads <= self.free or self.released.wait(20), "a batch waits for more row groups"


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("lanes", [1, 3])
def test_the_first_batch_waits_for_one_row_group(tmp_path: Path, threads: int, lanes: int) -> None:
    write(tmp_path, {f"{n}.parquet": pa.table({"x": list(range(400))}) for n in range(6)}, 100)
    loader = Held(loader_of(tmp_path))
    loader.free = threads  # so many are decoded at once
    order = Order(counts=loader.plan.counts, batch_size=20, lanes=lanes, window=16)
    batches = epoch_batches(
        loader, order, range(order.batches()), order.batches(), DecodeBudget(threads=threads, decoding=threads)
    )
    index, _ = next(batches)
    assert (index, loader.released.is_set()) == (0, False)
    loader.released.set()
    assert len(list(batches)) == order.batches() - 1


@pytest.mark.parametrize("threads", [1, 3])
def test_no_more_is_decoded_ahead_than_the_window_and_the_threads_need(tmp_path: Path, threads: int) -> None:
    write(tmp_path, {f"{n}.parquet": pa.table({"x": list(range(100))}) for n in range(50)}, 10)
    loader = Watched(loader_of(tmp_path))
    order = Order(counts=loader.plan.counts, batch_size=8, window=4)
    ahead = 0 if threads == 1 else threads
    most = 5 + ahead  # a batch that goes on in the next of three stretches of a block, and what is ahead
    batches = record_batches(
        loader, order, range(order.batches()), order.batches(), DecodeBudget(threads=threads, decoding=threads)
    )
    for number, _ in batches:
        assert loader.loads <= most + (number + 1) * 8 / 10 + 1
        if number == 100:
            break
        time.sleep(0.001)
    batches.close()


def test_workers_take_less_memory_where_it_is_scarce(tmp_path: Path) -> None:
    """Batches are the same then, and what was scattered is freed block by block."""
    for number in range(4):
        pq.write_table(long_rows(number * 1000, 1000), tmp_path / f"{number}.parquet", row_group_size=500)
    loader = loader_of(tmp_path)
    order = Order(counts=loader.plan.counts, batch_size=60, window=4)
    total = order.batches()
    rows, held = [], []
    for into in (None, BufferPool()):
        before = pa.total_allocated_bytes()
        found = epoch_batches(loader, order, range(total), total, DecodeBudget(threads=1, decoding=1), into)
        columns = [next(found)[1].columns() for _ in range(total // 2)][-1]
        time.sleep(0.3)  # until nothing more is made ahead
        held.append(pa.total_allocated_bytes() - before)
        rows.append([columns, *(batch.columns() for _, batch in found)])
    for usual, low in zip(*rows, strict=True):
        assert all(to_arrow(low[name]).equals(to_arrow(usual[name])) for name in usual)
    assert held[1] < 0.9 * held[0]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_in_the_middle_of_an_epoch_reads_the_same(tmp_path: Path) -> None:
    write(tmp_path, {f"{n}.parquet": long_rows(n * 100, 100) for n in range(10)}, rows=20)
    loader = loader_of(tmp_path)
    order = Order(counts=loader.plan.counts, batch_size=33, window=4)
    expected = read_table(loader, order)
    batches = read(loader, order)
    found = [next(batches)[1] for _ in range(5)]
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = 0 if read_table(loader, order).equals(expected) else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert pa.Table.from_batches([*found, *(batch for _, batch in batches)]).equals(expected)


@pytest.mark.parametrize("batch_size", [3, 7, 1000])
def test_batches_that_end_in_the_same_blocks_are_made_together(tmp_path: Path, batch_size: int) -> None:
    table = everything(0, 400)
    write(tmp_path, {"a.parquet": table}, rows=60)
    loader = loader_of(tmp_path)
    order = Order(counts=loader.plan.counts, batch_size=batch_size, lanes=2, window=3)
    made: list[Sequence[int]] = []

    class Counted(RowGroupLoader):
        def finish(self, memory: BufferPool, batches: GatheredBatches) -> list[FinishedBatch]:
            made.append(batches.sizes)
            return super().finish(memory, batches)

    found = read_table(Counted(loader.plan), order)
    sizes = [
        min(batch_size, lane.rows - first) for lane in lanes_of(order) for first in range(0, lane.rows, batch_size)
    ]
    assert sorted(size for some in made for size in some) == sorted(sizes)
    assert (len(made) < len(sizes) / 2) == (batch_size < 1000)
    places = [order.batch(index) for index in range(order.batches())]
    ids = np.concatenate([row_groups * 60 + rows for row_groups, rows in places])
    assert plain(found).equals(plain(table.take(ids)))


def lanes_of(order: Order) -> list[Lane]:
    return [order.lane(number) for number in range(order.lanes)]
