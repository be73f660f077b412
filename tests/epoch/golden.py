"""The order of epochs, as it was when it was fixed: ``python tests/epoch/golden.py`` writes ``golden.json`` anew.

Nothing here needs the rest of the oracle, so any version of pqcache can be asked: put it on PYTHONPATH. Windows are
given, so that no estimate of memory has a part in the order. An order is the rows of each batch, one after the other; a
change of it breaks every state that a training has saved.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import pqcache
from pqcache import Pack, SelectedRows, Sequence, Split, TokenBatches
from pqcache.torch import Loader, Mix, ParquetDataset

FILE = Path(__file__).with_name("golden.json")
GROUPS = [37, 64, 5, 128, 1, 90, 64, 64, 33, 200, 17, 64]
WEIGHTS = {"label": {0: 0.3, 1: 2.4, ...: 1.0}}
CHOICES: dict[str, dict[str, Any]] = {
    "all": {},
    "filters": {"filters": "x < 0.6"},
    "few": {"filters": "id in (3, 77, 400, 401, 402, 766)"},
    "rows": {"rows": SelectedRows.of(groups=[0, 1, 1, 3, 3, 3, 9], rows=[36, 0, 9, 1, 2, 100, 199])},
    "split": {"split": Split("id", 0.1, 0.8)},
    "sample": {"sample": 0.35},
    "limit": {"limit": 301},
    "weights": {"weights": WEIGHTS},
    "weights of a column": {"weights": "x"},
    "balance": {"balance": "label"},
    "sequence": {"sequence": Sequence(3, order_by="ts", max_gap=2, group_by="label", stride=2)},
    "concat": {"pack": Pack("tokens", 16), "batch_size": 2},
    "best_fit": {"pack": Pack("tokens", 16, strategy="best_fit"), "batch_size": 3},
    "token batches": {"pack": TokenBatches("tokens", tokens_per_batch=64)},
    "all of it": {"filters": "x < 0.9", "split": Split("id", 0.0, 0.9), "limit": 500, "weights": WEIGHTS},
}
SHAPES: list[dict[str, Any]] = [  # of every choice
    {"window": 1, "lanes": 1, "seed": 0, "epoch": 0, "batch_size": 10},
    {"window": 4, "lanes": 3, "seed": 5, "epoch": 2, "batch_size": 7},
]
MORE: list[dict[str, Any]] = [  # of all rows
    {"window": 30, "lanes": 6, "seed": -3, "epoch": 1, "batch_size": 3},
    {"window": 2, "lanes": 2, "seed": 1, "epoch": 0, "batch_size": 1},
    {"window": 3, "lanes": 5, "seed": 2**40, "epoch": 7, "batch_size": 64},
    {"window": 8, "lanes": 1, "seed": 0, "epoch": 1000, "batch_size": 5000},
    {"window": 16, "lanes": 24, "seed": 11, "epoch": 3, "batch_size": 4},
    {"window": 4, "lanes": 4, "seed": 3, "epoch": 0, "batch_size": 9, "drop_last": True},
    {"window": 4, "lanes": 4, "seed": 3, "epoch": 0, "batch_size": 9, "shuffle": False},
    {"window": 3, "lanes": 12, "seed": 4, "epoch": 1, "batch_size": 8, "num_replicas": 3, "rank": 1},
    {"window": 3, "lanes": 12, "seed": 4, "epoch": 1, "batch_size": 8, "num_replicas": 5, "rank": 4},
]


def write_table(root: Path) -> None:
    """Write rows in row groups of different sizes; nothing of them is drawn at random."""
    rows, groups = sum(GROUPS), list(GROUPS)
    ids = np.arange(rows)
    table = pa.table(
        {
            "id": ids,
            "x": ids * 37 % 101 / 101,
            "label": ids * 7 % 5 % 3,
            "ts": ids + 5 * (ids % 11 == 0),
            "tokens": pa.array(
                [[int(i) * 100 + k for k in range(int(i) * 11 % 23)] for i in ids], pa.list_(pa.int64())
            ),
        }
    )
    for name in ("a", "b", "c"):
        with pq.ParquetWriter(root / f"{name}.parquet", table.schema) as writer:
            for _ in range(len(GROUPS) // 3):
                count = groups.pop(0)
                writer.write_table(table.slice(0, count))
                table = table.slice(count)


def cases() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the options of each epoch by its name."""
    for name, choice in CHOICES.items():
        for shape in (*SHAPES, *(MORE if name == "all" else [])):
            yield f"{name}: {', '.join(f'{key}={value}' for key, value in shape.items())}", {**shape, **choice}


