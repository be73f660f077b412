"""Every option of pqcache, defined once.

Each class below lists options that belong together: a field's name, its default, and `option()` with its kind and help.
From these come the commands with their help, manual pages and shell completion, the keys of ``pqcache.toml``, and the
text of ``help()`` for the Python functions. To add an option, add a field here and use it; if Python takes it too, add
its type to the arguments at the end, which type checkers read. The Python-only options of ``ParquetDataset`` and
``Cache.batches`` are in `pqcache.reader.epoch_options` and `pqcache.torch.dataset_options`.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, TypedDict, TypeVar

from pqcache.errors import UsageError
from pqcache.units import is_number, is_whole, parse_count, parse_duration, parse_names, parse_size, size_word

if sys.version_info >= (3, 11):
    from typing import Unpack as Unpack
else:
    from typing_extensions import Unpack as Unpack

_T = TypeVar("_T", bound=Callable[..., Any])
NOTHING: Mapping[str, str] = MappingProxyType({})

# who takes an option
REMEMBERED = "remembered"  # a cache remembers it, in pqcache.toml; its help begins with *
RUN = "run"  # it is of one run
SHELL = "shell"  # only the command has it
ARGUMENT = "argument"  # a word of the command line that has no name
PYTHON = "python"  # only Python has it

# values that code compares with
HDFS_NATIVE, HDFS3 = "hdfs-native", "hdfs3"
IDENTITY, CONTENT = "identity", "content"
TIMEOUT = 30.0  # seconds without a byte

# the titles of the groups in a command's help
SELECTION, ROW_GROUPS, SAFETY, VIEW, DESTINATION = "Selection", "Row groups", "Safety", "View", "Destination"
CHECKS, KEYS, STORE, NETWORK, EXECUTION, OUTPUT = "Checks", "Keys", "Store", "Network", "Run", "Output"
GROUPS = [SELECTION, ROW_GROUPS, SAFETY, VIEW, DESTINATION, CHECKS, KEYS, STORE, NETWORK, EXECUTION, OUTPUT]


@dataclass(frozen=True)
class Kind:
    """How an option's value is written.

    Attributes:
        parse: turns an argument of Python, or an entry of ``pqcache.toml``, into the value; raises UsageError.
        split: turns a word of the shell into an argument for Python; raises UsageError.
        metavar: stands for the value in the help.
        show: turns the value into an entry of ``pqcache.toml``.
        is_flag: takes no value in the shell.
        is_list: may be repeated in the shell; `split` gets all words.
        words: how many words one use takes in the shell.
        values: the allowed values, if there are few.
        config: describes the entry in the manual page of ``pqcache.toml``.
    """

    parse: Callable[[Any], Any]
    split: Callable[[Any], Any] = lambda word: word
    metavar: str = "VALUE"
    show: Callable[[Any], Any] = lambda value: value
    is_flag: bool = False
    is_list: bool = False
    words: int = 1
    values: tuple[str, ...] = ()
    config: str = "A text."


@dataclass(frozen=True, kw_only=True)
class Option:
    """One option, as a field of a class below describes it."""

    name: str
    default: Any
    kind: Kind
    help: str
    group: str | None = None
    scope: str = RUN
    metavar: str = ""
    flag: str = ""
    short: str = ""
    low: float | None = None
    required: bool = False
    empty: str = ""  # what an empty text does, in the shell and in Python
    none: str = ""  # what None does in Python, if it is a value
    is_secret: bool = False  # values that hold it do not show it
    completes: str = ""  # with "cache" the command gets a path where a name below PQCACHE_ROOT was given

    @property
    def label(self) -> str:
        """Its name in the shell."""
        return self.metavar if self.scope == ARGUMENT else self.flag

    @property
    def help_text(self) -> str:
        """Its text for the shell, with a mark if a cache remembers it."""
        text = f"{self.text} Repeatable." if self.kind.is_list and self.scope != ARGUMENT else self.text
        return f"* {text}" if self.scope == REMEMBERED else text

    @property
    def config_text(self) -> str:
        """Its text for ``pqcache.toml``."""
        return f"{self.kind.config} {self.help} {self._default}".strip()

    @property
    def text(self) -> str:
        """Its help, and its default."""
        return " ".join(filter(None, [self.help, self.none, self.empty, self._default]))

    @property
    def _default(self) -> str:
        if not self.default or self.kind.is_flag or self.scope == ARGUMENT:
            return ""
        shown = self.kind.show(self.default)
        return f"Default: {repr(shown) if self.scope == PYTHON and shown == self.default else shown}."

    def value(self, given: Any) -> Any:
        """Parse a value from Python or ``pqcache.toml``; UsageError names the option."""
        return self._checked(f"{self.name}={given!r}", self.kind.parse, given)

    def resets(self, given: Any) -> bool:
        """Whether ``given`` is the empty text, which resets a remembered option to its default."""
        return self.scope == REMEMBERED and not self.kind.is_list and isinstance(given, str) and not given

    def from_shell(self, words: Any) -> Any:
        """Turn words of the shell into an argument for Python; UsageError names the option."""
        if self.kind.is_flag or self.resets(words):
            return words
        return self._checked(f"{self.label} {words}", self.kind.split, words)

    def _checked(self, subject: str, call: Callable[[Any], Any], given: Any) -> Any:
        try:
            value = call(given)
        except UsageError as error:
            raise UsageError(error.subject or subject, error.reason, error.advice) from error
        if self.low is not None and isinstance(value, int | float) and not value >= self.low:
            raise UsageError(subject, f"has to be at least {self.low:g}")
        if self.kind.values and value not in self.kind.values:
            raise UsageError(subject, f"choose {' or '.join(self.kind.values)}")
        return value


def option(default: Any, kind: Kind, group: str | None, help: str, **more: Any) -> Any:
    """A field of an options class; ``more`` are further attributes of `Option`."""
    about = {"option": {"kind": kind, "group": group, "help": help, **more}}
    shows = not more.get("is_secret", False)
    if isinstance(default, Mapping):
        return field(default_factory=lambda: default, metadata=about, repr=shows)
    return field(default=default, metadata=about, repr=shows)


def remembered(default: Any, kind: Kind, group: str, help: str, **more: Any) -> Any:
    """A field for an option that a cache remembers."""
    return option(default, kind, group, help, scope=REMEMBERED, **more)


def python(default: Any, kind: Kind, help: str, **more: Any) -> Any:
    """A field for an option that only Python has."""
    return option(default, kind, None, help, scope=PYTHON, **more)


def argument(metavar: str, help: str, kind: Kind | None = None, default: Any = ..., **more: Any) -> Any:
    """A field for a positional argument; without a default it is required."""
    more |= {"metavar": metavar, "scope": ARGUMENT, "required": default is ...}
    return option(None if default is ... else default, kind or TEXT, None, help, **more)


@cache
def options_of(*tables: type | str) -> dict[str, Option]:
    """The options of classes, by name, in this order; a text names an option of `Shared` or `Run`."""
    found = {}
    for table in tables:
        if isinstance(table, str):
            shared = vars(Shared).get(table) or Run.__dataclass_fields__[table]
            found[table] = _option_of(table, shared)
            continue
        fields = getattr(table, "__dataclass_fields__", None) or vars(table)
        found |= {n: _option_of(n, f) for n, f in fields.items() if "option" in getattr(f, "metadata", ())}
    return found


def _option_of(name: str, item: dataclasses.Field[Any]) -> Option:
    default = item.default if item.default is not dataclasses.MISSING else NOTHING
    about = item.metadata["option"]
    return Option(
        name=name, default=default, **{"flag": f"--{name.replace('_', '-')}", "metavar": about["kind"].metavar, **about}
    )


def parsed(given: Mapping[str, Any], *tables: type | str) -> dict[str, Any]:
    """Parse the options passed by Python code; TypeError for unknown ones.

    None counts as not given unless it means something else: the option is remembered, or None is its default. For a
    remembered option, an empty text is kept: it restores the default.
    """
    known = {name: option for name, option in options_of(*tables).items() if option.scope in (REMEMBERED, RUN, PYTHON)}
    if unknown := given.keys() - known.keys():
        near = get_close_matches(min(unknown), known, 1)
        advice = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(sorted(known))}"
        raise TypeError(f"unexpected keyword argument {min(unknown)!r}; {advice}")
    found: dict[str, Any] = {}
    for name, value in given.items():
        option = known[name]
        if value is None and option.none:
            found[name] = None
        elif option.resets(value):
            found[name] = value
        elif value is not None or (option.scope == PYTHON and option.default is not None):
            found[name] = option.value(value)
    return found


def all_values(given: Mapping[str, Any], *tables: type | str) -> Any:
    """The options passed by Python code, and the defaults of the others, as attributes."""
    defaults = {name: option.default for name, option in options_of(*tables).items()}
    return SimpleNamespace(**{**defaults, **parsed(given, *tables)})


def documented(arguments: type, *tables: type | str) -> Callable[[_T], _T]:
    """Make ``help()`` of a function or class show the options accepted as ``**given``.

    They replace the line that begins with ``given:`` in its docstring, after the parameters listed there.
    """

    def document(target: _T) -> _T:
        function: Any = target.__init__ if isinstance(target, type) else target  # type: ignore[misc]
        known = options_of(*tables)
        hints = {name: arguments.__annotations__[name] for name in known if name in arguments.__annotations__}
        signature = inspect.signature(function)
        own = [parameter for name, parameter in signature.parameters.items() if name != "given"]
        added = [_parameter(known[name], hint) for name, hint in hints.items()]
        function.__signature__ = signature.replace(parameters=[*own, *added])
        before, line, after = re.split(r"^( *given:.*\n)", target.__doc__ or "", maxsplit=1, flags=re.MULTILINE)
        indent = line[: -len(line.lstrip())]
        wrap = textwrap.TextWrapper(115, initial_indent=indent, subsequent_indent=f"{indent}    ")
        undescribed = [p.name for p in own if p.name in known and f" {p.name}: " not in before]
        said = [known[name] for name in [*undescribed, *hints]]
        lines = [wrap.fill(f"{option.name}: {_python_text(option)}") for option in said]
        target.__doc__ = "\n".join([before.rstrip(), *lines, after])
        return target

    return document


def _python_text(option: Option) -> str:
    return re.sub(r"--([a-z-]+)", lambda flag: flag[1].replace("-", "_"), option.text)


def _parameter(option: Option, hint: Any) -> inspect.Parameter:
    default = None if option.scope == REMEMBERED else option.default
    if default and option.kind is SIZE:
        default = size_word(default)
    annotation = getattr(hint, "__forward_arg__", hint)
    return inspect.Parameter(option.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _text(given: Any) -> str:
    if not isinstance(given, str):
        raise UsageError("", "not a text", "write it in quotes")
    return given


def _flag(given: Any) -> bool:
    if not isinstance(given, bool):
        raise UsageError("", "neither true nor false")
    return given


def _truth(given: Any) -> bool:
    """A flag passed by Python code: also numpy's and torch's, and 0 and 1, which ``pqcache.toml`` rejects."""
    is_bool = isinstance(given, bool) or str(getattr(given, "dtype", "")).endswith("bool")
    if not is_bool and not (is_whole(given) and given in (0, 1)):
        raise UsageError("", "neither true nor false", "give True or False")
    return bool(given)


def _count(given: Any) -> int:
    if not (isinstance(given, str) or is_whole(given)):
        raise UsageError("", "not a whole number", "write it like 8")
    return int(parse_count(given))


def _number(given: Any) -> Any:
    if is_number(given):
        return given
    with suppress(ValueError):
        if isinstance(given, str):
            return float(given)
    raise UsageError("", "not a number", "write it like 0.5")


def _unnamed(parse: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """``parse``, with errors to which the option adds its own name."""

    def call(given: Any) -> Any:
        try:
            return parse(given)
        except UsageError as error:
            raise UsageError("", error.reason, error.advice) from error

    return call


def _names(given: Any) -> tuple[str, ...]:
    return () if given == "" else parse_names("", given)


def _rules(given: Any) -> tuple[str, ...]:
    """Parse ``[expect]`` of ``pqcache.toml``, or its rules alone."""
    rules = given
    if isinstance(given, Mapping):
        if others := given.keys() - {"rules"}:
            raise UsageError("", f"{min(others)!r} is not known", "write rules = [...] below [expect]")
        rules = given.get("rules", ())
    if isinstance(rules, list | tuple) and all(isinstance(rule, str) for rule in rules):
        return tuple(map(str, rules))
    raise UsageError("", "not a list of rules", 'write it like rules = ["nulls.price < 1%"]')


def _between_commas(words: str) -> list[str]:
    return [name.strip() for name in words.split(",") if name.strip()]


def _pairs(given: Any) -> dict[str, str]:
    if given == "":
        return {}
    if not isinstance(given, Mapping):
        raise UsageError("", "not a table of names and values", "give one, like {'hour': 'int'}")
    return {str(name): str(value) for name, value in given.items()}


def _pairs_between_commas(words: str) -> dict[str, str]:
    pairs = [pair.rpartition("=") for pair in _between_commas(words)]
    if any(not (name and value) for name, _, value in pairs):
        raise UsageError("", "not NAME=VALUE,...", "write it like hour=int,dt=date")
    return {name.strip(): value.strip() for name, _, value in pairs}


def _settings(words: Iterable[str]) -> dict[str, str]:
    found = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not (key and equals):
            raise UsageError(f"-o {key}", "not a key with a value", "write it as KEY=VALUE")
        found[key] = value
    return found


def _counts(words: str) -> list[int]:
    for word in words.split(","):
        if not word.strip().isdigit():
            raise UsageError("", f"{word!r} is not a number", "write numbers, like 0,2,4")
    return [int(word) for word in words.split(",")]


def _duration_text(seconds: float) -> str:
    return "0" if not seconds else f"{seconds:f}".rstrip("0").rstrip(".") + "s"  # never 1e+06s


def choice(*values: str) -> Kind:
    """One of a few texts."""
    return Kind(lambda value: value, metavar="|".join(values), values=values)


_parse_count, _parse_size, _parse_duration = map(_unnamed, (_count, parse_size, parse_duration))
ANY = Kind(lambda value: value)  # what it may be is checked where it is used
TEXT = Kind(_text)
WORD = Kind(str)  # a text that may be written as a number
FLAG = Kind(_flag, is_flag=True, config="True or false.")
TRUTH = Kind(_truth, is_flag=True)
COUNT = Kind(_parse_count, _parse_count, "N", config="A whole number.")
NUMBER = Kind(_number, _number)
SIZE = Kind(_parse_size, _parse_size, "SIZE", size_word, config="A size.")
DURATION = Kind(_parse_duration, _parse_duration, "DURATION", _duration_text, config="A duration.")
NAMES = Kind(_unnamed(_names), _between_commas, "A,B,...", list, config="A list of names.")
LIST = Kind(_unnamed(lambda names: parse_names("", names)))
COLUMNS = Kind(_unnamed(_names), list, "COLUMN", list, is_list=True)
PAIRS = Kind(_pairs, _pairs_between_commas, "NAME=VALUE,...", dict, config="A table of names and values.")
SETTINGS = Kind(_pairs, _settings, "KEY=VALUE", dict, is_list=True, config="A table of names and values.")
RULES = Kind(
    _rules,
    lambda words: [word for word in words if word],
    "RULE",
    lambda rules: {"rules": list(rules)},
    is_list=True,
    config="A table with rules, a list of texts.",
)
COUNTS = Kind(list, _counts, "N,N,...")
PATH = Kind(Path, Path, "FILE")
PATHS = Kind(list, lambda words: [Path(word) for word in words], is_list=True)
TEXTS = Kind(list, list, is_list=True)
TWO = Kind(tuple, tuple, words=2)


# what a cache remembers


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The part of a source to fetch."""

    where: str | None = remembered(
        None,
        TEXT,
        SELECTION,
        "SQL condition on the rows, like \"dt >= '2026-11-01' and price > 0\".",
        empty="'' removes it.",
        metavar="CONDITION",
    )
    columns: tuple[str, ...] | None = remembered(
        None, NAMES, SELECTION, "Fetch only the bytes of these columns.", empty="'' fetches all."
    )
    newest: str | None = remembered(
        None,
        WORD,
        SELECTION,
        "Fetch only the newest partitions, by their values: N of them, as many as fit into SIZE bytes at the "
        "source, or as many as fit on the disk of the cache. Older ones that are left out do not count as deleted.",
        empty="'' fetches all.",
        metavar="N|SIZE|free",
    )
    shard: str | None = remembered(
        None,
        TEXT,
        SELECTION,
        "Fetch only the share of node I of N, counted from 0: whole files, about the same number of bytes for each "
        "node. After a change of I or N, files of other shares count as deleted.",
        empty="'' fetches all.",
        metavar="I/N",
    )
    marker: str | None = remembered(
        None, TEXT, SELECTION, "Fetch only partitions that contain a file of this name, like _SUCCESS.", metavar="NAME"
    )
    settle: float = remembered(0.0, DURATION, SELECTION, "Skip files younger than this, like 10m, until the next run.")
    partition_types: Mapping[str, str] | None = remembered(
        None,
        PAIRS,
        SELECTION,
        "Types of partition columns: int, float, date, timestamp or text. Default: int if every value of the first "
        "sync is an integer without leading zeros, otherwise text. Later syncs keep the type.",
        empty="'' infers them again.",
        metavar="NAME=TYPE,...",
    )
    as_files: bool = remembered(
        False,
        FLAG,
        SELECTION,
        "Take all Parquet files of a Delta, Iceberg, Hudi or transactional Hive table, of a Spark stream, or of "
        "several tables as they are, including deleted and outdated ones. Default: refuse such a source.",
    )
    all_files: bool = remembered(
        False,
        FLAG,
        SELECTION,
        "Take every file that is not hidden, whatever its name. Default: files with the suffix of Parquet, and files "
        "without a suffix whose content is Parquet.",
    )
    version: str | None = remembered(
        None,
        WORD,
        SELECTION,
        "The version of a Delta table, or the snapshot ID of an Iceberg table. Default: the newest.",
        empty="'' takes the newest again.",
        metavar="N",
    )
    as_of: str | None = remembered(
        None,
        WORD,
        SELECTION,
        "The version that a Delta or Iceberg table had at this time, like 2026-11-01T04:00:00Z.",
        empty="'' takes the newest again.",
        metavar="TIME",
    )


