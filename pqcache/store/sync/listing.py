"""Lists a source: its Parquet files, after rejecting hostile names and selecting partitions.

``memo.json`` in a cache saves most of the work: it has the result of listing a table, keyed by the state of the table's
log and all options, and which files without a suffix are Parquet, by identity. It is only a memo of the source: whether
the cache holds the same follows from the snapshot's summary and files.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from pqcache.errors import (
    MALFORMED,
    CacheError,
    ParquetError,
    PqcacheError,
    SourceChanged,
    SourceDenied,
    SourceError,
    SourceIncomplete,
    SourceNotFound,
)
from pqcache.events import Advanced, Listed, OnEvent, Started, Warned, ignore
from pqcache.store.cache_directory import CacheDirectory
from pqcache.store.config import Config
from pqcache.store.drivers.base import Source, read_range
from pqcache.store.drivers.timeouts import FIRST_CONTACT, Patience, with_retries
from pqcache.store.gc import old_snapshots
from pqcache.store.layout import FILES, LEASE, MEMO
from pqcache.store.manifest import Manifest, SourceFile, TableVersion, digest_of_sources, table_digest, typed_version
from pqcache.store.ownership import file_mode
from pqcache.store.partition_paths import parent, partition_keys, partition_values
from pqcache.store.snapshot import Snapshot, read_kept
from pqcache.store.sync.bad_partitions import or_skip, with_number
from pqcache.store.sync.download.subset import KnownTypes, Subset, known_types, select_subset, types_of_source
from pqcache.store.sync.safety_checks import WaitRules, divide_both, files_to_take, free_space, unsafe_names, wait_rules
from pqcache.store.table_part import (
    FREE,
    FreeSpace,
    Newest,
    NewestPartitions,
    listing_digest,
    newest_partitions,
    owners,
    parse_newest,
    parse_shard,
    whole,
)
from pqcache.store.tables.data_files import (
    FileRules,
    PassedOver,
    check_above,
    check_passed_over,
    check_tables,
    count_passed_over,
    divide_listing,
    is_magic,
    lists_files,
    may_have_rows,
    several_tables,
    table_roots,
    without_other_snapshots,
)
from pqcache.system.disk import open_plain, write_durably
from pqcache.units import format_count, printable
from pqcache.versions import __version__

if TYPE_CHECKING:
    import pyarrow as pa


_FORMAT = 1


_REPORTED = 1000  # files that are reported at once while they are listed
_ROOTS, _THREADS = 32, 16  # directories that may be tables of their own: footers read, and at once
_APART = "+"  # at the end of a digest that no other node has
_MAGIC_SIZE = 4
_TRIES = 4  # of a listing whose files change before they are looked into
MAX_FILES = 10_000_000  # of a source, so that a listing without end is an error before the memory is full


@dataclass(frozen=True, kw_only=True)
class KnownListing:
    """The result of a listing.

    Attributes:
        key: identifies the state of the log and the options.
        files: how many there are.
        size: their bytes.
        sources: the digest of their paths and identities.
        subset: the columns and rows taken from each, as in a recipe.
        schema: the digest of the table's schema.
        version: format, number and time of the table's version, None without one.
        newest: with ``--newest``, the numbers of taken and of all partitions.
        places: local directories whose modes apply, and the table's files below each.
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
        """The numbers of partitions; those left out are not remembered."""
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
        """The listing of the source in the state ``key``; see `listing_key`."""
        return self._listing if self._listing is not None and self._listing.key == key else None

    def remember(self, listing: KnownListing | None) -> None:
        """Remember a listing in place of the previous one."""
        self._listing = listing

    def write(self, cache: Path) -> None:
        """Write the memo, with only the facts that this run has used or found."""
        if self._found == self._known and self._listing is self._listed:
            return
        parquet, other = (sorted(k for k, value in self._found.items() if value is kind) for kind in (True, False))
        listing = None if self._listing is None else vars(self._listing)
        text = json.dumps({"format": _FORMAT, "parquet": parquet, "other": other, "listing": listing})
        write_durably(cache / MEMO, f"{text}\n".encode(), cache / "tmp", file_mode())
        self._known, self._listed = dict(self._found), self._listing


