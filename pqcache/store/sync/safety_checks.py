"""Checks before a snapshot is published: markers, settling, hostile names, limits on deletions, free space."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from pqcache.errors import PqcacheError, SourceError, SourceIncomplete
from pqcache.store.config import Config, parse_max_delete
from pqcache.store.manifest import FileEntry, SourceFile
from pqcache.store.partition_paths import parent, partition_values
from pqcache.store.sync.cache_run import CacheRun
from pqcache.store.sync.plan import Plan
from pqcache.store.table_part import FREE, parse_newest
from pqcache.units import format_count, format_seconds, format_size, printable

SETTLE = 600.0  # seconds that a partition which was replaced waits for, if no --settle says how many
_MAY_LOSE = 1  # percent of the table's rows, in such a partition
_LEFT_BEHIND = 86400.0  # seconds after which temporary files above a partition belong to a job that died
_STAGING = re.compile(r"(?:^|/)(?:_temporary|\.hive-staging|\.spark-staging|__magic)[^/]*/")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_MAX_PATH = 3072  # bytes of a path below a source, so that Linux's 4,096 are left with the cache's own
_MIN_SPARE, _SPARE = 1 << 20, 64 << 20  # bytes left for indexes and metadata


@dataclass(frozen=True)
class WaitRules:
    """The rules by which new files of a source wait for a later run.

    A partition is taken if it, or a partition directory above it, holds a file named ``marker``. Files younger than
    ``settle`` seconds at ``now`` (seconds since the epoch) are left for the next run.
    """

    marker: str | None = None
    settle: float = 0.0
    now: float = 0.0


def wait_rules(config: Config) -> WaitRules:
    return WaitRules(config.marker, config.settle, time.time())


def files_to_take(
    files: Sequence[SourceFile], all_paths: Iterable[str], held: Iterable[FileEntry], rules: WaitRules
) -> list[SourceFile]:
    """Leave out files that have to wait; their held versions are kept.

    A held directory is kept unchanged while it exists without its marker, even if it has only a writer's temporary
    files, and while replacements of its lost files are young.

    ``all_paths`` are all paths at the source, including markers and hidden files.
    """
    if rules.marker is None and not rules.settle:
        return list(files)
    before = {file.path: file for entry in held for file in entry.sources}
    names = list(all_paths)
    marked = {parent(p) for p in names if p.rpartition("/")[2] == rules.marker}
    deadline = (rules.now - rules.settle) * 1e9
    result: dict[str, SourceFile] = {}
    young: set[str] = set()  # directories with files, new or changed, that are too young
    for file in files:
        if rules.marker is not None and not _is_marked(parent(file.path), marked):
            continue
        if rules.settle and file.identity.mtime_ns > deadline:
            if before.get(file.path) != file:
                young.add(parent(file.path))
            if file.path in before:
                result[file.path] = before[file.path]
        else:
            result[file.path] = file
    listed = {file.path for file in files}
    existing = _directories(names)
    unmarked = {d for d in map(parent, before) if rules.marker is not None and not _is_marked(d, marked)}
    losing = {parent(path) for path in before if path not in listed}
    as_held = (unmarked & existing) | (losing & young)
    result = {path: file for path, file in result.items() if parent(path) not in as_held}
    result.update((path, file) for path, file in before.items() if parent(path) in as_held)
    return list(result.values())


def _directories(paths: Iterable[str]) -> set[str]:
    """Directories that contain ``paths``, and their parents."""
    found = {""}
    for path in paths:
        directory = parent(path)
        while directory not in found:
            found.add(directory)
            directory = parent(directory)
    return found


def _is_marked(directory: str, marked: set[str]) -> bool:
    """Whether a directory, or a partition directory above it, has the marker.

    The root's own marker applies only to files in the root; otherwise an old one would apply to every partition.
    """
    if not directory:
        return "" in marked
    while directory:
        if directory in marked:
            return True
        directory = parent(directory)
    return False


def unsafe_names(listing: Iterable[SourceFile], source: str) -> dict[str, PqcacheError]:
    """Errors for paths that must not be used as local paths."""
    found: dict[str, PqcacheError] = {}
    for file in listing:
        if (problem := check_path(file.path)) is not None:
            found[file.path] = SourceError(_shown(source, file.path), problem, "rename it at the source")
    return found


def divide_both(
    files: Sequence[SourceFile], listing: Iterable[SourceFile], source: str
) -> tuple[list[SourceFile], dict[str, PqcacheError]]:
    """Leave out ``files`` that are also directories of the ``listing``, with an error for each.

    Empty files are directory markers of an object store, which is no error.
    """
    directories = _directories(file.path for file in listing)
    both = [file for file in files if file.path in directories]
    reason = "is both a file and a directory"
    errors: dict[str, PqcacheError] = {
        file.path: SourceError(_shown(source, file.path), reason, "rename one at the source")
        for file in both
        if file.identity.size
    }
    return [file for file in files if file.path not in directories] if both else list(files), errors


def _shown(source: str, path: str) -> str:
    return f"{printable(source)}/{printable(path)}"


def check_identities(listing: Iterable[SourceFile], source: str) -> None:
    """Raise SourceError if the store gives only a file's size: changed bytes would go unnoticed."""
    for file in listing:
        if not file.identity.tag and not file.identity.mtime_ns:
            raise SourceError(
                source if source.endswith(f"/{file.path}") else f"{source}/{file.path}",
                "the store gives its size only, so a change that keeps it would not be noticed",
                "nothing was published, run with '--compare content' each time, or copy it to another store",
            )


