"""One run on a cache: its options, result, cleanup and bandwidth limit."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from typing import Any

from pqcache.errors import CacheError, ContractNotMet, PartitionsSkipped, PqcacheError, UsageError, error_below
from pqcache.events import Advanced, Collected, Event, OnEvent, Reused, Started, Warned, ignore
from pqcache.options import SyncRun
from pqcache.store.cache_directory import CacheDirectory
from pqcache.store.config import Config
from pqcache.store.drivers.timeouts import FEW_TRIES, Patience
from pqcache.store.expect import Finding, lines_of, stale, unmet
from pqcache.store.gc import remove_old_snapshots
from pqcache.store.history import REFUSED, RunRecord, now_text
from pqcache.store.manifest import TableVersion, Totals
from pqcache.store.publish import unmet_of
from pqcache.store.snapshot import Snapshot, read_kept, write_kept
from pqcache.store.sync.bad_partitions import SkippedPartition
from pqcache.store.sync.plan import PartitionChange, Plan, partition_changes
from pqcache.store.table_part import NewestPartitions
from pqcache.store.tables.data_files import PassedOver
from pqcache.store.urls import quoted, redact
from pqcache.system.disk import discard
from pqcache.units import Stopwatch, format_count, parse_size

_RECORDED = 100  # partitions that a record in the history names
OFF = "off"
_SLICE = 1.0  # seconds: after which a thread that waits looks at the timetable again
_ENTRY = re.compile(r"([01]?\d|2[0-3]):([0-5]\d),(\S+)")


class ByteCounter:
    """Passes events on, counts downloaded bytes, and slows the threads that download to a limit.

    It also records when the source was last ``listed``, and tells ``record`` the phase of the run.
    """

    def __init__(self, on_event: OnEvent, limit: BandwidthLimit | None = None) -> None:
        self.bytes, self.listed = 0, now_text()
        self.record: RunRecord | None = None
        self._fetches = False
        self._on_event, self._limit = on_event, limit
        self._lock = threading.Lock()

    def __call__(self, event: Event) -> None:
        if isinstance(event, Reused) and self._fetches:  # what this run has fetched itself
            return
        if isinstance(event, Started):
            self._fetches |= event.phase == "fetch"
            if event.phase == "list":
                self.listed = now_text()
            if self.record is not None:
                self.record.enter(event.phase)
        if isinstance(event, Advanced) and event.phase == "fetch":
            with self._lock:
                self.bytes += event.amount
        self._on_event(event)
        if isinstance(event, Advanced) and event.phase == "fetch" and event.amount > 0:
            self.keep_within_limit(event.amount)

    def keep_within_limit(self, amount: int) -> None:
        """Wait until ``amount`` received bytes are within the limit, if they belong to a download."""
        if self._limit is not None:
            self._limit.take(amount)


def report_fetching(on_event: OnEvent, total: int, here: int, files: int = 0) -> None:
    """Report that ``total`` bytes are being fetched, ``here`` of them left by earlier runs."""
    if here:
        on_event(Reused(here, total))
    on_event(Started("fetch", total - here, files=files))


@dataclass(frozen=True, kw_only=True)
class RunOptions(SyncRun):
    """Options of one run, which the cache does not remember.

    Attributes:
        patience: when to stop retrying after transient errors.
        on_event: called with what happens.
        watch: started with the run.
    """

    patience: Patience = FEW_TRIES
    on_event: ByteCounter = field(default_factory=lambda: ByteCounter(ignore))
    watch: Stopwatch = field(default_factory=Stopwatch)


@dataclass(frozen=True, kw_only=True)
class CacheRun:
    """A run of ``command`` on ``cache``, which is locked unless it is a dry run.

    ``config`` is remembered from now on, ``current`` the snapshot that the run began with. A sync starts from the
    ``candidate`` if there is one, and publishes nothing if the cache ``is_held``. ``record`` is for the history; a run
    that changes nothing has none. ``previous_source`` is set if a sync replaces the source, and ``remembered`` is the
    configuration before that.
    """

    command: str
    cache: CacheDirectory
    config: Config
    current: Snapshot | None
    options: RunOptions
    candidate: Snapshot | None = None
    is_held: bool = False
    record: RunRecord | None = None
    previous_source: str | None = None
    remembered: Config | None = None

    @property
    def base(self) -> Snapshot | None:
        """The snapshot whose files a new one reuses."""
        return self.candidate or self.current

    @property
    def candidate_is_due(self) -> bool:
        """Whether a sync that finds nothing new must check again whether the candidate can be published."""
        return self.candidate is not None and (not self.is_held or bool(unmet_of(self.candidate)))

    @property
    def changes_index(self) -> bool:
        """Whether a new snapshot is published even if no file has changed."""
        return self.remembered is not None and self.config.time_units != self.remembered.time_units

    def __post_init__(self) -> None:
        self.options.on_event.record = self.record


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """The result of a run, or of a dry run: its plan, the new snapshot if there is one, and totals of the current one.

    ``candidate`` is the unpublished snapshot that the run made, or found unchanged; then ``totals`` are its own.
    ``touched`` are the changed partitions. ``table`` is the version of the table if the source is one, ``newest``
    counts its partitions taken by ``--newest``. ``skipped`` are the partitions that could not be taken. ``passed_over``
    counts listed files that were not taken, None without a listing. ``findings`` come from the rules of ``[expect]``.
    """

    plan: Plan
    published: Snapshot | None
    totals: Totals
    candidate: Snapshot | None = None
    touched: tuple[PartitionChange, ...] = ()
    table: TableVersion | None = None
    newest: NewestPartitions | None = None
    passed_over: PassedOver | None = None
    skipped: tuple[SkippedPartition, ...] = ()
    findings: tuple[Finding, ...] = ()


@dataclass(frozen=True, kw_only=True)
class SyncReport:
    """The result of a run, or with ``dry_run`` its plan.

    Attributes:
        cache: its directory.
        source: its URL, without secrets.
        snapshot: the current one after the run.
        published: whether this run published it.
        dry_run: nothing was done.
        added, changed, removed, unchanged: numbers of source files; with ``shard``, files that belong to another node
            now count as removed.
        fetched_again: unchanged source files that were damaged in the cache, or fetched with other columns or options.
        rewritten: partition directories.
        fetched_bytes: downloaded.
        files, row_groups, rows, bytes: of the ``candidate`` if there is one, else of the current snapshot.
        seconds: of the whole run.
        shard: the share that the cache holds, like ``0/3``, or None.
        version: of a Delta or Iceberg table, else None.
        newest, newest_of: with ``--newest``, the numbers of taken and of all partitions, else None.
        previous_source: the source of the previous run, if it was another one.
        skipped: partitions that could not be taken as they are at the source.
        touched: the changed partitions.
        passed_over: numbers of source files that were not taken, by reason; None if the source was not listed.
        expect: findings of the rules of ``[expect]`` that did not block the snapshot: warnings, and partitions without
            enough history.
        candidate: the new snapshot if it waits to be published, else None.
    """

    cache: str
    source: str
    snapshot: str | None
    published: bool
    dry_run: bool
    added: int
    changed: int
    removed: int
    unchanged: int
    fetched_again: int
    rewritten: int
    fetched_bytes: int
    files: int
    row_groups: int
    rows: int
    bytes: int
    seconds: float
    shard: str | None = None
    version: str | None = None
    newest: int | None = None
    newest_of: int | None = None
    previous_source: str | None = None
    skipped: tuple[SkippedPartition, ...] = ()
    touched: tuple[PartitionChange, ...] = ()
    passed_over: PassedOver | None = None
    expect: tuple[Finding, ...] = ()
    candidate: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values."""
        return asdict(self)

    def skipped_error(self) -> PartitionsSkipped | None:
        """Return the error for partitions that could not be taken, or None if all were."""
        if not self.skipped:
            return None
        number = format_count(len(self.skipped), "partition")
        named = ", ".join(item.partition for item in self.skipped[:3]) + (", ..." if len(self.skipped) > 3 else "")
        advice = "the next sync tries again; correct the files at the source, or let their writer finish"
        return PartitionsSkipped(self.cache, f"{number} skipped: {named}", advice)

    def raise_if_skipped(self) -> None:
        """Raise PartitionsSkipped if partitions could not be taken."""
        if (error := self.skipped_error()) is not None:
            raise error


