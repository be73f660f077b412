"""Sync: makes a cache equal to its source, downloading only changes."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import reduce
from operator import and_
from pathlib import Path
from typing import Any

from pqcache.errors import PqcacheError, UsageError, disk_errors, error_below, first_line
from pqcache.events import Listed, OnEvent, Warned, ignore
from pqcache.options import (
    CONTENT,
    IDENTITY,
    Remembered,
    SyncArguments,
    SyncRun,
    SyncRunArguments,
    Unpack,
    documented,
    options_of,
    parsed,
)
from pqcache.store.arriving import arriving_snapshots, find_arriving
from pqcache.store.cache_directory import CacheDirectory, cache_at, cache_path
from pqcache.store.cache_root import ListedTable, add, tables_below
from pqcache.store.config import Config, read_config, updated, write_config
from pqcache.store.drivers.base import Source
from pqcache.store.drivers.registry import is_same_source
from pqcache.store.drivers.timeouts import FIRST_CONTACT, Patience, patience_of_run
from pqcache.store.expect import check_columns
from pqcache.store.history import RunRecord, copied_source, now_text, recorded_run
from pqcache.store.layout import CONFIG, LEASE
from pqcache.store.manifest import SourceFile, Summary, TableVersion, table_digest
from pqcache.store.partition_paths import parent, parse_types
from pqcache.store.snapshot import Snapshot, digest_of_held, read_kept, read_summary, rolled_back_from
from pqcache.store.sync.cache_run import (
    BandwidthLimit,
    ByteCounter,
    CacheRun,
    RunOptions,
    RunResult,
    SyncReport,
    finish_run,
)
from pqcache.store.sync.listing import (
    Listing,
    ListSource,
    Memo,
    known_keys,
    list_source,
    listing_key,
    listing_rules,
    misfits_of,
    newest_rule,
    only_newest,
    read_memo,
    without_misfits,
)
from pqcache.store.sync.plan import Plan, Recipe, cached_paths, recipe_for
from pqcache.store.sync.safety_checks import check_identities, wait_rules
from pqcache.store.tables.base import OpenOptions, Table
from pqcache.store.tables.open_table import open_table
from pqcache.store.urls import check_url, is_local, is_secret, local_path, quoted, redact, remembered_url
from pqcache.system.disk import limit_mode
from pqcache.units import Stopwatch

OPTION = "--new-source"
SKIPPED, LATER = 5, 75  # exit codes of tables that got only a part of the new data, and that may succeed later


@documented(SyncArguments, Remembered, SyncRun)
def sync(
    source: str | os.PathLike[str],
    cache: str | os.PathLike[str] | None = None,
    *,
    on_event: OnEvent = ignore,
    **given: Unpack[SyncArguments],
) -> SyncReport:
    """Make ``cache`` equal to ``source``, and publish a new snapshot if anything changed.

    An option that is None keeps its remembered value, an empty value restores its default. Sizes, durations and counts
    are numbers (bytes, seconds) or text, like ``"128MB"``, ``"10m"`` and ``"8"``.

    Args:
        source: URL or path of the dataset; or the cache alone, to sync from its remembered source.
        cache: the cache's directory; made by the first run.
        on_event: called with what happens, from several threads.
        given: the options, as the table in pqcache.options has them.

    >>> report = sync("lake/shop", "cache/shop", where="dt >= '2026-11-02'", force=True)
    >>> report.published, report.removed, report.rows
    (True, 2, 400)
    >>> sync("cache/shop").published  # nothing has changed
    False

    Raises UsageError, SourceError, SourceIncomplete or ContractNotMet (nothing was published), ParquetError, CacheError
    or CacheLocked; then the current snapshot is unchanged. An error with ``exit_code`` 75 may go away by itself.
    """
    run = parsed(given, SyncRun, Remembered)
    changes = {name: run.pop(name) for name in options_of(Remembered) if name in run}
    store_options = changes.pop("options", {})
    if types := changes.get("partition_types"):
        changes["partition_types"] = parse_types(types)
    limit = run.get("bwlimit")
    options_of_run = RunOptions(
        **run,
        patience=patience_of_run(run.get("retries"), run.get("retry_for")),
        on_event=ByteCounter(on_event, None if limit is None else BandwidthLimit(limit)),
    )
    url, place = (None, source) if cache is None else (os.fspath(source), cache)
    if url is not None:
        check_order(url, os.fspath(place))
    target = CacheDirectory(cache_path(place))
    if url is None and not target.exists():
        if inside := target.caches_inside():
            raise UsageError(place, inside[0], f"sync all of them: pqcache sync --all {quoted(place)}")
        raise UsageError(place, "not a pqcache yet", f"name the source too: pqcache sync SOURCE {quoted(place)}")
    request = _Request(
        cache=target,
        url=url,
        store_options=store_options,
        changes=changes,
        run=options_of_run,
        is_patient=not run.keys().isdisjoint(("retries", "retry_for")),
    )
    with ExitStack() as stack, disk_errors(target.path):
        return _sync(request, stack)


@dataclass(frozen=True, kw_only=True)
class _Request:
    """The arguments of ``sync``.

    ``changes`` are options for the cache to remember from now on, by name. ``is_patient``: retries were asked for.
    """

    cache: CacheDirectory
    url: str | None
    store_options: Mapping[str, str]
    changes: Mapping[str, Any]
    run: RunOptions
    is_patient: bool


def _read_run(request: _Request, record: RunRecord | None) -> CacheRun:
    """Read the state of the cache after waiting for its lock, as another run may have changed it."""
    cache, options = request.cache, request.run
    exists = cache.exists()
    remembered = read_config(cache.path) if exists else None
    config = updated(merged_config(remembered, request.url, request.store_options), request.changes)
    current, candidate = (cache.current(), cache.candidate()) if exists else (None, None)
    return CacheRun(
        command="sync",
        cache=cache,
        config=config,
        remembered=remembered,
        current=current,
        candidate=candidate,
        is_held=read_kept(cache.path).hold is not None,
        options=options,
        record=record,
        previous_source=changed_source(cache, candidate or current, remembered, config, options.new_source),
    )


def _warn_of_changes(run: CacheRun, published: bool) -> None:
    """Warn after a rollback, and about a changed source, even if no file of the previous one was ever fetched."""
    on_event, remembered, before = run.options.on_event, run.remembered, run.previous_source
    if published and (was := rolled_back_from(run.cache.path, run.current)):
        on_event(Warned(f"the cache was rolled back from {was}; the source's present state is current again"))
    if run.base is None and remembered is not None and remembered.source != run.config.source:
        before = redact(remembered.source)
    if before is not None:
        on_event(Warned(f"the source was {before} and is {redact(run.config.source)} from now on"))


def _sync(request: _Request, stack: ExitStack) -> SyncReport:
    cache, options = request.cache, request.run
    record: RunRecord | None = None
    cache.check_usable()  # before its options are believed, and before the source is listed for it
    if cache.exists() and not options.dry_run:
        record = stack.enter_context(recorded_run(cache, "sync", options.wait, options.on_event))
    run = _read_run(request, record)
    check_apart(run.config.source, cache.path)
    source = _open(request, run, stack)
    memo = Memo() if options.compare == CONTENT else read_memo(cache.path)
    if (known := _known_result(run, source, memo)) is not None:
        return finish_run(run, known)
    list_it = _lister(request, run, source, memo)
    listing = list_it(options.on_event)
    if not options.dry_run and record is None:
        cache.create()
        record = stack.enter_context(recorded_run(cache, "sync", options.wait, options.on_event))
        run = replace(run, record=record)
        if cache.current() is not None:  # another first run was faster: what is taken is what it has left
            run = _read_run(request, record)
            source = _open(request, run, stack)
            list_it = _lister(request, run, source, memo)
            listing = list_it(options.on_event)
    if run.base is None and arriving_snapshots(cache):  # what a killed run has left is continued in its way
        run = replace(run, options=replace(options, fill=True))
    key = listing_key(source, run.config)  # of what was listed: the run may read a newer version later
    if listing.odd or listing.misfits:  # each run has to say so
        key = None
    try:
        result = _run_result(run, source, listing, list_it)
    except UsageError:
        if record is not None and run.current is None and not arriving_snapshots(cache):
            _forget_options(run)
        raise
    if not options.dry_run:
        if run.config != run.remembered:  # at once: the snapshot has these options already
            write_config(cache.path, run.config)
        held = result.published or result.candidate or run.current
        if held is not None and (warning := limit_to_source(held.path, source, listing.files)):
            options.on_event(Warned(warning))
        if memo.listing(key) is None:
            memo.remember(None if key is None else listing.known(key, source))
        memo.write(cache.path)
        _warn_of_changes(run, bool(result.published))
    report = finish_run(run, result)
    is_raw = bool(result.published) and not result.plan.recipe.rewrite
    if run.options.fill and run.current is None and is_raw and run.config.rewrite() is not None:
        return _rewrite_arrived(run, report, source, list_it)
    return report


def _forget_options(run: CacheRun) -> None:
    """Restore ``pqcache.toml`` after a refused first run, which has already written its options."""
    if run.remembered is None:
        (run.cache.path / CONFIG).unlink(missing_ok=True)
    else:
        write_config(run.cache.path, run.remembered)


def _rewrite_arrived(run: CacheRun, arrived: SyncReport, source: Source, list_it: ListSource) -> SyncReport:
    """Rewrite the files of a snapshot that arrived in the source's form; report both runs as one."""
    options = replace(run.options, on_event=ByteCounter(run.options.on_event), watch=Stopwatch())
    again = replace(run, current=run.cache.current(), options=options)
    if run.record is not None:
        run.record.begin()
    report = finish_run(again, _run_result(again, source, list_it(ignore), list_it))
    fetched, seconds = arrived.fetched_bytes + report.fetched_bytes, run.options.watch.seconds
    changes = {name: getattr(arrived, name) + getattr(report, name) for name in ("added", "changed", "removed")}
    rewritten = {item.directory for item in report.touched if item.rewritten}
    touched = tuple(replace(item, rewritten=item.directory in rewritten) for item in arrived.touched)
    return replace(
        report,
        **changes,
        unchanged=arrived.unchanged,
        fetched_bytes=fetched,
        seconds=seconds,
        published=True,
        touched=touched,
    )


