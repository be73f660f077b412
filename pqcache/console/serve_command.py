"""``pqcache serve``."""

from __future__ import annotations

from pqcache.console import examples
from pqcache.console import options as opt
from pqcache.console import serve_options as net
from pqcache.console.app import app
from pqcache.console.help import Command


@app.command(cls=Command, epilog=examples.SERVE)
def serve(
    caches: net.Caches,
    bind: net.Bind = "127.0.0.1",
    port: net.Port = 8700,
    token_file: net.TokenFile = None,
    connections: net.MaxConnections = 256,
    quiet: opt.Quiet = False,
) -> None:
    """Serve caches to other machines, as sources of their syncs.

    It ends with Ctrl-C or SIGTERM. Clients read pqcache+http://HOST:PORT/NAME, where NAME is that of the directory.
    """
    import pqcache
    from pqcache.console import terminal

    running = pqcache.serve(caches, bind=bind, port=port, token_file=token_file, connections=connections)
    terminal.run_server(running, quiet)
