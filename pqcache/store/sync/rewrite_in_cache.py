"""Rewrite a partition directory of a cache, or take over what a run that died had rewritten."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pqcache.errors import ParquetError
from pqcache.events import Advanced, Rewrote, Warned
from pqcache.parquet.rewrite.options import differ_in_size_only, shuffle_of
from pqcache.parquet.row_group_stats import read_footer
from pqcache.store.manifest import FileEntry, SourceFile, assign_sources
from pqcache.store.sync.download.download_file import Downloaded
from pqcache.store.sync.plan import DirectoryPlan, recipe_of
from pqcache.store.sync.snapshot_job import BuiltFile, RewrittenFile, SnapshotJob, sources_of
from pqcache.system.checksum import checksum_of
from pqcache.system.disk import fsync_path, link_or_copy, remove_tree

_ROWS = "_rows.json"  # in a rewritten directory: the rows of each file it was made from


@dataclass(frozen=True, kw_only=True)
class _InputFile:
    """A local file that a directory is rewritten from; empty recipe and checksum where none is recorded."""

    name: str
    path: Path
    sources: tuple[SourceFile, ...]
    rows: int
    recipe: str
    checksum: str


def is_rewritten(job: SnapshotJob, plan: DirectoryPlan) -> bool:
    """Whether a run that died had rewritten this directory from the same files."""
    return (job.rewrite_path(plan.directory, sources_of(plan)) / _ROWS).is_file()


def rewrite_in_cache(
    job: SnapshotJob, plan: DirectoryPlan, downloaded: Mapping[SourceFile, Downloaded], stopped: Callable[[], bool]
) -> list[RewrittenFile]:
    """Rewrite one directory, unless a run that died had done so; return its new files.

    ``downloaded`` has the files of the directory that were downloaded. When ``stopped`` is true, KeyboardInterrupt
    is raised soon.
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
    """In row order."""
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

    Return the checksums of what was written, by name.
    """
    from pqcache.parquet.rewrite.directory import KnownOfSources
    from pqcache.store.sync.rewrite_files import RewriteTask, rewrite_files  # a plain sync need not wait for these

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
    task = RewriteTask(
        files=[links / item.name for item in inputs],
        target=unfinished,
        options=options,
        known=KnownOfSources(
            schema=None if table is None else table.schema,
            made_alike=[differ_in_size_only(recipe, job.plan.recipe.rewrite) for recipe in recipes],
            int96=None if table is None else table.int96,
            of_table=job.table_schema,
            shuffled_with=shuffle_of(recipes[0]),  # the plan has inputs that were all shuffled at once, or none
        ),
        root=links,
        name=f"{job.metadata.source}/{directory}".rstrip("/"),
    )
    result = rewrite_files(task, progress)
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
    """Checksums of rewritten files: ``known`` by name if written now, an input's if linked to it."""
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
