"""Parquet files whose row groups fill a number of compressed bytes and never exceed it.

How many rows fill a row group is estimated, tried, measured and learned. The size of some rows is estimated as the sum
over the columns of ``factor * weight``, where the weight is the rows' Arrow bytes times the column's compression at the
source, and the factor is learned from what was encoded last. A row group is encoded part by part, in memory: the size
of each part is exact, so the next one only has to fill the remainder. Columns with a dictionary come last, in one
chunk. Rows that turn out too many go back to the queue. One footer goes at the end of the file.
"""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

from pqcache.errors import ParquetError
from pqcache.parquet.arrow_sizes import Floats, weigh
from pqcache.parquet.binary_views import bytes_in, without_views
from pqcache.parquet.encodings import EncodedSize, Encodings, choose_encodings, encoded_size, encoded_sizes
from pqcache.parquet.footer import footer
from pqcache.parquet.pages.write_binary import is_direct
from pqcache.parquet.pages.write_numbers import is_plain
from pqcache.parquet.rewrite.decode import RowBatch, row_batch
from pqcache.parquet.rewrite.encode import Chunk, EncodedRows, RowGroup, concatenate_chunks, encode_rows
from pqcache.parquet.rewrite.files import (
    WRITERS,
    OutputFile,
    OutputSchema,
    RowGroupFiles,
    footer_schema_of,
    widen_dictionary_indices,
)
from pqcache.system.buffer_pool import BufferPool
from pqcache.units import format_size

MIN_FILL = 0.95
_MAX_ESTIMATES, _MAX_TRIES = 5, 40  # at columns that are encoded in one chunk; after the former, bisect
_FULL = 0.004  # of a row group: so little may be left empty
_SPARE = 0.0002
_WELL, _CHEAP = 0.985, 0.1  # fill a row group better if what has to be done again is cheap
_FAR_OFF = 1.5  # row-group sizes
_WORTH_A_CHANGE = 0.97  # new encodings must make a sample this much smaller
_PROBE_EVERY = 16  # row groups; and after the first and the fourth
_MAX_ARROW_RATIO = 16  # decoded bytes of one row group, in row-group sizes: what a reader has to hold
_MIN_MAX_ARROW = 1 << 30
_PROBE_SHARE = 80  # the sample is an eightieth of a row group
_MIN_PROBE, _MAX_PROBE = 1 << 19, 32 << 20
_SAMPLE_SLICES = 8
_UNSTEADY = 0.05  # estimates that are so far off are helped by a look at the rows themselves,
_LOOK_SHARE, _LOOK_SLICES, _MIN_LOOK = 40, 32, 1 << 17  # a fortieth of them,
_LOOK_SPACE = 0.03  # while so much of a row group is to be filled
_TRUSTED = 0.02  # estimates that are worse off than this make parts of an eighth of a row group:
_SHARES, _MIN_PAGES = 8, 128 << 10  # less is lost where one is too large, but pages get smaller
_MAX_WARNINGS = 20


