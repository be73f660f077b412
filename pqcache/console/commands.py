"""The commands. Each calls the library function of its name, and prints the report that it returns."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

import pqcache
from pqcache.console import terminal
from pqcache.console.app import Given, app, command
from pqcache.errors import UsageError
from pqcache.options import REMEMBERED, RUN

if TYPE_CHECKING:
    from pqcache.reader.epoch_options import RowArguments
    from pqcache.reader.packing import Pack
    from pqcache.reader.selection.split import Split

__all__ = ["app"]


@command("demo")
def demo(given: Given) -> None:
    """Show what pqcache does, on a dataset that it makes.

    It syncs, inspects, repartitions, trains, and syncs again while a training runs; with numpy where torch is not
    installed. It needs no network, and about a minute and 200 MB. Each claim that it prints is checked; a false one is
    an error.
    """
    from pqcache.console.demo import run_demo

    run_demo(given.directory)


@command("sync")
def sync(given: Given) -> None:
    """Update a cache from its source; only new and changed files are fetched.

    Options marked * are remembered: 'pqcache sync CACHE' alone repeats them, and --keep '' is the default again.
    """
    from pqcache.console.sync_runner import run_all, run_one

    (run_all if given.all_tables else run_one)(given)


@command("repartition")
def repartition(given: Given) -> None:
    """Rewrite row groups to a size on disk that they fill and never exceed.

    A cache gets a new snapshot. It remembers the options marked *, and later syncs apply them to new files.
    """
    from pqcache.console.text import print_proposals, print_repartition

    source, dest = given.source, given.dest
    if given.dense == ["auto"]:
        with terminal.reporter(given.json, given.quiet) as on_event:
            proposals = pqcache.dense_proposals(
                source,
                options=given.options,
                as_files=given.as_files,
                all_files=given.all_files,
                on_event=on_event,
            )
        found = {"target": source, "columns": [proposal.to_dict() for proposal in proposals]}
        terminal.print_report(found, given.json, given.quiet, lambda: print_proposals(source, dest, proposals))
        return
    with terminal.reporter(given.json, given.quiet, dest or source) as on_event:
        options = {**given.of(REMEMBERED, RUN), "dense": _dense_columns(given.dense)}
        report = pqcache.repartition(source, dest, **options, on_event=on_event)
    terminal.print_report(report.to_dict(), given.json, given.quiet, lambda: print_repartition(report))


@command("inspect")
def inspect(given: Given) -> None:
    """Show the partitions, row-group sizes, columns and compression of a dataset.

    For a cache only its index is read, for anything else only the footers.
    """
    from pqcache.benchmark import forecast
    from pqcache.console import inspect_text
    from pqcache.store import inspect as views
    from pqcache.store.tables.data_files import FileRules

    target, limit, json = given.target, given.block_size, given.json
    view = _chosen_view(
        {
            "schema": given.schema,
            "files": given.files,
            "row-groups": given.row_groups,
            "sample": given.sample,
            "diff": given.diff,
        }
    )
    if given.diff is not None:
        difference = views.difference(target, *given.diff)
        return terminal.print_report(
            difference.to_dict(), json, False, lambda: inspect_text.print_difference(difference)
        )
    rules = FileRules(as_files=given.as_files, all_files=given.all_files)
    with terminal.reporter(json_lines=False, quiet=json) as on_event:
        if view is not None:
            looked = views.open_inspected_dataset(target, given.options, given.jobs, on_event, rules, given.candidate)
        else:
            found = pqcache.inspect(target, **given.of(RUN), on_event=on_event)
            training = forecast(target, rules=rules, snapshot="candidate" if given.candidate else None)
    if view is not None:
        items = views.items_of(view, looked, given.sample or 0, target)
        return inspect_text.print_items(view, items, limit, json)
    if given.html is not None:
        return inspect_text.write_page(found, training, given.html)
    if given.columns and not json:
        return inspect_text.print_columns(found, None)
    summary = {**found.to_dict(), "training": None if training is None else training.to_dict()}
    return terminal.print_report(
        summary, json, False, lambda: inspect_text.print_inspection(found, training, given.partitions)
    )


@command("rows")
def rows(given: Given) -> None:
    """Show which rows batches of a training had: file, row group and row.

    For the batch whose loss exploded, or the last ones before a checkpoint. They follow from a state that the same
    training saved, at whatever batch. With --prove, show whether an epoch had every row exactly once.
    """
    from pqcache.console.inspect_text import print_rows

    options: RowArguments = {
        "filters": given.filters,
        "split": _split_of(given.split),
        "sample": given.sample_share,
        "limit": given.limit,
        "weights": given.weights,
        "balance": given.balance,
        "pack": _pack_of(given.pack),
    }
    if given.prove:
        if given.state is not None or given.batch is not None or given.last is not None or given.epoch is not None:
            reason = "proofs cover a whole epoch, which they name"
            raise UsageError("--prove", reason, "leave out --state, --batch, --last and --epoch")
        proof = pqcache.prove(given.target, given.proofs or (), **options)
        terminal.print_report(proof.to_dict(), given.json, False, lambda: terminal.print_line(str(proof)))
        raise typer.Exit(0 if proof.holds else 1)
    if given.proofs:
        raise UsageError(given.proofs[0], "read only with --prove", "give --prove, or --state for a state")
    if given.state is None:
        raise UsageError("rows", "no state is given", "give --state, or --prove and the files of proofs")
    if (given.batch is None) == (given.last is None):
        raise UsageError("rows", "no batch is named", "give either --batch or --last")
    if given.last is None:
        batches = [pqcache.rows(given.target, given.state, given.batch, epoch=given.epoch, **options)]
    elif given.epoch is not None:
        raise UsageError("--epoch", "--last takes batches of the state's own epoch", "leave it out")
    else:
        batches = pqcache.last_rows(given.target, given.state, given.last, **options)
    if not batches and not given.json:
        typer.echo("no batch of the state's epoch was read before it")
    for found in batches:
        print_rows(found, given.target, given.columns, given.sample or given.columns is not None, given.json)


@command("verify")
def verify(given: Given) -> None:
    """Check the current snapshot of a cache for damage, and repair it.

    Without options: every file exists with its recorded size, and footers agree with manifest and index.
    """
    from pqcache.console.text import print_verify

    def verify_one(cache: str) -> None:
        _run(given, pqcache.verify, print_verify, cache, **given.of(RUN)).raise_if_not_ok()

    _run_each(given, "verified", verify_one)


@command("index")
def index(given: Given) -> None:
    """Build key indexes, which find the rows of a key without a scan.

    Without options: list them. Each later snapshot gets them too, updated with what changed.
    """
    from pqcache.console.text import print_index

    _run(given, pqcache.index, print_index, given.cache, **given.of(RUN))


@command("bench")
def bench(given: Given) -> None:
    """Measure how fast this machine reads a dataset, and recommend training settings."""
    from pqcache.console.inspect_text import print_bench

    with terminal.reporter(json_lines=False, quiet=given.quiet or given.json) as on_event:
        report = pqcache.bench(given.target, **given.of(RUN), on_event=on_event)
    terminal.print_report(report.to_dict(), given.json, given.quiet, lambda: print_bench(report))


@command("help")
def help_command(given: Given) -> None:
    """Show the help of a command, or all commands."""
    group = typer.main.get_command(app)
    names = getattr(group, "commands", {})
    if given.command is not None and given.command not in names:
        from difflib import get_close_matches

        near = get_close_matches(given.command, names, 1)
        advice = f"did you mean '{near[0]}'? " if near else ""
        raise UsageError(f"help {given.command}", "there is no such command", f"{advice}'pqcache help' lists them")
    app([given.command, "--help"] if given.command else ["--help"], prog_name="pqcache", standalone_mode=False)


@command("serve")
def serve(given: Given) -> None:
    """Serve caches to other machines, as sources of their syncs.

    It ends with Ctrl-C or SIGTERM. Clients read pqcache+http://HOST:PORT/NAME, where NAME is that of the directory.
    """
    from pqcache.console.text import run_server

    running = pqcache.serve(given.caches, **given.of(RUN))
    run_server(running, given.quiet)


@command("snapshots")
def snapshots(given: Given) -> None:
    """Show the snapshots of a cache: time, size, version, readers, pins."""
    from pqcache.console.text import print_snapshots

    found = pqcache.snapshots(given.cache)
    if not given.json:
        return print_snapshots(found)
    for view in found:
        terminal.print_json(view.to_dict())
    return None


@command("pin")
def pin(given: Given) -> None:
    """Keep a snapshot until it is unpinned, under a name if there is one.

    Pinned snapshots are kept beside those that --keep counts. No gc removes them.
    """
    from pqcache.console.text import print_pin

    _run(given, pqcache.pin, print_pin, given.cache, given.snapshot, **given.of(RUN))


@command("unpin")
def unpin(given: Given) -> None:
    """Let a pinned snapshot be removed as any other."""
    from pqcache.console.text import print_unpin

    _run(given, pqcache.unpin, print_unpin, given.cache, given.snapshot, **given.of(RUN))


@command("rollback")
def rollback(given: Given) -> None:
    """Make an older snapshot the current one again, in one step.

    Readers that have another one open keep it. The next sync publishes what the source holds then, unless the cache is
    held.
    """
    from pqcache.console.text import print_rollback

    _run(given, pqcache.rollback, print_rollback, given.cache, given.snapshot, **given.of(RUN))


@command("status")
def status(given: Given) -> None:
    """Show all caches below a directory: rows, bytes on disk, age, last run, when the next is due.

    The age is that of the data: the time since a listing of the source last matched what the cache serves.
    """
    from pqcache.console.text import print_status

    report = pqcache.status(*(given.roots or ()))
    if given.json:
        for item in report.caches:
            terminal.print_json(item.to_dict())
    else:
        print_status(report)
    if given.max_age is not None:
        report.raise_if_older(given.max_age)


@command("add")
def add(given: Given) -> None:
    """Make a cache without a sync, for the next 'pqcache sync --all'.

    Its pqcache.toml may be edited, and 'pqcache sync CACHE' with options sets those that are remembered.
    """
    from pqcache.store.urls import quoted

    place = pqcache.add(given.source, given.name, root=given.root, options=given.options)
    terminal.print_line(f"added {place}; 'pqcache sync {quoted(place)}' fetches it")


@command("remove")
def remove(given: Given) -> None:
    """Remove a cache with all its snapshots; its source is not touched.

    On a terminal it asks first, and says how much it will free.
    """
    from pqcache.console.text import held_text
    from pqcache.store.cache_root import named_place

    name, root = given.name, given.root
    if root is None and "/" in (place := named_place(name)):
        name, root = Path(place).name, Path(place).parent
    where = {"root": root, "wait": given.wait}
    if not (given.yes or given.force or given.dry_run) and terminal.can_ask():
        found = pqcache.remove(name, dry_run=True, **where)
        if not terminal.ask(f"remove {found.cache} ({held_text(found)})?"):
            terminal.print_line("nothing was removed", sys.stderr)
            raise typer.Exit(1)
    report = pqcache.remove(name, force=given.force, dry_run=given.dry_run, **where)
    did = "would remove {}: {} would be freed" if given.dry_run else "removed {}: {} freed"
    said = did.format(report.cache, held_text(report))
    terminal.print_report(report.to_dict(), given.json, False, lambda: terminal.print_line(said))


@command("log")
def log(given: Given) -> None:
    """Show the runs of a cache: time, command, files, bytes, snapshot."""
    from pqcache.console.text import print_history

    def show(cache: str) -> None:
        records = pqcache.log(cache)[-given.last :]
        for record in records if given.json else ():
            terminal.print_json({"cache": cache, **record} if given.all_caches else record)
        if given.json:
            return
        if given.all_caches:
            terminal.print_line(f"{cache}:")
        print_history(records)

    _run_each(given, "", show)


@command("gc")
def gc(given: Given) -> None:
    """Remove old snapshots that no reader holds."""
    from pqcache.console.text import print_gc

    _run_each(given, "went through", lambda cache: _run(given, pqcache.gc, print_gc, cache, **given.of(RUN)))


def _run(given: Given, function: Callable[..., Any], show: Callable[[Any], None], *words: Any, **options: Any) -> Any:
    """Call a library function, show its events, and print and return its report."""
    if vars(given).get("all_caches"):
        terminal.name_lines(words[0], always=True)
        reporter = terminal.quiet_reporter(given.json or given.quiet)
    else:
        reporter = terminal.reporter(given.json, given.quiet, words[0])
    with reporter as on_event:
        report = function(*words, **options, on_event=on_event)
    terminal.print_report(report.to_dict(), given.json, given.quiet, lambda: show(report))
    return report


def _run_each(given: Given, did: str, run: Callable[[Any], object]) -> None:
    """Run a command on one cache, or with --all on all below a directory, with one summary line and exit code."""
    if not given.all_caches:
        if given.cache is None:
            raise UsageError("", "Missing argument 'CACHE'", f"'pqcache {given.command_name} -h' shows the usage")
        run(given.cache)
        return
    from pqcache.console.sync_runner import print_count, print_failure
    from pqcache.store.cache_root import default_root, find_caches
    from pqcache.store.sync.command import exit_code_of, known_error

    if getattr(given, "options", None):
        raise UsageError("-o and --all", "exclude each other", "give it with a cache")
    roots = [given.cache] if given.cache else []
    caches = find_caches(*roots)
    failed: dict[str, int] = {}
    for cache in map(str, caches):
        try:
            run(cache)
        except Exception as error:  # see known_error
            if isinstance(error, OSError) and error.filename is None:  # the report cannot be written
                raise
            failed[cache] = known_error(error).exit_code
            print_failure(cache, known_error(error), given.json)
    if did and not (given.json or given.quiet):
        terminal.name_lines(roots[0] if roots else default_root())
        print_count(did, len(caches), list(failed))
    if failed:
        raise typer.Exit(exit_code_of(list(failed.values())))


def _split_of(text: str | None) -> Split | None:
    if text is None:
        return None
    from pqcache.reader.selection.split import Split

    parts = text.split(":", 3)
    try:
        key, low, high, salt = [*parts, ""][:4]
        ends = float(low), float(high)
    except ValueError as error:
        raise UsageError(f"--split {text!r}", "not KEY:LOW:HIGH", "write it like user:0.0:0.9") from error
    return Split(key or None, *ends, salt=salt)


def _pack_of(text: str | None) -> Pack | None:
    if text is None:
        return None
    from pqcache.reader.packing import Pack

    columns, _, rest = text.partition(":")
    length, _, strategy = rest.partition(":")
    column, *fields = [name.strip() for name in columns.split(",")]
    if not column or not length.isdigit():
        raise UsageError(f"--pack {text!r}", "not COLUMN:LENGTH", "write it like tokens:4096")
    return Pack(column, int(length), strategy=strategy or "concat", fields=fields)  # type: ignore[arg-type]


def _dense_columns(names: list[str] | None) -> list[str] | None:
    """The columns of ``--dense``; empty for 'none', None if it is absent."""
    if names == ["none"]:
        return []
    if names and (keyword := {"auto", "none"}.intersection(names)):
        raise UsageError(f"--dense {keyword.pop()}", "excludes other columns", "give it alone")
    return names or None


def _chosen_view(views: dict[str, Any]) -> str | None:
    chosen = [name for name, value in views.items() if value]
    if len(chosen) > 1:
        raise UsageError(f"--{chosen[0]} and --{chosen[1]}", "exclude each other", "choose one of them")
    return chosen[0] if chosen else None
