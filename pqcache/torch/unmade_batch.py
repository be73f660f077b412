"""A batch of a group before it is divided: a worker of a Loader sends the batches of a group together."""

from __future__ import annotations

from typing import Any, NamedTuple

from pqcache.torch.batch_values import TensorGroup


class UnmadeBatch(NamedTuple):
    """Batch ``number`` of a ``group``; ``position`` is its `Position`."""

    group: TensorGroup
    number: int
    position: Any

    def columns(self) -> dict[str, Any]:
        """The columns of the batch."""
        return self.group.batches()[self.number]
