"""Apply a plan: fetch, rewrite, index, put a snapshot together in ``tmp/`` and publish it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

from pqcache.errors import DamagedError, ParquetError, disk_errors
from pqcache.events import Advanced, OnEvent, Published, Rewrote, Started, Warned
from pqcache.parquet.rewrite.options import RewriteOptions, made_alike, shuffle_of
from pqcache.parquet.row_group_stats import read_footer
from pqcache.store.cache import CacheDirectory
from pqcache.store.drivers.base import Source
from pqcache.store.hive import parent
from pqcache.store.layout import CHECKSUMS, FILES, ROW_GROUPS, SUMMARY
from pqcache.store.manifest import FileEntry, Manifest, SourceFile, assign_sources
from pqcache.store.manifest_digest import write_summary
from pqcache.store.manifest_file import write_manifest
from pqcache.store.row_group_index import Index, IndexBuilder, build_index
from pqcache.store.snapshot import Snapshot, write_checksums
from pqcache.store.sync.download import Copied
from pqcache.store.sync.download_pool import Bringer, brought, pool
from pqcache.store.sync.plan import DirectoryPlan, Plan, plan_repartition
from pqcache.store.sync.safety_checks import check_space
from pqcache.store.sync.subset import Subset
from pqcache.store.sync.table_schema import Kinds, Table, table_in, table_like
from pqcache.store.workdir import adopt, file_key, make_workdir, rewrite_key
from pqcache.system.checksum import checksum_of
from pqcache.system.disk import fsync_path, link_or_copy, remove_tree, tree_size
from pqcache.units import format_count

_ROWS = "_rows.json"  # in a rewritten directory: the rows of each file it was made from


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a build works on: ``previous`` is the snapshot that ``plan`` was made against.

    ``source`` is None when nothing has to be fetched. With ``reindex`` nothing is taken from the index there is.
    ``keys`` are the columns to have key indexes of. ``table`` is what files are brought to that are rewritten.
    ``shard`` and ``listing`` are what the manifest says of the share.
    """

    cache: CacheDirectory
    previous: Snapshot | None
    plan: Plan
    source: Source | None
    source_url: str
    where: str | None
    subset: Subset
    rewrite: RewriteOptions | None
    jobs: int
    retries: int
    checksum: bool
    on_event: OnEvent
    reindex: bool = False
    keys: tuple[str, ...] = ()
    shard: str | None = None
    listing: str | None = None
    table: Table | None = None


@dataclass(frozen=True)
class Built:
    """A file of the new snapshot that is not in the old one: where it lies, and its entry."""

    file: str
    entry: FileEntry


def build_snapshot(job: Job) -> tuple[Snapshot, Manifest, Plan]:
    """Apply ``job.plan`` and publish the result; whatever fails leaves the current snapshot as it is.

    Return the plan as well: where the new files' schema is another one, more is rewritten than was planned.
    """
    run = make_workdir(job.cache)
    with disk_errors(job.cache.path):
        known, plan = _previous_index(job), job.plan
        if job.rewrite is not None and job.table is None and known is not None and known.uniform:
            # nothing but INT96 that stays could be another type to a rewrite
            job = job if job.rewrite.keep_int96 else replace(job, table=table_like(known.data_schema))
        keys = {_file_key(job, file) for file in job.plan.downloads}
        adopt(job.cache, run, keys, {_rewrite_key(job, d, _inputs(d)) for d in job.plan.directories})
        check_space(job.cache.path, job.plan, tree_size(run))
        index = IndexBuilder()
        target, entries = _assembled(job, run / "snapshot", list(_make_files(job, run, index)))
        if job.rewrite is not None and not index.is_uniform([entry.path for entry in entries], known):
            target, entries, known, plan = _unified(job, run, target, entries)
            index = IndexBuilder()
        manifest = _described(job, target, entries, index, known)
        snapshot = job.cache.publish(target, job.previous)
    job.on_event(Published(snapshot.id))
    remove_tree(run)
    return snapshot, manifest, plan


