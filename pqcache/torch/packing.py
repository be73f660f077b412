"""What packing excludes among the options of a dataset."""

from __future__ import annotations

from collections.abc import Sequence

from pqcache.errors import UsageError
from pqcache.reader.packing.pack import Pack
from pqcache.reader.packing.token_batches import TokenBatches
from pqcache.torch.read_options import ReadOptions
from pqcache.torch.tensors import Nulls

DEFAULT_BATCH_SIZE = 256


def check_packing(options: ReadOptions, columns: Sequence[str] | None, batch_size: int | None) -> None:
    """Raise UsageError for options that a ``pack`` excludes; ``batch_size`` is what the caller has given."""
    pack = options.pack
    if pack is None:
        return
    if not isinstance(pack, Pack | TokenBatches):
        raise UsageError(f"pack={pack!r}", "give a Pack, like Pack('tokens', length=4096), or TokenBatches")
    if options.sequence is not None:
        raise UsageError("sequence and pack", "both make something of several rows", "choose one of them")
    if isinstance(pack, TokenBatches):
        _check_token_batches(pack, columns, batch_size)
    else:
        _check_pack(pack, options, columns)


def _check_token_batches(pack: TokenBatches, columns: Sequence[str] | None, batch_size: int | None) -> None:
    if batch_size != DEFAULT_BATCH_SIZE:
        raise UsageError(f"batch_size={batch_size}", "tokens_per_batch= says how large batches are", "leave it out")
    if columns is not None and pack.column not in columns:
        raise UsageError("pack", f"{pack.column!r} is not among the columns")


def _check_pack(pack: Pack, options: ReadOptions, columns: Sequence[str] | None) -> None:
    if options.batch_size is None:
        raise UsageError("batch_size=None", "packed sequences come in batches", "give it a batch_size")
    if options.nulls != Nulls():
        advice = f'leave them out with filters="{pack.column} is not null"'
        raise UsageError("nulls", "documents that are null are not packed", advice)
    if options.ragged:
        raise UsageError("ragged", "packed lists are tensors", "leave it out")
    if columns is not None and sorted(columns) != sorted(pack.columns):
        raise UsageError(
            "columns",
            f"with pack= they are {', '.join(pack.columns)}",
            "leave columns= out, and name columns with a number for each token in fields= of the pack",
        )
