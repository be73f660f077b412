"""Selects the part of a table that a cache takes: its newest partitions, or one node's share.

Newest: partitions are compared column by column from the outermost. A null, or a column missing from a path, is older
than any value. Numbers are compared by value (``9`` before ``10``, ``08`` before ``9``, ``9.50`` before ``10.50``) and
are older than all other text, which is compared by characters, except that a ``Z`` at the end of a time is older than a
fraction of a second. So the order of two partitions never depends on other values. Directories with equal values, such
as ``dt=1`` and ``dt=01``, are one partition.

Shares: each node computes them from the listing alone. Partitions are lined up in the order of a hash of their names,
each with its files in path order, and this line of bytes is cut into equal parts. A file belongs to the part that
contains its middle; so does a partition much smaller than a part, which is not cut.

- A part differs from the mean by at most the largest file, or 1/32 of the mean if that is more.
- If ``b`` bytes are added, removed or changed, each of the n - 1 cuts moves by less than that, and all together by
  at most (n - 1) / 2 times ``b``. Only the files that they pass change nodes, however large the dataset.

In path order the cuts would move equally far, but a sliding window of days would push all of them the same way each
night, and a node would hold adjacent days.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import groupby

from pqcache.errors import UsageError
from pqcache.store.manifest import SourceFile
from pqcache.store.partition_paths import parent, partition_values
from pqcache.units import format_size, parse_size

FREE = "free"
_NUMBER = re.compile(r"-?[0-9]+(\.[0-9]+)?")
_TIME = re.compile(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(\.\d+)?Z")

Rank = tuple[tuple[int, Decimal, str], ...]


MIN_PARTS = 32  # a partition of at most this part of a node's share is not cut


@dataclass(frozen=True)
class Newest:
    """A parsed ``--newest``: a number of partitions, bytes at the source, or neither for FREE."""

    text: str
    partitions: int | None = None
    size: int | None = None

    def allows(self, taken: Taken) -> bool:
        few = self.partitions is None or taken.partitions <= self.partitions
        return few and (self.size is None or taken.size <= self.size)


@dataclass(frozen=True, kw_only=True)
class FreeSpace:
    """Disk space of a cache for the newest partitions, assuming that they are as large as at the source.

    ``held`` is the size of the partitions in the cache, which need no more space. ``free`` includes the space that will
    be freed by removing older snapshots; the cache keeps ``keep`` snapshots in all. A tenth of both is left free, or
    the space used in the meantime if that is more: by a new partition, twice with ``rewrites``, and by those left out
    lately. Partitions older than all held ones are added only while another tenth is free, so that none comes and goes
    as the free space varies. The newest partition is always allowed; `check_space` may refuse it.
    """

    free: int
    held: int
    keep: int
    rewrites: bool
    text: str = FREE

    def allows(self, taken: Taken) -> bool:
        times = 2 if self.rewrites else 1
        tenth = (self.free + self.held) // 10
        reserve = max(tenth, (self.keep + times) * taken.largest) + (0 if taken.fresh else tenth)
        spare = self.free - reserve
        return taken.partitions == 1 or taken.size <= self.held + (spare // times if spare > 0 else spare)


@dataclass(frozen=True)
class Taken:
    """The newest partitions: how many, their bytes, the bytes of the largest; ``fresh`` unless older than all held."""

    partitions: int
    size: int
    largest: int
    fresh: bool


@dataclass(frozen=True)
class NewestPartitions:
    """The numbers of ``listed`` and taken partitions, and the directories ``outside`` these."""

    taken: int
    listed: int
    outside: frozenset[str]


def parse_newest(text: str) -> Newest:
    """Parse ``--newest``: a number of partitions, a size or ``free``; raises UsageError for anything else.

    >>> parse_newest("30").partitions, parse_newest("500GB").size == 500 << 30, parse_newest("free")
    (30, True, Newest(text='free', partitions=None, size=None))
    """
    word = text.strip()
    if word.lower() == FREE:
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
    sizes: Mapping[str, int],
    limit: Newest | FreeSpace,
    waiting: Collection[str] = (),
    held: Collection[str] = (),
) -> NewestPartitions:
    """Choose the newest partitions that ``limit`` allows, from directories with their ``sizes`` in bytes.

    The first partition that exceeds the limit ends the selection: no older one takes its place. Directories with the
    same values are one partition. A partition whose directories are all in ``waiting`` displaces no other, and is
    outside if it exceeds the limit. ``held`` are the directories in the cache.

    Raises UsageError if no directory has partition values, or if the newest partition alone exceeds the limit.
    """
    names = dict.fromkeys(name for directory in sorted(sizes) for name in partition_values(directory))
    if not names:
        advice = "leave the option out, or take all of it with --newest ''"
        raise UsageError(f"--newest {limit.text}", "needs partitions, but the table has none", advice)
    partitions: dict[Rank, list[str]] = {}
    for directory in sizes:
        partitions.setdefault(_rank(directory, names), []).append(directory)
    oldest_held = min((_rank(directory, names) for directory in held), default=None)
    taken = Taken(0, 0, 0, fresh=False)
    outside: set[str] = set()
    ended = False
    for rank in sorted(partitions, reverse=True):
        directories = partitions[rank]
        waits = all(directory in waiting for directory in directories)
        size, fresh = sum(map(sizes.__getitem__, directories)), oldest_held is not None and rank >= oldest_held
        more = Taken(taken.partitions + 1, taken.size + size, max(taken.largest, size), fresh)
        if not ended and limit.allows(more):
            taken = taken if waits else more
            continue
        if not (taken.partitions or waits):
            raise UsageError(
                f"--newest {limit.text}",
                f"the newest partition, {min(directories) or 'the root'}, alone has {format_size(size)}",
                "nothing was published, give a larger size or a number of partitions",
            )
        ended = ended or not waits
        outside.update(directories)
    return NewestPartitions(taken.partitions, len(partitions), frozenset(outside))


def _rank(directory: str, names: Iterable[str]) -> Rank:
    """Sort key of a directory's partition: greater is newer."""
    values = partition_values(directory)
    return tuple(_rank_of(values.get(name)) for name in names)