@dataclass(frozen=True, kw_only=True)
class RowGroupSize:
    row_group_size: int | None = remembered(
        None,
        SIZE,
        ROW_GROUPS,
        "Repartition fetched files so that no row group has more compressed bytes than this, like 128MB.",
        low=1,
    )


@dataclass(frozen=True, kw_only=True)
class Safety:
    """Protection of a cache from a bad night of its source."""

    keep: int = remembered(2, COUNT, SAFETY, "Snapshots to keep, including the current one.", low=1)
    max_delete: str = remembered(
        "50%",
        WORD,
        SAFETY,
        "Publish nothing if more than N files, or P percent of the rows, would be deleted.",
        metavar="N|P%",
    )
    checksum: bool = remembered(
        False,
        FLAG,
        SAFETY,
        "Compare every file with the store's checksum, if it has one, at the cost of some CPU time.",
    )
    skip_bad: bool = remembered(
        False,
        FLAG,
        SAFETY,
        "If new files of a partition are damaged, unreadable or have other types, keep its old version and publish the "
        "rest, with exit code 5. Default: publish nothing.",
    )
    time_units: Mapping[str, str] = remembered(
        NOTHING,
        PAIRS,
        SAFETY,
        "Store the times of a column in s, ms, us or ns, if all of them fit. Default: the finest unit of the first "
        "sync; files in a finer unit are refused.",
        empty="'' keeps the current unit.",
        metavar="COLUMN=UNIT,...",
    )
    ignore_case: bool = remembered(
        False,
        FLAG,
        SAFETY,
        "Treat columns, struct fields and partition keys whose names differ only in case as one, under the first "
        "spelling. Default: refuse them.",
    )
    expect: tuple[str, ...] = remembered(
        (),
        RULES,
        SAFETY,
        "A rule for new data, such as 'nulls.price < 1%' or 'rows per dt within 30% of the last 7'. If a rule fails, "
        "nothing is published, with exit code 6; with ': warn' at its end it only warns.",
        empty="'' removes all rules.",
    )


