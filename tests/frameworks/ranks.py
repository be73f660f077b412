"""Runs a training script under torchrun and returns what each rank noted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.test_docs import environment


def run_ranks(script: Path, directory: Path, ranks: int, **options: Any) -> list[dict[str, Any]]:
    """Run ``script OPTIONS.json`` in so many processes under torchrun; return what each wrote, in order of ranks.

    The script reads its options from that file, ``out`` among them, and writes ``OUT/rank-N.json``; see ``note``.
    """
    out = directory / "out"
    out.mkdir(parents=True, exist_ok=True)
    for old in out.iterdir():
        old.unlink()
    (directory / "options.json").write_text(json.dumps({**options, "out": str(out)}, default=str))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    command += [f"--nproc-per-node={ranks}", str(script), str(directory / "options.json")]
    env = {**environment(), "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, cwd=directory, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    return [json.loads((out / f"rank-{rank}.json").read_text()) for rank in range(ranks)]


def note(options: dict[str, Any], rank: int, found: dict[str, Any]) -> None:
    """Write what a rank found, from within a script."""
    (Path(options["out"]) / f"rank-{rank}.json").write_text(json.dumps(found))
