"""The command line as a whole: commands made from the table of options, their help and examples, and completion.

The manual pages are made from the same help.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from pqcache.errors import PqcacheError, UsageError
from pqcache.options import ARGUMENT, COMMANDS, GROUPS, REMEMBERED, Option, options_of

Proposals = Callable[[Any, list[str], str], list[str]]


def proposals_for(option: Option) -> Proposals:
    """The completion of an option; Typer calls it with the context, all words, and the beginning of this one."""
    known: Callable[[Any, str], Iterator[str]] = {
        "cache": _caches,
        "place": _caches,
        "snapshot": _snapshots,
        "codec": lambda *_: iter(("zstd", "lz4", "snappy", "none", "keep")),
        "command": lambda *_: iter(COMMANDS),
    }.get(option.completes, lambda *_: iter(option.kind.values))

    def proposals(context: typer.Context, args: list[str], incomplete: str) -> list[str]:  # the names that Typer knows
        return sorted({word for word in known(context, incomplete) if word.startswith(incomplete)})

    return proposals


def _caches(_: Any, typed: str) -> Iterator[str]:
    """Caches and other directories below the one typed so far; without a slash, also the names in $PQCACHE_ROOT."""
    from pqcache.store.layout import CONFIG

    above = typed.rpartition("/")[0] + "/" if "/" in typed else ""
    root = "" if above else os.environ.get("PQCACHE_ROOT", "")
    with suppress(OSError):
        for entry in os.scandir(above or "."):
            if entry.is_dir() and (typed.endswith(".") or not entry.name.startswith(".")):
                is_cache = (Path(entry.path) / CONFIG).is_file() and not root  # where a word without a / is a name
                yield above + entry.name + ("" if is_cache else "/")
    if root:
        yield from (path.parent.name for path in Path(root).expanduser().glob(f"*/{CONFIG}"))


def _snapshots(context: Any, _: str) -> Iterator[str]:
    """The IDs and pins of the cache named earlier on the line."""
    from pqcache.store.cache_directory import CacheDirectory, cache_path
    from pqcache.store.cache_root import named_place
    from pqcache.store.snapshot import read_kept

    with suppress(PqcacheError, OSError):
        cache = CacheDirectory(cache_path(named_place(context.params["cache"])))
        yield from (snapshot.id for snapshot in cache.snapshots())
        yield from filter(None, read_kept(cache.path).pins.values())


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
    """The options of a command in the order of its help, ``--help`` last."""
    context = command.make_context("pqcache", [], resilient_parsing=True, help_option_names=["-h", "--help"])
    return [_option_help(p) for p in command.get_params(context) if p.param_type_name == "option" and not p.hidden]


def _option_help(parameter: Any) -> OptionHelp:
    names = sorted((*parameter.opts, *parameter.secondary_opts), key=lambda name: name.startswith("--"))
    text = "Show this help." if "--help" in names else parameter.help or ""
    metavar = "" if getattr(parameter, "is_flag", False) else parameter.metavar or "VALUE"
    return OptionHelp(tuple(names), metavar, getattr(parameter, "rich_help_panel", None), text)


def option_groups(command: Any) -> dict[str, list[OptionHelp]]:
    """The options of a command by group title; those without a group, such as --help, come last."""
    found: dict[str, list[OptionHelp]] = {title: [] for title in GROUPS}
    rest: list[OptionHelp] = []
    for item in option_list(command):
        found.get(item.group or "", rest).append(item)
    found = {title: items for title, items in found.items() if items}
    last = max(found, key=GROUPS.index) if found else "Options"
    return {**found, last: [*found.get(last, []), *rest]}


def _take_text(parameters: Iterable[Any]) -> None:
    """Make parameters accept text and flags unchanged: Typer would use pydantic, whose import takes 0.1 s."""

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
        """The arguments as manual pages write them, without braces."""
        return [piece.replace("{", "").replace("}", "") for piece in super().collect_usage_pieces(ctx)]


class CommandGroup(TyperGroup):
    """The top level: all commands, each with the first sentence of its help."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the commands by purpose, then the options."""
        for title, names in COMMAND_GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(name, first_line(self.commands[name])) for name in names])
        with formatter.section("Options"):
            formatter.write_dl([(", ".join(item.names), item.text) for item in option_list(self)])

    format_epilog = Command.format_epilog

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        _take_text(self.get_params(ctx))
        return super().parse_args(ctx, args)


