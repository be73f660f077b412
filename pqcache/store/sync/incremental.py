"""What a sync does when something has changed: it compares file by file, checks, and has a new snapshot built."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import pyarrow as pa

from pqcache.errors import (
    DamagedError,
    ParquetError,
    PqcacheError,
    SourceChanged,
    SourceIncomplete,
    SourceNotFound,
    UsageError,
)
from pqcache.events import Listed, OnEvent, Warned
from pqcache.parquet.schema_merge import spelling_of
from pqcache.store.arriving.arriving_snapshot import arriving_snapshots
from pqcache.store.cached_paths import SUFFIX
from pqcache.store.config import write_config
from pqcache.store.drivers.base import Source
from pqcache.store.drivers.retries import with_retries
from pqcache.store.hive import parent, partition_keys
from pqcache.store.layout import SUMMARY
from pqcache.store.manifest import FileEntry, Manifest, SnapshotMetadata, SourceFile, TableVersion, Totals
from pqcache.store.manifest_digest import table_digest
from pqcache.store.manifest_file import schema_of_table
from pqcache.store.shard import owners, parse_shard
from pqcache.store.snapshot import Snapshot
from pqcache.store.sync.bad_partitions import (
    BadPartitions,
    BadPartitionsSoFar,
    advise_to_skip,
    blame,
    place_of,
    skipped_partitions,
    with_number,
    with_old_versions,
)
from pqcache.store.sync.build_snapshot import build_snapshot
from pqcache.store.sync.cache_run import IDENTITY, CacheRun, RunResult
from pqcache.store.sync.compare_content import Comparison, compare_content
from pqcache.store.sync.download.download_file import Vanished
from pqcache.store.sync.download.remote_footer import read_remote_footer
from pqcache.store.sync.download.subset import Subset, known_types, types_of_source
from pqcache.store.sync.fill.obstacle import NeedsRewriting, obstacle
from pqcache.store.sync.held_files import find_unusable
from pqcache.store.sync.listing import Listing, ListSource, check_one_table, digest_of_shares, ready_paths
from pqcache.store.sync.plan import Plan, Recipe, plan_sync, recipe_for, recipe_of
from pqcache.store.sync.plan_view import planned_files
from pqcache.store.sync.safety_checks import (
    WaitRules,
    check_bytes,
    check_case,
    check_deletions,
    check_rows,
    check_space,
    files_to_take,
    shrunk_partitions,
    wait_rules,
)
from pqcache.store.sync.snapshot_job import Origin
from pqcache.store.tables.table_source import TableSource
from pqcache.store.tmp_directory import discard
from pqcache.store.urls import redact
from pqcache.system.disk import tree_size
from pqcache.system.parallel import in_parallel
from pqcache.units import format_count

NEW_LISTINGS = 3  # from which a run goes on while its source changes

T = TypeVar("T")
log = logging.getLogger("pqcache.sync")


class _ListingDiffers(Exception):
    """The source is not what was downloaded; it is what ``listing`` has, which differs at ``path``."""

    def __init__(self, listing: Listing, path: str) -> None:
        super().__init__(path)
        self.listing = listing
        self.path = path


@dataclass(frozen=True, kw_only=True)
class _Attempt:
    """An attempt to publish what ``listing`` has.

    ``manifest`` and ``intact`` are what `_read_current` returns, ``rules`` those of the moment the run began: files
    that are written while it runs are young in each of its listings. ``comparison`` is what `compare_content` found,
    and ``skipped`` has the partition directories whose old versions are kept, each with what is wrong with the new one.
    """

    run: CacheRun
    source: Source
    listing: Listing
    list_again: ListSource
    manifest: Manifest | None
    intact: bool
    rules: WaitRules
    comparison: Comparison
    skipped: Mapping[str, PqcacheError] = field(default_factory=dict)

    def publish(self) -> RunResult:
        """Publish a new snapshot if anything has changed; raises _ListingDiffers if the source does so meanwhile."""
        run, listing, config, dry_run = self.run, self.listing, self.run.config, self.run.options.dry_run
        if not dry_run:
            check_case(listing.files, config.source, run.cache.tmp_dir)
        manifest = self._tagged_manifest()
        fills = self._fills()
        recipe = Recipe(listing.subset.recipe) if fills else recipe_for(config, listing.subset.recipe)
        files = self._files_of(listing, manifest)
        ready = ready_paths(listing, self.rules) if config.shard is not None else set()
        plan = plan_for(run, listing, files, manifest, recipe, self.comparison, ready)
        digest = digest_of_shares(listing, config.shard, ready, self.source.url, self.skipped, files, manifest)
        guarded = manifest is not None and not run.options.force
        if manifest is not None and guarded:
            self._check_deletions(plan, manifest, files)
        if not plan.directories:
            reason = SourceIncomplete(self.source.url, "every file there has to wait", "nothing was published")
            raise next(iter(self._left_out().values()), reason)  # nothing that is skipped has an old version
        if not dry_run and run.current is None:  # so that a first run that fails can be repeated by the cache's name
            write_config(run.cache.path, config)
        table = self._table()
        now = (config.shard, digest, table_digest(table))
        same = manifest is not None and (manifest.shard, manifest.listing, table_digest(manifest.table)) == now
        same = same and (manifest is self.manifest or _source_paths(manifest) == _source_paths(self.manifest))
        same = same and not run.changes_index
        if manifest is not None and guarded and dry_run:
            self._check_rows(self._foreseen(plan, manifest), plan, manifest)
        if dry_run or (plan.nothing_to_do and run.current is not None and self.intact and same):
            for planned in planned_files(plan, manifest, listing.paths) if dry_run else ():
                run.options.on_event(planned)
            if not plan.nothing_to_do:
                self._check_space(plan, fills)
            totals = manifest.totals if manifest is not None else Totals()
            return RunResult(plan=plan, published=None, totals=totals)
        metadata = SnapshotMetadata(
            source=redact(config.source), where=config.where, shard=config.shard, listing=digest, table=table
        )

        def confirm(entries: Sequence[FileEntry]) -> None:
            if not self.source.capabilities.lists_one_version:
                downloaded = {file.path: file for entry in entries for file in entry.sources}
                self.check_unchanged(manifest, [downloaded.get(file.path, file) for file in files])
            if manifest is not None and guarded:
                self._check_rows(entries, plan, manifest)

        skips, subset = config.skip_bad and not fills, listing.subset
        if subset.ignore_case:
            subset = spelled(subset, run.current, files, self._schemas_of(plan))
        origin = Origin(source=self.source, subset=subset, confirm=confirm, skip_bad=skips)
        if fills:
            from pqcache.store.sync.fill.snapshot import fill_snapshot  # and pyarrow.compute, which few syncs need

            try:
                return fill_snapshot(run, plan, metadata, origin)
            except NeedsRewriting as needs:
                self._warn_of_obstacle(str(needs))
            return replace(self, run=replace(run, options=replace(run.options, fill=False))).publish()
        return build_snapshot(run, plan, metadata, origin=origin, reindex=bool(self.comparison.differing))

    def _check_space(self, plan: Plan, fills: bool) -> None:
        """Check in a dry run that there is space, also for what is rewritten when a first copy has arrived."""
        cache = self.run.cache
        already = tree_size(cache.tmp_dir) + sum(tree_size(found.path) for found in arriving_snapshots(cache))
        later = plan.download_bytes if fills and self.run.config.rewrite() is not None else 0
        check_space(self.run, plan, already - later)

    def _foreseen(self, plan: Plan, manifest: Manifest) -> list[FileEntry]:
        """Return the entries that ``plan`` makes, in partitions that may lose rows with the rows that footers say."""
        found = [now for directory in plan.directories for _, now in directory.kept]
        found += [item.entry for directory in plan.directories for item in directory.rewrite if item.entry is not None]
        lost = Counter[str]()
        for entry in manifest.files:
            lost[parent(entry.path)] += entry.rows
        for entry in found:
            lost[parent(entry.path)] -= entry.rows
        losing = {directory for directory, rows in lost.items() if rows > 0} - self._uncompared(plan, manifest)
        blamed, bad = blame if self.run.config.skip_bad else advise_to_skip, BadPartitionsSoFar()

        def entry_of(file: SourceFile) -> FileEntry | None:
            with bad.collected(), blamed(place_of(file.path)):
                rows = read_remote_footer(self.source, file)[0].num_rows
                return FileEntry(path=file.path, size=0, rows=rows, row_groups=0, sources=(file,))
            return None

        found += filter(None, self._of_each(entry_of, [f for f in plan.downloads if parent(f.path) in losing]))
        bad.raise_any()
        return found

    def _of_each(self, call: Callable[[SourceFile], T], files: Iterable[SourceFile]) -> list[T]:
        """Return what ``call`` returns for each of the files at the source, in order."""
        options = self.run.options
        calls = [partial(with_retries, partial(call, f), f.path, options.patience, options.on_event) for f in files]
        return in_parallel(calls, options.jobs)

    def _schemas_of(self, plan: Plan) -> list[pa.Schema]:
        """Return the schemas of the files to download, in the order of their paths."""
        files = sorted(plan.downloads, key=lambda file: file.path)
        found = self._of_each(partial(_schema_of, self.source), files)
        return [schema for schema in found if schema is not None]

    def _table(self) -> TableVersion | None:
        """Return what the snapshot records as its table: of a directory, the types of its partition columns."""
        config, listing, of_source = self.run.config, self.listing, self.source.table_version
        declared = config.partition_types or {}
        if of_source is not None and not declared:
            return of_source
        held = self.manifest if self.run.previous_source is None else None
        known = None if held is None else known_types(held.table, declared)
        schema, _ = types_of_source(self.source, listing.directories, declared, known)
        others = schema_of_table(of_source) or ()
        fields = [*schema, *(field for field in others if field.name not in schema.names)]
        return listing.typed(of_source, config, bytes(pa.schema(fields).serialize()))

    def _check_rows(self, entries: Sequence[FileEntry], plan: Plan, manifest: Manifest) -> None:
        """Raise SourceIncomplete where too many rows would be lost, and BadPartitions about partitions that wait.

        The writers of these may be at work; a version of a table or cache is complete. A node with a share raises their
        first error: others may have files of the partition, and would not wait.
        """
        url, limit, found = self.source.url, self.run.config.max_delete, self.listing.found
        uncompared = self._uncompared(plan, manifest)
        check_rows(entries, manifest.files, uncompared, url, limit)
        if self.source.capabilities.lists_one_version:
            return
        compared = [entry for entry in entries if parent(entry.path) not in uncompared]
        waiting = shrunk_partitions(compared, manifest.files, found, url, limit, self.rules)
        if waiting and self.run.config.shard is not None:
            raise waiting[min(waiting)]
        if waiting:
            raise BadPartitions(waiting)

    def _fills(self) -> bool:
        """Return whether readers may open the snapshot while its files are fetched, if that is asked for."""
        if not self.run.options.fill or self.run.current is not None:
            return False
        reason = obstacle(self.source, self.listing)
        if reason:
            self._warn_of_obstacle(reason)
        return not reason

    def _warn_of_obstacle(self, reason: str) -> None:
        advice = "nothing can be read before all of it is published"
        self.run.options.on_event(Warned(f"{self.source.url}: {reason}; {advice}"))

    def check_unchanged(self, manifest: Manifest | None, files: Sequence[SourceFile]) -> None:
        """List the source again; raises _ListingDiffers where that gives other files than ``files``."""
        on_event = self.run.options.on_event
        now = self.list_again(lambda event: None if isinstance(event, Listed | Warned) else on_event(event))
        again = self._files_of(now, manifest)
        differing = set() if list(files) == again else set(files) ^ set(again)
        if differing or now.subset.recipe != self.listing.subset.recipe:
            path = min((file.path for file in differing), default="")
            log.debug("the source has changed since it was listed: %s", path)
            raise _ListingDiffers(now, path)

    def check_unchanged_after(self, error: PqcacheError) -> None:
        """Raise _ListingDiffers if what went wrong may be due to a change of the source, else ``error``."""
        manifest = self._tagged_manifest()
        if isinstance(error, Vanished) and isinstance(self.source, TableSource):
            self.source.take_newer()  # what the version had was removed, but a newer one may be complete
        self.check_unchanged(manifest, self._files_of(self.listing, manifest))
        raise error

    def count_waiting(self) -> int:
        """Return how many files wait for ``--marker`` or ``--settle``; warn of those that wait for a wrong clock."""
        if self.rules.marker is None and not self.rules.settle:
            return 0
        taken = set(files_to_sync(self.listing, self.rules, self._tagged_manifest()))
        waiting = [f for f in self.listing.files if f not in taken and parent(f.path) not in self.listing.outside]
        future = [f.path for f in waiting if self.rules.settle and f.identity.mtime_ns > self.rules.now * 1e9]
        if future:
            number = format_count(len(future), "file")
            what = f"{number} with times in the future, like {min(future)}: waiting for --settle until then"
            self.run.options.on_event(Warned(f"{self.source.url}: {what}"))
        return len(waiting)

    def publish_good(self) -> RunResult:
        """Publish as `publish`, and leave out the new files of partitions that cannot be taken."""
        attempt = self
        while True:
            try:
                result = attempt.publish()
            except BadPartitions as bad:
                if bad.errors.keys() <= attempt.skipped.keys():
                    raise next(iter(bad.errors.values())) from bad
                manifest = attempt._tagged_manifest()
                attempt.check_unchanged(manifest, attempt._files_of(attempt.listing, manifest))
                log.debug("partitions are skipped: %s", bad)
                attempt = replace(attempt, skipped={**attempt.skipped, **bad.errors})
                continue
            held = () if self.manifest is None else self.manifest.files
            misfits = skipped_partitions(attempt.listing.misfits, ())
            skipped = (*misfits, *skipped_partitions(attempt._left_out(), held))
            for item in skipped:
                what = "its old version is kept" if item.kept else "left out, as there is no old version"
                kind = "file" if item.partition.startswith("./") else "partition"
                self.run.options.on_event(Warned(f"{kind} {item.partition}: {what}: {item.reason}"))
            return replace(result, skipped=skipped)

    def _files_of(self, listing: Listing, manifest: Manifest | None) -> list[SourceFile]:
        """Return the source files of a snapshot of ``listing``, with old versions of partitions that are skipped."""
        held = () if manifest is None else manifest.files
        files = files_to_sync(listing, self.rules, manifest)
        return with_old_versions(files, held, self.skipped, _odd_places(listing))

    def _left_out(self) -> dict[str, PqcacheError]:
        """Return why places are left out, or as they are held."""
        return {**_odd_places(self.listing), **self.skipped}

    def _tagged_manifest(self) -> Manifest | None:
        return None if self.manifest is None else with_tags(self.manifest, self.listing.files)

    def _check_deletions(self, plan: Plan, manifest: Manifest, files: Sequence[SourceFile]) -> None:
        """Raise SourceIncomplete where too much would be deleted, as far as that is known before the download."""
        config, held, url = self.run.config, manifest.files, self.source.url
        changed = manifest.shard != config.shard and config.shard is not None
        was = f"--shard {config.shard} (before: {manifest.shard or 'all'})" if changed else ""
        elsewhere = frozenset(file.path for file in self.listing.files) if config.shard is not None else frozenset()
        deleted = tuple(path for path in plan.removed if parent(path) not in self.listing.outside)
        check_deletions(replace(plan, removed=deleted), held, url, config.max_delete, elsewhere, was)
        otherwise = _fetched_otherwise(manifest, plan.recipe)
        known = frozenset(parent(entry.path) for entry in held) - otherwise  # whose rows will be compared
        check_bytes(files, held, known, url, config.max_delete)

    def _uncompared(self, plan: Plan, manifest: Manifest) -> frozenset[str]:
        """Return the directories whose rows do not count: those with files of other nodes now, or with other rows."""
        listed = {file.path for file in self.listing.files} if self.run.config.shard is not None else ()
        moved = frozenset(parent(path) for path in plan.removed if path in listed)
        return moved | self.listing.outside | _fetched_otherwise(manifest, plan.recipe)


def _odd_places(listing: Listing) -> dict[str, PqcacheError]:
    """Return the places with what a cache cannot hold, each with the error for one of them."""
    found: dict[str, list[PqcacheError]] = {}
    for path in sorted(listing.odd):
        found.setdefault(place_of(path), []).append(listing.odd[path])
    return {place: with_number(errors) for place, errors in found.items() if place not in listing.outside}


def spelled(
    subset: Subset, current: Snapshot | None, files: Iterable[SourceFile], schemas: Sequence[pa.Schema] = ()
) -> Subset:
    """Return a subset that knows how columns are spelled: as in a snapshot, else as in the first of ``schemas``."""
    keys = partition_keys(file.path for file in files)
    before: list[pa.Schema] = []
    with suppress(DamagedError):
        before = [] if current is None else [current.index().data_schema]
    return replace(subset, spelling=spelling_of([*before, *schemas], [*(subset.columns or ()), *keys]))


def _schema_of(source: Source, file: SourceFile) -> pa.Schema | None:
    try:
        return read_remote_footer(source, file)[1]
    except ParquetError:  # its download says so
        return None


def sync_changes(run: CacheRun, source: Source, listing: Listing, list_again: ListSource) -> RunResult:
    """Publish a new snapshot if anything has changed; ``list_again`` lists the source as ``listing`` was made.

    When all files are downloaded, the source is listed again. Only if it still has the same files are they published:
    then the source held exactly these at one moment, between the two listings. Otherwise the run goes on from the new
    listing, up to NEW_LISTINGS times, and reuses what it has downloaded. A version of a table never changes, so it is
    not listed again: that its files were there is known from their downloads.
    """
    manifest, intact = _read_current(run.current, run.options.on_event)
    _check_still_table(run, source, manifest)
    if not (run.config.as_files or source.capabilities.lists_only_data_files):
        held = () if manifest is None else manifest.files
        paths = (file.path for entry in held for file in entry.sources)
        check_one_table(source, listing.files, paths, run.options.patience)
    rules = wait_rules(run.config)
    attempt = _Attempt(
        run=run,
        source=source,
        listing=listing,
        list_again=list_again,
        manifest=manifest,
        intact=intact,
        rules=rules,
        comparison=_compare(run, source, listing, manifest),
    )
    for number in range(NEW_LISTINGS + 1):
        try:
            try:
                done, listed = attempt.publish_good(), attempt.listing
                table, passed = source.table_version, replace(listed.passed_over, waiting=attempt.count_waiting())
                return replace(done, newest=listed.newest, table=table, passed_over=passed)
            except (Vanished, SourceChanged, SourceNotFound, ParquetError) as error:
                attempt.check_unchanged_after(error)
        except _ListingDiffers as differs:
            attempt, path = replace(attempt, listing=differs.listing), differs.path
        if number == 0:
            run.options.on_event(Warned(f"{source.url} changed while it was copied; going on from a new listing"))
    raise SourceIncomplete(
        source.url,
        f"keeps changing while it is copied, last {path}",
        "nothing was published, sync again when its writers have finished, or leave young files out with --settle",
    )


def _check_still_table(run: CacheRun, source: Source, manifest: Manifest | None) -> None:
    """Raise UsageError where a version of a table is held, and there are only files now where it was.

    Without its log, rows that the table has deleted or written again would be among those of its files.
    """
    held = None if manifest is None else manifest.table
    if manifest is None or held is None or not held.version or source.table_version is not None:
        return
    if run.config.as_files or run.previous_source is not None:
        return
    reason = f"has no log of a table any more, and the cache holds {held}"
    raise UsageError(source.url, reason, "put the log back, or take the files as they are with --as-files")


def _source_paths(manifest: Manifest | None) -> set[str]:
    return set() if manifest is None else {file.path for entry in manifest.files for file in entry.sources}


def _fetched_otherwise(manifest: Manifest, recipe: Recipe) -> frozenset[str]:
    """Return the directories with files of which other columns or rows were fetched than ``recipe`` says."""
    return frozenset(parent(e.path) for e in manifest.files if recipe_of(e.recipe).subset != recipe.subset)


def _compare(run: CacheRun, source: Source, listing: Listing, manifest: Manifest | None) -> Comparison:
    """Return what differs from the source by content, if that is asked for."""
    if run.options.compare == IDENTITY or run.current is None or manifest is None:
        return Comparison()
    if not run.options.dry_run:
        for left in run.cache.tmp_dir.iterdir():  # downloads of dead runs are found by identity, which is not trusted
            discard(left)
    found = compare_content(source, listing.files, run.current, manifest.files, run.options)
    if found.differing:
        number = format_count(len(found.differing), "file")
        run.options.on_event(Warned(f"{number} of equal size and time have other content, like {min(found.differing)}"))
    return found


def files_to_sync(listing: Listing, rules: WaitRules, manifest: Manifest | None) -> list[SourceFile]:
    """Return the source files that a snapshot of ``listing`` is made of, on all nodes together."""
    files = files_to_take(listing.files, listing.paths, manifest.files if manifest is not None else (), rules)
    return [file for file in files if parent(file.path) not in listing.outside] if listing.outside else files


def with_tags(manifest: Manifest, files: Iterable[SourceFile]) -> Manifest:
    """Return ``manifest`` with the tags and paths that unchanged source files have in a listing.

    Snapshots of earlier versions have no tags of local files; they get them without being fetched again. So do files of
    another cache whose names have got a suffix there since.
    """
    listed = {file.path: file for file in files}
    held = [file for entry in manifest.files for file in entry.sources]
    known = all(file.identity.tag for file in held) and all(file.identity.tag for file in listed.values())
    if known and all(file.path in listed or file.path + SUFFIX not in listed for file in held):
        return manifest  # an equal tag is the same already

    def tagged(file: SourceFile) -> SourceFile:
        now = listed.get(file.path)
        if now is None:
            now = listed.get(file.path + SUFFIX, file)
            return now if file.identity.tag and file.identity == now.identity else file
        return now if file.identity != now.identity and file.identity.is_still(now.identity) else file

    def retagged(entry: FileEntry) -> FileEntry:
        sources = tuple(map(tagged, entry.sources))
        return entry if sources == entry.sources else replace(entry, sources=sources)

    return replace(manifest, files=tuple(map(retagged, manifest.files)))


def plan_for(
    run: CacheRun,
    listing: Listing,
    files: Sequence[SourceFile],
    manifest: Manifest | None,
    recipe: Recipe,
    comparison: Comparison,
    ready: Collection[str],
) -> Plan:
    """Return the plan for ``files`` of ``listing``, or a node's share, against what the snapshot really has on disk.

    What is held and not listed any more, because it is being replaced, is kept on the node that holds it, and so are
    listed files that wait, which are not in ``ready``.
    """
    config, held = run.config, manifest.files if manifest is not None else ()
    damaged, foreign = find_unusable(run.current, held) if run.current is not None else (frozenset(), frozenset())
    if damaged:
        log.debug("%s files of the current snapshot are not as recorded and are not kept", len(damaged))
    if foreign:
        number = format_count(len(foreign), "file")
        reason = "fetched again, because others own them or can write to them"
        run.options.on_event(Warned(f"{run.cache.path}: {number} of the snapshot {reason} ({min(foreign)})"))
    damaged |= foreign
    if config.shard is not None:
        shard = parse_shard(config.shard)
        owner = owners(listing.files, shard.nodes)
        files = [f for f in files if owner.get(f.path, shard.node) == shard.node or f.path not in ready]
    plan = plan_sync(files, held, recipe, damaged | comparison.differing | comparison.uncompared)
    differing = {entry.sources[0].path for entry in held if entry.path in comparison.differing}
    found = differing.intersection(file.path for file in files).difference(plan.changed)
    return replace(plan, changed=(*plan.changed, *sorted(found)), unchanged=plan.unchanged - len(found))


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
