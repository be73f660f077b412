"""Delta tables for tests: what deltalake cannot write is written as Delta's protocol says."""

from __future__ import annotations

import base64
import json
import os
import struct
import uuid
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable

import pqcache
from pqcache.store.tables.deletion_vector import _BASE85, _Z85


def field(name: str, kind: Any, **metadata: Any) -> dict[str, Any]:
    """A column of a schema."""
    return {"name": name, "type": kind, "nullable": True, "metadata": metadata}


def metadata(fields: Sequence[Mapping[str, Any]], by: Sequence[str] = (), **configuration: str) -> dict[str, Any]:
    """The action that gives a table its schema and its properties, named without ``delta.``."""
    return {
        "metaData": {
            "id": "table",
            "format": {"provider": "parquet", "options": {}},
            "schemaString": json.dumps({"type": "struct", "fields": list(fields)}),
            "partitionColumns": list(by),
            "configuration": {f"delta.{key.replace('__', '.')}": value for key, value in configuration.items()},
            "createdTime": 0,
        }
    }


def protocol(*features: str, reader: int = 3) -> dict[str, Any]:
    """The action that says what a reader has to know."""
    if not features:
        return {"protocol": {"minReaderVersion": min(reader, 2), "minWriterVersion": 5}}
    named = {"readerFeatures": list(features), "writerFeatures": list(features)}
    return {"protocol": {"minReaderVersion": reader, "minWriterVersion": 7, **named}}


def add(table: Path, name: str, rows: pa.Table | None = None, path: str = "", **more: Any) -> dict[str, Any]:
    """The action that adds a file, which is written if ``rows`` are given; the log knows it as ``path``."""
    file = table / name
    if rows is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(rows, file)
    status = file.stat()
    return {
        "add": {
            "path": path or name,
            "partitionValues": {},
            "size": status.st_size,
            "modificationTime": int(status.st_mtime * 1000),
            "dataChange": True,
            "stats": json.dumps({"numRecords": pq.read_metadata(file).num_rows}),
            **more,
        }
    }


def remove(name: str, vector: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The action that removes a file."""
    of_vector = {} if vector is None else {"deletionVector": vector}
    return {"remove": {"path": name, "deletionTimestamp": 1, "dataChange": True, **of_vector}}


def commit(table: Path, version: int, *actions: Mapping[str, Any]) -> None:
    """Write a commit."""
    log = table / "_delta_log"
    log.mkdir(parents=True, exist_ok=True)
    (log / f"{version:020}.json").write_text("".join(json.dumps(action) + "\n" for action in actions))


def roaring(rows: Sequence[int]) -> bytes:
    """A 64-bit roaring bitmap as Delta stores it: an array for each 65,536 rows, or a bitmap of more than 4,096."""
    chunks: dict[int, list[int]] = {}
    for row in sorted(rows):
        chunks.setdefault(row >> 16, []).append(row & 0xFFFF)
    header = b"".join(struct.pack("<HH", key, len(values) - 1) for key, values in chunks.items())
    body, offsets = b"", []
    for values in chunks.values():
        offsets.append(8 + len(header) + 4 * len(chunks) + len(body))
        if len(values) > 4096:
            body += sum(1 << value for value in values).to_bytes(8192, "little")
        else:
            body += struct.pack(f"<{len(values)}H", *values)
    inner = struct.pack("<II", 12346, len(chunks)) + header + struct.pack(f"<{len(chunks)}I", *offsets) + body
    return struct.pack("<IQI", 1681511377, 1, 0) + inner


def z85(data: bytes) -> str:
    """Text of bytes in Z85."""
    return base64.b85encode(data).decode().translate(str.maketrans(_BASE85, _Z85))


def vector(table: Path, rows: Sequence[int], kind: str = "u", prefix: str = "") -> dict[str, Any]:
    """Return the descriptor of a deletion vector: in a file of its table's (u), at an absolute path (p), inline (i)."""
    data = roaring(rows)
    about = {"storageType": kind, "sizeInBytes": len(data), "cardinality": len(rows)}
    if kind == "i":
        padded = data + bytes(-len(data) % 4)
        return {**about, "pathOrInlineDv": z85(padded)}
    name = uuid.uuid4()
    file = table / prefix / f"deletion_vector_{name}.bin"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(b"\x01" + struct.pack(">I", len(data)) + data + struct.pack(">I", zlib.crc32(data)))
    place = file.as_uri() if kind == "p" else prefix + z85(name.bytes)
    return {**about, "pathOrInlineDv": place, "offset": 1}


def held(cache: str | os.PathLike[str], **options: Any) -> list[dict[str, Any]]:
    """The rows that a cache has, sorted, and so are their columns."""
    batches = pqcache.Cache.open(cache).batches(shuffle=False, **options)
    return in_order(row for batch in batches for row in batch.to_pylist())


def judged(table: str | os.PathLike[str], version: int | None = None) -> list[dict[str, Any]]:
    """The rows that deltalake reads, as `held` sorts them."""
    return in_order(pa.table(DeltaTable(table, version=version).scan().read_all()).to_pylist())


def in_order(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows sorted, and their columns, and the fields of structs."""

    def in_names(value: Any) -> Any:
        return {key: in_names(value[key]) for key in sorted(value)} if isinstance(value, dict) else value

    return sorted(map(in_names, rows), key=repr)
