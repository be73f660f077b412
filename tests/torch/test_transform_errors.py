"""An error of a transform says which batch, file and rows it is about, and keeps its type and traceback."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from torch.utils.data import DataLoader

from pqcache.torch import Loader, Mix, ParquetDataset, transforms

pytestmark = pytest.mark.usefixtures("few_cores_are_fine")

BAD = 137  # row 17 of row group 1 of b.parquet


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("table")
    for number, name in enumerate("ab"):
        ids = np.arange(100) + 100 * number
        pq.write_table(pa.table({"id": ids}), root / f"{name}.parquet", row_group_size=20)
    return root


class OddError(ValueError):
    def __init__(self, code: int, text: str) -> None:
        super().__init__(code, text)


def decode(batch: dict[str, Any]) -> Any:
    if BAD in np.atleast_1d(batch["id"].numpy()):
        raise KeyError("no such picture")
    return batch


def fail_oddly(batch: dict[str, Any]) -> Any:
    raise OddError(3, "two arguments")


def error_of(loader: Any) -> BaseException:
    with pytest.raises(Exception) as caught:
        list(loader)
    return caught.value


def text_of(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


@pytest.mark.parametrize("workers", [0, 1])
def test_the_file_the_rows_and_the_batch_are_named(table: Path, workers: int) -> None:
    data = ParquetDataset(table, batch_size=16, shuffle=False, transform=decode)
    data.set_epoch(2)
    error = error_of(Loader(data, num_workers=workers))
    text = text_of(error)
    assert isinstance(error, KeyError)
    assert f"in the transform of batch 8 of epoch 2, {table} (" in text
    assert "b.parquet, row group 1: 12 rows from 8 to 19" in text
    assert "b.parquet, row group 2: 4 rows from 0 to 3" in text
    assert "a.parquet" not in text
    assert 'raise KeyError("no such picture")' in text, "the transform's own line"
    assert "\\n" not in text
    if not workers:
        assert error.args == ("no such picture",)


def test_the_row_groups_are_those_of_the_rows(table: Path) -> None:
    seen: list[list[int]] = []

    def record(batch: dict[str, Any]) -> Any:
        seen.append(batch["id"].tolist())
        return decode(batch)

    text = text_of(error_of(ParquetDataset(table, batch_size=16, seed=5, transform=record)))
    ids = np.array(seen[-1])
    for group in np.unique(ids // 20):
        rows = ids[ids // 20 == group] % 20
        name, number = "ab"[group // 5], group % 5
        span = f"{len(rows)} rows from {rows.min()} to {rows.max()}" if len(rows) > 1 else f"row {rows[0]}"
        assert f"{name}.parquet, row group {number}: {span}\n" in text
    assert text.count("parquet, row group") == len(np.unique(ids // 20))


def test_a_single_row_is_named(table: Path) -> None:
    text = text_of(error_of(ParquetDataset(table, batch_size=None, seed=5, lanes=3, transform=decode)))
    assert "in the transform of row " in text
    assert "b.parquet, row group 1: row 17\n" in text


def test_rows_that_were_selected_are_counted_among_them(table: Path) -> None:
    data = ParquetDataset(table, batch_size=8, shuffle=False, filters="id >= 130", transform=decode)
    assert "b.parquet, row group 1: 8 rows from 0 to 7, counted among those that are selected" in text_of(
        error_of(data)
    )


def test_a_mix_names_its_dataset(table: Path) -> None:
    good = ParquetDataset(table, batch_size=16, seed=1)
    bad = ParquetDataset(table, batch_size=16, seed=2, transform=decode)
    mix = Mix({"good": good, "bad": bad}, weights={"good": 1, "bad": 3}, epoch_length=60, lanes=4)
    text = text_of(error_of(DataLoader(mix, batch_size=None)))
    assert "of epoch 0 (of the dataset 'bad' of the mix)" in text
    assert "b.parquet, row group 1: " in text


def test_what_torch_cannot_make_again_is_readable(table: Path) -> None:
    """torch makes the error of a worker again from its text, another type where that takes more arguments."""
    data = ParquetDataset(table, batch_size=16, transform=fail_oddly)
    error = error_of(Loader(data, num_workers=1))
    assert type(error) is RuntimeError
    assert "OddError: (3, 'two arguments')\nin the transform of batch 0 of epoch 0" in str(error)


class _NoNotes(ValueError):
    """As errors are on Python 3.10."""

    def __getattribute__(self, name: str) -> Any:
        if name == "add_note":
            raise AttributeError(name)
        return super().__getattribute__(name)


def test_without_notes_the_place_is_the_cause(table: Path) -> None:
    def fail(batch: Any) -> Any:
        try:
            raise ZeroDivisionError
        except ZeroDivisionError as error:
            raise _NoNotes("wrong") from error

    error = error_of(ParquetDataset(table, batch_size=16, transform=fail))
    assert type(error) is _NoNotes
    assert isinstance(error.__cause__, ZeroDivisionError)
    assert isinstance(error.__cause__.__cause__, transforms.InTransform)
    assert "in the transform of batch 0 of epoch 0" in text_of(error)
