"""Several nodes that each hold a share of a dataset (``pqcache sync --shard``): what they have to agree on.

A node reads its share as if it were alone, with its own ranks. What differs is how long an epoch is: as long for every
rank of every node. For that the ranks tell each other once, when a dataset is opened, what they hold; all the rest is
arithmetic, so workers and states need no further communication.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch.distributed as dist
from torch.utils.data import get_worker_info

from pqcache.errors import UsageError
from pqcache.reader.memory_budget import WINDOW, RowGroupSizes
from pqcache.reader.open import Data
from pqcache.reader.row_group_loader import RowGroupLoader
from pqcache.store.cache import CacheDirectory
from pqcache.store.layout import FILES
from pqcache.store.manifest_file import read_heading
from pqcache.store.shard import Shard, parse_shard


@dataclass(frozen=True, kw_only=True)
class Held:
    """What one rank tells the others: whose share it reads, what of it, and its largest row groups when decoded."""

    shard: Shard
    listing: str
    rows: int
    row_groups: str
    largest: tuple[tuple[int, int, int], ...]  # bytes of what is wanted, of all that is decoded for it, and its rows


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """What every rank of every node knows: ``rows`` of each node, and its own place among its node's ranks.

    ``row_groups`` names what all nodes read together. ``largest`` are the sizes of their largest row groups, from which
    all get the same window.
    """

    node: int
    rows: tuple[int, ...]
    replicas: int
    rank: int
    listing: str
    row_groups: str
    largest: tuple[tuple[int, int, int], ...]

    @property
    def sizes(self) -> RowGroupSizes:
        """The sizes of the largest row groups of all nodes."""
        return RowGroupSizes(*np.array(self.largest, np.int64).reshape(-1, 3).T)

    def total(self, batch_size: int, start: int, replicas: int, drop_last: bool) -> int:
        """Return where an epoch that goes on at a node's batch ``start`` ends: the same for all nodes.

        With ``drop_last`` that is where the smallest share ends, else where the largest does; the others repeat
        their epoch from its start.
        """
        batches = [rows // batch_size if drop_last else -(-rows // batch_size) for rows in self.rows]
        left = [max(0, count - start) for count in batches]
        rounds = min(count // replicas for count in left) if drop_last else max(-(-count // replicas) for count in left)
        return start + rounds * replicas


def agree(data: Data, loader: RowGroupLoader) -> Nodes | None:
    """Tell the other ranks what this one holds and return what all know; None where it is not a node's share.

    Every rank has to call this. Shares that do not make up one dataset raise the same UsageError everywhere.
    """
    heading = read_heading(data.root / FILES) if (data.root / FILES).is_file() else None
    if heading is None or heading.shard is None or heading.listing is None:
        return None
    shard = parse_shard(heading.shard)
    if shard.nodes == 1:
        return None
    if not (dist.is_available() and dist.is_initialized()) or get_worker_info() is not None:
        raise UsageError(
            f"{data.cache or data.root}",
            f"holds share {shard} alone, and how many batches the other nodes have is known through torch.distributed",
            "call init_process_group() before opening or resuming the dataset in the trainer's "
            "process, or give num_replicas= and rank= to read this share by itself",
        )
    plan, sizes = loader.plan, loader.sizes
    large = {*np.argsort(-sizes.selected, kind="stable")[:WINDOW], *np.argsort(-sizes.decoded, kind="stable")[:1]}
    largest = tuple((int(sizes.selected[i]), int(sizes.decoded[i]), int(sizes.decoded_rows[i])) for i in sorted(large))
    what = hashlib.blake2b(plan.counts.tobytes() + plan.fingerprint.encode(), digest_size=8).hexdigest()
    held = Held(shard=shard, listing=heading.listing, rows=int(plan.counts.sum()), row_groups=what, largest=largest)
    everyone: list[Held] = [held] * dist.get_world_size()
    dist.all_gather_object(everyone, held)
    return combine(everyone, dist.get_rank())


def combine(everyone: Sequence[Held], rank: int) -> Nodes:
    """Return what rank ``rank`` knows when all ranks have told what they hold, in the order of their ranks."""
    mine = everyone[rank]
    nodes = mine.shard.nodes
    others = sorted({held.shard.nodes for held in everyone})
    if len(others) > 1:
        raise UsageError(
            "",
            f"some nodes hold shares of {others[0]} nodes, others of {others[1]}",
            "give all of them the same N in 'pqcache sync CACHE --shard I/N'",
        )
    listings = {str(held.shard): held.listing for held in everyone}
    if len({held.listing for held in everyone}) > 1:
        told = ", ".join(f"{shard} of {listing}" for shard, listing in sorted(listings.items()))
        raise UsageError(
            "",
            f"the nodes hold shares of different listings of their source ({told}): it changed "
            "between their syncs, or they take different columns or rows",
            "run 'pqcache sync CACHE' on all of them again",
        )
    missing = [str(Shard(node, nodes)) for node in range(nodes) if str(Shard(node, nodes)) not in listings]
    if missing:
        raise UsageError(
            "",
            f"no rank reads share {missing[0]}",
            f"start the training on all {nodes} nodes, each with a cache of its own share, or share "
            "the source among those there are: 'pqcache sync CACHE --shard I/N'",
        )
    ranks = Counter(held.shard.node for held in everyone)
    for node in range(nodes):
        if ranks[node] != ranks[0]:
            raise UsageError(
                "",
                f"share 0/{nodes} is read by {ranks[0]} ranks and {node}/{nodes} by {ranks[node]}",
                "all shares need the same number, or some would end long before the others",
            )
    shares = {held.shard.node: held for held in everyone}
    for held in everyone:
        if held.row_groups != shares[held.shard.node].row_groups:
            raise UsageError(
                "",
                f"the ranks that read share {held.shard} see different rows",
                "open the same cache with the same filters",
            )
        if not held.rows:
            raise UsageError(
                "",
                f"share {held.shard} has no row that is wanted, so its ranks would have no batch",
                "instead of filters, say 'pqcache sync CACHE --where ...' on all nodes, which shares "
                "what is left evenly",
            )
    digest = hashlib.blake2b("".join(shares[node].row_groups for node in range(nodes)).encode(), digest_size=8)
    largest = sorted((item for held in shares.values() for item in held.largest), reverse=True)
    before = sum(1 for held in everyone[:rank] if held.shard == mine.shard)
    rows = tuple(shares[node].rows for node in range(nodes))
    return Nodes(
        node=mine.shard.node,
        rows=rows,
        replicas=ranks[0],
        rank=before,
        listing=f"listing-{mine.listing}",
        row_groups=digest.hexdigest(),
        largest=tuple(largest),
    )


def snapshot_of(cache: Path, listing: str) -> str:
    """Return the newest snapshot of a cache that holds its share of ``listing``; UsageError where none is kept."""
    for snapshot in reversed(CacheDirectory(cache).snapshots()):
        heading = read_heading(snapshot.path / FILES)
        if f"listing-{heading.listing}" == listing:
            return snapshot.id
    raise UsageError(cache, f"the state belongs to {listing}, of which no share is kept here any more")
