"""How fast an epoch is read: pqcache beside the decode limit and what users would pick instead.

    python benchmarks/loader.py --rounds 5 --data /tmp/bench            # all datasets, workers 0 and 2
    python benchmarks/loader.py --datasets tabular --loaders pqcache,limit-groups --workers 0
    python benchmarks/loader.py --python petastorm=/venv/bin/python     # a peer that needs libraries of its own

Every measurement is a process of its own, for which memory is made ready; loaders are interleaved round by round, so
that noise hits all alike. A process reads ``--epochs`` epochs and each after the first counts (the first also pays for
fresh memory; it is reported apart). An epoch is cut off after ``--seconds``. Formats that are written row by row have
100,000 rows. "mix" is how many row groups a batch has rows of, the median over the first epoch; "once" is how many of
the rows it gave are different ones. "PSS" counts files that are mapped into memory, "own" does not. Read ratios, not
seconds.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from _loader_data import NULLS, make, parts, row_numbers
from _loader_peers import BATCH, PEERS, QUIET
from _memory import make_ready

CORES = len(os.sched_getaffinity(0))
WAITING = 8  # row groups whose rows wait for their batches
LONG = 512  # bytes of a row from which on picking it from anywhere costs no more than copying it

# ---- what is compared: each is a function of (directory, name, workers) that yields epochs of batches (or row counts)

Epochs = Iterator[Iterator[Any]]


def limit_columns(path: Path, name: str, workers: int) -> Epochs:
    """Decode row group by row group, columns in parallel, and drop them."""
    files = [pq.ParquetFile(p) for p in sorted(path.glob("*.parquet"))]
    while True:
        yield (f.read_row_group(g, use_threads=True).num_rows for f in files for g in range(f.num_row_groups))


def limit_groups(path: Path, name: str, workers: int) -> Epochs:
    """Decode as many row groups at once as there are cores, and drop them."""
    return decoded_by_groups(path, lambda table: None)


def limit_copied(path: Path, name: str, workers: int) -> Epochs:
    """Decode like that, and copy the values no more often than a shuffle has to, numbers in an order that is ready.

    A batch has rows of several row groups, so they are copied into it; short ones before that into what waits for its
    batch, as picking them from memory that no cache holds takes longer than a second copy. No order is made, no row
    is looked for, and there are no batches.
    """
    ready = threading.local()

    def copy(table: pa.Table) -> None:
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

    return decoded_by_groups(path, copy)


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


def ours(path: Path, name: str, workers: int, **options: Any) -> Epochs:
    from torch.utils.data import DataLoader

    from pqcache.torch import ParquetDataset

    ds = ParquetDataset(path, batch_size=BATCH[name], nulls=NULLS[name] or "error", **options)
    loader = DataLoader(ds, batch_size=None, num_workers=workers, persistent_workers=workers > 0)
    for epoch in range(1000):
        ds.set_epoch(epoch)
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


LOADERS: dict[str, tuple[Callable[[Path, str, int], Epochs], str | None]] = {
    "limit-columns": (limit_columns, None),
    "limit-groups": (limit_groups, None),
    "limit-copied": (limit_copied, None),
    "pqcache": (ours, "torch"),
    "pqcache-small": (ours_small, "torch"),
    "pqcache-split": (ours_split, "torch"),
    "pqcache-weights": (ours_weights, "torch"),
    "40-lines": (forty_lines, "torch"),
    **PEERS,
}


# ---- running


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


def child(loader: str, path: Path, name: str, workers: int, epochs: int, seconds: float) -> None:
    """Read epochs and print what they took, as JSON."""
    import psutil

    footers = [pq.read_metadata(file) for file in sorted(path.glob("*.parquet"))]
    columns = set(footers[0].schema.to_arrow_schema().names)
    ends = np.cumsum([f.row_group(g).num_rows for f in footers for g in range(f.num_row_groups)])
    began = time.perf_counter()
    found = []
    first_batch = None
    peak, own, mix, once = 0, 0, 0.0, 1.0
    for number, epoch in enumerate(LOADERS[loader][0](path, name, workers)):
        start, cpu = time.perf_counter(), os.times()
        rows = 0
        sampled = start
        seen = []
        for batch in epoch:
            if first_batch is None:
                first_batch = time.perf_counter() - began
            rows += batch if isinstance(batch, int) else len(next(iter(batch.values())))
            if number == 0 and not isinstance(batch, int):
                assert columns <= set(batch), f"columns are missing: {columns - set(batch)}"
                seen.append(np.array(row_numbers(batch, name)))  # a view would keep the batch
            if time.perf_counter() - start > seconds:
                break
            if number == 0 and time.perf_counter() - sampled > 0.2:  # the timed epochs are left alone
                now = memory()
                peak, own, sampled = max(peak, now[0]), max(own, now[1]), time.perf_counter()
        spent, took = os.times(), time.perf_counter() - start
        if seen:
            groups = [len(np.unique(np.searchsorted(ends, batch, "right"))) for batch in seen]
            mix = statistics.median(groups)
            once = len(np.unique(np.concatenate(seen))) / rows
        found.append({"seconds": took, "rows": rows, "cpu": sum(spent[:2]) - sum(cpu[:2])})
        if number + 1 == epochs:
            break
    about = {"first_batch": first_batch, "peak": peak, "own": own, "mix": mix, "once": once}
    print(json.dumps({"epochs": found, **about}), flush=True)
    for process in psutil.Process().children(recursive=True):  # workers that wait to send would hold our output open
        process.kill()
    os._exit(0)  # some peers do not stop


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("/tmp/pqcache-bench"))
    parser.add_argument("--datasets", default="multimodal,tabular,tokens")
    parser.add_argument("--loaders", default=",".join(LOADERS))
    parser.add_argument("--workers", default="0,2")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20.0, help="an epoch is cut off after this")
    parser.add_argument("--python", action="append", default=[], metavar="LOADER=PATH")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        loader, name, workers = options.child
        child(loader, options.data / name, parts(name)[0], int(workers), options.epochs, options.seconds)
    pythons = dict(pair.split("=", 1) for pair in options.python)
    cases = []
    for name in options.datasets.split(","):
        make(options.data, name)
        for loader in options.loaders.split(","):
            needs = LOADERS[loader][1]
            if needs and loader not in pythons and importlib.util.find_spec(needs) is None:
                print(f"{loader}: {needs} is not installed, left out", file=sys.stderr)
                continue
            limit = loader.startswith("limit")
            cases += [(name, loader, w) for w in options.workers.split(",") if not limit or w == "0"]
    times: dict[tuple[str, str, str], list[dict[str, Any]]] = defaultdict(list)
    for _ in range(options.rounds):
        for case in cases:
            name, loader, workers = case
            command = [pythons.get(loader, sys.executable), __file__, "--data", str(options.data)]
            command += ["--epochs", str(options.epochs), "--seconds", str(options.seconds)]
            command += ["--child", loader, name, workers]
            make_ready()
            done = subprocess.run(command, capture_output=True, text=True, timeout=900, env={**os.environ, **QUIET})
            lines = [line for line in done.stdout.splitlines() if line.startswith('{"epochs"')]
            if not lines:
                print(f"{case}: failed: {(done.stderr.strip().splitlines() or ['?'])[-1]}", file=sys.stderr)
                continue
            times[case].append(json.loads(lines[0]))
            if options.json:
                options.json.write_text(json.dumps([{"case": c, "runs": runs} for c, runs in times.items()]))
    report(times)


def report(times: dict[tuple[str, str, str], list[dict[str, Any]]]) -> None:
    """Print medians and ratios to the better limit."""
    rates = {
        case: statistics.median(e["rows"] / e["seconds"] for run in runs for e in run["epochs"][1:])
        for case, runs in times.items()
    }
    heads = [("dataset", -12), ("loader", -15), ("workers", 8), ("rows/s", 13), ("of limit", 10), ("CPU-s", 8)]
    heads += [("1st epoch", 11), ("1st batch", 11), ("PSS MB", 8), ("own MB", 8)]
    heads += [("mix", 6), ("once", 6)]
    print("".join(text.ljust(-width) if width < 0 else text.rjust(width) for text, width in heads))
    for case, rate in rates.items():
        limit = max(
            (r for (n, loader, _), r in rates.items() if n == case[0] and loader in ("limit-columns", "limit-groups")),
            default=0,
        )
        runs = times[case]
        first = statistics.median(run["epochs"][0]["rows"] / run["epochs"][0]["seconds"] for run in runs)
        cpu = statistics.median(e["cpu"] for run in runs for e in run["epochs"][1:])
        batch = statistics.median(run["first_batch"] for run in runs)
        peak, own = (max(run[key] for run in runs) >> 10 for key in ("peak", "own"))
        share = f"{rate / limit:.2f}" if limit else "-"
        mix = statistics.median(run["mix"] for run in runs) or "-"
        once = f"{min(run['once'] for run in runs):.2f}" if mix != "-" else "-"
        print(
            f"{case[0]:<12}{case[1]:<15}{case[2]:>8}{rate:>13,.0f}{share:>10}"
            f"{cpu:>8.2f}{first:>11,.0f}{batch:>11.2f}{peak:>8}{own:>8}{mix:>6}{once:>6}"
        )


if __name__ == "__main__":
    main()
