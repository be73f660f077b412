"""What a sync does when something has changed: it compares file by file, checks, and has a new snapshot built."""

from __future__ import annotations

import logging
import os
import stat
import time
from collections.abc import Sequence
from dataclasses import dataclass

from pqcache.errors import DamagedError, SourceIncomplete
from pqcache.events import OnEvent, Warned
from pqcache.store.config import Config, write_config
from pqcache.store.drivers.base import Source
from pqcache.store.hive import parent
from pqcache.store.layout import SUMMARY
from pqcache.store.manifest import FileEntry, Manifest, SnapshotMetadata, Totals
from pqcache.store.shard import owners, parse_shard
from pqcache.store.snapshot import Snapshot
from pqcache.store.sync.apply import build_snapshot
from pqcache.store.sync.listing import Listing, digest_of_shares
from pqcache.store.sync.plan import Plan, Recipe, plan_sync
from pqcache.store.sync.run import CacheRun, Outcome
from pqcache.store.sync.safety_checks import WaitRules, check_case, check_deletions, files_to_take
from pqcache.store.urls import redact

log = logging.getLogger("pqcache.sync")


@dataclass(frozen=True)
class SourceState:
    """A source: its driver, what it lists, and by which recipe a snapshot is made of that."""

    source: Source
    listing: Listing
    recipe: Recipe


def sync_changes(run: CacheRun, state: SourceState) -> Outcome:
    """Publish a new snapshot if anything has changed."""
    current, config, listing, dry_run = run.current, run.config, state.listing, run.options.dry_run
    manifest, intact = _read_current(current, run.options.on_event)
    if not dry_run:
        check_case(listing.files, config.source, run.cache.tmp_dir)
    rules = wait_rules(config)
    plan = plan_for(config, listing, rules, current, manifest, state.recipe)
    digest = digest_of_shares(listing, config.shard, rules, state.source.url)
    if manifest is not None and not run.options.force:
        changed = manifest.shard != config.shard and config.shard is not None
        was = f"--shard {config.shard} (before: {manifest.shard or 'all'})" if changed else ""
        elsewhere = frozenset(file.path for file in listing.files) if config.shard is not None else frozenset()
        check_deletions(plan, manifest.files, state.source.url, config.max_delete, elsewhere, was)
    if not plan.directories:
        raise SourceIncomplete(state.source.url, "every file there has to wait", "nothing was published")
    if not dry_run and current is None:  # so that a first run that fails can be repeated by the cache's name
        write_config(run.cache.path, config)
    same = manifest is not None and (manifest.shard, manifest.listing) == (config.shard, digest)
    if dry_run or (plan.nothing_to_do and current is not None and intact and same):
        return Outcome(plan=plan, published=None, totals=manifest.totals if manifest is not None else Totals())
    metadata = SnapshotMetadata(source=redact(config.source), where=config.where, shard=config.shard, listing=digest)
    return build_snapshot(run, plan, metadata, source=state.source, subset=listing.subset)


def wait_rules(config: Config) -> WaitRules:
    """Return the rules by which new files wait, as of now."""
    return WaitRules(config.marker, config.settle, time.time())


def plan_for(
    config: Config,
    listing: Listing,
    rules: WaitRules,
    current: Snapshot | None,
    manifest: Manifest | None,
    recipe: Recipe,
) -> Plan:
    """Return the plan for ``listing``, or a node's share of it, against what the current snapshot really has on disk.

    What is held and not listed any more, because it is being replaced, is kept on the node that holds it.
    """
    held = manifest.files if manifest is not None else ()
    damaged = find_damaged(current, held) if current is not None else frozenset()
    if damaged:
        log.debug("%s files of the current snapshot are not as recorded and are not kept", len(damaged))
    files = files_to_take(listing.files, listing.paths, held, rules)
    if config.shard is not None:
        shard = parse_shard(config.shard)
        owner = owners(listing.files, shard.nodes)
        files = [file for file in files if owner.get(file.path, shard.node) == shard.node]
    return plan_sync(files, held, recipe, damaged)


def _read_current(current: Snapshot | None, on_event: OnEvent) -> tuple[Manifest | None, bool]:
    """Return the current manifest, and whether the index and the summary beside it are as they were written.

    Without a manifest nothing is known of what is held, so all is downloaded again; the others are written again.
    """
    if current is None:
        return None, True
    try:
        manifest = current.checked_manifest()
    except DamagedError as error:
        on_event(Warned(f"{error}; everything is fetched again"))
        return None, False
    try:
        current.checked_index()
        if (current.path / SUMMARY).exists():  # not in a snapshot from before there were any
            current.check(SUMMARY)
    except DamagedError as error:
        on_event(Warned(f"{error}; it is built again"))
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

    def is_intact(entry: FileEntry) -> bool:
        try:
            status = os.lstat(f"{root}/{entry.path}")
        except OSError:
            return False
        return stat.S_ISREG(status.st_mode) and status.st_size == entry.size and is_real(parent(entry.path))

    return frozenset(entry.path for entry in entries if not is_intact(entry))
