"""The state shared by the steps of building a snapshot, and the run's directory in ``tmp/``.

    tmp/<boot>-<pid>-<random>/
      fetch/KEY        a complete, checked and durable download      KEY.part: the beginning of one
      rewrite/KEY/     a directory's rewritten files, durable     KEY.new/: unfinished
      snapshot/        the snapshot being put together

KEY is made from a file's source, path and identity, so a later run can use the downloads of a dead one.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa

from pqcache.errors import DamagedError
from pqcache.parquet.rewrite.recipe import RewriteOptions
from pqcache.parquet.schema import TimeUnits
from pqcache.store.cache_directory import CacheDirectory
from pqcache.store.drivers.base import Source
from pqcache.store.manifest import DIRECTORY, FileEntry, SnapshotMetadata, SourceFile, TableVersion
from pqcache.store.manifest_file import schema_of_table
from pqcache.store.ownership import is_own, make_directories
from pqcache.store.partition_paths import parent, partition_values
from pqcache.store.row_group_index import NO_SCHEMA
from pqcache.store.snapshot import Snapshot
from pqcache.store.sync.bad_partitions import (
    Blame,
    advise_to_skip,
    blame,
    blame_nobody,
    clashes_by_partition,
    place_of,
)
from pqcache.store.sync.cache_run import ByteCounter, CacheRun
from pqcache.store.sync.download.subset import Subset
from pqcache.store.sync.plan import BuiltFile, DirectoryPlan, Plan
from pqcache.store.sync.table_schema import TableSchema
from pqcache.system.disk import discard
from pqcache.system.processes import boot_id

if TYPE_CHECKING:
    import pyarrow.parquet as pq


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The source of downloads, and the subset taken from each file.

    ``confirm`` is called with the entries of the new snapshot once all are downloaded and rewritten; if it raises, the
    snapshot isn't published. With ``skip_bad``, files that cannot be taken raise BadPartitions. ``before`` is the
    cached version of the table.
    """

    source: Source
    subset: Subset
    confirm: Callable[[Sequence[FileEntry]], None]
    skip_bad: bool = False
    before: TableVersion | None = None


@dataclass(frozen=True, kw_only=True)
class SnapshotJob:
    """A snapshot to build.

    Attributes:
        run: the run that builds it.
        workdir: the run's directory in ``tmp/``.
        plan: the files to keep, download and rewrite.
        metadata: for the manifest, beside the files.
        previous: the basis of ``plan``.
        held: its files.
        origin: the source of downloads; None without any.
        table: the schema to rewrite files with; None if each directory has its own.
        reindex: take nothing from the index of ``previous``.
    """

    run: CacheRun
    workdir: Path
    plan: Plan
    metadata: SnapshotMetadata
    previous: Snapshot | None = None
    held: Sequence[FileEntry] = ()
    origin: Origin | None = None
    table: TableSchema | None = None
    reindex: bool = False

    @cached_property
    def rewrite(self) -> RewriteOptions | None:
        return self.run.config.rewrite()

    @cached_property
    def table_schema(self) -> pa.Schema:
        """The selected columns of the source's table; none for a directory."""
        table, columns = self.metadata.table, self.run.config.columns
        found = schema_of_table(table)
        if table is None or found is None:
            return NO_SCHEMA
        if columns is None and table.format != DIRECTORY:
            return found
        names = {*(columns or ()), *(n for plan in self.plan.directories for n in partition_values(plan.directory))}
        return pa.schema([field for field in found if field.name in names])

    @cached_property
    def units(self) -> TimeUnits:
        """The time units to keep: the previous ones, except for rewritten INT96 columns, which had none."""
        chosen = self.run.config.time_units
        before = None if self.table is not None and self.table.int96 is not None else self.schema_before()
        return TimeUnits(before=before or NO_SCHEMA, chosen=chosen)

    @property
    def on_event(self) -> ByteCounter:
        return self.run.options.on_event

    @property
    def blame(self) -> Blame:
        """A context for errors about files: turns them into errors about their place, or advises to skip the place."""
        if self.origin is None:
            return blame_nobody
        return blame if self.origin.skip_bad else advise_to_skip

    def clashes_by_partition(self, root: str = "") -> AbstractContextManager[None]:
        """A context that adds the new partition to a type clash."""
        if self.origin is None:
            return nullcontext()
        return clashes_by_partition(self._new_places, self.schema_before, root, skip=self.origin.skip_bad)

    def _new_places(self) -> dict[str, str]:
        """Places of new files by directory, or in the root by path unless they are joined."""
        found = {plan.directory: plan.directory for plan in self.plan.directories if plan.downloads}
        if "" in found:
            new = [file for file in self.plan.downloads if not parent(file.path)]
            found |= {path: place_of(f.path) for f in new for path in (f.path, self.plan.path_of(f))}
            if not self.plan.recipe.rewrite:
                del found[""]
        return found

    def schema_before(self) -> pa.Schema | None:
        """Schema of the previous snapshot's files; None without one, or if its index is damaged."""
        try:
            return None if self.previous is None else self.previous.index().data_schema
        except DamagedError:
            return None

    def file_key(self, file: SourceFile) -> str:
        """The name of a download, for later runs."""
        return file_key(self.metadata.source, file, self.plan.recipe.subset)

    def download_path(self, file: SourceFile) -> Path:
        return self.workdir / "fetch" / self.file_key(file)

    def rewrite_key(self, directory: str, files: Sequence[SourceFile]) -> str:
        """The name of a rewritten directory, for later runs."""
        common = "" if self.table is None else f" {self.table.digest}"
        return rewrite_key(self.metadata.source, directory, files, self.plan.recipe.text + common)

    def rewrite_path(self, directory: str, files: Sequence[SourceFile]) -> Path:
        return self.workdir / "rewrite" / self.rewrite_key(directory, files)