def check_case(listing: Sequence[SourceFile], source: str, scratch: Path) -> None:
    """Raise SourceError if names differ only in case and the file system of ``scratch`` ignores case."""
    names = {file.path for file in listing}
    names |= _directories(names)
    if len({name.casefold() for name in names}) == len(names):
        return
    folded: dict[str, str] = {}
    for file in listing:
        name = file.path
        while name:
            other = folded.setdefault(name.casefold(), name)
            if other != name and folds_case(scratch):
                raise SourceError(
                    f"{source}/{name}",
                    f"is the same name as {other} on the cache's file system, which ignores case",
                    "nothing was published, rename one at the source or use another file system",
                )
            name = parent(name)


def folds_case(directory: Path) -> bool:
    """Whether the file system of ``directory`` ignores case in names."""
    probe = directory / f"case-{os.getpid()}-{os.urandom(4).hex()}"
    probe.touch()
    try:
        return probe.with_name(probe.name.upper()).exists()
    finally:
        probe.unlink()


def check_deletions(
    plan: Plan, held: Sequence[FileEntry], source: str, max_delete: str, elsewhere: frozenset[str], shard: str
) -> None:
    """Raise SourceIncomplete if more source files would be dropped than ``max_delete`` allows.

    Files count as replaced, not dropped, if all files of a partition are removed and others added: jobs that overwrite
    or compact a partition write new names. `check_rows` checks what such a partition has lost. Outside of partitions,
    only as many files as are added count as replaced if ``max_delete`` is a number of files.

    ``elsewhere`` are source files held by other nodes. They count only if ``shard`` says how the shares have changed;
    the few that move to another node when the source changes are not lost.
    """
    if not plan.removed:
        return
    limit, percent = parse_max_delete(max_delete)
    total = len({file.path for entry in held for file in entry.sources})
    removed, added = set(plan.removed), Counter(map(parent, plan.added))
    kept = {parent(file.path) for entry in held for file in entry.sources if file.path not in removed}
    replaced = {directory for directory in added if (directory or percent) and directory not in kept}
    moved = removed & elsewhere
    lost = removed if shard else removed - moved
    dropped = sum(1 for path in lost if parent(path) not in replaced)
    dropped -= min(added[""], sum(1 for path in lost if not parent(path) and "" not in replaced))
    if dropped > (total * limit / 100 if percent else limit):
        if shard and moved:
            raise SourceIncomplete(
                shard,
                f"{format_count(len(moved), 'file')} of the {total:,} in the snapshot would go to "
                f"other nodes, more than --max-delete {max_delete}",
                "nothing was published, give --force if that is intended",
            )
        raise SourceIncomplete(
            source,
            f"{format_count(dropped, 'file')} of the {total:,} in the snapshot would be dropped, more "
            f"than --max-delete {max_delete} (gone at the source, or left out by --where)",
            "nothing was published, check the source and the condition, or give --force if that is intended",
        )


