"""Decodes the row groups of a plan for windows; every error names the file."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property, partial
from typing import Union

import numpy as np
import pyarrow as pa

from pqcache.errors import ParquetError, first_line
from pqcache.parquet.decoded_size import StoredRowGroup, count_decoded, decoded_size
from pqcache.parquet.row_group_reader import RowGroupFile
from pqcache.parquet.schema import unfit_reason
from pqcache.reader.columns import Column, IrregularError, Kind, filled, hold, kind_of
from pqcache.reader.memory_budget import Budget, RowGroupSizes, most_bytes, sizes_of
from pqcache.reader.open_dataset import Files, RowGroup
from pqcache.reader.order import Ints
from pqcache.reader.packing import HeldSequences, tokens_of
from pqcache.reader.read_plan import ReadPlan
from pqcache.reader.row_hashes import ROW_HASH, ROW_HASH_FIELD, ROW_HASH_KIND, hashes_of
from pqcache.reader.selection.exclude import LEFT_OUT, left_out_of
from pqcache.reader.selection.selection import Bools, Positions
from pqcache.reader.stats import NO_METER, Meter
from pqcache.store.cache_directory import advice_for_file

log = logging.getLogger("pqcache.reader")

AnyHeld = Union["Held", "HeldPlaces", HeldSequences]


class Held:
    """Rows of a row group in the order in which a lane takes them, from row ``first`` on.

    They are held in ``parts``, which end at rows ``ends`` and have memory of their own.
    """

    def __init__(self, file: int, parts: Sequence[Sequence[Column]], ends: Sequence[int], first: int = 0) -> None:
        self.file = file
        self._parts: list[Sequence[Column] | None] = list(parts)
        self._ends = [first, *(first + end for end in ends)]

    def slices(self, low: int, high: int) -> list[list[Column]]:
        """The columns of rows ``low`` up to ``high``, some rows at a time."""
        bounds = zip(self._parts, self._ends[:-1], self._ends[1:], strict=True)
        found = [(part, max(low, begin) - begin, min(high, end) - begin) for part, begin, end in bounds]
        return [[column.slice(a, b) for column in part] for part, a, b in found if part is not None and a < b]

    def drop(self, row: int) -> None:
        """Free the parts before a row."""
        for number, end in enumerate(self._ends[1:]):
            if end <= row:
                self._parts[number] = None


class HeldPlaces:
    """Items made of a row group's rows: repeated rows, sequences, or batches by tokens.

    ``places[i - first]`` are the positions in ``columns`` of item i, in the order in which a lane takes them. Of a
    sequence's positions, each column takes those in its ``steps``.
    """

    def __init__(
        self,
        file: int,
        columns: Sequence[Column],
        places: Positions,
        first: int = 0,
        steps: Sequence[Sequence[int]] = (),
    ) -> None:
        self.file = file
        self._columns, self._places, self._first, self._steps = columns, places, first, steps

    def _at(self, low: int, high: int) -> Positions:
        return self._places[low - self._first : high - self._first]

    def slices(self, low: int, high: int) -> list[list[Column]]:
        """The columns of items ``low`` up to ``high``."""
        places = self._at(low, high)
        if not self._steps:
            return [[column.take(places.each) for column in self._columns]]
        rows, steps = places.each.reshape(len(places), -1), map(list, self._steps)
        return [[column.with_steps(rows[:, of]) for column, of in zip(self._columns, steps, strict=True)]]

    def lengths(self, low: int, high: int) -> Ints:
        """The number of rows in each of batches ``low`` up to ``high``."""
        lengths = self._at(low, high).lengths
        assert lengths is not None
        return lengths


class RowGroups:
    """The row groups of a plan, which any thread can decode."""

    def __init__(self, plan: ReadPlan, meter: Meter = NO_METER) -> None:
        self.plan, self.meter, self.budget = plan, meter, Budget()
        self.files = Files(plan.data)
        self._counted: dict[int, float] = {}  # bytes that row groups of the index were found to take

    def with_plan(self, plan: ReadPlan) -> RowGroups:
        """The same with another plan of the same columns."""
        if plan is self.plan:
            return self
        found = RowGroups(plan, self.meter)
        found.files, found._counted = self.files, self._counted
        return found

    def with_budget(self, budget: Budget) -> RowGroups:
        """The same, read within a budget."""
        found = copy(self)
        found.budget = budget
        return found

    @cached_property
    def _left_out(self) -> Callable[[int], Bools]:
        return left_out_of(self.files, self.plan.left_out)

    @cached_property
    def sizes(self) -> RowGroupSizes:
        """How much memory the row groups take."""
        return sizes_of(self.plan)

    @cached_property
    def kinds(self) -> dict[str, Kind]:
        """How the columns of the files are held, by name."""
        plan, found = self.plan, self.plan.kinds
        if plan.pack is not None:  # documents stay lists, whose items lie end to end
            found = {n: kind if kind.held == "fixed" else replace(kind, held="array") for n, kind in found.items()}
        return found

    @cached_property
    def columns(self) -> list[str]:
        """The names of the columns that `Held.slices` returns."""
        ids = () if self.plan.pack is None else self.plan.pack.id_columns
        return [*self.kinds, *ids, *[LEFT_OUT] * bool(self.plan.left_out), *[ROW_HASH] * self.plan.has_hashes]

    @cached_property
    def schema(self) -> pa.Schema:
        """The schema of record batches; sequences are lists of fixed size."""
        plan = self.plan
        if plan.pack is not None:
            items = [(name, plan.row_schema.field(name).type.value_type) for name in plan.columns]
            items += [(name, pa.int32()) for name in plan.pack.id_columns]
            return pa.schema([(name, pa.list_(item, plan.pack.length)) for name, item in items])
        fields = []
        for field in plan.row_schema:
            kind, axis = kind_of(field).type, plan.axis(field.name)
            # a required column of a type that is not read here is null; reading it is refused
            shown = field.with_nullable(field.nullable or pa.types.is_null(field.type))
            fields.append(shown.with_type(kind if axis is None else pa.list_(kind, axis)))
        if plan.left_out:
            axis = None if plan.sequence is None else plan.sequence.length
            fields.append(pa.field(LEFT_OUT, pa.bool_() if axis is None else pa.list_(pa.bool_(), axis)))
        return pa.schema([*fields, *[ROW_HASH_FIELD] * plan.has_hashes])

    def load(
        self, number: int, low: int, high: int, order: Ints | None = None, first: int = 0, cuts: Sequence[int] = ()
    ) -> AnyHeld:
        """Decode rows ``low`` up to ``high`` of the rows that the plan reads from its row group or piece ``number``.

        They are returned in ``order``, from position ``first`` on; without it, in file order. ``cuts`` are the
        positions in that order where parts with memory of their own begin.

        Raises:
            ParquetError: the file is gone, damaged, was replaced, or has values that cannot be read.
            UsageError: it is larger than the index says, and too large for the memory.
        """
        plan = self.plan
        with self.meter.decoding(int(plan.row_groups[number]), int(plan.stored_bytes[number])):
            load: Callable[[], AnyHeld] = partial(self._load, number, low, high, order, first, cuts)
            if plan.packs is not None:
                load = partial(self._load_packed, number, low, high, order, first)
            found = plan.data.while_moving(load)
        self.meter.note_memory()
        return found

    def positions(self, number: int) -> Positions:
        """The positions in row group ``number`` of the rows that are read, or of each sequence's rows."""
        group = self._group(number)
        found = self._chosen(group, number)
        return Positions(np.arange(group.rows)) if found is None else found

    def _group(self, number: int) -> RowGroup:
        return self.files.group(int(self.plan.row_groups[number]))

    def _load_packed(self, number: int, low: int, high: int, order: Ints | None, first: int) -> AnyHeld:
        plan, packs = self.plan, self.plan.packs
        assert packs is not None
        group, columns, wanted = self._read(number, 0, int(plan.selection.counts[number]))
        documents = columns if wanted is None else [column.take(wanted.rows) for column in columns]
        lengths, items = tokens_of(packs.spec, dict(zip(self.kinds, documents, strict=False)), group.path)
        sequences = np.arange(low, high) if order is None else low + order[first:]
        if plan.pack is not None:
            pieces = packs.pieces(number, lengths, group.number, group.path)
            return HeldSequences(group.file, plan.pack, items, pieces, sequences, first)
        batches = packs.batches(number, lengths, group.number, group.path)
        return HeldPlaces(group.file, documents, batches[sequences], first)

    def _load(self, number: int, low: int, high: int, order: Ints | None, first: int, cuts: Sequence[int]) -> AnyHeld:
        plan = self.plan
        group, columns, wanted = self._read(number, low, high)
        rows = len(columns[0]) if columns else high - low
        if order is not None:
            order = order[first:]
            wanted = Positions(order) if wanted is None else wanted[order]
        if wanted is None:
            return Held(group.file, [[column.packed() for column in columns] if plan.piece_rows else columns], [rows])
        if len(wanted) > rows or plan.sequence is not None:
            steps = [] if plan.sequence is None else [plan.sequence.steps(name) for name in self.columns]
            return HeldPlaces(group.file, columns, wanted, first, steps)
        ends = [*(cut - first for cut in cuts if cut > first), len(wanted)]
        # else views keep what they do not need in memory
        packed = len(ends) > 1 or bool(plan.piece_rows) or 2 * len(wanted) < rows
        parts: list[list[Column]] = [[] for _ in ends]
        while columns:
            column = columns.pop(0)
            for part, begin, end in zip(parts, [0, *ends[:-1]], ends, strict=True):
                taken = column.take(wanted.rows[begin:end])
                part.append(taken.packed() if packed else taken)
        return Held(group.file, parts, ends, first)

    def _read(self, number: int, low: int, high: int) -> tuple[RowGroup, list[Column], Positions | None]:
        """Decode the rows needed for chosen rows ``low`` up to ``high``; return them and the positions of the chosen
        ones.
        """
        plan, group = self.plan, self._group(number)
        begin = 0 if plan.piece_starts is None else int(plan.piece_starts[number])
        low, high = begin + low, begin + high
        with self.files.reading(group) as file:
            self._check_size(number, group, file)
            wanted = self._chosen(group, number)
            if wanted is not None:
                wanted = wanted[low:high]
                low, high = (int(wanted.rows.min()), int(wanted.rows.max()) + 1) if len(wanted) else (0, 0)
                wanted = replace(wanted, rows=wanted.rows - low)
            return group, self._columns(group, file, low, high), wanted

    def _chosen(self, group: RowGroup, number: int) -> Positions | None:
        """Positions to read from a row group, in groups if they make sequences; None for all rows."""
        selection, count = self.plan.selection, int(self.plan.selection.counts[number])
        if selection.takes_all(number):
            return None
        found = selection.positions(group.number, self.files.parts(group, selection.columns))
        if len(found) != count:
            raise ParquetError(
                group.path,
                f"of row group {group.row_group} {len(found):,} rows are selected, but {count:,} were counted",
                advice_for_file(group.path, "the file was replaced or is damaged: open the dataset again"),
            )
        if len(found) and not (found.rows.min() >= 0 and found.rows.max() < group.rows):
            raise group.replaced(int(found.rows.max()))
        return found

    def _columns(self, group: RowGroup, file: RowGroupFile, low: int, high: int) -> list[Column]:
        present = file.schema.names
        wanted = [name for name in self.kinds if name in present and group.path_value(name) is None]
        if len(wanted) == len(present) and not self.plan.piece_rows:
            group.read_ahead()
        paged = bool(self.plan.piece_rows) and self.files.has_page_index(group, wanted)
        arrays = self.files.read_rows(group, wanted, *((low, high) if paged else (0, group.rows)))
        found = []
        for name, kind in self.kinds.items():
            array = arrays.pop(name, None)
            array = array if paged or array is None else array.slice(low, high - low)
            column = self._column(group, name, kind, array, high - low)
            fill = self.plan.fill.get(name)
            found.append(column if fill is None else filled(column, fill))
        if self.plan.left_out:
            bits = self._left_out(group.number)[low:high]
            found.append(Column(kind_of(pa.field(LEFT_OUT, pa.bool_())), bits.astype(np.uint8)))
        if self.plan.has_hashes:
            content = self.plan.data.contents[group.file]
            found.append(Column(ROW_HASH_KIND, hashes_of(content, group.row_group, low, high)))
        return found

    def _column(self, group: RowGroup, name: str, kind: Kind, array: pa.Array | None, rows: int) -> Column:
        if (value := group.path_value(name)) is not None:
            return hold(pa.repeat(value, rows), kind)
        if array is None:  # which the file lacks
            stored = pa.binary(kind.stored.width) if kind.stored is not None else kind.bare
            return hold(pa.nulls(rows, stored), kind)
        try:
            return hold(array, kind)
        except IrregularError as error:
            raise ParquetError(
                group.path,
                f"column {name!r} has {error} in row group {group.row_group}, although every row group has "
                f"{kind.length} values a row",
                f"pass ragged=[{name!r}]",
            ) from error
        except (pa.ArrowException, OverflowError) as error:
            raise ParquetError(
                group.path,
                unfit_reason(name, array, kind.type)
                or f"column {name!r} cannot be read as {kind.type} ({first_line(error)})",
                "write the file again with the dataset's types",
            ) from error

    def _check_size(self, number: int, group: RowGroup, file: RowGroupFile) -> None:
        """Raise UsageError if a row group, or a piece of one, does not fit into the memory.

        The index has its size, or an upper bound. If the bound does not fit, its pages are counted first.
        """
        most, names = self.budget.most, self._varying
        if most is None or not names:
            return
        piece = self.plan.piece_rows
        share = min(1.0, piece / group.rows) if piece and group.rows else 1.0
        size = self._counted.get(group.number, float(self._most[number]))
        if not 0 <= share * size <= most:
            stored = StoredRowGroup(group.path, file.metadata, file.schema, group.row_group)
            bound = decoded_size(stored, names).most if size < 0 else None
            size = count_decoded(stored, names) if bound is None or share * bound > most else bound
            self._counted[group.number] = size
        self.budget.check(share * size, group.path, group.row_group)

    @cached_property
    def _varying(self) -> list[str]:
        """The columns to read whose rows differ in size."""
        return [name for name in self.plan.columns_read if f"{name}:most" in self.plan.data.index.recorded]

    @cached_property
    def _most(self) -> Ints:
        """An upper bound of the bytes of these columns in each row group; -1 if the index has none."""
        return most_bytes(self.plan, self._varying)


def release_unused() -> None:
    """Return memory that Arrow's allocator does not need to the system."""
    pa.default_memory_pool().release_unused()
