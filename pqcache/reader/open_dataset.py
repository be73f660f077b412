"""Opens a dataset (a cache, a snapshot, a directory of Parquet or one file) by its index, without reading data.

`Files` then opens each file once per process, and every error names the file.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import time
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import pyarrow as pa

from pqcache.errors import CacheError, DamagedError, ParquetError, PqcacheError, SourceError, UsageError
from pqcache.events import Event, Warned
from pqcache.parquet.misread import may_be_doubtful
from pqcache.parquet.row_group_reader import RowGroupFile
from pqcache.reader.arriving import Arrivals
from pqcache.reader.order import Ints
from pqcache.store.arriving import ArrivingSnapshot, find_arriving
from pqcache.store.background_run import (
    FillRequest,
    check_source,
    ensure_filling,
    is_filled_or_filling,
    is_locked,
)
from pqcache.store.cache_directory import CacheDirectory, advice_for_file, lease_at, snapshot_at
from pqcache.store.drivers.local import LocalSource
from pqcache.store.layout import ARRIVED, ARRIVING, CANDIDATE, FILES, LEASE, PUBLISHING, ROW_GROUPS
from pqcache.store.manifest import Manifest, content_of
from pqcache.store.manifest_file import read_heading, read_manifest
from pqcache.store.partition_paths import parent, partition_schema
from pqcache.store.row_group_index import NO_SCHEMA, Index, build_index, local_files, with_dictionaries
from pqcache.store.snapshot import Lease, Snapshot, closed_on_error, rows_in_summary
from pqcache.store.sync.listing import check_one_table, dataset_files, without_links
from pqcache.store.tables.data_files import FileRules, check_above
from pqcache.store.urls import quoted, redact
from pqcache.system.buffers import SharedNumbers
from pqcache.system.disk import has_lasting_inodes, read_ahead
from pqcache.units import format_count, printable

T = TypeVar("T")

_MOVING = 2.0  # seconds: more than a snapshot takes from ``arriving/`` to where ``current`` points to it
_PUBLISHING = 60.0  # seconds: the same where the run that does it is at work, on a disk that others keep busy
_POLL = 0.01  # seconds


class FileIdentity(NamedTuple):
    """Identifies the indexed version of a file; ``inode`` is 0 if its file system may change it."""

    size: int
    mtime_ns: int
    inode: int

    def matches(self, status: os.stat_result) -> bool:
        same = (status.st_size, status.st_mtime_ns) == (self.size, self.mtime_ns)
        return same and self.inode in (0, status.st_ino)


@dataclass(frozen=True, kw_only=True)
class LocalDataset:
    """An opened dataset.

    Attributes:
        directory: the directory of its files when it was opened; see ``root``.
        index: its row groups.
        snapshot: a name for its content, even outside of a cache.
        cache: the cache it was opened through; None for a snapshot or plain files opened by path.
        part_of: the snapshot that contains plain files, which is leased.
        identities: one per plain file, as these may be replaced; None for a snapshot, which is immutable.
        arrivals: what has arrived of an unpublished snapshot; None for any other dataset.
    """

    directory: Path
    index: Index
    snapshot: str
    cache: Path | None = None
    part_of: Snapshot | None = None
    identities: tuple[FileIdentity, ...] | None = None
    arrivals: Arrivals | None = None

    @property
    def root(self) -> Path:
        """The directory of its files: for a snapshot its own path, never ``current``.

        It changes when an arriving snapshot, or the candidate, is published.
        """
        if self.arrivals is not None:
            return self.arrivals.root
        if self.cache is None or self.directory.parent.name != CANDIDATE or self.directory.is_dir():
            return self.directory
        return self.cache / "snapshots" / self.snapshot

    @cached_property
    def content(self) -> str:
        """Equal for equal files, even in the caches of two nodes, which name their snapshots differently."""
        numbers = (self.index.numbers(name).tobytes() for name in ("file", "rows", "uncompressed"))
        return hashlib.blake2b("\0".join(self.index.paths).encode() + b"".join(numbers), digest_size=8).hexdigest()

    @cached_property
    def contents(self) -> list[str]:
        """Each file's path and checksum, equal in the caches of two nodes; for plain files path, size and time."""
        paths = self.index.paths
        if self.identities is not None:
            return [f"{path}\0{i.size} {i.mtime_ns}" for path, i in zip(paths, self.identities, strict=True)]
        known = {entry.path: content_of(entry) for entry in read_manifest(self.root / FILES).files}
        return [known[path] for path in paths]

    @property
    def arriving(self) -> str | None:
        """What has arrived of a first copy, as text; None if it is complete."""
        return None if self.arrivals is None or self.arrivals.is_complete else self.arrivals.progress()

    def path_of(self, row_group: int) -> Path:
        """The file with a row group of the index."""
        return self.root / self.index.paths[int(self.index.numbers("file")[row_group])]

    def describe(self, row_group: int) -> str:
        """Name a row group of the index by its file and number, for messages."""
        return f"row group {int(self.index.numbers('row_group')[row_group])} of {self.path_of(row_group)}"

    def wait(self, row_groups: Ints) -> None:
        """Wait until row groups of the index have arrived."""
        if self.arrivals is not None:
            self.arrivals.wait(row_groups)

    def wanting(self, row_groups: Ints) -> AbstractContextManager[None]:
        """While entered, announces that these row groups are needed, in this order."""
        return nullcontext() if self.arrivals is None else self.arrivals.wanting(row_groups)

    def while_moving(self, read: Callable[[], T]) -> T:
        """Call ``read``, which reads files below ``root``, even while these are being published."""
        if self.arrivals is not None:
            return self.arrivals.while_moving(read)
        root = self.root
        try:
            return read()
        except (PqcacheError, OSError):
            if self.root == root:
                raise
        return read()

    def lease(self) -> Lease | None:
        """Lease the snapshot that plain files are in, if any."""
        return None if self.part_of is None else self.part_of.lease()


