"""Arrow columns as tensors.

=================================== =================================================================
column                              what a batch of B rows holds
=================================== =================================================================
int, uint, float, half, bool        tensor (B,) of the same dtype
list of one length, fixed-size      tensor (B, length); fixed-shape tensors (B, *shape); embeddings,
list, Arrow fixed-shape tensor      token windows: no work per row
other lists                         :class:`Ragged` of a tensor; nested lists a Ragged of a Ragged
string, binary                      :class:`Ragged` whose items are str or bytes, packed in one buffer
fixed-size binary, UUID             uint8 tensor (B, width)
date                                int32 tensor of days (date64: int64 of milliseconds) since 1970
time, timestamp, duration           int32 or int64 tensor in the column's own unit (``ds.schema`` says
                                    which); zoned timestamps are UTC
decimal                             int64 tensor of the unscaled value (12.34 is 1234 with scale 2) up to
                                    18 digits; beyond that Ragged of str, as no tensor holds it exactly
dictionary                          as its values
struct                              dict of its fields
map                                 Ragged of ``{"key": ..., "value": ...}``
=================================== =================================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from pqcache.errors import ParquetError, UsageError
from pqcache.parquet.schema_merge import is_text
from pqcache.reader.columns.column_forms import form_of, number_dtype, storage_type
from pqcache.reader.columns.columns import Bools, ColumnData, Packed, from_arrow, is_views, packed, to_arrow
from pqcache.torch.ragged import Ragged

Value = torch.Tensor | Ragged | dict[str, Any]
_INT64_DIGITS = 18


@dataclass(frozen=True)
class Nulls:
    """What to do with nulls: raise (default), a mask beside the column, or a value per column."""

    mask: bool = False
    fill: tuple[tuple[str, Any], ...] = ()

    @staticmethod
    def of(nulls: str | Mapping[str, Any]) -> Nulls:
        """Read the ``nulls=`` argument; anything else than "error", "mask" or a mapping raises UsageError."""
        if isinstance(nulls, str):
            if nulls not in ("error", "mask"):
                raise UsageError(f"nulls={nulls!r}", "choose 'error', 'mask' or a dict of column and fill value")
            return Nulls(mask=nulls == "mask")
        return Nulls(fill=tuple(nulls.items()))


def mask_name(column: str) -> str:
    """Return the name under which a batch holds a column's mask (True where there is a value)."""
    return f"{column}_mask"


def null_error(name: str, count: int, where: str) -> ParquetError:
    """Return the error for ``count`` nulls in a column that ``nulls`` neither fills nor masks."""
    return ParquetError(
        f"column {name!r}",
        f"it holds nulls ({count} in {where}), which no tensor can",
        f"pass nulls='mask', or nulls={{{name!r}: VALUE}} to fill them, or leave the column out with columns=",
    )


def check_type(name: str, kind: pa.DataType) -> None:
    """Raise UsageError, naming the column, if a type has no tensor form."""
    bare = storage_type(kind)
    if pa.types.is_struct(bare):
        for i in range(bare.num_fields):
            check_type(f"{name}.{bare.field(i).name}", bare.field(i).type)
    elif pa.types.is_map(bare):
        check_type(f"{name}.key", bare.key_type)
        check_type(f"{name}.value", bare.item_type)
    elif pa.types.is_nested(bare):
        if pa.types.is_union(bare) or pa.types.is_run_end_encoded(bare):
            raise _no_tensor(name, kind)
        check_type(name, bare.value_type)
    elif pa.types.is_null(bare):
        raise UsageError(
            f"column {name!r}",
            "it has no type: its values are null, or of a type that is not read here, like INTERVAL",
            "leave it out with columns=, or write it with a type",
        )
    elif not (
        is_text(bare)
        or pa.types.is_decimal(bare)
        or pa.types.is_fixed_size_binary(bare)
        or number_dtype(bare) is not None
    ):
        raise _no_tensor(name, kind)


