"""Describes a dataset, or lists its files, row groups, columns, some rows, or the changes between snapshots.

A cache is described by its row-group index, anything else by its footers.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pqcache.errors import CacheError, DamagedError, ParquetError, UsageError, first_line
from pqcache.events import Advanced, OnEvent, Started, ignore
from pqcache.options import COMMANDS, InspectArguments, Unpack, all_values, documented
from pqcache.parquet.arrow import top_level_names
from pqcache.parquet.dense import as_list, dense_of
from pqcache.parquet.misread import check_read_right
from pqcache.parquet.validation import read_footer
from pqcache.store.arriving import ArrivingSnapshot, find_arriving
from pqcache.store.cache_directory import CacheDirectory, cache_at
from pqcache.store.config import read_config
from pqcache.store.drivers.base import Source
from pqcache.store.drivers.timeouts import FEW_TRIES, with_retries
from pqcache.store.key_lookup import columns_indexed
from pqcache.store.layout import CANDIDATE, FILES, ROW_GROUPS
from pqcache.store.manifest import FileEntry, SourceFile, TableVersion
from pqcache.store.manifest_file import schema_of_table
from pqcache.store.partition_paths import parent
from pqcache.store.row_group_index import NO_SCHEMA, Index, IndexBuilder
from pqcache.store.snapshot import Snapshot
from pqcache.store.sync.listing import ListingRules, list_source
from pqcache.store.sync.table_schema import read_remote_footer
from pqcache.store.tables.base import OpenOptions
from pqcache.store.tables.data_files import FileRules
from pqcache.store.tables.open_table import open_table
from pqcache.store.urls import is_local, local_directory, quoted, redact, url_scheme
from pqcache.system.disk import check_regular
from pqcache.units import BLOCK_SIZE, format_size

_MOVING = 2.0  # seconds: more than a snapshot takes from ``arriving/`` to where ``current`` points to it
_MAGIC = {
    b"\xff\xd8\xff": "JPEG",
    b"\x89PNG\r\n": "PNG",
    b"GIF8": "GIF",
    b"RIFF": "RIFF",
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\x93NUMPY": "npy",
    b"PK\x03\x04": "zip",
}


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
    """The contents of a dataset.

    ``kind`` is cache, directory or remote. ``over_block`` counts row groups of more compressed bytes than
    ``block_size``, ``straddling`` those that cross a block boundary (of files on HDFS, or of blocks of the requested
    size), and ``blocks_touched`` the blocks of all row groups; both are None if there are no blocks. ``compression``
    maps codecs to bytes. ``under_quarter`` counts row groups of less than a quarter of ``block_size``. ``keys`` are the
    columns of a cache with a key index. ``shard`` is the share that a cache holds, like ``0/3``, or None for all;
    ``listing`` is equal for caches with shares of the same listing. ``arriving`` says how much of an unpublished first
    snapshot has arrived, else it is None.
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

    For a cache the index is read, for anything else only the footers. ``as_files`` and ``all_files`` don't apply to a
    cache.

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
    text, size = os.fspath(target), options.block_size
    if (cache := cache_at(text)) is not None:
        return _inspect_cache(cache, size, options.candidate)
    rules = FileRules(as_files=options.as_files, all_files=options.all_files)
    with _opened(text, options.options, rules, options.candidate, on_event) as (source, files):
        table = source.table_version
        index = read_remote_index(source, files, options.jobs, on_event)
        encodings = encodings_of([read_remote_footer(source, file) for file in files[:1]])
    blocks = np.array([size or file.block_size for file in files], np.int64)
    default = int(blocks.max()) if blocks.all() else BLOCK_SIZE
    sizes = np.array([file.identity.size for file in files], np.int64)
    kind = "directory" if is_local(text) else "remote"
    described = _describe(source.url, kind, index, encodings, sizes=sizes, blocks=blocks, block_size=size or default)
    return replace(described, version=_version(table))


