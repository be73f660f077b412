"""Delta tables: deltalake reads the log of one version from a copy, or from links if it is on this machine."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import astuple, dataclass
from datetime import date, datetime, timezone
from decimal import Decimal
from functools import cache, partial
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable, Schema

from pqcache.errors import (
    CHECK_TABLE,
    MALFORMED,
    ParquetError,
    PqcacheError,
    SourceError,
    SourceNotFound,
    SourceUnavailable,
    UsageError,
    disk_errors,
    first_line,
)
from pqcache.parquet.projection import ColumnKind, TableColumn
from pqcache.store.drivers.base import FileShape, Source
from pqcache.store.manifest import Identity, SourceFile, TableVersion, committed_tag
from pqcache.store.tables.base import (
    Commit,
    TableFile,
    TableListing,
    TableLog,
    cache_paths,
    digest,
    iso_time,
    partition_path,
)
from pqcache.store.tables.deletion_vector import ReadBytes, vector_of_delta
from pqcache.store.urls import is_local, local_path

LOG = "_delta_log"  # the log's directory in that of its table
SIDECARS = "_sidecars"  # directory of the parts of checkpoints that name them
_COMMIT = re.compile(r"(\d{20})\.json")
_WHOLE = re.compile(r"(\d{20})\.checkpoint\.parquet")
_PART = re.compile(r"(\d{20})\.checkpoint\.(\d{10})\.(\d{10})\.parquet")
_NAMED = re.compile(r"(\d{20})\.checkpoint\.[0-9a-f]{8}-[0-9a-f-]{27}\.(json|parquet)")
_NUMBER = re.compile(r"-?[0-9]+")
_DIGITS = 20  # of a version in the names of a log
_THREADS = 8
_PROCESS = os.getpid()  # that has deltalake's threads
_MAX_LOOKED_INTO = 1 << 26  # bytes of a file of a log that is looked into to name it
_ABSOLUTE = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*:/|/")
_OUTSIDE = re.compile(r"(^|/)(\.{0,2})(/|$)")  # of a path with a segment that is empty, "." or ".."
DELETION_VECTORS = "deletionVectors"
_READ_RIGHT = frozenset(
    {
        "columnMapping",
        DELETION_VECTORS,
        "timestampNtz",
        "typeWidening",
        "typeWidening-preview",
        "v2Checkpoint",
        "vacuumProtocolCheck",
    }
)
_MAX_READER_VERSION = 3
_MORE_COLUMNS = frozenset({"changeDataFeed", "rowTracking"})  # features with which files have columns of their own
PLAIN = "write it to plain Parquet with an engine that reads it, or take its files as they are with --as-files"
_KINDS = {"struct": ColumnKind.STRUCT, "array": ColumnKind.LIST, "map": ColumnKind.MAP}


def read_delta(table: TableLog, entries: Sequence[SourceFile]) -> TableListing:
    """List the files of the wanted version of a table; ``entries`` are the files of its log."""
    return _DeltaReader(table, entries, delta_log(entries)).read()


@dataclass(frozen=True)
class _DeltaReader:
    table: TableLog
    entries: Sequence[SourceFile]
    log: DeltaLog

    def read(self) -> TableListing:
        version = self._wanted()
        files = self.log.files_of(version)
        if files is None:
            raise SourceError(self.table.url, f"its log lacks commits before version {version}", CHECK_TABLE)
        temporary = tempfile.gettempdir()
        if unquote(temporary) != temporary:
            reason = "has an encoded character in its path, and deltalake cannot read the log of a Delta table there"
            raise UsageError(temporary, reason, "set TMPDIR to another directory")
        with ExitStack() as stack:
            with disk_errors(Path(temporary)):
                place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pqcache-delta-")))
                if _is_local(self.table.url):
                    link_log(Path(self.table.source.url), self.log, files, place / LOG)
                else:
                    copy_log(self.table, self.log, files, place / LOG)
            return self._listing_of(version, place)

    def _listing_of(self, version: int, place: Path) -> TableListing:
        """List a version, given a directory ``place`` with exactly its log files."""
        url = self.table.url
        with self._library():
            table = DeltaTable(str(place), version=version)
            protocol, columns, metadata = table.protocol(), table.schema(), table.metadata()
        features = protocol.reader_features or ()
        check_features(url, protocol.min_reader_version, features)
        schema = DeltaSchema(
            fields=json.loads(columns.to_json())["fields"],
            partitions=metadata.partition_columns,
            configuration=metadata.configuration,
            writer_features=protocol.writer_features or (),
        )
        check_schema(url, schema)
        with self._library():
            adds = table.get_add_actions()
            vectors = descriptors(place, version) if DELETION_VECTORS in features else {}
        in_log = schema.configuration.get("delta.enableInCommitTimestamps") == "true"
        return TableListing(
            files=table_files(url, adds, schema, vectors, self._bytes_of),
            version=TableVersion(
                format="Delta",
                version=str(version),
                time=iso_time(self._time_of(version, in_log)),
                schema_digest=digest(json.dumps(schema.fields, sort_keys=True)),  # the library's order is random
                load_schema=partial(_arrow_schema, columns),
            ),
            commits_since=partial(self._commits, version),
        )

    def _commits(self, version: int, before: str) -> list[Commit] | None:
        """The commits after the version ``before``, up to ``version``."""
        numbers = range(int(before) + 1, version + 1)
        if int(before) > version or not self.log.commits.keys() >= set(numbers):
            return None
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="pqcache-log") as threads:
            return list(threads.map(self._commit, numbers))

    def _commit(self, version: int) -> Commit:
        added: list[str] = []
        rewritten: dict[str, str] = {}
        removed: dict[str, str] = {}
        with self._commit_errors(version):
            for line in self.table.read(self.log.commits[version]).splitlines():
                for kind, action in json.loads(line or b"{}").items():
                    if kind == "add" and action["dataChange"]:
                        added.append(file_url_of(self.table.url, action["path"]))
                    elif kind in ("add", "remove") and not action["dataChange"]:
                        files = rewritten if kind == "add" else removed
                        values = json.dumps(action.get("partitionValues"), sort_keys=True)
                        files[file_url_of(self.table.url, action["path"])] = values
        return Commit(added=added, rewritten=rewritten, removed=removed)

    @contextmanager
    def _library(self) -> Iterator[None]:
        """Raise SourceError if the library cannot read the log."""
        try:
            yield
        except PqcacheError:
            raise
        except BaseException as error:  # the library raises many kinds
            is_panic = type(error).__name__ == "PanicException"
            if not isinstance(error, Exception) and not is_panic:
                raise
            if is_panic and os.getpid() != _PROCESS:
                reason = "deltalake cannot read its log in a process that was forked from one that has used it"
                raise SourceError(self.table.url, reason, "start that process with spawn or forkserver") from error
            reason = f"deltalake cannot read its log ({first_line(error)})"
            advice = PLAIN if "upported" in reason else CHECK_TABLE
            raise SourceError(self._damaged_file() or self.table.url, reason, advice) from error

    def _damaged_file(self) -> str | None:
        """The URL of the first log file that is neither JSON nor Parquet: the library's errors name no file."""
        for file in self.entries:
            if file.identity.size > _MAX_LOOKED_INTO:
                continue
            try:
                if file.path.endswith(".json"):
                    for line in self.table.read(file).splitlines():
                        json.loads(line or b"{}")
                elif ".checkpoint." in file.path:
                    pq.read_table(pa.BufferReader(self.table.read(file)))
            except (pa.ArrowException, OSError, ValueError, RecursionError):
                return self.table.source.url_of(file.path)
            except PqcacheError:
                break
        return None

    def _wanted(self) -> int:
        """The requested version; raises SourceNotFound if the log does not have it."""
        rule, newest = self.table.options.rule, self.log.newest()
        if newest is None:
            raise SourceNotFound(self.table.url, "its log has no version", CHECK_TABLE)
        if rule.version is not None:
            given = f"--version {rule.version}"
            if not _NUMBER.fullmatch(rule.version):
                raise UsageError(
                    given, "invalid version of a Delta table: expected a number", f"the newest is {newest}"
                )
            number = int(rule.version) if len(rule.version) <= _DIGITS else None
            return self._available(number, given)
        if rule.time_ns is None:
            return newest
        return self._available(self._version_at(rule.time_ns), f"--as-of {rule.as_of}")

    def _available(self, version: int | None, given: str) -> int:
        """Check that the log has ``version``, which was requested as ``given``."""
        first, last = self.log.oldest(), self.log.newest()
        if version is not None and (self.log.files_of(version) is not None or version in self.log.commits):
            return version
        have = "it has none"
        if first is not None and last is not None:
            times = [iso_time(self._time_of(number, in_log=True)) for number in (first, last)]
            have = f"it has {first} of {times[0]} to {last} of {times[1]}"
        reason = f"the log of {self.table.url} does not have that version: {have}"
        raise SourceNotFound(given, reason, "name one of these, or '' for the newest")

    def _version_at(self, time_ns: int) -> int | None:
        """None before the first version."""
        times = {version: file.identity.mtime_ns for version, file in self.log.commits.items()}
        if times and self._in_commit(max(times)) is not None:
            with ThreadPoolExecutor(_THREADS, thread_name_prefix="pqcache-log") as threads:
                in_commits = zip(times, threads.map(self._in_commit, times), strict=True)
                times |= {version: found for version, found in in_commits if found is not None}
        return self.log.version_at(time_ns, times)

    def _time_of(self, version: int, in_log: bool) -> int:
        """The time of a commit, in nanoseconds: from the commit, else from its file."""
        found = self._in_commit(version) if in_log and version in self.log.commits else None
        if found is not None:
            return found
        commits = self.log.commits
        return (commits[version] if version in commits else self.log.checkpoints[version][0]).identity.mtime_ns

    def _in_commit(self, version: int) -> int | None:
        """The time in a commit, in nanoseconds; None if it has none."""
        data = self.table.read(self.log.commits[version])
        with self._commit_errors(version):
            info = json.loads(data.partition(b"\n")[0]).get("commitInfo") or {}
            time = info.get("inCommitTimestamp")
            return None if time is None else int(time) * 1_000_000

    @contextmanager
    def _commit_errors(self, version: int) -> Iterator[None]:
        try:
            yield
        except MALFORMED as error:
            name = self.table.source.url_of(self.log.commits[version].path)
            raise SourceError(name, f"is not a valid commit ({first_line(error)})", CHECK_TABLE) from error

    def _bytes_of(self, path: str, offset: int, length: int) -> bytes:
        return self.table.files.read(file_url_of(self.table.url, path), offset, length)


