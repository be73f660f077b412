"""Reads a dataset while a run still fetches its files.

A file exists only once it is complete, so readers wait here before they open one. `Arrivals` is one process's knowledge
of the files, `ArrivalQueue` runs jobs on threads in the order in which their row groups arrive. The functions at the
top compute the order in which an epoch needs its row groups.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt

from pqcache.errors import CacheError, PqcacheError, SourceChanged
from pqcache.reader.order import Ints, Lane, Order
from pqcache.store.arriving import ArrivingSnapshot, Wanted, WantedList, find_arriving
from pqcache.store.background_run import FillRequest, ensure_filling, fill_command, run_error
from pqcache.store.cache_directory import CacheDirectory
from pqcache.store.config import Config, read_config
from pqcache.store.layout import FILES
from pqcache.store.manifest_file import read_heading
from pqcache.store.row_group_index import Index
from pqcache.store.urls import quoted, redact
from pqcache.system.buffers import SharedNumbers
from pqcache.system.threads import ForkSafeThreadPool, is_shut_down, letting_forks_go_on, pass_on
from pqcache.units import format_size


def row_groups_of_lanes(order: Order, first_batches: Mapping[int, int]) -> Ints:
    """The row groups that lanes read, each lane from its own first batch, in the order in which batches need them.

    Row groups are counted as in ``order.counts``. Row groups of each lane's first block come first; then the lanes take
    turns, step by step.
    """
    found = [_needs(order.lane(lane), batch * order.batch_size) for lane, batch in first_batches.items()]
    groups = np.concatenate([np.zeros(0, np.int64), *(groups for groups, _ in found)])
    steps = np.concatenate([np.zeros(0, np.int64), *(steps for _, steps in found)])
    return without_repeats(groups[np.argsort(steps, kind="stable")])


def _needs(lane: Lane, row: int) -> tuple[Ints, Ints]:
    """The row groups of a lane from a row on, with the step, counted from there, in which each is first mixed."""
    block = lane.block_at(row)
    if block >= lane.blocks:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    first = lane.spans(block).start
    groups = lane.row_groups[first:]
    steps = np.arange(first, first + len(groups)) - block // lane.blocks_per_step
    return groups, np.maximum(steps, 0)


def row_groups_of_batches(order: Order, batches: Sequence[int]) -> Ints:
    """The row groups of some batches of an unshuffled epoch, in the order of the batches."""
    if not len(batches):
        return np.zeros(0, np.int64)
    ends = np.cumsum(order.counts)
    numbers = np.asarray(batches, np.int64)
    first = np.searchsorted(ends, numbers * order.batch_size, side="right")
    last = np.searchsorted(ends, np.minimum((numbers + 1) * order.batch_size, order.rows) - 1, side="right")
    change = np.zeros(len(ends) + 1, np.int64)
    np.add.at(change, first, 1)
    np.add.at(change, last + 1, -1)
    found = np.flatnonzero((np.cumsum(change[:-1]) > 0) & (order.counts > 0))
    begin = int(np.searchsorted(found, first[0]))
    return np.concatenate([found[begin:], found[:begin]])


def without_repeats(numbers: Ints) -> Ints:
    """``numbers`` without duplicates, in order of first occurrence."""
    _, first = np.unique(numbers, return_index=True)
    return numbers[np.sort(first)]


T = TypeVar("T")

POLL = 0.05  # seconds between looks at what has arrived
_CHECK = 0.2  # seconds between looks at whether it ever will
_DEAD = 0.5  # seconds for which no run is at work before its end is believed
LONG = 10.0  # seconds, after which a wait is logged
_MOST_RESTARTS = 3  # of runs that end without an error and without having fetched anything
_PROCESSES = 256

log = logging.getLogger("pqcache.arriving")


class Arrivals:
    """What has arrived of an open dataset. Processes forked later share its counters.

    ``request`` says how to start another run if the one fetching the files has ended; None to start none.
    """

    def __init__(self, cache: Path, snapshot: ArrivingSnapshot, index: Index, request: FillRequest | None) -> None:
        self.cache, self._snapshot, self._index, self._request = cache, snapshot, index, request
        self._source = read_heading(snapshot.path / FILES).source
        self._asked = _config(cache)
        self._files = index.numbers("file")
        self._sizes = np.array([entry.size for entry in snapshot.manifest().files], np.int64)
        self._there = np.zeros(len(index.paths), np.bool_)
        self._root = snapshot.path
        self.is_complete = False  # all files are known to be there
        self._since = time.time()
        self._restarts = (0, -1)  # how many, and the bytes that had arrived at the first of them
        self._waited = SharedNumbers(["microseconds"], _PROCESSES)

    @property
    def root(self) -> Path:
        """The directory of the files: below ``arriving/``, and below ``snapshots/`` once they are published."""
        self._find_root()
        return self._root

    @property
    def total_bytes(self) -> int:
        return int(self._sizes.sum())

    @property
    def arrived_bytes(self) -> int:
        self._look(np.flatnonzero(~self._there))
        return int(self._sizes[self._there].sum())

    @property
    def waited_seconds(self) -> float:
        """How long this process and its forks have waited."""
        return float(self._waited.numbers("microseconds").sum()) / 1e6

    def add_waited(self, seconds: float) -> None:
        self._waited.numbers("microseconds")[os.getpid() % _PROCESSES] += int(1e6 * seconds)

    def arrived(self, row_groups: Ints) -> npt.NDArray[np.bool_]:
        """For each row group of the index, whether its file is there."""
        files = self._files[row_groups]
        if not self.is_complete:
            self._look(np.unique(files[~self._there[files]]))
        found: npt.NDArray[np.bool_] = self._there[files]
        return found

    def _look(self, missing: Ints) -> None:
        """Look for missing files; a published snapshot has them all."""
        if not len(missing):
            return
        found = self._here().arrived(self._index.paths[file] for file in missing.tolist())
        self._there[[file for file in missing.tolist() if self._index.paths[file] in found]] = True
        if self._there.all():
            self.is_complete = True
        elif len(found) < len(missing):
            self._find_root()

    def wait(self, row_groups: Ints) -> None:
        """Wait for the files of row groups, by index number; the run fetches them first.

        Raises CacheError or SourceChanged for a file that will never come.
        """
        left = row_groups[~self.arrived(row_groups)]
        if not len(left):
            return
        begun, patience = time.monotonic(), Patience(self)
        with self.wanting(left, urgent=True), letting_forks_go_on():
            while len(left):
                if is_shut_down():
                    raise CacheError(self.cache, "its readers have gone")
                patience.look(int(left[0]), begun)
                time.sleep(POLL)
                left = left[~self.arrived(left)]
        patience.end()
        self.add_waited(time.monotonic() - begun)

    @contextmanager
    def wanting(self, row_groups: Ints, urgent: bool = False) -> Iterator[None]:
        """While entered, tell the run that these row groups of the index are wanted, in this order."""
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
        """Call ``read``, and again if the files were published meanwhile."""
        root = self._root
        try:
            return read()
        except (PqcacheError, OSError):
            if not self._find_root() and self._root == root:
                raise
        return read()

    def describe(self, row_group: int) -> str:
        path = self._index.paths[int(self._files[row_group])]
        return f"row group {int(self._index.numbers('row_group')[row_group])} of {path}"

    def progress(self) -> str:
        arrived, total = self.arrived_bytes, self.total_bytes
        return f"{format_size(arrived)} of {format_size(total)} have arrived"

    def log_long_wait(self, row_group: int, seconds: float) -> None:
        run = self._snapshot.filled_by() or "its run"
        log.warning(
            "%s: waiting since %.0f s for %s, which %s fetches from %s; %s",
            self.cache, seconds, self.describe(row_group), run, self._source, self.progress(),
        )  # fmt: skip

    def is_dead(self) -> bool:
        """Whether apparently no run fetches the missing files."""
        if self.is_complete or self._snapshot.is_being_filled():
            return False
        return not self._find_root() and not self.is_complete

    def check(self, row_group: int) -> None:
        """Raise the error of a missing row group that is known never to come."""
        errors = self._here().errors()
        if (error := errors.get(self._index.paths[int(self._files[row_group])])) is not None:
            raise error
        if "" in errors:
            raise self._abandoned(row_group)

    def restart(self, row_group: int) -> None:
        """Start another run for the missing files; raises CacheError, with the command, if the source is unknown."""
        if (error := run_error(self.cache, self._since)) is not None:
            self._since = time.time()  # whoever goes on all the same has another run started
            raise error
        if (instead := self._asked_for() or self._other_snapshot()) is not None:
            raise self._never(instead, row_group)
        if self._request is None:
            reason = f"the run that fetched it has ended, and {self.describe(row_group)} has not arrived"
            raise CacheError(self.cache, reason, f"continue with: {fill_command(self._source, self.cache)}")
        count, arrived = self._restarts
        count = count + 1 if arrived == self.arrived_bytes else 1
        if count > _MOST_RESTARTS:
            reason = f"the run that fetches it has ended {_MOST_RESTARTS} times before anything more had arrived"
            raise CacheError(self.cache, reason, f"see 'pqcache log {quoted(self.cache)}'")
        self._restarts = count, self.arrived_bytes
        log.warning("%s: the run that fetched it has ended; another one goes on", self.cache)
        ensure_filling(self.cache, self._request, self._is_decided)
        if self.is_dead():
            raise self._abandoned(row_group)

    def _is_decided(self) -> bool:
        """Whether a run continues with these files, or has started over with others."""
        if not self.is_dead() or self._here().is_abandoned():
            return True
        cache = CacheDirectory(self.cache)
        if cache.current() is not None:
            return True
        other = find_arriving(cache)
        return other is not None and other.id != self._snapshot.id and other.is_being_filled()

    def _abandoned(self, row_group: int) -> CacheError:
        why = self._asked_for() or self._recorded() or self._other_snapshot() or "its run has given it up"
        return self._never(why, row_group)

    def _never(self, why: str, row_group: int) -> CacheError:
        reason = f"{why}, and {self.describe(row_group)} will not arrive"
        return CacheError(self.cache, reason, "open the dataset again to read the cache's new content")

    def _asked_for(self) -> str | None:
        """The other source, or part of a source, that this cache has been set to since; else None."""
        asked = _config(self.cache)
        if asked is None or self._asked is None or _part(asked) == _part(self._asked):
            return None
        columns = "" if asked.columns is None else f", the columns {', '.join(asked.columns)}"
        rows = "" if asked.where is None else f", where {asked.where}"
        return f"the cache is now set to copy {redact(asked.source)}{columns}{rows}"

    def _other_snapshot(self) -> str | None:
        """The snapshot that has replaced the one being read, else None."""
        cache = CacheDirectory(self.cache)
        try:
            other = cache.current() or find_arriving(cache)
        except CacheError as error:
            log.debug("%s: it is not known what it holds: %s", self.cache, error)
            return None
        return None if other is None or other.id == self._snapshot.id else f"{other.id} takes its place"

    def _recorded(self) -> str | None:
        """The recorded reason why the run gave up the snapshot, or else a file; None without one."""
        for _, error in sorted(self._here().errors().items()):  # the snapshot's own error has an empty path
            if error.subject:
                return f"{error.subject}: {error.reason}"
        return None

    def _here(self) -> ArrivingSnapshot:
        return ArrivingSnapshot(self.root)

    def _find_root(self) -> bool:
        """Look for the files in ``snapshots/``; True if they were moved there since the last call."""
        published = self._snapshot.published_path
        if self._root == published or (self._snapshot.path / FILES).is_file() or not (published / FILES).is_file():
            return False
        self._there[:] = True
        self._root, self.is_complete = published, True
        return True


def _config(cache: Path) -> Config | None:
    try:
        return read_config(cache)
    except (PqcacheError, OSError) as error:
        log.debug("%s: it is not known what it is to hold: %s", cache, error)
        return None


def _part(config: Config) -> tuple[object, ...]:
    return config.source, config.where, config.columns, config.shard


class Patience:
    """Supervises a wait: logs it if it takes long, replaces a run that died, and raises if waiting is in vain."""

    def __init__(self, arrivals: Arrivals) -> None:
        self._arrivals = arrivals
        self._checked = self._dead_since = 0.0
        self._is_said = False

    def look(self, row_group: int | None, since: float | None) -> None:
        """Check a wait for a row group of the index, begun at ``since`` (None: nobody waits for it now).

        Without a row group, only checks the run, and raises nothing.
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
                with suppress(PqcacheError) if row_group is None else nullcontext():
                    self._arrivals.restart(row_group or 0)
        if row_group is not None and since is not None and not self._is_said and now - since > LONG:
            self._is_said = True
            self._arrivals.log_long_wait(row_group, now - since)

    def end(self) -> None:
        """Note that something has arrived."""
        if self._is_said:
            self._is_said = False
            log.warning("%s: it goes on; %s", self._arrivals.cache, self._arrivals.progress())


