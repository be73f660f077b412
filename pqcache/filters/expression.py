"""Conditions on the rows of a table as syntax trees, and their conversion to pyarrow expressions.

``--where`` and ``filters=`` are parsed into these; see `pqcache.filters.parse`. Constants have their columns' types.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import ROUND_FLOOR, Decimal, InvalidOperation
from functools import reduce
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from pqcache.errors import UsageError, no_column
from pqcache.parquet.arrow import is_text, without_views

_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "EQ": operator.eq,
    "NEQ": operator.ne,
    "LT": operator.lt,
    "LTE": operator.le,
    "GT": operator.gt,
    "GTE": operator.ge,
}
HINTS = (
    b"pqcache.hints"  # where a field has as JSON what `pqcache.store.partition_paths.with_hints` knows of its values
)
_MAX_DIGITS = 80  # of a number; decimal256 holds 76


@dataclass(frozen=True)
class Compare:
    """A column against a constant of its type; ``op`` is EQ, NEQ, LT, LTE, GT or GTE.

    Here and below ``inner`` is the path of names to a field of a struct column; empty for the column itself.
    """

    column: str
    op: str
    value: pa.Scalar
    inner: tuple[str, ...] = ()


@dataclass(frozen=True)
class In:
    """Whether a column's value is one of ``values``. Without any values it is false, or null for a null."""

    column: str
    values: tuple[pa.Scalar, ...]
    inner: tuple[str, ...] = ()


@dataclass(frozen=True)
class Like:
    """A column of text, of type ``kind``, against a pattern of ``%`` and ``_``; ``\\`` makes the next one literal."""

    column: str
    pattern: str
    kind: pa.DataType
    inner: tuple[str, ...] = ()


@dataclass(frozen=True)
class IsNull:
    """Whether a column is null; never null itself."""

    column: str
    inner: tuple[str, ...] = ()


@dataclass(frozen=True)
class Always:
    """TRUE or FALSE."""

    value: bool


@dataclass(frozen=True)
class And:
    """True if all parts are."""

    parts: tuple[Condition, ...]


@dataclass(frozen=True)
class Or:
    """True if one part is."""

    parts: tuple[Condition, ...]


@dataclass(frozen=True)
class Not:
    """True if ``part`` is false; null if that is null."""

    part: Condition


Condition = Compare | In | Like | IsNull | Always | And | Or | Not


@dataclass(frozen=True)
class Operand:
    """The left side of a comparison: a column, or a field inside a column of structs, and its type.

    ``metadata`` is that of the column, with HINTS for a partition column of text.
    """

    column: str
    inner: tuple[str, ...]
    type: pa.DataType
    metadata: Mapping[bytes, bytes] | None = None

    @property
    def name(self) -> str:
        """Its name in a condition."""
        return ".".join((self.column, *self.inner))


def text_of(condition: Condition) -> str:
    """A text that identifies ``condition``: different conditions have different texts."""
    if isinstance(condition, Always):
        return "TRUE" if condition.value else "FALSE"
    if isinstance(condition, And | Or):
        return f" {type(condition).__name__.upper()} ".join(f"({text_of(part)})" for part in condition.parts)
    if isinstance(condition, Not):
        return f"NOT ({text_of(condition.part)})"
    name = ".".join(json.dumps(part) for part in (condition.column, *condition.inner))
    if isinstance(condition, Compare):
        return f"{name} {condition.op} {_text_of(condition.value)}"
    if isinstance(condition, In):
        return f"{name} IN ({', '.join(map(_text_of, condition.values))})"
    if isinstance(condition, Like):
        return f"{name} LIKE {json.dumps(condition.pattern)}"
    return f"{name} IS NULL"


def _text_of(value: pa.Scalar) -> str:
    try:
        return json.dumps(value.cast(pa.string()).as_py())
    except pa.ArrowException:
        return repr(value.as_py())


def rows_where(table: pa.Table, expression: pc.Expression) -> npt.NDArray[np.int64]:
    """The ascending positions of the rows of ``table`` for which ``expression`` is true.

    Raises pyarrow's errors for an expression that does not fit the table, and TypeError if it isn't a condition.
    """
    from pyarrow import acero

    rows = pa.nulls(table.num_rows)  # a table without a column cannot say how many rows it has
    plan = acero.Declaration.from_sequence(
        [
            acero.Declaration("table_source", acero.TableSourceNodeOptions(table.append_column("\0rows", rows))),
            acero.Declaration("project", acero.ProjectNodeOptions([expression], ["matches"])),
        ]
    )
    matches = plan.to_table(use_threads=False)["matches"]
    if not pt.is_boolean(matches.type):
        raise TypeError(f"{expression} is {matches.type}, not a condition")
    flags = pc.fill_null(matches, False).to_numpy()
    return np.flatnonzero(flags).astype(np.int64, copy=False)


