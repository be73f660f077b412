"""The history of a cache: a record of each run, begun under the lock and completed with its result or error.

The history is a file of zstd frames, one JSON line each; ``zstdcat`` reads it. While a run is at work, ``running.json``
describes it and its process. At its end, the run appends its record to the history and removes that file. A killed run
leaves it to the next run, or to ``log``.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import zstandard

from pqcache.errors import (
    DISK_FULL,
    CacheError,
    CacheLocked,
    DamagedError,
    Interrupted,
    PqcacheError,
    error_below,
    first_line,
)
from pqcache.events import OnEvent, Warned, ignore
from pqcache.store.arriving import finish_publishing
from pqcache.store.cache_directory import CacheDirectory, cache_path
from pqcache.store.config import Config, read_config
from pqcache.store.layout import HISTORY, LOCK, RUNNING
from pqcache.store.ownership import file_mode
from pqcache.store.snapshot import Snapshot, read_kept, write_kept
from pqcache.store.urls import is_secret, redact
from pqcache.system.disk import fsync_path, open_plain, read_regular, write_durably
from pqcache.system.locks import lock_as_writer, try_lock
from pqcache.system.processes import ProcessIdentity, boot_id
from pqcache.units import Stopwatch

# what a run came to
DONE, FAILED, REFUSED, INTERRUPTED, RUNNING_NOW = "done", "failed", "refused", "interrupted", "running"

_STEP = 4096  # bytes decompressed at once: more than most frames have, so that reading is linear
_LOCK_WAIT = 5.0  # seconds; an append takes a moment

ROLLBACK = "rollback"


_NUMBERS = (
    "seconds", "fetched_bytes", "added", "changed", "removed", "fetched_again",
    "touched_partitions", "exit_code", "process",
)  # fmt: skip
_TEXTS = (
    "command", "run", "phase", "result", "error", "snapshot", "previous", "candidate",
    "source", "pinned", "version", "started", "host",
)  # fmt: skip
_LISTS = ("skipped", "touched", "collected", "built", "dropped")
_MAPPINGS = ("options", "changes")


def parse_record(text: bytes, *needed: str) -> dict[str, Any] | None:
    """Parse the record of a run; None if it isn't one and must be skipped.

    It must have the fields ``needed``, and may have unknown ones of other versions of pqcache.
    """
    try:
        record = json.loads(text)
        is_good = isinstance(record, dict) and all(record.get(name) is not None for name in needed)
        return record if is_good and all(_fits(name, value) for name, value in record.items()) else None
    except (ValueError, RecursionError):
        return None


def _fits(name: str, value: Any) -> bool:
    if value is None:
        return True
    if name in ("time", "began", "listed"):
        moment = datetime.fromisoformat(str(value))  # ValueError for what is none
        return moment.tzinfo is not None and 1970 <= moment.year < 9999
    if name in _NUMBERS:
        return isinstance(value, int | float) and abs(value) < 1e18
    if name in _LISTS:
        key = {"skipped": "partition", "touched": "directory"}.get(name)
        return isinstance(value, list) and (key is None or all(_has_text(item, key) for item in value))
    if name in _MAPPINGS:
        return isinstance(value, dict) and (name != "changes" or all(map(_is_pair, value.values())))
    return name not in _TEXTS or isinstance(value, str)


def _has_text(item: Any, key: str) -> bool:
    return isinstance(item, dict) and isinstance(item.get(key), str)


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2


def append_history(cache: Path, record: Mapping[str, Any]) -> None:
    """Append a run's record durably; a torn frame left by a crash is cut off first.

    The file is locked meanwhile, as runs turned away by the lock of the cache append too.
    """
    path = cache / HISTORY
    frame = zstandard.ZstdCompressor().compress(json.dumps(record, ensure_ascii=False).encode() + b"\n")
    with open(open_plain(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, file_mode()), "r+b") as file:
        deadline = time.monotonic() + _LOCK_WAIT
        while lock_as_writer(file.fileno()) is False and time.monotonic() < deadline:
            time.sleep(0.01)
        data = file.read()
        good = _complete_frames(data)[1]
        if good < len(data):
            file.truncate(good)
        file.write(frame)
        file.flush()
        os.fsync(file.fileno())
    if not data:
        fsync_path(cache)  # the file's own name


def read_history(cache: Path) -> list[dict[str, Any]]:
    try:
        with open(open_plain(cache / HISTORY, os.O_RDONLY), "rb") as file:
            text, _ = _complete_frames(file.read())
    except FileNotFoundError:
        return []
    records = [parse_record(line, "time", "command") for line in text.splitlines()]
    return [record for record in records if record is not None]


def result_of(record: Mapping[str, Any]) -> str:
    """The outcome of a run; records of completed or killed runs have no ``result``."""
    return str(record.get("result") or (INTERRUPTED if record.get("interrupted") else DONE))


def in_order(records: Sequence[dict[str, Any]], missed: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sort records into the order of the history, whatever their clocks say.

    Records of ``missed`` come before the first one that published a later snapshot.
    """
    found = list(records)
    for record in sorted(missed, key=_number):
        later = (n for n, other in enumerate(found) if other.get("published") and _number(other) > _number(record))
        found.insert(next(later, len(found)), record)
    return found


