"""An error is one line, coloured on a terminal only."""

from __future__ import annotations

import json
import os
import pty
import re

import pytest

from pqcache.console import terminal
from pqcache.console.terminal import name_lines
from pqcache.errors import SourceDenied, UsageError


def test_an_error_is_one_line_and_an_event(capsys: pytest.CaptureFixture[str]) -> None:
    error = SourceDenied("s3://lake/x", "access\ndenied", "check the credentials")
    name_lines("")
    terminal.print_error(error, json_lines=True)
    printed = capsys.readouterr()
    assert printed.err == "pqcache: error: s3://lake/x: access denied; check the credentials\n"
    event = json.loads(printed.out)
    assert (event["event"], event["kind"], event["exit_code"]) == ("error", "SourceDenied", 1)
    assert [event[name] for name in ("subject", "reason", "advice")] == [error.subject, error.reason, error.advice]


@pytest.mark.parametrize(("variables", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)])
def test_an_error_has_a_colour_on_a_terminal(
    variables: dict[str, str], coloured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in {"TERM": "xterm", **variables}.items():
        monkeypatch.setenv(name, value)
    reader, writer = pty.openpty()
    with open(writer, "w") as stderr:
        monkeypatch.setattr("sys.stderr", stderr)
        terminal.print_error(UsageError("--jobs", "0 is too small"), json_lines=False)
        text = os.read(reader, 1000).decode()
    os.close(reader)
    assert ("\x1b[1;31m" in text) is coloured
    assert re.sub(r"\x1b\[[\d;]*m", "", text).strip() == "pqcache: error: --jobs: 0 is too small"