def finish_run(run: CacheRun, result: RunResult) -> SyncReport:
    """Remove old snapshots and leftovers, and record the run in the history.

    A sync that published nothing warns if the data are older than ``[expect]`` allows; it raises ContractNotMet if the
    candidate does not meet its rules. A dry run changes nothing. Raises PqcacheError if something cannot be removed;
    the history still gets the run's result.
    """
    refusal = _refusal(run, result)
    is_idle = result.plan.nothing_to_do and not (result.published or result.findings)
    if run.command == "sync" and run.current is not None and is_idle:
        result = replace(result, findings=_stale(run, run.current))
    report = _report(run, result)
    if run.record is None:
        if refusal is not None:
            raise refusal
        return report
    done = report.to_dict()
    if touched := done.pop("touched"):
        done |= {"touched": touched[:_RECORDED], "touched_partitions": len(touched)}
    done["expect"] = done["expect"][:_RECORDED]
    if run.command == "sync":
        done["listed"] = run.options.on_event.listed
    try:
        if run.candidate is not None and not (result.published or result.candidate):  # the source is as what is current
            kept = read_kept(run.cache.path)  # a reader may keep the files, and none can release them
            write_kept(run.cache.path, replace(kept, last_number=max(kept.last_number, run.candidate.number)))
        removed = _clean(run)
    except OSError as error:
        left = error_below(run.cache.path, error)
        reason = f"old data could not be removed: {left.reason}; {report.snapshot} is current all the same"
        left = PqcacheError(left.subject, reason, left.advice)
        run.record.end({**done, "error": str(left)}, run.config)
        raise left from error
    if refusal is not None:
        done |= {"result": REFUSED, "exit_code": refusal.exit_code, "error": str(refusal)}
    run.record.end({**done, **({"collected": removed} if removed else {})}, run.config)
    if refusal is not None:
        raise refusal
    return report


