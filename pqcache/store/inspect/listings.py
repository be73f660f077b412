"""List the items of a dataset: files, row groups, columns, some rows, and what changed between snapshots."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pqcache.errors import ParquetError, UsageError
from pqcache.events import OnEvent, ignore
from pqcache.parquet.dense import as_list
from pqcache.parquet.misread import check_read_right
from pqcache.store.cache_directory import CacheDirectory
from pqcache.store.hive import parent
from pqcache.store.inspect.summary import leased_snapshot, read_remote_index
from pqcache.store.manifest import FileEntry
from pqcache.store.row_group_index import Index
from pqcache.store.sync.listing import ListingRules, list_source
from pqcache.store.tables.base import OpenOptions
from pqcache.store.tables.data_files import FileRules
from pqcache.store.tables.open_table import open_table
from pqcache.store.urls import local_path, quoted, redact, url_scheme
from pqcache.system.disk import check_regular
from pqcache.units import format_size

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
class FileView:
    """One file: its path, bytes, rows, row groups, and the compressed bytes of its largest row group."""

    path: str
    bytes: int
    rows: int
    row_groups: int
    largest: int


@dataclass(frozen=True, kw_only=True)
class RowGroupView:
    """One row group: where it is, its rows, and its bytes on disk and decompressed."""

    path: str
    row_group: int
    rows: int
    offset: int
    bytes: int
    uncompressed: int


@dataclass(frozen=True, kw_only=True)
class Difference:
    """What differs between two snapshots, ``old`` and ``new`` by ID: files by path, and rows and bytes of either.

    ``partitions`` has the numbers of added and removed rows. Where a partition has both new source files and other ones
    no longer, all rows of files that were written anew count.
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

    ``arriving`` says that not all bytes need be there.
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
    """Open a cache, a directory, a file or a URL; of anything but a cache the footers are read.

    Raises as ``inspect`` does.
    """
    text = os.fspath(target)
    cache = CacheDirectory(Path(text).absolute())
    if url_scheme(text) == "" and cache.exists():
        with leased_snapshot(cache, candidate) as (snapshot, progress):
            entries = snapshot.manifest().files
            sizes = [entry.size for entry in entries]
            return InspectedDataset(snapshot.index(), sizes, snapshot.path, arriving=progress is not None)
    if candidate:
        raise UsageError("--candidate", f"{redact(text)} is not a pqcache", "name a cache")
    source = open_table(text, OpenOptions(store=options or {}, as_files=rules is not None and rules.as_files))
    try:
        listing = list_source(source, on_event, ListingRules(files=rules or FileRules()))
        files = sorted(listing.files, key=lambda file: file.path)
        index = read_remote_index(source, files, jobs, on_event)
    finally:
        source.close()
    root = None
    if url_scheme(text) in ("", "file"):
        root = Path(os.path.abspath(os.path.expanduser(local_path(text))))
        root = root.parent if root.is_file() else root
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
    """Convert to Python, also times and texts that Python's types cannot hold."""
    try:
        return value.as_py()
    except (ValueError, OverflowError):
        return _described(value)


def _described(value: pa.Scalar) -> Any:
    """Replace what Python's types cannot hold by numbers, or texts with replacement characters."""
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
    """Return a value as JSON can have it: binary as kind and size, long lists and strings cut off.

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
    """Return what differs between two snapshots of a cache that are kept; others raise CacheError."""
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
    """Rows added to and removed from a partition, from its old entries that are gone and those that are new."""
    removed, added = (sum(entry.rows for entry in entries) for entries in (before, after))
    was, now = ({file for entry in entries for file in entry.sources} for entries in (before, after))
    if was <= now or now <= was:  # what both have was only written in another way
        return max(0, added - removed), max(0, removed - added)
    return added, removed


def _made_from(entry: FileEntry) -> tuple[object, ...]:
    return entry.sources, entry.recipe, entry.size
