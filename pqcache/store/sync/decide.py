"""Decides what a sync publishes.

`decide` is a pure function of a listing, the held files, the request, and the findings of earlier rounds of the same
run. `sync_changes` applies its decisions. `compare_content` and `find_unusable` say which held files can be kept.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import pyarrow as pa

from pqcache.errors import ParquetError, PqcacheError, SourceChanged, SourceIncomplete, SourceNotFound, disk_errors
from pqcache.events import Advanced, Started
from pqcache.store.config import Config
from pqcache.store.drivers.base import Source
from pqcache.store.drivers.timeouts import with_retries
from pqcache.store.manifest import FileEntry, Manifest, SnapshotMetadata, SourceFile, TableVersion, Totals, table_digest
from pqcache.store.manifest_file import schema_of_table
from pqcache.store.ownership import is_own, is_trusted_cache
from pqcache.store.partition_paths import parent, partition_schema
from pqcache.store.snapshot import Snapshot
from pqcache.store.sync.bad_partitions import BadPartitions, place_of, with_number, with_old_versions
from pqcache.store.sync.cache_run import ByteCounter, RunOptions
from pqcache.store.sync.download.download_file import MD5, md5_of, read_chunks
from pqcache.store.sync.download.subset import known_types
from pqcache.store.sync.listing import Listing, digest_of_shares, ready_paths
from pqcache.store.sync.plan import Plan, Recipe, plan_sync, recipe_for, recipe_of, take_from
from pqcache.store.sync.safety_checks import (
    WaitRules,
    check_bytes,
    check_deletions,
    check_rows,
    files_to_take,
    shrunk_partitions,
)
from pqcache.store.table_part import owners, parse_shard
from pqcache.store.urls import redact
from pqcache.system.disk import checksum_of, checksum_text, new_checksum
from pqcache.system.threads import in_parallel


@dataclass(frozen=True)
class Comparison:
    """The paths of held files that differ from their source, or cannot be compared with it: those are rewritten, or
    have only some columns or rows, and their downloads are not kept.
    """

    differing: frozenset[str] = frozenset()
    uncompared: frozenset[str] = frozenset()


def compare_content(
    source: Source, listed: Iterable[SourceFile], snapshot: Snapshot, entries: Sequence[FileEntry], options: RunOptions
) -> Comparison:
    """Compare the entries whose files are listed as recorded; the others have changed anyway.

    If an entry's tag is an MD5, that is compared. Otherwise the source file is read, and its checksum compared with the
    recorded one.
    """
    known = {file.path: file for file in listed}
    found = ((entry, known.get(entry.sources[0].path)) for entry in entries if _is_copy(entry))
    copies = [(entry, file) for entry, file in found if file and entry.sources[0].identity.is_still(file.identity)]
    options.on_event(Started("compare", sum(entry.size for entry, _ in copies)))

    def differs(entry: FileEntry, file: SourceFile) -> bool:
        path = snapshot.path / entry.path
        with disk_errors(path):
            if MD5.fullmatch(file.identity.tag):
                same = md5_of(path) == file.identity.tag
            else:
                read = partial(_checksum_at, source, file, options.on_event)
                found = with_retries(read, file.path, options.patience, options.on_event)
                same = found == (entry.checksum or checksum_of(path))
        options.on_event(Advanced("compare", entry.size))
        return not same

    different = in_parallel([partial(differs, entry, file) for entry, file in copies], options.jobs)
    return Comparison(
        frozenset(entry.path for (entry, _), differ in zip(copies, different, strict=True) if differ),
        frozenset(entry.path for entry in entries if not _is_copy(entry)),
    )


def _is_copy(entry: FileEntry) -> bool:
    return not entry.recipe and len(entry.sources) == 1 and not entry.sources[0].identity.is_shaped


def _checksum_at(source: Source, file: SourceFile, counter: ByteCounter) -> str:
    """The checksum of a source file; empty if it is gone or has changed."""
    seen = new_checksum()
    try:
        for chunk in read_chunks(source, file, 0, file.identity.size):
            seen.update(chunk)
            counter.keep_within_limit(len(chunk))
    except (SourceChanged, SourceNotFound):
        return ""
    return checksum_text(seen)


def find_damaged(snapshot: Snapshot, entries: Sequence[FileEntry]) -> frozenset[str]:
    """Paths of entries that are missing, of another size than recorded, or reached by a link."""
    return find_unusable(snapshot, entries)[0]


def find_unusable(snapshot: Snapshot, entries: Sequence[FileEntry]) -> tuple[frozenset[str], frozenset[str]]:
    """Paths of damaged entries, as `find_damaged`, and of entries that others can change.

    Others are all untrusted users; they can change a file that they own, can write to, or can replace.
    """
    root, trusted = str(snapshot.path), is_trusted_cache(snapshot.path.parent.parent)
    known: dict[str, tuple[bool, bool]] = {"": (True, True)}  # of directories: whether they are real, and ours
    damaged, foreign = set(), set()

    def look_at(directory: str) -> tuple[bool, bool]:
        if directory not in known:
            real, ours = look_at(parent(directory))
            try:
                status = os.lstat(f"{root}/{directory}")
            except OSError:  # what is missing is nobody's
                known[directory] = real, ours
            else:
                known[directory] = real and not stat.S_ISLNK(status.st_mode), ours and (trusted or is_own(status))
        return known[directory]

    for entry in entries:
        real, ours = look_at(parent(entry.path))
        try:
            status = os.lstat(f"{root}/{entry.path}")
        except OSError:
            damaged.add(entry.path)
        else:
            if not (real and stat.S_ISREG(status.st_mode) and status.st_size == entry.size):
                damaged.add(entry.path)
            if not (ours and (trusted or is_own(status))):
                foreign.add(entry.path)
    return frozenset(damaged), frozenset(foreign)


@dataclass(frozen=True, kw_only=True)
class Held:
    """The files that a cache holds.

    Attributes:
        manifest: of the current snapshot; None without one, or if it is damaged.
        is_intact: the index and the summary are undamaged.
        unusable: the paths of files that are damaged, or writable by others.
        comparison: the result of a comparison by content.
        is_of_source: the snapshot is a copy of the listed source.
        others: usable files of other snapshots, by snapshot directory.
    """

    manifest: Manifest | None = None
    is_intact: bool = True
    unusable: frozenset[str] = frozenset()
    comparison: Comparison = field(default_factory=Comparison)
    is_of_source: bool = True
    others: Sequence[tuple[str, Sequence[FileEntry]]] = ()


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The request of a sync.

    Attributes:
        url: of the source.
        config: the options that the cache remembers.
        waits: which new files wait, judged at the beginning of the run: files written while it runs stay young.
        force: publish even if more is lost than ``config.max_delete`` allows.
        fill: let readers open a first snapshot while its files are fetched.
        republish: publish even if no file has changed.
        is_version: each listing is of one committed, complete version.
    """

    url: str
    config: Config
    waits: WaitRules
    force: bool = False
    fill: bool = False
    republish: bool = False
    is_version: bool = False


