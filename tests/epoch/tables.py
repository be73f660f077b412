"""The tables of the oracle, written by pyarrow, and their rows as pyarrow.parquet alone reads them.

``kinds`` has few rows and a column of every kind; ``wide`` has fewer columns and row groups of 8 MB, which are read in
pieces where memory is small, and whose lists and texts are long enough for whatever is done about those.
"""

from __future__ import annotations

import datetime as dt
import decimal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pqcache import Cache
from tests.epoch.forms import Nulls, Row, bare, form_for, values_for

PARTITIONS = {"day": pa.string(), "hour": pa.int64()}
NULL = "__HIVE_DEFAULT_PARTITION__"
INSIDE = [
    "list items null",
    "list of string null",
    "fixed list items null",
    "struct null",
    "map null",
    "list of struct",
]
PLACE = 1000  # a token is its document x PLACE, and its place in that


def every_kind(first: int, rows: int, group: int) -> pa.Table:
    """Return rows with ids from ``first``; dictionaries differ between row groups of ``group`` rows.

    The first row is one with a value in every column; nulls are at every level of the others.
    """
    ids = range(first, first + rows)
    moment = dt.datetime(2026, 11, 1, 12, 30, 15, 123456)

    def some(value: Any, every: int = 5) -> list[Any]:
        return [None if i % every == 3 else value(i) for i in ids]

    def lists(value: Any, lengths: list[int]) -> list[Any]:
        return [[value(i, k) for k in range(lengths[i % len(lengths)])] for i in ids]

    columns: dict[str, Any] = {"id": pa.array(ids, pa.int64())}
    for kind in (pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()):
        info = np.iinfo(kind.to_pandas_dtype())
        values = [int(info.max) - i if i % 2 else int(info.min) + i for i in range(100)]
        columns[str(kind)] = pa.array([values[i % 100] for i in ids], kind)
        columns[f"{kind} null"] = pa.array(some(lambda i, values=values: values[i % 100]), kind)
    for kind in (pa.float16(), pa.float32(), pa.float64()):
        numbers = [np.nan if i % 7 == 2 else -0.0 if i % 7 == 4 else np.inf if i % 31 == 5 else i / 8 for i in ids]
        columns[str(kind)] = pa.array(np.array(numbers, kind.to_pandas_dtype()))
        columns[f"{kind} null"] = pa.array(
            np.array(numbers, kind.to_pandas_dtype()), mask=np.array([i % 5 == 3 for i in ids])
        )
    columns["bool"] = pa.array([i % 3 == 0 for i in ids])
    columns["bool null"] = pa.array(some(lambda i: i % 3 == 0))
    columns["decimal"] = pa.array([decimal.Decimal(i - 40) / 100 for i in ids], pa.decimal128(12, 2))
    columns["decimal null"] = pa.array(some(lambda i: decimal.Decimal(i) / 1000), pa.decimal128(9, 3))
    columns["decimal long"] = pa.array([decimal.Decimal(i - 7) * 10**15 for i in ids], pa.decimal128(38, 0))
    columns["decimal256"] = pa.array([decimal.Decimal(i) for i in ids], pa.decimal256(60, 0))
    columns["date"] = pa.array([dt.date(1969, 12, 20) + dt.timedelta(i) for i in ids])
    columns["date null"] = pa.array(some(lambda i: dt.date(2026, 1, 1 + i % 28)), pa.date32())
    columns["date64"] = pa.array([dt.date(2026, 1, 1 + i % 28) for i in ids], pa.date64())
    columns["time32"] = pa.array([i * 1000 for i in ids], pa.time32("ms"))
    columns["time64"] = pa.array(some(lambda i: i * 1001), pa.time64("us"))
    columns["time ns"] = pa.array([i * 1001 for i in ids], pa.time64("ns"))
    columns["duration"] = pa.array(some(lambda i: i), pa.duration("us"))
    for unit in ("ms", "us", "ns"):
        exact = pa.array([moment + dt.timedelta(milliseconds=i) for i in ids], pa.timestamp("us"))
        columns[f"timestamp {unit}"] = exact.cast(pa.timestamp(unit), safe=False)
    columns["zoned"] = pa.array(some(lambda i: moment + dt.timedelta(hours=i)), pa.timestamp("us", "Asia/Seoul"))
    columns["utc"] = pa.array([moment + dt.timedelta(hours=i) for i in ids], pa.timestamp("us", "UTC"))

    texts = ["", "ü" * 5, "a", "text of more than twelve bytes", "x" * 30]
    columns["string"] = pa.array([texts[i % 5] + str(i % 11) * (i % 3) for i in ids])
    columns["string null"] = pa.array(some(lambda i: f"row {i}"))
    columns["string long"] = pa.array(["" if i % 4 else f"{i} " * 700 for i in ids])
    columns["large_string"] = pa.array(some(lambda i: f"{i}" * (i % 7)), pa.large_string())
    columns["string_view"] = pa.array(some(lambda i: f"{i}" * (i % 9)), pa.string_view())
    columns["binary"] = pa.array([bytes([i % 256]) * (i % 40) for i in ids])
    columns["large_binary"] = pa.array(some(lambda i: bytes([0, i % 256]) * (i % 4)), pa.large_binary())
    columns["binary_view"] = pa.array([bytes([i % 256, 0]) * (i % 13) for i in ids], pa.binary_view())
    columns["fixed binary"] = pa.array([i.to_bytes(5, "big") for i in ids], pa.binary(5))
    columns["fixed binary null"] = pa.array(some(lambda i: i.to_bytes(16, "big")), pa.binary(16))
    uuids = pa.array([i.to_bytes(16, "little") for i in ids], pa.binary(16))
    columns["uuid"] = pa.ExtensionArray.from_storage(pa.uuid(), uuids)
    words = pa.array([f"word {i // group} {i % 4}" for i in ids])
    columns["dictionary"] = words.dictionary_encode()
    columns["dictionary null"] = pa.array(some(lambda i: f"{i % group % 6}")).dictionary_encode()
    columns["dictionary of int"] = pa.array([i % 5 * 10 for i in ids], pa.int16()).dictionary_encode()

    columns["list"] = pa.array(lists(lambda i, k: i * 10 + k, [0, 1, 3, 0, 7]), pa.list_(pa.int32()))
    columns["list null"] = pa.array(some(lambda i: [i / 3] * (i % 4)), pa.list_(pa.float64()))
    columns["list items null"] = pa.array(
        [None if i % 11 == 7 else [None if k % 2 else i for k in range(i % 4)] for i in ids], pa.list_(pa.int16())
    )
    columns["list regular"] = pa.array(lists(lambda i, k: i + k / 4, [4]), pa.list_(pa.float32()))
    columns["list regular null"] = pa.array(some(lambda i: [i, -i, i]), pa.list_(pa.int64()))
    columns["list empty"] = pa.array([[] for _ in ids], pa.list_(pa.int32()))
    columns["large_list"] = pa.array(lists(lambda i, k: (i + k) % 60_000, [2, 0, 1]), pa.large_list(pa.uint16()))
    columns["list of bool"] = pa.array(lists(lambda i, k: (i + k) % 3 == 0, [0, 2, 9, 1]), pa.list_(pa.bool_()))
    columns["list of string"] = pa.array(lists(lambda i, k: f"{i}" * k, [3, 0, 1]), pa.list_(pa.string()))
    columns["list of string null"] = pa.array(
        some(lambda i: [None if k == 1 else f"{k}" for k in range(i % 4)]), pa.list_(pa.string())
    )
    columns["list of list"] = pa.array([[[i], [], [1, 2]][: i % 4] for i in ids], pa.list_(pa.list_(pa.int64())))
    columns["list of decimal"] = pa.array(
        lists(lambda i, k: decimal.Decimal(i - k) / 10, [1, 0, 2]), pa.list_(pa.decimal128(10, 1))
    )
    columns["list of timestamp"] = pa.array(
        lists(lambda i, k: moment + dt.timedelta(days=k), [1, 2, 0]), pa.list_(pa.timestamp("us", "UTC"))
    )
    columns["fixed list"] = pa.array([[i, i + 1, -i] for i in ids], pa.list_(pa.float32(), 3))
    columns["fixed list null"] = pa.array(some(lambda i: [i % 99, 1]), pa.list_(pa.int16(), 2))
    columns["fixed list items null"] = pa.array([[i, None if i % 6 == 5 else 4] for i in ids], pa.list_(pa.int64(), 2))
    columns["tensor"] = pa.FixedShapeTensorArray.from_numpy_ndarray(
        np.arange(first * 6, (first + rows) * 6, dtype=np.float32).reshape(rows, 2, 3)
    )
    columns["struct"] = pa.array([{"a": i, "b": {"c": f"{i}", "d": [i] * (i % 3)}} for i in ids])
    columns["struct null"] = pa.array(
        [None if i % 5 == 3 else {"x": None if i % 4 == 1 else i, "y": f"{i}"} for i in ids],
        pa.struct([("x", pa.int32()), ("y", pa.string())]),
    )
    columns["struct of nulls"] = pa.array(some(lambda i: {"a": i, "b": [i] * (i % 3)}))
    columns["map"] = pa.array(
        [[(f"k{i}{k}", i * k) for k in range(i % 3)] for i in ids], pa.map_(pa.string(), pa.int64())
    )
    columns["map null"] = pa.array(
        some(lambda i: [(k, None if k == 1 else f"{i}") for k in range(i % 4)]), pa.map_(pa.int8(), pa.string())
    )
    columns["list of struct"] = pa.array(
        [None if i % 9 == 3 else [{"u": i, "v": None if k else f"{i}"} for k in range(i % 3)] for i in ids],
        pa.list_(pa.struct([("u", pa.uint32()), ("v", pa.string())])),
    )

    columns["label"] = pa.array([i % 10 % 3 for i in ids], pa.int32())
    columns["weight"] = pa.array([(i * 7 % 5) / 2 for i in ids], pa.float64())
    columns["ts"] = pa.array([i + 20 * (i % 23 == 0) for i in ids], pa.int64())
    columns["user"] = pa.array([f"user {i % 3}" for i in ids])
    lengths = [3, 9, 0, 1, 14, 30, 5]
    columns["tokens"] = pa.array(lists(lambda i, k: i * PLACE + k, lengths), pa.list_(pa.int32()))
    columns["marks"] = pa.array(lists(lambda i, k: (i + k) % 97, lengths), pa.list_(pa.int8()))
    table = pa.table(columns)
    required = [field.with_nullable(False) if field.name == "id" else field for field in table.schema]
    return table.cast(pa.schema(required))