def _arrow_schema(columns: Schema) -> bytes:
    """Serialize the columns as an Arrow schema without metadata."""
    schema = pa.schema(columns.to_arrow())
    return bytes(pa.schema([field.remove_metadata() for field in schema]).serialize())


def table_files(
    url: str, adds: Any, schema: DeltaSchema, vectors: Mapping[str, Mapping[str, Any]], read: ReadBytes
) -> dict[str, TableFile]:
    """Make the files of a table, by their paths in a cache.

    Args:
        url: the table's directory.
        adds: from ``DeltaTable.get_add_actions``.
        schema: the table's.
        vectors: deletion vectors, by the path of their file in the log.
        read: reads a deletion vector.
    """
    paths: list[str] = adds.column("path").to_pylist()
    sizes, times = adds.column("size_bytes").to_pylist(), adds.column("modification_time").to_pylist()
    values = _partitions(url, adds) if schema.partitions else [{}] * len(paths)
    if len(set(paths)) < len(paths):
        twice = next(path for path in paths if paths.count(path) > 1)
        raise SourceError(f"{url}/{twice}", "is listed twice in the table", CHECK_TABLE)
    mapped = schema.in_files
    mapping = "" if mapped is None else digest(mapped if schema.mode != "none" else "")
    shape = None if mapped is None else FileShape(columns=mapped)

    @cache
    def directory(values: tuple[Any, ...]) -> str:
        named = zip(schema.partitions, values, strict=True)
        return partition_path({name: partition_text(value) for name, value in named})

    directories = [directory(tuple(row[name] for name in schema.partitions)) for row in values]
    urls = [file_url_of(url, path) for path in paths]
    places = cache_paths(zip(directories, urls, strict=True))
    files = {}
    for place, path, where, size, time in zip(places, paths, urls, sizes, times, strict=True):
        vector = vector_of_delta(where, vectors[path]) if path in vectors else None
        of_file = shape if vector is None else FileShape(columns=mapped, deleted_rows=partial(vector.read, where, read))
        tag = digest(path, "" if vector is None else astuple(vector), mapping)
        identity = Identity(size, time * 1_000_000, committed_tag(tag, of_file is not None))
        files[place] = TableFile(path=place, url=where, identity=identity, shape=of_file)
    return files


