"""The state of many caches as text."""

from __future__ import annotations

from datetime import datetime, timezone

from pqcache.console.terminal import print_line
from pqcache.console.text_table import print_table
from pqcache.store.history import DONE, RUNNING_NOW
from pqcache.store.status import CacheStatus, StatusReport
from pqcache.units import format_count, format_seconds, format_size

_TITLES = ("cache", "rows", "on disk", "age", "last run", "next due", "in use", "source")
_RIGHT = ("rows", "on disk", "age", "in use")


def print_status(report: StatusReport) -> None:
    """Print a line for each cache, and how much all of them take; times are those of this machine's clock."""
    names = [item.cache.rpartition("/")[2] for item in report.caches]
    shown = [item.cache if names.count(name) > 1 else name for item, name in zip(report.caches, names, strict=True)]
    rows = [(_cells(name, item), _notes(item)) for name, item in zip(shown, report.caches, strict=True)]
    print_table(_TITLES, rows, _RIGHT)
    print_line(f"{format_count(len(rows), 'cache')}, {format_size(report.disk_bytes)} on disk")


def _cells(name: str, item: CacheStatus) -> tuple[str, ...]:
    return (
        name,
        "-" if item.rows is None else f"{item.rows:,}",
        "-" if item.disk_bytes is None else format_size(item.disk_bytes),
        "-" if item.age is None else format_seconds(item.age),
        "-" if item.last_run is None else f"{_clock(item.last_run)} {item.last_result}",
        "-" if item.next_due is None else _clock(item.next_due),
        str(len(item.leased)) if item.leased else "-",
        item.source or "-",
    )


def _notes(item: CacheStatus) -> list[str]:
    if item.error is not None:
        return [item.error]
    notes = [item.last_error] if item.last_error and item.last_result not in (DONE, RUNNING_NOW) else []
    if item.skipped:
        more = f" and {len(item.skipped) - 3:,} more" if len(item.skipped) > 3 else ""
        notes.append(f"{format_count(len(item.skipped), 'partition')} skipped: {', '.join(item.skipped[:3])}{more}")
    return notes


def _clock(text: str) -> str:
    """Return a time as short as a person needs it: that of today without its date."""
    moment, now = datetime.fromisoformat(text).astimezone(), datetime.now(timezone.utc).astimezone()
    return f"{moment:%H:%M}" if moment.date() == now.date() else f"{moment:%m-%d %H:%M}"
