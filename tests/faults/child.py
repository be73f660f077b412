"""Runs the command line in forked children, each under an instrument: count, kill, fail, or watch the order.

One process imports everything once and forks for every run, so that a sweep over hundreds of instants takes
seconds. The instruments see operations on the cache through the interpreter's audit events; for what has no
event (write, fsync, pyarrow's files) the functions are wrapped. Nothing in pqcache knows of any of this.

Instruments, as JSON: {"kind": ...} and more
    none
    count              write the name of every point passed to OUT/points
    kill   at          SIGKILL itself at that point; a write there has put half of its bytes on disk
    fail   at, errno   raise OSError at that point; with "on": true at every later one as well. In place of "at",
                       "first" is a regular expression: the first point whose name it matches
    order              check at every rename that what it makes visible is durable; findings go to OUT/order
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import io
import json
import os
import re
import signal
import stat
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

_AUDITED = {
    "open", "os.rename", "os.link", "os.symlink", "os.mkdir", "os.remove", "os.rmdir", "os.chmod",
    "os.truncate", "os.listdir", "os.scandir", "fcntl.flock",
}  # fmt: skip
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_TAKES_SPACE = {"create", "write", "osfile", "os.mkdir", "os.link", "os.symlink", "fsync"}


Act = Callable[[int, str, str, "Callable[[], Any] | None"], None]


class Points:
    """Calls ``act(number, name, path, half)`` before every operation on a path below ``root``.

    ``half`` does the first half of a write.
    """

    def __init__(self, root: str, act: Act) -> None:
        self.root = root
        self._act = act
        self._passed = 0
        self._lock = threading.Lock()
        self._inside = threading.local()

    def install(self) -> None:
        import pyarrow as pa

        sys.addaudithook(self._audit)
        wrapped = {"write": "write", "pwrite": "write", "fsync": "fsync", "fdatasync": "fsync", "ftruncate": "write"}
        wrapped["writev"] = "write"
        for name, shown in wrapped.items():
            self._wrap(name, shown)
        real = pa.OSFile

        def osfile(path: str, mode: str = "r", **how: Any) -> Any:
            if "w" in mode:
                self.passed("osfile", path)
            return real(path, mode, **how)

        pa.OSFile = osfile

    def passed(self, name: str, path: str, half: Callable[[], Any] | None = None) -> None:
        if not path.startswith(self.root) or getattr(self._inside, "yes", False):
            return
        self._inside.yes = True
        try:
            with self._lock:
                number = self._passed
                self._passed += 1
            self._act(number, name, path, half)
        finally:
            self._inside.yes = False

    def _wrap(self, name: str, shown: str) -> None:
        real = getattr(os, name)

        def wrapper(descriptor: int, *rest: Any) -> Any:
            half: Callable[[], None] | None = None
            if name in ("write", "pwrite"):

                def half() -> None:
                    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
                    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)  # which takes no half blocks
                    real(descriptor, bytes(rest[0][: len(rest[0]) // 2]), *rest[1:])

            elif name == "writev":

                def half() -> None:
                    real(descriptor, rest[0][: len(rest[0]) // 2])

            self.passed(shown, _path_of(descriptor), half)
            return real(descriptor, *rest)

        setattr(os, name, wrapper)

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event not in _AUDITED:
            return
        if event == "open":
            path, _, flags = arguments
            if isinstance(path, int):
                return
            self.passed("create" if flags & _WRITES else "open", _text(path))
        elif event == "fcntl.flock":
            self.passed(event, _path_of(arguments[0]))
        else:
            path = arguments[1] if event == "os.symlink" else arguments[0]
            if isinstance(path, int):
                self.passed(event, _path_of(path))
                return
            name = _text(path)
            directory = arguments[-1]
            if not os.path.isabs(name) and isinstance(directory, int) and directory >= 0:
                name = f"{_path_of(directory)}/{name}"
            self.passed(event, name)


class Order:
    """Checks that whatever a rename makes visible is on disk already, directories included.

    A file is on disk if it was fsynced and has not changed since; what lay in the cache before the run is.
    """

    def __init__(self, root: str) -> None:
        self._root = root
        self._durable: dict[tuple[int, int], tuple[int, ...]] = {}
        self.found: list[str] = []
        self.seen: list[str] = []
        for directory, _, names in os.walk(root):
            for name in (directory, *(f"{directory}/{name}" for name in names)):
                self._synced(name)

    def install(self, points: Points) -> None:
        real = os.fsync

        def fsync(descriptor: int) -> None:
            real(descriptor)
            self._synced(_path_of(descriptor))

        os.fsync = fsync
        sys.addaudithook(lambda event, arguments: self._audit(points, event, arguments))

    def _audit(self, points: Points, event: str, arguments: tuple[Any, ...]) -> None:
        if event != "os.rename" or getattr(points._inside, "yes", False):
            return
        points._inside.yes = True
        try:
            self._renaming(_text(arguments[0]), _text(arguments[1]))
        finally:
            points._inside.yes = False

    def _renaming(self, source: str, target: str) -> None:
        if not target.startswith(self._root):
            return
        short = f"{self._short(source)} -> {self._short(target)}"
        self.seen.append(short)
        part = self._short(target).split("/")
        if part[0] == "snapshots" or (part[0] == "tmp" and len(part) == 4 and part[2] in ("fetch", "rewrite")):
            if not target.endswith((".part", ".new")) and not self._short(source).startswith("tmp/removed-"):
                self._must_be_durable(source, short)
        elif part[0] == "current":
            chosen = os.path.join(self._root, os.readlink(source))
            self._must_be_durable(chosen, short)
            self._must_be(os.path.dirname(chosen), short)
        elif part[0] in ("pqcache.toml", "CACHEDIR.TAG"):
            self._must_be(source, short)
        elif part[0] == "tmp" and self._short(source).startswith("snapshots/"):
            self._must_be(self._root, short)  # `current` has moved on, durably, before the old one goes

    def at_the_end(self) -> None:
        """Check what a run that reported success promised."""
        for name in ("history.jsonl.zst", "pqcache.toml", "CACHEDIR.TAG"):
            self._must_be(os.path.join(self._root, name), "the end")

    def parents_at_the_end(self, upto: str) -> None:
        """Check that the names in the cache, and those on the way to it, are on disk."""
        directory = self._root
        while directory.startswith(upto):
            self._must_be(directory, "the end")
            directory = os.path.dirname(directory)

    def _must_be_durable(self, tree: str, when: str) -> None:
        self._must_be(tree, when)
        if os.path.isdir(tree):
            for directory, below, names in os.walk(tree):
                for name in (*below, *names):
                    self._must_be(f"{directory}/{name}", when)

    def _must_be(self, path: str, when: str) -> None:
        status = os.lstat(path)
        if stat.S_ISLNK(status.st_mode) or (stat.S_ISREG(status.st_mode) and status.st_size == 0):
            return  # the name is all there is to it, and that is the directory's
        if self._durable.get((status.st_dev, status.st_ino)) != _state(status):
            self.found.append(f"{self._short(path) or 'the cache directory'} is not on disk at: {when}")

    def _synced(self, path: str) -> None:
        if os.path.lexists(path):
            status = os.lstat(path)
            self._durable[status.st_dev, status.st_ino] = _state(status)

    def _short(self, path: str) -> str:
        return os.path.relpath(path, self._root) if path != self._root else ""


def _state(status: os.stat_result) -> tuple[int, ...]:
    return (status.st_mtime_ns,) if stat.S_ISDIR(status.st_mode) else (status.st_size, status.st_mtime_ns)


def _text(path: Any) -> str:
    return os.path.abspath(os.fsdecode(path)) if os.fspath(path) else ""


def _path_of(descriptor: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return ""


def _child(job: Mapping[str, Any]) -> NoReturn:
    out = job["out"]
    for number, name in ((1, "stdout"), (2, "stderr")):
        descriptor = os.open(f"{out}/{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        os.dup2(descriptor, number)
    read: dict[str, int] = {}
    _count_reads(read)
    if job.get("clock"):
        _set_clock(job["clock"])
    instrument = job["instrument"]
    kind, at = instrument["kind"], instrument.get("at", -1)
    names: list[str] = []
    if kind != "order":  # no disk loses power here, and what a process wrote outlives it
        os.fsync = os.fdatasync = lambda descriptor: None

    def act(number: int, name: str, path: str, half: Callable[[], Any] | None) -> None:
        nonlocal at
        if at < 0 and "first" in instrument and re.match(instrument["first"], f"{name} {path}"):
            at = number
        if kind == "count":
            names.append(f"{name} {path}")
        elif kind == "kill" and number == at:
            if half is not None:
                half()
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind == "fail" and (number == at or (instrument.get("on") and number > at)):
            full = instrument["errno"] in (errno.ENOSPC, errno.EDQUOT)
            if not full or name in _TAKES_SPACE:
                if half is not None:
                    half()
                raise OSError(instrument["errno"], os.strerror(instrument["errno"]), path)

    points = Points(job["cache"], act)
    order = Order(job["cache"]) if kind == "order" else None
    if order is not None:
        order.install(points)
    elif kind != "none":
        points.install()
    if job.get("uid"):
        os.setgroups([])
        os.setgid(job["uid"])
        os.setuid(job["uid"])
    from pqcache import cli
    from pqcache.store.sync import fill

    fill._RANGE, fill._LARGE = 64 << 10, 128 << 10  # so that small files arrive in several ranges
    sys.argv = ["pqcache", *job["arguments"]]
    try:
        cli.main()
    except SystemExit as end:
        code = int(end.code or 0)
    points._inside.yes = True
    if order is not None:
        order.at_the_end()
        if job.get("parents"):
            order.parents_at_the_end(job["parents"])
        Path(out, "order").write_text(json.dumps({"found": order.found, "seen": order.seen}))
    if not job.get("uid"):
        Path(out, "points").write_text("\n".join(names))
        Path(out, "read").write_text(json.dumps(read))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _count_reads(read: dict[str, int]) -> None:
    """Keep the bytes that really came from a local source, by path."""
    from pqcache.store.drivers.local import LocalSource

    real = LocalSource.read

    def counted(self: Any, path: str, *range_: Any) -> Any:
        for chunk in real(self, path, *range_):
            read[path] = read.get(path, 0) + len(chunk)
            yield chunk

    LocalSource.read = counted  # type: ignore[method-assign]


def _set_clock(ahead: float) -> None:
    """Let the clock of the machine be so many seconds ahead."""
    import time
    from datetime import datetime, tzinfo

    real = time.time

    class Shifted(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Shifted:
            return cls.fromtimestamp(real() + ahead, tz)

    time.time = lambda: real() + ahead
    for name, module in list(sys.modules.items()):
        if name.startswith("pqcache.") and getattr(module, "datetime", None) is datetime:
            module.datetime = Shifted  # type: ignore[attr-defined]


def main() -> None:
    """Fork for every job that comes as a line of JSON, and answer with the child's status."""
    import importlib
    import importlib.metadata

    from tests.forked_commands import import_pqcache

    # all of it now: a child that has given up its rights may not be allowed to read the interpreter's files
    modules = (
        "pqcache.cli",
        "pqcache.console.terminal",
        "pyarrow.dataset",
        "pyarrow.parquet",
        "sqlglot",
        "tomlkit",
    )
    for module in modules:
        importlib.import_module(module)
    import_pqcache()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        sys.modules["pqcache.cli"].run(["gc", os.devnull, "--dry-run"])  # what the parser imports late
    sys.modules["pqcache.store.config"].parsed("")
    gc.freeze()  # what is there is not looked at again, and so not copied, by the children
    for line in sys.stdin:
        if not line.strip():
            break
        child = os.fork()
        if child == 0:
            try:
                _child(json.loads(line))
            finally:
                import traceback

                traceback.print_exc()
                os._exit(99)
        _, status = os.waitpid(child, 0)
        sys.stdout.write(json.dumps(os.waitstatus_to_exitcode(status)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
