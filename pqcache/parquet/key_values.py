"""Key-value metadata of files that are merged or cut."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from pqcache.errors import MALFORMED
from pqcache.parquet.footer.source_footer import SourceFooter, one_of_each_schema

ARROW_SCHEMA = b"ARROW:schema"
PANDAS = b"pandas"
SPARK = b"org.apache.spark.sql.parquet.row.metadata"
SET_ASIDE = b"pqcache." + SPARK
_MAX_SHOWN = 60


def encode_schema(schema: pa.Schema) -> bytes:
    """Encode as in a footer under ``ARROW:schema``."""
    return base64.b64encode(schema.serialize().to_pybytes())


def decode_schema(value: bytes) -> pa.Schema | None:
    """Inverse of `encode_schema`; None for anything else."""
    try:
        schema = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(value)))
        sorted(schema.names)  # raises for a name that is not text
        return schema
    except (pa.ArrowException, OSError, ValueError):
        return None


@dataclass(frozen=True)
class RangeIndex:
    """A pandas RangeIndex over all rows."""

    start: int
    step: int


def _range_of(text: bytes | None) -> dict[str, Any] | None:
    """pandas' description of a RangeIndex, or None."""
    try:
        for column in json.loads(text or b"{}")["index_columns"]:
            if isinstance(column, dict) and column.get("kind") == "range":
                return column
    except MALFORMED:
        pass
    return None


def range_index(sources: Sequence[SourceFooter]) -> RangeIndex | None:
    """Return the RangeIndex of all rows of ``sources``, or None if their ranges do not continue one another."""
    begin: RangeIndex | None = None
    name, at = None, 0
    for source in sources:
        found = _range_of(source.key_values.get(PANDAS))
        try:
            start, stop, step = (int((found or {})[key]) for key in ("start", "stop", "step"))
        except (KeyError, TypeError, ValueError):
            return None
        assert found is not None
        if begin is None:
            begin, name, at = RangeIndex(start, step), found.get("name"), start
        rows = source.rows
        if (start, step, found.get("name")) != (at, begin.step, name) or len(range(start, stop, step or 1)) != rows:
            return None
        at += rows * step
    return begin


def with_range(
    metadata: Mapping[bytes, bytes | None], index: RangeIndex | None, first: int, rows: int
) -> Mapping[bytes, bytes | None]:
    """Return ``metadata`` with pandas' RangeIndex for ``rows`` rows from ``first`` on.

    Without an ``index`` the description is dropped, and pandas counts from 0.
    """
    text = metadata.get(PANDAS)
    found = _range_of(text)
    if found is None or text is None:
        return metadata
    about = json.loads(text)
    others = [column for column in about["index_columns"] if column != found]
    new: list[Any] = others
    if index is not None:
        start = index.start + first * index.step
        new = [{**found, "start": start, "stop": start + rows * index.step, "step": index.step}]
        if new[0] == found:
            return metadata
        new = [*new, *others]
    return {**metadata, PANDAS: json.dumps({**about, "index_columns": new}).encode()}


def with_spark(metadata: Mapping[bytes, bytes] | None, dense: bool, same: bool) -> dict[bytes, bytes] | None:
    """Return ``metadata`` with Spark's own schema set aside in a file with dense columns, and restored in others.

    Spark trusts its schema more than the file, and that schema has lists. It is dropped unless the types are the
    ``same`` as in its own file: Spark would fail on wider types and miss added columns.
    """
    if not metadata:
        return None
    old, new = (SPARK, SET_ASIDE) if dense else (SET_ASIDE, SPARK)
    found = dict(metadata)
    if not same:
        found.pop(SPARK, None)
        found.pop(SET_ASIDE, None)
    if old in found:
        found = {new: found.pop(old), **found}
    return found


def conflicts(sources: Sequence[SourceFooter]) -> list[str]:
    """Return a warning for each key-value on which two files disagree; the first file's is kept."""
    found: dict[bytes, str] = {}
    known: dict[bytes, tuple[SourceFooter, bytes]] = {}
    for source in one_of_each_schema(sources):  # others have the same key-values
        for key, value in source.key_values.items():
            if key == ARROW_SCHEMA:  # made anew for the schema of all
                continue
            first, before = known.setdefault(key, (source, value))
            if key not in found and _comparable(key, before) != _comparable(key, value):
                found[key] = (
                    f"{first.path} and {source.path}: key-value {key.decode('utf-8', 'replace')!r} differs "
                    f"({_shown(before)} and {_shown(value)}); the first one's is kept"
                )
    return list(found.values())


def _comparable(key: bytes, value: bytes) -> Any:
    """The part of a key-value that must agree; pandas' range differs in every file."""
    if key == PANDAS and (found := _range_of(value)) is not None:
        about = json.loads(value)
        return {**about, "index_columns": [column for column in about["index_columns"] if column != found]}
    return value


def _shown(value: bytes) -> str:
    text = value.decode("utf-8", "replace")
    return repr(text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "...")
