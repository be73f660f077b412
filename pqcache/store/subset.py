"""Which columns and rows of a source are taken, and which partitions that leaves to look at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from pqcache.store.hive import parent, partition_table
from pqcache.store.manifest import SourceFile
from pqcache.store.remote_footer import read_remote_footer
from pqcache.store.source import Source


@dataclass(frozen=True)
class Subset:
    """The columns (None for all) and rows (None for all) that are taken of every file.

    ``where`` is a condition that partition columns alone do not decide. ``partitions`` holds the typed
    partition values of each directory.
    """

    columns: tuple[str, ...] | None = None
    where: str | None = None
    partitions: Mapping[str, Mapping[str, pa.Scalar]] = field(default_factory=dict, compare=False)

    @property
    def is_all(self) -> bool:
        """Whether files are copied as they are."""
        return self.columns is None and self.where is None

    @property
    def recipe(self) -> str:
        """The text by which a file remembers what was taken of it; empty for all."""
        parts = [] if self.columns is None else [f"columns={','.join(sorted(self.columns))}"]
        return " ".join([*parts, *([] if self.where is None else [f"where={self.where}"])])


def select(
    source: Source, files: Sequence[SourceFile], where: str | None, columns: Sequence[str] | None
) -> tuple[list[SourceFile], Subset]:
    """Return the files that may hold wanted rows, and what is to be taken of each.

    Partitions are pruned by their values. Where ``where`` also names columns in the files, one footer is read
    for their types; the rows are then filtered while they are fetched.
    """
    directories = sorted({parent(file.path) for file in files})
    table = partition_table(directories)
    row_where = None
    if where:
        from pqcache.store.predicate import matching, parse_condition, where_columns  # as in transfer.py
        from pqcache.store.prune import prune_row_groups

        if set(map(str.lower, where_columns(where))) <= set(map(str.lower, table.column_names)):
            taken = set(matching(table, where))
        else:
            row_where = where
            _, schema = read_remote_footer(source, files[0])
            fields = [f for f in schema if f.name not in table.column_names]
            condition = parse_condition(where, pa.schema([*fields, *table.schema]))
            rows = pa.table({"rows": pa.array([1] * len(directories), pa.int64())})
            constants = {name: table[name] for name in table.column_names}
            some = prune_row_groups(condition, rows, constants).some
            taken = {position for position in range(len(directories)) if some[position]}
        kept = {directories[position] for position in taken}
        files = [file for file in files if parent(file.path) in kept]
    if columns is None and row_where is None:
        return list(files), Subset()
    names = table.column_names
    values = {d: {name: table[name][i] for name in names} for i, d in enumerate(directories)}
    return list(files), Subset(None if columns is None else tuple(columns), row_where, values)
