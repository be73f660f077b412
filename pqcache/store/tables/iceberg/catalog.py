"""An Iceberg table of a catalog: ``iceberg://CATALOG/NAMESPACE.TABLE``, by pyiceberg's own configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, TypeVar

from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.table import Table
from pyiceberg.utils.config import Config

from pqcache.errors import SourceUnavailable, UsageError
from pqcache.store.drivers.base import Source
from pqcache.store.drivers.registry import open_source
from pqcache.store.drivers.retries import with_retries
from pqcache.store.drivers.time_limits import Stalled, with_time_limit
from pqcache.store.tables.iceberg.errors import iceberg_errors
from pqcache.store.tables.iceberg.file_io import ACCESS, CLASS, TableAccess, plain_url
from pqcache.store.tables.iceberg.table import IcebergTable, LoadedTable
from pqcache.store.tables.store_files import StoreFiles
from pqcache.store.tables.table import digest
from pqcache.store.tables.table_log import OpenOptions
from pqcache.store.tables.table_source import TableSource, table_source
from pqcache.store.urls import redact, url_scheme

T = TypeVar("T")
_S3 = {  # options of s3:// and the properties of pyiceberg that they are, the first of them that is set
    "endpoint": ("s3.endpoint",),
    "region": ("s3.region", "client.region"),
    "key": ("s3.access-key-id", "client.access-key-id"),
    "secret": ("s3.secret-access-key", "client.secret-access-key"),
    "token": ("s3.session-token", "client.session-token"),
    "profile": ("s3.profile-name", "client.profile-name"),
    "anon": ("s3.anonymous",),
}


def open_catalog_table(url: str, options: OpenOptions) -> TableSource:
    """Return the table at ``iceberg://CATALOG/NAMESPACE.TABLE``.

    Its metadata and files are read by pqcache's drivers, with the credentials that the catalog gives and the store
    options of ``options``, which win. A catalog that is silent for the timeout counts as unavailable.

    Raises:
        UsageError: another form of URL, no such catalog, or a package that its kind needs is missing.
        SourceError: no such table, access denied, or no answer.
    """
    name, table_name = _parts(url)
    with iceberg_errors(url):
        known = Config().get_catalog_config(name)
        catalogs = Config().get_known_catalogs()
    if known is None:
        raise UsageError(
            url,
            f"there is no catalog {name!r} in pyiceberg's configuration (there are: {', '.join(catalogs) or 'none'})",
            f"name its uri in ~/.pyiceberg.yaml, or in PYICEBERG_CATALOG__{name.upper()}__URI",
        )
    access = TableAccess(files=StoreFiles(None, _opener(known, options)), options=options)
    given: dict[str, Any] = {"init_catalog_tables": "false", **known, "py-io-impl": CLASS, ACCESS: access}
    catalog = _answer(url, options, lambda: load_catalog(name, **given))
    try:
        table = _answer(url, options, lambda: catalog.load_table(table_name))
        place = _with_authority(plain_url(table.metadata.location), table.io.properties)
        opener = _opener(table.io.properties, options)
        files = StoreFiles(opener(place), opener)
    except BaseException:
        _close(catalog, access.files)
        raise
    access = TableAccess(files=files, options=options)
    first = [table]

    def load() -> LoadedTable:
        table = first.pop() if first else _answer(url, options, lambda: catalog.load_table(table_name))
        return LoadedTable(metadata=table.metadata, access=access, log=_state(table))

    iceberg = IcebergTable(url, load, options.rule, partial(_close, catalog, given[ACCESS].files))
    return table_source(place, iceberg, files, options.rule, _state(first[0]))


def _state(table: Table) -> str:
    """Return what is another text once the catalog has other metadata of a table."""
    metadata = table.metadata
    table_id = metadata.table_uuid if "table_uuid" in metadata.model_fields_set else ""
    return digest(table.metadata_location, table_id, metadata.last_updated_ms, metadata.current_snapshot_id)


def _parts(url: str) -> tuple[str, str]:
    """Return the names of the catalog and of the table in it."""
    name, _, table = url.partition("://")[2].strip("/").partition("/")
    if "@" in url or ":" in name:
        reason = "has more than the name of a catalog"
        raise UsageError(redact(url), reason, "its uri and its secrets belong into ~/.pyiceberg.yaml")
    if not name or "/" in table or not all(table.partition(".")):
        raise UsageError(url, "names no table of a catalog", "write iceberg://CATALOG/NAMESPACE.TABLE")
    return name, table


def _answer(url: str, options: OpenOptions, call: Callable[[], T]) -> T:
    """Return what ``call`` does with a catalog, whose client has no timeout of its own."""

    def answers() -> Iterator[T]:
        yield call()

    def answer() -> T:
        with iceberg_errors(url):
            try:
                return next(with_time_limit(answers, options.timeout))
            except Stalled:
                reason = f"its catalog has not answered for {options.timeout:.0f} s"
                raise SourceUnavailable(url, reason, "check the catalog's uri, or raise --timeout") from None

    return with_retries(answer, url, options.patience, options.on_event)


def _opener(properties: Mapping[str, Any], options: OpenOptions) -> Callable[[str], Source]:
    """Return what opens the stores of a table's files, with the credentials of its catalog."""
    s3 = {name: _first(properties, keys) for name, keys in _S3.items()}
    if (virtual := _first(properties, ("s3.force-virtual-addressing",))) is not None:
        s3["addressing"] = "virtual" if virtual.lower() == "true" else "path"
    of_s3 = {name: value for name, value in s3.items() if value is not None}

    def opened(place: str) -> Source:
        store = {**(of_s3 if url_scheme(place) == "s3" else {}), **options.store}
        return open_source(_with_authority(place, properties), store, options.timeout, options.hdfs_driver)

    return opened


def _first(properties: Mapping[str, Any], keys: tuple[str, ...]) -> str | None:
    return next((str(properties[key]) for key in keys if properties.get(key)), None)


def _with_authority(url: str, properties: Mapping[str, Any]) -> str:
    """Return an ``hdfs://`` URL with the host and the user of ``properties`` where it has none."""
    if url_scheme(url) != "hdfs":
        return url
    authority, slash, path = url.partition("://")[2].partition("/")
    if not authority and (host := properties.get("hdfs.host")):
        authority = f"{host}:{properties['hdfs.port']}" if properties.get("hdfs.port") else str(host)
    if "@" not in authority and (user := properties.get("hdfs.user")):
        authority = f"{user}@{authority}"
    return f"hdfs://{authority}{slash}{path}"


def _close(catalog: Catalog, files: StoreFiles) -> None:
    catalog.close()
    files.close()
