"""The report of a sync as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pqcache.console.terminal import directories, print_line, print_sentence
from pqcache.units import format_count, format_seconds, format_size

if TYPE_CHECKING:
    from pqcache.store.sync.cache_run import SyncReport

_NAMED = 10  # partitions


def print_sync(report: SyncReport, verbose: bool = False) -> None:
    """Print the report of a sync as one line, in which partitions are named; with ``verbose`` each has a line.

    A dry run has a line for each of the first ten partitions.
    """
    print_sentence(summary_line(report))
    shown = len(report.touched) if verbose else _NAMED if report.dry_run else 0
    for change in report.touched[:shown]:
        print_line(f"  {change.directory or 'the top directory'}: {change.text}")
    if 0 < shown < len(report.touched):
        print_line(f"  and {len(report.touched) - shown:,} more; --verbose shows all")


def summary_line(report: SyncReport) -> str:
    """Return what a sync did, or would do, in one line."""
    changes = _changes(report)
    if report.dry_run:
        if not changes and not report.rewritten:
            return f"nothing to do{_skipped(report)}{_passed_over(report)}"
        text = f"would sync: {changes or 'no changed file'}, {format_size(report.fetched_bytes)} to fetch"
        if report.shard is not None:
            text += f" for share {report.shard}"
        text += _newest(report)
        if report.rewritten:
            text += f", {directories(report.rewritten)} to rewrite"
        return f"{text}{_skipped(report)}{_passed_over(report)} ({report.unchanged:,} unchanged)"
    held = f"{format_count(report.files, 'file')}, {format_count(report.rows, 'row')}, {format_size(report.bytes)}"
    if report.shard is not None:
        held += f", share {report.shard}"
    if report.version is not None:
        held += f", version {report.version}"
    held += _newest(report) + _skipped(report) + _passed_over(report)
    if report.published:
        text = f"synced {changes}{_named(report)}, {format_size(report.fetched_bytes)} fetched"
        if report.rewritten:
            text += f", {directories(report.rewritten)} rewritten"
        if not changes:
            rewritten = f"rewrote {directories(report.rewritten)}{_named(report)}"
            text = rewritten if report.rewritten else "made the snapshot again from the same files"
        return f"{text} in {format_seconds(report.seconds)}; {report.snapshot} holds {held}"
    return f"nothing to do in {format_seconds(report.seconds)}; {report.snapshot} is current and holds {held}"


def _named(report: SyncReport) -> str:
    """Return the names of the first ten partitions that have changed, if there are partitions."""
    names = [change.directory for change in report.touched if change.directory]
    if not names:
        return ""
    more = f" and {len(names) - _NAMED:,} more" if len(names) > _NAMED else ""
    return f" in {', '.join(names[:_NAMED])}{more}"


def _newest(report: SyncReport) -> str:
    if report.newest is None or report.newest_of is None:
        return ""
    return f", newest {report.newest:,} of {format_count(report.newest_of, 'partition')}"


def _skipped(report: SyncReport) -> str:
    return f"; {format_count(len(report.skipped), 'partition')} skipped" if report.skipped else ""


def _passed_over(report: SyncReport) -> str:
    """Return how many files of the source were not taken, and why; nothing where all were."""
    passed = report.passed_over
    if passed is None:
        return ""
    counts = (
        (passed.hidden, "hidden"),
        (passed.other, "not Parquet"),
        (passed.where, "outside of --where"),
        (passed.waiting, "waiting for --marker or --settle"),
        (passed.links, "under another name"),
    )
    shown = ", ".join(f"{count:,} {why}" for count, why in counts if count)
    return f"; not taken: {shown}" if shown else ""


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
    parts += [f"{format_count(report.fetched_again, 'file')} again"] if report.fetched_again else []
    return ", ".join(parts)
