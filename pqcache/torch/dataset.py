"""ParquetDataset: shuffled, exactly once, resumable at any batch."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from pqcache.errors import PqcacheError, UsageError
from pqcache.options import Unpack, documented, parsed
from pqcache.reader.batch_rows import RowPlaces
from pqcache.reader.order import EpochShare, check_rank
from pqcache.reader.packing import TokenBatches
from pqcache.reader.proof import parts_of
from pqcache.reader.stats import DatasetStats
from pqcache.torch.batch_groups import sizes_in_worker
from pqcache.torch.dataset_options import DatasetArguments, DatasetOptions
from pqcache.torch.dataset_reader import DatasetReader
from pqcache.torch.resumable import ResumableDataset
from pqcache.torch.state import Place, State, Tally
from pqcache.torch.transforms import FailedRow
from pqcache.units import format_count

log = logging.getLogger("pqcache.reader")


@documented(DatasetArguments, DatasetOptions)
class ParquetDataset(ResumableDataset):
    """Shuffled batches of a cache or a directory of Parquet, for ``Loader(dataset)``.

    Every row comes exactly once per epoch, whatever the number of workers and ranks. A Loader reads each epoch in a
    different order; with ``DataLoader(dataset, batch_size=None)`` call ``set_epoch`` before each. docs/gpus.md shows
    training on a GPU, with workers and copies that run ahead.

    A ``Batch`` is a dict of column name to tensor (rows, ...) or Ragged that knows its global ``index``.
    ``pqcache.torch.tensors`` lists the dtype and shape of each type of column.

    Numbers may be text (``batch_size="256"``), and ``memory`` is a number of bytes or text like "2GB".

    Args:
        path: a cache, a snapshot, a directory or a file.
        given: see pqcache.torch.dataset_options

    >>> dataset = ParquetDataset("cache/shop", columns=["id", "price", "tokens", "dt"], batch_size=256, seed=1)
    >>> len(dataset)
    3
    >>> batch = next(iter(dataset))
    >>> batch.index, batch["price"].shape, batch["price"].dtype
    (0, torch.Size([256]), torch.float64)
    >>> batch["tokens"].to_padded(length=8).shape, batch["dt"][0][:8]
    (torch.Size([256, 8]), '2026-11-')
    >>> dataset.load_state_dict(dataset.state_dict(after=batch))
    >>> next(iter(dataset)).index
    1

    Open a cache that holds one node's share (``pqcache sync --shard``) on every rank, after ``init_process_group()``:
    ranks then belong to their node, and all nodes have the same number of batches. With ``num_replicas`` and ``rank``,
    the share is read on its own.

    Raises UsageError for invalid options and for columns without a tensor form, and ParquetError for nulls without
    ``nulls`` if the files' null counts show them. Iterating raises ParquetError, with the file's name, for missing or
    damaged files and for uncounted nulls.
    """

    def __init__(
        self, path: str | os.PathLike[str], columns: Sequence[str] | None = None, **given: Unpack[DatasetArguments]
    ) -> None:
        self.options = DatasetOptions(path=Path(path), **parsed({"columns": columns, **given}, DatasetOptions))
        super().__init__(self.options)
        self._reader = DatasetReader(self.options)
        self._readers, self._meter = (self._reader,), self._reader.meter
        self._yields_batches, self._is_shuffled = self.options.batch_size is not None, self.options.shuffle
        self._epochs_differ = self._reader.rows is None
        self._tally = Tally() if self.options.proof else None
        self._can_divide = self._is_shuffled and self._yields_batches and self._reader.nodes is None
        check_rank(*self._ranks(), None if self._can_divide or not self._is_shuffled else self._lanes)

    def __repr__(self) -> str:
        reader, options = self._reader, self.options
        rows = "rows" if options.sequence is None and options.pack is None else "sequences"
        held = f"{reader.rows:,} {rows}" if reader.rows is not None else f"{rows} that epochs draw"
        columns = format_count(len(reader.schema), "column")
        lanes = "one for each worker of each rank" if self._lanes is None else self._lanes
        about = f"{held}, {columns}, batch_size={options.size_in_order}, lanes={lanes}"
        return f"<{type(self).__name__} {options.path} ({reader.snapshot}): {about}>"

    @property
    def schema(self) -> pa.Schema:
        """The Arrow schema, with units and zones of timestamps and scales of decimals."""
        return self._reader.schema

    @property
    def snapshot(self) -> str:
        """The name of the snapshot being read; for a plain directory, a hash of its files."""
        return self._reader.snapshot

    @property
    def fill(self) -> float | None:
        """With ``pack``, the share of sequences, or batches, filled with tokens; else None."""
        return self._reader.fill

    def stats(self) -> DatasetStats:
        """Return the cost of reading in the current epoch and in total, over all threads and workers of this rank.

        Includes the trainer's waiting time and its cause, the memory used, and how much of a first copy has arrived.
        See docs/gpus.md.
        """
        return self._reader.stats()

    def errors(self) -> list[FailedRow]:
        """Return the rows for which the transform failed in all workers of this rank, with ``on_error="skip"``."""
        return [] if self._reader.failures is None else self._reader.failures.read()

    def load_state_dict(self, state: Mapping[str, Any], snapshot: str | None = None) -> None:
        """Restore epoch, next batch, lanes, window and snapshot from ``state``.

        The numbers of ranks and workers may differ. If their product does not divide the lanes of the state, the
        remaining batches come in a different sequence; see docs/loading.md.

        A state from the end of an epoch continues with the next one. Lanes and window come from the state unless you
        chose them here. An older snapshot is opened if it is still kept. Raises UsageError if the state does not fit,
        and CacheError if its snapshot is gone.

        With ``snapshot="current"``, the next epoch begins on the cache's current snapshot, even if the state's is gone.
        If the state is within an epoch, the rest of it is left out, with a warning that counts the batches. All ranks
        continue with rank 0's current snapshot; UsageError if one of them lacks it.
        """
        if snapshot is not None:
            self._load_epoch(state, snapshot)
            return
        loaded = State.from_dict(state)
        loaded.check_worker()
        loaded.check_options(lanes=self._lanes or loaded.lanes)
        ranks, _ = self._ranks()
        if not self._can_divide and loaded.shuffle and loaded.lanes % ranks:
            reason = f"it has lanes={loaded.lanes}, which {ranks} ranks cannot share"
            raise UsageError("state", reason, "resume on a number of ranks that divides it")
        self._reader.load_state(loaded)
        self._lanes = loaded.lanes
        if self._tally is not None:
            self._tally.load(loaded.place, None if loaded.proof is None else parts_of(state))
        self._resume(loaded)

    def _check_refreshes(self) -> None:
        self._check_started()
        self._reader.check_refreshes()
        if self._chosen_ranks is not None and self._chosen_ranks[0] > 1:
            reason = "ranks agree on a snapshot through torch.distributed, which num_replicas and rank bypass"
            raise UsageError("refresh", reason, "call init_process_group() and leave both out")

    def _refresh(self) -> None:
        record = self._progress.next
        if record.start or record.divisions:
            return  # in the middle of a state's epoch
        before = self._reader.token
        try:
            self._reader.refresh(self._meets_ranks, self._patience)
        except (PqcacheError, OSError) as error:
            message = f"epoch {record.epoch} is read from snapshot {self.snapshot} again: {error}"
            warnings.warn(message, UserWarning, stacklevel=4)
            return
        if self._reader.token != before:
            self._begin(record.epoch)

    def _load_epoch(self, state: Mapping[str, Any], snapshot: str) -> None:
        if snapshot != "current":
            raise UsageError(f"snapshot={snapshot!r}", 'choose "current"', "or leave it out, for the state's own")
        loaded = State.from_dict(state)
        loaded.check_worker()
        self._check_refreshes()
        self._reader.check_order_of(loaded)
        self._reader.exclude_after(loaded)
        self._reader.refresh(self._meets_ranks, self._patience)
        left = max(0, (loaded.batches or 0) - loaded.batch) if loaded.batch else 0
        if left >= (self._ranks()[0] if self.drop_last else 1):
            message = (
                f"{left:,} of {loaded.batches:,} batches of epoch {loaded.epoch}, on all ranks, are never read: epoch "
                f"{loaded.epoch + 1} begins, on snapshot {self.snapshot}"
            )
            warnings.warn(message, UserWarning, stacklevel=3)
        self._begin(loaded.epoch + (loaded.batch > 0))

    def _begin(self, epoch: int) -> None:
        """Begin an epoch like a newly made dataset."""
        self._lanes, self._iteration = self.options.lanes, None
        self._progress.load(Place(epoch, 0, 0), self._layout(0))
        log.info("epoch %d is read from snapshot %s of %s", epoch, self.snapshot, self.options.path)

    def _reader_for_mix(self) -> DatasetReader:
        """The reader, for a mix; UsageError for options that only the mix can decide."""
        if self.options.batch_size is None:
            raise UsageError("batch_size=None", "a mix draws complete batches", "give it a batch_size")
        if self._reader.nodes is not None:
            raise UsageError(self.options.path, "holds a node's share", "a mix needs all of it on every node")
        if self._lanes is not None or self._chosen_ranks is not None:
            raise UsageError("lanes, num_replicas and rank", "give them to the mix instead")
        if callable(self.options.weights):
            raise UsageError("weights", "all passes of a mix must have the same length, and weights by epoch change it")
        if self._tally is not None:
            raise UsageError("proof=True", "a mix counts its own epochs", "leave it out")
        if not self.pad:
            raise UsageError("pad=False", "the mix decides how ranks are padded", "give it to the mix instead")
        return self._reader

    def _rows_of_batches(self) -> tuple[int, int] | None:
        size, rows = self.options.batch_size, self._reader.rows
        differ = isinstance(self.options.pack, TokenBatches) or self._reader.nodes is not None
        differ = differ or any(begin > 0 for begin, _ in self._reader.exclusions)
        if size is None or rows is None or differ:
            return None
        return size, size if self.drop_last else (rows - 1) % size + 1

    def _ranks(self) -> tuple[int, int]:
        nodes = self._reader.nodes
        if nodes is None:
            return super()._ranks()
        nodes.check(self._ranks_of_all())
        return nodes.ranks, nodes.rank

    def _total(self, epoch: int, ranks: int, start: int) -> int:
        return self._reader.total(epoch, ranks, start, self.pad)

    def _rows_of(self, epoch: int, index: int, lanes: int, ranks: int) -> RowPlaces:
        return self._reader.rows_at(self._reader.place_of(epoch, index, lanes, ranks))

    def _state_at(self, place: Place, worker: list[int] | None) -> State:
        ranks, _ = self._ranks()
        proof = None
        if self._tally is not None:
            parts = [list(part) for part in self._tally.parts(place)]
            proof = {"content": self._reader.files_read, "drop_last": self.drop_last, "parts": parts}
        batches = self._total(place.epoch, ranks, place.batch)
        return replace(self._reader.state(place, ranks, worker), batches=batches, proof=proof)

    def _read(self, share: EpochShare, indices: range, epoch: int) -> Generator[tuple[int, Any]]:
        return self._reader.read(share, indices, epoch, are_sent=sizes_in_worker(self._groups) is not None)
