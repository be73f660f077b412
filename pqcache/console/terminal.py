"""Prints progress, reports and errors: as text, as JSON lines, or not at all.

Progress is bars on a terminal, a line a minute elsewhere, or each event as JSON. Runs of many caches append to one log
file, so every line outside of a terminal begins with its time and the name of its cache:
``2026-11-20T04:00:03Z shop: ``.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, TextIO

from pqcache.errors import PartitionsSkipped, PqcacheError
from pqcache.events import (
    Advanced,
    Awaited,
    Damaged,
    Event,
    Fetched,
    Listed,
    OnEvent,
    Retried,
    Reused,
    Started,
    Warned,
)
from pqcache.units import format_count, format_seconds, format_size, printable, printable_json

if TYPE_CHECKING:
    from rich.console import Console
    from typing_extensions import Self


_name = ""
_always = False
LINE_SECONDS = 60.0  # between lines of progress without a terminal
_RATE_SECONDS = 15.0  # that a rate is the mean of, at least
_PHASE_WIDTH = 16
_PHASE_TEXT = {
    "list": "listing",
    "fetch": "fetching",
    "rewrite": "rewriting",
    "read": "reading footers",
    "verify": "verifying",
    "compare": "comparing",
    "index": "indexing",
    "measure": "measuring",
}


def name_lines(cache: str | os.PathLike[str], always: bool = False) -> None:
    """Set the cache, or the target, that later lines are about; with ``always``, name it on a terminal too.

    An empty text unsets it.
    """
    global _name, _always
    text = os.fspath(cache)
    if not text:
        _name = ""
        return
    from pqcache.store.urls import redact, url_scheme  # here, as a command that shows its version needs none
    from pqcache.units import printable  # here, as a command that shows its version needs none

    place = redact(text).rstrip("/") if url_scheme(text) else os.path.abspath(text)
    _name, _always = printable(place.rpartition("/")[2] or place), always


def line_prefix(stream: TextIO) -> str:
    """The prefix of a line on ``stream``; empty on a terminal, or before a cache is named."""
    if not _name:
        return ""
    if stream.isatty():
        return f"{_name}: " if _always else ""
    return f"{datetime.now(timezone.utc):%Y-%m-%dT%H:%M:%SZ} {_name}: "


def print_line(text: str, stream: TextIO | None = None) -> None:
    """Print one line without markup to standard output, or to ``stream``; control characters are escaped.

    Without a terminal, each line of a run on a cache begins with the time and the cache's name.
    """
    stream = stream or sys.stdout
    stream.write(line_prefix(stream) + printable(text) + "\n")
    stream.flush()


def can_ask() -> bool:
    """Whether a person can answer a question."""
    return sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty()


def ask(question: str) -> bool:
    """Ask a question on the terminal; only yes is yes."""
    sys.stderr.write(f"{printable(question)} [y/N] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def print_sentence(text: str, indent: str = "") -> None:
    """Print one line to standard output; a terminal does not break its words."""
    text = indent + text
    if sys.stdout.isatty():
        import shutil
        import textwrap

        width = shutil.get_terminal_size().columns
        for line in textwrap.wrap(
            text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        ):
            print_line(line)
    else:
        print_line(text)


def escape(text: str) -> str:
    """Escape markup, and characters that control a terminal."""
    from rich.markup import escape as escape_markup

    return escape_markup(printable(text))


def stdout_console() -> Console:
    """The console for tables and styles; it wraps lines only on a terminal."""
    from rich.console import Console

    if sys.stdout.isatty():
        return Console(highlight=False)
    return Console(highlight=False, soft_wrap=True, width=int(os.environ.get("COLUMNS") or 200))


def stderr_console() -> Console:
    from rich.console import Console

    return Console(stderr=True, highlight=False, soft_wrap=True)


def print_json(value: Mapping[str, Any]) -> None:
    """Print one JSON object on a line of its own."""
    sys.stdout.write(printable_json(json.dumps(value, ensure_ascii=False, default=str)) + "\n")
    sys.stdout.flush()


def print_report(summary: dict[str, Any], json: bool, quiet: bool, print_text: Callable[[], None]) -> None:
    """Print a report as JSON, as text, or not at all."""
    if json:
        print_json({"event": "summary", **summary} if "partitions" not in summary else summary)
    elif not quiet:
        print_text()


def error_values(error: PqcacheError) -> dict[str, Any]:
    parts = {"subject": error.subject, "reason": error.reason, "advice": error.advice}
    return {"kind": type(error).__name__, "message": str(error), **parts, "exit_code": error.exit_code}


def print_error(error: PqcacheError, json_lines: bool) -> None:
    """Print an error as one line to standard error, and with ``json_lines`` as an event to standard output."""
    if json_lines:
        print_json({"event": "error", **error_values(error)})
    reason = " ".join(line.strip() for line in error.reason.splitlines())  # another library's may have several
    label = "pqcache: warning:" if isinstance(error, PartitionsSkipped) else "pqcache: error:"  # as it has published
    message = printable(str(PqcacheError(error.subject, reason, error.advice)))
    if sys.stderr.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") not in (None, "dumb"):
        label = f"\x1b[1;31m{label}\x1b[0m"
    sys.stderr.write(f"{line_prefix(sys.stderr)}{label} {message}\n")
    sys.stderr.flush()


def location(path: str, row_group: int | None, column: str | None) -> str:
    """A file, and a row group and a column of it if known, as text."""
    parts = [path, *([] if row_group is None else [f"row group {row_group}"])]
    return ", ".join([*parts, *([] if column is None else [f"column {column}"])])


def bar(console: Console, part: float, total: float, width: int) -> str:
    """A bar of up to ``width`` characters, at least a thin one if ``part`` is not 0."""
    full, thin = ("#", "|") if is_plain(console) else ("█", "▏")
    return full * round(width * part / max(1, total)) or (thin if part else "")


def is_plain(console: Console) -> bool:
    """Whether to print ASCII only; Python writes UTF-8 in the C locale too."""
    name = next((os.environ[key] for key in ("LC_ALL", "LC_CTYPE", "LANG") if os.environ.get(key)), "")
    return name in ("C", "POSIX") or console.encoding not in ("utf-8", "utf8")


@contextlib.contextmanager
def reporter(json_lines: bool, quiet: bool, about: str | os.PathLike[str] = "") -> Iterator[OnEvent]:
    """Yield an ``on_event`` that prints events as JSON, as progress bars or lines, or not at all.

    ``about`` is the cache at work; without a terminal its name is in each line.
    """
    name_lines(about)
    if json_lines:
        yield print_event
    elif quiet:
        yield lambda event: None
    elif sys.stderr.isatty():
        with ProgressBars() as bars:
            yield bars
    else:
        with ProgressLines() as lines:
            yield lines


@contextlib.contextmanager
def quiet_reporter(quiet: bool) -> Iterator[OnEvent]:
    """Yield an ``on_event`` for runs of several caches: with a line a minute and warnings, or not at all."""
    if quiet:
        yield lambda event: None
        return
    with ProgressLines() as lines:
        yield lines


def print_event(event: Event) -> None:
    """Print an event as JSON."""
    if not isinstance(event, Advanced):
        print_json({"event": type(event).__name__.lower(), **asdict(event)})


class PhaseMeter:
    """How far a phase is, how fast it goes, and when it will end; ``now`` is a monotonic time."""

    def __init__(self, started: Started, now: float) -> None:
        self.total, self.files, self._unit, self._phase = started.total, started.files, started.unit, started.phase
        self.done = self.files_done = 0
        self._samples = deque([(now, 0)])

    @property
    def text(self) -> str:
        """The phase as a verb, like ``fetching``."""
        return _PHASE_TEXT.get(self._phase, self._phase)

    @property
    def is_complete(self) -> bool:
        return 0 < self.total <= self.done

    def advance(self, amount: int, now: float) -> None:
        """Count progress up to ``now``."""
        self.done += amount
        if now - self._samples[-1][0] >= 1:
            self._samples.append((now, self.done))
            while len(self._samples) > 2 and now - self._samples[1][0] > _RATE_SECONDS:
                self._samples.popleft()

    def rate(self, now: float) -> float:
        """Progress per second over the last 15 seconds; 0 while unknown."""
        since, before = self._samples[0]
        return max(0.0, (self.done - before) / (now - since)) if now - since >= 1 else 0.0

    def amount(self, now: float, width: float = math.inf) -> str:
        """How much is done, the total, the rate, and the time left.

        If that takes more than ``width`` characters, the files are left out first, then the rate.
        """
        done = f"{int(self.done):,}" if self.total and self._unit != "bytes" else self._amount(self.done)
        files = f"{self.files_done:,} of {format_count(self.files, 'file')}" if self.files else ""
        rate, speed, left = self.rate(now), "", ""
        if rate > 0 and self._unit != "settings":
            speed = f"{self._amount(rate)}/s"
            left = f"{format_seconds((self.total - self.done) / rate)} left" if self.total > self.done else ""
        parts = [f"{done} of {self._amount(self.total)}" if self.total else done, files, speed, left]
        for leave_out in (1, 2):
            if len(", ".join(filter(None, parts))) > width:
                parts[leave_out] = ""
        return ", ".join(filter(None, parts))

    def _amount(self, amount: float) -> str:
        return format_size(amount) if self._unit == "bytes" else format_count(int(amount), self._unit.removesuffix("s"))


class _Phases:
    """The phases that have started, each with its meter, for both ways of showing progress."""

    def __init__(self) -> None:
        self.meters: dict[str, PhaseMeter] = {}
        self._lock = threading.Lock()

    def __call__(self, event: Event) -> None:
        """Take an event; it may come from any thread."""
        with self._lock:
            now = time.monotonic()
            if isinstance(event, Started):
                self.meters[event.phase] = PhaseMeter(event, now)
                self._show_started(event)
            elif isinstance(event, Advanced):
                if event.phase in self.meters:
                    self.meters[event.phase].advance(event.amount, now)
                    self._show_advanced(event, now)
            elif isinstance(event, Fetched):
                if "fetch" in self.meters:
                    self.meters["fetch"].files_done += 1
            elif isinstance(event, Awaited):
                self._show_awaited(event)
            else:
                self._show_message(event)

    def _show_started(self, event: Started) -> None: ...

    def _show_advanced(self, event: Advanced, now: float) -> None: ...

    def _show_awaited(self, event: Awaited) -> None: ...

    def _show_message(self, event: Event) -> None: ...


class ProgressBars(_Phases):
    """Shows progress bars on a terminal, and warnings above them."""

    def __init__(self) -> None:
        super().__init__()
        from rich.progress import BarColumn, Progress, TextColumn

        console = stderr_console()
        self._bar = 20 if console.width >= 100 else 8
        self.bars = Progress(
            TextColumn(f"{{task.description:<{_PHASE_WIDTH}}}"),
            BarColumn(bar_width=self._bar),
            TextColumn("{task.fields[amount]}{task.fields[awaited]}"),
            console=console,
            transient=True,
        )
        self._tasks: dict[str, Any] = {}

    def __enter__(self) -> Self:
        self.bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bars.stop()

    def _show_started(self, event: Started) -> None:
        if event.phase in self._tasks:  # as where the source is listed again
            self.bars.remove_task(self._tasks.pop(event.phase))
        elif "list" in self._tasks:
            self.bars.remove_task(self._tasks.pop("list"))
        if event.total or event.phase == "list":
            text = self.meters[event.phase].text
            self._tasks[event.phase] = self.bars.add_task(text, total=event.total or None, amount="", awaited="")

    def _show_advanced(self, event: Advanced, now: float) -> None:
        if (task := self._tasks.get(event.phase)) is not None:
            meter = self.meters[event.phase]
            awaited = next((len(t.fields["awaited"]) for t in self.bars.tasks if t.id == task), 0)
            width = self.bars.console.width - _PHASE_WIDTH - self._bar - awaited - 3
            self.bars.update(task, completed=meter.done, amount=meter.amount(now, width))

    def _show_awaited(self, event: Awaited) -> None:
        if "fetch" in self._tasks:
            awaited = f", readers wait for {format_size(event.bytes)}" if event.bytes else ""
            self.bars.update(self._tasks["fetch"], awaited=awaited)

    def _show_message(self, event: Event) -> None:
        if (message := _message(event)) is not None:
            self.bars.console.print(escape(message), style="yellow")
        elif isinstance(event, Listed):
            files = format_count(event.files, "file")
            self.bars.console.print(f"source holds {files}, {format_size(event.bytes)}", style="dim")
        elif isinstance(event, Reused):
            self.bars.console.print(reused_text(event), style="dim")


class ProgressLines(_Phases):
    """Prints a line of progress a minute, whatever happens, and warnings at once; for logs."""

    def __init__(self) -> None:
        super().__init__()
        self._begun = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._print_lines, name="progress", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(1)  # so that no line comes after the report; not for long, as nobody may read the output

    def _print_lines(self) -> None:
        while not self._ended.wait(LINE_SECONDS):
            print_line(self.line(), sys.stderr)

    def line(self) -> str:
        """How far the unfinished phases are."""
        with self._lock:
            now = time.monotonic()
            meters = [meter for meter in self.meters.values() if not meter.is_complete]
            known = [meter for meter in meters if meter.total] or meters[-1:]  # the listing is known to end by the next
            said = "; ".join(f"{meter.text}: {meter.amount(now)}" for meter in known)
            return said or f"at work for {format_seconds(now - self._begun)}"

    def _show_message(self, event: Event) -> None:
        if (message := _message(event)) is not None:
            print_line(message, sys.stderr)
        elif isinstance(event, Reused):
            print_line(reused_text(event), sys.stderr)


def reused_text(event: Reused) -> str:
    return f"resuming: {format_size(event.bytes)} of {format_size(event.total)} are already here"


def _message(event: Event) -> str | None:
    """The line for an event that needs attention, else None."""
    if isinstance(event, Warned):
        return f"warning: {event.message}"
    if isinstance(event, Damaged):
        return f"damaged: {location(event.path, event.row_group, event.column)}: {event.message}"
    if isinstance(event, Retried):
        return f"retrying in {event.wait:.1f} s: {event.error}"
    return None
