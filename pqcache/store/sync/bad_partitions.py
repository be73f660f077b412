"""Partitions whose new files cannot be taken; with ``skip_bad``, their old versions are kept.

The unit is a place (see `place_of`): a partition directory, or one file in the root, so that a single file does not
hold back a table without partitions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pqcache.errors import ParquetError, PqcacheError, SourceDenied, TypeClash
from pqcache.store.manifest import FileEntry, SourceFile
from pqcache.store.partition_paths import parent
from pqcache.units import printable

if TYPE_CHECKING:
    import pyarrow as pa

_NAMED = 8  # columns that an error names

Blame = Callable[[str], AbstractContextManager[None]]


class BadPartitions(Exception):
    """New files of some places cannot be taken; ``errors`` has the reasons by place."""

    def __init__(self, errors: Mapping[str, PqcacheError]) -> None:
        super().__init__(*errors)
        self.errors = errors


class BadPartitionsSoFar:
    """Collects BadPartitions, so that a run reports them all at once."""

    def __init__(self) -> None:
        self._errors: dict[str, PqcacheError] = {}

    @contextmanager
    def collected(self) -> Iterator[None]:
        """Remember BadPartitions raised inside instead of raising it."""
        try:
            yield
        except BadPartitions as bad:
            self._errors |= bad.errors

    def raise_any(self) -> None:
        if self._errors:
            raise BadPartitions(self._errors)


@dataclass(frozen=True, kw_only=True)
class SkippedPartition:
    """A partition that differs between snapshot and source, and why.

    ``kept`` says whether the snapshot has its old version; otherwise it lacks the partition. A single file outside of
    partitions is ``./NAME``.
    """

    partition: str
    kept: bool
    reason: str


def place_of(path: str) -> str:
    """The place of the file at ``path``: its directory, or in the root ``./`` and its name. An unlistable directory,
    given with a ``/`` at its end, is the place of everything below it.

    >>> place_of("dt=1/a.parquet"), place_of("a.parquet"), place_of("dt=1/")
    ('dt=1', './a.parquet', 'dt=1/')
    """
    return path if path.endswith("/") else parent(path).rstrip("/") or f"./{path}"


def blame_nobody(place: str) -> AbstractContextManager[None]:
    return nullcontext()


@contextmanager
def blame(place: str) -> Iterator[None]:
    """Raise BadPartitions about a place for damaged files and files without permission.

    In the root, given as ``""``, the place is the error's file.
    """
    try:
        yield
    except (ParquetError, SourceDenied) as error:
        place = place or f"./{error.subject.rpartition('/')[2]}"
        found = _with_ways_out(error, place, skip=True) if isinstance(error, TypeClash) else error
        raise BadPartitions({place: found}) from error


@contextmanager
def advise_to_skip(place: str) -> Iterator[None]:
    """Add advice to errors about missing permissions and values that don't fit."""
    try:
        yield
    except TypeClash as clash:
        raise _with_ways_out(clash, place, skip=False) from clash
    except SourceDenied as error:
        raise or_skip(error) from error


def _with_ways_out(clash: TypeClash, place: str, skip: bool) -> TypeClash:
    if clash.files:  # the partition is named where these are
        return clash
    return TypeClash(clash.subject, clash.reason, _ways_out(clash, place, skip))


def or_skip(error: PqcacheError) -> PqcacheError:
    """Add the advice to publish the rest."""
    advice = f"{error.advice}, or leave it out with --skip-bad (skip_bad=True)"
    return type(error)(error.subject, error.reason, advice)


@contextmanager
def clashes_by_partition(
    new: Callable[[], Mapping[str, str]], known: Callable[[], pa.Schema | None], root: str = "", *, skip: bool
) -> Iterator[None]:
    """Name the partition of a type clash, and advise what to do.

    The partition is one of the places in ``new``, by directory, or by file in the root. If both files are new, it is
    the one whose type differs from the schema ``known`` before, or the later one. Paths below ``root`` are those of the
    snapshot's files. With ``skip``, raises BadPartitions.
    """
    try:
        yield
    except TypeClash as clash:
        if not clash.files:  # a value that does not fit, which `blame` knows the place of
            raise
        places, paths = new(), [path.removeprefix(root) for path in clash.files]

        def place(path: str) -> str | None:
            return places.get(path, places.get(parent(path)))

        if place(paths[-1]) is not None and _is_other_bad(clash, known()):
            paths = [paths[-1], paths[0]]
        first = {at: path for path in reversed(paths) if (at := place(path)) is not None}
        if len(first) > 1:
            first.pop(place(paths[-1]) or "", None)  # the file that the others are compared with
        if not first:
            raise
        errors = {at: _in_partition(clash, at, path, skip) for at, path in sorted(first.items())}
        if skip:
            raise BadPartitions(errors) from clash
        raise next(iter(errors.values())) from clash


