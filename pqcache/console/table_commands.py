"""The commands add and remove: which caches a directory has."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pqcache.console import examples, parsing
from pqcache.console import options as opt
from pqcache.console.app import app, print_report
from pqcache.console.help import DESTINATION, SAFETY, Command
from pqcache.units import format_count, format_size

if TYPE_CHECKING:
    from pqcache.store.tables_of_root import RemoveReport

Source = Annotated[str, typer.Argument(metavar="SOURCE", help="A path or a URL, as for sync.")]
OptionalName = Annotated[
    str | None,
    typer.Argument(metavar="NAME", show_default=False, help="The cache's name. Default: the last part of SOURCE."),
]
Name = Annotated[str, typer.Argument(metavar="NAME", help="The cache's name.")]
Root = Annotated[
    Path | None,
    typer.Option(
        metavar="ROOT",
        help="The directory of the caches. Default: $PQCACHE_ROOT, or ~/.cache/pqcache.",
        rich_help_panel=DESTINATION,
    ),
]
Force = Annotated[
    bool,
    typer.Option(
        "--force",
        help="Do not ask, and also if it has readers, pinned snapshots, or other files in it.",
        rich_help_panel=SAFETY,
    ),
]
Yes = Annotated[bool, typer.Option("-y", "--yes", help="Do not ask.", rich_help_panel=SAFETY)]


@app.command(cls=Command, epilog=examples.ADD)
def add(source: Source, name: OptionalName = None, root: Root = None, option: opt.Options = None) -> None:
    """Make a cache without a sync, for the next 'pqcache sync --all'.

    Its pqcache.toml may be edited, and 'pqcache sync CACHE' with options sets those that are remembered.
    """
    import pqcache
    from pqcache.console import terminal
    from pqcache.store.urls import quoted

    place = pqcache.add(source, name, root=root, options=parsing.store_options(option))
    terminal.print_line(f"added {place}; 'pqcache sync {quoted(place)}' fetches it")


@app.command(cls=Command, epilog=examples.REMOVE)
def remove(
    name: Name,
    root: Root = None,
    force: Force = False,
    yes: Yes = False,
    wait: opt.Wait = 0.0,
    dry_run: opt.DryRun = False,
    json: opt.InspectJson = False,
) -> None:
    """Remove a cache with all its snapshots; its source is not touched.

    On a terminal it asks first, and says how much it will free.
    """
    import pqcache
    from pqcache.console import terminal

    if not (yes or force or dry_run) and terminal.can_ask():
        found = pqcache.remove(name, root=root, wait=wait, dry_run=True)
        if not terminal.ask(f"remove {found.cache} ({_held(found)})?"):
            terminal.print_line("nothing was removed", sys.stderr)
            raise typer.Exit(1)
    report = pqcache.remove(name, root=root, force=force, wait=wait, dry_run=dry_run)
    did = "would remove {}: {} would be freed" if dry_run else "removed {}: {} freed"
    print_report(report.to_dict(), json, False, lambda: terminal.print_line(did.format(report.cache, _held(report))))


def _held(report: RemoveReport) -> str:
    return f"{format_count(len(report.snapshots), 'snapshot')}, {format_size(report.bytes)}"
