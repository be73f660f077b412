"""Writes Parquet files whose row groups fill a size in compressed bytes and never exceed it.

The size of rows is estimated as the sum over columns of ``factor * weight``: the weight is the rows' Arrow bytes times
the column's compression at the source, and the factor is learned from the rows encoded last. A row group is encoded
part by part, in memory. The size of each part is then exact, so that the next one only has to fill the rest. Columns
with a dictionary come last, in one chunk. Surplus rows go back to the queue.
"""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pqcache.errors import ParquetError
from pqcache.parquet.arrow import Floats, in_one_piece, weigh
from pqcache.parquet.rewrite.decode import RowBatch
from pqcache.parquet.rewrite.encode import THREADS, Encoded, Encoder, RowGroup, size_of
from pqcache.parquet.rewrite.encodings import Encodings, choose_encodings, encoded_chunks, encoded_size
from pqcache.parquet.rewrite.files import (
    WRITERS,
    OutputFile,
    OutputSchema,
    RowGroupFiles,
    footer_schema_of,
    widen_dictionary_indices,
)
from pqcache.parquet.rewrite.recipe import RewriteOptions
from pqcache.units import format_size

MIN_FILL = 0.95
_MAX_ESTIMATES, _MAX_TRIES = 5, 40  # of columns encoded in one chunk; after the former, bisect
_FULL = 0.004  # of a row group: the share that may stay empty
_SPARE = 0.0002
_WELL, _CHEAP = 0.985, 0.1  # fill a row group better if the repeated work is cheap
_FAR_OFF = 1.5  # row-group sizes
_WORTH_A_CHANGE = 0.97  # new encodings must make a sample this much smaller
_PROBE_EVERY = 16  # row groups; and after the first and the fourth
_MAX_ARROW_RATIO = 16  # of decoded bytes, which readers have to hold, to the row-group size
_MIN_MAX_ARROW = 1 << 30
_PROBE_SHARE = 80  # the sample is an eightieth of a row group
_MIN_PROBE, _MAX_PROBE = 1 << 19, 32 << 20
_SAMPLE_SLICES = 8
_TRUSTED = 0.02  # with less accurate estimates, parts are an eighth of a row group,
_SHARES, _MIN_PAGES = 8, 128 << 10  # which loses less when one is too large, but makes pages smaller
_MAX_ROWS = 64 << 20  # pyarrow splits larger row groups by itself
_PAGE_HEADER = 64  # bytes, about
_MAX_WARNINGS = 20


@dataclass(frozen=True, kw_only=True)
class WriterSettings:
    """How row groups are cut and encoded.

    Attributes:
        max_file: bytes after which a new file begins.
        codec: the codec to try for a leaf column, by position.
        name_of: a row's file and row number in the source, by its number.
        plain: settings independent of the data: compression level, storage of decimals and times.
        use_page_cache: the files will be read next.
    """

    options: RewriteOptions
    max_file: int
    codec: Callable[[int], str]
    name_of: Callable[[int], str]
    plain: Encodings = field(default_factory=Encodings)
    use_page_cache: bool = False


@dataclass(frozen=True)
class RewriteResult:
    """The result of a rewrite.

    Attributes:
        outputs: the files of the target, in row order.
        encoded: compressed bytes that were encoded.
        encoded_again: the part of them encoded more than once.
        warnings: messages for the user, each naming a file.
    """

    outputs: tuple[OutputFile, ...]
    encoded: int = 0
    encoded_again: int = 0
    warnings: tuple[str, ...] = ()


