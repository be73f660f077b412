"""Rewriting one partition into row groups of a given size, beside what users would pick instead.

    python benchmarks/repartition.py [--scale 4] [--sizes 8 16 32 128] [--repeat 3] [--only tabular ...]

Data are those of loader.py, as pyarrow and DuckDB write them by default. Every engine rewrites the same files in a
fresh process, for which memory is made ready; the engines take turns, and medians are shown. "limit" is the share
of what only decoding plus only encoding (as pqcache does, lz4) would reach on all cores. "fill" is the compressed
size of all row groups but the last, over the target size; "again" is the share of bytes that pqcache encoded more
than once. Peak memory is the largest RSS seen less that before the work, sampled every 5 ms; of Spark it is the
whole of the JVM's RSS, whose heap is up to 4 GB. "order" says whether the rows of the files, one after the other,
are still in order. MB are megabytes of source files; a result is on disk (fsync) when the clock stops, for every
engine. Spark has a session when it starts, but for "spark cold", which starts its own. polars and Spark run in the
interpreter that PQCACHE_PEERS names, or else in this one, and are left out, by name, where they are not installed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
from _loader_data import SHAPES
from _memory import make_ready

MB = 1 << 20


# ---- data


def write_files(here: Path, kind: str, rows: int, files: int = 1, group: int | None = None, **options: Any) -> None:
    """Write ``rows`` rows of ``kind`` as ``files`` files, one at a time so that memory use is small."""
    each = rows // files
    for number in range(files):
        rng = np.random.default_rng(number)
        table = SHAPES[kind].build(rng, number * each, each)
        pq.write_table(table, here / f"part-{number:05d}.parquet", row_group_size=group or each, **options)


def write_duckdb(here: Path, kind: str, rows: int, files: int) -> None:
    """Write files as DuckDB does."""
    import duckdb

    for number in range(files):
        rows_of_file = SHAPES[kind].build(np.random.default_rng(number), number * rows // files, rows // files)
        duckdb.from_arrow(rows_of_file).write_parquet(str(here / f"part-{number:05d}.parquet"))


DATASETS: dict[str, Callable[[Path, int], None]] = {
    "multimodal": lambda here, k: write_files(here, "multimodal", 16_000 * k, 2, 1_000),
    "tabular": lambda here, k: write_files(here, "tabular", 500_000 * k, 2),
    "tabular-duckdb": lambda here, k: write_duckdb(here, "tabular", 500_000 * k, 2),
    "tokens": lambda here, k: write_files(here, "tokens", 50_000 * k, 2, 5_000),
    "one big row group": lambda here, k: write_files(
        here, "multimodal", 20_000 * k, compression="none", use_dictionary=False
    ),
    "2,000 tiny files": lambda here, k: write_files(here, "tabular", 2_000 * 150 * k, 2_000),
}


# ---- engines: (sources, target directory, row-group size) -> what the engine itself reports


def by_pqcache(compression: str) -> Callable[[list[Path], Path, int], dict[str, Any]]:
    def run(sources: list[Path], target: Path, size: int) -> dict[str, Any]:
        from pqcache.parquet.rewrite.directory import rewrite_directory
        from pqcache.parquet.rewrite.recipe import RewriteOptions

        result = rewrite_directory(sources, target, RewriteOptions(row_group_size=size, compression=compression))
        return {"again": result.encoded_again / max(1, result.encoded)}

    return run


def _rows_for(sources: list[Path], size: int) -> int:
    """Return the rows a user would ask for: the source's compressed bytes per row, divided into ``size``."""
    rows = sum(pq.read_metadata(path).num_rows for path in sources)
    return max(1, int(size / (sum(path.stat().st_size for path in sources) / rows)))


def by_pyarrow(sources: list[Path], target: Path, size: int) -> dict[str, Any]:
    rows = _rows_for(sources, size)
    schema = pq.ParquetFile(sources[0]).schema_arrow
    held: list[pa.RecordBatch] = []
    count = 0
    with pq.ParquetWriter(target / "out.parquet", schema) as writer:
        for path in sources:
            for batch in pq.ParquetFile(path, pre_buffer=False).iter_batches(batch_size=min(rows, 65_536)):
                held.append(batch)
                count += batch.num_rows
                while count >= rows:
                    table = pa.Table.from_batches(held)
                    writer.write_table(table.slice(0, rows), row_group_size=rows)
                    held = table.slice(rows).to_batches()
                    count -= rows
        if count:
            writer.write_table(pa.Table.from_batches(held), row_group_size=rows)
    return {}


def by_duckdb(compression: str) -> Callable[[list[Path], Path, int], dict[str, Any]]:
    def run(sources: list[Path], target: Path, size: int) -> dict[str, Any]:
        import duckdb

        names = ", ".join(f"'{path}'" for path in sources)
        # Without order to keep DuckDB would be faster, and the result useless for sorted data.
        duckdb.execute(
            f"copy (select * from read_parquet([{names}], hive_partitioning = false)) to '{target}/out.parquet' "
            f"(format parquet, compression {compression}, row_group_size_bytes {size}, row_group_size 100000000)"
        )
        return {}

    return run


