"""Syncs a changed source: decides, builds a new snapshot, lists again and publishes."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import pyarrow as pa

from pqcache.errors import (
    DamagedError,
    ParquetError,
    SourceChanged,
    SourceIncomplete,
    SourceNotFound,
    UsageError,
)
from pqcache.events import Listed, Warned
from pqcache.options import IDENTITY
from pqcache.parquet.schema import spelling_of
from pqcache.store.arriving import arriving_snapshots
from pqcache.store.config import write_config
from pqcache.store.drivers.base import Source
from pqcache.store.drivers.timeouts import with_retries
from pqcache.store.expect import Finding
from pqcache.store.layout import SUMMARY
from pqcache.store.manifest import FileEntry, Manifest, SourceFile
from pqcache.store.partition_paths import parent, partition_keys
from pqcache.store.snapshot import Snapshot, read_kept
from pqcache.store.sync.bad_partitions import (
    BadPartitions,
    BadPartitionsSoFar,
    SkippedPartition,
    advise_to_skip,
    blame,
    place_of,
    skipped_partitions,
)
from pqcache.store.sync.build_snapshot import build_snapshot
from pqcache.store.sync.cache_run import CacheRun, RunResult
from pqcache.store.sync.decide import (
    Asked,
    Comparison,
    Decision,
    Findings,
    Held,
    NeedsRewriting,
    compare_content,
    decide,
    files_of,
    find_unusable,
    obstacle,
    waiting_files,
)
from pqcache.store.sync.download.download_file import Vanished
from pqcache.store.sync.download.subset import Subset
from pqcache.store.sync.judge import foreseen, judged
from pqcache.store.sync.listing import Listing, ListSource, check_one_table
from pqcache.store.sync.plan import partition_changes, planned_files
from pqcache.store.sync.safety_checks import check_case, check_space, wait_rules
from pqcache.store.sync.snapshot_job import Origin
from pqcache.store.sync.table_schema import read_remote_footer
from pqcache.store.tables.base import Table
from pqcache.system.disk import discard, tree_size
from pqcache.system.threads import in_parallel
from pqcache.units import format_count

NEW_LISTINGS = 3  # from which a run goes on while its source changes

T = TypeVar("T")
log = logging.getLogger("pqcache.sync")


def sync_changes(run: CacheRun, source: Source, listing: Listing, list_again: ListSource) -> RunResult:
    """Publish a new snapshot if anything has changed; ``list_again`` lists the source in the same way as ``listing``.

    When all files are downloaded, the source is listed again. They are published only if it still has the same files,
    as it then held exactly these between the two listings. Otherwise the run continues from the new listing, up to
    NEW_LISTINGS times, and reuses its downloads. A version of a table never changes, so it is not listed again: the
    downloads prove that its files existed.
    """
    held = read_held(run)
    _check_still_table(run, source, held.manifest)
    if not (run.config.as_files or source.capabilities.lists_only_data_files):
        paths = (file.path for entry in (held.manifest.files if held.manifest else ()) for file in entry.sources)
        check_one_table(source, listing.files, paths, run.options.patience)
    asked = Asked(
        url=source.url,
        config=run.config,
        waits=wait_rules(run.config),
        force=run.options.force,
        fill=run.options.fill and run.base is None,
        republish=run.changes_index or run.candidate_is_due,
        is_version=source.capabilities.lists_one_version,
    )
    held = replace(held, comparison=_compare(run, source, listing, held.manifest))
    return _Publisher(run=run, source=source, list_again=list_again, held=held, asked=asked).publish(listing)


class _Moved(Exception):
    """The source has changed since the download; the new ``listing`` differs at ``path``."""

    def __init__(self, listing: Listing, path: str) -> None:
        super().__init__(path)
        self.listing, self.path = listing, path


@dataclass(frozen=True, kw_only=True)
class _Publisher:
    run: CacheRun
    source: Source
    list_again: ListSource
    held: Held
    asked: Asked

    def publish(self, listing: Listing) -> RunResult:
        """Decide and apply until a decision holds; each round starts from the findings of the last."""
        findings, moves = Findings(), 0
        while True:
            try:
                done = self._decide_and_apply(listing, findings)
            except _Moved as moved:
                listing, moves = moved.listing, moves + 1
                findings = replace(findings, skipped={})  # its files may be good ones
                if moves == 1:
                    self._warn(f"{self.source.url} changed while it was copied; continuing with a new listing")
                if moves > NEW_LISTINGS:
                    raise SourceIncomplete(
                        self.source.url,
                        f"keeps changing while it is copied, last {moved.path}",
                        "nothing was published, sync again when its writers have finished, or leave young files out "
                        "with --settle",
                    ) from None
                continue
            if isinstance(done, RunResult):
                return done
            findings = done

    def _decide_and_apply(self, listing: Listing, findings: Findings) -> RunResult | Findings:
        """The result, or findings for another try; raises _Moved if the source has changed."""
        if not self.run.options.dry_run:
            check_case(listing.files, self.run.config.source, self.run.cache.tmp_dir)
        if self.asked.fill and not findings.obstacle:
            findings = self._with_obstacle(findings, obstacle(self.source, listing))
        decision = decide(listing, self.source.table_version, self.held, self.asked, findings)
        try:
            return self._finished(self._apply(decision), decision)
        except NeedsRewriting as needs:
            return self._with_obstacle(findings, str(needs))
        except BadPartitions as bad:
            if bad.errors.keys() <= findings.skipped.keys():
                raise next(iter(bad.errors.values())) from bad
            self._check_unmoved(decision, decision.files)
            log.debug("partitions are skipped: %s", bad)
            return replace(findings, skipped={**findings.skipped, **bad.errors})
        except (Vanished, SourceChanged, SourceNotFound, ParquetError) as error:
            if isinstance(error, Vanished) and isinstance(self.source, Table):
                self.source.take_newer()  # what the version had was removed, but a newer one may be complete
            self._check_unmoved(decision, decision.files)
            raise

    def _warn(self, text: str) -> None:
        self.run.options.on_event(Warned(text))

    def _with_obstacle(self, findings: Findings, reason: str) -> Findings:
        if reason:
            self._warn(f"{self.source.url}: {reason}; nothing can be read before all of it is published")
        return replace(findings, obstacle=reason)

    def _check_unmoved(self, decision: Decision, files: Sequence[SourceFile]) -> None:
        """List the source again; raises _Moved if the decision would have other ``files``."""
        on_event, skipped = self.run.options.on_event, decision.findings.skipped
        now = self.list_again(lambda event: None if isinstance(event, Listed | Warned) else on_event(event))
        again = files_of(now, self.asked.waits, decision.manifest, skipped)
        differing = set() if list(files) == again else set(files) ^ set(again)
        if differing or now.subset.recipe != decision.listing.subset.recipe:
            path = min((file.path for file in differing), default="")
            log.debug("the source has changed since it was listed: %s", path)
            raise _Moved(now, path)

    def _apply(self, decision: Decision) -> RunResult:
        """Apply a decision, and publish the snapshot if the source is still the same afterwards."""
        run, source, plan, subset = self.run, self.source, decision.plan, decision.listing.subset
        if run.options.dry_run:
            return self._foresee(decision)
        if run.current is None:  # so a failed first run can be repeated by the cache's name
            write_config(run.cache.path, run.config)
        if not decision.publishes:
            return RunResult(plan=plan, published=None, totals=decision.totals, candidate=run.candidate)

        def confirm(entries: Sequence[FileEntry]) -> None:
            if not self.asked.is_version:
                downloaded = {file.path: file for entry in entries for file in entry.sources}
                self._check_unmoved(decision, [downloaded.get(file.path, file) for file in decision.files])
            decision.check_rows(entries, self.asked)

        if subset.ignore_case:
            subset = spelled(subset, run.base, decision.files, self._schemas_of(plan.downloads))
        skips = run.config.skip_bad and not decision.fills
        before = self.held.manifest.table if self.held.manifest else None
        origin = Origin(source=source, subset=subset, confirm=confirm, skip_bad=skips, before=before)
        if decision.fills:
            from pqcache.store.sync.fill import fill_snapshot  # and pyarrow.compute, which few syncs need

            return fill_snapshot(run, plan, decision.metadata, origin)
        reindex = bool(self.held.comparison.differing)
        held = self.held.manifest.files if self.held.manifest else ()
        return build_snapshot(run, plan, decision.metadata, held=held, origin=origin, reindex=reindex)

    def _finished(self, result: RunResult, decision: Decision) -> RunResult:
        """Add the parts of the source that were left out to the result, and warn about them."""
        listing, plan, held = decision.listing, decision.plan, self.held.manifest.files if self.held.manifest else ()
        skipped = (*skipped_partitions(listing.misfits, ()), *skipped_partitions(decision.left_out, held))
        for item in skipped:
            self._warn_of_skipped(item)
        waiting = waiting_files(listing, self.asked.waits, decision.manifest)
        now = self.asked.waits.now * 1e9
        future = [f.path for f in waiting if self.asked.waits.settle and f.identity.mtime_ns > now]
        if future:
            number = format_count(len(future), "file")
            what = f"{number} with times in the future, like {min(future)}: waiting for --settle until then"
            self._warn(f"{self.source.url}: {what}")
        return replace(
            result,
            touched=() if plan.nothing_to_do else partition_changes(plan, decision.manifest, listing.paths),
            newest=listing.newest,
            table=self.source.table_version,
            passed_over=replace(listing.passed_over, waiting=len(waiting)),
            skipped=skipped,
        )

    def _warn_of_skipped(self, item: SkippedPartition) -> None:
        what = "its old version is kept" if item.kept else "left out, as there is no old version"
        kind = "file" if item.partition.startswith("./") else "partition"
        self._warn(f"{kind} {item.partition}: {what}: {item.reason}")

    def _foresee(self, decision: Decision) -> RunResult:
        """Raise the errors of a run without ``dry_run``, as far as they can be foreseen, and report its plan."""
        run, plan = self.run, decision.plan
        if decision.manifest is not None and not self.asked.force:
            decision.check_rows(self._entries_foreseen(decision), self.asked)
        for planned in planned_files(plan, decision.manifest, decision.listing.paths):
            run.options.on_event(planned)
        if not plan.nothing_to_do:
            already = tree_size(run.cache.tmp_dir) + sum(tree_size(at.path) for at in arriving_snapshots(run.cache))
            rewritten = plan.download_bytes if decision.fills and run.config.rewrite() is not None else 0
            check_space(run, plan, already - rewritten)  # when all has arrived, beside the files as they are
        return RunResult(plan=plan, published=None, totals=decision.totals, findings=self._findings_foreseen(decision))

    def _findings_foreseen(self, decision: Decision) -> tuple[Finding, ...]:
        """Findings in the candidate, if the run would recreate it, else in the paths of the files."""
        run, plan = self.run, decision.plan
        if not decision.publishes:
            return ()
        if plan.nothing_to_do and run.candidate is not None:
            return judged(run, run.candidate.path, decision.held)
        newest = max(file.identity.mtime_ns for file in decision.files) / 1e9
        return foreseen(run, map(plan.path_of, decision.files), newest or None)

    def _entries_foreseen(self, decision: Decision) -> list[FileEntry]:
        """Entries of the new snapshot; for partitions that may lose rows, rows are counted from footers."""
        plan = decision.plan
        found = [now for directory in plan.directories for _, now in directory.kept]
        found += [item.entry for directory in plan.directories for item in directory.rewrite if item.entry is not None]
        found += [item.entry for directory in plan.directories for item in directory.found]
        lost = Counter[str]()
        for entry in decision.held:
            lost[parent(entry.path)] += entry.rows
        for entry in found:
            lost[parent(entry.path)] -= entry.rows
        losing = {directory for directory, rows in lost.items() if rows > 0} - decision.uncompared
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
        options = self.run.options
        calls = [partial(with_retries, partial(call, f), f.path, options.patience, options.on_event) for f in files]
        return in_parallel(calls, options.jobs)

    def _schemas_of(self, files: Iterable[SourceFile]) -> list[pa.Schema]:
        def schema_of(file: SourceFile) -> pa.Schema | None:
            try:
                return read_remote_footer(self.source, file)[1]
            except ParquetError:  # its download says so
                return None

        found = self._of_each(schema_of, sorted(files, key=lambda file: file.path))
        return [schema for schema in found if schema is not None]


def spelled(
    subset: Subset, current: Snapshot | None, files: Iterable[SourceFile], schemas: Sequence[pa.Schema] = ()
) -> Subset:
    """Set how a subset spells columns: as in a snapshot, else as in the first of ``schemas``."""
    keys = partition_keys(file.path for file in files)
    before: list[pa.Schema] = []
    with suppress(DamagedError):
        before = [] if current is None else [current.index().data_schema]
    return replace(subset, spelling=spelling_of([*before, *schemas], [*(subset.columns or ()), *keys]))


def read_held(run: CacheRun) -> Held:
    """The files of the snapshot that a run starts from, and the unusable ones among them.

    Without a manifest no held file is known, so all are downloaded again; a damaged index or summary is rewritten.
    """
    base, is_of_source = run.base, run.previous_source is None
    if base is None:
        return Held(is_of_source=is_of_source)
    try:
        manifest = base.checked_manifest()
    except DamagedError as error:
        run.options.on_event(Warned(f"{error}; everything is fetched again"))
        return Held(is_intact=False, is_of_source=is_of_source)
    is_intact = True
    try:
        base.checked_index()
        base.check(SUMMARY)
    except DamagedError as error:
        run.options.on_event(Warned(f"{error}; it is built again"))
        is_intact = False
    damaged, foreign = find_unusable(base, manifest.files)
    if damaged:
        log.debug("%s files of the current snapshot are not as recorded and are not kept", len(damaged))
    if foreign:
        number = format_count(len(foreign), "file")
        reason = "fetched again, because others own them or can write to them"
        run.options.on_event(Warned(f"{run.cache.path}: {number} of the snapshot {reason} ({min(foreign)})"))
    return Held(
        manifest=manifest,
        is_intact=is_intact,
        unusable=damaged | foreign,
        is_of_source=is_of_source,
        others=list(_files_of_others(run)),
    )


def _files_of_others(run: CacheRun) -> Iterator[tuple[str, Sequence[FileEntry]]]:
    """After a rollback, files of other snapshots than the one this run starts from, which lacks newer files."""
    if run.options.compare != IDENTITY or not (run.candidate or read_kept(run.cache.path).rolled_back):
        return
    for snapshot in reversed(run.cache.snapshots()):
        if snapshot != run.base:
            with suppress(DamagedError):
                entries = snapshot.checked_manifest().files
                unusable = {parent(path) for paths in find_unusable(snapshot, entries) for path in paths}
                yield str(snapshot.path), [entry for entry in entries if parent(entry.path) not in unusable]


def _check_still_table(run: CacheRun, source: Source, manifest: Manifest | None) -> None:
    """Raise UsageError if the cache holds a table's version, but the source has only files now.

    Without the log, deleted and rewritten rows of the table would come back from its files.
    """
    held = None if manifest is None else manifest.table
    if manifest is None or held is None or not held.version or source.table_version is not None:
        return
    if run.config.as_files or run.previous_source is not None:
        return
    reason = f"has no log of a table any more, and the cache holds {held}"
    raise UsageError(source.url, reason, "put the log back, or take the files as they are with --as-files")


def _compare(run: CacheRun, source: Source, listing: Listing, manifest: Manifest | None) -> Comparison:
    if run.options.compare == IDENTITY or run.base is None or manifest is None:
        return Comparison()
    if not run.options.dry_run:
        for left in run.cache.tmp_dir.iterdir():  # downloads of dead runs are found by identity, which is not trusted
            discard(left)
    found = compare_content(source, listing.files, run.base, manifest.files, run.options)
    if found.differing:
        number = format_count(len(found.differing), "file")
        run.options.on_event(Warned(f"{number} of equal size and time differ in content, like {min(found.differing)}"))
    return found
