"""Tables of deltalake and pyiceberg are refused by name where their logs are not read, and plain ones are not."""

from __future__ import annotations

import re
from contextlib import closing
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.dataset as pds
import pytest
from deltalake import write_deltalake
from pyiceberg.catalog.sql import SqlCatalog

import pqcache
from pqcache.cli import run
from pqcache.errors import UsageError
from pqcache.torch import ParquetDataset

ROWS = pa.table({"id": range(30), "dt": [f"2026-11-0{i % 3 + 1}" for i in range(30)]})


def test_a_lake_is_refused_and_the_plain_tables_in_it_are_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lake, plain = tmp_path / "lake", tmp_path / "lake" / "plain"
    plain.mkdir(parents=True)
    write_deltalake(str(lake / "delta"), ROWS, partition_by=["dt"])
    places = {f"write.{kind}.path": f"{lake.as_uri()}/db/elsewhere/{kind}s" for kind in ("data", "metadata")}
    with closing(SqlCatalog("lake", uri=f"sqlite:///{tmp_path}/lake.db", warehouse=lake.as_uri())) as catalog:
        catalog.create_namespace("db")
        for name, properties in (("iceberg", {"write.metadata.compression-codec": "gzip"}), ("elsewhere", places)):
            catalog.create_table(f"db.{name}", ROWS.schema, properties=properties).append(ROWS)
    for table, format_ in (("delta", "a Delta table"), ("db/iceberg", "an Iceberg"), ("db/elsewhere", "an Iceberg")):
        with pytest.raises(UsageError, match=rf"is {format_}.* \(.*--as-files") as error:
            ParquetDataset(lake / table)
        assert error.value.subject == str(lake / table)
    for call in (pqcache.sync, pqcache.repartition):  # which find the log of the others, and read it
        with pytest.raises(UsageError, match=r"is an Iceberg table \(.*--as-files"):
            call(lake / "db" / "elsewhere", tmp_path / "out")  # type: ignore[operator]
    duckdb.from_arrow(ROWS).write_parquet(str(plain / "duckdb"), partition_by=["dt"])
    pds.write_dataset(ROWS, plain / "pyarrow", format="parquet", partitioning=["dt"], partitioning_flavor="hive")
    assert pqcache.sync(plain, tmp_path / "both").rows == len(ParquetDataset(plain, batch_size=None)) == 60
    assert run(["sync", str(lake), str(tmp_path / "out")]) == 2
    assert not (tmp_path / "out").exists()
    printed = capsys.readouterr().err
    assert re.search(r"is an Iceberg table .*first of 3.*--as-files", printed)
