"""The plan of an epoch of packed documents: their lengths are counted once, and stored beside the snapshot."""

from __future__ import annotations

import hashlib
import logging
import warnings
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from pqcache.errors import ParquetError, UsageError
from pqcache.reader.load import Held, RowGroups
from pqcache.reader.packing.documents import check_columns, items_of
from pqcache.reader.packing.pack import Pack
from pqcache.reader.packing.packed_rows import PackedRows, best_fit_order, count_tokens
from pqcache.reader.packing.token_batches import GroupedRows, TokenBatches, batch_ends
from pqcache.reader.read_plan import ReadPlan
from pqcache.reader.stored_numbers import SmallInts, stored_numbers
from pqcache.system.fork_safe_threads import ForkSafeThreadPool
from pqcache.system.process_stats import cpu_count

log = logging.getLogger("pqcache.reader")


def pack_plan(plan: ReadPlan, pack: Pack | TokenBatches, packs: PackedRows | GroupedRows | None = None) -> ReadPlan:
    """Return the plan with its rows packed; its ``counts`` are then sequences, or batches.

    ``packs`` are those of the plan where they are known already. Columns that cannot be packed raise UsageError.
    """
    check_columns(pack, plan.data.index.schema, plan.data.index.partitions.column_names)
    if packs is not None:
        stored = {name: value.of(plan.data) for name in ("lengths", "order") if (value := getattr(packs, name, None))}
        return _with_packs(plan, replace(packs, **stored))
    documents = plan.rows_read
    first = np.cumsum(documents) - documents
    name = hashlib.blake2b(f"{plan.fingerprint} {pack.column}".encode(), digest_size=16).hexdigest()
    lengths = stored_numbers(plan.data, f"lengths-{name}", partial(_count_lengths, plan, pack.column))
    found: PackedRows | GroupedRows
    known: dict[str, Any] = {
        "row_groups": plan.row_groups,
        "lengths": lengths,
        "first": first,
        "documents": documents,
        "sequences": np.zeros(0, np.int64),
    }
    if isinstance(pack, TokenBatches):
        found = _in_batches(plan, GroupedRows(spec=pack, **known))
    elif pack.strategy == "best_fit":
        found = _with_best_fit(plan, PackedRows(spec=pack, **known), name)
    else:
        sequences = -(-count_tokens(lengths.values, first, documents) // pack.length)
        found = replace(PackedRows(spec=pack, **known), sequences=sequences)
    some = found.sequences > 0
    if not some.any():
        warnings.warn(f"{plan.data.root}: no document has a token, so there are no batches", stacklevel=2)
    names = ("row_groups", "first", "documents", "sequences", "first_piece", "pieces")
    chosen = {name: value[some] for name in names if (value := getattr(found, name, None)) is not None}
    return _with_packs(plan, replace(found, **chosen))


def _with_packs(plan: ReadPlan, packs: PackedRows | GroupedRows) -> ReadPlan:
    """Return the plan with only the row groups that have packed sequences."""
    selected = None if plan.selected is None else plan.selected[np.isin(plan.row_groups, packs.row_groups)]
    return replace(plan, row_groups=packs.row_groups, selected=selected, packs=packs)


def _in_batches(plan: ReadPlan, packs: GroupedRows) -> GroupedRows:
    """Return the documents with the number of batches that they make; one too long for a batch raises UsageError."""
    most = packs.spec.tokens_per_batch
    longest = int(packs.lengths.values.max(initial=0))
    if longest > most:
        number = int((packs.lengths.values > most).sum())
        reason = f"{number:,} documents have more than tokens_per_batch={most:,} tokens, the longest {longest:,}"
        raise UsageError(plan.data.root, reason, "give a larger number, or leave them out with filters=")
    groups = range(len(packs.documents))
    batches = [len(batch_ends(packs.lengths_of(number), packs.spec)) - 1 for number in groups]
    return replace(packs, sequences=np.array(batches, np.int64))


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
    groups = RowGroups(replace(plan, columns=(column,)))
    documents = plan.rows_read.tolist()
    log.debug("%s: the documents of column %r are counted", plan.data.root, column)

    def count(number: int) -> SmallInts:
        path = plan.data.root / plan.data.index.paths[int(plan.data.index.numbers("file")[plan.row_groups[number]])]
        found = groups.load(number, 0, documents[number])
        assert isinstance(found, Held)
        lengths, _ = items_of(found.all([column])[column], column, path)
        if lengths.max(initial=0) > np.iinfo(np.int32).max:
            raise ParquetError(path, f"a document of {int(lengths.max()):,} tokens is too long", "divide it")
        return lengths.astype(np.int32)

    with ForkSafeThreadPool(cpu_count()) as pool:
        return np.concatenate([np.zeros(0, np.int32), *pool.map(count, range(len(documents)))])
