"""Which columns can be read from their pages, and how their values lie there and in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pqcache.parquet.numpy_types import numpy_dtype
from pqcache.parquet.schema_merge import is_text

_STORED: dict[str, np.dtype[Any]] = {
    "INT32": np.dtype("<i4"),
    "INT64": np.dtype("<i8"),
    "FLOAT": np.dtype("<f4"),
    "DOUBLE": np.dtype("<f8"),
}


@dataclass(frozen=True, kw_only=True)
class LeafColumn:
    """A column that may be read here: its number among the file's leaves, its values in a page and in memory.

    ``definition`` and ``repetition`` are the largest levels.
    """

    number: int
    stored: np.dtype[Any]
    held: np.dtype[Any]
    definition: int
    repetition: int


def leaf_of(metadata: pq.FileMetaData, name: str, kind: pa.DataType) -> LeafColumn | None:
    """Return the leaf of a top-level column of Arrow type ``kind``.

    That may be numbers, bytes of one width, lists of these, strings and binary. None is for what is not read here:
    other types, columns of several leaves and names that might be two things.
    """
    schema = metadata.schema
    paths = [schema.column(number).path for number in range(len(schema))]
    found = [number for number, path in enumerate(paths) if path == name or path.startswith(f"{name}.")]
    if len(found) != 1:
        return None
    column = schema.column(found[0])
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        kind = kind.value_type
    dtypes = _dtypes(column.physical_type, kind)
    if dtypes is None:
        return None
    stored, held = dtypes
    return LeafColumn(
        number=found[0],
        stored=stored,
        held=held,
        definition=column.max_definition_level,
        repetition=column.max_repetition_level,
    )


def _dtypes(physical: str, kind: pa.DataType) -> tuple[np.dtype[Any], np.dtype[Any]] | None:
    """Return how a value lies in a page, and how in memory."""
    if physical == "BYTE_ARRAY":
        return (np.dtype("V"), np.dtype("V")) if is_text(kind) else None
    if physical == "FIXED_LEN_BYTE_ARRAY":
        exact: np.dtype[Any] = np.dtype(f"V{kind.byte_width}" if pa.types.is_fixed_size_binary(kind) else "V")
        return (exact, exact) if exact.itemsize else None
    stored = _STORED.get(physical)
    if stored is None or not (pa.types.is_integer(kind) or pa.types.is_float32(kind) or pa.types.is_float64(kind)):
        return None
    held: np.dtype[Any] = numpy_dtype(kind)
    if (held.kind == "f") != (stored.kind == "f") or held.itemsize > stored.itemsize:
        return None
    return stored, held