@dataclass(frozen=True, kw_only=True)
class Store:
    """How a source's store is reached."""

    options: Mapping[str, str] = remembered(
        NOTHING,
        SETTINGS,
        STORE,
        "An option of the store, like endpoint=http://host:9000. Secrets are not remembered.",
        flag="--option",
        short="-o",
    )
    hdfs_driver: str = remembered(
        HDFS_NATIVE,
        choice(HDFS_NATIVE, HDFS3),
        STORE,
        f"Client for hdfs:// sources: {HDFS_NATIVE} or {HDFS3}.",
        metavar="NAME",
    )


@dataclass(frozen=True, kw_only=True)
class Rewriting:
    """How row groups are written."""

    compression: str | None = remembered(
        None,
        TEXT,
        ROW_GROUPS,
        "zstd, zstd:LEVEL (1 to 22), lz4, snappy, none, or keep to keep the codec of each column. Default: lz4.",
        metavar="CODEC",
        completes="codec",
    )
    compat: bool = remembered(
        False,
        FLAG,
        ROW_GROUPS,
        "Write files that old readers understand: snappy, without DELTA and BYTE_STREAM_SPLIT encodings.",
    )
    shuffle: int | None = remembered(
        None, COUNT, ROW_GROUPS, "Shuffle the rows of each partition.", metavar="SEED", low=0
    )


