"""What transformers' Trainer does with datasets, on each rank; run by test_trainer.py."""

from __future__ import annotations

import warnings
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import TrainerCallback, TrainingArguments

from pqcache.torch import Mix, ParquetDataset
from pqcache.torch.trainer import Trainer
from tests.frameworks.forked_ranks import refusal


class Line(torch.nn.Module):
    """A model of one weight that keeps the ids it is trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: list[list[int]] = []

    def forward(self, id: torch.Tensor, price: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, Any]:
        if self.training:
            self.seen.append(id.reshape(-1).tolist())
        found = self.layer(price.reshape(-1, 1))[:, 0]
        return {"loss": (found - 1).square().mean(), "logits": id.reshape(-1)}


class Stop(TrainerCallback):
    """Saves after some steps, as a machine that is switched off would, and notes where epochs begin."""

    def __init__(self, model: Line, stop: int | None = None) -> None:
        self.model, self.stop, self.begins = model, stop, []

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.begins.append(len(self.model.seen))

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.stop:
            control.should_save = control.should_training_stop = True


def labelled(batch: Any) -> dict[str, Any]:
    return {**batch, "labels": batch["id"]}


class Scenes:
    """Each method returns what it saw on this rank, as JSON values."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.table, self.directory = options["table"], Path(options["state"])

    def dataset(self, **options: Any) -> ParquetDataset:
        return ParquetDataset(self.table, **{"batch_size": 124, "seed": 1, **options})

    def arguments(self, name: str, **options: Any) -> TrainingArguments:
        said = {
            "report_to": "none",
            "save_strategy": "no",
            "use_cpu": True,
            "disable_tqdm": True,
            "logging_steps": 1000,
        }
        return TrainingArguments(str(self.directory / name), **{**said, **options})

    def train(self, name: str, kind: Any = Trainer, stop: int | None = None, **options: Any) -> dict[str, Any]:
        """Train, and return the rows that this rank read in each epoch."""
        resume = options.pop("resume", None)
        dataset = options.pop("dataset", None) or self.dataset()
        model = Line()
        callback = Stop(model, stop)
        arguments = self.arguments(name, **options)
        trainer = kind(model=model, args=arguments, train_dataset=dataset, callbacks=[callback])
        trainer.train(resume_from_checkpoint=resume)
        ends = [*callback.begins[1:], len(model.seen)]
        epochs = [list(chain(*model.seen[a:b])) for a, b in zip(callback.begins, ends, strict=True)]
        examples = trainer.num_examples(trainer.get_train_dataloader())
        return {
            "epochs": epochs,
            "steps": trainer.state.global_step,
            "examples": examples,
            "epoch": trainer.state.epoch,
        }

    def error(self, *names: Any, **options: Any) -> str:
        return refusal(lambda: self.train("refused", *names, max_steps=3, **options))

    def whole(self) -> dict[str, Any]:
        """Runs that nothing interrupts."""
        return {
            "0": self.train("whole", num_train_epochs=3),
            "2": self.train("whole", num_train_epochs=2, dataloader_num_workers=2),
            "accumulated": self.train("whole", num_train_epochs=2, gradient_accumulation_steps=4),
            "max_steps": self.train("whole", max_steps=60),
        }

    def interrupted(self) -> dict[str, Any]:
        """Runs that end early: within an epoch, and at the end of one."""
        length = len(self.dataset())
        return {
            "middle": self.train("middle", num_train_epochs=3, stop=length + 20),
            "end": self.train("end", num_train_epochs=3, stop=2 * length),
            "accumulated": self.train("accumulated", num_train_epochs=3, gradient_accumulation_steps=4, stop=10),
            "workers": self.train("workers", num_train_epochs=2, dataloader_num_workers=2, stop=20),
        }

    def resumed(self) -> dict[str, Any]:
        """The same runs, from their checkpoints."""
        found = {
            "middle": self.train("middle", num_train_epochs=3, resume=True),
            "end": self.train("end", num_train_epochs=3, resume=True),
            "accumulated": self.train("accumulated", num_train_epochs=3, gradient_accumulation_steps=4, resume=True),
            "workers": self.train("workers", num_train_epochs=2, dataloader_num_workers=2, resume=True),
        }
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found["ignored"] = self.train("middle", num_train_epochs=3, ignore_data_skip=True, resume=True)
        found["said"] = [str(each.message) for each in caught if "rows come twice" in str(each.message)]
        (checkpoint,) = (self.directory / "middle").glob("checkpoint-*")
        found["other steps"] = self.error(resume=str(checkpoint), gradient_accumulation_steps=3)
        torch.distributed.barrier() if torch.distributed.is_initialized() else None
        (checkpoint / "pqcache.json").unlink(missing_ok=True)
        found["no place"] = self.error(resume=str(checkpoint))
        return found

    def evaluated(self) -> dict[str, Any]:
        """The rows that evaluation and prediction count, in training and out of it."""
        found = {}
        for workers in (0, 2):
            counted: list[Any] = []

            def metrics(prediction: Any, counted: list[Any] = counted) -> dict[str, float]:
                counted.append([prediction.predictions.tolist(), prediction.label_ids.tolist()])
                return {"mean": float(prediction.label_ids.mean())}

            arguments = self.arguments(
                f"evaluated-{workers}", max_steps=4, eval_strategy="steps", eval_steps=2, dataloader_num_workers=workers
            )
            held_out = self.dataset(shuffle=False, transform=labelled)
            trainer = Trainer(
                model=Line(),
                args=arguments,
                train_dataset=self.dataset(),
                eval_dataset=held_out,
                compute_metrics=metrics,
            )
            trainer.train()
            several = trainer.evaluate({"a": held_out})
            predicted = trainer.predict(self.dataset(transform=labelled)).predictions.tolist()
            found[str(workers)] = {"counted": counted, "mean": several["eval_a_mean"], "predicted": predicted}
        return found

    def refused(self) -> dict[str, str]:
        """What is said to arguments that the dataset decides, and to scripts without our Trainer."""
        collator = transformers.DefaultDataCollator()
        found = {
            name: self.error(**{name: value}) for name, value in REFUSED.items() if hasattr(TrainingArguments, name)
        }
        found["naive"] = self.error(transformers.Trainer)
        found["naive workers"] = self.error(transformers.Trainer, dataloader_num_workers=2)
        once, many = self.arguments("refused", max_steps=1), self.arguments("refused")
        collated = Trainer(model=Line(), args=once, train_dataset=self.dataset(), data_collator=collator)
        found["data_collator"] = refusal(collated.train)
        same = self.dataset()
        found["eval_dataset"] = refusal(
            Trainer(model=Line(), args=many, train_dataset=same, eval_dataset=same).evaluate
        )
        parts = {"a": self.dataset(filters="id < 1000"), "b": self.dataset(filters="id >= 1000")}
        for name, dataset in {"pad=False": self.dataset(shuffle=False, pad=False), "mix": Mix(parts)}.items():
            found[name] = refusal(Trainer(model=Line(), args=many, eval_dataset=dataset).get_eval_dataloader)
        found["pad=False in training"] = self.error(dataset=self.dataset(pad=False))
        return found

    def rows(self) -> dict[str, Any]:
        """Single rows by transformers' own Trainer, which makes batches of them and divides these."""
        one_reader = {"num_replicas": 1, "rank": 0, "batch_size": None}
        size = {"per_device_train_batch_size": 124, "remove_unused_columns": False, "num_train_epochs": 2}
        found = {"one reader": self.train("rows", transformers.Trainer, dataset=self.dataset(**one_reader), **size)}
        dataset = self.dataset(batch_size=None)
        found["error"] = self.error(transformers.Trainer, dataset=dataset, per_device_train_batch_size=64)
        return found


REFUSED = {
    "train_sampling_strategy": "group_by_length",
    "group_by_length": True,
    "auto_find_batch_size": True,
    "dataloader_drop_last": True,
    "dataloader_in_order": False,
    "per_device_train_batch_size": 32,
    "accelerator_config": {"split_batches": True},
}
