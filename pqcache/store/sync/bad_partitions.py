"""Partitions whose new files cannot be taken: their old versions are kept where ``skip_bad`` says so."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pqcache.errors import ParquetError, PqcacheError, TypeClash
from pqcache.store.hive import parent
from pqcache.store.manifest import FileEntry, SourceFile

if TYPE_CHECKING:
    import pyarrow as pa

Blame = Callable[[str], AbstractContextManager[None]]


class BadPartitions(Exception):
    """The new files of partition directories cannot be taken; ``errors`` says why, for each."""

    def __init__(self, errors: Mapping[str, ParquetError]) -> None:
        super().__init__(*errors)
        self.errors = errors


class BadPartitionsSoFar:
    """Collects BadPartitions, so that a run finds all of them at once."""

    def __init__(self) -> None:
        self._errors: dict[str, ParquetError] = {}

    @contextmanager
    def collected(self) -> Iterator[None]:
        """Remember what is raised inside in place of raising it."""
        try:
            yield
        except BadPartitions as bad:
            self._errors |= bad.errors

    def raise_any(self) -> None:
        """Raise what was remembered, if there is anything."""
        if self._errors:
            raise BadPartitions(self._errors)


@dataclass(frozen=True, kw_only=True)
class SkippedPartition:
    """A partition of which a snapshot does not have what is at the source, and why.

    ``kept`` says whether it has the version from before; otherwise it has nothing of the partition.
    """

    partition: str
    kept: bool
    reason: str


def blame_nobody(directory: str) -> AbstractContextManager[None]:
    """Return a context in which errors remain as they are."""
    return nullcontext()


@contextmanager
def blame(directory: str) -> Iterator[None]:
    """Raise BadPartitions about a partition directory for what is wrong with its files."""
    try:
        yield
    except ParquetError as error:
        raise BadPartitions({directory: error}) from error


@contextmanager
def clashes_by_partition(
    new: Collection[str], known: Callable[[], pa.Schema | None], root: str = "", *, skip: bool
) -> Iterator[None]:
    """Say which partition a clash of types is in, one of the directories ``new``, and what can be done about it.

    Where both files are new, it is the one whose type is not that of the schema ``known`` before, or the later one.
    Paths below ``root`` are those of the snapshot's files. With ``skip`` BadPartitions is raised.
    """
    try:
        yield
    except TypeClash as clash:
        paths = [path.removeprefix(root) for path in clash.files]
        if parent(paths[-1]) in new and _is_other_bad(clash, known()):
            paths = [paths[-1], paths[0]]
        first = {parent(path): path for path in reversed(paths) if parent(path) in new}
        if len(first) > 1:
            first.pop(parent(paths[-1]), None)  # the file that the others are compared with
        if not first:
            raise
        errors = {directory: _in_partition(clash, directory, path, skip) for directory, path in sorted(first.items())}
        if skip:
            raise BadPartitions(errors) from clash
        raise next(iter(errors.values())) from clash


def _is_other_bad(clash: TypeClash, known: pa.Schema | None) -> bool:
    """Return whether it is the second type of a clash that does not fit what was known before, and not the first."""
    if known is None or clash.column not in known.names:
        return False
    before = known.field(clash.column).type
    return _fits(before, clash.types[0]) and not _fits(before, clash.types[1])


def _fits(one: pa.DataType, other: object) -> bool:
    import pyarrow as pa  # which a sync with nothing to do does not need

    from pqcache.parquet.schema_merge import unify

    try:
        unify(("", pa.schema([("", kind)])) for kind in (one, other))
    except ParquetError:
        return False
    return True


def _in_partition(clash: TypeClash, directory: str, path: str, skip: bool) -> TypeClash:
    """Return the error about one partition of those that clash in the same way; ``path`` is a file of it."""
    advice = f"write {f'partition {directory}' if directory else 'the file'} again with the other type"
    if directory and not skip:
        advice += ", or publish the rest with --skip-bad"
    if clash.subject in (clash.files[0], path) and path in clash.files[:-1]:
        return TypeClash(path, clash.reason, advice, column=clash.column, files=(path, clash.files[-1]))
    return TypeClash(clash.subject, clash.reason, advice, column=clash.column, files=clash.files)


def with_old_versions(
    files: Sequence[SourceFile], held: Iterable[FileEntry], skipped: Mapping[str, PqcacheError]
) -> list[SourceFile]:
    """Return ``files`` with what is held of the partitions ``skipped`` in place of what is listed there."""
    if not skipped:
        return list(files)
    result = {file.path: file for file in files if parent(file.path) not in skipped}
    result |= {f.path: f for entry in held for f in entry.sources if parent(f.path) in skipped}
    return list(result.values())


def skipped_partitions(skipped: Mapping[str, PqcacheError], held: Iterable[FileEntry]) -> tuple[SkippedPartition, ...]:
    """Return the partitions that were skipped, in the order of their names."""
    known = {parent(file.path) for entry in held for file in entry.sources}
    return tuple(
        SkippedPartition(partition=directory or ".", kept=directory in known, reason=str(error))
        for directory, error in sorted(skipped.items())
    )
