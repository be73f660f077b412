"""Tables that a listing does not show are found by the names in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from pqcache.errors import UsageError
from pqcache.store.tables.data_files import FoundTable, check_above, check_tables, find_tables, table_above

DATA = ["part-0.parquet", "dt=1/part-0.parquet"]
UUID = "0fd95d6d-ea2d-47ed-91d1-fcdbe51693ce"
DELTA = "_delta_log/00000000000000000000.json"


@pytest.mark.parametrize(
    ("path", "format_", "directory"),
    [
        (DELTA, "a Delta table", ""),
        ("_delta_log/00000000000000000010.checkpoint.parquet", "a Delta table", ""),
        ("_delta_log/_last_checkpoint", "a Delta table", ""),
        (f"db/shop/{DELTA}", "a Delta table", "db/shop"),
        ("metadata/00001-4a.gz.metadata.json", "an Iceberg table", ""),
        ("metadata/v3.metadata.json", "an Iceberg table", ""),
        ("db/shop/metadata/version-hint.text", "an Iceberg table", "db/shop"),
        (f"shop/log/00001-{UUID}.metadata.json", "an Iceberg table", "shop"),
        (".hoodie/hoodie.properties", "a Hudi table", ""),
        ("shop/dt=1/.hoodie_partition_metadata.parquet", "a Hudi table", "shop"),
        ("base_0000005_v0000021/bucket_00000", "a transactional Hive table", ""),
        ("base_10000000/000000_0", "a transactional Hive table", ""),
        ("dt=1/base_5/bucket_00000", "a transactional Hive table", ""),
        ("shop/dt=1/h=2/delta_0000001_0000001_0000/000000_0", "a transactional Hive table", "shop"),
        ("delete_delta_0000002_0000002_0001_v0000007/bucket_00000", "a transactional Hive table", ""),
        ("dt=1/x/_orc_acid_version", "a transactional Hive table", "dt=1/x"),
        ("_spark_metadata/0", "the output of a Spark stream", ""),
        ("shop/_spark_metadata/9.compact", "the output of a Spark stream", "shop"),
        ("caches/shop/pqcache.toml", "a pqcache", "caches/shop"),
    ],
)
def test_a_table_is_found_anywhere(path: str, format_: str, directory: str) -> None:
    assert find_tables([*DATA, path]) == [FoundTable(format_, directory, path)]


@pytest.mark.parametrize(
    "path",
    [
        "metadata/part-0.parquet",
        "metadata/sub/v1.metadata.json",
        "delta_col=1/part-0.parquet",
        "base_col=1/part-0.parquet",
        "base_20261101/part-0.parquet",
        "delta_2/part-0.parquet",
        "delta_0000001_0000001.parquet",
        "_delta_log/.00000000000000000000.json.crc",
        "_delta_log_$folder$",
        "_spark_metadata/notes",
        "_temporary/shop/_delta_log/00000000000000000000.json",
        ".trash/shop/.hoodie/hoodie.properties",
        "schemas/1.metadata.json",
    ],
)
def test_other_names_are_no_table(path: str) -> None:
    assert find_tables([*DATA, path]) == []


def test_tables_are_counted_once() -> None:
    nested = [f"dt={n}/delta_000000{n}_000000{n}_0000/000000_0" for n in range(1, 9)]
    hudi = [".hoodie/hoodie.properties", "a/.hoodie_partition_metadata", "b/c/.hoodie_partition_metadata"]
    assert [table.directory for table in find_tables([*nested, *hudi])] == ["", ""]
    inside = [f"{outer}p{number}/_delta_log/0.json" for outer in ("", "p1/x/") for number in range(3)]
    assert [table.directory for table in find_tables(inside)] == ["p0", "p1", "p2"]
    two = [f"one/{DELTA}", f"two/{DELTA}", "two/_delta_log/00000000000000000001.json"]
    with pytest.raises(UsageError, match=r"^hdfs://h/lake/one: is a Delta table \(one/.*, the first of 2: one, two\)"):
        check_tables(two, "hdfs://h/lake")


@pytest.mark.parametrize(
    ("evidence", "below"),
    [
        (DELTA, "dt=1/h=2"),
        ("metadata/v1.metadata.json", "data/dt=1/x.parquet"),
        (".hoodie/hoodie.properties", "2026/11/01"),
        ("_spark_metadata/0", "part-0.parquet"),
        ("dt=1/delta_0000001_0000001_0000/x", "dt=1/delta_0000001_0000001_0000/x"),
        ("pqcache.toml", "snapshots"),
    ],
)
def test_a_part_of_a_table_is_found_by_what_is_above(evidence: str, below: str, tmp_path: Path) -> None:
    for path in (evidence, f"{below}/x" if not below.endswith(("x", ".parquet")) else below):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    assert table_above(str(tmp_path / below)) is not None
    (tmp_path / "link").symlink_to(tmp_path / below)
    for path in (below, "link"):
        with pytest.raises(UsageError, match=r"is a part of .* take its files as they are with --as-files"):
            check_above(str(tmp_path / path))


@pytest.mark.parametrize("evidence", ["metadata/v1.metadata.json", "delta_0000001_0000001/x", "snapshots/x"])
def test_a_neighbour_is_no_table_above(evidence: str, tmp_path: Path) -> None:
    (tmp_path / evidence).parent.mkdir(parents=True)
    (tmp_path / evidence).touch()
    for below in ("lake", "lake/dt=1"):
        (tmp_path / below).mkdir()
        check_above(str(tmp_path / below))


def test_a_part_of_a_hive_table_is_found_by_its_url() -> None:
    check_above("s3://bucket/lake/shop/dt=1")
    for url in ("hdfs://h:8020/shop/dt=1/delta_0000001_0000001_0000", "s3://b/shop/base_0000004/000000_0"):
        with pytest.raises(UsageError, match="is a part of a transactional Hive table"):
            check_above(url)
