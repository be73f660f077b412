"""Parquet files that grow row group by row group and get one footer at the end."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

from pqcache.errors import PqcacheError
from pqcache.parquet import footer, thrift
from pqcache.parquet.rewrite.encode import FooterSchema, RowGroup, orders_of
from pqcache.parquet.rewrite.encodings import Encodings
from pqcache.parquet.rewrite.recipe import RewriteOptions
from pqcache.parquet.rewrite.sources import RangeIndex, with_range
from pqcache.parquet.schema import ARROW_SCHEMA, encode_schema
from pqcache.parquet.thrift import COLUMN_INDEX, OFFSET_INDEX
from pqcache.system.disk import DIRECT_IO_BLOCK, Checksum, checksum_text, enable_direct_io, new_checksum, write_at

_MAX_HOLE = 0.05  # of a block
_INDEX_BITS = {pa.int8(): 7, pa.uint8(): 8, pa.int16(): 15, pa.uint16(): 16}


@dataclass(frozen=True, kw_only=True)
class OutputSchema:
    """What all output footers have in common.

    Attributes:
        working: the schema that data arrives in.
        declared: the schema that readers see, metadata included.
        elements: the source's schema elements, which are kept if they describe the data.
        keyvalues: the key-value metadata of the footers.
        index: the pandas RangeIndex of all rows.
    """

    working: pa.Schema
    declared: pa.Schema
    elements: list[thrift.Struct] | None
    keyvalues: Mapping[bytes, bytes | None]
    index: RangeIndex | None = None


@dataclass(frozen=True, kw_only=True)
class OutputFile:
    """An output file; a linked one comes without a checksum."""

    path: Path
    rows: int
    row_groups: int
    linked: bool = False
    checksum: str = ""


def footer_schema_of(output_schema: OutputSchema, plain: Encodings) -> FooterSchema:
    """Keep the source's schema elements if they describe the data."""
    template = _footer_of(output_schema.working, plain)
    schema = written = footer.schema_of(template, "the new schema")
    if output_schema.elements is not None:
        schema = footer.with_names_of(written, output_schema.elements, "the source's schema") or written
    leaves = footer.leaves_of(written, "the new schema")
    return FooterSchema(
        template=template,
        schema=schema,
        paths=[leaf.path for leaf in footer.leaves_of(schema, "the new schema")],
        names=[b".".join(leaf.path).decode("utf-8", "replace") for leaf in leaves],
        tops=np.array([leaf.column for leaf in leaves], np.int64),
        orders=orders_of(template, "the new schema"),
    )


def _footer_of(schema: pa.Schema, plain: Encodings) -> thrift.Struct:
    sink = pa.BufferOutputStream()
    plain.open(sink, schema).close()
    data = sink.getvalue().to_pybytes()
    return thrift.decode(data[-8 - int.from_bytes(data[-8:-4], "little") : -8], "the new schema")


def elements_of(schema: pa.Schema) -> list[thrift.Struct]:
    return footer.schema_of(_footer_of(schema, Encodings()), "the new schema")


def widen_dictionary_indices(output_schema: OutputSchema, dictionaries: Mapping[str, int]) -> OutputSchema:
    """Declare dictionary indices wide enough for the sizes of ``dictionaries``.

    Readers restore the index type in ARROW:schema, and fail if the dictionary of a row group outgrew it, as happens
    when files are merged.
    """
    fields = []
    for column in output_schema.declared:
        kind = column.type
        if pt.is_dictionary(kind) and dictionaries.get(column.name, 0) > 1 << _INDEX_BITS.get(kind.index_type, 62):
            kind = pa.dictionary(pa.int32(), kind.value_type, kind.ordered)
        fields.append(column.with_type(kind))
    schema = pa.schema(fields, metadata=output_schema.declared.metadata)
    if ARROW_SCHEMA not in output_schema.keyvalues or schema.equals(output_schema.declared):
        return output_schema
    return replace(
        output_schema, declared=schema, keyvalues={**output_schema.keyvalues, ARROW_SCHEMA: encode_schema(schema)}
    )


