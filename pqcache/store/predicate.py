"""A ``--where`` string as a condition: a small tree that turns into a pyarrow expression, or prunes.

sqlglot parses; only comparisons of a column with constants, IN, BETWEEN, LIKE, IS NULL, AND, OR and NOT are
let through. Nothing is ever evaluated as code.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import ROUND_FLOOR, Decimal, InvalidOperation
from functools import reduce
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

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
_MAX_DIGITS = 80  # of a number; decimal256 holds 76


@dataclass(frozen=True)
class Compare:
    """A column against a constant of its type; ``op`` is EQ, NEQ, LT, LTE, GT or GTE."""

    column: str
    op: str
    value: pa.Scalar


@dataclass(frozen=True)
class In:
    """Whether a column's value is one of ``values``, which may be none: then it is false, or null for a null."""

    column: str
    values: tuple[pa.Scalar, ...]


@dataclass(frozen=True)
class Like:
    """A column of text, of type ``kind``, against a pattern of ``%``, ``_`` and ``\\`` before what is literal."""

    column: str
    pattern: str
    kind: pa.DataType


@dataclass(frozen=True)
class IsNull:
    """Whether a column is null; never null itself."""

    column: str


@dataclass(frozen=True)
class Always:
    """TRUE or FALSE."""

    value: bool


@dataclass(frozen=True)
class And:
    """True where all parts are."""

    parts: tuple[Condition, ...]


@dataclass(frozen=True)
class Or:
    """True where one part is."""

    parts: tuple[Condition, ...]


@dataclass(frozen=True)
class Not:
    """True where ``part`` is false; null where that is null."""

    part: Condition


Condition = Compare | In | Like | IsNull | Always | And | Or | Not


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
        raise UsageError(f"{option} {where!r}: {error}") from error
    except RecursionError as error:
        raise UsageError(f"{option}: too deeply nested; {_HELP}") from error


def where_columns(where: str) -> list[str]:
    """Return the names of the columns in ``where`` in order of appearance."""
    from sqlglot import exp

    try:
        return list(dict.fromkeys(_name(column) for column in _parse(where).find_all(exp.Column, bfs=False)))
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


def condition_columns(condition: Condition) -> list[str]:
    """Return the names of the columns in ``condition``, each once, as the schema spells them."""
    if isinstance(condition, And | Or):
        return list(dict.fromkeys(name for part in condition.parts for name in condition_columns(part)))
    if isinstance(condition, Not):
        return condition_columns(condition.part)
    return [] if isinstance(condition, Always) else [condition.column]


def expression_of(condition: Condition, constants: Mapping[str, pa.Scalar] | None = None) -> pc.Expression:
    """Return ``condition`` as a pyarrow expression in which the columns in ``constants`` have that one value."""
    known = constants or {}

    def build(node: Condition) -> pc.Expression:
        if isinstance(node, Always):
            return pc.scalar(node.value)
        if isinstance(node, Not):
            return ~build(node.part)
        if isinstance(node, And | Or):
            return _balanced(operator.and_ if isinstance(node, And) else operator.or_, list(map(build, node.parts)))
        column = pc.scalar(known[node.column]) if node.column in known else pc.field(node.column)
        if isinstance(node, Compare):
            return _COMPARE[node.op](column, node.value)
        if isinstance(node, Like):
            return pc.match_like(column.cast(node.kind), node.pattern)  # it takes no dictionary
        if isinstance(node, In):
            return _any_of(column, node.values)
        return column.is_null()

    return build(condition)


def _any_of(column: pc.Expression, values: Sequence[pa.Scalar]) -> pc.Expression:
    if values and (len(values) <= 2 or pt.is_floating(values[0].type)):
        # to isin() NaN equals itself and 0.0 differs from -0.0
        return _balanced(operator.or_, [column == value for value in values])
    # isin() calls a null a mismatch, SQL calls it unknown: matters under NOT
    present = column.isin(pa.array(values, values[0].type)) if values else pc.scalar(False)
    return pc.if_else(column.is_null(), pc.scalar(pa.scalar(None, pa.bool_())), present)


def _balanced(join: Callable[[Any, Any], Any], parts: list[pc.Expression]) -> pc.Expression:
    """Return ``parts`` joined two by two: a chain of a thousand would nest a thousand deep."""
    while len(parts) > 1:
        parts = [reduce(join, parts[i : i + 2]) for i in range(0, len(parts), 2)]
    return parts[0]


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
}


