"""How fast decoding alone is, with all cores: what a loader that makes batches cannot pass.

Each is a function of (directory, dataset, workers) that yields epochs of row counts.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

CORES = len(os.sched_getaffinity(0))
WAITING = 8  # row groups whose rows wait for their batches
LONG = 512  # bytes of a row from which on picking it from anywhere costs no more than copying it
Epochs = Iterator[Iterator[int]]


def by_columns(path: Path, name: str, workers: int) -> Epochs:
    """Decode row group by row group, columns in parallel, and drop them."""
    files = [pq.ParquetFile(p) for p in sorted(path.glob("*.parquet"))]
    while True:
        yield (f.read_row_group(g, use_threads=True).num_rows for f in files for g in range(f.num_row_groups))


def by_row_groups(path: Path, name: str, workers: int) -> Epochs:
    """Decode as many row groups at once as there are cores, and drop them."""
    return decoded_by_groups(path, lambda table: None)


def by_processes(path: Path, name: str, workers: int) -> Epochs:
    """Decode row groups and drop them, one in each of as many processes as there are cores."""
    groups = [(p, g) for p in sorted(path.glob("*.parquet")) for g in range(pq.read_metadata(p).num_row_groups)]
    with multiprocessing.Pool(CORES) as pool:
        while True:
            yield pool.imap_unordered(_rows_of_group, groups)


def _rows_of_group(group: tuple[Path, int]) -> int:
    return int(_opened(group[0]).read_row_group(group[1], use_threads=False).num_rows)


_opened = cache(pq.ParquetFile)


def by_polars(path: Path, name: str, workers: int) -> Epochs:
    """Decode file by file, in parallel as polars likes, and drop them."""
    import polars

    while True:
        yield (polars.read_parquet(file).height for file in sorted(path.glob("*.parquet")))


def limit_copied(path: Path, name: str, workers: int) -> Epochs:
    """Decode row groups with pyarrow, as many at once as there are cores, and copy their values; see `Copies`."""
    return decoded_by_groups(path, Copies().copy)


def limit_polars_copied(path: Path, name: str, workers: int) -> Epochs:
    """Decode files with polars, and copy their values; see `Copies`."""
    import polars

    copies = Copies()

    def read(file: Path) -> int:
        table = polars.read_parquet(file).to_arrow(compat_level=polars.CompatLevel.newest())
        for rows in table.to_batches():
            copies.copy(pa.Table.from_batches([rows]))
        return int(table.num_rows)

    with ThreadPoolExecutor(CORES) as pool:
        while True:
            yield iter(pool.map(read, sorted(path.glob("*.parquet"))))


class Copies:
    """Copies values no more often than a shuffle has to, numbers in an order that is ready.

    A batch has rows of several row groups, so they are copied into it; short ones before that into what waits for its
    batch, as picking them from memory that no cache holds takes longer than a second copy. No order is made, no row
    is looked for, and there are no batches. Each thread has memory of its own.
    """

    def __init__(self) -> None:
        self._ready = threading.local()

    def copy(self, table: pa.Table) -> None:
        ready = self._ready
        if not hasattr(ready, "waiting"):
            size = table.nbytes * 5 // 4 // 64 * 64  # row groups differ a little
            ready.waiting, ready.batches = np.zeros(WAITING * size, np.uint8), np.zeros(size, np.uint8)
            ready.turn, ready.order = 0, np.random.default_rng(0).permutation(len(table))
        ready.turn = (ready.turn + 1) % (WAITING - 1)
        at = ready.turn * len(ready.batches)
        to = 0
        for column in table.columns:
            for chunk in column.chunks:
                for buffer in filter(None, chunk.buffers()):
                    data = np.frombuffer(buffer, np.uint8)
                    width = len(data) // len(chunk)
                    if width in (1, 2, 4, 8) and len(chunk) == len(ready.order):
                        words = data[: width * len(chunk)].view(f"u{width}")
                        for place in (ready.waiting[at : at + words.nbytes], ready.batches[: words.nbytes]):
                            words = words.take(ready.order, out=place.view(words.dtype), mode="clip")
                        at += -(-words.nbytes // 64) * 64
                        continue
                    if len(data) < LONG * len(chunk):
                        place = ready.waiting[at : at + len(data)]
                        np.copyto(place, data)
                        at, data = at + len(data), place
                    to = to if to + len(data) <= len(ready.batches) else 0
                    np.copyto(ready.batches[to : to + len(data)], data)
                    to += len(data)


def decoded_by_groups(path: Path, use: Callable[[pa.Table], None]) -> Epochs:
    files = sorted(path.glob("*.parquet"))
    groups = [(file, g) for file in files for g in range(pq.ParquetFile(file).num_row_groups)]
    opened: dict[Any, pq.ParquetFile] = {}

    def read(group: tuple[Path, int]) -> int:
        key = threading.get_ident(), group[0]
        if key not in opened:
            opened[key] = pq.ParquetFile(group[0])
        table = opened[key].read_row_group(group[1], use_threads=False)
        use(table)
        return int(table.num_rows)

    with ThreadPoolExecutor(CORES) as pool:
        while True:
            yield iter(pool.map(read, groups))


DECODERS: dict[str, Callable[[Path, str, int], Epochs]] = {
    "pyarrow by columns": by_columns,
    "pyarrow by row groups": by_row_groups,
    "polars": by_polars,
}


def fastest(path: Path, name: str, workers: int) -> Epochs:
    """Yield epochs of each decoder that is here in turn; ``decoders()`` names them."""
    for epochs in cycle([DECODERS[decoder](path, name, workers) for decoder in decoders()]):
        yield next(epochs)


def decoders() -> list[str]:
    return [name for name in DECODERS if name != "polars" or importlib.util.find_spec("polars")]
