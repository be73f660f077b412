"""Reads row groups of local files as columns, from any thread; every error names the file."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pqcache.errors import ParquetError, first_line, open_error
from pqcache.parquet.footer.doubtful import check_read_right, doubtful_columns, may_be_doubtful
from pqcache.parquet.pages.list_rows import RememberedRows
from pqcache.parquet.schema_merge import unfit_reason
from pqcache.reader.columns.coded_texts import OPTIONS, decoded
from pqcache.reader.columns.column_data import ColumnData, NotConstant, compact, compact_piece, cut, from_arrow, take
from pqcache.reader.columns.column_forms import ColumnForm, storage_type
from pqcache.reader.columns.decoded_together import decoded_together
from pqcache.reader.columns.fill_nulls import Fill, fill_nulls
from pqcache.reader.columns.page_columns import PageColumns
from pqcache.reader.meter import NO_METER, Meter
from pqcache.reader.open_dataset import LocalDataset
from pqcache.reader.order.epoch_order import Ints
from pqcache.reader.piece_reader import PieceReader, RowGroupOfFile
from pqcache.store.cache_directory import advice_for_file
from pqcache.system.buffer_pool import Arena, BufferPool
from pqcache.system.disk import check_regular, read_ahead
from pqcache.system.shared_numbers import SharedNumbers

log = logging.getLogger("pqcache.reader")

Choose = Callable[[Iterable[pa.Table]], Ints]
UseColumn = Callable[[int, ColumnData], None]  # takes a column by its position among the forms


class Selected(NamedTuple):
    """Which rows of a row group are selected: so many, whose positions ``choose`` returns.

    It is called with all rows of ``columns``, which need not be among those that are read.
    """

    rows: int
    columns: Sequence[str]
    choose: Choose


_FOOTERS = 256  # per process, as parsing one again takes time


def cpu_count() -> int:
    """Return the number of cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def release_unused() -> None:
    """Return memory that Arrow's allocator holds without need to the system."""
    pa.default_memory_pool().release_unused()


def checked_columns(data: LocalDataset) -> SharedNumbers:
    """Return where it is remembered which columns are read right, also by processes that are forked later."""
    return SharedNumbers([field.name for field in data.index.schema if may_be_doubtful(field.type)], len(data.index))


def remembered_rows(data: LocalDataset, forms: Sequence[ColumnForm]) -> RememberedRows:
    """Return where it is remembered how many rows begin in pages of lists, also by processes that are forked later."""
    return RememberedRows([form.name for form in forms if pa.types.is_nested(storage_type(form.type))], len(data.index))


