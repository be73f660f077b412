"""Runs Python programs in processes forked from one that has torch loaded: importing it takes longer than they do."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

_FORKS = multiprocessing.get_context("forkserver")
# once for the process of the tests: its forkserver is one, and starts when it is first used
_FORKS.set_forkserver_preload(["pqcache.torch", "pyarrow.dataset", "pyarrow.parquet", "torch", "torch.utils.data"])


def run_script(
    script: Path, *words: str, cwd: Path, env: Mapping[str, str], timeout: float = 300
) -> subprocess.CompletedProcess[str]:
    """Run a program as `python script words...` would, in ``cwd`` with this environment; return what it printed."""
    outputs = [cwd / f".{script.stem}.{name}" for name in ("out", "err")]
    command = [str(script), *words]
    process = _FORKS.Process(target=_run, args=(command, str(cwd), dict(env), list(map(str, outputs))))
    process.start()
    process.join(timeout)
    if process.exitcode is None:
        process.kill()
        process.join()
    printed = [path.read_text() if path.exists() else "" for path in outputs]
    for path in outputs:
        path.unlink(missing_ok=True)
    if process.exitcode == -9:
        raise subprocess.TimeoutExpired(command, timeout, *printed)
    return subprocess.CompletedProcess(command, process.exitcode or 0, *printed)


def _run(command: Sequence[str], cwd: str, env: Mapping[str, str], outputs: Sequence[str]) -> None:
    for number, path in enumerate(outputs, 1):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = list(command)
    sys.path.insert(0, os.path.dirname(command[0]))
    runpy.run_path(command[0], run_name="__main__")
