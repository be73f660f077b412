"""Repair a cache: what is damaged is downloaded or made again, into a new snapshot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from pqcache.errors import CacheError, CacheLocked, SourceIncomplete, UsageError, disk_errors
from pqcache.options import CONTENT
from pqcache.store.cache_directory import CacheDirectory
from pqcache.store.config import Config, read_config
from pqcache.store.drivers.base import Source
from pqcache.store.manifest import FileEntry, Manifest, SnapshotMetadata, TableVersion
from pqcache.store.ownership import check_ownership
from pqcache.store.run_record import recorded_run
from pqcache.store.snapshot import Snapshot
from pqcache.store.sync.build_snapshot import build_snapshot
from pqcache.store.sync.cache_run import CacheRun, RunOptions, finish_run
from pqcache.store.sync.command import sync
from pqcache.store.sync.decide import Held, plan_for, taken_files, with_tags
from pqcache.store.sync.download.subset import select_subset
from pqcache.store.sync.held import Comparison, compare_content, find_damaged, find_unusable
from pqcache.store.sync.incremental import spelled
from pqcache.store.sync.listing import known_keys, list_source, listing_rules, ready_paths
from pqcache.store.sync.memo import read_memo
from pqcache.store.sync.newest_files import newest_rule, only_newest
from pqcache.store.sync.plan import Recipe, plan_sync, recipe_for
from pqcache.store.sync.safety_checks import wait_rules
from pqcache.store.sync.snapshot_job import Origin
from pqcache.store.tables.base import OpenOptions, VersionRule
from pqcache.store.tables.open_table import open_table
from pqcache.store.urls import quoted, redact
from pqcache.system.stopwatch import Stopwatch
from pqcache.units import format_count


def repair(
    cache: CacheDirectory,
    snapshot: Snapshot,
    manifest: Manifest | None,
    damaged: frozenset[str],
    store_options: Mapping[str, str],
    options: RunOptions,
) -> Snapshot:
    """Publish a new snapshot in which the files at the paths ``damaged`` are downloaded again from the source.

    All other files are kept, also where the source has newer ones: to download those is what sync does. If a damaged
    file itself has changed at the source, SourceIncomplete is raised. Without a ``manifest`` it is not known what is
    held, so all is synced.
    """
    if manifest is None:
        report = sync(cache.path, options=store_options, wait=options.wait, on_event=options.on_event)
        if not report.published or report.snapshot is None:
            raise CacheError(cache.path, "its manifest is damaged and sync did not notice", "sync into a new directory")
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
        result = build_snapshot(run, plan, metadata, origin=origin, reindex=True)
        finish_run(run, result)
    assert result.published is not None
    return result.published


def _check_unchanged(cache: CacheDirectory, manifest: Manifest, entries: Sequence[FileEntry]) -> None:
    """Raise SourceIncomplete if a file of ``entries`` is another version than that of ``manifest``.

    Beside files of the snapshot's moment it would make a mix of two moments.
    """
    held = {file.path: file.identity for entry in manifest.files for file in entry.sources}
    for file in (file for entry in entries for file in entry.sources):
        if not held[file.path].is_still(file.identity):
            raise SourceIncomplete(
                file.path,
                "is damaged in the cache and has changed at its source since it was synced",
                f"nothing was published, run 'pqcache sync {quoted(cache.path)}' and verify again",
            )


def changes_at_source(
    cache: CacheDirectory,
    snapshot: Snapshot,
    manifest: Manifest,
    store_options: Mapping[str, str],
    options: RunOptions,
) -> tuple[str, ...]:
    """Return the source files that a sync would download or drop now: those whose identities have changed.

    With ``options.compare`` as ``content``, also those whose content differs. If files cannot be compared so, because
    they are rewritten or have some columns or rows only, UsageError is raised. Raises CacheError where others can
    change the cache: they could have it contact another source.
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
            f"{format_count(len(comparison.uncompared), 'file')} of the cache are no copies of source files, like "
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
