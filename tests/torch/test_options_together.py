"""Options of the loader that meet: each pair works, or is refused by name."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from torch.utils.data import DataLoader, Subset, random_split

from pqcache import Cache, Pack, TokenBatches, index, repartition, sync
from pqcache.errors import UsageError
from pqcache.torch import Batch, Loader, Mix, ParquetDataset, Split
from pqcache.torch.batch import to_rows

pytestmark = pytest.mark.usefixtures("few_cores_are_fine")

ROWS = 360
WEIGHTS = {"label": {0: 0.5, 1: 2.25, 2: 1}}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("together")
    ids = np.arange(ROWS)
    tokens = pa.array([[int(i)] * (1 + int(i) * 7 % 11) for i in ids], pa.list_(pa.int64()))
    table = pa.table({"id": ids, "label": ids % 3, "tokens": tokens})
    for number in range(3):
        pq.write_table(table.slice(120 * number, 120), root / f"{number}.parquet", row_group_size=30)
    return root


def test_lists_of_names_are_checked_alike(root: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    sync(root, cache)
    calls: list[tuple[str, Callable[[Any], object]]] = [
        ("columns", lambda names: ParquetDataset(root, columns=names)),
        ("columns", lambda names: list(Cache(cache).batches(names))),
        ("columns", lambda names: sync(root, cache, columns=names)),
        ("ragged", lambda names: ParquetDataset(root, ragged=names)),
        ("dense", lambda names: repartition(cache, dense=names)),
        ("fields", lambda names: Pack("tokens", 8, fields=names)),
        ("ids", lambda names: Pack("tokens", 8, ids=names)),
        ("keys", lambda names: index(cache, keys=names)),
    ]
    for option, call in calls:
        for wrong in (True, 7, "tokens", b"tokens", {"tokens": 1}, ["tokens", 1]):
            with pytest.raises(UsageError, match=rf"^{option}=.*: not a list of names; give one, like \['"):
                call(wrong)


def test_any_iterable_of_names_is_a_list_of_them(root: Path, tmp_path: Path) -> None:
    both = ["id", "tokens"]
    for names in (iter(both), tuple(both), np.array(both), dict.fromkeys(both).keys()):
        ds = ParquetDataset(root, columns=names, ragged=iter(["tokens"]), batch_size=8)  # type: ignore[arg-type]
        assert list(next(iter(ds))) == both
    packed = ParquetDataset(root, pack=Pack("tokens", 8, fields=iter(())), columns=iter(["tokens"]), batch_size=2)
    assert next(iter(packed))["tokens"].shape == (2, 8)
    sync(root, tmp_path / "c", columns=iter(both))
    assert [b.schema.names for b in Cache(tmp_path / "c").batches(iter(["id"]), batch_size=ROWS)] == [["id"]]


def test_a_field_of_a_struct_is_no_column(tmp_path: Path) -> None:
    table = pa.table({"meta": [{"lang": "en"}], "a.b": [1]})
    pq.write_table(table, tmp_path / "t.parquet")
    sync(tmp_path, tmp_path.with_name("cache of structs"))
    for columns, message in (
        (["meta.lang"], "no column 'meta.lang'; fields are not read by themselves: take 'meta'$"),
        (["a.b.c"], "no column 'a.b.c'; fields are not read by themselves: take 'a.b'$"),
        (["nope.x"], "no column 'nope.x'; there are: meta, a.b$"),
    ):
        with pytest.raises(UsageError, match=message):
            ParquetDataset(tmp_path, columns=columns)
        with pytest.raises(UsageError, match=message):
            next(Cache(tmp_path.with_name("cache of structs")).batches(columns))


def test_parts_by_number_name_split(root: Path) -> None:
    ds = dataset(root)
    half, _ = random_split(ds, [0.5, 0.5])
    for call in (lambda: ds[0], lambda: half[0], lambda: Subset(ds, [1])[0], lambda: Mix({"a": ds})[0]):
        with pytest.raises(UsageError, match=r"need items by number.*; for a part of its rows pass split=Split"):
            call()
    with pytest.raises(UsageError, match="pass split=Split"):
        list(DataLoader(half, batch_size=2, num_workers=1))


def dataset(root: Path, **options: Any) -> ParquetDataset:
    return ParquetDataset(root, **{"columns": ["id"], "batch_size": 8, "seed": 3, **options})


@pytest.mark.parametrize("option", [{"split": Split("id", 0.2, 0.7)}, {"sample": 0.4}, {"limit": 100}])
def test_chosen_documents_are_packed(root: Path, option: dict[str, Any]) -> None:
    chosen = Counter(i for batch in dataset(root, **option) for i in batch["id"].tolist())
    assert 0 < len(chosen) < ROWS
    wanted = Counter({i: 1 + i * 7 % 11 for i in chosen})
    pack = Pack("tokens", length=16, strategy="best_fit")
    packed = ParquetDataset(root, pack=pack, batch_size=4, seed=3, **option)
    batches = list(packed)
    assert len(batches) == len(packed)
    kept = [batch["tokens"][batch["document_ids"] > 0].tolist() for batch in batches]
    assert Counter(token for tokens in kept for token in tokens) == wanted
    by_tokens = ParquetDataset(root, pack=TokenBatches("tokens", tokens_per_batch=64), seed=3, **option)
    found = Counter(token for batch in by_tokens for row in to_rows(batch["tokens"]) for token in row)
    assert found == wanted


class Decode:
    """Fails for some rows."""

    def __init__(self, bad: set[int]) -> None:
        self.bad = bad

    def __call__(self, batch: Any) -> Any:
        if found := self.bad & set(batch["id"].tolist()):
            raise ValueError(f"bad rows {sorted(found)}")
        return batch


def test_bad_rows_that_come_more_than_once_are_replaced(root: Path) -> None:
    bad = {1, 4, 7, 100}  # of weight 2.25, all of them
    plain = dataset(root, weights=WEIGHTS)
    skipping = dataset(root, weights=WEIGHTS, transform=Decode(bad), on_error="skip")
    for epoch in range(3):
        plain.set_epoch(epoch)
        skipping.set_epoch(epoch)
        assert len(plain) == len(skipping)
        for batch, other in zip(plain, skipping, strict=True):
            ids, found = batch["id"].tolist(), other["id"].tolist()
            assert len(ids) == len(found)
            assert not bad & set(found)
            assert [a for a, b in zip(ids, found, strict=True) if a not in bad and a != b] == []
    failed = [error for error in skipping.errors() if error.epoch == 0]
    plain.set_epoch(0)
    assert len(failed) == sum(i in bad for batch in plain for i in batch["id"].tolist()) >= 8
    for error in failed:
        places = plain.rows_of(0, error.index)
        assert error.file in {places.paths[file] for file in places.files.tolist()}


def resumed(make: Any, steps: list[tuple[int, int | None]]) -> tuple[list[Any], dict[str, Any]]:
    """Return the batches of an epoch that goes on with so many ranks for so many steps, and the last state."""
    state, found = None, []
    for ranks, count in steps:
        states = []
        for rank in range(ranks):
            loader = Loader(make(num_replicas=ranks, rank=rank))
            if state is not None:
                loader.load_state_dict(json.loads(json.dumps(state)))
            for number, batch in enumerate(loader, 1):
                found.append(batch)
                if number == count:
                    break
            states.append(loader.state_dict())
        assert all(one == states[0] for one in states)
        state = states[0]
    assert state is not None
    return found, state


STEPS: list[tuple[int, int | None]] = [(2, 2), (3, 3), (5, None)]


def values_of(batch: Batch) -> Any:
    return batch.source, batch["id"].tolist()


def test_a_changed_mix_goes_on_with_any_ranks(root: Path) -> None:
    def make(weights: dict[str, int], **more: Any) -> Mix:
        parts = {"a": dataset(root, filters="id < 300"), "b": dataset(root, seed=4, batch_size=3)}
        return Mix(parts, weights, epoch_length=34, lanes=4, **more)

    first = resumed(lambda **more: make({"a": 1, "b": 1}, **more), STEPS)
    state = first[1]
    assert state["batch"] == 34
    assert state["divisions"]

    def changed(**more: Any) -> Mix:
        mix = make({"a": 1, "b": 3}, **more)
        mix.load_state_dict(state, changed=True)
        assert mix.epoch == 1
        return mix

    whole = {batch.index: values_of(batch) for batch in changed(num_replicas=1, rank=0)}
    found, _ = resumed(changed, STEPS)
    assert {batch.index for batch in found} >= set(whole)
    assert len({batch.index for batch in found}) == len(found) < len(whole) + 5
    assert all(values_of(batch) == whole[batch.index % len(whole)] for batch in found)
    assert [batch.index for batch in changed(num_replicas=1, rank=0)] == list(range(34))  # in complete lanes again
    seen = [i for batch in first[0] if batch.source == "a" and batch.index < 34 for i in batch["id"].tolist()]
    seen += [i for batch in changed() if batch.source == "a" for i in batch["id"].tolist()]
    assert len(seen) == len(set(seen)) > 136


def test_a_mix_knows_what_was_drawn_with_any_ranks(root: Path) -> None:
    def make(**more: Any) -> Mix:
        parts = {"a": dataset(root), "b": dataset(root, seed=4)}
        return Mix(parts, {"a": 3, "b": 1}, lanes=4, **more)

    found, state = resumed(make, STEPS[:2])
    mix = make(num_replicas=3, rank=0)
    mix.load_state_dict(state)
    drawn, counts = mix.drawn(), Counter(batch.source for batch in found)
    assert drawn == {name: counts[name] / (ROWS // 8) for name in "ab"}