def first_line(command: Any) -> str:
    return (command.help or "").strip().partition("\n")[0]


EXAMPLES = {  # the first ones are of pqcache itself
    "": """\
# Copy a table, and refresh it later
pqcache sync hdfs://namenode:8020/warehouse/shop cache/shop
pqcache sync cache/shop
# Set the row-group size for training, and inspect the result
pqcache repartition cache/shop --row-group-size 128MB
pqcache inspect cache/shop
# More about a command
pqcache sync --help
man pqcache-sync
""",
    "sync": """\
# The first run, with options that are remembered
pqcache sync s3://lake/warehouse/shop cache/shop \\
    --where "dt >= '2026-11-01'" --row-group-size 128MB
# Every later run
pqcache sync cache/shop
# Show what a run would do
pqcache sync cache/shop --dry-run
# All caches of a directory, for Prometheus, and with a mail on a failure
pqcache sync --all /data/cache --bwlimit '08:00,100MB 19:00,off' \\
    --metrics /var/lib/node_exporter/pqcache.prom \\
    --on-failure 'mail -s "$PQCACHE_ERROR" ops < /dev/null'
# A first run that trainings read while it copies
pqcache sync s3://lake/warehouse/shop cache/shop --fill
""",
    "repartition": """\
# Rewrite a cache into a new snapshot
pqcache repartition cache/shop --row-group-size 64MB
# Rewrite a table on HDFS to a local directory
pqcache repartition hdfs://namenode:8020/warehouse/shop shop-128mb
# Store token windows as bytes, and shuffle the rows of each partition
pqcache repartition cache/text --dense tokens --narrow --shuffle 7
# Rewrite on HDFS with a Dask cluster, each row group within one block
pqcache repartition hdfs://namenode:8020/warehouse/shop \\
    hdfs://namenode:8020/warehouse/shop-aligned \\
    --align block --scheduler tcp://scheduler:8786
""",
    "inspect": """\
# Compare row groups on HDFS with the block size
pqcache inspect hdfs://namenode:8020/warehouse/shop
# Show the first two rows
pqcache inspect cache/shop --sample 2
# Rows per partition as JSON
pqcache inspect cache/shop --json | jq '.partitions[] | {path, rows}'
""",
    "rows": """\
# Show the rows of batch 1234 and their values
pqcache rows cache/shop --state checkpoint.json --batch 1234 --sample
# Whether the epoch of two ranks had every row exactly once
pqcache rows cache/shop --prove proof-0.json proof-1.json
# The files of its rows, of a training with a filter
pqcache rows cache/shop --state checkpoint.json --batch 1234 \\
    --filters "price > 0.5" --json | jq -r .file | sort | uniq -c
""",
    "verify": """\
# Decode every page, and repair what is damaged
pqcache verify cache/shop --deep --repair
# List files that have changed at the source
pqcache verify cache/shop --source
""",
    "index": """\
# Build key indexes of two columns
pqcache index cache/shop --key user_id --key email
# List the key indexes
pqcache index cache/shop
# Remove one
pqcache index cache/shop --drop email
""",
    "bench": """\
# Measure what a training reads
pqcache bench cache/shop --columns id,price,tokens --batch-size 1024
# Measure other numbers of workers
pqcache bench cache/shop --workers 0,4,12 --seconds 10
""",
    "gc": """\
# Remove all snapshots but the current one
pqcache gc cache/shop --keep 1
# Keep snapshots of the last two days for programs that hold no lease
pqcache gc cache/shop --keep 1 --older-than 48h
""",
    "log": """\
# Bytes fetched in the last thirty runs
pqcache log cache/shop --last 30 --json | jq -s 'map(.fetched_bytes) | add'
""",
    "add": """\
# Two tables, and a sync of all
export PQCACHE_ROOT=/data/cache
pqcache add s3://lake/warehouse/shop
pqcache add hdfs://namenode:8020/warehouse/users people
pqcache sync --all
""",
    "remove": """\
# Remove the cache /data/cache/people
pqcache remove people --root /data/cache
""",
    "status": """\
# All caches below a directory
pqcache status /data/cache
# For a monitor: exit code 1 if one is older
PQCACHE_ROOT=/data/cache pqcache status --max-age 30h
""",
    "serve": """\
# Serve a cache to a cluster, with a token that is in a file
openssl rand -hex 32 > token; chmod 600 token
pqcache serve cache/shop --bind 10.0.0.7 --token-file token
# On the other nodes
pqcache sync pqcache+http://10.0.0.7:8700/shop cache/shop \\
    -o token_file=$PWD/token
""",
    "snapshots": """\
# List what there is to go back to
pqcache snapshots cache/shop
""",
    "pin": """\
# Keep what a model was trained on, and let it go later
pqcache pin cache/shop 20261120T040003Z-0007 --name paper
pqcache unpin cache/shop paper
""",
    "unpin": """\
# Let it go
pqcache unpin cache/shop paper
""",
    "rollback": """\
# Go back to an older snapshot
pqcache snapshots cache/shop
pqcache rollback cache/shop 20261120T040003Z-0007
# By its number, and stay there: syncs publish nothing
pqcache rollback cache/shop 7 --hold
# Publish what they have made, and end that
pqcache rollback cache/shop --release
""",
    "demo": """\
# Run it, and look at what it has made
pqcache demo
pqcache inspect pqcache-demo/cache
# Leave its files in another directory
pqcache demo build/demo
""",
    "help": """\
# All options of sync
pqcache help sync
""",
}

