"""The metadata file of a table without a catalog: which of those in its directory is the newest, and what it says."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Sequence
from typing import NamedTuple

from pyiceberg.exceptions import ValidationError
from pyiceberg.table.metadata import TableMetadata, TableMetadataUtil

from pqcache.errors import SourceError, SourceNotFound, UsageError
from pqcache.store.tables.iceberg.errors import iceberg_errors
from pqcache.store.tables.iceberg.file_io import TableAccess
from pqcache.store.urls import printable

HINT = "version-hint.text"
SUFFIXES = (".metadata.json", ".metadata.json.gz")
# Hadoop's, a catalog's, and others
_NAME = re.compile(r"(?:v(?P<version>\d+)|(?P<number>\d+)-.+?|.+?)(\.gz)?\.metadata\.json(\.gz)?")
_UNNUMBERED = -1
_NEWEST_FORMAT = 3
_GZIP = b"\x1f\x8b"


class _Found(NamedTuple):
    number: int
    name: str
    of_hadoop: bool


def newest_metadata(names: Sequence[str], hint: str | None, url: str) -> str:
    """Return the name of a table's newest metadata file among the ``names`` in its directory ``url``.

    ``hint`` is what ``version-hint.text`` says, if it is there: a number, which may be behind, or a name. Raises
    SourceError where there is none, and UsageError where two may be the newest.
    """
    found = sorted(
        _Found(int(match["version"] or match["number"] or _UNNUMBERED), name, match["version"] is not None)
        for name in names
        if (match := _NAME.fullmatch(name))
    )
    if not found:
        raise SourceNotFound(url, "has no metadata file any more", "check the table with the engine that wrote it")
    if hint is None:
        newest = [file for file in found if file.number in (found[-1].number, _UNNUMBERED)]
    else:
        newest = _hinted(found, hint.strip(), url)
        newest += [file for file in found if file.number > newest[0].number]
    if len(newest) > 1:
        among = " and ".join(printable(file.name) for file in newest[:2])
        reason = f"both {among} may be its newest metadata file, and only a catalog knows"
        raise UsageError(url, reason, f"name one: {url}/{printable(newest[-1].name)}")
    return newest[0].name


def _hinted(found: Sequence[_Found], hint: str, url: str) -> list[_Found]:
    """Return the metadata file that a hint names; Hadoop's writers leave it behind until they are done."""
    if hint.isdecimal():
        number, versions = int(hint), {file.number for file in found if file.of_hadoop}
        while number + 1 in versions:
            number += 1
        named = [file for file in found if file.of_hadoop and file.number == number]
    else:
        named = [file for file in found if file.name in (hint, *(hint + suffix for suffix in SUFFIXES))]
    if not named:
        reason = f"{HINT} names {printable(hint)[:80]!r}, which is not there"
        raise SourceError(url, reason, f"name a metadata file: {url}/{printable(found[-1].name)}")
    return named


def read_metadata(access: TableAccess, uri: str) -> TableMetadata:
    """Return what a metadata file says; raises UsageError about a version of the format that pyiceberg cannot read."""
    data = access.read_all(uri)
    try:
        text = (gzip.decompress(data) if data.startswith(_GZIP) else data).decode()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise SourceError(printable(uri), f"is no metadata of an Iceberg table ({error})", "name another") from error
    with iceberg_errors(printable(uri)):
        try:
            return TableMetadataUtil.parse_raw(text)
        except ValidationError:
            _check_format(text, uri)
            raise


def _check_format(text: str, uri: str) -> None:
    said = json.loads(text)
    version = said.get("format-version") if isinstance(said, dict) else None
    if isinstance(version, int) and version > _NEWEST_FORMAT:
        raise UsageError(
            printable(uri),
            f"is of version {version} of Iceberg's format, and this pyiceberg reads up to {_NEWEST_FORMAT}",
            "upgrade pyiceberg, or write the table again in a version that it reads",
        )
