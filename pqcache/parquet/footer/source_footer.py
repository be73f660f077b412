"""The footers of files that are rewritten together."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.types as pt

from pqcache.errors import ParquetError, first_line
from pqcache.parquet.footer import footer, thrift
from pqcache.parquet.footer.doubtful import (
    Int96Values,
    int96_leaves,
    int96_unit,
    int96_values,
    local_stored_bytes_metadata,
)
from pqcache.parquet.footer.footer_validation import check_footer
from pqcache.parquet.nested import with_changed_types
from pqcache.system.disk import check_regular

_READ_BUFFER = 64 << 10  # per column; without one, pyarrow reads a column chunk whole
_FOOTERS_AT_ONCE, _FOOTERS_IN_TURN = 4, 8


@dataclass(frozen=True, kw_only=True)
class SourceFooter:
    """The footer of a source file.

    Attributes:
        schema: one and the same object for neighbours with the same schema and key-values.
        key_values: the key-value metadata; one and the same object where ``schema`` is.
        int96: the unit in which INT96 time stamps are read.
        metadata: the footer as pyarrow has it.
    """

    path: Path
    size: int
    rows: int
    schema: pa.Schema
    key_values: Mapping[bytes, bytes]
    elements: list[thrift.Struct]
    int96: str
    metadata: pq.FileMetaData

    @property
    def row_groups(self) -> list[tuple[int, int]]:
        """Rows and uncompressed bytes of each row group."""
        groups = map(self.metadata.row_group, range(self.metadata.num_row_groups))
        return [(group.num_rows, max(0, group.total_byte_size)) for group in groups]


def open_parquet(path: Path, int96_unit: str = "ns", metadata: pq.FileMetaData | None = None) -> pq.ParquetFile:
    """Open a file for reading in slices; ``metadata`` is its footer if that is known.

    Raises:
        ParquetError: missing, not Parquet, truncated or encrypted.
    """
    try:
        check_regular(path)
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
    return ParquetError(path, f"cannot be read as Parquet ({first_line(error)})", "fetch it again")


def read_source_footers(paths: Sequence[Path], int96: str | None = None) -> list[SourceFooter]:
    """INT96 time stamps get the unit ``int96``, by default one that loses nothing."""
    opened = _sources(paths, int96 or "us")
    if int96 is None and has_int96(opened):
        unit = int96_unit([(str(source.path), _int96_values(source)) for source in opened])
        if unit != "us":
            opened = _sources(paths, unit)
    return opened


def _sources(paths: Sequence[Path], unit: str) -> list[SourceFooter]:
    shares = [paths[first : first + _FOOTERS_IN_TURN] for first in range(0, len(paths), _FOOTERS_IN_TURN)]

    def read(share: Sequence[Path]) -> list[tuple[bytes, int]]:
        return [(footer.read_local_tail(path).footer, path.stat().st_size) for path in share]

    # Several threads read; only one parses, since they would wait for one another.
    found: list[SourceFooter] = []
    with ThreadPoolExecutor(_FOOTERS_AT_ONCE) as pool:
        for path, (data, size) in zip(paths, chain.from_iterable(pool.map(read, shares)), strict=True):
            found.append(_source(path, data, size, unit, found[-1] if found else None))
    return found


def _source(path: Path, data: bytes, size: int, unit: str, before: SourceFooter | None) -> SourceFooter:
    """Parse one footer; a schema equal to that of the source before is shared with it."""
    with _opened(path, data, unit) as file:
        elements = check_footer(data, str(path), size).elements
        metadata = file.metadata
        key_values = metadata.metadata or {}
        if before is not None and before.elements is elements and before.key_values == key_values:
            schema, key_values = before.schema, before.key_values
        else:
            try:
                schema = file.schema_arrow
            except pa.ArrowException as error:
                raise ParquetError(path, f"has a schema that Arrow cannot hold ({first_line(error)})") from error
    return SourceFooter(
        path=path,
        size=size,
        rows=metadata.num_rows,
        schema=schema,
        key_values=key_values,
        elements=elements,
        int96=unit,
        metadata=metadata,
    )


def _opened(path: Path, data: bytes, unit: str) -> pq.ParquetFile:
    """A pyarrow file that consists of a footer only."""
    end = footer.MAGIC + data + len(data).to_bytes(4, "little") + footer.MAGIC
    try:
        return pq.ParquetFile(pa.BufferReader(end), coerce_int96_timestamp_unit=unit)
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(path, error) from error


def one_of_each_schema(sources: Sequence[SourceFooter]) -> list[SourceFooter]:
    """The first source of each run with equal schema and key-values."""
    found: dict[int, SourceFooter] = {}
    for source in sources:
        found.setdefault(id(source.schema), source)
    return list(found.values())


def has_int96(sources: Sequence[SourceFooter]) -> bool:
    return any(int96_leaves(source.metadata) for source in one_of_each_schema(sources))


def _int96_values(source: SourceFooter) -> Int96Values:
    leaves = int96_leaves(source.metadata)
    if not leaves or source.rows == 0:
        return Int96Values()
    paths = [source.metadata.schema.column(leaf).path for leaf in leaves]
    try:
        with open_parquet(source.path, metadata=local_stored_bytes_metadata(source.path, leaves)) as file:
            return int96_values(file.iter_batches(columns=paths))
    except (pa.ArrowException, OSError) as error:
        raise ParquetError(source.path, f"cannot be decoded ({first_line(error)})", "fetch it again") from error


# ---- INT96 time stamps that are kept as INT96, beside time stamps that are not
#
# pyarrow's writer stores either all time stamps as INT96 or none. So those that are not go through it as plain
# 64-bit integers, which have the same bytes, and the footer declares their types.

LeafPlace = tuple[str, int]
"""A leaf: its top-level column, and its position within that."""


def _places(source: SourceFooter) -> dict[LeafPlace, str]:
    found: dict[LeafPlace, str] = {}
    counts: Counter[int] = Counter()
    for number, leaf in enumerate(footer.leaves_of(source.elements, str(source.path))):
        kind = source.metadata.schema.column(number).physical_type
        found[source.schema.names[leaf.column], counts[leaf.column]] = kind
        counts[leaf.column] += 1
    return found


def int96_places(sources: Sequence[SourceFooter]) -> set[LeafPlace]:
    """Return the leaves that are INT96 in every file that has them."""
    places = [_places(source) for source in one_of_each_schema(sources)]
    found = {place for known in places for place, kind in known.items() if kind == "INT96"}
    return {place for place in found if all(known.get(place, "INT96") == "INT96" for known in places)}


def is_uniform(sources: Sequence[SourceFooter]) -> bool:
    found = [
        {place for place, kind in _places(source).items() if kind == "INT96"} for source in one_of_each_schema(sources)
    ]
    return all(places == found[0] for places in found)


def int96_as_int64(schema: pa.Schema, kept: Collection[LeafPlace]) -> pa.Schema:
    """Return ``schema`` with int64 for every time stamp that is not among ``kept``."""
    fields = []
    for field in schema:
        places = iter(range(1 << 62))
        fields.append(field.with_type(_type_as_int64(field.type, field.name, places, kept)))
    return pa.schema(fields, schema.metadata)


def _type_as_int64(kind: pa.DataType, name: str, places: Iterator[int], kept: Collection[LeafPlace]) -> pa.DataType:
    if pt.is_nested(kind):
        return with_changed_types(kind, lambda inner: _type_as_int64(inner, name, places, kept))
    place = name, next(places)
    return pa.int64() if pt.is_timestamp(kind) and place not in kept else kind
