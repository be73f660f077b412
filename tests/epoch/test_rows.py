"""Every row of an epoch is one that pyarrow reads, in all its columns, and comes as often as the options say."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from torch.utils.data import DataLoader

from pqcache.errors import ParquetError
from pqcache.torch import Loader, ParquetDataset, Ragged
from tests.epoch.cases import CASES, THIRDS, Case
from tests.epoch.forms import Row, tensor_rows, values_of
from tests.epoch.reading import Read, Reader, differences
from tests.epoch.tables import INSIDE, Source, fills_of

ARROW, DATASET = Reader("Cache.batches"), Reader()
WORKERS = [
    Reader("Loader", 2),
    Reader("DataLoader", 3, "mask"),
    Reader("Loader", 1, "mask"),
]  # in turn, as forks take long
DEEP = pytest.mark.deep
EACH: list[Any] = []  # one way to read each case, and workers for a few; all of them in the deep profile
for at, case_name in enumerate(CASES):
    first, second = (ARROW, DATASET) if at % 2 else (DATASET, ARROW)
    EACH += [(case_name, first), pytest.param(case_name, second, marks=DEEP)]
    EACH += [(case_name, WORKERS[at // 4 % 3])] if at % 4 == 1 else []


def check_epochs(source: Source, case: Case, reader: Reader, epochs: int = 2) -> list[list[Read]]:
    """Read epochs, and check each one's rows, numbers and sizes of batches."""
    options = {"batch_size": 16, "seed": 3, **case.options_for(source)}
    columns = reader.columns(source, case.columns)
    rows = reader.expected(source, columns)
    chosen, found = case.chosen(source), []
    for batches in reader.epochs(source, columns, epochs, **options):
        indices = [batch.index for batch in batches]
        assert (sorted(indices) if reader.workers else indices) == list(range(len(batches)))
        of_epoch = [row for batch in batches for row in batch.rows]
        check_sizes(
            [len(batch.rows) for batch in sorted(batches, key=lambda batch: batch.index)],
            options["batch_size"],
            options.get("drop_last", False),
        )
        if chosen is None:
            assert case.check is not None
            case.check(source, times(of_epoch, rows))
        elif options.get("drop_last"):
            some = Counter(of_epoch) - Counter(rows[number] for number in chosen)
            assert not some, "a row that is not there, or twice"
            assert len(of_epoch) == len(chosen) // options["batch_size"] * options["batch_size"]
        else:
            wanted = [rows[number] for number in chosen]
            assert not differences(of_epoch, wanted)
            if not options.get("shuffle", True):
                assert of_epoch == wanted
        found.append(batches)
    return found


def check_sizes(sizes: list[int], batch_size: int, drop_last: bool) -> None:
    """Check that all batches but the last are full."""
    assert set(sizes[:-1]) <= {batch_size}
    assert all(0 < size <= batch_size for size in sizes[-1:])
    assert not drop_last or set(sizes) <= {batch_size}


def times(found: list[Row], rows: list[Row]) -> Counter[int]:
    """Return how often each row has come, by its number; all of them have to be different."""
    numbers = {row: number for number, row in enumerate(rows)}
    assert len(numbers) == len(rows)
    assert not differences(set(found) - set(rows), []), differences(set(found) - set(rows), set(rows) - set(found))
    return Counter(numbers[row] for row in found)


@pytest.mark.parametrize(("name", "reader"), EACH, ids=str)
def test_an_epoch_has_the_rows_that_options_choose(kinds: Source, name: str, reader: Reader) -> None:
    case = CASES[name]
    found = check_epochs(kinds, case, reader, 2 if reader == DATASET and (case.check or not case.is_kept) else 1)
    if len(found) == 2 and "id" in reader.columns(kinds, case.columns) and case.options.get("shuffle", True):
        orders = [[batch.rows for batch in batches] for batches in found]
        assert orders[0] != orders[1], "each epoch has an order of its own"


HOW = [
    ("kinds", Reader(nulls="mask")),
    ("kinds repartitioned", ARROW),
    ("kinds repartitioned", WORKERS[0]),
]


@pytest.mark.parametrize(("of", "reader"), HOW, ids=str)
def test_files_however_they_were_written(sources: dict[str, Source], of: str, reader: Reader) -> None:
    for case in (CASES["all rows"], CASES["rows by their places"]):
        check_epochs(sources[of], case, reader, 1)


def test_a_repartition_changes_no_row(sources: dict[str, Source]) -> None:
    assert not differences(sources["kinds repartitioned"].rows_in(None), sources["kinds"].rows_in(None))


def test_a_condition_that_no_row_satisfies(kinds: Source) -> None:
    for reader in (ARROW, DATASET, Reader("Loader", 2)):
        with pytest.warns(UserWarning, match="no batches"):
            assert reader.read(kinds, THIRDS[0], filters="id < 0", batch_size=7)[0] == []


def test_single_rows(kinds: Source) -> None:
    columns = [
        "id",
        "string null",
        "list",
        "struct",
        "binary_view",
        "hour",
        "bool null",
        "fixed list null",
        "uuid",
        "day",
    ]
    dataset = ParquetDataset(kinds.path, columns, batch_size=None, nulls="mask", lanes=2, limit=60)
    rows = [
        tuple(repr(_item(column)) for column in row.values())
        for row in DataLoader(dataset, batch_size=None, num_workers=2)
    ]
    assert not differences(rows, kinds.rows_in(columns, "mask")[:60])


def _item(column: Any) -> Any:
    """Return a column of a single row as a Python value."""
    if isinstance(column, dict):
        return {name: _item(field) for name, field in column.items()}
    return (
        column
        if isinstance(column, (str, bytes))
        else column.tolist()
        if hasattr(column, "tolist")
        else values_of(column)
    )


def test_nulls_without_an_option_are_refused(kinds: Source) -> None:
    for name in INSIDE:  # which have no mask
        with pytest.raises(ParquetError, match=rf"column '{name}\.[a-z.]*': it holds nulls .*pass nulls="):
            list(ParquetDataset(kinds.path, [name], nulls="mask"))
    for name in ("int8 null", "string null", "list null", "struct null", "hour"):
        with pytest.raises(ParquetError, match=f"column '{name}.*': it holds nulls"):
            list(ParquetDataset(kinds.path, ["id", name]))


@pytest.mark.parametrize("workers", [0, 2])
def test_tensors_are_the_trainers_own(kinds: Source, workers: int) -> None:
    """A batch that is changed changes no other batch, now or in the next epoch."""
    fills = fills_of(kinds.rows)
    loader = Loader(ParquetDataset(kinds.path, nulls=fills, batch_size=40, limit=160), num_workers=workers)
    for _ in range(2):
        batches, rows = [], []
        for batch in loader:
            rows += tensor_rows(batch)
            _overwrite(dict(batch))
            batches.append(batch)
        assert not differences(rows, kinds.rows_in(None, fills)[:160])


def _overwrite(column: Any) -> None:
    if isinstance(column, dict):
        for field in column.values():
            _overwrite(field)
    elif isinstance(column, Ragged):
        _overwrite(column.values)
    else:
        column.zero_()
