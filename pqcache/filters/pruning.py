"""Which row groups may hold rows that satisfy a condition, from their min, max and null counts alone.

For each row group and each part of the condition three things are tracked: may it be true for some row, may it
be false, may it be null. All three err towards "may", so a row group is only passed over when no row of it can
match, and only taken whole when every row must. Works on all row groups of an index at once.
"""

from __future__ import annotations

import logging
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from pqcache.filters.expression import Always, And, Compare, Condition, In, IsNull, Like, Not, Or
from pqcache.parquet.dense import as_lists
from pqcache.parquet.schema import condition_schema_of
from pqcache.parquet.statistics import field_key

log = logging.getLogger("pqcache.filters")

Flags = npt.NDArray[np.bool_]


class RowGroups(Protocol):
    """The part of ``pqcache.store.row_group_index.Index`` that pruning needs.

    ``statistics`` has a row for each row group and ``rows`` its number of rows; ``partitions`` has a row for each file,
    and ``numbers("file")`` says which file a row group is in.
    """

    @property
    def statistics(self) -> pa.Table: ...

    @property
    def rows(self) -> npt.NDArray[np.int64]: ...

    @property
    def schema(self) -> pa.Schema: ...

    @property
    def partitions(self) -> pa.Table: ...

    def numbers(self, name: str) -> npt.NDArray[np.int64]: ...

    def __len__(self) -> int: ...


@dataclass(frozen=True)
class TruthValues:
    """The possible results of a condition, as three flags per row group.

    Attributes:
        true: it may be true for some row.
        false: it may be false for some row.
        null: it may be null for some row.
    """

    true: Flags
    false: Flags
    null: Flags

    @property
    def some(self) -> Flags:
        """Whether a row may match; a row group without this can be passed over."""
        return self.true

    @property
    def every(self) -> Flags:
        """Whether every row matches, without looking at them."""
        return ~self.false & ~self.null


@dataclass(frozen=True, kw_only=True)
class _Bounds:
    """Knowledge of one column in each row group.

    ``low`` and ``high`` are None if unknown for all row groups, and null where unknown for one. ``nan`` says whether
    values may be NaN, which min and max leave out.
    """

    low: Any
    high: Any
    some_null: Flags
    some_value: Flags
    nan: bool


def prune_row_groups(
    condition: Condition, table: pa.Table, constants: Mapping[str, pa.Array | pa.ChunkedArray] | None = None
) -> TruthValues:
    """Return whether ``condition`` may be true, false or null for some row of each row group.

    Args:
        condition: see `pqcache.filters.expression`.
        table: one row per row group with the columns ``rows``, ``C:min``, ``C:max`` and ``C:nulls`` of the
            row-group index, and those of fields of structs; what is missing or null is unknown.
        constants: values of columns that are constant in each row group, from its file's path. They take precedence
            over columns of the table.
    """
    rows = np.asarray(table["rows"].to_numpy(), np.int64)
    held: dict[tuple[str, ...], _Bounds] = {}

    def bounds(*path: str) -> _Bounds:
        if path not in held:
            if constants and path[0] in constants:
                held[path] = _constant_bounds(constants[path[0]], path[1:], rows)
            elif len(path) > 1:
                held[path] = _field_bounds(table, path, rows)
            else:
                held[path] = _column_bounds(table, path[0], rows)
        return held[path]

    return _truth_values(condition, bounds, rows > 0)


def prune_by_expression(index: RowGroups, expression: pc.Expression, columns: Iterable[str]) -> Flags:
    """For each row group of ``index``, whether ``expression`` on these columns may be true for some row.

    pyarrow decides it from min, max and null counts, as for its own datasets: each row group is presented as a file
    with known statistics. Nothing is opened; if nothing can be proved, the answer is True.
    """
    from pyarrow import dataset, fs

    known = [_known(index, name) for name in columns]
    store, kind = fs.LocalFileSystem(), dataset.ParquetFileFormat()
    fragments = []
    for group, facts in enumerate(zip(*known, strict=True)):
        known_facts = [fact for fact in facts if fact is not None]
        about = {} if not known_facts else {"partition_expression": reduce(operator.and_, known_facts)}
        fragments.append(kind.make_fragment(str(group), store, **about))
    some = np.zeros(len(index), np.bool_)
    try:
        whole = dataset.FileSystemDataset(fragments, condition_schema_of(as_lists(index.schema)), kind, store)
        some[[int(fragment.path) for fragment in whole.get_fragments(expression)]] = True
    except pa.ArrowException as error:
        log.debug("no row group is skipped: pyarrow cannot prove anything of %s: %s", expression, error)
        some[:] = True
    return some & (index.rows > 0)