def open_local_dataset(
    path: str | os.PathLike[str],
    snapshot: str | None = None,
    rules: FileRules | None = None,
    fill: FillRequest | None = None,
) -> tuple[LocalDataset, Lease | None]:
    """Open a cache (its current or named snapshot), a snapshot, a part of one, a directory, or one file.

    A cache without a snapshot is opened while its first one arrives; ``fill`` says how to fetch it if no run does. A
    path into a snapshot stays with that snapshot, even if it went through ``current``. The lease protects a snapshot
    from removal; close it when done. ``rules`` select the files of a directory and declare the types of partition
    columns. Raises UsageError if the path doesn't exist or has no Parquet.
    """
    data, lease = _open_local(path, snapshot, rules or FileRules(), fill)
    with closed_on_error(lease):
        return data if rules is None or not rules.types else _with_types(data, rules.types, NO_SCHEMA), lease


def _with_types(data: LocalDataset, declared: Mapping[str, str], whole: pa.Schema) -> LocalDataset:
    """Set the types of partition columns: as declared, or as in ``whole``, the snapshot that contains this part."""
    index = data.index
    if mixed := declared.keys() & set(index.path_values.column_names):
        reason = "some files contain that column, and its type there applies"
        raise UsageError(f"partition type {min(mixed)}={declared[min(mixed)]}", reason)
    table = pa.schema([*index.table_schema, *whole])
    types, misfits = partition_schema(map(parent, index.paths), declared, table)
    for errors in misfits.values():
        error = next(iter(errors.values()))
        raise UsageError(error.subject, error.reason, "declare another type; text takes any value")
    others = [field for field in index.table_schema if field.name not in types.names]
    return replace(data, index=replace(index, table_schema=pa.schema([*others, *types])))


