"""pyiceberg's FileIO over pqcache's drivers: metadata and delete files are read where and as data files are."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

import pyiceberg.avro.file
from pyiceberg.avro.decoder import StreamingBinaryDecoder
from pyiceberg.io import FileIO, InputFile, OutputFile

from pqcache.errors import SourceError, SourceNotFound, SourceUnavailable, UsageError
from pqcache.store.drivers.base import read_range
from pqcache.store.drivers.retries import with_retries
from pqcache.store.tables.iceberg.avro import check_avro
from pqcache.store.tables.store_files import StoreFiles, usual_url
from pqcache.store.tables.table_log import OpenOptions
from pqcache.store.urls import printable, url_scheme

ACCESS = "pqcache.access"  # the property of a FileIO that holds its TableAccess
CLASS = f"{__name__}.StoreFileIO"
_BUFFER = 1 << 20

T = TypeVar("T")

# The compiled decoder does not know where damaged data end: it reads on into other memory, or crashes the process.
pyiceberg.avro.file.new_decoder = StreamingBinaryDecoder  # type: ignore[assignment,attr-defined]


@dataclass(frozen=True, kw_only=True)
class TableAccess:
    """How the files of a table are read, by the URIs that its metadata have.

    Attributes:
        files: reads files by their URLs.
        options: how often to try, and what to tell of it.
        prefixes: directories as the metadata name them, and where they are.
    """

    files: StoreFiles
    options: OpenOptions
    prefixes: Mapping[str, str] = field(default_factory=dict)

    def url_of(self, uri: str) -> str:
        """Return where a file is that the metadata call ``uri``."""
        url = plain_url(uri)
        for named, place in self.prefixes.items():
            if url == named or url.startswith(f"{named}/"):
                return place + url[len(named) :]
        return url

    def size_of(self, uri: str) -> int:
        """Return the size of a file in bytes."""
        source, place = self.files.locate(self.url_of(uri))
        return self._tried(uri, lambda: source.stat(place).size)

    def read(self, uri: str, offset: int, length: int) -> bytes:
        """Return just ``length`` bytes of a file from ``offset`` on."""
        source, place = self.files.locate(self.url_of(uri))

        def received() -> bytes:
            data = read_range(source, place, offset, length)
            if len(data) != length:
                reason = f"the connection ended after {len(data):,} of {length:,} bytes from {offset:,}"
                raise SourceUnavailable(source.url_of(place), reason)
            return data

        return self._tried(uri, received) if length else b""

    def read_all(self, uri: str) -> bytes:
        """Return a file's bytes."""
        return self.read(uri, 0, self.size_of(uri))

    def open(self, uri: str) -> io.BufferedReader:
        """Return a file to read from, which can seek."""
        return io.BufferedReader(_StoreStream(self, uri), _BUFFER)

    def _tried(self, uri: str, call: Callable[[], T]) -> T:
        return with_retries(call, uri, self.options.patience, self.options.on_event)


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


class _StoreStream(io.RawIOBase):
    """A file of a store, read where it is asked for."""

    def __init__(self, access: TableAccess, uri: str) -> None:
        super().__init__()
        self._access, self._uri = access, uri
        self._size, self._position = access.size_of(uri), 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = max(0, start + offset)
        return self._position

    def tell(self) -> int:
        return self._position

    def readall(self) -> bytes:
        return self._next(self._size)

    def readinto(self, buffer: Any) -> int:
        data = self._next(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def _next(self, most: int) -> bytes:
        length = max(0, min(most, self._size - self._position))
        data = self._access.read(self._uri, self._position, length)
        self._position += length
        return data


def _refuse(location: str) -> NoReturn:
    raise UsageError(location, "is a file of a table, which pqcache does not write")
