"""Rewrites a partition directory into row groups of the right size.

Files that already fit are linked. The rest is decoded, cut by compressed bytes and encoded again; values, row order,
schema and key-value metadata stay the same.

A shuffle draws 64 random bits for each row, in order, and sorts the rows by them, so the result depends on rows and
seed alone. Rows that don't fit in memory go to disk, to 64 buckets by the topmost bits; a bucket that is too large is
split by the next bits.
"""

from __future__ import annotations

import os
import shutil
from bisect import bisect_right
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.types as pt

from pqcache.errors import ParquetError, PqcacheError, UsageError
from pqcache.parquet import footer, thrift
from pqcache.parquet.arrow import Floats, leaves_in, take_of_table
from pqcache.parquet.dense import Dense, as_lists, common_dense, dense_in, with_dense_columns
from pqcache.parquet.misread import check_read_right, doubtful_columns
from pqcache.parquet.pages import codec_name
from pqcache.parquet.rewrite.decode import (
    Decoder,
    ReadTask,
    RowBatch,
    RowGroupRange,
    long_columns_of,
    prefetch,
    row_group_ranges,
)
from pqcache.parquet.rewrite.encodings import Encodings, has_integer_decimals
from pqcache.parquet.rewrite.files import (
    OutputFile,
    OutputSchema,
    elements_of,
    straddles,
    write_errors,
)
from pqcache.parquet.rewrite.recipe import COMPAT_CODEC, DEFAULT_CODEC, RewriteOptions
from pqcache.parquet.rewrite.row_groups import MIN_FILL, RewriteResult, WriterSettings, write_row_groups
from pqcache.parquet.rewrite.sources import (
    SourceFooter,
    conflicts,
    has_int96,
    one_of_each_schema,
    range_index,
    read_source_footers,
    with_spark,
)
from pqcache.parquet.schema import (
    ARROW_SCHEMA,
    check_names,
    encode_schema,
    merge_schemas,
    with_time_zones,
    working_schema,
)
from pqcache.parquet.statistics import first_page
from pqcache.system.disk import fsync_path, link_or_copy

_MIN_FILE = 1 << 30
_FILE_ROW_GROUPS = 8
_BATCHES = 6  # per row group
_MIN_BATCH, _MAX_BATCH, _PER_COLUMN = 64 << 10, 4 << 20, 4 << 10
_DECODERS, _TASKS = 2, 8  # threads, and tasks held at once
_AHEAD = 2  # Arrow bytes in row-group sizes: about one row group
_MIN_AHEAD, _MAX_AHEAD = 8 << 20, 512 << 20


@dataclass(frozen=True, kw_only=True)
class KnownOfSources:
    """Facts about the files of a directory that the files themselves don't contain.

    Attributes:
        schema: the schema of a whole table, to unify with those of the files.
        made_alike: for each file, whether it was made with the same options, except for the row-group size.
        int96: the unit of INT96 timestamps in a whole table, "us" or "ns".
        of_table: the schema of the Delta or Iceberg table that they belong to, if any.
        shuffled_with: the seed of an earlier shuffle of all rows; another shuffle starts from their first order.
        name: the URL that errors and warnings give in place of the local paths of sources and target.
    """

    schema: pa.Schema | None = None
    made_alike: Sequence[bool] = ()
    int96: str | None = None
    shuffled_with: int | None = None
    of_table: pa.Schema | None = None
    name: str = ""


