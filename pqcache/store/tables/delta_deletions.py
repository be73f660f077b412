"""The rows of a Delta table's files that deletion vectors delete.

The library gives the vectors of a whole table only, from files beside the table's. So a vector is read through
pqcache's own drivers when its file is downloaded.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

from pqcache.errors import SourceError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_Z85 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
_BASE85 = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~"
_INLINE, _RELATIVE = "i", "u"
_MAX_SIZE = 1 << 28  # bytes
_CHECK = "check the table with the engine that wrote it"

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
        from pqcache.store.tables.deletion_vector import FRAME, deleted_positions, unframed  # few tables have any

        about = self.descriptor
        try:
            size = int(about["sizeInBytes"])
            if about["storageType"] == _INLINE:
                vector = _decoded(str(about["pathOrInlineDv"]))[:size]
            else:
                place, offset = _place(about), int(about.get("offset") or 0)
                vector = unframed(self.read(place, offset, min(size, _MAX_SIZE) + FRAME))
                if len(vector) != size:
                    raise ValueError(f"it has {len(vector):,} bytes, and {size:,} in the log")
            deleted = deleted_positions(vector)
        except ValueError as error:
            raise SourceError(self.file, f"its deletion vector is damaged: {error}", _CHECK) from error
        if len(deleted) != about["cardinality"]:
            reason = f"its deletion vector deletes {len(deleted):,} rows, and {about['cardinality']:,} in the log"
            raise SourceError(self.file, reason, _CHECK)
        if len(deleted) and deleted[-1] >= self.rows_in_file:
            reason = f"its deletion vector deletes row {deleted[-1]:,}, and it has {self.rows_in_file:,} by the log"
            raise SourceError(self.file, reason, _CHECK)
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
    name = UUID(bytes=_decoded(encoded))
    return f"{prefix}/deletion_vector_{name}.bin" if prefix else f"deletion_vector_{name}.bin"


def _decoded(text: str) -> bytes:
    return base64.b85decode(text.translate(str.maketrans(_Z85, _BASE85)))
