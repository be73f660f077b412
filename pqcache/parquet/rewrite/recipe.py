"""Options of rewriting a partition directory, and the recipe in which a rewritten file remembers them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from pqcache.errors import UsageError
from pqcache.parquet.footer import MAGIC
from pqcache.units import format_size

if TYPE_CHECKING:
    from pqcache.parquet.dense import Dense

_COMPRESSIONS = ("zstd", "lz4", "snappy", "none", "keep")  # the last one takes the source's
DEFAULT_CODEC, COMPAT_CODEC = "lz4", "snappy"
_LEVELS = {"zstd": range(1, 23)}
_MIN_ROW_GROUP = 4 << 10
_MAX_SEED = 2**63 - 1
_ROW_GROUP_SIZE, _SHUFFLE = "row_group_size", "shuffle"  # of a recipe


@dataclass(frozen=True, kw_only=True)
class RewriteOptions:
    """How a directory is rewritten.

    Attributes:
        row_group_size: the maximal compressed size of a row group, in bytes.
        compression: codec for columns that it shrinks; ``keep`` takes each column's codec from the source. None is
            lz4 for files that are rewritten, and leaves files that fit as they are.
        compression_level: for zstd (1 to 22).
        compat: plain and dictionary encodings only, for readers of ten years ago, and snappy unless ``compression``
            says otherwise.
        dense: columns to store as fixed-length bytes, by name; all others are lists. None leaves each as it is.
        shuffle: a seed to permute the rows with; None keeps their order.
        block_size: no row group crosses a multiple of this many bytes of its file; None for no blocks.
    """

    row_group_size: int
    compression: str | None = None
    compression_level: int | None = None
    compat: bool = False
    dense: tuple[tuple[str, Dense], ...] | None = None
    shuffle: int | None = None
    block_size: int | None = None

    def __post_init__(self) -> None:
        if self.row_group_size < _MIN_ROW_GROUP:
            raise UsageError(
                f"row-group size {self.row_group_size}", f"give at least {_MIN_ROW_GROUP} bytes, like 128MB"
            )
        if self.compression is not None and self.compression not in _COMPRESSIONS:
            raise UsageError(
                f"compression {self.compression!r}", f"choose one of zstd[:LEVEL], {', '.join(_COMPRESSIONS[1:])}"
            )
        levels = _LEVELS.get(self.compression or "", range(0))
        if self.compression_level is not None and self.compression_level not in levels:
            allowed = f"levels {levels[0]} to {levels[-1]}" if levels else "no level"
            raise UsageError(f"compression level {self.compression_level}", f"{self.compression} takes {allowed}")
        if self.shuffle is not None and not 0 <= self.shuffle <= _MAX_SEED:
            raise UsageError(f"shuffle {self.shuffle}", f"the seed has to be a whole number from 0 to {_MAX_SEED}")
        if self.block_size is not None and self.row_group_size > self.block_size:
            raise UsageError(
                f"row-group size {format_size(self.row_group_size)}",
                f"does not fit into a block of {format_size(self.block_size)}",
                "make it smaller, or the block size larger",
            )

    @property
    def limit(self) -> int:
        """The maximal compressed size of a row group; in a block, it leaves room for the first bytes of a file."""
        if self.block_size is None:
            return self.row_group_size
        return min(self.row_group_size, (self.block_size - len(MAGIC)) // (self.block_size // self.row_group_size))

    @property
    def codec(self) -> str:
        return self.compression or (COMPAT_CODEC if self.compat else DEFAULT_CODEC)

    @property
    def recipe(self) -> str:
        """These options as canonical JSON without defaults; equal recipes make equal files."""
        values: dict[str, Any] = {_ROW_GROUP_SIZE: self.row_group_size}
        if self.shuffle is not None:
            values[_SHUFFLE] = self.shuffle
        if self.compression is not None:
            values["compression"] = compression_text(self.compression, self.compression_level)
        if self.compat:
            values["compat"] = True
        if self.dense is not None:
            values["dense"] = {name: kind.text for name, kind in self.dense}
        return canonical_json(values)


def canonical_json(values: Mapping[str, Any]) -> str:
    """JSON with sorted keys and no spaces, so that equal values give equal texts."""
    return json.dumps(values, sort_keys=True, separators=(",", ":"))


def parse_compression(text: str) -> tuple[str, int | None]:
    """Split a text like ``lz4`` or ``zstd:3``; raises UsageError if the level isn't a number."""
    codec, colon, level = text.strip().lower().partition(":")
    if colon and not re.fullmatch(r"-?\d{1,9}", level):
        raise UsageError(f"compression {text!r}", "the level has to be a whole number, as in zstd:3")
    return codec, int(level) if colon else None


def compression_text(codec: str, level: int | None) -> str:
    """Inverse of `parse_compression`."""
    return codec if level is None else f"{codec}:{level}"


@lru_cache(maxsize=64)
def shuffle_of(recipe: str) -> int | None:
    """The seed in a `RewriteOptions.recipe`; None without one."""
    seed: int | None = json.loads(recipe or "{}").get(_SHUFFLE)
    return seed


def differ_in_size_only(recipe: str, other: str) -> bool:
    """Whether two recipes differ at most in the row-group size; empty recipes never match."""
    one, two = ({**json.loads(text), _ROW_GROUP_SIZE: 0} if text else None for text in (recipe, other))
    return one is not None and one == two
