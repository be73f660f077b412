"""Many tables: one command, a line and a record for each, the worst exit code; what follows a sync; metrics."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

import pqcache
from pqcache.console.sync_runner import metrics_text
from pqcache.store.cache_directory import CacheDirectory
from pqcache.store.sync.command import TableResult
from tests.datasets import write_shop
from tests.forked_commands import run_pqcache


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A directory with three caches that have not been synced: one of a source that does not exist."""
    lake = write_shop(tmp_path / "lake" / "shop", days=1, files=1, rows=20)
    for source, name in ((lake, None), (lake, "other"), (tmp_path / "nowhere", "bad")):
        pqcache.add(source, name, root=tmp_path / "root")
    return tmp_path / "root"


def pqcache_at(root: Path, *words: object) -> subprocess.CompletedProcess[str]:
    return run_pqcache(*words, env={**os.environ, "PQCACHE_ROOT": str(root)}, cwd=root.parent)


def test_one_that_fails_does_not_stop_the_others(root: Path) -> None:
    done = pqcache_at(root, "sync", "--all")
    assert done.returncode == 1
    assert " bad: pqcache: error: " in done.stderr
    shown = [line.partition("Z ")[2] or line for line in done.stdout.splitlines()]
    assert shown[0].startswith("other: synced 1 new file in dt=2026-11-01, ")
    assert shown[1].startswith("shop: synced 1 new file")
    assert shown[2] == "root: synced 2 of 3 caches; failed: bad"
    assert all(re.match(r"\d{4}-\d\d-\d\dT[\d:]{8}Z ", line) for line in done.stdout.splitlines())
    assert [pqcache.log(root / name)[-1]["result"] for name in ("bad", "other", "shop")] == ["failed", "done", "done"]
    quiet = pqcache_at(root, "sync", "--all", root, "-q")
    assert (quiet.returncode, quiet.stdout, quiet.stderr.count("\n")) == (1, "", 1)
    pqcache.remove("bad", root=root)
    assert pqcache_at(root, "sync", "--all").returncode == 0


def test_the_worst_exit_code(root: Path) -> None:
    pqcache.remove("bad", root=root)
    pqcache.sync(root / "shop")
    with CacheDirectory(root / "shop").lock():
        assert pqcache_at(root, "sync", "--all").returncode == 75
    for path in (root.parent / "lake").rglob("*.parquet"):
        path.unlink()
    with CacheDirectory(root / "shop").lock():
        assert pqcache_at(root, "sync", "--all").returncode == 3


def test_json_has_a_line_for_each(root: Path) -> None:
    done = pqcache_at(root, "sync", "--all", "--json")
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(item["event"], Path(item["cache"]).name) for item in found] == [
        ("error", "bad"),
        ("summary", "other"),
        ("summary", "shop"),
    ]


def test_what_is_of_one_cache_is_refused(root: Path) -> None:
    for words, named in ((["--where", "id > 1"], "--where and --all"), (["-o", "a=b"], "-o and --all")):
        refused = pqcache_at(root, "sync", "--all", *words)
        assert (refused.returncode, named in refused.stderr) == (2, True), refused.stderr
    assert pqcache_at(root, "sync", root, root / "shop", "--all").returncode == 2
    assert not list(root.glob("*/current"))


def test_caches_are_added_and_removed(root: Path, tmp_path: Path) -> None:
    place = pqcache.add("s3://key:geheim@lake/warehouse/users/", root=root, options={"region": "x", "token": "geheim"})
    assert place == root / "users"
    assert "geheim" not in (place / "pqcache.toml").read_text()
    assert 'region = "x"' in (place / "pqcache.toml").read_text()
    for source, name in (("s3://lake/users", "shop"), ("s3://lake/users", "a/b"), ("lake", ".hidden"), ("", None)):
        with pytest.raises(pqcache.UsageError):
            pqcache.add(source, name, root=root)
    done = pqcache_at(root, "add", "lake/shop", "third")
    assert done.stdout == f"added {root}/third; 'pqcache sync {root}/third' fetches it\n"
    pqcache.sync(root / "third")
    _, lease = CacheDirectory(root / "third").lease()
    with lease, pytest.raises(pqcache.CacheLocked, match="open; end them, or give --force"):
        pqcache.remove("third", root=root)
    assert (root / "third" / "current").is_dir()
    removed = pqcache_at(root, "remove", "third")
    assert re.fullmatch(rf"removed {root}/third: 1 snapshot, \d+ KB freed\n", removed.stdout), removed
    assert {path.name for path in root.iterdir()} == {"shop", "other", "bad", "users"}
    for name in ("../lake", "..", "", "none"):
        with pytest.raises(pqcache.PqcacheError):
            pqcache.remove(name, root=root)
    assert (tmp_path / "lake" / "shop").is_dir()


