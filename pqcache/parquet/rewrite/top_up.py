"""Row groups topped up: further rows encoded into the space that columns with a dictionary leave.

What data pages have of a dictionary is positions in it. So a dictionary that only gets longer serves the pages there
are, and those of rows that are encoded with it. Fields are those of parquet.thrift in
https://github.com/apache/parquet-format.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from pqcache.parquet.arrow_sizes import Floats
from pqcache.parquet.binary_views import without_views
from pqcache.parquet.codecs import CODECS
from pqcache.parquet.footer import thrift
from pqcache.parquet.footer.thrift import I64, LIST, STRUCT, Items, Struct
from pqcache.parquet.footer.thrift_fields import (
    CODEC,
    COMPRESSED,
    DATA,
    DICTIONARY,
    DICTIONARY_PAGE,
    PAGES,
    UNCOMPRESSED,
)
from pqcache.parquet.rewrite.concat_chunks import Chunk, EncodedRows
from pqcache.parquet.rewrite.row_group_builder import (
    MAX_ROWS,
    PAGE_HEADER,
    Encoded,
    Encoder,
    OpenRowGroup,
    RowGroupPart,
)
from pqcache.parquet.rewrite.row_queue import RowQueue
from pqcache.parquet.rewrite.source_reader import RowBatch
from pqcache.parquet.schema_merge import is_text

_DICTIONARY_ENCODINGS = (2, 8)
_CODECS = {codec.number: codec for codec in CODECS.values() if codec.name in ("none", "snappy", "zstd", "lz4")}
_WORTH_A_TOP_UP, _MARGIN, _MAX_TOP_UPS = 0.008, 0.1, 2  # of a row group: what is left


def top_up(
    group: OpenRowGroup,
    coded: Encoded,
    encoder: Encoder,
    queue: RowQueue,
    factors: Floats,
    limit: float,
    max_bytes: int,
) -> tuple[Encoded, list[RowGroupPart]]:
    """Fill what ``group`` leaves of ``limit`` bytes; return ``coded`` with longer dictionaries, and the rows added.

    ``coded`` are its columns with a dictionary, encoded, and ``factors`` is what rows are estimated to take. At most
    ``max_bytes`` of decoded rows are held.
    """
    found, most = list[RowGroupPart](), sys.maxsize
    held, rows = group.held, group.rows
    headers = 2 * PAGE_HEADER * len(encoder.footer_schema.tops)
    space = limit - group.size - sum(part.size for _, part in coded)
    while group.dictionary and space > max(_WORTH_A_TOP_UP * limit, 3 * headers) and most and len(found) < _MAX_TOP_UPS:
        queue.fill(space, factors, MAX_ROWS - rows, max_bytes - held)
        if not queue.rows or held + queue.batches[0].nbytes > max_bytes or rows >= MAX_ROWS:
            break
        goal = (1 - _MARGIN) * space - headers
        count = queue.cut(goal, factors, min(most, MAX_ROWS - rows), max_bytes - held)
        batches = queue.take(count)
        before = encoder.encoded
        known = [batch for part in [*group.parts, *found] for batch in part.batches]
        longer = _encode_longer(group.dictionary, known, coded, batches, encoder)
        if longer is None:
            queue.put_back(batches)
            break
        parts = encoder.encode(batches, group.appendable)
        size = sum(part.size for _, part in [*parts, *longer[0], *longer[1]]) - sum(part.size for _, part in coded)
        if size <= space:
            encoder.again += encoder.encoded - before - size
            coded = longer[0]
            found.append(RowGroupPart(count, size, [*parts, *longer[1]], batches))
            held, rows, space = held + sum(batch.nbytes for batch in batches), rows + count, space - size
            continue
        encoder.again += encoder.encoded - before
        queue.put_back(batches)
        most = min(count - 1, int((1 - _MARGIN) * count * space / size))
    return coded, found


def _encode_longer(
    columns: Sequence[int],
    before: Sequence[RowBatch],
    coded: Encoded,
    batches: Sequence[RowBatch],
    encoder: Encoder,
) -> tuple[Encoded, Encoded] | None:
    """Return ``coded`` and what follows it for the rows of ``batches``: longer dictionaries, or plain pages."""
    texts = [n for n in columns if is_text_like(encoder.types[n])]
    plain = [n for n in columns if n not in texts]
    if not all(map(may_be_mixed, (encoder.types[n] for n in plain))):
        return None
    first, last = dict[int, Chunk](), list[tuple[list[int], EncodedRows]]()
    if texts:
        known = without_views(pa.concat_tables([batch.table.select(texts) for batch in before]))
        added = without_views(pa.concat_tables([batch.table.select(texts) for batch in batches]))
        longer = [with_dictionary(*pair) for pair in zip(added.columns, known.columns, strict=True)]
        fields = [field.with_type(column.type) for field, column in zip(added.schema, longer, strict=True)]
        table = pa.table(longer, schema=pa.schema(fields))
        new = encoder.part(table)
        encoder.note_dictionaries(table, list(encoder.dictionaries))
        old = {leaf: chunk for leaves, part in coded for leaf, chunk in zip(leaves, part.chunks, strict=True)}
        for leaf, chunk in zip(encoder.leaves(texts), new.chunks, strict=True):
            if (both := extend_dictionary(old[leaf], chunk)) is None:
                encoder.again += new.size
                return None
            first[leaf] = both[0]
            last.append(([leaf], EncodedRows(new.rows, [both[1]])))
    last += encoder.encode(batches, plain, encodings=replace(encoder.encodings, dictionary=()))
    changed = [
        (leaves, EncodedRows(part.rows, [first.get(leaf, c) for leaf, c in zip(leaves, part.chunks, strict=True)]))
        for leaves, part in coded
    ]
    return changed, last


def is_text_like(kind: pa.DataType) -> bool:
    """Return whether values are strings or bytes of any length, whose dictionaries pyarrow writes as they are given."""
    return is_text(kind.value_type if pt.is_dictionary(kind) else kind)


def may_be_mixed(kind: pa.DataType) -> bool:
    """Return whether plain pages may follow those with a dictionary: fastparquet misreads texts and categories then."""
    if pt.is_nested(kind):
        return all(may_be_mixed(kind.field(number).type) for number in range(kind.num_fields))
    return not (pt.is_dictionary(kind) or is_text(kind))


def with_dictionary(column: pa.ChunkedArray, known: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return ``column`` with the dictionary that a writer makes of ``known``, the rows before it, made longer."""
    if pt.is_dictionary(column.type):
        first = known.unify_dictionaries().chunk(0).dictionary
        column = column.cast(column.type.value_type)
    else:
        first = pc.unique(known).drop_null()  # in the order in which they occur, as a writer has them
    new = pc.unique(column).drop_null()
    values = pa.concat_arrays([first, new.filter(pc.invert(pc.is_in(new, first)))])
    indices = [pc.index_in(chunk, values, skip_nulls=True) for chunk in column.chunks]
    return pa.chunked_array([pa.DictionaryArray.from_arrays(found, values) for found in indices])


