"""A target: a dataset being written at one URL, one partition directory after the other, each seen whole or not at all.

Until it is finished, a target has a directory ``_pqcache`` that readers skip, with a record of every partition that
was published. So a run that was stopped is taken up where it ended, and nothing that pqcache did not write is ever
written over.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from pqcache.errors import CacheLocked, SourceNotFound, UsageError
from pqcache.store.drivers.base import HIDDEN, Target
from pqcache.store.urls import local_path, printable, redact, url_scheme

RECORDS = f"{HIDDEN}/records"
RUN = f"{HIDDEN}/run"


@dataclass(frozen=True, kw_only=True)
class Done:
    """What became of one directory: files, row groups and bytes before and after, rows, and what to tell the user."""

    files: tuple[int, int]
    row_groups: tuple[int, int]
    bytes: tuple[int, int]
    rows: int
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Record:
    """One directory of the target: its ``key`` says from what and how it was made; ``files`` are names and sizes."""

    directory: str
    key: str
    files: Mapping[str, int]
    done: Done

    @property
    def path(self) -> str:
        """Where the record lies below the target."""
        return f"{RECORDS}/{hashlib.sha256(self.directory.encode()).hexdigest()[:32]}.json"

    def encoded(self) -> bytes:
        """Return the record as it is stored."""
        return json.dumps(asdict(self)).encode()


def _decoded(data: bytes) -> Record | None:
    """Return a stored record, or None for one that cannot be read."""
    try:
        stored = json.loads(data)
        done = stored.pop("done")
        done = {name: tuple(value) if isinstance(value, list) else value for name, value in done.items()}
        return Record(**stored, done=Done(**done))
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def take_over(target: Target) -> tuple[list[Record], list[Record]]:
    """Return the records of an earlier run that are whole at the target, and those that are not.

    A file that no record names was not written by pqcache: UsageError, so that nothing is ever written over.
    """
    found = {file.path: file.identity.size for file in target.list()}
    records = []
    for path, size in found.items():
        if path.startswith(f"{RECORDS}/") and (record := _decoded(target.read(path, size))) is not None:
            records.append(record)
    ours = {_below(record.directory, name): size for record in records for name, size in record.files.items()}
    for path, size in found.items():
        if not path.startswith(f"{HIDDEN}/") and ours.get(path) != size:
            raise UsageError(
                target.url, f"exists and is not empty ({printable(path)})", "name a new or empty directory"
            )
    whole: list[Record] = []
    broken: list[Record] = []
    for record in records:
        there = all(_below(record.directory, name) in found for name in record.files)
        (whole if there else broken).append(record)
    return whole, broken


def own(target: Target, run: str) -> None:
    """Note that the target is this run's from now on."""
    target.write(RUN, run.encode())


def check_own(target: Target, run: str) -> None:
    """Raise CacheLocked when another run has begun since, or has finished: a job on a cluster may outlive its run."""
    try:
        found = target.read(RUN, len(run)).decode("ascii", "replace")
    except SourceNotFound:
        found = ""
    if found != run:
        raise CacheLocked(target.url, "another run writes there now, or has finished it", "this one is given up")


def forget(target: Target, record: Record) -> None:
    """Remove a directory's files and then its record."""
    target.remove([_below(record.directory, name) for name in record.files])
    target.remove([record.path])


def check_apart(source: str, target: str) -> None:
    """Raise UsageError when one of two URLs is, or lies below, the other."""
    one, other = _place(source), _place(target)
    if one == other:
        raise UsageError(f"{redact(target)}", "is the source itself", "name another directory to write to")
    if other[: len(one)] == one:
        raise UsageError(
            f"{redact(target)}", f"lies inside the source {redact(source)}", "name a directory apart from it"
        )
    if one[: len(other)] == other:
        raise UsageError(
            f"{redact(target)}", f"holds the source {redact(source)}", "name a new or empty directory apart from it"
        )


def _place(url: str) -> tuple[str, ...]:
    scheme = url_scheme(url)
    if scheme in ("", "file"):
        return ("file", *Path(local_path(url)).expanduser().resolve().parts)
    host, _, path = url.partition("://")[2].partition("/")
    return (scheme, host.rpartition("@")[2].lower(), *(segment for segment in path.split("/") if segment))


def _below(directory: str, name: str) -> str:
    return f"{directory}/{name}" if directory else name
