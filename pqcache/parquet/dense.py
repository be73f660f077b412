"""Dense columns: lists of numbers, all of one length, stored as fixed-length bytes.

In a Parquet list every value has repetition and definition levels, which take several times as long to decode as the
values. As FIXED_LEN_BYTE_ARRAY, a row is one value. The field's metadata describes the bytes:

================= =====================================================================================
``pqcache.dtype`` numpy's name of the numbers, as in ``uint16``; they are little-endian
``pqcache.shape`` a JSON list, as in ``[512]``
``pqcache.list``  the field as it was, as an Arrow schema of one field (IPC message, base64)
================= =====================================================================================
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.types as pt

from pqcache.errors import MALFORMED, ParquetError, UsageError
from pqcache.parquet.arrow import numpy_dtype

DTYPE, SHAPE, LIST = b"pqcache.dtype", b"pqcache.shape", b"pqcache.list"
_INTEGERS = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")  # the smallest first
_DTYPES = (*_INTEGERS, "float16", "float32", "float64")
_TEXT = re.compile(r"([a-z]+\d+)\[(\d{1,9})\]")
_MAX_WIDTH = 2**31 - 1  # a FIXED_LEN_BYTE_ARRAY's length is an i32

Numbers = npt.NDArray[Any]


@dataclass(frozen=True)
class Dense:
    """A row holds ``length`` numbers, stored as ``dtype``."""

    dtype: str
    length: int

    @property
    def width(self) -> int:
        return self.length * np.dtype(self.dtype).itemsize

    @property
    def text(self) -> str:
        """As written in options and metadata, like ``uint16[512]``."""
        return f"{self.dtype}[{self.length}]"


def parse_dense(text: str) -> Dense:
    """Parse a text like ``uint16[512]``; anything else raises UsageError."""
    match = _TEXT.fullmatch(text)
    if match is None or match[1] not in _DTYPES:
        raise UsageError(f"dense {text!r}", "write it like uint16[512]")
    return Dense(match[1], int(match[2]))


def item_dtype(kind: pa.DataType) -> str | None:
    """numpy's name for the items of a list of numbers, None for any other type."""
    is_list = pt.is_list(kind) or pt.is_large_list(kind) or pt.is_fixed_size_list(kind)
    if isinstance(kind, pa.BaseExtensionType) or not is_list:
        return None
    item = kind.value_type
    if not (pt.is_integer(item) or pt.is_floating(item)):
        return None
    return str(numpy_dtype(item).name)


def dense_of(field: pa.Field) -> Dense | None:
    if not pt.is_fixed_size_binary(field.type) or DTYPE not in (field.metadata or {}):
        return None
    try:
        (length,) = json.loads(field.metadata[SHAPE])
        found = parse_dense(f"{field.metadata[DTYPE].decode()}[{length}]")
    except MALFORMED:
        return None
    return found if found.width == field.type.byte_width else None


def dense_in(schema: pa.Schema) -> dict[str, Dense]:
    found = {field.name: dense_of(field) for field in schema}
    return {name: dense for name, dense in found.items() if dense is not None}


def is_alike(one: pa.Schema, other: pa.Schema) -> bool:
    """Whether schemas have equal columns, dense ones included, whatever other metadata they have."""
    return bool(one.equals(other)) and dense_in(one) == dense_in(other)


def common_dense(schemas: Sequence[pa.Schema]) -> dict[str, Dense]:
    """The columns that are dense, with the same dtype and length, in every schema.

    A file without the column disqualifies it, since its rows would be null.
    """
    found = [dense_in(schema) for schema in schemas]
    return {name: dense for name, dense in found[0].items() if all(known.get(name) == dense for known in found)}


