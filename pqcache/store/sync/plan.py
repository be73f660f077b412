"""Plans what a sync or a repartition does, without changing anything.

A plan is a plain value: ``--dry-run`` shows the plan that a run without it applies.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from functools import cached_property, lru_cache
from hashlib import blake2b
from operator import attrgetter
from typing import TypeVar

from pqcache.events import Planned
from pqcache.parquet.rewrite.recipe import canonical_json, shuffle_of
from pqcache.store.config import Config
from pqcache.store.manifest import FileEntry, Identity, Manifest, SourceFile
from pqcache.store.partition_paths import parent
from pqcache.units import format_count, format_size

_Located = TypeVar("_Located", SourceFile, FileEntry)
_path = attrgetter("path")


SUFFIX = ".parquet"
_MAX_NAME = 255  # bytes of a file's name


@dataclass(frozen=True)
class Recipe:
    """How a snapshot's files are made from the source's: the part of each to download, and how to rewrite it.

    Both are canonical JSON objects, so equal texts mean the same; empty means the whole file, and unchanged.
    """

    subset: str = ""
    rewrite: str = ""

    @cached_property
    def text(self) -> str:
        """The recipe as stored in an entry: canonical JSON, empty for a plain copy."""
        parts = {name: json.loads(part) for name, part in (("fetch", self.subset), ("rewrite", self.rewrite)) if part}
        return canonical_json(parts) if parts else ""


PLAIN = Recipe()


@lru_cache(maxsize=64)
def recipe_of(text: str) -> Recipe:
    """Inverse of `Recipe.text`."""
    parts = json.loads(text or "{}")
    return Recipe(*(canonical_json(parts[name]) if name in parts else "" for name in ("fetch", "rewrite")))


def recipe_for(config: Config, subset: str) -> Recipe:
    rewrite = config.rewrite()
    return Recipe(subset, rewrite.recipe if rewrite is not None else "")


@dataclass(frozen=True)
class Input:
    """One input of a rewritten directory: a source file, or an entry that the cache already holds."""

    file: SourceFile | None
    entry: FileEntry | None

    @property
    def path(self) -> str:
        """The path that decides the row order within the directory."""
        known = self.entry if self.entry is not None else self.file
        assert known is not None
        return known.path

    @property
    def size(self) -> int:
        if self.entry is not None:
            return self.entry.size
        assert self.file is not None
        return self.file.identity.size


@dataclass(frozen=True)
class BuiltFile:
    """A file that the previous snapshot lacks: its location and entry."""

    file: str
    entry: FileEntry


@dataclass(frozen=True, kw_only=True)
class DirectoryPlan:
    """The plan for one partition directory.

    ``keep`` is linked from the current snapshot, ``copy`` is copied unchanged from the source, and ``rewrite`` are the
    inputs of a rewritten directory, in row order. ``found`` is linked from other snapshots. ``renamed`` has the new
    paths of kept files that are renamed.
    """

    directory: str
    keep: tuple[FileEntry, ...] = ()
    copy: tuple[SourceFile, ...] = ()
    rewrite: tuple[Input, ...] = ()
    found: tuple[BuiltFile, ...] = ()
    renamed: Mapping[str, str] = field(default_factory=dict, compare=False)

    @property
    def kept(self) -> list[tuple[FileEntry, FileEntry]]:
        """Entries of kept files: the held ones, and the new ones."""
        if not self.renamed:
            return [(entry, entry) for entry in self.keep]
        return [(e, replace(e, path=self.renamed[e.path]) if e.path in self.renamed else e) for e in self.keep]

    @property
    def downloads(self) -> list[SourceFile]:
        return [*self.copy, *(item.file for item in self.rewrite if item.entry is None and item.file)]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The plan for all partition directories, and how many source files it concerns.

    ``added``, ``changed``, ``removed`` and ``unchanged`` count source files. ``paths`` has the cache paths of source
    files whose path differs there.
    """

    directories: tuple[DirectoryPlan, ...]
    recipe: Recipe
    added: tuple[str, ...]
    changed: tuple[str, ...]
    removed: tuple[str, ...]
    unchanged: int
    paths: Mapping[str, str] = field(default_factory=dict, compare=False)

    def path_of(self, file: SourceFile) -> str:
        """The path of a copy in the cache."""
        return self.paths.get(file.path, file.path)

    @property
    def downloads(self) -> list[SourceFile]:
        return [file for directory in self.directories for file in directory.downloads]

    @property
    def download_bytes(self) -> int:
        return sum(file.identity.size for file in self.downloads)

    @property
    def rewrite_bytes(self) -> int:
        """Bytes read by rewriting; at most about as many are written."""
        return sum(item.size for directory in self.directories for item in directory.rewrite)

    @property
    def rewrites(self) -> int:
        return sum(1 for directory in self.directories if directory.rewrite)

    @property
    def nothing_to_do(self) -> bool:
        """Whether the plan would make the current snapshot again."""
        return not (self.removed or any(d.copy or d.rewrite or d.found for d in self.directories))


