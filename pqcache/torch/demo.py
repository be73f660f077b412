"""The training of ``pqcache demo``: a small model predicts an offer's category from its words, price and picture.

A training script uses pqcache in two steps: make a ``ParquetDataset`` of a cache, and put it into a ``Loader``, a
DataLoader that reads each epoch in a different order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pqcache.torch import Loader, ParquetDataset

CATEGORIES = {"backpack": 0, "chair": 1, "jacket": 2, "lamp": 3, "mug": 4, "watch": 5}
COLUMNS = ["id", "tokens", "category", "price", "image"]  # the others are not even decoded
SIDE = 40  # pixels of a picture, of which every second is taken


class Model(nn.Module):
    """The mean of the words' embeddings, two convolutions of the picture, the price, and one layer on top."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(8192, 24)
        self.picture = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2), nn.ReLU(), nn.Flatten()
        )
        self.top = nn.Sequential(nn.Linear(24 + 16 * 16 + 1, 64), nn.ReLU(), nn.Linear(64, len(CATEGORIES)))

    def forward(self, batch: dict[str, Any]) -> Tensor:
        """Return the logits of a batch."""
        tokens = batch["tokens"]  # ragged: all tokens in one tensor, and where each row's begin
        words = self.words(tokens.values.long(), tokens.offsets[:-1].long())
        price = batch["price"].float().log().sub(4.3)[:, None]
        logits: Tensor = self.top(torch.cat([words, self.picture(batch["pixels"]), price], 1))
        return logits


def prepare(batch: dict[str, Any]) -> dict[str, Any]:
    """Decode pictures and look up labels; this runs in the Loader's workers."""
    pixels = np.frombuffer(b"".join(batch.pop("image")), np.uint8).reshape(-1, SIDE, SIDE, 3)[:, ::2, ::2]
    batch["pixels"] = torch.from_numpy(pixels.transpose(0, 3, 1, 2) / np.float32(127.5) - 1)
    batch["label"] = torch.tensor([CATEGORIES[name] for name in batch.pop("category")])
    return batch


def begin(cache: Path) -> tuple[str, Callable[[int], Iterable[Any]], Callable[[Any], float]]:
    """The snapshot that is current now, the batches of an epoch, and a step of the training."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    dataset = ParquetDataset(cache, columns=COLUMNS, batch_size=128, seed=0, transform=prepare)
    loader = Loader(dataset, num_workers=2)
    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def learn(batch: dict[str, Any]) -> float:
        loss = nn.functional.cross_entropy(model(batch), batch["label"])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.item()

    return dataset.snapshot, lambda epoch: loader, learn  # another order each time
