"""The plan of an epoch of packed documents: their lengths are counted once, and stored beside the snapshot."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pyarrow as pa

from pqcache.errors import UsageError
from pqcache.reader.load import RowGroups
from pqcache.reader.order.epoch_order import Ints
from pqcache.reader.packing.documents import check_columns, items_of
from pqcache.reader.packing.pack import Pack
from pqcache.reader.packing.packed_rows import Packs, count_packs
from pqcache.reader.packing.token_batches import TokenBatches
from pqcache.reader.read_plan import ReadPlan
from pqcache.reader.selection.selection import Counts, count_once, digest_of
from pqcache.system.fork_safe_threads import ForkSafeThreadPool
from pqcache.system.process_stats import cpu_count

log = logging.getLogger("pqcache.reader")


def pack_plan(plan: ReadPlan, pack: Pack | TokenBatches, known: Counts | None = None) -> ReadPlan:
    """Return the plan with its rows packed; its ``counts`` are then sequences, or batches.

    ``known`` are counts, to which what is counted is added. Columns that cannot be packed raise UsageError.
    """
    check_columns(pack, plan.data.index.schema, plan.data.index.partitions.column_names)
    name = digest_of([plan.fingerprint, pack.fingerprint])
    found = count_once(plan.data, name, plan.row_groups, known, partial(_count, plan, pack))
    counts, tokens = (np.array(found[of].to_numpy(), np.int64) for of in ("packed", "tokens"))
    some = counts > 0
    if not some.any():
        warnings.warn(f"{plan.data.root}: no document has a token, so there are no batches", stacklevel=2)
    places = []
    if "places" in found.column_names:
        places = [found["places"][number].values.to_numpy() for number in np.flatnonzero(some).tolist()]
    packs = Packs(spec=pack, counts=counts[some], tokens=int(tokens.sum()), places=places)
    return replace(plan, selection=plan.selection.of(some), packs=packs)


def document_lengths(plan: ReadPlan, column: str) -> Callable[[int], Ints]:
    """Return what reads the tokens of each document of a row group of a plan."""
    groups = RowGroups(replace(plan, columns=(column,), packs=None))

    def read(number: int) -> Ints:
        group, columns = plan.data.while_moving(partial(groups.all_rows, number))
        return items_of(columns[column], column, group.path)[0]

    return read


def _count(plan: ReadPlan, pack: Pack | TokenBatches) -> pa.Table:
    """Count sequences (or batches) and tokens per row group, from the lengths of its documents."""
    name = digest_of(["lengths", plan.fingerprint, pack.column])
    found = count_once(plan.data, name, plan.row_groups, None, partial(_count_lengths, plan, pack.column))
    groups, lengths, documents = (found[of].to_numpy() for of in ("group", "tokens", "documents"))
    if isinstance(pack, TokenBatches):
        _check_longest(plan, pack.tokens_per_batch, lengths, documents)
    packed, tokens, places = [], [], []
    for low, high in zip(*(np.searchsorted(groups, plan.row_groups, side) for side in ("left", "right")), strict=True):
        each, times = lengths[low:high].astype(np.int64), documents[low:high].astype(np.int64)
        count, of_pieces = count_packs(pack, each, times)
        packed.append(count)
        tokens.append(int((each * times).sum()))
        places.append(of_pieces)
    counts = {"group": plan.row_groups, "packed": np.array(packed, np.int64), "tokens": np.array(tokens, np.int64)}
    if getattr(pack, "strategy", None) == "best_fit":
        counts["places"] = pa.array(places, pa.large_list(pa.int32()))
    return pa.table(counts)


def _check_longest(plan: ReadPlan, most: int, lengths: Ints, documents: Ints) -> None:
    if (longest := int(lengths.max(initial=0))) > most:
        number = int(documents[lengths > most].sum())
        reason = f"{number:,} documents have more than tokens_per_batch={most:,} tokens, the longest {longest:,}"
        raise UsageError(plan.data.root, reason, "give a larger number, or leave them out with filters=")


def _count_lengths(plan: ReadPlan, column: str) -> pa.Table:
    """Count the documents of each length in each row group, by reading them."""
    log.debug("%s: the documents of column %r are counted", plan.data.root, column)
    lengths_of = document_lengths(plan, column)

    def count(number: int) -> pa.Table:
        lengths, documents = np.unique(lengths_of(number), return_counts=True)
        groups = np.full(len(lengths), plan.row_groups[number], np.int32)
        return pa.table({"group": groups, "tokens": lengths, "documents": documents.astype(np.int32)})

    empty = pa.table(
        {"group": np.zeros(0, np.int32), "tokens": np.zeros(0, np.int64), "documents": np.zeros(0, np.int32)}
    )
    with ForkSafeThreadPool(cpu_count()) as pool:
        return pa.concat_tables([empty, *pool.map(count, range(len(plan.row_groups)))]).combine_chunks()
