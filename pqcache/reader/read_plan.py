"""The columns and row groups that an epoch is made of, how they are held in memory, and how large they are."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pqcache.errors import ParquetError, UsageError
from pqcache.parquet.dense import Dense, as_list, dense_in
from pqcache.parquet.schema_merge import is_text
from pqcache.reader.batch_layout import LONG, Finished, Gathered, Numbers
from pqcache.reader.columns import Column, Form, as_typed, form_of, hold, stored_as
from pqcache.reader.open import Data
from pqcache.reader.row_group_reader import RowGroups, file_numbers
from pqcache.reader.selection.row_filter import Chosen, choose, count_rows
from pqcache.reader.selection.selection import Selection
from pqcache.reader.selection.sequence_columns import Steps
from pqcache.reader.selection.sequences import Sequence as SequenceOf
from pqcache.reader.selection.sequences import Sequences
from pqcache.reader.shuffle.scatter import Rows
from pqcache.store.selected_rows import SelectedRows
from pqcache.system.buffer_pool import Arena, BufferPool

_SAMPLE = 1024  # rows
_FILE = Form(name="\0file", type=pa.uint32(), form="fixed", width=4)


@dataclass(frozen=True, kw_only=True)
class View:
    """Some columns and row groups of a dataset: all that an epoch is made of.

    With a ``selection`` only ``selected`` rows of each row group are; a row group of which all rows are is read as
    without one. Where the selection is of `Sequences`, these take the place of rows.
    """

    data: Data
    columns: tuple[str, ...]
    groups: npt.NDArray[np.int64]
    dense: tuple[tuple[str, int], ...] = ()
    piece: int = 0
    starts: npt.NDArray[np.int64] | None = None  # first row of each piece in its row group
    selection: Selection | None = None
    selected: npt.NDArray[np.int64] | None = None  # rows of each row group that are selected
    memory: BufferPool = field(default_factory=BufferPool, repr=False, compare=False)  # goes round from epoch to epoch
    arenas: dict[str, Arena] = field(default_factory=dict, repr=False, compare=False)  # so do these, for long rows

    def in_pieces(self, rows: int) -> View:
        """Return the view with row groups of more than ``rows`` rows cut into pieces, each for a row group.

        That is for row groups too large for memory: what comes before a piece must be decoded too.
        """
        if not rows:
            return self
        pieces = -(-self.counts // rows)
        first = np.repeat(np.cumsum(pieces) - pieces, pieces)
        starts = (np.arange(int(pieces.sum())) - first) * rows
        selected = None if self.selected is None else np.repeat(self.selected, pieces)
        return replace(self, groups=np.repeat(self.groups, pieces), piece=rows, starts=starts, selected=selected)

    @property
    def sequences(self) -> Sequences | None:
        """What makes sequences of rows; None where rows are single."""
        return self.selection if isinstance(self.selection, Sequences) else None

    def axis(self, column: str) -> int | None:
        """Return how many rows of a column a sequence has; None where rows are single."""
        return None if self.sequences is None else self.sequences.spec.axis(column)

    @cached_property
    def schema(self) -> pa.Schema:
        """The columns as users see them, those of sequences as lists of fixed size."""
        axes = {name: self.axis(name) for name in self.columns}
        rows = self.row_schema
        return pa.schema([f if (n := axes[f.name]) is None else f.with_type(pa.list_(f.type, n)) for f in rows])

    @cached_property
    def row_schema(self) -> pa.Schema:
        """The columns of single rows."""
        return pa.schema([as_list(self.data.index.schema.field(name)) for name in self.columns])

    @cached_property
    def stored(self) -> dict[str, Dense]:
        """The columns that the files hold dense."""
        return {name: kind for name, kind in dense_in(self.data.index.schema).items() if name in self.columns}

    @cached_property
    def counts(self) -> npt.NDArray[np.int64]:
        """Rows of each row group, or piece of one, that the view has."""
        rows = self.data.index.rows[self.groups] if self.selected is None else self.selected
        return rows if self.starts is None else np.minimum(rows - self.starts, self.piece)

    @property
    def counts_by_group(self) -> npt.NDArray[np.int64]:
        """Rows that the view has of each row group of the index, for `view_of` to take without counting again."""
        found = np.zeros(len(self.data.index), np.int64)
        found[self.groups] = self.data.index.rows[self.groups] if self.selected is None else self.selected
        return found

    @cached_property
    def fingerprint(self) -> str:
        """Names which rows are read, so that a state can say what it belongs to."""
        digest = hashlib.blake2b(self.groups.tobytes(), digest_size=8)
        if self.selection is not None and self.selected is not None:
            digest.update(self.selected.tobytes() + self.selection.fingerprint.encode())
        return digest.hexdigest()

    @cached_property
    def partitions(self) -> tuple[str, ...]:
        """The columns whose values are in the paths."""
        return tuple(n for n in self.columns if n in self.data.index.partitions.column_names)

    @cached_property
    def read_forms(self) -> tuple[Form, ...]:
        """How the columns that are in the files are held."""
        dense = dict(self.dense)
        names = [name for name in self.columns if name not in self.partitions]
        forms = [form_of(self.row_schema.field(name), dense.get(name, 0)) for name in names]
        return tuple(stored_as(form, self.stored.get(form.name)) for form in forms)

    @cached_property
    def row_groups(self) -> RowGroups:
        """What reads the files."""
        index = self.data.index
        return RowGroups(
            root=self.data.root,
            paths=index.paths,
            file=index.numbers("file")[self.groups],
            row_group=index.numbers("row_group")[self.groups],
            rows=index.rows[self.groups],
            offset=index.numbers("offset")[self.groups],
            size=index.numbers("bytes")[self.groups],
            forms=self.read_forms,
            piece=self.piece,
            memory=self.memory,
        )

    def places(self, count: int) -> dict[str, Arena]:
        """Return memory for the long rows of ``count`` row groups, those of a column in one arena, by column."""
        most = int(self.row_groups.rows.max(initial=0))
        if not count or not most or self.sequences is not None:
            return {}
        long = [form for form in self.read_forms if form.form == "fixed" and form.width >= LONG]
        for form in long:
            found = self.arenas.get(form.name)
            if found is None or (found.size, found.count) != (most * form.width, count):
                self.arenas[form.name] = Arena(self.memory, most * form.width, count)
        return {form.name: self.arenas[form.name] for form in long}

    def load(self, group: int, low: int, high: int, arenas: Mapping[str, Arena] = {}) -> Rows:
        """Return rows of a row group, counted among those selected: the columns in the file, and the file's number.

        ``arenas`` are for the columns of row groups that are read as a whole.
        """
        start = 0 if self.starts is None else int(self.starts[group])
        selection, selected = self.selection, None if self.selected is None else int(self.selected[group])
        if selection is None or selected is None:
            columns = self.row_groups.read(group, start + low, start + high, arenas)
        elif isinstance(selection, Sequences):
            choose = partial(selection.rows, int(self.groups[group]))
            found, rows = self.row_groups.read_around(
                group, start + low, start + high, selected, selection.columns, choose
            )
            columns = [c for steps, column in zip(self.steps, found, strict=True) for c in steps.gather(column, rows)]
        elif selected == self.row_groups.rows[group]:
            columns = self.row_groups.read(group, start + low, start + high, arenas)
        else:
            choose = partial(selection.positions, int(self.groups[group]))
            columns = self.row_groups.read_chosen(group, start + low, start + high, selected, selection.columns, choose)
        if self.partitions or not columns:
            columns.append(Column(_FILE, file_numbers(int(self.row_groups.file[group]), high - low)))
        return columns

    @cached_property
    def steps(self) -> tuple[Steps, ...]:
        """How sequences of the columns in the files are held; nothing where rows are single."""
        if self.sequences is None:
            return ()
        spec = self.sequences.spec
        return tuple(
            Steps(form, spec.steps(form.name), (form.stored or not form.dense) and self.nulls(form.name) != 0)
            for form in self.read_forms
        )

    @cached_property
    def load_forms(self) -> tuple[Form, ...]:
        """The forms of what ``load`` returns."""
        found = tuple(f for steps in self.steps for f in steps.forms) if self.sequences else self.read_forms
        return (*found, _FILE) if self.partitions or not found else found

    def finish(self, memory: BufferPool, batch: Gathered) -> Finished:
        """Return a batch's columns, partition columns looked up.

        What has to be made anew for it is in ``memory``.

        Sequences come as their rows, one sequence after the other.
        """
        forms = self.load_forms
        numbers: list[Numbers] = []
        found: dict[str, Column] = {}
        if self.sequences is None:
            apart = set(range(len(forms)))
            for group, array in zip(batch.layout.groups, batch.arrays, strict=True):
                if group.dtype is None or not batch.columns.keys().isdisjoint(group.positions):
                    continue
                apart.difference_update(group.positions)
                together = {forms[position].name: forms[position] for position in group.positions}
                length = forms[group.positions[0]].dense
                shape = (len(together), batch.rows, length) if length else (len(together), batch.rows)
                numbers.append(Numbers(together, array.view(group.dtype).reshape(shape)))
            found = {forms[position].name: batch.column(position, forms[position]) for position in apart}
        else:
            columns = (batch.column(position, form) for position, form in enumerate(forms))
            found = {steps.form.name: steps.rows(columns) for steps in self.steps}
        if self.partitions:
            files = batch.column(len(forms) - 1, _FILE).values
            table = self.data.index.partitions
            for name in self.partitions:
                several = files if self.axis(name) is None else np.repeat(files, self.axis(name) or 1)
                found[name] = hold(pc.take(table[name], pa.array(several)), form_of(self.row_schema.field(name)))
        found.pop(_FILE.name, None)
        return Finished(batch.rows, numbers, {name: as_typed(column, memory) for name, column in found.items()})

    def nulls(self, column: str) -> int | None:
        """Return how many nulls a column has in these row groups, or None where the files do not say.

        Nor can they where only some of the rows are selected, unless there are none at all.
        """
        index = self.data.index
        if column in self.partitions:
            files = index.numbers("file")[self.groups]
            return int(pc.take(index.partitions[column], pa.array(np.unique(files))).null_count)
        name = f"{column}:nulls"
        if name not in index.recorded:
            return None
        counts = pc.take(index.table[name], pa.array(self.groups))
        if counts.null_count:
            return None
        total = int(pc.sum(counts).as_py() or 0)
        return total if not total or self.selection is None else None

    def densified(self, but: Sequence[str] = ()) -> View:
        """Return the view with lists that are all of one length held as fixed-width rows.

        Decided once for the whole dataset, so that a column is of one kind in every batch: each row group's
        number of values must be rows x length, and the first rows must have that length. Lists of one item
        stay lists, as a Parquet file counts an empty list or a null as one value too.
        """
        index = self.data.index
        rows = index.rows
        found, dense = [], []
        for form in self.read_forms:
            name = f"{form.name}:values"
            if form.form != "bytes" or is_text(form.type) or form.name in but:
                continue
            if form.stored is not None:
                if form.stored.length > 1:
                    dense.append((form.name, form.stored.length))
                continue
            if name not in index.recorded:  # an index from before this was recorded
                continue
            values = index.table[name]
            if values.null_count:  # some file lacks the column
                continue
            numbers = values.to_numpy()[rows > 0]
            lengths = np.unique(numbers / rows[rows > 0])
            if len(lengths) == 1 and lengths[0] == int(lengths[0]) > 1:
                found.append((form.name, int(lengths[0])))
        sample = self._sample([name for name, _ in found]) if found and len(self.groups) else None
        for name, length in found:
            if sample is None or name not in sample.column_names:
                continue
            lengths = pc.fill_null(pc.list_value_length(sample[name]), -1)
            if pc.all(pc.equal(lengths, length)).as_py():
                dense.append((name, length))
        return replace(self, dense=tuple(dense))

    @cached_property
    def sizes(self) -> npt.NDArray[np.int64]:
        """Bytes of the view's rows of each row group: exact for numbers, estimated from a few rows for the rest.

        Lists count alike whether they are held dense or not, so that the window is the same either way.
        """
        return self._bytes(self.counts, [form.name for form in self.read_forms], self.sequences)

    @cached_property
    def decoded(self) -> npt.NDArray[np.int64]:
        """Bytes that each row group, or piece of one, takes while it is decoded: all rows, to select among them.

        Of sequences these are there too, and where their rows are.
        """
        if self.selection is None:
            return self.sizes
        rows = self.data.index.rows[self.groups]
        if self.piece:
            rows = np.minimum(rows, self.piece)
        names = [form.name for form in self.read_forms]
        found = self._bytes(rows, list(dict.fromkeys([*names, *self.selection.columns])))
        if self.sequences is not None:
            found += self.sizes + 8 * self.counts * self.sequences.spec.length
        return found

    @property
    def decoded_rows(self) -> npt.NDArray[np.int64]:
        """Rows, or sequences, of each row group among which the view's are selected: pieces are cut of these."""
        return self.data.index.rows[self.groups] if self.sequences is None else self.counts

    def _bytes(
        self, counts: npt.NDArray[np.int64], names: Sequence[str], sequences: Sequences | None = None
    ) -> npt.NDArray[np.int64]:
        """Return the bytes of so many rows, or sequences, of each row group, with the given columns in the files."""
        index = self.data.index
        total = np.zeros(len(self.groups), np.int64)
        forms = [form_of(as_list(index.schema.field(name))) for name in names]
        varied = [form for form in forms if form.form != "fixed"]
        sample = self._sample([form.name for form in varied]) if varied and len(self.groups) else None
        for form in forms:
            items = counts if sequences is None else counts * len(sequences.spec.steps(form.name))
            if form.form == "fixed":
                total += items * form.width
                continue
            stored = index.uncompressed([form.name])[self.groups] * items // index.rows[self.groups]
            per_row = 0.0
            if sample is not None and form.name in sample.column_names and sample.num_rows:
                per_row = sample[form.name].nbytes / sample.num_rows
            total += np.maximum(stored, (items * per_row).astype(np.int64)) + 16 * items
        return np.asarray(total + 4 * counts * bool(self.partitions), np.int64)

    def _sample(self, names: Sequence[str]) -> pa.Table | None:
        """Return the first rows of the first row group: dictionaries make the stored size say little."""
        path = self.data.root / self.data.index.paths[int(self.row_groups.file[0])]
        group = int(self.row_groups.row_group[0])
        try:
            with pq.ParquetFile(path) as file:
                present = [name for name in names if name in file.schema_arrow.names]
                reader = file.iter_batches(_SAMPLE, [group], present, use_threads=False)
                batch = next(iter(reader), None)
        except (pa.ArrowException, OSError) as error:
            raise ParquetError(path, f"cannot be read ({error})", "open the dataset again") from error
        return None if batch is None else pa.table(batch)


