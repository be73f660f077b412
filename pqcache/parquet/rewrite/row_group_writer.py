"""Parquet files whose row groups fill a number of compressed bytes and never exceed it.

How many rows fill a row group is estimated, tried, measured and learned. The size of some rows is estimated as the sum
over the columns of ``factor * weight``, where the weight is the rows' Arrow bytes times the column's compression at the
source, and the factor is learned from what was encoded last. A row group is encoded part by part, in memory: the size
of each part is exact, so the next one only has to fill the remainder. Columns with a dictionary come last, in one
chunk. Rows that turn out too many go back to the queue. One footer goes at the end of the file.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from pqcache.errors import ParquetError
from pqcache.parquet.arrow_sizes import weigh
from pqcache.parquet.encodings import Encodings, choose_encodings, encoded_size
from pqcache.parquet.footer import footer
from pqcache.parquet.rewrite.concat_chunks import Chunk, RowGroup, concatenate_chunks
from pqcache.parquet.rewrite.direct_io_file import WRITERS
from pqcache.parquet.rewrite.file_writer import OutputFile, OutputSchema, RowGroupFiles, widen_dictionary_indices
from pqcache.parquet.rewrite.row_group_builder import (
    MAX_ROWS,
    PAGE_HEADER,
    Encoded,
    Encoder,
    OpenRowGroup,
    RowGroupPart,
)
from pqcache.parquet.rewrite.row_queue import RowQueue
from pqcache.parquet.rewrite.size_estimate import SizeEstimate, estimate_from_sample
from pqcache.parquet.rewrite.source_reader import RowBatch
from pqcache.parquet.rewrite.split_work import THREADS
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
