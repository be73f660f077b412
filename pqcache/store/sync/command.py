"""Sync: make the cache hold what the source holds now, moving only what changed."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from pqcache.errors import UsageError, disk_errors
from pqcache.events import Advanced, Collected, Event, OnEvent, Warned, ignore
from pqcache.store.cache import CacheDirectory, cache_at, cache_path
from pqcache.store.config import Config, read_config, updated, write_config
from pqcache.store.drivers.base import TIMEOUT
from pqcache.store.drivers.registry import open_source
from pqcache.store.drivers.retries import RETRIES
from pqcache.store.history import append_history, read_history, unrecorded
from pqcache.store.manifest import Totals
from pqcache.store.manifest_digest import Summary, digest_of_held, digest_of_sources, read_summary
from pqcache.store.snapshot import Snapshot
from pqcache.store.sync.listing import Listing, list_source
from pqcache.store.sync.plan import Plan, Recipe
from pqcache.store.urls import check_url, is_secret, local_path, redact, url_scheme
from pqcache.store.workdir import discard
from pqcache.system.stopwatch import Stopwatch
from pqcache.units import parse_size

JOBS = 8


@dataclass(frozen=True, kw_only=True)
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
    source: str | os.PathLike[str],
    cache: str | os.PathLike[str] | None = None,
    *,
    where: str | None = None,
    columns: Sequence[str] | None = None,
    shard: str | None = None,
    row_group_size: int | str | None = None,
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
        source: URL or path of the dataset; or the cache alone, which repeats with the source it remembers.
        cache: the cache's directory; made by the first run.
        where: a condition; an empty string takes all again. Partitions, then row groups by their statistics, are
            left out before anything of them is fetched, and rows that do not satisfy it are filtered out.
        columns: fetch only these columns' bytes; an empty list takes all again.
        shard: keep only one node's share, ``"i/n"`` with i from 0: whole partitions or files, about as many bytes
            for each, and every file on exactly one node; an empty string takes all again.
        row_group_size: bytes on disk, or ``"128MB"``; files are repartitioned as they come.
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

    >>> report = sync("lake/shop", "cache/shop", where="dt >= '2026-11-02'", force=True)
    >>> report.published, report.removed, report.rows
    (True, 2, 400)
    >>> sync("cache/shop").published  # nothing has changed
    False

    Raises UsageError, SourceError, SourceIncomplete (nothing was published), ParquetError, CacheError or
    CacheLocked; the current snapshot stays as it was.
    """
    watch = Stopwatch()
    url = None if cache is None else os.fspath(source)
    place = source if cache is None else cache
    if url is not None:
        _check_order(url, os.fspath(place))
    target = CacheDirectory(cache_path(place))
    if url is None and not target.exists():
        raise UsageError(place, "not a pqcache yet", f"name the source too: pqcache sync SOURCE {place}")
    given = {
        "where": where,
        "columns": None if columns is None else tuple(columns) or "",
        "shard": shard,
        "row_group_size": None if row_group_size is None else parse_size(row_group_size),
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
        config = updated(_merge(remembered, url, options), given)
        _check_apart(config.source, target.path)
        known = {**config.options, **(options or {})}
        opened = open_source(url or config.source, known, timeout, config.hdfs_driver)
        stack.callback(opened.close)
        listing = list_source(opened, on_event, retries, config.where, config.columns)
        if not dry_run and not locked:
            target.create()
            stack.enter_context(target.lock(wait))
            current = target.current()
            if current is not None:  # another first run was faster: what is taken is what it has left
                remembered = read_config(target.path)
                config = updated(_merge(remembered, url, options), given)
                listing = list_source(opened, on_event, retries, config.where, config.columns)
        rewrite, counted = config.rewrite(), Counted(on_event)
        recipe = Recipe(listing.subset.recipe, rewrite.recipe if rewrite is not None else "")
        published = None
        summary = None if current is None else unchanged(current, listing, recipe, config.shard)
        if summary is not None:
            plan, totals = (
                Plan(directories=(), recipe=recipe, added=(), changed=(), removed=(), unchanged=summary.source_files),
                summary.totals,
            )
        else:
            from pqcache.store.sync.incremental import (  # and pyarrow, half of the time of a sync with nothing to do
                Run,
                refresh,
            )

            run = Run(
                target=target,
                current=current,
                config=config,
                listing=listing,
                source=opened,
                recipe=recipe,
                jobs=jobs,
                retries=retries,
                force=force,
                dry_run=dry_run,
                on_event=counted,
            )
            plan, published, totals = refresh(run)
        if not dry_run:
            if config != remembered:
                write_config(target.path, config)
            if remembered is not None and remembered.source != config.source:
                was, now = redact(remembered.source), redact(config.source)
                on_event(Warned(f"the source was {was} and is {now} from now on"))
        fetched = plan.fetch_bytes if dry_run else counted.bytes
        report = make_report(target, config, plan, published or current, totals, published, fetched, dry_run, watch)
        if not dry_run:
            finish(target, config, "sync", report, on_event)
    return report


def unchanged(current: Snapshot, listing: Listing, recipe: Recipe, shard: str | None) -> Summary | None:
    """Return the summary of ``current`` if it proves that there is nothing to do, else None.

    It does where the source files are those that the snapshot was made of, all by today's recipe, and its own files are
    there at their sizes. Markers and settling do not matter then: what waits stays as it is held, which is as it is
    listed. A share also depends on the files of other nodes, and is always worked out anew.
    """
    summary = None if shard is not None else read_summary(current)
    if summary is None or summary.shard is not None or summary.recipe != recipe.text:
        return None
    same = summary.sources == digest_of_sources(listing.files) and summary.held == digest_of_held(current.path)
    return summary if same else None


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


def make_report(
    cache: CacheDirectory,
    config: Config,
    plan: Plan,
    current: Snapshot | None,
    totals: Totals,
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
        files=totals.files,
        row_groups=totals.row_groups,
        rows=totals.rows,
        bytes=totals.size,
        seconds=watch.seconds,
        shard=config.shard,
    )


def finish(cache: CacheDirectory, config: Config, command: str, report: SyncReport, on_event: OnEvent) -> None:
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
    return replace(remembered or Config(source=shown), source=shown, options=known)


def _check_order(source: str, cache: str) -> None:
    """Raise UsageError where the source was named as the cache, and the cache as the source."""
    scheme = re.match(r"([a-zA-Z][a-zA-Z0-9+.-]+):/", cache)  # Path makes one slash of two
    if scheme is not None and url_scheme(source) in ("", "file"):
        subject, reason = f"{scheme[1]}://...", "a cache is a local directory"
    elif cache_at(source) is not None and os.path.isdir(cache) and cache_at(cache) is None:
        subject, reason = source, f"is a pqcache, and {cache} is none"
    else:
        return
    raise UsageError(subject, reason, "are the two the wrong way round? It is 'pqcache sync SOURCE CACHE'")


def _check_apart(source: str, cache: Path) -> None:
    if url_scheme(source) in ("", "file"):
        path = Path(local_path(source)).resolve()
        ours = cache.resolve()
        if path == ours or ours in path.parents or path in ours.parents:
            raise UsageError(cache, f"the cache and its source {path} must lie apart from each other")
