"""Which tokens of which documents make up each packed sequence of a row group: arithmetic on the documents' lengths."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from pqcache.reader.order.epoch_order import Ints, permutation
from pqcache.reader.packing.best_fit import best_fit
from pqcache.reader.packing.pack import Pack
from pqcache.reader.stored_numbers import SmallInts, StoredNumbers

DOCUMENTS = 16  # what a random stream is for, after those of the order


class Pieces(NamedTuple):
    """Parts of documents, sequence after sequence: ``tokens`` from ``start`` on, of all tokens of the row group.

    ``sequence`` is where each part belongs, counted from 0; each sequence has one part or more.
    """

    start: Ints
    tokens: Ints
    sequence: Ints


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedRows:
    """The documents of some row groups, packed.

    ``row_groups`` rows of the index
    ``lengths``    of all documents
    ``first``      where those of each row group begin in ``lengths``, and ``documents`` how many there are
    ``order``      for "best_fit", the pieces of all documents (see `_pieces_of`) in the order of the sequences; one
                   that begins a sequence is counted from -1 downwards. ``first_piece`` is where those of each row
                   group begin, and ``pieces`` how many there are.
    ``sequences``  of each row group
    ``shuffle``    seed and epoch of the order of documents; None: in the order of the files
    """

    spec: Pack
    row_groups: Ints
    lengths: StoredNumbers
    first: Ints
    documents: Ints
    sequences: Ints
    order: StoredNumbers | None = None
    first_piece: Ints | None = None
    pieces: Ints | None = None
    shuffle: tuple[int, int] | None = None

    @cached_property
    def fingerprint(self) -> str:
        """A name for what the sequences hold."""
        return hashlib.blake2b(self.sequences.tobytes() + self.spec.fingerprint.encode(), digest_size=16).hexdigest()

    @cached_property
    def tokens(self) -> int:
        """The number of tokens of an epoch."""
        return int(count_tokens(self.lengths.values, self.first, self.documents).sum())

    @property
    def fill(self) -> float:
        """The share of the places in sequences that hold tokens."""
        return self.tokens / max(1, int(self.sequences.sum()) * self.spec.length)

    def lengths_of(self, number: int) -> Ints:
        """Return the lengths of the documents of a row group."""
        first = int(self.first[number])
        return self.lengths.values[first : first + int(self.documents[number])].astype(np.int64)

    def read(self, number: int, item: int, low: int, high: int) -> Pieces:
        """Return the parts of sequences ``low`` to ``high`` of a row group, which is ``item`` of the index."""
        lengths = self.lengths_of(number)
        if self.spec.strategy == "concat":
            return _cut(lengths, self._documents_in_order(len(lengths), item), self.spec.length, low, high)
        order, sequence = self._order_of(number)
        start, count = _pieces_of(lengths, self.spec.length)
        if self.shuffle is not None:
            order = _exchanged(order, count, permutation(len(order), *self.shuffle, DOCUMENTS, 0, item))
        wanted = slice(*np.searchsorted(sequence, (low, high)).tolist())
        order = order[wanted]
        return Pieces(start[order], count[order], sequence[wanted] - low)

    def _documents_in_order(self, count: int, item: int) -> Ints:
        if self.shuffle is None:
            return np.arange(count)
        return permutation(count, *self.shuffle, DOCUMENTS, 0, item)

    def _order_of(self, number: int) -> tuple[Ints, Ints]:
        """Return the pieces of a row group in order, and the sequence of each."""
        assert self.order is not None
        assert self.first_piece is not None
        assert self.pieces is not None
        first = int(self.first_piece[number])
        marked = self.order.values[first : first + int(self.pieces[number])].astype(np.int64)
        return np.where(marked < 0, -1 - marked, marked), np.cumsum(marked < 0) - 1


def count_tokens(lengths: SmallInts, first: Ints, documents: Ints) -> Ints:
    """Return the tokens of the documents of each row group."""
    groups = zip(first.tolist(), documents.tolist(), strict=True)
    return np.array([int(lengths[begin : begin + count].sum(dtype=np.int64)) for begin, count in groups], np.int64)


def best_fit_order(lengths: Ints, length: int) -> Ints:
    """Return the pieces of a row group's documents in the order of the sequences, marked as in ``PackedRows.order``."""
    _, count = _pieces_of(lengths, length)
    sequence = best_fit(count, length)
    order = np.argsort(sequence, kind="stable")
    begins = np.diff(sequence[order], prepend=-1) > 0
    return np.where(begins, -1 - order, order)


def _pieces_of(lengths: Ints, length: int) -> tuple[Ints, Ints]:
    """Return documents in pieces of at most ``length`` tokens: where they start, and their tokens.

    A document without tokens has no piece.
    """
    pieces = -(-lengths // length)
    within = np.arange(int(pieces.sum())) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    start = np.repeat(np.cumsum(lengths) - lengths, pieces) + within * length
    return start, np.minimum(np.repeat(lengths, pieces) - within * length, length)


def _cut(lengths: Ints, order: Ints, length: int, low: int, high: int) -> Pieces:
    """Return sequences ``low`` to ``high`` of documents that are laid end to end in ``order``."""
    starts, lengths = (np.cumsum(lengths) - lengths)[order], lengths[order]
    ends = np.cumsum(lengths)
    wanted = slice(np.searchsorted(ends, low * length, "right"), np.searchsorted(ends - lengths, high * length))
    starts, begins, ends = starts[wanted], (ends - lengths)[wanted], ends[wanted]
    first = np.maximum(begins // length, low)
    pieces = np.where(ends > begins, np.minimum(-(-ends // length), high) - first, 0)
    document = np.repeat(np.arange(len(pieces)), pieces)
    sequence = first[document] + np.arange(len(document)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    begin = np.maximum(begins[document], sequence * length)
    tokens = np.minimum(ends[document], (sequence + 1) * length) - begin
    return Pieces(starts[document] + begin - begins[document], tokens, sequence - low)


def _exchanged(order: Ints, count: Ints, keys: Ints) -> Ints:
    """Return an order of pieces with those of equal length exchanged at random."""
    pieces = len(order)  # numbers below it are added so that no two are equal, as such are sorted fastest
    found = np.empty_like(order)
    found[np.argsort(count[order] * pieces + np.arange(pieces))] = np.argsort(count * pieces + keys)
    return found
