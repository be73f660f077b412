"""``pqcache snapshots``, ``pin``, ``unpin`` and ``rollback``, and what they print."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from pqcache.console import examples
from pqcache.console import options as opt
from pqcache.console.app import app, print_report
from pqcache.console.help import OUTPUT, SAFETY, Command
from pqcache.units import format_count, format_size

if TYPE_CHECKING:
    from pqcache.store.snapshots.command import PinReport, SnapshotView
    from pqcache.store.snapshots.rollback import RollbackReport

SnapshotName = Annotated[
    str, typer.Argument(metavar="SNAPSHOT", help="Its ID, its number, like 7, or the name of its pin.")
]
PinName = Annotated[
    str | None, typer.Option(metavar="NAME", help="The name by which it can be opened.", rich_help_panel=SAFETY)
]
ListJson = Annotated[bool, typer.Option("--json", help="Write one JSON object per snapshot.", rich_help_panel=OUTPUT)]


@app.command(cls=Command, epilog=examples.SNAPSHOTS)
def snapshots(cache: opt.CacheArgument, json: ListJson = False) -> None:
    """Show the snapshots of a cache: time, size, version, readers, pins."""
    import pqcache
    from pqcache.console import terminal

    found = pqcache.snapshots(cache)
    if not json:
        return print_snapshots(found)
    for view in found:
        terminal.print_json(view.to_dict())
    return None


@app.command(cls=Command, epilog=examples.PIN)
def pin(
    cache: opt.CacheArgument,
    snapshot: SnapshotName,
    name: PinName = None,
    wait: opt.Wait = 0.0,
    json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> None:
    """Keep a snapshot until it is unpinned, under a name if there is one.

    Pinned snapshots are kept beside those that --keep counts. No gc removes them.
    """
    import pqcache
    from pqcache.console import progress

    with progress.reporter(json, quiet, cache) as on_event:
        report = pqcache.pin(cache, snapshot, name=name, wait=wait, on_event=on_event)
    print_report(report.to_dict(), json, quiet, lambda: print_pin(report))


@app.command(cls=Command, epilog=examples.UNPIN)
def unpin(
    cache: opt.CacheArgument,
    snapshot: SnapshotName,
    wait: opt.Wait = 0.0,
    json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> None:
    """Let a pinned snapshot be removed as any other."""
    import pqcache
    from pqcache.console import progress, terminal

    with progress.reporter(json, quiet, cache) as on_event:
        report = pqcache.unpin(cache, snapshot, wait=wait, on_event=on_event)
    print_report(report.to_dict(), json, quiet, lambda: terminal.print_line(f"unpinned {report.snapshot}"))


@app.command(cls=Command, epilog=examples.ROLLBACK)
def rollback(
    cache: opt.CacheArgument,
    snapshot: SnapshotName,
    wait: opt.Wait = 0.0,
    json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> None:
    """Make an older snapshot the current one again, in one step.

    Readers that have another one open keep it. The next sync publishes what the source holds then.
    """
    import pqcache
    from pqcache.console import progress

    with progress.reporter(json, quiet, cache) as on_event:
        report = pqcache.rollback(cache, snapshot, wait=wait, on_event=on_event)
    print_report(report.to_dict(), json, quiet, lambda: print_rollback(report))


def print_snapshots(views: Sequence[SnapshotView]) -> None:
    """Print a table of snapshots, the newest last."""
    from pqcache.console.terminal import print_line
    from pqcache.console.text_table import print_table

    if not views:
        print_line("no snapshot yet")
        return
    versions = ("version",) if any(view.version for view in views) else ()
    rows = []
    for view in views:
        state = ["current"] if view.current else []
        state += [f"pinned as {view.name}" if view.name else "pinned"] if view.pinned else []
        cells = (
            view.snapshot,
            (view.created or "-")[:16].replace("T", " "),
            "-" if view.rows is None else f"{view.rows:,}",
            "-" if view.bytes is None else format_size(view.bytes),
            *(view.version or "-" for _ in versions),
            "?" if view.leases is None else str(view.leases),
            ", ".join(state),
        )
        rows.append((cells, [view.damage] if view.damage else []))
    titles = ("snapshot", "made (UTC)", "rows", "bytes", *versions, "readers", "")
    print_table(titles, rows, right=("rows", "bytes", "readers"))


def print_pin(report: PinReport) -> None:
    """Print what was pinned as one line."""
    from pqcache.console.terminal import print_line

    name = report.pins[report.snapshot]
    number = format_count(len(report.pins), "snapshot")
    print_line(f"pinned {report.snapshot}{f' as {name}' if name else ''}; {number} pinned")


def print_rollback(report: RollbackReport) -> None:
    """Print what was done as one line."""
    from pqcache.console.terminal import print_line

    if report.snapshot == report.previous:
        print_line(f"nothing to do: {report.snapshot} is current")
        return
    after = "the next sync publishes what the source holds then"
    print_line(f"rolled back from {report.previous}; {report.snapshot} is current; {after}")
