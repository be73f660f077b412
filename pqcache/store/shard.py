"""Which files of a source belong to which of several nodes, worked out by each of them from the listing alone.

Partitions are laid side by side in the order of a hash of their names, each with its files in path order, and
this line of bytes is cut into as many equal parts as there are nodes. A file belongs to the part in which its
middle lies; a partition that is small beside a part is not cut, and belongs where its middle lies.

- A part differs from the mean by at most the largest file, or 1/32 of the mean if that is more.
- Where ``b`` bytes come, go or change, each of the n - 1 cuts moves by less than that, all of them together by at
  most (n - 1) / 2 times ``b``. Only the files that they pass change nodes: no others, however large the dataset.

In path order the cuts would move as far too, but a window of days that moves on would push all of them the same
way each night, and a node would hold days that lie next to each other.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from pqcache.errors import UsageError
from pqcache.store.hive import parent
from pqcache.store.manifest import SourceFile

MIN_PARTS = 32  # a partition of at most this part of a node's share is not cut


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
    """Return the shard that ``--shard`` names.

    >>> parse_shard("0/3")
    Shard(node=0, nodes=3)
    """
    match = re.fullmatch(r"\s*(\d+)\s*/\s*(\d+)\s*", text)
    if match is None:
        raise UsageError(f"--shard {text!r}", "write the node's number, from 0, and the number of nodes, like 0/3")
    return Shard(int(match[1]), int(match[2]))


def owners(files: Iterable[SourceFile], nodes: int) -> dict[str, int]:
    """Node of each path: the same for the same paths and sizes, in whatever order."""
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
    """Partitions of a share that no other node can have files of: they are not at its ends."""
    line = sorted(directories, key=_place)
    return set(line[shard.node > 0 : len(line) - (shard.node < shard.nodes - 1)])


def listing_digest(files: Sequence[SourceFile], taken: Iterable[str], nodes: int, what: str) -> str:
    """Digest by which nodes know that they have shared the same listing.

    ``taken`` are the paths that do not wait for a marker or to settle, ``what`` says which columns and rows are taken.
    """
    ready = set(taken)
    digest = hashlib.blake2b(f"{nodes}\0{what}".encode(), digest_size=8)
    for file in sorted(files, key=lambda file: file.path):
        known = file.identity
        digest.update(f"\0{file.path}\0{known.size} {known.mtime_ns} {known.shared_tag} {file.path in ready}".encode())
    return digest.hexdigest()


def _place(directory: str) -> tuple[bytes, str]:
    return hashlib.blake2b(directory.encode(), digest_size=8).digest(), directory
