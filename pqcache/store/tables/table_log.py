"""The directory with a table's log, and how a source is opened: what opens a table is given."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from pqcache.events import OnEvent, ignore
from pqcache.store.drivers.base import HDFS_NATIVE, TIMEOUT, Source
from pqcache.store.drivers.registry import open_source
from pqcache.store.drivers.retries import FEW_TRIES, Patience
from pqcache.store.manifest import SourceFile
from pqcache.store.manifest_digest import digest_of_sources
from pqcache.store.tables.store_files import StoreFiles
from pqcache.store.tables.table import VersionRule
from pqcache.store.urls import url_scheme

MOVED = "moved"  # a store option that is the table's: whether it lies elsewhere than its metadata say


@dataclass(frozen=True, kw_only=True)
class OpenOptions:
    """How a source is opened.

    Attributes:
        store: the options of its store (``-o key=value``).
        timeout: seconds after which a silent server counts as unavailable.
        hdfs_driver: the driver of ``hdfs://``.
        as_files: take a table's directory as files.
        rule: the version of a table that is wanted.
        patience: when to stop retrying what fails for a passing reason.
        on_event: called with what happens.
        keys: of partitions, as they are spelled; others that differ only in case are these. None: they differ.
    """

    store: Mapping[str, str] = field(default_factory=dict)
    timeout: float = TIMEOUT
    hdfs_driver: str = HDFS_NATIVE
    as_files: bool = False
    rule: VersionRule = field(default_factory=VersionRule)
    patience: Patience = FEW_TRIES
    on_event: OnEvent = ignore
    keys: Collection[str] | None = None

    def open_files(self, url: str, of: str) -> Source:
        """Return the source of the files at ``url``, with the options of the store of ``of`` if it is of its kind."""
        same = url_scheme(url) == url_scheme(of)
        store = {name: value for name, value in self.store.items() if same and name != MOVED}
        return open_source(url, store, self.timeout, self.hdfs_driver)


@dataclass(frozen=True, kw_only=True)
class TableLog:
    """The directory with the log or the metadata of a table.

    Attributes:
        url: the table's directory.
        source: the opened directory with the log.
        entries: its files, as they are listed now.
        files: reads files of the table's, and others by their URLs.
        options: how the table is opened.
    """

    url: str
    source: Source
    entries: list[SourceFile]
    files: StoreFiles
    options: OpenOptions


def log_state(entries: Iterable[SourceFile]) -> str | None:
    """Return a text that is equal for equal logs, of which ``entries`` are all files.

    None where the store says nothing of a file but its size: another log may have files of these names and sizes.
    """
    entries = list(entries)
    known = all(file.identity.tag or file.identity.mtime_ns for file in entries)
    return digest_of_sources(entries) if known else None
