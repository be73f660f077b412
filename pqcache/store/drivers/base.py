"""The interface of drivers: a `Source` to list and read, and for some stores a `Target` to write.

A store on a network gets a subclass of `RemoteSource` in ``remote.py``, which does the common work. `Capabilities`
declare what the store guarantees, and ``registry.py`` opens the driver. The rest of pqcache is independent of stores:
all drivers use the same terms and raise the same errors.

- Paths are relative to ``url``, with ``/`` between segments, spelled as in the store: not percent-encoded.
- Any thread may call any method, also on one file at once. A driver belongs to the process that opened it, not to a
  child forked later.
- Errors are SourceErrors about the URL of the file or directory: SourceNotFound, SourceDenied (credentials,
  permissions), SourceChanged (another version than the one asked for), and SourceUnavailable if another try may help.
  A name that the store's client cannot handle is a UsageError.
- A source never retries; its caller does, with ``timeouts.with_retries``. A target's client retries by itself. A store
  that sends nothing for the timeout that the driver was opened with is unavailable.
"""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pqcache.errors import PqcacheError, SourceChanged, SourceError, SourceUnavailable, UsageError
from pqcache.store.manifest import Identity, SourceFile, TableVersion

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from pqcache.parquet.projection import TableColumn


FIRST_ANSWER_TIMEOUT = 10.0  # seconds: a server that is down must not take three tries of TIMEOUT

PARQUET_SUFFIXES = (".parquet", ".parq", ".pq")
MAX_PATH = 8000  # characters of a path below a source, as many as HDFS allows
MAX_DIRECTORIES = 10_000_000  # of a source


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """Guarantees of a store. The defaults guarantee nothing, and are right for a new driver.

    Attributes:
        reads_versions: `Source.read` returns the version of the tag, or raises SourceChanged. Otherwise a file's
            identity is checked again after reading it.
        lists_only_data_files: every listed file belongs to the dataset, so files need not be opened to find out.
        lists_one_version: every listing is of one committed version, so it is not repeated before a snapshot is
            published, and all of its partitions are complete.
        may_give_only_sizes: an identity may be a size alone, with time 0 and no tag.
    """

    reads_versions: bool = False
    lists_only_data_files: bool = False
    lists_one_version: bool = False
    may_give_only_sizes: bool = False


@dataclass(frozen=True, kw_only=True)
class FileShape:
    """How a table reads one of its files.

    Attributes:
        columns: the table's columns under the file's names; None if the file has the table's names.
        deleted_rows: returns the positions of deleted rows in the file, ascending; raises SourceError. None if no row
            is deleted.
    """

    columns: tuple[TableColumn, ...] | None = None
    deleted_rows: Callable[[], npt.NDArray[np.int64]] | None = None


