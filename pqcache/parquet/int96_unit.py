"""The unit that INT96 time stamps are read in, so that no value is lost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.types as pt

from pqcache.errors import ParquetError

_NS_PER_US = 1000
_NS_RANGE_US = (2**63 - 1) // _NS_PER_US


def int96_columns(metadata: pq.FileMetaData) -> list[str]:
    """Return the paths of the columns of INT96 time stamps."""
    columns = (metadata.schema.column(number) for number in range(len(metadata.schema)))
    return [column.path for column in columns if column.physical_type == "INT96"]


def int96_unit(spans: Sequence[tuple[str, bool, bool]]) -> str:
    """Return "us" if that holds every INT96 value, else "ns", given each file's name and `int96_span`.

    Microseconds come first: that is what Spark and Hive mean, and it spans 290,000 years around 1970.

    Raises:
        ParquetError: neither unit holds all values.
    """
    finer = next((name for name, found, _ in spans if found), None)
    farther = next((name for name, _, found in spans if found), None)
    if finer and farther:
        raise ParquetError(
            finer,
            f"has INT96 times finer than a microsecond and {farther} has some outside the "
            "years 1677 to 2262: no 64-bit time holds both",
            "round or repair them at the source",
        )
    return "ns" if finer else "us"


def int96_span(coarse: pq.ParquetFile, fine: pq.ParquetFile, columns: list[str]) -> tuple[bool, bool]:
    """Return whether ``columns`` hold INT96 times that microseconds cannot, and some that nanoseconds cannot hold.

    ``coarse`` and ``fine`` are the same file, opened with INT96 as microseconds and as nanoseconds.
    """
    finer = farther = False
    for one, other in zip(coarse.iter_batches(columns=columns), fine.iter_batches(columns=columns), strict=True):
        for us, ns in zip(_leaf_values(one), _leaf_values(other), strict=True):
            with np.errstate(over="ignore"):  # out of range, both wrap alike
                finer = finer or not np.array_equal(us * _NS_PER_US, ns)
            farther = farther or bool(len(us) and max(us.max(), -us.min()) > _NS_RANGE_US)
    return finer, farther


def _leaf_values(batch: pa.RecordBatch) -> Iterator[npt.NDArray[np.int64]]:
    def leaves(array: pa.Array) -> Iterator[pa.Array]:
        if pt.is_struct(array.type):
            for child in array.flatten():
                yield from leaves(child)
        elif pt.is_map(array.type):
            yield from leaves(array.keys)
            yield from leaves(array.items)
        elif pt.is_nested(array.type):
            yield from leaves(array.flatten())
        elif pt.is_timestamp(array.type):
            yield array

    for column in batch.columns:
        for leaf in leaves(column):
            yield leaf.drop_null().cast(pa.int64()).to_numpy(zero_copy_only=False)
