"""Verify: flipped bits and cut-off files are found wherever they are, nothing crashes, and repair mends them."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import pqcache
from pqcache import cli
from pqcache.events import Damaged, Fetched
from pqcache.parquet import footer, thrift
from pqcache.store import verify
from pqcache.store.drivers import local
from pqcache.store.layout import CHECKSUMS, FILES, ROW_GROUPS, SUMMARY
from pqcache.store.snapshot import Snapshot
from pqcache.store.verify import Checker
from tests.damage import flip, truncate
from tests.datasets import files_of, rows_of, write_shop
from tests.examples import examples
from tests.pages import real_pages


def ask(checker: Checker, path: str, snapshot: Snapshot, **changes: Any) -> list[dict[str, Any]]:
    """Return the damage that a process finds in one file, deeply unless ``changes`` say otherwise."""
    (entry,) = [entry for entry in snapshot.manifest().files if entry.path == path]
    request = {
        "path": path,
        "rows": entry.rows,
        "row_groups": entry.row_groups,
        "checksum": entry.checksum,
        "deep": True,
        "engine": None,
        "seconds": 30.0,
    }
    return list(checker.ask({**request, **changes}))


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    return write_shop(tmp_path / "shop", days=2, files=2, rows=100)


@pytest.fixture
def cache(tmp_path: Path, shop: Path) -> Path:
    pqcache.sync(str(shop), tmp_path / "cache")
    return tmp_path / "cache"


@pytest.fixture
def snapshot(cache: Path) -> Snapshot:
    return pqcache.Cache(cache).snapshot()


@pytest.fixture
def started_anew() -> Iterator[None]:
    """The processes that check files are started as users' are, and not forked; see tests/forked_commands.py."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verify, "subprocess", subprocess)
        yield


@pytest.fixture
def checker(snapshot: Snapshot) -> Iterator[Checker]:
    with closing(Checker(snapshot.path, "index")) as checker:
        yield checker


@pytest.mark.usefixtures("started_anew")
def test_all_is_well(cache: Path, snapshot: Snapshot) -> None:
    report = pqcache.verify(cache, deep=True, source=True)
    assert (report.ok, report.damage, report.changed) == (True, (), ())
    assert (report.files, report.rows, report.snapshot) == (4, 400, snapshot.id)


