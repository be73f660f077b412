"""Shuffles all rows of a partition directory, in memory independent of their number.

Each row, in order, draws 64 random bits, and the rows are sorted by them, so the result depends on rows and seed alone.
Rows that don't fit in memory go to disk, to 64 buckets by the topmost bits; a bucket that is too large is split by the
next bits.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.types as pt

from pqcache.parquet.arrow import Floats, take_of_table
from pqcache.parquet.rewrite.decode import RowBatch
from pqcache.parquet.rewrite.files import write_errors

_BITS = 6  # of a key, by which rows are divided among buckets
_WORD = (1 << 64) - 1

Keys = npt.NDArray[np.uint64]


def shuffle_rows(
    stream: Iterable[RowBatch],
    seed: int,
    limit: int,
    batch_bytes: int,
    place: Path,
    before: tuple[int, int] | None = None,
) -> Iterator[RowBatch]:
    """Yield the rows of ``stream`` permuted, in batches of about ``batch_bytes`` Arrow bytes.

    About twice ``limit`` Arrow bytes stay in memory, and the values of each dictionary column once; the rest goes to
    the directory ``place``, which is made on demand and removed at the end.

    ``before`` is the seed of an earlier shuffle of these rows, and their number. The result is as if that shuffle
    hadn't happened, which takes 16 bytes of memory per row.

    Raises:
        PqcacheError: ``place`` can't be written.
    """
    draw = _again(seed, *before) if before else _random(seed).random_raw
    dictionaries = _Dictionaries()
    ratios: list[tuple[Floats, int]] = []
    done = 0

    def parts() -> Iterator[pa.Table]:
        nonlocal done
        for item in stream:
            if rows := item.table.num_rows:
                ratios.append((item.ratios, rows))
                numbers = np.asarray(item.numbers, np.int64)
                table = dictionaries.coded(item.table).append_column("key", pa.array(draw(rows)))
                yield table.append_column("number", pa.array(numbers))
            done = item.done

    try:
        total = yielded = 0
        mean: Floats | None = None
        for part in _in_order(parts(), 64, limit, place):
            if mean is None:  # all input has been read
                mean = np.average([ratio for ratio, _ in ratios], axis=0, weights=[rows for _, rows in ratios])
                total = sum(rows for _, rows in ratios)
            table, numbers = part.select(range(part.num_columns - 2)), part.column(part.num_columns - 1).to_numpy()
            step = max(1, int(batch_bytes * table.num_rows / max(1, table.nbytes)))
            for low in range(0, table.num_rows, step):
                some = dictionaries.decoded(table.slice(low, step))
                yielded += some.num_rows
                yield RowBatch(table=some, ratios=mean, numbers=numbers[low : low + step], done=done * yielded // total)
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _random(seed: int) -> np.random.Philox:
    return np.random.Philox(key=np.array([seed & _WORD, 0], np.uint64))


def _again(seed: int, before: int, rows: int) -> Callable[[int], Keys]:
    """Draw the keys of ``seed`` for the original order of rows, which come in the order of the seed ``before``."""
    first = np.argsort(_random(before).random_raw(rows), kind="stable")
    keys: Keys = _random(seed).random_raw(rows)[first]
    at = 0

    def draw(count: int) -> Keys:
        nonlocal at
        at += count
        return keys[at - count : at]

    return draw


# ---- Tables whose last two columns are the keys and numbers of rows


def _keys(table: pa.Table) -> Keys:
    keys: Keys = table.column(table.num_columns - 2).to_numpy()
    return keys


def _concatenate(parts: list[pa.Table]) -> pa.Table:
    return parts[0] if len(parts) == 1 else pa.concat_tables(parts).combine_chunks()


def _in_order(parts: Iterator[pa.Table], bits: int, limit: int, place: Path) -> Iterator[pa.Table]:
    """Sort ``parts`` by the lower ``bits`` of the keys, and yield them table by table."""
    held: list[pa.Table] = []
    size = rows = 0
    for part in parts:
        held.append(part)
        size += part.nbytes
        rows += part.num_rows
        if size > limit and rows > 1 and bits >= _BITS:
            break
    else:
        if held:
            table = _concatenate(held)
            held.clear()
            yield take_of_table(table, np.argsort(_keys(table), kind="stable"))
        return
    schema = held[0].schema
    buckets = _Buckets(place=place, shift=bits - _BITS, limit=limit)
    while held:
        buckets.add(held.pop(0))
    for part in parts:
        buckets.add(part)
    buckets.flush()
    buckets.close()
    for number in sorted(buckets.writers):
        path = place / f"{number:02}.arrow"
        yield from _in_order(_read(path, schema), bits - _BITS, limit, place / f"{number:02}")
        with write_errors(path):
            path.unlink()


@dataclass(kw_only=True)
class _Buckets:
    place: Path
    shift: int
    limit: int
    waiting: list[list[pa.Table]] = field(default_factory=lambda: [[] for _ in range(1 << _BITS)])
    held: int = 0
    writers: dict[int, pa.ipc.RecordBatchStreamWriter] = field(default_factory=dict)
    sinks: dict[int, pa.OSFile] = field(default_factory=dict)

    def add(self, part: pa.Table) -> None:
        bucket = (_keys(part) >> np.uint64(self.shift)).astype(np.int64) & ((1 << _BITS) - 1)
        order = np.argsort(bucket, kind="stable")
        ordered = take_of_table(part, order)
        ends = np.searchsorted(bucket[order], np.arange((1 << _BITS) + 1))
        for number in np.unique(bucket):
            low, high = int(ends[number]), int(ends[number + 1])
            self.waiting[number].append(ordered.slice(low, high - low))
        self.held += part.nbytes
        if self.held > self.limit:
            self.flush()

    def flush(self) -> None:
        with write_errors(self.place):
            for number, parts in enumerate(self.waiting):
                if parts:
                    self._write(number, _concatenate(parts))
        self.waiting = [[] for _ in range(1 << _BITS)]
        self.held = 0

    def _write(self, number: int, part: pa.Table) -> None:
        # named by position, as names need not be unique; the schema is known when they are read
        names = [*map(str, range(part.num_columns))]
        table = pa.Table.from_arrays([column.combine_chunks() for column in part.columns], names)
        if number not in self.writers:
            self.place.mkdir(exist_ok=True)
            self.sinks[number] = pa.OSFile(str(self.place / f"{number:02}.arrow"), "wb")
            options = pa.ipc.IpcWriteOptions(compression="lz4", use_threads=False)
            self.writers[number] = pa.ipc.new_stream(self.sinks[number], table.schema, options=options)
        self.writers[number].write_table(table)

    def close(self) -> None:
        with write_errors(self.place):
            for number, writer in self.writers.items():
                writer.close()
                self.sinks[number].close()


def _read(path: Path, schema: pa.Schema) -> Iterator[pa.Table]:
    with write_errors(path), pa.OSFile(str(path)) as file, pa.ipc.open_stream(file) as reader:
        for record_batch in reader:
            yield pa.Table.from_arrays(record_batch.columns, schema=schema)


class _Dictionaries:
    """One dictionary for each dictionary column, with all values so far."""

    def __init__(self) -> None:
        self.values: dict[int, pa.Array] = {}
        self.kinds: dict[int, pa.DataType] = {}

    def coded(self, table: pa.Table) -> pa.Table:
        for number, column in enumerate(table.columns):
            if not pt.is_dictionary(column.type):
                continue
            self.kinds[number] = column.type
            known = self.values.get(number)
            if known is not None:
                empty = pa.DictionaryArray.from_arrays(pa.array([], pa.int32()), known, ordered=column.type.ordered)
                column = pa.chunked_array([empty, *column.chunks], column.type)
            column = column.unify_dictionaries()
            if column.num_chunks:
                self.values[number] = column.chunk(column.num_chunks - 1).dictionary
            codes = pa.chunked_array([chunk.indices for chunk in column.chunks], pa.int32())
            table = table.set_column(number, table.schema.field(number).with_type(pa.int32()), codes)
        return table

    def decoded(self, table: pa.Table) -> pa.Table:
        for number, kind in self.kinds.items():
            values = self.values[number]
            chunks = [
                pa.DictionaryArray.from_arrays(chunk, values, ordered=kind.ordered)
                for chunk in table.column(number).chunks
            ]
            table = table.set_column(number, table.schema.field(number).with_type(kind), pa.chunked_array(chunks, kind))
        return table
