"""pqcache serve at a shell: its lines, its end by a signal, and what it refuses."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import pqcache
from tests.datasets import rows_of, write_shop
from tests.forked_commands import run_pqcache
from tests.store.serve.serving import TOKEN


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    pqcache.sync(write_shop(tmp_path / "lake", files=1, rows=20), tmp_path / "shop")
    return tmp_path / "shop"


@pytest.fixture
def token(tmp_path: Path) -> Path:
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "token").chmod(0o600)
    return tmp_path / "token"


@contextmanager
def running(*words: object) -> Iterator[subprocess.Popen[str]]:
    """Run ``pqcache serve words...``."""
    command = [sys.executable, "-m", "pqcache", "serve", *map(str, words)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.deep)])
def test_a_server_that_is_ended(number: signal.Signals, shop: Path, token: Path, tmp_path: Path) -> None:
    with running(shop, "--port", 0, "--token-file", token) as server:
        assert server.stdout is not None
        line = server.stdout.readline()
        match = re.fullmatch(r"serving (pqcache\+http://127\.0\.0\.1:\d+/shop) \(with a token\)\n", line)
        assert match
        environment = {**os.environ, "PQCACHE_TOKEN": TOKEN}
        for _ in range(2):
            done = run_pqcache("sync", match[1], tmp_path / "copy", env=environment)
            assert (done.returncode, done.stderr) == (0, "")
        done = run_pqcache("sync", tmp_path / "copy")
        assert done.returncode == 1
        assert "the token is missing or wrong; give the server's token with -o token_file=FILE" in done.stderr
        assert rows_of(tmp_path / "copy" / "current") == rows_of(shop / "current")
        server.send_signal(number)
        out, err = server.communicate(timeout=30)
        assert (server.returncode, err) == (0, "")
        assert re.fullmatch(r"served \d+ requests, [\d.]+ KB in .*\n", out)
