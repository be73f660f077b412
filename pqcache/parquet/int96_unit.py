"""The unit that INT96 time stamps are read in, so that no value is lost."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pqcache.errors import ParquetError
from pqcache.parquet.nested import leaves_of

_NS_PER_US = 1000
_US_PER_DAY = 86_400_000_000
_UNIX_DAY = 2_440_588  # the Julian day of 1970-01-01
_NS_RANGE_US = (2**63 - 1) // _NS_PER_US
_MAX_DAYS = (2**63 - 1) // _US_PER_DAY - 106_752  # from 1970; no time of day is longer than the days left out
UNREADABLE = "holds INT96 times of Julian day 0 or after the year 290,000, which readers take for different times"
REPAIR = "repair them at the source"
_STORED = np.dtype([("nanoseconds", "<i8"), ("day", "<u4")])


@dataclass(frozen=True, kw_only=True)
class Int96Values:
    """What is among some INT96 times.

    Attributes:
        finer: some that microseconds cannot hold.
        farther: some that nanoseconds cannot hold: outside the years 1677 to 2262.
        unreadable: some that pyarrow reads as other times in any unit: those of Julian day 0 become 1970-01-01, and
            those beyond the year 290,000 wrap.
    """

    finer: bool = False
    farther: bool = False
    unreadable: bool = False


def int96_leaves(metadata: pq.FileMetaData) -> list[int]:
    """Return the leaf columns of INT96 time stamps."""
    schema = metadata.schema
    return [number for number in range(len(schema)) if schema.column(number).physical_type == "INT96"]


def int96_unit(found: Sequence[tuple[str, Int96Values]]) -> str:
    """Return "us" if that holds every INT96 value, else "ns", given each file's name and what is in it.

    Microseconds come first: that is what Spark and Hive mean, and it spans 290,000 years around 1970.

    Raises:
        ParquetError: neither unit holds all values.
    """
    unreadable = next((name for name, values in found if values.unreadable), None)
    if unreadable is not None:
        raise ParquetError(unreadable, UNREADABLE, REPAIR)
    finer = next((name for name, values in found if values.finer), None)
    farther = next((name for name, values in found if values.farther), None)
    if finer and farther:
        raise ParquetError(
            finer,
            f"has INT96 times finer than a microsecond and {farther} has some outside the "
            "years 1677 to 2262: no 64-bit time holds both",
            "round or repair them at the source",
        )
    return "ns" if finer else "us"


def int96_values(batches: Iterable[pa.RecordBatch]) -> Int96Values:
    """Return what is among the INT96 times in ``batches``, of columns that are read as their stored bytes."""
    finer = farther = unreadable = False
    for batch in batches:
        for leaf in _stored_times(batch):
            stored = np.frombuffer(leaf.buffers()[1] or b"", _STORED, len(leaf), leaf.offset * _STORED.itemsize)
            days = stored["day"].astype(np.int64) - _UNIX_DAY
            far = np.abs(days) > _MAX_DAYS
            us = np.where(far, 0, days) * _US_PER_DAY + stored["nanoseconds"] // _NS_PER_US
            finer = finer or bool((stored["nanoseconds"] % _NS_PER_US).any())
            farther = farther or bool((np.abs(us) > _NS_RANGE_US).any() or far.any())
            unreadable = unreadable or bool(far.any() or (stored["day"] == 0).any())
    return Int96Values(finer=finer, farther=farther, unreadable=unreadable)


def _stored_times(batch: pa.RecordBatch) -> Iterator[pa.Array]:
    for leaf in chain.from_iterable(map(leaves_of, batch.columns)):
        if leaf.type == pa.binary(_STORED.itemsize):
            yield leaf.drop_null()
