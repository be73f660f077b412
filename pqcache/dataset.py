"""The public ``Cache``: a cache directory whose rows are looked up and read as Arrow, without torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from collections.abc import Sequence as Names
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from pqcache.errors import UsageError
from pqcache.reader.open_dataset import shard_of
from pqcache.reader.options import BATCH_SIZE, BatchOptions
from pqcache.reader.packing.pack import Pack, TokenBatches
from pqcache.reader.processes import check_launched, count_and_number, is_rank, worker_of_torch
from pqcache.reader.record_batches import RecordBatches, read_record_batches, read_rows
from pqcache.reader.selection.row_choice import RowChoice
from pqcache.reader.selection.sequences import Sequence
from pqcache.reader.selection.split import Split
from pqcache.store.arriving.start_run import FillRequest, fill_request
from pqcache.store.cache_directory import CacheDirectory
from pqcache.store.hive import parse_types
from pqcache.store.keys.lookup import lookup
from pqcache.store.selected_rows import SelectedRows
from pqcache.store.shard import parse_shard
from pqcache.store.tables.data_files import FileRules
from pqcache.units import parse_count, parse_size


@dataclass(frozen=True)
class Cache(CacheDirectory):
    """One local directory that holds one dataset.

    >>> cache = Cache.open("cache/shop")
    >>> len(cache.snapshots()), cache.current() == cache.snapshot()
    (1, True)
    """

    def batches(
        self,
        columns: Names[str] | None = None,
        *,
        filters: Any = None,
        batch_size: str | int = BATCH_SIZE,
        shuffle: bool = True,
        seed: int = 0,
        epoch: int = 0,
        drop_last: bool = False,
        memory: str | int = "2GB",
        window: str | int | None = None,
        lanes: str | int | None = None,
        num_replicas: int | None = None,
        rank: int | None = None,
        start: int = 0,
        snapshot: str | None = None,
        rows: SelectedRows | None = None,
        split: Split | None = None,
        sample: float | None = None,
        limit: int | None = None,
        weights: Any = None,
        balance: str | None = None,
        partition_types: Mapping[str, str] | None = None,
        sequence: Sequence | None = None,
        pack: Pack | TokenBatches | None = None,
        source: str | os.PathLike[str] | None = None,
        source_options: Mapping[str, str] | None = None,
        keep_filling: bool = True,
    ) -> RecordBatches:
        """Return an iterator over an epoch as Arrow record batches, in the order of ParquetDataset's batches.

        For numpy, JAX, TensorFlow or Arrow itself: torch is not imported. Every row comes exactly once per epoch;
        nulls remain nulls, dictionaries are decoded. Batches are made ahead on threads of this process. ``stats()`` of
        the iterator says what reading takes, as that of ``ParquetDataset``.

        ``columns``       names; None for all. Partition columns are columns.
        ``filters``       a condition on any columns: SQL text, a list as pandas takes it, like
                          ``[("dt", ">=", "2026-11-01"), ("label", "in", [1, 2])]``, or a pyarrow expression. What the
                          index does not decide is counted at once, by reading the condition's columns, and
                          stored beside the snapshot. docs/loading.md says what conditions do with nulls.
        ``batch_size``    rows of a batch; the epoch's last one may be shorter
        ``shuffle``       False gives the rows in the order of the files
        ``seed``, ``epoch``   choose the order; the same two give the same order again
        ``drop_last``     False: ranks are made equal by repeating the epoch's first batches. True: the batches of an
                          incomplete last round are dropped.
        ``memory``        what decoded row groups of this rank may take: bytes, or text like "2GB"
        ``window``        row groups mixed at a time by each lane; None: as many as fit into ``memory``, at most 16, or
                          32 where it holds all rows
        ``lanes``         independent streams of batches; None: one for each rank
        ``num_replicas``, ``rank``   into how many equal parts the epoch is divided, and which one this is: batches
                          number ``rank``, ``rank + num_replicas`` and so on of the epoch. Default to those of
                          torch.distributed where it is initialised, or of ``jax.process_count()`` and
                          ``process_index()`` where JAX is imported and connected, else 1 and 0. A process that a
                          launcher started as one of several (torchrun, srun, mpirun) and neither knows of has to
                          say them. The workers of a DataLoader divide what their process reads.
        ``start``         the number of the first batch that is wanted, counted over all ranks: to resume where a run
                          stopped, also with another ``num_replicas`` that divides ``lanes``
        ``snapshot``      the snapshot to read, which is leased until the epoch ends; None: the current one
        ``rows``          only these rows, of the snapshot that they were looked up in (None: all); with ``filters``,
                          those of them that satisfy it
        ``split``         a ``Split``: the part of these rows whose key has a hash in an interval
        ``sample``, ``limit``   a share of these rows, chosen by ``seed``; only the first so many of them
        ``weights``, ``balance``   how often a row comes in an epoch; see ``ParquetDataset``
        ``partition_types``   types of partition columns, like ``{"hour": "int"}``; None: those of the cache
        ``sequence``      a ``Sequence``: samples of several consecutive rows in place of single rows.
                          ``batch_size`` then counts sequences, and columns are lists of fixed size
        ``pack``          a ``Pack``: documents of different lengths in sequences of one length, lists of fixed size,
                          which ``batch_size`` then counts; ``cu_seqlens`` is left out. Or ``TokenBatches``
        ``source``, ``source_options``, ``keep_filling``   of a cache without a snapshot, for ``Cache(path)``: where it
                          is fetched from while this reads, as in ParquetDataset

        >>> batches = Cache.open("cache/shop").batches(["id", "price"], batch_size=128, seed=7)
        >>> [batch.num_rows for batch in batches]
        [128, 128, 128, 128, 88]

        Options that make no sense raise UsageError, and a cache without that snapshot CacheError, before this returns;
        files that are gone or damaged raise ParquetError by name while iterating.
        """
        fill = fill_request(source, source_options, keep_filling)
        replicas, number = self._replicas(num_replicas, rank, snapshot, fill)
        workers, worker = worker_of_torch()
        options = BatchOptions(
            columns=columns,
            filters=filters,
            batch_size=parse_count(batch_size),
            shuffle=shuffle,
            seed=seed,
            epoch=epoch,
            drop_last=drop_last,
            memory=parse_size(memory),
            window=None if window is None else parse_count(window),
            lanes=None if lanes is None else parse_count(lanes),
            num_replicas=replicas,
            rank=number,
            workers=workers,
            worker=worker,
            compares=num_replicas is None and rank is None and is_rank(),
            start=start,
            snapshot=snapshot,
            rows=rows,
            choice=RowChoice(split=split, sample=sample, limit=limit, weights=weights, balance=balance, seed=seed),
            sequence=sequence,
            pack=pack,
            fill=fill,
        )
        return read_record_batches(self.path, options, FileRules(types=parse_types(partition_types)))

    def _replicas(
        self, num_replicas: int | None, rank: int | None, snapshot: str | None, fill: FillRequest | None
    ) -> tuple[int, int]:
        """Return ``num_replicas`` and ``rank`` as given, else those of this process."""
        if num_replicas is not None or rank is not None:
            replicas, (workers, _) = 1 if num_replicas is None else num_replicas, worker_of_torch()
            if replicas != 1 and workers > 1:
                raise UsageError(
                    f"num_replicas={num_replicas}",
                    f"this is one of {workers} workers of a DataLoader, and whether it counts them too is not known",
                    "leave num_replicas= and rank= out: the workers share what their process reads. Or use "
                    "pqcache.torch.Loader",
                )
            return replicas, rank or 0
        replicas, number = count_and_number()
        check_launched(replicas)
        shard = shard_of(self.path, snapshot, fill) if replicas > 1 else None
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

    def read(self, rows: SelectedRows, columns: Names[str] | None = None) -> pa.Table:
        """Return ``rows`` as an Arrow table, in the order of the files; only their row groups are decoded.

        ``columns`` are names, None for all. The rows' snapshot is read, also when it is not the current one any more;
        a snapshot that is gone raises CacheError.
        """
        return read_rows(self.path, rows, columns)
