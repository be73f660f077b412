"""Which points of a run the sweeps try: the first of every phase in `make test`, many more in `make test-deep`."""

from __future__ import annotations

import os
import re
from collections.abc import Collection

import pytest

# for @pytest.mark.parametrize("deep", DEPTHS)
DEPTHS = [pytest.param(False, id="quick"), pytest.param(True, id="deep", marks=pytest.mark.deep)]

CHANGES = {
    "create", "write", "osfile", "os.mkdir", "os.rename", "os.link", "os.symlink", "os.remove", "os.rmdir", "os.chmod",
}  # fmt: skip
READS = {"open", "os.scandir", "os.listdir", "fcntl.flock"}
_NUMBERS = re.compile(r"[0-9a-f]{32}|[0-9a-f]{8}-\d+-[0-9a-f]{8}|\d{8}T\d{6}Z-\d+|[0-9a-f]{8}\b|\d+")
_PHASES = [  # of a run, by the path that an operation is about; the first that fits
    re.compile(pattern)
    for pattern in (
        "removed-", r"rename .*/snapshot$", "write .*/fetch", "history", "current", r"pqcache\.toml", r"\.in\b",
        "/publishing", "/arriving/.*_pqcache/[a-z_]+", "/arriving/.*parquet", "/arriving", "/fetch", "/rewrite",
        "/keys", "snapshot/_pqcache", "/snapshot/", "/snapshots", "/tmp",
    )
]  # fmt: skip


def points_to_try(points: list[str], deep: bool, operations: Collection[str] = CHANGES) -> list[int]:
    """Return the numbers of the points of a run at which a sweep intervenes.

    Quick: the first point of each phase of the run. Deep: the first of every kind of operation in every place, or all
    points where PQCACHE_FAULTS=all. Of a run that is killed, what is on disk is the same before an operation that
    changes nothing as before the next one that does.
    """
    if deep and os.environ.get("PQCACHE_FAULTS") == "all":
        return list(range(len(points)))
    first: dict[str, int] = {}
    for number, point in enumerate(points):
        operation = point.partition(" ")[0]
        if operation not in operations:
            continue
        if deep:
            first.setdefault(_NUMBERS.sub("*", point), number)
        else:
            phases = (found[0] for phase in _PHASES if (found := phase.search(point)))
            first.setdefault(next(phases, ""), number)
    return sorted(set(first.values()))