def _refusal(run: CacheRun, result: RunResult) -> ContractNotMet | None:
    """The error if the candidate, or in a dry run the planned snapshot, doesn't meet the rules."""
    lines, cache = unmet(result.findings), quoted(run.cache.path)
    if not lines:
        return None
    advice = "it would not be published"
    if not run.options.dry_run:
        look, publish = f"'pqcache inspect {cache} --candidate'", f"'pqcache rollback {cache} --accept'"
        advice = f"nothing was published, look at it with {look}, correct the source, or publish it with {publish}"
    return ContractNotMet(run.cache.path, "; ".join(lines), advice)


def _stale(run: CacheRun, current: Snapshot) -> tuple[Finding, ...]:
    found: tuple[Finding, ...] = ()
    with suppress(CacheError):  # a damaged manifest is the concern of the next sync that publishes
        found = stale(run.config.rules, current, time.time())
    for line in lines_of(found):
        run.options.on_event(Warned(line))
    return found


def _clean(run: CacheRun) -> list[str]:
    """Remove everything in ``tmp/``, and old snapshots; return the latter."""
    removed = [snapshot.id for snapshot in remove_old_snapshots(run.cache, run.config.keep)]
    for snapshot in removed:
        run.options.on_event(Collected(snapshot))
    for left in run.cache.tmp_dir.iterdir():
        discard(left)
    return removed


