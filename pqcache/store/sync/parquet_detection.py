"""Looks into source files whose names do not say what they are.

A file is Parquet if it has the magic bytes at one end: one that has them at both is complete, and of any other the
download says what is wrong.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from functools import partial

from pqcache.errors import PqcacheError, SourceChanged, SourceDenied, SourceIncomplete, SourceNotFound
from pqcache.events import OnEvent
from pqcache.store.drivers.base import Source, read_range
from pqcache.store.drivers.retries import Patience, with_retries
from pqcache.store.manifest import SourceFile
from pqcache.store.sync.memo import Memo
from pqcache.store.tables.data_files import is_magic

_THREADS = 16
_MAGIC_SIZE = 4


class FileMoved(SourceIncomplete):
    """A file has changed since it was listed."""


def parquet_by_content(
    source: Source,
    files: Sequence[SourceFile],
    memo: Memo,
    patience: Patience,
    on_event: OnEvent,
    denied: MutableMapping[str, PqcacheError],
) -> set[SourceFile]:
    """Return those of ``files`` that are Parquet by their first or last bytes.

    What ``memo`` does not know is read, in parallel. A file that has changed since it was listed raises
    SourceIncomplete. ``denied`` gets the errors for files that may not be read, by path.
    """
    unknown = [file for file in files if memo.is_parquet(source.url, file) is None]
    if unknown:
        from pqcache.system.parallel import in_parallel  # a sync with nothing to do does not need it

        _log("%s: %d files are looked into", source.url, len(unknown))
        calls = [partial(_has_magic, source, file, patience, on_event) for file in unknown]
        for file, is_parquet in zip(unknown, in_parallel(calls, _THREADS), strict=True):
            if isinstance(is_parquet, SourceDenied):
                denied[file.path] = is_parquet
            else:
                memo.put(source.url, file, is_parquet)
    return {file for file in files if memo.is_parquet(source.url, file)}


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


def _log(message: str, *values: object) -> None:
    import logging  # as above

    logging.getLogger("pqcache.sync").debug(message, *values)
