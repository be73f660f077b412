"""How fast and how full documents are packed: pqcache beside its plain epoch, Grain and TRL.

    python benchmarks/packing.py --data /tmp/packing                    # plain, concat, best_fit, interleaved
    /venv/bin/python benchmarks/packing.py --data /tmp/packing --peer grain    # where that is installed
    /venv/bin/python benchmarks/packing.py --data /tmp/packing --peer trl
    python benchmarks/packing.py --fill                                 # per row group against per lane; reads nothing

Documents have lengths as of a lognormal distribution (median 400 tokens), and tokens as of a Zipf distribution, which
pyarrow writes with its defaults: dictionary pages and snappy. Times are CPU seconds of the process, the least of some
epochs; the decode limit is pyarrow reading the same row groups one by one, the copy that of their tokens in memory.
"fill" is the share of the places in sequences of 4,096 that hold tokens. Peers read the same files and only count what
they yield: Grain yields numpy arrays, TRL makes Arrow tables of 1,000 documents each, as ``datasets.map`` does, which
are written to an Arrow file and read from there in shuffled batches, as numpy arrays.
"""

from __future__ import annotations

import argparse
import tempfile
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
                tokens = pa.array((np.minimum(rng.zipf(1.2, int(ends[-1])), 50_000) - 1).astype(np.int32))
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
            (", no ids", ()),
        ):
            pack = pqcache.Pack("tokens", LENGTH, strategy=strategy, ids=ids)  # type: ignore[arg-type]
            datasets[strategy + name] = ParquetDataset(root, pack=pack, batch_size=BATCH)
    times: dict[str, list[float]] = {name: [] for name in datasets}
    times |= {"decode limit": [], "copy": []}
    tokens = np.ones(sum(len(batch.column(0).flatten()) for batch in batches(root, 5000)), np.int32)
    copied = np.ones_like(tokens)
    for epoch in range(epochs + 1):
        for name, dataset in datasets.items():
            dataset.set_epoch(epoch)
            began = time.process_time()
            for _ in dataset:
                pass
            times[name].append(time.process_time() - began)
        for name, work in (("decode limit", lambda: decode(root)), ("copy", lambda: np.copyto(copied, tokens))):
            began = time.process_time()
            work()
            times[name].append(time.process_time() - began)
    plain = min(times["plain"][1:])
    for name, taken in times.items():
        least, fill = min(taken[1:]), datasets[name].fill if name in datasets else None
        print(f"{name:32} {least:6.3f} s  {least / plain:5.2f} x plain  {f'fill {fill:.4f}' if fill else ''}")


def decode(root: Path) -> None:
    """Decode all row groups on one thread and drop them, as pqcache's readers do without making batches."""
    for path in sorted(root.glob("*.parquet")):
        file = pq.ParquetFile(path, pre_buffer=False, buffer_size=1 << 16)
        for group in range(file.num_row_groups):
            file.read_row_group(group, use_threads=False)


def fills() -> None:
    """Print how full sequences are when documents are packed by row group, and all documents of a lane at once.

    A row group of so many MB holds as many tokens of 1.7 bytes, which is what they take in the files of ``write``. A
    lane has 64 MB of row groups. Packing by lane is best-fit over all its documents, which no loader could hold.
    """
    from pqcache import Pack
    from pqcache.reader.packing import count_packs

    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(6, 1, 64_000), 1, 20_000).astype(np.int64)
    ends = np.cumsum(lengths)
    of_lane = lengths[: np.searchsorted(ends, 64e6 / 1.7)]
    for length in (2048, 4096, 8192):
        for strategy in ("concat", "best_fit"):
            found = []
            for megabytes in (1, 8, 32, 64):
                marks = np.arange(0, of_lane.sum(), megabytes * 1e6 / 1.7)[1:]
                groups = np.split(of_lane, np.searchsorted(np.cumsum(of_lane), marks))
                spec = Pack("tokens", length, strategy=strategy)
                sequences = sum(count_packs(spec, *np.unique(group, return_counts=True))[0] for group in groups)
                found.append(100 * (1 - of_lane.sum() / (sequences * length)))
            row = "  ".join(f"{padding:6.3f}" for padding in found)
            print(f"{length:5} {strategy:9} padding in %, row groups of 1, 8, 32 MB, and per lane: {row}")


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
    """Pack by the functions that TRL's ``pack_dataset`` calls, and read what they made by Hugging Face datasets."""
    from datasets import Dataset
    from trl.data_utils import _pack_bfd, _pack_wrapped

    how = {"bfd_split": lambda t: _pack_bfd(t, LENGTH, "split"), "wrapped": lambda t: _pack_wrapped(t, LENGTH)}
    for name, pack in how.items():
        began, tokens, packed = time.process_time(), 0, []
        for batch in batches(root, 1000):
            packed.append(pack(pa.Table.from_batches([batch])).select(["tokens"]))
            tokens += len(batch.column(0).flatten())
        made = time.process_time()
        with tempfile.NamedTemporaryFile() as file:
            with pa.ipc.new_stream(file.name, packed[0].schema) as writer:
                writer.write_table(pa.concat_tables(packed).cast(packed[0].schema))
            dataset = Dataset.from_file(file.name).with_format("numpy")
            for numbers in np.array_split(np.random.default_rng(0).permutation(len(dataset)), len(dataset) // BATCH):
                dataset[numbers.tolist()]
        read, fill = time.process_time(), tokens / (len(dataset) * LENGTH)
        print(f"{name:32} {made - began:6.2f} s, and {read - made:.2f} s to write and read it  fill {fill:.4f}")


def main() -> None:
    """Read the command line and measure."""
    parser = argparse.ArgumentParser(description="Compare ways to pack documents.")
    parser.add_argument("--data", type=Path, default=Path("/tmp/packing"))
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--peer", choices=["grain", "trl"])
    parser.add_argument("--fill", action="store_true", help="only print how full sequences are")
    options = parser.parse_args()
    if options.fill:
        fills()
        return
    write(options.data)
    if options.peer is None:
        ours(options.data, options.epochs)
    else:
        {"grain": grain_peer, "trl": trl_peer}[options.peer](options.data)


if __name__ == "__main__":
    main()
