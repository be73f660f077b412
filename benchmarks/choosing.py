"""What splits and weights cost: CPU time of a row against that of a plain epoch of the same columns.

    python benchmarks/choosing.py --data /tmp/choosing --rounds 9

Numbers and tokens have Zipf distributions, weights are uniform from 0 to 2, and pyarrow writes the files with its
defaults. All datasets are read in one process, without workers, epoch by epoch in turns. A split of 0.9 decodes all
rows, so its time is divided by the decoded ones. Read the ratios: the medians of those to the plain epoch of a round.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import pqcache
from pqcache.torch import ParquetDataset

FILES, PART = 4, 0.9  # of the rows that a split takes
NUMBERS = [f"{kind}{i}" for kind in ("float", "zipf") for i in range(10)]
SHAPES: dict[str, tuple[int, int, int, list[str]]] = {  # rows of a file and of a row group, batch size, columns
    "tabular": (250_000, 50_000, 4096, ["id", "weight", "label", *NUMBERS]),
    "tokens": (25_000, 5_000, 256, ["id", "weight", "label", "tokens"]),
}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "split by an integer": {"split": pqcache.Split("id", 0.0, PART)},
    "split without a key": {"split": pqcache.Split(None, 0.0, PART)},
    "weights, a column": {"weights": "weight"},
    "balance, a label": {"balance": "label"},
    "weights by label": {"weights": {"label": {1: 0.5, 2: 1.5, ...: 1.9}}},
}


def zipf(rng: np.random.Generator, a: float, count: int, most: int) -> np.ndarray[Any, Any]:
    return (np.minimum(rng.zipf(a, count), most) - 1).astype(np.int32)


def make(root: Path, name: str) -> Path:
    """Write a dataset once."""
    rows, row_group, _, columns = SHAPES[name]
    for file in range(FILES):
        path = root / name / f"{file}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            continue
        rng = np.random.default_rng(file)
        found: dict[str, Any] = {
            "id": np.arange(file * rows, (file + 1) * rows),
            "weight": rng.random(rows) * 2,
            "label": zipf(rng, 1.7, rows, 12) + 1,
        }
        if name == "tokens":
            ends = pa.array(np.arange(rows + 1) * 512, pa.int32())
            found["tokens"] = pa.ListArray.from_arrays(ends, pa.array(zipf(rng, 1.2, rows * 512, 50_000)))
        for column in columns[3:] if name == "tabular" else []:
            floats = column.startswith("float")
            found[column] = rng.standard_normal(rows).astype(np.float32) if floats else zipf(rng, 1.3, rows, 60_000)
        pq.write_table(pa.table(found), path, row_group_size=row_group)
    return root / name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("/tmp/pqcache-bench-choosing"))
    parser.add_argument("--datasets", default=",".join(SHAPES))
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    for name in options.datasets.split(","):
        path, (_, _, batch_size, columns) = make(options.data, name), SHAPES[name]
        datasets = {c: ParquetDataset(path, columns, batch_size=batch_size, **how) for c, how in CASES.items()}
        taken: dict[str, list[float]] = defaultdict(list)
        for epoch in range(options.rounds + 1):
            for case, dataset in datasets.items():
                dataset.set_epoch(epoch)
                began = time.process_time()
                rows = sum(len(batch["id"]) for batch in dataset)
                taken[case].append((time.process_time() - began) / (rows / PART if "split" in case else rows))
        plain = taken["plain"]
        for case, found in taken.items():  # the first epoch also counts rows, and pays for fresh memory
            ratio = statistics.median(one / other for one, other in zip(found[1:], plain[1:], strict=True))
            nanoseconds = statistics.median(found[1:]) * 1e9
            print(f"{name:8} {case:22} {nanoseconds:8,.0f} ns a row  {ratio:5.2f} x plain", flush=True)


if __name__ == "__main__":
    main()
