"""What other libraries do with datasets and Loaders: misuse is refused, and Accelerate is shown the last batch.

A dataset divides its rows among ranks and yields whole batches. A wrapper that divides them again would leave rows out,
and a DataLoader that batches them again would yield batches of batches, both without a word. Such callers are known by
the names of their modules and classes, as neither says what it does to the dataset.

Accelerate's ``accumulate`` makes a step of the optimizer at an epoch's last batch, so it has to know which one that is.
``gather_for_metrics`` joins what all processes have, which takes tensors of one size, and cuts off what was added to
make the last ones so.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from pqcache.errors import UsageError
from pqcache.reader.order.epoch_share import EpochShare
from pqcache.torch.batch import CU_SEQLENS, Batch, sequence_ends
from pqcache.torch.ragged import Ragged, change_inside, concatenated, part

_FETCHER = "torch.utils.data._utils.fetch", "_IterableDatasetFetcher"  # what calls iter(dataset) for a DataLoader
_DIVIDES = {  # by module and class: what divides the batches among the processes once more
    ("accelerate.data_loader", "IterableDatasetShard"),
    ("accelerate.data_loader", "DataLoaderDispatcher"),
    ("transformers.trainer_pt_utils", "IterableDatasetShard"),
}
_READS_AHEAD = {
    ("ray.train.torch.train_loop_utils", "_WrappedDataLoader"),  # of prepare_data_loader, in Ray's v1 and v2
    ("accelerate.data_loader", "DataLoaderShard"),
    ("accelerate.data_loader", "DataLoaderDispatcher"),
}
_FITS = {"lightning.pytorch.loops.fit_loop", "pytorch_lightning.loops.fit_loop"}
_MODULES = {module for module, _ in (_FETCHER, *_READS_AHEAD, *_DIVIDES)}
_TRAINER = "with transformers, write 'from pqcache.torch.trainer import Trainer'"


def check_batching() -> None:
    """Raise UsageError where the caller's caller is a DataLoader that makes batches of what it gets.

    Called by the ``__iter__`` and ``__len__`` of a dataset that yields batches. Frameworks ask for the length first,
    and some follow an error of ``__iter__`` with one of their own.
    """
    caller = sys._getframe(2)
    loader = caller.f_locals.get("self") if caller.f_code is DataLoader.__len__.__code__ else None
    fetches = _place_of(caller) == _FETCHER and caller.f_locals.get("auto_collation")
    if fetches or (loader is not None and loader.batch_size is not None):
        raise UsageError(
            "DataLoader",
            "it has a batch_size, and the dataset yields whole batches: the loader would yield batches of batches",
            f"use pqcache.torch.Loader(dataset), or DataLoader(dataset, batch_size=None); {_TRAINER}",
        )


def check_dividing(ranks: int) -> None:
    """Raise UsageError where a caller divides what a dataset divides among ``ranks`` itself.

    Called where a dataset is iterated and where its epoch is set; Accelerate's loaders do the latter on every rank.
    """
    if ranks > 1 and any(_place_of(frame) in _DIVIDES for frame in outward(sys._getframe(2))):
        raise UsageError(
            "Accelerate's loader",
            f"it divides the batches among the processes, as the dataset does for its {ranks} ranks: "
            "rows would be left out",
            "use pqcache.torch.Loader(dataset), which prepare() leaves as it is, or give the dataset "
            f"num_replicas=1 and rank=0; {_TRAINER}",
        )


def reads_ahead() -> bool:
    """Whether a caller holds one batch back, as it asks for the next one before it yields the last.

    Called where an iteration begins. With a StatefulDataLoader, Accelerate takes states before it asks.
    """
    callers = (frame for frame in outward(sys._getframe(2)) if _place_of(frame) in _READS_AHEAD)
    return any(not getattr(frame.f_locals["self"], "use_stateful_dataloader", False) for frame in callers)


def check_skipping() -> None:
    """Raise UsageError where Accelerate's ``skip_first_batches`` takes a Loader apart.

    It would make a plain DataLoader of its dataset, read what it skips, and know nothing of its epoch and place.
    """
    caller = sys._getframe(2)
    if (caller.f_globals.get("__name__"), caller.f_code.co_name) == ("accelerate.data_loader", "skip_first_batches"):
        raise UsageError(
            "skip_first_batches(Loader)",
            "the loader keeps its place itself, and the batches would be skipped twice",
            f"iterate the loader after accelerator.load_state() or loader.load_state_dict(); {_TRAINER}",
        )


def lightning_fit() -> Any:
    """Return the loop of Lightning's ``Trainer.fit`` that sets the epoch of a sampler; None for other callers.

    It has restored the places of its loaders, also where their length was asked for before the checkpoint was read.
    """
    for frame in islice(outward(sys._getframe(2)), 2):  # there is a function of Lightning's between
        if frame.f_globals.get("__name__") in _FITS and frame.f_code.co_name == "on_advance_start":
            fit = frame.f_locals["self"]
            fit._load_combined_loader_states()
            return fit
    return None


def has_one_loader(fit: Any) -> bool:
    """Whether ``Trainer.fit`` reads a single loader; of several some may be in later epochs."""
    return len(fit._combined_loader.flattened) == 1


def check_fit(fit: Any, loader: Any) -> None:
    """Raise UsageError where ``Trainer.fit`` begins an epoch at another batch than a Loader.

    It counts the batches of its process, and would leave out as many as it takes for read.
    """
    if fit.trainer.overfit_batches and loader.dataset.is_shuffled:
        reason = "each epoch has another order, so that these would be other batches each time"
        raise UsageError(f"overfit_batches={fit.trainer.overfit_batches}", reason, "give the dataset shuffle=False")
    if not fit.restarting:
        return
    batches, place = fit.epoch_loop.batch_progress, loader.state_dict()["batch"]
    ready = batches.current.ready
    if batches.is_last_batch and ready >= fit.max_batches:
        if place:
            loader.set_epoch(loader.epoch + 1)  # as where it has left an epoch itself
        return
    ranks = loader.dataset.begin_pass(loader.num_workers)[0].ranks
    if place != ready * ranks and (has_one_loader(fit) or not place):
        raise UsageError(
            "Lightning's checkpoint",
            f"it was taken after {ready} batches of an epoch in each process, and the loader goes on after "
            f"{place / ranks:g} in each of {ranks}: some rows would come twice or never",
            "resume a checkpoint of a pqcache.torch.Loader, with as many processes and the limit_train_batches of "
            "before, or one from the end of an epoch of ModelCheckpoint(save_on_train_epoch_end=True)",
        )


def outward(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame, and those that it was called from, the nearest first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def _place_of(frame: FrameType) -> tuple[str, str]:
    """Return the module and the class of the method that runs in a frame, if the module is one of those above.

    The locals of other frames are not looked at: that keeps them alive.
    """
    module = frame.f_globals.get("__name__", "")
    return module, type(frame.f_locals.get("self")).__name__ if module in _MODULES else ""


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

    Batches have ``rows`` rows, the epoch's last one ``rows_of_last``. Returns -1, which is Accelerate's "unknown",
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