def rewrite_directory(
    sources: Sequence[Path],
    target: Path,
    options: RewriteOptions,
    on_progress: Callable[[int], None] | None = None,
    known: KnownOfSources | None = None,
    use_page_cache: bool = False,
) -> RewriteResult:
    """Write the rows of ``sources`` to ``target`` in row groups that fill ``options.row_group_size``.

    The leading files that fit are hard-linked, or copied if links are impossible; the others become
    ``part-<n>.parquet`` of up to 1 GiB or 8 row groups each. If all fit, they keep names that end in ``.parquet``.
    Everything is on disk when this returns. Memory is a small multiple of one decoded row group.

    Args:
        sources: the Parquet files of one partition directory, in order; they are not modified.
        target: an empty or new directory.
        options: sizes, codecs, and changes to columns and rows.
        on_progress: called with the number of source bytes done since the last call.
        known: facts about ``sources`` that the files don't contain.
        use_page_cache: the files will be read next, so they aren't written past the page cache.

    Raises:
        ParquetError: a source is damaged, or schemas don't mix without loss; names the files.
        UsageError: there is nothing to rewrite, or ``target`` isn't empty.
        PqcacheError: ``target`` can't be written.
    """
    if not sources:
        raise UsageError(target, "no files to rewrite")
    _make_empty(target)
    report = on_progress or (lambda done: None)
    known = known or KnownOfSources()
    if options.shuffle is not None and options.shuffle == known.shuffled_with:
        options = replace(options, shuffle=None)  # the rows are in this seed's order
    if not known.name:
        return _rewritten(sources, target, options, report, known, use_page_cache)
    places = sources[0].parent, target
    try:
        result = _rewritten(sources, target, options, report, known, use_page_cache)
    except ParquetError as error:
        for place in places:
            error = error.renamed(place, known.name)
        raise error from None
    warnings = result.warnings
    for place in places:
        warnings = tuple(warning.replace(str(place), known.name) for warning in warnings)
    return replace(result, warnings=warnings)


def _rewritten(
    sources: Sequence[Path],
    target: Path,
    options: RewriteOptions,
    report: Callable[[int], None],
    known: KnownOfSources,
    use_page_cache: bool,
) -> RewriteResult:
    opened = read_source_footers(sources, known.int96)
    declared = _declared(opened, known)
    dense = _dense(opened, options, declared)
    keyvalues = with_spark(declared.metadata, bool(dense), declared.equals(as_lists(opened[0].schema)))
    declared = with_dense_columns(declared, dense).with_metadata(keyvalues)
    # linked files would keep their INT96
    keep = 0 if has_int96(opened) else _prefix(opened, declared, options, known.made_alike)
    names = {source.path.name for source in opened if source.path.suffix == ".parquet"}
    all_fit = keep == len(opened) == len(names)
    outputs = []
    for number, source in enumerate(opened[:keep]):
        name = source.path.name if all_fit else f"part-{number:05d}.parquet"
        _link(source.path, target / name)
        groups = source.metadata.num_row_groups
        outputs.append(OutputFile(path=target / name, rows=source.rows, row_groups=groups, linked=True))
        report(source.size)
    result = RewriteResult(())
    rest = opened[keep:]
    if rest and (not keep or any(source.rows for source in rest)):
        _check_read_right(rest)
        output_schema = _output_schema(opened, declared)
        settings = _settings(rest, output_schema.working, options, use_page_cache)
        if options.shuffle is None:
            output_schema = replace(output_schema, index=range_index(rest))
        with closing(_rows(rest, target, output_schema.working, options, known.shuffled_with)) as rows:
            result = write_row_groups(_counted(rows, report), target, output_schema, settings, keep)
        done, expected = (sum(some.rows for some in files) for files in (result.outputs, rest))
        if done != expected:
            raise ParquetError(target, f"{done:,} rows were written of {expected:,}", "please report this")
        report(sum(source.size for source in rest if not source.rows))
        result = replace(result, warnings=(*conflicts(rest), *result.warnings))
    fsync_path(target)
    return replace(result, outputs=(*outputs, *result.outputs))


def _check_read_right(sources: list[SourceFooter]) -> None:
    alike = one_of_each_schema(sources)
    doubtful = {id(kind.schema) for kind in alike if doubtful_columns(kind.metadata, kind.schema, False)}
    for source in sources:
        if id(source.schema) in doubtful:
            check_read_right(source.path, source.metadata, source.schema, nanoseconds=False)


def _settings(
    sources: list[SourceFooter], schema: pa.Schema, options: RewriteOptions, use_page_cache: bool
) -> WriterSettings:
    return WriterSettings(
        options=options,
        max_file=max(_MIN_FILE, _FILE_ROW_GROUPS * options.limit),
        codec=_codec_of(sources, schema, options),
        name_of=_names_of(sources),
        plain=Encodings(
            level=options.compression_level, decimal_as_integer=has_integer_decimals(sources[0].metadata.schema)
        ),
        use_page_cache=use_page_cache,
    )


