"""Run test servers in the foreground: python -m tests.servers hdfs|s3|both DIRECTORY

Prints lines to source in another shell (also left in DIRECTORY/env), then waits for Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import argparse
import contextlib
import shlex
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.servers import hdfs, s3
from tests.servers.processes import ServerUnavailable


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.servers", description=__doc__)
    parser.add_argument("which", choices=["hdfs", "s3", "both"])
    parser.add_argument("directory", type=Path, help="where the servers keep their files while they run")
    arguments = parser.parse_args()
    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.default_int_handler)  # the way out of everything below is an exception
    try:
        with _servers(arguments.which, arguments.directory) as variables:
            exports = "".join(f"export {k}={shlex.quote(v)}\n" for k, v in variables.items())
            env_file = arguments.directory / "env"
            env_file.write_text(exports)
            print(exports, end="", flush=True)
            print(f"# running; the lines above are in {env_file}; Ctrl-C stops", file=sys.stderr)
            while True:
                signal.pause()
    except KeyboardInterrupt:
        return 0
    except (ServerUnavailable, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


@contextlib.contextmanager
def _servers(which: str, directory: Path) -> Iterator[dict[str, str]]:
    variables: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        if which in ("hdfs", "both"):
            store = stack.enter_context(hdfs.running(directory))
            variables |= {"HDFS_URL": store.url, "WEBHDFS_URL": store.webhdfs_url, **store.env}
        if which in ("s3", "both"):
            variables |= stack.enter_context(s3.running(directory)).env
        yield variables


if __name__ == "__main__":
    sys.exit(main())
