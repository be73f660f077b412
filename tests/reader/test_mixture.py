"""Mixes that change: every batch of every pass exactly once, whatever the changes, lanes and ranks."""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pqcache.errors import UsageError
from pqcache.reader.mixture import MixHistory, MixPeriod
from tests.examples import examples

NAMES = ("web", "books", "code", "talks")


@st.composite
def histories(draw: st.DrawFn) -> tuple[MixHistory, dict[str, int], int]:
    """Return a history, the batches of a pass of each dataset, and an epoch after its last change."""
    lanes, seed = draw(st.sampled_from([1, 2, 3, 4])), draw(st.integers(0, 3))
    sizes = {name: draw(st.integers(1, 60)) for name in NAMES}
    together, since, periods = draw(st.booleans()), 0, []
    for _ in range(draw(st.integers(1, 4))):
        names = draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=4, unique=True))
        each = draw(st.integers(1, 20))
        counts = {name: each if together else draw(st.integers(1, 20)) for name in names}
        periods.append(MixPeriod(since, counts))
        since += draw(st.integers(1, 3))
    return MixHistory(tuple(periods), seed, lanes, together), sizes, since + draw(st.integers(0, 2))


_GROWING = tuple(MixPeriod(since, {"web": count}) for since, count in enumerate((1, 2, 6)))


@settings(max_examples=examples(300), deadline=None)
@given(histories(), st.sampled_from([1, 2]))
@example((MixHistory(_GROWING, 0, 3, together=True), {"web": 9, "books": 1, "code": 1, "talks": 1}, 3), 1)
def test_every_batch_of_every_pass_once(made: tuple[MixHistory, dict[str, int], int], parts: int) -> None:
    history, sizes, end = made
    read: dict[str, list[tuple[int, int, int]]] = defaultdict(list)  # by dataset: pass, lane, batch in the lane
    order: dict[str, list[tuple[int, int]]] = defaultdict(list)
    divided: dict[tuple[str, int], tuple[tuple[int, ...], int]] = {}
    for number, period in enumerate(history.periods):
        then = MixHistory(history.periods[: number + 1], history.seed, history.lanes, history.together)
        following = history.periods[number + 1].since if number + 1 < len(history.periods) else end
        for epoch in range(period.since, following):
            sources = []
            streams: dict[tuple[str, int, int], int] = defaultdict(lambda: -1)
            for part in np.array_split(np.arange(then.total), parts):  # as after a resume
                for name in period.counts:
                    for found in then.passes(name, sizes[name], epoch, part):
                        assert np.array_equal(np.sort(found.positions), found.positions)
                        sources += [name] * len(found.positions)
                        drawn = found.number * sizes[name] + found.batches
                        order[name] += zip((part[found.positions] % then.lanes).tolist(), drawn.tolist(), strict=True)
                        read[name] += [
                            (found.number, lane, batch)
                            for lane, batch in zip(found.lanes.tolist(), found.lane_batches.tolist(), strict=True)
                        ]
                        division = (tuple(found.lane_sizes.tolist()), found.last_lane)
                        assert divided.setdefault((name, found.number), division) == division
                        readers = part[found.positions] % then.lanes if found.readers is None else found.readers
                        assert np.array_equal(readers, part[found.positions] % then.lanes)
                        keys = zip(readers.tolist(), found.lanes.tolist(), found.lane_batches.tolist(), strict=True)
                        for reader, lane, batch in keys:
                            key = (f"{name} {reader}", found.number, lane)
                            assert batch > streams[key]  # a lane's batches come in order to each that reads them
                            streams[key] = batch
            assert Counter(sources) == Counter(period.counts)
            for name in period.counts:
                total = history.drawn_before(name, number) + (epoch + 1 - period.since) * period.counts[name]
                assert then.drawn(name, epoch, np.arange(then.total)) == total
    for name, size in sizes.items():
        assert len(set(read[name])) == len(read[name])
        passes = Counter(number for number, _, _ in read[name])
        assert sorted(passes) == list(range(len(passes)))
        assert all(count == size for number, count in passes.items() if number < len(passes) - 1)
        assert sorted(draw for _, draw in order[name]) == list(range(len(read[name])))
        for number in passes:
            lane_sizes, _ = divided[name, number]
            assert sum(lane_sizes) == size
            assert all(batch < lane_sizes[lane] for n, lane, batch in read[name] if n == number)


def test_epochs_before_a_change_are_refused() -> None:
    history = MixHistory((MixPeriod(0, {"web": 7}), MixPeriod(3, {"web": 5})), 0, 1)
    with pytest.raises(UsageError, match="the mix was changed from epoch 3 on"):
        history.passes("web", 4, 2, np.arange(5))