def test_remove_says_how_to_name_a_cache(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / "empty").mkdir()
    monkeypatch.setenv("PQCACHE_ROOT", str(root / "empty"))
    monkeypatch.chdir(root)
    for name, advice in (
        (
            "shop",
            f"{root}/empty/shop: no such cache; the one in this directory goes with 'pqcache remove shop --root .'",
        ),
        ("none", f"{root}/empty/none: no such cache; 'pqcache status {root}/empty' lists those there"),
        ("./shop/", "./shop/: it takes the name of a cache, not a path; run 'pqcache remove shop --root .'"),
        ("..", "..: it takes the name of a cache, not a path; name a directory of the root, and the root with --root"),
    ):
        with pytest.raises(pqcache.UsageError) as error:
            pqcache.remove(name)
        assert str(error.value) == advice
    assert (root / "shop").is_dir()


def test_a_cache_with_what_nobody_should_lose_is_kept(root: Path) -> None:
    shop = root / "shop"
    pqcache.sync(shop)

    def refused(reason: str) -> None:
        done = pqcache_at(root, "remove", "shop")
        assert done.returncode in (1, 75), done
        assert reason in done.stderr
        assert shop.is_dir()

    (shop / "notes.txt").write_text("precious")
    (shop / "snapshots" / "mine").mkdir()
    refused("do not belong to the cache: notes.txt, snapshots/mine; move it away, or give --force")
    (shop / "notes.txt").unlink()
    (shop / "snapshots" / "mine").rmdir()
    (shop / "current" / "dt=2026-11-01" / "mine.csv").write_text("precious")
    refused("dt=2026-11-01/mine.csv; move it away, or give --force")
    (shop / "current" / "dt=2026-11-01" / "mine.csv").unlink()
    text = (shop / "pqcache.toml").read_text()
    (shop / "pqcache.toml").write_text("hello")
    refused("pqcache.toml: cannot be read")
    (shop / "pqcache.toml").write_text(text)
    pqcache.pin(shop, "1", name="best")
    refused("(best); unpin them, or give --force")
    planned = pqcache.remove("shop", root=root, force=True, dry_run=True)
    assert (len(planned.snapshots), planned.bytes > 0, shop.is_dir()) == (1, True, True)
    assert pqcache_at(root, "remove", "shop", "--force").returncode == 0
    assert not shop.exists()


@pytest.mark.parametrize("answer", ["y\n", "\n"])
def test_a_terminal_is_asked(root: Path, answer: str) -> None:
    pqcache.sync(root / "shop")
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "pqcache", "remove", "shop", "--root", root]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        said = b""
        while b"[y/N] " not in said:
            said += os.read(ours, 1000)
        os.write(ours, answer.encode())
        process.wait()
    os.close(ours)
    assert f"remove {root}/shop (1 snapshot, ".encode() in said.replace(b"\r\n", b"")
    assert (process.returncode, (root / "shop").exists()) == ((0, False) if answer == "y\n" else (1, True))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "hello",
        "format = 1\nsource = '/lake'",
        "tables.a.source = '/lake'",
        "tables = {a = {source = '/lake'}}",
        '"\\u0074ables".a.source = "/lake"',
        "tables.a.source = ",
    ],
)
def test_what_is_no_cache_is_never_changed(root: Path, text: str) -> None:
    """A directory with a ``pqcache.toml``, caches, and directories that are called as those of a cache are."""
    lakes = root / "lakes"
    pqcache.sync(root.parent / "lake" / "shop", lakes / "a")
    for name in ("notes.txt", "tmp/notes.txt", "snapshots/1/notes.txt", "arriving/notes.txt"):
        (lakes / name).parent.mkdir(parents=True, exist_ok=True)
        (lakes / name).write_text("precious")
    (lakes / "pqcache.toml").write_text(text)
    before = sorted(lakes.rglob("*"))
    for words in (
        ("remove", "lakes", "--force"),
        ("sync", lakes),
        ("sync", root.parent / "lake" / "shop", lakes),
        ("gc", lakes),
        ("rollback", lakes, "1"),
        ("verify", lakes, "--repair"),
        ("repartition", lakes),
    ):
        done = pqcache_at(root, *words)
        assert done.returncode in (1, 2), done
        assert "not a pqcache but a directory of caches: a" in done.stderr or words[0] == "repartition", done
    assert sorted(lakes.rglob("*")) == before
    broken = ["pqcache.toml"] if text.endswith("= ") else []
    assert [Path(found.cache).name for found in pqcache.status(lakes).caches] == ["a", *broken]


