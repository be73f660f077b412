"""How an epoch's speed grows with cores: pqcache with several numbers of workers, beside decoding alone.

    python benchmarks/cores.py --data /tmp/bench --cores 2,4,8,16 --json cores.json

Each measurement is a process that may use the first so many processors, with as many workers as cores, half as many,
and none; the fastest counts. Beside it row groups are decoded and dropped, on threads or in processes, one on each
core: how much faster that is on more processors says what the machine can do, as some are two threads of one core.
Datasets are those of loader.py with ``--times`` as many files, so that each core has row groups of its own, and
``--memory-per-core`` for each. The table has a place for what was measured whole.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from pathlib import Path

from _loader_data import SHAPES, make
from _loader_report import Case, Measurement, best, lines_of, share, thousands
from loader import run

from pqcache.units import parse_size

LIMITS = ("limit-groups", "limit-processes")  # row groups decoded and dropped, on threads or in processes
OURS = ("pqcache",)
CoresCase = tuple[str, str, int, int]  # dataset, loader, cores and workers
Found = dict[CoresCase, list[Measurement]]


def copied(root: Path, name: str, times: int) -> Path:
    """Write a dataset once, and each of its files so many times under other names; return the directory."""
    source, directory = make(root, name), root / f"{times}x" / name
    if not (directory / "_done").exists():
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        for file in source.glob("*.parquet"):
            for number in range(times):
                shutil.copyfile(file, directory / f"{file.stem}-{number}.parquet")
        (directory / "_done").touch()
    return directory


def workers_of(cores: int) -> list[int]:
    """Return numbers of workers that are worth a try on so many cores."""
    return sorted({0, cores // 2 if cores > 2 else 0, cores})


def cases_of(options: argparse.Namespace) -> list[CoresCase]:
    """Return what is measured, in order."""
    return [
        (name, loader, cores, workers)
        for cores in options.cores
        for name in options.datasets
        for loader, numbers in (*((limit, [0]) for limit in LIMITS), ("pqcache", options.workers or workers_of(cores)))
        for workers in numbers
    ]


def measure(options: argparse.Namespace, cases: Sequence[CoresCase]) -> Found:
    """Measure in turns, round by round, as long as ``options.minutes`` allow."""
    found: Found = {}
    begin, able = time.perf_counter(), sorted(os.sched_getaffinity(0))
    for number in range(options.rounds):
        for case in cases:
            spent = time.perf_counter() - begin
            if spent > 60 * options.minutes:
                print(
                    f"stopped after {options.minutes:g} minutes, in round {number + 1}, before {case}", file=sys.stderr
                )
                return found
            name, loader, cores, workers = case
            print(f"{spent:6.0f} s  round {number + 1}  {name}, {cores} cores, {loader} {workers}", file=sys.stderr)
            options.memory = str(cores * parse_size(options.memory_per_core))
            result = run(Case(name, loader, workers), options, able[:cores])
            if isinstance(result, str):
                print(f"failed: {result}", file=sys.stderr)
                continue
            found.setdefault(case, []).append(result)
            if options.json:
                options.json.write_text(json.dumps([[*c, *map(vars, runs)] for c, runs in found.items()]))
    return found


def curve(found: Found, cases: Sequence[CoresCase], datasets: list[str], cores: list[int]) -> str:
    """Return the table of README.md: a column for each dataset, speed and its share of the decode limit by cores."""

    def fastest(loaders: Sequence[str], name: str, count: int) -> float:
        wanted = [case for case in cases if (case[0], case[2]) == (name, count) and case[1] in loaders]
        return max(best(found[case])[0] for case in wanted) if all(case in found for case in wanted) else 0.0

    def growth(loaders: Sequence[str], name: str) -> str:
        least, most = (fastest(loaders, name, number) for number in (min(cores), max(cores)))
        return f"{most / least:.1f}" if least and most else "-"

    def cell(name: str, count: int) -> str:
        rate, limit = fastest(OURS, name, count), fastest(LIMITS, name, count)
        return f"{thousands(rate)} ({share(rate, limit)})" if rate and limit else "-"

    rows = [[str(count), *(cell(name, count) for name in datasets)] for count in sorted(cores)]
    rows.append(["times as fast", *(growth(OURS, name) for name in datasets)])
    rows.append(["decoding alone", *(growth(LIMITS, name) for name in datasets)])
    return lines_of(["cores", *datasets], rows)


def everything(found: Found) -> str:
    """Return a line for each measurement: thousands of rows per second, CPU time of a row, peak of PSS."""
    lines = []
    for (name, loader, cores, workers), runs in found.items():
        rate, cpu, way = best(runs)
        peak = statistics.median(run.peak for run in runs) / 1024
        lines.append(
            f"{name:<12}{cores:>3} cores  {loader:<16}{workers:>3} workers {thousands(rate):>9} thousand rows/s"
            f"{cpu * 1e6:>8.2f} us of CPU a row, {peak:>7,.0f} MB {way}"
        )
    return "\n".join(lines)


def main() -> None:
    def numbers(text: str) -> list[int]:
        return [int(number) for number in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("/tmp/pqcache-bench"))
    parser.add_argument("--datasets", type=lambda text: text.split(","), default=[*SHAPES, "dense"])
    parser.add_argument("--cores", type=numbers, help="default: 2, 4, 8 and so on, up to all")
    parser.add_argument("--workers", type=numbers, help="default: none, half as many as cores, and as many")
    parser.add_argument("--times", type=int, default=4, help="how many copies of each file")
    parser.add_argument("--memory-per-core", default="1GB", help="of the dataset, for each core")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=25.0)
    parser.add_argument("--json", type=Path, help="write all measurements to this file")
    options = parser.parse_args()
    options.cores = options.cores or [n for n in (2**i for i in range(1, 12)) if n <= len(os.sched_getaffinity(0))]
    kinds = [name for name in options.datasets if name != "dense"]
    with ProcessPoolExecutor() as pool:  # dense rows are made of tokens
        for names in (kinds, ["dense"] if "dense" in options.datasets else []):
            list(pool.map(copied, repeat(options.data), names, repeat(options.times)))
    options.data, options.seconds, options.no_rows = options.data / f"{options.times}x", 0.0, True
    cases = cases_of(options)
    found = measure(options, cases)
    print(everything(found))
    print()
    print(curve(found, cases, options.datasets, options.cores))


if __name__ == "__main__":
    main()
