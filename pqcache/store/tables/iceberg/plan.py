"""Which files a snapshot of a table has, and which delete files count for each: what pyiceberg plans for a scan."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pyiceberg.avro.file import AvroFile
from pyiceberg.catalog.noop import NoopCatalog
from pyiceberg.manifest import DataFile, DataFileContent, ManifestContent, ManifestFile
from pyiceberg.table import FileScanTask, Table
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.snapshots import Snapshot
from pyiceberg.typedef import Record
from pyiceberg.types import StructType

from pqcache.errors import UsageError
from pqcache.store.tables.iceberg.deletes import DeleteFile
from pqcache.store.tables.iceberg.errors import parquet_only
from pqcache.store.tables.iceberg.file_io import ACCESS, StoreFileIO, TableAccess
from pqcache.store.urls import printable

_PUFFIN = "PUFFIN"
_STATUS, _DATA_FILE, _PATH, _REFERENCED, _OFFSET, _SIZE = 0, 2, 100, 143, 144, 145  # field IDs in manifests
_DELETED = 2


@dataclass(frozen=True)
class PlannedFile:
    """A data file, and what deletes rows of it."""

    file: DataFile
    deletes: tuple[DeleteFile, ...]


def planned_files(metadata: TableMetadata, snapshot: Snapshot, access: TableAccess, url: str) -> list[PlannedFile]:
    """Return the data files of a snapshot; raises UsageError where one, or what deletes its rows, cannot be read right.

    May raise what pyiceberg raises about damaged metadata.
    """
    io = StoreFileIO({ACCESS: access})
    table = Table(
        identifier=("table",), metadata=metadata, metadata_location="", io=io, catalog=NoopCatalog("none")
    )  # without its catalog, which might plan by itself
    try:
        tasks = list(table.scan(snapshot_id=snapshot.snapshot_id).plan_files())
    except ValueError:
        _refuse_equality_deletes(snapshot.manifests(io), io, url)
        raise
    deleted = {delete.file_path: _format(delete) for task in tasks for delete in task.delete_files}
    vectors = {}
    if _PUFFIN in deleted.values():
        vectors = _deletion_vectors(snapshot.manifests(io), io)
    return [_planned(task, vectors) for task in tasks]


def _planned(task: FileScanTask, vectors: dict[tuple[str, str], DeleteFile]) -> PlannedFile:
    file = task.file
    parquet_only("data file", _format(file), file.file_path)
    deletes = []
    for delete in task.delete_files:
        if _format(delete) == _PUFFIN:  # which has vectors of several data files
            if (vector := vectors.get((delete.file_path, file.file_path))) is not None:
                deletes.append(vector)
        else:
            parquet_only("delete file", _format(delete), delete.file_path)
            deletes.append(DeleteFile(delete.file_path))
    for one in (file, *task.delete_files):
        if one.key_metadata is not None:
            reason = "is an encrypted file of an Iceberg table, which cannot be read"
            raise UsageError(printable(one.file_path), reason, "write the table without encryption")
    return PlannedFile(file, tuple(sorted(deletes)))


def _format(file: DataFile) -> str:
    return str(getattr(file.file_format, "value", file.file_format)).upper()


def _refuse_equality_deletes(manifests: Iterable[ManifestFile], io: StoreFileIO, url: str) -> None:
    """Raise UsageError where one of the manifests has equality deletes, which pyiceberg does not apply."""
    for manifest in manifests:
        if manifest.content != ManifestContent.DELETES:
            continue
        for entry in manifest.fetch_manifest_entry(io):
            if entry.data_file.content == DataFileContent.EQUALITY_DELETES:
                raise UsageError(
                    url,
                    f"deletes rows by their values (equality deletes: {printable(entry.data_file.file_path)}), which "
                    "pqcache cannot apply",
                    "write its files again with Spark: CALL CATALOG.system.rewrite_data_files(table => 'NAME', options "
                    "=> map('delete-file-threshold', '1', 'remove-dangling-deletes', 'true'))",
                )


def _deletion_vectors(manifests: Sequence[ManifestFile], io: StoreFileIO) -> dict[tuple[str, str], DeleteFile]:
    """Return the deletion vectors by Puffin file and data file, with where they are: pyiceberg leaves that out."""
    found = {}
    for manifest in manifests:
        if manifest.content != ManifestContent.DELETES:
            continue
        with AvroFile[Record](io.new_input(manifest.manifest_path)) as reader:
            struct = reader.schema.find_type(_DATA_FILE)
            assert isinstance(struct, StructType)
            top = {field.field_id: position for position, field in enumerate(reader.schema.fields)}
            inside = {field.field_id: position for position, field in enumerate(struct.fields)}
            if not inside.keys() >= {_REFERENCED, _OFFSET, _SIZE}:
                continue  # written before there were any
            for entry in reader:
                file = entry[top[_DATA_FILE]]
                path, referenced, offset, size = (file[inside[key]] for key in (_PATH, _REFERENCED, _OFFSET, _SIZE))
                if entry[top[_STATUS]] != _DELETED and size:
                    found[path, referenced] = DeleteFile(path, offset, size)
    return found
