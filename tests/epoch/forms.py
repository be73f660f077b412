"""Rows as tuples of texts, one for each column: those of Arrow batches, of tensors, and what tensors have to hold.

A text is the ``repr`` of a Python value, so that NaN equals NaN, and -0.0, 0.0, 0 and False are four values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import torch

from pqcache.torch import Ragged

Row = tuple[str, ...]
Nulls = str | Mapping[str, Any]  # as ParquetDataset takes them


def bare(array: Any) -> Any:
    """Return an array (or column) whose times are their integers and whose extensions are what they store."""
    return array.cast(_bare_type(array.type)) if _bare_type(array.type) != array.type else array


def _bare_type(kind: pa.DataType) -> pa.DataType:
    types = pa.types
    if isinstance(kind, pa.BaseExtensionType):
        return _bare_type(kind.storage_type)
    if types.is_date32(kind) or types.is_time32(kind):
        return pa.int32()
    if types.is_temporal(kind):
        return pa.int64()
    if types.is_fixed_size_list(kind):
        return pa.list_(_bare_type(kind.value_type), kind.list_size)
    if types.is_list(kind):
        return pa.list_(_bare_type(kind.value_type))
    return kind


def arrow_rows(rows: pa.Table | pa.RecordBatch) -> list[Row]:
    """Return the rows of a table."""
    return list(zip(*(map(repr, bare(column).to_pylist()) for column in rows.columns), strict=True))


def tensor_rows(batch: Mapping[str, Any]) -> list[Row]:
    """Return the rows of a batch of tensors."""
    return list(zip(*(map(repr, values_of(column)) for column in batch.values()), strict=True))


def values_of(column: Any) -> list[Any]:
    """Return a tensor, a Ragged or a dict of these as a list of Python values."""
    if isinstance(column, dict):
        fields = [values_of(field) for field in column.values()]
        return [dict(zip(column, row, strict=True)) for row in zip(*fields, strict=True)]
    found: list[Any] = column.tolist() if isinstance(column, torch.Tensor) else column.to_list()
    return found


def form_of(column: Any) -> str:
    """Name what a column is in a batch: its dtypes, the shape of a row, and what is ragged."""
    if isinstance(column, torch.Tensor):
        assert column.is_contiguous() or column.ndim > 1
        return f"{str(column.dtype).removeprefix('torch.')}{list(column.shape[1:]) or ''}"
    if isinstance(column, dict):
        return "{" + ", ".join(f"{name}: {form_of(field)}" for name, field in column.items()) + "}"
    assert isinstance(column, Ragged)
    assert column.offsets.dtype == torch.int64
    assert column.offsets[0] == 0
    return column.kind if column.kind != "list" else f"lists of {form_of(column.values)}"


def form_for(kind: pa.DataType, length: int | None = None) -> str:
    """Return the form that docs/loading.md promises for a type; ``length`` is that of all lists of a column, if one."""
    types = pa.types
    if isinstance(kind, pa.FixedShapeTensorType):
        return f"{form_for(kind.value_type)}{list(kind.shape)}"
    if isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    if types.is_decimal(kind):
        return "float64" if kind.precision <= 15 else "int64"
    if types.is_string(kind) or types.is_large_string(kind):
        return "str"
    if types.is_binary(kind) or types.is_large_binary(kind):
        return "bytes"
    if types.is_fixed_size_binary(kind):
        return f"uint8[{kind.byte_width}]"
    if types.is_struct(kind):
        return "{" + ", ".join(f"{field.name}: {form_for(field.type)}" for field in kind) + "}"
    if types.is_map(kind):
        return f"lists of {{key: {form_for(kind.key_type)}, value: {form_for(kind.item_type)}}}"
    if types.is_fixed_size_list(kind):
        return f"{form_for(kind.value_type)}[{kind.list_size}]"
    if types.is_list(kind) or types.is_large_list(kind):
        item = form_for(kind.value_type)
        return f"lists of {item}" if length is None else f"{item}[{length}]"
    return {pa.float16(): "float16", pa.float32(): "float32", pa.float64(): "float64"}.get(kind, str(_bare_type(kind)))


def values_for(column: Any, path: str, fills: Mapping[str, Any]) -> list[Any]:
    """Return what a batch of tensors holds for the values of a column, nulls filled by path, else with nothing."""
    return [_value(value, column.type, path, fills, fills.get(path)) for value in bare(column).to_pylist()]


def _value(value: Any, kind: pa.DataType, path: str, fills: Mapping[str, Any], fill: Any) -> Any:
    types = pa.types
    fill = fills.get(path, fill)
    if isinstance(kind, pa.BaseExtensionType):
        if isinstance(kind, pa.FixedShapeTensorType):
            return torch.tensor(value).reshape(tuple(kind.shape)).tolist()
        kind = kind.storage_type
    if types.is_decimal(kind):
        value = fill if value is None else value
        return (float if kind.precision <= 15 else int)(value or 0)
    if types.is_fixed_size_binary(kind):
        return [fill or 0] * kind.byte_width if value is None else list(value)
    if types.is_struct(kind):
        fields = {field.name: None for field in kind} if value is None else value
        return {
            field.name: _value(fields[field.name], field.type, f"{path}.{field.name}", fills, fill) for field in kind
        }
    if types.is_map(kind):
        pair = ("key", kind.key_type), ("value", kind.item_type)
        return [
            {name: _value(item, of, f"{path}.{name}", fills, fill) for (name, of), item in zip(pair, both, strict=True)}
            for both in value or []
        ]
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        if value is None and types.is_fixed_size_list(kind):
            return [_value(None, kind.value_type, "", fills, fill)] * kind.list_size
        return [_value(item, kind.value_type, f"{path}.element", fills, fill) for item in value or []]
    if value is None:
        value = _NOTHING.get(form_for(kind), 0) if fill is None else fill
    return float(value) if types.is_floating(kind) else value


_NOTHING: dict[str, Any] = {"str": "", "bytes": b"", "bool": False}
