"""Which columns of a row group are decoded by one call, where each is used as soon as it is decoded."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from pqcache.reader.columns.column_forms import ColumnForm

_TOGETHER = 1 << 20  # bytes, which a processor's cache holds beside what is made of them


def decoded_together(forms: Sequence[ColumnForm], wanted: Collection[str], rows: int) -> list[list[int]]:
    """Return the positions of ``forms`` in parts, each of so few of the ``wanted`` columns that a cache holds them.

    A call for each column would be fast too, but holds the interpreter's lock as often. Columns without fixed width
    are decoded alone.
    """
    parts: list[list[int]] = [[]]
    size = 0
    for position, form in enumerate(forms):
        more = 0
        if form.name in wanted:
            more = form.width * rows if form.kind == "fixed" else _TOGETHER
        if parts[-1] and size + more > _TOGETHER:
            parts.append([])
            size = 0
        parts[-1].append(position)
        size += more
    return parts