class Source(ABC):
    """A dataset in a store, or a single file, which is then the only one listed.

    Attributes:
        url: the dataset's URL without passwords and keys, for display.
        capabilities: the guarantees of the store.
        is_local: its files are on this machine, and their modes apply to copies.
        odd: if not None, `list` collects errors about single entries here instead of raising them, by path, with a
            ``/`` at the end for a directory. A driver still raises an error after which it cannot continue.
    """

    url: str
    capabilities = Capabilities()
    is_local = False
    odd: dict[str, PqcacheError] | None = None

    @abstractmethod
    def list(self) -> Iterator[SourceFile]:
        """Yield every file below the source, hidden ones included, in any order.

        If nothing exists at ``url``, raises SourceNotFound, or yields nothing in a store without directories. An error
        may come after some files were yielded; the list is then incomplete.
        """

    @abstractmethod
    def stat(self, path: str) -> Identity:
        """The current identity of a file; raises SourceNotFound if it is gone.

        It equals the identity in a listing while the file is unchanged: size in bytes, modification time in nanoseconds
        as precise as the store's, and the ETag if the store has one.
        """

    @abstractmethod
    def read(self, path: str, offset: int, length: int, tag: str = "") -> Iterator[bytes]:
        """Yield ``length`` bytes from ``offset`` on, in chunks of at most a few MiB.

        The range lies within the listed size. Fewer bytes than ``length`` mean a broken connection or a shorter file;
        chunks before an error are valid. Given the identity's ``tag``, a store with ETags raises SourceChanged for
        another version of the file; other stores ignore it.
        """

    @abstractmethod
    def close(self) -> None:
        """Close connections; nothing else may be called afterwards."""

    # ---- more that a store can do, or that a table knows: a plain store leaves these as they are

    def read_into(self, buffer: memoryview, path: str, offset: int, length: int, tag: str = "") -> Iterator[int]:
        """Repeatedly fill ``buffer`` with the next bytes of the range; yield the number of valid bytes each time.

        The count is less than the buffer's length only at the end of the range and before an error. A client that can
        receive into memory overrides this to save a copy.
        """
        filled = 0
        try:
            for data in self.read(path, offset, length, tag):
                rest = memoryview(data)
                while rest:
                    count = min(len(buffer) - filled, len(rest))
                    buffer[filled : filled + count] = rest[:count]
                    filled, rest = filled + count, rest[count:]
                    if filled == len(buffer):
                        yield filled
                        filled = 0
        except SourceError:
            if filled:
                yield filled
            raise
        if filled:
            yield filled

    def url_of(self, path: str) -> str:
        """The URL of a file, without secrets. A source may be a single file."""
        return self.url if self.url.endswith(f"/{path}") else f"{self.url}/{path}"

    def below(self, path: str) -> Source | None:
        """A source for the directory ``path`` over the same connections; None if a new one has to be opened."""
        return None

    def copy_mode(self, path: str, group: int) -> int:
        """Read permissions for a copy of a file that belongs to ``group``: no one may read more than in the source.

        Only files on this machine have modes to copy.
        """
        return 0o444

    def private_modes(self, paths: Sequence[str], group: int) -> Mapping[str, int]:
        """`copy_mode` of each of ``paths`` at the last listing; empty if everyone can read all of them."""
        return {}

    def note_modes(self, paths: Sequence[str]) -> None:  # noqa: B027
        """Record the modes of files listed elsewhere, for `private_modes`; missing ones are skipped."""

    def local_places(self) -> Mapping[str, Sequence[str]]:
        """The local directories that hold files of a table with a log, each with the paths of its files."""
        return {}

    def second_names(self, paths: Sequence[str]) -> dict[str, str]:
        """Links in the last listing, by path, each with the listed path of the same directory or file.

        These are all links to directories, which are not followed, and further names of files among ``paths``.
        """
        return {}

    @property
    def table_version(self) -> TableVersion | None:
        """The listed version of a table, or only its types if it has no versions; None for a plain directory."""
        return None

    @property
    def state(self) -> str | None:
        """A text that changes when a listing would; None if only a listing can tell."""
        return None

    def pinned_url(self, url: str) -> str:
        """The URL of the listed version, for other processes; ``url`` if the store has no versions."""
        return url

    def narrow(self, where: str | None) -> None:  # noqa: B027
        """Allow the next listing to skip partitions without rows of ``where``, a condition."""

    def shape_of(self, path: str) -> FileShape | None:
        """How a table reads one of its files; None if the file is taken as it is."""
        return None