def write_row_groups(
    stream: Iterator[RowBatch], target: Path, output_schema: OutputSchema, settings: WriterSettings, first: int = 0
) -> RewriteResult:
    """Write ``stream`` to ``target/part-<first>.parquet`` and further files, in row groups that fill their size.

    No row group exceeds the size in the options, unless a single row does, which gives a warning; all but the last fill
    at least 95 % of it. Every file is on disk when this returns. After an error, the files begun are removed.

    Raises:
        ParquetError: from ``stream``, or for a type that Parquet lacks.
        PqcacheError: an output can't be written.
    """
    with ThreadPoolExecutor(WRITERS, "pqcache-disk") as disk, ThreadPoolExecutor(THREADS, "pqcache-encode") as encoders:
        try:
            footer_schema = footer_schema_of(output_schema, settings.plain)
            encoder = Encoder(footer_schema, settings.plain, str(target), encoders)
            files = RowGroupFiles(
                target=target,
                footer_schema=footer_schema,
                disk=disk,
                number=first,
                options=settings.options,
                max_file=settings.max_file,
                use_page_cache=settings.use_page_cache,
            )
            writer = _Writer(RowQueue(stream), encoder, files, settings)
            try:
                writer.run()
                outputs = files.finish(widen_dictionary_indices(output_schema, encoder.dictionaries))
            except BaseException:
                files.abandon()
                raise
        except pa.ArrowException as error:
            raise ParquetError(target, f"cannot be written as Parquet ({error})") from error
    if writer.unreported:
        writer.warnings.append(f"{writer.unreported:,} more rows exceed the row-group size")
    return RewriteResult(outputs, encoder.encoded, encoder.again, tuple(writer.warnings))


# ---- Row groups


@dataclass(frozen=True)
class _Part:
    """Some rows of a row group: as decoded, and encoded in the columns without a dictionary."""

    rows: int
    encoded: Encoded
    batches: list[RowBatch]


@dataclass(kw_only=True)
class _OpenRowGroup:
    """A row group being built.

    Attributes:
        appendable: columns without a dictionary, whose pages can be added part by part.
        dictionary: columns with a dictionary, encoded once all rows are known.
        most: the rows that the next part may have, after one was too large; None for any number.
        failed: how many parts in a row were too large.
        wanting: it has to grow, regardless of the estimate.
        probed: its encodings were chosen from its own rows.
        fits, over: numbers of rows known to fit, and known not to.
        tries: how often the ``dictionary`` columns have been encoded.
        force: add this many rows, regardless of the estimate.
    """

    appendable: list[int]
    dictionary: list[int]
    columns: int
    parts: list[_Part] = field(default_factory=list)
    most: int | None = None
    failed: int = 0
    fits: int = 0
    over: int | None = None
    tries: int = 0
    wanting: bool = False
    probed: bool = False
    force: int = 0

    @property
    def batches(self) -> list[RowBatch]:
        return [batch for part in self.parts for batch in part.batches]

    @property
    def rows(self) -> int:
        return sum(part.rows for part in self.parts)

    @property
    def size(self) -> int:
        """Bytes of the parts, encoded."""
        return sum(size_of(part.encoded) for part in self.parts)

    @property
    def held(self) -> int:
        """Bytes of all rows, decoded."""
        return sum(batch.nbytes for batch in self.batches)

    @property
    def weights(self) -> Floats:
        batches = self.batches
        return np.sum([batch.weights for batch in batches], axis=0) if batches else np.zeros(self.columns)


