"""Prints progress, reports and errors: as text, as JSON lines, or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TextIO

from pqcache.errors import PqcacheError
from pqcache.events import Advanced, Awaited, Damaged, Event, Listed, OnEvent, Retried, Started, Warned
from pqcache.store.urls import printable, printable_json
from pqcache.units import format_count, format_seconds, format_size

if TYPE_CHECKING:  # rich is slow to import: only tables and progress bars need it
    from rich.console import Console
    from rich.progress import TaskID

    from pqcache.store.gc import GcReport
    from pqcache.store.keys.command import IndexReport
    from pqcache.store.repartition.to_target import RepartitionReport
    from pqcache.store.serve.command import CacheServer
    from pqcache.store.sync.cache_run import SyncReport

_PROGRESS_SECONDS = 60.0  # between lines of progress where there is no terminal
_PHASE_TEXT = {
    "fetch": "fetching",
    "rewrite": "rewriting",
    "read": "reading footers",
    "verify": "verifying",
    "compare": "comparing",
    "index": "indexing",
    "measure": "measuring",
}


def print_line(text: str, stream: TextIO | None = None) -> None:
    """Print one line without markup to standard output, or to ``stream``; what controls a terminal is escaped."""
    stream = stream or sys.stdout
    stream.write(printable(text) + "\n")
    stream.flush()


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


@contextlib.contextmanager
def reporter(json_lines: bool, quiet: bool) -> Iterator[OnEvent]:
    """Yield an ``on_event`` that prints events as JSON, as progress bars or lines, or not at all."""
    if json_lines:
        yield _json_events
    elif quiet:
        yield lambda event: None
    elif sys.stderr.isatty():
        with _ProgressBars() as bars:
            yield bars
    else:
        yield _ProgressLines()


def print_json(value: Mapping[str, Any]) -> None:
    """Print one JSON object on a line of its own."""
    sys.stdout.write(printable_json(json.dumps(value, ensure_ascii=False, default=str)) + "\n")
    sys.stdout.flush()


def print_error(error: PqcacheError, json_lines: bool) -> None:
    """Print an error as one line to standard error, and with ``json_lines`` as an event to standard output."""
    if json_lines:
        parts = {"subject": error.subject, "reason": error.reason, "advice": error.advice}
        kind = type(error).__name__
        print_json({"event": "error", "kind": kind, "message": str(error), **parts, "exit_code": error.exit_code})
    label, message = "pqcache: error:", printable(" ".join(str(error).split()))
    if sys.stderr.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") not in (None, "dumb"):
        label = f"\x1b[1;31m{label}\x1b[0m"
    sys.stderr.write(f"{label} {message}\n")
    sys.stderr.flush()


def print_sync(report: SyncReport) -> None:
    """Print the report of a sync as one line."""
    changes = _changes(report)
    if report.dry_run:
        text = f"would sync: {changes}, {format_size(report.fetched_bytes)} to fetch"
        if report.shard is not None:
            text += f" for share {report.shard}"
        text += _newest(report)
        if report.rewritten:
            text += f", {_directories(report.rewritten)} to rewrite"
        text += _passed_over(report)
        print_line(f"{text} ({report.unchanged:,} unchanged)" if changes != "nothing to do" else changes)
        return
    held = f"{format_count(report.files, 'file')}, {format_count(report.rows, 'row')}, {format_size(report.bytes)}"
    if report.shard is not None:
        held += f", share {report.shard}"
    if report.version is not None:
        held += f", version {report.version}"
    held += _newest(report)
    if report.skipped:
        held += f"; {format_count(len(report.skipped), 'partition')} skipped"
    held += _passed_over(report)
    if report.published:
        text = f"synced {changes}, {format_size(report.fetched_bytes)} fetched"
        if report.rewritten:
            text += f", {_directories(report.rewritten)} rewritten"
        print_line(f"{text} in {format_seconds(report.seconds)}; {report.snapshot} holds {held}")
    else:
        print_line(f"nothing to do in {format_seconds(report.seconds)}; {report.snapshot} is current and holds {held}")


def _newest(report: SyncReport) -> str:
    if report.newest is None or report.newest_of is None:
        return ""
    return f", newest {report.newest:,} of {format_count(report.newest_of, 'partition')}"


def _passed_over(report: SyncReport) -> str:
    """Return how many files of the source were not taken, and why; nothing where all were."""
    passed = report.passed_over
    if passed is None or not (passed.hidden or passed.other or passed.where):
        return ""
    counts = ((passed.hidden, "hidden"), (passed.other, "not Parquet"), (passed.where, "outside of --where"))
    return f"; not taken: {', '.join(f'{count:,} {why}' for count, why in counts if count)}"


def print_repartition(report: RepartitionReport) -> None:
    """Print the report of a repartition as one line."""
    if report.dry_run:
        print_line(
            f"would rewrite {report.rewritten:,} of {_directories(report.directories)}, "
            f"{format_size(report.bytes_before)}{_kept(report)}"
        )
        return
    if report.snapshot is not None and not report.rewritten:
        print_line(f"nothing to do: all {_directories(report.directories)} already have these row groups")
        return
    text = (
        f"repartitioned {_directories(report.rewritten)} in {format_seconds(report.seconds)}: "
        f"{report.files_before:,} -> {format_count(report.files_after, 'file')}, "
        f"{report.row_groups_before:,} -> {format_count(report.row_groups_after, 'row group')}, "
        f"{format_size(report.bytes_before)} -> {format_size(report.bytes_after)}{_kept(report)}"
    )
    print_line(f"{text}; {report.snapshot} is current" if report.snapshot else f"{text}; in {report.target}")


def _kept(report: RepartitionReport) -> str:
    return f" ({report.kept:,} finished by an earlier run)" if report.kept else ""


def print_gc(report: GcReport) -> None:
    """Print the report of a gc as one line."""
    what = "would remove" if report.dry_run else "removed"
    removed = format_count(len(report.removed), "snapshot") if report.removed else "nothing"
    kept = f"{format_count(len(report.kept), 'snapshot')}: {', '.join(report.kept)}" if report.kept else "nothing"
    print_line(f"{what} {removed}, kept {kept}")


def run_server(server: CacheServer, quiet: bool) -> None:
    """Print where a server's caches are, one line for each, wait for its end, and print what it did."""
    with server, contextlib.suppress(KeyboardInterrupt):  # which is how a server ends
        for url in server.urls.values() if not quiet else ():
            print_line(f"serving {url} ({'with a token' if server.has_token else 'without a token'})")
        server.wait()
    if not quiet:
        requests, sent = format_count(server.counts.requests, "request"), format_size(server.counts.bytes)
        print_line(f"served {requests}, {sent} in {format_seconds(server.seconds)}")


