"""``pqcache demo``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pqcache.console.app import app
from pqcache.console.help import Command

EXAMPLES = """# Run it, and look at what it has made
pqcache demo
pqcache inspect pqcache-demo/cache
# Leave its files in another directory
pqcache demo build/demo
"""
Directory = Annotated[
    Path,
    typer.Argument(metavar="DIRECTORY", help="Where it leaves its files: new, empty, or left by an earlier demo."),
]


@app.command(cls=Command, epilog=EXAMPLES.rstrip())
def demo(directory: Directory = Path("pqcache-demo")) -> None:
    """Show what pqcache does, on a dataset that it makes.

    It syncs, inspects, repartitions, trains, and syncs again while a training runs; with numpy where torch is not
    installed. It needs no network, and about a minute and 200 MB. Each claim that it prints is checked; a false one is
    an error.
    """
    from pqcache.console.demo.run import run_demo

    run_demo(directory)
