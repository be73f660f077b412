"""Other libraries' use of datasets and Loaders: refuses misuse, and shows Accelerate the last batch.

A dataset divides its rows among ranks and yields whole batches. A wrapper that divides them again would silently leave
rows out, and a DataLoader that batches them again would silently yield batches of batches. Neither tells the dataset,
so such callers are recognized by the names of their modules and classes.

Accelerate's ``accumulate`` makes an optimizer step at an epoch's last batch, so it has to know which one that is.
``gather_for_metrics`` joins equally sized tensors from all processes, and cuts off the rows that padded the last ones.
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
from pqcache.reader.order import EpochShare
from pqcache.torch.batch import CU_SEQLENS, Batch, Ragged, change_inside, concatenated, part, sequence_ends

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
    """Raise UsageError if the caller's caller is a DataLoader that makes batches of batches.

    Called by ``__iter__`` and ``__len__`` of datasets that yield batches: frameworks ask for the length first, and some
    replace an error of ``__iter__`` by their own.
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
    """Raise UsageError if a caller divides batches that the dataset has divided among ``ranks`` itself.

    Called when a dataset is iterated or its epoch is set, as Accelerate's loaders do on every rank.
    """
    if ranks > 1 and any(_place_of(frame) in _DIVIDES for frame in _outward(sys._getframe(2))):
        raise UsageError(
            "Accelerate's loader",
            f"it divides the batches among the processes, as the dataset does for its {ranks} ranks: "
            "rows would be left out",
            "use pqcache.torch.Loader(dataset), which prepare() leaves as it is, or give the dataset "
            f"num_replicas=1 and rank=0; {_TRAINER}",
        )


def reads_ahead() -> bool:
    """Whether a caller requests the next batch before it yields the last; called when an iteration begins.

    With a StatefulDataLoader, Accelerate takes states before that request.
    """
    callers = (frame for frame in _outward(sys._getframe(2)) if _place_of(frame) in _READS_AHEAD)
    return any(not getattr(frame.f_locals["self"], "use_stateful_dataloader", False) for frame in callers)


def check_skipping() -> None:
    """Raise UsageError if Accelerate's ``skip_first_batches`` takes a Loader apart.

    It would wrap the dataset in a plain DataLoader, read the skipped batches, and ignore the Loader's epoch and place.
    """
    caller = sys._getframe(2)
    if (caller.f_globals.get("__name__"), caller.f_code.co_name) == ("accelerate.data_loader", "skip_first_batches"):
        raise UsageError(
            "skip_first_batches(Loader)",
            "the loader keeps its place itself, and the batches would be skipped twice",
            f"iterate the loader after accelerator.load_state() or loader.load_state_dict(); {_TRAINER}",
        )


def lightning_fit() -> Any:
    """The loop of Lightning's ``Trainer.fit`` that is setting a sampler's epoch; None for other callers.

    Makes it restore the places of its loaders, if their length was needed before the checkpoint was read.
    """
    for frame in islice(_outward(sys._getframe(2)), 2):  # there is a function of Lightning's between
        if frame.f_globals.get("__name__") in _FITS and frame.f_code.co_name == "on_advance_start":
            fit = frame.f_locals["self"]
            fit._load_combined_loader_states()
            return fit
    return None


def has_one_loader(fit: Any) -> bool:
    """Whether ``Trainer.fit`` reads a single loader; some of several may be in later epochs."""
    return len(fit._combined_loader.flattened) == 1


def check_fit(fit: Any, loader: Any) -> None:
    """Raise UsageError if ``Trainer.fit`` begins an epoch at another batch than the Loader.

    It counts the batches of its process, and would skip as many as it believes to be read.
    """
    if loader.refresh is not None:
        reason = "Lightning asks how many batches an epoch has before it begins, and would stop at that number"
        advice = (
            "make dataset and Loader anew in train_dataloader(), with Trainer(reload_dataloaders_every_n_epochs=1): "
            "a new dataset reads the current snapshot"
        )
        raise UsageError(f"Loader(refresh={loader.refresh!r})", reason, advice)
    if fit.trainer.overfit_batches and loader.dataset._is_shuffled:
        reason = "each epoch has a different order, so these would be different batches each time"
        raise UsageError(f"overfit_batches={fit.trainer.overfit_batches}", reason, "give the dataset shuffle=False")
    if not fit.restarting:
        return
    batches, place = fit.epoch_loop.batch_progress, loader.state_dict()["batch"]
    ready = batches.current.ready
    if batches.is_last_batch and ready >= fit.max_batches:
        if place:
            loader.set_epoch(loader.epoch + 1)  # as where it has left an epoch itself
        return
    ranks = loader.dataset._begin_pass(loader.num_workers)[0].ranks
    if place != ready * ranks and (has_one_loader(fit) or not place):
        raise UsageError(
            "Lightning's checkpoint",
            f"it was taken after {ready} batches of an epoch in each process, and the loader goes on after "
            f"{place / ranks:g} in each of {ranks}: some rows would come twice or never",
            "resume a checkpoint of a pqcache.torch.Loader, with as many processes and the limit_train_batches of "
            "before, or one from the end of an epoch of ModelCheckpoint(save_on_train_epoch_end=True)",
        )


def _outward(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _place_of(frame: FrameType) -> tuple[str, str]:
    """The module of a frame, and the class of its method if the module is one of ``_MODULES``.

    Does not look at the locals of other frames, which would keep these alive.
    """
    module = frame.f_globals.get("__name__", "")
    return module, type(frame.f_locals.get("self")).__name__ if module in _MODULES else ""


@contextmanager
def shown_to_accelerate(loader: Any) -> Iterator[bool]:
    """Register ``loader`` with Accelerate while it is iterated; yields whether this process uses Accelerate.

    Accelerate then reads its ``end_of_dataloader`` and ``remainder``, as it does with its own loaders.
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
    """The number of rows before the repeated ones in the ranks' last batches, joined in rank order.

    Batches have ``rows`` rows, the epoch's last one ``rows_of_last``. Returns -1, Accelerate's "unknown", after a
    resume from another number of ranks: repeated rows may then come first.
    """
    if share.start % share.ranks:
        return -1
    first = share.indices()[-1] // share.ranks * share.ranks
    batches = min(share.total - first, share.ranks)
    return (batches - 1) * rows + (rows_of_last if first + batches == share.total else rows)


def is_last(share: EpochShare) -> bool:
    """Whether the last batch that this rank yields is the last one of the epoch, which may be short."""
    return (share.indices()[-1] + 1) % share.total == 0


def filled(value: Any, rows: int, size: int) -> Any:
    """Pad everything of ``rows`` rows in a batch to ``size`` by repeating its rows."""

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
