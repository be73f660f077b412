"""A row group in the making: its rows, slice by slice, and what encodes them."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

from pqcache.parquet.encodings import Encodings
from pqcache.parquet.rewrite.concat_chunks import Part, encode
from pqcache.parquet.rewrite.file_writer import Layout, form_of
from pqcache.parquet.rewrite.source_reader import Piece
from pqcache.parquet.rewrite.split_work import dealt
from pqcache.parquet.sizes import Floats
from pqcache.system.buffer_pool import BufferPool

MAX_ROWS = 64 << 20  # pyarrow splits larger row groups by itself
PAGE_HEADER = 64  # bytes, about

Encoded = list[tuple[list[int], Part]]
"""Encoded columns: each part with its leaf columns."""


@dataclass
class Slice:
    """Some rows of a row group: its columns that are encoded in slices, and all of them as they were decoded."""

    rows: int
    size: int
    parts: Encoded
    pieces: list[Piece]


@dataclass(kw_only=True)
class Group:
    """A row group in the making.

    Attributes:
        sliced: columns whose pages can be added slice by slice.
        whole: columns with a dictionary, which are encoded when it is known which rows there will be.
        size: bytes of the ``slices``.
        weights: of all rows so far; ``held`` are their decoded bytes.
        most: rows that the next slice may have, after one was too large; None for any number.
        wanting: it has to grow, whatever is guessed.
        probed: its encodings were chosen from its own rows.
        fits, over: rows with which the row group is known to fit, and not to fit.
        tries: how often ``whole`` has been encoded.
        force: add so many rows, whatever is guessed.
    """

    sliced: list[int]
    whole: list[int]
    slices: list[Slice] = field(default_factory=list)
    rows: int = 0
    size: int = 0
    weights: Floats | float = 0.0
    held: int = 0
    most: int | None = None
    failed: int = 0
    fits: int = 0
    over: int | None = None
    tries: int = 0
    wanting: bool = False
    probed: bool = False
    force: int = 0


class Encoder:
    """Encodes rows of a `Layout` with ``encodings``, which may be changed between row groups; errors blame ``name``.

    ``dictionaries`` are the most values of each column that arrives with a dictionary. ``encoded`` counts
    compressed bytes, ``again`` those of them that were encoded more than once.
    """

    def __init__(self, layout: Layout, plain: Encodings, name: str, executor: Executor) -> None:
        self.encodings, self.name, self.executor = plain, name, executor
        self.types = layout.working.types
        self.form = form_of(layout, plain)
        self.dictionaries: dict[str, int] = {}
        self.memory = BufferPool()
        self.encoded = self.again = 0

    def part(self, table: pa.Table) -> Part:
        """Return ``table`` encoded."""
        found = encode(table, self.encodings, self.name, self.memory)
        self.encoded += found.size
        return found

    def parts(
        self,
        pieces: Sequence[Piece],
        columns: Sequence[int],
        halves: bool = False,
        encodings: Encodings | None = None,
    ) -> Encoded:
        """Return ``columns`` of ``pieces``, encoded on as many threads as help, each part with its leaf columns.

        With ``halves`` a column may come in two parts, the one with the first rows first. ``encodings`` are
        others than its own.
        """
        how = encodings or self.encodings
        if not columns:
            return []
        table = pa.concat_tables([piece.table.select(list(columns)) for piece in pieces])
        if any(pt.is_dictionary(column.type) for column in table.schema):
            table = table.unify_dictionaries()  # a second dictionary would make the writer fall back to plain
            self.note_dictionaries(table)
        sizes = np.sum([piece.weights for piece in pieces], axis=0)[list(columns)]
        tasks = dealt(table, sizes, how, halves)
        run = map if len(tasks) == 1 else self.executor.map  # another thread would only be waited for
        parts = list(run(lambda task: encode(task[0], how, self.name, self.memory), tasks))
        self.encoded += sum(part.size for part in parts)
        leaves = [self.leaves([columns[n] for n in share]) for _, share in tasks]
        return list(zip(leaves, parts, strict=True))

    def note_dictionaries(self, table: pa.Table, names: Sequence[str] | None = None) -> None:
        """Remember how large the dictionaries of ``table`` are, or of its columns ``names``."""
        for name, column in zip(table.schema.names, table.columns, strict=True):
            if pt.is_dictionary(column.type) and column.num_chunks and (names is None or name in names):
                self.dictionaries[name] = max(self.dictionaries.get(name, 0), len(column.chunk(0).dictionary))

    def leaves(self, columns: Sequence[int]) -> list[int]:
        """Return the leaf columns of top-level columns."""
        return [int(leaf) for n in columns for leaf in np.flatnonzero(self.form.tops == n)]

    def by_column(self, leaves: Sequence[int], sizes: Sequence[float]) -> Floats:
        """Return sizes of leaf columns summed by top-level column."""
        tops = self.form.tops[list(leaves)]
        return np.bincount(tops, weights=sizes, minlength=len(self.types)).astype(np.float64)

    def taken(self, parts: Encoded) -> Floats:
        """Return the bytes that parts take by top-level column."""
        leaves = [leaf for some, _ in parts for leaf in some]
        return self.by_column(leaves, [chunk.size for _, part in parts for chunk in part.chunks])
