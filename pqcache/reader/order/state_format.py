"""The format of states, which is also that of the order: a batch of a state has the rows that this order gives it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pqcache.errors import UsageError

FORMAT = 2  # an order in which a batch has other rows needs another one


def check_format(state: Any, name: str, owner: str) -> None:
    """Raise UsageError where a state is of another format or is none of ``owner``; the error calls it ``name``."""
    if not isinstance(state, Mapping) or "format" not in state:
        raise UsageError(name, f"it is not a state of {owner}", "give what its state_dict() returned")
    if state["format"] == 1:
        reason = f"it is of format 1, in whose order a batch has other rows: this pqcache reads format {FORMAT}"
        raise UsageError(name, reason, "resume with the pqcache that took it, or start the epoch afresh")
    if state["format"] != FORMAT:
        raise UsageError(name, f"it is of format {state['format']}, this pqcache reads {FORMAT}", "upgrade pqcache")
