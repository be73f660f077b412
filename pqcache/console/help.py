"""The text of --help: a command's options in groups, then its examples. The manual pages are made from the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from typer.core import TyperCommand, TyperGroup

from pqcache.console.conversion import convert_where_needed
from pqcache.errors import UsageError

# the titles of the groups of options, as rich_help_panel of each option
SELECTION, ROW_GROUPS, SAFETY, VIEW, DESTINATION = "Selection", "Row groups", "Safety", "View", "Destination"
CHECKS, KEYS, STORE, NETWORK, RUN, OUTPUT = "Checks", "Keys", "Store", "Network", "Run", "Output"


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
    """Return the help of one parameter; a number that is its default is added to the text."""
    names = sorted((*parameter.opts, *parameter.secondary_opts), key=lambda name: name.startswith("--"))
    text, default = parameter.help or "", parameter.default
    if isinstance(default, int | float) and default and not isinstance(default, bool):
        unit = "s" if parameter.metavar == "DURATION" else ""
        text += f" Default: {default:g}{unit}."
    if "--help" in names:
        text = "Show this help."
    metavar = "" if getattr(parameter, "is_flag", False) else parameter.metavar or "VALUE"
    return OptionHelp(tuple(names), metavar, getattr(parameter, "rich_help_panel", None), text)


def option_groups(command: Any) -> dict[str, list[OptionHelp]]:
    """Return the options of a command by the title of their group; those without a group come last."""
    found: dict[str | None, list[OptionHelp]] = {}
    for item in option_list(command):
        found.setdefault(item.group, []).append(item)
    rest = found.pop(None, [])
    titled = {str(title): items for title, items in found.items()}
    if OUTPUT in titled:
        titled[OUTPUT] = [*titled.pop(OUTPUT), *rest]
        return titled
    return {**titled, ("Other" if titled else "Options"): rest}


class Command(TyperCommand):
    """A command whose help lists its options in groups, without click's notes on types and ranges."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Refuse an empty argument, as an unset shell variable leaves it: Path('') is the working directory."""
        values = self.make_parser(ctx).parse_args(list(args))[0]
        for parameter in self.params:
            if parameter.param_type_name == "argument" and values.get(parameter.name) == "":
                raise UsageError(f"{getattr(parameter, 'metavar', None)}", "an empty path", "name a directory or a URL")
        convert_where_needed(self, ctx)
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
        """Write the commands, then the options."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, first_line(command)) for name, command in self.commands.items()])
        with formatter.section("Options"):
            formatter.write_dl([(", ".join(item.names), item.text) for item in option_list(self)])

    format_epilog = Command.format_epilog

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the options before the command."""
        convert_where_needed(self, ctx)
        return super().parse_args(ctx, args)


def first_line(command: Any) -> str:
    """Return the first line of a command's help."""
    return (command.help or "").strip().partition("\n")[0]
