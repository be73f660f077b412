"""Values that need no conversion are what Typer would make of them; all others it converts and checks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from pqcache.console.help import Command

CASES: list[tuple[list[str], dict[str, Any]]] = [
    (["x"], {}),
    (["x", "y"], {"cache": "y"}),
    (["x", "--where", "a > 1"], {"where": "a > 1"}),
    (["x", "--where", ""], {"where": ""}),
    (["x", "-o", "a=b", "-o", "c=d"], {"option": ["a=b", "c=d"]}),
    (["x", "--jobs", "3", "--wait", "1.5"], {"jobs": 3, "wait": 1.5}),
    (["x", "--html", "page"], {"html": Path("page")}),
    (["x", "--no-checksum"], {"checksum": False}),
    (["x", "--diff", "1", "2"], {"diff": ("1", "2")}),
]
DEFAULTS = {
    "source": "x", "cache": None, "where": None, "option": None, "jobs": 8, "wait": 0.0, "html": None,
    "checksum": None, "diff": None,
}  # fmt: skip


def _parsed(kind: Any, words: list[str]) -> Any:
    """Return what a function gets of ``words``, or the error, if its command is of ``kind``."""
    app, found = typer.Typer(), []

    @app.command(cls=kind)
    def take(
        source: str,
        cache: Annotated[str | None, typer.Argument()] = None,
        where: str | None = None,
        option: Annotated[list[str] | None, typer.Option("-o")] = None,
        jobs: Annotated[int, typer.Option(min=1)] = 8,
        wait: float = 0.0,
        html: Path | None = None,
        checksum: bool | None = None,
        diff: tuple[str, str] | None = None,
    ) -> None:
        found.append(locals())

    done = CliRunner().invoke(app, words)
    return (
        {name: found[0][name] for name in DEFAULTS} if found else getattr(done.exception, "exit_code", done.exit_code)
    )


@pytest.mark.parametrize(("words", "given"), CASES)
def test_values_are_what_typer_makes_of_them(words: list[str], given: dict[str, Any]) -> None:
    expected = {**DEFAULTS, **given}
    assert _parsed(Command, words) == _parsed(None, words) == expected
    assert [type(value) for value in _parsed(Command, words).values()] == [type(value) for value in expected.values()]


@pytest.mark.parametrize("words", [[], ["x", "--jobs", "0"], ["x", "--jobs", "two"], ["x", "--diff", "1"]])
def test_bad_values_are_refused(words: list[str]) -> None:
    assert _parsed(Command, words) == _parsed(None, words) == 2
