"""What a cache remembers of its source, so that a run with nothing to do reads next to nothing of it.

``memo.json`` has what a listing of a table came to, by the state of the table's log and all options, and which files
without a suffix are Parquet, by their identities. It says what reading would, and no more: whether the cache holds the
same is told by the snapshot's summary and files.
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
from pqcache.store.layout import MEMO
from pqcache.store.manifest import SourceFile, TableVersion
from pqcache.store.newest import FREE, NewestPartitions
from pqcache.store.ownership import file_mode
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
        if self.version is None:
            return None
        return TableVersion(format=self.version[0], version=self.version[1], time=self.version[2])

    @property
    def newest_partitions(self) -> NewestPartitions | None:
        """Counts only; the partitions left out are not remembered."""
        return None if self.newest is None else NewestPartitions(self.newest[0], self.newest[1], frozenset())

    def is_public(self) -> bool:
        """Whether everyone can read the table's local files, so that no copy has to become private."""
        if not self.places:
            return True
        from pqcache.store.drivers.local import LocalSource

        for root, paths in self.places.items():
            source = LocalSource(root, {})
            source.note_modes(paths)
            if source.private_modes(paths, -1):
                return False
        return True


class Memo:
    def __init__(self, parquet: Mapping[str, bool] | None = None, listing: KnownListing | None = None) -> None:
        self._known, self._found = dict(parquet or {}), dict[str, bool]()
        self._listing = self._listed = listing

    def is_parquet(self, url: str, file: SourceFile) -> bool | None:
        """Whether a file is Parquet by its content; None if unknown."""
        key = _file_key(url, file)
        known = self._found.get(key, self._known.get(key))
        if known is not None:
            self._found[key] = known
        return known

    def put(self, url: str, file: SourceFile, is_parquet: bool) -> None:
        self._found[_file_key(url, file)] = is_parquet

    def listing(self, key: str | None) -> KnownListing | None:
        """What the source held in the state that ``key`` names; see `listing_key`."""
        return self._listing if self._listing is not None and self._listing.key == key else None

    def remember(self, listing: KnownListing | None) -> None:
        """Replaces what was remembered before."""
        self._listing = listing

    def write(self, cache: Path) -> None:
        """Keep in a cache only what this run has asked for or found."""
        if self._found == self._known and self._listing is self._listed:
            return
        parquet, other = (sorted(k for k, value in self._found.items() if value is kind) for kind in (True, False))
        listing = None if self._listing is None else vars(self._listing)
        text = json.dumps({"format": _FORMAT, "parquet": parquet, "other": other, "listing": listing})
        write_durably(cache / MEMO, f"{text}\n".encode(), cache / "tmp", file_mode())
        self._known, self._listed = dict(self._found), self._listing


def read_memo(cache: Path) -> Memo:
    """Empty if it cannot be read."""
    try:
        with open(open_plain(cache / MEMO, os.O_RDONLY), "rb") as file:
            values = json.loads(file.read())
        if values["format"] == _FORMAT:
            parquet = {str(key): kind == "parquet" for kind in ("parquet", "other") for key in values[kind]}
            return Memo(parquet, None if values["listing"] is None else KnownListing(**values["listing"]))
    except FileNotFoundError:
        pass
    except (OSError, *MALFORMED) as error:
        import logging  # a sync with nothing to do does not need it

        logging.getLogger("pqcache.sync").debug("%s: the source is read again: %s", cache / MEMO, error)
    return Memo()


def listing_key(source: Source, config: Config) -> str | None:
    """What names the listing of ``source`` in its present state; None if only a listing can tell.

    It does where the free space, or the files of other nodes, decide on what is taken, and where the source is no
    table with a log.
    """
    state = source.state
    if state is None or config.shard is not None or (config.newest or "").strip().lower() == FREE:
        return None
    values = {item.name: getattr(config, item.name) for item in fields(config)}
    options = json.dumps(values, sort_keys=True, default=dict)  # which has mappings that are none of json's
    parts = (__version__, source.url, state, options)
    return blake2b("\0".join(parts).encode(errors="surrogatepass"), digest_size=16).hexdigest()


def _file_key(url: str, file: SourceFile) -> str:
    identity = file.identity
    text = f"{url}\0{file.path}\0{identity.size} {identity.mtime_ns} {identity.tag}"
    return blake2b(text.encode(errors="surrogatepass"), digest_size=12).hexdigest()
