"""Runs Python programs in processes forked from one that has torch loaded: importing it takes longer than they do."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_FORKS = multiprocessing.get_context("forkserver")
# once for the process of the tests: its forkserver is one, and starts when it is first used
_PRELOADED = ["pqcache.torch", "pyarrow.dataset", "pyarrow.parquet", "torch", "torch._dynamo", "torch.utils.data"]
_FORKS.set_forkserver_preload(_PRELOADED)


# ranks find one another on this machine alone
LOCAL_RANKS = {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}


def run_script(
    script: Path, *words: str, cwd: Path, env: Mapping[str, str], timeout: float = 300
) -> subprocess.CompletedProcess[str]:
    """Run a program as `python script words...` would, in ``cwd`` with this environment; return what it printed."""
    command = [str(script), *words]
    with tempfile.TemporaryDirectory() as directory:
        outputs = [Path(directory, name) for name in ("out", "err")]
        process = _FORKS.Process(target=_run, args=(command, str(cwd), dict(env), list(map(str, outputs))))
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            process.join()
        printed = [path.read_text() if path.exists() else "" for path in outputs]
    if process.exitcode == -9:
        raise subprocess.TimeoutExpired(command, timeout, *printed)
    return subprocess.CompletedProcess(command, process.exitcode or 0, *printed)


def run_ranks(
    script: Path, *words: str, ranks: int, cwd: Path, env: Mapping[str, str]
) -> list[subprocess.CompletedProcess[str]]:
    """Run a program in so many processes at once, in the environment that torchrun gives them."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    common = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "GROUP_RANK": 0, "MASTER_ADDR": "127.0.0.1"}
    common |= {"MASTER_PORT": port, "OMP_NUM_THREADS": 1, "TORCHELASTIC_RUN_ID": "none"}

    def run(rank: int) -> subprocess.CompletedProcess[str]:
        own = {name: str(value) for name, value in {**common, "RANK": rank, "LOCAL_RANK": rank}.items()}
        return run_script(script, *words, cwd=cwd, env={**env, **own})

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(run, range(ranks)))


def run_under_torchrun(
    words: Sequence[str], ranks: int, cwd: Path, env: Mapping[str, str], timeout: float = 300
) -> subprocess.CompletedProcess[str]:
    """Run a script in so many processes; again where it was torch's own threads that aborted one as it ended.

    Those of gloo outlive ``destroy_process_group``, and one that is late to let go of a tensor finds Python ending,
    which aborts the process (pytorch's issue 38228; with these threads slowed, 5 of 48 processes that did nothing but
    train a DistributedDataParallel model).
    """
    launcher = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={ranks}"]
    for _ in range(2):
        command = [sys.executable, *launcher, *words]
        done = subprocess.run(
            command, cwd=cwd, env={**env, **LOCAL_RANKS}, capture_output=True, text=True, timeout=timeout
        )
        if done.returncode == 0 or "terminate called without an active exception" not in done.stderr:
            break
        (cwd / "ddp.json").unlink(missing_ok=True)  # the state from which train_ddp.py would go on
    return done


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
