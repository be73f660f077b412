"""The options of an epoch: rows, order and ranks.

Those of ``ParquetDataset`` alone are in pqcache.torch.dataset_options.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypedDict

from pqcache.errors import UsageError
from pqcache.options import ANY, COUNT, LIST, NUMBER, PAIRS, SIZE, TRUTH, WORD, python
from pqcache.reader.order import check_rank
from pqcache.reader.packing import Pack, TokenBatches, check_pack
from pqcache.reader.selection.sequences import Sequence as SequenceOf
from pqcache.reader.selection.split import Split
from pqcache.reader.selection.weights import check_weights
from pqcache.store.background_run import FillRequest, fill_request
from pqcache.store.key_lookup import SelectedRows
from pqcache.store.partition_paths import parse_types
from pqcache.store.tables.data_files import FileRules

WINDOW = 16  # row groups, where memory allows
WINDOW_OF_ALL = 32  # row groups, where memory holds all rows; more of them take long to gather


@dataclass(frozen=True, kw_only=True)
class RowOptions:
    """The rows of an epoch, how often each comes, and how several are combined."""

    filters: Any = python(
        None,
        ANY,
        "A condition on any columns: SQL text, a list as pandas takes it, like "
        '[("dt", ">=", "2026-11-01"), ("label", "in", [1, 2])], or a pyarrow expression. If the index does not '
        "decide it, the condition's columns are read now to count the rows, and the counts are stored with the "
        "snapshot. On nulls see docs/loading.md.",
    )
    rows: SelectedRows | None = python(
        None,
        ANY,
        "Only these rows, as returned by Cache.lookup, in the snapshot in which they were looked up. filters choose "
        "among them.",
    )
    since: Any = python(
        None,
        ANY,
        "Only the files that are new since an older snapshot of the cache, named by ID, number, pin or a state: those "
        "made from a source file that it lacks, whole. See docs/new-data.md.",
    )
    exclude: Any = python(
        None,
        ANY,
        "Rows that are left out, from a state that is loaded on: what pqcache.rows or Cache.lookup return, values by "
        'column like {"user_id": [17]}, the path of a file, or a list of these. See docs/loading.md.',
    )
    split: Split | None = python(
        None,
        ANY,
        "A Split: the rows whose key hashes into an interval. A row is in the same part every night and in every "
        "layout.",
    )
    sample: float | None = python(
        None,
        NUMBER,
        "A share of the rows, chosen by seed, for a quick look: whole row groups, or some rows of each of 16 where "
        "that would be fewer.",
    )
    limit: int | None = python(None, COUNT, "Only this many rows, the first in file order.", low=1)
    weights: Any = python(
        None,
        ANY,
        "How often a row comes in an epoch: a column of numbers, or weights by value, like "
        '{"label": {0: 1.0, 1: 5.0}}, or a function of the epoch that returns one of these. A row of weight 2.3 comes '
        "twice, and once more in three of ten epochs.",
    )
    balance: str | None = python(
        None, ANY, "A column of labels that come equally often, in an epoch of about as many rows as there are."
    )
    sequence: SequenceOf | None = python(
        None,
        ANY,
        "A Sequence: samples of several consecutive rows instead of single rows. batch_size then counts sequences, and "
        "columns have one more axis.",
    )
    pack: Pack | TokenBatches | None = python(
        None,
        ANY,
        "A Pack: documents of different lengths in sequences of one length, which batch_size then counts; only the "
        "columns that it names are read. Or TokenBatches: batches of whole documents by their tokens, without a "
        "batch_size.",
    )

    def __post_init__(self) -> None:
        if self.split is not None and not isinstance(self.split, Split):
            raise UsageError(f"split={self.split!r}", 'give a Split, like Split("user_id", 0.0, 0.9)')
        if self.sample is not None and not 0 < self.sample <= 1:
            raise UsageError(
                f"sample={self.sample!r}", "give a number above 0, up to 1", "0.01 is one row of a hundred"
            )
        check_weights(self.weights, self.balance)
        if self.sequence is not None:
            self._check_sequence()

    def _check_sequence(self) -> None:
        if not isinstance(self.sequence, SequenceOf):
            raise UsageError(f"sequence={self.sequence!r}", "give a Sequence, like Sequence(3, order_by='ts')")
        if self.has_weights:
            raise UsageError("weights and sequence", "a sequence has no weight", "leave one of them out")
        if self.sample is not None or self.limit is not None:
            reason = "both would leave out rows in the middle of sequences"
            raise UsageError("sample, limit and sequence", reason, "choose partitions with filters=")

    def check_pack(self, columns: Sequence[str] | None) -> None:
        """Raise UsageError for a ``pack`` that is invalid or conflicts with other options or ``columns``."""
        if self.pack is not None:
            has_sequence = self.sequence is not None
            check_pack(self.pack, columns=columns, has_sequence=has_sequence, has_weights=self.has_weights)

    @property
    def has_weights(self) -> bool:
        """Whether rows may come more than once, or not in every epoch."""
        return self.weights is not None or self.balance is not None


@dataclass(frozen=True, kw_only=True)
class ReadOptions(RowOptions):
    """Which columns and rows are read, and the batch size."""

    columns: tuple[str, ...] | None = python(
        None, LIST, "Names of columns; partition columns are columns. Default: all."
    )
    batch_size: int | None = python(4096, COUNT, "Rows of a batch.", low=1)
    shuffle: bool = python(True, TRUTH, "False keeps the rows in file order.")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_pack(self.columns)
        if isinstance(self.pack, TokenBatches) and self.batch_size != type(self).batch_size:
            reason = "tokens_per_batch= says how large batches are"
            raise UsageError(f"batch_size={self.batch_size}", reason, "leave it out")

    @property
    def size_in_order(self) -> int | None:
        """The batch size of the order and of states: 1 for batches by tokens, which the order treats as rows."""
        return 1 if isinstance(self.pack, TokenBatches) else self.batch_size


@dataclass(frozen=True, kw_only=True)
class OrderOptions:
    """The order of an epoch, and how ranks divide it."""

    seed: int = python(0, COUNT, "Selects the order, with the epoch.")
    drop_last: bool = python(
        False,
        TRUTH,
        "False: the last batch may be short, and ranks are made equal by repeating the epoch's first batches. True: "
        "the incomplete batches are dropped.",
    )
    lanes: int | None = python(
        None,
        COUNT,
        "Independent streams of batches. Fix it to a common multiple to get the same batches whatever the number of "
        "ranks and workers. Default: one for each worker of each rank.",
        low=1,
    )
    num_replicas: int | None = python(
        None,
        COUNT,
        "The number of ranks. Default: that of torch.distributed (for Cache.batches also of JAX) if it is initialised, "
        "else 1. A process that torchrun, srun or mpirun started as one of several needs one of the two.",
        low=1,
    )
    rank: int | None = python(
        None, COUNT, "This rank, from 0 on. It reads batches rank, rank + num_replicas and so on."
    )


@dataclass(frozen=True, kw_only=True)
class EpochOptions(OrderOptions, ReadOptions):
    """How the epochs of a dataset are read: rows, order, memory, and the snapshot."""

    memory: int | None = python(
        2 << 30, SIZE, "Bytes for the decoded row groups of this rank, all its workers together."
    )
    window: int | None = python(
        None,
        COUNT,
        f"Row groups that each lane mixes at a time. Default: as many as memory allows, at most {WINDOW}, or "
        f"{WINDOW_OF_ALL} if it holds all rows.",
        low=1,
    )
    snapshot: str | None = python(
        None,
        WORD,
        "The snapshot of a cache, by its ID, its number or the name of its pin. Default: the current one.",
    )
    partition_types: Mapping[str, str] | None = python(
        None,
        PAIRS,
        'Types of partition columns, like {"hour": "int"}, as for pqcache.sync. Default: those of the cache; for a '
        "directory, whole numbers if all values are written so, else text.",
    )
    source: str | os.PathLike[str] | None = python(
        None,
        ANY,
        "The URL of the dataset that the cache copies. While the cache has no snapshot, a run that fetches the "
        "first one is started, or joined if there is one, and batches come as their row groups arrive. Ignored once "
        "there is a snapshot. See docs/partial-copies.md.",
    )
    source_options: Mapping[str, str] | None = python(
        None, ANY, 'Options of the source\'s store, such as {"endpoint": "http://..."}.', is_secret=True
    )
    keep_filling: bool = python(True, TRUTH, "False: that run ends with this process, and the next one continues it.")

    def __post_init__(self) -> None:
        ReadOptions.__post_init__(self)
        _ = self.fill, self.rules  # made now, as they refuse what makes no sense

    @cached_property
    def fill(self) -> FillRequest | None:
        """The request for a run if there is nothing to read yet."""
        return fill_request(self.source, self.source_options, self.keep_filling)

    @cached_property
    def rules(self) -> FileRules:
        """Which files are read if the dataset is a plain directory."""
        return FileRules(types=parse_types(self.partition_types))

    @property
    def snapshot_read(self) -> str | None:
        """The chosen snapshot, else the one of ``rows``; None for the current one."""
        return self.snapshot or getattr(self.rows, "snapshot", "") or None


@dataclass(frozen=True, kw_only=True)
class BatchOptions(EpochOptions):
    """One epoch as ``Cache.batches`` reads it.

    Attributes:
        workers: the number of DataLoader workers that divide this process's part; this one is number ``worker``.
        compares: whether the ranks of torch.distributed check that they begin alike.
    """

    epoch: int = python(0, COUNT, "Chooses the order, with seed; the same two give the same order again.", low=0)
    start: int = python(
        0,
        COUNT,
        "The number of the first batch that is wanted, counted over all ranks: to resume where a run stopped, also "
        "with another num_replicas that divides lanes.",
        low=0,
    )
    workers: int = 1
    worker: int = 0
    compares: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_rank(self.ranks, self.rank or 0, self.lanes if self.shuffle else None)
        if getattr(self.pack, "ids", ()) == ("cu_seqlens",):
            reason = "it has no value for each sequence, so it is no column of a record batch"
            raise UsageError("cu_seqlens", reason, "name position_ids in ids=: documents begin where they are 0")

    @property
    def ranks(self) -> int:
        return self.num_replicas or 1

    @property
    def all_lanes(self) -> int:
        """The lanes of all ranks."""
        return self.lanes or self.ranks * self.workers


# what type checkers know of the options that functions take as keywords


class OrderArguments(TypedDict, total=False):
    seed: int | str
    drop_last: bool
    lanes: int | str | None
    num_replicas: int | str | None
    rank: int | str | None


class RowArguments(TypedDict, total=False):
    filters: Any
    rows: SelectedRows | None
    since: Any
    exclude: Any
    split: Split | None
    sample: float | None
    limit: int | str | None
    weights: Any
    balance: str | None
    sequence: SequenceOf | None
    pack: Pack | TokenBatches | None


class EpochArguments(RowArguments, OrderArguments, total=False):
    shuffle: bool
    memory: str | int
    window: int | str | None
    snapshot: str | int | None
    partition_types: Mapping[str, str] | None
    source: str | os.PathLike[str] | None
    source_options: Mapping[str, str] | None
    keep_filling: bool


class BatchArguments(EpochArguments, total=False):
    batch_size: int | str
    epoch: int | str
    start: int | str
