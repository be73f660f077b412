"""The command line: each command is named like the library function it calls."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from pqcache.errors import Interrupted, PqcacheError, UsageError, first_line
from pqcache.lean import without_pandas
from pqcache.units import parse_duration, parse_size

app = typer.Typer(
    name="pqcache",
    help="Keep lake Parquet (HDFS, S3) on local disk, whole and fresh, and train from it.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="rich",
)


def _size(text: str) -> int:
    size = parse_size(text)
    if size < 1:
        raise UsageError(f"{text!r} is too small for a row group")
    return size


Options = Annotated[
    list[str] | None,
    typer.Option("-o", "--option", metavar="KEY=VALUE", help="Option of the store, like endpoint=http://host:9000."),
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object per event, a summary at the end.")]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="Print nothing but errors.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would be done and do nothing.")]
Jobs = Annotated[int, typer.Option("-j", "--jobs", min=1, help="Files worked on at once.")]
Wait = Annotated[float, typer.Option(metavar="SECONDS", help="Wait for another run to end.")]
Keep = Annotated[int | None, typer.Option(min=1, help="Snapshots to keep, the current one among them; 2 at first.")]
RowGroupSize = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="Largest row group in bytes on disk, like 128MB or 64m."),
]


@app.command()
def sync(
    source: Annotated[str, typer.Argument(help="hdfs://, webhdfs://, s3://, file:// or a path; or a CACHE.")],
    cache: Annotated[Path | None, typer.Argument(help="The local cache directory.")] = None,
    where: Annotated[
        str | None,
        typer.Option(metavar="CONDITION", help="Rows to take: \"dt >= '2026-11-01' and price > 0\"; '' for all."),
    ] = None,
    columns: Annotated[
        str | None, typer.Option(metavar="A,B,...", help="Fetch only these columns; '' for all.")
    ] = None,
    row_group_size: RowGroupSize = None,
    keep: Keep = None,
    marker: Annotated[
        str | None, typer.Option(metavar="NAME", help="Take only partitions that hold this file, like _SUCCESS.")
    ] = None,
    settle: Annotated[
        str | None, typer.Option(metavar="DURATION", help="Leave files younger than this, like 10m.")
    ] = None,
    max_delete: Annotated[
        str | None, typer.Option(metavar="N|P%", help="Refuse to drop more files than this; 50% at first.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Drop them all the same.")] = False,
    hdfs_driver: Annotated[str | None, typer.Option(metavar="NAME", help="hdfs-native or hdfs3.")] = None,
    checksum: Annotated[
        bool | None, typer.Option("--checksum/--no-checksum", help="Compare with the store's checksum; costs CPU.")
    ] = None,
    option: Options = None,
    jobs: Jobs = 8,
    retries: Annotated[int, typer.Option(min=0, help="Tries after a passing failure.")] = 4,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", min=0.1, help="Longest silence of a server.")] = 30.0,
    wait: Wait = 0.0,
    dry_run: DryRun = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Bring a cache up to date with its source, moving only what changed.

    'pqcache sync CACHE' alone repeats with what the cache remembers.
    """
    import pqcache
    from pqcache import console

    where_from, target = (source, cache) if cache is not None else (None, Path(source))
    with console.reporter(json, quiet) as on_event:
        report = pqcache.sync(
            target,
            where_from,
            where=where,
            columns=None if columns is None else [name.strip() for name in columns.split(",") if name.strip()],
            row_group_size=None if row_group_size is None else _size(row_group_size),
            options=_options(option),
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
    _show(report.to_dict(), json, quiet, lambda: console.print_sync(report))


@app.command()
def repartition(
    source: Annotated[str, typer.Argument(help="A cache, a directory or a URL.")],
    dest: Annotated[
        str | None, typer.Argument(help="A new directory: a path, hdfs:// or s3://; not needed for a cache.")
    ] = None,
    row_group_size: RowGroupSize = None,
    compression: Annotated[
        str | None, typer.Option(metavar="CODEC", help="zstd[:LEVEL], lz4, snappy, none, or keep each column's own.")
    ] = None,
    compat: Annotated[
        bool | None, typer.Option("--compat/--no-compat", help="Only what old readers know: no DELTA, snappy.")
    ] = None,
    keep_int96: Annotated[
        bool | None, typer.Option("--keep-int96/--no-keep-int96", help="Leave INT96 time stamps as they are.")
    ] = None,
    dense: Annotated[
        list[str] | None,
        typer.Option(metavar="COLUMN", help="Store lists of one length as bytes; auto proposes, none undoes."),
    ] = None,
    narrow: Annotated[
        bool, typer.Option("--narrow", help="Dense integers in the smallest type that holds all.")
    ] = False,
    shuffle: Annotated[
        int | None, typer.Option(metavar="SEED", min=0, help="Permute the rows of each partition.")
    ] = None,
    align: Annotated[
        str | None, typer.Option(metavar="block", help="Put no row group across a block boundary.")
    ] = None,
    block_size: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Block size on HDFS; 128MB with --align, else the cluster's.")
    ] = None,
    option: Options = None,
    scheduler: Annotated[
        str | None, typer.Option(metavar="URL", help="Work on a Dask cluster, like tcp://host:8786.")
    ] = None,
    jobs: Jobs = 8,
    wait: Wait = 0.0,
    dry_run: DryRun = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Rewrite row groups so that they fill the block and never exceed it.

    A cache gets a new snapshot, and later syncs rewrite what is new the same way.
    """
    import pqcache
    from pqcache import console

    if dense == ["auto"]:
        with console.reporter(json, quiet) as on_event:
            proposals = pqcache.dense_proposals(source, options=_options(option), on_event=on_event)
        found = {"target": source, "columns": [proposal.to_dict() for proposal in proposals]}
        _show(found, json, quiet, lambda: console.print_proposals(source, dest, proposals))
        return
    with console.reporter(json, quiet) as on_event:
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
    _show(report.to_dict(), json, quiet, lambda: console.print_repartition(report))


@app.command()
def inspect(
    target: Annotated[str, typer.Argument(help="A cache, a directory, a file or a URL.")],
    block_size: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Block size to measure against; HDFS's own, or 128MB.")
    ] = None,
    partitions: Annotated[bool, typer.Option("--partitions", help="All partitions, however many.")] = False,
    columns: Annotated[bool, typer.Option("--columns", help="Only the columns, all of them.")] = False,
    schema: Annotated[bool, typer.Option("--schema", help="Only names and types.")] = False,
    files: Annotated[bool, typer.Option("--files", help="Only the files, one a line.")] = False,
    row_groups: Annotated[bool, typer.Option("--row-groups", help="Only the row groups, one a line.")] = False,
    sample: Annotated[int | None, typer.Option(metavar="N", min=1, help="Only the first N rows.")] = None,
    diff: Annotated[
        tuple[str, str] | None, typer.Option(metavar="OLD NEW", help="Only what differs between two snapshots.")
    ] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write one HTML page with charts.")] = None,
    option: Options = None,
    jobs: Jobs = 16,
    json: Annotated[bool, typer.Option("--json", help="JSON; see pqcache-inspect(1).")] = False,
) -> None:
    """Show what is in a dataset: partitions, row-group sizes, columns, compression."""
    import pqcache
    from pqcache import console
    from pqcache import console_inspect as show
    from pqcache.forecast import forecast
    from pqcache.store import views

    limit = None if block_size is None else _size(block_size)
    view = _only_one({"schema": schema, "files": files, "row-groups": row_groups, "sample": sample, "diff": diff})
    if diff is not None:
        difference = views.difference(target, *diff)
        return _show(difference.to_dict(), json, False, lambda: show.print_difference(difference))
    with console.reporter(json_lines=False, quiet=json) as on_event:
        if view is not None:
            looked = views.look(target, _options(option), jobs, on_event)
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


@app.command()
def verify(
    cache: Annotated[Path, typer.Argument(help="The cache directory.")],
    deep: Annotated[
        bool, typer.Option("--deep", help="Compare checksums, decode every page, check statistics.")
    ] = False,
    source: Annotated[bool, typer.Option("--source", help="Ask the source whether it has changed.")] = False,
    engine: Annotated[
        str | None, typer.Option(metavar="fastparquet", help="Compare with what this reads; implies --deep.")
    ] = None,
    repair: Annotated[bool, typer.Option("--repair", help="Fetch what is damaged again.")] = False,
    option: Options = None,
    jobs: Annotated[int | None, typer.Option("-j", "--jobs", min=1, help="Processes; one per processor.")] = None,
    wait: Wait = 0.0,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Check that a cache is as it was published, and mend it.

    Without options: every file is there, of its size, and footers agree with manifest and index.
    """
    import pqcache
    from pqcache import console

    with console.reporter(json, quiet) as on_event:
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
    _show(report.to_dict(), json, quiet, lambda: console.print_verify(report))
    report.raise_if_not_ok()


@app.command()
def log(
    cache: Annotated[Path, typer.Argument(help="The cache directory.")],
    last: Annotated[int, typer.Option("-n", "--last", min=1, help="How many runs to show.")] = 20,
    json: Annotated[bool, typer.Option("--json", help="One JSON object per run.")] = False,
) -> None:
    """Show what each run did to a cache."""
    import pqcache
    from pqcache import console

    records = pqcache.history(cache)[-last:]
    if json:
        for record in records:
            console.print_json(record)
    else:
        console.print_history(records)


@app.command()
def gc(
    cache: Annotated[Path, typer.Argument(help="The cache directory.")],
    keep: Keep = None,
    older_than: Annotated[
        str, typer.Option(metavar="DURATION", help="Remove only snapshots older than this, like 48h.")
    ] = "0s",
    wait: Wait = 0.0,
    dry_run: DryRun = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Remove old snapshots that nobody reads."""
    import pqcache
    from pqcache import console

    with console.reporter(json, quiet) as on_event:
        report = pqcache.gc(
            cache, keep=keep, older_than=parse_duration(older_than), wait=wait, dry_run=dry_run, on_event=on_event
        )
    _show(report.to_dict(), json, quiet, lambda: console.print_gc(report))


def _only_one(views: dict[str, Any]) -> str | None:
    """Return the option that is given, if any; two of them exclude each other."""
    given = [name for name, value in views.items() if value]
    if len(given) > 1:
        raise UsageError(f"--{given[0]} and --{given[1]}: choose one of them")
    return given[0] if given else None


def _version(wanted: bool) -> None:
    if wanted:
        from pqcache import __version__

        typer.echo(f"pqcache {__version__}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Keep lake Parquet (HDFS, S3) on local disk, whole and fresh, and train from it."""


def _dense(names: list[str] | None) -> list[str] | None:
    if names == ["none"]:
        return []
    if names and (mixed := {"auto", "none"}.intersection(names)):
        raise UsageError(f"--dense {mixed.pop()}: stands alone, without other columns")
    return names or None


def _options(pairs: list[str] | None) -> dict[str, str]:
    options = {}
    for pair in pairs or ():
        key, equals, value = pair.partition("=")
        if not (key and equals):
            raise UsageError(f"-o {key}: write it as KEY=VALUE")
        options[key] = value
    return options


def _show(summary: dict[str, Any], json: bool, quiet: bool, for_people: Callable[[], None]) -> None:
    from pqcache import console

    if json:
        console.print_json({"event": "summary", **summary} if "partitions" not in summary else summary)
    elif not quiet:
        for_people()


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def main() -> NoReturn:
    """Run the command line and end the process with its exit code."""
    signal.signal(signal.SIGTERM, _interrupt)
    without_pandas()
    if sys.stdout is None:  # closed by whoever started this
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    code = run(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    if code:
        os._exit(code)  # a thread may hang in a read, which sys.exit() would wait for
    sys.exit(0)


def run(arguments: list[str]) -> int:
    """Run one command line and return its exit code."""
    try:
        code = int(app(arguments, prog_name="pqcache", standalone_mode=False) or 0)
        if code == Interrupted.exit_code:  # Typer has caught the KeyboardInterrupt
            return _fail(Interrupted("interrupted; nothing is left half done"), arguments)
        return code
    except PqcacheError as error:
        return _fail(error, arguments)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:  # noqa: BLE001  the last resort: a line instead of a traceback
        return _unexpected(error, arguments)


def _unexpected(error: Exception, arguments: list[str]) -> int:
    if hasattr(error, "format_message"):  # what the parser refuses
        context = getattr(error, "ctx", None)
        command = context.command_path if context is not None else "pqcache"
        return _fail(UsageError(f"{error.format_message().rstrip('.')} ('{command} -h' shows the usage)"), arguments)
    name = type(error).__name__
    return _fail(
        PqcacheError(f"{name}: {first_line(error)} (a bug? PQCACHE_DEBUG=1 shows the traceback; please report it)"),
        arguments,
    )


def _fail(error: PqcacheError, arguments: list[str]) -> int:
    from pqcache.console import print_error

    if os.environ.get("PQCACHE_DEBUG", "0") != "0":
        import traceback

        traceback.print_exc()
    print_error(error, "--json" in arguments)
    return error.exit_code