def output_keyvalues(output_schema: OutputSchema, first: int, rows: int) -> Mapping[bytes, bytes | None]:
    found = with_range(output_schema.keyvalues, output_schema.index, first, rows)
    known = output_schema.declared.metadata or {}
    metadata = with_range(known, output_schema.index, first, rows)
    if metadata is known or ARROW_SCHEMA not in found:
        return found
    return {**found, ARROW_SCHEMA: encode_schema(output_schema.declared.with_metadata(dict(metadata)))}


@dataclass(kw_only=True)
class RowGroupFile:
    """An output file being written; ``use_page_cache`` says that it will be read next."""

    path: Path
    footer_schema: FooterSchema
    disk: Executor
    use_page_cache: bool = False
    position: int = len(footer.MAGIC)
    rows: int = 0
    groups: list[thrift.Struct | bytes] = field(default_factory=list)
    indexed: list[tuple[thrift.Struct, PageIndex]] = field(default_factory=list)
    template: thrift.Struct | None = None
    checksum: Checksum = field(default_factory=new_checksum)
    file: DirectIoFile | None = None
    writing: Future[None] | None = None

    def open(self) -> DirectIoFile:
        """Wait for pending writes and return the file, open at its end."""
        if self.writing is not None:
            self.writing.result()
            self.writing = None
        if self.file is None:
            self.file = DirectIoFile(self.path, self.disk, self.checksum, self.use_page_cache, fresh=not self.groups)
            if not self.groups:
                self.file.write(footer.MAGIC)
        return self.file

    def skip(self, count: int) -> None:
        """Leave a hole of ``count`` bytes, which readers ignore, before the next row group."""
        with write_errors(self.path):
            self.open().skip(count)
            self.position += count

    def append(self, found: RowGroup) -> None:
        """Write a row group in the background, while the caller makes the next one."""
        delta = self.position - len(footer.MAGIC)
        with write_errors(self.path):
            file = self.open()  # waits, so at most one row group is held
            self.writing = self.disk.submit(file.write_all, found.data)
        self.position += found.size
        group = footer.shift_row_group(found.fields, delta, len(self.groups), self.footer_schema.paths, str(self.path))
        index = shift_page_index(found.offsets, found.columns, delta)
        if index is not None:
            self.indexed.append((group, index))
        self.groups.append(thrift.encode(group) if index is None else group)
        self.rows += found.rows

    def pause(self) -> str:
        """Write, fsync and close the file until `finish`; return the checksum."""
        with write_errors(self.path):
            file, self.file = self.open(), None
            return file.close()

    def finish(self, keyvalues: Mapping[bytes, bytes | None]) -> OutputFile:
        """Write the footer and fsync."""
        template = self.footer_schema.template if self.template is None else self.template
        indexes = place_page_indexes(self.indexed, self.position)
        end = footer.make_footer(template, self.footer_schema.schema, self.groups, self.rows, keyvalues)
        with write_errors(self.path):
            self.open().write(indexes)
            self.open().write(footer.footer_and_magic(end))
        return OutputFile(path=self.path, rows=self.rows, row_groups=len(self.groups), checksum=self.pause())

    def abandon(self) -> None:
        if self.writing is not None:
            self.writing.exception()  # waits
        if self.file is not None:
            self.file.abandon()
            self.file = None
        self.path.unlink(missing_ok=True)


def straddles(start: int, size: int, block_size: int | None) -> bool:
    """Whether ``size`` bytes from ``start`` lie in more than one block."""
    return block_size is not None and start // block_size != (start + size - 1) // block_size


