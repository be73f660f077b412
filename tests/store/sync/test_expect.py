"""Rules in ``[expect]``: what they find agrees with a plain computation on the source's rows, and what follows."""

from __future__ import annotations

import json
import os
import random
import re
import statistics
import time
from pathlib import Path
from typing import Any

import deltalake
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import pqcache
from pqcache import CacheError, ContractNotMet, UsageError
from pqcache.events import Event, Fetched, Warned
from tests.damage import flip
from tests.forked_commands import run_pqcache


def write(
    lake: Path, directory: str, rows: int, *, first: int = 0, nulls: int = 0, name: str = "part-0", **how: Any
) -> None:
    """Write a file with ``nulls`` at the beginning of ``price``, in row groups of seven rows."""
    price = [None if row < nulls else row / 4 for row in range(rows)]
    table = pa.table({"id": pa.array(range(first, first + rows), pa.int64()), "price": pa.array(price, pa.float64())})
    (lake / directory).mkdir(parents=True, exist_ok=True)
    pq.write_table(table, lake / directory / f"{name}.parquet", **{"row_group_size": 7, **how})


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    """Eight days with ten rows each, and rising ids."""
    for day in range(1, 9):
        write(tmp_path / "lake", f"dt=2026-11-0{day}", 10, first=100 * day)
    return tmp_path / "lake"


def found_in(cache: Path, source: Path | None = None, **how: Any) -> list[tuple[str, str, str]]:
    """The findings of a sync: level, place and reason."""
    report = pqcache.sync(source or cache, cache if source else None, **how)
    return [(item.level, item.place, item.reason) for item in report.expect]


def published(cache: Path) -> list[int | None]:
    """The rows of all snapshots but the candidate."""
    return [view.rows for view in pqcache.snapshots(cache) if not view.candidate]


def refusal(cache: Path, **how: Any) -> str:
    """The error of a sync that publishes nothing."""
    before = published(cache)
    with pytest.raises(ContractNotMet) as caught:
        pqcache.sync(cache, **how)
    assert caught.value.exit_code == 6
    assert published(cache) == before
    return str(caught.value)


@pytest.mark.parametrize("seed", range(2))
def test_rows_are_compared_with_the_median_of_the_days_before(tmp_path: Path, seed: int) -> None:
    numbers, lake = random.Random(seed), tmp_path / "lake"
    rows = {f"2026-11-{day:02}": numbers.choice((5, 8, 10, 11, 13, 20)) for day in range(1, 16)}
    for day, count in rows.items():
        for region in ("kr", "us"):
            write(lake, f"dt={day}/region={region}", count)
    wanted = {}
    for position, (day, count) in enumerate(rows.items()):
        before = [2 * other for other in list(rows.values())[max(0, position - 5) : position]]
        if len(before) < 3:
            wanted[f"dt={day}"] = "passed", f"not enough history ({len(before)} of 5)"
        elif not 0.8 * statistics.median(before) <= 2 * count <= 1.2 * statistics.median(before):
            wanted[f"dt={day}"] = "warned", f"{2 * count} rows, "
    report = pqcache.sync(lake, tmp_path / "cache", expect=["rows per dt within 20% of the last 5: warn"])
    found = {item.place: (item.level, item.reason) for item in report.expect}
    assert found.keys() == wanted.keys()
    assert all(found[day][0] == level and found[day][1].startswith(reason) for day, (level, reason) in wanted.items())
    assert {level for level, _ in wanted.values()} == {"passed", "warned"}


