"""``pack=``: documents of different lengths as sequences of one length, or as batches by their tokens.

The parts of documents in a sequence follow from the documents' lengths. Parts are Arrow binary views of a row group's
tokens, and are copied once, into a batch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pqcache.errors import ParquetError, UsageError, no_column
from pqcache.parquet.dense import as_list
from pqcache.reader.columns import Column, Kind, number_dtype, storage_type, take_views, to_arrow, views_into
from pqcache.reader.order import Ints, permutation
from pqcache.reader.selection.selection import Positions, digest_of
from pqcache.store.cache_directory import advice_for_file
from pqcache.store.key_lookup import ranges_of
from pqcache.units import is_whole, parse_names

Strategy = Literal["concat", "best_fit"]
IDS = ("document_ids", "position_ids", "cu_seqlens")
POSITIONS = "position_ids"
_MOST_TOKENS = 1 << 24  # of a sequence
_MOST_BATCH = 1 << 30  # tokens of a batch
_PER_OCTAVE = 8  # buckets


@dataclass(frozen=True, kw_only=True)
class Pack:
    """Documents in sequences of one length: ``ParquetDataset(..., batch_size=8, pack=Pack("tokens", length=4096))``.

    A row is a document: a list of numbers. A batch holds ``batch_size`` sequences, as tensors (B, length). The
    documents of a sequence come from one row group. Every token comes exactly once per epoch, and every epoch has the
    same number of batches.

    ``column``     the list column with the tokens
    ``length``     tokens of a sequence
    ``strategy``   "concat": the documents of a row group, in another order each epoch, are laid end to end and cut.
                   "best_fit": a document is not cut, unless it is longer than ``length``: then it is cut into pieces of
                   ``length`` and a rest. In both, sequences that documents don't fill are padded: in "concat" that is
                   the end of the last sequence of a row group.
    ``fields``     other list columns, with a number for each token (labels, masks), that are packed alike
    ``padding``    the number that fills up a sequence, or one for each column: ``{"tokens": 0, "labels": -100}``
    ``ids``        what tells documents apart, int32: ``document_ids`` (B, length), from 1 on in each sequence, 0 where
                   it is padded; ``position_ids`` (B, length), from 0 on in each document; ``cu_seqlens``, where the
                   documents of the batch begin among its B x length tokens, padding counted as a document, and where
                   the last one ends. A part of a cut document counts as a document.

    Invalid numbers raise UsageError here, invalid names and types when it is used.
    """

    column: str = field(kw_only=False)
    length: int = field(kw_only=False)
    strategy: Strategy = "concat"
    fields: Sequence[str] = ()
    padding: float | Mapping[str, float] = 0
    ids: Sequence[str] = IDS

    def __post_init__(self) -> None:
        if not is_whole(self.length) or not 0 < self.length <= _MOST_TOKENS:
            raise UsageError("pack", f"length={self.length!r}: give a whole number from 1 to {_MOST_TOKENS:,}")
        object.__setattr__(self, "length", int(self.length))
        if self.strategy not in ("concat", "best_fit"):
            raise UsageError("pack", f"strategy={self.strategy!r}: choose 'concat' or 'best_fit'")
        for name in ("fields", "ids"):
            object.__setattr__(self, name, parse_names(name, getattr(self, name)))
        unknown = [name for name in self.ids if name not in IDS]
        if unknown:
            raise UsageError("pack", f"ids names {unknown[0]!r}: there are {', '.join(IDS)}")
        if len(set(self.columns)) < len(self.columns):
            raise UsageError("pack", f"duplicate column in {', '.join(self.columns)}")
        if clash := set(self.ids) & set(self.columns):
            raise UsageError("pack", f"{min(clash)!r} is a column and one of ids", "leave it out of ids=")
        if isinstance(self.padding, Mapping):
            for name in self.padding:
                if name not in self.columns:
                    raise UsageError("pack", f"padding names {name!r}: it is neither the column nor one of fields")

    @property
    def columns(self) -> tuple[str, ...]:
        """The packed columns."""
        return (self.column, *self.fields)

    def fill(self, column: str, dtype: np.dtype[Any]) -> Any:
        """The padding of a column; UsageError if ``dtype`` cannot represent it."""
        value = self.padding.get(column, 0) if isinstance(self.padding, Mapping) else self.padding
        try:
            number = np.asarray(value)
            fits = number.ndim == 0 and number.dtype.kind in "iufb"
            with np.errstate(all="ignore"):
                converted = number.astype(dtype) if fits else number
            if fits and (dtype.kind == "f" or converted == number):
                return converted
        except (TypeError, ValueError, OverflowError):
            pass
        raise UsageError(
            "pack", f"padding={value!r} is not a valid value for {column!r}, which is {dtype}", "give another one"
        )

    @property
    def id_columns(self) -> list[str]:
        """The columns that tell documents apart; ``cu_seqlens`` follows from ``position_ids``."""
        needed = {POSITIONS if name == "cu_seqlens" else name for name in self.ids}
        return [name for name in ("document_ids", POSITIONS) if name in needed]

    @property
    def fingerprint(self) -> str:
        """Identifies the packing in states."""
        return digest_of(["pack", self.column, self.length, self.strategy])


@dataclass(frozen=True, kw_only=True)
class TokenBatches:
    """Batches of documents by their tokens: ``pack=TokenBatches("tokens", tokens_per_batch=16_384)``.

    For models that take padded documents. Documents of a row group are put into buckets by length. A batch holds
    documents of one bucket, and leftovers of the next shorter ones, as long as rows x longest document is at most
    ``tokens_per_batch``. So batches differ in their number of rows. Every document comes exactly once per epoch, in
    different batches each epoch; every epoch has the same number of batches.

    ``column``            the list column with the tokens
    ``tokens_per_batch``  the most tokens of a batch, padding included
    ``buckets``           the longest document of each bucket; None: 8 for each doubling of the length
    ``most_rows``         the most rows of a batch; None: any

    Invalid numbers raise UsageError here, invalid names and types when it is used.
    """

    column: str = field(kw_only=False)
    tokens_per_batch: int
    buckets: Sequence[int] | None = None
    most_rows: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("tokens_per_batch", self.tokens_per_batch), ("most_rows", self.most_rows)):
            if (value is not None or name == "tokens_per_batch") and not _is_count(value):
                raise UsageError("pack", f"{name}={value!r}: give a whole number of at least 1")
        if self.buckets is not None:
            if isinstance(self.buckets, str) or not self.buckets or not all(map(_is_count, self.buckets)):
                raise UsageError("pack", f"buckets={self.buckets!r}: give lengths, like [128, 256, 512]")
            object.__setattr__(self, "buckets", tuple(sorted({int(bucket) for bucket in self.buckets})))

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns whose lengths are needed."""
        return (self.column,)

    @cached_property
    def bounds(self) -> Ints:
        """The longest document of each bucket; the last is ``tokens_per_batch``."""
        most = int(self.tokens_per_batch)
        if self.buckets is None:
            exponents = np.arange(int(np.ceil(np.log2(most))) * _PER_OCTAVE + 1)
            found = np.floor(2 ** (exponents / _PER_OCTAVE) + 1e-9).astype(np.int64)
        else:
            found = np.array(self.buckets, np.int64)
        return np.unique(np.append(found[found < most], most))

    @cached_property
    def rows(self) -> Ints:
        """Rows of a full batch of each bucket."""
        return np.minimum(self.tokens_per_batch // self.bounds, self.most_rows or _MOST_BATCH)

    @property
    def fingerprint(self) -> str:
        """Identifies the batching in states."""
        return digest_of(["batches", self.column, self.bounds.tolist(), self.rows.tolist()])


def _is_count(value: Any) -> bool:
    return is_whole(value) and 0 < value <= _MOST_BATCH


def check_pack(pack: Any, *, columns: Sequence[str] | None, has_sequence: bool, has_weights: bool) -> None:
    """Raise UsageError for an invalid ``pack``, or options that it excludes."""
    if not isinstance(pack, Pack | TokenBatches):
        raise UsageError(f"pack={pack!r}", "give a Pack, like Pack('tokens', length=4096), or TokenBatches")
    if has_sequence:
        raise UsageError("sequence and pack", "both combine several rows", "choose one of them")
    if has_weights:
        reason = "packing uses each document once per epoch"
        raise UsageError("weights and pack", reason, "mix packed datasets with Mix(..., weights=...) instead")
    if columns is None:
        return
    if isinstance(pack, TokenBatches):
        if pack.column not in columns:
            raise UsageError("pack", f"{pack.column!r} is not among the columns")
    elif sorted(columns) != sorted(pack.columns):
        raise UsageError(
            "columns",
            f"with pack= they are {', '.join(pack.columns)}",
            "leave columns= out, and name columns with a number for each token in fields= of the pack",
        )


DOCUMENTS = 16  # what a random stream is for, after those of the order
PADDING = -1  # in place of where a piece starts


class Pieces(NamedTuple):
    """Parts of documents, followed by padding, that form the sequences of a row group.

    Sequence i has pieces ``begins[i]`` to ``begins[i + 1]``. A piece is ``tokens`` tokens of the row group from
    ``start`` on, or that much padding.
    """

    start: Ints
    tokens: Ints
    begins: Ints

    @staticmethod
    def of(start: Ints, tokens: Ints, sequence: Ints, length: int) -> Pieces:
        """Pad sequences to ``length`` tokens; ``sequence`` is the sequence of each part of a document, ascending."""
        pads = length - np.bincount(sequence, tokens).astype(np.int64)
        short = np.flatnonzero(pads)
        behind = np.searchsorted(sequence, short, "right")
        sequence = np.insert(sequence, behind, short)
        begins = np.searchsorted(sequence, np.arange(len(pads) + 1))
        return Pieces(np.insert(start, behind, PADDING), np.insert(tokens, behind, pads[short]), begins)

    def documents(self, lengths: Ints) -> Positions:
        """The document of each piece, without padding, grouped by sequence."""
        documents = np.searchsorted(np.cumsum(lengths), self.start, "right")
        is_padded = self.start[self.begins[1:] - 1] == PADDING
        return Positions(documents, self.begins[:-1], np.diff(self.begins) - is_padded)


@dataclass(frozen=True, kw_only=True, eq=False)
class Packs:
    """The packed sequences, or batches by tokens, made from the documents of some row groups.

    Attributes:
        counts: sequences, or batches, of each row group.
        tokens: the tokens of all documents.
        places: for "best_fit", the sequence of each piece of a document, the longest first, by row group.
        shuffle: seed and epoch of the order of documents; None for file order.
    """

    spec: Pack | TokenBatches
    counts: Ints
    tokens: int
    places: Sequence[npt.NDArray[np.int32]] = ()
    shuffle: tuple[int, int] | None = None

    @cached_property
    def fingerprint(self) -> str:
        return hashlib.blake2b(self.counts.tobytes() + self.spec.fingerprint.encode(), digest_size=16).hexdigest()

    @property
    def fill(self) -> float:
        """The share of sequences or batches filled with tokens, not padding."""
        most = self.spec.length if isinstance(self.spec, Pack) else self.spec.tokens_per_batch
        return self.tokens / max(1, int(self.counts.sum()) * most)

    def batches(self, number: int, lengths: Ints, item: int, path: Path) -> Positions:
        """The documents of each batch of row group ``number``, which is ``item`` of the index.

        Raises:
            ParquetError: documents differ in length from the earlier count.
        """
        assert isinstance(self.spec, TokenBatches)
        order = self._order(len(lengths), item)
        order = order[np.argsort(np.searchsorted(self.spec.bounds, lengths[order]), kind="stable")]
        ends = batch_ends(lengths, self.spec)
        self._check(len(ends) - 1 == self.counts[number], path)
        return Positions(order, ends[:-1], np.diff(ends))

    def pieces(self, number: int, lengths: Ints, item: int, path: Path) -> Pieces:
        """The parts of the sequences of row group ``number``, which is ``item`` of the index.

        Raises:
            ParquetError: documents differ in length from the earlier count.
        """
        assert isinstance(self.spec, Pack)
        length = self.spec.length
        if self.spec.strategy == "concat":
            self._check(-(-int(lengths.sum()) // length) == self.counts[number], path)
            return Pieces.of(*_cut(lengths, self._order(len(lengths), item), length), length)
        start, count = _pieces_of(lengths, length)
        longest, places = np.argsort(-count, kind="stable"), self.places[number].astype(np.int64)
        self._check(len(places) == len(longest), path)
        sequence = np.empty_like(longest)
        sequence[longest] = places
        self._check(int(np.bincount(sequence, count).max(initial=0)) <= length, path)
        sequence = _numbered(sequence)
        order = np.argsort(sequence, kind="stable")
        sequence = sequence[order]
        if self.shuffle is not None:
            order = _exchanged(order, count, self._order(len(order), item))
        return Pieces.of(start[order], count[order], sequence, length)

    def _check(self, is_as_counted: bool, path: Path) -> None:
        if not is_as_counted:
            advice = advice_for_file(path, "the file was replaced or is damaged: open the dataset again")
            reason = f"column {self.spec.column!r} has documents of other lengths than were counted"
            raise ParquetError(path, reason, advice)

    def _order(self, count: int, item: int) -> Ints:
        if self.shuffle is None:
            return np.arange(count)
        return permutation(count, *self.shuffle, DOCUMENTS, 0, item)


def count_packs(spec: Pack | TokenBatches, lengths: Ints, documents: Ints) -> tuple[int, npt.NDArray[np.int32]]:
    """Sequences (or batches) of ``documents[i]`` documents of ``lengths[i]`` tokens, and their ``Packs.places``."""
    none = np.zeros(0, np.int32)
    if isinstance(spec, TokenBatches):
        return len(batch_ends(np.repeat(lengths, documents), spec)) - 1, none
    if spec.strategy == "concat":
        return -(-int((lengths * documents).sum()) // spec.length), none
    rests = np.repeat(lengths % spec.length, documents)
    places = best_fit(-np.sort(-rests[rests > 0]), spec.length)
    full = int((lengths // spec.length * documents).sum())  # pieces that fill a sequence
    places = np.concatenate([np.arange(full), full + places])
    return int(places.max(initial=-1)) + 1, places.astype(np.int32)


def _pieces_of(lengths: Ints, length: int) -> tuple[Ints, Ints]:
    """Cut documents into pieces of at most ``length`` tokens: their starts and tokens. Empty ones have none."""
    pieces = -(-lengths // length)
    within = ranges_of(np.zeros_like(pieces), pieces)
    start = np.repeat(np.cumsum(lengths) - lengths, pieces) + within * length
    return start, np.minimum(np.repeat(lengths, pieces) - within * length, length)


def _cut(lengths: Ints, order: Ints, length: int) -> tuple[Ints, Ints, Ints]:
    """Cut documents laid end to end in ``order``; return each part's start, tokens and sequence."""
    starts, lengths = (np.cumsum(lengths) - lengths)[order], lengths[order]
    ends = np.cumsum(lengths)
    begins = ends - lengths
    first = begins // length
    pieces = np.where(ends > begins, -(-ends // length) - first, 0)
    document = np.repeat(np.arange(len(pieces)), pieces)
    sequence = ranges_of(first, pieces)
    begin = np.maximum(begins[document], sequence * length)
    tokens = np.minimum(ends[document], (sequence + 1) * length) - begin
    return starts[document] + begin - begins[document], tokens, sequence


def _exchanged(order: Ints, count: Ints, keys: Ints) -> Ints:
    """Swap pieces of equal length at random."""
    pieces = len(order)  # numbers below it are added so that no two are equal, as such are sorted fastest
    found = np.empty_like(order)
    found[np.argsort(count[order] * pieces + np.arange(pieces))] = np.argsort(count * pieces + keys)
    return found


def batch_ends(lengths: Ints, spec: TokenBatches) -> Ints:
    """The start of each batch, and the end of the last, among documents sorted by bucket.

    The rest of a bucket joins the next longer documents if that saves a batch. Only the number of documents in each
    bucket matters.
    """
    counts = np.bincount(np.searchsorted(spec.bounds, lengths), minlength=len(spec.bounds))
    ends, done, there = [np.zeros(1, np.int64)], 0, 0
    for bucket in np.flatnonzero(counts).tolist():
        rows = int(spec.rows[bucket])
        if there - done >= rows:  # with the longer documents they would make more batches than by themselves
            ends.append(np.array([there]))
            done = there
        there += int(counts[bucket])
        full = (there - done) // rows
        ends.append(done + rows * np.arange(1, full + 1))
        done += rows * full
    if done < there:
        ends.append(np.array([there]))
    return np.concatenate(ends)


def best_fit(lengths: Ints, capacity: int) -> Ints:
    """Assign each piece of 1 to ``capacity`` tokens to a sequence; pieces come longest first.

    Each goes to the fullest sequence with enough space. Pieces of one length are placed together. This takes longer
    than reading the pieces.
    """
    found = np.empty(len(lengths), np.int64)
    starts = np.flatnonzero(np.diff(lengths, prepend=-1))
    ends = np.append(starts[1:], len(lengths))[: len(starts)]
    by_left: dict[int, list[int]] = {}  # sequences by what is left in them
    any_left = 0  # bit r is set where by_left[r] has any
    sequences = 0
    for begin, end, length in zip(starts.tolist(), ends.tolist(), lengths[starts].tolist(), strict=True):
        while begin < end:
            above = any_left >> length
            if above:
                left = length + (above & -above).bit_length() - 1
                each = left // length
                used = min(len(by_left[left]), -(-(end - begin) // each))
                taken = by_left[left][-used:]
                del by_left[left][-used:]
                if not by_left[left]:
                    any_left ^= 1 << left
            else:
                left, each = capacity, capacity // length
                used = -(-(end - begin) // each)
                taken = list(range(sequences, sequences + used))
                sequences += used
            count = min(end - begin, used * each)
            found[begin : begin + count] = np.repeat(taken, each)[:count]
            begin += count
            last = count - (used - 1) * each  # in the last of these sequences
            for rest, some in ((left - each * length, taken[:-1]), (left - last * length, taken[-1:])):
                if rest and some:
                    by_left.setdefault(rest, []).extend(some)
                    any_left |= 1 << rest
    return found


def _numbered(found: Ints) -> Ints:
    """Number sequences in the order of their first pieces."""
    first = np.empty(int(found.max(initial=-1)) + 1, np.int64)
    first[found[::-1]] = np.arange(len(found))[::-1]  # the last one that is assigned stays
    number = np.empty_like(first)
    number[np.argsort(first, kind="stable")] = np.arange(len(first))
    return number[found]


def _item_type(kind: pa.DataType) -> np.dtype[Any] | None:
    """The numpy type of a list's items, if they are numbers."""
    bare = storage_type(kind)
    if not (pa.types.is_list(bare) or pa.types.is_large_list(bare) or pa.types.is_fixed_size_list(bare)):
        return None
    item: np.dtype[Any] | None = number_dtype(bare.value_type)
    return None if pa.types.is_boolean(bare.value_type) else item


def check_columns(pack: Pack | TokenBatches, schema: pa.Schema, partitions: Sequence[str]) -> None:
    for name in pack.columns:
        if name not in schema.names or name in partitions:
            raise no_column("pack", name, schema.names)
        kind = as_list(schema.field(name)).type
        dtype = _item_type(kind)
        if dtype is None:
            raise UsageError("pack", f"{name!r} is {kind}", "name columns of lists of numbers")
        if isinstance(pack, Pack):
            pack.fill(name, dtype)


def items_of(column: Column, name: str, where: object) -> tuple[Ints, npt.NDArray[Any]]:
    """The number of tokens of each document, and all tokens end to end.

    Raises:
        ParquetError: a document is null, or contains a null.
    """
    array = to_arrow(column)
    array = array.storage if isinstance(array, pa.ExtensionArray) else array
    if nulls := array.null_count:
        reason = f"column {name!r} has documents that are null ({nulls} in one row group), which are not packed"
        raise ParquetError(where, reason, f'leave them out with filters="{name} is not null", or write them empty')
    items = array.flatten()
    if items.null_count:
        raise ParquetError(where, f"column {name!r} has nulls inside its lists", "write them as numbers")
    if pa.types.is_fixed_size_list(array.type):
        lengths = np.full(len(array), array.type.list_size, np.int64)
    else:
        lengths = np.diff(array.offsets.to_numpy()).astype(np.int64)
    dtype: np.dtype[Any] = number_dtype(storage_type(items.type))
    return lengths, np.frombuffer(items.buffers()[1] or b"", dtype, len(items), items.offset * dtype.itemsize)


def tokens_of(
    spec: Pack | TokenBatches, columns: Mapping[str, Column], path: Path
) -> tuple[Ints, dict[str, npt.NDArray[Any]]]:
    """The lengths of documents, and the tokens of each packed column, end to end.

    Raises:
        ParquetError: a document is null, contains a null, or has another number of tokens in one of ``fields``.
    """
    lengths, tokens = items_of(columns[spec.column], spec.column, path)
    found = {spec.column: tokens}
    for name in spec.columns[1:]:
        others, found[name] = items_of(columns[name], name, path)
        if not np.array_equal(others, lengths):
            row = int(np.flatnonzero(others != lengths)[0])
            reason = f"a row has {lengths[row]} items in {spec.column!r} and {others[row]} in {name!r}"
            raise ParquetError(path, reason, f"write one item for each token, or leave {name!r} out of fields=")
    return lengths, found


class HeldSequences:
    """Packed sequences of a row group, in the ``order`` in which a lane takes them, from number ``first`` on."""

    def __init__(
        self, file: int, spec: Pack, items: Mapping[str, npt.NDArray[Any]], pieces: Pieces, order: Ints, first: int
    ) -> None:
        self.file, self._spec, self._first = file, spec, first
        counts = np.diff(pieces.begins)[order]
        wanted = ranges_of(pieces.begins[order], counts)
        self._ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
        self._tokens, self._is_padding = pieces.tokens[wanted], pieces.start[wanted] == PADDING
        self._columns = {name: (values, _views(values, pieces.start, wanted)) for name, values in items.items()}

    def slices(self, low: int, high: int) -> list[list[Column]]:
        """Sequences ``low`` up to ``high``: the packed columns, then the ``ids`` of the pack."""
        spec, ends = self._spec, self._ends[low - self._first : high - self._first + 1]
        some = slice(int(ends[0]), int(ends[-1]))
        tokens, is_padding = self._tokens[some], self._is_padding[some]
        found = []
        for name, (items, views) in self._columns.items():
            values = _joined(views[some], np.where(is_padding, tokens, 0), items.dtype, spec.fill(name, items.dtype))
            found.append(Column(packed_kind(values.dtype, spec.length), values.reshape(-1, spec.length)))
        for name in spec.id_columns:
            if name == POSITIONS:
                ids = ranges_of(np.zeros_like(tokens), tokens)
            else:
                counts = np.diff(ends)
                ids = np.repeat(np.where(is_padding, 0, ranges_of(np.ones_like(counts), counts)), tokens)
            values = ids.astype(np.int32).reshape(-1, spec.length)
            found.append(Column(packed_kind(values.dtype, spec.length), values))
        return [found]


def packed_kind(dtype: np.dtype[Any], length: int) -> Kind:
    kind = pa.list_(pa.from_numpy_dtype(dtype), length)
    return Kind(kind, kind, "fixed")


def _views(items: npt.NDArray[Any], starts: Ints, wanted: Ints) -> pa.Array:
    """Views of the ``wanted`` pieces of ``items``. Each ends where the next one starts; views of padding are empty."""
    by_start = np.argsort(starts)
    number = np.empty_like(by_start)
    number[by_start] = np.arange(len(number))
    ends = np.append(np.maximum(starts[by_start], 0), len(items)) * items.itemsize
    return take_views(views_into(ends, pa.py_buffer(items)), number[wanted])


def _joined(views: pa.Array, pads: Ints, dtype: np.dtype[Any], fill: Any) -> npt.NDArray[Any]:
    """Join pieces; if ``pads[i]`` isn't 0, piece i is replaced by that many ``fill`` values."""
    padding = np.flatnonzero(pads)
    if len(padding):
        ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(pads[padding])])
        fills = views_into(ends * dtype.itemsize, pa.py_buffer(np.full(int(ends[-1]), fill, dtype)))
        order = np.arange(len(pads))
        order[padding] = len(pads) + np.arange(len(padding))
        views = take_views(pa.concat_arrays([views, fills]), order)
    data = views.cast(pa.large_binary()).buffers()[2]
    return np.frombuffer(b"" if data is None else data, dtype)