class DirectoryLimit:
    """Counts the directories of one listing, to stop with an error if a server or a link leads on forever."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._count = 0

    def enter(self, path: str) -> str:
        """Raise SourceError if ``path`` is too long, or exceeds the number of directories."""
        self._count += 1
        if len(path) > MAX_PATH:
            reason = f"has directories nested without end ({path[:60]}...)"
            raise SourceError(self._url, reason, "name a directory below it, or remove the one that holds itself")
        if self._count > MAX_DIRECTORIES:
            raise SourceError(self._url, f"has more than {MAX_DIRECTORIES:,} directories", "name one below it")
        return path


def read_range(source: Source, path: str, offset: int, length: int, tag: str = "") -> bytes:
    """Read a range; fewer bytes than ``length`` mean that the file has become shorter."""
    return b"".join(source.read(path, offset, length, tag))


def ended_early(source: Source, file: SourceFile, received: str) -> SourceError:
    """The error of a read that ended early: the file is shorter than listed, or the connection broke.

    Raises SourceError if the file cannot be examined.
    """
    if source.stat(file.path).size < file.identity.size:
        return SourceChanged(source.url_of(file.path), "is shorter than it was listed")
    return SourceUnavailable(source.url_of(file.path), f"the connection ended after {received}")


def root_of(url: str) -> str:
    """The absolute path in a URL like those of HDFS."""
    return "/" + url.partition("://")[2].partition("/")[2].strip("/")


def check_options(driver: str, options: Mapping[str, str], known: Mapping[str, str]) -> None:
    """Raise UsageError for an option not in ``known`` (name -> meaning)."""
    for name in options:
        if name not in known:
            choices = ", ".join(sorted(known)) or "none"
            raise UsageError(f"-o {name}=...", f"{driver} has no such option", f"it has: {choices}")


def is_true(options: Mapping[str, str], name: str) -> bool:
    return options.get(name, "").lower() in ("1", "true", "yes")


class RangedFile(io.RawIOBase):
    """A Python file over ``read(offset, length)``, which fetches ranges."""

    def __init__(self, read: Callable[[int, int], bytes], size: int) -> None:
        self._read, self._size, self._position = read, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = max(0, base + offset)
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        length = max(0, min(len(buffer), self._size - self._position))
        data = self._read(self._position, length) if length else b""
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)


HIDDEN = "_pqcache"  # directory of a target for files that are not published yet; readers skip it
STAGING = f"{HIDDEN}/tmp"


@dataclass(frozen=True)
class StagedFile:
    """A file in a target, or being uploaded, that readers do not see yet.

    Attributes:
        path: its final path for readers.
        file: the local file with the same bytes.
        size: its length in bytes.
        handle: for the driver, to commit or discard it.
    """

    path: str
    file: Path
    size: int
    handle: Any = None


class Target(Protocol):
    """A dataset being written, partition by partition.

    A partition's files are staged, then committed together. Several processes may write one target, also the same
    partition twice; each attempt has its own ``token``, unique and valid as a file name.
    """

    @property
    def url(self) -> str:
        """The target's URL without passwords and keys, for display."""

    @property
    def scratch(self) -> Path | None:
        """A local directory for new files on the target's own file system; None if the target is not local."""

    @property
    def unfinished(self) -> str:
        """The location of an interrupted run's leftovers, without passwords and keys."""

    def list(self) -> Iterator[SourceFile]:
        """Yield every file in the target, hidden ones included; none if there is no target yet."""

    def begin(self) -> None:
        """Create the target, and remove staged files of killed runs."""

    def read_start(self, path: str, size: int) -> bytes:
        """Read the first ``size`` bytes of a small file; raises SourceNotFound if there is none."""

    def write(self, path: str, data: bytes) -> None:
        """Write or replace a small file; readers see all of it or nothing."""

    def remove(self, paths: Sequence[str]) -> None:
        """Remove files; missing ones are skipped."""

    def stage(self, file: Path, token: str, path: str) -> StagedFile:
        """Copy a local file to the store, hidden from readers."""

    def commit(self, token: str, directory: str, staged: Sequence[StagedFile], exclusive: bool) -> None:
        """Publish all files staged for ``directory`` with ``token``.

        May be called again after an error, and by two processes with the same files. ``exclusive`` means nothing else
        will ever be in the directory, so all files can appear in one step.
        """

    def discard(self, token: str, staged: Sequence[StagedFile]) -> None:
        """Remove staged files instead of committing them; never fails."""

    def finish(self) -> None:
        """Remove pqcache's own files once everything is published."""

    def abandon(self) -> None:
        """Remove pqcache's own files if nothing was published."""

    def close(self) -> None:
        """Close connections and release locks; nothing else may be called afterwards."""


class StoreTarget:
    scratch = None

    def __init__(self, source: Source) -> None:
        self._source = source
        self.url = source.url
        self.unfinished = f"{self.url}/{HIDDEN}"

    def list(self) -> Iterator[SourceFile]:
        yield from self._source.list()

    def read_start(self, path: str, size: int) -> bytes:
        return read_range(self._source, path, 0, size)

    def close(self) -> None:
        self._source.close()
