"""Conditions as users write them: SQL text, or lists of comparisons as pandas and pyarrow take them.

sqlglot parses the text of ``--where``; it may contain comparisons of a column with constants, IN, BETWEEN, LIKE, IS
NULL, AND, OR and NOT; nothing is ever evaluated as code.

A list like ``[("dt", ">=", "2026-11-01"), ("label", "in", [1, 2])]`` holds comparisons that must all be true; in a list
of such lists, one list must be. Constants are read in their column's type, as in ``--where``. Nulls are treated as in
pyarrow: they satisfy only ``in`` a list with None, and ``not in`` a list without.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from pqcache.errors import UsageError, first_line
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
    no_value,
    operand_of,
    rows_where,
    value_type,
)
from pqcache.parquet.arrow import is_text

_HELP = "use comparisons of columns with constants, IN, BETWEEN, LIKE, IS NULL, AND, OR, NOT"
_DATE = re.compile(r"\b\d{4}[-/]\d{1,2}[-/]\d{1,2}(?:[ T]\d\d:\d\d[:.\d]*)?(?!\S*')")  # without quotes
_COLUMN = ("Column", "Dot")  # the second from the fifth name of a path on
_COMPARE = ("EQ", "NEQ", "LT", "LTE", "GT", "GTE")
_SYMBOLS = {"EQ": "=", "NEQ": "<>", "LT": "<", "LTE": "<=", "GT": ">", "GTE": ">="}
_MIRROR = {"EQ": "EQ", "NEQ": "NEQ", "LT": "GT", "LTE": "GTE", "GT": "LT", "GTE": "LTE"}
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
_OPS = {"=": "EQ", "==": "EQ", "!=": "NEQ", "<": "LT", "<=": "LTE", ">": "GT", ">=": "GTE"}
_NAME = r'"((?:[^"]|"")*)"|([^".]+)'
_PATH = rf"(?:{_NAME})(?:\.(?:{_NAME}))*"
_FORMS = (
    'give SQL text, a list like [("dt", ">=", "2026-11-01"), ("label", "in", [1, 2])], where a list of lists is an OR, '
    "or a pyarrow expression"
)


def parse_where(where: str, schema: pa.Schema, option: str = "--where") -> pc.Expression:
    """Parse ``where`` into an expression over the columns of ``schema``, with constants cast to their types.

    Nulls behave as in SQL: a comparison with a null is neither true nor false, and only rows that make the whole
    condition true are taken. NaN behaves as in IEEE 754: it equals nothing and is in no range. A syntax error, an
    unknown column or a constant that does not fit its column's type raises a UsageError about ``option``.
    """
    return expression_of(parse_condition(where, schema, option))


def parse_condition(where: str, schema: pa.Schema, option: str = "--where") -> Condition:
    """Parse ``where`` as a condition on the columns of ``schema``; see `parse_where`."""
    try:
        return _condition(_parse(where), schema)
    except UsageError as error:
        raise error.within(f"{option} {where!r}") from error
    except RecursionError as error:
        raise UsageError(option, "too deeply nested", _HELP) from error


def where_columns(where: str) -> list[tuple[str, ...]]:
    """Columns in ``where``, in order of appearance, each split at its dots."""
    try:
        return _columns_in(_parse(where))
    except UsageError as error:
        raise error.within(f"--where {where!r}") from error


def condition_on(where: str, columns: Collection[str]) -> str:
    """The parts of ``where``, joined by AND, that name only ``columns``; empty if there are none."""
    known = {name.lower() for name in columns}
    try:
        tree = _parse(where)
        parts = list(tree.flatten()) if type(tree).__name__ == "And" else [tree]
        named = [{".".join(path).lower() for path in _columns_in(part)} for part in parts]
    except UsageError as error:
        raise error.within(f"--where {where!r}") from error
    return " AND ".join(f"({part.sql()})" for part, names in zip(parts, named, strict=True) if names and names <= known)


def rows_matching(table: pa.Table, where: str) -> list[int]:
    """Positions of the rows of ``table`` for which ``where`` is true."""
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
    """A constant in its column's type; one between two integers becomes the lower of them.

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
        return UsageError("", f"{text!r} is a column, not a constant", f"write text in quotes: '{node.name}'")
    return UsageError("", f"{text!r} is not a constant", _HELP)


def _quoted(date: str) -> str:
    return f"write dates and times in quotes: '{date}'"


