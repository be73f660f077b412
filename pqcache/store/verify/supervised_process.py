"""Processes that check files which may be damaged, supervised: one that dies or hangs is a finding."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from pqcache.errors import PqcacheError

_START = 120.0  # seconds in which a process has to have loaded its libraries
_ROOT = Path(__file__).resolve().parents[3]
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MALLOC_ARENA_MAX")  # each thread reserves address space

log = logging.getLogger("pqcache.verify")

Request = dict[str, Any]
Answer = dict[str, Any]
WELL: Answer = {"well": True}


class Checker:
    """One process of ``file_checks.py``, started by the first request, and again by the first after it died."""

    def __init__(self, snapshot: Path, *words: str) -> None:
        self._arguments = [str(snapshot), *words]
        self._process: subprocess.Popen[bytes] | None = None
        self._pending = b""

    def ask(self, request: Request) -> Iterator[Answer]:
        """Yield the answers; of a process that dies or hangs, the last one is ``damage``."""
        process = self._process or self._start()
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it is dead, as its answer will say
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
        seconds = _START
        where: Answer = {}
        while True:
            line = self._line(process, seconds)
            if not line:
                why = f"did not end within {seconds:.0f} s" if line is None else self._end(process.wait())
                self.close()
                yield {"damage": f"the process that read it {why}", **where}
                return
            answer = json.loads(line)
            if "end" in answer:
                return
            if "step" in answer:
                step, seconds = answer["step"], answer["seconds"]
                where = {"row_group": step[0], "column": step[1]} if isinstance(step, list) else {}
            else:
                yield answer

    def close(self) -> None:
        process, self._process, self._pending = self._process, None, b""
        if process is not None:
            process.kill()
            process.communicate()
            self._stderr.close()

    def _start(self) -> subprocess.Popen[bytes]:
        found = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH", "")]))
        environment = {**os.environ, "PYTHONPATH": found, "PYTHONSAFEPATH": "1", "ARROW_DEFAULT_MEMORY_POOL": "system"}
        self._stderr = TemporaryFile()  # noqa: SIM115  closed with the process
        self._process = subprocess.Popen(
            [sys.executable, "-m", "pqcache.store.verify.file_checks", *self._arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env={**environment, **dict.fromkeys(_ONE_THREAD, "1")},
            start_new_session=True,  # Ctrl-C is for the command
        )
        return self._process

    def _end(self, status: int) -> str:
        """Why the process died; PqcacheError if it gave up by itself rather than by damage."""
        if status < 0:
            return f"was ended by {signal.Signals(-status).name}"
        self._stderr.seek(0)
        last = (self._stderr.read().decode(errors="replace").strip().splitlines() or [f"status {status}"])[-1]
        if "MemoryError" in last:
            return "had too little memory"
        raise PqcacheError(
            "verify", f"the process that checks files cannot start: {last}", "check its memory and its libraries"
        )

    def _line(self, process: subprocess.Popen[bytes], seconds: float) -> bytes | None:
        """The next line; empty at the end, None if there is none in time."""
        assert process.stdout is not None
        descriptor, deadline = process.stdout.fileno(), time.monotonic() + seconds
        while b"\n" not in self._pending:
            ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                return None
            more = os.read(descriptor, 1 << 16)
            if not more:
                return b""
            self._pending += more
        line, _, self._pending = self._pending.partition(b"\n")
        return line


def ask_all(
    checkers: Sequence[Checker],
    requests: Sequence[Request],
    on_answer: Callable[[Request, Answer], None],
    on_end: Callable[[Request], None],
) -> None:
    """Put all requests to some processes and end these; the callbacks are called from as many threads.

    A request with ``files``, which are requests too, is answered by ``WELL`` or not; if not, each of them is put alone.
    """
    idle: queue.SimpleQueue[Checker] = queue.SimpleQueue()
    for checker in checkers:
        idle.put(checker)
    stopped = threading.Event()

    def work(request: Request) -> None:
        checker = idle.get()
        try:
            several = request.get("files", ())
            well = bool(several) and list(checker.ask(request)) == [WELL]
            if several and not well:
                log.debug("%s files are checked one by one: something is wrong with one of them", len(several))
            for one in several or (request,):
                for answer in () if well or stopped.is_set() else checker.ask(one):
                    on_answer(one, answer)
                on_end(one)
        finally:
            idle.put(checker)

    pool = ThreadPoolExecutor(max(1, len(checkers)))
    try:
        for _ in pool.map(work, requests):
            pass
    finally:
        stopped.set()
        pool.shutdown(wait=False, cancel_futures=True)
        for checker in checkers:
            checker.close()
