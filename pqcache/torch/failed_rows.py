"""The rows for which a transform raised an error and others came in their place, over all workers."""

from __future__ import annotations

import json
import logging
import os
import tempfile
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from pqcache.system.locks import try_lock

log = logging.getLogger("pqcache.torch")

_PREFIX, _SUFFIX = "pqcache-errors-", ".jsonl"
_YOUNG = 60  # seconds
_MOST_TEXT = 500  # characters of an error that are kept


@dataclass(frozen=True, kw_only=True)
class FailedRow:
    """A row for which the transform raised ``error``, in batch (or row) ``index`` of ``epoch``.

    ``row`` is its position in row group ``row_group`` of ``file``; with a filter it counts the rows that meet it, with
    weights each as often as it comes, and of packed documents it is the sequence. It is -1 where no row failed by
    itself, but all of the batch together; then file and row group are those of its first row.
    """

    epoch: int
    index: int
    file: str
    row_group: int
    row: int
    error: str

    def __str__(self) -> str:
        what = f"row {self.row}" if self.row >= 0 else "and others, together"
        return f"{self.file}, row group {self.row_group}, {what}: {self.error}"


class FailureLog:
    """Failed rows in a temporary file, to which the workers append; it is removed with the dataset that made it.

    The file is locked while that dataset exists. Those of killed processes are removed when the next one is made.
    """

    def __init__(self) -> None:
        _remove_abandoned(Path(tempfile.gettempdir()))
        descriptor, name = tempfile.mkstemp(prefix=_PREFIX, suffix=_SUFFIX)
        try_lock(descriptor, exclusive=True)
        self.path = Path(name)
        weakref.finalize(self, _remove, self.path, os.getpid(), descriptor)

    def append(self, rows: Sequence[FailedRow]) -> None:
        """Add rows; what several processes add at the same time does not mix."""
        text = "".join(f"{json.dumps(asdict(row))}\n" for row in rows)
        try:
            descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        except FileNotFoundError:
            log.debug("%s: the process that made it has ended, or its dataset is gone: not reported there", self.path)
            return
        try:
            os.write(descriptor, text.encode())
        finally:
            os.close(descriptor)

    def read(self) -> list[FailedRow]:
        """Return all rows so far, those of one worker in their order."""
        try:
            lines = self.path.read_text().splitlines()
        except FileNotFoundError:  # of the process that made it, which has ended
            return []
        return [FailedRow(**json.loads(line)) for line in lines]


def text_of(error: Exception) -> str:
    """Return an error as one short line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:_MOST_TEXT] if text else type(error).__name__


def _remove(path: Path, process: int, descriptor: int) -> None:
    if os.getpid() == process:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _remove_abandoned(directory: Path) -> None:
    """Remove the files of this user whose processes have ended without removing them."""
    now = time.time()
    for path in directory.glob(f"{_PREFIX}*{_SUFFIX}"):
        with suppress(OSError):
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                status = os.fstat(descriptor)
                is_old = now - status.st_mtime > _YOUNG  # a new one may not be locked yet
                if status.st_uid == os.getuid() and is_old and try_lock(descriptor, exclusive=True):
                    log.debug("%s: removed, the process that made it has ended", path)
                    path.unlink()
            finally:
                os.close(descriptor)
