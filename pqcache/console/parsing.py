"""Turns the text of options into values; what makes no sense raises UsageError with the name of the option."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pqcache.errors import UsageError
from pqcache.units import parse_size

if TYPE_CHECKING:
    from pqcache.reader.packing.pack import Pack
    from pqcache.reader.selection.split import Split


def required(name: str, value: str | None) -> str:
    """Return the value of an argument that may be absent only with some option; else raise UsageError."""
    if value is None:
        raise UsageError("", f"Missing argument '{name}'", "'pqcache sync -h' shows the usage")
    return value


def column_names(text: str | None) -> list[str] | None:
    """Return the names in a comma-separated list; None if the option is absent."""
    return None if text is None else [name.strip() for name in text.split(",") if name.strip()]


def partition_types(text: str | None) -> dict[str, str] | None:
    """Return the types of ``--partition-types`` by name; None if it is absent."""
    if text is None:
        return None
    pairs = (pair.rpartition("=") for pair in column_names(text) or ())
    types = {name.strip(): kind.strip() for name, _, kind in pairs}
    if "" in types:
        raise UsageError(f"--partition-types {text!r}", "not NAME=TYPE,...", "write it like hour=int,dt=date")
    return types


def worker_counts(text: str | None) -> list[int] | None:
    """Return the numbers of ``--workers``; None if it is absent."""
    if text is None:
        return None
    for word in text.split(","):
        if not word.strip().isdigit():
            raise UsageError(f"--workers {word!r}", "not a number of workers", "write numbers, like 0,2,4")
    return [int(word) for word in text.split(",")]


def split_of(text: str | None) -> Split | None:
    """Return the split that ``--split`` names; None if it is absent."""
    if text is None:
        return None
    from pqcache.reader.selection.split import Split

    parts = text.split(":", 3)
    try:
        key, low, high, salt = [*parts, ""][:4]
        ends = float(low), float(high)
    except ValueError as error:
        raise UsageError(f"--split {text!r}", "not KEY:LOW:HIGH", "write it like user:0.0:0.9") from error
    return Split(key or None, *ends, salt=salt)


def pack_of(text: str | None) -> Pack | None:
    """Return how ``--pack`` packs documents; None if it is absent."""
    if text is None:
        return None
    from pqcache.reader.packing.pack import Pack

    columns, _, rest = text.partition(":")
    length, _, strategy = rest.partition(":")
    column, *fields = column_names(columns) or [""]
    if not column or not length.isdigit():
        raise UsageError(f"--pack {text!r}", "not COLUMN:LENGTH", "write it like tokens:4096")
    return Pack(column, int(length), strategy=strategy or "concat", fields=fields)  # type: ignore[arg-type]


def row_group_bytes(option: str, text: str | None) -> int | None:
    """Return the size of a row group in bytes; None if the option is absent."""
    if text is None:
        return None
    size = parse_size(text)
    if size < 1:
        raise UsageError(f"{option} {text}", "too small for a row group", "write a size, like 128MB")
    return size


def dense_columns(names: list[str] | None) -> list[str] | None:
    """Return the columns of ``--dense``; empty for 'none', None if it is absent."""
    if names == ["none"]:
        return []
    if names and (keyword := {"auto", "none"}.intersection(names)):
        raise UsageError(f"--dense {keyword.pop()}", "excludes other columns", "give it alone")
    return names or None


def store_options(pairs: list[str] | None) -> dict[str, str]:
    """Return the options of the store as a dict."""
    options = {}
    for pair in pairs or ():
        key, equals, value = pair.partition("=")
        if not (key and equals):
            raise UsageError(f"-o {key}", "not a key with a value", "write it as KEY=VALUE")
        options[key] = value
    return options


def time_units(text: str | None) -> dict[str, str] | None:
    """Return the units of ``--time-units`` by column; None if it is absent."""
    pairs = [item.strip().rpartition("=") for item in (text or "").split(",") if item.strip()]
    if any(not name or not unit for name, _, unit in pairs):
        raise UsageError(f"--time-units {text!r}", "not COLUMN=UNIT", "write it like ts=us")
    return None if text is None else {name: unit for name, _, unit in pairs}


def chosen_view(views: dict[str, Any]) -> str | None:
    """Return the name of the one option that is set, or None; they exclude one another."""
    chosen = [name for name, value in views.items() if value]
    if len(chosen) > 1:
        raise UsageError(f"--{chosen[0]} and --{chosen[1]}", "exclude each other", "choose one of them")
    return chosen[0] if chosen else None
