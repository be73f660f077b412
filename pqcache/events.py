"""Events that the library passes to ``on_event`` while it works.

The library never prints: ``pqcache.console`` turns events into lines, bars or JSON.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Listed:
    """The source was listed: the number of Parquet files selected by ``where``, and their bytes."""

    files: int
    bytes: int


@dataclass(frozen=True)
class Started:
    """A phase begins and will advance by ``total``: list, fetch, rewrite, read, index, verify, compare or measure.

    ``total`` counts bytes, or files, rows or settings as ``unit`` says; it is 0 if unknown. ``files`` is the number of
    files if the unit is bytes and each file is reported when it is done.
    """

    phase: str
    total: int
    unit: str = "bytes"
    files: int = 0


@dataclass(frozen=True)
class Planned:
    """A dry run would ``add``, ``change``, ``remove`` or ``rewrite`` ``path``, and fetch ``bytes`` for it."""

    path: str
    action: str
    reason: str
    bytes: int


@dataclass(frozen=True)
class Reused:
    """An earlier run left ``bytes`` of the ``total`` to fetch, so only the rest is fetched."""

    bytes: int
    total: int


@dataclass(frozen=True)
class Advanced:
    """A phase advanced by ``amount``; a negative amount has to be done again."""

    phase: str
    amount: int


@dataclass(frozen=True)
class Fetched:
    """A file was downloaded completely and checked."""

    path: str
    bytes: int
    seconds: float


@dataclass(frozen=True)
class Awaited:
    """Readers of an arriving snapshot are waiting: how many, and for how many bytes."""

    readers: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Rewrote:
    """A partition directory was repartitioned."""

    directory: str
    files_before: int
    files_after: int
    row_groups: int
    bytes: int


@dataclass(frozen=True)
class Retried:
    """An operation failed; it is retried after ``wait`` seconds."""

    path: str
    error: str
    wait: float


@dataclass(frozen=True)
class Warned:
    """A warning for the user; the run continues."""

    message: str


@dataclass(frozen=True)
class Damaged:
    """A part of a snapshot differs from what was published; row group and column are None if unknown."""

    path: str
    row_group: int | None
    column: str | None
    message: str


@dataclass(frozen=True)
class Published:
    """A new snapshot is current."""

    snapshot: str


@dataclass(frozen=True)
class Collected:
    """An old snapshot was removed."""

    snapshot: str


Event = (
    Listed
    | Started
    | Planned
    | Reused
    | Advanced
    | Fetched
    | Awaited
    | Rewrote
    | Retried
    | Warned
    | Damaged
    | Published
    | Collected
)
OnEvent = Callable[[Event], None]


def ignore(_: Event) -> None:
    """Ignore events; the default of ``on_event``."""
