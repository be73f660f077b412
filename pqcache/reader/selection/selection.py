"""The rows that an epoch reads, as positions computed for one row group at a time.

The number of chosen rows in each row group is known before an epoch: it is in the index, or counted once and stored
beside the snapshot.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pqcache.errors import MALFORMED, UsageError
from pqcache.filters.expression import operand_of
from pqcache.parquet.dense import as_lists
from pqcache.reader.arriving import arrival_queue
from pqcache.reader.open_dataset import Files, LocalDataset
from pqcache.store.key_lookup import Ints, ranges_of
from pqcache.store.layout import ROW_GROUPS
from pqcache.store.partition_paths import with_hints
from pqcache.system.disk import read_regular, write_durably
from pqcache.system.processes import cpu_count
from pqcache.system.threads import ForkSafeThreadPool

COUNTS = "_pqcache/counts"
FORMAT = 2  # 1 had another checksum
log = logging.getLogger("pqcache.reader")

Found = TypeVar("Found")
Counts = dict[str, pa.Table]  # what was counted, by the name of what it is of
Parts = Iterable[pa.Table]  # all rows of a row group, in order, with columns as they are in the file, if it has them
Chosen = Iterable[tuple[int, Ints, pa.Table]]  # of each part its first row, which of its rows are chosen, and itself
Bools = npt.NDArray[np.bool_]
Test = Callable[[int, int, pa.Table], Bools]
"""Says of each row of a part whether it is chosen, given the row group and the part's first row in that."""


@dataclass(frozen=True)
class Positions:
    """Rows of a row group by their positions, in groups if there are ``starts``.

    Group i then has ``lengths[i]`` of the ``rows``, from number ``starts[i]`` on.
    """

    rows: Ints
    starts: Ints | None = None
    lengths: Ints | None = None

    def __len__(self) -> int:
        return len(self.rows if self.starts is None else self.starts)

    def __getitem__(self, items: slice | Ints) -> Positions:
        """Some of the rows, or of the groups."""
        if self.starts is None or self.lengths is None:
            return Positions(self.rows[items])
        return Positions(self.rows, self.starts[items], self.lengths[items])

    @property
    def each(self) -> Ints:
        """The rows, group after group."""
        if self.starts is None or self.lengths is None:
            return self.rows
        return self.rows[ranges_of(self.starts, self.lengths)]


