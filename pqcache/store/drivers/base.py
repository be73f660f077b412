"""The contract of a driver: a source, which is listed and read, and a target, which is written.

All drivers list, stat, read and write in the same terms and raise the same errors, so that nothing else in pqcache
knows which store it works with. ``registry.py`` picks the driver of a URL.

What holds for every method of both:

- Paths are relative to ``url``, with ``/`` between segments, spelled as in the store: not percent-encoded.
- Every method may be called from several threads at once, also on the same file. A driver is used in the process that
  opened it, not in a child forked later.
- Errors are SourceErrors, whose subject is the URL of the file or directory: SourceNotFound for what is not there,
  SourceDenied for credentials and permissions, SourceChanged for another version than the one asked for, and
  SourceUnavailable for what another try may get over. Names that a store's client cannot handle raise UsageError.
- A source does not try again by itself; its caller does, through ``retries.with_retries``. A store that sends nothing
  for the timeout that the driver was opened with counts as unavailable.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

from pqcache.errors import PqcacheError, SourceError, UsageError
from pqcache.store.manifest import Identity, SourceFile, TableVersion

TIMEOUT = 30.0  # seconds without a byte
FIRST_ANSWER_TIMEOUT = 10.0  # seconds: a server that is down must not take three tries of TIMEOUT

HDFS_NATIVE = "hdfs-native"
HDFS3 = "hdfs3"
HIDDEN = "_pqcache"  # directory of a target for what is not published yet; readers skip it
MAX_PATH = 8000  # characters of a path below a source, as many as HDFS allows
MAX_DIRECTORIES = 10_000_000  # of a source
STAGING = f"{HIDDEN}/tmp"


class Source(Protocol):
    """A dataset in a store, or a single file, which then is the only one listed.

    Attributes:
        url: the dataset's URL without passwords and keys, fit to be shown.
    """

    url: str

    def list(self) -> Iterator[SourceFile]:
        """Yield every file below the source, hidden ones included, in any order.

        Nothing at ``url`` raises SourceNotFound, or yields nothing in a store without directories. An error may come
        after some files have been yielded; then the list is not complete.
        """

    def stat(self, path: str) -> Identity:
        """Return the identity that a file has now; raises SourceNotFound when it is gone.

        It equals the identity in a listing as long as the file is the same: size in bytes, time of modification in
        nanoseconds as precisely as the store gives it, and the ETag where the store has one.
        """

    def read(self, path: str, offset: int, length: int, tag: str = "") -> Iterator[bytes]:
        """Yield ``length`` bytes from ``offset`` on, in chunks of at most a few MiB.

        The range lies within the file as it was listed. Fewer bytes than ``length`` mean that the connection broke or
        that the file is shorter now; chunks before an error are valid. With the identity's ``tag``, a store that has
        ETags raises SourceChanged when the file is another version; other stores ignore it.
        """

    def close(self) -> None:
        """Close connections; nothing else may be called afterwards."""


class ReadIntoSource(Source, Protocol):
    """A source that can read into the caller's memory, which saves a copy of every byte."""

    def read_into(self, buffer: memoryview, path: str, offset: int, length: int, tag: str = "") -> Iterator[int]:
        """Fill ``buffer`` with the next bytes of the range, again and again; yield how many are valid each time.

        The count is less than the buffer's length only at the end of the range and before an error. The rest is as
        for ``read``.
        """


def reads_versions(source: Source | None) -> bool:
    """Return whether ``source`` reads the version that a tag names, or fails; such a driver sets the attribute."""
    return getattr(source, "reads_versions", False)


def lists_only_data_files(source: Source) -> bool:
    """Return whether each file in a listing of ``source`` is the dataset's, as such a driver says by an attribute."""
    return getattr(source, "lists_only_data_files", False)


def lists_one_version(source: Source) -> bool:
    """Return whether each listing of ``source`` is of the same version of a table, as it says by an attribute."""
    return getattr(source, "lists_one_version", False)


def version_of(source: Source | None) -> TableVersion | None:
    """Return the version of the table that ``source`` lists; None where it is none."""
    version: TableVersion | None = getattr(source, "table_version", None)
    return version


def state_of(source: Source) -> str | None:
    """Return a text that is equal as long as a listing of ``source`` would be; None where only a listing can tell."""
    return getattr(source, "state", None)


def pinned_url(source: Source, url: str) -> str:
    """Return the URL of what ``source`` has listed, if its store keeps versions of a dataset, else its own ``url``."""
    return cast("PinnedSource", source).pinned_url() if hasattr(source, "pinned_url") else url


class PinnedSource(Source, Protocol):
    """A source that lists one version of a dataset, which another process can open too."""

    def pinned_url(self) -> str:
        """Return the URL of that version."""


def narrow(source: Source, where: str | None) -> None:
    """Tell ``source`` that its next listing may lack partitions of which no row satisfies ``where``."""
    tell: Callable[[str | None], None] | None = getattr(source, "narrow", None)
    if tell is not None:
        tell(where)


def collect_odd(source: Source) -> dict[str, PqcacheError]:
    """Return where ``source`` will note what it cannot list, in place of raising it; its next listing empties it.

    It has the errors by path, those for directories with a ``/`` at its end. Drivers that know no such things, or
    cannot go on after one, leave it empty.
    """
    odd: dict[str, PqcacheError] = {}
    if hasattr(source, "odd"):
        source.odd = odd
    return odd


