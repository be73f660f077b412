"""Sources and targets on this machine: a directory, a file, a snapshot of another cache or a part of one.

A snapshot (``CACHE/current``, ``CACHE/snapshots/ID/dt=1``) is resolved once, when the source is opened, and leased
until it is closed, even if the cache publishes or removes others meanwhile. Its manifest is the listing, and identities
come from the manifest: links and copies of one file in several snapshots have one identity.
"""

from __future__ import annotations

import errno
import json
import os
import stat as stat_module
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from hashlib import blake2b
from heapq import heappop, heappush
from itertools import accumulate
from pathlib import Path

from pqcache.errors import (
    CacheLocked,
    SourceDenied,
    SourceError,
    SourceNotFound,
    SourceUnavailable,
    UsageError,
    disk_errors,
    open_error,
)
from pqcache.store.cache_directory import CacheDirectory, lease_at
from pqcache.store.drivers.base import (
    HIDDEN,
    STAGING,
    Capabilities,
    DirectoryLimit,
    Source,
    StagedFile,
    check_options,
)
from pqcache.store.layout import ARRIVED, CONFIG
from pqcache.store.manifest import DIRECTORY, FileEntry, Identity, Manifest, SourceFile, TableVersion, local_tag
from pqcache.store.ownership import is_trusted
from pqcache.store.partition_paths import is_hidden, is_hidden_directory, parent, partition_values
from pqcache.store.snapshot import Lease, Snapshot
from pqcache.store.urls import absolute_path
from pqcache.system.disk import (
    fsync_path,
    fsync_tree,
    has_stable_inodes,
    make_directory,
    open_directory,
    open_plain,
    open_regular,
    real_path,
    remove_tree,
    write_durably,
)
from pqcache.system.locks import try_lock, user_name

LOCK = f"{HIDDEN}/lock"  # of a target, which a run holds while it writes
_CHUNK = 4 << 20
_EVERYONE = stat_module.S_IROTH | stat_module.S_IRGRP


