"""The caches of a directory: adds them before their first sync, reads their declarations, and removes them.

The ``pqcache.toml`` of the directory has a section ``[tables.NAME]``, with the keys of a cache's own file, for each
cache made by a sync of all. The cache is the subdirectory ``NAME``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pqcache.errors import MALFORMED, CacheError, CacheLocked, PqcacheError, UsageError, disk_errors
from pqcache.store.arriving import arriving_snapshots
from pqcache.store.cache_directory import CacheDirectory, config_text, has_tables, parsed
from pqcache.store.config import Config, config_of, read_config, write_config
from pqcache.store.layout import CONFIG
from pqcache.store.ownership import is_own
from pqcache.store.snapshot import read_kept
from pqcache.store.urls import check_url, is_secret, local_path, quoted, remembered_url, url_scheme
from pqcache.system.disk import freed_bytes, fsync_path, remove_tree
from pqcache.units import parse_duration, printable

ROOT = "PQCACHE_ROOT"
_DEPTH = 4  # of directories below a root that are searched for caches


def default_root() -> Path:
    """``PQCACHE_ROOT``, or else ``pqcache`` among the user's caches."""
    named = os.environ.get(ROOT)
    if named:
        return Path(named).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "pqcache"


def find_caches(*roots: str | os.PathLike[str], may_be_none: bool = False) -> list[Path]:
    """All caches below the roots, by default ``default_root``, sorted by path."""
    found: dict[Path, None] = {}
    for root in roots or (default_root(),):
        path = Path(root).expanduser().absolute()
        if not path.is_dir():
            known = ", or set PQCACHE_ROOT" if not roots else ""
            raise CacheError(path, "not a directory", f"name the directory that contains your caches{known}")
        found.update(dict.fromkeys(sorted(_caches(path, _DEPTH))))
    if not (found or may_be_none):
        raise CacheError(roots[0] if roots else default_root(), "has no cache below it", "name another directory")
    return list(found)


def tables_below(*roots: str | os.PathLike[str], lenient: bool = False) -> dict[Path, ListedTable | None]:
    """All caches below the roots, and the entries of tables declared there, sorted by path.

    If a declaration can't be read, ``lenient`` makes the error an entry instead of raising it.
    """
    declared: dict[Path, ListedTable] = {}
    for root in roots or (default_root(),):
        path = Path(root).expanduser().absolute()
        try:
            declared |= {path / table.name: table for table in read_tables(path)}
        except CacheError as error:
            if not lenient:
                raise
            declared[path / CONFIG] = ListedTable(CONFIG, error=error)
    caches = find_caches(*roots, may_be_none=bool(declared))
    return {path: declared.get(path) for path in sorted({*caches, *declared})}


def _caches(directory: Path, depth: int) -> Iterator[Path]:
    with suppress(PermissionError):  # another user's: nothing is known of it
        if CacheDirectory(directory).exists():
            yield directory
            return
    with suppress(PermissionError), os.scandir(directory) as entries:
        below = [Path(e.path) for e in entries if e.is_dir(follow_symlinks=False) and not e.name.startswith(".")]
        for path in below if depth else ():
            yield from _caches(path, depth - 1)


def named_place(word: str, may_be_new: bool = False) -> str:
    """The path denoted by a word of the command line.

    It is a path if it has a ``/`` or begins with ``.`` or ``~``. Otherwise, if ``PQCACHE_ROOT`` is set, it is the name
    of a cache below that directory, which must exist unless ``may_be_new``. Raises UsageError for an unknown name, or
    one that could also be a path.
    """
    if "/" in word or word[:1] in ("", ".", "~") or not os.environ.get(ROOT):
        return word
    root = default_root().absolute()
    there, here = root / word, Path(word)
    spelled = f"./{quoted(word)}"
    if there.exists():
        if here.exists() and not here.samefile(there):
            raise UsageError(word, f"is in {root} and in this directory", f"write {quoted(there)} or {spelled}")
    elif CacheDirectory(here).exists() if may_be_new else here.exists():
        new = f", or {quoted(there)} for a new cache" if may_be_new else ""
        raise UsageError(word, f"is not in {root} but in this directory", f"write {spelled}{new}")
    elif not may_be_new:
        raise _no_such_cache(root, word)
    return str(there)


