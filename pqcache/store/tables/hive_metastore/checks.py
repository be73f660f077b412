"""Tables of a metastore whose rows are not the rows of the Parquet files in their locations."""

from __future__ import annotations

from pqcache.errors import UsageError
from pqcache.store.tables.hive_metastore.client import Storage, TableEntry
from pqcache.store.urls import printable

_PARQUET_INPUT = {
    "org.apache.hadoop.hive.ql.io.parquet.mapredparquetinputformat",
    "parquet.hive.mapredparquetinputformat",
    "parquet.hive.deprecatedparquetinputformat",
}
_PARQUET_SERDE = {
    "org.apache.hadoop.hive.ql.io.parquet.serde.parquethiveserde",
    "parquet.hive.serde.parquethiveserde",
}
_TABLES = ("MANAGED_TABLE", "EXTERNAL_TABLE")
_EXPORT = "write it to an external table of Parquet with Hive or Spark"


def check_table(url: str, table: TableEntry) -> None:
    """Raise UsageError for a table that is a view, or whose log says which files count; see `check_parquet` too."""
    known = {name.lower(): value.lower() for name, value in table.parameters.items()}
    provider, handler = known.get("spark.sql.sources.provider", ""), known.get("storage_handler", "")
    location = printable(table.storage.location)
    if table.kind and table.kind not in _TABLES:
        raise UsageError(url, f"is no table but a {table.kind.lower().replace('_', ' ')}", "name the table behind it")
    if "iceberg" in (known.get("table_type"), provider) or "iceberg" in handler:
        raise UsageError(url, "is an Iceberg table, whose metadata say which files count", "name it by iceberg://")
    if "delta" in (known.get("table_type"), provider) or "delta" in handler:
        advice = f"name its location, {location}" if location else "name its location"
        raise UsageError(url, "is a Delta table, whose log says which files count", advice)
    if provider == "hudi" or "hudi" in table.storage.input_format.lower():
        raise UsageError(url, "is a Hudi table, whose timeline says which files count", _EXPORT)
    if handler:
        raise UsageError(url, f"is stored by {printable(table.parameters['storage_handler'])}", _EXPORT)
    if known.get("transactional") == "true":
        reason = "is a transactional Hive table, whose files are changes to rows"
        if known.get("transactional_properties") == "insert_only":
            reason = "is a transactional Hive table, whose transactions say which files count"
        raise UsageError(url, reason, _EXPORT)


def check_parquet(url: str, directory: str, storage: Storage, table: TableEntry) -> None:
    """Raise UsageError where files are not read as Parquet: those of a partition, or of the table without any."""
    of = printable(f"{url}/{directory}" if directory else url)
    if "hudi" in storage.input_format.lower():
        raise UsageError(of, "is of a Hudi table, whose timeline says which files count", _EXPORT)
    if storage.input_format.lower() in _PARQUET_INPUT and storage.serde.lower() in _PARQUET_SERDE:
        return
    provider = table.parameters.get("spark.sql.sources.provider", "")
    if provider.lower() == "parquet":
        advice = f"name its directory, {printable(table.storage.path)}" if table.storage.path else _EXPORT
        raise UsageError(of, "is stored by Spark in a way that Hive does not know", advice)
    if storage.input_format.endswith(".SymlinkTextInputFormat"):
        raise UsageError(of, "has lists of files in its location and not files", "name the table that it is made of")
    read = " and ".join(name.rpartition(".")[2] for name in (storage.input_format, storage.serde) if name)
    raise UsageError(of, f"is not stored as Parquet; its files are read by {printable(read) or 'nothing'}", _EXPORT)
