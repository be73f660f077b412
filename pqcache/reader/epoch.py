"""One epoch: what is read, in which order, within what memory."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from pqcache.reader.load import RowGroups
from pqcache.reader.memory import Window, decoding_ahead, decoding_in_file_order, most_decoded
from pqcache.reader.meter import NO_METER, Meter
from pqcache.reader.order.epoch_order import Order
from pqcache.reader.read_plan import ReadPlan
from pqcache.reader.window import Budget, Group, read_groups

T = TypeVar("T")


class EpochPlans:
    """A plan at each epoch: the same for all, unless weights make epochs differ in how often rows come."""

    def __init__(self, plan: ReadPlan, seed: int, meter: Meter = NO_METER) -> None:
        self.plan, self._seed = plan, seed
        self.first = RowGroups(plan.at_epoch(0, seed), meter)  # from which windows follow
        self._latest: tuple[tuple[int, bool], RowGroups] | None = None

    def at(self, epoch: int, of_mix: bool = False) -> RowGroups:
        """The row groups of an epoch, or of a pass of a mix, all of which have the same number of rows."""
        if self.plan.weights is None:
            return self.first
        if self._latest is None or self._latest[0] != (epoch, of_mix):
            groups = self.first.of(self.plan.at_epoch(epoch, self._seed, constant=of_mix))
            self._latest = (epoch, of_mix), groups
        return self._latest[1]


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """An epoch that can be read from any of its batches on."""

    groups: RowGroups
    order: Order
    budget: Budget

    @property
    def plan(self) -> ReadPlan:
        """What is read."""
        return self.groups.plan

    def read(self, indices: Sequence[int], total: int, make: Callable[[Group], T]) -> Generator[tuple[int, T, int]]:
        """Yield (global index, group, which of its batches); see `read_groups`."""
        return read_groups(self.groups, self.order, indices, total, self.budget, make)


def begin_epoch(
    groups: RowGroups,
    window: Window,
    *,
    epoch: int,
    seed: int,
    shuffle: bool,
    batch_size: int,
    lanes: int,
    own_lanes: int,
    memory: float,
    threads: int,
    whole: bool = True,
) -> Epoch:
    """Put an epoch together, of which a process with ``memory`` bytes and ``threads`` reads ``own_lanes`` of ``lanes``.

    Of a lookup, which is not ``whole``, nothing is refused or held back for memory.
    """
    plan = groups.plan.split(window.piece_rows)
    if shuffle and plan.packs is not None:
        plan = replace(plan, packs=replace(plan.packs, shuffle=(seed, epoch)))
    groups = groups if plan is groups.plan else groups.of(plan)
    order = Order(
        counts=plan.counts,
        batch_size=batch_size,
        lanes=lanes,
        window=window.row_groups,
        seed=seed,
        epoch=epoch,
        shuffle=shuffle,
    )
    if not whole:
        return Epoch(groups=groups, order=order, budget=Budget(threads=threads, decoding=threads))
    sizes = groups.sizes
    groups = groups.within(most_decoded(sizes, memory, own_lanes if shuffle else 1))
    if shuffle:
        decoding = decoding_ahead(sizes, memory, own_lanes, lanes, window.row_groups, threads)
    else:
        decoding = decoding_in_file_order(sizes, memory, threads)
    budget = Budget.within(sizes, memory, own_lanes if shuffle else 1, lanes, window.row_groups, decoding, threads)
    return Epoch(groups=groups, order=order, budget=budget)
