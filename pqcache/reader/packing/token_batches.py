"""``pack=TokenBatches(...)``: batches of whole documents of about one length, by their tokens."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from pqcache.errors import UsageError
from pqcache.reader.order.epoch_order import Ints

_PER_OCTAVE = 8  # buckets
_MOST_TOKENS = 1 << 30


@dataclass(frozen=True, kw_only=True)
class TokenBatches:
    """Batches of documents by their tokens: ``pack=TokenBatches("tokens", tokens_per_batch=16_384)``.

    For models that take padded documents. Documents of a row group are put into buckets by their lengths, and a batch
    holds documents of one bucket, and what the next shorter ones leave: so many that rows x longest document is at most
    ``tokens_per_batch``. So batches differ in their number of rows. Every document comes exactly once per epoch, in
    other batches each epoch; every epoch has the same number of batches.

    ``column``            the list column with the tokens
    ``tokens_per_batch``  the most tokens of a batch, padding included
    ``buckets``           the longest document of each bucket; None: 8 for each doubling of the length
    ``most_rows``         the most rows of a batch; None: any

    Numbers that make no sense raise UsageError here, names and types where it is used.
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
        """The columns whose lengths have to be known."""
        return (self.column,)

    @cached_property
    def bounds(self) -> Ints:
        """The longest document of each bucket; the last one holds all that a batch may hold."""
        most = int(self.tokens_per_batch)
        if self.buckets is None:
            exponents = np.arange(int(np.ceil(np.log2(most))) * _PER_OCTAVE + 1)
            found = np.floor(2 ** (exponents / _PER_OCTAVE) + 1e-9).astype(np.int64)
        else:
            found = np.array(self.buckets, np.int64)
        return np.unique(np.append(found[found < most], most))

    @cached_property
    def rows(self) -> Ints:
        """The rows of a full batch of each bucket."""
        return np.minimum(self.tokens_per_batch // self.bounds, self.most_rows or _MOST_TOKENS)

    @property
    def fingerprint(self) -> str:
        """A name for how documents are put into batches, so that a state can say what it belongs to."""
        text = json.dumps(["batches", self.column, self.bounds.tolist(), self.rows.tolist()])
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _is_count(value: Any) -> bool:
    number = isinstance(value, int | np.integer) and not isinstance(value, bool)
    return number and 0 < value <= _MOST_TOKENS


def batch_ends(lengths: Ints, spec: TokenBatches) -> Ints:
    """Return where each batch of documents, which are sorted by buckets, begins, and where the last one ends.

    What a bucket leaves comes with the next longer documents, if that saves a batch. All depends only on how many
    documents each bucket has.
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
