"""Names from files and stores cannot control the terminal, whatever prints them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pqcache.cli import run
from pqcache.units import printable, printable_json

NAME = "a\x1b]0;owned\x07\x9b31m\x7f\u202eb\n[bold]c"
SHOWN = "a%1B]0;owned%07%C2%9B31m%7F%E2%80%AEb%0A[bold]c"
FORBIDDEN = ("\x1b", "\x07", "\x9b", "\x7f", "\u202e")


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache, made of a file whose column names and values would control a terminal."""
    monkeypatch.setenv("COLUMNS", "200")  # names are not cut
    lake = tmp_path / "lake"
    lake.mkdir()
    table = pa.table({NAME: pa.array([[1, 2]] * 20), "text": [NAME] * 20})
    pq.write_table(table.replace_schema_metadata({}), lake / "a.parquet")
    assert run(["sync", str(lake), str(tmp_path / "cache"), "-q"]) == 0
    return tmp_path / "cache"


def outputs(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    run(list(arguments))
    found = capsys.readouterr()
    text = found.out + found.err
    for character in FORBIDDEN:
        assert character not in text, (arguments, character)
    return text


def test_no_command_prints_what_controls_a_terminal(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    cache = str(data)
    assert SHOWN in outputs(capsys, "inspect", cache)
    assert SHOWN in outputs(capsys, "inspect", cache, "--columns")
    assert SHOWN in outputs(capsys, "inspect", cache, "--schema")
    assert SHOWN.replace("%0A", " ") in outputs(capsys, "inspect", cache, "--sample", "1")
    assert SHOWN[:20] in outputs(capsys, "index", cache, "--key", NAME)  # an error: of a list there is none
    assert SHOWN[:20] in outputs(capsys, "repartition", cache, "--dense", "?")
    assert "%1B" in outputs(capsys, "inspect", f"{cache}/{NAME}")
    outputs(capsys, "log", cache)
    outputs(capsys, "sync", cache, "--where", f'"{NAME}" > 1')


def test_a_log_line_stays_one_line(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lake, cache, root = data.with_name("lake"), data.with_name(NAME), data.parent
    capsys.readouterr()
    for words in (
        ("sync", lake, cache),
        ("gc", cache),
        ("sync", "--all", root),
        ("sync", data.with_name("nowhere"), cache, "--new-source"),
    ):
        text = outputs(capsys, *map(str, words))
        assert SHOWN in text
        for line in text.splitlines():
            assert re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ \S+: ", line), (words, line)
    assert "cannot be the name of a cache" in outputs(capsys, "add", str(lake), f"{NAME}x", "--root", str(root))


def test_json_holds_the_names_as_they_are(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    text = outputs(capsys, "inspect", str(data), "--schema", "--json")
    assert json.loads(text.splitlines()[0])["name"] == NAME
    lines = outputs(capsys, "index", str(data), "--key", NAME, "--json").splitlines()
    assert NAME in json.loads(next(line for line in lines if line.startswith("{")))["message"]


def test_texts_are_escaped() -> None:
    assert printable(NAME) == SHOWN
    assert printable("an item, 50% of é") == "an item, 50% of é"
    assert printable("\udc80") == "\\udc80"
    for value in (NAME, "\udc80", "é\\u", {NAME: [NAME]}):
        assert json.loads(printable_json(json.dumps(value, ensure_ascii=False))) == value