def _open_local(
    path: str | os.PathLike[str], snapshot: str | None, rules: FileRules, fill: FillRequest | None
) -> tuple[LocalDataset, Lease | None]:
    text = os.fspath(path)
    if not text:  # Path("") would be this directory
        raise UsageError("", "an empty path", "name a cache, a directory of Parquet or a file")
    url = re.fullmatch(r"([a-zA-Z][a-zA-Z0-9+.-]+):/+(.*)", text, re.DOTALL)  # Path makes one slash of two
    if url is not None and ("://" in text or not os.path.lexists(text)):
        shown = redact(f"{url[1]}://{url[2]}")
        raise UsageError(shown, "not a local path", f"run 'pqcache sync {quoted(shown)} DIRECTORY' and open DIRECTORY")
    root = Path(text).expanduser().absolute()
    cache = CacheDirectory(root)
    if fill is not None:
        if cache.exists():
            check_source(cache, fill)  # before its run is waited for
        ensure_filling(root, fill, lambda: is_filled_or_filling(cache))
    if cache.exists():
        if fill is not None:
            check_source(cache, fill)
        return _open_cache(cache, snapshot, fill)
    whole, place, held = _leased_snapshot(root)
    with closed_on_error(held):
        if whole is not None and place == whole.path:  # CACHE/current, or a snapshot by its own path
            data = LocalDataset(directory=place, index=_index_of(whole), snapshot=whole.id)
        else:
            data = replace(_plain_files(place, text, rules), part_of=None if held is None else whole)
            if whole is not None:
                data = _with_types(data, {}, whole.index().table_schema)
        if snapshot is not None and data.snapshot != snapshot:
            raise UsageError(data.root, f"its files differ from those of {snapshot}", "they have changed since then")
        return data, held


def heading_of(data: LocalDataset) -> Manifest | None:
    """The manifest of a snapshot, without its files; None for plain files."""

    def read() -> Manifest | None:
        return read_heading(data.root / FILES) if data.arrivals or (data.root / FILES).is_file() else None

    return data.while_moving(read)


def shard_of(path: Path, snapshot: str | None, fill: FillRequest | None) -> str | None:
    """The share of the source in a cache's snapshot, like ``0/3``; None for all of it."""
    data, lease = open_local_dataset(path, snapshot, fill=fill)
    with lease or nullcontext():
        heading = heading_of(data)
    return None if heading is None else heading.shard


def _open_cache(cache: CacheDirectory, snapshot: str | None, fill: FillRequest | None) -> tuple[LocalDataset, Lease]:
    """Open a snapshot, published or arriving; look again while it moves from one to the other."""
    looks = 0  # not a time, which may have passed while this process stood still
    while True:
        current = cache.current()
        arriving = _arriving(cache, snapshot)
        try:
            return _open_published(cache, snapshot) if arriving is None else _open_arriving(cache, arriving, fill)
        except (CacheError, OSError) as error:
            if arriving is None and isinstance(error, DamagedError) and cache.current() == current:
                raise  # it has not moved
            is_publishing = os.path.isfile(cache.path / PUBLISHING) and is_locked(cache)  # by a run that is at work
            waits = _PUBLISHING if is_publishing else _MOVING
            may_come = _may_be_moving(cache, snapshot, arriving) and looks * _POLL < waits
            if not may_come and cache.current() == current:  # looked at last: else it has been published since
                raise
        looks += 1
        time.sleep(_POLL)


def _open_published(cache: CacheDirectory, snapshot: str | None) -> tuple[LocalDataset, Lease]:
    if snapshot is not None:
        found = cache.snapshot(snapshot)
        lease = found.lease()
    else:
        found, lease = cache.lease()
    with closed_on_error(lease):
        try:
            data = LocalDataset(directory=found.path, index=_index_of(found), snapshot=found.id, cache=cache.path)
        except DamagedError as error:
            if found.path.is_dir():
                raise
            raise CacheError(found.path, "the candidate was just published", "open the cache again") from error
    return data, lease


