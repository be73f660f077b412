"""A job of a repartition: one partition directory, from source files to published files at the target.

A job consists of plain values, so it can be sent to any process on any machine that reaches source and target. Readers
see each partition directory of the target completely or not at all. Until a run is finished, the target has a directory
``_pqcache``, which readers skip, with a record of every published partition. A run that was stopped continues from
there, and never overwrites files that pqcache didn't write.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from shutil import disk_usage

import pyarrow as pa

from pqcache.errors import (
    MALFORMED,
    CacheLocked,
    PqcacheError,
    SourceIncomplete,
    SourceNotFound,
    UsageError,
    disk_errors,
)
from pqcache.events import Advanced, OnEvent, ignore
from pqcache.parquet.rewrite.directory import KnownOfSources, rewrite_directory
from pqcache.parquet.rewrite.recipe import RewriteOptions
from pqcache.store.drivers.base import HIDDEN, Source, StagedFile, Target
from pqcache.store.drivers.registry import KINDS, installed, open_target
from pqcache.store.drivers.timeouts import FEW_TRIES, with_retries
from pqcache.store.manifest import Identity, SourceFile
from pqcache.store.sync.download.download_file import DownloadOptions, download_file
from pqcache.store.tables.base import OpenOptions, Table, VersionRule, store_options
from pqcache.store.tables.data_files import FileRules
from pqcache.store.tables.open_table import open_table
from pqcache.store.urls import absolute_path, check_url, is_local, local_directory, local_path, redact, url_scheme
from pqcache.system.disk import remove_tree, tree_size
from pqcache.system.locks import try_lock
from pqcache.system.threads import in_parallel
from pqcache.units import format_size, printable
from pqcache.versions import __version__

_COMMON_OPTIONS = {"endpoint", "token", "anon"}  # that other stores have as well
_TRANSFERS = 4  # files of one partition downloaded or sent at once
_PREFIX = "pqcache-spool-"
_SPARE = 64 << 20
_FRESH = 60.0  # seconds: a spool so young may not have its lock yet
log = logging.getLogger("pqcache.repartition")
RECORDS = f"{HIDDEN}/records"
RUN = f"{HIDDEN}/run"


@dataclass(frozen=True, kw_only=True, repr=False)
class Endpoints:
    """Source and target by URL or absolute path, with their store options, which may hold secrets.

    On HDFS the target's files get blocks of ``block_size`` bytes, None for the cluster's default. ``rules`` select the
    files of the source, ``rule`` the version of a table.
    """

    source: str
    source_options: Mapping[str, str]
    target: str
    target_options: Mapping[str, str]
    block_size: int | None
    rules: FileRules = field(default_factory=FileRules)
    rule: VersionRule = field(default_factory=VersionRule)

    def open_source(self) -> Source:
        options = OpenOptions(store=self.source_options, as_files=self.rules.as_files, rule=self.rule)
        return open_table(self.source, options)


def make_endpoints(source: str, target: str, options: Mapping[str, str], block_size: int | None) -> Endpoints:
    """Divide ``options`` among source and target; raises UsageError if these don't go together."""
    check_url(source)
    check_url(target)
    if not is_local(target) and target.partition("://")[2].strip("/") == "":
        raise UsageError(target, "names no directory", f"write {url_scheme(target)}://HOST/PATH")
    check_apart(source, target)
    source_options = _options_for(source, target, options)
    target_options = _options_for(target, source, options)
    if options and not source_options and not target_options:
        source_options = options  # a local source refuses them by name
    return Endpoints(
        source=_absolute(source),
        source_options=source_options,
        target=_absolute(target),
        target_options=target_options,
        block_size=block_size,
    )


