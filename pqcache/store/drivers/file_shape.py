"""What a table makes of one of its files: which columns it reads under which names, and which rows are deleted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pqcache.parquet.column_mapping import TableColumn

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from pqcache.store.drivers.base import Source


@dataclass(frozen=True, kw_only=True)
class FileShape:
    """How a file is read as a part of its table.

    Attributes:
        columns: the table's columns as files know them; None where a file has just the table's names.
        deleted_rows: returns the positions of the rows in the file that are deleted, ascending; raises SourceError.
            None where no row is.
    """

    columns: tuple[TableColumn, ...] | None = None
    deleted_rows: Callable[[], npt.NDArray[np.int64]] | None = None


def shape_of(source: Source | None, path: str) -> FileShape | None:
    """Return what the table that ``source`` is makes of a file; None for a file that is taken as it is."""
    shape: Callable[[str], FileShape | None] | None = getattr(source, "shape_of", None)
    return None if shape is None else shape(path)
