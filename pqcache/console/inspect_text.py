"""The reports of inspect, rows and bench as text with tables, and an inspection as a self-contained HTML page."""

from __future__ import annotations

import errno
import shlex
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from html import escape as escape_html
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.padding import Padding
from rich.table import Table

from pqcache.benchmark import BenchReport, Forecast, Measured, describe_training
from pqcache.console.terminal import bar, escape, is_plain, print_json, stdout_console
from pqcache.errors import PqcacheError, UsageError
from pqcache.reader.batch_rows import RowPlaces
from pqcache.store.inspect import ArrivalProgress, Difference, Inspection, plain_value, readable
from pqcache.units import BLOCK_SIZE, format_count, format_seconds, format_size, size_word

_PARTITIONS = 20
_COLUMNS = 30
_WIDTH = 24  # of the bars, if there is space beside _NUMBERS characters of other columns
_NUMBERS = 66
_WARM = 0.01  # largest share read from the disk that counts as a warm page cache
_STYLE = """
:root { color-scheme: light dark; --bar: #3b7dd8; --over: #d64545; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.3rem; overflow-wrap: anywhere; } h2 { font-size: 1.05rem; margin-top: 2rem; }
table { border-collapse: collapse; width: 100%; } td, th { padding: .15rem .6rem .15rem 0; text-align: left; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.wide { overflow-x: auto; } .chart td { padding-right: .5rem; } .chart td:first-child { white-space: nowrap; }
.chart td:nth-child(2) { width: 70%; } .chart .over td { color: var(--over); }
.bar { height: .9rem; background: var(--bar); } .over .bar { background: var(--over); }
code { background: #8882; padding: .1rem .3rem; overflow-wrap: anywhere; }
"""


def print_inspection(found: Inspection, training: Forecast | None, all_partitions: bool) -> None:
    """Print a header, the row-group sizes with a verdict, the forecast for training, partitions and columns."""
    console = stdout_console()
    console.print(f"[bold]{escape(found.target)}[/]")
    if found.source:
        console.print(f"  source       {escape(found.source)}")
        console.print(f"  snapshot     {escape(found.snapshot or '?')}, {_age(found.created)} old")
    if found.arriving is not None:
        console.print(escape(f"  arriving     {_arriving(found, found.arriving)}"))
    if found.version is not None:
        console.print(escape(f"  table        {found.version}"))
    if found.shard is not None:
        console.print(f"  share        {found.shard} of listing {found.listing}")
    partitions = format_count(len(found.partitions), "partition")
    files = format_count(found.files, "file")
    console.print(f"  holds        {partitions}, {files}, {format_count(found.rows, 'row')}")
    if found.keys:
        console.print(escape(f"  keys         {', '.join(found.keys)}"))
    codecs = ", ".join(f"{name} {_share(size, found)}" for name, size in found.compression.items())
    ratio = found.uncompressed / max(1, sum(found.compression.values()))
    console.print(f"  size         {format_size(found.bytes)}; {codecs or 'no row groups'}; ratio {ratio:.1f}")
    _print_histogram(console, found)
    if training is not None:
        _print_training(console, found, training)
    _print_partitions(console, found, None if all_partitions else _PARTITIONS)
    print_columns(found, _COLUMNS)


def _arriving(found: Inspection, arriving: ArrivalProgress) -> str:
    """How much of a first snapshot has arrived, and who fetches the rest."""
    held = f"{format_size(arriving.bytes)} of {format_size(arriving.total_bytes)} have arrived"
    parts = f"{arriving.files:,} of {format_count(found.files, 'file')}"
    parts += f", {arriving.row_groups:,} of {format_count(found.row_groups, 'row group')}"
    if arriving.abandoned:
        return f"{held}: {parts}; no more will arrive, as files changed at the source or the disk failed"
    run = f"fetched by {arriving.run}" if arriving.run else "no run is fetching it; 'pqcache sync' continues"
    return f"{held}: {parts}; {run}"


