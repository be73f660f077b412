"""The last batch of an epoch, as Accelerate expects it of the loaders that it prepares.

``accelerator.accumulate`` makes a step of the optimizer at the last batch, so it has to know which one that is.
``gather_for_metrics`` joins what all processes have, which takes tensors of one size, and cuts off what was added to
make the last ones so.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from pqcache.reader.order.epoch_share import EpochShare
from pqcache.torch.batch import Batch
from pqcache.torch.batch_rows import CU_SEQLENS, sequence_ends
from pqcache.torch.host_tensors import concatenated
from pqcache.torch.ragged import Ragged, change_inside, part


@contextmanager
def shown_to_accelerate(loader: Any) -> Iterator[bool]:
    """Tell Accelerate that ``loader`` is being iterated, and return whether this process uses it.

    Accelerate then reads the loader's ``end_of_dataloader`` and ``remainder``, as those of its own loaders.
    """
    loader.end_of_dataloader, loader.remainder = False, -1
    kind = getattr(sys.modules.get("accelerate.state"), "GradientState", None)
    if kind is None or not kind._shared_state:  # no Accelerator was made
        yield False
        return
    state = kind()
    state._add_dataloader(loader)
    try:
        yield True
    finally:
        state._remove_dataloader(loader)


def rows_of_last_round(share: EpochShare, rows: int, rows_of_last: int) -> int:
    """Return how many rows of the ranks' last batches, joined in order of the ranks, come before the repeated ones.

    Batches have so many ``rows``, the epoch's last one ``rows_of_last``. Returns -1, which is Accelerate's "unknown",
    after a resume from another number of ranks, where the repeated ones may come first.
    """
    if share.start % share.ranks:
        return -1
    first = share.indices()[-1] // share.ranks * share.ranks
    batches = min(share.total - first, share.ranks)
    return (batches - 1) * rows + (rows_of_last if first + batches == share.total else rows)


def is_last(share: EpochShare) -> bool:
    """Return whether the last batch that this rank yields is the last one of the epoch, which may be short."""
    return (share.indices()[-1] + 1) % share.total == 0


def filled(value: Any, rows: int, size: int) -> Any:
    """Return a batch in which what has ``rows`` rows has ``size``: its own rows again and again."""

    def has_rows(inner: Any) -> bool:
        if isinstance(inner, torch.Tensor | np.ndarray):
            return len(inner.shape) > 0 and len(inner) == rows
        if isinstance(inner, list):
            return len(inner) == rows and not any(isinstance(item, torch.Tensor) for item in inner)
        return isinstance(inner, Ragged) and len(inner) == rows

    def fill(inner: Any) -> Any:
        times = -(-size // rows)
        return (inner * times)[:size] if isinstance(inner, list) else part(_repeated(inner, times), 0, size)

    if not isinstance(value, Batch) or CU_SEQLENS not in value:
        return change_inside(value, has_rows, fill)
    others = Batch({name: inner for name, inner in value.items() if name != CU_SEQLENS}, value.position)
    found, ends = change_inside(others, has_rows, fill), value[CU_SEQLENS]
    found[CU_SEQLENS] = sequence_ends(ends, int(ends[-1]) // rows, [row % rows for row in range(size)])
    return Batch({name: found[name] for name in value}, value.position)


def _repeated(value: Any, times: int) -> Any:
    if isinstance(value, dict):
        return {name: _repeated(inner, times) for name, inner in value.items()}
    if isinstance(value, np.ndarray):
        return np.concatenate([value] * times)
    if isinstance(value, torch.Tensor):
        return concatenated([value] * times)
    offsets = [value.offsets[:1], *(value.offsets[1:] + i * int(value.offsets[-1]) for i in range(times))]
    return Ragged(_repeated(value.values, times), torch.cat(offsets), value.kind)
