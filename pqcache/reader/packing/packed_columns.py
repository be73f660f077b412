"""Packed sequences as columns: assembled when a row group is decoded, with ids of their documents in a batch.

A sequence is held as a list of views, one of each piece of a document, and one of its padding, which may be empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pqcache.errors import ParquetError, UsageError
from pqcache.parquet.dense_columns import as_list
from pqcache.reader.columns.batch_layout import NumberColumns
from pqcache.reader.columns.column_data import (
    ColumnData,
    ends_of_views,
    is_views,
    pack_bytes,
)
from pqcache.reader.columns.column_forms import ColumnForm, number_dtype, storage_type
from pqcache.reader.columns.row_bytes import ViewLists
from pqcache.reader.order.epoch_order import Ints
from pqcache.reader.packing.document_ids import ids_of
from pqcache.reader.packing.pack import Pack
from pqcache.reader.packing.packed_rows import PackedRows, Pieces
from pqcache.reader.packing.piece_views import array_of, view_buffers, view_words
from pqcache.reader.packing.token_batches import TokenBatches
from pqcache.store.cache_directory import advice_for_file
from pqcache.system.buffer_pool import BufferPool


def item_type(kind: pa.DataType) -> np.dtype[Any] | None:
    """Return the dtype of the items of lists of numbers; None for other types."""
    bare = storage_type(kind)
    if not (pa.types.is_list(bare) or pa.types.is_large_list(bare) or pa.types.is_fixed_size_list(bare)):
        return None
    item: np.dtype[Any] | None = number_dtype(bare.value_type)
    return None if pa.types.is_boolean(bare.value_type) else item


def check_columns(pack: Pack | TokenBatches, schema: pa.Schema, partitions: Sequence[str]) -> None:
    """Raise UsageError for columns that cannot be packed."""
    for name in pack.columns:
        if name not in schema.names or name in partitions:
            raise UsageError("pack", f"no column {name!r} in the files", f"they have {', '.join(schema.names)}")
        kind = as_list(schema.field(name)).type
        dtype = item_type(kind)
        if dtype is None:
            raise UsageError("pack", f"{name!r} is {kind}", "name columns of lists of numbers")
        if isinstance(pack, Pack):
            pack.fill(name, dtype)


def document_form(form: ColumnForm) -> ColumnForm:
    """Return how the documents of a column are read: as Arrow's lists, whose items lie end to end."""
    return form if form.kind == "fixed" else replace(form, kind="other")


def packed_forms(forms: Sequence[ColumnForm]) -> tuple[ColumnForm, ...]:
    """Return how sequences of columns of ``forms`` are held until they are in a batch."""
    return tuple(map(_packed_form, forms))


def _packed_form(form: ColumnForm) -> ColumnForm:
    item = storage_type(form.type).value_type
    return ColumnForm(name=form.name, type=pa.list_(item), kind="bytes", width=number_dtype(item).itemsize)


def lengths_of(column: ColumnData, where: object) -> Ints:
    """Return the number of tokens of each document; those that are null, or hold nulls, raise ParquetError."""
    form, array = column.form, column.values
    nulls = int((~column.valid).sum()) if column.valid is not None else getattr(array, "null_count", 0)
    if nulls:
        reason = f"column {form.name!r} has documents that are null ({nulls} in one row group), which are not packed"
        raise ParquetError(where, reason, f'leave them out with filters="{form.name} is not null", or write them empty')
    if not isinstance(array, pa.Array):
        return np.full(len(column), storage_type(form.type).list_size, np.int64)
    if is_views(column):
        return np.diff(ends_of_views(column)) // form.width
    if array.flatten().null_count:
        raise ParquetError(where, f"column {form.name!r} has nulls inside its lists", "write them as numbers")
    if pa.types.is_fixed_size_list(array.type):
        return np.full(len(column), array.type.list_size, np.int64)
    found: Ints = np.diff(array.offsets.to_numpy()).astype(np.int64)
    return found


