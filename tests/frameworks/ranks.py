"""Runs a training script under torchrun and returns what each rank noted."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pqcache.errors import UsageError
from tests.scripts import LOCAL_RANKS, run_under_torchrun
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
    words = [str(script), str(directory / "options.json")]
    done = run_under_torchrun(words, ranks, directory, environment(), timeout=280)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    return [json.loads((out / f"rank-{rank}.json").read_text()) for rank in range(ranks)]


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