def read_memo(cache: Path) -> Memo:
    """Read the memo; empty if it is unreadable."""
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
    """A key for the listing of ``source`` in its current state.

    None if only a listing can tell: if the selection depends on free space or the files of other nodes, or if the
    source isn't a table with a log.
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


@dataclass(frozen=True, kw_only=True)
class Listing:
    """The Parquet files to take, all files ``found`` at the source, and the ``subset`` to take from each.

    With ``--newest``, ``newest`` says which partitions are left out; their files are not in ``files``. ``passed_over``
    counts files not taken for other reasons. ``odd`` has an error for each entry that a cache cannot hold, by path,
    with a ``/`` at the end for a directory. Neither these nor the partitions in ``misfits``, whose values don't fit
    their types, are in ``files``. ``directories`` are those of all data files, even if ``--where`` leaves them out.
    """

    files: list[SourceFile]
    found: list[SourceFile]
    subset: Subset
    directories: Sequence[str]
    misfits: Mapping[str, SourceError] = field(default_factory=dict)
    newest: NewestPartitions | None = None
    passed_over: PassedOver = field(default_factory=PassedOver)
    odd: Mapping[str, PqcacheError] = field(default_factory=dict)

    def typed(self, table: TableVersion | None, config: Config, schema: bytes = b"") -> TableVersion | None:
        """The version to record in a snapshot, with the types of a directory's partitions."""
        if table is None and not any(map(partition_values, self.directories)):
            return None
        return typed_version(table, config.partition_types or {}, schema)

    def known(self, key: str, source: Source) -> KnownListing:
        table, newest = source.table_version, self.newest
        return KnownListing(
            key=key,
            files=len(self.files),
            size=sum(file.identity.size for file in self.files),
            sources=self.sources,
            subset=self.subset.recipe,
            schema=table_digest(table),
            version=None if table is None else (table.format, table.version, table.time),
            newest=None if newest is None else (newest.taken, newest.listed),
            places=source.local_places(),
        )

    @cached_property
    def paths(self) -> list[str]:
        return [file.path for file in self.found]

    @cached_property
    def sources(self) -> str:
        """Digest of the files, as in a summary."""
        return digest_of_sources(self.files)

    @property
    def outside(self) -> frozenset[str]:
        """Directories that are left out because others are newer."""
        return self.newest.outside if self.newest is not None else frozenset()


@dataclass(frozen=True, kw_only=True)
class ListingRules:
    """The selection of files, columns and rows; by default all Parquet files as they are.

    ``skip_bad``: a sync leaves out entries that a cache cannot hold. None outside of a sync, where they are errors.
    ``known`` returns the partition types of the cache's snapshot, or None.
    """

    where: str | None = None
    columns: Sequence[str] | None = None
    files: FileRules = field(default_factory=FileRules)
    skip_bad: bool | None = None
    ignore_case: bool = False
    known: KnownTypes = lambda: None


def listing_rules(config: Config, current: Snapshot | None) -> ListingRules:
    known = partial(_types_of, current, config.partition_types or {})
    return ListingRules(
        where=config.where,
        columns=config.columns,
        files=config.file_rules,
        skip_bad=config.skip_bad,
        ignore_case=config.ignore_case,
        known=known,
    )


def _types_of(current: Snapshot | None, declared: Mapping[str, str]) -> pa.Schema | None:
    if current is None:
        return None
    from pqcache.store.manifest_file import read_heading  # and pyarrow, which a plain sync need not wait for

    try:
        return known_types(read_heading(current.path / FILES).table, declared)
    except CacheError:  # then nothing is known of what is held, and all is synced again
        return None


def misfits_of(source: Source, listing: Listing, rules: ListingRules) -> dict[str, SourceError]:
    """One error per directory for partition values that don't fit their types."""
    _, misfits = types_of_source(source, listing.directories, rules.files.types, rules.known())
    return {directory: next(iter(errors.values())) for directory, errors in sorted(misfits.items())}


def without_misfits(
    listing: Listing, misfits: Mapping[str, SourceError], rules: ListingRules, waits: WaitRules
) -> Listing:
    """Drop ``misfits``; raises SourceError about them unless they are skipped.

    Partitions that still wait for their marker, or to settle, are not errors yet.
    """
    unfit = {parent(file.path) for file in listing.files} & misfits.keys()
    if not unfit:
        return listing
    ready = {parent(file.path) for file in files_to_take(listing.files, listing.paths, (), waits)}
    errors = {directory: error for directory, error in misfits.items() if directory in unfit & ready}
    rest = [file for file in listing.files if parent(file.path) not in unfit]
    if errors and not (rules.skip_bad and rest):
        error = with_number(list(errors.values()))
        raise or_skip(error) if rest else error
    return replace(listing, files=rest, misfits=errors)


