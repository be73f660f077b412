"""The columns that can be dense as text."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pqcache.console.terminal import print_line

if TYPE_CHECKING:
    from pqcache.store.repartition.dense_proposals import Proposal


def print_proposals(source: str, dest: object, proposals: Sequence[Proposal]) -> None:
    """Print the columns that can be dense, and the command that converts them."""
    if not proposals:
        print_line("no list column has one length in all rows, by the footers and the first rows")
        return
    for item in proposals:
        smaller = f", or {item.narrow} with --narrow" if item.narrow != item.dense else ""
        print_line(f"{item.column}: {item.type} can be stored as {item.dense}{smaller}")
    from pqcache.store.cache_directory import cache_at  # imports pyarrow, which an error does not need

    where = [str(dest)] if dest is not None else [] if cache_at(source) is not None else ["DEST"]
    words = ["pqcache", "repartition", source, *where]
    words += [word for item in proposals for word in ("--dense", item.column)]
    words += ["--narrow"] if any(item.narrow != item.dense for item in proposals) else []
    print_line(f"command: {shlex.join(words)}")