def location(path: str, row_group: int | None, column: str | None) -> str:
    """Return a file, and a row group and a column of it where they are known, as text."""
    parts = [path, *([] if row_group is None else [f"row group {row_group}"])]
    return ", ".join([*parts, *([] if column is None else [f"column {column}"])])


def print_index(report: IndexReport) -> None:
    """Print what was built and removed, and a line for each key index."""
    done = [f"built {', '.join(report.built)}"] if report.built else []
    done += [f"removed {', '.join(report.dropped)}"] if report.dropped else []
    if done:
        print_line(f"{'; '.join(done)} in {format_seconds(report.seconds)}")
    for key in report.keys:
        held = f"{key.type}, {format_count(key.rows, 'row')}, {format_size(key.bytes)}"
        print_line(f"{key.column}: {held if key.damage is None else key.damage}")
    if not (done or report.keys):
        print_line(f"no key index; 'pqcache index {report.cache} --key COLUMN' builds one")


def print_history(records: Sequence[Mapping[str, Any]]) -> None:
    """Print a table of runs, the newest last; it fits 80 columns, so that snapshot names can be copied.

    Of a cache of a Delta or Iceberg table it has the versions too, which may be long.
    """
    if not records:
        print_line("no run yet")
        return
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    versions = ("version",) if any(record.get("version") for record in records) else ()
    for name in ("time (UTC)", "command", "files", "fetched", "took", "snapshot", *versions):
        table.add_column(name, justify="right" if name in ("fetched", "took") else "left", no_wrap=True)
    for record in records:
        known = "added" in record  # else the run was killed before it wrote its record
        table.add_row(
            str(record["time"])[:16].replace("T", " "),
            str(record["command"]),
            _files(record) if known else _without_files(record),
            format_size(record["fetched_bytes"]) if known else "-",
            format_seconds(record["seconds"]) if known else "-",
            str(record["snapshot"]),
            *(str(record.get("version") or "-") for _ in versions),
        )
    stdout_console().print(table)


def _without_files(record: Mapping[str, Any]) -> str:
    return f"from {str(record['previous']).rpartition('-')[2]}" if record.get("previous") else "killed"


def _files(record: Mapping[str, Any]) -> str:
    """Return the numbers of new, changed and removed files of a run."""
    signs = (("+", "added"), ("~", "changed"), ("-", "removed"))
    moved = [f"{sign}{record[name]:,}" for sign, name in signs if record[name]]
    made = "repaired" if record["command"] == "repair" else "rewritten"
    moved = moved or [made if record["published"] else "unchanged"]
    moved += ["(new source)"] if record.get("previous_source") else []
    moved += [f"({len(record['skipped'])} skipped)"] if record.get("skipped") else []
    return " ".join(moved)


