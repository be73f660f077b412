"""What this rank was given of an epoch, counted batch by batch for its proof."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from pqcache.errors import UsageError
from pqcache.reader.order.epoch_share import EpochShare
from pqcache.reader.proof import Part
from pqcache.reader.row_hashes import Hashes, Sums, sums_of
from pqcache.torch.checkpoint import Place

_RECENT = 256  # batches after which a state may be taken
_NOTHING = (0, 0, 0, 0, 0)  # rows, sums of their hashes and of the squares, rows that were padded, and excluded


class Hashed(NamedTuple):
    """A batch, or what a transform made of it, on its way to the trainer with the hashes of its rows.

    They are also those of the ``excluded`` rows that were dropped of it.
    """

    value: Any
    hashes: Hashes
    excluded: int = 0


class Tally:
    """The parts of an epoch that a state brought, and the sums of the batches that were given since."""

    def __init__(self) -> None:
        self._loaded: tuple[Place, Sequence[Part]] | None = None
        self._earlier: Sequence[Part] = ()
        self._epoch, self._share = -1, EpochShare(total=0, lanes=1)
        self._coming: deque[tuple[Sums, int]] = deque()  # of batches that are here, but not given yet
        self._given = 0
        self._recent = deque([_NOTHING], _RECENT)  # what was given after each of the last batches

    def load(self, place: Place, parts: Sequence[Part] | None) -> None:
        """Go on from a state; one without a proof leaves a gap."""
        self._loaded, self._epoch = (place, parts or ()), -1

    def begin(self, epoch: int, share: EpochShare) -> None:
        """Begin an iteration over this rank's share."""
        loaded, self._earlier = self._loaded, ()
        if loaded is not None and share.start and (loaded[0].epoch, loaded[0].batch) == (epoch, share.start):
            self._earlier = loaded[1]
        self._epoch, self._share = epoch, share
        self._given = 0
        self._coming.clear()
        self._recent = deque([_NOTHING], _RECENT)

    def take(self, batch: Hashed) -> Any:
        """Sum the rows of a batch that has arrived; `give` counts the batches in this order."""
        self._coming.append((sums_of(batch.hashes), batch.excluded))
        return batch.value

    def give(self) -> None:
        """Count the next batch as given to the trainer."""
        ((rows, hashes, squares), left_out), share = self._coming.popleft(), self._share
        before, before_hashes, before_squares, padded, excluded = self._recent[-1]
        place = share.start + (share.rank - share.start) % share.ranks + self._given * share.ranks
        if place >= share.total and self._given < share.count():
            self._recent.append((before, before_hashes, before_squares, padded + rows - left_out, excluded))
        else:
            sums = before + rows, before_hashes + hashes, before_squares + squares
            self._recent.append((*sums, padded, excluded + left_out))
        self._given += 1

    def skip(self, begin: Place, end: Place) -> None:
        """Go on at ``end``: no rank is given what is before it."""
        self.load(end, [*self.parts(begin), Part.of(begin.batch, end.batch)])

    def parts(self, place: Place) -> list[Part]:
        """What was given of the epoch before ``place``."""
        if not place.batch:
            return []
        if place.epoch != self._epoch:
            if self._loaded is None or self._loaded[0].epoch != place.epoch or self._loaded[0].batch > place.batch:
                return []
            return list(self._loaded[1])
        share, given = self._share, self._given
        if place.batch < share.end:
            given = min(given, -(-(place.batch - share.start) // share.ranks))
        back = self._given - given
        if back >= len(self._recent):
            reason = f"only of the last {_RECENT:,} batches it knows what was given before each"
            raise UsageError("proof=True", reason, "take the state sooner, or from the Loader")
        if not given:
            return list(self._earlier)
        end = min(share.start + given * share.ranks, share.total)
        *sums, padded, excluded = self._recent[-1 - back]
        return [*self._earlier, Part.of(share.start, end, share.ranks, share.rank, Sums(*sums), padded, excluded)]
