"""The entry point of ``pqcache`` and ``python -m pqcache``; an interrupt during the imports prints nothing."""

from __future__ import annotations

import os
import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn


def _exit_quietly(*_: object) -> NoReturn:
    os._exit(130)


def main() -> NoReturn:
    """Run the command line."""
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _exit_quietly)
    from pqcache.system.processes import collect_garbage_rarely

    collect_garbage_rarely()
    from pqcache.cli import main as run

    run()


if __name__ == "__main__":
    main()
