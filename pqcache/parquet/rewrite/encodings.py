"""Chooses encodings and codecs of columns by trying them on a sample.

Data is written once and read many times, so an encoding that costs decoding time has to make a column smaller. Plain is
the default; a dictionary, DELTA, BYTE_STREAM_SPLIT or a codec is used if it shrinks the sample.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from inspect import signature
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pqcache.parquet.arrow import weigh
from pqcache.parquet.pages import CODECS
from pqcache.system.buffers import BufferPool

_WORTH = 0.9  # a scheme must make a column this much smaller than plain,
_BETTER = 0.95  # and this much smaller than a simpler scheme;
_DICTIONARY_BETTER = 0.85  # dictionaries of numbers are slow to read, and larger than a sample tells
_ALL = np.ones(1)
_EXTRA = 1 << 20  # bytes, for headers, footer and page index
_LARGE_VALUE = 128  # bytes; min/max of larger values bloat the footer and prune nothing
LIMITED = "max_rows_per_page" in signature(pq.write_table).parameters  # not in older versions
_PLAIN, _DICTIONARY = "PLAIN", "DICTIONARY"


@dataclass(frozen=True, kw_only=True)
class Encodings:
    """The writer's settings, by leaf path as pyarrow names it ("a.list.element")."""

    codecs: Mapping[str, str] = field(default_factory=dict)
    dictionary: Sequence[str] = ()
    special: Mapping[str, str] = field(default_factory=dict)
    statistics: Sequence[str] = ()
    level: int | None = None
    decimal_as_integer: bool = False

    def as_is(self, path: str) -> bool:
        """Whether a column is stored plain and without a codec."""
        return self.codecs.get(path) == "none" and path not in self.dictionary and path not in self.special

    def open(
        self,
        sink: Any,
        schema: pa.Schema,
        collected: list[Any] | None = None,
        page_index: bool = False,
        batch: int | None = None,
    ) -> pq.ParquetWriter:
        """A writer to ``sink`` that adds no metadata of its own; ``batch`` is the number of values in a page."""
        levels = {path: self.level for path, codec in self.codecs.items() if CODECS[codec].has_levels}
        more: dict[str, Any] = {} if collected is None else {"metadata_collector": collected}
        if batch is not None:
            more |= {
                "write_batch_size": batch,
                "data_page_size": 1,
                **({"max_rows_per_page": batch} if LIMITED else {}),
            }
        return pq.ParquetWriter(
            sink,
            schema,
            version="2.6",
            store_schema=False,
            use_compliant_nested_type=False,  # keeps the name of list items
            store_decimal_as_integer=self.decimal_as_integer,
            write_page_index=page_index,
            compression=dict(self.codecs) or "none",
            compression_level=levels if self.level is not None and levels else None,
            use_dictionary=list(self.dictionary) or False,
            column_encoding=dict(self.special) or None,
            write_statistics=list(self.statistics) or False,
            **more,
        )

    def file(
        self, table: pa.Table, memory: BufferPool, page_index: bool = False, batch: int | None = None
    ) -> memoryview:
        """Write ``table`` as a file of one row group in a block of ``memory``."""
        size = int(1.125 * weigh(table, _ALL).sum()) + _EXTRA
        while True:
            block = memory.borrow(size)
            sink = pa.FixedSizeBufferWriter(pa.py_buffer(block))
            try:
                with self.open(sink, table.schema, page_index=page_index, batch=batch) as writer:
                    writer.write_table(table, row_group_size=max(1, table.num_rows))
                return block.data[: sink.tell()]
            except OSError:  # the block is too small, as nothing else can fail in memory
                size *= 2


def has_integer_decimals(columns: Iterable[pq.ColumnSchema]) -> bool:
    return any(leaf.logical_type.type == "DECIMAL" and leaf.physical_type in ("INT32", "INT64") for leaf in columns)


def encoded_chunks(sample: pa.Table, encodings: Encodings) -> list[pq.ColumnChunkMetaData]:
    """Metadata of the leaf columns of ``sample``, written with ``encodings``."""
    return _chunks_of(_written(sample, encodings))


def encoded_size(sample: pa.Table, encodings: Encodings) -> int:
    return sum(chunk.total_compressed_size for chunk in encoded_chunks(sample, encodings))


