"""One setting of ``pqcache bench``, measured in a process of its own: the decode limit, or batches without torch."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pqcache.errors import ParquetError, PqcacheError, first_line
from pqcache.reader.epoch import read_batches
from pqcache.reader.memory_budget import fit
from pqcache.reader.open import open_data
from pqcache.reader.order.order import Order
from pqcache.reader.read_plan import view_of
from pqcache.reader.row_group_reader import cpu_count
from pqcache.system.process_stats import disk_read_bytes


def child(measure: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Be the process of one setting: measure, print what was found as JSON, and end at once."""
    job = json.loads(sys.argv[1])
    try:
        found = measure(job)
    except PqcacheError as error:
        found = {"error": error.args, "kind": type(error).__name__}
    print(json.dumps(found), flush=True)
    os._exit(0)  # workers and threads are in the middle of something


def timed(epochs: Iterator[Iterator[int]], seconds: float) -> dict[str, Any]:
    """Read rows for ``seconds``, after half as long to warm up; ``epochs`` yield the rows of batch after batch."""
    began = time.perf_counter()
    first, start, now, rows = 0.0, 0.0, began, 0
    disk: int | None = None
    for count in (count for epoch in epochs for count in epoch):
        now = time.perf_counter()
        first = first or now - began
        if start:
            rows += count
            if now - start >= seconds:
                break
        elif now - began - first >= seconds / 2:
            start, disk = now, disk_read_bytes(os.getpid())
    after = disk_read_bytes(os.getpid())
    return {
        "rows": rows,
        "seconds": now - start,
        "first": first,
        "disk": None if disk is None or after is None else after - disk,
    }


def _measure(job: dict[str, Any]) -> dict[str, Any]:
    return _limit(job) if job["what"] == "limit" else _arrow(job)


def _arrow(job: dict[str, Any]) -> dict[str, Any]:
    """Measure batches as ``Cache.batches`` yields them."""
    names = ("columns", "filters", "batch_size", "memory")
    how = {name: job[name] for name in names}

    def epochs() -> Iterator[Iterator[int]]:
        for epoch in range(sys.maxsize):
            yield (batch.num_rows for batch in read_batches(job["path"], epoch=epoch, **how))

    data, lease = open_data(job["path"])
    with lease or nullcontext():
        window = fit(view_of(data, job["columns"], job["filters"]), job["memory"], 1)[0]
        return {**timed(epochs(), job["seconds"]), "window": window}


def _limit(job: dict[str, Any]) -> dict[str, Any]:
    """Measure decoding alone: columns in parallel, row groups in parallel, and the share of lists of one length."""
    data, lease = open_data(job["path"])
    with lease or nullcontext():
        view = view_of(data, job["columns"], job["filters"]).densified()
        groups = view.row_groups
        names = [form.name for form in view.read_forms]
        line = Order(counts=view.counts, batch_size=1).line  # as the epochs read them, so that the same pages are warm
        footers: dict[int, pq.FileMetaData] = {}

        def read(at: int, wanted: Sequence[str], threads: bool) -> int:
            number = int(groups.file[at])
            path = groups.root / groups.paths[number]
            try:
                with pq.ParquetFile(path, metadata=footers.get(number), memory_map=True) as file:
                    footers[number] = file.metadata
                    file.read_row_group(int(groups.row_group[at]), columns=wanted, use_threads=threads)
            except (pa.ArrowException, OSError) as error:
                group, why = groups.row_group[at], first_line(error)
                raise ParquetError(
                    path, f"row group {group} cannot be read ({why})", "sync or write it again"
                ) from error
            return int(view.counts[at])

        def by_columns() -> Iterator[Iterator[int]]:
            while True:
                yield (read(int(at), names, threads=True) for at in line)

        def by_groups() -> Iterator[Iterator[int]]:
            while True:
                yield pool.map(lambda at: read(int(at), names, threads=False), line)

        seconds = job["seconds"] / 2
        lists = [name for name, _ in view.dense if name not in view.stored]
        dense = _shares(lambda wanted: read(int(line[0]), wanted, False), names, lists)
        pool = ThreadPoolExecutor(cpu_count())  # not waited for, as it has more to do than it is given time for
        found = [timed(by_columns(), seconds), timed(by_groups(), seconds)]
        return {**max(found, key=lambda item: item["rows"] / item["seconds"]), "dense": dense}


def _shares(read: Callable[[Sequence[str]], object], names: Sequence[str], lists: Sequence[str]) -> dict[str, float]:
    """Return the share of the time to decode all columns that each of ``lists`` takes, the best of three."""

    def best(wanted: Sequence[str]) -> float:
        times = []
        for _ in range(3):
            began = time.perf_counter()
            read(wanted)
            times.append(time.perf_counter() - began)
        return min(times)

    whole = best(names) if lists else 1.0
    return {name: min(1.0, best([name]) / whole) for name in lists}


if __name__ == "__main__":
    child(_measure)
