"""Opens Iceberg tables: by their directory, by one of their metadata files, or from a catalog.

A catalog's table is ``iceberg://CATALOG/NAMESPACE.TABLE``, by pyiceberg's own configuration.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

from pyiceberg.catalog import load_catalog
from pyiceberg.exceptions import ValidationError
from pyiceberg.table import Table as LoadedTable
from pyiceberg.table.metadata import TableMetadata, TableMetadataUtil
from pyiceberg.utils.config import Config

from pqcache.errors import CHECK_TABLE, SourceError, SourceNotFound, SourceUnavailable, UsageError
from pqcache.store.drivers.base import Source
from pqcache.store.drivers.registry import open_source
from pqcache.store.drivers.timeouts import Stalled, within
from pqcache.store.manifest import SourceFile
from pqcache.store.tables.base import (
    MOVED,
    OpenOptions,
    StoreFiles,
    Table,
    TableListing,
    TableLog,
    digest,
    usual_url,
)
from pqcache.store.tables.data_files import METADATA_SUFFIXES
from pqcache.store.tables.iceberg import (
    ACCESS,
    CLASS,
    TableAccess,
    iceberg_errors,
    listing_of,
    plain_url,
)
from pqcache.store.urls import is_secret, redact, url_scheme
from pqcache.units import printable

_METADATA = "metadata"  # the directory of metadata files in that of a table
HINT = "version-hint.text"
# Hadoop's, a catalog's, and others
_NAME = re.compile(r"(?:v(?P<version>\d+)|(?P<number>\d+)-.+?|.+?)(\.gz)?\.metadata\.json(\.gz)?")
_UNNUMBERED = -1
_NEWEST_FORMAT = 3
_GZIP = b"\x1f\x8b"
T = TypeVar("T")
_S3 = {  # options of s3://, and the properties of pyiceberg that set them; the first one counts
    "endpoint": ("s3.endpoint",),
    "region": ("s3.region", "client.region"),
    "key": ("s3.access-key-id", "client.access-key-id"),
    "secret": ("s3.secret-access-key", "client.secret-access-key"),
    "token": ("s3.session-token", "client.session-token"),
    "profile": ("s3.profile-name", "client.profile-name"),
    "anon": ("s3.anonymous",),
}


def read_directory(log: TableLog, entries: Sequence[SourceFile]) -> TableListing:
    """List a table by the newest metadata file among the ``entries`` of its directory."""
    files, url = {file.path: file for file in entries}, f"{log.url}/{_METADATA}"
    hint = log.read(files[HINT]).decode(errors="replace") if HINT in files else None
    uri = f"{url}/{newest_metadata([*files], hint, url)}"
    return _listing_at(uri, log.url, log.files, log.options, log.url)


class MetadataFile(Table):
    """A table as of one of its metadata files, even if there are newer ones."""

    def __init__(self, url: str, options: OpenOptions) -> None:
        self._place = usual_url(url) if url_scheme(url) else os.path.abspath(os.path.expanduser(url))
        files = StoreFiles(None, partial(options.open_files, of=self._place), options)
        super().__init__(redact(self._place), files, options)

    def read_table(self) -> TableListing:
        root, _, last = self._place.rpartition("/")[0].rpartition("/")
        return _listing_at(self._place, root if last == _METADATA else None, self._files, self._options, self.url)


def _listing_at(uri: str, root: str | None, files: StoreFiles, options: OpenOptions, url: str) -> TableListing:
    """List the files of a table by a metadata file; ``root`` is the table's directory, if known."""
    access = TableAccess(files=files)
    metadata = read_metadata(access, uri)
    if root is not None:
        access = replace(access, prefixes=_prefixes(metadata.location, root, options))
    return listing_of(metadata, access, options.rule, url)


