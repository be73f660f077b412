"""Finds the list columns of a table that can be stored dense, and their types, common to all files."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pqcache.errors import ParquetError, UsageError, first_line, no_column
from pqcache.events import OnEvent, ignore
from pqcache.parquet.arrow import top_level_names
from pqcache.parquet.dense import (
    Dense,
    as_dense,
    as_list,
    as_lists,
    dense_in,
    dense_of,
    dense_to_lists,
    item_dtype,
    smallest,
)
from pqcache.parquet.rewrite.sources import open_parquet
from pqcache.parquet.schema import merge_schemas
from pqcache.parquet.validation import read_footer
from pqcache.store.cache_directory import cache_at
from pqcache.store.drivers.registry import open_source as open_dataset
from pqcache.store.sync.listing import ListingRules, list_source
from pqcache.store.tables.data_files import FileRules
from pqcache.store.urls import is_local, local_directory, quoted, redact

_JOBS = 8
_SAMPLE = 1024  # rows
_BATCH = 4096  # rows decoded at once

File = tuple[Path, pq.FileMetaData, pa.Schema]


@dataclass(frozen=True)
class Proposal:
    """A list column that can be dense: its type, and its dense type without and with ``--narrow``."""

    column: str
    type: str
    dense: str
    narrow: str

    def to_dict(self) -> dict[str, Any]:
        """Return the proposal as plain values."""
        return asdict(self)


def resolve_dense(paths: Sequence[Path], columns: Sequence[str] | None, narrow: bool) -> dict[str, str]:
    """Find the dense type, like ``uint16[512]``, of each of ``columns`` for all of ``paths``.

    None for ``columns`` takes those that are dense already. The first row gives the length, which is checked for all
    rows when they are rewritten. With ``narrow``, integers get the smallest type that holds all.

    Raises:
        UsageError: a column is missing, or isn't a list of numbers.
        ParquetError: the first row is null or empty, or a file is damaged.
    """
    files = _files(paths)
    schema = _schema(files)
    if columns is None:
        columns = list(dict.fromkeys(name for _, _, known in files for name in dense_in(known)))
        if not columns:
            raise UsageError("--narrow", "no column is dense", "name one with --dense COLUMN")
    found = {}
    for name in columns:
        if name not in schema.names:
            raise no_column(f"--dense {name}", name, schema.names)
        if schema.names.count(name) > 1:
            raise UsageError(f"--dense {name}", "two columns have this name", f"there are: {', '.join(schema.names)}")
        dtype = item_dtype(schema.field(name).type)
        if dtype is None:
            kind = schema.field(name).type
            raise UsageError(
                f"--dense {name}", f"it is {kind}", "only lists of numbers, all of one length, can be dense"
            )
        length = _first_length(files, name)
        if length is None:
            raise UsageError(f"--dense {name}", "its length is unknown, as no file has rows")
        if narrow and dtype.strip("u").startswith("int"):
            dtype = smallest(*_extremes(files, name))
        as_dense(schema.field(name), Dense(dtype, length))  # raises where that is too wide
        found[name] = Dense(dtype, length).text
    return found


def propose_dense(paths: Sequence[Path]) -> list[Proposal]:
    """Columns whose lists have one length, by footers and first rows."""
    files = _files(paths)
    found = []
    for field in _schema(files):
        dtype = item_dtype(field.type)
        if dtype is None or any(field.name in dense_in(schema) for _, _, schema in files):
            continue
        length = _common_length(files, field.name)
        if length is not None:
            narrow = smallest(*_extremes(files, field.name)) if dtype.strip("u").startswith("int") else dtype
            found.append(Proposal(field.name, str(field.type), Dense(dtype, length).text, Dense(narrow, length).text))
    return found


def _files(paths: Sequence[Path]) -> list[File]:
    with ThreadPoolExecutor(_JOBS) as pool:
        return [(path, *footer) for path, footer in zip(paths, pool.map(read_footer, paths), strict=True)]


def _schema(files: Sequence[File]) -> pa.Schema:
    """The schema of all files, with lists for dense columns."""
    named: list[tuple[str, pa.Schema]] = []
    for path, _, schema in files:
        if not any(schema.equals(known, check_metadata=True) for _, known in named):
            named.append((str(path), schema))
    return merge_schemas([(name, as_lists(schema)) for name, schema in named])


def _lists(file: File, name: str, rows: int | None = None, groups: Sequence[int] | None = None) -> Any:
    """Yield a column as arrays of lists; with ``rows`` only its first rows."""
    path, _, schema = file
    field = schema.field(name)
    stored = dense_of(field)
    try:
        with open_parquet(path) as opened:
            for batch in opened.iter_batches(rows or _BATCH, row_groups=groups, columns=[name], use_threads=False):
                array = batch.column(0)
                yield array if stored is None else dense_to_lists(array, stored, as_list(field).type)
                if rows is not None:
                    return
    except (pa.ArrowException, OSError) as error:
        raise ParquetError(path, f"cannot be decoded ({first_line(error)})", "fetch the file again") from error


def _first_length(files: Sequence[File], name: str) -> int | None:
    for file in files:
        path, metadata, schema = file
        if name not in schema.names or not metadata.num_rows:
            continue
        (value,) = next(_lists(file, name, 1)).to_pylist()
        if not value:
            what = "null" if value is None else "empty"
            raise ParquetError(path, f"column {name!r}, row 0 is {what}, so it cannot be dense", "leave it out")
        return len(value)
    return None


def _common_length(files: Sequence[File], name: str) -> int | None:
    """The length of a column's lists, if the average in every row group and the first rows agree on it."""
    lengths = set()
    for _, metadata, schema in files:
        if not metadata.num_rows:
            continue
        if name not in schema.names:
            return None
        for group, leaf in _leaves(metadata, schema, name):
            if group.num_rows:
                lengths.add(leaf.num_values / group.num_rows)
        if len(lengths) > 1:
            return None
    length = int(next(iter(lengths), 0))
    if length < 1 or lengths != {length}:
        return None
    first = next(file for file in files if file[1].num_rows)
    sample = next(_lists(first, name, _SAMPLE))
    constant = not sample.null_count and pc.all(pc.equal(pc.list_value_length(sample), length)).as_py()
    return length if constant and not pc.list_flatten(sample).null_count else None