def as_dense(field: pa.Field, dense: Dense) -> pa.Field:
    """The field of a list column stored as ``dense``.

    Raises:
        ParquetError: the column isn't a list of numbers, or ``dense`` can't hold them.
    """
    dtype = item_dtype(field.type)
    if dtype is None or np.dtype(dtype).kind not in ("iu" if dense.dtype in _INTEGERS else "f"):
        raise ParquetError(f"column {field.name!r}", f"{field.type} cannot be dense as {dense.text}")
    if not 0 < dense.width <= _MAX_WIDTH:
        raise ParquetError(f"column {field.name!r}", f"cannot be dense as {dense.text}: a row has 1 byte to 2 GB")
    known = pa.schema([field.remove_metadata()]).serialize().to_pybytes()
    about = {DTYPE: dense.dtype, SHAPE: json.dumps([dense.length]), LIST: base64.b64encode(known)}
    return pa.field(field.name, pa.binary(dense.width), field.nullable, {**(field.metadata or {}), **about})


def as_list(field: pa.Field) -> pa.Field:
    """The field before it was stored dense; any other field as it is."""
    dense = dense_of(field)
    if dense is None:
        return field
    metadata = {key: value for key, value in field.metadata.items() if key not in (DTYPE, SHAPE, LIST)}
    kind = pa.list_(pa.from_numpy_dtype(dense.dtype))
    try:
        (before,) = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(field.metadata[LIST], validate=True)))
        if item_dtype(before.type) is not None:
            kind = before.type
    except (KeyError, ValueError, OSError, pa.ArrowException, binascii.Error):
        pass  # dtype and shape suffice for the values
    return pa.field(field.name, kind, field.nullable, metadata or None)


def as_lists(schema: pa.Schema) -> pa.Schema:
    return pa.schema([as_list(field) for field in schema], schema.metadata)


def with_dense_columns(schema: pa.Schema, dense: Mapping[str, Dense]) -> pa.Schema:
    """Apply `as_dense` to the columns named in ``dense``."""
    fields = [as_dense(field, dense[field.name]) if field.name in dense else field for field in schema]
    return pa.schema(fields, schema.metadata)


def dense_to_lists(array: pa.Array, dense: Dense, kind: pa.DataType) -> pa.Array:
    item = kind.value_type
    numbers = _numbers_in_dense(array, dense)
    items = pa.array(numbers.astype(numpy_dtype(item), copy=False), item)
    valid = None
    if array.null_count:
        valid = pa.py_buffer(np.packbits(array.is_valid().to_numpy(zero_copy_only=False), bitorder="little"))
    if pt.is_fixed_size_list(kind):
        return pa.Array.from_buffers(kind, len(array), [valid], children=[items])
    offsets = np.arange(len(array) + 1, dtype=np.int64) * dense.length
    if pt.is_list(kind):
        if offsets[-1] >= 2**31:
            raise pa.ArrowInvalid("more than 2**31 numbers in one piece")
        offsets = offsets.astype(np.int32)
    return pa.Array.from_buffers(kind, len(array), [valid, pa.py_buffer(offsets)], children=[items])


def _numbers_in_dense(array: pa.Array, dense: Dense) -> Numbers:
    data = array.buffers()[1]
    if data is None:
        return np.zeros(len(array) * dense.length, dense.dtype)
    size = len(array) * dense.width
    return np.frombuffer(data, np.uint8, size, array.offset * dense.width).view(dense.dtype)


class NotDense(ValueError):
    """A row doesn't fit a dense column; ``row`` is its position in the array."""

    def __init__(self, row: int, why: str) -> None:
        super().__init__(why)
        self.row = row


