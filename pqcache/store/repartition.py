"""Repartition: row groups that fill the block and never exceed it, one partition directory at a time."""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from pqcache.config import read_config, write_config
from pqcache.errors import UsageError
from pqcache.events import Advanced, OnEvent, Rewrote, Started, Warned, ignore
from pqcache.parquet.rewrite import RewriteOptions, rewrite_directory
from pqcache.parquet.statistics import read_footer
from pqcache.store.build import Job, build_snapshot
from pqcache.store.cache import Cache
from pqcache.store.disk import fsync_path, fsync_tree, remove_tree
from pqcache.store.hive import parent
from pqcache.store.manifest import SourceFile
from pqcache.store.plan import Recipe, plan_repartition
from pqcache.store.source import Source, local_path, open_source, redact, url_scheme
from pqcache.store.subset import Subset
from pqcache.store.sync import JOBS, finish, list_source, make_report, rewrite_recipe
from pqcache.store.transfer import Stopwatch, disk_error, disk_errors, fetch

ROW_GROUP_SIZE = 128 << 20


@dataclass(frozen=True)
class RepartitionReport:
    """What a repartition did; with ``dry_run`` the ``_after`` numbers are 0.

    ``rewritten`` counts partition directories, ``snapshot`` is None unless a cache was repartitioned in
    place.
    """

    source: str
    target: str
    snapshot: str | None
    dry_run: bool
    directories: int
    rewritten: int
    files_before: int
    files_after: int
    row_groups_before: int
    row_groups_after: int
    bytes_before: int
    bytes_after: int
    rows: int
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values."""
        return asdict(self)


def repartition(
    source: str | os.PathLike[str],
    dest: str | os.PathLike[str] | None = None,
    *,
    row_group_size: int = ROW_GROUP_SIZE,
    options: Mapping[str, str] | None = None,
    jobs: int = JOBS,
    wait: float = 0.0,
    dry_run: bool = False,
    on_event: OnEvent = ignore,
) -> RepartitionReport:
    """Rewrite a dataset so that its row groups fill ``row_group_size`` bytes on disk and never exceed it.

    Without ``dest``, ``source`` is a cache: it gets a new snapshot, and its next syncs cut new partitions the
    same way. With ``dest``, ``source`` is a cache, a directory or a URL, and ``dest`` a new local directory,
    which appears when it is complete. Rows, their order within a partition, schema and metadata stay as they
    are; files that already fit are linked.

    Raises UsageError, SourceError, ParquetError or CacheError; source and cache are never left half done.
    """
    how = RewriteOptions(row_group_size)
    text = os.fspath(source)
    cache = Cache(Path(text).absolute())
    is_cache = url_scheme(text) == "" and cache.exists()
    if dest is None:
        if not is_cache:
            raise UsageError(
                f"{redact(text)}: not a pqcache, so it needs a directory to write to: "
                f"pqcache repartition {redact(text)} DEST"
            )
        return _repartition_cache(cache, how, jobs, wait, dry_run, on_event)
    with ExitStack() as stack:
        if is_cache:
            snapshot, lease = cache.lease()
            stack.enter_context(lease)
            text = str(snapshot.path)
        opened = open_source(text, options)
        stack.callback(opened.close)
        return _repartition_directory(opened, text, os.fspath(dest), how, jobs, dry_run, on_event)


def _repartition_cache(
    cache: Cache, how: RewriteOptions, jobs: int, wait: float, dry_run: bool, on_event: OnEvent
) -> RepartitionReport:
    watch = Stopwatch()
    config = replace(read_config(cache.path), row_group_size=how.row_group_size)
    with disk_errors(cache.path), cache.lock(wait):
        current = cache.snapshot()
        before = current.manifest()
        fetched = before.files[0].recipe.partition("|")[0] if before.files else ""
        plan = plan_repartition(before.files, Recipe(fetched, rewrite_recipe(how)))
        published, after = None, before
        if not dry_run:
            if not plan.nothing_to_do:
                job = Job(
                    cache, current, plan, None, before.source, before.where, Subset(), how, jobs, 0, False, on_event
                )
                published, after = build_snapshot(job)
            write_config(cache.path, config)
            report = make_report(cache, config, plan, published or current, after, published, 0, dry_run, watch)
            finish(cache, config, "repartition", report, on_event)
        else:
            after = replace(before, files=())
    return RepartitionReport(
        source=str(cache.path),
        target=str(cache.path),
        snapshot=(published or current).id,
        dry_run=dry_run,
        directories=len(plan.directories),
        rewritten=plan.rewrites,
        files_before=len(before.files),
        files_after=len(after.files),
        row_groups_before=before.row_groups,
        row_groups_after=after.row_groups,
        bytes_before=before.size,
        bytes_after=after.size,
        rows=before.rows,
        seconds=watch.seconds,
    )


@dataclass(frozen=True)
class _Done:
    """What became of one directory: files, row groups and bytes before and after, and rows."""

    files: tuple[int, int]
    row_groups: tuple[int, int]
    bytes: tuple[int, int]
    rows: int


def _repartition_directory(
    source: Source,
    url: str,
    dest: str,
    how: RewriteOptions,
    jobs: int,
    dry_run: bool,
    on_event: OnEvent,
) -> RepartitionReport:
    watch = Stopwatch()
    if url_scheme(dest) not in ("", "file"):
        raise UsageError(f"{redact(dest)}: the target has to be a local directory")
    target = Path(os.path.abspath(os.path.expanduser(local_path(dest))))
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UsageError(f"{target}: exists and is not empty; name a new directory")
    files = sorted(list_source(source, on_event).files, key=lambda file: (parent(file.path), file.path))
    groups = [(d, tuple(group)) for d, group in groupby(files, key=lambda file: parent(file.path))]
    total = sum(file.identity.size for file in files)
    done: list[_Done] = []
    if not dry_run:
        build = target.with_name(f".{target.name}.pqcache-{os.getpid()}")
        try:
            _sweep(target)
            build.mkdir(parents=True)
            on_event(Started("rewrite", total))
            with ThreadPoolExecutor(max(1, min(jobs, 2))) as pool:  # each overlaps decoding and encoding
                futures = [
                    pool.submit(_one_directory, source, url, d, group, build, how, on_event) for d, group in groups
                ]
                try:
                    done = [future.result() for future in futures]
                except BaseException:
                    pool.shutdown(wait=False, cancel_futures=True)
                    raise
            remove_tree(build / "_fetch")
            fsync_tree(build)
            build.rename(target)  # replaces an empty directory
            fsync_path(target.parent)
        except OSError as error:
            raise disk_error(Path(error.filename or target), error) from error
        finally:
            remove_tree(build)
    return RepartitionReport(
        source=redact(url),
        target=str(target),
        snapshot=None,
        dry_run=dry_run,
        directories=len(groups),
        rewritten=len(groups),
        files_before=len(files),
        files_after=sum(item.files[1] for item in done),
        row_groups_before=sum(item.row_groups[0] for item in done),
        row_groups_after=sum(item.row_groups[1] for item in done),
        bytes_before=total,
        bytes_after=sum(item.bytes[1] for item in done),
        rows=sum(item.rows for item in done),
        seconds=watch.seconds,
    )


def _sweep(target: Path) -> None:
    """Remove what runs that died have left of this target."""
    for left in target.parent.glob(f".{glob.escape(target.name)}.pqcache-*"):
        process = left.name.rpartition("-")[2]
        if process.isdigit() and not Path(f"/proc/{process}").exists():
            remove_tree(left)


def _one_directory(
    source: Source,
    url: str,
    directory: str,
    files: Sequence[SourceFile],
    build: Path,
    how: RewriteOptions,
    on_event: OnEvent,
) -> _Done:
    """Rewrite one partition directory into ``build``; remote files are brought there first."""
    if url_scheme(url) in ("", "file"):
        root = Path(os.path.abspath(os.path.expanduser(local_path(url))))
        root = root.parent if root.is_file() else root
    else:
        root = build / "_fetch"
        (root / directory).mkdir(parents=True, exist_ok=True)
        for file in files:
            fetch(source, file, lambda file: root / file.path, on_event)
    paths = [root / file.path for file in files]
    before = sum(read_footer(path)[0].num_row_groups for path in paths)
    out = build / directory / ".new" if not directory else build / directory
    out.parent.mkdir(parents=True, exist_ok=True)
    result = rewrite_directory(paths, out, how, lambda amount: on_event(Advanced("rewrite", amount)))
    for warning in result.warnings:
        on_event(Warned(f"{directory}: {warning}" if directory else warning))
    outputs = sorted(out.iterdir())
    footers = [read_footer(path)[0] for path in outputs]
    size = sum(path.stat().st_size for path in outputs)
    groups = sum(footer.num_row_groups for footer in footers)
    if not directory:  # files beside partition directories: the directory exists before they do
        for path in outputs:
            path.rename(build / path.name)
        out.rmdir()
    if root == build / "_fetch":
        for path in paths:
            path.unlink()
    on_event(Rewrote(directory, len(files), len(outputs), groups, size))
    rows = sum(footer.num_rows for footer in footers)
    bytes_before = sum(file.identity.size for file in files)
    return _Done((len(files), len(outputs)), (before, groups), (bytes_before, size), rows)
