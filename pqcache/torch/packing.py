"""What packing excludes among the options of a dataset."""

from __future__ import annotations

from collections.abc import Sequence

from pqcache.errors import UsageError
from pqcache.reader.packing.pack import Pack
from pqcache.torch.dataset_reader import ReadOptions
from pqcache.torch.tensors import Nulls


def check_packing(options: ReadOptions, columns: Sequence[str] | None) -> None:
    """Raise UsageError for options that a ``pack`` excludes."""
    pack = options.pack
    if pack is None:
        return
    if not isinstance(pack, Pack):
        raise UsageError(f"pack={pack!r}", "give a Pack, like Pack('tokens', length=4096)")
    if options.batch_size is None:
        raise UsageError("batch_size=None", "packed sequences come in batches", "give it a batch_size")
    if options.sequence is not None:
        raise UsageError("sequence and pack", "both make sequences of rows", "choose one of them")
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
