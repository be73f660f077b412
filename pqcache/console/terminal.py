"""The only module that prints: for a person (rich), as JSON lines, or quietly."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TextIO

from pqcache.errors import PqcacheError
from pqcache.events import Advanced, Damaged, Event, Listed, OnEvent, Retried, Started, Warned
from pqcache.units import format_count, format_seconds, format_size

if TYPE_CHECKING:  # rich takes its time to import: only what is more than plain lines waits for it
    from rich.console import Console
    from rich.progress import TaskID

    from pqcache.store.gc import GcReport
    from pqcache.store.keys.command import IndexReport
    from pqcache.store.repartition.dense_columns import Proposal
    from pqcache.store.repartition.to_target import RepartitionReport
    from pqcache.store.sync.run import SyncReport
    from pqcache.store.verify.command import VerifyReport

_LINE_SECONDS = 60.0  # how often a run without a terminal says where it is
_VERB = {
    "fetch": "fetching",
    "rewrite": "rewriting",
    "read": "reading footers",
    "verify": "verifying",
    "index": "indexing",
    "measure": "measuring",
}


def say(text: str, stream: TextIO | None = None) -> None:
    """Print one line as it is: a result, or with ``stream`` what there is to say about a run."""
    stream = stream or sys.stdout
    stream.write(text + "\n")
    stream.flush()


def out() -> Console:
    """Return the console for tables and styles; it wraps nothing when it is not a terminal."""
    from rich.console import Console

    if sys.stdout.isatty():
        return Console(highlight=False)
    return Console(highlight=False, soft_wrap=True, width=int(os.environ.get("COLUMNS") or 200))


def err() -> Console:
    """Return the same for progress and errors."""
    from rich.console import Console

    return Console(stderr=True, highlight=False, soft_wrap=True)


@contextlib.contextmanager
def reporter(json_lines: bool, quiet: bool) -> Iterator[OnEvent]:
    """Yield an ``on_event`` that shows a run's events the way its user wants them."""
    if json_lines:
        yield _json_events
    elif quiet:
        yield lambda event: None
    elif sys.stderr.isatty():
        with _Bars() as bars:
            yield bars
    else:
        yield _Lines()


def print_json(value: Mapping[str, Any]) -> None:
    """Print one JSON object on a line of its own."""
    sys.stdout.write(json.dumps(value, ensure_ascii=False, default=str) + "\n")
    sys.stdout.flush()


def print_error(error: PqcacheError, json_lines: bool) -> None:
    """Print an error as one line, and as an event where events are wanted."""
    if json_lines:
        about = {"subject": error.subject, "reason": error.reason, "advice": error.advice}
        kind = type(error).__name__
        print_json({"event": "error", "kind": kind, "message": str(error), **about, "exit_code": error.exit_code})
    message = " ".join(str(error).split())
    if sys.stderr.isatty():
        from rich.markup import escape

        err().print(f"[bold red]pqcache: error:[/] {escape(message)}")
    else:
        say(f"pqcache: error: {message}", sys.stderr)


def print_sync(report: SyncReport) -> None:
    """Print the one line of a sync."""
    moved = _changes(report)
    if report.dry_run:
        text = f"would sync: {moved}, {format_size(report.fetched_bytes)} to fetch"
        if report.shard is not None:
            text += f" for share {report.shard}"
        if report.rewritten:
            text += f", {_directories(report.rewritten)} to rewrite"
        say(f"{text} ({report.unchanged:,} unchanged)" if moved != "nothing to do" else moved)
        return
    held = f"{format_count(report.files, 'file')}, {format_count(report.rows, 'row')}, {format_size(report.bytes)}"
    if report.shard is not None:
        held += f", share {report.shard}"
    if report.published:
        text = f"synced {moved}, {format_size(report.fetched_bytes)} fetched"
        if report.rewritten:
            text += f", {_directories(report.rewritten)} rewritten"
        say(f"{text} in {format_seconds(report.seconds)}; {report.snapshot} holds {held}")
    else:
        say(f"nothing to do in {format_seconds(report.seconds)}; {report.snapshot} is current and holds {held}")


