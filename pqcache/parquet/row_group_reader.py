"""Reads row groups of local files, or pieces of them, as Arrow arrays.

Parquet readers decode a column chunk from its first page. An offset index says which row each page begins with, so the
pages of a piece and the chunk's dictionary can be put together in memory as a file of their own, which is decoded like
any other. Every leaf of a nested column has pages of its own: a piece begins and ends where pages of all of them begin.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from pqcache.errors import MALFORMED, ParquetError, first_line, open_error
from pqcache.parquet import footer, thrift
from pqcache.parquet.arrow import is_text, numpy_dtype, top_level_names
from pqcache.parquet.fast_decode import UNREADABLE, Leaf, leaf_of, pays, read_chunk, view_type
from pqcache.parquet.misread import check_read_right, doubtful_columns
from pqcache.parquet.pages import IN_METADATA, NONE, Bytes, File, MoreValues, NotRead, memory, pages_in, read_into
from pqcache.parquet.schema import ARROW_SCHEMA, encode_schema
from pqcache.parquet.statistics import first_page, stated_nulls
from pqcache.parquet.thrift import (
    BINARY,
    I32,
    I64,
    LIST,
    STRUCT,
    Items,
    Struct,
    inside_each,
    key,
    number_at,
    walk_struct,
)
from pqcache.parquet.validation import check_footer
from pqcache.system.disk import check_regular, open_regular

_BUFFER = 1 << 16  # bytes that pyarrow reads at a time, few enough for the processor's cache
_BEFORE_TEXT = 4  # bytes of the length before a text outside a dictionary
_CODED = {"PLAIN", "PLAIN_DICTIONARY", "RLE_DICTIONARY", "RLE", "BIT_PACKED"}
_MOST_LOCATED = 4096  # column chunks whose pages are remembered
_EXCESS = 32 << 20  # bytes of pages beyond the footer's count, as some writers miscount
_DAMAGED = "the file is damaged or was replaced: write it again"


class _Part(NamedTuple):
    """Rows ``begin`` to ``end`` of a column: for each leaf, where its pages lie and which of them are needed."""

    begin: int
    end: int
    leaves: list[tuple[int, PageLocations, range]]


class RowGroupFile:
    """Reads row groups of a local file that never changes, on any thread and in forks.

    Raises ParquetError, which names file and row group, if the file is damaged or gone.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._errors(None):
            check_regular(path)
            self._footer()  # checked first: pyarrow aborts the process on some of them
            with self._open(path, None) as file:
                self.metadata: pq.FileMetaData = file.metadata
                self.schema: pa.Schema = file.schema_arrow
        self._leaves: dict[str, list[int]] = {}  # by column name
        for number, name in enumerate(top_level_names(self.metadata, self.schema)):
            self._leaves.setdefault(name, []).append(number)
        schema = self.metadata.schema
        self._alone: dict[str, Leaf] = {}  # columns that may be decoded without pyarrow
        for field in self.schema:
            numbers = self._leaves.get(field.name, [])
            leaf = leaf_of(schema.column(numbers[0]), field) if len(numbers) == 1 else None
            if leaf is not None:
                self._alone[field.name] = leaf
        self._read_right: set[tuple[int, str]] = set()
        self._right_size: set[tuple[int, int]] = set()  # chunks whose page headers were compared with the footer
        self._located: dict[tuple[int, int], PageLocations] = {}

    def read_rows(
        self,
        row_group: int,
        columns: Sequence[str],
        low: int = 0,
        high: int | None = None,
        *,
        trusted: Collection[str] = (),
    ) -> dict[str, pa.Array]:
        """Read rows ``low`` to ``high`` (exclusive; None for the end) of those ``columns`` that the file has.

        Strings and binary may come as views, other arrays come as pyarrow reads them. To read only some rows takes an
        offset index (see `has_page_index`). pyarrow is known not to misread ``trusted`` columns.
        """
        rows = self.metadata.row_group(row_group).num_rows
        high = rows if high is None else high
        if not 0 <= low <= high <= rows:
            reason = f"row group {row_group} has {rows} rows, but rows {low} to {high} were requested"
            raise ParquetError(self.path, reason, "the file was replaced while in use: open the dataset again")
        names = [name for name in dict.fromkeys(columns) if name in self._leaves]
        self._check_read_right(row_group, [name for name in names if name not in trusted])
        with self._errors(row_group):
            descriptor = open_regular(self.path)
            try:
                if (low, high) == (0, rows):
                    return self._whole(descriptor, row_group, names)
                return self._piece(descriptor, row_group, names, low, high)
            finally:
                os.close(descriptor)

    def batches(self, row_group: int, columns: Sequence[str], rows: int) -> Generator[pa.RecordBatch]:
        """Yield up to ``rows`` rows at a time, as pyarrow reads them; the file must have all ``columns``."""
        self._check_read_right(row_group, columns)
        with self._errors(row_group), self._open(self.path, self.metadata) as file:
            yield from file.iter_batches(rows, [row_group], columns, use_threads=False)

    def has_page_index(self, row_group: int, columns: Sequence[str]) -> bool:
        """Whether pieces of ``columns`` can be read; columns that the file lacks don't matter."""
        group = self.metadata.row_group(row_group)
        leaves = [leaf for name in columns for leaf in self._leaves.get(name, [])]
        chunks = [group.column(leaf) for leaf in leaves]
        indexed = all(chunk.has_offset_index and chunk.compression in IN_METADATA for chunk in chunks)
        return indexed and bool(self._elements)

    # Decoding

    def _whole(self, descriptor: int, row_group: int, names: Sequence[str]) -> dict[str, pa.Array]:
        group = self.metadata.row_group(row_group)
        for name in names:
            for leaf in self._leaves[name]:
                chunk = group.column(leaf)
                if (row_group, leaf) not in self._right_size:
                    claimed, values = _claimed(descriptor, chunk)
                    self._check_size(row_group, name, chunk, claimed)
                    if values > chunk.num_values:
                        raise self._more_values(row_group, name)
                    self._right_size.add((row_group, leaf))
        chunks = {name: self._leaves[name][0] for name in names}
        coded = self._coded(row_group, names)
        return self._decode(descriptor, self.metadata, row_group, chunks, coded, group.num_rows)

    def _decode(
        self,
        source: File,
        metadata: pq.FileMetaData,
        row_group: int,
        chunks: Mapping[str, int],
        coded: Collection[str],
        rows: int,
    ) -> dict[str, pa.Array]:
        found: dict[str, pa.Array] = {}
        group = metadata.row_group(row_group)
        for name in [name for name in chunks if name in self._alone]:
            try:
                array = read_chunk(source, group.column(chunks[name]), self._alone[name], rows)
            except MoreValues as error:  # pyarrow would silently drop the rest
                raise self._more_values(row_group, name) from error
            if array is not None:
                found[name] = array
        left = [name for name in chunks if name not in found]
        texts = [name for name in left if name in coded]
        for some, dictionaries in (([n for n in left if n not in texts], None), (texts, texts)):
            if not some:
                continue
            file = self.path if isinstance(source, int) else pa.BufferReader(pa.py_buffer(source))
            with self._open(file, metadata, dictionaries) as opened:
                table = opened.read_row_group(row_group, columns=some, use_threads=False)
            for name in some:
                field = table.schema.get_all_field_indices(name)[0]
                column = table.column(field)
                found[name] = _views_into(column) if dictionaries else _joined(column)
        for name, array in found.items():
            if len(array) != rows:
                raise NotRead(f"column {name!r} has {len(array)} rows, not {rows}")
        return {name: found[name] for name in chunks}

    def _coded(self, row_group: int, names: Sequence[str]) -> list[str]:
        """Text columns stored almost entirely in a dictionary: a plain text takes its own bytes and four more."""
        group, found = self.metadata.row_group(row_group), []
        for name in names:
            leaf = self._alone.get(name)
            if leaf is None or leaf.repetition or leaf.type not in (pa.string(), pa.binary()):
                continue
            chunk = group.column(self._leaves[name][0])
            texts = chunk.num_values - (stated_nulls(chunk) or 0)
            few = chunk.total_uncompressed_size < _BEFORE_TEXT * texts
            if chunk.has_dictionary_page and few and _CODED.issuperset(chunk.encodings):
                found.append(name)
        return found

    @contextmanager
    def _open(
        self, source: Path | pa.BufferReader, metadata: pq.FileMetaData | None, texts: Sequence[str] | None = None
    ) -> Iterator[pq.ParquetFile]:
        if isinstance(source, Path):
            check_regular(source)
            source = pa.OSFile(str(source))
        with (
            source,
            pq.ParquetFile(
                source, metadata=metadata, read_dictionary=texts, pre_buffer=False, buffer_size=_BUFFER
            ) as file,
        ):
            yield file

    # Pieces

    def _piece(self, descriptor: int, row_group: int, names: Sequence[str], low: int, high: int) -> dict[str, pa.Array]:
        if not self.has_page_index(row_group, names):
            raise ParquetError(
                self.path,
                f"row group {row_group} has no page index, so it cannot be read in pieces",
                "write it with one, as 'pqcache repartition' does",
            )
        if low == high:
            return {name: pa.nulls(0, self.schema.field(name).type) for name in names}
        group = self.metadata.row_group(row_group)
        parts: dict[tuple[int, int, str], dict[str, _Part]] = {}
        for name in names:
            part = self._part(descriptor, row_group, name, low, high)
            leaf = self._alone.get(name)
            views = leaf is not None and pays(group.column(self._leaves[name][0]), leaf, group.num_rows)
            alone = name if views else ""  # views keep all of a file, so such a column gets its own
            parts.setdefault((part.begin, part.end, alone), {})[name] = part
        coded, found = self._coded(row_group, names), {}
        for (begin, end, _), together in parts.items():
            data, metadata, chunks = self._file_of(descriptor, row_group, together)
            for name, array in self._decode(data, metadata, 0, chunks, coded, end - begin).items():
                found[name] = array.slice(low - begin, high - low)
        return {name: found[name] for name in names}

    def _part(self, descriptor: int, row_group: int, name: str, low: int, high: int) -> _Part:
        leaves = self._leaves[name]
        located = [self._locate(descriptor, row_group, leaf) for leaf in leaves]
        begins = located[0].rows
        for pages in located[1:]:
            begins = np.intersect1d(begins, pages.rows)
        begin = int(begins[np.searchsorted(begins, low, side="right") - 1])
        end = int(begins[np.searchsorted(begins, high, side="left")])
        found = []
        for leaf, pages in zip(leaves, located, strict=True):
            first = (
                int(np.searchsorted(pages.rows[:-1], begin, side="right")) - 1
            )  # the last such page, as earlier ones are empty
            past = int(np.searchsorted(pages.rows[:-1], end, side="left"))
            found.append((leaf, pages, range(first, past)))
        return _Part(begin, end, found)

    def _locate(self, descriptor: int, row_group: int, leaf: int) -> PageLocations:
        found = self._located.get((row_group, leaf))
        if found is None:
            group = self.metadata.row_group(row_group)
            index = self._indexes.read(descriptor, row_group, leaf)
            if index is None:
                raise NotRead("there is no offset index")
            if len(self._located) >= _MOST_LOCATED:
                self._located.clear()
            found = self._located[row_group, leaf] = locations_in_index(index, group.column(leaf), group.num_rows)
        return found

    def _file_of(
        self, descriptor: int, row_group: int, parts: Mapping[str, _Part]
    ) -> tuple[Bytes, pq.FileMetaData, dict[str, int]]:
        """Make a file of some pages; return it, its footer, and the number of each column's first leaf."""
        group, at = self.metadata.row_group(row_group), len(footer.MAGIC)
        leaves = [(name, *leaf) for name, part in parts.items() for leaf in part.leaves]
        heads = [range(first_page(group.column(leaf)), int(pages.offsets[0])) for _, leaf, pages, _ in leaves]
        sizes = [int(pages.sizes[some.start : some.stop].sum()) for _, _, pages, some in leaves]
        data = memory(at + sum(map(len, heads)) + sum(sizes))
        chunks: list[Struct] = []
        firsts: dict[str, int] = {}
        for (name, leaf, pages, some), head, size in zip(leaves, heads, sizes, strict=True):  # head: the dictionary
            begin, end = at + len(head), at + len(head) + size
            read_into(descriptor, data[at:begin], head.start)
            read_into(descriptor, data[begin:end], int(pages.offsets[some.start]))
            values, uncompressed = self._counts(leaf, data[at:end], len(head), pages, some)
            self._check_size(row_group, name, group.column(leaf), uncompressed)
            meta = thrift.column_metadata(
                self._physical[leaf],
                self._paths[leaf],
                IN_METADATA[group.column(leaf).compression].number,
                [thrift.PLAIN, thrift.RLE, thrift.RLE_DICTIONARY],
                values,
                uncompressed,
                end - at,
            )
            meta[thrift.DATA] = (I64, begin)
            if head:
                meta[thrift.DICTIONARY] = (I64, at)
            firsts.setdefault(name, len(chunks))
            chunks.append({2: (I64, 0), 3: (STRUCT, meta)})
            at = end
        rows = next(part.end - part.begin for part in parts.values())
        return data, self._footer_of(list(parts), chunks, rows), firsts

    def _counts(self, leaf: int, data: Bytes, head: int, pages: PageLocations, some: range) -> tuple[int, int]:
        """Values and decompressed bytes of pages; raises NotRead if they contradict the offset index."""
        flat = self.metadata.schema.column(leaf).max_repetition_level == 0
        dictionary = list(pages_in(data, 0, head))
        if len(dictionary) > 1 or not all(page.is_dictionary for page in dictionary):
            raise NotRead("the offset index contradicts the pages")
        uncompressed, values, end = sum(page.body + page.uncompressed for page in dictionary), 0, head
        for number, page in zip(some, pages_in(data, head, len(data) - head), strict=True):
            rows = int(pages.rows[number + 1] - pages.rows[number])
            begin, end = end, page.body + page.size
            right = page.values == rows if flat else page.values >= rows
            if page.is_dictionary or end - begin != pages.sizes[number] or page.rows not in (NONE, rows) or not right:
                raise NotRead("the offset index contradicts the pages")
            values, uncompressed = values + page.values, uncompressed + page.body - begin + page.uncompressed
        return values, uncompressed

    def _footer_of(self, names: Sequence[str], chunks: Sequence[Struct], rows: int) -> pq.FileMetaData:
        schema: list[Struct] = [self._elements[0] | {5: (I32, len(names))}]
        numbers = [self.schema.get_field_index(name) for name in names]
        trees = footer.trees(self._elements)
        for number in numbers:
            schema += trees[number]
        total = sum(chunk[3][1][thrift.UNCOMPRESSED][1] for chunk in chunks)
        # one row more than there are, to notice surplus rows in pages
        group: Struct = {1: (LIST, Items(STRUCT, list(chunks))), 2: (I64, total), 3: (I64, rows + 1)}
        writer = (self.metadata.created_by or "").encode()  # decoders work around bugs of some writers
        template: Struct = {1: (I32, 2)} | ({6: (BINARY, writer)} if writer else {})
        fields = pa.schema([self.schema.field(number) for number in numbers])
        keyvalues = {ARROW_SCHEMA: encode_schema(fields)}
        end = footer.footer_and_magic(footer.make_footer(template, schema, [group], rows + 1, keyvalues))
        return pq.read_metadata(pa.BufferReader(footer.MAGIC + end))

    def _footer(self) -> bytes:
        tail = footer.read_local_tail(self.path)
        check_footer(tail.footer, str(self.path), tail.size)
        return tail.footer

    @cached_property
    def _indexes(self) -> OffsetIndexes:
        return OffsetIndexes.of(self._footer(), self.metadata.num_columns)

    @cached_property
    def _elements(self) -> list[Struct]:
        """The schema elements; none if they can't be taken apart by column."""
        found = footer.schema_of(thrift.decode(self._footer(), str(self.path), until=2), str(self.path))
        odd = any((5 in element and element[5][1] > 0) == (thrift.TYPE in element) for element in found)
        same = len(footer.trees(found)) == len(self.schema) == len(set(self.schema.names))
        return found if same and not odd and sum(map(len, self._leaves.values())) == self.metadata.num_columns else []

    @cached_property
    def _paths(self) -> list[tuple[bytes, ...]]:
        return [leaf.path for leaf in footer.leaves_of(self._elements, str(self.path))]

    @cached_property
    def _physical(self) -> list[int]:
        return [int(e[thrift.TYPE][1]) for e in self._elements if thrift.TYPE in e]

    # Checks

    def _check_read_right(self, row_group: int, names: Sequence[str]) -> None:
        """Raise ParquetError for columns that pyarrow misreads; each one is examined once."""
        wanted = [name for name in names if name in self._doubtful and (row_group, name) not in self._read_right]
        if wanted:
            check_read_right(self.path, self.metadata, self.schema, wanted, [row_group])
            self._read_right.update((row_group, name) for name in wanted)

    @cached_property
    def _doubtful(self) -> frozenset[str]:
        return doubtful_columns(self.metadata, self.schema)

    def _more_values(self, row_group: int, name: str) -> ParquetError:
        reason = f"row group {row_group} has more values in column {name!r} than its footer says"
        return ParquetError(self.path, reason, "it is damaged: fetch or write it again")

    def _check_size(self, row_group: int, name: str, chunk: pq.ColumnChunkMetaData, claimed: int) -> None:
        said = max(chunk.total_uncompressed_size, 0)
        if claimed > max(2 * said, said + _EXCESS):
            raise ParquetError(
                self.path,
                f"row group {row_group}, column {name!r}: pages claim {claimed:,} bytes, the footer {said:,}",
                _DAMAGED,
            )

    @contextmanager
    def _errors(self, row_group: int | None) -> Iterator[None]:
        try:
            yield
        except ParquetError:
            raise
        except FileNotFoundError as error:
            raise ParquetError(self.path, "the file is gone", "open the dataset again") from error
        except UNREADABLE as error:
            if (known := open_error(error)) is not None:
                raise ParquetError(self.path, *known) from error
            if row_group is None:
                raise footer.not_parquet(self.path, error) from error
            reason = f"row group {row_group} cannot be read ({first_line(error)})"
            raise ParquetError(self.path, reason, _DAMAGED) from error


