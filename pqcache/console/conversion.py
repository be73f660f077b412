"""Converts only those values of a command line that need it: Typer does it with pydantic, which is slow to import."""

from __future__ import annotations

import types
from collections.abc import Callable
from functools import partial
from typing import Any, Union, get_args, get_origin, get_type_hints


def convert_where_needed(command: Any, context: Any) -> None:
    """Have the parameters of ``command`` take absent values, defaults and plain text as they are."""
    kinds = get_type_hints(command.callback)
    for parameter in command.get_params(context):
        text = _is_text(kinds.get(parameter.name))
        parameter.process_value = partial(_processed, parameter, text, parameter.process_value)


def _processed(parameter: Any, is_text: bool, process: Callable[[Any, Any], Any], context: Any, value: Any) -> Any:
    is_default = not parameter.required and (value is None or value is parameter.default)
    if not (is_default or (is_text and type(value) is str)):
        return process(context, value)
    if value is None and (parameter.nargs == -1 or getattr(parameter, "multiple", False)):
        value = ()  # as Typer makes of it
    return value if parameter.callback is None else parameter.callback(context, parameter, value)


def _is_text(kind: Any) -> bool:
    """Return whether an option takes one text.

    >>> _is_text(str), _is_text(str | None), _is_text(list[str] | None), _is_text(int)
    (True, True, False, False)
    """
    kinds = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    return set(kinds) - {types.NoneType} == {str}
