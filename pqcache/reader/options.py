"""The options of an epoch that is read without torch, and the checks that the loader's options go through too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pqcache.errors import UsageError
from pqcache.reader.packing.pack import Pack, TokenBatches, check_batch_size, check_pack
from pqcache.reader.selection.row_choice import RowChoice
from pqcache.reader.selection.sequences import Sequence as SequenceOf
from pqcache.store.arriving.start_run import FillRequest
from pqcache.store.selected_rows import SelectedRows
from pqcache.units import parse_names

BATCH_SIZE = 4096  # where none is given


def check_numbers(**numbers: int | None) -> None:
    """Raise UsageError for a number that is neither None nor an integer of at least 1."""
    for name, value in numbers.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise UsageError(f"{name}={value!r}", "give a whole number of at least 1")


def check_seed(seed: int) -> None:
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise UsageError(f"seed={seed!r}", "give a whole number")


def check_rank(num_replicas: int, rank: int, lanes: int | None) -> None:
    """Raise UsageError for a rank out of range, or if ``num_replicas`` does not divide the lanes (None: any)."""
    if not 0 <= rank < num_replicas:
        raise UsageError(f"rank={rank}", f"with num_replicas={num_replicas!r} it must be from 0 to {num_replicas - 1}")
    if lanes is not None and lanes % num_replicas:
        raise UsageError(f"lanes={lanes}", f"cannot be shared by num_replicas={num_replicas!r}", "choose a multiple")


@dataclass(frozen=True, kw_only=True)
class EpochOptions:
    """Which rows the epochs of a dataset have, in which order, and within how much memory."""

    filters: Any = None
    rows: SelectedRows | None = None
    choice: RowChoice = field(default_factory=RowChoice)
    sequence: SequenceOf | None = None
    pack: Pack | TokenBatches | None = None
    batch_size: int | None = BATCH_SIZE  # None: single rows
    shuffle: bool = True
    seed: int = 0
    drop_last: bool = False
    memory: int | None = 2 << 30  # bytes; None: nothing is refused or held back for it
    window: int | None = None  # None: what fits into the memory
    snapshot: str | None = None
    fill: FillRequest | None = None

    @property
    def snapshot_read(self) -> str | None:
        """The chosen snapshot, else that of ``rows``; None for the current one."""
        return self.snapshot or getattr(self.rows, "snapshot", "") or None


@dataclass(frozen=True, kw_only=True)
class BatchOptions(EpochOptions):
    """One epoch without torch; ``Cache.batches`` says what each option is.

    Options that make no sense raise UsageError.
    """

    columns: Sequence[str] | None = None
    epoch: int = 0
    lanes: int | None = None
    num_replicas: int = 1
    rank: int = 0
    workers: int = 1
    worker: int = 0
    compares: bool = False  # with the other ranks of torch.distributed, that all begin alike
    start: int = 0

    def __post_init__(self) -> None:
        if self.columns is not None:
            object.__setattr__(self, "columns", parse_names("columns", self.columns))
        check_seed(self.seed)
        check_numbers(batch_size=self.batch_size, window=self.window, lanes=self.lanes)
        check_rank(self.num_replicas, self.rank, self.lanes if self.shuffle else None)
        if isinstance(self.epoch, bool) or self.epoch < 0 or self.start < 0:
            raise UsageError(f"epoch={self.epoch}, start={self.start}", "both count from 0")
        if self.pack is not None:
            weighs = self.choice.has_weights
            check_pack(self.pack, columns=self.columns, has_sequence=self.sequence is not None, has_weights=weighs)
            check_batch_size(self.pack, self.batch_size, BATCH_SIZE)
            if getattr(self.pack, "ids", ()) == ("cu_seqlens",):
                reason = "it has no value for each sequence, so it is no column of a record batch"
                raise UsageError("cu_seqlens", reason, "name position_ids in ids=: documents begin where they are 0")

    @property
    def all_lanes(self) -> int:
        """The lanes of all ranks."""
        return self.lanes or self.num_replicas * self.workers
