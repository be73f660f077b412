"""The manifest: the files of a snapshot, and the source files each was made from.

The summary, ``_pqcache/summary.json``, tells a sync that nothing has changed without reading the manifest. If the
summary is missing, damaged, or doesn't match the present files, the manifest is compared file by file.

Plain values; ``manifest_file.py`` reads and writes a manifest with pyarrow, which a sync with nothing to do does not
load. The values of a file never change, but aren't frozen dataclasses: a sync of a million files makes several millions
of them, and a frozen one takes several times as long to make.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from hashlib import blake2b
from pathlib import Path

FORMAT = 3  # of manifest and summary, so that no summary stands for a manifest that cannot be read; 2 had no since
DIRECTORY = "directory"  # the format of a TableVersion of a plain directory
_INODE = "inode:"
_COMMITTED = "committed:"
_SHAPED = "committed-shaped:"


def local_tag(inode: int, ctime_ns: int) -> str:
    """The tag of a file on a local file system; no ETag begins like it."""
    return f"{_INODE}{inode}:{ctime_ns}"


def committed_tag(digest: str, shaped: bool) -> str:
    """The tag of a file named in a table's log; no ETag begins like it.

    ``digest`` is that of its URL and its shape in the table. ``shaped`` says that the table changes rows or columns, so
    a copy's bytes differ from the file's.
    """
    return f"{_SHAPED if shaped else _COMMITTED}{digest}"


@dataclass(slots=True, unsafe_hash=True)
class Identity:
    """The recorded state of a source file; an equal identity means it is unchanged.

    ``tag`` is the ETag if the store has one, inode and ctime on a local file system, else empty.
    """

    size: int
    mtime_ns: int
    tag: str = ""

    @property
    def shared_tag(self) -> str:
        """The tag if it is the same on all machines, else empty."""
        return "" if self.tag.startswith(_INODE) else self.tag

    @property
    def is_shaped(self) -> bool:
        """Whether a copy differs from the file, as its table renames columns or deletes rows."""
        return self.tag.startswith(_SHAPED)

    def is_still(self, now: Identity) -> bool:
        """Whether the file is unchanged, as far as known if a tag is missing."""
        same = (self.size, self.mtime_ns) == (now.size, now.mtime_ns)
        return same and (self.tag == now.tag or not self.tag or not now.tag)


@dataclass(slots=True)
class SourceFile:
    """A file at the source: its path relative to the source, and its identity.

    ``block_size`` is HDFS's, in bytes, 0 elsewhere, and ignored in comparisons.
    """

    path: str
    identity: Identity
    block_size: int = field(default=0, compare=False)

    def __hash__(self) -> int:
        return hash(self.path)  # ten times as fast as of all fields, and two files of one path are rare in a set


@dataclass(slots=True, unsafe_hash=True, kw_only=True)
class FileEntry:
    """A file of a snapshot; ``recipe`` says how it was rewritten and is empty for a plain copy.

    ``checksum`` is that of its bytes when they were downloaded or written, empty if not recorded. ``since`` is the
    number of the snapshot that brought the newest of its sources; 0 if it isn't known yet.
    """

    path: str
    size: int
    rows: int
    row_groups: int
    sources: tuple[SourceFile, ...] = ()
    recipe: str = ""
    checksum: str = ""
    since: int = field(default=0, compare=False)


@dataclass(frozen=True)
class Totals:
    """The numbers of files and rows in a snapshot, and its ``size`` in bytes."""

    files: int = 0
    row_groups: int = 0
    rows: int = 0
    size: int = 0


@dataclass(frozen=True, kw_only=True)
class TableVersion:
    """The listed version of a Delta or Iceberg table, or the schema of a table without versions.

    For a directory it has the types of the partition columns, and ``schema_digest`` says which ones were declared; see
    `typed_version`.

    Attributes:
        format: ``Delta``, ``Iceberg``, ``Hive``, or DIRECTORY.
        version: the number of the version, or the ID of the snapshot; empty for a table without versions.
        time: the time of its commit, in ISO 8601; empty for a table without versions.
        schema: the table's schema with partition columns, as a serialized Arrow schema; for a table without versions
            only the partition columns, as the files have the others.
        schema_digest: a text that is equal for equal schemas; empty if ``schema`` is known.
        load_schema: returns ``schema`` on demand, as few syncs need it.
    """

    format: str
    version: str
    time: str
    schema: bytes = b""
    schema_digest: str = ""
    load_schema: Callable[[], bytes] | None = field(default=None, compare=False, repr=False)

    @property
    def arrow_schema(self) -> bytes:
        """The table's schema, loaded on first use; empty if it can't be known."""
        return self.schema if self.schema or self.load_schema is None else self.load_schema()

    @property
    def has_all_columns(self) -> bool:
        return self.version != ""

    def __str__(self) -> str:
        return f"{self.format} version {self.version} of {self.time}" if self.version else f"{self.format} table"


def typed_version(table: TableVersion | None, declared: Mapping[str, str], schema: bytes = b"") -> TableVersion | None:
    """The version that a snapshot records of its ``table``, or the partition types of a directory.

    ``schema`` has the types of all partition columns with values; without it, the result suffices for a digest.
    """
    if table is not None and not declared:
        return table
    of_table = None
    if table is not None:
        of_table = table.schema_digest or blake2b(table.arrow_schema, digest_size=16).hexdigest()
    digest = json.dumps([dict(declared), of_table], sort_keys=True)
    if table is None:
        return TableVersion(format=DIRECTORY, version="", time="", schema=schema, schema_digest=digest)
    return replace(table, schema=schema, schema_digest=digest, load_schema=None)


def declared_types(table: TableVersion | None) -> dict[str, str]:
    if table is None or table.format != DIRECTORY or not table.schema_digest:
        return {}
    types: dict[str, str] = json.loads(table.schema_digest)[0]
    return types


@dataclass(frozen=True, kw_only=True)
class SnapshotMetadata:
    """The source of a snapshot, and the selection.

    Attributes:
        source: the URL of the source, without secrets.
        where: the condition for its rows, None for all.
        shard: its share of the source, like ``0/3``; None for the whole source.
        listing: the digest of the files divided among nodes; equal digests mean that nodes divided the same files.
        table: the version of the source if it is a table; None for a directory of files.
    """

    source: str
    where: str | None = None
    shard: str | None = None
    listing: str | None = None
    table: TableVersion | None = None


@dataclass(frozen=True, kw_only=True)
class Manifest(SnapshotMetadata):
    """All files of one snapshot in path order, when it was ``created`` (ISO 8601), and its metadata."""

    files: tuple[FileEntry, ...]
    created: str

    @property
    def size(self) -> int:
        return sum(entry.size for entry in self.files)

    @property
    def rows(self) -> int:
        return sum(entry.rows for entry in self.files)

    @property
    def row_groups(self) -> int:
        return sum(entry.row_groups for entry in self.files)

    @property
    def totals(self) -> Totals:
        return Totals(len(self.files), self.row_groups, self.rows, self.size)


def assign_sources(source_rows: Sequence[int], output_rows: Sequence[int]) -> list[list[int]]:
    """For each output file, the positions of the source files whose rows it holds.

    Both are in row order and have the same total of rows. A source without rows belongs to the output with the next
    row, so every source belongs to an output.
    """
    assigned: list[list[int]] = [[] for _ in output_rows]
    output, output_end = 0, output_rows[0] if output_rows else 0
    start = 0
    for position, rows in enumerate(source_rows):
        end = start + rows
        while output < len(output_rows) - 1 and start >= output_end:
            output += 1
            output_end += output_rows[output]
        if output_rows:
            assigned[output].append(position)
        while output < len(output_rows) - 1 and end > output_end:
            output += 1
            output_end += output_rows[output]
            assigned[output].append(position)
        start = end
    return assigned


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The files of a manifest in a few values.

    ``sources`` is a digest of the paths and identities of ``source_files`` source files, ``held`` a digest of the
    snapshot's paths and sizes. ``recipe`` is that of all files, None if they differ. ``table`` is from `table_digest`.
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
        held=digest_of_lines(f"{entry.path}\0{entry.size}" for entry in manifest.files),
        recipe=recipes.pop() if len(recipes) == 1 else None,
        shard=manifest.shard,
        totals=manifest.totals,
        table=table_digest(manifest.table),
    )


def table_digest(table: TableVersion | None) -> str | None:
    """A digest of a table's format and schema, which can change while no file does."""
    if table is None:
        return None
    schema = table.schema_digest.encode() or table.arrow_schema
    return blake2b(table.format.encode() + b"\0" + schema, digest_size=16).hexdigest()


