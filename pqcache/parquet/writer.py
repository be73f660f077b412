"""Parquet files whose row groups fill a number of compressed bytes and never exceed it.

How many rows fill a row group is predicted, tried, measured and learned. The size of some rows is guessed as
the sum over the columns of ``k * weight``, where the weight is the rows' Arrow bytes times the column's
compression at the source, and ``k`` is learned from what was encoded last. A row group is encoded slice by slice, in
memory: the size of each slice is exact, so the next one only has to fill what it left. Columns with a dictionary
come last, in one piece. What turns out too large is taken back. One footer goes at the end of the file.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

from pqcache.errors import ParquetError
from pqcache.memory import Pool
from pqcache.parquet import footer
from pqcache.parquet.deal import THREADS, dealt
from pqcache.parquet.decode import Floats, Piece, weigh
from pqcache.parquet.encodings import Encodings, chosen, total
from pqcache.parquet.extend import extended, is_text_like, may_be_mixed, with_dictionary
from pqcache.parquet.growing import WRITERS
from pqcache.parquet.guess import Guess, foreseen
from pqcache.parquet.pending import Pending
from pqcache.parquet.rowfile import Layout, Output, RowGroupFile, form_of, keyvalues_of, widened
from pqcache.parquet.stitch import Chunk, Part, RowGroup, encode, stitched
from pqcache.units import format_size

MIN_FILL = 0.95
_MAX_GUESSES, _MAX_TRIES = 5, 40  # at columns that are encoded in one piece; after the former, bisect
_FULL = 0.004  # of a row group: so little may stay empty
_SPARE = 0.0002
_WELL, _CHEAP = 0.985, 0.1  # fill a row group better if what has to be done again is cheap
_WORTH_A_TAIL, _TAIL_MARGIN, _MAX_TAILS = 0.008, 0.1, 2  # of a row group: what is left beside columns with a dictionary
_FAR_OFF = 1.5  # row-group sizes
_PAGE_HEADER = 64  # bytes, about
_WORTH_A_CHANGE = 0.97  # new encodings must make a sample this much smaller
_PROBE_EVERY = 16  # row groups; and after the first and the fourth
_MAX_ROWS = 64 << 20  # pyarrow splits larger row groups by itself
_MAX_ARROW_RATIO = 16  # decoded bytes of one row group, in row-group sizes: what a reader has to hold
_MIN_MAX_ARROW = 1 << 30
_PROBE_SHARE = 80  # the sample is an eightieth of a row group
_MIN_PROBE, _MAX_PROBE = 1 << 19, 32 << 20
_SAMPLE_SLICES = 8
_UNSTEADY = 0.05  # guesses that are so far off are helped by a look at the rows themselves,
_LOOK_SHARE, _LOOK_SLICES, _MIN_LOOK = 40, 32, 1 << 17  # a fortieth of them,
_LOOK_ROOM = 0.03  # while so much of a row group is to be filled
_TRUSTED = 0.02  # guesses that are worse off than this make slices of an eighth of a row group:
_SHARES, _MIN_PAGES = 8, 128 << 10  # less is lost where one is too large, but pages get smaller
_MAX_WARNINGS = 20
_MAX_HOLE = 0.05  # of a block

Encoded = list[tuple[list[int], Part]]
"""Encoded columns: each part with its leaf columns."""


@dataclass(frozen=True)
class Settings:
    """How the row groups are cut and encoded.

    ``codec`` names the codec to try for a leaf column, by position; ``max_file`` is when a new file begins;
    ``name_of`` says which file and row a row was, by its number. No row group lies across a multiple of
    ``block_size`` bytes, unless it is larger: what is left of a block stays empty.
    ``cached`` says that the files are read next.
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
    cached: bool = False


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


@dataclass
class _Slice:
    """Some rows of a row group: its columns that are encoded in slices, and all of them as they were decoded."""

    rows: int
    size: int
    parts: list[tuple[list[int], Part]]
    pieces: list[Piece]


