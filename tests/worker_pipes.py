"""Keeps the pipes to xdist out of the processes that tests fork.

A forked child that lives on, as one that hangs does, would hold them open: xdist would wait for ever for the end of a
worker that has died.
"""

from __future__ import annotations

import os
from contextlib import suppress


def keep_pipes_from_forks() -> None:
    """Make all pipes of this process the null device in what it forks, so that their numbers are not used again.

    Call it before a test has run: those to xdist are the only ones then. Where there is no /proc it does nothing.
    """
    if not os.path.isdir("/proc/self/fd"):
        return
    null = os.open(os.devnull, os.O_RDWR)
    pipes = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the one with which they are listed
            if int(name) > 2 and os.readlink(f"/proc/self/fd/{name}").startswith("pipe:"):
                pipes.append(int(name))

    def release() -> None:
        for pipe in pipes:
            os.dup2(null, pipe, inheritable=False)

    os.register_at_fork(after_in_child=release)