def by_polars(compression: str) -> Callable[[list[Path], Path, int], dict[str, Any]]:
    def run(sources: list[Path], target: Path, size: int) -> dict[str, Any]:
        import polars

        rows = _rows_for(sources, size)
        frame = polars.scan_parquet(sources, hive_partitioning=False)
        frame.sink_parquet(target / "out.parquet", compression=compression, row_group_size=rows, maintain_order=True)
        return {}

    return run


def spark_session() -> Any:
    """Return the session of this process, a JVM on as many cores as there are."""
    from pyspark.sql import SparkSession

    settings = {
        "spark.driver.memory": "4g",  # decoded rows of one row group do not fit the 1 GB that is the default
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "ERROR",
    }
    builder = SparkSession.builder.master(f"local[{len(os.sched_getaffinity(0))}]")
    for key, value in settings.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


def by_spark(compression: str) -> Callable[[list[Path], Path, int], dict[str, Any]]:
    def run(sources: list[Path], target: Path, size: int) -> dict[str, Any]:
        frame = spark_session().read.parquet(*(str(path) for path in sources))
        writer = frame.write.mode("append").option("parquet.block.size", size).option("compression", compression)
        writer.parquet(str(target))
        return {}

    return run


ENGINES: dict[str, Callable[[list[Path], Path, int], dict[str, Any]]] = {
    "pqcache": by_pqcache("lz4"),
    "pqcache zstd": by_pqcache("zstd"),
    "pyarrow": by_pyarrow,
    "duckdb lz4": by_duckdb("lz4_raw"),
    "duckdb zstd": by_duckdb("zstd"),
}
PEERS = {  # no dependencies of the project, as they are only peers
    "polars": {"polars lz4": by_polars("lz4"), "polars zstd": by_polars("zstd")},
    "pyspark": {"spark lz4": by_spark("lz4_raw"), "spark zstd": by_spark("zstd"), "spark cold": by_spark("lz4_raw")},
}
PYTHON = os.environ.get("PQCACHE_PEERS", sys.executable)  # of the peers


def missing() -> list[str]:
    """Return the peers that are not installed."""
    code = f"import importlib.util as u; print(*(m for m in {list(PEERS)} if u.find_spec(m) is None))"
    return subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, check=True).stdout.split()


