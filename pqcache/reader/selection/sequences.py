"""``sequence=``: which rows of a row group make a sample of several rows, one after the other."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pqcache.errors import UsageError
from pqcache.parquet.dense_columns import as_lists
from pqcache.parquet.schema_merge import cast_to_schema, working_schema
from pqcache.reader.kinds import storage_type
from pqcache.reader.open_dataset import LocalDataset
from pqcache.reader.selection.selection import Selection
from pqcache.store.selected_rows import Ints

_UNITS = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}  # of a second
_MOST_STEPS = 1 << 20  # no usual row group has more rows, and each step is kept in memory


@dataclass(frozen=True, kw_only=True)
class Sequence:
    """Samples of several consecutive rows: ``ParquetDataset(..., sequence=Sequence(3, order_by="ts", max_gap=0.1))``.

    The rows of a row group that ``filters`` leave are put in order by ``group_by``, then by ``order_by`` (rows equal in
    both keep the order of the file), and are divided into runs: a run ends where the group changes, where two rows are
    further apart than ``max_gap``, and at the end of the row group. A sequence is ``length`` consecutive rows of a run.
    Every sequence comes exactly once per epoch. Rows with a null (or NaN) in ``order_by`` or ``group_by`` are left out.

    ``length``      rows of a sequence
    ``order_by``    column of numbers, times or dates, or of text if there is no ``max_gap``
    ``max_gap``     how much ``order_by`` may grow from one row of a sequence to the next, in the column's own unit, or
                    for times and dates as a timedelta; None: any
    ``group_by``    column, or several, whose values are the same in all rows of a sequence
    ``stride``      rows from the start of one sequence to the start of the next one in a run; ``length`` makes them
                    not overlap
    ``columns_at``  ``{column: step}`` or ``{column: [step, ...]}``: the steps, from 0 to ``length - 1`` (or from the
                    end, negative), at which a column is wanted; columns that are not named are given for all steps

    A column of shape (B, ...) becomes (B, length, ...); one in ``columns_at`` (B, number of steps, ...), or with a
    single step (not in a list) (B, ...). Numbers that make no sense raise UsageError here, names and types where it is
    used.
    """

    length: int = field(kw_only=False)
    order_by: str = field(kw_only=False)
    max_gap: float | timedelta | None = None
    group_by: str | tuple[str, ...] | None = None
    stride: int = 1
    columns_at: Mapping[str, int | Iterable[int]] | None = None

    def __post_init__(self) -> None:
        for name in ("length", "stride"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise UsageError("sequence", f"{name}={value!r}: give a whole number of at least 1")
        if self.length > _MOST_STEPS:
            raise UsageError(
                "sequence", f"length={self.length}: give at most {_MOST_STEPS:,}", "it lies in one row group"
            )
        if not isinstance(self.order_by, str):
            raise UsageError("sequence", f"order_by={self.order_by!r}: name one column")
        gap = self.max_gap
        if gap is not None:
            number = isinstance(gap, (int, float, np.integer, np.floating))
            number = number and not isinstance(gap, bool | np.timedelta64)  # which numpy counts among the integers
            if not (number and gap >= 0) and not (isinstance(gap, timedelta) and gap >= timedelta()):  # type: ignore[operator]
                raise UsageError("sequence", f"max_gap={gap!r}: give a number from 0 up, or a timedelta")
        if self.group_by is not None and not isinstance(self.group_by, str):
            try:
                object.__setattr__(self, "group_by", tuple(self.group_by))
            except TypeError:
                raise UsageError("sequence", f"group_by={self.group_by!r}: name one column, or several") from None
        if not all(isinstance(name, str) for name in self.groups):
            raise UsageError("sequence", f"group_by={self.group_by!r}: name one column, or several")
        try:
            at = {name: _step_or_steps(steps) for name, steps in (self.columns_at or {}).items()}
        except (TypeError, AttributeError):
            raise UsageError(
                "sequence",
                f"columns_at={self.columns_at!r}: give steps by column, like {{'label': -1, 'image': [0, 2]}}",
            ) from None
        object.__setattr__(self, "columns_at", at)
        steps = [step for name in at for step in self.steps(name)]
        if any(isinstance(s, bool) or not isinstance(s, int) or not 0 <= s < self.length for s in steps):
            raise UsageError(
                "sequence",
                f"columns_at={self.columns_at!r}: with length={self.length} steps are from 0 to "
                f"{self.length - 1}, or from -{self.length} to -1",
            )
        for name in at:
            if not self.steps(name):
                raise UsageError(
                    "sequence", f"columns_at gives no step for {name!r}", "leave the column out with columns="
                )

    @property
    def groups(self) -> tuple[str, ...]:
        """The columns of ``group_by``."""
        if self.group_by is None:
            return ()
        return (self.group_by,) if isinstance(self.group_by, str) else self.group_by

    def steps(self, column: str) -> tuple[int, ...]:
        """Return the steps at which a column is given."""
        wanted = (self.columns_at or {}).get(column, range(self.length))
        if isinstance(wanted, int):
            wanted = (wanted,)
        return tuple(step + self.length if isinstance(step, int) and step < 0 else step for step in wanted)

    def axis(self, column: str) -> int | None:
        """Return how long the steps' axis of a column is; None for a column that has none."""
        if isinstance((self.columns_at or {}).get(column), int):
            return None
        return len(self.steps(column))


