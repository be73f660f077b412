"""Says what is going on where no batch comes for long: the stacks of the threads that read, and their files."""

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

_FRAMES = 16  # of a stack that are shown, the innermost ones
_FORKED = (
    "  This process was forked: a library with threads, as polars is, hangs here if the process before has used it.",
    "  Pass multiprocessing_context='forkserver' to the Loader.",
)
_is_forked = False


class StallWatch:
    """Logs a warning, once for a batch, when it has been asked for more than ``seconds`` ago, and when it comes.

    Its thread neither keeps the iteration alive nor uses Arrow; in a forked child there is none. ``describe`` returns
    lines on what is read, and ``waits_since`` since when the batch is waited for where ``since`` is not set.
    """

    def __init__(
        self,
        seconds: float,
        what: str,
        describe: Callable[[], Sequence[str]],
        waits_since: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._seconds, self._what, self._describe, self._waits_since = seconds, what, describe, waits_since
        self._thread = threading.get_ident()
        self.since: int | None = None  # of the batch that is asked for; by time.monotonic_ns, as all times here
        self.warned_of: int | None = None  # the same, of the batch that a warning was logged about
        self._ended = threading.Event()
        watcher = threading.Thread(target=self._watch, name="pqcache-stall-watch", daemon=True)
        watcher.start()
        self._end = weakref.finalize(self, _end, self._ended, watcher, os.getpid())  # at exit too

    def goes_on(self) -> None:
        """Log that the batch that a warning was logged about is there."""
        since, self.warned_of = self.warned_of, None
        if since is not None:
            log.warning("%s: it goes on after %.1f s", self._what, (time.monotonic_ns() - since) / 1e9)

    def close(self) -> None:
        """End the thread."""
        self._end()

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
                lines = [*self._describe(), *stacks(self._thread), *(_FORKED if _is_forked else ())]
                log.warning("%s: no batch for %.1f s\n%s", self._what, seconds, "\n".join(lines))


def _in_child() -> None:
    global _is_forked
    _is_forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)


def _end(ended: threading.Event, watcher: threading.Thread, process: int) -> None:
    """End the thread before the iteration ends, and at the latest before the interpreter does.

    It refers to the dataset, whose shared tensors the last thread to let go frees. torch releases the GIL for that, and
    a thread that asks for it back while the interpreter ends aborts the process.
    """
    if process == os.getpid():  # a child has no thread, and may have the lock as the thread held it
        ended.set()
        if watcher is not threading.current_thread():
            watcher.join(1.0)


def stacks(consumer: int) -> list[str]:
    """Return the stacks of this process's threads that read, and of the one that uses what is read, as lines."""
    frames, lines = sys._current_frames(), []
    for thread in threading.enumerate():
        if thread.ident == consumer or (thread.name.startswith("pqcache") and thread is not threading.current_thread()):
            frame = frames.get(thread.ident or 0)
            lines += [f"  thread {thread.name}:", *(f"    {line}" for line in _lines(frame))]
    return lines


def _lines(frame: FrameType | None) -> list[str]:
    """Return the innermost calls of a stack, the last one first; no source is read, which may be what hangs."""
    found: list[str] = []
    while frame is not None and len(found) < _FRAMES:
        found.append(f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return found