def _claimed(file: File, chunk: pq.ColumnChunkMetaData) -> tuple[int, int]:
    """Decompressed bytes and values that the pages of a chunk claim, up to a damaged header."""
    size = values = 0
    try:
        for page in pages_in(file, first_page(chunk), chunk.total_compressed_size):
            size += page.uncompressed
            values += 0 if page.is_dictionary else page.values
    except (NotRead, IndexError, ValueError):  # pyarrow stops there too, and reports the damage
        pass
    return size, values


def _joined(column: pa.ChunkedArray) -> pa.Array:
    """Join arrays; texts become views, as several arrays mean that 32-bit offsets don't suffice."""
    if column.num_chunks == 1:
        return column.chunk(0)
    if column.num_chunks and is_text(column.type):
        column = column.cast(view_type(column.type))
    return column.combine_chunks()


def _views_into(column: pa.ChunkedArray) -> pa.Array:
    """Turn texts read as dictionary codes into views of the dictionary."""
    kind = view_type(column.type.value_type)
    array = _joined(column)
    if array.offset or not len(array.dictionary):
        return array.dictionary_decode().cast(kind)
    _, words, *data = array.dictionary.cast(kind).buffers()
    valid, numbers = array.indices.buffers()
    positions = np.frombuffer(numbers, numpy_dtype(array.indices.type), len(array))
    views = memory(16 * len(array))
    np.frombuffer(words, "V16", len(array.dictionary)).take(positions, mode="clip", out=views.view("V16"))
    return pa.Array.from_buffers(kind, len(array), [valid, pa.py_buffer(views), *data])


