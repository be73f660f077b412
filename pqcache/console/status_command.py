"""The command status."""

from __future__ import annotations

from typing import Annotated

import typer

from pqcache.console import examples
from pqcache.console.app import app
from pqcache.console.help import Command

Roots = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="ROOT",
        show_default=False,
        help="A directory with caches below it, or a cache. Default: $PQCACHE_ROOT, or ~/.cache/pqcache.",
    ),
]
MaxAge = Annotated[
    float | None,
    typer.Option(
        metavar="DURATION",
        help="End with exit code 1 if a cache was last up to date longer ago than this, like 30h.",
    ),
]
StatusJson = Annotated[bool, typer.Option("--json", help="Write one JSON object per cache.")]


@app.command(cls=Command, epilog=examples.STATUS)
def status(roots: Roots = None, max_age: MaxAge = None, json: StatusJson = False) -> None:
    """Show all caches below a directory: rows, bytes on disk, age, last run, when the next is due.

    The age counts from the last sync that found or made the cache equal to its source.
    """
    import pqcache
    from pqcache.console import terminal
    from pqcache.console.status_text import print_status

    report = pqcache.status(*(roots or ()))
    if json:
        for item in report.caches:
            terminal.print_json(item.to_dict())
    else:
        print_status(report)
    if max_age is not None:
        report.raise_if_older(max_age)
