"""Footers of files that are rewritten together: their schemas, INT96 timestamps and key-values."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pqcache.errors import MALFORMED, ParquetError, first_line
from pqcache.parquet import footer, thrift
from pqcache.parquet.misread import (
    Int96Values,
    int96_leaves,
    int96_unit,
    int96_values,
    local_stored_bytes_metadata,
)
from pqcache.parquet.schema import ARROW_SCHEMA, PANDAS, SPARK
from pqcache.parquet.validation import check_footer
from pqcache.system.disk import check_regular

SET_ASIDE = b"pqcache." + SPARK
_MAX_SHOWN = 60  # characters of a key-value in a warning
_READ_BUFFER = 64 << 10  # per column; without one, pyarrow reads a column chunk whole
_FOOTERS_AT_ONCE, _FOOTERS_IN_TURN = 4, 8


@dataclass(frozen=True, kw_only=True)
class SourceFooter:
    """The footer of a source file.

    Attributes:
        schema: the same object for neighbours with equal schemas and key-values.
        key_values: the key-value metadata; shared like ``schema``.
        int96: the unit in which INT96 timestamps are read.
        metadata: pyarrow's footer.
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
    """Open a file for reading in slices; ``metadata`` is its footer, if known.

    Raises:
        ParquetError: the file is missing, not Parquet, truncated or encrypted.
    """
    try:
        check_regular(path)
        # an open file, as pyarrow takes some paths for URLs
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
    """Read footers; INT96 timestamps get the unit ``int96``, by default one that loses nothing."""
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

    # several threads read, but only one parses, as they would wait for one another
    found: list[SourceFooter] = []
    with ThreadPoolExecutor(_FOOTERS_AT_ONCE) as pool:
        for path, (data, size) in zip(paths, chain.from_iterable(pool.map(read, shares)), strict=True):
            found.append(_source(path, data, size, unit, found[-1] if found else None))
    return found


def _source(path: Path, data: bytes, size: int, unit: str, before: SourceFooter | None) -> SourceFooter:
    """Parse a footer; a schema equal to that of the previous source is shared."""
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
    """A pyarrow file of nothing but a footer."""
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


# ---- Key-value metadata of files that are merged or cut


@dataclass(frozen=True)
class RangeIndex:
    """A pandas RangeIndex over all rows."""

    start: int
    step: int


def _range_of(text: bytes | None) -> dict[str, Any] | None:
    """pandas' description of a RangeIndex, or None."""
    try:
        for column in json.loads(text or b"{}")["index_columns"]:
            if isinstance(column, dict) and column.get("kind") == "range":
                return column
    except MALFORMED:
        pass
    return None


def range_index(sources: Sequence[SourceFooter]) -> RangeIndex | None:
    """The RangeIndex of all rows of ``sources``; None unless each range continues the one before."""
    begin: RangeIndex | None = None
    name, at = None, 0
    for source in sources:
        found = _range_of(source.key_values.get(PANDAS))
        try:
            start, stop, step = (int((found or {})[key]) for key in ("start", "stop", "step"))
        except (KeyError, TypeError, ValueError):
            return None
        assert found is not None
        if begin is None:
            begin, name, at = RangeIndex(start, step), found.get("name"), start
        rows = source.rows
        if (start, step, found.get("name")) != (at, begin.step, name) or len(range(start, stop, step or 1)) != rows:
            return None
        at += rows * step
    return begin


def with_range(
    metadata: Mapping[bytes, bytes | None], index: RangeIndex | None, first: int, rows: int
) -> Mapping[bytes, bytes | None]:
    """Put pandas' RangeIndex for ``rows`` rows from ``first`` into ``metadata``.

    Without an ``index`` the description is dropped, so that pandas counts from 0.
    """
    text = metadata.get(PANDAS)
    found = _range_of(text)
    if found is None or text is None:
        return metadata
    about = json.loads(text)
    others = [column for column in about["index_columns"] if column != found]
    new: list[Any] = others
    if index is not None:
        start = index.start + first * index.step
        new = [{**found, "start": start, "stop": start + rows * index.step, "step": index.step}]
        if new[0] == found:
            return metadata
        new = [*new, *others]
    return {**metadata, PANDAS: json.dumps({**about, "index_columns": new}).encode()}


def with_spark(metadata: Mapping[bytes, bytes] | None, dense: bool, same: bool) -> dict[bytes, bytes] | None:
    """Set Spark's schema aside in a file with dense columns, and restore it in others.

    Spark trusts this schema, which has lists, more than the file. Unless the types are the ``same`` as in its own file,
    it is dropped: Spark would fail on wider types and miss added columns.
    """
    if not metadata:
        return None
    old, new = (SPARK, SET_ASIDE) if dense else (SET_ASIDE, SPARK)
    found = dict(metadata)
    if not same:
        found.pop(SPARK, None)
        found.pop(SET_ASIDE, None)
    if old in found:
        found = {new: found.pop(old), **found}
    return found


def conflicts(sources: Sequence[SourceFooter]) -> list[str]:
    """A warning for each key on whose value two files disagree; the first file's is kept."""
    found: dict[bytes, str] = {}
    known: dict[bytes, tuple[SourceFooter, bytes]] = {}
    for source in one_of_each_schema(sources):  # the others share their key-values
        for key, value in source.key_values.items():
            if key == ARROW_SCHEMA:  # made anew for the schema of all
                continue
            first, before = known.setdefault(key, (source, value))
            if key not in found and _comparable(key, before) != _comparable(key, value):
                found[key] = (
                    f"{first.path} and {source.path}: key-value {key.decode('utf-8', 'replace')!r} differs "
                    f"({_shown(before)} and {_shown(value)}); the first one's is kept"
                )
    return list(found.values())


def _comparable(key: bytes, value: bytes) -> Any:
    """The part of a value that must agree: pandas' range differs in every file."""
    if key == PANDAS and (found := _range_of(value)) is not None:
        about = json.loads(value)
        return {**about, "index_columns": [column for column in about["index_columns"] if column != found]}
    return value


def _shown(value: bytes) -> str:
    text = value.decode("utf-8", "replace")
    return repr(text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "...")
