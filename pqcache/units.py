"""Parses sizes, durations, counts and lists of names as users write them, and formats values for people."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from typing import Any, TypeGuard
from urllib.parse import quote

from pqcache.errors import UsageError

_SUFFIX = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5, "e": 6}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgtpe]?)(?:i?b)?\s*", re.IGNORECASE)
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
_DURATION = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([smhd]?)\s*", re.IGNORECASE)

_UNSAFE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069]")

BLOCK_SIZE = 128 << 20  # bytes: the default block of HDFS, and what row groups are made to fill


def is_number(value: Any) -> TypeGuard[float]:
    """Whether a value is a number, Python's or numpy's."""
    return isinstance(value, Real) and not isinstance(value, bool)


def is_whole(value: Any) -> bool:
    """Whether a value is an integer, Python's or numpy's."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def parse_names(option: str, names: Any) -> tuple[str, ...]:
    """The names in a list, generator or other iterable of ``str``; raises UsageError for other values.

    >>> parse_names("columns", (name for name in ("id", "price")))
    ('id', 'price')
    """
    if not isinstance(names, str | bytes | Mapping) and isinstance(names, Iterable):
        names = tuple(names)
        if all(isinstance(name, str) for name in names):
            return tuple(map(str, names))
    example = names if isinstance(names, str) else "id"
    raise UsageError(f"{option}={names!r}", "not a list of names", f"give one, like [{example!r}]")


def parse_size(text: str | int) -> int:
    """Parse a number of bytes; units are powers of 1024, as in Hadoop.

    >>> parse_size("128MB") == parse_size("128MiB") == parse_size("128m") == 134_217_728
    True
    """
    if is_number(text) and math.isfinite(text):
        return int(text)
    match = _SIZE.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise UsageError(repr(text), "not a size", "write it like 128MB, 64m or 134217728")
    return int(float(match[1]) * 1024 ** _SUFFIX[match[2].lower()])


def parse_duration(text: str | float) -> float:
    """Parse a number of seconds.

    >>> parse_duration("10m"), parse_duration("48h"), parse_duration(2.5)
    (600.0, 172800.0, 2.5)
    """
    if is_number(text):
        if not text >= 0:
            raise UsageError(repr(text), "not a duration", "give a number of seconds of at least 0")
        return float(text)
    match = _DURATION.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise UsageError(repr(text), "not a duration", "write it like 90s, 10m, 48h or 2d")
    return float(match[1]) * _SECONDS[match[2].lower()]


def parse_count(text: str | int) -> int:
    """Parse a whole number.

    >>> parse_count("8"), parse_count("100_000"), parse_count(8)
    (8, 100000, 8)
    """
    if not isinstance(text, str):
        return text  # whoever takes it says what a number may be
    try:
        return int(text)
    except ValueError:
        raise UsageError(repr(text), "not a whole number", "write it like 8") from None


def format_size(size: float) -> str:
    """Format a number of bytes for people, in powers of 1024, like Hadoop's tools.

    >>> format_size(134_217_728), format_size(999), format_size(1536)
    ('128 MB', '999 B', '1.5 KB')
    """
    value = float(size)
    for unit in ("B", "KB", "MB", "GB", "TB", "PB"):
        if abs(value) < 1023.95 or unit == "PB":
            break
        value /= 1024
    digits = 0 if unit == "B" or value >= 100 or value == int(value) else 1
    return f"{value:.{digits}f} {unit}"


def size_word(size: int) -> str:
    """Format a number of bytes for an option, as a word that ``parse_size`` maps to the same number.

    >>> size_word(8 << 20), size_word((8 << 20) + 1)
    ('8MB', '8388609')
    """
    text = format_size(size).replace(" ", "")
    return text if parse_size(text) == size else str(size)


def format_count(count: int, noun: str, plural: str | None = None) -> str:
    """Format a count with its noun.

    >>> format_count(1, "file"), format_count(20_000, "row"), format_count(2, "entry", "entries")
    ('1 file', '20,000 rows', '2 entries')
    """
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def format_seconds(seconds: float) -> str:
    """Format a duration for people.

    >>> format_seconds(0.25), format_seconds(75), format_seconds(7300), format_seconds(200_000)
    ('0.2 s', '1 min 15 s', '2 h 1 min', '2 d 7 h')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    total = int(seconds)
    if total < 3600:
        return f"{total // 60} min {total % 60} s"
    if total < 86400:
        return f"{total // 3600} h {total % 3600 // 60} min"
    return f"{total // 86400} d {total % 86400 // 3600} h"


class Stopwatch:
    """Measures the seconds since it was made."""

    def __init__(self) -> None:
        self._start = time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds since the start, rounded to milliseconds."""
        return round(time.monotonic() - self._start, 3)


def printable(text: str) -> str:
    """Percent-encode characters that control a terminal."""
    shown = text.encode("utf-8", "backslashreplace").decode()
    return _UNSAFE.sub(lambda match: quote(match[0], safe=""), shown)


def printable_json(text: str) -> str:
    """Escape characters that control a terminal, without changing the JSON value."""
    shown = text.encode("utf-8", "backslashreplace").decode()
    return _UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", shown)
