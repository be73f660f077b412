"""Which files of a Delta table's log make one of its versions, by the names in a listing; and a local copy of them.

A version is a checkpoint, which is complete in itself, and the commits after it; or all commits from the first on.
"""

from __future__ import annotations

import json
import os
import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from pqcache.errors import ParquetError, SourceUnavailable, first_line
from pqcache.store.drivers.base import Source
from pqcache.store.manifest import SourceFile
from pqcache.store.tables.base import TableLog

LOG = "_delta_log"  # the log's directory in that of its table
SIDECARS = "_sidecars"  # directory of the parts of checkpoints that name them
_COMMIT = re.compile(r"(\d{20})\.json")
_WHOLE = re.compile(r"(\d{20})\.checkpoint\.parquet")
_PART = re.compile(r"(\d{20})\.checkpoint\.(\d{10})\.(\d{10})\.parquet")
_NAMED = re.compile(r"(\d{20})\.checkpoint\.[0-9a-f]{8}-[0-9a-f-]{27}\.(json|parquet)")
_THREADS = 8


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


def copy_log(table: TableLog, log: DeltaLog, files: Sequence[SourceFile], directory: Path) -> None:
    """Copy ``files`` of a log, and the sidecars that a checkpoint among them names; SourceNotFound if one is gone."""
    target = directory / LOG

    def copy(file: SourceFile) -> None:
        name = table.source.url_of(file.path)
        table.options.tried(lambda: _copy(table.source, file, target / file.path), name)

    with ThreadPoolExecutor(_THREADS, thread_name_prefix="pqcache-log") as threads:
        (target / SIDECARS).mkdir(parents=True)
        list(threads.map(copy, files))
        if log.sidecars:
            names = [name for file in files if ".checkpoint." in file.path for name in _sidecars(target / file.path)]
            list(threads.map(copy, [log.sidecars[name] for name in names if name in log.sidecars]))


def link_log(root: str, log: DeltaLog, files: Iterable[SourceFile], directory: Path) -> None:
    """Make links in ``directory`` to ``files`` of the local log ``root``, and to all sidecars."""
    target = directory / LOG
    (target / SIDECARS).mkdir(parents=True)
    for file in (*files, *log.sidecars.values()):
        os.symlink(os.path.join(root, file.path), target / file.path)


def _copy(source: Source, file: SourceFile, target: Path) -> None:
    written = 0
    with target.open("wb") as out:
        for data in source.read(file.path, 0, file.identity.size, file.identity.tag):
            written += out.write(data)
    if written != file.identity.size:
        reason = f"{written:,} of {file.identity.size:,} bytes came"
        raise SourceUnavailable(source.url_of(file.path), reason)


def _sidecars(checkpoint: Path) -> list[str]:
    """Return the names of the sidecars that a checkpoint names."""
    if checkpoint.suffix == ".json":
        actions = [json.loads(line) for line in checkpoint.read_text().splitlines() if line.strip()]
        return [PurePosixPath(action["sidecar"]["path"]).name for action in actions if action.get("sidecar")]
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(checkpoint) as file:
            if "sidecar" not in file.schema_arrow.names:
                return []
            found = file.read(["sidecar.path"])["sidecar"].to_pylist()
    except (pa.ArrowException, OSError) as error:
        reason = f"is a checkpoint that cannot be read ({first_line(error)})"
        raise ParquetError(checkpoint.name, reason, "check the table with the engine that wrote it") from error
    return [PurePosixPath(row["path"]).name for row in found if row is not None]


def descriptors(log: Path, version: int) -> dict[str, Mapping[str, Any]]:
    """Return the log's ``deletionVector`` of each file that has one, by the file's path in the log.

    The library tells neither which files have one nor where it is, but writes it into a checkpoint. So ``log``, a copy
    of the table's log or of links to it, gets an empty commit after ``version``, and a checkpoint.
    """
    import pyarrow.parquet as pq
    from deltalake import DeltaTable

    commit = {"commitInfo": {"timestamp": 0, "inCommitTimestamp": 0, "operation": "pqcache"}}
    (log / f"{version + 1:020}.json").write_text(json.dumps(commit) + "\n")
    DeltaTable(str(log.parent), version=version + 1).create_checkpoint()
    with pq.ParquetFile(log / f"{version + 1:020}.checkpoint.parquet") as file:
        rows: list[Mapping[str, Any] | None] = file.read(["add.path", "add.deletionVector"])["add"].to_pylist()
    return {row["path"]: row["deletionVector"] for row in rows if row is not None and row["deletionVector"]}
