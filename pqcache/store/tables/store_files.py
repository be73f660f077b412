"""Reads files by their URLs, wherever they are: those of a table may lie in several stores."""

from __future__ import annotations

import os
from collections.abc import Callable
from threading import Lock
from urllib.parse import urlsplit

from pqcache.errors import SourceError
from pqcache.store.drivers.base import Source
from pqcache.store.urls import local_path, printable, url_scheme, with_usual_scheme


class StoreFiles:
    """Opens the stores of files when they are first asked for.

    Args:
        base: the opened source whose files, below ``base.url``, need no other one; None where there is none.
        open_source: opens the source at a URL.
    """

    def __init__(self, base: Source | None, open_source: Callable[[str], Source]) -> None:
        self._base, self._open = base, open_source
        self._prefix = "" if base is None else f"{base.url}/"
        self._opened: dict[str, Source] = {}
        self._lock = Lock()

    def locate(self, url: str) -> tuple[Source, str]:
        """Return the source that a file is read from, and its path there; raises what opening one raises."""
        try:
            url.encode(errors="surrogateescape")
        except UnicodeEncodeError:
            is_name = False
        else:
            is_name = "\0" not in url
        if not is_name:
            reason = "the table has a file of this name, which no file can have"
            raise SourceError(printable(url), reason, "check the table with the engine that wrote it")
        found = self._in_base(url) or self._in_base(url := usual_url(url))
        if found is not None:
            return found
        root, path = _root_and_path(url)
        return self._root(root), path

    def _in_base(self, url: str) -> tuple[Source, str] | None:
        if self._base is None or not url.startswith(self._prefix):
            return None
        return self._base, url[len(self._prefix) :]

    def source_at(self, url: str) -> Source:
        """Return a new source of the directory ``url``, which the caller closes."""
        url = usual_url(url)
        if url_scheme(url) == "s3":  # whose clients take long to make
            root, path = _root_and_path(url)
            found = self._root(root).below(path.strip("/")) if path.strip("/") else None
            if found is not None:
                return found
        return self._open(url)

    def _root(self, url: str) -> Source:
        with self._lock:
            if url not in self._opened:
                self._opened[url] = self._open(url)
            return self._opened[url]

    def rebase(self, url: str) -> None:
        """Have files below the directory ``url`` read from one source of it, of which all directories' modes count."""
        if self._base is None or self._base.url != url:
            self._base = self._open(url)
            self._prefix = f"{self._base.url}/"

    def close(self) -> None:
        """Close all that was opened, and the base."""
        for source in (*self._opened.values(), *([] if self._base is None else [self._base])):
            source.close()


def usual_url(url: str) -> str:
    """Return ``url``, as logs and metadata write it, in the form in which sources have it."""
    scheme = url_scheme(url)
    if not scheme and url.startswith("hdfs:/"):  # as Hadoop writes one without a host
        return f"hdfs://{url.removeprefix('hdfs:')}"
    if scheme == "file" or url.startswith("file:/"):
        return os.path.abspath(local_path(url if scheme else "file://" + url.removeprefix("file:")))
    return with_usual_scheme(url)


def _root_and_path(url: str) -> tuple[str, str]:
    """Return the directory or host to open for a file, and the file's path there."""
    if not url_scheme(url):
        directory, name = os.path.split(url)
        return directory, name
    authority = urlsplit(url.partition("?")[0]).netloc
    root = f"{url.partition('://')[0]}://{authority}"
    return root, url[len(root) :].lstrip("/")