def check_rows(
    entries: Iterable[FileEntry],
    held: Sequence[FileEntry],
    uncompared: Collection[str],
    source: str,
    max_delete: str,
) -> None:
    """Raise SourceIncomplete if partitions lose more of the held rows than ``max_delete`` allows.

    ``entries`` are those of the new snapshot. Growing and new partitions do not compensate for shrinking ones.
    Directories in ``uncompared`` are assumed to lose nothing. If ``max_delete`` is a number of files, the default share
    limits rows.
    """
    now = _total((entry.path, entry.rows) for entry in entries)
    before = _total((entry.path, entry.rows) for entry in held)
    _check_shrinkage(before, {**now, **_only(before, uncompared)}, source, max_delete, "row")


def shrunk_partitions(
    entries: Sequence[FileEntry],
    held: Sequence[FileEntry],
    found: Sequence[SourceFile],
    source: str,
    max_delete: str,
    rules: WaitRules,
) -> dict[str, SourceIncomplete]:
    """Find partitions whose writers may not have finished, with reasons.

    Such a partition has only new files, some under new names, and has lost more rows than ``max_delete`` allows. It
    waits until its files have settled; if it loses too much of the whole table, it waits for ``--force``. A partition
    without files waits while its writer is at work. ``found`` has all files at the source.
    """
    now = _total((entry.path, entry.rows) for entry in entries)
    before = _total((entry.path, entry.rows) for entry in held)
    share, total = _share(max_delete)[0], sum(before.values())
    shrunk = {name for name in before if (before[name] - now.get(name, 0)) * 100 > share * before[name]}
    if not shrunk:
        return {}
    old, new = ({file.path: file for entry in some for file in entry.sources} for some in (held, entries))
    shrunk &= {parent(path) for path in old if path not in new}
    shrunk -= {parent(path) for path, file in new.items() if old.get(path) == file}
    shrunk -= {parent(file.path) for file in found if _is_data(file.path)} - now.keys()  # which are not wanted any more
    reasons = _unsettled(shrunk, found, rules)
    lost = 0  # by the partitions that do not wait, the smallest losses first
    for name in sorted(shrunk & now.keys() - reasons.keys(), key=lambda name: (before[name] - now[name], name)):
        lost += before[name] - now[name]
        if not now[name] or lost * 100 >= _MAY_LOSE * total:
            share_lost = f"{100 * lost / total:.1f}% of the table's rows"
            others = " with others" if lost > before[name] - now[name] else ""
            reasons[name] = f"that loses {share_lost}{others}, of which less than {_MAY_LOSE}% may go"
            lost -= before[name] - now[name]
    return {
        name: SourceIncomplete(
            f"{source}/{name}",
            f"was replaced, and has {now.get(name, 0):,} in place of {format_count(before[name], 'row')}; {reason}",
            "sync again when its writer has finished, or give --force if that is intended",
        )
        for name, reason in reasons.items()
    }


def _unsettled(directories: Collection[str], found: Iterable[SourceFile], rules: WaitRules) -> dict[str, str]:
    """Directories that may not have all their files yet, with reasons."""
    settle = rules.settle or SETTLE
    reasons: dict[str, str] = {}
    for file in found:
        modified = file.identity.mtime_ns
        if match := _STAGING.search(file.path):
            inside = file.path[: match.start()]
            above = f"{inside}/" if inside else ""
            is_old = modified < (rules.now - _LEFT_BEHIND) * 1e9
            at = [name for name in directories if name == inside or (f"{name}/".startswith(above) and not is_old)]
            reasons.update(dict.fromkeys(at, f"its writer may be at work in {file.path[: match.end() - 1]}"))
        elif (directory := parent(file.path)) in directories and _is_data(file.path):
            name = file.path.rpartition("/")[2]
            if not file.identity.size and name != rules.marker:
                reasons[directory] = f"{name} is empty"
            elif not modified or modified > (rules.now - settle) * 1e9:
                reasons.setdefault(directory, f"{name} may be younger than {format_seconds(settle)}")
    return reasons


def _is_data(path: str) -> bool:
    name = path.rpartition("/")[2]
    return bool(name) and not name.startswith(("_", "."))


def check_bytes(
    files: Iterable[SourceFile],
    held: Sequence[FileEntry],
    uncompared: Collection[str],
    source: str,
    max_delete: str,
) -> None:
    """Raise SourceIncomplete like `check_rows`, but by bytes of source files, while rows are unknown.

    A partition counts if it shrinks to less than half, as other codecs and fewer files make it smaller without a loss.
    Partitions without files are left to `check_deletions`.
    """
    now = _total((file.path, file.identity.size) for file in files)
    sources = {file.path: file for entry in held for file in entry.sources}
    before = _total((path, file.identity.size) for path, file in sources.items())
    same = [directory for directory, size in before.items() if now.get(directory, size) * 2 >= size]
    _check_shrinkage(before, {**now, **_only(before, uncompared), **_only(before, same)}, source, max_delete, "byte")


