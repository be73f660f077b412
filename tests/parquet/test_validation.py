"""Footers that contradict themselves, or on which pyarrow ends the process: refused by name wherever they are read."""

from __future__ import annotations

import base64
import io
import os
import random
from collections.abc import Callable
from contextlib import suppress
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import pqcache
from pqcache.errors import ParquetError, PqcacheError
from pqcache.parquet import thrift as t
from pqcache.parquet.statistics import row_group_columns
from pqcache.parquet.validation import check_footer, footer_in
from pqcache.torch import ParquetDataset
from tests.forked_commands import run_pqcache, true_in_child
from tests.pages import edited, footer_of

TABLE = pa.table(
    {
        "i": pa.array(range(100)),
        "s": [f"s{n % 7}" for n in range(100)],
        "l": [[n] * (n % 3) for n in range(100)],
        "n": [{"a": n} for n in range(100)],
        "v": pa.array([[1.0] * 300] * 100, pa.list_(pa.float32())),
        "d": [Decimal(n) / 4 for n in range(100)],
        "m": pa.array([[("k", n)] for n in range(100)], pa.map_(pa.string(), pa.int64())),
        "b": pa.array([n % 2 == 0 for n in range(100)]),
    }
)
LEAVES = {"i": 0, "s": 1, "l": 2, "n": 3, "d": 5, "b": 8}
Change = Callable[[t.Struct], object]


def written(table: pa.Table = TABLE, **options: Any) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink, **{"row_group_size": 50, **options})
    return sink.getvalue()


def of_chunk(column: str, change: Change, group: int = 0) -> bytes:
    """Return a file with ``change`` made to the metadata of a column chunk."""
    place = LEAVES[column]
    return edited(written(), lambda fields: change(fields[4][1].values[group][1][1].values[place][3][1]))


def of_numbers(column: str, group: int = 0, **numbers: int) -> bytes:
    """Return a file with other ``numbers`` in a column chunk."""
    ids = {"values": 5, "uncompressed": 6, "size": 7, "data": 9, "dictionary": 11}
    return of_chunk(column, lambda meta: meta.update({ids[k]: (t.I64, v) for k, v in numbers.items()}), group)


def of_rows(group: int | None = None, file: int | None = None) -> bytes:
    """Return a file with another number of rows in its first row group, or as its own."""

    def change(fields: t.Struct) -> None:
        if group is not None:
            fields[4][1].values[0][3] = (t.I64, group)
        if file is not None:
            fields[3] = (t.I64, file)

    return edited(written(), change)


def of_first_chunks(change: Change, more: Change = lambda fields: None) -> bytes:
    """Return a file with ``change`` made to the metadata of the chunks of its first row group, and ``more`` to all."""

    def both(fields: t.Struct) -> None:
        for chunk in fields[4][1].values[0][1][1].values:
            change(chunk[3][1])
        more(fields)

    return edited(written(), both)


def all_counts(rows: int) -> bytes:
    """Return a file whose first row group has that many rows, and each of its columns that many values."""

    def more(fields: t.Struct) -> None:
        fields[3] = (t.I64, rows + 50)
        fields[4][1].values[0][3] = (t.I64, rows)

    return of_first_chunks(lambda meta: meta.update({5: (t.I64, rows)}), more)


CONTRADICTIONS = {
    "more values": (of_numbers("i", values=100), "row group 0 has 50 rows, its column i 100 values"),
    "fewer values": (of_numbers("s", values=49), "row group 0 has 50 rows, its column s 49 values"),
    "values of a struct": (of_numbers("n", values=51), "row group 0 has 50 rows, its column n.a 51 values"),
    "fewer values in lists": (of_numbers("l", values=49), "has 50 rows, its column l.list.element 49 values"),
    "the second row group": (of_numbers("i", 1, values=51), "row group 1 has 50 rows, its column i 51 values"),
    "more rows in a row group": (of_rows(group=100, file=150), "row group 0 has 100 rows, its column i 50 values"),
    "no rows in a row group": (of_rows(group=0, file=50), "row group 0 has 0 rows, its column i 50 values"),
    "rows of the file": (of_rows(file=120), "the file has 120 rows, its row groups 100"),
    "negative rows": (of_rows(group=-50, file=0), "row group 0 has -50 rows"),
    "a tebi of rows": (all_counts(1 << 40), "column i of row group 0 has 1,099,511,627,776 values in"),
    "a size beyond the file": (of_numbers("i", size=1 << 30), "column i of row group 0 ends at byte 1,073,741,"),
    "an offset beyond the file": (of_numbers("s", data=1 << 40, dictionary=1 << 40), "column s of row group 0 ends at"),
    "a negative size": (of_numbers("i", size=-5), "column i has a size, count or offset that is missing or negative"),
    "a negative uncompressed size": (of_numbers("i", uncompressed=-5), "column i has a size"),
    "a negative offset": (of_numbers("l", data=-4), "column l.list.element has a size"),
    "a negative count": (of_numbers("i", values=-50), "column i has a size"),
    "fewer columns": (
        edited(written(), lambda fields: fields[4][1].values[0][1][1].values.pop()),
        "a row group has 8 columns, the schema 9",
    ),
}


