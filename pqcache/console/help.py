"""What a command's --help looks like, and what its manual page is made from: options in groups, then examples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from typer.core import TyperCommand, TyperGroup

from pqcache.errors import UsageError

# the groups of options, in the order in which a command shows those it has
TAKEN, ROW_GROUPS, GUARDS, SHOWN, DESTINATION = "What is taken", "Row groups", "Guards", "What is shown", "Destination"
CHECKS, KEYS, STORE, RUN, OUTPUT = "Checks", "Keys", "Store", "Run", "Output"


@dataclass(frozen=True)
class Entry:
    """One option or argument: all its names, what follows them, its group, and what it does."""

    names: tuple[str, ...]
    metavar: str
    group: str | None
    text: str


def entries(command: Any) -> list[Entry]:
    """Return a command's options in the order of its help, ``--help`` last."""
    context = command.make_context("pqcache", [], resilient_parsing=True, help_option_names=["-h", "--help"])
    return [entry(p) for p in command.get_params(context) if p.param_type_name == "option" and not p.hidden]


def entry(parameter: Any) -> Entry:
    """Return what there is to say of a parameter; its default is part of the text."""
    names = sorted((*parameter.opts, *parameter.secondary_opts), key=lambda name: name.startswith("--"))
    text, default = parameter.help or "", parameter.default
    if isinstance(default, int | float) and default and not isinstance(default, bool):
        text += f" By default {default:g}."
    if "--help" in names:
        text = "Show this help."
    flag = getattr(parameter, "is_flag", False)
    metavar = "" if flag else parameter.metavar or "VALUE"
    return Entry(tuple(names), metavar, getattr(parameter, "rich_help_panel", None), text)


def groups(command: Any) -> dict[str, list[Entry]]:
    """Return a command's options by group; those of no group come last."""
    found: dict[str | None, list[Entry]] = {}
    for item in entries(command):
        found.setdefault(item.group, []).append(item)
    rest = found.pop(None, [])
    named = {str(name): items for name, items in found.items()}
    if OUTPUT in named:
        named[OUTPUT] = [*named.pop(OUTPUT), *rest]
        return named
    return {**named, ("Other" if named else "Options"): rest}


def examples(*pairs: tuple[str, str]) -> str:
    """Return a command's epilog: what each example is for, and its commands."""
    return "\n".join(f"# {purpose}\n{commands}" for purpose, commands in pairs)


class Command(TyperCommand):
    """A command whose help has its options in groups, without click's remarks on types and ranges."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Refuse an empty argument, as an unset shell variable leaves it: Path('') would be this directory."""
        given = self.make_parser(ctx).parse_args(list(args))[0]
        for parameter in self.params:
            if parameter.param_type_name == "argument" and given.get(parameter.name) == "":
                raise UsageError(f"{getattr(parameter, 'metavar', None)}", "an empty path", "name a directory or a URL")
        return super().parse_args(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments, then each group."""
        arguments: list[Any] = [p for p in self.params if p.param_type_name == "argument"]
        if arguments:
            with formatter.section("Arguments"):
                formatter.write_dl([(p.metavar or p.name, p.help or "") for p in arguments])
        for name, items in groups(self).items():
            with formatter.section(name):
                formatter.write_dl(
                    [(", ".join(i.names) + (f" {i.metavar}" if i.metavar else ""), i.text) for i in items]
                )

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the examples as they are, so that they can be copied."""
        if self.epilog:
            with formatter.section("Examples"):
                formatter.write("".join(f"  {line}\n" for line in self.epilog.splitlines()))

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the words after the command's name, as manual pages write them."""
        return [piece.strip("{}") for piece in super().collect_usage_pieces(ctx)]


class Group(TyperGroup):
    """The commands' common part, with the first sentence of each command in full."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the commands, then the options."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary(command)) for name, command in self.commands.items()])
        with formatter.section("Options"):
            formatter.write_dl([(", ".join(item.names), item.text) for item in entries(self)])

    format_epilog = Command.format_epilog


def summary(command: Any) -> str:
    """Return the first line of a command's help."""
    return (command.help or "").strip().partition("\n")[0]
