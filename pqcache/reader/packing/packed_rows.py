"""What documents make: packed sequences, or batches by tokens. Arithmetic on their lengths."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pqcache.errors import ParquetError
from pqcache.reader.order.epoch_order import Ints, permutation
from pqcache.reader.packing.pack import Pack
from pqcache.reader.packing.token_batches import TokenBatches, batch_ends
from pqcache.reader.selection.selection import Positions
from pqcache.store.cache_directory import advice_for_file
from pqcache.store.selected_rows import ranges_of

DOCUMENTS = 16  # what a random stream is for, after those of the order


class Pieces(NamedTuple):
    """Parts of documents, sequence after sequence: ``tokens`` from ``start`` on, of all tokens of the row group.

    ``sequence`` is where each part belongs, counted from 0; each sequence has one part or more.
    """

    start: Ints
    tokens: Ints
    sequence: Ints

    @property
    def begins(self) -> Ints:
        """Offsets into the parts: sequence i has parts ``begins[i]`` to ``begins[i + 1]``."""
        return np.searchsorted(self.sequence, np.arange(int(self.sequence[-1]) + 2 if len(self.sequence) else 1))


@dataclass(frozen=True, kw_only=True, eq=False)
class Packs:
    """The packed sequences, or batches by tokens, that the documents of some row groups make.

    Attributes:
        counts: sequences, or batches, of each row group.
        tokens: of all documents.
        places: for "best_fit", the sequence of each piece of a document, the longest first, by row group.
        shuffle: seed and epoch of the order of documents; None: in the order of the files.
    """

    spec: Pack | TokenBatches
    counts: Ints
    tokens: int
    places: Sequence[npt.NDArray[np.int32]] = ()
    shuffle: tuple[int, int] | None = None

    @cached_property
    def fingerprint(self) -> str:
        """A name for what the sequences hold."""
        return hashlib.blake2b(self.counts.tobytes() + self.spec.fingerprint.encode(), digest_size=16).hexdigest()

    @property
    def fill(self) -> float:
        """The share of the places in sequences, or batches, that hold tokens."""
        most = self.spec.length if isinstance(self.spec, Pack) else self.spec.tokens_per_batch
        return self.tokens / max(1, int(self.counts.sum()) * most)

    def batches(self, number: int, lengths: Ints, item: int, path: Path) -> Positions:
        """The documents of each batch of row group ``number``, which is ``item`` of the index.

        Raises:
            ParquetError: documents have other lengths than were counted.
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
            ParquetError: documents have other lengths than were counted.
        """
        assert isinstance(self.spec, Pack)
        length = self.spec.length
        if self.spec.strategy == "concat":
            self._check(-(-int(lengths.sum()) // length) == self.counts[number], path)
            return _cut(lengths, self._order(len(lengths), item), length)
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
        return Pieces(start[order], count[order], sequence)

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
    """Count the sequences (or batches) that ``documents[i]`` documents of ``lengths[i]`` tokens make.

    Also returns their ``Packs.places``.
    """
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
    """Return documents in pieces of at most ``length`` tokens: where they start, and their tokens.

    A document without tokens has no piece.
    """
    pieces = -(-lengths // length)
    within = ranges_of(np.zeros_like(pieces), pieces)
    start = np.repeat(np.cumsum(lengths) - lengths, pieces) + within * length
    return start, np.minimum(np.repeat(lengths, pieces) - within * length, length)


def _cut(lengths: Ints, order: Ints, length: int) -> Pieces:
    """Return the sequences of documents that are laid end to end in ``order``."""
    starts, lengths = (np.cumsum(lengths) - lengths)[order], lengths[order]
    ends = np.cumsum(lengths)
    begins = ends - lengths
    first = begins // length
    pieces = np.where(ends > begins, -(-ends // length) - first, 0)
    document = np.repeat(np.arange(len(pieces)), pieces)
    sequence = ranges_of(first, pieces)
    begin = np.maximum(begins[document], sequence * length)
    tokens = np.minimum(ends[document], (sequence + 1) * length) - begin
    return Pieces(starts[document] + begin - begins[document], tokens, sequence)


def _exchanged(order: Ints, count: Ints, keys: Ints) -> Ints:
    """Return an order of pieces with those of equal length exchanged at random."""
    pieces = len(order)  # numbers below it are added so that no two are equal, as such are sorted fastest
    found = np.empty_like(order)
    found[np.argsort(count[order] * pieces + np.arange(pieces))] = np.argsort(count * pieces + keys)
    return found


def best_fit(lengths: Ints, capacity: int) -> Ints:
    """Assign each piece of 1 to ``capacity`` tokens to a sequence; pieces come longest first.

    Each goes to the fullest sequence with room for it. Pieces of one length are placed together. This takes longer than
    reading the pieces.
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
    """Return the sequences numbered in the order of their first pieces."""
    first = np.empty(int(found.max(initial=-1)) + 1, np.int64)
    first[found[::-1]] = np.arange(len(found))[::-1]  # the last one that is assigned stays
    number = np.empty_like(first)
    number[np.argsort(first, kind="stable")] = np.arange(len(first))
    return number[found]
