"""What packing excludes among the options of those who read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pqcache.errors import UsageError
from pqcache.reader.packing.pack import Pack
from pqcache.reader.packing.token_batches import TokenBatches


def check_pack(pack: Any, *, columns: Sequence[str] | None, has_sequence: bool, has_weights: bool) -> None:
    """Raise UsageError where ``pack`` is none, or where other options do not go with it."""
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


def check_batch_size(pack: Pack | TokenBatches, batch_size: int | None, default: int) -> None:
    """Raise UsageError for a number of rows, other than the default, where batches are as large as their tokens say."""
    if isinstance(pack, TokenBatches) and batch_size != default:
        raise UsageError(f"batch_size={batch_size}", "tokens_per_batch= says how large batches are", "leave it out")
