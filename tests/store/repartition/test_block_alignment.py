"""--align block: no row group lies across a block boundary, and nothing else changes."""

from __future__ import annotations

from pathlib import Path

import duckdb
import fastparquet
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import pqcache
from pqcache.parquet.rewrite.directory import rewrite_directory, row_group_bytes, row_group_start
from pqcache.parquet.rewrite.files import straddles
from pqcache.parquet.rewrite.recipe import RewriteOptions
from tests.datasets import rows_of, write_shop
from tests.examples import examples
from tests.servers.hdfs import Hdfs

KB = 1 << 10


def groups_of(directory: Path) -> list[list[tuple[int, int]]]:
    """Return start and size of every row group, by file."""
    footers = [pq.read_metadata(path) for path in sorted(directory.rglob("*.parquet"))]
    return [
        [(row_group_start(f.row_group(g)), row_group_bytes(f.row_group(g))) for g in range(f.num_row_groups)]
        for f in footers
    ]


def write_source(directory: Path, sizes: list[int]) -> pa.Table:
    """Write one file of rows whose only large value has these sizes."""
    rng = np.random.default_rng(1)
    table = pa.table({"id": np.arange(len(sizes)), "data": pa.array([rng.bytes(n) for n in sizes], pa.binary())})
    directory.mkdir(parents=True)
    pq.write_table(table, directory / "all.parquet")
    return table


@settings(max_examples=examples(25), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(st.integers(10, 9000), min_size=1, max_size=400),
    shape=st.sampled_from([(16, 16), (16, 64), (20, 64), (8, 64), (63, 64), (33, 64)]),
)
def test_no_row_group_lies_across_a_boundary(
    tmp_path_factory: pytest.TempPathFactory, rows: list[int], shape: tuple[int, int]
) -> None:
    tmp_path, (size, block) = tmp_path_factory.mktemp("align"), (shape[0] * KB, shape[1] * KB)
    table = write_source(tmp_path / "in", rows)
    rewrite_directory(
        [tmp_path / "in" / "all.parquet"], tmp_path / "out", RewriteOptions(row_group_size=size, block_size=block)
    )
    files = groups_of(tmp_path / "out")
    assert not [group for file in files for group in file if straddles(*group, block)]
    footers = [pq.read_metadata(path) for path in sorted((tmp_path / "out").iterdir())]
    groups = [footer.row_group(g) for footer in footers for g in range(footer.num_row_groups)]
    assert all(row_group_bytes(group) <= size or group.num_rows == 1 for group in groups)
    ends = [start + length for file in files for start, length in file[:-1]]
    starts = [start for file in files for start, _ in file[1:]]
    holes = [start - end for start, end in zip(starts, ends, strict=True)]
    assert all(hole == 0 or start % block == 0 for hole, start in zip(holes, starts, strict=True))
    written = pa.concat_tables([pq.read_table(path) for path in sorted((tmp_path / "out").iterdir())])
    assert written.equals(table)


def test_groups_fill_their_blocks_and_every_reader_reads_them(tmp_path: Path) -> None:
    """But a hole that would waste much begins a file."""
    table = write_source(tmp_path / "in", [700 + 7 * (n % 90) for n in range(1000)])
    source = tmp_path / "in" / "all.parquet"
    rewrite_directory([source], tmp_path / "plain", RewriteOptions(row_group_size=64 * KB))
    rewrite_directory([source], tmp_path / "out", RewriteOptions(row_group_size=64 * KB, block_size=64 * KB))
    rewrite_directory([source], tmp_path / "small", RewriteOptions(row_group_size=40 * KB, block_size=64 * KB))
    (plain,), (aligned,) = groups_of(tmp_path / "plain"), groups_of(tmp_path / "out")
    assert sum(straddles(*group, 64 * KB) for group in plain) > len(plain) / 2
    assert [start for start, _ in aligned] == [4, *(64 * KB * n for n in range(1, len(aligned)))]
    assert all(size > 0.95 * 64 * KB for _, size in aligned[:-1])
    (file,) = (tmp_path / "out").iterdir()
    ids = table["id"].to_pylist()
    assert duckdb.sql(f"select id, data from '{file}'").fetchall() == list(
        zip(ids, table["data"].to_pylist(), strict=True)
    )
    with file.open("rb") as data:
        assert fastparquet.ParquetFile(data).to_pandas()["data"].tolist() == table["data"].to_pylist()
    assert all(len(group) == 1 for group in groups_of(tmp_path / "small")[:-1])  # the last may hold what is left over
    assert sum(path.stat().st_size for path in (tmp_path / "small").iterdir()) < 1.1 * source.stat().st_size


