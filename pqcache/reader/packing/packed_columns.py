"""Packed sequences as columns: assembled when a row group is decoded, with ids of their documents in a batch.

A sequence is held as a list of views, one of each piece of a document, and one of its padding, which may be empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pqcache.errors import ParquetError, UsageError
from pqcache.parquet.dense_columns import as_list
from pqcache.reader.columns.batch_layout import NumberColumns
from pqcache.reader.columns.column_data import (
    ColumnData,
    as_rows,
    ends_of_views,
    from_arrow,
    is_views,
    pack_bytes,
    take,
)
from pqcache.reader.columns.column_forms import ColumnForm, number_dtype, storage_type
from pqcache.reader.columns.row_bytes import ViewLists
from pqcache.reader.order.epoch_order import Ints
from pqcache.reader.packing.pack import Pack
from pqcache.reader.packing.packed_rows import PackedRows, Pieces
from pqcache.reader.packing.token_batches import TokenBatches
from pqcache.system.buffer_pool import BufferPool

_CU_SEQLENS = ColumnForm(name="cu_seqlens", type=pa.int32(), kind="fixed", width=4)
_BYTES = ColumnForm(name="\0bytes", type=pa.large_binary(), kind="bytes", width=1)


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


def as_sequences(column: ColumnData, length: int) -> ColumnData:
    """Return packed sequences of a batch as rows of fixed width."""
    form = column.form
    fixed = replace(form, kind="fixed", width=form.width * length, dense=length)
    return ColumnData(fixed, as_rows(pack_bytes(column).data, fixed.width))


def lengths_of(column: ColumnData, where: object) -> Ints:
    """Return the number of tokens of each document; those that are null, or hold nulls, raise ParquetError."""
    form = column.form
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
    parts = _source_parts(pieces)
    sequences = int(pieces.sequence[-1]) + 1 if len(pieces.sequence) else 0
    pads = packs.spec.length - np.bincount(pieces.sequence, pieces.tokens, sequences).astype(np.int64)
    packed = []
    for column in columns:
        form = _packed_form(column.form)
        dtype = number_dtype(form.type, True)
        fill = np.full(int(pads.sum()), packs.spec.fill(form.name, dtype), dtype)
        packed.append(ColumnData(form, _assembled(_data_of(column), form.width, parts, pieces.sequence, pads, fill)))
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
        advice = "the file was replaced or is damaged: open the dataset again"
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


class _SourceParts(NamedTuple):
    """The row group's tokens cut at ``bounds``; each of the pieces is the part at ``where``."""

    bounds: Ints
    where: Ints


def _source_parts(pieces: Pieces) -> _SourceParts:
    bounds = np.union1d(pieces.start, pieces.start + pieces.tokens)
    return _SourceParts(bounds, np.searchsorted(bounds, pieces.start))


def _assembled(
    data: npt.NDArray[np.uint8], width: int, parts: _SourceParts, sequence: Ints, pads: Ints, fill: npt.NDArray[Any]
) -> ViewLists:
    """Return pieces of ``data`` sequence after sequence, each with so many ``pads`` of ``fill`` behind it.

    They are views, so that tokens are copied once, when a batch is made.
    """
    source = from_arrow(_binary(parts.bounds * width, data), _BYTES).values
    ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(pads)]) * width
    padding = from_arrow(_binary(ends, fill.view(np.uint8)), _BYTES).values
    first = np.searchsorted(sequence, np.arange(len(pads) + 1))
    order = np.insert(parts.where, first[1:], len(source) + np.arange(len(pads)))
    views = take(ColumnData(_BYTES, pa.concat_arrays([source, padding])), order).values
    return ViewLists(first + np.arange(len(first)), views)


def _binary(ends: Ints, data: npt.NDArray[np.uint8]) -> pa.Array:
    """Return an array of the bytes between ``ends``."""
    buffers = [None, pa.py_buffer(np.ascontiguousarray(ends)), pa.py_buffer(data)]
    return pa.Array.from_buffers(pa.large_binary(), len(ends) - 1, buffers)


def ids_of(
    pack: Pack, column: ColumnData, rows: int, memory: BufferPool
) -> tuple[list[NumberColumns], dict[str, ColumnData]]:
    """Return the columns that ``pack.ids`` names, of a batch of ``rows`` sequences; long ones are in ``memory``.

    ``column`` is one of those that are packed.
    """
    views = pack_bytes(column).views
    assert views is not None
    tokens = np.diff(views.ends) // column.form.width
    numbers = np.arange(1, len(tokens) + 1, dtype=np.int32)
    numbers -= np.repeat(views.rows[:-1], np.diff(views.rows)).astype(np.int32)
    numbers[views.rows[1:] - 1] = 0  # padding
    if not tokens.all():
        tokens, numbers = tokens[tokens > 0], numbers[tokens > 0]
    ends = np.zeros(len(tokens) + 1, np.int32)
    np.cumsum(tokens, out=ends[1:])
    others = {"cu_seqlens": ColumnData(_CU_SEQLENS, ends.view(np.uint32))} if "cu_seqlens" in pack.ids else {}
    names = [name for name in ("document_ids", "position_ids") if name in pack.ids]
    if not names:
        return [], others
    size = rows * pack.length
    places: npt.NDArray[np.int32] = memory.borrow(4 * len(names) * size).view(np.int32).reshape(len(names), size)
    if "document_ids" in names:
        np.copyto(places[0], np.repeat(numbers, tokens))
    if "position_ids" in names:
        np.subtract(_counted(size), np.repeat(ends[:-1], tokens), out=places[-1])
    forms = {name: _ids_form(name, pack.length) for name in names}
    return [NumberColumns(forms, places.reshape(len(names), rows, pack.length))], others


@cache
def _ids_form(name: str, length: int) -> ColumnForm:
    return ColumnForm(name=name, type=pa.list_(pa.int32()), kind="fixed", width=4 * length, dense=length)


@lru_cache(maxsize=4)
def _counted(count: int) -> npt.NDArray[np.int32]:
    return np.arange(count, dtype=np.int32)
