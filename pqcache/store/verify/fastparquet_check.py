"""Read a file with fastparquet as well, an independent implementation, and compare the values.

fastparquet does not know every type and encoding. What it cannot read is reported, and is no damage.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import fastparquet
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pqcache.errors import first_line

_NANOSECONDS = {"s": 1_000_000_000, "ms": 1_000_000, "us": 1_000, "ns": 1}


def compare_engines(path: Path, schema: pa.Schema, seconds: float, report: Callable[..., None]) -> None:
    """Compare every column of every row group as the two implementations read it."""
    report(step="fastparquet", seconds=seconds)
    try:
        second = fastparquet.ParquetFile(str(path))
        row_groups = [second[i : i + 1] for i in range(len(second.row_groups))]
    except Exception as error:  # noqa: BLE001  whatever it raises says that it cannot read this
        for field in schema:
            report(unread=field.name, why=_why(error))
        return
    with pq.ParquetFile(path) as first:
        for field in schema:
            for group, row_group in enumerate(row_groups):
                report(step=[group, field.name], seconds=seconds)
                column = first.read_row_group(group, [field.name], use_threads=False)[field.name]
                try:
                    series = row_group.to_pandas(columns=[field.name], index=False)[field.name]
                    first_values, second_values = _comparable(column), _as_compared(series, column.type)
                except MemoryError:
                    raise
                except Exception as error:  # noqa: BLE001  as above
                    report(unread=field.name, why=_why(error))
                    break
                position = _first_difference(first_values, second_values)
                if position is not None:
                    report(
                        damage=f"fastparquet reads another value in row {position:,} of the row group",
                        row_group=group,
                        column=field.name,
                    )
                    break


def _comparable(column: pa.ChunkedArray) -> list[Any]:
    """pyarrow's values as both can represent them: numbers as bits, times as nanoseconds, None for null."""
    kind = column.type
    if pa.types.is_dictionary(kind):
        column = column.cast(kind.value_type)
        kind = column.type
    if pa.types.is_timestamp(kind):
        each = _NANOSECONDS[kind.unit]
        return [None if v is None else v * each for v in column.cast(pa.int64()).to_pylist()]
    if pa.types.is_date32(kind):
        return [None if v is None else v * 86_400_000_000_000 for v in column.cast(pa.int32()).to_pylist()]
    if pa.types.is_fixed_size_binary(kind):
        return [None if v is None else v.rstrip(b"\0") for v in column.to_pylist()]  # numpy has no trailing zeros
    if pa.types.is_decimal(kind):
        return [None if v is None else float(v) for v in column.to_pylist()]
    if pa.types.is_floating(kind):
        return [None if v is None or v != v else v for v in column.to_pylist()]  # pandas' NaN is null as well
    if _is_plain(kind) or _is_plain_list(kind):
        return list(column.to_pylist())
    raise NotImplementedError(f"values of type {kind} are not compared")


def _as_compared(series: Any, kind: pa.DataType) -> list[Any]:
    """fastparquet's values in the same form."""
    if series.dtype.kind == "M":
        values = series.astype("datetime64[ns, UTC]" if series.dt.tz is not None else "datetime64[ns]")
        return [None if null else int(v) for v, null in zip(values.astype("int64"), series.isna(), strict=True)]
    found: list[Any] = []
    for value in series.astype(object):
        if isinstance(value, np.ndarray | list | tuple):
            found.append([_scalar(item) for item in value])
        else:
            found.append(_scalar(value))
    if pa.types.is_fixed_size_binary(kind):
        return [None if v is None else v.rstrip(b"\0") for v in found]
    return found


def _scalar(value: Any) -> Any:
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return None
    if isinstance(value, np.generic):
        value = value.item()
    return None if value != value else value


def _first_difference(first_values: list[Any], second_values: list[Any]) -> int | None:
    if len(first_values) != len(second_values):
        return min(len(first_values), len(second_values))
    return next(
        (i for i, (one, other) in enumerate(zip(first_values, second_values, strict=True)) if one != other), None
    )


def _is_plain(kind: pa.DataType) -> bool:
    tests = (pa.types.is_integer, pa.types.is_boolean, pa.types.is_string, pa.types.is_large_string)
    return any(test(kind) for test in (*tests, pa.types.is_binary, pa.types.is_large_binary))


def _is_plain_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind)) and _is_plain(kind.value_type)


def _why(error: BaseException) -> str:
    return f"{type(error).__name__}: {first_line(error)[:120]}"