app = typer.Typer(
    name="pqcache",
    cls=CommandGroup,
    epilog=EXAMPLES[""],
    invoke_without_command=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,
)


class Given(SimpleNamespace):
    """The values of a command line, by option; an absent option has its default."""

    def of(self, *scopes: str) -> dict[str, Any]:
        known = options_of(*COMMANDS[self.command_name])
        return {name: getattr(self, name) for name, option in known.items() if option.scope in scopes}


def command(name: str) -> Callable[[Callable[[Given], None]], Callable[[Given], None]]:
    """Make a function the command of this name, with its options in the table and its examples."""
    known = options_of(*COMMANDS[name])

    def register(function: Callable[[Given], None]) -> Callable[[Given], None]:
        app.command(name, cls=Command, epilog=EXAMPLES[name], help=inspect.getdoc(function))(
            _with_signature(lambda **words: function(_given(name, known, words)), known)
        )
        return function

    return register


def _given(name: str, known: dict[str, Option], words: dict[str, Any]) -> Given:
    return Given(command_name=name, **{option: _value(known[option], word) for option, word in words.items()})


def _value(option: Option, words: Any) -> Any:
    """The value for Python; None for an absent option that the cache remembers."""
    if words is None or words == ():
        return None if option.scope == REMEMBERED else option.default
    if option.scope == ARGUMENT and words == "":  # an unset shell variable; Path("") would be the working directory
        raise UsageError(option.label, "an empty path", "name a directory or a URL")
    if option.completes == "cache":
        from pqcache.store.cache_root import named_place

        words = [named_place(word) for word in words] if option.kind.is_list else named_place(words)
    return option.from_shell(words)


def _with_signature(function: Callable[..., Any], known: dict[str, Option]) -> Callable[..., Any]:
    """``function`` with the parameters that Typer turns into options."""
    parameters = [_parameter(option) for option in known.values()]
    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    function.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return function


def _parameter(option: Option) -> inspect.Parameter:
    """An option for Typer: all but flags are text, which `Option.from_shell` converts."""
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
    """Sync Parquet tables from HDFS, S3 and other stores to local disk, and train from them."""
    if version:
        from pqcache.versions import __version__, report

        typer.echo("\n".join(report()) if verbose else f"pqcache {__version__}")
        raise typer.Exit
    if verbose:
        raise UsageError("-v", "needs --version", "commands report their progress without it")
    if context.invoked_subcommand is None:
        typer.echo(context.get_help(), err=True)
        raise typer.Exit(UsageError.exit_code)
