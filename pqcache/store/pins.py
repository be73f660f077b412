"""Which snapshots are pinned, which a rollback has left, and whether the cache is held: its ``snapshots.json``.

It is written under the cache's lock, as a whole.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pqcache.errors import MALFORMED, CacheError, UsageError
from pqcache.store.layout import CANDIDATE, SNAPSHOTS
from pqcache.store.ownership import file_mode
from pqcache.store.snapshot import Snapshot
from pqcache.store.urls import quoted
from pqcache.system.disk import read_regular, write_durably

_FORMAT = 1
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True)
class Rollback:
    """A switch of the current snapshot to an older one: when it began (ISO 8601), to which one, and from which.

    ``run`` is the ID of its run in the history. With ``publishes``, ``snapshot`` was the candidate, and a hold ends.
    """

    time: str
    snapshot: str
    previous: str
    run: str = ""
    publishes: bool = False


@dataclass(frozen=True)
class Hold:
    """Since when (ISO 8601) nothing is published, and the user who said so."""

    time: str
    by: str


@dataclass(frozen=True, kw_only=True)
class KeptSnapshots:
    """What a cache keeps beside its newest snapshots.

    Attributes:
        pins: the names of pinned snapshots by their IDs; empty where one has no name.
        rolled_back: snapshots that were current and then rolled back from. They are the first to be removed.
        rollback: one that has begun and is not in the history yet.
        last_number: the highest number of a snapshot when the cache was rolled back, which no new one may have.
        hold: keeps runs from publishing, if there is one.
    """

    pins: Mapping[str, str] = field(default_factory=dict)
    rolled_back: tuple[str, ...] = ()
    rollback: Rollback | None = None
    last_number: int = 0
    hold: Hold | None = None

    def id_of(self, name: str) -> str | None:
        return next((snapshot for snapshot, known in self.pins.items() if known == name and name), None)


def read_kept(cache: Path) -> KeptSnapshots:
    """Raises CacheError if unreadable, so that nothing pinned is removed."""
    path = cache / SNAPSHOTS
    try:
        values: dict[str, Any] = json.loads(read_regular(path))
        if values["format"] != _FORMAT:
            raise CacheError(path, f"written in format {values['format']}, which this pqcache does not read")
        rollback, hold = values["rollback"], values.get("hold")
        return KeptSnapshots(
            pins={str(snapshot): str(name) for snapshot, name in values["pins"].items()},
            rolled_back=tuple(map(str, values["rolled_back"])),
            rollback=None if rollback is None else Rollback(**rollback),
            last_number=int(values.get("last_number", 0)),
            hold=None if hold is None else Hold(**hold),
        )
    except FileNotFoundError:
        return KeptSnapshots()
    except (OSError, *MALFORMED) as error:
        advice = "remove it, if no snapshot has to remain pinned, nor the cache held"
        raise CacheError(path, f"cannot be read ({error})", advice) from error


def write_kept(cache: Path, kept: KeptSnapshots) -> None:
    """Write durably, without what is not there any more."""
    here = {path.name for path in (cache / "snapshots").iterdir()}
    values = {
        "format": _FORMAT,
        "pins": {snapshot: name for snapshot, name in sorted(kept.pins.items()) if snapshot in here},
        "rolled_back": sorted(here.intersection(kept.rolled_back)),
        "rollback": None if kept.rollback is None else asdict(kept.rollback),
        "last_number": kept.last_number,
        "hold": None if kept.hold is None else asdict(kept.hold),
    }
    write_durably(cache / SNAPSHOTS, f"{json.dumps(values)}\n".encode(), cache / "tmp", file_mode())


def check_name(name: str) -> None:
    """Raise UsageError for a name that no pin can have."""
    if _NAME.fullmatch(name) is None or name in ("current", CANDIDATE):
        advice = "begin with a letter, then letters, digits, '.', '_' and '-'"
        raise UsageError(f"--name {name}", "no name for a snapshot", advice)


def check_not_held(cache: Path) -> None:
    """Raise CacheError if nothing may be published."""
    if (hold := read_kept(cache).hold) is not None:
        reason = f"held since {hold.time} by {hold.by}, and this would publish a snapshot"
        raise CacheError(cache, reason, f"end that with 'pqcache rollback {quoted(cache)} --release' first")


def rolled_back_from(cache: Path, current: Snapshot | None) -> str | None:
    """The newest snapshot that a rollback to ``current`` has left."""
    found = [Snapshot(cache / "snapshots" / name) for name in read_kept(cache).rolled_back]
    newer = [snapshot for snapshot in found if current is not None and snapshot.number > current.number]
    return max(newer, key=lambda snapshot: snapshot.number).id if newer else None
