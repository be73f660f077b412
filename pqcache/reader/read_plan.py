"""A value that says what an epoch reads: columns, row groups, and the number of rows in each."""

from __future__ import annotations

import hashlib
import logging
import warnings
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pqcache.errors import PqcacheError, TypeClash, UsageError, no_column
from pqcache.parquet.dense import Dense, as_list, dense_in
from pqcache.reader.columns import Fill, Kind, hold, kind_of
from pqcache.reader.epoch_options import RowOptions
from pqcache.reader.open_dataset import Files, LocalDataset
from pqcache.reader.order import Ints, permutation
from pqcache.reader.packing import Pack, Packs, TokenBatches, check_columns, count_packs, items_of
from pqcache.reader.selection.exclude import Excluded, excluded, without
from pqcache.reader.selection.filters import base_of, filter_rows, rows_since
from pqcache.reader.selection.selection import Bools, Chosen, Counts, Selection, digest_of, found_once
from pqcache.reader.selection.sequences import Sequence as SequenceOf
from pqcache.reader.selection.sequences import sequences_of
from pqcache.reader.selection.split import split_rows
from pqcache.reader.selection.weights import RowWeights
from pqcache.store.key_lookup import SelectedRows, ranges_of
from pqcache.units import parse_names

log = logging.getLogger("pqcache.reader")

_FEWEST = 16  # row groups of a sample, if there are as many: rows of fewer say little of the dataset
_SAMPLE = 5  # the random stream of samples; lower numbers are those of the order, of mixes and of weights
_TELLING = 8  # row groups with the same integral average length: so many are no chance

Bounds = tuple[Any, Any]  # the least and the greatest value


