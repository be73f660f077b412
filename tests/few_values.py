"""A fixture for directories whose tables are small: their lists are read as those of large ones are."""

from __future__ import annotations

import pytest

from pqcache.parquet import fast_decode


@pytest.fixture(autouse=True)
def few_values_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have pages of lists read as such however few values a row group has, except for processes that are spawned.

    It patches limits, as tables with enough values for that would make each of many tests take seconds.
    """
    for name in ("_MANY", "_MANY_IN_PAGE", "_PAGE"):
        monkeypatch.setattr(fast_decode, name, 1)