@dataclass(frozen=True, kw_only=True, eq=False)
class Selection:
    """The rows of a dataset that an epoch reads: their numbers by row group, and how to find them.

    Attributes:
        row_groups: the row groups with rows, as numbered in the index.
        counts: the number of rows, or sequences, of each.
        name: equal only for the same rows; identifies the selection in states.
        columns: the columns of files that have to be read to find rows.
        tests: a row is chosen if it passes all of them.
        pick: chooses among the rows that pass, as ascending numbers of these; None for all.
        arrange: combines chosen rows to sequences, or repeats them by weight.
    """

    data: LocalDataset
    row_groups: Ints
    counts: Ints
    name: str = ""
    columns: tuple[str, ...] = ()
    tests: tuple[Test, ...] = ()
    pick: Callable[[int], Ints] | None = None
    arrange: Callable[[int, Chosen], Positions] | None = None

    @staticmethod
    def of_all(data: LocalDataset) -> Selection:
        groups = np.flatnonzero(data.index.rows > 0)
        return Selection(data=data, row_groups=groups, counts=data.index.rows[groups])

    @property
    def is_all(self) -> bool:
        """Whether it has every row of its row groups once."""
        return not self.tests and self.pick is None and self.arrange is None

    def takes_all(self, number: int) -> bool:
        """Whether it has every row of a row group once."""
        rows = self.data.index.rows[self.row_groups[number]]
        return self.is_all or (self.arrange is None and bool(self.counts[number] == rows))

    def testing(self, test: Test, name: str, columns: Sequence[str] = ()) -> Selection:
        """The rows that also pass a test, which needs ``columns``; not counted yet."""
        return replace(self.looking_at(columns), name=self._name_with(name), tests=(*self.tests, test))

    def with_counts(self, counts: Ints, name: str) -> Selection:
        """Keep or drop whole row groups; ``counts`` are 0 or all rows."""
        return replace(self, name=self._name_with(name), counts=counts)

    def _name_with(self, name: str) -> str:
        return f"{self.name}-{name}" if self.name else name

    def looking_at(self, columns: Sequence[str]) -> Selection:
        """The same selection, with more columns to read."""
        return replace(self, columns=tuple(dict.fromkeys([*self.columns, *columns])))

    def of(self, some: Any) -> Selection:
        """The selection in some of the row groups."""
        return replace(self, row_groups=self.row_groups[some], counts=self.counts[some])

    def without_empty(self) -> Selection:
        """The selection without empty row groups, and without tests if the others keep all rows."""
        found = self.of(self.counts > 0)
        if np.array_equal(found.counts, self.data.index.rows[found.row_groups]):
            return Selection(data=self.data, row_groups=found.row_groups, counts=found.counts)
        return found

    def positions(self, group: int, parts: Parts) -> Positions:
        """Find the rows, or sequences, of a row group; ``parts`` have the ``columns``."""
        if self.arrange is not None:
            return self.arrange(group, self.chosen(group, parts))
        return Positions(np.concatenate([first + rows for first, rows, _ in self.chosen(group, parts)]))

    def chosen(self, group: int, parts: Parts) -> Iterator[tuple[int, Ints, pa.Table]]:
        picked = None if self.pick is None else self.pick(group)
        first = passed = 0
        for part in parts:
            rows = np.arange(part.num_rows)
            for test in self.tests:
                rows = rows[test(group, first, part)[rows]]
            if picked is not None:
                low, high = np.searchsorted(picked, [passed, passed + len(rows)])
                passed, rows = passed + len(rows), rows[picked[low:high] - passed]
            yield first, rows, part
            first += part.num_rows

    def look_into(self, files: Files, number: int, use: Callable[[int, Chosen], Found]) -> Found:
        """Call ``use`` with a row group and its chosen rows, even if its file moves meanwhile."""

        def used() -> Found:
            group = files.group(number)
            return use(number, self.chosen(number, files.parts(group, self.columns)))

        return self.data.while_moving(used)

    def counted(self, groups: Ints, known: Counts | None) -> Ints:
        """The number of rows, or sequences, of row groups."""

        def count(group: int, chosen: Chosen) -> list[Any]:
            return [
                [sum(len(rows) for _, rows, _ in chosen) if self.arrange is None else len(self.arrange(group, chosen))]
            ]

        found = self.count_by_group(self.name, {"selected": pa.int64()}, count, known, groups)
        return np.array(found["selected"].to_numpy(), np.int64)

    def count_by_group(
        self,
        name: str,
        kinds: Mapping[str, pa.DataType],
        count: Callable[[int, Chosen], Sequence[Any]],
        known: Counts | None,
        groups: Ints | None = None,
    ) -> pa.Table:
        """Call ``count`` once for each row group (all if ``groups`` is None); see `found_once`.

        It returns the values of columns of types ``kinds``; the resulting table has the column ``group`` before them.
        Row groups are read on all cores, as they arrive.
        """
        wanted = self.row_groups if groups is None else groups

        def find() -> pa.Table:
            found = map_row_groups(self, wanted, count)
            table = {"group": np.repeat(wanted, [len(columns[0]) for columns in found])}
            for number, (column, kind) in enumerate(kinds.items()):
                arrays = [pa.array(columns[number], kind) for columns in found]
                table[column] = pa.chunked_array(arrays, kind).combine_chunks()
            return pa.table(table)

        return found_once(self.data, name, wanted, known, find)


def digest_of(values: Any, *arrays: Ints) -> str:
    """A hash of JSON values and arrays."""
    digest = hashlib.blake2b(json.dumps(values, default=int).encode(), digest_size=16)
    for array in arrays:
        digest.update(array.tobytes())
    return digest.hexdigest()


def found_once(
    data: LocalDataset, name: str, groups: Ints, known: Counts | None, find: Callable[[], pa.Table]
) -> pa.Table:
    """The results of ``find`` for row groups: taken from ``known`` or a file beside the snapshot, or computed and
    stored in both.

    The file is named ``name``, which must be equal only for equal counts.
    """
    known = {} if known is None else known
    key = f"{name}-{hashlib.blake2b(groups.tobytes(), digest_size=8).hexdigest()}"
    if key not in known:
        path = data.root / COUNTS / f"{name}.arrow"
        in_snapshot = (data.root / ROW_GROUPS).is_file()  # nothing is written to other directories
        found = _read(path, groups) if in_snapshot else None
        if found is None:
            found = find()
            if in_snapshot:
                _write(path, groups, found)
        known[key] = found
    return known[key]


