"""The order: exactly once, the same for every topology, reachable at any place."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pqcache.errors import UsageError
from pqcache.reader.order import (
    EpochShare,
    Lane,
    Order,
    batches_by_lane,
    mixing,
    permutation,
    random_words,
    scatter_order,
)
from tests.examples import examples

COUNTS = st.lists(st.integers(0, 30), min_size=0, max_size=12)


@st.composite
def orders(draw: st.DrawFn, shuffle: bool | None = None) -> Order:
    return Order(
        counts=np.array(draw(COUNTS), np.int64),
        batch_size=draw(st.sampled_from([1, 2, 3, 7, 16, 1000])),
        lanes=draw(st.sampled_from([1, 2, 3, 4, 6, 12, 24])),
        window=draw(st.integers(1, 20)),
        seed=draw(st.sampled_from([0, 1, -1, 2**70])),
        epoch=draw(st.integers(0, 3)),
        shuffle=draw(st.booleans()) if shuffle is None else shuffle,
    )


def pairs(found: tuple[np.ndarray, np.ndarray]) -> list[tuple[int, int]]:
    return list(zip(found[0].tolist(), found[1].tolist(), strict=True))


def all_rows(order: Order) -> list[tuple[int, int]]:
    return [(g, r) for g, count in enumerate(order.counts.tolist()) for r in range(count)]


def replayed_lane(lane: Lane) -> list[list[tuple[int, int]]]:
    """Return the rows of the lane's blocks by a replay: each step adds a span, which is mixed for ``window`` steps.

    Every span is looked at for every block, where the module has arithmetic. What the first batch lacks is taken of
    each span when that comes.
    """
    spans, each = len(lane.row_groups), lane.blocks_per_step
    steps = spans + lane.window - (lane.window // 2 + 1) if spans else 0
    lacking = lane.batch_size
    mixed_in: dict[int, list[int]] = {span: [] for span in range(spans)}
    for block in range(steps * lane.blocks_per_step):
        for span in range(spans):
            if span <= block // each < span + lane.window:
                mixed_in[span].append(block)
    buckets: dict[int, list[list[tuple[int, int]]]] = {}
    for span in range(spans):
        size = int(lane.highs[span] - lane.lows[span])
        order = scatter_order(size, lane.seed, lane.epoch, lane.number, span)
        rows = [(int(lane.row_groups[span]), int(lane.lows[span] + r)) for r in order]
        count = len(mixed_in[span])
        first, rest = rows[: min(lacking, size)], rows[min(lacking, size) :]
        if lacking <= 0 or len(first) <= size * each // count:
            buckets[span] = [rows[size * q // count : size * (q + 1) // count] for q in range(count)]
        else:
            buckets[span] = [first[len(first) * q // each : len(first) * (q + 1) // each] for q in range(each)]
            left = count - each
            buckets[span] += [rest[len(rest) * q // left : len(rest) * (q + 1) // left] for q in range(left)]
        lacking -= size
    blocks = []
    for number in range(steps * lane.blocks_per_step):
        mixed = [span for span in range(spans) if number in mixed_in[span]]
        rows = [row for span in mixed for row in buckets[span][mixed_in[span].index(number)]]
        order = permutation(len(rows), lane.seed, lane.epoch, 2, lane.number, number)
        blocks.append([rows[i] for i in order])
    return blocks


@settings(max_examples=examples(150), deadline=None)
@given(orders(shuffle=True))
def test_equals_a_replay(order: Order) -> None:
    lanes = []
    line = [(g, r) for g in order.row_group_order.tolist() for r in range(int(order.counts[g]))]
    taken = 0
    full, remainder = divmod(len(line), order.batch_size)
    for number in range(order.lanes):
        batches = full // order.lanes + (number < full % order.lanes)
        rows = batches * order.batch_size + (remainder if number == full % order.lanes else 0)
        lane = order.lane(number)
        blocks = replayed_lane(lane)
        assert len(blocks) == lane.blocks
        assert sorted(itertools.chain(*blocks)) == sorted(line[taken : taken + rows])
        for block, rows_of_block in enumerate(blocks):
            assert pairs(lane.block_rows(block)) == rows_of_block
            assert lane.rows_before(block) == sum(map(len, blocks[:block]))
        lanes.append(list(itertools.chain(*blocks)))
        taken += rows
    for index in range(order.batches()):
        start = index // order.lanes * order.batch_size
        expected = lanes[index % order.lanes][start : start + order.batch_size]
        assert pairs(order.batch(index)) == expected


@settings(max_examples=examples(200), deadline=None)
@given(orders())
def test_every_row_comes_once(order: Order) -> None:
    seen = [row for index in range(order.batches()) for row in pairs(order.batch(index))]
    assert sorted(seen) == all_rows(order)
    sizes = [len(order.batch(index)[0]) for index in range(order.batches())]
    assert all(size == order.batch_size for size in sizes[:-1])
    assert order.batches(drop_last=True) == order.rows // order.batch_size


@settings(max_examples=examples(100), deadline=None)
@given(orders(shuffle=False))
def test_unshuffled_is_the_files_order(order: Order) -> None:
    seen = [row for index in range(order.batches()) for row in pairs(order.batch(index))]
    assert seen == all_rows(order)


@settings(max_examples=examples(200), deadline=None)
@given(
    total=st.integers(0, 60),
    topology=st.sampled_from([(1, 1), (1, 2), (2, 1), (2, 2), (3, 1), (3, 2), (2, 3), (4, 3), (6, 2)]),
    start=st.integers(0, 61),
    drop_last=st.booleans(),
)
def test_parts_cover_the_rest_equally(total: int, topology: tuple[int, int], start: int, drop_last: bool) -> None:
    ranks, workers = topology
    parts = [
        [
            EpochShare(
                total=total,
                lanes=12,
                ranks=ranks,
                rank=rank,
                workers=workers,
                worker=worker,
                start=start,
                drop_last=drop_last,
            ).indices()
            for worker in range(workers)
        ]
        for rank in range(ranks)
    ]
    counts = {sum(map(len, of_rank)) for of_rank in parts}
    assert len(counts) == 1, "all ranks get the same number of batches"
    assert len(EpochShare(total=total, lanes=12, ranks=ranks, rank=0, start=start, drop_last=drop_last)) == counts.pop()
    every = sorted(index for of_rank in parts for indices in of_rank for index in indices)
    assert every == list(range(start, start + len(every)))
    if drop_last:
        assert total - ranks < start + len(every) <= total or not every
    else:
        assert start + len(every) >= total
        assert len(every) < max(0, total - start) + ranks
    for rank, of_rank in enumerate(parts):
        # DataLoader takes batches from its workers in turn: that must be the rank's own sequence
        turns = [i for turn in itertools.zip_longest(*of_rank) for i in turn if i is not None]
        assert turns == sorted(turns)
        assert all(index % ranks == rank for index in turns)


@settings(max_examples=examples(100), deadline=None)
@given(order=orders(), topology=st.sampled_from([(1, 1), (2, 1), (1, 4), (2, 3), (3, 4)]), at=st.integers(0, 40))
def test_after_a_step_the_rest_is_left(order: Order, topology: tuple[int, int], at: int) -> None:
    ranks, _ = topology
    total = order.batches()
    lanes = 12
    first = EpochShare(total=total, lanes=lanes, ranks=ranks, rank=0)
    seen = list(first.indices())[: at + 1]
    if not seen:
        return
    start = first.after(seen[-1])
    consumed = [
        i
        for rank in range(ranks)
        for i in list(EpochShare(total=total, lanes=lanes, ranks=ranks, rank=rank).indices())[: at + 1]
    ]
    for new_ranks in (1, 2, 3):
        rest = [
            i
            for rank in range(new_ranks)
            for i in EpochShare(total=total, lanes=lanes, ranks=new_ranks, rank=rank, start=start).indices()
        ]
        once = Counter(i for i in consumed + rest if i < total)
        assert once == Counter(range(total))


def test_padding_repeats_the_epochs_start() -> None:
    order = Order(counts=np.array([10]), batch_size=3, lanes=6)
    assert order.batches() == 4
    part = EpochShare(total=4, lanes=6, ranks=3, rank=2)
    assert list(part.indices()) == [2, 5]
    assert list(batches_by_lane(part.indices(), 6, 4)) == [(2, 2, 0), (5, 1, 0)]
    assert pairs(order.batch(5)) == pairs(order.batch(1))
    assert list(EpochShare(total=1, lanes=6, ranks=3, rank=2).indices()) == [2]  # fewer batches than ranks
    assert pairs(Order(counts=np.array([2]), batch_size=3, lanes=6).batch(2)) == pairs(
        Order(counts=np.array([2]), batch_size=3, lanes=6).batch(0)
    )


def test_epochs_and_seeds_differ() -> None:
    counts = np.full(20, 50)
    seen = {
        tuple(pairs(Order(counts=counts, batch_size=1000, lanes=1, window=16, seed=seed, epoch=epoch).batch(0)))
        for seed in (0, 1)
        for epoch in (0, 1, 2)
    }
    assert len(seen) == 6


def test_seek_does_not_replay() -> None:
    order = Order(counts=np.full(200_000, 1000), batch_size=100, lanes=1, window=16)
    lane = order.lane(0)
    looked: list[int] = []
    original = Lane.row_order
    try:
        Lane.row_order = lambda self, j: (looked.append(j), original(self, j))[1]  # type: ignore[method-assign]
        assert order.blocks_per_step == 1
        order.batch(1_500_000)
    finally:
        Lane.row_order = original  # type: ignore[method-assign]
    assert len(set(looked)) <= 2 * lane.window


@pytest.mark.parametrize("window", [1, 2, 5, 16])
def test_mixing_and_memory_follow_from_the_window(window: int) -> None:
    lane = Order(counts=np.full(64, 1000), batch_size=100, window=window).lane(0)
    held = [len(lane.spans(block)) for block in range(lane.blocks)]
    assert max(held) == window
    assert held[:window] == list(range(1, window + 1))
    assert min(held[window:]) == held[-1] == window // 2 + 1
    sizes = np.diff([lane.rows_before(block) for block in range(lane.blocks + 1)])
    assert sizes.max() <= 1500
    for block in range(lane.blocks):
        kept = 0
        for span in lane.spans(block):
            offsets = lane.bucket_offsets(span)
            kept += int(offsets[-1] - offsets[block - lane.first_block(span)])
        assert kept <= 1000 * (window / 2 + 1.5), "about half of the rows in memory are still needed"


@settings(max_examples=examples(100), deadline=None)
@given(orders(shuffle=True))
def test_the_first_batch_needs_no_more_row_groups_than_its_rows(order: Order) -> None:
    for number in range(order.lanes):
        lane = order.lane(number)
        if not lane.rows:
            continue
        first = min(order.batch_size, lane.rows)
        needed = int(np.searchsorted(np.cumsum(lane.sizes), first)) + 1
        last = next(block for block in range(lane.blocks) if lane.rows_before(block + 1) >= first)
        assert lane.spans(last).stop == needed


@pytest.mark.parametrize("window", [1, 4, 16])
@pytest.mark.parametrize("rows", [5_000, 20_000])
def test_the_first_batches_are_mixed_of_more_and_more_row_groups(window: int, rows: int) -> None:
    order = Order(counts=np.full(200, rows), batch_size=256, window=window, seed=3)
    lane = order.lane(0)
    for step in range(window):  # of each row group that is there a part is taken
        ready = lane.rows_before((step + 1) * lane.blocks_per_step)
        assert ready == pytest.approx((step + 1) * (step + 2) / 2 * rows / window, abs=16)
    assert len(np.unique(order.batch(0)[0])) == 1
    assert mixing(order).groups > 0.95 * mixed_by(window)


def mixed_by(window: int) -> float:
    """Return how many of so many row groups a batch of 256 rows has rows of, if these are chosen at random."""
    return window * (1 - (1 - 1 / window) ** 256)


def test_a_block_is_mixed_evenly() -> None:
    """Two rows of a batch share a row group about as rarely as a window allows; positions are uniform."""
    order = Order(counts=np.full(64, 1000), batch_size=256, window=16, seed=3)
    shared = []
    for index in range(20, order.batches() - 20, 7):
        groups = order.batch(index)[0]
        counts = np.bincount(groups)
        shared.append((counts * (counts - 1)).sum() / (len(groups) * (len(groups) - 1)))
    assert 0.9 / 16 < np.mean(shared) < 1.15 / 16
    # where a row group's rows come in the epoch does not depend on their place in it
    positions: dict[int, list[float]] = {}
    for index in range(order.batches()):
        groups, rows = order.batch(index)
        for row in rows[groups == 5]:
            positions.setdefault(int(row) // 250, []).append(index)
    means = [np.mean(found) for found in positions.values()]
    assert max(means) - min(means) < 6


def test_wrong_numbers_are_named() -> None:
    with pytest.raises(UsageError, match="batch_size is 0"):
        Order(counts=np.array([1]), batch_size=0)
    with pytest.raises(UsageError, match="lanes=4: cannot be shared by 3 ranks x 1 workers"):
        EpochShare(total=10, lanes=4, ranks=3, rank=0)
    with pytest.raises(UsageError, match="rank=3"):
        EpochShare(total=10, lanes=4, ranks=2, rank=3)


def test_words_are_those_of_a_new_generator() -> None:
    for number in range(20):
        n, seed = 1 + number % 7, 2**63 + number
        generator = np.random.Philox(key=np.array([seed, 5], np.uint64), counter=np.array([0, 3, 2, number], np.uint64))
        assert random_words(n, seed, 5, number, 2, 3).tolist() == generator.random_raw(n).tolist()


def test_permutation_is_uniform() -> None:
    seen = Counter(tuple(permutation(3, 0, 0, 0, 0, item).tolist()) for item in range(6000))
    assert len(seen) == 6
    assert max(seen.values()) < 1150
    assert min(seen.values()) > 850
    assert permutation(0, 0, 0, 0).tolist() == []
    assert permutation(1, 0, 0, 0).tolist() == [0]
