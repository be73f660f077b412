"""The order of rows in an epoch, and their rank and worker: a pure function of a few numbers.

A shuffled epoch is made in four steps (ARCHITECTURE.md has the reasons):

1. The row groups are permuted by Philox(seed, epoch), which lines up their N rows. 2. The line is divided among C
lanes: N // B full batches, as evenly as possible, and the short last batch after
   them. A lane's part is a list of spans of rows; the first and the last one may begin or end inside a row group.
3. Inside a lane each span's rows are scattered at random into equal buckets, one for each of the blocks that
   mix it. A block gathers one bucket of each of up to ``window`` spans and permutes the rows.
4. Global batch i is lane ``i % C``'s batch ``i // C``.

Which blocks mix a span is a staircase: each step adds a new span, which is mixed for ``window`` steps. So the first
step has one span, of which it takes a whole batch, and the first batch needs one row group, whatever the window. The
next steps mix more and more spans, up to ``window``. The last step has ``window // 2 + 1``, so after the first steps no
batch is mixed from fewer than half a window (given enough row groups). A step's rows are then about a row group, at
most ``window`` row groups are in memory, and about half of their rows are still needed. If row groups are large
compared with a batch, a step is split into several blocks, so that a block fits into the processor's cache.

All randomness is raw Philox output, sorted: numpy guarantees that stream across versions, but not
``Generator.permutation``.

Each lane has a window of its own, so a worker should read few of them. If ranks x workers divides the number of lanes,
each worker takes complete lanes, and the sequence of batches is the same for every such number. Otherwise the remaining
batches are lined up, lane after lane, and each worker gets an equal part of the line. So a worker reads few lanes, some
only in part, and interleaves them evenly. Batches keep their rows, but other batches come in the same step.

Batches are consumed in the order of their places: rank r has those with ``place % ranks == r``. The divisions of the
epoch, one for each resume with another number of ranks or workers, say which batch is at a place.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pqcache.errors import UsageError

Ints = npt.NDArray[np.int64]

FORMAT = 2  # of states, which name batches: an order in which a batch has other rows needs another one
_WORD = (1 << 64) - 1
_LINE, _ROWS, _BLOCK = 0, 1, 2  # what a random stream is for
_BATCHES = 8  # of a block, at least
_MOST_BLOCKS = 64  # of a step
_idle: list[np.random.Philox] = []  # generators that nobody uses


def permutation(n: int, seed: int, epoch: int, purpose: int, lane: int = 0, item: int = 0) -> Ints:
    """A random permutation of ``range(n)``, equal for equal arguments on every machine.

    Philox's counter makes any stream reachable at once: (purpose, lane, item) are its upper words. Sorting random
    keys with the position in their low bits is as fast as a Fisher-Yates shuffle.
    """
    if n < 2:
        return np.zeros(n, np.int64)
    low = (1 << int(n - 1).bit_length()) - 1
    keys = random_words(n, seed, epoch, purpose, lane, item)
    keys &= np.uint64(_WORD ^ low)
    keys |= np.arange(n, dtype=np.uint64)
    keys.sort()
    keys &= np.uint64(low)
    return keys.view(np.int64)


def scatter_order(n: int, seed: int, epoch: int, lane: int, item: int) -> Ints:
    """``range(n)`` in an order whose consecutive parts are random buckets.

    Only the assignment of rows to buckets has to be random, as blocks permute the rows of their buckets. So 32-bit
    keys, at least 15 bits of them random, suffice for up to 2^17 rows; rows with equal keys stay in order.
    """
    if n > 1 << 17:
        return permutation(n, seed, epoch, _ROWS, lane, item)
    if n < 2:
        return np.zeros(n, np.int64)
    low = (1 << int(n - 1).bit_length()) - 1
    raw = random_words((n + 1) // 2, seed, epoch, _ROWS, lane, item)
    keys: npt.NDArray[np.uint32] = raw.astype("<u8", copy=False).view("<u4")
    keys = keys[:n]
    keys &= np.uint32((1 << 32) - 1 ^ low)
    keys |= np.arange(n, dtype=np.uint32)
    keys.sort()
    keys &= np.uint32(low)
    return keys.astype(np.int64)


def random_words(n: int, seed: int, epoch: int, purpose: int, lane: int, item: int) -> npt.NDArray[np.uint64]:
    """The first ``n`` words of the random stream of one purpose, lane and item of an epoch.

    Generators are reused, each by one caller at a time, because making one reads the system's random numbers.
    """
    counter = np.array([0, item, lane, purpose], np.uint64)
    key = np.array([seed & _WORD, epoch & _WORD], np.uint64)
    try:
        generator = _idle.pop()
    except IndexError:
        generator = np.random.Philox(key=0)
    generator.state = {
        "bit_generator": "Philox",
        "state": {"counter": counter, "key": key},
        "buffer": np.zeros(4, np.uint64),
        "buffer_pos": 4,  # nothing is left in it
        "has_uint32": 0,
        "uinteger": 0,
    }
    words: npt.NDArray[np.uint64] = generator.random_raw(n)
    _idle.append(generator)
    return words


@dataclass(frozen=True, kw_only=True)
class Lane:
    """One lane's part of an epoch: spans of rows of row groups, scattered over blocks.

    ``row_groups``, ``lows`` and ``highs`` describe the spans in line order: rows ``low <= row < high`` of a row group;
    none is empty. Spans are numbered from 0 (``span``). Each step is split into ``blocks_per_step`` blocks.
    """

    number: int
    seed: int
    epoch: int
    batch_size: int
    window: int
    row_groups: Ints
    lows: Ints
    highs: Ints
    blocks_per_step: int = 1

    @cached_property
    def sizes(self) -> Ints:
        """Rows of each span."""
        return self.highs - self.lows

    @cached_property
    def _starts(self) -> Ints:
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self.sizes)])

    @property
    def rows(self) -> int:
        return int(self._starts[-1])

    @cached_property
    def blocks(self) -> int:
        spans, last_step = len(self.row_groups), self.window // 2 + 1
        return (spans + self.window - last_step) * self.blocks_per_step if spans else 0

    def first_block(self, span: int) -> int:
        """The first block that mixes a span."""
        return span * self.blocks_per_step

    def bucket_count(self, span: int) -> int:
        """The number of blocks that mix a span, each with one bucket of it."""
        return min((span + self.window) * self.blocks_per_step, self.blocks) - self.first_block(span)

    def bucket_offsets(self, span: int) -> Ints:
        """The start of each bucket of a span among its scattered rows, and the end of the last one."""
        return np.asarray(self._offset(span, np.arange(self.bucket_count(span) + 1, dtype=np.int64)), np.int64)

    def _offset(self, span: Any, bucket: Any) -> Any:
        """The start of buckets among the scattered rows of their spans; takes one span or an array of them.

        Buckets are equal, except that those of a span's first step are larger if the lane's first batch needs it.
        """
        even = self._even_offset(span, bucket)
        if np.min(span) > self._last_of_first_batch:
            return even
        step, size, buckets = self.blocks_per_step, self.sizes[span], self._buckets(span)
        wanted = np.minimum(size, self.batch_size - self._starts[span])
        in_step, after = np.minimum(bucket, step), np.maximum(bucket - step, 0)
        larger = wanted * in_step // step + (size - wanted) * after // np.maximum(buckets - step, 1)
        return np.where(wanted <= size * step // buckets, even, larger)

    def _even_offset(self, span: Any, bucket: Any) -> Any:
        """Like `_offset`, with equal buckets in each span."""
        return self.sizes[span] * bucket // self._buckets(span)

    def _buckets(self, span: Any) -> Any:
        step = self.blocks_per_step
        return np.minimum((span + self.window) * step, self.blocks) - span * step

    @cached_property
    def _last_of_first_batch(self) -> int:
        """The last span that begins before the first batch ends."""
        return int(np.searchsorted(self._starts, self.batch_size)) - 1

    def spans(self, block: int) -> range:
        """The spans that ``block`` mixes."""
        step, spans = block // self.blocks_per_step, len(self.row_groups)
        return range(min(max(0, step - self.window + 1), spans), min(step + 1, spans))

    def rows_before(self, block: int) -> int:
        """Rows of the blocks before ``block``, in time O(window).

        Computed for all blocks of a step at once, as callers mostly go block by block.
        """
        if block >= self.blocks:
            return self.rows
        step, of_step = divmod(block, self.blocks_per_step)
        known = self._known_rows_before.get(step)
        if known is None:
            self._known_rows_before.clear()
            known = self._known_rows_before[step] = self._rows_before_blocks(step)
        return known[of_step]

    @cached_property
    def _known_rows_before(self) -> dict[int, list[int]]:
        return {}  # of the step that was last asked for

    def _rows_before_blocks(self, step: int) -> list[int]:
        first = step * self.blocks_per_step
        spans = self.spans(first)
        span = np.arange(spans.start, spans.stop)[:, None]
        bucket = np.arange(first, first + self.blocks_per_step) - span * self.blocks_per_step
        done = self._even_offset(span, bucket)
        early = max(0, self._last_of_first_batch + 1 - spans.start)
        if early:
            done[:early] = self._offset(span[:early], bucket[:early])
        before: list[int] = (self._starts[spans.start] + done.sum(axis=0)).tolist()
        return before

    def block_at(self, row: int) -> int:
        """The block of the lane's ``row``-th row, by bisection; ``blocks`` at the end."""
        low, high = 0, self.blocks
        while low < high:
            middle = (low + high) // 2
            if self.rows_before(middle + 1) <= row:
                low = middle + 1
            else:
                high = middle
        return low

    def row_order(self, span: int) -> Ints:
        """A span's rows, bucket after bucket, as positions within the span."""
        return scatter_order(int(self.sizes[span]), self.seed, self.epoch, self.number, span)

    def block_order(self, block: int, rows: int) -> Ints:
        """The order of ``block``'s rows, as positions in its buckets laid end to end."""
        return permutation(rows, self.seed, self.epoch, _BLOCK, self.number, block)

    def block_rows(self, block: int) -> tuple[Ints, Ints]:
        """The rows of ``block`` in order: their row groups, and their positions in those."""
        row_groups, rows = [], []
        for span in self.spans(block):
            offsets, bucket = self.bucket_offsets(span), block - self.first_block(span)
            found = self.row_order(span)[offsets[bucket] : offsets[bucket + 1]] + self.lows[span]
            rows.append(found)
            row_groups.append(np.full(len(found), self.row_groups[span]))
        order = self.block_order(block, sum(map(len, rows)))
        return np.concatenate(row_groups)[order], np.concatenate(rows)[order]