def _known(index: RowGroups, column: str) -> list[pc.Expression | None]:
    """For each row group an expression that its statistics and partition values imply, or None."""
    field = pc.field(column)
    if column in index.partitions.column_names:
        values = index.partitions[column]
        facts = [field == value if value.is_valid else field.is_null() for value in values]
        return [facts[file] for file in index.numbers("file")]
    bounds = _column_bounds(index.statistics, column, index.rows)
    found: list[pc.Expression | None] = []
    for group, (null, value) in enumerate(zip(bounds.some_null, bounds.some_value, strict=True)):
        fact = None
        if not value:
            fact = field.is_null()
        elif bounds.low is not None and not bounds.nan and bounds.low[group].is_valid and bounds.high[group].is_valid:
            fact = (field >= bounds.low[group]) & (field <= bounds.high[group])
            fact = fact | field.is_null() if null else fact
        elif not null:
            fact = field.is_valid()
        found.append(fact)
    return found


def _constant_bounds(values: Any, inner: Sequence[str], rows: npt.NDArray[np.int64]) -> _Bounds:
    for name in inner:
        values = pc.struct_field(values, name)
    null = np.asarray(values.is_null().to_numpy(zero_copy_only=False), np.bool_)
    return _Bounds(low=values, high=values, some_null=null & (rows > 0), some_value=~null & (rows > 0), nan=False)


def _column_bounds(table: pa.Table, column: str, rows: npt.NDArray[np.int64]) -> _Bounds:
    some = rows > 0
    nulls = None
    if f"{column}:nulls" in table.column_names:
        nulls = table[f"{column}:nulls"].to_numpy()  # floats with NaN where some are unknown
    low, high = _minima_and_maxima(table, f"{column}:min", f"{column}:max")
    some_null = some if nulls is None else some & ~(nulls == 0)
    some_value = some if nulls is None else some & ~(nulls >= rows)
    return _Bounds(
        low=low, high=high, some_null=some_null, some_value=some_value, nan=low is not None and pt.is_floating(low.type)
    )


def _field_bounds(table: pa.Table, path: Sequence[str], rows: npt.NDArray[np.int64]) -> _Bounds:
    """Bounds of a field inside a struct. Any value may be null, as the struct may be."""
    key, some = field_key(path), rows > 0
    low, high = _minima_and_maxima(table, f"{key}:field_min", f"{key}:field_max")
    nan = low is not None and pt.is_floating(low.type)
    return _Bounds(low=low, high=high, some_null=some, some_value=some, nan=nan)


def _minima_and_maxima(table: pa.Table, low: str, high: str) -> tuple[Any, Any]:
    names = table.column_names
    if low not in names or high not in names or table[low].type == pa.time64("ns"):
        # Python's time has no nanoseconds: the index has them rounded down, which for a maximum is too low.
        return None, None
    return _in_order(table[low], table[high])


def _in_order(low: Any, high: Any) -> tuple[Any, Any]:
    """Bounds with nulls for those in the wrong order: an old writer's idea of order, or a corrupt footer."""
    try:
        order = pc.less_equal(low, high)
        unknown = pa.scalar(None, low.type)
        return pc.if_else(order, low, unknown), pc.if_else(order, high, unknown)
    except pa.ArrowException:  # of a type that cannot be compared
        return None, None


