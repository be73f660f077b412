"""A dataset in a local (or mounted) directory, or one local file."""

from __future__ import annotations

import os
import stat as stat_module
from collections.abc import Iterator, Mapping

from pqcache.errors import SourceDenied, SourceError, SourceNotFound, SourceUnavailable
from pqcache.store.hive import is_hidden
from pqcache.store.manifest import Identity, SourceFile
from pqcache.store.source import option_names

_CHUNK = 4 << 20


class LocalSource:
    """A Source over ``os``; see ``pqcache.store.source.Source``."""

    def __init__(self, path: str, options: Mapping[str, str]) -> None:
        option_names("a local path", options, {})
        self._root = os.path.abspath(os.path.expanduser(path))
        self._only = ""
        if os.path.isfile(self._root):
            self._root, self._only = os.path.split(self._root)
        self.url = os.path.join(self._root, self._only) if self._only else self._root

    def list(self) -> Iterator[SourceFile]:
        if self._only:
            yield SourceFile(self._only, self.stat(self._only))
            return
        pending = [""]
        while pending:
            directory = pending.pop()
            try:
                with os.scandir(os.path.join(self._root, directory)) as entries:
                    for entry in entries:
                        path = f"{directory}/{entry.name}" if directory else entry.name
                        if entry.is_dir():
                            pending.append(path)
                        elif (identity := self._listed(path, entry)) is not None:
                            yield SourceFile(path, identity)
            except OSError as error:
                raise self._error(directory, error) from error

    def stat(self, path: str) -> Identity:
        try:
            return self._identity(path, os.stat(self._name(path)))
        except OSError as error:
            raise self._error(path, error) from error

    def read(self, path: str, offset: int, length: int, tag: str = "") -> Iterator[bytes]:
        try:
            with open(self._name(path), "rb", buffering=0) as file:
                file.seek(offset)
                while length > 0 and (chunk := file.read(min(_CHUNK, length))):
                    length -= len(chunk)
                    yield chunk
        except OSError as error:
            raise self._error(path, error) from error

    def close(self) -> None:
        pass

    def _listed(self, path: str, entry: os.DirEntry[str]) -> Identity | None:
        """Return the identity of what a listing met, or None for what is gone or nobody reads."""
        try:
            return self._identity(path, entry.stat())
        except FileNotFoundError:
            if is_hidden(entry.name) or not os.path.lexists(self._name(path)):
                return None  # an editor's dangling link, or a file that vanished between two looks
            raise SourceError(f"{self._name(path)}: is a link to nothing; mend or remove it") from None
        except SourceError:
            if is_hidden(entry.name):
                return None
            raise

    def _identity(self, path: str, status: os.stat_result) -> Identity:
        if not stat_module.S_ISREG(status.st_mode):
            raise SourceError(f"{self._name(path)}: not a regular file; move it away")
        return Identity(status.st_size, status.st_mtime_ns)

    def _name(self, path: str) -> str:
        return os.path.join(self._root, path)

    def _error(self, path: str, error: OSError) -> SourceError:
        name = self._name(path).rstrip("/")
        if isinstance(error, FileNotFoundError):
            return SourceNotFound(f"{name}: no such file or directory; check the path")
        if isinstance(error, NotADirectoryError):
            return SourceNotFound(f"{name}: not a directory; check the path")
        if isinstance(error, PermissionError):
            return SourceDenied(f"{name}: permission denied; make it readable for this user")
        return SourceUnavailable(f"{name}: {error.strerror}")