@dataclass(frozen=True, kw_only=True)
class Findings:
    """Facts found by applying earlier decisions of a run.

    Attributes:
        skipped: the places whose new files cannot be taken, with reasons; their old versions are kept.
        obstacle: why the files cannot be read before all have arrived; empty if they can.
    """

    skipped: Mapping[str, PqcacheError] = field(default_factory=dict)
    obstacle: str = ""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The snapshot that a sync publishes for a ``listing``.

    Attributes:
        manifest: of the held snapshot, with the tags of unchanged files updated from the listing.
        files: the source files of the snapshot, of all nodes together.
        plan: how to get there from the held files.
        metadata: of the new manifest, beside its files.
        fills: readers may open the snapshot while its files are fetched.
        publishes: the current snapshot differs from this one.
        findings: the basis of this decision.
    """

    listing: Listing
    manifest: Manifest | None
    files: list[SourceFile]
    plan: Plan
    metadata: SnapshotMetadata
    fills: bool
    publishes: bool
    findings: Findings

    @property
    def held(self) -> Sequence[FileEntry]:
        return () if self.manifest is None else self.manifest.files

    @property
    def left_out(self) -> Mapping[str, PqcacheError]:
        """Places that are left out, or kept in their held version, with reasons."""
        return _left_out(self.listing, self.findings)

    @property
    def totals(self) -> Totals:
        """Of the current snapshot."""
        return Totals() if self.manifest is None else self.manifest.totals

    @property
    def uncompared(self) -> frozenset[str]:
        """Directories whose rows are not compared: those that now have files on other nodes, or other rows."""
        listed = {file.path for file in self.listing.files} if self.metadata.shard is not None else ()
        moved = frozenset(parent(path) for path in self.plan.removed if path in listed)
        return moved | self.listing.outside | _fetched_otherwise(self.held, self.plan.recipe)

    def check_rows(self, entries: Sequence[FileEntry], asked: Asked) -> None:
        """Raise SourceIncomplete if the new snapshot's ``entries`` lose too many rows, BadPartitions if some partitions
        wait.

        Their writers may still be at work, unless the source is a version of a table or cache, which is complete. A
        node with a share raises their first error, as other nodes may have files of the partition and would not wait.
        """
        if self.manifest is None or asked.force:
            return
        uncompared, limit = self.uncompared, asked.config.max_delete
        check_rows(entries, self.held, uncompared, asked.url, limit)
        if asked.is_version:
            return
        compared = [entry for entry in entries if parent(entry.path) not in uncompared]
        waiting = shrunk_partitions(compared, self.held, self.listing.found, asked.url, limit, asked.waits)
        if waiting and self.metadata.shard is not None:
            raise waiting[min(waiting)]
        if waiting:
            raise BadPartitions(waiting)


def decide(
    listing: Listing, version: TableVersion | None, held: Held, asked: Asked, findings: Findings = Findings()
) -> Decision:
    """Decide what to publish of a ``listing``; ``version`` is that of the table, if the source is one.

    Raises SourceIncomplete if nothing is left to publish, or more would be lost than allowed.
    """
    config, shard = asked.config, asked.config.shard
    manifest = None if held.manifest is None else with_tags(held.manifest, listing.files)
    fills = asked.fill and not findings.obstacle
    recipe = Recipe(listing.subset.recipe) if fills else recipe_for(config, listing.subset.recipe)
    files = files_of(listing, asked.waits, manifest, findings.skipped)
    ready = ready_paths(listing, asked.waits) if shard is not None else set()
    plan = take_from(plan_for(listing, files, manifest, recipe, held, shard, ready), held.others)
    digest = digest_of_shares(listing, shard, ready, asked.url, findings.skipped, files, manifest)
    if manifest is not None and not asked.force:
        _check_lost_files(plan, manifest, files, listing, asked)
    if not plan.directories:
        reason = SourceIncomplete(
            asked.url,
            "all files there still wait for --marker or --settle, so nothing was published",
            "sync again when their writer has finished",
        )
        raise next(iter(_left_out(listing, findings).values()), reason)  # nothing that is skipped has an old version
    metadata = SnapshotMetadata(
        source=redact(config.source),
        where=config.where,
        shard=shard,
        listing=digest,
        table=_table(listing, version, held, config),
    )
    return Decision(
        listing=listing,
        manifest=manifest,
        files=files,
        plan=plan,
        metadata=metadata,
        fills=fills,
        publishes=not (plan.nothing_to_do and _is_same(metadata, held) and not asked.republish),
        findings=findings,
    )


def files_of(
    listing: Listing, waits: WaitRules, manifest: Manifest | None, skipped: Mapping[str, PqcacheError]
) -> list[SourceFile]:
    """Source files of all nodes together, with the old versions of skipped places."""
    held = () if manifest is None else manifest.files
    return with_old_versions(taken_files(listing, waits, manifest), held, skipped, _odd_places(listing))


def taken_files(listing: Listing, waits: WaitRules, manifest: Manifest | None) -> list[SourceFile]:
    """Files that do not wait, and the held versions of those that do."""
    files = files_to_take(listing.files, listing.paths, manifest.files if manifest is not None else (), waits)
    return [file for file in files if parent(file.path) not in listing.outside] if listing.outside else files


def waiting_files(listing: Listing, waits: WaitRules, manifest: Manifest | None) -> list[SourceFile]:
    """Files that wait for ``--marker`` or ``--settle``."""
    if waits.marker is None and not waits.settle:
        return []
    taken = set(taken_files(listing, waits, manifest))
    return [f for f in listing.files if f not in taken and parent(f.path) not in listing.outside]


def plan_for(
    listing: Listing,
    files: Sequence[SourceFile],
    manifest: Manifest | None,
    recipe: Recipe,
    held: Held,
    shard: str | None,
    ready: Collection[str],
) -> Plan:
    """Plan for ``files`` of ``listing``, or a node's share.

    Held files that are no longer listed because they are being replaced stay on their node, and so do listed files that
    wait, which are not in ``ready``.
    """
    if shard is not None:
        node = parse_shard(shard)
        owner = owners(listing.files, node.nodes)
        files = [f for f in files if owner.get(f.path, node.node) == node.node or f.path not in ready]
    entries, comparison = () if manifest is None else manifest.files, held.comparison
    plan = plan_sync(files, entries, recipe, held.unusable | comparison.differing | comparison.uncompared)
    differing = {entry.sources[0].path for entry in entries if entry.path in comparison.differing}
    found = differing.intersection(file.path for file in files).difference(plan.changed)
    return replace(plan, changed=(*plan.changed, *sorted(found)), unchanged=plan.unchanged - len(found))


def with_tags(manifest: Manifest, files: Iterable[SourceFile]) -> Manifest:
    """Update the tags of unchanged source files from a listing.

    A file system that was mounted differently may have tags now, which is no reason to fetch files again.
    """
    listed = {file.path: file for file in files}
    held = [file for entry in manifest.files for file in entry.sources]
    if all(file.identity.tag for file in held) and all(file.identity.tag for file in listed.values()):
        return manifest  # an equal tag is the same already

    def tagged(file: SourceFile) -> SourceFile:
        now = listed.get(file.path, file)
        return now if file.identity != now.identity and file.identity.is_still(now.identity) else file

    def retagged(entry: FileEntry) -> FileEntry:
        sources = tuple(map(tagged, entry.sources))
        return entry if sources == entry.sources else replace(entry, sources=sources)

    return replace(manifest, files=tuple(map(retagged, manifest.files)))


def _is_same(metadata: SnapshotMetadata, held: Held) -> bool:
    """Whether a new snapshot of the same files would equal the current one."""
    manifest = held.manifest
    if manifest is None or not held.is_intact:
        return False
    before = manifest.shard, manifest.listing, table_digest(manifest.table)
    return before == (metadata.shard, metadata.listing, table_digest(metadata.table))


def _table(listing: Listing, version: TableVersion | None, held: Held, config: Config) -> TableVersion | None:
    """The table version to record in the snapshot; for a directory, the types of its partition columns."""
    declared, of_table = config.partition_types or {}, schema_of_table(version)
    if version is not None and not declared:
        return version
    before = held.manifest if held.is_of_source else None
    known = None if before is None else known_types(before.table, declared)
    schema, _ = partition_schema(listing.directories, declared, of_table, known)
    fields = [*schema, *(field for field in of_table or () if field.name not in schema.names)]
    return listing.typed(version, config, bytes(pa.schema(fields).serialize()))


def _left_out(listing: Listing, findings: Findings) -> dict[str, PqcacheError]:
    return {**_odd_places(listing), **findings.skipped}


def _odd_places(listing: Listing) -> dict[str, PqcacheError]:
    """Places with entries that a cache cannot hold, each with one error."""
    found: dict[str, list[PqcacheError]] = {}
    for path in sorted(listing.odd):
        found.setdefault(place_of(path), []).append(listing.odd[path])
    return {place: with_number(errors) for place, errors in found.items() if place not in listing.outside}


def _check_lost_files(
    plan: Plan, manifest: Manifest, files: Sequence[SourceFile], listing: Listing, asked: Asked
) -> None:
    """Raise SourceIncomplete if too much would be deleted, as far as known before the download."""
    config, held = asked.config, manifest.files
    changed = manifest.shard != config.shard and config.shard is not None
    was = f"--shard {config.shard} (before: {manifest.shard or 'all'})" if changed else ""
    elsewhere = frozenset(file.path for file in listing.files) if config.shard is not None else frozenset()
    deleted = tuple(path for path in plan.removed if parent(path) not in listing.outside)
    check_deletions(replace(plan, removed=deleted), held, asked.url, config.max_delete, elsewhere, was)
    known = frozenset(parent(entry.path) for entry in held) - _fetched_otherwise(held, plan.recipe)
    check_bytes(files, held, known, asked.url, config.max_delete)  # the rows of ``known`` will be compared


def _fetched_otherwise(held: Iterable[FileEntry], recipe: Recipe) -> frozenset[str]:
    """Directories with files that were fetched with other columns or rows than in ``recipe``."""
    return frozenset(parent(e.path) for e in held if recipe_of(e.recipe).subset != recipe.subset)


def obstacle(source: Source, listing: Listing) -> str:
    """Why a listing's files cannot be read before all have arrived; empty if they can."""
    if listing.subset.ignore_case:
        return "columns get one spelling while they are fetched"
    if listing.subset.where is not None:
        return "rows are filtered while they are fetched"
    shapes = (source.shape_of(file.path) for file in listing.files)
    if any(shape is not None and shape.deleted_rows is not None for shape in shapes):
        return "its table deletes rows of files"
    return ""


class NeedsRewriting(Exception):
    """The source's files have no common index until they are rewritten."""

    def __init__(self, error: ParquetError) -> None:
        super().__init__(f"{error.subject}: {error.reason}")
