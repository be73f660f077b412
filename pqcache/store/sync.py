"""Sync: make the cache hold what the source holds now, moving only what changed."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from pqcache.config import Config, read_config, write_config
from pqcache.errors import SourceIncomplete, UsageError
from pqcache.events import Collected, Listed, OnEvent, Warned, ignore
from pqcache.store.build import Job, build_snapshot
from pqcache.store.cache import Cache, Snapshot
from pqcache.store.disk import remove_tree
from pqcache.store.history import append_history
from pqcache.store.hive import is_data, parent, partition_table
from pqcache.store.manifest import FileEntry, Manifest, SourceFile
from pqcache.store.plan import Plan, check_listing, plan_sync
from pqcache.store.predicate import matching
from pqcache.store.rewrite import RewriteOptions
from pqcache.store.source import Source, is_secret, local_path, open_source, redact, url_scheme
from pqcache.store.transfer import RETRIES, Stopwatch, with_retries

JOBS = 8


@dataclass(frozen=True)
class SyncReport:
    """What a run did, or with ``dry_run`` what it would do.

    File counts are of source files, ``fetched_bytes`` of what came from the source, ``bytes``, ``rows``,
    ``files`` and ``row_groups`` of the snapshot that is current now (0 before the first one).
    """

    cache: str
    source: str
    snapshot: str | None
    published: bool
    dry_run: bool
    added: int
    changed: int
    removed: int
    unchanged: int
    rewritten: int
    fetched_bytes: int
    files: int
    row_groups: int
    rows: int
    bytes: int
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values."""
        return asdict(self)


def sync(
    cache: str | os.PathLike[str],
    source: str | None = None,
    *,
    where: str | None = None,
    row_group_size: int | None = None,
    options: Mapping[str, str] | None = None,
    keep: int | None = None,
    jobs: int = JOBS,
    wait: float = 0.0,
    dry_run: bool = False,
    on_event: OnEvent = ignore,
) -> SyncReport:
    """Bring ``cache`` up to date with ``source`` and publish a new snapshot if anything changed.

    What is not given is what the cache remembers from before; what is given is remembered, except secrets.
    ``where`` is a condition on partition columns (an empty string takes all again), ``row_group_size`` is in
    bytes, ``keep`` the number of snapshots left by the end, ``wait`` the seconds to wait for another run.

    Raises UsageError, SourceError, SourceIncomplete (nothing was published), ParquetError, CacheError or
    CacheLocked; the current snapshot stays as it was.
    """
    watch = Stopwatch()
    target = Cache(Path(cache).absolute())
    if source is None and not target.exists():
        raise UsageError(f"{cache}: not a pqcache yet; name the source too: pqcache sync SOURCE {cache}")
    remembered = read_config(target.path) if target.exists() else None
    config = _merge(remembered, source, where, row_group_size, options, keep)
    _check_apart(config.source, target.path)
    opened = open_source(source or config.source, {**config.options, **(options or {})})
    with ExitStack() as stack:
        stack.callback(opened.close)
        locked = target.exists() and not dry_run
        stack.enter_context(target.lock(wait) if locked else nullcontext())
        listing = list_source(opened, config.where, on_event)
        if not dry_run and not locked:
            target.create()
            stack.enter_context(target.lock(wait))
        if remembered is not None and remembered.source != config.source:
            on_event(Warned(f"the source was {remembered.source} and is {config.source} from now on"))
        if not dry_run:
            write_config(target.path, config)
        current = target.current() if target.exists() else None
        manifest = current.manifest() if current is not None else None
        rewrite = rewrite_options(config)
        plan = make_plan(listing, current, manifest, rewrite)
        published = None
        if not dry_run and not (plan.nothing_to_do and current is not None):
            job = Job(target, plan, opened, config.source, config.where, rewrite, jobs, on_event)
            published = build_snapshot(job)
            manifest = published.manifest()
        report = make_report(target, config, plan, published or current, manifest, published, dry_run, watch)
        if not dry_run:
            finish(target, config, "sync", report, on_event)
    return report


def list_source(source: Source, where: str | None, on_event: OnEvent) -> list[SourceFile]:
    """Return the source's Parquet files, hostile names refused and partitions pruned by ``where``.

    A source without any raises SourceIncomplete: an empty listing never replaces what is held.
    """
    found: list[SourceFile] = []

    def list_once() -> None:
        found[:] = source.list()

    with_retries(list_once, source.url, RETRIES - 2, on_event)
    check_listing(found, source.url)
    files = [file for file in found if is_data(file.path)]
    if not files:
        others = f" among its {len(found):,} files" if found else ""
        raise SourceIncomplete(
            f"{source.url}: no Parquet file{others}; nothing was published, check the URL and what wrote it"
        )
    if where:
        files = select(files, where)
        if not files:
            raise SourceIncomplete(
                f"{source.url}: no partition satisfies --where {where!r}; nothing was published"
            )
    on_event(Listed(len(files), sum(file.identity.size for file in files)))
    return files


