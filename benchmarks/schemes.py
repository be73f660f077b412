"""What encodings and codecs cost: size, and MB/s of Arrow bytes written and read by one thread.

    python benchmarks/schemes.py [--repeat 5]

"chosen" is what pqcache does: per column whatever is a tenth smaller on a sample, else plain and no codec.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from _loader_data import multimodal, tabular, tokens

from pqcache.parquet.rewrite.encodings import Encodings, choose_encodings

MB = 1 << 20


def written(table: pa.Table, open_writer: Callable[[pa.BufferOutputStream], pq.ParquetWriter]) -> pa.Buffer:
    """Return ``table`` as one Parquet file in memory."""
    sink = pa.BufferOutputStream()
    with open_writer(sink) as writer:
        writer.write_table(table, row_group_size=table.num_rows)
    return sink.getvalue()


def schemes(table: pa.Table) -> dict[str, Callable[[pa.BufferOutputStream], pq.ParquetWriter]]:
    """Return what is compared."""

    def plain(codec: str, dictionary: bool) -> Callable[[pa.BufferOutputStream], pq.ParquetWriter]:
        return lambda sink: pq.ParquetWriter(sink, table.schema, compression=codec, use_dictionary=dictionary)

    def best(codec: str, compat: bool = False) -> Callable[[pa.BufferOutputStream], pq.ParquetWriter]:
        found = choose_encodings(table.slice(0, 20_000), lambda leaf: codec, Encodings(), compat)
        return lambda sink: found.open(sink, table.schema)

    return {
        "pyarrow's default: dictionary, snappy": plain("snappy", True),
        "plain, no codec": plain("none", False),
        "plain, snappy": plain("snappy", False),
        "plain, lz4": plain("lz4", False),
        "plain, zstd": plain("zstd", False),
        "chosen, no codec": best("none"),
        "chosen, lz4 (the default)": best("lz4"),
        "chosen, zstd": best("zstd"),
        "chosen, snappy, --compat": best("snappy", True),
    }


def main() -> None:
    """Run and print a table per dataset."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5)
    repeat = parser.parse_args().repeat
    for name, make, rows in (
        ("multimodal", multimodal, 6_000),
        ("tabular", tabular, 300_000),
        ("tokens", tokens, 15_000),
    ):
        table = make(np.random.default_rng(1), 0, rows).combine_chunks()
        found = schemes(table)
        times: dict[str, tuple[list[float], list[float]]] = {scheme: ([], []) for scheme in found}
        sizes = {}
        for _ in range(repeat):
            for scheme, open_writer in found.items():  # in turns, so that a busy moment hits all of them
                begin = time.perf_counter()
                data = written(table, open_writer)
                middle = time.perf_counter()
                pq.ParquetFile(pa.BufferReader(data)).read(use_threads=False)
                times[scheme][0].append(middle - begin)
                times[scheme][1].append(time.perf_counter() - middle)
                sizes[scheme] = len(data)
        sys.stdout.write(f"\n{name}, {table.nbytes / MB:.0f} MB\n{'':38} size  write   read\n")
        for scheme, (write, read) in times.items():
            speeds = [table.nbytes / MB / statistics.median(some) for some in (write, read)]
            sys.stdout.write(f"{scheme:38} {sizes[scheme] / table.nbytes:.3f} {speeds[0]:6.0f} {speeds[1]:6.0f}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
