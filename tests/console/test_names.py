"""Names of caches below PQCACHE_ROOT on the command line, and commands for all caches there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import pqcache
from tests.datasets import write_shop
from tests.forked_commands import run_pqcache


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a lake, and with the caches ``shop`` and ``other`` below ``root``."""
    place = tmp_path_factory.mktemp("names")
    write_shop(place / "lake" / "shop", days=1, files=1, rows=20)
    for name in ("shop", "other"):
        pqcache.sync(place / "lake" / "shop", place / "root" / name)
    return place


def named(place: Path, *words: object, root: str = "root") -> subprocess.CompletedProcess[str]:
    return run_pqcache(*words, env={**os.environ, "PQCACHE_ROOT": root}, cwd=place)


COMMANDS = """\
sync shop --dry-run
verify shop
log shop
gc shop
snapshots shop
index shop
inspect shop
bench shop --seconds 0.01 --workers 0
status shop other
repartition shop --dry-run --row-group-size 1MB
pin shop 1 --name best
unpin shop best
rollback shop 1
remove shop --dry-run
"""


def test_every_command_takes_names_and_lists_near_ones(place: Path) -> None:
    for command in COMMANDS.splitlines():
        if not command.startswith("bench"):  # which takes its time
            done = named(place, *command.split())
            assert done.returncode == 0, done
        mistyped = named(place, *command.replace("shop", "shpo").split())
        assert mistyped.returncode == 2, mistyped
        assert f"{place}/root/shpo: no such cache; did you mean shop?\n" in mistyped.stderr
    assert sorted(os.listdir(place / "root")) == ["other", "shop"]


def test_a_first_sync_makes_the_cache_below_the_root(tmp_path: Path) -> None:
    write_shop(tmp_path / "shop", days=1, files=1, rows=20)
    for _ in range(2):
        done = named(tmp_path, "sync", "shop", "copy")
        assert done.returncode == 0, done
    assert os.listdir(tmp_path / "root") == ["copy"]
    assert [Path(found.cache).name for found in pqcache.status(tmp_path / "root").caches] == ["copy"]
    assert named(tmp_path, "sync", "shop", "./copy").returncode == 0
    assert (tmp_path / "copy" / "current").is_dir()


def test_a_name_that_could_be_a_path_is_refused_with_both_spellings(tmp_path: Path) -> None:
    write_shop(tmp_path / "lake", days=1, files=1, rows=20)
    for cache in ("here", "both", "root/both"):
        pqcache.sync(tmp_path / "lake", tmp_path / cache)
    both = f"both: is in {tmp_path}/root and in this directory; write {tmp_path}/root/both or ./both\n"
    here = f"here: is not in {tmp_path}/root but in this directory; write ./here"
    for words in (
        ["verify"],
        ["sync"],
        ["sync", "lake"],
        ["inspect"],
        ["status"],
        ["remove", "--force"],
        ["sync", "--all"],
    ):
        for name, error in (("both", both), ("here", here)):
            done = named(tmp_path, *words, name)
            assert (done.returncode, error in done.stderr) == (2, True), (words, done)
    assert sorted(path.name for path in (tmp_path / "root").iterdir()) == ["both"]
    assert named(tmp_path / "root", "verify", "both", root=".").returncode == 0  # one and the same
    removed = named(tmp_path, "remove", "./both")
    assert removed.stdout.startswith(f"removed {tmp_path}/both: "), removed
    assert (tmp_path / "root" / "both").is_dir()


def test_a_declared_table_without_a_cache_is_said_to_be_one(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "pqcache.toml").write_text('[tables.shop]\nsource = "../lake"\n')
    done = named(tmp_path, "sync", "shop")
    assert done.returncode == 2
    assert f"no cache yet of this table of pqcache.toml; 'pqcache sync --all {tmp_path}/root' makes it" in done.stderr
    assert "did you mean shop?" in named(tmp_path, "sync", "shpo").stderr


def test_all_caches_are_verified_collected_and_listed(tmp_path: Path) -> None:
    lake = write_shop(tmp_path / "lake", days=1, files=1, rows=20)
    for name in ("bad", "good"):
        pqcache.sync(lake, tmp_path / "root" / name)
    (damaged,) = (tmp_path / "root" / "bad" / "current" / "dt=2026-11-01").iterdir()
    damaged.chmod(0o600)
    damaged.write_bytes(b"PAR1")
    done = named(tmp_path, "verify", "--all")
    alone = named(tmp_path, "verify", "bad")
    assert done.returncode == alone.returncode == pqcache.DamagedError.exit_code
    assert " bad: pqcache: error: " in done.stderr
    shown = [line.partition("Z ")[2] for line in done.stdout.splitlines()]
    assert [line.partition(": ")[0] for line in shown] == ["bad", "good", "root"], done
    assert shown[-1] == "root: verified 1 of 2 caches; failed: bad"
    lines = [json.loads(line) for line in named(tmp_path, "verify", "--all", "root/", "--json").stdout.splitlines()]
    assert [(line["event"], Path(line["cache"]).name) for line in lines] == [
        ("summary", "bad"), ("error", "bad"), ("summary", "good"),
    ]  # fmt: skip
    gone = named(tmp_path, "gc", "--all", "--keep", "1", "--json")
    assert [Path(json.loads(line)["cache"]).name for line in gone.stdout.splitlines()] == ["bad", "good"], gone
    (tmp_path / "root" / "bad" / "pqcache.toml").write_text("hello")
    broken = named(tmp_path, "gc", "--all")
    assert (broken.returncode, "went through 1 of 2 caches; failed: bad\n" in broken.stdout) == (1, True), broken
    runs = [json.loads(line) for line in named(tmp_path, "log", "--all", "-n", "1", "--json").stdout.splitlines()]
    assert [(Path(run["cache"]).name, run["command"], run["result"]) for run in runs] == [
        ("bad", "gc", "failed"), ("good", "gc", "done"),
    ]  # fmt: skip
    text = named(tmp_path, "log", "--all", "-n", "1").stdout.splitlines()
    (tmp_path / "root" / "bad" / "history.jsonl.zst").unlink()
    (tmp_path / "root" / "bad" / "history.jsonl.zst").mkdir()
    unread = named(tmp_path, "log", "--all", "--json")
    assert (unread.returncode, '/good", ' in unread.stdout, "report this bug" in unread.stderr) == (1, True, False), (
        unread
    )
    assert [line for line in text if line.endswith(":")] == [f"{tmp_path}/root/bad:", f"{tmp_path}/root/good:"]


def test_what_all_needs(place: Path, tmp_path: Path) -> None:
    for words, said in (
        (["verify"], "Missing argument 'CACHE'; 'pqcache verify -h' shows the usage"),
        (["verify", "--all", "-o", "token=x"], "-o and --all: exclude each other"),
    ):
        refused = named(place, *words)
        assert (refused.returncode, said in refused.stderr) == (2, True), refused
    assert named(tmp_path, "log", "--all").returncode == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_report_of_all_that_cannot_be_written_is_one_line(place: Path) -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "pqcache", "log", "--all", place / "root"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
    assert "No space left on device" in done.stderr
    assert "report this bug" not in done.stderr