def view_of(
    data: Data,
    columns: Sequence[str] | None,
    filters: Any = None,
    rows: SelectedRows | None = None,
    counts: npt.NDArray[np.int64] | None = None,
    sequence: SequenceOf | None = None,
) -> View:
    """Choose columns (None: all) and rows (see `choose`), or sequences of these.

    A name that is not there raises UsageError.
    """
    names = data.index.schema.names
    if columns is None:
        columns = names
    if isinstance(columns, str):
        raise UsageError(f"columns={columns!r}", f"give a list of names, like [{columns!r}]")
    unknown = [name for name in columns if name not in names]
    if unknown:
        raise UsageError(data.root, f"no column {unknown[0]!r}", f"it has {', '.join(names)}")
    if not columns:
        raise UsageError("", "columns is empty", "name at least one, or None for all")
    if len(set(columns)) < len(columns):
        raise UsageError("columns names one twice", f"{', '.join(columns)}")
    chosen = choose(data, filters, rows, counts)
    if sequence is None:
        return View(
            data=data,
            columns=tuple(columns),
            groups=chosen.groups,
            selection=chosen.selection,
            selected=chosen.selected,
        )
    return _view_of_sequences(data, tuple(columns), sequence, chosen, counts)


def _view_of_sequences(
    data: Data, columns: tuple[str, ...], sequence: SequenceOf, chosen: Chosen, counts: npt.NDArray[np.int64] | None
) -> View:
    if not isinstance(sequence, SequenceOf):
        raise UsageError(f"sequence={sequence!r}", "give a Sequence, like Sequence(3, order_by='ts')")
    for name in sequence.columns_at or ():
        if name not in columns:
            raise UsageError("sequence", f"columns_at names {name!r}, which is not among the columns")
    found = Sequences(data, sequence, chosen.selection)
    groups = chosen.groups
    selected = count_rows(data, found, groups) if counts is None else counts[groups]
    if len(groups) and not selected.any():
        warnings.warn(
            f"{data.root}: there is no sequence of {sequence.length} rows, so there are no batches", stacklevel=2
        )
    return View(
        data=data, columns=columns, groups=groups[selected > 0], selection=found, selected=selected[selected > 0]
    )
