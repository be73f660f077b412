"""What Lightning and Fabric do with a loader, known by who asks: nothing else says it.

``Trainer.fit`` asks for the length of a loader where it sets it up, after it has restored the places of loaders that
have one, and again before each later epoch. It sets epochs on ``loader.sampler``, and so does Fabric. The names here
are Lightning's private ones: tests/frameworks/test_lightning.py fails where they are others.
"""

from __future__ import annotations

import sys
import warnings
from types import FrameType
from typing import Any

from pqcache.errors import UsageError
from pqcache.torch.progress import Progress

_FIT = ("pytorch", "loops.fit_loop", "_FitLoop")  # package, module, class
_FABRIC_LOADER = ("fabric", "wrappers", "_FabricDataLoader")
_FABRIC = ("fabric", "fabric", "Fabric")
_VALIDATES = "loops.evaluation_loop"

_REPEATS = (
    "Lightning sets the epoch on samplers only, and a plain DataLoader of this dataset has none: this epoch has the "
    "order of epoch 0 again. Use pqcache.torch.Loader(dataset)"
)


def check_fit(progress: Progress, shuffle: bool, has_loader: bool, ranks: int) -> None:
    """Raise UsageError, or warn, where ``Trainer.fit`` would read other rows than the user expects.

    Called for the length of a dataset, which a ``pqcache.torch.Loader`` reads if it ``has_loader``.
    """
    fit = _find(_FIT, "setup_data", "advance")
    if fit is None:
        return
    overfit = fit.trainer.overfit_batches
    if has_loader and shuffle and overfit:
        reason = "each epoch has another order, so that these would be other batches each time"
        raise UsageError(f"overfit_batches={overfit}", reason, "give the dataset shuffle=False")
    if getattr(fit, "is_resuming", False):
        _check_place(fit, progress, has_loader, ranks)
    is_later = fit.epoch_progress.current.processed > 0 and not overfit
    if shuffle and not has_loader and is_later and not progress.is_set:
        warnings.warn(_REPEATS, UserWarning, stacklevel=3)


def _check_place(fit: Any, progress: Progress, has_loader: bool, ranks: int) -> None:
    """Raise UsageError where fit goes on at a batch, and the dataset at another one."""
    if fit._combined_loader_states_to_load:  # of a Loader, restored later, or not at all where an epoch begins
        return
    consumed = _batches_consumed(fit)
    loader, batches = fit._combined_loader, fit.epoch_loop.batch_progress
    is_single = loader is None or len(loader.flattened) == 1
    if is_single and fit.restarting and batches.is_last_batch and loader is not None and loader.limits:
        _check_length(batches.current.ready, loader.limits[0])
    if has_loader and not consumed:
        return  # fit sets its epoch
    if progress.start == consumed * ranks or (not is_single and progress.is_resumed):
        return
    raise UsageError(
        "Lightning's checkpoint",
        f"it was taken after {consumed} batches of an epoch in each of {ranks} processes, and the loader goes on "
        f"after {progress.start / ranks:g}: some rows would come twice and others never",
        "train with pqcache.torch.Loader(dataset), of which checkpoints have the place, or resume at an epoch's end; "
        "in the middle of one, with as many processes as before",
    )


def _check_length(before: int, now: int) -> None:
    """Raise UsageError where Lightning would take the last batch of a shorter epoch for one in the middle of this."""
    if before < now:
        raise UsageError(
            "Lightning's checkpoint",
            f"it was taken at the end of an epoch of {before} batches, and epochs have {now} now: Lightning would "
            f"leave {before} of them out",
            "resume with as many processes and the limit_train_batches of before, or from a checkpoint of "
            "ModelCheckpoint(save_on_train_epoch_end=True)",
        )


def counts_iterations() -> bool:
    """Return whether Fabric sets an epoch: the number of an iteration in this process, also after a resume."""
    return _find(_FABRIC_LOADER, "__iter__") is not None


def begins_epoch() -> bool | None:
    """Return whether Lightning sets an epoch that begins; False where it goes on within one, None for other callers.

    All loaders of a CombinedLoader are set to the trainer's epoch. Those that it repeats may be in a later one.
    """
    fit = _find(_FIT, "on_advance_start")
    return None if fit is None else not _batches_consumed(fit)


def check_saving() -> None:
    """Raise UsageError where Fabric saves a loader that has no place, by pickling its dataset."""
    if _find(_FABRIC, "save") is not None:
        raise UsageError(
            "fabric.save",
            "a plain DataLoader in it is pickled whole, without its place",
            "make it a pqcache.torch.Loader(dataset), of which the place is saved",
        )


def _batches_consumed(fit: Any) -> int:
    """Return the batches of the epoch that fit goes on with which an earlier process has consumed, else 0."""
    batches = fit.epoch_loop.batch_progress
    return 0 if batches.is_last_batch or not fit.restarting else int(batches.current.ready)


def _find(place: tuple[str, str, str], *functions: str) -> Any:
    """Return the object of which one of these methods is among the callers, or None; also where it validates."""
    package, module, name = place
    modules = f"lightning.{package}.{module}", f"{package}_lightning.{module}", f"lightning_{package}.{module}"
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and not frame.f_globals.get("__name__", "").endswith(_VALIDATES):
        if frame.f_code.co_name in functions and frame.f_globals.get("__name__") in modules:
            found = frame.f_locals.get("self")
            if any(kind.__name__ == name for kind in type(found).__mro__):
                return found
        frame = frame.f_back
    return None
