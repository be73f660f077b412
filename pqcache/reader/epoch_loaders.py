"""The loader of each epoch: the same for all, unless weights make epochs differ in how often rows come."""

from __future__ import annotations

from pqcache.reader.read_plan import ReadPlan
from pqcache.reader.row_group_loader import RowGroupLoader


class EpochLoaders:
    """Loaders of a plan by epoch, which share their memory. ``first`` is that of epoch 0, from which windows follow."""

    def __init__(self, plan: ReadPlan, seed: int) -> None:
        self.plan, self._seed = plan, seed
        self.first = RowGroupLoader(plan.at_epoch(0, seed))
        self._latest: tuple[tuple[int, bool], RowGroupLoader] | None = None

    def at(self, epoch: int, of_mix: bool = False) -> RowGroupLoader:
        """Return the loader of an epoch, or of a pass of a mix, all of which have the same number of rows."""
        if self.plan.weights is None:
            return self.first
        if self._latest is None or self._latest[0] != (epoch, of_mix):
            self._latest = (epoch, of_mix), self.first.of(self.plan.at_epoch(epoch, self._seed, constant=of_mix))
        return self._latest[1]
