"""Numbers that are counted once and kept beside the snapshot that they are about."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pqcache.errors import MALFORMED
from pqcache.reader.open_dataset import LocalDataset
from pqcache.reader.selection.stored_counts import COUNTS
from pqcache.store.layout import ROW_GROUPS
from pqcache.system.disk import check_regular, write_durably

FORMAT = 1
log = logging.getLogger("pqcache.reader")

SmallInts = npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class StoredNumbers:
    """Numbers in the file ``name`` beside the snapshot ``data``, mapped into memory; or those that are ``in_memory``.

    A pickle holds no dataset: give it the one that is open where it is unpickled, with `of`.
    """

    name: str | None
    in_memory: SmallInts | None = None
    data: LocalDataset | None = None

    @cached_property
    def values(self) -> SmallInts:
        """The numbers."""
        if self.in_memory is not None:
            return self.in_memory
        assert self.name is not None
        assert self.data is not None
        data, name = self.data, self.name
        return data.while_moving(lambda: _read(_path(data, name))[0])  # a snapshot that arrives is published elsewhere

    def of(self, data: LocalDataset) -> StoredNumbers:
        """Return the same numbers, of an opened dataset."""
        return replace(self, data=data)

    def __getstate__(self) -> dict[str, Any]:
        return {"name": self.name, "in_memory": self.in_memory, "data": None}


def stored_numbers(data: LocalDataset, name: str, make: Callable[[], SmallInts]) -> StoredNumbers:
    """Return the numbers called ``name`` of a snapshot; those that are not there are made, and stored if possible.

    They are kept in memory for a dataset that is no snapshot, and where a snapshot cannot be written to.
    """
    if not (data.root / ROW_GROUPS).is_file():
        return StoredNumbers(None, make())
    if _is_valid(_path(data, name)):
        return StoredNumbers(name, data=data)
    numbers = make()
    is_stored = _write(_path(data, name), numbers)
    return StoredNumbers(name, data=data) if is_stored else StoredNumbers(None, numbers)


def _path(data: LocalDataset, name: str) -> Path:
    return data.root / COUNTS / f"{name}.arrow"


def _is_valid(path: Path) -> bool:
    try:
        numbers, about = _read(path)
        if about["format"] == FORMAT and about["checksum"] == _checksum(numbers):
            return True
        log.debug("%s: counted again: the file is of another format or damaged", path)
    except FileNotFoundError:
        pass
    except (pa.ArrowException, OSError, *MALFORMED) as error:
        log.debug("%s: counted again: %s", path, error)
    return False


def _read(path: Path) -> tuple[SmallInts, dict[str, Any]]:
    check_regular(path)
    with pa.memory_map(str(path)) as file:
        table = pa.ipc.open_file(file).read_all()
    column = table.column("numbers").combine_chunks()
    numbers = column.chunk(0) if isinstance(column, pa.ChunkedArray) else column
    return numbers.to_numpy(), json.loads((table.schema.metadata or {})[b"pqcache"])


def _write(path: Path, numbers: SmallInts) -> bool:
    about = {"pqcache": json.dumps({"format": FORMAT, "checksum": _checksum(numbers)})}
    batch = pa.record_batch({"numbers": numbers}, metadata=about)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)
    try:
        path.parent.mkdir(exist_ok=True)
        write_durably(path, sink.getvalue(), path.parent)
    except OSError as error:
        log.debug("%s: not stored: %s", path, error)
        return False
    return True


def _checksum(numbers: SmallInts) -> str:
    return hashlib.blake2b(numbers.tobytes(), digest_size=8).hexdigest()
