"""Column chunks read page by page: the same values as pyarrow's, or none at all."""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pqcache.parquet.codecs import CODECS
from pqcache.parquet.footer import footer, thrift, thrift_fields
from pqcache.parquet.pages import page_format, page_reader
from pqcache.parquet.pages.byte_arrays import ChunkMemory, views_of
from pqcache.parquet.pages.flat_pages import FlatPages
from pqcache.parquet.pages.leaf_column import LeafColumn, leaf_of
from pqcache.parquet.pages.page_format import MoreValues
from pqcache.parquet.pages.page_reader import Reader
from pqcache.system.buffer_pool import Arena, BufferPool
from tests.examples import examples

KINDS = [pa.int8(), pa.uint16(), pa.int32(), pa.uint32(), pa.int64(), pa.uint64(), pa.float32(), pa.float64()]


def opened(path: Path) -> tuple[pq.FileMetaData, LeafColumn | None]:
    file = pq.ParquetFile(path)
    return file.metadata, leaf_of(file.metadata, file.schema_arrow.names[0], file.schema_arrow.field(0).type)


def read(path: Path, length: int, reader: Reader | None = None) -> np.ndarray[Any, Any] | None:
    """Return the values of the first column of all row groups, or None as soon as one of them is not read."""
    metadata, leaf = opened(path)
    assert leaf is not None
    reader = reader or Reader(BufferPool())
    file = os.open(path, os.O_RDONLY)
    try:
        found = [
            reader.values(file, metadata.row_group(number).column(leaf.number), leaf, length)
            for number in range(metadata.num_row_groups)
        ]
    finally:
        os.close(file)
    whole = [values for values in found if values is not None]
    return np.concatenate(whole) if len(whole) == len(found) else None


