"""transformers' Trainer for pqcache's datasets. Only this module imports transformers."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from itertools import repeat
from pathlib import Path
from typing import Any

import transformers
from torch.utils.data import DataLoader, IterableDataset
from transformers.trainer_utils import get_last_checkpoint

from pqcache.errors import UsageError
from pqcache.torch.loader import Loader, unchanged
from pqcache.torch.resumable import ResumableDataset

PLACE = "pqcache.json"  # the state of the loader, in a checkpoint beside the files of the Trainer

_IGNORED = (
    "ignore_data_skip=True reads the interrupted epoch from its beginning, so rows come twice. Going on at the place "
    "of the checkpoint takes no longer: leave it out"
)
_BATCHES = "the dataset makes the batches"
_REFUSED: dict[str, tuple[Any, str, str]] = {  # by argument of TrainingArguments: the value that is fine
    "train_sampling_strategy": ("random", "the dataset has an order of its own", "leave it out"),
    "group_by_length": (False, "the dataset has an order of its own", "leave it out"),
    "auto_find_batch_size": (False, _BATCHES, "give the dataset a smaller batch_size"),
    "dataloader_drop_last": (False, _BATCHES, "give the dataset drop_last=True"),
    "dataloader_in_order": (True, "batches would not come in the order that states count on", "leave it out"),
    "accelerator_config.split_batches": (False, "the dataset's batch_size is that of each process", "leave it out"),
}


class Trainer(transformers.Trainer):  # type: ignore[misc]
    """``transformers.Trainer`` that reads ParquetDataset and Mix as they are: every row, also in evaluations.

    Use it like that one; with other datasets it behaves the same. With another class of Trainer: ``class
    MyTrainer(pqcache.torch.trainer.Trainer, SFTTrainer)``.

    - Batches are the dataset's, so its ``batch_size`` counts, for each process, and its ``transform`` makes the inputs
      of the model. Arguments that say otherwise raise UsageError. The arguments ``dataloader_num_workers``,
      ``dataloader_prefetch_factor`` and ``dataloader_pin_memory`` apply.
    - A checkpoint has the place in the dataset, with its snapshot: ``train(resume_from_checkpoint=...)`` goes on with
      the next batch, and reads none that was trained on.
    - ``evaluate`` and ``predict`` count every row once. Give their datasets ``shuffle=False``.
    """

    _pqcache_checkpoint: Path | None = None  # that is resumed
    _pqcache_callback: _KeepPlace | None = None

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train, from a checkpoint or from the start, like ``transformers.Trainer.train``."""
        found = get_last_checkpoint(self.args.output_dir) if resume_from_checkpoint is True else resume_from_checkpoint
        if found and isinstance(self.train_dataset, ResumableDataset):
            if self.args.ignore_data_skip:
                warnings.warn(_IGNORED, UserWarning, stacklevel=2)
            else:
                self._pqcache_checkpoint = Path(found)
        try:
            return super().train(resume_from_checkpoint, *args, **kwargs)
        finally:
            self._pqcache_checkpoint = None

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return the training loader, at the position of the resumed checkpoint."""
        if not isinstance(self.train_dataset, ResumableDataset):
            return super().get_train_dataloader()  # type: ignore[no-any-return]
        _check_arguments(self, self.train_dataset, "per_device_train_batch_size")
        loader, skipped = self._pqcache_loader(self.train_dataset, persistent=True), 0
        if self._pqcache_checkpoint is not None:
            skipped = _resume(loader, self._pqcache_checkpoint, self.args.gradient_accumulation_steps)
        if self._pqcache_callback is None:
            self._pqcache_callback = _KeepPlace()
            self.add_callback(self._pqcache_callback)
        self._pqcache_callback.loader = loader
        return _TrainerLoader(loader, skipped)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """Return the evaluation loader."""
        chosen = self.eval_dataset if eval_dataset is None else eval_dataset
        chosen = self.eval_dataset[chosen] if isinstance(chosen, str) else chosen
        if not isinstance(chosen, ResumableDataset):
            return super().get_eval_dataloader(eval_dataset)  # type: ignore[no-any-return]
        return self._pqcache_evaluation(chosen)

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader[Any]:
        """Return the prediction loader."""
        if not isinstance(test_dataset, ResumableDataset):
            return super().get_test_dataloader(test_dataset)  # type: ignore[no-any-return]
        return self._pqcache_evaluation(test_dataset)

    def _pqcache_evaluation(self, dataset: ResumableDataset) -> DataLoader[Any]:
        _check_arguments(self, dataset, "per_device_eval_batch_size")
        if dataset is self.train_dataset:
            raise UsageError("eval_dataset", "it is also the train_dataset", "make a second dataset")
        if dataset._rows_of_batches() is None and self.args.world_size > 1:
            raise UsageError(
                "eval_dataset",
                "the Trainer cannot tell which rows of a Mix or a node's share are repeated, and batches may differ",
                "evaluate the datasets of a Mix one by one, as eval_dataset={NAME: dataset}, and of a cache that every "
                "node has completely",
            )
        if (rows := dataset._rows_of_batches()) is not None:
            self.args.per_device_eval_batch_size = rows[0]  # by which the Trainer weights the losses of batches
        return _TrainerLoader(self._pqcache_loader(dataset, self.args.dataloader_persistent_workers), 0)

    def _pqcache_loader(self, dataset: ResumableDataset, persistent: bool) -> Loader:
        args, on_gpu = self.args, self.args.device.type != "cpu"
        return Loader(
            dataset,
            num_workers=args.dataloader_num_workers,
            persistent_workers=persistent,
            prefetch_factor=args.dataloader_prefetch_factor,
            pin_memory=on_gpu and args.dataloader_pin_memory,
            device=args.device if on_gpu else None,
            multiprocessing_context=getattr(args, "dataloader_multiprocessing_context", None),
        )


class _TrainerLoader(DataLoader[Any]):
    """A Loader in the form expected by the Trainer: its dataset counts rows, and skips batches for free."""

    _is_accelerate_prepared = True

    def __init__(self, loader: Loader, skipped: int) -> None:
        self.loader = loader
        super().__init__(_RestOfEpoch(loader, skipped), batch_size=None, collate_fn=unchanged)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return iter(self.loader)

    def __len__(self) -> int:
        return len(self.loader)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration."""
        self.loader.set_epoch(epoch)