def _condition(node: Any, schema: pa.Schema) -> Condition:
    kind = type(node).__name__
    allowed = _ARGUMENTS.get(kind)
    if allowed is None:
        raise UsageError(f"{node.sql()!r} is not supported; {_HELP}")
    extra = [name for name, value in node.args.items() if value and name not in allowed]
    if extra:
        if kind == "In":
            raise UsageError(f"IN needs a list of constants; {_HELP}")
        raise UsageError(f"{node.sql()!r}: {', '.join(extra).upper()} is not supported; {_HELP}")
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
        return _comparison(field, kind, _constant(right, field))
    if kind == "Boolean":
        return Always(bool(node.this))
    field = _field(node if kind == "Column" else node.this, schema)
    if kind == "Column":
        if pt.is_boolean(field.type):
            return Compare(field.name, "EQ", pa.scalar(True))
        raise UsageError(f"{field.name} alone is not a condition; compare it with a constant")
    if kind == "In":
        if not node.expressions:
            raise UsageError(f"IN needs a list of constants; {_HELP}")
        values = [_constant(item, field) for item in node.expressions]
        return In(field.name, tuple(value for value in values if isinstance(value, pa.Scalar)))
    if kind == "Between":
        low, high = (_constant(node.args[end], field) for end in ("low", "high"))
        return And((_comparison(field, "GTE", low), _comparison(field, "LTE", high)))
    if kind == "Like":
        text = _value_type(field)
        if not (pt.is_string(text) or pt.is_large_string(text)):
            raise UsageError(f"LIKE needs a string column, {field.name} is {field.type}")
        pattern = _constant(node.expression, field)
        assert isinstance(pattern, pa.Scalar)
        return Like(field.name, pattern.as_py(), text)
    if type(node.expression).__name__ == "Null":
        return IsNull(field.name)
    raise UsageError("IS takes NULL or NOT NULL")


def _comparison(field: pa.Field, op: str, value: pa.Scalar | int) -> Condition:
    """Return a comparison; an int stands for a number between itself and the next one."""
    if isinstance(value, pa.Scalar):
        return Compare(field.name, op, value)
    if op in ("EQ", "NEQ"):
        never = In(field.name, ())
        return never if op == "EQ" else Not(never)
    return Compare(field.name, "LTE" if op in ("LT", "LTE") else "GT", _cast(str(value), field))


def _is_column(node: Any) -> bool:
    return type(node).__name__ == "Column"


def _name(column: Any) -> str:
    return ".".join(part.name for part in column.parts)


def _field(node: Any, schema: pa.Schema) -> pa.Field:
    while type(node).__name__ == "Paren":
        node = node.this
    if not _is_column(node):
        raise UsageError(f"{node.sql()!r} is not a column; {_HELP}")
    name = _name(node)
    matches = [field for field in schema if field.name == name]
    if not matches:
        matches = [field for field in schema if field.name.lower() == name.lower()]  # SQL folds case
    if len(matches) > 1:
        raise UsageError(f"there are {len(matches)} columns {name}; a condition needs one")
    if not matches:
        known = ", ".join(schema.names) or "none"
        raise UsageError(f"there is no column {name}; there are: {known}")
    return matches[0]


def _value_type(field: pa.Field) -> pa.DataType:
    return field.type.value_type if pt.is_dictionary(field.type) else field.type


def _constant(node: Any, field: pa.Field) -> pa.Scalar | int:
    """Return a constant in its column's type, or, for one between two whole numbers, the lower of them."""
    kind = type(node).__name__
    if kind == "Paren":
        return _constant(node.this, field)
    if kind == "Null":
        raise UsageError(f"{field.name} = NULL is never true; write {field.name} IS NULL")
    sign = ""
    if kind == "Neg":
        node, sign = node.this, "-"
        kind = type(node).__name__
    if kind == "Cast" and type(node.this).__name__ == "Literal" and node.this.is_string:  # DATE '2026-11-01'
        node, kind = node.this, "Literal"
    if kind == "Boolean":
        text = str(bool(node.this)).lower()
    elif kind == "Literal":
        text = sign + str(node.this)
    else:
        raise UsageError(f"{node.sql()!r} is not a constant; {_HELP}")
    if pt.is_integer(_value_type(field)) and not text.lstrip("-").isdigit():
        return _whole_number(text, field)
    return _cast(text, field)


def _whole_number(text: str, field: pa.Field) -> pa.Scalar | int:
    # Compared as a float, a column of large integers would be rounded, or refused.
    try:
        number = Decimal(text)
    except InvalidOperation:
        number = Decimal("NaN")
    if not number.is_finite() or number.adjusted() > _MAX_DIGITS or len(text) > _MAX_DIGITS:
        raise _no_value(text, field)
    floor = number.to_integral_value(ROUND_FLOOR)
    _cast(str(int(floor)), field)
    return _cast(str(int(floor)), field) if floor == number else int(floor)


def _cast(text: str, field: pa.Field) -> pa.Scalar:
    kind = _value_type(field)
    try:
        if pt.is_string(kind) or pt.is_large_string(kind):
            return pa.scalar(text, kind)
        if pt.is_time(kind):  # pyarrow casts no text to it
            return pa.scalar(f"1970-01-01 {text}").cast(pa.timestamp("ns")).cast(pa.time64("ns")).cast(kind)
        return pa.scalar(text).cast(kind)
    except (pa.ArrowException, ValueError) as error:
        raise _no_value(text, field) from error


def _no_value(text: str, field: pa.Field) -> UsageError:
    return UsageError(f"{text!r} is not a value of {field.name}, which is {field.type}")