def _no_such_cache(root: Path, name: str) -> UsageError:
    names = {table.name for table in read_tables(root)}
    if name in names:
        advice = f"'pqcache sync --all {quoted(root)}' makes it"
        return UsageError(root / name, f"no cache yet of this table of {CONFIG}", advice)
    with suppress(OSError):
        names |= {path.name for path in root.iterdir() if CacheDirectory(path).exists()}
    near = get_close_matches(name, names)
    advice = f"did you mean {' or '.join(near)}?" if near else f"'pqcache status {quoted(root)}' lists those there"
    return UsageError(root / name, "no such cache", advice)


def add(
    source: str | os.PathLike[str],
    name: str | None = None,
    *,
    root: str | os.PathLike[str] | None = None,
    options: Mapping[str, str] | None = None,
) -> Path:
    """Make a cache of ``source`` in ``root``, without a sync, and return its directory.

    ``name`` is by default the last part of the source's path. ``options`` are remembered, without secrets. The next
    sync of the cache, or of all in ``root``, fetches its files.

    >>> add("lake/shop", "shop2", root="cache").name
    'shop2'

    Raises UsageError if the directory exists, or if the source yields no name.
    """
    check_url(os.fspath(source))
    url = remembered_url(os.fspath(source))
    name = name or url.rstrip("/").rpartition("/")[2]
    if not is_cache_name(name):
        raise UsageError(name or url, "cannot be the name of a cache", "name it too: pqcache add SOURCE NAME")
    cache = CacheDirectory((Path(root).expanduser() if root is not None else default_root()).absolute() / name)
    if cache.exists():
        advice = f"'pqcache sync SOURCE {quoted(cache.path)} --new-source' changes its source"
        raise UsageError(cache.path, "is a cache already", advice)
    config = Config(source=url, options={key: text for key, text in (options or {}).items() if not is_secret(key)})
    with disk_errors(cache.path):
        cache.create()
        write_config(cache.path, config)
    return cache.path


