"""The options of a first copy that is read while it arrives."""

from __future__ import annotations

from typing import Annotated

import typer

from pqcache.console.help import RUN

Fill = Annotated[
    bool,
    typer.Option(
        "--fill",
        help="Let readers open the first copy while it arrives, and fetch first what they want. Without effect where "
        "the cache has a snapshot.",
        rich_help_panel=RUN,
    ),
]