def _index_of(snapshot: Snapshot) -> Index:
    """The index of a published snapshot; DamagedError if it has lost rows.

    Only row counts are checked: a row group without rows is never opened, so they are not compared with the file's.
    """
    index, rows = snapshot.index(), rows_in_summary(snapshot)
    if rows is not None and rows != (found := int(index.rows.sum())):
        raise DamagedError(
            snapshot.path / ROW_GROUPS,
            f"it has {format_count(found, 'row')}, and the snapshot {rows:,}",
            "the next sync builds it again",
        )
    return index


def _open_arriving(
    cache: CacheDirectory, found: ArrivingSnapshot, fill: FillRequest | None
) -> tuple[LocalDataset, Lease]:
    lease = found.lease()
    with closed_on_error(lease):
        index = found.index()
        arrivals = Arrivals(cache.path, found, index, fill)
        data = LocalDataset(directory=found.path, index=index, snapshot=found.id, cache=cache.path, arrivals=arrivals)
    return data, lease


def _arriving(cache: CacheDirectory, snapshot: str | None) -> ArrivingSnapshot | None:
    """The arriving snapshot to open: the one named, or any if none is published."""
    if snapshot is None:
        return find_arriving(cache) if cache.current() is None else None
    found = ArrivingSnapshot(cache.path / ARRIVING / snapshot)
    return found if os.path.isfile(found.path / ARRIVED) else None


def _may_be_moving(cache: CacheDirectory, snapshot: str | None, arriving: ArrivingSnapshot | None) -> bool:
    """Whether a snapshot that could not be opened may be moving from arriving to published."""
    if arriving is not None:
        return not os.path.isfile(arriving.path / ARRIVED)
    names: set[str] = set()
    for directory in (ARRIVING, "snapshots"):
        with suppress(OSError):
            names.update(os.listdir(cache.path / directory))
    return bool(names) and cache.current() is None if snapshot is None else snapshot in names


def _leased_snapshot(root: Path) -> tuple[Snapshot | None, Path, Lease | None]:
    """The snapshot that is or contains ``root``, the path in it, and its lease; plain copies have none."""
    try:
        leased = lease_at(str(root), copies=True)
    except CacheError:
        copy = snapshot_at(str(root), copies=True)
        if copy is None or (copy[0].path / LEASE).exists():
            raise
        return copy[0], copy[0].path / copy[1], None
    if leased is None:
        return None, root, None
    snapshot, below, lease = leased
    return snapshot, snapshot.path / below, lease


def _plain_files(root: Path, text: str, rules: FileRules) -> LocalDataset:
    """Open a directory or one file; errors show it as ``text``."""
    if root.is_file():
        if not rules.as_files:
            check_above(str(root))
        return _indexed(root.parent, {root.name: _identity(root)})
    if not root.is_dir():
        raise UsageError(text, "no such file or directory", "name a cache, a directory of Parquet or a file")
    source = LocalSource(str(root), {})
    files = dataset_files(source, list(source.list()), rules, _warn)
    files = without_links(source, files, source.second_names([file.path for file in files]), _warn)
    if not files:
        raise UsageError(text, "no Parquet files in it", f"fill it with 'pqcache sync SOURCE {quoted(text)}'")
    if not rules.as_files:
        check_one_table(source, files)
    return _indexed(root, {path: _identity(root / path) for path in sorted(file.path for file in files)})


def _indexed(root: Path, identities: Mapping[str, FileIdentity]) -> LocalDataset:
    """Open files by their footers; ``identities`` were taken before these are read."""
    index = with_dictionaries(build_index(root, list(identities), clashes={}, dictionaries=False), local_files(root))
    known = tuple(identities[path] for path in index.paths)
    wrong = next((path for path in index.paths if path.encode(errors="replace").decode() != path), None)
    if wrong is not None:
        raise SourceError(printable(f"{root}/{wrong}"), "has a name that is not UTF-8", "rename it")
    digest = hashlib.blake2b("\n".join(index.paths).encode(), digest_size=8)
    digest.update(repr([identity[:2] for identity in known]).encode())  # no inodes: copies may keep their times
    for column in ("file", "rows", "offset", "bytes"):
        digest.update(index.numbers(column).tobytes())
    return LocalDataset(directory=root, index=index, snapshot=f"files-{digest.hexdigest()}", identities=known)