def _leaves(metadata: pq.FileMetaData, schema: pa.Schema, name: str) -> Any:
    """Yield each row group with the only leaf of a column in it."""
    position = top_level_names(metadata, schema).index(name)
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        yield group, group.column(position)


def _extremes(files: Sequence[File], name: str) -> tuple[int, int]:
    """Minimum and maximum of a column: from statistics, or decoded if there are none."""
    lows, highs = [0], [0]
    for file in files:
        _, metadata, schema = file
        if name not in schema.names:
            continue
        unknown = []
        for number, (group, leaf) in enumerate(_leaves(metadata, schema, name)):
            known = leaf.statistics if dense_of(schema.field(name)) is None else None
            if known is not None and known.has_min_max:
                lows.append(int(known.min))
                highs.append(int(known.max))
            elif group.num_rows:
                unknown.append(number)
        for array in _lists(file, name, groups=unknown) if unknown else ():
            found = pc.min_max(pc.list_flatten(array)).as_py()
            if found["min"] is not None:
                lows.append(found["min"])
                highs.append(found["max"])
    return min(lows), max(highs)


def dense_proposals(
    source: str | os.PathLike[str],
    *,
    options: Mapping[str, str] | None = None,
    as_files: bool = False,
    all_files: bool = False,
    on_event: OnEvent = ignore,
) -> list[Proposal]:
    """List the columns of a cache or a local directory that ``dense`` would make faster to read.

    Only footers and first rows are read; a repartition checks every row. ``as_files`` and ``all_files`` are as for
    ``repartition``.

    >>> dense_proposals("cache/shop")  # its lists have many lengths
    []

    Raises UsageError (not local), SourceError or ParquetError.
    """
    text = os.fspath(source)
    cache = cache_at(text)
    if cache is not None:
        snapshot, lease = cache.lease()
        with lease:
            return propose_dense([snapshot.path / entry.path for entry in snapshot.manifest().files])
    root = local_root(text)  # refused before anything is contacted
    opened = open_dataset(text, options)
    try:
        listing = list_source(opened, on_event, ListingRules(files=FileRules(as_files=as_files, all_files=all_files)))
        files = sorted(listing.files, key=lambda file: file.path)
    finally:
        opened.close()
    return propose_dense([root / file.path for file in files])


@dataclass(frozen=True)
class DenseRequest:
    """The columns to store dense (None: those that already are), and whether in the smallest type."""

    columns: Sequence[str] | None
    narrow: bool

    @property
    def is_empty(self) -> bool:
        """Whether no column changes its storage."""
        return self.columns is None and not self.narrow

    @property
    def reads_files(self) -> bool:
        """Whether files have to be read first, as always except for ``--dense none``."""
        return bool(self.columns) or self.narrow

    def resolve(self, paths: Sequence[Path]) -> dict[str, str]:
        if self.columns is not None and not self.columns:
            if self.narrow:
                raise UsageError("--narrow", "goes with --dense COLUMN, and not with --dense none")
            return {}
        return resolve_dense(paths, self.columns, self.narrow)


def local_root(url: str) -> Path:
    """The directory of a source; UsageError unless it is local."""
    if not is_local(url):
        raise UsageError(
            "--dense",
            f"every file would have to be read first, and {redact(url)} is not local",
            f"copy it with 'pqcache sync {quoted(redact(url))} CACHE', then run 'pqcache repartition CACHE'",
        )
    return local_directory(url)
