"""Hive partition paths and their values.

``dt=2026%2F11/region=kr/part-0.parquet`` has two partition columns. Hive percent-encodes characters that a path can't
contain, and writes a null as ``__HIVE_DEFAULT_PARTITION__``.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from decimal import Decimal
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING
from urllib.parse import unquote

from pqcache.errors import CHECK_TABLE, SourceError, TypeClash, UsageError
from pqcache.units import printable

if TYPE_CHECKING:
    import pyarrow as pa

NULL = "__HIVE_DEFAULT_PARTITION__"
_HIDDEN_SUFFIXES = (".crc", "._COPYING_", "_$folder$")
_INT64 = range(-(2**63), 2**63)
_INTEGER = re.compile(r"-?[0-9]{1,30}")
_NUMBER = re.compile(r"-?[0-9]{1,30}(\.[0-9]{1,30})?([eE][+-]?[0-9]{1,3})?")
TYPES = ("int", "float", "date", "timestamp", "text")  # that can be declared for partition columns


def is_hidden(name: str) -> bool:
    """Whether Hadoop's readers skip a file or directory with this name.

    As in Spark, ``_col=1`` is a partition, of a column whose name begins with an underscore. Hadoop on S3 marks
    directories by objects named ``NAME_$folder$``.
    """
    return name.startswith(".") or (name.startswith("_") and "=" not in name) or name.endswith(_HIDDEN_SUFFIXES)


@lru_cache(1 << 14)
def is_hidden_directory(directory: str) -> bool:
    """Whether readers skip a directory, or one above it."""
    return any(map(is_hidden, directory.split("/")))


def partition_values(directory: str) -> dict[str, str | None]:
    """The partition columns and decoded values in a directory path, outermost first.

    >>> partition_values("dt=2026%2F11/region=__HIVE_DEFAULT_PARTITION__")
    {'dt': '2026/11', 'region': None}
    """
    values: dict[str, str | None] = {}
    for segment in directory.split("/"):
        key, equals, value = segment.partition("=")
        if equals and key:
            values[unquote(key)] = None if value == NULL else unquote(value)
    return values


def infer_type(values: Iterable[str | None]) -> pa.DataType:
    """int64 if every value is an integer in its usual form, else string.

    ``007`` is a string, since the number has another path.
    """
    import pyarrow as pa

    present = [value for value in values if value is not None]
    return pa.int64() if present and all(map(_is_integer, present)) else pa.string()


def parse_types(types: Mapping[str, str] | None) -> dict[str, str]:
    """Check the declared types of partition columns; raises UsageError unless all are in TYPES."""
    if types and not isinstance(types, Mapping):
        raise UsageError(f"partition_types={types!r}", 'give a mapping, like {"hour": "int"}')
    for name, kind in dict(types or {}).items():
        if kind not in TYPES:
            raise UsageError(f"partition type {name}={kind}", "unknown type", f"choose one of {', '.join(TYPES)}")
    return dict(types or {})


def fits(value: str, kind: str) -> bool:
    """Whether a declared type can represent a partition value exactly.

    >>> fits("007", "int"), fits("0.5", "int"), fits("0.5", "float"), fits("2026-02-30", "date")
    (True, False, True, False)
    """
    if kind == "int":
        return _INTEGER.fullmatch(value) is not None and int(value) in _INT64
    if kind == "float":
        if not _NUMBER.fullmatch(value) or not math.isfinite(number := float(value)):
            return False
        return not number.is_integer() or Decimal(value) == int(number)
    if kind == "text":
        return True
    import pyarrow as pa

    try:
        pa.scalar(value).cast(_arrow_type(kind))
    except (pa.ArrowException, ValueError):
        return False
    return True


def partition_schema(
    directories: Iterable[str],
    declared: Mapping[str, str],
    table: pa.Schema | None = None,
    known: pa.Schema | None = None,
) -> tuple[pa.Schema, dict[str, dict[str, SourceError]]]:
    """Types of partition columns, and errors about values that don't fit, by directory and column.

    A declared type wins, then the table's, then one inferred before, in ``known``. Other types are inferred from all
    values; a column without values has none yet. Raises UsageError if a declared column doesn't exist.
    """
    import pyarrow as pa

    rows = {directory: partition_values(directory) for directory in directories}
    names = list(dict.fromkeys(name for row in rows.values() for name in row))
    for name, kind in declared.items():
        if name not in names:
            there = f"there are: {', '.join(names) or 'none'}"
            advice = f"{there}; --partition-types '' (partition_types={{}}) declares none"
            raise UsageError(f"partition type {name}={kind}", f"there is no partition column {name}", advice)
    fields: dict[str, pa.DataType] = {}
    misfits: dict[str, dict[str, SourceError]] = {}
    for name in names:
        values = {value for row in rows.values() if (value := row.get(name)) is not None}
        unfit: set[str] = set()
        if name in declared:
            fields[name] = _arrow_type(declared[name])
            unfit = {value for value in values if not fits(value, declared[name])}
        elif table is not None and name in table.names:
            fields[name] = table.field(name).type
        elif known is not None and name in known.names:
            fields[name] = known.field(name).type
            unfit = {value for value in values if not _is_integer(value)} if fields[name] == pa.int64() else set()
        elif values:
            fields[name] = infer_type(values)
        for directory in [directory for directory, row in rows.items() if row.get(name) in unfit] if unfit else ():
            error = _misfit(directory, name, rows[directory][name] or "", declared.get(name))
            misfits.setdefault(directory, {})[name] = error
    return pa.schema(list(fields.items())), misfits


def _misfit(directory: str, name: str, value: str, declared: str | None) -> SourceError:
    if declared is not None:
        reason = f"{value!r} is not {'an' if declared == 'int' else 'a'} {declared}, the type declared for {name}"
        advice = f"declare --partition-types {name}=text, which takes any value"
    elif fits(value, "int"):
        reason = f"{value!r} is not written as an integer is, which all values of {name} were until now"
        advice = f"declare --partition-types {name}=int to take it as {int(value)}"
    else:
        reason = f"{value!r} is not an integer, which all values of {name} were until now"
        advice = f"declare --partition-types {name}={'float' if fits(value, 'float') else 'text'}"
    return SourceError(f"partition {printable(directory)}", reason, advice)


def _arrow_type(kind: str) -> pa.DataType:
    import pyarrow as pa

    if kind == "timestamp":
        return pa.timestamp("us")
    return {"int": pa.int64, "float": pa.float64, "date": pa.date32, "text": pa.string}[kind]()


def with_hints(schema: pa.Schema, partitions: pa.Table, declarable: bool = True) -> pa.Schema:
    """Describe the values of text partition columns in a schema for conditions.

    ``type`` is the number type that can be declared for ``declarable`` columns, ``width`` is set if all values are
    equally long, and ``except`` is a value that isn't a number. If no value is a number, ``like`` is one of them.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    from pqcache.filters.expression import HINTS

    for name in partitions.column_names:
        number = schema.get_field_index(name)
        if number < 0 or partitions.schema.field(name).type != pa.string():
            continue
        values = [value for value in pc.unique(partitions[name]).to_pylist() if value is not None]
        kinds = {value: next((kind for kind in ("int", "float") if fits(value, kind)), "") for value in values}
        numbers = {kind for kind in kinds.values() if kind}
        if not numbers:
            if values:
                schema = schema.set(
                    number, schema.field(number).with_metadata({HINTS: json.dumps({"like": values[0]})})
                )
            continue
        hints: dict[str, str | int] = {"type": "float" if "float" in numbers else "int"} if declarable else {}
        if len(widths := set(map(len, values))) == 1:
            hints["width"] = widths.pop()
        if (odd := next((value for value, kind in kinds.items() if not kind), None)) is not None:
            hints["except"] = odd
        schema = schema.set(number, schema.field(number).with_metadata({HINTS: json.dumps(hints)}))
    return schema