def test_new_and_changed_partitions_are_judged_and_no_others(lake: Path, tmp_path: Path) -> None:
    cache, rule = tmp_path / "cache", "rows per dt within 30% of the last 7"
    write(lake, "dt=2026-11-08", 30)
    pqcache.sync(lake, cache)
    write(lake, "dt=2026-11-09", 13)
    assert found_in(cache, expect=[rule]) == []  # the old day that is too large stays as it is
    write(lake, "dt=2026-11-10", 14)
    assert f"{rule}: dt=2026-11-10: 14 rows, 40.0% above 10, the median of the 7 before; nothing was" in refusal(cache)
    write(lake, "dt=2026-11-10", 7)
    write(lake, "dt=2026-11-05", 2)
    assert "dt=2026-11-05: 2 rows, 80.0% below 10, the median of the 4 before; nothing" in refusal(cache, force=True)
    write(lake, "dt=2026-11-05", 10, name="other")
    (lake / "dt=2026-11-05" / "part-0.parquet").unlink()
    write(lake, "dt=2026-11-01", 500)
    assert found_in(cache) == [("passed", "dt=2026-11-01", "not enough history (0 of 7)")]
    (lake / "dt=2026-11-10" / "part-0.parquet").unlink()
    assert found_in(cache) == []  # one that is gone is not judged


def test_rows_per_several_columns_are_in_their_order(tmp_path: Path) -> None:
    lake, cache = tmp_path / "lake", tmp_path / "cache"
    for number, (year, month) in enumerate([(2025, 10), (2025, 11), (2025, 12), (2026, 1), (2026, 2)]):
        write(lake, f"year={year}/month={month}", 10 + 10 * (number == 3))
    write(lake, "year=2026/month=__HIVE_DEFAULT_PARTITION__", 90)
    rule = "rows per year, month within 10% of the last 4: warn"
    assert found_in(cache, lake, expect=[rule]) == [
        ("passed", "year=2026/month=null", "not enough history (0 of 4)"),
        ("passed", "year=2025/month=10", "not enough history (0 of 4)"),
        ("passed", "year=2025/month=11", "not enough history (1 of 4)"),
        ("passed", "year=2025/month=12", "not enough history (2 of 4)"),
        ("warned", "year=2026/month=1", "20 rows, 100.0% above 10, the median of the 3 before"),
    ]


FAILING = {"< 10%": (2, 3), "<= 10%": (3,), "< 2": (2, 3), "<= 2": (3,), "= 0": (1, 2, 3), "<10.5 %": (3,)}


def test_nulls_in_each_partition(tmp_path: Path) -> None:
    for nulls in range(4):
        write(tmp_path / "lake", f"n={nulls}", 13, nulls=nulls)
        write(tmp_path / "lake", f"n={nulls}", 7, name="other")
    rules = [f"nulls.price {rule} : warn" for rule in FAILING]
    found = [(item.place, item.reason) for item in pqcache.sync(tmp_path / "lake", tmp_path / "c", expect=rules).expect]
    assert found == [(f"n={n}", f"{n} of 20 rows ({5 * n}%)") for fails in FAILING.values() for n in fails]