def fills_of(rows: pa.Table) -> dict[str, Any]:
    """Return a value for each column of ``rows`` that has nulls, and for what is null inside of them."""
    inside: dict[str, Any] = {
        "list items null.element": -7,
        "list of string null.element": "none",
        "fixed list items null.element": -8,
        "struct null.x": -9,
        "struct null.y": "no",
        "map null": "no",
        "list of struct": "no",
        "struct of nulls": 4,
    }
    fills = {path: value for path, value in inside.items() if path.partition(".")[0] in rows.column_names}
    for name in rows.column_names:
        kind = rows.schema.field(name).type
        if rows[name].null_count and not {name, f"{name}.x"} & fills.keys():
            fills[name] = _filling(getattr(kind, "value_type", kind))
    return fills


def _filling(kind: pa.DataType) -> Any:
    types = pa.types
    if types.is_string(kind) or types.is_large_string(kind):
        return "-"
    if types.is_binary(kind) or types.is_large_binary(kind):
        return b"--"
    if types.is_boolean(kind):
        return True
    return -1.5 if types.is_floating(kind) else 3


@dataclass(frozen=True)
class Source:
    """A dataset that is read, and its rows as pyarrow.parquet reads its files, in the order of their paths.

    ``path`` is a cache or a directory, and the files lie below ``root``.
    """

    path: Path
    root: Path

    @staticmethod
    def of_cache(path: Path) -> Source:
        """Return the current snapshot of a cache."""
        return Source(path, Cache.open(path).snapshot().path)

    @cached_property
    def files(self) -> list[Path]:
        """The files in path order."""
        found = [file.relative_to(self.root).as_posix() for file in self.root.glob("**/*.parquet")]
        return [self.root / file for file in sorted(found)]

    @cached_property
    def groups(self) -> list[range]:
        """The numbers of the rows of each row group."""
        sizes = [size for file in self.files for size in self.groups_of(file)]
        return [range(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)]

    def groups_of(self, file: Path) -> list[int]:
        """Return the rows of each row group of a file."""
        footer = pq.ParquetFile(file).metadata
        return [footer.row_group(number).num_rows for number in range(footer.num_row_groups)]

    @cached_property
    def rows(self) -> pa.Table:
        """All rows with their partition columns; dictionaries and views as their values."""
        parts = [self._read(file) for file in self.files]
        return pa.concat_tables(parts, promote_options="default").combine_chunks()

    @cached_property
    def _texts(self) -> dict[tuple[str, bool, str], list[str]]:
        return {}

    def rows_in(self, columns: Sequence[str] | None, nulls: Nulls | None = None) -> list[Row]:
        """Return the rows as texts: those of record batches, or with ``nulls`` those of tensors."""
        named = []
        for name in self.rows.column_names if columns is None else columns:
            column, fills = self.rows[name], nulls if isinstance(nulls, Mapping) else {}
            fills = {path: value for path, value in fills.items() if path.partition(".")[0] == name}
            key = name, nulls is None, str(fills)
            if key not in self._texts:
                values = bare(column).to_pylist() if nulls is None else values_for(column, name, fills)
                self._texts[key] = list(map(repr, values))
            named.append(self._texts[key])
            if nulls == "mask" and self.rows.schema.field(name).nullable:
                named.append(list(map(repr, column.is_valid().to_pylist())))
        return list(zip(*named, strict=True))

    def forms_in(self, columns: Sequence[str] | None, nulls: Nulls) -> dict[str, str]:
        """Return what each column is in a batch of tensors."""
        found = {}
        for name in self.rows.column_names if columns is None else columns:
            field = self.rows.schema.field(name)
            found[name] = form_for(field.type, self._length(name))
            if nulls == "mask" and field.nullable:
                found[f"{name}_mask"] = "bool"
        return found

    def _length(self, name: str) -> int | None:
        """Return the length of all lists of a column, if it is one."""
        column = self.rows[name]
        if column.null_count or not pa.types.is_list(column.type) or not pa.types.is_primitive(column.type.value_type):
            return None
        lengths = set(pc.list_value_length(column).to_pylist())
        return lengths.pop() or None if len(lengths) == 1 else None

    def _read(self, file: Path) -> pa.Table:
        table = pq.ParquetFile(file).read()
        for position, field in enumerate(table.schema):
            kind = _decoded(field.type)
            if kind != field.type:
                column = table.column(position).cast(kind)
                table = table.set_column(position, pa.field(field.name, kind, field.nullable), column)
        values = dict(part.split("=") for part in file.parent.relative_to(self.root).parts)
        for name, kind in PARTITIONS.items():
            if name in values:
                value = None if values[name] == NULL else pa.scalar(unquote(values[name])).cast(kind).as_py()
                table = table.append_column(name, pa.array([value] * len(table), kind))
        return table


