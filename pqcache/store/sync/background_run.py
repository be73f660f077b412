"""A run that a reader has started: ``python -m pqcache.store.sync.background_run``, with what to do as JSON on stdin.

Options of the store may be secrets, so none of this is on the command line. What it reports is a line of JSON each on
stdout: what has been listed or published, warnings, and at the end the error, as its class and its three parts.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from dataclasses import asdict
from typing import Any, NoReturn

from pqcache.errors import PqcacheError, first_line
from pqcache.events import Event, Listed, Published, Retried, Warned
from pqcache.store.sync.command import sync
from pqcache.system.process_identity import ProcessIdentity
from pqcache.system.startup import collect_garbage_rarely, hide_pandas, limit_blas_threads

_POLL = 1.0  # seconds between looks at the process that has started this one


def main() -> NoReturn:
    """Run what standard input asks for, report it, and exit."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    hide_pandas()
    limit_blas_threads()
    collect_garbage_rarely()
    job = json.load(sys.stdin)
    if job["starter"] is not None:
        threading.Thread(target=_end_with, args=(ProcessIdentity(**job["starter"]),), daemon=True).start()
    try:
        sync(job["source"], job["cache"], options=job["options"], on_event=_report_event, fill=True)
    except KeyboardInterrupt:  # the next run goes on
        os._exit(130)
    except PqcacheError as error:
        _report(error=[type(error).__name__, error.subject, error.reason, error.advice])
        os._exit(error.exit_code)
    except Exception as error:  # noqa: BLE001  a bug: whoever waits for this process has to know
        _report(error=["PqcacheError", type(error).__name__, first_line(error), "please report this bug"])
        os._exit(1)
    for path in job["files"]:  # nobody needs them any more: what is to be read is there
        with contextlib.suppress(OSError):
            os.unlink(path)
    os._exit(0)


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def _end_with(starter: ProcessIdentity) -> None:
    """Interrupt this process, like Ctrl-C, when the one that started it ends."""
    while starter.is_alive():
        time.sleep(_POLL)
    os.kill(os.getpid(), signal.SIGTERM)


def _report_event(event: Event) -> None:
    if isinstance(event, Listed | Published | Retried | Warned):
        _report(event=type(event).__name__, **asdict(event))


def _report(**values: Any) -> None:
    with contextlib.suppress(OSError):  # a full disk, which the run itself will meet
        os.write(sys.stdout.fileno(), json.dumps(values).encode() + b"\n")


if __name__ == "__main__":
    main()
