"""A table as plain lines, which need no terminal and no library."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from pqcache.console.terminal import print_line

Row = tuple[Sequence[str], Sequence[str]]  # the cells, and lines that stand below them


def print_table(titles: Sequence[str], rows: Sequence[Row], right: Collection[str] = ()) -> None:
    """Print rows below their titles; columns whose titles are in ``right`` end at one place."""
    lines = [titles, *(cells for cells, _ in rows)]
    widths = [max(len(line[at]) for line in lines) for at in range(len(titles))]
    for cells, notes in ((titles, ()), *rows):
        padded = [
            cell.rjust(width) if title in right else cell.ljust(width)
            for title, cell, width in zip(titles, cells, widths, strict=True)
        ]
        print_line("  ".join(padded).rstrip())
        for note in notes:
            print_line(f"    {note}")
