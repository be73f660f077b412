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
time, timestamp, duration           int32 or int64 tensor in the unit that ``ds.schema`` says: the one that the
                                    cache has had from its first night, or the finest in a directory of files;
                                    zoned timestamps are UTC
decimal of up to 15 digits          float64 tensor: 12.34 is the double nearest to it
decimal of 16 digits and more       int64 tensor if the scale is 0 and all values fit by type or statistics; else
                                    an error that offers ``decimals="float64"`` (rounded to 15 to 17 digits),
                                    ``"unscaled"`` (int64: 12.34 is 1234 at the scale in ``ds.schema``) or
                                    ``"text"`` (a Ragged of str); each of these applies to all decimals
dictionary                          as its values
struct                              dict of its fields
map                                 Ragged of ``{"key": ..., "value": ...}``
=================================== =================================================================

Nulls inside a column are filled by path: ``user.age`` is a field of a struct, ``tags.element`` the items of a list,
``prices.value`` the values of a map.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from pqcache.errors import ParquetError, UsageError
from pqcache.parquet.arrow import is_text
from pqcache.reader.columns import Bools, Fill, Kind, fixed_values, kind_of, number_dtype, storage_type, validity_of
from pqcache.reader.read_plan import Bounds
from pqcache.torch.batch import Ragged, in_sequences

Value = torch.Tensor | Ragged | dict[str, Any]
_EXACT_DIGITS = 15  # held by every double
_INT64_DIGITS = 18
DECIMALS = ("float64", "unscaled", "text")


@dataclass(frozen=True)
class Conversion:
    """How values become tensors. Nulls raise (default), get a mask beside the column, or a value per column.

    ``fill`` maps columns, and paths inside them, to values. ``inherited`` is the value of the enclosing column, for
    fields and items without their own. ``inside`` marks a part of a column, which has no mask. ``decimals`` is one of
    DECIMALS; with None, the digits decide.
    """

    mask: bool = False
    fill: tuple[tuple[str, Any], ...] = ()
    inherited: Any = None
    inside: bool = False
    decimals: str | None = None

    @staticmethod
    def of(nulls: str | Mapping[str, Any], decimals: str | None = None) -> Conversion:
        """Check the options ``nulls`` and ``decimals``."""
        if decimals is not None and decimals not in DECIMALS:
            raise UsageError(f"decimals={decimals!r}", f"choose {', '.join(map(repr, DECIMALS))} or None")
        if isinstance(nulls, Mapping):
            return Conversion(fill=tuple(nulls.items()), decimals=decimals)
        if nulls not in ("error", "mask"):
            raise UsageError(f"nulls={nulls!r}", "choose 'error', 'mask' or a dict of column and fill value")
        return Conversion(mask=nulls == "mask", decimals=decimals)

    def fill_of(self, path: str) -> Any:
        return dict(self.fill).get(path, self.inherited)

    def fills_inside(self, path: str) -> bool:
        return any(name.startswith(f"{path}.") for name, _ in self.fill)


def mask_name(column: str) -> str:
    """The name of a column's mask, which is True where there is a value."""
    return f"{column}_mask"


def null_error(name: str, count: int, where: str, nulls: Conversion, fields: Sequence[str] = ()) -> ParquetError:
    """The error for ``count`` nulls in a column that ``nulls`` neither fills nor masks.

    ``fields`` are the paths of a struct's fields, to be filled in its place. Advises a mask only where one is possible:
    not for a part of a column, and not while other columns are filled.
    """
    values = ", ".join(f"{path!r}: VALUE" for path in fields or [name])
    mask = "" if nulls.inside or nulls.fill else "nulls='mask', or "
    return ParquetError(
        f"column {name!r}",
        f"it holds nulls ({count} in {where}), which a tensor cannot hold",
        f"pass {mask}nulls={{{values}}} to fill them, or leave the column out with columns=",
    )


def fills_when_decoded(nulls: Conversion, kinds: Mapping[str, Kind]) -> dict[str, Fill]:
    """The fills of columns of numbers and texts that are made at decoding, once for all batches.

    Other columns are filled batch by batch, and so are those with an invalid fill, which is only an error if there is a
    null.
    """
    found: dict[str, Fill] = {}
    values = dict(nulls.fill)
    for name, kind in kinds.items():
        bare, fill = kind.bare, values.get(name)
        if is_text(bare):
            if isinstance(fill, bytes if is_binary(bare) else str):
                with suppress(UnicodeEncodeError):
                    found[name] = fill if isinstance(fill, bytes) else fill.encode()
        elif fill is not None and not kind.length and (dtype := number_dtype(kind.type)) is not None:
            with suppress(UsageError):
                number = _number_of(fill, torch.from_numpy(np.zeros(0, dtype)).dtype, name)
                if not number.ndim:
                    found[name] = number.reshape(1)
    return found


