"""An arriving snapshot: complete but for the bytes of its files, which a run is fetching.

arriving/ID/                    ID is the one of the snapshot that it becomes
  dt=2026-11-19/part-00000.parquet    at its full size, with its footer; other bytes are zeros until they are there
  _pqcache/files.arrow, row_groups.arrow, lease    as in a snapshot, but for the checksums of files
  _pqcache/arrived              what is there (see `ArrivalMap`)
  _pqcache/wanted/              what readers want next (see `WantedList`)
  _pqcache/run                  the process of the run that fetches it, which holds the lock of `lock_as_writer`
  _pqcache/changed.json         why files will never arrive: path to subject, reason and advice of the error; with an
                                empty path, why the run has given up the snapshot
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pqcache.errors import MALFORMED, CacheError, SourceChanged
from pqcache.store.cache_directory import CacheDirectory
from pqcache.store.layout import ARRIVED, ARRIVING, CHANGED, FILES, ROW_GROUPS, RUN, WANTED
from pqcache.store.snapshot import Snapshot
from pqcache.system.disk import read_regular
from pqcache.system.locks import has_writer, user_name

if TYPE_CHECKING:
    from pqcache.store.arriving.arrival_map import ArrivalMap


@dataclass(frozen=True)
class ArrivingSnapshot(Snapshot):
    """A snapshot that is not published yet; its path is below ``arriving/`` until then."""

    @property
    def published_path(self) -> Path:
        """Where it is when it is published."""
        return self.path.parent.parent / "snapshots" / self.id

    @property
    def wanted_directory(self) -> Path:
        """Where readers say what they want next."""
        return self.path / WANTED

    def map(self, writable: bool = False) -> ArrivalMap:
        """Return what is there, mapped."""
        from pqcache.store.arriving.arrival_map import ArrivalMap  # and numpy, which few syncs need

        return ArrivalMap(self.path / ARRIVED, writable)

    def is_abandoned(self) -> bool:
        """Return whether nothing more will come of it."""
        from pqcache.store.arriving.arrival_map import ArrivalState  # as above

        try:
            return self.map().state == ArrivalState.ABANDONED
        except (CacheError, OSError):
            return True

    def is_being_filled(self) -> bool:
        """Return whether a run is fetching it; False also where it has been published or removed."""
        return self._run()[0]

    def filled_by(self) -> str:
        """Return which process fetches it, like ``process 12 of alice``; empty where that is not known."""
        return self._run()[1]

    def _run(self) -> tuple[bool, str]:
        """Return whether a run is at work, and which; those who may read the cache see that."""
        try:
            descriptor = os.open(self.path / RUN, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            if not isinstance(error, FileNotFoundError):
                import logging  # a sync with nothing to do does not need it

                log = logging.getLogger("pqcache.arriving")
                log.debug("%s: whether a run is at work is not known: %s", self.path, error)
            return False, ""
        try:
            if not has_writer(descriptor):
                return False, ""
            process = os.pread(descriptor, 20, 0).decode("ascii", "replace").strip()
            return True, f"process {process} of {user_name(os.fstat(descriptor).st_uid)}" if process.isdigit() else ""
        finally:
            os.close(descriptor)

    def why_abandoned(self) -> str:
        """Return why nothing more will come of it, as subject and reason; empty where the run has not said it."""
        try:
            subject, reason, _ = json.loads(read_regular(self.path / CHANGED))[""]
        except (OSError, *MALFORMED):
            return ""
        return f"{subject}: {reason}"

    def error_of(self, path: str) -> SourceChanged:
        """Return why a file that is CHANGED will never arrive."""
        try:
            known = json.loads(read_regular(self.path / CHANGED))
            return SourceChanged(*known[path])
        except (OSError, *MALFORMED):
            return SourceChanged(path, "changed at the source while it was copied", "sync again")


def find_arriving(cache: CacheDirectory) -> ArrivingSnapshot | None:
    """Return the snapshot that is arriving in a cache, the newest where a killed run has left others; None for none."""
    return next(reversed(arriving_snapshots(cache)), None)


def arriving_snapshots(cache: CacheDirectory) -> list[ArrivingSnapshot]:
    """Return all snapshots that are arriving in a cache, or are left of runs that have ended; oldest first."""
    try:
        found = [ArrivingSnapshot(path) for path in (cache.path / ARRIVING).iterdir() if not path.is_symlink()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    complete = [s for s in found if all((s.path / name).is_file() for name in (FILES, ROW_GROUPS, ARRIVED))]
    return sorted(complete, key=lambda snapshot: (snapshot.number, snapshot.id))
