"""Checks that a cache is as it was published, and repairs it by downloading or rebuilding damaged files.

Processes of ``file_checks.py`` read files that may be damaged; a process that dies or hangs is a finding.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import os
import queue
import select
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, TypeVar

from pqcache.errors import (
    CacheError,
    CacheLocked,
    DamagedError,
    PqcacheError,
    SourceIncomplete,
    UsageError,
    disk_errors,
)
from pqcache.events import Advanced, Damaged, OnEvent, Started, ignore
from pqcache.options import COMMANDS, CONTENT, IDENTITY, Unpack, VerifyArguments, all_values, documented
from pqcache.store.cache_directory import CacheDirectory
from pqcache.store.config import Config, read_config
from pqcache.store.drivers.base import Source
from pqcache.store.history import recorded_run, skipped_in
from pqcache.store.key_lookup import KEYS, check_key_index, columns_indexed, command_for, directory_of
from pqcache.store.layout import CHECKSUMS, FILES, ROW_GROUPS, SUMMARY
from pqcache.store.manifest import FileEntry, Manifest, SnapshotMetadata, TableVersion
from pqcache.store.ownership import check_ownership
from pqcache.store.snapshot import Snapshot, check_not_held
from pqcache.store.sync.build_snapshot import build_snapshot
from pqcache.store.sync.cache_run import BandwidthLimit, ByteCounter, CacheRun, RunOptions, finish_run
from pqcache.store.sync.command import sync
from pqcache.store.sync.decide import (
    Comparison,
    Held,
    compare_content,
    find_damaged,
    find_unusable,
    plan_for,
    taken_files,
    with_tags,
)
from pqcache.store.sync.download.subset import select_subset
from pqcache.store.sync.incremental import spelled
from pqcache.store.sync.listing import (
    known_keys,
    list_source,
    listing_rules,
    newest_rule,
    only_newest,
    read_memo,
    ready_paths,
)
from pqcache.store.sync.plan import Recipe, plan_sync, recipe_for
from pqcache.store.sync.safety_checks import wait_rules
from pqcache.store.sync.snapshot_job import Origin
from pqcache.store.tables.base import OpenOptions, VersionRule
from pqcache.store.tables.open_table import open_table
from pqcache.store.urls import quoted, redact
from pqcache.units import Stopwatch, format_count

T = TypeVar("T")
FASTPARQUET = "fastparquet"
_FOOTERS_AT_ONCE = 64  # files whose footers are compared with the index at once
_FOOTERS_EACH, _BYTES_EACH = 256, 32 << 20  # that a process checks in the time in which another one starts
_SECONDS = 60.0  # for the smallest step of reading a file, after which it counts as hanging
_START = 120.0  # seconds in which a process has to have loaded its libraries
_ROOT = Path(__file__).resolve().parents[3]
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MALLOC_ARENA_MAX")  # each thread reserves address space
log = logging.getLogger("pqcache.verify")
Request = dict[str, Any]
Answer = dict[str, Any]
WELL: Answer = {"well": True}


@dataclass(frozen=True)
class Damage:
    """A finding: the path below the snapshot, row group and column if known, and a message."""

    path: str
    row_group: int | None
    column: str | None
    message: str


@dataclass(frozen=True, kw_only=True)
class VerifyReport:
    """The findings in a snapshot of ``files`` files with ``rows`` rows and ``bytes`` bytes.

    ``damage`` is empty if there is none. ``changed`` lists files that differ between cache and source (None without
    ``source``). ``unread`` maps columns that the second engine couldn't read to the reason. ``repaired`` is the new
    snapshot, if one was made; then ``damage`` was found in the old one, and ``left`` in the new one. ``skipped`` are
    the partitions that the last sync couldn't take, as in `SyncReport`.
    """

    cache: str
    snapshot: str
    deep: bool
    engine: str | None
    files: int
    rows: int
    bytes: int
    damage: tuple[Damage, ...]
    changed: tuple[str, ...] | None
    unread: Mapping[str, str]
    repaired: str | None
    left: tuple[Damage, ...]
    seconds: float
    skipped: tuple[Mapping[str, Any], ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing is damaged, or all damage was repaired."""
        return not self.left if self.repaired is not None else not self.damage

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values."""
        return {**asdict(self), "ok": self.ok}

    def raise_if_not_ok(self) -> None:
        """Raise DamagedError if there is damage, PqcacheError if only the source has changed."""
        if not self.ok:
            wrong = self.damage if self.repaired is None else self.left
            paths = sorted({item.path for item in wrong})
            more = f" and {len(paths) - 3:,} more" if len(paths) > 3 else ""
            how = "--deep --repair" if self.deep else "--repair"  # what only --deep finds, only --deep repairs
            advice = f"'pqcache verify {quoted(self.cache)} {how}' fetches that again"
            if all(path.startswith(KEYS) for path in paths):
                columns = " ".join(f"--key {shlex.quote(str(item.column))}" for item in wrong)
                advice = f"'pqcache index {quoted(self.cache)} {columns}' rebuilds that"
            if self.repaired is not None:
                advice = "it is damaged at the source: have it written again there"
            raise DamagedError(self.cache, f"damaged: {', '.join(paths[:3])}{more}", advice)
        if self.changed:
            raise PqcacheError(
                self.cache,
                f"{format_count(len(self.changed), 'file')} changed at the source",
                f"run 'pqcache sync {quoted(self.cache)}'",
            )


@documented(VerifyArguments, *COMMANDS["verify"])
def verify(
    cache: str | os.PathLike[str], *, on_event: OnEvent = ignore, **given: Unpack[VerifyArguments]
) -> VerifyReport:
    """Check that the current snapshot of ``cache`` is as it was published.

    Every file of the manifest must exist with the recorded size and a footer that agrees with manifest and index.
    Processes of their own, with bounded memory and time, read the files, since damaged Parquet may crash its reader.

    Args:
        cache: the cache's directory.
        on_event: called with what happens, from several threads.
        given: the options, as the table in pqcache.options has them.

    >>> report = verify("cache/shop", deep=True)
    >>> report.ok, report.files, report.damage
    (True, 6, ())

    Damage is reported, not raised. Raises UsageError, CacheError, CacheLocked, SourceError or
    SourceIncomplete.
    """
    options = all_values(given, *COMMANDS["verify"])
    engine, limit = options.engine, options.bwlimit
    counter = ByteCounter(on_event, None if limit is None else BandwidthLimit(limit))
    run = RunOptions(wait=options.wait, compare=options.compare, on_event=counter)
    if engine is not None and importlib.util.find_spec(FASTPARQUET) is None:
        raise UsageError(f"--engine {FASTPARQUET}", "it is not installed", f"pip install 'pqcache[{FASTPARQUET}]'")
    processes = options.jobs or os.cpu_count() or 1
    check = _SnapshotCheck(options.deep or engine is not None, engine, processes, on_event)
    target = CacheDirectory.open(cache)
    snapshot, lease = target.lease()
    with lease:
        manifest, damage = check.snapshot(snapshot)
        changed = None
        if (options.source or options.compare != IDENTITY) and manifest is not None:
            changed = _changes_at_source(target, snapshot, manifest, options.options, run)
    entries = manifest.files if manifest is not None else ()
    repaired: Snapshot | None = None
    left: tuple[Damage, ...] = ()
    if options.repair and damage:
        damaged = frozenset(item.path for item in damage)
        repaired = _repair(target, snapshot, manifest, damaged, options.options, run)
        _, left = check.snapshot(repaired, frozenset(entries))  # the source may hold the same damage
    return VerifyReport(
        cache=str(target.path),
        snapshot=snapshot.id,
        deep=check.deep,
        engine=engine,
        files=len(entries),
        rows=sum(entry.rows for entry in entries),
        bytes=sum(entry.size for entry in entries),
        damage=damage,
        changed=changed,
        unread=dict(sorted(check.unread.items())),
        repaired=None if repaired is None else repaired.id,
        left=left,
        seconds=run.watch.seconds,
        skipped=skipped_in(target.path, snapshot.id),
    )


class _SnapshotCheck:
    """Checks snapshots on several threads and collects findings."""

    def __init__(self, deep: bool, engine: str | None, jobs: int, on_event: OnEvent) -> None:
        self.deep = deep
        self.engine = engine
        self.unread: dict[str, str] = {}
        self._jobs = jobs
        self._on_event = on_event
        self._lock = threading.Lock()

    def snapshot(
        self, snapshot: Snapshot, known: frozenset[FileEntry] = frozenset()
    ) -> tuple[Manifest | None, tuple[Damage, ...]]:
        """Check a snapshot except ``known`` files; return its manifest, None if damaged, and the damage."""
        found: list[Damage] = []
        manifest = self._read(snapshot, FILES, snapshot.checked_manifest, found)
        index = self._read(snapshot, ROW_GROUPS, snapshot.checked_index, found)
        self._read(snapshot, SUMMARY, lambda: snapshot.check(SUMMARY), found)
        self._keys(snapshot, found)
        if manifest is not None:
            self._files(snapshot, [entry for entry in manifest.files if entry not in known], index is not None, found)
        return manifest, tuple(sorted(found, key=lambda item: (item.path, item.row_group or 0, item.column or "")))

    def _read(self, snapshot: Snapshot, name: str, read: Callable[[], T], found: list[Damage]) -> T | None:
        """Read a file; None if it, or the file with its checksum, is damaged."""
        try:
            return read()
        except DamagedError as error:
            of_checksums = error.subject == str(snapshot.path / CHECKSUMS)
            damage = Damage(CHECKSUMS if of_checksums else name, None, None, error.reason)
            if damage not in found:  # all three may meet the same
                self._add(found, damage)
            return None

    def _keys(self, snapshot: Snapshot, found: list[Damage]) -> None:
        """Check the key indexes, and with ``deep`` their runs."""
        for column in columns_indexed(snapshot.path):
            directory = directory_of(snapshot.path, column)
            try:
                check_key_index(directory, self.deep)
            except DamagedError as error:
                message = f"{error.reason}; '{command_for(directory)}' rebuilds it"
                self._add(found, Damage(f"{KEYS}/{directory.name}", None, column, message))

    def _files(self, snapshot: Snapshot, entries: Sequence[FileEntry], indexed: bool, found: list[Damage]) -> None:
        misplaced = find_damaged(snapshot, entries)
        weight = {entry.path: entry.size if self.deep else 1 for entry in entries}
        self._on_event(Started("verify", sum(weight.values()), "bytes" if self.deep else "files"))
        requests: list[Request] = []
        for entry in entries:
            if entry.path in misplaced:
                self._add(found, Damage(entry.path, None, None, _misplaced(snapshot.path / entry.path, entry.size)))
                self._on_event(Advanced("verify", weight[entry.path]))
                continue
            requests.append(
                {
                    "path": entry.path,
                    "rows": entry.rows,
                    "row_groups": entry.row_groups,
                    "checksum": entry.checksum,
                    "deep": self.deep,
                    "engine": self.engine,
                    "seconds": _SECONDS,
                }
            )
        requests.sort(key=lambda request: -weight[request["path"]])  # large ones first, so that all end together
        each = _BYTES_EACH if self.deep else _FOOTERS_EACH
        count = min(self._jobs, len(requests), 1 + sum(weight.values()) // each)
        if not self.deep and len(requests) > _FOOTERS_AT_ONCE:  # a request for each would take longer than its check
            several = (requests[i : i + _FOOTERS_AT_ONCE] for i in range(0, len(requests), _FOOTERS_AT_ONCE))
            requests = [{"files": files, "seconds": _SECONDS} for files in several]

        def answer(request: Request, answered: Answer) -> None:
            self._answer(found, request["path"], answered)

        def end(request: Request) -> None:
            self._on_event(Advanced("verify", weight[request["path"]]))

        words = [*(["index"] if indexed else []), *([self.engine] if self.engine else [])]
        ask_all([Checker(snapshot.path, *words) for _ in range(count)], requests, answer, end)

    def _answer(self, found: list[Damage], path: str, answer: Answer) -> None:
        if "unread" in answer:
            with self._lock:
                self.unread.setdefault(answer["unread"], answer["why"])
            return
        message = answer["damage"]
        if answer.get("index"):
            path, message = ROW_GROUPS, f"{path}: {message}"
        self._add(found, Damage(path, answer.get("row_group"), answer.get("column"), message))

    def _add(self, found: list[Damage], damage: Damage) -> None:
        with self._lock:
            found.append(damage)
        self._on_event(Damaged(damage.path, damage.row_group, damage.column, damage.message))


def _misplaced(path: Path, size: int) -> str:
    if path.is_symlink():
        return "is a symbolic link"
    if not path.exists():
        return "is missing"
    if not path.is_file():
        return "is not a file"
    found = path.stat().st_size
    if found != size:
        return f"has {found:,} bytes instead of {size:,}"
    return "is behind a symbolic link"


def _repair(
    cache: CacheDirectory,
    snapshot: Snapshot,
    manifest: Manifest | None,
    damaged: frozenset[str],
    store_options: Mapping[str, str],
    options: RunOptions,
) -> Snapshot:
    """Publish a new snapshot in which the files at the paths ``damaged`` are downloaded again from the source.

    All other files are kept, even if the source has newer ones, which a sync fetches. Raises SourceIncomplete if a
    damaged file has changed at the source. Without a ``manifest`` everything is synced.
    """
    check_not_held(cache.path)
    if manifest is None:
        report = sync(cache.path, options=store_options, wait=options.wait, on_event=options.on_event)
        if not report.published or report.snapshot is None:
            raise CacheError(
                cache.path, "its manifest is damaged, which sync did not detect", "sync into a new directory"
            )
        return cache.snapshot(report.snapshot)
    with ExitStack() as stack, disk_errors(cache.path):
        record = stack.enter_context(recorded_run(cache, "repair", options.wait, options.on_event))
        config = read_config(cache.path)
        source = _open(config, store_options, snapshot, manifest.table)
        stack.callback(source.close)
        if cache.current() != snapshot:
            raise CacheLocked(cache.path, "another run has published meanwhile", "verify again")
        held = sorted({file.path: file for entry in manifest.files for file in entry.sources}.items())
        rules, listed = listing_rules(config, snapshot), [file for _, file in held]
        types, known = rules.files.types, rules.known
        files, subset = select_subset(source, listed, rules.where, rules.columns, types, known, rules.ignore_case)
        if config.ignore_case:
            subset = spelled(subset, snapshot, files)
        recipe = recipe_for(config, subset.recipe)
        plan = plan_sync(files, manifest.files, recipe, damaged | find_damaged(snapshot, manifest.files))
        run = CacheRun(
            command="repair",
            cache=cache,
            config=config,
            current=snapshot,
            options=replace(options, watch=Stopwatch()),
            record=record,
        )
        metadata = SnapshotMetadata(
            source=redact(config.source),
            where=config.where,
            shard=manifest.shard,
            listing=manifest.listing,
            table=manifest.table,
        )
        origin = Origin(source=source, subset=subset, confirm=partial(_check_unchanged, cache, manifest))
        result = build_snapshot(run, plan, metadata, held=manifest.files, origin=origin, reindex=True)
        finish_run(run, result)
    assert result.published is not None
    return result.published


def _check_unchanged(cache: CacheDirectory, manifest: Manifest, entries: Sequence[FileEntry]) -> None:
    """Raise SourceIncomplete if a file of ``entries`` has another version than in ``manifest``.

    Otherwise the snapshot would mix two states of the source.
    """
    held = {file.path: file.identity for entry in manifest.files for file in entry.sources}
    for file in (file for entry in entries for file in entry.sources):
        if not held[file.path].is_still(file.identity):
            raise SourceIncomplete(
                file.path,
                "is damaged in the cache and has changed at its source since it was synced",
                f"nothing was published, run 'pqcache sync {quoted(cache.path)}' and verify again",
            )


def _changes_at_source(
    cache: CacheDirectory,
    snapshot: Snapshot,
    manifest: Manifest,
    store_options: Mapping[str, str],
    options: RunOptions,
) -> tuple[str, ...]:
    """List the source files that a sync would download or drop now, by their identities.

    If ``options.compare`` is ``content``, files with other content count too. Raises UsageError if contents can't be
    compared because files were rewritten or have only some columns or rows, and CacheError if other users can change
    the cache, as they could point it to another source.
    """
    check_ownership(cache.path)
    config, comparison = read_config(cache.path), Comparison()
    source = _open(config, store_options, snapshot)
    try:
        memo = None if options.compare == CONTENT else read_memo(cache.path)
        listing = list_source(source, options.on_event, listing_rules(config, snapshot), memo=memo)
        listing = only_newest(listing, newest_rule(config, cache, snapshot))
        if options.compare == CONTENT:
            comparison = compare_content(source, listing.files, snapshot, manifest.files, options)
    finally:
        source.close()
    if comparison.uncompared:
        raise UsageError(
            "--compare content",
            f"{format_count(len(comparison.uncompared), 'file')} of the cache are not copies of source files, like "
            f"{min(comparison.uncompared)}",
            f"'pqcache sync {quoted(cache.path)} --compare content' fetches such files again",
        )
    manifest = with_tags(manifest, listing.files)
    rules = wait_rules(config)
    files = taken_files(listing, rules, manifest)
    held = Held(unusable=frozenset().union(*find_unusable(snapshot, manifest.files)), comparison=comparison)
    plan = plan_for(listing, files, manifest, Recipe(), held, config.shard, ready_paths(listing, rules))
    return tuple(sorted((*plan.added, *plan.changed, *plan.removed)))


def _open(
    config: Config, store_options: Mapping[str, str], snapshot: Snapshot, table: TableVersion | None = None
) -> Source:
    options = OpenOptions(
        store={**config.options, **store_options},
        hdfs_driver=config.hdfs_driver,
        as_files=config.as_files,
        rule=VersionRule(version=table.version) if table is not None and table.version else config.version_rule,
        keys=known_keys(snapshot) if config.ignore_case else None,
    )
    return open_table(config.source, options)


class Checker:
    """A process of ``file_checks.py``, started by the first request, and by the next one after it dies."""

    def __init__(self, snapshot: Path, *words: str) -> None:
        self._arguments = [str(snapshot), *words]
        self._process: subprocess.Popen[bytes] | None = None
        self._pending = b""

    def ask(self, request: Request) -> Iterator[Answer]:
        """Yield the answers; if the process dies or hangs, the last one is ``damage``."""
        process = self._process or self._start()
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it is dead, as its answer will say
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
        seconds = _START
        where: Answer = {}
        while True:
            line = self._line(process, seconds)
            if not line:
                why = f"did not end within {seconds:.0f} s" if line is None else self._end(process.wait())
                self.close()
                yield {"damage": f"the process that read it {why}", **where}
                return
            answer = json.loads(line)
            if "end" in answer:
                return
            if "step" in answer:
                step, seconds = answer["step"], answer["seconds"]
                where = {"row_group": step[0], "column": step[1]} if isinstance(step, list) else {}
            else:
                yield answer

    def close(self) -> None:
        process, self._process, self._pending = self._process, None, b""
        if process is not None:
            process.kill()
            process.communicate()
            self._stderr.close()

    def _start(self) -> subprocess.Popen[bytes]:
        found = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH", "")]))
        environment = {**os.environ, "PYTHONPATH": found, "PYTHONSAFEPATH": "1", "ARROW_DEFAULT_MEMORY_POOL": "system"}
        self._stderr = TemporaryFile()  # noqa: SIM115  closed with the process
        self._process = subprocess.Popen(
            [sys.executable, "-m", "pqcache.store.file_checks", *self._arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env={**environment, **dict.fromkeys(_ONE_THREAD, "1")},
            start_new_session=True,  # Ctrl-C is for the command
        )
        return self._process

    def _end(self, status: int) -> str:
        """Why the process died; raises PqcacheError if damage wasn't the cause."""
        if status < 0:
            return f"was ended by {signal.Signals(-status).name}"
        self._stderr.seek(0)
        last = (self._stderr.read().decode(errors="replace").strip().splitlines() or [f"status {status}"])[-1]
        if "MemoryError" in last:
            return "ran out of memory"
        raise PqcacheError(
            "verify", f"the process that checks files cannot start: {last}", "check its memory and its libraries"
        )

    def _line(self, process: subprocess.Popen[bytes], seconds: float) -> bytes | None:
        """The next line; empty at the end, None after the timeout."""
        assert process.stdout is not None
        descriptor, deadline = process.stdout.fileno(), time.monotonic() + seconds
        while b"\n" not in self._pending:
            ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                return None
            more = os.read(descriptor, 1 << 16)
            if not more:
                return b""
            self._pending += more
        line, _, self._pending = self._pending.partition(b"\n")
        return line


def ask_all(
    checkers: Sequence[Checker],
    requests: Sequence[Request],
    on_answer: Callable[[Request, Answer], None],
    on_end: Callable[[Request], None],
) -> None:
    """Send all requests to several processes; the callbacks are called on as many threads.

    If a request with several ``files``, which are requests themselves, isn't answered by ``WELL``, each is sent alone.
    """
    idle: queue.SimpleQueue[Checker] = queue.SimpleQueue()
    for checker in checkers:
        idle.put(checker)
    stopped = threading.Event()

    def work(request: Request) -> None:
        checker = idle.get()
        try:
            several = request.get("files", ())
            well = bool(several) and list(checker.ask(request)) == [WELL]
            if several and not well:
                log.debug("%s files are checked one by one: something is wrong with one of them", len(several))
            for one in several or (request,):
                for answer in () if well or stopped.is_set() else checker.ask(one):
                    on_answer(one, answer)
                on_end(one)
        finally:
            idle.put(checker)

    pool = ThreadPoolExecutor(max(1, len(checkers)))
    try:
        for _ in pool.map(work, requests):
            pass
    finally:
        stopped.set()
        pool.shutdown(wait=False, cancel_futures=True)
        for checker in checkers:
            checker.close()
