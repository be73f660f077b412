"""Reads row groups of local files as columns, from any thread; every error names the file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pqcache.errors import ParquetError, first_line
from pqcache.reader.columns import Column, Form, NotConstant, cut, hold
from pqcache.reader.order import Ints

_FOOTERS = 256  # per process; parsing one again costs a millisecond or two


@dataclass
class RowGroups:
    """The row groups that an epoch reads, by number: ``file`` and ``row_group`` say where each one is,
    ``offset`` and ``size`` which bytes of its file it takes.

    ``forms`` are the columns to read from the files. With a ``piece`` only the rows asked for are decoded, and
    those before them, that many at a time. A file's number is its position in ``paths``.
    """

    root: Path
    paths: Sequence[str]
    file: Ints
    row_group: Ints
    rows: Ints
    offset: Ints
    size: Ints
    forms: Sequence[Form]
    piece: int = 0
    _footers: dict[int, pq.FileMetaData] = field(default_factory=dict)  # without a lock: a fork may come

    def read(self, group: int, low: int, high: int) -> list[Column]:
        """Return rows ``low <= row < high`` of a row group, one column for each form.

        A column that the file lacks is null in all rows; one of another type is cast. A file that is gone,
        damaged or not what was indexed raises ParquetError.
        """
        if not self.forms:
            return []
        number = int(self.file[group])
        path = self.root / self.paths[number]
        try:
            with self._open(number, path) as file:
                present = file.schema_arrow.names
                wanted = [form.name for form in self.forms if form.name in present]
                if len(wanted) == len(present):
                    self._read_ahead(group, path)
                table = self._read(file, group, wanted, low, high)
        except FileNotFoundError as error:
            raise ParquetError(f"{path}: the file is gone; open the dataset again") from error
        except (pa.ArrowException, OSError, IndexError) as error:
            raise self._damaged(path, group, error) from error
        whole = not self.piece
        if wanted and table.num_rows != (self.rows[group] if whole else high - low):
            raise ParquetError(
                f"{path}: row group {self.row_group[group]} has {table.num_rows} rows where the index has "
                f"{self.rows[group]}; the file was replaced while in use: open the dataset again"
            )
        if not whole:
            low, high = 0, high - low
        return [self._column(path, table, form, group, low, high) for form in self.forms]

    def _read(self, file: pq.ParquetFile, group: int, wanted: list[str], low: int, high: int) -> pa.Table:
        """Return a whole row group, or only the rows asked for where row groups are read in pieces.

        Parquet cannot begin in the middle: what comes before a piece is decoded and dropped.
        """
        number = int(self.row_group[group])
        if not self.piece:
            return file.read_row_group(number, columns=wanted, use_threads=False)
        found, at = [], 0
        for batch in file.iter_batches(self.piece, [number], wanted, use_threads=False):
            first, past = max(low - at, 0), min(high - at, batch.num_rows)
            if first < past:
                found.append(batch.slice(first, past - first))
            at += batch.num_rows
            if at >= high:
                break
        return pa.Table.from_batches(found, schema=None if found else pa.schema([]))

    def _column(self, path: Path, table: pa.Table, form: Form, group: int, low: int, high: int) -> Column:
        where = table.schema.get_all_field_indices(form.name)
        if not where:
            return hold(pa.nulls(high - low, form.type if form.stored is None else pa.binary(form.stored.width)), form)
        try:
            column = hold(table.column(where[0]), form)
        except NotConstant as error:
            raise ParquetError(
                f"{path}: column {form.name!r} has {error} in row group {self.row_group[group]}, where the "
                f"rest of the dataset has lists of {form.dense}; pass ragged=[{form.name!r}]"
            ) from error
        except (pa.ArrowException, OverflowError) as error:
            raise ParquetError(
                f"{path}: column {form.name!r} cannot be read as {form.type} ({error}); "
                "rewrite the file with the dataset's types"
            ) from error
        return cut(column, low, high) if (low, high) != (0, len(column)) else column

    def _open(self, number: int, path: Path) -> pq.ParquetFile:
        """Open a file for one row group, mapped into memory; its footer is parsed once.

        Mapping saves a copy of what is read, and closing at once keeps the pages of other row groups from
        being counted as this process's memory.
        """
        footer = self._footers.get(number)
        try:
            file = pq.ParquetFile(path, metadata=footer, memory_map=True)
        except FileNotFoundError:
            raise
        except OSError:  # a file system that cannot map
            file = pq.ParquetFile(path, metadata=footer)
        if footer is None:
            if len(self._footers) >= _FOOTERS:
                self._footers.clear()
            self._footers[number] = file.metadata
        return file

    def _read_ahead(self, group: int, path: Path) -> None:
        """Ask the kernel for a whole row group at once, as page by page a cold disk is slow."""
        if not hasattr(os, "posix_fadvise"):
            return
        file = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(file, int(self.offset[group]), int(self.size[group]), os.POSIX_FADV_WILLNEED)
        finally:
            os.close(file)

    def _damaged(self, path: Path, group: int, error: BaseException) -> ParquetError:
        return ParquetError(
            f"{path}: row group {self.row_group[group]} cannot be read ({first_line(error)}); "
            "the file is damaged or was replaced: sync again, or write it again"
        )


def file_numbers(file: int, rows: int) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    """Return the hidden column from which partition columns are looked up."""
    return np.full(rows, file, np.uint32)
