"""The commands, each named like the library function it calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer

from pqcache.console import options as opt
from pqcache.console.help import Command, Group, examples
from pqcache.errors import UsageError
from pqcache.units import parse_duration, parse_size

app = typer.Typer(
    name="pqcache",
    cls=Group,
    epilog=examples(
        (
            "Copy a table, and refresh it later",
            "pqcache sync hdfs://namenode:8020/warehouse/shop cache/shop\npqcache sync cache/shop",
        ),
        (
            "Cut it for training, and look at it",
            "pqcache repartition cache/shop --row-group-size 128MB\npqcache inspect cache/shop",
        ),
        ("More about a command", "pqcache sync --help\nman pqcache-sync"),
    ),
    invoke_without_command=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,
)


def _size(text: str) -> int:
    size = parse_size(text)
    if size < 1:
        raise UsageError("", f"{text!r} is too small for a row group")
    return size


@app.command(
    cls=Command,
    epilog=examples(
        (
            "The first run, with options that are remembered",
            """pqcache sync s3://lake/warehouse/shop cache/shop \\
    --where "dt >= '2026-11-01'" --row-group-size 128MB""",
        ),
        ("Every later run, such as every night", "pqcache sync cache/shop"),
        ("What would it do?", "pqcache sync cache/shop --dry-run"),
    ),
)
def sync(
    source: opt.Source,
    cache: opt.OptionalCache = None,
    where: opt.Where = None,
    columns: opt.Columns = None,
    shard: opt.Shard = None,
    marker: opt.Marker = None,
    settle: opt.Settle = None,
    row_group_size: opt.CutAs = None,
    keep: opt.Keep = None,
    max_delete: opt.MaxDelete = None,
    force: opt.Force = False,
    checksum: opt.Checksum = None,
    option: opt.Options = None,
    hdfs_driver: opt.HdfsDriver = None,
    retries: opt.Retries = 4,
    timeout: opt.Timeout = 30.0,
    jobs: opt.Jobs = 8,
    wait: opt.Wait = 0.0,
    dry_run: opt.DryRun = False,
    json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> None:
    """Bring a cache up to date with its source, moving only what changed.

    Options marked * are remembered, so that 'pqcache sync CACHE' alone repeats them.
    """
    import pqcache
    from pqcache.console import terminal

    with terminal.reporter(json, quiet) as on_event:
        report = pqcache.sync(
            source,
            cache,
            where=where,
            columns=_names(columns),
            row_group_size=None if row_group_size is None else _size(row_group_size),
            options=_options(option),
            shard=shard,
            keep=keep,
            marker=marker,
            settle=None if settle is None else parse_duration(settle),
            max_delete=max_delete,
            force=force,
            hdfs_driver=hdfs_driver,
            checksum=checksum,
            jobs=jobs,
            retries=retries,
            timeout=timeout,
            wait=wait,
            dry_run=dry_run,
            on_event=on_event,
        )
    _show(report.to_dict(), json, quiet, lambda: terminal.print_sync(report))


@app.command(
    cls=Command,
    epilog=examples(
        ("A cache, in place of its current snapshot", "pqcache repartition cache/shop --row-group-size 64MB"),
        (
            "A table on HDFS, to a local directory",
            "pqcache repartition hdfs://namenode:8020/warehouse/shop shop-128mb",
        ),
        (
            "Token windows that are read fast, in an order that mixes well",
            "pqcache repartition cache/text --dense tokens --narrow --shuffle 7",
        ),
        (
            "On HDFS, with a Dask cluster, so that every row group is in one block",
            """pqcache repartition hdfs://namenode:8020/warehouse/shop \\
    hdfs://namenode:8020/warehouse/shop-aligned \\
    --align block --scheduler tcp://scheduler:8786""",
        ),
    ),
)
def repartition(
    source: opt.From,
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
    option: opt.Options = None,
    scheduler: opt.Scheduler = None,
    jobs: opt.PartitionJobs = 8,
    wait: opt.Wait = 0.0,
    dry_run: opt.DryRun = False,
    json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> None:
    """Rewrite row groups so that they fill a size on disk and never exceed it.

    A cache gets a new snapshot, and remembers the options marked *: later syncs rewrite what is new the same way.
    """
    import pqcache
    from pqcache.console import terminal

    if dense == ["auto"]:
        with terminal.reporter(json, quiet) as on_event:
            proposals = pqcache.dense_proposals(source, options=_options(option), on_event=on_event)
        found = {"target": source, "columns": [proposal.to_dict() for proposal in proposals]}
        _show(found, json, quiet, lambda: terminal.print_proposals(source, dest, proposals))
        return
    with terminal.reporter(json, quiet) as on_event:
        report = pqcache.repartition(
            source,
            dest,
            row_group_size=None if row_group_size is None else _size(row_group_size),
            compression=compression,
            compat=compat,
            keep_int96=keep_int96,
            dense=_dense(dense),
            narrow=narrow,
            shuffle=shuffle,
            align=align,
            block_size=None if block_size is None else parse_size(block_size),
            options=_options(option),
            scheduler=scheduler,
            jobs=jobs,
            wait=wait,
            dry_run=dry_run,
            on_event=on_event,
        )
    _show(report.to_dict(), json, quiet, lambda: terminal.print_repartition(report))


@app.command(
    cls=Command,
    epilog=examples(
        ("Does the table on HDFS fit its blocks?", "pqcache inspect hdfs://namenode:8020/warehouse/shop"),
        ("The first two rows", "pqcache inspect cache/shop --sample 2"),
        (
            "Rows per partition, for another program",
            "pqcache inspect cache/shop --json | jq '.partitions[] | {path, rows}'",
        ),
    ),
)
def inspect(
    target: opt.Target,
    block_size: opt.MeasuredAgainst = None,
    partitions: opt.AllPartitions = False,
    columns: opt.OnlyColumns = False,
    schema: opt.OnlySchema = False,
    files: opt.OnlyFiles = False,
    row_groups: opt.OnlyRowGroups = False,
    sample: opt.Sample = None,
    diff: opt.Diff = None,
    html: opt.Html = None,
    option: opt.Options = None,
    jobs: opt.FooterJobs = 16,
    json: opt.OneJson = False,
) -> None:
    """Show what is in a dataset: partitions, row-group sizes, columns, compression.

    A cache answers from its index. Of anything else only the footers are read.
    """
    import pqcache
    from pqcache.benchmark.forecast import forecast
    from pqcache.console import inspect_text as show
    from pqcache.console import terminal
    from pqcache.store.inspect import listings as views

    limit = None if block_size is None else _size(block_size)
    view = _only_one({"schema": schema, "files": files, "row-groups": row_groups, "sample": sample, "diff": diff})
    if diff is not None:
        difference = views.difference(target, *diff)
        return _show(difference.to_dict(), json, False, lambda: show.print_difference(difference))
    with terminal.reporter(json_lines=False, quiet=json) as on_event:
        if view is not None:
            looked = views.open_dataset(target, _options(option), jobs, on_event)
        else:
            found = pqcache.inspect(target, options=_options(option), block_size=limit, jobs=jobs, on_event=on_event)
            training = forecast(target)
    if view is not None:
        return show.print_items(view, views.items_of(view, looked, sample or 0, target), limit, json)
    if html is not None:
        return show.write_page(found, training, html)
    if columns and not json:
        return show.print_columns(found, None)
    summary = {**found.to_dict(), "training": None if training is None else training.to_dict()}
    return _show(summary, json, False, lambda: show.print_inspection(found, training, partitions))


@app.command(
    cls=Command,
    epilog=examples(
        ("Look at every page, and mend what is damaged", "pqcache verify cache/shop --deep --repair"),
        ("Does the cache hold what the source holds?", "pqcache verify cache/shop --source"),
    ),
)
def verify(
    cache: opt.CacheArgument,
    deep: opt.Deep = False,
    source: opt.AtSource = False,
    engine: opt.Engine = None,
    repair: opt.Repair = False,
    option: opt.Options = None,
    jobs: opt.Processes = None,
    wait: opt.Wait = 0.0,
    json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> None:
    """Check that a cache is as it was published, and mend it.

    Without options: every file is there, of its size, and footers agree with manifest and index.
    """
    import pqcache
    from pqcache.console import terminal

    with terminal.reporter(json, quiet) as on_event:
        report = pqcache.verify(
            cache,
            deep=deep,
            source=source,
            engine=engine,
            repair=repair,
            options=_options(option),
            jobs=jobs,
            wait=wait,
            on_event=on_event,
        )
    _show(report.to_dict(), json, quiet, lambda: terminal.print_verify(report))
    report.raise_if_not_ok()


@app.command(
    cls=Command,
    epilog=examples(
        ("Find users by their number and by their address", "pqcache index cache/shop --key user_id --key email"),
        ("Which key indexes are there?", "pqcache index cache/shop"),
        ("Drop one", "pqcache index cache/shop --drop email"),
    ),
)
def index(
    cache: opt.CacheArgument,
    key: opt.Key = None,
    drop: opt.Drop = None,
    jobs: opt.Sorters = None,
    wait: opt.Wait = 0.0,
    json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> None:
    """Make key indexes, which find the rows of a key without scanning.

    Without options it lists those that there are. Each later snapshot has them too, brought up to date by what changed.
    """
    import pqcache
    from pqcache.console import terminal

    with terminal.reporter(json, quiet) as on_event:
        report = pqcache.index(cache, keys=key or (), drop=drop or (), jobs=jobs, wait=wait, on_event=on_event)
    _show(report.to_dict(), json, quiet, lambda: terminal.print_index(report))


@app.command(
    cls=Command,
    epilog=examples(
        (
            "How much was fetched in the last thirty runs?",
            "pqcache log cache/shop --last 30 --json | jq -s 'map(.fetched_bytes) | add'",
        ),
    ),
)
def log(
    cache: opt.CacheArgument,
    last: opt.Last = 20,
    json: opt.RunsJson = False,
) -> None:
    """Show what each run did to a cache."""
    import pqcache
    from pqcache.console import terminal

    records = pqcache.log(cache)[-last:]
    if json:
        for record in records:
            terminal.print_json(record)
    else:
        terminal.print_history(records)


@app.command(
    cls=Command,
    epilog=examples(
        ("Give back all the space that can be given back", "pqcache gc cache/shop --keep 1"),
        (
            "Leave what is less than two days old to programs that hold no lease",
            "pqcache gc cache/shop --keep 1 --older-than 48h",
        ),
    ),
)
def gc(
    cache: opt.CacheArgument,
    keep: opt.KeepNow = None,
    older_than: opt.OlderThan = "0s",
    wait: opt.Wait = 0.0,
    dry_run: opt.DryRun = False,
    json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> None:
    """Remove old snapshots that nobody reads."""
    import pqcache
    from pqcache.console import terminal

    with terminal.reporter(json, quiet) as on_event:
        report = pqcache.gc(
            cache, keep=keep, older_than=parse_duration(older_than), wait=wait, dry_run=dry_run, on_event=on_event
        )
    _show(report.to_dict(), json, quiet, lambda: terminal.print_gc(report))


@app.command(
    cls=Command,
    epilog=examples(
        ("A cache as a training reads it", "pqcache bench cache/shop --columns id,price,tokens --batch-size 1024"),
        ("With other numbers of workers", "pqcache bench cache/shop --workers 0,4,12 --seconds 10"),
    ),
)
def bench(
    target: opt.LocalTarget,
    columns: opt.BenchColumns = None,
    filters: opt.Filters = None,
    batch_size: opt.BatchSize = 256,
    memory: opt.Memory = "2GB",
    workers: opt.Workers = None,
    seconds: opt.Seconds = 2.0,
    json: opt.ReportJson = False,
    quiet: opt.Quiet = False,
) -> None:
    """Measure how fast this machine reads a dataset, and recommend settings for training."""
    from pqcache.benchmark import command as benching
    from pqcache.console import terminal
    from pqcache.console.bench_text import print_bench

    with terminal.reporter(json_lines=False, quiet=quiet or json) as on_event:
        report = benching.bench(
            target,
            columns=_names(columns),
            filters=filters,
            batch_size=batch_size,
            memory=memory,
            workers=None if workers is None else [_number(word) for word in workers.split(",")],
            seconds=seconds,
            on_event=on_event,
        )
    _show(report.to_dict(), json, quiet, lambda: print_bench(report))


def _names(text: str | None) -> list[str] | None:
    return None if text is None else [name.strip() for name in text.split(",") if name.strip()]


def _number(word: str) -> int:
    if not word.strip().isdigit():
        raise UsageError(f"--workers {word!r}", "give numbers, like 0,2,4")
    return int(word)


def _only_one(views: dict[str, Any]) -> str | None:
    """Return the option that is given, if any; two of them exclude each other."""
    given = [name for name, value in views.items() if value]
    if len(given) > 1:
        raise UsageError(f"--{given[0]} and --{given[1]}", "choose one of them")
    return given[0] if given else None


@app.callback()
def common(context: typer.Context, version: opt.Version = False, verbose: opt.Verbose = False) -> None:
    """Keep lake Parquet (HDFS, S3) on local disk, whole and fresh, and train from it."""
    if version:
        from pqcache.versions import __version__, report

        typer.echo("\n".join(report()) if verbose else f"pqcache {__version__}")
        raise typer.Exit
    if verbose:
        raise UsageError("-v", "goes with --version", "a command says what it does without it")
    if context.invoked_subcommand is None:
        typer.echo(context.get_help(), err=True)
        raise typer.Exit(UsageError.exit_code)


def _dense(names: list[str] | None) -> list[str] | None:
    if names == ["none"]:
        return []
    if names and (mixed := {"auto", "none"}.intersection(names)):
        raise UsageError(f"--dense {mixed.pop()}", "stands alone, without other columns")
    return names or None


def _options(pairs: list[str] | None) -> dict[str, str]:
    options = {}
    for pair in pairs or ():
        key, equals, value = pair.partition("=")
        if not (key and equals):
            raise UsageError(f"-o {key}", "write it as KEY=VALUE")
        options[key] = value
    return options


def _show(summary: dict[str, Any], json: bool, quiet: bool, for_people: Callable[[], None]) -> None:
    from pqcache.console import terminal

    if json:
        terminal.print_json({"event": "summary", **summary} if "partitions" not in summary else summary)
    elif not quiet:
        for_people()
