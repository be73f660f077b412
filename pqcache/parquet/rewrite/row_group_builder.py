"""A row group being built, part by part, and what encodes its rows."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

from pqcache.parquet.arrow_sizes import Floats
from pqcache.parquet.encodings import Encodings
from pqcache.parquet.rewrite.concat_chunks import EncodedRows, encode_rows
from pqcache.parquet.rewrite.file_writer import OutputSchema, footer_schema_of
from pqcache.parquet.rewrite.source_reader import RowBatch
from pqcache.parquet.rewrite.split_work import split_work
from pqcache.system.buffer_pool import BufferPool

MAX_ROWS = 64 << 20  # pyarrow splits larger row groups by itself
PAGE_HEADER = 64  # bytes, about

Encoded = list[tuple[list[int], EncodedRows]]
"""Encoded columns: each part with its leaf columns."""


@dataclass
class RowGroupPart:
    """Some rows of a row group: its appendable columns, encoded, and all columns as they were decoded."""

    rows: int
    size: int
    encoded: Encoded
    batches: list[RowBatch]


@dataclass(kw_only=True)
class OpenRowGroup:
    """A row group being built.

    Attributes:
        appendable: columns without a dictionary, whose pages can be added part by part.
        dictionary: columns with a dictionary, which are encoded when it is known which rows there will be.
        size: bytes of the ``parts``.
        weights: of all rows so far; ``held`` are their decoded bytes.
        most: rows that the next part may have, after one was too large; None for any number.
        wanting: it has to grow, whatever the estimate.
        probed: its encodings were chosen from its own rows.
        fits, over: rows with which the row group is known to fit, and not to fit.
        tries: how often the ``dictionary`` columns have been encoded.
        force: add so many rows, whatever the estimate.
    """

    appendable: list[int]
    dictionary: list[int]
    parts: list[RowGroupPart] = field(default_factory=list)
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
    """Encodes rows with ``encodings``, which may be changed between row groups; errors blame ``name``.

    ``dictionaries`` are the most values of each column that arrives with a dictionary. ``encoded`` counts
    compressed bytes, ``again`` those of them that were encoded more than once.
    """

    def __init__(self, output_schema: OutputSchema, plain: Encodings, name: str, executor: Executor) -> None:
        self.encodings, self.name, self.executor = plain, name, executor
        self.types = output_schema.working.types
        self.footer_schema = footer_schema_of(output_schema, plain)
        self._leaves = [np.flatnonzero(self.footer_schema.tops == n).tolist() for n in range(len(self.types))]
        self.dictionaries: dict[str, int] = {}
        self.memory = BufferPool()
        self.encoded = self.again = 0

    def part(self, table: pa.Table) -> EncodedRows:
        """Return ``table`` encoded."""
        found = encode_rows(table, self.encodings, self.name, self.memory)
        self.encoded += found.size
        return found

    def encode(self, batches: Sequence[RowBatch], columns: Sequence[int], halves: bool = False) -> Encoded:
        """Encode columns of batches on as many threads as help; return each part with its leaf columns.

        With ``halves`` a column may come in two parts, the one with the first rows first.
        """
        how = self.encodings
        if not columns:
            return []
        table = pa.concat_tables([batch.table.select(list(columns)) for batch in batches])
        if any(pt.is_dictionary(column.type) for column in table.schema):
            table = table.unify_dictionaries()  # a second dictionary would make the writer fall back to plain
            self.note_dictionaries(table)
        sizes = np.sum([batch.weights for batch in batches], axis=0)[list(columns)]
        tasks = split_work(table, sizes, how, halves)
        run = map if len(tasks) == 1 else self.executor.map  # another thread would only be waited for
        parts = list(run(lambda task: encode_rows(task[0], how, self.name, self.memory), tasks))
        self.encoded += sum(part.size for part in parts)
        leaves = [self.leaves([columns[n] for n in share]) for _, share in tasks]
        return list(zip(leaves, parts, strict=True))

    def note_dictionaries(self, table: pa.Table) -> None:
        """Remember how large the dictionaries of a table are."""
        for name, column in zip(table.schema.names, table.columns, strict=True):
            if pt.is_dictionary(column.type) and column.num_chunks:
                self.dictionaries[name] = max(self.dictionaries.get(name, 0), len(column.chunk(0).dictionary))

    def leaves(self, columns: Sequence[int]) -> list[int]:
        """Return the leaf columns of top-level columns."""
        return [leaf for n in columns for leaf in self._leaves[n]]

    def by_column(self, leaves: Sequence[int], sizes: Sequence[float]) -> Floats:
        """Return sizes of leaf columns summed by top-level column."""
        tops = self.footer_schema.tops[list(leaves)]
        return np.bincount(tops, weights=sizes, minlength=len(self.types)).astype(np.float64)

    def taken(self, parts: Encoded) -> Floats:
        """Return the bytes that parts take by top-level column."""
        leaves = [leaf for some, _ in parts for leaf in some]
        return self.by_column(leaves, [chunk.size for _, part in parts for chunk in part.chunks])
