"""Rewrites files and compares what comes out with what went in, for the tests of `rewrite_directory`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pqcache.parquet.rewrite.directory import rewrite_directory, row_group_bytes
from pqcache.parquet.rewrite.recipe import RewriteOptions
from pqcache.parquet.rewrite.row_groups import RewriteResult
from tests.pages import index_spans

KB = 1 << 10


def group_sizes(result: RewriteResult) -> list[tuple[int, int]]:
    """Return (bytes, rows) of every row group of the outputs, in order."""
    found = []
    for output in result.outputs:
        metadata = pq.read_metadata(output.path)
        groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
        assert (output.rows, output.row_groups) == (metadata.num_rows, len(groups))
        found += [(row_group_bytes(group), group.num_rows) for group in groups]
    return found


def check_sizes(result: RewriteResult, limit: int) -> list[float]:
    """Assert that no row group is over and all but the last fill 95 %; return the fills of all but the last."""
    sizes = group_sizes(result)
    assert all(size <= limit for size, _ in sizes)
    fills = [size / limit for size, _ in sizes[:-1]]
    assert all(fill >= 0.95 for fill in fills), fills
    return fills


def rewrite_80_mb(directory: Path, options: RewriteOptions) -> tuple[RewriteResult, int]:
    """Rewrite one row group of 8,000 rows and 80 MB, in ``a.parquet``, to ``out``; return also the peak in Arrow."""
    rng = np.random.default_rng(6)
    source = directory / "a.parquet"
    blobs = [rng.bytes(10_000) for _ in range(8_000)]
    pq.write_table(pa.table({"id": range(8_000), "b": blobs}), source, use_dictionary=False, compression="none")
    assert pq.read_metadata(source).num_row_groups == 1
    del blobs
    before = pa.total_allocated_bytes()
    peak = 0

    def sample(done: int) -> None:
        nonlocal peak
        peak = max(peak, pa.total_allocated_bytes() - before)

    return rewrite_directory([source], directory / "out", options, sample), peak


def check_spans(path: Path) -> None:
    """Assert that row groups, and then page indexes, lie one after the other and span exactly what the footer says."""
    data = path.read_bytes()
    end = 4
    metadata = pq.read_metadata(path)
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        for position in range(group.num_columns):
            chunk = group.column(position)
            start = chunk.dictionary_page_offset or chunk.data_page_offset
            assert start == end
            end += chunk.total_compressed_size
    for at, size in index_spans(path):
        assert at == end
        end += size
    assert end == len(data) - 8 - int.from_bytes(data[-8:-4], "little")


def table_of(paths: list[Path], **options: Any) -> pa.Table:
    files = [pq.ParquetFile(path, **options) for path in paths]
    # By row group: pyarrow cannot read nested dictionaries across them.
    groups = [file.read_row_group(number) for file in files for number in range(file.num_row_groups)]
    return pa.concat_tables(groups or [files[0].read()])


def bits(table: pa.Table) -> list[Any]:
    """Return the rows so that NaN equals NaN and 0.0 differs from -0.0."""
    return [repr(column.to_pylist()) for column in table.columns]


def by_duckdb(paths: list[Path]) -> tuple[list[str], list[str]]:
    with duckdb.connect() as connection:
        connection.execute("set timezone = 'UTC'")
        names = [str(path) for path in paths]
        relation = connection.sql(
            "select * from read_parquet($names, hive_partitioning = false)", params={"names": names}
        )
        types = [str(kind) for kind in relation.types]
        return types, bits(relation.to_arrow_table())


def check_same(sources: list[Path], result: RewriteResult, duck: bool = True) -> None:
    """Assert that the outputs read as the sources do, in values, order, schema and metadata."""
    outputs = [output.path for output in result.outputs]
    before, after = table_of(sources), table_of(outputs)
    assert after.schema.equals(before.schema, check_metadata=True)
    assert bits(after) == bits(before)
    first = pq.read_metadata(sources[0])
    for output in result.outputs:
        path = output.path
        metadata = pq.read_metadata(path)
        assert (metadata.metadata or {}) == (first.metadata or {})
        assert str(metadata.schema).split("\n", 1)[1] == str(first.schema).split("\n", 1)[1]
        if not output.linked:
            check_spans(path)
    if duck:
        assert by_duckdb(outputs) == by_duckdb(sources)


def rewrite(sources: list[Path], target: Path, size: int = 64 * KB, **options: Any) -> RewriteResult:
    return rewrite_directory(sources, target, RewriteOptions(row_group_size=size, **options))
