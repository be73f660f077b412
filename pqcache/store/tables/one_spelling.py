"""A source whose partition keys have one spelling: ``DT=1/`` is listed, and read, as ``dt=1/`` beside ``dt=2/``."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from urllib.parse import unquote

from pqcache.errors import SourceError
from pqcache.store.drivers.base import LocalModes, Source
from pqcache.store.manifest import Identity, SourceFile, TableVersion


class OneSpelling(Source, LocalModes):
    """A Source over another one, which it asks for files by their own paths.

    Keys have the spelling in which they are ``known``, or else that of the first path. The other source is a directory:
    a table whose log names its files spells them itself.
    """

    def __init__(self, source: Source, known: Iterable[str]) -> None:
        self.url = source.url
        self.capabilities = source.capabilities
        self._source = source
        self._keys = {key.lower(): key for key in known}
        self._place: dict[str, str] = {}  # of paths that are other ones at the source
        self._path: dict[str, str] = {}
        self._is_listed = False

    def list(self) -> Iterator[SourceFile]:
        places: dict[str, str] = {}
        self._source.odd = self.odd
        for file in sorted(self._source.list(), key=lambda file: file.path):
            path = self._spelled(file.path)
            if (other := places.setdefault(path, file.path)) != file.path:
                reason = f"differs only in case from {other}"
                raise SourceError(f"{self.url}/{file.path}", reason, "rename one of them")
            if path != file.path:
                self._place[path], self._path[file.path] = file.path, path
            yield replace(file, path=path)
        self._is_listed = True

    def stat(self, path: str) -> Identity:
        return self._source.stat(self._place_of(path))

    def read(self, path: str, offset: int, length: int, tag: str = "") -> Iterator[bytes]:
        yield from self._source.read(self._place_of(path), offset, length, tag)

    def close(self) -> None:
        self._source.close()

    def read_into(self, buffer: memoryview, path: str, offset: int, length: int, tag: str = "") -> Iterator[int]:
        yield from self._source.read_into(buffer, self._place_of(path), offset, length, tag)

    def url_of(self, path: str) -> str:
        return self._source.url_of(self._place_of(path))

    @property
    def local_modes(self) -> LocalModes | None:
        return None if self._source.local_modes is None else self

    def copy_mode(self, path: str, group: int, known: dict[str, os.stat_result] | None = None) -> int:
        return self._modes.copy_mode(self._place_of(path), group, known)

    def private_modes(self, paths: Sequence[str], group: int) -> Mapping[str, int]:
        found = self._modes.private_modes([self._place_of(path) for path in paths], group)
        return {self._path.get(place, place): mode for place, mode in found.items()}

    def note_modes(self, paths: Sequence[str]) -> None:
        self._modes.note_modes([self._place_of(path) for path in paths])

    def second_names(self, paths: Sequence[str]) -> dict[str, str]:
        found = self._source.second_names([self._place_of(path) for path in paths])
        return {self._path.get(link, link): self._path.get(place, place) for link, place in found.items()}

    @property
    def table_version(self) -> TableVersion | None:
        return self._source.table_version

    def pinned_url(self, url: str) -> str:
        return self._source.pinned_url(url)

    @property
    def _modes(self) -> LocalModes:
        assert self._source.local_modes is not None
        return self._source.local_modes

    def _place_of(self, path: str) -> str:
        if not self._is_listed:  # a repair lists nothing
            deque(self.list(), maxlen=0)
        return self._place.get(path, path)

    def _spelled(self, path: str) -> str:
        directory, slash, name = path.rpartition("/")
        segments = []
        for segment in directory.split("/"):
            key, equals, value = segment.partition("=")
            if equals and key and not key.startswith("."):
                known = self._keys.setdefault(unquote(key).lower(), key)
                segment = f"{key if unquote(known) == unquote(key) else known}={value}"
            segments.append(segment)
        return f"{'/'.join(segments)}{slash}{name}"
