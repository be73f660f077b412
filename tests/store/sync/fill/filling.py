"""Runs a sync with ``fill=True`` step by step: the test says when the source answers."""

from __future__ import annotations

import filecmp
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import pqcache
from pqcache.events import Event
from pqcache.store.arriving import ArrivingSnapshot, find_arriving
from pqcache.store.cache_directory import CacheDirectory
from pqcache.store.drivers.local import LocalSource
from pqcache.store.snapshot import Snapshot

WAIT = 60.0  # seconds after which a test that waits fails

Read = tuple[str, int, int]


class LocalReads:
    """What is read of local sources: each range in order, and ``before`` is called ahead of each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: list[Read] = []
        self.before: Callable[[str, int, int], None] = lambda path, offset, length: None
        read = LocalSource.read

        def recorded(source: LocalSource, path: str, offset: int, length: int, tag: str = "") -> Iterator[bytes]:
            self.before(path, offset, length)
            self.done.append((path, offset, length))
            yield from read(source, path, offset, length, tag)

        monkeypatch.setattr(LocalSource, "read", recorded)


class Filling:
    """A run in a thread, which stops before it reads the first file of its arriving snapshot."""

    def __init__(self, reads: LocalReads, source: Path, cache: Path, **how: Any) -> None:
        self.cache, self.events, self.error = CacheDirectory(cache), list[Event](), None
        self.report: pqcache.SyncReport | None = None
        self.reads = reads
        self._go, self._holds = threading.Event(), threading.Event()
        reads.before = self._hold
        self._thread = threading.Thread(target=self._run, args=(source, cache), kwargs=how)
        self._thread.start()

    def _hold(self, *_: object) -> None:
        if find_arriving(self.cache) is not None:
            self._holds.set()
            assert self._go.wait(WAIT)

    def _run(self, source: Path, cache: Path, **how: Any) -> None:
        try:
            self.report = pqcache.sync(source, cache, on_event=self.events.append, **{"fill": True, **how})
        except BaseException as error:  # noqa: BLE001  raised by ``end``
            self.error = error

    def arriving(self) -> ArrivingSnapshot:
        """Wait for the arriving snapshot."""
        return wait_for(lambda: find_arriving(self.cache))

    def at_first_file(self) -> ArrivingSnapshot:
        """Wait until the run has made the arriving snapshot, and would read a file."""
        assert self._holds.wait(WAIT)
        return self.arriving()

    def go_on(self) -> None:
        """Let the run read."""
        self._go.set()

    def end(self) -> pqcache.SyncReport:
        """Let the run end; return its report, or raise its error."""
        self.go_on()
        self._thread.join(WAIT)
        assert not self._thread.is_alive()
        if self.error is not None:
            raise self.error
        assert self.report is not None
        return self.report


def wait_for(found: Callable[[], Any]) -> Any:
    """Return what ``found`` returns as soon as it is true."""
    deadline = time.monotonic() + WAIT
    while not (value := found()):
        assert time.monotonic() < deadline, "waited for too long"
        time.sleep(0.002)
    return value


def check_same(one: Path, other: Path) -> None:
    """Assert that the current snapshots of two caches are the same but for the time and the ID."""
    first, second = (Snapshot((cache / "current").resolve()) for cache in (one, other))
    names = sorted(path.relative_to(first.path).as_posix() for path in first.path.rglob("*") if path.is_file())
    assert names == sorted(p.relative_to(second.path).as_posix() for p in second.path.rglob("*") if p.is_file())
    for name in names:
        assert (first.path / name).stat().st_mode == (second.path / name).stat().st_mode, name
        if name not in ("_pqcache/files.arrow", "_pqcache/checksums.json"):
            assert filecmp.cmp(first.path / name, second.path / name, shallow=False), name
    assert replace(first.checked_manifest(), created="") == replace(second.checked_manifest(), created="")
    assert sorted(path.name for path in one.iterdir()) == sorted(path.name for path in other.iterdir())
