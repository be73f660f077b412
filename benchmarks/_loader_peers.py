"""The loaders that ``loader.py`` compares with, each as its documentation says to use it for shuffled batches.

Each is a function of (directory, dataset, workers) that yields epochs of batches, as dicts from every column to its
rows: numbers as tensors, tokens as one array (rows, 512). Strings, binary and ragged lists are whatever the library
gives at least cost, packed Arrow arrays or ragged tensors where it can and Python objects where it cannot. Nulls in
numbers are filled, as by pqcache. Formats that are written row by row lie beside the directory, written once, with some
rows of each row group.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from _loader_data import FILL, SHAPES

ROWS = {"multimodal": 40_000, "tabular": 200_000, "tokens": 40_000}  # of formats that are written row by row
SHARDS = 16
BATCH = {"multimodal": 256, "tabular": 4096, "tokens": 256}
GROUP = {name: (32 << 20) // shape.row_bytes for name, shape in SHAPES.items()}  # rows of a row group
CORES = len(os.sched_getaffinity(0))
Epochs = Iterator[Iterator[Any]]
QUIET = {  # nobody calls home
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "LITDATA_DISABLE_VERSION_CHECK": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}


def some_rows(path: Path, name: str) -> pa.Table:
    """Return the first rows of each row group, as many of each, in order."""
    readers = [pq.ParquetFile(file) for file in sorted(path.glob("*.parquet"))]
    each = ROWS[name] // sum(reader.num_row_groups for reader in readers)
    groups = ((reader, number) for reader in readers for number in range(reader.num_row_groups))
    return pa.concat_tables([r.read_row_group(n).slice(0, each) for r, n in groups])


def samples(path: Path, name: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the first rows as dicts of numbers, strings, bytes and arrays, each with its number."""
    number = 0
    for batch in some_rows(path, name).to_batches(max_chunksize=1000):
        for row in batch.to_pylist():
            row = {k: FILL[k] if v is None else v for k, v in row.items()}
            yield number, {k: np.array(v, np.int32) if isinstance(v, list) else v for k, v in row.items()}
            number += 1


def written(path: Path, kind: str, write: Callable[[Path], None]) -> Path:
    directory = path.with_name(f"{path.name}-{kind}")
    if not (directory / "_done").exists():
        directory.mkdir(parents=True, exist_ok=True)
        write(directory)
        os.sync()
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
        if name in FILL:
            column = [FILL[name] if cell is None else cell for cell in column]
        found[name] = torch.tensor(column) if isinstance(FILL.get(name, value), (int, float)) else column
    if set(found) == {"tokens"}:
        found["tokens"] = torch.from_numpy(np.stack(found["tokens"]))
    return found


def tensors(table: pa.Table, name: str) -> dict[str, Any]:
    """Return a table's columns: numbers as tensors that share its memory, the rest as Arrow arrays."""
    import torch

    found = {}
    for column in table.column_names:
        array = table[column]
        array = array if isinstance(array, pa.Array) else array.combine_chunks()
        if isinstance(array, pa.ChunkedArray):  # of one chunk
            array = array.chunk(0)
        if array.null_count and pa.types.is_primitive(array.type):
            array = pc.fill_null(array, FILL[column])
        if name == "tokens":
            found[column] = torch.from_numpy(array.flatten().to_numpy()).reshape(len(table), -1)
        else:
            number = pa.types.is_primitive(array.type)
            found[column] = torch.from_numpy(array.to_numpy()) if number else array
    return found


class Rows:
    """A map-style dataset whose items are batches: ``take`` is given the numbers of a batch's rows."""

    def __init__(self, take: Callable[[Any], Any]) -> None:
        self.take = take

    def __getitem__(self, numbers: Any) -> Any:
        return self.take(numbers)


class Permutations:
    """A sampler of batches: a new permutation of all rows each epoch."""

    def __init__(self, rows: int, batch: int) -> None:
        self.rows, self.batch, self.epoch = rows, batch, 0

    def __iter__(self) -> Iterator[Any]:
        self.epoch += 1
        order = np.random.default_rng(self.epoch).permutation(self.rows)
        return (order[first : first + self.batch] for first in range(0, self.rows, self.batch))


