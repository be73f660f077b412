"""A source that is a snapshot of another cache, or a part of one: ``CACHE/current``, ``CACHE/snapshots/ID/dt=1``.

The snapshot is found once, when the source is opened, and leased until it is closed: what the cache publishes or
removes meanwhile does not matter. Its manifest is the listing, and a file's identity is made of what the manifest
records: links and copies of one file in several snapshots have one identity.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from hashlib import blake2b

from pqcache.errors import SourceNotFound
from pqcache.store.cache_directory import lease_at
from pqcache.store.drivers.base import Capabilities, LocalModes, Source, check_options
from pqcache.store.drivers.local import LocalSource
from pqcache.store.hive import parent, partition_values
from pqcache.store.manifest import DIRECTORY, FileEntry, Identity, Manifest, SourceFile, TableVersion
from pqcache.store.snapshot import Lease, Snapshot
from pqcache.store.urls import local_path


class SnapshotSource(Source, LocalModes):
    """A Source over a leased snapshot; see ``pqcache.store.drivers.base.Source``."""

    capabilities = Capabilities(lists_only_data_files=True, lists_one_version=True)

    def __init__(self, url: str, snapshot: Snapshot, below: str, lease: Lease) -> None:
        self.url = os.path.abspath(os.path.expanduser(local_path(url)))
        self._snapshot, self._below, self._lease = snapshot, below, lease
        self._files = LocalSource(str(snapshot.path / below), {})

    @property
    def table_version(self) -> TableVersion | None:
        return self._table

    def list(self) -> Iterator[SourceFile]:
        for path, entry in self._entries.items():
            yield SourceFile(path, identity_of(entry))

    def stat(self, path: str) -> Identity:
        try:
            return identity_of(self._entries[path])
        except KeyError:
            raise SourceNotFound(f"{self.url}/{path}", "no such file in the snapshot", "check the path") from None

    def read(self, path: str, offset: int, length: int, tag: str = "") -> Iterator[bytes]:
        yield from self._files.read(path, offset, length)

    @property
    def local_modes(self) -> LocalModes:
        return self

    def copy_mode(self, path: str, group: int, known: dict[str, os.stat_result] | None = None) -> int:
        return self._files.copy_mode(path, group, known)

    def private_modes(self, paths: Sequence[str], group: int) -> dict[str, int]:
        known: dict[str, os.stat_result] = {}
        modes: dict[str, int] = {}
        for path in paths:
            with suppress(SourceNotFound):  # it is gone, which the next sync notices
                modes[path] = self._files.copy_mode(path, group, known)
        return modes if any(mode != 0o444 for mode in modes.values()) else {}

    def close(self) -> None:
        self._files.close()
        self._lease.close()

    @cached_property
    def _manifest(self) -> Manifest:
        return self._snapshot.checked_manifest()

    @cached_property
    def _entries(self) -> dict[str, FileEntry]:
        return files_below(self._manifest.files, self._below, self.url)

    @cached_property
    def _table(self) -> TableVersion | None:
        return table_below(self._manifest, self._below)


def open_snapshot(url: str, options: Mapping[str, str]) -> SnapshotSource | None:
    """None if the local URL lies in no snapshot."""
    check_options("a local path", options, {})
    leased = lease_at(url)
    return None if leased is None else SnapshotSource(url, *leased)


def files_below(entries: Iterable[FileEntry], below: str, url: str) -> dict[str, FileEntry]:
    """Files below a path in a snapshot, or the one that it names, by paths relative to ``url``.

    Nothing there raises SourceNotFound about ``url``, but for an empty path.
    """
    prefix = f"{below}/" if below else ""
    found, only = {}, {}
    for entry in entries:
        if entry.path.startswith(prefix):
            found[entry.path[len(prefix) :]] = entry
        elif entry.path == below:
            only[entry.path.rpartition("/")[2]] = entry
    if below and not (found or only):
        raise SourceNotFound(url, "no such file or directory in the snapshot", "check the path")
    return found or only


def table_below(manifest: Manifest, below: str) -> TableVersion | None:
    """The known schema of a snapshot's table, for what lies below a path in it.

    It has the types of partition columns, and columns that no file has yet; of all columns only those that the snapshot
    took, without those whose values are in ``below``. A snapshot is no version to ask for, so it names none.
    """
    from pqcache.store.manifest_file import schema_of_table  # and pyarrow, which takes its time to import

    schema = schema_of_table(manifest.table)
    if manifest.table is None or schema is None:
        return None
    fetched = [json.loads(recipe or "{}").get("fetch", {}) for recipe in {entry.recipe for entry in manifest.files}]
    taken = set(schema.names)
    if manifest.table.format == DIRECTORY or all("columns" in subset for subset in fetched):
        directories = {parent(entry.path) for entry in manifest.files}
        taken = {name for subset in fetched for name in subset.get("columns", ())}
        taken.update(name for directory in directories for name in partition_values(directory))
    above = partition_values(below)
    for name in schema.names:
        if name not in taken or name in above:
            schema = schema.remove(schema.get_field_index(name))
    data = bytes(schema.serialize())
    return replace(manifest.table, version="", time="", schema=data, schema_digest="", load_schema=None)


def identity_of(entry: FileEntry) -> Identity:
    """A file's checksum, or its sources if none is recorded."""
    if entry.checksum:
        return Identity(entry.size, 0, entry.checksum)
    made_of = f"{entry.recipe}\0{entry.sources!r}".encode(errors="surrogatepass")
    return Identity(entry.size, 0, f"made-of:{blake2b(made_of, digest_size=16).hexdigest()}")
