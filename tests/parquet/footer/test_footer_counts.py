"""Footers whose counts and sizes contradict one another are refused by name, wherever they are read."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import pqcache
from pqcache.errors import ParquetError
from pqcache.parquet import footer
from pqcache.parquet import thrift as t
from pqcache.parquet.validation import check_footer
from pqcache.torch import ParquetDataset

TABLE = pa.table(
    {
        "i": range(100),
        "s": [f"s{n % 7}" for n in range(100)],
        "l": [[n] * (n % 3) for n in range(100)],
        "n": [{"a": n} for n in range(100)],
    }
)
COLUMNS = {"i": 0, "s": 1, "l": 2, "n": 3}


def written(table: pa.Table = TABLE, **options: Any) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink, **{"row_group_size": 50, **options})
    return sink.getvalue()


def changed(change: Callable[[t.Struct, list[t.Struct]], object]) -> bytes:
    """Return a file with ``change`` made to its footer, given as a struct and as the metadata of the first chunks."""
    data = written()
    size = int.from_bytes(data[-8:-4], "little")
    fields = t.decode(data[-8 - size : -8], "x")
    change(fields, [chunk[3][1] for chunk in fields[4][1].values[0][1][1].values])
    return data[: -8 - size] + footer.footer_and_magic(fields)


def of_chunk(column: str, **numbers: int) -> bytes:
    """Return a file with other ``numbers`` in the first chunk of a column."""
    ids = {"values": 5, "uncompressed": 6, "size": 7, "data": 9, "dictionary": 11}
    return changed(lambda _, metas: metas[COLUMNS[column]].update({ids[k]: (t.I64, v) for k, v in numbers.items()}))


def of_rows(group: int | None = None, file: int | None = None) -> bytes:
    """Return a file with another number of rows in its first row group, or as its own."""

    def change(fields: t.Struct, metas: list[t.Struct]) -> None:
        if group is not None:
            fields[4][1].values[0][3] = (t.I64, group)
        if file is not None:
            fields[3] = (t.I64, file)

    return changed(change)


def all_counts(rows: int) -> bytes:
    """Return a file whose first row group has so many rows, and each of its columns so many values."""

    def change(fields: t.Struct, metas: list[t.Struct]) -> None:
        fields[3] = (t.I64, rows + 50)
        fields[4][1].values[0][3] = (t.I64, rows)
        for meta in metas:
            meta[5] = (t.I64, rows)

    return changed(change)


CONTRADICTIONS = {
    "more values": (of_chunk("i", values=100), "row group 0 has 50 rows, its column i 100 values"),
    "fewer values": (of_chunk("s", values=49), "row group 0 has 50 rows, its column s 49 values"),
    "values of a struct": (of_chunk("n", values=51), "row group 0 has 50 rows, its column n.a 51 values"),
    "fewer values in lists": (of_chunk("l", values=49), "row group 0 has 50 rows, its column l.list.element 49 values"),
    "more rows in a row group": (of_rows(group=100, file=150), "row group 0 has 100 rows, its column i 50 values"),
    "no rows in a row group": (of_rows(group=0, file=50), "row group 0 has 0 rows, its column i 50 values"),
    "rows of the file": (of_rows(file=120), "the file has 120 rows, its row groups 100"),
    "fewer rows of the file": (of_rows(file=50), "the file has 50 rows, its row groups 100"),
    "negative rows": (of_rows(group=-50, file=0), "row group 0 has -50 rows"),
    "a tebi of rows": (all_counts(1 << 40), "column i of row group 0 has 1,099,511,627,776 values in"),
    "a size beyond the file": (of_chunk("i", size=1 << 30), "column i of row group 0 ends at byte 1,073,741,"),
    "an offset beyond the file": (of_chunk("s", data=1 << 40, dictionary=1 << 40), "column s of row group 0 ends at"),
    "a negative size": (of_chunk("i", size=-5), "column i has a size, count or offset that is missing or negative"),
    "a negative uncompressed size": (of_chunk("i", uncompressed=-5), "column i has a size"),
    "a negative offset": (of_chunk("l", data=-4), "column l.list.element has a size"),
    "a negative count": (of_chunk("i", values=-50), "column i has a size"),
}


def footer_of(data: bytes) -> bytes:
    return data[-8 - int.from_bytes(data[-8:-4], "little") : -8]


@pytest.mark.parametrize("name", CONTRADICTIONS)
@pytest.mark.parametrize("before", [False, True], ids=["new", "like the one before"])
def test_each_is_refused(name: str, before: bool) -> None:
    data, said = CONTRADICTIONS[name]
    if before:
        check_footer(footer_of(written()), "well.parquet", len(written()))
    with pytest.raises(ParquetError, match=r"^bad\.parquet: the Parquet footer is damaged") as error:
        check_footer(footer_of(data), "bad.parquet", len(data))
    assert said in str(error.value)


def test_the_second_row_group_is_checked_too() -> None:
    def change(fields: t.Struct, metas: list[t.Struct]) -> None:
        fields[4][1].values[1][1][1].values[0][3][1][5] = (t.I64, 51)

    with pytest.raises(ParquetError, match="row group 1 has 50 rows, its column i 51 values"):
        check_footer(footer_of(changed(change)), "bad.parquet", None)


def without(number: int) -> bytes:
    """Return a file whose chunks lack a field of their metadata."""
    return changed(lambda _, metas: [meta.pop(number, None) for meta in metas])


OLD = {
    "dictionary offset 0": of_chunk("i", dictionary=0),
    "dictionary offset -1": of_chunk("i", dictionary=-1),
    "no dictionary offset": without(11),
    "a size that lacks the dictionary's header": of_chunk("i", size=20),  # PARQUET-816
    "many values in lists": of_chunk("l", values=5000),
    "no statistics": without(12),
    "a file offset": changed(
        lambda fields, _: [c.update({2: (t.I64, -1)}) for c in fields[4][1].values[0][1][1].values]
    ),
    "no values and no place for them": changed(
        lambda fields, metas: [
            *(meta.update({5: (t.I64, 0), 9: (t.I64, -9)}) for meta in metas),
            fields[4][1].values[0].update({3: (t.I64, 0)}),
            fields.update({3: (t.I64, 50)}),
        ]
    ),
    "no row groups": written(TABLE.slice(0, 0)),
    "no columns": changed(lambda fields, _: fields.update({3: (t.I64, 0), 4: (t.LIST, t.Items(t.STRUCT, []))})),
    "one value in a large run": all_counts((1 << 31) - 1),
}


@pytest.mark.parametrize("name", OLD)
def test_what_old_writers_do_is_accepted(name: str) -> None:
    for _ in range(2):
        check_footer(footer_of(OLD[name]), name, len(OLD[name]))


def test_a_chunk_in_another_file_has_its_offsets_there() -> None:
    def change(fields: t.Struct, metas: list[t.Struct]) -> None:
        fields[4][1].values[0][1][1].values[0][1] = (t.BINARY, b"other.parquet")
        fields[4][1].values[0][1][1].values[0] = dict(sorted(fields[4][1].values[0][1][1].values[0].items()))
        metas[0][9] = (t.I64, 1 << 40)

    data = changed(change)
    check_footer(footer_of(data), "x", len(data))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    for day in ("1", "2"):
        (tmp_path / "shop" / f"dt={day}").mkdir(parents=True)
        (tmp_path / "shop" / f"dt={day}" / "a.parquet").write_bytes(written())
    return tmp_path / "shop"


@pytest.mark.parametrize(
    "options",
    [{}, {"row_group_size": "5KB"}, {"columns": ["i"]}, {"where": "i > 5"}, {"where": "i >= 0", "columns": ["l"]}],
    ids=str,
)
@pytest.mark.parametrize("name", ["more values", "rows of the file", "a size beyond the file"])
def test_sync_refuses_it(source: Path, tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    cache = tmp_path / "cache"
    before = pqcache.sync(str(source), cache, **options).snapshot
    (source / "dt=2" / "b.parquet").write_bytes(CONTRADICTIONS[name][0])
    with pytest.raises(ParquetError, match=r"dt=2/b\.parquet: the Parquet footer is damaged"):
        pqcache.sync(str(source), cache, **options)
    assert pqcache.Cache(cache).snapshot().id == before


def test_inspect_the_loader_and_repartition_refuse_it(source: Path, tmp_path: Path) -> None:
    (source / "dt=2" / "b.parquet").write_bytes(CONTRADICTIONS["more values"][0])
    said = r"dt=2/b\.parquet: the Parquet footer is damaged \(row group 0 has 50 rows, its column i 100 values\)"
    with pytest.raises(ParquetError, match=said):
        pqcache.inspect(str(source))
    with pytest.raises(ParquetError, match=said):
        pqcache.inspect(f"file://{source}")
    with pytest.raises(ParquetError, match=said):
        ParquetDataset(source, batch_size=10)
    with pytest.raises(ParquetError, match=said):
        pqcache.repartition(str(source), tmp_path / "out", row_group_size="5KB")
