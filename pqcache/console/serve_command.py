"""``pqcache serve``, and its arguments and options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pqcache.console import examples
from pqcache.console import options as opt
from pqcache.console.app import app
from pqcache.console.help import NETWORK, Command

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
        "--connections", metavar="N", min=1, help="How many clients are served at once.", rich_help_panel=NETWORK
    ),
]


@app.command(cls=Command, epilog=examples.SERVE)
def serve(
    caches: Caches,
    bind: Bind = "127.0.0.1",
    port: Port = 8700,
    token_file: TokenFile = None,
    connections: MaxConnections = 256,
    quiet: opt.Quiet = False,
) -> None:
    """Serve caches to other machines, as sources of their syncs.

    It ends with Ctrl-C or SIGTERM. Clients read pqcache+http://HOST:PORT/NAME, where NAME is that of the directory.
    """
    import pqcache
    from pqcache.console import terminal

    running = pqcache.serve(caches, bind=bind, port=port, token_file=token_file, connections=connections)
    terminal.run_server(running, quiet)