@dataclass(frozen=True, kw_only=True)
class Order:
    """The order of one epoch over row groups of ``counts`` rows.

    ``batch_size`` is in rows, ``window`` in row groups of a lane. With ``shuffle=False`` global batch i is
    rows ``i * batch_size`` onwards of the dataset, whatever the lanes.

    ``lane_rows`` gives lanes unequal numbers of rows; then batches have no global number.
    """

    counts: Ints
    batch_size: int
    lanes: int = 1
    window: int = 16
    seed: int = 0
    epoch: int = 0
    shuffle: bool = True
    lane_rows: Ints | None = None

    def __post_init__(self) -> None:
        for name in ("batch_size", "lanes", "window"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}", "it must be at least 1")

    @cached_property
    def rows(self) -> int:
        """Rows of an epoch."""
        return int(self.counts.sum())

    @property
    def full_batches(self) -> int:
        """Number of full batches."""
        return self.rows // self.batch_size

    def batches(self, drop_last: bool = False) -> int:
        """Batches of an epoch, over all ranks and without padding."""
        return self.full_batches if drop_last else -(-self.rows // self.batch_size)

    @cached_property
    def blocks_per_step(self) -> int:
        """Blocks of a step: of about eight batches each, and at most 64."""
        groups = max(1, int(np.count_nonzero(self.counts)))
        return min(_MOST_BLOCKS, max(1, self.rows // groups // (_BATCHES * self.batch_size)))

    @cached_property
    def row_group_order(self) -> Ints:
        """The row groups in line order."""
        if not self.shuffle:
            return np.arange(len(self.counts), dtype=np.int64)
        return permutation(len(self.counts), self.seed, self.epoch, _LINE)

    @cached_property
    def _starts(self) -> Ints:
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self.counts[self.row_group_order])])

    def lane(self, number: int) -> Lane:
        """Lane ``number`` of a shuffled epoch."""
        if self.lane_rows is None:
            each, more = divmod(self.full_batches, self.lanes)
            remainder = self.rows - self.full_batches * self.batch_size
            start = (number * each + min(number, more)) * self.batch_size + (remainder if number > more else 0)
            stop = start + (each + (number < more)) * self.batch_size + (remainder if number == more else 0)
        else:
            start = int(self.lane_rows[:number].sum())
            stop = start + int(self.lane_rows[number])
        row_groups, lows, highs = self.spans(start, stop)
        return Lane(
            number=number,
            seed=self.seed,
            epoch=self.epoch,
            batch_size=self.batch_size,
            window=self.window,
            row_groups=row_groups,
            lows=lows,
            highs=highs,
            blocks_per_step=self.blocks_per_step,
        )

    def spans(self, start: int, stop: int) -> tuple[Ints, Ints, Ints]:
        """Rows ``start <= row < stop`` of the line as spans: row groups, first and past-last rows."""
        first = max(0, int(np.searchsorted(self._starts, start, side="right")) - 1)
        last = int(np.searchsorted(self._starts, stop, side="left"))
        where = np.arange(first, max(first, last))
        lows = np.maximum(start - self._starts[where], 0)
        highs = np.minimum(stop - self._starts[where], self.counts[self.row_group_order[where]])
        kept = highs > lows
        return self.row_group_order[where][kept], lows[kept], highs[kept]

    def batch(self, index: int) -> tuple[Ints, Ints]:
        """The rows of global batch ``index``: their row groups, and their positions in those.

        Indices past the epoch's end are padding: they repeat the epoch from its start. For tests and inspection;
        readers go block by block.
        """
        if self.lane_rows is None:
            index %= self.batches()
        if not self.shuffle:
            groups, lows, highs = self.spans(index * self.batch_size, min((index + 1) * self.batch_size, self.rows))
            rows = [np.arange(low, high) for low, high in zip(lows, highs, strict=True)]
            return np.repeat(groups, highs - lows), np.concatenate(rows)
        lane = self.lane(index % self.lanes)
        start = index // self.lanes * self.batch_size
        stop = min(start + self.batch_size, lane.rows)
        block = lane.block_at(start)
        parts_groups, parts_rows = [], []
        first = lane.rows_before(block)
        while first < stop:
            in_groups, in_rows = lane.block_rows(block)
            wanted = slice(max(0, start - first), stop - first)
            parts_groups.append(in_groups[wanted])
            parts_rows.append(in_rows[wanted])
            first += len(in_rows)
            block += 1
        return np.concatenate(parts_groups), np.concatenate(parts_rows)


