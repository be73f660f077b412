"""Repair: by sync's own means, what is damaged is fetched or made again, into a new snapshot."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack

from pqcache.errors import CacheError, CacheLocked, disk_errors
from pqcache.events import OnEvent
from pqcache.store.cache import CacheDirectory
from pqcache.store.config import read_config
from pqcache.store.drivers.registry import open_source
from pqcache.store.drivers.retries import RETRIES
from pqcache.store.manifest import Manifest
from pqcache.store.snapshot import Snapshot
from pqcache.store.sync.apply import Job, build_snapshot
from pqcache.store.sync.command import JOBS, Counted, finish, make_report, sync
from pqcache.store.sync.incremental import find_damaged, make_plan
from pqcache.store.sync.listing import list_source
from pqcache.store.sync.plan import Recipe, plan_sync
from pqcache.store.sync.safety_checks import Waiting
from pqcache.store.sync.subset import select
from pqcache.store.urls import redact
from pqcache.system.stopwatch import Stopwatch


def fetch_again(
    cache: CacheDirectory,
    snapshot: Snapshot,
    manifest: Manifest | None,
    damaged: frozenset[str],
    options: Mapping[str, str] | None,
    wait: float,
    on_event: OnEvent,
) -> Snapshot:
    """Publish a new snapshot in which the files at the paths ``damaged`` have come again from the source.

    All other files stay, also where the source has newer ones: bringing those is a sync's work. A file that changed
    at the source comes as it is now. Without a ``manifest`` nobody knows what is held, so all of it is synced.
    """
    if manifest is None:
        report = sync(cache.path, options=options, wait=wait, on_event=on_event)
        if not report.published or report.snapshot is None:
            raise CacheError(cache.path, "its manifest is damaged and sync did not notice", "sync into a new directory")
        return cache.snapshot(report.snapshot)
    watch = Stopwatch()
    with ExitStack() as stack, disk_errors(cache.path):
        stack.enter_context(cache.lock(wait))
        config = read_config(cache.path)
        opened = open_source(config.source, {**config.options, **(options or {})}, hdfs_driver=config.hdfs_driver)
        stack.callback(opened.close)
        if cache.current() != snapshot:
            raise CacheLocked(cache.path, "another run has published meanwhile", "verify again")
        held = sorted({file.path: file for entry in manifest.files for file in entry.sources}.items())
        files, subset = select(opened, [file for _, file in held], config.where, config.columns)
        rewrite = config.rewrite()
        recipe = Recipe(subset.recipe, rewrite.recipe if rewrite is not None else "")
        plan = plan_sync(files, manifest.files, recipe, damaged | find_damaged(snapshot, manifest.files))
        counted = Counted(on_event)
        job = Job(
            cache=cache,
            previous=snapshot,
            plan=plan,
            source=opened,
            source_url=redact(config.source),
            where=config.where,
            subset=subset,
            rewrite=rewrite,
            jobs=JOBS,
            retries=RETRIES,
            checksum=config.checksum,
            on_event=counted,
            reindex=True,
            keys=config.keys,
            shard=manifest.shard,
            listing=manifest.listing,
        )
        published, manifest, plan = build_snapshot(job)
        report = make_report(cache, config, plan, published, manifest.totals, published, counted.bytes, False, watch)
        finish(cache, config, "repair", report, on_event)
    return published


def changes_at_source(
    cache: CacheDirectory, snapshot: Snapshot, manifest: Manifest, options: Mapping[str, str] | None, on_event: OnEvent
) -> tuple[str, ...]:
    """Return the source files that a sync would bring or drop now, because their identities are not those recorded."""
    config = read_config(cache.path)
    opened = open_source(config.source, {**config.options, **(options or {})}, hdfs_driver=config.hdfs_driver)
    try:
        listing = list_source(opened, on_event, where=config.where, columns=config.columns)
    finally:
        opened.close()
    waiting = Waiting(config.marker, config.settle, time.time())
    plan = make_plan(listing, snapshot, manifest, Recipe(), waiting, config.shard)
    return tuple(sorted((*plan.added, *plan.changed, *plan.removed)))