def known_keys(snapshot: Snapshot | None) -> Collection[str]:
    """Partition keys as spelled in a snapshot."""
    below = () if snapshot is None else os.walk(snapshot.path)
    return {key for _, names, _ in below for name in names for key in partition_values(name)}


ListSource = Callable[[OnEvent], Listing]  # lists one source, always for the same selection


def list_source(
    source: Source,
    on_event: OnEvent,
    rules: ListingRules = ListingRules(),
    patience: Patience = FIRST_CONTACT,
    memo: Memo | None = None,
    before: Listing | None = None,
) -> Listing:
    """List the source's Parquet files in partitions that may satisfy a condition, and the subset to take.

    Raises SourceError for entries that a cache cannot hold, for instance because of their name, unless ``rules`` skip
    them; SourceIncomplete without any Parquet file, as an empty listing never replaces a snapshot; and UsageError for a
    table whose rows differ from those in its files. ``rules`` decide by name and content whether a file belongs to the
    dataset; ``memo`` saves reading files again. If a file changes before it is examined, the source is listed again, up
    to three times. If a directory has the same files as in ``before``, an already checked listing by the same rules,
    that is returned.
    """
    source.narrow(rules.where)
    plain = not source.capabilities.lists_only_data_files
    for number in range(_TRIES):
        odd: dict[str, PqcacheError] = {}
        source.odd = None if rules.skip_bad is None else odd
        found = _all_files(source, on_event, patience)
        if plain and before is not None and found == before.found and not (odd or before.odd):
            if not rules.files.as_files:
                check_above(source.url)
            return before
        unsafe = unsafe_names(found, source.url)
        safe = [file for file in found if file.path not in unsafe] if unsafe else found
        for file in found if unsafe else ():
            if file.path in unsafe and (not plain or may_have_rows(file, rules.files)):
                odd[file.path] = unsafe[file.path]
        try:
            files = dataset_files(source, safe, rules.files, on_event, memo, patience, odd) if plain else safe
            break
        except FileMoved:
            if number == _TRIES - 1:
                raise
    files, both = divide_both(files, safe, source.url)
    odd |= both
    _check_odd(odd, rules.skip_bad, bool(files))
    if not files:
        others = f" among its {len(found):,} files" if found else ""
        raise SourceIncomplete(source.url, f"no Parquet file{others}", "check the URL and the job that writes there")
    links = source.second_names([file.path for file in files])
    files = without_links(source, files, links, on_event)
    partition_keys(file.path for file in files)  # raises
    if plain and rules.skip_bad is None and not rules.files.as_files:  # a sync does so where something has changed
        check_one_table(source, files, patience=patience)
    types, known = rules.files.types, rules.known
    chosen, subset = select_subset(source, files, rules.where, rules.columns, types, known, rules.ignore_case)
    if not chosen:
        raise SourceIncomplete(source.url, f"no partition satisfies --where {rules.where!r}")
    on_event(Listed(len(chosen), sum(file.identity.size for file in chosen)))
    listed = [file for file in found if file.path not in odd and file.path not in links] if odd or links else found
    passed_over = replace(count_passed_over(listed, files), where=len(files) - len(chosen), links=len(links))
    directories = sorted({parent(file.path) for file in files})
    return Listing(files=chosen, found=found, subset=subset, directories=directories, passed_over=passed_over, odd=odd)


def _check_odd(odd: Mapping[str, PqcacheError], skip_bad: bool | None, is_rest: bool) -> None:
    """Raise the first error, with the total number, unless they are skipped and other files are left."""
    if not odd or (skip_bad and is_rest):
        return
    error = with_number([odd[path] for path in sorted(odd)])
    raise error if skip_bad is None or not is_rest else or_skip(error)


def without_links(
    source: Source, files: Sequence[SourceFile], links: Mapping[str, str], on_event: OnEvent
) -> list[SourceFile]:
    """Drop and report further names of files, as their rows would come twice."""
    if not links:
        return list(files)
    first = min(links)
    left = "is left out: its rows are" if len(links) == 1 else "are left out: their rows are"
    shown = f"{printable(first)} -> {printable(links[first] or '.')}"
    on_event(Warned(f"{source.url}: {format_count(len(links), 'link')} {left} taken under another name ({shown})"))
    return [file for file in files if file.path not in links]