def verdict(found: Inspection) -> str:
    """One line on the sizes of the row groups."""
    block, count = format_size(found.block_size), found.row_groups
    parts = []
    if found.over_block:
        parts.append(f"{found.over_block:,} of {format_count(count, 'row group')} exceed {block}")
    if found.under_quarter:
        of = "" if parts else f" of {format_count(count, 'row group')}"
        are = "is" if found.under_quarter == 1 else "are"
        parts.append(f"{found.under_quarter:,}{of} {are} under {format_size(found.block_size // 4)}")
    if not parts:
        return f"all {format_count(count, 'row group')} are between {format_size(found.block_size // 4)} and {block}"
    return "; ".join(parts)


def remedy(found: Inspection) -> str | None:
    """The command that makes row groups as large as blocks; None if block size doesn't matter here, or it gains little.

    It matters with ``--block-size``, for files on HDFS, and for a cache repartitioned to another size. For training,
    see `remedy_for_training`.
    """
    asked = found.straddling is not None or found.block_size != BLOCK_SIZE
    least = sum(-(-item.bytes // found.block_size) for item in found.partitions)
    if not asked or (not found.over_block and 2 * least > found.row_groups):
        return None
    return _repartition(found, found.block_size)


def remedy_for_training(found: Inspection, training: Forecast | None) -> str | None:
    """The command that gives row groups a better size for training."""
    if training is None or training.row_group_size is None:
        return None
    return _repartition(found, training.row_group_size)


def _repartition(found: Inspection, size: int) -> str:
    words = ["pqcache", "repartition", found.target, *(["DEST"] if found.kind == "directory" else [])]
    if found.kind == "remote":
        words = ["pqcache", "sync", found.target, "CACHE"]
    return shlex.join([*words, "--row-group-size", size_word(size)])


def print_columns(found: Inspection, limit: int | None) -> None:
    """Print the columns with types, codecs, encodings and sizes; only the ``limit`` largest if there are more."""
    table = _table("  column", "type", "stored as", numbers=("on disk", "share", "ratio"))
    shown = found.columns
    if limit is not None and len(shown) > limit:
        shown = tuple(sorted(shown, key=lambda item: -item.bytes)[:limit])
    for item in shown:
        if item.partition:
            table.add_row(f"  {escape(item.name)}", escape(item.type), "the path")
            continue
        stored = " ".join([item.codec.lower(), *(name.lower() for name in item.encodings)])
        ratio = f"{item.uncompressed / max(1, item.bytes):.1f}"
        numbers = (format_size(item.bytes), _share(item.bytes, found), ratio)
        table.add_row(f"  {escape(item.name)}", escape(item.type), escape(stored), *numbers)
    console = stdout_console()
    console.print()
    console.print(table)
    if len(shown) < len(found.columns):
        console.print(
            f"  {_ellipsis(console)} {len(found.columns) - len(shown):,} smaller columns; --columns shows all"
        )


def print_items(view: str, items: Iterable[Mapping[str, Any]], limit: int | None, json: bool) -> None:
    """Print files, row groups, columns or rows one by one; with ``json`` one object per line."""
    if json:
        for item in items:
            print_json(item)
    elif view == "sample":
        _print_rows(items)
    else:
        _PRINT[view](items, limit or BLOCK_SIZE)


def write_page(found: Inspection, training: Forecast | None, path: Path) -> None:
    """Write the HTML page; raises UsageError for a path that cannot be written, PqcacheError for a full disk."""
    try:
        page = inspection_page(found, training, verdict(found), (remedy(found), remedy_for_training(found, training)))
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        kind = PqcacheError if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO) else UsageError
        raise kind(f"--html {path}", error.strerror or str(error), "name a file in a writable directory") from error
    stdout_console().print(f"wrote {escape(str(path))}", soft_wrap=True)


def _print_files(items: Iterable[Mapping[str, Any]], limit: int) -> None:
    table = _table("file", numbers=("groups", "rows", "size", "largest"))
    for item in items:
        sizes = (format_size(item["bytes"]), _marked(item["largest"], limit))
        table.add_row(escape(item["path"]), f"{item['row_groups']:,}", f"{item['rows']:,}", *sizes)
    stdout_console().print(table)


def _print_row_groups(items: Iterable[Mapping[str, Any]], limit: int) -> None:
    table = _table("file", numbers=("group", "rows", "offset", "size", "ratio"))
    for item in items:
        ratio = f"{item['uncompressed'] / max(1, item['bytes']):.1f}"
        numbers = (f"{item[name]:,}" for name in ("row_group", "rows", "offset"))
        table.add_row(escape(item["path"]), *numbers, _marked(item["bytes"], limit), ratio)
    stdout_console().print(table)


def _marked(size: int, limit: int) -> str:
    return f"[red]{format_size(size)} ![/]" if size > limit else f"{format_size(size)}  "


def _print_schema(items: Iterable[Mapping[str, Any]], _: int) -> None:
    table = _table("column", "type", "nulls", "where")
    for field in items:
        where = "the path" if field["partition"] else "the files"
        table.add_row(escape(field["name"]), escape(field["type"]), "yes" if field["nullable"] else "no", where)
    stdout_console().print(table)


def _print_rows(rows: Iterable[Mapping[str, Any]]) -> None:
    console = stdout_console()
    for number, row in enumerate(rows):
        width = min(24, max(map(len, row), default=0))
        console.print(f"[bold]row {number}[/]")
        for name, value in row.items():
            text, available = " ".join(_text(value).split()), max(20, console.width - width - 4)
            text = text if len(text) <= available else text[: available - 3] + "..."
            console.print(f"  {escape(f'{name:<{width}}')}  {escape(text)}", soft_wrap=True)


def _text(value: Any) -> str:
    if (
        isinstance(value, list) and value and str(value[-1]).startswith("… ")
    ):  # the number of further items is not an item
        return f"{str(value[:-1])[:-1]}, {value[-1]}]"
    return str(value)


_PRINT = {"files": _print_files, "row-groups": _print_row_groups, "schema": _print_schema}


def print_difference(found: Difference) -> None:
    console = stdout_console()
    counts = ", ".join(f"{len(getattr(found, what)):,} {what}" for what in ("added", "removed", "changed"))
    console.print(f"[bold]{found.old}[/] -> [bold]{found.new}[/]: {counts}, {found.unchanged:,} unchanged files")
    rows, size = (found.rows[1] - found.rows[0], found.bytes[1] - found.bytes[0])
    sign = "-" if size < 0 else "+"
    console.print(
        f"  rows {found.rows[1]:,} ({rows:+,}), {format_size(found.bytes[1])} ({sign}{format_size(abs(size))})"
    )
    if found.partitions:
        table = _table("  partition", numbers=["rows added", "removed"])
        for directory, (added, removed) in found.partitions.items():
            table.add_row(f"  {escape(directory or '(no partition)')}", f"+{added:,}", f"-{removed:,}")
        console.print(table)
    for sign, paths, style in (
        ("+", found.added, "green"),
        ("-", found.removed, "red"),
        ("~", found.changed, "yellow"),
    ):
        for path in paths:
            console.print(f"  [{style}]{sign} {escape(path)}[/]")


def _print_histogram(console: Console, found: Inspection) -> None:
    sizes = found.row_group_bytes
    console.print(
        f"\n[bold]{format_count(found.row_groups, 'row group')}[/]: smallest {format_size(sizes['min'])}, "
        f"median {format_size(sizes['median'])}, largest {format_size(sizes['max'])}"
    )
    largest = max((item.count for item in found.histogram), default=0)
    for item in found.histogram:
        over = item.low > found.block_size
        if not item.count and over and item.low > sizes["max"]:
            continue
        low, high = format_size(item.low - (item.low % 2)), format_size(item.high - 1)
        label = f"over {low}" if over and item.high - 1 > 2 * found.block_size else f"{low} to {high}"
        limit = "  <- limit" if item.high - 1 == found.block_size else ""
        part = f"[{'red' if over else 'green'}]{bar(console, item.count, largest, 32):<32}[/]"
        console.print(f"  {label:>20}  {part} {item.count:>8,}{limit}")
    style = "red" if found.over_block else "yellow" if found.under_quarter else "green"
    console.print("\n[bold]blocks[/], as HDFS and Spark read them")
    console.print(f"  [{style}]{verdict(found)}[/]", soft_wrap=True)
    if found.kind == "remote" and found.straddling is not None and found.blocks_touched is not None:
        each = found.blocks_touched / max(1, found.row_groups)
        console.print(f"  row groups across a block boundary: {found.straddling:,}; blocks per row group: {each:.2f}")
    command = remedy(found)
    if command is not None:
        console.print(f"  command: {escape(command)}", soft_wrap=True)


def _print_training(console: Console, found: Inspection, training: Forecast) -> None:
    given, *verdict = describe_training(training, found.row_groups)
    console.print(f"\n[bold]training[/], {escape(given)}", soft_wrap=True)
    for line in verdict:
        console.print(f"  {escape(line)}", soft_wrap=True)
    command = remedy_for_training(found, training)
    if command is not None:
        console.print(f"  command: {escape(command)}", soft_wrap=True)


def _print_partitions(console: Console, found: Inspection, limit: int | None) -> None:
    if len(found.partitions) == 1 and not found.partitions[0].path:
        return
    table = _table("  partition", numbers=("files", "groups", "rows", "size"))
    table.add_column("", no_wrap=True)
    largest = max(item.bytes for item in found.partitions)
    shown = found.partitions
    hidden = 0 if limit is None else max(0, len(shown) - limit)
    if limit is not None and hidden:
        shown = (*shown[: limit // 2], *shown[-limit // 2 :])
    for position, item in enumerate(shown):
        if hidden and limit is not None and position == limit // 2:
            table.add_row(f"  {_ellipsis(console)} {hidden:,} more; --partitions shows all")
        table.add_row(
            f"  {escape(item.path or '(no partition)')}",
            f"{item.files:,}",
            f"{item.row_groups:,}",
            f"{item.rows:,}",
            format_size(item.bytes),
            f"[green]{bar(console, item.bytes, largest, 12)}[/]",
        )
    console.print()
    console.print(table)


def _table(*names: str, numbers: Iterable[str] = ()) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for name in names:
        table.add_column(name, overflow="fold")
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _ellipsis(console: Console) -> str:
    return "..." if is_plain(console) else "…"


def _age(created: str | None) -> str:
    if created is None:
        return "?"
    return format_seconds(max(0.0, (datetime.now(timezone.utc) - datetime.fromisoformat(created)).total_seconds()))


def _share(size: int, found: Inspection) -> str:
    share = size / max(1, sum(found.compression.values()))
    return "100 %" if share == 1 else f"{100 * share:.1f} %"


def print_rows(found: RowPlaces, target: str, columns: list[str] | None, sample: bool, json: bool) -> None:
    """Print where a batch's rows are, and with ``sample`` their values."""
    values = _values(found, target, columns) if sample else [None] * len(found)
    items = found.table().to_pylist()
    if json:
        for item, value in zip(items, values, strict=True):
            item = {"epoch": found.epoch, "batch": found.index, **item}
            print_json(item if value is None else {**item, "values": value})
        return
    console = stdout_console()
    groups, files = (len(np.unique(numbers)) for numbers in (found.groups, found.files))
    heading = f"batch {found.index:,} of epoch {found.epoch}: {len(found):,} rows"
    where = f"{format_count(groups, 'row group')} in {format_count(files, 'file')} of {escape(found.snapshot)}"
    console.print(f"{heading} of {where}", highlight=False, soft_wrap=True)
    for item, value in zip(items, values, strict=True):
        place = f"{item['file']}, row group {item['row_group']}, row {item['row']} ({item['row_in_file']} in the file)"
        console.print(f"  {escape(place)}", highlight=False, soft_wrap=True)
        for row in value if isinstance(value, list) else [value] if value else []:
            text = ", ".join(f"{name}={inner!r}" for name, inner in row.items())
            console.print(f"    {escape(text)}", highlight=False, soft_wrap=True)


def _values(found: RowPlaces, target: str, columns: list[str] | None) -> list[Any]:
    """Values of each row, ready for JSON; for sequences, a list of rows each."""
    table = found.read(target, columns)
    each = 1 if found.rows.ndim == 1 else found.rows.shape[1]
    rows = [
        {name: readable(plain_value(table[name][row])) for name in table.column_names} for row in range(table.num_rows)
    ]
    return rows if found.rows.ndim == 1 else [rows[first : first + each] for first in range(0, len(rows), each)]


def print_bench(report: BenchReport) -> None:
    """Print the dataset, the rates with bars, and the recommended settings."""
    console = stdout_console()
    columns = format_count(len(report.columns), "column")
    groups = format_count(report.row_groups, "row group")
    console.print(f"[bold]{escape(report.target)}[/]")
    console.print(
        f"  reads        {columns}, {format_count(report.rows, 'row')} in {groups}\n"
        f"  size         {format_size(report.bytes)} on disk, {format_size(report.decoded)} decoded"
    )
    console.print(f"  settings     batch_size={report.batch_size}, memory={format_size(report.memory)!r}, shuffled")
    console.print(f"  machine      {format_count(report.cores, 'core')}; {_cache(report)}")
    console.print()
    console.print(_bench_table(console, report))
    console.print()
    if report.recommended is not None:
        console.print(f"[bold]recommended[/]  num_workers={report.recommended}")
    best = next((item for item in report.measured if item.workers == report.recommended), None)
    if best is not None and best.limited_by is not None:
        console.print(f"[bold]bottleneck[/]   {_bottleneck(best)}")
    for item in report.advice:
        if console.is_terminal:
            console.print(Padding(escape(item.text), (0, 0, 0, 2)))
        else:
            console.print(f"  {escape(item.text)}", soft_wrap=True)
        if item.command is not None:
            console.print(f"    {escape(item.command)}", soft_wrap=True)


def _bottleneck(item: Measured) -> str:
    """The bottleneck of a setting, and the share of each stage in the time of its threads and workers."""
    total = sum(item.seconds_of.values())
    shares = ", ".join(f"{name} {100 * seconds / total:.0f} %" for name, seconds in item.seconds_of.items() if total)
    return f"{item.limited_by}; time for batches: {shares}"


def _bench_table(console: Console, report: BenchReport) -> Table:
    width = max(4, min(_WIDTH, console.width - _NUMBERS))
    table = _table()
    table.add_column("  workers", no_wrap=True)
    table.add_column("", no_wrap=True, min_width=width)
    for name in ("rows/s", "decoded/s", "of limit", "memory", "first"):
        table.add_column(name, justify="right", no_wrap=True)
    top = max(report.limit, *(item.rows_per_second for item in report.measured))
    for item in report.measured:
        style = "green" if item.workers == report.recommended else "cyan"
        table.add_row(
            "  no torch" if item.workers is None else f"  {item.workers}",
            f"[{style}]{bar(console, item.rows_per_second, top, width)}[/]",
            f"{item.rows_per_second:,.0f}",
            format_size(item.bytes_per_second),
            f"{100 * item.of_limit:.0f} %",
            "-" if item.memory is None else format_size(item.memory),
            f"{item.first_batch:.2f} s",
        )
    decoded = format_size(report.limit * report.decoded / max(1, report.rows))
    limit = f"[dim]{bar(console, report.limit, top, width)}[/]"
    table.add_row("  limit", limit, f"{report.limit:,.0f}", decoded, "100 %", "", "")
    return table


def _cache(report: BenchReport) -> str:
    shares = (report.limit_from_disk, *(item.from_disk for item in report.measured))
    known = [share for share in shares if share is not None]
    if not known:
        return "page cache state unknown"
    if max(known) < _WARM:
        return "page cache warm: nothing read from the disk"
    return f"page cache partly cold: up to {100 * max(known):.0f} % read from the disk"


def inspection_page(
    found: Inspection, training: Forecast | None, verdict: str, commands: tuple[str | None, str | None]
) -> str:
    """Return the page as text.

    ``verdict`` judges the row-group sizes against the block size; ``commands`` correct them for blocks and for
    training.
    """
    facts = [
        ("source", found.source),
        ("snapshot", found.snapshot and f"{found.snapshot}, published {found.created}"),
        ("rows", f"{found.rows:,} in {format_count(found.files, 'file')} of {len(found.partitions):,} partitions"),
        ("size", f"{format_size(found.bytes)}, {format_size(found.uncompressed)} decompressed"),
    ]
    if found.keys:
        facts.append(("keys", ", ".join(found.keys)))
    if training is not None:
        facts.append(("training", "; ".join(describe_training(training, found.row_groups))))
    parts = [
        f"<h1>{escape_html(found.target)}</h1><table>",
        *(f"<tr><th>{name}</th><td>{escape_html(str(value))}</td></tr>" for name, value in facts if value),
        "</table>",
        f"<h2>{format_count(found.row_groups, 'row group')} by size</h2>",
        f"<p>Blocks, as HDFS and Spark read them: {escape_html(verdict)}.{_command(commands[0])}</p>",
        f"<p>For training:{_command(commands[1])}</p>" if commands[1] else "",
        _histogram(found),
        "<h2>Bytes by column</h2>",
        _sizes([(item.name, item.bytes) for item in sorted(found.columns, key=lambda item: -item.bytes) if item.bytes]),
        "<div class=wide><table><tr><th>column<th>type<th>codec<th>encodings<th class=n>on disk<th class=n>ratio</tr>",
        *(
            f"<tr><td>{escape_html(item.name)}</td><td>{escape_html(item.type)}</td><td>{escape_html(item.codec)}</td>"
            f"<td>{escape_html(', '.join(item.encodings))}</td><td class=n>{format_size(item.bytes)}</td>"
            f"<td class=n>{item.uncompressed / max(1, item.bytes):.1f}</td></tr>"
            for item in found.columns
            if not item.partition
        ),
        "</table></div>",
        "<h2>Bytes by partition</h2>",
        _sizes([(item.path or "(no partition)", item.bytes) for item in found.partitions]),
    ]
    title = escape_html(found.target)
    head = f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{title}</title>'
    head += f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style>'
    return f"{head}\n<body>\n{chr(10).join(parts)}\n</body></html>\n"


def _command(command: str | None) -> str:
    return f" <code>{escape_html(command)}</code>" if command else ""


def _histogram(found: Inspection) -> str:
    """A bar for each range of row-group sizes, in another colour above the block size."""
    bars = []
    for number, item in enumerate(found.histogram):
        is_last = number == len(found.histogram) - 1
        name = f"over {format_size(2 * found.block_size)}" if is_last else f"to {format_size(item.high - 1)}"
        if item.high - 1 == found.block_size:
            name += ", the limit"
        bars.append((name, item.count, f"{item.count:,}", item.count > 0 and item.low > found.block_size))
    return _bars(bars)


def _sizes(items: Sequence[tuple[str, int]]) -> str:
    return _bars([(name, size, format_size(size), False) for name, size in items])


def _bars(items: Sequence[tuple[str, int, str, bool]]) -> str:
    """A chart of a horizontal bar for each name, value and text; some of them are over a limit."""
    largest, parts = max((value for _, value, _, _ in items), default=0) or 1, []
    for name, value, text, is_over in items:
        shown = name if len(name) <= 34 else name[:16] + "…" + name[-17:]
        parts.append(
            f'<tr{" class=over" if is_over else ""}><td title="{escape_html(name)}">{escape_html(shown)}</td>'
            f'<td><div class=bar style="width: {100 * value / largest:.1f}%"></div></td><td class=n>{text}</td></tr>'
        )
    return f"<table class=chart>{''.join(parts)}</table>"
