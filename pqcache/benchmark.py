"""How a training reads a dataset: measured by ``pqcache bench``, and forecast from footers by ``pqcache inspect``.

`bench` measures how fast this machine reads a dataset with each number of workers. Every setting is measured in a
process of its own (``python -m pqcache.benchmark``), so memory left behind by another setting does not count. The
processes only read, and the snapshot is leased meanwhile. `forecast` says how many row groups a training mixes in its
memory, why, and which size would do better. Both commands print it with `describe_training`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pqcache import errors
from pqcache.errors import CacheError, ParquetError, PqcacheError, UsageError, first_line
from pqcache.events import Advanced, OnEvent, Started, ignore
from pqcache.options import COMMANDS, BenchArguments, Unpack, all_values, documented
from pqcache.reader.decode import RowGroups
from pqcache.reader.epoch import read_record_batches
from pqcache.reader.epoch_options import WINDOW, WINDOW_OF_ALL, BatchOptions, RowOptions
from pqcache.reader.memory_budget import RowGroupSizes, Window, fit, has_pages, sizes_of
from pqcache.reader.open_dataset import RowGroup, open_local_dataset
from pqcache.reader.order import Order
from pqcache.reader.read_plan import ReadPlan, make_read_plan
from pqcache.store.cache_directory import cache_at
from pqcache.store.partition_paths import parent
from pqcache.store.tables.data_files import FileRules
from pqcache.store.urls import is_local, local_path
from pqcache.system.processes import cpu_count, disk_read_bytes, pss
from pqcache.units import BLOCK_SIZE, format_count, format_size, parse_size, size_word

_STARTING = 120.0  # seconds that a process may take beside what it measures
_NEAR = 0.95  # of the fastest: as good as that, and with fewer workers
_SAMPLED = 0.1  # seconds between two looks at the memory
_DOMINATES = 0.3  # of the time to decode
_SMALL_BATCH = 256 << 10  # bytes of a batch when decoded, below which the cost of each shows
_COLD = 0.1  # of what was read
_SLOW = 0.5  # of the decode limit
MEMORY = 2 << 30
LANES = 2
_SMALLEST = 64 << 10  # bytes on disk of a row group that is proposed
_SMALLEST_WINDOW = 1 << 20  # the same, where memory is what limits the window
_LARGEST = 16 << 20  # the same, where row groups are small
_COSTLY = 1 << 20  # bytes of a decoded row group, below which the fixed cost of each shows
_TINY = 16 << 20  # bytes of a decoded dataset for which nothing is gained


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Measurements of one setting.

    ``workers``            of the DataLoader; None for batches read without torch
    ``rows_per_second``, ``bytes_per_second``   rows, and bytes of them when decoded
    ``of_limit``           the share of the decode limit, from 0 to 1
    ``first_batch``        seconds from the start of the iteration to the first batch
    ``memory``             the highest PSS of all its processes in bytes; None if the system has no PSS
    ``from_disk``          the share of the bytes read that came from the disk and not from the page cache, from 0 to 1;
                           None if the system does not count them
    ``window``             row groups that a lane mixes
    ``limited_by``         the slowest stage, as in ``ReadingStats``; None if unknown
    ``seconds_of``         busy seconds of its threads and workers, by stage
    """

    workers: int | None
    rows_per_second: float
    bytes_per_second: float
    of_limit: float
    first_batch: float
    memory: int | None
    from_disk: float | None
    window: int
    limited_by: str | None = None
    seconds_of: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Advice:
    """A way to read faster, and the command for it if there is one."""

    text: str
    command: str | None = None


