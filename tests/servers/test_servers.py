"""The test servers are real: what they store can be read back, and what must be refused is refused."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests import ROOT
from tests.servers.processes import Daemon

if TYPE_CHECKING:
    pass


@pytest.mark.hdfs
def test_one_worker_runs_all_tests_of_a_server(request: pytest.FixtureRequest) -> None:
    """The scheduler of xdist reads the group from the end of the id; without it each worker starts a server."""
    if request.config.getoption("loadgroup", False):
        assert request.node.nodeid.endswith("@hdfs")


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="setpriv is missing")
def test_a_daemon_dies_with_a_parent_killed_hard(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from tests.servers.processes import Daemon\n"
        "directory = Path(sys.argv[1]); script = directory / 'idle.py'\n"
        "script.write_text('import time; time.sleep(60)')\n"
        "daemon = Daemon('idle', [sys.executable, str(script)], directory)\n"
        "daemon.start(); print(daemon.pid, flush=True); time.sleep(60)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert _runs(pid)
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    deadline = time.monotonic() + 10
    while _runs(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not _runs(pid)


def test_no_signal_goes_to_a_process_that_was_not_started_here(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as stranger:
        daemon = Daemon("idle", [], tmp_path)
        daemon._process = stranger  # as if the process id had been taken over
        daemon.send(signal.SIGKILL)
        time.sleep(0.1)
        assert stranger.poll() is None
        stranger.kill()


def _runs(pid: int) -> bool:
    """Whether the process is there; one that has ended but was not waited for yet is not."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False
