"""Which process a number means: the system gives the numbers of ended processes to new ones."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class ProcessIdentity:
    """A process, by default this one; ``started`` is when it began, in ticks since boot, empty where nobody knows."""

    number: int = field(default_factory=os.getpid)
    started: str = field(default_factory=lambda: _state(os.getpid())[1])

    def is_alive(self) -> bool:
        """Return whether it runs: its number is in use, by a process that began when it did and is no zombie."""
        try:
            os.kill(self.number, 0)
        except ProcessLookupError:
            return False
        except PermissionError:  # another user's, which has its number now
            return False
        return self.exists()

    def exists(self) -> bool:
        """Return whether it runs, as far as the system says, also if it is another user's."""
        state, started = _state(self.number)
        return state != "Z" and started == self.started


def is_running(process: int) -> bool:
    """Return whether a process with this number runs, as far as Linux's /proc says; a zombie does not."""
    return _state(process)[0] not in ("", "Z")


def has_ended(process: int) -> bool:
    """Return whether a process has ended with all its threads; a child of this one is not waited for.

    A process whose first thread alone has ended, as all end one by one after a SIGKILL, is shown as a zombie.
    """
    try:
        return os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # not of this process, or waited for already
        return not is_running(process)


def _state(process: int) -> tuple[str, str]:
    """Return the state and the start of a process, from Linux's /proc; empty texts on other systems."""
    with suppress(OSError, IndexError):
        words = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return words[0], words[19]
    return "", ""
