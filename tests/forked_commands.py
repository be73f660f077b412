"""Runs the command line in processes forked from one that has imported it: starting Python takes longer than they do.

Each child is a process of its own with the words, working directory, environment and streams that it is given. It runs
what ``python -m pqcache`` runs and ends as any interpreter does. What is about the start of the interpreter, or sends a
signal, runs ``python -m pqcache`` itself.

The processes with which verify reads files are forked as well, from one more, where the library is called in a test.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import functools
import gc
import importlib
import io
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, NoReturn

from tests import short_waits

ROOT = Path(__file__).parent.parent
_LATE = (  # what commands import when they need it
    "botocore.session", "fsspec.implementations.webhdfs", "hdfs_native", "pyarrow.compute", "pyarrow.dataset",
    "pyarrow.ipc", "pyarrow.parquet", "requests", "rich.console", "rich.progress", "rich.table", "sqlglot", "tenacity",
    "tomlkit",
)  # fmt: skip
_PROGRAM = """#!{python} -IS
import array, json, os, socket, sys
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    job = json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()
    server.sendmsg([len(job).to_bytes(8, "big")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))])
    server.sendall(job)
    answers = server.makefile()
    answers.readline()
    code = int(answers.readline())
sys.exit(code if code >= 0 else 128 - code)
"""


class Warm:
    """The process that forks, and how to have the command line run by it; it ends with the process that started it."""

    def __init__(self, what: str = "pqcache", env: Mapping[str, str] | None = None) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="warm-"))
        self._address = str(self._directory / "socket")
        program = self._directory / "pqcache"
        program.write_text(_PROGRAM.format(python=sys.executable, address=self._address))
        program.chmod(0o755)
        command = [sys.executable, "-m", "tests.forked_commands", self._address, what]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, env=env)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"ready\n", "the process that forks has ended"
        atexit.register(self.close)

    @property
    def bin(self) -> Path:
        """A directory with a program ``pqcache`` in it, for shells."""
        return self._directory

    def run(
        self, *words: object, env: Mapping[str, str] | None = None, cwd: Path | None = None, timeout: float = 120
    ) -> subprocess.CompletedProcess[str]:
        """Run ``pqcache words...``; return what it printed and its exit code, which is negative for a signal."""
        with contextlib.ExitStack() as stack:
            streams = [stack.enter_context(open(os.devnull, "rb"))]
            streams += [stack.enter_context(tempfile.TemporaryFile()) for _ in range(2)]  # type: ignore[misc]
            job = [[*map(str, words)], str(cwd or os.getcwd()), dict(os.environ if env is None else env)]
            server = stack.enter_context(self.fork(job, [stream.fileno() for stream in streams]))
            server.settimeout(timeout)
            answers = stack.enter_context(server.makefile())
            pid = int(answers.readline())
            try:
                code = int(answers.readline())
            except TimeoutError:
                os.kill(pid, signal.SIGKILL)
                raise subprocess.TimeoutExpired(list(map(str, words)), timeout) from None
            printed = []
            for stream in streams[1:]:
                stream.seek(0)
                printed.append(stream.read().decode())
            return subprocess.CompletedProcess(["pqcache", *map(str, words)], code, *printed)

    def fork(self, job: list[Any], streams: list[int]) -> socket.socket:
        """Return where the id of a new process comes, and its exit code; a job is words, directory, environment."""
        server = socket.socket(socket.AF_UNIX)
        server.connect(self._address)
        _send(server, json.dumps(job).encode(), streams)
        return server

    def close(self) -> None:
        """End the process that forks."""
        with self._process:
            assert self._process.stdin is not None
            self._process.stdin.close()
        shutil.rmtree(self._directory, ignore_errors=True)


_warm: Warm | None = None


def warm() -> Warm:
    """Return the one of this process, which starts when it is first asked for."""
    global _warm
    if _warm is None:
        _warm = Warm()
    return _warm


def run_pqcache(
    *words: object, env: Mapping[str, str] | None = None, cwd: Path | None = None, timeout: float = 120
) -> subprocess.CompletedProcess[str]:
    """Run ``pqcache words...`` in a process of its own, without a terminal; ``env`` is all of its environment."""
    return warm().run(*words, env=env, cwd=cwd, timeout=timeout)


def true_in_child(call: Callable[[], bool]) -> bool:
    """Return what ``call`` returns in a child that is forked from this process; False if it fails."""
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if call() else 1)
        finally:
            traceback.print_exc()
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


class _ForkedChecker:
    """As ``subprocess.Popen`` of a process that checks files for verify, but forked from one that has imported it."""

    _warm: Warm | None = None

    def __init__(self, command: list[str], *, stderr: IO[bytes], env: Mapping[str, str], **_: object) -> None:
        if _ForkedChecker._warm is None:
            _ForkedChecker._warm = Warm("file_checks", env)
        requests, requests_end = os.pipe()
        answers_end, answers = os.pipe()
        self.stdin, self.stdout = os.fdopen(requests_end, "wb"), os.fdopen(answers_end, "rb")
        self._server = _ForkedChecker._warm.fork(
            [command[3:], os.getcwd(), dict(env)], [requests, answers, stderr.fileno()]
        )
        os.close(requests)
        os.close(answers)
        self._ended = self._server.makefile()
        self.pid = int(self._ended.readline())
        self._status: int | None = None
        self._lock = threading.Lock()

    def wait(self) -> int:
        with self._lock:
            if self._status is None:
                with self._server, self._ended:
                    self._status = int(self._ended.readline())
            return self._status

    def send_signal(self, number: int) -> None:
        if self._status is None and not select.select([self._server], [], [], 0)[0]:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self) -> None:
        self.wait()
        for stream in (self.stdin, self.stdout):
            with contextlib.suppress(BrokenPipeError):
                stream.close()


def fork_checkers() -> None:
    """Let verify, called in this process, fork the processes that check files, but for those of the second engine."""
    from pqcache.store import verify

    def popen(words: list[str], **how: Any) -> Any:
        return subprocess.Popen(words, **how) if "fastparquet" in words else _ForkedChecker(words, **how)

    verify.subprocess = SimpleNamespace(Popen=popen, PIPE=subprocess.PIPE)  # type: ignore[assignment]


def _send(server: socket.socket, job: bytes, streams: list[int]) -> None:
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", streams))
    server.sendmsg([len(job).to_bytes(8, "big")], [rights])
    server.sendall(job)


def _receive(client: socket.socket) -> tuple[list[str], str, dict[str, str], list[int]]:
    size, [(_, _, rights)], _, _ = client.recvmsg(8, socket.CMSG_SPACE(3 * 4))
    streams = array.array("i")
    streams.frombytes(rights)
    left, data = int.from_bytes(size, "big"), b""
    while len(data) < left:
        data += client.recv(left - len(data))
    words, directory, environment = json.loads(data)
    return words, directory, environment, list(streams)


def import_pqcache() -> None:
    """Import all modules but those of torch, as the command line begins: with torch, a fork takes twice as long.

    The parser of the command line is made once, for all forks.
    """
    import typer.main

    from pqcache.system.processes import collect_garbage_rarely, hide_pandas, limit_blas_threads

    hide_pandas()
    limit_blas_threads()
    collect_garbage_rarely()
    typer.main.get_command = functools.cache(typer.main.get_command)
    for path in (ROOT / "pqcache").rglob("*.py"):  # pkgutil.walk_packages imports every package, also pqcache.torch
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        if not name.startswith(("pqcache.torch", "pqcache.__main__")):
            with contextlib.suppress(ImportError):
                importlib.import_module(name)


def _import_all() -> None:
    short_waits.install()
    import_pqcache()
    import pqcache.cli

    for module in _LATE:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        pqcache.cli.run(["gc", os.devnull, "--dry-run"])  # what the parser imports late
    with contextlib.suppress(ImportError, pqcache.PqcacheError):
        from pqcache.store.drivers.s3 import S3Source

        S3Source("s3://bucket", {"endpoint": "http://127.0.0.1:1", "key": "k", "secret": "s"}).close()  # reads its data


def _serve(listener: socket.socket) -> list[str]:
    """Fork for everyone who asks; return in the children alone, with the words of the command line."""
    ended, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    clients: dict[int, socket.socket] = {}  # by the process that runs for it
    while True:
        ready, _, _ = select.select([listener, sys.stdin, ended], [], [])
        if sys.stdin in ready:
            os._exit(0)
        if ended in ready:
            os.read(ended, 100)
            _report(clients)
        if listener not in ready:
            continue
        client, _ = listener.accept()
        words, directory, environment, streams = _receive(client)
        child = os.fork()
        if not child:
            break
        for stream in streams:
            os.close(stream)
        client.sendall(b"%d\n" % child)
        clients[child] = client
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for opened in (client, *clients.values()):
        opened.close()
    os.close(ended)
    os.close(wake)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    return words


def _report(clients: dict[int, socket.socket]) -> None:
    """Say to those whose processes have ended how they did."""
    while clients:
        child, status = os.waitpid(-1, os.WNOHANG)
        if not child:
            return
        with clients.pop(child) as client, contextlib.suppress(OSError):
            client.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))


def _check_files() -> NoReturn:
    from pqcache.store import file_checks

    os.setsid()
    code = 1
    try:
        file_checks.main()
        code = 0
    except BaseException:  # noqa: BLE001  as the interpreter does
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(code)


def _run() -> NoReturn:
    """Do what the interpreter does, but for taking all modules apart, which takes longer than most commands."""
    from pqcache.__main__ import main

    try:
        main()
    except SystemExit as end:
        code = end.code
    except BaseException:  # noqa: BLE001  as the interpreter does
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code if isinstance(code, int) else code is not None)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(sys.argv[1])
        listening.listen(16)
        if sys.argv[2] == "pqcache":
            _import_all()
        else:
            importlib.import_module("pqcache.store.file_checks")
        gc.freeze()  # what is there is not looked at again, and so not copied, by the children
        print("ready", flush=True)
        run = _run if sys.argv[2] == "pqcache" else _check_files
        sys.argv[1:] = _serve(listening)
    run()
