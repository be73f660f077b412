"""Which snapshots are pinned, under which names, and which a rollback has left: ``snapshots.json`` of a cache.

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
from pqcache.store.layout import SNAPSHOTS
from pqcache.store.ownership import file_mode
from pqcache.store.snapshot import Snapshot
from pqcache.system.disk import read_regular, write_durably

_FORMAT = 1
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True)
class Rollback:
    """A switch of the current snapshot to an older one: when it began (ISO 8601), to which one, and from which.

    ``run`` is the ID of its run in the history.
    """

    time: str
    snapshot: str
    previous: str
    run: str = ""


@dataclass(frozen=True, kw_only=True)
class KeptSnapshots:
    """What a cache keeps beside its newest snapshots.

    Attributes:
        pins: the names of pinned snapshots by their IDs; empty where one has no name.
        rolled_back: snapshots that were current and then rolled back from. They are the first to be removed.
        rollback: one that has begun and is not in the history yet.
        last_number: the highest number of a snapshot when the cache was rolled back, which no new one may have.
    """

    pins: Mapping[str, str] = field(default_factory=dict)
    rolled_back: tuple[str, ...] = ()
    rollback: Rollback | None = None
    last_number: int = 0

    def id_of(self, name: str) -> str | None:
        return next((snapshot for snapshot, known in self.pins.items() if known == name and name), None)


def read_kept(cache: Path) -> KeptSnapshots:
    """Raises CacheError if unreadable, so that nothing pinned is removed."""
    path = cache / SNAPSHOTS
    try:
        values: dict[str, Any] = json.loads(read_regular(path))
        if values["format"] != _FORMAT:
            raise CacheError(path, f"written in format {values['format']}, which this pqcache does not read")
        rollback = values["rollback"]
        return KeptSnapshots(
            pins={str(snapshot): str(name) for snapshot, name in values["pins"].items()},
            rolled_back=tuple(map(str, values["rolled_back"])),
            rollback=None if rollback is None else Rollback(**rollback),
            last_number=int(values.get("last_number", 0)),
        )
    except FileNotFoundError:
        return KeptSnapshots()
    except (OSError, *MALFORMED) as error:
        advice = "remove it, if no snapshot has to remain pinned"
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
    }
    write_durably(cache / SNAPSHOTS, f"{json.dumps(values)}\n".encode(), cache / "tmp", file_mode())


def check_name(name: str) -> None:
    """Raise UsageError for a name that no pin can have."""
    if _NAME.fullmatch(name) is None or name == "current":
        advice = "begin with a letter, then letters, digits, '.', '_' and '-'"
        raise UsageError(f"--name {name}", "no name for a snapshot", advice)


def rolled_back_from(cache: Path, current: Snapshot | None) -> str | None:
    """The newest snapshot that a rollback to ``current`` has left."""
    found = [Snapshot(cache / "snapshots" / name) for name in read_kept(cache).rolled_back]
    newer = [snapshot for snapshot in found if current is not None and snapshot.number > current.number]
    return max(newer, key=lambda snapshot: snapshot.number).id if newer else None
