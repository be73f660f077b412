"""A condition as pandas and pyarrow take it: ``[("dt", ">=", "2026-11-01"), ("label", "in", [1, 2])]``.

A list of comparisons that must all be true, or a list of such lists of which one must be. Constants are read in their
column's type, as in ``--where``. Nulls are as with pyarrow: they satisfy no comparison but ``in`` a list with None,
and ``not in`` a list without.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

from pqcache.errors import UsageError, first_line
from pqcache.filters.expression import (
    And,
    Condition,
    IsNull,
    Not,
    Operand,
    Or,
    comparison,
    constant_of,
    in_condition,
    no_value,
    operand_of,
    value_type,
)
from pqcache.parquet.types import is_text

_OPS = {"=": "EQ", "==": "EQ", "!=": "NEQ", "<": "LT", "<=": "LTE", ">": "GT", ">=": "GTE"}
_NAME = r'"((?:[^"]|"")*)"|([^".]+)'
_PATH = rf"(?:{_NAME})(?:\.(?:{_NAME}))*"
_HELP = (
    'give SQL text, a list like [("dt", ">=", "2026-11-01"), ("label", "in", [1, 2])], where a list of lists is an OR, '
    "or a pyarrow expression"
)


def condition_from(filters: Any, schema: pa.Schema) -> Condition:
    """Return such a list as a condition on the columns of ``schema``; what is none raises UsageError."""
    try:
        if not isinstance(filters, list | tuple) or not filters:
            raise UsageError("", "not a condition", _HELP)
        either = [filters] if _is_comparison(filters[0]) else filters
        parts = []
        for conjunction in either:
            if not isinstance(conjunction, list | tuple) or not conjunction:
                raise UsageError("", "not a condition", _HELP)
            inner = tuple(_comparison(part, schema) for part in conjunction)
            parts.append(And(inner) if len(inner) > 1 else inner[0])
        return Or(tuple(parts)) if len(parts) > 1 else parts[0]
    except UsageError as error:
        raise error.within(f"filters {first_line(repr(filters))}") from error


def _is_comparison(part: Any) -> bool:
    return isinstance(part, list | tuple) and len(part) == 3 and isinstance(part[1], str)


def _comparison(part: Any, schema: pa.Schema) -> Condition:
    if not _is_comparison(part):
        raise UsageError("", f"{part!r} is no comparison", _HELP)
    column, op, value = part
    if not isinstance(column, str):
        raise UsageError("", f"{column!r} is not the name of a column", _HELP)
    operand = operand_of([column] if column in schema.names else _names(column), schema)
    if op in _OPS:
        if value is None:
            raise UsageError(
                "", f"a comparison of {column} with None is never true", f"write filters='{column} IS NULL'"
            )
        return comparison(operand, _OPS[op], _constant(value, operand, f'("{{name}}", "{op}", "{{value}}")'))
    if op not in ("in", "not in"):
        raise UsageError("", f"{op!r} is not one of {', '.join(_OPS)}, in, not in")
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise UsageError("", f"{column} {op} needs a list of values, not {value!r}")
    values = [item.as_py() if isinstance(item, pa.Scalar) and not item.is_valid else item for item in value]
    text = f'("{{name}}", "{op}", ["{{value}}"])'
    found = in_condition(operand, [_constant(item, operand, text) for item in values if item is not None])
    some_null = any(item is None for item in values)
    null = IsNull(operand.column, operand.inner)
    if op == "in":
        return Or((found, null)) if some_null else found
    return Not(found) if some_null else Or((Not(found), null))


def _names(path: str) -> list[str]:
    """Return the names between the dots of a path; those with dots are quoted, as in SQL.

    >>> _names('user."e.mail"')
    ['user', 'e.mail']
    """
    if re.fullmatch(_PATH, path) is None:
        return path.split(".")
    return [plain or quoted.replace('""', '"') for quoted, plain in re.findall(_NAME, path)]


def _constant(value: Any, operand: Operand, as_text: str) -> pa.Scalar | int:
    """Return a value of Python, numpy, pandas or Arrow in the type of ``operand``, as `constant_of` does."""
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
    """Return what is neither text nor a number as an Arrow value, with its nanoseconds."""
    if isinstance(value, pa.Scalar):
        return value
    zone = getattr(value, "tzinfo", None)
    if value == value and hasattr(value, "asm8"):  # pandas, of which pa.scalar() takes microseconds; not NaT
        value = value.asm8  # of UTC
    if not isinstance(value, np.datetime64 | np.timedelta64):
        return pa.scalar(value)
    scalar = pa.array(np.array([value]))[0]  # pa.scalar() takes none of days
    return scalar if zone is None else scalar.cast(pa.timestamp(scalar.type.unit, "UTC"))