def map_row_groups(selection: Selection, groups: Ints, use: Callable[[int, Chosen], Found]) -> list[Found]:
    """Call ``use`` with each row group and its chosen rows."""
    data, files = selection.data, Files(selection.data)

    def call(number: int) -> Found:
        return selection.look_into(files, int(groups[number]), use)

    with (
        ForkSafeThreadPool(cpu_count()) as pool,
        data.wanting(groups),
        arrival_queue(data.arrivals, groups, pool) as arrivals,
    ):
        numbers = range(len(groups))
        if arrivals is None:
            return list(pool.map(call, numbers))
        calls = [arrivals.submit(number, call, number) for number in numbers]
        return [arrivals.result(job) for job in calls]


def _read(path: Path, groups: Ints) -> pa.Table | None:
    """The stored counts of these row groups, if they exist and are valid."""
    try:
        table = pa.ipc.open_file(pa.BufferReader(read_regular(path))).read_all()
        about = json.loads((table.schema.metadata or {})[b"pqcache"])
        table = table.replace_schema_metadata(None)
        if about == {"format": FORMAT, "checksum": _checksum(groups, table)}:
            return table
        log.debug("%s: rows are counted again: the file is of another format or other row groups", path)
    except FileNotFoundError:
        pass
    except (pa.ArrowException, OSError, *MALFORMED) as error:
        log.debug("%s: rows are counted again: %s", path, error)
    return None


def _write(path: Path, groups: Ints, table: pa.Table) -> None:
    """Store counts. If that fails, as in another user's cache, rows are counted again next time."""
    about = {"pqcache": json.dumps({"format": FORMAT, "checksum": _checksum(groups, table)})}
    try:
        path.parent.mkdir(exist_ok=True)
        write_durably(path, _as_file(table.replace_schema_metadata(about)).to_pybytes(), path.parent)
    except OSError as error:
        log.debug("%s: counts of rows are not stored: %s", path, error)


def _as_file(table: pa.Table) -> pa.Buffer:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table.combine_chunks())
    return sink.getvalue()


def _checksum(groups: Ints, table: pa.Table) -> str:
    digest = hashlib.blake2b(groups.tobytes(), digest_size=8)
    digest.update(_as_file(table))
    return digest.hexdigest()


class ChosenColumn:
    """A column, or a field of a struct, used by a selection, with values in the files or in the paths.

    Raises UsageError about ``option`` if there is no column ``name``.
    """

    def __init__(self, data: LocalDataset, name: str, option: str) -> None:
        try:
            schema = with_hints(as_lists(data.index.schema), data.index.partitions)
            operand = operand_of(name.split("."), schema)
        except UsageError as error:
            raise error.within(option) from error
        self.data, self.operand = data, operand
        self.name, self.path, self.type = operand.name, (operand.column, *operand.inner), operand.type
        self.in_paths = operand.column in data.index.partitions.column_names
        self.columns = () if self.in_paths else self.path[:1]  # to read of the files

    def values_of(self, groups: Ints) -> pa.ChunkedArray:
        """The value in the path of each row group, shared by all its rows."""
        index = self.data.index
        return pc.take(index.partitions[self.path[0]], pa.array(index.numbers("file")[groups]))

    def values(self, group: int, part: pa.Table, rows: Ints) -> pa.ChunkedArray:
        """The values of some rows of a part, in the type of its file; null if the file lacks the column."""
        if self.in_paths:
            (value,) = self.values_of(np.array([group]))
            return pa.chunked_array([pa.repeat(value, len(rows))])
        if self.path[0] not in part.column_names:
            return pa.chunked_array([pa.nulls(len(rows))])
        column = part[self.path[0]]
        for name in self.path[1:]:
            known = pa.types.is_struct(column.type) and column.type.get_field_index(name) >= 0
            column = pc.struct_field(column, name) if known else pa.chunked_array([pa.nulls(len(column))])
        return column if len(rows) == part.num_rows else column.take(pa.array(rows))
