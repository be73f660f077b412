"""Which rows come when in an epoch: a pure function of row counts and a few numbers, without any reading.

A shuffled epoch is made in four steps (docs/design.md, "The order"):

1. The row groups are permuted by Philox(seed, epoch) into a line of N rows.
2. The line is shared by rows among C lanes: N // B full batches, as evenly as they go, and the short last
   batch behind them. A share may begin or end inside a row group.
3. Inside a lane each row group's rows are dealt at random into equal hands, one for each of the blocks that
   hold it. A block takes one hand from each of up to ``window`` row groups and permutes the rows.
4. Global batch i is lane ``i % C``'s batch ``i // C``.

Which blocks hold a row group is a staircase: a new one arrives with every step and stays for ``window``
steps, except that the first step begins, and the last one ends, with ``window // 2 + 1`` of them. So a step's
rows are about a row group, never more row groups are held than ``window``, about half of their rows are still
there, and no batch of an epoch is mixed from fewer than half a window (given that many). Where row groups are
large beside a batch, a step is split into several blocks, so that a block stays in the processor's cache.

All randomness is raw Philox output, sorted: numpy keeps that stream the same for ever, which it does not
promise for ``Generator.permutation``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from pqcache.errors import UsageError

Ints = npt.NDArray[np.int64]

_WORD = (1 << 64) - 1
_LINE, _ROWS, _BLOCK = 0, 1, 2  # what a random stream is for
_BATCHES = 8  # of a block, at least


def permutation(n: int, seed: int, epoch: int, purpose: int, lane: int = 0, item: int = 0) -> Ints:
    """Return a random permutation of ``range(n)``, the same for the same arguments on every machine.

    Philox's counter makes any stream reachable at once: (purpose, lane, item) are its upper words. Random
    keys with the position in their low bits are sorted, which is as fast as a Fisher-Yates shuffle.
    """
    if n < 2:
        return np.zeros(n, np.int64)
    low = (1 << int(n - 1).bit_length()) - 1
    keys: npt.NDArray[np.uint64] = stream(seed, epoch, purpose, lane, item).random_raw(n)
    keys &= np.uint64(_WORD ^ low)
    keys |= np.arange(n, dtype=np.uint64)
    keys.sort()
    keys &= np.uint64(low)
    return keys.view(np.int64)


def scatter_order(n: int, seed: int, epoch: int, lane: int, item: int) -> Ints:
    """Return ``range(n)`` in an order whose consecutive parts are random hands.

    Only which row comes into which hand is random here: the hands themselves are permuted in blocks. So for
    up to 2^17 rows keys of 32 bits do, of which at least 15 are random, and rows with equal keys stay in order.
    """
    if n > 1 << 17:
        return permutation(n, seed, epoch, _ROWS, lane, item)
    if n < 2:
        return np.zeros(n, np.int64)
    low = (1 << int(n - 1).bit_length()) - 1
    raw = stream(seed, epoch, _ROWS, lane, item).random_raw((n + 1) // 2)
    keys: npt.NDArray[np.uint32] = raw.astype("<u8", copy=False).view("<u4")
    keys = keys[:n]
    keys &= np.uint32((1 << 32) - 1 ^ low)
    keys |= np.arange(n, dtype=np.uint32)
    keys.sort()
    keys &= np.uint32(low)
    return keys.astype(np.int64)


def stream(seed: int, epoch: int, purpose: int, lane: int, item: int) -> np.random.Philox:
    """Return the random stream of one purpose, lane and item of an epoch."""
    return np.random.Philox(
        key=np.array([seed & _WORD, epoch & _WORD], np.uint64),
        counter=np.array([0, item, lane, purpose], np.uint64),
    )


@dataclass(frozen=True, kw_only=True)
class Lane:
    """One lane's part of an epoch: runs of rows of row groups, dealt over blocks.

    ``groups``, ``lows`` and ``highs`` say which rows ``low <= row < high`` of which row group are the lane's,
    in line order; empty runs are left out. Positions ``j`` below count these runs. ``split`` is the number of
    blocks of a step.
    """

    number: int
    seed: int
    epoch: int
    window: int
    groups: Ints
    lows: Ints
    highs: Ints
    split: int = 1

    @cached_property
    def sizes(self) -> Ints:
        """Rows of each run."""
        return self.highs - self.lows

    @cached_property
    def _starts(self) -> Ints:
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self.sizes)])

    @property
    def rows(self) -> int:
        """Rows of the lane."""
        return int(self._starts[-1])

    @property
    def begin(self) -> int:
        """Row groups in the first and in the last step."""
        return self.window // 2 + 1

    @cached_property
    def blocks(self) -> int:
        """Number of blocks."""
        runs = len(self.groups)
        return max(1, runs + self.window - 2 * self.begin + 1) * self.split if runs else 0

    def first_block(self, j: int) -> int:
        """Return the first block that holds run ``j``."""
        return self._first_blocks[j]

    def hands(self, j: int) -> int:
        """Return the number of blocks that hold run ``j``."""
        return self._hands[j]

    @cached_property
    def _first_blocks(self) -> list[int]:
        found: list[int] = (np.maximum(0, np.arange(len(self.groups)) - self.begin + 1) * self.split).tolist()
        return found

    @cached_property
    def _hands(self) -> list[int]:
        ends = (np.arange(len(self.groups)) - self.begin + self.window + 1) * self.split
        found: list[int] = (np.minimum(ends, self.blocks) - self._first_blocks).tolist()
        return found

    def cuts(self, j: int) -> Ints:
        """Return where run ``j``'s permuted rows are cut into hands: ``hands(j) + 1`` positions."""
        hands = self.hands(j)
        return int(self.sizes[j]) * np.arange(hands + 1, dtype=np.int64) // hands

    def runs(self, block: int) -> range:
        """Return the runs that ``block`` holds."""
        step = block // self.split
        first = max(0, step - self.window + self.begin)
        return range(min(first, len(self.groups)), min(step + self.begin, len(self.groups)))

    def before(self, block: int) -> int:
        """Return how many rows the blocks before ``block`` have: O(window)."""
        if block >= self.blocks:
            return self.rows
        runs = self.runs(block)
        dealt = int(self._starts[runs.start])
        for j in runs:
            done = block - self.first_block(j)
            if done > 0:
                dealt += int(self.sizes[j]) * done // self.hands(j)
        return dealt

    def block_at(self, row: int) -> int:
        """Return the block in which the lane's ``row``-th row comes, by bisection; ``blocks`` at the end."""
        low, high = 0, self.blocks
        while low < high:
            middle = (low + high) // 2
            if self.before(middle + 1) <= row:
                low = middle + 1
            else:
                high = middle
        return low

    def row_order(self, j: int) -> Ints:
        """Return run ``j``'s rows in the order they are dealt, as positions within the run."""
        return scatter_order(int(self.sizes[j]), self.seed, self.epoch, self.number, j)

    def block_order(self, block: int, rows: int) -> Ints:
        """Return the order of ``block``'s rows, as positions in its hands laid end to end."""
        return permutation(rows, self.seed, self.epoch, _BLOCK, self.number, block)

    def block_rows(self, block: int) -> tuple[Ints, Ints]:
        """Return the rows of ``block`` in order: their row groups, and their rows in those."""
        groups, rows = [], []
        for j in self.runs(block):
            cuts, hand = self.cuts(j), block - self.first_block(j)
            dealt = self.row_order(j)[cuts[hand] : cuts[hand + 1]] + self.lows[j]
            rows.append(dealt)
            groups.append(np.full(len(dealt), self.groups[j]))
        order = self.block_order(block, sum(map(len, rows)))
        return np.concatenate(groups)[order], np.concatenate(rows)[order]


