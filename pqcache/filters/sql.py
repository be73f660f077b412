"""A ``--where`` string as a condition.

sqlglot parses; only comparisons of a column with constants, IN, BETWEEN, LIKE, IS NULL, AND, OR and NOT are
let through. Nothing is ever evaluated as code.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from pqcache.errors import UsageError
from pqcache.filters.expression import (
    Always,
    And,
    Compare,
    Condition,
    IsNull,
    Like,
    Not,
    Operand,
    Or,
    comparison,
    constant_of,
    expression_of,
    in_condition,
    operand_of,
    rows_where,
    value_type,
)

_HELP = "use comparisons of columns with constants, IN, BETWEEN, LIKE, IS NULL, AND, OR, NOT"
_DATE = re.compile(r"\b\d{4}[-/]\d{1,2}[-/]\d{1,2}(?:[ T]\d\d:\d\d[:.\d]*)?(?!\S*')")  # without quotes
_COLUMN = ("Column", "Dot")  # the second from the fifth name of a path on
_COMPARE = ("EQ", "NEQ", "LT", "LTE", "GT", "GTE")
_SYMBOLS = {"EQ": "=", "NEQ": "<>", "LT": "<", "LTE": "<=", "GT": ">", "GTE": ">="}
_MIRROR = {"EQ": "EQ", "NEQ": "NEQ", "LT": "GT", "LTE": "GTE", "GT": "LT", "GTE": "LTE"}


def parse_where(where: str, schema: pa.Schema, option: str = "--where") -> pc.Expression:
    """Return ``where`` as an expression over the columns of ``schema``, constants cast to their types.

    Nulls behave as in SQL: a comparison with one is neither true nor false, and only rows for which the
    whole condition is true are taken. NaN behaves as in IEEE 754: it equals nothing and is in no range. A syntax
    error, an unknown column or a constant that does not fit its column's type raises UsageError, which calls the
    condition ``option``.
    """
    return expression_of(parse_condition(where, schema, option))


def parse_condition(where: str, schema: pa.Schema, option: str = "--where") -> Condition:
    """Return ``where`` as a condition on the columns of ``schema``; see `parse_where`."""
    try:
        return _condition(_parse(where), schema)
    except UsageError as error:
        raise error.within(f"{option} {where!r}") from error
    except RecursionError as error:
        raise UsageError(option, "too deeply nested", _HELP) from error


def where_columns(where: str) -> list[tuple[str, ...]]:
    """Return the columns in ``where``, in order of appearance, each as the names between its dots."""
    try:
        return _columns_in(_parse(where))
    except UsageError as error:
        raise error.within(f"--where {where!r}") from error


def condition_on(where: str, columns: Collection[str]) -> str:
    """Return those of the conditions that AND joins in ``where`` that name ``columns`` alone; empty where none does."""
    known = {name.lower() for name in columns}
    try:
        tree = _parse(where)
        parts = list(tree.flatten()) if type(tree).__name__ == "And" else [tree]
        named = [{".".join(path).lower() for path in _columns_in(part)} for part in parts]
    except UsageError as error:
        raise error.within(f"--where {where!r}") from error
    return " AND ".join(f"({part.sql()})" for part, names in zip(parts, named, strict=True) if names and names <= known)


def rows_matching(table: pa.Table, where: str) -> list[int]:
    """Return the positions of the rows of ``table`` for which ``where`` is true."""
    if table.num_rows == 0:
        return []
    found: list[int] = rows_where(table, parse_where(where, table.schema)).tolist()
    return found


def _columns_in(tree: Any) -> list[tuple[str, ...]]:
    from sqlglot import exp

    found = []
    for column in tree.find_all(exp.Column, bfs=False):
        while isinstance(column.parent, exp.Dot):  # of the fifth name and those that follow
            column = column.parent
        found.append(tuple(_names(column)))
    return list(dict.fromkeys(found))


def _parse(where: str) -> Any:
    import sqlglot
    from sqlglot.errors import SqlglotError

    try:
        tree = sqlglot.parse_one(f"SELECT 1 WHERE {where}")
    except (SqlglotError, RecursionError) as error:
        date = _DATE.search(where)
        raise UsageError("", "not a complete condition", _quoted(date[0]) if date else _HELP) from error
    extra = [name for name, value in tree.args.items() if value and name not in ("expressions", "where")]
    if extra or "where" not in tree.args:
        raise UsageError("", "not a single condition", _HELP)
    return tree.args["where"].this


# What each node may hold; anything else (SYMMETRIC, UNNEST, a sub-select) changes its meaning.
_ARGUMENTS = {
    "Paren": {"this"},
    "And": {"this", "expression"},
    "Or": {"this", "expression"},
    "Not": {"this"},
    **{name: {"this", "expression"} for name in _COMPARE},
    "In": {"this", "expressions", "negate"},
    "Between": {"this", "low", "high", "negate"},
    "Like": {"this", "expression", "negate"},
    "Is": {"this", "expression", "negate"},
    "Boolean": {"this"},
    "Column": {"this", "table", "db", "catalog"},
    "Dot": {"this", "expression"},
}


def _condition(node: Any, schema: pa.Schema) -> Condition:
    kind = type(node).__name__
    allowed = _ARGUMENTS.get(kind)
    if allowed is None:
        raise UsageError("", f"{node.sql()!r} is not supported", _HELP)
    extra = [name for name, value in node.args.items() if value and name not in allowed]
    if extra:
        if kind == "In":
            raise UsageError("", "IN needs a list of constants", _HELP)
        raise UsageError(f"{node.sql()!r}", f"{', '.join(extra).upper()} is not supported", _HELP)
    # Where NOT stands before the operator, sqlglot may put it inside the node.
    found = _plain_condition(kind, node, schema)
    return Not(found) if node.args.get("negate") else found


def _plain_condition(kind: str, node: Any, schema: pa.Schema) -> Condition:
    if kind == "Paren":
        return _condition(node.this, schema)
    if kind in ("And", "Or"):
        parts = []
        while type(node).__name__ == kind:  # chains of hundreds of ORs nest as deep as they are long
            parts.append(node.expression)
            node = node.this
        parts.append(node)
        inner = tuple(_condition(part, schema) for part in reversed(parts))
        return And(inner) if kind == "And" else Or(inner)
    if kind == "Not":
        return Not(_condition(node.this, schema))
    if kind in _COMPARE:
        left, right = node.this, node.expression
        if _is_column(right) and not _is_column(left):
            left, right, kind = right, left, _MIRROR[kind]
        field = _field(left, schema)
        return comparison(field, kind, _constant(right, field, f"{{name}} {_SYMBOLS[kind]} '{{value}}'"))
    if kind == "Boolean":
        return Always(bool(node.this))
    field = _field(node if kind in _COLUMN else node.this, schema)
    if kind in _COLUMN:
        if pt.is_boolean(field.type):
            return Compare(field.column, "EQ", pa.scalar(True), field.inner)
        raise UsageError("", f"{field.name} alone is not a condition", "compare it with a constant")
    if kind == "In":
        if not node.expressions:
            raise UsageError("", "IN needs a list of constants", _HELP)
        values = [_constant(item, field, "{name} IN ('{value}')") for item in node.expressions]
        return in_condition(field, values)
    if kind == "Between":
        low, high = (
            _constant(node.args[end], field, f"{{name}} {op} '{{value}}'")
            for end, op in (("low", ">="), ("high", "<="))
        )
        return And((comparison(field, "GTE", low), comparison(field, "LTE", high)))
    if kind == "Like":
        text = value_type(field.type)
        if not (pt.is_string(text) or pt.is_large_string(text)):
            raise UsageError("", f"LIKE needs a string column, {field.name} is {field.type}")
        pattern = _constant(node.expression, field, "{name} LIKE '{value}'")
        assert isinstance(pattern, pa.Scalar)
        return Like(field.column, pattern.as_py(), text, field.inner)
    if type(node.expression).__name__ == "Null":
        return IsNull(field.column, field.inner)
    raise UsageError("", "IS takes NULL or NOT NULL")


def _is_column(node: Any) -> bool:
    return type(node).__name__ in _COLUMN


def _names(column: Any) -> list[str]:
    if type(column).__name__ == "Dot" and type(column.expression).__name__ == "Identifier":
        return [*_names(column.this), column.expression.name]
    if type(column).__name__ == "Dot":
        raise UsageError("", f"{column.sql()!r} is not supported", _HELP)
    if type(column).__name__ != "Column" or type(column.this).__name__ != "Identifier":
        raise UsageError("", f"{column.sql()!r} is not a column", _HELP)
    return [part.name for part in column.parts]


def _field(node: Any, schema: pa.Schema) -> Operand:
    while type(node).__name__ == "Paren":
        node = node.this
    return operand_of(_names(node), schema)


def _constant(node: Any, field: Operand, as_text: str) -> pa.Scalar | int:
    """Return a constant in its column's type, or, for one between two whole numbers, the lower of them.

    ``as_text`` is as for `constant_of`.
    """
    kind = type(node).__name__
    if kind == "Paren":
        return _constant(node.this, field, as_text)
    if kind == "Null":
        raise UsageError("", f"{field.name} = NULL is never true", f"write {field.name} IS NULL")
    sign = ""
    if kind == "Neg":
        node, sign = node.this, "-"
        kind = type(node).__name__
    quoted = kind == "Literal" and node.is_string and not sign
    if kind == "Cast" and type(node.this).__name__ == "Literal" and node.this.is_string:  # DATE '2026-11-01'
        quoted = not sign and not _is_number(node.to)
        node, kind = node.this, "Literal"
    if kind == "Boolean":
        text = str(bool(node.this)).lower()
    elif kind == "Literal":
        text = sign + str(node.this)
    else:
        raise _no_constant(node)
    return constant_of(text, field, "" if quoted else as_text)


def _is_number(kind: Any) -> bool:
    from sqlglot import exp

    return bool(kind.is_type(*exp.DataType.NUMERIC_TYPES, exp.DataType.Type.BOOLEAN))


def _no_constant(node: Any) -> UsageError:
    text = node.sql()
    date = _DATE.fullmatch(text.replace(" ", ""))
    if date:
        return UsageError("", f"{date[0]} without quotes is arithmetic", _quoted(date[0]))
    if type(node).__name__ == "Column" and len(node.parts) == 1:
        return UsageError("", f"{text!r} is not a constant but a column", f"write text in quotes: '{node.name}'")
    return UsageError("", f"{text!r} is not a constant", _HELP)


def _quoted(date: str) -> str:
    return f"write dates and times in quotes: '{date}'"