def paths_in(name: str, kind: pa.DataType) -> Iterator[str]:
    """The paths at which nulls of a column can be filled: its own name, then those inside."""
    yield name
    for path, inner in _children(name, kind):
        yield from paths_in(path, inner)


def _children(name: str, kind: pa.DataType) -> list[tuple[str, pa.DataType]]:
    """The paths and types of fields or items, if there are any."""
    bare = storage_type(kind)
    if pa.types.is_struct(bare):
        return [(f"{name}.{field.name}", field.type) for field in bare.fields]
    if pa.types.is_map(bare):
        return [(f"{name}.key", bare.key_type), (f"{name}.value", bare.item_type)]
    if pa.types.is_nested(bare) and not pa.types.is_union(bare) and not pa.types.is_run_end_encoded(bare):
        return [(f"{name}.element", bare.value_type)]
    return []


def check_type(name: str, kind: pa.DataType, decimals: str | None, bounds: Callable[[str], Bounds | None]) -> None:
    """Raise UsageError if a type has no tensor form; ``bounds`` returns the known extremes at a path."""
    bare = kind_of(pa.field(name, kind)).bare
    if pa.types.is_struct(bare):
        for field in bare.fields:
            check_type(f"{name}.{field.name}", field.type, decimals, bounds)
    elif pa.types.is_map(bare):
        check_type(f"{name}.key", bare.key_type, decimals, bounds)
        check_type(f"{name}.value", bare.item_type, decimals, bounds)
    elif pa.types.is_nested(bare):
        if pa.types.is_union(bare) or pa.types.is_run_end_encoded(bare):
            raise _no_tensor(name, kind)
        check_type(f"{name}.element", bare.value_type, decimals, bounds)
    elif pa.types.is_decimal(bare):
        if _decimal_form(bare, decimals) == "int64":
            _check_int64(name, bare, decimals, bounds)
    elif pa.types.is_null(bare):
        raise UsageError(
            f"column {name!r}",
            "it has no type: its values are null, or of a type that pqcache does not read, like INTERVAL",
            "leave it out with columns=, or write it with a type",
        )
    elif not (is_text(bare) or pa.types.is_fixed_size_binary(bare) or number_dtype(bare) is not None):
        raise _no_tensor(name, kind)


def _decimal_form(kind: pa.DataType, decimals: str | None) -> str:
    if decimals is None:
        return "float64" if kind.precision <= _EXACT_DIGITS else "int64"
    return "int64" if decimals == "unscaled" else decimals


def _check_int64(name: str, kind: pa.DataType, decimals: str | None, bounds: Callable[[str], Bounds | None]) -> None:
    """Raise UsageError unless an int64 holds all values of a column, as the same numbers."""
    others = "decimals='float64' (rounded) or 'text' (exact)"
    if decimals is None and kind.scale != 0:
        short = kind.precision <= _INT64_DIGITS
        others = "decimals='float64' (rounded), 'unscaled' (int64) or 'text' (exact)" if short else others
        reason = f"it is {kind}, and a float64 holds {_EXACT_DIGITS} digits exactly"
    elif kind.precision <= _INT64_DIGITS:
        return
    else:
        known = bounds(name)
        unit = Decimal(1).scaleb(-kind.scale)
        if known is not None and -(2**63) * unit <= known[0] and known[1] < 2**63 * unit:
            return
        found = "no statistics show that" if known is None else f"with {known[known[1] >= 2**63 * unit]}, not"
        reason = f"it is {kind}, and {found} all its values fit into an int64"
    raise UsageError(f"column {name!r}", reason, f"pass {others}, or leave it out with columns=")