@dataclass(frozen=True, kw_only=True)
class Order:
    """The order of one epoch over row groups of ``counts`` rows.

    ``batch_size`` is in rows, ``window`` in row groups of a lane. With ``shuffle=False`` global batch i is
    simply rows ``i * batch_size`` onwards of the dataset, whatever the lanes.

    ``lane_rows`` are the rows of each lane, where these are not to be equal; then batches have no global number.
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
                raise UsageError("", f"{name} is {getattr(self, name)}", "it must be at least 1")

    @cached_property
    def rows(self) -> int:
        """Rows of an epoch."""
        return int(self.counts.sum())

    @property
    def full(self) -> int:
        """Number of full batches."""
        return self.rows // self.batch_size

    def batches(self, drop_last: bool = False) -> int:
        """Return the number of batches of an epoch, over all ranks and without padding."""
        return self.full if drop_last else -(-self.rows // self.batch_size)

    @cached_property
    def split(self) -> int:
        """Blocks per step: blocks of about eight batches, and at most 64 of them in a row group."""
        groups = max(1, int(np.count_nonzero(self.counts)))
        return min(64, max(1, self.rows // groups // (_BATCHES * self.batch_size)))

    @cached_property
    def line(self) -> Ints:
        """The row groups in line order."""
        if not self.shuffle:
            return np.arange(len(self.counts), dtype=np.int64)
        return permutation(len(self.counts), self.seed, self.epoch, _LINE)

    @cached_property
    def _starts(self) -> Ints:
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self.counts[self.line])])

    def lane_batches(self, lane: int) -> int:
        """Return the number of batches of a lane, the short last one included."""
        total = self.batches()
        return total // self.lanes + (lane < total % self.lanes)

    def lane(self, number: int) -> Lane:
        """Return lane ``number`` of a shuffled epoch."""
        if self.lane_rows is None:
            each, more = divmod(self.full, self.lanes)
            rest = self.rows - self.full * self.batch_size
            start = (number * each + min(number, more)) * self.batch_size + (rest if number > more else 0)
            stop = start + (each + (number < more)) * self.batch_size + (rest if number == more else 0)
        else:
            start = int(self.lane_rows[:number].sum())
            stop = start + int(self.lane_rows[number])
        groups, lows, highs = self.spans(start, stop)
        return Lane(
            number=number,
            seed=self.seed,
            epoch=self.epoch,
            window=self.window,
            groups=groups,
            lows=lows,
            highs=highs,
            split=self.split,
        )

    def spans(self, start: int, stop: int) -> tuple[Ints, Ints, Ints]:
        """Return rows ``start <= row < stop`` of the line as runs: row groups, first and past-last rows."""
        first = max(0, int(np.searchsorted(self._starts, start, side="right")) - 1)
        last = int(np.searchsorted(self._starts, stop, side="left"))
        where = np.arange(first, max(first, last))
        lows = np.maximum(start - self._starts[where], 0)
        highs = np.minimum(stop - self._starts[where], self.counts[self.line[where]])
        kept = highs > lows
        return self.line[where][kept], lows[kept], highs[kept]

    def batch(self, index: int) -> tuple[Ints, Ints]:
        """Return the rows of global batch ``index``: their row groups, and their rows in those.

        Positions past the epoch's end are the padding: they repeat it from its start. This is the order
        spelled out, for tests and for looking; readers go block by block.
        """
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
        at = lane.before(block)
        while at < stop:
            in_groups, in_rows = lane.block_rows(block)
            piece = slice(max(0, start - at), stop - at)
            parts_groups.append(in_groups[piece])
            parts_rows.append(in_rows[piece])
            at += len(in_rows)
            block += 1
        return np.concatenate(parts_groups), np.concatenate(parts_rows)