def second_names(source: Source, paths: Sequence[str]) -> dict[str, str]:
    """Return the links in the last listing of ``source`` by path, each with the place that was listed by itself.

    They are links to directories, which were not followed, and those of the files ``paths`` that are others of them.
    """
    find: Callable[[Sequence[str]], dict[str, str]] | None = getattr(source, "second_names", None)
    return {} if find is None else find(paths)


def may_give_only_sizes(source: Source) -> bool:
    """Return whether a store may say nothing of a file but its size, as such a driver says by an attribute."""
    return getattr(source, "may_give_only_sizes", False)


class LocalFiles(Source, Protocol):
    """A source whose files have modes that mean something on this machine."""

    def copy_mode(self, path: str, group: int, known: dict[str, os.stat_result] | None = None) -> int:
        """Return the bits for reading that a copy of a file may have if it is of ``group``: who can read the file.

        ``known`` are the directories of earlier calls.
        """

    def private_modes(self, paths: Sequence[str], group: int) -> dict[str, int]:
        """Return what `copy_mode` does for each of ``paths``, as they were listed last; empty if everyone can read."""


@dataclass(frozen=True)
class StagedFile:
    """A file that a target has, or has a place for, and that readers do not see yet.

    Attributes:
        path: where readers will see it.
        file: the local file with the same bytes.
        size: its length in bytes.
        handle: what the driver needs to commit or discard it.
    """

    path: str
    file: Path
    size: int
    handle: Any = None


class Target(Protocol):
    """A dataset being written, partition by partition.

    A partition's files are staged, then committed together. Several processes may write one target, also the same
    partition twice; each attempt has a ``token`` of its own, which is unique and fit for a file name.
    """

    @property
    def url(self) -> str:
        """The target's URL without passwords and keys, fit to be shown."""

    @property
    def scratch(self) -> Path | None:
        """A local directory on the target's own file system, where new files are best written; None elsewhere."""

    @property
    def unfinished(self) -> str:
        """Where that lies which a run leaves that was stopped, without passwords and keys."""

    def list(self) -> Iterator[SourceFile]:
        """Yield every file in the target, hidden ones included; nothing where there is no target yet."""

    def begin(self) -> None:
        """Make the target, and remove what runs that were killed have staged."""

    def read_start(self, path: str, size: int) -> bytes:
        """Return the first ``size`` bytes of a small file; raises SourceNotFound when it is not there."""

    def write(self, path: str, data: bytes) -> None:
        """Write a small file, in place of one that is there; readers see all of it or nothing."""

    def remove(self, paths: Sequence[str]) -> None:
        """Remove files; those that are not there are skipped."""

    def stage(self, file: Path, token: str, path: str) -> StagedFile:
        """Copy a local file to the store, hidden from readers."""

    def commit(self, token: str, directory: str, staged: Sequence[StagedFile], exclusive: bool) -> None:
        """Publish all files that were staged for ``directory`` with ``token``.

        May be called again after an error, and by two processes whose files are the same. ``exclusive`` means that
        nothing else will ever be in the directory, so that all files can appear in one step.
        """

    def discard(self, token: str, staged: Sequence[StagedFile]) -> None:
        """Remove staged files that will not be committed; never fails."""

    def finish(self) -> None:
        """Remove pqcache's own files from a target of which all is published."""

    def abandon(self) -> None:
        """Remove pqcache's own files from a target of which nothing is published."""

    def close(self) -> None:
        """Close connections and release locks; nothing else may be called afterwards."""


class DirectoryLimit:
    """Counts the directories of one listing, so that a server or a link that leads on for ever is an error."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._count = 0

    def enter(self, path: str) -> str:
        """Return ``path``; SourceError when it is too long, or one directory too many."""
        self._count += 1
        if len(path) > MAX_PATH:
            reason = f"has directories nested without end ({path[:60]}...)"
            raise SourceError(self._url, reason, "name a directory below it, or remove the one that holds itself")
        if self._count > MAX_DIRECTORIES:
            raise SourceError(self._url, f"has more than {MAX_DIRECTORIES:,} directories", "name one below it")
        return path


def read_range(source: Source, path: str, offset: int, length: int, tag: str = "") -> bytes:
    """Return what ``Source.read`` yields, which is fewer bytes than ``length`` where a file is shorter now."""
    return b"".join(source.read(path, offset, length, tag))


def root_of(url: str) -> str:
    """Return the absolute path in the URL of a store whose first part is a host, as on HDFS."""
    return "/" + url.partition("://")[2].partition("/")[2].strip("/")


def path_below(root: str, path: str) -> str:
    """Return the absolute path of ``path``, relative to the absolute path ``root``."""
    return f"{root.rstrip('/')}/{path}"


def file_url(source: Source, path: str) -> str:
    """Return the URL of one of a source's files; a source may be that one file, or a table, whose files say it."""
    url_of: Callable[[str], str] | None = getattr(source, "url_of", None)
    if url_of is not None:
        return url_of(path)
    return source.url if source.url.endswith(f"/{path}") else f"{source.url}/{path}"


def check_options(driver: str, options: Mapping[str, str], known: Mapping[str, str]) -> None:
    """Raise UsageError when ``options`` holds a name that is not in ``known`` (name -> what it means)."""
    for name in options:
        if name not in known:
            choices = ", ".join(sorted(known)) or "none"
            raise UsageError(f"-o {name}=...", f"{driver} has no such option", f"it has: {choices}")
