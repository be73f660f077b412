"""The arguments and options of ``pqcache serve``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pqcache.console.help import NETWORK

Caches = Annotated[list[Path], typer.Argument(metavar="CACHE", readable=False, help="The cache directories.")]
Bind = Annotated[
    str,
    typer.Option(
        metavar="ADDRESS",
        help="The address to listen on. One that other machines can reach needs a token. Default: 127.0.0.1.",
        rich_help_panel=NETWORK,
    ),
]
Port = Annotated[
    int, typer.Option(metavar="N", min=0, help="The port; 0 for any that is free.", rich_help_panel=NETWORK)
]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="A file with the token that clients need. Default: the variable PQCACHE_TOKEN, or no token.",
        rich_help_panel=NETWORK,
    ),
]
MaxConnections = Annotated[
    int,
    typer.Option(
        "--connections", metavar="N", min=1, help="How many clients may be connected at once.", rich_help_panel=NETWORK
    ),
]