def _first_contact(request: _Request, run: CacheRun) -> Patience:
    """How long to retry a source that has not answered in this run: a mistyped one should fail soon."""
    return request.run.patience if request.is_patient or run.base is not None else FIRST_CONTACT


def _open(request: _Request, run: CacheRun, stack: ExitStack) -> Source:
    config = run.config
    request.run.on_event.listed = now_text()  # a table's log is read now
    source = open_table(
        request.url or config.source,
        OpenOptions(
            store={**config.options, **request.store_options},
            timeout=request.run.timeout,
            hdfs_driver=config.hdfs_driver,
            as_files=config.as_files,
            rule=config.version_rule,
            patience=_first_contact(request, run),
            on_event=request.run.on_event,
            keys=known_keys(run.base) if config.ignore_case else None,
        ),
    )
    stack.callback(source.close)
    if isinstance(source, Table) and source.capabilities.lists_one_version and (config.marker or config.settle):
        given, none = ("--marker", "''") if config.marker else ("--settle", "0")
        reason = "is a table, whose files are complete when they are committed"
        raise UsageError(source.url, f"{reason}; {given} is for directories", f"leave it out with {given} {none}")
    if isinstance(source, Table) and config.partition_types:
        reason = "is a table, which declares its own types; --partition-types is for directories"
        raise UsageError(source.url, reason, "leave it out with --partition-types ''")
    return source


