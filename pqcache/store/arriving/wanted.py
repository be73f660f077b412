"""Which files the readers of an arriving snapshot want next, as they tell the run that fetches them.

``_pqcache/wanted/`` has two files for each reader: ``NAME.reader``, which the reader keeps locked while it lives, and
``NAME.wanted``, which it replaces when it wants something else: a line of JSON, and files of the index as int32.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pqcache.store.ownership import file_mode
from pqcache.system.disk import open_plain, read_regular
from pqcache.system.locks import open_to_lock, try_lock

Ints = npt.NDArray[np.int64]

log = logging.getLogger("pqcache.arriving")


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a reader wants: files by their positions in the index, the first one first; ``urgent`` if it waits now."""

    files: Ints
    urgent: bool = False


class WantedList:
    """What one reader wants, in a file that disappears from the run's view when the reader's process ends.

    A reader that may not write to the cache wants nothing: its files come in the order of the others.
    """

    def __init__(self, directory: Path) -> None:
        name = f"{os.getpid()}-{os.urandom(4).hex()}"
        self._wanted, self._reader = directory / f"{name}.wanted", directory / f"{name}.reader"
        self._descriptor = -1
        try:
            self._descriptor = open_plain(self._reader, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, file_mode())
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        except OSError as error:  # published meanwhile, or another user's cache
            log.debug("%s: what this process reads is not fetched first: %s", directory, error)

    def replace(self, wanted: Wanted) -> None:
        if self._descriptor < 0:
            return
        data = json.dumps({"urgent": wanted.urgent}).encode() + b"\n" + np.asarray(wanted.files, "<i4").tobytes()
        new = self._wanted.with_suffix(".new")
        try:
            new.write_bytes(data)
            os.replace(new, self._wanted)
        except OSError as error:
            log.debug("%s: what this process reads is not fetched first: %s", self._wanted.parent, error)

    def close(self) -> None:
        if self._descriptor < 0:
            return
        for path in (self._wanted, self._reader):
            with suppress(OSError):
                path.unlink()
        os.close(self._descriptor)
        self._descriptor = -1


class WantedLists:
    """What all living readers want; a list that was not replaced since is not read again."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._known: dict[Path, tuple[tuple[int, int], Wanted]] = {}

    def read(self) -> list[Wanted]:
        """One item per reader, the same object if nothing has changed; dead readers' files are removed."""
        found: dict[Path, tuple[tuple[int, int], Wanted]] = {}
        for path in sorted(self._directory.glob("*.wanted")):
            if not _is_alive(path.with_suffix(".reader")):
                for left in (path, path.with_suffix(".reader"), path.with_suffix(".new")):
                    with suppress(OSError):
                        left.unlink()
                continue
            try:
                status = os.stat(path, follow_symlinks=False)
                version = status.st_ino, status.st_mtime_ns
                known = self._known.get(path)
                found[path] = known if known is not None and known[0] == version else (version, _read(path))
            except (OSError, ValueError, KeyError, TypeError) as error:  # replaced or removed meanwhile
                log.debug("%s is passed over: %s", path, error)
        self._known = found
        return self.known

    @property
    def known(self) -> list[Wanted]:
        return [wanted for _, wanted in self._known.values()]


def read_wanted(directory: Path) -> list[Wanted]:
    """One item per living reader; files of dead ones are removed."""
    return WantedLists(directory).read()


def _read(path: Path) -> Wanted:
    line, _, numbers = read_regular(path).partition(b"\n")
    about = json.loads(line)
    return Wanted(files=np.frombuffer(numbers, "<i4").astype(np.int64), urgent=about["urgent"] is True)


def _is_alive(reader: Path) -> bool:
    """Processes of other users that cannot be examined count as alive."""
    try:
        descriptor = open_to_lock(reader)
    except PermissionError as error:
        log.debug("%s is taken for alive: %s", reader, error)
        return True
    except OSError:
        return False
    try:
        return try_lock(descriptor, exclusive=True) is not True
    finally:
        os.close(descriptor)
