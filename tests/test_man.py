"""The manual pages have every option of the command line and no other, and mandoc finds nothing to warn of."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer

from pqcache.cli import app

MAN = Path(__file__).resolve().parent.parent / "man"
PAGES = sorted(MAN.glob("*.1"))
SECTIONS = [
    "NAME",
    "SYNOPSIS",
    "DESCRIPTION",
    "OPTIONS",
    "ENVIRONMENT",
    "FILES",
    "EXIT STATUS",
    "EXAMPLES",
    "SEE ALSO",
]  # in mandoc's order
GROUP: Any = typer.main.get_command(app)
COMMANDS = {"pqcache": GROUP} | {f"pqcache-{name}": command for name, command in GROUP.commands.items()}


def options_of(command: Any) -> dict[str, frozenset[str]]:
    """Return a command's options, each by its long name with all the names it has."""
    context = command.make_context("pqcache", [], resilient_parsing=True, help_option_names=["-h", "--help"])
    found = {}
    for parameter in command.get_params(context):
        names = frozenset(name for name in (*parameter.opts, *parameter.secondary_opts) if name.startswith("-"))
        if names:
            found[max(names, key=len)] = names
    return found


def documented(page: Path) -> dict[str, frozenset[str]]:
    """Return the options in a page's OPTIONS section in the same form."""
    section = page.read_text().partition("\n.Sh OPTIONS\n")[2].partition("\n.Sh ")[0]
    found = {}
    for line in re.findall(r"^\.It (Fl .*)$", section, re.MULTILINE):
        names = frozenset("-" + name for name in re.findall(r"\bFl (-?[a-z][a-z0-9-]*)", line))
        found[max(names, key=len)] = names
    return found


def test_every_command_has_its_page() -> None:
    assert sorted(page.stem for page in PAGES) == sorted(COMMANDS)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_options_are_those_of_the_command(page: Path) -> None:
    assert documented(page) == options_of(COMMANDS[page.stem])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_defaults_are_those_of_the_command(page: Path) -> None:
    section = page.read_text().partition("\n.Sh OPTIONS\n")[2].partition("\n.Sh ")[0]
    for parameter in COMMANDS[page.stem].params:
        name = max(parameter.opts, key=len)
        if not name.startswith("--") or not isinstance(parameter.default, int | float | str):
            continue
        if parameter.default and not isinstance(parameter.default, bool) and parameter.default != "0s":
            entry = re.split(r"^\.It ", section.partition(f"Fl {name[1:]} ")[2], flags=re.MULTILINE)[0]
            value = parameter.default
            text = f"{value:g}" if isinstance(value, float) else str(value)
            assert re.search(rf"^By default {re.escape(text)}\b", entry, re.MULTILINE), (name, text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_sections(page: Path) -> None:
    assert re.findall(r"^\.Sh (.*)$", page.read_text(), re.MULTILINE) == SECTIONS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_pages_refer_to_pages_that_are_there(page: Path) -> None:
    for name in re.findall(r"^\.Xr (pqcache\S*) 1", page.read_text(), re.MULTILINE):
        assert name in COMMANDS, name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_mandoc_has_nothing_to_warn_of(page: Path) -> None:
    mandoc = shutil.which("mandoc")
    if mandoc is None:
        pytest.skip("NOT CHECKED: mandoc is not installed (Debian package mandoc)")
    result = subprocess.run([mandoc, "-T", "lint", "-W", "warning", page], capture_output=True, text=True)
    assert (result.returncode, result.stdout + result.stderr) == (0, "")
