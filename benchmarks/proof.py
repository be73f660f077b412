"""What ``proof=True`` costs: CPU time of epochs with proofs against epochs without.

    python benchmarks/proof.py --rounds 50 --data /tmp/bench

Epochs are read in turns, so that noise hits both alike; the time of workers is included. A part of the data of
loader.py is read. Read the median of the ratios.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from pathlib import Path

from _loader_data import NULLS
from _loader_peers import BATCH
from stats import data_of

from pqcache.torch import Loader, ParquetDataset


def cpu_seconds() -> float:
    """Return the CPU time of this process and its workers; the clock of a process is Linux's."""
    workers = (time.clock_gettime((~process.pid << 3) | 2) for process in multiprocessing.active_children())
    return time.process_time() + sum(workers)


def measure(path: Path, name: str, batch_size: int, workers: int, rounds: int) -> str:
    """Return what epochs take with proofs and without."""
    loaders = {}
    for proof in (False, True):
        dataset = ParquetDataset(path, batch_size=batch_size, nulls=NULLS[name] or "error", proof=proof)
        loaders[proof] = Loader(dataset, num_workers=workers)
    taken: dict[bool, list[float]] = {False: [], True: []}
    batches = 0
    for number in range(rounds + 1):
        for proof in sorted(loaders, reverse=number % 2 == 0):
            began = cpu_seconds() if number else 0.0
            batches = sum(1 for _ in loaders[proof])
            if number:  # the first one also starts workers, and pays for fresh memory
                taken[proof].append(cpu_seconds() - began)
    ratios = [on / off for on, off in zip(taken[True], taken[False], strict=True)]
    low, ratio, high = statistics.quantiles(ratios, n=4)
    return (
        f"{batches:>6} batches {statistics.median(taken[False]):>7.3f} CPU-s   x {ratio:.3f} ({low:.3f} to {high:.3f})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("/tmp/pqcache-bench"))
    parser.add_argument("--datasets", default="multimodal,tabular,tokens")
    parser.add_argument("--batch-size", type=int, help="rows; default: those of loader.py")
    parser.add_argument("--workers", type=int, nargs="*", default=[0, 2])
    parser.add_argument("--rounds", type=int, default=50)
    options = parser.parse_args()
    for name in options.datasets.split(","):
        path, batch_size = data_of(options.data, name), options.batch_size or BATCH[name]
        for workers in options.workers:
            found = measure(path, name, batch_size, workers, options.rounds)
            print(f"{name:<12}{workers} workers {found}", flush=True)


if __name__ == "__main__":
    main()