def check_apart(source: str, target: str) -> None:
    """Raise UsageError if two URLs are equal or one lies below the other."""
    one, other = _place(source), _place(target)
    if one[0] == "az" and len({_account(url) for url in (source, target)} - {""}) > 1:
        return
    if one == other:
        raise UsageError(redact(target), "is the source itself", "name another directory to write to")
    if other[: len(one)] == one:
        raise UsageError(redact(target), f"lies inside the source {redact(source)}", "name a directory apart from it")
    if one[: len(other)] == other:
        raise UsageError(
            redact(target), f"holds the source {redact(source)}", "name a new or empty directory apart from it"
        )


def _options_for(url: str, other: str, options: Mapping[str, str]) -> Mapping[str, str]:
    """Options for the store of ``url``, if another store is used as well.

    Between HDFS and another store, names with a dot belong to Hadoop. Options known to one cloud only belong to it.
    """
    one, two = url_scheme(url), url_scheme(other)
    if one == "hive":  # it has those of the stores of its files too
        return options
    if two == "hive":
        return store_options(options, one)
    if one in ("", "file"):
        return {}
    one, two = KINDS.get(one, one), KINDS.get(two, two)
    if one == two or two in ("", "file"):
        return options
    if "hdfs" in (one, two):
        options = {name: value for name, value in options.items() if ("." in name) == (one == "hdfs")}
    ours, others = _cloud_options(url, one), _cloud_options(other, two)
    if ours:  # options that neither knows are refused by the other store
        return {name: value for name, value in options.items() if name in ours}
    return {name: value for name, value in options.items() if name not in others or name in _COMMON_OPTIONS}


def _cloud_options(url: str, kind: str) -> Mapping[str, str]:
    if kind not in ("gs", "az"):
        return {}
    with installed(url, "obstore", "gcs" if kind == "gs" else "azure"):
        from pqcache.store.drivers.object_store import AZURE_OPTIONS, GCS_OPTIONS
    return GCS_OPTIONS if kind == "gs" else AZURE_OPTIONS


def _absolute(url: str) -> str:
    """Make local paths absolute, as workers may run elsewhere."""
    if not is_local(url):
        return url
    return absolute_path(url)


def _place(url: str) -> tuple[str, ...]:
    """The parts of a URL or path; a place begins with the parts of every place above it."""
    scheme = url_scheme(url)
    if scheme in ("", "file"):
        return ("file", *Path(local_path(url)).expanduser().resolve().parts)
    host, _, path = url.partition("://")[2].partition("/")
    kind = KINDS.get(scheme, scheme)
    host = host.partition("@")[0] if kind == "az" else host.rpartition("@")[2]  # of a container, without the account
    return (kind, host.lower(), *(segment for segment in path.split("/") if segment))


def _account(url: str) -> str:
    """The account in the URL; empty if the options name it instead."""
    return url.partition("://")[2].partition("/")[0].partition("@")[2].partition(".")[0].lower()


@dataclass(frozen=True, kw_only=True)
class PartitionJob:
    """The job for one partition directory.

    Attributes:
        endpoints: the source and the target, with their store options; they may hold secrets.
        directory: the partition directory.
        files: its source files, in row order.
        options: sizes and codecs.
        key: identifies the files' versions and everything else that determines the output.
        is_leaf: whether no other partition lies below, so that one rename publishes it.
        version: the version of pqcache that made the job.
        run: the run that must own the target.
        schema: the table's schema as an Arrow IPC message; empty if the partition is the whole table.
        int96: the unit in which the table's INT96 timestamps are read, or None.
        row_groups: the number of row groups in the source files.
        decoded: an estimate of the rows' bytes in memory.
    """

    endpoints: Endpoints = field(repr=False)  # Dask logs the arguments of what fails
    directory: str
    files: tuple[SourceFile, ...] = field(repr=False)
    options: RewriteOptions
    key: str
    is_leaf: bool
    version: str
    run: str = ""
    schema: bytes = field(default=b"", repr=False)
    int96: str | None = None
    row_groups: int = 0
    decoded: int = 0

    @property
    def name(self) -> str:
        """The partition directory, for messages."""
        return self.directory or "."

    def __str__(self) -> str:
        return f"partition {self.name}"

    @property
    def size(self) -> int:
        return sum(file.identity.size for file in self.files)

    @property
    def shuffles(self) -> bool:
        return self.options.shuffle is not None

    @property
    def spool_size(self) -> int:
        """The approximate peak of bytes on the local disk: source files, new files, rows being shuffled."""
        copies = sum(not is_local(url) for url in (self.endpoints.source, self.endpoints.target))
        spilled = self.decoded if self.shuffles and self.decoded > 2 * self.options.row_group_size else 0
        return copies * self.size + spilled


