"""The reports of most commands as plain lines, which need no terminal and no library."""

from __future__ import annotations

import contextlib
import shlex
import shutil
import sys
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from pqcache.console.terminal import print_line, print_sentence
from pqcache.options import Remembered, options_of
from pqcache.store.history import DONE, ROLLBACK, result_of
from pqcache.store.urls import quoted
from pqcache.units import format_count, format_seconds, format_size

if TYPE_CHECKING:
    from pqcache.store.cache_root import RemoveReport
    from pqcache.store.gc import GcReport
    from pqcache.store.key_index import IndexReport
    from pqcache.store.repartition.dense_proposals import Proposal
    from pqcache.store.repartition.to_target import RepartitionReport
    from pqcache.store.serve import CacheServer
    from pqcache.store.snapshots import PinReport, RollbackReport, SnapshotView
    from pqcache.store.status import CacheStatus, StatusReport
    from pqcache.store.sync.cache_run import SyncReport
    from pqcache.store.verify import VerifyReport

Row = tuple[Sequence[str], Sequence[str]]  # the cells, and lines that stand below them


def print_table(titles: Sequence[str], rows: Sequence[Row], right: Collection[str] = ()) -> None:
    """Print rows below their titles; columns titled in ``right`` are right-aligned.

    If a terminal is too narrow, the last column stands below each row.
    """
    lines = [titles, *(cells for cells, _ in rows)]
    widths = [max(len(line[at]) for line in lines) for at in range(len(titles))]
    if sys.stdout.isatty() and sum(widths) + 2 * len(widths) - 2 > shutil.get_terminal_size().columns:
        rows = [(cells[:-1], [f"{titles[-1]}: {cells[-1]}".removeprefix(": "), *notes]) for cells, notes in rows]
        titles, widths = titles[:-1], widths[:-1]
    for cells, notes in ((titles, ()), *rows):
        padded = [
            cell.rjust(width) if title in right else cell.ljust(width)
            for title, cell, width in zip(titles, cells, widths, strict=True)
        ]
        print_line("  ".join(padded).rstrip())
        for note in notes:
            print_sentence(note, indent="    ")


_NAMED = 10  # partitions


def print_sync(report: SyncReport, verbose: bool = False) -> None:
    """Print the report of a sync as one line that names partitions; with ``verbose`` each has a line of its own.

    A dry run has a line for each of the first ten partitions.
    """
    print_sentence(summary_line(report))
    shown = len(report.touched) if verbose else _NAMED if report.dry_run else 0
    for change in report.touched[:shown]:
        why = f": {change.reason}" if change.reason else ""
        print_line(f"  {change.directory or 'the top directory'}: {change.text}{why}")
    if 0 < shown < len(report.touched):
        print_line(f"  and {len(report.touched) - shown:,} more; --verbose shows all")


def summary_line(report: SyncReport) -> str:
    """A sync in one line."""
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
    if report.candidate is not None:
        did = f"{changes or 'nothing new'}{_named(report)}, {format_size(report.fetched_bytes)} fetched"
        how = f"'pqcache rollback {quoted(report.cache)} --release' publishes it"
        waits = f"{report.candidate} waits and holds {held}; {how}"
        return f"held, so nothing is published: {did} in {format_seconds(report.seconds)}; {waits}"
    return f"nothing to do in {format_seconds(report.seconds)}; {report.snapshot} is current and holds {held}"


def _named(report: SyncReport) -> str:
    """The first ten partitions with changed files, or those only rewritten if there are none."""
    changed = [change for change in report.touched if change.text != "rewritten"]
    names = [change.directory for change in changed or report.touched if change.directory]
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
    """How many source files were not taken, and why."""
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


_SHOWN = 20  # files of a list


