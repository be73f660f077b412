"""pqcache's errors for what pyiceberg and the clients of its catalogs raise."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from pqcache.errors import (
    ParquetError,
    PqcacheError,
    SourceDenied,
    SourceError,
    SourceNotFound,
    SourceUnavailable,
    UsageError,
    first_line,
)
from pqcache.store.drivers.network_errors import known_cause
from pqcache.store.urls import printable

_MISSING = ("NoSuchTableError", "NoSuchIcebergTableError", "NoSuchNamespaceError", "NoSuchIdentifierError")
_DENIED = ("UnauthorizedError", "ForbiddenError", "OAuthError")
_PASSING = ("ServiceUnavailableError", "ServerError", "TooManyRequestsError")
_SECRETIVE = ("ArgumentError",)  # what SQLAlchemy says of a URL that it cannot read may show the password
_AS_FILES = "take its files as they are with --as-files (as_files=True)"
_INSTALL = "pip install 'pqcache[iceberg]'"


@contextmanager
def needs_pyiceberg(url: str) -> Iterator[None]:
    """Raise UsageError about ``url`` when an import inside the block finds pyiceberg, or a part of it, missing."""
    try:
        yield
    except ImportError as error:
        if (error.name or "pqcache").partition(".")[0] == "pqcache":
            raise  # an error of this package's own
        advice = f"install it with: {_INSTALL}, or {_AS_FILES}"
        raise UsageError(url, "is an Iceberg table, which needs pyiceberg", advice) from error


@contextmanager
def iceberg_errors(subject: str) -> Iterator[None]:
    """Turn what pyiceberg raises inside the block into errors about ``subject``, a table or a catalog."""
    try:
        yield
    except PqcacheError:
        raise
    except Exception as error:
        raise _error(subject, error) from error


def parquet_only(what: str, format_: str, uri: str) -> None:
    """Raise UsageError where a file of a table is not Parquet; ``what`` it is."""
    if format_ != "PARQUET":
        raise UsageError(
            printable(uri),
            f"is a {what} of an Iceberg table in {format_}, and pqcache reads Parquet",
            "write the table again with write.format.default=parquet (Spark: rewrite_data_files)",
        )


def damaged(uri: str, reason: str) -> ParquetError:
    """Return the error for a delete file that cannot be read."""
    return ParquetError(printable(uri), reason, "check the table with the engine that wrote it")


def _error(subject: str, error: Exception) -> PqcacheError:
    if (known := known_cause(subject, error)) is not None:
        return known
    names = [kind.__name__ for kind in type(error).__mro__]
    said = _said(error)
    if not _is_disjoint(names, _MISSING):
        return SourceNotFound(subject, f"no such table ({said})", "check the names of the namespace and the table")
    if not _is_disjoint(names, _DENIED):
        advice = "check the catalog's credentials in ~/.pyiceberg.yaml or PYICEBERG_CATALOG__NAME__..."
        return SourceDenied(subject, f"access denied ({said})", advice)
    if not _is_disjoint(names, _PASSING) or type(error).__module__.startswith("requests."):
        return SourceUnavailable(subject, f"its catalog does not answer ({said})", "check the catalog's uri, try again")
    if "NotInstalledError" in names:
        return UsageError(subject, f"its catalog needs another package ({said})", "install it")
    if type(error).__module__.startswith("sqlalchemy."):
        return SourceError(subject, f"its catalog's database cannot be read ({said})", "check the catalog's uri")
    advice = f"check the table with the engine that wrote it, or {_AS_FILES}"
    return SourceError(subject, f"pyiceberg cannot read it ({said})", advice)


def _said(error: Exception) -> str:
    if type(error).__name__ in _SECRETIVE:
        return type(error).__name__
    text = first_line(error)
    if "ValidationError" in type(error).__name__:  # pydantic's, of which the first line is the number of errors
        lines = [line.partition(" [")[0].strip() for line in str(error).splitlines()[1:3]]
        text = ": ".join(line for line in lines if not line.startswith("For further information")) or text
    text = re.sub(r"://[^/@\s\"']*@", "://***@", text)
    return printable(text if len(text) <= 300 else f"{text[:300]}...")


def _is_disjoint(names: list[str], others: tuple[str, ...]) -> bool:
    return set(names).isdisjoint(others)
