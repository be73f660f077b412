"""Rows of row groups, whole and in pieces: what pyarrow reads, whoever wrote the file and however it is damaged."""

from __future__ import annotations

import io
import itertools
import os
import random
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import duckdb
import fastparquet
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.types as pt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pqcache.errors import ParquetError
from pqcache.parquet import fast_decode, footer, thrift
from pqcache.parquet.pages import CODECS
from pqcache.parquet.row_group_reader import RowGroupFile
from pqcache.parquet.schema import ARROW_SCHEMA, encode_schema
from tests.examples import examples
from tests.pages import chunks_of, edited
from tests.parquet.list_pages import write_lists
from tests.real_files import CORPUS, MADE

NUMBERS = [pa.int8(), pa.uint16(), pa.int32(), pa.uint32(), pa.int64(), pa.uint64(), pa.float32(), pa.float64()]
PLAIN_TYPES = [pa.bool_(), pa.float16(), pa.date32(), pa.timestamp("us", "UTC"), pa.decimal128(22, 3), pa.binary(5)]
TEXTS = [pa.string(), pa.large_string(), pa.binary(), pa.large_binary()]
LARGE = "large_string_map.brotli.parquet"  # of 4 KB, and 2 GB in memory
CORPUS_FILES = [path for path in sorted(CORPUS.rglob("*.parquet")) if path.name != LARGE] if CORPUS.is_dir() else []


