"""What of a dataset is read, and how."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pqcache.reader.packing.pack import Pack
from pqcache.reader.packing.token_batches import TokenBatches
from pqcache.reader.selection.row_choice import RowChoice
from pqcache.reader.selection.sequences import Sequence as SequenceOf
from pqcache.store.arriving.start_run import FillRequest
from pqcache.store.selected_rows import SelectedRows
from pqcache.store.tables.data_files import FileRules
from pqcache.torch.tensors import Conversion
from pqcache.torch.transforms import Transform


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """What of a dataset is read, and how; see ``ParquetDataset``. ``memory`` is in bytes."""

    path: Path
    filters: Any
    rows: SelectedRows | None
    choice: RowChoice
    sequence: SequenceOf | None
    pack: Pack | TokenBatches | None
    batch_size: int | None
    shuffle: bool
    seed: int
    drop_last: bool
    memory: int
    window: int | None
    transform: Transform
    conversion: Conversion
    ragged: tuple[str, ...]
    rules: FileRules
    fill: FillRequest | None = None
    snapshot: str | None = None
