"""The writer hits its size in bytes, whatever the rows are like, and reads ahead of it by no more than a limit."""

from __future__ import annotations

import errno
import functools
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import duckdb
import fastparquet
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pqcache.errors import ParquetError, PqcacheError
from pqcache.parquet.rewrite import row_groups
from pqcache.parquet.rewrite.decode import RowBatch, prefetch
from pqcache.parquet.rewrite.directory import rewrite_directory, row_group_bytes
from pqcache.parquet.rewrite.files import OutputSchema
from pqcache.parquet.rewrite.recipe import RewriteOptions
from pqcache.parquet.schema import working_schema
from tests.examples import examples
from tests.pages import indexed_pages, real_pages
from tests.parquet.rewrite.rewriting import check_sizes, group_sizes

KB = 1 << 10


def batches_of(table: pa.Table, rows: int, ratio: float = 1.0) -> Iterator[RowBatch]:
    ratios = np.full(table.num_columns, ratio)
    for first in range(0, max(1, table.num_rows), rows):
        part = table.slice(first, rows)
        end = first + part.num_rows
        yield RowBatch(table=part, ratios=ratios, numbers=range(first, end), done=end)


def output_schema_of(table: pa.Table) -> OutputSchema:
    return OutputSchema(working=working_schema(table.schema), declared=table.schema, elements=None, keyvalues={})


def settings_of(size: int, codec: str = "lz4") -> row_groups.WriterSettings:
    return row_groups.WriterSettings(
        options=RewriteOptions(row_group_size=size),
        max_file=1 << 40,
        codec=lambda leaf: codec,
        name_of=lambda number: f"source.parquet: row {number:,}",
    )


def write(
    table: pa.Table, target: Path, size: int, rows: int = 1000, ratio: float = 1.0, codec: str = "lz4"
) -> row_groups.RewriteResult:
    return row_groups.write_row_groups(
        batches_of(table, rows, ratio), target, output_schema_of(table), settings_of(size, codec)
    )


SHAPES = ["flat", "growing", "shrinking", "step", "steps", "heavy tail", "rare giants"]
KINDS = ["noise", "zeros", "zeros, then noise", "noise, then zeros", "few"]


def lengths_of(shape: str, rng: np.random.Generator, n: int) -> list[int]:
    """Return the lengths of ``n`` values that grow, shrink or jump along the rows."""
    at = np.linspace(0, 1, n)
    found = {
        "flat": np.full(n, 60.0),
        "growing": 2 + 200 * at**4,
        "shrinking": 2 + 200 * (1 - at) ** 4,
        "step": np.where(at < 0.7, 3.0, 300.0),
        "steps": np.where((at * 7).astype(int) % 2, 3.0, 200.0),
        "heavy tail": np.minimum(rng.pareto(1.1, n) * 10, 1500),
        "rare giants": np.where(rng.random(n) < 0.002, 1500.0, 10.0),
    }[shape]
    return [int(length) for length in found]


def blobs_of(kind: str, rng: np.random.Generator, lengths: list[int]) -> list[bytes]:
    """Return values of these lengths that compress well, badly, or first one and then the other."""
    noise = rng.bytes(max(lengths, default=0) + len(lengths) + 1)
    change = len(lengths) // 2
    found = []
    for number, length in enumerate(lengths):
        easy = kind == "zeros" or (kind == "zeros, then noise" and number < change)
        easy = easy or (kind == "noise, then zeros" and number >= change)
        start = number % 7 if kind == "few" else number
        found.append(bytes(length) if easy else noise[start : start + length])
    return found


@settings(max_examples=examples(30), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    values=st.tuples(st.sampled_from(SHAPES), st.sampled_from(KINDS), st.integers(0, 1000)),
    rows=st.one_of(st.integers(1, 60), st.integers(2_000, 30_000)),
    batch=st.integers(50, 5_000),
    size=st.sampled_from([48 * KB, 100_000, 333_333]),
    ratio=st.sampled_from([0.01, 0.3, 1.0]),
    codec=st.sampled_from(["lz4", "zstd", "none"]),
)
def test_no_row_group_is_over_and_all_but_the_last_are_full(
    tmp_path_factory: pytest.TempPathFactory,
    values: tuple[str, str, int],
    rows: int,
    batch: int,
    size: int,
    ratio: float,
    codec: str,
) -> None:
    shape, kind, seed = values
    rng = np.random.default_rng(seed)
    blobs = blobs_of(kind, rng, lengths_of(shape, rng, rows))
    table = pa.table({"id": np.arange(rows), "blob": pa.array(blobs, pa.binary())})
    written = write(table, tmp_path_factory.mktemp("w"), size, batch, ratio, codec)
    check_sizes(written, size)
    assert pa.concat_tables([pq.ParquetFile(output.path).read() for output in written.outputs]).equals(table)
    assert written.encoded - written.encoded_again == sum(found for found, _ in group_sizes(written))
    assert not written.warnings


