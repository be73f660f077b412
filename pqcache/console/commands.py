"""The commands. Each calls the library function of its name, and prints the report that it returns."""

from __future__ import annotations

from pqcache.console import examples, fill_options, parsing, source_options
from pqcache.console import file_options as take
from pqcache.console import options as opt
from pqcache.console import rows_options as batch_rows
from pqcache.console import run_options as run
from pqcache.console.app import app, print_report
from pqcache.console.demo import command as demo_command
from pqcache.console.help import Command
from pqcache.units import parse_size

__all__ = ["app", "demo_command"]  # the app has that command and those below


@app.command(cls=Command, epilog=examples.SYNC)
def sync(
    source: opt.OptionalSource = None,
    cache: opt.OptionalCache = None,
    all_tables: run.All = False,
    where: opt.Where = None,
    columns: opt.Columns = None,
    newest: take.Newest = None,
    shard: opt.Shard = None,
    marker: opt.Marker = None,
    settle: opt.Settle = None,
    partition_types: take.PartitionTypes = None,
    as_files: take.AsFiles = None,
    all_files: take.AllFiles = None,
    version: take.Version = None,
    as_of: take.AsOf = None,
    row_group_size: opt.SyncRowGroupSize = None,
    keep: opt.Keep = None,
    max_delete: opt.MaxDelete = None,
    force: opt.Force = False,
    checksum: opt.Checksum = None,
    compare: opt.Compare = "identity",
    fill: fill_options.Fill = False,
    new_source: source_options.NewSource = False,
    skip_bad: source_options.SkipBad = None,
    time_units: source_options.TimeUnits = None,
    ignore_case: source_options.IgnoreCase = None,
    option: opt.Options = None,
    hdfs_driver: opt.HdfsDriver = None,
    retries: opt.Retries = None,
    retry_for: opt.RetryFor = None,
    timeout: opt.Timeout = 30.0,
    bwlimit: run.BandwidthLimit = None,
    jobs: opt.Jobs = 8,
    wait: opt.Wait = 0.0,
    dry_run: opt.DryRun = False,
    on_success: run.OnSuccess = None,
    on_failure: run.OnFailure = None,
    metrics: run.Metrics = None,
    verbose: run.Verbose = False,
    json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> None:
    """Update a cache from its source; only new and changed files are fetched.

    Options marked * are remembered: 'pqcache sync CACHE' alone repeats them.
    """
    from pqcache.console import sync_runner
    from pqcache.console.after_sync import AfterSync

    remembered = {
        "where": where,
        "columns": parsing.column_names(columns),
        "row_group_size": parsing.row_group_bytes("--row-group-size", row_group_size),
        "newest": newest,
        "shard": shard,
        "keep": keep,
        "marker": marker,
        "settle": settle,
        "partition_types": parsing.partition_types(partition_types),
        "max_delete": max_delete,
        "hdfs_driver": hdfs_driver,
        "checksum": checksum,
        "as_files": as_files,
        "all_files": all_files,
        "version": version,
        "as_of": as_of,
        "skip_bad": skip_bad,
        "time_units": parsing.time_units(time_units),
        "ignore_case": ignore_case,
        "options": parsing.store_options(option) or None,
    }
    once = {
        "force": force,
        "new_source": new_source,
        "fill": fill,
        "compare": compare,
        "jobs": jobs,
        "retries": retries,
        "retry_for": retry_for,
        "timeout": timeout,
        "bwlimit": bwlimit,
        "wait": wait,
        "dry_run": dry_run,
    }
    output = sync_runner.SyncOutput(json, quiet, verbose)
    after = AfterSync(on_success=on_success, on_failure=on_failure, metrics=metrics)
    if all_tables:
        sync_runner.check_for_all(cache, remembered)
        return sync_runner.run_all(source, once, output, after)
    return sync_runner.run_one(parsing.required("SOURCE", source), cache, {**remembered, **once}, output, after)


@app.command(cls=Command, epilog=examples.REPARTITION)
def repartition(
    source: opt.RepartitionSource,
    dest: opt.Dest = None,
    row_group_size: opt.RowGroupSize = None,
    compression: opt.Compression = None,
    compat: opt.Compat = None,
    keep_int96: opt.KeepInt96 = None,
    dense: opt.Dense = None,
    narrow: opt.Narrow = False,
    shuffle: opt.Shuffle = None,
    align: opt.Align = None,
    block_size: opt.BlockSize = None,
    as_files: take.OnceAsFiles = False,
    all_files: take.OnceAllFiles = False,
    option: opt.Options = None,
    scheduler: opt.Scheduler = None,
    jobs: opt.PartitionJobs = 8,
    wait: opt.Wait = 0.0,
    bwlimit: run.BandwidthLimit = None,
    dry_run: opt.DryRun = False,
    json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> None:
    """Rewrite row groups to a size on disk that they fill and never exceed.

    A cache gets a new snapshot. It remembers the options marked *, and later syncs apply them to new files.
    """
    import pqcache
    from pqcache.console import progress, terminal

    if dense == ["auto"]:
        from pqcache.console.proposals_text import print_proposals

        with progress.reporter(json, quiet) as on_event:
            proposals = pqcache.dense_proposals(
                source,
                options=parsing.store_options(option),
                as_files=as_files,
                all_files=all_files,
                on_event=on_event,
            )
        found = {"target": source, "columns": [proposal.to_dict() for proposal in proposals]}
        print_report(found, json, quiet, lambda: print_proposals(source, dest, proposals))
        return
    with progress.reporter(json, quiet, dest or source) as on_event:
        report = pqcache.repartition(
            source,
            dest,
            row_group_size=parsing.row_group_bytes("--row-group-size", row_group_size),
            compression=compression,
            compat=compat,
            keep_int96=keep_int96,
            dense=parsing.dense_columns(dense),
            narrow=narrow,
            shuffle=shuffle,
            align=align,
            block_size=None if block_size is None else parse_size(block_size),
            options=parsing.store_options(option),
            as_files=as_files,
            all_files=all_files,
            scheduler=scheduler,
            jobs=jobs,
            wait=wait,
            bwlimit=bwlimit,
            dry_run=dry_run,
            on_event=on_event,
        )
    print_report(report.to_dict(), json, quiet, lambda: terminal.print_repartition(report))


@app.command(cls=Command, epilog=examples.INSPECT)
def inspect(
    target: opt.Target,
    block_size: opt.InspectBlockSize = None,
    partitions: opt.AllPartitions = False,
    columns: opt.OnlyColumns = False,
    schema: opt.OnlySchema = False,
    files: opt.OnlyFiles = False,
    row_groups: opt.OnlyRowGroups = False,
    sample: opt.Sample = None,
    diff: opt.Diff = None,
    html: opt.Html = None,
    as_files: take.OnceAsFiles = False,
    all_files: take.OnceAllFiles = False,
    option: opt.Options = None,
    jobs: opt.FooterJobs = 16,
    json: opt.InspectJson = False,
) -> None:
    """Show the partitions, row-group sizes, columns and compression of a dataset.

    For a cache only its index is read, for anything else only the footers.
    """
    import pqcache
    from pqcache.benchmark.forecast import forecast
    from pqcache.console import inspect_text, progress
    from pqcache.store.inspect import listings
    from pqcache.store.tables.data_files import FileRules

    limit = parsing.row_group_bytes("--block-size", block_size)
    view = parsing.chosen_view(
        {"schema": schema, "files": files, "row-groups": row_groups, "sample": sample, "diff": diff}
    )
    if diff is not None:
        difference = listings.difference(target, *diff)
        return print_report(difference.to_dict(), json, False, lambda: inspect_text.print_difference(difference))
    with progress.reporter(json_lines=False, quiet=json) as on_event:
        if view is not None:
            rules = FileRules(as_files=as_files, all_files=all_files)
            looked = listings.open_inspected_dataset(target, parsing.store_options(option), jobs, on_event, rules)
        else:
            found = pqcache.inspect(
                target,
                options=parsing.store_options(option),
                block_size=limit,
                as_files=as_files,
                all_files=all_files,
                jobs=jobs,
                on_event=on_event,
            )
            training = forecast(target, rules=FileRules(as_files=as_files, all_files=all_files))
    if view is not None:
        return inspect_text.print_items(view, listings.items_of(view, looked, sample or 0, target), limit, json)
    if html is not None:
        return inspect_text.write_page(found, training, html)
    if columns and not json:
        return inspect_text.print_columns(found, None)
    summary = {**found.to_dict(), "training": None if training is None else training.to_dict()}
    return print_report(summary, json, False, lambda: inspect_text.print_inspection(found, training, partitions))


@app.command(cls=Command, epilog=examples.ROWS)
def rows(
    target: opt.LocalTarget,
    state: batch_rows.State,
    batch: batch_rows.BatchNumber,
    epoch: batch_rows.Epoch = None,
    filters: opt.Filters = None,
    split: batch_rows.SplitText = None,
    weights: batch_rows.Weights = None,
    balance: batch_rows.Balance = None,
    sample_share: batch_rows.SampleShare = None,
    limit: batch_rows.Limit = None,
    pack: batch_rows.PackText = None,
    sample: batch_rows.Values = False,
    columns: batch_rows.ValueColumns = None,
    json: batch_rows.RowsJson = False,
) -> None:
    """Show which rows a batch of a training had: file, row group and row.

    For the batch whose loss exploded. It follows from a state that the same training saved, at whatever batch.
    """
    import pqcache
    from pqcache.console.rows_text import print_rows

    names = parsing.column_names(columns)
    found = pqcache.rows(
        target,
        state,
        batch,
        epoch=epoch,
        filters=filters,
        split=parsing.split_of(split),
        sample=sample_share,
        limit=limit,
        weights=weights,
        balance=balance,
        pack=parsing.pack_of(pack),
    )
    print_rows(found, target, names, sample or names is not None, json)


@app.command(cls=Command, epilog=examples.VERIFY)
def verify(
    cache: opt.CacheArgument,
    deep: opt.Deep = False,
    source: opt.CompareSource = False,
    compare: opt.VerifyCompare = "identity",
    engine: opt.Engine = None,
    repair: opt.Repair = False,
    option: opt.Options = None,
    jobs: opt.VerifyProcesses = None,
    wait: opt.Wait = 0.0,
    bwlimit: run.BandwidthLimit = None,
    json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> None:
    """Check the current snapshot of a cache for damage, and repair it.

    Without options: every file exists with its recorded size, and footers agree with manifest and index.
    """
    import pqcache
    from pqcache.console import progress
    from pqcache.console.verify_text import print_verify

    with progress.reporter(json, quiet, cache) as on_event:
        report = pqcache.verify(
            cache,
            deep=deep,
            source=source,
            compare=compare,
            engine=engine,
            repair=repair,
            options=parsing.store_options(option),
            jobs=jobs,
            wait=wait,
            bwlimit=bwlimit,
            on_event=on_event,
        )
    print_report(report.to_dict(), json, quiet, lambda: print_verify(report))
    report.raise_if_not_ok()


@app.command(cls=Command, epilog=examples.INDEX)
def index(
    cache: opt.CacheArgument,
    key: opt.Key = None,
    drop: opt.Drop = None,
    jobs: opt.IndexThreads = None,
    wait: opt.Wait = 0.0,
    json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> None:
    """Build key indexes, which find the rows of a key without a scan.

    Without options: list them. Each later snapshot gets them too, updated with what changed.
    """
    import pqcache
    from pqcache.console import progress, terminal

    with progress.reporter(json, quiet, cache) as on_event:
        report = pqcache.index(cache, keys=key or (), drop=drop or (), jobs=jobs, wait=wait, on_event=on_event)
    print_report(report.to_dict(), json, quiet, lambda: terminal.print_index(report))


@app.command(cls=Command, epilog=examples.BENCH)
def bench(
    target: opt.LocalTarget,
    columns: opt.BenchColumns = None,
    filters: opt.Filters = None,
    batch_size: opt.BatchSize = 256,
    memory: opt.Memory = "2GB",
    workers: opt.Workers = None,
    as_files: take.OnceAsFiles = False,
    all_files: take.OnceAllFiles = False,
    seconds: opt.Seconds = 2.0,
    json: opt.BenchJson = False,
    quiet: opt.Quiet = False,
) -> None:
    """Measure how fast this machine reads a dataset, and recommend training settings."""
    from pqcache.benchmark import command
    from pqcache.console import progress
    from pqcache.console.bench_text import print_bench

    with progress.reporter(json_lines=False, quiet=quiet or json) as on_event:
        report = command.bench(
            target,
            columns=parsing.column_names(columns),
            filters=filters,
            batch_size=batch_size,
            memory=memory,
            workers=parsing.worker_counts(workers),
            as_files=as_files,
            all_files=all_files,
            seconds=seconds,
            on_event=on_event,
        )
    print_report(report.to_dict(), json, quiet, lambda: print_bench(report))


from pqcache.console import help_command, serve_command, snapshot_commands  # noqa: E402, F401, I001  in the order of the help
from pqcache.console import status_command, table_commands, upkeep_commands  # noqa: E402, F401
