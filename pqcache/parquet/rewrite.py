"""One partition directory rewritten into row groups of the right size.

Files that already fit are linked; the rest is decoded, cut by compressed bytes and encoded again, with every
value, the order of the rows, the schema and the key-value metadata as they were.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from pqcache.errors import ParquetError, PqcacheError, UsageError
from pqcache.parquet.decode import Piece, Source, has_int96, joined, pieces, prefetched, sources_of
from pqcache.parquet.footer import MAGIC
from pqcache.parquet.rowfile import ARROW_SCHEMA, Layout, Output, arrow_schema
from pqcache.parquet.schema import unified, working
from pqcache.parquet.writer import MIN_FILL, Settings, straddles, write_row_groups
from pqcache.units import format_size

CODECS = ("lz4", "zstd", "snappy", "gzip", "none", "keep")
_LEVELS = {"zstd": range(1, 23), "gzip": range(1, 10)}
_MIN_ROW_GROUP = 4 << 10
_MIN_FILE = 1 << 30
_FILE_ROW_GROUPS = 8
_PIECES = 16  # per row group
_MIN_PIECE, _MAX_PIECE, _PER_COLUMN = 64 << 10, 4 << 20, 4 << 10
_AHEAD = 2  # row-group sizes of Arrow bytes, which are about one row group
_MIN_AHEAD, _MAX_AHEAD = 8 << 20, 512 << 20


@dataclass(frozen=True)
class RewriteOptions:
    """How a directory is rewritten.

    Attributes:
        row_group_size: the most compressed bytes a row group may take.
        compression: codec for the columns that shrink by it; ``keep`` takes each column's own from the source.
        compression_level: for zstd (1 to 22) and gzip (1 to 9).
        compat: write only what readers of ten years ago know (snappy, plain and dictionary encodings).
        block_size: no row group lies across a multiple of this many bytes of its file; None does not care.
    """

    row_group_size: int
    compression: str = "lz4"
    compression_level: int | None = None
    compat: bool = False
    block_size: int | None = None

    def __post_init__(self) -> None:
        if self.row_group_size < _MIN_ROW_GROUP:
            raise UsageError(f"row-group size {self.row_group_size}: give at least {_MIN_ROW_GROUP} bytes, like 128MB")
        if self.compression not in CODECS:
            raise UsageError(f"compression {self.compression!r}: choose one of {', '.join(CODECS)}")
        levels = _LEVELS.get(self.compression, range(0))
        if self.compression_level is not None and self.compression_level not in levels:
            allowed = f"{levels[0]} to {levels[-1]}" if levels else "no level"
            raise UsageError(f"compression level {self.compression_level}: {self.compression} takes {allowed}")
        if self.compat and self.compression not in ("lz4", "snappy", "gzip", "none"):
            raise UsageError(f"compat writes snappy: leave compression {self.compression!r} out")
        if self.block_size is not None and self.row_group_size > self.block_size:
            raise UsageError(
                f"row-group size {format_size(self.row_group_size)}: does not fit into a block of "
                f"{format_size(self.block_size)}; make it smaller, or the block size larger"
            )

    @property
    def limit(self) -> int:
        """The most compressed bytes a row group may take; aligned, they fill a block beside a file's first bytes."""
        if self.block_size is None:
            return self.row_group_size
        return min(self.row_group_size, (self.block_size - len(MAGIC)) // (self.block_size // self.row_group_size))


@dataclass(frozen=True)
class RewriteResult:
    """What `rewrite_directory` made.

    Attributes:
        outputs: the files of the target, in order of their rows.
        encoded: compressed bytes that were encoded.
        encoded_again: how many of them were taken back and encoded another time.
        warnings: what the user should know, each naming a file.
    """

    outputs: tuple[Output, ...]
    encoded: int
    encoded_again: int
    warnings: tuple[str, ...]


def row_group_bytes(group: pq.RowGroupMetaData) -> int:
    """Return the bytes a row group takes on disk: its column chunks, page headers and dictionaries included."""
    return sum(group.column(number).total_compressed_size for number in range(group.num_columns))


def row_group_start(group: pq.RowGroupMetaData) -> int:
    """Return where in its file a row group begins."""
    first = group.column(0)
    return int(first.dictionary_page_offset or first.data_page_offset)


def fits(metadata: Sequence[pq.FileMetaData], options: RewriteOptions) -> int:
    """Return how many of the first files of a directory need no rewriting.

    Every row group must be within the limit, unless it is a single row, fill 95 % of it, unless it is the last that
    holds rows, and not lie across a boundary, where there is a block size. Files without rows and empty row groups
    do not fit, except in a file that is alone; nor does a file whose schema is not the first's.
    """
    if len(metadata) == 1 and metadata[0].num_rows == 0:
        return 1
    last = max((number for number, file in enumerate(metadata) if file.num_rows), default=-1)
    for number, file in enumerate(metadata):
        if not file.num_rows or not file.schema.equals(metadata[0].schema):
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


def rewrite_directory(
    sources: Sequence[Path],
    target: Path,
    options: RewriteOptions,
    on_progress: Callable[[int], None] | None = None,
    schema: pa.Schema | None = None,
) -> RewriteResult:
    """Write the rows of ``sources`` to ``target`` in row groups that fill ``options.row_group_size``.

    The leading files that fit are hard-linked (or copied, where links are impossible); the others become
    ``part-<n>.parquet`` of up to 1 GiB or 8 row groups each. Where all fit, they keep their names. Everything is
    on disk when this returns. Memory is a small multiple of one decoded row group.

    Args:
        sources: the Parquet files of one partition directory, in order; they are not modified.
        target: an empty or new directory.
        options: sizes and codecs.
        on_progress: called with the bytes of the sources that were done since the last call.
        schema: what the files' schemas are to be unified with, where a whole table must agree.

    Raises:
        ParquetError: a source is damaged, or schemas do not mix without loss; names the files.
        UsageError: nothing to rewrite, or ``target`` is not empty.
        PqcacheError: ``target`` cannot be written.
    """
    if not sources:
        raise UsageError(f"{target}: there are no files to rewrite into it")
    _make_empty(target)
    report = on_progress or (lambda done: None)
    opened = sources_of(sources)
    named = [(str(source.path), source.schema) for source in opened]
    declared = unified(named if schema is None else [("the table's schema", schema), *named])
    keep = _prefix(opened, declared, options)
    all_fit = keep == len(opened) and len({source.path.name for source in opened}) == len(opened)
    outputs = []
    for number, source in enumerate(opened[:keep]):
        name = source.path.name if all_fit else f"part-{number:05d}.parquet"
        link(source.path, target / name)
        metadata = source.metadata
        outputs.append(Output(target / name, metadata.num_rows, metadata.num_row_groups, linked=True))
        report(source.size)
    rest = opened[keep:]
    result = RewriteResult(tuple(outputs), 0, 0, ())
    if rest and (not keep or any(source.metadata.num_rows for source in rest)):
        result = _rewritten(opened, rest, declared, target, options, report, outputs)
    sync_directory(target)
    return result


def _rewritten(
    opened: list[Source],
    rest: list[Source],
    declared: pa.Schema,
    target: Path,
    options: RewriteOptions,
    report: Callable[[int], None],
    linked: list[Output],
) -> RewriteResult:
    size = options.limit
    layout = _layout(opened, declared)
    settings = Settings(
        size,
        max(_MIN_FILE, _FILE_ROW_GROUPS * size),
        _codec_of(rest, options),
        options.compression_level,
        options.compat,
        _decimals_as_integers(rest),
        options.block_size,
    )
    # Wide tables take larger pieces: a batch costs microseconds per column, however few its rows.
    piece = max(min(max(size // _PIECES, _MIN_PIECE), _MAX_PIECE), _PER_COLUMN * len(layout.working))
    stream = joined(pieces(rest, layout.working, piece), piece)
    ahead = prefetched(stream, min(max(_AHEAD * size, _MIN_AHEAD), _MAX_AHEAD))
    try:
        written = write_row_groups(_counted(ahead, report), target, layout, settings, len(linked))
    finally:
        ahead.close()
    done = sum(output.rows for output in written.outputs)
    expected = sum(source.metadata.num_rows for source in rest)
    if done != expected:
        raise ParquetError(f"{target}: {done:,} rows were written of {expected:,}; please report this")
    report(sum(source.size for source in rest if not source.metadata.num_rows))
    return RewriteResult((*linked, *written.outputs), written.encoded, written.again, written.warnings)


def _counted(stream: Iterator[Piece], report: Callable[[int], None]) -> Iterator[Piece]:
    done = 0
    for piece in stream:
        yield piece
        report(piece.done - done)
        done = piece.done


def _prefix(opened: list[Source], declared: pa.Schema, options: RewriteOptions) -> int:
    """Return how many files can be linked although the rest is rewritten."""
    found = fits([source.metadata for source in opened], options)
    same = opened[0].schema.equals(declared)
    # Next to INT64 time stamps, INT96 would be another type to most readers.
    mixed = found < len(opened) and has_int96(opened)
    return found if same and not mixed else 0


def _layout(opened: list[Source], declared: pa.Schema) -> Layout:
    first = opened[0]
    known = first.metadata.metadata or {}
    if declared.equals(first.schema, check_metadata=True):
        return Layout(working(declared), declared, first.elements, known)
    # Readers take the Arrow schema from its own key, the metadata in it included.
    keyvalues = dict(declared.metadata or {})
    if any(ARROW_SCHEMA in (source.metadata.metadata or {}) for source in opened):
        keyvalues[ARROW_SCHEMA] = arrow_schema(declared)
    elements = first.elements if declared.equals(first.schema) else None
    return Layout(working(declared), declared, elements, keyvalues)


def _codec_of(sources: list[Source], options: RewriteOptions) -> Callable[[int], str]:
    """Return the codec to try for a leaf column, by position."""
    codec = options.compression
    if options.compat and codec == "lz4":
        codec = "snappy"
    if codec != "keep":
        return lambda leaf: codec
    for source in sources:
        if source.metadata.num_row_groups:
            group = source.metadata.row_group(0)
            names = [group.column(number).compression.lower() for number in range(group.num_columns)]
            names = [{"uncompressed": "none", "lz4_raw": "lz4"}.get(name, name) for name in names]
            return lambda leaf: names[leaf] if leaf < len(names) else "lz4"
    return lambda leaf: "lz4"


def _decimals_as_integers(sources: list[Source]) -> bool:
    """Return whether decimals are stored as INT32 or INT64."""
    schema = sources[0].metadata.schema
    columns = (schema.column(number) for number in range(len(schema)))
    return any(
        column.logical_type.type == "DECIMAL" and column.physical_type in ("INT32", "INT64") for column in columns
    )


def _make_empty(target: Path) -> None:
    try:
        target.mkdir(parents=True, exist_ok=True)
        if any(target.iterdir()):
            raise UsageError(f"{target}: is not empty; give a new directory")
    except OSError as error:
        raise PqcacheError(f"{target}: cannot be made: {error.strerror or error}; choose another directory") from error


def link(source: Path, target: Path) -> None:
    """Hard-link ``source`` as ``target``, or copy it where that is impossible, and bring it to disk."""
    try:
        try:
            os.link(os.path.realpath(source), target)
        except OSError as error:
            if error.errno not in (errno.EXDEV, errno.EMLINK, errno.EPERM, errno.ENOTSUP):
                raise
            shutil.copyfile(source, target)
        with target.open("rb") as file:
            os.fsync(file.fileno())
    except OSError as error:
        raise PqcacheError(
            f"{target}: cannot be linked or copied from {source}: {error.strerror or error}; free space or fix the "
            "permissions, then run again"
        ) from error


def sync_directory(path: Path) -> None:
    """Bring the names in directory ``path`` to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