def _lister(request: _Request, run: CacheRun, source: Source, memo: Memo) -> ListSource:
    """The listing function of this run, which always selects the same partitions."""
    held = run.base if run.previous_source is None else None
    rules, patience = listing_rules(run.config, held), _first_contact(request, run)
    rule = newest_rule(run.config, request.cache, run.base)
    last: Listing | None = None

    def list_it(on_event: OnEvent) -> Listing:
        nonlocal last, patience
        last = listed = list_source(source, on_event, rules, patience, memo, last)
        patience = request.run.patience
        wanted = only_newest(listed, rule)
        if not _is_typed(held, wanted, source.table_version, run.config):
            misfits = misfits_of(source, listed, rules)
            wanted = without_misfits(only_newest(listed, rule, misfits), misfits, rules, wait_rules(run.config))
        return wanted

    return list_it


def _is_typed(held: Snapshot | None, listing: Listing, table: TableVersion | None, config: Config) -> bool:
    """Whether all partitions of a listing are known to fit their types: they were checked before, or any value fits."""
    if held and not all(os.path.isdir(held.path / d) for d in {parent(file.path) for file in listing.files}):
        return False
    if not config.partition_types:
        return True
    summary = read_summary(held) if held else None
    return summary is not None and summary.table == table_digest(listing.typed(table, config))


