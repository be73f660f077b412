"""Applies a plan: downloads, rewrites, indexes, assembles a snapshot in ``tmp/`` and publishes it."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

from pqcache.errors import DamagedError, ParquetError, disk_errors
from pqcache.events import Advanced, Published, Rewrote, Started, Warned
from pqcache.parquet.rewrite.recipe import differ_in_size_only, shuffle_of
from pqcache.parquet.schema import changed_units
from pqcache.parquet.validation import read_footer
from pqcache.store.expect import unmet
from pqcache.store.layout import CHECKSUMS, FILES, ROW_GROUPS, SUMMARY
from pqcache.store.manifest import (
    FileEntry,
    Identity,
    Manifest,
    SnapshotMetadata,
    SourceFile,
    assign_sources,
    write_summary,
)
from pqcache.store.manifest_file import write_manifest
from pqcache.store.ownership import make_directories
from pqcache.store.partition_paths import parent
from pqcache.store.publish import next_number, publish, stage
from pqcache.store.row_group_index import Index, IndexBuilder, build_index, index_columns
from pqcache.store.snapshot import Snapshot, write_checksums
from pqcache.store.sync.bad_partitions import BadPartitionsSoFar, place_of
from pqcache.store.sync.cache_run import CacheRun, RunResult, report_fetching
from pqcache.store.sync.download.download_file import (
    Downloaded,
    Downloader,
    DownloadOptions,
    download_all,
    stoppable_threads,
)
from pqcache.store.sync.download.subset import EVERYTHING
from pqcache.store.sync.judge import judged
from pqcache.store.sync.plan import BuiltFile, DirectoryPlan, Plan, plan_repartition, recipe_of
from pqcache.store.sync.safety_checks import check_space
from pqcache.store.sync.snapshot_job import (
    Origin,
    RewrittenFile,
    SnapshotJob,
    keys_of,
    make_workdir,
    sources_of,
    take_over_or_remove,
)
from pqcache.store.sync.table_schema import SchemaSet, TableSchema, local_table_schema, uniform_table_schema
from pqcache.store.tables.base import Table
from pqcache.store.urls import quoted
from pqcache.system.disk import checksum_of, fsync_path, limit_mode, limit_modes, link_or_copy, remove_tree, tree_size
from pqcache.units import format_count

log = logging.getLogger("pqcache.sync")


_ROWS = "_rows.json"  # in a rewritten directory: the rows of each file it was made from


def build_snapshot(
    run: CacheRun,
    plan: Plan,
    metadata: SnapshotMetadata,
    *,
    held: Sequence[FileEntry],
    origin: Origin | None = None,
    table: TableSchema | None = None,
    reindex: bool = False,
) -> RunResult:
    """Apply ``plan`` and publish the result, or make it the candidate; a failure leaves the current snapshot unchanged.

    Args:
        run: the run; its cache is locked, and ``run.base`` is the snapshot that ``plan`` was made against.
        plan: which files to keep, download and rewrite. The result has a different plan, with more to rewrite, if the
            new files' schema differs from the others'.
        metadata: for the manifest, beside the files.
        held: the files of the current snapshot, none if its manifest is damaged.
        origin: where to download from; None when nothing is downloaded.
        table: the schema to rewrite files with, if it is known.
        reindex: read all footers again, and take nothing from the current index.
    """
    cache = run.cache
    with disk_errors(cache.path):
        job = SnapshotJob(
            run=run,
            workdir=make_workdir(cache),
            plan=plan,
            metadata=metadata,
            previous=run.base,
            held=held,
            origin=origin,
            table=table,
            reindex=reindex,
        )
        known = _previous_index(job)
        if job.rewrite is not None and table is None and known is not None and known.uniform:
            job = replace(job, table=uniform_table_schema(known.data_schema))
        take_over_or_remove(cache, job.workdir, *keys_of(job))
        check_space(run, plan, tree_size(job.workdir))
        index = IndexBuilder(job.table_schema, units=job.units)
        built = list(_make_files(job, index))
        if origin is not None:
            origin.confirm([*(item.entry for item in built), *_kept(plan)])
        target, entries = _assemble(job, job.workdir / "snapshot", built)
        if job.rewrite is not None and not index.is_uniform([entry.path for entry in entries], known):
            target, entries, known, plan = _unify(job, target, entries, index, known)
            index = IndexBuilder(job.table_schema, units=job.units)
        with job.clashes_by_partition():
            schema = index.write([entry.path for entry in entries], known, target / ROW_GROUPS, target)
        for change in changed_units(job.schema_before() or schema, schema):
            job.on_event(Warned(f"{metadata.source}: {change}"))
        manifest = write_metadata(job, target, entries)
        findings = judged(run, target, manifest.files)
        if (lines := unmet(findings)) or run.is_held:
            waiting = stage(cache, target, lines)
            return RunResult(plan=plan, published=None, totals=manifest.totals, candidate=waiting, findings=findings)
        snapshot = publish(cache, target, run.current)
    job.on_event(Published(snapshot.id))
    return RunResult(plan=plan, published=snapshot, totals=manifest.totals, findings=findings)


def _unify(
    job: SnapshotJob, target: Path, entries: list[FileEntry], index: IndexBuilder, known: Index | None
) -> tuple[Path, list[FileEntry], Index, Plan]:
    """Rewrite files whose schemas differ to one schema; return their directory, entries, index, and the plan.

    Directories that already have it are linked. Raises ParquetError if types do not mix without loss.
    """
    assert job.rewrite is not None
    done, source = job.plan, job.metadata.source
    try:
        with job.clashes_by_partition(f"{target}/"):
            table = local_table_schema(target, entries, job.table_schema)
            index.check_values([entry.path for entry in entries], known, target, job.units.of(table.schema))
    except ParquetError as error:
        raise error.renamed(target, source) from error
    if table.others:
        plan = plan_repartition(entries, job.plan.recipe, table.others)
        number = format_count(plan.rewrites, "partition directory", "partition directories")
        job.on_event(Warned(f"{source}: schemas differ; {number} rewritten with the one that holds them all"))
        check_space(job.run, plan)
        again = replace(job, previous=Snapshot(target), plan=plan, origin=None, table=table)
        built = list(_make_files(again, IndexBuilder(job.table_schema, units=job.units)))
        target, entries = _assemble(again, job.workdir / "unified", built)
        redone = {directory.directory: directory for directory in plan.directories}
        done = replace(done, directories=tuple(d if d.rewrite else redone[d.directory] for d in done.directories))
    return (
        target,
        entries,
        build_index(target, [e.path for e in entries], table_schema=job.table_schema, units=job.units),
        done,
    )


def _make_files(job: SnapshotJob, index: IndexBuilder) -> Iterator[BuiltFile]:
    """Download and rewrite in parallel; yield the snapshot's new files, indexed.

    A directory is rewritten as soon as its last file is downloaded, while other downloads continue.
    """
    plan, jobs, stop = job.plan, job.run.options.jobs, threading.Event()
    for item in (item for d in plan.directories for item in d.found):
        try:
            metadata, schema = read_footer(Path(item.file))
        except ParquetError as error:
            advice = f"remove that snapshot with 'pqcache gc {quoted(job.run.cache.path)} --keep 1' and sync again"
            raise DamagedError(item.file, error.reason, advice) from error
        columns = index_columns(item.entry.path, metadata, schema, Path(item.file))
        index.add(item.entry.path, metadata, schema, columns)
        yield item
    finished = {d.directory for d in plan.directories if d.rewrite and is_rewritten(job, d)}
    _report_phases(job, finished)
    missing = {d.directory: 0 if d.directory in finished else len(d.downloads) for d in plan.directories}
    downloaded: dict[SourceFile, Downloaded] = {}
    bad, schemas = BadPartitionsSoFar(), _schemas_kept(job)  # types that do not mix are found after each download
    with stoppable_threads(jobs, stop) as threads, stoppable_threads(1, stop) as rewriter:
        rewriting: list[Future[list[BuiltFile]]] = []

        def rewrite(directory: DirectoryPlan) -> None:
            files = {file: downloaded.pop(file) for file in directory.downloads if file in downloaded}
            rewriting.append(rewriter.submit(rewrite_and_index, directory, files))

        def rewrite_and_index(directory: DirectoryPlan, files: dict[SourceFile, Downloaded]) -> list[BuiltFile]:
            built = []
            blamed = job.blame(directory.directory) if directory.downloads else nullcontext()
            with blamed, job.clashes_by_partition(f"{job.metadata.source}/"):
                for file, metadata, schema in rewrite_in_cache(job, directory, files, stop.is_set):
                    path = file.entry.path
                    index.add(path, metadata, schema, index_columns(path, metadata, schema, Path(file.file)))
                    built.append(file)
            return built

        for directory in plan.directories:
            if directory.rewrite and not missing[directory.directory]:
                rewrite(directory)
        tasks = [(d, f) for d in plan.directories if d.directory not in finished for f in d.downloads]
        with bad.collected():  # what has begun is ended all the same: the next attempt takes it over
            for (directory, file), copy in download_all(threads, downloader_of(job, stop.is_set), tasks, jobs, stop):
                if not directory.rewrite:
                    with bad.collected(), job.blame(place_of(file.path)):
                        index.add(plan.path_of(copy.file), copy.metadata, copy.schema, copy.columns)
                        yield BuiltFile(str(job.download_path(copy.file)), _entry(job, copy))
                    continue
                downloaded[file] = copy
                missing[directory.directory] -= 1
                if not missing[directory.directory]:
                    rewrite(directory)
                with bad.collected(), job.clashes_by_partition(f"{job.metadata.source}/"):
                    schemas.add(f"{job.metadata.source}/{file.path}", copy.schema)
                for done in [future for future in rewriting if future.done()]:
                    with bad.collected():
                        done.result()  # an error there stops the downloads here
        for future in rewriting:
            with bad.collected():
                yield from future.result()
        bad.raise_any()


def _report_phases(job: SnapshotJob, finished: Collection[str]) -> None:
    """Report the phases, less the files and rewritten directories left by an earlier run."""
    plan = job.plan
    left = {entry.name.partition(".")[0]: entry.stat().st_size for entry in os.scandir(job.workdir / "fetch")}
    missing, files = 0, 0
    for directory in plan.directories:
        for file in directory.downloads if directory.directory not in finished else ():
            missing += file.identity.size - min(left.get(job.file_key(file), 0) if left else 0, file.identity.size)
            files += 1
    report_fetching(job.on_event, plan.download_bytes, plan.download_bytes - missing, files)
    if plan.rewrites:
        job.on_event(Started("rewrite", plan.rewrite_bytes))


def _schemas_kept(job: SnapshotJob) -> SchemaSet:
    """The schema of kept files, if all of them are known to have one."""
    schemas = SchemaSet(job.table_schema)
    kept = next((entry.path for d in job.plan.directories for entry in d.keep), None)
    if job.table is not None and job.previous is not None and kept is not None:
        schemas.add(f"{job.previous.path / kept}", job.table.schema)
    return schemas


def downloader_of(job: SnapshotJob, stopped: Callable[[], bool]) -> Downloader:
    subset = EVERYTHING if job.origin is None else job.origin.subset
    source = None if job.origin is None else job.origin.source
    options = DownloadOptions(
        subset=subset,
        patience=job.run.options.patience,
        checksum=job.run.config.checksum,
        confirm=source is None or not (source.capabilities.reads_versions and subset.is_all),
        stopped=stopped,
        on_event=job.on_event,
    )
    return Downloader(
        source=source,
        cache=job.run.cache.path,
        target=job.download_path,
        path=job.plan.path_of,
        options=options,
        blame=job.blame,
    )


def _assemble(job: SnapshotJob, target: Path, built: list[BuiltFile]) -> tuple[Path, list[FileEntry]]:
    previous = job.previous
    places = {item.entry.path: item.file for item in built}
    entries = [item.entry for item in built]
    for directory in job.plan.directories:
        entries.extend(now for _, now in directory.kept)
        places.update((new, f"{previous.path if previous else ''}/{old}") for old, new in directory.renamed.items())
    entries.sort(key=lambda entry: entry.path)
    make_directories(target / "_pqcache")
    made: set[str] = set()
    for entry in entries:
        above = parent(entry.path)
        if above not in made:
            make_directories(target / above)
            made.add(above)
        place = places.get(entry.path) or f"{previous.path if previous else ''}/{entry.path}"
        link_or_copy(place, f"{target}/{entry.path}")
    return target, entries


def _kept(plan: Plan) -> Iterator[FileEntry]:
    return (now for directory in plan.directories for _, now in directory.kept)


def write_metadata(job: SnapshotJob, target: Path, entries: list[FileEntry]) -> Manifest:
    """Write manifest, summary, checksums and key indexes; the index must be there."""
    manifest = manifest_of(job, entries, Snapshot(target).number)
    readable = readable_by(target, entries)
    new = target / f"{FILES}.new"
    write_manifest(manifest, new)
    limit_mode(new, readable)
    new.replace(target / FILES)  # which readers have open, of a snapshot that was arriving
    write_summary(manifest, target / SUMMARY)
    write_checksums(target)
    for name in (ROW_GROUPS, FILES, SUMMARY, CHECKSUMS):
        limit_mode(target / name, readable)
        fsync_path(target / name)
    if keys := job.run.config.keys:
        from pqcache.store.key_index import refresh_key_indexes  # and pyarrow.compute, which few syncs need
        from pqcache.store.key_lookup import KEYS

        refresh_key_indexes(keys, None if job.reindex else job.previous, Snapshot(target), job.on_event)
        limit_modes(target / KEYS, readable)
    return manifest


def manifest_of(job: SnapshotJob, entries: Iterable[FileEntry], number: int = 0) -> Manifest:
    """The manifest of a snapshot with this ``number``; 0 for the next one."""
    return Manifest(
        files=tuple(_dated(job, list(entries), number or next_number(job.run.cache))),
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        source=job.metadata.source,
        where=job.metadata.where,
        shard=job.metadata.shard,
        listing=job.metadata.listing,
        table=job.metadata.table,
    )


def _dated(job: SnapshotJob, entries: list[FileEntry], number: int) -> list[FileEntry]:
    """Set ``since`` of new files: the snapshot that brought their sources to the cache."""
    new = [file for entry in entries if not entry.since for file in entry.sources]
    known = _ages(job.held, {file.path for file in new})
    dates = {}
    for file in new:
        found = [since for identity, since in known.get(file.path, ()) if identity.is_still(file.identity)]
        dates[file] = min(found, default=number)
    unknown = {file.path for file in new if dates[file] == number}
    if unknown and job.held:
        rewritten = {path: names for path, names in _rewritten(job).items() if path in unknown}
        known = _ages(job.held, {name for names in rewritten.values() for name in names})
        for file in new:
            if file.path in rewritten:  # it is as old as the newest file that had its rows
                found = [min((s for _, s in known.get(name, ())), default=number) for name in rewritten[file.path]]
                dates[file] = max(found)
    return [
        e if e.since else replace(e, since=max((dates[file] for file in e.sources), default=number)) for e in entries
    ]


def _ages(held: Iterable[FileEntry], paths: Collection[str]) -> dict[str, list[tuple[Identity, int]]]:
    """The identities of source files in the cache, and the first snapshot of each."""
    found: dict[str, list[tuple[Identity, int]]] = {}
    for entry in held if paths else ():
        for file in entry.sources:
            if file.path in paths:
                found.setdefault(file.path, []).append((file.identity, entry.since))
    return found


def _rewritten(job: SnapshotJob) -> Mapping[str, Sequence[str]]:
    """The table's files that existed before, or have only rows of earlier files, which are named."""
    source = None if job.origin is None else job.origin.source
    if not isinstance(source, Table) or job.origin is None:
        return {}
    found = source.made_from(job.origin.before)
    if found is None:
        reason = "its log does not reach back to the last sync, so since= counts all files of tonight as new"
        job.on_event(Warned(f"{source.url}: {reason}"))
    return found or {}


