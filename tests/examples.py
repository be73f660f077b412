"""How many examples Hypothesis tries of a property: a third in `make test` of what `make test-deep` tries."""

from __future__ import annotations

import os

PROFILE = os.environ.get("PQCACHE_TEST_PROFILE", "quick")


def examples(wanted: int) -> int:
    """Return the number of examples of a property whose inputs ``wanted`` examples cover well."""
    return wanted if PROFILE == "deep" else max(10, wanted // 3)