def taken(take: Callable[[Any], Any], rows: int, name: str, workers: int, start: str | None = None) -> Epochs:
    """Yield epochs of a random permutation, the rows of a batch taken at once, by persistent workers."""
    from torch.utils.data import DataLoader

    sampler = Permutations(rows, BATCH[name])
    loader = DataLoader(
        Rows(take),  # type: ignore[arg-type]
        batch_size=None,
        sampler=sampler,  # type: ignore[arg-type]
        num_workers=workers,
        collate_fn=keep,
        persistent_workers=workers > 0,
        multiprocessing_context=start if workers else None,
    )
    while True:
        yield iter(loader)


def as_tensors(epochs: Epochs, name: str) -> Epochs:
    """Workers send tables, which is cheaper than tensors; here the trainer makes tensors of them."""
    for epoch in epochs:
        yield (tensors(table, name) for table in epoch)


def hugging_face(path: Path, name: str, workers: int) -> Epochs:
    """Map-style over Arrow files mapped into memory, in random order; batches are Arrow tables, its fastest format."""
    import datasets

    ds = datasets.load_dataset("parquet", data_files=str(path / "*.parquet"), split="train").with_format("arrow")
    # As one chunk: of slices workers would send what they are slices of.
    return as_tensors(taken(lambda numbers: ds[numbers].combine_chunks(), len(ds), name, workers), name)


def in_memory(path: Path, name: str, workers: int) -> Epochs:
    """Everything decoded and in memory before the first epoch: numpy for numbers, Arrow for texts."""
    import torch

    table = pq.read_table(sorted(path.glob("*.parquet"))).combine_chunks()
    if name == "multimodal":
        yield from as_tensors(taken(lambda rows: table.take(pa.array(rows)), len(table), name, workers), name)
    columns = {n: c.numpy() if isinstance(c, torch.Tensor) else c for n, c in tensors(table, name).items()}

    def take(rows: Any) -> dict[str, Any]:
        return {n: c[rows] if isinstance(c, np.ndarray) else c.take(pa.array(rows)) for n, c in columns.items()}

    for epoch in taken(take, len(table), name, workers):
        yield (
            {n: torch.from_numpy(c) if isinstance(c, np.ndarray) else c for n, c in batch.items()} for batch in epoch
        )


