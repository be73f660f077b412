"""How much of an epoch's CPU time is spent under the interpreter's lock, at most, and what that allows on many cores.

    python benchmarks/lock_share.py --data /tmp/bench
    python benchmarks/lock_share.py --datasets tabular --batch-size 256

Work that one thread does at a time limits what many cores can do. It consists of calls for each row group, block and
batch, not of rows. So an epoch is read, and one with as many row groups and batches whose rows are too few to take any
time: what that takes is the most that the lock can be held. It is more than that, because calls that release the lock
begin and end without it, and so do threads. CPU time is compared, in turns, so that other processes matter little; the
least of all rounds counts. "trainer" is what of it the thread takes that uses the batches.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from _loader_data import NULLS, SHAPES
from _loader_peers import BATCH

from pqcache.reader import memory_budget
from pqcache.torch import ParquetDataset

CORES = 16
SIZES = (
    (memory_budget, "_RUN"),
    (memory_budget, "_LEAST_RUN"),
)  # that decide about calls, in bytes: with fewer rows they are less
LEAST = {module.__name__ + name: getattr(module, name) for module, name in SIZES}


def data_of(root: Path, name: str, groups: int, rows: int) -> Path:
    """Return a dataset with so many row groups of so many rows, written once."""
    path = root / f"lock-{name}-{groups}-{rows}" / "a.parquet"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        rng, build = np.random.default_rng(0), SHAPES[name].build
        first = build(rng, 0, rows)
        with pq.ParquetWriter(path, first.schema) as file:
            file.write_table(first, row_group_size=rows)
            for group in range(1, groups):
                file.write_table(build(rng, group * rows, rows), row_group_size=rows)
    return path.parent


class Epochs:
    """Epochs of a dataset, of which each row stands for ``scale`` rows."""

    def __init__(self, path: Path, name: str, batch_size: int, scale: int) -> None:
        self._dataset = ParquetDataset(path, batch_size=batch_size, nulls=NULLS[name] or "error", memory="8GB")
        self._scale = scale
        self.epoch = self.batches = 0
        self.cpu = self.trainer = float("inf")  # seconds, the least so far

    def read(self) -> None:
        """Read the next epoch."""
        for module, name in SIZES:
            setattr(module, name, max(1, LEAST[module.__name__ + name] // self._scale))
        self._dataset.set_epoch(self.epoch)
        cpu, trainer = time.process_time(), time.thread_time()
        self.batches = sum(1 for _ in self._dataset)
        if self.epoch:  # the first one takes fresh memory
            self.cpu = min(self.cpu, time.process_time() - cpu)
            self.trainer = min(self.trainer, time.thread_time() - trainer)
        self.epoch += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("/tmp/pqcache-bench"))
    parser.add_argument("--datasets", default="multimodal,tabular,tokens")
    parser.add_argument("--batch-size", type=int, help="default: that of loader.py")
    parser.add_argument("--row-groups", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    print(f"{'dataset':<12}{'batch':>6}{'CPU s':>8}{'calls s':>9}{'us/batch':>10}{'trainer us':>12}", end="")
    print(f"{'share':>8}{f'on {CORES}':>8}")
    for name in options.datasets.split(","):
        batch = options.batch_size or BATCH[name]
        rows, scale = (32 << 20) // SHAPES[name].row_bytes, batch // 2
        epochs = []
        for divisor in (1, scale):
            path = data_of(options.data, name, options.row_groups, rows // divisor)
            epochs.append(Epochs(path, name, batch // divisor, divisor))
        for _ in range(options.rounds + 1):
            for each in epochs:
                each.read()
        full, empty = epochs
        calls = empty.cpu * full.batches / empty.batches
        share = calls / full.cpu
        print(
            f"{name:<12}{batch:>6}{full.cpu:>8.2f}{calls:>9.3f}{1e6 * calls / full.batches:>10.0f}"
            f"{1e6 * empty.trainer / empty.batches:>12.0f}{share:>8.1%}"
            f"{1 / (share + (1 - share) / CORES):>7.1f}x"
        )


if __name__ == "__main__":
    main()
