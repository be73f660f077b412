"""A meter that forked and spawned workers share with the trainer, and that shows spans to torch's profiler."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.autograd.profiler as profiler

from pqcache.reader.meter import Meter, new_cells


class SharedMeter(Meter):
    """A meter in shared memory, which a worker that is spawned maps too.

    A copy, also one that was pickled otherwise, begins at 0 and shares nothing with the original.
    """

    def __init__(self) -> None:
        self._tensor = torch.from_numpy(new_cells())
        self._tensor.share_memory_()  # type: ignore[no-untyped-call]
        super().__init__(self._tensor.numpy())

    def span(self, name: str) -> AbstractContextManager[Any] | None:
        """Return a span of torch's profiler; None unless one is active in this process."""
        return profiler.record_function(name) if profiler._is_profiler_enabled else None

    def __getstate__(self) -> dict[str, Any]:
        return {"_tensor": self._tensor}

    def __setstate__(self, state: dict[str, Any]) -> None:
        tensor = state["_tensor"]
        is_shared = tensor.is_shared()
        if not is_shared:  # unless the pickle was one of a process that is being spawned
            tensor = torch.zeros_like(tensor)
            tensor.share_memory_()  # type: ignore[no-untyped-call]
        self._tensor = tensor
        self._set_cells(tensor.numpy())


def new_meter() -> Meter:
    """Return the meter of a new dataset."""
    return SharedMeter()
