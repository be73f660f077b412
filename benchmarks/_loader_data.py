"""Datasets like users': skewed tokens and categories, texts of real lengths, nulls, float noise.

A name is a kind, then what writes it unless pyarrow does, then the size of its row groups unless it is 32 MB:
``tokens``, ``tabular-duckdb``, ``multimodal-8MB``, ``tokens-spark-128MB``. All writers have their defaults but for the
number of rows, or bytes, of a row group. ``dense`` is short for ``tokens-dense``.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

FILES = 4
LENGTH = 512  # tokens of a row
VOCABULARY = 50_000
WRITERS = ("pyarrow", "duckdb", "spark", "pqcache", "dense")
Numbers = np.ndarray[Any, Any]
Rng = np.random.Generator

# ---- values


@cache
def _draws(ranks: int, exponent: float) -> Numbers:
    """Return four million draws of a Zipf distribution over so many ranks: picking from them is fast."""
    chances = np.cumsum(1 / np.arange(1, ranks + 1) ** exponent)
    drawn = np.searchsorted(chances, np.random.default_rng(ranks).random(1 << 22) * chances[-1])
    return drawn.astype(np.int32)


def zipf(rng: Rng, count: int, ranks: int, exponent: float = 1.0) -> Numbers:
    """Return ranks from 0: the n-th is drawn as often as 1 / n."""
    return _draws(ranks, exponent)[rng.integers(0, 1 << 22, count)]


@cache
def _words() -> pa.Array:
    """Return 30,000 words, shorter ones first, as in texts."""
    rng = np.random.default_rng(0)
    letters = np.array(list("etaoinshrdlcumwfgypbvkjxqz"))
    lengths = np.clip(rng.normal(2 + np.log2(np.arange(1, 30_001)) / 3, 1.5), 1, 16).astype(int)
    return pa.array(["".join(letters[zipf(rng, length, 26)]) for length in lengths])


def lists(lengths: Numbers, values: pa.Array | Numbers) -> pa.ListArray:
    ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(ends), values if isinstance(values, pa.Array) else pa.array(values))


def texts(rng: Rng, rows: int) -> pa.Array:
    """Return texts of about nine words, 60 characters, some of them much longer."""
    lengths = np.clip(rng.lognormal(2.2, 0.5, rows), 1, 60).astype(int)
    return pc.binary_join(lists(lengths, _words().take(pa.array(zipf(rng, int(lengths.sum()), 30_000)))), " ")


def with_nulls(rng: Rng, values: Any, share: float) -> pa.Array:
    array = values if isinstance(values, pa.Array) else pa.array(values)
    return pc.if_else(pa.array(rng.random(len(array)) < share), pa.scalar(None, array.type), array)


# ---- kinds: (generator, number of the first row, rows)


def multimodal(rng: Rng, first: int, rows: int) -> pa.Table:
    """8 KB a row: id, title, ragged token ids, category, price, a binary of 4 to 12 KB that does not compress."""
    sizes, lengths = rng.integers(4096, 12288, rows), np.clip(rng.lognormal(3.8, 0.6, rows), 4, 256).astype(int)
    ends = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    image = pa.Array.from_buffers(pa.binary(), rows, [None, pa.py_buffer(ends), pa.py_buffer(rng.bytes(int(ends[-1])))])
    return pa.table(
        {
            "id": np.arange(first, first + rows),
            "title": with_nulls(rng, texts(rng, rows), 0.01),
            "tokens": lists(lengths, zipf(rng, int(lengths.sum()), VOCABULARY)),
            "category": with_nulls(rng, zipf(rng, rows, 1000), 0.05),
            "price": with_nulls(rng, np.round(rng.lognormal(3, 1, rows), 2).astype(np.float32), 0.03),
            "image": image,
        }
    )


def tabular(rng: Rng, first: int, rows: int) -> pa.Table:
    """26 columns: id, label, 8 float32 and 4 float64 of noise, 4 keys, 5 categories as numbers and 3 as short texts."""
    columns: dict[str, Any] = {"id": np.arange(first, first + rows), "label": zipf(rng, rows, 2, 2.0).astype(np.int8)}
    for i in range(12):
        columns[f"f{i}"] = rng.standard_normal(rows, np.float32 if i < 8 else np.float64)
    for i in range(4):
        ranks = zipf(rng, rows, 10 ** (3 + i), 1.05).astype(np.uint64)
        columns[f"k{i}"] = (ranks * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(1)).astype(np.int64)
    for i in range(5):
        columns[f"c{i}"] = zipf(rng, rows, 10 ** (1 + i % 4))
    for i in range(3):
        columns[f"s{i}"] = _words().take(pa.array(zipf(rng, rows, 10 ** (1 + i))))
    for name in NULLS["tabular"]:
        columns[name] = with_nulls(rng, columns[name], 0.3 if name == "f1" else 0.05)
    return pa.table(columns)


def tokens(rng: Rng, first: int, rows: int) -> pa.Table:
    """512 int32 tokens a row, as the list that everybody writes. The first two are the row's number."""
    numbers = zipf(rng, rows * LENGTH, VOCABULARY).reshape(rows, LENGTH)
    numbers[:, 1], numbers[:, 0] = np.divmod(np.arange(first, first + rows), VOCABULARY)
    return pa.table({"tokens": lists(np.full(rows, LENGTH), numbers.reshape(-1))})


