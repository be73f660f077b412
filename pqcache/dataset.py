"""The public ``Cache``: a cache directory whose rows are looked up and read as Arrow, without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from pqcache.errors import UsageError
from pqcache.options import Unpack, documented, parsed
from pqcache.reader.epoch import RecordBatches, read_record_batches, read_rows
from pqcache.reader.open_dataset import shard_of
from pqcache.reader.options import BatchArguments, BatchOptions
from pqcache.reader.processes import check_launched, count_and_number, is_rank, worker_of_torch
from pqcache.store.cache_directory import CacheDirectory
from pqcache.store.keys.lookup import SelectedRows, lookup
from pqcache.store.table_part import parse_shard


@dataclass(frozen=True)
class Cache(CacheDirectory):
    """One local directory that holds one dataset.

    >>> cache = Cache.open("cache/shop")
    >>> len(cache.snapshots()), cache.current() == cache.snapshot()
    (1, True)
    """

    @documented(BatchArguments, BatchOptions)
    def batches(self, columns: Sequence[str] | None = None, **given: Unpack[BatchArguments]) -> RecordBatches:
        """Return an iterator over an epoch as Arrow record batches, in the order of ParquetDataset's batches.

        For numpy, JAX, TensorFlow or Arrow itself: torch is not imported. Every row comes exactly once per epoch;
        nulls remain nulls, dictionaries are decoded. Batches are made ahead on threads of this process. ``stats()`` of
        the iterator says what reading takes, as that of ``ParquetDataset``. The snapshot is leased until the epoch
        ends. The workers of a DataLoader divide what their process reads.

        Args:
            given: see pqcache.reader.options

        >>> batches = Cache.open("cache/shop").batches(["id", "price"], batch_size=128, seed=7)
        >>> [batch.num_rows for batch in batches]
        [128, 128, 128, 128, 88]

        Options that make no sense raise UsageError, and a cache without that snapshot CacheError, before this returns;
        files that are gone or damaged raise ParquetError by name while iterating.
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
                    f"this is one of {workers} workers of a DataLoader, and whether it counts them too is not known",
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
                f"holds share {shard} alone, and there are {replicas} processes: which of them read it is not known",
                "give num_replicas= and rank= of the processes of this node; 1 and 0 for one",
            )
        return replicas, number

    def lookup(self, column: str, values: Any) -> SelectedRows:
        """Return the rows of the current snapshot whose ``column`` has one of ``values``, without scanning.

        ``column`` is one that 'pqcache index' has made a key index of (``a.b`` inside of a struct), or a partition
        column. ``values`` is a value, or a list, numpy or Arrow array of values. The rows can be read with ``read``
        and trained on with ``ParquetDataset(path, rows=...)``.

        Without a key index CacheError names the command that makes one. Values of another type, and None, raise
        UsageError; a damaged key index raises DamagedError.
        """
        snapshot, lease = self.lease()
        with lease:
            return lookup(snapshot, column, values)

    def read(self, rows: SelectedRows, columns: Sequence[str] | None = None) -> pa.Table:
        """Return ``rows`` as an Arrow table, in the order of the files; only their row groups are decoded.

        ``columns`` are names, None for all. The rows' snapshot is read, also when it is not the current one any more;
        a snapshot that is gone raises CacheError.
        """
        return read_rows(self.path, rows, columns)
