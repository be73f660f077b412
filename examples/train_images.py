"""Decode JPEGs, crop and flip them at random, and train on them: the work is done in the DataLoader's workers.

    python examples/train_images.py CACHE --workers 4

The cache has a binary column ``image`` (JPEG) and an integer column ``label``.
"""

from __future__ import annotations

import argparse
import io
import time
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader

from pqcache.torch import ParquetDataset

SIDE = 96


def augmented(jpeg: bytes) -> np.ndarray[Any, Any]:
    """Return a random crop of a picture, mirrored or not: uint8 (SIDE, SIDE, 3).

    numpy's generator is seeded for each batch, so a run that is resumed sees the same crops.
    """
    with Image.open(io.BytesIO(jpeg)) as image:
        picture = image.convert("RGB")
    scale = np.random.uniform(0.5, 1)
    width, height = max(1, int(picture.width * scale)), max(1, int(picture.height * scale))
    left = np.random.randint(picture.width - width + 1)
    top = np.random.randint(picture.height - height + 1)
    pixels = np.asarray(picture.resize((SIDE, SIDE), box=(left, top, left + width, top + height)))
    return pixels[:, ::-1] if np.random.rand() < 0.5 else pixels


def prepare(batch: dict[str, Any]) -> dict[str, Any]:
    """Replace the JPEGs of a batch by one uint8 tensor (rows, 3, SIDE, SIDE): a quarter of what floats would send."""
    pixels = np.stack([augmented(jpeg) for jpeg in batch.pop("image")])
    batch["pixels"] = torch.from_numpy(pixels).permute(0, 3, 1, 2)
    return batch


def train(cache: str, workers: int = 2, epochs: int = 1, batch_size: int = 64, steps: bool = True) -> list[float]:
    """Train a small network, or only read when ``steps`` is False; return each epoch's pictures per second."""
    torch.set_num_threads(1)
    dataset = ParquetDataset(cache, columns=["label", "image"], batch_size=batch_size, transform=prepare)
    loader = DataLoader(dataset, batch_size=None, num_workers=workers, persistent_workers=workers > 0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 7, stride=4), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(128, 10)
    )
    optimizer = torch.optim.Adam(model.parameters())
    speeds = []
    for epoch in range(epochs):
        dataset.set_epoch(epoch)
        began, rows = time.perf_counter(), 0
        for batch in loader:
            rows += len(batch["label"])
            if not steps:
                continue
            loss = nn.functional.cross_entropy(model(batch["pixels"].float() / 255), batch["label"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        speeds.append(rows / (time.perf_counter() - began))
        print(f"epoch {epoch}: {rows} pictures, {speeds[-1]:,.0f} a second")
    return speeds


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description="Train on JPEGs in a cache.")
    parser.add_argument("cache")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--read-only", action="store_true", help="make the batches, but do not train")
    options = parser.parse_args()
    train(options.cache, options.workers, options.epochs, steps=not options.read_only)


if __name__ == "__main__":
    main()
