# python train_lightning.py cache/shop; start it again to resume where it was
import sys
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from pqcache.torch import Loader, ParquetDataset


class Prices(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.rows = 0

    def training_step(self, batch: Any) -> torch.Tensor:
        self.rows += len(batch["id"])
        return (self.layer(batch["price"].float()[:, None]) - 1).square().mean()

    def on_train_epoch_end(self) -> None:
        print(f"rank {self.global_rank}, epoch {self.current_epoch}: {self.rows} rows")
        self.rows = 0

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def main(cache: str = "cache/shop", max_steps: str = "-1", saved: Path = Path("checkpoints")) -> None:
    # every rank runs this; the dataset divides its rows among them
    dataset = ParquetDataset(cache, columns=["id", "price"], batch_size=64, lanes=12)
    trainer = lightning.Trainer(
        max_epochs=2,
        max_steps=int(max_steps),
        accelerator="cpu",
        devices=1,  # or more, with strategy="ddp"
        logger=False,
        enable_progress_bar=False,
        callbacks=[ModelCheckpoint(saved, save_last=True, every_n_train_steps=10)],  # with the loader's place
    )
    last = saved / "last.ckpt"
    trainer.fit(Prices(), Loader(dataset, num_workers=2), ckpt_path=last if last.exists() else None)


if __name__ == "__main__":
    main(*sys.argv[1:3])
