"""What the shell proposes for a word that is being typed: values, caches, snapshots, commands."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import typer

from pqcache.errors import PqcacheError
from pqcache.options import COMMANDS, Option

Proposals = Callable[[Any, list[str], str], list[str]]


def proposals_for(option: Option) -> Proposals:
    """What Typer calls with the context, the words, and the beginning of the word."""
    known: Callable[[Any, str], Iterator[str]] = {
        "cache": _caches,
        "snapshot": _snapshots,
        "codec": lambda *_: iter(("zstd", "lz4", "snappy", "none", "keep")),
        "command": lambda *_: iter(COMMANDS),
    }.get(option.completes, lambda *_: iter(option.kind.values))

    def proposals(context: typer.Context, args: list[str], incomplete: str) -> list[str]:  # the names that Typer knows
        return sorted({word for word in known(context, incomplete) if word.startswith(incomplete)})

    return proposals


def _caches(_: Any, typed: str) -> Iterator[str]:
    """Caches and other directories below the one that is typed, and without one the caches of $PQCACHE_ROOT."""
    from pqcache.store.layout import CONFIG

    above = typed.rpartition("/")[0] + "/" if "/" in typed else ""
    with suppress(OSError):
        for entry in os.scandir(above or "."):
            if entry.is_dir() and (typed.endswith(".") or not entry.name.startswith(".")):
                yield above + entry.name + ("" if (Path(entry.path) / CONFIG).is_file() else "/")
    root = os.environ.get("PQCACHE_ROOT")
    if root and not typed:
        yield from (str(path.parent) for path in Path(root).glob(f"*/{CONFIG}"))


def _snapshots(context: Any, _: str) -> Iterator[str]:
    """The IDs and pins of the cache that was named before."""
    from pqcache.store.cache_directory import CacheDirectory, cache_path
    from pqcache.store.pins import read_kept

    with suppress(PqcacheError, OSError):
        cache = CacheDirectory(cache_path(context.params["cache"]))
        yield from (snapshot.id for snapshot in cache.snapshots())
        yield from filter(None, read_kept(cache.path).pins.values())
