"""The footers of files that are rewritten together."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from pqcache.errors import ParquetError, first_line
from pqcache.parquet.footer import footer, thrift
from pqcache.parquet.footer.alike_footers import AlikeFooters, FooterNumbers
from pqcache.parquet.footer.doubtful import (
    Int96Values,
    int96_leaves,
    int96_unit,
    int96_values,
    local_stored_bytes_metadata,
)
from pqcache.parquet.footer.footer_validation import check_footer
from pqcache.system.disk import check_regular

log = logging.getLogger("pqcache.parquet")

T = TypeVar("T")

_READ_BUFFER = 64 << 10  # per column; without one, pyarrow reads a column chunk whole
_FOOTERS_AT_ONCE, _FOOTERS_IN_TURN = 4, 8
_TOGETHER, _WORTH_A_LAYOUT, _LAYOUTS = 1024, 64, 4  # footers that are looked at together; layouts of one rewrite


@dataclass(frozen=True, kw_only=True)
class SourceFooter:
    """What the footer of a source file says.

    Attributes:
        rows: of the file.
        schema: one and the same object for neighbours with the same schema and key-values.
        key_values: the key-value metadata; one and the same object where ``schema`` is.
        int96: the unit in which INT96 time stamps are read.
        parsed: the footer as pyarrow has it, or its bytes, which are parsed when somebody asks for ``metadata``.
        known: the numbers in it, if they are known before.
        template: a file whose footer differs from this one in ``known`` and in statistics alone.
    """

    path: Path
    size: int
    rows: int
    schema: pa.Schema
    key_values: Mapping[bytes, bytes]
    elements: list[thrift.Struct]
    int96: str
    parsed: pq.FileMetaData | bytes
    known: FooterNumbers | None = None
    template: SourceFooter | None = None

    @cached_property
    def metadata(self) -> pq.FileMetaData:
        """The footer as pyarrow has it."""
        if isinstance(self.parsed, bytes):
            return _opened(self.path, self.parsed, self.int96).metadata
        return self.parsed

    @property
    def row_groups(self) -> list[tuple[int, int]]:
        """The rows and the bytes, not compressed, of each row group."""
        if self.known is not None:
            return list(zip(self.known.rows.tolist(), self.known.sizes.tolist(), strict=True))
        groups = map(self.metadata.row_group, range(self.metadata.num_row_groups))
        return [(group.num_rows, max(0, group.total_byte_size)) for group in groups]

    def chunks(self, groups: Sequence[int]) -> npt.NDArray[np.int64]:
        """Return `CHUNK_NUMBERS` of each leaf column of some row groups."""
        if self.known is not None:
            return self.known.chunks[list(groups)]
        found = [[_numbers(chunk) for chunk in chunks_of(self.metadata.row_group(number))] for number in groups]
        return np.array(found, np.int64)


def chunks_of(group: pq.RowGroupMetaData) -> list[pq.ColumnChunkMetaData]:
    """Return the column chunks of a row group."""
    return list(map(group.column, range(group.num_columns)))


def _numbers(chunk: pq.ColumnChunkMetaData) -> tuple[int, ...]:
    """Return `CHUNK_NUMBERS` of a column chunk."""
    return (
        chunk.num_values,
        chunk.total_uncompressed_size,
        chunk.total_compressed_size,
        chunk.data_page_offset,
        chunk.dictionary_page_offset or 0,
    )


class LazySequence(Sequence[T]):
    """What ``make`` makes of each source, when it is asked for: to parse a footer takes longer than all else."""

    def __init__(self, make: Callable[[SourceFooter], T], sources: Sequence[SourceFooter]) -> None:
        self._make, self._sources = make, sources

    def __len__(self) -> int:
        return len(self._sources)

    def __getitem__(self, number: Any) -> Any:
        return self._make(self._sources[number])


def open_parquet(path: Path, int96_unit: str = "ns", metadata: pq.FileMetaData | None = None) -> pq.ParquetFile:
    """Return ``path`` opened for reading in slices; ``metadata`` is its footer, if that was read before.

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
    """Return the error for a file that cannot be opened as Parquet."""
    return ParquetError(path, f"cannot be read as Parquet ({first_line(error)})", "fetch it again")


def read_source_footers(paths: Sequence[Path], int96: str | None = None) -> list[SourceFooter]:
    """Return the source files with INT96 time stamps in the unit ``int96``, by default one that loses nothing."""
    opened = _sources(paths, int96 or "us")
    if int96 is None and has_int96(opened):
        unit = int96_unit([(str(source.path), _int96_values(source)) for source in opened])
        if unit != "us":
            opened = _sources(paths, unit)
    return opened