def _number(record: Mapping[str, Any]) -> int:
    return Snapshot(Path(str(record.get("snapshot")))).number


def finish_rollback(cache: CacheDirectory) -> None:
    """Record a rollback that was killed after its switch; the cache must be locked.

    If it was publishing the candidate, that is completed.
    """
    kept = read_kept(cache.path)
    begun = kept.rollback
    if begun is None:  # else ``current`` is not looked at: where it is damaged, the run has to be recorded
        return
    if begun.publishes:
        cache.publish_candidate(begun.snapshot)
    current = cache.current()
    known = any(record.get("run") == begun.run for record in read_history(cache.path))
    if current is not None and current.id == begun.snapshot and not known:
        record = {"time": begun.time, "command": ROLLBACK, "run": begun.run, "result": DONE}
        append_history(cache.path, {**record, "snapshot": begun.snapshot, "previous": begun.previous})
    write_kept(cache.path, replace(kept, rollback=None, hold=None if begun.publishes else kept.hold))


def skipped_in(cache: Path, snapshot: str) -> tuple[Mapping[str, Any], ...]:
    """The partitions that the last sync to publish or keep a snapshot couldn't take."""
    records = (r for r in reversed(read_history(cache)) if r.get("snapshot") == snapshot and r.get("command") == "sync")
    found: Mapping[str, Any] = next(records, {})
    return tuple(found.get("skipped", ()))


def copied_source(cache: CacheDirectory, current: Snapshot | None) -> str | None:
    """The source of the last completed sync, or of a newer snapshot."""
    records = read_history(cache.path)
    if current is not None and current.id not in {r.get("snapshot") for r in records if r.get("published")}:
        try:
            return current.manifest().source or None  # of a run that was killed before it wrote its record
        except DamagedError:
            pass  # sync reports what is wrong with it
    return next((str(record["source"]) for record in reversed(records) if _has_source(record)), None)


def _has_source(record: Mapping[str, Any]) -> bool:
    done = record.get("command") == "sync" and "published" in record and record.get("result", "done") == "done"
    done = done and not record.get("candidate")  # which is a copy of it, and not the current snapshot
    return bool(record.get("source")) and (done or record.get("interrupted") is True)


