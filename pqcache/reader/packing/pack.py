"""``pack=``: documents of different lengths as sequences of one length, or as batches by their tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np

from pqcache.errors import UsageError
from pqcache.reader.order.epoch_order import Ints
from pqcache.reader.selection.selection import digest_of
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

    A row is a document: a list of numbers. A batch holds ``batch_size`` sequences, as tensors (B, length). Documents of
    a sequence are of one row group. Every token comes exactly once per epoch, and every epoch has the same number of
    batches.

    ``column``     the list column with the tokens
    ``length``     tokens of a sequence
    ``strategy``   "concat": the documents of a row group, in another order each epoch, are laid end to end and cut.
                   "best_fit": a document is not cut, unless it is longer than ``length``: then it is cut into pieces of
                   ``length`` and a rest. In both, what documents leave of a sequence is padded: in "concat" that is
                   the end of the last sequence of a row group.
    ``fields``     other list columns, with a number for each token (labels, masks), that are packed alike
    ``padding``    the number that fills up a sequence, or one for each column: ``{"tokens": 0, "labels": -100}``
    ``ids``        what tells documents apart, int32: ``document_ids`` (B, length), from 1 on in each sequence, 0 where
                   it is padded; ``position_ids`` (B, length), from 0 on in each document; ``cu_seqlens``, where the
                   documents of the batch begin among its B x length tokens, padding counted as a document, and where
                   the last one ends. Part of a document that is cut counts as a document.

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
            raise UsageError("pack", f"a column is there twice in {', '.join(self.columns)}")
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
        raise UsageError("pack", f"padding={value!r} is no value for {column!r}, which is {dtype}", "give another one")

    @property
    def id_columns(self) -> list[str]:
        """The columns that tell documents apart; ``cu_seqlens`` follows from ``position_ids``."""
        needed = {POSITIONS if name == "cu_seqlens" else name for name in self.ids}
        return [name for name in ("document_ids", POSITIONS) if name in needed]

    @property
    def fingerprint(self) -> str:
        """Names the packing in states."""
        return digest_of(["pack", self.column, self.length, self.strategy])


@dataclass(frozen=True, kw_only=True)
class TokenBatches:
    """Batches of documents by their tokens: ``pack=TokenBatches("tokens", tokens_per_batch=16_384)``.

    For models that take padded documents. Documents of a row group are put into buckets by their lengths, and a batch
    holds documents of one bucket, and the rest of the next shorter ones, as long as rows x longest document is at most
    ``tokens_per_batch``. So batches differ in their number of rows. Every document comes exactly once per epoch, in
    other batches each epoch; every epoch has the same number of batches.

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
        """The columns whose lengths have to be known."""
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
        """Names the batching in states."""
        return digest_of(["batches", self.column, self.bounds.tolist(), self.rows.tolist()])


def _is_count(value: Any) -> bool:
    return is_whole(value) and 0 < value <= _MOST_BATCH


def check_pack(pack: Any, *, columns: Sequence[str] | None, has_sequence: bool, has_weights: bool) -> None:
    """Raise UsageError for an invalid ``pack``, or options that it excludes."""
    if not isinstance(pack, Pack | TokenBatches):
        raise UsageError(f"pack={pack!r}", "give a Pack, like Pack('tokens', length=4096), or TokenBatches")
    if has_sequence:
        raise UsageError("sequence and pack", "both make something of several rows", "choose one of them")
    if has_weights:
        reason = "the sequences of an epoch are packed once, of each document once"
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
