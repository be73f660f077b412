"""Best-fit decreasing: pieces of different lengths into as few sequences of one length as it finds."""

from __future__ import annotations

import numpy as np

from pqcache.reader.order.epoch_order import Ints


def best_fit(lengths: Ints, capacity: int) -> Ints:
    """Return the sequence of each piece, of which none is longer than ``capacity`` or shorter than 1.

    The longest comes first, and each goes to the fullest sequence that can take it. All pieces of one length are
    placed together. Sequences are numbered by their first piece, so that they come in the order of the documents.
    """
    found = np.empty(len(lengths), np.int64)
    order = np.argsort(-lengths, kind="stable")
    starts = np.flatnonzero(np.diff(lengths[order], prepend=-1))
    by_left: list[list[int]] = [[] for _ in range(capacity + 1)]  # sequences by what is left in them
    any_left = 0  # bit r is set where by_left[r] has any
    sequences = 0
    for pieces, length in zip(np.split(order, starts[1:]), lengths[order[starts]].tolist(), strict=False):
        done = 0
        while done < len(pieces):
            above = any_left >> length
            if above:
                left = length + (above & -above).bit_length() - 1
                each = left // length
                used = min(len(by_left[left]), -(-(len(pieces) - done) // each))
                taken = by_left[left][-used:]
                del by_left[left][-used:]
                if not by_left[left]:
                    any_left ^= 1 << left
            else:
                left, each = capacity, capacity // length
                used = -(-(len(pieces) - done) // each)
                taken = list(range(sequences, sequences + used))
                sequences += used
            count = min(len(pieces) - done, used * each)
            found[pieces[done : done + count]] = np.repeat(taken, each)[:count]
            done += count
            last = count - (used - 1) * each  # in the last of these sequences
            for rest, some in ((left - each * length, taken[:-1]), (left - last * length, taken[-1:])):
                if rest and some:
                    by_left[rest] += some
                    any_left |= 1 << rest
    return _numbered(found, sequences)


def _numbered(found: Ints, sequences: int) -> Ints:
    """Return the sequences numbered in the order of their first pieces."""
    first = np.full(sequences, len(found), np.int64)
    np.minimum.at(first, found, np.arange(len(found)))
    number = np.empty(sequences, np.int64)
    number[np.argsort(first, kind="stable")] = np.arange(sequences)
    return number[found]
