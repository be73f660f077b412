"""The rows for which a transform raised an error and others came in their place, over all workers."""

from __future__ import annotations

import json
import logging
import os
import tempfile
import weakref
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

log = logging.getLogger("pqcache.torch")

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
    """Failed rows in a temporary file, to which the workers append; it is removed with the dataset that made it."""

    def __init__(self) -> None:
        descriptor, name = tempfile.mkstemp(prefix="pqcache-errors-", suffix=".jsonl")
        os.close(descriptor)
        self.path = Path(name)
        weakref.finalize(self, _remove, self.path, os.getpid())

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


def _remove(path: Path, process: int) -> None:
    if os.getpid() == process:
        path.unlink(missing_ok=True)