def lists(values: Any, length: int, kind: pa.DataType, large: bool = False) -> pa.Array:
    made = pa.LargeListArray if large else pa.ListArray
    ends = np.arange(len(values) // length + 1, dtype=np.int64 if large else np.int32) * length
    return made.from_arrays(pa.array(ends), pa.array(values, kind))


@settings(deadline=None, max_examples=examples(150))
@given(data=st.data())
def test_lists_of_one_length_are_what_pyarrow_reads(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("lists") / "t.parquet"
    kind = data.draw(st.sampled_from(KINDS))
    length, rows = data.draw(st.integers(2, 40)), data.draw(st.integers(1, 300))
    few = data.draw(st.sampled_from([2, 100, 127]))
    rng = np.random.default_rng(data.draw(st.integers(0, 5)))
    values = rng.integers(0, few, rows * length).astype(kind.to_pandas_dtype())
    encoding = data.draw(st.sampled_from(["PLAIN", "RLE_DICTIONARY", "BYTE_STREAM_SPLIT", "DELTA_BINARY_PACKED"]))
    if encoding == "DELTA_BINARY_PACKED" and pa.types.is_floating(kind):
        encoding = "PLAIN"
    how: dict[str, Any] = {"use_dictionary": encoding == "RLE_DICTIONARY"}
    if not how["use_dictionary"]:
        how["column_encoding"] = {"t.list.element": encoding}
    table = pa.table({"t": lists(values, length, kind, data.draw(st.booleans()))})
    if data.draw(st.booleans()):
        inner = pa.field("element", kind, nullable=False)
        table = table.cast(pa.schema([pa.field("t", pa.list_(inner), nullable=data.draw(st.booleans()))]))
    pq.write_table(
        table,
        path,
        row_group_size=data.draw(st.integers(1, 300)),
        compression=data.draw(st.sampled_from(list(CODECS))),
        data_page_version=data.draw(st.sampled_from(["1.0", "2.0"])),
        data_page_size=data.draw(st.sampled_from([1, 100, 1 << 20])),
        write_batch_size=data.draw(st.sampled_from([1, 7, 1024])),
        dictionary_pagesize_limit=data.draw(st.sampled_from([40, 1 << 20])),
        write_page_index=data.draw(st.booleans()),
        **how,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page_reader, "_TOGETHER", data.draw(st.sampled_from([1, 500, 1 << 20])))
        found = read(path, length)
    assert found is not None
    assert found.dtype == values.dtype
    assert np.array_equal(found, values)


@pytest.mark.parametrize("length", [2, 100, 512])
def test_lists_that_duckdb_writes(tmp_path: Path, length: int) -> None:
    """DuckDB packs 256 levels at a time, also where fewer are left, and so do the last pages of most row groups."""
    values = (np.random.default_rng(0).zipf(1.3, 5000 * length) % 300).astype(np.int32)
    made = pa.table({"t": lists(values, length, pa.int32())})
    path = tmp_path / "t.parquet"
    with duckdb.connect() as connection:
        connection.register("made", made)
        connection.execute("set threads = 1")
        connection.execute(f"copy made to '{path}' (format parquet, row_group_size 2048)")
    found = read(path, length)
    assert found is not None
    assert np.array_equal(found, values)


@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("codec", ["none", "snappy", "zstd"])
def test_a_dictionary_serves_all_pages(tmp_path: Path, codec: str, version: str) -> None:
    """Pages are decoded a few at a time; a dictionary that is given up half way is followed by plain pages."""
    path = tmp_path / "t.parquet"
    rng = np.random.default_rng(0)
    values = np.concatenate([rng.zipf(1.3, 40_000) % 1000, np.arange(40_000)])
    how: dict[str, Any] = {"data_page_version": version, "data_page_size": 5000, "dictionary_pagesize_limit": 40_000}
    pq.write_table(pa.table({"t": lists(values, 16, pa.int64())}), path, compression=codec, **how)
    chunk = pq.read_metadata(path).row_group(0).column(0)
    with path.open("rb") as file:
        pages = [
            page_format.count_and_encoding(header)
            for header, _, _ in page_format.page_bodies(file.fileno(), chunk)
            if header[1][1] != 2
        ]
    encodings = [encoding for _, encoding in pages]
    assert encodings.count(thrift_fields.RLE_DICTIONARY) > 4
    assert encodings.count(thrift_fields.PLAIN) > 4
    decoded: list[int] = []

    class Counting(FlatPages):
        def decode(self, out: Any) -> None:
            decoded.append(len(out))
            super().decode(out)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page_reader, "_TOGETHER", 100_000)
        patch.setattr(page_reader, "FlatPages", Counting)
        found = read(path, 16)
    assert np.array_equal(found, values)
    assert sum(size > 0 for size in decoded) > 2
    assert max(decoded) * 8 <= 100_000 + max(count for count, _ in pages) * 8


@pytest.mark.parametrize("limit", [None, 40, 400, 1 << 20])  # no dictionary; given up at once, half way, never
@pytest.mark.parametrize("codec", ["none", "snappy"])
def test_values_are_put_where_they_are_wanted(tmp_path: Path, limit: int | None, codec: str) -> None:
    path = tmp_path / "t.parquet"
    values = np.arange(600, dtype=np.int16)
    how: dict[str, Any] = {"use_dictionary": limit is not None, "dictionary_pagesize_limit": limit or 1}
    table = pa.table({"t": lists(values, 3, pa.int16())})
    pq.write_table(table, path, compression=codec, data_page_size=200, write_batch_size=50, **how)
    metadata, leaf = opened(path)
    assert leaf is not None
    arena = Arena(BufferPool(), 2048, 2)
    with path.open("rb") as file:
        found = Reader(BufferPool()).values(file.fileno(), metadata.row_group(0).column(0), leaf, 3, arena)
    assert found is not None
    assert np.array_equal(found, values)
    assert arena.offset_of(found) is not None


@pytest.mark.parametrize(
    "rows",
    [
        [[1, 2], [3, None]],
        [[1, 2], None],
        [[1, 2], None, [3, 4, 5, 6]],
        [[1, 2], [3], [4, 5, 6]],
        [[1, 2], [], [3, 4, 5, 6]],
        [[1], [2, 3], [4]],
    ],
)
@pytest.mark.parametrize("dictionary", [False, True])
def test_other_lists_are_left_to_pyarrow(tmp_path: Path, rows: list[Any], dictionary: bool) -> None:
    pq.write_table(
        pa.table({"t": pa.array(rows, pa.list_(pa.int32()))}), tmp_path / "t.parquet", use_dictionary=dictionary
    )
    assert read(tmp_path / "t.parquet", 2) is None


def test_a_column_that_is_left_to_pyarrow_is_logged_with_the_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"t": pa.array([[1, 2], [3, None]], pa.list_(pa.int32()))}), path)
    with caplog.at_level("DEBUG", "pqcache.parquet"):
        assert read(path, 2) is None
    assert "column t.list.element: pyarrow decodes the chunk at byte" in caplog.text
    assert "nulls, or lists of other lengths" in caplog.text


