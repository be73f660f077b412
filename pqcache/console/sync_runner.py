"""Runs ``pqcache sync`` on one cache or on all below a directory, with metrics and follow-up commands."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path

import typer

import pqcache
from pqcache.console import terminal
from pqcache.console.app import Given
from pqcache.console.terminal import name_lines, print_line
from pqcache.console.text import print_sync
from pqcache.errors import PqcacheError, UsageError
from pqcache.options import REMEMBERED, RUN
from pqcache.store.cache_root import default_root, named_place
from pqcache.store.history import DONE, FAILED, REFUSED
from pqcache.store.sync.command import TableResult, exit_code_of, sync_all
from pqcache.system.disk import write_durably
from pqcache.units import format_count


def run_one(given: Given) -> None:
    """Sync one cache; raises its error after the follow-up commands."""
    if given.source is None:
        raise UsageError("", "Missing argument 'SOURCE'", "'pqcache sync -h' shows the usage")
    if given.cache is None:
        given.source = named_place(given.source)
    else:
        given.cache = named_place(given.cache, may_be_new=True)
    place = os.path.abspath(given.cache or given.source)
    try:
        with terminal.reporter(given.json, given.quiet, place) as on_event:
            report = pqcache.sync(given.source, given.cache, **given.of(REMEMBERED, RUN), on_event=on_event)
    except PqcacheError as error:
        _follow(TableResult(place, None, error), given)
        raise
    terminal.print_report(report.to_dict(), given.json, given.quiet, lambda: print_sync(report, given.verbose))
    code = _follow(TableResult(place, report, report.skipped_error()), given)
    report.raise_if_skipped()
    if code:
        raise typer.Exit(code)


def _follow(result: TableResult, given: Given) -> int:
    """Write metrics and run the follow-up command, unless the sync was a dry run; return its exit code."""
    if given.dry_run:
        return 0
    write_metrics(given.metrics, [result])
    return run_command(given, result)


def run_all(given: Given) -> None:
    """Sync all caches below a directory: a line for each, and one exit code."""
    _check_for_all(given)
    codes: list[int] = []

    def begin(cache: Path) -> None:
        name_lines(cache, always=True)

    def show(result: TableResult) -> None:
        _print_result(result, given)
        codes.append(result.exit_code)
        if not given.dry_run:
            codes.append(run_command(given, result))

    roots = [named_place(given.source)] if given.source else []
    with terminal.quiet_reporter(given.json or given.quiet) as on_event:
        results = sync_all(*roots, on_begin=begin, on_result=show, **given.of(RUN), on_event=on_event)
    name_lines(roots[0] if roots else default_root())
    if not (given.json or given.quiet):
        print_count("synced", len(results), [result.cache for result in results if result.error is not None])
    if not given.dry_run:
        write_metrics(given.metrics, results)
    if code := exit_code_of(codes):
        raise typer.Exit(code)


def print_count(did: str, caches: int, failed: list[str]) -> None:
    names = f"; failed: {', '.join(Path(cache).name for cache in failed)}" if failed else ""
    print_line(f"{did} {caches - len(failed):,} of {format_count(caches, 'cache')}{names}")


def _check_for_all(given: Given) -> None:
    """Raise UsageError for options that need a single cache: its directory, and remembered options."""
    if given.cache is not None:
        raise UsageError("--all", "takes one directory", "name the one that contains your caches")
    for name, value in given.of(REMEMBERED).items():
        if value is not None:
            option = "-o" if name == "options" else f"--{name.replace('_', '-')}"
            raise UsageError(f"{option} and --all", "exclude each other", "give it to the sync of a cache, once")


def _print_result(result: TableResult, given: Given) -> None:
    report, error = result.report, result.error
    if error is not None:
        print_failure(result.cache, error, given.json)
    if report is not None:
        terminal.print_report(report.to_dict(), given.json, given.quiet, lambda: print_sync(report, given.verbose))


def print_failure(cache: str, error: PqcacheError, json: bool) -> None:
    if json:
        terminal.print_json({"event": "error", "cache": cache, **terminal.error_values(error)})
    terminal.print_error(error, json_lines=False)


def run_command(given: Given, result: TableResult) -> int:
    """Run the follow-up command, if there is one; return 0, or print its failure and return 1."""
    option, command = ("--on-failure", given.on_failure) if result.error else ("--on-success", given.on_success)
    if not command:
        return 0
    sys.stdout.flush()
    code = subprocess.run(["sh", "-c", command], env={**os.environ, **variables(result)}).returncode
    if code:
        print_line(f"warning: {option}: the command ended with exit code {code}", sys.stderr)
    return 1 if code else 0


def write_metrics(path: Path | None, results: Iterable[TableResult]) -> None:
    """Write the metrics file, if one was requested; readers see either the old file or the new one."""
    if path is None:
        return
    try:
        write_durably(path.absolute(), metrics_text(results).encode(), path.absolute().parent, 0o644)
    except OSError as error:
        advice = "name a file in a directory that exists"
        raise PqcacheError(path, f"cannot be written ({error.strerror})", advice) from error


_GAUGES = {
    "pqcache_last_run_timestamp_seconds": "When the last sync ended.",
    "pqcache_last_run_exit_code": "The exit code of the last sync.",
    "pqcache_last_run_duration_seconds": "How long the last sync took.",
    "pqcache_last_run_fetched_bytes": "Bytes that the last sync fetched.",
    "pqcache_last_success_timestamp_seconds": "When a sync last found or made the cache equal to its source.",
    "pqcache_data_timestamp_seconds": "When the oldest data of the current snapshot last matched its source.",
    "pqcache_rows": "Rows of the current snapshot.",
    "pqcache_files": "Files of the current snapshot.",
    "pqcache_bytes": "Bytes of the files of the current snapshot.",
    "pqcache_stale": "1 if the newest file is older than a freshness rule allows, else 0.",
    "pqcache_skipped_partitions": "Partitions that are outdated or missing in the current snapshot.",
}


def variables(result: TableResult) -> dict[str, str]:
    """The environment variables of a follow-up command."""
    report, error = result.report, result.error
    came_to = DONE if error is None else FAILED
    came_to = {3: REFUSED, 6: REFUSED, 75: REFUSED, 5: "skipped"}.get(result.exit_code, came_to)
    known: dict[str, object] = {"CACHE": result.cache, "NAME": Path(result.cache).name}
    known |= {"RESULT": came_to, "EXIT_CODE": result.exit_code, "ERROR": "" if error is None else str(error)}
    if report is not None:
        known |= {"SOURCE": report.source, "SNAPSHOT": report.snapshot or "", "PUBLISHED": int(report.published)}
        known |= {"ROWS": report.rows, "FETCHED_BYTES": report.fetched_bytes, "SECONDS": f"{report.seconds:.3f}"}
    return {f"PQCACHE_{name}": str(value) for name, value in known.items()}


def metrics_text(results: Iterable[TableResult]) -> str:
    values: dict[str, list[str]] = {name: [] for name in _GAUGES}
    for result in results:
        label = f'{{cache="{_escaped(Path(result.cache).name)}",path="{_escaped(result.cache)}"}}'
        for name, value in _values(result):
            values[name].append(f"{name}{label} {value}\n")
    parts = [
        f"# HELP {name} {_GAUGES[name]}\n# TYPE {name} gauge\n{''.join(lines)}"
        for name, lines in values.items()
        if lines
    ]
    return "".join(parts)


def _values(result: TableResult) -> Iterator[tuple[str, float]]:
    from pqcache.store.status import cache_status

    report, known = result.report, cache_status(result.cache)
    ended = datetime.now() if known.last_run is None else datetime.fromisoformat(known.last_run)
    yield "pqcache_last_run_timestamp_seconds", round(ended.timestamp(), 3)
    yield "pqcache_last_run_exit_code", result.exit_code
    if report is not None:
        yield "pqcache_last_run_duration_seconds", report.seconds
        yield "pqcache_last_run_fetched_bytes", report.fetched_bytes
    for name, text in (("last_success", known.synced), ("data", known.as_of)):
        if text is not None:
            yield f"pqcache_{name}_timestamp_seconds", datetime.fromisoformat(text).timestamp()
    yield "pqcache_stale", int(known.stale)
    yield "pqcache_skipped_partitions", len(known.skipped)
    for name, value in (("rows", known.rows), ("files", known.files), ("bytes", known.bytes)):
        if value is not None:
            yield f"pqcache_{name}", value


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
