"""Repartition: rewrites partition directories into row groups that fill their size and never exceed it."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from pqcache.errors import UsageError, disk_errors
from pqcache.events import OnEvent, ignore
from pqcache.options import COMMANDS, RepartitionArguments, Rewriting, Unpack, documented, options_of, parsed
from pqcache.parquet.rewrite.recipe import RewriteOptions, parse_compression
from pqcache.store.cache_directory import CacheDirectory, cache_at, check_outside_caches, lease_at
from pqcache.store.config import read_config, updated, write_config
from pqcache.store.history import RunRecord, recorded_run
from pqcache.store.layout import CONFIG
from pqcache.store.manifest import Manifest
from pqcache.store.manifest_file import schema_of_table
from pqcache.store.repartition.dense_proposals import DenseRequest, local_root
from pqcache.store.repartition.partition_job import check_apart, make_endpoints
from pqcache.store.repartition.to_target import RepartitionReport, repartition_to
from pqcache.store.snapshot import Snapshot, check_not_held
from pqcache.store.sync.build_snapshot import build_snapshot
from pqcache.store.sync.cache_run import BandwidthLimit, ByteCounter, CacheRun, RunOptions, RunResult, finish_run
from pqcache.store.sync.plan import Recipe, plan_repartition, recipe_of
from pqcache.store.sync.safety_checks import check_space
from pqcache.store.sync.table_schema import local_table_schema
from pqcache.store.tables.data_files import FileRules
from pqcache.store.urls import is_local, local_path, quoted, redact
from pqcache.system.disk import tree_size
from pqcache.units import BLOCK_SIZE

log = logging.getLogger("pqcache.repartition")


_OPTIONS = COMMANDS["repartition"]
_OF_ROW_GROUPS = ("row_group_size", *options_of(Rewriting))
_OF_RUN = ("jobs", "wait", "dry_run")


@documented(RepartitionArguments, *_OPTIONS)
def repartition(
    source: str | os.PathLike[str],
    dest: str | os.PathLike[str] | None = None,
    *,
    on_event: OnEvent = ignore,
    **given: Unpack[RepartitionArguments],
) -> RepartitionReport:
    """Rewrite a dataset so that its row groups fill ``row_group_size`` bytes on disk and never exceed it.

    Without ``dest``, ``source`` is a cache: it gets a new snapshot, and its next syncs rewrite new partitions the
    same way; options that are None keep the values that the cache remembers. With ``dest``, ``source`` is a cache, a
    directory or a URL, and ``dest`` a new or empty directory (a path, ``hdfs://`` or ``s3://``). A local target appears
    when it is complete; on other stores each partition appears when it is complete. Start a run that was stopped again
    to continue it. Rows, their order within a partition, schema and metadata are kept unless an option changes them;
    files that already match the options are linked or copied. Sizes, durations and counts are numbers (bytes, seconds)
    or text, like ``"128MB"``, ``"10m"`` and ``"8"``.

    Args:
        source: a cache, a directory or a URL.
        dest: the target; None to repartition a cache in place.
        on_event: called with what happens, from several threads.
        given: the options, as the table in pqcache.options has them.

    >>> report = repartition("cache/shop", row_group_size=16 << 10, compression="zstd:3")
    >>> report.rows, report.row_groups_before > report.row_groups_after
    (600, True)
    >>> repartition("lake/shop", "shop-16kb", row_group_size=16 << 10).snapshot is None
    True

    Raises UsageError, SourceError, ParquetError or CacheError; then source and cache are unchanged.
    """
    cache, text = cache_at(os.fspath(source)), os.fspath(source)
    options = parsed(given, *_OPTIONS)
    wanted = DenseRequest(options.get("dense"), options.get("narrow", False))
    changes = {name: options[name] for name in _OF_ROW_GROUPS if name in options}
    align, scheduler, bwlimit = (options.get(name) for name in ("align", "scheduler", "bwlimit"))
    blocks = _block_size(align, options.get("block_size"))
    rewrite = _rewrite_options(changes, blocks if align else None)
    counter = ByteCounter(on_event, None if bwlimit is None else BandwidthLimit(bwlimit))
    run = RunOptions(**{name: options[name] for name in _OF_RUN if name in options}, on_event=counter)
    if dest is None:
        for name in ("align", "block_size", "scheduler", "bwlimit", "as_files", "all_files"):
            if options.get(name):
                flag = f"--{name.replace('_', '-')}"
                raise UsageError(flag, "is only for writing to DEST", "a cache lies on a local disk")
        if cache is None:
            raise UsageError(
                redact(text),
                "not a pqcache, so it needs a directory to write to",
                f"pqcache repartition {quoted(redact(text))} DEST",
            )
        return _repartition_cache(cache, changes, wanted, run)
    if is_local(os.fspath(dest)):
        check_outside_caches(Path(local_path(os.fspath(dest))))
    if scheduler is not None and bwlimit is not None:
        raise UsageError("--bwlimit", "excludes --scheduler, whose workers fetch on other machines", "give one of them")
    with ExitStack() as stack:
        if cache is not None:
            check_apart(str(cache.path), os.fspath(dest))
            text = f"{cache.path}/current"
            cache.snapshot()  # or there is nothing yet
        leased = lease_at(text)
        if leased is not None:  # the same snapshot for all workers
            snapshot, below, lease = leased
            stack.enter_context(lease)
            text = str(snapshot.path / below)
        if wanted.reads_files:
            local_root(text)  # refused before anything is contacted
        rules = FileRules(as_files=options.get("as_files", False), all_files=options.get("all_files", False))
        endpoints = replace(make_endpoints(text, os.fspath(dest), options.get("options", {}), blocks), rules=rules)
        return repartition_to(endpoints, rewrite, wanted, scheduler, run)


def _block_size(align: str | None, size: int | None) -> int | None:
    """The block size, None for the store's default."""
    if size is not None and (size < 512 or size % 512):
        raise UsageError(f"--block-size {size}", "HDFS takes multiples of 512 bytes", "write it like 128MB")
    return size or (BLOCK_SIZE if align else None)


def _rewrite_options(changes: Mapping[str, Any], align_to: int | None) -> RewriteOptions:
    changes = {name: value for name, value in changes.items() if value != ""}
    compression = changes.get("compression")
    codec, level = (None, None) if compression is None else parse_compression(compression)
    return RewriteOptions(
        row_group_size=changes.get("row_group_size", BLOCK_SIZE),
        compression=codec,
        compression_level=level,
        compat=changes.get("compat", False),
        shuffle=changes.get("shuffle"),
        block_size=align_to,
    )


def _repartition_cache(
    cache: CacheDirectory, changes: Mapping[str, Any], dense: DenseRequest, options: RunOptions
) -> RepartitionReport:
    with disk_errors(cache.path), ExitStack() as stack:
        record: RunRecord | None = None
        if options.dry_run:
            stack.enter_context(cache.lock(options.wait, options.on_event))
        else:
            record = stack.enter_context(recorded_run(cache, "repartition", options.wait, options.on_event))
        check_not_held(cache.path)
        remembered = read_config(cache.path)
        config = updated(remembered, changes)
        if config.shuffle is None and remembered.shuffle is not None:
            reason = "the cache does not know the order of the rows before the shuffle"
            advice = f"delete shuffle in {cache.path / CONFIG}, and 'pqcache sync' fetches the files again"
            raise UsageError("--shuffle ''", reason, advice)
        if config.row_group_size is None:
            config = replace(config, row_group_size=BLOCK_SIZE)
        current = cache.snapshot()
        before = current.manifest()
        if not dense.is_empty:
            config = replace(config, dense=dense.resolve([current.path / entry.path for entry in before.files]))
        run = CacheRun(
            command="repartition", cache=cache, config=config, current=current, options=options, record=record
        )
        result = _repartition_snapshot(run, current, before)
        if not options.dry_run:
            write_config(cache.path, config)
        finish_run(run, result)
    return _report(run, result, before)


def _repartition_snapshot(run: CacheRun, current: Snapshot, before: Manifest) -> RunResult:
    """Rewrite partitions that don't match the options, and publish them, unless it is a dry run."""
    rewrite = run.config.rewrite()
    assert rewrite is not None
    recipe = Recipe(recipe_of(before.files[0].recipe).subset if before.files else "", rewrite.recipe)
    table = None
    if any(entry.recipe != recipe.text for entry in before.files):
        of_table = schema_of_table(before.table)
        table = local_table_schema(current.path, before.files, of_table)
    plan = plan_repartition(before.files, recipe, table.others if table is not None else frozenset())
    if run.options.dry_run and not plan.nothing_to_do:
        check_space(run, plan, tree_size(run.cache.tmp_dir))
    if run.options.dry_run or plan.nothing_to_do:
        return RunResult(plan=plan, published=None, totals=before.totals)
    return build_snapshot(run, plan, before, held=before.files, table=table)


def _report(run: CacheRun, result: RunResult, before: Manifest) -> RepartitionReport:
    assert run.current is not None
    dry_run, after = run.options.dry_run, result.totals
    return RepartitionReport(
        source=str(run.cache.path),
        target=str(run.cache.path),
        snapshot=(result.published or run.current).id,
        dry_run=dry_run,
        directories=len(result.plan.directories),
        rewritten=result.plan.rewrites,
        kept=0,
        files_before=len(before.files),
        files_after=0 if dry_run else after.files,
        row_groups_before=before.row_groups,
        row_groups_after=0 if dry_run else after.row_groups,
        bytes_before=before.size,
        bytes_after=0 if dry_run else after.size,
        rows=before.rows,
        seconds=run.options.watch.seconds,
    )
