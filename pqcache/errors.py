"""Every error a user can meet, each with its exit code.

PqcacheError                1   something failed; the message says which file and what to do
├── UsageError              2   an option, a URL, a size or a condition that makes no sense
├── SourceError             1   the source cannot be reached, listed or read; nor can a target be written
│   ├── SourceNotFound      1   nothing is there
│   ├── SourceDenied        1   wrong or missing credentials, or no permission
│   └── SourceUnavailable   1   server down, reset, or too slow: worth another try
├── SourceIncomplete        3   empty, vanished or still moving: nothing was published
├── ParquetError            1   not Parquet, truncated, or something we cannot represent
├── CacheError              1   no cache here, another version of one, or a damaged one
│   ├── DamagedError        4   a part of the cache is not as it was written
│   └── CacheLocked        75   another run holds the lock (EX_TEMPFAIL)
└── Interrupted           130   Ctrl-C or SIGTERM
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


def first_line(error: BaseException | str) -> str:
    """Return the first line of what another library's error says, or its type where it says nothing."""
    text = str(error).strip()
    return text.splitlines()[0].rstrip(". ") if text else type(error).__name__


class PqcacheError(Exception):
    """Base of all errors that pqcache raises on purpose.

    ``str(error)`` is one line that names the thing, says what is wrong and what to do next.
    """

    exit_code = 1


class UsageError(PqcacheError, ValueError):
    """An option, a URL, a size or a condition that makes no sense."""

    exit_code = 2


class SourceError(PqcacheError):
    """The source cannot be reached, listed or read; or a repartition's target, which lives in the same stores."""


class SourceNotFound(SourceError):
    """There is nothing at this URL."""


class SourceDenied(SourceError):
    """Wrong or missing credentials, or no permission."""


class SourceChanged(SourceError):
    """A file is no longer the one that was listed."""


class SourceUnavailable(SourceError):
    """The server is down, resets connections or is too slow; trying again may help."""


class SourceIncomplete(PqcacheError):
    """The source is empty, lost a file or keeps moving; nothing was published."""

    exit_code = 3


class ParquetError(PqcacheError):
    """A file is not Parquet, is truncated, or holds something that cannot be represented."""


class CacheError(PqcacheError):
    """There is no cache here, or it is of another version, or it is damaged."""


class DamagedError(CacheError):
    """A manifest, an index or a data file of a cache is missing, or not as it was written."""

    exit_code = 4


class CacheLocked(CacheError):
    """Another run holds the cache's lock."""

    exit_code = 75


class Interrupted(PqcacheError):
    """Ctrl-C or SIGTERM; nothing is left half done."""

    exit_code = 130


def disk_error(path: Path, error: OSError) -> PqcacheError:
    """Return the error for a failed write below the cache."""
    if error.errno in DISK_FULL:
        return PqcacheError(f"{path.parent}: no space left on the device; free some, or put the cache on a larger disk")
    return PqcacheError(f"{path}: {error.strerror or error}; check the cache's disk and its permissions")


@contextmanager
def disk_errors(cache: Path) -> Iterator[None]:
    """Turn what the file system of the cache refuses into errors with advice."""
    try:
        yield
    except OSError as error:
        raise disk_error(Path(os.fsdecode(error.filename)) if error.filename else cache, error) from error
