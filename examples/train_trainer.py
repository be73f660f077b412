# torchrun --nproc-per-node=2 train_trainer.py
import sys
from pathlib import Path

import torch
from transformers import TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from pqcache.torch import Batch, ParquetDataset
from pqcache.torch.trainer import Trainer


class Line(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def forward(self, price: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        found = self.layer(price[:, None])[:, 0]
        return {"loss": (found - labels).square().mean(), "logits": found}


def inputs(batch: Batch) -> dict[str, torch.Tensor]:
    """Return what the model takes."""
    return {"price": batch["price"].float(), "labels": torch.ones(len(batch["price"]))}


def metrics(prediction) -> dict[str, float]:
    return {"rows": float(len(prediction.predictions))}


def main(cache: str = "cache/shop", output: str = "trainer", steps: int = -1) -> None:
    """Train for 2 epochs, or so many steps, from the last checkpoint in ``output`` if there is one."""
    dataset = ParquetDataset(cache, columns=["price"], filters="id >= 1000", batch_size=64, transform=inputs)
    held_out = ParquetDataset(
        cache, columns=["price"], filters="id < 1000", batch_size=64, shuffle=False, transform=inputs
    )
    arguments = TrainingArguments(
        output,
        num_train_epochs=2,
        max_steps=steps,
        save_steps=10,
        eval_strategy="epoch",
        report_to="none",
    )
    trainer = Trainer(
        model=Line(), args=arguments, train_dataset=dataset, eval_dataset=held_out, compute_metrics=metrics
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint(output) if Path(output).is_dir() else None)


if __name__ == "__main__":
    main(*sys.argv[1:3], *map(int, sys.argv[3:]))
