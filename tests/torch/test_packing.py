"""Packed documents and batches by tokens: what tells documents apart, and which documents and options do not fit."""

from __future__ import annotations

import itertools
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pqcache
from pqcache import Pack, Sequence, TokenBatches
from pqcache.errors import ParquetError, UsageError
from pqcache.reader.packing import batch_ends
from pqcache.reader.selection import selection
from pqcache.torch import Mix, ParquetDataset
from tests.examples import examples

pytestmark = pytest.mark.usefixtures("few_cores_are_fine")

PLACE = 1000  # a token is its document x 1000, and its place in it
STRATEGIES = ("concat", "best_fit")


def write(root: Path, lengths: list[int], rows: int = 40, kind: pa.DataType | None = None) -> Path:
    """Write documents whose tokens tell where they belong, in two files of row groups of ``rows``."""
    documents = [[i * PLACE + k for k in range(n)] for i, n in enumerate(lengths)]
    table = pa.table(
        {
            "id": pa.array(range(len(lengths)), pa.int64()),
            "tokens": pa.array(documents, kind or pa.list_(pa.int64())),
            "labels": pa.array([[t % 97 for t in d] for d in documents], pa.list_(pa.int8())),
        }
    )
    root.mkdir(exist_ok=True)
    half = len(lengths) // 2
    pq.write_table(table[:half], root / "a.parquet", row_group_size=rows)
    pq.write_table(table[half:], root / "b.parquet", row_group_size=rows)
    return root


@pytest.fixture(scope="module")
def lengths() -> list[int]:
    rng = np.random.default_rng(1)
    found = rng.integers(0, 24, 400)
    found[::37] = 90
    found[40:80] = 0  # a row group without a token
    return [int(n) for n in found]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, lengths: list[int]) -> Path:
    return write(tmp_path_factory.mktemp("packing") / "documents", lengths)


def packed(root: Path, strategy: str, **options: Any) -> ParquetDataset:
    pack = Pack("tokens", 32, strategy=strategy, fields=["labels"], padding={"tokens": -1, "labels": -2})  # type: ignore[arg-type]
    return ParquetDataset(root, pack=pack, **{"batch_size": 4, **options})


def tokens_of(lengths: list[int]) -> list[int]:
    return [i * PLACE + k for i, n in enumerate(lengths) for k in range(n)]


@pytest.mark.parametrize("kind", [pa.large_list(pa.int32()), pa.list_(pa.uint32()), pa.list_(pa.float64())])
def test_types_of_lists(tmp_path: Path, kind: pa.DataType) -> None:
    write(tmp_path, [3, 0, 9, 4, 4, 7], rows=2, kind=kind)
    for strategy in STRATEGIES:
        dataset = ParquetDataset(tmp_path, pack=Pack("tokens", 8, strategy=strategy, padding=65_535), batch_size=2)
        found = torch.cat([batch["tokens"].to(torch.int64).reshape(-1) for batch in dataset])
        assert sorted(found[found != 65_535].tolist()) == tokens_of([3, 0, 9, 4, 4, 7])


def test_lists_of_one_length(tmp_path: Path) -> None:
    documents = np.arange(60).reshape(12, 5)
    for name, kind in (("fixed", pa.list_(pa.int32(), 5)), ("lists", pa.list_(pa.int32()))):
        (tmp_path / name).mkdir()
        table = pa.table({"tokens": pa.array(documents.tolist(), kind)})
        pq.write_table(table, tmp_path / name / "a.parquet", row_group_size=6)
    pqcache.repartition(tmp_path / "lists", tmp_path / "dense", row_group_size="1MB", dense=["tokens"], narrow=True)
    for name in ("fixed", "lists", "dense"):
        dataset = ParquetDataset(tmp_path / name, pack=Pack("tokens", 7, padding=-1), batch_size=3)
        found = torch.cat([batch["tokens"].reshape(-1) for batch in dataset])
        assert found.dtype == torch.int32
        assert sorted(found[found >= 0].tolist()) == list(range(60))


def test_ids_of_sequences_of_several_datasets_in_one_batch(root: Path, lengths: list[int]) -> None:
    mix = Mix({name: packed(root, name) for name in STRATEGIES}, within_batch=True, epoch_length="all_exhausted")
    found = []
    for batch in mix:
        assert len(batch["tokens"]) == sum(batch.parts.values())
        starts = torch.nonzero(batch["position_ids"].reshape(-1) == 0).reshape(-1)
        assert batch["cu_seqlens"].tolist() == [*starts.tolist(), batch["tokens"].numel()]
        found += batch["tokens"][batch["document_ids"] > 0].tolist()
    assert set(found) == set(tokens_of(lengths))
    some_ids = ParquetDataset(root, pack=Pack("tokens", 8, ids=["cu_seqlens"]), batch_size=2)
    assert list(next(iter(some_ids))) == ["tokens", "cu_seqlens"]


