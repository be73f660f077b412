"""Runs scenes of a framework on ranks that are forked from one process, which has imported it: imports take longest."""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pqcache.errors import UsageError
from tests.scripts import LOCAL_RANKS
from tests.test_docs import environment

Found = list[dict[str, Any]]  # by rank, then by scene


def run_scenes(module: str, directory: Path, before: list[str], after: list[str], **options: Any) -> dict[int, Found]:
    """Run the methods ``before`` of the module's Scenes, and in new processes those ``after``, on 1 rank and on 2.

    Returns what the ranks found, by their number. Ranks are started with the environment that torchrun gives them; one
    that is alone, with none.
    """
    runs = [(ranks, scenes) for ranks in (1, 2) for scenes in (before, after)]
    outs = [directory / f"out-{number}" for number in range(len(runs))]
    for out, (ranks, scenes) in zip(outs, runs, strict=True):
        out.mkdir()
        said = {**options, "ranks": ranks, "scenes": scenes, "out": out, "state": directory / f"state-{ranks}"}
        (out / "options.json").write_text(json.dumps(said, default=str))
    run_python(["-m", "tests.frameworks.forked_ranks", module, *map(str, outs)], directory)
    found: dict[int, Found] = {1: [{}], 2: [{}, {}]}
    for out, (ranks, _) in zip(outs, runs, strict=True):
        for rank in range(ranks):
            found[ranks][rank].update(json.loads((out / f"rank-{rank}.json").read_text()))
    return found


def fork_ranks(ranks: int, play: Callable[[int], None]) -> bool:
    """Call ``play(rank)`` in so many forked processes; return whether all of them ended well.

    They have the environment that torchrun gives its processes; one that is alone, nothing of it.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    running = {_fork(play, rank, ranks, port) for rank in range(ranks)}
    while running:
        pid, status = os.wait()
        running.discard(pid)
        if status:  # the others may wait for it forever
            for other in running:
                os.kill(other, signal.SIGKILL)
            return False
    return True


def _fork(play: Callable[[int], None], rank: int, ranks: int, port: int) -> int:
    """Return the process id of a forked rank."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        if ranks > 1:
            of_torchrun = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
            of_torchrun |= {"GROUP_RANK": 0, "MASTER_PORT": port}
            os.environ.update({name: str(value) for name, value in of_torchrun.items()}, TORCHELASTIC_RUN_ID="test")
        play(rank)
        code = 0
    finally:
        if code:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run(module: Any, out: Path) -> bool:
    """Run the scenes of one directory on forked ranks; return whether all of them ended well."""
    options = json.loads((out / "options.json").read_text())

    def play(rank: int) -> None:
        scenes = module.Scenes(options)
        note(options, rank, {name: getattr(scenes, name)() for name in options["scenes"]})

    return fork_ranks(options["ranks"], play)


def run_python(words: list[str], directory: Path, timeout: float = 500) -> None:
    """Run ``python WORDS...`` in a directory, so that its ranks find one another on this machine alone."""
    env = {**environment(), **LOCAL_RANKS}
    command = [sys.executable, *words]
    done = subprocess.run(command, cwd=directory, env=env, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}"


def refusal(read: Callable[[], object]) -> str:
    """Return what is said where reading raises UsageError, else an empty text; from within a script."""
    try:
        read()
    except UsageError as error:
        return str(error)
    return ""


def note(options: dict[str, Any], rank: int, found: dict[str, Any]) -> None:
    """Write what a rank found, from within a script."""
    (Path(options["out"]) / f"rank-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    played = importlib.import_module(sys.argv[1])
    sys.exit(not all(_run(played, Path(out)) for out in sys.argv[2:]))
