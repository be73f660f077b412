"""ParquetDataset: shuffled, exactly once, resumable at any batch."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from pqcache.errors import UsageError
from pqcache.reader.batch_rows import RowPlaces
from pqcache.reader.options import check_numbers, check_rank, check_seed
from pqcache.reader.order.epoch_share import EpochShare
from pqcache.reader.packing.pack import Pack, TokenBatches, check_batch_size, check_pack
from pqcache.reader.reading_stats import DatasetStats
from pqcache.reader.selection.row_choice import RowChoice
from pqcache.reader.selection.sequences import Sequence as SequenceOf
from pqcache.reader.selection.split import Split
from pqcache.store.arriving.start_run import fill_request
from pqcache.store.hive import parse_types
from pqcache.store.selected_rows import SelectedRows
from pqcache.store.tables.data_files import FileRules
from pqcache.torch.batch_groups import sizes_in_worker
from pqcache.torch.checkpoint import Place, State
from pqcache.torch.dataset_reader import DatasetReader, ReadOptions
from pqcache.torch.resumable import STALL_TIMEOUT, Count, ResumableDataset, count_or_none
from pqcache.torch.tensors import Conversion
from pqcache.torch.transforms import MAX_ERRORS, FailedRow, OnError, Transform
from pqcache.units import format_count, parse_names, parse_size

DEFAULT_BATCH_SIZE = 256


class ParquetDataset(ResumableDataset):
    """Shuffled batches of a cache or a directory of Parquet, for ``Loader(dataset)``.

    Every row comes exactly once per epoch, whatever the number of workers and ranks. A Loader reads each epoch in
    another order; with ``DataLoader(dataset, batch_size=None)`` call ``set_epoch`` before each. docs/gpus.md shows
    training on a GPU, with workers and copies that run ahead.

    A ``Batch`` is a dict of column name to tensor (rows, ...) or Ragged that knows its global ``index``.
    ``pqcache.torch.tensors`` lists the dtype and shape of each type of column.

    Numbers may be text (``batch_size="256"``), and ``memory`` is a number of bytes or a text like "2GB".

    ``path``          a cache, a snapshot, a directory or a file
    ``columns``       names; None for all. Partition columns are columns.
    ``filters``       a condition on any columns: SQL text, a list as pandas takes it, like
                      ``[("dt", ">=", "2026-11-01"), ("label", "in", [1, 2])]``, or a pyarrow expression. If the index
                      does not decide it, the condition's columns are read now to count the rows, and the counts are
                      stored with the snapshot. On nulls see docs/loading.md.
    ``batch_size``    rows of a batch; None yields single rows, for DataLoader's batching and collate
    ``shuffle``       False gives the rows in the order of the files
    ``drop_last``     False: the last batch may be short, and ranks are made equal by repeating the epoch's
                      first batches. True: the remainder is dropped.
    ``pad``           False: nothing is repeated, so every row comes once over all ranks, and some ranks have one batch
                      less (``batches_per_rank``). For evaluation: see docs/loading.md before training on ranks.
    ``memory``        bytes for the decoded row groups of this rank, all its workers together
    ``window``        row groups that each lane mixes at a time; None: as many as ``memory`` allows, at most 16, or 32
                      if it holds all rows
    ``lanes``         independent streams of batches; None: one for each worker of each rank. Fix it to a
                      common multiple to get the same batches whatever the number of ranks and workers.
    ``num_replicas``, ``rank``   default to those of torch.distributed if it is initialised, else 1 and 0
    ``transform``     called in the worker on each batch (or row); the loader yields its result. Generators of numpy,
                      random and torch are seeded for it from (seed, epoch, batch index).
    ``transform_workers``   threads of this process (or worker) that call the transform, then as
                      ``transform(batch, generator)`` with a ``numpy.random.Generator`` seeded in the same way, because
                      threads share the global ones. None: no threads
    ``on_error``      "raise", or "skip": a row for which the transform raises an error is replaced by the next good one
                      of its batch, so that batches keep their number and size; ``errors()`` lists them all. See
                      docs/transforms.md
    ``max_errors``    with "skip", how many rows may fail in an epoch in each worker; None: any number
    ``nulls``         "error", "mask" (adds a bool ``NAME_mask``, True where there is a value, for each column that is
                      nullable in ``schema``) or ``{column: fill}``; nulls inside a column by path, like
                      ``{"user.age": 0, "tags.element": ""}``
    ``decimals``      None: float64 up to 15 digits, and int64 for whole numbers that fit; others raise UsageError.
                      "float64" (rounded), "unscaled" (int64 at the scale in ``schema``) or "text" for all decimals
    ``ragged``        list columns to keep Ragged even if all their lists have one length
    ``rows``          only these rows, of the snapshot in which they were looked up (None: all); ``filters`` choose
                      among them
    ``split``         a ``Split``: the rows whose key hashes into an interval. A row is in the same part every night and
                      in every layout
    ``sample``        a share of the rows, chosen by ``seed``, for a quick look: complete row groups, or rows of 16
    ``limit``         only the first so many rows, in the order of the files
    ``weights``       how often a row comes in an epoch: a column of numbers, or weights by value, like
                      ``{"label": {0: 1.0, 1: 5.0}}``, or a function of the epoch that returns one of these (None: all
                      rows once). A row of weight 2.3 comes twice, and once more in three of ten epochs
    ``balance``       a column of labels that come equally often, in an epoch of about as many rows as there are
    ``sequence``      a ``Sequence``: samples of several consecutive rows instead of single rows. ``batch_size`` then
                      counts sequences, and columns have one more axis
    ``pack``          a ``Pack``: documents of different lengths in sequences of one length, which ``batch_size`` then
                      counts; only the columns that it names are read. Or ``TokenBatches``: batches of whole documents
                      by their tokens, without a batch_size
    ``snapshot``      the snapshot of a cache to read, by its ID, its number or the name of its pin (None: the current)
    ``as_files``, ``all_files``   which files of a directory are read, as for ``pqcache.sync``
    ``partition_types``   types of partition columns, like ``{"hour": "int"}``, as for ``pqcache.sync``. None: those of
                      the cache; for a directory, whole numbers if all values are written so, else text
    ``source``        the URL of the dataset that ``path`` caches. While the cache has no snapshot, a run that fetches
                      the first one is started, or joined if there is one, and batches come as their row groups arrive.
                      Ignored once there is a snapshot. See docs/loading.md.
    ``source_options``   options of the source's store, such as ``{"endpoint": "http://..."}``
    ``keep_filling``  False: that run ends with this process, and the next one continues it
    ``stall_timeout``   seconds, or text like "5m": if no batch comes for so long, a warning is logged with the stacks
                      and files of the reading threads, and another when it goes on; None: never

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

    A cache that holds one node's share (``pqcache sync --shard``) is opened on every rank, after
    ``init_process_group()``: ranks then belong to their node, and all nodes have the same number of batches. With
    ``num_replicas`` and ``rank`` it is read by itself.

    Raises UsageError for invalid options and for columns that no tensor can hold, and ParquetError for nulls without
    ``nulls`` if the files count them. Missing or damaged files, and nulls that no file counts, raise ParquetError with
    their name while iterating.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        columns: Sequence[str] | None = None,
        *,
        filters: Any = None,
        batch_size: Count | None = DEFAULT_BATCH_SIZE,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        pad: bool = True,
        memory: str | int = "2GB",
        window: Count | None = None,
        lanes: Count | None = None,
        num_replicas: Count | None = None,
        rank: Count | None = None,
        transform: Callable[..., Any] | None = None,
        transform_workers: int | None = None,
        on_error: OnError = "raise",
        max_errors: int | None = MAX_ERRORS,
        nulls: str | Mapping[str, Any] = "error",
        decimals: str | None = None,
        ragged: Sequence[str] = (),
        rows: SelectedRows | None = None,
        split: Split | None = None,
        sample: float | None = None,
        limit: Count | None = None,
        weights: Any = None,
        balance: str | None = None,
        sequence: SequenceOf | None = None,
        pack: Pack | TokenBatches | None = None,
        snapshot: str | None = None,
        as_files: bool = False,
        all_files: bool = False,
        partition_types: Mapping[str, str] | None = None,
        source: str | os.PathLike[str] | None = None,
        source_options: Mapping[str, str] | None = None,
        keep_filling: bool = True,
        stall_timeout: str | float | None = STALL_TIMEOUT,
    ) -> None:
        super().__init__(
            drop_last=drop_last,
            pad=pad,
            lanes=lanes,
            num_replicas=num_replicas,
            rank=rank,
            stall_timeout=stall_timeout,
        )
        batch_rows, row_groups = count_or_none(batch_size), count_or_none(window)
        check_numbers(batch_size=batch_rows, window=row_groups)
        check_seed(seed)
        columns = None if columns is None else parse_names("columns", columns)
        self.options = ReadOptions(
            path=Path(path),
            filters=filters,
            rows=rows,
            choice=RowChoice(
                split=split,
                sample=sample,
                limit=count_or_none(limit),
                weights=weights,
                balance=balance,
                seed=seed,
            ),
            sequence=sequence,
            pack=pack,
            snapshot=snapshot,
            batch_size=1 if isinstance(pack, TokenBatches) else batch_rows,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
            memory=parse_size(memory),
            window=row_groups,
            transform=Transform(
                function=transform, on_error=on_error, max_errors=max_errors, threads=transform_workers
            ),
            conversion=Conversion.of(nulls, decimals),
            ragged=parse_names("ragged", ragged),
            rules=FileRules(as_files=as_files, all_files=all_files, types=parse_types(partition_types)),
            fill=fill_request(source, source_options, keep_filling),
        )
        _check_packing(self.options, columns, batch_rows)
        self._reader = DatasetReader(self.options, columns, share_alone=num_replicas is not None)
        self.readers, self.meter = (self._reader,), self._reader.meter
        self.yields_batches, self.is_shuffled = self.options.batch_size is not None, shuffle
        self.epochs_differ = self._reader.rows is None
        self._can_divide = shuffle and self.yields_batches and self._reader.nodes is None
        check_rank(*self._ranks(), None if self._can_divide or not shuffle else self._lanes)

    def __repr__(self) -> str:
        reader, options = self._reader, self.options
        rows = "rows" if options.sequence is None and options.pack is None else "sequences"
        held = f"{reader.rows:,} {rows}" if reader.rows is not None else f"{rows} that epochs draw"
        columns = format_count(len(reader.schema), "column")
        lanes = "one for each worker of each rank" if self._lanes is None else self._lanes
        about = f"{held}, {columns}, batch_size={options.batch_size}, lanes={lanes}"
        return f"<{type(self).__name__} {options.path} ({reader.snapshot}): {about}>"

    @property
    def schema(self) -> pa.Schema:
        """The Arrow schema, with units and zones of timestamps and scales of decimals."""
        return self._reader.schema

    @property
    def snapshot(self) -> str:
        """The name of the snapshot that is read; for a plain directory, a hash of its files."""
        return self._reader.snapshot

    @property
    def fill(self) -> float | None:
        """With ``pack``, the share of places in sequences, or batches, that hold tokens; else None."""
        return self._reader.fill

    def stats(self) -> DatasetStats:
        """Return the cost of reading in the current epoch and in all, over all threads and workers of this rank.

        Includes how long the trainer waited and what limits it, the memory used, and how much of a first copy has
        arrived. See docs/monitoring.md.
        """
        return self._reader.stats()

    def errors(self) -> list[FailedRow]:
        """Return the rows for which the transform failed in all workers of this rank, with ``on_error="skip"``."""
        return [] if self._reader.failures is None else self._reader.failures.read()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore epoch, next batch, lanes, window and snapshot from ``state``.

        The numbers of ranks and workers may differ. If their product does not divide the lanes of the state, the
        remaining batches come in another sequence; see docs/loading.md.

        A state from the end of an epoch goes on with the next one. Lanes and window come from the state unless you
        chose them here. An older snapshot is opened if it is still kept. Raises UsageError if the state does not fit,
        and CacheError if its snapshot is gone.
        """
        loaded = State.from_dict(state)
        loaded.check_worker()
        loaded.check_options(lanes=self._lanes or loaded.lanes)
        ranks, _ = self._ranks()
        if not self._can_divide and loaded.shuffle and loaded.lanes % ranks:
            reason = f"it has lanes={loaded.lanes}, which {ranks} ranks cannot share"
            raise UsageError("state", reason, "resume on a number of ranks that divides it")
        self._reader.load_state(loaded)
        self._lanes = loaded.lanes
        self._resume(loaded)

    def reader_for_mix(self) -> DatasetReader:
        """The reader, for a mix; UsageError for options that only the mix can decide."""
        if self.options.batch_size is None:
            raise UsageError("batch_size=None", "a mix draws complete batches", "give it a batch_size")
        if self._reader.nodes is not None:
            raise UsageError(self.options.path, "holds a node's share", "a mix needs all of it on every node")
        if self._lanes is not None or self._chosen_ranks is not None:
            raise UsageError("lanes, num_replicas and rank", "give them to the mix instead")
        if callable(self.options.choice.weights):
            raise UsageError("weights", "passes of a mix have one length, and weights of the epoch change it")
        if not self.pad:
            raise UsageError("pad=False", "the mix decides how its ranks end", "give it to the mix instead")
        return self._reader

    def rows_of_batches(self) -> tuple[int, int] | None:
        size, rows = self.options.batch_size, self._reader.rows
        differ = isinstance(self.options.pack, TokenBatches) or self._reader.nodes is not None
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
        return self._reader.state(place, self._ranks()[0], worker)

    def _read(self, share: EpochShare, indices: range, epoch: int) -> Generator[tuple[int, Any]]:
        return self._reader.read(share, indices, epoch, are_sent=sizes_in_worker(self.groups) is not None)


def _check_packing(options: ReadOptions, columns: Sequence[str] | None, batch_size: int | None) -> None:
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
