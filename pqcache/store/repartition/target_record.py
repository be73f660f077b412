"""A target: a dataset being written at one URL, of which readers see each partition directory completely or not at all.

Until it is finished, a target has a directory ``_pqcache`` that readers skip, with a record of every partition that
was published. So a run that was stopped is continued where it ended, and nothing that pqcache did not write is ever
overwritten.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from pqcache.errors import MALFORMED, CacheLocked, SourceNotFound, UsageError
from pqcache.store.drivers.target import HIDDEN, Target
from pqcache.store.urls import printable

RECORDS = f"{HIDDEN}/records"
RUN = f"{HIDDEN}/run"


@dataclass(frozen=True, kw_only=True)
class DirectoryResult:
    """What one directory was rewritten to: files, row groups and bytes before and after, rows, and warnings."""

    files: tuple[int, int]
    row_groups: tuple[int, int]
    bytes: tuple[int, int]
    rows: int
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class DirectoryRecord:
    """One directory of the target: its ``key`` names from what and how it was made; ``files`` are names and sizes."""

    directory: str
    key: str
    files: Mapping[str, int]
    done: DirectoryResult

    @property
    def path(self) -> str:
        """Where the record lies below the target."""
        return f"{RECORDS}/{hashlib.sha256(self.directory.encode()).hexdigest()[:32]}.json"

    def encoded(self) -> bytes:
        return json.dumps(asdict(self)).encode()


def decode_record(data: bytes) -> DirectoryRecord | None:
    """None for a record that cannot be read."""
    try:
        stored = json.loads(data)
        done = stored.pop("done")
        done = {name: tuple(value) if isinstance(value, list) else value for name, value in done.items()}
        return DirectoryRecord(**stored, done=DirectoryResult(**done))
    except MALFORMED:
        return None


def read_records(target: Target) -> tuple[list[DirectoryRecord], list[DirectoryRecord]]:
    """Return the records of an earlier run whose files are all at the target, and the other records.

    A file that no record names was not written by pqcache: UsageError, so that nothing is ever written over.
    """
    found = {file.path: file.identity.size for file in target.list()}
    records = []
    for path, size in found.items():
        if path.startswith(f"{RECORDS}/") and (record := decode_record(target.read_start(path, size))) is not None:
            records.append(record)
    ours = {_below(record.directory, name): size for record in records for name, size in record.files.items()}
    for path, size in found.items():
        if not path.startswith(f"{HIDDEN}/") and ours.get(path) != size:
            raise UsageError(
                target.url, f"exists and is not empty ({printable(path)})", "name a new or empty directory"
            )
    complete: list[DirectoryRecord] = []
    incomplete: list[DirectoryRecord] = []
    for record in records:
        exists = all(_below(record.directory, name) in found for name in record.files)
        (complete if exists else incomplete).append(record)
    return complete, incomplete


def claim(target: Target, run: str) -> None:
    """Make the target this run's from now on."""
    target.write(RUN, run.encode())


def check_claim(target: Target, run: str) -> None:
    """Raise CacheLocked if another run has begun since, or finished: a job on a cluster may outlive its run."""
    try:
        found = target.read_start(RUN, len(run)).decode("ascii", "replace")
    except SourceNotFound:
        found = ""
    if found != run:
        raise CacheLocked(target.url, "another run writes there now, or has finished it", "this run ends")


def remove_directory(target: Target, record: DirectoryRecord) -> None:
    """Remove a directory's files, then its record."""
    target.remove([_below(record.directory, name) for name in record.files])
    target.remove([record.path])


def _below(directory: str, name: str) -> str:
    return f"{directory}/{name}" if directory else name
