"""The commands add and remove: which caches a directory has."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pqcache.console import examples, parsing
from pqcache.console import options as opt
from pqcache.console.app import app
from pqcache.console.help import Command

Source = Annotated[str, typer.Argument(metavar="SOURCE", help="A path or a URL, as for sync.")]
OptionalName = Annotated[
    str | None,
    typer.Argument(metavar="NAME", show_default=False, help="The cache's name. Default: the last part of SOURCE."),
]
Name = Annotated[str, typer.Argument(metavar="NAME", help="The cache's name.")]
Root = Annotated[
    Path | None,
    typer.Option(metavar="ROOT", help="The directory of the caches. Default: $PQCACHE_ROOT, or ~/.cache/pqcache."),
]
Force = Annotated[bool, typer.Option("--force", help="Also if readers have it open.")]


@app.command(cls=Command, epilog=examples.ADD)
def add(source: Source, name: OptionalName = None, root: Root = None, option: opt.Options = None) -> None:
    """Make a cache without a sync, for the next 'pqcache sync --all'.

    Its pqcache.toml may be edited, and 'pqcache sync CACHE' with options sets those that are remembered.
    """
    import pqcache
    from pqcache.console import terminal

    place = pqcache.add(source, name, root=root, options=parsing.store_options(option))
    terminal.print_line(f"added {place}; 'pqcache sync {place}' fetches it")


@app.command(cls=Command, epilog=examples.REMOVE)
def remove(name: Name, root: Root = None, force: Force = False) -> None:
    """Remove a cache with all its snapshots; its source is not touched."""
    import pqcache
    from pqcache.console import terminal

    terminal.print_line(f"removed {pqcache.remove(name, root=root, force=force)}")
