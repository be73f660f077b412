"""Hive partition paths and the values they stand for.

``dt=2026%2F11/region=kr/part-0.parquet`` has two partition columns: Hive percent-encodes what a path
cannot hold, and writes a null as ``__HIVE_DEFAULT_PARTITION__``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING
from urllib.parse import unquote

from pqcache.errors import SourceError, TypeClash

if TYPE_CHECKING:
    import pyarrow as pa

NULL = "__HIVE_DEFAULT_PARTITION__"
_HIDDEN_SUFFIXES = (".crc", "._COPYING_", "_$folder$")
_INT64 = range(-(2**63), 2**63)


def is_hidden(name: str) -> bool:
    """Return whether Hadoop's readers skip a file or directory of this name.

    As in Spark, ``_col=1`` is a partition of a column whose name begins with an underscore. Hadoop on S3 marks
    directories by objects named ``NAME_$folder$``.
    """
    return name.startswith(".") or (name.startswith("_") and "=" not in name) or name.endswith(_HIDDEN_SUFFIXES)


@lru_cache(1 << 14)
def is_hidden_directory(directory: str) -> bool:
    """Return whether readers skip a directory, relative to the dataset, or one that it lies in."""
    return any(map(is_hidden, directory.split("/")))


def partition_values(directory: str) -> dict[str, str | None]:
    """Return the partition columns and decoded values in a directory path, outermost first.

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
    """Return int64 when every value is an integer in its usual form, else string.

    ``007`` is a string: as a number it could not be written back as the same path.
    """
    import pyarrow as pa

    present = [value for value in values if value is not None]
    return pa.int64() if present and all(map(_is_integer, present)) else pa.string()


def partition_table(directories: Sequence[str], schema: pa.Schema | None = None) -> pa.Table:
    """Return one row per directory and one column per partition column.

    Types are those in ``schema``, that of a table; of columns that are not in it they are inferred from all values.
    A directory that lacks one of the columns has a null there. A value that is none of its type raises SourceError.
    """
    import pyarrow as pa

    rows = [partition_values(directory) for directory in directories]
    names = list(dict.fromkeys(name for row in rows for name in row))
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
        return pa.array(values, pa.string()).cast(kind)
    except pa.ArrowException as error:
        reason = f"is {kind} in the table, and a value in a path is not ({error})"
        raise SourceError(f"column {name!r}", reason, "check the table with the engine that wrote it") from error


def partitions_of(paths: Sequence[str], schema: pa.Schema | None = None) -> pa.Table:
    """Return one row per file and one column per partition column; ``schema`` is as for `partition_table`."""
    import pyarrow as pa

    directories = [parent(path) for path in paths]
    position = {directory: i for i, directory in enumerate(dict.fromkeys(directories))}
    table = partition_table(list(position), schema)
    if not table.num_columns:
        return partition_table([""] * len(paths))
    return table.take(pa.array([position[directory] for directory in directories], pa.int64()))


def partition_keys(paths: Iterable[str]) -> dict[str, str]:
    """Return the names of the partition columns in the paths of files, each with the first file that has it.

    Names that differ only in case raise TypeClash.
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
    """Return the directory of a file path relative to the dataset; the dataset itself is ``""``."""
    return path.rpartition("/")[0]


def _is_integer(value: str) -> bool:
    digits = value.removeprefix("-")
    return (
        digits.isascii() and digits.isdigit() and len(digits) < 20 and str(int(value)) == value and int(value) in _INT64
    )
