"""What a sync does unless nothing has changed: it compares file by file, guards, and has a new snapshot built."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Sequence
from dataclasses import dataclass

from pqcache.errors import DamagedError, SourceIncomplete
from pqcache.events import OnEvent, Warned
from pqcache.store.cache import CacheDirectory
from pqcache.store.config import Config, write_config
from pqcache.store.drivers.base import Source
from pqcache.store.hive import parent
from pqcache.store.layout import SUMMARY
from pqcache.store.manifest import FileEntry, Manifest, Totals
from pqcache.store.shard import owners, parse_shard
from pqcache.store.snapshot import Snapshot
from pqcache.store.sync.apply import Job, build_snapshot
from pqcache.store.sync.listing import Listing, shared
from pqcache.store.sync.plan import Plan, Recipe, plan_sync
from pqcache.store.sync.safety_checks import Waiting, check_case, check_deletions, taken
from pqcache.store.urls import redact


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a refresh works with; the fields are as in ``sync``."""

    target: CacheDirectory
    current: Snapshot | None
    config: Config
    listing: Listing
    source: Source
    recipe: Recipe
    jobs: int
    retries: int
    force: bool
    dry_run: bool
    on_event: OnEvent


def refresh(run: Run) -> tuple[Plan, Snapshot | None, Totals]:
    """Publish a new snapshot if anything has changed; return the plan, that snapshot, and how much is held now."""
    target, current, config, listing = run.target, run.current, run.config, run.listing
    manifest, whole = read_current(current, run.on_event)
    if not run.dry_run:
        check_case(listing.files, config.source, target.tmp_dir)
    waiting = Waiting(config.marker, config.settle, time.time())
    plan = make_plan(listing, current, manifest, run.recipe, waiting, config.shard)
    digest = shared(listing.files, listing.paths, config.shard, waiting, listing.subset.recipe, run.source.url)
    if manifest is not None and not run.force:
        changed = manifest.shard != config.shard and config.shard is not None
        was = f"--shard {config.shard} (before: {manifest.shard or 'all'})" if changed else ""
        elsewhere = frozenset(file.path for file in listing.files) if config.shard is not None else frozenset()
        check_deletions(plan, manifest.files, config.max_delete, elsewhere, was)
    if not plan.directories:
        raise SourceIncomplete(run.source.url, "every file there has to wait", "nothing was published")
    if not run.dry_run and current is None:  # so that a first run that fails can be repeated by the cache's name
        write_config(target.path, config)
    published = None
    same = manifest is not None and (manifest.shard, manifest.listing) == (config.shard, digest)
    if not run.dry_run and not (plan.nothing_to_do and current is not None and whole and same):
        job = Job(
            cache=target,
            previous=current,
            plan=plan,
            source=run.source,
            source_url=redact(config.source),
            where=config.where,
            subset=listing.subset,
            rewrite=config.rewrite(),
            jobs=run.jobs,
            retries=run.retries,
            checksum=config.checksum,
            on_event=run.on_event,
            keys=config.keys,
            shard=config.shard,
            listing=digest,
        )
        published, manifest, plan = build_snapshot(job)
    return plan, published, manifest.totals if manifest is not None else Totals()


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
    """Return the current manifest, and whether the index and the summary beside it are as they were written.

    A damaged manifest says nothing of what is held, so all is fetched again; the others are made anew.
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
        if (current.path / SUMMARY).exists():  # not in a snapshot from before there were any
            current.check(SUMMARY)
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
