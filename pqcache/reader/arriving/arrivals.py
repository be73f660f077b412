"""What has arrived of a dataset whose files a run is still fetching, as one process that reads it knows.

A file is there when all of it is. So whatever opens one for its rows waits here first.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from pqcache.errors import CacheError, PqcacheError
from pqcache.reader.arriving.wanted_order import without_repeats
from pqcache.store.arriving.arriving_snapshot import ArrivingSnapshot, find_arriving
from pqcache.store.arriving.start_run import FillRequest, ensure_filling, fill_command, run_error
from pqcache.store.arriving.wanted import Wanted, WantedList
from pqcache.store.cache_directory import CacheDirectory
from pqcache.store.config import Config, read_config
from pqcache.store.layout import FILES
from pqcache.store.manifest_file import read_heading
from pqcache.store.row_group_index import Index
from pqcache.store.urls import quoted, redact
from pqcache.system.fork_safe_threads import is_shut_down, letting_forks_go_on
from pqcache.system.shared_numbers import SharedNumbers
from pqcache.units import format_size

Ints = npt.NDArray[np.int64]
T = TypeVar("T")

POLL = 0.05  # seconds between looks at what has arrived
_CHECK = 0.2  # seconds between looks at whether it ever will
_DEAD = 0.5  # seconds for which no run is at work before its end is believed
LONG = 10.0  # seconds, after which a wait is logged
_MOST_RESTARTS = 3  # of runs that end without an error and without having fetched anything
_PROCESSES = 256

log = logging.getLogger("pqcache.arriving")


class Arrivals:
    """What has arrived of an open dataset. Processes that are forked later share what it counts.

    ``request`` says how to start another run where the one that fetches the files has ended; None: not at all.
    """

    def __init__(self, cache: Path, snapshot: ArrivingSnapshot, index: Index, request: FillRequest | None) -> None:
        self._cache, self._snapshot, self._index, self._request = cache, snapshot, index, request
        self._source = read_heading(snapshot.path / FILES).source
        self._asked = _config(cache)
        self._files = index.numbers("file")
        self._sizes = np.array([entry.size for entry in snapshot.manifest().files], np.int64)
        self._there = np.zeros(len(index.paths), np.bool_)
        self._root = snapshot.path
        self._is_complete = False
        self._since = time.time()
        self._restarts = (0, -1)  # how many, and the bytes that had arrived at the first of them
        self._waited = SharedNumbers(["microseconds"], _PROCESSES)

    @property
    def root(self) -> Path:
        """Where the files are: below ``arriving/``, and from their publication on in ``snapshots/``."""
        self._find_root()
        return self._root

    @property
    def is_complete(self) -> bool:
        """Whether all files are known to be there."""
        return self._is_complete

    @property
    def total_bytes(self) -> int:
        """Bytes of all files."""
        return int(self._sizes.sum())

    @property
    def arrived_bytes(self) -> int:
        """Bytes of the files that are there."""
        self._look(np.flatnonzero(~self._there))
        return int(self._sizes[self._there].sum())

    @property
    def waited_seconds(self) -> float:
        """How long this process and those that it has forked have waited."""
        return float(self._waited.numbers("microseconds").sum()) / 1e6

    def add_waited(self, seconds: float) -> None:
        """Count a wait of this process."""
        self._waited.numbers("microseconds")[os.getpid() % _PROCESSES] += int(1e6 * seconds)

    def arrived(self, row_groups: Ints) -> npt.NDArray[np.bool_]:
        """Return for each row group of the index whether its file is there."""
        files = self._files[row_groups]
        if not self._is_complete:
            self._look(np.unique(files[~self._there[files]]))
        found: npt.NDArray[np.bool_] = self._there[files]
        return found

    def _look(self, missing: Ints) -> None:
        """Look for files that were not there yet; all are when the snapshot has been published."""
        if not len(missing):
            return
        found = self._here().arrived(self._index.paths[file] for file in missing.tolist())
        self._there[[file for file in missing.tolist() if self._index.paths[file] in found]] = True
        if self._there.all():
            self._is_complete = True
        elif len(found) < len(missing):
            self._find_root()

    def wait(self, row_groups: Ints) -> None:
        """Return when the files of row groups of the index are there; what will never come raises an error by name.

        The run learns that they are wanted now.
        """
        left = row_groups[~self.arrived(row_groups)]
        if not len(left):
            return
        begun, patience = time.monotonic(), Patience(self)
        with self.wanting(left, urgent=True), letting_forks_go_on():
            while len(left):
                if is_shut_down():
                    raise CacheError(self._cache, "nobody wants what is waited for any more")
                patience.look(int(left[0]), begun)
                time.sleep(POLL)
                left = left[~self.arrived(left)]
        patience.end()
        self.add_waited(time.monotonic() - begun)

    @contextmanager
    def wanting(self, row_groups: Ints, urgent: bool = False) -> Iterator[None]:
        """Tell the run, while the body runs, that these row groups of the index are wanted, the first one first."""
        if self.is_complete:
            yield
            return
        wanted = WantedList(self._snapshot.wanted_directory)
        wanted.replace(Wanted(files=without_repeats(self._files[row_groups]), urgent=urgent))
        try:
            yield
        finally:
            wanted.close()

    def while_moving(self, read: Callable[[], T]) -> T:
        """Return what ``read`` returns; it is called again where the files were published meanwhile."""
        root = self._root
        try:
            return read()
        except (PqcacheError, OSError):
            if not self._find_root() and self._root == root:
                raise
        return read()

    def describe(self, row_group: int) -> str:
        """Return which row group of which file this is."""
        path = self._index.paths[int(self._files[row_group])]
        return f"row group {int(self._index.numbers('row_group')[row_group])} of {path}"

    def progress(self) -> str:
        """Return how much has arrived."""
        arrived, total = self.arrived_bytes, self.total_bytes
        return f"{format_size(arrived)} of {format_size(total)} have arrived"

    def log_long_wait(self, row_group: int, seconds: float) -> None:
        """Log that a wait takes long, with what is waited for."""
        run = self._snapshot.filled_by() or "its run"
        log.warning(
            "%s: waiting since %.0f s for %s, which %s fetches from %s; %s",
            self._cache, seconds, self.describe(row_group), run, self._source, self.progress(),
        )  # fmt: skip

    def log_end_of_wait(self) -> None:
        """Log that what was waited for is there."""
        log.warning("%s: it goes on; %s", self._cache, self.progress())

    def is_dead(self) -> bool:
        """Return whether no run fetches what is missing, as a first look has it."""
        if self.is_complete or self._snapshot.is_being_filled():
            return False
        return not self._find_root() and not self.is_complete

    def check(self, row_group: int) -> None:
        """Raise why a missing row group will never come, if that is known."""
        errors = self._here().errors()
        if (error := errors.get(self._index.paths[int(self._files[row_group])])) is not None:
            raise error
        if "" in errors:
            raise self._abandoned(row_group)

    def restart(self, row_group: int | None) -> None:
        """Have another run fetch what is missing; without a known source CacheError says which command does.

        Without a row group that is waited for, nothing is raised.
        """
        if row_group is None:
            with suppress(PqcacheError):
                self._restart(0)
        else:
            self._restart(row_group)

    def _restart(self, row_group: int) -> None:
        if (error := run_error(self._cache, self._since)) is not None:
            self._since = time.time()  # who goes on all the same has another run started
            raise error
        if (instead := self._asked_for() or self._other_snapshot()) is not None:
            raise self._never(instead, row_group)
        if self._request is None:
            reason = f"the run that fetched it has ended, and {self.describe(row_group)} has not arrived"
            raise CacheError(self._cache, reason, f"go on with: {fill_command(self._source, self._cache)}")
        count, arrived = self._restarts
        count = count + 1 if arrived == self.arrived_bytes else 1
        if count > _MOST_RESTARTS:
            reason = f"the run that fetches it has ended {_MOST_RESTARTS} times before anything more had arrived"
            raise CacheError(self._cache, reason, f"see 'pqcache log {quoted(self._cache)}'")
        self._restarts = count, self.arrived_bytes
        log.warning("%s: the run that fetched it has ended; another one goes on", self._cache)
        ensure_filling(self._cache, self._request, self._is_decided)
        if self.is_dead():
            raise self._abandoned(row_group)

    def _is_decided(self) -> bool:
        """Return whether a run goes on with these files, or has begun anew with others."""
        if not self.is_dead() or self._here().is_abandoned():
            return True
        cache = CacheDirectory(self._cache)
        if cache.current() is not None:
            return True
        other = find_arriving(cache)
        return other is not None and other.id != self._snapshot.id and other.is_being_filled()

    def _abandoned(self, row_group: int) -> CacheError:
        """Return why nothing more will come, as far as that is known."""
        why = self._asked_for() or self._recorded() or self._other_snapshot() or "its run has given it up"
        return self._never(why, row_group)

    def _never(self, why: str, row_group: int) -> CacheError:
        reason = f"{why}, and {self.describe(row_group)} will not arrive"
        return CacheError(self._cache, reason, "open the dataset again, which reads what the cache holds then")

    def _asked_for(self) -> str | None:
        """Return what the cache is to be a copy of since another source or part of it was asked for, else None."""
        asked = _config(self._cache)
        if asked is None or self._asked is None or _part(asked) == _part(self._asked):
            return None
        columns = "" if asked.columns is None else f", the columns {', '.join(asked.columns)}"
        rows = "" if asked.where is None else f", where {asked.where}"
        return f"it is to be a copy of {redact(asked.source)}{columns}{rows} now"

    def _other_snapshot(self) -> str | None:
        """Return which snapshot the cache holds, or is to hold, in the place of the one that is read, else None."""
        cache = CacheDirectory(self._cache)
        try:
            other = cache.current() or find_arriving(cache)
        except CacheError as error:
            log.debug("%s: it is not known what it holds: %s", self._cache, error)
            return None
        return None if other is None or other.id == self._snapshot.id else f"{other.id} takes its place"

    def _recorded(self) -> str | None:
        """Return why the run has given the snapshot up, or else why a file will never arrive, if it said so."""
        for _, error in sorted(self._here().errors().items()):  # the snapshot's own error has an empty path
            if error.subject:
                return f"{error.subject}: {error.reason}"
        return None

    def _here(self) -> ArrivingSnapshot:
        return ArrivingSnapshot(self.root)

    def _find_root(self) -> bool:
        """Return whether the files are found in ``snapshots/`` since this was last asked."""
        published = self._snapshot.published_path
        if self._root == published or (self._snapshot.path / FILES).is_file() or not (published / FILES).is_file():
            return False
        self._there[:] = True
        self._root, self._is_complete = published, True
        return True


def _config(cache: Path) -> Config | None:
    """Return what a cache is to be a copy of; None where that cannot be read."""
    try:
        return read_config(cache)
    except (PqcacheError, OSError) as error:
        log.debug("%s: it is not known what it is to hold: %s", cache, error)
        return None


def _part(config: Config) -> tuple[object, ...]:
    """Return of what, and of which part of it, a cache is to be a copy."""
    return config.source, config.where, config.columns, config.shard


class Patience:
    """Looks after a wait: logs when it takes long, has a run that died replaced, and raises what will never come."""

    def __init__(self, arrivals: Arrivals) -> None:
        self._arrivals = arrivals
        self._checked = self._dead_since = 0.0
        self._is_said = False

    def look(self, row_group: int | None, since: float | None) -> None:
        """Check a wait for a row group of the index; it is one since ``since``, if anybody waits for it now.

        Without a row group only the run is looked after.
        """
        now = time.monotonic()
        if now - self._checked >= _CHECK:
            self._checked = now
            if row_group is not None:
                self._arrivals.check(row_group)
            if not self._arrivals.is_dead():
                self._dead_since = 0.0
            elif not self._dead_since:
                self._dead_since = now
            elif now - self._dead_since >= _DEAD:
                self._dead_since = 0.0
                self._arrivals.restart(row_group)
        if row_group is not None and since is not None and not self._is_said and now - since > LONG:
            self._is_said = True
            self._arrivals.log_long_wait(row_group, now - since)

    def end(self) -> None:
        """Note that something that was waited for is there."""
        if self._is_said:
            self._is_said = False
            self._arrivals.log_end_of_wait()