@dataclass(kw_only=True)
class RowGroupFiles:
    """Writes files ``part-<number>.parquet`` of up to ``max_file`` bytes in ``target``, one after the other."""

    target: Path
    footer_schema: FooterSchema
    disk: Executor
    number: int
    options: RewriteOptions
    max_file: int
    use_page_cache: bool = False
    files: list[RowGroupFile] = field(default_factory=list)

    def append(self, group: RowGroup) -> None:
        """Append to the last file, or to a new one if that is full or would have a large hole before a block."""
        block = self.options.block_size
        file = self.files[-1] if self.files else None
        if file is not None:
            hole = -file.position % block if block and straddles(file.position, group.size, block) else 0
            if file.position + self.options.limit > self.max_file or (block and hole > _MAX_HOLE * block):
                file.pause()
                file = None
        file = file or self._begun()
        if block and group.size <= block and straddles(file.position, group.size, block):
            file.skip(-file.position % block)
        file.append(group)

    def _begun(self) -> RowGroupFile:
        path = self.target / f"part-{self.number + len(self.files):05d}.parquet"
        self.files.append(
            RowGroupFile(
                path=path, footer_schema=self.footer_schema, disk=self.disk, use_page_cache=self.use_page_cache
            )
        )
        return self.files[-1]

    def finish(self, output_schema: OutputSchema) -> tuple[OutputFile, ...]:
        if not self.files:
            self._begun()
        first, outputs = 0, []
        for file in self.files:
            outputs.append(file.finish(output_keyvalues(output_schema, first, file.rows)))
            first += file.rows
        return tuple(outputs)

    def abandon(self) -> None:
        for file in self.files:
            file.abandon()


@contextlib.contextmanager
def write_errors(path: Path) -> Iterator[None]:
    """Turn an OSError into a `PqcacheError` about ``path``."""
    try:
        yield
    except OSError as error:
        raise PqcacheError(
            path,
            f"cannot be written: {error.strerror or error}",
            "free space or fix the permissions, then run again",
        ) from error


# ---- Page indexes, moved with their row group to the end of the file
#
# ``ColumnIndex`` holds the minimum and maximum of each page, ``OffsetIndex`` its place and its first row; see
# parquet.thrift in https://github.com/apache/parquet-format. Only the latter changes when a row group moves.


@dataclass(frozen=True)
class PageIndex:
    """Encoded page indexes of a row group, by position of the column chunk."""

    columns: Mapping[int, bytes]
    offsets: Mapping[int, bytes]


def shift_page_index(
    offsets: Mapping[int, thrift.Struct], columns: Mapping[int, bytes], delta: int
) -> PageIndex | None:
    """Indexes of a row group whose pages move by ``delta`` bytes; None if it has none."""
    moved = {}
    for number, index in offsets.items():
        pages = [{**page, 1: (thrift.I64, page[1][1] + delta)} for page in index[1][1].values]
        moved[number] = thrift.encode({**index, 1: (thrift.LIST, thrift.Items(thrift.STRUCT, pages))})
    return PageIndex(columns, moved) if moved else None


def place_page_indexes(indexed: Iterable[tuple[thrift.Struct, PageIndex]], position: int) -> bytes:
    """Lay the indexes of row groups out from ``position`` on, and point the row groups to them."""
    out = bytearray()
    for place in (COLUMN_INDEX, OFFSET_INDEX):
        for group, index in indexed:
            found = index.columns if place is COLUMN_INDEX else index.offsets
            chunks = group[1][1].values
            for column, data in found.items():
                more = {place[0]: (thrift.I64, position + len(out)), place[1]: (thrift.I32, len(data))}
                chunks[column] = dict(sorted({**chunks[column], **more}.items()))
                out += data
    return bytes(out)


# ---- A file written at its end, in complete blocks, with direct I/O

WRITERS = 3  # threads: one to fill a buffer, and one for each buffer being written
_BUFFER = 2 << 20  # bytes
_LARGE, _TOGETHER = 64 << 10, 1 << 20


