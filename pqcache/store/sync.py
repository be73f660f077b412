"""Sync: make the cache hold what the source holds now, moving only what changed."""

from __future__ import annotations

import os
import stat
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from pqcache.config import Config, read_config, updated, write_config
from pqcache.errors import DamagedError, SourceIncomplete, UsageError
from pqcache.events import Advanced, Collected, Event, Listed, OnEvent, Warned, ignore
from pqcache.store.build import Job, build_snapshot
from pqcache.store.cache import Cache, Snapshot, cache_path
from pqcache.store.guards import Waiting, check_case, check_deletions, check_listing, taken
from pqcache.store.history import append_history, read_history, unrecorded
from pqcache.store.hive import is_data, parent
from pqcache.store.manifest import FileEntry, Manifest, SourceFile
from pqcache.store.plan import Plan, Recipe, plan_sync
from pqcache.store.shard import owners, parse_shard, shared
from pqcache.store.source import (
    FIRST,
    TIMEOUT,
    Source,
    check_url,
    is_secret,
    local_path,
    open_source,
    redact,
    url_scheme,
)
from pqcache.store.subset import Subset, select
from pqcache.store.transfer import RETRIES, Stopwatch, disk_errors, with_retries
from pqcache.store.workdir import discard

JOBS = 8


@dataclass(frozen=True)
class SyncReport:
    """What a run did, or with ``dry_run`` what it would do.

    File counts are of source files, ``fetched_bytes`` of what came from the source, ``bytes``, ``rows``,
    ``files`` and ``row_groups`` of the snapshot that is current now (0 before the first one). ``shard`` is the node
    whose share is kept, like ``0/3``, or None; files that have become another node's count as removed.
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
    rewritten: int
    fetched_bytes: int
    files: int
    row_groups: int
    rows: int
    bytes: int
    seconds: float
    shard: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values."""
        return asdict(self)