def _truth_values(node: Condition, bounds: Callable[..., _Bounds], some: Flags) -> TruthValues:
    none = np.zeros(len(some), np.bool_)
    if isinstance(node, Always):
        return TruthValues(some, none, none) if node.value else TruthValues(none, some, none)
    if isinstance(node, Not):
        inner = _truth_values(node.part, bounds, some)
        return TruthValues(inner.false, inner.true, inner.null)
    if isinstance(node, And | Or):
        join = _both if isinstance(node, And) else _either
        return reduce(join, [_truth_values(part, bounds, some) for part in node.parts])
    column = bounds(node.column, *node.inner)
    if isinstance(node, IsNull):
        return TruthValues(column.some_null, column.some_value, none)
    if isinstance(node, Compare):
        true, false = _compare(column, node.op, node.value)
    elif isinstance(node, In):
        true, false = none, ~none
        for value in node.values:
            one_true, one_false = _compare(column, "EQ", value)
            true, false = true | one_true, false & one_false
    else:
        true, false = _like(column, node)
    return TruthValues(true & column.some_value, false & column.some_value, column.some_null)


def _both(left: TruthValues, right: TruthValues) -> TruthValues:
    null = (left.null & (right.true | right.null)) | (left.true & right.null)
    return TruthValues(left.true & right.true, left.false | right.false, null)


def _either(left: TruthValues, right: TruthValues) -> TruthValues:
    null = (left.null & (right.false | right.null)) | (left.false & right.null)
    return TruthValues(left.true | right.true, left.false & right.false, null)


def _compare(column: _Bounds, op: str, value: pa.Scalar) -> tuple[Flags, Flags]:
    """Whether ``column op value`` may be true, and may be false, for values that are not null."""
    if op == "NEQ":
        true, false = _compare(column, "EQ", value)
        return false, true
    low, high = column.low, column.high
    anything = np.ones(len(column.some_value), np.bool_)
    if low is None or (pt.is_floating(value.type) and value.as_py() != value.as_py()):
        return anything, anything
    try:
        if op == "EQ":
            true = _may(pc.less_equal(low, value)) & _may(pc.greater_equal(high, value))
            false = _may(pc.not_equal(low, value)) | _may(pc.not_equal(high, value))
        elif op in ("LT", "LTE"):
            inside, beyond = (pc.less, pc.greater_equal) if op == "LT" else (pc.less_equal, pc.greater)
            true, false = _may(inside(low, value)), _may(beyond(high, value))
        else:
            inside, beyond = (pc.greater, pc.less_equal) if op == "GT" else (pc.greater_equal, pc.less)
            true, false = _may(inside(high, value)), _may(beyond(low, value))
    except pa.ArrowException:  # of types that cannot be compared without loss
        return anything, anything
    return true, false | column.nan


def _like(column: _Bounds, node: Like) -> tuple[Flags, Flags]:
    """Return whether a LIKE may be true, and may be false, for values that are not null.

    The text before the first wildcard bounds it; it is exact if all values are equal.
    """
    anything = np.ones(len(column.some_value), np.bool_)
    low, high = column.low, column.high
    if low is None or not (pt.is_string(low.type) or pt.is_large_string(low.type)):
        return anything, anything
    prefix = re.split(r"[%_\\]", node.pattern, maxsplit=1)[0]
    first, last = (pc.utf8_slice_codeunits(bound, 0, len(prefix)) for bound in (low, high))
    true = _may(pc.less_equal(first, prefix)) & _may(pc.greater_equal(last, prefix))
    every = np.zeros(len(true), np.bool_)
    if node.pattern == f"{prefix}%":
        every = _may(pc.equal(first, prefix), False) & _may(pc.equal(last, prefix), False)
    one = _may(pc.equal(low, high), False)
    hit = _may(pc.match_like(low, node.pattern))
    return np.where(one, hit, true), ~np.where(one, hit, every)


def _may(flags: Any, unknown: bool = True) -> Flags:
    """Arrow flags as numpy's; a null (unknown bounds) becomes ``unknown``."""
    return np.asarray(pc.fill_null(flags, unknown).to_numpy(zero_copy_only=False), np.bool_)
