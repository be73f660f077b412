"""Snapshots, pins and rollbacks as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pqcache.units import format_count, format_size

if TYPE_CHECKING:
    from pqcache.store.snapshots.command import PinReport, SnapshotView
    from pqcache.store.snapshots.rollback import RollbackReport
    from pqcache.store.tables_of_root import RemoveReport


def print_snapshots(views: Sequence[SnapshotView]) -> None:
    """Print a table of snapshots, the newest last."""
    from pqcache.console.terminal import print_line
    from pqcache.console.text_table import print_table

    if not views:
        print_line("no snapshot yet")
        return
    versions = ("version",) if any(view.version for view in views) else ()
    rows = []
    for view in views:
        state = ["current"] if view.current else []
        state += [f"pinned as {view.name}" if view.name else "pinned"] if view.pinned else []
        cells = (
            view.snapshot,
            (view.created or "-")[:16].replace("T", " "),
            "-" if view.rows is None else f"{view.rows:,}",
            "-" if view.bytes is None else format_size(view.bytes),
            *(view.version or "-" for _ in versions),
            "?" if view.leases is None else str(view.leases),
            ", ".join(state),
        )
        rows.append((cells, [view.damage] if view.damage else []))
    titles = ("snapshot", "made (UTC)", "rows", "bytes", *versions, "readers", "")
    print_table(titles, rows, right=("rows", "bytes", "readers"))


def print_pin(report: PinReport) -> None:
    """Print what was pinned as one line."""
    from pqcache.console.terminal import print_line

    name = report.pins[report.snapshot]
    number = format_count(len(report.pins), "snapshot")
    print_line(f"pinned {report.snapshot}{f' as {name}' if name else ''}; {number} pinned")


def print_rollback(report: RollbackReport) -> None:
    """Print what was done as one line."""
    from pqcache.console.terminal import print_line

    if report.snapshot == report.previous:
        print_line(f"nothing to do: {report.snapshot} is current")
        return
    after = "the next sync publishes what the source holds then"
    print_line(f"rolled back from {report.previous}; {report.snapshot} is current; {after}")


def held_text(report: RemoveReport) -> str:
    """What a cache holds."""
    return f"{format_count(len(report.snapshots), 'snapshot')}, {format_size(report.bytes)}"