class RowGroupReader:
    """Reads row groups, each by its number among ``row_groups``, which are rows of the dataset's index.

    ``forms`` are the columns to read from the files. With ``piece_rows``, the most that are asked for at a time, only
    the pages of these rows are decoded; see `PagedFile`.
    """

    def __init__(
        self,
        data: LocalDataset,
        row_groups: Ints,
        *,
        forms: Sequence[ColumnForm] = (),
        piece_rows: int = 0,
        memory: BufferPool | None = None,
        read_right: SharedNumbers | None = None,
        page_rows: RememberedRows | None = None,
    ) -> None:
        self.data, self.forms, self.piece_rows = data, forms, piece_rows
        index = data.index
        self.rows = index.rows[row_groups]  # of each row group
        self.file = index.numbers("file")[row_groups]  # number of its file in the index
        self.row_group = index.numbers("row_group")[row_groups]  # its number in the file
        self._footers: dict[int, pq.FileMetaData] = {}  # without a lock, as the process may fork
        self._doubtful: dict[int, frozenset[str]] = {}  # columns that may be misread, by file
        self._index_row = row_groups
        self._read_right = read_right or checked_columns(data)  # 1 for those that are not, by row group of the index
        self._memory = memory or BufferPool()
        self._pages = PageColumns(forms, self._memory)
        page_rows = page_rows or remembered_rows(data, forms)
        self._pieces = PieceReader(piece_rows, self._pages, self._memory, page_rows) if piece_rows else None
        self.meter: Meter = NO_METER
        self.fill: Mapping[str, Fill] = {}  # what is put in place of nulls, by column

    def path(self, number: int) -> Path:
        """Return the file of a row group."""
        return self.data.root / self.data.index.paths[int(self.file[number])]

    def read(
        self, number: int, low: int, high: int, arenas: Mapping[str, Arena] = {}, use: UseColumn | None = None
    ) -> list[ColumnData]:
        """Return rows ``low <= row < high`` of a row group, one column for each form.

        ``arenas`` take the long rows of columns that can be read from their pages. ``use`` takes each column as soon as
        it is decoded, and they are returned without values. A column that the file lacks is null in all rows, unless
        its value is in the path; one of another type is cast. A file that is gone, damaged or not what was indexed
        raises ParquetError.
        """
        if not self.forms:
            return []
        names = [form.name for form in self.forms]
        columns = [ColumnData(form, None) for form in self.forms]
        found: dict[str, ColumnData] = {}
        with self.opened(number, names) as (file, path):
            wanted, row_group = self._present(file, number, path, names), int(self.row_group[number])
            group = self._group_of(file, number, path)
            if self._pieces is not None:
                found, long = self._pieces.columns(group, low, high)
                rows, kept = high - low, (0, high - low)
            else:
                paged, long = self._pages.read(file, int(self.file[number]), path, row_group, arenas)
                rows, kept = int(self.rows[number]), (low, high)  # others are read again below, and refused
                found = {name: cut(column, low, high) for name, column in paged.items() if len(column) == rows}
            self.meter.count_columns(len(found), long)
            wanted = [name for name in wanted if name not in found]
            for name in [name for name in found if self._path_value(number, name) is not None]:
                found.pop(name)
            coded = self._pages.coded_texts(file, group.file_number, path, row_group)
            one_by_one = use is not None and self._pieces is None
            for part in decoded_together(self.forms, wanted, rows) if one_by_one else [range(len(columns))]:
                now = [names[position] for position in part if names[position] in wanted]
                if self._pieces is not None:
                    table = self._pieces.table(group, now, low, high, coded)
                else:
                    table = decoded(file, path, row_group, now, coded)
                if now and table.num_rows != rows:
                    raise self._replaced(path, number, table.num_rows)
                for position in part:
                    form = self.forms[position]
                    column = found.pop(form.name, None) or self._column(path, table, form, number, *kept)
                    column = column if self._pieces is None else compact_piece(column)
                    if use is None:
                        columns[position] = column
                    else:
                        use(position, column)
        return columns

    def read_selected(
        self, number: int, span: tuple[int, int], selected: Selected, arenas: Mapping[str, Arena] = {}
    ) -> tuple[list[ColumnData], Ints | None]:
        """Return rows of a row group, and where among them are rows ``low`` to ``high`` (``span``) of those selected.

        Where few are selected, they are returned alone, and None. Another number of rows than was counted raises
        ParquetError, as does what `read` raises it for.
        """
        found, rows = self.read_around(number, span, selected, arenas)
        if 2 * len(rows) >= self.rows[number] or not found:
            return found, rows if found else None
        return [compact(take(column, rows)) for column in found], None  # without the bytes that the others point to

    def read_around(
        self, number: int, span: tuple[int, int], selected: Selected, arenas: Mapping[str, Arena] = {}
    ) -> tuple[list[ColumnData], Ints]:
        """Return rows of a row group, and where among them are rows ``low`` to ``high`` (``span``) of those selected.

        Positions may come in any order and more than once, and several for each row, as (rows, several). ``arenas``
        take long rows, as in `read`.
        """
        if not self.forms:
            return [], np.zeros(0, np.int64)
        (low, high), (count, columns, choose) = span, selected
        names = [form.name for form in self.forms]
        rows = int(self.rows[number])
        with self.opened(number, [*names, *columns]) as (file, path):
            if self._pieces is not None:
                self.meter.count_columns(0, self._pages.long)
                parts = self._parts(file, number, columns, rows)
                positions = self._checked(path, number, choose(parts), count)[low:high]
                needed, places = np.unique(positions, return_inverse=True)
                group = self._group_of(file, number, path)
                table = self._pieces.rows_at(group, self._present(file, number, path, names), needed)
                found = [self._column(path, table, form, number, 0, len(needed)) for form in self.forms]
                return found, places.reshape(positions.shape)
            wanted = self._present(file, number, path, list(dict.fromkeys([*names, *columns])))
            row_group = int(self.row_group[number])
            paged, long = self._pages.read(file, int(self.file[number]), path, row_group, arenas)
            whole = {name: column for name, column in paged.items() if name not in columns and len(column) == rows}
            whole = {name: column for name, column in whole.items() if self._path_value(number, name) is None}
            self.meter.count_columns(len(whole), long)
            wanted = [name for name in wanted if name not in whole]
            coded = self._pages.coded_texts(file, int(self.file[number]), path, row_group).difference(columns)
            table = decoded(file, path, row_group, wanted, coded)
        if table.num_columns and table.num_rows != rows:
            raise self._replaced(path, number, table.num_rows)
        looked_at = table.select([name for name in columns if name in table.column_names])
        if not looked_at.num_columns:
            looked_at = _no_columns(rows)
        looked_at = self._with_path_values(looked_at, number, columns)
        places = self._checked(path, number, choose([looked_at]), count)[low:high]
        found = [whole.get(form.name) or self._column(path, table, form, number, 0, rows) for form in self.forms]
        return found, places

    def parts(self, number: int, columns: Sequence[str], rows: int) -> Generator[pa.Table]:
        """Yield all rows of a row group, ``rows`` at a time: those of ``columns`` that its file has, as it has them."""
        if not columns:
            yield _no_columns(int(self.rows[number]))
            return
        with self.opened(number, columns) as (file, _):
            yield from self._parts(file, number, columns, rows)

    def _group_of(self, file: pq.ParquetFile, number: int, path: Path) -> RowGroupOfFile:
        row_group = int(self.row_group[number])
        return RowGroupOfFile(file, int(self.file[number]), path, row_group, int(self._index_row[number]) - row_group)

    def _parts(self, file: pq.ParquetFile, number: int, columns: Sequence[str], rows: int) -> Iterator[pa.Table]:
        wanted = [name for name in columns if name in file.schema_arrow.names]
        self._check_read_right(file, number, self.path(number), wanted)
        left = int(self.rows[number])
        if not wanted:
            yield self._with_path_values(_no_columns(left), number, columns)
            return
        row_group = int(self.row_group[number])
        for batch in file.iter_batches(self.piece_rows or rows, [row_group], wanted, use_threads=False):
            left -= batch.num_rows
            yield self._with_path_values(pa.Table.from_batches([batch]), number, columns)
        if left:
            raise self._replaced(self.path(number), number, int(self.rows[number]) - left)

    def _with_path_values(self, table: pa.Table, number: int, columns: Sequence[str]) -> pa.Table:
        """Return ``table`` with those of ``columns`` that the path of the file says, and the files of others hold."""
        for name in self.data.index.path_values.column_names:
            value = self._path_value(number, name)
            if name in columns and value is not None:
                if name in table.column_names:  # null, as a rewrite adds columns that a file lacks
                    table = table.drop_columns([name])
                table = table.append_column(name, pa.repeat(value, table.num_rows))
        return table

    def _path_value(self, number: int, name: str) -> pa.Scalar | None:
        """Return the value of a column that is in the path of this file, and in others inside; None where it is not."""
        values = self.data.index.path_values
        if name not in values.column_names:
            return None
        value = values[name][int(self.file[number])]
        return value if value.is_valid else None

    def _checked(self, path: Path, number: int, positions: Ints, count: int) -> Ints:
        if len(positions) != count:
            raise ParquetError(
                path,
                f"of row group {self.row_group[number]} {len(positions):,} rows are selected, where "
                f"{count:,} were counted",
                advice_for_file(path, "the file was replaced or is damaged: open the dataset again"),
            )
        return positions

    def _present(self, file: pq.ParquetFile, number: int, path: Path, names: Sequence[str]) -> list[str]:
        """Return which of the columns are in the file; the kernel reads ahead if these are all columns it has."""
        present = file.schema_arrow.names
        wanted = [name for name in names if name in present]
        self._check_read_right(file, number, path, wanted)
        if len(wanted) == len(present) and not self.piece_rows:
            self._read_ahead(number, path)
        return wanted

    def _check_read_right(self, file: pq.ParquetFile, number: int, path: Path, wanted: Sequence[str]) -> None:
        """Raise ParquetError where pyarrow would return other values than the row group holds; checked once."""
        file_number, row_group = int(self.file[number]), int(self.row_group[number])
        doubtful = self._doubtful.get(file_number)
        if doubtful is None:
            doubtful = self._doubtful[file_number] = doubtful_columns(file.metadata, file.schema_arrow)
        if not doubtful:
            return
        right, row = self._read_right, int(self._index_row[number])
        names = [n for n in wanted if n in doubtful and not (n in right.names and right.numbers(n)[row])]
        if names:
            check_read_right(path, file.metadata, file.schema_arrow, names, [row_group])
            for name in names:
                if name in right.names:
                    right.numbers(name)[row] = 1

    @contextmanager
    def opened(self, number: int, columns: Sequence[str]) -> Iterator[tuple[pq.ParquetFile, Path]]:
        """Open the file of a row group to read ``columns``; what goes wrong with it raises ParquetError by name.

        Where the columns have not arrived yet, they are waited for.
        """
        self.data.wait(self._index_row[number : number + 1], columns)
        path = self.path(number)
        try:
            self._check_identity(number, path)
            with self._open(int(self.file[number]), path) as file:
                yield file, path
            self._check_identity(number, path)  # it is opened more than once, and may be written in place
        except FileNotFoundError as error:
            raise ParquetError(
                path, "the file is gone", advice_for_file(path, "open the dataset again", deep=False)
            ) from error
        except (pa.ArrowException, OSError, IndexError) as error:
            self._check_identity(number, path)
            raise self._damaged(path, number, error) from error

    def _check_identity(self, number: int, path: Path) -> None:
        """Raise ParquetError where a plain file is not the one that was indexed, also if it has the same layout."""
        if self.data.identities is None:
            return
        try:
            status = os.stat(path)
        except FileNotFoundError as error:
            raise ParquetError(
                path, "the file is gone", advice_for_file(path, "open the dataset again", deep=False)
            ) from error
        if not self.data.identities[int(self.file[number])].matches(status):
            raise ParquetError(
                path,
                "was replaced or written to since the dataset was opened",
                "open the dataset again; a cache has snapshots, which do not change",
            )

    def _column(self, path: Path, table: pa.Table, form: ColumnForm, number: int, low: int, high: int) -> ColumnData:
        where = table.schema.get_all_field_indices(form.name)
        if (value := self._path_value(number, form.name)) is not None:
            return from_arrow(pa.repeat(value, high - low), form)
        if not where:
            kind = form.type if form.stored is None else pa.binary(form.stored.width)
            return self._filled(from_arrow(pa.nulls(high - low, kind), form))
        try:
            column = from_arrow(table.column(where[0]), form)
        except NotConstant as error:
            raise ParquetError(
                path,
                f"column {form.name!r} has {error} in row group {self.row_group[number]}, where the rest "
                f"of the dataset has lists of {form.dense}",
                f"pass ragged=[{form.name!r}]",
            ) from error
        except (pa.ArrowException, OverflowError) as error:
            reason = unfit_reason(form.name, table.column(where[0]), form.type)
            raise ParquetError(
                path,
                reason or f"column {form.name!r} cannot be read as {form.type} ({first_line(error)})",
                "write the file again with the dataset's types",
            ) from error
        return cut(self._filled(column), low, high)

    def _filled(self, column: ColumnData) -> ColumnData:
        """Return a column with values in place of its nulls, if they are filled at once."""
        fill = self.fill.get(column.form.name)
        return column if fill is None else fill_nulls(column, fill, self._memory)

    def _open(self, file_number: int, path: Path) -> pq.ParquetFile:
        """Open a file for one row group; its footer is parsed once."""
        footer = self._footers.get(file_number)
        check_regular(path)
        file = pq.ParquetFile(path, metadata=footer, **OPTIONS)
        if footer is None:
            if len(self._footers) >= _FOOTERS:
                log.debug("more than %d files are read: their footers are parsed again", _FOOTERS)
                self._footers.clear()
                self._doubtful.clear()
                self._pages.clear()
                if self._pieces is not None:
                    self._pieces.clear()
            self._footers[file_number] = file.metadata
        return file

    def _read_ahead(self, number: int, path: Path) -> None:
        """Ask the kernel for a complete row group at once, as a cold disk is slow page by page."""
        table, row = self.data.index.table, int(self._index_row[number])
        read_ahead(path, *(table[name][row].as_py() for name in ("offset", "bytes")))

    def _replaced(self, path: Path, number: int, rows: int) -> ParquetError:
        return ParquetError(
            path,
            f"row group {self.row_group[number]} has {rows} rows where the index has {self.rows[number]}",
            advice_for_file(path, "the file was replaced while in use: open the dataset again"),
        )

    def _damaged(self, path: Path, number: int, error: BaseException) -> ParquetError:
        if (known := open_error(error)) is not None:
            return ParquetError(path, *known)
        return ParquetError(
            path,
            f"row group {self.row_group[number]} cannot be read ({first_line(error)})",
            advice_for_file(path, "the file is damaged or was replaced: write it again"),
        )


def _gone(path: Path) -> ParquetError:
    return ParquetError(path, "the file is gone", advice_for_file(path, "open the dataset again", deep=False))


def _no_columns(rows: int) -> pa.Table:
    """Return so many rows without any column: a table needs one to know how many there are."""
    return pa.table({"": pa.nulls(rows)}).select([])
