"""``pqcache bench``: how fast this machine reads a dataset with each number of workers, and which settings to use.

Every setting is measured in a process of its own, so that memory which another setting left behind does not count for
it. The processes only read, and the snapshot is leased meanwhile.
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
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from pqcache import errors
from pqcache.benchmark.forecast import describe_training, forecast_of
from pqcache.errors import CacheError, PqcacheError, UsageError
from pqcache.events import Advanced, OnEvent, Started, ignore
from pqcache.options import COMMANDS, BenchArguments, Unpack, all_values, documented
from pqcache.reader.load import RowGroups
from pqcache.reader.open_dataset import open_local_dataset
from pqcache.reader.options import RowOptions
from pqcache.reader.read_plan import ReadPlan, make_read_plan
from pqcache.store.cache_directory import cache_at
from pqcache.store.tables.data_files import FileRules
from pqcache.system.process_stats import cpu_count, pss
from pqcache.units import format_count, format_size, parse_size, size_word

_STARTING = 120.0  # seconds that a process may take beside what it measures
_NEAR = 0.95  # of the fastest: as good as that, and with fewer workers
_SAMPLED = 0.1  # seconds between two looks at the memory
_DOMINATES = 0.3  # of the time to decode
_SMALL_BATCH = 256 << 10  # bytes of a batch when decoded, below which the cost of each shows
_COLD = 0.1  # of what was read
_SLOW = 0.5  # of the decode limit


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What was measured of one setting.

    ``workers``            of the DataLoader; None for batches that are read without torch
    ``rows_per_second``, ``bytes_per_second``   rows, and bytes of them when decoded
    ``of_limit``           the share of the decode limit, from 0 to 1
    ``first_batch``        seconds from the start of the iteration to the first batch
    ``memory``             the highest PSS of all its processes in bytes; None where the system has no PSS
    ``from_disk``          the share of the bytes read that came from the disk and not from the page cache, from 0 to 1;
                           None where the system does not count them
    ``window``             row groups of a lane that are mixed
    ``limited_by``         what took longest, as in ``ReadingStats``; None where it is not known
    ``seconds_of``         seconds that its threads and workers were busy, by what they did
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
    """What would make reading faster, and the command for that where there is one."""

    text: str
    command: str | None = None


@dataclass(frozen=True, kw_only=True)
class BenchReport:
    """What was measured of a dataset, and what follows from it.

    ``columns`` of ``rows`` rows in ``row_groups`` row groups were read, which take ``bytes`` on disk and ``decoded``
    bytes in memory. ``limit`` is the decode limit in rows per second on ``cores`` cores: the better of columns and row
    groups decoded in parallel, without making batches; ``limit_from_disk`` is as in ``Measured``. ``recommended`` is
    the number of workers to use, None without torch.
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
    """Measure how fast a cache, or a directory of Parquet, is read here, and return which settings to use.

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
    limit, _ = _run("pqcache.benchmark.measure", {**job, "what": "limit"})
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
    module = "pqcache.benchmark.measure" if workers is None else "pqcache.torch.bench"
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
    """Return the fewest workers that are about as fast as the fastest."""
    best = max(item.rows_per_second for item in measured)
    return min(
        (item.workers for item in measured if item.workers is not None and item.rows_per_second >= _NEAR * best),
        default=None,
    )


def advise(report: BenchReport, groups: RowGroups, dense: dict[str, float]) -> Iterator[Advice]:
    """Yield what would make reading faster or mix better; ``dense`` has shares of the time to decode."""
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
        yield Advice("workers are for a transform that takes time; the dataset itself decodes on all cores without")
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
    """Return the share of what a setting read of the files that came from the disk; at most 1, despite readahead."""
    read = found["rows"] * _disk_size(plan) / int(plan.counts.sum())
    return None if found["disk"] is None or not read else min(1.0, found["disk"] / read)


def _disk_size(plan: ReadPlan) -> int:
    return int(plan.data.index.stored(plan.columns)[plan.row_groups].sum())


def _run(module: str, job: dict[str, Any]) -> tuple[dict[str, Any], int | None]:
    """Run a setting; return what it found, and the most memory that its processes took together."""
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
                    raise PqcacheError(f"{job['path']}", f"nothing was read in {_STARTING:g} s", "is its disk alive?")
        finally:
            process.kill()
    lines = out.splitlines()
    if not lines:
        last = (err.strip().splitlines() or [f"it ended with {process.returncode}"])[-1]
        raise PqcacheError(f"{job['path']}", f"the measuring process failed ({last})")
    found = json.loads(lines[-1])
    if "error" in found:
        raise getattr(errors, found["kind"], PqcacheError)(*found["error"])
    return found, peak or None
