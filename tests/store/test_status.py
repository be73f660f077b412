"""The state of all caches below a directory, and the exit code for a monitor."""

from __future__ import annotations

import json
import os
import shutil
import time
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
import zstandard

import pqcache
from pqcache.events import Fetched, Published
from pqcache.store.cache_directory import CacheDirectory
from pqcache.store.cache_root import tables_below
from pqcache.store.history import append_history, read_history
from pqcache.store.layout import HISTORY
from pqcache.store.status import CacheStatus, next_due
from tests.datasets import write_day, write_shop
from tests.forked_commands import run_pqcache

START = datetime(2026, 11, 1, 4, 0, tzinfo=timezone.utc)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A directory with two caches, one of them deeper."""
    shop = write_shop(tmp_path / "lake", days=2, files=1, rows=20)
    pqcache.sync(shop, tmp_path / "root" / "a")
    pqcache.sync(shop, tmp_path / "root" / "team" / "b")
    (tmp_path / "root" / "empty").mkdir()
    (tmp_path / "root" / "link").symlink_to(tmp_path / "root" / "a")
    return tmp_path / "root"


def sync_at(hours: float, **values: Any) -> dict[str, Any]:
    began = START + timedelta(hours=hours)
    ended = {"time": (began + timedelta(minutes=1)).isoformat(), "began": began.isoformat()}
    return {"command": "sync", "result": "done", **ended, **values}


def test_all_caches_below_a_root(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(tables_below(root)) == [root / "a", root / "team" / "b"]
    assert list(tables_below(root / "a")) == [root / "a"]
    monkeypatch.setenv("PQCACHE_ROOT", str(root))
    found = pqcache.status()
    one = found.caches[0]
    assert (one.cache, one.source, one.rows, one.files) == (str(root / "a"), str(root.parent / "lake"), 40, 2)
    assert (one.last_result, one.last_error, one.leased, one.next_due) == ("done", None, (), None)
    assert one.age is not None
    assert 0 <= one.age < 120
    monkeypatch.delenv("PQCACHE_ROOT")
    monkeypatch.setenv("XDG_CACHE_HOME", str(root.parent / "none"))
    with pytest.raises(pqcache.CacheError, match=r"none/pqcache: not a directory; .*PQCACHE_ROOT"):
        pqcache.status()
    with pytest.raises(pqcache.CacheError, match="empty: has no cache below it"):
        pqcache.status(root / "empty")


def test_bytes_on_disk_count_shared_files_once(root: Path) -> None:
    write_day(root.parent / "lake", "2026-11-01", files=2, rows=1000)
    pqcache.sync(root / "a", keep=1)
    before = pqcache.status(root).caches[0].disk_bytes
    data = sum(path.stat().st_blocks * 512 for path in (root / "a" / "current").rglob("*.parquet"))
    write_day(root.parent / "lake", "2026-11-20", files=1, rows=20)
    pqcache.sync(root / "a", keep=2)  # a second snapshot, in which all but one file are links
    after = pqcache.status(root / "a")
    assert before is not None
    assert after.caches[0].disk_bytes is not None
    assert after.caches[0].disk_bytes - before < data
    assert after.disk_bytes == after.caches[0].disk_bytes
    shutil.copytree(root / "a", root / "c", symlinks=True, copy_function=os.link)
    both = pqcache.status(root / "a", root / "c")
    assert [item.disk_bytes for item in both.caches] == [after.disk_bytes] * 2
    assert both.disk_bytes == after.disk_bytes, "links between caches count once"


def test_runs_readers_and_caches_that_cannot_be_read(root: Path) -> None:
    with pytest.raises(pqcache.SourceNotFound):
        pqcache.sync(root / "nowhere", root / "a", new_source=True)
    pqcache.gc(root / "a")
    (root / "team" / "b" / "pqcache.toml").write_text("format = [")
    snapshot, lease = CacheDirectory(root / "a").lease()
    with lease:
        one, other = pqcache.status(root).caches
    assert one.leased == (snapshot.id,)
    assert (one.last_result, "nowhere" in str(one.last_error)) == ("failed", True)
    assert one.synced == pqcache.log(root / "a")[0]["listed"], "a run that failed makes no data fresh"
    assert "pqcache.toml: cannot be read" in str(other.error)
    assert pqcache.status(root / "a").caches[0].leased == ()


RECORD = {"run": "x", "command": "sync", "began": "2026-11-01T04:00:00+00:00", "process": 1, "started": "1"}
DAMAGED = [
    *(json.dumps({**RECORD, "time": RECORD["began"], **damage}) for damage in (
        {"began": "zzz", "time": "zzz"},
        {"began": "2026-11-01T04:00:00", "time": "0001-01-01T00:00:00+00:00"},
        {"began": 3, "time": None},
        {"command": ["sync"]},
        {"process": "one", "seconds": "long", "added": "many"},
        {"skipped": [3], "changes": {"keep": 3}, "options": [1]},
        {"run": None, "command": None, "began": None},
        {"seconds": float("inf"), "fetched_bytes": 10**400},
    )),
    "[]", "null", '{"run": ', "[" * 100_000,
]  # fmt: skip


def test_damaged_records_are_left_out(root: Path) -> None:
    """Of a run that was killed, a failing disk or another version; they hide no cache, neither now nor later."""
    with (root / "a" / HISTORY).open("ab") as file:
        for text in DAMAGED:
            file.write(zstandard.ZstdCompressor().compress(f"{text}\n".encode()))
    for done, text in enumerate(DAMAGED, 1):
        (root / "a" / "running.json").write_text(text)
        assert [found.error for found in pqcache.status(root).caches] == [None, None], text
        assert len(pqcache.log(root / "a")) == done, text
        pqcache.sync(root / "a")
        assert not (root / "a" / "running.json").exists()
    (root / "a" / "running.json").write_text(DAMAGED[0])
    for words in (("status", root), ("log", root / "a"), ("sync", "--all", root, "--metrics", root / "m.prom")):
        ended = run_pqcache(*words)
        assert ended.returncode == 0, ended
    assert 'pqcache_last_run_exit_code{cache="b"' in (root / "m.prom").read_text()
    assert pqcache.status(root).caches[0].last_result == "done"


def test_a_copy_among_the_snapshots_is_none(root: Path) -> None:
    shutil.copytree((root / "a" / "current").resolve(), root / "a" / "snapshots" / "before the change")
    assert run_pqcache("gc", root / "a", "--keep", "1").returncode == 0
    assert run_pqcache("sync", root / "a").returncode == 0
    assert [found.error for found in pqcache.status(root).caches] == [None, None]
    assert len(pqcache.snapshots(root / "a")) == 1
    assert (root / "a" / "snapshots" / "before the change").is_dir()


def test_the_age_without_a_history_is_that_of_the_snapshot(root: Path) -> None:
    (root / "a" / HISTORY).unlink()
    one = pqcache.status(root / "a").caches[0]
    assert one.last_run is None
    assert one.snapshot is not None
    assert one.synced is not None
    assert one.synced.replace("-", "").replace(":", "").startswith(one.snapshot[:15])


def age_by(cache: Path, hours: float) -> None:
    """Let all runs of a cache have been earlier."""
    records = read_history(cache)
    (cache / HISTORY).unlink()
    for record in records:
        for name in {"time", "began", "listed"} & record.keys():
            record[name] = (datetime.fromisoformat(record[name]) - timedelta(hours=hours)).isoformat()
        append_history(cache, record)


def hours_of(found: CacheStatus) -> tuple[int | None, int | None]:
    """The age, and the time since the cache was equal to its source, in full hours."""
    since = None if found.synced is None else time.time() - datetime.fromisoformat(found.synced).timestamp()
    return None if found.age is None else round(found.age / 3600), None if since is None else round(since / 3600)


def break_day(lake: Path, day: str) -> None:
    (lake / f"dt={day}" / "part-00000.parquet").write_bytes(b"PAR1 damaged PAR1")


def test_a_skipped_partition_ages_until_it_is_taken(root: Path, tmp_path: Path) -> None:
    cache, lake = root / "a", root.parent / "lake"
    age_by(cache, 50)
    break_day(lake, "2026-11-01")
    assert run_pqcache("sync", cache, "--skip-bad", "--metrics", tmp_path / "m.prom").returncode == 5
    one = pqcache.status(cache).caches[0]
    assert (hours_of(one), one.skipped) == ((50, 50), ("dt=2026-11-01",))
    assert one.reasons == ("1 partition skipped: dt=2026-11-01",)
    lines = [line for line in (tmp_path / "m.prom").read_text().splitlines() if line[0] != "#"]
    metrics = {line.partition("{")[0]: float(line.rpartition(" ")[2]) for line in lines}
    assert one.synced == one.as_of
    assert one.as_of is not None
    for name in ("last_success", "data"):
        assert metrics[f"pqcache_{name}_timestamp_seconds"] == datetime.fromisoformat(one.as_of).timestamp()
    assert metrics["pqcache_skipped_partitions"] == 1
    stale = run_pqcache("status", cache, "--max-age", "30h")
    assert stale.returncode == 1
    assert "a (2 d 2 h; 1 partition skipped: dt=2026-11-01): 1 of 1 older than 1 d 6 h" in stale.stderr

    age_by(cache, 10)
    write_day(lake, "2026-11-01", files=1, rows=21)
    break_day(lake, "2026-11-02")  # one is good again; the other was equal to its source 10 hours ago
    pqcache.sync(cache)
    assert hours_of(pqcache.status(cache).caches[0]) == (10, 60)
    age_by(cache, 10)
    write_day(lake, "2026-11-02", files=1, rows=21, first=100_000)
    pqcache.sync(cache)
    one = pqcache.status(cache).caches[0]
    assert (hours_of(one), one.reasons, one.skipped) == ((0, 0), (), ())
    age_by(cache, 10)
    write_day(lake, "2026-11-03", files=1, rows=20, first=200_000)
    break_day(lake, "2026-11-03")
    pqcache.sync(cache)
    age_by(cache, 10)
    pqcache.sync(cache)
    assert hours_of(pqcache.status(cache).caches[0]) == (20, 20), "a new partition that is left out is missing"


def test_a_cache_that_was_never_equal_to_its_source(root: Path) -> None:
    break_day(root.parent / "lake", "2026-11-01")
    pqcache.sync(root.parent / "lake", root / "c", skip_bad=True)
    age_by(root / "c", 10)
    pqcache.sync(root / "c")
    assert hours_of(pqcache.status(root / "c").caches[0]) == (10, None)


def test_after_a_rollback_the_age_is_that_of_what_is_served(root: Path) -> None:
    cache, lake = root / "a", root.parent / "lake"
    first = pqcache.snapshots(cache)[0].snapshot
    age_by(cache, 50)
    write_day(lake, "2026-11-03", files=1, rows=20, first=200_000)
    second = pqcache.sync(cache, keep=5).snapshot
    assert second is not None
    pqcache.rollback(cache, first)
    age_by(cache, 5)
    one = pqcache.status(cache).caches[0]
    assert hours_of(one) == (55, 55)
    (reason,) = one.reasons
    assert reason.startswith("rolled back from 2")
    assert run_pqcache("status", cache, "--max-age", "50h").returncode == 1
    lake.rename(root.parent / "away")
    assert run_pqcache("sync", cache).returncode == 1
    (root.parent / "away").rename(lake)
    assert hours_of(pqcache.status(cache).caches[0]) == (55, 55)
    pqcache.rollback(cache, second)
    assert hours_of(pqcache.status(cache).caches[0]) == (5, 5)
    pqcache.rollback(cache, first)
    shutil.rmtree(lake / "dt=2026-11-03")
    assert not pqcache.sync(cache).published, "the source went back too"
    one = pqcache.status(cache).caches[0]
    assert (hours_of(one), one.reasons) == ((0, 0), ())
    age_by(cache, 5)
    pqcache.repartition(cache)
    assert hours_of(pqcache.status(cache).caches[0]) == (5, 5), "no other command makes data younger"


def test_while_a_cache_is_held_its_age_is_that_of_what_is_served(root: Path) -> None:
    cache, lake = root / "a", root.parent / "lake"
    age_by(cache, 50)
    pqcache.rollback(cache, hold=True)
    write_day(lake, "2026-11-03", files=1, rows=20, first=200_000)
    pqcache.sync(cache)
    assert hours_of(pqcache.status(cache).caches[0]) == (50, 50)
    assert run_pqcache("status", cache, "--max-age", "40h").returncode == 1
    age_by(cache, 7)
    assert hours_of(pqcache.status(cache).caches[0]) == (57, 57)
    pqcache.rollback(cache, release=True)
    one = pqcache.status(cache).caches[0]
    assert (hours_of(one), one.reasons) == ((7, 7), ()), "since the listing that the candidate was made of"
    pqcache.rollback(cache, hold=True)
    pqcache.sync(cache)
    assert hours_of(pqcache.status(cache).caches[0]) == (0, 0), "nothing is new"


def test_a_failing_source(root: Path) -> None:
    cache, lake = root / "a", root.parent / "lake"
    age_by(cache, 50)
    lake.rename(root.parent / "away")
    failed = []
    for _ in range(2):
        with pytest.raises(pqcache.SourceNotFound) as error:
            pqcache.sync(cache)
        failed.append(pqcache.log(cache)[-1]["time"])
        age_by(cache, 1)
    one = pqcache.status(cache).caches[0]
    began = (datetime.fromisoformat(failed[0]) - timedelta(hours=2)).isoformat()
    assert (hours_of(one), one.last_error, one.failing_since) == ((52, 52), str(error.value), began)
    assert one.reasons == (f"failing since {began}: {error.value}",)
    (root.parent / "away").rename(lake)
    pqcache.sync(cache)
    one = pqcache.status(cache).caches[0]
    assert (hours_of(one), one.failing_since, one.reasons) == ((0, 0), None, ())


def test_tables_that_have_no_cache_yet(root: Path) -> None:
    shutil.rmtree(root / "team")
    tables = '[tables.a]\nsource = "../lake"\n[tables.new]\nsource = "../lake"\n[tables.wrong]\nkeeps = 3\n'
    (root / "pqcache.toml").write_text(tables)
    a, new, wrong = pqcache.status(root).caches
    assert (a.rows, a.reasons) == (40, ())
    assert (new.cache, new.source, new.age) == (str(root / "new"), str(root.parent / "lake"), None)
    assert new.reasons == (f"declared in {root}/pqcache.toml, and has no cache yet",)
    assert "[tables.wrong]" in str(wrong.error)
    stale = run_pqcache("status", root, "--max-age", "30h", "--json")
    assert stale.returncode == 1
    assert "new (declared in " in stale.stderr
    assert [json.loads(line)["reasons"] for line in stale.stdout.splitlines()[1:2]] == [list(new.reasons)]
    (root / "pqcache.toml").write_text(tables.partition("[tables.wrong]")[0])
    shutil.rmtree(root / "a")
    assert [bool(found.reasons) for found in pqcache.status(root).caches] == [True, True], "without any cache"
    pqcache.add(root.parent / "lake", "added", root=root)
    assert pqcache.status(root / "added").caches[0].reasons == ("never synced",)
    assert run_pqcache("sync", "--all", root).returncode == 0
    assert run_pqcache("status", root, "--max-age", "30h").returncode == 0


def test_what_a_run_is_doing_now(root: Path) -> None:
    """And when it has listed the source, which is before it fetches and ends."""
    write_day(root.parent / "lake", "2026-11-03", files=1, rows=20, first=200_000)
    seen: list[CacheStatus] = []
    shown: list[str] = []

    def look(event: pqcache.Event) -> None:
        if isinstance(event, Fetched):
            seen.append(pqcache.status(root / "a").caches[0])
            shown.append(run_pqcache("status", root / "a").stdout)
        if isinstance(event, Published):
            time.sleep(1.1)

    assert pqcache.status(root / "a").caches[0].running is None
    pqcache.sync(root / "a", on_event=look)
    (found,), (text,) = seen, shown
    record = pqcache.log(root / "a")[-1]
    assert found.running == {"command": "sync", "began": record["began"], "phase": "fetch"}
    assert (found.last_result, found.reasons) == ("done", ())
    assert "running: sync since " in text
    assert ", fetch" in text
    assert record["began"] <= record["listed"] < record["time"]
    assert pqcache.status(root / "a").caches[0].synced == record["listed"]
    assert pqcache.status(root / "a").caches[0].running is None


def test_when_the_next_run_is_due() -> None:
    nights = [sync_at(24 * night) for night in range(5)]
    assert next_due(nights[:3]) is None, "too few"
    assert next_due(nights) == (START + timedelta(days=5)).isoformat(timespec="seconds")
    missed = [*nights, sync_at(24 * 7)]
    assert next_due(missed) == (START + timedelta(days=8)).isoformat(timespec="seconds")
    away = [*nights, sync_at(24 * 4 + 3, result="refused", exit_code=75)]
    assert next_due(away) == next_due(nights)
    assert next_due([sync_at(hours) for hours in (0, 1, 9, 9.5, 30, 77)]) is None, "by a person, now and then"


def test_the_command_and_its_exit_code(root: Path) -> None:
    done = run_pqcache("status", root)
    assert done.returncode == 0, done.stderr
    titles, a, b, total = done.stdout.splitlines()
    assert titles.split()[:2] == ["cache", "rows"]
    assert (a.split()[:2], b.split()[:2]) == (["a", "40"], ["b", "40"])
    assert total.startswith("2 caches, ")
    assert run_pqcache("status", root, "--max-age", "30h").returncode == 0
    for record in pqcache.log(root / "a"):
        old = (datetime.fromtimestamp(time.time(), timezone.utc) - timedelta(days=2)).isoformat()
        (root / "a" / HISTORY).unlink()
        append_history(root / "a", {**record, "time": old, "listed": old})
    stale = run_pqcache("status", "--max-age", "30h", "--json", env={**os.environ, "PQCACHE_ROOT": str(root)})
    assert stale.returncode == 1
    assert stale.stderr == ("pqcache: error: a (2 d 0 h): 1 of 2 older than 1 d 6 h; 'pqcache log CACHE' shows why\n")
    *caches, error = map(json.loads, stale.stdout.splitlines())
    assert [item["rows"] for item in caches] == [40, 40]
    assert (error["event"], error["exit_code"]) == ("error", 1)
    assert run_pqcache("status", root, "--max-age", "soon").returncode == 2