class LocalSource(Source):
    """A Source over ``os``; see ``pqcache.store.drivers.base.Source``.

    Links are followed, but each directory is listed under one name only: links to a directory of the source are left
    out, and if several lead to a directory elsewhere, the first path is listed. Files are listed under all their names,
    and `second_names` tells which are the same.
    """

    is_local = True

    def __init__(self, path: str, options: Mapping[str, str]) -> None:
        check_options("a local path", options, {})
        self._root = os.path.abspath(os.path.expanduser(path))
        self._only = ""
        self._links = _Links("")
        self._stable: dict[int, bool] = {}  # by device: whether inodes and ctimes identify files
        self._private: dict[
            str, tuple[int, int]
        ] = {}  # modes and groups of files and directories that not everyone may read
        if os.path.isfile(self._root):
            self._root, self._only = os.path.split(self._root)
        self.url = os.path.join(self._root, self._only) if self._only else self._root
        if not self._only and os.path.isfile(os.path.join(self._root, CONFIG)):  # all its snapshots would be read
            cache = CacheDirectory(Path(self.url))
            inside = None if cache.exists() else cache.caches_inside()
            itself = ("is a cache", f"to read its current snapshot, name {self.url}/current")
            raise UsageError(self.url, *(inside or itself))

    def list(self) -> Iterator[SourceFile]:
        self._private = {}
        self._links = _Links(os.path.realpath(self._root))
        if self.odd is not None:
            self.odd.clear()
        if self._only:
            if os.path.islink(self.url):
                self._check_links(self._only, os.path.realpath(self.url))
            yield SourceFile(self._only, self.stat(self._only))
            return
        pending, limit = [""], DirectoryLimit(self.url)
        links: list[str] = []  # to directories: followed when all that is there without them is known
        followed: dict[str, str] = {}  # where each directory below a link really is
        while pending or links:
            if pending:
                directory = pending.pop()
            else:
                directory = heappop(links)
                followed[directory] = os.path.realpath(self._name(directory))
            real = followed.pop(directory, "")
            if real and not self._links.enter(directory, real):
                continue
            try:
                self._note_directory(directory, os.stat(self._name(directory)))
                prefix = f"{directory}/" if directory else ""
                with open_directory(os.path.join(self._root, directory)) as entries:
                    for entry in entries:
                        path = prefix + entry.name
                        if entry.is_symlink() and self._is_odd_link(path, entry):
                            continue
                        if entry.is_dir():
                            limit.enter(path)
                            if entry.is_symlink():
                                heappush(links, path)
                                continue
                            pending.append(path)
                            if real:
                                followed[path] = f"{real.rstrip('/')}/{entry.name}"
                        elif (identity := self._listed(path, entry)) is not None:
                            if path.endswith(ARRIVED) and f"/{path}".endswith(f"/{ARRIVED}"):
                                raise self._arriving(directory)
                            yield SourceFile(path, identity)
            except OSError as error:
                self._note_odd(f"{directory}/", self._error(directory, error), error)

    def second_names(self, paths: Sequence[str]) -> dict[str, str]:
        return self._links.second_names(paths)

    def _is_odd_link(self, path: str, entry: os.DirEntry[str]) -> bool:
        """Whether a link cannot or must not be followed; it is recorded unless hidden."""
        try:
            if not is_hidden(entry.name):
                self._check_links(path, os.path.realpath(self._name(path)))
            entry.is_dir()
        except (SourceDenied, OSError) as error:
            if not is_hidden(entry.name):
                self._note_odd(path, error if isinstance(error, SourceDenied) else self._error(path, error))
            return True
        return False

    def _note_odd(self, path: str, error: SourceError, cause: OSError | None = None) -> None:
        """Record an entry that cannot be listed; raise the error if it is about the root, or may be transient."""
        if self.odd is None or path == "/" or isinstance(error, SourceNotFound | SourceUnavailable):
            raise error from cause
        self.odd[path] = error

    def _arriving(self, directory: str) -> SourceError:
        place = os.path.dirname(self._name(directory))
        return SourceError(place, "its files are still arriving", "name the cache that it is in, or wait for the run")

    def stat(self, path: str) -> Identity:
        try:
            return self._identity(path, os.stat(self._name(path)))
        except OSError as error:
            raise self._error(path, error) from error

    def read(self, path: str, offset: int, length: int, tag: str = "") -> Iterator[bytes]:
        try:
            with open(self._name(path), "rb", buffering=0, opener=open_regular) as file:
                if (real := real_path(file.fileno(), self._name(path))) != self._name(path):
                    self._check_links(path, real)
                file.seek(offset)
                while length > 0 and (chunk := file.read(min(_CHUNK, length))):
                    length -= len(chunk)
                    yield chunk
        except OSError as error:
            raise self._error(path, error) from error

    def copy_mode(self, path: str, group: int) -> int:
        try:
            found = [os.stat(self._name(name)) for name in (*self._above(path), path)]
        except OSError as error:
            raise self._error(path, error) from error
        return _readers([(status.st_mode, status.st_gid) for status in found], group)

    def private_modes(self, paths: Sequence[str], group: int) -> dict[str, int]:
        if not self._private:
            return {}
        above: dict[str, list[tuple[int, int]]] = {}
        modes = {}
        for path in paths:
            directory, public = parent(path), (0o777, group)
            if directory not in above:
                above[directory] = [self._private.get(name, public) for name in self._above(path)]
            modes[path] = _readers([*above[directory], self._private.get(path, public)], group)
        return modes

    def note_modes(self, paths: Sequence[str]) -> None:
        self._private = {}
        for name in {name for directory in set(map(parent, paths)) for name in self._above(f"{directory}/")}:
            with suppress(OSError):
                self._note_directory(name, os.stat(self._name(name)))
        root = self._root
        for path in paths:
            try:
                status = os.stat(f"{root}/{path}")
            except OSError:
                continue
            if ~status.st_mode & _EVERYONE:
                self._private[path] = status.st_mode, status.st_gid

    def _above(self, path: str) -> Sequence[str]:
        """Directories above a file, beginning with the source's root."""
        return [] if self._only else ["", *accumulate(path.split("/")[:-1], "{}/{}".format)]

    def _note_directory(self, path: str, status: os.stat_result) -> None:
        if ~status.st_mode & (stat_module.S_IXOTH | stat_module.S_IXGRP):
            self._private[path] = status.st_mode, status.st_gid

    def close(self) -> None:
        pass

    def _check_links(self, path: str, real: str) -> None:
        """Raise SourceDenied if another user's link leads out of the source, where that user may lack access.

        ``path`` resolves to ``real``. A link that is gone raises SourceUnavailable.
        """
        root = os.path.realpath(self._root)
        if real.startswith(f"{root.rstrip('/')}/"):
            return
        links = 0
        for name in accumulate(path.split("/"), "{}/{}".format):
            status = os.lstat(self._name(name))
            links += stat_module.S_ISLNK(status.st_mode)
            if stat_module.S_ISLNK(status.st_mode) and status.st_uid not in (0, os.geteuid()):
                owner = user_name(status.st_uid)
                raise SourceDenied(
                    self._name(name),
                    f"is a link of {owner} to a file outside the source, which {owner} may not be able to read",
                    "make the link yourself, or replace it by the file",
                )
        if not links:
            raise SourceUnavailable(self._name(path), "was replaced while it was read")

    def _listed(self, path: str, entry: os.DirEntry[str]) -> Identity | None:
        """None for a file that is gone or odd, or hidden from readers."""
        try:
            status = entry.stat()
            identity = self._identity(path, status)
            if entry.is_symlink():
                self._links.files[path] = os.path.realpath(self._name(path))
            elif status.st_nlink > 1 and identity.tag:
                self._links.inodes.setdefault((status.st_dev, status.st_ino), []).append(path)
            return identity
        except FileNotFoundError:
            if not is_hidden(entry.name) and os.path.lexists(self._name(path)):  # else an editor's link, or removed
                self._note_odd(path, SourceError(self._name(path), "is a link to nothing", "repair or remove it"))
        except SourceError as error:
            if not is_hidden(entry.name):
                self._note_odd(path, error)
        return None

    def _identity(self, path: str, status: os.stat_result) -> Identity:
        if not stat_module.S_ISREG(status.st_mode):
            raise SourceError(self._name(path), "not a regular file", "move it away")
        stable = self._stable.get(status.st_dev)
        if stable is None:
            stable = self._stable[status.st_dev] = has_stable_inodes(self._name(path))
            if not stable:
                import logging  # a sync with nothing to do rarely needs it

                name = self._name(path)
                logging.getLogger("pqcache.store").debug("%s: compared by size and mtime alone on its disk", name)
        tag = local_tag(status.st_ino, status.st_ctime_ns) if stable else ""
        if ~status.st_mode & _EVERYONE:
            self._private[path] = status.st_mode, status.st_gid
        return Identity(status.st_size, status.st_mtime_ns, tag)

    def _name(self, path: str) -> str:
        return os.path.join(self._root, path)

    def _error(self, path: str, error: OSError) -> SourceError:
        name = self._name(path).rstrip("/")
        if isinstance(error, FileNotFoundError):
            return SourceNotFound(name, "no such file or directory", "check the path")
        if isinstance(error, NotADirectoryError):
            return SourceNotFound(name, "not a directory", "check the path")
        if isinstance(error, PermissionError):
            return SourceDenied(name, "permission denied", "make it readable for this user")
        if error.errno == errno.ELOOP:
            return SourceError(name, "is a link that leads to itself", "repair or remove it")
        if error.errno == errno.ENAMETOOLONG:
            return SourceError(name, "has a path that is too long for this system", "move it up")
        if (known := open_error(error)) is not None:
            return SourceError(name, *known)
        return SourceUnavailable(name, error.strerror or str(error))


