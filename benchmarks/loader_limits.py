"""How soon the first batch comes from 10,000 row groups, and how much memory epochs take.

    python benchmarks/loader_limits.py                          # both
    python benchmarks/loader_limits.py --only memory --memory 256MB,1GB --workers 0,2,4 --batch-size 64 --epochs 40

Memory is the sum of the proportional set sizes (PSS) of the trainer and its workers, sampled all the time, so that
what they share counts once; "idle" is the same before the first batch, with as many workers that have imported
torch and do nothing.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import pqcache

GROUPS, FILES = 10_000, 100


def small_groups(root: Path) -> None:
    """Write 100 files of 100 row groups of 100 rows."""
    root.mkdir()
    rng = np.random.default_rng(0)
    rows = GROUPS // FILES * 100
    for file in range(FILES):
        ids = np.arange(file * rows, (file + 1) * rows)
        columns: dict[str, Any] = {"id": ids, "title": [f"item {i}" for i in ids]}
        columns |= {f"f{i}": rng.random(rows) for i in range(8)}
        pq.write_table(pa.table(columns), root / f"{file:03d}.parquet", row_group_size=100)


def large_rows(root: Path, rows: int = 40_000, fixed: bool = False) -> None:
    """Write rows of about 8 KB, numbers, strings, lists and bytes, in row groups of 16 MB.

    Where these are ``fixed``, they are 8 KB in every row.
    """
    root.mkdir()
    rng = np.random.default_rng(0)
    for file in range(4):
        ids = np.arange(file * rows // 4, (file + 1) * rows // 4)
        lengths = rng.integers(0, 200, len(ids))
        ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        sizes = np.full(len(ids), 8192) if fixed else rng.integers(4000, 12_000, len(ids))
        table = pa.table(
            {
                "id": ids,
                "title": [f"item {i}" for i in ids],
                "tokens": pa.ListArray.from_arrays(pa.array(ends), pa.array(np.arange(ends[-1], dtype=np.int32))),
                "image": pa.array([rng.bytes(int(n)) for n in sizes], pa.binary(8192 if fixed else -1)),
            }
        )
        path = root / f"{file}.parquet"
        pq.write_table(table, path, row_group_size=2000, use_dictionary=False, write_page_index=True)


def first_batch(path: str, workers: int) -> None:
    """Print the seconds of the constructor and until the first batch."""
    from torch.utils.data import DataLoader

    from pqcache.torch import ParquetDataset

    began = time.perf_counter()
    dataset = ParquetDataset(path, batch_size=256)
    made = time.perf_counter() - began
    next(iter(DataLoader(dataset, batch_size=None, num_workers=workers)))
    print(json.dumps([made, time.perf_counter() - began]), flush=True)
    os._exit(0)


def pss() -> int:
    """Return the PSS of this process and its children, in bytes."""
    import psutil

    me = psutil.Process()
    total = 0
    for process in [me, *me.children(recursive=True)]:
        try:
            total += process.memory_full_info().pss
        except psutil.Error:
            continue
    return total


def epochs_of(path: str, workers: int, memory: str, batch_size: int, epochs: int) -> None:
    """Print the idle PSS and the highest of each epoch of a Loader."""
    from torch.utils.data import DataLoader

    from pqcache.torch import Loader, ParquetDataset

    dataset = ParquetDataset(path, batch_size=batch_size, memory=memory)
    idle = iter(DataLoader(range(10**9), batch_size=1, num_workers=workers))  # type: ignore[arg-type]
    next(idle)
    before = pss()
    del idle
    peaks = []
    highest, stop = [0], threading.Event()

    def sample() -> None:
        while not stop.wait(0.02):
            highest[0] = max(highest[0], pss())

    threading.Thread(target=sample, daemon=True).start()
    loader = Loader(dataset, num_workers=workers)
    rows = 0
    for _ in range(epochs):
        highest[0] = 0
        for batch in loader:
            rows += len(batch["id"])
        peaks.append(highest[0])
    stop.set()
    print(json.dumps({"idle": before, "peaks": peaks, "window": batch.position.window, "rows": rows}), flush=True)
    os._exit(0)


def run(*words: object) -> Any:
    """Run a measurement in a process of its own and return what it printed."""
    done = subprocess.run([sys.executable, __file__, *map(str, words)], capture_output=True, text=True, timeout=600)
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=["start", "memory"])
    parser.add_argument("--workers", default="0,2")
    parser.add_argument("--memory", default="128MB,256MB,1GB")
    parser.add_argument("--batch-size", default="64,256", help="rows of 8 KB")
    parser.add_argument("--epochs", default=10, type=int)
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        what, path, workers, *rest = options.child
        if what == "start":
            first_batch(path, int(workers))
        memory, batch_size, epochs = rest
        epochs_of(path, int(workers), memory, int(batch_size), int(epochs))
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        if options.only != "memory":
            small_groups(root / "small")
            pqcache.sync(str(root / "small"), root / "cache")
            print(f"{GROUPS:,} row groups in {FILES} files: seconds to construct, and to the first batch (best of 3)")
            for name, kind in (("cache", "a cache, with an index"), ("small", "a plain directory: footers are read")):
                for workers in options.workers.split(","):
                    made, first = min(run("--child", "start", root / name, workers) for _ in range(3))
                    print(f"  {kind:<40} workers {workers}  {made:6.2f} {first:6.2f}")
        if options.only != "start":
            for name in ("large", "fixed"):
                large_rows(root / name, fixed=name == "fixed")
            print("40,000 rows of 8 KB: MB of PSS, idle, and highest in each epoch")
            listed = (words.split(",") for words in (options.memory, options.workers, options.batch_size))
            for name, memory, workers, batch_size in itertools.product(("large", "fixed"), *listed):
                found = run("--child", "memory", root / name, workers, memory, batch_size, options.epochs)
                peaks = " ".join(str(peak >> 20) for peak in found["peaks"])
                over = (max(found["peaks"]) - found["idle"] - pqcache.parse_size(memory)) >> 20
                print(
                    f"  {name} memory={memory:<6} workers {workers} batches of {batch_size:>3} window "
                    f"{found['window']:>2}: idle {found['idle'] >> 20}, {peaks}; beyond idle + memory: {over}"
                )


if __name__ == "__main__":
    main()
