"""What is shown of a run: the bar of a first copy that is read while it arrives, and lines where no terminal is."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import time
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pqcache.console import terminal
from pqcache.events import Advanced, Fetched, Reused, Started
from tests.waiting import becomes_true


def test_how_fast_and_how_long() -> None:
    meter = terminal.PhaseMeter(Started("fetch", 100 << 20, files=4), now=0.0)
    assert meter.amount(0.5) == "0 B of 100 MB, 0 of 4 files"
    for second in range(1, 11):
        meter.advance(5 << 20, float(second))
    meter.files_done = 2
    assert meter.amount(10.0) == "50 MB of 100 MB, 2 of 4 files, 5 MB/s, 10.0 s left"
    for second in range(11, 41):
        meter.advance(1 << 20, float(second))  # slower now: the rate is that of the last seconds
    assert meter.amount(40.0).endswith("1 MB/s, 20.0 s left")
    meter.advance(-(1 << 20), 40.5)  # a file is fetched again
    assert meter.done == 79 << 20
    reading = terminal.PhaseMeter(Started("read", 300, "files"), now=0.0)
    reading.advance(100, 2.0)
    assert (reading.text, reading.amount(2.0)) == (
        "reading footers",
        "100 of 300 files, 50 files/s, 4.0 s left",
    )


def test_a_narrow_terminal_shows_rate_and_time_left(tmp_path: Path) -> None:
    """66 columns are as short for these few files as 80 are for many."""
    lake = tmp_path / "lake"
    lake.mkdir()
    for number in range(12):
        pq.write_table(pa.table({"x": [os.urandom(40_000)]}), lake / f"{number}.parquet", compression="none")
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 66, 0, 0))
    command = [sys.executable, "-m", "pqcache", "sync", lake, tmp_path / "cache", "--bwlimit", "200KB", "-j", "1"]
    environment = {**os.environ, "TERM": "xterm", "LC_ALL": "C.UTF-8"}
    environment.pop("COLUMNS", None)
    said = b""
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as process:
        os.close(theirs)
        with suppress(OSError):  # which ends what a terminal gives
            while part := os.read(ours, 10_000):
                said += part
    os.close(ours)
    assert process.returncode == 0
    assert re.search(r"KB/s, \d.* s left", said.decode()), said.decode()


def test_lines_come_from_the_first_minute_on_whatever_happens(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(terminal, "LINE_SECONDS", 0.01)
    lines: list[str] = []

    def has(text: str) -> bool:
        lines.extend(capsys.readouterr().err.splitlines())
        return any(text in line for line in lines)

    with terminal.reporter(json_lines=False, quiet=False, about="caches/shop") as on_event:
        assert becomes_true(lambda: has("at work for "))  # before anything is reported
        on_event(Started("list", 0, "files"))
        on_event(Advanced("list", 2000))
        assert becomes_true(lambda: has("listing: 2,000 files"))
        on_event(Reused(8 << 20, 40 << 20))
        assert has("resuming: 8 MB of 40 MB are already here")
        on_event(Started("fetch", 32 << 20, files=4))
        on_event(Started("rewrite", 40 << 20))
        on_event(Advanced("fetch", 8 << 20))
        on_event(Fetched("a", 8 << 20, 1.0))
        assert becomes_true(lambda: has("fetching: 8 MB of 32 MB, 1 of 4 files; rewriting: 0 B of 40 MB"))
    assert all(re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ shop: ", line) for line in lines), lines
    capsys.readouterr()
    time.sleep(0.05)
    assert capsys.readouterr().err == "", "the run has ended"
