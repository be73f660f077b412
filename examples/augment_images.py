"""Augment pictures with albumentations or torchvision, so that a run that is resumed sees the same crops.

    python examples/augment_images.py CACHE --library albumentations --workers 4

The cache has a binary column ``image`` (JPEG, PNG or what else pillow reads) and an integer column ``label``.
torchvision draws from torch's generator, which is seeded for each batch. albumentations has generators of its own: they
are seeded here with a number from numpy's, which is seeded for each batch too.
"""

from __future__ import annotations

import argparse
import io
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from PIL import Image

from pqcache.torch import Loader, ParquetDataset

SIDE = 96
Augment = Callable[[Image.Image], torch.Tensor]


class WithTorchvision:
    """Returns a picture cropped and mirrored at random: uint8 (3, SIDE, SIDE)."""

    def __init__(self) -> None:
        from torchvision.transforms import v2

        steps = [v2.RandomResizedCrop(SIDE, scale=(0.5, 1)), v2.RandomHorizontalFlip(), v2.PILToTensor()]
        self.pipeline = v2.Compose(steps)

    def __call__(self, picture: Image.Image) -> torch.Tensor:
        return self.pipeline(picture)


class WithAlbumentations:
    """Returns a picture cropped and mirrored at random: uint8 (3, SIDE, SIDE)."""

    def __init__(self) -> None:
        os.environ["NO_ALBUMENTATIONS_UPDATE"] = "1"  # it asks for newer versions when it is imported
        import albumentations

        crop = albumentations.RandomResizedCrop((SIDE, SIDE), scale=(0.5, 1))
        self.pipeline = albumentations.Compose([crop, albumentations.HorizontalFlip(p=0.5)])

    def __call__(self, picture: Image.Image) -> torch.Tensor:
        self.pipeline.set_random_seed(int(np.random.randint(1 << 31)))
        pixels = self.pipeline(image=np.asarray(picture))["image"]
        return torch.from_numpy(np.ascontiguousarray(pixels)).permute(2, 0, 1)


LIBRARIES: dict[str, Callable[[], Augment]] = {"albumentations": WithAlbumentations, "torchvision": WithTorchvision}


class Prepare:
    """Replaces the pictures of a batch by a uint8 tensor (rows, 3, SIDE, SIDE); workers load the library."""

    def __init__(self, library: str) -> None:
        self.library, self.augment = library, None

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        if self.augment is None:
            self.augment = LIBRARIES[self.library]()
        pictures = [Image.open(io.BytesIO(data)).convert("RGB") for data in batch.pop("image").to_list()]
        batch["pixels"] = torch.stack([self.augment(picture) for picture in pictures])
        return batch


def main() -> None:
    """Read the command line, read half an epoch, and go on with another loader as a run that is resumed does."""
    parser = argparse.ArgumentParser(description="Augment the pictures of a cache.")
    parser.add_argument("cache")
    parser.add_argument("--library", choices=list(LIBRARIES), default="albumentations")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()

    def loader() -> Loader:
        dataset = ParquetDataset(
            options.cache, columns=["label", "image"], batch_size=32, lanes=4, transform=Prepare(options.library)
        )
        return Loader(dataset, num_workers=options.workers)

    first = loader()
    rest: list[torch.Tensor] = []
    for number, batch in enumerate(first):
        if number == len(first) // 2:
            state = first.state_dict()
        elif number > len(first) // 2:
            rest.append(batch["pixels"])
    resumed = loader()
    resumed.load_state_dict(state)
    same = all(batch["pixels"].equal(pixels) for batch, pixels in zip(resumed, rest, strict=True))
    print(f"{len(first)} batches; {len(rest)} of them again after a resume, {'the same' if same else 'others'}")


if __name__ == "__main__":
    main()
