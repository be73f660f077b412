"""Decode sound with torchcodec on threads of the trainer's process: it releases the interpreter's lock.

    python examples/decode_audio.py CACHE --threads 4

The cache has a binary column ``sound`` (WAV, FLAC, MP3 or what else FFmpeg reads). For films it is
``VideoDecoder(data).get_frames_at([0, 10, 20]).data``, uint8 (frames, 3, height, width).
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import torch
from torchcodec.decoders import AudioDecoder

from pqcache.torch import Loader, ParquetDataset

RATE, LENGTH = 16_000, 16_000  # samples in a second, and of each piece


def piece(data: bytes, generator: np.random.Generator) -> torch.Tensor:
    """Return a random second of a sound, in one channel: float32 (LENGTH,). A shorter one ends with silence."""
    samples = AudioDecoder(data, sample_rate=RATE, num_channels=1).get_all_samples().data[0]
    start = int(generator.integers(max(1, len(samples) - LENGTH + 1)))
    found = samples[start : start + LENGTH]
    return torch.nn.functional.pad(found, (0, LENGTH - len(found)))


def prepare(batch: dict[str, Any], generator: np.random.Generator) -> dict[str, Any]:
    """Replace the sounds of a batch by one float32 tensor (rows, LENGTH)."""
    batch["samples"] = torch.stack([piece(data, generator) for data in batch.pop("sound").to_list()])
    return batch


def main() -> None:
    """Read the command line and decode."""
    parser = argparse.ArgumentParser(description="Decode the sounds of a cache on threads.")
    parser.add_argument("cache")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    dataset = ParquetDataset(
        options.cache,
        columns=["sound"],
        batch_size=16,
        transform=prepare,
        transform_workers=options.threads,
        on_error="skip",
    )
    sounds = 0
    for batch in Loader(dataset):
        assert batch["samples"].shape[1:] == (LENGTH,)
        sounds += len(batch["samples"])
    print(f"{sounds} sounds, {len(dataset.errors())} broken ones replaced")


if __name__ == "__main__":
    main()
