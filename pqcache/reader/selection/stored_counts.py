"""What was counted of a snapshot's row groups, stored beside it; and how row groups are read to count."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import pyarrow as pa

from pqcache.errors import MALFORMED
from pqcache.reader.arriving.arrival_queue import arrival_queue
from pqcache.reader.files import Files
from pqcache.reader.open_dataset import LocalDataset
from pqcache.store.layout import ROW_GROUPS
from pqcache.store.selected_rows import Ints
from pqcache.system.disk import read_regular, write_durably
from pqcache.system.fork_safe_threads import ForkSafeThreadPool
from pqcache.system.process_stats import cpu_count

COUNTS = "_pqcache/counts"
FORMAT = 1
log = logging.getLogger("pqcache.reader")

Found = TypeVar("Found")
Counts = dict[str, pa.Table]  # what was counted, by the name of what it is of


def count_once(
    data: LocalDataset, name: str, groups: Ints, known: Counts | None, count: Callable[[], pa.Table]
) -> pa.Table:
    """Return what ``count`` returns of row groups ``groups``: as known, as stored beside the snapshot, or counted now.

    ``name`` is a file name, the same only for the same count. What is counted is stored, and added to ``known``.
    """
    known = {} if known is None else known
    key = f"{name}-{hashlib.blake2b(groups.tobytes(), digest_size=8).hexdigest()}"
    if key not in known:
        path = data.root / COUNTS / f"{name}.arrow"
        in_snapshot = (data.root / ROW_GROUPS).is_file()  # nothing is written to other directories
        found = _read(path, groups) if in_snapshot else None
        if found is None:
            found = count()
            if in_snapshot:
                _write(path, groups, found)
        known[key] = found
    return known[key]


def map_row_groups(
    data: LocalDataset, columns: Sequence[str], groups: Ints, use: Callable[[int, Iterable[pa.Table]], Found]
) -> list[Found]:
    """Return what ``use`` returns of each row group and the parts of its ``columns``, read on all cores.

    Row groups that are still arriving are waited for.
    """
    files = Files(data)

    def call(number: int) -> Found:
        def used() -> Found:
            return use(int(groups[number]), files.parts(files.group(int(groups[number])), columns))

        return data.while_moving(used)

    with (
        ForkSafeThreadPool(cpu_count()) as pool,
        data.wanting(groups, columns),
        arrival_queue(data.arrivals, groups, columns, pool) as arrivals,
    ):
        numbers = range(len(groups))
        if arrivals is None:
            return list(pool.map(call, numbers))
        calls = [arrivals.submit(number, call, number) for number in numbers]
        return [arrivals.result(job) for job in calls]


def _read(path: Path, groups: Ints) -> pa.Table | None:
    """Return what is stored of these row groups, or None where there is nothing, or nothing valid."""
    try:
        table = pa.ipc.open_file(pa.BufferReader(read_regular(path))).read_all()
        about = json.loads((table.schema.metadata or {})[b"pqcache"])
        if about["format"] != FORMAT or about["checksum"] != _checksum(groups, table):
            log.debug("%s: rows are counted again: the file is of another format or other row groups", path)
            return None
        return table.replace_schema_metadata(None)
    except FileNotFoundError:
        return None
    except (pa.ArrowException, OSError, *MALFORMED) as error:
        log.debug("%s: rows are counted again: %s", path, error)
        return None


def _write(path: Path, groups: Ints, table: pa.Table) -> None:
    """Store counts; where that is not possible, as in a cache that others own, they are counted again next time."""
    about = {"pqcache": json.dumps({"format": FORMAT, "checksum": _checksum(groups, table)})}
    sink = pa.BufferOutputStream()
    table = table.replace_schema_metadata(about)
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    try:
        path.parent.mkdir(exist_ok=True)
        write_durably(path, sink.getvalue().to_pybytes(), path.parent)
    except OSError as error:
        log.debug("%s: counts of rows are not stored: %s", path, error)


def _checksum(groups: Ints, table: pa.Table) -> str:
    digest = hashlib.blake2b(groups.tobytes(), digest_size=8)
    for column in table.columns:
        if pa.types.is_integer(column.type):
            digest.update(np.ascontiguousarray(column.to_numpy()).tobytes())
        else:
            digest.update(json.dumps([str(value) for value in column.to_pylist()]).encode())
    return digest.hexdigest()
