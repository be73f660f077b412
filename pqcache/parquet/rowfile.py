"""A Parquet file that grows by row groups that can be taken back, and gets its one footer at the end."""

from __future__ import annotations

import base64
import contextlib
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.types as pt

from pqcache.errors import PqcacheError
from pqcache.parquet import footer
from pqcache.parquet.encodings import Encodings
from pqcache.parquet.keyvalues import RangeIndex, with_range
from pqcache.parquet.pageindex import PageIndex, placed, taken

ARROW_SCHEMA = b"ARROW:schema"
_INDEX_BITS = {pa.int8(): 7, pa.uint8(): 8, pa.int16(): 15, pa.uint16(): 16}


@dataclass(frozen=True)
class Layout:
    """What every output file's footer says.

    Attributes:
        working: the schema that data arrives in.
        declared: the schema readers are to see, metadata included.
        elements: the source's schema elements, to be kept where they describe the data; or None.
        keyvalues: the key-value metadata of the footers.
        described: the types in the footer, where time stamps arrive as plain numbers; else None.
        index: the pandas RangeIndex of all rows.
    """

    working: pa.Schema
    declared: pa.Schema
    elements: list[footer.Struct] | None
    keyvalues: Mapping[bytes, bytes | None]
    described: pa.Schema | None = None
    index: RangeIndex | None = None


@dataclass(frozen=True)
class Form:
    """What the row groups of a `Layout` look like in a footer.

    Attributes:
        schema: the schema elements of the footer.
        paths: path_in_schema of each leaf.
        tops: the top-level column of each leaf.
    """

    template: footer.Struct
    schema: list[footer.Struct]
    paths: list[tuple[bytes, ...]]
    tops: npt.NDArray[np.int64]


@dataclass(frozen=True)
class Output:
    """One output file."""

    path: Path
    rows: int
    row_groups: int
    linked: bool = False


@dataclass(frozen=True)
class Encoded:
    """One row group as it lies in the output, its offsets still counted from ``start``."""

    fields: footer.Struct
    template: footer.Struct
    columns: list[int]
    start: int
    size: int
    index: PageIndex | None = None


def form_of(layout: Layout, plain: Encodings) -> Form:
    """Return the form of footers under ``layout``: the source's own schema where that describes the data."""
    template = _footer_of(layout.working, plain)
    schema = written = footer.schema_of(template, "the new schema")
    if layout.described is not None:
        described = footer.schema_of(_footer_of(layout.described, replace(plain, int96=False)), "the new schema")
        schema = written = footer.with_names_of(written, described, "the new schema") or written
    if layout.elements is not None:
        schema = footer.with_names_of(written, layout.elements, "the source's schema") or written
    leaves = footer.leaves_of(schema, "the new schema")
    tops = np.array([leaf.column for leaf in footer.leaves_of(written, "the new schema")], np.int64)
    return Form(template, schema, [leaf.path for leaf in leaves], tops)


def _footer_of(schema: pa.Schema, plain: Encodings) -> footer.Struct:
    sink = pa.BufferOutputStream()
    plain.open(sink, schema).close()
    data = sink.getvalue().to_pybytes()
    return footer.decode(data[-8 - int.from_bytes(data[-8:-4], "little") : -8], "the new schema")


def elements_of(schema: pa.Schema) -> list[footer.Struct]:
    """Return the Parquet schema elements that pyarrow writes for ``schema``."""
    return footer.schema_of(_footer_of(schema, Encodings()), "the new schema")


def widened(layout: Layout, dictionaries: Mapping[str, int]) -> Layout:
    """Return ``layout`` with dictionary indices declared wide enough for ``dictionaries``' sizes.

    A reader restores the index type that ARROW:schema names and fails where a row group's dictionary has
    outgrown it, which merging files can cause.
    """
    fields = []
    for column in layout.declared:
        kind = column.type
        if pt.is_dictionary(kind) and dictionaries.get(column.name, 0) > 1 << _INDEX_BITS.get(kind.index_type, 62):
            kind = pa.dictionary(pa.int32(), kind.value_type, kind.ordered)
        fields.append(column.with_type(kind))
    schema = pa.schema(fields, metadata=layout.declared.metadata)
    if ARROW_SCHEMA not in layout.keyvalues or schema.equals(layout.declared):
        return layout
    return replace(layout, declared=schema, keyvalues={**layout.keyvalues, ARROW_SCHEMA: arrow_schema(schema)})


def keyvalues_of(layout: Layout, first: int, rows: int) -> Mapping[bytes, bytes | None]:
    """Return the key-values of an output that holds ``rows`` rows from ``first`` on."""
    found = with_range(layout.keyvalues, layout.index, first, rows)
    known = layout.declared.metadata or {}
    metadata = with_range(known, layout.index, first, rows)
    if metadata is known or ARROW_SCHEMA not in found:
        return found
    return {**found, ARROW_SCHEMA: arrow_schema(layout.declared.with_metadata(dict(metadata)))}


def arrow_schema(schema: pa.Schema) -> bytes:
    """Return ``schema`` as it is stored in a footer under ``ARROW:schema``."""
    return base64.b64encode(schema.serialize().to_pybytes())


