"""Reads row groups of local files as columns, from any thread; every error names the file."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pqcache.errors import ParquetError, first_line
from pqcache.parquet.footer import read_footer
from pqcache.parquet.footer_validation import check_footer
from pqcache.parquet.pages.long_values import views_of
from pqcache.parquet.pages.page_reader import Leaf, Reader, leaf_of
from pqcache.parquet.schema_merge import is_text
from pqcache.reader.batch_layout import LONG
from pqcache.reader.columns import (
    Column,
    Form,
    NotConstant,
    as_rows,
    compact,
    cut,
    hold,
    storage_type,
    take,
)
from pqcache.reader.order.order import Ints
from pqcache.system.buffer_pool import Arena, BufferPool

Choose = Callable[[Iterable[pa.Table]], Ints]

_BUFFER = 1 << 16  # bytes
_FOOTERS = 256  # per process; parsing one again costs a millisecond or two


def cpu_count() -> int:
    """Return the number of cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def release_unused() -> None:
    """Give memory that Arrow holds for nobody back to the system."""
    pa.default_memory_pool().release_unused()


@dataclass(kw_only=True)
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
    memory: BufferPool = field(default_factory=BufferPool)
    _footers: dict[int, pq.FileMetaData] = field(default_factory=dict)  # without a lock: a fork may come
    _leaves: dict[int, list[tuple[Form, Leaf]]] = field(default_factory=dict)

    @cached_property
    def _pages(self) -> Reader:
        return Reader(self.memory)

    def read(self, group: int, low: int, high: int, arenas: Mapping[str, Arena] = {}) -> list[Column]:
        """Return rows ``low <= row < high`` of a row group, one column for each form.

        ``arenas`` are where the rows of some columns go, if they can be read page by page.
        A column that the file lacks is null in all rows; one of another type is cast. A file that is gone,
        damaged or not what was indexed raises ParquetError.
        """
        if not self.forms:
            return []
        with self._opened(group) as (file, path):
            wanted = self._wanted(file, group, path, [form.name for form in self.forms])
            found = {} if self.piece else self._simple(file, group, path, low, high, arenas)
            wanted = [name for name in wanted if name not in found]
            table = self._read(file, group, wanted, low, high)
        whole = not self.piece
        if wanted and table.num_rows != (self.rows[group] if whole else high - low):
            raise self._replaced(path, group, table.num_rows)
        if not whole:
            low, high = 0, high - low
        return [found.get(form.name) or self._column(path, table, form, group, low, high) for form in self.forms]

    def _simple(
        self, file: pq.ParquetFile, group: int, path: Path, low: int, high: int, arenas: Mapping[str, Arena]
    ) -> dict[str, Column]:
        """Return those columns that can be had page by page, by name."""
        leaves = self._leaves_of(file, int(self.file[group]))
        if not leaves:
            return {}
        found: dict[str, Column] = {}
        rows = int(self.rows[group])
        chunks = file.metadata.row_group(int(self.row_group[group]))
        descriptor = os.open(path, os.O_RDONLY)
        try:
            for form, leaf in leaves:
                column = self._paged(descriptor, chunks.column(leaf.number), form, leaf, arenas.get(form.name))
                if column is not None and len(column) == rows:
                    found[form.name] = cut(column, low, high) if (low, high) != (0, rows) else column
        finally:
            os.close(descriptor)
        return found

    def _paged(
        self, descriptor: int, chunk: pq.ColumnChunkMetaData, form: Form, leaf: Leaf, into: Arena | None
    ) -> Column | None:
        if form.form == "bytes":
            if chunk.total_uncompressed_size < LONG * chunk.num_values:
                return None
            arrays = self._pages.byte_arrays(descriptor, chunk, leaf)
            return None if arrays is None else Column(form, views_of(arrays))
        values = self._pages.values(descriptor, chunk, leaf, _length(form), into)
        return None if values is None or values.nbytes % form.width else Column(form, as_rows(values, form.width))

    def _leaves_of(self, file: pq.ParquetFile, number: int) -> list[tuple[Form, Leaf]]:
        """Return the columns of a file that may be worth reading page by page: lists of one length, and long rows."""
        found = self._leaves.get(number)
        if found is None:
            found = []
            schema = file.schema_arrow
            for form in self.forms:
                worth = form.dense or is_text(storage_type(form.type)) or (form.form == "fixed" and form.width >= LONG)
                if not worth or len(schema.get_all_field_indices(form.name)) != 1:
                    continue
                kind = schema.field(form.name).type
                kind = kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind
                if kind == (storage_type(form.type) if form.stored is None else pa.binary(form.stored.width)):
                    leaf = leaf_of(file.metadata, form.name, kind)
                    found += [(form, leaf)] if leaf is not None else []
            if found:  # what the footer says of their chunks will be asked for
                path = self.root / self.paths[number]
                check_footer(read_footer(path), str(path))
            self._leaves[number] = found
        return found

    def read_chosen(
        self, group: int, low: int, high: int, count: int, columns: Sequence[str], choose: Choose
    ) -> list[Column]:
        """Return those rows of a row group that are number ``low`` to ``high`` of the ``count`` chosen ones.

        ``choose`` returns the positions of the chosen rows, from all rows of ``columns``, which need not be among
        the forms. Another number of rows than ``count`` raises ParquetError, as does what `read` raises it for.
        """
        found, chosen = self.read_around(group, low, high, count, columns, choose)
        few = 2 * len(chosen) < self.rows[group]  # without the bytes that the others point to
        return [compact(take(column, chosen)) if few else take(column, chosen) for column in found]

    def read_around(
        self, group: int, low: int, high: int, count: int, columns: Sequence[str], choose: Choose
    ) -> tuple[list[Column], Ints]:
        """Return rows of a row group, and where among them are the rows that `read_chosen` would return.

        ``choose`` may return positions in any order and more than once, and several for each row, as (rows, several).
        """
        if not self.forms:
            return [], np.zeros(0, np.int64)
        names = [form.name for form in self.forms]
        rows = int(self.rows[group])
        with self._opened(group) as (file, path):
            if self.piece:
                positions = self._checked(path, group, choose(self._parts(file, group, columns, rows)), count)
                needed, chosen = np.unique(positions[low:high], return_inverse=True)
                table = self._gathered(file, group, self._wanted(file, group, path, names), needed)
                found = [self._column(path, table, form, group, 0, len(needed)) for form in self.forms]
                return found, chosen.reshape(positions[low:high].shape)
            table = file.read_row_group(
                int(self.row_group[group]),
                columns=self._wanted(file, group, path, list(dict.fromkeys([*names, *columns]))),
                use_threads=False,
            )
        if table.num_columns and table.num_rows != rows:
            raise self._replaced(path, group, table.num_rows)
        looked_at = table.select([name for name in columns if name in table.column_names])
        if not looked_at.num_columns:
            looked_at = _empty(rows)
        chosen = self._checked(path, group, choose([looked_at]), count)[low:high]
        return [self._column(path, table, form, group, 0, rows) for form in self.forms], chosen

    def parts(self, group: int, columns: Sequence[str], rows: int) -> Iterator[pa.Table]:
        """Yield all rows of a row group, ``rows`` at a time: those of ``columns`` that its file has, as it has them."""
        with self._opened(group) as (file, _):
            yield from self._parts(file, group, columns, rows)

    def _parts(self, file: pq.ParquetFile, group: int, columns: Sequence[str], rows: int) -> Iterator[pa.Table]:
        wanted = [name for name in columns if name in file.schema_arrow.names]
        left = int(self.rows[group])
        if not wanted:
            yield _empty(left)
            return
        for batch in file.iter_batches(self.piece or rows, [int(self.row_group[group])], wanted, use_threads=False):
            left -= batch.num_rows
            yield pa.Table.from_batches([batch])
        if left:
            path = self.root / self.paths[int(self.file[group])]
            raise self._replaced(path, group, int(self.rows[group]) - left)

    def _gathered(self, file: pq.ParquetFile, group: int, wanted: list[str], positions: Ints) -> pa.Table:
        """Return rows in ascending order of a row group that is read in pieces."""
        found, at, done = [], 0, 0
        if wanted and len(positions):
            for batch in file.iter_batches(self.piece, [int(self.row_group[group])], wanted, use_threads=False):
                stop = int(np.searchsorted(positions, at + batch.num_rows))
                if stop > done:
                    found.append(batch.take(pa.array(positions[done:stop] - at)))
                at, done = at + batch.num_rows, stop
                if done == len(positions):
                    break
        return pa.Table.from_batches(found, schema=None if found else pa.schema([]))

    def _checked(self, path: Path, group: int, positions: Ints, count: int) -> Ints:
        if len(positions) != count:
            raise ParquetError(
                path,
                f"of row group {self.row_group[group]} {len(positions):,} rows are selected, where "
                f"{count:,} were counted",
                "the file was replaced or is damaged: open the dataset again",
            )
        return positions

    def _wanted(self, file: pq.ParquetFile, group: int, path: Path, names: Sequence[str]) -> list[str]:
        """Return which of the columns are in the file; all of it is asked for if it has no others."""
        present = file.schema_arrow.names
        wanted = [name for name in names if name in present]
        if len(wanted) == len(present):
            self._read_ahead(group, path)
        return wanted

    @contextmanager
    def _opened(self, group: int) -> Iterator[tuple[pq.ParquetFile, Path]]:
        """Open the file of a row group; what goes wrong with it raises ParquetError by name."""
        number = int(self.file[group])
        path = self.root / self.paths[number]
        try:
            with self._open(number, path) as file:
                yield file, path
        except FileNotFoundError as error:
            raise ParquetError(path, "the file is gone", "open the dataset again") from error
        except (pa.ArrowException, OSError, IndexError) as error:
            raise self._damaged(path, group, error) from error

    def _read(self, file: pq.ParquetFile, group: int, wanted: list[str], low: int, high: int) -> pa.Table:
        """Return a whole row group, or only the rows asked for where row groups are read in pieces.

        Parquet cannot begin in the middle: what comes before a piece is decoded and dropped.
        """
        number = int(self.row_group[group])
        if not self.piece:
            return file.read_row_group(number, columns=wanted, use_threads=False)
        release_unused()  # memory is scarce, and what was kept of other pieces adds to it
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
                path,
                f"column {form.name!r} has {error} in row group {self.row_group[group]}, where the rest "
                f"of the dataset has lists of {form.dense}",
                f"pass ragged=[{form.name!r}]",
            ) from error
        except (pa.ArrowException, OverflowError) as error:
            raise ParquetError(
                path,
                f"column {form.name!r} cannot be read as {form.type} ({error})",
                "rewrite the file with the dataset's types",
            ) from error
        return cut(column, low, high) if (low, high) != (0, len(column)) else column

    def _open(self, number: int, path: Path) -> pq.ParquetFile:
        """Open a file for one row group; its footer is parsed once.

        Read little by little, what is decoded next is still in the processor's cache, and only that is in memory.
        """
        footer = self._footers.get(number)
        file = pq.ParquetFile(path, metadata=footer, pre_buffer=False, buffer_size=_BUFFER)
        if footer is None:
            if len(self._footers) >= _FOOTERS:
                self._footers.clear()
                self._leaves.clear()
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

    def _replaced(self, path: Path, group: int, rows: int) -> ParquetError:
        return ParquetError(
            path,
            f"row group {self.row_group[group]} has {rows} rows where the index has {self.rows[group]}",
            "the file was replaced while in use: open the dataset again",
        )

    def _damaged(self, path: Path, group: int, error: BaseException) -> ParquetError:
        return ParquetError(
            path,
            f"row group {self.row_group[group]} cannot be read ({first_line(error)})",
            "the file is damaged or was replaced: sync again, or write it again",
        )


def _length(form: Form) -> int:
    """Return the length of a column's lists as they are stored; 0 for what is not stored as lists, or of any length."""
    if form.stored is not None:
        return 0
    kind = storage_type(form.type)
    return int(kind.list_size) if pa.types.is_fixed_size_list(kind) else form.dense


def _empty(rows: int) -> pa.Table:
    """Return so many rows without any column: a table needs one to know how many there are."""
    return pa.table({"": pa.nulls(rows)}).select([])


def file_numbers(file: int, rows: int) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    """Return the hidden column from which partition columns are looked up."""
    return np.full(rows, file, np.uint32)