def condition_from(filters: Any, schema: pa.Schema) -> Condition:
    """Parse a list of comparisons as a condition on the columns of ``schema``; anything else raises UsageError."""
    try:
        if not isinstance(filters, list | tuple) or not filters:
            raise UsageError("", "not a condition", _FORMS)
        either = [filters] if _is_comparison(filters[0]) else filters
        parts = []
        for conjunction in either:
            if not isinstance(conjunction, list | tuple) or not conjunction:
                raise UsageError("", "not a condition", _FORMS)
            inner = tuple(_comparison(part, schema) for part in conjunction)
            parts.append(And(inner) if len(inner) > 1 else inner[0])
        return Or(tuple(parts)) if len(parts) > 1 else parts[0]
    except UsageError as error:
        raise error.within(f"filters {first_line(repr(filters))}") from error


def _is_comparison(part: Any) -> bool:
    return isinstance(part, list | tuple) and len(part) == 3 and isinstance(part[1], str)


def _comparison(part: Any, schema: pa.Schema) -> Condition:
    if not _is_comparison(part):
        raise UsageError("", f"not a comparison: {part!r}", _FORMS)
    column, op, value = part
    if not isinstance(column, str):
        raise UsageError("", f"{column!r} is not the name of a column", _FORMS)
    operand = operand_of([column] if column in schema.names else _path_names(column), schema)
    if op in _OPS:
        if value is None:
            raise UsageError(
                "", f"a comparison of {column} with None is never true", f"write filters='{column} IS NULL'"
            )
        return comparison(operand, _OPS[op], _value(value, operand, f'("{{name}}", "{op}", "{{value}}")'))
    if op not in ("in", "not in"):
        raise UsageError("", f"{op!r} is not one of {', '.join(_OPS)}, in, not in")
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise UsageError("", f"{column} {op} needs a list of values, not {value!r}")
    values = [item.as_py() if isinstance(item, pa.Scalar) and not item.is_valid else item for item in value]
    text = f'("{{name}}", "{op}", ["{{value}}"])'
    found = in_condition(operand, [_value(item, operand, text) for item in values if item is not None])
    some_null = any(item is None for item in values)
    null = IsNull(operand.column, operand.inner)
    if op == "in":
        return Or((found, null)) if some_null else found
    return Not(found) if some_null else Or((Not(found), null))


def _path_names(path: str) -> list[str]:
    """Split a path at its dots; names that contain dots are quoted, as in SQL.

    >>> _path_names('user."e.mail"')
    ['user', 'e.mail']
    """
    if re.fullmatch(_PATH, path) is None:
        return path.split(".")
    return [plain or quoted.replace('""', '"') for quoted, plain in re.findall(_NAME, path)]


def _value(value: Any, operand: Operand, as_text: str) -> pa.Scalar | int:
    """Convert a value of Python, numpy, pandas or Arrow to the type of ``operand``, as `constant_of` does."""
    kind = value_type(operand.type)
    if isinstance(value, np.generic) and not isinstance(value, np.datetime64 | np.timedelta64):
        value = value.item()
    elif isinstance(value, pa.Scalar) and not pt.is_temporal(value_type(value.type)):
        value = value.as_py()
    if isinstance(value, bool):
        return constant_of(str(value).lower(), operand, as_text)
    if isinstance(value, int | float | Decimal):
        return constant_of(str(value), operand, as_text)
    if isinstance(value, str):
        return constant_of(value, operand)
    try:
        scalar = _scalar(value)
        if pt.is_temporal(scalar.type) and not (pt.is_temporal(kind) or (pt.is_date(scalar.type) and is_text(kind))):
            reason = f"{operand.name} is {kind}, and {value} is {scalar.type}"
            raise UsageError("", reason, "give a value of the column's type, text as the column has it")
        if pt.is_timestamp(kind) and pt.is_timestamp(scalar.type) and (kind.tz is None) != (scalar.type.tz is None):
            raise UsageError("", f"{value} and {operand.name} must both have a time zone, or neither")
        found = scalar.cast(kind)
        if pt.is_date(kind) and pt.is_timestamp(scalar.type) and found.cast(scalar.type) != scalar:
            raise no_value(str(value), operand)  # the cast would drop the time of day
        return found
    except (pa.ArrowException, ValueError, TypeError) as error:
        if isinstance(error, UsageError):
            raise
        raise no_value(str(value), operand) from error


def _scalar(value: Any) -> pa.Scalar:
    """Convert a value, neither text nor a number, to Arrow with its nanoseconds."""
    if isinstance(value, pa.Scalar):
        return value
    zone = getattr(value, "tzinfo", None)
    if value == value and hasattr(value, "asm8"):  # pandas, not NaT: pa.scalar() would take microseconds
        value = value.asm8  # of UTC
    if not isinstance(value, np.datetime64 | np.timedelta64):
        return pa.scalar(value)
    scalar = pa.array(np.array([value]))[0]  # pa.scalar() takes none of days
    return scalar if zone is None else scalar.cast(pa.timestamp(scalar.type.unit, "UTC"))