def test_a_file_without_the_column_has_nulls_only(lake: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    pqcache.sync(lake, cache, expect=["nulls.price < 30%", "nulls.dt = 0"])
    pq.write_table(pa.table({"id": pa.array([1, 2, 3, 4, 5])}), lake / "dt=2026-11-08" / "old.parquet")
    assert "nulls.price < 30%: dt=2026-11-08: 5 of 15 rows (33.3%); nothing was published" in refusal(cache)
    write(lake, "dt=__HIVE_DEFAULT_PARTITION__", 3)
    error = refusal(cache, expect=["nulls.dt = 0"])
    assert "nulls.dt = 0: dt=__HIVE_DEFAULT_PARTITION__: 3 of 3 rows (100%); nothing" in error


def test_a_maximum_rises_over_the_current_snapshot(lake: Path, tmp_path: Path) -> None:
    cache, rules = tmp_path / "cache", ["max(id) rises", "max(dt) rises: warn"]
    assert found_in(cache, lake, expect=rules) == []  # the first sync passes
    write(lake, "dt=2026-11-09", 10, first=800)
    assert "max(id) rises: 809 in what is new, 809 before; nothing was published" in refusal(cache)
    write(lake, "dt=2026-11-09", 11, first=800)
    assert found_in(cache) == []
    write(lake, "dt=2026-11-02", 11, first=801)
    write(lake, "dt=2026-11-03", 11, first=30)
    assert found_in(cache) == [("warned", "", "2026-11-03 in what is new, 2026-11-09 before")]


def test_row_groups_without_values_have_no_maximum(lake: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    ids = pa.table({"id": pa.array([None, None], pa.int64()), "price": [1.0, 2.0]})
    pqcache.sync(lake, cache, expect=["max(id) rises", "nulls.id < 50%"])
    directory = lake / "dt=2026-11-09"
    write(lake, "dt=2026-11-09", 30, first=900)
    pq.write_table(pa.table({"price": [1.0]}), directory / "without.parquet")
    pq.write_table(ids, directory / "nulls.parquet")
    pq.write_table(ids.slice(2), directory / "nothing.parquet", write_statistics=False)
    assert found_in(cache) == []
    write(lake, "dt=2026-11-10", 2, nulls=1)
    pq.write_table(pa.table({"price": [1.0]}), lake / "dt=2026-11-10" / "part-0.parquet")
    error = refusal(cache)
    assert "max(id) rises: no value in what is new, 929 before; nulls.id < 50%: dt=2026-11-10: 1 of 1 row (10" in error


def test_a_compaction_of_a_table_brings_nothing_new(tmp_path: Path) -> None:
    lake, cache = tmp_path / "lake", tmp_path / "cache"
    for day in (1, 2):
        for first in (0, 10):
            ids = pa.table({"dt": [day] * 10, "id": pa.array(range(100 * day + first, 100 * day + first + 10))})
            deltalake.write_deltalake(lake, ids, mode="append", partition_by=["dt"])
    rules = ["max(id) rises", "nulls.id = 0", "rows per dt within 1% of the last 7", "freshness 1h"]
    assert {item[0] for item in found_in(cache, lake, expect=rules)} == {"passed"}
    deltalake.DeltaTable(lake).optimize.compact()
    report = pqcache.sync(cache)
    assert (report.published, report.expect) == (True, ())
    deltalake.write_deltalake(lake, ids, mode="append")
    assert "max(id) rises: 219 in what is new, 219 before; nothing" in refusal(cache)


def test_new_values_of_a_partition_column(tmp_path: Path) -> None:
    lake, cache, rule = tmp_path / "lake", tmp_path / "cache", "new values of category"
    write(lake, "category=books/dt=1", 10)
    write(lake, "category=toys/dt=1", 10)
    assert found_in(cache, lake, expect=[rule]) == []
    write(lake, "category=books/dt=2", 10)
    assert found_in(cache) == []
    for number in range(5):
        write(lake, f"category=new%20{number}/dt=2", 10)
    assert "new values of category: new 0, new 1, new 2 and 2 more; nothing was published" in refusal(cache)
    assert [level for level, _, _ in found_in(cache, expect=[f"{rule}: warn"])] == ["warned"]


def test_new_values_of_a_column_in_the_files(tmp_path: Path) -> None:
    """They are recorded, so that only new files are read, and a value that comes back is none."""
    lake, cache, rule = tmp_path / "lake", tmp_path / "cache", "new values of shop"

    def day(number: int, *shops: object, name: str = "shop") -> None:
        path = lake / f"dt=2026-11-{number:02}" / "part-0.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({name: list(shops), "n": list(range(len(shops)))}), path)

    day(1, "a", "b", None)
    assert found_in(cache, lake, expect=[rule]) == []
    day(2, "b", None, "a")
    assert found_in(cache) == []
    day(3, "c", "a", "d")
    assert f"{rule}: c, d; nothing was published" in refusal(cache)
    assert f"{rule}: c, d; nothing was published" in refusal(cache), "the next night judges the same"
    pqcache.rollback(cache, accept=True)
    day(3, "a")
    day(4, "b")
    assert found_in(cache) == []
    day(5, "d")
    assert found_in(cache) == [], "it was there before"
    for path in cache.glob("snapshots/*/_pqcache/values.json"):
        path.write_text("{")
    day(6, "e")
    assert [level for level, _, _ in found_in(cache, expect=[f"{rule}: warn"])] == ["warned"]
    unknown = "more values than are recorded, values without a text, or a file that cannot be read"
    for path in cache.glob("snapshots/*/_pqcache/values.json"):
        path.unlink()
    (damaged := cache / "current" / "dt=2026-11-01" / "part-0.parquet").rename(tmp_path / "kept")
    damaged.write_bytes(b"PAR1")
    day(7, "e")
    assert found_in(cache) == [("warned", "", unknown)]
    (tmp_path / "kept").rename(cache / "current" / "dt=2026-11-01" / "part-0.parquet")
    day(8, "e")
    assert found_in(cache) == [], "what could not be read is not recorded as unknown"
    day(9, *map(str, range(1001)))
    assert found_in(cache) == [("warned", "", unknown)]
    day(10, "a", name="other")
    with pytest.raises(ContractNotMet, match="new values of shap: no column 'shap'; did you mean 'shop'"):
        pqcache.sync(cache, expect=["new values of shap"])


def test_new_values_of_other_types(tmp_path: Path) -> None:
    lake, cache, kinds = tmp_path / "lake", tmp_path / "cache", [pa.int64(), pa.date32(), pa.float64(), pa.string()]
    rules = [f"new values of {kind}" for kind in kinds]
    for day, numbers in enumerate([[1, 2], [2], [2, 3]]):
        (lake / f"dt={day}").mkdir(parents=True)
        columns = {str(kind): pa.array(numbers, pa.int32()).cast(kind) for kind in kinds}
        stored = {name: column.dictionary_encode() if day else column for name, column in columns.items()}
        pq.write_table(pa.table(stored), lake / f"dt={day}" / "part-0.parquet")
        if day < 2:
            assert found_in(cache, lake, expect=rules) == []
    error = refusal(cache)
    for name, column in columns.items():
        assert f"new values of {name}: {column.cast(pa.string())[1]}; " in error


def test_row_groups_without_statistics_are_counted(lake: Path, tmp_path: Path) -> None:
    cache, rules = tmp_path / "cache", ["nulls.price < 50%", "max(id) rises"]
    pqcache.sync(lake, cache)
    write(lake, "dt=2026-11-09", 10, first=10_000, write_statistics=False)
    write(lake, "dt=2026-11-09", 7, first=10_000, name="other")
    error = refusal(cache, expect=rules)
    assert "nulls.price < 50%: dt=2026-11-09: no reliable null count in 2 of 3 row groups; max(id) " in error
    assert "max(id) rises: no reliable maximum in 2 of 3 row groups; nothing was published" in error
    assert {level for level, _, _ in found_in(cache, expect=[*rules, "unknown: warn"])} == {"warned"}
    write(lake, "dt=2026-11-10", 7, first=20_000)
    assert "max(id) rises: no reliable maximum before in 2 of 19 row groups" in refusal(cache, expect=rules)
    write(lake, "dt=2026-11-10", 7, nulls=7)
    error = refusal(cache, expect=["nulls.price < 50%", "unknown: warn"])
    assert "nulls.price < 50%: dt=2026-11-10: 7 of 7 rows (100%)" in error
    flip((cache / "current" / "_pqcache" / "row_groups.arrow").resolve(), 100)
    assert "max(id) rises: the current snapshot's index cannot be read; nothing" in refusal(cache, expect=rules[1:])


def test_old_files_are_not_fresh(lake: Path, tmp_path: Path) -> None:
    cache, now = tmp_path / "cache", time.time()
    for path in lake.rglob("*.parquet"):
        os.utime(path, (now, now - 31 * 3600))
    with pytest.raises(ContractNotMet, match=r"freshness 30h: the newest file is 1 d 7 h old, 1 h \d+ min too old; n"):
        pqcache.sync(lake, cache, expect=["freshness 30h"])
    assert found_in(cache, lake, expect=["freshness 32h"]) == []
    assert pqcache.status(cache).caches[0].reasons == ()
    events: list[Event] = []
    report = pqcache.sync(cache, expect=["freshness 30h"], on_event=events.append)
    assert (report.published, [item.rule for item in report.expect]) == (False, ["freshness 30h"])
    assert any(isinstance(event, Warned) and event.message.startswith("freshness 30h: the ") for event in events)
    status = pqcache.status(cache)
    assert (status.caches[0].stale, len(status.caches[0].reasons)) == (True, 1)
    with pytest.raises(pqcache.PqcacheError, match=r"cache \(.*; freshness 30h: the newest file is 1 d 7 h old"):
        status.raise_if_older("1h")
    run_pqcache("sync", cache, "--metrics", tmp_path / "m.prom")
    assert re.search(r"^pqcache_stale\{.*\} 1$", (tmp_path / "m.prom").read_text(), re.MULTILINE)
    damaged = next((cache / "current").rglob("*.parquet"))
    damaged.chmod(0o644)
    damaged.write_bytes(b"")
    pqcache.verify(cache, repair=True)  # no new data, and not judged
    write(lake, "dt=2026-11-09", 10)
    assert found_in(cache) == []
    assert pqcache.status(cache).caches[0].stale is False


NO_RULES = [  # what is written, and what is said
    ('["nulls.price < 1 percent"]', r"'nulls.price < 1 percent': not a rule; did you mean 'nulls.COLUMN < 1%'"),
    ('["row per dt within 3% of the last 7"]', r"did you mean 'rows per COLUMN within 30% of the last 7'\?"),
    ('["max(id) rise"]', r"rule 'max\(id\) rise': not a rule; did you mean 'max\(COLUMN\) rises'\?"),
    ('["new value of a: warn"]', r"did you mean 'new values of COLUMN'\?"),
    ('["freshness tomorrow"]', r"rule 'freshness tomorrow': 'tomorrow' is not a duration; write it like"),
    ('["nulls.price != 0"]', r"rule 'nulls.price != 0': not a rule; did you mean 'nulls.COLUMN < 1%'\?"),
    ('["unknown"]', r"rule 'unknown': not a rule; did you mean 'unknown: warn'\?"),
    ('["rows per dt within 3% of the last 2"]', r"fewer than 3 partitions are not enough to compare with"),
    ('"nulls.price < 1%"', r"expect=.*: not a list of rules; write it like rules = \[\"nulls.price < 1%\"\]"),
    ("[]\nrule = []", r"'rule' is not known; write rules = \[...\] below \[expect\]"),
]


def test_what_is_no_rule_is_refused_with_the_nearest_form(lake: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    pqcache.sync(lake, cache)
    config = (cache / "pqcache.toml").read_text()
    for rules, reason in NO_RULES:
        (cache / "pqcache.toml").write_text(f"{config}[expect]\nrules = {rules}\n")
        with pytest.raises(CacheError, match=rf"pqcache\.toml: .*{reason}") as caught:
            pqcache.sync(cache)
        assert "\n" not in str(caught.value)


def test_columns_that_are_not_there(lake: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with pytest.raises(UsageError, match=r"rule .*: 'day' is not a partition column of .*; write one of dt"):
        pqcache.sync(lake, cache, expect=["rows per day within 30% of the last 7"])
    rules = ["nulls.prise < 1%", "max(ids) rises: warn", "nulls.id = 0"]
    with pytest.raises(ContractNotMet, match=r"nulls.prise < 1%: no column 'prise'; did you mean 'price'"):
        pqcache.sync(lake, cache, expect=rules)
    assert [item[0] for item in found_in(cache, lake, expect=rules[1:])] == ["warned"]


def test_the_file_of_a_cache_has_the_rules(lake: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    pqcache.sync(lake, cache)
    rules = '[expect]\n# every night\nrules = [\n  "rows per dt within 30% of the last 7",  # as it was\n]\n'
    with (cache / "pqcache.toml").open("a") as file:
        file.write(rules)
    write(lake, "dt=2026-11-09", 2)
    done = run_pqcache("sync", cache, "--json")
    error = f"pqcache: error: {cache}: rows per dt within 30% of the last 7: dt=2026-11-09: 2 rows, 80.0% below 10, "
    assert (done.returncode, error in done.stderr.splitlines()[-1]) == (6, True)
    event = json.loads(done.stdout.splitlines()[-1])
    assert (event["kind"], event["exit_code"]) == ("ContractNotMet", 6)
    assert published(cache) == [80]
    assert pqcache.status(cache).caches[0].failing_since is not None
    write(lake, "dt=2026-11-09", 9)
    assert run_pqcache("sync", cache, "--keep", "5").returncode == 0
    text = (cache / "pqcache.toml").read_text()
    assert rules in text
    assert "keep = 5" in text


def test_what_is_refused_waits_as_the_candidate(lake: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    pqcache.sync(lake, cache, expect=["nulls.price < 20%", "new values of dt: warn"])
    write(lake, "dt=2026-11-09", 10, nulls=4)
    assert "it would not be published" not in (error := refusal(cache))
    assert f"'pqcache rollback {cache} --accept'" in error
    shown = json.loads(run_pqcache("inspect", cache, "--candidate", "--json").stdout)
    assert shown["rows"] == 90
    (status,) = pqcache.status(cache).caches
    assert (status.rows, status.candidate is not None) == (80, True)
    assert any("nulls.price < 20%: dt=2026-11-09: 4 of 10 rows (40%)" in reason for reason in status.reasons)
    record = pqcache.log(cache)[-1]
    assert (record["result"], record["exit_code"], record["candidate"]) == ("refused", 6, status.candidate)
    assert [item["level"] for item in record["expect"]] == ["failed", "warned"]
    fetched: list[Event] = []
    assert refusal(cache, on_event=fetched.append) == error  # nothing new, and judged again
    assert not any(isinstance(event, Fetched) for event in fetched)
    with pytest.raises(pqcache.PqcacheError, match=r"nulls\.price < 20%"):
        pqcache.rollback(cache, release=True)
    for path in lake.rglob("*.parquet"):
        path.unlink()  # the source is not asked
    assert pqcache.rollback(cache, accept=True).published
    assert published(cache) == [80, 90]


def test_the_next_sync_is_judged_against_what_is_published(lake: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    pqcache.sync(lake, cache, expect=["max(id) rises", "rows per dt within 30% of the last 7"])
    write(lake, "dt=2026-11-09", 2, first=900)
    assert "dt=2026-11-09: 2 rows" in refusal(cache)
    write(lake, "dt=2026-11-10", 10, first=700)
    error = refusal(cache)
    assert "max(id)" not in error  # 901 of the day before is new too
    assert "dt=2026-11-09: 2 rows" in error
    write(lake, "dt=2026-11-09", 10, first=500)
    assert "max(id) rises: 709 in what is new, 809 before" in refusal(cache)
    write(lake, "dt=2026-11-09", 10, first=900)
    assert pqcache.sync(cache).published
    assert published(cache) == [80, 100]


def test_rules_and_a_hold(lake: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    pqcache.sync(lake, cache, expect=["nulls.price < 20%"])
    pqcache.rollback(cache, hold=True)
    write(lake, "dt=2026-11-09", 10, nulls=4)
    assert "nulls.price < 20%: dt=2026-11-09: 4 of 10 rows (40%)" in refusal(cache)
    write(lake, "dt=2026-11-09", 10)
    report = pqcache.sync(cache)
    assert (report.published, report.candidate is not None, report.expect) == (False, True, ())
    assert pqcache.rollback(cache, release=True).published


def test_the_first_snapshot_can_be_accepted(tmp_path: Path) -> None:
    write(tmp_path / "lake", "dt=1", 10, nulls=5)
    cache = tmp_path / "cache"
    with pytest.raises(ContractNotMet):
        pqcache.sync(tmp_path / "lake", cache, expect=["nulls.price = 0"])
    assert pqcache.status(cache).caches[0].snapshot is None
    with pytest.raises(CacheError, match="nothing is published yet; look at what waits with"):
        pqcache.verify(cache)
    assert pqcache.rollback(cache, accept=True).published
    assert pqcache.sync(cache).rows == 10


def test_a_dry_run_judges_what_it_can(lake: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    rules = ["max(id) rises", "new values of dt: warn", "freshness 30h"]
    pqcache.sync(lake, cache, expect=rules)
    write(lake, "dt=2026-11-09", 10)
    assert found_in(cache, dry_run=True) == [
        ("passed", "", "judged when the files are here"),
        ("warned", "", "2026-11-09"),
    ]
    with pytest.raises(ContractNotMet, match=r"new values of dt: 2026-11-09; it would not be published"):
        pqcache.sync(cache, dry_run=True, expect=[*rules, "new values of dt"])
    assert "max(id) rises: 9 in what is new, 809 before; nothing was published" in refusal(cache)
    assert "max(id) rises: 9 in what is new, 809 before; it would not be published" in refusal(cache, dry_run=True)


def test_rules_of_the_command_are_remembered(lake: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    done = run_pqcache("sync", lake, cache, "--expect", "nulls.price < 1 percent")
    assert done.returncode == 2
    assert "rule 'nulls.price < 1 percent': not a rule; did you mean 'nulls.COLUMN < 1%'?" in done.stderr
    assert run_pqcache("sync", lake, cache, "--expect", "nulls.price < 1%", "--expect", "max(id) rises").returncode == 0
    write(lake, "dt=2026-11-08", 10, nulls=1)
    done = run_pqcache("sync", cache)
    assert done.returncode == 6
    assert "nulls.price < 1%: dt=2026-11-08: 1 of 10 rows (10%); max(id) rises: 9 in what is new, 809 be" in done.stderr
    assert run_pqcache("sync", cache, "--expect", "").returncode == 0
    assert "[expect]" not in (cache / "pqcache.toml").read_text()


def test_other_tables_go_on(lake: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    write(tmp_path / "bad", "dt=1", 10, nulls=10)
    file = root / "pqcache.toml"
    file.write_text(
        f'[tables.a]\nsource = "{tmp_path}/bad"\nexpect.rules = ["nulls.price < 1%"]\n'
        f'[tables.b]\nsource = "{lake}"\n[tables.b.expect]\nrules = ["nulls.price < 1%"]\n'
    )
    done = run_pqcache("sync", "--all", root)
    assert done.returncode == 6
    assert "nulls.price < 1%: dt=1: 10 of 10 rows (100%)" in done.stderr
    assert [found.rows for found in pqcache.status(root).caches] == [None, 80]


def test_nobody_may_open_what_is_refused_while_it_arrives(lake: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    write(lake, "dt=2026-11-09", 2)
    rules = ["rows per dt within 30% of the last 7", "nulls.price < 1%"]
    with pytest.raises(ContractNotMet, match=r"dt=2026-11-09: 2 rows, 80\.0% below 10, the median of the 7 "):
        pqcache.sync(lake, cache, fill=True, expect=rules)
    assert not list((cache / "arriving").glob("*"))
    with pytest.raises(CacheError):
        next(iter(pqcache.Cache.open(cache).batches()))
    write(lake, "dt=2026-11-09", 10)
    report = pqcache.sync(cache, fill=True)
    assert (report.rows, {item.level for item in report.expect}) == (90, {"passed"})