def in_child(engine: str, sources: list[Path], target: Path, size: int) -> None:
    """Run one engine and print what it took."""
    process = psutil.Process()
    run = {**ENGINES, **{name: run for some in PEERS.values() for name, run in some.items()}}[engine]
    for module in ("duckdb", "pandas", "polars", "pqcache.parquet.rewrite.directory"):
        with contextlib.suppress(ImportError):  # what a module takes to load is not the work
            importlib.import_module(module)
    spark = engine.startswith("spark")
    if spark and engine != "spark cold":
        spark_session()
    os.sync()
    base = 0 if spark else process.memory_info().rss
    peak = base
    done = threading.Event()

    def watched() -> psutil.Process:
        return next((child for child in process.children() if child.name() == "java"), process) if spark else process

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.005):
            peak = max(peak, watched().memory_info().rss)

    watcher = threading.Thread(target=watch)
    watcher.start()
    cpu, begin = watched().cpu_times(), time.perf_counter()
    report = run(sources, target, size)
    for path in target.glob("*.parquet"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
    seconds = time.perf_counter() - begin
    after = watched().cpu_times()
    done.set()
    watcher.join()
    spent = after.user + after.system - cpu.user - cpu.system
    print(json.dumps({"seconds": seconds, "peak": peak - base, "cpu": spent, **report}))


def measured(engine: str, sources: list[Path], target: Path, size: int) -> dict[str, Any]:
    """Return the time, memory, fill and size of one run in a fresh process."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    make_ready()
    peer = any(engine in some for some in PEERS.values())
    words = [__file__, "--child", engine, *map(str, (size, target, *sources))]
    ran = subprocess.run([PYTHON if peer else sys.executable, *words], stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    groups = []
    results = sorted(target.glob("*.parquet"))
    for path in results:
        metadata = pq.read_metadata(path)
        for number in range(metadata.num_row_groups):
            group = metadata.row_group(number)
            groups.append(sum(group.column(n).total_compressed_size for n in range(group.num_columns)))
    found["fills"] = sorted(group / size for group in groups[:-1]) or [0.0]
    found["size"] = sum(path.stat().st_size for path in results)
    first = pq.read_schema(sources[0]).names[:1]
    before, after = (
        pa.concat_tables([pq.ParquetFile(path).read(columns=first) for path in paths])[0]
        for paths in (sources, results)
    )
    found["order"] = before.equals(after)
    return found


def limits(sources: list[Path], size: int) -> tuple[float, float]:
    """Return the seconds that only decoding all of ``sources``, and only encoding it, take on all cores.

    Work is divided among threads in pieces that have nothing to do with one another, so this is what no pipeline beats.
    """
    from pqcache.parquet.rewrite.encode import encode_rows
    from pqcache.parquet.rewrite.encodings import Encodings, choose_encodings

    files = [pq.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20) for path in sources]
    parts = [(file, number) for file in files for number in range(file.num_row_groups)]

    def decode(part: tuple[pq.ParquetFile, int]) -> list[pa.Table]:
        batches = part[0].iter_batches(row_groups=[part[1]], use_threads=len(parts) == 1)
        return [pa.Table.from_batches([batch]) for batch in batches]

    def again(part: tuple[pq.ParquetFile, int]) -> list[pa.Table]:
        with pq.ParquetFile(sources[files.index(part[0])], pre_buffer=False, buffer_size=1 << 20) as own:
            return decode((own, part[1])) if len(parts) > 1 else decode(part)

    make_ready()
    with ThreadPoolExecutor() as pool:
        begin = time.perf_counter()
        tables = [table for some in pool.map(again, parts) for table in some]
        decoding = time.perf_counter() - begin
        whole = pa.concat_tables(tables)
        step = max(1, int(whole.num_rows * size / 4 / whole.nbytes))
        slices = [whole.slice(first, step).combine_chunks() for first in range(0, whole.num_rows, step)]
        encodings = choose_encodings(slices[0].slice(0, 20_000), lambda leaf: "lz4", Encodings())
        begin = time.perf_counter()
        list(pool.map(lambda table: encode_rows(table, encodings, "limit"), slices))
        return decoding, time.perf_counter() - begin


def compare(name: str, sources: list[Path], target: Path, size: int, engines: list[str], repeat: int) -> None:
    """Run the engines in turns and print a table."""
    out = sys.stdout.write
    total = sum(path.stat().st_size for path in sources)
    decode, encode = (min(found) for found in zip(*(limits(sources, size) for _ in range(2)), strict=True))
    limit = decode + encode
    out(f"\n{name}: {total / MB:.0f} MB in {len(sources)} files, row groups of {size // MB} MB; ")
    out(f"decoding alone {total / MB / decode:.0f} MB/s, encoding alone {total / MB / encode:.0f}, ")
    out(f"one after the other on all cores {total / MB / limit:.0f}: the limit\n")
    out(f"{'':14}   MB/s  ratio  limit  CPU-s/GB  peak MB   size  fill min  median    max  order  again\n")
    runs: dict[str, list[dict[str, Any]]] = {engine: [] for engine in engines}
    for turn in range(repeat):
        first = turn % len(engines)
        order = engines[first:] + engines[:first]
        # Nobody is always behind the same neighbour: how memory was left matters.
        for engine in order if turn % 2 == 0 else order[::-1]:
            runs[engine].append(measured(engine, sources, target, size))
    base = statistics.median(run["seconds"] for run in runs[engines[0]])
    for engine, found in runs.items():
        seconds = statistics.median(run["seconds"] for run in found)
        fills = found[-1]["fills"]
        again = found[-1].get("again")
        out(
            f"{engine:14} {total / MB / seconds:6.0f} {base / seconds:6.2f} {limit / seconds:6.0%} "
            f"{statistics.median(run['cpu'] for run in found) / total * 1e9:9.2f} "
            f"{max(run['peak'] for run in found) / MB:8.0f} {found[-1]['size'] / total:6.3f} "
            f"{fills[0]:9.4f} {statistics.median(fills):7.4f} {fills[-1]:6.4f} "
            f"{'yes' if found[-1]['order'] else 'no':>6} {'' if again is None else format(again, '6.1%')}\n"
        )


def main() -> None:
    """Run and print a table per dataset."""
    if sys.argv[1:2] == ["--child"]:
        engine, size, target, *sources = sys.argv[2:]
        in_child(engine, [Path(path) for path in sources], Path(target), int(size))
        return
    gone = missing()
    engines = {
        **ENGINES,
        **{name: run for module, some in PEERS.items() if module not in gone for name, run in some.items()},
    }
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=int, default=4, help="times 125, 55, 55, 50, 165 and 45 MB of data")
    parser.add_argument("--sizes", type=int, nargs="*", default=[16], help="MB of the row groups to write")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=list(DATASETS), choices=list(DATASETS))
    parser.add_argument("--engines", nargs="*", default=list(engines), choices=list(engines))
    parser.add_argument("--dir", type=Path, help="where to put the data (default: a temporary directory)")
    parser.add_argument("--out", type=Path, help="where to put the results (default: beside the data)")
    options = parser.parse_args()
    for module in gone:
        sys.stderr.write(f"{module} is not installed, left out\n")
    with (
        tempfile.TemporaryDirectory(dir=options.dir) as directory,
        tempfile.TemporaryDirectory(dir=options.out or directory) as results,
    ):
        for name in options.only:
            here = Path(directory) / "source"
            here.mkdir()
            DATASETS[name](here, options.scale)
            for size in options.sizes:
                sources, target = sorted(here.iterdir()), Path(results) / "target"
                compare(name, sources, target, size * MB, options.engines, options.repeat)
            shutil.rmtree(here)


if __name__ == "__main__":
    main()
