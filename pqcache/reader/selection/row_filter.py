"""``filters=``: the rows that satisfy a condition.

It is decided for complete row groups by partition values, minima, maxima and null counts. Where these do not decide it,
the columns of the condition are read.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
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
from pqcache.reader.selection.selection import Bools, Counts, Selection, Test
from pqcache.store.hive import with_hints
from pqcache.store.row_group_index import Index


@dataclass(frozen=True, kw_only=True)
class RowFilter:
    """A parsed ``filters=``.

    Attributes:
        schema: the dataset's columns, as users see them.
        condition: None for a pyarrow expression, whose parts cannot be seen.
        columns: those that it names.
        text: the same only for the same condition.
    """

    schema: pa.Schema
    expression: pc.Expression
    condition: Condition | None
    columns: tuple[str, ...]
    text: str


def filter_rows(found: Selection, filters: Any, known: Counts | None) -> Selection:
    """The rows that satisfy ``filters``.

    That is a condition as for ``--where``, a list as pandas and pyarrow take it, or a pyarrow expression;
    docs/loading.md says how nulls are treated. UsageError if it is invalid.
    """
    index, groups = found.data.index, found.row_groups
    wanted = _parsed(filters, index)
    truth = _truth_of(wanted, index)
    columns = [name for name in wanted.columns if name not in index.partitions.column_names]
    name = hashlib.blake2b(wanted.text.encode(), digest_size=16).hexdigest()
    counts = np.where(truth.some[groups], found.counts, 0)
    if not columns:  # the paths decide
        return found.with_counts(counts, name)
    matching = found.testing(_test_of(found.data, wanted, columns), name, columns)
    undecided = np.flatnonzero(~truth.every[groups] & (counts > 0))
    if len(undecided):
        counts[undecided] = matching.counted(groups[undecided], known)
    return replace(matching, counts=counts)


def _parsed(filters: Any, index: Index) -> RowFilter:
    schema = with_hints(condition_schema_of(as_lists(index.schema)), index.partitions)
    if isinstance(filters, pc.Expression):
        columns = _columns_in(filters, schema)
        (serialized,) = filters.__reduce__()[1]
        text = f"{filters} {hashlib.blake2b(serialized, digest_size=16).hexdigest()}"  # long lists are cut short in it
        return RowFilter(schema=schema, expression=filters, condition=None, columns=columns, text=text)
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
    text = f"{text_of(condition)} {types}"  # the types decide what a constant means
    return RowFilter(schema=schema, expression=expression, condition=condition, columns=tuple(named), text=text)


def _columns_in(expression: pc.Expression, schema: pa.Schema) -> tuple[str, ...]:
    """The columns without which an expression fails: pyarrow does not list those it names."""
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


def _truth_of(wanted: RowFilter, index: Index) -> TruthValues:
    """For each row group, whether the filter may be true, false or null for some row."""
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


def _test_of(data: LocalDataset, wanted: RowFilter, columns: list[str]) -> Test:
    index = data.index
    fields = pa.schema([wanted.schema.field(name) for name in columns])
    dense = {name: kind for name, kind in dense_in(index.schema).items() if name in columns}
    constants = {name: index.partitions[name] for name in wanted.columns if name in index.partitions.column_names}
    files = index.numbers("file")

    def test(group: int, first: int, part: pa.Table) -> Bools:
        file = int(files[group])
        path = str(data.path_of(group))
        for name in dense.keys() & part.column_names:
            kind = fields.field(name).type
            lists = [dense_to_lists(chunk, dense[name], kind) for chunk in part[name].chunks]
            part = part.set_column(part.schema.get_field_index(name), name, pa.chunked_array(lists, kind))
        table = cast_to_schema(part, fields, path)
        for name, values in constants.items():
            table = table.append_column(name, pa.repeat(values[file], part.num_rows))
        passes = np.zeros(part.num_rows, np.bool_)
        try:
            passes[rows_where(table, wanted.expression)] = True
        except pa.ArrowException as error:
            raise UsageError("filters", f"cannot be evaluated for {path} ({first_line(error)})") from error
        return passes

    return test
