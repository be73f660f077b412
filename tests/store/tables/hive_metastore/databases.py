"""Tables in a metastore, made through its Thrift interface by the bindings that pyiceberg has."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hive_metastore.ThriftHiveMetastore import Client
from hive_metastore.ttypes import Database as HiveDatabase
from hive_metastore.ttypes import FieldSchema, Partition, SerDeInfo, StorageDescriptor, Table
from thrift.protocol.TBinaryProtocol import TBinaryProtocol
from thrift.transport.TSocket import TSocket
from thrift.transport.TTransport import TBufferedTransport

from tests.servers.hive import Hive

PARQUET = (
    "org.apache.hadoop.hive.ql.io.parquet.MapredParquetInputFormat",
    "org.apache.hadoop.hive.ql.io.parquet.serde.ParquetHiveSerDe",
)
ORC = ("org.apache.hadoop.hive.ql.io.orc.OrcInputFormat", "org.apache.hadoop.hive.ql.io.orc.OrcSerde")
# a test of what a real metastore might answer otherwise
IN_BOTH = pytest.mark.parametrize("database", ["fake", pytest.param("real", marks=pytest.mark.hive)], indirect=True)


@dataclass(frozen=True)
class Database:
    """A database of one test, with a client of the metastore."""

    name: str
    url: str  # hive://127.0.0.1:P/NAME, without a table
    client: Any

    def table(
        self,
        name: str,
        location: str | Path | None,
        keys: Mapping[str, str] | None = None,
        stored: tuple[str, str] = PARQUET,
        kind: str = "EXTERNAL_TABLE",
        subdirectories: bool = False,
        **parameters: str,
    ) -> str:
        """Make a table, partitioned by ``keys`` (name to Hive type); return its URL."""
        columns = [FieldSchema("id", "bigint", None)]
        found = Table(
            dbName=self.name,
            tableName=name,
            owner="test",
            tableType=kind,
            sd=_storage(location, stored, columns),
            partitionKeys=[FieldSchema(key, hive_type, None) for key, hive_type in (keys or {}).items()],
            parameters={"EXTERNAL": "TRUE", **{key.replace("__", "."): value for key, value in parameters.items()}},
        )
        found.sd.storedAsSubDirectories = subdirectories
        self.client.create_table(found)
        return f"{self.url}.{name}"

    def add(self, table: str, *partitions: tuple[Sequence[str], str | Path], stored: tuple[str, str] = PARQUET) -> None:
        """Add partitions: their values and locations."""
        made = [self._partition(table, values, location, stored) for values, location in partitions]
        self.client.add_partitions(made)

    def drop(self, table: str, *values: str) -> None:
        """Remove a partition from the metastore; its files are not deleted."""
        self.client.drop_partition(self.name, table, list(values), False)

    def move(self, table: str, values: Sequence[str], location: str | Path) -> None:
        """Give a partition another location."""
        self.client.alter_partition(self.name, table, self._partition(table, values, location, PARQUET))

    def change(self, table: str, **parameters: str) -> None:
        """Set parameters of a table."""
        found = self.client.get_table(self.name, table)
        found.parameters.update({key.replace("__", "."): value for key, value in parameters.items()})
        self.client.alter_table(self.name, table, found)

    def _partition(self, table: str, values: Sequence[str], location: str | Path, stored: tuple[str, str]) -> Partition:
        storage = _storage(location, stored, [FieldSchema("id", "bigint", None)])
        return Partition(values=list(values), dbName=self.name, tableName=table, sd=storage, parameters={})


@contextmanager
def connected(hive: Hive) -> Iterator[Any]:
    """A client of the metastore."""
    transport = TBufferedTransport(TSocket("127.0.0.1", hive.port))
    transport.open()
    try:
        yield Client(TBinaryProtocol(transport))
    finally:
        transport.close()


def make_database(client: Any, url: str, name: str, home: Path) -> Database:
    """Make a database, whose own directory is below ``home``."""
    client.create_database(HiveDatabase(name=name, description="", locationUri=f"file:{home}/{name}.db", parameters={}))
    return Database(name, f"{url}/{name}", client)


def write_ids(path: Path, ids: Iterable[int]) -> Path:
    """Write a Parquet file with a column of ids; return its directory."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"id": pa.array(list(ids), pa.int64())}), path)
    return path.parent


def _storage(location: str | Path | None, stored: tuple[str, str], columns: list[FieldSchema]) -> StorageDescriptor:
    place = None if location is None else f"file:{location}" if isinstance(location, Path) else location
    return StorageDescriptor(
        cols=columns,
        location=place,
        inputFormat=stored[0],
        outputFormat="org.apache.hadoop.hive.ql.io.HiveIgnoreKeyTextOutputFormat",
        compressed=False,
        numBuckets=-1,
        serdeInfo=SerDeInfo(name="", serializationLib=stored[1], parameters={}),
        bucketCols=[],
        sortCols=[],
        parameters={},
    )
