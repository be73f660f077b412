"""Prints the rows of a batch as text or JSON."""

from __future__ import annotations

from typing import Any

import numpy as np
from rich.markup import escape

from pqcache.console.terminal import print_json, stdout_console
from pqcache.reader.batch_rows import RowPlaces
from pqcache.store.inspect.listings import plain_value, readable
from pqcache.units import format_count


def print_rows(found: RowPlaces, target: str, columns: list[str] | None, sample: bool, json: bool) -> None:
    """Print where the rows of a batch lie, and with ``sample`` their values."""
    values = _values(found, target, columns) if sample else [None] * len(found)
    items = found.table().to_pylist()
    if json:
        for item, value in zip(items, values, strict=True):
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
    """Return the values of each row, or of each sequence a list of those of its rows, as JSON can have them."""
    table = found.read(target, columns)
    each = 1 if found.rows.ndim == 1 else found.rows.shape[1]
    rows = [
        {name: readable(plain_value(table[name][row])) for name in table.column_names} for row in range(table.num_rows)
    ]
    return rows if found.rows.ndim == 1 else [rows[first : first + each] for first in range(0, len(rows), each)]
