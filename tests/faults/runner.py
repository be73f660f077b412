"""The test's side of ``child.py``: one run of pqcache under an instrument, and what came of it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests import ROOT


@dataclass(frozen=True)
class RunResult:
    """How a run ended; ``code`` is negative for a signal."""

    code: int
    stdout: str
    stderr: str
    out: Path

    @property
    def points(self) -> list[str]:
        """The points that the run passed, under the instrument ``count``."""
        return (self.out / "points").read_text().splitlines()

    @property
    def read(self) -> Mapping[str, int]:
        """Bytes that really came from a local source, by path."""
        found: Mapping[str, int] = json.loads((self.out / "read").read_text())
        return found

    @property
    def order(self) -> Mapping[str, list[str]]:
        """What the instrument ``order`` found and saw."""
        found: Mapping[str, list[str]] = json.loads((self.out / "order").read_text())
        return found


class Runner:
    """Runs pqcache in children of one warm process; for local sources."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )

    def run(
        self, cache: Path, *arguments: object, instrument: Mapping[str, Any] | None = None, **more: Any
    ) -> RunResult:
        """Run one command; ``cache`` is the directory whose operations count as points."""
        job = {
            "arguments": list(map(str, arguments)),
            "cache": str(cache),
            "instrument": instrument or {"kind": "none"},
            "out": str(self._directory),
            **more,
        }
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the process that forks has ended"
        out, err = ((self._directory / name).read_text() for name in ("stdout", "stderr"))
        code = json.loads(answer)
        assert code != 99, err
        return RunResult(code, out, err, self._directory)

    def close(self) -> None:
        """End the process that forks: by an empty line, as forked workers that still live hold its pipe open."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
