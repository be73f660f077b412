"""The plan of an epoch of packed documents: their lengths are counted once, and stored beside the snapshot."""

from __future__ import annotations

import logging
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from pqcache.errors import UsageError
from pqcache.reader.order.epoch_order import Ints
from pqcache.reader.packing.pack import Pack, TokenBatches
from pqcache.reader.packing.packed_rows import Packs, check_columns, count_packs, items_of
from pqcache.reader.read_plan import ReadPlan
from pqcache.reader.rows import hold
from pqcache.reader.selection.selection import Chosen, Counts, digest_of, found_once

log = logging.getLogger("pqcache.reader")


def pack_plan(plan: ReadPlan, pack: Pack | TokenBatches, known: Counts | None = None) -> ReadPlan:
    """Return the plan with its rows packed; its ``counts`` are then sequences, or batches.

    ``known`` are counts, to which what is counted is added. Columns that cannot be packed raise UsageError.
    """
    check_columns(pack, plan.data.index.schema, plan.data.index.partitions.column_names)
    name = digest_of([plan.fingerprint, pack.fingerprint])
    found = found_once(plan.data, name, plan.row_groups, known, lambda: _count(plan, pack))
    counts, tokens = (np.array(found[of].to_numpy(), np.int64) for of in ("packed", "tokens"))
    some = counts > 0
    if not some.any():
        warnings.warn(f"{plan.data.root}: no document has a token, so there are no batches", stacklevel=2)
    places = []
    if "places" in found.column_names:
        places = [found["places"][number].values.to_numpy() for number in np.flatnonzero(some).tolist()]
    packs = Packs(spec=pack, counts=counts[some], tokens=int(tokens.sum()), places=places)
    return replace(plan, selection=plan.selection.of(some), packs=packs)


def document_lengths(plan: ReadPlan, column: str, group: int, chosen: Chosen) -> Ints:
    """Return the tokens of each document that is read of a row group."""
    data, kind = plan.data, plan.kinds[column]
    kind = kind if kind.held == "fixed" else replace(kind, held="array")
    path = data.root / data.index.paths[int(data.index.numbers("file")[group])]
    lengths = [np.zeros(0, np.int64)]
    for _, rows, part in chosen:
        documents = pa.nulls(len(rows), kind.type)
        if column in part.column_names:
            documents = part[column].take(pa.array(rows)).combine_chunks()
        lengths.append(items_of(hold(documents, kind), column, path)[0])
    return np.concatenate(lengths)


def _count(plan: ReadPlan, pack: Pack | TokenBatches) -> pa.Table:
    """Count sequences (or batches) and tokens per row group, from the lengths of its documents."""

    def count(group: int, chosen: Chosen) -> list[Any]:
        return list(np.unique(document_lengths(plan, pack.column, group, chosen), return_counts=True))

    log.debug("%s: the documents of column %r are counted", plan.data.root, pack.column)
    name, kinds = digest_of(["lengths", plan.fingerprint, pack.column]), {"tokens": pa.int64(), "documents": pa.int64()}
    found = plan.selection.looking_at([pack.column]).count_by_group(name, kinds, count, None)
    groups, lengths, documents = (found[of].to_numpy() for of in ("group", "tokens", "documents"))
    if isinstance(pack, TokenBatches) and (longest := int(lengths.max(initial=0))) > pack.tokens_per_batch:
        most = pack.tokens_per_batch
        number = int(documents[lengths > most].sum())
        reason = f"{number:,} documents have more than tokens_per_batch={most:,} tokens, the longest {longest:,}"
        raise UsageError(plan.data.root, reason, "give a larger number, or leave them out with filters=")
    packed, places = [], []
    bounds = np.searchsorted(groups, plan.row_groups), np.searchsorted(groups, plan.row_groups, "right")
    for low, high in zip(*bounds, strict=True):
        count_of, of_pieces = count_packs(pack, lengths[low:high], documents[low:high])
        packed.append(count_of)
        places.append(of_pieces)
    tokens = np.zeros(len(plan.row_groups), np.int64)
    np.add.at(tokens, np.searchsorted(plan.row_groups, groups), lengths * documents)
    counts = {"group": plan.row_groups, "packed": np.array(packed, np.int64), "tokens": tokens}
    if isinstance(pack, Pack) and pack.strategy == "best_fit":
        counts["places"] = pa.array(places, pa.large_list(pa.int32()))
    return pa.table(counts)
