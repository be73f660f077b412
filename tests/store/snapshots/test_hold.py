"""A held cache: syncs make a candidate, readers stay where they are, and a release publishes exactly the candidate."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import pqcache
from pqcache.events import Advanced, Event
from pqcache.store.cache_directory import CacheDirectory
from tests.datasets import write_day
from tests.faults.checks import Rows, check_clean, rows_at, same_rows
from tests.forked_commands import run_pqcache
from tests.store.snapshots.conftest import add_day


@pytest.fixture
def cache(cache: Path) -> Path:
    """The cache of three nights, held at the second."""
    pqcache.rollback(cache, "2", hold=True)
    return cache


def fetched(cache: Path) -> int:
    """The bytes that a sync fetches."""
    events: list[Event] = []
    pqcache.sync(cache, on_event=events.append)
    return sum(event.amount for event in events if isinstance(event, Advanced) and event.phase == "fetch")


def waiting(cache: Path) -> Rows | None:
    found = CacheDirectory(cache).candidate()
    return None if found is None else rows_at(found.path)


def is_current(cache: Path, rows: Rows) -> bool:
    return same_rows(rows_at(cache / "current"), rows)


def test_nights_make_one_candidate_and_readers_stay(lake: Path, cache: Path) -> None:
    served = rows_at(cache / "current")
    with pqcache.Cache.open(cache).snapshot().lease():
        for day in (4, 5):
            add_day(lake, day)
            report = pqcache.sync(cache)
            assert not report.published
            assert report.snapshot == (cache / "current").resolve().name
            assert [report.candidate] == [path.name for path in (cache / "candidate").iterdir()], (
                "the last is the only one"
            )
            assert report.rows == 20 * day
            (new,) = (lake / f"dt=2026-11-0{day}").glob("part-*")
            assert report.fetched_bytes == new.stat().st_size, "only what candidate and kept snapshots lack"
            held = waiting(cache)
            assert held is not None
            assert same_rows(held, rows_at(lake))
            assert is_current(cache, served)
        again = pqcache.sync(cache)
        assert (again.candidate, again.fetched_bytes) == (report.candidate, 0), "nothing new: it stays the candidate"
        check_clean(cache)
    assert [view.snapshot for view in pqcache.snapshots(cache) if view.candidate] == [report.candidate]
    assert pqcache.Cache.open(cache).snapshot().id == report.snapshot
    assert sum(batch.num_rows for batch in pqcache.Cache.open(cache).batches(["id"])) == 40


def test_release_publishes_the_candidate_without_the_source(lake: Path, cache: Path) -> None:
    add_day(lake, 4)
    candidate = pqcache.sync(cache).candidate
    wanted = rows_at(lake)
    shutil.rmtree(lake)
    before = (cache / "current").resolve().name
    result = run_pqcache("rollback", cache, "--release")
    assert result.returncode == 0, result.stderr
    assert f"published {candidate} in place of {before}; the next sync publishes" in result.stdout
    assert (cache / "current").resolve().name == candidate
    assert is_current(cache, wanted)
    assert waiting(cache) is None
    *_, record = pqcache.log(cache)
    assert (record["command"], record["snapshot"], record["previous"]) == ("rollback", candidate, before)
    add_day(lake, 1)
    assert pqcache.sync(cache, force=True).published, "nothing is held any more"
    assert pqcache.verify(cache).ok


def test_a_release_without_a_candidate_ends_the_hold(lake: Path, cache: Path) -> None:
    report = pqcache.rollback(cache, release=True)
    assert (report.snapshot, report.published, report.hold) == (report.previous, False, None)
    assert pqcache.sync(cache).published
    assert is_current(cache, rows_at(lake))
    with pytest.raises(pqcache.UsageError, match="no snapshot waits to be published"):
        pqcache.rollback(cache, accept=True)


def test_a_hold_of_the_current_snapshot_survives_a_rollback(lake: Path, cache: Path) -> None:
    pqcache.rollback(cache, release=True)
    pqcache.sync(cache)
    first = pqcache.rollback(cache, hold=True)
    assert first.snapshot == first.previous
    add_day(lake, 4)
    candidate = pqcache.sync(cache).candidate
    report = pqcache.rollback(cache, "2")
    assert (report.hold, report.candidate) == (first.hold, candidate), "the hold and the candidate stay"
    assert pqcache.rollback(cache, hold=True).hold == first.hold, "since when it is held"
    assert pqcache.sync(cache).candidate == candidate
    assert pqcache.rollback(cache, release=True).snapshot == candidate
    assert is_current(cache, rows_at(lake))


def test_a_source_that_is_again_as_what_is_served_leaves_no_candidate(lake: Path, cache: Path) -> None:
    assert pqcache.sync(cache).candidate is not None
    shutil.rmtree(lake / "dt=2026-11-03")
    report = pqcache.sync(cache)
    assert (report.candidate, report.published, report.rows) == (None, False, 40)
    assert waiting(cache) is None
    (status,) = pqcache.status(cache).caches
    assert status.candidate is None
    assert status.age is not None
    assert status.age < 60


@pytest.mark.parametrize(
    "words", [["repartition"], ["verify", "--repair"], ["index", "--key", "id"]], ids=lambda words: words[0]
)
def test_all_else_that_publishes_is_refused(words: list[str], cache: Path) -> None:
    (cache / "current" / "dt=2026-11-01" / "part-00000.parquet").unlink()
    before = {view.snapshot for view in pqcache.snapshots(cache)}
    result = run_pqcache(words[0], cache, *words[1:])
    assert result.returncode == 1
    assert "held since 20" in result.stderr
    assert f"end the hold with 'pqcache rollback {cache} --release' first" in result.stderr
    assert {view.snapshot for view in pqcache.snapshots(cache)} == before


def test_status_says_since_when_and_what_waits(lake: Path, cache: Path) -> None:
    candidate = pqcache.sync(cache).candidate
    (status,) = [json.loads(line) for line in run_pqcache("status", cache, "--json").stdout.splitlines()]
    assert status["held"].keys() == {"since", "by"}
    assert status["candidate"] == candidate
    held, waits = status["reasons"][1:]
    assert held == f"held since {status['held']['since']} by {status['held']['by']}"
    assert waits == f"{candidate} with 60 rows is not published"
    assert f"    {waits}" in run_pqcache("status", cache).stdout.splitlines()
    line = run_pqcache("log", cache).stdout.splitlines()[-2]
    assert line.split()[2:5] == ["sync", "+1", "(not"]
    assert line.endswith(str(candidate))


def test_gc_keeps_the_candidate_and_removes_what_it_replaced(lake: Path, cache: Path) -> None:
    first = pqcache.sync(cache).candidate
    assert first is not None
    with CacheDirectory(cache).snapshot("candidate").lease():  # somebody looks at it
        add_day(lake, 4)
        second = pqcache.sync(cache).candidate
        assert {path.name for path in (cache / "candidate").iterdir()} == {first, second}
        assert CacheDirectory(cache).snapshot("candidate").id == second
    assert first in pqcache.gc(cache, keep=1).removed
    assert [path.name for path in (cache / "candidate").iterdir()] == [second]
    pqcache.rollback(cache, release=True)
    assert is_current(cache, rows_at(lake))


def test_a_damaged_candidate_is_not_published_and_made_again(lake: Path, cache: Path) -> None:
    candidate = pqcache.sync(cache).candidate
    (cache / "candidate" / str(candidate) / "dt=2026-11-03" / "part-00000.parquet").unlink()
    with pytest.raises(pqcache.DamagedError, match=r"1 file of it missing .*which rebuilds it"):
        pqcache.rollback(cache, release=True)
    (status,) = pqcache.status(cache).caches
    assert status.held is not None
    pqcache.sync(cache)
    pqcache.rollback(cache, release=True)
    assert is_current(cache, rows_at(lake))


def test_the_candidate_is_looked_at_but_neither_pinned_nor_read_as_current(cache: Path) -> None:
    candidate = pqcache.sync(cache).candidate
    found = json.loads(run_pqcache("inspect", cache, "--candidate", "--json").stdout)
    assert (found["snapshot"], found["rows"]) == (candidate, 60)
    assert len(run_pqcache("inspect", cache, "--candidate", "--files").stdout.splitlines()) == 4
    assert sum(batch.num_rows for batch in pqcache.Cache.open(cache).batches(["id"], snapshot="candidate")) == 60
    for words in (["pin", cache, "candidate"], ["rollback", cache, candidate]):
        result = run_pqcache(*words)
        assert result.returncode == 2
        assert "is the candidate, which is not published" in result.stderr
    pqcache.rollback(cache, release=True)
    result = run_pqcache("inspect", cache, "--candidate")
    assert (result.returncode, "no snapshot waits to be published" in result.stderr) == (1, True)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "needs a snapshot"),
        (["1", "--release"], "--release and SNAPSHOT: exclude each other"),
        (["--hold", "--accept"], "--hold and --accept: exclude each other"),
    ],
)
def test_words_that_make_no_sense_change_nothing(words: list[Any], said: str, cache: Path) -> None:
    before = (cache / "snapshots.json").read_text()
    result = run_pqcache("rollback", cache, *words)
    assert result.returncode == 2
    assert said in result.stderr
    assert (cache / "snapshots.json").read_text() == before


def test_options_given_while_it_is_held_are_those_of_the_candidate(lake: Path, cache: Path) -> None:
    pqcache.sync(cache, columns=["id"])
    assert pqcache.sync(cache).fetched_bytes == 0, "remembered"
    pqcache.rollback(cache, release=True)
    assert {name for table in rows_at(cache / "current").values() for name in table.column_names} == {"id"}
    assert not pqcache.sync(cache).published


@pytest.mark.parametrize(
    ("held", "options"), [(False, {}), (True, {"row_group_size": "8KB"})], ids=["published copies", "held rewritten"]
)
def test_after_a_rollback_nothing_is_fetched_that_a_kept_snapshot_has(
    held: bool, options: dict[str, Any], tmp_path: Path
) -> None:
    """A partition came, one was replaced and got a file, and one is newer than all that is kept."""
    lake, cache = tmp_path / "lake", tmp_path / "cache"
    for day in (1, 2):
        add_day(lake, day)
    pqcache.sync(lake, cache, keep=3, **options)
    shutil.rmtree(lake / "dt=2026-11-02")
    write_day(lake, "2026-11-02", files=2, rows=30, first=50_000)
    add_day(lake, 3)
    pqcache.sync(cache)
    pqcache.rollback(cache, "1", hold=held)
    add_day(lake, 4)
    new = sum(path.stat().st_size for path in (lake / "dt=2026-11-04").glob("part-*"))
    planned = pqcache.sync(cache, dry_run=True)
    assert (planned.fetched_bytes, planned.added, planned.changed) == (new, 3, 1)
    assert [change.directory for change in planned.touched] == [f"dt=2026-11-0{day}" for day in (2, 3, 4)]
    assert fetched(cache) == new
    if held:
        pqcache.rollback(cache, release=True)
    assert same_values(rows_at(cache / "current"), rows_at(lake))
    assert pqcache.verify(cache, deep=True).ok
    assert not pqcache.sync(cache).published


def same_values(one: Rows, other: Rows) -> bool:
    """Row groups of another size may make other chunks."""
    return {name: table.to_pylist() for name, table in one.items()} == {
        name: table.to_pylist() for name, table in other.items()
    }


@pytest.mark.parametrize("options", [{}, {"row_group_size": "8KB"}], ids=["copies", "rewritten"])
def test_of_a_partition_that_is_damaged_in_a_kept_snapshot_all_is_fetched(
    options: dict[str, Any], lake: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    pqcache.sync(lake, cache, keep=3, **options)
    write_day(lake, "2026-11-02", files=2, rows=40, first=9000)
    add_day(lake, 3)
    pqcache.sync(cache)
    sorted((cache / "current" / "dt=2026-11-02").iterdir())[-1].unlink()
    pqcache.rollback(cache, "1")
    assert fetched(cache) == sum(path.stat().st_size for path in (lake / "dt=2026-11-02").glob("part-*"))
    assert same_values(rows_at(cache / "current"), rows_at(lake))


def test_comparing_content_trusts_no_kept_snapshot(lake: Path, cache: Path) -> None:
    pqcache.rollback(cache, release=True)
    assert pqcache.sync(cache, compare="content").fetched_bytes > 0
    assert is_current(cache, rows_at(lake))


def test_a_kept_file_of_the_right_size_that_is_no_parquet_is_named(lake: Path, cache: Path) -> None:
    third = CacheDirectory(cache).snapshot("3").path / "dt=2026-11-03" / "part-00000.parquet"
    size = third.stat().st_size
    third.unlink()
    third.write_bytes(bytes(size))
    with pytest.raises(pqcache.DamagedError, match=r"remove that snapshot with 'pqcache gc .*--keep 1'"):
        pqcache.sync(cache)
    pqcache.gc(cache, keep=1)
    pqcache.sync(cache)
    pqcache.rollback(cache, release=True)
    assert is_current(cache, rows_at(lake))


def test_a_reader_of_the_candidate_goes_on_when_it_is_published(lake: Path, cache: Path) -> None:
    add_day(lake, 4)
    pqcache.sync(cache)
    batches = pqcache.Cache.open(cache).batches(["id"], snapshot="candidate", batch_size=5, window=1)
    ids = next(batches)["id"].to_pylist()
    pqcache.rollback(cache, release=True)
    ids += [i for batch in batches for i in batch["id"].to_pylist()]
    assert sorted(ids) == sorted(i for day in rows_at(lake).values() for i in day["id"].to_pylist())


def test_a_candidate_that_the_source_has_left_is_not_published_even_if_it_is_read(lake: Path, cache: Path) -> None:
    served = rows_at(cache / "current")
    pqcache.sync(cache)
    with pqcache.Cache.open(cache).snapshot("candidate").lease():
        shutil.rmtree(lake / "dt=2026-11-03")
        assert pqcache.sync(cache, force=True).candidate is None
        assert waiting(cache) is None
        assert not pqcache.rollback(cache, release=True).published
        assert is_current(cache, served)
    pqcache.gc(cache)
    assert not list((cache / "candidate").iterdir())


def test_reasons_that_cannot_be_read_keep_a_candidate_from_being_published(lake: Path, cache: Path) -> None:
    candidate = pqcache.sync(cache).candidate
    (cache / "candidate" / str(candidate) / "_pqcache" / "unmet.json").write_text("{")
    with pytest.raises(pqcache.UsageError, match=r"does not meet the rules of \[expect\]: .*unmet.json is damaged"):
        pqcache.rollback(cache, release=True)
    assert pqcache.sync(cache).candidate != candidate
    assert pqcache.rollback(cache, release=True).published
