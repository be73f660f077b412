"""``exclude=``: leaves rows out, by position or by the values of a column."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pqcache.errors import UsageError
from pqcache.reader.open_dataset import Files, LocalDataset, open_local_dataset
from pqcache.reader.selection.selection import (
    Bools,
    Chosen,
    ChosenColumn,
    Counts,
    Positions,
    Selection,
    Test,
    digest_of,
)
from pqcache.store.key_lookup import Ints, SelectedRows

LEFT_OUT = "\0left out"  # the name of a column that says so of rows
_MOST = 100_000  # rows and values, as each state holds them
_FORMS = "give rows as pqcache.rows or Cache.lookup return them, values by column, or a file's path as text"


@dataclass(frozen=True, kw_only=True)
class Excluded:
    """Rows to leave out of every snapshot that has them.

    ``values``  values by column
    ``rows``    by path of a file: a digest of its content, and the rows by row group, None for all
    """

    values: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    rows: Mapping[str, tuple[str, Mapping[int, Sequence[int]] | None]] = field(default_factory=dict)

    def to_json(self) -> list[Any]:
        rows = {
            path: [content, None if groups is None else {str(group): list(of) for group, of in groups.items()}]
            for path, (content, groups) in self.rows.items()
        }
        return [{name: list(values) for name, values in self.values.items()}, rows]

    @staticmethod
    def from_json(found: Any) -> Excluded:
        """Inverse of ``to_json``; raises TypeError or ValueError for anything else."""
        values, rows = found
        groups = {p: (c, g if g is None else {int(n): tuple(r) for n, r in g.items()}) for p, (c, g) in rows.items()}
        return Excluded(values={name: tuple(some) for name, some in values.items()}, rows=groups)


Exclusions = Sequence[tuple[int, Excluded]]
"""From which epoch on rows are left out."""


def exclusions_of(found: Any) -> Exclusions:
    """The exclusions in a state; raises TypeError or ValueError if they are invalid."""
    return [(int(begin), Excluded.from_json(one)) for begin, one in found or ()]


def divided(exclusions: Exclusions, epoch: int) -> tuple[tuple[Excluded, ...], tuple[Excluded, ...]]:
    """The rows that an epoch leaves out, and those dropped from its batches as only later epochs leave them out."""
    now, later = (tuple(one for begin, one in exclusions if (begin > epoch) == is_later) for is_later in (False, True))
    return now, later


def excluded(data: LocalDataset, given: Any) -> list[Excluded]:
    """Parse ``exclude=`` to rows in any snapshot; raises UsageError for anything else."""
    if given is None or isinstance(given, Excluded):
        return [] if given is None else [given]
    given = getattr(given, "selected", given)
    if isinstance(given, SelectedRows):
        found = [_by_place(data, given)]
    elif isinstance(given, Mapping):
        found = [Excluded(values={name: _values(data, name, values) for name, values in given.items()})]
    elif isinstance(given, str):
        if given not in data.index.paths:
            raise UsageError(f"exclude={given!r}", "is not a file of the dataset", "name it as 'pqcache rows' does")
        found = [Excluded(rows={given: (_content(data, given), None)})]
    elif isinstance(given, Iterable) and not isinstance(given, bytes):
        found = [one for item in given for one in excluded(data, item)]
    else:
        raise UsageError(f"exclude={given!r}", "names no rows", _FORMS)
    number = sum(len(some) for one in found for some in one.values.values())
    number += sum(len(some) for one in found for _, groups in one.rows.values() if groups for some in groups.values())
    if number > _MOST:
        reason = f"names {number:,} rows and values, at most {_MOST:,} can be"
        raise UsageError("exclude", reason, "leave them out with filters=")
    return found


def _by_place(data: LocalDataset, rows: SelectedRows) -> Excluded:
    lease = None
    if rows.snapshot and rows.snapshot != data.snapshot:
        if data.cache is None:
            raise UsageError("exclude", f"the rows belong to {rows.snapshot}, and {data.root} is {data.snapshot}")
        data, lease = open_local_dataset(data.cache, rows.snapshot)
    with lease or nullcontext():
        rows.check(data.index.rows)
        files, numbers = data.index.numbers("file"), data.index.numbers("row_group")
        found: dict[str, dict[int, Sequence[int]]] = {}
        for group in rows.groups.tolist():
            path = data.index.paths[files[group]]
            found.setdefault(path, {})[int(numbers[group])] = tuple(rows.positions(group).tolist())
        return Excluded(rows={path: (_content(data, path), groups) for path, groups in found.items()})


def _content(data: LocalDataset, path: str) -> str:
    return data.contents[data.index.paths.index(path)]


def _values(data: LocalDataset, name: str, values: Any) -> Sequence[Any]:
    if not isinstance(name, str) or isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise UsageError(f"exclude={{{name!r}: {values!r}}}", "give a list of values")
    found = tuple(value.item() if isinstance(value, np.generic) else value for value in values)
    for value in found:
        if not isinstance(value, str | int | float):
            reason, advice = "is no number or text", "write dates as text, like 2026-11-01"
            raise UsageError(f"exclude={{{name!r}: [{value!r}]}}", reason, advice)
    _wanted(ChosenColumn(data, name, "exclude"), found)
    return found


def _wanted(column: ChosenColumn, values: Sequence[Any]) -> pa.Array:
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    try:
        return pa.array(values).cast(kind)
    except (pa.ArrowException, OverflowError) as error:
        raise UsageError(f"exclude={{{column.name!r}: ...}}", f"the column is {kind}: {error}") from error


def without(found: Selection, left_out: Sequence[Excluded], known: Counts | None) -> Selection:
    """Rows without the excluded ones, or sequences without those that contain one."""
    places = _places(found.data, left_out)
    test, columns = _test_of(found.data, left_out, places)
    name = digest_of(["exclude", found.name or None, *(one.to_json() for one in left_out)])
    made = found.testing(test, name, columns) if found.arrange is None else _of_sequences(found, test, name, columns)
    affected = np.full(len(found.counts), any(one.values for one in left_out)) | np.isin(found.row_groups, list(places))
    counts = found.counts.copy()
    if affected.any():
        counts[affected] = made.counted(found.row_groups[affected], known)
    return found if np.array_equal(counts, found.counts) else replace(made, counts=counts)


def _of_sequences(found: Selection, test: Test, name: str, columns: Sequence[str]) -> Selection:
    inner = found.arrange
    assert inner is not None

    def arrange(group: int, chosen: Chosen) -> Positions:
        gone = [np.zeros(0, np.int64)]

        def noted() -> Chosen:
            for first, rows, part in chosen:
                gone.append(first + np.flatnonzero(~test(group, first, part)))
                yield first, rows, part

        places = inner(group, noted())
        assert places.starts is not None
        assert places.lengths is not None
        before = np.concatenate([[0], np.cumsum(np.isin(places.rows, np.concatenate(gone)))])
        return places[np.flatnonzero(before[places.starts + places.lengths] == before[places.starts])]

    return replace(found.looking_at(columns), arrange=arrange, name=name)


def left_out_of(files: Files, left_out: Sequence[Excluded]) -> Callable[[int], Bools]:
    """A function that returns the excluded rows of a row group."""
    test, columns = _test_of(files.data, left_out, _places(files.data, left_out))

    def find(group: int) -> Bools:
        first, found = 0, []
        for part in files.parts(files.group(group), columns):
            found.append(~test(group, first, part))
            first += part.num_rows
        return np.concatenate([np.zeros(0, np.bool_), *found])

    return find


def files_gone(data: LocalDataset, left_out: Sequence[Excluded]) -> list[str]:
    """Files with excluded rows that the dataset lacks, or has with other contents."""
    known = dict(zip(data.index.paths, data.contents, strict=True)) if any(one.rows for one in left_out) else {}
    return sorted({path for one in left_out for path, (content, _) in one.rows.items() if known.get(path) != content})


def _places(data: LocalDataset, left_out: Sequence[Excluded]) -> dict[int, Ints | None]:
    """The excluded rows by row group of the index; None for all of its rows."""
    found: dict[int, Ints | None] = {}
    if not any(one.rows for one in left_out):
        return found
    file_of = {path: file for file, path in enumerate(data.index.paths)}
    files, numbers = data.index.numbers("file"), data.index.numbers("row_group")
    for one in left_out:
        for path, (content, groups) in one.rows.items():
            if (file := file_of.get(path)) is None or data.contents[file] != content:
                continue
            for group in np.flatnonzero(files == file).tolist():
                if groups is None:
                    found[group] = None
                elif rows := groups.get(int(numbers[group])):
                    before = found.get(group, np.zeros(0, np.int64))
                    found[group] = None if before is None else np.union1d(before, np.array(rows, np.int64))
    return found


def _test_of(
    data: LocalDataset, left_out: Sequence[Excluded], places: Mapping[int, Ints | None]
) -> tuple[Test, tuple[str, ...]]:
    """A test passed by rows that aren't excluded, and the columns that it needs."""
    columns = []
    for one in left_out:
        for name, values in one.values.items():
            column = ChosenColumn(data, name, "exclude")
            columns.append((column, _wanted(column, values)))

    def test(group: int, first: int, part: pa.Table) -> Bools:
        kept = np.ones(part.num_rows, np.bool_)
        rows = places.get(group, np.zeros(0, np.int64))
        if rows is None:
            kept[:] = False
        else:
            low, high = np.searchsorted(rows, [first, first + part.num_rows])
            kept[rows[low:high] - first] = False
        for column, wanted in columns:
            values = column.values(group, part, np.arange(part.num_rows)).cast(wanted.type)
            kept &= ~pc.is_in(values, value_set=wanted).to_numpy()
        return kept

    return test, tuple(dict.fromkeys(name for column, _ in columns for name in column.columns))
