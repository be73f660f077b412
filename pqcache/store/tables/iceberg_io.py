"""Reads the files of an Iceberg table: pyiceberg's FileIO over pqcache's drivers, and errors for what pyiceberg raises.

Metadata and delete files are read where and as data files are.
"""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

import pyiceberg.avro.file
from pyiceberg.avro.decoder import StreamingBinaryDecoder
from pyiceberg.io import FileIO, InputFile, OutputFile

from pqcache.errors import (
    PqcacheError,
    SourceDenied,
    SourceError,
    SourceNotFound,
    SourceUnavailable,
    UsageError,
    first_line,
)
from pqcache.store.drivers.base import RangedFile
from pqcache.store.drivers.remote import censored, known_cause
from pqcache.store.tables.base import StoreFiles, usual_url
from pqcache.store.urls import printable, url_scheme

ACCESS = "pqcache.access"  # the property of a FileIO that holds its TableAccess
CLASS = f"{__name__}.StoreFileIO"
_BUFFER = 1 << 20


# The compiled decoder does not know where damaged data end: it reads on into other memory, or crashes the process.
pyiceberg.avro.file.new_decoder = StreamingBinaryDecoder  # type: ignore[assignment,attr-defined]
_MAGIC = b"Obj\x01"
_CODEC = b"avro.codec"
_MAX_BLOCKS = 1 << 30  # bytes of all blocks, decompressed
_SYNC = 16  # bytes of the marker behind the header and each block
_MISSING = ("NoSuchTableError", "NoSuchIcebergTableError", "NoSuchNamespaceError", "NoSuchIdentifierError")
_DENIED = ("UnauthorizedError", "ForbiddenError", "OAuthError")
_PASSING = ("ServiceUnavailableError", "ServerError", "TooManyRequestsError")
_AS_FILES = "take its files as they are with --as-files (as_files=True)"


@dataclass(frozen=True, kw_only=True)
class TableAccess:
    """How the files of a table are read, by the URIs that its metadata have.

    Attributes:
        files: reads files by their URLs.
        prefixes: directories as the metadata name them, and where they are.
    """

    files: StoreFiles
    prefixes: Mapping[str, str] = field(default_factory=dict)

    def url_of(self, uri: str) -> str:
        """Return where a file is that the metadata call ``uri``."""
        url = plain_url(uri)
        for named, place in self.prefixes.items():
            if url == named or url.startswith(f"{named}/"):
                return place + url[len(named) :]
        return url

    def size_of(self, uri: str) -> int:
        return self.files.size_of(self.url_of(uri))

    def read(self, uri: str, offset: int, length: int) -> bytes:
        return self.files.read(self.url_of(uri), offset, length)

    def read_all(self, uri: str) -> bytes:
        return self.read(uri, 0, self.size_of(uri))

    def open(self, uri: str) -> io.BufferedReader:
        """Return a file to read from, which can seek."""
        return io.BufferedReader(RangedFile(partial(self.read, uri), self.size_of(uri)), _BUFFER)


def plain_url(uri: str) -> str:
    """Return a URI of a table's metadata in the form in which sources have it; no character of it is encoded."""
    if not uri.startswith("file:"):
        return usual_url(uri) if url_scheme(uri) or uri.startswith("hdfs:") else os.path.normpath(uri)
    path = uri.removeprefix("file:")
    return os.path.normpath("/" + path[2:].partition("/")[2] if path.startswith("//") else path)


class StoreFileIO(FileIO):
    """A FileIO that reads through the `TableAccess` in its properties, and writes nothing; threads may share it."""

    def new_input(self, location: str) -> InputFile:
        return _StoreInput(location, self.access)

    def new_output(self, location: str) -> OutputFile:
        _refuse(location)

    def delete(self, location: str | InputFile | OutputFile) -> None:
        _refuse(location if isinstance(location, str) else location.location)

    @property
    def access(self) -> TableAccess:
        """How files are read."""
        access: TableAccess = self.properties[ACCESS]
        return access