def bar(console: Console, part: float, total: float, width: int) -> str:
    """Return a bar of up to ``width`` characters, at least a thin one if ``part`` is not 0."""
    full, thin = ("#", "|") if is_plain(console) else ("█", "▏")
    return full * round(width * part / max(1, total)) or (thin if part else "")


def is_plain(console: Console) -> bool:
    """Return whether to print ASCII only; Python writes UTF-8 in the C locale too."""
    name = next((os.environ[key] for key in ("LC_ALL", "LC_CTYPE", "LANG") if os.environ.get(key)), "")
    return name in ("C", "POSIX") or console.encoding not in ("utf-8", "utf8")


def _changes(report: SyncReport) -> str:
    parts = [
        format_count(count, f"{what} file")
        for count, what in (
            (report.added, "new"),
            (report.changed, "changed"),
            (report.removed, "removed"),
        )
        if count
    ]
    if parts:
        return ", ".join(parts)
    return "no changed file" if report.fetched_bytes or report.rewritten else "nothing to do"


def _directories(count: int) -> str:
    return format_count(count, "directory", "directories")


def _json_events(event: Event) -> None:
    if not isinstance(event, Advanced):
        print_json({"event": type(event).__name__.lower(), **asdict(event)})


def _message(event: Event) -> str | None:
    """Return the line to print for an event that needs attention, or None."""
    if isinstance(event, Warned):
        return f"warning: {event.message}"
    if isinstance(event, Damaged):
        return f"damaged: {location(event.path, event.row_group, event.column)}: {event.message}"
    if isinstance(event, Retried):
        return f"retrying in {event.wait:.1f} s: {event.error}"
    return None


class _ProgressBars:
    """Shows progress bars on a terminal, and warnings above them."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self._progress = Progress(
            TextColumn("{task.description:<16}"),
            BarColumn(bar_width=None),
            TextColumn("{task.percentage:>3.0f} %"),
            TextColumn("{task.fields[amount]}{task.fields[awaited]}"),
            TimeRemainingColumn(compact=True),
            console=stderr_console(),
            transient=True,
        )
        self._tasks: dict[str, TaskID] = {}
        self._units: dict[str, str] = {}

    def __enter__(self) -> _ProgressBars:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def __call__(self, event: Event) -> None:
        message = _message(event)
        if message is not None:
            self._progress.console.print(escape(message), style="yellow")
        elif isinstance(event, Started):
            self._units[event.phase] = event.unit
            if event.total:
                self._tasks[event.phase] = self._progress.add_task(
                    _PHASE_TEXT[event.phase], total=event.total, amount="", awaited=""
                )
        elif isinstance(event, Advanced) and event.phase in self._tasks:
            task = self._tasks[event.phase]
            self._progress.advance(task, event.amount)
            state = self._progress.tasks[self._progress.task_ids.index(task)]
            self._progress.update(task, amount=_amount(state.completed, self._units[event.phase]))
        elif isinstance(event, Awaited) and "fetch" in self._tasks:
            awaited = f", readers wait for {format_size(event.bytes)}" if event.bytes else ""
            self._progress.update(self._tasks["fetch"], awaited=awaited)
        elif isinstance(event, Listed):
            files = format_count(event.files, "file")
            self._progress.console.print(f"source holds {files}, {format_size(event.bytes)}", style="dim")


class _ProgressLines:
    """Prints a line of progress per minute where there is no terminal, and warnings at once."""

    def __init__(self) -> None:
        self._next = time.monotonic() + _PROGRESS_SECONDS
        self._totals: dict[str, tuple[int, str]] = {}
        self._done: dict[str, int] = {}
        self._lock = threading.Lock()

    def __call__(self, event: Event) -> None:
        message = _message(event)
        if message is not None:
            print_line(message, sys.stderr)
        elif isinstance(event, Started):
            self._totals[event.phase] = (event.total, event.unit)
            self._done[event.phase] = 0
        elif isinstance(event, Advanced) and event.phase in self._totals:
            with self._lock:
                self._done[event.phase] += event.amount
                if time.monotonic() < self._next:
                    return
                self._next = time.monotonic() + _PROGRESS_SECONDS
            total, unit = self._totals[event.phase]
            print_line(
                f"{_PHASE_TEXT[event.phase]}: {_amount(self._done[event.phase], unit)} of {_amount(total, unit)}",
                sys.stderr,
            )


def _amount(amount: float, unit: str) -> str:
    return format_size(amount) if unit == "bytes" else format_count(int(amount), unit.removesuffix("s"))
