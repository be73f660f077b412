"""Values in place of nulls, put into a column when it is decoded: once for all batches that its rows go to."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pqcache.reader.columns.column_data import ColumnData, are_empty
from pqcache.reader.columns.row_views import take_views
from pqcache.system.buffer_pool import BufferPool

Fill = npt.NDArray[Any] | bytes  # a number of the column's dtype, or a text's bytes


def fill_nulls(column: ColumnData, fill: Fill, memory: BufferPool) -> ColumnData:
    """Return a column of numbers or texts with ``fill`` in place of its nulls; numbers are written to ``memory``."""
    values, valid = column.values, column.valid
    if valid is None:
        return column
    if isinstance(fill, bytes):
        if not fill and are_empty(column, ~valid):
            return ColumnData(column.form, values)
        views = pa.concat_arrays([values, pa.array([fill], pa.binary_view())])
        return ColumnData(column.form, take_views(views, np.where(valid, np.arange(len(values)), len(values))))
    found = memory.borrow(values.nbytes).view(values.dtype)
    np.copyto(found, values)
    np.copyto(found, fill.view(values.dtype), where=~valid)
    return ColumnData(column.form, found)
