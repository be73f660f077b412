"""A run of xdist ends where a worker dies and leaves processes that it has forked."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CONFTEST = """
from tests.worker_pipes import keep_pipes_from_forks

def pytest_configure(config):
    if hasattr(config, "workerinput"):
        keep_pipes_from_forks()
"""
DIES = """
import os, signal, time

def test_that_dies():
    child = os.fork()
    if not child:
        time.sleep(600)
        os._exit(0)
    with open("child", "w") as file:
        file.write(str(child))
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc")
def test_a_run_ends_where_a_worker_dies(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_dies.py").write_text(DIES)
    words = ["-q", "-n", "1", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), "test_dies.py"]
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *words],
            cwd=tmp_path,
            env={**env, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=90,
            check=False,
        )
        assert done.returncode == 1
    finally:
        with suppress(OSError, ValueError):
            os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)
