"""Parquet files whose row groups fill a number of compressed bytes and never exceed it.

How many rows fill a row group is predicted, tried, measured and learned. The size of some rows is guessed as
the sum over the columns of ``k * weight``, where the weight is the rows' Arrow bytes times the column's
compression at the source, and ``k`` is learned from the row group written last. Each row group is written by a
ParquetWriter of its own, straight into the output; its footer is taken off and its offsets are shifted; one
footer goes at the end. What turns out too big is truncated and done again, what is too small is extended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

from pqcache.errors import ParquetError
from pqcache.parquet.decode import Floats, Piece, piece_of, weigh
from pqcache.parquet.encodings import Encodings, chosen, total
from pqcache.parquet.guess import Guess, foreseen
from pqcache.parquet.rowfile import Encoded, Layout, Output, RowGroupFile, form_of, keyvalues_of, widened
from pqcache.units import format_size

MIN_FILL = 0.95
_MAX_TRIES = 16  # two or three, but for data that changes its nature within a row group
_WORTH_A_CHANGE = 0.97  # new encodings must make a sample this much smaller
_PROBE_EVERY = 16  # row groups; and after the first and the fourth
_MAX_ROWS = 64 << 20  # pyarrow splits larger row groups by itself
_MAX_ARROW_RATIO = 16  # decoded bytes of one row group, in row-group sizes: what a reader has to hold
_MIN_MAX_ARROW = 1 << 30
_SAMPLE_SLICES = 8
_PROBE_SHARE = 80  # the sample is an eightieth of a row group
_MIN_PROBE, _MAX_PROBE = 1 << 19, 32 << 20
_MAX_WARNINGS = 20
_MAX_HOLE = 0.05  # of a block


@dataclass(frozen=True)
class Settings:
    """How the row groups are cut and encoded.

    ``codec`` names the codec to try for a leaf column, by position; ``max_file`` is when a new file begins;
    ``name_of`` says which file and row a row was, by its number. No row group lies across a multiple of
    ``block_size`` bytes, unless it is larger: what is left of a block stays empty.
    """

    row_group_size: int
    max_file: int
    codec: Callable[[int], str]
    name_of: Callable[[int], str]
    level: int | None = None
    compat: bool = False
    decimal_as_integer: bool = False
    int96: bool = False
    block_size: int | None = None


def straddles(start: int, size: int, block_size: int | None) -> bool:
    """Return whether ``size`` bytes from ``start`` lie in more than one block."""
    return block_size is not None and start // block_size != (start + size - 1) // block_size


@dataclass(frozen=True)
class Written:
    """What `write_row_groups` did. Bytes are compressed bytes; ``again`` counts those encoded more than once."""

    outputs: tuple[Output, ...]
    encoded: int = 0
    again: int = 0
    warnings: tuple[str, ...] = ()


class _Pending:
    """Rows that wait to be written: pieces in order, and what they weigh."""

    def __init__(self, stream: Iterator[Piece]) -> None:
        self.stream = stream
        self.queue: deque[Piece] = deque()
        self.total: Floats | float = 0.0
        self.rows = 0
        self.bytes = 0
        self.exhausted = False

    def _pull(self) -> bool:
        piece = next(self.stream, None)
        if piece is None:
            self.exhausted = True
            return False
        if piece.table.num_rows:
            self.queue.append(piece)
            self.total = self.total + piece.weights
            self.rows += piece.table.num_rows
            self.bytes += piece.nbytes
        return True

    def fill(self, goal: float, k: Floats, max_bytes: int) -> None:
        """Take pieces in until they are guessed to exceed ``goal``, or are too many for one row group."""
        while not self.exhausted and self.rows <= _MAX_ROWS and self.bytes <= max_bytes:
            if self.rows and float(np.dot(k, self.total)) > goal:
                return
            self._pull()

    def more(self, max_bytes: int) -> None:
        """Take one more piece in, if there is one and room for it."""
        before = self.rows
        while self.rows == before and not self.exhausted and self.rows <= _MAX_ROWS and self.bytes <= max_bytes:
            self._pull()

    def weights(self, rows: int) -> Floats:
        """Return the weights of the first ``rows`` rows."""
        result: Floats = np.zeros(len(self.queue[0].weights))
        for piece in self.queue:
            if rows <= 0:
                break
            whole = rows >= piece.table.num_rows
            result = result + (piece.weights if whole else weigh(piece.table.slice(0, rows), piece.ratios))
            rows -= piece.table.num_rows
        return result

    def cut(self, goal: float, k: Floats, max_bytes: int) -> int:
        """Return how many rows are guessed to take at most ``goal`` bytes; at least one."""
        rows = held = 0
        guess = 0.0
        for piece in self.queue:
            more = float(np.dot(k, piece.weights))
            held += piece.nbytes
            if rows and held > max_bytes:
                break
            if guess + more > goal:
                low, high = 0, piece.table.num_rows  # low rows of this piece fit, high do not
                while high - low > 1:
                    middle = (low + high) // 2
                    part = float(np.dot(k, weigh(piece.table.slice(0, middle), piece.ratios)))
                    low, high = (middle, high) if guess + part <= goal else (low, middle)
                rows += low
                break
            guess += more
            rows += piece.table.num_rows
        return max(1, min(rows, _MAX_ROWS))

    def head(self, rows: int) -> pa.Table:
        """Return the first ``rows`` rows."""
        parts = []
        for piece in self.queue:
            parts.append(piece.table.slice(0, rows))
            rows -= parts[-1].num_rows
            if not rows:
                break
        table = pa.concat_tables(parts)
        if any(pt.is_dictionary(column.type) for column in table.schema):
            table = table.unify_dictionaries()  # a second dictionary would make the writer fall back to plain
        return table

    def drop(self, rows: int) -> None:
        """Forget the first ``rows`` rows."""
        self.rows -= rows
        while rows:
            piece = self.queue.popleft()
            self.bytes -= piece.nbytes
            if piece.table.num_rows > rows:
                rest = piece_of(piece.table.slice(rows), piece.ratios, piece.numbers[rows:], piece.done)
                self.queue.appendleft(rest)
                self.bytes += rest.nbytes
                rows = 0
            else:
                rows -= piece.table.num_rows
        self.total = np.sum([piece.weights for piece in self.queue], axis=0) if self.queue else 0.0

    def ratios(self) -> Floats:
        """Return the mean of the pieces' ratios."""
        rows = [piece.table.num_rows for piece in self.queue]
        result: Floats = np.average([piece.ratios for piece in self.queue], axis=0, weights=rows)
        return result

    def sample(self, size: int) -> pa.Table:
        """Return about ``size`` Arrow bytes in slices spread over all rows."""
        share = min(1.0, size / max(1, self.bytes))
        rows = max(1, int(self.rows * share / _SAMPLE_SLICES))
        step = self.rows / _SAMPLE_SLICES
        if rows >= step:
            return self.head(self.rows)
        whole = pa.concat_tables([piece.table for piece in self.queue])
        table = pa.concat_tables([whole.slice(int(turn * step), rows) for turn in range(_SAMPLE_SLICES)])
        return table.unify_dictionaries().combine_chunks()