def select(files: Sequence[SourceFile], where: str) -> list[SourceFile]:
    """Return the files whose partition values satisfy ``where``."""
    directories = sorted({parent(file.path) for file in files})
    taken = {directories[position] for position in matching(partition_table(directories), where)}
    return [file for file in files if parent(file.path) in taken]


def make_plan(
    listing: Sequence[SourceFile],
    current: Snapshot | None,
    manifest: Manifest | None,
    rewrite: RewriteOptions | None,
) -> Plan:
    """Return the plan for ``listing`` against what the current snapshot really has on disk."""
    held = manifest.files if manifest is not None else ()
    damaged = find_damaged(current, held) if current is not None else frozenset()
    return plan_sync(listing, held, recipe(rewrite), damaged)


def find_damaged(snapshot: Snapshot, entries: Sequence[FileEntry]) -> frozenset[str]:
    """Return the paths of entries that are missing or of another size than recorded."""
    root = str(snapshot.path)

    def is_whole(entry: FileEntry) -> bool:
        try:
            return os.stat(f"{root}/{entry.path}").st_size == entry.size
        except OSError:
            return False

    return frozenset(entry.path for entry in entries if not is_whole(entry))


def rewrite_options(config: Config) -> RewriteOptions | None:
    """Return how files are rewritten, or None when they are taken as they come."""
    return None if config.row_group_size is None else RewriteOptions(config.row_group_size)


def recipe(options: RewriteOptions | None) -> str:
    """Return the text by which a rewritten file remembers how it was made."""
    return "" if options is None else f"row_group_size={options.row_group_size}"


def make_report(
    cache: Cache,
    config: Config,
    plan: Plan,
    current: Snapshot | None,
    manifest: Manifest | None,
    published: Snapshot | None,
    dry_run: bool,
    watch: Stopwatch,
) -> SyncReport:
    """Return what the run did, in numbers."""
    return SyncReport(
        cache=str(cache.path),
        source=config.source,
        snapshot=current.id if current is not None else None,
        published=published is not None,
        dry_run=dry_run,
        added=len(plan.added),
        changed=len(plan.changed),
        removed=len(plan.removed),
        unchanged=plan.unchanged,
        rewritten=plan.rewrites,
        fetched_bytes=plan.fetch_bytes,
        files=len(manifest.files) if manifest else 0,
        row_groups=manifest.row_groups if manifest else 0,
        rows=manifest.rows if manifest else 0,
        bytes=manifest.size if manifest else 0,
        seconds=watch.seconds,
    )


def finish(cache: Cache, config: Config, command: str, report: SyncReport, on_event: OnEvent) -> None:
    """Write the run into the history and remove old snapshots and what dead runs left."""
    record = {"time": datetime.now(timezone.utc).isoformat(timespec="seconds"), "command": command}
    append_history(cache.path, {**record, **report.to_dict()})
    for snapshot in cache.collect(config.keep):
        on_event(Collected(snapshot.id))
    for left in cache.tmp_dir.iterdir():
        remove_tree(left)


def _merge(
    remembered: Config | None,
    source: str | None,
    where: str | None,
    row_group_size: int | None,
    options: Mapping[str, str] | None,
    keep: int | None,
) -> Config:
    """Return what is to be remembered from now on; secrets are left out."""
    if source is not None:
        shown = redact(source)
        if url_scheme(source) in ("", "file"):
            shown = os.path.abspath(os.path.expanduser(local_path(source)))
        known = {k: v for k, v in (options or {}).items() if not is_secret(k)}
        if remembered is not None and remembered.source == shown and not options:
            known = dict(remembered.options)
        base = replace(remembered or Config(shown), source=shown, options=known)
    else:
        assert remembered is not None
        known = {k: v for k, v in (options or {}).items() if not is_secret(k)}
        base = replace(remembered, options={**remembered.options, **known})
    if where is not None:
        base = replace(base, where=where or None)
    if row_group_size is not None:
        base = replace(base, row_group_size=row_group_size)
    if keep is not None:
        base = replace(base, keep=keep)
    return base


def _check_apart(source: str, cache: Path) -> None:
    if url_scheme(source) in ("", "file"):
        path = Path(local_path(source)).resolve()
        ours = cache.resolve()
        if path == ours or ours in path.parents or path in ours.parents:
            raise UsageError(f"{cache}: the cache and its source {path} must lie apart from each other")