def _identity(path: Path) -> FileIdentity:
    try:
        status = path.stat()
    except OSError as error:
        raise ParquetError(path, f"cannot be read ({error.strerror})", "repair it, or move it away") from error
    return FileIdentity(status.st_size, status.st_mtime_ns, status.st_ino if has_lasting_inodes(status.st_dev) else 0)


def _warn(event: Event) -> None:
    if isinstance(event, Warned):
        warnings.warn(event.message, stacklevel=2)


log = logging.getLogger("pqcache.reader")

_FILES = 256  # open ones of a process, as parsing a footer again takes time
_REPLACED = "the file was replaced while in use: open the dataset again"
_PART_BYTES, _PART_ROWS = 4 << 20, 64 << 10  # of columns that are looked at, about, and at most


class Files:
    """The files of a dataset, each opened once per process; thread-safe."""

    def __init__(self, data: LocalDataset) -> None:
        self.data = data
        self._open: dict[int, RowGroupFile] = {}  # without a lock, as the process may fork
        doubtful = [field.name for field in data.index.schema if may_be_doubtful(field.type)]
        self._read_right = SharedNumbers(doubtful, len(data.index))  # 1 for those that were checked

    def group(self, number: int) -> RowGroup:
        """Row group ``number`` of the index."""
        return RowGroup(self.data, number)

    def file(self, group: RowGroup) -> RowGroupFile:
        """Open the file of a row group; ParquetError if file and index disagree about its row groups."""
        found = self._open.get(group.file)
        if found is None or found.path != group.path:  # which changes when an arriving snapshot is published
            if len(self._open) >= _FILES:
                log.debug("more than %d files are read: their footers are parsed again", _FILES)
                self._open.clear()
            found = RowGroupFile(group.path)
            self._check_row_groups(group.file, found)
            self._open[group.file] = found
        return found

    def _check_row_groups(self, file: int, found: RowGroupFile) -> None:
        index, metadata = self.data.index, found.metadata
        low, high = np.searchsorted(index.numbers("file"), [file, file + 1]).tolist()
        rows = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
        numbers = index.numbers("row_group")[low:high]
        if np.array_equal(index.rows[low:high], rows) and np.array_equal(numbers, np.arange(len(rows))):
            return
        for group in map(self.group, range(low, high)):
            there = rows[group.row_group] if group.row_group < len(rows) else 0
            if there != group.rows:
                raise group.replaced(there)
        raise ParquetError(
            found.path,
            f"it has {format_count(len(rows), 'row group')}, and the index has others",
            advice_for_file(found.path, _REPLACED),
        )

    @contextmanager
    def reading(self, group: RowGroup) -> Iterator[RowGroupFile]:
        """Yield the file of a row group once it has arrived; errors name the file, and what to do about it."""
        self.data.wait(np.array([group.number]))
        try:
            group.check_identity()
            yield self.file(group)
            group.check_identity()  # it may be written in place
        except ParquetError as error:
            group.check_identity()
            if error.subject != str(group.path) or "again" not in error.advice:  # to fetch, write or open it
                raise
            damaged = error.reason != "the file is gone"
            advice = advice_for_file(group.path, error.advice, deep=damaged)
            raise ParquetError(group.path, error.reason, advice) from error

    def has_page_index(self, group: RowGroup, columns: Sequence[str]) -> bool:
        """Whether rows of these columns can be read page by page; not before the whole dataset has arrived."""
        arrivals = self.data.arrivals
        return (arrivals is None or arrivals.is_complete) and self.file(group).has_page_index(group.row_group, columns)

    def read_rows(self, group: RowGroup, columns: Sequence[str], low: int, high: int) -> dict[str, pa.Array]:
        """Read rows ``low`` up to ``high`` of those ``columns`` that the file has."""
        known = [name for name in columns if name in self._read_right.names]
        trusted = [name for name in known if self._read_right.numbers(name)[group.number]]
        found = self.file(group).read_rows(group.row_group, columns, low, high, trusted=trusted)
        for name in known:
            self._read_right.numbers(name)[group.number] = 1
        return found

    def parts(self, group: RowGroup, columns: Sequence[str]) -> Generator[pa.Table]:
        """Yield all rows, some at a time, of those ``columns`` in the file or its path, in the file's types."""
        if not columns:
            yield no_columns(group.rows)
            return
        with self.reading(group) as file:
            wanted = [name for name in columns if name in file.schema.names]
            if not wanted:
                yield group.with_path_values(no_columns(group.rows), columns)
                return
            each = self.data.index.decoded(group.number, wanted) / max(1, group.rows)
            rows = int(np.clip(_PART_BYTES / max(each, 1), 1, _PART_ROWS))
            left = group.rows
            with closing(file.batches(group.row_group, wanted, rows)) as batches:
                for batch in batches:
                    left -= batch.num_rows
                    yield group.with_path_values(pa.Table.from_batches([batch]), columns)
            if left:
                raise group.replaced(group.rows - left)


