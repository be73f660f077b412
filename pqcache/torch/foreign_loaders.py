"""Who iterates a dataset or sets its epoch: code of other libraries that does not fit what a dataset does itself.

A dataset divides its rows among ranks and yields whole batches. A wrapper that divides them again would leave rows out,
and a DataLoader that batches them again would yield batches of batches, both without a word. Such callers are known by
the names of their modules and classes, as neither says what it does to the dataset.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from types import FrameType

from torch.utils.data import DataLoader

from pqcache.errors import UsageError

_FETCHER = "torch.utils.data._utils.fetch", "_IterableDatasetFetcher"  # what calls iter(dataset) for a DataLoader
_DIVIDES = {  # by module and class: what divides the batches among the processes once more
    ("accelerate.data_loader", "IterableDatasetShard"),
    ("accelerate.data_loader", "DataLoaderDispatcher"),
    ("transformers.trainer_pt_utils", "IterableDatasetShard"),
}
_STARTS_WORKERS = {"torch.utils.data.dataloader", "torchdata.stateful_dataloader.stateful_dataloader"}
_READS_AHEAD = "ray.train.torch.train_loop_utils", "_WrappedDataLoader"  # of prepare_data_loader, in Ray's v1 and v2
_FORGETS = {("accelerate.data_loader", "DataLoaderShard"), ("accelerate.data_loader", "DataLoaderDispatcher")}
_MODULES = {module for module, _ in (_FETCHER, _READS_AHEAD, *_DIVIDES, *_FORGETS)}
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


def keeps_order() -> bool:
    """Return False where a DataLoader with ``in_order=False`` is starting its workers, or this is a worker of it.

    A forked worker still has the frames of the process that it was forked from; others find it in their pickle.
    """
    frame = _starting_workers()
    return frame is None or bool(getattr(frame.f_locals.get("loader"), "in_order", True))


def starts_workers() -> bool:
    """Return whether a DataLoader is starting its workers."""
    return _starting_workers() is not None


def _starting_workers() -> FrameType | None:
    """Return the frame of a caller's caller that starts the workers of a DataLoader."""
    for frame in outward(sys._getframe(2)):
        if frame.f_code.co_name == "__init__" and frame.f_globals.get("__name__") in _STARTS_WORKERS:
            return frame
    return None


def restored_by_torchdata() -> bool:
    """Return whether a loader of torchdata calls: it restores states when an iteration begins."""
    modules = (str(frame.f_globals.get("__name__", "")) for frame in outward(sys._getframe(1)))
    return any(module.startswith("torchdata.") for module in modules)


def reads_ahead() -> bool:
    """Return whether a caller holds one batch back: it asks for the next one before it yields the last.

    Called where an iteration begins.
    """
    return any(_place_of(frame) == _READS_AHEAD for frame in outward(sys._getframe(2)))


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


def warn_of_lost_place() -> None:
    """Warn where the epoch is set by a loader of Accelerate's own, which does not save a place in the dataset."""
    for frame in outward(sys._getframe(2)):
        if _place_of(frame) in _FORGETS and not getattr(frame.f_locals["self"], "use_stateful_dataloader", False):
            message = (
                "Accelerate's own loader does not keep the place in this dataset: save_state() loses it, and "
                f"skip_first_batches() reads all that it skips. Use pqcache.torch.Loader(dataset); {_TRAINER}"
            )
            warnings.warn(message, UserWarning, stacklevel=3)
            return


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
