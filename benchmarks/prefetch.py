"""What Prefetch gains on a GPU: the time of a step with batches that are moved in the loop, and that are copied ahead.

    python benchmarks/prefetch.py --data /tmp/bench --workers 4

Each step multiplies matrices on the device for --step milliseconds. Every --wait-every steps the result is waited for,
as a program does that prints its loss. Each way takes its turn in every round, on the data of loader.py, and is
measured after the first 60 steps of an epoch, in which workers are still decoding. Read the medians, beside the step
without data. Without a CUDA device there is nothing to measure, and the program says so and ends with code 2.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from itertools import count, islice
from pathlib import Path
from typing import Any

import torch
from _loader_data import NULLS, make, parts
from _loader_peers import BATCH

from pqcache.torch import Loader, ParquetDataset, Prefetch

SIDE = 2048  # of the matrices
FIRST = 60  # steps of an epoch, which are not measured


def ways(path: Path, name: str, workers: int) -> dict[str, Iterable[Any]]:
    """Return loaders of one dataset: nothing pinned, pinned by DataLoader, and copied ahead."""

    def loader(**options: Any) -> Loader:
        kind = parts(name)[0]
        dataset = ParquetDataset(path, batch_size=BATCH[kind], nulls=NULLS[kind] or "error")
        return Loader(dataset, num_workers=workers, **options)

    return {
        "in the loop": loader(device="cuda"),
        "in the loop, pinned": loader(device="cuda", pin_memory=True),
        "Prefetch": Prefetch(loader(), "cuda"),
    }


def work(milliseconds: float, wait_every: int) -> Callable[[], None]:
    """Return a step that takes about so long on the device; every so many of them are waited for."""
    matrix = torch.rand(SIDE, SIDE, device="cuda")

    def multiply(times: int, waits: bool = True) -> float:
        began, result = time.perf_counter(), matrix
        for _ in range(times):
            result = torch.mm(matrix, result) * 1e-3
        if waits:
            result[0, 0].item()
        return (time.perf_counter() - began) * 1e3

    multiply(50)
    times = max(1, round(milliseconds / (min(multiply(50) for _ in range(5)) / 50)))
    steps = count(1)

    def step() -> None:
        multiply(times, next(steps) % wait_every == 0)

    return step


def seconds_of_steps(batches: Iterable[Any], step: Callable[[], None], steps: int) -> float:
    """Return how long a step takes, of so many after the first ones."""
    iterator = iter(batches)
    for _ in islice(iterator, FIRST):
        step()
    torch.cuda.synchronize()
    began, done = time.perf_counter(), 0
    for _ in islice(iterator, steps):
        step()
        done += 1
    torch.cuda.synchronize()
    if not done:
        raise SystemExit(f"an epoch has no more than {FIRST} batches: take more rows")
    return (time.perf_counter() - began) / done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("/tmp/pqcache-bench"))
    parser.add_argument("--datasets", default="multimodal,tabular,tokens")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--step", type=float, default=5.0, help="milliseconds of work on the device")
    parser.add_argument("--wait-every", type=int, default=1, help="of so many steps one is waited for")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit(no_device())
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {options.workers} workers")
    step = work(options.step, options.wait_every)
    for name in options.datasets.split(","):
        found = ways(make(options.data, name), name, options.workers)
        taken: dict[str, list[float]] = {way: [] for way in ("no data", *found)}
        for _ in range(options.rounds):
            taken["no data"].append(seconds_of_steps(range(options.steps + FIRST), step, options.steps))
            for way, batches in found.items():
                taken[way].append(seconds_of_steps(batches, step, options.steps))
        base = statistics.median(taken["no data"])
        for way, seconds in taken.items():
            middle = statistics.median(seconds)
            print(f"{name:<12} {way:<20} {middle * 1e3:>8.2f} ms a step   {(middle - base) * 1e3:>+7.2f} ms for data")


def no_device() -> int:
    """Say that there is no device, and return the exit code."""
    print(f"no CUDA device is here (torch {torch.__version__}): nothing was measured", file=sys.stderr)
    return 2


if __name__ == "__main__":
    main()