def _unified(job: Job, run: Path, target: Path, entries: list[FileEntry]) -> tuple[Path, list[FileEntry], Index, Plan]:
    """Bring files that drifted apart to one schema; return where they have it, their entries, index, and the plan.

    Directories whose files have it already are linked. Raises ParquetError where types do not mix without loss.
    """
    assert job.rewrite is not None
    done = job.plan
    try:
        table = table_in(target, entries, job.rewrite.keep_int96)
    except ParquetError as error:
        raise error.renamed(target, job.source_url) from error
    if table.others:
        plan = plan_repartition(entries, job.plan.recipe, table.others)
        number = format_count(plan.rewrites, "partition directory", "partition directories")
        job.on_event(Warned(f"{job.source_url}: schemas differ; {number} rewritten with the one that holds them all"))
        check_space(job.cache.path, plan)
        again = replace(job, previous=Snapshot(target), plan=plan, source=None, table=table)
        target, entries = _assembled(again, run / "unified", list(_make_files(again, run, IndexBuilder())))
        redone = {directory.directory: directory for directory in plan.directories}
        done = replace(done, directories=tuple(d if d.rewrite else redone[d.directory] for d in done.directories))
    return target, entries, build_index(target, [entry.path for entry in entries]), done


def _make_files(job: Job, run: Path, index: IndexBuilder) -> Iterator[Built]:
    """Fetch and rewrite what the plan says, several files at once; yield the new snapshot's new files.

    A directory is rewritten as soon as its last file has arrived, while others are still fetched.
    """
    plan, stop = job.plan, threading.Event()
    job.on_event(Started("fetch", plan.fetch_bytes))
    if plan.rewrites:
        job.on_event(Started("rewrite", plan.rewrite_bytes))
    finished = {d.directory for d in plan.directories if d.rewrite and _is_finished(job, run, d)}
    waiting = {d.directory: 0 if d.directory in finished else len(d.downloads) for d in plan.directories}
    arrived: dict[SourceFile, Copied] = {}
    kinds = Kinds()  # so that what does not mix is refused as soon as it arrives
    kept = next((entry.path for d in plan.directories for entry in d.keep), None)
    if job.table is not None and job.previous is not None and kept is not None:
        kinds.add(f"{job.previous.path / kept}", job.table.schema)

    with pool(job.jobs, stop) as fetchers, pool(1, stop) as rewriter:
        rewriting: list[Future[list[Built]]] = []

        def rewrite(directory: DirectoryPlan) -> None:
            here = {file: arrived.pop(file) for file in directory.downloads if file in arrived}
            rewriting.append(rewriter.submit(_rewrite, job, run, directory, here, stop.is_set))

        for directory in plan.directories:
            if directory.rewrite and not waiting[directory.directory]:
                rewrite(directory)
        tasks = ((d, f) for d in plan.directories if d.directory not in finished for f in d.downloads)
        for (directory, file), copied in brought(fetchers, _bringer(job, run, stop.is_set), tasks, job.jobs):
            if not directory.rewrite:
                index.add(copied.file.path, copied.metadata, copied.schema)
                yield Built(f"{run}/fetch/{_file_key(job, copied.file)}", _entry(job, run, copied))
                continue
            arrived[file] = copied
            waiting[directory.directory] -= 1
            if not waiting[directory.directory]:
                rewrite(directory)
            kinds.add(f"{job.source_url}/{file.path}", copied.schema)
            for done in [future for future in rewriting if future.done()]:
                done.result()  # an error there stops the fetching here
        for future in rewriting:
            for item in future.result():
                index.add(item.entry.path, *read_footer(Path(item.file)))
                yield item


def _bringer(job: Job, run: Path, stopped: Callable[[], bool]) -> Bringer:
    def target(version: SourceFile) -> Path:
        return run / "fetch" / _file_key(job, version)

    return Bringer(
        source=job.source,
        cache=job.cache.path,
        target=target,
        on_event=job.on_event,
        stopped=stopped,
        retries=job.retries,
        checksum=job.checksum,
        subset=job.subset,
    )


