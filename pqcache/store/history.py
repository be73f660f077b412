"""The history of a cache: one zstd frame with one JSON line appended per run; ``zstdcat`` reads it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import zstandard

from pqcache.errors import DamagedError
from pqcache.store.cache_directory import CacheDirectory
from pqcache.store.layout import HISTORY
from pqcache.store.ownership import file_mode
from pqcache.store.pins import read_kept, write_kept
from pqcache.store.snapshot import Snapshot
from pqcache.system.disk import fsync_path, open_plain
from pqcache.system.locks import lock_as_writer

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
    """Return the record of a run, in which fields are as a run writes them; None for anything else, which is left out.

    ``needed`` are the fields that it must have. Other versions of pqcache may write further ones.
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
    """Append one run's record durably; a torn frame left by a crash is cut off first.

    Runs that the lock of the cache turns away append too, so the file has a lock of its own for the moment.
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
    """What a run came to; records without ``result`` are of completed or killed runs."""
    return str(record.get("result") or (INTERRUPTED if record.get("interrupted") else DONE))


def in_order(records: Sequence[dict[str, Any]], missed: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sort records into the order of the history, which a changed clock does not affect.

    Those of ``missed`` come before the first that published a later snapshot.
    """
    found = list(records)
    for record in sorted(missed, key=_number):
        later = (n for n, other in enumerate(found) if other.get("published") and _number(other) > _number(record))
        found.insert(next(later, len(found)), record)
    return found


def _number(record: Mapping[str, Any]) -> int:
    return Snapshot(Path(str(record.get("snapshot")))).number


def finish_rollback(cache: CacheDirectory) -> None:
    """Record a rollback that was killed after it had made its snapshot the current one; the cache is locked.

    If it was publishing the candidate, that is done now.
    """
    kept, current = read_kept(cache.path), cache.current()
    begun = kept.rollback
    if begun is None:
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
    """Return the partitions that the last sync to publish or keep a snapshot could not take; see `SkippedPartition`."""
    records = (r for r in reversed(read_history(cache)) if r.get("snapshot") == snapshot and r.get("command") == "sync")
    found: Mapping[str, Any] = next(records, {})
    return tuple(found.get("skipped", ()))


def copied_source(cache: CacheDirectory, current: Snapshot | None) -> str | None:
    """Source of the last completed sync, or of a newer snapshot."""
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
    """Make an ``interrupted`` record, from its manifest, for each snapshot that ``records`` lack."""
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
    """Text of the complete frames, and the end of the last; damaged ones before it are skipped."""
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
    """Text and end of the frame at ``position``; the end is 0 if it is torn or damaged."""
    frame, parts = decompressor.decompressobj(), []
    try:
        while not frame.eof and position < len(data):
            parts.append(frame.decompress(data[position : position + _STEP]))
            position = min(position + _STEP, len(data))
    except zstandard.ZstdError:
        return b"", 0
    return b"".join(parts), position - len(frame.unused_data) if frame.eof else 0