@dataclass(frozen=True, kw_only=True)
class Remembered(Rewriting, Store, Safety, RowGroupSize, Selection):
    """The entries of ``pqcache.toml``."""

    source: str = remembered("", TEXT, SELECTION, "The URL or the absolute path of the source.")
    dense: Mapping[str, str] | None = remembered(
        None,
        PAIRS,
        ROW_GROUPS,
        'The dense columns with type and length, like tokens = "uint16[512]". An empty table converts all of them back '
        "to lists.",
    )
    keys: tuple[str, ...] = remembered((), NAMES, KEYS, "The columns with a key index in each new snapshot.")


# what a run is asked for


@dataclass(frozen=True, kw_only=True)
class Run:
    """Options of every run that changes a cache."""

    bwlimit: str | int | None = option(
        None,
        WORD,
        NETWORK,
        "Limit the bandwidth to bytes per second, like 100MB, or by the time of day: '08:00,10M 19:00,off'.",
        metavar="RATE",
    )
    wait: float = option(
        0.0, DURATION, EXECUTION, "Wait this long for another run to end, like 10m. Default: exit code 75 at once."
    )
    dry_run: bool = option(False, FLAG, EXECUTION, "Show the plan and change nothing.")


class Shared:
    """Options shared by several commands; none is remembered."""

    cache = argument("CACHE", "The cache: a path, or its name in $PQCACHE_ROOT.", completes="cache")
    snapshot = argument("SNAPSHOT", "The snapshot: its ID, its number, like 7, or its pin.", completes="snapshot")
    options = option(
        NOTHING, SETTINGS, STORE, "An option of the store, like endpoint=http://host:9000.", flag="--option", short="-o"
    )
    as_files = option(
        False,
        FLAG,
        SELECTION,
        "Take all Parquet files of a Delta, Iceberg, Hudi or transactional Hive table, of a Spark stream, or of "
        "several tables as they are.",
    )
    all_files = option(False, FLAG, SELECTION, "Take every file that is not hidden, whatever its name.")
    filters = option(
        None, TEXT, SELECTION, "Condition on the rows, like ParquetDataset(filters=).", metavar="CONDITION"
    )
    json = option(False, FLAG, OUTPUT, "Write one JSON object per event and a summary at the end.", scope=SHELL)
    quiet = option(False, FLAG, OUTPUT, "Print errors only.", scope=SHELL, short="-q")


