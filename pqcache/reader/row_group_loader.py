"""Decodes the row groups of a read plan, and makes the columns of a batch of what was gathered from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pqcache.parquet.decoded_size import StoredRowGroup, count_decoded, decoded_size
from pqcache.reader.columns.batch_layout import FinishedBatch, GatheredBatch, GatheredBatches, NumberColumns, is_long
from pqcache.reader.columns.column_data import ColumnData, as_typed, cut, from_arrow, take
from pqcache.reader.columns.column_forms import ColumnForm, form_of, typed_form
from pqcache.reader.decoded_sizes import has_pages, most_bytes, sizes_of
from pqcache.reader.memory import MostDecoded, RowGroupSizes, Window, check_decoded, fit
from pqcache.reader.meter import NO_METER, Meter
from pqcache.reader.order.epoch_order import Ints
from pqcache.reader.packing.grouped_columns import GroupedColumn
from pqcache.reader.packing.packed_columns import (
    check_lengths,
    pack_columns,
    packed_forms,
    sequences_of,
)
from pqcache.reader.packing.packed_rows import PackedRows
from pqcache.reader.packing.token_batches import GroupedRows
from pqcache.reader.piece_borders import along_pages
from pqcache.reader.read_plan import ReadPlan
from pqcache.reader.row_group_reader import RowGroupReader, Selected, UseColumn, checked_columns, remembered_rows
from pqcache.reader.selection.sequence_columns import SequenceColumn
from pqcache.reader.selection.sequences import SequenceSelection
from pqcache.system.buffer_pool import Arena, BufferPool

P = ParamSpec("P")
T = TypeVar("T")

_FILE = ColumnForm(name="\0file", type=pa.uint32(), kind="fixed", width=4)  # looks partition columns up


class RowGroupLoader:
    """Decodes row groups of a ``ReadPlan``, from any thread; its memory is reused from epoch to epoch."""

    def __init__(self, plan: ReadPlan) -> None:
        self.plan = plan
        self.memory = BufferPool()
        self.arenas: dict[str, Arena] = {}
        self.most: MostDecoded | None = None  # no limit
        self.meter: Meter = NO_METER
        self._fitting: dict[int, float] = {}  # bytes that row groups were found to take at most, by row of the index
        self._read_right = checked_columns(plan.data)
        self._page_rows = remembered_rows(plan.data, plan.file_forms)

    def split(self, piece_rows: int) -> RowGroupLoader:
        """Return a loader of the plan split into pieces (see `ReadPlan.split`) with the same memory; this one for 0."""
        return self.of(self.plan.split(piece_rows)) if piece_rows else self

    def in_order(self, seed: int, epoch: int) -> RowGroupLoader:
        """Return a loader that packs documents in the order of an epoch; this one where rows are not packed."""
        packs = self.plan.packs
        return self if packs is None else self.of(replace(self.plan, packs=replace(packs, shuffle=(seed, epoch))))

    def of(self, plan: ReadPlan) -> RowGroupLoader:
        """Return a loader of another plan of the same columns, with the same memory."""
        loader = RowGroupLoader(plan)
        loader.memory, loader.arenas, loader.meter = self.memory, self.arenas, self.meter
        loader._read_right, loader._fitting = self._read_right, self._fitting
        loader._page_rows = self._page_rows
        return loader

    @cached_property
    def sizes(self) -> RowGroupSizes:
        """How much memory the row groups take."""
        return sizes_of(self.plan)

    def fit(self, memory: int, lanes: int, shuffle: bool, name: object, all_lanes: int) -> Window:
        """Return the window of each of ``lanes`` lanes within ``memory`` bytes; see `memory.fit`."""
        pieces = has_pages(self.plan)
        window = fit(self.sizes, memory, lanes, shuffle, name, pieces, all_lanes)
        return (
            along_pages(self.plan, window, int(np.argmax(self.sizes.decoded))) if pieces and len(self.sizes) else window
        )

    @cached_property
    def _varying(self) -> list[str]:
        """The columns that are read whose rows differ in size."""
        return [name for name in self.plan.columns_read if f"{name}:most" in self.plan.data.index.recorded]

    @cached_property
    def _most(self) -> Ints:
        """The bytes of these columns at most in each row group, -1 where the index does not tell."""
        return most_bytes(self.plan, self._varying)

    @cached_property
    def reader(self) -> RowGroupReader:
        """What reads the files."""
        plan = self.plan
        reader = RowGroupReader(
            plan.data,
            plan.row_groups,
            forms=plan.file_forms,
            piece_rows=plan.piece_rows,
            memory=self.memory,
            read_right=self._read_right,
            page_rows=self._page_rows,
        )
        reader.fill = plan.fill
        return reader

    def measured(self, load: Callable[P, T]) -> Callable[P, T]:
        """Return ``load``, which decodes the row group that is its first argument, so that the meter counts it."""
        meter, plan = self.meter, self.plan
        self.reader.meter = meter

        def decode(*args: P.args, **kwargs: P.kwargs) -> T:
            number: Any = args[0]
            with meter.decoding(int(plan.row_groups[number]), int(plan.stored_bytes[number])):
                found = load(*args, **kwargs)
            meter.note_memory(self.memory.size + sum(arena.used for arena in self.arenas.values()))
            return found

        return decode

    def arenas_for(self, slots: int) -> dict[str, Arena]:
        """Return memory for the long rows of ``slots`` row groups, one arena for each column, by column."""
        most = int(self.reader.rows.max(initial=0))
        if (
            not slots
            or not most
            or self.plan.piece_rows
            or self.plan.sequences is not None
            or self.plan.packs is not None
        ):
            return {}
        long = [form for form in self.plan.file_forms if is_long(form)]
        for form in long:
            arena = self.arenas.get(form.name)
            if arena is None or (arena.size, arena.count) != (most * form.width, slots):
                self.arenas[form.name] = Arena(self.memory, most * form.width, slots)
        return {form.name: self.arenas[form.name] for form in long}

    def load(self, number: int, low: int, high: int, arenas: Mapping[str, Arena] = {}) -> list[ColumnData]:
        """Return rows ``low <= row < high`` of the plan's row group ``number``, as columns of ``forms``.

        Rows are counted among those that are selected. ``arenas`` take the long rows of row groups that are decoded
        completely. What cannot be read raises ParquetError.
        """
        columns, rows = self.load_around(number, low, high, arenas=arenas)
        return columns if rows is None else [take(column, rows) for column in columns]

    def load_around(
        self, number: int, low: int, high: int, use: UseColumn | None = None, *, arenas: Mapping[str, Arena] = {}
    ) -> tuple[list[ColumnData], Ints | None]:
        """Return decoded rows, and where among them are those that `load` returns; None where they are alone.

        Where all rows that are decoded are wanted, ``use`` takes the columns of the files one after the other, and they
        are returned without values. It may be called again with a column.
        """
        return self.plan.data.while_moving(partial(self._load, number, low, high, arenas, use))

    def _load(
        self, number: int, low: int, high: int, arenas: Mapping[str, Arena], use: UseColumn | None
    ) -> tuple[list[ColumnData], Ints | None]:
        packs = self.plan.packs
        if packs is None:
            return self._load_rows(number, low, high, arenas, use)
        return self._load_packed(packs, number, low, high), None

    def _load_packed(self, packs: PackedRows | GroupedRows, number: int, low: int, high: int) -> list[ColumnData]:
        documents, chosen = self._load_rows(number, 0, int(packs.documents[number]), {})
        documents = documents if chosen is None else [take(column, chosen) for column in documents]
        item, lengths, path = int(self.plan.row_groups[number]), packs.lengths_of(number), self.reader.path(number)
        if isinstance(packs, PackedRows):
            return pack_columns(packs, packs.read(number, item, low, high), lengths, documents, path)
        rows, ends = packs.read(number, item, low, high)
        check_lengths(packs.spec, documents, lengths, path)
        found = zip(self.grouped_columns, documents, strict=True)
        return [column for grouped, rows_of in found for column in grouped.gather(rows_of, rows, ends, path)]

    def _load_rows(
        self, number: int, low: int, high: int, arenas: Mapping[str, Arena], use: UseColumn | None = None
    ) -> tuple[list[ColumnData], Ints | None]:
        plan, reader = self.plan, self.reader
        self._check_size(number)
        start = 0 if plan.piece_starts is None else int(plan.piece_starts[number])
        low, high = start + low, start + high
        selection, selected = plan.selection, None if plan.selected is None else int(plan.selected[number])
        row_group, rows = int(plan.row_groups[number]), None
        if isinstance(selection, SequenceSelection) and selected is not None:
            choice = Selected(selected, selection.columns, partial(selection.rows, row_group))
            found, places = reader.read_around(number, (low, high), choice)
            path, pairs = reader.path(number), zip(self.sequence_columns, found, strict=True)
            columns = [column for sequences, rows_of in pairs for column in sequences.gather(rows_of, places, path)]
        elif selection is None or selected is None or not plan.chooses(number):
            columns = reader.read(number, low, high, arenas, use)
        else:
            choice = Selected(selected, selection.columns, partial(selection.positions, row_group))
            columns, rows = reader.read_selected(number, (low, high), choice, arenas)
        if plan.partitions or not columns:
            count = high - low if rows is None else len(columns[0])
            columns.append(ColumnData(_FILE, np.full(count, reader.file[number], np.uint32)))
        return columns, rows

    def _check_size(self, number: int) -> None:
        """Raise UsageError where a row group, or a piece of one, is larger than the index says and does not fit.

        Where an upper bound may be too much, it is counted.
        """
        plan, most, names = self.plan, self.most, self._varying
        if most is None or not names:
            return
        reader, row_group, size = self.reader, int(plan.row_groups[number]), float(self._most[number])
        share = min(1.0, plan.piece_rows / int(reader.rows[number])) if plan.piece_rows else 1.0
        size = self._fitting.get(row_group, size)
        if not 0 <= share * size <= most.bytes:
            with reader.opened(number, names) as (file, path):
                group = StoredRowGroup(path, file.metadata, file.schema_arrow, int(reader.row_group[number]))
                bound = decoded_size(group, names).most if size < 0 else None
                size = count_decoded(group, names) if bound is None or share * bound > most.bytes else bound
            self._fitting[row_group] = size
        check_decoded(share * size, most, reader.path(number), int(reader.row_group[number]))

    @cached_property
    def sequence_columns(self) -> tuple[SequenceColumn, ...]:
        """How sequences of the columns in the files are held; empty where rows are single."""
        plan = self.plan
        if plan.sequences is None:
            return ()
        spec = plan.sequences.spec
        return tuple(
            SequenceColumn(form, spec.steps(form.name), (form.stored or not form.dense) and plan.nulls(form.name) != 0)
            for form in plan.file_forms
        )

    @cached_property
    def grouped_columns(self) -> tuple[GroupedColumn, ...]:
        """How batches by tokens are held of the columns that are read."""
        forms = (*self.plan.file_forms, _FILE) if self.plan.partitions else self.plan.file_forms
        return tuple(
            GroupedColumn(
                form, form is not _FILE and (form.stored or not form.dense) and self.plan.nulls(form.name) != 0
            )
            for form in forms
        )

    @cached_property
    def forms(self) -> tuple[ColumnForm, ...]:
        """The forms of the columns that ``load`` returns."""
        if isinstance(self.plan.packs, PackedRows):
            return packed_forms(self.plan.file_forms)
        if self.plan.packs is not None:
            return tuple(form for column in self.grouped_columns for form in column.forms)
        if self.plan.sequences is None:
            forms = self.plan.file_forms
        else:
            forms = tuple(form for column in self.sequence_columns for form in column.forms)
        return (*forms, _FILE) if self.plan.partitions or not forms else forms

    @cached_property
    def gathered_forms(self) -> tuple[ColumnForm, ...]:
        """The forms of gathered columns: long lists that are stored as other numbers are numbers of their type then."""
        if self.plan.packs is not None or self.plan.sequences is not None:
            return self.forms
        return tuple(typed if is_long(form) and is_long(typed := typed_form(form)) else form for form in self.forms)

    def finish(self, memory: BufferPool, batches: GatheredBatches) -> list[FinishedBatch]:
        """Return the columns of batches, partition columns among them; new values are written to ``memory``.

        Sequences come as their rows, one sequence after the other.
        """
        if self.plan.packs is not None or self.sequence_columns or self.plan.partitions:
            return [self._finish(memory, batch) for batch in batches.one_by_one()]
        whole = GatheredBatch(sum(batches.sizes), batches.layout, batches.arrays, batches.columns[0])
        numbers, others = self._numbers_of(whole)
        placed = [whole.column(position, self.gathered_forms[position]) for position in others - whole.columns.keys()]
        found: list[FinishedBatch] = []
        start = 0
        for size, columns in zip(batches.sizes, batches.columns, strict=True):
            stop = start + size
            of_batch = [NumberColumns(forms, values[:, start:stop]) for forms, values in numbers]
            rest = (*columns.values(), *(cut(column, start, stop) for column in placed))
            named = {each.form.name: as_typed(each, memory) for each in rest if each.form is not _FILE}
            found.append(FinishedBatch(size, of_batch, named))
            start = stop
        return found

    def _finish(self, memory: BufferPool, batch: GatheredBatch) -> FinishedBatch:
        packs = self.plan.packs
        if isinstance(packs, PackedRows):
            packed = [batch.column(position, form) for position, form in enumerate(self.forms)]
            return FinishedBatch(batch.rows, sequences_of(packs.spec, packed, batch.rows, memory), {})
        numbers: list[NumberColumns] = []
        split = self.sequence_columns if packs is None else self.grouped_columns
        if not split:
            numbers, others = self._numbers_of(batch)
            forms = self.gathered_forms
            found = {forms[position].name: batch.column(position, forms[position]) for position in others}
        else:
            columns = (batch.column(position, form) for position, form in enumerate(self.forms))
            found = {column.form.name: column.rows(columns) for column in split}
        if self.plan.partitions:
            files = found[_FILE.name] if _FILE.name in found else batch.column(len(self.forms) - 1, _FILE)
            found.update(self._partition_columns(files.values))
        found.pop(_FILE.name, None)
        return FinishedBatch(batch.rows, numbers, {name: as_typed(column, memory) for name, column in found.items()})

    def _numbers_of(self, batch: GatheredBatch) -> tuple[list[NumberColumns], set[int]]:
        """Return plain numbers by group, and the positions of all other columns."""
        forms, numbers = self.gathered_forms, []
        others = set(range(len(forms)))
        for group, array in zip(batch.layout.groups, batch.arrays, strict=True):
            if group.dtype is None or not batch.columns.keys().isdisjoint(group.positions):
                continue
            others.difference_update(group.positions)
            together = {forms[position].name: forms[position] for position in group.positions}
            if together.pop(_FILE.name, None) is not None:  # the last one, which no batch has
                array = array[:-1]
            length = forms[group.positions[0]].dense
            shape = (len(together), batch.rows, length) if length else (len(together), batch.rows)
            if together:
                numbers.append(NumberColumns(together, array.view(group.dtype).reshape(shape)))
        return numbers, others

    def _partition_columns(self, files: npt.NDArray[Any]) -> dict[str, ColumnData]:
        plan, found = self.plan, {}
        table = plan.data.index.partitions
        for name in plan.partitions:
            of_rows = files if (axis := plan.axis(name)) is None else np.repeat(files, axis)
            found[name] = from_arrow(pc.take(table[name], pa.array(of_rows)), form_of(plan.row_schema.field(name)))
        return found
