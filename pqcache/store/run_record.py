"""The record of a run on a cache: begun under the lock, and ended with what the run did or why it failed.

``running.json`` is there while a run is at work: what it is, and its process. A run that ends appends its record to the
history and removes the file. One that is killed leaves it, so that the next run, or ``log``, knows of it.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import fields
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from pqcache.errors import DISK_FULL, CacheError, CacheLocked, Interrupted, PqcacheError, error_below, first_line
from pqcache.events import OnEvent, Warned, ignore
from pqcache.store.arriving.arriving_snapshot import finish_publishing
from pqcache.store.cache_directory import CacheDirectory, cache_path
from pqcache.store.config import Config, read_config
from pqcache.store.history import (
    DONE,
    FAILED,
    INTERRUPTED,
    REFUSED,
    RUNNING_NOW,
    append_history,
    in_order,
    parse_record,
    read_history,
    result_of,
    unrecorded,
)
from pqcache.store.layout import HISTORY, LOCK, RUNNING
from pqcache.store.ownership import file_mode
from pqcache.store.urls import is_secret, redact
from pqcache.system.boot import boot_id
from pqcache.system.disk import fsync_path, open_plain, read_regular, write_durably
from pqcache.system.locks import try_lock
from pqcache.system.process_identity import ProcessIdentity
from pqcache.system.stopwatch import Stopwatch

_REFUSALS = (3, 6, 75)  # exit codes of runs that were kept from doing anything


class RunRecord:
    """What one run leaves in the history of its cache. All methods are called under the lock but ``refuse``."""

    def __init__(self, cache: CacheDirectory, command: str, on_event: OnEvent = ignore) -> None:
        self._cache, self._command, self._on_event = cache, command, on_event
        self._known: dict[str, Any] | None = None  # the options of the cache before this run
        self._running: dict[str, Any] = {}  # what running.json has
        self._start()

    def _start(self) -> None:
        self._watch, self._values = Stopwatch(), {"began": now_text(), "command": self._command}
        self.run, self.is_open = os.urandom(4).hex(), False

    def begin(self) -> None:
        """Record that the run is at work, after completing the records of killed runs."""
        self._start()
        records = read_history(self._cache.path)
        process = ProcessIdentity()
        where = {"process": process.number, "started": process.started, "host": socket.gethostname(), "boot": boot_id()}
        self._running = {"run": self.run, **self._values, **where}
        self._known = next((r["options"] for r in reversed(records) if "options" in r), None)
        if self._known is None:
            with suppress(CacheError):  # which the run itself will raise, if there is a cache at all
                self._known = options_of(read_config(self._cache.path))
        with self._full_disk_warned():
            for missed in unfinished(self._cache, records, under_lock=True):
                append_history(self._cache.path, missed)
            path, flags = self._cache.path / RUNNING, os.O_WRONLY | os.O_CREAT | os.O_TRUNC
            with open(open_plain(path, flags, file_mode()), "w", encoding="utf-8") as file:
                file.write(json.dumps(self._running) + "\n")
        self.is_open = True

    def enter(self, phase: str) -> None:
        """Say in ``running.json`` what the run is doing, unless it lists the source, which most do and then end."""
        if self.is_open and phase not in ("list", self._running.get("phase")):
            self._running["phase"] = phase
            with suppress(OSError):  # only ``status`` reads it
                text = json.dumps(self._running) + "\n"
                write_durably(self._cache.path / RUNNING, text.encode(), self._cache.tmp_dir, file_mode())

    def end(self, values: Mapping[str, Any], config: Config | None = None) -> None:
        """Record the run's result, and the changes of options in ``config``."""
        record = {"result": DONE, **values}
        if config is not None and (options := options_of(config)) != self._known:
            record["options"] = options
            if self._known is not None:
                record["changes"] = changes_between(self._known, options)
            self._known = options
        self._append(record)

    def fail(self, error: BaseException) -> None:
        if self.is_open:
            self._append(self._failure(error))

    def refuse(self, error: PqcacheError) -> None:
        """Record that another run holds the lock."""
        if (self._cache.path / LOCK).is_file():
            with self._full_disk_warned():
                append_history(self._cache.path, {"time": now_text(), **self._values, **self._failure(error)})

    def _failure(self, error: BaseException) -> dict[str, Any]:
        if isinstance(error, OSError):
            error = error_below(self._cache.path, error)
        result, code = FAILED, getattr(error, "exit_code", 1)
        if isinstance(error, KeyboardInterrupt | Interrupted):
            result, code = INTERRUPTED, Interrupted.exit_code
        elif code in _REFUSALS:
            result = REFUSED
        message = str(error) if isinstance(error, PqcacheError) else first_line(error)
        message = "by Ctrl-C or a signal" if isinstance(error, KeyboardInterrupt) else message
        return {"result": result, "exit_code": code, "error": message, "seconds": self._watch.seconds}

    def _append(self, values: Mapping[str, Any]) -> None:
        record = {"time": now_text(), **self._values, "run": self.run, **values}
        with self._full_disk_warned():
            append_history(self._cache.path, record)
            (self._cache.path / RUNNING).unlink(missing_ok=True)
            fsync_path(self._cache.path)
        self.is_open = False

    @contextmanager
    def _full_disk_warned(self) -> Iterator[None]:
        """Report a full disk as an event: commands that free space have to work all the same."""
        try:
            yield
        except OSError as error:
            if error.errno not in DISK_FULL:
                raise
            self._on_event(Warned(f"{self._cache.path}: no space left for the record of this run in the history"))


