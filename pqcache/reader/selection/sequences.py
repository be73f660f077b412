"""``sequence=``: samples of several consecutive rows of a row group."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pqcache.errors import UsageError, no_column
from pqcache.parquet.dense import as_lists
from pqcache.parquet.schema import cast_to_schema, working_schema
from pqcache.reader.columns import storage_type
from pqcache.reader.selection.selection import Chosen, Counts, Positions, Selection, digest_of
from pqcache.store.key_lookup import Ints, ranges_of
from pqcache.units import is_number

_UNITS = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}  # of a second
_MOST_STEPS = 1 << 20  # no usual row group has more rows, and each step is kept in memory


@dataclass(frozen=True, kw_only=True)
class Sequence:
    """Samples of several consecutive rows: ``ParquetDataset(..., sequence=Sequence(3, order_by="ts", max_gap=0.1))``.

    The rows of a row group that pass ``filters`` are sorted by ``group_by``, then by ``order_by`` (ties keep file
    order), and divided into runs: a run ends when the group changes, when two rows are further apart than ``max_gap``,
    and at the end of the row group. A sequence is ``length`` consecutive rows of a run. Every sequence comes exactly
    once per epoch. Rows with a null (or NaN) in ``order_by`` or ``group_by`` are left out.

    ``length``      rows of a sequence
    ``order_by``    column of numbers, times or dates, or of text if there is no ``max_gap``
    ``max_gap``     how much ``order_by`` may grow from one row of a sequence to the next, in the column's own unit, or
                    for times and dates as a timedelta; None: any
    ``group_by``    column, or several, whose values are the same in all rows of a sequence
    ``stride``      rows from the start of one sequence to the start of the next one in a run; if it is
                    ``length``, they don't overlap
    ``columns_at``  ``{column: step}`` or ``{column: [step, ...]}``: the steps, from 0 to ``length - 1`` (or from the
                    end, negative), at which a column is wanted; columns that are not named are given for all steps

    A column of shape (B, ...) becomes (B, length, ...); one in ``columns_at`` (B, number of steps, ...), or with
    a single step, not in a list, (B, ...). Invalid numbers raise UsageError here, invalid names and types
    when it is used.
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
                "sequence",
                f"length={self.length}: give at most {_MOST_STEPS:,}",
                "a sequence lies within one row group",
            )
        if not isinstance(self.order_by, str):
            raise UsageError("sequence", f"order_by={self.order_by!r}: name one column")
        gap = self.max_gap
        if gap is not None:
            number = is_number(gap) and not isinstance(gap, np.timedelta64)  # which numpy counts among the integers
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
        """The steps for which a column is returned."""
        wanted = (self.columns_at or {}).get(column, range(self.length))
        if isinstance(wanted, int):
            wanted = (wanted,)
        return tuple(step + self.length if isinstance(step, int) and step < 0 else step for step in wanted)

    def axis(self, column: str) -> int | None:
        """The length of a column's step axis; None if it has none."""
        if isinstance((self.columns_at or {}).get(column), int):
            return None
        return len(self.steps(column))


def _step_or_steps(steps: Any) -> int | tuple[int, ...]:
    if isinstance(steps, int | np.integer):
        return steps if isinstance(steps, bool) else int(steps)
    return tuple(int(step) if isinstance(step, np.integer) else step for step in steps)