def print_verify(report: VerifyReport) -> None:
    """Print the result; damage was printed when it was found."""
    for name, reason in report.unread.items():
        print_line(f"not compared: column {name}: {reason}")
    for path in (report.changed or ())[:_SHOWN]:
        print_line(f"changed at the source: {path}")
    if len(report.changed or ()) > _SHOWN:
        print_line(f"changed at the source: … {len(report.changed or ()) - _SHOWN:,} more")
    for item in report.skipped:
        what = "its old version is kept" if item["kept"] else "left out"
        print_line(f"not as at the source: partition {item['partition']}: {what}: {item['reason']}")
    checked = "every page" if report.deep else "sizes, footers and index"
    held = f"{format_count(report.files, 'file')}, {format_count(report.rows, 'row')}, {format_size(report.bytes)}"
    text = f"{report.snapshot}: {checked} of {held} checked in {format_seconds(report.seconds)}"
    damaged = format_count(len({item.path for item in report.damage}), "damaged file")
    if report.repaired is not None:
        _print_repaired(report)
        text += f"; {damaged} repaired, {report.repaired} is current"
    print_line(f"{text}; {damaged if report.damage else 'no damage'}" if report.repaired is None else text)


def _print_repaired(report: VerifyReport) -> None:
    left = {item.path for item in report.left}
    paths = sorted({item.path for item in report.damage} - left)
    for path in paths[:_SHOWN]:
        print_line(f"repaired: {path}, {'built' if path.startswith('_pqcache/') else 'fetched'} again")
    if len(paths) > _SHOWN:
        print_line(f"repaired: … {len(paths) - _SHOWN:,} more")


_RUN_TITLES = ("time (UTC)", "command", "files", "fetched", "took", "snapshot", "version")
_RUN_RIGHT = ("fetched", "took")


def print_history(records: Sequence[Mapping[str, Any]]) -> None:
    """Print runs as a table, the newest last; a plain run fits 80 columns, so that snapshot names can be copied.

    For a Delta or Iceberg table it also shows versions, which may be long.
    """
    if not records:
        print_line("no run yet")
        return
    titles = _RUN_TITLES if any(record.get("version") for record in records) else _RUN_TITLES[:-1]
    rows = [_run_cells(record)[: len(titles)] for record in records]
    print_table(titles, [(row, _run_notes(record)) for record, row in zip(records, rows, strict=True)], _RUN_RIGHT)


def _run_cells(record: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        str(record.get("time", ""))[:16].replace("T", " "),
        str(record.get("command", "")),
        did(record),
        format_size(record["fetched_bytes"]) if "fetched_bytes" in record else "-",
        format_seconds(record["seconds"]) if "seconds" in record else "-",
        str(record.get("candidate") or record.get("snapshot") or "-"),
        str(record.get("version") or "-"),
    )


def did(record: Mapping[str, Any]) -> str:
    """A run in a few words: the numbers of new, changed and removed files, or its result."""
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
        moved += ["(not published)"] if record.get("candidate") else []
        return " ".join([*moved, *([f"({len(record['skipped'])} skipped)"] if record.get("skipped") else [])])
    if "built" in record:
        names = [f"+{name}" for name in record["built"] or ()] + [f"-{name}" for name in record.get("dropped") or ()]
        return " ".join(names) or "unchanged"
    if record["command"] == ROLLBACK:
        if record.get("previous") == record.get("snapshot"):
            return "unchanged"
        return f"from {str(record.get('previous') or 'nothing').rpartition('-')[2]}"
    if record["command"] in ("pin", "unpin"):
        return f"as {record['pinned']}" if record.get("pinned") else "done"
    return f"{len(record.get('collected', ())):,} removed"


def _run_notes(record: Mapping[str, Any]) -> list[str]:
    notes = [str(record["error"])] if record.get("error") else []
    changes, touched = record.get("changes") or {}, record.get("touched") or []
    notes += [f"{item['directory'] or 'the top directory'}: {item.get('reason', '')}" for item in touched[:3]]
    if len(touched) > 3:
        more = record.get("touched_partitions", len(touched)) - 3
        notes.append(f"and {format_count(more, 'more partition')}")
    return [
        *notes,
        *(f"{name}: {_value_text(name, old)} -> {_value_text(name, new)}" for name, (old, new) in changes.items()),
    ]