@functools.cache
def growing(seed: int, rows: int, wrong: float) -> pa.Table:
    """Columns that are worth a dictionary, of which there are the more distinct values the later the row."""
    rng = np.random.default_rng(seed)
    many = 10 + (3_000 * np.linspace(0, 1, rows) ** wrong).astype(int)
    words = rng.integers(0, many)
    known = words.max() + 1
    lengths = rng.integers(0, 3, rows)
    return pa.table(
        {
            "word": pa.array([f"the word {n:09d}" if n else None for n in range(known)]).take(pa.array(words)),
            "kind": pa.array([f"kind {n % 999:07d}" for n in range(known)]).take(pa.array(words)).dictionary_encode(),
            "code": np.asarray(words % 700) * 2**40,
            "list": pa.ListArray.from_arrays(
                np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
                pa.array(rng.integers(0, 50, int(lengths.sum())) * 2**33),
            ),
            "x": rng.standard_normal(rows),
        }
    )


@pytest.mark.parametrize("compat", [False, True])
def test_dictionaries_that_grow_leave_little_empty(tmp_path: Path, compat: bool) -> None:
    table = growing(5, 200_000, 3.0)
    pq.write_table(table, tmp_path / "in.parquet", row_group_size=70_000)
    result = rewrite_directory(
        [tmp_path / "in.parquet"], tmp_path / "out", RewriteOptions(row_group_size=1 << 20, compat=compat)
    )
    (output,) = result.outputs
    metadata = pq.read_metadata(output.path)
    fills = [size / (1 << 20) for size in map(row_group_bytes, map(metadata.row_group, range(output.row_groups - 1)))]
    assert (max(fills) <= 1, min(fills) >= 0.95, np.median(fills) >= 0.96) == (True, True, True), fills
    file = pq.ParquetFile(output.path)
    for group in range(metadata.num_row_groups):
        for name, column in (("word", 0), ("kind", 1), ("code", 2)):
            known, values = metadata.row_group(group).column(column).statistics, file.read_row_group(group)[name]
            extremes = pc.min_max(values.cast(pa.int64() if name == "code" else pa.string())).as_py()
            assert {"min": known.min, "max": known.max} == extremes
            assert known.null_count == values.null_count
    assert pq.ParquetFile(output.path).read().equals(table)
    path = output.path

    plain = table.set_column(1, "kind", table["kind"].cast(pa.string()))
    assert duckdb.sql(f"from '{path}'").to_arrow_table().cast(plain.schema).equals(plain)
    assert duckdb.sql(f"select count(*) from '{path}' where word = 'the word 000000007'").fetchall() == [
        (pc.sum(pc.equal(plain["word"], "the word 000000007")).as_py(),)
    ]
    if compat:  # fastparquet cannot read all encodings
        flat = plain.select(["word", "kind", "code", "x"])
        known = fastparquet.ParquetFile(str(path)).to_pandas(columns=flat.column_names)
        assert pa.Table.from_pandas(known, flat.schema, preserve_index=False).equals(flat)
    for group, columns in enumerate(indexed_pages(path)):
        real = real_pages(path)[group]
        if all(len(found) == 1 for found in real):  # the statistics of the chunks say the same
            assert not any(columns)
            continue
        for pages, found in zip(columns, real, strict=True):
            assert pages is not None
            assert [(page.offset, page.size) for page in pages] == [(at, size) for at, size, _ in found]
        starts = [page.first_row for page in columns[2] or ()]
        assert starts == np.cumsum([0, *(values for *_, values in real[2])])[:-1].tolist()