def ray_data(path: Path, name: str, workers: int) -> Epochs:
    """Blocks and files in random order, and a buffer of 8 row groups that rows are shuffled in."""
    import ray

    ray.init(num_cpus=workers or CORES, logging_level="error", include_dashboard=False, _node_ip_address="127.0.0.1")
    ds = ray.data.read_parquet([str(file) for file in sorted(path.glob("*.parquet"))], shuffle="files")
    for epoch in range(1000):
        batches = ds.iter_batches(
            batch_size=BATCH[name],
            batch_format="pyarrow",
            local_shuffle_buffer_size=8 * GROUP[name],
            local_shuffle_seed=epoch,
        )
        yield (tensors(table, name) for table in batches)


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
        for number, row in samples(path, name):
            features = tf.train.Features(feature={k: feature(v) for k, v in row.items()})
            writers[number * SHARDS // ROWS[name]].write(tf.train.Example(features=features).SerializeToString())
        for writer in writers:
            writer.close()

    files = sorted(str(p) for p in written(path, "tfrecord", write).glob("*.tfrecord"))
    _, row = next(samples(path, name))
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
        with wds.ShardWriter(str(directory / "%02d.tar"), maxcount=-(-ROWS[name] // SHARDS), verbose=0) as sink:
            for number, row in samples(path, name):
                sink.write({"__key__": f"{number:09d}", "row.pyd": pickle.dumps(row)})

    files = sorted(str(p) for p in written(path, "tar", write).glob("*.tar"))
    for epoch in range(1000):
        ds: Any = wds.WebDataset(files, shardshuffle=SHARDS, seed=epoch, empty_check=False)
        ds = ds.shuffle(5000)
        ds = ds.decode().map(lambda sample: sample["row.pyd"]).batched(BATCH[name], collation_fn=by_column)
        yield iter(wds.WebLoader(ds, batch_size=None, num_workers=workers))


def mosaic(path: Path, name: str, workers: int) -> Epochs:
    import _stub_torchvision  # noqa: F401
    from streaming import MDSWriter, StreamingDataset
    from torch.utils.data import DataLoader

    def encoding(value: Any) -> str:
        if isinstance(value, np.ndarray):
            return "ndarray:int32"
        return {int: "int", float: "float64", str: "str", bytes: "bytes"}[type(value)]

    def write(directory: Path) -> None:
        _, first = next(samples(path, name))
        with MDSWriter(out=str(directory), columns={k: encoding(v) for k, v in first.items()}) as sink:
            for _, row in samples(path, name):
                sink.write(row)

    directory = written(path, "mds", write)
    ds = StreamingDataset(local=str(directory), shuffle=True, batch_size=BATCH[name])
    while True:
        yield iter(DataLoader(ds, batch_size=BATCH[name], num_workers=workers, collate_fn=by_column))


def litdata(path: Path, name: str, workers: int) -> Epochs:
    """Its Parquet mode: an index is written once, the files are kept."""
    import litdata as ld

    def write(directory: Path) -> None:
        ld.index_parquet_dataset(str(path), str(directory))

    index = written(path, "litdata", write)
    small = name == "tabular"  # which of its two ways is faster: row groups as dicts, or files as polars' frames
    items = ld.streaming.item_loader.ParquetLoader(low_memory=small)
    ds = ld.StreamingDataset(str(path), item_loader=items, shuffle=True, index_path=str(index))
    loader = ld.StreamingDataLoader(
        ds,
        batch_size=BATCH[name],
        num_workers=workers,
        collate_fn=by_column,
        persistent_workers=workers > 0,
        multiprocessing_context="spawn" if workers else None,  # it refuses fork
    )
    while True:
        yield iter(loader)


def grain(path: Path, name: str, workers: int) -> Epochs:
    """Pickled rows in ArrayRecord, which it says to store random rows in."""
    import grain as library
    from array_record.python.array_record_module import ArrayRecordWriter

    def write(directory: Path) -> None:
        writers = [ArrayRecordWriter(str(directory / f"{n:02d}.arrayrecord"), "group_size:1") for n in range(SHARDS)]
        for number, row in samples(path, name):
            writers[number * SHARDS // ROWS[name]].write(pickle.dumps(row))
        for writer in writers:
            writer.close()

    files = sorted(str(p) for p in written(path, "arrayrecord", write).glob("*.arrayrecord"))
    rows = library.MapDataset.source(library.sources.ArrayRecordDataSource(files))
    ahead = library.ReadOptions(num_threads=2 * CORES, prefetch_buffer_size=2 * CORES)  # 500 batches are an epoch
    for epoch in range(1000):
        batches: Any = rows.shuffle(seed=epoch).map(pickle.loads).batch(BATCH[name], batch_fn=by_column)
        batches = batches.to_iter_dataset(ahead)
        yield iter(batches.mp_prefetch(library.MultiprocessingOptions(workers)) if workers else batches)


class LanceTake:
    """Takes rows of a table, in whichever process it is sent to."""

    def __init__(self, table: Any) -> None:
        from lancedb.permutation import Permutation

        self.rows = Permutation.identity(table).with_format("arrow")

    def __call__(self, rows: Any) -> pa.Table:
        return pa.Table.from_batches([self.rows.__getitems__(rows.tolist())])


def lance(path: Path, name: str, workers: int) -> Epochs:
    """LanceDB's permutations: random rows of its own format, in workers that are spawned, as it says to."""
    import lancedb

    def write(directory: Path) -> None:
        lancedb.connect(str(directory)).create_table("rows", pq.read_table(sorted(path.glob("*.parquet"))))

    table = lancedb.connect(str(written(path, "lance", write))).open_table("rows")
    return as_tensors(taken(LanceTake(table), table.count_rows(), name, workers, "spawn"), name)


@dataclass(frozen=True)
class Peer:
    epochs: Callable[[Path, str, int], Epochs]
    title: str
    module: str = ""
    slow: bool = False  # one measurement shows it


PEERS = {
    "hf-arrow": Peer(hugging_face, "Hugging Face datasets (Arrow tables)", "datasets"),
    "in-memory": Peer(in_memory, "everything in memory, no files"),
    "mosaic": Peer(mosaic, "MosaicML Streaming", "streaming", slow=True),
    "webdataset": Peer(webdataset, "WebDataset", "webdataset", slow=True),
    "litdata": Peer(litdata, "litdata on Parquet", "litdata", slow=True),
    "grain": Peer(grain, "Grain (ArrayRecord)", "grain", slow=True),
    "lancedb": Peer(lance, "LanceDB", "lancedb", slow=True),
    "ray": Peer(ray_data, "Ray Data", "ray", slow=True),
    "tf.data": Peer(tf_data, "tf.data (TFRecord)", "tensorflow", slow=True),
}
