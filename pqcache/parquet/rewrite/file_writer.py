"""A Parquet file that grows row group by row group, and gets its one footer at the end."""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.types as pt

from pqcache.errors import PqcacheError
from pqcache.parquet.encodings import Encodings
from pqcache.parquet.footer import footer, thrift
from pqcache.parquet.key_values import RangeIndex, with_range
from pqcache.parquet.page_index import PageIndex, place_page_indexes, shift_page_index
from pqcache.parquet.rewrite.concat_chunks import Order, RowGroup, orders_of
from pqcache.parquet.rewrite.direct_io_file import DirectIoFile
from pqcache.system.checksum import Checksum, new_checksum

ARROW_SCHEMA = b"ARROW:schema"
_MAX_HOLE = 0.05  # of a block
_INDEX_BITS = {pa.int8(): 7, pa.uint8(): 8, pa.int16(): 15, pa.uint16(): 16}


@dataclass(frozen=True, kw_only=True)
class OutputSchema:
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
    elements: list[thrift.Struct] | None
    keyvalues: Mapping[bytes, bytes | None]
    described: pa.Schema | None = None
    index: RangeIndex | None = None


@dataclass(frozen=True, kw_only=True)
class FooterSchema:
    """What the row groups of an `OutputSchema` look like in a footer.

    Attributes:
        schema: the schema elements of the footer.
        paths: path_in_schema of each leaf.
        tops: the top-level column of each leaf.
        orders: how minima and maxima of each leaf compare.
    """

    template: thrift.Struct
    schema: list[thrift.Struct]
    paths: list[tuple[bytes, ...]]
    tops: npt.NDArray[np.int64]
    orders: list[Order]


@dataclass(frozen=True, kw_only=True)
class OutputFile:
    """One output file; one that is linked comes without a checksum."""

    path: Path
    rows: int
    row_groups: int
    linked: bool = False
    checksum: str = ""


def footer_schema_of(output_schema: OutputSchema, plain: Encodings) -> FooterSchema:
    """Return what row groups look like in a footer: with the source's own schema where that describes the data."""
    template = _footer_of(output_schema.working, plain)
    schema = written = footer.schema_of(template, "the new schema")
    if output_schema.described is not None:
        described = footer.schema_of(_footer_of(output_schema.described, replace(plain, int96=False)), "the new schema")
        schema = written = footer.with_names_of(written, described, "the new schema") or written
    if output_schema.elements is not None:
        schema = footer.with_names_of(written, output_schema.elements, "the source's schema") or written
    leaves = footer.leaves_of(schema, "the new schema")
    tops = np.array([leaf.column for leaf in footer.leaves_of(written, "the new schema")], np.int64)
    return FooterSchema(
        template=template,
        schema=schema,
        paths=[leaf.path for leaf in leaves],
        tops=tops,
        orders=orders_of(template, "the new schema"),
    )


def _footer_of(schema: pa.Schema, plain: Encodings) -> thrift.Struct:
    sink = pa.BufferOutputStream()
    plain.open(sink, schema).close()
    data = sink.getvalue().to_pybytes()
    return thrift.decode(data[-8 - int.from_bytes(data[-8:-4], "little") : -8], "the new schema")


def elements_of(schema: pa.Schema) -> list[thrift.Struct]:
    """Return the Parquet schema elements that pyarrow writes for ``schema``."""
    return footer.schema_of(_footer_of(schema, Encodings()), "the new schema")


