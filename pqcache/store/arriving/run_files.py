"""The lock and the report of the run that a reader has started for a cache.

They are in a private directory of the user, below the system's one for temporary files, since the cache need not exist
yet. The run holds the lock until it ends. What it reports is a line of JSON each; a run that ends well removes both.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pqcache import errors
from pqcache.errors import MALFORMED, CacheError, PqcacheError
from pqcache.system.disk import open_plain
from pqcache.system.locks import try_lock, user_name

_CLOCKS = 0.1  # seconds by which the clock of files may be behind
_OTHER = "set TMPDIR to a directory that you can write to"


class RunFiles:
    def __init__(self, cache: Path) -> None:
        directory = _private_directory()
        name = hashlib.sha256(os.path.realpath(cache).encode()).hexdigest()[:32]
        self.lock, self.report = directory / f"{name}.lock", directory / f"{name}.jsonl"

    def try_lock(self) -> int | None:
        """Return a descriptor with the lock; None while another run holds it."""
        while True:
            with _errors_of(self.lock):
                descriptor = open_plain(self.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            if try_lock(descriptor, exclusive=True) is False:
                os.close(descriptor)
                return None
            with suppress(OSError):
                if os.path.samestat(os.fstat(descriptor), os.lstat(self.lock)):
                    return descriptor
            os.close(descriptor)  # a run that held it has removed it meanwhile

    def is_held(self) -> bool:
        """Whether a run that was started is at work."""
        try:
            with _errors_of(self.lock, but=FileNotFoundError):
                descriptor = open_plain(self.lock, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:  # removed by a run that has ended well
            return False
        try:
            return try_lock(descriptor, exclusive=True) is False
        finally:
            os.close(descriptor)

    def new_report(self) -> tuple[int, int]:
        """Descriptors of an empty report, for writing and for reading."""
        with _errors_of(self.report):
            self.report.unlink(missing_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
            writing = open_plain(self.report, flags, 0o600)
            try:
                return writing, open_plain(self.report, os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                os.close(writing)
                raise

    def lines(self) -> list[str]:
        try:
            return self.report.read_text(errors="replace").splitlines()
        except OSError:
            return []

    def error_since(self, moment: float) -> PqcacheError | None:
        """The error that ended the run after ``moment``, in Unix time."""
        try:
            if self.report.stat().st_mtime < moment - _CLOCKS:
                return None
        except OSError:
            return None
        for line in reversed(self.lines()):
            try:
                values = json.loads(line)
                name, *texts = values["error"]
                kind = getattr(errors, name, PqcacheError)
                if isinstance(kind, type) and issubclass(kind, PqcacheError):
                    return kind(*map(str, texts))
            except MALFORMED:
                continue
        return None


def warning_in(line: bytes) -> str | None:
    """None for lines that aren't warnings."""
    try:
        values = json.loads(line)
        return str(values["message"]) if values["event"] == "Warned" else None
    except MALFORMED:
        return None


def _private_directory() -> Path:
    with _errors_of(Path("TMPDIR")):
        path = Path(tempfile.gettempdir()) / f"pqcache-{os.getuid()}"
    with _errors_of(path):
        with suppress(FileExistsError):
            path.mkdir(0o700)
        status = path.lstat()
    if status.st_uid != os.getuid():
        owner = user_name(status.st_uid)
        advice = f"set TMPDIR to a directory of your own, or have {owner} remove it"
        raise CacheError(path, f"belongs to {owner}", advice)
    if not stat.S_ISDIR(status.st_mode):
        raise CacheError(path, "is no directory", "remove it")
    if status.st_mode & 0o077:
        raise CacheError(path, "others can change it", "remove it")
    return path


@contextmanager
def _errors_of(path: Path, but: type[OSError] | tuple[()] = ()) -> Iterator[None]:
    """Turn errors of the temporary files' file system into ones with advice, except ``but``."""
    try:
        yield
    except but:
        raise
    except OSError as error:
        raise CacheError(path, error.strerror or f"{error}", _OTHER) from error
