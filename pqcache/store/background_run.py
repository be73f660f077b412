"""A background run that fetches a cache for readers that know its source.

One of a user's processes on a machine starts it; the others wait for it (see `RunFiles`). Its error is raised in all of
them; its warnings are logged by the process that started it.

The run is ``python -m pqcache.store.background_run``. It reads its job as JSON from standard input, as options of the
store may be secrets. To standard output it writes lines of JSON: listings, publications, warnings, and finally its
error, with class and parts.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import logging
import os
import shlex
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from pqcache import errors
from pqcache.errors import MALFORMED, CacheError, CacheLocked, PqcacheError, UsageError, first_line
from pqcache.events import Event, Listed, Published, Retried, Warned
from pqcache.store.arriving import find_arriving
from pqcache.store.cache_directory import CacheDirectory, cache_path
from pqcache.store.config import read_config
from pqcache.store.drivers.registry import is_same_source
from pqcache.store.layout import LOCK
from pqcache.store.urls import check_url, redact, remembered_url, url_scheme
from pqcache.system.disk import open_plain
from pqcache.system.locks import try_lock, user_name
from pqcache.system.processes import ProcessIdentity, collect_garbage_rarely, hide_pandas, limit_blas_threads

MODULE = "pqcache.store.background_run"
_ROOT = Path(__file__).resolve().parents[2]
_POLL = 0.02  # seconds
_LONG = 10.0  # seconds, after which a wait is logged
_RELAY = 0.25  # seconds between looks at what a run has reported
_MOST_STARTS = 3  # of runs that end without an error and without anything to read

log = logging.getLogger("pqcache.arriving")
_started: list[subprocess.Popen[bytes]] = []  # by this process


@atexit.register
def _leave_runs() -> None:
    """Let runs outlive this process without a ResourceWarning."""
    for process in _started:
        process.returncode = process.poll() or 0


@dataclass(frozen=True, kw_only=True)
class FillRequest:
    """A reader's request for a run when there is nothing to read yet.

    ``source`` is a URL or path, ``options`` are those of its store. ``keep_filling`` says whether the run continues
    after the process ``starter`` ends.
    """

    source: str
    options: Mapping[str, str] = field(default_factory=dict, repr=False)
    keep_filling: bool = True
    starter: ProcessIdentity = field(default_factory=ProcessIdentity)

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
    """Raise UsageError if the cache holds another source, or a part of it.

    A first run that fails before there is anything to read doesn't bind the cache to its source.
    """
    current = cache.current()
    if current is None and find_arriving(cache) is None:
        return
    config, wanted = read_config(cache.path), remembered_url(request.source)
    held = redact(config.source)
    if current is not None:
        from pqcache.store.history import copied_source  # and zstandard, which few readers need

        held = copied_source(cache, current) or held
    if not is_same_source(held, wanted, config.options, request.options):
        advice = "name another directory for it, leave source= out, or take it with 'pqcache sync --new-source'"
        raise UsageError(cache.path, f"is a copy of {held}, and not of {wanted}", advice)


def ensure_filling(path: str | os.PathLike[str], request: FillRequest, is_ready: Callable[[], bool]) -> None:
    """Wait until ``is_ready``, for a run that is at work or started here.

    Raises the error of a failed run; a killed run is started again, a few times.
    """
    if is_ready():
        return
    cache, started = CacheDirectory(cache_path(Path(path).expanduser())), 0
    place, begun = RunFiles(cache.path), time.time()
    while True:
        lock, is_started = place.try_lock(), False
        if lock is not None:
            try:
                if is_ready():
                    return
                if not is_locked(cache):  # or somebody else's run is at work, which is waited for
                    if started == _MOST_STARTS:
                        raise _ends_early(cache, request, place)
                    started += 1
                    if cache.exists():
                        check_source(cache, request)  # or the run would put another table in its place
                    _start(cache, request, place, lock)
                    is_started = True
            finally:
                if not is_started:  # no run has the lock
                    place.lock.unlink(missing_ok=True)
                os.close(lock)
        _wait(cache, place, request, is_ready)
        if is_ready():
            return
        error = place.error_since(begun)
        if error is not None and not isinstance(error, CacheLocked):
            raise error


def is_filled_or_filling(cache: CacheDirectory) -> bool:
    """Whether a cache has a snapshot, or a run that fetches the first one."""
    if not cache.exists():
        return False
    if cache.current() is not None:
        return True
    arriving = find_arriving(cache)
    return arriving is not None and arriving.is_being_filled()


def run_error(cache: Path, since: float) -> PqcacheError | None:
    """The error that ended a run started here after ``since``, in Unix time."""
    try:
        return RunFiles(cache).error_since(since)
    except CacheError as error:  # nor was one started here
        log.debug("%s: it is not known how its run has ended: %s", cache, error)
        return None


def fill_command(source: str, cache: Path) -> str:
    return shlex.join(["pqcache", "sync", redact(source), str(cache), "--fill"])


def _start(cache: CacheDirectory, request: FillRequest, place: RunFiles, lock: int) -> None:
    job = {
        "source": request.source,
        "cache": str(cache.path),
        "options": dict(request.options),
        "starter": None if request.keep_filling else asdict(request.starter),
        "files": [str(place.report), str(place.lock)],  # which it removes if all goes well
    }
    path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH", "")]))
    report, to_follow = place.new_report()
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
    except (OSError, TypeError) as error:  # the latter where no interpreter is known
        os.close(to_follow)
        place.report.unlink(missing_ok=True)
        reason = f"the run that fetches it cannot be started ({first_line(error)})"
        raise CacheError(
            cache.path, reason, f"start it from a shell: {fill_command(request.source, cache.path)}"
        ) from error
    finally:
        os.close(report)
    log.info("%s: process %d fetches it from %s", cache.path, process.pid, redact(request.source))
    _started[:] = [*(known for known in _started if known.poll() is None), process]  # or they remain as zombies
    threading.Thread(
        target=_relay_warnings, args=(cache.path, process, to_follow), name="pqcache-run", daemon=True
    ).start()
    assert process.stdin is not None
    try:
        process.stdin.write(json.dumps(job).encode())
        process.stdin.close()
    except OSError as error:  # it is dead, as is noticed
        log.debug("%s: process %d did not read what to do: %s", cache.path, process.pid, error)


def _relay_warnings(cache: Path, process: subprocess.Popen[bytes], report: int) -> None:
    """Log the warnings of a run of this process until it ends, from the descriptor ``report``."""
    left = b""
    try:
        while True:
            has_ended = process.poll() is not None  # before the last look
            while part := os.read(report, 65536):
                *lines, left = (left + part).split(b"\n")
                for message in filter(None, map(warning_in, lines)):
                    log.warning("%s: %s", cache, message)
            if has_ended:
                return
            time.sleep(_RELAY)
    finally:
        os.close(report)


def _wait(cache: CacheDirectory, place: RunFiles, request: FillRequest, is_ready: Callable[[], bool]) -> None:
    """Wait until there is something to read, or no run at work."""
    begun, is_said = time.monotonic(), False
    while not is_ready():
        for process in _started:
            process.poll()
        if not place.is_held() and not is_locked(cache):
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


def is_locked(cache: CacheDirectory) -> bool:
    """Whether any user's run is at work on a cache."""
    try:
        descriptor = os.open(cache.path / LOCK, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:  # there is none yet, or another user's
        return False
    try:
        return try_lock(descriptor, exclusive=False) is False
    finally:
        os.close(descriptor)


def _ends_early(cache: CacheDirectory, request: FillRequest, place: RunFiles) -> CacheError:
    last = (place.lines() or ["nothing"])[-1]
    return CacheError(
        cache.path,
        f"the run that fetches it has ended {_MOST_STARTS} times before there was anything to read; it said: {last}",
        f"see why: {fill_command(request.source, cache.path)}",
    )


_CLOCKS = 0.1  # seconds by which the clock of files may be behind
_OTHER = "set TMPDIR to a directory that you can write to"


class RunFiles:
    def __init__(self, cache: Path) -> None:
        directory = _private_directory()
        name = hashlib.sha256(os.path.realpath(cache).encode()).hexdigest()[:32]
        self.lock, self.report = directory / f"{name}.lock", directory / f"{name}.jsonl"

    def try_lock(self) -> int | None:
        """A descriptor with the lock; None while another run holds it."""
        while True:
            with _errors_of(self.lock):
                descriptor = open_plain(self.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            if try_lock(descriptor, exclusive=True) is False:
                os.close(descriptor)
                return None
            with suppress(OSError):
                if os.path.samestat(os.fstat(descriptor), os.lstat(self.lock)):
                    return descriptor
            os.close(descriptor)  # a run that held it has removed it meanwhile

    def is_held(self) -> bool:
        """Whether a started run is at work."""
        try:
            with _errors_of(self.lock, but=FileNotFoundError):
                descriptor = open_plain(self.lock, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:  # removed by a run that has ended well
            return False
        try:
            return try_lock(descriptor, exclusive=True) is False
        finally:
            os.close(descriptor)

    def new_report(self) -> tuple[int, int]:
        """Descriptors of an empty report, for writing and for reading."""
        with _errors_of(self.report):
            self.report.unlink(missing_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
            writing = open_plain(self.report, flags, 0o600)
            try:
                return writing, open_plain(self.report, os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                os.close(writing)
                raise

    def lines(self) -> list[str]:
        try:
            return self.report.read_text(errors="replace").splitlines()
        except OSError:
            return []

    def error_since(self, moment: float) -> PqcacheError | None:
        """The error that ended the run after ``moment``, in Unix time."""
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
            except MALFORMED:
                continue
        return None


def warning_in(line: bytes) -> str | None:
    """The warning in a line of a report; None for other lines."""
    try:
        values = json.loads(line)
        return str(values["message"]) if values["event"] == "Warned" else None
    except MALFORMED:
        return None


def _private_directory() -> Path:
    with _errors_of(Path("TMPDIR")):
        path = Path(tempfile.gettempdir()) / f"pqcache-{os.getuid()}"
    with _errors_of(path):
        with suppress(FileExistsError):
            path.mkdir(0o700)
        status = path.lstat()
    if status.st_uid != os.getuid():
        owner = user_name(status.st_uid)
        advice = f"set TMPDIR to a directory of your own, or have {owner} remove it"
        raise CacheError(path, f"belongs to {owner}", advice)
    if not stat.S_ISDIR(status.st_mode):
        raise CacheError(path, "is not a directory", "remove it")
    if status.st_mode & 0o077:
        raise CacheError(path, "others can change it", "remove it")
    return path


@contextmanager
def _errors_of(path: Path, but: type[OSError] | tuple[()] = ()) -> Iterator[None]:
    """Give errors of the temporary files' file system advice, except ``but``."""
    try:
        yield
    except but:
        raise
    except OSError as error:
        raise CacheError(path, error.strerror or f"{error}", _OTHER) from error


_LOOK = 1.0  # seconds between looks at the process that has started this one


def main() -> NoReturn:
    """Run the job on standard input, report it, and exit."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    from pqcache.store.sync.command import sync  # and all of sync, which a reader need not import

    hide_pandas()
    limit_blas_threads()
    collect_garbage_rarely()
    job = json.load(sys.stdin)
    if job["starter"] is not None:
        threading.Thread(target=_end_with, args=(ProcessIdentity(**job["starter"]),), daemon=True).start()
    try:
        sync(job["source"], job["cache"], options=job["options"], on_event=_report_event, fill=True)
    except KeyboardInterrupt:  # the next run goes on
        os._exit(130)
    except PqcacheError as error:
        _report(error=[type(error).__name__, error.subject, error.reason, error.advice])
        os._exit(error.exit_code)
    except Exception as error:  # noqa: BLE001  a bug: whoever waits for this process has to know
        _report(error=["PqcacheError", type(error).__name__, first_line(error), "please report this bug"])
        os._exit(1)
    for path in job["files"]:  # nobody needs them any more: what is to be read is there
        with contextlib.suppress(OSError):
            os.unlink(path)
    os._exit(0)


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def _end_with(starter: ProcessIdentity) -> None:
    """Interrupt this process, like Ctrl-C, when its starter ends."""
    while starter.is_alive():
        time.sleep(_LOOK)
    os.kill(os.getpid(), signal.SIGTERM)


def _report_event(event: Event) -> None:
    if isinstance(event, Listed | Published | Retried | Warned):
        _report(event=type(event).__name__, **asdict(event))


def _report(**values: Any) -> None:
    with contextlib.suppress(OSError):  # a full disk, which the run itself will meet
        os.write(sys.stdout.fileno(), json.dumps(values).encode() + b"\n")


if __name__ == "__main__":
    main()
