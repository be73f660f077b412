"""The plan of an epoch of packed documents: their lengths are counted once, and stored beside the snapshot."""

from __future__ import annotations

import hashlib
import logging
import warnings
from dataclasses import replace
from functools import partial

import numpy as np

from pqcache.errors import ParquetError
from pqcache.reader.order.epoch_order import Ints
from pqcache.reader.packing.pack import Pack
from pqcache.reader.packing.packed_columns import check_columns, lengths_of
from pqcache.reader.packing.packed_rows import PackedRows, best_fit_order, count_tokens
from pqcache.reader.read_plan import ReadPlan
from pqcache.reader.row_group_loader import RowGroupLoader
from pqcache.reader.row_group_reader import cpu_count
from pqcache.reader.stored_numbers import SmallInts, stored_numbers
from pqcache.system.fork_safe_threads import ForkSafeThreadPool

log = logging.getLogger("pqcache.reader")


def check_pack(plan: ReadPlan, pack: Pack) -> None:
    """Raise UsageError for a pack of columns that the plan does not have, or that cannot be packed."""
    check_columns(pack, plan.data.index.schema, plan.data.index.partitions.column_names)


def pack_plan(plan: ReadPlan, pack: Pack, packs: PackedRows | None = None) -> ReadPlan:
    """Return the plan with its rows packed; its ``counts`` are then sequences.

    ``packs`` are those of the plan where they are known already.
    """
    if packs is not None:
        return _with_packs(plan, packs)
    documents = plan.rows_read
    first = np.cumsum(documents) - documents
    name = hashlib.blake2b(f"{plan.fingerprint} {pack.column}".encode(), digest_size=16).hexdigest()
    lengths = stored_numbers(plan.data, f"lengths-{name}", partial(_count_lengths, plan, pack.column))
    sequences = -(-count_tokens(lengths.values, first, documents) // pack.length)
    found = PackedRows(
        spec=pack, row_groups=plan.row_groups, lengths=lengths, first=first, documents=documents, sequences=sequences
    )
    if pack.strategy == "best_fit":
        found = _with_best_fit(plan, found, name)
    some = found.sequences > 0
    if not some.any():
        warnings.warn(f"{plan.data.root}: no document has a token, so there are no batches", stacklevel=2)
    names = ("row_groups", "first", "documents", "sequences", "first_piece", "pieces")
    chosen = {name: value[some] for name in names if (value := getattr(found, name)) is not None}
    return _with_packs(plan, replace(found, **chosen))


def _with_packs(plan: ReadPlan, packs: PackedRows) -> ReadPlan:
    """Return the plan with only the row groups that have packed sequences."""
    selected = None if plan.selected is None else plan.selected[np.isin(plan.row_groups, packs.row_groups)]
    return replace(plan, row_groups=packs.row_groups, selected=selected, packs=packs)


def _with_best_fit(plan: ReadPlan, packs: PackedRows, name: str) -> PackedRows:
    length, groups = packs.spec.length, range(len(packs.documents))
    pieces = np.array([int((-(-packs.lengths_of(number) // length)).sum()) for number in groups], np.int64)

    def make() -> SmallInts:
        parts = [best_fit_order(packs.lengths_of(number), length).astype(np.int32) for number in groups]
        return np.concatenate([np.zeros(0, np.int32), *parts])

    order = stored_numbers(plan.data, f"best-fit-{name}-{length}", make)
    first = np.cumsum(pieces) - pieces
    marks = np.concatenate([[0], np.cumsum(order.values < 0)])
    return replace(packs, order=order, first_piece=first, pieces=pieces, sequences=marks[first + pieces] - marks[first])


def _count_lengths(plan: ReadPlan, column: str) -> SmallInts:
    """Return the tokens of each document of a plan, by reading them."""
    loader = RowGroupLoader(replace(plan, columns=(column,)))
    documents = plan.rows_read.tolist()
    log.debug("%s: the documents of column %r are counted", plan.data.root, column)

    def count(number: int) -> SmallInts:
        path = loader.reader.path(number)
        (found,) = loader.load(number, 0, documents[number])
        lengths: Ints = lengths_of(found, path)
        if lengths.max(initial=0) > np.iinfo(np.int32).max:
            raise ParquetError(path, f"a document of {int(lengths.max()):,} tokens is too long", "divide it")
        return lengths.astype(np.int32)

    with ForkSafeThreadPool(cpu_count()) as pool:
        return np.concatenate([np.zeros(0, np.int32), *pool.map(count, range(len(documents)))])
