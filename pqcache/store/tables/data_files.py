"""Which files of a listing are a dataset's: by name, and where a name does not say, by content.

Trino, Athena and Hive write Parquet without a suffix (``000000_0``, ``20261101_..._uuid``). So a file whose name does
not end like one of another kind is looked into. Files that are passed over although they may hold rows are counted:
a table of which half would be passed over is refused.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from pqcache.errors import UsageError
from pqcache.store.hive import is_hidden, is_hidden_directory, parent
from pqcache.store.layout import ARRIVING, CONFIG, HISTORY, LOCK, MEMO
from pqcache.store.manifest import SourceFile
from pqcache.store.urls import printable
from pqcache.units import format_count

MAGIC = (b"PAR1", b"PARE")  # at both ends of a file; the second where its footer is encrypted
MIN_SIZE = 12  # bytes of a Parquet file without a column

_OF_CACHES = ("CACHEDIR.TAG", CONFIG, HISTORY, LOCK, MEMO)
_PARQUET = frozenset({"parquet", "parq", "pq"})
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
_UNLOAD_MANIFEST = re.compile(r"(.*[-_.])?manifest", re.IGNORECASE)  # the list of what Redshift has unloaded
_NO_DATA_NAMES = frozenset(
    {"readme", "license", "licence", "notice", "copying", "authors", "changelog", "version", "lock", "makefile"}
)


class FileKind(Enum):
    """What the name of a file says: Parquet; hidden; without rows; other rows; not finished, or a copy; or nothing."""

    PARQUET = "parquet"
    HIDDEN = "hidden"
    NO_DATA = "no data"
    OTHER_DATA = "other data"
    UNFINISHED = "unfinished"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class FileRules:
    """Which files of a source are taken, and what their paths say.

    Attributes:
        as_files: take the Parquet files of a listing also where they are not the rows of a table.
        all_files: take every file that is not hidden, whatever its name and content.
        marker: the name of files that say that a partition is complete, and hold no rows.
        types: the types that are declared for partition columns, of `pqcache.store.hive.TYPES`.
    """

    as_files: bool = False
    all_files: bool = False
    marker: str | None = None
    types: Mapping[str, str] = field(default_factory=dict)


def file_kind(path: str) -> FileKind:
    """Tell the kind of a file by its name; ``path`` is relative to the dataset.

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
    if dot and suffix in _PARQUET:
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
    """Whether a file whose content is not Parquet is a list of files, by its name."""
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
    """How many files of a source are not taken, without those of partitions that were skipped.

    Attributes:
        hidden: those that Hadoop's readers skip.
        other: those that are not Parquet, are not finished, or hold no rows.
        where: Parquet files of partitions that ``--where`` leaves out.
        waiting: Parquet files that wait for ``--marker`` or ``--settle``; an old version of them may be held.
        links: links to files and directories that the source has under another name.
    """

    hidden: int = 0
    other: int = 0
    where: int = 0
    waiting: int = 0
    links: int = 0


def count_passed_over(found: Sequence[SourceFile], taken: Sequence[SourceFile]) -> PassedOver:
    """Count the files that were ``found`` and not ``taken``; both are in the same order."""
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

    The others, and what is arriving or in work, have the same rows; the rest of a cache are metadata.
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
    """The files of a listing: those to take, those to look into, those of other data, and those not finished."""

    taken: tuple[SourceFile, ...]
    unknown: tuple[SourceFile, ...]
    other: tuple[SourceFile, ...]
    unfinished: tuple[SourceFile, ...] = ()


def divide_listing(files: Iterable[SourceFile], rules: FileRules = FileRules()) -> DataFiles:
    """Divide the ``files`` of a listing by their names; an empty one without a suffix holds no rows.

    Files too short for Parquet need not be looked into.
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
    """Make a warning about the files that are passed over; it is empty if there are none.

    Where ``passed`` are half of the files at ``place``, or half of the bytes, raises UsageError unless ``rules`` allow
    it. ``unfinished`` files are warned about only.
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