def _all_files(source: Source, on_event: OnEvent, patience: Patience) -> list[SourceFile]:
    found: list[SourceFile] = []

    def list_once() -> None:
        found.clear()
        on_event(Started("list", 0, "files"))
        files = islice(source.list(), MAX_FILES + 1)
        while some := list(islice(files, _REPORTED)):
            found.extend(some)
            on_event(Advanced("list", len(some)))
        if len(found) > MAX_FILES:
            raise SourceError(source.url, f"lists more than {MAX_FILES:,} files", "name a directory below it")

    with_retries(list_once, source.url, patience, on_event)
    return found


def dataset_files(
    source: Source,
    found: Sequence[SourceFile],
    rules: FileRules,
    on_event: OnEvent,
    memo: Memo | None = None,
    patience: Patience = FIRST_CONTACT,
    odd: MutableMapping[str, PqcacheError] | None = None,
) -> list[SourceFile]:
    """Select the files of the dataset from all files ``found`` in a source, in the same order.

    Raises UsageError for a table whose rows a listing does not show, or if half of the files would not be taken.
    ``odd`` collects the errors for unreadable files, by path; without it they are raised.
    """
    if not rules.as_files:
        check_above(source.url)
        check_tables((file.path for file in found), source.url)
    else:
        found = without_other_snapshots(found)
    files = divide_listing(found, rules)
    if not (files.unknown or files.other or files.unfinished):
        return list(files.taken)
    denied: dict[str, PqcacheError] = {}
    parquet = parquet_by_content(source, files.unknown, memo or Memo(), patience, on_event, denied)
    if odd is None and denied:
        raise denied[min(denied)]
    if odd is not None:
        odd.update(denied)
    taken = parquet.union(files.taken)
    other = [file for file in files.unknown if file not in parquet and file.path not in denied]
    passed = [*files.other, *(file for file in other if not lists_files(file.path))]
    warning = check_passed_over(taken, passed, source.url, rules, files.unfinished) if taken else ""
    if warning:
        on_event(Warned(warning))
    return [file for file in found if file in taken]


