"""A state goes on with the batches that are left, whole, wherever it was taken and whatever goes on with it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pqcache import Pack, SelectedRows, Sequence, Split, TokenBatches
from pqcache.errors import UsageError
from pqcache.torch import Loader, ParquetDataset
from tests.epoch.reading import Parts, Read, Reader
from tests.epoch.tables import FEW, Source

ONE, LOADER, ARROW = Reader(), Reader("Loader"), Reader("Cache.batches")
LANES: dict[str, Any] = {"lanes": 12, "window": 3, "batch_size": 10, "seed": 2}
RAW = {"nulls": "none"}  # columns that are not those of the table
OPTIONS: dict[str, dict[str, Any]] = {
    "all rows": {},
    "in order": {"shuffle": False},
    "filters": {"filters": "label > 0"},
    "weights": {"weights": "weight"},
    "a limit": {"limit": 200, "drop_last": True},
    "sequences": {"sequence": Sequence(3, order_by="ts", max_gap=5, group_by="user"), "batch_size": 4},
    "packed": {"pack": Pack("tokens", 32, fields=["marks"], ids=["position_ids"]), "batch_size": 2},
    "best fit": {"pack": Pack("tokens", 32, strategy="best_fit", ids=["document_ids"]), "batch_size": 2},
    "by tokens": {"pack": TokenBatches("tokens", tokens_per_batch=90), "batch_size": None},
}
SEQUENCES = ["id", "user", "list", "tensor", "day"]


def columns_of(name: str) -> list[str] | None:
    """Return the columns that are read with some options."""
    if name in ("packed", "best fit"):
        return None
    return SEQUENCES if name == "sequences" else ["id", "tokens", "struct"] if name == "by tokens" else FEW


def options_of(name: str) -> dict[str, Any]:
    """Return these options."""
    options = {**LANES, **OPTIONS[name]}
    return {key: value for key, value in options.items() if value is not None}


Steps = list[tuple[int, Reader, int | None]]  # so many ranks read in a way for so many batches each


def run(source: Source, name: str, steps: Steps, epoch: int = 0) -> None:
    """Read an epoch with some of the options in one topology after another."""
    raw = name in ("sequences", "packed", "best fit", "by tokens")
    run_with(source, columns_of(name), options_of(name), steps, epoch, raw)


def run_with(
    source: Source, columns: list[str] | None, options: dict[str, Any], steps: Steps, epoch: int, raw: bool = False
) -> None:
    """Read an epoch in one topology after another, and check all of it."""
    whole = _raw(ARROW if steps[0][1].way == "Cache.batches" else ONE, raw).read(
        source, columns, epoch=epoch, **options
    )[0]
    parts, state = Parts(whole), None
    for ranks, reader, stop in steps:
        begin = 0 if state is None else state["batch"]
        found: list[list[Read]] = []
        states: list[dict[str, Any]] = []
        for rank in range(ranks):
            batches, after = _raw(reader, raw).read(
                source,
                columns,
                ranks=ranks,
                rank=rank,
                epoch=0 if state else epoch,
                state=state,
                stop=stop,
                **options,
            )
            if ranks == 1 and not (state and state.get("divisions")):
                assert [batch.index for batch in batches] == list(range(begin, begin + len(batches)))
            found.append(batches)
            states.append(after)
        assert all(one == states[0] for one in states), "any rank may save it"
        parts.add(found)
        state = states[0]
    parts.check(steps[-1][0], drop_last=options.get("drop_last", False))


def _raw(reader: Reader, raw: bool) -> Reader:
    return Reader(reader.way, reader.workers, "none") if raw else reader


@pytest.mark.parametrize("name", OPTIONS)
def test_any_batch_with_other_ranks(narrow: Source, name: str) -> None:
    """Two ranks, then five, which do not divide the lanes, then three; and some rounds of each at random."""
    rng = random.Random(name)
    run(narrow, name, [(2, LOADER, rng.randrange(1, 4)), (5, ONE, rng.randrange(1, 3)), (3, LOADER, None)])


@pytest.mark.parametrize("name", ["all rows", "weights", "a limit", "best fit"])
def test_any_start_of_record_batches(narrow: Source, name: str) -> None:
    """In complete lanes, and one rank after several."""
    rng = random.Random(name)
    run(narrow, name, [(2, ARROW, rng.randrange(1, 4)), (3, ARROW, rng.randrange(0, 3)), (1, ARROW, None)], epoch=3)


WORKERS: list[tuple[str, Steps]] = [
    ("all rows", [(2, Reader("Loader", 2), None)]),
    ("in order", [(1, Reader("DataLoader", 2), None)]),
    ("a limit", [(3, Reader("Loader", 1), None)]),
    ("weights", [(1, Reader("Loader", 3), None)]),
    ("all rows", [(1, Reader("Loader", 3), 7), (2, Reader("Loader", 1), 2), (1, Reader("DataLoader", 2), None)]),
    ("weights", [(2, Reader("Loader", 1), 4), (1, Reader("Loader", 2), None)]),
    ("sequences", [(1, Reader("Loader", 2), 3), (1, Reader("DataLoader", 1), None)]),
    ("filters", [(1, LOADER, 4), (1, Reader("Loader", 2), None)]),
]


@pytest.mark.parametrize(("name", "steps"), WORKERS, ids=lambda value: value if isinstance(value, str) else "")
def test_the_same_batches_whoever_reads_and_goes_on(narrow: Source, name: str, steps: Steps) -> None:
    run(narrow, name, steps)


OTHERS: list[tuple[dict[str, Any], list[dict[str, Any]]]] = [
    (
        {"filters": "label > 0"},
        [{}, {"filters": "label > 1"}, {"filters": "label > 0 or label is null"}, {"filters": "day = '2026-11-02'"}],
    ),
    ({}, [{"rows": SelectedRows.of([0, 0], [1, 2])}, {"sample": 0.9}, {"limit": 290}]),
    (
        {"split": Split("id", 0.0, 0.5)},
        [
            {},
            {"split": Split("id", 0.0, 0.6)},
            {"split": Split("id", 0.0, 0.5, salt="x")},
            {"split": Split("ts", 0.0, 0.5)},
        ],
    ),
    (
        {"sequence": Sequence(4, "ts", max_gap=5, group_by="user", stride=2)},
        [
            {},
            {"sequence": Sequence(3, "ts", max_gap=5, group_by="user", stride=2)},
            {"sequence": Sequence(4, "ts", max_gap=6, group_by="user", stride=2)},
            {"sequence": Sequence(4, "id", max_gap=5, group_by="user", stride=2)},
            {"sequence": Sequence(4, "ts", max_gap=5, group_by=None, stride=2)},
            {"sequence": Sequence(4, "ts", max_gap=5, group_by="user", stride=1)},
        ],
    ),
]


@pytest.mark.parametrize(("options", "others"), OTHERS, ids=["filters", "all", "split", "sequence"])
def test_a_state_of_other_rows_is_refused(
    narrow: Source, options: dict[str, Any], others: list[dict[str, Any]]
) -> None:
    how: dict[str, Any] = {"columns": ["id"], "batch_size": 4, "window": 3}
    state = ParquetDataset(narrow.path, **how, **options).state_dict(after=2)
    ParquetDataset(narrow.path, **how, **options).load_state_dict(state)
    for other in others:
        with pytest.raises(UsageError, match="taken with other filters or rows, or another split, sequence, pack or"):
            ParquetDataset(narrow.path, **how, **other).load_state_dict(state)


def test_filters_that_say_the_same_continue_each_other(narrow: Source) -> None:
    state = ParquetDataset(narrow.path, ["id"], filters="label < 2").state_dict(after=2)
    ParquetDataset(narrow.path, ["id"], filters=[("label", "<", 2)]).load_state_dict(state)


def test_every_batch_of_a_short_epoch(narrow: Source) -> None:
    """From each place; the one after the last is the beginning of the next epoch."""
    options: dict[str, Any] = {**LANES, "batch_size": 90, "lanes": 2}
    for reader in (ARROW, LOADER):
        whole, after = (reader.read(narrow, FEW, epoch=epoch, **options)[0] for epoch in (0, 1))
        for begin in range(len(whole) + 1):
            state = reader.read(narrow, FEW, stop=begin, **options)[1]
            found, _ = reader.read(narrow, FEW, state=state, **options)
            is_next = begin == len(whole) and reader == LOADER
            assert found == (after if is_next else whole[begin:])


def test_an_epoch_without_a_round_ends(tmp_path: Path) -> None:
    """Three ranks and two batches, of which drop_last=True leaves none: the state is the end of that epoch."""
    pq.write_table(pa.table({"id": range(4)}), tmp_path / "a.parquet")

    def loader() -> Loader:
        dataset = ParquetDataset(tmp_path, batch_size=2, drop_last=True, lanes=6, num_replicas=3, rank=1)
        return Loader(dataset, num_workers=2)

    first, second = loader(), loader()
    assert not list(first)
    state = first.state_dict()
    assert (state["epoch"], state["batch"], first.epoch) == (0, 2, 1)
    second.load_state_dict(state)
    assert second.epoch == 1
    assert not list(second)
    assert second.state_dict()["epoch"] == 1