def to_value(
    array: pa.Array, name: str, nulls: Conversion, length: int = 0, axis: int | None = None
) -> tuple[Value, torch.Tensor | None]:
    """A column as a tensor, Ragged or dict, and a bool mask (rows,) if some rows are null.

    Lists become rows of ``length`` if that is not 0. Rows of sequences are lists of ``axis`` values. Raises
    ParquetError for nulls that ``nulls`` neither fills nor masks.
    """
    if axis is not None:
        value, mask = to_value(array.flatten(), name, nulls, length)
        return in_sequences(value, axis), None if mask is None else in_sequences(mask, axis)
    declared, array = array.type, array.storage if isinstance(array, pa.ExtensionArray) else array
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    bare, fill = array.type, nulls.fill_of(name)
    valid = validity_of(array) if array.null_count else None
    is_filled_inside = pa.types.is_struct(bare) and nulls.fills_inside(name)
    if valid is not None and fill is None and not nulls.mask and not is_filled_inside:
        fields = [path for path, _ in _children(name, bare)] if pa.types.is_struct(bare) else ()
        raise null_error(name, int((~valid).sum()), "one batch", nulls, fields)
    mask = None if valid is None else torch.from_numpy(valid)
    if pa.types.is_decimal(bare) and _decimal_form(bare, nulls.decimals) == "text":
        array = array.cast(pa.string())
    if is_text(array.type):
        return _text(array, name, fill), mask
    if not pa.types.is_nested(bare):
        return _flat(array, valid, name, fill, nulls.decimals), mask
    if length and valid is None:
        items = _value(array.flatten(), f"{name}.element", nulls)
        if isinstance(items, torch.Tensor):
            return items.reshape(len(array), length, *items.shape[1:]), mask
    return _nested(array, declared, name, nulls, fill), mask


def _flat(array: pa.Array, valid: Bools | None, name: str, fill: Any, decimals: str | None) -> torch.Tensor:
    kind, values = array.type, fixed_values(array)
    assert values is not None
    values = np.ascontiguousarray(values)
    if valid is not None:  # the bytes behind nulls are arbitrary
        values = values.copy()
        values[~valid] = np.zeros(1, values.dtype)
    elif not values.flags.writeable:
        values = values.copy()
    flat = values.reshape(-1)
    if (dtype := number_dtype(kind)) is not None:
        tensor = torch.from_numpy(flat.view(dtype))
    elif not pa.types.is_decimal(kind):
        tensor = torch.from_numpy(flat.view(np.uint8).reshape(len(array), kind.byte_width))
    elif _decimal_form(kind, decimals) == "int64":
        tensor = torch.from_numpy(_unscaled(flat.view(np.uint8), kind, name))
    else:
        tensor = torch.from_numpy(_nearest_doubles(flat.view(np.uint8), kind, name))
    if valid is not None and fill is not None:
        tensor.numpy()[~valid] = _number_of(fill, tensor.dtype, name)  # torch cannot put values into unsigned tensors
    return tensor


def _number_of(fill: Any, dtype: torch.dtype, name: str) -> Any:
    """A fill value, or a list of them, as numbers of ``dtype``; UsageError if they don't fit."""
    try:
        value = torch.as_tensor(fill, dtype=dtype).numpy()
        if dtype.is_floating_point or np.array_equal(value, np.asarray(fill)):
            return value
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise _no_fill(name, fill, dtype) from error
    raise _no_fill(name, fill, dtype)


def _no_fill(name: str, fill: Any, kind: object) -> UsageError:
    return UsageError("nulls", f"{fill!r} is not a valid value for {name!r}, which is {kind}", "give one of its type")


