"""``filters=``, the rows that satisfy a condition, and ``since=``, the files that an older snapshot lacks.

Partition values, minima, maxima and null counts decide a condition for whole row groups. For the others, the
condition's columns are read.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pqcache.errors import CacheError, UsageError, first_line
from pqcache.filters.expression import Condition, condition_columns, expression_of, rows_where, text_of
from pqcache.filters.pruning import TruthValues, prune_by_expression, prune_row_groups
from pqcache.parquet.dense import as_lists, dense_in, dense_to_lists
from pqcache.parquet.schema import cast_to_schema, condition_schema_of
from pqcache.reader.open_dataset import LocalDataset
from pqcache.reader.selection.selection import Bools, Counts, Selection, Test, found_once
from pqcache.store.cache_directory import CacheDirectory
from pqcache.store.history import ROLLBACK, read_history
from pqcache.store.layout import FILES
from pqcache.store.manifest import FileEntry, Identity, SourceFile
from pqcache.store.manifest_file import read_manifest
from pqcache.store.partition_paths import with_hints
from pqcache.store.row_group_index import Index
from pqcache.store.snapshot import Snapshot
from pqcache.units import format_count


@dataclass(frozen=True, kw_only=True)
class RowFilter:
    """A parsed ``filters=``.

    Attributes:
        schema: the dataset's columns, as users see them.
        condition: None for a pyarrow expression, which cannot be taken apart.
        columns: the columns in the condition.
        text: identifies the condition.
    """

    schema: pa.Schema
    expression: pc.Expression
    condition: Condition | None
    columns: tuple[str, ...]
    text: str


def filter_rows(found: Selection, filters: Any, known: Counts | None) -> Selection:
    """The rows that satisfy ``filters``.

    ``filters`` is a condition as for ``--where``, a list as in pandas and pyarrow, or a pyarrow expression;
    docs/loading.md says how nulls are treated. UsageError if it is invalid.
    """
    index, groups = found.data.index, found.row_groups
    wanted = _parsed(filters, index)
    truth = _truth_of(wanted, index)
    columns = [name for name in wanted.columns if name not in index.partitions.column_names]
    name = hashlib.blake2b(wanted.text.encode(), digest_size=16).hexdigest()
    counts = np.where(truth.some[groups], found.counts, 0)
    if not columns:  # the paths decide
        return found.with_counts(counts, name)
    matching = found.testing(_test_of(found.data, wanted, columns), name, columns)
    undecided = np.flatnonzero(~truth.every[groups] & (counts > 0))
    if len(undecided):
        counts[undecided] = matching.counted(groups[undecided], known)
    return replace(matching, counts=counts)


def _parsed(filters: Any, index: Index) -> RowFilter:
    schema = with_hints(condition_schema_of(as_lists(index.schema)), index.partitions)
    if isinstance(filters, pc.Expression):
        columns = _columns_in(filters, schema)
        (serialized,) = filters.__reduce__()[1]
        text = f"{filters} {hashlib.blake2b(serialized, digest_size=16).hexdigest()}"  # long lists are cut short in it
        return RowFilter(schema=schema, expression=filters, condition=None, columns=columns, text=text)
    if isinstance(filters, str):
        from pqcache.filters.parse import parse_condition  # imports sqlglot, which takes time

        condition = parse_condition(filters, schema, "filters")
    else:
        from pqcache.filters.parse import condition_from

        condition = condition_from(filters, schema)
    expression, named = expression_of(condition), condition_columns(condition)
    types = {name: str(schema.field(name).type) for name in named if name in index.partitions.column_names}
    try:
        rows_where(schema.empty_table(), expression)
    except (pa.ArrowException, TypeError) as error:
        raise UsageError(f"filters {filters!s}", f"{first_line(error)}") from error
    text = f"{text_of(condition)} {types}"  # the types decide what a constant means
    return RowFilter(schema=schema, expression=expression, condition=condition, columns=tuple(named), text=text)


def _columns_in(expression: pc.Expression, schema: pa.Schema) -> tuple[str, ...]:
    """The columns without which an expression fails; pyarrow does not list an expression's columns."""
    empty = schema.empty_table()
    if "FieldPath(" in str(expression):
        raise UsageError(f"filters {expression}", "give columns by name, not by number")
    try:
        rows_where(empty, expression)
    except (pa.ArrowException, TypeError) as error:
        known = ", ".join(schema.names) or "none"
        raise UsageError(f"filters {expression}", f"{first_line(error)}", f"the columns are: {known}") from error

    def among(names: list[str]) -> list[str]:
        try:
            rows_where(empty.drop_columns(names), expression)
        except pa.ArrowException:
            half = len(names) // 2
            return [*among(names[:half]), *among(names[half:])] if half else names
        return []

    return tuple(among(schema.names)) if schema.names else ()


def _truth_of(wanted: RowFilter, index: Index) -> TruthValues:
    """For each row group, whether the filter may be true, false or null for some row."""
    inside = index.partitions.column_names
    none = np.zeros(len(index), np.bool_)
    files = index.numbers("file")
    if set(wanted.columns) <= set(inside):  # exact
        kept = np.zeros(len(index.paths), np.bool_)
        kept[rows_where(index.partitions, wanted.expression)] = True
        some = kept[files] & (index.rows > 0)
        return TruthValues(some, ~some, none)
    if wanted.condition is None:
        some = prune_by_expression(index, wanted.expression, wanted.columns)
        return TruthValues(some, ~none, none)
    numbers = pa.array(files)
    constants = {name: index.partitions[name].take(numbers) for name in wanted.columns if name in inside}
    return prune_row_groups(wanted.condition, index.statistics, constants)