@contextmanager
def recorded_run(
    cache: CacheDirectory, command: str, wait: float = 0.0, on_event: OnEvent = ignore
) -> Iterator[RunRecord]:
    """Hold the lock of a cache for a run that is recorded whatever becomes of it; raises as ``CacheDirectory.lock``.

    What a killed run was publishing is published first.
    """
    record, held = RunRecord(cache, command, on_event), False
    try:
        with cache.lock(wait, on_event):
            held = True
            finish_publishing(cache)
            record.begin()
            try:
                yield record
                if record.is_open:
                    record.end({})
            except BaseException as error:
                with suppress(OSError):  # the error of the run is the one to raise; running.json tells of it too
                    record.fail(error)
                raise
    except CacheLocked as error:
        if not held:
            record.refuse(error)
        raise


def read_running(cache: Path) -> dict[str, Any] | None:
    """The record of a run at work, or of a killed one.

    None if there is neither, or if it is damaged, as when only a part was written before the machine stopped.
    """
    try:
        return parse_record(read_regular(cache / RUNNING), "run", "command", "began")
    except (FileNotFoundError, NotADirectoryError):
        return None


def unfinished(cache: CacheDirectory, records: list[dict[str, Any]], under_lock: bool = False) -> list[dict[str, Any]]:
    """Records that are missing: snapshots of killed runs, and the run that began last.

    That one is ``running`` if it is at work, which it is not for a caller who holds the lock.
    """
    left, missed = read_running(cache.path), unrecorded(cache, records)
    if left is None or any(record.get("run") == left["run"] for record in records):
        return missed
    if not under_lock and is_at_work(cache, left):
        at_work = {name: left[name] for name in ("began", "command", "run", "phase") if name in left}
        return [*missed, {"time": left["began"], **at_work, "result": RUNNING_NOW}]
    known = {name: left[name] for name in ("began", "command", "run") if name in left}
    published = missed.pop() if missed else {"time": left["began"], "interrupted": True}
    return [*missed, {**published, **known, "result": INTERRUPTED}]


def is_at_work(cache: CacheDirectory, running: Mapping[str, Any]) -> bool:
    """Whether the run that wrote ``running`` holds the lock, or its process exists."""
    try:
        descriptor = os.open(cache.path / LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    except PermissionError:  # another user's cache, whose lock is closed to others
        return _process_exists(running)
    try:
        held = try_lock(descriptor, exclusive=False)
        return _process_exists(running) if held is None else not held
    finally:
        os.close(descriptor)


def _process_exists(running: Mapping[str, Any]) -> bool:
    if running.get("host") != socket.gethostname():
        return True  # nobody here knows
    process = ProcessIdentity(int(running.get("process", 0)), str(running.get("started", "")))
    return running.get("boot") == boot_id() and process.exists()


def options_of(config: Config) -> dict[str, Any]:
    """Source and non-default options that a cache remembers, without secrets."""
    found = {}
    for field in fields(config):
        value = getattr(config, field.name)
        if field.name == "source":
            value = redact(value)
        elif field.name == "options":
            value = {name: redact(text) for name, text in value.items() if not is_secret(name)} or None
        elif value in (field.default, {}):
            continue
        if value is not None:
            found[field.name] = value if isinstance(value, str | int | float) else _plain(value)
    return found


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else list(value)


def changes_between(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Options that differ, each with its value before and after; None stands for the default."""
    names = [*after, *(name for name in before if name not in after)]
    pairs = {name: [before.get(name), after.get(name)] for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def now_text() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def log(cache: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """List the records of all runs on a cache in the order in which they ended; raises CacheError without a cache.

    ``result`` is what the run came to: ``done``, ``failed``, ``refused``, ``interrupted`` or, of one that is at work,
    ``running``. A run that was killed has a record made of what it wrote when it began, and of its snapshot if it
    published one.

    >>> [(run["command"], run["result"], run["added"]) for run in log("cache/shop")]
    [('sync', 'done', 6)]
    """
    opened = CacheDirectory(cache_path(cache))
    if read_running(opened.path) is None and not (opened.path / HISTORY).is_file():
        opened = CacheDirectory.open(os.fspath(cache))
    records = read_history(opened.path)
    missed = unfinished(opened, records)
    found = in_order(records, [record for record in missed if record.get("snapshot")])
    found += [record for record in missed if not record.get("snapshot")]
    return [{**record, "result": result_of(record)} for record in found]
