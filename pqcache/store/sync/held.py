"""What of a cache's files can be used, and with ``--compare content`` whether their bytes are still the source's."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from pqcache.errors import SourceChanged, SourceNotFound, disk_errors
from pqcache.events import Advanced, Started
from pqcache.store.drivers.base import Source
from pqcache.store.drivers.retries import with_retries
from pqcache.store.hive import parent
from pqcache.store.manifest import FileEntry, SourceFile
from pqcache.store.ownership import is_own, is_trusted_cache
from pqcache.store.snapshot import Snapshot
from pqcache.store.sync.cache_run import ByteCounter, RunOptions
from pqcache.store.sync.download.download_file import MD5, md5_of, read_chunks
from pqcache.system.checksum import checksum_of, checksum_text, new_checksum
from pqcache.system.parallel import in_parallel


@dataclass(frozen=True)
class Comparison:
    """The paths of held files that differ from their source, and of those that cannot be compared with it.

    The latter are rewritten, or have some columns or rows only: what was fetched for them is not kept.
    """

    differing: frozenset[str] = frozenset()
    uncompared: frozenset[str] = frozenset()


def compare_content(
    source: Source, listed: Iterable[SourceFile], snapshot: Snapshot, entries: Sequence[FileEntry], options: RunOptions
) -> Comparison:
    """Compare the entries whose files are listed as they were recorded; the others have changed anyway.

    An entry is compared by the store's MD5 if its tag is one. Otherwise the source file is read, and its checksum is
    compared with the recorded one.
    """
    known = {file.path: file for file in listed}
    found = ((entry, known.get(entry.sources[0].path)) for entry in entries if _is_copy(entry))
    copies = [(entry, file) for entry, file in found if file and entry.sources[0].identity.is_still(file.identity)]
    options.on_event(Started("compare", sum(entry.size for entry, _ in copies)))

    def differs(entry: FileEntry, file: SourceFile) -> bool:
        path = snapshot.path / entry.path
        with disk_errors(path):
            if MD5.fullmatch(file.identity.tag):
                same = md5_of(path) == file.identity.tag
            else:
                read = partial(_checksum_at, source, file, options.on_event)
                found = with_retries(read, file.path, options.patience, options.on_event)
                same = found == (entry.checksum or checksum_of(path))
        options.on_event(Advanced("compare", entry.size))
        return not same

    different = in_parallel([partial(differs, entry, file) for entry, file in copies], options.jobs)
    return Comparison(
        frozenset(entry.path for (entry, _), differ in zip(copies, different, strict=True) if differ),
        frozenset(entry.path for entry in entries if not _is_copy(entry)),
    )


def _is_copy(entry: FileEntry) -> bool:
    return not entry.recipe and len(entry.sources) == 1 and not entry.sources[0].identity.is_shaped


def _checksum_at(source: Source, file: SourceFile, counter: ByteCounter) -> str:
    """Empty for a file that is gone or has changed by now."""
    seen = new_checksum()
    try:
        for chunk in read_chunks(source, file, 0, file.identity.size):
            seen.update(chunk)
            counter.keep_within_limit(len(chunk))
    except (SourceChanged, SourceNotFound):
        return ""
    return checksum_text(seen)


def find_damaged(snapshot: Snapshot, entries: Sequence[FileEntry]) -> frozenset[str]:
    """Paths of entries that are missing, of another size than recorded, or reached by a link."""
    return find_unusable(snapshot, entries)[0]


def find_unusable(snapshot: Snapshot, entries: Sequence[FileEntry]) -> tuple[frozenset[str], frozenset[str]]:
    """Paths of damaged entries, as `find_damaged`, and of those that others can change.

    These are the ones that others than trusted users own, can write to, or can replace.
    """
    root, trusted = str(snapshot.path), is_trusted_cache(snapshot.path.parent.parent)
    known: dict[str, tuple[bool, bool]] = {"": (True, True)}  # of directories: whether they are real, and ours
    damaged, foreign = set(), set()

    def look_at(directory: str) -> tuple[bool, bool]:
        if directory not in known:
            real, ours = look_at(parent(directory))
            try:
                status = os.lstat(f"{root}/{directory}")
            except OSError:  # what is missing is nobody's
                known[directory] = real, ours
            else:
                known[directory] = real and not stat.S_ISLNK(status.st_mode), ours and (trusted or is_own(status))
        return known[directory]

    for entry in entries:
        real, ours = look_at(parent(entry.path))
        try:
            status = os.lstat(f"{root}/{entry.path}")
        except OSError:
            damaged.add(entry.path)
        else:
            if not (real and stat.S_ISREG(status.st_mode) and status.st_size == entry.size):
                damaged.add(entry.path)
            if not (ours and (trusted or is_own(status))):
                foreign.add(entry.path)
    return frozenset(damaged), frozenset(foreign)