@dataclass(frozen=True, kw_only=True)
class SyncRun(Run):
    """Options of one sync, beside those remembered by the cache."""

    force: bool = option(False, FLAG, SAFETY, "Publish even if more is deleted than --max-delete allows.")
    compare: str = option(
        IDENTITY,
        choice(IDENTITY, CONTENT),
        SAFETY,
        "How to recognize unchanged files: by size, time and tag, or also by their bytes or the store's MD5.",
    )
    new_source: bool = option(
        False,
        FLAG,
        SAFETY,
        "Accept another source than before, for example if a table has moved. Default: refuse it.",
    )
    retries: int | None = option(
        None, COUNT, STORE, "How many retries in a row may fail. Default: as many as --retry-for allows.", low=0
    )
    retry_for: float | None = option(
        None,
        DURATION,
        STORE,
        "How long to retry transient failures before exit code 75. Default: 10m, or a few seconds for the first "
        "contact of a new cache.",
    )
    timeout: float = option(
        TIMEOUT, DURATION, STORE, "How long a server may stay silent before it counts as unavailable.", low=0.1
    )
    fill: bool = option(
        False,
        FLAG,
        EXECUTION,
        "Let readers open the first copy while it arrives, and fetch first what they need. Has no effect once the "
        "cache has a snapshot.",
    )
    jobs: int = option(8, COUNT, EXECUTION, "Files fetched in parallel.", short="-j", low=1)


class OneOrAll:
    """The targets of a command that can work on many caches."""

    cache = argument("CACHE", "The cache: a path, or its name in $PQCACHE_ROOT.", default=None, completes="cache")
    all_caches = option(
        False,
        FLAG,
        EXECUTION,
        "Take all caches below the directory CACHE, one after the other. Default: $PQCACHE_ROOT, or ~/.cache/pqcache.",
        scope=SHELL,
        flag="--all",
    )


