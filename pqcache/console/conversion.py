"""Converts only those values of a command line that need it: Typer does it with pydantic, which is slow to import."""

from __future__ import annotations

import types
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from pqcache.errors import UsageError
from pqcache.units import parse_duration


def convert_where_needed(command: Any, context: Any) -> None:
    """Have the parameters of ``command`` take absent values, defaults and plain text as they are."""
    kinds = get_type_hints(command.callback, include_extras=True)
    for parameter in command.get_params(context):
        hint: Any = kinds.get(parameter.name)
        kind, *limits = (hint.__origin__, *hint.__metadata__) if get_origin(hint) is Annotated else (hint,)
        process = parameter.process_value
        if (number := _number_kind(kind)) is not None and not getattr(parameter, "multiple", False):
            process = partial(_number, parameter, number, limits[0] if limits else None)
        parameter.process_value = partial(_processed, parameter, _is_text(kind), process)


def _processed(parameter: Any, is_text: bool, process: Callable[[Any, Any], Any], context: Any, value: Any) -> Any:
    is_default = not parameter.required and (value is None or value is parameter.default)
    if not (is_default or (is_text and type(value) is str)):
        return process(context, value)
    if value is None and (parameter.nargs == -1 or getattr(parameter, "multiple", False)):
        value = ()  # as Typer makes of it
    return value if parameter.callback is None else parameter.callback(context, parameter, value)


def _number(parameter: Any, kind: type[int] | type[float], limits: Any, context: Any, text: str) -> float:
    """Return the number in the text of an option, in seconds that of a duration; UsageError says what is wrong."""
    name = max(parameter.opts, key=len) if parameter.param_type_name == "option" else str(parameter.metavar)
    try:
        number = parse_duration(text) if parameter.metavar == "DURATION" else kind(text)
    except UsageError as error:
        raise UsageError(f"{name} {text}", error.reason, error.advice) from error
    except ValueError:
        reason, example = ("not a whole number", "8") if kind is int else ("not a number", "2.5")
        raise UsageError(f"{name} {text}", reason, f"write it like {example}") from None
    low, high = getattr(limits, "min", None), getattr(limits, "max", None)
    if low is not None and not number >= low:
        raise UsageError(f"{name} {text}", f"has to be at least {low:g}")
    if high is not None and not number <= high:
        raise UsageError(f"{name} {text}", f"has to be at most {high:g}")
    return number


def _number_kind(kind: Any) -> type[int] | type[float] | None:
    """Return int or float where that is what an option takes.

    >>> _number_kind(int | None), _number_kind(float), _number_kind(bool), _number_kind(str)
    (<class 'int'>, <class 'float'>, None, None)
    """
    kinds = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    found = set(kinds) - {types.NoneType}
    return next((number for number in (int, float) if found == {number}), None)


def _is_text(kind: Any) -> bool:
    """Return whether an option takes one text.

    >>> _is_text(str), _is_text(str | None), _is_text(list[str] | None), _is_text(int)
    (True, True, False, False)
    """
    kinds = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    return set(kinds) - {types.NoneType} == {str}
