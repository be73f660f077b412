"""One file brought safely to local disk.

A download goes to a temporary name by ranged reads. It goes on where it stopped after a lost connection, is
checked for its length and for a footer that parses, is made durable, and the source is asked once more
whether the file is still the one that was listed.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pqcache.errors import (
    DISK_FULL,
    ParquetError,
    PqcacheError,
    SourceChanged,
    SourceIncomplete,
    SourceNotFound,
    SourceUnavailable,
    disk_error,
)
from pqcache.events import Advanced, OnEvent
from pqcache.store.drivers.base import Source, file_url
from pqcache.store.drivers.retries import RETRIES, with_retries
from pqcache.store.hive import parent
from pqcache.store.manifest import Identity, SourceFile
from pqcache.store.sync.download_stream import WORTH_DIRECT, arriving
from pqcache.store.sync.subset import Subset
from pqcache.system.checksum import add_file, checksum_of, checksum_text, new_checksum
from pqcache.system.disk import DIRECT_IO_BLOCK, enable_direct_io, write_at

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq


@dataclass(frozen=True)
class Copied:
    """A source file as it was copied, with the copy's footer, Arrow schema and checksum."""

    file: SourceFile
    metadata: pq.FileMetaData
    schema: pa.Schema
    checksum: str


ALL = Subset()
_MD5 = re.compile(r"[0-9a-f]{32}")
_DURABLE_EVERY = 32 << 20  # bytes of a file
_TAIL = 64 << 10  # of a file's end, where its footer is; most fit
MOVED = 3  # how often a file may change while it is copied before the run gives up


class Arrived(NamedTuple):
    """The checksum of what arrived, and its last bytes, if there is need of them."""

    checksum: str
    tail: bytes


class _Moved(PqcacheError):
    """The source file is no longer the one that was listed."""

    def __init__(self, identity: Identity) -> None:
        super().__init__("", "the file changed at its source")
        self.identity = identity


def fetch(
    source: Source,
    file: SourceFile,
    target: Callable[[SourceFile], Path],
    on_event: OnEvent,
    stopped: Callable[[], bool] = lambda: False,
    retries: int = RETRIES,
    checksum: bool = False,
    subset: Subset = ALL,
    confirm: bool = True,
    cached: bool = True,
) -> Copied:
    """Copy ``file`` to ``target(file)``; return what was copied.

    With ``checksum``, what arrived is compared with the store's own checksum where it has one (the ETag of
    an S3 object that was uploaded in one part). A file that changes meanwhile is fetched again, and the
    returned identity is that of the copy. One that vanished, or keeps changing, raises SourceIncomplete.
    Without ``confirm`` the source is asked for its identity again only if something went wrong: the caller asks
    for many files at once. Without ``cached`` the copy does not go through the page cache: nobody reads it next.
    """
    for attempt in range(MOVED + 1):
        final = target(file)
        part = Path(f"{final}.part")
        if os.path.exists(final) and not part.exists():  # whole, from a run that died: check it like any other
            final.rename(part)
            part.chmod(0o644)
        try:
            copied = _fetch_version(source, file, part, on_event, stopped, retries, checksum, subset, confirm, cached)
        except SourceNotFound as error:
            raise vanished(source, file.path) from error
        except _Moved as moved:
            written = part.stat().st_size if part.exists() else 0
            on_event(Advanced("fetch", -written))
            part.unlink(missing_ok=True)
            if attempt == MOVED:
                break
            file = SourceFile(file.path, moved.identity, file.block_size)
            continue
        part.chmod(0o444)
        part.replace(final)
        return copied
    raise keeps_changing(source, file.path)


def vanished(source: Source, path: str) -> SourceIncomplete:
    """Return the error for a file that is gone."""
    return SourceIncomplete(
        path,
        f"vanished from {source.url} while it was copied",
        "nothing was published, sync again when the source is complete",
    )


def keeps_changing(source: Source, path: str) -> SourceIncomplete:
    """Return the error for a file that never holds still."""
    return SourceIncomplete(
        path,
        f"keeps changing at {source.url} while it is copied",
        "nothing was published, sync again when its writer has finished",
    )


