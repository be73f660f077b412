"""A dataset that is read while its files arrive: the same rows in the same order as when they had."""

from __future__ import annotations

import fcntl
import shlex
import shutil
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

import pqcache
from pqcache import Cache, Sequence
from pqcache.errors import CacheError, SourceChanged, SourceError, UsageError
from pqcache.reader import arriving, open_dataset
from pqcache.reader.arriving import row_groups_of_lanes, without_repeats
from pqcache.reader.open_dataset import open_local_dataset
from pqcache.reader.order import Order
from pqcache.store.arriving import Wanted, WantedLists
from pqcache.store.cache_directory import CacheDirectory
from pqcache.store.config import Config, write_config
from pqcache.store.gc import remove_snapshot
from pqcache.store.layout import PUBLISHING
from pqcache.store.snapshot import Snapshot
from tests.datasets import write_shop
from tests.filling import Filler, FillingThread, publish_copy
from tests.waiting import becomes_true, wait_for


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three days of two files with two row groups each: 2,400 rows in 12 row groups, in pages that are known."""
    root = write_shop(tmp_path_factory.mktemp("lake"), files=2)
    for path in root.rglob("*.parquet"):
        table = pq.read_table(path, partitioning=None)
        pq.write_table(table, path, row_group_size=200, max_rows_per_page=50, write_page_index=True)
    return root


@pytest.fixture(scope="module")
def published(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of it that is published."""
    return publish_copy(source, tmp_path_factory.mktemp("published") / "cache")


