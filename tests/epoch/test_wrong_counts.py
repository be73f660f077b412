"""Where an index or stored counts say something else than the files: an error that names it, or the right rows."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pqcache.errors import ParquetError, PqcacheError
from pqcache.torch import ParquetDataset
from pqcache.torch.batch import Ragged, to_rows
from tests.epoch.cases import CASES, SOME, Case, some_rows
from tests.epoch.forms import Row
from tests.epoch.reading import Reader, differences, read_tensors
from tests.epoch.tables import FEW, Source

COLUMNS = [name for name in FEW if name != "fixed list null"]
READERS = [Reader(), Reader("Cache.batches"), Reader("Loader", 1)]
OPTIONS: dict[str, Case] = {
    "all rows": Case({"window": 4}),
    "in order": Case({"shuffle": False}),
    "a filter": Case({"filters": "label > 0"}, is_kept=lambda row: row["label"] > 0, needs=("label",)),
    "rows": Case(make=some_rows, numbers=lambda _: SOME),
}


def change(file: Path, column: str, by: dict[int, int]) -> None:
    """Write an Arrow file anew with other numbers in some rows of a column."""
    table = pa.ipc.open_file(pa.BufferReader(file.read_bytes())).read_all()
    numbers = table[column].to_pylist()
    for row, more in by.items():
        numbers[row] = (numbers[row] or 0) + more
    field = table.schema.field(column)
    table = table.set_column(table.column_names.index(column), field, pa.array(numbers, field.type))
    data = pa.BufferOutputStream()
    with pa.ipc.new_file(data, table.schema) as writer:
        writer.write_table(table)
    put(file, data.getvalue())


def put(file: Path, data: bytes | pa.Buffer) -> None:
    """Replace a file, which a reader that was just closed may still have mapped."""
    file.unlink()
    file.write_bytes(data)


@pytest.fixture
def copy(narrow: Source, tmp_path: Path) -> Source:
    """A cache of its own for one test, whose files may be changed."""
    shutil.copytree(narrow.path, tmp_path / "cache", symlinks=True, ignore=shutil.ignore_patterns("counts"))
    for path in (tmp_path / "cache").rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return Source.of_cache(tmp_path / "cache")


def read(source: Source, reader: Reader, options: dict[str, Any]) -> list[Row] | str:
    """Return the rows that come, or the error's message."""
    try:
        batches, _ = reader.read(source, COLUMNS, batch_size=16, **options)
    except PqcacheError as error:
        return str(error)
    return [row for batch in batches for row in batch.rows]


WRONG: dict[str, tuple[str, dict[int, int]]] = {
    "too many": ("rows", {0: 3}),
    "too few": ("rows", {1: -3}),
    "one too many": ("rows", {4: 1}),
    "one from another": ("rows", {1: 1, 2: -1}),
    "of none": ("rows", {6: 1}),
    "none of one": ("rows", {2: -40}),
    "none of a file": ("rows", {7: -60}),
    "none": ("rows", {0: -40, 1: -40, 2: -40, 3: -25, 4: -25, 5: -10, 7: -60, 8: -33, 9: -27, 10: -1}),
    "one row group twice": ("row_group", {1: 1}),
    "two exchanged": ("row_group", {0: 1, 1: -1}),
    "beyond the last": ("row_group", {3: 1000}),
}


@pytest.mark.parametrize(
    ("reader", "options"),
    [*((READERS[0], options) for options in OPTIONS), (READERS[1], "rows"), (READERS[2], "all rows")],
    ids=str,
)
def test_wrong_row_groups_are_refused(copy: Source, reader: Reader, options: str) -> None:
    index = copy.root / "_pqcache" / "row_groups.arrow"
    good, case = index.read_bytes(), OPTIONS[options]
    rows = reader.expected(copy, COLUMNS)
    how, wanted = case.options_for(copy), [rows[number] for number in case.chosen(copy) or []]
    for what, (column, by) in WRONG.items():
        change(index, column, by)
        found = read(copy, reader, how)
        if isinstance(found, str):
            assert "row" in found, what
        else:
            assert case.numbers is not None, "only rows of other row groups can be read all the same"
            assert not differences(found, wanted), what
        put(index, good)


@pytest.mark.parametrize(
    "column", ["list:values", "tokens:values", "string null:nulls", "id:bytes", "list:uncompressed"]
)
def test_other_wrong_counts_change_no_row(copy: Source, column: str) -> None:
    index = copy.root / "_pqcache" / "row_groups.arrow"
    good = index.read_bytes()
    for reader, by in zip(READERS, ({3: -1, 4: 2}, {8: 1000}), strict=False):
        rows = reader.expected(copy, COLUMNS)
        change(index, column, by)
        for options in ("all rows", "a filter"):
            case = OPTIONS[options]
            found = read(copy, reader, case.options_for(copy))
            assert not isinstance(found, str), found
            assert not differences(found, [rows[number] for number in case.chosen(copy) or []])
        put(index, good)


def test_lists_of_one_length_on_average_with_one_missing(tmp_path: Path) -> None:
    """The file says so, and they are no tensor from the start, although an empty list or a null counts as a value."""
    for missing in ([], None):
        lists = [[1, 2]] * 240 + [[1, 2, 3], missing] + [[4, 5]] * 58
        pq.write_table(pa.table({"list": lists}), tmp_path / "a.parquet", row_group_size=100)
        batches = list(ParquetDataset(tmp_path, batch_size=50, nulls="mask"))
        assert all(isinstance(batch["list"], Ragged) for batch in batches)
        found = (repr([int(value) for value in row]) for batch in batches for row in to_rows(batch["list"]))
        assert not differences(((row,) for row in found), ((repr(row or []),) for row in lists))


def test_lists_that_are_of_one_length_on_average(tmp_path: Path) -> None:
    """No tensor holds them, and no value of another row takes a place; the counts do not tell."""
    lists = [[1, 2]] * 300 + [[1, 2, 3], [1]] + [[1, 2]] * 300
    pq.write_table(pa.table({"list": lists}), tmp_path / "a.parquet", row_group_size=100)
    with pytest.raises(ParquetError, match=r"column 'list' has lists of other lengths.*ragged=\['list'\]"):
        read_tensors(ParquetDataset(tmp_path, batch_size=50), "Loader", 1)
    batches, _ = read_tensors(ParquetDataset(tmp_path, batch_size=50, ragged=["list"]), "Loader", 1)
    assert not differences((row for batch in batches for row in batch.rows), ((repr(row),) for row in lists))


@pytest.mark.parametrize(
    ("name", "reader"),
    [("most rows, by SQL", READERS[0]), ("a split by a key", READERS[1]), ("weights of a column", READERS[0])],
    ids=str,
)
def test_wrong_stored_counts_of_chosen_rows(copy: Source, name: str, reader: Reader) -> None:
    """Counts that an earlier run has stored beside the snapshot, and that another one finds changed."""
    case = Case({"filters": "label > 0"}) if name == "most rows, by SQL" else CASES[name]
    first = read(copy, reader, case.options)
    assert not isinstance(first, str)
    for file in sorted((copy.root / "_pqcache" / "counts").iterdir()):
        good = file.read_bytes()
        table = pa.ipc.open_file(pa.BufferReader(good)).read_all()
        for column in table.column_names[1:2]:
            for by in ({1: -1}, {0: 1, 1: -1}):
                change(file, column, by)
                found = read(copy, reader, case.options)
                if not isinstance(found, str):
                    assert Counter(found) == Counter(first), (column, by)
                put(file, good)
