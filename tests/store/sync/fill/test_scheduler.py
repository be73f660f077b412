"""Which range is fetched next: every byte once, whatever readers want, how often they change their minds or die."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pqcache.store.arriving.wanted import Wanted
from pqcache.store.sync.fill.intervals import Intervals
from pqcache.store.sync.fill.scheduler import GAP, PIECE, SMALL, FileRanges, Piece, Scheduler

MB = 1 << 20


def ranges_of(files: Sequence[Sequence[int]], gap: int = 100, columns: int = 4) -> FileRanges:
    """Return files of row groups of these sizes, with ``gap`` bytes around each; columns have equal parts of them."""
    sizes, owner, starts, ends = [], [], [], []
    for number, row_groups in enumerate(files):
        position = gap
        for size in row_groups:
            owner.append(number)
            starts.append(position)
            ends.append(position + size)
            position += size + gap
        sizes.append(position)

    def columns_of(row_group: int, names: tuple[str, ...]) -> list[tuple[int, int]] | None:
        start, width = starts[row_group], (ends[row_group] - starts[row_group]) // columns
        return [(start + int(name) * width, start + (int(name) + 1) * width) for name in names]

    return FileRanges(
        sizes=sizes,
        file=np.array(owner, np.int64),
        starts=np.array(starts, np.int64),
        ends=np.array(ends, np.int64),
        columns=columns_of,
    )


def scheduler_of(ranges: FileRanges) -> Scheduler:
    return Scheduler(ranges, [Intervals() for _ in ranges.sizes])


def wanted(*row_groups: int, columns: tuple[str, ...] | None = None, urgent: bool = False) -> Wanted:
    return Wanted(row_groups=np.array(row_groups, np.int64), columns=columns, urgent=urgent)


def take_all(scheduler: Scheduler) -> list[Piece]:
    pieces = []
    while (piece := scheduler.take()) is not None:
        pieces.append(piece)
    return pieces


def row_group_of(ranges: FileRanges, piece: Piece) -> int:
    """Return the last row group that a piece reaches; the first of its file for what is before that."""
    here = np.flatnonzero(ranges.file == piece.file)
    return int(here[max(0, int((ranges.starts[here] < piece.end).sum()) - 1)])


wants = st.builds(
    lambda row_groups, columns, urgent: wanted(*row_groups, columns=columns, urgent=urgent),
    st.lists(st.integers(-1, 12), max_size=8),
    st.none() | st.lists(st.sampled_from("0123"), unique=True, max_size=3).map(tuple),
    st.booleans(),
)
steps = st.lists(
    st.one_of(st.just("take"), st.just("done"), st.just("fail"), st.lists(wants, max_size=3)), max_size=60
)  # fmt: skip
files_of_row_groups = st.lists(
    st.lists(st.sampled_from([0, 1, 1000, SMALL // 2, SMALL, PIECE, 3 * PIECE + 5]), max_size=5), min_size=1, max_size=4
)


@given(files_of_row_groups, steps)
def test_every_byte_is_given_out_once_whatever_readers_want(
    files: list[list[int]], todo: list[str | list[Wanted]]
) -> None:
    ranges = ranges_of(files)
    scheduler, flying, fetched = scheduler_of(ranges), list[Piece](), [Intervals() for _ in ranges.sizes]

    def give_out() -> bool:
        piece = scheduler.take()
        if piece is None:
            return False
        assert 0 <= piece.start < piece.end <= ranges.sizes[piece.file]
        assert piece.end - piece.start <= max(PIECE, SMALL)
        for other in flying:
            assert other.file != piece.file or other.end <= piece.start or piece.end <= other.start
        assert list(fetched[piece.file].missing(piece.start, piece.end)) == [(piece.start, piece.end)]
        flying.append(piece)
        return True

    for step in todo:
        if isinstance(step, list):
            scheduler.want(step)
        elif step == "take":
            give_out()
        elif flying:
            piece = flying.pop(len(flying) // 2)
            if step == "done":
                fetched[piece.file].add(piece.start, piece.end)
            else:
                scheduler.put_back(piece.file, piece.start, piece.end)
    while give_out():
        pass
    for piece in flying:
        fetched[piece.file].add(piece.start, piece.end)
    assert [there.total for there in fetched] == ranges.sizes


@given(files_of_row_groups, st.lists(wants, min_size=1, max_size=4))
def test_what_is_wanted_comes_before_the_rest(files: list[list[int]], lists: list[Wanted]) -> None:
    ranges = ranges_of(files)
    scheduler, taken = scheduler_of(ranges), [Intervals() for _ in ranges.sizes]
    scheduler.want(lists)

    def missing(urgent: bool) -> bool:
        for item in lists:
            for row_group in item.row_groups.tolist() if item.urgent or not urgent else ():
                if not 0 <= row_group < len(ranges.file):
                    continue
                whole = [(int(ranges.starts[row_group]), int(ranges.ends[row_group]))]
                parts = whole if item.columns is None else ranges.columns(row_group, item.columns) or []
                if not all(taken[ranges.file[row_group]].has(*part) for part in parts):
                    return True
        return False

    def serves(piece: Piece, urgent: bool) -> bool:
        for item in lists:
            for row_group in item.row_groups.tolist() if item.urgent or not urgent else ():
                if 0 <= row_group < len(ranges.file) and ranges.file[row_group] == piece.file:
                    start, end = int(ranges.starts[row_group]), int(ranges.ends[row_group])
                    if start < piece.end and piece.start < end:
                        return True
        return False

    while True:
        urgent, some = missing(urgent=True), missing(urgent=False)
        piece = scheduler.take()
        if piece is None:
            break
        assert not urgent or serves(piece, urgent=True)
        assert not some or serves(piece, urgent=False)
        taken[piece.file].add(piece.start, piece.end)


def test_readers_are_served_in_turn() -> None:
    ranges = ranges_of([[2 * MB] * 8, [2 * MB] * 8])
    scheduler = scheduler_of(ranges)
    scheduler.want([wanted(7, 6, 5), wanted(8, 9, 10), wanted(15, 14)])
    order = [row_group_of(ranges, piece) for piece in take_all(scheduler)]
    assert sorted(order[:3]) == [7, 8, 15]
    assert sorted(order[3:6]) == [6, 9, 14]
    assert sorted(order[6:8]) == [5, 10]


def test_a_reader_that_comes_later_does_not_wait_for_the_others_lists() -> None:
    ranges = ranges_of([[2 * MB] * 40])
    scheduler, first = scheduler_of(ranges), wanted(*range(30))
    scheduler.want([first])
    for _ in range(5):
        scheduler.take()
    scheduler.want([first, wanted(39, 38)])
    order = [row_group_of(ranges, piece) for piece in take_all(scheduler)]
    assert {39, 38} <= set(order[:4])


def test_who_waits_comes_first_of_all() -> None:
    ranges = ranges_of([[2 * MB] * 20])
    scheduler = scheduler_of(ranges)
    scheduler.want([wanted(0, 1, 2), wanted(17, urgent=True), wanted(9, 8, urgent=True)])
    order = [row_group_of(ranges, piece) for piece in take_all(scheduler)]
    assert set(order[:3]) == {17, 9, 8}


def test_a_large_row_group_is_given_out_in_pieces_for_several_threads() -> None:
    ranges = ranges_of([[1000, 10 * PIECE]])
    scheduler = scheduler_of(ranges)
    scheduler.want([wanted(1)])
    pieces = [scheduler.take() for _ in range(10)]
    assert all(piece is not None and piece.end - piece.start == PIECE for piece in pieces)
    assert {row_group_of(ranges, piece) for piece in pieces if piece} == {1}


def test_small_neighbours_come_in_one_request() -> None:
    ranges = ranges_of([[100_000] * 30])
    scheduler = scheduler_of(ranges)
    scheduler.want([wanted(3), wanted(25)])
    first, second = scheduler.take(), scheduler.take()
    assert first is not None
    assert second is not None
    assert first.start == ranges.starts[3]
    assert 900_000 < first.end - first.start <= SMALL
    assert (second.start, second.end) == (ranges.starts[25], ranges.ends[29])


def test_columns_come_first_where_that_pays_and_near_ones_together() -> None:
    ranges = ranges_of([[40 * MB], [GAP]])
    scheduler = scheduler_of(ranges)
    scheduler.want([wanted(0, 1, columns=("0", "2"))])
    pieces = take_all(scheduler)
    start, width = int(ranges.starts[0]), 10 * MB
    first = Intervals()
    for piece in pieces[:6]:
        first.add(piece.start, piece.end)
    assert first.has(start, start + width)
    assert first.has(start + 2 * width, start + 3 * width)
    assert first.total == 2 * width
    assert pieces[6] == Piece(1, int(ranges.starts[1]), int(ranges.starts[1]) + 3 * GAP // 4)


def test_of_a_file_that_is_dropped_nothing_more_comes() -> None:
    ranges = ranges_of([[2 * MB] * 3, [2 * MB] * 3])
    scheduler = scheduler_of(ranges)
    scheduler.want([wanted(1, 4)])
    scheduler.drop(0)
    assert {piece.file for piece in take_all(scheduler)} == {1}
