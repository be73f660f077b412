"""A local copy of the part of a Delta table's log that makes one version, for deltalake to read there."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

from pqcache.errors import ParquetError, SourceUnavailable, first_line
from pqcache.events import OnEvent
from pqcache.store.drivers.base import Source
from pqcache.store.drivers.retries import Patience, with_retries
from pqcache.store.manifest import SourceFile
from pqcache.store.tables.delta_log import LOG, SIDECARS, DeltaLog

_THREADS = 8


def copy_log(
    source: Source, log: DeltaLog, files: Sequence[SourceFile], directory: Path, patience: Patience, on_event: OnEvent
) -> None:
    """Copy ``files`` of a log, and the sidecars that a checkpoint among them names, to ``directory``.

    Raises SourceNotFound where one is gone by now.
    """
    target = directory / LOG

    def copy(file: SourceFile) -> None:
        with_retries(lambda: _copy(source, file, target / file.path), source.url_of(file.path), patience, on_event)

    with ThreadPoolExecutor(_THREADS, thread_name_prefix="pqcache-log") as threads:
        (target / SIDECARS).mkdir(parents=True)
        list(threads.map(copy, files))
        if log.sidecars:
            names = [name for file in files if ".checkpoint." in file.path for name in _sidecars(target / file.path)]
            list(threads.map(copy, [log.sidecars[name] for name in names if name in log.sidecars]))


def link_log(root: str, log: DeltaLog, files: Iterable[SourceFile], directory: Path) -> None:
    """Make links in ``directory`` to ``files`` of the local log ``root``, and to all sidecars."""
    target = directory / LOG
    (target / SIDECARS).mkdir(parents=True)
    for file in (*files, *log.sidecars.values()):
        os.symlink(os.path.join(root, file.path), target / file.path)


def _copy(source: Source, file: SourceFile, target: Path) -> None:
    written = 0
    with target.open("wb") as out:
        for data in source.read(file.path, 0, file.identity.size, file.identity.tag):
            written += out.write(data)
    if written != file.identity.size:
        reason = f"{written:,} of {file.identity.size:,} bytes came"
        raise SourceUnavailable(source.url_of(file.path), reason)


def _sidecars(checkpoint: Path) -> list[str]:
    """Return the names of the sidecars that a checkpoint names."""
    if checkpoint.suffix == ".json":
        actions = [json.loads(line) for line in checkpoint.read_text().splitlines() if line.strip()]
        return [PurePosixPath(action["sidecar"]["path"]).name for action in actions if action.get("sidecar")]
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(checkpoint) as file:
            if "sidecar" not in file.schema_arrow.names:
                return []
            found = file.read(["sidecar.path"])["sidecar"].to_pylist()
    except (pa.ArrowException, OSError) as error:
        reason = f"is a checkpoint that cannot be read ({first_line(error)})"
        raise ParquetError(checkpoint.name, reason, "check the table with the engine that wrote it") from error
    return [PurePosixPath(row["path"]).name for row in found if row is not None]
