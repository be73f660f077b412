"""A meter that a trainer shares with its workers, and that shows spans to torch's profiler."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch.autograd.profiler as profiler

from pqcache.reader.meter import Cells, Meter, new_cells
from pqcache.torch.worker_memory import WorkerMemory


class SharedMeter(Meter):
    """A meter in memory that a trainer shares with its workers, also spawned ones.

    Ranks that are forked or spawned, and copies, begin at 0 and share nothing with the original.
    """

    def __init__(self) -> None:
        self._memory = WorkerMemory(new_cells().shape, kept=False)
        self._enter_process()

    @property
    def _cells(self) -> Cells:
        return self._memory.numbers

    def span(self, name: str) -> AbstractContextManager[Any] | None:
        """Return a span of torch's profiler; None unless one is active in this process."""
        return profiler.record_function(name) if profiler._is_profiler_enabled else None

    def __getstate__(self) -> dict[str, Any]:
        return {"_memory": self._memory}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._memory = state["_memory"]
        self._enter_process()


def new_meter() -> Meter:
    """Return the meter of a new dataset."""
    return SharedMeter()