def plan_sync(
    listing: Sequence[SourceFile],
    held: Iterable[FileEntry],
    recipe: Recipe = PLAIN,
    damaged: frozenset[str] = frozenset(),
    others: frozenset[str] = frozenset(),
) -> Plan:
    """Plan how to get from the entries ``held`` to the source files ``listing``.

    ``damaged`` has the held paths that are no longer usable, ``others`` those without the table's schema. Files of
    equal identity are unchanged.
    """
    entries = sorted(held, key=_path)
    before: dict[str, SourceFile] = {f.path: f for entry in entries for f in entry.sources}
    after = {file.path: before[file.path] if before.get(file.path) == file else file for file in listing}
    # from here on equal files are one object, which is compared in no time
    held_by_directory, paths = _by_directory(entries), cached_paths(after)
    directories = tuple(
        _renamed(
            _plan_directory(directory, tuple(files), held_by_directory.get(directory, []), recipe, damaged, others),
            recipe,
            paths,
        )
        for directory, files in sorted(_by_directory(sorted(after.values(), key=_path)).items())
    )
    return Plan(
        directories=directories,
        recipe=recipe,
        added=tuple(path for path in after if path not in before),
        changed=tuple(path for path, file in after.items() if path in before and before[path] is not file),
        removed=tuple(path for path in before if path not in after),
        unchanged=sum(1 for path, file in after.items() if before.get(path) is file),
        paths=paths,
    )


def _renamed(plan: DirectoryPlan, recipe: Recipe, paths: Mapping[str, str]) -> DirectoryPlan:
    """Rename kept files to the paths that new ones would have.

    Cache paths depend on all names in a directory, so a name may now belong to another file.
    """
    if recipe.rewrite:
        return plan
    wanted = ((entry.path, entry.sources[0].path) for entry in plan.keep if entry.sources)
    found = {path: paths.get(source, source) for path, source in wanted if path != paths.get(source, source)}
    return replace(plan, renamed=found) if found else plan


def _by_directory(files: Iterable[_Located]) -> dict[str, list[_Located]]:
    found: dict[str, list[_Located]] = {}
    for file in files:
        found.setdefault(parent(file.path), []).append(file)
    return found


def plan_repartition(held: Iterable[FileEntry], recipe: Recipe, others: frozenset[str] = frozenset()) -> Plan:
    """Plan how to rewrite the held files by ``recipe``, which may need downloads.

    ``others`` has the paths of files without the table's schema.
    """
    entries = tuple(held)
    sources = {file.path: file for entry in entries for file in entry.sources}
    return plan_sync(tuple(sources.values()), entries, recipe, others=others)