def _fetch_version(
    source: Source,
    file: SourceFile,
    part: Path,
    on_event: OnEvent,
    stopped: Callable[[], bool],
    retries: int,
    checksum: bool,
    subset: Subset,
    confirm: bool,
    cached: bool,
) -> Copied:
    """Copy one version of a file to ``part``; raises _Moved when it is another version by the end."""

    def bring() -> Arrived:
        if not subset.is_all:
            _project(source, file, part, on_event, stopped, subset)
            return Arrived(checksum_of(part), b"")
        arrived = _fill(source, file, part, on_event, stopped, cached)
        if checksum:
            _check_md5(source, file, part, on_event)
        return arrived

    def size() -> int:
        try:
            return os.stat(part).st_size
        except FileNotFoundError:
            return 0

    for last in (False, True):
        error: PqcacheError | None = None
        try:
            arrived = with_retries(bring, file.path, retries, on_event, size)
            metadata, schema = _footer(source, file, part, arrived.tail)
        except (SourceChanged, SourceUnavailable) as failure:
            error = failure  # it may have failed because the file changed under the copy: ask before telling
        except ParquetError as failure:
            error = failure
            on_event(Advanced("fetch", -size()))
            part.unlink(missing_ok=True)  # damaged on its way? no run must build on it
        if error is None and not confirm:
            return Copied(file, metadata, schema, arrived.checksum)
        now = with_retries(lambda: source.stat(file.path), file.path, retries, on_event)
        if now != file.identity:
            raise _Moved(now)
        if error is None:
            return Copied(file, metadata, schema, arrived.checksum)
        if last or not isinstance(error, ParquetError):
            raise error
    raise AssertionError("unreachable")


def _project(
    source: Source,
    file: SourceFile,
    part: Path,
    on_event: OnEvent,
    stopped: Callable[[], bool],
    subset: Subset,
) -> None:
    """Fetch the wanted columns and rows, unless an earlier run had done so already."""
    if part.exists():
        return
    from pqcache.store.sync.download_columns import (
        fetch_projected,  # a tenth of a second that a plain copy need not wait for
    )

    partitions = subset.partitions.get(parent(file.path), {})

    def on_bytes(amount: int) -> None:
        on_event(Advanced("fetch", amount))

    fetch_projected(source, file, part, subset.columns, subset.where, partitions, on_bytes, stopped, subset.types)


def _fill(
    source: Source, file: SourceFile, part: Path, on_event: OnEvent, stopped: Callable[[], bool], cached: bool
) -> Arrived:
    """Fetch what ``part`` lacks and make it durable; return the checksum of the whole, and its end.

    Bytes are written at their own offsets: a thread that an earlier run left behind in a stalled read can
    only write the same bytes to the same places.
    """
    size, tail = file.identity.size, b""
    try:
        descriptor = os.open(part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            held = os.fstat(descriptor).st_size
            if held > size:
                os.ftruncate(descriptor, size)
            written = durable = size if held >= size else held // DIRECT_IO_BLOCK * DIRECT_IO_BLOCK
            seen = new_checksum()
            add_file(seen, descriptor, written)
            direct = not cached and size >= WORTH_DIRECT and enable_direct_io(descriptor)
            for piece in arriving(source, file.path, written, size - written, file.identity.tag):
                if stopped():
                    raise KeyboardInterrupt
                piece = piece[: size - written]
                seen.update(piece)  # while it is in the processor's cache
                write_at(descriptor, piece, written, direct)
                written += len(piece)
                on_event(Advanced("fetch", len(piece)))
                if written == size:
                    tail = bytes(piece[-_TAIL:])
                elif not direct and written - durable >= _DURABLE_EVERY:
                    os.fdatasync(descriptor)  # the disk has work while others download, and little at the end
                    durable = written
            if written < size:
                raise SourceUnavailable(
                    f"{file_url(source, file.path)}", f"the connection ended after {written:,} of {size:,} bytes"
                )
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in DISK_FULL:  # what fsync could not write is not reported twice: do not build on it
            part.unlink(missing_ok=True)
        raise disk_error(part, error) from error
    return Arrived(checksum_text(seen), tail)


def _check_md5(source: Source, file: SourceFile, part: Path, on_event: OnEvent) -> None:
    """Compare ``part`` with the MD5 in the file's tag, if that is one; what differs is fetched again."""
    if not _MD5.fullmatch(file.identity.tag):
        return
    digest = hashlib.md5(usedforsecurity=False)
    with open(part, "rb", buffering=0) as data:
        while chunk := data.read(1 << 20):
            digest.update(chunk)
    if digest.hexdigest() != file.identity.tag:
        part.unlink()
        on_event(Advanced("fetch", -file.identity.size))
        raise SourceUnavailable(f"{file_url(source, file.path)}", "arrived damaged: its MD5 is not the store's")


def _footer(source: Source, file: SourceFile, part: Path, tail: bytes = b"") -> tuple[pq.FileMetaData, pa.Schema]:
    """Return the footer and the Arrow schema of a copy, of which ``tail`` is the end."""
    from pqcache.parquet.row_group_stats import end_of, footer_in

    whole = len(tail) >= 12 and int.from_bytes(tail[-8:-4], "little") + 12 <= len(tail)
    return footer_in(tail if whole else end_of(part), file_url(source, file.path))