def pack_columns(
    packs: PackedRows, pieces: Pieces, lengths: Ints, columns: Sequence[ColumnData], path: Path
) -> list[ColumnData]:
    """Return the sequences of ``pieces`` of documents, which are ``columns`` of the file ``path``.

    ``lengths`` are those that the documents are to have. Others raise ParquetError.
    """
    check_lengths(packs.spec, columns, lengths, path)
    sequences = int(pieces.sequence[-1]) + 1 if len(pieces.sequence) else 0
    pads = packs.spec.length - np.bincount(pieces.sequence, pieces.tokens, sequences).astype(np.int64)
    packed = []
    for column in columns:
        form = _packed_form(column.form)
        dtype = number_dtype(form.type, True)
        fill = np.full(int(pads.max(initial=0)), packs.spec.fill(form.name, dtype), dtype)
        packed.append(ColumnData(form, _assembled(_data_of(column), form.width, pieces, pads, fill)))
    return packed


def check_lengths(pack: Pack | TokenBatches, columns: Sequence[ColumnData], lengths: Ints, path: Path) -> None:
    """Raise ParquetError where documents have other lengths than were counted, or columns differ in them."""
    for column in columns:
        if column.form.name in pack.columns:
            found = lengths_of(column, path)
            if not np.array_equal(found, lengths):
                raise _other_lengths(pack, column.form.name, found, lengths, path)


def _other_lengths(pack: Pack | TokenBatches, name: str, found: Ints, lengths: Ints, path: Path) -> ParquetError:
    if name == pack.column or len(found) != len(lengths):
        advice = advice_for_file(path, "the file was replaced or is damaged: open the dataset again")
        return ParquetError(path, f"column {name!r} has documents of other lengths than were counted", advice)
    row = int(np.flatnonzero(found != lengths)[0])
    reason = f"a row has {lengths[row]} items in {pack.column!r} and {found[row]} in {name!r}"
    return ParquetError(path, reason, f"write one item for each token, or leave {name!r} out of fields=")


def _data_of(column: ColumnData) -> npt.NDArray[np.uint8]:
    """Return the items of all documents, end to end."""
    if not isinstance(column.values, pa.Array):
        return np.ascontiguousarray(column.values).reshape(-1).view(np.uint8)
    found: npt.NDArray[np.uint8] = column.values.flatten().to_numpy().view(np.uint8)
    return found


def _assembled(
    data: npt.NDArray[np.uint8], width: int, pieces: Pieces, pads: Ints, fill: npt.NDArray[Any]
) -> ViewLists:
    """Return pieces of ``data`` sequence after sequence, each with so many ``pads`` of ``fill`` behind it.

    They are views, so that tokens are copied once, when a batch is made.
    """
    count, numbers = len(pieces.sequence), np.arange(len(pads))
    buffers, padding = view_buffers(data), fill.view(np.uint8)
    words = np.empty((count + len(pads), 4), np.int32)
    words[np.arange(count) + pieces.sequence] = view_words(data, pieces.start * width, pieces.tokens * width)
    ends = np.searchsorted(pieces.sequence, numbers, "right") + numbers + 1
    words[ends - 1] = view_words(padding, np.zeros_like(pads), pads * width, len(buffers))
    return ViewLists(np.concatenate([[0], ends]), array_of(words, [*buffers, *view_buffers(padding)]))


def sequences_of(pack: Pack, columns: Sequence[ColumnData], rows: int, memory: BufferPool) -> list[NumberColumns]:
    """Return ``rows`` packed sequences of ``columns``, and what ``pack.ids`` names, which is in ``memory``."""
    packed = [pack_bytes(column) for column in columns]
    found = [
        NumberColumns(*_as_numbers(column.form, rows_of.data, rows, pack.length))
        for column, rows_of in zip(columns, packed, strict=True)
    ]
    if pack.ids and packed[0].views is not None:
        found += ids_of(pack, packed[0].views, columns[0].form.width, rows, memory)
    return found


def _as_numbers(
    form: ColumnForm, data: npt.NDArray[np.uint8], rows: int, length: int
) -> tuple[dict[str, ColumnForm], npt.NDArray[Any]]:
    fixed, dtype = _sequence_form(form, length)
    return {form.name: fixed}, data.view(dtype).reshape(1, rows, length)


@lru_cache(maxsize=64)
def _sequence_form(form: ColumnForm, length: int) -> tuple[ColumnForm, np.dtype[Any]]:
    """Return the form of packed sequences in a batch, which are rows of fixed width, and the dtype of their items."""
    return replace(form, kind="fixed", width=form.width * length, dense=length), number_dtype(form.type, True)
