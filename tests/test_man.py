"""The manual pages have every option of the command line and no other, and mandoc finds nothing to warn of."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer

from pqcache.console.app import Command, CommandGroup
from pqcache.console.commands import app
from pqcache.store.config import Config
from tests import ROOT
from tests.forked_commands import run_pqcache

MAN = ROOT / "man" / "man1"
PAGES = sorted((ROOT / "man").glob("man?/*"))
SECTIONS = ["NAME", "SYNOPSIS", "DESCRIPTION", "OPTIONS", "ENVIRONMENT", "FILES"]
SECTIONS += ["EXIT STATUS", "EXAMPLES", "SEE ALSO"]  # in mandoc's order
GROUP: Any = typer.main.get_command(app)
COMMANDS = {"pqcache": GROUP} | {f"pqcache-{name}": command for name, command in GROUP.commands.items()}


def test_pages_are_as_they_would_be_written() -> None:
    done = subprocess.run([sys.executable, ROOT / "tools" / "man.py", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}write them with: make docs"


def test_every_option_is_in_its_page_and_in_the_help() -> None:
    for name, command in COMMANDS.items():
        page = (MAN / f"{name}.1").read_text()
        section = page.partition("\n.Sh OPTIONS\n")[2].partition("\n.Sh ")[0]
        items = re.findall(r"^\.It (Fl .*)$", section, re.MULTILINE)
        found = {name for line in items for name in re.findall(r"\bFl (-?[a-z][a-z0-9-]*)", line)}
        context = command.make_context("pqcache", ["-h"], resilient_parsing=True, help_option_names=["-h", "--help"])
        text = command.get_help(context)
        for parameter in command.get_params(context):
            if parameter.param_type_name == "option":
                names = [*parameter.opts, *parameter.secondary_opts]
                assert found.issuperset(n[1:] for n in names), (name, names)
                assert all(re.search(rf"(^|[ ,]){n}\b", text, re.M) for n in names), (name, names)


def test_help_fits_80_columns_and_has_groups_and_examples() -> None:
    for name, command in COMMANDS.items():
        words = name.split("-")[1:]
        done = run_pqcache(*words, "--help", env={**os.environ, "COLUMNS": "80"})
        assert done.returncode == 0, done.stderr
        assert max(map(len, done.stdout.splitlines())) <= 80, name
        assert "\nExamples:\n" in done.stdout, name
        assert not re.search(r"<\w+|[{}]", done.stdout.partition("\nExamples:")[0]), "types as click writes them"
        assert isinstance(command, Command | CommandGroup), f"{name}: give app.command() cls=Command"
        if len(command.params) > 6:
            assert all(p.rich_help_panel for p in command.params if p.param_type_name == "option"), name


def test_pages_say_where_the_fields_of_json_are() -> None:
    for name, command in COMMANDS.items():
        if any("--json" in parameter.opts for parameter in command.params):
            text = (MAN / f"{name}.1").read_text().partition("\n.It Fl -json\n")[2].partition("\n.It ")[0]
            assert re.search(r"^\.Dq (JSON output|Operating many caches)$", text, re.MULTILINE), name


def test_the_page_of_the_config_has_every_key() -> None:
    text = (ROOT / "man" / "man5" / "pqcache.toml.5").read_text()
    keys = {key.strip() for line in re.findall(r"^\.It Cm (.*)$", text, re.M) for key in line.split(",")}
    assert keys == {field.name for field in fields(Config)} | {"format"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_sections(page: Path) -> None:
    found = re.findall(r"^\.Sh (.*)$", page.read_text(), re.MULTILINE)
    assert found == [title for title in SECTIONS if title in found]
    assert page.suffix == ".5" or found == SECTIONS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_pages_refer_to_pages_that_are_there(page: Path) -> None:
    for name, section in re.findall(r"^\.Xr (pqcache\S*) (\d)", page.read_text(), re.MULTILINE):
        assert (ROOT / "man" / f"man{section}" / f"{name}.{section}").exists(), name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_mandoc_has_nothing_to_warn_of(page: Path) -> None:
    mandoc = shutil.which("mandoc")
    if mandoc is None:
        pytest.skip("NOT CHECKED: mandoc is not installed (Debian package mandoc)")
    result = subprocess.run([mandoc, "-T", "lint", page], capture_output=True, text=True)
    known = ("referenced manual not found", "mandoc.db")  # pages that are not installed on this machine
    said = (result.stdout + result.stderr).splitlines()
    assert [line for line in said if not any(text in line for text in known)] == []
