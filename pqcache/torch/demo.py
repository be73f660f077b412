"""The training of ``pqcache demo``: a small model tells an offer's category from its words, price and picture.

This is all that a training script does with pqcache: make a ``ParquetDataset`` of a cache, and put it into a
``Loader``, a DataLoader that reads each epoch in another order.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from pqcache.torch import Loader, ParquetDataset

CATEGORIES = {"backpack": 0, "chair": 1, "jacket": 2, "lamp": 3, "mug": 4, "watch": 5}
COLUMNS = ["id", "tokens", "category", "price", "image"]  # the others are not even decoded
SIDE = 48  # pixels of a picture, of which every third is taken


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
    batch["pixels"] = torch.from_numpy(np.stack([decode(png) for png in batch.pop("image")]))
    batch["label"] = torch.tensor([CATEGORIES[name] for name in batch.pop("category")])
    return batch


def decode(png: bytes) -> npt.NDArray[np.float32]:
    """Return the pixels of one of the shop's pictures, (3, 16, 16) from -1 to 1; a library would read any picture."""
    at = 8  # behind the signature
    while png[at + 4 : at + 8] != b"IDAT":
        at += 12 + int.from_bytes(png[at : at + 4], "big")
    rows = np.frombuffer(zlib.decompress(png[at + 8 : at + 8 + int.from_bytes(png[at : at + 4], "big")]), np.uint8)
    pixels = rows.reshape(SIDE, -1)[:, 1:].reshape(SIDE, SIDE, 3)[1::3, 1::3].transpose(2, 0, 1)
    scaled: npt.NDArray[np.float32] = pixels.astype(np.float32) / 127.5 - 1
    return scaled


def train(
    cache: Path,
    epochs: int,
    workers: int = 2,
    log: Callable[[str], None] = print,
    after_step: Callable[[int], None] | None = None,
) -> Iterator[tuple[str, list[float], list[int]]]:
    """Train on the snapshot that is current now; yield of each epoch the snapshot, the losses, and the ids it saw."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    dataset = ParquetDataset(cache, columns=COLUMNS, batch_size=128, seed=0, transform=prepare)
    loader = Loader(dataset, num_workers=workers)
    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for number in range(epochs):
        losses: list[float] = []
        ids: list[int] = []
        for step, batch in enumerate(loader, 1):  # another order each time
            loss = nn.functional.cross_entropy(model(batch), batch["label"])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(loss.item())
            ids += batch["id"].tolist()
            if step % 25 == 0 or step == 1:
                log(f"epoch {number + 1}, step {step:>3} of {len(loader)}: loss {loss.item():.3f}")
            if after_step is not None:
                after_step(step)
        log(f"epoch {number + 1}: mean loss {sum(losses) / len(losses):.3f}, {len(ids):,} rows")
        yield dataset.snapshot, losses, ids
