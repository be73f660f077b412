"""Inspect: describe a dataset by its row-group index or, where there is none, by its footers."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pqcache.errors import CacheError, DamagedError, UsageError, first_line
from pqcache.events import Advanced, OnEvent, Started, ignore
from pqcache.options import COMMANDS, InspectArguments, Unpack, all_values, documented
from pqcache.parquet.dense import as_list, dense_of
from pqcache.parquet.types import top_level_names
from pqcache.parquet.validation import read_footer
from pqcache.store.arriving import ArrivingSnapshot, find_arriving
from pqcache.store.cache_directory import CacheDirectory, cache_at
from pqcache.store.config import read_config
from pqcache.store.drivers.base import Source
from pqcache.store.hive import parent
from pqcache.store.keys.lookup import columns_indexed
from pqcache.store.layout import CANDIDATE, FILES, ROW_GROUPS
from pqcache.store.manifest import SourceFile, TableVersion
from pqcache.store.manifest_file import schema_of_table
from pqcache.store.row_group_index import NO_SCHEMA, Index, IndexBuilder
from pqcache.store.snapshot import Snapshot
from pqcache.store.sync.listing import ListingRules, list_source
from pqcache.store.sync.table_schema import read_remote_footer
from pqcache.store.tables.base import OpenOptions
from pqcache.store.tables.data_files import FileRules
from pqcache.store.tables.open_table import open_table
from pqcache.store.urls import redact, url_scheme
from pqcache.units import BLOCK_SIZE


@dataclass(frozen=True, kw_only=True)
class PartitionSummary:
    """One partition directory; sizes in bytes."""

    path: str
    files: int
    row_groups: int
    rows: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class ColumnSummary:
    """One column; ``bytes`` on disk and ``uncompressed`` are 0 for partition columns.

    ``codec`` names all codecs, joined by ``+``; ``encodings`` are those in the first file that has the column.
    """

    name: str
    type: str
    partition: bool
    bytes: int
    uncompressed: int
    codec: str = ""
    encodings: tuple[str, ...] = ()


@dataclass(frozen=True)
class HistogramBar:
    """A bar of the row-group size histogram: sizes from ``low`` up to, not including, ``high`` bytes."""

    low: int
    high: int
    count: int


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """What is in a dataset.

    ``kind`` is cache, directory or remote. ``over_block`` counts row groups of more compressed bytes than
    ``block_size``, ``straddling`` those that lie across a block boundary of files on HDFS, or of files in blocks of
    the size that was asked for, and ``blocks_touched`` the blocks that all row groups lie in; both are None where
    there are no blocks. ``compression`` maps codecs to bytes. ``under_quarter`` counts row groups of less
    than a quarter of ``block_size``. ``keys`` are the columns that a cache has a key index of.
    ``shard`` is the node whose share a cache holds, like ``0/3``, or None for all;
    ``listing`` is equal for caches that hold shares of the same. ``arriving`` says how much of a first snapshot is
    there that is not published yet, else it is None.
    """

    target: str
    kind: str
    source: str | None = None
    snapshot: str | None = None
    created: str | None = None
    files: int
    rows: int
    row_groups: int
    bytes: int
    uncompressed: int
    block_size: int
    over_block: int
    straddling: int | None
    blocks_touched: int | None
    row_group_bytes: Mapping[str, int]
    histogram: tuple[HistogramBar, ...]
    compression: Mapping[str, int]
    partitions: tuple[PartitionSummary, ...]
    columns: tuple[ColumnSummary, ...]
    under_quarter: int = 0
    keys: tuple[str, ...] = ()
    shard: str | None = None
    listing: str | None = None
    version: str | None = None
    arriving: ArrivalProgress | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the inspection as plain values."""
        return asdict(self)