@dataclass(frozen=True)
class Shape:
    build: Callable[[Rng, int, int], pa.Table]
    rows: int
    row_bytes: int  # in a file, as pyarrow writes it


SHAPES = {
    "multimodal": Shape(multimodal, 100_000, 8_440),
    "tabular": Shape(tabular, 4_000_000, 110),
    "tokens": Shape(tokens, 400_000, 1_000),
}
NULLS: dict[str, dict[str, Any]] = {  # what stands for a null, by column
    "multimodal": {"title": "", "category": -1, "price": 0.0},
    "tabular": {"f1": 0.0, "f9": 0.0, "c1": -1, "s1": ""},
    "tokens": {},
}

FILL: dict[str, Any] = {column: fill for columns in NULLS.values() for column, fill in columns.items()}

# ---- names and files


def parts(name: str) -> tuple[str, str, int]:
    """Return the kind, the writer and the MB of a row group that a name says."""
    kind, *others = ("tokens-" + name if name.startswith("dense") else name).split("-")
    sizes = [int(other[:-2]) for other in others if other.endswith("MB")]
    writers = [other for other in others if not other.endswith("MB")]
    if kind not in SHAPES or len(sizes) > 1 or len(writers) > 1 or not {*writers} <= {*WRITERS}:
        raise SystemExit(f"{name}: no such dataset; a name is like {', '.join(SHAPES)}, tokens-duckdb-8MB")
    return kind, (writers or ["pyarrow"])[0], (sizes or [32])[0]


def row_numbers(batch: Any, name: str) -> Numbers:
    """Return the numbers of a batch's rows in the dataset."""
    if parts(name)[0] != "tokens":
        return np.asarray(batch["id"])
    found = np.asarray(batch["tokens"])
    return found[:, 0] + found[:, 1].astype(np.int64) * VOCABULARY


def tables(name: str, rows: int, group: int) -> Iterator[Iterator[pa.Table]]:
    """Yield files as row groups."""
    rng, each = np.random.default_rng(0), rows // FILES
    for begin in range(0, each * FILES, each):
        yield (SHAPES[name].build(rng, n, min(group, begin + each - n)) for n in range(begin, begin + each, group))


def make(root: Path, name: str) -> Path:
    """Write a dataset once: 4 files, at least 8 row groups."""
    directory = root / name
    if (directory / "_done").exists():
        return directory
    kind, writer, size = parts(name)
    shutil.rmtree(directory, ignore_errors=True)
    shape = SHAPES[kind]
    group = (size << 20) // shape.row_bytes
    if writer == "pyarrow":
        directory.mkdir(parents=True)
        for number, groups in enumerate(tables(kind, max(shape.rows, 2 * FILES * group), group)):
            first = next(groups)
            with pq.ParquetWriter(directory / f"part-{number}.parquet", first.schema) as file:
                for table in chain([first], groups):
                    file.write_table(table, row_group_size=group)
    else:
        source = make(root, kind if size == 32 else f"{kind}-{size}MB")
        REWRITE[writer](source, directory, group, size << 20)
    (directory / "_done").touch()
    return directory


# ---- other writers: (source, directory, rows and bytes of a row group)


def by_pqcache(source: Path, directory: Path, rows: int, size: int) -> None:
    import pqcache

    pqcache.repartition(source, directory, row_group_size=size)


def by_pqcache_dense(source: Path, directory: Path, rows: int, size: int) -> None:
    import pqcache

    pqcache.repartition(source, directory, row_group_size=size, dense=["tokens"], narrow=True)


def by_duckdb(source: Path, directory: Path, rows: int, size: int) -> None:
    import duckdb

    directory.mkdir(parents=True)
    for file in sorted(source.glob("*.parquet")):
        duckdb.sql(f"COPY (FROM '{file}') TO '{directory / file.name}' (FORMAT parquet, ROW_GROUP_SIZE {rows})")


def by_spark(source: Path, directory: Path, rows: int, size: int) -> None:
    """Run Spark in the Python of PQCACHE_PEERS, or this one."""
    python = os.environ.get("PQCACHE_PEERS") or sys.executable
    command = [python, __file__, str(source), str(directory), str(size)]
    subprocess.run(command, check=True, env={**os.environ, "SPARK_LOCAL_IP": "127.0.0.1"})


REWRITE = {"duckdb": by_duckdb, "spark": by_spark, "pqcache": by_pqcache, "dense": by_pqcache_dense}


def _write_in_spark(source: Path, directory: Path, size: int) -> None:
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master("local[2]").config("spark.driver.memory", "4g")
    for key in ("host", "bindAddress"):
        builder = builder.config(f"spark.driver.{key}", "127.0.0.1")
    builder = builder.config("spark.ui.enabled", "false").config("spark.log.level", "ERROR")
    builder = builder.config("spark.ui.showConsoleProgress", "false")
    session = builder.config("spark.hadoop.parquet.block.size", str(size)).getOrCreate()
    directory.mkdir(parents=True)
    for file in sorted(source.glob("*.parquet")):
        session.read.parquet(str(file)).coalesce(1).write.parquet(str(directory / "_written"))
        (written,) = (directory / "_written").glob("*.parquet")
        written.rename(directory / file.name)
        shutil.rmtree(directory / "_written")
    session.stop()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Rewrite a directory of Parquet in Spark.")
    parser.add_argument("source", type=Path)
    parser.add_argument("directory", type=Path)
    parser.add_argument("size", type=int)
    options = parser.parse_args()
    _write_in_spark(options.source, options.directory, options.size)
