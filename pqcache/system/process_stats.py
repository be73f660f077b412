"""Memory and disk reads of a process and its children, from Linux's /proc; None on other systems."""

from __future__ import annotations

import os
import resource
from contextlib import suppress
from pathlib import Path

_BLOCK = 512  # bytes, of which the system counts
_THREAD = getattr(resource, "RUSAGE_THREAD", None)  # of Linux


def pss(process: int) -> int | None:
    """Return the memory of a process and its children in bytes; shared pages count once."""
    return _sum(process, "smaps_rollup", "Pss:", 1024)


def disk_read_bytes(process: int) -> int | None:
    """Return the bytes that a process and its children have read from disks."""
    return _sum(process, "io", "read_bytes:", 1)


def cpu_count() -> int:
    """Return the number of cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def disk_bytes_of_thread() -> int:
    """Return the bytes that this thread has had read from disks, readahead included; 0 where they are not counted."""
    return 0 if _THREAD is None else resource.getrusage(_THREAD).ru_inblock * _BLOCK


def is_alive(process: int) -> bool:
    """Return whether a process exists."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # another user's
        return True
    return True


def _sum(process: int, file: str, name: str, unit: int) -> int | None:
    total = None
    for number in _with_children(process):
        with suppress(OSError, ValueError):
            for line in (Path("/proc") / str(number) / file).read_text().splitlines():
                if line.startswith(name):
                    total = (total or 0) + int(line.split()[1]) * unit
    return total


def _with_children(process: int) -> list[int]:
    """Return a process and all its descendants."""
    found = [process]
    for parent in found:  # which grows meanwhile
        for path in (Path("/proc") / str(parent) / "task").glob("*/children"):
            with suppress(OSError):
                found += [int(number) for number in path.read_text().split()]
    return found
