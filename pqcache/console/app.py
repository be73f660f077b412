"""The command line as a whole: commands from the table of options, and how a command's report is printed."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Annotated, Any

import typer

from pqcache.console import examples
from pqcache.console.completion import proposals_for
from pqcache.console.help import Command, CommandGroup
from pqcache.errors import UsageError
from pqcache.options import ARGUMENT, COMMANDS, REMEMBERED, Option, options_of

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


class Given(SimpleNamespace):
    """What a command line gives: the value of each option by its name, the default where it is absent."""

    def of(self, *scopes: str) -> dict[str, Any]:
        """The options of these scopes, as the library takes them."""
        known = options_of(*COMMANDS[self.command_name])
        return {name: getattr(self, name) for name, option in known.items() if option.scope in scopes}


def command(name: str, epilog: str) -> Callable[[Callable[[Given], None]], Callable[[Given], None]]:
    """Make a function the command of this name, with its options in the table."""
    known = options_of(*COMMANDS[name])

    def register(function: Callable[[Given], None]) -> Callable[[Given], None]:
        app.command(name, cls=Command, epilog=epilog, help=inspect.getdoc(function))(
            _with_signature(lambda **words: function(_given(name, known, words)), known)
        )
        return function

    return register


def _given(name: str, known: dict[str, Option], words: dict[str, Any]) -> Given:
    return Given(command_name=name, **{option: _value(known[option], word) for option, word in words.items()})


def _value(option: Option, words: Any) -> Any:
    """What Python takes; an option that is absent and remembered is None, as the cache knows it."""
    if words is None or words == ():
        return None if option.scope == REMEMBERED else option.default
    return option.from_shell(words)


def _with_signature(function: Callable[..., Any], known: dict[str, Option]) -> Callable[..., Any]:
    """``function`` with the parameters that Typer makes options of."""
    parameters = [_parameter(option) for option in known.values()]
    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    function.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return function


def _parameter(option: Option) -> inspect.Parameter:
    """What Typer is told of an option: all but flags are text, which `Option.from_shell` converts."""
    kind = option.kind
    about: dict[str, Any] = {"metavar": option.metavar, "help": option.help_text}
    if option.completes or kind.values:
        about["autocompletion"] = proposals_for(option)
    default: Any = None
    hint: Any = list[str] if kind.is_list else tuple[str, str] if kind.words == 2 else str
    flag = option.flag
    if kind.is_flag and option.scope == REMEMBERED:
        hint, flag = bool, f"{flag}/--no-{flag[2:]}"
    elif kind.is_flag:
        hint, default = bool, False
    if option.scope == ARGUMENT:
        info: Any = typer.Argument(show_default=False, **about)
    else:
        info = typer.Option(*filter(None, (option.short, flag)), rich_help_panel=option.group, **about)
    return inspect.Parameter(
        option.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if option.required else default,
        annotation=Annotated[hint | None if default is None and not option.required else hint, info],
    )


Version = Annotated[
    bool, typer.Option("--version", help="Show the version; with -v, also those of Python and of the libraries.")
]
Verbose = Annotated[bool, typer.Option("-v", "--verbose", help="With --version: show more.")]


@app.callback()
def common(context: typer.Context, version: Version = False, verbose: Verbose = False) -> None:
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
