"""The rows of a Delta table's files that deletion vectors delete; deltalake decodes the vectors.

The library gives the vectors of a whole table only, from files beside the table's. So a vector is read through
pqcache's own drivers when its file is downloaded, and the library reads it in a table of that one file.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

from pqcache.errors import SourceError, first_line
from pqcache.store.tables.delta_log import LOG

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_Z85 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
_BASE85 = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~"
_INLINE, _RELATIVE = "i", "u"
_FRAME = 8  # bytes around a vector in a file: its length before it, a checksum after it
_VERSION = b"\x01"  # of the format of such a file
_ONE_COLUMN = {"type": "struct", "fields": [{"name": "a", "type": "long", "nullable": True, "metadata": {}}]}

ReadBytes = Callable[[str, int, int], bytes]  # of what is at a path or URL that the log has: offset and length


@dataclass(frozen=True, kw_only=True)
class DeletionVector:
    """Which rows of a file are deleted, as the log describes it.

    Attributes:
        descriptor: the log's ``deletionVector`` of the file.
        rows_in_file: how many rows the file has, deleted ones included.
        file: the URL of the file, for errors.
        read: reads what the descriptor names.
    """

    descriptor: Mapping[str, Any]
    rows_in_file: int
    file: str
    read: ReadBytes

    @property
    def id(self) -> str:
        """A text that is the vector's own among those of its table."""
        about = self.descriptor
        return f"{about['storageType']}{about['pathOrInlineDv']}@{about.get('offset')}"

    def deleted_rows(self) -> npt.NDArray[np.int64]:
        """Return the positions of the deleted rows, ascending; raises SourceError."""
        import tempfile  # as those below: a table without deletion vectors needs none of them

        import numpy as np
        import pyarrow as pa

        about = dict(self.descriptor)
        with tempfile.TemporaryDirectory(prefix="pqcache-delta-") as directory:
            if about["storageType"] != _INLINE:
                path, offset = _place(about), int(about.get("offset") or 0)
                data = self.read(path, offset, int(about["sizeInBytes"]) + _FRAME)
                local = Path(directory, "vector.bin")
                local.write_bytes(_VERSION + data)
                about |= {"storageType": "p", "pathOrInlineDv": local.as_uri(), "offset": len(_VERSION)}
            table = _vectors_of(directory, about, self.rows_in_file, self.file)
        kept = pa.table(table)["selection_vector"].combine_chunks().flatten()
        deleted = np.flatnonzero(~kept.to_numpy(zero_copy_only=False))
        if len(deleted) != about["cardinality"]:
            reason = f"its deletion vector deletes {len(deleted):,} rows, and {about['cardinality']:,} in the log"
            raise SourceError(self.file, reason, "check the table with the engine that wrote it")
        return deleted


def descriptors(log: Path, version: int) -> dict[str, Mapping[str, Any]]:
    """Return the log's ``deletionVector`` of each file that has one, by the file's path in the log.

    The library tells neither which files have one nor where it is, but writes it into a checkpoint. So ``log``, a copy
    of the table's log or of links to it, gets an empty commit after ``version``, and a checkpoint.
    """
    import pyarrow.parquet as pq
    from deltalake import DeltaTable

    commit = {"commitInfo": {"timestamp": 0, "inCommitTimestamp": 0, "operation": "pqcache"}}
    (log / f"{version + 1:020}.json").write_text(json.dumps(commit) + "\n")
    DeltaTable(str(log.parent), version=version + 1).create_checkpoint()
    with pq.ParquetFile(log / f"{version + 1:020}.checkpoint.parquet") as file:
        rows: list[Mapping[str, Any] | None] = file.read(["add.path", "add.deletionVector"])["add"].to_pylist()
    return {row["path"]: row["deletionVector"] for row in rows if row is not None and row["deletionVector"]}


def _place(about: Mapping[str, Any]) -> str:
    """Return where a vector is: relative to its table, or an absolute URL."""
    text = str(about["pathOrInlineDv"])
    if about["storageType"] != _RELATIVE:
        return text
    prefix, encoded = text[:-20], text[-20:]
    name = UUID(bytes=base64.b85decode(encoded.translate(str.maketrans(_Z85, _BASE85))))
    return f"{prefix}/deletion_vector_{name}.bin" if prefix else f"deletion_vector_{name}.bin"


def _vectors_of(directory: str, descriptor: Mapping[str, Any], rows: int, file: str) -> Any:
    """Return what the library reads of the deletion vector of a table in ``directory`` that has one file."""
    from deltalake import DeltaTable

    feature = ["deletionVectors"]
    protocol = {"minReaderVersion": 3, "minWriterVersion": 7, "readerFeatures": feature, "writerFeatures": feature}
    metadata = {
        "id": "pqcache",
        "format": {"provider": "parquet", "options": {}},
        "schemaString": json.dumps(_ONE_COLUMN),
        "partitionColumns": [],
        "configuration": {},
    }
    add = {
        "path": "file.parquet",
        "partitionValues": {},
        "size": 1,
        "modificationTime": 0,
        "dataChange": True,
        "stats": json.dumps({"numRecords": rows}),
        "deletionVector": dict(descriptor),
    }
    os.mkdir(os.path.join(directory, LOG))
    actions = [{"protocol": protocol}, {"metaData": metadata}, {"add": add}]
    Path(directory, LOG, f"{0:020}.json").write_text("\n".join(map(json.dumps, actions)) + "\n")
    try:
        return DeltaTable(directory).deletion_vectors().read_all()
    except Exception as error:
        reason = f"its deletion vector cannot be read ({first_line(error)})"
        raise SourceError(file, reason, "check the table with the engine that wrote it") from error
