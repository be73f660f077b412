"""List a source: its Parquet files, after hostile names are refused and partitions are selected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pqcache.errors import SourceIncomplete
from pqcache.events import Listed, OnEvent
from pqcache.store.drivers.base import FIRST_ANSWER_TIMEOUT, Source
from pqcache.store.drivers.retries import RETRIES, with_retries
from pqcache.store.hive import is_data
from pqcache.store.manifest import SourceFile
from pqcache.store.shard import listing_digest, owners, parse_shard
from pqcache.store.sync.download.subset import Subset, select
from pqcache.store.sync.safety_checks import WaitRules, check_listing, files_to_take
from pqcache.units import format_count


@dataclass(frozen=True)
class Listing:
    """The Parquet files to take, the paths of everything at the source, and what to take of each file."""

    files: list[SourceFile]
    paths: list[str]
    subset: Subset


def list_source(
    source: Source,
    on_event: OnEvent,
    retries: int = RETRIES,
    where: str | None = None,
    columns: Sequence[str] | None = None,
) -> Listing:
    """Return the source's Parquet files in the partitions that may satisfy ``where``, and what to take of them.

    A name that is unsafe below the cache raises SourceError. A source without any Parquet file raises SourceIncomplete:
    an empty listing never replaces what is held.
    """
    found: list[SourceFile] = []

    def list_once() -> None:
        found[:] = source.list()

    with_retries(
        list_once, source.url, min(retries, 2), on_event, within=FIRST_ANSWER_TIMEOUT / 2
    )  # a silent server is asked once
    check_listing(found, source.url)
    files = [file for file in found if is_data(file.path)]
    if not files:
        others = f" among its {len(found):,} files" if found else ""
        raise SourceIncomplete(source.url, f"no Parquet file{others}", "check the URL and what wrote it")
    files, subset = select(source, files, where, columns)
    if not files:
        raise SourceIncomplete(source.url, f"no partition satisfies --where {where!r}")
    on_event(Listed(len(files), sum(file.identity.size for file in files)))
    return Listing(files, [file.path for file in found], subset)


def digest_of_shares(listing: Listing, shard: str | None, rules: WaitRules, url: str) -> str | None:
    """Return the digest of the listing that nodes share, or None without ``--shard``.

    A share without any file raises SourceIncomplete.
    """
    if shard is None:
        return None
    node, files = parse_shard(shard), listing.files
    if node.node not in owners(files, node.nodes).values():
        raise SourceIncomplete(
            url,
            f"--shard {node} is left without a file; {format_count(len(files), 'file')} there are too "
            f"few, or too uneven, for {node.nodes} nodes",
            "nothing was published, share them among fewer nodes",
        )
    ready = (file.path for file in files_to_take(files, listing.paths, (), rules))
    return listing_digest(files, ready, node.nodes, listing.subset.recipe)