def test_a_directory_like_a_cache_is_not_made_one(root: Path) -> None:
    mine = root / "mine"
    for name in ("tmp/notes.txt", "snapshots/1/notes.txt"):
        (mine / name).parent.mkdir(parents=True)
        (mine / name).write_text("precious")
    for words in (("sync", root.parent / "lake" / "shop", mine), ("add", root.parent / "lake" / "shop", "mine")):
        done = pqcache_at(root, *words)
        assert (done.returncode, "not empty and not a pqcache" in done.stderr) == (2, True), done
    assert len(list(mine.rglob("notes.txt"))) == 2


SHOW = 'echo "$PQCACHE_NAME $PQCACHE_RESULT $PQCACHE_EXIT_CODE $PQCACHE_PUBLISHED $PQCACHE_ROWS $PQCACHE_ERROR" >> said'


def test_commands_follow_a_sync(root: Path, tmp_path: Path) -> None:
    hooks = ["--on-success", SHOW, "--on-failure", SHOW]
    pqcache_at(root, "sync", "--all", *hooks)
    assert pqcache_at(root, "sync", root / "shop", *hooks).returncode == 0
    assert pqcache_at(root, "sync", root / "bad", *hooks).returncode == 1
    assert pqcache_at(root, "sync", root / "bad", *hooks, "--dry-run").returncode == 1
    said = (tmp_path / "said").read_text().splitlines()
    error = f"{tmp_path}/nowhere: no such file or directory; check the path"
    assert said == [
        f"bad failed 1   {error}",
        "other done 0 1 20 ",
        "shop done 0 1 20 ",
        "shop done 0 0 20 ",
        f"bad failed 1   {error}",
    ]
    failing = pqcache_at(root, "sync", root / "shop", "--on-success", "exit 7")
    assert failing.returncode == 1
    assert "warning: --on-success: the command ended with exit code 7" in failing.stderr


def test_metrics_are_those_of_prometheus(root: Path, tmp_path: Path) -> None:
    parser = pytest.importorskip("prometheus_client.parser")
    file = tmp_path / "pqcache.prom"
    pqcache_at(root, "sync", "--all", "--metrics", file)
    families = {family.name: family for family in parser.text_string_to_metric_families(file.read_text())}
    assert all(family.type == "gauge" and family.documentation for family in families.values())

    def values(name: str) -> dict[str, float]:
        return {sample.labels["cache"]: sample.value for sample in families[f"pqcache_{name}"].samples}

    assert values("last_run_exit_code") == {"bad": 1, "other": 0, "shop": 0}
    assert values("rows") == {"other": 20, "shop": 20}
    assert set(values("last_run_timestamp_seconds")) == {"bad", "other", "shop"}
    assert values("last_success_timestamp_seconds").keys() == {"other", "shop"}
    odd = metrics_text([TableResult('/a "b"\\c\nd', None, pqcache.PqcacheError("x"))])
    (sample,) = next(f for f in parser.text_string_to_metric_families(odd) if f.name.endswith("exit_code")).samples
    assert sample.labels["path"] == '/a "b"\\c\nd'


def test_metrics_are_written_at_once_and_also_of_a_failure(root: Path, tmp_path: Path) -> None:
    file = tmp_path / "one.prom"
    file.write_text("old")
    opened = file.open()  # as node_exporter may have it
    assert pqcache_at(root, "sync", root / "bad", "--metrics", file).returncode == 1
    assert opened.read() == "old"
    opened.close()
    assert f'pqcache_last_run_exit_code{{cache="bad",path="{root}/bad"}} 1\n' in file.read_text()
    assert [path.name for path in tmp_path.glob("*.prom*")] == ["one.prom"]
    refused = pqcache_at(root, "sync", root / "shop", "--metrics", tmp_path / "none" / "x.prom")
    assert refused.returncode == 1
    assert "none/x.prom: cannot be written" in refused.stderr


