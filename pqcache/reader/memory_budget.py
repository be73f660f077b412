"""Divides memory: how many row groups are mixed, in which pieces, and how many are decoded ahead.

Everything follows from the row-group index, so all readers of a snapshot mix alike. A lane is a stream of batches with
a window of its own.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from pqcache.errors import UsageError
from pqcache.parquet.dense import as_list
from pqcache.reader.columns import fixed_width, kind_of, number_dtype
from pqcache.reader.epoch_options import WINDOW, WINDOW_OF_ALL
from pqcache.reader.order import Ints
from pqcache.reader.read_plan import ReadPlan
from pqcache.reader.selection.sequences import Sequence as SequenceOf
from pqcache.store.row_group_index import Index
from pqcache.units import format_count, format_size

log = logging.getLogger("pqcache.reader")

_IN_FILE_ORDER = 3  # row groups in memory, at least: one ahead, and two that a batch may be of
_ALONE = 2  # row groups' worth of memory that reading one takes: as decoded, and its rows in order
_DECODING = 4  # the same beside the window: one ahead, one being decoded and its bytes, and the run that is gathered
_WINDOWS_OF_PIECES = (16, 8, 4)
_LEAST_PIECE = 4 << 20  # bytes of a decoded piece, below which the fixed cost of each shows
_MOST_PIECES = 64  # pieces of a row group, at most
_UNFORESEEN = 8  # parts of a lane's memory: a row group that is larger than the index says may take one
_RUNS = 3  # of each lane, that are on their way
_RUN, _LEAST_RUN = 16 << 20, 1 << 20  # bytes of a run
_PARTS = 8  # of a row group
_VIEW = 16  # bytes that point to a string's or a list's bytes
_FILE_NUMBER = 4  # bytes
_ROW_HASH = 8


@dataclass(frozen=True)
class RowGroupSizes:
    """Bytes in memory of each row group: of its ``selected`` rows, and of everything ``decoded`` to select them.

    ``decoded_rows`` are the rows, or sequences, from which rows are selected and pieces are cut. Unless ``complete``,
    only the largest row groups are included.
    """

    selected: Ints
    decoded: Ints
    decoded_rows: Ints
    complete: bool = True

    def __len__(self) -> int:
        return len(self.selected)

    @property
    def largest(self) -> int:
        """The bytes of the largest row group, decoded."""
        return int(self.decoded.max(initial=0))

    def of_window(self, window: int) -> float:
        """The most bytes of rows that a window holds: about half of each of its row groups."""
        largest = _largest(self.selected, window)
        return float(largest.mean()) * (window / 2 + 1) if len(largest) else 0.0

    def of_lane(self, window: int) -> float:
        """The bytes of a lane with a window: its rows, and what is decoded meanwhile."""
        return self.of_window(window) + _DECODING * self.largest


class Window(NamedTuple):
    """How many row groups each lane mixes, and the rows per piece; 0 if row groups are read whole."""

    row_groups: int
    piece_rows: int = 0


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The resources that a process may use for reading.

    Attributes:
        threads: threads that decode and gather.
        decoding: row groups decoded at once, and ahead.
        run_bytes: about the bytes of a run of batches.
        runs: runs of each lane that are being made.
        parts: the number of parts in which the rows of a row group are held; each is freed when used up. More than one
            costs another copy of long values, and is used if memory does not hold all row groups of the windows.
        most: the most bytes for a row group that turns out larger than the index says; None for any.
        memory: in bytes; a row group of up to 1 / ``share`` of it is never refused.
    """

    threads: int = 1
    decoding: int = 1
    run_bytes: int = _RUN
    runs: int = _RUNS
    parts: int = 1
    most: float | None = None
    memory: float = 0
    share: int = _UNFORESEEN

    @staticmethod
    def within(
        memory: float, sizes: RowGroupSizes, window: int, *, lanes: int, all_lanes: int, threads: int, shuffle: bool
    ) -> Budget:
        """The budget of ``memory`` bytes for a process that reads ``lanes`` of ``all_lanes`` lanes."""
        if not len(sizes):
            return Budget()
        largest = max(1, sizes.largest)
        lanes = lanes if shuffle else 1
        if shuffle:  # who decodes takes a row group twice, decoded and ready to be mixed
            mixed = min(window, -(-len(sizes) // all_lanes)) if window <= WINDOW else window
            decoding = (memory - lanes * (sizes.of_window(mixed) + 2 * largest)) / (2 * largest)
        else:
            decoding = memory // largest - _IN_FILE_ORDER + 1
        decoding = int(max(1, min(threads, decoding)))
        run = int(min(_RUN, max(_LEAST_RUN, memory / (8 * _RUNS * lanes))))
        kept = np.minimum(sizes.decoded, 2 * sizes.selected)
        held = int(_largest(kept, lanes * window).sum())
        held = min(held, int(kept.sum()) * lanes // all_lanes + lanes * sizes.largest)
        runs, parts = _RUNS, 1
        if held + 2 * (lanes + decoding) * sizes.largest + 2 * _RUNS * lanes * run > memory:
            run, runs, parts = max(_LEAST_RUN, run // 2), 2, _PARTS
        share = _UNFORESEEN * lanes
        return Budget(
            threads=threads,
            decoding=decoding,
            run_bytes=run,
            runs=runs,
            parts=parts,
            most=max(1.25 * sizes.largest, memory / share),
            memory=memory,
            share=share,
        )

    def check(self, size: float, path: object, row_group: int) -> None:
        """Raise UsageError if a row group that takes ``size`` bytes decoded is too large."""
        if self.most is not None and size > self.most:
            raise UsageError(
                path,
                f"row group {row_group} takes {format_size(int(size))} decoded, more than the index says: "
                f"too much for memory={format_size(int(self.memory))}",
                "run 'pqcache repartition' with a smaller --row-group-size, read fewer columns, or give "
                f"memory={format_size(int(1.01 * size * self.share))!r}",
            )


def fit(
    sizes: RowGroupSizes,
    memory: int,
    lanes: int,
    shuffle: bool,
    name: object = "the dataset",
    pieces: bool = False,
    all_lanes: int | None = None,
) -> Window:
    """The window of each of a rank's ``lanes`` lanes, of ``all_lanes``, within ``memory`` bytes.

    Without shuffling it is one row group. If fewer than 16 row groups fit and their files have page indexes
    (``pieces``), they are read in pieces, and the window is 16 pieces, or fewer if memory is small. Without page
    indexes they are read whole, down to one per lane; a warning says so if that takes more than ``memory``.

    Raises:
        UsageError: pieces would be tiny, or one row group alone is too large.
    """
    if shuffle:
        window, least = largest_window(sizes, memory, lanes, all_lanes), int(sizes.of_lane(1)) * lanes
    else:
        least = _IN_FILE_ORDER * sizes.largest
        window = int(least <= memory)
    if window >= (min(WINDOW, len(sizes)) if shuffle else 1):
        return Window(window)
    rows = int(sizes.decoded_rows[int(np.argmax(sizes.decoded))])  # of the largest row group
    split: dict[int, int] = {}  # pieces of that row group, by how many pieces are mixed
    for mixed in _WINDOWS_OF_PIECES if shuffle else (1,):
        held = (mixed // 2 + 1 + _DECODING) * lanes if shuffle else _IN_FILE_ORDER
        split[mixed] = max(1, -(-sizes.largest * held // max(1, memory)))
    for mixed, number in split.items() if shuffle and pieces else ():
        if window < mixed and number <= _MOST_PIECES and sizes.largest >= _LEAST_PIECE * number:
            number = _with_spare(number)
            log.debug("%s: row groups are read in %d pieces or more, of which %d are mixed", name, number, mixed)
            return Window(mixed, -(-rows // number))
    if window:
        log.debug("%s: memory=%s is enough to mix %d row groups", name, format_size(memory), window)
        return Window(window)
    reason = f"a row group takes {format_size(sizes.largest)} decoded, too much for memory={format_size(memory)}"
    reason += f" and {format_count(lanes, 'lane')}" if shuffle else ""
    enough = f"read fewer columns, or give memory={format_size(1.01 * least)!r}"
    if pieces:
        mixed, number = min(split.items())
        if number > min(rows, _MOST_PIECES):
            raise UsageError(name, reason, enough)
        number = _with_spare(number) if shuffle else number
        log.debug("%s: row groups are read in %d pieces: %s", name, number, reason)
        return Window(mixed, -(-rows // number))
    advice = f"run 'pqcache repartition', which writes smaller ones that can be read in pieces, {enough}"
    if _ALONE * sizes.largest > memory:
        raise UsageError(name, reason, advice)
    warnings.warn(f"{name}: {reason}: one is read at a time in each lane, which may take more; {advice}", stacklevel=2)
    return Window(1)


def _with_spare(pieces: int) -> int:
    """Split a row group into a third more pieces than needed: the allocator keeps memory freed by earlier ones."""
    return max(pieces, min(_MOST_PIECES, -(-4 * pieces // 3)))


def largest_window(sizes: RowGroupSizes, memory: int, lanes: int, all_lanes: int | None = None) -> int:
    """How many complete row groups each of ``lanes`` lanes can mix within ``memory`` bytes, at most 16.

    If memory holds all rows, these are all row groups of a lane, up to 32, regardless of how many ranks share
    ``all_lanes``. 0 if row groups are too large even for a window of one.
    """
    if not len(sizes):
        return 1
    if sizes.complete and int(sizes.selected.sum()) + lanes * _DECODING * sizes.largest <= memory:
        return max(WINDOW, min(-(-len(sizes) // (all_lanes or lanes)), WINDOW_OF_ALL))
    sizes = RowGroupSizes(_largest(sizes.selected, WINDOW), _largest(sizes.decoded, 1), sizes.decoded_rows)
    fitting = [window for window in range(1, WINDOW + 1) if sizes.of_lane(window) <= memory / lanes]
    return max(fitting, default=0)


def _largest(sizes: Ints, most: int) -> Ints:
    return sizes if len(sizes) <= most else np.partition(sizes, len(sizes) - most)[len(sizes) - most :]


def warn_of_window(sizes: RowGroupSizes, window: int, memory: int, lanes: int, name: object) -> None:
    """Warn if a given window takes more than ``memory`` bytes on ``lanes`` lanes."""
    needed = sizes.of_lane(min(window, max(1, len(sizes)))) * lanes
    if needed > memory:
        warnings.warn(
            f"{name}: window={window} takes about {format_size(int(needed))}, more than memory={format_size(memory)}: "
            "leave window unset, or set a smaller one",
            stacklevel=2,
        )


def sizes_of(plan: ReadPlan) -> RowGroupSizes:
    """The bytes of each of a plan's row groups or pieces, from the row-group index.

    Lists have the same size whether they are held dense or not, so the window is the same.
    """
    names, rows = list(plan.kinds), plan.data.index.rows[plan.row_groups]
    decoded_rows = np.minimum(rows, plan.piece_rows) if plan.piece_rows else rows
    decoded = _bytes(plan, decoded_rows, plan.columns_read)
    if plan.pack is not None:
        items = (number_dtype(kind.bare.value_type) for kind in plan.kinds.values())
        width = sum(item.itemsize for item in items) * plan.pack.length
        selected = plan.counts * (width + len(names) * _VIEW)
        decoded += _bytes(plan, plan.selection.counts, names[:1])  # one column is laid end to end at a time
        return RowGroupSizes(selected, decoded + selected, plan.counts)
    if plan.packs is not None:
        selected = _bytes(plan, plan.selection.counts, names)
        return RowGroupSizes(selected, decoded + selected, plan.counts)
    selected = _bytes(plan, plan.counts, names, plan.sequence)
    if plan.sequence is None:
        return RowGroupSizes(selected, selected if plan.selection.is_all else decoded, rows)
    decoded += selected + 8 * plan.counts * plan.sequence.length  # where the rows of sequences are
    return RowGroupSizes(selected, decoded, plan.counts)


def most_bytes(plan: ReadPlan, names: Sequence[str]) -> Ints:
    """An upper bound of the bytes of columns in each row group of a plan; -1 if the index has none."""
    index, row_groups = plan.data.index, plan.row_groups
    total, known = np.zeros(len(row_groups), np.int64), np.ones(len(row_groups), np.bool_)
    for name in names:
        most = index.optional(f"{name}:most")[row_groups]
        known &= (most >= 0) | (index.optional(f"{name}:bytes")[row_groups] <= 0)
        total += np.maximum(most, 0)
    return np.where(known, total, -1)


def has_pages(plan: ReadPlan) -> bool:
    """Whether pieces of row groups can be read from their own pages: the files have an offset index.

    False if rows are selected or packed, as all of them are decoded anyway.
    """
    if not plan.selection.is_all or plan.weights is not None or plan.packs is not None:
        return False
    return bool(plan.data.index.table["offset_index"].take(pa.array(plan.row_groups)).to_numpy().all())


def _bytes(plan: ReadPlan, counts: Ints, names: Sequence[str], sequence: SequenceOf | None = None) -> Ints:
    """The bytes of ``counts`` rows, or sequences, of each row group in the columns ``names``."""
    index = plan.data.index
    total = np.zeros(len(plan.row_groups), np.int64)
    for name in names:
        kind = kind_of(as_list(index.schema.field(name)))
        items = counts if sequence is None else counts * len(sequence.steps(name))
        if kind.held == "fixed":
            total += items * kind.width
            continue
        share = items / np.maximum(1, index.rows[plan.row_groups])
        total += (_column_bytes(index, name)[plan.row_groups] * share).astype(np.int64) + _VIEW * items
    per_row = _FILE_NUMBER * bool(plan.partitions) + _ROW_HASH * plan.has_hashes
    return np.asarray(total + per_row * counts, np.int64)


def _column_bytes(index: Index, name: str) -> Ints:
    """The bytes of a column in each row group; unknown ones are estimated from the stored bytes."""
    if f"{name}:decoded" not in index.recorded:
        return index.rows * fixed_width(index.schema.field(name).type)
    decoded, stored = index.optional(f"{name}:decoded"), index.uncompressed([name])
    known = decoded >= 0
    ratio = max(1.0, decoded[known].sum() / max(1, stored[known].sum()))
    return np.where(known, decoded, (stored * ratio).astype(np.int64))
