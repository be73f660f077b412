"""Every run that may change a cache has a record, whatever became of it: done, failed, refused, interrupted, killed."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import pqcache
from pqcache.console.terminal import name_lines
from pqcache.console.text import print_history
from pqcache.events import Event, Started
from pqcache.store import gc, history
from pqcache.store.cache_directory import CacheDirectory
from pqcache.store.config import Config
from pqcache.store.history import append_history, options_of, read_history
from pqcache.store.layout import HISTORY, RUNNING
from tests import ROOT
from tests.datasets import write_day, write_shop


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    return write_shop(tmp_path / "shop", days=3, files=1, rows=20)


@pytest.fixture
def cache(shop: Path, tmp_path: Path) -> Path:
    pqcache.sync(shop, tmp_path / "cache")
    return tmp_path / "cache"


def last(cache: Path) -> dict[str, Any]:
    return pqcache.log(cache)[-1]


def killed_at(cache: Path, kind: str, *words: str) -> None:
    """Run a sync in a process that is killed, as by kill -9, when the first event of a kind comes."""
    code = (
        "import os, sys, pqcache\n"
        "def kill(event):\n"
        "    if type(event).__name__ == sys.argv[1]: os.kill(os.getpid(), 9)\n"
        "pqcache.sync(*sys.argv[2:], on_event=kill)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code, kind, *words, str(cache)], env=env, timeout=60)
    assert done.returncode == -signal.SIGKILL


def test_runs_that_failed_or_were_refused(cache: Path, shop: Path, tmp_path: Path) -> None:
    with pytest.raises(pqcache.SourceNotFound):
        pqcache.sync(tmp_path / "nowhere", cache, new_source=True)
    failed = last(cache)
    assert (failed["command"], failed["result"], failed["exit_code"]) == ("sync", "failed", 1)
    assert "nowhere: no such file or directory" in failed["error"]
    for day in ("2026-11-01", "2026-11-02"):
        (shop / f"dt={day}" / "part-00000.parquet").unlink()
    with pytest.raises(pqcache.SourceIncomplete):
        pqcache.sync(cache)
    refused = last(cache)
    assert (refused["result"], refused["exit_code"]) == ("refused", 3)
    assert "--force" in refused["error"]
    with pytest.raises(pqcache.UsageError):
        pqcache.repartition(cache, dense=["nothing"])
    assert (last(cache)["command"], last(cache)["result"], last(cache)["exit_code"]) == ("repartition", "failed", 2)
    with CacheDirectory(cache).lock(), pytest.raises(pqcache.CacheLocked):
        pqcache.gc(cache)
    locked = last(cache)
    assert (locked["command"], locked["result"], locked["exit_code"]) == ("gc", "refused", 75)
    (cache / "current").unlink()
    (cache / "current").symlink_to("snapshots/none")
    with pytest.raises(pqcache.CacheError):
        pqcache.gc(cache)
    assert (last(cache)["command"], last(cache)["result"], last(cache)["exit_code"]) == ("gc", "failed", 4)
    assert len(pqcache.log(cache)) == 6
    assert not (cache / RUNNING).exists()


def test_runs_that_change_nothing_have_no_record(cache: Path) -> None:
    pqcache.sync(cache, dry_run=True)
    pqcache.repartition(cache, dry_run=True)
    pqcache.gc(cache, dry_run=True)
    pqcache.verify(cache)
    pqcache.index(cache)
    assert len(pqcache.log(cache)) == 1


def test_gc_index_and_repair_have_records(cache: Path, shop: Path) -> None:
    write_day(shop, "2026-11-09", files=1, rows=20)
    first = last(cache)["snapshot"]
    second = pqcache.sync(cache).snapshot
    pqcache.gc(cache, keep=1)
    assert (last(cache)["command"], last(cache)["collected"], last(cache)["snapshot"]) == ("gc", [first], second)
    pqcache.index(cache, keys=["id"])
    assert (last(cache)["built"], last(cache)["changes"]) == (["id"], {"keys": [None, ["id"]]})
    (path,) = (cache / "current" / "dt=2026-11-09").glob("*.parquet")
    path.unlink()
    repaired = pqcache.verify(cache, repair=True).repaired
    assert (last(cache)["command"], last(cache)["result"], last(cache)["snapshot"]) == ("repair", "done", repaired)


def test_a_run_that_cannot_remove_what_is_old_is_done(cache: Path, shop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = last(cache)["snapshot"]
    write_day(shop, "2026-11-09", files=1, rows=20)
    remove_tree = gc.remove_tree

    def remove_or_fail(path: Path) -> None:
        if first in path.name:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(path))
        remove_tree(path)

    monkeypatch.setattr(gc, "remove_tree", remove_or_fail)
    with pytest.raises(pqcache.PqcacheError) as error:
        pqcache.sync(cache, keep=1)
    found = last(cache)
    reason = "old data could not be removed: Operation not permitted"
    assert f"{reason}; {found['snapshot']} is current all the same; check the cache's disk" in str(error.value)
    assert (found["command"], found["result"], found["published"], found["added"]) == ("sync", "done", True, 1)
    assert found["error"] == str(error.value)
    assert [run["result"] for run in pqcache.log(cache)] == ["done", "done"]
    assert (cache / "current").resolve().name == found["snapshot"] != first
    monkeypatch.undo()
    pqcache.sync(cache)
    assert not list((cache / "tmp").iterdir())


def test_changes_of_source_and_options(cache: Path, shop: Path, tmp_path: Path) -> None:
    assert "changes" not in last(cache)
    pqcache.sync(cache)
    assert "options" not in last(cache)
    (tmp_path / "moved").symlink_to(shop)
    pqcache.sync(tmp_path / "moved", cache, keep=3)
    assert last(cache)["changes"] == {"source": [str(shop), str(tmp_path / "moved")], "keep": [None, 3]}
    text = (cache / "pqcache.toml").read_text()
    (cache / "pqcache.toml").write_text(text.replace("keep = 3", "keep = 5"))  # in an editor
    pqcache.sync(cache, checksum=True)
    assert last(cache)["changes"] == {"keep": [3, 5], "checksum": [None, True]}
    edited = Config(source="s3://key:geheim@lake/x", options={"endpoint": "http://127.0.0.1:1", "token": "geheim"})
    assert options_of(edited) == {"source": "s3://lake/x", "options": {"endpoint": "http://127.0.0.1:1"}}
    pqcache.repartition(cache, row_group_size="1MB")
    assert last(cache)["changes"] == {"row_group_size": [None, 1 << 20]}


def test_a_killed_run_is_found_by_log_and_written_by_the_next(cache: Path, shop: Path) -> None:
    before = last(cache)["snapshot"]
    write_day(shop, "2026-11-20", files=1, rows=20)
    killed_at(cache, "Published")
    shown = last(cache)
    assert (shown["command"], shown["result"], shown["interrupted"]) == ("sync", "interrupted", True)
    assert shown["snapshot"] == pqcache.Cache.open(cache).snapshot().id != before
    assert len(read_history(cache)) == 1
    pqcache.sync(cache)
    records = pqcache.log(cache)
    assert [record["result"] for record in records] == ["done", "interrupted", "done"]
    assert records[1]["run"] == shown["run"]
    assert read_history(cache)[1] == records[1]


def test_a_killed_first_run_is_in_the_log_of_what_is_no_cache_yet(shop: Path, tmp_path: Path) -> None:
    cache = tmp_path / "first"
    killed_at(cache, "Fetched", str(shop))
    assert CacheDirectory(cache).current() is None
    assert (last(cache)["result"], last(cache).get("snapshot")) == ("interrupted", None)
    pqcache.sync(shop, cache)
    assert [record["result"] for record in pqcache.log(cache)] == ["interrupted", "done"]
    with pytest.raises(pqcache.CacheError, match="not a pqcache"):
        pqcache.log(shop)


def test_a_run_at_work_and_an_interrupted_one(cache: Path, shop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def look(event: Event) -> None:
        if isinstance(event, Started) and event.phase == "fetch":
            seen.append(last(cache)["result"])
            monkeypatch.setattr(history, "try_lock", lambda *_, **__: None)  # where there are no locks
            seen.append(last(cache)["result"])
            monkeypatch.undo()
            raise KeyboardInterrupt

    write_day(shop, "2026-11-20", files=1, rows=20)
    with pytest.raises(KeyboardInterrupt):
        pqcache.sync(cache, on_event=look)
    assert seen == ["running", "running"]
    assert (last(cache)["result"], last(cache)["exit_code"]) == ("interrupted", 130)
    assert last(cache)["error"] == "by Ctrl-C or a signal"
    assert not (cache / RUNNING).exists()


def test_gc_frees_space_on_a_full_disk(cache: Path, shop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_day(shop, "2026-11-20", files=1, rows=20)
    pqcache.sync(cache)
    events: list[Event] = []

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(history, "append_history", full)
    assert len(pqcache.gc(cache, keep=1, on_event=events.append).removed) == 1
    assert "no space left for the record of this run" in str(events)


def test_the_table_says_why_and_what_changed(
    cache: Path, shop: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pqcache.sync(cache, where="dt >= '2026-11-02'")
    with pytest.raises(pqcache.SourceNotFound):
        pqcache.sync(tmp_path / "nowhere", cache, new_source=True)
    name_lines("")
    print_history(pqcache.log(cache))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["time", "(UTC)", "command", "files", "fetched", "took", "snapshot"]
    assert lines[2] == "    dt=2026-11-01: part-00000.parquet is new at the source"
    moved, why, changed, failed, error = lines[-5:]
    assert moved.split()[2:4] == ["sync", "-1"]
    assert why == "    dt=2026-11-01: part-00000.parquet is left out by the options"
    assert changed == "    where: default -> dt >= '2026-11-02'"
    assert failed.split()[2:4] == ["sync", "failed"]
    assert error == f"    {tmp_path}/nowhere: no such file or directory; check the path"
    assert max(map(len, lines[:-1])) <= 80
    pqcache.sync(cache, row_group_size="8MB")
    print_history(pqcache.log(cache)[-1:])
    assert capsys.readouterr().out.endswith("\n    row_group_size: default -> 8MB\n"), "as it was typed"


def test_a_torn_or_damaged_record_hides_no_other(tmp_path: Path) -> None:
    ends = [0]
    for run in "0123":
        append_history(tmp_path, {"time": "2026-11-01T04:00:00+00:00", "command": "sync", "run": run})
        ends.append((tmp_path / HISTORY).stat().st_size)
    data = bytearray((tmp_path / HISTORY).read_bytes())
    data[ends[1] + 6 : ends[2]] = b"\xff" * (ends[2] - ends[1] - 6)
    for length in (ends[4] - 9, ends[3] + 1):
        (tmp_path / HISTORY).write_bytes(data[:length])
        assert [record["run"] for record in read_history(tmp_path)] == ["0", "2"]
    append_history(tmp_path, {"time": "2026-11-01T04:00:00+00:00", "command": "sync", "run": "4"})
    assert [record["run"] for record in read_history(tmp_path)] == ["0", "2", "4"]