def sync(
    cache: str | os.PathLike[str],
    source: str | None = None,
    *,
    where: str | None = None,
    columns: Sequence[str] | None = None,
    shard: str | None = None,
    row_group_size: int | None = None,
    options: Mapping[str, str] | None = None,
    keep: int | None = None,
    marker: str | None = None,
    settle: float | None = None,
    max_delete: str | None = None,
    force: bool = False,
    hdfs_driver: str | None = None,
    checksum: bool | None = None,
    jobs: int = JOBS,
    retries: int = RETRIES,
    timeout: float = TIMEOUT,
    wait: float = 0.0,
    dry_run: bool = False,
    on_event: OnEvent = ignore,
) -> SyncReport:
    """Bring ``cache`` up to date with ``source`` and publish a new snapshot if anything changed.

    What is not given is what the cache remembers from before; what is given is remembered, except secrets
    and what is only about this run (``force``, ``jobs``, ``retries``, ``timeout``, ``wait``, ``dry_run``).

    Args:
        cache: the cache's directory; made by the first run.
        source: URL or path of the dataset.
        where: a condition; an empty string takes all again. Partitions, then row groups by their statistics, are
            left out before anything of them is fetched, and rows that do not satisfy it are filtered out.
        columns: fetch only these columns' bytes; an empty list takes all again.
        shard: keep only one node's share, ``"i/n"`` with i from 0: whole partitions or files, about as many bytes
            for each, and every file on exactly one node; an empty string takes all again.
        row_group_size: bytes on disk; files are repartitioned as they come.
        options: the store's options, such as ``{"endpoint": "http://..."}``.
        keep: how many snapshots are left by the end, the new one among them.
        marker: take a partition only if it holds a file of this name; an empty string takes all again.
        settle: leave files younger than this many seconds for the next run.
        max_delete: refuse to drop more files than this, ``"1000"`` or ``"50%"``; ``force`` does it all the same.
        hdfs_driver: ``hdfs-native`` or ``hdfs3``.
        checksum: compare what arrives with the store's own checksum, where it has one; costs CPU.
        jobs: files fetched at once.
        retries: how often what fails for a passing reason is tried again.
        timeout: seconds without a byte after which a server counts as unavailable.
        wait: seconds to wait for another run to end.
        dry_run: work out the report and change nothing.
        on_event: called with what happens, from several threads.

    >>> report = sync("cache/shop", "lake/shop", where="dt >= '2026-11-02'", force=True)
    >>> report.published, report.removed, report.rows
    (True, 2, 400)
    >>> sync("cache/shop").published  # nothing has changed
    False

    Raises UsageError, SourceError, SourceIncomplete (nothing was published), ParquetError, CacheError or
    CacheLocked; the current snapshot stays as it was.
    """
    watch = Stopwatch()
    target = Cache(cache_path(cache))
    if source is None and not target.exists():
        raise UsageError(f"{cache}: not a pqcache yet; name the source too: pqcache sync SOURCE {cache}")
    given = {
        "where": where,
        "columns": None if columns is None else tuple(columns) or "",
        "shard": shard,
        "row_group_size": row_group_size,
        "keep": keep,
        "marker": marker,
        "settle": settle,
        "max_delete": max_delete,
        "hdfs_driver": hdfs_driver,
        "checksum": checksum,
    }
    with ExitStack() as stack, disk_errors(target.path):
        locked = target.exists() and not dry_run
        stack.enter_context(target.lock(wait) if locked else nullcontext())
        # read under the lock: a run that was waited for may have changed both
        current = target.current() if target.exists() else None
        remembered = read_config(target.path) if target.exists() else None
        config = updated(_merge(remembered, source, options), given)
        _check_apart(config.source, target.path)
        known = {**config.options, **(options or {})}
        opened = open_source(source or config.source, known, timeout, config.hdfs_driver)
        stack.callback(opened.close)
        listing = list_source(opened, on_event, retries, config.where, config.columns)
        if not dry_run and not locked:
            target.create()
            stack.enter_context(target.lock(wait))
            current = target.current()
            if current is not None:  # another first run was faster: what is taken is what it has left
                remembered = read_config(target.path)
                config = updated(_merge(remembered, source, options), given)
                listing = list_source(opened, on_event, retries, config.where, config.columns)
        manifest, whole = read_current(current, on_event)
        if not dry_run:
            check_case(listing.files, config.source, target.tmp_dir)
        rewrite = config.rewrite()
        recipe = Recipe(listing.subset.recipe, rewrite.recipe if rewrite is not None else "")
        waiting = Waiting(config.marker, config.settle, time.time())
        plan = make_plan(listing, current, manifest, recipe, waiting, config.shard)
        digest = shared(listing.files, listing.paths, config.shard, waiting, listing.subset.recipe, opened.url)
        if manifest is not None and not force:
            changed = manifest.shard != config.shard and config.shard is not None
            was = f"--shard {config.shard} (before: {manifest.shard or 'all'})" if changed else ""
            elsewhere = frozenset(file.path for file in listing.files) if config.shard is not None else frozenset()
            check_deletions(plan, manifest.files, config.max_delete, elsewhere, was)
        if not plan.directories:
            raise SourceIncomplete(f"{opened.url}: every file there has to wait; nothing was published")
        if not dry_run and current is None:  # so that a first run that fails can be repeated by the cache's name
            write_config(target.path, config)
        published, counted = None, Counted(on_event)
        same = manifest is not None and (manifest.shard, manifest.listing) == (config.shard, digest)
        if not dry_run and not (plan.nothing_to_do and current is not None and whole and same):
            url, where, checksum = redact(config.source), config.where, config.checksum
            job = Job(
                target,
                current,
                plan,
                opened,
                url,
                where,
                listing.subset,
                rewrite,
                jobs,
                retries,
                checksum,
                counted,
                keys=config.keys,
                shard=config.shard,
                listing=digest,
            )
            published, manifest = build_snapshot(job)
        if not dry_run:
            write_config(target.path, config)
            if remembered is not None and remembered.source != config.source:
                was, now = redact(remembered.source), redact(config.source)
                on_event(Warned(f"the source was {was} and is {now} from now on"))
        fetched = plan.fetch_bytes if dry_run else counted.bytes
        report = make_report(target, config, plan, published or current, manifest, published, fetched, dry_run, watch)
        if not dry_run:
            finish(target, config, "sync", report, on_event)
    return report


@dataclass(frozen=True)
class Listing:
    """The Parquet files to take, the paths of everything at the source, and what to take of each file."""

    files: list[SourceFile]
    paths: list[str]
    subset: Subset


class Counted:
    """Passes events on and counts the bytes that came from the source."""

    def __init__(self, on_event: OnEvent) -> None:
        self.bytes = 0
        self._on_event = on_event
        self._lock = threading.Lock()

    def __call__(self, event: Event) -> None:
        if isinstance(event, Advanced) and event.phase == "fetch":
            with self._lock:
                self.bytes += event.amount
        self._on_event(event)


def list_source(
    source: Source,
    on_event: OnEvent,
    retries: int = RETRIES,
    where: str | None = None,
    columns: Sequence[str] | None = None,
) -> Listing:
    """List the source, hostile names refused and partitions pruned by ``where``.

    A source without any Parquet file raises SourceIncomplete: an empty listing never replaces what is held.
    """
    found: list[SourceFile] = []

    def list_once() -> None:
        found[:] = source.list()

    with_retries(list_once, source.url, min(retries, 2), on_event, within=FIRST / 2)  # a silent server: once
    check_listing(found, source.url)
    files = [file for file in found if is_data(file.path)]
    if not files:
        others = f" among its {len(found):,} files" if found else ""
        raise SourceIncomplete(f"{source.url}: no Parquet file{others}; check the URL and what wrote it")
    files, subset = select(source, files, where, columns)
    if not files:
        raise SourceIncomplete(f"{source.url}: no partition satisfies --where {where!r}")
    on_event(Listed(len(files), sum(file.identity.size for file in files)))
    return Listing(files, [file.path for file in found], subset)