class DirectIoFile:
    """A file that grows at its end, written by threads of ``disk``; a new one if ``fresh``, else one closed before.

    It is written past the page cache, unless ``use_page_cache`` or the file system lacks direct I/O. ``checksum``
    covers the complete blocks so far. For one thread at a time; every method may raise OSError.
    """

    def __init__(self, path: Path, disk: Executor, checksum: Checksum, use_page_cache: bool, fresh: bool) -> None:
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT | os.O_EXCL if fresh else 0)
        self._file = os.open(path, flags, 0o666)
        try:
            self._buffers = deque(
                mmap.mmap(-1, _BUFFER) for _ in range(WRITERS)
            )  # mapped, so that they begin at a page
            size = os.fstat(self._file).st_size
            self._at = size // DIRECT_IO_BLOCK * DIRECT_IO_BLOCK  # where the first buffer goes
            self._have = size - self._at
            self._buffers[0][: self._have] = os.pread(self._file, self._have, self._at)
            self._direct = not use_page_cache and enable_direct_io(self._file)
        except BaseException:
            os.close(self._file)
            raise
        self._disk, self._checksum = disk, checksum
        self._writing: deque[Future[None]] = deque()

    def write_all(self, parts: Iterable[Any]) -> None:
        """Write ``parts``, the small ones together, since a write takes longer than a copy."""
        waiting: list[Any] = []
        size = 0
        for part in parts:
            if len(part) >= _LARGE or size >= _TOGETHER:
                self.write(b"".join(waiting))
                waiting, size = [], 0
            if len(part) >= _LARGE:
                self.write(part)
            else:
                waiting.append(part)
                size += len(part)
        self.write(b"".join(waiting))

    def write(self, data: Any) -> None:
        rest = np.frombuffer(data, np.uint8)  # copied as an array, so that other threads run meanwhile
        while len(rest):
            count = min(_BUFFER - self._have, len(rest))
            np.frombuffer(self._buffers[0], np.uint8, count, self._have)[:] = rest[:count]
            self._have, rest = self._have + count, rest[count:]
            if self._have == _BUFFER:
                self._send()

    def skip(self, count: int) -> None:
        """Leave ``count`` bytes out, which read as zeros; complete blocks of them take no disk space."""
        first = min(count, -self._have % DIRECT_IO_BLOCK)
        self.write(bytes(first))
        if blocks := (count - first) // DIRECT_IO_BLOCK * DIRECT_IO_BLOCK:
            self._send()
            self._checksum.update(bytes(blocks))
            self._at += blocks
        self.write(bytes(count - first - blocks))

    def close(self) -> str:
        """Write and fsync everything; return the checksum."""
        try:
            self._wait(0)
            rest = memoryview(self._buffers[0])[: self._have]
            write_at(self._file, rest, self._at, self._direct)
            os.fsync(self._file)
            final = self._checksum.copy()
            self._checksum.update(rest[: self._have // DIRECT_IO_BLOCK * DIRECT_IO_BLOCK])
            final.update(rest)
            return checksum_text(final)
        finally:
            self.abandon()

    def abandon(self) -> None:
        while self._writing:
            self._writing.popleft().exception()  # waits
        os.close(self._file)

    def _send(self) -> None:
        """Write the first buffer, of complete blocks, in the background, and go on with the next one."""
        data = memoryview(self._buffers[0])[: self._have]
        self._writing.append(self._disk.submit(self._put, data, self._at))
        self._checksum.update(data)  # while the processor's cache has it
        self._wait(WRITERS - 1)
        self._buffers.rotate(-1)
        self._at, self._have = self._at + self._have, 0

    def _put(self, data: memoryview, at: int) -> None:
        write_at(self._file, data, at, self._direct)
        if not self._direct:
            os.fdatasync(self._file)  # so that the disk works while others encode, and little is left at the end

    def _wait(self, left: int) -> None:
        while len(self._writing) > left:
            self._writing.popleft().result()
