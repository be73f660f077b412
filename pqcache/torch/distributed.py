"""Ranks on several nodes, each with its share of a dataset (``pqcache sync --shard``).

A node reads its share with its own ranks, as if it were alone. Only the length of an epoch must be the same on all
nodes. So the ranks exchange the sizes of their shares once, when a dataset is opened; the rest is arithmetic, and
workers and states need no communication.
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
from pqcache.reader.decode import RowGroups
from pqcache.reader.epoch_options import WINDOW
from pqcache.reader.memory_budget import RowGroupSizes
from pqcache.reader.open_dataset import LocalDataset, heading_of
from pqcache.reader.ranks import of_torch
from pqcache.store.cache_directory import CacheDirectory
from pqcache.store.layout import FILES
from pqcache.store.manifest_file import read_heading
from pqcache.store.snapshot import Snapshot
from pqcache.store.table_part import Shard, parse_shard


@dataclass(frozen=True, kw_only=True)
class RankShare:
    """A rank's report to the others: its share, and its largest decoded row groups.

    ``largest`` has, for each of these row groups, the bytes selected, the bytes decoded for them, and the rows.
    """

    shard: Shard
    listing: str
    rows: int
    row_groups: str
    largest: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, kw_only=True)
class NodeShares:
    """The shares of all nodes: the ``rows`` of each, and this rank's place among the ``ranks`` of its node.

    ``row_groups`` is a hash of the rows that all nodes read together. The sizes of the ``largest`` row groups give all
    nodes the same window.
    """

    node: int
    rows: tuple[int, ...]
    ranks: int
    rank: int
    listing: str
    row_groups: str
    largest: tuple[tuple[int, int, int], ...]
    of_all: tuple[int, int] = (1, 0)  # the number of all ranks and this one's, when it was opened

    @property
    def sizes(self) -> RowGroupSizes:
        selected, decoded, rows = np.array(self.largest, np.int64).reshape(-1, 3).T
        return RowGroupSizes(selected, decoded, rows, complete=False)

    def check(self, ranks: tuple[int, int]) -> None:
        """Raise UsageError unless ``ranks`` (their number and this one) are the same as when the shares were opened."""
        if ranks != self.of_all:
            (count, rank), (count_then, rank_then) = ranks, self.of_all
            raise UsageError(
                f"share {self.node}/{len(self.rows)}",
                f"it was opened on rank {rank_then} of {count_then} and is read on rank {rank} of {count}",
                "open the dataset after init_process_group() in the process that reads it",
            )

    def total(self, batch_size: int, start: int, ranks: int, drop_last: bool) -> int:
        """The end of an epoch continued at a node's batch ``start``, the same for all nodes.

        With ``drop_last``, the smallest share decides; otherwise the largest, and other nodes repeat the beginning of
        their epoch.
        """
        batches = [rows // batch_size if drop_last else -(-rows // batch_size) for rows in self.rows]
        left = [max(0, count - start) for count in batches]
        rounds = min(count // ranks for count in left) if drop_last else max(-(-count // ranks) for count in left)
        return start + rounds * ranks


def gather_shares(data: LocalDataset, groups: RowGroups) -> NodeShares | None:
    """Gather the shares of all nodes; None if the dataset is not a node's share.

    Every rank must call this. Raises the same UsageError on all of them if the shares don't make up a dataset.
    """
    heading = heading_of(data)
    if heading is None or heading.shard is None or heading.listing is None:
        return None
    shard = parse_shard(heading.shard)
    if shard.nodes == 1:
        return None
    if of_torch() is None or get_worker_info() is not None:
        raise UsageError(
            f"{data.cache or data.root}",
            f"holds share {shard} alone, and the other nodes' numbers of batches come through torch.distributed",
            "call init_process_group() before opening or resuming the dataset in the trainer's "
            "process, or give num_replicas= and rank= to read this share by itself",
        )
    plan, sizes = groups.plan, groups.sizes
    large = {*np.argsort(-sizes.selected, kind="stable")[:WINDOW], *np.argsort(-sizes.decoded, kind="stable")[:1]}
    share = RankShare(
        shard=shard,
        listing=heading.listing,
        rows=int(plan.counts.sum()),
        row_groups=hashlib.blake2b(plan.counts.tobytes() + plan.fingerprint.encode(), digest_size=8).hexdigest(),
        largest=tuple(
            (int(sizes.selected[i]), int(sizes.decoded[i]), int(sizes.decoded_rows[i])) for i in sorted(large)
        ),
    )
    shares: list[RankShare] = [share] * dist.get_world_size()
    dist.all_gather_object(shares, share)
    return combine_shares(shares, dist.get_rank())


def combine_shares(shares: Sequence[RankShare], rank: int) -> NodeShares:
    """Combine the reports of all ranks, in their order, for one ``rank``."""
    _check_sources(shares)
    _check_rows(shares)
    shard = shares[rank].shard
    of_node = {share.shard.node: share for share in shares}
    nodes = [of_node[node] for node in range(shard.nodes)]
    return NodeShares(
        node=shard.node,
        rows=tuple(share.rows for share in nodes),
        ranks=len(shares) // shard.nodes,
        rank=sum(share.shard == shard for share in shares[:rank]),
        listing=f"listing-{shares[rank].listing}",
        row_groups=hashlib.blake2b("".join(share.row_groups for share in nodes).encode(), digest_size=8).hexdigest(),
        largest=tuple(sorted((row_group for share in nodes for row_group in share.largest), reverse=True)),
        of_all=(len(shares), rank),
    )


def _check_sources(shares: Sequence[RankShare]) -> None:
    numbers = sorted({share.shard.nodes for share in shares})
    if len(numbers) > 1:
        reason = f"some nodes hold shares of {numbers[0]} nodes, others of {numbers[1]}"
        raise UsageError("--shard", reason, "give all of them the same N in 'pqcache sync CACHE --shard I/N'")
    listings = {str(share.shard): share.listing for share in shares}
    if len({share.listing for share in shares}) > 1:
        differing = ", ".join(f"{shard} of {listing}" for shard, listing in sorted(listings.items()))
        raise UsageError(
            "--shard",
            f"the nodes hold shares of different listings of their source ({differing}): it changed "
            "between their syncs, or they take different columns or rows",
            "run 'pqcache sync CACHE' on all of them again",
        )


def _check_rows(shares: Sequence[RankShare]) -> None:
    """Raise UsageError unless each share has rows, and the same number of ranks that agree on its rows."""
    nodes = shares[0].shard.nodes
    ranks = Counter(share.shard.node for share in shares)
    for node in range(nodes):
        if not ranks[node]:
            raise UsageError(
                f"share {node}/{nodes}",
                "no rank reads it",
                f"start the training on all {nodes} nodes, each with a cache of its own share, or share "
                "the source among those there are: 'pqcache sync CACHE --shard I/N'",
            )
    for node in range(nodes):
        if ranks[node] != ranks[0]:
            raise UsageError(
                f"share {node}/{nodes}",
                f"{ranks[node]} ranks read it, and {ranks[0]} read share 0/{nodes}",
                "all shares need the same number, or some would end long before the others",
            )
    row_groups: dict[int, str] = {}
    for share in shares:
        if share.row_groups != row_groups.setdefault(share.shard.node, share.row_groups):
            raise UsageError(
                f"share {share.shard}",
                "the ranks that read it see different rows",
                "open the same cache with the same filters",
            )
        if not share.rows:
            raise UsageError(
                f"share {share.shard}",
                "no row of it is selected, so its ranks would have no batch",
                "instead of filters, use 'pqcache sync CACHE --where ...' on all nodes, which divides "
                "what is left evenly",
            )


def listing_of(snapshot: Snapshot) -> str:
    """The name used in states for the listing divided among nodes, of which a snapshot is a share."""
    return f"listing-{read_heading(snapshot.path / FILES).listing}"


def snapshot_of(cache: Path, listing: str) -> str:
    """The newest snapshot of a cache with its share of ``listing``; raises UsageError if there is none."""
    for snapshot in reversed(CacheDirectory(cache).snapshots()):
        if listing_of(snapshot) == listing:
            return snapshot.id
    raise UsageError(cache, f"the state belongs to {listing}, and no share of it is kept here any more")