def readable_by(target: Path, entries: Iterable[FileEntry]) -> int:
    """Read permissions common to all files, as minima and maxima in the metadata are values from them."""
    readable = 0o444
    for entry in entries:
        readable &= os.stat(f"{target}/{entry.path}").st_mode
    return readable


def _previous_index(job: SnapshotJob) -> Index | None:
    """The current snapshot's index, if files are kept, with their new paths.

    A damaged one is rebuilt from their footers.
    """
    previous = job.previous
    if previous is None or not any(directory.keep for directory in job.plan.directories):
        return None
    if not job.reindex:
        try:
            return _with_new_paths(job.plan, previous.checked_index())
        except DamagedError as error:
            log.debug("footers of all kept files are read again: %s", error)
    kept = [entry.path for d in job.plan.directories for entry in d.keep]
    return _with_new_paths(job.plan, build_index(previous.path, kept, table_schema=job.table_schema, units=job.units))


def _with_new_paths(plan: Plan, index: Index) -> Index:
    """Rename kept files in an index; paths that go to other files are dropped."""
    if not any(directory.renamed for directory in plan.directories):
        return index
    new = {held.path: now.path for directory in plan.directories for held, now in directory.kept}
    return replace(index, paths=tuple(new.get(path, "") for path in index.paths))


