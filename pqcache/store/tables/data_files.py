"""Selects the dataset's files in a listing by name, and detects tables whose log decides instead.

Trino, Athena and Hive write Parquet without a suffix (``000000_0``, ``20261101_..._uuid``). So a file is opened unless
its suffix belongs to another kind. Skipped files that may hold rows are counted: a table that would lose half of its
files is refused.

Delta, Iceberg, Hudi, Hive's transactional tables and Spark's streaming sink keep replaced files, deleted rows and files
of failed writers beside the table's files, and a log that says which files belong to the table.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache

from pqcache.errors import UsageError
from pqcache.store.cache_directory import named_caches
from pqcache.store.drivers.base import PARQUET_SUFFIXES
from pqcache.store.layout import ARRIVING, CONFIG, HISTORY, LOCK, MEMO
from pqcache.store.manifest import SourceFile
from pqcache.store.partition_paths import is_hidden, is_hidden_directory, parent
from pqcache.store.urls import is_local, local_path
from pqcache.units import format_count, printable

MAGIC = (b"PAR1", b"PARE")  # at both ends of a file; the second where its footer is encrypted
MIN_SIZE = 12  # bytes of a Parquet file without a column

_OF_CACHES = ("CACHEDIR.TAG", CONFIG, HISTORY, LOCK, MEMO)
_OTHER_DATA = frozenset(  # kinds that engines write the rows of a table in
    {
        "orc", "avro", "csv", "tsv", "jsonl", "ndjson", "arrow", "feather", "rc", "seq",
        "gz", "bz2", "zst", "lz4", "snappy", "lzo", "deflate",
    }
)  # fmt: skip
_NO_DATA = frozenset(  # kinds that people and tools put beside a table
    {
        "txt", "md", "rst", "html", "htm", "xml", "json", "yml", "yaml", "toml", "ini", "cfg", "conf", "properties",
        "log", "sql", "py", "ipynb", "sh", "r", "scala", "java", "jar", "pdf", "doc", "docx", "xls", "xlsx", "png",
        "jpg", "jpeg", "gif", "svg", "webp", "zip", "tar", "tgz", "md5", "sha1", "sha256", "sha512", "asc", "sig",
        "lock", "swp", "idx", "done", "success", "puffin",
    }
)  # fmt: skip
_UNFINISHED = frozenset({"tmp", "temp", "part", "partial", "inprogress", "pending", "bak"})  # or a copy of another
_SPARK_TEXT = frozenset({"json", "txt", "xml"})  # kinds of both, which Spark writes to part-...
_MANIFEST = re.compile(  # of Iceberg: the files of a snapshot, and its list of manifests
    r"snap-\d+-\d+-[0-9a-f-]{36}\.avro|[0-9a-f-]{36}-m\d+\.avro"
)
_UNLOAD_MANIFEST = re.compile(r"(.*[-_.])?manifest", re.IGNORECASE)  # the list of files that Redshift has unloaded
_NO_DATA_NAMES = frozenset(
    {"readme", "license", "licence", "notice", "copying", "authors", "changelog", "version", "lock", "makefile"}
)


class FileKind(Enum):
    """The kind of a file, judging by its name."""

    PARQUET = "parquet"
    HIDDEN = "hidden"
    NO_DATA = "no data"
    OTHER_DATA = "other data"
    UNFINISHED = "unfinished"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class FileRules:
    """The rules for selecting files of a source, and the types of partition columns.

    Attributes:
        as_files: take all Parquet files of a listing, even if there is a table's log.
        all_files: take every file that is not hidden, whatever its name and content.
        marker: the name of files without rows that mark a partition as complete.
        types: declared types of partition columns, of `pqcache.store.partition_paths.TYPES`.
    """

    as_files: bool = False
    all_files: bool = False
    marker: str | None = None
    types: Mapping[str, str] = field(default_factory=dict)


def file_kind(path: str) -> FileKind:
    """The kind of a file, by its name; ``path`` is relative to the dataset.

    >>> file_kind("dt=1/part-0.parquet"), file_kind("dt=1/000000_0"), file_kind("dt=1/_SUCCESS")
    (<FileKind.PARQUET: 'parquet'>, <FileKind.UNKNOWN: 'unknown'>, <FileKind.HIDDEN: 'hidden'>)
    """
    directory, _, name = path.rpartition("/")
    if is_hidden(name) or is_hidden_directory(directory):
        return FileKind.HIDDEN
    if not name:  # an object that stands for a directory
        return FileKind.NO_DATA
    _, dot, suffix = name.rpartition(".")
    suffix = suffix.lower()
    if name.lower().endswith(PARQUET_SUFFIXES):
        return FileKind.PARQUET
    if suffix == "avro" and _MANIFEST.fullmatch(name):
        return FileKind.NO_DATA
    if dot and (suffix in _OTHER_DATA or (suffix in _SPARK_TEXT and name.startswith("part-"))):
        return FileKind.OTHER_DATA
    if dot and suffix in _UNFINISHED:
        return FileKind.UNFINISHED
    if (dot and suffix in _NO_DATA) or name.lower() in _NO_DATA_NAMES:
        return FileKind.NO_DATA
    return FileKind.UNKNOWN


def lists_files(path: str) -> bool:
    """Whether a file that is not Parquet is a list of files, by its name."""
    return _UNLOAD_MANIFEST.fullmatch(path.rpartition("/")[2]) is not None


def may_have_rows(file: SourceFile, rules: FileRules) -> bool:
    """Whether a file may belong to the dataset, by its name and size."""
    kind = file_kind(file.path)
    if not {".", ".."}.isdisjoint(file.path.split("/")):  # not hidden, whatever a dot says elsewhere
        return True
    if kind is FileKind.UNKNOWN:
        return rules.all_files or file.identity.size >= MIN_SIZE
    return kind is FileKind.PARQUET or (rules.all_files and kind is not FileKind.HIDDEN)


@dataclass(frozen=True, kw_only=True)
class PassedOver:
    """How many files of a source are not taken, not counting those of skipped partitions.

    Attributes:
        hidden: skipped by Hadoop's readers.
        other: not Parquet, unfinished, or without rows.
        where: Parquet files of partitions outside of ``--where``.
        waiting: Parquet files waiting for ``--marker`` or ``--settle``; an old version of them may be held.
        links: links to files and directories that are listed under another name.
    """

    hidden: int = 0
    other: int = 0
    where: int = 0
    waiting: int = 0
    links: int = 0


def count_passed_over(found: Sequence[SourceFile], taken: Sequence[SourceFile]) -> PassedOver:
    """Count the files of ``found`` that are not ``taken``; both are in the same order."""
    if len(found) == len(taken):
        return PassedOver()
    hidden, left = 0, iter(taken)
    following = next(left, None)
    for file in found:
        if file is following:
            following = next(left, None)
        elif file_kind(file.path) is FileKind.HIDDEN:
            hidden += 1
    return PassedOver(hidden=hidden, other=len(found) - len(taken) - hidden)


def without_other_snapshots(files: Sequence[SourceFile]) -> list[SourceFile]:
    """Keep one snapshot of each cache among the ``files``: the current one, or the last.

    The others, and those arriving or being built, have the same rows; the rest of a cache is metadata.
    """
    roots = [parent(file.path) for file in files if file.path.rpartition("/")[2] == CONFIG]
    left = list(files)
    for prefix in [f"{root}/" if root else "" for root in roots]:
        inside = [file.path[len(prefix) :].split("/") for file in left if file.path.startswith(prefix)]
        last = max((names[1] for names in inside if names[0] == "snapshots" and len(names) > 2), default="")
        kept = "current/" if any(names[0] == "current" for names in inside) else f"snapshots/{last}/"
        if kept == "snapshots//":
            continue
        ours = tuple(f"{prefix}{name}" for name in ("current/", "snapshots/", f"{ARRIVING}/", "tmp/", *_OF_CACHES))
        left = [file for file in left if file.path.startswith(prefix + kept) or not file.path.startswith(ours)]
    return left


def is_magic(data: bytes) -> bool:
    """Whether a Parquet file begins or ends with these bytes."""
    return data in MAGIC


@dataclass(frozen=True, kw_only=True)
class DataFiles:
    """The files of a listing: those to take, those to examine, those of other data, and unfinished ones."""

    taken: tuple[SourceFile, ...]
    unknown: tuple[SourceFile, ...]
    other: tuple[SourceFile, ...]
    unfinished: tuple[SourceFile, ...] = ()


def divide_listing(files: Iterable[SourceFile], rules: FileRules = FileRules()) -> DataFiles:
    """Divide the ``files`` of a listing by their names; an empty one without a suffix holds no rows.

    Files too short for Parquet need not be examined.
    """
    taken, unknown, other, unfinished = [], [], [], []
    for file in files:
        kind = file_kind(file.path)
        if rules.marker is not None and file.path.rpartition("/")[2] == rules.marker:
            continue
        if kind is FileKind.PARQUET or (rules.all_files and kind is not FileKind.HIDDEN):
            taken.append(file)
        elif kind is FileKind.UNFINISHED and file.identity.size:
            unfinished.append(file)
        elif kind is FileKind.UNKNOWN and file.identity.size >= MIN_SIZE:
            unknown.append(file)
        elif kind in (FileKind.UNKNOWN, FileKind.OTHER_DATA) and file.identity.size:
            other.append(file)
    return DataFiles(taken=tuple(taken), unknown=tuple(unknown), other=tuple(other), unfinished=tuple(unfinished))


def check_passed_over(
    taken: Collection[SourceFile],
    passed: Collection[SourceFile],
    place: str,
    rules: FileRules,
    unfinished: Collection[SourceFile] = (),
) -> str:
    """A warning about skipped files; empty if there are none.

    If ``passed`` are half of the files at ``place``, or half of the bytes, raises UsageError unless ``rules`` allow it.
    ``unfinished`` files only cause a warning.
    """
    if not passed and not unfinished:
        return ""
    left = [*passed, *unfinished]
    first, count = printable(min(file.path for file in left)), format_count(len(left), "file")
    size = sum(file.identity.size for file in passed)
    half = len(passed) >= len(taken) or size >= sum(file.identity.size for file in taken)
    if passed and half and not rules.as_files:
        raise UsageError(
            place,
            f"{count} without a Parquet suffix ({first}) would not be taken, beside {len(taken):,} of Parquet",
            "take every file with --all-files (all_files=True), or those of Parquet alone with --as-files "
            "(as_files=True)",
        )
    verb = "was" if len(left) == 1 else "were"
    return f"{place}: {count} without a Parquet suffix {verb} not taken ({first}); --all-files takes them"


_DELTA, _ICEBERG, _HUDI = "a Delta table", "an Iceberg table", "a Hudi table"
_HIVE, _SPARK, _CACHE = "a transactional Hive table", "the output of a Spark stream", "a pqcache"
_REASONS = {  # why a listing does not show its rows, and the advice
    _DELTA: ("its log says which files count", "name the table's own directory as the source of a sync"),
    _ICEBERG: ("its metadata say which files count", "name the table's own directory as the source of a sync"),
    _HUDI: ("its timeline says which files count", "write it to plain Parquet with an engine that reads Hudi"),
    _HIVE: ("its files are changes to rows", "write it to an external table with Hive"),
    _SPARK: ("its log says which files count", "write it to plain Parquet with Spark"),
    _CACHE: ("it holds several snapshots of the same rows", "name the cache's directory 'current'"),
}
METADATA_SUFFIXES = (".metadata.json", ".metadata.json.gz")  # of Iceberg
LOGS = {"_delta_log": _DELTA, ".hoodie": _HUDI, "_spark_metadata": _SPARK, "metadata": _ICEBERG}  # by directory
_LOG_FILES = {  # names that nothing but the writer of such a table gives
    _DELTA: re.compile(r"\d+(\..+)?\.(json|parquet)|_last_checkpoint"),
    _HUDI: re.compile(r".+"),
    _SPARK: re.compile(r"\d+(\.compact)?"),
    _ICEBERG: re.compile(r".+\.metadata\.json(\.gz)?|version-hint\.text"),
}
_HIVE_DIRECTORY = re.compile(r"(delete_)?delta_\d+_\d+(_\d+)?(_v\d+)?|base_\d{7}(_v\d+)?|base_\d+_v\d+")
_BASE, _BUCKET = re.compile(r"base_\d+"), re.compile(r"bucket_\d+(_\d+)?|\d{6}_\d+")  # such files in any base
_ICEBERG_METADATA = re.compile(r"\d{5,}-[0-9a-f-]{36}(\.gz)?\.metadata\.json(\.gz)?")  # wherever write.metadata.path is
_OTHER_FILES = {  # that show a table in any directory; a partition's, mostly
    _HIVE: re.compile(r"_orc_acid_version|_metadata_acid"),
    _HUDI: re.compile(r"\.hoodie_partition_metadata(\.\w+)?"),
    _CACHE: re.compile(re.escape(CONFIG)),
}
_HIDDEN_BEGIN = frozenset("_.")
_SERIES = re.compile(r"\d[\d\W_TZ]*")  # numbers, dates and times, which are names of parts of a table
_DATED = re.compile(r"\d{4}([\d\W_TZW]*\d)?")  # a date or a long number in such a name
_NAMED = 5  # tables, in an error


@dataclass(frozen=True)
class FoundTable:
    """A table: its format, its directory relative to the listing, and the file that identifies it."""

    format: str
    directory: str
    evidence: str


def find_tables(paths: Iterable[str]) -> list[FoundTable]:
    """Find the tables among the ``paths`` of a listing, in path order, without those inside one of their format.

    Hidden directories are not examined, as nothing is taken from them.
    """
    found: dict[tuple[str, str], FoundTable] = {}
    for path in paths:
        directory, _, name = path.rpartition("/")
        log = _log_of(directory)
        if log is not None and (log.format is _HIVE or _shows(log, directory, name)):
            found.setdefault((log.directory, log.format), FoundTable(log.format, log.directory, path))
        elif _BUCKET.fullmatch(name) and _BASE.fullmatch(directory.rpartition("/")[2]):
            root = _without_partitions(directory.rpartition("/")[0])
            found.setdefault((root, _HIVE), FoundTable(_HIVE, root, path))
        elif name.endswith(METADATA_SUFFIXES) and _ICEBERG_METADATA.fullmatch(name):
            if not is_hidden_directory(directory):
                root = directory.rpartition("/")[0]
                found.setdefault((root, _ICEBERG), FoundTable(_ICEBERG, root, path))
        elif name[:1] in _HIDDEN_BEGIN or name == CONFIG:
            for format_, pattern in _OTHER_FILES.items():
                if pattern.fullmatch(name) and not is_hidden_directory(directory):
                    root = _without_partitions(directory)
                    found.setdefault((root, format_), FoundTable(format_, root, path))
    outer = [table for table in found.values() if not any((above, table.format) in found for above in _above(table))]
    return sorted(outer, key=lambda table: table.directory)


def check_tables(paths: Iterable[str], place: str) -> None:
    """Raise UsageError if the listing ``paths`` of ``place`` holds a table whose files are determined by a log."""
    tables = find_tables(paths)
    if tables and all(table.format is _CACHE and table.directory for table in tables):
        raise UsageError(printable(place), *named_caches([printable(table.directory) for table in tables], place))
    if tables:
        table = tables[0]
        among = ""
        if len(tables) > 1:
            names = ", ".join(printable(other.directory) or "." for other in tables[:_NAMED])
            among = f", the first of {len(tables):,}: {names}{', ...' if len(tables) > _NAMED else ''}"
        subject = f"{place}/{table.directory}" if table.directory else place
        raise _error(table, subject, f"is {table.format} ({printable(table.evidence)}{among})")


def table_roots(paths: Iterable[str]) -> dict[str, str]:
    """Find the directories that may each be a table, by their names, with the first path in each. They are the paths
    without partitions, numbers and dates; ``""`` has all other files. A date within a name becomes ``*``.

    >>> table_roots(["orders/dt=1/a.parquet", "orders/2026/11/b.parquet", "dt=1/c.parquet", "new-2026-11/d.parquet"])
    {'orders': 'orders/2026/11/b.parquet', '': 'dt=1/c.parquet', 'new-*': 'new-2026-11/d.parquet'}
    """
    found: dict[str, str] = {}
    for path in paths:
        root = _root_of(path.rpartition("/")[0])
        if root not in found or path < found[root]:
            found[root] = path
    return found


def several_tables(url: str, roots: Iterable[str], one: str, other: str, why: str) -> UsageError:
    """The error about a directory with a table in each of ``roots``; ``one`` and ``other`` differ."""
    one, other = sorted((one, other), key=lambda root: (not root, root))
    rest = sorted(set(roots) - {one, other})
    also = f"; beside them: {', '.join(map(_name_of, rest[:_NAMED]))}" if rest else ""
    more = ", ..." if len(rest) > _NAMED else ""
    return UsageError(
        url,
        f"holds several tables: {_name_of(one)} and {_name_of(other)} have different columns ({why}){also}{more}",
        f"name one of them, as in {printable(f'{url}/{one}')}, or take all files as one table with --as-files "
        "(as_files=True)",
    )


def _name_of(root: str) -> str:
    return printable(root) or "the files beside"


@lru_cache(1 << 14)
def _root_of(directory: str) -> str:
    names = directory.split("/")
    parts = (_DATED.sub("*", name) for name in names if "=" not in name and not _SERIES.fullmatch(name))
    return "/".join(part for part in parts if part != "*")


def check_above(url: str) -> None:
    """Raise UsageError if the directory or file ``url`` is part of such a table.

    For a local path, the directories above it are examined, which takes a few system calls; for other stores only the
    names in the URL, which reveal only Hive's transactional tables.
    """
    if not is_local(url):
        names = [name for name in url.partition("://")[2].split("/")[1:] if name]
        table = next((FoundTable(_HIVE, "", name) for name in names[-2:] if _HIVE_DIRECTORY.fullmatch(name)), None)
        if table is not None:
            raise _error(table, url, f"is a part of {table.format} ({printable(table.evidence)})")
        return
    path = local_path(url)
    for root in dict.fromkeys((os.path.abspath(path), os.path.realpath(path))):
        table = table_above(root)
        if table is not None:
            evidence = os.path.join(table.directory, table.evidence)
            raise _error(table, path, f"is a part of {table.format} ({printable(evidence)})")


def table_above(root: str) -> FoundTable | None:
    """Find the table around the absolute path ``root``; its directory is absolute too."""
    directory, name = os.path.split(root)
    depth = 0
    while name:
        if depth < 2 and _HIVE_DIRECTORY.fullmatch(name):  # the directory of a bucket's file
            return FoundTable(_HIVE, directory, name)
        if depth == 0 and name in ("snapshots", "tmp") and os.path.isfile(os.path.join(directory, CONFIG)):
            return FoundTable(_CACHE, directory, CONFIG)
        for log, format_ in LOGS.items():
            if format_ is _ICEBERG and not (name == "data" or "=" in name):
                continue  # its files are in data/ or in partitions, and others have a directory metadata too
            for file in _names_in(os.path.join(directory, log)):
                if _LOG_FILES[format_].fullmatch(file):
                    return FoundTable(format_, directory, f"{log}/{file}")
        directory, name = os.path.split(directory)
        depth += 1
    return None


def is_log(directory: str, name: str) -> bool:
    """Whether a file ``name`` in ``directory``, one of `LOGS`, indicates a table."""
    return _LOG_FILES[LOGS[directory]].fullmatch(name) is not None


def refuse_part(url: str, format_: str, evidence: str) -> None:
    """Raise UsageError: the file ``evidence`` shows that ``url`` is part of a table in this format."""
    raise _error(FoundTable(format_, "", evidence), url, f"is a part of {format_} ({printable(evidence)})")


def _error(table: FoundTable, subject: str, what: str) -> UsageError:
    reason, advice = _REASONS[table.format]
    return UsageError(
        printable(subject),
        f"{what}, and {reason}",
        f"{advice}, or take its files as they are with --as-files (as_files=True)",
    )


def _names_in(directory: str) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except OSError:
        return []


@lru_cache(1 << 14)
def _log_of(directory: str) -> FoundTable | None:
    """Find the table to which a directory belongs as log or part, by the names in its path; hidden ones are skipped."""
    segments = directory.split("/")
    for position, segment in enumerate(segments):
        above = "/".join(segments[:position])
        format_ = LOGS.get(segment)
        if format_ is not None and not (format_ is _ICEBERG and position < len(segments) - 1):
            return FoundTable(format_, above, segment)
        if _HIVE_DIRECTORY.fullmatch(segment):
            return FoundTable(_HIVE, _without_partitions(above), segment)
        if is_hidden(segment):
            return None
    return None


def _shows(log: FoundTable, directory: str, name: str) -> bool:
    """Whether a file below a log belongs to the log; Hudi's logs have directories."""
    own = f"{log.directory}/{log.evidence}" if log.directory else log.evidence
    return (log.format is _HUDI or directory == own) and _LOG_FILES[log.format].fullmatch(name) is not None


def _without_partitions(directory: str) -> str:
    segments = directory.split("/")
    while segments and "=" in segments[-1]:
        segments.pop()
    return "/".join(segments)


def _above(table: FoundTable) -> Iterator[str]:
    """The directories above, innermost first."""
    directory = table.directory
    while directory:
        directory = directory.rpartition("/")[0]
        yield directory
