"""What packing excludes among the options of a dataset."""

from __future__ import annotations

from collections.abc import Sequence

from pqcache.errors import UsageError
from pqcache.reader.packing.pack import Pack, check_batch_size, check_pack
from pqcache.torch.dataset_reader import ReadOptions

DEFAULT_BATCH_SIZE = 256


def check_packing(options: ReadOptions, columns: Sequence[str] | None, batch_size: int | None) -> None:
    """Raise UsageError for options that a ``pack`` excludes; ``batch_size`` is what the caller has given."""
    pack = options.pack
    if pack is None:
        return
    check_pack(pack, columns=columns, has_sequence=options.sequence is not None, has_weights=options.choice.has_weights)
    check_batch_size(pack, batch_size, DEFAULT_BATCH_SIZE)
    if not isinstance(pack, Pack):
        return
    if options.batch_size is None:
        raise UsageError("batch_size=None", "packed sequences come in batches", "give it a batch_size")
    if options.conversion.mask or options.conversion.fill:
        advice = f'leave them out with filters="{pack.column} is not null"'
        raise UsageError("nulls", "documents that are null are not packed", advice)
    if options.ragged:
        raise UsageError("ragged", "packed lists are tensors", "leave it out")