@dataclass(frozen=True)
class RemoveReport:
    """The removed cache, its snapshots, and the bytes freed on disk; with ``dry_run``, that would be freed."""

    cache: str
    dry_run: bool
    snapshots: tuple[str, ...]
    bytes: int

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values."""
        return asdict(self)


def remove(
    name: str,
    *,
    root: str | os.PathLike[str] | None = None,
    force: bool = False,
    wait: str | float = 0.0,
    dry_run: bool = False,
) -> RemoveReport:
    """Remove the cache ``name`` of ``root`` with all its snapshots.

    The source isn't touched. ``force`` removes a cache even if readers have it open, if it has pinned snapshots, or if
    it contains other files, which are removed too. Other directories are never removed. ``wait`` limits the seconds to
    wait for another run.

    >>> remove("shop2", root="cache").snapshots
    ()

    Raises CacheLocked if a run is at work or readers have the cache open, UsageError or CacheError.
    """
    if not name or "/" in name or name in (".", ".."):
        parent, last = os.path.split(name.rstrip("/"))
        command = f"pqcache remove {quoted(last)} --root {quoted(parent)}" if parent and is_cache_name(last) else ""
        advice = f"run '{command}'" if command else "name a directory of the root, and the root with --root"
        raise UsageError(name, "it takes the name of a cache, not a path", advice)
    place = (Path(root).expanduser() if root is not None else default_root()).absolute()
    if not (place / name).exists():
        here = root is None and CacheDirectory(Path(name).absolute()).exists()
        if here:
            advice = f"the one in this directory goes with 'pqcache remove {quoted(name)} --root .'"
            raise UsageError(place / name, "no such cache", advice)
        raise _no_such_cache(place, name)
    if name in {entry.name for entry in read_tables(place)}:
        advice = "remove its section there first, or the next sync of all makes it again"
        raise UsageError(name, f"is a table of {place / CONFIG}", advice)
    cache = CacheDirectory.open(place / name)
    if cache.path.is_symlink():
        raise CacheError(cache.path, "is a symbolic link", "remove what it leads to")
    with disk_errors(cache.path), cache.lock(parse_duration(wait)):
        if not force:
            _check_removable(cache)
        report = RemoveReport(str(cache.path), dry_run, tuple(s.id for s in cache.snapshots()), freed_bytes(cache.path))
        if not dry_run:
            trash = cache.path.with_name(f".removed-{cache.path.name}-{os.urandom(4).hex()}")
            cache.path.rename(trash)
            fsync_path(trash.parent)
            remove_tree(trash)
    return report


def _check_removable(cache: CacheDirectory) -> None:
    """Raise CacheError or CacheLocked unless the cache can be removed without loss."""
    read_config(cache.path)
    if foreign := cache.foreign_entries():
        named = ", ".join(str(path.relative_to(cache.path)) for path in foreign[:5])
        more = f" and {len(foreign) - 5:,} more" if len(foreign) > 5 else ""
        advice = "move it away, or give --force to remove it too"
        raise CacheError(cache.path, f"has files that do not belong to the cache: {named}{more}", advice)
    if pins := read_kept(cache.path).pins:
        named = ", ".join(f"{snapshot} ({name})" if name else snapshot for snapshot, name in pins.items())
        raise CacheError(cache.path, f"has pinned snapshots: {named}", "unpin them, or give --force")
    leased = [
        snapshot.id
        for snapshot in (*cache.snapshots(), *cache.candidates(), *arriving_snapshots(cache))
        if snapshot.is_leased()
    ]
    if leased:
        raise CacheLocked(cache.path, f"readers have {', '.join(leased)} open", "end them, or give --force")


_TABLES = "tables"
_NOT_OF_SYNC = frozenset({"compression", "compat", "dense", "shuffle", "keys"})


@dataclass(frozen=True)
class ListedTable:
    """A declared table: source and options for its sync, or the error in its section."""

    name: str
    source: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    error: PqcacheError | None = None


def read_tables(root: Path) -> list[ListedTable]:
    """Read the tables declared in the ``pqcache.toml`` of a directory, if it has one.

    Raises CacheError if it can't be read, or if others than trusted users can write to it. An error in the section of
    a table is in its entry.
    """
    path = root / CONFIG
    if not path.is_file() or not has_tables(path):
        return []
    if not is_own(path.stat()):
        raise CacheError(path, "can be written by others, so its content is not trusted", f"chmod go-w {quoted(path)}")
    try:
        document = parsed(config_text(path))
    except (OSError, *MALFORMED) as error:
        raise CacheError(path, f"cannot be read ({error})", "correct it") from error
    strange = [name for name in document if name not in (_TABLES, "format")]
    tables = document[_TABLES]
    if strange or not isinstance(tables, dict):
        what = f"'{strange[0]}'" if strange else f"{_TABLES} = {tables!r}"
        raise CacheError(path, f"{what} is not known beside tables", "put the entries of a table below [tables.NAME]")
    return [_entry(path, name, values) for name, values in tables.items()]


def _entry(path: Path, name: str, values: Any) -> ListedTable:
    try:
        if not is_cache_name(name):
            raise UsageError("", "cannot be the name of a cache")
        if not isinstance(values, dict) or "source" not in values:
            raise UsageError("", "has no source")
        wrong = sorted(_NOT_OF_SYNC & values.keys())
        if wrong:
            raise UsageError("", f"'{wrong[0]}' is set by 'pqcache repartition' and 'pqcache index', for each cache")
        config = config_of(values)
        options = {key: getattr(config, key) for key in values if key not in ("source", "format")}
        return ListedTable(name, _absolute(config.source, path.parent), options)
    except MALFORMED as error:
        return ListedTable(name, error=CacheError(path, f"[{_TABLES}.{name}]: {error}", "correct it"))


def is_cache_name(name: str) -> bool:
    """Whether a cache in a directory of caches can have this name, which appears in each line of a log."""
    return bool(name) and "/" not in name and not name.startswith(".") and printable(name) == name


def _absolute(source: str, root: Path) -> str:
    """Make paths absolute; they are relative to the directory of the file, wherever the sync runs."""
    if url_scheme(source):
        return source
    return os.path.normpath(root / os.path.expanduser(local_path(source)))