@documented(InspectArguments, *COMMANDS["inspect"])
def inspect(
    target: str | os.PathLike[str], *, on_event: OnEvent = ignore, **given: Unpack[InspectArguments]
) -> Inspection:
    """Describe a cache, a local directory or file, or a remote dataset.

    Of a cache the index is read, of anything else only the footers. ``as_files`` and ``all_files`` are not for a cache.

    Args:
        target: a cache, a directory, a file or a URL.
        on_event: called with what happens.
        given: the options, as the table in pqcache.options has them.

    >>> found = inspect("cache/shop", block_size="8KB")
    >>> found.files, found.rows, found.row_groups, found.over_block
    (6, 600, 12, 12)
    >>> [column.name for column in found.columns if column.partition]
    ['dt']

    Raises UsageError, SourceError, SourceIncomplete (no Parquet there) or ParquetError.
    """
    options = all_values(given, *COMMANDS["inspect"])
    text, size, as_files = os.fspath(target), options.block_size, options.as_files
    if (cache := cache_at(text)) is not None:
        return _inspect_cache(cache, size, options.candidate)
    if options.candidate:
        raise UsageError("--candidate", f"{redact(text)} is not a pqcache", "name a cache")
    source = open_table(text, OpenOptions(store=options.options, as_files=as_files))
    rules = FileRules(as_files=as_files, all_files=options.all_files)
    try:
        listing = list_source(source, on_event, ListingRules(files=rules))
        table = source.table_version
        files = sorted(listing.files, key=lambda file: file.path)
        index = read_remote_index(source, files, options.jobs, on_event)
        encodings = encodings_of([read_remote_footer(source, file) for file in files[:1]])
    finally:
        source.close()
    blocks = np.array([size or file.block_size for file in files], np.int64)
    default = int(blocks.max()) if blocks.all() else BLOCK_SIZE
    dataset = _SummaryInput(
        index=index,
        sizes=np.array([file.identity.size for file in files], np.int64),
        block_size=size or default,
        blocks=blocks,
        encodings=encodings,
    )
    kind = "directory" if url_scheme(text) in ("", "file") else "remote"
    return replace(_describe(dataset, source.url, kind), version=_version(table))


@dataclass(frozen=True, kw_only=True)
class _SummaryInput:
    """What a summary is made from.

    Attributes:
        index: row groups of the dataset.
        sizes: bytes of each file.
        block_size: what row groups are measured against.
        blocks: the block size of each file, 0 where it has none.
        encodings: of each column, in the first file.
    """

    index: Index
    sizes: npt.NDArray[np.int64]
    block_size: int
    blocks: npt.NDArray[np.int64]
    encodings: Mapping[str, tuple[str, ...]]


def _inspect_cache(cache: CacheDirectory, block_size: int | None, candidate: bool) -> Inspection:
    with leased_snapshot(cache, candidate) as (snapshot, progress):
        manifest, index = snapshot.manifest(), snapshot.index()
        if index.paths != tuple(entry.path for entry in manifest.files):
            reason = "names other files than the row-group index"
            raise DamagedError(snapshot.path / FILES, reason, "the next sync builds both again")
        try:
            index.table.validate(full=True)  # its texts are shown
        except pa.ArrowInvalid as error:
            reason = f"the row-group index cannot be read ({first_line(error)})"
            raise DamagedError(snapshot.path / ROW_GROUPS, reason, "the next sync builds it again") from error
        there = index.paths if progress is None else sorted(ArrivingSnapshot(snapshot.path).arrived(index.paths))
        encodings = encodings_of([read_footer(snapshot.path / path) for path in there[:1]])
        keys = tuple(columns_indexed(snapshot.path))
    sizes = np.array([entry.size for entry in manifest.files], np.int64)
    dataset = _SummaryInput(
        index=index,
        sizes=sizes,
        block_size=block_size or read_config(cache.path).row_group_size or BLOCK_SIZE,
        blocks=np.full(len(sizes), block_size or 0, np.int64),
        encodings=encodings,
    )
    return replace(
        _describe(dataset, str(cache.path), "cache"),
        source=manifest.source,
        snapshot=snapshot.id,
        created=manifest.created,
        shard=manifest.shard,
        listing=manifest.listing,
        keys=keys,
        version=_version(manifest.table),
        arriving=progress,
    )


def _version(table: TableVersion | None) -> str | None:
    return str(table) if table is not None and table.version else None