def _value_text(name: str, value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(str, value)) or "none"
    if isinstance(value, Mapping):
        return " ".join(f"{name}={text}" for name, text in value.items()) or "none"
    if isinstance(value, int | float) and (option := options_of(Remembered).get(name)):
        value = option.kind.show(value)  # sizes and durations as they were given
    return "default" if value is None else str(value)


def print_snapshots(views: Sequence[SnapshotView]) -> None:
    """Print a table of snapshots, the newest last."""
    if not views:
        print_line("no snapshot yet")
        return
    versions = ("version",) if any(view.version for view in views) else ()
    rows = []
    for view in views:
        state = ["current"] if view.current else ["candidate"] if view.candidate else []
        state += [f"pinned as {view.name}" if view.name else "pinned"] if view.pinned else []
        cells = (
            view.snapshot,
            (view.created or "-")[:16].replace("T", " "),
            "-" if view.rows is None else f"{view.rows:,}",
            "-" if view.bytes is None else format_size(view.bytes),
            format_size(view.own_bytes),
            *(view.version or "-" for _ in versions),
            "?" if view.leases is None else str(view.leases),
            ", ".join(state),
        )
        rows.append((cells, [view.damage] if view.damage else []))
    titles = ("snapshot", "made (UTC)", "rows", "bytes", "alone", *versions, "readers", "")
    print_table(titles, rows, right=("rows", "bytes", "alone", "readers"))
    if replaced := [view.replaced_bytes for view in views if view.replaced_bytes is not None]:
        each = format_size(sum(replaced) // len(replaced))
        of = "sync" if len(replaced) == 1 else f"{len(replaced):,} syncs"
        print_line(f"each additional snapshot in --keep takes about {each}: as much as the last {of} replaced")


def print_pin(report: PinReport) -> None:
    name = report.pins[report.snapshot]
    number = format_count(len(report.pins), "snapshot")
    print_line(f"pinned {report.snapshot}{f' as {name}' if name else ''}; {number} pinned")


def print_unpin(report: PinReport) -> None:
    freed = f"; the next sync or gc frees {format_size(report.removable_bytes)}" if report.removable_bytes else ""
    print_line(f"unpinned {report.snapshot}{freed}")


def print_rollback(report: RollbackReport) -> None:
    after = "the next sync publishes the source's state again"
    if report.hold:
        until = f"'pqcache rollback {quoted(report.cache)} --release'"
        after = f"held since {report.hold}: syncs publish nothing until {until}"
    if report.published:
        before = f"in place of {report.previous}" if report.previous else "as the first snapshot"
        print_line(f"published {report.snapshot} {before}; {after}")
    elif report.snapshot == report.previous:
        print_line(f"{report.snapshot} is current as before; {after}")
    else:
        print_line(f"rolled back from {report.previous}; {report.snapshot} is current; {after}")


def held_text(report: RemoveReport) -> str:
    return f"{format_count(len(report.snapshots), 'snapshot')}, {format_size(report.bytes)}"


_STATUS_TITLES = ("cache", "rows", "on disk", "age", "last run", "next due", "in use", "source")
_STATUS_RIGHT = ("rows", "on disk", "age", "in use")


def print_status(report: StatusReport) -> None:
    """Print a line for each cache and the disk space of all; times are local."""
    names = [item.cache.rpartition("/")[2] for item in report.caches]
    shown = [item.cache if names.count(name) > 1 else name for item, name in zip(report.caches, names, strict=True)]
    rows = [(_status_cells(name, item), _status_notes(item)) for name, item in zip(shown, report.caches, strict=True)]
    print_table(_STATUS_TITLES, rows, _STATUS_RIGHT)
    print_line(f"{format_count(len(rows), 'cache')}, {format_size(report.disk_bytes)} on disk")


def _status_cells(name: str, item: CacheStatus) -> tuple[str, ...]:
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


def _status_notes(item: CacheStatus) -> list[str]:
    if item.running is None:
        return list(item.reasons)
    phase = f", {item.running['phase']}" if item.running["phase"] else ""
    return [f"running: {item.running['command']} since {_clock(str(item.running['began']))}{phase}", *item.reasons]


def _clock(text: str) -> str:
    """Format a local time, without the date if it is today."""
    moment, now = datetime.fromisoformat(text).astimezone(), datetime.now(timezone.utc).astimezone()
    return f"{moment:%H:%M}" if moment.date() == now.date() else f"{moment:%m-%d %H:%M}"


def print_proposals(source: str, dest: object, proposals: Sequence[Proposal]) -> None:
    """Print the columns that can be dense, and the command that converts them."""
    if not proposals:
        print_line("according to footers and first rows, no list column has the same length in all rows")
        return
    for item in proposals:
        smaller = f", or {item.narrow} with --narrow" if item.narrow != item.dense else ""
        print_line(f"{item.column}: {item.type} can be stored as {item.dense}{smaller}")
    from pqcache.store.cache_directory import cache_at  # imports pyarrow, which an error does not need

    where = [str(dest)] if dest is not None else [] if cache_at(source) is not None else ["DEST"]
    words = ["pqcache", "repartition", source, *where]
    words += [word for item in proposals for word in ("--dense", item.column)]
    words += ["--narrow"] if any(item.narrow != item.dense for item in proposals) else []
    print_line(f"command: {shlex.join(words)}")


def print_repartition(report: RepartitionReport) -> None:
    if report.dry_run:
        print_line(
            f"would rewrite {report.rewritten:,} of {directories(report.directories)}, "
            f"{format_size(report.bytes_before)}{_kept(report)}"
        )
        return
    if report.snapshot is not None and not report.rewritten:
        print_line(f"nothing to do: all {directories(report.directories)} already have these row groups")
        return
    text = (
        f"repartitioned {directories(report.rewritten)} in {format_seconds(report.seconds)}: "
        f"{report.files_before:,} -> {format_count(report.files_after, 'file')}, "
        f"{report.row_groups_before:,} -> {format_count(report.row_groups_after, 'row group')}, "
        f"{format_size(report.bytes_before)} -> {format_size(report.bytes_after)}{_kept(report)}"
    )
    print_line(f"{text}; {report.snapshot} is current" if report.snapshot else f"{text}; in {report.target}")


def _kept(report: RepartitionReport) -> str:
    return f" ({report.kept:,} finished by an earlier run)" if report.kept else ""


def print_gc(report: GcReport) -> None:
    what = "would remove" if report.dry_run else "removed"
    removed = "nothing"
    if report.removed:
        freed = f"{format_size(report.bytes)}{' would be' if report.dry_run else ''} freed"
        removed = f"{format_count(len(report.removed), 'snapshot')} ({freed})"
    kept = f"{format_count(len(report.kept), 'snapshot')}: {', '.join(report.kept)}" if report.kept else "nothing"
    print_line(f"{what} {removed}, kept {kept}")


def print_index(report: IndexReport) -> None:
    """Print the columns that were built and removed, and a line for each key index."""
    done = [f"built {', '.join(report.built)}"] if report.built else []
    done += [f"removed {', '.join(report.dropped)}"] if report.dropped else []
    if done:
        print_line(f"{'; '.join(done)} in {format_seconds(report.seconds)}")
    for key in report.keys:
        held = f"{key.type}, {format_count(key.rows, 'row')}, {format_size(key.bytes)}"
        print_line(f"{key.column}: {held if key.damage is None else key.damage}")
    if not (done or report.keys):
        print_line(f"no key index; 'pqcache index {quoted(report.cache)} --key COLUMN' builds one")


def run_server(server: CacheServer, quiet: bool) -> None:
    """Print the URL of each cache of a server, wait for its end, and print a summary."""
    with server, contextlib.suppress(KeyboardInterrupt):  # which is how a server ends
        for url in server.urls.values() if not quiet else ():
            print_line(f"serving {url} ({'with a token' if server.has_token else 'without a token'})")
        server.wait()
    if not quiet:
        requests, sent = format_count(server.counts.requests, "request"), format_size(server.counts.bytes)
        print_line(f"served {requests}, {sent} in {format_seconds(server.seconds)}")


def directories(count: int) -> str:
    return format_count(count, "directory", "directories")