class _Writer:
    def __init__(self, queue: RowQueue, encoder: Encoder, files: RowGroupFiles, settings: WriterSettings) -> None:
        self.queue, self.encoder, self.files, self.settings = queue, encoder, files, settings
        self.limit = settings.options.limit
        self.max_bytes = max(_MIN_MAX_ARROW, _MAX_ARROW_RATIO * self.limit)
        self.estimate = SizeEstimate(np.ones(encoder.columns))
        self.warnings: list[str] = []
        self.unreported = 0

    def run(self) -> None:
        number = 0
        while True:
            self.queue.fill(self.limit, self.estimate.factors, _MAX_ROWS, self.max_bytes)
            if not self.queue.rows:
                return
            if number in (0, 1, 4) or number % _PROBE_EVERY == 0:
                self.probe()
            self.files.append(self.row_group())
            number += 1

    def probe(self, anew: bool = False) -> None:
        """Choose encodings by a sample, unless the current ones are about as good, and make a first estimate."""
        size = min(max(self.queue.bytes // _PROBE_SHARE, _MIN_PROBE), _MAX_PROBE)
        sample = self.queue.sample(size, _SAMPLE_SLICES)
        settings, encoder = self.settings, self.encoder
        encodings = choose_encodings(sample, settings.codec, settings.plain, settings.options.compat, encoder.executor)
        if (
            encoder.encoded
            and not anew
            and encoded_size(sample, encodings) > _WORTH_A_CHANGE * encoded_size(sample, encoder.encodings)
        ):
            return  # the learned estimate is better than one from a sample
        encoder.encodings = encodings
        rows, leaves = estimate_from_sample(sample, encodings, self.limit)
        weights = weigh(sample, self.queue.ratios())
        factors = encoder.by_column(range(len(leaves)), leaves) / np.maximum(weights * rows / sample.num_rows, 1e-9)
        self.estimate = SizeEstimate(factors)

    def row_group(self) -> RowGroup:
        """Encode rows part by part until a row group is full; take surplus rows back."""
        group, limit = self.begun(), self.limit
        while True:
            if count := self.rows_to_add(group):
                self.add(group, count)
                continue
            coded = self.encoder.encode(group.batches, group.dictionary)
            dictionary_bytes = size_of(coded)
            size = group.size + dictionary_bytes
            group.tries += 1
            if group.dictionary:
                self.estimate.learn_dictionary(group.weights, self.encoder.taken(coded), group.dictionary)
            if size <= limit:
                group.fits = group.rows
            if size > limit and group.rows > 1:
                self.encoder.again += dictionary_bytes
                group.over = group.rows
                anew = size > _FAR_OFF * limit and not group.probed
                self.take_back(group, anew)
                if anew:
                    self.probe(anew=True)  # a dictionary may not pay any more
                    group = replace(self.begun(), probed=True)
                continue
            if self.wants_more(group, size, dictionary_bytes):
                self.encoder.again += dictionary_bytes
                group.wanting, group.most, group.failed = True, None, 0
                if group.tries >= _MAX_ESTIMATES and group.over is not None:
                    self.take_back(group, True)
                continue
            if size > limit:
                self.warn_single(size, int(group.parts[0].batches[0].numbers[0]))
            elif size < MIN_FILL * limit and self.queue.rows and self.full(group):
                self.warn_capped(size)
            return self.encoder.joined([*(part.encoded for part in group.parts), coded])

    def begun(self) -> _OpenRowGroup:
        dictionary = self.encoder.dictionary_columns()
        appendable = [column for column in range(self.encoder.columns) if column not in dictionary]
        return _OpenRowGroup(appendable=appendable, dictionary=dictionary, columns=self.encoder.columns)

    def rows_to_add(self, group: _OpenRowGroup) -> int:
        """How many rows to append to ``group`` next; 0 if the row group is full."""
        queue, estimate, limit = self.queue, self.estimate, self.limit
        max_rows = min(_MAX_ROWS, sys.maxsize if group.over is None else group.over - 1) - group.rows
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
        space -= float(np.dot(factors[group.dictionary], group.weights[group.dictionary]))
        headers = _PAGE_HEADER * len(self.encoder.leaves(group.appendable))
        queue.fill(space, factors, max_rows, self.max_bytes - group.held)
        if not queue.rows or (group.rows and group.held + queue.batches[0].nbytes > self.max_bytes):
            return 0
        few = max(limit / _SHARES, _MIN_PAGES * len(group.appendable)) if estimate.spread > _TRUSTED else space
        near = space - headers <= 1.25 * few  # else the part can't exceed the rest
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

    def add(self, group: _OpenRowGroup, count: int) -> None:
        """Encode the first queued rows as a part of ``group``, or put them back if they don't fit."""
        queue, estimate = self.queue, self.estimate
        more = queue.weights(count)
        batches = queue.take(count)
        part = _Part(count, self.encoder.encode(batches, group.appendable, halves=True), batches)
        size = size_of(part.encoded)
        if group.appendable:
            estimate.learn_part(more, self.encoder.taken(part.encoded), group.appendable, size / self.limit)
        later = estimate.of(group.weights + more, group.dictionary) * (1 - estimate.dictionary_margin)
        if group.size + size + (0 if group.force else later) > self.limit and (group.parts or count > 1):
            self.encoder.again += size
            queue.put_back(batches)
            # this bounds the part, not the row group, as the size of rows depends on where they are cut
            group.most, group.failed = count - 1, group.failed + 1
            if group.force:
                group.over, group.force = count, max(1, (group.fits + count) // 2)
            return
        group.parts.append(part)
        group.most, group.failed, group.wanting = None, 0, False

    def take_back(self, group: _OpenRowGroup, everything: bool) -> None:
        """Put surplus parts back, or all of them if estimates failed too often."""
        bisect = group.tries >= _MAX_ESTIMATES
        while group.parts:
            last = group.parts.pop()
            self.queue.put_back(last.batches)
            self.encoder.again += size_of(last.encoded)
            fits = group.size + self.estimate.of(group.weights, group.dictionary) <= self.limit
            if fits and not (bisect or everything):
                break
        group.most, group.failed, group.force = None, 0, 0
        if bisect and group.over is not None:
            group.force = max(1, (group.fits + group.over) // 2)

    def wants_more(self, group: _OpenRowGroup, size: int, dictionary_bytes: int) -> bool:
        """Whether a row group of ``size`` bytes should get more rows, at the cost of encoding ``dictionary_bytes``
        again.
        """
        stuck = group.most == 0 and not group.dictionary  # else it was due to an estimate, corrected since
        if group.tries > _MAX_TRIES or stuck or (group.over or sys.maxsize) <= group.rows + 1:
            return False
        worth = size < MIN_FILL * self.limit or (size < _WELL * self.limit and dictionary_bytes < _CHEAP * self.limit)
        if not worth or self.full(group) or (group.tries > 1 and size >= MIN_FILL * self.limit):
            return False
        self.queue.fill(1, self.estimate.factors, _MAX_ROWS, self.max_bytes)
        return self.queue.rows > 0

    def full(self, group: _OpenRowGroup) -> bool:
        """Whether ``group`` and the queue hold the maximum of rows or bytes."""
        return group.held + self.queue.bytes > self.max_bytes or group.rows + self.queue.rows > _MAX_ROWS

    def warn_single(self, size: int, number: int) -> None:
        if len(self.warnings) == _MAX_WARNINGS:
            self.unreported += 1
            return
        self.warnings.append(
            f"{self.settings.name_of(number)} alone takes {format_size(size)}, more than the row-group size of "
            f"{format_size(self.limit)}; it stands alone in a row group"
        )

    def warn_capped(self, size: int) -> None:
        text = (
            f"{self.files.target}: row groups are kept below {format_size(self.limit)} (one at "
            f"{format_size(size)}), because their rows take more than {format_size(self.max_bytes)} of memory decoded"
        )
        if not any("of memory decoded" in known for known in self.warnings):
            self.warnings.append(text)


# ---- Rows that wait to be encoded

_NEAR = 0.001  # of the space left, about the accuracy of estimates


class RowQueue:
    """Decoded batches that wait to be written, with their total of rows, bytes and weights."""

    def __init__(self, stream: Iterator[RowBatch]) -> None:
        self.stream = stream
        self.batches: deque[RowBatch] = deque()
        self.total: Floats | float = 0.0
        self.rows = 0
        self.bytes = 0
        self.exhausted = False

    def fill(self, goal: float, factors: Floats, max_rows: int, max_bytes: int) -> None:
        """Take batches from the stream, at least one, until their estimate exceeds ``goal`` or too much is held."""
        while self.rows <= max_rows and self.bytes <= max_bytes:
            if self.rows and float(np.dot(factors, self.total)) > goal:
                return
            batch = next(self.stream, None)
            if batch is None:
                self.exhausted = True
                return
            if batch.table.num_rows:
                self.batches.append(batch)
                self.total = self.total + batch.weights
                self.rows += batch.table.num_rows
                self.bytes += batch.nbytes

    def weights(self, rows: int) -> Floats:
        result: Floats = np.zeros(len(self.batches[0].weights))
        for batch in self.batches:
            if rows <= 0:
                break
            result = result + (batch if rows >= batch.table.num_rows else batch.slice(0, rows)).weights
            rows -= batch.table.num_rows
        return result

    def cut(self, goal: float, factors: Floats, max_rows: int, max_bytes: int) -> int:
        """The number of rows, at least one, for ``goal`` bytes by the estimate."""
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

    def take(self, rows: int) -> list[RowBatch]:
        taken: list[RowBatch] = []
        while rows:
            batch = self.batches.popleft()
            if (count := batch.table.num_rows) > rows:
                self.batches.appendleft(batch.slice(rows, count))
                batch = batch.slice(0, rows)
            taken.append(batch)
            rows -= batch.table.num_rows
        self._count()
        return taken

    def put_back(self, batches: Sequence[RowBatch]) -> None:
        self.batches.extendleft(reversed(batches))
        self._count()

    def _count(self) -> None:
        self.rows = sum(batch.table.num_rows for batch in self.batches)
        self.bytes = sum(batch.nbytes for batch in self.batches)
        self.total = np.sum([batch.weights for batch in self.batches], axis=0) if self.batches else 0.0

    def ratios(self) -> Floats:
        rows = [batch.table.num_rows for batch in self.batches]
        result: Floats = np.average([batch.ratios for batch in self.batches], axis=0, weights=rows)
        return result

    def sample(self, size: float, places: int) -> pa.Table:
        """About ``size`` Arrow bytes of rows, in slices spread over all of them."""
        share = min(1.0, size / max(1, self.bytes))
        rows = max(1, int(self.rows * share / places))
        step = self.rows / places
        table = pa.concat_tables([batch.table for batch in self.batches])
        if rows < step:
            table = pa.concat_tables([table.slice(int(turn * step), rows) for turn in range(places)])
        return in_one_piece(table).unify_dictionaries().combine_chunks()


def _fitting(batch: RowBatch, factors: Floats, space: float) -> int:
    """The number of leading rows of a batch that fit ``space`` bytes by the estimate."""
    low, high = 0, batch.table.num_rows  # low rows fit, high rows don't
    below, above = 0.0, float(np.dot(factors, batch.weights))
    halve = False
    while high - low > 1 and above - below > _NEAR * space:
        share = 0.5 if halve else (space - below) / (above - below)  # as if all rows had one size
        middle = min(max(low + int((high - low) * share), low + 1), high - 1)
        taken = float(np.dot(factors, batch.slice(0, middle).weights))
        halve = not halve and min(middle - low, high - middle) < (high - low) // 4
        if taken <= space:
            low, below = middle, taken
        else:
            high, above = middle, taken
    return low


# ---- The size of rows on disk before they are encoded: extrapolated from a sample, then learned

_FIRST_SPREAD = 0.1  # of an estimate by a sample
_FIRST_MARGIN, _MAX_FIRST = 0.01, 0.5  # left empty beside the first part, at least and at most, for the next one
_LATER_MARGIN, _MAX_LATER = 0.1, 0.3  # beside a later part, which is cheap to repeat
_FIRST_DICTIONARY_SPREAD = 0.005
_SURE, _UNSURE = 0.0005, 0.03  # margins of columns encoded in one chunk
_WEIGHTY = 0.1  # of a row group: a smaller part only moves the factors partway
_NOISE = 0.02  # difference between two row groups of one kind
_MAX_DICTIONARY = 1 << 20  # pyarrow's dictionary_pagesize_limit; past it, a column goes on plain


class SizeEstimate:
    """Estimates the size of rows as the sum over columns of ``factor * weight``, and how far off that may be."""

    def __init__(self, factors: Floats) -> None:
        self.factors = factors
        self.learned = False  # from a complete row group, not from a sample
        self.spread = _FIRST_SPREAD  # recent errors of estimates: of parts,
        self.dictionary_spread = _FIRST_DICTIONARY_SPREAD  # and of columns encoded in one chunk

    def of(self, weights: Floats, columns: Sequence[int]) -> float:
        return float(np.dot(self.factors[columns], weights[columns]))

    def margin(self, first: bool) -> float:
        """The share of the space left empty beside a part."""
        if first:
            return min(_MAX_FIRST, _FIRST_MARGIN + 4 * self.spread)
        return min(_MAX_LATER, max(_LATER_MARGIN, 2 * self.spread))

    @property
    def dictionary_margin(self) -> float:
        """The share by which columns encoded in one chunk may exceed their estimate."""
        return min(_UNSURE, max(_SURE, 1.5 * self.dictionary_spread))

    def learn_part(self, weights: Floats, taken: Floats, columns: Sequence[int], share: float) -> None:
        """Learn from a part that took ``share`` of a row group; larger parts count more."""
        estimated, size = self.of(weights, columns), float(taken[columns].sum())
        if estimated and size:
            error = abs(size / estimated - 1)
            part = min(1.0, share / _WEIGHTY)
            self.spread = max(part * error, (1 - 0.3 * part) * self.spread)
            self.factors[columns] += part * (self._found(weights, taken) - self.factors)[columns]

    def learn_dictionary(self, weights: Floats, taken: Floats, columns: Sequence[int]) -> None:
        """Learn from a complete row group; only half of a small difference, which may be noise."""
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
    """The number of rows like ``sample``'s that fill ``limit`` bytes, and the bytes of each leaf column.

    A row group is a hundred times the sample, and columns don't grow in proportion: a dictionary may be stored once, or
    grow with the rows, and its indices with it. Comparing with a quarter of the sample tells which.
    """
    few = sample.slice(0, sample.num_rows // 4)
    large = encoded_chunks(sample, encodings)
    small = encoded_chunks(few, encodings)
    rows = sample.num_rows * limit / max(1, sum(chunk.total_compressed_size for chunk in large))
    if few.num_rows == 0 or rows <= sample.num_rows:
        return sample.num_rows, [float(chunk.total_compressed_size) for chunk in large]
    leaves: list[float] = []
    for _ in range(2):  # the number of rows depends on how they grow
        leaves = [_grown(a, b, few.num_rows, sample.num_rows, rows) for a, b in zip(small, large, strict=True)]
        rows *= limit / max(1.0, sum(leaves))
    scale = limit / max(1.0, sum(leaves))
    return round(rows), [leaf * scale for leaf in leaves]


def _grown(small: pq.ColumnChunkMetaData, large: pq.ColumnChunkMetaData, few: int, many: int, rows: float) -> float:
    """Extrapolate a leaf's bytes to ``rows`` from those of ``few`` and ``many`` rows."""
    times = max(1.0, rows / many)
    (data_small, dictionary_small), (data_large, dictionary_large) = map(_data_and_dictionary, (small, large))
    mean = data_large / many
    if not dictionary_large or not dictionary_small:
        slope = (data_large - data_small) / (many - few)
        return data_large + (rows - many) * (slope if 0 < slope < mean else mean)
    # Distinct values grow like a power of the rows (0: all were seen, 1: all are new). Each doubling of the dictionary
    # adds a bit to every index.
    power = min(1.0, max(0.0, math.log(dictionary_large / dictionary_small) / math.log(many / few)))
    dictionary = min(dictionary_large * times**power, max(dictionary_large, _MAX_DICTIONARY))
    packing = min(1.0, large.total_compressed_size / max(1, large.total_uncompressed_size))
    more = power * math.log2(times) / 8 * large.num_values / many * packing
    return float(dictionary + rows * (mean + more))


def _data_and_dictionary(chunk: pq.ColumnChunkMetaData) -> tuple[int, int]:
    dictionary = chunk.data_page_offset - chunk.dictionary_page_offset if chunk.has_dictionary_page else 0
    return chunk.total_compressed_size - dictionary, dictionary