@dataclass(frozen=True, kw_only=True)
class JobContext:
    """The open resources of a process that does jobs.

    Attributes:
        source: the source of files.
        target: their target.
        spool: a local directory for files in transit.
        encoding: held while a job decodes and encodes.
        on_event: called with what happens.
    """

    source: Source
    target: Target
    spool: Spool
    encoding: AbstractContextManager[object] = field(default_factory=nullcontext)
    on_event: OnEvent = ignore


def run_job(job: PartitionJob) -> DirectoryResult:
    """Do a job in a process with nothing open; the result is the same everywhere."""
    if job.version != __version__:
        raise UsageError(
            f"pqcache {__version__}",
            f"is not the version that was started, {job.version}",
            "install the same on all workers",
        )
    with ExitStack() as stack:
        source = job.endpoints.open_source()
        stack.callback(source.close)
        target = open_target(job.endpoints.target, job.endpoints.target_options, job.endpoints.block_size)
        stack.callback(target.close)
        spool = stack.enter_context(open_spool(target))
        return do_job(job, JobContext(source=source, target=target, spool=spool))


def do_job(job: PartitionJob, context: JobContext) -> DirectoryResult:
    """Rewrite a partition directory and publish it all at once.

    Remote source files, and new files until they are at the target, are stored in a directory of their own in the
    spool.
    """
    target = context.target
    token = os.urandom(8).hex()
    staged: list[StagedFile] = []
    with context.spool.reserve(token, job.spool_size, job.name, job.shuffles) as scratch:
        try:
            done, new = _rewrite(job, context, scratch)
            sizes = {path.name: path.stat().st_size for path in new}
            _publish(job, context, token, new, staged, DirectoryRecord(job.directory, job.key, sizes, done))
            return done
        except BaseException:
            target.discard(token, staged)
            raise


def _rewrite(job: PartitionJob, context: JobContext, scratch: Path) -> tuple[DirectoryResult, list[Path]]:
    """Rewrite a directory's files into ``scratch``; return the result and the new files."""
    root, paths = _local_files(job, context, scratch)
    schema = pa.ipc.read_schema(pa.py_buffer(job.schema)) if job.schema else None
    url = context.source.url_of(job.files[0].path).rpartition("/")[0]
    known = KnownOfSources(schema=schema, int96=job.int96, name=url)

    def progress(amount: int) -> None:
        context.on_event(Advanced("rewrite", amount))

    is_sent = context.target.scratch is None  # from here, so that it is read next
    with context.encoding:
        result = rewrite_directory(paths, scratch / "out", job.options, progress, known, use_page_cache=is_sent)
    if root.parent != scratch:
        _check_unchanged(job, context)  # a download has been checked
    else:
        remove_tree(root)
    new = [output.path for output in result.outputs]
    done = DirectoryResult(
        files=(len(job.files), len(new)),
        row_groups=(job.row_groups, sum(output.row_groups for output in result.outputs)),
        bytes=(job.size, sum(path.stat().st_size for path in new)),
        rows=sum(output.rows for output in result.outputs),
        warnings=result.warnings,
    )
    return done, new


