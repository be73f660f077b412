"""The order: exactly once, the same for every topology, reachable at any place."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pqcache.reader.order import (
    Lane,
    Order,
    mixing,
    permutation,
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
def test_every_row_comes_once_and_without_shuffling_in_the_files_order(order: Order) -> None:
    seen = [row for index in range(order.batches()) for row in pairs(order.batch(index))]
    assert (sorted(seen) if order.shuffle else seen) == all_rows(order)
    sizes = [len(order.batch(index)[0]) for index in range(order.batches())]
    assert all(size == order.batch_size for size in sizes[:-1])
    assert order.batches(drop_last=True) == order.rows // order.batch_size


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


@pytest.mark.parametrize("window", [2, 5])
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


def test_the_first_batches_are_mixed_of_more_and_more_row_groups() -> None:
    window, rows = 16, 5_000
    order = Order(counts=np.full(100, rows), batch_size=256, window=window, seed=3)
    lane = order.lane(0)
    for step in range(window):  # of each row group that is there a part is taken
        ready = lane.rows_before((step + 1) * lane.blocks_per_step)
        assert ready == pytest.approx((step + 1) * (step + 2) / 2 * rows / window, abs=16)
    assert len(np.unique(order.batch(0)[0])) == 1
    at_random = window * (1 - (1 - 1 / window) ** 256)  # the row groups that a batch has rows of
    assert mixing(order).groups > 0.95 * at_random


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
