"""Null counts of writers that do not count: the values are believed."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pqcache.errors import UsageError
from pqcache.parquet import footer
from pqcache.parquet import thrift as t
from pqcache.store.sync.command import sync
from pqcache.store.verify.command import verify
from pqcache.torch import ParquetDataset

OLD_ARROW = "parquet-cpp-arrow version 4.0.1"
VALUES = ["a", "b", "a", None, "b", None, "a", "a"]


def write_uncounted(path: Path, created_by: str, **more: pa.Array) -> None:
    """Write VALUES as a dictionary column of two row groups, with footers that count no nulls."""
    table = pa.table({"c": pa.array(VALUES).dictionary_encode(), "n": list(range(8)), **more})
    pq.write_table(table, path, row_group_size=4)
    data = path.read_bytes()
    length = int.from_bytes(data[-8:-4], "little")
    fields = t.decode(data[-8 - length : -8], "x")
    fields[6] = (t.BINARY, created_by.encode())
    for group in fields[4][1].values:
        group[1][1].values[0][3][1][12][1][3] = (t.I64, 0)
    path.write_bytes(data[: -8 - length] + footer.footer_and_magic(fields))


@pytest.mark.parametrize(
    ("created_by", "known"),
    [
        (OLD_ARROW, False),
        ("parquet-cpp version 1.5.1-SNAPSHOT", False),
        ("parquet-cpp-arrow version 5.0.0", True),
        ("parquet-cpp-arrow version 23.0.1", True),
        ("parquet-mr version 1.10.1", True),
    ],
)
@pytest.mark.parametrize("shuffle", [False, True])
def test_nulls_that_no_footer_counts_are_masked(tmp_path: Path, created_by: str, known: bool, shuffle: bool) -> None:
    """With a writer that is known for it every batch has a mask; else those that hold nulls."""
    write_uncounted(tmp_path / "a.parquet", created_by)
    found = {}
    for batch in ParquetDataset(tmp_path, batch_size=2, shuffle=shuffle, nulls="mask"):
        values = batch["c"].to_list()
        mask = batch["c_mask"].tolist() if "c_mask" in batch else [True, True]
        assert "c_mask" in batch or known
        found |= dict(
            zip(batch["n"].tolist(), [v if m else None for v, m in zip(values, mask, strict=True)], strict=True)
        )
    assert [found[n] for n in range(8)] == VALUES


def test_filters_find_nulls_that_no_footer_counts(tmp_path: Path) -> None:
    write_uncounted(tmp_path / "a.parquet", OLD_ARROW)
    for filters, expected in (
        ("c is null", [3, 5]),
        ("c is not null", [0, 1, 2, 4, 6, 7]),
        ("c >= 'a'", [0, 1, 2, 4, 6, 7]),
    ):
        dataset = ParquetDataset(tmp_path, columns=["n"], filters=filters, batch_size=8, shuffle=False)
        assert [n for batch in dataset for n in batch["n"].tolist()] == expected, filters


def test_a_cache_of_such_files_is_not_damaged(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    write_uncounted(tmp_path / "source/a.parquet", OLD_ARROW)
    sync(tmp_path / "source", tmp_path / "cache")
    assert verify(tmp_path / "cache", deep=True).ok


def test_a_mask_replaces_no_column(tmp_path: Path) -> None:
    write_uncounted(tmp_path / "a.parquet", "another writer", c_mask=pa.array([1] * 8))
    with pytest.raises(UsageError, match="it would add 'c_mask', which is a column already"):
        list(ParquetDataset(tmp_path, nulls="mask", batch_size=8))
