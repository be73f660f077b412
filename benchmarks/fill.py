"""How full row groups are, and how much is encoded twice, on data that is hard to foresee.

    python benchmarks/fill.py [--limits 8 32] [--codecs lz4 zstd] [--only step ...] [--groups 10]

Each dataset is written as one file by pyarrow, with row groups that have nothing to do with ours, and rewritten. "min"
and "median" are compressed bytes of all row groups but the last, over the limit; "again" is the share of the bytes that
were encoded more than once; "over" counts row groups beyond the limit, which must be none.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pqcache.parquet.rewrite.directory import rewrite_directory
from pqcache.parquet.rewrite.recipe import RewriteOptions

MB = 1 << 20
Rng = np.random.Generator


def blobs(rng: Rng, lengths: Any, noise: float) -> pa.Array:
    """Binary values of which a share ``noise`` is random and the rest repeats itself."""
    lengths = np.maximum(np.asarray(lengths, np.int64), 1)
    total = int(lengths.sum())
    data = np.frombuffer((b"the same words again and again, " * (total // 32 + 1))[:total], np.uint8).copy()
    random = np.flatnonzero(rng.random(total // 64 + 1) < noise)
    for shift in range(64):
        places = random * 64 + shift
        places = places[places < total]
        data[places] = rng.integers(0, 256, len(places), dtype=np.uint8)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return pa.Array.from_buffers(pa.binary(), len(lengths), [None, pa.py_buffer(offsets), pa.py_buffer(data)])


def table(rng: Rng, rows: int, first: int, length: Any, noise: float) -> pa.Table:
    """Rows of an id, a float and a blob."""
    lengths = rng.integers(length // 2, 3 * length // 2 + 1, rows)
    return pa.table(
        {"id": np.arange(first, first + rows), "x": rng.standard_normal(rows), "b": blobs(rng, lengths, noise)}
    )


def by_noise(noise_at: Callable[[float, Rng], float]) -> Callable[[Rng, float, int, int], pa.Table]:
    """Return a maker of 1 MB of rows of which a changing share does not compress."""

    def make(rng: Rng, t: float, first: int, groups: int) -> pa.Table:
        return table(rng, 1024, first, 1000, noise_at(t * groups, rng))

    return make


def skewed(rng: Rng, t: float, first: int, groups: int) -> pa.Table:
    """Small rows at the start and huge ones at the end."""
    length = int(20 * (10_000**t))
    return table(rng, max(4, MB // length), first, length, 0.7)


def mixed(rng: Rng, t: float, first: int, groups: int) -> pa.Table:
    """Lists, structs, maps, strings and binary, which change slowly."""
    n = 2_000
    sizes = rng.integers(0, 20 + int(40 * t), n)
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    words = np.array([f"word{i}" for i in range(50 + int(20_000 * t))])
    items = pa.array((rng.zipf(1.3, int(offsets[-1])) % 30_000).astype(np.int32))
    names = pa.array(words[rng.integers(0, len(words), n)])
    short = np.minimum(sizes, 5)
    ends = np.concatenate([[0], np.cumsum(short)]).astype(np.int32)
    keys = pa.array(words[rng.integers(0, 40, int(ends[-1]))])
    return pa.table(
        {
            "list": pa.ListArray.from_arrays(offsets, items),
            "struct": pa.StructArray.from_arrays([names, pa.array(rng.random(n))], ["name", "score"]),
            "map": pa.MapArray.from_arrays(ends, keys, pa.array(rng.integers(0, 9, int(ends[-1])))),
            "text": pa.array([" ".join(words[rng.integers(0, len(words), 8)]) for _ in range(n)]),
            "data": blobs(rng, rng.integers(0, 300, n), 0.3 + 0.5 * t),
        }
    )


def tabular(rng: Rng, t: float, first: int, groups: int) -> pa.Table:
    """Numbers and words sorted by a category, whose dictionaries grow."""
    n = 12_000
    many = 10 + int(200_000 * t**2)
    return pa.table(
        {
            "category": pa.array([f"category {int(40 * t)}"] * n),
            "at": np.arange(first, first + n) * 1000 + rng.integers(0, 1000, n),
            "user": pa.array([f"user{u}" for u in rng.integers(0, many, n)]),
            "code": rng.integers(0, many, n),
            "count": (rng.pareto(1.2, n) * 3).astype(np.int32),
            "x": rng.standard_normal(n).astype(np.float32),
            "y": np.round(rng.gamma(2.0, 30.0, n), 2),
        }
    )


def steady(rng: Rng, t: float, first: int, groups: int) -> pa.Table:
    """Tabular rows whose distribution does not change."""
    return tabular(rng, 0.3, first, groups)


def _pieces(rng: Rng, t: float, first: int, groups: int) -> pa.Table:
    return table(rng, 1024, first, 1000, float(rng.random()))


DATASETS: dict[str, Callable[[Rng, float, int, int], pa.Table]] = {
    "steady": steady,
    "harder and harder": by_noise(lambda at, rng: 0.05 + 0.95 * min(1.0, at / 10)),
    "easier and easier": by_noise(lambda at, rng: 1.0 - 0.95 * min(1.0, at / 10)),
    "small, then huge": skewed,
    "steps": by_noise(lambda at, rng: (0.1, 0.9, 0.4)[int(at / 1.37) % 3]),
    "periodic": by_noise(lambda at, rng: 0.5 + 0.45 * float(np.sin(at * 9))),
    "random": _pieces,
    "nested, drifting": mixed,
    "sorted, growing": tabular,
}


def main() -> None:
    """Run and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limits", nargs="*", type=int, default=[8, 32], help="row-group sizes in MB")
    parser.add_argument("--codecs", nargs="*", default=["lz4", "zstd"])
    parser.add_argument("--groups", type=int, default=10, help="uncompressed bytes of the data, in row-group sizes")
    parser.add_argument("--only", nargs="*", default=list(DATASETS), choices=list(DATASETS))
    parser.add_argument("--dir", type=Path)
    options = parser.parse_args()
    out = sys.stdout.write
    out(f"{'':20} {'':>8}  groups    min  median  again  over   MB/s\n")
    with tempfile.TemporaryDirectory(dir=options.dir) as directory:
        for name in options.only:
            for limit in options.limits:
                source = Path(directory) / "source.parquet"
                write(source, DATASETS[name], limit, options.groups)
                for codec in options.codecs:
                    target = Path(directory) / "out"
                    begin = time.perf_counter()
                    result = rewrite_directory(
                        [source], target, RewriteOptions(row_group_size=limit * MB, compression=codec)
                    )
                    seconds = time.perf_counter() - begin
                    sizes = []
                    for output in result.outputs:
                        metadata = pq.read_metadata(output.path)
                        for number in range(metadata.num_row_groups):
                            group = metadata.row_group(number)
                            sizes.append(sum(group.column(n).total_compressed_size for n in range(group.num_columns)))
                        output.path.unlink()
                    target.rmdir()
                    fills = [size / limit / MB for size in sizes[:-1]] or [0.0]
                    out(
                        f"{name:20} {limit:3} {codec:>4} {len(sizes):7} {min(fills):6.3f} "
                        f"{statistics.median(fills):7.4f} {result.encoded_again / result.encoded:6.1%} "
                        f"{sum(fill > 1 for fill in fills):5} {source.stat().st_size / MB / seconds:6.0f}\n"
                    )
                    sys.stdout.flush()


def write(path: Path, make: Callable[[Rng, float, int, int], pa.Table], limit: int, groups: int) -> None:
    """Write a dataset of about ``groups`` uncompressed row groups."""
    rng = np.random.default_rng(7)
    total, done, first, held = groups * limit * MB, 0, 0, 0
    parts: list[pa.Table] = []
    writer: pq.ParquetWriter | None = None
    while done < total:
        part = make(rng, done / total, first, groups)
        writer = writer or pq.ParquetWriter(path, part.schema, compression="snappy")
        parts.append(part)
        done += part.nbytes
        held += part.nbytes
        first += part.num_rows
        if held > 0.4 * limit * MB or done >= total:
            writer.write_table(pa.concat_tables(parts), row_group_size=1 << 30)
            parts, held = [], 0
    assert writer is not None
    writer.close()


if __name__ == "__main__":
    main()