# ---- The places of data pages, by the offset index

Ints = npt.NDArray[np.int64]

_MOST_INDEX = 16 << 20  # bytes of an offset index


@dataclass(frozen=True, kw_only=True)
class PageLocations:
    """The data pages of a column chunk, in the order of their rows.

    Attributes:
        offsets: where each page's header begins in the file.
        sizes: bytes of each page with its header.
        rows: the first row that begins in each page or behind it, and finally the rows of the row group.
    """

    offsets: Ints
    sizes: Ints
    rows: Ints


@dataclass(frozen=True)
class OffsetIndexes:
    """Offset and length of each column chunk's offset index in a file; 0 if there is none."""

    offsets: Ints
    lengths: Ints

    @staticmethod
    def of(footer: bytes, leaves: int) -> OffsetIndexes:
        """The ``footer`` must have passed `check_footer`."""
        found: list[int] = []
        walk_struct(footer, 0, _FILE, found)
        each = np.array(found, np.int64).reshape(-1, leaves, 2) if leaves else np.zeros((0, 0, 2), np.int64)
        return OffsetIndexes(each[:, :, 0], each[:, :, 1])

    def read(self, file: int, group: int, leaf: int) -> bytes | None:
        """None for a chunk without an offset index."""
        offset, length = int(self.offsets[group, leaf]), int(self.lengths[group, leaf])
        if not (offset > 0 and 0 < length <= _MOST_INDEX):
            return None
        return os.pread(file, length, offset)


