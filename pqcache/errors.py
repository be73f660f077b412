"""All errors for users, with their exit codes.

PqcacheError                1   something failed; the message says which file and what to do
├── UsageError              2   an invalid option, URL, size or condition
├── SourceError             1   the source can't be reached, listed or read, or a target can't be written
│   ├── SourceNotFound      1   nothing is there
│   ├── SourceDenied        1   wrong or missing credentials, or no permission
│   ├── AccessExpired      75   a token or a ticket has expired, or the clock is wrong (EX_TEMPFAIL)
│   ├── SourceChanged       1   a file has changed since it was listed
│   └── SourceUnavailable  75   server down, reset or too slow, even after retries: try again later (EX_TEMPFAIL)
├── SourceIncomplete        3   empty, vanished or still changing: nothing was published
├── ParquetError            1   not Parquet, truncated, or not representable
│   └── TypeClash           1   a column has incompatible types in two files
├── PartitionsSkipped       5   a sync kept old versions of partitions, or left some out
├── ContractNotMet          6   new data violate a rule of [expect]: nothing was published
├── CacheError              1   no cache, or one of another version, or a damaged one
│   ├── DamagedError        4   a part of the cache differs from what was written
│   └── CacheLocked        75   another run holds the lock (EX_TEMPFAIL)
└── Interrupted           130   Ctrl-C or SIGTERM
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
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
    """The base of all errors that pqcache raises on purpose.

    Attributes:
        subject: the file, URL, option or column in question; may be empty.
        reason: what is wrong with it.
        advice: what to do next; may be empty.

    ``str(error)`` joins the three into a line. A single argument is the reason: DataLoader, which raises errors of its
    workers again, passes only that line.
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
        """The same error about the file or dataset that contains its subject."""
        reason = f"{self.subject}: {self.reason}" if self.subject else self.reason
        return type(self)(subject, reason, self.advice)

    def renamed(self, old: object, new: object) -> Self:
        """The same error with the path ``old`` replaced by ``new``: users know a copy by its source."""
        return type(self)(*(text.replace(str(old), str(new)) for text in (self.subject, self.reason, self.advice)))


class UsageError(PqcacheError, ValueError):
    """An invalid option, URL, size or condition."""

    exit_code = 2


class SourceError(PqcacheError):
    """The source can't be reached, listed or read, or a repartition's target can't be written."""


class SourceNotFound(SourceError):
    """There is nothing at this URL."""


class SourceDenied(SourceError):
    """Wrong or missing credentials, or no permission."""


class AccessExpired(SourceError):
    """Credentials have expired, or the clock is wrong: a retry doesn't help, but a later run may."""

    exit_code = 75


class SourceChanged(SourceError):
    """A file has changed since it was listed."""


class SourceUnavailable(SourceError):
    """The server is down, resets connections or is too slow; trying again may help."""

    exit_code = 75


class SourceIncomplete(PqcacheError):
    """The source is empty, lost a file or keeps changing; nothing was published."""

    exit_code = 3


class ParquetError(PqcacheError):
    """A file isn't Parquet, is truncated, or has contents that can't be represented."""


class TypeClash(ParquetError):
    """A column has incompatible types in two files.

    Attributes:
        column: its name.
        files: files with the first type, followed by one with the other.
        types: the two Arrow types.
        others: the other columns.
        names: two names that differ only in case, if they are the problem.
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
    """A sync skipped partitions that are bad, or that now have far fewer rows."""

    exit_code = 5


class ContractNotMet(PqcacheError):
    """New data violate a rule of ``[expect]`` in ``pqcache.toml``; nothing was published."""

    exit_code = 6


class CacheError(PqcacheError):
    """There is no cache, or it has another version, or it is damaged."""


class DamagedError(CacheError):
    """A manifest, index or data file of a cache is missing, or differs from what was written."""

    exit_code = 4


class CacheLocked(CacheError):
    """Another run holds the cache's lock."""

    exit_code = 75


class Interrupted(PqcacheError):
    """Ctrl-C or SIGTERM; nothing was left half done."""

    exit_code = 130


def no_column(subject: object, name: str, known: Iterable[str]) -> UsageError:
    """The error for a column that is not among the ``known`` ones."""
    return UsageError(subject, f"no column {name!r}", f"there are: {', '.join(known) or 'none'}")


def open_error(error: BaseException) -> tuple[str, str] | None:
    """The reason and advice if a file can't be opened, whatever its content; else None."""
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
    """The error for an operation refused by the cache's file system, about the file named in ``error``, if any."""
    return disk_error(Path(os.fsdecode(error.filename)) if error.filename else cache, error)


@contextmanager
def disk_errors(cache: Path) -> Iterator[None]:
    """Turn errors of the cache's file system into errors with advice."""
    try:
        yield
    except OSError as error:
        raise error_below(cache, error) from error