@dataclass(frozen=True, kw_only=True)
class WriterSettings:
    """How the row groups are cut and encoded.

    ``codec`` names the codec to try for a leaf column, by position; ``max_file`` is when a new file begins;
    ``name_of`` says which file and row a row was, by its number. No row group lies across a multiple of
    ``block_size`` bytes, unless it is larger: the rest of a block is left empty.
    ``use_page_cache`` says that the files are read next.
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
    use_page_cache: bool = False


@dataclass(frozen=True)
class WriteResult:
    """What `write_row_groups` did. Bytes are compressed bytes; ``again`` counts those encoded more than once."""

    outputs: tuple[OutputFile, ...]
    encoded: int = 0
    again: int = 0
    warnings: tuple[str, ...] = ()


class _Writer:
    """The state of `write_row_groups`."""

    def __init__(
        self,
        stream: Iterator[RowBatch],
        target: Path,
        output_schema: OutputSchema,
        settings: WriterSettings,
        first: int,
        disk: Executor,
        encoders: Executor,
    ) -> None:
        self.queue = RowQueue(stream)
        self.target, self.output_schema, self.settings = target, output_schema, settings
        self.limit = settings.row_group_size
        self.max_bytes = max(_MIN_MAX_ARROW, _MAX_ARROW_RATIO * self.limit)
        self.estimate = SizeEstimate(np.ones(len(output_schema.working)))
        plain = Encodings(decimal_as_integer=settings.decimal_as_integer, int96=settings.int96)
        self.encoder = Encoder(output_schema, plain, str(target), encoders)
        self.footer_schema = self.encoder.footer_schema
        self.files = RowGroupFiles(
            target=target,
            footer_schema=self.footer_schema,
            disk=disk,
            number=first,
            limit=self.limit,
            max_file=settings.max_file,
            block_size=settings.block_size,
            use_page_cache=settings.use_page_cache,
        )
        self.warnings: list[str] = []
        self.unreported = 0

    def run(self) -> None:
        """Write everything that the stream gives, row group by row group."""
        number = 0
        while True:
            self.queue.fill(self.limit, self.estimate.factors, MAX_ROWS, self.max_bytes)
            if not self.queue.rows:
                return
            if number in (0, 1, 4) or number % _PROBE_EVERY == 0:
                self.probe()
            self.files.append(self.row_group())
            number += 1

    def probe(self, anew: bool = False) -> None:
        """Choose the encodings, unless those there are do as well, and make a first estimate, from a sample."""
        size = min(max(self.queue.bytes // _PROBE_SHARE, _MIN_PROBE), _MAX_PROBE)
        sample = self.queue.sample(size, _SAMPLE_SLICES)
        settings = self.settings
        plain = Encodings(level=settings.level, decimal_as_integer=settings.decimal_as_integer, int96=settings.int96)
        encodings = choose_encodings(sample, settings.codec, plain, settings.compat, self.encoder.executor)
        encoder = self.encoder
        if (
            encoder.encoded
            and not anew
            and encoded_size(sample, encodings) > _WORTH_A_CHANGE * encoded_size(sample, encoder.encodings)
        ):
            return  # what was learned is better than what a sample tells
        encoder.encodings = encodings
        rows, leaves = estimate_from_sample(sample, encodings, self.limit)
        weights = weigh(sample, self.queue.ratios())
        self.estimate = SizeEstimate(
            encoder.by_column(range(len(leaves)), leaves) / np.maximum(weights * rows / sample.num_rows, 1e-9)
        )

    def row_group(self) -> RowGroup:
        """Encode rows, part by part, until a row group is full; take the last ones back where they are too many."""
        group, limit = self.begun(), self.limit
        while True:
            if count := self.rows_to_add(group):
                self.add(group, count)
                continue
            coded = self.encoder.encode([batch for part in group.parts for batch in part.batches], group.dictionary)
            dictionary_bytes = sum(part.size for _, part in coded)
            size = group.size + dictionary_bytes
            group.tries += 1
            if group.dictionary:
                self.estimate.learn_dictionary(np.asarray(group.weights), self.encoder.taken(coded), group.dictionary)
            if size <= limit:
                group.fits = group.rows
            if size > limit and group.rows > 1:
                self.encoder.again += dictionary_bytes
                group.over = group.rows
                self.take_back(group, size > _FAR_OFF * limit and not group.probed)
                if size > _FAR_OFF * limit and not group.probed:
                    self.probe(anew=True)  # it may not be worth a dictionary any more
                    group = replace(self.begun(), probed=True)
                continue
            if self.wants_more(group, size, dictionary_bytes):
                self.encoder.again += dictionary_bytes
                group.wanting, group.most, group.failed = True, None, 0
                if group.tries >= _MAX_ESTIMATES and group.over is not None:
                    self.take_back(group, True)
            else:
                if size > limit:
                    self.warn_single(size, int(group.parts[0].batches[0].numbers[0]))
                elif size < MIN_FILL * limit and self.queue.rows and self.full(group):
                    self.warn_capped(size)
                return self.put_together(group, coded)

    def begun(self) -> OpenRowGroup:
        """Return an empty row group: which of its columns are appendable follows from their encodings."""
        names = footer.leaves_of(footer.schema_of(self.footer_schema.template, "the new schema"), "the new schema")
        paths = [b".".join(leaf.path).decode("utf-8", "replace") for leaf in names]
        dictionary = set(self.encoder.encodings.dictionary)
        coded = {int(top) for path, top in zip(paths, self.footer_schema.tops, strict=True) if path in dictionary}
        columns = range(len(self.output_schema.working))
        return OpenRowGroup(appendable=[n for n in columns if n not in coded], dictionary=sorted(coded))

    def rows_to_add(self, group: OpenRowGroup) -> int:
        """Return how many rows to encode next as a part of ``group``; 0 where it is full."""
        queue, estimate, limit = self.queue, self.estimate, self.limit
        max_rows = min(MAX_ROWS, sys.maxsize if group.over is None else group.over - 1) - group.rows
        if group.most is not None:
            max_rows = min(max_rows, group.most)
        if group.force:
            return group.force if not group.rows else 0
        if max_rows <= 0:
            return 0
        margin = estimate.margin(not group.parts)
        factors = estimate.factors.copy()
        factors[group.dictionary] *= 1 + estimate.dictionary_margin
        space = limit * (1 - _SPARE) - group.size
        if group.rows:
            space -= float(np.dot(factors[group.dictionary], np.asarray(group.weights)[group.dictionary]))
        headers = PAGE_HEADER * sum(int(top) in set(group.appendable) for top in self.footer_schema.tops)
        queue.fill(space, factors, max_rows, self.max_bytes - group.held)
        if not queue.rows or (group.rows and group.held + queue.batches[0].nbytes > self.max_bytes):
            return 0
        few = max(limit / _SHARES, _MIN_PAGES * len(group.appendable)) if estimate.spread > _TRUSTED else space
        near = space - headers <= 1.25 * few  # else the part is too small to be too large
        if (
            group.appendable
            and near
            and estimate.unsteady > _UNSTEADY
            and space > _LOOK_SPACE * limit
            and group.most is None
        ):
            self.look(group)
            factors[group.appendable] = estimate.factors[group.appendable]
        needed = not group.rows or group.wanting
        if not needed and space < max(_FULL * limit, 3 * headers):
            return 0
        all_of_it = float(np.dot(factors, queue.total)) * (1 + estimate.spread) + headers
        if queue.exhausted and queue.rows <= max_rows and all_of_it <= (space if near else space / 2):
            return queue.rows
        factors[group.appendable] /= 1 - margin
        goal = space - headers if near else few
        count = queue.cut(goal, factors, max_rows, self.max_bytes - group.held)
        if group.failed > 2 and group.most is not None:
            count = min(count, max(1, group.most // 2))
        full = limit - space >= MIN_FILL * limit
        if count == 1 and full and not needed and estimate.of(queue.weights(1), group.appendable) > space:
            return 0
        return count

    def look(self, group: OpenRowGroup) -> None:
        """Estimate anew what queued rows will take, from a sample of them."""
        queue = self.queue
        sample = queue.sample(max(queue.bytes / _LOOK_SHARE, _MIN_LOOK), _LOOK_SLICES).select(group.appendable)
        part = self.encoder.part(sample)
        self.encoder.again += part.size
        weights = np.zeros(len(self.output_schema.working))
        weights[group.appendable] = weigh(sample, queue.ratios()[group.appendable])
        taken = self.encoder.taken([(self.encoder.leaves(group.appendable), part)])
        self.estimate.look(weights, taken, group.appendable)

    def add(self, group: OpenRowGroup, count: int) -> None:
        """Encode the first queued rows as a part of ``group``, unless they turn out to be too many."""
        queue, estimate = self.queue, self.estimate
        weights = queue.weights(count)
        batches = queue.take(count)
        parts = self.encoder.encode(batches, group.appendable, halves=True)
        size = sum(part.size for _, part in parts)
        if group.appendable:
            estimate.learn_part(weights, self.encoder.taken(parts), group.appendable, size / self.limit)
        later = estimate.of(np.asarray(group.weights + weights), group.dictionary) * (1 - estimate.dictionary_margin)
        if group.size + size + (0 if group.force else later) > self.limit and (group.rows or count > 1):
            self.encoder.again += size
            queue.put_back(batches)
            # No bound on the whole row group: what rows take depends on where they are cut.
            group.most, group.failed = count - 1, group.failed + 1
            if group.force:
                group.over, group.force = count, max(1, (group.fits + count) // 2)
            return
        group.parts.append(RowGroupPart(count, size, parts, batches))
        group.rows += count
        group.size += size
        group.weights = group.weights + weights
        group.held += sum(batch.nbytes for batch in batches)
        group.most, group.failed, group.wanting = None, 0, False

    def take_back(self, group: OpenRowGroup, everything: bool) -> None:
        """Take rows off ``group``: the parts that are too many, or all, as where estimates have failed too often."""
        bisect = group.tries >= _MAX_ESTIMATES
        while group.parts:
            last = group.parts.pop()
            self.queue.put_back(last.batches)
            self.encoder.again += last.size
            group.rows -= last.rows
            group.size -= last.size
            group.held -= sum(batch.nbytes for batch in last.batches)
            weights = np.sum([batch.weights for part in group.parts for batch in part.batches], axis=0)
            group.weights = weights if group.parts else 0.0
            if (
                not (bisect or everything)
                and group.parts
                and group.size + self.estimate.of(weights, group.dictionary) <= self.limit
            ):
                break
        group.most, group.failed, group.force = None, 0, 0
        if bisect and group.over is not None:
            group.force = max(1, (group.fits + group.over) // 2)

    def wants_more(self, group: OpenRowGroup, size: int, dictionary_bytes: int) -> bool:
        """Return whether a row group of ``size`` bytes that fits should get more rows.

        ``dictionary_bytes`` of it would be encoded again.
        """
        stuck = group.most == 0 and not group.dictionary  # else an estimate said so, which has been corrected since
        if group.tries > _MAX_TRIES or stuck or (group.over or sys.maxsize) <= group.rows + 1:
            return False
        worth = size < MIN_FILL * self.limit or (size < _WELL * self.limit and dictionary_bytes < _CHEAP * self.limit)
        if not worth or self.full(group) or (group.tries > 1 and size >= MIN_FILL * self.limit):
            return False
        self.queue.fill(1, self.estimate.factors, MAX_ROWS, self.max_bytes)
        return self.queue.rows > 0

    def full(self, group: OpenRowGroup) -> bool:
        """Return whether as much is in ``group`` as may be held at once."""
        return group.held + self.queue.bytes > self.max_bytes or group.rows + self.queue.rows > MAX_ROWS

    def put_together(self, group: OpenRowGroup, coded: Encoded) -> RowGroup:
        """Return ``group`` as it is to be written."""
        found: list[list[Chunk]] = [[] for _ in self.footer_schema.paths]
        counts: list[list[int]] = [[] for _ in self.footer_schema.paths]
        parts = [pair for part in group.parts for pair in part.encoded]
        for leaves, part in [*parts, *coded]:
            for leaf, chunk in zip(leaves, part.chunks, strict=True):
                found[leaf].append(chunk)
                counts[leaf].append(part.rows)
        return concatenate_chunks(counts, found, self.footer_schema.orders)

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
            f"{self.target}: row groups are kept below {format_size(self.limit)} (one at "
            f"{format_size(size)}), because their rows take more than {format_size(self.max_bytes)} of memory decoded"
        )
        if not any("of memory decoded" in known for known in self.warnings):
            self.warnings.append(text)


def write_row_groups(
    stream: Iterator[RowBatch], target: Path, output_schema: OutputSchema, settings: WriterSettings, first: int = 0
) -> WriteResult:
    """Write ``stream`` to ``target/part-<first>.parquet`` and on, in row groups that fill their size.

    No row group's compressed size exceeds ``settings.row_group_size`` unless one row alone does (there is a
    warning then), and all but the last fill at least 95 % of it. Every file is on disk when this returns; on an
    error the files it began are removed.

    Raises:
        ParquetError: whatever ``stream`` raises, or a type that Parquet cannot hold.
        PqcacheError: an output cannot be written.
    """
    with ThreadPoolExecutor(WRITERS, "pqcache-disk") as disk, ThreadPoolExecutor(THREADS, "pqcache-encode") as encoders:
        try:
            writer = _Writer(stream, target, output_schema, settings, first, disk, encoders)
            try:
                writer.run()
                outputs = writer.files.finish(widen_dictionary_indices(output_schema, writer.encoder.dictionaries))
            except BaseException:
                writer.files.abandon()
                raise
        except pa.ArrowException as error:
            raise ParquetError(target, f"cannot be written as Parquet ({error})") from error
    if writer.unreported:
        writer.warnings.append(f"{writer.unreported:,} more rows are larger than a row group may be")
    return WriteResult(outputs, writer.encoder.encoded, writer.encoder.again, tuple(writer.warnings))


# ---- A row group being built, part by part, and what encodes its rows

MAX_ROWS = 64 << 20  # pyarrow splits larger row groups by itself
PAGE_HEADER = 64  # bytes, about

Encoded = list[tuple[list[int], EncodedRows]]
"""Encoded columns: each part with its leaf columns."""


@dataclass
class RowGroupPart:
    """Some rows of a row group: its appendable columns, encoded, and all columns as they were decoded."""

    rows: int
    size: int
    encoded: Encoded
    batches: list[RowBatch]


@dataclass(kw_only=True)
class OpenRowGroup:
    """A row group being built.

    Attributes:
        appendable: columns without a dictionary, whose pages can be added part by part.
        dictionary: columns with a dictionary, which are encoded when it is known which rows there will be.
        size: bytes of the ``parts``.
        weights: of all rows so far; ``held`` are their decoded bytes.
        most: rows that the next part may have, after one was too large; None for any number.
        wanting: it has to grow, whatever the estimate.
        probed: its encodings were chosen from its own rows.
        fits, over: rows with which the row group is known to fit, and not to fit.
        tries: how often the ``dictionary`` columns have been encoded.
        force: add so many rows, whatever the estimate.
    """

    appendable: list[int]
    dictionary: list[int]
    parts: list[RowGroupPart] = field(default_factory=list)
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


class Encoder:
    """Encodes rows with ``encodings``, which may be changed between row groups; errors blame ``name``.

    ``dictionaries`` are the most values of each column that arrives with a dictionary. ``encoded`` counts
    compressed bytes, ``again`` those of them that were encoded more than once.
    """

    def __init__(self, output_schema: OutputSchema, plain: Encodings, name: str, executor: Executor) -> None:
        self.encodings, self.name, self.executor = plain, name, executor
        self.types = output_schema.working.types
        self.footer_schema = footer_schema_of(output_schema, plain)
        self._leaves = [np.flatnonzero(self.footer_schema.tops == n).tolist() for n in range(len(self.types))]
        self.dictionaries: dict[str, int] = {}
        self.memory = BufferPool()
        self.encoded = self.again = 0

    def part(self, table: pa.Table) -> EncodedRows:
        """Return ``table`` encoded."""
        found = encode_rows(table, self.encodings, self.name, self.memory)
        self.encoded += found.size
        return found

    def encode(self, batches: Sequence[RowBatch], columns: Sequence[int], halves: bool = False) -> Encoded:
        """Encode columns of batches on as many threads as help; return each part with its leaf columns.

        With ``halves`` a column may come in two parts, the one with the first rows first.
        """
        how = self.encodings
        if not columns:
            return []
        table = pa.concat_tables([batch.table.select(list(columns)) for batch in batches])
        if any(pt.is_dictionary(column.type) for column in table.schema):
            table = table.unify_dictionaries()  # a second dictionary would make the writer fall back to plain
            self.note_dictionaries(table)
        sizes = np.sum([batch.weights for batch in batches], axis=0)[list(columns)]
        tasks = split_work(table, sizes, how, halves)
        run = map if len(tasks) == 1 else self.executor.map  # another thread would only be waited for
        parts = list(run(lambda task: encode_rows(task[0], how, self.name, self.memory), tasks))
        self.encoded += sum(part.size for part in parts)
        leaves = [self.leaves([columns[n] for n in share]) for _, share in tasks]
        return list(zip(leaves, parts, strict=True))

    def note_dictionaries(self, table: pa.Table) -> None:
        """Remember how large the dictionaries of a table are."""
        for name, column in zip(table.schema.names, table.columns, strict=True):
            if pt.is_dictionary(column.type) and column.num_chunks:
                self.dictionaries[name] = max(self.dictionaries.get(name, 0), len(column.chunk(0).dictionary))

    def leaves(self, columns: Sequence[int]) -> list[int]:
        """Return the leaf columns of top-level columns."""
        return [leaf for n in columns for leaf in self._leaves[n]]

    def by_column(self, leaves: Sequence[int], sizes: Sequence[float]) -> Floats:
        """Return sizes of leaf columns summed by top-level column."""
        tops = self.footer_schema.tops[list(leaves)]
        return np.bincount(tops, weights=sizes, minlength=len(self.types)).astype(np.float64)

    def taken(self, parts: Encoded) -> Floats:
        """Return the bytes that parts take by top-level column."""
        leaves = [leaf for some, _ in parts for leaf in some]
        return self.by_column(leaves, [chunk.size for _, part in parts for chunk in part.chunks])


# ---- How columns and rows of a part are divided among threads

THREADS = 2
_WORTH_A_THREAD, _WORTH_HALVES = 1 << 20, 1 << 20  # Arrow bytes
_UNEVEN = 0.6  # of what the larger share of the columns takes


def split_work(table: pa.Table, sizes: Floats, encodings: Encodings, halves: bool) -> list[tuple[pa.Table, list[int]]]:
    """Return parts of ``table`` that take about as long to encode as one another, and which columns each has.

    Parts have different columns, or, where one column takes nearly all the time and ``halves`` allows it, are the first
    and the last rows of all columns. ``sizes`` are what the columns take on disk, about.
    """
    direct = [
        is_direct(name, column, encodings) or is_plain(name, column, encodings)
        for name, column in zip(table.schema.names, table.columns, strict=True)
    ]
    costs = np.where(direct, 0, sizes)
    nbytes = 0  # a column in many chunks takes long to count: only so far as it matters
    for column, done in zip(table.columns, direct, strict=True):
        if not done and nbytes <= _WORTH_HALVES:
            nbytes += bytes_in(column)
    shares = _shares(costs, THREADS if nbytes > _WORTH_A_THREAD else 1)
    cuts = [0, table.num_rows]
    halves = halves and table.num_rows > 1  # nothing is known of the values of no rows
    if halves and nbytes > _WORTH_HALVES and max(costs[share].sum() for share in shares) > _UNEVEN * costs.sum():
        shares, cuts = [list(range(table.num_columns))], [0, table.num_rows // 2, table.num_rows]
    return [(table.select(share).slice(low, high - low), share) for low, high in pairwise(cuts) for share in shares]


def _shares(sizes: Floats, number: int) -> list[list[int]]:
    """Return columns divided into at most ``number`` shares that are about as large as one another."""
    shares: list[list[int]] = [[] for _ in range(number)]
    totals = [0.0] * number
    for column in np.argsort(-sizes):
        least = totals.index(min(totals))
        shares[least].append(int(column))
        totals[least] += float(sizes[column])
    return [sorted(share) for share in shares if share]


# ---- How many bytes rows will take on disk, before they are encoded: extrapolated from a sample, then learned

_FIRST_SPREAD = 0.1  # of an estimate that follows from a sample
_FIRST_MARGIN, _MAX_FIRST = 0.01, 0.5  # left empty by the first part, at least and at most: the next one fills it
_LATER_MARGIN, _MAX_LATER = 0.1, 0.3  # by a later part, which costs little when it has to be done again
_FIRST_DICTIONARY_SPREAD = 0.005
_SURE, _UNSURE = 0.0005, 0.03  # margins of columns that are encoded in one chunk
_WEIGHTY = 0.1  # of a row group: what a part must have for its ``factors`` to be taken as it is
_NOISE = 0.02  # what two row groups of one kind differ by
_MAX_DICTIONARY = 1 << 20  # pyarrow's dictionary_pagesize_limit; past it, a column goes on plain


class SizeEstimate:
    """What is known of the bytes that rows will take: ``factors`` by column, and how far to trust it.

    Rows are estimated to take the sum over the columns of ``factor * weight``.
    """

    def __init__(self, factors: Floats) -> None:
        self.factors = factors
        self.learned = False  # from a complete row group, not from a sample
        self.spread = _FIRST_SPREAD  # how far off estimates were of late: of parts,
        self.dictionary_spread = _FIRST_DICTIONARY_SPREAD  # and of columns that are encoded in one chunk
        self.unsteady = 0.0  # how far they were off, or would have been without a look at a sample of the rows

    def of(self, weights: Floats, columns: Sequence[int]) -> float:
        """Return the bytes that ``columns`` of rows of these weights are estimated to take."""
        return float(np.dot(self.factors[columns], weights[columns]))

    def margin(self, first: bool) -> float:
        """Return the share of the space that is left empty beside a part."""
        if first:
            return min(_MAX_FIRST, _FIRST_MARGIN + 4 * self.spread)
        return min(_MAX_LATER, max(_LATER_MARGIN, 2 * self.spread))

    @property
    def dictionary_margin(self) -> float:
        """The share that columns encoded in one chunk may take more than estimated."""
        return min(_UNSURE, max(_SURE, 1.5 * self.dictionary_spread))

    def learn_part(self, weights: Floats, taken: Floats, columns: Sequence[int], share: float) -> None:
        """Learn from a part of ``columns`` that took ``share`` of a row group: the more, the larger it is."""
        estimated, size = self.of(weights, columns), float(taken[columns].sum())
        if estimated and size:
            error = abs(size / estimated - 1)
            part = min(1.0, share / _WEIGHTY)
            self.spread = max(part * error, (1 - 0.3 * part) * self.spread)
            self.unsteady = max(part * error, (1 - 0.2 * part) * self.unsteady)
            self.factors[columns] += part * (self._found(weights, taken) - self.factors)[columns]

    def look(self, weights: Floats, taken: Floats, columns: Sequence[int]) -> None:
        """Estimate ``columns`` anew from a sample of the rows that are next."""
        estimated, size = self.of(weights, columns), float(taken[columns].sum())
        if estimated and size:
            self.unsteady = max(abs(size / estimated - 1), 0.9 * self.unsteady)
            self.factors[columns] = self._found(weights, taken)[columns]

    def learn_dictionary(self, weights: Floats, taken: Floats, columns: Sequence[int]) -> None:
        """Learn from ``columns`` of a complete row group; half way only, where the estimate was as good as right."""
        estimated, size = self.of(weights, columns), float(taken[columns].sum())
        if self.learned and estimated:
            self.dictionary_spread = max(min(_UNSURE, abs(size / estimated - 1)), 0.8 * self.dictionary_spread)
        found = self._found(weights, taken)
        noise = np.abs(found - self.factors) < _NOISE * found
        self.factors[columns] = np.where(noise & self.learned, (self.factors + found) / 2, found)[columns]
        self.learned = True

    def _found(self, weights: Floats, taken: Floats) -> Floats:
        found: Floats = np.where(weights > 0, taken / np.maximum(weights, 1e-9), self.factors)
        return found


def estimate_from_sample(sample: pa.Table, encodings: Encodings, limit: int) -> tuple[int, list[float]]:
    """Return how many rows like ``sample``'s fill ``limit`` bytes, and what each leaf column takes of them.

    A row group is a hundred times the sample, and columns do not grow in proportion: a dictionary is paid once,
    or grows with the rows and its indices with it. What a quarter of the sample takes tells which.
    """
    few = sample.slice(0, sample.num_rows // 4)
    large = encoded_sizes(sample, encodings)
    small = encoded_sizes(few, encodings)
    rows = sample.num_rows * limit / max(1, sum(size.total for size in large))
    if few.num_rows == 0 or rows <= sample.num_rows:
        return sample.num_rows, [float(size.total) for size in large]
    leaves: list[float] = []
    for _ in range(2):  # how many rows depends on how they grow
        leaves = [_grown(a, b, few.num_rows, sample.num_rows, rows) for a, b in zip(small, large, strict=True)]
        rows *= limit / max(1.0, sum(leaves))
    scale = limit / max(1.0, sum(leaves))
    return round(rows), [leaf * scale for leaf in leaves]


def _grown(small: EncodedSize, large: EncodedSize, few: int, many: int, rows: float) -> float:
    """Return what a leaf takes at ``rows`` rows, given what it took at ``few`` and ``many``."""
    times = max(1.0, rows / many)
    data_small, data_large = small.total - small.dictionary, large.total - large.dictionary
    mean = data_large / many
    if not large.dictionary or not small.dictionary:
        slope = (data_large - data_small) / (many - few)
        return data_large + (rows - many) * (slope if 0 < slope < mean else mean)
    # Distinct values grow like a power of the rows (0: all were seen, 1: all are new). With every doubling of the
    # dictionary each index takes another bit.
    power = min(1.0, max(0.0, math.log(large.dictionary / small.dictionary) / math.log(many / few)))
    dictionary = min(large.dictionary * times**power, max(large.dictionary, _MAX_DICTIONARY))
    packing = min(1.0, large.total / max(1, large.uncompressed))
    more = power * math.log2(times) / 8 * large.values / many * packing
    return float(dictionary + rows * (mean + more))


# ---- Decoded rows that wait to be encoded: how many there are, what they weigh, and where to cut them

_NEAR = 0.001  # of what there is space for: estimates are not that good


class RowQueue:
    """Rows that wait to be written: batches in order, and what they weigh."""

    def __init__(self, stream: Iterator[RowBatch]) -> None:
        self.stream = stream
        self.batches: deque[RowBatch] = deque()
        self.total: Floats | float = 0.0
        self.rows = 0
        self.bytes = 0
        self.exhausted = False

    def _pull(self) -> bool:
        batch = next(self.stream, None)
        if batch is None:
            self.exhausted = True
            return False
        if batch.table.num_rows:
            self.batches.append(batch)
            self.total = self.total + batch.weights
            self.rows += batch.table.num_rows
            self.bytes += batch.nbytes
        return True

    def fill(self, goal: float, factors: Floats, max_rows: int, max_bytes: int) -> None:
        """Take batches in, one at least, until they are estimated to exceed ``goal``, or are too many to be held."""
        while not self.exhausted and not self.full(max_rows, max_bytes):
            if self.rows and float(np.dot(factors, self.total)) > goal:
                return
            self._pull()

    def full(self, max_rows: int, max_bytes: int) -> bool:
        """Return whether as much is there as may be held."""
        return self.rows > max_rows or self.bytes > max_bytes

    def weights(self, rows: int) -> Floats:
        """Return the weights of the first ``rows`` rows."""
        result: Floats = np.zeros(len(self.batches[0].weights))
        for batch in self.batches:
            if rows <= 0:
                break
            entire = rows >= batch.table.num_rows
            result = result + (
                batch.weights if entire else weigh(batch.table.slice(0, rows), batch.ratios, batch.widths)
            )
            rows -= batch.table.num_rows
        return result

    def cut(self, goal: float, factors: Floats, max_rows: int, max_bytes: int) -> int:
        """Return how many rows, one at least, are estimated to take at most ``goal`` bytes."""
        rows = held = 0
        estimate = 0.0
        for batch in self.batches:
            more = float(np.dot(factors, batch.weights))
            held += batch.nbytes
            if rows and held > max_bytes:
                break
            if estimate + more > goal:
                rows += _fitting(batch, factors, goal - estimate)
                break
            estimate += more
            rows += batch.table.num_rows
        return max(1, min(rows, max_rows))

    def first(self, rows: int) -> pa.Table:
        """Return the first ``rows`` rows."""
        parts = []
        for batch in self.batches:
            parts.append(batch.table.slice(0, rows))
            rows -= parts[-1].num_rows
            if not rows:
                break
        table = pa.concat_tables(parts)
        if any(pt.is_dictionary(column.type) for column in table.schema):
            table = table.unify_dictionaries()  # a second dictionary would make the writer fall back to plain
        return table

    def take(self, rows: int) -> list[RowBatch]:
        """Take the first ``rows`` rows out, and return them."""
        taken: list[RowBatch] = []
        while rows:
            batch = self.batches.popleft()
            if batch.table.num_rows > rows:
                for part, numbers in (
                    (batch.table.slice(rows), batch.numbers[rows:]),
                    (batch.table.slice(0, rows), batch.numbers[:rows]),
                ):
                    self.batches.appendleft(row_batch(part, batch.ratios, numbers, batch.done, batch.widths))
                continue
            taken.append(batch)
            rows -= batch.table.num_rows
        self._count()
        return taken

    def put_back(self, batches: Sequence[RowBatch]) -> None:
        """Put what `take` returned in front again."""
        self.batches.extendleft(reversed(batches))
        self._count()

    def _count(self) -> None:
        self.rows = sum(batch.table.num_rows for batch in self.batches)
        self.bytes = sum(batch.nbytes for batch in self.batches)
        self.total = np.sum([batch.weights for batch in self.batches], axis=0) if self.batches else 0.0

    def ratios(self) -> Floats:
        """Return the mean of the batches' ratios."""
        rows = [batch.table.num_rows for batch in self.batches]
        result: Floats = np.average([batch.ratios for batch in self.batches], axis=0, weights=rows)
        return result

    def sample(self, size: float, places: int) -> pa.Table:
        """Return about ``size`` Arrow bytes in slices spread over all rows."""
        share = min(1.0, size / max(1, self.bytes))
        rows = max(1, int(self.rows * share / places))
        step = self.rows / places
        if rows >= step:
            return without_views(self.first(self.rows))
        queued = pa.concat_tables([batch.table for batch in self.batches])
        table = without_views(pa.concat_tables([queued.slice(int(turn * step), rows) for turn in range(places)]))
        return table.unify_dictionaries().combine_chunks()


def _fitting(batch: RowBatch, factors: Floats, space: float) -> int:
    """Return how many of a batch's first rows are estimated to take at most ``space`` bytes; not all of them do."""
    low, high = 0, batch.table.num_rows  # low rows fit, high do not
    below, above = 0.0, float(np.dot(factors, batch.weights))
    halve = False
    while high - low > 1 and above - below > _NEAR * space:
        share = 0.5 if halve else (space - below) / (above - below)  # rows are about as large as one another
        middle = min(max(low + int((high - low) * share), low + 1), high - 1)
        taken = float(np.dot(factors, weigh(batch.table.slice(0, middle), batch.ratios, batch.widths)))
        halve = not halve and min(middle - low, high - middle) < (high - low) // 4
        if taken <= space:
            low, below = middle, taken
        else:
            high, above = middle, taken
    return low