def _written(sample: pa.Table, encodings: Encodings) -> pq.FileMetaData:
    collected: list[pq.FileMetaData] = []
    # counts the bytes and forgets them
    with encodings.open(pa.MockOutputStream(), sample.schema, collected) as writer:
        writer.write_table(sample, row_group_size=max(1, sample.num_rows))
    return collected[0]


def _chunks_of(metadata: pq.FileMetaData) -> list[pq.ColumnChunkMetaData]:
    return [metadata.row_group(0).column(number) for number in range(metadata.num_columns)]


# Left out: BYTE_STREAM_SPLIT of fixed-length bytes, which DuckDB can't read, and DELTA_BYTE_ARRAY, which pyarrow can't
# read into a dictionary and which decodes several times slower.
_SPECIAL = {
    "INT32": ("DELTA_BINARY_PACKED", "BYTE_STREAM_SPLIT"),
    "INT64": ("DELTA_BINARY_PACKED", "BYTE_STREAM_SPLIT"),
    "FLOAT": ("BYTE_STREAM_SPLIT",),
    "DOUBLE": ("BYTE_STREAM_SPLIT",),
}


def choose_encodings(
    sample: pa.Table,
    codec: Callable[[int], str],
    plain: Encodings,
    compat: bool = False,
    executor: Executor | None = None,
) -> Encodings:
    """Choose the best encodings for ``sample``.

    Args:
        sample: some thousand rows of the data.
        codec: codec to try for each leaf column, by position.
        plain: settings independent of the sample: compression level, storage of decimals and times.
        compat: use plain and dictionary encodings only, for readers of ten years ago.
        executor: threads to try several encodings at once.
    """
    metadata = _written(sample, plain)
    leaves = [
        (chunk.path_in_schema, chunk.physical_type, chunk.total_compressed_size) for chunk in _chunks_of(metadata)
    ]
    packed = {path: codec(number) for number, (path, _, _) in enumerate(leaves)}
    large = _LARGE_VALUE * max(1, sample.num_rows)
    statistics = [
        path
        for number, (path, _, size) in enumerate(leaves)
        if size <= large and not metadata.schema.column(number).max_repetition_level
    ]
    base = replace(plain, codecs=packed, statistics=statistics)
    if sample.num_rows == 0:
        return base
    # settings go by path, and columns with the same path may have different types
    count = Counter(path for path, _, _ in leaves)
    kinds = {path: kind for path, kind, _ in leaves if count[path] == 1}
    schemes: list[dict[str, str]] = [dict.fromkeys(packed, _PLAIN)]
    if not compat:
        for turn in range(2):
            special = {path: _SPECIAL.get(kind, ()) for path, kind in kinds.items()}
            if scheme := {path: names[turn] for path, names in special.items() if len(names) > turn}:
                schemes.append(scheme)
    schemes.append({path: _DICTIONARY for path, kind in kinds.items() if kind != "BOOLEAN"})
    none = dict.fromkeys(packed, "none")
    # without the first, plain without a codec, which is where ``best`` starts
    trials = [(scheme, codecs) for scheme in schemes for codecs in (none, packed)][1:]
    best = {path: (size, _PLAIN, "none") for path, _, size in leaves}
    run = map if executor is None else executor.map
    found = run(lambda trial: encoded_chunks(sample, _with_schemes(base, *trial)), trials)
    for (scheme, codecs), chunks in zip(trials, found, strict=True):
        for (path, kind, plain_size), chunk in zip(leaves, chunks, strict=True):
            if path not in scheme or (codecs is packed and packed[path] == "none"):
                continue
            dear = scheme[path] == _DICTIONARY and kind in _SPECIAL
            better = _DICTIONARY_BETTER if dear and best[path][1] != _DICTIONARY else _BETTER
            size = chunk.total_compressed_size
            if size < min(_WORTH * plain_size, better * best[path][0]):
                best[path] = (size, scheme[path], codecs[path])
    return _with_schemes(
        base,
        {path: scheme for path, (_, scheme, _) in best.items()},
        {path: c for path, (_, _, c) in best.items()},
    )


def _with_schemes(base: Encodings, scheme: Mapping[str, str], codecs: Mapping[str, str]) -> Encodings:
    return replace(
        base,
        codecs=dict(codecs),
        dictionary=[path for path, name in scheme.items() if name == _DICTIONARY],
        special={path: name for path, name in scheme.items() if name not in (_PLAIN, _DICTIONARY)},
    )
