"""The history of a cache as text: a line for each run, and below it why it failed and which options it changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pqcache.console.terminal import print_line
from pqcache.console.text_table import print_table
from pqcache.store.history import DONE, result_of
from pqcache.units import format_seconds, format_size

_TITLES = ("time (UTC)", "command", "files", "fetched", "took", "snapshot", "version")
_RIGHT = ("fetched", "took")


def print_history(records: Sequence[Mapping[str, Any]]) -> None:
    """Print runs as a table, the newest last; a plain run fits 80 columns, so that snapshot names can be copied.

    Of a cache of a Delta or Iceberg table it has the versions too, which may be long.
    """
    if not records:
        print_line("no run yet")
        return
    titles = _TITLES if any(record.get("version") for record in records) else _TITLES[:-1]
    rows = [_cells(record)[: len(titles)] for record in records]
    print_table(titles, [(row, _notes(record)) for record, row in zip(records, rows, strict=True)], _RIGHT)


def _cells(record: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        str(record.get("time", ""))[:16].replace("T", " "),
        str(record.get("command", "")),
        did(record),
        format_size(record["fetched_bytes"]) if "fetched_bytes" in record else "-",
        format_seconds(record["seconds"]) if "seconds" in record else "-",
        str(record.get("snapshot") or "-"),
        str(record.get("version") or "-"),
    )


def did(record: Mapping[str, Any]) -> str:
    """Return what a run did in a few words: the numbers of new, changed and removed files, or what it came to."""
    result = result_of(record)
    if result != DONE:
        return result
    if "added" in record:
        signs = (("+", "added"), ("~", "changed"), ("-", "removed"))
        moved = [f"{sign}{record[name]:,}" for sign, name in signs if record.get(name)]
        if record.get("fetched_again") and record.get("command") != "repair":
            moved.append(f"{record['fetched_again']:,} again")
        made = "repaired" if record.get("command") == "repair" else "rewritten"
        moved = moved or [made if record.get("published") else "unchanged"]
        moved += ["(new source)"] if record.get("previous_source") else []
        return " ".join([*moved, *([f"({len(record['skipped'])} skipped)"] if record.get("skipped") else [])])
    if "built" in record:
        names = [f"+{name}" for name in record["built"] or ()] + [f"-{name}" for name in record.get("dropped") or ()]
        return " ".join(names) or "unchanged"
    if record.get("previous"):  # of a rollback
        moved = record["previous"] != record.get("snapshot")
        return f"from {str(record['previous']).rpartition('-')[2]}" if moved else "unchanged"
    if record["command"] in ("pin", "unpin"):
        return f"as {record['pinned']}" if record.get("pinned") else "done"
    return f"{len(record.get('collected', ())):,} removed"


def _notes(record: Mapping[str, Any]) -> list[str]:
    """Return the error of a run, and each option that it changed."""
    notes = [str(record["error"])] if record.get("error") else []
    changes = record.get("changes") or {}
    return [*notes, *(f"{name}: {_text(before)} -> {_text(after)}" for name, (before, after) in changes.items())]


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(str, value)) or "none"
    if isinstance(value, Mapping):
        return " ".join(f"{name}={text}" for name, text in value.items()) or "none"
    return "default" if value is None else str(value)
