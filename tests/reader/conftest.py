"""Lists of small tables are read as those of large ones are."""

from __future__ import annotations

from tests.few_values import few_values_are_many

__all__ = ["few_values_are_many"]