def extend_dictionary(first: Chunk, second: Chunk) -> tuple[Chunk, Chunk] | None:
    """Return two chunks as they can follow one another, with the dictionary of ``second`` in front of ``first``.

    None if that is not the dictionary of ``first`` with more values, or one of them has other pages, too.
    """
    one, two = first.fields[3][1], second.fields[3][1]
    if not all(_is_all_dictionary(meta) for meta in (one, two)):
        return None
    old, new = _dictionary_page(first, one), _dictionary_page(second, two)
    if old is None or new is None or not new.values.startswith(old.values):
        return None
    grown = new.size - old.size
    fields = {**one, COMPRESSED: (I64, one[COMPRESSED][1] + grown), DATA: (I64, one[DATA][1] + grown)}
    fields[UNCOMPRESSED] = (I64, one[UNCOMPRESSED][1] + new.uncompressed - old.uncompressed)
    data = [second.data[0][: new.size], *(part for part in (first.data[0][old.size :], *first.data[1:]) if len(part))]
    head = Chunk(
        fields={**first.fields, 3: (STRUCT, fields)},
        data=data,
        size=first.size + grown,
        offsets=_moved(first, grown),
        columns=first.columns,
    )
    rest = {field: value for field, value in two.items() if field not in (DICTIONARY, PAGES)}
    rest[COMPRESSED] = (I64, two[COMPRESSED][1] - new.size)
    rest[UNCOMPRESSED] = (I64, two[UNCOMPRESSED][1] - new.uncompressed)
    rest[DATA] = (I64, 0)
    pages = [page for page in two[PAGES][1].values if page[1][1] != DICTIONARY_PAGE]
    rest = dict(sorted({**rest, PAGES: (LIST, Items(STRUCT, pages))}.items()))
    tail = Chunk(
        fields={**second.fields, 3: (STRUCT, rest)},
        data=[second.data[0][new.size :], *second.data[1:]],
        size=second.size - new.size,
        offsets=_moved(second, -new.size),
        columns=second.columns,
    )
    return head, tail


class _Page:
    """A dictionary page: its bytes on disk with the header, the same before compression, and the values."""

    def __init__(self, size: int, uncompressed: int, values: bytes) -> None:
        self.size, self.uncompressed, self.values = size, uncompressed, values


def _dictionary_page(chunk: Chunk, meta: Struct) -> _Page | None:
    if DICTIONARY not in meta or meta[DICTIONARY][1] != 0 or meta[CODEC][1] not in _CODECS:
        return None
    size = meta[DATA][1]
    page = bytes(chunk.data[0][:size])
    header, length = thrift.decode_first(page, "a dictionary page")
    codec, raw = _CODECS[meta[CODEC][1]].arrow, header[2][1]
    body = page[length:]
    values = body if codec is None or not raw else pa.Codec(codec).decompress(body, raw).to_pybytes()
    return _Page(size, length + raw, values)


def _is_all_dictionary(meta: Struct) -> bool:
    pages = meta[PAGES][1].values if PAGES in meta else ()
    return bool(pages) and all(page[1][1] == DICTIONARY_PAGE or page[2][1] in _DICTIONARY_ENCODINGS for page in pages)


def _moved(chunk: Chunk, delta: int) -> Struct | None:
    if chunk.offsets is None:
        return None
    pages: Sequence[Any] = chunk.offsets[1][1].values
    moved = [{**page, 1: (I64, page[1][1] + delta)} for page in pages]
    return {**chunk.offsets, 1: (LIST, Items(STRUCT, moved))}
