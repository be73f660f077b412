"""Prints the report of ``bench`` as text: a bar for each setting, then the recommendation."""

from __future__ import annotations

from rich.console import Console
from rich.padding import Padding
from rich.table import Table

from pqcache.benchmark.command import BenchReport, Measured
from pqcache.console.terminal import bar, escape, stdout_console
from pqcache.units import format_count, format_size

_WIDTH = 24  # of the bars, where there is space beside _NUMBERS characters of other columns
_NUMBERS = 66
_WARM = 0.01  # largest share read from the disk that counts as a warm page cache


def print_bench(report: BenchReport) -> None:
    """Print what was read, the rates with bars, and the recommended settings."""
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
    console.print(_table(console, report))
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
    """Return what limits a setting, and the share of each stage in the time of its threads and workers."""
    total = sum(item.seconds_of.values())
    shares = ", ".join(f"{name} {100 * seconds / total:.0f} %" for name, seconds in item.seconds_of.items() if total)
    return f"{item.limited_by}; time for batches: {shares}"


def _table(console: Console, report: BenchReport) -> Table:
    width = max(4, min(_WIDTH, console.width - _NUMBERS))
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
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