def test_packed_record_batches_that_make_no_sense(root: Path, tmp_path: Path) -> None:
    pqcache.sync(root, tmp_path / "cache")
    pack, by_tokens = Pack("tokens", 32), TokenBatches("tokens", tokens_per_batch=200)
    for options, message in (
        ({"pack": by_tokens, "batch_size": 3}, "tokens_per_batch= says how large"),
        ({"pack": Pack("tokens", 32, ids=["cu_seqlens"])}, "no column of a record batch"),
        ({"pack": pack, "balance": "id"}, "weights and pack: packing uses each document once"),
        ({"pack": by_tokens, "weights": {"id": {1: 2, ...: 1}}}, "packing uses each document once"),
        ({"pack": pack, "sequence": Sequence(2, order_by="id")}, "both combine several rows"),
        ({"pack": pack, "memory": "3KB"}, "too much for memory"),
    ):
        with pytest.raises(UsageError, match=message):
            pqcache.Cache(tmp_path / "cache").batches(**options)


def test_lengths_are_counted_once(tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pqcache.sync(root, tmp_path / "cache")
    first = [batch["tokens"].tolist() for batch in packed(tmp_path / "cache", "best_fit")]
    # patches what counts, as an epoch reads the same files
    monkeypatch.setattr(selection, "map_row_groups", lambda *_: pytest.fail("counted again"))
    dataset = packed(tmp_path / "cache", "best_fit")
    for one in (dataset, pickle.loads(pickle.dumps(dataset))):
        assert [batch["tokens"].tolist() for batch in one] == first
    monkeypatch.undo()
    for path in (tmp_path / "cache").rglob("_pqcache/counts/*.arrow"):
        path.write_bytes(path.read_bytes()[:-40])
    assert [batch["tokens"].tolist() for batch in packed(tmp_path / "cache", "best_fit")] == first


def test_files_with_other_lengths_than_were_counted_are_refused(tmp_path: Path) -> None:
    pqcache.sync(write(tmp_path / "lake", [3, 5, 8, 2] * 10), tmp_path / "cache")
    packed(tmp_path / "cache", "concat")
    pqcache.sync(write(tmp_path / "lake2", [30, 5, 8, 2] * 10), tmp_path / "other")
    packed(tmp_path / "other", "concat")
    for here in (tmp_path / "cache").rglob("_pqcache/counts/*.arrow"):
        (counts,) = (tmp_path / "other").rglob(here.name)
        here.write_bytes(counts.read_bytes())
    with pytest.raises(ParquetError, match="other lengths than were counted"):
        list(packed(tmp_path / "cache", "concat"))


def test_a_state_belongs_to_its_pack(root: Path) -> None:
    state = packed(root, "concat").state_dict()
    for other in (packed(root, "best_fit"), ParquetDataset(root, columns=["tokens", "labels"], batch_size=4)):
        with pytest.raises(UsageError, match="sequence, pack or weights"):
            other.load_state_dict(state)


def test_documents_that_cannot_be_packed(tmp_path: Path) -> None:
    def make(name: str, tokens: list[Any], labels: list[Any]) -> ParquetDataset:
        (tmp_path / name).mkdir()
        numbers = pa.list_(pa.int32())
        table = pa.table({"tokens": pa.array(tokens, numbers), "labels": pa.array(labels, numbers)})
        pq.write_table(table, tmp_path / name / "a.parquet")
        return ParquetDataset(tmp_path / name, pack=Pack("tokens", 4, fields=["labels"]), batch_size=2)

    with pytest.raises(ParquetError, match=r"'tokens' has documents that are null \(1 in one row group\)"):
        make("null", [[1], None], [[1], [2]])
    with pytest.raises(ParquetError, match="'tokens' has nulls inside its lists"):
        make("inside", [[1, None], [3]], [[1, 1], [2]])
    with pytest.raises(ParquetError, match="a row has 2 items in 'tokens' and 1 in 'labels'"):
        list(make("lengths", [[1, 2], [3]], [[1], [2]]))
    with pytest.raises(ParquetError, match="'labels' has documents that are null"):
        list(make("label", [[1, 2], []], [[1, 2], None]))
    with pytest.warns(UserWarning, match="no document has a token"):
        assert list(make("empty", [[], []], [[], []])) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pack": Pack("words", 8)}, "no column 'words'"),
        ({"pack": Pack("id", 8)}, "'id' is int64"),
        ({"pack": Pack("tokens", 8, fields=["id"])}, "'id' is int64"),
        ({"pack": Pack("labels", 8, padding=300)}, "padding=300 is not a valid value for 'labels', which is int8"),
        ({"pack": Pack("tokens", 8), "columns": ["id", "tokens"]}, "with pack= they are tokens"),
        ({"pack": Pack("tokens", 8), "batch_size": None}, "packed sequences come in batches"),
        ({"pack": Pack("tokens", 8), "nulls": "mask"}, "null documents cannot be packed"),
        ({"pack": Pack("tokens", 8), "ragged": ["tokens"]}, "packed lists are tensors"),
        ({"pack": "tokens"}, "give a Pack"),
    ],
)
def test_options_that_do_not_fit(root: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ParquetDataset(root, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 0}, "length=0"),
        ({"length": True}, "length=True"),
        ({"length": 8, "strategy": "best"}, "strategy='best'"),
        ({"length": 8, "fields": "labels"}, "fields='labels'"),
        ({"length": 8, "fields": ["tokens"]}, "duplicate column"),
        ({"length": 8, "ids": True}, "ids=True: not a list of names"),
        ({"length": 8, "ids": ["segment_ids"]}, "ids names 'segment_ids'"),
        ({"length": 8, "fields": ["document_ids"]}, "'document_ids' is a column and one of ids"),
        ({"length": 8, "padding": {"other": 1}}, "padding names 'other'"),
    ],
)
def test_packs_that_make_no_sense(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Pack("tokens", **options)


@settings(max_examples=examples(200), deadline=None)
@given(st.data())
def test_ends_of_batches_by_tokens(data: st.DataObject) -> None:
    budget = data.draw(st.integers(1, 60))
    buckets = data.draw(st.none() | st.lists(st.integers(1, 80), min_size=1, max_size=5))
    most = data.draw(st.none() | st.integers(1, 6))
    lengths = sorted(data.draw(st.lists(st.integers(0, budget), max_size=60)))
    spec = TokenBatches("tokens", tokens_per_batch=budget, buckets=buckets, most_rows=most)
    ends = batch_ends(np.array(lengths, np.int64), spec).tolist()
    assert ends[0] == 0
    assert ends[-1] == len(lengths)
    batches = [lengths[a:b] for a, b in itertools.pairwise(ends)]
    for batch in batches:
        assert batch
        assert len(batch) * max(batch) <= budget
        assert most is None or len(batch) <= most
    counts = np.bincount(np.searchsorted(spec.bounds, lengths), minlength=len(spec.bounds))
    assert len(batches) <= sum(-(-int(count) // int(rows)) for count, rows in zip(counts, spec.rows, strict=True))


def test_documents_and_options_that_do_not_fit_batches_by_tokens(tmp_path: Path) -> None:
    def read(budget: int = 64, **options: Any) -> ParquetDataset:
        return ParquetDataset(tmp_path, pack=TokenBatches("tokens", tokens_per_batch=budget), **options)

    pq.write_table(pa.table({"id": [1, 2], "tokens": [[1] * 5, [2] * 40]}), tmp_path / "a.parquet")
    with pytest.raises(UsageError, match=r"documents have more than tokens_per_batch=30 tokens, the longest 40"):
        read(budget=30)
    with pytest.raises(UsageError, match="tokens_per_batch= says how large batches are"):
        read(batch_size=8)
    with pytest.raises(UsageError, match="'tokens' is not among the columns"):
        read(columns=["id"])
    for options in (
        {"tokens_per_batch": 0},
        {"tokens_per_batch": 8, "buckets": []},
        {"tokens_per_batch": 8, "most_rows": 0},
    ):
        with pytest.raises(UsageError, match="pack"):
            TokenBatches("tokens", **options)  # type: ignore[arg-type]
    pq.write_table(pa.table({"tokens": pa.array([[1], None], pa.list_(pa.int32()))}), tmp_path / "a.parquet")
    with pytest.raises(ParquetError, match="'tokens' has documents that are null"):
        read(budget=8)


def test_a_dense_column_is_ragged_in_batches_by_tokens(tmp_path: Path) -> None:
    table = pa.table({"tokens": pa.array([[i, i] for i in range(10)], pa.list_(pa.int32()))})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=5)
    pqcache.sync(tmp_path, tmp_path.parent / "cache_of_two")
    dataset = ParquetDataset(tmp_path.parent / "cache_of_two", pack=TokenBatches("tokens", tokens_per_batch=6))
    batches = list(dataset)
    assert torch.cat([b["tokens"].values for b in batches]).sort().values.tolist() == sorted([*range(10), *range(10)])
    assert sorted(len(b["tokens"]) for b in batches) == [2, 2, 3, 3]
