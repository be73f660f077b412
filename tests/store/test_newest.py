"""Which partitions are the newest, and how many of them fit."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pqcache.errors import UsageError
from pqcache.store.config import Config
from pqcache.store.partition_paths import NULL
from pqcache.store.table_part import FREE, FreeSpace, Newest, newest_partitions, parse_newest
from tests.examples import examples

words = st.one_of(st.integers(-20, 2000).map(str), st.sampled_from(["007", "2026-11-01", "tmp", "a", NULL, "٣", ""]))
levels = st.sampled_from(
    [words.map("a={}".format), st.tuples(words, words).map(lambda values: "a={}/b={}".format(*values))]
)


def are_partitions(table: dict[str, int]) -> bool:
    """Return whether each directory is a partition of its own: not one like a=7 and a=007."""
    return newest_partitions(table, Newest("all", partitions=len(table))).listed == len(table)


tables = levels.flatmap(
    lambda paths: st.dictionaries(paths, st.integers(0, 1000), min_size=1, max_size=30).filter(are_partitions)
)


def newest_first(directories: list[str]) -> list[str]:
    """Return directories in the order in which they are taken, one at a time."""
    table = dict.fromkeys(directories, 1)
    taken: list[str] = []
    for number in range(1, len(table) + 1):
        outside = newest_partitions(table, Newest("n", partitions=number)).outside
        taken.extend(table.keys() - outside - set(taken))
    return taken


@pytest.mark.parametrize(
    ("partitions", "order"),
    [
        (["dt=9", "dt=10", "dt=-1"], ["dt=10", "dt=9", "dt=-1"]),
        (["h=08", "h=9", "h=10"], ["h=10", "h=9", "h=08"]),
        (["dt=2026-11-02", "dt=2026-11-10", f"dt={NULL}"], ["dt=2026-11-10", "dt=2026-11-02", f"dt={NULL}"]),
        (["dt=9", "dt=10", "dt=tmp"], ["dt=tmp", "dt=10", "dt=9"]),  # a stray name leaves the others in order
        (["y=2025/m=12", "y=2026/m=2", "y=2026/m=1"], ["y=2026/m=2", "y=2026/m=1", "y=2025/m=12"]),
        (["dt=1", "dt=2", "dt=2/h=1"], ["dt=2/h=1", "dt=2", "dt=1"]),  # a column that came later
        (["dt=1", "dt=2", "region=kr/dt=3"], ["region=kr/dt=3", "dt=2", "dt=1"]),  # above what was there
        (["", "dt=1"], ["dt=1", ""]),
        (["dt=a%2Fb", "dt=a%20b"], ["dt=a%2Fb", "dt=a%20b"]),  # as values: '/' is after ' '
    ],
)
def test_the_order_of_partitions(partitions: list[str], order: list[str]) -> None:
    assert newest_first(partitions) == order
    assert newest_first(partitions[::-1]) == order


@given(tables, st.integers(1, 12) | st.none(), st.integers(1, 4000) | st.none())
@settings(max_examples=examples(300))
def test_they_fit_and_one_more_does_not(table: dict[str, int], count: int | None, size: int | None) -> None:
    limit = Newest("limit", count, size)
    order = newest_first(list(table))
    assert sorted(order) == sorted(table)
    if size is not None and table[order[0]] > size:
        with pytest.raises(UsageError, match="the newest partition"):
            newest_partitions(table, limit)
        return
    found = newest_partitions(table, limit)
    taken = order[: found.taken]
    assert found.listed == len(table)
    assert found.outside == set(order[found.taken :])  # a row of the newest, without a gap
    assert len(taken) <= (count or len(table))
    assert sum(table[name] for name in taken) <= (size or sum(table.values()))
    if found.outside:
        more = sum(table[name] for name in order[: found.taken + 1])
        assert found.taken == count or (size is not None and more > size)


def test_directories_of_one_partition_are_taken_together() -> None:
    table = {"dt=1/a": 5, "dt=1/b": 5, "dt=2/a": 5, "dt=2/b": 5}
    assert newest_partitions(table, Newest("1", partitions=1)).outside == {"dt=1/a", "dt=1/b"}
    assert newest_partitions(table, Newest("15B", size=15)).outside == {"dt=1/a", "dt=1/b"}
    assert newest_partitions(table, Newest("1", partitions=1), waiting={"dt=2/a"}).taken == 1
    assert newest_partitions(table, Newest("1", partitions=1), waiting={"dt=2/a", "dt=2/b"}).outside == set()


def test_one_number_written_in_two_ways_is_one_partition() -> None:
    table = {"month=9": 5, "month=09": 5, "month=9.0": 5, "month=8": 5, "month=x9": 5, "month=x09": 5}
    two = newest_partitions(table, Newest("3", partitions=3))
    assert (two.taken, two.listed, two.outside) == (3, 4, {"month=8"})
    assert newest_partitions(table, Newest("24B", size=24)).outside == {"month=9", "month=09", "month=9.0", "month=8"}


@pytest.mark.parametrize("table", [{"": 5}, {"2026/11": 5, "2026/12": 5}])
def test_a_table_without_partitions_is_refused(table: dict[str, int]) -> None:
    with pytest.raises(UsageError, match=r"--newest 3: needs partitions, but the table has none.*--newest ''"):
        newest_partitions(table, parse_newest("3"))


@pytest.mark.parametrize(
    ("text", "partitions", "size"),
    [("30", 30, None), (" 4 ", 4, None), ("500GB", None, 500 << 30), ("1.5k", None, 1536), ("10B", None, 10)],
)
def test_what_may_be_written(text: str, partitions: int | None, size: int | None) -> None:
    found = parse_newest(text)
    assert (found.partitions, found.size) == (partitions, size)
    assert parse_newest("Free") == Newest(FREE)


REFUSED = ["", "0", "-5", "30x", "2.5", "0GB", "abc", "1_000", "9" * 400 + "E", "9" * 5000, "٣"]


@pytest.mark.parametrize("text", REFUSED, ids=range(len(REFUSED)))
def test_what_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--newest"):
        parse_newest(text)


def test_free_space_is_nothing_that_nodes_agree_on() -> None:
    with pytest.raises(UsageError, match=r"--newest free: excludes --shard 0/2"):
        Config(source="x", newest=" FREE", shard="0/2")
    assert Config(source="x", newest="3", shard="0/2").newest == "3"


@given(
    st.lists(st.integers(70, 130), min_size=40, max_size=40),
    st.integers(900, 6000),
    st.integers(1, 3),
    st.booleans(),
    st.lists(st.integers(0, 1), min_size=30, max_size=30),
)
@settings(max_examples=examples(150), deadline=None)
def test_free_space_lasts_night_after_night(
    sizes: list[int], disk: int, keep: int, rewrites: bool, nights: list[int]
) -> None:
    """With one partition a night each run fits beside the kept snapshots; what was left out does not come back."""
    snapshots: list[set[str]] = []
    gone: set[str] = set()
    listed = 10
    for come in nights:
        listed = min(len(sizes), listed + come)
        table = {f"dt={day}": sizes[day] for day in range(listed)}
        held = snapshots[-1] if snapshots else set()
        apart = set().union(*snapshots) - held
        free = disk - sum(table[name] for name in held | apart)
        space = FreeSpace(
            free=free + sum(table[name] for name in apart),
            held=sum(table[name] for name in held),
            keep=keep,
            rewrites=rewrites,
        )
        taken = table.keys() - newest_partitions(table, space, held=held).outside
        assert f"dt={listed - 1}" in taken
        needed = sum(table[name] for name in taken - held) * (2 if rewrites else 1)
        assert needed <= free
        assert not taken & gone
        gone |= held - taken
        if taken != held:
            snapshots = [*snapshots, set(taken)][-keep:]