def of_sizes(number: int, value: tuple[int, Any]) -> Change:
    def change(meta: t.Struct) -> None:
        meta[16] = (t.STRUCT, dict(sorted({**meta[16][1], number: value}.items())))

    return change


def levels(count: int) -> tuple[int, t.Items]:
    return t.LIST, t.Items(t.I64, [50] * count)


ENDING = {
    name: (of_chunk(column, change, 1), said)
    for name, (column, change, said) in {
        "definition levels": ("i", of_sizes(3, levels(3)), "a histogram of 3 levels instead"),
        "repetition levels": ("l", of_sizes(2, levels(4)), "histogram"),
        "byte arrays": ("i", of_sizes(1, (t.I64, 7)), "byte arrays"),
        "another type": ("i", lambda meta: meta.update({1: (t.I32, 1)}), "type 1"),
        "a type that is none": ("i", lambda meta: meta.update({1: (t.I32, 99)}), "type 99"),
        "a codec that is none": ("s", lambda meta: meta.update({4: (t.I32, 77)}), "unknown codec"),
        "a short minimum": ("i", lambda meta: meta[12][1].update({6: (t.BINARY, b"abc")}), "minimum"),
        "an empty maximum": ("b", lambda meta: meta[12][1].update({5: (t.BINARY, b"")}), "minimum"),
        "a short decimal": ("d", lambda meta: meta[12][1].update({5: (t.BINARY, b"a")}), "minimum"),
    }.items()
}
DAMAGE = {**CONTRADICTIONS, **ENDING}


@pytest.mark.parametrize("name", DAMAGE)
def test_each_is_refused_also_after_one_that_is_well(name: str) -> None:
    data, said = DAMAGE[name]
    for _ in range(2):
        with pytest.raises(ParquetError, match=r"^bad\.parquet: the Parquet footer is damaged") as error:
            check_footer(footer_of(data), "bad.parquet", len(data))
        assert said in str(error.value)
        check_footer(footer_of(written()), "well.parquet", len(written()))


def without_row_groups(fields: t.Struct) -> None:
    fields |= {3: (t.I64, 0), 4: (t.LIST, t.Items(t.STRUCT, []))}


def without_rows(fields: t.Struct) -> None:
    fields[4][1].values[0][3] = (t.I64, 0)
    fields[3] = (t.I64, 50)


def with_file_offsets(fields: t.Struct) -> None:
    for chunk in fields[4][1].values[0][1][1].values:
        chunk[2] = (t.I64, -1)


def in_another_file(fields: t.Struct) -> None:
    chunk = fields[4][1].values[0][1][1].values[0]
    chunk[3][1][9] = (t.I64, 1 << 40)
    fields[4][1].values[0][1][1].values[0] = {1: (t.BINARY, b"other.parquet"), **chunk}


NULLS = pa.table({"a": pa.nulls(9), "b": pa.nulls(9, pa.int8()), "c": pa.nulls(9, pa.list_(pa.string()))})
WELL = {
    "plain": written(),
    "page index": written(write_page_index=True, compression="zstd"),
    "no statistics": written(write_statistics=False, use_dictionary=False),
    "old": written(version="1.0", data_page_version="2.0"),
    "one row group of many": written(row_group_size=3),
    "sorted": written(sorting_columns=[pq.SortingColumn(0)]),
    "bloom": written(bloom_filter_options={"i": {"ndv": 10}}),
    "int96": written(pa.table({"t": pa.array([1, 2], pa.timestamp("ns"))}), use_deprecated_int96_timestamps=True),
    "no rows": written(TABLE.slice(0, 0)),
    "no columns": written(pa.table({})),
    "wide": written(pa.table({f"c{n}": [n, None] for n in range(300)})),
    "nulls": written(NULLS),
    "required": written(TABLE.select(["i"]).cast(pa.schema([pa.field("i", pa.int64(), nullable=False)]))),
    "long strings": written(pa.table({"s": ["x" * 5000, "y" * 70]})),
    "fixed": written(pa.table({"f": pa.array([b"x" * 200] * 3, pa.binary(200)), "h": pa.array([1] * 3, pa.float16())})),
    # what old writers do
    "dictionary offset 0": of_numbers("i", dictionary=0),
    "dictionary offset -1": of_numbers("i", dictionary=-1),
    "no dictionary offset": of_first_chunks(lambda meta: meta.pop(11, None)),
    "a size that lacks the dictionary's header": of_numbers("i", size=20),  # PARQUET-816
    "many values in lists": of_numbers("l", values=5000),
    "statistics in one row group": of_first_chunks(lambda meta: meta.pop(12, None)),
    "a file offset": edited(written(), with_file_offsets),
    "another file": edited(written(), in_another_file),
    "no values and no place for them": of_first_chunks(
        lambda meta: meta.update({5: (t.I64, 0), 9: (t.I64, -9)}), without_rows
    ),
    "no row groups": edited(written(), without_row_groups),
    "one value in a large run": all_counts((1 << 31) - 1),
}


