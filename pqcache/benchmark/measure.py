"""One setting of ``pqcache bench``, measured in a process of its own: the decode limit, or batches without torch."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pqcache.errors import ParquetError, PqcacheError, first_line
from pqcache.reader.epoch import read_record_batches
from pqcache.reader.memory import fit, has_pages, sizes_of
from pqcache.reader.open_dataset import RowGroup, open_local_dataset
from pqcache.reader.options import BatchOptions, RowOptions
from pqcache.reader.order import Order
from pqcache.reader.read_plan import make_read_plan
from pqcache.store.tables.data_files import FileRules
from pqcache.system.process_stats import cpu_count, disk_read_bytes


def run_setting(measure: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Measure the setting in the process's first argument, print what was found as JSON, and end the process."""
    job = json.loads(sys.argv[1])
    try:
        found = measure(job)
    except PqcacheError as error:
        found = {"error": [error.subject, error.reason, error.advice], "kind": type(error).__name__}
    print(json.dumps(found), flush=True)
    os._exit(0)  # workers and threads are in the middle of something


def time_epochs(epochs: Iterator[Iterator[int]], seconds: float) -> dict[str, Any]:
    """Return the rows read in ``seconds``, after half as long to warm up; ``epochs`` yield the rows of each batch."""
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
    options, rules = BatchOptions(**{name: job[name] for name in names}), FileRules(**job["rules"])

    def epochs() -> Iterator[Iterator[int]]:
        for epoch in range(sys.maxsize):
            yield (batch.num_rows for batch in read_record_batches(job["path"], replace(options, epoch=epoch), rules))

    data, lease = open_local_dataset(job["path"], rules=rules)
    with lease or nullcontext():
        plan = make_read_plan(data, options.columns, options)
        window = fit(sizes_of(plan), job["memory"], lanes=1, shuffle=True, pieces=has_pages(plan))
        return {**time_epochs(epochs(), job["seconds"]), "window": window.row_groups}


def _limit(job: dict[str, Any]) -> dict[str, Any]:
    """Measure decoding alone: columns in parallel, row groups in parallel, and the share of lists of one length."""
    data, lease = open_local_dataset(job["path"], rules=FileRules(**job["rules"]))
    with lease or nullcontext():
        plan = make_read_plan(data, job["columns"], RowOptions(filters=job["filters"])).with_dense_lists()
        groups = [RowGroup(data, int(number)) for number in plan.row_groups]
        names = list(plan.kinds)
        # as epochs read them, so that the same pages are warm
        numbers = Order(counts=plan.counts, batch_size=1).row_group_order
        footers: dict[int, pq.FileMetaData] = {}

        def read(number: int, wanted: Sequence[str], threads: bool) -> int:
            file_number, row_group, path = groups[number].file, groups[number].row_group, groups[number].path
            try:
                with pq.ParquetFile(path, metadata=footers.get(file_number), memory_map=True) as file:
                    footers[file_number] = file.metadata
                    file.read_row_group(row_group, columns=wanted, use_threads=threads)
            except (pa.ArrowException, OSError) as error:
                reason = f"row group {row_group} cannot be read ({first_line(error)})"
                raise ParquetError(path, reason, "sync or write it again") from error
            return int(plan.counts[number])

        def by_columns() -> Iterator[Iterator[int]]:
            while True:
                yield (read(int(number), names, threads=True) for number in numbers)

        def by_groups() -> Iterator[Iterator[int]]:
            while True:
                yield pool.map(lambda number: read(int(number), names, threads=False), numbers)

        seconds = job["seconds"] / 2
        lists = [name for name, _ in plan.dense if name not in plan.stored]
        dense = _shares(lambda wanted: read(int(numbers[0]), wanted, False), names, lists)
        pool = ThreadPoolExecutor(cpu_count())  # not waited for, as it has more to do than it is given time for
        found = [time_epochs(by_columns(), seconds), time_epochs(by_groups(), seconds)]
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

    total = best(names) if lists else 1.0
    return {name: min(1.0, best([name]) / total) for name in lists}


if __name__ == "__main__":
    run_setting(_measure)