def _rewrite(
    job: Job,
    run: Path,
    plan: DirectoryPlan,
    arrived: dict[SourceFile, Copied],
    stopped: Callable[[], bool],
) -> list[Built]:
    """Rewrite one directory, unless a run that died had done so already."""
    assert job.rewrite is not None
    sources: list[tuple[SourceFile, ...]] = []
    files: list[tuple[str, Path]] = []
    rows: list[int] = []
    recorded: list[str] = []
    recipes = ["" if item.entry is None else item.entry.recipe for item in plan.rewrite]
    for item in plan.rewrite:
        if item.entry is not None:
            assert job.previous is not None
            sources.append(item.entry.sources)
            name = item.file.path if item.file is not None else item.entry.path
            files.append((Path(name).name, job.previous.path / item.entry.path))
            rows.append(item.entry.rows)
            recorded.append(item.entry.checksum)
        elif item.file is not None:
            copied = arrived.get(item.file)  # None: a run that died had rewritten the directory
            file = item.file if copied is None else copied.file
            sources.append((file,))
            files.append((Path(file.path).name, run / "fetch" / _file_key(job, file)))
            rows.append(0 if copied is None else copied.metadata.num_rows)
            recorded.append("" if copied is None else copied.checksum)
    target = run / "rewrite" / _rewrite_key(job, plan, [file for part in sources for file in part])
    written: Mapping[str, str] = {}
    if target.is_dir():
        rows = json.loads((target / _ROWS).read_text())
        job.on_event(Advanced("fetch", sum(file.identity.size for file in plan.downloads)))
        job.on_event(Advanced("rewrite", sum(item.size for item in plan.rewrite)))
    else:
        try:
            written = _rewrite_files(job, run, plan.directory, files, rows, recipes, target, stopped)
        except ParquetError:
            _forget(run, files)  # a copy that was damaged on its way must not be taken over by the next run
            raise
    made_files = sorted(path for path in target.iterdir() if path.name != _ROWS)
    checksums = _checksums(made_files, written, [path for _, path in files], recorded)
    _forget(run, files)  # their rows are in the rewritten files, or they are linked there
    footers = [read_footer(path)[0] for path in made_files]
    assigned = assign_sources(rows, [footer.num_rows for footer in footers])
    if job.rewrite.shuffle is not None:
        assigned = [list(range(len(sources)))] * len(made_files)
    built = []
    for path, footer, positions, checksum in zip(made_files, footers, assigned, checksums, strict=True):
        came_from = tuple(dict.fromkeys(file for position in positions for file in sources[position]))
        name = f"{plan.directory}/{path.name}" if plan.directory else path.name
        size, recipe = path.stat().st_size, job.plan.recipe.text
        entry = FileEntry(
            path=name,
            size=size,
            rows=footer.num_rows,
            row_groups=footer.num_row_groups,
            sources=came_from,
            recipe=recipe,
            checksum=checksum,
        )
        built.append(Built(str(path), entry))
    total = sum(item.entry.size for item in built)
    groups = sum(item.entry.row_groups for item in built)
    job.on_event(
        Rewrote(
            directory=plan.directory, files_before=len(files), files_after=len(built), row_groups=groups, bytes=total
        )
    )
    return built


def _checksums(
    made: Sequence[Path], known: Mapping[str, str], inputs: Sequence[Path], recorded: Sequence[str]
) -> list[str]:
    """Return the checksum of each file that was made, ``known`` by name if it was written just now.

    One that is an input, linked, keeps what was ``recorded`` of it.
    """
    linked = {}
    for path, checksum in zip(inputs, recorded, strict=True):
        if checksum and path.exists():
            linked[path.stat().st_ino] = checksum
    return [known.get(path.name) or linked.get(path.stat().st_ino) or checksum_of(path) for path in made]


def _forget(run: Path, files: Sequence[tuple[str, Path]]) -> None:
    for _, path in files:
        if path.parent == run / "fetch":
            path.unlink(missing_ok=True)


def _rewrite_files(
    job: Job,
    run: Path,
    directory: str,
    files: list[tuple[str, Path]],
    rows: list[int],
    recipes: list[str],
    target: Path,
    stopped: Callable[[], bool],
) -> dict[str, str]:
    """Rewrite ``files`` into ``target``, which appears only when it is whole and durable.

    Return the checksums of what was written, by name.
    """
    from pqcache.parquet.rewrite.rewrite import (
        rewrite_directory,  # a tenth of a second that a plain sync need not wait for
    )

    assert job.rewrite is not None
    how, table = job.rewrite, job.table
    if table is not None and how.dense is None:
        how = replace(how, dense=table.dense)
    made = [made_alike(recipe, job.plan.recipe.text) for recipe in recipes]
    before = shuffle_of(recipes[0])  # the plan sees to it that all have been shuffled at once, or none
    if how.shuffle is not None and before == how.shuffle:
        how = replace(how, shuffle=None)  # they are in this seed's order
    inputs = run / f"{target.name}.in"
    inputs.mkdir()
    for name, path in files:
        link_or_copy(path, inputs / name)
    unfinished = target.with_name(target.name + ".new")

    def progress(amount: int) -> None:
        job.on_event(Advanced("rewrite", amount))
        if stopped():
            raise KeyboardInterrupt

    place = f"{job.source_url}/{directory}".rstrip("/")
    try:
        paths = [inputs / name for name, _ in files]
        schema, int96 = (None, None) if table is None else (table.schema, table.int96)
        result = rewrite_directory(paths, unfinished, how, progress, schema, made, int96, before)
    except ParquetError as error:
        raise error.renamed(inputs, place) from error
    for warning in result.warnings:
        job.on_event(Warned(warning.replace(str(inputs), place).replace(str(unfinished), place)))
    for path in unfinished.iterdir():
        path.chmod(0o444)
    (unfinished / _ROWS).write_text(json.dumps(rows))
    fsync_path(unfinished / _ROWS)
    fsync_path(unfinished)
    unfinished.rename(target)
    remove_tree(inputs)
    return {output.path.name: output.checksum for output in result.outputs}


