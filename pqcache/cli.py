"""Runs one command line: signals, exit codes, and one line for each error."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from typing import NoReturn

from pqcache.console.commands import app
from pqcache.console.terminal import name_lines
from pqcache.errors import Interrupted, PqcacheError, UsageError, first_line, open_error
from pqcache.system.processes import collect_no_more_garbage, hide_pandas, limit_blas_threads


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def main() -> NoReturn:
    """Run the command line and end the process with its exit code."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as nohup leaves it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, _interrupt)
    hide_pandas()
    limit_blas_threads()
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
        signal.signal(number, signal.SIG_IGN)  # the run is complete: a signal at exit must not change the exit code
    collect_no_more_garbage()
    sys.exit(0)


def run(arguments: list[str]) -> int:
    """Run one command line and return its exit code."""
    name_lines("")
    try:
        code = int(app(arguments, prog_name="pqcache", standalone_mode=False) or 0)
        if code == Interrupted.exit_code:  # Typer has caught the KeyboardInterrupt
            return _fail(Interrupted("", "interrupted", "run the command again to continue"), arguments)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:  # before Typer catches it
        return Interrupted.exit_code
    except PqcacheError as error:
        return _fail(error, arguments)
    except (BrokenPipeError, SystemExit) as error:
        if isinstance(error, SystemExit) and not isinstance(error.__context__, BrokenPipeError):
            raise  # as completion does; Typer also makes one of a closed pipe
        _drop_output()
        return _fail(PqcacheError("the output", "its reader closed it early"), arguments)
    except OSError as error:
        _drop_output()
        name = error.filename or "the output, or a temporary file"
        advice = "make it accessible for this user" if isinstance(error, PermissionError) else ""
        known = open_error(error) or (error.strerror or first_line(error), advice)
        return _fail(PqcacheError(name, *known), arguments)
    except Exception as error:  # noqa: BLE001  a bug: print a line, not a traceback
        return _unexpected(error, arguments)


def _drop_output() -> None:
    """Discard unwritten output, so that Python does not try again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _unexpected(error: Exception, arguments: list[str]) -> int:
    """Print an error of the parser, or a bug."""
    if hasattr(error, "format_message"):  # the parser refused the command line
        reason = error.format_message().rstrip(".")
        context = getattr(error, "ctx", None)
        named = [word for word in arguments[:1] if not word.startswith("-") and type(error).__name__ != "UsageError"]
        command = context.command_path if context is not None else " ".join(["pqcache", *named])
        return _fail(UsageError("", reason, f"'{command} -h' shows the usage"), arguments)
    advice = "please report this bug, with the output of PQCACHE_DEBUG=1 and of 'pqcache --version -v'"
    return _fail(PqcacheError(type(error).__name__, first_line(error), advice), arguments)


def _fail(error: PqcacheError, arguments: list[str]) -> int:
    """Print an error and return its exit code."""
    from pqcache.console.terminal import print_error

    if os.environ.get("PQCACHE_DEBUG", "0") != "0":
        import traceback

        traceback.print_exc()
    with contextlib.suppress(OSError):  # it cannot be printed: the exit code reports it
        print_error(error, "--json" in arguments)
    return error.exit_code
