"""Processes that end with us: what the HDFS and the S3 test server have in common."""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path


class ServerUnavailable(RuntimeError):
    """A test server cannot run here: a program is missing, or it did not come up."""


def find_program(name: str, package: str) -> str:
    """The path of a program, or ServerUnavailable naming the Debian package that has it."""
    path = shutil.which(name)
    if path is None:
        raise ServerUnavailable(
            f"the program {name} is missing (Debian package {package}); run: python -m tests.servers.install"
        )
    return path


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that nobody listens on.

    They come from below the range (32768 and up) from which Linux takes the local ports of outgoing
    connections: one of those could otherwise take the port before the server gets to bind it.
    """
    with contextlib.ExitStack() as held:
        ports: list[int] = []
        while len(ports) < count:
            trial = held.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                trial.bind(("127.0.0.1", random.randrange(12_000, 32_000)))
                ports.append(trial.getsockname()[1])
        return ports


def new_directory(parent: Path, prefix: str) -> Path:
    """A new, empty directory below `parent`, so that nothing an earlier, killed run left is in the way."""
    parent = parent.resolve()
    if not re.fullmatch(r"[\w/.+@-]+", str(parent)):
        # It ends up in a Java class path, in lists separated by commas, and in ceph.conf.
        raise ValueError(f"{parent}: use a directory of letters, digits and /._+@- only")
    parent.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix=prefix, dir=parent))


def run_tool(argv: Sequence[str | Path], directory: Path, timeout: float = 60) -> None:
    """Run a command to its end; ServerUnavailable with the end of its output unless it succeeds."""
    try:
        done = subprocess.run(
            [*_end_with_parent(), *map(str, argv)],
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout,
            env=_environment(),
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ServerUnavailable(f"{Path(argv[0]).name} did not end within {timeout:.0f} s") from None
    if done.returncode:
        output = done.stdout.decode(errors="replace")[-2000:]
        raise ServerUnavailable(f"{Path(argv[0]).name} failed with status {done.returncode}:\n{output}")


def wait_until(ready: Callable[[], bool], daemons: Sequence[Daemon], timeout: float) -> None:
    """Ask `ready` until it says yes; OSError counts as no. A daemon that has ended fails at once."""
    deadline = time.monotonic() + timeout
    while True:
        with contextlib.suppress(OSError):
            if ready():
                return
        for daemon in daemons:
            if not daemon.alive:
                raise ServerUnavailable(f"{daemon.name} ended while starting:\n{daemon.log_tail()}")
        if time.monotonic() > deadline:
            tails = "\n".join(f"{daemon.name}:\n{daemon.log_tail()}" for daemon in daemons)
            raise ServerUnavailable(f"not ready after {timeout:.0f} s\n{tails}")
        time.sleep(0.05)


@dataclass
class Daemon:
    """One server process: started, paused and killed by us, and by nobody's mistake another one instead."""

    name: str
    argv: Sequence[str]
    directory: Path  # it runs there, logs there, and has this path in its command line
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def log(self) -> Path:
        return self.directory / f"{self.name}.log"

    @property
    def pid(self) -> int:
        """The process id; 0 while it does not run."""
        return self._process.pid if self._process is not None and self._process.poll() is None else 0

    @property
    def alive(self) -> bool:
        return self.pid != 0

    def log_tail(self, characters: int = 2000) -> str:
        return self.log.read_text(errors="replace")[-characters:] if self.log.exists() else "(no log)"

    def start(self) -> None:
        """Start it. Its output goes to the log; Ctrl-C at the terminal does not reach it."""
        if threading.current_thread() is not threading.main_thread():
            # The kernel's death signal follows the thread that started the process, not the whole process.
            raise RuntimeError("start test servers from the main thread")
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*_end_with_parent(), *self.argv],
                cwd=self.directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=_environment(),
                start_new_session=True,
            )
        # Only once setpriv has made way for the program is the death signal sure to be set. (In the middle of
        # that, the command line is empty.)
        while self.alive and _command_line(self.pid).partition(b"\0")[0] in (b"", b"setpriv"):
            time.sleep(0.001)

    def start_and_wait(self, ready: Callable[[], bool], timeout: float) -> None:
        """Start it and wait until it is `ready`; it is ended where that fails."""
        try:
            self.start()
            wait_until(ready, [self], timeout)
        except BaseException:
            self.kill()
            raise

    def send(self, signum: signal.Signals) -> None:
        """Send a signal, after a look at the command line: the process must be the one started here."""
        pid = self.pid
        if os.fsencode(self.directory) in _command_line(pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)

    def kill(self) -> None:
        """End it at once (what it stored is thrown away anyway) and wait until it is gone."""
        self.send(signal.SIGKILL)
        if self._process is not None:
            self._process.wait(timeout=30)


def _command_line(pid: int) -> bytes:
    """A process's words, each ended by a zero byte; empty when it does not run."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def _end_with_parent() -> list[str]:
    """A prefix for a command that has the kernel kill it when the thread that starts it ends."""
    return ["setpriv", "--pdeathsig", "KILL", "--"] if shutil.which("setpriv") else []


def _environment() -> dict[str, str]:
    """Our environment without the settings by which a user's Hadoop or Ceph would get into ours."""
    return {k: v for k, v in os.environ.items() if not k.startswith(("HADOOP_", "HDFS_", "CEPH_"))}