P = ParamSpec("P")
_IDLE = 0.25  # seconds between looks while nobody waits


class _Waiting(NamedTuple):
    row_group: int  # of the index
    future: Future[Any]
    job: Callable[[], Any]


class ArrivalQueue:
    """Submits jobs to ``threads``, each when the file of its row group has arrived.

    ``row_groups`` maps the numbers passed to ``submit`` to rows of the index.
    """

    def __init__(self, arrivals: Arrivals, row_groups: Ints, threads: ForkSafeThreadPool) -> None:
        self._arrivals, self._row_groups, self._threads = arrivals, row_groups, threads
        self._lock = threading.Lock()
        self._waiting: list[_Waiting] = []
        self._is_closed = False
        self._wake = threading.Event()
        self._blocked_since: float | None = None  # the thread that uses the results
        self._arrived_last = 0.0
        self.waited_seconds = 0.0  # of that thread
        threading.Thread(target=self._watch, name="pqcache-arrivals", daemon=True).start()

    def submit(self, number: int, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run ``fn`` on a thread once row group ``number`` has arrived; the future gets the error if it never does."""
        row_group = int(self._row_groups[number])
        if self._arrivals.arrived(self._row_groups[number : number + 1])[0]:
            return self._threads.submit(fn, *args, **kwargs)
        future: Future[T] = Future()
        with self._lock:
            if self._is_closed:
                raise RuntimeError("cannot read after the end of an epoch")
            self._waiting.append(_Waiting(row_group, future, partial(fn, *args, **kwargs)))
        self._wake.set()
        return future

    def result(self, future: Future[T]) -> T:
        """Wait for the result of a job, or of work that depends on jobs; count the time spent on arrivals."""
        if future.done() or not self._waiting:
            return future.result()
        begun = self._blocked_since = time.monotonic()
        try:
            return future.result()
        finally:
            self._blocked_since = None
            waited = max(0.0, self._arrived_last - begun)
            self.waited_seconds += waited
            self._arrivals.add_waited(waited)

    def close(self) -> None:
        """Cancel the jobs whose row groups have not arrived."""
        with self._lock:
            self._is_closed = True
            left, self._waiting = self._waiting, []
        self._wake.set()
        for waiting in left:
            waiting.future.cancel()

    def _watch(self) -> None:
        patience = Patience(self._arrivals)
        while not (self._is_closed or (self._arrivals.is_complete and not self._waiting)):
            began = time.monotonic()
            first = self._start_arrived(patience)
            try:
                since = self._blocked_since
                patience.look(first, None if since is None else max(since, self._arrived_last))
            except Exception as error:  # noqa: BLE001 - raised where the results are asked for
                self._fail(error, first)
            self._wake.wait(max(POLL, 4 * (time.monotonic() - began)) if first is not None else _IDLE)
            self._wake.clear()

    def _start_arrived(self, patience: Patience) -> int | None:
        """Submit the jobs whose files have arrived; return the first row group still awaited, if any."""
        with self._lock:
            groups = np.array([waiting.row_group for waiting in self._waiting], np.int64)
            there = self._arrivals.arrived(groups) if len(groups) else np.zeros(0, np.bool_)
            started = [waiting for waiting, is_there in zip(self._waiting, there, strict=True) if is_there]
            self._waiting = [waiting for waiting, is_there in zip(self._waiting, there, strict=True) if not is_there]
            first = self._waiting[0].row_group if self._waiting else None
        if started:
            patience.end()
            self._arrived_last = time.monotonic()
        for waiting in started:
            try:
                self._threads.submit(waiting.job).add_done_callback(partial(pass_on, waiting.future))
            except RuntimeError:  # the pool is being shut down
                waiting.future.cancel()
        return first

    def _fail(self, error: Exception, row_group: int | None) -> None:
        """Fail the jobs of a row group, or all jobs if the error is not about one file."""
        with self._lock:
            only = isinstance(error, SourceChanged)
            failed = [waiting for waiting in self._waiting if not only or waiting.row_group == row_group]
            self._waiting = [waiting for waiting in self._waiting if only and waiting.row_group != row_group]
        for waiting in failed:
            with suppress(InvalidStateError):  # it was cancelled
                waiting.future.set_exception(error)


@contextmanager
def arrival_queue(
    arrivals: Arrivals | None, row_groups: Ints, threads: ForkSafeThreadPool
) -> Iterator[ArrivalQueue | None]:
    """Yield a queue for a dataset that is still arriving; None for any other dataset."""
    if arrivals is None or arrivals.is_complete:
        yield None
        return
    queue = ArrivalQueue(arrivals, row_groups, threads)
    try:
        yield queue
    finally:
        queue.close()