def _entry(job: SnapshotJob, copy: Downloaded) -> FileEntry:
    recipe, file, metadata = job.plan.recipe.text, copy.file, copy.metadata
    return FileEntry(
        path=job.plan.path_of(file),
        size=job.download_path(file).stat().st_size if recipe or file.identity.is_shaped else file.identity.size,
        rows=metadata.num_rows,
        row_groups=metadata.num_row_groups,
        sources=(file,),
        recipe=recipe,
        checksum=copy.checksum,
    )


@dataclass(frozen=True, kw_only=True)
class _InputFile:
    """A local input file of a rewritten directory; recipe and checksum are empty if not recorded."""

    name: str
    path: Path
    sources: tuple[SourceFile, ...]
    rows: int
    recipe: str
    checksum: str


def is_rewritten(job: SnapshotJob, plan: DirectoryPlan) -> bool:
    """Whether a dead run had rewritten this directory from the same files."""
    return (job.rewrite_path(plan.directory, sources_of(plan)) / _ROWS).is_file()


def rewrite_in_cache(
    job: SnapshotJob, plan: DirectoryPlan, downloaded: Mapping[SourceFile, Downloaded], stopped: Callable[[], bool]
) -> list[RewrittenFile]:
    """Rewrite one directory, unless a dead run had done so; return its new files.

    ``downloaded`` has the directory's downloaded files. Raises KeyboardInterrupt soon after ``stopped`` becomes true.
    """
    inputs = _inputs(job, plan, downloaded)
    target = job.rewrite_path(plan.directory, [file for item in inputs for file in item.sources])
    checksums: Mapping[str, str] = {}
    rows = [item.rows for item in inputs]
    if target.is_dir():
        rows = json.loads((target / _ROWS).read_text())
        job.on_event(Advanced("rewrite", sum(item.size for item in plan.rewrite)))
    else:
        try:
            checksums = _rewrite(job, plan.directory, inputs, target, stopped)
        except ParquetError:
            _remove_downloads(job, inputs)  # a copy that was damaged on its way must not be taken over by the next run
            raise
    built = _built(job, plan.directory, inputs, rows, _with_checksums(target, checksums, inputs))
    _remove_downloads(job, inputs)  # their rows are in the rewritten files, or they are linked there
    job.on_event(
        Rewrote(
            directory=plan.directory,
            files_before=len(inputs),
            files_after=len(built),
            row_groups=sum(item.built.entry.row_groups for item in built),
            bytes=sum(item.built.entry.size for item in built),
        )
    )
    return built


