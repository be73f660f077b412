"""Footers: what pyarrow writes survives byte for byte, and what is hostile raises ParquetError in no time."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pqcache.errors import ParquetError
from pqcache.parquet import footer as f
from pqcache.parquet import thrift as t
from pqcache.parquet.validation import footer_in
from tests.examples import examples
from tests.pages import footer_of


@contextlib.contextmanager
def blaming(name: str) -> Iterator[None]:
    """Let nothing but a ParquetError that names ``name`` happen, or no error at all."""
    try:
        yield
    except ParquetError as error:
        if name not in str(error):
            raise AssertionError(f"{name} is not named") from error


def parquet(table: pa.Table, **options: Any) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink, **options)
    return sink.getvalue()


NESTED = pa.table(
    {
        "i": pa.array(range(100), pa.int32()),
        "m": pa.array([[("k", [1, None])]] * 100, pa.map_(pa.string(), pa.list_(pa.int64()))),
        "s": [{"a": {"b": [str(n)]}, "c": None} for n in range(100)],
        "d": pa.array(["x", "y"] * 50).dictionary_encode(),
        "t": pa.array(range(100), pa.timestamp("ns", "UTC")),
    }
).replace_schema_metadata({"k": "v", "": ""})

FILES = {
    "plain": parquet(NESTED),
    "page index": parquet(NESTED, row_group_size=10, write_page_index=True),
    "sorted": parquet(NESTED, row_group_size=7, sorting_columns=[pq.SortingColumn(0, descending=True)]),
    "bloom": parquet(NESTED, bloom_filter_options={"i": {"ndv": 10}}),
    "old": parquet(NESTED.select(["i", "d"]), version="1.0", data_page_version="2.0", compression="zstd"),
    "no rows": parquet(NESTED.slice(0, 0)),
    "wide": parquet(pa.table({f"c{n}": [n] for n in range(300)})),
    "no columns": parquet(pa.table({})),
    "int96": parquet(NESTED.select(["t"]), use_deprecated_int96_timestamps=True),
}


@pytest.mark.parametrize("name", FILES)
def test_round_trip_is_byte_identical(name: str) -> None:
    data = footer_of(FILES[name])
    assert t.encode(t.decode(data, name)) == data


def test_fields_that_pyarrow_does_not_write_survive() -> None:
    """Such as the bounds of shapes, which are doubles."""
    fields: t.Struct = {
        -5: (t.DOUBLE, b"12345678"),
        1: (t.LIST, t.Items(t.DOUBLE, [bytes(8)] * 20)),
        3: (t.SET, t.Items(t.BYTE, [0, 255])),
        200: (t.STRUCT, {2: (t.BOOL, True), 3: (t.I16, -(2**15)), 4: (t.I64, 2**63 - 1)}),
    }
    assert t.decode(t.encode(fields), "x") == fields


@settings(max_examples=examples(150), deadline=None)
@given(st.sampled_from(sorted(FILES)), st.data())
def test_damaged_footers_raise_parquet_error_or_decode(name: str, data: st.DataObject) -> None:
    broken = bytearray(footer_of(FILES[name]))
    for _ in range(data.draw(st.integers(1, 4))):
        broken[data.draw(st.integers(0, len(broken) - 1))] = data.draw(st.integers(0, 255))
    with blaming("bad.parquet"):
        fields = t.decode(bytes(broken), "bad.parquet")
        schema = f.schema_of(fields, "bad.parquet")
        leaves = f.leaves_of(schema, "bad.parquet")
        f.with_names_of(schema, schema, "bad.parquet")
        for group in f.row_groups_of(fields, "bad.parquet"):
            f.shift_row_group(group, 10, 0, [leaf.path for leaf in leaves], "bad.parquet")


HOSTILE = {
    "a list of 2^60": bytes([0x29, 0xFC]) + b"\xff" * 8 + b"\x0f",
    "a string of 2^40": bytes([0x18]) + b"\x80\x80\x80\x80\x80\x40",
    "an endless integer": bytes([0x15]) + b"\xff" * 100,
    "nested structs": bytes([0x1C]) * 100_000,
    "nested lists": bytes([0x19]) + bytes([0x19]) * 100_000,
    "a map of 2^60": bytes([0x1B]) + b"\xff" * 8 + b"\x0f",
    "an unknown kind": bytes([0x1E, 0]),
    "one field twice": bytes([0x15, 0, 0x05, 2, 0]),
    "nothing": b"",
    "no end": bytes([0x15, 0]),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_footers_are_refused(name: str) -> None:
    with pytest.raises(ParquetError, match=r"evil\.parquet"):
        t.decode(HOSTILE[name], "evil.parquet")


def test_the_number_of_values_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(t, "_MAX_VALUES", 1000)
    many = bytes([0x19, 0xFC]) + b"\xd0\x0f" + bytes(2000)  # 2,000 empty structs
    with pytest.raises(ParquetError, match="more than 1,000 values"):
        t.decode(many, "x")
    monkeypatch.setattr(t, "_MAX_VALUES", 10_000)
    assert len(t.decode(many + b"\0", "x")[1][1].values) == 2000


@pytest.mark.parametrize(
    "children",
    [[1], [2, 0], [0, 0], [1] * 5000 + [0], [-1], [2**31 - 1, 0]],
    ids=["no child", "one too few", "one too many", "too deep", "negative", "huge"],
)
def test_schemas_that_are_no_tree_are_refused(children: list[int]) -> None:
    schema: list[t.Struct] = [{4: (t.BINARY, b"e"), 5: (t.I32, count)} for count in children]
    with pytest.raises(ParquetError, match=r"evil\.parquet"):
        f.leaves_of(schema, "evil.parquet")


@pytest.mark.parametrize("name", ["page index", "bloom", "sorted"])
def test_moved_row_groups_read_the_same(name: str) -> None:
    """Put 1,000 bytes of padding before the pages and shift: pyarrow must find everything."""
    data = FILES[name]
    fields = t.decode(footer_of(data), name)
    groups = [f.shift_row_group(g, 1000, n, None, name) for n, g in enumerate(f.row_groups_of(fields, name))]
    rows = sum(group[3][1] for group in groups)
    end = f.make_footer(fields, f.schema_of(fields, name), groups, rows, {b"only": b"this", b"bare": None})
    moved = f.MAGIC + bytes(1000) + data[4 : len(data) - 8 - len(footer_of(data))] + f.footer_and_magic(end)
    before, after = pq.ParquetFile(io.BytesIO(data)), pq.ParquetFile(io.BytesIO(moved))
    assert after.read().cast(before.schema_arrow).equals(before.read())
    assert set(after.metadata.metadata) == {b"only", b"bare"}
    assert after.metadata.created_by == before.metadata.created_by
    for number in range(after.metadata.num_row_groups):
        column = after.metadata.row_group(number).column(0)
        assert not column.has_offset_index
        assert not column.has_column_index
        assert column.bloom_filter_offset is None


def test_moving_treats_dictionary_offset_zero_as_none() -> None:
    (group, *_) = f.row_groups_of(t.decode(footer_of(FILES["plain"]), "x"), "x")
    meta = group[1][1].values[0][3][1]
    meta[11] = (t.I64, 0)
    moved = f.shift_row_group(group, 5, 0, None, "x")[1][1].values[0][3][1]
    assert 11 not in moved
    assert moved[9] == (t.I64, meta[9][1] + 5)


@pytest.mark.parametrize("field", [1, 8, 9])
def test_chunks_elsewhere_or_encrypted_are_not_moved(field: int) -> None:
    (group, *_) = f.row_groups_of(t.decode(footer_of(FILES["plain"]), "x"), "x")
    group[1][1].values[1][field] = (t.BINARY, b"other.parquet")
    with pytest.raises(ParquetError, match=r"here\.parquet.*encrypted or in another file"):
        f.shift_row_group(group, 5, 0, None, "here.parquet")


def test_names_are_kept_only_where_levels_agree() -> None:
    def schema_of(kind: pa.DataType, nullable: bool = True) -> list[t.Struct]:
        empty = pa.schema([pa.field("v", kind, nullable)]).empty_table()
        return f.schema_of(t.decode(footer_of(parquet(empty)), "x"), "x")

    ints, required = pa.list_(pa.int32()), pa.list_(pa.field("renamed", pa.int32(), nullable=False))
    assert f.with_names_of(schema_of(ints), schema_of(required), "x") is None
    assert f.with_names_of(schema_of(pa.int32()), schema_of(pa.int32(), nullable=False), "x") is None
    assert f.with_names_of(schema_of(pa.int32()), schema_of(pa.struct([("a", pa.int32())]), False), "x") is not None
    mixed = f.with_names_of(schema_of(pa.int64()), schema_of(pa.timestamp("us")), "x")
    assert mixed == schema_of(pa.timestamp("us"))  # the physical type is the same: the wanted names win
    changed = f.with_names_of(schema_of(pa.string()), schema_of(pa.timestamp("us")), "x")
    assert changed == schema_of(pa.string())  # it is not: the type that is stored wins


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "has no bytes: its writer was killed"),
        (b"PAR1PAR1", "too few"),
        (b"x" * 100, "no PAR1"),
        (b"PAR1" + b"\xff\xff\xff\x7f" + b"PAR1", "footer of 2,147,483,647 bytes"),
        (b"PAR1" + bytes(4) + b"PARE", "encrypted"),
    ],
)
def test_files_without_a_footer_are_named(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "bad.parquet"
    path.write_bytes(data)
    with pytest.raises(ParquetError, match=rf"bad\.parquet.*{message}"):
        f.read_local_tail(path)


def test_columns_nested_too_deeply_are_named() -> None:
    depth = 20_000
    groups = [{3: (t.I32, 1), 4: (t.BINARY, b"s"), 5: (t.I32, 1)}] * depth
    schema = [{4: (t.BINARY, b"root"), 5: (t.I32, 1)}, *groups, {1: (t.I32, 2), 3: (t.I32, 1), 4: (t.BINARY, b"leaf")}]
    no_groups = (t.LIST, t.Items(t.STRUCT, []))
    end = f.footer_and_magic({1: (t.I32, 1), 2: (t.LIST, t.Items(t.STRUCT, schema)), 3: (t.I64, 0), 4: no_groups})
    with pytest.raises(ParquetError, match=r"deep\.parquet: has columns nested deeper than Arrow reads; flatten them"):
        footer_in(end, "deep.parquet", size=None)


def test_a_footer_is_read_whatever_its_length(tmp_path: Path) -> None:
    path = tmp_path / "good.parquet"
    path.write_bytes(FILES["plain"])
    assert f.read_local_tail(path).footer == footer_of(FILES["plain"])
    large = footer_of(FILES["plain"]) + bytes(100_000)
    path.write_bytes(b"PAR1" + large + len(large).to_bytes(4, "little") + b"PAR1")
    tail = f.read_local_tail(path)
    assert (tail.footer, tail.limit) == (large, 4)
    with pytest.raises(ParquetError, match=r"gone\.parquet"):
        f.read_local_tail(tmp_path / "gone.parquet")


def test_many_row_groups_have_ordinals_only_while_they_fit() -> None:
    (group, *_) = f.row_groups_of(t.decode(footer_of(FILES["plain"]), "x"), "x")
    assert f.shift_row_group(group, 0, 32_767, None, "x")[7] == (t.I16, 32_767)
    assert 7 not in f.shift_row_group(group, 0, 32_768, None, "x")
