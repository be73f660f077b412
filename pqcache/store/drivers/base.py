"""What a driver is: the contract of a source, which is listed and read, and of a target, which is written.

Every driver lists, stats, reads and writes in the same terms and raises the same errors, so nothing else in pqcache
knows which store it talks to. ``registry.py`` picks the driver of a URL.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from pqcache.errors import UsageError
from pqcache.store.manifest import Identity, SourceFile

TIMEOUT = 30.0  # seconds without a byte
FIRST_ANSWER_TIMEOUT = 10.0  # seconds: a server that is down must not take three tries of TIMEOUT

HDFS_NATIVE = "hdfs-native"
HDFS3 = "hdfs3"
HIDDEN = "_pqcache"  # what pqcache keeps in a target until it is finished; readers skip it
STAGING = f"{HIDDEN}/tmp"


class Source(Protocol):
    """One dataset at a source. All methods may be called from several threads at once.

    ``url`` is fit to be shown: it never holds a password. Paths are relative to it, with ``/`` between
    segments.
    """

    url: str

    def list(self) -> Iterator[SourceFile]:
        """Yield every file below the source, hidden ones included; a failure raises SourceError."""

    def stat(self, path: str) -> Identity:
        """Return a file's identity now; raises SourceNotFound when it is gone."""

    def read(self, path: str, offset: int, length: int, tag: str = "") -> Iterator[bytes]:
        """Yield ``length`` bytes from ``offset`` in pieces of at most a few MiB.

        The range must lie within the file. Fewer bytes than asked for mean that the connection broke. Given
        the identity's ``tag``, a store that can raises SourceChanged when it holds another version.
        """

    def close(self) -> None:
        """Give connections back."""


@runtime_checkable
class VersionedSource(Source, Protocol):
    """A source whose ``read`` with a tag gives that version or fails, and that tells of many files at once."""

    def stat_all(self, paths: Sequence[str]) -> Mapping[str, Identity]:
        """Return the identities that files have now; those that are gone are missing."""


class ReadIntoSource(Source, Protocol):
    """A source that can read into memory that it is given, which saves a copy of everything."""

    def read_into(self, buffer: memoryview, path: str, offset: int, length: int, tag: str = "") -> Iterator[int]:
        """Fill ``buffer`` as often as there is need; yield each time how many bytes of it are the file's next.

        They are fewer than it holds only at the end, or before an error. Everything else is as for ``read``.
        """


@dataclass(frozen=True)
class StagedFile:
    """A file that the store has, or has a place for, and that readers do not see: ``path`` is where it will be."""

    path: str
    file: Path
    size: int
    handle: Any = None


class Target(Protocol):
    """A dataset being written. All methods may be called from several threads at once; errors are SourceErrors.

    ``url`` is fit to be shown. ``scratch`` is a local directory on the target's own file system, where what is to be
    published is best written, or None. Paths are relative to the target, with ``/`` between segments.
    """

    @property
    def url(self) -> str: ...

    @property
    def scratch(self) -> Path | None: ...

    def list(self) -> Iterator[SourceFile]:
        """Yield every file there, hidden ones included; nothing where nothing is yet."""

    def begin(self) -> None:
        """Make the target, and remove what dead runs were in the middle of."""

    def read(self, path: str, size: int) -> bytes:
        """Return a small file."""

    def write(self, path: str, data: bytes) -> None:
        """Write a small file, whole or not at all."""

    def remove(self, paths: Sequence[str]) -> None:
        """Remove files; those that are gone already are fine."""

    def stage(self, file: Path, token: str, path: str) -> StagedFile:
        """Bring a local file to the store, out of readers' sight; ``token`` is one attempt at one partition."""

    def commit(self, token: str, directory: str, staged: Sequence[StagedFile], exclusive: bool) -> None:
        """Let readers see a partition's files. May be called again after an error, and by two who made the same.

        With ``exclusive`` nothing else will ever be in the directory.
        """

    def discard(self, token: str, staged: Sequence[StagedFile]) -> None:
        """Remove what was put and will not be committed; never fails."""

    def finish(self) -> None:
        """Remove what pqcache keeps there for itself: everything is published."""

    def abandon(self) -> None:
        """Remove what pqcache keeps there for itself: nothing is published."""

    def close(self) -> None:
        """Give connections back."""


def file_url(source: Source, path: str) -> str:
    """Return the URL of one of a source's files; a source may be that one file."""
    return source.url if source.url.endswith(f"/{path}") else f"{source.url}/{path}"


def check_options(driver: str, options: Mapping[str, str], known: Mapping[str, str]) -> None:
    """Raise UsageError when ``options`` holds a name that is not in ``known`` (name -> what it means)."""
    for name in options:
        if name not in known:
            choices = ", ".join(sorted(known)) or "none"
            raise UsageError(f"-o {name}=...", f"{driver} has no such option", f"it has: {choices}")