def _prefixes(location: str, root: str, options: OpenOptions) -> Mapping[str, str]:
    """Map the table's ``location`` in its metadata to its real directory, if the table has moved."""
    named = plain_url(location).rstrip("/")
    if named == root:
        return {}
    moved = options.store.get(MOVED)
    if moved == "true" or (moved is None and _place(named) == _place(root)):
        return {named: root}
    if moved == "false":
        return {}
    raise UsageError(
        redact(root),
        f"is not at the location in its metadata: {redact(named)}",
        f"name that, or give -o {MOVED}=true to read all its files here, or -o {MOVED}=false to read them there",
    )


def _place(url: str) -> str:
    """A URL without its user, or a path without symbolic links: equal for different names of a directory."""
    if not url_scheme(url):
        return os.path.realpath(url)
    scheme, _, rest = url.partition("://")
    authority, slash, path = rest.partition("/")
    return f"{scheme}://{authority.rpartition('@')[2]}{slash}{path}"


class _Found(NamedTuple):
    number: int
    name: str
    of_hadoop: bool


def newest_metadata(names: Sequence[str], hint: str | None, url: str) -> str:
    """Find a table's newest metadata file among the ``names`` in its directory ``url``.

    ``hint`` is the content of ``version-hint.text``, if any: a number, which may be outdated, or a name. Raises
    SourceError if there is none, and UsageError if two may be the newest.
    """
    found = sorted(
        _Found(int(match["version"] or match["number"] or _UNNUMBERED), name, match["version"] is not None)
        for name in names
        if (match := _NAME.fullmatch(name))
    )
    if not found:
        raise SourceNotFound(url, "has no metadata file any more", CHECK_TABLE)
    if hint is None:
        newest = [file for file in found if file.number in (found[-1].number, _UNNUMBERED)]
    else:
        newest = _hinted(found, hint.strip(), url)
        newest += [file for file in found if file.number > newest[0].number]
    if len(newest) > 1:
        among = " and ".join(printable(file.name) for file in newest[:2])
        reason = f"both {among} may be its newest metadata file, and only a catalog knows"
        raise UsageError(url, reason, f"name one: {url}/{printable(newest[-1].name)}")
    return newest[0].name


def _hinted(found: Sequence[_Found], hint: str, url: str) -> list[_Found]:
    """Find the metadata file named by a hint; Hadoop's writers update the hint last, so later versions win."""
    if hint.isdecimal():
        number, versions = int(hint), {file.number for file in found if file.of_hadoop}
        while number + 1 in versions:
            number += 1
        named = [file for file in found if file.of_hadoop and file.number == number]
    else:
        named = [file for file in found if file.name in (hint, *(hint + suffix for suffix in METADATA_SUFFIXES))]
    if not named:
        reason = f"{HINT} names {printable(hint)[:80]!r}, which is not there"
        raise SourceError(url, reason, f"name a metadata file: {url}/{printable(found[-1].name)}")
    return named


def read_metadata(access: TableAccess, uri: str) -> TableMetadata:
    """Parse a metadata file; raises UsageError if its format is too new for pyiceberg."""
    data = access.read_all(uri)
    try:
        text = (gzip.decompress(data) if data.startswith(_GZIP) else data).decode()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise SourceError(printable(uri), f"is not metadata of an Iceberg table ({error})", "name another") from error
    with iceberg_errors(printable(uri)):
        try:
            return TableMetadataUtil.parse_raw(text)
        except ValidationError:
            _check_format(text, uri)
            raise


def _check_format(text: str, uri: str) -> None:
    said = json.loads(text)
    version = said.get("format-version") if isinstance(said, dict) else None
    if isinstance(version, int) and version > _NEWEST_FORMAT:
        raise UsageError(
            printable(uri),
            f"is of version {version} of Iceberg's format, and this pyiceberg reads up to {_NEWEST_FORMAT}",
            "upgrade pyiceberg, or write the table again in a version that it reads",
        )


