"""``pqcache help``: the same as ``--help``, for those who look for it as a command."""

from __future__ import annotations

from typing import Annotated

import typer

from pqcache.console import examples
from pqcache.console.app import app
from pqcache.console.help import Command
from pqcache.errors import UsageError

CommandName = Annotated[str | None, typer.Argument(metavar="COMMAND", help="A command. Absent: all commands.")]


@app.command("help", cls=Command, epilog=examples.HELP)
def help_command(context: typer.Context, command: CommandName = None) -> None:
    """Show the help of a command, or all commands."""
    top = context.find_root()
    if command is None:
        typer.echo(top.get_help())
        return
    found = top.command.get_command(top, command)  # type: ignore[attr-defined]
    if found is None:
        from difflib import get_close_matches

        near = get_close_matches(command, top.command.commands, 1)  # type: ignore[attr-defined]
        advice = f"did you mean '{near[0]}'? " if near else ""
        raise UsageError(f"help {command}", "there is no such command", f"{advice}'pqcache help' lists them")
    with type(context)(found, info_name=command, parent=top) as of_command:
        typer.echo(found.get_help(of_command))
