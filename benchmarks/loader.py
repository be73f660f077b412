"""How fast an epoch is read: pqcache beside the decode limit and what users would pick instead.

    python benchmarks/loader.py                                         # a quick look
    PQCACHE_PEERS=/venv/bin/python python benchmarks/loader.py --readme # the tables of README.md: 25 minutes, and data
    python benchmarks/loader.py --datasets tabular,tokens-duckdb-8MB --loaders pqcache,limit --workers 0
    python benchmarks/loader.py --datasets tokens --row-groups 8,32,128 --writers pyarrow,spark

Other libraries run in the Python of PQCACHE_PEERS, or this one; those that are not installed are left out.
Every measurement is a process of its own, for which memory is made ready; loaders are interleaved round by round, so
that noise hits all alike. A process reads ``--epochs`` epochs, of the limit as many with each decoder, and each after
the first counts (the first also pays for fresh memory; it is reported apart). Other loaders' epochs are cut off
``--seconds`` after their first batch, from which on they count. Slow ones are measured for two epochs, in the first
round only; formats that are written row by row have 40,000 rows, of tables 200,000.
"CPU us" is CPU time of a row, workers included. "mix" is how many row groups a batch has rows of, the median over the
first epoch; "once" is how many of the rows it gave are different ones. "PSS" counts files that are mapped into memory,
"own" does not. Read ratios, not seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from _decode_limits import (
    by_columns,
    by_polars,
    by_processes,
    by_row_groups,
    decoders,
    fastest,
    limit_copied,
    limit_polars_copied,
)
from _loader_data import NULLS, SHAPES, WRITERS, make, parts, row_numbers
from _loader_peers import BATCH, PEERS, QUIET, Epochs
from _loader_report import Case, Measurement, markdown, table
from _memory import make_ready

# ---- what is compared: each is a function of (directory, kind, workers) that yields epochs of batches (or row counts)


def ours(path: Path, name: str, workers: int, **options: Any) -> Epochs:
    from pqcache.torch import Loader, ParquetDataset

    dataset = ParquetDataset(path, batch_size=BATCH[name], nulls=NULLS[name] or "error", **options)
    loader = Loader(dataset, num_workers=workers)
    while True:
        yield iter(loader)


def ours_small(path: Path, name: str, workers: int) -> Epochs:
    """With a window of 10 row groups and 512 MB: at least 8 in a batch, and less memory."""
    return ours(path, name, workers, window=10, memory="512MB")


def ours_split(path: Path, name: str, workers: int) -> Epochs:
    """Nine tenths of the rows, by the hash of their id, or of their place where there is none."""
    from pqcache.torch import Split

    return ours(path, name, workers, split=Split(None if name == "tokens" else "id", 0.0, 0.9))


def ours_weights(path: Path, name: str, workers: int) -> Epochs:
    """About as many rows, each as often as its label says; of tokens, which have none, all rows once."""
    labels = {"multimodal": "category", "tabular": "label"}
    return ours(path, name, workers, balance=labels.get(name))


def forty_lines(path: Path, name: str, workers: int) -> Epochs:
    """What a competent person writes in an afternoon: row groups in random order, rows permuted inside each."""
    import torch
    from torch.utils.data import DataLoader, IterableDataset, get_worker_info

    class Plain(IterableDataset):  # type: ignore[type-arg]
        epoch = 0

        def __iter__(self) -> Iterator[dict[str, Any]]:
            info = get_worker_info()
            number, count = (info.id, info.num_workers) if info else (0, 1)
            groups = [(p, g) for p in sorted(path.glob("*.parquet")) for g in range(pq.ParquetFile(p).num_row_groups)]
            self.epoch += 1  # in workers too, as they are persistent
            rng = np.random.default_rng(self.epoch)
            rng.shuffle(groups)
            for file, group in groups[number::count]:
                table = pq.ParquetFile(file).read_row_group(group)
                table = table.take(pa.array(rng.permutation(len(table))))
                for batch in table.to_batches(max_chunksize=BATCH[name]):
                    yield {n: self.convert(batch.column(n)) for n in batch.schema.names}

        @staticmethod
        def convert(array: pa.Array) -> Any:
            if pa.types.is_primitive(array.type):
                return torch.from_numpy(array.to_numpy(zero_copy_only=False).copy())
            if pa.types.is_list(array.type):
                values = torch.from_numpy(array.flatten().to_numpy().copy())
                if name == "tokens":
                    return values.reshape(len(array), -1)
                return values, torch.from_numpy(array.value_lengths().to_numpy().copy())
            return array.to_pylist()

    persistent = workers > 0
    loader = DataLoader(
        Plain(), batch_size=None, num_workers=workers, collate_fn=lambda b: b, persistent_workers=persistent
    )
    while True:
        yield iter(loader)


LIMITS = {
    "limit": fastest,
    "limit-columns": by_columns,
    "limit-groups": by_row_groups,
    "limit-processes": by_processes,
    "limit-polars": by_polars,
    "limit-copied": limit_copied,
    "limit-polars-copied": limit_polars_copied,
}
OURS = {
    "pqcache": ours,
    "pqcache-small": ours_small,
    "pqcache-split": ours_split,
    "pqcache-weights": ours_weights,
    "40-lines": forty_lines,
}
LOADERS: dict[str, Callable[..., Epochs]] = {
    **LIMITS,
    **OURS,
    **{name: peer.epochs for name, peer in PEERS.items()},
}
QUICK = ("limit", "pqcache", "hf-arrow", "in-memory")


# ---- one measurement


def memory() -> tuple[int, int]:
    """Return the PSS of this process and its children, and what of it is no file mapped into memory, in KiB."""
    import psutil

    me = psutil.Process()
    total = own = 0
    for process in [me, *me.children(recursive=True)]:
        try:
            lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()[1:]
        except OSError:  # it has ended
            continue
        sizes = {line.split()[0]: int(line.split()[1]) for line in lines}
        total += sizes["Pss:"]
        own += sizes["Pss_Anon:"] + sizes["Pss_Shmem:"]
    return total, own


def cpu_seconds() -> float:
    """Return what this process and its children have taken."""
    import psutil

    me = psutil.Process()
    times = [process.cpu_times() for process in [me, *me.children(recursive=True)]]
    ended = os.times()
    return sum(t.user + t.system for t in times) + ended.children_user + ended.children_system


class FirstEpoch:
    """What is looked at in the first epoch; those that are timed are left alone."""

    def __init__(self, path: Path, kind: str, looks_at_rows: bool) -> None:
        footers = [pq.read_metadata(file) for file in sorted(path.glob("*.parquet"))]
        self.kind, self.looks_at_rows = kind, looks_at_rows
        self.columns = set(footers[0].schema.to_arrow_schema().names)
        self.ends = np.cumsum([f.row_group(g).num_rows for f in footers for g in range(f.num_row_groups)])
        self.began = self.sampled = time.perf_counter()
        self.first_batch: float | None = None
        self.peak = self.own = 0
        self.seen: list[Any] = []

    def look(self, batch: Any) -> None:
        now = time.perf_counter()
        if self.first_batch is None:
            self.first_batch = now - self.began
        if self.looks_at_rows and not isinstance(batch, int):
            assert self.columns <= set(batch), f"columns are missing: {self.columns - set(batch)}"
            self.seen.append(np.array(row_numbers(batch, self.kind)))  # a view would keep the batch
        if now - self.sampled > 0.2:
            total, own = memory()
            self.peak, self.own, self.sampled = max(self.peak, total), max(self.own, own), time.perf_counter()

    def result(self) -> dict[str, Any]:
        mix, once = 0.0, 1.0
        if self.seen:
            mix = statistics.median(len(np.unique(np.searchsorted(self.ends, rows, "right"))) for rows in self.seen)
            rows = np.concatenate(self.seen)
            once = len(np.unique(rows)) / len(rows)
        return {"first_batch": self.first_batch, "peak": self.peak, "own": self.own, "mix": mix, "once": once}


def timed(epoch: Iterator[Any], cut_after: float | None, look: Callable[[Any], None]) -> dict[str, Any]:
    """Read an epoch and return what it took; if it is to be cut off, counted from its first batch on."""
    start, cpu, rows = time.perf_counter(), cpu_seconds(), 0
    for number, batch in enumerate(epoch):
        if number == 0 and cut_after is not None:
            start, cpu = time.perf_counter(), cpu_seconds()
        else:
            rows += batch if isinstance(batch, int) else len(next(iter(batch.values())))
        look(batch)
        if cut_after is not None and time.perf_counter() - start > cut_after:
            break
    return {"seconds": time.perf_counter() - start, "rows": rows, "cpu": cpu_seconds() - cpu}


def child(loader: str, dataset: str, workers: int, options: argparse.Namespace) -> None:
    """Read epochs and print what they took, as JSON."""
    import psutil

    path, kind = options.data / dataset, parts(dataset)[0]
    cut_after = options.seconds if loader in PEERS else None
    of_ours = {"memory": options.memory} if options.memory and loader in OURS else {}
    ways = decoders() if loader == "limit" else [""]
    first = FirstEpoch(path, kind, not options.no_rows)
    found: list[dict[str, Any]] = []
    for epoch in LOADERS[loader](path, kind, workers, **of_ours):
        look = first.look if not found else lambda batch: None
        found.append({**timed(epoch, cut_after, look), "decoder": ways[len(found) % len(ways)]})
        if len(found) == options.epochs * len(ways):
            break
    print(json.dumps({"epochs": found, **first.result()}), flush=True)
    for process in psutil.Process().children(recursive=True):  # workers that wait to send would hold our output open
        process.kill()
    os._exit(0)  # some peers do not stop


def run(case: Case, options: argparse.Namespace, cores: Sequence[int] = ()) -> Measurement | str:
    """Measure once, in a process of its own that may use these processors; return its last words if it fails."""
    of_peers = case.loader in PEERS or case.loader in ("limit", "limit-polars", "limit-polars-copied")
    epochs = min(options.epochs, 2) if case.loader in PEERS and PEERS[case.loader].slow else options.epochs
    python = os.environ.get("PQCACHE_PEERS", sys.executable) if of_peers else sys.executable
    command = [python, __file__, "--data", str(options.data), "--epochs", str(epochs)]
    command += ["--seconds", str(options.seconds), "--child", case.loader, case.dataset, str(case.workers)]
    command += ["--memory", options.memory] if options.memory else []
    command += ["--no-rows"] if options.no_rows else []
    environment = {**os.environ, **QUIET, "HF_DATASETS_CACHE": str(options.data / "huggingface")}
    limit = partial(os.sched_setaffinity, 0, cores) if cores else None
    make_ready(2 << 30)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment, preexec_fn=limit)
    except subprocess.TimeoutExpired:
        return "took more than 600 s"
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"epochs"')]
    if lines:
        return Measurement(**json.loads(lines[0]))
    return (done.stderr.strip().splitlines() or ["no output"])[-1][:200]


# ---- what to measure


def installed(modules: set[str]) -> set[str]:
    """Return which modules the Python of the peers has."""
    python = os.environ.get("PQCACHE_PEERS", sys.executable)
    code = "import sys\nfrom importlib.util import find_spec\nprint(*[m for m in sys.argv[1:] if find_spec(m)])"
    return set(subprocess.run([python, "-c", code, *modules], capture_output=True, text=True).stdout.split())


def cases(options: argparse.Namespace) -> list[tuple[Case, int]]:
    """Return what to measure, each with the number of rounds in which it is measured."""
    here = installed({peer.module for peer in PEERS.values() if peer.module})
    loaders = [name for name in options.loaders if name not in PEERS or PEERS[name].module in {"", *here}]
    for name in set(options.loaders) - set(loaders):
        print(f"{name}: {PEERS[name].module} is not installed, left out", file=sys.stderr)
    found: dict[Case, int] = {}

    def add(dataset: str, loader: str, rounds: int) -> None:
        for workers in [0] if loader in LIMITS else options.workers:
            found.setdefault(Case(dataset, loader, workers), rounds)

    for dataset, loader in product(options.datasets, loaders):
        is_peer = loader in PEERS
        if not (is_peer and parts(dataset)[1] == "dense"):  # they do not know the format
            add(dataset, loader, 1 if is_peer and PEERS[loader].slow else options.rounds)
    for dataset in dict.fromkeys(parts(name)[0] for name in options.datasets):
        variants = [f"{dataset}-{size}MB" for size in options.row_groups if size != "32"]
        variants += [f"{dataset}-{writer}" for writer in options.writers if writer not in ("pyarrow", "dense")]
        for variant, loader in product(variants, ("limit", "pqcache")):
            add(variant, loader, max(1, options.rounds - 1))
    return list(found.items())


def main() -> None:
    def names(text: str) -> list[str]:
        return text.split(",")

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("/tmp/pqcache-bench"))
    parser.add_argument("--datasets", type=names, default=[*SHAPES, "dense"])
    parser.add_argument("--loaders", type=names, help=f"of {', '.join(LOADERS)}")
    parser.add_argument("--workers", type=lambda text: [int(n) for n in names(text)], default=[0, 2])
    parser.add_argument("--row-groups", type=names, help="MB, each beside 32: pqcache and the limit")
    parser.add_argument("--writers", type=names, help=f"of {', '.join(WRITERS)}: pqcache and the limit")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0, help="of an epoch of the other loaders")
    parser.add_argument("--minutes", type=float, default=25.0, help="after the first round, stop when they are over")
    parser.add_argument("--readme", action="store_true", help="everything that benchmarks/README.md shows")
    parser.add_argument("--memory", help="of pqcache's dataset, if not its default")
    parser.add_argument("--no-rows", action="store_true", help="do not look which rows the batches have")
    parser.add_argument("--json", type=Path, help="write all measurements to this file")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        loader, dataset, workers = options.child
        child(loader, dataset, int(workers), options)
    options.loaders = options.loaders or [*(dict.fromkeys([*QUICK, *PEERS]) if options.readme else QUICK)]
    options.row_groups = options.row_groups or (["8", "32", "128"] if options.readme else ["32"])
    options.writers = options.writers or (list(WRITERS) if options.readme else ["pyarrow"])
    options.rounds = options.rounds or (3 if options.readme else 1)
    measure(cases(options), options)


def measure(planned: list[tuple[Case, int]], options: argparse.Namespace) -> None:
    """Measure in turns, and print tables."""
    for dataset in dict.fromkeys(case.dataset for case, _ in planned):
        make(options.data, dataset)
    os.sync()
    found: dict[Case, list[Measurement]] = {case: [] for case, _ in planned}
    failed: dict[Case, str] = {}
    begin = time.perf_counter()
    for number in range(options.rounds):
        for case, rounds in planned:
            spent = time.perf_counter() - begin
            if number >= rounds or case in failed or (number and spent > 60 * options.minutes):
                continue
            print(f"{spent:6.0f} s  round {number + 1}  {case}", file=sys.stderr)
            result = run(case, options)
            if isinstance(result, str):
                failed[case] = result
            else:
                found[case].append(result)
            if options.json:
                options.json.write_text(json.dumps([[*c, *map(vars, runs)] for c, runs in found.items()]))
    measured = {case: runs for case, runs in found.items() if runs}
    print(table(measured))
    print(markdown(measured, failed, {name: peer.title for name, peer in PEERS.items()}))


if __name__ == "__main__":
    main()
