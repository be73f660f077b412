"""The options of sync that say what to do where the source is not what it was."""

from __future__ import annotations

from typing import Annotated

import typer

from pqcache.console.help import SAFETY

NewSource = Annotated[
    bool,
    typer.Option(
        "--new-source",
        help="Make the cache a copy of another source than before, as when a table has moved. Default: another source "
        "is refused.",
        rich_help_panel=SAFETY,
    ),
]