def _decoded(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_dictionary(kind):
        return _decoded(kind.value_type)
    return {pa.string_view(): pa.string(), pa.binary_view(): pa.binary()}.get(kind, kind)


def write_kinds(root: Path, columns: Sequence[str] | None = None) -> Path:
    """Write 301 rows of every kind, or some columns of them, to files that differ in all that a writer chooses."""

    def write(path: str, first: int, rows: int, group: int, without: Sequence[str] = (), **how: Any) -> None:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        table = every_kind(first + 97, rows + 4, group).slice(3, rows)  # ids from 100 on
        table = table.select([name for name in columns or table.column_names if name not in without])
        pq.write_table(table, root / path, row_group_size=group, **how)

    few = ["decimal long", "decimal256"]  # whose tensors depend on what they hold
    floats = ["float", "double", "list regular.list.element"]
    write("day=2026-11-01/hour=8/a.parquet", 0, 120, 40, write_page_index=True, max_rows_per_page=13)
    plain: dict[str, Any] = {"compression": "zstd", "use_dictionary": False, "data_page_version": "2.0"}
    write("day=2026-11-01/hour=8/b.parquet", 120, 60, 25, **plain)
    write("day=2026-11-01/hour=9/none.parquet", 180, 0, 9)
    write("day=2026-11-02/hour=9/c.parquet", 180, 60, 60, compression="gzip", write_statistics=few, data_page_size=100)
    split = {"use_byte_stream_split": floats, "use_dictionary": ["string", "user", "dictionary"]}
    write(f"day=2026-11-02/hour={NULL}/d.parquet", 240, 60, 33, compression="none", write_page_index=True, **split)
    gone = ["int8 null", "list null", "struct null", "uint64 null"]
    write("day=2026-11-03%2F4/hour=10/e.parquet", 300, 1, 1, compression="lz4", without=gone)
    return root


FEW = ["id", "uint64 null", "string null", "list", "struct", "fixed list null", "dictionary", "list of string", "label"]


def write_narrow(root: Path) -> Path:
    """Write a few columns of the same rows."""
    return write_kinds(root, [*FEW, "weight", "ts", "user", "tokens", "marks", "tensor"])


def write_wide(root: Path, rows: int = 8_000) -> Path:
    """Write row groups of 8 MB: lists of one length and of several, and texts of up to 1,500 bytes."""
    root.mkdir()
    rng = np.random.default_rng(3)
    for number in range(2):
        ids = np.arange(number * rows, (number + 1) * rows)
        lengths = rng.integers(0, 60, rows)
        ends = pa.array(np.append(0, np.cumsum(lengths)), pa.int32())
        tokens = pa.array(np.repeat(ids * PLACE, lengths) + np.arange(lengths.sum()) % 50, pa.int32())
        vector = pa.array((np.repeat(ids, 256) + np.tile(np.arange(256), rows)).astype(np.float32))
        table = pa.table(
            {
                "id": ids,
                "label": ids % 97,
                "x": pa.array(ids / 7, mask=ids % 5 == 3),
                "tokens": pa.ListArray.from_arrays(ends, tokens),
                "vector": pa.ListArray.from_arrays(pa.array(np.arange(rows + 1) * 256, pa.int32()), vector),
                "text": pa.array([f"{i} " * int(i * 7 % 190) for i in ids]),
                "image": pa.array([bytes([i % 256]) * int(i * 13 % 1400) for i in ids]),
            }
        )
        pages = {"write_page_index": True, "max_rows_per_page": 200, "data_page_size": 30_000}  # of many sizes
        pq.write_table(table, root / f"{number}.parquet", row_group_size=rows // 2, **pages)
    return root