def check_format(state: Any, name: str, owner: str) -> None:
    """Raise a UsageError about ``name`` for a state of another format, or not saved by ``owner``."""
    if not isinstance(state, Mapping) or "format" not in state:
        raise UsageError(name, f"it is not a state of {owner}", "give what its state_dict() returned")
    if state["format"] == 1:
        reason = f"it has format 1, whose order puts other rows into a batch: this pqcache reads format {FORMAT}"
        raise UsageError(name, reason, "resume with the pqcache that took it, or start the epoch afresh")
    if state["format"] != FORMAT:
        raise UsageError(name, f"it has format {state['format']}, this pqcache reads {FORMAT}", "upgrade pqcache")


_SAMPLED_BATCHES = 100  # spread over the epoch
_SAMPLED_ROW_GROUPS = 200  # whose rows are followed through the epoch


@dataclass(frozen=True)
class Mixing:
    """How far an epoch is from a uniform permutation of all rows.

    ``shared``   the probability that two rows of a batch come from the same row group
    ``groups``   the average number of row groups per batch
    ``spread``   how far the rows of a row group are spread over the epoch: the standard deviation of their
                 positions over that of a uniform permutation. 1 is uniform; 0 means that they all come at once.
    """

    shared: float
    groups: float
    spread: float


def mixing(order: Order) -> Mixing:
    """How well ``order`` mixes, from at most 100 of its batches and 200 of its row groups.

    An order of no rows raises ValueError.
    """
    total = order.batches()
    if not total:
        raise ValueError("an epoch of no rows mixes nothing")
    shared, groups = [], []
    for index in np.unique(np.linspace(0, total - 1, _SAMPLED_BATCHES).astype(int)).tolist():
        counts = np.unique(order.batch(index)[0], return_counts=True)[1]
        rows = int(counts.sum())
        groups.append(len(counts))
        if rows > 1:
            shared.append(float((counts * (counts - 1)).sum()) / (rows * (rows - 1)))
    return Mixing(float(np.mean(shared)) if shared else 0.0, float(np.mean(groups)), _spread(order))