def widen_dictionary_indices(output_schema: OutputSchema, dictionaries: Mapping[str, int]) -> OutputSchema:
    """Return ``output_schema`` with dictionary indices declared wide enough for ``dictionaries``' sizes.

    A reader restores the index type that ARROW:schema names and fails where a row group's dictionary has
    outgrown it, which merging files can cause.
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
        output_schema, declared=schema, keyvalues={**output_schema.keyvalues, ARROW_SCHEMA: arrow_schema(schema)}
    )


def output_keyvalues(output_schema: OutputSchema, first: int, rows: int) -> Mapping[bytes, bytes | None]:
    """Return the key-values of an output that holds ``rows`` rows from ``first`` on."""
    found = with_range(output_schema.keyvalues, output_schema.index, first, rows)
    known = output_schema.declared.metadata or {}
    metadata = with_range(known, output_schema.index, first, rows)
    if metadata is known or ARROW_SCHEMA not in found:
        return found
    return {**found, ARROW_SCHEMA: arrow_schema(output_schema.declared.with_metadata(dict(metadata)))}


def arrow_schema(schema: pa.Schema) -> bytes:
    """Return ``schema`` as it is stored in a footer under ``ARROW:schema``."""
    return base64.b64encode(schema.serialize().to_pybytes())


@dataclass(kw_only=True)
class RowGroupFile:
    """One output file that is being written; ``use_page_cache`` says that it is read next."""

    path: Path
    footer_schema: FooterSchema
    disk: Executor
    use_page_cache: bool = False
    position: int = len(footer.MAGIC)
    rows: int = 0
    groups: list[thrift.Struct | bytes] = field(default_factory=list)
    indexes: dict[int, PageIndex] = field(default_factory=dict)
    template: thrift.Struct | None = None
    checksum: Checksum = field(default_factory=new_checksum)
    file: DirectIoFile | None = None
    writing: Future[None] | None = None

    def open(self) -> DirectIoFile:
        """Return the file, open at its end, when everything appended before is written."""
        if self.writing is not None:
            self.writing.result()
            self.writing = None
        if self.file is None:
            self.file = DirectIoFile(self.path, self.disk, self.checksum, self.use_page_cache, fresh=not self.groups)
            if not self.groups:
                self.file.write(footer.MAGIC)
        return self.file

    def skip(self, count: int) -> None:
        """Leave a hole of ``count`` bytes, which no reader looks at, before the next row group."""
        with write_errors(self.path):
            self.open().skip(count)
            self.position += count

    def append(self, found: RowGroup) -> None:
        """Have a row group written at the end of the file, while the caller makes the next one."""
        delta = self.position - len(footer.MAGIC)
        with write_errors(self.path):
            file = self.open()  # so one row group at most waits in memory
            self.writing = self.disk.submit(file.write_all, found.data)
        self.position += found.size
        group = footer.shift_row_group(found.fields, delta, len(self.groups), self.footer_schema.paths, str(self.path))
        index = shift_page_index(found.offsets, found.columns, delta)
        if index is not None:
            self.indexes[len(self.groups)] = index
        self.groups.append(thrift.encode(group) if index is None else group)
        self.rows += found.rows

    def pause(self) -> str:
        """Write, fsync and close the file, until `finish`; return the checksum."""
        with write_errors(self.path):
            file, self.file = self.open(), None
            return file.close()

    def finish(self, keyvalues: Mapping[bytes, bytes | None]) -> OutputFile:
        """Write the footer, fsync the file and return what it holds."""
        template = self.footer_schema.template if self.template is None else self.template
        named = {number: self.groups[number] for number in self.indexes}
        indexes = place_page_indexes(
            {n: group for n, group in named.items() if isinstance(group, dict)}, self.indexes, self.position
        )
        end = footer.make_footer(template, self.footer_schema.schema, self.groups, self.rows, keyvalues)
        with write_errors(self.path):
            self.open().write(indexes)
            self.open().write(footer.footer_and_magic(end))
        return OutputFile(path=self.path, rows=self.rows, row_groups=len(self.groups), checksum=self.pause())

    def abandon(self) -> None:
        """Close and remove the file."""
        if self.writing is not None:
            self.writing.exception()  # waits
        if self.file is not None:
            self.file.abandon()
            self.file = None
        self.path.unlink(missing_ok=True)


def straddles(start: int, size: int, block_size: int | None) -> bool:
    """Return whether ``size`` bytes from ``start`` lie in more than one block."""
    return block_size is not None and start // block_size != (start + size - 1) // block_size


@dataclass(kw_only=True)
class RowGroupFiles:
    """The files ``part-<number>.parquet`` in ``target``, one after the other: a new one where row groups do not go on.

    ``limit`` is what a row group may take, ``max_file`` what a file should. ``block_size`` and ``use_page_cache`` are
    as in the writer's settings.
    """

    target: Path
    footer_schema: FooterSchema
    disk: Executor
    number: int
    limit: int
    max_file: int
    block_size: int | None = None
    use_page_cache: bool = False
    files: list[RowGroupFile] = field(default_factory=list)

    def append(self, group: RowGroup) -> None:
        """Append a row group to the last file, or to a new one where that is full or a block would be left empty."""
        block = self.block_size
        file = self.files[-1] if self.files else None
        if file is not None:
            hole = -file.position % block if block and straddles(file.position, group.size, block) else 0
            if file.position + self.limit > self.max_file or (block and hole > _MAX_HOLE * block):
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
        """Write the footers, fsync everything, and return the files."""
        if not self.files:
            self._begun()
        first, outputs = 0, []
        for file in self.files:
            outputs.append(file.finish(output_keyvalues(output_schema, first, file.rows)))
            first += file.rows
        return tuple(outputs)

    def abandon(self) -> None:
        """Close and remove all files."""
        for file in self.files:
            file.abandon()


@contextlib.contextmanager
def write_errors(path: Path) -> Iterator[None]:
    """Turn an OSError into a `PqcacheError` that names ``path`` and says what to do."""
    try:
        yield
    except OSError as error:
        raise PqcacheError(
            path,
            f"cannot be written: {error.strerror or error}",
            "free space or fix the permissions, then run again",
        ) from error
