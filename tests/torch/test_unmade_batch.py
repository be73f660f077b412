"""Batches of which a worker sends the arrays: they arrive as those that one process makes."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from pqcache.errors import ParquetError
from pqcache.reader.columns.batch_layout import NumberColumns
from pqcache.reader.packing.pack import Pack
from pqcache.system.buffer_pool import BufferPool
from pqcache.torch import Batch, Loader, ParquetDataset, Ragged, Sequence, tensor_transfer
from pqcache.torch.batch import Position, _reduce_group, _unpacked_group
from pqcache.torch.batch_groups import BatchGroup, GroupSizes
from pqcache.torch.shared_memory import Slot
from pqcache.torch.tensor_transfer import pack, unpack
from pqcache.torch.unmade_batch import PackedArrays, UnmadeBatch

pytestmark = pytest.mark.usefixtures("few_cores_are_fine")

ROWS = 3_000


@pytest.fixture(scope="module")
def all_kinds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table with columns of all kinds; those with names that begin with ``null`` hold nulls."""
    directory = tmp_path_factory.mktemp("kinds")
    rng = np.random.default_rng(5)
    ids = np.arange(ROWS)
    lengths = rng.integers(0, 5, ROWS)
    some = [None if i % 7 == 3 else i for i in ids.tolist()]
    columns: dict[str, Any] = {
        "id": ids,
        "half": ids.astype(np.float16),
        "single": ids.astype(np.float32),
        "double": ids / 3,
        "unsigned": ids.astype(np.uint32),
        "byte": ids.astype(np.int8),
        "flag": ids % 2 == 0,
        "other": -ids,
        "time": pa.array(ids, pa.timestamp("us")),
        "price": pa.array([Decimal(i).scaleb(-2) for i in ids.tolist()], pa.decimal128(9, 2)),
        "name": [f"n{i}" * (i % 4) for i in ids.tolist()],
        "bytes": [bytes([i % 251]) * (i % 3) for i in ids.tolist()],
        "empty": [""] * ROWS,
        "category": pa.array([f"c{i % 5}" for i in ids.tolist()]).dictionary_encode(),
        "dense": pa.array([[i, i + 1, i + 2] for i in ids.tolist()], pa.list_(pa.int32())),
        "fixed": pa.array([[i, i / 2] for i in ids.tolist()], pa.list_(pa.float32(), 2)),
        "ragged": pa.array([[i] * n for i, n in zip(ids.tolist(), lengths, strict=True)], pa.list_(pa.int64())),
        "no_items": pa.array([[]] * ROWS, pa.list_(pa.float32())),
        "nested": pa.array([[[i], [i, i]] for i in ids.tolist()], pa.list_(pa.list_(pa.int16()))),
        "struct": [{"a": i, "b": f"s{i}"} for i in ids.tolist()],
        "null_number": pa.array(some, pa.int64()),
        "null_name": [None if i is None else f"n{i}" for i in some],
    }
    for number, rows in enumerate(np.array_split(ids, 3)):
        part = pa.table(columns).take(rows)
        (directory / f"part={number}").mkdir()
        pq.write_table(part, directory / f"part={number}" / "t.parquet", row_group_size=250)
    return directory


def plain(value: Any) -> Any:
    """Return a column's types, shapes and values."""
    if isinstance(value, Ragged):
        return value.kind, plain(value.values), plain(value.offsets)
    if isinstance(value, dict):
        return {name: plain(inner) for name, inner in value.items()}
    return value.dtype, tuple(value.shape), value.tolist()


def read(path: Path, workers: int, **options: Any) -> Iterator[Batch]:
    return iter(Loader(ParquetDataset(path, seed=3, lanes=2, **options), num_workers=workers, persistent_workers=False))


def columns_of(batches: Iterator[Batch]) -> list[Any]:
    return [(batch.position.index, list(batch), plain(dict(batch))) for batch in batches]


def _columns_without_nulls(path: Path) -> list[str]:
    return [name for name in pq.read_schema(next(path.rglob("*.parquet"))).names if not name.startswith("null")]