def _sources(paths: Sequence[Path], unit: str) -> list[SourceFooter]:
    shares = [paths[first : first + _FOOTERS_IN_TURN] for first in range(0, len(paths), _FOOTERS_IN_TURN)]
    reader = _FooterReader(unit)
    found: list[SourceFooter] = []
    waiting: list[_FooterBytes] = []

    def ends(share: Sequence[Path]) -> list[_FooterBytes]:
        return [_FooterBytes(path, footer.read_local_tail(path).footer, path.stat().st_size) for path in share]

    # Several threads read; only one parses, since they would wait for one another.
    with ThreadPoolExecutor(_FOOTERS_AT_ONCE) as pool:
        for some in pool.map(ends, shares):
            waiting += some
            if len(waiting) >= _TOGETHER:
                found += reader.read(waiting)
                waiting = []
    return found + reader.read(waiting)


class _FooterBytes(NamedTuple):
    """A file, its footer's bytes and its size."""

    path: Path
    footer: bytes
    size: int


class _FooterReader:
    """Reads footers of the files of a directory; those that are alike many at a time."""

    def __init__(self, unit: str) -> None:
        self._unit = unit
        self._known: dict[bytes, list[thrift.Struct]] = {}
        self._layouts: list[tuple[AlikeFooters, SourceFooter]] = []
        self._tries = 0
        self._last: SourceFooter | None = None

    def read(self, ends: Sequence[_FooterBytes]) -> list[SourceFooter]:
        """Return the sources whose ends are ``ends``."""
        found: dict[int, SourceFooter] = {}
        waiting = list(range(len(ends)))
        for layout in self._layouts:
            waiting = self._alike(ends, waiting, layout, found)
        while len(waiting) >= _WORTH_A_LAYOUT and self._tries < _LAYOUTS:
            self._tries += 1
            source = found[waiting[0]] = self._one(ends[waiting[0]])
            data = ends[waiting.pop(0)].footer
            begin = next(len(start) for start, elements in self._known.items() if elements is source.elements)
            try:
                layout = AlikeFooters(data, begin, source.elements, str(source.path)), source
            except ValueError as error:
                log.debug("footers like that of %s are read one by one: %s", source.path, error)
                continue
            self._layouts.append(layout)
            waiting = self._alike(ends, waiting, layout, found)
        found |= {number: self._one(ends[number]) for number in waiting}
        return [found[number] for number in range(len(ends))]

    def _alike(
        self,
        ends: Sequence[_FooterBytes],
        waiting: Sequence[int],
        layout: tuple[AlikeFooters, SourceFooter],
        found: dict[int, SourceFooter],
    ) -> list[int]:
        """Add those of the ``waiting`` files that have a layout to ``found``; return the others."""
        alike, template = layout
        some = [ends[number] for number in waiting]
        left = []
        read = alike.read([end.footer for end in some], [end.size for end in some])
        for number, end, numbers in zip(waiting, some, read, strict=True):
            if numbers is None:
                left.append(number)
                continue
            found[number] = SourceFooter(
                path=end.path,
                size=end.size,
                rows=int(numbers.rows.sum()),
                schema=template.schema,
                key_values=template.key_values,
                elements=template.elements,
                int96=template.int96,
                parsed=end.footer,
                known=numbers,
                template=template,
            )
        return left

    def _one(self, end: _FooterBytes) -> SourceFooter:
        """Return a source; what it has in common with the one before is the same object, so that both are alike."""
        path, data, size = end
        elements = footer.elements_in(data, str(path), self._known)
        with _opened(path, data, self._unit) as file:
            check_footer(data, str(path), size)
            metadata = file.metadata
            before, key_values = self._last, metadata.metadata or {}
            if before is not None and before.elements is elements and before.key_values == key_values:
                schema, key_values = before.schema, before.key_values
            else:
                try:
                    schema = file.schema_arrow
                except pa.ArrowException as error:
                    raise ParquetError(path, f"has a schema that Arrow cannot hold ({first_line(error)})") from error
        self._last = SourceFooter(
            path=path,
            size=size,
            rows=metadata.num_rows,
            schema=schema,
            key_values=key_values,
            elements=elements,
            int96=self._unit,
            parsed=metadata,
        )
        return self._last


def _opened(path: Path, data: bytes, unit: str) -> pq.ParquetFile:
    """Return a file that is nothing but the footer ``data`` of ``path``."""
    end = footer.MAGIC + data + len(data).to_bytes(4, "little") + footer.MAGIC
    try:
        return pq.ParquetFile(pa.BufferReader(end), coerce_int96_timestamp_unit=unit)
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(path, error) from error


def one_of_each_schema(sources: Sequence[SourceFooter]) -> list[SourceFooter]:
    """Return the first source of each kind: those after it have the same schema and key-values."""
    found: dict[int, SourceFooter] = {}
    for source in sources:
        found.setdefault(id(source.schema), source)
    return list(found.values())


def has_int96(sources: Sequence[SourceFooter]) -> bool:
    """Return whether any file has a column of INT96 time stamps."""
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