def _plan_directory(
    directory: str,
    files: tuple[SourceFile, ...],
    entries: Sequence[FileEntry],
    recipe: Recipe,
    damaged: frozenset[str],
    others: frozenset[str],
) -> DirectoryPlan:
    intact = not (damaged and any(entry.path in damaged for entry in entries))
    sources = tuple(file for entry in entries for file in entry.sources)
    complete = intact and bool(entries) and (sources == files or set(sources) == set(files))
    if complete and all(entry.recipe == recipe.text and entry.path not in others for entry in entries):
        return DirectoryPlan(directory=directory, keep=tuple(entries))
    downloaded = [entry for entry in entries if recipe_of(entry.recipe).subset == recipe.subset]
    seed = shuffle_of(recipe.rewrite)
    ordered = [entry for entry in downloaded if shuffle_of(recipe_of(entry.recipe).rewrite) is None]
    seeds = {shuffle_of(recipe_of(entry.recipe).rewrite) for entry in downloaded}
    if len(ordered) < len(downloaded) and not (complete and seed is not None and len(seeds) == 1):
        downloaded = ordered  # the order of shuffled rows is lost
    usable = _single_source(downloaded, damaged)
    if not recipe.rewrite:
        plain = {f: e for f, e in usable.items() if e.recipe == recipe.text}
        return DirectoryPlan(
            directory=directory,
            keep=tuple(plain[file] for file in files if file in plain),
            copy=tuple(file for file in files if file not in plain),
        )
    if complete and len(downloaded) == len(entries):  # nothing is lost, so rewritten files are as good as sources
        return DirectoryPlan(directory=directory, rewrite=tuple(Input(None, entry) for entry in entries))
    return DirectoryPlan(directory=directory, rewrite=tuple(Input(file, usable.get(file)) for file in files))


def take_from(plan: Plan, others: Iterable[tuple[str, Sequence[FileEntry]]]) -> Plan:
    """Take files from other snapshots, by directory, instead of downloading them."""
    known = [(root, _by_directory(entries)) for root, entries in others]
    directories = list(plan.directories)
    for root, by_directory in known:
        directories = [_with_found(d, root, by_directory.get(d.directory, []), plan) for d in directories]
    return replace(plan, directories=tuple(directories))


def _with_found(item: DirectoryPlan, root: str, entries: Sequence[FileEntry], plan: Plan) -> DirectoryPlan:
    """The directory with found files: all that it is rewritten to, or single copies."""
    if item.copy:
        usable = _single_source([entry for entry in entries if entry.recipe == plan.recipe.text], frozenset())
        new = [(usable[file], plan.path_of(file)) for file in item.copy if file in usable]
        copy = tuple(file for file in item.copy if file not in usable)
    elif item.downloads and all(entry.recipe == plan.recipe.text for entry in entries):
        sources = {file for known in item.rewrite for file in (known.entry.sources if known.entry else [known.file])}
        new = [(entry, entry.path) for entry in entries] if sources == {f for e in entries for f in e.sources} else []
        copy = ()
    else:
        return item
    if not new:
        return item
    found = [BuiltFile(f"{root}/{entry.path}", replace(entry, path=path, since=0)) for entry, path in new]
    return replace(item, copy=copy, rewrite=(), found=(*item.found, *found))


def _single_source(entries: Sequence[FileEntry], damaged: frozenset[str]) -> dict[SourceFile, FileEntry]:
    """Entries that hold all of exactly one source file."""
    uses = Counter(file for entry in entries for file in entry.sources)
    return {
        entry.sources[0]: entry
        for entry in entries
        if len(entry.sources) == 1 and uses[entry.sources[0]] == 1 and entry.path not in damaged
    }


@dataclass(frozen=True, kw_only=True)
class PartitionChange:
    """The change of one partition directory by a run, or a dry run: numbers of source files, and bytes to fetch.

    ``reason`` is that of the first file that is not left unchanged.
    """

    directory: str
    added: int
    changed: int
    removed: int
    rewritten: bool
    fetched_bytes: int
    reason: str

    @property
    def text(self) -> str:
        """The change in a few words."""
        counts = ((self.added, "new"), (self.changed, "changed"), (self.removed, "removed"))
        parts = [format_count(count, f"{what} file") for count, what in counts if count]
        parts += [f"{format_size(self.fetched_bytes)} to fetch"] if self.fetched_bytes else []
        return ", ".join([*parts, *(["rewritten"] if self.rewritten else [])])


