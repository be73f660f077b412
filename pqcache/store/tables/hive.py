"""A table of a Hive metastore: its partitions, wherever they are, and the files that lie there now.

The metastore has no versions of a table. It is asked for each listing, and each location is listed by the driver of
its store. What of that is taken is decided as for a directory, by ``data_files.py`` and what follows it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

from pqcache.errors import SourceError, SourceIncomplete, SourceNotFound, SourceUnavailable, UsageError
from pqcache.events import Warned
from pqcache.store.drivers.base import Capabilities, Source
from pqcache.store.drivers.registry import open_source
from pqcache.store.hive import NULL, is_hidden_directory, partition_table
from pqcache.store.manifest import Identity, TableVersion
from pqcache.store.tables.base import (
    METASTORE_OPTIONS,
    OpenOptions,
    StoreFiles,
    Table,
    TableFile,
    TableListing,
    partition_path,
    store_options,
    usual_url,
)
from pqcache.store.tables.hive_client import (
    Metastore,
    MetastoreTable,
    PartitionEntry,
    Storage,
    TableEntry,
    ask,
    parse_url,
)
from pqcache.store.urls import printable, redact, url_scheme
from pqcache.system.parallel import in_parallel
from pqcache.units import format_count

if TYPE_CHECKING:
    import pyarrow as pa

log = logging.getLogger("pqcache.store")

_THREADS = 16  # of listings
_AT_ONCE = 32  # partitions below the table's own location from which that is listed once instead of each of them
_SHARE = 10  # ... if they are at least a tenth of all that the metastore knows there
_MAX_FILES = 10_000_000  # of a location


def open_hive(url: str, options: OpenOptions) -> Source:
    """Open ``hive://HOST:PORT/DATABASE.TABLE``; nothing is contacted yet.

    Raises UsageError for an unknown option, a malformed URL or a missing library.
    """
    return HiveTable(parse_url(url, options), options)


def _open_location(url: str, options: OpenOptions) -> Source:
    given = store_options(options.store, url_scheme(url))
    return open_source(url, given, options.timeout, options.hdfs_driver)


@dataclass(frozen=True, slots=True)
class _Partition:
    """A partition, or all of a table without any: its directory in a cache, its location, and its storage."""

    directory: str
    location: str
    storage: Storage


class HiveTable(Table):
    """A table of a metastore, which has no versions: every listing asks it."""

    capabilities = Capabilities()

    def __init__(self, named: MetastoreTable, options: OpenOptions) -> None:
        super().__init__(named.url, StoreFiles(None, partial(_open_location, options=options), options), options)
        self._named = named
        self._where: str | None = None
        self._warned: set[str] = set()

    def narrow(self, where: str | None) -> None:
        self._where = where

    def read_table(self) -> TableListing:
        table, found = self._ask()
        version = None
        if table.keys:
            names, schema = [name for name, _ in table.keys], _schema(table)
            known = [self._partition(names, partition) for partition in found]
            wanted = self._wanted(known, schema)
            version = TableVersion(format="Hive", version="", time="", schema=schema.serialize().to_pybytes())
        else:
            wanted = known = [_Partition("", self._location(table.storage.location, self.url), table.storage)]
        for each in wanted:
            check_parquet(self.url, each.directory, each.storage, table)
        root = _spelled(table.storage.location)
        if root and not url_scheme(root):
            self._files.rebase(root)
        self._check_options(known)
        return TableListing(files=self._taken(known, wanted, root), version=version)

    def _ask(self) -> tuple[TableEntry, list[PartitionEntry]]:
        def read(metastore: Metastore) -> tuple[TableEntry, list[PartitionEntry]]:
            table = metastore.table()
            check_table(self.url, table)
            return table, list(metastore.partitions(metastore.partition_names() if table.keys else []))

        table, found = ask(self._named, read)
        if table.keys and not found:
            reason = "has no partitions in the metastore"
            raise SourceIncomplete(self.url, reason, "nothing was published, add them with MSCK REPAIR TABLE")
        return table, found

    def _partition(self, names: Sequence[str], found: PartitionEntry) -> _Partition:
        if len(found.values) != len(names):
            reason = f"a partition has {len(found.values)} values for {len(names)} columns"
            raise SourceError(self.url, reason, "check the table with Hive")
        values = {name: None if v == NULL else v for name, v in zip(names, found.values, strict=True)}
        directory = partition_path(values)
        return _Partition(directory, self._location(found.storage.location, f"{self.url}/{directory}"), found.storage)

    def _location(self, text: str, of: str) -> str:
        """Spell a location as sources do; raises SourceError if it does not say in which store it is."""
        location = _spelled(text)
        if not location:
            reason = (
                f"has the location {redact(text)!r}, which does not say in which store it is"
                if text
                else "has no location"
            )
            raise SourceError(printable(of), printable(reason), "set it with ALTER TABLE ... SET LOCATION")
        return location

    def _check_options(self, known: Sequence[_Partition]) -> None:
        """Warn of options that neither the metastore nor the store of a location has."""
        given = self._options.store
        used = {name for each in known for name in store_options(given, url_scheme(each.location))}
        for name in sorted(given.keys() - METASTORE_OPTIONS - used):
            self._warn(f"-o {name} was not used, by the metastore or by the stores of the locations")

    def _wanted(self, known: Sequence[_Partition], schema: pa.Schema) -> Sequence[_Partition]:
        """Leave out the partitions that the condition excludes.

        Raises SourceIncomplete if it excludes all, SourceError if a value is not of its column's type.
        """
        values = partition_table([each.directory for each in known], schema)
        if not self._where:
            return known
        from pqcache.filters.sql import condition_on, rows_matching  # and sqlglot: slow, and not always needed

        condition = condition_on(self._where, values.column_names)
        wanted = [known[row] for row in rows_matching(values, condition)] if condition else known
        if not wanted:
            raise SourceIncomplete(self.url, f"no partition satisfies --where {self._where!r}")
        return wanted

    def _taken(self, known: Sequence[_Partition], wanted: Sequence[_Partition], root: str) -> dict[str, TableFile]:
        """Take the files in the locations of ``wanted``, by their paths in a cache.

        A file is in the innermost of the ``known`` locations that it lies below, once for each partition there.
        """
        at: dict[str, list[_Partition]] = {each.location: [] for each in known}
        for each in wanted:
            at[each.location].append(each)
        files: dict[str, TableFile] = {}
        foreign: list[str] = []
        filled: set[str] = set()
        for url, identity in self._listed(at, root).items():
            location = _innermost(url, at)
            below, _, name = (url[len(location) + 1 :] or url.rpartition("/")[2]).rpartition("/")
            is_foreign = "=" in below and not is_hidden_directory(below)
            for each in at.get(location, ()):
                if is_foreign and not each.storage.subdirectories:
                    foreign.append(url)
                    continue
                path = "/".join(filter(None, (each.directory, below.replace("=", "%3D"), name)))
                if path in files:
                    raise SourceError(url, f"has the same path in a cache as {files[path].url}", "rename one of them")
                files[path] = TableFile(path=path, url=url, identity=identity)
                filled.add(each.directory)
        self._report(wanted, filled, foreign)
        return files

    def _listed(self, at: Mapping[str, Sequence[_Partition]], root: str) -> dict[str, Identity]:
        """List the files in all locations with wanted partitions, and others, by their URLs.

        Where many of the table's partitions lie below its own location, that is listed once; all others one by one.
        """
        places = [location for location, partitions in at.items() if partitions]
        below = {place for place in places if root and place.startswith(f"{root}/")}
        all_below = sum(location.startswith(f"{root}/") for location in at)
        found: dict[str, Identity] = {}
        if len(below) >= _AT_ONCE and len(below) * _SHARE >= all_below:
            try:
                found = self._list(root)
                places = [place for place in places if place not in below]
            except SourceUnavailable:
                raise
            except SourceError as error:  # it may be about a partition that is not wanted
                log.debug("%s: locations are listed one by one: %s", self.url, error)
        for some in in_parallel([partial(self._list, place) for place in places], _THREADS):
            found.update(some)
        return found

    def _list(self, location: str) -> dict[str, Identity]:
        source = self._files.source_at(location)
        try:
            listed = self._options.tried(lambda: list(islice(source.list(), _MAX_FILES)), source.url)
        except SourceNotFound:
            return {}
        finally:
            source.close()
        if len(listed) == _MAX_FILES:
            raise SourceError(source.url, f"has {_MAX_FILES:,} files or more", "divide it into partitions")
        is_file = [source.url_of(file.path) for file in listed] == [source.url]
        return {location if is_file else f"{location}/{file.path}": file.identity for file in listed}

    def _report(self, wanted: Sequence[_Partition], filled: set[str], foreign: Sequence[str]) -> None:
        """Say what is empty and what is not taken, each once; raises SourceIncomplete if all is empty."""
        if foreign:
            what = "in directories of partitions that the metastore does not know were not taken"
            self._warn(f"{format_count(len(foreign), 'file')} {what} ({min(foreign)})")
        empty = [each for each in wanted if each.directory not in filled]
        first = redact(empty[0].location) if empty else ""
        if not filled:
            where = f"at {first}" if len(wanted) == 1 else f"at any of {len(wanted):,} locations, the first {first}"
            raise SourceIncomplete(self.url, f"there is no file {where}", "nothing was published, check the locations")
        if empty:
            count = f"{len(empty):,} of {format_count(len(wanted), 'partition')}"
            self._warn(f"no files in {count} ({empty[0].directory} at {first})")

    def _warn(self, warning: str) -> None:
        if warning not in self._warned:
            self._warned.add(warning)
            self._options.on_event(Warned(printable(f"{self.url}: {warning}")))


def _spelled(location: str) -> str:
    """Spell a location as sources do; empty if it does not say in which store it is.

    Hadoop does not encode paths in URLs, so nothing is decoded.
    """
    if location.startswith("file:"):
        return "/" + re.sub(r"file:(//[^/]*)?", "", location, count=1).strip("/")
    spelled = usual_url(location).rstrip("/")
    return spelled if url_scheme(spelled) else ""


def _innermost(url: str, locations: Mapping[str, object]) -> str:
    """Empty if ``url`` lies below none."""
    place = url
    while place and place not in locations:
        place = place.rpartition("/")[0]
    return place


def _schema(table: TableEntry) -> pa.Schema:
    import pyarrow as pa

    simple = {
        "boolean": pa.bool_(), "tinyint": pa.int8(), "smallint": pa.int16(), "int": pa.int32(), "bigint": pa.int64(),
        "float": pa.float32(), "double": pa.float64(), "date": pa.date32(), "timestamp": pa.timestamp("us"),
    }  # fmt: skip

    def arrow(kind: str) -> pa.DataType:
        digits = re.fullmatch(r"decimal\((\d+),(\d+)\)", kind)
        return pa.decimal128(int(digits[1]), int(digits[2])) if digits else simple.get(kind, pa.string())

    return pa.schema([(name, arrow(kind.lower().replace(" ", ""))) for name, kind in table.keys])


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
    location = printable(redact(table.storage.location))
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
    """Raise UsageError if files are not read as Parquet: those of a partition, or of the table without any."""
    of = printable(f"{url}/{directory}" if directory else url)
    if "hudi" in storage.input_format.lower():
        raise UsageError(of, "is of a Hudi table, whose timeline says which files count", _EXPORT)
    if storage.input_format.lower() in _PARQUET_INPUT and storage.serde.lower() in _PARQUET_SERDE:
        return
    provider = table.parameters.get("spark.sql.sources.provider", "")
    if provider.lower() == "parquet":
        advice = f"name its directory, {printable(redact(table.storage.path))}" if table.storage.path else _EXPORT
        raise UsageError(of, "is stored by Spark in a way that Hive does not know", advice)
    if storage.input_format.endswith(".SymlinkTextInputFormat"):
        raise UsageError(of, "has lists of files in its location and not files", "name the table that it is made of")
    read = " and ".join(name.rpartition(".")[2] for name in (storage.input_format, storage.serde) if name)
    raise UsageError(of, f"is not stored as Parquet; its files are read by {printable(read) or 'nothing'}", _EXPORT)
