"""One job of a repartition: one partition directory, from its source files to what readers see at the target.

A job is plain values, so it can be sent to any process on any machine that reaches the source and the target.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from shutil import disk_usage

import pyarrow as pa

from pqcache.errors import PqcacheError, SourceIncomplete, SourceNotFound, UsageError, disk_errors
from pqcache.events import Advanced, OnEvent, ignore
from pqcache.parquet.rewrite.options import RewriteOptions
from pqcache.parquet.rewrite.rewrite import rewrite_directory
from pqcache.parquet.row_group_stats import read_footer
from pqcache.store.drivers.base import Source, StagedFile, Target
from pqcache.store.drivers.registry import open_source, open_target
from pqcache.store.drivers.retries import RETRIES, with_retries
from pqcache.store.manifest import Identity, SourceFile
from pqcache.store.repartition.target_record import Done, Record, check_own
from pqcache.store.sync.download import fetch
from pqcache.store.urls import local_path, url_scheme
from pqcache.system.disk import remove_tree, tree_size
from pqcache.system.parallel import in_parallel
from pqcache.units import format_size
from pqcache.versions import __version__

_SPOOL = "pqcache-spool-"
_TRANSFERS = 4  # files of one partition fetched or sent at once
_SPARE = 64 << 20
_FRESH = 60.0  # seconds: a spool so young may not have its lock yet


@dataclass(frozen=True, kw_only=True)
class PartitionJob:
    """What to do with one partition directory.

    Attributes:
        source: URL of the dataset, with its store options ``source_options``; both may hold secrets.
        files: the source files of ``directory``, in row order.
        target: URL of what is written, with ``target_options`` and, on HDFS, blocks of ``block_size`` bytes.
        how: sizes and codecs.
        key: names the files' identities and everything that decides what is written.
        whole: no other partition lies below this one, so it can be published by one rename.
        version: of the pqcache that made the job.
        run: the run that the target has to be of.
        schema: of the whole table, as an Arrow IPC message; empty where the partition is all there is.
        int96: the unit in which the whole table's INT96 time stamps are read, or None.
        decoded: bytes that the rows take in memory, about.
    """

    source: str = field(repr=False)  # Dask logs the arguments of what fails
    source_options: Mapping[str, str] = field(repr=False)
    directory: str
    files: tuple[SourceFile, ...] = field(repr=False)
    target: str = field(repr=False)
    target_options: Mapping[str, str] = field(repr=False)
    block_size: int | None
    how: RewriteOptions
    key: str
    whole: bool
    version: str
    run: str = ""
    schema: bytes = field(default=b"", repr=False)
    int96: str | None = None
    decoded: int = 0

    @property
    def size(self) -> int:
        """Bytes of the source files."""
        return sum(file.identity.size for file in self.files)

    @property
    def spooled(self) -> int:
        """Bytes that lie on the local disk for a while, at most about: source files, new files, rows being shuffled."""
        copies = sum(url_scheme(url) not in ("", "file") for url in (self.source, self.target))
        spilled = self.decoded if self.how.shuffle is not None and self.decoded > 2 * self.how.row_group_size else 0
        return copies * self.size + spilled


@dataclass
class Spool:
    """A local directory for files on their way, shared by jobs that would fill its disk if all began at once."""

    path: Path
    promised: int = 0
    jobs: set[str] = field(default_factory=set)
    changed: threading.Condition = field(default_factory=threading.Condition)

    @contextmanager
    def room(self, job: PartitionJob, token: str) -> Iterator[Path]:
        """Yield a directory for ``job``, once the others leave enough of the disk free for it.

        Raises PqcacheError when the disk is too small for this job alone.
        """
        with self.changed:
            while self.promised + job.spooled + _SPARE > (space := self._space()) and job.spooled:
                if not self.jobs:
                    what = "to shuffle its rows" if job.how.shuffle is not None else "for its files"
                    raise PqcacheError(
                        self.path,
                        f"partition {job.directory or '.'} needs up to {format_size(job.spooled)} for a while "
                        f"{what}, {format_size(space)} are free",
                        "free some, or set TMPDIR to a larger disk",
                    )
                self.changed.wait()
            self.promised += job.spooled
            self.jobs.add(token)
        try:
            with disk_errors(self.path / token):
                (self.path / token).mkdir(parents=True)
            yield self.path / token
        finally:
            with suppress(OSError):
                remove_tree(self.path / token)
            with self.changed:
                self.promised -= job.spooled
                self.jobs.remove(token)
                self.changed.notify_all()

    def _space(self) -> int:
        """Return the bytes that are free, or taken by what has been promised already."""
        taken = sum(tree_size(self.path / token) for token in self.jobs)
        return disk_usage(self.path).free + taken


def run_job(job: PartitionJob) -> Done:
    """Do a job in a process that has nothing open yet; what it writes is the same everywhere."""
    if job.version != __version__:
        raise UsageError(
            "",
            f"pqcache {__version__} is not the version that was started, {job.version}",
            "install the same on all workers",
        )
    with ExitStack() as stack:
        source = open_source(job.source, job.source_options)
        stack.callback(source.close)
        target = open_target(job.target, job.target_options, job.block_size)
        stack.callback(target.close)
        spool = stack.enter_context(spooled(target))
        return do_job(job, source, target, spool)


def do_job(
    job: PartitionJob,
    source: Source,
    target: Target,
    spool: Spool,
    on_event: OnEvent = ignore,
    turn: AbstractContextManager[object] | None = None,
) -> Done:
    """Rewrite one partition directory and publish it; nothing of it is seen at the target before all of it is.

    Remote source files, and the new ones until they are at the target, lie in a directory of their own in ``spool``.
    ``turn`` is held while decoding and encoding.
    """
    token = os.urandom(8).hex()
    staged: list[StagedFile] = []
    with spool.room(job, token) as own:
        try:
            paths = _brought(job, source, own, on_event)
            out = own / "out"
            with turn or nullcontext():
                before = sum(read_footer(path)[0].num_row_groups for path in paths)
                schema = pa.ipc.read_schema(pa.py_buffer(job.schema)) if job.schema else None
                result = rewrite_directory(
                    paths,
                    out,
                    job.how,
                    lambda amount: on_event(Advanced("rewrite", amount)),
                    schema,
                    int96=job.int96,
                    cached=target.scratch is None,  # it is sent from here
                )
            if paths[0].parent.parent.parent != own:
                _check_unchanged(job, source, on_event)  # fetch has done so
            remove_tree(own / "in")
            new = sorted(out.iterdir())
            footers = [read_footer(path)[0] for path in new]
            sizes = {path.name: path.stat().st_size for path in new}
            done = Done(
                files=(len(job.files), len(new)),
                row_groups=(before, sum(footer.num_row_groups for footer in footers)),
                bytes=(job.size, sum(sizes.values())),
                rows=sum(footer.num_rows for footer in footers),
                warnings=result.warnings,
            )
            record = Record(job.directory, job.key, sizes, done)
            _publish(job, target, token, new, staged, record, on_event)
            return done
        except BaseException:
            target.discard(token, staged)
            raise


def _brought(job: PartitionJob, source: Source, own: Path, on_event: OnEvent) -> list[Path]:
    """Return the local paths of the source files; remote ones are fetched."""
    if url_scheme(job.source) in ("", "file"):
        root = Path(os.path.abspath(os.path.expanduser(local_path(job.source))))
        root = root.parent if root.is_file() else root
        _check_unchanged(job, source, on_event)
        return [root / file.path for file in job.files]
    inside = own / "in"
    inside.mkdir()

    def bring(number: int, file: SourceFile) -> Path:
        copy = inside / f"{number:06d}" / file.path.rpartition("/")[2]
        copy.parent.mkdir()
        fetch(source, file, lambda _: copy, on_event)
        return copy

    return in_parallel([partial(bring, number, file) for number, file in enumerate(job.files)], _TRANSFERS)


def _publish(
    job: PartitionJob,
    target: Target,
    token: str,
    new: list[Path],
    staged: list[StagedFile],
    record: Record,
    on_event: OnEvent,
) -> None:
    """Send the new files, note what they are, and let readers see them."""

    def retried(call: Callable[[], object]) -> None:
        with_retries(call, job.directory or ".", RETRIES, on_event)

    def send(file: Path) -> None:
        path = f"{job.directory}/{file.name}" if job.directory else file.name
        retried(lambda: staged.append(target.stage(file, token, path)))

    retried(lambda: check_own(target, job.run))
    note = partial(retried, lambda: target.write(record.path, record.encoded()))
    in_parallel([note, *(partial(send, file) for file in new)], _TRANSFERS)
    staged.sort(key=lambda item: item.path)
    retried(lambda: check_own(target, job.run))
    retried(lambda: target.commit(token, job.directory, staged, job.whole))


def _check_unchanged(job: PartitionJob, source: Source, on_event: OnEvent) -> None:
    """Raise SourceIncomplete when a file is not the one that was listed, or is not to be seen from here."""
    for file in job.files:
        try:
            now: Identity | None = with_retries(partial(source.stat, file.path), file.path, RETRIES, on_event)
        except SourceNotFound:
            now = None
        if now != file.identity:
            what = "is not there" if now is None else "is not the file that was listed"
            raise SourceIncomplete(
                f"{source.url}/{file.path}",
                f"{what}",
                "nothing of this partition was published, run again when nothing writes there, and on a "
                "cluster name a path that is the same files on every worker",
            )


@contextmanager
def spooled(target: Target) -> Iterator[Spool]:
    """Yield a directory for files on their way, on the target's own file system where that is local.

    Elsewhere it is in ``TMPDIR``, and what processes that died have left there is removed first.
    """
    if target.scratch is not None:
        yield Spool(target.scratch)
        return
    with disk_errors(Path(tempfile.gettempdir())):
        for left in Path(tempfile.gettempdir()).glob(f"{_SPOOL}*"):
            _remove_if_dead(left)
        spool = Path(tempfile.mkdtemp(prefix=_SPOOL))
    held = os.open(spool, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)  # the kernel gives it back when this process ends, however it ends
        yield Spool(spool)
    finally:
        with suppress(OSError):
            remove_tree(spool)
        os.close(held)


def _remove_if_dead(left: Path) -> None:
    with suppress(OSError):  # another user's, or just removed by its owner
        if time.time() - left.stat().st_mtime < _FRESH:
            return
        held = os.open(left, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove_tree(left)
        finally:
            os.close(held)
