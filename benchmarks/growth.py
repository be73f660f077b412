"""What grows with a table: a cache of a million row groups, and commands on 1,000 to 300,000 files.

    python benchmarks/growth.py                          # both
    python benchmarks/growth.py --only loader --groups 100000 --files 30000
    python benchmarks/growth.py --only commands --counts 1000,10000,100000,300000

The cache is made up: its files are links to a few real ones, and its manifest and index are written by the package's
own writers. Each case runs in a process of its own and prints wall and CPU seconds, and the PSS beyond what the process
had before, without the pages of the index. With workers the CPU seconds are those of the trainer. The commands run on
a local source and a cache of small files that are links too, and print wall and CPU seconds; beside them is what the
calls of the file system alone take.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pqcache.store.cache_directory import CacheDirectory
from pqcache.store.config import Config, write_config
from pqcache.store.layout import FILES, ROW_GROUPS, SUMMARY
from pqcache.store.manifest import FileEntry, Identity, Manifest, SourceFile, local_tag, write_summary
from pqcache.store.manifest_file import write_manifest
from pqcache.store.publish import publish
from pqcache.store.row_group_index import Index, IndexBuilder, build_index
from pqcache.store.snapshot import write_checksums
from pqcache.system.disk import checksum_of

PER_DIRECTORY, LINKS = 1000, 10_000  # of a directory, and to one file: ext4 allows 65,000, snapshots add theirs
ROWS = 64  # of a row group


def table_of(rows: int) -> pa.Table:
    """Return rows of five columns, one of each kind."""
    rng = np.random.default_rng(0)
    ends = np.concatenate([[0], np.cumsum(rng.integers(1, 9, rows))]).astype(np.int32)
    return pa.table(
        {
            "id": np.arange(rows),
            "price": rng.random(rows),
            "title": [f"item {i}" for i in range(rows)],
            "tokens": pa.ListArray.from_arrays(pa.array(ends), pa.array(np.arange(ends[-1], dtype=np.int32))),
            "label": rng.integers(0, 9, rows).astype(np.int32),
        }
    )


def paths_of(files: int) -> list[str]:
    """Return the paths of so many files, sorted, 1,000 in each partition."""
    return [f"dt={i // PER_DIRECTORY:04d}-01/part-{i % PER_DIRECTORY:05d}.parquet" for i in range(files)]


def link_files(root: Path, paths: list[str], kinds: list[Path]) -> None:
    """Make each path a link to one of ``kinds``, in turn, or to a copy of it where that has too many links."""
    made: dict[int, tuple[Path, int]] = {}
    for directory in dict.fromkeys(path.rpartition("/")[0] for path in paths):
        (root / directory).mkdir(parents=True, exist_ok=True)
    for number, path in enumerate(paths):
        kind = number % len(kinds)
        first, links = made.get(kind, (kinds[kind], LINKS))
        if links == LINKS:
            shutil.copyfile(first, root / path)
            made[kind] = root / path, 1
        else:
            os.link(first, root / path)
            made[kind] = first, links + 1


def make_cache(root: Path, groups: int, files: int, source: Path | None = None) -> None:
    """Make a cache of so many row groups in so many files, some of which have one more than the others.

    With ``source`` a directory is made that it is a copy of.
    """
    few = groups // files
    kinds = [root.parent / f"{root.name}-{few + more}.parquet" for more in range(2)]
    for more, kind in enumerate(kinds):
        pq.write_table(table_of(ROWS * (few + more)), kind, row_group_size=ROWS)
    paths = paths_of(files)
    larger = np.arange(files) < groups - few * files
    cache = CacheDirectory(root)
    cache.create()
    url = "file:///made/up" if source is None else str(source)
    write_config(cache.path, Config(source=url))
    built = cache.tmp_dir / "built"
    (built / "_pqcache").mkdir(parents=True)
    for more, kind in enumerate(kinds):
        of_kind = [path for path, has in zip(paths, larger, strict=True) if has == more]
        link_files(built, of_kind, [kind])
        if source is not None:
            copies = [root.parent / f"source-{more}-{number}" for number in range(min(PER_DIRECTORY, len(of_kind)))]
            for copied in copies:  # one per name: links to one file within a partition count as one file
                shutil.copyfile(kind, copied)
            link_files(source, of_kind, copies)
            for path in of_kind[1:3]:  # which change: to remove a link changes the ctime of all others
                (source / path).unlink()
                shutil.copyfile(kind, source / path)
    index = made_up_index(paths, build_index(root.parent, [kind.name for kind in kinds]), larger, source is None)
    IndexBuilder().write(paths, index, built / ROW_GROUPS)
    sizes = [(kind.stat().st_size, ROWS * (few + more), few + more) for more, kind in enumerate(kinds)]
    sums = [checksum_of(kind) for kind in kinds]
    entries = tuple(
        FileEntry(
            path=path,
            size=sizes[kind][0],
            rows=sizes[kind][1],
            row_groups=sizes[kind][2],
            sources=(SourceFile(path, Identity(sizes[kind][0], 1) if source is None else identity_of(source / path)),),
            checksum=sums[kind],
        )
        for path, kind in zip(paths, larger.astype(int).tolist(), strict=True)
    )
    manifest = Manifest(files=entries, source=url, created="2026-11-20T04:00:00+00:00")
    write_manifest(manifest, built / FILES)
    write_summary(manifest, built / SUMMARY)
    write_checksums(built)
    publish(cache, built, None)


def identity_of(path: Path) -> Identity:
    """Return the identity of a local source file."""
    status = path.stat()
    return Identity(status.st_size, status.st_mtime_ns, local_tag(status.st_ino, status.st_ctime_ns))


def made_up_index(paths: list[str], kinds: Index, larger: Any, ids_grow: bool) -> Index:
    """Return an index in which each path has the row groups of one of two files."""
    few = int(np.count_nonzero(kinds.numbers("file") == 0))
    number = few + larger.astype(np.int64)
    starts = np.concatenate([[0], np.cumsum(number)])
    files = np.repeat(np.arange(len(paths)), number)
    in_file = np.arange(starts[-1]) - starts[:-1][files]
    table = kinds.table.take(pa.array(in_file + few * larger[files]))
    table = table.set_column(0, "file", pa.array(files, pa.int32()))
    ids = np.arange(starts[-1]) * ROWS
    for what, values in (("min", ids), ("max", ids + ROWS - 1)) if ids_grow else ():
        name = f"id:{what}"
        table = table.set_column(table.column_names.index(name), name, pa.array(values))
    return Index(paths=tuple(paths), table=table, data_schema=kinds.data_schema, uniform=True)


def memory(process: int | str = "self") -> int:
    """Return the PSS of a process in MB, without what is mapped of an index."""
    total, counts = 0, True
    for line in Path(f"/proc/{process}/smaps").read_text().splitlines():
        first, *rest = line.split()
        if not first.endswith(":"):
            counts = not line.endswith(ROW_GROUPS)
        elif first == "Pss:" and counts:
            total += int(rest[0])
    return total >> 10


CASES: dict[str, dict[str, Any]] = {
    "all": {},
    "filters, by the index": {"filters": "id >= 100000"},
    "filters, by partitions": {"filters": "dt >= '0001-01'"},
    "limit": {"limit": 100_000},
    "weights, by partitions": {"weights": {"dt": {"0001-01": 2.5, ...: 1.0}}},
    "balance, by partitions": {"balance": "dt"},
}


def measure_loader(path: str, case: str, workers: int, context: str) -> None:
    """Print the seconds of opening a dataset, of its first batch, and of those of the next epoch; and the memory."""
    from pqcache.torch import Loader, ParquetDataset

    ParquetDataset(path + "-small", batch_size=256)  # imports what is imported when it is first needed
    found: dict[str, float] = {}
    before = memory()

    @contextmanager
    def timed(what: str) -> Iterator[None]:
        wall, cpu = time.perf_counter(), time.process_time()
        yield
        found[what], found[f"{what}, CPU"] = time.perf_counter() - wall, time.process_time() - cpu

    with timed("open"):
        dataset = ParquetDataset(path, batch_size=256, **CASES[case])
    found["open, MB"] = memory() - before
    how: dict[str, Any] = {"multiprocessing_context": context, "persistent_workers": True} if workers else {}
    loader = Loader(dataset, num_workers=workers, **how)
    for epoch in (0, 1):
        dataset.set_epoch(epoch)
        with timed(f"batch of epoch {epoch}"):
            batches = iter(loader)
            next(batches)
        if epoch:
            found["reading, MB"] = memory() - before
        if workers and epoch:
            children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
            found["worker, MB"] = max(memory(child) for child in children)
        del batches
    print(json.dumps({name: round(value, 3) for name, value in found.items()}), flush=True)
    os._exit(0)


def run(*words: object) -> str:
    """Run a part of this script in a process of its own and return what it printed."""
    done = subprocess.run([sys.executable, __file__, *map(str, words)], capture_output=True, text=True, timeout=600)
    if done.returncode:
        sys.exit(done.stderr)
    return done.stdout.strip()


def measure_commands(root: Path, files: int) -> None:
    """Print what commands take on a cache of so many files."""
    cache, source = root / "cache", root / "source"
    make_cache(cache, 3 * files, files, source)

    def change(number: int) -> None:
        path = source / f"dt=0000-01/part-{number:05d}.parquet"
        path.unlink()
        pq.write_table(table_of(ROWS + number), path, row_group_size=ROWS)

    def timed(name: str, *words: str) -> None:
        began = time.perf_counter()
        command, nothing = [sys.executable, "-m", "pqcache", *words, str(cache)], subprocess.DEVNULL
        process = subprocess.Popen(command, stdout=nothing, stderr=nothing)
        _, status, used = os.wait4(process.pid, 0)
        if status:
            sys.exit(f"{name}: {status}")
        wall, cpu = time.perf_counter() - began, used.ru_utime + used.ru_stime
        print(f"{files:,} files: {name}: {wall:.2f} s, CPU {cpu:.2f} s", flush=True)

    timed("sync of the made-up cache", "sync")
    timed("sync, nothing to do", "sync")
    change(1)
    timed("sync, one file", "sync")
    change(2)
    timed("sync, one file, and removal of a snapshot", "sync")
    timed("inspect", "inspect")
    timed("verify", "verify")
    timed("gc", "gc", "--keep", "1")
    snapshot = CacheDirectory(cache).current()
    assert snapshot is not None
    measure_calls(snapshot.path, root / "linked", files)


def measure_calls(snapshot: Path, target: Path, files: int) -> None:
    """Print what the calls alone take that a sync cannot do without: stat each file, link it, and remove the links."""

    def each() -> Iterator[tuple[Path, list[os.DirEntry[str]]]]:
        for directory in sorted(snapshot.glob("dt=*")):
            with os.scandir(directory) as entries:
                yield directory, list(entries)

    def stat() -> None:
        for _, entries in each():
            for entry in entries:
                entry.stat()

    def link() -> None:
        for directory, entries in each():
            made = target / directory.name
            made.mkdir(parents=True)
            here, there = os.open(directory, os.O_RDONLY), os.open(made, os.O_RDONLY)
            for entry in entries:
                os.link(entry.name, entry.name, src_dir_fd=here, dst_dir_fd=there)
            os.fsync(there)
            os.close(here)
            os.close(there)

    def remove() -> None:
        shutil.rmtree(target)

    for call in (stat, link, remove):
        wall, cpu = time.perf_counter(), time.process_time()
        call()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        print(f"{files:,} files: only {call.__name__}: {wall:.2f} s, CPU {cpu:.2f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--groups", type=int, default=1_000_000)
    parser.add_argument("--files", type=int, default=300_000)
    parser.add_argument("--only", choices=["loader", "commands"])
    parser.add_argument("--counts", default="1000,10000,100000")
    parser.add_argument("--case", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.case:
        path, case, workers, context = given.case
        measure_loader(path, case, int(workers), context)
    if given.only != "commands":
        with tempfile.TemporaryDirectory() as root:
            measure_loaders(f"{root}/cache", given.groups, given.files)
    for count in map(int, given.counts.split(",") if given.only != "loader" else ()):
        with tempfile.TemporaryDirectory() as root:
            measure_commands(Path(root), count)


def measure_loaders(path: str, groups: int, files: int) -> None:
    """Print what datasets of a cache of so many row groups take."""
    make_cache(Path(path), groups, files)
    make_cache(Path(f"{path}-small"), 10, 4)
    print(f"index: {next(Path(path).glob(f'snapshots/*/{ROW_GROUPS}')).stat().st_size >> 20} MB")
    for case in CASES:
        print(f"{case}: {run('--case', path, case, 0, 'fork')}", flush=True)
    for context in ("fork", "spawn"):
        print(f"2 workers, {context}: {run('--case', path, 'all', 2, context)}", flush=True)


if __name__ == "__main__":
    main()