def make_plan(
    listing: Listing,
    current: Snapshot | None,
    manifest: Manifest | None,
    recipe: Recipe,
    waiting: Waiting,
    shard: str | None = None,
) -> Plan:
    """Return the plan for ``listing``, or a node's share of it, against what the current snapshot really has on disk.

    What is held and not listed any more, because it is being replaced, stays on the node that holds it.
    """
    held = manifest.files if manifest is not None else ()
    damaged = find_damaged(current, held) if current is not None else frozenset()
    files = taken(listing.files, listing.paths, held, waiting)
    if shard is not None:
        mine = parse_shard(shard)
        owner = owners(listing.files, mine.nodes)
        files = [file for file in files if owner.get(file.path, mine.node) == mine.node]
    return plan_sync(files, held, recipe, damaged)


def read_current(current: Snapshot | None, on_event: OnEvent) -> tuple[Manifest | None, bool]:
    """Return the current manifest, and whether the index beside it can be read as well.

    A damaged manifest says nothing of what is held, so all is fetched again; a damaged index is built anew.
    """
    if current is None:
        return None, True
    try:
        manifest = current.whole_manifest()
    except DamagedError as error:
        on_event(Warned(f"{error}; everything is fetched again"))
        return None, False
    try:
        current.whole_index()
    except DamagedError as error:
        on_event(Warned(f"{error}; it is built anew"))
        return manifest, False
    return manifest, True


def find_damaged(snapshot: Snapshot, entries: Sequence[FileEntry]) -> frozenset[str]:
    """Return the paths of entries that are missing, of another size than recorded, or reached by a link."""
    root = str(snapshot.path)
    directories: dict[str, bool] = {"": True}

    def is_real(directory: str) -> bool:
        if directory not in directories:
            directories[directory] = is_real(parent(directory)) and not os.path.islink(f"{root}/{directory}")
        return directories[directory]

    def is_whole(entry: FileEntry) -> bool:
        try:
            status = os.lstat(f"{root}/{entry.path}")
        except OSError:
            return False
        return stat.S_ISREG(status.st_mode) and status.st_size == entry.size and is_real(parent(entry.path))

    return frozenset(entry.path for entry in entries if not is_whole(entry))


def make_report(
    cache: Cache,
    config: Config,
    plan: Plan,
    current: Snapshot | None,
    manifest: Manifest | None,
    published: Snapshot | None,
    fetched: int,
    dry_run: bool,
    watch: Stopwatch,
) -> SyncReport:
    """Return what the run did, in numbers."""
    return SyncReport(
        cache=str(cache.path),
        source=redact(config.source),
        snapshot=current.id if current is not None else None,
        published=published is not None,
        dry_run=dry_run,
        added=len(plan.added),
        changed=len(plan.changed),
        removed=len(plan.removed),
        unchanged=plan.unchanged,
        rewritten=plan.rewrites,
        fetched_bytes=fetched,
        files=len(manifest.files) if manifest else 0,
        row_groups=manifest.row_groups if manifest else 0,
        rows=manifest.rows if manifest else 0,
        bytes=manifest.size if manifest else 0,
        seconds=watch.seconds,
        shard=config.shard,
    )


def finish(cache: Cache, config: Config, command: str, report: SyncReport, on_event: OnEvent) -> None:
    """Write the run into the history and remove old snapshots and what dead runs left.

    A run that died between publishing and here gets its record now, while its snapshot is still kept.
    """
    record = {"time": datetime.now(timezone.utc).isoformat(timespec="seconds"), "command": command}
    for missed in unrecorded(cache, read_history(cache.path)):
        if missed["snapshot"] != report.snapshot or not report.published:
            append_history(cache.path, missed)
    append_history(cache.path, {**record, **report.to_dict()})
    for snapshot in cache.collect(config.keep):
        on_event(Collected(snapshot.id))
    for left in cache.tmp_dir.iterdir():
        discard(left)


def _merge(remembered: Config | None, source: str | None, options: Mapping[str, str] | None) -> Config:
    """Return the source and its options as they are to be remembered from now on; secrets are left out."""
    known = {k: v for k, v in (options or {}).items() if not is_secret(k)}
    if source is None:
        assert remembered is not None
        return replace(remembered, options={**remembered.options, **known})
    check_url(source)
    shown = redact(source)
    if url_scheme(source) in ("", "file"):
        shown = os.path.abspath(os.path.expanduser(local_path(source)))
    if remembered is not None and remembered.source == shown:
        known = {**remembered.options, **known}
    return replace(remembered or Config(shown), source=shown, options=known)


def _check_apart(source: str, cache: Path) -> None:
    if url_scheme(source) in ("", "file"):
        path = Path(local_path(source)).resolve()
        ours = cache.resolve()
        if path == ours or ours in path.parents or path in ours.parents:
            raise UsageError(f"{cache}: the cache and its source {path} must lie apart from each other")
