"""Makes small Parquet files as other writers leave them, and finds the real ones where they are present."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from pqcache.parquet import footer, thrift
from pqcache.parquet.thrift import I32, LIST, STRUCT, Items, Struct

ROOT = Path(__file__).resolve().parent.parent
CORPUS = Path(os.environ.get("PQCACHE_PARQUET_FILES") or ROOT / "no-files")
"""A directory with files of other writers, such as those of parquet-testing, that the user names."""


def golden_tables() -> Path:
    """Return the directory with other projects' tables that PQCACHE_GOLDEN_TABLES names, or one that is not there."""
    return Path(os.environ.get("PQCACHE_GOLDEN_TABLES") or ROOT / "no-golden-tables")


UNKNOWN: Struct = {10: (STRUCT, {11: (STRUCT, {})})}
"""The annotation with which parquet-mr writes INTERVAL since version 1.11; pyarrow reads nulls."""


def annotated(path: Path, column: str, fields: Struct) -> Path:
    """Give the first leaf called ``column`` other fields in the schema of the footer of ``path``."""
    data = path.read_bytes()
    tail = footer.read_local_tail(path)
    metadata = thrift.decode(tail.footer, str(path))
    schema = footer.schema_of(metadata, str(path))
    position = next(n for n, element in enumerate(schema) if element[4][1] == column.encode() and 1 in element)
    element = {field: entry for field, entry in schema[position].items() if field not in (6, 10)}
    schema[position] = dict(sorted({**element, **fields}.items()))
    metadata[2] = (LIST, Items(STRUCT, schema))
    path.write_bytes(data[: tail.limit] + footer.footer_and_magic(metadata))
    return path


def write_interval(path: Path, values: Sequence[bytes | None], statistics: bool = True) -> Path:
    """Write a column ``span`` of intervals as newer parquet-mr does, beside ``id``."""
    table = pa.table({"id": range(len(values)), "span": pa.array(values, pa.binary(12))})
    pq.write_table(table, path, store_schema=False, write_statistics=statistics)
    return annotated(path, "span", UNKNOWN)


def write_int96(path: Path, times: Sequence[datetime.datetime | int | None]) -> Path:
    """Write a column ``t`` of INT96 times, given as times or as microseconds from 1970, beside ``id``."""
    table = pa.table({"id": range(len(times)), "t": pa.array(times, pa.timestamp("us"))})
    pq.write_table(table, path, use_deprecated_int96_timestamps=True)
    return path


JULIAN_DAY_0 = -2_440_588 * 86_400_000_000
"""In microseconds from 1970."""


def _interval(path: Path) -> None:
    write_interval(path, [bytes(range(12)), None, bytes(12)])


def _interval_without_values(path: Path) -> None:
    write_interval(path, [None, None], statistics=False)


def _far_int96(path: Path) -> None:
    write_int96(path, [datetime.datetime(9999, 12, 31), None, datetime.datetime(1, 1, 1)])


def _int96_of_day_0(path: Path) -> None:
    write_int96(path, [JULIAN_DAY_0 + 17, 0])


def _number_with_length(path: Path) -> None:
    pq.write_table(pa.table({"n": pa.array(range(2_000), pa.int64())}), path, store_schema=False, compression="none")
    annotated(path, "n", {2: (I32, 64), 6: (I32, 18), 10: (STRUCT, {10: (STRUCT, {1: (3, 64), 2: (1, True)})})})


def _nested(path: Path) -> None:
    required = pa.struct([pa.field("x", pa.float32(), nullable=False)])
    columns = {
        "box": pa.array([{"x": 1.0}, {"x": 2.0}, None], required),
        "m": pa.array([[("k", 1)], [], None], pa.map_(pa.string(), pa.int64())),
        "l": pa.array([[{"a": [1]}], [], None], pa.list_(pa.struct([("a", pa.list_(pa.int8()))]))),
        "d": pa.array([Decimal("1.5"), Decimal("-2.5"), None], pa.decimal128(30, 2)),
        "n": pa.nulls(3),
    }
    pq.write_table(pa.table(columns), path)


MADE: Mapping[str, Callable[[Path], None]] = {
    "interval": _interval,
    "interval_without_values": _interval_without_values,
    "far_int96": _far_int96,
    "int96_of_day_0": _int96_of_day_0,
    "number_with_length": _number_with_length,
    "nested": _nested,
}
"""What writes each kind of file, by its name."""