def _spread(order: Order) -> float:
    """The mean spread of row groups, from the positions of their buckets; a lane has every C-th batch."""
    if not order.shuffle:
        return float(order.counts[order.counts > 0].mean() / order.rows)
    found = []
    followed = list(set(order.row_group_order[:: max(1, len(order.row_group_order) // _SAMPLED_ROW_GROUPS)].tolist()))
    buckets: dict[int, list[tuple[float, int]]] = {}  # where each comes, from 0 to 1, and its rows
    for number in range(order.lanes):
        lane = order.lane(number)
        before = np.array([lane.rows_before(block) for block in range(lane.blocks + 1)])
        middles = ((before[:-1] + before[1:]) / 2 / max(1, lane.rows)).tolist()
        for span in np.flatnonzero(np.isin(lane.row_groups, followed)).tolist():
            first = lane.first_block(span)
            for block, rows in enumerate(np.diff(lane.bucket_offsets(span)).tolist(), first):
                buckets.setdefault(int(lane.row_groups[span]), []).append((middles[block], rows))
    for parts in buckets.values():
        where, weights = np.array(parts).T
        if weights.sum() > 1:
            mean = np.average(where, weights=weights)
            found.append(float(np.sqrt(np.average((where - mean) ** 2, weights=weights))))
    return float(np.mean(found) * np.sqrt(12)) if found else 0.0


MOST_BATCHES = 1 << 25  # limit of a divided epoch, whose batches take 8 bytes each
MOST_DIVISIONS = 32  # of an epoch


def check_rank(num_replicas: int, rank: int, lanes: int | None = None) -> None:
    """Raise UsageError for a rank out of range, or if ``num_replicas`` does not divide the lanes (None: any)."""
    if not 0 <= rank < num_replicas:
        raise UsageError(f"rank={rank}", f"with num_replicas={num_replicas} it must be from 0 to {num_replicas - 1}")
    if lanes is not None and lanes % num_replicas:
        raise UsageError(f"lanes={lanes}", f"cannot be shared by num_replicas={num_replicas}", "choose a multiple")


class Division(NamedTuple):
    """From place ``start`` on, the rest of an epoch is divided among ``ranks`` with ``workers`` each."""

    start: int
    ranks: int
    workers: int


Divisions = tuple[Division, ...]


def divisions_of(saved: object) -> Divisions:
    """Parse the divisions in a state, lists of numbers; raises UsageError for anything else."""
    try:
        found = tuple(Division(*map(int, numbers)) for numbers in saved or ())  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        found = (Division(-1, 0, 0),)
    if len(found) > MOST_DIVISIONS or not all(start >= 0 < min(ranks, workers) for start, ranks, workers in found):
        raise UsageError("state", f"its divisions are {saved!r}", "load what state_dict() returned")
    return found


def next_divisions(divisions: Divisions, lanes: int, division: Division) -> Divisions:
    """The divisions of an epoch that continues with ``division``; empty if workers take complete lanes."""
    if divisions:
        same = divisions[-1][1:] == division[1:]
    else:
        same = lanes % (division.ranks * division.workers) == 0
    if len(divisions) - same >= MOST_DIVISIONS:
        raise UsageError(
            "state",
            f"its epoch was resumed with other ranks or workers {MOST_DIVISIONS} times",
            "resume with as many as before, or with the next epoch",
        )
    return divisions if same else (*divisions, division)


@lru_cache(maxsize=4)
def batches_at(total: int, lanes: int, divisions: Divisions) -> Ints:
    """The batch at each place of an epoch of ``total`` batches."""
    if total > MOST_BATCHES:
        raise UsageError(
            f"lanes={lanes}",
            f"ranks x workers do not divide it, and an epoch has more than {MOST_BATCHES:,} batches",
            "choose numbers that divide it, or larger batches",
        )
    found = np.arange(total, dtype=np.int64)
    for division in divisions:
        left = found[division.start :]
        line = left[np.lexsort((left // lanes, left % lanes))]
        start, ranks, workers = division
        at = 0
        for rank in range(ranks):
            of_rank = range(start + (rank - start) % ranks, total, ranks)
            for places in (of_rank[worker::workers] for worker in range(workers)):
                found[places] = _interleaved(line[at : at + len(places)], lanes)
                at += len(places)
    found.flags.writeable = False
    return found


def interleave(counts: Sequence[int]) -> Ints:
    """Each ``k`` ``counts[k]`` times, so that every prefix holds them in proportion.

    The two rarest are merged first, then the result with the next, so that rounding errors hardly add up.
    """
    merged: list[tuple[int, int, Any]] = [(count, k, None) for k, count in enumerate(counts)]
    heapq.heapify(merged)
    for number in range(len(counts), 2 * len(counts) - 1):
        left, right = heapq.heappop(merged), heapq.heappop(merged)
        heapq.heappush(merged, (left[0] + right[0], number, (left, right)))
    found = np.empty(sum(counts), np.int64)
    todo = [(merged[0], np.arange(len(found)))]
    while todo:
        (count, k, parts), places = todo.pop()
        if parts is None:
            found[places] = k
            continue
        if not count:
            continue
        left, right = parts
        ahead = (2 * np.arange(count + 1, dtype=np.int64) * left[0] + count) // (2 * count)
        to_left = np.diff(ahead) > 0
        todo += [(left, places[to_left]), (right, places[~to_left])]
    return found


def _interleaved(batches: Ints, lanes: int) -> Ints:
    """Alternate lanes evenly, each in its own order; ``batches`` are sorted by lane."""
    counts = np.unique(batches % lanes, return_counts=True)[1]
    if len(counts) < 2:
        return batches
    turns = interleave(counts.tolist())
    order = np.argsort(turns, kind="stable")
    found = np.empty_like(batches)
    found[order] = batches  # lane by lane, the turns of each in order
    return found


@dataclass(frozen=True, kw_only=True)
class EpochShare:
    """The batches that one worker of one rank yields, from batch ``start`` of the epoch to its end.

    ``total`` is the epoch's number of batches (``Order.batches``). All ranks get the same number: the last round is
    filled up with the epoch's first batches, as torch's DistributedSampler does with rows, or left out with
    ``drop_last``. Without ``pad`` it stays short, so some ranks get one less. ``start`` is the first place that no rank
    has consumed. A batch's place is its number unless there are ``divisions``. With ``divisions``, or if ``shuffled``
    is False, ranks x workers need not divide the number of lanes.
    """

    total: int
    lanes: int
    ranks: int = 1
    rank: int = 0
    workers: int = 1
    worker: int = 0
    start: int = 0
    drop_last: bool = False
    pad: bool = True
    shuffled: bool = True
    divisions: Divisions = ()

    def __post_init__(self) -> None:
        check_rank(self.ranks, self.rank)
        if self.shuffled and not self.divisions and self.lanes % (self.ranks * self.workers):
            raise UsageError(
                f"lanes={self.lanes}",
                f"cannot be shared by {self.ranks} ranks x {self.workers} workers",
                f"choose a num_workers so that ranks x workers divides {self.lanes}, or start with lanes "
                "set to a common multiple",
            )

    def __len__(self) -> int:
        return len(self.indices())

    @property
    def left(self) -> int:
        """Batches from ``start`` on, of all ranks together."""
        return max(0, self.total - self.start)

    def rounds(self) -> int:
        """Batches per rank; without ``pad``, the largest number."""
        return self.left // self.ranks if self.drop_last else -(-self.left // self.ranks)

    def count(self) -> int:
        """Batches of this rank, over all its workers."""
        return len(self._of_rank())

    @property
    def has_last(self) -> bool:
        """Whether this worker yields the rank's last batch."""
        return (max(1, self.count()) - 1) % self.workers == self.worker

    @property
    def end(self) -> int:
        """The place after the last round."""
        return max(self.total, self.start)

    @property
    def worker_lanes(self) -> int:
        """The most lanes that a worker reads at once."""
        units = self.ranks * self.workers
        return min(self.lanes, -(-self.lanes // units) + bool(self.divisions))

    def batches(self, places: range) -> Sequence[int]:
        """The global indices of the batches at ``places``; the index of padding is its place."""
        if not self.divisions:
            return places
        known = batches_at(self.total, self.lanes, self.divisions)
        return [int(known[place]) if place < self.total else place for place in places]

    def place_of(self, index: int) -> int:
        """The place of a batch by its global index."""
        if not self.divisions or not 0 <= index < self.total:
            return index
        return int(np.flatnonzero(batches_at(self.total, self.lanes, self.divisions) == index)[0])

    def indices(self, begin: int | None = None) -> range:
        """The places of the worker's batches in order, from ``begin`` on if given; those from ``total`` on are padding.

        Any ``ranks`` consecutive places include one of every rank, so ranks get equally many from any start. Worker 0
        yields the rank's first, as DataLoader asks it first.
        """
        mine = self._of_rank()[self.worker :: self.workers]
        return mine if begin is None else mine[max(0, -(-(begin - mine.start) // mine.step)) :]

    def _of_rank(self) -> range:
        first = self.start + (self.rank - self.start) % self.ranks
        last = first + self.rounds() * self.ranks
        return range(first, last if self.pad else min(last, max(self.total, first)), self.ranks)

    def after(self, index: int) -> int:
        """The first place left once every rank has consumed the round of place ``index``."""
        done = (index - self.start) // self.ranks + 1
        return min(self.start + done * self.ranks, self.end)


def batches_by_lane(indices: Iterable[int], lanes: int, total: int) -> Iterator[tuple[int, int, int]]:
    """Yield (global index, lane, batch within the lane) for ``indices``; padding starts again at 0."""
    for index in indices:
        inside = index % total if index >= total else index
        yield index, inside % lanes, inside // lanes