class _Links:
    """The links of one listing of a directory, whose real path is ``top``, with their targets."""

    def __init__(self, top: str) -> None:
        self.files: dict[str, str] = {}  # links to files by path, with their targets
        self.inodes: dict[tuple[int, int], list[str]] = {}  # paths of files that have several names
        self._top = top
        self._directories: dict[str, str] = {}  # that were left out, each with its other path
        self._entered: dict[str, str] = {}  # paths of directories below links, by where they are
        self._hidden: set[str] = set()

    def enter(self, path: str, real: str) -> bool:
        """Whether to list the directory: False if it is listed under another name."""
        other, hidden = self._path_of(real), is_hidden_directory(path)
        if other is not None or (hidden and real in self._hidden):
            if other is not None and not hidden:
                self._directories[path] = other
            return False
        if hidden:
            self._hidden.add(real)
        else:
            self._entered[real] = path
        return True

    def second_names(self, paths: Sequence[str]) -> dict[str, str]:
        """The directories left out, and the files among ``paths`` that are further names of others.

        Hard links across partitions don't count, as deduplication tools make such links.
        """
        found = dict(self._directories)
        if not (self.files or self.inodes):
            return found
        taken, first = set(paths), dict[str, str]()
        for path in sorted(self.files.keys() & taken):
            real = self.files[path]
            directory, name = os.path.split(real)
            above = self._path_of(directory)
            other = real if above is None else f"{above}/{name}" if above else name
            other = other if other in taken else first.setdefault(real, path)
            if other != path:
                found[path] = other
        for names in self.inodes.values():
            known: dict[frozenset[tuple[str, str | None]], str] = {}  # by their partitions' values, most keys first
            for path in sorted(taken.intersection(names), key=lambda path: (-path.count("="), path)):
                values = frozenset(partition_values(parent(path)).items())
                same = known.get(values)
                if same is None and known and len(values) < len(next(iter(known))):
                    same = next((other for others, other in known.items() if values < others), None)
                if same is None:
                    known[values] = path
                else:
                    found[path] = same
        return found

    def _path_of(self, real: str) -> str | None:
        """The visible path under which a directory is listed, if there is one yet."""
        if real == self._top:
            return ""
        prefix = f"{self._top.rstrip('/')}/"
        if real.startswith(prefix) and not is_hidden_directory(real.removeprefix(prefix)):
            return real.removeprefix(prefix)
        return self._entered.get(real)