@contextmanager
def _opened(
    text: str, store: Mapping[str, str], rules: FileRules, candidate: bool, on_event: OnEvent
) -> Iterator[tuple[Source, list[SourceFile]]]:
    """Yield a source that is not a cache, and its files in path order."""
    if candidate:
        raise UsageError("--candidate", f"{redact(text)} is not a pqcache", "name a cache")
    source = open_table(text, OpenOptions(store=store, as_files=rules.as_files))
    try:
        listing = list_source(source, on_event, ListingRules(files=rules))
        yield source, sorted(listing.files, key=lambda file: file.path)
    finally:
        source.close()


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
    blocks = np.full(len(sizes), block_size or 0, np.int64)
    size = block_size or read_config(cache.path).row_group_size or BLOCK_SIZE
    return replace(
        _describe(str(cache.path), "cache", index, encodings, sizes=sizes, blocks=blocks, block_size=size),
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
        footers = pool.map(
            lambda file: with_retries(partial(read_remote_footer, source, file), file.path, FEW_TRIES, on_event), files
        )
        for file, footer in zip(files, footers, strict=True):
            builder.add(file.path, *footer)
            on_event(Advanced("read", 1))
    return builder.finish([file.path for file in files])


def _describe(
    target: str,
    kind: str,
    index: Index,
    encodings: Mapping[str, tuple[str, ...]],
    *,
    sizes: npt.NDArray[np.int64],
    blocks: npt.NDArray[np.int64],
    block_size: int,
) -> Inspection:
    """Summarize an index; ``sizes`` and ``blocks`` are of each file, 0 for one that is not in blocks."""
    groups = index.numbers("bytes")
    straddling = touched = None
    if blocks.all():
        first = index.numbers("offset")
        block = blocks[index.numbers("file")]
        count = (first + np.maximum(groups, 1) - 1) // block - first // block + 1
        straddling, touched = int((count > 1).sum()), int(count.sum())
    return Inspection(
        target=target,
        kind=kind,
        files=len(index.paths),
        rows=int(index.rows.sum()),
        row_groups=len(index),
        bytes=int(sizes.sum()),
        uncompressed=int(index.numbers("uncompressed").sum()),
        block_size=block_size,
        over_block=int((groups > block_size).sum()),
        straddling=straddling,
        blocks_touched=touched,
        row_group_bytes=_spread(groups),
        histogram=_histogram(groups, block_size),
        compression=_compression(index),
        partitions=_partitions(index, sizes),
        columns=_columns(index, encodings),
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
    """Bars at eighths of the block size and two above it; a full block is not above it."""
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


@dataclass(frozen=True, kw_only=True)
class ArrivalProgress:
    """How much of a snapshot has arrived: bytes, complete files, and row groups.

    ``changed`` counts files that have changed at the source since they were listed. ``run`` is the process that fetches
    it, like ``process 12 of alice``; empty if there is none. ``abandoned`` says that nothing more will arrive.
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


@dataclass(frozen=True, kw_only=True)
class FileView:
    """One file: its path, bytes, rows, row groups, and the compressed bytes of its largest row group."""

    path: str
    bytes: int
    rows: int
    row_groups: int
    largest: int


@dataclass(frozen=True, kw_only=True)
class RowGroupView:
    """One row group: its location, its rows, and its bytes on disk and decompressed."""

    path: str
    row_group: int
    rows: int
    offset: int
    bytes: int
    uncompressed: int


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The difference between two snapshots, ``old`` and ``new`` by ID: files by path, and rows and bytes of either.

    ``partitions`` has the numbers of added and removed rows. In a partition that both gained and lost source files, all
    rows of rewritten files count.
    """

    old: str
    new: str
    added: tuple[str, ...]
    removed: tuple[str, ...]
    changed: tuple[str, ...]
    unchanged: int
    rows: tuple[int, int]
    bytes: tuple[int, int]
    partitions: Mapping[str, tuple[int, int]]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class InspectedDataset:
    """A dataset: its index, the bytes of each file, and its directory if that is on this machine.

    ``arriving`` says that bytes may be missing.
    """

    index: Index
    sizes: Sequence[int]
    root: Path | None
    arriving: bool = False


def open_inspected_dataset(
    target: str | os.PathLike[str],
    options: Mapping[str, str] | None = None,
    jobs: int = 16,
    on_event: OnEvent = ignore,
    rules: FileRules | None = None,
    candidate: bool = False,
) -> InspectedDataset:
    """Open a cache, a directory, a file or a URL; for anything but a cache, the footers are read.

    Raises as ``inspect`` does.
    """
    text = os.fspath(target)
    cache = CacheDirectory(Path(text).absolute())
    if url_scheme(text) == "" and cache.exists():
        with leased_snapshot(cache, candidate) as (snapshot, progress):
            entries = snapshot.manifest().files
            sizes = [entry.size for entry in entries]
            return InspectedDataset(snapshot.index(), sizes, snapshot.path, arriving=progress is not None)
    rules = rules or FileRules()
    with _opened(text, options or {}, rules, candidate, on_event) as (source, files):
        index = read_remote_index(source, files, jobs, on_event)
    root = None
    if is_local(text):
        root = local_directory(text)
    return InspectedDataset(index, [file.identity.size for file in files], root)


def items_of(view: str, dataset: InspectedDataset, count: int, name: str) -> Iterator[dict[str, Any]]:
    """Rows of a view (``files``, ``row-groups``, ``schema`` or ``sample``) as plain values."""
    if view == "sample":
        yield from sample_rows(dataset, count, name)
    elif view == "schema":
        yield from schema_view(dataset)
    else:
        yield from map(asdict, file_views(dataset) if view == "files" else row_group_views(dataset))


def file_views(dataset: InspectedDataset) -> Iterator[FileView]:
    index, count = dataset.index, len(dataset.index.paths)
    files, sizes = index.numbers("file"), index.numbers("bytes")
    groups, rows = np.bincount(files, minlength=count), np.bincount(files, index.rows, count)
    largest = np.zeros(count, np.int64)
    np.maximum.at(largest, files, sizes)
    for i, path in enumerate(index.paths):
        yield FileView(
            path=path, bytes=dataset.sizes[i], rows=int(rows[i]), row_groups=int(groups[i]), largest=int(largest[i])
        )


def row_group_views(dataset: InspectedDataset) -> Iterator[RowGroupView]:
    index = dataset.index
    names = ("row_group", "rows", "offset", "bytes", "uncompressed")
    columns = [index.numbers(name).tolist() for name in names]
    for file, *numbers in zip(index.numbers("file").tolist(), *columns, strict=True):
        yield RowGroupView(path=index.paths[file], **dict(zip(names, numbers, strict=True)))


def schema_view(dataset: InspectedDataset) -> Iterator[dict[str, Any]]:
    """Name, type, nullability and metadata of every column, partition columns last."""
    for field in dataset.index.schema:
        metadata = {k.decode(errors="replace"): v.decode(errors="replace") for k, v in (field.metadata or {}).items()}
        partition = field.name in dataset.index.partitions.column_names
        shown = {k: v for k, v in metadata.items() if not k.startswith(("PARQUET:", "pqcache."))}
        yield {
            "name": field.name,
            "type": str(as_list(field).type),
            "nullable": field.nullable,
            "partition": partition,
            "metadata": shown,
        }


def sample_rows(dataset: InspectedDataset, count: int, name: str) -> list[dict[str, Any]]:
    """The first ``count`` rows, as ``readable``; UsageError for a remote dataset."""
    if dataset.arriving:
        raise UsageError("--sample", f"{name} is still arriving", "read it with Cache.batches, which waits")
    if dataset.root is None:
        raise UsageError(
            "--sample", f"{redact(name)} is not local", f"copy it with 'pqcache sync {quoted(redact(name))} CACHE'"
        )
    found: list[dict[str, Any]] = []
    for position, path in enumerate(dataset.index.paths):
        if len(found) >= count:
            break
        values, in_path = (
            {name: table[name][position].as_py() for name in table.column_names}
            for table in (dataset.index.partitions, dataset.index.path_values)
        )
        for row in islice(_rows(dataset.root / path, min(count, 1024)), count - len(found)):
            row = {**in_path, **row, **{key: value for key, value in in_path.items() if value is not None}, **values}
            found.append({key: readable(value) for key, value in row.items()})
    return found


def _rows(path: Path, batch: int) -> Iterator[dict[str, Any]]:
    try:
        check_regular(path)
        with pq.ParquetFile(path) as file:
            for group in range(file.num_row_groups):
                check_read_right(path, file.metadata, file.schema_arrow, row_groups=[group])
                for rows in file.iter_batches(batch, [group], use_threads=False):
                    for i in range(len(rows)):
                        yield {name: plain_value(rows.column(j)[i]) for j, name in enumerate(rows.schema.names)}
    except (pa.ArrowException, OSError) as error:
        raise ParquetError(path, f"cannot be read ({error})", "run 'pqcache verify' on its cache") from error


def plain_value(value: pa.Scalar) -> Any:
    """Convert to Python, including times and texts that Python's types cannot represent."""
    try:
        return value.as_py()
    except (ValueError, OverflowError):
        return _described(value)


def _described(value: pa.Scalar) -> Any:
    """Numbers for values that Python cannot represent, and texts with replacement characters."""
    kind = value.type
    if isinstance(kind, pa.BaseExtensionType) or pa.types.is_dictionary(kind):
        return plain_value(value.value)
    if pa.types.is_struct(kind):
        return {kind.field(i).name: plain_value(value[i]) for i in range(kind.num_fields)}
    if pa.types.is_map(kind):
        return [[plain_value(entry["key"]), plain_value(entry["value"])] for entry in value.values]
    if pa.types.is_nested(kind):
        return [plain_value(item) for item in value.values]
    if hasattr(value, "as_buffer"):
        return value.as_buffer().to_pybytes().decode(errors="replace")
    return str(value.value)


def readable(value: Any, items: int = 8, characters: int = 200) -> Any:
    """Convert a value for JSON: binary becomes kind and size, long lists and strings are cut off.

    >>> readable({"image": b"\\xff\\xd8\\xff" + bytes(4093), "tokens": list(range(12))})
    {'image': '<JPEG, 4 KB>', 'tokens': [0, 1, 2, 3, 4, 5, 6, 7, '… 4 more']}
    """
    if isinstance(value, bytes):
        kind = next((kind for magic, kind in _MAGIC.items() if value.startswith(magic)), "binary")
        return f"<{kind}, {format_size(len(value))}>"
    if isinstance(value, str):
        return value if len(value) <= characters else f"{value[:characters]}… {len(value) - characters:,} more"
    if isinstance(value, dict):
        return {str(key): readable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        shown = [readable(item) for item in value[:items]]
        return shown if len(value) <= items else [*shown, f"… {len(value) - items:,} more"]
    return value if value is None or isinstance(value, bool | int | float) else str(value)


def difference(target: str | os.PathLike[str], old: str, new: str) -> Difference:
    """Compare two snapshots of a cache; raises CacheError if one is gone."""
    cache = CacheDirectory.open(target)
    snapshots = cache.snapshot(old), cache.snapshot(new)
    before, after = ({entry.path: entry for entry in snapshot.manifest().files} for snapshot in snapshots)
    changed = [path for path in before.keys() & after.keys() if _made_from(before[path]) != _made_from(after[path])]
    moved: dict[str, tuple[list[FileEntry], list[FileEntry]]] = {}
    for path in sorted((before.keys() ^ after.keys()) | set(changed), key=parent):
        for entries, found in zip((before, after), moved.setdefault(parent(path), ([], [])), strict=True):
            found += [entries[path]] if path in entries else []
    return Difference(
        old=snapshots[0].id,
        new=snapshots[1].id,
        added=tuple(sorted(after.keys() - before.keys())),
        removed=tuple(sorted(before.keys() - after.keys())),
        changed=tuple(sorted(changed)),
        unchanged=len(before.keys() & after.keys()) - len(changed),
        rows=(sum(e.rows for e in before.values()), sum(e.rows for e in after.values())),
        bytes=(sum(e.size for e in before.values()), sum(e.size for e in after.values())),
        partitions={directory: _rows_moved(*entries) for directory, entries in moved.items()},
    )


def _rows_moved(before: Sequence[FileEntry], after: Sequence[FileEntry]) -> tuple[int, int]:
    """Rows added to and removed from a partition, given its entries that are gone and those that are new."""
    removed, added = (sum(entry.rows for entry in entries) for entries in (before, after))
    was, now = ({file for entry in entries for file in entry.sources} for entries in (before, after))
    if was <= now or now <= was:  # what both have was only written in another way
        return max(0, added - removed), max(0, removed - added)
    return added, removed


def _made_from(entry: FileEntry) -> tuple[object, ...]:
    return entry.sources, entry.recipe, entry.size