def test_nulls_of_later_pages_are_seen(tmp_path: Path) -> None:
    rows: list[Any] = [[n, n] for n in range(3000)]
    rows[2500] = None
    path = tmp_path / "t.parquet"
    pq.write_table(
        pa.table({"t": pa.array(rows, pa.list_(pa.int32()))}),
        path,
        use_dictionary=False,
        data_page_size=100,
        write_batch_size=10,
    )
    assert read(path, 2) is None


def test_one_reader_tells_lengths_apart(tmp_path: Path) -> None:
    """Levels are remembered, so those of another length must not pass for them."""
    reader = Reader(BufferPool())
    for length in (2, 3, 6):
        path = tmp_path / f"{length}.parquet"
        pq.write_table(
            pa.table({"t": lists(np.arange(60, dtype=np.int32), length, pa.int32())}), path, use_dictionary=False
        )
        for asked in (2, 3, 6):
            found = read(path, asked, reader)
            assert (found is not None) == (asked == length)


@pytest.mark.parametrize("kind", [pa.binary(16), pa.binary(600)])
def test_bytes_of_one_width(tmp_path: Path, kind: pa.DataType) -> None:
    rows = [bytes([n % 256]) * kind.byte_width for n in range(3000)]
    table = pa.table({"t": pa.array(rows, kind)})
    pq.write_table(table, tmp_path / "t.parquet", use_dictionary=False)
    found = read(tmp_path / "t.parquet", 0)
    assert found is not None
    assert found.tobytes() == b"".join(rows)


@pytest.mark.parametrize(
    "column", [["a"], [True], [{"x": 1}], [[[1]]], [__import__("decimal").Decimal("1.5")], [[b"x"]]]
)
def test_types_that_are_not_read_have_no_leaf_or_no_values(tmp_path: Path, column: list[Any]) -> None:
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"t": pa.array(column)}), path)
    leaf = opened(path)[1]
    assert leaf is None or leaf.stored.itemsize == 0 or read(path, 0) is None


def read_lists(path: Path) -> pa.Array | None:
    """Return the first column of the first row group as lists; None where they are not read."""
    metadata, leaf = opened(path)
    assert leaf is not None
    with path.open("rb") as file:
        found = Reader(BufferPool()).lists(file.fileno(), metadata.row_group(0).column(0), leaf)
    return None if found is None else pa.LargeListArray.from_arrays(found.ends, found.values)


