"""Repair a cache: what is damaged is downloaded or made again, into a new snapshot."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace

from pqcache.errors import CacheError, CacheLocked, disk_errors
from pqcache.store.cache_directory import CacheDirectory
from pqcache.store.config import Config, read_config
from pqcache.store.drivers.base import Source
from pqcache.store.drivers.registry import open_source
from pqcache.store.manifest import Manifest, SnapshotMetadata
from pqcache.store.snapshot import Snapshot
from pqcache.store.sync.apply import build_snapshot
from pqcache.store.sync.command import sync
from pqcache.store.sync.download.subset import select
from pqcache.store.sync.incremental import find_damaged, plan_for, wait_rules
from pqcache.store.sync.listing import list_source
from pqcache.store.sync.plan import Recipe, plan_sync
from pqcache.store.sync.run import CacheRun, RunOptions, finish_run
from pqcache.store.urls import redact
from pqcache.system.stopwatch import Stopwatch


def repair(
    cache: CacheDirectory,
    snapshot: Snapshot,
    manifest: Manifest | None,
    damaged: frozenset[str],
    store_options: Mapping[str, str],
    options: RunOptions,
) -> Snapshot:
    """Publish a new snapshot in which the files at the paths ``damaged`` are downloaded again from the source.

    All other files are kept, also where the source has newer ones: to download those is what sync does. A file that
    changed at the source is taken as it is now. Without a ``manifest`` it is not known what is held, so all is synced.
    """
    if manifest is None:
        report = sync(cache.path, options=store_options, wait=options.wait, on_event=options.on_event)
        if not report.published or report.snapshot is None:
            raise CacheError(cache.path, "its manifest is damaged and sync did not notice", "sync into a new directory")
        return cache.snapshot(report.snapshot)
    with ExitStack() as stack, disk_errors(cache.path):
        stack.enter_context(cache.lock(options.wait))
        config = read_config(cache.path)
        source = _open(config, store_options)
        stack.callback(source.close)
        if cache.current() != snapshot:
            raise CacheLocked(cache.path, "another run has published meanwhile", "verify again")
        held = sorted({file.path: file for entry in manifest.files for file in entry.sources}.items())
        files, subset = select(source, [file for _, file in held], config.where, config.columns)
        rewrite = config.rewrite()
        recipe = Recipe(subset.recipe, rewrite.recipe if rewrite is not None else "")
        plan = plan_sync(files, manifest.files, recipe, damaged | find_damaged(snapshot, manifest.files))
        run = CacheRun(
            command="repair",
            cache=cache,
            config=config,
            current=snapshot,
            options=replace(options, watch=Stopwatch()),
        )
        metadata = SnapshotMetadata(
            source=redact(config.source), where=config.where, shard=manifest.shard, listing=manifest.listing
        )
        outcome = build_snapshot(run, plan, metadata, source=source, subset=subset, reindex=True)
        finish_run(run, outcome)
    assert outcome.published is not None
    return outcome.published


def changes_at_source(
    cache: CacheDirectory,
    snapshot: Snapshot,
    manifest: Manifest,
    store_options: Mapping[str, str],
    options: RunOptions,
) -> tuple[str, ...]:
    """Return the source files that a sync would download or drop now: those whose identities have changed."""
    config = read_config(cache.path)
    source = _open(config, store_options)
    try:
        listing = list_source(source, options.on_event, where=config.where, columns=config.columns)
    finally:
        source.close()
    plan = plan_for(config, listing, wait_rules(config), snapshot, manifest, Recipe())
    return tuple(sorted((*plan.added, *plan.changed, *plan.removed)))


def _open(config: Config, store_options: Mapping[str, str]) -> Source:
    return open_source(config.source, {**config.options, **store_options}, hdfs_driver=config.hdfs_driver)
