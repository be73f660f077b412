"""The command line as a whole: what ``pqcache`` does without a command, and how a command's report is printed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer

from pqcache.console import examples
from pqcache.console import options as opt
from pqcache.console.help import CommandGroup
from pqcache.errors import UsageError

app = typer.Typer(
    name="pqcache",
    cls=CommandGroup,
    epilog=examples.PQCACHE,
    invoke_without_command=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,
)


@app.callback()
def common(context: typer.Context, version: opt.Version = False, verbose: opt.Verbose = False) -> None:
    """Sync Parquet tables from HDFS or S3 to local disk, and train from them."""
    if version:
        from pqcache.versions import __version__, report

        typer.echo("\n".join(report()) if verbose else f"pqcache {__version__}")
        raise typer.Exit
    if verbose:
        raise UsageError("-v", "needs --version", "commands report their progress without it")
    if context.invoked_subcommand is None:
        typer.echo(context.get_help(), err=True)
        raise typer.Exit(UsageError.exit_code)


def print_report(summary: dict[str, Any], json: bool, quiet: bool, print_text: Callable[[], None]) -> None:
    """Print a report as JSON, as text, or not at all."""
    from pqcache.console import terminal

    if json:
        terminal.print_json({"event": "summary", **summary} if "partitions" not in summary else summary)
    elif not quiet:
        print_text()