def _test_of(data: LocalDataset, wanted: RowFilter, columns: list[str]) -> Test:
    index = data.index
    fields = pa.schema([wanted.schema.field(name) for name in columns])
    dense = {name: kind for name, kind in dense_in(index.schema).items() if name in columns}
    constants = {name: index.partitions[name] for name in wanted.columns if name in index.partitions.column_names}
    files = index.numbers("file")

    def test(group: int, first: int, part: pa.Table) -> Bools:
        file = int(files[group])
        path = str(data.path_of(group))
        for name in dense.keys() & part.column_names:
            kind = fields.field(name).type
            lists = [dense_to_lists(chunk, dense[name], kind) for chunk in part[name].chunks]
            part = part.set_column(part.schema.get_field_index(name), name, pa.chunked_array(lists, kind))
        table = cast_to_schema(part, fields, path)
        for name, values in constants.items():
            table = table.append_column(name, pa.repeat(values[file], part.num_rows))
        passes = np.zeros(part.num_rows, np.bool_)
        try:
            passes[rows_where(table, wanted.expression)] = True
        except pa.ArrowException as error:
            raise UsageError("filters", f"cannot be evaluated for {path} ({first_line(error)})") from error
        return passes

    return test


_ID = re.compile(r"\d{8}T\d{6}Z-\d+")
log = logging.getLogger("pqcache.reader")


def base_of(data: LocalDataset, since: Any) -> str:
    """The ID of the snapshot that ``since`` names by ID, number, pin or state; raises UsageError if this cache never
    had it.
    """
    if data.cache is None:
        reason = "only a cache knows what was there before, and this is a directory, a file or one snapshot"
        raise UsageError("since", f"{data.root}: {reason}", "open the cache that 'pqcache sync' made")
    name = str(since.get("snapshot") if isinstance(since, Mapping) else since)
    published = sorted({str(r["snapshot"]) for r in read_history(data.cache) if r.get("snapshot")}, key=_number)
    if name.isdigit():
        name = next((found for found in published if _number(found) == int(name)), name)
    try:
        base = CacheDirectory(data.cache).snapshot(name).id
    except CacheError:
        base = name
    if base not in published:
        last = ", ".join(published[-5:])
        raise UsageError(f"since={name!r}", f"{data.cache} never had this snapshot", f"its last ones are {last}")
    if _number(base) > _number(data.snapshot):
        raise UsageError(
            f"since={base!r}", f"it is newer than {data.snapshot}, the one being read", "name an older one"
        )
    return base


def rows_since(found: Selection, base: str, known: Counts | None) -> Selection:
    """The row groups of files made from a source file that the snapshot ``base`` lacks.

    Logs the number of rows when a dataset is opened, but not again in each worker.
    """
    data, name = found.data, f"since-{base}"
    is_opened = not any(key.startswith(name) for key in known or ())

    def find() -> pa.Table:
        new, again = data.while_moving(lambda: _new_files(data, base))
        files = data.index.numbers("file")[found.row_groups]
        again = pa.nulls(len(files), pa.bool_()) if again is None else again[files]
        return pa.table({"group": found.row_groups, "new": new[files], "again": again})

    table = found_once(data, name, found.row_groups, known, find)
    counts = np.where(np.asarray(table["new"]), found.counts, 0)
    if is_opened:
        files = format_count(len(np.unique(data.index.numbers("file")[found.row_groups[counts > 0]])), "file")
        again = table["again"]
        most = "some" if again.null_count else f"up to {int(counts[np.asarray(again)].sum()):,}"
        log.info("since %s: %s rows in %s, of which %s were in it", base, f"{counts.sum():,}", files, most)
    return found.with_counts(counts, name)


def _new_files(data: LocalDataset, base: str) -> tuple[Bools, Bools | None]:
    """Which files of the index are new, and which have a source whose path is also in the base; None if unknown."""
    assert data.cache is not None
    entries = {entry.path: entry for entry in read_manifest(data.root / FILES).files}
    is_left, number = _is_left(data.cache, base), _number(base)
    held: dict[str, list[Identity]] = {}  # the source files of the base
    try:
        for entry in CacheDirectory(data.cache).snapshot(base).manifest().files:
            for file in entry.sources:
                held.setdefault(file.path, []).append(file.identity)
    except CacheError as error:  # it is not kept any more
        if is_left:
            reason = "it was rolled back and removed, so its files are unknown"
            raise UsageError(f"since={base!r}", reason, "name the snapshot that the rollback made current") from error
        return _of_each(data, entries, lambda entry: entry.since > number), None

    def is_held(file: SourceFile) -> bool:
        return any(identity.is_still(file.identity) for identity in held.get(file.path, ()))

    def is_new(entry: FileEntry) -> bool:  # not if a table's own compaction has written it
        return (entry.since > number or is_left) and not all(map(is_held, entry.sources))

    new = _of_each(data, entries, is_new)
    return new, _of_each(data, entries, lambda entry: any(file.path in held for file in entry.sources))


def _is_left(cache: Path, base: str) -> bool:
    """Whether a rollback replaced ``base`` by an older snapshot, so that later ones are not based on it."""
    is_left = False
    for record in read_history(cache):
        if record.get("command") == ROLLBACK:
            to, of = _number(str(record.get("snapshot"))), _number(str(record.get("previous")))
            is_left = to < _number(base) <= of or (is_left and to != _number(base))
    return is_left


def _of_each(data: LocalDataset, entries: Mapping[str, FileEntry], test: Callable[[FileEntry], bool]) -> Bools:
    return np.array([test(entries[path]) for path in data.index.paths], np.bool_)


def _number(snapshot: str) -> int:
    return Snapshot(Path(snapshot)).number if _ID.fullmatch(snapshot) else 0