def _known_result(run: CacheRun, source: Source, memo: Memo) -> RunResult | None:
    """The result if a table's log and the cache prove that there is nothing to do."""
    config = run.config
    if run.base is None or run.options.compare != IDENTITY or config != run.remembered:
        return None
    known = memo.listing(listing_key(source, config))
    if known is None:
        return None
    recipe = recipe_for(config, known.subset)
    result = _nothing_to_do(run, known.sources, recipe, known.schema)
    if result is None or not known.is_public():
        return None
    run.options.on_event(Listed(known.files, known.size))
    return replace(result, table=known.table, newest=known.newest_partitions)


def _run_result(run: CacheRun, source: Source, listing: Listing, list_again: ListSource) -> RunResult:
    """Publish a new snapshot if anything has changed."""
    check_columns(run.config.rules, (parent(file.path) for file in listing.files), redact(run.config.source))
    recipe = recipe_for(run.config, listing.subset.recipe)
    if run.options.compare == IDENTITY and source.capabilities.may_give_only_sizes:
        check_identities(listing.files, source.url)
    if run.base is not None and run.options.compare == IDENTITY and not (listing.odd or listing.misfits):
        table = table_digest(listing.typed(source.table_version, run.config))
        if (result := _nothing_to_do(run, listing.sources, recipe, table)) is not None:
            found = replace(result, table=source.table_version, newest=listing.newest)
            return replace(found, passed_over=listing.passed_over)
    from pqcache.store.sync.incremental import sync_changes  # and pyarrow: slow, and not needed above

    return sync_changes(run, source, listing, list_again)


def _nothing_to_do(run: CacheRun, sources: str, recipe: Recipe, table: str | None) -> RunResult | None:
    """The result if the current snapshot or the candidate proves that there is nothing to do; see `_unchanged`."""
    if run.changes_index:
        return None
    for snapshot in (run.current, None if run.candidate_is_due else run.candidate):
        summary = None if snapshot is None else _unchanged(snapshot, sources, recipe, run.config.shard, table)
        if summary is not None:
            same = summary.source_files
            plan = Plan(directories=(), recipe=recipe, added=(), changed=(), removed=(), unchanged=same)
            waiting = None if snapshot == run.current else snapshot
            return RunResult(plan=plan, published=None, totals=summary.totals, candidate=waiting)
    return None


def _unchanged(current: Snapshot, sources: str, recipe: Recipe, shard: str | None, table: str | None) -> Summary | None:
    """The summary of ``current`` if it proves that there is nothing to do, else None.

    It does if the snapshot was made from the source files with the digest ``sources``, all by the same recipe, and its
    own files exist with their sizes; ``table`` is the digest of their table's schema. Markers and settling don't matter
    then: the held versions of waiting files equal the listed ones. A share also depends on the files of other nodes, so
    it is always computed again.
    """
    summary = None if shard is not None else read_summary(current)
    if summary is None or summary.shard is not None or summary.recipe != recipe.text or summary.table != table:
        return None
    same = summary.sources == sources and summary.held == digest_of_held(current.path)
    return summary if same else None


def check_order(source: str, cache: str) -> None:
    """Raise UsageError if source and cache were given in the wrong order."""
    scheme = re.match(r"([a-zA-Z][a-zA-Z0-9+.-]+):/", cache)  # Path makes one slash of two
    if scheme is not None and is_local(source):
        subject, reason = f"{scheme[1]}://...", "a cache is a local directory"
    elif cache_at(source) is not None and os.path.isdir(cache) and cache_at(cache) is None:
        subject, reason = source, f"is a pqcache, and {cache} is not"
    else:
        return
    raise UsageError(subject, reason, "the two may be swapped: write 'pqcache sync SOURCE CACHE'")