@dataclass(frozen=True, kw_only=True)
class BenchReport:
    """Measurements of a dataset, and the advice that follows from them.

    The dataset has ``rows`` rows in ``row_groups`` row groups; the ``columns`` read take ``bytes`` on disk and
    ``decoded`` bytes in memory. ``limit`` is the decode limit in rows per second on ``cores`` cores: the better of
    columns and row groups decoded in parallel, without making batches; ``limit_from_disk`` is as in ``Measured``.
    ``recommended`` is the number of workers to use, None without torch.
    """

    target: str
    snapshot: str
    columns: tuple[str, ...]
    batch_size: int
    memory: int
    cores: int
    seconds: float
    rows: int
    row_groups: int
    bytes: int
    decoded: int
    limit: float
    limit_from_disk: float | None
    measured: tuple[Measured, ...]
    recommended: int | None
    advice: tuple[Advice, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values."""
        return asdict(self)


@documented(BenchArguments, *COMMANDS["bench"])
def bench(
    target: str | os.PathLike[str], *, on_event: OnEvent = ignore, **given: Unpack[BenchArguments]
) -> BenchReport:
    """Measure how fast this machine reads a cache or a directory of Parquet, and recommend settings.

    Each setting reads shuffled epochs for ``seconds`` after half as long to warm up. Nothing is written.

    Args:
        target: a cache, a directory or a file.
        on_event: called as settings are done.
        given: the options, as the table in pqcache.options has them.

    Raises UsageError, CacheError or ParquetError. Without torch, only batches without torch are measured.
    """
    options = all_values(given, *COMMANDS["bench"])
    columns, filters, workers = options.columns, options.filters, options.workers
    if workers is not None and (not workers or min(workers) < 0):
        raise UsageError("--workers", "give numbers from 0, like 0,2,4")
    numbers: list[int | None] = [None]
    if _has_torch():
        numbers = list(dict.fromkeys(workers or _worker_numbers(cpu_count())))
    rules = {"as_files": options.as_files, "all_files": options.all_files}
    data, lease = open_local_dataset(target, rules=FileRules(**rules))
    with lease or nullcontext():
        if data.arrivals is not None:
            raise CacheError(target, f"its files are still arriving: {data.arrivals.progress()}", "measure it then")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*no row is left")  # said as an error below
            groups = RowGroups(make_read_plan(data, columns, RowOptions(filters=filters)).with_dense_lists())
        if not groups.plan.counts.sum():
            raise UsageError(target, "there is no row to read" + (" that satisfies the filters" if filters else ""))
        job = {
            "path": str(data.directory if data.cache is not None else os.fspath(target)),
            "columns": list(groups.plan.columns),
            "filters": filters,
            "batch_size": options.batch_size,
            "memory": parse_size(options.memory),
            "seconds": options.seconds,
            "rules": rules,
        }
        return _measured_report(os.fspath(target), groups, job, numbers, on_event)


def _measured_report(
    target: str, groups: RowGroups, job: dict[str, Any], numbers: Sequence[int | None], on_event: OnEvent
) -> BenchReport:
    plan = groups.plan
    on_event(Started("measure", len(numbers) + 1, "settings"))
    limit, _ = _run("pqcache.benchmark", {**job, "what": "limit"})
    on_event(Advanced("measure", 1))
    top = limit["rows"] / limit["seconds"]
    measured = []
    for number in numbers:
        measured.append(_measure(groups, job, number, top))
        on_event(Advanced("measure", 1))
    report = BenchReport(
        target=target,
        snapshot=plan.data.snapshot,
        columns=plan.columns,
        batch_size=job["batch_size"],
        memory=job["memory"],
        cores=cpu_count(),
        seconds=job["seconds"],
        rows=int(plan.counts.sum()),
        row_groups=len(plan.row_groups),
        bytes=_disk_size(plan),
        decoded=int(groups.sizes.selected.sum()),
        limit=top,
        limit_from_disk=_from_disk(limit, plan),
        measured=tuple(measured),
        recommended=recommended(measured),
        advice=(),
    )
    return replace(report, advice=tuple(advise(report, groups, limit["dense"])))


def _measure(groups: RowGroups, job: dict[str, Any], workers: int | None, limit: float) -> Measured:
    module = "pqcache.benchmark" if workers is None else "pqcache.torch.bench"
    found, peak = _run(module, {**job, "what": "batches", "workers": workers})
    rate = found["rows"] / found["seconds"]
    per_row = float(groups.sizes.selected.sum()) / int(groups.plan.counts.sum())
    return Measured(
        workers=workers,
        rows_per_second=rate,
        bytes_per_second=rate * per_row,
        of_limit=rate / limit,
        first_batch=found["first"],
        memory=peak,
        from_disk=_from_disk(found, groups.plan),
        window=found["window"],
        limited_by=found.get("limited_by"),
        seconds_of=found.get("seconds_of", {}),
    )


def recommended(measured: Sequence[Measured]) -> int | None:
    """The fewest workers that are about as fast as the fastest."""
    best = max(item.rows_per_second for item in measured)
    return min(
        (item.workers for item in measured if item.workers is not None and item.rows_per_second >= _NEAR * best),
        default=None,
    )


def advise(report: BenchReport, groups: RowGroups, dense: dict[str, float]) -> Iterator[Advice]:
    """Yield ways to read faster or mix better; ``dense`` maps columns to their share of the decode time."""
    where = [report.target, *([] if cache_at(report.target) is not None else ["DEST"])]
    chosen = next((item for item in report.measured if item.workers == report.recommended), report.measured[0])
    lanes = max(1, chosen.workers or 1)
    heavy = [name for name, share in dense.items() if share >= _DOMINATES]
    if heavy:
        words = [word for name in heavy for word in ("--dense", name)]
        share = sum(dense[name] for name in heavy)
        yield Advice(
            f"lists of one length take {share:.0%} of the time to decode; dense, they are read several times faster",
            shlex.join(["pqcache", "repartition", *where, *words]),
        )
    training = forecast_of(groups.plan, groups.sizes, report.memory, lanes)
    size = training.row_group_size
    words = [] if size is None else ["pqcache", "repartition", *where, "--row-group-size", size_word(size)]
    given, *verdict = describe_training(training, report.row_groups)
    yield Advice(f"{given}: {'; '.join(verdict)}", shlex.join(words) if words else None)
    batch = report.batch_size * report.decoded // report.rows
    if batch < _SMALL_BATCH and chosen.of_limit < _SLOW:
        yield Advice(
            f"a batch of {format_count(report.batch_size, 'row')} has {format_size(batch)}, so that making it costs "
            "more than decoding it; larger batches are read faster"
        )
    if chosen.workers is None:
        yield Advice("torch is not installed, so only Cache.batches was measured: pip install 'pqcache[torch]'")
    if chosen.workers == 0:
        yield Advice("workers pay only for a slow transform; the dataset decodes on all cores without them")
    disk = [share for share in (report.limit_from_disk, *(m.from_disk for m in report.measured)) if share is not None]
    if disk and max(disk) > _COLD:
        yield Advice("part of it came from the disk: run it again to see what a warm page cache gives")


def _worker_numbers(cores: int) -> list[int]:
    found, number = [0], 1
    while number < cores:
        found.append(number)
        number *= 2
    return [*found, cores]


def _has_torch() -> bool:
    try:
        return importlib.util.find_spec("torch") is not None
    except ImportError:
        return False


def _from_disk(found: dict[str, Any], plan: ReadPlan) -> float | None:
    """The share of the bytes read that came from the disk; at most 1, despite readahead."""
    read = found["rows"] * _disk_size(plan) / int(plan.counts.sum())
    return None if found["disk"] is None or not read else min(1.0, found["disk"] / read)


def _disk_size(plan: ReadPlan) -> int:
    return int(plan.data.index.stored(plan.columns)[plan.row_groups].sum())


def _run(module: str, job: dict[str, Any]) -> tuple[dict[str, Any], int | None]:
    """Run a setting; return its findings and the peak memory of all its processes together."""
    words = [sys.executable, "-m", module, json.dumps(job)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        peak, deadline = 0, time.monotonic() + _STARTING + 10 * job["seconds"]
        try:
            while True:
                try:
                    out, err = process.communicate(timeout=_SAMPLED)
                    break
                except subprocess.TimeoutExpired:
                    peak = max(peak, pss(process.pid) or 0)
                if time.monotonic() > deadline:
                    raise PqcacheError(f"{job['path']}", f"nothing was read in {_STARTING:g} s", "check its disk")
        finally:
            process.kill()
    lines = out.splitlines()
    if not lines:
        last = (err.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
        raise PqcacheError(f"{job['path']}", f"the measuring process failed ({last})")
    found = json.loads(lines[-1])
    if "error" in found:
        raise getattr(errors, found["kind"], PqcacheError)(*found["error"])
    return found, peak or None


def run_setting(measure: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Measure the setting in the process's first argument, print the findings as JSON, and end the process."""
    job = json.loads(sys.argv[1])
    try:
        found = measure(job)
    except PqcacheError as error:
        found = {"error": [error.subject, error.reason, error.advice], "kind": type(error).__name__}
    print(json.dumps(found), flush=True)
    os._exit(0)  # workers and threads are in the middle of something


def time_epochs(epochs: Iterator[Iterator[int]], seconds: float) -> dict[str, Any]:
    """Count the rows read in ``seconds``, after half as long to warm up; ``epochs`` yield the rows of each batch."""
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


def _measured_here(job: dict[str, Any]) -> dict[str, Any]:
    return _decode_limit(job) if job["what"] == "limit" else _arrow(job)


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


def _decode_limit(job: dict[str, Any]) -> dict[str, Any]:
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
    """The share of the time to decode all columns that each of ``lists`` takes, the best of three."""

    def best(wanted: Sequence[str]) -> float:
        times = []
        for _ in range(3):
            began = time.perf_counter()
            read(wanted)
            times.append(time.perf_counter() - began)
        return min(times)

    total = best(names) if lists else 1.0
    return {name: min(1.0, best([name]) / total) for name in lists}


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What ``ParquetDataset(memory=memory)`` with ``lanes`` lanes does with all columns of a dataset.

    ``decoded`` is the largest row group in memory, in bytes. A lane mixes ``window`` row groups, or ``pieces`` pieces
    if row groups are split; that is the fraction ``mixed`` of all rows, from 0 to 1. A window of 0 means that memory is
    too small for one row group. If memory can't hold one row group per lane, ``needed`` is the number of bytes that
    would, else None. ``row_group_size``, in bytes on disk, would mix better or be read faster; None if it gains little.
    """

    memory: int
    lanes: int
    decoded: int
    window: int
    mixed: float
    row_group_size: int | None
    pieces: int = 1
    needed: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the forecast as plain values."""
        return asdict(self)


def forecast(
    target: str | os.PathLike[str],
    memory: int = MEMORY,
    lanes: int = LANES,
    rules: FileRules | None = None,
    snapshot: str | None = None,
) -> Forecast | None:
    """The forecast for a training; None for a remote, arriving, empty or unreadable dataset."""
    text = os.fspath(target)
    if not is_local(text):
        return None
    try:
        data, lease = open_local_dataset(local_path(text), snapshot, rules=rules)
        with lease or nullcontext():
            plan = make_read_plan(data, None)
            sizes = sizes_of(plan)
    except PqcacheError:
        return None
    if not len(sizes) or not sizes.selected.max():
        return None
    return forecast_of(plan, sizes, memory, lanes)


def forecast_of(plan: ReadPlan, sizes: RowGroupSizes, memory: int, lanes: int) -> Forecast:
    """The forecast for a training on ``plan``; its row groups have ``sizes`` in memory."""
    fitted, largest = _window(plan, sizes, memory, lanes), int(np.argmax(sizes.decoded))
    window, rows = fitted.row_groups, int(plan.counts.sum())
    pieces = -(-int(sizes.decoded_rows[largest]) // fitted.piece_rows) if fitted.piece_rows else 1
    held = lanes * min(window, len(sizes) * pieces) * float(plan.counts.mean()) / pieces
    mixed = min(1.0, held / rows) if rows else 0.0
    one_each = int(sizes.of_lane(1)) * lanes
    return Forecast(
        memory=memory,
        lanes=lanes,
        decoded=int(sizes.selected.max()),
        window=window,
        mixed=mixed,
        row_group_size=None
        if pieces > 1 and window == WINDOW
        else _better_size(plan, sizes, memory, lanes, window, mixed),
        pieces=pieces,
        needed=one_each if window == pieces == 1 and one_each > memory else None,
    )


def _window(plan: ReadPlan, sizes: RowGroupSizes, memory: int, lanes: int) -> Window:
    """The window of a training; 0 row groups if memory is too small for one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return fit(sizes, memory, lanes, True, plan.data.root, has_pages(plan), lanes)
        except UsageError:
            return Window(0)


def describe_training(training: Forecast, row_groups: int) -> tuple[str, ...]:
    """Describe a forecast for ``row_groups`` row groups, a line each: settings, window, reason, better size."""
    workers = "0 or 1" if training.lanes == 1 else f"{training.lanes}"
    given = f"memory={format_size(training.memory).replace(' ', '')}, num_workers={workers}"
    decoded = f"a row group takes up to {format_size(training.decoded)} decoded"
    each = "each batch is of" if training.lanes == 1 else "each worker mixes"
    if training.window:
        found = f"window={training.window}: {each} {_mixed(training)}"
        why = f"{decoded}; {_limit(training)}"
    else:
        found, why = "refused: memory is too small for a row group", f"{decoded}, too much for that memory"
    lines = [given, found, why]
    if training.needed is not None:
        lines.append(f"over memory: one at a time may take {format_size(training.needed)}")
    if training.row_group_size is not None:
        lines.append(f"better: {_gain(training, row_groups)}")
    return tuple(lines)


def _mixed(training: Forecast) -> str:
    if training.mixed == 1:
        return "all row groups" if training.lanes == 1 else "all row groups that it reads"
    share = f"{100 * training.mixed:.0f} %" if training.mixed >= 0.01 else "less than 1 %"
    together = ", together" if training.lanes > 1 else ","
    unit = "row group" if training.pieces == 1 else "piece"
    return f"{format_count(training.window, unit)}{together} {share} of the rows"


def _limit(training: Forecast) -> str:
    if training.pieces > 1:
        return f"read in {training.pieces} pieces"
    if training.needed is not None:
        return "one is read at a time"
    if training.mixed == 1:
        return "all fit"
    if training.window < WINDOW:
        return f"{training.window} fit"
    if training.window == WINDOW:
        return f"{WINDOW} are mixed at most, unless all fit"
    return f"{WINDOW_OF_ALL} are mixed at most"


def _gain(training: Forecast, row_groups: int) -> str:
    assert training.row_group_size is not None
    size = format_size(training.row_group_size)
    if training.mixed < 1 and training.window < WINDOW:
        return f"row groups of {size} on disk, so that {WINDOW} are mixed"
    if row_groups < 2 * cpu_count():
        few = f"{row_groups:,} {'is' if row_groups == 1 else 'are'} few"
        return f"row groups of {size} on disk: {few} for {format_count(cpu_count(), 'core')} to decode, and to mix"
    return f"row groups of {size} on disk: the fixed cost of small ones shows"


def _better_size(
    plan: ReadPlan, sizes: RowGroupSizes, memory: int, lanes: int, window: int, mixed: float
) -> int | None:
    """Bytes on disk of row groups that would mix better, or be read faster; None if that gains little."""
    total, decoded = int(plan.data.index.numbers("bytes").sum()), int(sizes.selected.sum())
    if window < WINDOW and mixed < 1:
        return row_group_size_for(plan, sizes, memory, lanes)
    even = max(_SMALLEST, min(_LARGEST, _power_of_two(total // (4 * WINDOW))))
    if decoded < _TINY:
        return None
    if len(sizes) < 2 * cpu_count():
        return even if _least(plan, even) > len(sizes) else None
    if len(sizes) > 2 * WINDOW and decoded / len(sizes) < _COSTLY:
        return even if 4 * _least(plan, even) <= len(sizes) else None
    return None


def _least(plan: ReadPlan, size: int) -> int:
    """The fewest row groups of up to ``size`` bytes on disk that the partitions can have."""
    index = plan.data.index
    of_file = np.bincount(index.numbers("file"), index.numbers("bytes"), len(index.paths))
    held: Counter[str] = Counter()
    for path, amount in zip(index.paths, of_file.tolist(), strict=True):
        held[parent(path)] += int(amount)
    return sum(-(-amount // size) for amount in held.values())


def row_group_size_for(plan: ReadPlan, sizes: RowGroupSizes, memory: int, lanes: int) -> int:
    """The row-group size on disk, a power of two, at which each lane can mix 16 row groups in ``memory`` bytes."""
    scale = memory / lanes / sizes.of_lane(WINDOW)
    largest = int(plan.data.index.numbers("bytes").max())
    return max(_SMALLEST_WINDOW, min(BLOCK_SIZE, _power_of_two(int(scale * largest))))


def _power_of_two(size: int) -> int:
    """The largest power of two up to ``size``."""
    return 1 << (max(1, size).bit_length() - 1)


if __name__ == "__main__":
    run_setting(_measured_here)