@pytest.mark.parametrize("name", WELL)
def test_what_is_well_passes(name: str) -> None:
    for _ in range(2):
        check_footer(footer_of(WELL[name]), name, len(WELL[name]))


def test_no_flipped_bit_ends_a_process() -> None:
    """A few dozen of the flips would end it without the check."""
    rng, data = random.Random(3), written()
    length = len(footer_of(data))

    def read_flipped() -> bool:
        for _ in range(1500):
            at = len(data) - 8 - rng.randrange(1, length)
            flipped = data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
            with suppress(PqcacheError, LookupError, ValueError):
                row_group_columns(*footer_in(flipped, "x", size=len(data)))
        return True

    assert true_in_child(read_flipped)


# ---- wherever files are read


@pytest.fixture
def source(tmp_path: Path) -> Path:
    for day in ("1", "2"):
        (tmp_path / "shop" / f"dt={day}").mkdir(parents=True)
        (tmp_path / "shop" / f"dt={day}" / "a.parquet").write_bytes(written())
    return tmp_path / "shop"


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("rows of the file", {}),
        ("a size beyond the file", {"row_group_size": "20KB"}),
        ("definition levels", {"columns": ["i"]}),
        ("a size beyond the file", {"where": "i >= 0", "columns": ["l"]}),
    ],
)
def test_sync_refuses_it_and_the_cache_is_intact(
    source: Path, tmp_path: Path, name: str, options: dict[str, Any]
) -> None:
    cache = tmp_path / "cache"
    before = pqcache.sync(str(source), cache, **options).snapshot
    (source / "dt=2" / "b.parquet").write_bytes(DAMAGE[name][0])
    with pytest.raises(ParquetError, match=r"dt=2/b\.parquet: the Parquet footer is damaged"):
        pqcache.sync(str(source), cache, **options)
    assert pqcache.Cache(cache).snapshot().id == before
    assert pqcache.verify(cache, deep=True).ok
    (source / "dt=2" / "b.parquet").write_bytes(written())
    assert pqcache.sync(str(source), cache, **options).published


def encrypted(path: Path) -> None:
    """Write a file one of whose columns is encrypted, while its footer is not."""
    encryption = pytest.importorskip("pyarrow.parquet.encryption")

    class Keys(encryption.KmsClient):  # type: ignore[misc,name-defined]
        def wrap_key(self, key: bytes, name: str) -> bytes:
            return base64.b64encode(key)

    how = encryption.EncryptionConfiguration(footer_key="f", column_keys={"k": ["i"]}, plaintext_footer=True)
    factory = encryption.CryptoFactory(lambda _: Keys())
    properties = factory.file_encryption_properties(encryption.KmsConnectionConfig(), how)
    with pq.ParquetWriter(path, TABLE.schema, encryption_properties=properties) as writer:
        writer.write_table(TABLE)


def test_sync_refuses_encrypted_columns(source: Path, tmp_path: Path) -> None:
    encrypted(source / "dt=2" / "b.parquet")
    with pytest.raises(ParquetError, match=r"dt=2/b\.parquet: columns are encrypted, which cannot be read; decrypt it"):
        pqcache.sync(str(source), tmp_path / "cache")


def test_inspect_the_loader_and_repartition_refuse_it(source: Path, tmp_path: Path) -> None:
    (source / "dt=2" / "b.parquet").write_bytes(DAMAGE["definition levels"][0])
    for arguments in (
        ("inspect", source),
        ("inspect", f"file://{source}"),
        ("repartition", source, tmp_path / "out", "--row-group-size", "20000"),
    ):
        ended = run_pqcache(*arguments)
        assert ended.returncode == 1, arguments
        assert "dt=2/b.parquet: the Parquet footer is damaged (a histogram of 3 levels" in ended.stderr, arguments
    with pytest.raises(ParquetError, match=r"dt=2/b\.parquet: the Parquet footer is damaged \(a histogram"):
        ParquetDataset(source, batch_size=10)


def in_cache(source: Path, tmp_path: Path) -> tuple[Path, str]:
    """Return a cache one of whose files has been damaged since, keeping its size, and that file's path."""
    pqcache.sync(str(source), tmp_path / "cache")
    path = pqcache.Cache(tmp_path / "cache").snapshot().path / "dt=2" / "a.parquet"
    data = path.read_bytes()
    codec = b"\x19\x38\x01v\x04list\x07element\x15\x02"  # the path of v, and snappy
    end = data.index(codec, len(data) - 8 - len(footer_of(data))) + len(codec)
    path.chmod(0o644)
    path.write_bytes(data[: end - 1] + b"\x54" + data[end:])
    return tmp_path / "cache", os.fspath(path)


def test_verify_and_the_loader_name_it(source: Path, tmp_path: Path) -> None:
    cache, damaged = in_cache(source, tmp_path)
    (item,) = pqcache.verify(cache).damage
    assert item.path == "dt=2/a.parquet"
    assert "unknown codec" in item.message
    for path in (cache, Path(damaged).parent):
        with pytest.raises(ParquetError, match=f"^{damaged}: the Parquet footer is damaged"):
            list(ParquetDataset(path, columns=["i", "v"], batch_size=10))