def epoch(cache: Path, **options: Any) -> list[dict[str, Any]]:
    """Return the batches of an epoch as plain values."""
    return [batch.to_pydict() for batch in Cache(cache).batches(**options)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_replicas": 4, "rank": 2, "columns": ["id", "dt", "title"]},
        {"filters": "price > 0.5 and dt > '2026-11-01'", "shuffle": False},
        {"memory": 40_000},
        {"sequence": Sequence(3, order_by="id", stride=2), "columns": ["id", "image"]},
    ],
    ids=str,
)
def test_the_first_epoch_is_that_of_the_published_snapshot(
    source: Path, published: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    options = {"batch_size": 64, **options}
    filler = Filler(source, tmp_path / "cache")
    FillingThread(filler, 0.005).start()
    assert epoch(tmp_path / "cache", **options) == epoch(published, **options)


def test_what_is_needed_first_is_fetched_first(source: Path, published: Path, tmp_path: Path) -> None:
    filler = Filler(source, tmp_path / "cache")
    batches = Cache(tmp_path / "cache").batches(["id"], batch_size=200, seed=3, window=2)
    thread = FillingThread(filler, 0.01, publish=False)
    first: list[dict[str, Any]] = []
    reader = threading.Thread(target=lambda: first.append(next(batches).to_pydict()))
    reader.start()
    wait_for(lambda: len(WantedLists(filler.snapshot.wanted_directory).read()) == 1)
    (wanted,) = WantedLists(filler.snapshot.wanted_directory).read()
    assert len(filler.order) == 0
    thread.start()
    reader.join()
    thread.join()
    assert filler.order == wanted.files.tolist()
    assert filler.order != sorted(filler.order)
    found = [*first, *(batch.to_pydict() for batch in batches)]
    assert found == epoch(published, columns=["id"], batch_size=200, seed=3, window=2)
    files = [2 * (i // 100_000) + i % 100_000 // 400 for batch in found for i in batch["id"]]
    assert filler.order == list(dict.fromkeys(files)), "rows of files come in the order in which these were fetched"
    assert not WantedLists(filler.snapshot.wanted_directory).read()


def epoch_order(filler: Filler, seed: int) -> list[int]:
    """Return the files in the order in which an epoch of one lane needs them."""
    order = Order(counts=filler.index.rows, batch_size=100, window=1, seed=seed)
    return without_repeats(filler.files[row_groups_of_lanes(order, {0: 0})]).tolist()


def test_a_snapshot_that_is_published_meanwhile_is_read_on(source: Path, published: Path, tmp_path: Path) -> None:
    filler = Filler(source, tmp_path / "cache")
    options = {"columns": ["id", "tokens", "price"], "batch_size": 50, "seed": 1, "window": 1}
    batches = Cache(tmp_path / "cache").batches(**options)
    for file in epoch_order(filler, seed=1)[:2]:
        filler.fetch(file)
    found = [next(batches).to_pydict() for _ in range(2)]
    filler.fill()
    filler.publish()
    found += [batch.to_pydict() for batch in batches]
    assert found == epoch(published, **options)
    assert not list((tmp_path / "cache" / "arriving").iterdir())


def test_a_dataset_opened_at_any_moment_of_publishing_is_the_snapshot(source: Path, tmp_path: Path) -> None:
    filler = Filler(source, tmp_path / "cache")
    filler.fill()
    opened, waits = 0, iter([20, 0.1, 0.1])  # seconds; from the second step on the reader waits for ``current``

    def wait_for_next() -> None:
        before = opened
        becomes_true(lambda: opened > before + 1, next(waits))  # one may have begun before

    publishing = threading.Thread(target=filler.publish, args=(wait_for_next,))
    publishing.start()
    while publishing.is_alive():
        data, lease = open_local_dataset(tmp_path / "cache")
        assert data.snapshot == filler.snapshot.id
        named, other = open_local_dataset(tmp_path / "cache", filler.snapshot.id)
        assert named.snapshot == data.snapshot
        for held in (lease, other):
            assert held is not None
            held.close()
        opened += 1
    assert opened >= 2


@pytest.mark.parametrize("at_work", [True, False])
def test_a_run_that_takes_long_to_publish_is_waited_for(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_work: bool
) -> None:
    """From when nothing is arriving any more until ``current`` is there, which on a busy disk may be seconds."""
    monkeypatch.setattr(open_dataset, "_MOVING", 0.0)
    filler = Filler(source, tmp_path / "cache")
    filler.fill()
    (tmp_path / "cache" / PUBLISHING).write_text(filler.snapshot.id)
    moving, tried = threading.Event(), threading.Event()
    steps = iter([lambda: None, lambda: moving.set() or tried.wait(60), lambda: None])
    publishing = threading.Thread(target=filler.publish, args=(lambda: next(steps)(),))
    with (tmp_path / "cache" / "lock").open("ab") as lock:
        if at_work:
            fcntl.flock(lock, fcntl.LOCK_EX)
        publishing.start()
        assert moving.wait(60)
        threading.Timer(0.2 if at_work else 60, tried.set).start()
        with nullcontext() if at_work else pytest.raises(CacheError, match="nothing is published"):
            data, lease = open_local_dataset(tmp_path / "cache")
        tried.set()
        publishing.join()
    if at_work:
        assert data.snapshot == filler.snapshot.id
        assert lease is not None
        lease.close()


def test_a_lease_of_an_arriving_snapshot_holds_after_publishing(source: Path, tmp_path: Path) -> None:
    filler = Filler(source, tmp_path / "cache")
    data, lease = open_local_dataset(tmp_path / "cache")
    filler.fill()
    target = filler.publish()
    assert data.root == target
    cache = CacheDirectory(tmp_path / "cache")
    assert not remove_snapshot(cache, Snapshot(target))
    assert lease is not None
    lease.close()
    assert remove_snapshot(cache, Snapshot(target))


def test_the_command_is_one_for_a_shell(source: Path, tmp_path: Path) -> None:
    (tmp_path / "the lake").symlink_to(source)
    filler = Filler(tmp_path / "the lake", tmp_path / "it's a cache")
    filler.die()
    with pytest.raises(CacheError) as ended:
        epoch(filler.cache.path)
    words = shlex.split(ended.value.advice)
    assert words[:2] == ["continue", "with:"]
    assert words[2:] == ["pqcache", "sync", str(tmp_path / "the lake"), str(filler.cache.path), "--fill"]


@pytest.mark.parametrize(
    ("changed", "said", "is_abandoned"),
    [
        ({"source": "s3://lake/other"}, "the cache is now set to copy s3://lake/other, and row group", True),
        ({"columns": ("id", "title")}, "the cache is now set to copy .*, the columns id, title, and row group", False),
        ({"where": "dt = '2026-11-01'"}, "the cache is now set to copy .*, where dt = '2026-11-01', and row", False),
    ],
)
def test_a_cache_that_is_to_hold_something_else_says_what(
    source: Path, tmp_path: Path, changed: dict[str, Any], said: str, is_abandoned: bool
) -> None:
    filler = Filler(source, tmp_path / "cache")
    batches = Cache(tmp_path / "cache").batches(["id"])
    write_config(tmp_path / "cache", Config(**{"source": str(source), **changed}))
    if is_abandoned:
        filler.snapshot.give_up()
    filler.die()
    with pytest.raises(CacheError, match=f"{said}.* will not arrive; open the dataset again"):
        list(batches)


def test_another_snapshot_in_its_place_is_named(source: Path, published: Path, tmp_path: Path) -> None:
    filler = Filler(source, tmp_path / "cache")
    batches = Cache(tmp_path / "cache").batches(["id"])
    filler.die()
    (snapshot,) = (published / "snapshots").iterdir()
    other = "20261124T235959Z-0009"
    shutil.copytree(snapshot, tmp_path / "cache" / "snapshots" / other)
    (tmp_path / "cache" / "current").symlink_to(f"snapshots/{other}")
    with pytest.raises(CacheError, match=f"{other} takes its place, and row group .* will not arrive"):
        list(batches)


def test_a_run_that_is_killed_while_rows_are_waited_for_is_noticed(source: Path, tmp_path: Path) -> None:
    filler = Filler(source, tmp_path / "cache")
    killed = threading.Thread(target=lambda: wait_for_wanted(filler) and filler.die())
    killed.start()
    with pytest.raises(CacheError, match="continue with: pqcache sync"):
        epoch(tmp_path / "cache", columns=["title"])  # waits for the texts that it looks at
    killed.join()
    again = Filler(source, tmp_path / "cache")
    assert again.snapshot == filler.snapshot
    FillingThread(again, 0).start()
    assert len(epoch(tmp_path / "cache", columns=["title"])) == 1


def test_a_file_that_changes_is_named(source: Path, tmp_path: Path) -> None:
    filler = Filler(source, tmp_path / "cache")
    filler.change("dt=2026-11-02/part-00001.parquet")
    FillingThread(filler, 0, publish=False).start()
    with pytest.raises(SourceChanged, match=r"dt=2026-11-02/part-00001.parquet: changed at the source"):
        epoch(tmp_path / "cache")
    expected = [1, 3]  # the other days, and what does not need that file
    assert (
        sorted({int(v[-1]) for b in epoch(tmp_path / "cache", filters="dt <> '2026-11-02'") for v in b["dt"]})
        == expected
    )


def test_what_has_arrived_of_an_abandoned_snapshot_is_read(source: Path, tmp_path: Path) -> None:
    filler = Filler(source, tmp_path / "cache")
    for file in range(2):
        filler.fetch(file)
    filler.snapshot.give_up()
    assert len(epoch(tmp_path / "cache", filters="dt = '2026-11-01'", batch_size=100)) == 8
    with pytest.raises(CacheError, match=r"its run has given it up, and row group \d of dt=.* will not arrive"):
        epoch(tmp_path / "cache")
    path = filler.change("dt=2026-11-02/part-00001.parquet", "no space left on the device")
    with pytest.raises(CacheError, match=rf"{path}: no space left on the device, and row group \d of dt=.* will not"):
        epoch(tmp_path / "cache", filters="dt = '2026-11-03'")
    filler.change("", "Input/output error")
    with pytest.raises(CacheError, match=r"cache: Input/output error, and row group \d of dt=.* will not arrive"):
        epoch(tmp_path / "cache", filters="dt = '2026-11-03'")


def test_a_long_wait_is_logged_once_and_so_is_its_end(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def said() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.name == "pqcache.arriving"]

    def go_on() -> None:
        wait_for(lambda: bool(said()))
        monkeypatch.setattr(arriving, "LONG", 60.0)  # on a busy machine the rest may take long too
        filler.is_stalled.clear()

    monkeypatch.setattr(arriving, "LONG", 0.2)
    filler = Filler(source, tmp_path / "cache")
    filler.is_stalled.set()
    FillingThread(filler, 0).start()
    threading.Thread(target=go_on).start()
    batches = list(Cache(tmp_path / "cache").batches(["id"]))
    assert sum(batch.num_rows for batch in batches) == 2400
    assert len(said()) == 2
    assert "waiting since" in said()[0]
    assert "row group 0 of dt=" in said()[0] or "row group 1 of dt=" in said()[0]
    assert "it goes on" in said()[1]


def test_files_that_are_arriving_are_not_read_by_their_own_path(source: Path, tmp_path: Path) -> None:
    filler = Filler(source, tmp_path / "cache")
    shutil.copytree(filler.snapshot.path, tmp_path / "copy")
    inside = filler.snapshot.path / "dt=2026-11-01"
    for path in (
        filler.snapshot.path,
        inside,
        inside / "part-00000.parquet",
        tmp_path / "copy",
        tmp_path / "copy/dt=2026-11-02",
    ):
        with pytest.raises(CacheError, match="its files are still arriving"):
            open_local_dataset(path)
        with pytest.raises(CacheError, match="its files are still arriving"):
            pqcache.sync(str(path), str(tmp_path / "other"))
    with pytest.raises(SourceError, match="its files are still arriving"):
        open_local_dataset(tmp_path / "cache" / "arriving")
    with pytest.raises(SourceError, match="its files are still arriving"):
        pqcache.sync(str(tmp_path / "cache" / "arriving"), str(tmp_path / "other"))
    with pytest.raises(CacheError, match="its files are still arriving: 0 B of "):
        pqcache.bench(tmp_path / "cache")
    with pytest.raises(CacheError, match="nothing is published yet"):
        Cache.open(tmp_path / "cache").lookup("id", 1)


def test_a_reader_that_stops_leaves_no_thread_waiting(source: Path, tmp_path: Path) -> None:
    filler = Filler(source, tmp_path / "cache")
    batches = Cache(tmp_path / "cache").batches(["id"], window=1, batch_size=100, seed=3)
    filler.fetch(epoch_order(filler, seed=3)[0])
    next(batches)
    batches.close()
    wait_for(lambda: not [thread for thread in threading.enumerate() if thread.name.startswith("pqcache")])
    assert not list(filler.snapshot.wanted_directory.iterdir())


def test_a_process_that_ends_while_rows_are_missing_does_not_hang(source: Path, tmp_path: Path) -> None:
    """And it reads without torch or JAX, which nothing has imported."""
    filler = Filler(source, tmp_path / "cache")
    filler.fetch(epoch_order(filler, seed=3)[0])
    program = (
        "import sys, pqcache\n"
        "batches = pqcache.Cache(sys.argv[1]).batches(['id'], window=1, batch_size=100, seed=3)\n"
        "print(next(batches).num_rows, {'torch', 'jax'} & sys.modules.keys())\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path / "cache")], capture_output=True, timeout=60)
    assert (done.stdout, done.stderr) == (b"100 set()\n", b"")


def wait_for_wanted(filler: Filler) -> list[Wanted]:
    """Return what readers want, when they want something."""
    wait_for(lambda: bool(WantedLists(filler.snapshot.wanted_directory).read()))
    return WantedLists(filler.snapshot.wanted_directory).read()


@pytest.mark.parametrize("round_", [0, *(pytest.param(n, marks=pytest.mark.deep) for n in range(1, 20))])
@pytest.mark.filterwarnings("ignore:.*one is read at a time")
def test_readers_with_different_wishes_at_once(source: Path, published: Path, tmp_path: Path, round_: int) -> None:
    rng = np.random.default_rng(round_)
    filler = Filler(source, tmp_path / "cache")
    thread = FillingThread(filler, float(rng.choice([0, 0.001, 0.01])))
    wishes: list[dict[str, Any]] = []
    for _ in range(3):
        columns = rng.permutation(["id", "title", "tokens", "price", "image", "dt"])[: rng.integers(1, 7)].tolist()
        wish = {"columns": columns, "batch_size": int(rng.integers(1, 300)), "seed": int(rng.integers(9))}
        wish |= {"shuffle": bool(rng.random() < 0.8), "lanes": int(rng.integers(1, 5))}
        wish |= {"filters": "price > 0.9"} if rng.random() < 0.3 else {}
        wish |= {"memory": int(rng.choice([60_000, 300_000, 10_000_000]))}
        wishes.append(wish)
    found: dict[int, Any] = {}

    def result(cache: Path, wish: dict[str, Any]) -> Any:
        try:
            return epoch(cache, **wish)
        except UsageError as error:  # too little memory for these lanes
            return error.reason

    def read(number: int) -> None:
        time.sleep(number * 0.02)
        found[number] = result(tmp_path / "cache", wishes[number])

    readers = [threading.Thread(target=read, args=(number,)) for number in range(3)]
    for started in (thread, *readers):
        started.start()
    for started in (*readers, thread):
        started.join()
    for number, wish in enumerate(wishes):
        assert found[number] == result(published, wish), wish
