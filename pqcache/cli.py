"""Runs one command line: signals, exit codes, and for whatever goes wrong one line in place of a traceback."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from typing import NoReturn

from pqcache.console.commands import app
from pqcache.errors import Interrupted, PqcacheError, UsageError, first_line
from pqcache.system.startup import collect_garbage_rarely, hide_pandas, limit_blas_threads


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def main() -> NoReturn:
    """Run the command line and end the process with its exit code."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as nohup leaves it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, _interrupt)
    hide_pandas()
    limit_blas_threads()
    collect_garbage_rarely()
    if sys.stdout is None:  # closed by whoever started this
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    code = run(sys.argv[1:])
    with contextlib.suppress(OSError):
        sys.stderr.flush()
    if code:
        os._exit(code)  # a thread may hang in a read, which sys.exit() would wait for
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # all is done: to die while Python tidies up would say that it is not
    sys.exit(0)


def run(arguments: list[str]) -> int:
    """Run one command line and return its exit code."""
    try:
        code = int(app(arguments, prog_name="pqcache", standalone_mode=False) or 0)
        if code == Interrupted.exit_code:  # Typer has caught the KeyboardInterrupt
            return _fail(Interrupted("", "interrupted", "nothing is left half done"), arguments)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:  # before Typer was ready to
        return Interrupted.exit_code
    except PqcacheError as error:
        return _fail(error, arguments)
    except BrokenPipeError:
        _drop_output()
        return 1
    except OSError as error:
        _drop_output()
        name = error.filename or "the output, or a temporary file"
        advice = "; make it accessible for this user" if isinstance(error, PermissionError) else ""
        return _fail(PqcacheError(name, f"{error.strerror or first_line(error)}{advice}"), arguments)
    except Exception as error:  # noqa: BLE001  the last resort: a line instead of a traceback
        return _unexpected(error, arguments)


def _drop_output() -> None:
    """Let what could not be written go nowhere, so that Python does not try again at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _unexpected(error: Exception, arguments: list[str]) -> int:
    if hasattr(error, "format_message"):  # what the parser refuses
        said = error.format_message().rstrip(".")
        context = getattr(error, "ctx", None)
        named = [word for word in arguments[:1] if not word.startswith("-") and type(error).__name__ != "UsageError"]
        command = context.command_path if context is not None else " ".join(["pqcache", *named])
        return _fail(UsageError("", f"{said} ('{command} -h' shows the usage)"), arguments)
    bug = "a bug? Please report it with what PQCACHE_DEBUG=1 shows and 'pqcache --version -v'"
    return _fail(PqcacheError(f"{type(error).__name__}", f"{first_line(error)} ({bug})"), arguments)


def _fail(error: PqcacheError, arguments: list[str]) -> int:
    from pqcache.console.terminal import print_error

    if os.environ.get("PQCACHE_DEBUG", "0") != "0":
        import traceback

        traceback.print_exc()
    with contextlib.suppress(OSError):  # nowhere to say it: the exit code does
        print_error(error, "--json" in arguments)
    return error.exit_code
