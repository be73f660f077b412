"""What a run changes is named: partitions in the summary, and in a dry run each file with the reason."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

import pyarrow.parquet as pq
import pytest

import pqcache
from pqcache.events import Event, Planned, Reused
from tests.datasets import shop_table, write_day, write_shop
from tests.forked_commands import run_pqcache


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    return write_shop(tmp_path / "lake", days=3, files=2, rows=20)


def plan_of(cache: Path, **how: object) -> dict[str, tuple[str, str]]:
    events: list[Event] = []
    pqcache.sync(cache, dry_run=True, on_event=events.append, **how)  # type: ignore[arg-type]
    return {event.path: (event.action, event.reason) for event in events if isinstance(event, Planned)}


def test_a_dry_run_says_why(lake: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    pqcache.sync(lake, cache, keep=1)
    assert plan_of(cache) == {}
    one, two = "dt=2026-11-01/part-00000.parquet", "dt=2026-11-01/part-00001.parquet"
    pq.write_table(shop_table(5, 99), lake / one)
    os.utime(lake / two, ns=(1, 2 * 10**18))
    write_day(lake, "2026-11-09", files=1, rows=20)
    (lake / "dt=2026-11-02" / "part-00000.parquet").unlink()
    found = plan_of(cache)
    assert set(found) == {one, two, "dt=2026-11-09/part-00000.parquet", "dt=2026-11-02/part-00000.parquet"}
    assert found[one][0] == "change"
    sizes = [(place / one).stat().st_size for place in (lake, cache / "current")]
    assert found[one][1] == f"has {sizes[0]:,} bytes, not {sizes[1]:,}"
    assert found[two][1].startswith("was modified at 2033-05-18T03:33:20.000+00:00, not 20")
    assert found["dt=2026-11-09/part-00000.parquet"] == ("add", "is new at the source")
    assert found["dt=2026-11-02/part-00000.parquet"] == ("remove", "is gone at the source")
    left_out = plan_of(cache, where="dt >= '2026-11-03'", force=True)
    assert left_out[one] == ("remove", "is left out by the options")
    pqcache.sync(cache)
    other = plan_of(cache, columns=["id"])
    reason = "is damaged in the cache, or was fetched with other columns, rows or options"
    assert {found for _, found in other.values()} == {reason}
    rewritten = plan_of(cache, row_group_size="1MB")
    assert {action for action, _ in rewritten.values()} == {"rewrite"}


def test_summaries_name_ten_partitions_and_verbose_all(tmp_path: Path) -> None:
    lake, cache = tmp_path / "lake", tmp_path / "cache"
    for day in range(1, 13):
        write_day(lake, f"2026-11-{day:02}", files=1, rows=5)
    dry = run_pqcache("sync", lake, cache, "--dry-run").stdout
    assert dry.count("dt=") == 10
    assert "dt=2026-11-01: 1 new file, " in dry
    assert "and 2 more; --verbose shows all" in dry
    assert run_pqcache("sync", lake, cache, "--dry-run", "--verbose").stdout.count("dt=") == 12
    (line,) = run_pqcache("sync", lake, cache).stdout.splitlines()
    assert "synced 12 new files in dt=2026-11-01, " in line
    assert "dt=2026-11-10 and 2 more, " in line
    write_day(lake, "2026-11-12", files=1, rows=6)
    (line,) = run_pqcache("sync", cache).stdout.splitlines()
    assert "synced 1 changed file in dt=2026-11-12, " in line
    write_day(lake, "2026-11-12", files=2, rows=6)
    lines = run_pqcache("sync", cache, "--verbose").stdout.splitlines()
    assert "dt=2026-11-12: 1 new file, 1 changed file, " in lines[1]


def test_json_has_the_plan_and_the_partitions(lake: Path, tmp_path: Path) -> None:
    done = run_pqcache("sync", lake, tmp_path / "cache", "--dry-run", "--json")
    events = [json.loads(line) for line in done.stdout.splitlines()]
    planned = [event for event in events if event["event"] == "planned"]
    assert len(planned) == 6
    assert set(planned[0]) == {"event", "path", "action", "reason", "bytes"}
    assert [change["added"] for change in events[-1]["touched"]] == [2, 2, 2]
    pqcache.sync(lake, tmp_path / "cache")
    (first,) = pqcache.log(tmp_path / "cache")
    assert {change["reason"] for change in first["touched"]} == {"part-00000.parquet is new at the source"}


def test_the_log_has_what_changed_and_why(lake: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    pqcache.sync(lake, cache)
    size = (lake / "dt=2026-11-01" / "part-00000.parquet").stat().st_size
    write_day(lake, "2026-11-01", files=1, rows=60)
    (lake / "dt=2026-11-02" / "part-00001.parquet").unlink()
    write_day(lake, "2026-11-09", files=1, rows=6)
    now = (lake / "dt=2026-11-01" / "part-00000.parquet").stat().st_size
    report = pqcache.sync(cache)
    reasons = {
        "dt=2026-11-01": f"part-00000.parquet has {now:,} bytes, not {size:,}",
        "dt=2026-11-02": "part-00001.parquet is gone at the source",
        "dt=2026-11-09": "part-00000.parquet is new at the source",
    }
    assert {change.directory: change.reason for change in report.touched} == reasons
    record = json.loads(run_pqcache("log", cache, "--json", "--last", "1").stdout)
    assert record["touched"] == [asdict(change) for change in report.touched]
    assert record["touched_partitions"] == 3
    shown = run_pqcache("log", cache, "--last", "1").stdout.splitlines()
    assert [line.strip() for line in shown[-3:]] == [f"{name}: {reason}" for name, reason in reasons.items()]
    for part in range(103):
        write_day(lake, f"{part:03}", files=1, rows=2)
    pqcache.sync(cache)
    record = pqcache.log(cache)[-1]
    assert (len(record["touched"]), record["touched_partitions"]) == (100, 103)
    assert run_pqcache("log", cache, "--last", "1").stdout.splitlines()[-1].strip() == "and 100 more partitions"
    pqcache.sync(cache)
    assert "touched" not in pqcache.log(cache)[-1]
    pqcache.repartition(cache, row_group_size="1MB")
    reason = "its files, row groups or options have changed"
    assert {change["reason"] for change in pqcache.log(cache)[-1]["touched"]} == {reason}


@pytest.mark.parametrize("how", [{}, {"fill": True}, {"row_group_size": "1MB"}])
def test_a_run_that_goes_on_says_how_much_is_there(how: dict[str, object], tmp_path: Path) -> None:
    lake = write_shop(tmp_path / "lake", days=2, files=2, rows=2000)
    total = sum(path.stat().st_size for path in lake.rglob("*.parquet"))
    fetched: list[str] = []

    def stop(event: Event) -> None:
        if type(event).__name__ == "Fetched":
            fetched.append(event.path)  # type: ignore[union-attr]
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pqcache.sync(lake, tmp_path / "cache", jobs=1, on_event=stop, **how)  # type: ignore[arg-type]
    seen: list[Event] = []
    report = pqcache.sync(tmp_path / "cache", on_event=seen.append)
    (reused,) = [event for event in seen if isinstance(event, Reused)]
    assert reused.total == total
    assert 0 < reused.bytes <= total
    assert reused.bytes < total or how.get("fill"), "others were not begun"
    assert report.fetched_bytes == total - reused.bytes
