"""The live files of a Delta table, as the log has them, and where each lies in a cache."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import date, datetime, timezone
from decimal import Decimal
from typing import Any
from urllib.parse import unquote

from pqcache.errors import SourceError, UsageError
from pqcache.store.drivers.base import FileShape
from pqcache.store.manifest import Identity, committed_tag
from pqcache.store.tables.delta_deletions import DeletionVector, ReadBytes
from pqcache.store.tables.delta_schema import DeltaSchema
from pqcache.store.tables.table import TableFile, cache_paths, digest, partition_path
from pqcache.store.urls import local_path, url_scheme

_ABSOLUTE = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*:/|/")
_OUTSIDE = re.compile(r"(^|/)(\.{0,2})(/|$)")  # of a path with a segment that is empty, "." or ".."


def table_files(
    url: str, adds: Any, schema: DeltaSchema, vectors: Mapping[str, Mapping[str, Any]], read: ReadBytes
) -> dict[str, TableFile]:
    """Return the files of a table by their paths in a cache.

    Args:
        url: the table's directory.
        adds: what ``DeltaTable.get_add_actions`` returns.
        schema: the table's.
        vectors: the deletion vectors that files have, by the file's path in the log.
        read: reads a deletion vector.
    """
    names = adds.schema.names
    paths: list[str] = adds.column("path").to_pylist()
    sizes, times = adds.column("size_bytes").to_pylist(), adds.column("modification_time").to_pylist()
    rows = adds.column("num_records").to_pylist() if vectors and "num_records" in names else []
    values = _partitions(url, adds) if schema.partitions else [{}] * len(paths)
    if len(set(paths)) < len(paths):
        twice = next(path for path in paths if paths.count(path) > 1)
        raise SourceError(f"{url}/{twice}", "is twice in the table", "check the table with the engine that wrote it")
    mapped = schema.in_files
    mapping = "" if mapped is None else digest(mapped if schema.mode != "none" else "")
    shape = None if mapped is None else FileShape(columns=mapped)
    directories = _Directories(url, schema)
    urls = [file_url_of(url, path) for path in paths]
    places = cache_paths((directories.path_of(row), where) for row, where in zip(values, urls, strict=True))
    files = {}
    for number, (place, path, where) in enumerate(zip(places, paths, urls, strict=True)):
        vector, of_file = None, shape
        if path in vectors:
            count = rows[number] if rows else None
            if count is None:
                reason = "has deleted rows, and the log does not say how many rows it has"
                raise SourceError(where, reason, "remove them for good: REORG TABLE ... APPLY (PURGE) in Spark")
            vector = DeletionVector(descriptor=vectors[path], rows_in_file=count, file=where, read=read)
            of_file = FileShape(columns=mapped, deleted_rows=vector.deleted_rows)
        tag = digest(path, "" if vector is None else vector.id, mapping)
        identity = Identity(sizes[number], times[number] * 1_000_000, committed_tag(tag, of_file is not None))
        files[place] = TableFile(path=place, url=where, identity=identity, shape=of_file)
    return files


def file_url_of(url: str, path: str) -> str:
    """Return where a file is that the log of the table ``url`` knows by ``path``, which is encoded as in a URL."""
    if not _ABSOLUTE.match(path):
        decoded = unquote(path) if "%" in path else path
        closed = f"/{decoded}/"
        if ("/." in closed or "//" in closed) and _OUTSIDE.search(decoded):  # two fast answers for nearly all paths
            reason = "is a path in the log of the table that leads out of it"
            raise SourceError(f"{url}/{path}", reason, "check the table with the engine that wrote it")
        return f"{url.rstrip('/')}/{decoded}"
    is_local = url_scheme(url) in ("", "file")
    if path[:5].lower() == "file:":
        if not is_local:
            reason = f"names a file of the machine that wrote it ({path}), and the table is elsewhere"
            raise SourceError(url, reason, "write the table again with the engine that it is from")
        return local_path(path if path[5:7] == "//" else f"file://{path[5:]}")
    return unquote(path) if is_local or not path.startswith("/") else f"{_authority(url)}{unquote(path)}"


def _authority(url: str) -> str:
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.partition('/')[0]}"


def _partitions(url: str, adds: Any) -> list[dict[str, Any]]:
    try:
        found: list[dict[str, Any]] = adds.column("partition").to_pylist()
    except (ValueError, OverflowError) as error:
        reason = f"a partition's value is a date or a time that Python cannot hold ({error})"
        raise UsageError(url, reason, "correct it with the engine that wrote the table") from error
    return found


class _Directories:
    """The Hive directories of partition values, which many files share."""

    def __init__(self, url: str, schema: DeltaSchema) -> None:
        self._url, self._names = url, schema.partitions
        self._known: dict[tuple[Any, ...], str] = {}

    def path_of(self, values: Mapping[str, Any]) -> str:
        """Return the directory of a file with these values."""
        key = tuple(values[name] for name in self._names)
        if key not in self._known:
            self._known[key] = partition_path(
                {name: partition_text(value) for name, value in zip(self._names, key, strict=True)}
            )
        return self._known[key]


def partition_text(value: Any) -> str | None:
    """Return a partition's value as text, from which Arrow makes the same value.

    >>> partition_text(True), partition_text(Decimal("1.50")), partition_text(date(2026, 11, 1))
    ('true', '1.50', '2026-11-01')
    """
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, datetime):
        if value.tzinfo is None:
            return value.isoformat(" ")
        return value.astimezone(timezone.utc).replace(tzinfo=None).isoformat(" ") + "Z"
    if isinstance(value, date):
        return value.isoformat()
    return f"{value:f}" if isinstance(value, Decimal) else repr(value)
