"""Rewrite the local files of one partition directory: the same for a cache in place and for another target."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pqcache.errors import ParquetError
from pqcache.parquet.rewrite.directory import KnownOfSources, rewrite_directory
from pqcache.parquet.rewrite.options import RewriteOptions
from pqcache.parquet.rewrite.writer import RewriteResult


@dataclass(frozen=True, kw_only=True)
class RewriteTask:
    """The files of one partition directory and what to make of them.

    Attributes:
        files: local files in row order; they are not modified.
        target: a new or empty directory for the files that are made.
        options: sizes, codecs, and what else changes in columns and rows.
        known: what is known of the files and of the table that they belong to.
        use_page_cache: whether the new files are read next, so that they are written through the page cache.
        root: the directory that ``files`` lie below.
        name: what errors and warnings say in place of ``root`` and ``target``: the directory's URL.
    """

    files: Sequence[Path]
    target: Path
    options: RewriteOptions
    known: KnownOfSources
    use_page_cache: bool = False
    root: Path
    name: str


def rewrite_files(task: RewriteTask, on_progress: Callable[[int], None]) -> RewriteResult:
    """Write the rows of a directory's files to ``task.target``, durably; return the new files, in row order.

    ``on_progress`` is called with the bytes of the files that were read since the last call. Raises as
    ``rewrite_directory`` does.
    """
    options = task.options
    if options.shuffle is not None and task.known.shuffled_with == options.shuffle:
        options = replace(options, shuffle=None)  # the rows are in this seed's order
    try:
        result = rewrite_directory(task.files, task.target, options, on_progress, task.known, task.use_page_cache)
    except ParquetError as error:
        raise error.renamed(task.root, task.name).renamed(task.target, task.name) from error
    warnings = [warning.replace(str(task.root), task.name) for warning in result.warnings]
    return replace(result, warnings=tuple(warning.replace(str(task.target), task.name) for warning in warnings))
