"""What the library reports while it works; a caller passes ``on_event`` and gets these.

The library never prints: ``pqcache.console`` turns events into lines, bars or JSON.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Listed:
    """The source was listed: its Parquet files after ``where``, and their bytes."""

    files: int
    bytes: int


@dataclass(frozen=True)
class Started:
    """A phase begins and will advance by ``total``: list, fetch, rewrite, read, index, verify, compare or measure.

    ``total`` counts bytes, or what ``unit`` names: files, rows or settings; it is 0 where nobody knows it yet.
    ``files`` is how many files that is, where the unit is bytes and each is reported when it is done.
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
    """An earlier run has left ``bytes`` of the ``total`` that are to be fetched; only the rest is."""

    bytes: int
    total: int


@dataclass(frozen=True)
class Advanced:
    """A phase advanced by ``amount``; a negative amount is what has to be done again."""

    phase: str
    amount: int


@dataclass(frozen=True)
class Fetched:
    """One file was downloaded completely and checked."""

    path: str
    bytes: int
    seconds: float


@dataclass(frozen=True)
class Awaited:
    """What readers of an arriving snapshot wait for: how many wait, and for how many bytes that are not there yet."""

    readers: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Rewrote:
    """One partition directory was repartitioned."""

    directory: str
    files_before: int
    files_after: int
    row_groups: int
    bytes: int


@dataclass(frozen=True)
class Retried:
    """Something transient failed and is tried again after ``wait`` seconds."""

    path: str
    error: str
    wait: float


@dataclass(frozen=True)
class Warned:
    """Something the user should know that does not stop the run."""

    message: str


@dataclass(frozen=True)
class Damaged:
    """A part of a snapshot is not as it was published; row group and column are None where they are not known."""

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
    """The default for ``on_event``."""
