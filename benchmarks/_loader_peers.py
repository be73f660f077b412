"""The loaders that ``loader.py`` compares with, each as its documentation says to use it for shuffled batches.

Each is a function of (directory, dataset, workers) that yields epochs of batches, as dicts from column to rows.
Formats other than Parquet are written beside the directory, once, with the first rows only.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

ROWS = 100_000  # of the formats that are written row by row
SHARDS = 16
BATCH = {"multimodal": 256, "tabular": 4096, "tokens": 256}
CORES = len(os.sched_getaffinity(0))
Epochs = Iterator[Iterator[Any]]
QUIET = {  # nobody calls home
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "LITDATA_DISABLE_VERSION_CHECK": "1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}


def some_rows(path: Path) -> pa.Table:
    tables, rows = [], 0
    for file in sorted(path.glob("*.parquet")):
        reader = pq.ParquetFile(file)
        for group in range(reader.num_row_groups):
            if rows < ROWS:
                tables.append(reader.read_row_group(group))
                rows += len(tables[-1])
    return pa.concat_tables(tables).slice(0, ROWS).combine_chunks()


def samples(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the first rows as dicts of numbers, strings, bytes and arrays, each with its number."""
    number = 0
    for batch in some_rows(path).to_batches(max_chunksize=1000):
        for row in batch.to_pylist():
            yield number, {k: np.array(v, np.int32) if isinstance(v, list) else v for k, v in row.items()}
            number += 1


def written(path: Path, kind: str, write: Callable[[Path], None]) -> Path:
    directory = path.with_name(f"{path.name}-{kind}")
    if not (directory / "_done").exists():
        directory.mkdir(parents=True, exist_ok=True)
        write(directory)
        (directory / "_done").touch()
    return directory


def keep(batch: Any) -> Any:
    return batch


