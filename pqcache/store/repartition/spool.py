"""A local directory for files on their way from a source to a target."""

from __future__ import annotations

import logging
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from shutil import disk_usage

from pqcache.errors import PqcacheError, disk_errors
from pqcache.store.drivers.target import Target
from pqcache.system.disk import remove_tree, tree_size
from pqcache.system.locks import try_lock
from pqcache.units import format_size

_PREFIX = "pqcache-spool-"
_SPARE = 64 << 20
_FRESH = 60.0  # seconds: a spool so young may not have its lock yet

log = logging.getLogger("pqcache.repartition")


@dataclass
class Spool:
    """A local directory, shared by jobs that would fill its disk if all began at once."""

    path: Path
    reserved: int = 0
    jobs: set[str] = field(default_factory=set)
    changed: threading.Condition = field(default_factory=threading.Condition)

    @contextmanager
    def reserve(self, token: str, size: int, partition: str, shuffles: bool) -> Iterator[Path]:
        """Yield a new directory named ``token``, once the other jobs leave ``size`` bytes of the disk free.

        Raises PqcacheError, which names ``partition``, when the disk is too small for this job alone.
        """
        with self.changed:
            while size and self.reserved + size + _SPARE > (space := self._space()):
                if not self.jobs:
                    what = "to shuffle its rows" if shuffles else "for its files"
                    raise PqcacheError(
                        self.path,
                        f"partition {partition} needs up to {format_size(size)} for a while "
                        f"{what}, {format_size(space)} are free",
                        "free some, or set TMPDIR to a larger disk",
                    )
                log.debug("partition %s waits for %s on %s", partition, format_size(size), self.path)
                self.changed.wait()
            self.reserved += size
            self.jobs.add(token)
        try:
            with disk_errors(self.path / token):
                (self.path / token).mkdir(parents=True)
            yield self.path / token
        finally:
            with suppress(OSError):
                remove_tree(self.path / token)
            with self.changed:
                self.reserved -= size
                self.jobs.remove(token)
                self.changed.notify_all()

    def _space(self) -> int:
        """Bytes that are free, or taken by jobs that reserved them."""
        taken = sum(tree_size(self.path / token) for token in self.jobs)
        return disk_usage(self.path).free + taken


@contextmanager
def open_spool(target: Target) -> Iterator[Spool]:
    """Yield a directory for files on their way, on the target's own file system where that is local.

    Elsewhere it is in ``TMPDIR``, and what processes that died have left there is removed first.
    """
    if target.scratch is not None:
        yield Spool(target.scratch)
        return
    with disk_errors(Path(tempfile.gettempdir())):
        for left in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
            _remove_if_dead(left)
        spool = Path(tempfile.mkdtemp(prefix=_PREFIX))
    lock = os.open(spool, os.O_RDONLY)
    try:
        try_lock(lock, exclusive=True)  # the kernel releases it when this process ends, however it ends
        yield Spool(spool)
    finally:
        with suppress(OSError):
            remove_tree(spool)
        os.close(lock)


def _remove_if_dead(left: Path) -> None:
    with suppress(OSError):  # another user's, or just removed by its owner
        status = left.lstat()
        if status.st_uid != os.geteuid() or time.time() - status.st_mtime < _FRESH:
            return
        lock = os.open(left, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            if try_lock(lock, exclusive=True):
                remove_tree(left)
        finally:
            os.close(lock)
