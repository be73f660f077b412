"""The datasets of loader.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq


def multimodal(rng: np.random.Generator, first: int, rows: int) -> pa.Table:
    """8 KB a row: id, title, ragged token ids, category, price, a binary of 4 to 12 KB that does not compress."""
    sizes = rng.integers(4096, 12288, rows)
    ends = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    image = pa.Array.from_buffers(pa.binary(), rows, [None, pa.py_buffer(ends), pa.py_buffer(rng.bytes(int(ends[-1])))])
    lengths = rng.integers(8, 129, rows)
    tokens = pa.ListArray.from_arrays(
        pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)),
        pa.array(rng.integers(0, 50_000, int(lengths.sum())), pa.int32()),
    )
    return pa.table(
        {
            "id": np.arange(first, first + rows),
            "title": [f"product number {i} with a title of some words" for i in range(first, first + rows)],
            "tokens": tokens,
            "category": rng.integers(0, 1000, rows).astype(np.int32),
            "price": rng.random(rows).astype(np.float32),
            "image": image,
        }
    )


def tabular(rng: np.random.Generator, first: int, rows: int) -> pa.Table:
    """26 columns: an id, a label, 13 floats and 11 categories of growing cardinality."""
    columns: dict[str, Any] = {"id": np.arange(first, first + rows), "label": rng.integers(0, 2, rows).astype(np.int8)}
    for i in range(13):
        columns[f"f{i}"] = rng.standard_normal(rows).astype(np.float32)
    for i in range(11):
        columns[f"c{i}"] = rng.integers(0, 10 ** (1 + i % 6), rows).astype(np.int32 if i % 2 else np.int64)
    return pa.table(columns)


def tokens(rng: np.random.Generator, first: int, rows: int) -> pa.Table:
    """512 int32 tokens a row, as the list that everybody writes."""
    numbers = rng.integers(0, 50_000, (rows, 512), np.int32)
    numbers[:, 0] = np.arange(first, first + rows)  # so that mixing can be seen
    values = pa.array(numbers.reshape(-1))
    ends = pa.array(np.arange(rows + 1, dtype=np.int32) * 512)
    return pa.table({"tokens": pa.ListArray.from_arrays(ends, values)})


SHAPES: dict[str, tuple[Callable[..., pa.Table], int, int]] = {
    "multimodal": (multimodal, 100_000, 6250),
    "tabular": (tabular, 4_000_000, 125_000),
    "tokens": (tokens, 200_000, 6250),
}


def make(root: Path, name: str) -> Path:
    """Write a dataset of 4 files once."""
    directory = root / name
    if (directory / "_done").exists():
        return directory
    if name == "dense":
        import pqcache

        pqcache.repartition(make(root, "tokens"), directory, row_group_size=16 << 20, dense=["tokens"], narrow=True)
        (directory / "_done").touch()
        return directory
    directory.mkdir(parents=True, exist_ok=True)
    build, rows, group = SHAPES[name]
    rng = np.random.default_rng(0)
    for file in range(4):
        with_group = rows // 4
        writer = None
        for first in range(file * with_group, (file + 1) * with_group, group):
            table = build(rng, first, min(group, (file + 1) * with_group - first))
            if writer is None:
                writer = pq.ParquetWriter(directory / f"part-{file}.parquet", table.schema, use_dictionary=False)
            writer.write_table(table, row_group_size=group)
        assert writer is not None
        writer.close()
    (directory / "_done").touch()
    return directory
