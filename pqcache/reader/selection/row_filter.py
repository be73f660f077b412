"""``filters=`` and ``rows=``: which rows of a dataset are read.

A condition is decided for complete row groups by partition values, minima, maxima and null counts. In row groups where
these do not decide it the rows are counted once, by reading the columns of the condition, and the counts of a
snapshot are stored beside it.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pqcache.errors import UsageError, first_line
from pqcache.filters.expression import Condition, condition_columns, expression_of, rows_where, text_of
from pqcache.filters.pruning import TruthValues, prune_by_expression, prune_row_groups
from pqcache.parquet.dense_columns import as_lists, dense_in, dense_to_lists
from pqcache.parquet.schema_merge import cast_to_schema, condition_schema_of
from pqcache.reader.open_dataset import LocalDataset
from pqcache.reader.selection.selection import Counts, Parts, Selection
from pqcache.store.hive import with_hints
from pqcache.store.row_group_index import Index
from pqcache.store.selected_rows import Ints, SelectedRows


@dataclass(frozen=True, kw_only=True)
class RowFilter:
    """A parsed ``filters=``, on the columns of ``schema``, which are as users see them.

    ``columns`` are those that it names; ``text`` is the same only for the same condition. ``condition`` is None for a
    pyarrow expression, whose parts cannot be seen.
    """

    expression: pc.Expression
    condition: Condition | None
    columns: tuple[str, ...]
    schema: pa.Schema
    text: str


def select_rows(
    data: LocalDataset, filters: Any = None, rows: SelectedRows | None = None, known: Counts | None = None
) -> Selection:
    """Return the rows that satisfy ``filters`` (None: all) and are among ``rows`` (None: all).

    ``filters`` is a condition as for ``--where``, a list as pandas and pyarrow take it, or a pyarrow expression;
    docs/loading.md says what they do with nulls. ``known`` are counts of rows, to which what is counted is added. A
    condition that makes no sense raises UsageError; one that no row satisfies, a warning.
    """
    found = Selection.of_all(data)
    if rows is not None:
        check_rows(data, rows)
        counts = np.zeros(len(data.index), np.int64)
        counts[rows.groups] = rows.counts
        counts = counts[found.row_groups]
        found = found.then(lambda group, *_: rows.positions(group), rows.fingerprint, counts=counts)
    if filters is not None:
        found = _matching(found, parse_filters(filters, data.index), known)
    if not found.counts.any() and (filters is not None or rows is not None):
        what = "filters" if rows is None else "rows" if filters is None else "filters and rows"
        warnings.warn(f"{data.root}: no row is left by {what}, so there are no batches", stacklevel=2)
    return found.without_empty()


def _matching(found: Selection, wanted: RowFilter, known: Counts | None) -> Selection:
    """Those of the rows that satisfy a filter; they are counted where statistics do not decide."""
    index, groups = found.data.index, found.row_groups
    truth = prune_by_filter(wanted, index)
    columns = [name for name in wanted.columns if name not in index.partitions.column_names]
    text = hashlib.blake2b(wanted.text.encode(), digest_size=16).hexdigest()
    counts = np.where(truth.some[groups], found.counts, 0)
    matching = found.then(_Matching(found.data, wanted, columns), text, columns, counts)
    undecided = np.flatnonzero(~truth.every[groups] & (counts > 0))
    if len(undecided):
        counts[undecided] = matching.counted(groups[undecided], known)
    return matching


def check_rows(data: LocalDataset, rows: SelectedRows) -> None:
    """Raise UsageError for ``rows`` that are not rows of this dataset."""
    if not isinstance(rows, SelectedRows):
        raise UsageError(f"rows={rows!r}", "give SelectedRows, as Cache.lookup returns them")
    if rows.snapshot and rows.snapshot != data.snapshot:
        raise UsageError(
            "rows", f"they were looked up in {rows.snapshot}, and {data.root} is {data.snapshot}", "look them up again"
        )
    rows.check(data.index.rows)


def parse_filters(filters: Any, index: Index) -> RowFilter:
    """Return ``filters`` parsed, on the columns of ``index``; what makes no sense raises UsageError."""
    schema = with_hints(condition_schema_of(as_lists(index.schema)), index.partitions)
    if isinstance(filters, pc.Expression):
        columns = _columns_in(filters, schema)
        (serialized,) = filters.__reduce__()[1]
        text = f"{filters} {hashlib.blake2b(serialized, digest_size=16).hexdigest()}"  # long lists are cut short in it
        return RowFilter(expression=filters, condition=None, columns=columns, schema=schema, text=text)
    if isinstance(filters, str):
        from pqcache.filters.sql import parse_condition  # imports sqlglot, which takes time

        condition = parse_condition(filters, schema, "filters")
    else:
        from pqcache.filters.dnf import condition_from

        condition = condition_from(filters, schema)
    expression, named = expression_of(condition), condition_columns(condition)
    types = {name: str(schema.field(name).type) for name in named if name in index.partitions.column_names}
    try:
        rows_where(schema.empty_table(), expression)
    except (pa.ArrowException, TypeError) as error:
        raise UsageError(f"filters {filters!s}", f"{first_line(error)}") from error
    return RowFilter(
        expression=expression,
        condition=condition,
        columns=tuple(named),
        schema=schema,
        text=f"{text_of(condition)} {types}",  # which decide what a constant means
    )


def _columns_in(expression: pc.Expression, schema: pa.Schema) -> tuple[str, ...]:
    """Return the columns without which an expression fails, as pyarrow does not say which ones it names."""
    empty = schema.empty_table()
    if "FieldPath(" in str(expression):
        raise UsageError(f"filters {expression}", "give columns by name, not by number")
    try:
        rows_where(empty, expression)
    except (pa.ArrowException, TypeError) as error:
        known = ", ".join(schema.names) or "none"
        raise UsageError(f"filters {expression}", f"{first_line(error)}", f"the columns are: {known}") from error

    def among(names: list[str]) -> list[str]:
        try:
            rows_where(empty.drop_columns(names), expression)
        except pa.ArrowException:
            half = len(names) // 2
            return [*among(names[:half]), *among(names[half:])] if half else names
        return []

    return tuple(among(schema.names)) if schema.names else ()


def prune_by_filter(wanted: RowFilter, index: Index) -> TruthValues:
    """Return, for each row group, whether the filter may be true, false or null for some row."""
    inside = index.partitions.column_names
    none = np.zeros(len(index), np.bool_)
    files = index.numbers("file")
    if set(wanted.columns) <= set(inside):  # exact
        kept = np.zeros(len(index.paths), np.bool_)
        kept[rows_where(index.partitions, wanted.expression)] = True
        some = kept[files] & (index.rows > 0)
        return TruthValues(some, ~some, none)
    if wanted.condition is None:
        some = prune_by_expression(index, wanted.expression, wanted.columns)
        return TruthValues(some, ~none, none)
    numbers = pa.array(files)
    constants = {name: index.partitions[name].take(numbers) for name in wanted.columns if name in inside}
    return prune_row_groups(wanted.condition, index.statistics, constants)


class _Matching:
    """Finds the rows of a row group that satisfy a filter; ``columns`` are those that are in the files."""

    def __init__(self, data: LocalDataset, wanted: RowFilter, columns: Sequence[str]) -> None:
        self._data, self._wanted = data, wanted
        self._fields = pa.schema([wanted.schema.field(name) for name in columns])
        self._dense = {name: dense for name, dense in dense_in(data.index.schema).items() if name in columns}
        partitions = data.index.partitions
        self._constants = {name: partitions[name] for name in wanted.columns if name in partitions.column_names}
        self._files = data.index.numbers("file")

    def __call__(self, group: int, parts: Parts, rows: Ints | None) -> Ints:
        found = self._found(group, parts)
        return found if rows is None else np.intersect1d(rows, found, assume_unique=True)

    def _found(self, group: int, parts: Parts) -> Ints:
        file = int(self._files[group])
        if not self._fields.names:  # one row says it: tables without columns do not know how many rows they have
            one = {"\0one": pa.nulls(1)} | {name: values.slice(file, 1) for name, values in self._constants.items()}
            is_true = len(rows_where(pa.table(one), self._wanted.expression)) > 0
            return np.arange(int(self._data.index.rows[group]) if is_true else 0, dtype=np.int64)
        found, at = [np.zeros(0, np.int64)], 0
        path = str(self._data.root / self._data.index.paths[file])
        for part in parts:
            table = cast_to_schema(self._as_lists(part), self._fields, path)
            for name, values in self._constants.items():
                table = table.append_column(name, pa.repeat(values[file], part.num_rows))
            try:
                found.append(rows_where(table, self._wanted.expression) + at)
            except pa.ArrowException as error:
                raise UsageError("filters", f"cannot be evaluated for {path} ({first_line(error)})") from error
            at += part.num_rows
        return np.concatenate(found)

    def _as_lists(self, table: pa.Table) -> pa.Table:
        for name, dense in self._dense.items():
            if name in table.column_names:
                kind = self._fields.field(name).type
                lists = [dense_to_lists(chunk, dense, kind) for chunk in table[name].chunks]
                table = table.set_column(table.schema.get_field_index(name), name, pa.chunked_array(lists, kind))
        return table
