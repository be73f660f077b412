"""Decode pictures on threads, without worker processes, and leave out those that are broken.

    python examples/decode_on_threads.py CACHE --threads 4

The cache has a binary column ``image`` (JPEG, PNG or what else pillow reads) and an integer column ``label``. pillow
releases the interpreter's lock while it decodes and resizes, so threads of the trainer's process are enough.
"""

from __future__ import annotations

import argparse
import io
from typing import Any

import numpy as np
import torch
from PIL import Image

from pqcache.torch import Loader, ParquetDataset

SIDE = 96


def decoded(data: bytes, generator: np.random.Generator) -> np.ndarray[Any, Any]:
    """Return a picture, mirrored or not: uint8 (SIDE, SIDE, 3). One that cannot be decoded raises pillow's error."""
    with Image.open(io.BytesIO(data)) as image:
        pixels = np.asarray(image.convert("RGB").resize((SIDE, SIDE)))
    return pixels[:, ::-1] if generator.random() < 0.5 else pixels


def prepare(batch: dict[str, Any], generator: np.random.Generator) -> dict[str, Any]:
    """Replace the pictures of a batch by one uint8 tensor (rows, 3, SIDE, SIDE)."""
    pixels = np.stack([decoded(data, generator) for data in batch.pop("image").to_list()])
    batch["pixels"] = torch.from_numpy(pixels).permute(0, 3, 1, 2)
    return batch


def read(cache: str, threads: int, batch_size: int = 64) -> None:
    """Read an epoch, and print what was left out."""
    dataset = ParquetDataset(
        cache,
        columns=["label", "image"],
        batch_size=batch_size,
        transform=prepare,
        transform_workers=threads,
        on_error="skip",
    )
    rows = 0
    for batch in Loader(dataset):
        assert batch["pixels"].shape == (len(batch["label"]), 3, SIDE, SIDE)
        rows += len(batch["label"])
    failed = dataset.errors()
    print(f"{rows} pictures in {len(dataset)} batches, {len(failed)} broken ones replaced")
    for row in failed:
        print(row)


def main() -> None:
    """Read the command line and decode."""
    parser = argparse.ArgumentParser(description="Decode the pictures of a cache on threads.")
    parser.add_argument("cache")
    parser.add_argument("--threads", type=int, default=4)
    options = parser.parse_args()
    read(options.cache, options.threads)


if __name__ == "__main__":
    main()