def check_apart(source: str, cache: Path) -> None:
    """Raise UsageError if a cache lies in its local source, or contains it."""
    if is_local(source):
        path = Path(local_path(source)).resolve()
        ours = cache.resolve()
        if path == ours or ours in path.parents or path in ours.parents:
            raise UsageError(cache, f"overlaps with its source {path}", "name another directory")


def changed_source(
    cache: CacheDirectory, current: Snapshot | None, remembered: Config | None, config: Config, is_allowed: bool
) -> str | None:
    """The source of the copy in ``cache``, if ``config`` names another one, else None.

    ``remembered`` is from ``pqcache.toml``, which a person may have edited. Raises UsageError for a change that is not
    allowed. A cache without files may take any source.
    """
    if remembered is None or (current is None and find_arriving(cache) is None):
        return None
    held = copied_source(cache, current) or redact(remembered.source)
    before = remembered.options if is_same_source(held, remembered.source, {}, {}) else {}
    if is_same_source(held, config.source, before, config.options):
        return None
    if not is_allowed:
        raise _refusal(cache.path, held, remembered, config)
    return held


def _refusal(cache: Path, held: str, remembered: Config, config: Config) -> UsageError:
    wanted = redact(config.source)
    if is_same_source(held, wanted, {}, {}):
        held = f"{held} at {remembered.options.get('endpoint')}"
        wanted = f"{wanted} at {config.options.get('endpoint')}"
    reason = f"is a copy of {held}, and {wanted} is another source"
    if not is_same_source(held, remembered.source, {}, {}) and remembered.source == config.source:
        return UsageError(
            cache / CONFIG,
            f"names the source {wanted}, and the cache is a copy of {held}",
            f"correct it, or say {OPTION} if the cache is to be a copy of {wanted} from now on",
        )
    advice = f"name another directory, or say {OPTION} if the cache is to be a copy of {wanted} from now on"
    return UsageError(cache, reason, advice)


def merged_config(remembered: Config | None, source: str | None, options: Mapping[str, str] | None) -> Config:
    """Add the source and its options, without secrets, to the remembered configuration."""
    known = {k: v for k, v in (options or {}).items() if not is_secret(k)}
    if source is None:
        assert remembered is not None
        return replace(remembered, options={**remembered.options, **known})
    check_url(source)
    shown = remembered_url(source)
    if remembered is not None and is_same_source(remembered.source, shown, remembered.options, known):
        known = {**remembered.options, **known}
    return replace(remembered or Config(source=shown), source=shown, options=known)


def limit_to_source(snapshot: Path, source: Source, files: Sequence[SourceFile]) -> str:
    """Restrict ``snapshot`` to those who may read ``files`` at a local source; return a warning.

    Older snapshots share the files by hard links, so they change too. The metadata has minima and maxima of all files,
    and a rewritten file has rows of all files of its directory, so they are readable by those who can read all these
    files. Nothing is done if everyone can read the source.
    """
    paths, by_group = [file.path for file in files], dict[int, Callable[[str], int]]()
    if not source.private_modes(paths, os.stat(snapshot).st_gid):
        return ""
    refused: list[str] = []
    for place, _, names in os.walk(snapshot, onerror=lambda error: refused.append(str(error.filename))):
        directory = place.removeprefix(str(snapshot)).removeprefix("/")
        for path in (f"{directory}/{name}".removeprefix("/") for name in names):
            try:
                status = os.lstat(snapshot / path)
                if status.st_gid not in by_group:
                    by_group[status.st_gid] = _readers(source.private_modes(paths, status.st_gid))
                if path != LEASE:
                    limit_mode(f"{snapshot}/{path}", by_group[status.st_gid](path), status)
            except OSError:
                refused.append(f"{snapshot}/{path}")
    reason = "is more readable than its source, and belongs to another user"
    return f"{refused[0]} {reason}; run this as that user, or remove the cache" if refused else ""