def print_repartition(report: RepartitionReport) -> None:
    """Print the one line of a repartition."""
    if report.dry_run:
        say(
            f"would rewrite {report.rewritten:,} of {_directories(report.directories)}, "
            f"{format_size(report.bytes_before)}{_kept(report)}"
        )
        return
    if report.snapshot is not None and not report.rewritten:
        say(f"nothing to do: all {_directories(report.directories)} are cut this way already")
        return
    text = (
        f"repartitioned {_directories(report.rewritten)} in {format_seconds(report.seconds)}: "
        f"{report.files_before:,} -> {format_count(report.files_after, 'file')}, "
        f"{report.row_groups_before:,} -> {format_count(report.row_groups_after, 'row group')}, "
        f"{format_size(report.bytes_before)} -> {format_size(report.bytes_after)}{_kept(report)}"
    )
    say(f"{text}; {report.snapshot} is current" if report.snapshot else f"{text}; in {report.target}")


def _kept(report: RepartitionReport) -> str:
    return f" ({report.kept:,} finished by an earlier run)" if report.kept else ""


def print_gc(report: GcReport) -> None:
    """Print the one line of a gc."""
    what = "would remove" if report.dry_run else "removed"
    removed = format_count(len(report.removed), "snapshot") if report.removed else "nothing"
    kept = f"{format_count(len(report.kept), 'snapshot')}: {', '.join(report.kept)}" if report.kept else "nothing"
    say(f"{what} {removed}, kept {kept}")


def place_of(path: str, row_group: int | None, column: str | None) -> str:
    """Return where something is, for a person."""
    parts = [path, *([] if row_group is None else [f"row group {row_group}"])]
    return ", ".join([*parts, *([] if column is None else [f"column {column}"])])


def print_verify(report: VerifyReport) -> None:
    """Print what was checked and found well; damage has been told as it was found."""
    for name, why in report.unread.items():
        say(f"not compared: column {name}: {why}")
    for path in (report.changed or ())[:20]:
        say(f"changed at the source: {path}")
    if len(report.changed or ()) > 20:
        say(f"changed at the source: … {len(report.changed or ()) - 20:,} more")
    how = "every page" if report.deep else "sizes, footers and index"
    held = f"{format_count(report.files, 'file')}, {format_count(report.rows, 'row')}, {format_size(report.bytes)}"
    text = f"{report.snapshot}: {how} of {held} checked in {format_seconds(report.seconds)}"
    if report.deep and report.unrecorded:
        text += f"; {format_count(report.unrecorded, 'file')} without a recorded checksum"
    damaged = format_count(len({item.path for item in report.damage}), "damaged file")
    if report.repaired is not None:
        text += f"; {damaged} fetched again, {report.repaired} is current"
    say(f"{text}; {'all is well' if not report.damage else damaged}" if report.repaired is None else text)


def print_index(report: IndexReport) -> None:
    """Print what was built and dropped, and a line for each key index."""
    done = [f"built {', '.join(report.built)}"] if report.built else []
    done += [f"dropped {', '.join(report.dropped)}"] if report.dropped else []
    if done:
        say(f"{'; '.join(done)} in {format_seconds(report.seconds)}")
    for key in report.keys:
        held = f"{key.type}, {format_count(key.rows, 'row')}, {format_size(key.bytes)}"
        say(f"{key.column}: {held if key.damage is None else key.damage}")
    if not (done or report.keys):
        say(f"no key index; 'pqcache index {report.cache} --key COLUMN' makes one")


def print_history(records: Sequence[Mapping[str, Any]]) -> None:
    """Print a table of runs, the newest last; it fits 80 columns, so that names of snapshots can be copied."""
    if not records:
        say("no run yet")
        return
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for name in ("time (UTC)", "command", "files", "fetched", "took", "snapshot"):
        table.add_column(name, justify="right" if name in ("fetched", "took") else "left", no_wrap=True)
    for record in records:
        known = "added" in record  # else the run was killed before it could say
        table.add_row(
            str(record["time"])[:16].replace("T", " "),
            str(record["command"]),
            _files(record) if known else "killed",
            format_size(record["fetched_bytes"]) if known else "-",
            format_seconds(record["seconds"]) if known else "-",
            str(record["snapshot"]),
        )
    out().print(table)


def _files(record: Mapping[str, Any]) -> str:
    """Return what a run did to the files: new, changed and removed ones, or that nothing was new."""
    signs = (("+", "added"), ("~", "changed"), ("-", "removed"))
    moved = [f"{sign}{record[name]:,}" for sign, name in signs if record[name]]
    return " ".join(moved) or ("rewritten" if record["published"] else "as before")


