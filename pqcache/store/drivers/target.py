"""A `Target`: a dataset that is written to a store, partition by partition. `Source` in ``base.py`` is what is read.

Paths, threads and errors are as in ``base.py``, but a target's client retries by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pqcache.store.drivers.base import Source, read_range
from pqcache.store.manifest import SourceFile

HIDDEN = "_pqcache"  # directory of a target for what is not published yet; readers skip it
STAGING = f"{HIDDEN}/tmp"


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
        """Yield every file in the target, hidden ones included; nothing if there is no target yet."""

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