@settings(deadline=None, max_examples=examples(150))
@given(data=st.data(), lengths=st.lists(st.integers(1, 90), min_size=1, max_size=60))
def test_lists_of_any_length_are_what_pyarrow_reads(
    data: st.DataObject, lengths: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("lists") / "t.parquet"
    kind = data.draw(st.sampled_from(KINDS))
    few = data.draw(st.sampled_from([2, 100, 127]))
    values = np.random.default_rng(data.draw(st.integers(0, 5))).integers(0, few, sum(lengths))
    ends = np.concatenate([[0], np.cumsum(lengths)])
    column = pa.LargeListArray.from_arrays(ends, pa.array(values.astype(kind.to_pandas_dtype())))
    required = pa.field("element", kind, nullable=False)
    item = data.draw(st.sampled_from([kind, required]))
    table = pa.table({"t": column}).cast(pa.schema([pa.field("t", pa.list_(item), data.draw(st.booleans()))]))
    pq.write_table(
        table,
        path,
        use_dictionary=data.draw(st.booleans()),
        compression=data.draw(st.sampled_from(list(CODECS))),
        data_page_version=data.draw(st.sampled_from(["1.0", "2.0"])),
        data_page_size=data.draw(st.sampled_from([1, 100, 1 << 20])),
        write_batch_size=data.draw(st.sampled_from([1, 7, 1024])),
        dictionary_pagesize_limit=data.draw(st.sampled_from([40, 1 << 20])),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page_reader, "_TOGETHER", data.draw(st.sampled_from([1, 500, 1 << 20])))
        found = read_lists(path)
    assert found is not None
    assert found.equals(column)


@pytest.mark.parametrize("at", [0, 400, 999])
@pytest.mark.parametrize("row", [None, [], [1, None, 2]])
@pytest.mark.parametrize("statistics", [False, True])
def test_nulls_and_empty_lists_are_left_to_pyarrow(
    tmp_path: Path, at: int, row: list[Any] | None, statistics: bool, caplog: pytest.LogCaptureFixture
) -> None:
    rows: list[Any] = [[number] * (1 + number % 40) for number in range(1000)]
    rows[at] = row
    path = tmp_path / "t.parquet"
    table = pa.table({"t": pa.array(rows, pa.list_(pa.int32()))})
    pq.write_table(table, path, write_statistics=statistics, data_page_size=2000, write_batch_size=100)
    with caplog.at_level("DEBUG", "pqcache.parquet"):
        assert read_lists(path) is None
    assert "pyarrow decodes the chunk" in caplog.text
    assert "nulls, or empty lists" in caplog.text


@settings(deadline=None, max_examples=examples(60))
@given(data=st.data(), lengths=st.lists(st.integers(1, 12), min_size=2, max_size=30), ragged=st.booleans())
def test_pages_may_begin_within_a_row(
    data: st.DataObject, lengths: list[int], ragged: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Pages of version 1 may, and those of older writers do."""
    path = tmp_path_factory.mktemp("cut") / "t.parquet"
    lengths = lengths if ragged else [1 + lengths[0]] * len(lengths)
    ends = np.concatenate([[0], np.cumsum(lengths)])
    values = np.arange(ends[-1])
    table = pa.table({"t": pa.ListArray.from_arrays(ends.astype(np.int32), values)})
    cuts = sorted(data.draw(st.sets(st.integers(1, len(values) - 1), max_size=6))) if len(values) > 1 else []
    begins = np.isin(np.arange(len(values)), ends[:-1])
    pages = b""
    for first, past in zip([0, *cuts], [*cuts, len(values)], strict=True):
        levels = b"".join(b"\x02" + bytes([not begin]) for begin in begins[first:past])  # runs of one
        body = len(levels).to_bytes(4, "little") + levels + page_format.encode_run(past - first, 3)
        body += values[first:past].tobytes()
        pages += page_format.data_page_header(past - first, 0, len(body)) + body
    pq.write_table(table, path, compression="none", use_dictionary=False, write_statistics=False)
    with_pages(path, pages)
    assert pq.read_table(path)["t"].combine_chunks().equals(table["t"].combine_chunks())
    found = read_lists(path)
    assert found is not None
    assert found.to_pylist() == table["t"].to_pylist()
    if not ragged:
        assert np.array_equal(read(path, lengths[0]), values)


def with_pages(path: Path, pages: bytes) -> None:
    """Give the only column chunk of a file other pages, without a codec."""
    tail = path.read_bytes()
    size = int.from_bytes(tail[-8:-4], "little")
    about = thrift.decode(tail[-8 - size : -8], "t")
    meta = about[4][1].values[0][1][1].values[0][3][1]
    meta[6] = meta[7] = (thrift.I64, len(pages))
    path.write_bytes(footer.MAGIC + pages + footer.footer_and_magic(about))


byte_strings = st.lists(
    st.one_of(st.binary(max_size=20), st.binary(min_size=100, max_size=2000)), min_size=1, max_size=60
)


@settings(deadline=None, max_examples=examples(100))
@given(data=st.data(), rows=byte_strings)
def test_long_rows_are_what_pyarrow_reads(
    data: st.DataObject, rows: list[bytes], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("bytes") / "t.parquet"
    kind = data.draw(st.sampled_from([pa.binary(), pa.large_binary()]))
    pq.write_table(
        pa.table({"t": pa.array(rows, kind)}),
        path,
        use_dictionary=data.draw(st.booleans()),
        dictionary_pagesize_limit=data.draw(st.sampled_from([300, 5000, 1 << 20])),  # from there on plain
        compression=data.draw(st.sampled_from(list(CODECS))),
        data_page_version=data.draw(st.sampled_from(["1.0", "2.0"])),
        data_page_size=data.draw(st.sampled_from([1, 1000, 1 << 20])),
        write_batch_size=data.draw(st.sampled_from([1, 7, 1024])),
    )
    metadata, leaf = opened(path)
    assert leaf is not None
    file = os.open(path, os.O_RDONLY)
    try:
        found = Reader(BufferPool()).byte_arrays(file, metadata.row_group(0).column(0), leaf)
    finally:
        os.close(file)
    assert found is not None
    views = views_of(found)
    views.validate(full=True)
    assert views.cast(pa.binary()).to_pylist() == rows


def test_byte_arrays_with_nulls_are_left_to_pyarrow(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"t": pa.array([b"a" * 1000, None], pa.binary())}), path, use_dictionary=False)
    metadata, leaf = opened(path)
    assert leaf is not None
    with path.open("rb") as file:
        assert Reader(BufferPool()).byte_arrays(file.fileno(), metadata.row_group(0).column(0), leaf) is None


@pytest.mark.parametrize("codec", ["none", "snappy"])
@pytest.mark.parametrize("dictionary", [False, True])
def test_pages_of_a_chunk_lie_in_one_block_that_is_used_again(tmp_path: Path, codec: str, dictionary: bool) -> None:
    """With a dictionary that is given up half way its rows are among them."""
    path, memory = tmp_path / "t.parquet", BufferPool()
    rows = [bytes(np.random.default_rng(i).bytes(5000 + i)) for i in range(150)]
    how: dict[str, Any] = {"compression": codec, "use_dictionary": dictionary, "dictionary_pagesize_limit": 50_000}
    pq.write_table(pa.table({"t": rows}), path, data_page_size=30_000, write_batch_size=4, **how)
    metadata, leaf = opened(path)
    assert leaf is not None
    chunk, sizes = metadata.row_group(0).column(0), []
    for _ in range(3):
        with path.open("rb") as file:
            found = Reader(memory).byte_arrays(file.fileno(), chunk, leaf)
        assert found is not None
        assert len(found.pages) == 1
        assert views_of(found).cast(pa.binary()).to_pylist() == rows
        del found
        sizes.append(memory.size)
    assert sizes[0] == sizes[2] < 1.5 * chunk.total_uncompressed_size


def test_what_a_footer_understates_is_read_from_more_than_one_block(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    rows = [b"%d" % i * 1000 for i in range(50)]
    pq.write_table(pa.table({"t": rows}), path, use_dictionary=False, data_page_size=5000, write_batch_size=2)
    metadata, leaf = opened(path)
    assert leaf is not None
    reader = Reader(BufferPool())
    with pytest.MonkeyPatch.context() as patch, path.open("rb") as file:
        patch.setattr(Reader, "_memory_of", lambda self, chunk: ChunkMemory(self.memory, 60_000))
        found = reader.byte_arrays(file.fileno(), metadata.row_group(0).column(0), leaf)
    assert found is not None
    assert len(found.pages) > 2
    assert views_of(found).cast(pa.binary()).to_pylist() == rows


def test_damage_in_snappy_is_left_to_pyarrow(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A copy of what would be before the page's first byte."""
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"t": [b"%d" % i * 3000 for i in range(30)]}), path, use_dictionary=False)
    metadata, leaf = opened(path)
    assert leaf is not None
    chunk = metadata.row_group(0).column(0)
    with path.open("r+b") as file:
        ((_, begin, _),) = page_format.page_bodies(file.fileno(), chunk)
        file.seek(begin + 3)  # behind the length
        file.write(b"\xff" * 5)
        file.flush()
        with caplog.at_level("DEBUG", "pqcache.parquet"):
            assert Reader(BufferPool()).byte_arrays(file.fileno(), chunk, leaf) is None
    assert "a damaged page: snappy" in caplog.text