class SyncCommand:
    """Options that only the command has."""

    source = argument(
        "SOURCE",
        "A path or a URL: hdfs://, s3://, gs://, abfss://, http:// ... Or a cache alone, to repeat its sync.",
        default=None,
        completes="place",
    )
    cache = argument("CACHE", "The cache: a local path, or a name in $PQCACHE_ROOT.", default=None, completes="place")
    all_tables = option(
        False,
        FLAG,
        EXECUTION,
        "Sync all caches below the directory SOURCE, and the tables in its pqcache.toml, one after the other. Default: "
        "$PQCACHE_ROOT, or ~/.cache/pqcache.",
        scope=SHELL,
        flag="--all",
    )
    on_success = option(
        None, TEXT, EXECUTION, "Shell command to run after a successful sync.", scope=SHELL, metavar="COMMAND"
    )
    on_failure = option(
        None, TEXT, EXECUTION, "Shell command to run after a failed sync.", scope=SHELL, metavar="COMMAND"
    )
    metrics = option(
        None,
        PATH,
        OUTPUT,
        "Write metrics for the textfile collector of Prometheus' node_exporter.",
        scope=SHELL,
    )
    verbose = option(False, FLAG, OUTPUT, "List all partitions that change.", scope=SHELL)


class Repartition:
    source = argument("SOURCE", "A cache, a directory or a URL.", completes="cache")
    dest = argument(
        "DEST", "A new path, or an hdfs://, s3://, gs:// or az:// URL. Without it, rewrite the cache.", default=None
    )
    row_group_size = option(
        None,
        SIZE,
        ROW_GROUPS,
        "The largest row group in compressed bytes, like 64MB. Default: 128MB.",
        scope=REMEMBERED,
        low=1,
    )
    dense = option(
        None,
        COLUMNS,
        ROW_GROUPS,
        "Store lists of one length as fixed-length bytes, which read faster. 'auto' proposes columns, "
        "'none' converts all of them back to lists.",
        scope=REMEMBERED,
    )
    narrow = option(False, FLAG, ROW_GROUPS, "With --dense: use the smallest integer type that holds every value.")
    align = option(None, choice("block"), DESTINATION, "Let no row group of DEST cross the boundary of an HDFS block.")
    block_size = option(
        None, SIZE, DESTINATION, "Block size of DEST. Default: 128MB with --align, else that of the cluster."
    )
    scheduler = option(
        None,
        TEXT,
        EXECUTION,
        "Run on Dask (tcp://host:8786), Ray (ray://host:10001) or Spark (spark://host:7077, yarn).",
        metavar="URL",
    )
    jobs = option(8, COUNT, EXECUTION, "Partitions rewritten in parallel.", short="-j", low=1)


class Inspect:
    target = argument("TARGET", "A cache, a directory, a file or a URL.", completes="cache")
    block_size = option(
        None,
        SIZE,
        VIEW,
        "The size to compare row groups with. Default: the row-group size of a cache, the block size on HDFS, "
        "or 128MB.",
        low=1,
    )
    partitions = option(False, FLAG, VIEW, "Show all partitions.", scope=SHELL)
    columns = option(False, FLAG, VIEW, "Show only the columns, all of them.", scope=SHELL)
    schema = option(False, FLAG, VIEW, "Show column names and types.", scope=SHELL)
    files = option(False, FLAG, VIEW, "Show the files, each with its largest row group.", scope=SHELL)
    row_groups = option(False, FLAG, VIEW, "Show the row groups; '!' marks those above the size.", scope=SHELL)
    sample = option(None, COUNT, VIEW, "Show the first N rows of a local dataset.", low=1, scope=SHELL)
    diff = option(
        None, TWO, VIEW, "Show the difference between two snapshots of a cache.", metavar="OLD NEW", scope=SHELL
    )
    candidate = option(False, FLAG, VIEW, "Show the snapshot that waits to be published.")
    html = option(None, PATH, OUTPUT, "Write a self-contained HTML page with charts.", scope=SHELL)
    jobs = option(16, COUNT, EXECUTION, "Footers read in parallel.", short="-j", low=1)
    json = option(False, FLAG, OUTPUT, "Write JSON.", scope=SHELL)


class Rows:
    target = argument("TARGET", "A cache, a directory or a file.", completes="cache")
    proofs = argument("FILE", "With --prove: JSON files of loader.proof() or its states, of all ranks.", PATHS, None)
    state = option(
        None, PATH, SELECTION, "A JSON file with a saved state of the training: json.dumps(loader.state_dict())."
    )
    batch = option(None, COUNT, SELECTION, "The number of the batch in its epoch, counted over all ranks: batch.index.")
    last = option(
        None, COUNT, SELECTION, "Instead of --batch: the last N batches before the state, of all ranks.", low=1
    )
    prove = option(
        False,
        FLAG,
        SELECTION,
        "Instead of --state: check that the epoch of the proofs in the files had every row exactly once; exit code "
        "1 if not.",
    )
    epoch = option(None, COUNT, SELECTION, "The epoch of the batch. Default: that of the state.", low=0)
    split = option(
        None,
        TEXT,
        SELECTION,
        "The split of the training, like user:0.0:0.9, or with a salt user:0.0:0.9:SALT. Without a KEY, rows "
        "are split.",
        metavar="KEY:LOW:HIGH",
    )
    weights = option(None, TEXT, SELECTION, "The column of weights of the training.", metavar="COLUMN")
    balance = option(None, TEXT, SELECTION, "The column that the training balances.", metavar="COLUMN")
    sample_share = option(
        None, NUMBER, SELECTION, "The share of rows that the training samples, its sample=.", metavar="SHARE"
    )
    limit = option(None, COUNT, SELECTION, "The most rows that the training takes, its limit=.")
    pack = option(
        None,
        TEXT,
        SELECTION,
        "How the training packs, like tokens:4096, with fields tokens,labels:4096, or with best-fit "
        "tokens:4096:best_fit.",
        metavar="COLUMN:LENGTH",
    )
    sample = option(False, FLAG, VIEW, "Read the rows and show their values.")
    columns = option(None, NAMES, VIEW, "Show only these columns.")
    json = option(False, FLAG, OUTPUT, "Write one JSON object per row, or one for --prove.", scope=SHELL)