def _assembled(job: Job, target: Path, built: list[Built]) -> tuple[Path, list[FileEntry]]:
    """Put the files of the new snapshot together in ``target``; return it with their entries."""
    previous = job.previous
    places = {item.entry.path: item.file for item in built}
    entries = [item.entry for item in built]
    entries.extend(entry for directory in job.plan.directories for entry in directory.keep)
    entries.sort(key=lambda entry: entry.path)
    (target / "_pqcache").mkdir(parents=True)
    made: set[str] = set()
    for entry in entries:
        directory = parent(entry.path)
        if directory not in made:
            (target / directory).mkdir(parents=True, exist_ok=True)
            made.add(directory)
        place = places.get(entry.path) or f"{previous.path if previous else ''}/{entry.path}"
        link_or_copy(place, f"{target}/{entry.path}")
    return target, entries


def _described(job: Job, target: Path, entries: list[FileEntry], index: IndexBuilder, known: Index | None) -> Manifest:
    """Write the metadata of the snapshot that is put together in ``target``; return its manifest."""
    index.write([entry.path for entry in entries], known, target / ROW_GROUPS)
    created = datetime.now(timezone.utc).isoformat(timespec="seconds")
    manifest = Manifest(
        files=tuple(entries),
        source=job.source_url,
        created=created,
        where=job.where,
        shard=job.shard,
        listing=job.listing,
    )
    write_manifest(manifest, target / FILES)
    write_summary(manifest, target / SUMMARY)
    write_checksums(target)
    for name in (ROW_GROUPS, FILES, SUMMARY, CHECKSUMS):
        fsync_path(target / name)
    if job.keys:
        from pqcache.store.keys.build import refresh_key_indexes  # and pyarrow.compute, which few syncs need

        refresh_key_indexes(job.keys, None if job.reindex else job.previous, Snapshot(target), job.on_event)
    return manifest


def _previous_index(job: Job) -> Index | None:
    """Return the current snapshot's index, if files are kept; a damaged one is built anew from those."""
    previous = job.previous
    if previous is None or not any(directory.keep for directory in job.plan.directories):
        return None
    if not job.reindex:
        with suppress(DamagedError):
            return previous.whole_index()
    return build_index(previous.path, [entry.path for d in job.plan.directories for entry in d.keep])


def _inputs(plan: DirectoryPlan) -> list[SourceFile]:
    """Return the source files that a directory is rewritten from, in row order."""
    files: list[SourceFile] = []
    for item in plan.rewrite:
        if item.entry is not None:
            files.extend(item.entry.sources)
        elif item.file is not None:
            files.append(item.file)
    return files


def _file_key(job: Job, file: SourceFile) -> str:
    return file_key(job.source_url, file, job.plan.recipe.fetch)


def _rewrite_key(job: Job, plan: DirectoryPlan, files: Sequence[SourceFile]) -> str:
    common = "" if job.table is None else f" {job.table.digest}"
    return rewrite_key(job.source_url, plan.directory, files, job.plan.recipe.text + common)


def _is_finished(job: Job, run: Path, plan: DirectoryPlan) -> bool:
    """Return whether a run that died had rewritten this directory from the same files."""
    return (run / "rewrite" / _rewrite_key(job, plan, _inputs(plan)) / _ROWS).is_file()


def _entry(job: Job, run: Path, copied: Copied) -> FileEntry:
    recipe, file, metadata = job.plan.recipe.text, copied.file, copied.metadata
    size = (run / "fetch" / _file_key(job, file)).stat().st_size if recipe else file.identity.size
    return FileEntry(
        path=file.path,
        size=size,
        rows=metadata.num_rows,
        row_groups=metadata.num_row_groups,
        sources=(file,),
        recipe=recipe,
        checksum=copied.checksum,
    )
