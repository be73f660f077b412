"""Every error a user can meet, each with its exit code.

PqcacheError                1   something failed; the message says which file and what to do
├── UsageError              2   an option, a URL, a size or a condition that makes no sense
├── SourceError             1   the source cannot be reached, listed or read; nor can a target be written
│   ├── SourceNotFound      1   nothing is there
│   ├── SourceDenied        1   wrong or missing credentials, or no permission
│   ├── AccessExpired      75   a token or a ticket has expired, or the clock is wrong (EX_TEMPFAIL)
│   ├── SourceChanged       1   a file is no longer the one that was listed
│   └── SourceUnavailable  75   server down, reset, or too slow: was retried, try again later (EX_TEMPFAIL)
├── SourceIncomplete        3   empty, vanished or still moving: nothing was published
├── ParquetError            1   not Parquet, truncated, or something we cannot represent
│   └── TypeClash           1   a column has types in two files that do not fit together
├── PartitionsSkipped       5   a sync has kept old versions of partitions, or left some out
├── ContractNotMet          6   new data do not meet a rule of [expect]: nothing was published
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

TYPE_CHECKING = False  # as in typing, which takes its time to import
if TYPE_CHECKING:
    from typing_extensions import Self

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
# What parsers raise of data that are not as they were written: wrong values or types, missing keys, deep nesting
MALFORMED = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, NotImplementedError, RecursionError)
NOT_REGULAR = "not a regular file"  # of an OSError with EINVAL
CHECK_TABLE = "check the table with the engine that wrote it"  # advice where log, metadata and files disagree


def first_line(error: BaseException | str) -> str:
    """The first line of another library's error, or its type if it says nothing."""
    text = str(error).strip()
    return text.splitlines()[0].rstrip(". ") if text else type(error).__name__


class PqcacheError(Exception):
    """Base of all errors that pqcache raises on purpose.

    Attributes:
        subject: the file, URL, option or column that it is about; empty where there is none.
        reason: what is wrong with it.
        advice: what to do next; empty where there is nothing to be done.

    ``str(error)`` is one line made of the three. A single argument is the reason, since whoever raises an error of
    another process again, as DataLoader does, has the line alone.
    """

    exit_code = 1

    def __init__(self, subject: object, reason: str = "", advice: str = "") -> None:
        alone = not reason and not advice
        self.subject, self.reason, self.advice = ("", str(subject), "") if alone else (str(subject), reason, advice)
        super().__init__(self.subject, self.reason, self.advice)

    def __str__(self) -> str:
        about = f"{self.subject}: {self.reason}" if self.subject else self.reason
        return f"{about}; {self.advice}" if self.advice else about

    def within(self, subject: object) -> Self:
        """The same error about the file or dataset that its subject is part of."""
        reason = f"{self.subject}: {self.reason}" if self.subject else self.reason
        return type(self)(subject, reason, self.advice)

    def renamed(self, old: object, new: object) -> Self:
        """The same error with the path ``old`` called ``new``: a copy goes by the name of its source."""
        return type(self)(*(text.replace(str(old), str(new)) for text in (self.subject, self.reason, self.advice)))


class UsageError(PqcacheError, ValueError):
    """An option, a URL, a size or a condition that makes no sense."""

    exit_code = 2


class SourceError(PqcacheError):
    """The source cannot be reached, listed or read; or a repartition's target, which lives in the same stores."""


class SourceNotFound(SourceError):
    """There is nothing at this URL."""


class SourceDenied(SourceError):
    """Wrong or missing credentials, or no permission."""


class AccessExpired(SourceError):
    """Credentials have expired, or the clock is wrong: a later run may get in, another try of this one does not."""

    exit_code = 75


class SourceChanged(SourceError):
    """A file is no longer the one that was listed."""


class SourceUnavailable(SourceError):
    """The server is down, resets connections or is too slow; trying again may help."""

    exit_code = 75


class SourceIncomplete(PqcacheError):
    """The source is empty, lost a file or keeps moving; nothing was published."""

    exit_code = 3


class ParquetError(PqcacheError):
    """A file is not Parquet, is truncated, or holds something that cannot be represented."""


class TypeClash(ParquetError):
    """A column has types in two files that do not fit together.

    Attributes:
        column: its name.
        files: those that have the first type, and last one that has the other.
        types: the two, as Arrow has them.
        others: the columns beside it.
        names: its two names, which differ only in case, where these are what does not fit.
    """

    def __init__(
        self,
        subject: object,
        reason: str = "",
        advice: str = "",
        *,
        column: str = "",
        files: tuple[str, ...] = (),
        types: tuple[object, ...] = (),
        others: tuple[str, ...] = (),
        names: tuple[str, ...] = (),
    ) -> None:
        super().__init__(subject, reason, advice)
        self.column, self.files, self.types, self.others, self.names = column, files, types, others, names

    def renamed(self, old: object, new: object) -> Self:
        found = super().renamed(old, new)
        found.column, found.types = self.column, self.types
        found.files = tuple(path.replace(str(old), str(new)) for path in self.files)
        found.others, found.names = self.others, self.names
        return found


class PartitionsSkipped(PqcacheError):
    """A sync could not take all partitions as they are now: they are bad, or were replaced by far fewer rows."""

    exit_code = 5


class ContractNotMet(PqcacheError):
    """New data do not meet a rule of ``[expect]`` in ``pqcache.toml``; nothing was published."""

    exit_code = 6


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


def open_error(error: BaseException) -> tuple[str, str] | None:
    """Reason and advice for a file that cannot be opened through no fault of its content, else None."""
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        return "too many open files", "raise the limit with 'ulimit -n 4096', or use fewer jobs or workers"
    if isinstance(error, OSError) and error.errno == errno.EINVAL and error.strerror == NOT_REGULAR:
        return NOT_REGULAR, "move it away"
    return None


def disk_error(path: Path, error: OSError) -> PqcacheError:
    """The error for a failed write below the cache."""
    if error.errno in DISK_FULL:
        return PqcacheError(path.parent, "no space left on the device", "free some, or put the cache on a larger disk")
    if (known := open_error(error)) is not None:
        return PqcacheError(path, *known)
    return PqcacheError(path, f"{error.strerror or error}", "check the cache's disk and its permissions")


def error_below(cache: Path, error: OSError) -> PqcacheError:
    """The error for an operation that the cache's file system refused, about the file that ``error`` names, if any."""
    return disk_error(Path(os.fsdecode(error.filename)) if error.filename else cache, error)


@contextmanager
def disk_errors(cache: Path) -> Iterator[None]:
    """Turn errors of the cache's file system into errors with advice."""
    try:
        yield
    except OSError as error:
        raise error_below(cache, error) from error
