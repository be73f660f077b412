"""The part of ``pqcache bench`` that needs torch: measures a Loader's batches in a separate process."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from typing import Any

from pqcache.benchmark import run_setting, time_epochs
from pqcache.torch.dataset import ParquetDataset
from pqcache.torch.loader import Loader


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Return the speed of a Loader with ``job["workers"]`` workers, and the window; nulls come as masks."""
    warnings.simplefilter("ignore")
    options = {name: job[name] for name in ("columns", "filters", "batch_size", "memory")}
    dataset = ParquetDataset(
        job["path"], nulls="mask", decimals="float64", num_replicas=1, rank=0, **options, **job["rules"]
    )
    workers = job["workers"]
    loader = Loader(dataset, num_workers=workers)
    window = 0  # of the batches

    def epochs() -> Iterator[Iterator[int]]:
        for epoch in range(sys.maxsize):
            loader.set_epoch(epoch)
            yield rows()

    def rows() -> Iterator[int]:
        nonlocal window
        for batch in loader:
            window = batch.position.window
            yield len(next(iter(batch.values())))

    found = time_epochs(epochs(), job["seconds"])
    stats = dataset.stats().total
    seconds_of = {name: getattr(stats, f"{name}_seconds") for name in ("decode", "gather", "send")}
    return {**found, "window": window, "limited_by": stats.limited_by, "seconds_of": seconds_of}


if __name__ == "__main__":
    run_setting(measure)
