"""Options of sync for those who operate it: many tables, limits, what runs afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pqcache.console.help import NETWORK, OUTPUT, RUN

All = Annotated[
    bool,
    typer.Option(
        "--all",
        help="Sync all caches below the directory SOURCE, and the tables in its pqcache.toml, one after the other. "
        "Default: $PQCACHE_ROOT, or ~/.cache/pqcache.",
        rich_help_panel=RUN,
    ),
]
BandwidthLimit = Annotated[
    str | None,
    typer.Option(
        "--bwlimit",
        metavar="RATE",
        help="Fetch at most so many bytes a second, like 100MB, or by the time of day: '08:00,10M 19:00,off'.",
        rich_help_panel=NETWORK,
    ),
]
OnSuccess = Annotated[
    str | None,
    typer.Option(metavar="COMMAND", help="Shell command to run after a sync that was done.", rich_help_panel=RUN),
]
OnFailure = Annotated[
    str | None,
    typer.Option(metavar="COMMAND", help="Shell command to run after a sync that failed.", rich_help_panel=RUN),
]
Metrics = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Write the results for Prometheus, as node_exporter's textfile collector reads them.",
        rich_help_panel=OUTPUT,
    ),
]
Verbose = Annotated[bool, typer.Option("--verbose", help="Name all partitions that change.", rich_help_panel=OUTPUT)]