def by_column(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Collate: numbers to tensors, the rest to lists."""
    import torch

    found: dict[str, Any] = {}
    for name, value in rows[0].items():
        column = [row[name] for row in rows]
        found[name] = torch.tensor(column) if isinstance(value, (int, float)) else column
    if set(found) == {"tokens"}:
        found["tokens"] = torch.from_numpy(np.stack(found["tokens"]))
    return found


def arrays(table: pa.Table, name: str) -> dict[str, Any]:
    """Return a table's columns as Arrow has them, tokens as a numpy array (rows, 512)."""
    table = table.combine_chunks()
    found = {n: table[n].chunk(0) if table[n].num_chunks else table[n] for n in table.column_names}
    if name == "tokens":
        found["tokens"] = found["tokens"].flatten().to_numpy().reshape(len(table), -1)
    return found


def hugging_face(path: Path, name: str, workers: int) -> Epochs:
    """Map-style over Arrow files mapped into memory, in random order, batches of it at once."""
    import datasets
    from torch.utils.data import DataLoader, Dataset

    ds = datasets.load_dataset("parquet", data_files=str(path / "*.parquet"), split="train").with_format("torch")

    class Rows(Dataset):  # type: ignore[type-arg]
        def __getitem__(self, rows: Any) -> Any:
            return ds[rows]

    for epoch in range(1000):
        order = np.random.default_rng(epoch).permutation(len(ds))
        batches = [b.tolist() for b in np.array_split(order, -(-len(order) // BATCH[name]))]
        loader = DataLoader(Rows(), batch_size=None, sampler=batches, num_workers=workers, collate_fn=keep)
        yield iter(loader)


def hugging_face_arrow(path: Path, name: str, workers: int) -> Epochs:
    """The same, but the trainer gets Arrow tables: no tensors are made, which is as fast as it goes."""
    import datasets
    from torch.utils.data import DataLoader, Dataset

    ds = datasets.load_dataset("parquet", data_files=str(path / "*.parquet"), split="train").with_format("arrow")

    class Rows(Dataset):  # type: ignore[type-arg]
        def __getitem__(self, rows: Any) -> Any:
            return arrays(ds[rows], name)

    for epoch in range(1000):
        order = np.random.default_rng(epoch).permutation(len(ds))
        batches = np.array_split(order, -(-len(order) // BATCH[name]))
        loader = DataLoader(Rows(), batch_size=None, sampler=batches, num_workers=workers, collate_fn=keep)
        yield iter(loader)


def petastorm(path: Path, name: str, workers: int) -> Epochs:
    from petastorm import make_batch_reader
    from petastorm.pytorch import BatchedDataLoader

    for epoch in range(1000):
        reader = make_batch_reader(
            path.as_uri(), num_epochs=1, seed=epoch, reader_pool_type="thread", workers_count=workers or CORES
        )
        loader = BatchedDataLoader(reader, batch_size=BATCH[name], shuffling_queue_capacity=SHARDS * 125_000)
        yield iter(loader)


def ray_data(path: Path, name: str, workers: int) -> Epochs:
    import ray

    ray.init(num_cpus=workers or CORES, logging_level="error", include_dashboard=False, _node_ip_address="127.0.0.1")
    ds = ray.data.read_parquet([str(file) for file in sorted(path.glob("*.parquet"))])
    kind = "pyarrow" if name == "multimodal" else "numpy"
    for epoch in range(1000):
        batches = ds.iter_batches(
            batch_size=BATCH[name],
            batch_format=kind,
            local_shuffle_buffer_size=BATCH[name] * 64,
            local_shuffle_seed=epoch,
        )
        yield ({n: b[n] for n in b.column_names} if kind == "pyarrow" else b for b in batches)


def tf_data(path: Path, name: str, workers: int) -> Epochs:
    """TFRecord shards, interleaved and shuffled in a buffer; tensors of TensorFlow's own."""
    import tensorflow as tf

    def feature(value: Any) -> Any:
        if isinstance(value, float):
            return tf.train.Feature(float_list=tf.train.FloatList(value=[value]))
        if isinstance(value, (str, bytes)):
            data = value.encode() if isinstance(value, str) else value
            return tf.train.Feature(bytes_list=tf.train.BytesList(value=[data]))
        return tf.train.Feature(int64_list=tf.train.Int64List(value=np.atleast_1d(value)))

    def write(directory: Path) -> None:
        writers = [tf.io.TFRecordWriter(str(directory / f"{n:02d}.tfrecord")) for n in range(SHARDS)]
        for number, row in samples(path):
            features = tf.train.Features(feature={k: feature(v) for k, v in row.items()})
            writers[number * SHARDS // ROWS].write(tf.train.Example(features=features).SerializeToString())
        for writer in writers:
            writer.close()

    files = sorted(str(p) for p in written(path, "tfrecord", write).glob("*.tfrecord"))
    _, row = next(samples(path))
    spec: dict[str, Any] = {}
    for key, value in row.items():
        if isinstance(value, np.ndarray):
            fixed = tf.io.FixedLenFeature([len(value)], tf.int64)
            spec[key] = fixed if name == "tokens" else tf.io.RaggedFeature(tf.int64)
        else:
            kind = tf.float32 if isinstance(value, float) else tf.int64 if isinstance(value, int) else tf.string
            spec[key] = tf.io.FixedLenFeature([], kind)
    threads = workers or CORES
    options = tf.data.Options()
    options.threading.private_threadpool_size = threads
    for epoch in range(1000):
        ds = tf.data.Dataset.from_tensor_slices(files).shuffle(SHARDS, seed=epoch)
        ds = ds.interleave(tf.data.TFRecordDataset, cycle_length=SHARDS, num_parallel_calls=threads)
        ds = ds.shuffle(BATCH[name] * 16, seed=epoch).batch(BATCH[name])
        ds = ds.map(lambda rows: tf.io.parse_example(rows, spec), num_parallel_calls=threads)
        yield iter(ds.prefetch(4).with_options(options))


def webdataset(path: Path, name: str, workers: int) -> Epochs:
    import webdataset as wds

    def write(directory: Path) -> None:
        with wds.ShardWriter(str(directory / "%02d.tar"), maxcount=-(-ROWS // SHARDS), verbose=0) as sink:
            for number, row in samples(path):
                sink.write({"__key__": f"{number:09d}", "row.pyd": pickle.dumps(row)})

    files = sorted(str(p) for p in written(path, "tar", write).glob("*.tar"))
    for epoch in range(1000):
        ds = wds.WebDataset(files, shardshuffle=SHARDS, seed=epoch, empty_check=False).shuffle(BATCH[name] * 16)
        ds = ds.decode().map(lambda sample: sample["row.pyd"]).batched(BATCH[name], collation_fn=by_column)
        yield iter(wds.WebLoader(ds, batch_size=None, num_workers=workers))


def mosaic(path: Path, name: str, workers: int) -> Epochs:
    from streaming import MDSWriter, StreamingDataset
    from torch.utils.data import DataLoader

    def encoding(value: Any) -> str:
        if isinstance(value, np.ndarray):
            return "ndarray:int32"
        return {int: "int", float: "float64", str: "str", bytes: "bytes"}[type(value)]

    def write(directory: Path) -> None:
        _, first = next(samples(path))
        with MDSWriter(out=str(directory), columns={k: encoding(v) for k, v in first.items()}) as sink:
            for _, row in samples(path):
                sink.write(row)

    directory = written(path, "mds", write)
    ds = StreamingDataset(local=str(directory), shuffle=True, batch_size=BATCH[name])
    while True:
        yield iter(DataLoader(ds, batch_size=BATCH[name], num_workers=workers, collate_fn=by_column))


def litdata(path: Path, name: str, workers: int) -> Epochs:
    """Its Parquet mode: an index is written once, the files stay."""
    import litdata as ld

    def write(directory: Path) -> None:
        ld.index_parquet_dataset(str(path), str(directory))

    index = written(path, "litdata", write)
    ds = ld.StreamingDataset(
        str(path), item_loader=ld.streaming.item_loader.ParquetLoader(), shuffle=True, index_path=str(index)
    )
    while True:
        loader = ld.StreamingDataLoader(ds, batch_size=BATCH[name], num_workers=workers, collate_fn=by_column)
        yield iter(loader)


def lance(path: Path, name: str, workers: int) -> Epochs:
    """Random rows, a batch at a time."""
    import lance as library

    def write(directory: Path) -> None:
        library.write_dataset(some_rows(path), str(directory / "data.lance"))

    ds = library.dataset(str(written(path, "lance", write) / "data.lance"))
    for epoch in range(1000):
        order = np.random.default_rng(epoch).permutation(ds.count_rows())
        parts = np.array_split(order, -(-len(order) // BATCH[name]))
        yield (arrays(ds.take(np.sort(part)), name) for part in parts)


PEERS: dict[str, tuple[Callable[[Path, str, int], Epochs], str | None]] = {
    "huggingface": (hugging_face, "datasets"),
    "hf-arrow": (hugging_face_arrow, "datasets"),
    "petastorm": (petastorm, "petastorm"),
    "ray": (ray_data, "ray"),
    "tf.data": (tf_data, "tensorflow"),
    "webdataset": (webdataset, "webdataset"),
    "mosaic": (mosaic, "streaming"),
    "litdata": (litdata, "litdata"),
    "lance": (lance, "lance"),
}