class RewrittenFile(NamedTuple):
    """A rewritten file, with its footer and Arrow schema, which are large and dropped once indexed."""

    built: BuiltFile
    metadata: pq.FileMetaData
    schema: pa.Schema


def sources_of(plan: DirectoryPlan) -> list[SourceFile]:
    """The source files of a directory, in row order."""
    files: list[SourceFile] = []
    for item in plan.rewrite:
        if item.entry is not None:
            files.extend(item.entry.sources)
        elif item.file is not None:
            files.append(item.file)
    return files


def keys_of(job: SnapshotJob) -> tuple[Collection[str], Collection[str]]:
    """Keys of reusable downloads and rewritten directories of dead runs."""
    downloads = {job.file_key(file) for file in job.plan.downloads}
    return downloads, {job.rewrite_key(plan.directory, sources_of(plan)) for plan in job.plan.directories}


def file_key(source: str, file: SourceFile, subset: str = "") -> str:
    """A name for a download of one version of one source file."""
    return _digest(source, file.path, file.identity.size, file.identity.mtime_ns, file.identity.tag, subset)


def rewrite_key(source: str, directory: str, files: Sequence[SourceFile], recipe: str) -> str:
    """A name for a directory rewritten by ``recipe`` from its source files, which are in row order."""
    return _digest(source, directory, recipe, *(file_key(source, file) for file in files))


def make_workdir(cache: CacheDirectory) -> Path:
    """Create this run's directory below ``tmp/``, with ``fetch/`` and ``rewrite/`` in it."""
    run = cache.tmp_dir / f"{_boot_id()}-{os.getpid()}-{os.urandom(4).hex()}"
    for name in ("fetch", "rewrite"):
        make_directories(run / name)
    return run


def take_over_or_remove(
    cache: CacheDirectory, run: Path, downloads: Collection[str], rewrites: Collection[str]
) -> None:
    """Move leftovers of dead runs that this run needs into ``run``, and remove the rest of ``tmp/``.

    Files that others own or can write to are not taken over. A partial download is used only if the machine has not
    restarted since, as bytes that were not durable may then be zeros.
    """
    for other in sorted(cache.tmp_dir.iterdir()):
        if other == run:
            continue
        if other.is_symlink() or not other.is_dir():
            other.unlink()
            continue
        same_boot = other.name.startswith(_boot_id() + "-")
        for kind, wanted in (("fetch", downloads), ("rewrite", rewrites)):
            if not _is_own_directory(other / kind):
                continue
            for left in (other / kind).iterdir():
                key, dot, _ = left.name.partition(".")
                if key in wanted and (not dot or (kind == "fetch" and same_boot)):
                    _move(left, run / kind / left.name)
        discard(other)


def _is_own_directory(path: Path) -> bool:
    try:
        status = path.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISDIR(status.st_mode) and is_own(status)


def _move(left: Path, target: Path) -> None:
    with suppress(FileNotFoundError):  # a thread of this process, which was stopped and is still at work, removes it
        if not target.exists() and not left.is_symlink() and _is_all_own(left):
            left.rename(target)


def _is_all_own(left: Path) -> bool:
    """Whether a file, or a directory and all its files, belongs to this user and nobody else can write to it."""
    entries = list(left.iterdir()) if left.is_dir() else []
    return all(is_own(path.lstat()) for path in (left, *entries))


def _digest(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def _boot_id() -> str:
    return boot_id()[:8] or "unknown"
