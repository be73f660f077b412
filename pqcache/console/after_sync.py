"""What follows a sync: the user's commands, and a file for Prometheus."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from pqcache.console.terminal import print_line
from pqcache.errors import PqcacheError
from pqcache.store.history import DONE, FAILED, REFUSED
from pqcache.store.sync.all_tables import TableResult
from pqcache.system.disk import write_durably

_GAUGES = {
    "pqcache_last_run_timestamp_seconds": "When the last sync ended.",
    "pqcache_last_run_exit_code": "The exit code of the last sync.",
    "pqcache_last_run_duration_seconds": "How long the last sync took.",
    "pqcache_last_run_fetched_bytes": "Bytes that the last sync fetched.",
    "pqcache_last_success_timestamp_seconds": "When a sync last found or made the cache equal to its source.",
    "pqcache_rows": "Rows of the current snapshot.",
    "pqcache_files": "Files of the current snapshot.",
    "pqcache_bytes": "Bytes of the files of the current snapshot.",
    "pqcache_skipped_partitions": "Partitions that the last sync that was done could not take.",
}


@dataclass(frozen=True, kw_only=True)
class AfterSync:
    """What is to be done after a sync: a command if it was done, one if it failed, and a file with metrics."""

    on_success: str | None = None
    on_failure: str | None = None
    metrics: Path | None = None

    def run_command(self, result: TableResult) -> int:
        """Run the command for a result; return 0, or 1 if the command fails, which is printed."""
        command = self.on_failure if result.error is not None else self.on_success
        if not command:
            return 0
        sys.stdout.flush()
        code = subprocess.run(["sh", "-c", command], env={**os.environ, **variables(result)}).returncode
        if code:
            option = "--on-failure" if result.error is not None else "--on-success"
            print_line(f"warning: {option}: the command ended with exit code {code}", sys.stderr)
        return 1 if code else 0

    def write_metrics(self, results: Iterable[TableResult]) -> None:
        """Write the file with metrics, if there is to be one; a reader sees the old file or the new one."""
        if self.metrics is None:
            return
        text = metrics_text(results)
        try:
            write_durably(self.metrics.absolute(), text.encode(), self.metrics.absolute().parent, 0o644)
        except OSError as error:
            raise PqcacheError(
                self.metrics, f"cannot be written ({error.strerror})", "name a file in a directory that exists"
            ) from error


def variables(result: TableResult) -> dict[str, str]:
    """Return what a command learns of a sync, as environment variables."""
    report, error = result.report, result.error
    came_to = DONE if error is None else FAILED
    came_to = {3: REFUSED, 75: REFUSED, 5: "skipped"}.get(result.exit_code, came_to)
    known: dict[str, object] = {"CACHE": result.cache, "NAME": Path(result.cache).name}
    known |= {"RESULT": came_to, "EXIT_CODE": result.exit_code, "ERROR": "" if error is None else str(error)}
    if report is not None:
        known |= {"SOURCE": report.source, "SNAPSHOT": report.snapshot or "", "PUBLISHED": int(report.published)}
        known |= {"ROWS": report.rows, "FETCHED_BYTES": report.fetched_bytes, "SECONDS": f"{report.seconds:.3f}"}
    return {f"PQCACHE_{name}": str(value) for name, value in known.items()}


def metrics_text(results: Iterable[TableResult]) -> str:
    """Return the results of syncs in the text format of Prometheus."""
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
    if known.synced is not None:
        yield "pqcache_last_success_timestamp_seconds", datetime.fromisoformat(known.synced).timestamp()
    yield "pqcache_skipped_partitions", len(known.skipped)
    for name, value in (("rows", known.rows), ("files", known.files), ("bytes", known.bytes)):
        if value is not None:
            yield f"pqcache_{name}", value


def _escaped(text: str) -> str:
    """Return the value of a label."""
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