def _readers(found: Sequence[tuple[int, int]], group: int) -> int:
    """Who can read a file, given mode and group of the directories above it and, last, of the file itself."""
    needed = [*[stat_module.S_IXOTH] * (len(found) - 1), stat_module.S_IROTH]
    others = all(mode & bit for (mode, _), bit in zip(found, needed, strict=True))
    of_group = all(
        mode & (bit << 3 if owner == group else bit) for (mode, owner), bit in zip(found, needed, strict=True)
    )
    return 0o400 | 0o040 * of_group | 0o004 * others


class LocalTarget:
    """A Target over ``os``; see ``base.py``.

    Everything is written to ``.NAME.pqcache`` beside the final directory, and renamed to it when it is complete.
    """

    def __init__(self, path: str, options: Mapping[str, str]) -> None:
        check_options("a local path", options, {})
        self._final = Path(os.path.abspath(os.path.expanduser(path)))
        self._root = self._final.with_name(f".{self._final.name}.pqcache")
        self._lock: int | None = None
        self.url = str(self._final)
        self.scratch = self._root / STAGING
        self.unfinished = str(self._root)

    def list(self) -> Iterator[SourceFile]:
        with disk_errors(self._final):
            if os.path.lexists(self._final) and (not self._final.is_dir() or any(self._final.iterdir())):
                raise UsageError(self.url, "exists and is not empty", "name a new directory")
            if self._root.is_dir():
                yield from LocalSource(str(self._root), {}).list()

    def begin(self) -> None:
        with disk_errors(self._root):
            self._root.mkdir(parents=True, exist_ok=True)
            if not is_trusted(self._root.lstat().st_uid):
                raise UsageError(self._root, "belongs to another user", "remove it, or name another directory")
            (self._root / HIDDEN).mkdir(exist_ok=True)
            # a file, as NFS locks nothing else exclusively; two runs without a lock write the same bytes
            self._lock = open_plain(self._root / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
            if try_lock(self._lock, exclusive=True) is False:
                raise CacheLocked(self.url, "another run is writing it", "wait for its end")
            remove_tree(self.scratch)
            self.scratch.mkdir(parents=True)

    def read_start(self, path: str, size: int) -> bytes:
        with disk_errors(self._root):
            try:
                return (self._root / path).read_bytes()
            except FileNotFoundError:
                raise SourceNotFound(self._root / path, "no such file") from None

    def write(self, path: str, data: bytes) -> None:
        with disk_errors(self._root):
            make_directory((self._root / path).parent)
            write_durably(self._root / path, data, self.scratch)

    def remove(self, paths: Sequence[str]) -> None:
        with disk_errors(self._root):
            for path in paths:
                (self._root / path).unlink(missing_ok=True)

    def stage(self, file: Path, token: str, path: str) -> StagedFile:
        return StagedFile(path, file, file.stat().st_size)  # it is on this file system already

    def commit(self, token: str, directory: str, staged: Sequence[StagedFile], exclusive: bool) -> None:
        final = self._root / directory
        try:
            if exclusive:
                make_directory(final.parent)
                os.rename(staged[0].file.parent, final)  # takes the place of an empty directory
            else:
                make_directory(final)
                for item in staged:
                    os.replace(item.file, self._root / item.path)
            fsync_path(final.parent if exclusive else final)
        except OSError:
            if not self._is_published(staged):  # by another process that made the same files
                with disk_errors(self._root):
                    raise

    def discard(self, token: str, staged: Sequence[StagedFile]) -> None:
        pass

    def finish(self) -> None:
        with disk_errors(self._root):
            self.close()  # on NFS a file that is open cannot be removed
            remove_tree(self._root / HIDDEN)
            fsync_tree(self._root)
            os.rename(self._root, self._final)  # takes the place of an empty directory
            fsync_path(self._final.parent)

    def abandon(self) -> None:
        self.close()
        with suppress(OSError):
            remove_tree(self._root)

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _is_published(self, staged: Sequence[StagedFile]) -> bool:
        try:
            return all((self._root / item.path).stat().st_size == item.size for item in staged)
        except OSError:
            return False


class SnapshotSource(LocalSource):
    """A leased snapshot, or a part of it."""

    capabilities = Capabilities(lists_only_data_files=True, lists_one_version=True)

    def __init__(self, url: str, snapshot: Snapshot, below: str, lease: Lease) -> None:
        super().__init__(str(snapshot.path / below), {})
        self.url = absolute_path(url)
        self._snapshot, self._below, self._lease = snapshot, below, lease

    @property
    def table_version(self) -> TableVersion | None:
        return self._table

    def list(self) -> Iterator[SourceFile]:
        self.note_modes([*self._entries])
        for path, entry in self._entries.items():
            yield SourceFile(path, identity_of(entry))

    def stat(self, path: str) -> Identity:
        try:
            return identity_of(self._entries[path])
        except KeyError:
            raise SourceNotFound(f"{self.url}/{path}", "no such file in the snapshot", "check the path") from None

    def close(self) -> None:
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
    """Files below a path in a snapshot, or the single file there, by paths relative to ``url``.

    Raises SourceNotFound about ``url`` if nothing is there, unless the path is empty.
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
    """The known schema of a snapshot's table, for the files below a path in it.

    It includes the types of partition columns, and columns that no file has yet, as far as the snapshot selected them,
    without those whose values are in ``below``. It has no version, as none can be requested.
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
    """A file's identity by its checksum, or by its sources if no checksum is recorded."""
    if entry.checksum:
        return Identity(entry.size, 0, entry.checksum)
    made_of = f"{entry.recipe}\0{entry.sources!r}".encode(errors="surrogatepass")
    return Identity(entry.size, 0, f"made-of:{blake2b(made_of, digest_size=16).hexdigest()}")