TABLES = """\
[tables.shop]
source = "../lake/shop"
newest = 1
columns = ["id"]

[tables.gone]
source = "../lake/gone"

[tables.typo]
source = "../lake/shop"
kep = 1

[tables.codec]
source = "../lake/shop"
compression = "zstd"

[tables.".hidden"]
source = "../lake/shop"
"""


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    """A directory with a file of several tables and no cache yet."""
    write_shop(tmp_path / "lake" / "shop", days=2, files=1, rows=20)
    (tmp_path / "caches").mkdir()
    (tmp_path / "caches" / "pqcache.toml").write_text(TABLES)
    return tmp_path / "caches"


def test_one_file_has_several_tables(tables: Path) -> None:
    planned = run_pqcache("sync", "--all", tables, "--dry-run", cwd=tables)
    assert planned.returncode == 1
    assert "shop: would sync: 1 new file" in planned.stdout
    assert [path.name for path in tables.iterdir()] == ["pqcache.toml"]
    done = pqcache_at(tables, "sync", "--all")  # relative sources count from the file
    assert done.returncode == 1
    assert "synced 1 of 5 caches; failed: .hidden, codec, gone, typo" in done.stdout
    assert "[tables.typo]: 'kep' is not known (did you mean 'keep'?)" in done.stderr
    assert "[tables.codec]: 'compression' is set by 'pqcache repartition'" in done.stderr
    assert "[tables..hidden]: cannot be the name of a cache" in done.stderr
    assert "lake/gone: no such file or directory" in done.stderr
    failed = {Path(found.cache).name for found in pqcache.status(tables).caches if found.reasons}
    assert failed == {".hidden", "codec", "gone", "typo"}
    assert pqcache.status(tables).caches[3].rows == 20
    assert list(pq.read_table(tables / "shop" / "current").column_names) == ["id", "dt"]


def test_what_the_file_says_counts_at_each_sync(tables: Path) -> None:
    (tables / "pqcache.toml").write_text(TABLES.partition("[tables.gone]")[0])
    assert [found.exit_code for found in pqcache.sync_all(tables)] == [0]
    pqcache.add(tables.parent / "lake" / "shop", "second", root=tables)
    (tables / "pqcache.toml").write_text('[tables.shop]\nsource = "../lake/shop"\nnewest = 2\nkeep = 5\n')
    assert [(Path(f.cache).name, f.report.rows) for f in pqcache.sync_all(tables) if f.report] == [
        ("second", 40), ("shop", 40),
    ]  # fmt: skip
    assert "keep = 5" in (tables / "shop" / "pqcache.toml").read_text()
    with pytest.raises(pqcache.UsageError, match=r"shop: is a table of .*pqcache\.toml; remove its section there"):
        pqcache.remove("shop", root=tables)
    pqcache.remove("second", root=tables)
    write_shop(tables.parent / "lake" / "other", days=1, files=1, rows=20)
    (tables / "pqcache.toml").write_text('[tables.shop]\nsource = "../lake/other"\n')
    assert [found.exit_code for found in pqcache.sync_all(tables)] == [2], "another source is refused"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[tables.shop]\nsource = ", "cannot be read"),
        ("keep = 3\n[tables.shop]\nsource = '../lake/shop'\n", "'keep' is not known beside tables"),
        ("[tables]\nshop = 3\n", r"\[tables.shop\]: has no source"),
    ],
)
def test_files_that_say_nothing_useful(tables: Path, text: str, said: str) -> None:
    (tables / "pqcache.toml").write_text(text)
    done = run_pqcache("sync", "--all", tables)
    assert done.returncode == 1
    assert re.search(said, done.stderr), done.stderr


def test_a_file_of_tables_is_no_cache(tables: Path) -> None:
    done = run_pqcache("sync", tables)
    assert (done.returncode, f"sync all of them: pqcache sync --all {tables}" in done.stderr) == (2, True)
    (tables / "pqcache.toml").chmod(0o666)
    assert "chmod go-w" in run_pqcache("sync", "--all", tables).stderr
