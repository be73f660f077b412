"""Seeds for transforms: the same for a batch with any number of ranks and workers, and after a resume."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch.utils.data import get_worker_info


@contextmanager
def seeded(*numbers: int) -> Iterator[None]:
    """Seed the generators of random, numpy and torch, and restore them afterwards in the trainer's process."""
    in_worker = get_worker_info() is not None
    saved = None if in_worker else (random.getstate(), np.random.get_state(), torch.get_rng_state())
    seeds = np.random.SeedSequence(list(numbers)).generate_state(3)
    random.seed(int(seeds[0]))
    np.random.seed(int(seeds[1]))  # numpy's global generator, as transforms use it
    torch.default_generator.manual_seed(int(seeds[2]))
    try:
        yield
    finally:
        if saved is not None:
            random.setstate(saved[0])
            np.random.set_state(saved[1])
            torch.set_rng_state(saved[2])
