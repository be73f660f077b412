"""Proofs of an epoch, which compare the rows that ranks received with those of the dataset; see docs/proof.md."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from pqcache.errors import PqcacheError, UsageError
from pqcache.options import Unpack, documented
from pqcache.reader.batch_rows import checked_state, rows_of_batch, training_of
from pqcache.reader.decode import RowGroups
from pqcache.reader.epoch_options import RowArguments, RowOptions
from pqcache.reader.open_dataset import LocalDataset
from pqcache.reader.order import Ints, Order, batches_at, divisions_of
from pqcache.reader.read_plan import ReadPlan
from pqcache.reader.row_hashes import MODULUS, Sums, hashes_at, hashes_of, sums_of, total
from pqcache.reader.selection.selection import digest_of
from pqcache.store.cache_directory import CacheDirectory, cache_path
from pqcache.system.processes import cpu_count
from pqcache.system.threads import ForkSafeThreadPool
from pqcache.units import format_count, is_whole

_ALIKE = ("epoch", "seed", "batch_size", "lanes", "window", "piece", "shuffle", "drop_last")


class Part(NamedTuple):
    """The rows that rank ``rank`` of ``ranks`` received of places ``begin`` to ``end`` of an epoch.

    ``padded`` counts rows that only fill up the last round, which aren't in the sums. Rows that ``exclude=`` dropped
    from batches are in the sums, but not in ``rows``. If ``sums`` is missing, all ranks skipped the part.
    """

    begin: int
    end: int
    ranks: int
    rank: int
    rows: int
    padded: int
    excluded: int
    sums: str

    @staticmethod
    def of(
        begin: int,
        end: int,
        ranks: int = 1,
        rank: int = 0,
        sums: Sums | None = None,
        padded: int = 0,
        excluded: int = 0,
    ) -> Part:
        rows = 0 if sums is None else sums.rows - excluded
        text = "" if sums is None else f"{sums.hashes % MODULUS:016x}{sums.squares % MODULUS:016x}"
        return Part(begin, end, ranks, rank, rows, padded, excluded, text)

    def check(self) -> None:
        """Raise ValueError for values that no training produces."""
        numbers = self[:-1]
        if not all(is_whole(n) and n >= 0 for n in numbers) or not self.rank < self.ranks or self.begin > self.end:
            raise ValueError(f"{numbers} is no part of an epoch")
        if self.sums:
            self.gathered()

    def gathered(self) -> Sums:
        if not self.sums:
            return Sums()
        return Sums(self.rows + self.excluded, int(self.sums[:16], 16), int(self.sums[16:], 16))

    @property
    def places(self) -> slice:
        return slice(self.begin + (self.rank - self.begin) % self.ranks, self.end, self.ranks)


def content_of(data: LocalDataset) -> str:
    """A digest of a dataset's files, equal in the caches of all nodes."""
    return digest_of(data.contents)


def parts_of(state: Mapping[str, Any], name: str = "state") -> list[Part]:
    """The parts of the proof in a state; raises UsageError if it has none, or a damaged one."""
    proof = state.get("proof")
    if proof is None:
        advice = "train with ParquetDataset(proof=True), and give what loader.proof() or its state_dict() returned"
        raise UsageError(name, "it has no proof", advice)
    try:
        if not isinstance(proof["content"], str) or not isinstance(proof["drop_last"], bool):
            raise ValueError("no training wrote it")
        parts = [Part(*values) for values in proof["parts"]]
        for part in parts:
            part.check()
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(name, f"its proof is damaged ({error})", "give what loader.proof() returned") from error
    return parts