def _share(max_delete: str) -> tuple[float, str]:
    """The share of rows that may be lost, and its text; the default share if ``max_delete`` is a number of files."""
    number, percent = parse_max_delete(max_delete)
    return (number, max_delete) if percent else (parse_max_delete(Config.max_delete)[0], Config.max_delete)


def _total(amounts: Iterable[tuple[str, int]]) -> dict[str, int]:
    found: defaultdict[str, int] = defaultdict(int)
    for path, amount in amounts:
        found[parent(path)] += amount
    return dict(found)


def _only(amounts: Mapping[str, int], directories: Collection[str]) -> dict[str, int]:
    return {directory: amounts[directory] for directory in directories if directory in amounts}


def _check_shrinkage(
    before: Mapping[str, int], now: Mapping[str, int], source: str, max_delete: str, unit: str
) -> None:
    share, limit = _share(max_delete)
    lost = {name: amount - now.get(name, 0) for name, amount in before.items() if now.get(name, 0) < amount}
    total = sum(before.values())
    if sum(lost.values()) * 100 > share * total:
        name = max(lost, key=lambda name: (lost[name], name))
        raise SourceIncomplete(
            source,
            f"{format_count(sum(lost.values()), unit)} of the {total:,} in the snapshot would be dropped, more than "
            f"--max-delete {limit}, most of them from {name or 'the table'} "
            f"({format_count(before[name], unit)}, now {now.get(name, 0):,})",
            "nothing was published, wait until its writers have finished, or give --force if that is intended",
        )


def check_space(run: CacheRun, plan: Plan, already: int = 0) -> None:
    """Raise PqcacheError if the plan of a run needs more bytes than are free on the cache's disk.

    Rewriting needs space for its output beside its input; links need none, nor do the ``already`` bytes that an earlier
    run downloaded. The size of some columns and rows of a file isn't known beforehand.
    """
    known = max(0, plan.download_bytes - already) + plan.rewrite_bytes
    spare = min(_SPARE, _MIN_SPARE + known // 20)
    needed = spare if plan.recipe.subset else known + spare
    free = free_space(run.cache.path)
    if needed > free:
        reason = f"needs {format_size(needed)} of free space, has {format_size(free)}"
        raise PqcacheError(run.cache.path, reason, _space_advice(run, plan))


def free_space(path: Path) -> int:
    """Free bytes on the disk of a path, which need not exist yet."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return shutil.disk_usage(path).free


def _space_advice(run: CacheRun, plan: Plan) -> str:
    less = []
    if run.command == "sync":
        newest, where = run.config.newest, run.config.where
        if newest is None and any(partition_values(directory.directory) for directory in plan.directories):
            less = ["--newest"]
        elif newest and parse_newest(newest).text != FREE:
            less = ["a smaller --newest"]
        less.append("a narrower --where" if where else "--where")
    fewer = f"take less with {' or '.join(less)}, " if less else ""
    return f"free some, {fewer}or put the cache on a larger disk"


def check_path(path: str) -> str | None:
    """Why a source path is unsafe below the cache, or None if it is safe.

    Object keys are untrusted: no path may lead out of the cache.
    """
    directory, slash, name = path.rpartition("/")
    short = len(name) <= 255 // 4 and len(path) <= _MAX_PATH // 4  # however many bytes its characters take
    if short and name.isprintable() and name not in ("", ".", "..") and (not slash or _is_safe(directory)):
        return None  # the fast answer for nearly all of what may be a million paths
    if _CONTROL.search(path):
        return "has a control character in its name"
    try:
        path.encode()
    except UnicodeEncodeError:
        return "has a name that is not UTF-8"
    segments = path.split("/")
    if path.startswith("/") or "" in segments:
        return "has an empty segment in its path"
    if "." in segments or ".." in segments:
        return "has a '.' or '..' segment in its path"
    if any(len(segment.encode()) > 255 for segment in segments):
        return "has a name longer than 255 bytes"
    if len(path.encode()) > _MAX_PATH:
        return f"has a path longer than {_MAX_PATH:,} bytes"
    return None


@lru_cache(1 << 14)
def _is_safe(directory: str) -> bool:
    return check_path(directory) is None
