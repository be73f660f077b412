"""Refuses footers whose counts and sizes contradict one another: pyarrow would read only some of the rows, or too many.

The rows of a file are those of its row groups. A column without lists has as many values as its row group has rows, and
one with lists at least as many. No column chunk reaches beyond the file, and none holds more values than pages of its
size can. What old writers do is not refused: they leave out fields that are not required, and the sizes of some chunks
are too small (PARQUET-816).
"""

from __future__ import annotations

_PAGE_VALUES_BITS = 31  # of a page's number of values
_PAGE_HEADER = 16  # bytes, at least


class FooterCounts:
    """Takes what a footer says of each column chunk, row group and the file, and raises ValueError if it cannot be.

    ``size`` is the file's, None where it is not known.
    """

    def __init__(self, size: int | None) -> None:
        self._size = size
        self._groups = self._rows = 0
        self._values: dict[tuple[int, bool], str] = {}  # the first column of the row group with so many, flat or not

    def add_chunk(self, path: str, flat: bool, values: int, size: int, data: int, dictionary: int) -> None:
        """Add a chunk of the column ``path``, whose pages begin at ``data``, or before that with a ``dictionary``.

        ``flat`` says that the column has no lists.
        """
        end = size + (dictionary if 0 < dictionary < data else data)  # 0 and -1 also mean that there is none
        if self._size is not None and end > self._size and values:
            raise ValueError(
                f"column {path} of row group {self._groups} ends at byte {end:,} of a file of {self._size:,} bytes"
            )
        if values >> _PAGE_VALUES_BITS > size // _PAGE_HEADER:
            raise ValueError(f"column {path} of row group {self._groups} has {values:,} values in {size:,} bytes")
        self._values.setdefault((values, flat), path)

    def end_row_group(self, rows: int) -> None:
        """Compare the columns added since the last row group with its number of rows."""
        if rows < 0:
            raise ValueError(f"row group {self._groups} has {rows:,} rows")
        for (values, flat), path in self._values.items():
            if values != rows and (flat or values < rows or not rows):
                raise ValueError(f"row group {self._groups} has {rows:,} rows, its column {path} {values:,} values")
        self._values.clear()
        self._groups += 1
        self._rows += rows

    def end_file(self, rows: int) -> None:
        """Compare the row groups with the number of rows of the file."""
        if rows != self._rows:
            raise ValueError(f"the file has {rows:,} rows, its row groups {self._rows:,}")
