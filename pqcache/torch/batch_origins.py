"""Finds the dataset that a batch was read from, in the process that uses the batch."""

from __future__ import annotations

import secrets
import weakref
from typing import Any, Protocol

from pqcache.errors import UsageError
from pqcache.reader.batch_rows import RowPlaces
from pqcache.reader.meter import NO_METER, Meter


class RowsAt(Protocol):
    """What can say which rows the batch at a position has; ``token`` is its present number."""

    token: int

    @property
    def meter(self) -> Meter:
        """What counts for this dataset."""

    def rows_at(self, position: Any) -> RowPlaces:
        """Return the rows of a batch of this dataset."""


_known: weakref.WeakValueDictionary[int, RowsAt] = weakref.WeakValueDictionary()


def register(dataset: RowsAt, token: int = 0) -> int:
    """Return a number by which a batch names its dataset; ``token`` is that of the dataset which this is a copy of.

    A copy in another process keeps the number, so that batches of a worker find the trainer's dataset.
    """
    if not token or token in _known:
        token = secrets.randbits(63)
    _known[token] = dataset
    return token


def meter_of(position: Any) -> Meter:
    """Return what counts for the dataset of the batch at a `Position`; nothing does where it is not known any more."""
    dataset = _known.get(position.dataset)
    return NO_METER if dataset is None else dataset.meter


def rows_at(position: Any) -> RowPlaces:
    """Return the rows of the batch at a `Position`; UsageError where its dataset is not known any more."""
    dataset = _known.get(position.dataset)
    if dataset is None or dataset.token != position.dataset:
        raise UsageError(
            "batch.rows()",
            "the dataset that it was read from is gone, or has loaded another snapshot since",
            "keep the dataset, or call rows_of(batch.epoch, batch.index) of one that is made alike",
        )
    return dataset.rows_at(position)
