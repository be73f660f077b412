"""Processes: whether one still runs, its memory and reads, and a faster start and end of this one.

A number alone does not identify a process, as the system reuses numbers. Most facts are from Linux's /proc; elsewhere
they are unknown.
"""

from __future__ import annotations

import gc
import os
import resource
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

_BLOCK = 512  # bytes, the unit of the system
_THREAD = getattr(resource, "RUSAGE_THREAD", None)  # of Linux
_LENGTH = 16


@dataclass(frozen=True)
class ProcessIdentity:
    """A process, by default this one; ``started`` is when it began, in ticks since boot, empty if unknown."""

    number: int = field(default_factory=os.getpid)
    started: str = field(default_factory=lambda: _state(os.getpid())[1])

    def is_alive(self) -> bool:
        """Whether it runs: its number belongs to a process of this user with the same start that isn't a zombie."""
        try:
            os.kill(self.number, 0)
        except ProcessLookupError:
            return False
        except PermissionError:  # another user's, which has its number now
            return False
        return self.exists()

    def exists(self) -> bool:
        """Whether it runs, as far as known, even if it is another user's."""
        state, started = _state(self.number)
        return state != "Z" and started == self.started


def is_running(process: int) -> bool:
    """Whether a process with this number runs; a zombie does not."""
    return _state(process)[0] not in ("", "Z")


def has_ended(process: int) -> bool:
    """Whether a process has ended with all its threads; a child of this one is not waited for.

    After a SIGKILL, threads end one by one, and a process is shown as a zombie once its first thread has ended.
    """
    try:
        return os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # not of this process, or waited for already
        return not is_running(process)


def _state(process: int) -> tuple[str, str]:
    """State and start of a process, from /proc; empty texts on other systems."""
    with suppress(OSError, IndexError):
        words = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return words[0], words[19]
    return "", ""


def pss(process: int) -> int | None:
    """Memory of a process and its children in bytes; shared pages count once."""
    return _sum(process, "smaps_rollup", "Pss:", 1024)


def disk_read_bytes(process: int) -> int | None:
    """Bytes that a process and its children have read from disks."""
    return _sum(process, "io", "read_bytes:", 1)


def cpu_count() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def disk_bytes_of_thread() -> int:
    """Bytes read from disks for this thread, including readahead; 0 if they are not counted."""
    return 0 if _THREAD is None else resource.getrusage(_THREAD).ru_inblock * _BLOCK


def is_alive(process: int) -> bool:
    """Whether a process exists."""
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
    """A process and all its descendants."""
    found = [process]
    for parent in found:  # which grows meanwhile
        for path in (Path("/proc") / str(parent) / "task").glob("*/children"):
            with suppress(OSError):
                found += [int(number) for number in path.read_text().split()]
    return found


def boot_id() -> str:
    """16 characters that change with each start of the machine; empty if the system has none."""
    try:
        text = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        return ""
    return text.strip().replace("-", "")[:_LENGTH]


def limit_blas_threads() -> None:
    """Keep numpy's BLAS from starting threads, which wait in busy loops; call this before numpy is imported."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def hide_pandas() -> None:
    """Hide pandas from pyarrow, which would import it with the first array, though nothing here needs it."""
    sys.meta_path.insert(0, _NoPandas)


def collect_garbage_rarely() -> None:
    """Let Python collect reference cycles after 200,000 new objects, not 700: imports and listings leave few."""
    gc.set_threshold(200_000)


def collect_no_more_garbage() -> None:
    """Let Python exit without a last garbage collection; files are still closed and threads joined."""
    gc.freeze()


class _NoPandas:
    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        if name == "pandas":
            raise ModuleNotFoundError(name)