def sequences_of(found: Selection, sequence: Sequence, known: Counts | None) -> Selection:
    """The sequences in the selected rows; warns if there are none."""
    data = found.data
    index, schema = data.index, as_lists(data.index.schema)
    inside = index.partitions.column_names
    for name in (sequence.order_by, *sequence.groups):
        if name not in schema.names:
            raise no_column("sequence", name, schema.names)
        if pa.types.is_nested(storage_type(schema.field(name).type)):
            raise UsageError("sequence", f"{name!r} is {schema.field(name).type}", "name a column of single values")
    if sequence.order_by in inside:
        raise UsageError("sequence", f"order_by={sequence.order_by!r} is the same in all rows of a file")
    # a row group has one value of each partition column
    names = dict.fromkeys([sequence.order_by, *(name for name in sequence.groups if name not in inside)])
    fields = working_schema(pa.schema([schema.field(name) for name in names]))
    kind = schema.field(sequence.order_by).type
    try:
        _sort_keys(pa.chunked_array([], fields.field(sequence.order_by).type))
    except pa.ArrowException as error:
        raise UsageError("sequence", f"order_by={sequence.order_by!r} is {kind}, which has no order") from error
    gap, files = _gap_in_unit(sequence, kind), index.numbers("file")
    partitions = [index.partitions[name] for name in sequence.groups if name in inside]

    def arrange(group: int, chosen: Chosen) -> Positions:
        file = int(files[group])
        if not all(values[file].is_valid for values in partitions):  # a group that is null
            return Positions(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64))
        path, rows, tables = str(data.path_of(group)), [], []
        for first, some, part in chosen:
            rows.append(first + some)
            named = part.select([name for name in fields.names if name in part.column_names])
            tables.append(cast_to_schema(named, fields, path).take(pa.array(some)))
        return _in_runs(sequence, gap, pa.concat_tables(tables), np.concatenate(rows))

    text = ["sequence", sequence.length, sequence.stride, str(gap), sequence.order_by, *sequence.groups]
    made = replace(found.looking_at(fields.names), arrange=arrange, name=digest_of([text, found.name or None]))
    made = replace(made, counts=made.counted(found.row_groups, known))
    if len(made.counts) and not made.counts.any():
        warnings.warn(
            f"{data.root}: there is no sequence of {sequence.length} rows, so there are no batches", stacklevel=2
        )
    return made.of(made.counts > 0)


def _in_runs(sequence: Sequence, gap: Any, table: pa.Table, rows: Ints) -> Positions:
    """The sequences among ``rows`` of a row group; ``table`` has the columns to sort and divide them by."""
    complete = np.ones(table.num_rows, np.bool_)
    for column in table.columns:
        if column.null_count or pa.types.is_floating(column.type):
            complete &= pc.is_valid(column).to_numpy()
        if pa.types.is_floating(column.type):
            complete &= ~np.isnan(column.to_numpy())
    if not complete.all():
        rows, table = rows[complete], table.filter(pa.array(complete))
    key = _sort_keys(table[sequence.order_by])
    codes = _group_codes(table.select([name for name in sequence.groups if name in table.column_names]))
    same = codes[1:] == codes[:-1]
    if np.any((codes[1:] < codes[:-1]) | (same & (key[1:] < key[:-1]))):
        order = np.lexsort((key, codes))
        rows, key, codes = rows[order], key[order], codes[order]
        same = codes[1:] == codes[:-1]
    begins = np.concatenate([np.ones(min(1, len(rows)), np.bool_), ~same])
    if gap is not None:
        begins[1:] |= ~(_increases(key) <= gap)
    firsts = np.flatnonzero(begins)
    lengths = np.diff(firsts, append=len(rows))
    counts = np.maximum((lengths - sequence.length) // sequence.stride + 1, 0)
    within = ranges_of(np.zeros_like(counts), counts)
    starts = np.repeat(firsts, counts) + sequence.stride * within
    return Positions(rows, starts, np.full(len(starts), sequence.length))


def _gap_in_unit(sequence: Sequence, kind: pa.DataType) -> Any:
    """``max_gap`` in the unit of the column's numbers; UsageError if it has none."""
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
    """A column without nulls as numbers in the same order; numbers and times keep their differences."""
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
    """How much larger each number is than the one before; undefined if it is not larger."""
    if key.dtype.kind == "f":
        with np.errstate(all="ignore"):
            return np.diff(key)
    return np.diff(key.view(np.uint64) if key.dtype.itemsize == 8 else key.astype(np.uint64))


def _group_codes(table: pa.Table) -> Ints:
    """Number distinct rows in order of first occurrence."""
    codes = np.zeros(table.num_rows, np.int64)
    for column in table.columns:
        array = column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
        if not pa.types.is_dictionary(array.type):
            array = array.dictionary_encode()
        codes = codes * len(array.dictionary) + array.indices.to_numpy().astype(np.int64)
        codes = pa.array(codes).dictionary_encode().indices.to_numpy().astype(np.int64)
    return codes