def _inputs(job: SnapshotJob, plan: DirectoryPlan, downloaded: Mapping[SourceFile, Downloaded]) -> list[_InputFile]:
    """The input files in row order."""
    found = []
    for item in plan.rewrite:
        if item.entry is not None:
            assert job.previous is not None
            entry = item.entry
            path, sources, rows = job.previous.path / entry.path, entry.sources, entry.rows
            name = entry.path if item.file is None else item.file.path
            recipe, checksum = entry.recipe, entry.checksum
        elif item.file is not None:
            copy = downloaded.get(item.file)  # None: a run that died had rewritten the directory
            file = item.file if copy is None else copy.file
            path, sources, rows = job.download_path(file), (file,), 0 if copy is None else copy.metadata.num_rows
            name, recipe, checksum = file.path, "", "" if copy is None else copy.checksum
        name = name.rpartition("/")[2]
        found.append(_InputFile(name=name, path=path, sources=sources, rows=rows, recipe=recipe, checksum=checksum))
    return found


def _rewrite(
    job: SnapshotJob, directory: str, inputs: Sequence[_InputFile], target: Path, stopped: Callable[[], bool]
) -> dict[str, str]:
    """Rewrite ``inputs`` into ``target``, which appears only when it is complete and durable.

    Returns the checksums of the written files, by name.
    """
    from pqcache.parquet.rewrite.directory import (  # a plain sync need not wait for these
        KnownOfSources,
        rewrite_directory,
    )

    assert job.rewrite is not None
    options, table = job.rewrite, job.table
    if table is not None and options.dense is None:
        options = replace(options, dense=table.dense)
    links = job.workdir / f"{target.name}.in"  # the files by their names, as rewriting goes by these
    links.mkdir()
    readable = 0o444  # by those who can read all the inputs
    for item in inputs:
        readable &= item.path.stat().st_mode
        link_or_copy(item.path, links / item.name)
    unfinished = target.with_name(target.name + ".new")

    def progress(amount: int) -> None:
        job.on_event(Advanced("rewrite", amount))
        if stopped():
            raise KeyboardInterrupt

    recipes = [recipe_of(item.recipe).rewrite for item in inputs]
    known = KnownOfSources(
        schema=None if table is None else table.schema,
        made_alike=[differ_in_size_only(recipe, job.plan.recipe.rewrite) for recipe in recipes],
        int96=None if table is None else table.int96,
        of_table=job.table_schema,
        shuffled_with=shuffle_of(recipes[0]),  # the plan has inputs that were all shuffled at once, or none
        name=f"{job.metadata.source}/{directory}".rstrip("/"),
    )
    result = rewrite_directory([links / item.name for item in inputs], unfinished, options, progress, known)
    for warning in result.warnings:
        job.on_event(Warned(warning))
    for path in unfinished.iterdir():
        path.chmod(path.stat().st_mode & 0o444 & readable)
    (unfinished / _ROWS).write_text(json.dumps([item.rows for item in inputs]))
    fsync_path(unfinished / _ROWS)
    fsync_path(unfinished)
    unfinished.rename(target)
    remove_tree(links)
    return {output.path.name: output.checksum for output in result.outputs}