@dataclass
class _Group:
    """A row group in the making.

    Attributes:
        sliced: columns whose pages can be added slice by slice.
        whole: columns with a dictionary, which are encoded when it is known which rows there will be.
        size: bytes of the ``slices``.
        weights: of all rows so far; ``held`` are their decoded bytes.
        most: rows that the next slice may have, after one was too large; None for any number.
        wanting: it has to grow, whatever is guessed.
        probed: its encodings were chosen from its own rows.
        fits, over: rows with which the row group is known to fit, and not to fit.
        tries: how often ``whole`` has been encoded.
        force: add so many rows, whatever is guessed.
    """

    sliced: list[int]
    whole: list[int]
    slices: list[_Slice] = field(default_factory=list)
    rows: int = 0
    size: int = 0
    weights: Floats | float = 0.0
    held: int = 0
    most: int | None = None
    failed: int = 0
    fits: int = 0
    over: int | None = None
    tries: int = 0
    wanting: bool = False
    probed: bool = False
    force: int = 0


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
        encoders: Executor,
    ) -> None:
        self.pending = Pending(stream)
        self.target, self.layout, self.settings, self.next_number = target, layout, settings, first
        self.limit = settings.row_group_size
        self.max_bytes = max(_MIN_MAX_ARROW, _MAX_ARROW_RATIO * self.limit)
        self.guess = Guess(np.ones(len(layout.working)))
        self.encodings = Encodings(decimal_as_integer=settings.decimal_as_integer, int96=settings.int96)
        self.form = form_of(layout, self.encodings)
        self.dictionaries: dict[str, int] = {}
        self.memory = Pool()
        self.files, self.disk, self.encoders = files, disk, encoders
        self.encoded = self.again = 0
        self.warnings: list[str] = []
        self.unreported = 0

    def run(self) -> None:
        """Write everything that the stream gives, row group by row group."""
        number = 0
        while True:
            self.pending.fill(self.limit, self.guess.k, _MAX_ROWS, self.max_bytes)
            if not self.pending.rows:
                return
            if number in (0, 1, 4) or number % _PROBE_EVERY == 0:
                self.probe()
            self.write(self.row_group())
            number += 1

    def probe(self, anew: bool = False) -> None:
        """Choose the encodings, unless those there are do as well, and make a first guess, from a sample."""
        size = min(max(self.pending.bytes // _PROBE_SHARE, _MIN_PROBE), _MAX_PROBE)
        sample = self.pending.sample(size, _SAMPLE_SLICES)
        settings = self.settings
        plain = Encodings(level=settings.level, decimal_as_integer=settings.decimal_as_integer, int96=settings.int96)
        encodings = chosen(sample, settings.codec, plain, settings.compat, self.encoders)
        if self.encoded and not anew and total(sample, encodings) > _WORTH_A_CHANGE * total(sample, self.encodings):
            return  # what was learned is better than what a sample tells
        self.encodings = encodings
        rows, leaves = foreseen(sample, encodings, self.limit)
        weights = weigh(sample, self.pending.ratios())
        self.guess = Guess(
            self.by_column(range(len(leaves)), leaves) / np.maximum(weights * rows / sample.num_rows, 1e-9)
        )

    def by_column(self, leaves: Sequence[int], sizes: Sequence[float]) -> Floats:
        """Return sizes of leaf columns summed by top-level column."""
        tops = self.form.tops[list(leaves)]
        return np.bincount(tops, weights=sizes, minlength=len(self.layout.working)).astype(np.float64)

    def row_group(self) -> RowGroup:
        """Encode rows, slice by slice, until a row group is full; take the last ones back where they are too many."""
        group, limit = self.begun(), self.limit
        while True:
            if count := self.rows_to_add(group):
                self.add(group, count)
                continue
            whole = self.encode([piece for part in group.slices for piece in part.pieces], group.whole)
            bytes_of_whole = sum(part.size for _, part in whole)
            size = group.size + bytes_of_whole
            group.tries += 1
            if group.whole:
                self.guess.learn_whole(np.asarray(group.weights), self.taken(whole), group.whole)
            if size <= limit:
                group.fits = group.rows
            if size > limit and group.rows > 1:
                self.again += bytes_of_whole
                group.over = group.rows
                self.take_back(group, size > _FAR_OFF * limit and not group.probed)
                if size > _FAR_OFF * limit and not group.probed:
                    self.probe(anew=True)  # it may not be worth a dictionary any more
                    group = replace(self.begun(), probed=True)
                continue
            whole, tail = self.tail(group, whole, (1 - _SPARE) * limit - size)
            size += sum(part.size for part in tail)
            if self.wants_more(group, size, bytes_of_whole):
                self.again += bytes_of_whole + sum(part.size for part in tail)
                self.pending.back([piece for part in tail for piece in part.pieces])
                group.wanting, group.most, group.failed = True, None, 0
                if group.tries >= _MAX_GUESSES and group.over is not None:
                    self.take_back(group, True)
            else:
                if size > limit:
                    self.warn_single(size, int(group.slices[0].pieces[0].numbers[0]))
                elif size < MIN_FILL * limit and self.pending.rows and self.full(group):
                    self.warn_capped(size)
                return self.put_together(group, whole, tail)

    def begun(self) -> _Group:
        """Return an empty row group: which of its columns are encoded in slices follows from their encodings."""
        names = footer.leaves_of(footer.schema_of(self.form.template, "the new schema"), "the new schema")
        paths = [b".".join(leaf.path).decode("utf-8", "replace") for leaf in names]
        dictionary = set(self.encodings.dictionary)
        whole = {int(top) for path, top in zip(paths, self.form.tops, strict=True) if path in dictionary}
        columns = range(len(self.layout.working))
        return _Group([n for n in columns if n not in whole], sorted(whole))

    def rows_to_add(self, group: _Group) -> int:
        """Return how many rows to encode next as a slice of ``group``; 0 where it is full."""
        pending, guess, limit = self.pending, self.guess, self.limit
        max_rows = min(_MAX_ROWS, sys.maxsize if group.over is None else group.over - 1) - group.rows
        if group.most is not None:
            max_rows = min(max_rows, group.most)
        if group.force:
            return group.force if not group.rows else 0
        if max_rows <= 0:
            return 0
        margin = guess.margin(not group.slices)
        k = guess.k.copy()
        k[group.whole] *= 1 + guess.whole_margin
        room = limit * (1 - _SPARE) - group.size
        if group.rows:
            room -= float(np.dot(k[group.whole], np.asarray(group.weights)[group.whole]))
        headers = _PAGE_HEADER * sum(int(top) in set(group.sliced) for top in self.form.tops)
        pending.fill(room, k, max_rows, self.max_bytes - group.held)
        if not pending.rows or (group.rows and group.held + pending.queue[0].nbytes > self.max_bytes):
            return 0
        few = max(limit / _SHARES, _MIN_PAGES * len(group.sliced)) if guess.spread > _TRUSTED else room
        near = room - headers <= 1.25 * few  # else the slice is too small to be too large
        if group.sliced and near and guess.unsteady > _UNSTEADY and room > _LOOK_ROOM * limit and group.most is None:
            self.look(group)
            k[group.sliced] = guess.k[group.sliced]
        needed = not group.rows or group.wanting
        if not needed and room < max(_FULL * limit, 3 * headers):
            return 0
        all_of_it = float(np.dot(k, pending.total)) * (1 + guess.spread) + headers
        if pending.exhausted and pending.rows <= max_rows and all_of_it <= (room if near else room / 2):
            return pending.rows
        k[group.sliced] /= 1 - margin
        goal = room - headers if near else few
        count = pending.cut(goal, k, max_rows, self.max_bytes - group.held)
        if group.failed > 2 and group.most is not None:
            count = min(count, max(1, group.most // 2))
        full = limit - room >= MIN_FILL * limit
        if count == 1 and full and not needed and guess.of(pending.weights(1), group.sliced) > room:
            return 0
        return count

    def look(self, group: _Group) -> None:
        """Guess anew what pending rows will take, from a sample of them."""
        pending = self.pending
        sample = pending.sample(max(pending.bytes / _LOOK_SHARE, _MIN_LOOK), _LOOK_SLICES).select(group.sliced)
        part = encode(sample, self.encodings, str(self.target), self.memory)
        self.encoded += part.size
        self.again += part.size
        weights = np.zeros(len(self.layout.working))
        weights[group.sliced] = weigh(sample, pending.ratios()[group.sliced])
        leaves = [int(leaf) for n in group.sliced for leaf in np.flatnonzero(self.form.tops == n)]
        self.guess.look(weights, self.taken([(leaves, part)]), group.sliced)

    def add(self, group: _Group, count: int) -> None:
        """Encode the first pending rows as a slice of ``group``, unless they turn out to be too many."""
        pending, guess = self.pending, self.guess
        weights = pending.weights(count)
        pieces = pending.drop(count)
        parts = self.encode(pieces, group.sliced, halves=True)
        size = sum(part.size for _, part in parts)
        if group.sliced:
            guess.learn_slice(weights, self.taken(parts), group.sliced, size / self.limit)
        later = guess.of(np.asarray(group.weights + weights), group.whole) * (1 - guess.whole_margin)
        if group.size + size + (0 if group.force else later) > self.limit and (group.rows or count > 1):
            self.again += size
            pending.back(pieces)
            # No bound on the whole row group: what rows take depends on where they are cut.
            group.most, group.failed = count - 1, group.failed + 1
            if group.force:
                group.over, group.force = count, max(1, (group.fits + count) // 2)
            return
        group.slices.append(_Slice(count, size, parts, pieces))
        group.rows += count
        group.size += size
        group.weights = group.weights + weights
        group.held += sum(piece.nbytes for piece in pieces)
        group.most, group.failed, group.wanting = None, 0, False

    def take_back(self, group: _Group, everything: bool) -> None:
        """Take rows off ``group``: the slices that are too many, or all, as where guessing has failed too often."""
        bisect = group.tries >= _MAX_GUESSES
        while group.slices:
            last = group.slices.pop()
            self.pending.back(last.pieces)
            self.again += last.size
            group.rows -= last.rows
            group.size -= last.size
            group.held -= sum(piece.nbytes for piece in last.pieces)
            weights = np.sum([piece.weights for part in group.slices for piece in part.pieces], axis=0)
            group.weights = weights if group.slices else 0.0
            if (
                not (bisect or everything)
                and group.slices
                and group.size + self.guess.of(weights, group.whole) <= self.limit
            ):
                break
        group.most, group.failed, group.force = None, 0, 0
        if bisect and group.over is not None:
            group.force = max(1, (group.fits + group.over) // 2)

    def wants_more(self, group: _Group, size: int, whole: int) -> bool:
        """Return whether a row group of ``size`` bytes that fits should get more rows, ``whole`` being done again."""
        stuck = group.most == 0 and not group.whole  # else a guess said so, which has been put right meanwhile
        if group.tries > _MAX_TRIES or stuck or (group.over or sys.maxsize) <= group.rows + 1:
            return False
        worth = size < MIN_FILL * self.limit or (size < _WELL * self.limit and whole < _CHEAP * self.limit)
        if not worth or self.full(group) or (group.tries > 1 and size >= MIN_FILL * self.limit):
            return False
        self.pending.fill(1, self.guess.k, _MAX_ROWS, self.max_bytes)
        return self.pending.rows > 0

    def full(self, group: _Group) -> bool:
        """Return whether as much is in ``group`` as may be held at once."""
        return group.held + self.pending.bytes > self.max_bytes or group.rows + self.pending.rows > _MAX_ROWS

    def encode(
        self,
        pieces: Sequence[Piece],
        columns: Sequence[int],
        halves: bool = False,
        encodings: Encodings | None = None,
    ) -> Encoded:
        """Return ``columns`` of ``pieces``, encoded on as many threads as help, each part with its leaf columns.

        With ``halves`` a column may come in two parts, the one with the first rows first. ``encodings`` are
        others than the writer's own.
        """
        how = encodings or self.encodings
        if not columns:
            return []
        table = pa.concat_tables([piece.table.select(list(columns)) for piece in pieces])
        if any(pt.is_dictionary(column.type) for column in table.schema):
            table = table.unify_dictionaries()  # a second dictionary would make the writer fall back to plain
            for name, column in zip(table.schema.names, table.columns, strict=True):
                if pt.is_dictionary(column.type) and column.num_chunks:
                    self.dictionaries[name] = max(self.dictionaries.get(name, 0), len(column.chunk(0).dictionary))
        sizes = np.sum([piece.weights for piece in pieces], axis=0)[list(columns)]
        tasks = dealt(table, sizes, how, halves)
        parts = list(self.encoders.map(lambda task: encode(task[0], how, str(self.target), self.memory), tasks))
        self.encoded += sum(part.size for part in parts)
        leaves = [
            [int(leaf) for n in share for leaf in np.flatnonzero(self.form.tops == columns[n])] for _, share in tasks
        ]
        return list(zip(leaves, parts, strict=True))

    def taken(self, parts: Sequence[tuple[list[int], Part]]) -> Floats:
        """Return the bytes that parts take by top-level column."""
        leaves = [leaf for some, _ in parts for leaf in some]
        return self.by_column(leaves, [chunk.size for _, part in parts for chunk in part.chunks])

    def tail(self, group: _Group, whole: Encoded, room: float) -> tuple[Encoded, list[_Slice]]:
        """Fill the ``room`` that guessing has left; return ``whole`` with longer dictionaries, and the rows added."""
        pending, found, most = self.pending, list[_Slice](), sys.maxsize
        held, rows = group.held, group.rows
        headers = 2 * _PAGE_HEADER * len(self.form.tops)
        while group.whole and room > max(_WORTH_A_TAIL * self.limit, 3 * headers) and most and len(found) < _MAX_TAILS:
            pending.fill(room, self.guess.k, _MAX_ROWS - rows, self.max_bytes - held)
            if not pending.rows or held + pending.queue[0].nbytes > self.max_bytes or rows >= _MAX_ROWS:
                break
            goal = (1 - _TAIL_MARGIN) * room - headers
            count = pending.cut(goal, self.guess.k, min(most, _MAX_ROWS - rows), self.max_bytes - held)
            pieces = pending.drop(count)
            before = self.encoded
            longer = self.longer(
                group, [piece for part in [*group.slices, *found] for piece in part.pieces], whole, pieces
            )
            if longer is None:
                pending.back(pieces)
                break
            parts = self.encode(pieces, group.sliced)
            size = sum(part.size for _, part in [*parts, *longer[0], *longer[1]]) - sum(part.size for _, part in whole)
            if size <= room:
                self.again += self.encoded - before - size
                whole = longer[0]
                found.append(_Slice(count, size, [*parts, *longer[1]], pieces))
                held, rows, room = held + sum(piece.nbytes for piece in pieces), rows + count, room - size
                continue
            self.again += self.encoded - before
            pending.back(pieces)
            most = min(count - 1, int((1 - _TAIL_MARGIN) * count * room / size))
        return whole, found

    def longer(
        self, group: _Group, before: Sequence[Piece], whole: Encoded, pieces: Sequence[Piece]
    ) -> tuple[Encoded, Encoded] | None:
        """Return ``whole`` and what follows it for the rows of ``pieces``: longer dictionaries, or plain pages."""
        types = self.layout.working.types
        texts = [n for n in group.whole if is_text_like(types[n])]
        plain = [n for n in group.whole if n not in texts]
        if not all(map(may_be_mixed, (types[n] for n in plain))):
            return None
        first, last = dict[int, Chunk](), list[tuple[list[int], Part]]()
        if texts:
            known = pa.concat_tables([piece.table.select(texts) for piece in before])
            added = pa.concat_tables([piece.table.select(texts) for piece in pieces])
            columns = [with_dictionary(*pair) for pair in zip(added.columns, known.columns, strict=True)]
            fields = [f.with_type(column.type) for f, column in zip(added.schema, columns, strict=True)]
            new = encode(pa.table(columns, schema=pa.schema(fields)), self.encodings, str(self.target), self.memory)
            self.encoded += new.size
            for name, column in zip(added.column_names, columns, strict=True):
                if name in self.dictionaries:
                    self.dictionaries[name] = max(self.dictionaries[name], len(column.chunk(0).dictionary))
            old = {leaf: chunk for leaves, part in whole for leaf, chunk in zip(leaves, part.chunks, strict=True)}
            for top, chunk in zip(texts, new.chunks, strict=True):
                leaf = int(np.flatnonzero(self.form.tops == top)[0])
                if (both := extended(old[leaf], chunk)) is None:
                    self.again += new.size
                    return None
                first[leaf] = both[0]
                last.append(([leaf], Part(new.rows, [both[1]])))
        last += self.encode(pieces, plain, encodings=replace(self.encodings, dictionary=()))
        changed = [
            (leaves, Part(part.rows, [first.get(leaf, c) for leaf, c in zip(leaves, part.chunks, strict=True)]))
            for leaves, part in whole
        ]
        return changed, last

    def put_together(
        self, group: _Group, whole: Sequence[tuple[list[int], Part]], tail: Sequence[_Slice] = ()
    ) -> RowGroup:
        """Return ``group`` as it is to be written."""
        found: list[list[Chunk]] = [[] for _ in self.form.paths]
        counts: list[list[int]] = [[] for _ in self.form.paths]
        sliced, last = ([pair for piece in some for pair in piece.parts] for some in (group.slices, tail))
        for leaves, part in [*sliced, *whole, *last]:
            for leaf, chunk in zip(leaves, part.chunks, strict=True):
                found[leaf].append(chunk)
                counts[leaf].append(part.rows)
        return stitched(counts, found, self.form.orders)

    def write(self, group: RowGroup) -> None:
        """Append a row group to the last file, or to a new one where that is full or a block would stay empty."""
        block = self.settings.block_size
        file = self.files[-1] if self.files else None
        if file is not None:
            hole = -file.position % block if block and straddles(file.position, group.size, block) else 0
            if file.position + self.limit > self.settings.max_file or (block and hole > _MAX_HOLE * block):
                file.pause()
                file = None
        file = file or self.begin_file()
        if block and group.size <= block and straddles(file.position, group.size, block):
            file.skip(-file.position % block)
        file.append(group)

    def begin_file(self) -> RowGroupFile:
        """Return a new output."""
        path = self.target / f"part-{self.next_number:05d}.parquet"
        self.next_number += 1
        self.files.append(RowGroupFile(path, self.form, self.disk, self.settings.cached))
        return self.files[-1]

    def warn_single(self, size: int, number: int) -> None:
        """Note that row ``number`` is larger than a row group may be."""
        if len(self.warnings) == _MAX_WARNINGS:
            self.unreported += 1
            return
        name = self.settings.name_of(number)
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
            self.begin_file()
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
    with ThreadPoolExecutor(WRITERS, "pqcache-disk") as disk, ThreadPoolExecutor(THREADS, "pqcache-encode") as encoders:
        try:
            writer = _Writer(stream, target, layout, settings, first, files, disk, encoders)
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
