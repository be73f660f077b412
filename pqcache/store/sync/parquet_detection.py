"""Looks into source files whose names do not say what they are, and remembers what it found.

A file is Parquet if it has the magic bytes at one end: one that has them at both is complete, and of any other the
download says what is wrong. What was found is kept in a cache by the files' identities, so that a sync with nothing to
do reads nothing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, MutableMapping, Sequence
from functools import partial
from hashlib import blake2b
from pathlib import Path

from pqcache.errors import MALFORMED, PqcacheError, SourceChanged, SourceDenied, SourceIncomplete, SourceNotFound
from pqcache.events import OnEvent
from pqcache.store.drivers.base import Source, read_range
from pqcache.store.drivers.retries import Patience, with_retries
from pqcache.store.layout import CONTENT
from pqcache.store.manifest import SourceFile
from pqcache.store.ownership import file_mode
from pqcache.store.tables.data_files import is_magic
from pqcache.system.disk import open_plain, write_durably

_FORMAT = 1
_THREADS = 16
_MAGIC_SIZE = 4


class FileMoved(SourceIncomplete):
    """A file has changed since it was listed."""


class ContentMemory:
    """Which source files are Parquet by their content, as it was found in this run and before."""

    def __init__(self, known: Mapping[str, bool] | None = None) -> None:
        self._known = dict(known or {})
        self._found: dict[str, bool] = {}

    def get(self, url: str, file: SourceFile) -> bool | None:
        """Return whether a file is Parquet, or None where that is not known."""
        key = _key(url, file)
        known = self._found.get(key, self._known.get(key))
        if known is not None:
            self._found[key] = known
        return known

    def put(self, url: str, file: SourceFile, is_parquet: bool) -> None:
        """Remember what a file is."""
        self._found[_key(url, file)] = is_parquet

    def write(self, cache: Path) -> None:
        """Keep in a cache what this run has asked for or found, and nothing else."""
        if self._found == self._known:
            return
        parquet, other = ([key for key, value in self._found.items() if value is wanted] for wanted in (True, False))
        text = json.dumps({"format": _FORMAT, "parquet": sorted(parquet), "other": sorted(other)})
        write_durably(cache / CONTENT, f"{text}\n".encode(), cache / "tmp", file_mode())
        self._known = dict(self._found)


def read_memory(cache: Path) -> ContentMemory:
    """Return what a cache remembers; nothing where that cannot be read, and files are then looked into again."""
    try:
        with open(open_plain(cache / CONTENT, os.O_RDONLY), "rb") as file:
            values = json.loads(file.read())
        if values["format"] == _FORMAT:
            known = {str(key): kind == "parquet" for kind in ("parquet", "other") for key in values[kind]}
            return ContentMemory(known)
    except FileNotFoundError:
        pass
    except (OSError, *MALFORMED) as error:
        _log("%s: files without a suffix are looked into again: %s", cache / CONTENT, error)
    return ContentMemory()


def parquet_by_content(
    source: Source,
    files: Sequence[SourceFile],
    memory: ContentMemory,
    patience: Patience,
    on_event: OnEvent,
    denied: MutableMapping[str, PqcacheError],
) -> set[SourceFile]:
    """Return those of ``files`` that are Parquet by their first or last bytes.

    What ``memory`` does not know is read, in parallel. A file that has changed since it was listed raises
    SourceIncomplete. ``denied`` gets the errors for files that may not be read, by path.
    """
    unknown = [file for file in files if memory.get(source.url, file) is None]
    if unknown:
        from pqcache.system.parallel import in_parallel  # a sync with nothing to do does not need it

        _log("%s: %d files are looked into", source.url, len(unknown))
        calls = [partial(_has_magic, source, file, patience, on_event) for file in unknown]
        for file, is_parquet in zip(unknown, in_parallel(calls, _THREADS), strict=True):
            if isinstance(is_parquet, SourceDenied):
                denied[file.path] = is_parquet
            else:
                memory.put(source.url, file, is_parquet)
    return {file for file in files if memory.get(source.url, file)}


def _has_magic(source: Source, file: SourceFile, patience: Patience, on_event: OnEvent) -> bool | SourceDenied:
    def read(offset: int) -> bytes:
        return read_range(source, file.path, offset, _MAGIC_SIZE, file.identity.tag)

    for offset in (0, file.identity.size - _MAGIC_SIZE):
        try:
            data = with_retries(partial(read, offset), file.path, patience, on_event)
        except SourceDenied as error:
            return error
        except (SourceNotFound, SourceChanged) as error:
            raise _moved(source, file) from error
        if len(data) < _MAGIC_SIZE:
            raise _moved(source, file)
        if is_magic(data):
            return True
    return False


def _moved(source: Source, file: SourceFile) -> FileMoved:
    return FileMoved(source.url_of(file.path), "changed while it was listed", "nothing was published, sync again")


def _key(url: str, file: SourceFile) -> str:
    identity = file.identity
    text = f"{url}\0{file.path}\0{identity.size} {identity.mtime_ns} {identity.tag}"
    return blake2b(text.encode(errors="surrogatepass"), digest_size=12).hexdigest()


def _log(message: str, *values: object) -> None:
    import logging  # as above

    logging.getLogger("pqcache.sync").debug(message, *values)