def _step_or_steps(steps: Any) -> int | tuple[int, ...]:
    if isinstance(steps, int | np.integer):
        return steps if isinstance(steps, bool) else int(steps)
    return tuple(int(step) if isinstance(step, np.integer) else step for step in steps)


class SequenceSelection:
    """The sequences in the rows of a dataset that a selection leaves; a `Selection` of where they start."""

    def __init__(self, data: LocalDataset, sequence: Sequence, base: Selection | None) -> None:
        self.spec = sequence
        self._data, self._base = data, base
        index = data.index
        inside = index.partitions.column_names
        schema = as_lists(index.schema)
        for name in (sequence.order_by, *sequence.groups):
            if name not in schema.names:
                raise UsageError("sequence", f"no column {name!r}", f"it has {', '.join(schema.names)}")
            if pa.types.is_nested(storage_type(schema.field(name).type)):
                raise UsageError("sequence", f"{name!r} is {schema.field(name).type}", "name a column of single values")
        if sequence.order_by in inside:
            raise UsageError("sequence", f"order_by={sequence.order_by!r} is the same in all rows of a file")
        # a row group has one value of each partition column
        names = dict.fromkeys([sequence.order_by, *(name for name in sequence.groups if name not in inside)])
        self._partitions = [index.partitions[name] for name in sequence.groups if name in inside]
        self._fields = working_schema(pa.schema([schema.field(name) for name in names]))
        try:
            _sort_keys(pa.chunked_array([], self._fields.field(sequence.order_by).type))
        except pa.ArrowException as error:
            kind = schema.field(sequence.order_by).type
            raise UsageError("sequence", f"order_by={sequence.order_by!r} is {kind}, which has no order") from error
        self._gap = _gap_in_unit(sequence, schema.field(sequence.order_by).type)
        self.columns = tuple(dict.fromkeys([*(base.columns if base else ()), *self._fields.names]))
        text = ["sequence", sequence.length, sequence.stride, str(self._gap), sequence.order_by, *sequence.groups]
        digest = hashlib.blake2b(json.dumps([text, base.fingerprint if base else None]).encode(), digest_size=16)
        self.fingerprint = digest.hexdigest()

    def positions(self, group: int, parts: Iterable[pa.Table]) -> Ints:
        """Return where in row group ``group`` of the index each sequence has its first row."""
        rows, starts = self._starts(group, parts)
        return np.asarray(rows[starts], np.int64)

    def rows(self, group: int, parts: Iterable[pa.Table]) -> Ints:
        """Return where the rows of each sequence of a row group are: (sequences, length)."""
        rows, starts = self._starts(group, parts)
        return np.asarray(rows[starts[:, None] + np.arange(self.spec.length)], np.int64)

    def _starts(self, group: int, parts: Iterable[pa.Table]) -> tuple[Ints, Ints]:
        """Return the rows of a row group in order, and where in that order sequences start."""
        parts = list(parts)
        file = int(self._data.index.numbers("file")[group])
        if not all(values[file].is_valid for values in self._partitions):  # a group that is null
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        path = str(self._data.root / self._data.index.paths[file])
        named = [part.select([name for name in self._fields.names if name in part.column_names]) for part in parts]
        table = pa.concat_tables([cast_to_schema(part, self._fields, path) for part in named])
        complete = np.ones(table.num_rows, np.bool_)
        for column in table.columns:
            if column.null_count or pa.types.is_floating(column.type):
                complete &= pc.is_valid(column).to_numpy()
            if pa.types.is_floating(column.type):
                complete &= ~np.isnan(column.to_numpy())
        rows = np.flatnonzero(complete) if self._base is None else self._base.positions(group, parts)
        if self._base is not None and not complete.all():
            rows = rows[complete[rows]]
        if len(rows) < table.num_rows:
            table = table.take(pa.array(rows))
        key = _sort_keys(table[self.spec.order_by])
        codes = _group_codes(table.select([name for name in self.spec.groups if name in table.column_names]))
        same = codes[1:] == codes[:-1]
        if np.any((codes[1:] < codes[:-1]) | (same & (key[1:] < key[:-1]))):
            order = np.lexsort((key, codes))
            rows, key, codes = rows[order], key[order], codes[order]
            same = codes[1:] == codes[:-1]
        begins = np.concatenate([np.ones(min(1, len(rows)), np.bool_), ~same])
        if self._gap is not None:
            begins[1:] |= ~(_increases(key) <= self._gap)
        firsts = np.flatnonzero(begins)
        lengths = np.diff(firsts, append=len(rows))
        counts = np.maximum((lengths - self.spec.length) // self.spec.stride + 1, 0)
        within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        return rows, np.repeat(firsts, counts) + self.spec.stride * within


def _gap_in_unit(sequence: Sequence, kind: pa.DataType) -> Any:
    """Return ``max_gap`` in the unit of the column's numbers; UsageError where it has none."""
    gap, kind = sequence.max_gap, storage_type(kind)
    if gap is None:
        return None
    temporal = pa.types.is_temporal(kind)
    if not (temporal or pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        raise UsageError("sequence", "max_gap needs numbers or times", f"{sequence.order_by!r} is {kind}")
    if isinstance(gap, timedelta):
        if not temporal:
            raise UsageError("sequence", f"{sequence.order_by!r} is {kind}", "give max_gap as a number")
        micros = gap // timedelta(microseconds=1)
        if pa.types.is_date32(kind):
            return gap.days
        unit = "ms" if pa.types.is_date64(kind) else kind.unit
        return micros * _UNITS[unit] // 10**6
    if pa.types.is_floating(kind):
        return float(gap)
    return None if math.isinf(gap) else math.floor(gap)


def _sort_keys(column: pa.ChunkedArray) -> Any:
    """Return a column without nulls as numbers of the same order, and for numbers and times of the same distances."""
    kind = column.type
    if pa.types.is_dictionary(kind):
        column = column.cast(kind.value_type)
        kind = column.type
    if isinstance(kind, pa.BaseExtensionType):
        column = pa.chunked_array([chunk.storage for chunk in column.chunks], kind.storage_type)
        kind = column.type
    if pa.types.is_temporal(kind):
        column = column.cast(pa.int32() if kind.bit_width == 32 else pa.int64())
    elif not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        return pc.rank(column, tiebreaker="dense").to_numpy().astype(np.int64)
    found = column.to_numpy()
    return found.astype(np.int64) if found.dtype.kind == "i" else found


def _increases(key: Any) -> Any:
    """Return how much larger each number is than the one before; those that are not larger come out as anything."""
    if key.dtype.kind == "f":
        with np.errstate(all="ignore"):
            return np.diff(key)
    return np.diff(key.view(np.uint64) if key.dtype.itemsize == 8 else key.astype(np.uint64))


def _group_codes(table: pa.Table) -> Ints:
    """Return a number for each row's values, the same for the same values, in the order in which they first come."""
    codes = np.zeros(table.num_rows, np.int64)
    for column in table.columns:
        array = column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
        if not pa.types.is_dictionary(array.type):
            array = array.dictionary_encode()
        codes = codes * len(array.dictionary) + array.indices.to_numpy().astype(np.int64)
        codes = pa.array(codes).dictionary_encode().indices.to_numpy().astype(np.int64)
    return codes
