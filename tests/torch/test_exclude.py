"""exclude=: rows left out from a state on, by place, by values and by file, in the epoch in progress and after it."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import pqcache
from pqcache import Pack, Sequence, TokenBatches
from pqcache.errors import UsageError
from pqcache.torch import Loader, Mix, ParquetDataset
from tests.torch.conftest import ids_of

pytestmark = pytest.mark.usefixtures("few_cores_are_fine")
ALL = set(range(300))


def write(source: Path, day: int, first: int) -> None:
    path = source / f"dt={day}" / "a.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    ids = pa.array(range(first, first + 100), pa.int64())
    tokens = pa.array([[i] * (1 + i % 7) for i in range(100)], pa.list_(pa.int32()))
    pq.write_table(pa.table({"id": ids, "tokens": tokens, "odd": [i % 2 for i in range(100)]}), path, row_group_size=30)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    for day in range(3):
        write(tmp_path / "lake", day, 100 * day)
    pqcache.sync(tmp_path / "lake", tmp_path / "cache", keep=5)
    return tmp_path / "cache"


def read(cache: Path, **options: Any) -> ParquetDataset:
    options = {"columns": ["id"], "batch_size": 16, "seed": 3, **options}
    return ParquetDataset(cache, **{name: value for name, value in options.items() if value is not ...})


def batches_of(loader: Loader) -> list[list[Any]]:
    return [batch["id"].tolist() for batch in loader]


def saved(loader: Loader) -> Any:
    return json.loads(json.dumps(loader.state_dict()))


def test_by_values_by_file_and_by_place(cache: Path) -> None:
    loader = Loader(read(cache))
    batch = next(iter(loader))
    gone = set(batch["id"].tolist())
    for exclude, expected in (
        ({"id": [5, 107, 999]}, ALL - {5, 107}),
        ({"dt": [1], "id": [5]}, ALL - {5} - set(range(100, 200))),
        ("dt=2/a.parquet", set(range(200))),
        (["dt=2/a.parquet", {"id": [7]}], set(range(200)) - {7}),
        (batch.rows(), ALL - gone),
        (pqcache.rows(cache, loader.state_dict(), 0).selected, ALL - gone),
        (pqcache.last_rows(cache, loader.state_dict(), 1), ALL - gone),
    ):
        dataset = read(cache, exclude=exclude)
        assert sorted(ids_of(Loader(dataset))) == sorted(expected)
        assert len(dataset) == -(-len(expected) // 16)
    opened = pqcache.Cache.open(cache)
    found = [i for part in opened.batches(columns=["id"], exclude={"id": [5]}) for i in part["id"].to_pylist()]
    assert sorted(found) == sorted(ALL - {5})


@pytest.mark.parametrize(("how", "workers"), [({"shuffle": False}, 0), ({"filters": "odd = 1"}, 0), ({"lanes": 4}, 2)])
def test_in_the_epoch_in_progress_batches_get_shorter(
    cache: Path, how: Any, workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    first = Loader(read(cache, **how), num_workers=workers)
    batches = iter(first)
    for _ in range(2):
        next(batches)
    state = saved(first)
    rest = [batch["id"].tolist() for batch in batches]
    gone = {*rest[0], rest[3][2]}
    loader = Loader(read(cache, exclude={"id": sorted(gone)}, **how), num_workers=workers)
    loader.load_state_dict(state)
    found = []
    with caplog.at_level(logging.WARNING, "pqcache.reader"):
        for batch in loader:
            found.append(batch["id"].tolist())
            assert len(batch.rows()) == len(found[-1])
    assert found == [[i for i in batch if i not in gone] for batch in rest]
    assert workers or "has no rows: all are excluded" in caplog.text
    ended = saved(loader)
    whole = {i for i in ALL if i % 2 or "filters" not in how} - gone
    assert sorted(ids_of(loader)) == sorted(whole), "the next epoch does not have them"
    again = Loader(read(cache, **how))  # the state remembers
    again.load_state_dict(ended)
    assert sorted(ids_of(again)) == sorted(whole)


def test_a_state_of_the_epoch_in_progress_goes_on_so(cache: Path) -> None:
    loader = Loader(read(cache, lanes=4))
    next(iter(loader))
    first = saved(loader)
    everything = batches_of(Loader(read(cache, lanes=4)))
    once, twice = set(everything[2][:3]), set(everything[7][:4])
    loader = Loader(read(cache, lanes=4, exclude={"id": sorted(once)}))
    loader.load_state_dict(first)
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    state = saved(loader)
    found: dict[int, list[int]] = {}
    for rank in range(2):
        of_rank = Loader(read(cache, lanes=4, num_replicas=2, rank=rank, exclude={"id": sorted(twice)}))
        of_rank.load_state_dict(state)
        found |= {batch.index: batch["id"].tolist() for batch in of_rank}
        assert all(len(batch.rows()) == len(batch["id"]) for batch in of_rank)
    assert found.keys() >= set(range(4, len(everything)))
    for index, ids in found.items():
        assert ids == [i for i in everything[index % len(everything)] if i not in once | twice]
    assert pqcache.rows(cache, state, 2).read(cache, ["id"])["id"].to_pylist() == [
        i for i in everything[2] if i not in once
    ]
    assert len(pqcache.rows(cache, state, 0, epoch=1)) == 16


def test_sequences_go_whole_and_packs_leave_documents_out(cache: Path) -> None:
    gone = {5, 107}
    sequence = {"sequence": Sequence(3, order_by="id"), "batch_size": 8}
    every = batches_of(Loader(read(cache, **sequence)))
    kept = [[row for row in batch if not gone & set(row)] for batch in every]
    dataset = read(cache, exclude={"id": sorted(gone)}, **sequence)
    rows = sorted(row for batch in batches_of(Loader(dataset)) for row in batch)
    assert rows == sorted(row for batch in kept for row in batch)
    first = Loader(read(cache, **sequence))
    next(iter(first))
    resumed = Loader(read(cache, exclude={"id": sorted(gone)}, **sequence))
    resumed.load_state_dict(first.state_dict())
    assert batches_of(resumed) == kept[1:]
    for pack in (Pack("tokens", length=8), TokenBatches("tokens", tokens_per_batch=16)):
        options = {"columns": ["tokens"], "pack": pack, "batch_size": 4 if isinstance(pack, Pack) else ...}
        tokens = [i for batch in Loader(read(cache, exclude={"id": [5, 6]}, **options)) for i in _tokens(batch)]
        assert (tokens.count(5), tokens.count(6), tokens.count(4)) == (12, 14, 15), "days 1 and 2 have them too"


def _tokens(batch: Any) -> list[int]:
    found: Any = batch["tokens"]
    found = found.values if hasattr(found, "values") and not callable(found.values) else found
    return [int(i) for i in found.reshape(-1).tolist()]


def test_batches_by_tokens_in_the_epoch_in_progress(cache: Path) -> None:
    options = {"columns": ["id", "tokens"], "pack": TokenBatches("tokens", tokens_per_batch=16), "batch_size": ...}
    every = batches_of(Loader(read(cache, **options)))
    first = Loader(read(cache, **options))
    next(iter(first))
    resumed = Loader(read(cache, exclude={"id": every[3]}, **options))
    resumed.load_state_dict(first.state_dict())
    assert batches_of(resumed) == [[] if batch == every[3] else batch for batch in every[1:]]


def test_weights_give_them_none(cache: Path) -> None:
    found = ids_of(Loader(read(cache, weights={"odd": {0: 1.0, 1: 2.0}}, exclude={"id": [1, 2]})))
    assert sorted(found) == sorted([i for i in ALL if i % 2 == 0 and i != 2] + 2 * [i for i in ALL if i % 2 and i != 1])


def test_other_snapshots(cache: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Values hold in any of them, places and files where the file is the same."""
    dataset = read(cache)
    rows = next(iter(Loader(dataset))).rows()
    places = set(rows.read(cache, ["id"])["id"].to_pylist())
    loader = Loader(read(cache, exclude=[rows, {"id": [7]}]))
    assert not set(ids_of(loader)) & {*places, 7}
    write(tmp_path / "lake", 1, 500)
    pqcache.sync(cache)
    with caplog.at_level(logging.WARNING, "pqcache.reader"):
        loader.load_state_dict(loader.state_dict(), snapshot="current")
    assert "lacks 1 file with rows that exclude names: dt=1/a.parquet" in caplog.text
    now = {i for i in ALL if i // 100 != 1} | set(range(500, 600))
    assert sorted(ids_of(loader)) == sorted(now - places - {7})
    assert sorted(ids_of(Loader(read(cache, exclude=rows)))) == sorted(now - places), "rows of another snapshot"


def test_a_mix_keeps_its_rows(cache: Path) -> None:
    def mix(**options: Any) -> Loader:
        return Loader(Mix({"a": read(cache, **options), "b": read(cache, seed=4)}))

    loader = mix(exclude={"id": [5]})
    found = [i for batch in loader if batch.source == "a" for i in batch["id"].tolist()]
    assert sorted(found) == sorted(ALL - {5})
    again = mix()
    again.load_state_dict(saved(loader))
    assert 5 not in [i for batch in again if batch.source == "a" for i in batch["id"].tolist()]
    with pytest.raises(UsageError, match="dataset 'a': exclude: of a mix"):
        mix(exclude={"id": [6]}).load_state_dict(loader.state_dict())


def test_refused(cache: Path, tmp_path: Path) -> None:
    for exclude, reason in (
        ("nosuch.parquet", "is not a file of the dataset"),
        ({"nosuch": [1]}, "no column 'nosuch'"),
        ({"id": 5}, "give a list of values"),
        ({"id": ["x"]}, "the column is int64"),
        ({"id": [b"x"]}, "is no number or text"),
        ({"id": [2**70]}, "the column is int64"),
        ({7: [1]}, "give a list of values"),
        (b"dt=1/a.parquet", "names no rows; give rows as"),
        ({"id": [None]}, "is no number or text"),
        (7, "rows as pqcache.rows or Cache.lookup return them"),
        (
            {"id": range(200_000)},
            "names 200,000 rows and values, at most 100,000 can be; leave",
        ),
    ):
        with pytest.raises(UsageError, match=reason):
            read(cache, exclude=exclude)
    with pytest.warns(UserWarning, match="no row is left by exclude"):
        assert len(read(cache, exclude={"id": range(300)})) == 0
    for of_rows in ({"batch_size": None}, {"columns": ["tokens"], "batch_size": 4, "pack": Pack("tokens", length=8)}):
        first = read(cache, **of_rows)
        next(iter(first))
        with pytest.raises(UsageError, match="give it with a state from the beginning of an epoch"):
            read(cache, exclude={"id": [5]}, **of_rows).load_state_dict(first.state_dict())
    state = {**Loader(read(cache)).state_dict(), "exclude": [[0, 7]]}
    with pytest.raises(UsageError, match="it is not a state of ParquetDataset"):
        read(cache).load_state_dict(state)
    with pytest.raises(UsageError, match="no sound 'exclude'"):
        pqcache.rows(cache, state, 0)
