"""The text of --help: a command's options in groups, then its examples. The manual pages are made from the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from typer.core import TyperCommand, TyperGroup

from pqcache.errors import UsageError
from pqcache.options import GROUPS

COMMAND_GROUPS = {
    "Copy": ("sync", "repartition", "verify"),
    "Look": ("inspect", "snapshots", "log"),
    "Train": ("index", "rows", "bench"),
    "Keep": ("pin", "unpin", "rollback", "gc"),
    "Many caches": ("status", "add", "remove", "serve"),
    "Learn": ("demo", "help"),
}


@dataclass(frozen=True)
class OptionHelp:
    """One option: its names, its placeholder, the title of its group, and its description."""

    names: tuple[str, ...]
    metavar: str
    group: str | None
    text: str


def option_list(command: Any) -> list[OptionHelp]:
    """Return the options of a command in the order of its help, ``--help`` last."""
    context = command.make_context("pqcache", [], resilient_parsing=True, help_option_names=["-h", "--help"])
    return [_option_help(p) for p in command.get_params(context) if p.param_type_name == "option" and not p.hidden]


def _option_help(parameter: Any) -> OptionHelp:
    names = sorted((*parameter.opts, *parameter.secondary_opts), key=lambda name: name.startswith("--"))
    text = "Show this help." if "--help" in names else parameter.help or ""
    metavar = "" if getattr(parameter, "is_flag", False) else parameter.metavar or "VALUE"
    return OptionHelp(tuple(names), metavar, getattr(parameter, "rich_help_panel", None), text)


def option_groups(command: Any) -> dict[str, list[OptionHelp]]:
    """The options of a command by the title of their group; those without one, as --help, are in the last."""
    found: dict[str, list[OptionHelp]] = {title: [] for title in GROUPS}
    rest: list[OptionHelp] = []
    for item in option_list(command):
        found.get(item.group or "", rest).append(item)
    found = {title: items for title, items in found.items() if items}
    last = max(found, key=GROUPS.index) if found else "Options"
    return {**found, last: [*found.get(last, []), *rest]}


def _take_text(parameters: Iterable[Any]) -> None:
    """Have parameters take text and flags as they are: Typer asks pydantic, whose import takes 0.1 s."""

    def process(parameter: Any, convert: Callable[[Any, Any], Any], context: Any, value: Any) -> Any:
        if parameter.required and not value:
            return convert(context, value)  # raises
        if value is None and (parameter.nargs == -1 or getattr(parameter, "multiple", False)):
            value = ()  # as Typer makes of it
        return value if parameter.callback is None else parameter.callback(context, parameter, value)

    for parameter in parameters:
        parameter.process_value = partial(process, parameter, parameter.process_value)


class Command(TyperCommand):
    """A command whose help lists its options in groups, without click's notes on types and ranges."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Refuse an empty argument, as an unset shell variable leaves it: Path('') is the working directory."""
        values = self.make_parser(ctx).parse_args(list(args))[0]
        for parameter in self.params:
            if parameter.param_type_name == "argument" and values.get(parameter.name) == "":
                raise UsageError(f"{getattr(parameter, 'metavar', None)}", "an empty path", "name a directory or a URL")
        _take_text(self.get_params(ctx))
        return super().parse_args(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, then each group of options."""
        arguments: list[Any] = [p for p in self.params if p.param_type_name == "argument"]
        if arguments:
            with formatter.section("Arguments"):
                formatter.write_dl([(p.metavar or p.name, p.help or "") for p in arguments])
        for title, items in option_groups(self).items():
            with formatter.section(title):
                formatter.write_dl(
                    [(", ".join(i.names) + (f" {i.metavar}" if i.metavar else ""), i.text) for i in items]
                )

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the examples without wrapping, so that they can be copied."""
        if self.epilog:
            with formatter.section("Examples"):
                formatter.write("".join(f"  {line}\n" for line in self.epilog.splitlines()))

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the arguments as manual pages write them, without braces."""
        return [piece.replace("{", "").replace("}", "") for piece in super().collect_usage_pieces(ctx)]


class CommandGroup(TyperGroup):
    """The top level: all commands, each with the first sentence of its help."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the commands by what they are for, then the options."""
        for title, names in COMMAND_GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(name, first_line(self.commands[name])) for name in names])
        with formatter.section("Options"):
            formatter.write_dl([(", ".join(item.names), item.text) for item in option_list(self)])

    format_epilog = Command.format_epilog

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the options before the command."""
        _take_text(self.get_params(ctx))
        return super().parse_args(ctx, args)


def first_line(command: Any) -> str:
    """Return the first line of a command's help."""
    return (command.help or "").strip().partition("\n")[0]