class _Sink:
    """What a ParquetWriter writes to: pages go to the file, all that follows them is kept in ``tail``."""

    closed = False

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self.size = 0
        self.tail: bytearray | None = None

    def write(self, data: bytes) -> int:
        if self.tail is not None:
            self.tail += data
        else:
            magic = max(0, min(len(footer.MAGIC) - self.size, len(data)))  # the file has its own
            self.file.write(memoryview(data)[magic:])
            self.size += len(data)
        return len(data)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


@dataclass
class RowGroupFile:
    """One output file that is being written."""

    path: Path
    form: Form
    disk: Executor
    position: int = len(footer.MAGIC)
    rows: int = 0
    groups: list[footer.Struct | bytes] = field(default_factory=list)
    indexes: dict[int, PageIndex] = field(default_factory=dict)
    template: footer.Struct | None = None
    file: IO[bytes] | None = None
    syncing: Future[None] | None = None

    def open(self) -> IO[bytes]:
        """Return the file, open at its end."""
        if self.file is None:
            self.file = self.path.open("r+b" if self.groups else "xb", buffering=1 << 20)
            if not self.groups:
                self.file.write(footer.MAGIC)
            self.file.seek(0, os.SEEK_END)
        return self.file

    def append(self, table: pa.Table, encodings: Encodings) -> Encoded:
        """Write ``table`` as one row group; `keep` or `undo` must follow."""
        name = str(self.path)
        with told(self.path):
            sink = _Sink(self.open())
            writer = encodings.open(sink, table.schema, page_index=True)
            try:
                writer.write_table(table, row_group_size=table.num_rows)
            finally:
                sink.tail = bytearray()  # also after an error: the writer still wants to end its file
                writer.close()
        end = len(sink.tail) - 8
        begin = end - int.from_bytes(sink.tail[end : end + 4], "little")
        template = footer.decode(bytes(sink.tail[begin:end]), name)
        group = footer.row_groups_of(template, name)[0]
        columns = footer.compressed_sizes(group, name)
        size = max(sum(columns), sink.size - len(footer.MAGIC))
        delta = self.position - len(footer.MAGIC)
        index = taken(group, bytes(sink.tail[:begin]), sink.size, delta, name)
        return Encoded(group, template, columns, self.position, size, index)

    def skip(self, count: int) -> None:
        """Leave a hole of ``count`` bytes, which no reader looks at, before the next row group."""
        with told(self.path):
            file = self.open()
            self.position += count
            file.truncate(self.position)
            file.seek(self.position)

    def undo(self, encoded: Encoded) -> None:
        """Take the row group just written off again."""
        with told(self.path):
            file = self.open()
            file.seek(encoded.start)
            file.truncate()

    def keep(self, encoded: Encoded, rows: int) -> None:
        """Make the row group just written part of the file, and have the disk begin with it."""
        delta = encoded.start - len(footer.MAGIC)
        group = footer.moved(encoded.fields, delta, len(self.groups), self.form.paths, str(self.path))
        if encoded.index is not None:
            self.indexes[len(self.groups)] = encoded.index
        self.groups.append(footer.encode(group) if encoded.index is None else group)
        self.template = encoded.template
        self.rows += rows
        with told(self.path):
            file = self.open()
            file.flush()
            self.position = file.tell()
            if self.syncing is None or self.syncing.done():
                self._synced()
                self.syncing = self.disk.submit(os.fsync, file.fileno())

    def _synced(self) -> None:
        if self.syncing is not None:
            self.syncing.result()
            self.syncing = None

    def pause(self) -> None:
        """Bring what is written to disk and close the file, until `finish`."""
        with told(self.path):
            file = self.open()
            file.flush()
            self._synced()
            os.fsync(file.fileno())
            file.close()
        self.file = None

    def finish(self, keyvalues: Mapping[bytes, bytes | None]) -> Output:
        """Write the footer, bring the file to disk and return what it holds."""
        template = self.form.template if self.template is None else self.template
        named = {number: self.groups[number] for number in self.indexes}
        indexes = placed(
            {n: group for n, group in named.items() if isinstance(group, dict)}, self.indexes, self.position
        )
        end = footer.assembled(template, self.form.schema, self.groups, self.rows, keyvalues)
        with told(self.path):
            self.open().write(indexes)
            self.open().write(footer.frame(end))
        self.pause()
        return Output(self.path, self.rows, len(self.groups))

    def abandon(self) -> None:
        """Close and remove the file."""
        if self.syncing is not None:
            self.syncing.exception()  # waits
        if self.file is not None:
            with contextlib.suppress(OSError):  # what is buffered may not fit on the disk
                self.file.close()
            self.file = None
        self.path.unlink(missing_ok=True)


@contextlib.contextmanager
def told(path: Path) -> Iterator[None]:
    """Turn an OSError into a `PqcacheError` that names ``path`` and says what to do."""
    try:
        yield
    except OSError as error:
        raise PqcacheError(
            f"{path}: cannot be written: {error.strerror or error}; free space or fix the permissions, then run again"
        ) from error