@pytest.fixture
def in_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is made into tensors in this process, or in one that is forked from it."""

    def refused(batch: UnmadeBatch) -> Any:
        raise AssertionError(f"the tensors of {list(batch.names)} were made by a worker")

    monkeypatch.setattr(UnmadeBatch, "columns", refused)


@pytest.mark.parametrize("batch_size", [1, 7, 64, 2000])
def test_all_kinds_of_columns(all_kinds: Path, batch_size: int, request: pytest.FixtureRequest) -> None:
    names = [*_columns_without_nulls(all_kinds), "part"]
    expected = columns_of(read(all_kinds, 0, batch_size=batch_size, columns=names))
    request.getfixturevalue("in_workers")
    found = list(read(all_kinds, 2, batch_size=batch_size, columns=names))
    assert {type(batch) for batch in found} == {Batch}
    assert columns_of(iter(found)) == expected


@pytest.mark.parametrize(
    "options",
    [
        {"nulls": "mask"},
        {"nulls": "mask", "columns": ["null_name", "id", "null_number", "name"]},
        {"nulls": {"null_number": -1, "null_name": ""}},
        {"columns": ["id", "name", "ragged", "double"], "sequence": Sequence(4, order_by="id")},
        {"pack": Pack("ragged", 32)},
        {"shuffle": False, "columns": ["id", "name", "part"]},
    ],
    ids=str,
)
def test_masks_fills_sequences_and_packs(all_kinds: Path, options: Any, request: pytest.FixtureRequest) -> None:
    expected = columns_of(read(all_kinds, 0, batch_size=16, **options))
    request.getfixturevalue("in_workers")
    assert columns_of(read(all_kinds, 2, batch_size=16, **options)) == expected


def test_tensors_may_be_changed_in_place(all_kinds: Path) -> None:
    tensors: list[torch.Tensor] = []
    for batch in read(all_kinds, 2, batch_size=100, columns=["id", "other", "double", "dense", "name", "ragged"]):
        for value in batch.values():
            tensors += [value.values, value.offsets] if isinstance(value, Ragged) else [value]
    assert len(tensors) == 8 * ROWS // 100
    for number, tensor in enumerate(tensors):
        tensor.fill_(number % 251)  # of bytes among others
    assert all(bool((tensor == number % 251).all()) for number, tensor in enumerate(tensors))


@pytest.mark.parametrize("lacks", ["shared memory", "a byte for one more receiver"])
def test_batches_that_go_through_the_pipe(all_kinds: Path, lacks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"batch_size": 50, "columns": _columns_without_nulls(all_kinds)}
    expected = columns_of(read(all_kinds, 0, **options))
    if lacks == "shared memory":
        monkeypatch.setattr("pqcache.torch.dataset_reader.worker_pool", BufferPool)
    else:
        monkeypatch.setattr(Slot, "send", lambda slot: None)
    assert columns_of(read(all_kinds, 2, **options)) == expected


def test_an_error_comes_behind_the_batches_before_it(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"id": np.arange(ROWS)}), path, row_group_size=100, use_dictionary=False, compression="lz4")
    last = pq.read_metadata(path).row_group(ROWS // 100 - 1).column(0)
    data = bytearray(path.read_bytes())
    begin = last.data_page_offset
    data[begin + 60 : begin + last.total_compressed_size] = bytes(last.total_compressed_size - 60)
    path.write_bytes(data)
    batches = iter(Loader(ParquetDataset(path, batch_size=10, shuffle=False, window=1), num_workers=1))
    found = []
    with pytest.raises(ParquetError, match=r"t\.parquet"):
        found.extend(batch["id"].tolist() for batch in batches)
    assert [row for rows in found for row in rows] == list(range(len(found) * 10))
    assert found


def test_long_texts_and_lists_are_sent_where_they_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(2)
    ids = range(4_000)
    texts = [f"{i} " * size for i, size in zip(ids, rng.integers(0, 800, len(ids)), strict=True)]
    lists = [[i] * size for i, size in zip(ids, rng.integers(0, 500, len(ids)), strict=True)]
    columns = {"text": texts, "bytes": [text.encode() for text in texts], "list": pa.array(lists, pa.list_(pa.int64()))}
    pq.write_table(pa.table(columns), tmp_path / "t.parquet", row_group_size=1_000)
    reserved = tensor_transfer._Locator._reserved

    def of_few_bytes(locator: Any, source: Any, size: int) -> int:
        assert size < 10_000, "long ones are copied"
        return reserved(locator, source, size)

    expected = columns_of(read(tmp_path, 0, batch_size=1_000))
    monkeypatch.setattr(tensor_transfer._Locator, "_reserved", of_few_bytes)
    assert columns_of(read(tmp_path, 2, batch_size=1_000)) == expected


@pytest.mark.parametrize("factor", [1, 2, 3, 9])
def test_however_many_batches_are_prepared(all_kinds: Path, factor: int, request: pytest.FixtureRequest) -> None:
    options = {"batch_size": 100, "columns": ["id", "name"]}
    expected = columns_of(read(all_kinds, 0, **options))
    request.getfixturevalue("in_workers")
    dataset = ParquetDataset(all_kinds, seed=3, lanes=2, **options)
    assert columns_of(iter(Loader(dataset, num_workers=2, prefetch_factor=factor))) == expected


def test_what_reads_while_a_loader_begins_gets_batches(all_kinds: Path) -> None:
    dataset = ParquetDataset(all_kinds, batch_size=100, columns=["id"])
    dataset.groups = GroupSizes(4)  # as in a thread beside that loader, or in a copy that was pickled meanwhile
    assert {type(batch) for batch in dataset} == {Batch}


def test_a_group_is_packed_at_once() -> None:
    numbers = NumberColumns({"a": None}, np.zeros((1, 3)))  # type: ignore[dict-item]
    unmade = UnmadeBatch(["a"], [numbers], {}, Position())
    packed = _reduce_group(BatchGroup([unmade, Batch({"a": torch.zeros(2)})], 3, 5))
    assert packed[0] is _unpacked_group
    assert [batch["a"].tolist() for batch in _unpacked_group(*packed[1])] == [[0, 0, 0], [0, 0]]


def test_arrays_that_are_not_in_shared_memory_are_copied() -> None:
    numbers = np.arange(12.0).reshape(2, 6)[:, 1:4]
    texts = PackedArrays(np.frombuffer(bytes(range(97, 100)), np.uint8), np.array([0, 1, 1, 3]), "str")
    columns = NumberColumns({"a": None, "b": None}, numbers)  # type: ignore[dict-item]
    unmade = UnmadeBatch(["b", "text", "a"], [columns], {"text": texts}, Position())
    packet = pack([unmade])
    assert packet is not None
    (found,) = unpack(packet)
    assert list(found) == ["b", "text", "a"]
    assert found["a"].tolist() == [1, 2, 3]
    assert found["b"].tolist() == [7, 8, 9]
    assert found["text"].to_list() == ["a", "", "bc"]
    for ragged in (found["text"], unmade.columns()["text"]):
        ragged.values.fill_(0)
    assert texts.values.tolist() == [97, 98, 99]