def _readers(modes: Mapping[str, int]) -> Callable[[str], int]:
    """The read permissions that files of one group may have: by path, by directory, and for metadata."""
    of_directory: dict[str, int] = {}
    for path, mode in modes.items():
        of_directory[parent(path)] = of_directory.get(parent(path), 0o444) & mode
    of_file = {**modes, **{new: modes[path] for path, new in cached_paths(modes).items()}}
    of_metadata = reduce(and_, of_directory.values(), 0o444)

    def mode_of(path: str) -> int:
        if path.split("/")[0] == parent(LEASE):
            return of_metadata
        return of_file.get(path, of_directory.get(parent(path), 0o444))

    return mode_of


@dataclass(frozen=True)
class TableResult:
    """The result of the sync of one cache: a report, or its error; both if partitions were skipped."""

    cache: str
    report: SyncReport | None
    error: PqcacheError | None

    @property
    def exit_code(self) -> int:
        """The exit code of this sync."""
        return 0 if self.error is None else self.error.exit_code


@documented(SyncRunArguments, SyncRun)
def sync_all(
    *roots: str | os.PathLike[str],
    on_begin: Callable[[Path], None] = lambda _: None,
    on_result: Callable[[TableResult], None] = lambda _: None,
    on_event: OnEvent = ignore,
    **given: Unpack[SyncRunArguments],
) -> list[TableResult]:
    """Sync all caches below some directories, one after the other; returns the result of each.

    A root may have a ``pqcache.toml`` of several tables: a cache is made for each that has none yet, with its options
    from the file.

    Args:
        roots: the directories. Default: that of ``status``.
        on_begin: called with each cache before its sync.
        on_result: called with each result.
        on_event: called with what happens, from several threads.
        given: the options, as the table in pqcache.options has them.

    >>> [(Path(found.cache).name, found.exit_code) for found in sync_all("cache")]
    [('shop', 0)]

    Raises UsageError for invalid options. The error of a sync is in its result.
    """
    options: dict[str, Any] = {"on_event": on_event, **given}
    parsed(given, SyncRun)  # refused once, and not by each cache
    results = []
    for path, entry in tables_below(*roots).items():
        on_begin(path)
        results.append(sync_one(path, **options) if entry is None else _sync_table(path, entry, options))
        on_result(results[-1])
    return results


def _sync_table(path: Path, entry: ListedTable, options: Mapping[str, Any]) -> TableResult:
    """Sync a listed table; its cache is made first, so that a failure is recorded there too."""
    if entry.error is not None:
        return TableResult(os.fspath(path), None, entry.error)
    try:
        if not options.get("dry_run") and not CacheDirectory(path).exists():
            add(entry.source, entry.name, root=path.parent, options=entry.options.get("options"))
    except PqcacheError as error:
        return TableResult(os.fspath(path), None, error)
    return sync_one(path, source=entry.source, **{**entry.options, **options})


def sync_one(cache: str | os.PathLike[str], source: str | None = None, **options: Any) -> TableResult:
    """Sync one cache, as remembered or from ``source``; failures become part of the result."""
    try:
        report = sync(cache, **options) if source is None else sync(source, cache, **options)
        return TableResult(os.fspath(cache), report, report.skipped_error())
    except Exception as error:  # noqa: BLE001  see known_error
        return TableResult(os.fspath(cache), None, known_error(error))


def known_error(error: Exception) -> PqcacheError:
    """Wrap a bug as an error, so that the other caches are still synced."""
    if isinstance(error, PqcacheError):
        return error
    if isinstance(error, OSError) and error.filename:
        return error_below(Path(error.filename), error)
    advice = "please report this bug, with the output of 'pqcache --version -v'"
    return PqcacheError(type(error).__name__, first_line(error), advice)


def exit_code_of(codes: Sequence[int]) -> int:
    """The exit code of several syncs: 75 if all failures are temporary, otherwise that of the first permanent one. A
    failed sync takes precedence over skipped partitions.

    >>> exit_code_of([0, 75]), exit_code_of([75, 5]), exit_code_of([0, 5, 75, 3, 1]), exit_code_of([])
    (75, 5, 3, 0)
    """
    failed = [code for code in codes if code]
    lasting = [code for code in failed if code not in (SKIPPED, LATER)]
    return (lasting or sorted(failed) or [0])[0]
