"""How much memory the row groups of a plan take, by what the row-group index says of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from pqcache.parquet.dense_columns import as_list
from pqcache.reader.kinds import fixed_width, kind_of, number_dtype
from pqcache.reader.memory import RowGroupSizes
from pqcache.reader.order.epoch_order import Ints
from pqcache.reader.read_plan import ReadPlan
from pqcache.reader.selection.sequences import Sequence as SequenceOf
from pqcache.store.row_group_index import Index

_VIEW = 16  # bytes that point to a string's or a list's bytes
_FILE_NUMBER = 4  # bytes


def sizes_of(plan: ReadPlan) -> RowGroupSizes:
    """Return the bytes of each of a plan's row groups, or pieces of one, by the row-group index.

    Lists count alike whether they are held dense or not, so that the window is the same either way.
    """
    names, rows = list(plan.kinds), plan.data.index.rows[plan.row_groups]
    decoded_rows = np.minimum(rows, plan.piece_rows) if plan.piece_rows else rows
    decoded = _bytes(plan, decoded_rows, plan.columns_read)
    if plan.pack is not None:
        items = (number_dtype(kind.bare.value_type) for kind in plan.kinds.values())
        width = sum(item.itemsize for item in items) * plan.pack.length
        selected = plan.counts * (width + len(names) * _VIEW)
        decoded += _bytes(plan, plan.selection.counts, names[:1])  # one column is laid end to end at a time
        return RowGroupSizes(selected, decoded + selected, plan.counts)
    if plan.packs is not None:
        selected = _bytes(plan, plan.selection.counts, names)
        return RowGroupSizes(selected, decoded + selected, plan.counts)
    selected = _bytes(plan, plan.counts, names, plan.sequence)
    if plan.sequence is None:
        return RowGroupSizes(selected, selected if plan.selection.is_all else decoded, rows)
    decoded += selected + 8 * plan.counts * plan.sequence.length  # where the rows of sequences are
    return RowGroupSizes(selected, decoded, plan.counts)


def most_bytes(plan: ReadPlan, names: Sequence[str]) -> Ints:
    """Return the bytes that columns of each row group of a plan take at most, -1 where nothing tells."""
    index, row_groups = plan.data.index, plan.row_groups
    total, known = np.zeros(len(row_groups), np.int64), np.ones(len(row_groups), np.bool_)
    for name in names:
        most = index.optional(f"{name}:most")[row_groups]
        known &= (most >= 0) | (index.optional(f"{name}:bytes")[row_groups] <= 0)
        total += np.maximum(most, 0)
    return np.where(known, total, -1)


def has_pages(plan: ReadPlan) -> bool:
    """Whether pieces of row groups can be read from their own pages: the files have an offset index.

    Where rows are selected, or packed, all of them are decoded anyway.
    """
    if not plan.selection.is_all or plan.weights is not None or plan.packs is not None:
        return False
    return bool(plan.data.index.table["offset_index"].take(pa.array(plan.row_groups)).to_numpy().all())


def _bytes(plan: ReadPlan, counts: Ints, names: Sequence[str], sequence: SequenceOf | None = None) -> Ints:
    """Return the bytes of ``counts`` rows, or sequences, of each row group, with columns ``names`` of the files."""
    index = plan.data.index
    total = np.zeros(len(plan.row_groups), np.int64)
    for name in names:
        kind = kind_of(as_list(index.schema.field(name)))
        items = counts if sequence is None else counts * len(sequence.steps(name))
        if kind.held == "fixed":
            total += items * kind.width
            continue
        share = items / np.maximum(1, index.rows[plan.row_groups])
        total += (_column_bytes(index, name)[plan.row_groups] * share).astype(np.int64) + _VIEW * items
    return np.asarray(total + _FILE_NUMBER * counts * bool(plan.partitions), np.int64)


def _column_bytes(index: Index, name: str) -> Ints:
    """Return the bytes of a column in each row group; unknown ones are to the stored bytes as those that are known."""
    if f"{name}:decoded" not in index.recorded:
        return index.rows * fixed_width(index.schema.field(name).type)
    decoded, stored = index.optional(f"{name}:decoded"), index.uncompressed([name])
    known = decoded >= 0
    ratio = max(1.0, decoded[known].sum() / max(1, stored[known].sum()))
    return np.where(known, decoded, (stored * ratio).astype(np.int64))