def partition_changes(
    plan: Plan, manifest: Manifest | None = None, listed: Collection[str] = ()
) -> tuple[PartitionChange, ...]:
    """The changes, sorted by directory; for the arguments see `planned_files`."""
    reasons: dict[str, str] = {}
    for file in planned_files(plan, manifest, listed):
        if file.action == "rewrite":
            reasons.setdefault(file.path, file.reason)
        else:
            reasons.setdefault(parent(file.path), f"{file.path.rpartition('/')[2]} {file.reason}")
    counts: dict[str, list[int]] = {}
    for at, paths in enumerate((plan.added, plan.changed, plan.removed)):
        for path in paths:
            counts.setdefault(parent(path), [0, 0, 0])[at] += 1
    planned = {item.directory: item for item in plan.directories if item.copy or item.rewrite or item.found}
    found = []
    for directory in sorted({*counts, *planned}):
        added, changed, removed = counts.get(directory, (0, 0, 0))
        item = planned.get(directory)
        found.append(
            PartitionChange(
                directory=directory,
                added=added,
                changed=changed,
                removed=removed,
                rewritten=item is not None and bool(item.rewrite),
                fetched_bytes=sum(file.identity.size for file in item.downloads) if item is not None else 0,
                reason=reasons.get(directory, ""),
            )
        )
    return tuple(found)


def planned_files(plan: Plan, manifest: Manifest | None, listed: Collection[str]) -> Iterator[Planned]:
    """Yield action and reason for each source file that is not left unchanged.

    ``listed`` has all paths at the source: removed files among them were left out.
    """
    held = {file.path: file.identity for entry in (manifest.files if manifest else ()) for file in entry.sources}
    for item in plan.directories:
        for file in item.downloads:
            before = held.get(file.path)
            action, reason = "add", "is new at the source"
            if before is not None:
                action, reason = "change", _difference(before, file.identity)
            yield Planned(file.path, action, reason, file.identity.size)
        for file in (file for built in item.found for file in built.entry.sources):
            before = held.get(file.path)
            if before != file.identity:
                yield Planned(file.path, "change" if before else "add", "is in an older snapshot", 0)
        if item.rewrite and not item.downloads:
            yield Planned(item.directory, "rewrite", "its files, row groups or options have changed", 0)
    there = frozenset(listed)
    for path in plan.removed:
        reason = "is left out by the options" if path in there else "is gone at the source"
        yield Planned(path, "remove", reason, 0)


def _difference(before: Identity, after: Identity) -> str:
    """How a file differs from the held one."""
    if before.size != after.size:
        return f"has {after.size:,} bytes, not {before.size:,}"
    if before.mtime_ns != after.mtime_ns:
        return f"was modified at {_time(after.mtime_ns)}, not {_time(before.mtime_ns)}"
    if before.tag != after.tag:
        return "has another ETag, or inode and ctime"
    return "is damaged in the cache, or was fetched with other columns, rows or options"


def _time(nanoseconds: int) -> str:
    return datetime.fromtimestamp(nanoseconds / 1e9, timezone.utc).isoformat(timespec="milliseconds")


def cached_paths(paths: Iterable[str]) -> dict[str, str]:
    """Choose cache paths for source paths that cannot be used as they are.

    A name without the suffix gets ``.parquet``. If another file or directory has that name, ignoring case, or it is too
    long, a hash of the name is put before the suffix. Equal paths give equal results.

    >>> cached_paths(["dt=1/000000_0", "dt=1/part-0.parquet"])
    {'dt=1/000000_0': 'dt=1/000000_0.parquet'}
    >>> cached_paths(["a", "a.parquet"])
    {'a': 'a-5f2ca630d0f6.parquet'}
    """
    paths = list(paths)
    renamed = sorted(path for path in paths if not path.endswith(SUFFIX))
    if not renamed:
        return {}
    taken = {path.casefold() for path in paths if path.endswith(SUFFIX)} | _directories(paths)
    found: dict[str, str] = {}
    for path in renamed:
        new, number = path + SUFFIX, 0
        while new.casefold() in taken or len(new.rpartition("/")[2].encode()) > _MAX_NAME:
            new, number = _distinct(path, number), number + 1
        taken.add(new.casefold())
        found[path] = new
    return found


def _directories(paths: Iterable[str]) -> set[str]:
    """Parents of all ``paths``, with case folded."""
    found: set[str] = set()
    for directory in {parent(path) for path in paths}:
        while directory and directory.casefold() not in found:
            found.add(directory.casefold())
            directory = parent(directory)
    return found


def _distinct(path: str, number: int) -> str:
    directory, slash, name = path.rpartition("/")
    end = f"-{blake2b(f'{name} {number}'.encode(), digest_size=6).hexdigest()}{SUFFIX}"
    stem = name.encode()[: _MAX_NAME - len(end)].decode(errors="ignore")
    return f"{directory}{slash}{stem}{end}"
