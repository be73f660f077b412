"""Starts the run that fetches a cache, as a process of its own, for readers that know the source.

Of the processes of a user on a machine, one starts it, and the others wait for the same: they lock a file in a private
directory of the user, below the system's one for temporary files, since the cache need not exist yet. The run holds
that lock until it ends. Beside it is what the run reports, a line of JSON each, so that its error is raised by all who
wait for it.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pqcache import errors
from pqcache.errors import CacheError, CacheLocked, PqcacheError, UsageError
from pqcache.store.arriving.arriving_snapshot import find_arriving
from pqcache.store.cache_directory import CacheDirectory, cache_path
from pqcache.store.config import read_config
from pqcache.store.layout import LOCK
from pqcache.store.urls import check_url, redact, remembered_url, url_scheme
from pqcache.system.disk import open_plain
from pqcache.system.locks import try_lock

MODULE = "pqcache.store.sync.background_run"
_ROOT = Path(__file__).resolve().parents[3]
_POLL = 0.02  # seconds
_LONG = 10.0  # seconds, after which a wait is logged
_CLOCKS = 0.1  # seconds by which the clock of files may be behind
_MOST_STARTS = 3  # of runs that end without an error and without anything to read

log = logging.getLogger("pqcache.arriving")
_started: list[subprocess.Popen[bytes]] = []  # by this process


@atexit.register
def _leave_runs() -> None:
    """Let runs outlive this process, without a warning that they do."""
    for process in _started:
        process.returncode = process.poll() or 0


@dataclass(frozen=True, kw_only=True)
class FillRequest:
    """What a reader asks for when there is nothing to read yet.

    ``source`` is a URL or path, ``options`` are those of its store. ``keep_filling`` says whether the run goes on after
    the process ``starter`` has ended.
    """

    source: str
    options: Mapping[str, str] = field(default_factory=dict, repr=False)
    keep_filling: bool = True
    starter: int = field(default_factory=os.getpid)

    def __post_init__(self) -> None:
        if not isinstance(self.source, str) or not self.source:
            raise UsageError("source", "give the URL or path of the dataset", "as to 'pqcache sync'")
        if not isinstance(self.options, Mapping) or not all(
            isinstance(text, str) for item in self.options.items() for text in item
        ):
            raise UsageError("source_options", "give names and values as text, like {'endpoint': 'http://...'}")


def fill_request(
    source: str | os.PathLike[str] | None, options: Mapping[str, str] | None, keep_filling: bool
) -> FillRequest | None:
    """Return what the options of a dataset ask for; None without a source."""
    if source is None:
        if options:
            raise UsageError("source_options", "there is no source", "give source= too")
        if not keep_filling:
            raise UsageError("keep_filling", "there is no source", "give source= too")
        return None
    if not isinstance(source, str | os.PathLike) or not isinstance(text := os.fspath(source), str) or not text:
        raise UsageError("source", "give the URL or path of the dataset", "as to 'pqcache sync'")
    check_url(text)
    if not url_scheme(text):  # relative to where it is given, wherever this process or another one is later
        text = os.path.abspath(os.path.expanduser(text))
    return FillRequest(source=text, options={} if options is None else options, keep_filling=bool(keep_filling))


def check_source(cache: CacheDirectory, request: FillRequest) -> None:
    """Raise UsageError where a cache holds another source than the one that is asked for, or a part of it.

    A first run that fails before there is anything to read leaves a source that binds nobody.
    """
    if cache.current() is None and find_arriving(cache) is None:
        return
    held = redact(read_config(cache.path).source)
    if held != (wanted := remembered_url(request.source)):
        advice = "name another directory for it, or leave source= out"
        raise UsageError(cache.path, f"is a copy of {held}, and not of {wanted}", advice)


def ensure_filling(path: str | os.PathLike[str], request: FillRequest, is_ready: Callable[[], bool]) -> None:
    """Return when ``is_ready``, which has to wait for a run: one that is at work already, or one that is started here.

    A run that fails raises its error here; one that is killed is started again, a few times.
    """
    if is_ready():
        return
    cache, started = CacheDirectory(cache_path(Path(path).expanduser())), 0
    place, begun = _RunFiles(cache.path), time.time()
    while True:
        lock = place.try_lock()
        if lock is not None:
            try:
                if is_ready():
                    return
                if not _is_locked(cache):  # or somebody else's run is at work, which is waited for
                    if started == _MOST_STARTS:
                        raise _ends_early(cache, place)
                    started += 1
                    if cache.exists():
                        check_source(cache, request)  # or the run would put another table in its place
                    _start(cache, request, place, lock)
            finally:
                os.close(lock)
        _wait(cache, place, request, is_ready)
        if is_ready():
            return
        error = place.error_since(begun)
        if error is not None and not isinstance(error, CacheLocked):
            raise error


def is_filled_or_filling(cache: CacheDirectory) -> bool:
    """Return whether a cache can be read: it has a snapshot, or a run fetches the first one."""
    if not cache.exists():
        return False
    if cache.current() is not None:
        return True
    arriving = find_arriving(cache)
    return arriving is not None and arriving.is_being_filled()


def run_error(cache: Path, since: float) -> PqcacheError | None:
    """Return the error with which a run that was started here for a cache has ended after ``since``, in Unix time."""
    return _RunFiles(cache).error_since(since)


class _RunFiles:
    """The lock of the run that is started for a cache, and what it reports."""

    def __init__(self, cache: Path) -> None:
        directory = _private_directory()
        name = hashlib.sha256(os.path.realpath(cache).encode()).hexdigest()[:32]
        self.lock, self.report = directory / f"{name}.lock", directory / f"{name}.jsonl"

    def try_lock(self) -> int | None:
        """Return a descriptor with the lock; None while a run that was started holds it."""
        descriptor = open_plain(self.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if try_lock(descriptor, exclusive=True) is False:
            os.close(descriptor)
            return None
        return descriptor

    def is_held(self) -> bool:
        """Return whether a run that was started is at work."""
        descriptor = self.try_lock()
        if descriptor is None:
            return True
        os.close(descriptor)
        return False

    def lines(self) -> list[str]:
        """Return what the run has reported."""
        try:
            return self.report.read_text(errors="replace").splitlines()
        except OSError:
            return []

    def error_since(self, moment: float) -> PqcacheError | None:
        """Return the error that the run has ended with since ``moment``, in Unix time; None where it has not."""
        try:
            if self.report.stat().st_mtime < moment - _CLOCKS:
                return None
        except OSError:
            return None
        for line in reversed(self.lines()):
            try:
                values = json.loads(line)
                name, *texts = values["error"]
                kind = getattr(errors, name, PqcacheError)
                if isinstance(kind, type) and issubclass(kind, PqcacheError):
                    return kind(*map(str, texts))
            except (ValueError, KeyError, TypeError):
                continue
        return None


def _private_directory() -> Path:
    """Return a directory that only this user can change."""
    path = Path(tempfile.gettempdir()) / f"pqcache-{os.getuid()}"
    try:
        path.mkdir(0o700, exist_ok=True)
        status = path.lstat()
    except OSError as error:
        raise CacheError(path, f"{error.strerror}", "make the directory for temporary files writable") from error
    if path.is_symlink() or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise CacheError(path, "others can change it", "remove it")
    return path


def _start(cache: CacheDirectory, request: FillRequest, place: _RunFiles, lock: int) -> None:
    """Start a run, which inherits the lock."""
    job = {
        "source": request.source,
        "cache": str(cache.path),
        "options": dict(request.options),
        "starter": None if request.keep_filling else request.starter,
    }
    path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH", "")]))
    place.report.unlink(missing_ok=True)
    report = open_plain(place.report, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", MODULE],
            stdin=subprocess.PIPE,
            stdout=report,
            stderr=report,
            env={**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"},
            start_new_session=True,  # Ctrl-C is for the trainer
            pass_fds=[lock],
        )
    finally:
        os.close(report)
    log.info("%s: process %d fetches it from %s", cache.path, process.pid, redact(request.source))
    _started[:] = [*(known for known in _started if known.poll() is None), process]  # or they remain as zombies
    assert process.stdin is not None
    try:
        process.stdin.write(json.dumps(job).encode())
        process.stdin.close()
    except OSError as error:  # it is dead, as is noticed
        log.debug("%s: process %d did not read what to do: %s", cache.path, process.pid, error)


def _wait(cache: CacheDirectory, place: _RunFiles, request: FillRequest, is_ready: Callable[[], bool]) -> None:
    """Wait until there is something to read, or no run is at work any more."""
    begun, is_said = time.monotonic(), False
    while not is_ready():
        for process in _started:
            process.poll()
        if not place.is_held() and not _is_locked(cache):
            break
        if not is_said and time.monotonic() - begun > _LONG:
            is_said = True
            log.warning(
                "%s: waiting since %.0f s for the run that lists %s and reads its footers",
                cache.path, time.monotonic() - begun, redact(request.source),
            )  # fmt: skip
        time.sleep(_POLL)
    if is_said:
        log.warning("%s: the wait for the run is over, after %.0f s", cache.path, time.monotonic() - begun)


def _is_locked(cache: CacheDirectory) -> bool:
    """Return whether a run is at work on a cache, whoever has started it."""
    try:
        descriptor = os.open(cache.path / LOCK, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:  # there is none yet, or another user's
        return False
    try:
        return try_lock(descriptor, exclusive=False) is False
    finally:
        os.close(descriptor)


def _ends_early(cache: CacheDirectory, place: _RunFiles) -> CacheError:
    last: Any = (place.lines() or ["nothing"])[-1]
    return CacheError(
        cache.path,
        f"the run that fetches it has ended {_MOST_STARTS} times before there was anything to read; it said: {last}",
        "run 'pqcache sync SOURCE CACHE --fill' to see why",
    )
