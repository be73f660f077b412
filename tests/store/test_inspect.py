"""Inspect: the numbers against the footers, for every kind of target."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import pqcache
from pqcache.store.drivers.base import Source
from pqcache.store.manifest import SourceFile
from pqcache.store.sync.table_schema import read_remote_footer
from tests.datasets import files_of, shop_table, write_shop
from tests.remote import make_remote

KEYS = {
    "target", "kind", "source", "snapshot", "created", "files", "rows", "row_groups", "bytes", "uncompressed",
    "block_size", "over_block", "straddling", "blocks_touched", "row_group_bytes", "histogram", "compression",
    "partitions", "columns", "under_quarter", "keys", "shard", "listing", "version", "arriving",
}  # fmt: skip


def assert_describes(found: pqcache.Inspection, root: Path) -> None:
    footers = [pq.read_metadata(root / path) for path in files_of(root)]
    assert found.files == len(footers)
    assert found.rows == sum(footer.num_rows for footer in footers)
    assert found.row_groups == sum(footer.num_row_groups for footer in footers)
    assert found.bytes == sum((root / path).stat().st_size for path in files_of(root))
    assert sum(item.count for item in found.histogram) == found.row_groups
    assert sum(item.rows for item in found.partitions) == found.rows
    assert sum(item.bytes for item in found.partitions) == found.bytes
    assert sum(item.bytes for item in found.columns) == sum(found.compression.values())
    assert [item.path for item in found.partitions] == ["dt=2026-11-01", "dt=2026-11-02", "dt=2026-11-03"]
    assert [item.name for item in found.columns] == ["id", "title", "tokens", "price", "note", "image", "dt"]
    assert found.columns[-1].partition
    document = json.loads(json.dumps(found.to_dict()))
    assert set(document) == KEYS
    assert document["partitions"][0]["files"] == 3


def test_a_directory_and_a_cache(tmp_path: Path) -> None:
    shop, cache = write_shop(tmp_path / "shop"), tmp_path / "cache"
    found = pqcache.inspect(shop)
    assert_describes(found, shop)
    assert (found.kind, found.snapshot, found.straddling) == ("directory", None, None)
    report = pqcache.sync(str(shop), cache)
    found = pqcache.inspect(cache)
    assert_describes(found, shop)
    assert (found.kind, found.source, found.snapshot) == ("cache", str(shop), report.snapshot)
    pqcache.sync(cache, row_group_size=64 << 10)
    assert pqcache.inspect(cache).block_size == 64 << 10, "what it was repartitioned to"
    assert pqcache.inspect(cache, block_size=8 << 10).block_size == 8 << 10


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=getattr(pytest.mark, kind)) for kind in ("hdfs", "s3")])
def test_a_store(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    shop = write_shop(tmp_path / "shop")
    for remote in make_remote(kind, request, tmp_path):
        remote.upload(shop)
        found = pqcache.inspect(remote.url)
        assert_describes(found, shop)
        assert found.kind == "remote"
        assert found.straddling == (None if kind == "s3" else 0)
        assert found.block_size == 134_217_728


def test_over_the_block_and_straddling_are_counted(
    tmp_path: Path, hdfs_dir: str, request: pytest.FixtureRequest
) -> None:
    """Row groups of a known size in a file of known blocks."""
    path = tmp_path / "a.parquet"
    data = pa.table({"x": [b"x" * 1000] * 400})
    plain = {"compression": "none", "use_dictionary": False, "write_statistics": False}
    with pq.ParquetWriter(path, data.schema, **plain) as writer:
        for rows in (100, 300, 20, 20):
            writer.write_table(data.slice(0, rows), row_group_size=rows)
    footer = pq.read_metadata(path)
    block = 131_072
    starts = [footer.row_group(g).column(0).data_page_offset for g in range(4)]
    sizes = [footer.row_group(g).column(0).total_compressed_size for g in range(4)]
    touched = [(start + size - 1) // block - start // block + 1 for start, size in zip(starts, sizes, strict=True)]
    assert touched == [1, 4, 1, 1]

    for remote in make_remote("hdfs", request, tmp_path):
        remote.put("a.parquet", path.read_bytes())
        found = pqcache.inspect(remote.url, block_size=block)
        assert (found.over_block, found.straddling, found.blocks_touched) == (1, 1, 7)
        edges = {(item.low, item.high): item.count for item in found.histogram if item.count}
        assert sum(edges.values()) == 4
    assert pqcache.inspect(path, block_size=sizes[1]).over_block == 0  # exactly full is not over
    assert pqcache.inspect(path, block_size=sizes[1] - 1).over_block == 1


def test_a_file_with_a_footer_larger_than_the_first_read(tmp_path: Path) -> None:
    about = {"said by the writer": "x" * 100_000}
    pq.write_table(shop_table(0, 100).replace_schema_metadata(about), tmp_path / "one.parquet")
    found = pqcache.inspect(tmp_path / "one.parquet")
    assert (found.files, found.rows, found.partitions[0].path) == (1, 100, "")


def test_what_is_not_there_or_not_parquet(tmp_path: Path) -> None:
    with pytest.raises(pqcache.SourceNotFound, match="nowhere"):
        pqcache.inspect(tmp_path / "nowhere")
    with pytest.raises(pqcache.SourceIncomplete, match="no Parquet file"):
        pqcache.inspect(tmp_path)
    for content in (b"", b"PAR1", b"x" * 100, b"PAR1" + b"\xff" * 50 + (40).to_bytes(4, "little") + b"PAR1"):
        (tmp_path / "a.parquet").write_bytes(content)
        with pytest.raises(pqcache.ParquetError, match=r"a\.parquet: (not a Parquet file|has no bytes)"):
            pqcache.inspect(tmp_path)


def test_a_server_that_fails_once_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = pytest.importorskip("fsspec").filesystem("memory")
    with memory.open("/once/a.parquet", "wb") as file:
        pq.write_table(pa.table({"a": [1, 2]}), file)
    asked: list[SourceFile] = []

    def read_or_fail(source: Source, file: SourceFile) -> Any:
        asked.append(file)
        if len(asked) == 1:
            raise pqcache.SourceUnavailable(file.path, "all DataNodes failed")
        return read_remote_footer(source, file)

    # patched, as no server here fails exactly while footers are read
    monkeypatch.setattr("pqcache.store.inspect.read_remote_footer", read_or_fail)
    assert pqcache.inspect("memory://once").rows == 2
    assert asked[0] == asked[1]