class CatalogTable(Table):
    """The table at ``iceberg://CATALOG/NAMESPACE.TABLE``.

    Its metadata and files are read by pqcache's drivers, with the catalog's credentials and the store options of
    ``options``, which take precedence. A catalog that is silent for the timeout counts as unavailable.

    Raises:
        UsageError: another form of URL, no such catalog, or a package that its kind needs is missing.
        SourceError: no such table, access denied, or no answer.
    """

    def __init__(self, url: str, options: OpenOptions) -> None:
        name, table_name = _parts(url)
        with iceberg_errors(url):
            known = Config().get_catalog_config(name)
            catalogs = ", ".join(Config().get_known_catalogs()) or "none"
        if known is None:
            raise UsageError(
                url,
                f"there is no catalog {name!r} in pyiceberg's configuration (there are: {catalogs})",
                f"name its uri in ~/.pyiceberg.yaml, or in PYICEBERG_CATALOG__{name.upper()}__URI",
            )
        self._metadata_files = StoreFiles(None, _opener(known, options), options)
        access = TableAccess(files=self._metadata_files)
        given: dict[str, Any] = {"init_catalog_tables": "false", **known, "py-io-impl": CLASS, ACCESS: access}
        catalog = self._catalog = _answer(url, options, known, lambda: load_catalog(name, **given))
        self._load = partial(_answer, url, options, known, lambda: catalog.load_table(table_name))
        try:
            loaded = self._load()
            place = _with_authority(plain_url(loaded.metadata.location), loaded.io.properties)
            opener = _opener(loaded.io.properties, options)
            files = StoreFiles(opener(place), opener, options)
        except BaseException:
            self._close_catalog()
            raise
        self._unread: LoadedTable | None = loaded
        super().__init__(url, files, options, _state(loaded))

    def read_table(self) -> TableListing:
        loaded, self._unread = self._unread or self._load(), None
        self._state = _state(loaded)
        return listing_of(loaded.metadata, TableAccess(files=self._files), self._options.rule, self.url)

    def close(self) -> None:
        self._close_catalog()
        super().close()

    def _close_catalog(self) -> None:
        self._catalog.close()
        self._metadata_files.close()


def _state(table: LoadedTable) -> str:
    """A text that changes with the metadata in the catalog."""
    metadata = table.metadata
    table_id = metadata.table_uuid if "table_uuid" in metadata.model_fields_set else ""
    return digest(table.metadata_location, table_id, metadata.last_updated_ms, metadata.current_snapshot_id)


def _parts(url: str) -> tuple[str, str]:
    name, _, table = url.partition("://")[2].strip("/").partition("/")
    if "@" in url or ":" in name:
        reason = "has more than a catalog and a table"
        raise UsageError(redact(url), reason, "its uri and its secrets belong in ~/.pyiceberg.yaml")
    if not name or "/" in table or not all(table.partition(".")):
        raise UsageError(url, "names no table of a catalog", "write iceberg://CATALOG/NAMESPACE.TABLE")
    return name, table


def _answer(url: str, options: OpenOptions, properties: Mapping[str, Any], call: Callable[[], T]) -> T:
    """Call a catalog with these ``properties``; its client has no timeout of its own."""
    secrets = [
        str(value) for name, value in properties.items() if is_secret(name) or name.lower().startswith("header.")
    ]

    def answer() -> T:
        with iceberg_errors(url, secrets):
            try:
                return within(options.timeout, call)
            except Stalled:
                reason = f"its catalog has not answered for {options.timeout:.0f} s"
                raise SourceUnavailable(url, reason, "check the catalog's uri, or raise --timeout") from None

    return options.tried(answer, url)


def _opener(properties: Mapping[str, Any], options: OpenOptions) -> Callable[[str], Source]:
    """Make a function that opens the stores of a table's files with the credentials of its catalog."""
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
    """Complete an ``hdfs://`` URL with the host and the user in ``properties``."""
    if url_scheme(url) != "hdfs":
        return url
    authority, slash, path = url.partition("://")[2].partition("/")
    if not authority and (host := properties.get("hdfs.host")):
        authority = f"{host}:{properties['hdfs.port']}" if properties.get("hdfs.port") else str(host)
    if "@" not in authority and (user := properties.get("hdfs.user")):
        authority = f"{user}@{authority}"
    return f"hdfs://{authority}{slash}{path}"