@dataclass(frozen=True, kw_only=True)
class EpochProof:
    """Whether an epoch had every row of its selection exactly once, or as often as its weight says.

    ``snapshot``, ``epoch``   the snapshot and the epoch
    ``batches``    batches of the epoch, on all ranks
    ``rows``       rows expected, without those that were excluded, dropped or skipped
    ``given``      rows that the trainer received
    ``padded``     rows repeated to fill up the last round of all ranks; not in ``given``
    ``excluded``   rows that ``exclude=`` dropped from batches after the epoch had begun
    ``dropped``    rows left out by ``drop_last``
    ``skipped``    rows of batches left out by ``loader.skip()``
    ``weighted``   whether rows come as often as weights say
    ``holds``      whether the trainer received exactly the expected rows
    """

    snapshot: str
    epoch: int
    batches: int
    rows: int
    given: int
    padded: int
    excluded: int
    dropped: int
    skipped: int
    weighted: bool
    holds: bool

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return asdict(self)

    def __str__(self) -> str:
        if self.holds and self.weighted:
            text = f"{self.rows:,} rows were given, each as often as its weight says, in {self.batches:,} batches"
        elif self.holds:
            text = f"each of {self.rows:,} rows was given exactly once, in {self.batches:,} batches"
        elif self.given == self.rows:
            text = f"{self.rows:,} rows were given, as many as there are, but some are missing and others came twice"
        elif self.given < self.rows:
            text = f"{self.rows - self.given:,} of {self.rows:,} rows are missing"
        else:
            text = f"{self.given - self.rows:,} rows came too often: {self.given:,} were given of {self.rows:,}"
        counted = [(self.padded, "padded"), (self.excluded, "excluded"), (self.dropped, "dropped")]
        counted.append((self.skipped, "skipped"))
        apart = "".join(f"; {format_count(count, 'row')} {what}" for count, what in counted if count)
        return f"epoch {self.epoch} of {self.snapshot}: {text}{apart}"


@documented(RowArguments, RowOptions)
def prove(
    target: str | os.PathLike[str],
    proofs: Iterable[str | os.PathLike[str] | Mapping[str, Any]],
    **given: Unpack[RowArguments],
) -> EpochProof:
    """Find out whether an epoch had every row exactly once, by the proofs of all its ranks.

    The expected rows follow from the index of the dataset. For options that choose single rows, the columns that they
    depend on are read. A proof doesn't contain these options, so give those of the training again.

    Args:
        target: the cache or directory that was read.
        proofs: results of ``loader.proof()`` or ``state_dict()`` on every rank at the end of the epoch, or JSON files
            of them. If the number of ranks changed, also the state of each earlier rank from which the epoch was
            continued. Order and repeated parts don't matter.
        given: see pqcache.reader.epoch_options

    >>> from pqcache.torch import Loader, ParquetDataset
    >>> loader = Loader(ParquetDataset("cache/shop", columns=["id"], seed=1, proof=True))
    >>> for batch in loader:
    ...     pass
    >>> proof = prove("cache/shop", [loader.proof()])
    >>> proof.holds, proof.rows
    (True, 600)

    Raises UsageError for proofs that don't fit together, overlap, or leave a gap.
    """
    found, parts = [], set[Part]()
    for number, proof in enumerate(proofs):
        name = f"proof {number}" if isinstance(proof, Mapping) else os.fspath(proof)
        state = checked_state(proof, name)
        found.append((state, proof))
        parts.update(parts_of(state, name))
        _check_alike(found[0][0], state, name)
    if not found:
        raise UsageError("proofs", "there is none", "give what loader.proof() of each rank returned")
    here = set[str]()
    with suppress(PqcacheError, OSError):
        here = {snapshot.id for snapshot in CacheDirectory(cache_path(target)).snapshots()}
    known, proof = min(found, key=lambda of: of[0]["snapshot"] not in here)
    last, _ = max(found, key=lambda of: of[0]["batch"])
    with training_of(target, proof, None, given) as (plan, order, _):
        plan = replace(plan, left_out=())  # what was dropped of batches is in the sums
        if content_of(plan.data) != known["proof"]["content"]:
            reason = f"{plan.data.snapshot} has other files than those that were read"
            raise UsageError(target, reason, "name the cache or directory that was read, as it was then")
        batches = order.batches(known["proof"]["drop_last"])
        dropped, skipped = _apart(parts, batches, known["proof"]["drop_last"])
        divisions = divisions_of(last.get("divisions"))
        at = batches_at(batches, order.lanes, divisions) if divisions else np.arange(batches)
        left_out = [*at[dropped].tolist(), *range(batches, order.batches())]
        sums_dropped = total(_sums_of_batch(plan, order, index) for index in left_out)
        sums_skipped = total(_sums_of_batch(plan, order, index) for index in at[skipped].tolist())
        wanted = _sums_of_plan(plan).plus(sums_dropped, -1).plus(sums_skipped, -1)
    came, excluded = total(part.gathered() for part in parts), sum(part.excluded for part in parts)
    return EpochProof(
        snapshot=plan.data.snapshot,
        epoch=order.epoch,
        batches=batches - len(dropped) - len(skipped),
        rows=wanted.rows - excluded,
        given=came.rows - excluded,
        padded=sum(part.padded for part in parts),
        excluded=excluded,
        dropped=sums_dropped.rows,
        skipped=sums_skipped.rows,
        weighted=plan.weights is not None,
        holds=wanted == came,
    )


