"""Train a small model that tells an offer's category from its words, price and picture.

    python demo/train_shop.py CACHE --epochs 2

This is all that a training script does with pqcache: make a ``ParquetDataset`` of a cache, and put it into a
``Loader``, a DataLoader that reads each epoch in another order.
"""

from __future__ import annotations

import argparse
import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor, nn

from pqcache.torch import Loader, ParquetDataset

CATEGORIES = {"backpack": 0, "chair": 1, "jacket": 2, "lamp": 3, "mug": 4, "watch": 5}
COLUMNS = ["id", "tokens", "category", "price", "image"]  # the others are not even decoded
SIDE = 16


@dataclass(frozen=True)
class Epoch:
    """What an epoch came to: the loss of each step and the ids of the rows in the order they were seen."""

    snapshot: str
    losses: tuple[float, ...]
    ids: Tensor

    @property
    def loss(self) -> float:
        """The mean loss."""
        return sum(self.losses) / len(self.losses)


class Model(nn.Module):
    """The mean of the words' embeddings, two convolutions of the picture, the price, and one layer on top."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(8192, 24)
        self.picture = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2), nn.ReLU(), nn.Flatten()
        )
        self.top = nn.Sequential(nn.Linear(24 + 16 * 9 + 1, 64), nn.ReLU(), nn.Linear(64, len(CATEGORIES)))

    def forward(self, batch: dict[str, Any]) -> Tensor:
        """Return the logits of a batch."""
        tokens = batch["tokens"]  # ragged: all tokens in one tensor, and where each row's begin
        words = self.words(tokens.values.long(), tokens.offsets[:-1].long())
        price = batch["price"].float().log().sub(4.3)[:, None]
        logits: Tensor = self.top(torch.cat([words, self.picture(batch["pixels"]), price], 1))
        return logits


def prepare(batch: dict[str, Any]) -> dict[str, Any]:
    """Decode pictures and look up labels; this runs in the Loader's workers."""
    batch["pixels"] = torch.from_numpy(np.stack([decode(jpeg) for jpeg in batch.pop("image")]))
    batch["label"] = torch.tensor([CATEGORIES[name] for name in batch.pop("category")])
    return batch


def decode(jpeg: bytes) -> npt.NDArray[np.float32]:
    """Return a picture's pixels, (3, 16, 16) from -1 to 1."""
    with Image.open(io.BytesIO(jpeg)) as image:
        image.draft("RGB", (SIDE, SIDE))  # a JPEG can be decoded at an eighth of its size at once
        pixels: npt.NDArray[np.float32] = np.asarray(image, np.float32).transpose(2, 0, 1) / 127.5 - 1
    return pixels


def train(
    cache: Path,
    epochs: int = 2,
    workers: int = 2,
    log: Callable[[str], None] = print,
    after_step: Callable[[int], None] | None = None,
) -> list[Epoch]:
    """Train on the snapshot that is current now, whatever is published meanwhile.

    ``after_step`` is called with the number of each step of an epoch when it is done.
    """
    torch.manual_seed(0)
    torch.set_num_threads(1)
    dataset = ParquetDataset(cache, columns=COLUMNS, batch_size=128, seed=0, transform=prepare)
    loader = Loader(dataset, num_workers=workers)
    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    done = []
    for number in range(epochs):
        losses: list[float] = []
        ids: list[Tensor] = []
        for step, batch in enumerate(loader, 1):  # another order each time
            loss = nn.functional.cross_entropy(model(batch), batch["label"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            ids.append(batch["id"].clone())  # a column kept as it is would keep its whole batch
            if step % 25 == 0 or step == 1:
                log(f"epoch {number + 1}, step {step:>3} of {len(loader)}: loss {loss.item():.3f}")
            if after_step is not None:
                after_step(step)
        done.append(Epoch(dataset.snapshot, tuple(losses), torch.cat(ids)))
        log(f"epoch {number + 1}: mean loss {done[-1].loss:.3f}, {len(done[-1].ids):,} rows")
    return done


def save(done: list[Epoch], report: Path) -> None:
    """Write what was seen, for those who want to check."""
    np.savez(
        report,
        snapshot=done[0].snapshot,
        losses=np.array([epoch.losses for epoch in done]),
        ids=np.array([epoch.ids.numpy() for epoch in done]),
    )


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description="Train a small model on the shop's offers.")
    parser.add_argument("cache", type=Path)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--report", type=Path, help="an .npz file for the losses and the ids of all rows seen")
    options = parser.parse_args()
    done = train(options.cache, options.epochs, options.workers)
    if options.report:
        save(done, options.report)


if __name__ == "__main__":
    main()