def _unscaled(data: Any, kind: pa.DataType, name: str) -> Any:
    """Decimals as unscaled int64; ParquetError if one does not fit."""
    if kind.bit_width == 32:
        return data.view(np.int32).astype(np.int64)
    words = data.view(np.int64).reshape(-1, kind.bit_width // 64)
    if (words[:, 1:] != words[:, :1] >> 63).any():  # more than the sign
        advice = "pass decimals='float64' or 'text', or write the file again"
        raise ParquetError(f"column {name!r}", f"it is {kind} and holds values that no int64 does", advice)
    return words[:, 0].copy()


def _nearest_doubles(data: Any, kind: pa.DataType, name: str) -> Any:
    if kind.precision <= _EXACT_DIGITS:
        unscaled = _unscaled(data, kind, name)
        if not unscaled.size or int(np.abs(unscaled).max()) < 2**53:  # then a quotient of two exact doubles
            return unscaled / 10.0**kind.scale if kind.scale >= 0 else unscaled * 10.0**-kind.scale
    decimals = pa.Array.from_buffers(kind, len(data) // (kind.bit_width // 8), [None, pa.py_buffer(data)])
    return decimals.cast(pa.string()).cast(pa.float64()).to_numpy(zero_copy_only=False).copy()


def _shaped(lists: torch.Tensor, kind: pa.DataType) -> torch.Tensor:
    """Give lists of fixed size (rows, size, ...) the shape of a fixed-shape tensor type."""
    if not isinstance(kind, pa.FixedShapeTensorType):
        return lists
    tensor = lists.reshape(len(lists), *kind.shape, *lists.shape[2:])
    return tensor.permute(0, *(p + 1 for p in kind.permutation)) if kind.permutation else tensor


def _text(array: pa.Array, name: str, fill: Any) -> Ragged:
    """Pack texts end to end; nulls become ``fill``, or empty."""
    binary = is_binary(array.type)
    if array.null_count:
        empty: bytes | str = b"" if binary else ""
        if fill is not None and not isinstance(fill, type(empty)):
            raise _no_fill(name, fill, "binary" if binary else "text")
        try:
            array = array.fill_null(empty if fill is None else fill)
        except UnicodeEncodeError as error:
            raise _no_fill(name, fill, "text") from error
    large = pa.types.is_large_string(array.type) or pa.types.is_large_binary(array.type)
    _, ends, data = array.buffers()
    dtype = np.dtype(np.int64 if large else np.int32)
    found = (
        np.zeros(1, np.int64)
        if ends is None
        else np.frombuffer(ends, dtype, len(array) + 1, array.offset * dtype.itemsize)
    )
    first, last = int(found[0]), int(found[-1])
    packed = np.frombuffer(b"" if data is None else data, np.uint8, last - first, first)
    packed = packed if packed.flags.writeable else packed.copy()
    return Ragged(
        torch.from_numpy(packed), torch.from_numpy(found.astype(np.int64) - first), "bytes" if binary else "str"
    )


def _nested(array: pa.Array, kind: pa.DataType, name: str, nulls: Conversion, fill: Any) -> Value:
    """Convert a struct, map or list; raises for nulls inside it without a fill."""
    bare = storage_type(kind)
    inside = replace(nulls, mask=False, inherited=fill, inside=True)
    paths = [path for path, _ in _children(name, bare)]
    if pa.types.is_struct(bare):
        children = {}
        for field, path, column in zip(bare.fields, paths, array.flatten(), strict=True):
            # the fields of a null struct are null, and the struct's own mask says so
            masked = nulls.mask and array.null_count > 0 and column.null_count == array.null_count
            children[field.name] = _value(column, path, replace(inside, mask=masked))
        return children
    if pa.types.is_map(bare):
        offsets = array.offsets.to_numpy().astype(np.int64)
        first, last = int(offsets[0]), int(offsets[-1])
        both = (array.keys, array.items)
        key, value = (
            _value(items.slice(first, last - first), path, inside) for items, path in zip(both, paths, strict=True)
        )
        return Ragged({"key": key, "value": value}, torch.from_numpy(offsets - first))
    values = _value(array.flatten(), paths[0], inside)
    if pa.types.is_fixed_size_list(bare):
        if isinstance(values, torch.Tensor):
            return _of_fixed_size(array, kind, values, 0 if fill is None else _number_of(fill, values.dtype, name))
        lengths = np.where(np.asarray(array.is_valid()), bare.list_size, 0)
    else:
        lengths = np.asarray(array.value_lengths().fill_null(0).to_numpy(), np.int64)
    return Ragged(values, torch.from_numpy(np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])))


def _of_fixed_size(array: pa.Array, kind: pa.DataType, items: torch.Tensor, fill: Any) -> torch.Tensor:
    """Convert lists of fixed size, or tensors of fixed shape, from the ``items`` of those that aren't null."""
    size = storage_type(kind).list_size
    rows = items.numpy().reshape(len(array) - array.null_count, size, *items.shape[1:])
    if array.null_count:
        found = np.empty((len(array), *rows.shape[1:]), rows.dtype)
        found[:] = fill
        found[np.asarray(array.is_valid())] = rows
        rows = found
    return _shaped(torch.from_numpy(rows), kind)


def _value(array: pa.Array, name: str, nulls: Conversion) -> Value:
    return to_value(array, name, nulls)[0]


def is_binary(kind: pa.DataType) -> bool:
    """Whether texts of a type are bytes to users, not str."""
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _no_tensor(name: str, kind: pa.DataType) -> UsageError:
    return UsageError(f"column {name!r}", f"it is {kind}, which has no tensor form", "leave it out with columns=")