@dataclass(frozen=True, kw_only=True)
class ReadPlan:
    """The columns and row groups of a dataset that an epoch reads.

    ``selection``    which rows are read, or which sequences of rows
    ``sequence``     how columns are arranged in a sequence; None for single rows
    ``dense``        (name, length) of list columns held as rows of fixed width
    ``piece_rows``   where row groups are split: the most rows of a piece. Each row group of the selection is a piece
                     then, which begins at row ``piece_starts`` of its row group. 0: row groups are not split.
    ``packs``        the packed sequences, or batches, made of the chosen rows, which then count as rows
    ``weights``      how often each of these rows comes, which differs from epoch to epoch: see `at_epoch`
    ``fill``         the replacements of nulls, by column, applied as soon as they are decoded
    ``left_out``     rows dropped after gathering, which shortens batches
    ``has_hashes``   rows have the column `ROW_HASH`
    """

    data: LocalDataset
    columns: tuple[str, ...]
    selection: Selection
    sequence: SequenceOf | None = None
    dense: tuple[tuple[str, int], ...] = ()
    piece_rows: int = 0
    piece_starts: Ints | None = None
    packs: Packs | None = None
    weights: RowWeights | None = None
    fill: Mapping[str, Fill] = field(default_factory=dict)
    left_out: tuple[Excluded, ...] = ()
    has_hashes: bool = False

    @property
    def row_groups(self) -> Ints:
        """The row groups that are read, by their row in the index."""
        return self.selection.row_groups

    @property
    def pack(self) -> Pack | None:
        """How documents are packed into sequences, if they are."""
        return self.packs.spec if self.packs is not None and isinstance(self.packs.spec, Pack) else None

    def at_epoch(self, epoch: int, seed: int, constant: bool = False) -> ReadPlan:
        """The plan of one epoch, with rows as often as their weights say.

        With ``constant`` all epochs have the same number of rows; see `RowWeights.at`.
        """
        if self.weights is None:
            return self
        return replace(self, selection=self.weights.at(epoch, seed, constant))

    def fingerprint_at(self, epoch: int) -> str:
        """A hash of the rows of an epoch and their weights."""
        if self.weights is None:
            return self.fingerprint
        return hashlib.blake2b((self.fingerprint + self.weights.name(epoch)).encode(), digest_size=8).hexdigest()

    def with_dense_lists(self, ragged: Collection[str] = ()) -> ReadPlan:
        """Hold lists of one common length as rows of fixed width, except in ``ragged`` columns.

        Counts in the index decide it for the whole dataset, so that a column has the same kind in every batch: each row
        group must have rows x length values and no nulls. With few row groups the average may be integral by chance, so
        the first lists must have that length too. Decoding rejects lists of another length. Lists of one item are
        excluded, as an empty list or a null also counts as one value.
        """
        lists = {name: kind.stored for name, kind in self.kinds.items() if kind.is_list and name not in ragged}
        lengths = {n: stored.length if stored else self._values_a_row(n) for n, stored in lists.items()}
        lengths = {name: length for name, length in lengths.items() if length > 1}
        unsure = [name for name in lengths if not lists[name]]
        if unsure and len(self.row_groups) and np.count_nonzero(self.data.index.rows) < _TELLING:
            first = self.data.while_moving(partial(self._first_rows, unsure))
            for name in unsure:
                found = pc.fill_null(pc.list_value_length(first[name]), -1)
                if not pc.all(pc.equal(found, lengths[name])).as_py() or pc.list_flatten(first[name]).null_count:
                    del lengths[name]
        return replace(self, dense=tuple(lengths.items()))

    def _first_rows(self, columns: Sequence[str]) -> pa.Table:
        files = Files(self.data)
        with closing(files.parts(files.group(int(self.row_groups[0])), columns)) as parts:
            return next(parts)

    def _values_a_row(self, column: str) -> int:
        """The values per row of a list column, if the average is the same integer in every row group; else 0."""
        index = self.data.index
        used = index.rows > 0
        rows, values = index.rows[used], index.optional(f"{column}:values")[used]
        length = int(values[0] // rows[0]) if len(rows) else 0
        return length if np.array_equal(values, rows * length) else 0

    def split(self, piece_rows: int) -> ReadPlan:
        """Split row groups of more than ``piece_rows`` rows, too large for the memory, into pieces; 0: none."""
        if not piece_rows:
            return self
        pieces = -(-self.counts // piece_rows)
        number = np.repeat(np.arange(len(pieces)), pieces)
        starts = ranges_of(np.zeros_like(pieces), pieces) * piece_rows
        return replace(self, selection=self.selection.of(number), piece_rows=piece_rows, piece_starts=starts)

    def axis(self, column: str) -> int | None:
        """Rows of a column in a sequence; None if rows are single."""
        return None if self.sequence is None else self.sequence.axis(column)

    @cached_property
    def schema(self) -> pa.Schema:
        """The columns as users see them, those of sequences as lists of fixed size."""
        axes = {name: self.axis(name) for name in self.columns}
        rows = self.row_schema
        return pa.schema([f if (n := axes[f.name]) is None else f.with_type(pa.list_(f.type, n)) for f in rows])

    @cached_property
    def row_schema(self) -> pa.Schema:
        return pa.schema([as_list(self.data.index.schema.field(name)) for name in self.columns])

    @cached_property
    def stored(self) -> dict[str, Dense]:
        """The columns that the files hold dense."""
        return {name: kind for name, kind in dense_in(self.data.index.schema).items() if name in self.columns}

    @cached_property
    def counts(self) -> Ints:
        """Rows read from each row group or piece, or the sequences they are packed into."""
        if self.packs is not None:
            return self.packs.counts
        rows = self.selection.counts
        return rows if self.piece_starts is None else np.minimum(rows - self.piece_starts, self.piece_rows)

    @cached_property
    def fingerprint(self) -> str:
        """Identifies the rows in states."""
        digest = hashlib.blake2b(self.row_groups.tobytes(), digest_size=8)
        if not self.selection.is_all:
            digest.update(self.selection.counts.tobytes() + self.selection.name.encode())
        if self.packs is not None:
            digest.update(self.packs.fingerprint.encode())
        return digest.hexdigest()

    @cached_property
    def partitions(self) -> tuple[str, ...]:
        """The columns whose values are in the paths."""
        return tuple(n for n in self.columns if n in self.data.index.partitions.column_names)

    @cached_property
    def kinds(self) -> dict[str, Kind]:
        """How columns in the files are held in memory."""
        dense, fields = dict(self.dense), self.row_schema
        names = [name for name in self.columns if name not in self.partitions]
        return {name: kind_of(fields.field(name), self.stored.get(name), dense.get(name, 0)) for name in names}

    @cached_property
    def stored_bytes(self) -> Ints:
        """Bytes on disk, as far as known, of the columns to read, by row group.

        A piece counts its share, even if earlier rows have to be decoded too.
        """
        total = self.data.index.stored(self.columns_read)[self.row_groups]
        if self.piece_starts is None:
            return total
        share = self.counts / np.maximum(self.selection.counts, 1)
        return np.asarray(total * share, np.int64)

    @cached_property
    def columns_read(self) -> tuple[str, ...]:
        """The columns read from the files, including those used only by the selection."""
        return tuple(dict.fromkeys([*self.kinds, *self.selection.columns]))

    def nulls(self, column: str) -> int | None:
        """Nulls of a column in these row groups; None if unknown.

        With a selection of rows, or weights, only 0 is known.
        """
        index = self.data.index
        if column in self.partitions:
            values = index.partitions[column]
            return int(pc.take(values, pa.array(self._files)).null_count) if values.null_count else 0
        name = f"{column}:nulls"
        if name not in index.recorded or column in index.path_values.column_names:
            return None
        counts = index.table[name]
        if not np.array_equal(self.row_groups, np.arange(len(index))):
            counts = pc.take(counts, pa.array(self.row_groups))
        if counts.null_count:
            return None
        total = int(pc.sum(counts).as_py() or 0)
        return total if not total or (self.selection.is_all and self.weights is None) else None

    def bounds(self, path: str) -> Bounds | None:
        """The least and greatest value of a column, or a field of a struct; None if unknown."""
        index = self.data.index
        if path in self.partitions:
            low = high = pc.take(index.partitions[path], pa.array(self._files)).drop_null()
        else:
            of = next((prefix for prefix in ("", "field_") if f"{path}:{prefix}min" in index.recorded), None)
            if of is None or path in index.path_values.column_names:
                return None
            table = pa.table(
                {name: index.table[name] for name in index.recorded if name.startswith((f"{path}:", "rows"))}
            )
            table = table.take(pa.array(self.row_groups))
            if f"{path}:nulls" in index.recorded:  # row groups without a value have no least one
                table = table.filter(pc.fill_null(pc.less(table[f"{path}:nulls"], table["rows"]), True))
            low, high = table[f"{path}:{of}min"], table[f"{path}:{of}max"]
        if low.null_count or high.null_count:
            return None
        return (pc.min(low).as_py(), pc.max(high).as_py()) if len(low) else (0, 0)

    @cached_property
    def _files(self) -> Ints:
        read = np.zeros(len(self.data.index.paths), np.bool_)
        read[self.data.index.numbers("file")[self.row_groups]] = True
        return np.flatnonzero(read)


def make_read_plan(
    data: LocalDataset,
    columns: Sequence[str] | None,
    chosen: RowOptions | None = None,
    *,
    seed: int = 0,
    counts: Counts | None = None,
    ragged: Collection[str] | None = None,
) -> ReadPlan:
    """Plan to read ``columns`` of the chosen rows, of sequences of these, or of their packed documents.

    Without ``columns``, all are read, or those of a `Pack`. ``seed`` chooses a sample. ``counts`` are known counts of
    rows; new ones are added to it. Lists of one length are held dense, except in ``ragged`` and packed columns; if
    ``ragged`` is None, none are. Raises UsageError for a column that is missing or cannot be packed.
    """
    chosen = chosen or RowOptions()
    pack, sequence = chosen.pack, chosen.sequence
    names = data.index.schema.names
    if columns is None and isinstance(pack, Pack):
        columns = pack.columns
    if columns is None:
        for clash in data.index.clashes:
            raise _clash_of(data, clash)
        columns = names
        if not names:
            raise UsageError(data.root, "its files have no columns", "there is nothing to read")
    columns = parse_names("columns", columns)
    unknown = [name for name in columns if name not in names]
    if unknown:
        raise unknown_column(data, unknown[0])
    if not columns:
        raise UsageError("columns", "the list is empty", "name at least one, or None for all")
    if len(set(columns)) < len(columns):
        raise UsageError("columns", f"duplicate name in {', '.join(columns)}")
    try:
        found = _choose_rows(data, chosen, seed, counts)
        weights = RowWeights(found, chosen.weights, chosen.balance, counts) if chosen.has_weights else None
    except UsageError as error:
        for clash in data.index.clashes:
            if any(name in str(error) for name in (clash.column, *clash.names)):
                raise _clash_of(data, clash) from error
        raise
    if sequence is not None:
        for name in sequence.columns_at or ():
            if name not in columns:
                raise UsageError("sequence", f"columns_at names {name!r}, which is not among the columns")
        found = sequences_of(found, sequence, counts)
        if chosen.exclude is not None:
            found = _some(without(found, excluded(data, chosen.exclude), counts), "exclude")
    plan = ReadPlan(data=data, columns=tuple(columns), selection=found, sequence=sequence, weights=weights)
    if ragged is not None and not isinstance(pack, Pack):
        plan = plan.with_dense_lists([*ragged, *(pack.columns if pack else ())])
    return plan if pack is None else _packed(plan, pack, counts)


def _packed(plan: ReadPlan, pack: Pack | TokenBatches, known: Counts | None) -> ReadPlan:
    """The plan with its rows packed; its ``counts`` are sequences, or batches."""
    check_columns(pack, plan.data.index.schema, plan.data.index.partitions.column_names)
    name = digest_of([plan.fingerprint, pack.fingerprint])
    found = found_once(plan.data, name, plan.row_groups, known, lambda: _count(plan, pack))
    counts, tokens = (np.array(found[of].to_numpy(), np.int64) for of in ("packed", "tokens"))
    some = counts > 0
    if not some.any():
        warnings.warn(f"{plan.data.root}: no document has a token, so there are no batches", stacklevel=2)
    places = []
    if "places" in found.column_names:
        places = [found["places"][number].values.to_numpy() for number in np.flatnonzero(some).tolist()]
    packs = Packs(spec=pack, counts=counts[some], tokens=int(tokens.sum()), places=places)
    return replace(plan, selection=plan.selection.of(some), packs=packs)


def document_lengths(plan: ReadPlan, column: str, group: int, chosen: Chosen) -> Ints:
    """The length in tokens of each document read from a row group."""
    kind, path = plan.kinds[column], plan.data.path_of(group)
    kind = kind if kind.held == "fixed" else replace(kind, held="array")
    lengths = [np.zeros(0, np.int64)]
    for _, rows, part in chosen:
        documents = pa.nulls(len(rows), kind.type)
        if column in part.column_names:
            documents = part[column].take(pa.array(rows)).combine_chunks()
        lengths.append(items_of(hold(documents, kind), column, path)[0])
    return np.concatenate(lengths)


def _count(plan: ReadPlan, pack: Pack | TokenBatches) -> pa.Table:
    """Sequences (or batches) and tokens per row group, from the lengths of its documents."""

    def count(group: int, chosen: Chosen) -> list[Any]:
        return list(np.unique(document_lengths(plan, pack.column, group, chosen), return_counts=True))

    log.debug("%s: the documents of column %r are counted", plan.data.root, pack.column)
    name, kinds = digest_of(["lengths", plan.fingerprint, pack.column]), {"tokens": pa.int64(), "documents": pa.int64()}
    found = plan.selection.looking_at([pack.column]).count_by_group(name, kinds, count, None)
    groups, lengths, documents = (found[of].to_numpy() for of in ("group", "tokens", "documents"))
    if isinstance(pack, TokenBatches) and (longest := int(lengths.max(initial=0))) > pack.tokens_per_batch:
        most = pack.tokens_per_batch
        number = int(documents[lengths > most].sum())
        reason = f"{number:,} documents have more than tokens_per_batch={most:,} tokens, the longest {longest:,}"
        raise UsageError(plan.data.root, reason, "give a larger number, or leave them out with filters=")
    packed, places = [], []
    bounds = np.searchsorted(groups, plan.row_groups), np.searchsorted(groups, plan.row_groups, "right")
    for low, high in zip(*bounds, strict=True):
        count_of, of_pieces = count_packs(pack, lengths[low:high], documents[low:high])
        packed.append(count_of)
        places.append(of_pieces)
    tokens = np.zeros(len(plan.row_groups), np.int64)
    np.add.at(tokens, np.searchsorted(plan.row_groups, groups), lengths * documents)
    counts = {"group": plan.row_groups, "packed": np.array(packed, np.int64), "tokens": tokens}
    if isinstance(pack, Pack) and pack.strategy == "best_fit":
        counts["places"] = pa.array(places, pa.large_list(pa.int32()))
    return pa.table(counts)


def _clash_of(data: LocalDataset, clash: TypeClash) -> PqcacheError:
    others = data.index.schema.names
    advice = f", or leave the column out with columns={others[:8]}" if others else ""
    return TypeClash(clash.subject, clash.reason, clash.advice + advice).within(data.root)


def unknown_column(data: LocalDataset, name: str) -> PqcacheError:
    """The error for a column that cannot be read, with advice if it is a field of a struct."""
    names = data.index.schema.names
    for clash in data.index.clashes:
        if name in (clash.column, *clash.names):
            return _clash_of(data, clash)
    if (top := max((n for n in names if name.startswith(f"{n}.")), key=len, default=None)) is not None:
        return UsageError(data.root, f"no column {name!r}", f"fields are not read by themselves: take {top!r}")
    return no_column(data.root, name, names)


def _choose_rows(data: LocalDataset, chosen: RowOptions, seed: int, known: Counts | None) -> Selection:
    """The rows of an epoch before weights; warns if there are none.

    ``known`` are counts of rows; new counts are added to it. Invalid options raise UsageError.
    """
    found, rows, filters = Selection.of_all(data), chosen.rows, chosen.filters
    if chosen.since is not None:
        found = _some(rows_since(found, base_of(data, chosen.since), known), "since")
    if rows is not None:
        found = _among(found, rows)
    if filters is not None:
        found = filter_rows(found, filters, known)
    if rows is not None or filters is not None:
        what = "filters" if rows is None else "rows" if filters is None else "filters and rows"
        found = _some(found, what)
    if chosen.exclude is not None and chosen.sequence is None:
        found = _some(without(found, excluded(data, chosen.exclude), known), "exclude")
    if chosen.split is not None:
        found = _some(split_rows(found, chosen.split, known), "split")
    if chosen.sample is not None:
        found = _sample(found, chosen.sample, seed)
    if chosen.limit is not None:
        found = _first_of(found, _first_rows(found.counts, chosen.limit), None)
    return found


def _some(found: Selection, option: str) -> Selection:
    if len(found.counts) and not found.counts.any():
        warnings.warn(f"{found.data.root}: no row is left by {option}, so there are no batches", stacklevel=2)
    return found.without_empty()


def _among(found: Selection, rows: SelectedRows) -> Selection:
    if not isinstance(rows, SelectedRows):
        raise UsageError(f"rows={rows!r}", "give SelectedRows, as returned by Cache.lookup")
    data = found.data
    if rows.snapshot and rows.snapshot != data.snapshot:
        raise UsageError(
            "rows", f"they were looked up in {rows.snapshot}, and {data.root} is {data.snapshot}", "look them up again"
        )
    rows.check(data.index.rows)

    def test(group: int, first: int, part: pa.Table) -> Bools:
        passes = np.zeros(part.num_rows, np.bool_)
        low, high = np.searchsorted(positions := rows.positions(group), [first, first + part.num_rows])
        passes[positions[low:high] - first] = True
        return passes

    counts = np.zeros(len(data.index), np.int64)
    counts[rows.groups] = rows.counts
    return replace(found.testing(test, rows.fingerprint), counts=counts[found.row_groups])


def _sample(found: Selection, share: float, seed: int) -> Selection:
    """A random share of the rows: whole row groups, or random rows of 16 row groups if the share has fewer."""
    rows = found.counts
    wanted = max(1, round(share * int(rows.sum()))) if rows.sum() else 0
    order = permutation(len(rows), seed, 0, _SAMPLE, 1)
    complete, few = _first_rows(rows[order], wanted), min(_FEWEST, len(rows))
    if np.count_nonzero(complete) < few:
        ends = np.cumsum(rows[order][:few])
        complete = np.zeros(len(rows), np.int64)
        complete[:few] = np.diff(ends * wanted // int(ends[-1]), prepend=0) if wanted <= ends[-1] else rows[order][:few]
    counts = np.zeros(len(rows), np.int64)
    counts[order] = complete
    return _first_of(found, counts, seed)


def _first_rows(counts: Ints, most: int) -> Ints:
    """How many of the first ``most`` rows are in each row group."""
    return np.asarray(np.clip(most - (np.cumsum(counts) - counts), 0, counts), np.int64)


def _first_of(found: Selection, counts: Ints, seed: int | None) -> Selection:
    """The first ``counts`` rows of each row group; random ones with a seed."""
    groups, among, earlier = found.row_groups, found.counts, found.pick

    def pick(group: int) -> Ints:
        number = np.searchsorted(groups, group)
        count, rows = int(counts[number]), int(among[number])
        picked = np.arange(rows) if earlier is None else earlier(group)
        if seed is None or count == rows:
            return picked[:count]
        return picked[np.sort(permutation(rows, seed, 0, _SAMPLE, 0, group)[:count])]

    name = digest_of(["part", found.name or None, seed], groups, counts)
    return replace(found, counts=counts, pick=pick, name=name).without_empty()
