# torchrun --nproc-per-node=2 train_accelerate.py
import sys
from pathlib import Path

import torch
from accelerate import Accelerator

from pqcache.torch import Loader, ParquetDataset


def main(cache: str = "cache/shop", checkpoint: str = "accelerate", stop: int = 0, epochs: int = 2) -> None:
    """Train; with ``stop``, end after so many steps of epoch 1, as a machine that is switched off would."""
    accelerator = Accelerator()
    # With 1, 2, 3, 4, 6 or 12 processes x workers batches come in the same sequence, with others in another one
    dataset = ParquetDataset(cache, columns=["price"], filters="id >= 1000", batch_size=64, lanes=12)
    held_out = ParquetDataset(cache, columns=["price"], filters="id < 1000", batch_size=64, shuffle=False)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    loader = Loader(dataset, num_workers=2, device=accelerator.device)
    evaluation = Loader(held_out, device=accelerator.device)
    model, optimizer, loader, evaluation = accelerator.prepare(model, optimizer, loader, evaluation)
    if Path(checkpoint).is_dir():
        accelerator.load_state(checkpoint)  # also the loader's place
    for epoch in range(loader.epoch, epochs):
        rows = torch.zeros(1, device=accelerator.device)
        for step, batch in enumerate(loader, 1):
            loss = (model(batch["price"].float()[:, None]) - 1).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            rows += len(batch["price"])
            if step % 10 == 0:
                accelerator.save_state(checkpoint)  # with the place of the loader
            if epoch == 1 and step == stop:
                return
        losses = []
        with torch.no_grad():
            for batch in evaluation:
                prices = batch["price"].float()
                errors = (model(prices[:, None])[:, 0] - 1).square()
                losses.append(accelerator.gather_for_metrics(errors))  # of every row once
        total = int(accelerator.reduce(rows))
        accelerator.print(f"epoch {epoch}: {total} rows, evaluated on {len(torch.cat(losses))}")
    accelerator.end_training()


if __name__ == "__main__":
    main(*sys.argv[1:3], *map(int, sys.argv[3:]))