_OFFSET, _LENGTH = thrift.OFFSET_INDEX
_PLACE = {key(_OFFSET, I64): number_at(-2), key(_LENGTH, I32): number_at(-1)}
_CHUNKS = inside_each(_PLACE, lambda found: found.extend((0, 0)))
_FILE = {key(4, LIST): inside_each({key(1, LIST): _CHUNKS})}


def locations_in_index(index: bytes, chunk: pq.ColumnChunkMetaData, rows: int) -> PageLocations:
    """Parse an offset index; raises NotRead if it contradicts the chunk."""
    try:
        pages = thrift.decode(index, "an offset index")[1][1].values
        numbers = np.array([[page[field][1] for field in (1, 2, 3)] for page in pages], np.int64).reshape(-1, 3)
    except (ParquetError, OverflowError, *MALFORMED) as error:
        raise NotRead("the offset index is damaged") from error
    offsets, sizes, firsts = (np.ascontiguousarray(numbers[:, i]) for i in range(3))
    return _checked(PageLocations(offsets=offsets, sizes=sizes, rows=np.append(firsts, rows)), chunk)


def _checked(pages: PageLocations, chunk: pq.ColumnChunkMetaData) -> PageLocations:
    """Raise NotRead unless pages follow one another in their chunk and cover its rows."""
    begin = first_page(chunk)
    ends = pages.offsets + pages.sizes
    apart = len(ends) > 0 and pages.offsets[0] >= begin and ends[-1] <= begin + chunk.total_compressed_size
    if not (apart and (pages.sizes > 0).all() and (pages.offsets[1:] == ends[:-1]).all()):
        raise NotRead("pages don't follow one another in their chunk")
    if pages.rows[0] != 0 or (np.diff(pages.rows) < 0).any():
        raise NotRead("the rows of pages aren't in order")
    return pages
