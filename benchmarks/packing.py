"""How fast and how full documents are packed: pqcache beside its plain epoch, Grain and TRL.

    python benchmarks/packing.py --data /tmp/packing                    # plain, concat, best_fit, interleaved
    /venv/bin/python benchmarks/packing.py --data /tmp/packing --peer grain    # where that is installed
    /venv/bin/python benchmarks/packing.py --data /tmp/packing --peer trl

Documents have lengths as of a lognormal distribution (median 400 tokens). Times are CPU seconds of the process, the
least of some epochs. "fill" is the share of the places in sequences of 4,096 that hold tokens. Peers read the same
files and only count what they yield: Grain yields numpy arrays, TRL makes Arrow tables of 1,000 documents each, as
``datasets.map`` does, which are read in a second pass that is not counted.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

LENGTH, BATCH = 4096, 8


def write(root: Path, files: int = 4, groups: int = 5, documents: int = 5000) -> None:
    """Write the documents once."""
    root.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    for file in range(files):
        path = root / f"{file}.parquet"
        lengths = [np.clip(rng.lognormal(6, 1, documents), 1, 20_000).astype(np.int64) for _ in range(groups)]
        if path.exists():
            continue
        schema = pa.schema([("tokens", pa.list_(pa.int32()))])
        with pq.ParquetWriter(path, schema) as writer:
            for each in lengths:
                ends = np.concatenate([[0], np.cumsum(each)]).astype(np.int32)
                tokens = pa.array(rng.integers(0, 50_000, int(ends[-1])).astype(np.int32))
                writer.write_table(
                    pa.table({"tokens": pa.ListArray.from_arrays(pa.array(ends), tokens)}, schema=schema)
                )


def ours(root: Path, epochs: int) -> None:
    """Compare packed epochs with the plain one of the same bytes."""
    import pqcache
    from pqcache.torch import ParquetDataset

    warnings.simplefilter("ignore")
    datasets: dict[str, ParquetDataset] = {"plain": ParquetDataset(root, columns=["tokens"], batch_size=54)}
    for strategy in ("concat", "best_fit"):
        for name, ids in (
            ("", ("document_ids", "position_ids", "cu_seqlens")),
            (", cu_seqlens alone", ("cu_seqlens",)),
        ):
            pack = pqcache.Pack("tokens", LENGTH, strategy=strategy, ids=ids)  # type: ignore[arg-type]
            datasets[strategy + name] = ParquetDataset(root, pack=pack, batch_size=BATCH)
    times: dict[str, list[float]] = {name: [] for name in datasets}
    for epoch in range(epochs + 1):
        for name, dataset in datasets.items():
            dataset.set_epoch(epoch)
            began = time.process_time()
            for _ in dataset:
                pass
            times[name].append(time.process_time() - began)
    plain = min(times["plain"][1:])
    for name, dataset in datasets.items():
        least, fill = min(times[name][1:]), dataset.fill
        print(f"{name:32} {least:6.2f} s  {least / plain:5.2f} x plain  {f'fill {fill:.4f}' if fill else ''}")


def batches(root: Path, rows: int) -> Iterator[pa.RecordBatch]:
    """Yield the documents, so many at a time."""
    for path in sorted(root.glob("*.parquet")):
        yield from pq.ParquetFile(path).iter_batches(rows)


def grain_peer(root: Path) -> None:
    """Pack by Grain's iterators, which take documents one by one; longer ones are cut to a sequence."""
    import grain
    from grain import experimental as packers

    documents = [np.asarray(v.values)[:LENGTH] for b in batches(root, 5000) for v in b.column(0)][::4]
    tokens = sum(map(len, documents))
    how: dict[str, Callable[[Any], Any]] = {
        f"{kind.__name__} {bins} bins": lambda d, kind=kind, bins=bins: kind(
            d, length_struct={"tokens": LENGTH}, num_packing_bins=bins
        )
        for kind in (packers.FirstFitPackIterDataset, packers.BestFitPackIterDataset)
        for bins in (64, 512)
    }
    how["concat"] = lambda d: packers.ConcatThenSplitIterDataset(d, length_struct={"tokens": LENGTH})
    for name, make in how.items():
        source = grain.MapDataset.source(documents).map(lambda x: {"tokens": x})
        began = time.process_time()
        sequences = sum(1 for _ in make(source.to_iter_dataset(grain.ReadOptions(num_threads=0))))
        each = (time.process_time() - began) / tokens
        print(f"{name:32} {each * 1e9:5.1f} ns a token, without reading  fill {tokens / (sequences * LENGTH):.4f}")


def trl_peer(root: Path) -> None:
    """Pack by the functions that TRL's ``pack_dataset`` calls."""
    from trl.data_utils import _pack_bfd, _pack_wrapped

    how = {"bfd_split": lambda t: _pack_bfd(t, LENGTH, "split"), "wrapped": lambda t: _pack_wrapped(t, LENGTH)}
    for name, pack in how.items():
        began, tokens, sequences = time.process_time(), 0, 0
        for batch in batches(root, 1000):
            sequences += len(pack(pa.Table.from_batches([batch])))
            tokens += len(batch.column(0).flatten())
        print(f"{name:32} {time.process_time() - began:6.2f} s  fill {tokens / (sequences * LENGTH):.4f}")


def main() -> None:
    """Read the command line and measure."""
    parser = argparse.ArgumentParser(description="Compare ways to pack documents.")
    parser.add_argument("--data", type=Path, default=Path("/tmp/packing"))
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--peer", choices=["grain", "trl"])
    options = parser.parse_args()
    write(options.data)
    if options.peer is None:
        ours(options.data, options.epochs)
    else:
        {"grain": grain_peer, "trl": trl_peer}[options.peer](options.data)


if __name__ == "__main__":
    main()
