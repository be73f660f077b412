"""Source files of one partition directory as a stream of pieces, decoded ahead of their use.

Memory is bounded by the size of a piece, not by the sources' row groups: those are read in slices.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.types as pt

from pqcache.errors import ParquetError, first_line
from pqcache.parquet import footer, thrift
from pqcache.parquet.dense import changed, changes
from pqcache.parquet.footer_validation import check_footer
from pqcache.parquet.pages.binary_views import Longs, Take
from pqcache.parquet.rewrite.sizes import Floats, Widths, fixed_width, sizes_of, widths_of
from pqcache.parquet.schema_merge import conformed

Numbers = range | npt.NDArray[np.int64]

_READ_BUFFER = 64 << 10  # per column; without one, pyarrow reads a column chunk whole
_MAX_RATIO = 4.0
_TINY = 8  # to a piece
_FOOTERS_AT_ONCE, _FOOTERS_IN_TURN = 4, 8
_NS_PER_US = 1000
_NS_RANGE_US = (2**63 - 1) // _NS_PER_US


@dataclass(frozen=True)
class Source:
    """What the footer of a source file says; ``int96`` is the unit its INT96 time stamps are read in."""

    path: Path
    size: int
    metadata: pq.FileMetaData
    schema: pa.Schema
    elements: list[thrift.Struct]
    int96: str


@dataclass(frozen=True)
class Piece:
    """Some rows of the source files, most often consecutive ones.

    ``weights`` are the bytes that each top-level column is guessed to take on disk; ``numbers`` counts each row
    through all source files; ``done`` is how many bytes of the sources are behind the reader after this piece.
    """

    table: pa.Table
    ratios: Floats
    weights: Floats
    nbytes: int
    numbers: Numbers
    done: int
    widths: Widths


def piece_of(table: pa.Table, ratios: Floats, numbers: Numbers, done: int, widths: Widths | None = None) -> Piece:
    """Return ``table`` as a piece, weighed."""
    widths = widths or widths_of(table.schema)
    sizes = sizes_of(table, widths)
    weights: Floats = sizes * ratios + table.num_rows / 8
    return Piece(table, ratios, weights, int(sizes.sum()), numbers, done, widths)


def open_source(path: Path, int96_unit: str = "ns", metadata: pq.FileMetaData | None = None) -> pq.ParquetFile:
    """Return ``path`` opened for reading in slices; ``metadata`` is its footer, if that was read before.

    Raises:
        ParquetError: missing, not Parquet, truncated or encrypted.
    """
    try:
        # An open file, because pyarrow takes some path strings for URLs.
        return pq.ParquetFile(
            pa.OSFile(os.fsencode(path)),
            metadata=metadata,
            pre_buffer=False,
            buffer_size=_READ_BUFFER,
            coerce_int96_timestamp_unit=int96_unit,
            page_checksum_verification=True,
        )
    except (pa.ArrowException, OSError, UnicodeError) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: BaseException) -> ParquetError:
    """Return the error for a file that cannot be opened as Parquet."""
    return ParquetError(f"{path}: cannot be read as Parquet ({first_line(error)}); fetch it again")


def sources_of(paths: Sequence[Path], int96: str | None = None) -> list[Source]:
    """Return the source files with INT96 time stamps in the unit ``int96``, by default one that loses nothing."""
    opened = _sources(paths, int96 or "us")
    if int96 is None and has_int96(opened):
        unit = int96_unit([(str(source.path), *_int96_span(source)) for source in opened])
        if unit != "us":
            opened = _sources(paths, unit)
    return opened


def _sources(paths: Sequence[Path], unit: str) -> list[Source]:
    shares = [paths[first : first + _FOOTERS_IN_TURN] for first in range(0, len(paths), _FOOTERS_IN_TURN)]
    known: dict[bytes, list[thrift.Struct]] = {}
    found: list[Source] = []

    def ends(share: Sequence[Path]) -> list[tuple[Path, bytes, int]]:
        return [(path, footer.read_footer(path), path.stat().st_size) for path in share]

    # Several threads read; only one parses, since they would wait for one another.
    with ThreadPoolExecutor(_FOOTERS_AT_ONCE) as pool:
        for some in pool.map(ends, shares):
            for path, data, size in some:
                found.append(_source(path, data, size, unit, known, found[-1] if found else None))
    return found


def _source(
    path: Path, data: bytes, size: int, unit: str, known: dict[bytes, list[thrift.Struct]], before: Source | None
) -> Source:
    """Return a source; what it has in common with the one ``before`` is the same object, so that both are alike."""
    elements = footer.elements_in(data, str(path), known)
    end = footer.MAGIC + data + len(data).to_bytes(4, "little") + footer.MAGIC
    try:
        file = pq.ParquetFile(pa.BufferReader(end), coerce_int96_timestamp_unit=unit)
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(path, error) from error
    with file:
        check_footer(data, str(path))
        metadata = file.metadata
        if before is not None and before.elements is elements and before.metadata.metadata == metadata.metadata:
            schema = before.schema
        else:
            try:
                schema = file.schema_arrow
            except pa.ArrowException as error:
                raise ParquetError(f"{path}: has a schema that Arrow cannot hold ({first_line(error)})") from error
        return Source(path, size, metadata, schema, elements, unit)


def kinds(sources: Sequence[Source]) -> list[Source]:
    """Return the first source of each kind: those after it have the same schema and key-values."""
    return list({id(source.schema): source for source in reversed(sources)}.values())[::-1]


def has_int96(sources: Sequence[Source]) -> bool:
    """Return whether any file has a column of INT96 time stamps."""
    return any(int96_columns(source.metadata) for source in sources)


def int96_columns(metadata: pq.FileMetaData) -> list[str]:
    """Return the paths of the columns of INT96 time stamps."""
    columns = (metadata.schema.column(number) for number in range(len(metadata.schema)))
    return [column.path for column in columns if column.physical_type == "INT96"]


def int96_unit(spans: Sequence[tuple[str, bool, bool]]) -> str:
    """Return "us" if that holds every INT96 value, else "ns", given each file's name and `int96_span`.

    Microseconds come first: that is what Spark and Hive mean, and it spans 290,000 years around 1970.

    Raises:
        ParquetError: neither unit holds all values.
    """
    finer = next((name for name, found, _ in spans if found), None)
    farther = next((name for name, _, found in spans if found), None)
    if finer and farther:
        raise ParquetError(
            f"{finer} has INT96 times finer than a microsecond and {farther} has some outside the years 1677 to 2262: "
            "no 64-bit time holds both; round or repair them at the source"
        )
    return "ns" if finer else "us"


def _int96_span(source: Source) -> tuple[bool, bool]:
    columns = int96_columns(source.metadata)
    if not columns or source.metadata.num_rows == 0:
        return False, False
    try:
        with open_source(source.path, "us") as coarse, open_source(source.path, "ns") as fine:
            return int96_span(coarse, fine, columns)
    except (pa.ArrowException, OSError) as error:
        raise ParquetError(f"{source.path}: cannot be decoded ({first_line(error)}); fetch it again") from error


def int96_span(coarse: pq.ParquetFile, fine: pq.ParquetFile, columns: list[str]) -> tuple[bool, bool]:
    """Return whether ``columns`` hold INT96 times that microseconds cannot, and some that nanoseconds cannot hold.

    ``coarse`` and ``fine`` are the same file, opened with INT96 as microseconds and as nanoseconds.
    """
    finer = farther = False
    for one, other in zip(coarse.iter_batches(columns=columns), fine.iter_batches(columns=columns), strict=True):
        for us, ns in zip(_leaf_values(one), _leaf_values(other), strict=True):
            with np.errstate(over="ignore"):  # out of range, both wrap alike
                finer = finer or not np.array_equal(us * _NS_PER_US, ns)
            farther = farther or bool(len(us) and max(us.max(), -us.min()) > _NS_RANGE_US)
    return finer, farther


def _leaf_values(batch: pa.RecordBatch) -> Iterator[npt.NDArray[np.int64]]:
    def leaves(array: pa.Array) -> Iterator[pa.Array]:
        if pt.is_struct(array.type):
            for child in array.flatten():
                yield from leaves(child)
        elif pt.is_map(array.type):
            yield from leaves(array.keys)
            yield from leaves(array.items)
        elif pt.is_nested(array.type):
            yield from leaves(array.flatten())
        elif pt.is_timestamp(array.type):
            yield array

    for column in batch.columns:
        for leaf in leaves(column):
            yield leaf.drop_null().cast(pa.int64()).to_numpy(zero_copy_only=False)


@dataclass(frozen=True)
class Run:
    """Row groups of a source that are read in one go.

    ``first`` is the number of their first row in the file, and ``before`` how many rows and bytes other files have
    before this one.
    """

    source: Source
    groups: list[int]
    first: int
    before: tuple[int, int]
    rows: int
    size: int


def runs(sources: Sequence[Source], target: int) -> Iterator[Run]:
    """Yield all rows of ``sources`` in order: row groups one by one, or several that take ``target`` bytes decoded."""
    # Where a nested dictionary changes, which it does between row groups, pyarrow gives up.
    apart = {id(kind.schema) for kind in kinds(sources) if any(map(_nested_dictionary, kind.schema.types))}
    rows = size = 0
    for source in sources:
        together = 0 if id(source.schema) in apart else target
        first = 0
        for groups, count, nbytes in _runs(source.metadata, together):
            yield Run(source, groups, first, (rows, size), count, nbytes)
            first += count
        rows += source.metadata.num_rows
        size += source.size


def pieces(
    some: Sequence[Run], schema: pa.Schema, target: int, stored: pa.Schema | None = None, longs: Longs | None = None
) -> Iterator[Piece]:
    """Yield the rows of ``some`` in order, under ``schema``, in pieces of about ``target`` Arrow bytes.

    ``stored`` is the schema that they are relabelled with in the end, as for time stamps that are written as
    plain numbers. Columns that are ``longs`` come as views.

    Raises:
        ParquetError: a file is damaged, or a value does not fit ``schema``; names the file.
    """
    widths, kind, rated = widths_of(stored or schema), None, False
    decoded = schema if longs is None else longs.without(schema)
    for source, own in itertools.groupby(some, lambda run: run.source):
        name = str(source.path)
        if source.schema is not kind:  # else it is as the one before
            kind, rated = source.schema, False
            recast = changes(kind, schema, name) if source.metadata.num_rows else {}
            columns = np.array([leaf.column for leaf in footer.leaves_of(source.elements, name)])
            least = sum(fixed_width(field.type) for field in kind)
        with open_source(source.path, source.int96, source.metadata) as file:
            for run in own:
                # Tiny neighbours share their weights, as they will share a piece.
                if not rated or run.size > target // _TINY:
                    ratios, rated = _ratios(source, run.groups, columns, schema), True
                batch = max(1, int(target / max(run.size / run.rows, least, 1 / 8)))
                rows = 0
                for table, views in _tables(file, run.groups, batch, source.path, longs):
                    whole = conformed(changed(table, recast, name, run.first + rows), decoded, name)
                    if stored is not None:
                        whole = whole.cast(stored)
                    for column, rows_of in views.items():
                        field = schema.field(column).with_type(rows_of.type)
                        whole = whole.add_column(schema.get_field_index(column), field, rows_of)
                    number = run.before[0] + run.first + rows
                    rows += whole.num_rows
                    done = run.before[1] + source.size * (run.first + rows) // max(1, source.metadata.num_rows)
                    yield piece_of(whole, ratios, range(number, number + whole.num_rows), done, widths)
                if rows != run.rows:
                    raise ParquetError(
                        f"{name}: row groups {run.groups[0]} to {run.groups[-1]} hold {rows:,} rows, and "
                        f"{run.rows:,} in the footer; fetch the file again"
                    )


def _runs(metadata: pq.FileMetaData, target: int) -> Iterator[tuple[list[int], int, int]]:
    """Yield the row groups to be read in one go, one or several small ones, with their rows and their bytes."""
    run: list[int] = []
    rows = size = 0
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        count, nbytes = group.num_rows, max(0, group.total_byte_size)
        if count == 0:
            continue
        if run and size + nbytes > target:
            yield run, rows, size
            run, rows, size = [], 0, 0
        run.append(number)
        rows += count
        size += nbytes
    if run:
        yield run, rows, size


def _nested_dictionary(kind: pa.DataType) -> bool:
    if not pt.is_nested(kind):
        return False
    inner = [kind.field(number).type for number in range(kind.num_fields)]
    return any(pt.is_dictionary(child) or _nested_dictionary(child) for child in inner)


def _tables(
    file: pq.ParquetFile, groups: list[int], rows: int, path: Path, longs: Longs | None
) -> Iterator[tuple[pa.Table, dict[str, pa.ChunkedArray]]]:
    """Yield the rows of some row groups, ``rows`` at a time, those columns apart that are ``longs``."""

    def decoded(group: int, name: str) -> Iterator[pa.Array]:
        with open_source(path, metadata=file.metadata) as own:
            for batch in own.iter_batches(batch_size=rows, row_groups=[group], columns=[name], use_threads=False):
                yield batch.column(0)

    try:
        with ExitStack() as stack:
            columns, take = None, dict[str, Take]()
            if longs is not None:
                descriptor = os.open(path, os.O_RDONLY)
                stack.callback(os.close, descriptor)
                take = longs.takers(file, descriptor, groups, decoded)
                columns = [name for name in file.schema_arrow.names if name not in take]
            # One thread decodes while another encodes: threads per column as well cost a quarter more CPU time.
            for batch in file.iter_batches(batch_size=rows, row_groups=groups, columns=columns, use_threads=False):
                views = {name: some(batch.num_rows) for name, some in take.items()}
                for name, column in views.items():
                    if len(column) != batch.num_rows:
                        raise ParquetError(f"{path}: column {name} has fewer rows than others; fetch the file again")
                yield pa.Table.from_batches([batch]), views
            for name, some in take.items():
                if len(some(1)):
                    raise ParquetError(f"{path}: column {name} has more rows than others; fetch the file again")
    except (pa.ArrowException, OSError) as error:
        raise ParquetError(f"{path}: cannot be decoded ({first_line(error)}); fetch the file again") from error


def _ratios(source: Source, groups: list[int], columns: npt.NDArray[np.int64], schema: pa.Schema) -> Floats:
    """Return compressed / uncompressed bytes of ``groups`` for each column of ``schema``."""
    totals = np.zeros((2, len(source.schema)), np.float64)
    for number in groups:
        group = source.metadata.row_group(number)
        for position in range(group.num_columns):
            chunk = group.column(position)
            totals[:, columns[position]] += chunk.total_compressed_size, chunk.total_uncompressed_size
    with np.errstate(divide="ignore", invalid="ignore"):
        found = totals[0] / totals[1]
    found = np.where(np.isfinite(found) & (found > 0), np.minimum(found, _MAX_RATIO), 1.0)
    if source.schema.names == schema.names:
        return found
    by_name = dict(zip(source.schema.names, found, strict=True))
    return np.array([by_name.get(name, 1.0) for name in schema.names])