def read_remote_index(source: Source, files: Sequence[SourceFile], jobs: int, on_event: OnEvent) -> Index:
    table = schema_of_table(source.table_version)
    builder = IndexBuilder(NO_SCHEMA if table is None else table, clashes={})
    on_event(Started("read", len(files), "files"))
    with ThreadPoolExecutor(jobs) as pool:
        footers = pool.map(lambda file: read_remote_footer(source, file), files)
        for file, footer in zip(files, footers, strict=True):
            builder.add(file.path, *footer)
            on_event(Advanced("read", 1))
    return builder.finish([file.path for file in files])


def _describe(dataset: _SummaryInput, target: str, kind: str) -> Inspection:
    index, block_size = dataset.index, dataset.block_size
    groups = index.numbers("bytes")
    straddling = touched = None
    if dataset.blocks.all():
        first = index.numbers("offset")
        block = dataset.blocks[index.numbers("file")]
        count = (first + np.maximum(groups, 1) - 1) // block - first // block + 1
        straddling, touched = int((count > 1).sum()), int(count.sum())
    return Inspection(
        target=target,
        kind=kind,
        files=len(index.paths),
        rows=int(index.rows.sum()),
        row_groups=len(index),
        bytes=int(dataset.sizes.sum()),
        uncompressed=int(index.numbers("uncompressed").sum()),
        block_size=block_size,
        over_block=int((groups > block_size).sum()),
        straddling=straddling,
        blocks_touched=touched,
        row_group_bytes=_spread(groups),
        histogram=_histogram(groups, block_size),
        compression=_compression(index),
        partitions=_partitions(index, dataset.sizes),
        columns=_columns(index, dataset.encodings),
        under_quarter=int((groups < block_size // 4).sum()),
    )


def _spread(groups: npt.NDArray[np.int64]) -> dict[str, int]:
    if not len(groups):
        return {"min": 0, "median": 0, "mean": 0, "max": 0}
    return {
        "min": int(groups.min()),
        "median": int(np.median(groups)),
        "mean": int(groups.mean()),
        "max": int(groups.max()),
    }


def _histogram(groups: npt.NDArray[np.int64], block_size: int) -> tuple[HistogramBar, ...]:
    """Bars at eighths of the block size and two above it; a full block counts as not above."""
    edges = [block_size * i // 8 for i in range(9)] + [2 * block_size]
    edges.append(max(edges[-1], int(groups.max(initial=0))) + 1)
    edges = [edge + 1 if i >= 1 else edge for i, edge in enumerate(edges)]
    counts, _ = np.histogram(groups, edges)
    bins = zip(edges[:-1], edges[1:], counts.tolist(), strict=True)
    return tuple(HistogramBar(low, high, count) for low, high, count in bins)


def _compression(index: Index) -> dict[str, int]:
    totals: dict[str, int] = {}
    for field in index.data_schema:
        codecs = index.table[f"{field.name}:codec"].to_pylist()
        for codec, size in zip(codecs, index.table[f"{field.name}:bytes"].to_pylist(), strict=True):
            if codec is not None:  # the column is in another file
                totals[codec] = totals.get(codec, 0) + size
    return dict(sorted(totals.items(), key=lambda item: -item[1]))


def _partitions(index: Index, sizes: npt.NDArray[np.int64]) -> tuple[PartitionSummary, ...]:
    files = index.numbers("file")
    count = len(index.paths)
    rows = np.bincount(files, index.rows, count).astype(np.int64)
    row_groups = np.bincount(files, minlength=count)
    totals: dict[str, list[int]] = {}
    for position, path in enumerate(index.paths):
        total = totals.setdefault(parent(path), [0, 0, 0, 0])
        total[0] += 1
        total[1] += int(row_groups[position])
        total[2] += int(rows[position])
        total[3] += int(sizes[position])
    return tuple(
        PartitionSummary(path=path, files=files_of, row_groups=groups_of, rows=rows_of, bytes=bytes_of)
        for path, (files_of, groups_of, rows_of, bytes_of) in sorted(totals.items())
    )


def encodings_of(footers: Sequence[tuple[pq.FileMetaData, pa.Schema]]) -> dict[str, tuple[str, ...]]:
    """Encodings of each top-level column's values; levels and dictionaries do not count."""
    found: dict[str, dict[str, None]] = {}
    for metadata, schema in footers:
        names = top_level_names(metadata, schema)
        for group in range(metadata.num_row_groups):
            for position, name in enumerate(names):
                chunk = metadata.row_group(group).column(position)
                used = found.setdefault(name, {})
                values = [e for e in chunk.encodings if e not in ("RLE", "BIT_PACKED")] or list(chunk.encodings)
                if any("DICTIONARY" in e for e in values):
                    values = ["DICTIONARY"]
                used.update(dict.fromkeys(values))
    return {name: tuple(used) for name, used in found.items()}


def _columns(index: Index, encodings: Mapping[str, tuple[str, ...]]) -> tuple[ColumnSummary, ...]:
    columns = []
    known = dict(zip(index.table.column_names, index.table.columns, strict=True))  # there may be thousands
    clashing = dict[str, str]()
    for clash in index.clashes:
        kinds = list(map(str, clash.types))
        if clash.column in clash.names:
            clashing |= zip(clash.names, kinds, strict=False)
        else:
            clashing[clash.column] = " or ".join(reversed(kinds))
    for field in [*index.schema, *(pa.field(name, pa.null()) for name in clashing)]:
        partition = field.name in index.partitions.column_names
        size = 0 if partition else _sum(known, f"{field.name}:bytes")
        uncompressed = 0 if partition else _sum(known, f"{field.name}:uncompressed")
        stored = dense_of(field)
        kind = (
            clashing.get(field.name, str(field.type))
            if stored is None
            else f"{as_list(field).type}, dense as {stored.text}"
        )
        codec = "" if partition else _codecs(known, f"{field.name}:codec")
        used = () if partition else encodings.get(field.name, ())
        columns.append(
            ColumnSummary(
                name=field.name,
                type=kind,
                partition=partition,
                bytes=size,
                uncompressed=uncompressed,
                codec=codec,
                encodings=used,
            )
        )
    return tuple(columns)


def _codecs(known: Mapping[str, pa.ChunkedArray], column: str) -> str:
    if column not in known:
        return ""
    found = {codec for text in pc.unique(known[column]).to_pylist() if text for codec in text.split("+")}
    return "+".join(sorted(found))


def _sum(known: Mapping[str, pa.ChunkedArray], column: str) -> int:
    return int(np.nansum(known[column].to_numpy())) if column in known else 0


_MOVING = 2.0  # seconds: more than a snapshot takes from ``arriving/`` to where ``current`` points to it


@dataclass(frozen=True, kw_only=True)
class ArrivalProgress:
    """How much of a snapshot is there: bytes, complete files, and row groups.

    ``changed`` counts files that are not at the source any more as they were listed. ``run`` is the process that
    fetches it, like ``process 12 of alice``; empty where none does. ``abandoned`` says that nothing more will come.
    """

    bytes: int
    total_bytes: int
    files: int
    row_groups: int
    changed: int
    run: str
    abandoned: bool


@contextmanager
def leased_snapshot(
    cache: CacheDirectory, candidate: bool = False
) -> Iterator[tuple[Snapshot, ArrivalProgress | None]]:
    """The current snapshot, else the arriving one with its progress; or the candidate."""
    if candidate:
        waiting = cache.snapshot(CANDIDATE)
        with waiting.lease():
            yield waiting, None
        return
    until = time.monotonic() + _MOVING
    while True:
        arriving = find_arriving(cache) if cache.current() is None else None
        try:
            if arriving is None:
                snapshot, lease, progress = *cache.lease(), None
            else:
                snapshot, lease, progress = arriving, arriving.lease(), _progress(arriving)
            break
        except (CacheError, OSError):  # it is published just now
            if arriving is None or time.monotonic() > until:
                raise
            time.sleep(0.01)
    with lease:
        yield snapshot, progress


def _progress(snapshot: ArrivingSnapshot) -> ArrivalProgress:
    files, errors = snapshot.manifest().files, snapshot.errors()
    there = snapshot.arrived(entry.path for entry in files)
    arrived = [entry for entry in files if entry.path in there]
    return ArrivalProgress(
        bytes=sum(entry.size for entry in arrived),
        total_bytes=sum(entry.size for entry in files),
        files=len(arrived),
        row_groups=sum(entry.row_groups for entry in arrived),
        changed=len(errors.keys() - {""}),
        run=(snapshot.filled_by() or "a process") if snapshot.is_being_filled() else "",
        abandoned="" in errors,
    )
