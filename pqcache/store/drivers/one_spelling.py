"""A source whose partition keys have one spelling: ``DT=1/`` is listed, and read, as ``dt=1/`` beside ``dt=2/``."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any
from urllib.parse import unquote

from pqcache.errors import SourceError
from pqcache.store.drivers.base import Source
from pqcache.store.manifest import Identity, SourceFile


class OneSpelling:
    """A Source over another one, which it asks for files by their own paths.

    Keys have the spelling in which they are ``known``, or else that of the first path. Whatever else the other source
    can do it does with paths in both directions.
    """

    def __init__(self, source: Source, known: Iterable[str]) -> None:
        self.url = source.url
        self._source = source
        self._keys = {key.lower(): key for key in known}
        self._place: dict[str, str] = {}  # of paths that are other ones at the source
        self._path: dict[str, str] = {}
        self._is_listed = False

    def list(self) -> Iterator[SourceFile]:
        places: dict[str, str] = {}
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
        return self._source.stat(_mapped(path, self._places()))

    def read(self, path: str, offset: int, length: int, tag: str = "") -> Iterator[bytes]:
        yield from self._source.read(_mapped(path, self._places()), offset, length, tag)

    def close(self) -> None:
        self._source.close()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._source, name)
        if not callable(found):
            return found
        return lambda *args, **more: _mapped(found(*(_mapped(arg, self._places()) for arg in args), **more), self._path)

    def _places(self) -> dict[str, str]:
        if not self._is_listed:  # a repair lists nothing
            deque(self.list(), maxlen=0)
        return self._place

    def __setattr__(self, name: str, value: Any) -> None:
        own = name.startswith("_") or name == "url"
        object.__setattr__(self if own else self._source, name, value)

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


def _mapped(value: Any, paths: dict[str, str]) -> Any:
    """Return a path, or paths in a list or as keys or values, under the other names that they have."""
    if isinstance(value, str):
        return paths.get(value, value)
    if isinstance(value, list | tuple):
        return [_mapped(item, paths) for item in value]
    if isinstance(value, dict):
        return {_mapped(key, paths): _mapped(item, paths) for key, item in value.items()}
    return value
