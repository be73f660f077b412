"""Proofs hold on any ranks and workers and after any resume, and fail if a row is missing or comes twice."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from torch.utils.data import DataLoader

import pqcache
from pqcache import EpochProof, Pack, Sequence, Split
from pqcache.errors import CacheError, UsageError
from pqcache.torch import Loader, Mix, ParquetDataset, Prefetch
from pqcache.torch.batch_groups import ungrouped
from tests.forked_commands import run_pqcache
from tests.torch.conftest import RunRanks, ids_of

pytestmark = pytest.mark.usefixtures("few_cores_are_fine")
ROWS = 700
Options = dict[str, Any]


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of 7 partitions with 100 rows each, in row groups of 30 rows."""
    root = tmp_path_factory.mktemp("proof") / "lake"
    for day in range(ROWS // 100):
        path = root / f"dt={day}" / "a.parquet"
        path.parent.mkdir(parents=True)
        ids = np.arange(100 * day, 100 * (day + 1))
        table = pa.table({"id": ids, "label": ids % 3, "share": (ids % 10) / 4, "text": [f"row {i}" for i in ids]})
        pq.write_table(table, path, row_group_size=30)
    return root


@pytest.fixture(scope="module")
def cache(lake: Path) -> Path:
    found = lake.parent / "cache"
    pqcache.sync(lake, found)
    return found


def loader_of(path: Path, ranks: int = 1, rank: int = 0, workers: int = 0, **options: Any) -> Loader:
    of_ranks: Options = {"num_replicas": ranks, "rank": rank} if ranks > 1 else {}
    dataset = ParquetDataset(path, batch_size=16, seed=3, proof=True, **of_ranks, **options)
    return Loader(dataset, num_workers=workers)


def saved(state: Options) -> Options:
    """A state as it is read from a checkpoint."""
    found: Options = json.loads(json.dumps(state))
    return found


def chosen(options: Options) -> Options:
    """Those that choose rows, which ``prove`` needs."""
    names = ("filters", "split", "sample", "limit", "weights", "balance", "rows")
    return {name: value for name, value in options.items() if name in names}


def _ids(loaders: list[Loader]) -> list[int]:
    return [i for loader in loaders for i in ids_of(loader)]


def _all(loader: Any) -> list[Options]:
    """The proof of a whole epoch."""
    for _ in loader:
        pass
    return [saved(loader.proof())]


def check(proof: EpochProof, ids: list[int], wanted: Counter[int], batches: int | None = None) -> None:
    """Compare a verdict with the ids that came: those wanted, and others that were padded."""
    assert proof.holds, proof
    assert (proof.rows, proof.given) == (sum(wanted.values()), len(ids) - proof.padded)
    more = Counter(ids) - wanted
    assert not wanted - Counter(ids)
    assert sum(more.values()) == proof.padded
    assert batches is None or proof.batches == batches


@pytest.mark.parametrize(("ranks", "workers"), [(1, 2), (2, 0), (3, 0)])
def test_ranks_and_workers(cache: Path, ranks: int, workers: int) -> None:
    loaders = [loader_of(cache, ranks, rank, workers, columns=["id"]) for rank in range(ranks)]
    for _ in range(2):
        ids = _ids(loaders)
    proofs = [saved(loader.proof()) for loader in loaders]
    assert {proof["epoch"] for proof in proofs} == {1}
    proof = pqcache.prove(cache, proofs[::-1])
    check(proof, ids, Counter(range(ROWS)), batches=44)
    assert proof.padded == 16 * (-44 % ranks), "the last round is filled up with the epoch's first batches"
    assert proof.dropped == proof.skipped == 0
    with pytest.raises(UsageError, match="in none of them; give those of all ranks" if ranks > 1 else "there is none"):
        pqcache.prove(cache, proofs[1:])


SELECTIONS: list[Options] = [
    {"filters": "dt in (1, 4)"},
    {"filters": "label = 1 or id < 65"},
    {"filters": "label = 2", "split": Split("id", 0.0, 0.6)},
    {"split": Split(None, 0.3, 1.0)},
    {"sample": 0.3},
    {"limit": 95},
    {"weights": "share"},
    {"balance": "label", "filters": "id < 400"},
    {"shuffle": False, "lanes": 3},
    {"memory": "100MB", "window": 2},
    {"pad": False},
    {"drop_last": True, "filters": "id < 333"},
]


@pytest.mark.parametrize(
    ("options", "of_cache"), [(options, number % 2 == 0) for number, options in enumerate(SELECTIONS)], ids=str
)
def test_selections(lake: Path, cache: Path, options: Options, of_cache: bool) -> None:
    path, ranks = cache if of_cache else lake, 3
    plain = {**options, "drop_last": False, "pad": True}
    wanted = Counter(ids_of(ParquetDataset(path, columns=["id"], batch_size=16, seed=3, **plain)))
    loaders = [loader_of(path, ranks, rank, columns=["id"], **options) for rank in range(ranks)]
    ids = _ids(loaders)
    proof = pqcache.prove(path, [saved(loader.proof()) for loader in loaders], **chosen(options))
    if options.get("drop_last"):
        assert proof.dropped == sum(wanted.values()) - len(ids) > 0
        wanted = Counter(ids)
        assert set(wanted.values()) == {1}
    check(proof, ids, wanted)
    assert proof.weighted == ("weights" in options or "balance" in options)
    assert proof.padded == 0 or "pad" not in options
    if chosen(options):
        with pytest.raises(UsageError, match="give those of the training"):
            pqcache.prove(path, [loader.proof() for loader in loaders])


def test_rows_and_snapshots(lake: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    pqcache.sync(lake, cache, keep=5)
    pqcache.index(cache, keys=["label"])
    rows = pqcache.Cache.open(cache).lookup("label", 1)
    chosen_rows = loader_of(cache, rows=rows)
    check(pqcache.prove(cache, _all(chosen_rows), rows=rows), ids_of(chosen_rows), Counter(range(1, ROWS, 3)))
    loader = loader_of(cache)
    proofs = _all(loader)
    pqcache.repartition(cache, row_group_size="4KB")
    assert pqcache.prove(cache, proofs).holds, "of the older snapshot"
    newer = loader_of(cache)
    with pytest.raises(UsageError, match="it comes from other files"):
        pqcache.prove(cache, [*proofs, *_all(newer)])
    del loader, newer, chosen_rows
    pqcache.gc(cache, keep=1)
    with pytest.raises(CacheError, match="was removed"):
        pqcache.prove(cache, proofs)


@pytest.mark.parametrize(
    ("topologies", "drop_last"), [([(4, 0), (2, 1), (3, 0)], True), ([(3, 0), (1, 2), (1, 0)], False)], ids=str
)
def test_resumed_on_other_ranks(cache: Path, topologies: list[tuple[int, int]], drop_last: bool) -> None:
    """Each rank goes on from rank 0's state alone, and the states of all ranks are kept for the proof."""
    ids, states, begin = [], list[Options](), dict[str, Any]()
    for number, (ranks, workers) in enumerate(topologies):
        is_last, saved_now = number == len(topologies) - 1, []
        for rank in range(ranks):
            loader = loader_of(cache, ranks, rank, workers, columns=["id"], lanes=6, drop_last=drop_last)
            if begin:
                loader.load_state_dict(begin)
            for step, batch in enumerate(loader):
                ids += batch["id"].tolist()
                if step == 4 and not is_last:
                    break
            saved_now.append(saved(loader.state_dict()))
        states += saved_now
        begin = saved_now[0]
    proof = pqcache.prove(cache, states)
    wanted = Counter(range(ROWS))
    if drop_last:
        assert proof.dropped == ROWS - len(set(ids))
        wanted = Counter(set(ids))
    check(proof, ids, wanted)
    assert pqcache.prove(cache, [*states, *states]).holds, "parts that come twice count once"
    first = states[topologies[0][0] - 1]
    rest = [state for state in states if state is not first]
    if topologies[0][0] > 1:
        with pytest.raises(UsageError, match="in none of them"):
            pqcache.prove(cache, rest)


def test_what_a_crash_trained_twice_is_outside(cache: Path) -> None:
    loader = loader_of(cache, columns=["id"])
    batches = iter(loader)
    for _ in range(9):
        next(batches)
    state = saved(loader.state_dict())
    for _ in range(5):
        next(batches)
    crashed = saved(loader.proof())
    resumed = loader_of(cache, columns=["id"])
    resumed.load_state_dict(state)
    proofs = _all(resumed)
    assert pqcache.prove(cache, [*proofs, state]).rows == ROWS
    with pytest.raises(UsageError, match="14 batches, from place 0 on, in several of them; give one lineage"):
        pqcache.prove(cache, [*proofs, crashed])
    with pytest.raises(UsageError, match="30 batches of 44, from place 14 on, in none of them"):
        pqcache.prove(cache, [crashed])
    without = loader_of(cache, columns=["id"])
    without.load_state_dict({name: value for name, value in state.items() if name != "proof"})
    proofs = _all(without)
    with pytest.raises(UsageError, match="9 batches of 44, from place 0 on, in none of them"):
        pqcache.prove(cache, proofs)


def test_states_are_of_the_batch_that_they_name(cache: Path) -> None:
    dataset = ParquetDataset(cache, columns=["id"], batch_size=16, proof=True)
    batches = list(dataset)
    for number in (43, 20, 0):
        state = saved(dataset.state_dict(after=batches[number]))
        rest = ParquetDataset(cache, columns=["id"], batch_size=16, proof=True)
        rest.load_state_dict(state)
        ids = ids_of(batches[: number + 1]) + (ids_of(rest) if number < 43 else [])
        check(pqcache.prove(cache, [saved(rest.proof()) if number < 43 else state]), ids, Counter(range(ROWS)))
    assert dataset.state_dict(after=batches[0])["proof"]["parts"][0][:4] == [0, 1, 1, 0]


def test_skipped_batches_are_counted_apart(cache: Path) -> None:
    loaders = [loader_of(cache, 2, rank, columns=["id"]) for rank in range(2)]
    ids = []
    for loader in loaders:
        batches = iter(loader)
        ids += ids_of([next(batches), next(batches)])
        loader.skip(3)
        ids += ids_of(loader)
    proof = pqcache.prove(cache, [saved(loader.proof()) for loader in loaders])
    assert proof.holds
    assert (proof.skipped, proof.rows, proof.batches) == (6 * 16, ROWS - 6 * 16, 38)
    check(proof, ids, Counter(set(ids)))
    loader = loader_of(cache, columns=["id"])
    loader.skip(2)
    assert pqcache.prove(cache, _all(loader)).skipped == 32
    assert pqcache.prove(cache, _all(loader)).skipped == 0, "the next epoch is complete"


def test_excluded_rows_are_counted_apart(cache: Path) -> None:
    loader = loader_of(cache, columns=["id"], drop_last=True)
    batches = iter(loader)
    ids = [i for _ in range(20) for i in next(batches)["id"].tolist()]
    resumed = loader_of(cache, workers=1, columns=["id"], drop_last=True, exclude={"label": [1]})
    resumed.load_state_dict(saved(loader.state_dict()))
    ids += ids_of(resumed)
    proof = pqcache.prove(cache, [saved(resumed.proof())])
    check(proof, ids, Counter(set(ids)))
    assert proof.excluded > 0
    assert proof.rows + proof.excluded + proof.dropped == ROWS
    assert f"; {proof.excluded} rows excluded; 12 rows dropped" in str(proof)
    ids = ids_of(resumed)
    proof = pqcache.prove(cache, [saved(resumed.proof())])
    assert (proof.epoch, proof.excluded) == (1, 0), "they are no part of the next epoch"
    check(proof, ids, Counter(ids))
    assert proof.rows + proof.dropped == ROWS - ROWS // 3


def changed(change: Callable[[list[Any]], list[Any]]) -> Callable[..., Iterator[Any]]:
    """What a Loader gets from its workers, with a fault."""
    return lambda *arguments: iter(change(list(ungrouped(*arguments))))


FAULTS: dict[str, tuple[Callable[[list[Any]], list[Any]], str]] = {
    "repeated in place of the next": (lambda b: [*b[:7], b[6], *b[8:]], "some are missing and others came twice"),
    "repeated": (lambda b: [*b[:7], b[6], *b[7:]], "16 rows came too often: 716 were given of 700"),
    "a short one in place of another": (lambda b: [*b[:5], b[-1], *b[6:]], "4 of 700 rows are missing"),
    "dropped": (lambda b: [*b[:7], *b[8:]], ""),
    "in another order": (lambda b: [*b[:7], b[8], b[7], *b[9:]], "each of 700 rows was given exactly once"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_batches_lost_and_repeated_on_the_way(cache: Path, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The way from worker to trainer is patched, since no input makes it lose a batch."""
    change, said = FAULTS[fault]
    monkeypatch.setattr("pqcache.torch.loader.ungrouped", changed(change))
    loader = loader_of(cache, workers=1, columns=["id"])
    ids = ids_of(loader)
    is_right = Counter(ids) == Counter(range(ROWS))
    if not said:
        with pytest.raises(UsageError, match=r"1 batch of 44, from place 43 on, in none of them.* were never given"):
            pqcache.prove(cache, [loader.proof()])
        assert not is_right
        return
    proof = pqcache.prove(cache, [loader.proof()])
    assert said in str(proof)
    assert proof.holds == is_right


def test_one_row_twice_in_place_of_another(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gathering of a window is patched, since no input makes it take a wrong row."""
    import pqcache.reader.window as window

    gathered, left = window._gathered, [5]

    def wrong(groups: Any, order: Any, spans: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            order = order.copy()
            order[1] = order[0]
        return gathered(groups, order, spans)

    monkeypatch.setattr(window, "_gathered", wrong)
    loader = loader_of(cache, columns=["id"], memory="1MB")
    assert len(set(ids_of(loader))) == ROWS - 1
    proof = pqcache.prove(cache, [loader.proof()])
    assert not proof.holds
    assert proof.given == proof.rows == ROWS
    assert "some are missing and others came twice" in str(proof)


def test_batches_and_states_are_as_without(cache: Path) -> None:
    """A proof changes neither batches nor, but for itself, states."""
    plain, proving = Loader(ParquetDataset(cache, batch_size=16, seed=3)), loader_of(cache, workers=1)
    for one, other in zip(plain, proving, strict=True):
        assert one.keys() == other.keys() == {"id", "label", "share", "text", "dt"}
        assert one.position.index == other.position.index
        assert one["id"].tolist() == other["id"].tolist()
        assert list(one["text"]) == list(other["text"])
    state, with_proof = plain.state_dict(), proving.state_dict()
    assert "proof" not in state
    assert {name: value for name, value in with_proof.items() if name != "proof"} == state
    plain.load_state_dict(with_proof)
    assert "proof" not in plain.state_dict(), "a dataset without proofs drops them"


def _doubled(batch: Any) -> Any:
    return {"id": batch["id"] * 2}


def _with_generator(batch: Any, generator: Any) -> Any:
    return [batch["id"], generator.random()]


@pytest.mark.parametrize(
    ("transform", "workers"), [(_doubled, 1), (len, 0), (_with_generator, 0)], ids=["dict", "number", "list"]
)
def test_what_a_transform_was_given(cache: Path, workers: int, transform: Any) -> None:
    threads = {"transform_workers": 2} if transform is _with_generator else {}
    loader = loader_of(cache, workers=workers, columns=["id"], transform=transform, **threads)
    results = list(loader)
    assert len(results) == 44
    assert not any(isinstance(result, tuple) for result in results)
    if transform is _doubled:
        assert sorted(ids_of(results)) == list(range(0, 2 * ROWS, 2))
    assert pqcache.prove(cache, [loader.proof()]).holds


def _first_id(batch: Any) -> int:
    return int(batch["id"][0])


@pytest.mark.parametrize(
    "how", [{"collate_fn": _first_id}, {"multiprocessing_context": "forkserver"}], ids=["collate_fn", "forkserver"]
)
def test_loaders(cache: Path, how: Options) -> None:
    dataset = ParquetDataset(cache, columns=["id"], batch_size=16, proof=True)
    loader = Loader(dataset, num_workers=1, **how)
    for epoch in range(2):
        found = list(Prefetch(loader, "cpu"))
        assert isinstance(found[0], int) == ("collate_fn" in how)
        proof = pqcache.prove(cache, [saved(loader.proof())])
        assert (proof.holds, proof.rows, proof.epoch) == (True, ROWS, epoch)


def test_row_groups_in_pieces(tmp_path: Path) -> None:
    rows = 70_000  # a row group has more than the rows that share the random numbers of a hash
    table = pa.table({"id": range(rows), "x": np.random.default_rng(0).random(rows)})
    pq.write_table(table, tmp_path / "a.parquet", max_rows_per_page=1000, write_page_index=True, row_group_size=rows)
    for memory in ("4MB", "1GB"):
        loader = Loader(ParquetDataset(tmp_path, batch_size=1000, memory=memory, proof=True))
        ids = ids_of(loader)
        assert (loader.state_dict()["piece"] > 0) == (memory == "4MB")
        check(pqcache.prove(tmp_path, [loader.proof()]), ids, Counter(range(rows)))


def test_ranks_of_torch_distributed(lake: Path, cache: Path, tmp_path: Path, run_ranks: RunRanks) -> None:
    found = run_ranks([cache] * 2, loader="Loader", batch_size=16, proof=True, stop=22)
    states = [saved(rank["state"]) for rank in found]
    ids = [i for rank in found for batch in rank["ids"] for i in batch]
    check(pqcache.prove(cache, states), ids, Counter(range(ROWS)), batches=44)
    options: Options = {"loader": "Loader", "batch_size": 16, "proof": True}
    begun = [{"state": rank["state"]} for rank in run_ranks([cache] * 2, stop=5, **options)]
    rest = run_ranks([cache] * 2, each=begun, stop=17, **options)
    states = [saved(rank["state"]) for rank in rest]
    assert pqcache.prove(cache, states).holds, "ranks with proofs of their own begin alike"
    shares = [tmp_path / f"share{node}" for node in range(2)]
    for node, share in enumerate(shares):
        pqcache.sync(lake, share, shard=f"{node}/2")
    for rank in run_ranks(shares, loader="Loader", batch_size=16, proof=True):
        assert "holds a node's share; leave it out" in rank["error"]


def test_what_cannot_be_proved(cache: Path) -> None:
    refused: list[Options] = [
        {"batch_size": None},
        {"sequence": Sequence(2, order_by="id")},
        {"pack": Pack("tokens", 8)},
        {"transform": len, "on_error": "skip"},
    ]
    for options in refused:
        with pytest.raises(UsageError, match=r"^proof=True and .*; leave out one of them"):
            ParquetDataset(cache, proof=True, **options)
    proving = ParquetDataset(cache, proof=True, batch_size=16)
    with pytest.raises(UsageError, match="a mix counts its own epochs"):
        Mix({"a": proving})
    with pytest.raises(UsageError, match=r"use pqcache\.torch\.Loader"):
        list(DataLoader(proving, batch_size=None, num_workers=2))
    batches = list(small := ParquetDataset(cache, columns=["id"], batch_size=2, proof=True))
    with pytest.raises(UsageError, match="it only tracks the last 256 batches"):
        small.state_dict(after=batches[0])
    plain = ParquetDataset(cache)
    sources: list[Any] = [plain, Loader(plain)]
    for source in sources:
        with pytest.raises(UsageError, match=r"proof\(\): .*; make it with ParquetDataset\(..., proof=True\)"):
            source.proof()


def damaged(state: Options) -> Iterator[tuple[str, Any, str]]:
    part, proof = state["proof"]["parts"][0], state["proof"]
    yield "no proof", {**state, "proof": None}, "it has no proof; train with ParquetDataset"
    for name, parts in {
        "short": [part[:3]],
        "negative": [[-1, *part[1:]]],
        "rank": [[*part[:3], 7, *part[4:]]],
        "text": [["0", *part[1:]]],
        "sums": [[*part[:7], "xyz"]],
        "number": 7,
    }.items():
        yield name, {**state, "proof": {**proof, "parts": parts}}, "its proof is damaged"
    for name in ("content", "parts", "drop_last"):
        yield name, {**state, "proof": {k: v for k, v in proof.items() if k != name}}, "its proof is damaged"
    yield "list", {**state, "proof": [1]}, "its proof is damaged"
    yield "other files", {**state, "proof": {**proof, "content": "0"}}, "it comes from other files"
    yield "state", [1], "it is not a state of a ParquetDataset"


def test_the_command(cache: Path, tmp_path: Path) -> None:
    loaders = [loader_of(cache, 2, rank, filters="id < 450") for rank in range(2)]
    files = []
    for rank, loader in enumerate(loaders):
        files.append(tmp_path / f"proof-{rank}.json")
        files[-1].write_text(json.dumps(_all(loader)[0]))
    words = ["rows", cache, *files, "--prove", "--filters", "id < 450"]
    done = run_pqcache(*words)
    assert done.returncode == 0
    assert done.stdout.endswith("each of 450 rows was given exactly once, in 29 batches; 16 rows padded\n")
    shown = json.loads(run_pqcache(*words, "--json").stdout)
    assert shown["holds"]
    assert (shown["rows"], shown["padded"], shown["epoch"]) == (450, 16, 0)

    state = json.loads(files[0].read_text())
    part = state["proof"]["parts"][0]
    sums = f"{int(part[7][:16], 16) ^ 1:016x}{part[7][16:]}"
    for rows, text, said in ((part[4], sums, "some are missing"), (part[4] - 1, part[7], "1 of 450 rows are missing")):
        part[4], part[7] = rows, text
        files[0].write_text(json.dumps(state))
        done = run_pqcache(*words)
        assert done.returncode == 1
        assert said in done.stdout
        assert not done.stderr

    def refused(*words: Any) -> str:
        done = run_pqcache(*words)
        assert done.returncode == 2
        assert not done.stdout
        assert done.stderr.startswith("pqcache: error: ")
        assert done.stderr.count("\n") == 1
        return done.stderr

    for name, value, said in damaged(loaders[0].proof()):
        files[0].write_text(json.dumps(value))
        assert said in refused(*words), name
    files[0].write_text("{")
    assert f"{files[0]}: it is not JSON" in refused(*words)
    assert "cannot be read" in refused("rows", cache, "--prove", tmp_path / "none.json")
    assert "proofs: there is none" in refused("rows", cache, "--prove")
    assert "leave out --state" in refused("rows", cache, "--prove", files[1], "--state", files[1])
    assert "give --prove" in refused("rows", cache, files[1], "--state", files[1], "--last", 1)
    assert "no state is given" in refused("rows", cache, "--last", 1)
    other = loader_of(cache, 2, 0, filters="id < 450")
    other.set_epoch(1)
    files[0].write_text(json.dumps(_all(other)[0]))
    assert "it comes from epoch=0, and another from epoch=1" in refused(*words)
