"""A batch before its tensors are made: a worker of a Loader sends it as it is, and the trainer makes them.

The numbers of many columns are in few arrays, as `FinishedBatch` says. To make a tensor of each column, to find each
one in shared memory and to pickle where it lies takes a worker longer than to read a small batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy.typing as npt
import torch

from pqcache.reader.columns.batch_layout import NumberColumns
from pqcache.torch.ragged import Ragged, RaggedKind


class PackedArrays(NamedTuple):
    """A Ragged of numbers or bytes before its tensors are made."""

    values: npt.NDArray[Any]
    offsets: npt.NDArray[Any]
    kind: RaggedKind

    def ragged(self) -> Ragged:
        """Return the Ragged over the same memory, but over a copy of values that cannot be changed."""
        values = self.values if self.values.flags.writeable else self.values.copy()
        return Ragged(torch.from_numpy(values), torch.from_numpy(self.offsets), self.kind)


@dataclass(slots=True)
class UnmadeBatch:
    """Columns of a batch by their ``names``, in order: ``numbers`` as arrays, and all ``others``.

    Of these, PackedArrays are not made yet. ``position`` is the batch's `Position`.
    """

    names: Sequence[str]
    numbers: list[NumberColumns]
    others: dict[str, Any]
    position: Any

    def columns(self) -> dict[str, Any]:
        """Return the columns of the batch, all made into tensors."""
        values: dict[str, Any] = {}
        for forms, numbers in self.numbers:  # separate tensors: views of one could not be changed in place
            values.update(zip(forms, map(torch.from_numpy, numbers)))  # noqa: B905 - it takes longer with ``strict``
        for name, value in self.others.items():
            values[name] = value.ragged() if type(value) is PackedArrays else value
        return {name: values[name] for name in self.names}
