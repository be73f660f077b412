"""Which files of a Delta table's log make one of its versions, by the names in a listing of ``_delta_log``.

A version is a checkpoint, which is complete in itself, and the commits after it; or all commits from the first on.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pqcache.store.manifest import SourceFile

LOG = "_delta_log"  # the log's directory in that of its table
SIDECARS = "_sidecars"  # directory of the parts of checkpoints that name them
_COMMIT = re.compile(r"(\d{20})\.json")
_WHOLE = re.compile(r"(\d{20})\.checkpoint\.parquet")
_PART = re.compile(r"(\d{20})\.checkpoint\.(\d{10})\.(\d{10})\.parquet")
_NAMED = re.compile(r"(\d{20})\.checkpoint\.[0-9a-f]{8}-[0-9a-f-]{27}\.(json|parquet)")


@dataclass(frozen=True, kw_only=True)
class DeltaLog:
    """The files of a log.

    Attributes:
        commits: by version.
        checkpoints: complete ones by version; of several checkpoints of a version the one of the oldest format.
        sidecars: files that a checkpoint may name, by the name.
    """

    commits: Mapping[int, SourceFile]
    checkpoints: Mapping[int, tuple[SourceFile, ...]]
    sidecars: Mapping[str, SourceFile]

    def newest(self) -> int | None:
        """Return the newest version; None where the log has none."""
        return max([*self.commits, *self.checkpoints], default=None)

    def oldest(self) -> int | None:
        """Return the oldest version that the log still has; None where it has none."""
        return 0 if 0 in self.commits else min(self.checkpoints, default=None)

    def files_of(self, version: int) -> list[SourceFile] | None:
        """Return the files that make a version, without sidecars; None where one of them is not there."""
        after = max((known for known in self.checkpoints if known <= version), default=-1)
        commits = sorted(number for number in self.commits if after < number <= version)
        if len(commits) != version - after or version < 0:
            return None
        return [*self.checkpoints.get(after, ()), *(self.commits[number] for number in commits)]

    def version_at(self, time_ns: int, times: Mapping[int, int]) -> int | None:
        """Return the version that was the newest at a time; None before the oldest.

        ``times`` are the times of commits by version, in nanoseconds. As in Delta, a commit that seems older than the
        one before it counts as being as old.
        """
        versions = sorted(times)
        latest, known = 0, []
        for version in versions:
            latest = max(latest, times[version])
            known.append(latest)
        position = bisect_right(known, time_ns)
        return versions[position - 1] if position else None


def delta_log(entries: Iterable[SourceFile]) -> DeltaLog:
    """Return what is in a listing of ``_delta_log``; files that no reader needs are left out."""
    commits: dict[int, SourceFile] = {}
    whole: dict[int, tuple[SourceFile, ...]] = {}
    named: dict[int, tuple[SourceFile, ...]] = {}
    parts: dict[tuple[int, int], dict[int, SourceFile]] = {}
    sidecars: dict[str, SourceFile] = {}
    for file in entries:
        directory, _, name = file.path.rpartition("/")
        if directory == SIDECARS:
            sidecars[name] = file
        elif directory:
            continue
        elif match := _COMMIT.fullmatch(name):
            commits[int(match[1])] = file
        elif match := _WHOLE.fullmatch(name):
            whole[int(match[1])] = (file,)
        elif match := _PART.fullmatch(name):
            parts.setdefault((int(match[1]), int(match[3])), {})[int(match[2])] = file
        elif match := _NAMED.fullmatch(name):
            named[int(match[1])] = (file,)
    complete = {
        version: tuple(found[number] for number in sorted(found))
        for (version, count), found in parts.items()
        if sorted(found) == list(range(1, count + 1))
    }
    return DeltaLog(commits=commits, checkpoints={**named, **complete, **whole}, sidecars=sidecars)
