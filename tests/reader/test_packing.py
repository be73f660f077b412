"""Packing as arithmetic: best-fit against a plain one, and sequences cut of documents against lists of tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pqcache.reader.packing import PADDING, Pack, Packs, best_fit, count_packs
from tests.examples import examples

LENGTHS = st.lists(st.integers(0, 40), max_size=60)


def plain_best_fit(lengths: list[int], capacity: int) -> list[int]:
    """Return what is left in each sequence, as a loop over pieces does it."""
    left: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [rest for rest in left if rest >= length]
        if fitting:
            left.remove(min(fitting))
            left.append(min(fitting) - length)
        else:
            left.append(capacity - length)
    return sorted(left)


@settings(max_examples=examples(300), deadline=None)
@given(st.data(), st.integers(1, 50))
def test_best_fit_fills_as_a_loop_over_pieces_does(data: st.DataObject, capacity: int) -> None:
    lengths = sorted(data.draw(st.lists(st.integers(1, capacity), max_size=80)), reverse=True)
    found = best_fit(np.array(lengths, np.int64), capacity)
    used = np.bincount(found, lengths, max(found, default=-1) + 1)
    assert sorted((capacity - used).tolist()) == plain_best_fit(lengths, capacity)


def packs_of(lengths: list[int], length: int, strategy: str, shuffle: tuple[int, int] | None) -> Packs:
    spec = Pack("tokens", length, strategy=strategy)  # type: ignore[arg-type]
    found = np.unique(np.array(lengths, np.int64), return_counts=True)
    count, places = count_packs(spec, *found)
    return Packs(spec=spec, counts=np.array([count]), tokens=sum(lengths), places=[places], shuffle=shuffle)


def sequences_of(packs: Packs, lengths: list[int]) -> list[list[list[tuple[int, int]]]]:
    """Return sequences as lists of pieces, and these as lists of tokens: (document, place in it)."""
    tokens = [(document, place) for document, length in enumerate(lengths) for place in range(length)]
    found: list[list[list[tuple[int, int]]]] = [[] for _ in range(int(packs.counts[0]))]
    pieces = packs.pieces(0, np.array(lengths, np.int64), 7, Path("a.parquet"))
    assert len(pieces.begins) - 1 == len(found)
    for number in range(len(found)):
        some = slice(pieces.begins[number], pieces.begins[number + 1])
        assert pieces.tokens[some].sum() == packs.spec.length
        for start, count in zip(pieces.start[some].tolist(), pieces.tokens[some].tolist(), strict=True):
            if start != PADDING:
                found[number].append(tokens[start : start + count])
    return found


@settings(max_examples=examples(300), deadline=None)
@given(LENGTHS, st.integers(1, 20), st.sampled_from([None, (0, 0), (3, 1)]), st.sampled_from(["concat", "best_fit"]))
def test_every_token_is_in_one_sequence(
    lengths: list[int], length: int, shuffle: tuple[int, int] | None, strategy: str
) -> None:
    packs = packs_of(lengths, length, strategy, shuffle)
    found = sequences_of(packs, lengths)
    tokens = [token for sequence in found for piece in sequence for token in piece]
    assert sorted(tokens) == [(d, p) for d, n in enumerate(lengths) for p in range(n)]
    for sequence in found:
        assert 0 < sum(map(len, sequence)) <= length
        for piece in sequence:
            assert piece
            assert piece == [(piece[0][0], piece[0][1] + i) for i in range(len(piece))]
    if strategy == "concat":
        assert len(found) == -(-sum(lengths) // length)
        assert all(sum(map(len, sequence)) == length for sequence in found[:-1])
        stream = [token[0] for token in tokens]  # a document follows the one before, uncut
        assert [d for i, d in enumerate(stream) if i == 0 or stream[i - 1] != d] == list(dict.fromkeys(stream))
        if shuffle is None:
            assert tokens == sorted(tokens)
    else:
        pieces = [piece for sequence in found for piece in sequence]
        rests = [n % length for n in lengths if n % length]
        whole = sum(n // length for n in lengths)
        assert sorted(map(len, pieces)) == sorted(rests + [length] * whole)  # only what is too long is cut
        assert sorted(length - sum(map(len, s)) for s in found) == plain_best_fit(rests + [length] * whole, length)
        if shuffle is None:
            assert all(sequence == sorted(sequence) for sequence in found)


def test_epochs_differ() -> None:
    lengths = [5, 3, 4, 5, 3, 4, 6, 2, 5, 5, 3, 3] * 5
    for strategy in ("concat", "best_fit"):
        orders = [
            sequences_of(packs_of(lengths, 8, strategy, shuffle), lengths) for shuffle in ((0, 0), (0, 1), (1, 0))
        ]
        assert orders[0] != orders[1] != orders[2] != orders[0]