def unrecorded(cache: CacheDirectory, records: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Make an ``interrupted`` record, from the manifest, for each snapshot missing in ``records``."""
    known = {record.get("snapshot") for record in records}
    found = []
    for snapshot in cache.snapshots():
        if snapshot.id in known:
            continue
        record = {"time": snapshot.made.isoformat(), "command": "unknown", "interrupted": True}
        record |= {"result": INTERRUPTED, "snapshot": snapshot.id, "published": True}
        try:
            manifest = snapshot.manifest()
        except DamagedError:
            found.append(record)  # sync reports what is wrong with it
            continue
        record |= {"source": manifest.source}
        record |= {"files": len(manifest.files), "rows": manifest.rows, "bytes": manifest.size}
        found.append({**record, "row_groups": manifest.row_groups})
    return found


def _complete_frames(data: bytes) -> tuple[bytes, int]:
    """The text of complete frames, and the end of the last one; damaged frames before it are skipped."""
    parts: list[bytes] = []
    decompressor = zstandard.ZstdDecompressor()
    position = end = 0
    while 0 <= position < len(data):
        text, following = _frame(decompressor, data, position)
        if following:
            parts.append(text)
            position = end = following
        else:
            position = data.find(zstandard.FRAME_HEADER, position + 1)
    return b"".join(parts), end


def _frame(decompressor: zstandard.ZstdDecompressor, data: bytes, position: int) -> tuple[bytes, int]:
    """The text and end of the frame at ``position``; the end is 0 if it is torn or damaged."""
    frame, parts = decompressor.decompressobj(), []
    try:
        while not frame.eof and position < len(data):
            parts.append(frame.decompress(data[position : position + _STEP]))
            position = min(position + _STEP, len(data))
    except zstandard.ZstdError:
        return b"", 0
    return b"".join(parts), position - len(frame.unused_data) if frame.eof else 0


_REFUSALS = (3, 6, 75)  # exit codes of runs that were kept from doing anything


class RunRecord:
    """The record of one run in the history of its cache. All methods but ``refuse`` need the lock."""

    def __init__(self, cache: CacheDirectory, command: str, on_event: OnEvent = ignore) -> None:
        self._cache, self._command, self._on_event = cache, command, on_event
        self._known: dict[str, Any] | None = None  # the options of the cache before this run
        self._running: dict[str, Any] = {}  # what running.json has
        self._start()

    def _start(self) -> None:
        self._watch, self._values = Stopwatch(), {"began": now_text(), "command": self._command}
        self.run, self.is_open = os.urandom(4).hex(), False

    def begin(self) -> None:
        """Record that the run has begun, after completing the records of killed runs."""
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
        """Note the phase of the run in ``running.json``, except listing, after which most runs end."""
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
        """Report a full disk as an event, as commands that free space still have to work."""
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
    """Hold the lock of a cache for a run, which is recorded in any case; raises like ``CacheDirectory.lock``.

    First completes a rollback or publication begun by a killed run.
    """
    record, held = RunRecord(cache, command, on_event), False
    try:
        with cache.lock(wait, on_event):
            held = True
            finish_rollback(cache)
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

    None without one, or if it is damaged, for example by a crash of the machine while it was written.
    """
    try:
        return parse_record(read_regular(cache / RUNNING), "run", "command", "began")
    except (FileNotFoundError, NotADirectoryError):
        return None


def unfinished(cache: CacheDirectory, records: list[dict[str, Any]], under_lock: bool = False) -> list[dict[str, Any]]:
    """Missing records: of snapshots of killed runs, and of the run that began last.

    The latter is ``running`` if it is at work, which is impossible if the caller holds the lock.
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
    """The source and the non-default options that a cache remembers, without secrets."""
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
    """Options that differ, with their values before and after; None stands for the default."""
    names = [*after, *(name for name in before if name not in after)]
    pairs = {name: [before.get(name), after.get(name)] for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def now_text() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def log(cache: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """List the records of all runs on a cache, in the order of their ends; raises CacheError without a cache.

    ``result`` is ``done``, ``failed``, ``refused``, ``interrupted`` or, while the run is at work, ``running``. The
    record of a killed run is made from its note in ``running.json``, and from its snapshot if it published one.

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