def test_nested_dictionaries_are_not_split(tmp_path: Path) -> None:
    """For pyarrow cannot read one that changes within a row group."""
    table = growing(6, 60_000, 3.0)
    lists = pa.ListArray.from_arrays(np.arange(table.num_rows + 1, dtype=np.int32), table["kind"].combine_chunks())
    table = table.set_column(1, "kind", lists)
    pq.write_table(table, tmp_path / "in.parquet", row_group_size=70_000)
    (output,) = rewrite_directory(
        [tmp_path / "in.parquet"], tmp_path / "out", RewriteOptions(row_group_size=1 << 20)
    ).outputs
    file = pq.ParquetFile(output.path)
    for group in range(output.row_groups):
        assert file.read_row_group(group).column("kind").num_chunks == 1


def test_warnings_do_not_pile_up(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    table = pa.table({"b": [rng.bytes(5_000) for _ in range(60)]})
    written = write(table, tmp_path, 4_200)
    assert [rows for _, rows in group_sizes(written)] == [1] * 60
    assert len(written.warnings) == 21
    assert written.warnings[-1].startswith("40 more rows")


def test_memory_is_bounded_where_data_shrinks_to_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_groups, "_MIN_MAX_ARROW", 0)
    table = pa.table({"zero": np.zeros(2_000_000, np.int64)})
    written = write(table, tmp_path, 32 * KB, 10_000)
    assert pq.read_table(written.outputs[0].path).equals(table)
    assert all(rows * 8 <= 16 * 32 * KB for _, rows in group_sizes(written))
    assert len(group_sizes(written)) < 40
    assert len(written.warnings) == 1
    assert "of memory decoded" in written.warnings[0]


def test_row_groups_are_below_the_rows_pyarrow_would_split_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_groups, "_MAX_ROWS", 5_000)
    table = pa.table({"zero": np.zeros(22_000, np.int8)})
    written = write(table, tmp_path, 1 << 20, 700)
    assert [rows for _, rows in group_sizes(written)] == [5_000] * 4 + [2_000]


def test_types_that_parquet_lacks_are_refused(tmp_path: Path) -> None:
    table = pa.table({"u": pa.UnionArray.from_sparse(pa.array([0], pa.int8()), [pa.array([1])])})
    with pytest.raises(ParquetError, match="cannot be written as Parquet"):
        write(table, tmp_path, 50_000)


def test_a_full_disk_is_named_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, left = os.pwrite, [90_000]

    def pwrite(descriptor: int, data: memoryview, offset: int) -> int:
        if not left[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        count = real(descriptor, data[: left[0]], offset)
        left[0] -= count
        return count

    table = pa.table({"x": np.random.default_rng(5).standard_normal(50_000)})
    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(PqcacheError, match=r"part-00000\.parquet: cannot be written: No space left on device"):
        write(table, tmp_path, 50_000)
    assert not list(tmp_path.iterdir())
    left[0] = 1 << 30
    monkeypatch.setattr(os, "pwrite", lambda descriptor, data, offset: real(descriptor, data[:1000], offset))
    found = write(table, tmp_path, 50_000)  # a few bytes at a time
    assert pq.read_table(found.outputs[0].path).equals(table)


def test_errors_of_the_stream_come_out_of_the_prefetch(tmp_path: Path) -> None:
    table = pa.table({"x": np.random.default_rng(5).standard_normal(50_000)})

    def failing() -> Iterator[RowBatch]:
        yield from batches_of(table, 1000)
        raise ParquetError("x.parquet", "broken")

    stream = prefetch([failing], 100_000)
    with pytest.raises(ParquetError, match=r"x\.parquet: broken"):
        row_groups.write_row_groups(stream, tmp_path, output_schema_of(table), settings_of(50_000))
    assert not list(tmp_path.iterdir())
    assert not [thread for thread in threading.enumerate() if thread.name == "pqcache-decode"]


def test_a_large_row_alone_has_statistics(tmp_path: Path) -> None:
    table = pa.table({"id": [7], "text": ["x" * (3 << 20)]})
    (output,) = write(table, tmp_path, 64 << 20).outputs
    with pq.ParquetFile(output.path) as file:
        statistics = file.metadata.row_group(0).column(0).statistics
    assert (statistics.min, statistics.max) == (7, 7)


def test_prefetch_runs_ahead_by_no_more_than_its_limit_and_stops() -> None:
    table = pa.table({"x": np.zeros(1000)})
    made = 0

    def counted() -> Iterator[RowBatch]:
        nonlocal made
        for batch in batches_of(pa.concat_tables([table] * 100), 1000):
            made += 1
            yield batch

    stream = prefetch([counted], 5 * table.nbytes)
    assert [next(stream).done for _ in range(2)] == [1000, 2000]
    stream.close()  # joins the thread
    assert made <= 10