def condition_columns(condition: Condition) -> list[str]:
    """Names of the columns in ``condition``, each once, as the schema spells them."""
    if isinstance(condition, And | Or):
        return list(dict.fromkeys(name for part in condition.parts for name in condition_columns(part)))
    if isinstance(condition, Not):
        return condition_columns(condition.part)
    return [] if isinstance(condition, Always) else [condition.column]


def expression_of(condition: Condition, constants: Mapping[str, pa.Scalar] | None = None) -> pc.Expression:
    """Turn ``condition`` into a pyarrow expression; ``constants`` are the values of columns that have only one."""
    known = constants or {}

    def build(node: Condition) -> pc.Expression:
        if isinstance(node, Always):
            return pc.scalar(node.value)
        if isinstance(node, Not):
            return ~build(node.part)
        if isinstance(node, And | Or):
            return _balanced(operator.and_ if isinstance(node, And) else operator.or_, list(map(build, node.parts)))
        if node.column in known:
            column = pc.scalar(_inside(known[node.column], node.inner))
        else:
            column = pc.field(node.column, *node.inner)
        values = (node.value,) if isinstance(node, Compare) else node.values if isinstance(node, In) else ()
        if values and pt.is_float16(values[0].type):  # which Arrow does not compare
            column, values = column.cast(pa.float32()), tuple(value.cast(pa.float32()) for value in values)
        if isinstance(node, Compare):
            return _COMPARE[node.op](column, values[0])
        if isinstance(node, Like):
            return pc.match_like(column.cast(node.kind), node.pattern)  # it takes no dictionary
        if isinstance(node, In):
            return _any_of(column, values)
        return column.is_null()

    return build(condition)


def _inside(value: pa.Scalar, inner: Sequence[str]) -> pa.Scalar:
    """The nested field at path ``inner``; null if a struct on the way is null."""
    for name in inner:
        kind = value.type.field(name).type
        value = value[name] if value.is_valid else pa.scalar(None, kind)
    return value


def _any_of(column: pc.Expression, values: Sequence[pa.Scalar]) -> pc.Expression:
    if values and (len(values) <= 2 or pt.is_floating(values[0].type)):
        # to isin() NaN equals itself and 0.0 differs from -0.0
        return _balanced(operator.or_, [column == value for value in values])
    # isin() calls a null a mismatch, SQL calls it unknown: matters under NOT
    present = column.isin(pa.array(values, values[0].type)) if values else pc.scalar(False)
    return pc.if_else(column.is_null(), pc.scalar(pa.scalar(None, pa.bool_())), present)


def _balanced(join: Callable[[Any, Any], Any], parts: list[pc.Expression]) -> pc.Expression:
    """Join ``parts`` two by two: a chain of a thousand would nest a thousand deep."""
    while len(parts) > 1:
        parts = [reduce(join, parts[i : i + 2]) for i in range(0, len(parts), 2)]
    return parts[0]


def operand_of(parts: Sequence[str], schema: pa.Schema) -> Operand:
    """The column named ``parts``, joined by dots, or the struct field at that path.

    As in SQL, case is ignored if no name matches exactly. A missing or ambiguous name raises UsageError.
    """
    for length in range(len(parts), 0, -1):
        column = _named(".".join(parts[:length]), list(schema))
        field, inner = column, []
        for part in parts[length:]:
            field = _named(part, field.type.fields) if field is not None and pt.is_struct(field.type) else None
            if field is not None:
                inner.append(field.name)
        if column is not None and field is not None:
            return Operand(column.name, tuple(inner), field.type, column.metadata)
    raise _missing(parts, schema)


def _missing(parts: Sequence[str], schema: pa.Schema) -> UsageError:
    """The error for a name that doesn't exist, with how much of the path does."""
    inside = next((found for n in range(len(parts) - 1, 0, -1) if (found := _found(parts[:n], schema))), None)
    if inside is not None and pt.is_struct(inside.type):
        known = ", ".join(field.name for field in inside.type.fields) or "none"
        return UsageError("", f"no field {'.'.join(parts)!r}", f"{inside.name} has: {known}")
    if inside is not None and pt.is_nested(inside.type):
        reason = f"{'.'.join(parts)} is inside of {inside.name}, which is {inside.type}"
        return UsageError("", reason, "a condition takes columns, and fields of structs outside of lists and maps")
    return no_column("", ".".join(parts), schema.names)


def _found(parts: Sequence[str], schema: pa.Schema) -> Operand | None:
    try:
        return operand_of(parts, schema)
    except UsageError:
        return None