def content_digest(manifest: Manifest) -> str:
    """A digest of schema, paths and bytes, equal in the caches of two nodes, whose snapshots have different names.

    Files without a recorded checksum count by size, recipe and sources.
    """
    return digest_of_lines([table_digest(manifest.table) or "", *map(content_of, manifest.files)])


def content_of(entry: FileEntry) -> str:
    """A file's path and its checksum, else its size, recipe and sources."""
    known = ((file.path, file.identity) for file in entry.sources)
    sources = (f"{path} {i.size} {i.mtime_ns} {i.shared_tag}" for path, i in known)
    return f"{entry.path}\0{entry.checksum or ' '.join((str(entry.size), entry.recipe, *sources))}"


def write_summary(manifest: Manifest, path: Path) -> None:
    """Write a summary; the caller makes it durable."""
    path.write_text(json.dumps({"format": FORMAT, **asdict(summarize(manifest))}) + "\n")


def digest_of_sources(files: Iterable[SourceFile]) -> str:
    """A digest of paths and identities, independent of their order."""
    return digest_of_lines(f"{f.path}\0{f.identity.size} {f.identity.mtime_ns} {f.identity.tag}" for f in files)


def digest_of_lines(lines: Iterable[str]) -> str:
    return blake2b("\n".join(sorted(lines)).encode(errors="surrogatepass"), digest_size=16).hexdigest()
