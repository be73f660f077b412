"""The manifest's file: ``_pqcache/files.arrow`` (Arrow IPC), one row per file in path order."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa

from pqcache.errors import MALFORMED, CacheError, DamagedError
from pqcache.store.manifest import FORMAT, FileEntry, Identity, Manifest, SourceFile, TableVersion
from pqcache.system.disk import check_regular

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
        ("since", pa.int64()),
    ]
)


def write_manifest(manifest: Manifest, path: Path) -> None:
    """Write a manifest; the caller makes it durable."""
    about = {
        "format": FORMAT,
        "source": manifest.source,
        "created": manifest.created,
        "where": manifest.where,
        "shard": manifest.shard,
        "listing": manifest.listing,
        "table": None if manifest.table is None else _as_json(manifest.table),
    }
    schema = _SCHEMA.with_metadata({"pqcache": json.dumps(about)})
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        for start in range(0, len(manifest.files), 10_000):
            writer.write_batch(_batch(manifest.files[start : start + 10_000], schema))


def read_manifest(path: Path) -> Manifest:
    """Read a manifest; raises CacheError if it is missing, damaged or of a newer format."""
    return _read(path, lambda: _opened(path))


def read_heading(path: Path) -> Manifest:
    """Read a manifest without its files; raises like ``read_manifest``."""
    return _read(path, lambda: _opened(path), with_files=False)


def newest_time(path: Path) -> float | None:
    """The time of the newest source file, or of the table's commit, in seconds since 1970.

    None if neither is known. Raises like ``read_manifest``.
    """
    table = read_heading(path).table
    try:
        with _opened(path) as file, pa.ipc.open_file(file) as reader:
            batches = map(reader.get_batch, range(reader.num_record_batches))
            found = [batch["sources"].values.field("mtime_ns").to_numpy() for batch in batches]
    except (pa.ArrowException, OSError, *MALFORMED) as error:
        raise DamagedError(path, f"the manifest cannot be read ({error})", "the next sync builds it again") from error
    if newest := max((int(times.max()) for times in found if len(times)), default=0):
        return newest / 1e9
    return datetime.fromisoformat(table.time).timestamp() if table is not None and table.time else None


def parse_manifest(data: bytes, name: str) -> Manifest:
    """Parse the bytes of a manifest; raises like ``read_manifest``, about ``name``.

    Values are checked first, as pyarrow would follow any offset in untrusted data.
    """
    return _read(name, lambda: pa.BufferReader(data), validate=True)


def _opened(path: Path) -> pa.NativeFile:
    check_regular(path)
    return pa.OSFile(str(path), "rb")


def _read(
    path: Path | str, open_file: Callable[[], pa.NativeFile], with_files: bool = True, validate: bool = False
) -> Manifest:
    try:
        with open_file() as file, pa.ipc.open_file(file) as reader:
            about = json.loads((reader.schema.metadata or {}).get(b"pqcache", b"{}"))
            if about.get("format") != FORMAT:
                found, reason = about.get("format"), f"written in format {about.get('format')}"
                newer = isinstance(found, int) and found > FORMAT
                advice = "upgrade pqcache, or sync into a new directory" if newer else "sync into a new directory"
                raise CacheError(path, f"{reason}, this pqcache reads format {FORMAT}", advice)
            batches = [reader.get_batch(i) for i in range(reader.num_record_batches if with_files else 0)]
            if validate:
                for batch in batches:
                    batch.validate(full=True)
            _check_schema(reader.schema)
            files = tuple(entry for batch in batches for entry in _entries(batch))
        return Manifest(
            files=files,
            source=about["source"],
            created=about["created"],
            where=about.get("where"),
            shard=about.get("shard"),
            listing=about.get("listing"),
            table=_table_of(about.get("table")),
        )
    except PermissionError as error:
        raise CacheError(path, "permission denied", "make it readable for this user") from error
    except (pa.ArrowException, OSError, *MALFORMED) as error:
        raise DamagedError(path, f"the manifest cannot be read ({error})", "the next sync builds it again") from error


def _check_schema(schema: pa.Schema) -> None:
    if not schema.equals(_SCHEMA):
        raise TypeError(f"its columns are {', '.join(schema.names)}, or of other types")


def schema_of_table(table: TableVersion | None) -> pa.Schema | None:
    """The schema of the table, None without one or if it is unknown."""
    schema = b"" if table is None else table.arrow_schema
    return pa.ipc.read_schema(pa.py_buffer(schema)) if schema else None


def _as_json(table: TableVersion) -> dict[str, str]:
    schema = base64.b64encode(table.arrow_schema).decode()
    return {
        "format": table.format,
        "version": table.version,
        "time": table.time,
        "schema": schema,
        "schema_digest": table.schema_digest,
    }


def _table_of(values: dict[str, str] | None) -> TableVersion | None:
    """Parse a table's version, ignoring fields of later versions of pqcache."""
    if values is None:
        return None
    return TableVersion(
        format=values["format"],
        version=values["version"],
        time=values["time"],
        schema=base64.b64decode(values["schema"]),
        schema_digest=values.get("schema_digest", ""),
    )


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
            pa.array([entry.since for entry in entries], pa.int64()),
        ],
        schema=schema,
    )


def _entries(batch: pa.RecordBatch) -> Iterable[FileEntry]:
    column = batch["sources"]
    offsets = column.offsets.to_pylist()
    names = ("path", "size", "mtime_ns", "tag")
    columns: list[list[Any]] = [column.values.field(name).to_pylist() for name in names]
    flat = [SourceFile(p, Identity(s, m, t)) for p, s, m, t in zip(*columns, strict=True)]
    plain = [batch[name].to_pylist() for name in ("path", "size", "rows", "row_groups", "since", "recipe", "checksum")]
    if any(None in values for values in (*columns, *plain)):
        raise ValueError("it has nulls")
    if any(min(values) < 0 for values in (columns[1], *plain[1:5]) if values):
        raise ValueError("it has negative numbers")
    for i, (path, size, rows, row_groups, since, recipe, checksum) in enumerate(zip(*plain, strict=True)):
        sources = tuple(flat[offsets[i] : offsets[i + 1]])
        name = sources[0].path if len(sources) == 1 and sources[0].path == path else path  # one string, not two
        yield FileEntry(
            path=name,
            size=size,
            rows=rows,
            row_groups=row_groups,
            sources=sources,
            recipe=recipe,
            checksum=checksum,
            since=since,
        )
