"""Tables as deltalake and pyiceberg write them are refused by name; plain ones of DuckDB and pyarrow are not."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.dataset as pds
import pytest
from deltalake import DeltaTable, write_deltalake
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.table import Table
from pyiceberg.transforms import IdentityTransform

import pqcache
from pqcache.cli import run
from pqcache.errors import UsageError
from pqcache.torch import ParquetDataset


def rows(start: int, stop: int) -> pa.Table:
    """Rows with the ids from ``start`` to ``stop``, in three partitions."""
    ids = range(start, stop)
    return pa.table({"id": pa.array(ids, pa.int64()), "dt": pa.array([f"2026-11-0{i % 3 + 1}" for i in ids])})


def delta(**configuration: str) -> Callable[[str], None]:
    """Return what writes a Delta table, with a replaced file and deleted rows."""

    def write(path: str) -> None:
        write_deltalake(path, rows(0, 10), configuration={f"delta.{k}": v for k, v in configuration.items()})
        for start in range(10, 40, 10):
            write_deltalake(path, rows(start, start + 10), mode="append")
        DeltaTable(path).delete("id < 2")

    return write


def delta_overwritten(path: str) -> None:
    write_deltalake(path, rows(0, 10))
    write_deltalake(path, rows(0, 5), mode="overwrite")


def delta_in_partitions(path: str) -> None:
    for start in (0, 10):
        write_deltalake(path, rows(start, start + 10), mode="append", partition_by=["dt"])


def delta_vacuumed(path: str) -> None:
    delta_in_partitions(path)
    table = DeltaTable(path)
    table.optimize.compact()
    table.vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)


def delta_with_a_cut_log(path: str) -> None:
    delta(logRetentionDuration="interval 0 days", enableExpiredLogCleanup="true")(path)
    table = DeltaTable(path)
    table.create_checkpoint()
    table.cleanup_metadata()
    log = Path(path, "_delta_log")
    assert not (log / f"{0:020}.json").exists(), "the log begins with a checkpoint"
    for commit in log.glob("*.json"):
        commit.unlink()  # as where a later cleanup leaves the checkpoint alone


def delta_without_rows(path: str) -> None:
    write_deltalake(path, rows(0, 10))
    DeltaTable(path).delete()
    DeltaTable(path).vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)


def iceberg(catalog: SqlCatalog, name: str, *, by: str = "", **properties: str) -> Table:
    """Return a new Iceberg table, partitioned by the values of the column ``by`` if there is one."""
    table = catalog.create_table(f"db.{name}", rows(0, 1).schema, properties=properties)
    if by:
        with table.update_spec() as spec:
            spec.add_field(by, IdentityTransform(), by)
    return table


DELTA: dict[str, Callable[[str], None]] = {
    "appended": delta(),
    "overwritten": delta_overwritten,
    "partitioned": delta_in_partitions,
    "vacuumed": delta_vacuumed,
    "cut_log": delta_with_a_cut_log,
    "vectors": delta(enableDeletionVectors="true"),
    "mapped": delta(**{"columnMapping.mode": "name", "minReaderVersion": "2", "minWriterVersion": "5"}),
    "changes": delta(enableChangeDataFeed="true"),
    "empty": delta_without_rows,
}
ICEBERG = ("appended", "partitioned", "gzip", "elsewhere", "objects", "empty")


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the Delta tables in ``delta/`` and the Iceberg tables in ``db/``."""
    root = tmp_path_factory.mktemp("lake")
    for name, write in DELTA.items():
        write(str(root / "delta" / name))
    catalog = SqlCatalog("lake", uri=f"sqlite:///{root.parent}/{root.name}.db", warehouse=root.as_uri())
    with closing(catalog):
        catalog.create_namespace("db")
        appended = iceberg(catalog, "appended")
        for start in (0, 10):
            appended.append(rows(start, start + 10))
        appended.overwrite(rows(0, 5))
        appended.delete("id < 2")
        iceberg(catalog, "partitioned", by="dt").append(rows(0, 10))
        iceberg(catalog, "gzip", **{"write.metadata.compression-codec": "gzip"}).append(rows(0, 10))
        places = {kind: f"{root.as_uri()}/db/elsewhere/{kind}" for kind in ("files", "snapshots")}
        moved = {"write.data.path": places["files"], "write.metadata.path": places["snapshots"]}
        iceberg(catalog, "elsewhere", **moved).append(rows(0, 10))
        iceberg(catalog, "objects", by="dt", **{"write.object-storage.enabled": "true"}).append(rows(0, 10))
        iceberg(catalog, "empty")
    return root


TABLES = [f"delta/{name}" for name in DELTA] + [f"db/{name}" for name in ICEBERG]


def test_a_directory_that_is_read_in_place_is_no_table(lake: Path, tmp_path: Path) -> None:
    for table in TABLES:
        format_ = "a Delta table" if table.startswith("delta/") else "an Iceberg table"
        with pytest.raises(UsageError, match=rf"is {format_} \(.*--as-files") as error:
            ParquetDataset(lake / table)
        assert error.value.subject == str(lake / table)
    for call in (pqcache.sync, pqcache.repartition):  # which find the log of the others, and read it
        with pytest.raises(UsageError, match=r"is an Iceberg table \(.*--as-files"):
            call(lake / "db" / "elsewhere", tmp_path / "out")  # type: ignore[operator]
    assert not (tmp_path / "out").exists()


def test_a_lake_is_refused_and_the_plain_tables_in_it_are_not(
    lake: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = lake / "plain"
    plain.mkdir()
    duckdb.from_arrow(rows(0, 30)).write_parquet(str(plain / "duckdb"), partition_by=["dt"])
    pds.write_dataset(rows(0, 30), plain / "pyarrow", format="parquet", partitioning=["dt"], partitioning_flavor="hive")
    for name in ("duckdb", "pyarrow"):
        assert (pqcache.sync(plain / name, tmp_path / name).rows, pqcache.inspect(plain / name).rows) == (30, 30)
        assert len(ParquetDataset(plain / name, batch_size=None)) == 30
        assert pqcache.repartition(plain / name, tmp_path / f"{name}-2").rows == 30
        read = pds.dataset(tmp_path / name / "current", partitioning="hive", exclude_invalid_files=True).to_table()
        assert read.select(["id", "dt"]).sort_by("id").equals(rows(0, 30))
    assert pqcache.sync(plain, tmp_path / "both").rows == 60
    assert run(["sync", str(lake), str(tmp_path / "out")]) == 2
    printed = capsys.readouterr().err
    assert re.search(rf"/db/appended: is an Iceberg table .*first of {len(TABLES)}.*--as-files", printed)
