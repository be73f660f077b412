"""Logs what is going on when no batch arrives for long: the stacks of the reading threads, and their files."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from types import FrameType

log = logging.getLogger("pqcache.torch")

_FRAMES = 16  # the innermost ones of a stack
_FORKED = (
    "  This process was forked: a library with threads, as polars is, hangs here if the process before has used it.",
    "  Pass multiprocessing_context='forkserver' to the Loader.",
)
_is_forked = False


class StallWatch:
    """Logs a warning, once for a batch, if it does not arrive within ``seconds``, and another when it does.

    Its thread neither keeps the iteration alive nor uses Arrow, and does not exist in a forked child. ``describe``
    returns lines on what is being read; ``waits_since`` is asked for the beginning of the wait if ``since`` is not set.
    """

    def __init__(
        self,
        seconds: float,
        what: str,
        describe: Callable[[], Sequence[str]],
        waits_since: Callable[[], int | None],
    ) -> None:
        self._seconds, self._what, self._describe, self._waits_since = seconds, what, describe, waits_since
        self._thread = threading.get_ident()
        self.since: int | None = None  # when the batch was requested; all times are time.monotonic_ns
        self.warned_of: int | None = None  # the same, of the batch in the latest warning
        self._ended = threading.Event()
        watcher = threading.Thread(target=self._watch, name="pqcache-stall-watch", daemon=True)
        watcher.start()
        self.close = weakref.finalize(self, _end, self._ended, watcher, os.getpid())  # called at exit too

    def goes_on(self) -> None:
        since, self.warned_of = self.warned_of, None
        if since is not None:
            log.warning("%s: it goes on after %.1f s", self._what, (time.monotonic_ns() - since) / 1e9)

    def _watch(self) -> None:
        wait = self._seconds / 4
        while not self._ended.wait(wait):
            since, now = self.since or self._waits_since(), time.monotonic_ns()
            if since != self.warned_of:
                self.goes_on()
            if since is None or since == self.warned_of:
                wait = self._seconds / 4
            elif (seconds := (now - since) / 1e9) < self._seconds:
                wait = min(self._seconds / 4, self._seconds - seconds)
            else:
                self.warned_of = since
                lines = [*self._describe(), *_stacks(self._thread), *(_FORKED if _is_forked else ())]
                log.warning("%s: no batch for %.1f s\n%s", self._what, seconds, "\n".join(lines))


def _in_child() -> None:
    global _is_forked
    _is_forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)


def _end(ended: threading.Event, watcher: threading.Thread, process: int) -> None:
    """End the thread before the iteration ends, and at the latest before the interpreter does.

    The thread refers to the dataset, so it may be the one to free its shared tensors. torch releases the GIL for that,
    and a thread that wants it back while the interpreter exits aborts the process.
    """
    if process == os.getpid():  # a child has no such thread, and may have copied a lock that it held
        ended.set()
        if watcher is not threading.current_thread():
            watcher.join(1.0)


def _stacks(consumer: int) -> list[str]:
    """The stacks of this process's reading threads and of the ``consumer``'s thread, as lines."""
    frames, lines = sys._current_frames(), []
    for thread in threading.enumerate():
        if thread.ident == consumer or (thread.name.startswith("pqcache") and thread is not threading.current_thread()):
            frame = frames.get(thread.ident or 0)
            lines += [f"  thread {thread.name}:", *(f"    {line}" for line in _lines(frame))]
    return lines


def _lines(frame: FrameType | None) -> list[str]:
    """The innermost calls of a stack, latest first. Reads no source, as the file system may be what hangs."""
    found: list[str] = []
    while frame is not None and len(found) < _FRAMES:
        found.append(f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return found
