"""What is wrong with the address of a cluster, or on its workers, whichever kind of cluster it is."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from urllib.parse import urlsplit

from pqcache.errors import PqcacheError, SourceUnavailable, UsageError

CONNECT = 10.0  # seconds


def check_address(scheduler: str, schemes: Sequence[str], example: str, unreachable: SourceUnavailable) -> None:
    """Raise UsageError where an address is not like ``example``, and ``unreachable`` where nothing listens there."""
    try:
        place = urlsplit(scheduler)
        if place.scheme not in schemes or not place.hostname or not place.port:
            raise ValueError
    except ValueError:
        raise UsageError(f"--scheduler {scheduler}", f"write it like {example}") from None
    try:
        # Fails sooner than a client does, and leaves no threads.
        socket.create_connection((place.hostname, place.port), CONNECT).close()
    except OSError as error:
        raise unreachable from error


def missing_package(name: str, error: ImportError) -> UsageError:
    """Return the error for a job that a worker cannot import what it needs for."""
    return UsageError(name, f"a worker lacks a package ({error})", "install it there")


def workers_died(name: str) -> PqcacheError:
    """Return the error for a job each of whose workers died."""
    return PqcacheError(name, "its workers died again and again", "give them more memory, or smaller --row-group-size")