def rows_of(batch: Any) -> Any:
    """Return what tells the rows of a batch: their ids, or all tokens and where their documents begin."""
    names = [name for name in ("tokens", "position_ids", "id") if name in batch]
    columns = [batch[name] for name in names]
    return [column.tolist() if hasattr(column, "tolist") else column.to_list() for column in columns]


def digest(batches: list[Any]) -> str:
    """Return a digest of batches, as JSON has them."""
    return hashlib.blake2b(json.dumps(batches).encode(), digest_size=12).hexdigest()


def columns_of(options: dict[str, Any]) -> list[str] | None:
    """Return the columns that are read: the pack's own, or the fewest."""
    pack = options.get("pack")
    return None if isinstance(pack, Pack) else ["id", "tokens"] if pack is not None else ["id"]


def of_tensors(root: Path, options: dict[str, Any]) -> str:
    """Return the digest of an epoch that ``ParquetDataset`` reads."""
    options = dict(options)
    epoch = options.pop("epoch")
    dataset = ParquetDataset(root, columns_of(options), **_sized(options))
    dataset.set_epoch(epoch)
    return digest([[batch.index, rows_of(batch)] for batch in dataset])


def of_arrow(cache: pqcache.Cache, options: dict[str, Any]) -> str:
    """Return the digest of an epoch that ``Cache.batches`` reads, where its lanes are for that."""
    options = dict(options)
    rank, step, found = options.get("rank", 0), options.get("num_replicas", 1), []
    for number, batch in enumerate(cache.batches(columns_of(options), **_sized(options))):
        found.append([rank + number * step, _lists(batch)])
    return digest(found)


def _lists(batch: pa.RecordBatch) -> list[Any]:
    return [batch[name].to_pylist() for name in ("tokens", "position_ids", "id") if name in batch.schema.names]


def _sized(options: dict[str, Any]) -> dict[str, Any]:
    """Leave out the rows of a batch where tokens count."""
    return {k: v for k, v in options.items() if k != "batch_size" or not isinstance(options.get("pack"), TokenBatches)}


def mixes(root: Path) -> Iterator[tuple[str, Mix]]:
    """Yield mixes of datasets by their names."""

    def parts() -> dict[str, ParquetDataset]:
        some = {
            "low": {"filters": "id < 300", "batch_size": 5, "window": 2},
            "high": {"filters": "id >= 300", "batch_size": 9, "window": 3, "seed": 4},
            "heavy": {"weights": WEIGHTS, "batch_size": 4, "window": 2, "seed": 1},
        }
        return {name: ParquetDataset(root, ["id"], **options) for name, options in some.items()}  # type: ignore[arg-type]

    shares = {"low": 1, "high": 3, "heavy": 2}
    yield "sizes", Mix(parts(), lanes=2, seed=5)
    yield "weights", Mix(parts(), shares, lanes=6, seed=1)
    yield "all exhausted", Mix(parts(), shares, "all_exhausted", lanes=3)
    yield "50 batches", Mix(parts(), shares, 50, lanes=4, num_replicas=2, rank=1)
    yield "within a batch", Mix(parts(), within_batch=True, lanes=3, seed=2)


def of_mix(mix: Mix) -> str:
    """Return the digest of two epochs of a mix."""
    found = []
    for epoch in (0, 3):
        mix.set_epoch(epoch)
        found += [[batch.index, batch.source, rows_of(batch)] for batch in Loader(mix)]
    return digest(found)


def measured(directory: Path) -> dict[str, str]:
    """Return all digests by name, of tables that are written below a directory."""
    files, cache = directory / "files", directory / "cache"
    files.mkdir()
    write_table(files)
    pqcache.sync(files, cache)
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of windows that take more than the memory
        for name, options in cases():
            found[f"ParquetDataset, {name}"] = of_tensors(files, options)
            is_read = options["seed"] == 5 or name.startswith("all:")  # as Arrow, to show that the order is the same
            if is_read and options["lanes"] % options.get("num_replicas", 1) == 0:
                found[f"Cache.batches, {name}"] = of_arrow(pqcache.Cache.open(cache), options)
        for name, mix in mixes(files):
            found[f"Mix, {name}"] = of_mix(mix)
    return found


def main() -> None:
    """Write the file, and say whose order it has."""
    with tempfile.TemporaryDirectory() as directory:
        found = measured(Path(directory))
    FILE.write_text(json.dumps(found, indent=0) + "\n")
    print(f"{len(found)} orders of {pqcache.__file__}", file=sys.stderr)


if __name__ == "__main__":
    main()
