"""Repartition into another place: a directory, HDFS or S3, by threads here or on a Dask cluster."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from pqcache.errors import UsageError
from pqcache.events import Advanced, OnEvent, Rewrote, Started, Warned
from pqcache.parquet.dense import parse_dense
from pqcache.parquet.rewrite.options import RewriteOptions
from pqcache.store.drivers.base import Source, Target
from pqcache.store.drivers.registry import open_source, open_target
from pqcache.store.drivers.retries import with_retries
from pqcache.store.hive import parent
from pqcache.store.manifest import SourceFile
from pqcache.store.repartition.dense_columns import Wanted, local_root
from pqcache.store.repartition.job import PartitionJob, do_job, spooled
from pqcache.store.repartition.target_record import Done, check_apart, forget, own, take_over
from pqcache.store.sync.listing import list_source
from pqcache.store.sync.table_schema import Table, table_of
from pqcache.store.urls import check_url, local_path, redact, url_scheme
from pqcache.store.workdir import rewrite_key
from pqcache.system.stopwatch import Stopwatch
from pqcache.units import format_count
from pqcache.versions import __version__

_ENCODING_AT_ONCE = 2  # partitions: each overlaps decoding and encoding on several threads


@dataclass(frozen=True, kw_only=True)
class RepartitionReport:
    """What a repartition did; with ``dry_run`` the ``_after`` numbers are 0.

    ``rewritten`` counts partition directories, ``kept`` those that an earlier run had finished at the target.
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


class Places:
    """A source and a target, and what each is told."""

    def __init__(self, source: str, target: str, options: Mapping[str, str], block_size: int | None) -> None:
        check_url(source)
        check_url(target)
        if url_scheme(target) not in ("", "file") and target.partition("://")[2].strip("/") == "":
            raise UsageError(target, "names no directory", f"write {url_scheme(target)}://HOST/PATH")
        check_apart(source, target)
        self.source, self.target, self.block_size = source, target, block_size
        if url_scheme(target) in ("", "file"):  # a worker may run elsewhere
            self.target = os.path.abspath(os.path.expanduser(local_path(target)))
        if url_scheme(source) in ("", "file"):
            self.source = os.path.abspath(os.path.expanduser(local_path(source)))
        self.source_options = _options_for(source, target, options)
        self.target_options = _options_for(target, source, options)
        if options and not self.source_options and not self.target_options:
            self.source_options = options  # a local source refuses them by name


def _options_for(url: str, other: str, options: Mapping[str, str]) -> Mapping[str, str]:
    """Return the options for the store of ``url``; between HDFS and another store, names with a dot are Hadoop's."""
    one, two = url_scheme(url), url_scheme(other)
    if one in ("", "file"):
        return {}
    if one == two or two in ("", "file") or "hdfs" not in (one, two):
        return options
    return {name: value for name, value in options.items() if ("." in name) == (one == "hdfs")}


def repartition_to(
    where: Places,
    how: RewriteOptions,
    wanted: Wanted,
    jobs: int,
    scheduler: str | None,
    dry_run: bool,
    on_event: OnEvent,
) -> RepartitionReport:
    """Rewrite one dataset into another, in which what an earlier run has finished is kept."""
    watch = Stopwatch()
    with ExitStack() as stack:
        target = open_target(where.target, where.target_options, where.block_size)
        stack.callback(target.close)
        source = open_source(where.source, where.source_options)
        stack.callback(source.close)
        files = sorted(list_source(source, on_event).files, key=lambda file: (parent(file.path), file.path))
        if not wanted.nothing:
            root = local_root(where.source) if wanted.looks else Path()
            dense = wanted.resolved([root / file.path for file in files])
            how = replace(how, dense=tuple((name, parse_dense(kind)) for name, kind in sorted(dense.items())))
        table = table_of(source, files, on_event) if files else None
        if table is not None and how.dense is None:
            how = replace(how, dense=table.dense)
        plan = _jobs(source, where, how, files, table)
        held, broken = with_retries(lambda: take_over(target), target.url, 2, on_event)
        keys = {job.directory: job.key for job in plan}
        kept = {record.directory: record.done for record in held if keys.get(record.directory) == record.key}
        todo = [job for job in plan if job.directory not in kept]
        done: dict[str, Done] = dict(kept)
        if not dry_run:
            client = None
            if scheduler is not None:
                from pqcache.store.repartition.dask import check_seen, connected, on_cluster

                client = stack.enter_context(connected(scheduler, todo, on_event))
            target.begin()
            if plan:
                own(target, plan[0].run)
            with _left_in_order(target, plan, done, True, on_event):
                for record in (*held, *broken):
                    if record.directory not in kept:
                        forget(target, record)
                if client is not None and target.scratch is not None:
                    check_seen(client, str(target.scratch))
            on_event(Started("rewrite", sum(job.size for job in plan)))
            on_event(Advanced("rewrite", sum(job.size for job in plan if job.directory in kept)))
            with _left_in_order(target, plan, done, client is None, on_event):
                if client is not None:
                    results = on_cluster(client, todo, on_event)
                else:
                    results = _in_this_process(todo, source, target, jobs, on_event)
                for job, result in results:
                    done[job.directory] = result
                    _tell(job, result, on_event)
                target.finish()
    return RepartitionReport(
        source=redact(source.url),
        target=target.url,
        snapshot=None,
        dry_run=dry_run,
        directories=len(plan),
        rewritten=len(todo),
        kept=len(kept),
        files_before=sum(len(job.files) for job in plan),
        files_after=0 if dry_run else sum(item.files[1] for item in done.values()),
        row_groups_before=0 if dry_run else sum(item.row_groups[0] for item in done.values()),
        row_groups_after=0 if dry_run else sum(item.row_groups[1] for item in done.values()),
        bytes_before=sum(job.size for job in plan),
        bytes_after=0 if dry_run else sum(item.bytes[1] for item in done.values()),
        rows=0 if dry_run else sum(item.rows for item in done.values()),
        seconds=watch.seconds,
    )


