"""What dataset.stats() costs: CPU time of epochs that are measured against epochs that are not.

    python benchmarks/stats.py --rounds 100 --batch-size 256 --data /tmp/bench

The datasets are read in one process, without workers, epoch by epoch in turns, so that noise hits both alike. A part
of the data of loader.py is read. Read the median of the ratios; with 2 busy cores it is known to about 1 %.

Two more datasets make each call of the meter 20 times, one of a meter that counts and one of a meter that does nothing.
Their difference, divided by 19, is what counting takes, to about a twentieth of that error. It leaves out the generator
around the iteration, and that code which runs 20 times is in the processor's caches.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from _loader_data import NULLS, SHAPES
from _loader_peers import BATCH

import pqcache.torch.dataset_reader as dataset_reader
from pqcache.reader.stats import Meter
from pqcache.torch import ParquetDataset
from pqcache.torch.iteration_meter import IterationMeter, new_meter

PART = 4  # of the rows of loader.py
TIMES = 20  # that a RepeatedMeter makes a call


def data_of(root: Path, name: str) -> Path:
    """Return a file of a part of a dataset of loader.py, written once."""
    shape = SHAPES[name]
    row_group = (32 << 20) // shape.row_bytes
    path = root / f"stats-{name}" / "a.parquet"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(shape.build(np.random.default_rng(0), 0, shape.rows // PART), path, row_group_size=row_group)
    return path.parent


def open_dataset(
    path: Path, name: str, batch_size: int, make_meter: Callable[[], Meter], is_measured: bool
) -> ParquetDataset:
    dataset_reader.new_meter = make_meter
    stall_timeout = 60 if is_measured else None
    dataset = ParquetDataset(path, batch_size=batch_size, nulls=NULLS[name] or "error", stall_timeout=stall_timeout)
    if not is_measured:
        dataset._measured = lambda epoch: nullcontext(IterationMeter(dataset._meter))  # type: ignore[method-assign]
    return dataset


class NoMeter(Meter):
    """Counts nothing."""

    def add(self, counter: int, amount: int) -> None: ...
    def made(self, batches: int, rows: int, size: int) -> None: ...
    def note_memory(self) -> None: ...

    @contextmanager
    def timed(self, counter: int, times: int = 1) -> Iterator[None]:
        yield

    @contextmanager
    def decoding(self, row_group: int, stored_bytes: int) -> Iterator[None]:
        yield


class RepeatedMeter(Meter):
    """A meter that makes each call TIMES times: all but one on ``other``, a NoMeter or one that counts."""

    def __init__(self, other: Meter) -> None:
        super().__init__(new_meter()._memory)
        self._other = other
        self._clock: Callable[[], int] = int if isinstance(other, NoMeter) else time.monotonic_ns

    def add(self, counter: int, amount: int) -> None:
        for _ in range(TIMES - 1):
            self._other.add(counter, amount)
            self._clock(), self._clock()  # of what is added, the beginning and the end
        super().add(counter, amount)

    def made(self, batches: int, rows: int, size: int) -> None:
        for _ in range(TIMES - 1):
            self._other.made(batches, rows, size)
            self._clock(), self._clock()  # of the wait for the batch
        super().made(batches, rows, size)

    @contextmanager
    def timed(self, counter: int, times: int = 1) -> Iterator[None]:
        for _ in range(TIMES - 1):
            with self._other.timed(counter):
                pass
        yield

    @contextmanager
    def decoding(self, row_group: int, stored_bytes: int) -> Iterator[None]:
        for _ in range(TIMES - 1):
            with self._other.decoding(row_group, stored_bytes):
                pass
        with super().decoding(row_group, stored_bytes):
            yield

    def note_memory(self) -> None:
        for _ in range(TIMES - 1):
            self._other.note_memory()


METERS: dict[str, Callable[[], Meter]] = {
    "off": NoMeter,
    "on": new_meter,
    "off repeated": lambda: RepeatedMeter(NoMeter()),
    "on repeated": lambda: RepeatedMeter(new_meter()),
}


def measure(path: Path, name: str, batch_size: int, rounds: int) -> str:
    """Return what epochs of a dataset take with each of the meters, read in turns."""
    datasets = {kind: open_dataset(path, name, batch_size, make, kind != "off") for kind, make in METERS.items()}
    taken: dict[str, list[float]] = {kind: [] for kind in METERS}
    batches = 0
    for number in range(rounds + 1):
        for kind in sorted(METERS, reverse=number % 2 == 0):
            datasets[kind].set_epoch(number)
            began = time.process_time()
            batches = sum(1 for _ in datasets[kind])
            if number:  # the first one also pays for fresh memory
                taken[kind].append(time.process_time() - began)
    off = statistics.median(taken["off"])
    once = statistics.median(on / off for on, off in zip(taken["on"], taken["off"], strict=True))
    more = statistics.median(on - off for on, off in zip(taken["on repeated"], taken["off repeated"], strict=True))
    one = more / (TIMES - 1)
    return (
        f"{batches:>6} batches {off:>7.3f} CPU-s   with stats x {once:.3f} (median)   "
        f"repeated: {1e6 * one / batches:.2f} us a batch of {1e6 * off / batches:.0f}, {100 * one / off:.2f} %"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("/tmp/pqcache-bench"))
    parser.add_argument("--datasets", default="multimodal,tabular,tokens")
    parser.add_argument("--batch-size", type=int, help="rows; default: those of loader.py")
    parser.add_argument("--rounds", type=int, default=50)
    options = parser.parse_args()
    for name in options.datasets.split(","):
        path, batch_size = data_of(options.data, name), options.batch_size or BATCH[name]
        print(f"{name:<12} {measure(path, name, batch_size, options.rounds)}", flush=True)


if __name__ == "__main__":
    main()
