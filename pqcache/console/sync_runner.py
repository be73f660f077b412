"""Runs the command sync: of one cache or of all below a directory, with what follows."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

import pqcache
from pqcache.console import progress, terminal
from pqcache.console.after_sync import AfterSync
from pqcache.console.app import print_report
from pqcache.console.line_prefix import name_lines
from pqcache.console.sync_text import print_sync
from pqcache.errors import PqcacheError, UsageError
from pqcache.store.status import default_root
from pqcache.store.sync.all_tables import TableResult, exit_code_of, sync_all
from pqcache.units import format_count


@dataclass(frozen=True)
class SyncOutput:
    """How a sync is printed."""

    json: bool
    quiet: bool
    verbose: bool


def run_one(source: str, cache: str | None, options: Mapping[str, Any], output: SyncOutput, after: AfterSync) -> None:
    """Sync one cache; raises its error after the commands that follow."""
    place = os.path.abspath(cache or source)
    try:
        with progress.reporter(output.json, output.quiet, place) as on_event:
            report = pqcache.sync(source, cache, **options, on_event=on_event)
    except PqcacheError as error:
        _follow(TableResult(place, None, error), options, after)
        raise
    print_report(report.to_dict(), output.json, output.quiet, lambda: print_sync(report, output.verbose))
    code = _follow(TableResult(place, report, report.skipped_error()), options, after)
    report.raise_if_skipped()
    if code:
        raise typer.Exit(code)


def _follow(result: TableResult, options: Mapping[str, Any], after: AfterSync) -> int:
    """Do what follows a sync, unless it was a dry run; return the exit code of that."""
    if options.get("dry_run"):
        return 0
    after.write_metrics([result])
    return after.run_command(result)


def run_all(root: str | None, options: Mapping[str, Any], output: SyncOutput, after: AfterSync) -> None:
    """Sync all caches below a directory: a line for each, and one exit code."""
    codes: list[int] = []

    def begin(cache: Path) -> None:
        name_lines(cache, always=True)

    def show(result: TableResult) -> None:
        _print_result(result, output)
        codes.append(result.exit_code)
        if not options.get("dry_run"):
            codes.append(after.run_command(result))

    with progress.quiet_reporter(output.json or output.quiet) as on_event:
        results = sync_all(
            *([root] if root else []), on_begin=begin, on_result=show, **{**options, "on_event": on_event}
        )
    name_lines(root or default_root())
    failed = [Path(result.cache).name for result in results if result.error is not None]
    if not (output.json or output.quiet):
        text = f"synced {len(results) - len(failed):,} of {format_count(len(results), 'cache')}"
        terminal.print_line(f"{text}; failed: {', '.join(failed)}" if failed else text)
    if not options.get("dry_run"):
        after.write_metrics(results)
    if code := exit_code_of(codes):
        raise typer.Exit(code)


def _print_result(result: TableResult, output: SyncOutput) -> None:
    report, error = result.report, result.error
    if error is not None:
        if output.json:
            terminal.print_json({"event": "error", "cache": result.cache, **terminal.error_values(error)})
        terminal.print_error(error, json_lines=False)
    if report is not None:
        print_report(report.to_dict(), output.json, output.quiet, lambda: print_sync(report, output.verbose))


def check_for_all(cache: str | None, remembered: Mapping[str, Any]) -> None:
    """Raise UsageError for what is of one cache: its directory, and options that it remembers."""
    if cache is not None:
        raise UsageError("--all", "takes one directory", "name the one that your caches are in")
    for name, value in remembered.items():
        if value is not None:
            option = "-o" if name == "options" else f"--{name.replace('_', '-')}"
            raise UsageError(f"{option} and --all", "exclude each other", "give it to the sync of a cache, once")
