"""The manifest: which files a snapshot holds, and which source files each of them came from.

Stored as ``_pqcache/files.arrow`` (Arrow IPC), one row per file in path order.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from pqcache.errors import CacheError, DamagedError

FORMAT = 1
_SOURCE = pa.struct([("path", pa.string()), ("size", pa.int64()), ("mtime_ns", pa.int64()), ("tag", pa.string())])
_SCHEMA = pa.schema(
    [
        ("path", pa.string()),
        ("size", pa.int64()),
        ("rows", pa.int64()),
        ("row_groups", pa.int64()),
        ("recipe", pa.string()),
        ("sources", pa.list_(_SOURCE)),
        ("checksum", pa.string()),
    ]
)


@dataclass(frozen=True, slots=True)
class Identity:
    """What was recorded of a source file; an equal identity means it is unchanged.

    ``tag`` is the ETag where the store has one, else empty.
    """

    size: int
    mtime_ns: int
    tag: str = ""


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file at the source: its path relative to the source, and its identity.

    ``block_size`` is what HDFS says of it, 0 elsewhere; it is no part of what makes two files equal.
    """

    path: str
    identity: Identity
    block_size: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A file of a snapshot; ``recipe`` says how it was rewritten and is empty for a plain copy.

    ``checksum`` is that of its bytes as they were when they arrived or were written, empty if not recorded.
    """

    path: str
    size: int
    rows: int
    row_groups: int
    sources: tuple[SourceFile, ...] = ()
    recipe: str = ""
    checksum: str = ""


@dataclass(frozen=True)
class Manifest:
    """All files of one snapshot in path order, and what the snapshot was made from.

    ``shard`` is the node whose share this is, like ``0/3``, or None for all of the source; ``listing`` is the digest
    of what was shared, equal for all nodes that have shared the same.
    """

    files: tuple[FileEntry, ...]
    source: str
    created: str
    where: str | None = None
    shard: str | None = None
    listing: str | None = None

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(entry.size for entry in self.files)

    @property
    def rows(self) -> int:
        """Rows of all files."""
        return sum(entry.rows for entry in self.files)

    @property
    def row_groups(self) -> int:
        """Row groups of all files."""
        return sum(entry.row_groups for entry in self.files)


def write_manifest(manifest: Manifest, path: Path) -> None:
    """Write ``manifest`` to ``path``; the caller makes it durable."""
    about = {
        "format": FORMAT,
        "source": manifest.source,
        "created": manifest.created,
        "where": manifest.where,
        "shard": manifest.shard,
        "listing": manifest.listing,
    }
    schema = _SCHEMA.with_metadata({"pqcache": json.dumps(about)})
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        for start in range(0, len(manifest.files), 10_000):
            writer.write_batch(_batch(manifest.files[start : start + 10_000], schema))


def read_manifest(path: Path) -> Manifest:
    """Read a manifest; a missing, damaged or newer one raises CacheError."""
    return _read(path, with_files=True)


def read_heading(path: Path) -> Manifest:
    """Read a manifest without its files, which takes no time however many they are; raises as read_manifest does."""
    return _read(path, with_files=False)


def _read(path: Path, with_files: bool) -> Manifest:
    try:
        with pa.OSFile(str(path), "rb") as file, pa.ipc.open_file(file) as reader:
            about = json.loads((reader.schema.metadata or {}).get(b"pqcache", b"{}"))
            if about.get("format") != FORMAT:
                raise CacheError(
                    f"{path}: written in format {about.get('format')}, this pqcache reads format {FORMAT}; "
                    "upgrade pqcache, or sync into a new directory"
                )
            batches = range(reader.num_record_batches if with_files else 0)
            files = tuple(entry for i in batches for entry in _entries(reader.get_batch(i)))
    except PermissionError as error:
        raise CacheError(f"{path}: permission denied; make it readable for this user") from error
    except (pa.ArrowInvalid, OSError, ValueError) as error:
        raise DamagedError(f"{path}: the manifest cannot be read ({error}); the next sync makes it anew") from error
    where, shard, listing = about.get("where"), about.get("shard"), about.get("listing")
    return Manifest(files, about["source"], about["created"], where, shard, listing)


def assign_sources(source_rows: Sequence[int], output_rows: Sequence[int]) -> list[list[int]]:
    """Return for each output file the positions of the source files whose rows it holds.

    Both are in row order and have the same number of rows in all. A source without rows goes with the
    output that holds the row before which it stood, so that none is forgotten.
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


def _batch(entries: Sequence[FileEntry], schema: pa.Schema) -> pa.RecordBatch:
    offsets = [0]
    flat: list[SourceFile] = []
    for entry in entries:
        flat.extend(entry.sources)
        offsets.append(len(flat))
    sources = pa.StructArray.from_arrays(
        [
            pa.array([file.path for file in flat], pa.string()),
            pa.array([file.identity.size for file in flat], pa.int64()),
            pa.array([file.identity.mtime_ns for file in flat], pa.int64()),
            pa.array([file.identity.tag for file in flat], pa.string()),
        ],
        fields=list(_SOURCE),
    )
    return pa.record_batch(
        [
            pa.array([entry.path for entry in entries], pa.string()),
            pa.array([entry.size for entry in entries], pa.int64()),
            pa.array([entry.rows for entry in entries], pa.int64()),
            pa.array([entry.row_groups for entry in entries], pa.int64()),
            pa.array([entry.recipe for entry in entries], pa.string()),
            pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), sources),
            pa.array([entry.checksum for entry in entries], pa.string()),
        ],
        schema=schema,
    )


def _entries(batch: pa.RecordBatch) -> Iterable[FileEntry]:
    column = batch["sources"]
    offsets = column.offsets.to_pylist()
    names = ("path", "size", "mtime_ns", "tag")
    columns: list[list[Any]] = [column.values.field(name).to_pylist() for name in names]
    flat = [SourceFile(p, Identity(s, m, t)) for p, s, m, t in zip(*columns, strict=True)]
    plain = [batch[name].to_pylist() for name in ("path", "size", "rows", "row_groups", "recipe")]
    recorded = "checksum" in batch.schema.names  # not in a snapshot from before there were checksums
    plain.append(batch["checksum"].to_pylist() if recorded else [""] * batch.num_rows)
    for i, (path, size, rows, row_groups, recipe, checksum) in enumerate(zip(*plain, strict=True)):
        sources = tuple(flat[offsets[i] : offsets[i + 1]])
        name = sources[0].path if len(sources) == 1 and sources[0].path == path else path  # one string, not two
        yield FileEntry(name, size, rows, row_groups, sources, recipe, checksum)