def _rank_of(value: str | None) -> tuple[int, Decimal, str]:
    if value is None:
        return (0, Decimal(0), "")
    if _NUMBER.fullmatch(value):
        return (1, Decimal(value), "")
    return (2, Decimal(0), f"{value[:-1]}\0" if _TIME.fullmatch(value) else value)


@dataclass(frozen=True)
class Shard:
    """Node ``node``, from 0, of ``nodes``."""

    node: int
    nodes: int

    def __post_init__(self) -> None:
        if not 0 <= self.node < self.nodes:
            raise UsageError(f"--shard {self}", "nodes are numbered from 0, so 3 nodes have 0/3, 1/3 and 2/3")

    def __str__(self) -> str:
        return f"{self.node}/{self.nodes}"


def parse_shard(text: str) -> Shard:
    """Parse ``--shard``.

    >>> parse_shard("0/3")
    Shard(node=0, nodes=3)
    """
    match = re.fullmatch(r"\s*(\d+)\s*/\s*(\d+)\s*", text)
    if match is None:
        raise UsageError(f"--shard {text!r}", "write the node's number, from 0, and the number of nodes, like 0/3")
    return Shard(int(match[1]), int(match[2]))


def owners(files: Iterable[SourceFile], nodes: int) -> dict[str, int]:
    """The node of each path: the same for the same paths and sizes, in any order."""
    line = sorted((_place(parent(file.path)), file.path, file.identity.size) for file in files)
    total = sum(size for _, _, size in line)
    found: dict[str, int] = {}
    at = 0

    def node_at(start: int, size: int) -> int:
        return min(nodes - 1, (2 * start + size) * nodes // (2 * total)) if total else 0

    for _, partition in groupby(line, key=lambda item: item[0]):
        here = [(path, size) for _, path, size in partition]
        size = sum(size for _, size in here)
        uncut = size * nodes * MIN_PARTS <= total
        node = node_at(at, size)
        for path, bytes_ in here:
            found[path] = node if uncut else node_at(at, bytes_)
            at += bytes_
    return found


def whole(directories: Iterable[str], shard: Shard) -> set[str]:
    """Partitions of a share without files on other nodes: those not at its ends."""
    line = sorted(directories, key=_place)
    return set(line[shard.node > 0 : len(line) - (shard.node < shard.nodes - 1)])


def listing_digest(files: Sequence[SourceFile], taken: Iterable[str], nodes: int, what: str) -> str:
    """A digest that tells nodes whether they divided the same listing.

    ``taken`` are the paths that do not wait for a marker or to settle, ``what`` identifies the columns and rows.
    """
    ready = set(taken)
    digest = hashlib.blake2b(f"{nodes}\0{what}".encode(), digest_size=8)
    for file in sorted(files, key=lambda file: file.path):
        known = file.identity
        digest.update(f"\0{file.path}\0{known.size} {known.mtime_ns} {known.shared_tag} {file.path in ready}".encode())
    return digest.hexdigest()


def _place(directory: str) -> tuple[bytes, str]:
    return hashlib.blake2b(directory.encode(), digest_size=8).digest(), directory
