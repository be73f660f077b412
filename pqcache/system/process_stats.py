"""What a process and its children take, as Linux tells it in /proc; None where there is no such thing."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def pss(process: int) -> int | None:
    """Return the memory of a process and its children in bytes, what they share counted once."""
    return _sum(process, "smaps_rollup", "Pss:", 1024)


def disk_read_bytes(process: int) -> int | None:
    """Return the bytes that a process and its children have had read from a disk."""
    return _sum(process, "io", "read_bytes:", 1)


def _sum(process: int, file: str, name: str, unit: int) -> int | None:
    total = None
    for number in _family(process):
        with suppress(OSError, ValueError):
            for line in (Path("/proc") / str(number) / file).read_text().splitlines():
                if line.startswith(name):
                    total = (total or 0) + int(line.split()[1]) * unit
    return total


def _family(process: int) -> list[int]:
    """Return a process and all its children."""
    found, at = [process], 0
    while at < len(found):
        for path in (Path("/proc") / str(found[at]) / "task").glob("*/children"):
            with suppress(OSError):
                found += [int(number) for number in path.read_text().split()]
        at += 1
    return found
