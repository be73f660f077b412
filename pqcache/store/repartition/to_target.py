"""Repartition to another place, by threads or on a Dask, Ray or Spark cluster.

Jobs publish a partition in one step and make the same bytes wherever they run, so running one twice does no harm.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import groupby, islice
from pathlib import Path
from typing import Any

from pqcache.events import Advanced, Rewrote, Started, Warned
from pqcache.parquet.dense import parse_dense
from pqcache.parquet.rewrite.recipe import RewriteOptions
from pqcache.store.drivers.base import Source, Target
from pqcache.store.drivers.registry import open_target
from pqcache.store.drivers.timeouts import Patience, with_retries
from pqcache.store.manifest import SourceFile
from pqcache.store.manifest_file import schema_of_table
from pqcache.store.partition_paths import parent
from pqcache.store.repartition.clusters import ClusterExecutor, check_seen, connected
from pqcache.store.repartition.dense_proposals import DenseRequest, local_root
from pqcache.store.repartition.partition_job import (
    DirectoryRecord,
    DirectoryResult,
    Endpoints,
    JobContext,
    PartitionJob,
    claim,
    do_job,
    open_spool,
    read_records,
    remove_directory,
    run_job,
)
from pqcache.store.sync.cache_run import RunOptions
from pqcache.store.sync.listing import ListingRules, list_source
from pqcache.store.sync.snapshot_job import rewrite_key
from pqcache.store.sync.table_schema import TableSchema, read_table_schema
from pqcache.store.tables.base import VersionRule
from pqcache.store.urls import redact
from pqcache.units import format_count
from pqcache.versions import __version__

_OUTSTANDING = 256  # jobs that an executor knows of at once
_ENCODING_AT_ONCE = 2  # partitions: each overlaps decoding and encoding on several threads
_PATIENCE = Patience(2)  # of reading the records at the target


@dataclass(frozen=True, kw_only=True)
class RepartitionReport:
    """The outcome of a repartition; with ``dry_run`` the ``_after`` numbers are 0.

    ``rewritten`` counts partition directories, ``kept`` those finished at the target by an earlier run.
    ``snapshot`` is None unless a cache was repartitioned in place.
    """

    source: str
    target: str
    snapshot: str | None
    dry_run: bool
    directories: int
    rewritten: int
    kept: int
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


@dataclass(frozen=True, kw_only=True)
class _TargetRun:
    """A repartition into ``target``: a job for each partition, and the finished ones.

    ``records`` are those of an earlier run; ``done`` has the results by directory, those of that run included.
    """

    source: Source
    target: Target
    jobs: Sequence[PartitionJob]
    records: Sequence[DirectoryRecord]
    options: RunOptions
    kept: frozenset[str]
    done: dict[str, DirectoryResult] = field(default_factory=dict)

    @property
    def todo(self) -> list[PartitionJob]:
        return [job for job in self.jobs if job.directory not in self.kept]


def repartition_to(
    endpoints: Endpoints, rewrite: RewriteOptions, dense: DenseRequest, scheduler: str | None, options: RunOptions
) -> RepartitionReport:
    """Rewrite a dataset to ``target``; partitions finished by an earlier run are kept."""
    with ExitStack() as stack:
        target = open_target(endpoints.target, endpoints.target_options, endpoints.block_size)
        stack.callback(target.close)
        source = endpoints.open_source()
        stack.callback(source.close)
        jobs = _jobs(source, endpoints, rewrite, dense, options)
        complete, incomplete = with_retries(lambda: read_records(target), target.url, _PATIENCE, options.on_event)
        keys = {job.directory: job.key for job in jobs}
        done = {record.directory: record.done for record in complete if keys.get(record.directory) == record.key}
        run = _TargetRun(
            source=source,
            target=target,
            jobs=jobs,
            records=(*complete, *incomplete),
            options=options,
            kept=frozenset(done),
            done=done,
        )
        if not options.dry_run:
            cluster = None
            if scheduler is not None:
                cluster = stack.enter_context(connected(scheduler, run.todo, options.on_event))
            _run(run, cluster)
        return _report(run)


def _run(run: _TargetRun, cluster: ClusterExecutor | None) -> None:
    target, on_event = run.target, run.options.on_event
    target.begin()
    if run.jobs:
        claim(target, run.jobs[0].run)
    with _kept_on_failure(run, alone=True):
        for record in run.records:
            if record.directory not in run.kept:
                remove_directory(target, record)
        if cluster is not None and target.scratch is not None:
            check_seen(cluster, str(target.scratch))
    on_event(Started("rewrite", sum(job.size for job in run.jobs)))
    on_event(Advanced("rewrite", sum(job.size for job in run.jobs if job.directory in run.kept)))
    with _kept_on_failure(run, alone=cluster is None):
        for job, result in _results(run, cluster):
            run.done[job.directory] = result
            for warning in result.warnings:
                on_event(Warned(warning))
            on_event(
                Rewrote(
                    directory=job.directory,
                    files_before=result.files[0],
                    files_after=result.files[1],
                    row_groups=result.row_groups[1],
                    bytes=result.bytes[1],
                )
            )
        target.finish()


def _results(run: _TargetRun, cluster: ClusterExecutor | None) -> Iterator[tuple[PartitionJob, DirectoryResult]]:
    on_event = run.options.on_event
    if cluster is not None:
        for job, result in _as_they_end(cluster, run_job, run.todo):
            on_event(Advanced("rewrite", job.size))
            yield job, result
        return
    with open_spool(run.target) as spool:
        context = JobContext(
            source=run.source,
            target=run.target,
            spool=spool,
            encoding=threading.Semaphore(_ENCODING_AT_ONCE),
            on_event=on_event,
        )
        pool = ThreadPoolExecutor(run.options.jobs)
        try:
            yield from _as_they_end(pool, partial(do_job, context=context), run.todo)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # Ctrl-C does not wait


def _as_they_end(
    executor: Executor, do: Callable[[PartitionJob], DirectoryResult], todo: Iterable[PartitionJob]
) -> Iterator[tuple[PartitionJob, DirectoryResult]]:
    """Do jobs on an executor; yield each with its result as it ends.

    After a failure, jobs that can't be cancelled are awaited, so that the next run finds them done.
    """
    waiting = iter(todo)
    begun: dict[Future[DirectoryResult], PartitionJob] = {}
    failed: BaseException | None = None
    while True:
        if failed is None:
            begun |= {executor.submit(do, job): job for job in islice(waiting, _OUTSTANDING - len(begun))}
        if not begun:
            break
        for future in wait(begun, return_when=FIRST_COMPLETED).done:
            job, error = begun.pop(future), future.exception()
            if error is None:
                yield job, future.result()
            elif failed is None:
                failed = error
                begun = {other: job for other, job in begun.items() if not other.cancel()}
    if failed is not None:
        raise failed


def _report(run: _TargetRun) -> RepartitionReport:
    done = [] if run.options.dry_run else list(run.done.values())
    return RepartitionReport(
        source=redact(run.source.url),
        target=run.target.url,
        snapshot=None,
        dry_run=run.options.dry_run,
        directories=len(run.jobs),
        rewritten=len(run.todo),
        kept=len(run.kept),
        files_before=sum(len(job.files) for job in run.jobs),
        files_after=sum(item.files[1] for item in done),
        row_groups_before=sum(item.row_groups[0] for item in done),
        row_groups_after=sum(item.row_groups[1] for item in done),
        bytes_before=sum(job.size for job in run.jobs),
        bytes_after=sum(item.bytes[1] for item in done),
        rows=sum(item.rows for item in done),
        seconds=run.options.watch.seconds,
    )


def _jobs(
    source: Source, endpoints: Endpoints, rewrite: RewriteOptions, dense: DenseRequest, options: RunOptions
) -> list[PartitionJob]:
    """A job for each partition directory, in path order."""
    listed = list_source(source, options.on_event, ListingRules(files=endpoints.rules)).files
    files = [replace(f, identity=replace(f.identity, tag=f.identity.shared_tag)) for f in listed]  # links change ctimes
    files.sort(key=lambda file: (parent(file.path), file.path))
    if not dense.is_empty:
        root = local_root(endpoints.source) if dense.reads_files else Path()
        stored = dense.resolve([root / file.path for file in files])
        rewrite = replace(rewrite, dense=tuple((name, parse_dense(kind)) for name, kind in sorted(stored.items())))
    table = read_table_schema(source, files, options.on_event, of_table=schema_of_table(source.table_version))
    if rewrite.dense is None:
        rewrite = replace(rewrite, dense=table.dense)
    version = source.table_version
    rule = endpoints.rule if version is None or not version.version else VersionRule(version=version.version)
    endpoints = replace(endpoints, source=source.pinned_url(endpoints.source), rule=rule)  # one for all workers
    return _jobs_for(source.url, endpoints, rewrite, files, table)


def _jobs_for(
    url: str, endpoints: Endpoints, rewrite: RewriteOptions, files: Sequence[SourceFile], table: TableSchema
) -> list[PartitionJob]:
    schema = table.schema.serialize().to_pybytes()
    groups = {d: tuple(group) for d, group in groupby(files, key=lambda file: parent(file.path))}
    above = {""}  # directories that others lie in
    for directory in groups:
        while directory := parent(directory):
            above.add(directory)
    run = os.urandom(8).hex()
    common = hashlib.sha256(schema).hexdigest()
    recipe = f"{rewrite!r} blocks of {endpoints.block_size} schema {common} int96 {table.int96} by {__version__}"
    return [
        PartitionJob(
            endpoints=endpoints,
            directory=directory,
            files=group,
            options=rewrite,
            key=rewrite_key(url, directory, group, recipe),
            is_leaf=directory not in above,
            version=__version__,
            run=run,
            schema=schema,
            int96=table.int96,
            row_groups=sum(table.sizes[file].row_groups for file in group),
            decoded=sum(table.sizes[file].decoded for file in group),
        )
        for directory, group in groups.items()
    ]


@contextmanager
def _kept_on_failure(run: _TargetRun, alone: bool) -> Iterator[None]:
    """After a failure keep finished partitions for the next run, and say so; remove everything if there are none.

    After an interruption, or unless ``alone``, a partition may still be published.
    """
    target = run.target
    try:
        yield
    except BaseException as error:
        if not run.done and alone and (isinstance(error, Exception) or target.scratch is not None):
            target.abandon()
        else:
            number = format_count(len(run.jobs), "partition directory", "partition directories")
            message = (
                f"{target.url}: {len(run.done):,} of {number} are finished; the output so far is in "
                f"{target.unfinished}, and the same command continues from there"
            )
            run.options.on_event(Warned(message))
        raise
