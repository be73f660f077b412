"""The distinct values of columns that rules of ``[expect]`` name, recorded beside a snapshot."""

from __future__ import annotations

import json
import logging
import os
import stat
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pqcache.errors import MALFORMED
from pqcache.store.layout import ROW_GROUPS, VALUES
from pqcache.system.disk import read_regular, write_durably

log = logging.getLogger("pqcache.sync")

_MOST = 1000  # values of a column
_ROWS = 1 << 16  # decoded at once

Values = frozenset[str] | None
"""The values as text; None: more than _MOST, or of a type that is no text."""


def compared_values(
    columns: Collection[str], current: Path, held: Sequence[str], built: Path, new: Sequence[str], writes: bool
) -> tuple[dict[str, Values], dict[str, Values]]:
    """The values that columns have had up to the ``current`` snapshot, and in the ``new`` files of one that is built.

    What is not recorded of the current one is read from the files that it has ``held``. Those of both are recorded.
    """
    recorded = _read(current)
    before = {name: recorded[name] for name in columns if name in recorded}
    before |= _values_in(current, held, [name for name in columns if name not in before]) if held else {}
    before = {name: before.get(name) for name in columns}
    found = _values_in(built, new, columns)
    if writes:
        both = [(name, before[name], found[name]) for name in columns]
        seen = {name: None if one is None or other is None else sorted(one | other) for name, one, other in both}
        mode = stat.S_IMODE(os.stat(built / ROW_GROUPS).st_mode)  # which has values of the files, too
        write_durably(built / VALUES, json.dumps(seen).encode(), (built / VALUES).parent, mode)
    return before, found


def _read(snapshot: Path) -> dict[str, Values]:
    """What is recorded of a snapshot, by column; nothing if it is damaged, so that it is found again."""
    try:
        recorded = json.loads(read_regular(snapshot / VALUES))
        return {str(name): None if found is None else frozenset(map(str, found)) for name, found in recorded.items()}
    except (OSError, *MALFORMED):
        return {}


def _values_in(root: Path, paths: Iterable[str], columns: Collection[str]) -> dict[str, Values]:
    """Read the values of columns from some files of a snapshot; nulls and files without a column do not count."""
    found: dict[str, set[str] | None] = {name: set() for name in columns}
    try:
        for path in paths:
            with pq.ParquetFile(root / path) as file:
                wanted = [name for name in columns if found[name] is not None and name in file.schema_arrow.names]
                for batch in file.iter_batches(_ROWS, columns=wanted) if wanted else ():
                    for name in wanted:
                        found[name] = _with_values(found[name], batch.column(name))
    except (OSError, pa.ArrowException) as error:  # which verify will name
        log.debug("%s: values of columns are not known: %s", root, error)
        return dict.fromkeys(columns)
    return {name: None if some is None else frozenset(some) for name, some in found.items()}


def _with_values(found: set[str] | None, column: pa.Array) -> set[str] | None:
    if found is None or pa.types.is_nested(column.type):
        return None
    column = column.storage if isinstance(column, pa.ExtensionArray) else column
    try:
        found |= set(pc.unique(column.drop_null()).cast(pa.string()).to_pylist())
    except (pa.ArrowException, NotImplementedError):
        return None
    return found if len(found) <= _MOST else None