def _with_checksums(target: Path, known: Mapping[str, str], inputs: Sequence[_InputFile]) -> dict[Path, str]:
    """Checksums of rewritten files: ``known`` ones by name if just written, the input's if linked to it."""
    linked = {}
    for item in inputs:
        if item.checksum and item.path.exists():
            linked[item.path.stat().st_ino] = item.checksum
    files = sorted(path for path in target.iterdir() if path.name != _ROWS)
    return {path: known.get(path.name) or linked.get(path.stat().st_ino) or checksum_of(path) for path in files}


def _built(
    job: SnapshotJob, directory: str, inputs: Sequence[_InputFile], rows: Sequence[int], files: Mapping[Path, str]
) -> list[RewrittenFile]:
    assert job.rewrite is not None
    footers = [read_footer(path) for path in files]
    assigned = assign_sources(rows, [metadata.num_rows for metadata, _ in footers])
    if job.rewrite.shuffle is not None:
        assigned = [list(range(len(inputs)))] * len(files)
    built = []
    for (path, checksum), (metadata, schema), positions in zip(files.items(), footers, assigned, strict=True):
        entry = FileEntry(
            path=f"{directory}/{path.name}" if directory else path.name,
            size=path.stat().st_size,
            rows=metadata.num_rows,
            row_groups=metadata.num_row_groups,
            sources=tuple(dict.fromkeys(file for position in positions for file in inputs[position].sources)),
            recipe=job.plan.recipe.text,
            checksum=checksum,
        )
        built.append(RewrittenFile(BuiltFile(str(path), entry), metadata, schema))
    return built


def _remove_downloads(job: SnapshotJob, inputs: Sequence[_InputFile]) -> None:
    for item in inputs:
        if item.path.parent == job.workdir / "fetch":
            item.path.unlink(missing_ok=True)