class RowGroup:
    """The location of row group ``number`` of the index."""

    def __init__(self, data: LocalDataset, number: int) -> None:
        self._data, index = data, data.index
        self.number = number
        self.file = int(index.numbers("file")[self.number])
        self.row_group = int(index.numbers("row_group")[self.number])
        self.rows = int(index.rows[self.number])
        self.path = data.path_of(number)

    def path_value(self, name: str) -> pa.Scalar | None:
        """The value of a column in this file's path; None if the column is inside the file."""
        values = self._data.index.path_values
        if name not in values.column_names:
            return None
        value = values[name][self.file]
        return value if value.is_valid else None

    def with_path_values(self, table: pa.Table, columns: Sequence[str]) -> pa.Table:
        """Add those ``columns`` that this file has in its path, and other files inside."""
        for name in self._data.index.path_values.column_names:
            value = self.path_value(name)
            if name in columns and value is not None:
                if name in table.column_names:  # null, as a rewrite adds columns that a file lacks
                    table = table.drop_columns([name])
                table = table.append_column(name, pa.repeat(value, table.num_rows))
        return table

    def read_ahead(self) -> None:
        """Have the kernel read all of it at once: a cold disk is slow page by page."""
        table = self._data.index.table
        read_ahead(self.path, *(table[name][self.number].as_py() for name in ("offset", "bytes")))

    def check_identity(self) -> None:
        """Raise ParquetError if a plain file was replaced since it was indexed, even by one of the same layout."""
        if self._data.identities is None:
            return
        try:
            status = os.stat(self.path)
        except FileNotFoundError as error:
            raise self.gone() from error
        if not self._data.identities[self.file].matches(status):
            raise ParquetError(
                self.path,
                "was replaced or written to since the dataset was opened",
                "open the dataset again; a cache has snapshots, which do not change",
            )

    def gone(self) -> ParquetError:
        return ParquetError(
            self.path, "the file is gone", advice_for_file(self.path, "open the dataset again", deep=False)
        )

    def replaced(self, rows: int) -> ParquetError:
        return ParquetError(
            self.path,
            f"row group {self.row_group} has {rows} rows, and the index says {self.rows}",
            advice_for_file(self.path, _REPLACED),
        )


def no_columns(rows: int) -> pa.Table:
    """A table of ``rows`` rows without columns, which Arrow only makes from a table with columns."""
    return pa.table({"": pa.nulls(rows)}).select([])
