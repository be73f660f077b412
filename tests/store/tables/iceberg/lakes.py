"""Iceberg tables for tests: of pyiceberg's SQL catalog on SQLite, with commits that pyiceberg itself cannot make."""

from __future__ import annotations

import io
import itertools
import os
import random
import time
import uuid
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.avro.decoder import StreamingBinaryDecoder
from pyiceberg.avro.encoder import BinaryEncoder
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.io.pyarrow import schema_to_pyarrow
from pyiceberg.manifest import (
    DataFile,
    DataFileContent,
    FileFormat,
    ManifestContent,
    ManifestEntry,
    ManifestEntryStatus,
    ManifestWriterV2,
    write_manifest_list,
)
from pyiceberg.table import Table
from pyiceberg.table.snapshots import Operation, Snapshot, Summary
from pyiceberg.table.update import AddSnapshotUpdate, SetSnapshotRefUpdate
from pyiceberg.typedef import Record

import pqcache

Row = tuple[tuple[str, str], ...]


@dataclass
class Lake:
    """A warehouse in a directory, and a catalog of it that pyiceberg's configuration calls ``lake``."""

    root: Path
    warehouse: str = ""
    properties: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        self.uri = f"sqlite:///{self.root}/catalog.db"
        warehouse = self.warehouse or f"file://{self.root}"
        self.catalog = SqlCatalog("lake", uri=self.uri, warehouse=warehouse, **self.properties)
        self.catalog.create_namespace("shop")

    def create(self, name: str, schema: Any, *, by: Iterable[str] = (), **properties: str) -> Table:
        """Return a new table ``shop.NAME``, partitioned by the values of columns."""
        table = self.catalog.create_table(f"shop.{name}", schema, properties=properties)
        with table.update_spec() as spec:
            for column in by:
                spec.add_identity(column)
        return table

    def configure(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Make ``iceberg://lake/...`` this catalog's, for pqcache in this process and in others."""
        home = self.root / "home"
        home.mkdir(exist_ok=True)
        values = {"type": "sql", "uri": self.uri, **self.properties}
        text = "".join(f"    {name}: {value}\n" for name, value in values.items() if not name.startswith("py-"))
        (home / ".pyiceberg.yaml").write_text(f"catalog:\n  lake:\n{text}")
        monkeypatch.setenv("PYICEBERG_HOME", str(home))


def local(uri: str) -> Path:
    """Return the path of a file of a local table."""
    return Path(uri.removeprefix("file://"))


def place(table: Table) -> str:
    """Return the directory of a local table."""
    return str(local(table.location()))


def rows(batches: Iterable[pa.RecordBatch]) -> list[Row]:
    """Return rows that can be compared, whatever their columns' order."""
    found = (row for batch in batches for row in batch.to_pylist())
    return sorted(tuple(sorted((name, repr(_plain(value))) for name, value in row.items())) for row in found)


def rows_of(cache: str | os.PathLike[str], **how: Any) -> list[Row]:
    """Return the rows of a cache as its loader reads them."""
    return rows(pqcache.Cache.open(cache).batches(shuffle=False, **how))


def rows_in(table: Table, snapshot: int | None = None, **how: Any) -> list[Row]:
    """Return the rows of a table as pyiceberg reads them."""
    return rows(table.refresh().scan(snapshot_id=snapshot, **how).to_arrow().to_batches())


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return sorted((name, _plain(inside)) for name, inside in value.items())
    if isinstance(value, list):
        return [_plain(inside) for inside in value]
    return value.bytes if isinstance(value, uuid.UUID) else value


_numbers = itertools.count()


def data_file(
    table: Table, data: pa.Table, partition: Sequence[Any] = (), *, ids: bool = True, **more: Any
) -> DataFile:
    """Write a data file of a table as another engine might: without metrics, and without field IDs if not ``ids``."""
    path = local(table.location()) / "data" / f"part-{next(_numbers)}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    if ids:
        fields = {field.name: field for field in schema_to_pyarrow(table.schema())}
        data = data.cast(pa.schema([fields[name] for name in data.column_names]))
    pq.write_table(data, path, row_group_size=max(1, data.num_rows // 3))
    return described(table, path, data.num_rows, partition, **more)


def position_deletes(table: Table, positions: Sequence[tuple[str, int]], partition: Sequence[Any] = ()) -> DataFile:
    """Write a position delete file: pairs of a data file and a row."""
    path = local(table.location()) / "data" / f"deletes-{next(_numbers)}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    ordered = sorted(positions)
    columns = {"file_path": [uri for uri, _ in ordered], "pos": pa.array([row for _, row in ordered], pa.int64())}
    pq.write_table(pa.table(columns), path, row_group_size=7)
    return described(table, path, len(ordered), partition, DataFileContent.POSITION_DELETES)


def described(
    table: Table,
    path: Path,
    count: int,
    partition: Sequence[Any] = (),
    content: DataFileContent = DataFileContent.DATA,
    **more: Any,
) -> DataFile:
    """Return a file as a manifest has it."""
    values = {"file_format": FileFormat.PARQUET, **more}
    file = DataFile.from_args(
        content=content,
        file_path=f"file://{path}",
        partition=Record(*partition),
        record_count=count,
        file_size_in_bytes=path.stat().st_size,
        **values,
    )
    file.spec_id = table.spec().spec_id
    return file


class _DeletesWriter(ManifestWriterV2):
    def content(self) -> ManifestContent:
        return ManifestContent.DELETES

    @property
    def _meta(self) -> dict[str, str]:
        return {**super()._meta, "content": "deletes"}


def commit(table: Table, files: Sequence[DataFile]) -> None:
    """Add data files and delete files to a table of version 2, in one snapshot."""
    table.refresh()
    current, number = table.current_snapshot(), random.getrandbits(62)
    sequence, metadata = table.metadata.last_sequence_number + 1, f"{table.location()}/metadata/{uuid.uuid4()}"
    manifests = []
    for deletes in (False, True):
        added = [file for file in files if (file.content != DataFileContent.DATA) == deletes]
        kind = _DeletesWriter if deletes else ManifestWriterV2
        output = table.io.new_output(f"{metadata}-m{int(deletes)}.avro")
        if added:
            with kind(table.spec(), table.schema(), output, number, "deflate") as writer:
                for file in added:
                    writer.add(ManifestEntry.from_args(status=ManifestEntryStatus.ADDED, data_file=file))
            manifests.append(writer.to_manifest_file())
    before = [] if current is None else current.manifests(table.io)
    parent = None if current is None else current.snapshot_id
    output = table.io.new_output(f"{metadata}.avro")
    with write_manifest_list(2, output, number, parent, sequence, "deflate") as list_writer:
        list_writer.add_manifests([*manifests, *before])
    snapshot = Snapshot(
        snapshot_id=number,
        parent_snapshot_id=parent,
        sequence_number=sequence,
        timestamp_ms=max(int(time.time() * 1000), table.metadata.last_updated_ms),
        manifest_list=output.location,
        summary=Summary(Operation.OVERWRITE),
        schema_id=table.schema().schema_id,
    )
    ref = SetSnapshotRefUpdate(ref_name="main", type="branch", snapshot_id=number)
    table._do_commit((AddSnapshotUpdate(snapshot=snapshot), ref), ())
    table.refresh()


def change_blocks(path: Path, change: Callable[[int, bytes], tuple[int, bytes]]) -> None:
    """Write an Avro file again, with what ``change`` makes of the number of entries and the data of each block."""
    data = path.read_bytes()
    marker = data[-16:]
    start, out = data.index(marker) + 16, io.BytesIO()
    blocks, encoder = StreamingBinaryDecoder(data[start:]), BinaryEncoder(out)
    while blocks.tell() < len(data) - start:
        count, block = change(blocks.read_int(), zlib.decompress(blocks.read_bytes(), -15))
        blocks.read(16)
        deflate = zlib.compressobj(wbits=-15)
        encoder.write_int(count)
        encoder.write_bytes(deflate.compress(block) + deflate.flush())
        encoder.write(marker)
    path.write_bytes(data[:start] + out.getvalue())


def as_avro(text: str, length: int | None = None) -> bytes:
    """Return a text as Avro has it, with its own length before it or another one."""
    out = io.BytesIO()
    BinaryEncoder(out).write_int(len(text) if length is None else length)
    return out.getvalue() + text.encode()
