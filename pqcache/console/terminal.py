"""Prints progress, reports and errors: as text, as JSON lines, or not at all."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TextIO

from pqcache.console.line_prefix import line_prefix
from pqcache.errors import PqcacheError
from pqcache.store.urls import printable, printable_json

if TYPE_CHECKING:  # rich is slow to import: only tables and progress bars need it
    from rich.console import Console


def print_line(text: str, stream: TextIO | None = None) -> None:
    """Print one line without markup to standard output, or to ``stream``; what controls a terminal is escaped.

    Where no terminal is, a line of a run on a cache begins with the time and the cache's name.
    """
    stream = stream or sys.stdout
    stream.write(line_prefix(stream) + printable(text) + "\n")
    stream.flush()


def can_ask() -> bool:
    """Whether a person is there to answer a question."""
    return sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty()


def ask(question: str) -> bool:
    """Ask a question on the terminal; only yes is yes."""
    sys.stderr.write(f"{printable(question)} [y/N] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def print_sentence(text: str) -> None:
    """Print one line to standard output, which a terminal shows with its words whole."""
    if sys.stdout.isatty():
        import shutil
        import textwrap

        width = shutil.get_terminal_size().columns
        for line in textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False):
            print_line(line)
    else:
        print_line(text)


def escape(text: str) -> str:
    """Return ``text`` for a console, where it neither is markup nor controls the terminal."""
    from rich.markup import escape as escape_markup

    return escape_markup(printable(text))


def stdout_console() -> Console:
    """Return the console for tables and styles; it wraps lines only on a terminal."""
    from rich.console import Console

    if sys.stdout.isatty():
        return Console(highlight=False)
    return Console(highlight=False, soft_wrap=True, width=int(os.environ.get("COLUMNS") or 200))


def stderr_console() -> Console:
    """Return the console for progress."""
    from rich.console import Console

    return Console(stderr=True, highlight=False, soft_wrap=True)


def print_json(value: Mapping[str, Any]) -> None:
    """Print one JSON object on a line of its own."""
    sys.stdout.write(printable_json(json.dumps(value, ensure_ascii=False, default=str)) + "\n")
    sys.stdout.flush()


def error_values(error: PqcacheError) -> dict[str, Any]:
    """Return an error as plain values."""
    parts = {"subject": error.subject, "reason": error.reason, "advice": error.advice}
    return {"kind": type(error).__name__, "message": str(error), **parts, "exit_code": error.exit_code}


def print_error(error: PqcacheError, json_lines: bool) -> None:
    """Print an error as one line to standard error, and with ``json_lines`` as an event to standard output."""
    if json_lines:
        print_json({"event": "error", **error_values(error)})
    reason = " ".join(line.strip() for line in error.reason.splitlines())  # another library's may have several
    label, message = "pqcache: error:", printable(str(PqcacheError(error.subject, reason, error.advice)))
    if sys.stderr.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") not in (None, "dumb"):
        label = f"\x1b[1;31m{label}\x1b[0m"
    sys.stderr.write(f"{line_prefix(sys.stderr)}{label} {message}\n")
    sys.stderr.flush()


def location(path: str, row_group: int | None, column: str | None) -> str:
    """Return a file, and a row group and a column of it where they are known, as text."""
    parts = [path, *([] if row_group is None else [f"row group {row_group}"])]
    return ", ".join([*parts, *([] if column is None else [f"column {column}"])])


def bar(console: Console, part: float, total: float, width: int) -> str:
    """Return a bar of up to ``width`` characters, at least a thin one if ``part`` is not 0."""
    full, thin = ("#", "|") if is_plain(console) else ("█", "▏")
    return full * round(width * part / max(1, total)) or (thin if part else "")


def is_plain(console: Console) -> bool:
    """Return whether to print ASCII only; Python writes UTF-8 in the C locale too."""
    name = next((os.environ[key] for key in ("LC_ALL", "LC_CTYPE", "LANG") if os.environ.get(key)), "")
    return name in ("C", "POSIX") or console.encoding not in ("utf-8", "utf8")