def test_a_rewritten_cache_with_every_kind_of_column_is_well(tmp_path: Path) -> None:
    """Statistics of every type are compared with values: none may be called untrue that is not."""
    rng = np.random.default_rng(0)
    n = 500
    days = pa.array(rng.integers(0, 20_000, n), pa.int32())
    table = pa.table(
        {
            **{f"i{w}": pa.array(rng.integers(-100, 100, n), f"int{w}") for w in (8, 16, 32, 64)},
            **{f"u{w}": pa.array(rng.integers(0, 200, n), f"uint{w}") for w in (8, 16, 32, 64)},
            "half": pa.array(rng.random(n).astype(np.float16)),
            "float": pa.array([float("nan") if i % 5 == 0 else v for i, v in enumerate(rng.normal(size=n))]),
            "zero": pa.array([-0.0, 0.0] * (n // 2)),
            "bool": pa.array(rng.random(n) < 0.5),
            "date": days.cast(pa.date32()),
            "time": pa.array(rng.integers(0, 86_400_000, n).astype(np.int32), pa.time32("ms")),
            **{f"t_{u}": pa.array(rng.integers(0, 10**9, n), pa.timestamp(u)) for u in ("ms", "us", "ns")},
            "zoned": pa.array(rng.integers(0, 10**9, n), pa.timestamp("us", "Asia/Seoul")),
            "duration": pa.array(rng.integers(0, 10**9, n), pa.duration("us")),
            "decimal": days.cast(pa.decimal128(12, 2)),
            "long": pa.array(["é" * int(k) for k in rng.integers(0, 300, n)]),
            "word": pa.array([f"w{k}" for k in rng.integers(0, 9, n)]).dictionary_encode(),
            "blob": pa.array([rng.bytes(9) for _ in range(n)], pa.binary(9)),
            "tree": pa.array([{"a": i, "b": [i] * (i % 3)} if i % 4 else None for i in range(n)]),
            "map": pa.array([[("k", i)] for i in range(n)], pa.map_(pa.string(), pa.int64())),
            "none": pa.nulls(n),
            "vector": pa.array(rng.random((n, 4)).tolist(), pa.list_(pa.float32())),
            "a.b": pa.array(range(n)),
        }
    )
    (tmp_path / "s" / "p=1").mkdir(parents=True)
    for number in range(2):
        pq.write_table(table, tmp_path / "s" / "p=1" / f"{number}.parquet", row_group_size=200)
    pqcache.sync(str(tmp_path / "s"), tmp_path / "c")
    assert pqcache.verify(tmp_path / "c", deep=True).damage == ()
    pqcache.repartition(tmp_path / "c", row_group_size=100_000, dense=["vector"])
    assert pqcache.verify(tmp_path / "c", deep=True).damage == ()


def offsets_of(path: Path) -> list[int]:
    """Return places in every region of a Parquet file: magic, page headers, pages, footer, its length, magic."""
    size = path.stat().st_size
    pages = [page for group in real_pages(path) for chunk in group for page in chunk]
    found = {0, 3, *range(4, size, size // 120), *range(size - 12, size)}
    for at, length, _ in pages:
        found.update({at, at + 2, at + length // 2, at + length - 1})
    return sorted(found)


def test_a_flipped_bit_anywhere_in_a_file_is_found(cache: Path, snapshot: Snapshot, checker: Checker) -> None:
    path = snapshot.manifest().files[1].path
    located = 0
    places = offsets_of(snapshot.path / path)
    assert len(places) > 150
    for offset in places:
        flip(snapshot.path / path, offset, offset % 8)
        found = ask(checker, path, snapshot)
        flip(snapshot.path / path, offset, offset % 8)
        assert found, f"byte {offset}"
        located += any(item.get("column") for item in found)
    assert located > 20, "a page that cannot be decoded is named by row group and column"
    assert ask(checker, path, snapshot) == []


def check_metadata(snapshot: Snapshot) -> None:
    for name in (FILES, ROW_GROUPS, SUMMARY):
        snapshot.check(name)


@pytest.mark.parametrize("name", [FILES, ROW_GROUPS, SUMMARY, CHECKSUMS])
def test_a_flipped_bit_in_manifest_or_index_is_found_and_repaired(
    name: str, cache: Path, shop: Path, snapshot: Snapshot
) -> None:
    path = snapshot.path / name
    for offset in range(0, path.stat().st_size - 1, max(1, path.stat().st_size // 200)):
        flip(path, offset, offset % 8)
        with pytest.raises(pqcache.DamagedError, match="next sync"):
            check_metadata(snapshot)
        flip(path, offset, offset % 8)
    flip(path, 0 if name == CHECKSUMS else path.stat().st_size // 2)
    report = pqcache.verify(cache, repair=True)
    assert [item.path for item in report.damage] == [name]
    assert report.ok
    repaired = pqcache.Cache(cache).snapshot()
    assert repaired.id == report.repaired != snapshot.id
    if name in (ROW_GROUPS, CHECKSUMS):
        (repaired.path / name).unlink()
        report = pqcache.verify(cache, repair=True)
        assert [(item.path, item.message) for item in report.damage] == [(name, "is missing")]
        assert report.ok
    assert pqcache.verify(cache, deep=True).damage == ()
    assert rows_of(cache / "current") == rows_of(shop)


def test_truncated_missing_and_replaced_files_are_named(cache: Path, snapshot: Snapshot) -> None:
    first, second, third, _ = (entry.path for entry in snapshot.manifest().files)
    truncate(snapshot.path / first, 1000)
    (snapshot.path / second).unlink()
    (snapshot.path / third).rename(snapshot.path / "elsewhere")
    (snapshot.path / third).symlink_to(snapshot.path / "elsewhere")
    for deep in (False, True):
        found: dict[str, str] = {}
        report = pqcache.verify(
            cache, deep=deep, on_event=lambda e, to=found: isinstance(e, Damaged) and to.update({e.path: e.message})
        )
        assert found == {item.path: item.message for item in report.damage}
        assert found.keys() == {first, second, third}
        assert found[first].startswith("has 1,000 bytes instead of")
        assert (found[second], found[third]) == ("is missing", "is a symbolic link")
    (snapshot.path / FILES).unlink()
    with pytest.raises(pqcache.DamagedError, match="not a snapshot"):
        pqcache.verify(cache)


def test_an_untrue_statistic_and_row_count_are_found(cache: Path, snapshot: Snapshot, checker: Checker) -> None:
    """Where no checksum vouches for the file: the footer says what the pages do not hold."""
    entry = snapshot.manifest().files[0]
    path = snapshot.path / entry.path
    data = path.read_bytes()
    low = (0).to_bytes(8, "little")  # ids begin at 0: the minimum is written as eight zero bytes
    fields = thrift.decode(footer.read_local_tail(path).footer, str(path))
    chunk = footer.row_groups_of(fields, str(path))[0][1][1].values[0]
    statistics = chunk[3][1][12][1]
    assert statistics[6][1] == low
    encoded = thrift.encode(fields)
    raised = encoded.replace(low, (5).to_bytes(8, "little"))
    assert len(raised) == len(encoded) != encoded == encoded
    path.chmod(0o644)
    path.write_bytes(data[: -len(encoded) - 8] + raised + data[-8:])
    found = ask(checker, entry.path, snapshot, checksum="")
    assert any("outside of its statistics" in item["damage"] and item["column"] == "id" for item in found)
    assert any("the index has 0 as min" in item["damage"] for item in found)
    path.write_bytes(data)
    (item,) = ask(checker, entry.path, snapshot, rows=entry.rows + 1)
    assert "the manifest 101" in item["damage"]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.deep) for seed in (1, 2, 3))])
def test_arbitrary_bytes_never_crash(seed: int, snapshot: Snapshot) -> None:
    """Footers, page headers and pages at random, with no checksum to give them away before they are decoded."""
    rng = random.Random(seed)
    path = snapshot.manifest().files[0].path
    file = snapshot.path / path
    data = file.read_bytes()
    length = int.from_bytes(data[-8:-4], "little")
    pages = [page for group in real_pages(file) for chunk in group for page in chunk]
    file.chmod(0o644)
    damaged, tried = 0, examples(150)
    with closing(Checker(snapshot.path, "index")) as checker:
        for _ in range(tried):
            broken = bytearray(data)
            at, size, _ = rng.choice(pages)
            places = (range(len(data) - 8 - length, len(data)), range(at, at + 40), range(at, at + size))
            region = places[rng.randrange(3)]
            for _ in range(rng.choice((1, 1, 2, 8))):
                broken[min(rng.choice(region), len(data) - 1)] = rng.randrange(256)
            if rng.random() < 0.1:
                del broken[rng.randrange(len(broken)) :]
            file.write_bytes(broken)
            damaged += bool(ask(checker, path, snapshot, checksum=""))
        file.write_bytes(data)
        assert ask(checker, path, snapshot) == [], "the process goes on, or a new one does"
    assert damaged > tried / 2


def test_a_page_that_claims_to_be_huge_is_damage(snapshot: Snapshot, checker: Checker) -> None:
    """The size in a page header is allocated before it is filled: memory is limited."""
    path = snapshot.manifest().files[0].path
    file = snapshot.path / path
    data = bytearray(file.read_bytes())
    at, _, _ = real_pages(file)[0][3][0]
    header = thrift.decode(bytes(data[at : at + 65536]), path)
    old = thrift.encode(header)
    header[2] = (header[2][0], 2**31 - 1)
    new = thrift.encode(header)
    data[at : at + len(old)] = new[: len(old)]
    file.chmod(0o644)
    file.write_bytes(data)
    found = ask(checker, path, snapshot, checksum="")
    assert any(item.get("column") == "price" for item in found)


def send_signal(number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have each process of a checker get a signal as soon as it was started, before it has read a file."""
    start = Checker._start

    def start_and_send(checker: Checker) -> subprocess.Popen[bytes]:
        process = start(checker)
        process.send_signal(number)
        return process

    monkeypatch.setattr(Checker, "_start", start_and_send)


@pytest.mark.usefixtures("started_anew")
def test_a_process_that_hangs_or_dies_is_named(snapshot: Snapshot, monkeypatch: pytest.MonkeyPatch) -> None:
    path = snapshot.manifest().files[0].path
    with closing(Checker(snapshot.path, "index")) as checker:
        monkeypatch.setattr(verify, "_START", 0.5)
        send_signal(signal.SIGSTOP, monkeypatch)
        (item,) = ask(checker, path, snapshot)
        assert item["damage"] in [f"the process that read it did not end within {n} s" for n in (0, 1)]
        monkeypatch.undo()
        send_signal(signal.SIGKILL, monkeypatch)
        (item,) = ask(checker, path, snapshot)
        assert item["damage"] == "the process that read it was ended by SIGKILL"


@pytest.mark.usefixtures("started_anew")
def test_a_process_that_cannot_work_is_no_damage(snapshot: Snapshot, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHOME", "/nowhere")
    with closing(Checker(snapshot.path)) as checker, pytest.raises(pqcache.PqcacheError, match="cannot start"):
        list(checker.ask({"files": []}))


def damage_files(snapshot: Snapshot, count: int) -> list[str]:
    paths = [entry.path for entry in snapshot.manifest().files[:count]]
    for path in paths:
        flip(snapshot.path / path, 500)
    return paths


def test_repair_fetches_just_the_damaged_files(cache: Path, shop: Path, snapshot: Snapshot) -> None:
    flipped = damage_files(snapshot, 1)
    missing = snapshot.manifest().files[2].path
    (snapshot.path / missing).unlink()
    pq.write_table(pa.table({"id": [1]}), shop / "dt=2026-11-02" / "new.parquet")  # to download it is what sync does
    inodes = {path: (snapshot.path / path).stat().st_ino for path in files_of(snapshot.path)}
    fetched = []
    report = pqcache.verify(
        cache, deep=True, repair=True, on_event=lambda e: isinstance(e, Fetched) and fetched.append(e.path)
    )
    assert (report.ok, report.left) == (True, ())
    assert {item.path for item in report.damage} == {*flipped, missing} == set(fetched)
    repaired = pqcache.Cache(cache).snapshot()
    assert (repaired.id, repaired.number) == (report.repaired, snapshot.number + 1)
    after = {path: (repaired.path / path).stat().st_ino for path in files_of(repaired.path)}
    assert len(after) == 4
    assert {path for path in after if after[path] != inodes.get(path)} == {*flipped, missing}
    assert pqcache.verify(cache, deep=True).damage == ()
    assert pqcache.log(cache)[-1]["command"] == "repair"
    assert pqcache.verify(cache, source=True).changed == ("dt=2026-11-02/new.parquet",)


@pytest.mark.parametrize(
    "how",
    [{"columns": ["id", "image"], "where": "id >= 50"}, {"columns": ["id", "title"], "row_group_size": 5_000}],
    ids=["subset", "rewritten"],
)
def test_repair_makes_files_again(how: dict[str, Any], cache: Path, shop: Path) -> None:
    pqcache.sync(cache, **how)
    before = rows_of(cache / "current")
    damage_files(pqcache.Cache(cache).snapshot(), 1)
    report = pqcache.verify(cache, deep=True, repair=True)
    assert report.damage
    assert report.ok
    assert rows_of(cache / "current") == before
    assert pqcache.verify(cache, deep=True).damage == ()


def test_damage_that_the_source_has_is_left(
    cache: Path, shop: Path, snapshot: Snapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes again is checked again, from a source whose size and mtime hide the damage."""
    monkeypatch.setattr(local, "has_stable_inodes", lambda path: False)
    path = damage_files(snapshot, 1)[0]
    status = (shop / path).stat()
    at, _, _ = real_pages(shop / path)[0][5][0]
    flip(shop / path, at + 1)
    os.utime(shop / path, ns=(status.st_atime_ns, status.st_mtime_ns))
    report = pqcache.verify(cache, deep=True, repair=True)
    assert not report.ok
    assert {item.path for item in report.left} == {path}
    with pytest.raises(pqcache.DamagedError, match="damaged at the source"):
        report.raise_if_not_ok()


def test_repair_when_the_source_is_gone(cache: Path, shop: Path, snapshot: Snapshot) -> None:
    path = damage_files(snapshot, 1)[0]
    (shop / path).unlink()
    with pytest.raises(pqcache.SourceIncomplete, match="vanished"):
        pqcache.verify(cache, deep=True, repair=True)
    assert pqcache.Cache(cache).snapshot() == snapshot


def test_sync_does_not_trust_a_damaged_manifest_that_parses(cache: Path, shop: Path, snapshot: Snapshot) -> None:
    data = bytearray((snapshot.path / FILES).read_bytes())
    at = data.index(b"part-00001.parquet")
    flip(snapshot.path / FILES, at)
    assert pqcache.sync(cache).published
    assert rows_of(cache / "current") == rows_of(shop)


def test_the_second_engine_reads_the_same(cache: Path, shop: Path) -> None:
    pytest.importorskip("fastparquet", reason="NOT CHECKED: fastparquet is not installed")
    tree = pa.table({"id": [1, 2], "tree": [{"a": [1]}, {"a": [2]}], "when": pa.array([1, 2], pa.time64("us"))})
    pq.write_table(tree, shop / "dt=2026-11-02" / "tree.parquet")
    pqcache.sync(cache)
    report = pqcache.verify(cache, engine="fastparquet")
    assert (report.ok, report.deep) == (True, True)
    assert {"tree", "when"} >= set(report.unread) >= {"tree"}
    with pytest.raises(pqcache.UsageError, match="choose fastparquet"):
        pqcache.verify(cache, engine="duckdb")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # fastparquet leaves files open
def test_the_second_engine_finds_other_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fastparquet", reason="NOT CHECKED: fastparquet is not installed")
    from pqcache.store import file_checks as second

    table = pa.table({"x": [1, 2, 3], "y": ["a", None, "c"], "z": [0.5, None, 1.5]})
    pq.write_table(table, tmp_path / "a.parquet")
    reported: list[dict[str, Any]] = []
    second.compare_engines(tmp_path / "a.parquet", table.schema, 1.0, lambda **what: reported.append(what))
    assert all("step" in item for item in reported)
    read = second._as_compared
    monkeypatch.setattr(second, "_as_compared", lambda series, kind: [*read(series, kind)[:-1], 9])
    second.compare_engines(tmp_path / "a.parquet", table.schema, 1.0, lambda **what: reported.append(what))
    found = [item for item in reported if "damage" in item]
    assert [item["column"] for item in found] == ["x", "y", "z"]
    assert "row 2" in found[0]["damage"]


def test_the_command(cache: Path, shop: Path, snapshot: Snapshot, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["verify", str(cache)]) == 0
    assert "4 files, 400 rows" in capfd.readouterr().out
    flipped = damage_files(snapshot, 1)[0]
    assert cli.run(["verify", str(cache), "--deep"]) == 4
    shown = capfd.readouterr()
    assert f"damaged: {flipped}: its checksum is not the one that was recorded" in shown.err
    assert "1 damaged file" in shown.out
    assert f"'pqcache verify {cache} --deep --repair'" in shown.err
    assert cli.run(["verify", str(cache), "--deep", "-q"]) == 4
    shown = capfd.readouterr()
    assert (shown.out, shown.err.count("\n")) == ("", 1)
    assert flipped in shown.err
    assert cli.run(["verify", str(cache), "--deep", "--json"]) == 4
    events = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert [event["event"] for event in events][-2:] == ["summary", "error"]
    assert events[-2]["damage"][0]["path"] == flipped
    assert events[-1]["exit_code"] == 4
    (shop / flipped).touch()
    assert cli.run(["verify", str(cache), "--source"]) == 1
    assert f"changed at the source: {flipped}" in capfd.readouterr().out
    assert cli.run(["verify", str(cache), "--deep", "--repair"]) == 3, "beside files of an earlier moment"
    assert f"{flipped}: is damaged in the cache and has changed at its source" in capfd.readouterr().err
    assert pqcache.Cache(cache).snapshot() == snapshot
    assert cli.run(["sync", str(cache)]) == 0
    current = pqcache.Cache(cache).snapshot()
    flipped = damage_files(current, 1)[0]
    flip(current.path / ROW_GROUPS, -40)
    capfd.readouterr()
    assert cli.run(["verify", str(cache), "--deep", "--repair"]) == 0
    repaired = [line.partition(" cache: ")[2] for line in capfd.readouterr().out.splitlines() if ": repaired" in line]
    assert repaired == [f"repaired: {ROW_GROUPS}, built again", f"repaired: {flipped}, fetched again"]
    assert cli.run(["verify", str(cache), "--deep", "--source"]) == 0
    assert cli.run(["log", str(cache)]) == 0
    assert "  repaired  " in capfd.readouterr().out
    assert cli.run(["verify", str(cache.parent / "nowhere")]) == 1


def test_files_looked_at_together_are_found_one_by_one(cache: Path, snapshot: Snapshot, tmp_path: Path) -> None:
    """A quick verify asks for several files at once, and for each of them where not all are well."""
    pqcache.sync(write_shop(tmp_path / "much", days=3, files=4, rows=10), tmp_path / "many")
    many = pqcache.Cache(tmp_path / "many").snapshot()
    paths = files_of(many.path)
    other = (many.path / paths[8]).read_bytes()
    for number in (3, 9, 11):
        (many.path / paths[number]).chmod(0o644)
    flip(many.path / paths[3], -20)  # in the footer
    (many.path / paths[9]).write_bytes(other)  # a whole file, but another one
    truncate(many.path / paths[11], 100)
    found = []
    for together in (10**9, 1, 5):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("pqcache.store.verify._FOOTERS_AT_ONCE", together)
            found.append(pqcache.verify(tmp_path / "many").damage)
    assert found[0] == found[1] == found[2]
    assert {item.path for item in found[0]} == {paths[3], paths[9], paths[11]}


@pytest.mark.deep  # 2.4 GB are decoded, a little at a time
def test_texts_that_are_stored_once_may_be_long_together(tmp_path: Path) -> None:
    codes = pa.array(np.repeat(np.array([0, 1], np.int32), [60_000, 400_000]))
    texts = pa.DictionaryArray.from_arrays(codes, pa.array(["x" * 40_000, "a"]))
    (tmp_path / "lake").mkdir()
    pq.write_table(pa.table({"t": texts}), tmp_path / "lake" / "a.parquet", store_schema=False)
    pqcache.sync(tmp_path / "lake", tmp_path / "cache")
    assert pqcache.verify(tmp_path / "cache", deep=True).damage == ()
