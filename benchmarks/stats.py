"""What dataset.stats() costs: CPU time of epochs that are measured against epochs that are not.

    python benchmarks/stats.py --rounds 100 --data /tmp/bench

Both datasets are read in one process, without workers, epoch by epoch in turns, so that noise hits both alike. A part
of the data of loader.py is read. Read the median of the ratios; with 2 busy cores it is known to about 1 %.
"""

from __future__ import annotations

import argparse
import statistics
import time
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from _loader_data import NULLS, SHAPES
from _loader_peers import BATCH

import pqcache.torch.dataset_reader as dataset_reader
from pqcache.reader.meter import NoMeter
from pqcache.torch import ParquetDataset
from pqcache.torch.iteration_meter import NoIterationMeter
from pqcache.torch.shared_meter import new_meter

PART = 4  # of the rows of loader.py


def data_of(root: Path, name: str) -> Path:
    """Return a file of a part of a dataset of loader.py, written once."""
    shape = SHAPES[name]
    row_group = (32 << 20) // shape.row_bytes
    path = root / f"stats-{name}" / "a.parquet"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(shape.build(np.random.default_rng(0), 0, shape.rows // PART), path, row_group_size=row_group)
    return path.parent


def open_dataset(path: Path, name: str, is_measured: bool) -> ParquetDataset:
    dataset_reader.new_meter = new_meter if is_measured else NoMeter
    stall_timeout = 60 if is_measured else None
    dataset = ParquetDataset(path, batch_size=BATCH[name], nulls=NULLS[name] or "error", stall_timeout=stall_timeout)
    if not is_measured:
        dataset._measured = lambda epoch: nullcontext(NoIterationMeter())  # type: ignore[method-assign]
    return dataset


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("/tmp/pqcache-bench"))
    parser.add_argument("--datasets", default="multimodal,tabular,tokens")
    parser.add_argument("--rounds", type=int, default=50)
    options = parser.parse_args()
    for name in options.datasets.split(","):
        path = data_of(options.data, name)
        datasets = {is_measured: open_dataset(path, name, is_measured) for is_measured in (True, False)}
        taken: dict[bool, list[float]] = {True: [], False: []}
        for number in range(options.rounds + 1):
            for is_measured in (number % 2 == 0, number % 2 == 1):
                datasets[is_measured].set_epoch(number)
                began = time.process_time()
                batches = sum(1 for _ in datasets[is_measured])
                if number:  # the first one also pays for fresh memory
                    taken[is_measured].append(time.process_time() - began)
        ratios = [on / off for on, off in zip(taken[True], taken[False], strict=True)]
        of_all = sum(taken[True]) / sum(taken[False])
        print(
            f"{name:<12} {batches:>6} batches {statistics.median(taken[False]):>7.3f} CPU-s   "
            f"with stats x {statistics.median(ratios):.3f} (median), x {of_all:.3f} (sums)"
        )


if __name__ == "__main__":
    main()
