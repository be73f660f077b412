"""Epochs through every public way to read one, as batches whose rows can be compared, and what has to hold of them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import pyarrow as pa
from torch.utils.data import DataLoader

from pqcache import Cache
from pqcache.torch import Loader, ParquetDataset
from tests.epoch.forms import Nulls, Row, arrow_rows, form_of, tensor_rows
from tests.epoch.tables import INSIDE, Source, fills_of


@dataclass(frozen=True)
class Read:
    """A batch that was read: its number in the epoch and its rows."""

    index: int
    rows: list[Row]

    @staticmethod
    def of(batch: Any) -> Read:
        """Return a batch of tensors."""
        return Read(batch.index, tensor_rows(batch))


@dataclass(frozen=True)
class Reader:
    """A way to read: ``Cache.batches``, or ``ParquetDataset`` by itself, in a DataLoader or in a Loader.

    ``nulls`` is what tensors have where there are nulls: a "mask" beside each column, or a value to "fill" them. With
    "none" they have neither, and the columns may be others than those of the table, as those of packed documents are.
    """

    way: str = "ParquetDataset"
    workers: int = 0
    nulls: str = "fill"

    def __str__(self) -> str:
        return self.way + (f" with {self.workers} workers" if self.workers else "")

    def columns(self, source: Source, wanted: Sequence[str] | None) -> list[str]:
        """Return the columns that are read."""
        names = source.rows.column_names if wanted is None else list(wanted)
        left_out = INSIDE if self.way != "Cache.batches" and self.nulls == "mask" else []
        return [name for name in names if name not in left_out]

    def expected(self, source: Source, columns: Sequence[str]) -> list[Row]:
        """Return the rows of the source as this way to read returns them."""
        return source.rows_in(columns, None if self.way == "Cache.batches" else self._nulls(source, columns))

    def _nulls(self, source: Source, columns: Sequence[str] | None) -> Nulls:
        if self.nulls == "fill":
            return fills_of(source.rows if columns is None else source.rows.select(columns))
        return "error" if self.nulls == "none" else self.nulls

    def _forms(self, source: Source, columns: Sequence[str] | None) -> dict[str, str] | None:
        return None if self.nulls == "none" else source.forms_in(columns, self._nulls(source, columns))

    def read(
        self,
        source: Source,
        columns: Sequence[str] | None,
        *,
        epoch: int = 0,
        ranks: int = 1,
        rank: int = 0,
        state: Mapping[str, Any] | None = None,
        stop: int | None = None,
        **options: Any,
    ) -> tuple[list[Read], dict[str, Any]]:
        """Return the batches of an epoch, or of the rest of one, or of the first ``stop``, and the state after them."""
        if self.way == "Cache.batches":
            return self._read_arrow(source, columns, epoch, ranks, rank, state, stop, options)
        dataset = self.dataset(source, columns, num_replicas=ranks, rank=rank, **options)
        return read_tensors(
            dataset,
            self.way,
            self.workers,
            epoch=epoch,
            state=state,
            stop=stop,
            forms=self._forms(source, columns),
        )

    def epochs(self, source: Source, columns: Sequence[str] | None, count: int, **options: Any) -> list[list[Read]]:
        """Return the batches of the first epochs."""
        if self.way == "Cache.batches":
            return [self.read(source, columns, epoch=epoch, **options)[0] for epoch in range(count)]
        dataset = self.dataset(source, columns, **options)
        forms, found = self._forms(source, columns), []
        for epoch in range(count):
            found.append(read_tensors(dataset, self.way, self.workers, epoch=epoch, forms=forms)[0])
            assert len(dataset) == len(found[-1]) == dataset.batches_of(epoch)
        return found

    def dataset(self, source: Source, columns: Sequence[str] | None, **options: Any) -> ParquetDataset:
        """Return the dataset that is read."""
        return ParquetDataset(source.path, columns, nulls=self._nulls(source, columns), **options)

    def _read_arrow(
        self,
        source: Source,
        columns: Sequence[str] | None,
        epoch: int,
        ranks: int,
        rank: int,
        state: Mapping[str, Any] | None,
        stop: int | None,
        options: dict[str, Any],
    ) -> tuple[list[Read], dict[str, Any]]:
        epoch, start = (epoch, 0) if state is None else (state["epoch"], state["batch"])
        batches = Cache.open(source.path).batches(
            columns, epoch=epoch, num_replicas=ranks, rank=rank, start=start, **options
        )
        schema = pa.schema([source.rows.schema.field(name) for name in columns or source.rows.column_names])
        found, index = [], start + (rank - start) % ranks
        for batch in islice(batches, stop):
            batch.validate(full=True)
            assert self.nulls == "none" or batch.schema.equals(schema), (batch.schema, schema)
            found.append(Read(index, arrow_rows(batch)))
            index += ranks
        batches.close()
        return found, {"epoch": epoch, "batch": start + len(found) * ranks}


def read_tensors(
    dataset: Any,
    way: str,
    workers: int = 0,
    *,
    epoch: int = 0,
    state: Mapping[str, Any] | None = None,
    stop: int | None = None,
    forms: Mapping[str, str] | None = None,
) -> tuple[list[Read], dict[str, Any]]:
    """Return the batches of a ParquetDataset or a Mix, each with columns of these forms, and the state after them.

    There is no such state of a DataLoader with workers.
    """
    if way == "Loader":
        loader: Any = Loader(dataset, num_workers=workers)
    else:
        loader = dataset if way == "ParquetDataset" else DataLoader(dataset, batch_size=None, num_workers=workers)
    place = loader if way == "Loader" else dataset
    if epoch:
        place.set_epoch(epoch)
    if state is not None:
        place.load_state_dict(json.loads(json.dumps(state)))
    if stop == 0:
        return [], place.state_dict()
    found, batch = [], None
    with ending_workers(loader):
        for batch in loader:
            if forms is not None:
                assert {name: form_of(column) for name, column in batch.items()} == forms
            found.append(Read.of(batch))
            if len(found) == stop:
                break
    if way == "Loader" or batch is None:
        return found, place.state_dict()
    return found, {} if way == "DataLoader" and workers else dataset.state_dict(after=batch)


@contextmanager
def ending_workers(loader: Any) -> Iterator[None]:
    """End the workers of a loader: torch waits for seconds where the collection of garbage does it after an error."""
    try:
        yield
    finally:
        if getattr(loader, "_iterator", None) is not None:
            loader._iterator._shutdown_workers()


def differences(found: Iterable[Row], expected: Iterable[Row]) -> str:
    """Say how the rows of an epoch differ from those expected; empty where they are the same, each as often."""
    one, two = Counter(found), Counter(expected)
    if one == two:
        return ""
    extra, missing = list((one - two).elements()), list((two - one).elements())
    text = f"{len(extra)} rows too many, {len(missing)} are missing"
    if extra and missing:
        near = min(missing, key=lambda row: sum(a != b for a, b in zip(row, extra[0], strict=False)))
        cells = [(at, a, b) for at, (a, b) in enumerate(zip(extra[0], near, strict=False)) if a != b]
        text += f"; of one that is nearly there: column, found and expected {cells[:3]}"
    return text


@dataclass
class Parts:
    """What ranks have read of one epoch, one run after another."""

    whole: list[Read]  # what one rank reads that is not interrupted
    seen: dict[int, int] = field(default_factory=dict)  # how often the batch of a number has come

    def add(self, ranks: Sequence[Sequence[Read]], *, uneven: bool = False) -> None:
        """Check that ranks have read batches of the epoch, equally many."""
        counts = {len(batches) for batches in ranks}
        assert max(counts) - min(counts) <= uneven, counts
        for batch in (batch for batches in ranks for batch in batches):
            assert batch.rows == self.whole[batch.index % len(self.whole)].rows, batch.index
            self.seen[batch.index] = self.seen.get(batch.index, 0) + 1

    def check(self, ranks: int, *, drop_last: bool = False, pad: bool = True) -> None:
        """Check that each batch has come once, when the last run was of ``ranks`` ranks."""
        assert set(self.seen.values()) <= {1}
        missing = set(range(len(self.whole))) - self.seen.keys()
        again = self.seen.keys() - set(range(len(self.whole)))
        assert len(missing) < (ranks if drop_last else 1), sorted(missing)
        assert len(again) < (ranks if pad and not drop_last else 1), sorted(again)