def _local_files(job: PartitionJob, context: JobContext, scratch: Path) -> tuple[Path, list[Path]]:
    """Source files in row order, below a common directory; remote ones and a table's are downloaded.

    The files of a table may be outside the directory, and may have other columns and rows than the table.
    """
    if is_local(job.endpoints.source) and not isinstance(context.source, Table):
        root = local_directory(job.endpoints.source)
        _check_unchanged(job, context)
        return root / job.directory, [root / file.path for file in job.files]
    inside = scratch / "in"
    inside.mkdir()
    options = DownloadOptions(on_event=context.on_event)

    def fetch(file: SourceFile) -> Path:
        copy = inside / file.path.rpartition("/")[2]
        download_file(context.source, file, lambda _: copy, options)
        return copy

    return inside, in_parallel([partial(fetch, file) for file in job.files], _TRANSFERS)


def _publish(
    job: PartitionJob,
    context: JobContext,
    token: str,
    new: list[Path],
    staged: list[StagedFile],
    record: DirectoryRecord,
) -> None:
    target = context.target

    def retried(call: Callable[[], object]) -> None:
        with_retries(call, job.name, FEW_TRIES, context.on_event)

    def send(file: Path) -> None:
        path = f"{job.directory}/{file.name}" if job.directory else file.name
        retried(lambda: staged.append(target.stage(file, token, path)))

    retried(lambda: check_claim(target, job.run))
    write_record = partial(retried, lambda: target.write(record.path, record.encoded()))
    in_parallel([write_record, *(partial(send, file) for file in new)], _TRANSFERS)
    staged.sort(key=lambda item: item.path)
    retried(lambda: check_claim(target, job.run))
    retried(lambda: target.commit(token, job.directory, staged, job.is_leaf))


def _check_unchanged(job: PartitionJob, context: JobContext) -> None:
    """Raise SourceIncomplete if a file has changed since it was listed, or can't be seen from here."""
    source = context.source
    for file in job.files:
        try:
            now: Identity | None = with_retries(partial(source.stat, file.path), file.path, FEW_TRIES, context.on_event)
        except SourceNotFound:
            now = None
        if now is None or not file.identity.is_still(now):
            raise SourceIncomplete(
                f"{source.url}/{file.path}",
                "is not there" if now is None else "is not the file that was listed",
                "nothing of this partition was published, run again when nothing writes there, and on a "
                "cluster name a path that is the same files on every worker",
            )


@dataclass
class Spool:
    """A local directory, shared by jobs that could fill its disk if all began at once."""

    path: Path
    reserved: int = 0
    jobs: set[str] = field(default_factory=set)
    changed: threading.Condition = field(default_factory=threading.Condition)

    @contextmanager
    def reserve(self, token: str, size: int, partition: str, shuffles: bool) -> Iterator[Path]:
        """Yield a new directory named ``token`` once other jobs leave ``size`` bytes of the disk free.

        Raises PqcacheError, which names ``partition``, if the disk is too small for this job alone.
        """
        with self.changed:
            while size and self.reserved + size + _SPARE > (space := self._space()):
                if not self.jobs:
                    what = "to shuffle its rows" if shuffles else "for its files"
                    raise PqcacheError(
                        self.path,
                        f"partition {partition} needs up to {format_size(size)} for a while "
                        f"{what}, {format_size(space)} are free",
                        "free some, or set TMPDIR to a larger disk",
                    )
                log.debug("partition %s waits for %s on %s", partition, format_size(size), self.path)
                self.changed.wait()
            self.reserved += size
            self.jobs.add(token)
        try:
            with disk_errors(self.path / token):
                (self.path / token).mkdir(parents=True)
            yield self.path / token
        finally:
            with suppress(OSError):
                remove_tree(self.path / token)
            with self.changed:
                self.reserved -= size
                self.jobs.remove(token)
                self.changed.notify_all()

    def _space(self) -> int:
        """Bytes that are free, or in use by jobs that reserved them."""
        taken = sum(tree_size(self.path / token) for token in self.jobs)
        return disk_usage(self.path).free + taken