def test_a_row_larger_than_a_block_stands_alone(tmp_path: Path) -> None:
    table = write_source(tmp_path / "in", [1000] * 60 + [100 * KB] + [1000] * 60)
    options = RewriteOptions(row_group_size=32 * KB, block_size=32 * KB)
    result = rewrite_directory([tmp_path / "in" / "all.parquet"], tmp_path / "out", options)
    assert "row 60 alone" in result.warnings[0]
    groups = [group for file in groups_of(tmp_path / "out") for group in file]
    assert [size > 32 * KB for _, size in groups].count(True) == 1
    assert all(size > 32 * KB or not straddles(start, size, 32 * KB) for start, size in groups)
    assert pa.concat_tables([pq.read_table(path) for path in sorted((tmp_path / "out").iterdir())]).equals(table)


@pytest.mark.hdfs
def test_before_and_after_on_hdfs(hdfs: Hdfs, hdfs_dir: str, tmp_path: Path) -> None:
    shop = write_shop(tmp_path / "shop", rows=400)
    pqcache.repartition(shop, f"{hdfs_dir}/before", row_group_size=64 * KB, block_size=64 * KB)
    pqcache.repartition(
        f"{hdfs_dir}/before", f"{hdfs_dir}/after", row_group_size=64 * KB, align="block", block_size=64 * KB
    )
    before, after = (pqcache.inspect(f"{hdfs_dir}/{name}") for name in ("before", "after"))
    assert before.block_size == after.block_size == 64 * KB  # what the NameNode says of the files
    assert before.straddling is not None
    assert before.straddling > before.row_groups / 2
    assert (after.straddling, after.blocks_touched, after.rows) == (0, after.row_groups, before.rows)
    web = pqcache.inspect(f"{hdfs_dir}/after".replace(hdfs.url, hdfs.webhdfs_url))
    assert (web.straddling, web.block_size) == (0, 64 * KB)


def test_inspect_counts_for_a_block_size_that_is_asked_for(tmp_path: Path) -> None:
    shop, cache = write_shop(tmp_path / "shop", rows=400), tmp_path / "cache"
    pqcache.repartition(shop, tmp_path / "out", row_group_size=64 * KB, align="block", block_size=64 * KB)
    assert pqcache.inspect(tmp_path / "out").straddling is None
    assert pqcache.inspect(tmp_path / "out", block_size=64 * KB).straddling == 0
    assert (pqcache.inspect(tmp_path / "out", block_size=16 * KB).straddling or 0) > 0
    pqcache.sync(str(tmp_path / "out"), cache)
    assert pqcache.inspect(cache).straddling is None
    assert pqcache.inspect(cache, block_size=64 * KB).straddling == 0
    assert rows_of(tmp_path / "out") == rows_of(shop)


def test_what_cannot_be_aligned_is_refused(tmp_path: Path) -> None:
    shop, cache = write_shop(tmp_path / "shop", rows=20), tmp_path / "cache"
    with pytest.raises(pqcache.UsageError, match="does not fit into a block of 1 MB"):
        pqcache.repartition(shop, tmp_path / "out", align="block", block_size=1 << 20)
    with pytest.raises(pqcache.UsageError, match="align='page': choose block"):
        pqcache.repartition(shop, tmp_path / "out", align="page")
    pqcache.sync(str(shop), cache)
    with pytest.raises(pqcache.UsageError, match="for writing to DEST"):
        pqcache.repartition(cache, align="block")
