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

from pqcache.config import read_config, updated, write_config
from pqcache.errors import UsageError
from pqcache.events import Advanced, OnEvent, Rewrote, Started, Warned, ignore
from pqcache.parquet.dense import parse_dense
from pqcache.parquet.options import RewriteOptions, parse_compression, shuffle_of
from pqcache.parquet.rewrite import rewrite_directory
from pqcache.parquet.statistics import read_footer
from pqcache.store.build import Job, build_snapshot
from pqcache.store.cache import Cache
from pqcache.store.densify import Proposal, propose_dense, resolve_dense
from pqcache.store.disk import fsync_path, fsync_tree, remove_tree
from pqcache.store.hive import parent
from pqcache.store.manifest import SourceFile
from pqcache.store.plan import Recipe, fetch_of, plan_repartition
from pqcache.store.source import Source, local_path, open_source, redact, url_scheme
from pqcache.store.subset import Subset
from pqcache.store.sync import JOBS, finish, list_source, make_report
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
    row_group_size: int | None = None,
    compression: str | None = None,
    compat: bool | None = None,
    keep_int96: bool | None = None,
    dense: Sequence[str] | None = None,
    narrow: bool = False,
    shuffle: int | None = None,
    options: Mapping[str, str] | None = None,
    jobs: int = JOBS,
    wait: float = 0.0,
    dry_run: bool = False,
    on_event: OnEvent = ignore,
) -> RepartitionReport:
    """Rewrite a dataset so that its row groups fill ``row_group_size`` bytes on disk and never exceed it.

    Without ``dest``, ``source`` is a cache: it gets a new snapshot, and its next syncs rewrite new partitions the
    same way; what is not given is what the cache remembers from before. With ``dest``, ``source`` is a cache, a
    directory or a URL, and ``dest`` a new local directory, which appears when it is complete. Rows, their order
    within a partition, schema and metadata stay as they are unless an option says otherwise; files that already
    are as asked for are linked.

    Args:
        source: what to rewrite.
        dest: where to, if not in place.
        row_group_size: the most compressed bytes of a row group; 128 MB at first.
        compression: ``zstd``, ``zstd:LEVEL``, ``lz4``, ``snappy``, ``none``, or ``keep`` for each column's own; at
            first lz4 for what is rewritten.
        compat: plain and dictionary encodings only, and snappy unless ``compression`` says otherwise.
        keep_int96: INT96 time stamps stay INT96.
        dense: list columns of one length to store as fixed-length bytes; none of them if empty.
        narrow: store integers of dense columns in the smallest type that holds all of the table.
        shuffle: a seed to permute the rows of each partition with.
        options: the store's options.
        jobs: files or partitions worked on at once.
        wait: seconds to wait for another run on the cache to end.
        dry_run: work out the report and change nothing.
        on_event: called with what happens, from several threads.

    Raises UsageError, SourceError, ParquetError or CacheError; source and cache are never left half done.
    """
    text = os.fspath(source)
    cache = Cache(Path(text).absolute())
    is_cache = url_scheme(text) == "" and cache.exists()
    codec, level = (None, None) if compression is None else parse_compression(compression)
    how = RewriteOptions(
        row_group_size or ROW_GROUP_SIZE, codec, level, compat or False, keep_int96 or False, None, shuffle
    )
    if isinstance(dense, str):
        raise UsageError(f"dense={dense!r}: give a list of names, like [{dense!r}]")
    wanted = Wanted(dense, narrow)
    if dest is None:
        if not is_cache:
            raise UsageError(
                f"{redact(text)}: not a pqcache, so it needs a directory to write to: "
                f"pqcache repartition {redact(text)} DEST"
            )
        given = {
            "row_group_size": row_group_size,
            "compression": compression,
            "compat": compat,
            "keep_int96": keep_int96,
            "shuffle": shuffle,
        }
        return _repartition_cache(cache, given, wanted, jobs, wait, dry_run, on_event)
    with ExitStack() as stack:
        if is_cache:
            snapshot, lease = cache.lease()
            stack.enter_context(lease)
            text = str(snapshot.path)
        if not wanted.nothing:
            _local_root(text)  # refused before anything is contacted
        opened = open_source(text, options)
        stack.callback(opened.close)
        return _repartition_directory(opened, text, os.fspath(dest), how, wanted, jobs, dry_run, on_event)