def _rows(
    sources: list[SourceFooter],
    target: Path,
    schema: pa.Schema,
    options: RewriteOptions,
    shuffled_with: int | None,
) -> Generator[RowBatch, None, None]:
    # Wide tables get larger batches, as each batch costs time per column, however few its rows.
    batch_bytes = max(min(max(options.limit // _BATCHES, _MIN_BATCH), _MAX_BATCH), _PER_COLUMN * len(schema))
    held = min(max(_AHEAD * options.limit, _MIN_AHEAD), _MAX_AHEAD)
    decoder = Decoder(schema=schema, batch_bytes=batch_bytes)
    if options.shuffle is None:
        files = [(source.metadata, source.schema) for source in sources]
        decoder = replace(decoder, long_columns=long_columns_of(files, schema))
        yield from prefetch(_read_tasks(sources, decoder, held), held, _DECODERS)
        return
    with closing(prefetch(_read_tasks(sources, decoder, held // 4), held // 4, _DECODERS)) as ahead:
        known = None if shuffled_with is None else (shuffled_with, sum(source.rows for source in sources))
        place = target.with_name(f"{target.name}.rows")
        shuffled = partial(shuffle_rows, ahead, options.shuffle, held, batch_bytes, place, known)
        yield from prefetch([shuffled], held)


def _read_tasks(sources: list[SourceFooter], decoder: Decoder, held: int) -> list[ReadTask]:
    """Cut ``sources`` into tasks worth opening a file for, yet small enough to be held."""
    found: list[list[RowGroupRange]] = [[]]
    size = 0
    for span in row_group_ranges(sources, decoder.batch_bytes):
        if found[-1] and size + span.size > held // _TASKS:
            found.append([])
            size = 0
        found[-1].append(span)
        size += span.size
    return [partial(decoder.batches, some) for some in found]


def _counted(stream: Iterator[RowBatch], report: Callable[[int], None]) -> Iterator[RowBatch]:
    done = 0
    for batch in stream:
        yield batch
        report(batch.done - done)
        done = batch.done


def _declared(opened: list[SourceFooter], known: KnownOfSources) -> pa.Schema:
    """The common schema, with lists for dense columns, and with the files' key-values, not the table's."""
    zones = known.of_table if known.schema is None else known.schema
    footers = [(str(source.path), as_lists(source.schema)) for source in one_of_each_schema(opened)]
    for path, schema in footers:
        check_names(path, schema)
    named = footers if zones is None else [(path, with_time_zones(schema, zones)) for path, schema in footers]
    own = merge_schemas(named)
    if known.schema is None:
        return own
    table = as_lists(known.schema).remove_metadata()
    return own if own.equals(table) else merge_schemas([("the table's schema", table), *named])


def _dense(opened: list[SourceFooter], options: RewriteOptions, declared: pa.Schema) -> dict[str, Dense]:
    if options.dense is not None:
        return {name: dense for name, dense in options.dense if name in declared.names}
    return common_dense([source.schema for source in one_of_each_schema(opened)])


def _prefix(
    opened: list[SourceFooter], declared: pa.Schema, options: RewriteOptions, made_alike: Sequence[bool]
) -> int:
    """The number of leading files that can be linked while the rest is rewritten."""
    if not len(declared):  # nothing to rewrite, and pyarrow reads no rows without columns
        return len(opened)
    found = count_unchanged_files([source.metadata for source in opened], options, made_alike)
    same = opened[0].schema.equals(declared)
    dense = dense_in(declared)
    if found and any(dense_in(source.schema) != dense for source in one_of_each_schema(opened[:found])):
        return 0
    return found if same else 0


def _output_schema(opened: list[SourceFooter], declared: pa.Schema) -> OutputSchema:
    first = opened[0]
    known = first.key_values
    if declared.equals(first.schema, check_metadata=True):
        return OutputSchema(
            working=working_schema(declared), declared=declared, elements=first.elements, keyvalues=known
        )
    # readers take the Arrow schema, with the metadata in it, from its own key
    keyvalues = dict(declared.metadata or {})
    if dense_in(declared) or any(ARROW_SCHEMA in source.key_values for source in one_of_each_schema(opened)):
        keyvalues[ARROW_SCHEMA] = encode_schema(declared)
    elements = None
    if as_lists(declared).equals(as_lists(first.schema)):
        names = {name for name in declared.names if dense_in(declared).get(name) != dense_in(first.schema).get(name)}
        elements = _elements(first, declared, names) if names else first.elements
    return OutputSchema(working=working_schema(declared), declared=declared, elements=elements, keyvalues=keyvalues)


def _elements(source: SourceFooter, declared: pa.Schema, names: set[str]) -> list[thrift.Struct]:
    """The source's schema elements, with those of ``names`` made from ``declared``."""
    new = elements_of(working_schema(declared))
    result = [source.elements[0]]
    for name, old, made in zip(declared.names, footer.trees(source.elements), footer.trees(new), strict=True):
        result += made if name in names else old
    return result


def _names_of(sources: list[SourceFooter]) -> Callable[[int], str]:
    ends = list(accumulate(source.rows for source in sources))

    def name_of(number: int) -> str:
        position = bisect_right(ends, number)
        source = sources[position]
        return f"{source.path}: row {number - ends[position] + source.rows:,}"

    return name_of


def _codec_of(sources: list[SourceFooter], schema: pa.Schema, options: RewriteOptions) -> Callable[[int], str]:
    codec = options.codec
    if codec != "keep":
        return lambda leaf: codec
    known: dict[tuple[str, int], str] = {}  # by column and leaf in it, as a file may lack columns
    for source in one_of_each_schema([source for source in sources if source.metadata.num_row_groups]):
        group = source.metadata.row_group(0)
        for number, place in enumerate(_leaf_places(source.schema)):
            known.setdefault(place, codec_name(group.column(number).compression))
    codecs = [known.get(place, DEFAULT_CODEC) for place in _leaf_places(schema)]
    return lambda leaf: codecs[leaf]


def _leaf_places(schema: pa.Schema) -> list[tuple[str, int]]:
    return [(field.name, number) for field in schema for number, _ in enumerate(leaves_in(field.type))]


def _make_empty(target: Path) -> None:
    try:
        target.mkdir(parents=True, exist_ok=True)
        if any(target.iterdir()):
            raise UsageError(target, "is not empty", "give a new directory")
    except OSError as error:
        raise PqcacheError(target, f"cannot be made: {error.strerror or error}", "choose another directory") from error


def _link(source: Path, target: Path) -> None:
    try:
        link_or_copy(os.path.realpath(source), target)
        fsync_path(target)
    except OSError as error:
        raise PqcacheError(
            target,
            f"cannot be linked or copied from {source}: {error.strerror or error}",
            "free space or fix the permissions, then run again",
        ) from error


# ---- Which files need no rewriting: their row groups fit, and they are encoded as asked for

_OLD_ENCODINGS = frozenset(("PLAIN", "PLAIN_DICTIONARY", "RLE_DICTIONARY", "RLE", "BIT_PACKED"))


def row_group_bytes(group: pq.RowGroupMetaData) -> int:
    return sum(group.column(number).total_compressed_size for number in range(group.num_columns))


def row_group_start(group: pq.RowGroupMetaData) -> int:
    return first_page(group.column(0)) if group.num_columns else 0


def count_unchanged_files(
    metadata: Sequence[pq.FileMetaData], options: RewriteOptions, made_alike: Sequence[bool] = ()
) -> int:
    """The number of leading files of a directory that need no rewriting.

    Every row group must be within the limit (unless it is a single row), fill 95 % of it (unless it is the last one
    with rows), and not cross a block boundary. Files without rows and empty row groups don't fit, except a single file
    without rows; nor do files whose schema differs from the first one's, or whose encoding differs from ``options``.
    ``made_alike`` says for each file whether it was made with the same options, except for the row-group size.
    """
    if len(metadata) == 1 and metadata[0].num_rows == 0:
        return 1
    last = next((number for number in reversed(range(len(metadata))) if metadata[number].num_rows), -1)
    for number, file in enumerate(metadata):
        if not file.num_rows or not file.schema.equals(metadata[0].schema):
            return number
        if not (made_alike and made_alike[number]) and not _is_as_asked(file, options):
            return number
        for position in range(file.num_row_groups):
            group = file.row_group(position)
            size = row_group_bytes(group)
            final = number == last and position == file.num_row_groups - 1
            if (
                group.num_rows == 0
                or (size > options.row_group_size and group.num_rows > 1)
                or (size < MIN_FILL * options.row_group_size and not final)
                or straddles(row_group_start(group), size, options.block_size)
            ):
                return number
    return len(metadata)


def _is_as_asked(file: pq.FileMetaData, options: RewriteOptions) -> bool:
    """Whether a file's footer proves that it is encoded according to ``options``.

    Columns that don't shrink have no codec, so a file without codecs proves nothing, and no file proves its level.
    """
    if options.shuffle is not None or options.compression_level is not None:
        return False
    codec = options.compression or (COMPAT_CODEC if options.compat else None)
    codec = None if codec == "keep" else codec
    if codec is None and not options.compat:
        return True
    groups = [file.row_group(number) for number in range(file.num_row_groups)]
    chunks = [group.column(number) for group in groups for number in range(group.num_columns)]
    if options.compat and not all(_OLD_ENCODINGS.issuperset(chunk.encodings) for chunk in chunks):
        return False
    found = {codec_name(chunk.compression) for chunk in chunks}
    return codec is None or (codec in found and found <= {codec, "none"})


_BITS = 6  # of a key, by which rows are divided among buckets
_WORD = (1 << 64) - 1

Keys = npt.NDArray[np.uint64]


def shuffle_rows(
    stream: Iterable[RowBatch],
    seed: int,
    limit: int,
    batch_bytes: int,
    place: Path,
    before: tuple[int, int] | None = None,
) -> Iterator[RowBatch]:
    """Yield the rows of ``stream`` permuted, in batches of about ``batch_bytes`` Arrow bytes.

    About twice ``limit`` Arrow bytes stay in memory, and the values of each dictionary column once; the rest goes to
    the directory ``place``, which is made on demand and removed at the end.

    ``before`` is the seed of an earlier shuffle of these rows, and their number. The result is as if that shuffle
    hadn't happened, which takes 16 bytes of memory per row.

    Raises:
        PqcacheError: ``place`` can't be written.
    """
    draw = _again(seed, *before) if before else _random(seed).random_raw
    dictionaries = _Dictionaries()
    ratios: list[tuple[Floats, int]] = []
    done = 0

    def parts() -> Iterator[pa.Table]:
        nonlocal done
        for item in stream:
            if rows := item.table.num_rows:
                ratios.append((item.ratios, rows))
                numbers = np.asarray(item.numbers, np.int64)
                table = dictionaries.coded(item.table).append_column("key", pa.array(draw(rows)))
                yield table.append_column("number", pa.array(numbers))
            done = item.done

    try:
        total = yielded = 0
        mean: Floats | None = None
        for part in _in_order(parts(), 64, limit, place):
            if mean is None:  # all input has been read
                mean = np.average([ratio for ratio, _ in ratios], axis=0, weights=[rows for _, rows in ratios])
                total = sum(rows for _, rows in ratios)
            table, numbers = part.select(range(part.num_columns - 2)), part.column(part.num_columns - 1).to_numpy()
            step = max(1, int(batch_bytes * table.num_rows / max(1, table.nbytes)))
            for low in range(0, table.num_rows, step):
                some = dictionaries.decoded(table.slice(low, step))
                yielded += some.num_rows
                yield RowBatch(table=some, ratios=mean, numbers=numbers[low : low + step], done=done * yielded // total)
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _random(seed: int) -> np.random.Philox:
    return np.random.Philox(key=np.array([seed & _WORD, 0], np.uint64))


def _again(seed: int, before: int, rows: int) -> Callable[[int], Keys]:
    """Draw the keys of ``seed`` for the original order of rows, which come in the order of the seed ``before``."""
    first = np.argsort(_random(before).random_raw(rows), kind="stable")
    keys: Keys = _random(seed).random_raw(rows)[first]
    at = 0

    def draw(count: int) -> Keys:
        nonlocal at
        at += count
        return keys[at - count : at]

    return draw


# ---- Tables whose last two columns are the keys and numbers of rows


def _keys(table: pa.Table) -> Keys:
    keys: Keys = table.column(table.num_columns - 2).to_numpy()
    return keys


def _concatenate(parts: list[pa.Table]) -> pa.Table:
    return parts[0] if len(parts) == 1 else pa.concat_tables(parts).combine_chunks()


def _in_order(parts: Iterator[pa.Table], bits: int, limit: int, place: Path) -> Iterator[pa.Table]:
    """Sort ``parts`` by the lower ``bits`` of the keys, and yield them table by table."""
    held: list[pa.Table] = []
    size = rows = 0
    for part in parts:
        held.append(part)
        size += part.nbytes
        rows += part.num_rows
        if size > limit and rows > 1 and bits >= _BITS:
            break
    else:
        if held:
            table = _concatenate(held)
            held.clear()
            yield take_of_table(table, np.argsort(_keys(table), kind="stable"))
        return
    schema = held[0].schema
    buckets = _Buckets(place=place, shift=bits - _BITS, limit=limit)
    while held:
        buckets.add(held.pop(0))
    for part in parts:
        buckets.add(part)
    buckets.flush()
    buckets.close()
    for number in sorted(buckets.writers):
        path = place / f"{number:02}.arrow"
        yield from _in_order(_read(path, schema), bits - _BITS, limit, place / f"{number:02}")
        with write_errors(path):
            path.unlink()


@dataclass(kw_only=True)
class _Buckets:
    place: Path
    shift: int
    limit: int
    waiting: list[list[pa.Table]] = field(default_factory=lambda: [[] for _ in range(1 << _BITS)])
    held: int = 0
    writers: dict[int, pa.ipc.RecordBatchStreamWriter] = field(default_factory=dict)
    sinks: dict[int, pa.OSFile] = field(default_factory=dict)

    def add(self, part: pa.Table) -> None:
        bucket = (_keys(part) >> np.uint64(self.shift)).astype(np.int64) & ((1 << _BITS) - 1)
        order = np.argsort(bucket, kind="stable")
        ordered = take_of_table(part, order)
        ends = np.searchsorted(bucket[order], np.arange((1 << _BITS) + 1))
        for number in np.unique(bucket):
            low, high = int(ends[number]), int(ends[number + 1])
            self.waiting[number].append(ordered.slice(low, high - low))
        self.held += part.nbytes
        if self.held > self.limit:
            self.flush()

    def flush(self) -> None:
        with write_errors(self.place):
            for number, parts in enumerate(self.waiting):
                if parts:
                    self._write(number, _concatenate(parts))
        self.waiting = [[] for _ in range(1 << _BITS)]
        self.held = 0

    def _write(self, number: int, part: pa.Table) -> None:
        # named by position, as names need not be unique; the schema is known when they are read
        names = [*map(str, range(part.num_columns))]
        table = pa.Table.from_arrays([column.combine_chunks() for column in part.columns], names)
        if number not in self.writers:
            self.place.mkdir(exist_ok=True)
            self.sinks[number] = pa.OSFile(str(self.place / f"{number:02}.arrow"), "wb")
            options = pa.ipc.IpcWriteOptions(compression="lz4", use_threads=False)
            self.writers[number] = pa.ipc.new_stream(self.sinks[number], table.schema, options=options)
        self.writers[number].write_table(table)

    def close(self) -> None:
        with write_errors(self.place):
            for number, writer in self.writers.items():
                writer.close()
                self.sinks[number].close()


def _read(path: Path, schema: pa.Schema) -> Iterator[pa.Table]:
    with write_errors(path), pa.OSFile(str(path)) as file, pa.ipc.open_stream(file) as reader:
        for record_batch in reader:
            yield pa.Table.from_arrays(record_batch.columns, schema=schema)


class _Dictionaries:
    """One dictionary for each dictionary column, with all values so far."""

    def __init__(self) -> None:
        self.values: dict[int, pa.Array] = {}
        self.kinds: dict[int, pa.DataType] = {}

    def coded(self, table: pa.Table) -> pa.Table:
        for number, column in enumerate(table.columns):
            if not pt.is_dictionary(column.type):
                continue
            self.kinds[number] = column.type
            known = self.values.get(number)
            if known is not None:
                empty = pa.DictionaryArray.from_arrays(pa.array([], pa.int32()), known, ordered=column.type.ordered)
                column = pa.chunked_array([empty, *column.chunks], column.type)
            column = column.unify_dictionaries()
            if column.num_chunks:
                self.values[number] = column.chunk(column.num_chunks - 1).dictionary
            codes = pa.chunked_array([chunk.indices for chunk in column.chunks], pa.int32())
            table = table.set_column(number, table.schema.field(number).with_type(pa.int32()), codes)
        return table

    def decoded(self, table: pa.Table) -> pa.Table:
        for number, kind in self.kinds.items():
            values = self.values[number]
            chunks = [
                pa.DictionaryArray.from_arrays(chunk, values, ordered=kind.ordered)
                for chunk in table.column(number).chunks
            ]
            table = table.set_column(number, table.schema.field(number).with_type(kind), pa.chunked_array(chunks, kind))
        return table
