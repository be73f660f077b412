"""What comes before a line that no person sees at once: when it was written, and of which cache it speaks.

Runs of many caches append to one log file, so there a line of a run begins with ``2026-11-20T04:00:03Z shop: ``.
"""

from __future__ import annotations

import os
from datetime import datetime, timezone
from typing import TextIO

_name = ""
_always = False


def name_lines(cache: str | os.PathLike[str], always: bool = False) -> None:
    """Name the cache, or the target, that lines speak of from now on; with ``always`` also on a terminal.

    An empty text names none.
    """
    global _name, _always
    text = os.fspath(cache)
    if not text:
        _name = ""
        return
    from pqcache.store.urls import printable, redact, url_scheme  # not for a command that only shows its version

    place = redact(text).rstrip("/") if url_scheme(text) else os.path.abspath(text)
    _name, _always = printable(place.rpartition("/")[2] or place), always


def line_prefix(stream: TextIO) -> str:
    """Return what a line on ``stream`` begins with: nothing on a terminal, nor before a cache is named."""
    if not _name:
        return ""
    if stream.isatty():
        return f"{_name}: " if _always else ""
    return f"{datetime.now(timezone.utc):%Y-%m-%dT%H:%M:%SZ} {_name}: "
