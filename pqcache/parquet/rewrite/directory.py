"""Rewrites a partition directory into row groups of the right size.

Files that already fit are linked. The rest is decoded, cut by compressed bytes and encoded again; values, row order,
schema and key-value metadata stay the same.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from pqcache.errors import ParquetError, PqcacheError, UsageError
from pqcache.parquet import footer, thrift
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
)
from pqcache.parquet.rewrite.options import COMPAT_CODEC, DEFAULT_CODEC, RewriteOptions
from pqcache.parquet.rewrite.shuffle import shuffle_rows
from pqcache.parquet.rewrite.sources import (
    SourceFooter,
    conflicts,
    has_int96,
    one_of_each_schema,
    range_index,
    read_source_footers,
    with_spark,
)
from pqcache.parquet.rewrite.writer import MIN_FILL, RewriteResult, WriterSettings, write_row_groups
from pqcache.parquet.schema import (
    ARROW_SCHEMA,
    check_names,
    encode_schema,
    merge_schemas,
    with_time_zones,
    working_schema,
)
from pqcache.parquet.statistics import first_page
from pqcache.parquet.types import leaves_in
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
    """Facts about the files of a directory that the files don't tell.

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
        known: facts about ``sources`` that the files don't tell.
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
    without rows; nor do files with another schema than the first, or with another encoding than ``options`` ask for.
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
    """Whether a file's footer proves that it is encoded as ``options`` ask.

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
