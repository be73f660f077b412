"""The public class ``Cache``, which looks up and reads rows of a cache as Arrow, without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from pqcache.errors import UsageError
from pqcache.options import Unpack, documented, parsed
from pqcache.reader.epoch import RecordBatches, read_record_batches, read_rows
from pqcache.reader.epoch_options import BatchArguments, BatchOptions
from pqcache.reader.open_dataset import shard_of
from pqcache.reader.ranks import check_launched, count_and_number, is_rank, worker_of_torch
from pqcache.store.cache_directory import CacheDirectory
from pqcache.store.key_lookup import SelectedRows, lookup
from pqcache.store.table_part import parse_shard


@dataclass(frozen=True)
class Cache(CacheDirectory):
    """A cache: a local directory with a dataset.

    >>> cache = Cache.open("cache/shop")
    >>> len(cache.snapshots()), cache.current() == cache.snapshot()
    (1, True)
    """

    @documented(BatchArguments, BatchOptions)
    def batches(self, columns: Sequence[str] | None = None, **given: Unpack[BatchArguments]) -> RecordBatches:
        """Iterate over an epoch as Arrow record batches, in the order of ParquetDataset's batches.

        For numpy, JAX, TensorFlow or Arrow itself: torch isn't imported. Every row comes exactly once per epoch; nulls
        remain nulls, dictionaries are decoded. Threads of this process make batches ahead. Like ``ParquetDataset``,
        the iterator has ``stats()``, the costs of reading. The snapshot is leased until the epoch ends. The workers of
        a DataLoader divide the batches of their process.

        Args:
            given: see pqcache.reader.epoch_options

        >>> batches = Cache.open("cache/shop").batches(["id", "price"], batch_size=128, seed=7)
        >>> [batch.num_rows for batch in batches]
        [128, 128, 128, 128, 88]

        Raises UsageError for invalid options, and CacheError if the snapshot is missing, before it returns; raises
        ParquetError, which names the file, for missing or damaged files during the iteration.
        """
        options = BatchOptions(**parsed({"columns": columns, **given}, BatchOptions))
        workers, worker = worker_of_torch()
        compares = options.num_replicas is None and options.rank is None and is_rank()
        replicas, number = self._replicas(options, workers)
        options = replace(
            options, num_replicas=replicas, rank=number, workers=workers, worker=worker, compares=compares
        )
        return read_record_batches(self.path, options)

    def _replicas(self, options: BatchOptions, workers: int) -> tuple[int, int]:
        """``num_replicas`` and ``rank`` as given, else those of this process."""
        if options.num_replicas is not None or options.rank is not None:
            if options.ranks > 1 and workers > 1:
                raise UsageError(
                    f"num_replicas={options.ranks}",
                    f"this is one of {workers} workers of a DataLoader, and it is unclear whether it counts them too",
                    "leave num_replicas= and rank= out: the workers share what their process reads. Or use "
                    "pqcache.torch.Loader",
                )
            return options.ranks, options.rank or 0
        replicas, number = count_and_number()
        check_launched(replicas)
        shard = shard_of(self.path, options.snapshot, options.fill) if replicas > 1 else None
        if shard is not None and parse_shard(shard).nodes > 1:
            raise UsageError(
                f"{self.path}",
                f"holds share {shard} alone, and there are {replicas} processes: it is unclear which of them read it",
                "give num_replicas= and rank= of the processes of this node; 1 and 0 for one",
            )
        return replicas, number

    def lookup(self, column: str, values: Any) -> SelectedRows:
        """Find the rows of the current snapshot whose ``column`` has one of ``values``, without scanning.

        ``column`` has a key index, made by 'pqcache index', or is a partition column; ``a.b`` is a field of a struct.
        ``values`` is a value, or a list, numpy or Arrow array of values. Read the rows with ``read``, or train on them
        with ``ParquetDataset(path, rows=...)``.

        Raises CacheError, with the command to run, if there is no key index, UsageError for None and values of another
        type, and DamagedError for a damaged key index.
        """
        snapshot, lease = self.lease()
        with lease:
            return lookup(snapshot, column, values)

    def read(self, rows: SelectedRows, columns: Sequence[str] | None = None) -> pa.Table:
        """Read ``rows`` as an Arrow table, in file order; only their row groups are decoded.

        ``columns`` are names, None for all. Reads the snapshot of the rows even if it is no longer current; raises
        CacheError if it is gone.
        """
        return read_rows(self.path, rows, columns)