def _jobs(
    source: Source, where: Places, how: RewriteOptions, files: Sequence[SourceFile], table: Table | None
) -> list[PartitionJob]:
    """Return one job for each partition directory, in path order."""
    schema = table.schema.serialize().to_pybytes() if table is not None else b""
    int96 = table.int96 if table is not None else None
    groups = {d: tuple(group) for d, group in groupby(files, key=lambda file: parent(file.path))}
    above = {""}  # directories that others lie in
    for directory in groups:
        while directory := parent(directory):
            above.add(directory)
    run = os.urandom(8).hex()
    common = hashlib.sha256(schema).hexdigest()
    recipe = f"{how!r} blocks of {where.block_size} schema {common} int96 {int96} by {__version__}"
    return [
        PartitionJob(
            source=where.source,
            source_options=where.source_options,
            directory=directory,
            files=group,
            target=where.target,
            target_options=where.target_options,
            block_size=where.block_size,
            how=how,
            key=rewrite_key(source.url, directory, group, recipe),
            whole=directory not in above,
            version=__version__,
            run=run,
            schema=schema,
            int96=int96,
            decoded=sum(table.decoded[file] for file in group) if table is not None else 0,
        )
        for directory, group in groups.items()
    ]


def _in_this_process(
    todo: Sequence[PartitionJob], source: Source, target: Target, jobs: int, on_event: OnEvent
) -> Iterator[tuple[PartitionJob, Done]]:
    """Do the jobs on threads; yield each with what became of it, as they end."""
    turn = threading.Semaphore(_ENCODING_AT_ONCE)
    with spooled(target) as spool:
        pool = ThreadPoolExecutor(jobs)
        try:
            futures = {pool.submit(do_job, job, source, target, spool, on_event, turn): job for job in todo}
            failed: BaseException | None = None
            for future in as_completed(futures):
                if future.cancelled():
                    continue
                if (error := future.exception()) is None:
                    yield futures[future], future.result()
                elif failed is None:  # what has begun is finished, and kept for the next run
                    failed = error
                    for other in futures:
                        other.cancel()
            if failed is not None:
                raise failed
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # Ctrl-C does not wait


@contextmanager
def _left_in_order(
    target: Target, plan: Sequence[PartitionJob], done: Mapping[str, Done], alone: bool, on_event: OnEvent
) -> Iterator[None]:
    """After a failure keep for the next run what is finished, and say so; keep nothing if nothing is.

    After an interruption, or not ``alone``, something may still be published.
    """
    try:
        yield
    except BaseException as error:
        if not done and alone and (isinstance(error, Exception) or target.scratch is not None):
            target.abandon()
        else:
            number = f"{len(done):,} of {format_count(len(plan), 'partition directory', 'partition directories')}"
            on_event(Warned(f"{target.url}: {number} are finished; the same command goes on from there"))
        raise


def _tell(job: PartitionJob, done: Done, on_event: OnEvent) -> None:
    for warning in done.warnings:
        on_event(Warned(f"{job.directory}: {warning}" if job.directory else warning))
    on_event(
        Rewrote(
            directory=job.directory,
            files_before=done.files[0],
            files_after=done.files[1],
            row_groups=done.row_groups[1],
            bytes=done.bytes[1],
        )
    )
