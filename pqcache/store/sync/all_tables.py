"""Sync of many caches, one after the other; one that fails does not stop the others."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pqcache.errors import PqcacheError, error_below, first_line
from pqcache.events import OnEvent, ignore
from pqcache.options import SyncRun, SyncRunArguments, Unpack, documented, parsed
from pqcache.store.cache_directory import CacheDirectory
from pqcache.store.sync.cache_run import SyncReport
from pqcache.store.sync.command import sync
from pqcache.store.tables_of_root import ListedTable, add, tables_below

SKIPPED, LATER = 5, 75  # exit codes of tables that got a part of what is new, and of those that may be done later


@dataclass(frozen=True)
class TableResult:
    """What became of the sync of one cache: a report, or the error with which it failed; both if some was skipped."""

    cache: str
    report: SyncReport | None
    error: PqcacheError | None

    @property
    def exit_code(self) -> int:
        """The exit code of this sync."""
        return 0 if self.error is None else self.error.exit_code


@documented(SyncRunArguments, SyncRun)
def sync_all(
    *roots: str | os.PathLike[str],
    on_begin: Callable[[Path], None] = lambda _: None,
    on_result: Callable[[TableResult], None] = lambda _: None,
    on_event: OnEvent = ignore,
    **given: Unpack[SyncRunArguments],
) -> list[TableResult]:
    """Sync all caches below some directories, one after the other; return what became of each.

    A root may have a ``pqcache.toml`` of several tables: a cache is made of each that has none yet, and its options are
    those of the file.

    Args:
        roots: the directories. Default: that of ``status``.
        on_begin: called with each cache before its sync.
        on_result: called with each result.
        on_event: called with what happens, from several threads.
        given: the options, as the table in pqcache.options has them.

    >>> [(Path(found.cache).name, found.exit_code) for found in sync_all("cache")]
    [('shop', 0)]

    Raises UsageError for invalid options. The error of a sync is in its result.
    """
    options: dict[str, Any] = {"on_event": on_event, **given}
    parsed(given, SyncRun)  # refused once, and not by each cache
    results = []
    for path, entry in tables_below(*roots).items():
        on_begin(path)
        results.append(sync_one(path, **options) if entry is None else _sync_table(path, entry, options))
        on_result(results[-1])
    return results


def _sync_table(path: Path, entry: ListedTable, options: Mapping[str, Any]) -> TableResult:
    """Sync a listed table; its cache is made first, so that a failure is recorded there too."""
    if entry.error is not None:
        return TableResult(os.fspath(path), None, entry.error)
    try:
        if not options.get("dry_run") and not CacheDirectory(path).exists():
            add(entry.source, entry.name, root=path.parent, options=entry.options.get("options"))
    except PqcacheError as error:
        return TableResult(os.fspath(path), None, error)
    return sync_one(path, source=entry.source, **{**entry.options, **options})


def sync_one(cache: str | os.PathLike[str], source: str | None = None, **options: Any) -> TableResult:
    """Sync one cache, as remembered or from ``source``; failures become part of the result."""
    try:
        report = sync(cache, **options) if source is None else sync(source, cache, **options)
        return TableResult(os.fspath(cache), report, report.skipped_error())
    except Exception as error:  # noqa: BLE001  see known_error
        return TableResult(os.fspath(cache), None, known_error(error))


def known_error(error: Exception) -> PqcacheError:
    """A bug as an error: it must not keep the other caches from their runs."""
    if isinstance(error, PqcacheError):
        return error
    if isinstance(error, OSError) and error.filename:
        return error_below(Path(error.filename), error)
    advice = "please report this bug, with the output of 'pqcache --version -v'"
    return PqcacheError(type(error).__name__, first_line(error), advice)


def exit_code_of(codes: Sequence[int]) -> int:
    """Return the exit code of several syncs: 75 if all that failed may be done later.

    Else it is that of the first failure that lasts. Partitions that were skipped count less than a failed sync.

    >>> exit_code_of([0, 75]), exit_code_of([75, 5]), exit_code_of([0, 5, 75, 3, 1]), exit_code_of([])
    (75, 5, 3, 0)
    """
    failed = [code for code in codes if code]
    lasting = [code for code in failed if code not in (SKIPPED, LATER)]
    return (lasting or sorted(failed) or [0])[0]