def _is_other_bad(clash: TypeClash, known: pa.Schema | None) -> bool:
    """Whether it is the clash's second type that does not fit the known schema."""
    if known is None or clash.column not in known.names:
        return False
    from pqcache.parquet.schema import joined_type  # and pyarrow, which a sync with nothing to do does not need

    before = known.field(clash.column).type
    fits = [joined_type(before, kind) is not None for kind in clash.types]
    return bool(clash.names) or fits == [True, False]


def _in_partition(clash: TypeClash, place: str, path: str, skip: bool) -> TypeClash:
    """The error about one of several places with the same clash; ``path`` is one of its files."""
    advice = _ways_out(clash, place, skip)
    alone = clash.subject in (clash.files[0], path) and path in clash.files[:-1]
    files = (path, clash.files[-1]) if alone else clash.files
    return TypeClash(path if alone else clash.subject, clash.reason, advice, column=clash.column, files=files)


def _ways_out(clash: TypeClash, place: str, skip: bool) -> str:
    what, in_root = "name" if clash.names else "type", not place or place.startswith("./")
    ways = [f"write {'the file' if in_root else f'partition {place}'} again with the other {what}"]
    if clash.names:
        ways.append("merge the two with --ignore-case")
    if place and not skip:
        ways.append("publish the rest with --skip-bad")
    if clash.others:
        ways.append(f"leave the column out with --columns {','.join(clash.others[:_NAMED])}")
        ways[-1] += ",..." if len(clash.others) > _NAMED else ""
    return ", or ".join(ways)


def with_number(errors: Sequence[PqcacheError]) -> PqcacheError:
    """The first error, with the total number of errors."""
    first = errors[0]
    if len(errors) == 1:
        return first
    reason = f"{first.reason}, the first of {len(errors):,} such errors"
    return type(first)(first.subject, reason, first.advice)


def with_old_versions(
    files: Sequence[SourceFile],
    held: Iterable[FileEntry],
    skipped: Mapping[str, PqcacheError],
    odd: Collection[str] = (),
) -> list[SourceFile]:
    """Replace the listed files of the places ``skipped`` and ``odd`` with the held ones.

    If a file in the root is skipped and others there were removed or changed, the whole root keeps its held files: the
    skipped file may have replaced them.
    """
    if not (skipped or odd):
        return list(files)
    places = {*skipped, *odd}
    below = tuple(place for place in places if place.endswith("/"))

    def is_skipped(path: str) -> bool:
        return parent(path) in places or place_of(path) in places or path.startswith(below)

    before = {file.path: file for entry in held for file in entry.sources}
    result = {file.path: file for file in files if not is_skipped(file.path)}
    kept = {path: file for path, file in before.items() if is_skipped(path)}
    root = {path: file for path, file in before.items() if not parent(path)}
    if any(place.startswith("./") for place in skipped) and any(result.get(path) != root[path] for path in root):
        result = {path: file for path, file in result.items() if parent(path)}
        kept |= root
    return [*result.values(), *kept.values()]


def skipped_partitions(skipped: Mapping[str, PqcacheError], held: Iterable[FileEntry]) -> tuple[SkippedPartition, ...]:
    """The skipped partitions, sorted by name."""
    paths = {file.path for entry in held for file in entry.sources}
    known = {place for path in paths for place in (parent(path), place_of(path))}
    return tuple(
        SkippedPartition(
            partition=printable(place.rstrip("/")) or ".",
            kept=place in known or (place.endswith("/") and any(path.startswith(place) for path in paths)),
            reason=str(error),
        )
        for place, error in sorted(skipped.items())
    )