def print_proposals(source: str, dest: object, proposals: Sequence[Proposal]) -> None:
    """Print which columns would gain from being dense, and the command that makes them so."""
    if not proposals:
        say("no list column has one length in all rows, as far as footers and first rows tell")
        return
    for item in proposals:
        smaller = f", or {item.narrow} with --narrow" if item.narrow != item.dense else ""
        say(f"{item.column}: {item.type}, can be stored as {item.dense}{smaller}")
    from pqcache.store.cache import cache_at  # with pyarrow, which an error need not wait for

    where = [str(dest)] if dest is not None else [] if cache_at(source) is not None else ["DEST"]
    words = ["pqcache", "repartition", source, *where]
    words += [word for item in proposals for word in ("--dense", item.column)]
    words += ["--narrow"] if any(item.narrow != item.dense for item in proposals) else []
    say(f"to do that: {shlex.join(words)}")


def bar(console: Console, part: float, whole: float, width: int) -> str:
    """Return a bar of up to ``width`` characters; one that is not 0 can be seen."""
    full, thin = ("#", "|") if is_plain(console) else ("█", "▏")
    return full * round(width * part / max(1, whole)) or (thin if part else "")


def is_plain(console: Console) -> bool:
    """Return whether only ASCII is wanted: Python writes UTF-8 in the C locale too."""
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


def _note(event: Event) -> str | None:
    """Return the line that a person should see about an event, whatever else is shown."""
    if isinstance(event, Warned):
        return f"warning: {event.message}"
    if isinstance(event, Damaged):
        return f"damaged: {place_of(event.path, event.row_group, event.column)}: {event.message}"
    if isinstance(event, Retried):
        return f"trying again in {event.wait:.1f} s: {event.error}"
    return None


class _Bars:
    """Progress bars on a terminal."""

    def __init__(self) -> None:
        from rich.markup import escape
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self._escape = escape
        self._progress = Progress(
            TextColumn("{task.description:<16}"),
            BarColumn(bar_width=None),
            TextColumn("{task.percentage:>3.0f} %"),
            TextColumn("{task.fields[amount]}"),
            TimeRemainingColumn(compact=True),
            console=err(),
            transient=True,
        )
        self._tasks: dict[str, TaskID] = {}
        self._units: dict[str, str] = {}

    def __enter__(self) -> _Bars:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def __call__(self, event: Event) -> None:
        note = _note(event)
        if note is not None:
            self._progress.console.print(self._escape(note), style="yellow")
        elif isinstance(event, Started):
            self._units[event.phase] = event.unit
            if event.total:
                self._tasks[event.phase] = self._progress.add_task(_VERB[event.phase], total=event.total, amount="")
        elif isinstance(event, Advanced) and event.phase in self._tasks:
            task = self._tasks[event.phase]
            self._progress.advance(task, event.amount)
            state = self._progress.tasks[self._progress.task_ids.index(task)]
            self._progress.update(task, amount=_amount(state.completed, self._units[event.phase]))
        elif isinstance(event, Listed):
            files = format_count(event.files, "file")
            self._progress.console.print(f"source holds {files}, {format_size(event.bytes)}", style="dim")


class _Lines:
    """A line a minute where there is no terminal, and warnings at once."""

    def __init__(self) -> None:
        self._next = time.monotonic() + _LINE_SECONDS
        self._totals: dict[str, tuple[int, str]] = {}
        self._done: dict[str, int] = {}
        self._lock = threading.Lock()

    def __call__(self, event: Event) -> None:
        note = _note(event)
        if note is not None:
            say(note, sys.stderr)
        elif isinstance(event, Started):
            self._totals[event.phase] = (event.total, event.unit)
            self._done[event.phase] = 0
        elif isinstance(event, Advanced) and event.phase in self._totals:
            with self._lock:
                self._done[event.phase] += event.amount
                if time.monotonic() < self._next:
                    return
                self._next = time.monotonic() + _LINE_SECONDS
            total, unit = self._totals[event.phase]
            say(f"{_VERB[event.phase]}: {_amount(self._done[event.phase], unit)} of {_amount(total, unit)}", sys.stderr)


def _amount(amount: float, unit: str) -> str:
    return format_size(amount) if unit == "bytes" else f"{int(amount):,} {unit}"