def file_url_of(url: str, path: str) -> str:
    """The URL of a file of the table ``url``, by its ``path`` in the log, which is encoded as in a URL."""
    if not _ABSOLUTE.match(path):
        decoded = unquote(path) if "%" in path else path
        closed = f"/{decoded}/"
        if ("/." in closed or "//" in closed) and _OUTSIDE.search(decoded):  # two fast answers for nearly all paths
            reason = "is a path in the log of the table that leads out of it"
            raise SourceError(f"{url}/{path}", reason, CHECK_TABLE)
        return f"{url.rstrip('/')}/{decoded}"
    is_local = _is_local(url)
    if path[:5].lower() == "file:":
        if not is_local:
            reason = f"names a file of the machine that wrote it ({path}), and the table is elsewhere"
            raise SourceError(url, reason, "rewrite the table with its engine")
        return local_path(path if path[5:7] == "//" else f"file://{path[5:]}")
    return unquote(path) if is_local or not path.startswith("/") else f"{_authority(url)}{unquote(path)}"


def _is_local(url: str) -> bool:
    return is_local(url)


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


def partition_text(value: Any) -> str | None:
    """Write a partition's value as text that Arrow parses to the same value.

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


@dataclass(frozen=True, kw_only=True)
class DeltaSchema:
    """The schema of a Delta table, and its settings for readers.

    Attributes:
        fields: its columns, as the log has them.
        partitions: the names of the partition columns, outermost first.
        configuration: the table's properties.
        writer_features: the features used by its writers.
    """

    fields: Sequence[Mapping[str, Any]]
    partitions: Sequence[str]
    configuration: Mapping[str, str]
    writer_features: Collection[str]

    @property
    def mode(self) -> str:
        """How files identify columns: ``id``, ``name`` (by separate names), or ``none`` (by the table's names)."""
        return self.configuration.get("delta.columnMapping.mode") or "none"

    @property
    def in_files(self) -> tuple[TableColumn, ...] | None:
        """The columns as identified in files; None if files have exactly these, under the table's names."""
        change_data = self.configuration.get("delta.enableChangeDataFeed") == "true"
        if self.mode == "none" and not change_data and _MORE_COLUMNS.isdisjoint(self.writer_features):
            return None
        return tuple(_column(field, self.mode) for field in self.fields)


def check_features(url: str, version: int, features: Collection[str]) -> None:
    """Raise UsageError if a table needs a reader feature that pqcache does not have."""
    if version > _MAX_READER_VERSION:
        raise UsageError(url, f"is a Delta table of an unknown reader version, {version}", PLAIN)
    unknown = sorted(set(features) - _READ_RIGHT)
    if unknown:
        names = ", ".join(unknown)
        raise UsageError(url, f"is a Delta table with {names}, so its rows would be read wrongly", PLAIN)


def check_schema(url: str, schema: DeltaSchema) -> None:
    """Raise UsageError if a column's values would be wrong."""
    if schema.mode not in ("none", "name", "id"):
        raise UsageError(url, f"is a Delta table with an unknown kind of column mapping, {schema.mode!r}", PLAIN)
    for field in schema.fields:
        kind = field["type"]
        if field["name"] in schema.partitions and kind == "binary":
            raise UsageError(url, f"partition column {field['name']!r} is binary, which a path cannot hold", PLAIN)
        inside = list(_nested(field))
        if any(inner["type"] == "variant" for inner in inside):
            raise UsageError(url, f"column {field['name']!r} holds variants, which pqcache does not read", PLAIN)
        changes = (c for inner in inside for c in (inner.get("metadata") or {}).get("delta.typeChanges", ()))
        if any(change.get("toType") == "timestamp_ntz" for change in changes):
            reason = f"column {field['name']!r} was dates and is timestamps now, which old files are not read as"
            raise UsageError(url, reason, "rewrite the table with its engine")


def _nested(field: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield field
    for inner in _inside(field["type"]):
        yield from _nested(inner)


def _inside(kind: Any) -> Sequence[Mapping[str, Any]]:
    """The fields of a nested type; elements, keys and values are fields without metadata."""
    if isinstance(kind, str):
        return ()
    if kind["type"] == "struct":
        fields: Sequence[Mapping[str, Any]] = kind["fields"]
        return fields
    if kind["type"] == "array":
        return [{"name": "element", "type": kind["elementType"]}]
    return [{"name": "key", "type": kind["keyType"]}, {"name": "value", "type": kind["valueType"]}]


def _column(field: Mapping[str, Any], mode: str) -> TableColumn:
    metadata, kind = field.get("metadata") or {}, field["type"]
    stored = field["name"] if mode == "none" else metadata.get("delta.columnMapping.physicalName", field["name"])
    return TableColumn(
        name=field["name"],
        field_id=metadata.get("delta.columnMapping.id") if mode == "id" else None,
        stored=frozenset({stored}),
        kind=ColumnKind.LEAF if isinstance(kind, str) else _KINDS[kind["type"]],
        fields=tuple(_column(inner, mode) for inner in _inside(kind)),
    )


# ---- the files of the log that make a version: a checkpoint and the commits after it, or all commits


@dataclass(frozen=True, kw_only=True)
class DeltaLog:
    """The files of a log.

    Attributes:
        commits: by version.
        checkpoints: complete ones by version; if a version has several, the one in the oldest format.
        sidecars: files to which a checkpoint may refer, by name.
    """

    commits: Mapping[int, SourceFile]
    checkpoints: Mapping[int, tuple[SourceFile, ...]]
    sidecars: Mapping[str, SourceFile]

    def newest(self) -> int | None:
        return max([*self.commits, *self.checkpoints], default=None)

    def oldest(self) -> int | None:
        return 0 if 0 in self.commits else min(self.checkpoints, default=None)

    def files_of(self, version: int) -> list[SourceFile] | None:
        """The files of a version, without sidecars; None if one is missing."""
        after = max((known for known in self.checkpoints if known <= version), default=-1)
        commits = sorted(number for number in self.commits if after < number <= version)
        if len(commits) != version - after or version < 0:
            return None
        return [*self.checkpoints.get(after, ()), *(self.commits[number] for number in commits)]

    def version_at(self, time_ns: int, times: Mapping[int, int]) -> int | None:
        """The newest version at a time; None before the oldest.

        ``times`` are the times of commits by version, in nanoseconds. As in Delta, a commit with an earlier time than
        its predecessor's gets the predecessor's time.
        """
        latest, found = 0, None
        for version in sorted(times):
            latest = max(latest, times[version])
            found = version if latest <= time_ns else found
        return found


def delta_log(entries: Iterable[SourceFile]) -> DeltaLog:
    """Sort the files in a listing of ``_delta_log``, leaving out those that readers do not need."""
    commits: dict[int, SourceFile] = {}
    whole: dict[int, tuple[SourceFile, ...]] = {}
    named: dict[int, tuple[SourceFile, ...]] = {}
    parts: dict[tuple[int, int], dict[int, SourceFile]] = {}
    sidecars: dict[str, SourceFile] = {}
    for file in entries:
        directory, _, name = file.path.rpartition("/")
        if directory == SIDECARS:
            sidecars[name] = file
        elif directory:
            continue
        elif match := _COMMIT.fullmatch(name):
            commits[int(match[1])] = file
        elif not file.identity.size:
            continue  # a checkpoint whose writer has failed
        elif match := _WHOLE.fullmatch(name):
            whole[int(match[1])] = (file,)
        elif match := _PART.fullmatch(name):
            parts.setdefault((int(match[1]), int(match[3])), {})[int(match[2])] = file
        elif match := _NAMED.fullmatch(name):
            named[int(match[1])] = (file,)
    complete = {
        version: tuple(found[number] for number in sorted(found))
        for (version, count), found in parts.items()
        if sorted(found) == list(range(1, count + 1))
    }
    return DeltaLog(commits=commits, checkpoints={**named, **complete, **whole}, sidecars=sidecars)


def link_log(source: Path, log: DeltaLog, files: Iterable[SourceFile], target: Path) -> None:
    """Make a log of links to ``files``, and to all sidecars.

    So deltalake reads the same files as in a copy of a remote log, despite a stale ``_last_checkpoint``, and the path
    has no percent signs, which it would decode.
    """
    target.mkdir()
    for file in files:
        (target / file.path).symlink_to(source / file.path)
    if log.sidecars:
        (target / SIDECARS).symlink_to(source / SIDECARS)


def copy_log(table: TableLog, log: DeltaLog, files: Sequence[SourceFile], target: Path) -> None:
    """Copy ``files`` of a log, and sidecars of a checkpoint among them; SourceNotFound if one is gone."""

    def copy(file: SourceFile) -> None:
        name = table.source.url_of(file.path)
        table.options.tried(lambda: _copy(table.source, file, target / file.path), name)

    with ThreadPoolExecutor(_THREADS, thread_name_prefix="pqcache-log") as threads:
        (target / SIDECARS).mkdir(parents=True)
        list(threads.map(copy, files))
        if log.sidecars:
            names = [name for file in files if ".checkpoint." in file.path for name in _sidecars(target / file.path)]
            list(threads.map(copy, [log.sidecars[name] for name in names if name in log.sidecars]))


def _copy(source: Source, file: SourceFile, target: Path) -> None:
    written = 0
    with target.open("wb") as out:
        for data in source.read(file.path, 0, file.identity.size, file.identity.tag):
            written += out.write(data)
    if written != file.identity.size:
        reason = f"{written:,} of {file.identity.size:,} bytes came"
        raise SourceUnavailable(source.url_of(file.path), reason)


def _sidecars(checkpoint: Path) -> list[str]:
    if checkpoint.suffix == ".json":
        actions = [json.loads(line) for line in checkpoint.read_text().splitlines() if line.strip()]
        return [PurePosixPath(action["sidecar"]["path"]).name for action in actions if action.get("sidecar")]
    try:
        with pq.ParquetFile(checkpoint) as file:
            if "sidecar" not in file.schema_arrow.names:
                return []
            found = file.read(["sidecar.path"])["sidecar"].to_pylist()
    except (pa.ArrowException, OSError) as error:
        reason = f"is a checkpoint that cannot be read ({first_line(error)})"
        raise ParquetError(checkpoint.name, reason, CHECK_TABLE) from error
    return [PurePosixPath(row["path"]).name for row in found if row is not None]


def descriptors(place: Path, version: int) -> dict[str, Mapping[str, Any]]:
    """Find the ``deletionVector`` of each file that has one, by the file's path in the log.

    deltalake does not expose these, but writes them into checkpoints. So the log in ``place``, which ends with
    ``version``, gets an empty commit and a checkpoint of it.
    """
    commit = {"commitInfo": {"timestamp": 0, "inCommitTimestamp": 0, "operation": "pqcache"}}
    added = place / LOG / f"{version + 1:020}.json"
    with disk_errors(added):
        added.write_text(json.dumps(commit) + "\n")
    DeltaTable(str(place), version=version + 1).create_checkpoint()
    with pq.ParquetFile(added.with_suffix(".checkpoint.parquet")) as file:
        rows: list[Mapping[str, Any] | None] = file.read(["add.path", "add.deletionVector"])["add"].to_pylist()
    return {row["path"]: row["deletionVector"] for row in rows if row is not None and row["deletionVector"]}