def partition_table(
    directories: Sequence[str],
    schema: pa.Schema | None = None,
    misfits: Mapping[str, Collection[str]] = MappingProxyType({}),
) -> pa.Table:
    """One row per directory and one column per partition column.

    Types are those in ``schema``, of a table, or else inferred from all values. A directory without one of the columns
    has a null in it, and in the columns named for it in ``misfits``. Raises SourceError for a value that doesn't fit
    its type.
    """
    import pyarrow as pa

    rows = [partition_values(directory) for directory in directories]
    names = list(dict.fromkeys(name for row in rows for name in row))
    for directory, row in zip(directories, rows, strict=True) if misfits else ():
        row.update(dict.fromkeys(misfits.get(directory, ())))
    columns = {}
    for name in names:
        values = [row.get(name) for row in rows]
        kind = infer_type(values)
        if schema is not None and name in schema.names:
            columns[name] = _typed(values, schema.field(name).type, name)
        elif pa.types.is_integer(kind):
            columns[name] = pa.array([None if v is None else int(v) for v in values], kind)
        else:
            columns[name] = pa.array(values, kind)
    if not columns:  # a table without columns cannot say how many rows it has
        return pa.table({"": pa.nulls(len(rows))}).select([])
    return pa.table(columns)


def _typed(values: Sequence[str | None], kind: pa.DataType, name: str) -> pa.Array:
    import pyarrow as pa

    try:
        if kind == pa.int64() and all(value is None or _INTEGER.fullmatch(value) for value in values):
            return pa.array([None if value is None else int(value) for value in values], kind)
        return pa.array(values, pa.string()).cast(kind)
    except (pa.ArrowException, OverflowError) as error:
        reason = f"is {kind} in the table, and a value in a path is not ({error})"
        raise SourceError(f"column {name!r}", reason, CHECK_TABLE) from error


def partitions_of(paths: Sequence[str], schema: pa.Schema | None = None) -> pa.Table:
    """One row per file and one column per partition column; ``schema`` is that of `partition_table`."""
    import pyarrow as pa

    directories = [parent(path) for path in paths]
    position = {directory: i for i, directory in enumerate(dict.fromkeys(directories))}
    table = partition_table(list(position), schema)
    if not table.num_columns:
        return partition_table([""] * len(paths))
    return table.take(pa.array([position[directory] for directory in directories], pa.int64()))


def partition_keys(paths: Iterable[str]) -> dict[str, str]:
    """Names of the partition columns in the paths of files, each with the first file that has it.

    Raises TypeClash if names differ only in case.
    """
    found: dict[str, str] = {}
    directories: set[str] = set()
    for path in paths:
        directory = parent(path)
        if directory not in directories:
            directories.add(directory)
            for key in partition_values(directory):
                found.setdefault(key, path)
    spellings: dict[str, str] = {}
    for key, path in found.items():
        if (other := spellings.setdefault(key.lower(), key)) != key:
            reason = f"partition column {key!r} differs only in case from {other!r} in {found[other]}"
            raise TypeClash(
                path,
                reason,
                "rename one of the two directories, or merge them with 'pqcache sync --ignore-case'",
                column=key,
                files=(path, found[other]),
                names=(key, other),
            )
    return found


def parent(path: str) -> str:
    """The directory of a path relative to the dataset; ``""`` for the dataset itself."""
    return path.rpartition("/")[0]


def _is_integer(value: str) -> bool:
    digits = value.removeprefix("-")
    return (
        digits.isascii() and digits.isdigit() and len(digits) < 20 and str(int(value)) == value and int(value) in _INT64
    )