class _RestOfEpoch(IterableDataset[Any]):
    """A resumed loader for Accelerate's ``skip_first_batches``, which skips its first ``skipped`` items: they are None.

    The loader is already at the checkpoint's position, and continues there.
    """

    def __init__(self, loader: Loader, skipped: int) -> None:
        self._loader, self._skipped = loader, skipped

    def __iter__(self) -> Iterator[Any]:
        yield from repeat(None, self._skipped)
        self._skipped = 0
        yield from self._loader

    def __len__(self) -> int:
        """Return the number of rows of an epoch over all processes, which the Trainer logs."""
        dataset = self._loader.dataset
        rows = dataset._rows_of_batches()
        batches = len(dataset) if rows is None else dataset._begin_pass(0)[0].total
        return batches if rows is None else (batches - 1) * rows[0] + rows[1]


class _KeepPlace(transformers.TrainerCallback):  # type: ignore[misc]
    """Writes the position of the training loader into each checkpoint."""

    loader: Loader | None = None

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        checkpoint = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if self.loader is not None and args.should_save and checkpoint.is_dir():
            (checkpoint / PLACE).write_text(json.dumps(self.loader.state_dict()))


def _resume(loader: Loader, checkpoint: Path, accumulated: int) -> int:
    """Set a loader to a checkpoint's position; return how many batches of the epoch the Trainer will skip.

    Raises UsageError if the Trainer, which counts steps of the current number of processes, arrives at another
    position.
    """
    if not (checkpoint / PLACE).is_file():
        reason = f"it has no {PLACE}, the place in the dataset: another Trainer wrote it, or it is not complete"
        advice = "resume another checkpoint, or begin the epoch again with ignore_data_skip=True"
        raise UsageError(checkpoint, reason, advice)
    steps: int = transformers.TrainerState.load_from_json(str(checkpoint / "trainer_state.json")).global_step
    loader.load_state_dict(json.loads((checkpoint / PLACE).read_text()))
    length = len(loader)
    epoch, step = divmod(steps, max(1, -(-length // accumulated)))
    batch, left = step * accumulated, loader.dataset._begin_pass(loader.num_workers)[0].rounds()
    if (epoch, batch) != (loader.epoch, length - left):
        raise UsageError(
            checkpoint,
            f"the Trainer counts {steps} steps as batch {batch} of epoch {epoch}, but it was saved at batch "
            f"{length - left} of epoch {loader.epoch}",
            "resume with as many processes and gradient_accumulation_steps as before, or begin the epoch again "
            "with ignore_data_skip=True",
        )
    return batch


def _check_arguments(trainer: Any, dataset: ResumableDataset, batch_size: str) -> None:
    for name, (fine, reason, advice) in _REFUSED.items():
        value = trainer.args
        for part in name.split("."):
            value = getattr(value, part, fine)
        if value != fine and not (name == "dataloader_drop_last" and dataset.drop_last):
            raise UsageError(f"{name}={value!r}", reason, advice)
    collators: tuple[Callable[..., Any] | None, ...] = (None, transformers.default_data_collator)
    collator = trainer.data_collator
    if collator not in collators and type(collator) is not transformers.DataCollatorWithPadding:
        raise UsageError("data_collator", _BATCHES, "give the dataset a transform=, which is called on each batch")
    if not dataset.pad and trainer.args.world_size > 1:
        reason = "the Trainer has its processes wait for each other at every batch, and some would have one less"
        raise UsageError("pad=False", reason, "leave it out: evaluate() and predict() do not count repeated rows")
    rows, said = dataset._rows_of_batches(), getattr(trainer.args, batch_size)
    default = type(trainer.args).__dataclass_fields__[batch_size].default
    if rows is not None and said not in (default, rows[0]):
        raise UsageError(
            f"{batch_size}={said}", f"the dataset has batch_size={rows[0]}", "leave it out, or give the same value"
        )