class Counted:
    """Counts the chunks that are decoded without pyarrow, by kind; what comes of them is the same, and does not say."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.kinds: Counter[str] = Counter()
        for name in ("_lists", "_views"):
            patch.setattr(fast_decode, name, self._counted(name, getattr(fast_decode, name)))

    def _counted(self, name: str, decode: Any) -> Any:
        def counted(*arguments: Any) -> Any:
            found = decode(*arguments)
            self.kinds[name] += 1
            return found

        return counted


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    """Has all chunks decoded without pyarrow that can be, also where that does not pay."""
    everything(monkeypatch)
    return Counted(monkeypatch)


def everything(patch: pytest.MonkeyPatch, together: int = 4 << 20) -> None:
    """Change limits, as no fuzz could try hundreds of tables that are long enough for what pays."""
    for name in ("_LONG_TEXT", "_LONG_LIST", "_LONG_REGULAR", "_MANY"):
        patch.setattr(fast_decode, name, 0)
    patch.setattr(fast_decode, "_MANY_IN_PAGE", 0.01)
    patch.setattr(fast_decode, "_PAGE", 0.01)
    patch.setattr(fast_decode, "_TOGETHER", together)


def by_pyarrow(path: Path, row_group: int) -> dict[str, pa.Array] | None:
    """Return the columns of a row group, or None if pyarrow refuses it."""
    try:
        with pq.ParquetFile(path) as file:
            table = file.read_row_group(row_group, use_threads=False)
            rows = file.metadata.row_group(row_group).num_rows
    except (pa.ArrowException, OSError):
        return None
    if table.num_columns and table.num_rows != rows:
        return None
    found: dict[str, pa.Array] = {}
    for field, column in zip(table.schema, table.columns, strict=True):
        found.setdefault(field.name, column.combine_chunks())
    return found


def assert_same(found: pa.Array, expected: pa.Array) -> None:
    """Check that an array is another one, nulls and offsets included, or views of the same values."""
    found.validate()
    with suppress(pa.ArrowInvalid):
        expected.validate(full=True)
        found.validate(full=True)  # unless the file itself has text that isn't UTF-8
    if found.type != expected.type:
        text = pt.is_string(expected.type) or pt.is_large_string(expected.type)
        assert found.type == (pa.string_view() if text else pa.binary_view())
        assert fast_decode.is_text(expected.type)
        assert found.equals(expected.cast(found.type))
        found = found.cast(expected.type)
    if pt.is_dictionary(expected.type):  # a piece has a dictionary of its own
        found, expected = found.dictionary_decode(), expected.dictionary_decode()
    assert found.null_count == expected.null_count
    same = found.equals(expected)
    assert same or found.to_pandas().map(repr).equals(expected.to_pandas().map(repr))  # NaN


def check_file(path: Path, cuts: random.Random | None = None) -> None:
    """Compare all row groups of a file with what pyarrow reads, and with ``cuts`` pieces of them."""
    file = RowGroupFile(path)
    names = list(dict.fromkeys(file.schema.names))
    for row_group in range(file.metadata.num_row_groups):
        expected = by_pyarrow(path, row_group)
        if expected is None:  # of lists it reads no row of some that it wrote with empty pages
            with suppress(ParquetError):
                file.read_rows(row_group, names)
            continue
        found = file.read_rows(row_group, names)
        assert list(found) == names
        for name in names:
            assert_same(found[name], expected[name])
        if cuts is None:
            continue
        rows = file.metadata.row_group(row_group).num_rows
        edges = sorted({0, rows, *(cuts.randrange(rows + 1) for _ in range(cuts.randrange(1, 4)))})
        for low, high in [*itertools.pairwise(edges), (edges[0], edges[0])]:
            some = cuts.sample(names, cuts.randrange(1, len(names) + 1))
            piece = file.read_rows(row_group, some, low, high)
            assert list(piece) == some
            for name in some:
                assert_same(piece[name], expected[name].slice(low, high - low))


# ---- what is written


def some_nulls(rng: np.random.Generator, count: int, share: float) -> np.ndarray[Any, Any] | None:
    return rng.random(count) < share if share else None


def numbers(rng: np.random.Generator, kind: pa.DataType, count: int, few: int, nulls: float) -> pa.Array:
    values = rng.integers(0, few, count)
    if pt.is_floating(kind):
        values = values / 4 if few > 100 else np.where(values == 1, np.inf, values)
    return pa.array(values, mask=some_nulls(rng, count, nulls)).cast(kind, safe=False)


def texts(rng: np.random.Generator, kind: pa.DataType, count: int, few: int, nulls: float) -> pa.Array:
    lengths = rng.choice([0, 3, 12, 13, 40, 300], few)
    words = np.array([f"{word:05}".encode() * 60 for word in range(few)], object)
    words = np.array([word[:length] for word, length in zip(words, lengths, strict=True)], object)
    values = words[rng.integers(0, few, count)]
    return pa.array(values.tolist(), pa.binary(), mask=some_nulls(rng, count, nulls)).cast(kind)


def lists(rng: np.random.Generator, kind: pa.DataType, items: Any, count: int, nulls: float, how: str) -> pa.Array:
    """Return lists of type ``kind`` of what ``items`` makes so many of."""
    if pt.is_fixed_size_list(kind):
        return pa.FixedSizeListArray.from_arrays(
            items(count * kind.list_size), type=kind, mask=pa.array(rng.random(count) < nulls) if nulls else None
        )
    least = 0 if how == "empty" else 1
    lengths = np.full(count, rng.integers(least, 20)) if how == "regular" else rng.integers(least, 30, count)
    mask = some_nulls(rng, count, nulls)
    lengths[mask if mask is not None else []] = 0
    ends = np.concatenate([[0], np.cumsum(lengths)])
    made, width = (pa.LargeListArray, np.int64) if pt.is_large_list(kind) else (pa.ListArray, np.int32)
    values = items(int(ends[-1]))
    return made.from_arrays(
        pa.array(ends.astype(width)), values, type=kind, mask=None if mask is None else pa.array(mask)
    )


def column(draw: Any, rng: np.random.Generator, count: int) -> tuple[pa.Field, pa.Array]:
    few = draw(st.sampled_from([1, 2, 100, 5000]))
    nulls = draw(st.sampled_from([0, 0, 0.1, 1]))
    inside = draw(st.sampled_from([0, 0, 0, 0.1]))
    kind = draw(st.sampled_from(["list"] * 4 + ["text"] * 3 + ["number", "plain", "words", "struct", "map", "deep"]))
    if kind == "number":
        array = numbers(rng, draw(st.sampled_from(NUMBERS)), count, min(few, 100), nulls)
    elif kind == "plain":
        of = draw(st.sampled_from(PLAIN_TYPES))
        if of == pa.binary(5):
            array = pa.array([b"%05d" % n for n in rng.integers(0, few, count)], of, mask=some_nulls(rng, count, nulls))
        elif of == pa.bool_() or pt.is_float16(of):
            array = pa.array(rng.integers(0, 2, count).astype(of.to_pandas_dtype()), of)
        else:
            values = rng.integers(0, few, count).astype(np.int32 if of == pa.date32() else np.int64)
            array = pa.array(values, mask=some_nulls(rng, count, nulls)).cast(of)
    elif kind == "text":
        array = texts(rng, draw(st.sampled_from(TEXTS)), count, few, nulls)
    elif kind == "words":
        array = texts(rng, pa.string(), count, few, nulls).dictionary_encode()
    elif kind == "struct":
        fields = [numbers(rng, pa.int32(), count, 50, inside), texts(rng, pa.string(), count, 50, inside)]
        mask = some_nulls(rng, count, nulls)
        array = pa.StructArray.from_arrays(fields, ["x", "s"], mask=None if mask is None else pa.array(mask))
    elif kind == "map":
        array = pa.array([[(f"k{n % 5}", n)] * (n % 3) for n in range(count)], pa.map_(pa.string(), pa.int64()))
    elif kind == "deep":
        inner = pa.list_(pa.int32())
        array = lists(
            rng,
            pa.list_(inner),
            lambda n: lists(rng, inner, lambda m: numbers(rng, pa.int32(), m, few, inside), n, nulls, "empty"),
            count,
            nulls,
            "empty",
        )
    else:
        item = pa.field("element", draw(st.sampled_from(NUMBERS)), nullable=bool(inside) or draw(st.booleans()))
        how = draw(st.sampled_from(["regular", "ragged", "ragged", "empty"]))
        shape = draw(st.sampled_from([pa.list_, pa.large_list, lambda inner: pa.list_(inner, 7)]))(item)
        array = lists(rng, shape, lambda n: numbers(rng, item.type, n, few, inside), count, nulls, how)
    return pa.field("c", array.type, nullable=bool(array.null_count) or draw(st.booleans())), array


def encodings(draw: Any, schema: pa.Schema) -> dict[str, str]:
    """Return encodings of columns of numbers that can have them, by path."""
    found = {}
    for field in schema:
        is_list = pt.is_list(field.type) or pt.is_large_list(field.type) or pt.is_fixed_size_list(field.type)
        kind = field.type.value_type if is_list else field.type
        path = f"{field.name}.list.element" if is_list else field.name
        some = ["PLAIN", "PLAIN"]
        if kind in NUMBERS:
            some.append("BYTE_STREAM_SPLIT")
            some += ["DELTA_BINARY_PACKED"] * pt.is_integer(kind)
        elif kind in TEXTS:
            some += ["DELTA_LENGTH_BYTE_ARRAY", "DELTA_BYTE_ARRAY"]
        else:
            continue
        found[path] = draw(st.sampled_from(some))
    return found


@st.composite
def files(draw: Any) -> tuple[pa.Table, dict[str, Any], int]:
    """Make a table, how it is written, and a seed."""
    seed = draw(st.integers(0, 1000))
    rng = np.random.default_rng(seed)
    count = draw(st.sampled_from([1, 30, 300]))
    made = [column(draw, rng, count) for _ in range(draw(st.integers(1, 4)))]
    names = draw(st.permutations(["a", "b", "c.d", "e"]))
    fields = [field.with_name(name) for (field, _), name in zip(made, names, strict=False)]
    table = pa.table([array for _, array in made], pa.schema(fields))
    how: dict[str, Any] = {
        "compression": draw(st.sampled_from(list(CODECS))),
        "data_page_version": draw(st.sampled_from(["1.0", "2.0"])),
        "data_page_size": draw(st.sampled_from([1, 100, 1 << 20])),
        "write_batch_size": draw(st.sampled_from([1, 7, 1024])),
        "dictionary_pagesize_limit": draw(st.sampled_from([40, 1 << 20])),
        "row_group_size": draw(st.sampled_from([17, 1000])),
        "write_page_index": draw(st.booleans()),
        "write_statistics": draw(st.booleans()),
        "store_schema": draw(st.booleans()),
        "use_dictionary": draw(st.booleans()),
        "use_content_defined_chunking": False,
    }
    if not how["use_dictionary"]:
        how["column_encoding"] = encodings(draw, table.schema)
    return table, how, seed


def test_rows_are_those_that_pyarrow_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counted: Counted) -> None:
    path = tmp_path / "t.parquet"

    @settings(deadline=None, max_examples=examples(180))
    @given(made=files(), together=st.sampled_from([1, 500, 4 << 20]))
    def check(made: tuple[pa.Table, dict[str, Any], int], together: int) -> None:
        table, how, seed = made
        pq.write_table(table, path, **how)
        monkeypatch.setattr(fast_decode, "_TOGETHER", together)
        check_file(path, random.Random(seed) if how["write_page_index"] else None)

    check()
    assert min(counted.kinds["_lists"], counted.kinds["_views"]) > 3, "tables that are decoded without pyarrow"


# ---- other writers


def frame() -> pd.DataFrame:
    rows = 500
    return pd.DataFrame(
        {
            "n": np.arange(rows),
            "x": np.where(np.arange(rows) % 7 == 0, np.nan, np.arange(rows) / 3),
            "s": pd.array([None if i % 9 == 0 else f"text {i % 50}" for i in range(rows)], "object"),
            "b": pd.array([bytes([i % 256]) * (i % 300) for i in range(rows)], "object"),
            "c": pd.Categorical([f"k{i % 4}" for i in range(rows)]),
            "t": pd.Timestamp("2026-01-01") + pd.to_timedelta(np.arange(rows), "min"),
        }
    )


@pytest.mark.usefixtures("counted")
@pytest.mark.parametrize(("codec", "nulls"), [("UNCOMPRESSED", True), ("SNAPPY", False), ("ZSTD", True)])
def test_files_of_fastparquet(tmp_path: Path, codec: str, nulls: bool) -> None:
    data = frame() if nulls else frame().fillna({"x": 0.0, "s": ""})
    fastparquet.write(str(tmp_path / "t.parquet"), data, [0, 170, 400], codec, has_nulls=nulls)
    check_file(tmp_path / "t.parquet")


@pytest.mark.usefixtures("counted")
@pytest.mark.parametrize("codec", ["uncompressed", "lz4_raw"])
def test_files_of_duckdb(tmp_path: Path, codec: str) -> None:
    """It packs 256 levels at a time, also where fewer are left, and so do the last pages of most row groups."""
    path = tmp_path / "t.parquet"
    with duckdb.connect() as connection:
        connection.execute("set threads = 1")
        connection.execute(
            f"""copy (select i, repeat(i::varchar, i % 90) s, 'k' || i % 7 k, range(i % 40) l, range(100) c,
            case when i % 11 > 0 then [i, null] end n, {{'a': i, 'b': [i::varchar]}} st from range(2400) t(i))
            to '{path}' (format parquet, codec '{codec}', row_group_size 2048)"""
        )
    check_file(path)


@pytest.mark.usefixtures("counted")
@pytest.mark.parametrize(("codec", "coded"), [("UNCOMPRESSED", 0), ("SNAPPY", 2), ("LZ4", 9)])
def test_pages_that_begin_within_a_list(tmp_path: Path, codec: str, coded: int) -> None:
    rng = random.Random(coded)
    rows: list[Any] = [[rng.randrange(50) for _ in range(rng.randrange(1, 40))] for _ in range(60)]
    cuts = [rng.randrange(1200) for _ in range(8)]
    write_lists(tmp_path / "full.parquet", rows, cuts, coded, coded, codec)
    check_file(tmp_path / "full.parquet")
    rows[7], rows[8], rows[9] = None, [], [1, None]
    write_lists(tmp_path / "nulls.parquet", rows, cuts, coded, coded, codec)
    check_file(tmp_path / "nulls.parquet")


@pytest.mark.usefixtures("counted")
@pytest.mark.parametrize("path", CORPUS_FILES, ids=str)
def test_real_files_are_read_as_pyarrow_reads_them_or_refused_by_name(path: Path) -> None:
    refused = ""
    try:
        check_file(path)
    except ParquetError as error:
        refused = str(error)
    assert refused == "" or refused.startswith(f"{path}: ")


# ---- what pays, and what else comes back


def one(path: Path, name: str = "t", **how: Any) -> pa.Array:
    return RowGroupFile(path).read_rows(0, [name], **how)[name]


def test_long_values_and_lists_do_not_go_through_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng, path = np.random.default_rng(0), tmp_path / "t.parquet"
    images = [None if i % 5 == 0 else rng.bytes(20_000) for i in range(100)]
    tokens = pa.array(rng.integers(0, 99, 256_000), pa.int32())
    ends = pa.array(np.arange(0, 256_001, 2560, dtype=np.int32))
    table = pa.table({"i": images, "t": pa.ListArray.from_arrays(ends, tokens), "s": ["short"] * 100})
    pq.write_table(table, path)
    kinds = Counted(monkeypatch).kinds
    check_file(path)
    assert kinds == {"_lists": 1, "_views": 1}
    assert one(path, "i").type == pa.binary_view()
    pq.write_table(table.slice(0, 10), path)
    check_file(path)
    assert kinds["_lists"] == 1  # few values are decoded by pyarrow sooner


def test_lists_that_are_not_of_the_fixed_size_are_refused(tmp_path: Path, counted: Counted) -> None:
    path, said = tmp_path / "t.parquet", pa.schema([("t", pa.list_(pa.int64(), 3))])
    pq.write_table(pa.table({"t": [[1, 2], [3, 4, 5, 6]]}), path)

    def lie(fields: thrift.Struct) -> None:
        (pair,) = [pair for pair in fields[5][1].values if pair[1][1] == ARROW_SCHEMA]
        pair[2] = (thrift.BINARY, encode_schema(said))

    path.write_bytes(edited(path.read_bytes(), lie))
    assert pt.is_fixed_size_list(RowGroupFile(path).schema.field("t").type)
    with pytest.raises(ParquetError, match="row group 0 cannot be read"):
        one(path)
    assert not counted.kinds


def test_extension_types_come_as_such(tmp_path: Path, counted: Counted) -> None:
    path = tmp_path / "t.parquet"
    kind = pa.fixed_shape_tensor(pa.float32(), (2, 3))
    array = pa.ExtensionArray.from_storage(kind, pa.array([[float(i)] * 6 for i in range(50)], kind.storage_type))
    pq.write_table(pa.table({"t": array}), path, write_page_index=True)
    assert one(path).equals(array)
    assert one(path, low=3, high=5).equals(array[3:5])
    assert one(path, low=3, high=3).equals(array[:0])
    assert counted.kinds == {"_lists": 2}


def test_columns_that_the_file_lacks_are_left_out_and_none_are_allowed(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [1, 2], "b": [3, 4]}), tmp_path / "t.parquet")
    file = RowGroupFile(tmp_path / "t.parquet")
    assert list(file.read_rows(0, ["b", "x", "b", "a"])) == ["b", "a"]
    assert file.read_rows(0, []) == {}
    assert file.metadata.row_group(0).num_rows == 2


def test_of_columns_of_one_name_the_first_is_read(tmp_path: Path) -> None:
    table = pa.table([pa.array([1, 2]), pa.array(["x", "y"])], ["t", "t"])
    pq.write_table(table, tmp_path / "t.parquet", write_page_index=True)
    assert one(tmp_path / "t.parquet").to_pylist() == [1, 2]
    assert not RowGroupFile(tmp_path / "t.parquet").has_page_index(0, ["t"])


# ---- pieces


def test_pieces_need_a_page_index(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"n": range(100)}), path, write_page_index=False)
    file = RowGroupFile(path)
    assert not file.has_page_index(0, ["n"])
    assert file.has_page_index(0, ["other"])
    assert len(file.read_rows(0, ["n"], 0, 100)["n"]) == 100
    with pytest.raises(ParquetError, match="row group 0 has no page index") as caught:
        file.read_rows(0, ["n"], 0, 10)
    assert "repartition" in caught.value.advice


@pytest.mark.parametrize(("low", "high"), [(-1, 5), (6, 5), (0, 11)])
def test_rows_that_are_not_there(tmp_path: Path, low: int, high: int) -> None:
    pq.write_table(pa.table({"n": range(10)}), tmp_path / "t.parquet", write_page_index=True)
    with pytest.raises(ParquetError, match=f"row group 0 has 10 rows, but rows {low} to {high} were requested"):
        RowGroupFile(tmp_path / "t.parquet").read_rows(0, ["n"], low, high)


# ---- damage


def index_of(path: Path, column: int) -> tuple[int, int]:
    """Return where the offset index of a column lies, and how long it is."""
    fields = thrift.decode(footer.read_local_tail(path).footer, str(path))
    chunk = footer.row_groups_of(fields, str(path))[0][1][1].values[column]
    return int(chunk[4][1]), int(chunk[5][1])


@pytest.mark.usefixtures("counted")
@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("name", ["n", "s", "l", "st"])
def test_a_wrong_offset_index_never_gives_wrong_rows(tmp_path: Path, name: str, version: str) -> None:
    path, rng, rows = tmp_path / "t.parquet", random.Random(f"{name} {version}"), 1000
    column = {
        "n": pa.array(range(rows)),
        "s": pa.array([None if i % 3 == 0 else f"{i % 40}" for i in range(rows)]),
        "l": pa.array([list(range(i % 7)) for i in range(rows)], pa.list_(pa.int32())),
        "st": pa.array([{"x": i, "y": [i] * (i % 3)} for i in range(rows)]),
    }[name]
    pq.write_table(
        pa.table({name: column}), path, write_page_index=True, max_rows_per_page=50, data_page_version=version
    )
    good, (at, length), read = path.read_bytes(), index_of(path, 0), 0
    for _ in range(40):
        damaged = bytearray(good)
        for _ in range(rng.choice((1, 1, 3))):
            damaged[at + rng.randrange(length)] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        low, high = sorted(rng.sample(range(rows + 1), 2))
        with suppress(ParquetError):
            found = one(path, name, low=low, high=high)
            read += 1
            assert found.to_pylist() == column[low:high].to_pylist()
    assert read < 40


ROWS, LENGTH = 60, 4
RNG = np.random.default_rng(1)
DAMAGED = {
    "integers": pa.array(RNG.integers(0, 50, (ROWS, LENGTH)).tolist()),
    "floats": pa.array(RNG.random((ROWS, LENGTH)).tolist(), pa.list_(pa.float32())),
    "given up": pa.array(np.arange(ROWS * LENGTH).reshape(ROWS, LENGTH).tolist()),
    "ragged": pa.array([RNG.integers(0, 50, 1 + row % 7).tolist() for row in range(ROWS)]),
    "fixed": pa.array(RNG.integers(0, 50, (ROWS, LENGTH)).tolist(), pa.list_(pa.int32(), LENGTH)),
    "few strings": pa.array([f"{'k' * 90}{row % 5}" for row in range(ROWS)]),
    "strings": pa.array([f"{row}" * (20 + row % 9) for row in range(ROWS)]),
    "nulls": pa.array([None if row % 5 == 0 else f"{row}" * 20 for row in range(ROWS)]),
}


def check_damage(path: Path, name: str, times: int, kinds: Counter[str], **options: Any) -> int:
    """Change some bytes so many times, and return how often the column is still decoded without pyarrow."""
    sink = io.BytesIO()
    pq.write_table(pa.table({"t": DAMAGED[name]}), sink, write_batch_size=16, **options)
    good, found = sink.getvalue(), 0
    end = len(good) - 8 - int.from_bytes(good[-8:-4], "little")
    for _ in range(times):
        bad, places = bytearray(good), random.sample(range(4, end), random.choice((1, 1, 1, 2, 3)))
        for at in places:
            bad[at] = random.choice((bad[at] ^ 1 << random.randrange(8), random.randrange(256), 0, 255))
        path.write_bytes(bad)
        before = kinds.total()
        try:
            array = one(path)
        except ParquetError:
            continue
        expected = by_pyarrow(path, 0)
        if expected is not None:
            assert_same(array, expected["t"])
        elif len(places) == 1:  # of a header, say, which changes no value
            assert array.cast(DAMAGED[name].type).equals(DAMAGED[name]), bytes(bad)
        found += kinds.total() > before
    return found


@pytest.mark.parametrize("codec", ["none", "snappy"])
@pytest.mark.parametrize("name", DAMAGED)
def test_no_damaged_byte_gives_other_values(tmp_path: Path, counted: Counted, name: str, codec: str) -> None:
    random.seed(f"{name} {codec}")
    found = 0
    for version in ("1.0", "2.0"):
        for dictionary in (False, True):
            how = {"data_page_version": version, "use_dictionary": dictionary, "compression": codec}
            found += check_damage(tmp_path / "t.parquet", name, 15, counted.kinds, **how)
    assert found


@pytest.mark.deep
@pytest.mark.parametrize("codec", list(CODECS))
@pytest.mark.parametrize("name", DAMAGED)
def test_no_damaged_byte_of_many_gives_other_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, codec: str
) -> None:
    """Also of several pages of a dictionary, which are decoded one or two at a time."""
    random.seed(f"{name} {codec}")
    everything(monkeypatch, 500)
    found, kinds = 0, Counted(monkeypatch).kinds
    for version, page in (("1.0", 100), ("2.0", 100), ("1.0", 1 << 20), ("2.0", 1 << 20)):
        for dictionary in (False, True):
            how = {"data_page_version": version, "use_dictionary": dictionary, "data_page_size": page}
            how |= {"compression": codec, "dictionary_pagesize_limit": 600}
            found += check_damage(tmp_path / "t.parquet", name, 40, kinds, **how)
    assert found > 5


def change_chunks(path: Path, change: Any) -> None:
    """Change the metadata of each column chunk."""
    path.write_bytes(edited(path.read_bytes(), lambda fields: [change(chunk[3][1]) for chunk in chunks_of(fields)]))


def test_pages_larger_than_the_footer_says_are_not_decompressed(tmp_path: Path) -> None:
    """40 MB of zeros, packed to nothing, in a footer that says that they are 100 KB."""
    path, zeros = tmp_path / "t.parquet", pa.array([bytes(100 << 10)] * 400, pa.binary())
    table = pa.table({"id": range(400), "x": zeros, "st": pa.StructArray.from_arrays([zeros], ["f"])})
    pq.write_table(table, path, use_dictionary=False, write_statistics=False, write_page_index=True)

    def lie(meta: thrift.Struct) -> None:
        meta[thrift.UNCOMPRESSED] = (thrift.I64, min(meta[thrift.UNCOMPRESSED][1], 100_000))

    change_chunks(path, lie)
    assert one(path, "id").to_pylist() == list(range(400))
    for name in ("x", "st"):
        for piece in ({}, {"low": 1, "high": 390}):
            before = pa.default_memory_pool().max_memory()
            with pytest.raises(ParquetError, match=rf"row group 0, column '{name}': pages claim [\d,]+ bytes"):
                one(path, name, **piece)
            assert pa.default_memory_pool().max_memory() - before < 30e6


def test_footers_that_are_somewhat_wrong_are_read(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"t": range(100_000)}), path, compression="zstd")
    change_chunks(path, lambda meta: meta.update({thrift.UNCOMPRESSED: (thrift.I64, 1)}))
    assert one(path).to_pylist() == list(range(100_000))


def test_files_that_cannot_be_opened(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    with pytest.raises(ParquetError, match="the file is gone"):
        RowGroupFile(path)
    path.write_bytes(b"PAR1, not")
    with pytest.raises(ParquetError, match="not a Parquet file"):
        RowGroupFile(path)
    pq.write_table(pa.table({"t": [1]}), path)
    file = RowGroupFile(path)
    path.unlink()
    with pytest.raises(ParquetError, match="the file is gone"):
        file.read_rows(0, ["t"])
    os.mkfifo(path)
    with pytest.raises(ParquetError, match="not a regular file"):
        file.read_rows(0, ["t"])


def test_columns_that_pyarrow_misreads_are_refused_unless_trusted(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    MADE["interval"](path)
    file = RowGroupFile(path)
    assert file.read_rows(0, ["id"])["id"].to_pylist() == [0, 1, 2]
    for _ in range(2):
        with pytest.raises(ParquetError, match="column 'span' holds values of an unsupported type"):
            file.read_rows(0, ["id", "span"])
    assert file.read_rows(0, ["span"], trusted=["span"])["span"].null_count == 3