class _Writer:
    """The state of `write_row_groups`."""

    def __init__(
        self,
        stream: Iterator[Piece],
        target: Path,
        layout: Layout,
        settings: Settings,
        first: int,
        files: list[RowGroupFile],
        disk: Executor,
    ) -> None:
        self.pending = _Pending(stream)
        self.target, self.layout, self.settings, self.next_number = target, layout, settings, first
        self.limit = settings.row_group_size
        self.max_bytes = max(_MIN_MAX_ARROW, _MAX_ARROW_RATIO * self.limit)
        self.guess = Guess(np.ones(len(layout.working)))
        self.encodings = Encodings(decimal_as_integer=settings.decimal_as_integer, int96=settings.int96)
        self.form = form_of(layout, self.encodings)
        self.dictionaries: dict[str, int] = {}
        self.files, self.disk = files, disk
        self.encoded = self.again = 0
        self.warnings: list[str] = []
        self.unreported = 0

    def run(self) -> None:
        """Write everything that the stream gives, row group by row group."""
        self.pending.fill(self.limit, self.guess.k, self.max_bytes)
        if not self.pending.rows:
            return
        number = 0
        while self.pending.rows:
            if number in (0, 1, 4) or number % _PROBE_EVERY == 0:
                self.probe()
            self.write_group(self.file())
            number += 1
            self.pending.fill(self.limit, self.guess.k, self.max_bytes)

    def probe(self) -> None:
        """Choose the encodings and make a first guess, from a sample of what is pending."""
        size = min(max(self.pending.bytes // _PROBE_SHARE, _MIN_PROBE), _MAX_PROBE)
        sample = self.pending.sample(size)
        settings = self.settings
        plain = Encodings(level=settings.level, decimal_as_integer=settings.decimal_as_integer, int96=settings.int96)
        encodings = chosen(sample, settings.codec, plain, settings.compat)
        if self.encoded and total(sample, encodings) > _WORTH_A_CHANGE * total(sample, self.encodings):
            return  # what was learned is better than what a sample tells
        self.encodings = encodings
        rows, leaves = foreseen(sample, encodings, self.limit)
        weights = weigh(sample, self.pending.ratios()) * (rows / sample.num_rows)
        self.guess = Guess(self.by_column(leaves) / np.maximum(weights, 1e-9))

    def by_column(self, leaves: Sequence[float]) -> Floats:
        """Return sizes of leaf columns summed by top-level column."""
        return np.bincount(self.form.tops, weights=leaves, minlength=len(self.layout.working)).astype(np.float64)

    def write_group(self, file: RowGroupFile) -> None:
        """Write one row group: predict, encode, measure; again where it does not fit or fill."""
        pending, guess, limit = self.pending, self.guess, self.limit
        fits: tuple[int, int] | None = None  # rows and bytes of the largest attempt within the limit
        over: tuple[int, int] | None = None  # of the smallest attempt beyond it
        tries = 0
        while True:
            rows = self.rows_to_try(fits, over, tries)
            weights = pending.weights(rows)
            guessed = guess.of(weights)
            self.align(file, min(int(guessed), limit))
            result = self.encode(file, rows)
            tries += 1
            if tries == 1:
                guess.judge(guessed, result.size)
            guess.learn(weights, self.by_column(result.columns), missed=result.size > limit)
            if result.size > limit and rows > 1:
                over = (rows, result.size)
                self.undo(file, result)
                if fits is None or (rows - fits[0] > 1 and tries < _MAX_TRIES):
                    continue
                rows = fits[0]
                result = self.encode(file, rows)  # known to fit
            elif result.size < MIN_FILL * limit and tries < _MAX_TRIES and self.can_extend(rows, over):
                fits = (rows, result.size)
                self.undo(file, result)
                continue
            if result.size > limit:
                self.warn_single(result.size)
            elif result.size < MIN_FILL * limit and rows < pending.rows and self.full():
                self.warn_capped(result.size)
            if straddles(result.start, result.size, self.settings.block_size):  # the guess had said that it fits
                self.undo(file, result)
                self.align(file, result.size)
                result = self.encode(file, rows)
            file.keep(result, rows)
            pending.drop(rows)
            return

    def align(self, file: RowGroupFile, size: int) -> None:
        """Go on at the next block if ``size`` bytes would lie in two, and fit into one."""
        block = self.settings.block_size
        if block is not None and size <= block and straddles(file.position, size, block):
            file.skip(-file.position % block)

    def rows_to_try(self, fits: tuple[int, int] | None, over: tuple[int, int] | None, tries: int) -> int:
        """Return how many rows to encode next, given what was tried."""
        pending, k = self.pending, self.guess.k
        goal = self.limit * (1 - self.guess.margin)
        if over is None:
            pending.fill(goal, k, self.max_bytes)
            all_of_it = float(np.dot(k, pending.total))
            if pending.exhausted and not self.full() and all_of_it <= (goal + self.limit) / 2:
                return pending.rows
            rows = pending.cut(goal, k, self.max_bytes)
        elif fits is None:
            # ``k`` was learned from these very rows. Should that fail again and again, halve.
            rows = pending.cut(goal, k, self.max_bytes) if tries < _MAX_TRIES // 3 else over[0] // 2
        else:
            # Rows are not alike, or the guess had hit: search between what fits and what does not.
            low, high = (float(np.dot(k, pending.weights(known[0]))) for known in (fits, over))
            part = (goal - fits[1]) / (over[1] - fits[1]) if 2 * fits[1] > goal else 0.5
            rows = pending.cut(low + part * (high - low), k, self.max_bytes)
        least = 1 if fits is None else fits[0] + 1
        most = pending.rows if over is None else over[0] - 1
        return max(1, min(max(rows, least), most))

    def full(self) -> bool:
        """Return whether as much is pending as may be held at once."""
        return self.pending.bytes > self.max_bytes or self.pending.rows > _MAX_ROWS

    def can_extend(self, rows: int, over: tuple[int, int] | None) -> bool:
        """Return whether a row group of ``rows`` rows could be larger."""
        if over is not None:
            return over[0] > rows + 1
        if rows >= self.pending.rows:
            self.pending.more(self.max_bytes)
        return rows < self.pending.rows and not self.full()

    def encode(self, file: RowGroupFile, rows: int) -> Encoded:
        """Append the first pending rows to ``file`` as one row group."""
        table = self.pending.head(rows)
        for name, column in zip(table.schema.names, table.columns, strict=True):
            if pt.is_dictionary(column.type):
                self.dictionaries[name] = max(self.dictionaries.get(name, 0), len(column.chunk(0).dictionary))
        result = file.append(table, self.encodings)
        self.encoded += result.size
        return result

    def undo(self, file: RowGroupFile, result: Encoded) -> None:
        """Take the row group just written off ``file`` again."""
        self.again += result.size
        file.undo(result)

    def file(self) -> RowGroupFile:
        """Return the output to append to: the last one, or a new one where that is full."""
        if self.files and self.files[-1].position + self.limit <= self.settings.max_file and not self.wastes():
            return self.files[-1]
        if self.files:
            self.files[-1].pause()
        path = self.target / f"part-{self.next_number:05d}.parquet"
        self.next_number += 1
        self.files.append(RowGroupFile(path, self.form, self.disk))
        return self.files[-1]

    def wastes(self) -> bool:
        """Return whether the next row group would leave more of a block empty than a file of its own is worth."""
        block, position = self.settings.block_size, self.files[-1].position
        if block is None or not straddles(
            position, min(int(np.dot(self.guess.k, self.pending.total)), self.limit), block
        ):
            return False
        return -position % block > _MAX_HOLE * block

    def warn_single(self, size: int) -> None:
        """Note that the first pending row is larger than a row group may be."""
        if len(self.warnings) == _MAX_WARNINGS:
            self.unreported += 1
            return
        name = self.settings.name_of(int(self.pending.queue[0].numbers[0]))
        self.warnings.append(
            f"{name} alone takes {format_size(size)}, more than the row-group size of {format_size(self.limit)}; "
            "it stands alone in a row group"
        )

    def warn_capped(self, size: int) -> None:
        """Note that a row group was closed early to bound memory."""
        text = (
            f"{self.target}: row groups stay below {format_size(self.limit)} (one at "
            f"{format_size(size)}), because their rows take more than {format_size(self.max_bytes)} of memory decoded"
        )
        if not any("of memory decoded" in known for known in self.warnings):
            self.warnings.append(text)

    def finish(self) -> tuple[Output, ...]:
        """Write the footers, bring everything to disk, and return the outputs."""
        if not self.files:
            self.file()
        layout = widened(self.layout, self.dictionaries)
        first, outputs = 0, []
        for file in self.files:
            outputs.append(file.finish(keyvalues_of(layout, first, file.rows)))
            first += file.rows
        return tuple(outputs)


def write_row_groups(
    stream: Iterator[Piece], target: Path, layout: Layout, settings: Settings, first: int = 0
) -> Written:
    """Write ``stream`` to ``target/part-<first>.parquet`` and on, in row groups that fill their size.

    No row group's compressed size exceeds ``settings.row_group_size`` unless one row alone does (there is a
    warning then), and all but the last fill at least 95 % of it. Every file is on disk when this returns; on an
    error the files it began are removed.

    Raises:
        ParquetError: whatever ``stream`` raises, or a type that Parquet cannot hold.
        PqcacheError: an output cannot be written.
    """
    files: list[RowGroupFile] = []
    with ThreadPoolExecutor(1, "pqcache-disk") as disk:
        try:
            writer = _Writer(stream, target, layout, settings, first, files, disk)
            writer.run()
            outputs = writer.finish()
        except BaseException as error:
            for file in files:
                file.abandon()
            if isinstance(error, pa.ArrowException):
                raise ParquetError(f"{target}: cannot be written as Parquet ({error})") from error
            raise
    if writer.unreported:
        writer.warnings.append(f"{writer.unreported:,} more rows are larger than a row group may be")
    return Written(outputs, writer.encoded, writer.again, tuple(writer.warnings))