class _StoreInput(InputFile):
    def __init__(self, location: str, access: TableAccess) -> None:
        super().__init__(location)
        self._access = access

    def __len__(self) -> int:
        return self._access.size_of(self.location)

    def exists(self) -> bool:
        try:
            self._access.size_of(self.location)
        except SourceNotFound:
            return False
        return True

    def open(self, seekable: bool = True) -> Any:
        data = self._access.read_all(self.location)
        if ".json" not in self.location.rpartition("/")[2]:  # all but the metadata file are Avro
            try:
                check_avro(data)
            except ValueError as error:
                advice = "check the table with the engine that wrote it"
                raise SourceError(printable(self.location), f"this manifest is damaged: {error}", advice) from error
        return io.BytesIO(data)


def _refuse(location: str) -> NoReturn:
    raise UsageError(location, "is a file of a table, which pqcache does not write")


class _Bytes:
    """Bytes that are taken one after the other; taking more than there are raises ValueError."""

    def __init__(self, data: bytes) -> None:
        self._data, self._position = data, 0

    @property
    def is_at_end(self) -> bool:
        return self._position == len(self._data)

    def take(self, count: int) -> bytes:
        """Return the next ``count`` bytes."""
        end = self._position + count
        if count < 0 or end > len(self._data):
            raise ValueError(f"it ends after {len(self._data):,} bytes")
        taken, self._position = self._data[self._position : end], end
        return taken

    def take_number(self) -> int:
        """Return the next number, which Avro writes 7 bits at a time and in zigzag."""
        value = 0
        for shift in range(0, 70, 7):
            byte = self.take(1)[0]
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return (value >> 1) ^ -(value & 1)
        raise ValueError("a number in it is too long")


def check_avro(data: bytes) -> None:
    """Raise ValueError unless ``data`` is all of an Avro file: a header and blocks, each with its marker behind it."""
    rest = _Bytes(data)
    if rest.take(len(_MAGIC)) != _MAGIC:
        raise ValueError("it is no Avro file")
    codec = b""
    while count := rest.take_number():
        if count < 0:
            rest.take_number()
        for _ in range(abs(count)):
            key, value = (rest.take(rest.take_number()) for _ in range(2))
            codec = value if key == _CODEC else codec
    marker = rest.take(_SYNC)
    left = _MAX_BLOCKS
    while not rest.is_at_end:
        count = rest.take_number()
        size = _size_of(rest.take(rest.take_number()), codec, left)
        if not 0 < count <= size:  # an entry of a manifest has a byte at least
            raise ValueError(f"a block of {size:,} bytes cannot have {count:,} entries")
        left -= size
        if rest.take(_SYNC) != marker:
            raise ValueError("a block of it is damaged")


def _size_of(block: bytes, codec: bytes, limit: int) -> int:
    """Return how large a block is when it is decompressed; other codecs than deflate are taken as they are."""
    if codec != b"deflate":
        return len(block) if codec in (b"", b"null") else limit
    inflate = zlib.decompressobj(-15)
    try:
        size = len(inflate.decompress(block, limit))
    except zlib.error:
        raise ValueError("a block of it is damaged") from None
    if inflate.unconsumed_tail:
        raise ValueError(f"it has more than {_MAX_BLOCKS:,} bytes")
    return size


@contextmanager
def iceberg_errors(subject: str, secrets: Iterable[str] = ()) -> Iterator[None]:
    """Turn what pyiceberg raises inside the block into errors about ``subject``, a table or a catalog."""
    try:
        yield
    except PqcacheError:
        raise
    except Exception as error:
        raise censored(_error(subject, error), secrets) from error


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
    text = first_line(error)
    if "ValidationError" in type(error).__name__:  # pydantic's, of which the first line is the number of errors
        lines = [line.partition(" [")[0].strip() for line in str(error).splitlines()[1:3]]
        text = ": ".join(line for line in lines if not line.startswith("For further information")) or text
    return printable(text)


def _is_disjoint(names: list[str], others: tuple[str, ...]) -> bool:
    return set(names).isdisjoint(others)