class Verify:
    deep = option(False, FLAG, CHECKS, "Also compare checksums, decode every page, and check the statistics.")
    source = option(False, FLAG, CHECKS, "Also report files that have changed at the source.")
    compare = option(
        IDENTITY,
        choice(IDENTITY, CONTENT),
        CHECKS,
        "How --source compares files: by size, time and tag, or also by content, which implies --source.",
    )
    engine = option(
        None, choice("fastparquet"), CHECKS, "Also compare every value with what fastparquet reads. Implies --deep."
    )
    repair = option(False, FLAG, CHECKS, "Fetch damaged files again and publish a new snapshot.")
    jobs = option(None, COUNT, EXECUTION, "Reading processes. Default: one per core.", short="-j", low=1)


class Index:
    keys = option((), COLUMNS, KEYS, "Build a key index of this column.", flag="--key")
    drop = option((), COLUMNS, KEYS, "Remove the key index of this column, also from later snapshots.")
    jobs = option(
        None, COUNT, EXECUTION, "Threads that read and sort. Default: one per core, at most 4.", short="-j", low=1
    )


class Bench:
    target = argument("TARGET", "A cache, a directory or a file.", completes="cache")
    columns = option(None, NAMES, SELECTION, "Columns to read. Default: all.")
    batch_size = option(256, COUNT, EXECUTION, "Rows per batch.", low=1)
    memory = option(
        "2GB", WORD, EXECUTION, "Memory for decoded row groups, like ParquetDataset(memory=).", metavar="SIZE"
    )
    workers = option(None, COUNTS, EXECUTION, "Numbers of DataLoader workers to try. Default: 0, 1, 2, 4 ... cores.")
    seconds = option(2.0, DURATION, EXECUTION, "How long to measure each setting.", low=0.01)
    json = option(False, FLAG, OUTPUT, "Write one JSON object.", scope=SHELL)


class Gc:
    keep = option(
        None,
        COUNT,
        SAFETY,
        "Snapshots to keep, including the current one. Default: the number that the cache remembers.",
        low=1,
    )
    older_than = option(0.0, DURATION, SAFETY, "Remove only snapshots older than this, like 48h.")


class Log:
    last = option(20, COUNT, None, "Number of runs to show.", short="-n", low=1)
    json = option(False, FLAG, None, "Write one JSON object per run.", scope=SHELL)


class Add:
    source = argument("SOURCE", "A path or a URL, as for sync.")
    name = argument("NAME", "The cache's name. Default: the last part of SOURCE.", default=None)


class Root:
    root = option(
        None,
        PATH,
        DESTINATION,
        "The directory of the caches. Default: $PQCACHE_ROOT, or ~/.cache/pqcache.",
        metavar="ROOT",
    )


class Remove:
    name = argument("NAME", "The cache's name, or its path.", completes="place")
    force = option(
        False, FLAG, SAFETY, "Do not ask, and remove it even if it has readers, pinned snapshots or other files."
    )
    yes = option(False, FLAG, SAFETY, "Do not ask.", short="-y")
    json = option(False, FLAG, OUTPUT, "Write JSON.", scope=SHELL)


class Status:
    roots = argument(
        "ROOT",
        "A directory with caches below it, or a cache. Default: $PQCACHE_ROOT, or ~/.cache/pqcache.",
        TEXTS,
        default=None,
        completes="cache",
    )
    max_age = option(
        None,
        DURATION,
        None,
        "Exit with code 1 if the data of a cache is older than this, like 30h, or a declared table has no data.",
    )
    json = option(False, FLAG, None, "Write one JSON object per cache.", scope=SHELL)


class Serve:
    caches = argument("CACHE", "The caches: paths, or names in $PQCACHE_ROOT.", PATHS, completes="cache")
    bind = option(
        "127.0.0.1",
        TEXT,
        NETWORK,
        "The address to listen on. An address that other machines can reach requires a token.",
        metavar="ADDRESS",
    )
    port = option(8700, COUNT, NETWORK, "The port, or 0 for any free one.", low=0)
    token_file = option(
        None,
        PATH,
        NETWORK,
        "A file with the token that clients must send. Default: the variable PQCACHE_TOKEN, or no token.",
    )
    connections = option(256, COUNT, NETWORK, "The most clients to serve at once.", low=1)


