"""A column, or a field of a struct, whose values a selection looks at, wherever they are: in the files or the paths."""

from __future__ import annotations

from functools import cached_property

import pyarrow as pa
import pyarrow.compute as pc

from pqcache.errors import UsageError
from pqcache.filters.expression import operand_of
from pqcache.parquet.dense_columns import as_lists
from pqcache.reader.open_dataset import LocalDataset
from pqcache.store.hive import with_hints
from pqcache.store.selected_rows import Ints


class ChosenColumn:
    """The column of a dataset that ``name`` leads to; one that is not there raises UsageError about ``option``."""

    def __init__(self, data: LocalDataset, name: str, option: str) -> None:
        try:
            schema = with_hints(as_lists(data.index.schema), data.index.partitions)
            operand = operand_of(name.split("."), schema)
        except UsageError as error:
            raise error.within(option) from error
        self.operand = operand
        self.path, self.type = (operand.column, *operand.inner), operand.type
        self._data = data
        partitions = data.index.partitions
        self._of_files = partitions[operand.column] if operand.column in partitions.column_names else None

    @property
    def name(self) -> str:
        """Its name, with those of the structs that it is in."""
        return ".".join(self.path)

    @property
    def columns(self) -> tuple[str, ...]:
        """The column to read of the files; none if the values are in the paths."""
        return () if self._of_files is not None else self.path[:1]

    @property
    def in_paths(self) -> bool:
        """Whether all rows of a file have one value, which its path says."""
        return self._of_files is not None

    def value_of(self, group: int) -> pa.Array:
        """Return the one value that all rows of a row group have, as the path says it."""
        assert self._of_files is not None
        value = self._of_files[int(self._files[group])]
        return pa.array([value.as_py()], value.type)

    def values_of(self, groups: Ints) -> pa.ChunkedArray:
        """Return the one value that all rows of each row group have, as the paths say it."""
        assert self._of_files is not None
        return pc.take(self._of_files, pa.array(self._files[groups]))

    def values(self, group: int, part: pa.Table) -> pa.ChunkedArray:
        """Return the values of a part of a row group, in the type of its file; null where that lacks the column."""
        if self._of_files is not None:
            return pa.chunked_array([pa.repeat(self._of_files[int(self._files[group])], part.num_rows)])
        if self.path[0] not in part.column_names:
            return pa.chunked_array([pa.nulls(part.num_rows)])
        column = part[self.path[0]]
        for name in self.path[1:]:
            known = pa.types.is_struct(column.type) and column.type.get_field_index(name) >= 0
            column = pc.struct_field(column, name) if known else pa.chunked_array([pa.nulls(len(column))])
        return column

    @cached_property
    def _files(self) -> Ints:
        return self._data.index.numbers("file")
