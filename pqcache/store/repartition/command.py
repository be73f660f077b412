"""Repartition: row groups that fill the block and never exceed it, one partition directory at a time."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

from pqcache.errors import DamagedError, UsageError, disk_errors
from pqcache.events import OnEvent, ignore
from pqcache.parquet.rewrite.options import RewriteOptions, parse_compression
from pqcache.store.cache import CacheDirectory, cache_at
from pqcache.store.config import read_config, updated, write_config
from pqcache.store.manifest import Manifest
from pqcache.store.repartition.dense_columns import Wanted, local_root
from pqcache.store.repartition.target_record import check_apart
from pqcache.store.repartition.to_target import Places, RepartitionReport, repartition_to
from pqcache.store.snapshot import Snapshot
from pqcache.store.sync.apply import Job, build_snapshot
from pqcache.store.sync.command import JOBS, finish, make_report
from pqcache.store.sync.plan import Recipe, plan_repartition, recipe_of
from pqcache.store.sync.subset import Subset
from pqcache.store.sync.table_schema import table_in
from pqcache.store.urls import redact
from pqcache.system.stopwatch import Stopwatch
from pqcache.units import parse_size

ROW_GROUP_SIZE = 128 << 20
BLOCK_SIZE = 128 << 20


def repartition(
    source: str | os.PathLike[str],
    dest: str | os.PathLike[str] | None = None,
    *,
    row_group_size: int | str | None = None,
    compression: str | None = None,
    compat: bool | None = None,
    keep_int96: bool | None = None,
    dense: Sequence[str] | None = None,
    narrow: bool = False,
    shuffle: int | None = None,
    align: str | None = None,
    block_size: int | str | None = None,
    options: Mapping[str, str] | None = None,
    scheduler: str | None = None,
    jobs: int = JOBS,
    wait: float = 0.0,
    dry_run: bool = False,
    on_event: OnEvent = ignore,
) -> RepartitionReport:
    """Rewrite a dataset so that its row groups fill ``row_group_size`` bytes on disk and never exceed it.

    Without ``dest``, ``source`` is a cache: it gets a new snapshot, and its next syncs rewrite new partitions the
    same way; what is not given is what the cache remembers from before. With ``dest``, ``source`` is a cache, a
    directory or a URL, and ``dest`` a new or empty directory (a path, ``hdfs://`` or ``s3://``). A local one appears
    when it is complete, elsewhere each partition does. A run that was stopped goes on where it ended when it is
    started again. Rows, their order within a partition, schema and metadata stay as they are unless an option says
    otherwise; files that already are as asked for are linked or copied.

    Args:
        source: a cache, a directory or a URL.
        dest: where to, if not in place.
        row_group_size: the most compressed bytes of a row group, or ``"128MB"``, which it is at first.
        compression: ``zstd``, ``zstd:LEVEL``, ``lz4``, ``snappy``, ``none``, or ``keep`` for each column's own; at
            first lz4 for what is rewritten.
        compat: plain and dictionary encodings only, and snappy unless ``compression`` says otherwise.
        keep_int96: INT96 time stamps stay INT96.
        dense: list columns of one length to store as fixed-length bytes; none of them if empty.
        narrow: store integers of dense columns in the smallest type that holds all of the table.
        shuffle: a seed to permute the rows of each partition with.
        align: ``"block"`` puts no row group across a boundary of ``block_size`` bytes.
        block_size: bytes of a block on HDFS, a multiple of 512; without ``align`` the cluster's own by default.
        options: the stores' options, such as ``{"endpoint": "http://..."}``.
        scheduler: address of a Dask scheduler whose workers do the work, like ``tcp://host:8786``.
        jobs: partitions worked on at once; on a cluster its workers' threads decide.
        wait: seconds to wait for another run on the cache to end.
        dry_run: work out the report and change nothing.
        on_event: called with what happens, from several threads.

    >>> report = repartition("cache/shop", row_group_size=16 << 10, compression="zstd:3")
    >>> report.rows, report.row_groups_before > report.row_groups_after
    (600, True)
    >>> repartition("lake/shop", "shop-16kb", row_group_size=16 << 10).snapshot is None
    True

    Raises UsageError, SourceError, ParquetError or CacheError; source and cache are never left half done.
    """
    row_group_size = None if row_group_size is None else parse_size(row_group_size)
    block_size = None if block_size is None else parse_size(block_size)
    if align not in (None, "block"):
        raise UsageError(f"--align {align}", "the only choice is block")
    if block_size is not None and (block_size < 512 or block_size % 512):
        raise UsageError(f"--block-size {block_size}", "HDFS takes multiples of 512 bytes, like 128MB")
    if dest is None and (align or block_size or scheduler):
        raise UsageError(
            "", "--align, --block-size and --scheduler are for writing to DEST", "a cache lies on a local disk"
        )
    blocks = block_size or (BLOCK_SIZE if align else None)
    text = os.fspath(source)
    cache = cache_at(text)
    codec, level = (None, None) if compression is None else parse_compression(compression)
    how = RewriteOptions(
        row_group_size=row_group_size or ROW_GROUP_SIZE,
        compression=codec,
        compression_level=level,
        compat=compat or False,
        keep_int96=keep_int96 or False,
        dense=None,
        shuffle=shuffle,
        block_size=blocks if align else None,
    )
    if isinstance(dense, str):
        raise UsageError(f"dense={dense!r}", f"give a list of names, like [{dense!r}]")
    wanted = Wanted(dense, narrow)
    if dest is None:
        if cache is None:
            raise UsageError(
                f"{redact(text)}",
                f"not a pqcache, so it needs a directory to write to: pqcache repartition {redact(text)} DEST",
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
        if cache is not None:
            check_apart(str(cache.path), os.fspath(dest))
            snapshot, lease = cache.lease()
            stack.enter_context(lease)
            text = str(snapshot.path)
        if wanted.looks:
            local_root(text)  # refused before anything is contacted
        where = Places(text, os.fspath(dest), options or {}, blocks)
        return repartition_to(where, how, wanted, jobs, scheduler, dry_run, on_event)


def _is_done(snapshot: Snapshot, manifest: Manifest, recipe: Recipe) -> bool:
    """Return whether all files are known to have been made by ``recipe``, and to have one schema."""
    if any(entry.recipe != recipe.text for entry in manifest.files):
        return False
    with suppress(DamagedError):
        return snapshot.whole_index().uniform
    return False


def _repartition_cache(
    cache: CacheDirectory,
    given: Mapping[str, Any],
    wanted: Wanted,
    jobs: int,
    wait: float,
    dry_run: bool,
    on_event: OnEvent,
) -> RepartitionReport:
    watch = Stopwatch()
    with disk_errors(cache.path), cache.lock(wait):
        config = updated(read_config(cache.path), given)
        if config.row_group_size is None:
            config = replace(config, row_group_size=ROW_GROUP_SIZE)
        current = cache.snapshot()
        before = current.manifest()
        if not wanted.nothing:
            config = replace(config, dense=wanted.resolved([current.path / entry.path for entry in before.files]))
        how = config.rewrite()
        assert how is not None
        fetched = recipe_of(before.files[0].recipe).fetch if before.files else ""
        recipe = Recipe(fetched, how.recipe)
        table = None if _is_done(current, before, recipe) else table_in(current.path, before.files, how.keep_int96)
        plan = plan_repartition(before.files, recipe, table.others if table is not None else frozenset())
        published, after = None, before
        if not dry_run:
            if not plan.nothing_to_do:
                job = Job(
                    cache=cache,
                    previous=current,
                    plan=plan,
                    source=None,
                    source_url=before.source,
                    where=before.where,
                    subset=Subset(),
                    rewrite=how,
                    jobs=jobs,
                    retries=0,
                    checksum=False,
                    on_event=on_event,
                    keys=config.keys,
                    shard=before.shard,
                    listing=before.listing,
                    table=table,
                )
                published, after, plan = build_snapshot(job)
            write_config(cache.path, config)
            report = make_report(cache, config, plan, published or current, after.totals, published, 0, dry_run, watch)
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
        kept=0,
        files_before=len(before.files),
        files_after=len(after.files),
        row_groups_before=before.row_groups,
        row_groups_after=after.row_groups,
        bytes_before=before.size,
        bytes_after=after.size,
        rows=before.rows,
        seconds=watch.seconds,
    )