def _check_alike(first: Mapping[str, Any], state: Mapping[str, Any], name: str) -> None:
    of_first, of_state = ({**state, **state["proof"]} for state in (first, state))
    for key, shown in {"content": "other files", "row_groups": "other rows", **dict.fromkeys(_ALIKE, "")}.items():
        if of_first[key] != of_state[key]:
            shown = shown or f"{key}={of_state[key]}, and another from {key}={of_first[key]}"
            raise UsageError(name, f"it comes from {shown}", "give the proofs of one epoch of one training")


def _apart(parts: Iterable[Part], batches: int, drop_last: bool) -> tuple[Ints, Ints]:
    """The places dropped and skipped; raises UsageError if places are in several parts, or in none."""
    count, is_skipped, end, ranks = np.zeros(batches, np.int64), np.zeros(batches, np.bool_), 0, 1
    for part in parts:
        count[part.places] += 1
        if not part.sums:
            is_skipped[part.places] = True
        end, ranks = max((end, ranks), (part.end, part.ranks))
    if (twice := np.flatnonzero(count > 1)).size:
        reason = f"{format_count(twice.size, 'batch', 'batches')}, from place {twice[0]} on, in several of them"
        advice = "give one lineage of states: not those of a run that was begun again from an earlier state"
        raise UsageError("proofs", reason, advice)
    missing = np.flatnonzero(count == 0)
    if drop_last and missing.size < ranks and (not missing.size or missing[0] >= end):
        return missing, np.flatnonzero(is_skipped)
    if missing.size:
        of_all = f"{format_count(missing.size, 'batch', 'batches')} of {batches:,}"
        reason = f"{of_all}, from place {missing[0]} on, in none of them"
        advice = (
            "give those of all ranks at the end of the epoch, and the states from which other ranks went on; if there "
            "are no more, these batches were never given"
        )
        raise UsageError("proofs", reason, advice)
    return missing, np.flatnonzero(is_skipped)


def _sums_of_plan(plan: ReadPlan) -> Sums:
    groups, index = RowGroups(plan), plan.data.index
    files, row_groups = index.numbers("file"), index.numbers("row_group")

    def sums(number: int) -> Sums:
        group = int(plan.row_groups[number])
        of = plan.data.contents[files[group]], int(row_groups[group])
        if plan.selection.takes_all(number):
            return sums_of(hashes_of(*of, 0, int(index.rows[group])))
        return sums_of(hashes_at(*of, plan.data.while_moving(partial(groups.positions, number)).each))

    numbers = np.unique(plan.row_groups, return_index=True)[1]  # a row group may be in pieces
    with ForkSafeThreadPool(cpu_count()) as pool:
        return total(pool.map(sums, numbers.tolist()))


def _sums_of_batch(plan: ReadPlan, order: Order, index: int) -> Sums:
    found = rows_of_batch(plan, order, index)
    contents, sums = plan.data.contents, []
    for group in np.unique(found.groups):
        of = found.groups == group
        file, row_group = int(found.files[of][0]), int(found.row_groups[of][0])
        sums.append(sums_of(hashes_at(contents[file], row_group, found.rows[of])))
    return total(sums)
