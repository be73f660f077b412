"""The snapshots of a cache: listed, pinned, rolled back to, opened by name, and never collected while pinned."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest

import pqcache
from pqcache.events import Event, Warned
from pqcache.store.cache_directory import CacheDirectory
from pqcache.store.history import append_history, read_history
from pqcache.torch import ParquetDataset
from pqcache.units import format_size
from tests.datasets import rows_of, write_day
from tests.forked_commands import run_pqcache
from tests.store.snapshots.conftest import add_day


def ids(cache: Path) -> list[str]:
    return [view.snapshot for view in pqcache.snapshots(cache)]


def numbers(cache: Path) -> list[int]:
    return [int(name.rpartition("-")[2]) for name in ids(cache)]


def days_in(cache: Path) -> int:
    return len(list((cache / "current").glob("dt=*")))


def age(snapshot: Path, seconds: float) -> None:
    os.utime(snapshot, (time.time() - seconds,) * 2)


def test_a_list_says_what_there_is(cache: Path) -> None:
    pqcache.pin(cache, "2", name="paper")
    with ParquetDataset(cache, nulls="mask") and pqcache.Cache.open(cache).snapshot("paper").lease():
        views = pqcache.snapshots(cache)
        text = run_pqcache("snapshots", cache).stdout
        lines = [json.loads(line) for line in run_pqcache("snapshots", cache, "--json").stdout.splitlines()]
    assert [(v.rows, v.files, v.current, v.pinned, v.name, v.leases) for v in views] == [
        (20, 1, False, False, None, 0), (40, 2, False, True, "paper", 1), (60, 3, True, False, None, views[2].leases),
    ]  # fmt: skip
    assert [line["snapshot"] for line in lines] == ids(cache)
    header, *rows = text.splitlines()
    assert header.split() == ["snapshot", "made", "(UTC)", "rows", "bytes", "alone", "readers"]
    assert rows[1].rstrip().endswith("1  pinned as paper")
    assert rows[2].rstrip().endswith("current")


def test_a_damaged_snapshot_is_listed_with_its_damage(cache: Path) -> None:
    manifest = cache / "snapshots" / ids(cache)[0] / "_pqcache" / "files.arrow"
    manifest.chmod(0o644)
    manifest.write_bytes(b"nothing")
    first = pqcache.snapshots(cache)[0]
    assert first.rows is None
    assert "files.arrow" in str(first.damage)
    assert run_pqcache("snapshots", cache).returncode == 0


def test_pinned_snapshots_outlive_keep_and_gc(lake: Path, cache: Path) -> None:
    first = ids(cache)[0]
    report = pqcache.pin(cache, first, name="paper")
    expected = {"cache": str(cache), "snapshot": first, "pins": {first: "paper"}, "removable_bytes": 0}
    assert report.to_dict() == expected
    for day in (4, 5, 6):
        add_day(lake, day)
        pqcache.sync(cache, keep=2)
    assert numbers(cache) == [1, 5, 6]
    assert first in pqcache.gc(cache, keep=1).kept
    assert numbers(cache) == [1, 6]
    assert len(ParquetDataset(cache, snapshot="paper", batch_size=20, nulls="mask")) == 1
    assert ParquetDataset(cache, snapshot="paper", nulls="mask").snapshot == first
    pqcache.unpin(cache, "paper")
    assert pqcache.gc(cache, keep=1).removed == (first,)
    with pytest.raises(pqcache.CacheError, match=r"there is no snapshot paper \(kept: .*-0006\)"):
        ParquetDataset(cache, snapshot="paper", nulls="mask")


def test_a_snapshot_is_found_by_id_number_and_name(cache: Path) -> None:
    first, second, third = ids(cache)
    pqcache.pin(cache, second, name="v1.0")
    opened = pqcache.Cache.open(cache)
    for name, found in ((first, first), ("2", second), ("0002", second), ("v1.0", second), (None, third)):
        assert opened.snapshot(name).id == found
    assert sum(batch.num_rows for batch in opened.batches(snapshot="v1.0")) == 40
    dataset = ParquetDataset(cache, ["id"], snapshot="v1.0", batch_size=20, seed=1)
    batch = next(iter(dataset))
    again = ParquetDataset(cache, ["id"], batch_size=20, seed=1)
    again.load_state_dict(dataset.state_dict(after=batch))
    assert again.snapshot == second


@pytest.mark.parametrize("name", ["", "7", "-x", "a b", "current", "x" * 65, "../up"])
def test_names_that_no_pin_can_have(cache: Path, name: str) -> None:
    with pytest.raises(pqcache.UsageError, match="no name for a snapshot"):
        pqcache.pin(cache, "1", name=name)


def test_pins_are_renamed_and_names_are_unique(cache: Path) -> None:
    first, second, _ = ids(cache)
    pqcache.pin(cache, first, name="a")
    with pytest.raises(pqcache.UsageError, match=f"--name a: is the name of {first}; unpin it first"):
        pqcache.pin(cache, second, name="a")
    assert pqcache.pin(cache, first).pins == {first: "a"}, "without a name it keeps the one that it has"
    assert pqcache.pin(cache, first, name="b").pins == {first: "b"}
    assert pqcache.pin(cache, second, name="a").pins == {first: "b", second: "a"}
    with pytest.raises(pqcache.UsageError, match="is not pinned"):
        pqcache.unpin(cache, "3")


def test_what_is_pinned_is_not_removed_where_that_cannot_be_read(cache: Path) -> None:
    pqcache.pin(cache, "1")
    (cache / "snapshots.json").write_text("{")
    for command in (["gc", cache, "--keep", "1"], ["sync", cache]):
        result = run_pqcache(*command)
        assert result.returncode == 1
        assert f"{cache}/snapshots.json: cannot be read" in result.stderr
    assert len(list((cache / "snapshots").iterdir())) == 3


def test_a_rollback_is_one_step_and_recorded_and_can_be_undone(cache: Path) -> None:
    first, _, third = ids(cache)
    reader = ParquetDataset(cache, nulls="mask")
    result = run_pqcache("rollback", cache, "1")
    assert (result.returncode, result.stderr) == (0, "")
    assert f"rolled back from {third}; {first} is current; the next sync publishes" in result.stdout
    assert days_in(cache) == 1
    assert reader.snapshot == third
    assert ParquetDataset(cache, nulls="mask").snapshot == first
    record = pqcache.log(cache)[-1]
    assert (record["command"], record["snapshot"], record["previous"]) == ("rollback", first, third)
    assert "from 0003" in run_pqcache("log", cache).stdout.splitlines()[-1]
    assert f"{first} is current as before" in run_pqcache("rollback", cache, first).stdout
    assert len(pqcache.log(cache)) == 5, "also a run that has nothing to do is one"
    assert run_pqcache("log", cache).stdout.splitlines()[-1].split()[2:5] == ["rollback", "unchanged", "-"]
    assert pqcache.verify(cache, deep=True).ok
    pqcache.rollback(cache, third)
    assert days_in(cache) == 3


def test_after_a_rollback_the_next_sync_publishes_the_source_and_says_so(lake: Path, cache: Path) -> None:
    third = ids(cache)[2]
    pqcache.rollback(cache, "1")
    for snapshot in (cache / "snapshots").iterdir():
        age(snapshot, 3600)  # older than what a run that died has left
    events: list[Event] = []
    report = pqcache.sync(cache, on_event=events.append)
    assert (report.published, days_in(cache)) == (True, 3)
    (said,) = [event.message for event in events if isinstance(event, Warned)]
    assert said == f"the cache was rolled back from {third}; the source's present state is current again"
    assert numbers(cache) == [1, 3, 4], "the one that was rolled back to is kept longer than those rolled back from"
    add_day(lake, 4)
    events.clear()
    assert pqcache.sync(cache, keep=2, on_event=events.append).published
    assert not [event for event in events if isinstance(event, Warned)]
    assert numbers(cache) == [4, 5]


def test_after_a_rollback_no_files_are_taken_that_were_rewritten_from_others(tmp_path: Path) -> None:
    source, rewritten = tmp_path / "source", tmp_path / "rewritten"
    for seed in range(3):
        write_day(source, "2026-11-01", files=2, rows=20, seed=seed)
        pqcache.sync(source, rewritten, row_group_size="8KB")
        if seed == 1:
            pqcache.rollback(rewritten, "1")
    assert rows_of(rewritten / "current") == rows_of(source)


def test_a_snapshot_that_is_damaged_or_gone_is_not_rolled_back_to(cache: Path) -> None:
    first = cache / "snapshots" / ids(cache)[0]
    file = next(first.glob("dt=*/*.parquet"))
    file.unlink()
    with pytest.raises(pqcache.DamagedError, match="1 file of it missing or not as written"):
        pqcache.rollback(cache, "1")
    with pytest.raises(pqcache.CacheError, match="there is no snapshot 9"):
        pqcache.rollback(cache, "9")
    assert days_in(cache) == 3
    with pqcache.Cache.open(cache).lock(), pytest.raises(pqcache.CacheLocked):
        pqcache.rollback(cache, "2")


def test_a_snapshot_of_the_future_is_collected_or_named(lake: Path, cache: Path) -> None:
    first, second, third = ids(cache)
    age(cache / "snapshots" / first, -86400)
    age(cache / "snapshots" / second, 1800)
    assert pqcache.gc(cache, keep=1, older_than="1h").removed == ()
    age(cache / "snapshots" / second, 86400)
    events: list[Event] = []
    report = pqcache.gc(cache, keep=1, older_than="1h", on_event=events.append)
    assert report.removed == (second,)
    (said,) = [event.message for event in events if isinstance(event, Warned)]
    assert f"{first}: kept: its time is in the future" in said
    assert pqcache.gc(cache, keep=1).removed == (first,)
    age(cache / "snapshots" / third, -86400)
    add_day(lake, 4)
    pqcache.sync(cache, keep=1)
    assert numbers(cache) == [4]


def test_the_log_keeps_the_order_of_events_whatever_the_clock_does(lake: Path, cache: Path) -> None:
    records = read_history(cache)
    (cache / "history.jsonl.zst").unlink()
    for record, time_of in zip(
        records, ("2026-11-24T04:00:00", "2031-01-01T00:00:00", "2020-01-01T00:00:00"), strict=True
    ):
        append_history(cache, {**record, "time": f"{time_of}+00:00"})
    assert [run["snapshot"] for run in pqcache.log(cache)] == ids(cache)
    (cache / "history.jsonl.zst").unlink()
    for number in (0, 2):  # the run between them was killed before it wrote its record
        append_history(cache, {**records[number], "time": "2031-01-01T00:00:00+00:00"})
    assert [(run["snapshot"], run["command"]) for run in pqcache.log(cache)] == list(
        zip(ids(cache), ("sync", "unknown", "sync"), strict=True)
    )
    add_day(lake, 4)
    pqcache.sync(cache, keep=9)
    assert len(pqcache.log(cache)) == len(ids(cache)) == 4


def test_no_number_is_given_twice(lake: Path, cache: Path) -> None:
    pqcache.rollback(cache, "1")
    pqcache.gc(cache, keep=1)
    assert numbers(cache) == [1]
    with pytest.raises(pqcache.CacheError, match="snapshot 3 was removed"):
        pqcache.rollback(cache, "3")
    pqcache.sync(cache)
    assert numbers(cache) == [1, 4]


def test_the_log_has_pins_and_what_failed(cache: Path) -> None:
    pqcache.pin(cache, "2", name="paper")
    assert run_pqcache("rollback", cache, "paper").returncode == 0
    assert run_pqcache("rollback", cache, "exp-3").returncode == 1
    assert run_pqcache("pin", cache, "1", "--name", "paper").returncode == 2
    pqcache.unpin(cache, "paper")
    with CacheDirectory(cache).lock():
        assert run_pqcache("pin", cache, "1").returncode == 75
    records = pqcache.log(cache)[3:]
    assert [(record["command"], record["result"], record.get("exit_code")) for record in records] == [
        ("pin", "done", None), ("rollback", "done", None), ("rollback", "failed", 1), ("pin", "failed", 2),
        ("unpin", "done", None), ("pin", "refused", 75),
    ]  # fmt: skip
    assert "there is no snapshot exp-3" in records[2]["error"]
    shown = [line.split()[2:5] for line in run_pqcache("log", cache).stdout.splitlines() if line.startswith("20")]
    assert shown[3:5] == [["pin", "as", "paper"], ["rollback", "from", "0003"]]


def on_disk(*places: Path) -> int:
    return int(subprocess.run(["du", "-sc", "-B1", *places], capture_output=True, text=True).stdout.split()[-2])


def test_what_removing_snapshots_frees(lake: Path, cache: Path, tmp_path: Path) -> None:
    write_day(lake, "2026-11-01", files=1, rows=5000, first=9000)
    pqcache.sync(cache, keep=4)
    write_day(lake, "2026-11-01", files=1, rows=20, first=0)
    pqcache.sync(cache, keep=5, force=True)
    views = pqcache.snapshots(cache)
    snapshots = cache / "snapshots"
    for older, newer in itertools.pairwise(views):
        both, later = (
            on_disk(snapshots / older.snapshot, snapshots / newer.snapshot),
            on_disk(snapshots / newer.snapshot),
        )
        assert older.replaced_bytes == both - later
    assert views[-1].replaced_bytes is None
    large = views[3]
    assert (
        large.own_bytes
        == on_disk(snapshots) - on_disk(*(p for p in snapshots.iterdir() if p.name != large.snapshot)) - 4096
    )
    shown = run_pqcache("snapshots", cache).stdout.splitlines()
    mean = sum(view.replaced_bytes or 0 for view in views) // 4
    assert f"takes about {format_size(mean)}: as much as the last 4 syncs replaced" in shown[-1]

    pqcache.pin(cache, "4")
    planned = pqcache.gc(cache, keep=1, dry_run=True)
    before = on_disk(snapshots)
    done = pqcache.gc(cache, keep=1)
    assert planned.bytes == done.bytes == before - on_disk(snapshots) > 0
    pqcache.sync(cache, keep=1)
    (file,) = (snapshots / large.snapshot / "dt=2026-11-01").glob("*.parquet")
    os.link(file, tmp_path / "linked")
    with_link = run_pqcache("unpin", cache, "4", "--json")
    freed = json.loads(with_link.stdout)["removable_bytes"]
    with CacheDirectory(cache).snapshot("4").lease():
        assert pqcache.gc(cache, dry_run=True) == replace(planned, removed=(), kept=tuple(ids(cache)), bytes=0)
    before = on_disk(snapshots)
    said = run_pqcache("gc", cache).stdout
    assert f"removed 1 snapshot ({format_size(freed)} freed), kept 1 snapshot" in said
    assert freed == before - on_disk(snapshots) - on_disk(tmp_path / "linked")