@pytest.mark.parametrize("distinct", [1, 2, 3, 255, 256, 257, 3000])
def test_indices_of_any_width_are_read(tmp_path: Path, distinct: int) -> None:
    rows = [b"%d" % (i * 7919 % distinct) for i in range(3 * distinct)] + [b"0"] * 100
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"t": pa.array(rows, pa.binary())}), path, use_dictionary=True)
    metadata, leaf = opened(path)
    assert leaf is not None
    with path.open("rb") as file:
        found = Reader(BufferPool()).byte_arrays(file.fileno(), metadata.row_group(0).column(0), leaf)
    assert found is not None
    assert views_of(found).cast(pa.binary()).to_pylist() == rows


@settings(deadline=None, max_examples=examples(200))
@given(
    place=st.floats(0, 1),
    byte=st.integers(0, 255),
    binary=st.booleans(),
    codec=st.sampled_from(["none", "snappy"]),
    dictionary=st.booleans(),
    limit=st.sampled_from([400, 1 << 20]),
)
def test_damage_is_never_an_exception(
    place: float,
    byte: int,
    binary: bool,
    codec: str,
    dictionary: bool,
    limit: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    path = tmp_path_factory.mktemp("damage") / "t.parquet"
    column = pa.array([b"x" * 700] * 20) if binary else lists(np.arange(600, dtype=np.int32), 3, pa.int32())
    how: dict[str, Any] = {"dictionary_pagesize_limit": limit, "data_page_size": 200, "write_batch_size": 50}
    pq.write_table(pa.table({"t": column}), path, compression=codec, use_dictionary=dictionary, **how)
    metadata, leaf = opened(path)
    assert leaf is not None
    whole = bytearray(path.read_bytes())
    whole[4 + int(place * (metadata.row_group(0).column(0).total_compressed_size - 1))] = byte
    path.write_bytes(whole)
    reader = Reader(BufferPool())
    with path.open("rb") as file:
        chunk = metadata.row_group(0).column(0)
        if binary:
            arrays = reader.byte_arrays(file.fileno(), chunk, leaf)
            assert arrays is None or len(views_of(arrays)) == 20
        else:
            values = reader.values(file.fileno(), chunk, leaf, 3)
            assert values is None or len(values) == 600


@pytest.mark.parametrize("codec", list(CODECS))
@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_pages_that_come_out_shorter_are_not_read(tmp_path: Path, codec: str, version: str) -> None:
    """Damage inside compressed data often makes fewer bytes of it, so that all values move."""
    path = tmp_path / "t.parquet"
    values = np.tile(np.arange(8, dtype=np.int32), 3000)
    values[::97] = 99
    table = pa.table({"t": lists(values, 8, pa.int32())})
    pq.write_table(table, path, use_dictionary=False, compression=codec, data_page_version=version)
    good = path.read_bytes()
    chunk = pq.read_metadata(path).row_group(0).column(0)
    noticed = 0
    for place in range(4, chunk.total_compressed_size, max(1, chunk.total_compressed_size // 150)):
        path.write_bytes(good[:place] + bytes([good[place] ^ 1 << place % 8]) + good[place + 1 :])
        found = read(path, 8)
        try:
            column = pq.ParquetFile(path).read()["t"].combine_chunks()
            lengths = set(column.value_lengths().to_pylist())
            wanted = column.flatten().to_numpy() if lengths == {8} else None
        except OSError:
            noticed += 1
            wanted = values
        assert found is None or (wanted is not None and np.array_equal(found, wanted))
    assert noticed or codec == "none"


def test_a_file_that_ends_early_is_left_to_pyarrow(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"t": lists(np.arange(60_000, dtype=np.int32), 3, pa.int32())}), path, use_dictionary=False)
    metadata, leaf = opened(path)
    assert leaf is not None
    path.write_bytes(path.read_bytes()[:1000])
    with path.open("rb") as file:
        assert Reader(BufferPool()).values(file.fileno(), metadata.row_group(0).column(0), leaf, 3) is None


def test_checksums_of_pages_do_not_matter_here(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    values = np.arange(600, dtype=np.int32)
    pq.write_table(pa.table({"t": lists(values, 3, pa.int32())}), path, use_dictionary=False, write_page_checksum=True)
    assert zlib.crc32(np.asarray(read(path, 3)).tobytes()) == zlib.crc32(values.tobytes())


@pytest.mark.parametrize("nullable", [False, True])
@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("codec", ["none", "snappy"])
def test_no_byte_of_a_page_header_or_level_gives_other_values(
    tmp_path: Path, codec: str, version: str, nullable: bool
) -> None:
    """A header that swallows the first value would have the page reach into what lies behind it."""
    path = tmp_path / "t.parquet"
    values = np.array([93, 186, 279, 372, 465], np.int32) << 16  # zeros, where a struct might end
    schema = pa.schema([pa.field("t", pa.int32(), nullable)])
    how: dict[str, Any] = {"compression": codec, "use_dictionary": False, "data_page_version": version}
    pq.write_table(pa.table([values], schema=schema), path, write_statistics=False, **how)
    metadata, leaf = opened(path)
    assert leaf is not None
    chunk = metadata.row_group(0).column(0)
    good = path.read_bytes()
    assert read(path, 0).tolist() == values.tolist()  # type: ignore[union-attr]
    end = chunk.data_page_offset + chunk.total_compressed_size - (values.nbytes if codec == "none" else 0)
    with path.open("r+b", buffering=0) as file:
        for at in range(chunk.data_page_offset, end):
            for byte in range(0, 256, 1 if codec == "none" else 8):
                os.pwrite(file.fileno(), bytes([byte]), at)
                try:
                    found = Reader(BufferPool()).values(file.fileno(), chunk, leaf, 0)
                except MoreValues:  # which the loader refuses
                    continue
                if found is not None and found.tolist() != values.tolist():
                    assert found.tolist() == pq.read_table(path)["t"].to_pylist()  # values that were compressed
            os.pwrite(file.fileno(), good[at : at + 1], at)


@pytest.mark.parametrize("levels", [3, 10, 1 << 30, -1])
@pytest.mark.parametrize("version", [1, 2])
def test_levels_longer_than_their_page_are_left_to_pyarrow(tmp_path: Path, version: int, levels: int) -> None:
    path = tmp_path / "t.parquet"
    values = np.arange(10, dtype=np.int64)

    def page(length: int, counts: tuple[int, int]) -> bytes:
        run = b"\x14\x01"
        before = (length & 0xFFFF_FFFF).to_bytes(4, "little") if version == 1 else b""
        body = before + run + values.tobytes()
        numbers = {1: 0 if version == 1 else 3, 2: len(body), 3: len(body)}
        first = {1: counts[0], 2: 0, 3: 3, 4: 3}
        second = {1: counts[1], 2: 0, 3: 10, 4: 0, 5: length, 6: 0}
        header: thrift.Struct = {key: (thrift.I32, number) for key, number in numbers.items()}
        if version == 1 or counts[0] != 10:
            header[5] = (thrift.STRUCT, {key: (thrift.I32, number) for key, number in first.items()})
        if version == 2:
            about: thrift.Struct = {key: (thrift.I32, number) for key, number in second.items()}
            header[8] = (thrift.STRUCT, {**about, 7: (thrift.BOOL, False)})
        return thrift.encode(header) + body

    def stored(data: bytes) -> np.ndarray[Any, Any] | None:
        pq.write_table(pa.table({"t": values}), path, compression="none", use_dictionary=False, write_statistics=False)
        with_pages(path, data)
        return read(path, 0)

    good = stored(page(2, (10, 10)))
    assert good is not None
    assert good.tolist() == values.tolist()
    assert stored(page(levels, (10, 10))) is None
    if version == 2:
        assert stored(page(42, (5, 10))) is None  # the other struct's count, and levels that take the rest
