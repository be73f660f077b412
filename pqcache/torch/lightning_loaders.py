"""What Lightning and Fabric do with a loader, known by who asks: nothing else says it.

``Trainer.fit`` asks for the length of a loader where it sets it up, after it has restored the places of loaders that
have one, and again before each later epoch. Where ``configure_optimizers`` asks for ``estimated_stepping_batches``, it
has set it up before it restores anything, and forgets the places. It sets epochs on ``loader.sampler``, and so does
Fabric. The names here are Lightning's private ones: tests/frameworks/test_lightning.py fails where they are others.
"""

from __future__ import annotations

import sys
import warnings
from itertools import takewhile
from types import FrameType
from typing import Any

from pqcache.errors import UsageError
from pqcache.torch.foreign_loaders import outward
from pqcache.torch.progress import Progress

_FIT = ("pytorch", "loops.fit_loop", "_FitLoop")  # package, module, class
_ESTIMATE = ("pytorch", "trainer.trainer", "Trainer")
_FABRIC_LOADER = ("fabric", "wrappers", "_FabricDataLoader")
_FABRIC = ("fabric", "fabric", "Fabric")
_OF_USERS = {  # where code of users is called, which may ask for any length: end of the module's name, functions
    "loops.evaluation_loop": None,
    "loops.training_epoch_loop": {"advance", "on_advance_end"},
    "connectors.data_connector": {"_request_dataloader"},
}

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
    elif not has_loader and _find(_ESTIMATE, "estimated_stepping_batches") is not None:
        _check_batches(progress, _batches_to_restore(fit), ranks)
    is_later = fit.epoch_progress.current.processed > 0 and not overfit
    if shuffle and not has_loader and is_later and not progress.is_set:
        warnings.warn(_REPEATS, UserWarning, stacklevel=3)


def restore_place(progress: Progress, ranks: int) -> None:
    """Restore the places of loaders where ``Trainer.fit`` begins and has not, or raise UsageError as ``check_fit``.

    Called where it sets an epoch, before any batch is read.
    """
    fit = _find(_FIT, "on_advance_start")
    if fit is not None and getattr(fit, "is_resuming", False):
        fit._load_combined_loader_states()
        _check_place(fit, progress, True, ranks)


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
    if is_single or not progress.is_resumed:
        _check_batches(progress, consumed, ranks)


def _check_batches(progress: Progress, consumed: int, ranks: int) -> None:
    """Raise UsageError unless a dataset goes on after so many batches in each rank."""
    if progress.start == consumed * ranks:
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


def _batches_to_restore(fit: Any) -> int:
    """Return the batches of its epoch that a checkpoint has, which Lightning has read and not restored."""
    checkpoint = fit.trainer._checkpoint_connector._loaded_checkpoint
    batches = checkpoint.get("loops", {}).get("fit_loop", {}).get("epoch_loop.batch_progress")
    return 0 if batches is None or batches["is_last_batch"] else int(batches["current"]["ready"])


def _find(place: tuple[str, str, str], *functions: str) -> Any:
    """Return the object of which one of these methods is among the callers, or None; also in code of users."""
    package, module, name = place
    modules = f"lightning.{package}.{module}", f"{package}_lightning.{module}", f"lightning_{package}.{module}"
    for frame in takewhile(lambda frame: not _calls_users(frame), outward(sys._getframe(2))):
        if frame.f_code.co_name in functions and frame.f_globals.get("__name__") in modules:
            found = frame.f_locals.get("self")
            if any(kind.__name__ == name for kind in type(found).__mro__):
                return found
    return None


def _calls_users(frame: FrameType) -> bool:
    name = ".".join(frame.f_globals.get("__name__", "").rsplit(".", 2)[-2:])
    if name not in _OF_USERS:
        return False
    functions = _OF_USERS[name]
    return functions is None or frame.f_code.co_name in functions
