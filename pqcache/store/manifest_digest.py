"""The summary of a manifest, by which a sync sees that nothing has changed without reading the manifest.

Stored as ``_pqcache/summary.json``, which docs/cache-format.md describes. Where a summary is missing, damaged, or of
other files than exist now, the manifest is read and compared file by file.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path

from pqcache.errors import MALFORMED, DamagedError
from pqcache.store.layout import FILES, ROW_GROUPS, SUMMARY
from pqcache.store.manifest import FileEntry, Manifest, SourceFile, TableVersion, Totals
from pqcache.store.ownership import is_own, is_trusted_cache
from pqcache.store.snapshot import Snapshot
from pqcache.system.disk import open_directory, read_regular

FORMAT = 3  # as the manifest's, so that a summary never stands for a manifest that cannot be read
_OURS = "_pqcache"


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What a manifest says, all files together.

    ``sources`` is a digest of the ``source_files`` source files' paths and identities, ``held`` one of the snapshot's
    own paths and sizes. ``recipe`` is that of every file, None where they differ. ``table`` is what `table_digest`
    returns.
    """

    sources: str
    source_files: int
    held: str
    recipe: str | None
    shard: str | None
    totals: Totals
    table: str | None = None


def summarize(manifest: Manifest) -> Summary:
    sources = {file for entry in manifest.files for file in entry.sources}
    recipes = {entry.recipe for entry in manifest.files}
    return Summary(
        sources=digest_of_sources(sources),
        source_files=len(sources),
        held=_digest(f"{entry.path}\0{entry.size}" for entry in manifest.files),
        recipe=recipes.pop() if len(recipes) == 1 else None,
        shard=manifest.shard,
        totals=manifest.totals,
        table=table_digest(manifest.table),
    )


def table_digest(table: TableVersion | None) -> str | None:
    """Digest of a table's format and schema, which can change while no file does."""
    if table is None:
        return None
    schema = table.schema_digest.encode() or table.arrow_schema
    return blake2b(table.format.encode() + b"\0" + schema, digest_size=16).hexdigest()


def content_digest(manifest: Manifest) -> str:
    """Digest of a table's schema, paths and bytes, equal in the caches of two nodes, which name snapshots differently.

    Files without a recorded checksum count by their size, recipe and sources.
    """
    return _digest([table_digest(manifest.table) or "", *map(content_of, manifest.files)])


def content_of(entry: FileEntry) -> str:
    """A file's path and what is known of its bytes."""
    known = ((file.path, file.identity) for file in entry.sources)
    sources = (f"{path} {i.size} {i.mtime_ns} {i.shared_tag}" for path, i in known)
    return f"{entry.path}\0{entry.checksum or ' '.join((str(entry.size), entry.recipe, *sources))}"


def write_summary(manifest: Manifest, path: Path) -> None:
    """The caller makes it durable."""
    path.write_text(json.dumps({"format": FORMAT, **asdict(summarize(manifest))}) + "\n")


def read_summary(snapshot: Snapshot) -> Summary | None:
    """None if the summary, the manifest or the index is not as it was written."""
    reason: object = "its summary is of another format"
    try:
        for name in (SUMMARY, FILES, ROW_GROUPS):
            snapshot.check(name)
        values = json.loads(read_regular(snapshot.path / SUMMARY))
        if values.pop("format") == FORMAT:
            return Summary(**{**values, "totals": Totals(**values["totals"])})
    except (DamagedError, OSError, *MALFORMED) as error:
        reason = error
    import logging  # a sync with nothing to do does not need it

    logging.getLogger("pqcache.sync").debug("%s: files are compared one by one: %s", snapshot.path, reason)
    return None


def rows_in_summary(snapshot: Snapshot) -> int | None:
    """None if the summary cannot be read."""
    try:
        return int(json.loads(read_regular(snapshot.path / SUMMARY))["totals"]["rows"])
    except (OSError, *MALFORMED):
        return None


def digest_of_sources(files: Iterable[SourceFile]) -> str:
    """Equal for equal paths and identities, in whatever order."""
    return _digest(f"{f.path}\0{f.identity.size} {f.identity.mtime_ns} {f.identity.tag}" for f in files)


def digest_of_held(snapshot: Path) -> str | None:
    """Digest of the files in a snapshot, as ``Summary.held``; None if they cannot be examined."""
    try:
        return _digest(_held(snapshot))
    except OSError:
        return None


def _held(snapshot: Path) -> Iterator[str]:
    pending, trusted = [""], is_trusted_cache(snapshot.parent.parent)
    while pending:
        directory = pending.pop()
        with open_directory(f"{snapshot}/{directory}") as found:
            for item in found:
                path = directory + item.name
                status = item.stat(follow_symlinks=False)
                if not (trusted or is_own(status)):
                    yield path  # what others can change, which is not kept
                elif stat.S_ISREG(status.st_mode):
                    yield f"{path}\0{status.st_size}"
                elif not stat.S_ISDIR(status.st_mode):
                    yield path  # a link, which no file of a snapshot is
                elif path != _OURS:
                    pending.append(f"{path}/")


def _digest(lines: Iterable[str]) -> str:
    return blake2b("\n".join(sorted(lines)).encode(errors="surrogatepass"), digest_size=16).hexdigest()