def _report(run: CacheRun, result: RunResult) -> SyncReport:
    plan, totals, options = result.plan, result.totals, run.options
    current = result.published or run.current
    return SyncReport(
        cache=str(run.cache.path),
        source=redact(run.config.source),
        snapshot=current.id if current is not None else None,
        published=result.published is not None,
        dry_run=options.dry_run,
        added=len(plan.added),
        changed=len(plan.changed),
        removed=len(plan.removed),
        unchanged=plan.unchanged,
        fetched_again=max(0, len(plan.downloads) - len(plan.added) - len(plan.changed)),
        rewritten=plan.rewrites,
        fetched_bytes=plan.download_bytes if options.dry_run else options.on_event.bytes,
        files=totals.files,
        row_groups=totals.row_groups,
        rows=totals.rows,
        bytes=totals.size,
        seconds=options.watch.seconds,
        shard=run.config.shard,
        version=None if result.table is None else result.table.version or None,
        newest=result.newest.taken if result.newest is not None else None,
        newest_of=result.newest.listed if result.newest is not None else None,
        previous_source=run.previous_source,
        skipped=result.skipped,
        touched=result.touched or partition_changes(plan),
        passed_over=result.passed_over,
        expect=result.findings,
        candidate=None if result.candidate is None else result.candidate.id,
    )


class BandwidthLimit:
    """One token bucket for all threads: after receiving bytes, each waits until their time has passed.

    Not reading from a connection slows it down, and the wait does not count as a stall of the server.
    """

    def __init__(
        self,
        text: str | int,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self._timetable = parse_timetable(text)
        self._clock, self._sleep, self._now = clock, sleep, now
        self._lock = threading.Lock()
        self._free = -float("inf")  # when all bytes that were received are paid for

    def rate(self) -> int | None:
        """Bytes per second allowed now, by local time; None for no limit."""
        moment = self._now()
        minute = moment.hour * 60 + moment.minute
        current = self._timetable[-1][1]  # from the day before
        for begins, rate in self._timetable:
            if begins <= minute:
                current = rate
        return current

    def take(self, amount: int) -> None:
        """Wait until ``amount`` received bytes are within the limit."""
        with self._lock:
            rate = self.rate()
            if rate is None:
                return
            due = self._free = max(self._free, self._clock()) + amount / rate
        while (left := due - self._clock()) > 0:
            self._sleep(min(left, _SLICE))
            if left > _SLICE and self.rate() != rate:  # the next bytes pay by the new rate, from now on
                with self._lock:
                    self._free = min(self._free, self._clock())
                return


def parse_timetable(text: str | int) -> list[tuple[int, int | None]]:
    """Parse the limits of a day: the minute at which each begins, and its bytes per second, None for no limit.

    >>> parse_timetable("100MB")
    [(0, 104857600)]
    >>> parse_timetable("08:00,10M 19:00,off")
    [(480, 10485760), (1140, None)]
    """
    words = str(text).split()
    if len(words) == 1 and ":" not in words[0]:
        return [(0, _rate(words[0]))]
    found = {}
    for word in words:
        match = _ENTRY.fullmatch(word)
        if match is None:
            raise _error(text)
        found[int(match[1]) * 60 + int(match[2])] = _rate(match[3])
    if not found:
        raise _error(text)
    return sorted(found.items())


def _rate(text: str) -> int | None:
    if text == OFF:
        return None
    try:
        rate = parse_size(text)
    except UsageError:
        raise _error(text) from None
    if rate < 1:
        raise UsageError(f"--bwlimit {text}", "allows no bandwidth", f"write a size, or '{OFF}' for no limit")
    return rate


def _error(text: str | int) -> UsageError:
    return UsageError(
        f"--bwlimit {text!r}", "not bytes a second", "write it like 100MB, or by the time of day: '08:00,10M 19:00,off'"
    )
