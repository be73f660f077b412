"""A ``--where`` string as a pyarrow expression.

sqlglot parses; only comparisons of a column with constants, IN, BETWEEN, LIKE, IS NULL, AND, OR and NOT are
let through. Nothing is ever evaluated as code.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from pqcache.errors import UsageError

_HELP = "use comparisons of columns with constants, IN, BETWEEN, LIKE, IS NULL, AND, OR, NOT"
_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "EQ": operator.eq,
    "NEQ": operator.ne,
    "LT": operator.lt,
    "LTE": operator.le,
    "GT": operator.gt,
    "GTE": operator.ge,
}
_MIRROR = {"EQ": "EQ", "NEQ": "NEQ", "LT": "GT", "LTE": "GTE", "GT": "LT", "GTE": "LTE"}


def parse_where(where: str, schema: pa.Schema) -> pc.Expression:
    """Return ``where`` as an expression over the columns of ``schema``, constants cast to their types.

    Nulls behave as in SQL: a comparison with one is neither true nor false, and only rows for which the
    whole condition is true are taken. A syntax error, an unknown column or a constant that does not fit its
    column's type raises UsageError.
    """
    try:
        return _expression(_parse(where), schema)
    except UsageError as error:
        raise UsageError(f"--where {where!r}: {error}") from error


def where_columns(where: str) -> list[str]:
    """Return the names of the columns in ``where`` in order of appearance."""
    from sqlglot import exp

    try:
        return list(dict.fromkeys(column.name for column in _parse(where).find_all(exp.Column, bfs=False)))
    except UsageError as error:
        raise UsageError(f"--where {where!r}: {error}") from error


def matching(table: pa.Table, where: str) -> list[int]:
    """Return the positions of the rows of ``table`` for which ``where`` is true."""
    if table.num_rows == 0:
        return []
    positions = pa.array(range(table.num_rows), pa.int64())
    expression = parse_where(where, table.schema)
    kept = table.append_column("\x00position", positions).filter(expression)
    return [int(position) for position in kept["\x00position"].to_pylist()]


def _parse(where: str) -> Any:
    import sqlglot
    from sqlglot.errors import SqlglotError

    try:
        tree = sqlglot.parse_one(f"SELECT 1 WHERE {where}")
    except (SqlglotError, RecursionError) as error:
        raise UsageError(f"not a complete condition; {_HELP}") from error
    extra = [name for name, value in tree.args.items() if value and name not in ("expressions", "where")]
    if extra or "where" not in tree.args:
        raise UsageError(f"not a single condition; {_HELP}")
    return tree.args["where"].this


def _expression(node: Any, schema: pa.Schema) -> pc.Expression:
    kind = type(node).__name__
    if kind == "Paren":
        return _expression(node.this, schema)
    if kind in ("And", "Or"):
        # chains of hundreds of ORs nest as deep as they are long
        left, right = _expression(node.this, schema), _expression(node.expression, schema)
        return left & right if kind == "And" else left | right
    if kind == "Not":
        return ~_expression(node.this, schema)
    if kind in _COMPARE:
        left, right = node.this, node.expression
        if _is_column(right) and not _is_column(left):
            left, right, kind = right, left, _MIRROR[kind]
        field = _field(left, schema)
        return _COMPARE[kind](pc.field(field.name), _constant(right, field))
    if kind == "In":
        field = _field(node.this, schema)
        if not node.expressions:
            raise UsageError(f"IN needs a list of constants; {_HELP}")
        values = [_constant(item, field) for item in node.expressions]
        column = pc.field(field.name)
        # isin() calls a null a mismatch, SQL calls it unknown: matters under NOT
        return _any_of(column, values)
    if kind == "Between":
        field = _field(node.this, schema)
        column = pc.field(field.name)
        low, high = _constant(node.args["low"], field), _constant(node.args["high"], field)
        return (column >= low) & (column <= high)
    if kind == "Like":
        field = _field(node.this, schema)
        if not (pa.types.is_string(field.type) or pa.types.is_large_string(field.type)):
            raise UsageError(f"LIKE needs a string column, {field.name} is {field.type}")
        return pc.match_like(pc.field(field.name), _constant(node.expression, field).as_py())
    if kind == "Is":
        field = _field(node.this, schema)
        if type(node.expression).__name__ == "Null":
            return pc.field(field.name).is_null()
        raise UsageError("IS takes NULL or NOT NULL")
    if kind == "Boolean":
        return pc.scalar(bool(node.this))
    if kind == "Column":
        field = _field(node, schema)
        if pa.types.is_boolean(field.type):
            return pc.field(field.name)
        raise UsageError(f"{field.name} alone is not a condition; compare it with a constant")
    raise UsageError(f"{node.sql()!r} is not supported; {_HELP}")


def _any_of(column: pc.Expression, values: list[pa.Scalar]) -> pc.Expression:
    if len(values) <= 2:
        result = column == values[0]
        for value in values[1:]:
            result = result | (column == value)
        return result
    present = column.isin(pa.array([v.as_py() for v in values], values[0].type))
    return pc.if_else(column.is_null(), pc.scalar(pa.scalar(None, pa.bool_())), present)


def _is_column(node: Any) -> bool:
    return type(node).__name__ == "Column"


def _field(node: Any, schema: pa.Schema) -> pa.Field:
    while type(node).__name__ == "Paren":
        node = node.this
    if not _is_column(node):
        raise UsageError(f"{node.sql()!r} is not a column; {_HELP}")
    name = node.name
    matches = [field for field in schema if field.name == name]
    if not matches:
        matches = [field for field in schema if field.name.lower() == name.lower()]  # SQL folds case
    if len(matches) != 1:
        known = ", ".join(schema.names) or "none"
        raise UsageError(f"there is no column {name}; there are: {known}")
    return matches[0]


def _constant(node: Any, field: pa.Field) -> pa.Scalar:
    kind = type(node).__name__
    if kind == "Paren":
        return _constant(node.this, field)
    if kind == "Null":
        raise UsageError(f"{field.name} = NULL is never true; write {field.name} IS NULL")
    sign = ""
    if kind == "Neg":
        node, sign = node.this, "-"
        kind = type(node).__name__
    if kind == "Cast" and type(node.this).__name__ == "Literal":  # DATE '2026-11-01'
        node, kind = node.this, "Literal"
    if kind == "Boolean":
        value: Any = bool(node.this)
        text = str(value).lower()
    elif kind == "Literal":
        value = text = sign + str(node.this)
    else:
        raise UsageError(f"{node.sql()!r} is not a constant; {_HELP}")
    try:
        if pa.types.is_string(field.type) or pa.types.is_large_string(field.type):
            return pa.scalar(text, field.type)
        if pa.types.is_integer(field.type) and not text.lstrip("-").isdigit():
            return pa.scalar(text).cast(pa.float64())  # n > 1.5 makes sense
        return pa.scalar(text).cast(field.type)
    except (pa.ArrowException, ValueError) as error:
        raise UsageError(f"{text!r} is not a value of {field.name}, which is {field.type}") from error