class Pin:
    name = option(None, TEXT, SAFETY, "A name to open the snapshot by.", metavar="NAME")


class Rollback:
    snapshot = argument(
        "SNAPSHOT", "The snapshot: its ID, its number, like 7, or its pin.", default=None, completes="snapshot"
    )
    hold = option(
        False,
        FLAG,
        SAFETY,
        "Publish nothing until --release: syncs only prepare a candidate. Without SNAPSHOT, stay at the current one.",
    )
    release = option(False, FLAG, SAFETY, "Publish the candidate, if there is one, and end --hold.")
    accept = option(False, FLAG, SAFETY, "Like --release, even if the candidate does not meet the rules.")


class Snapshots:
    json = option(False, FLAG, OUTPUT, "Write one JSON object per snapshot.", scope=SHELL)


class Demo:
    directory = argument(
        "DIRECTORY",
        "Where to leave its files: a new or empty directory, or one of an earlier demo.",
        PATH,
        default=Path("pqcache-demo"),
    )


class Help:
    command = argument("COMMAND", "A command. Without it, list all commands.", default=None, completes="command")


PLAIN = ("json", "quiet")
COMMANDS: Mapping[str, tuple[type | str, ...]] = MappingProxyType(
    {
        "sync": (SyncCommand, Selection, RowGroupSize, Safety, Store, SyncRun, *PLAIN),
        "repartition": (
            Repartition,
            Rewriting,
            "as_files",
            "all_files",
            "options",
            "wait",
            "bwlimit",
            "dry_run",
            *PLAIN,
        ),
        "inspect": (Inspect, "as_files", "all_files", "options"),
        "rows": (Rows, "filters"),
        "verify": (OneOrAll, Verify, "options", "wait", "bwlimit", *PLAIN),
        "index": ("cache", Index, "wait", *PLAIN),
        "bench": (Bench, "filters", "as_files", "all_files", "quiet"),
        "gc": (OneOrAll, Gc, "wait", "dry_run", *PLAIN),
        "log": (OneOrAll, Log),
        "add": (Add, Root, "options"),
        "remove": (Remove, Root, "wait", "dry_run"),
        "status": (Status,),
        "serve": (Serve, "quiet"),
        "snapshots": ("cache", Snapshots),
        "pin": ("cache", "snapshot", Pin, "wait", *PLAIN),
        "unpin": ("cache", "snapshot", "wait", *PLAIN),
        "rollback": ("cache", Rollback, "wait", *PLAIN),
        "demo": (Demo,),
        "help": (Help,),
    }
)


# what Python's type checkers know of the options that functions take as keywords


class SyncRunArguments(TypedDict, total=False):
    force: bool
    compare: str
    new_source: bool
    retries: str | int | None
    retry_for: str | float | None
    timeout: str | float
    fill: bool
    jobs: str | int
    bwlimit: str | int | None
    wait: str | float
    dry_run: bool


class SyncArguments(SyncRunArguments, total=False):
    where: str | None
    columns: Sequence[str] | None
    newest: str | int | None
    shard: str | None
    marker: str | None
    settle: str | float | None
    partition_types: Mapping[str, str] | None
    as_files: bool | None
    all_files: bool | None
    version: str | int | None
    as_of: str | None
    row_group_size: str | int | None
    keep: str | int | None
    max_delete: str | int | None
    checksum: bool | None
    skip_bad: bool | None
    time_units: Mapping[str, str] | None
    ignore_case: bool | None
    expect: Sequence[str] | None
    options: Mapping[str, str] | None
    hdfs_driver: str | None


class VerifyArguments(TypedDict, total=False):
    deep: bool
    source: bool
    compare: str
    engine: str | None
    repair: bool
    jobs: str | int | None
    options: Mapping[str, str] | None
    wait: str | float
    bwlimit: str | int | None


class IndexArguments(TypedDict, total=False):
    keys: Sequence[str]
    drop: Sequence[str]
    jobs: str | int | None
    wait: str | float


class BenchArguments(TypedDict, total=False):
    columns: Sequence[str] | None
    batch_size: str | int
    memory: str | int
    workers: Sequence[int] | None
    seconds: str | float
    filters: str | None
    as_files: bool
    all_files: bool


class GcArguments(TypedDict, total=False):
    keep: str | int | None
    older_than: str | float
    wait: str | float
    dry_run: bool


class RollbackArguments(TypedDict, total=False):
    hold: bool
    release: bool
    accept: bool
    wait: str | float


class ServeArguments(TypedDict, total=False):
    bind: str
    port: str | int
    token_file: str | os.PathLike[str] | None
    connections: str | int


class InspectArguments(TypedDict, total=False):
    block_size: str | int | None
    candidate: bool
    jobs: str | int
    as_files: bool
    all_files: bool
    options: Mapping[str, str] | None


class RepartitionArguments(TypedDict, total=False):
    row_group_size: str | int | None
    dense: Sequence[str] | None
    narrow: bool
    align: str | None
    block_size: str | int | None
    scheduler: str | None
    jobs: str | int
    compression: str | None
    compat: bool | None
    shuffle: str | int | None
    as_files: bool
    all_files: bool
    options: Mapping[str, str] | None
    wait: str | float
    bwlimit: str | int | None
    dry_run: bool
