"""Divisions: every batch once, ranks equal, few lanes for each worker, whatever the numbers."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pqcache.errors import UsageError
from pqcache.reader.order import MOST_DIVISIONS, Division, Divisions, EpochShare, batches_at, next_divisions
from tests.examples import examples

TOPOLOGIES = st.lists(st.tuples(st.integers(1, 7), st.integers(1, 4), st.integers(0, 9)), min_size=1, max_size=4)


@settings(max_examples=examples(200), deadline=None)
@given(total=st.integers(0, 120), lanes=st.integers(1, 12), runs=TOPOLOGIES, drop_last=st.booleans())
def test_every_batch_comes_once_over_all_runs(
    total: int, lanes: int, runs: list[tuple[int, int, int]], drop_last: bool
) -> None:
    start, divisions = 0, ()
    consumed: list[int] = []
    for number, (ranks, workers, rounds) in enumerate(runs):
        last = number == len(runs) - 1
        divisions = next_divisions(divisions, lanes, Division(start, ranks, workers))
        of_ranks = []
        for rank in range(ranks):
            shares = [
                EpochShare(
                    total=total, lanes=lanes, ranks=ranks, rank=rank, workers=workers, worker=worker, start=start,
                    drop_last=drop_last, divisions=divisions,
                )
                for worker in range(workers)
            ]  # fmt: skip
            found = [list(share.batches(share.indices())) for share in shares]
            turns = [part[i] for i in range(max(map(len, found))) for part in found if i < len(part)]
            for share, batches in zip(shares, found, strict=True):
                assert [share.place_of(batch) for batch in batches] == list(share.indices())
            of_ranks.append(turns)
        assert len({len(turns) for turns in of_ranks}) == 1
        done = len(of_ranks[0]) if last else min(rounds, len(of_ranks[0]))
        consumed += [batch for turns in of_ranks for batch in turns[:done]]
        start = shares[0].after(start + done * ranks - 1) if done else start
    counts = Counter(batch for batch in consumed if batch < total)
    assert set(counts.values()) <= {1}
    padding = [batch for batch in consumed if batch >= total]
    left = total - len(counts)
    assert (
        (left < ranks and not padding)
        if drop_last
        else (not left and len(padding) < max(ranks for ranks, _, _ in runs))
    )


@settings(max_examples=examples(100), deadline=None)
@given(st.integers(1, 300), st.integers(1, 16), st.integers(1, 7), st.integers(1, 4), st.integers(0, 50))
def test_a_worker_reads_few_lanes_each_in_order(total: int, lanes: int, ranks: int, workers: int, start: int) -> None:
    divisions = (Division(start, ranks, workers),)
    for rank in range(ranks):
        for worker in range(workers):
            share = EpochShare(
                total=total, lanes=lanes, ranks=ranks, rank=rank, workers=workers, worker=worker, start=start,
                divisions=divisions,
            )  # fmt: skip
            mine = [batch for batch in share.batches(share.indices()) if batch < total]
            of_lanes: dict[int, list[int]] = {}
            for batch in mine:
                of_lanes.setdefault(batch % lanes, []).append(batch // lanes)
            assert all(batches == list(range(batches[0], batches[0] + len(batches))) for batches in of_lanes.values())
            left = max(0, total - start)
            most = -(-left // lanes) + 1  # batches of a lane
            assert len(of_lanes) <= len(mine) // max(1, most - 2) + 2


def test_no_more_divisions_than_a_state_can_have() -> None:
    many: Divisions = tuple(Division(i, 1 + i % 2, 1) for i in range(MOST_DIVISIONS))
    assert next_divisions(many, 4, Division(99, 2, 1)) == many
    with pytest.raises(UsageError, match="was resumed with other ranks or workers 32 times"):
        next_divisions(many, 4, Division(99, 3, 1))
    with pytest.raises(UsageError, match=r"lanes=4: ranks x workers do not divide it, and an epoch has more than"):
        batches_at(1 << 40, 4, many)
