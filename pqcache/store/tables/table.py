"""What a table has to provide: the files of one committed version, each as it lies somewhere and as it is cached.

Delta, Iceberg and the Hive metastore implement `Table`; ``table_source.py`` makes a Source of any of them, and a
directory is a Source by itself. So nothing else in pqcache knows what kind of table it works with.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol
from urllib.parse import quote

from pqcache.store.drivers.base import FileShape
from pqcache.store.hive import NULL, is_hidden
from pqcache.store.manifest import Identity, TableVersion

_UNSAFE = "".join(map(chr, range(0x20))) + "\"#%'*/:=?\\\x7f{[]^"  # what Hive encodes in a partition's path
_SUFFIXES = (".parquet", ".parq", ".pq")


@dataclass(frozen=True, kw_only=True)
class VersionRule:
    """Which version of a table is wanted: the newest, that of a number or snapshot ID, or that of a time (ISO 8601)."""

    version: str | None = None
    as_of: str | None = None

    @property
    def is_newest(self) -> bool:
        """Whether the newest version is wanted, whichever that is."""
        return self.version is None and self.as_of is None


@dataclass(frozen=True, kw_only=True, slots=True)
class TableFile:
    """A data file of a table.

    Attributes:
        path: where it lies in a cache: partition directories and a name.
        url: where it is: a URL, or an absolute local path.
        identity: what the log of a table says, with the tag of `committed_tag`, or what the store of the file lists.
        shape: what the table makes of its columns and rows; None where it is taken as it is.
    """

    path: str
    url: str
    identity: Identity
    shape: FileShape | None = None


@dataclass(frozen=True, kw_only=True)
class TableListing:
    """The files of a table by path, and its version.

    Of a table without versions the files are all that lie in its directories, as in a listing of them, and the version
    has the types of the partition columns alone; None where it has no such columns. ``log`` is equal for equal logs, as
    what it was read from, and None where that cannot be known.
    """

    files: Mapping[str, TableFile]
    version: TableVersion | None = None
    log: str | None = None


class Table(Protocol):
    """A table, whose files may lie anywhere.

    Attributes:
        url: the table's URL without secrets, fit to be shown.
        has_versions: whether what `read` returns is a version, of which no file ever changes.
    """

    url: str
    has_versions: bool

    def read(self) -> TableListing:
        """Return the files of the version that is wanted.

        Raises SourceError where the table cannot be read, SourceNotFound where there is none or no such version, and
        UsageError where its rows would not come out right: what it uses is named, and what to do.
        """

    def close(self) -> None:
        """Close connections; nothing else may be called afterwards."""


def partition_path(values: Mapping[str, str | None]) -> str:
    """Return the Hive directory of partition values, outermost first, encoded as Hive does; empty without any.

    >>> partition_path({"dt": "2026/11", "region": None})
    'dt=2026%2F11/region=__HIVE_DEFAULT_PARTITION__'
    """
    return "/".join(f"{_encoded(name)}={_encoded(value) if value else NULL}" for name, value in values.items())


def cache_paths(files: Iterable[tuple[str, str]]) -> list[str]:
    """Return a path in the cache for each file, of which the partition directory and the URL are given.

    A name that readers would skip, or would not take for Parquet, gets a prefix or a suffix; of two files of one name
    in one directory each gets a part that is its URL's own.
    """
    files = list(files)
    paths = [f"{directory}/{_name(url)}" if directory else _name(url) for directory, url in files]
    taken: dict[str, int] = {}
    for path in paths:
        taken[path.lower()] = taken.get(path.lower(), 0) + 1
    return [
        path if taken[path.lower()] == 1 else _distinct(path, url) for path, (_, url) in zip(paths, files, strict=True)
    ]


def digest(*parts: object) -> str:
    """Return a short text that is equal for equal ``parts``."""
    return blake2b("\0".join(map(str, parts)).encode(errors="surrogatepass"), digest_size=16).hexdigest()


def _name(url: str) -> str:
    name = url.rpartition("/")[2]
    name = name if name.lower().endswith(_SUFFIXES) else f"{name}.parquet"
    return f"part-{name.lstrip('._')}" if is_hidden(name) else name


def _distinct(path: str, url: str) -> str:
    directory, slash, name = path.rpartition("/")
    stem, dot, suffix = name.rpartition(".")
    return f"{directory}{slash}{stem}-{digest(url)[:12]}{dot}{suffix}"


def _encoded(text: str) -> str:
    if text == NULL:  # as text
        return f"%5F{text[1:]}"
    return "".join(quote(character, safe="") if character in _UNSAFE else character for character in text)