@contextmanager
def open_spool(target: Target) -> Iterator[Spool]:
    """Yield a directory for files in transit, on the target's file system if that is local.

    Otherwise it lies in ``TMPDIR``, where directories of dead processes are removed first.
    """
    if target.scratch is not None:
        yield Spool(target.scratch)
        return
    with disk_errors(Path(tempfile.gettempdir())):
        for left in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
            _remove_if_dead(left)
        spool = Path(tempfile.mkdtemp(prefix=_PREFIX))
    lock = os.open(spool, os.O_RDONLY)
    try:
        try_lock(lock, exclusive=True)  # the kernel releases it when this process ends, however it ends
        yield Spool(spool)
    finally:
        with suppress(OSError):
            remove_tree(spool)
        os.close(lock)


def _remove_if_dead(left: Path) -> None:
    with suppress(OSError):  # another user's, or just removed by its owner
        status = left.lstat()
        if status.st_uid != os.geteuid() or time.time() - status.st_mtime < _FRESH:
            return
        lock = os.open(left, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            if try_lock(lock, exclusive=True):
                remove_tree(left)
        finally:
            os.close(lock)


@dataclass(frozen=True, kw_only=True)
class DirectoryResult:
    """The outcome for one directory: files, row groups and bytes before and after, rows, and warnings."""

    files: tuple[int, int]
    row_groups: tuple[int, int]
    bytes: tuple[int, int]
    rows: int
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class DirectoryRecord:
    """A directory of the target: its job's ``key``, and the names and sizes of its ``files``."""

    directory: str
    key: str
    files: Mapping[str, int]
    done: DirectoryResult

    @property
    def path(self) -> str:
        """The record's path below the target."""
        return f"{RECORDS}/{hashlib.sha256(self.directory.encode()).hexdigest()[:32]}.json"

    def encoded(self) -> bytes:
        return json.dumps(asdict(self)).encode()


def decode_record(data: bytes) -> DirectoryRecord | None:
    """Decode a record; None if it can't be read."""
    try:
        stored = json.loads(data)
        done = stored.pop("done")
        done = {name: tuple(value) if isinstance(value, list) else value for name, value in done.items()}
        return DirectoryRecord(**stored, done=DirectoryResult(**done))
    except MALFORMED:
        return None


def read_records(target: Target) -> tuple[list[DirectoryRecord], list[DirectoryRecord]]:
    """Records of an earlier run whose files are all at the target, and the other records.

    Raises UsageError for a file in no record: pqcache didn't write it, and must not overwrite it.
    """
    found = {file.path: file.identity.size for file in target.list()}
    records = []
    for path, size in found.items():
        if path.startswith(f"{RECORDS}/") and (record := decode_record(target.read_start(path, size))) is not None:
            records.append(record)
    ours = {_below(record.directory, name): size for record in records for name, size in record.files.items()}
    for path, size in found.items():
        if not path.startswith(f"{HIDDEN}/") and ours.get(path) != size:
            raise UsageError(
                target.url, f"exists and is not empty ({printable(path)})", "name a new or empty directory"
            )
    complete: list[DirectoryRecord] = []
    incomplete: list[DirectoryRecord] = []
    for record in records:
        exists = all(_below(record.directory, name) in found for name in record.files)
        (complete if exists else incomplete).append(record)
    return complete, incomplete


def claim(target: Target, run: str) -> None:
    """Make this run the owner of the target."""
    target.write(RUN, run.encode())


def check_claim(target: Target, run: str) -> None:
    """Raise CacheLocked if another run has begun or finished since, as a job on a cluster may outlive its run."""
    try:
        found = target.read_start(RUN, len(run)).decode("ascii", "replace")
    except SourceNotFound:
        found = ""
    if found != run:
        raise CacheLocked(target.url, "another run writes there now, or has finished it", "this run ends")


def remove_directory(target: Target, record: DirectoryRecord) -> None:
    """Remove a directory's files, then its record."""
    target.remove([_below(record.directory, name) for name in record.files])
    target.remove([record.path])


def _below(directory: str, name: str) -> str:
    return f"{directory}/{name}" if directory else name
