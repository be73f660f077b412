"""Sync against every store: what a run downloads, and what the next one keeps."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import write_deltalake

import pqcache
from pqcache.events import Event, Fetched, Listed, Published
from pqcache.store.config import read_config
from pqcache.store.drivers.local import LocalSource
from pqcache.store.history import read_history
from tests.datasets import files_of, rows_of, shop_table, write_day, write_shop
from tests.remote import STORES, Remote, make_remote


@pytest.fixture(params=STORES)
def remote(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Remote]:
    yield from make_remote(request.param, request, tmp_path)


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    """A local dataset of three days; what the remote is made to hold."""
    return write_shop(tmp_path / "made", rows=60)


def sync(source: str | Path, cache: Path | None = None, **how: object) -> tuple[pqcache.SyncReport, set[str]]:
    """Run a sync; return its report and the source files that really moved."""
    events: list[Event] = []
    report = pqcache.sync(source, cache, on_event=events.append, **how)  # type: ignore[arg-type]
    return report, {event.path for event in events if isinstance(event, Fetched)}


def test_first_run_then_nothing_then_only_what_changed(remote: Remote, shop: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    remote.upload(shop)
    report, moved = sync(remote.url, cache)
    assert report.published
    assert report.added == 9
    assert moved == set(files_of(shop))
    assert files_of(cache / "current") == files_of(shop)
    assert rows_of(cache / "current") == rows_of(shop)
    assert report.rows == 540

    again, moved = sync(cache)
    assert not again.published
    assert moved == set()
    assert again.snapshot == report.snapshot
    assert again.unchanged == 9

    changed = "dt=2026-11-01/part-00001.parquet"
    pq.write_table(shop_table(700_000, 400), shop / changed)
    remote.put(changed, (shop / changed).read_bytes())
    # one file less, one file more, one partition less, one partition more
    remote.delete("dt=2026-11-02/part-00000.parquet")
    (shop / "dt=2026-11-02/part-00000.parquet").unlink()
    write_day(shop, "2026-11-04", files=1, first=900_000)
    for name in ("part-00000.parquet", "_SUCCESS"):
        remote.put(f"dt=2026-11-04/{name}", (shop / "dt=2026-11-04" / name).read_bytes())
    for number in range(3):
        remote.delete(f"dt=2026-11-03/part-{number:05d}.parquet")
        (shop / f"dt=2026-11-03/part-{number:05d}.parquet").unlink()

    kept = cache / "current" / "dt=2026-11-02" / "part-00001.parquet"
    before = kept.stat().st_ino
    plan, moved = sync(cache, dry_run=True)
    assert moved == set()
    assert (plan.added, plan.changed, plan.removed) == (1, 1, 4)
    report, moved = sync(cache)
    assert moved == {changed, "dt=2026-11-04/part-00000.parquet"}
    assert (report.added, report.changed, report.removed) == (1, 1, 4)
    assert (kept.stat().st_ino, kept.stat().st_mode & 0o777, kept.stat().st_nlink) == (before, 0o444, 2)
    assert files_of(cache / "current") == files_of(shop)
    assert rows_of(cache / "current") == rows_of(shop)
    assert not any((cache / "tmp").iterdir())


def test_a_change_of_the_same_size_is_seen(remote: Remote, tmp_path: Path) -> None:
    """What size-only and newer-than comparisons miss: other values in as many bytes, and then the old ones."""
    cache, versions = tmp_path / "cache", []
    for value in (1, 2):
        sink = pa.BufferOutputStream()
        plain = {"compression": "none", "use_dictionary": False, "write_statistics": False}
        pq.write_table(pa.table({"id": [value] * 100}), sink, **plain)
        versions.append(sink.getvalue().to_pybytes())
    assert len(versions[0]) == len(versions[1])
    for version in (0, 1, 0):
        remote.put("dt=1/part-0.parquet", versions[version])
        report, moved = sync(remote.url, cache)
        assert moved == {"dt=1/part-0.parquet"}
        assert report.published
        assert rows_of(cache / "current")[0] == (version + 1, 1)


def test_a_repartitioned_cache_is_synced_incrementally(shop: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    report, _ = sync(str(shop), cache, row_group_size=64 << 10)
    assert report.rewritten == 3
    assert rows_of(cache / "current") == rows_of(shop)
    again, moved = sync(cache)
    assert not again.published
    assert moved == set()

    before = {path: (cache / "current" / path).stat().st_ino for path in files_of(cache / "current")}
    write_day(shop, "2026-11-02", files=2, first=100_000, seed=2)
    (shop / "dt=2026-11-02/part-00002.parquet").unlink()
    report, moved = sync(cache)
    assert {path.split("/")[0] for path in moved} == {"dt=2026-11-02"}
    assert report.rewritten == 1
    after = {path: (cache / "current" / path).stat().st_ino for path in files_of(cache / "current")}
    assert {p: i for p, i in before.items() if "11-02" not in p} == {p: i for p, i in after.items() if "11-02" not in p}
    assert rows_of(cache / "current") == rows_of(shop)


@pytest.mark.parametrize("name", ["files.arrow", "row_groups.arrow", "summary.json"])
def test_damaged_metadata_is_made_anew(name: str, shop: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first, _ = sync(str(shop), cache)
    victim = (cache / "current").resolve() / "_pqcache" / name
    victim.write_bytes(b"garbage")
    report, moved = sync(cache)
    assert report.published
    assert report.snapshot != first.snapshot
    assert bool(moved) == (name == "files.arrow")
    assert pqcache.Cache.open(cache).snapshot().index().rows.sum() == 540
    assert not sync(cache)[0].published


def test_columns_and_rows_are_taken_at_the_source(remote: Remote, shop: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    remote.upload(shop)
    where = "dt >= '2026-11-02' and price < 0.5"
    _, moved = sync(remote.url, cache, columns=["id", "price"], where=where)
    expected = [(r[0], r[3], r[6]) for r in rows_of(shop) if str(r[6]) >= "2026-11-02" and r[3] < 0.5]
    assert rows_of(cache / "current") == expected
    assert len(moved) == 6
    assert not sync(cache)[0].published
    assert sync(cache, row_group_size=16 << 10)[1] == set()  # repartitioned from what is held
    assert rows_of(cache / "current") == expected
    _, moved = sync(cache, columns=[], where="")
    assert len(moved) == 9
    assert rows_of(cache / "current") == rows_of(shop)


def test_columns_and_rows_fetch_only_their_bytes(tmp_path: Path) -> None:
    shop = tmp_path / "shop"
    shop.mkdir()
    pq.write_table(shop_table(0, 4000), shop / "a.parquet", row_group_size=1000)
    size, footer = (shop / "a.parquet").stat().st_size, pq.read_metadata(shop / "a.parquet")
    for where, groups in ((None, range(4)), ("id >= 2000 and id < 3000", [2])):
        wanted = sum(footer.row_group(g).column(0).total_compressed_size for g in groups)
        report, _ = sync(str(shop), tmp_path / f"cache{len(groups)}", columns=["id"], where=where)
        assert wanted <= report.fetched_bytes <= wanted + (64 << 10) + 1024 < size / 4
    with pytest.raises(pqcache.UsageError, match="no column"):
        sync(str(shop), tmp_path / "other", columns=["id", "nope"])


def test_a_failed_run_leaves_the_configuration_alone(shop: Path, tmp_path: Path) -> None:
    cache, other = tmp_path / "cache", tmp_path / "other"
    sync(str(shop), cache)
    before = (cache / "pqcache.toml").read_text()
    write_shop(other)
    (other / "dt=2026-11-02" / "part-00000.parquet").write_bytes(b"not parquet")
    with pytest.raises(pqcache.ParquetError):
        sync(str(other), cache, row_group_size=65_536, force=True, new_source=True)
    assert (cache / "pqcache.toml").read_text() == before


@pytest.mark.parametrize("made", [False, True])
def test_a_refused_first_run_leaves_no_options_behind(made: bool, shop: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    if made:
        pqcache.add(str(shop), "cache", root=tmp_path)
    with pytest.raises(pqcache.UsageError, match="no column 'nosuch'"):
        sync(str(shop), cache, time_units={"nosuch": "ms"}, keep=7)
    assert (cache / "pqcache.toml").exists() == made
    report, _ = sync(str(shop), cache)
    assert report.published
    assert (read_config(cache).time_units, read_config(cache).keep) == ({}, 2)


def test_an_empty_source_publishes_nothing(shop: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    sync(str(shop), cache)
    before = os.readlink(cache / "current")
    shop.rename(tmp_path / "away")
    with pytest.raises(pqcache.SourceNotFound, match="no such file"):
        sync(cache)
    shop.mkdir()
    (shop / "_SUCCESS").touch()
    with pytest.raises(pqcache.SourceIncomplete, match="no Parquet file"):
        sync(cache)
    assert os.readlink(cache / "current") == before
    assert rows_of(cache / "current") == rows_of(tmp_path / "away")


def test_what_is_not_parquet_publishes_nothing(shop: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    sync(str(shop), cache)
    before = os.readlink(cache / "current")
    for content in (b"", b"hello", b"PAR1" + bytes(1000) + b"PAR1"):
        (shop / "dt=2026-11-02" / "part-00001.parquet").write_bytes(content)
        reason = "not a Parquet file" if content else "has no bytes"
        with pytest.raises(pqcache.ParquetError, match=rf"dt=2026-11-02/part-00001\.parquet: {reason}"):
            sync(cache)
        assert os.readlink(cache / "current") == before
    twice = pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"])
    pq.write_table(twice, shop / "dt=2026-11-02" / "part-00001.parquet")
    with pytest.raises(pqcache.ParquetError, match=r"part-00001\.parquet: has two columns named 'a'"):
        sync(cache)
    assert os.readlink(cache / "current") == before


def test_cache_and_source_must_lie_apart(shop: Path) -> None:
    for inside in (shop / "cache", shop, shop.parent):
        with pytest.raises(pqcache.UsageError, match=r"overlaps with its source|not empty"):
            sync(str(shop), inside)


def test_a_run_that_waited_works_from_what_the_other_has_left(shop: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    pqcache.sync(str(shop), cache)
    held, go = threading.Event(), threading.Event()

    def slow(event: Event) -> None:
        if isinstance(event, Published):  # still under the lock, its options not yet written
            held.set()
            assert go.wait(30)

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(
            pqcache.repartition, cache, row_group_size=8 << 10, compression="zstd", wait=0, on_event=slow
        )
        assert held.wait(30)
        second = pool.submit(pqcache.sync, cache, wait=30)
        time.sleep(0.1)
        assert not second.done()
        go.set()
        published = first.result().snapshot
        report = second.result()
    assert not report.published
    assert report.snapshot == published
    assert (read_config(cache).row_group_size, read_config(cache).compression) == (8 << 10, "zstd")


@pytest.mark.parametrize("how", [{}, {"columns": ["id"]}, {"where": "dt >= '2026-11-02'"}])
def test_two_first_runs_at_once_make_one_cache(how: dict[str, Any], shop: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    listed, go = threading.Event(), threading.Event()

    def slow(event: Event) -> None:
        if isinstance(event, Listed):
            listed.set()
            assert go.wait(30)

    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(pqcache.sync, shop, cache, wait=30, on_event=slow)
        assert listed.wait(30)
        pqcache.sync(str(shop), cache, keep=5, **how)
        go.set()
        report = late.result()
    assert not report.published
    assert report.fetched_bytes == 0
    assert read_config(cache).keep == 5


def test_a_first_run_that_is_overtaken_is_one_like_any_other(tmp_path: Path) -> None:
    """It goes on from what the faster one remembers, is recorded, and leaves as many snapshots as are to be kept."""
    table, cache = str(tmp_path / "table"), tmp_path / "cache"
    for number in (1, 2):
        write_deltalake(table, pa.table({"id": [number], "price": [number]}), mode="append")
    faster: list[pqcache.SyncReport] = []

    def overtake(event: Event) -> None:
        if isinstance(event, Listed) and not faster:
            faster.append(pqcache.sync(table, cache, keep=1, version=0))

    late = pqcache.sync(table, cache, columns=["id"], on_event=overtake)
    assert (faster[0].version, late.version, late.published, late.rows) == ("0", "0", True, 1)
    assert [record.get("snapshot") for record in pqcache.log(cache)] == [faster[0].snapshot, late.snapshot]
    assert [path.name for path in (cache / "snapshots").iterdir()] == [late.snapshot]
    assert not any((cache / "tmp").iterdir())


def test_what_a_dead_run_left_unpublished_does_not_pass_for_an_old_snapshot(shop: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first = pqcache.sync(str(shop), cache).snapshot
    orphan = cache / "snapshots" / "20260101T000000Z-0002"
    shutil.copytree(cache / "snapshots" / str(first), orphan)
    os.utime(orphan, (time.time() - 3600,) * 2)
    write_day(shop, "2026-11-09")
    second = pqcache.sync(cache, keep=2).snapshot
    assert {path.name for path in (cache / "snapshots").iterdir()} == {first, second}


@pytest.mark.parametrize(
    ("source", "cache", "options"),
    [
        ("s3://AKIA:ab/cdHUSH@bucket/shop", "c", {"endpoint": "http://127.0.0.1:1"}),
        ("s3://AKIA:12/HUSH@bucket/shop", "c", {"endpoint": "http://127.0.0.1:1"}),
        ("s3://bucket/shop", "c", {"endpoint": "http://bob:HUSH@127.0.0.1:1"}),
        ("s3://AKIA:HUSH@bucket/shop", None, {}),
        ("file://u:HUSH@h/x", "c", {}),
    ],
)
def test_misplaced_secrets_are_refused_unshown(
    source: str, cache: str | None, options: dict[str, str], tmp_path: Path
) -> None:
    with pytest.raises(pqcache.UsageError) as error:
        pqcache.sync(source, None if cache is None else tmp_path / cache, options=options)
    assert "HUSH" not in str(error.value)
    assert not (tmp_path / "c").exists()
    for command in (pqcache.gc, pqcache.log):
        with pytest.raises(pqcache.PqcacheError) as error:
            command("hdfs://u:HUSH@127.0.0.1:1/x")
        assert "HUSH" not in str(error.value)


WHERE_SCORE = ("score > 1", "score is null", "not (score > 1)", "Score > 1 or id < 100050")


@pytest.mark.parametrize("added", ["early", "middle", "late", "gone", "between"])
def test_a_column_that_some_files_lack_is_null_in_them(added: str, tmp_path: Path) -> None:
    shop, days = tmp_path / "shop", range(1, 11)
    have = {"early": days, "late": (10,), "middle": (5,), "gone": (1,), "between": (3,)}[added]
    for day in days:
        table = pa.table({"id": range(day * 100_000, day * 100_000 + 100), "name": ["x"] * 100})
        if day in have:
            table = table.append_column("score", pa.array([None, *([0, 1, 2] * 33)], pa.int32()))
        (shop / f"dt=2026-11-{day:02d}").mkdir(parents=True)
        pq.write_table(table, shop / f"dt=2026-11-{day:02d}" / "a.parquet")
    read = "from read_parquet('{}/*/*.parquet', hive_partitioning = true, union_by_name = true)"
    for where in WHERE_SCORE:
        pqcache.sync(str(shop), tmp_path / where, columns=["id", "score"], where=where)
        wanted = duckdb.sql(f"select id, score, dt {read.format(shop)} where {where} order by all").fetchall()
        found = duckdb.sql(f"select id, score, dt {read.format(tmp_path / where / 'current')} order by all").fetchall()
        assert found == wanted, where
    with pytest.raises(pqcache.UsageError, match="no column 'scores'; there are: id, name, score"):
        pqcache.sync(str(shop), tmp_path / "other", columns=["id", "scores"])


def test_damage_in_the_history_costs_only_the_records_it_hits(shop: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    for day in (10, 11):
        write_day(shop, f"2026-11-{day}", rows=20)
        pqcache.sync(str(shop), cache)
    path = cache / "history.jsonl.zst"
    whole = path.read_bytes()
    path.write_bytes(b"garbage" + whole)
    assert len(read_history(cache)) == 2
    path.write_bytes(whole[:4] + b"\xff\xff" + whole[6:])
    assert len(read_history(cache)) == 1
    pqcache.sync(cache, keep=3)
    assert len(read_history(cache)) == 3, "also one for the snapshot that has lost its record"


def test_sizes_durations_and_counts_are_numbers_or_text(shop: Path, tmp_path: Path) -> None:
    text, numbers = tmp_path / "text", tmp_path / "numbers"
    pqcache.sync(shop, text, row_group_size="64KB", keep="3", settle="0s", wait="1m", timeout="30s", jobs="2")
    pqcache.sync(shop, numbers, row_group_size=64 << 10, keep=3, settle=0, wait=60, timeout=30, jobs=2)
    assert read_config(text) == read_config(numbers)
    assert read_config(text).keep == 3
    assert pqcache.inspect(text, block_size="64KB", jobs="2").block_size == 64 << 10
    assert pqcache.repartition(text, row_group_size="1MB", jobs="2", wait="1s", shuffle="7").rows == 540
    for how in ({"wait": "soon"}, {"jobs": "many"}, {"row_group_size": "5x"}):
        with pytest.raises(pqcache.UsageError, match=f"'{next(iter(how.values()))}': not a "):
            pqcache.sync(text, **how)  # type: ignore[arg-type]


def test_an_error_ends_a_sync_while_an_earlier_file_hangs(
    shop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, begun, ended = LocalSource.read, threading.Event(), threading.Event()
    waited: list[bool] = []

    def read(self: LocalSource, path: str, *rest: Any) -> Iterator[bytes]:
        if path != files_of(shop)[0]:
            begun.wait(20)
            raise pqcache.SourceDenied(path, "not today")
        begun.set()
        waited.append(ended.wait(20))
        yield from real(self, path, *rest)

    monkeypatch.setattr(LocalSource, "read", read)
    try:
        with pytest.raises(pqcache.SourceDenied):
            pqcache.sync(shop, tmp_path / "cache")
        assert not waited
    finally:
        ended.set()
