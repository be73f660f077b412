"""Which partitions of a table are its newest, in the order of their values, and how many of them ``--newest`` takes.

Partitions compare column by column from the outermost: a null, or a column that a path lacks, is older than any value,
whole numbers compare by value (``9`` before ``10``, and ``08`` before ``9``) and are older than all other text, which
compares by its characters. So which of two is newer never depends on what other values there are.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from pqcache.errors import PqcacheError, UsageError
from pqcache.store.hive import partition_values
from pqcache.units import format_size, parse_size

FREE = "free"
_INTEGER = re.compile(r"-?[0-9]+")

Rank = tuple[tuple[int, int, str], ...]


@dataclass(frozen=True)
class Newest:
    """What ``--newest`` asks for, as it was written: a number of partitions, or bytes at the source.

    Without either it is what the disk has free, see `pqcache.store.sync.newest_files`.
    """

    text: str
    partitions: int | None = None
    size: int | None = None

    def allows(self, partitions: int, size: int) -> bool:
        """Return whether so many partitions of so many bytes together are not too many."""
        few = self.partitions is None or partitions <= self.partitions
        return few and (self.size is None or size <= self.size)


@dataclass(frozen=True)
class NewestPartitions:
    """How many of the ``listed`` partitions are taken, and the directories ``outside``: those of the older ones."""

    taken: int
    listed: int
    outside: frozenset[str]


def parse_newest(text: str) -> Newest:
    """Return what ``--newest`` names; what is none of the three raises UsageError.

    >>> parse_newest("30").partitions, parse_newest("500GB").size == 500 << 30, parse_newest("free")
    (30, True, Newest(text='free', partitions=None, size=None))
    """
    word = text.strip()
    if word == FREE:
        return Newest(FREE)
    number = word.isascii() and word.isdigit()
    try:
        found = Newest(word, partitions=int(word)) if number else Newest(word, size=parse_size(word))
        valid = number or not word[-1].isdigit()  # 2.5 is neither whole partitions nor a size with a unit
    except (ValueError, OverflowError):  # UsageError is a ValueError
        valid = False
    if not valid:
        raise UsageError(
            f"--newest {text!r}",
            "not a number of partitions, a size or free",
            "write it like 30, 500GB or free; '' takes all partitions again",
        )
    if (found.size if found.partitions is None else found.partitions) == 0:
        raise UsageError(f"--newest {text!r}", "takes nothing", "write at least 1, or '' to take all partitions again")
    return found


def newest_partitions(
    sizes: Mapping[str, int], newest: Newest, waiting: Collection[str], source: str
) -> NewestPartitions:
    """Return which of the directories of ``sizes``, in bytes, hold the newest partitions that ``newest`` allows.

    The first partition that is too much ends them: none that is older is taken in its place. Directories with the same
    values are one partition. One of which all directories are in ``waiting`` does not count, and is outside only
    where it is older than the first that is too much.

    Raises UsageError where no directory has partition values, and where the newest partition alone is too much.
    """
    names = dict.fromkeys(name for directory in sorted(sizes) for name in partition_values(directory))
    if not names:
        raise UsageError(
            f"--newest {newest.text}",
            f"there are no partitions at {source}, whose order it needs",
            "leave the option out, or take all with --newest ''",
        )
    partitions: dict[Rank, list[str]] = {}
    for directory in sizes:
        partitions.setdefault(_rank(directory, names), []).append(directory)
    taken = total = 0
    outside: set[str] = set()
    for rank in sorted(partitions, reverse=True):
        directories = partitions[rank]
        if not outside and not all(directory in waiting for directory in directories):
            size = sum(sizes[directory] for directory in directories)
            if newest.allows(taken + 1, total + size):
                taken, total = taken + 1, total + size
                continue
            if not taken:
                raise _too_large(newest, min(directories), size)
            outside.update(directories)
        elif outside:
            outside.update(directories)
    return NewestPartitions(taken, len(partitions), frozenset(outside))


def _rank(directory: str, names: Iterable[str]) -> Rank:
    """Return what orders a directory's partition among others: greater is newer."""
    values = partition_values(directory)
    return tuple(_rank_of(values.get(name)) for name in names)


def _rank_of(value: str | None) -> tuple[int, int, str]:
    if value is None:
        return (0, 0, "")
    return (1, int(value), value) if _INTEGER.fullmatch(value) else (2, 0, value)


def _too_large(newest: Newest, directory: str, size: int) -> PqcacheError:
    subject = f"--newest {newest.text}"
    reason = f"the newest partition, {directory or 'the root'}, alone has {format_size(size)}"
    if newest.text == FREE:
        allowed = format_size(max(0, newest.size or 0))
        return PqcacheError(subject, f"{reason}, and {allowed} may be used", "free some space, or use a larger disk")
    return UsageError(subject, reason, "nothing was published, give a larger size or a number of partitions")