def _named(name: str, fields: Sequence[pa.Field]) -> pa.Field | None:
    matches = [field for field in fields if field.name == name]
    if not matches:
        matches = [field for field in fields if field.name.lower() == name.lower()]  # SQL folds case
    if len(matches) > 1:
        raise UsageError("", f"there are {len(matches)} columns {name}", "a condition needs one")
    return matches[0] if matches else None


def comparison(operand: Operand, op: str, value: pa.Scalar | int) -> Condition:
    """Make a comparison; a ``value`` of type int stands for a number between it and the next integer."""
    if isinstance(value, pa.Scalar):
        return Compare(operand.column, op, value, operand.inner)
    if op in ("EQ", "NEQ"):
        never = In(operand.column, (), operand.inner)
        return never if op == "EQ" else Not(never)
    return Compare(operand.column, "LTE" if op in ("LT", "LTE") else "GT", _cast(str(value), operand), operand.inner)


def in_condition(operand: Operand, values: Sequence[pa.Scalar | int]) -> Condition:
    """The operand is one of ``values``; an int among them matches nothing."""
    return In(operand.column, tuple(value for value in values if isinstance(value, pa.Scalar)), operand.inner)


def value_type(kind: pa.DataType) -> pa.DataType:
    """The type of a column's values, whether or not a dictionary encodes them."""
    return kind.value_type if pt.is_dictionary(kind) else kind


def constant_of(text: str, operand: Operand, as_text: str = "") -> pa.Scalar | int:
    """Read ``text`` as a constant in the type of ``operand``; see `comparison` for an int.

    A number or a boolean is never compared as text or with a time; the error then suggests ``as_text``, the same
    comparison written with text. Anything that is not a value of the type raises UsageError.
    """
    kind = without_views(value_type(operand.type))
    if as_text and (is_text(kind) or pt.is_fixed_size_binary(kind)):
        raise number_against_text(text, operand, as_text)
    if as_text and pt.is_temporal(kind):
        raise no_value(text, operand)
    if pt.is_integer(kind) and not text.lstrip("-").isdigit():
        return _whole_number(text, operand)
    return _cast(text, operand)


def _whole_number(text: str, field: Operand) -> pa.Scalar | int:
    # Compared as a float, a column of large integers would be rounded, or refused.
    try:
        number = Decimal(text)
    except InvalidOperation:
        number = Decimal("NaN")
    if not number.is_finite() or number.adjusted() > _MAX_DIGITS or len(text) > _MAX_DIGITS:
        raise no_value(text, field)
    floor = number.to_integral_value(ROUND_FLOOR)
    _cast(str(int(floor)), field)
    return _cast(str(int(floor)), field) if floor == number else int(floor)


def _cast(text: str, field: Operand) -> pa.Scalar:
    kind = value_type(field.type)
    try:
        if pt.is_string(kind) or pt.is_large_string(kind):
            return pa.scalar(text, kind)
        if pt.is_time(kind):  # pyarrow casts no text to it
            return pa.scalar(f"1970-01-01 {text}").cast(pa.timestamp("ns")).cast(pa.time64("ns")).cast(kind)
        return pa.scalar(text).cast(kind)
    except (pa.ArrowException, ValueError) as error:
        raise no_value(text, field) from error


def number_against_text(text: str, operand: Operand, as_text: str) -> UsageError:
    """The error for a number or a boolean that is compared with a column of text."""
    hints = json.loads((operand.metadata or {}).get(HINTS, b"{}"))
    what = "a boolean" if text.lower() in ("true", "false") else "a number"
    example = hints.get("like") if what == "a number" else None
    padded = example or (text.zfill(hints.get("width", 0)) if text.isdecimal() else text)
    kind = "binary" if "binary" in str(value_type(operand.type)) else "text"
    reason = f"{operand.name} is {kind}, and {text} is {what}"
    like = "its values are written, like" if example else "text with"
    advice = f"compare it as {like} {as_text.format(name=operand.name, value=padded)}"
    if hints.get("type") and what == "a number":
        declared = hints["type"]
        advice += f", or declare --partition-types {operand.name}={declared}"
        advice += f" (in Python partition_types={{'{operand.name}': '{declared}'}})"
        if "except" in hints:
            advice += f" and leave out values like {hints['except']!r} with --skip-bad"
    return UsageError("", reason, advice)


def no_value(text: str, field: Operand) -> UsageError:
    """The error for a constant that does not fit its column."""
    kind = value_type(field.type)
    zone = "; say in which zone, like '2026-11-20T04:00:00Z'" if pt.is_timestamp(kind) and kind.tz else ""
    return UsageError("", f"{text!r} is not a value of {field.name}, which is {field.type}{zone}")