def numbers_in_lists(array: pa.Array, length: int) -> Numbers:
    """The numbers of lists of ``length`` items; raises `NotDense` for a list of another length."""
    rows = len(array)
    if array.null_count:
        raise NotDense(int(np.argmin(array.is_valid().to_numpy(zero_copy_only=False))), "is null")
    if pt.is_fixed_size_list(array.type):
        size = array.type.list_size
        if rows and size != length:
            raise NotDense(0, f"has {size:,} numbers instead of {length:,}")
        start = array.offset * size
    else:
        ends = array.offsets.to_numpy()
        lengths = np.diff(ends)
        if np.any(lengths != length):
            row = int(np.argmax(lengths != length))
            raise NotDense(row, f"has {lengths[row]:,} numbers instead of {length:,}")
        start = int(ends[0]) if rows else 0
    items = array.values.slice(start, rows * length)
    if items.null_count:
        row = int(np.argmin(items.is_valid().to_numpy(zero_copy_only=False))) // length
        raise NotDense(row, "has a null among its numbers")
    numbers: Numbers = items.to_numpy(zero_copy_only=False)
    return numbers


def numbers_to_dense(numbers: Numbers, dense: Dense) -> pa.Array:
    """Store numbers as rows of ``dense``; raises `NotDense` for a number outside its dtype."""
    dtype = np.dtype(dense.dtype)
    if numbers.dtype != dtype:
        if dtype.kind in "iu" and len(numbers):
            info = np.iinfo(dtype)
            if int(numbers.min()) < info.min or int(numbers.max()) > info.max:
                # Compared as Python's integers: numpy would compare int64 and uint64 as floats.
                position = next(i for i, n in enumerate(numbers.tolist()) if not info.min <= n <= info.max)
                raise NotDense(position // dense.length, f"has {numbers[position]}, which {dtype.name} cannot hold")
        numbers = numbers.astype(dtype)
    data = pa.py_buffer(np.ascontiguousarray(numbers))
    return pa.Array.from_buffers(pa.binary(dense.width), len(numbers) // dense.length, [None, data])


DenseChange = tuple[pa.Field, Dense | None]
"""A column as a file has it, and its dense type in the target; None for a list."""


def dense_changes(source: pa.Schema, target: pa.Schema, name: str) -> dict[str, DenseChange]:
    """The columns whose storage differs between ``source``, the schema of the file ``name``, and ``target``."""
    have, want = dense_in(source), dense_in(target)
    for column in want:
        if column not in source.names:
            raise ParquetError(
                name,
                f"has no column {column!r}, so its rows are null there and it can't be dense",
                "leave it out of --dense",
            )
    names = [name for name in source.names if have.get(name) != want.get(name) and name in target.names]
    return {name: (source.field(name), want.get(name)) for name in names}


def change_dense(table: pa.Table, columns: Mapping[str, DenseChange], name: str, first: int) -> pa.Table:
    """Change ``columns`` of ``table`` to their new storage.

    Raises `ParquetError` for a row that doesn't fit; ``first`` is the number of the first row in the file ``name``.
    """
    for column, (field, want) in columns.items():
        position = table.schema.get_field_index(column)
        have, before = dense_of(field), as_list(field)
        new = before if want is None else as_dense(before, want)
        parts, at = [], first
        for chunk in table.column(position).chunks:
            try:
                if have is not None and want is not None and have.length == want.length and not chunk.null_count:
                    parts.append(numbers_to_dense(_numbers_in_dense(chunk, have), want))
                    continue
                lists = chunk if have is None else dense_to_lists(chunk, have, before.type)
                parts.append(lists if want is None else numbers_to_dense(numbers_in_lists(lists, want.length), want))
            except NotDense as error:
                raise ParquetError(
                    name,
                    f"column {column!r}, row {at + error.row:,} {error}, so it cannot be dense as "
                    f"{(want.text if want else 'a list')}",
                    "leave it out of --dense, or repartition with a type that holds it",
                ) from None
            finally:
                at += len(chunk)
        table = table.set_column(position, new, pa.chunked_array(parts, new.type))
    return table


def smallest(low: int, high: int) -> str:
    """The smallest integer dtype for numbers from ``low`` to ``high``."""
    return next(name for name in _INTEGERS if np.iinfo(name).min <= low and high <= np.iinfo(name).max)
