"""Remembers what the listing of a table came to, so that a sync whose log is as it was need not read it again.

Kept in a cache as ``listed.json``, by the state of the log and by all options. It says what a listing would, and no
more: there is nothing to do only where the snapshot's summary and files say so too.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from hashlib import blake2b
from pathlib import Path

from pqcache.errors import MALFORMED
from pqcache.store.config import Config
from pqcache.store.drivers.base import Source
from pqcache.store.layout import LISTED
from pqcache.store.manifest import TableVersion
from pqcache.store.manifest_digest import table_digest
from pqcache.store.newest import FREE, NewestPartitions
from pqcache.store.ownership import file_mode
from pqcache.store.sync.listing import Listing
from pqcache.system.disk import open_plain, write_durably
from pqcache.versions import __version__

_FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class KnownListing:
    """What a listing came to.

    Attributes:
        key: names the state of the log, and the options.
        files: how many there are.
        size: their bytes.
        sources: the digest of their paths and identities.
        subset: what is taken of each, as in a recipe.
        schema: the digest of the table's schema.
        version: format, number and time of the table's version, None where there is none.
        newest: with ``--newest``, the partitions that are taken and those that there are.
        places: local directories, and files of the table below each, whose modes count.
    """

    key: str
    files: int
    size: int
    sources: str
    subset: str
    schema: str | None
    version: Sequence[str] | None
    newest: Sequence[int] | None = None
    places: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def table(self) -> TableVersion | None:
        """The version of the table, without its schema."""
        if self.version is None:
            return None
        return TableVersion(format=self.version[0], version=self.version[1], time=self.version[2])

    @property
    def newest_partitions(self) -> NewestPartitions | None:
        """What was taken of the partitions, without those that were left out."""
        return None if self.newest is None else NewestPartitions(self.newest[0], self.newest[1], frozenset())

    def is_public(self) -> bool:
        """Return whether everyone can read all local files of the table, so that no copy has to become private."""
        if not self.places:
            return True
        from pqcache.store.drivers.local import LocalSource

        for root, paths in self.places.items():
            source = LocalSource(root, {})
            source.note_modes(paths)
            if source.private_modes(paths, -1):
                return False
        return True


def listing_key(source: Source, config: Config) -> str | None:
    """Return what names the listing of ``source`` in its present state; None where only the listing can tell.

    It does where the free space, or the files of other nodes, decide on what is taken, and where the source is no
    table with a log.
    """
    state = source.state
    if state is None or config.shard is not None or (config.newest or "").strip().lower() == FREE:
        return None
    values = {item.name: getattr(config, item.name) for item in fields(config)}
    options = json.dumps(values, sort_keys=True, default=dict)  # which has mappings that are none of json's
    parts = (str(_FORMAT), __version__, source.url, state, options)
    return blake2b("\0".join(parts).encode(errors="surrogatepass"), digest_size=16).hexdigest()


def known_listing(cache: Path, key: str | None) -> KnownListing | None:
    """Return what ``cache`` remembers under ``key``; None where it is nothing, or cannot be read."""
    if key is None:
        return None
    try:
        with open(open_plain(cache / LISTED, os.O_RDONLY), "rb") as file:
            values = json.loads(file.read())
        if values.pop("format") != _FORMAT or values["key"] != key:
            return None
        return KnownListing(**values)
    except FileNotFoundError:
        return None
    except (OSError, *MALFORMED) as error:
        import logging  # a sync with nothing to do does not need it

        logging.getLogger("pqcache.sync").debug("%s: the table is listed again: %s", cache / LISTED, error)
        return None


def remember_listing(cache: Path, key: str | None, source: Source, listing: Listing) -> None:
    """Have ``cache`` remember a listing of ``source`` under ``key``, and nothing else; without a key nothing."""
    if key is None:
        (cache / LISTED).unlink(missing_ok=True)
        return
    table, newest = source.table_version, listing.newest
    found = KnownListing(
        key=key,
        files=len(listing.files),
        size=sum(file.identity.size for file in listing.files),
        sources=listing.sources,
        subset=listing.subset.recipe,
        schema=table_digest(table),
        version=None if table is None else (table.format, table.version, table.time),
        newest=None if newest is None else (newest.taken, newest.listed),
        places={} if source.local_modes is None else source.local_modes.local_places(),
    )
    text = json.dumps({"format": _FORMAT, **vars(found)})
    write_durably(cache / LISTED, f"{text}\n".encode(), cache / "tmp", file_mode())