def dense_proposals(
    source: str | os.PathLike[str], *, options: Mapping[str, str] | None = None, on_event: OnEvent = ignore
) -> list[Proposal]:
    """Return the list columns of a cache or a local directory that ``dense`` would make faster to read.

    Goes by the footers and the first rows; a repartition looks at every row.

    Raises UsageError (not local), SourceError or ParquetError.
    """
    text = os.fspath(source)
    cache = Cache(Path(text).absolute())
    if url_scheme(text) == "" and cache.exists():
        snapshot, lease = cache.lease()
        with lease:
            return propose_dense([snapshot.path / entry.path for entry in snapshot.manifest().files])
    root = _local_root(text)  # refused before anything is contacted
    opened = open_source(text, options)
    try:
        files = sorted(list_source(opened, on_event).files, key=lambda file: file.path)
    finally:
        opened.close()
    return propose_dense([root / file.path for file in files])


@dataclass(frozen=True)
class Wanted:
    """The columns that are to be dense (None: those that are), and whether as the smallest type."""

    columns: Sequence[str] | None
    narrow: bool

    @property
    def nothing(self) -> bool:
        """Whether everything stays as it is."""
        return self.columns is None and not self.narrow

    def resolved(self, paths: Sequence[Path]) -> dict[str, str]:
        """Return as what each column is to be stored."""
        if self.columns is not None and not self.columns:
            if self.narrow:
                raise UsageError("--narrow: goes with --dense COLUMN, and not with --dense none")
            return {}
        return resolve_dense(paths, self.columns, self.narrow)


def _local_root(url: str) -> Path:
    if url_scheme(url) not in ("", "file"):
        raise UsageError(
            f"--dense: every file has to be looked at first, and {redact(url)} is not local; bring it here with "
            f"'pqcache sync {redact(url)} CACHE', then run 'pqcache repartition CACHE'"
        )
    root = Path(os.path.abspath(os.path.expanduser(local_path(url))))
    return root.parent if root.is_file() else root


def _repartition_cache(
    cache: Cache,
    given: Mapping[str, Any],
    wanted: Wanted,
    jobs: int,
    wait: float,
    dry_run: bool,
    on_event: OnEvent,
) -> RepartitionReport:
    watch = Stopwatch()
    config = updated(read_config(cache.path), given)
    if config.row_group_size is None:
        config = replace(config, row_group_size=ROW_GROUP_SIZE)
    with disk_errors(cache.path), cache.lock(wait):
        current = cache.snapshot()
        before = current.manifest()
        if not wanted.nothing:
            config = replace(config, dense=wanted.resolved([current.path / entry.path for entry in before.files]))
        how = config.rewrite()
        assert how is not None
        fetched = fetch_of(before.files[0].recipe) if before.files else ""
        plan = plan_repartition(before.files, Recipe(fetched, how.recipe))
        if any(shuffle_of(entry.recipe) not in (None, how.shuffle) for entry in before.files):
            raise UsageError(
                f"{cache.path}: its rows were shuffled with another seed and their order is not in the cache; set "
                f"shuffle = {how.shuffle} in pqcache.toml, then 'pqcache sync {cache.path}' fetches them anew"
            )
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
    wanted: Wanted,
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
    if not wanted.nothing:
        root = _local_root(url)
        dense = wanted.resolved([root / file.path for file in files])
        how = replace(how, dense=tuple((name, parse_dense(kind)) for name, kind in sorted(dense.items())))
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
        root = _local_root(url)
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