def check_one_table(
    source: Source, files: Sequence[SourceFile], held: Iterable[str] = (), patience: Patience = FIRST_CONTACT
) -> None:
    """Raise UsageError if directories of ``files`` are different tables by their names and columns.

    Reads one footer in each of up to 32 directories whose names do not make them parts of one table, and none if all of
    these are among the paths ``held``. If several are held, columns may have been added or dropped since.
    """
    roots = table_roots(file.path for file in files)
    known = sorted(roots.keys() & table_roots(held).keys()) if len(roots) > 1 else []
    new = sorted(roots.keys() - known)
    if len(roots) < 2 or not new:
        return
    from pqcache.system.threads import in_parallel  # few syncs need it

    step = -(-len(new) // _ROOTS)
    some = {roots[root]: root for root in (*known[:1], *new[::step])}
    chosen = {some[file.path]: file for file in files if file.path in some}
    calls = [partial(_columns, source, chosen[root], patience) for root in some.values()]
    found = [
        (root, columns) for root, columns in zip(some.values(), in_parallel(calls, _THREADS), strict=True) if columns
    ]
    first, expected = found[0] if found else ("", frozenset())
    for root, columns in found[1:]:
        shared = expected
        if _lies_in(root, first) or _lies_in(first, root):  # parts of a table need not be partitioned alike
            keys = {key for path in (roots[root], roots[first]) for key in partition_values(parent(path))}
            columns, shared = columns - keys, expected - keys
        if columns == shared or (len(known) > 1 and (columns < shared or columns > shared)):
            continue
        name, owner = min((name, root if name in columns else first) for name in columns ^ shared)
        why = f"only {printable(owner) or 'the latter'} has {printable(name)}"
        raise several_tables(source.url, roots, first, root, why)


def _lies_in(root: str, other: str) -> bool:
    return root.startswith(f"{other}/") if other else True


def _columns(source: Source, file: SourceFile, patience: Patience) -> frozenset[str]:
    """Names of the columns in a file and in its path; empty if it is unreadable, which a sync reports."""
    from pqcache.store.sync.table_schema import read_remote_footer  # and pyarrow

    try:
        schema = with_retries(lambda: read_remote_footer(source, file)[1], file.path, patience, ignore)
    except (ParquetError, SourceDenied, SourceNotFound, SourceChanged):
        return frozenset()
    names = (name for name in schema.names if not name.startswith("__index_level_"))  # which pandas leaves, or not
    return frozenset((*names, *partition_values(parent(file.path))))


def ready_paths(listing: Listing, rules: WaitRules) -> set[str]:
    """Files of a listing that do not wait, on any node."""
    return {file.path for file in files_to_take(listing.files, listing.paths, (), rules)}


def digest_of_shares(
    listing: Listing,
    shard: str | None,
    ready: Collection[str],
    url: str,
    skipped: Collection[str] = (),
    files: Sequence[SourceFile] = (),
    manifest: Manifest | None = None,
) -> str | None:
    """Digest of the listing that nodes share, or None without ``--shard``.

    If this node keeps or leaves out other files than the rest, it is marked and unique to this node: see `_apart`. A
    share without any file raises SourceIncomplete.
    """
    if shard is None:
        return None
    node, listed = parse_shard(shard), listing.files
    owner = owners(listed, node.nodes)
    if node.node not in owner.values():
        raise SourceIncomplete(
            url,
            f"--shard {node} is left without a file; {format_count(len(listed), 'file')} there are too "
            f"few, or too uneven, for {node.nodes} nodes",
            "nothing was published, share them among fewer nodes",
        )
    divided = {parent(path) for path, at in owner.items() if at != node.node} if skipped else set()
    apart = _apart(divided, listed, ready, skipped, files, manifest)
    digest = listing_digest(listed, ready, node.nodes, "\0".join([listing.subset.recipe, *sorted(apart)]))
    return digest + _APART if apart else digest


def _apart(
    divided: Collection[str],
    listed: Sequence[SourceFile],
    ready: Collection[str],
    skipped: Collection[str],
    files: Sequence[SourceFile],
    manifest: Manifest | None,
) -> set[str]:
    """The directories that nodes may hold in different versions.

    These are directories ``skipped`` on this node that are ``divided`` among nodes, as others may not skip them, or
    whose old version may have been, which the ``manifest`` doesn't tell, as others drop their files of it. The root is
    one if old versions of its files are among the taken ``files``, and so are files kept from a marked snapshot.
    """
    apart = set(divided)
    marked = manifest is not None and (manifest.listing or "").endswith(_APART)
    if skipped and manifest is not None and manifest.shard is not None:
        before = {parent(file.path) for entry in manifest.files for file in entry.sources}
        apart |= before if marked else before - whole(before, parse_shard(manifest.shard))
    apart &= set(skipped)
    if skipped:
        apart |= {parent(file.path) for file in set(files).difference(listed)} & {""}
    if marked:
        apart |= {parent(file.path) for file in files if file.path not in ready}
    return apart


class FileMoved(SourceIncomplete):
    """A file has changed since it was listed."""


def parquet_by_content(
    source: Source,
    files: Sequence[SourceFile],
    memo: Memo,
    patience: Patience,
    on_event: OnEvent,
    denied: MutableMapping[str, PqcacheError],
) -> set[SourceFile]:
    """The files that are Parquet by their first or last bytes.

    Files missing in ``memo`` are read, in parallel. Raises SourceIncomplete for a file that has changed since it was
    listed. ``denied`` collects the errors for unreadable files, by path.
    """
    unknown = [file for file in files if memo.is_parquet(source.url, file) is None]
    if unknown:
        from pqcache.system.threads import in_parallel  # a sync with nothing to do does not need it

        _log("%s: %d files are looked into", source.url, len(unknown))
        calls = [partial(_has_magic, source, file, patience, on_event) for file in unknown]
        for file, is_parquet in zip(unknown, in_parallel(calls, _THREADS), strict=True):
            if isinstance(is_parquet, SourceDenied):
                denied[file.path] = is_parquet
            else:
                memo.put(source.url, file, is_parquet)
    return {file for file in files if memo.is_parquet(source.url, file)}


def _has_magic(source: Source, file: SourceFile, patience: Patience, on_event: OnEvent) -> bool | SourceDenied:
    def read(offset: int) -> bytes:
        return read_range(source, file.path, offset, _MAGIC_SIZE, file.identity.tag)

    for offset in (0, file.identity.size - _MAGIC_SIZE):
        try:
            data = with_retries(partial(read, offset), file.path, patience, on_event)
        except SourceDenied as error:
            return error
        except (SourceNotFound, SourceChanged) as error:
            raise _moved(source, file) from error
        if len(data) < _MAGIC_SIZE:
            raise _moved(source, file)
        if is_magic(data):
            return True
    return False


def _moved(source: Source, file: SourceFile) -> FileMoved:
    return FileMoved(source.url_of(file.path), "changed while it was listed", "nothing was published, sync again")


def _log(message: str, *values: object) -> None:
    import logging  # as above

    logging.getLogger("pqcache.sync").debug(message, *values)


@dataclass(frozen=True, kw_only=True)
class NewestRule:
    """The rule for the newest partitions, the same for all listings of a run.

    ``snapshot`` has the held directories; None with shares, as all nodes have to take the same partitions whatever they
    hold. ``space`` is the space of an empty cache, None if it isn't needed.
    """

    newest: Newest
    waits: WaitRules
    snapshot: Path | None
    space: FreeSpace | None

    def holds(self, directory: str) -> bool:
        return self.snapshot is not None and directory != "" and os.path.isdir(f"{self.snapshot}/{directory}")


def newest_rule(config: Config, cache: CacheDirectory, current: Snapshot | None) -> NewestRule | None:
    """None if all partitions are taken."""
    if not config.newest:
        return None
    newest, space = parse_newest(config.newest), None
    if newest.text == FREE:
        free, rewrites = _free_space(cache, current, config.keep), config.row_group_size is not None
        space = FreeSpace(free=free, held=0, keep=config.keep, rewrites=rewrites)
    snapshot = current.path if current is not None and config.shard is None else None
    return NewestRule(newest=newest, waits=wait_rules(config), snapshot=snapshot, space=space)


def only_newest(listing: Listing, rule: NewestRule | None, unfit: Collection[str] = ()) -> Listing:
    """Reduce a listing to the newest partitions; raises like `newest_partitions`.

    A waiting partition that isn't held displaces no other before it is taken itself; neither does one in ``unfit``.
    """
    if rule is None:
        return listing
    sizes: Counter[str] = Counter()
    for file in listing.files:
        sizes[parent(file.path)] += file.identity.size
    ready = {parent(file.path) for file in files_to_take(listing.files, listing.paths, (), rule.waits)}
    waiting = {directory for directory in sizes.keys() - ready if not rule.holds(directory)}
    limit: Newest | FreeSpace = rule.newest
    held: set[str] = set()
    if rule.space is not None:
        held = {directory for directory in sizes if rule.holds(directory)}
        limit = replace(rule.space, held=sum(sizes[directory] for directory in held))
    found = newest_partitions(sizes, limit, waiting.union(unfit), held)
    files = [file for file in listing.files if parent(file.path) not in found.outside]
    return replace(listing, files=files, newest=found)


def _free_space(cache: CacheDirectory, current: Snapshot | None, keep: int) -> int:
    """Bytes that a run may use, now or after the next runs.

    This is the sum of free bytes, downloads of dead runs, which are taken over, and files that are only in the older
    ones of the ``keep`` newest snapshots. Files of other snapshots, kept for readers, do not count.
    """
    free = free_space(cache.path)
    left = _files(cache.tmp_dir.glob("*/fetch"))
    free += sum(_bytes(status) for status in left if status.st_nlink == 1)
    if current is None or keep == 1:
        return free
    older = [snapshot.path for snapshot in old_snapshots(cache, current)][1 - keep :]
    pinned = [cache.snapshots_dir / snapshot for snapshot in read_kept(cache.path).pins]
    if (served := cache.current()) is not None and served != current:  # of a run that starts from a candidate
        pinned.append(served.path)
    kept = {status.st_ino: _bytes(status) for status in _files(older)}
    shared = {status.st_ino for status in _files([current.path, *pinned])}
    return free + sum(size for inode, size in kept.items() if inode not in shared)


def _files(directories: Iterable[Path]) -> Iterator[os.stat_result]:
    """Status of each file below ``directories``, except metadata, which each snapshot writes anew."""
    for top in directories:
        for directory, below, names in os.walk(top):
            below[:] = [name for name in below if name != parent(LEASE)]
            for name in names:
                with suppress(FileNotFoundError):  # a dry run, while another run is at work
                    yield os.lstat(os.path.join(directory, name))


def _bytes(status: os.stat_result) -> int:
    """The least bytes freed by removing a file; an incomplete download may have holes."""
    return min(status.st_size, status.st_blocks * 512)