def to_value(column: ColumnData, name: str, nulls: Nulls) -> tuple[Value, torch.Tensor | None]:
    """Return a column as a tensor, Ragged or dict, and a bool mask (B,) where some rows are null.

    Nulls that ``nulls`` neither fills nor masks raise ParquetError with the column's name.
    """
    valid = column.valid
    if valid is None and isinstance(column.values, np.ndarray) and column.values.flags.c_contiguous:
        dense = column.form.dense
        dtype = number_dtype(column.form.type, dense > 0)
        if dtype is not None:
            numbers = column.values.view(dtype)
            return torch.from_numpy(numbers.reshape(-1, dense) if dense else numbers), None
    bare = storage_type(column.form.type)
    if isinstance(column.values, pa.Array) and valid is None and column.values.null_count:
        valid = np.asarray(column.values.is_valid().to_numpy(zero_copy_only=False), np.bool_)
    fill = dict(nulls.fill).get(name)
    if valid is not None and valid.all():
        valid = None
    if valid is not None and fill is None and not nulls.mask:
        raise null_error(name, int((~valid).sum()), "one batch")
    mask = None if valid is None else torch.from_numpy(valid)
    if pa.types.is_decimal(bare) and bare.precision > _INT64_DIGITS:
        text = from_arrow(to_arrow(column).cast(pa.string()), form_of(pa.field(name, pa.string())))
        return _text(text, valid, fill, bytes_=False), mask
    if column.form.kind == "fixed" and isinstance(column.values, np.ndarray):
        return _fixed(column, valid, fill), mask
    if isinstance(column.values, Packed) or is_views(column):
        if is_text(bare):
            return _text(column, valid, fill, bytes_=_is_binary(bare)), mask
        rows = packed(_without(column, valid))
        item = storage_type(bare.value_type)
        values = _numbers(rows.data, item, len(rows.data) // column.form.width, name)
        return Ragged(values, torch.from_numpy(rows.ends // column.form.width)), mask
    return _nested(column.values, bare, name, nulls, fill), mask


def _fixed(column: ColumnData, valid: Bools | None, fill: Any) -> torch.Tensor:
    kind, values = column.form.type, column.values
    rows = len(values)
    if column.form.dense:
        item = storage_type(kind).value_type
        tensor = _numbers(values, item, rows * column.form.dense, column.form.name)
        tensor = tensor.reshape(rows, column.form.dense, *tensor.shape[1:])
    else:
        tensor = _numbers(values, kind, rows, column.form.name)
    if valid is None:
        return tensor
    filled = tensor.numpy().copy()  # torch cannot put values into unsigned tensors
    filled[~valid] = torch.as_tensor(0 if fill is None else fill, dtype=tensor.dtype).numpy()
    return torch.from_numpy(filled)


def _numbers(values: Any, kind: pa.DataType, rows: int, name: str) -> torch.Tensor:
    """Return bytes of fixed-width rows as a tensor of (rows, ...)."""
    shape: tuple[int, ...] | None = None
    order: Any = None
    if isinstance(kind, pa.FixedShapeTensorType):
        shape, order = tuple(kind.shape), kind.permutation
    kind = storage_type(kind)
    if pa.types.is_fixed_size_list(kind):
        tensor = _numbers(values, kind.value_type, rows * kind.list_size, name)
        tensor = tensor.reshape(rows, *(shape or (kind.list_size,)), *tensor.shape[1:])
        return tensor.permute(0, *(p + 1 for p in order)) if order else tensor
    flat = np.ascontiguousarray(values).reshape(-1)
    if not flat.flags.writeable:
        flat = flat.copy()
    dtype = number_dtype(kind)
    if dtype is not None:
        return torch.from_numpy(flat.view(dtype))
    if pa.types.is_decimal(kind):
        words = kind.bit_width // 32
        unscaled = flat.view(np.int32) if words == 1 else flat.view(np.int64)[:: words // 2]
        return torch.from_numpy(unscaled.astype(np.int64))
    return torch.from_numpy(flat.view(np.uint8)).reshape(rows, -1)


def _text(column: ColumnData, valid: Bools | None, fill: Any, bytes_: bool) -> Ragged:
    if valid is not None and fill is not None:
        array = to_arrow(ColumnData(column.form, column.values, valid)).fill_null(fill)
        column = from_arrow(array, column.form)
        valid = None
    rows = packed(_without(column, valid))
    return Ragged(_bytes_tensor(rows.data), torch.from_numpy(rows.ends), "bytes" if bytes_ else "str")


def _without(column: ColumnData, valid: Bools | None) -> ColumnData:
    """Return the column with null rows empty."""
    if valid is None:
        return column
    array = to_arrow(ColumnData(column.form, column.values, valid))
    kind = array.type
    if is_text(kind):
        return from_arrow(array.fill_null("" if not _is_binary(kind) else b""), column.form)
    ends = np.concatenate([[0], np.cumsum(np.where(valid, np.diff(array.offsets.to_numpy()), 0))])
    kept = array.flatten()
    list_type = pa.LargeListArray if pa.types.is_large_list(kind) else pa.ListArray
    offset_type = pa.int64() if pa.types.is_large_list(kind) else pa.int32()
    return from_arrow(list_type.from_arrays(pa.array(ends, offset_type), kept), column.form)


def _nested(array: pa.Array, kind: pa.DataType, name: str, nulls: Nulls, fill: Any) -> Value:
    """Return a struct, map or list of anything; nulls inside are filled if ``fill`` is given, else raise."""
    inside = Nulls(fill=((name, fill),)) if fill is not None else Nulls()
    if pa.types.is_struct(kind):
        names = [kind.field(i).name for i in range(kind.num_fields)]
        children = {}
        for child, column in zip(names, array.flatten(), strict=True):
            # the fields of a null struct are null, and the struct's own mask says so
            masked = array.null_count > 0 and column.null_count == array.null_count
            children[child] = _value(column, f"{name}.{child}", Nulls(mask=True) if masked else inside)
        return children
    if pa.types.is_map(kind):
        offsets = array.offsets.to_numpy().astype(np.int64)
        first, last = int(offsets[0]), int(offsets[-1])
        entries = {
            "key": _value(array.keys.slice(first, last - first), f"{name}.key", inside),
            "value": _value(array.items.slice(first, last - first), f"{name}.value", inside),
        }
        return Ragged(entries, torch.from_numpy(offsets - first))
    if pa.types.is_fixed_size_list(kind):
        array = array.cast(pa.list_(kind.value_type))
    lengths = np.asarray(array.value_lengths().fill_null(0).to_numpy(), np.int64)
    ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    return Ragged(_value(array.flatten(), name, inside), torch.from_numpy(ends))


def _value(array: pa.Array, name: str, nulls: Nulls) -> Value:
    return to_value(from_arrow(array, form_of(pa.field(name, array.type))), name, nulls)[0]


def _bytes_tensor(data: Any) -> torch.Tensor:
    return torch.from_numpy(data if data.flags.writeable else data.copy())


def _is_binary(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _no_tensor(name: str, kind: pa.DataType) -> UsageError:
    return UsageError(f"column {name!r}", f"it is {kind}, which has no tensor form", "leave it out with columns=")
