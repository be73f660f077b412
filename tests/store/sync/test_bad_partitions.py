"""Files that cannot be taken: what a sync says of them, and what it publishes without them."""

from __future__ import annotations

import json
import os
import re
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import pqcache
from pqcache.errors import ParquetError, PartitionsSkipped, SourceError, TypeClash
from pqcache.events import Event, Fetched, Started
from pqcache.store.sync import build_snapshot
from tests.damage import flip
from tests.datasets import files_of
from tests.forked_commands import run_pqcache
from tests.store.drivers.fake_s3 import fake_s3, listing_of

BROKEN = b"PAR1" + bytes(50)


def write(root: Path, day: int, values: Sequence[Any], name: str = "p.parquet") -> Path:
    path = root / f"dt={day}" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"id": [day] * len(values), "a": values}), path)
    return path


def values_of(cache: Path) -> dict[str, list[Any]]:
    """Return the values of each partition in the current snapshot."""
    root = cache / "current"
    paths = sorted({path.rpartition("/")[0] for path in files_of(root)})
    return {path: pq.read_table(root / path, partitioning=None)["a"].to_pylist() for path in paths}


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    for day in (1, 2):
        write(tmp_path / "lake", day, [day, day])
    return tmp_path / "lake"


@pytest.fixture
def cache(tmp_path: Path, lake: Path) -> Path:
    pqcache.sync(lake, tmp_path / "cache")
    return tmp_path / "cache"


def test_a_clash_between_nights_names_files_types_and_partition(lake: Path, cache: Path) -> None:
    write(lake, 2, ["x", "y"])
    with pytest.raises(TypeClash) as error:
        pqcache.sync(cache)
    assert error.value.subject == "dt=2/p.parquet"
    assert error.value.reason == "column 'a' is string, which does not fit int64 in dt=1/p.parquet"
    assert error.value.advice == (
        "write partition dt=2 again with the other type, or publish the rest with --skip-bad, or leave the column out "
        "with --columns id"
    )
    assert error.value.column == "a"
    assert values_of(cache) == {"dt=1": [1, 1], "dt=2": [2, 2]}


@pytest.mark.parametrize("row_group_size", [None, "1MB"])
def test_old_versions_are_kept_and_the_rest_is_taken(lake: Path, tmp_path: Path, row_group_size: str | None) -> None:
    cache = tmp_path / "cache"
    pqcache.sync(lake, cache, row_group_size=row_group_size)
    write(lake, 1, ["x"])
    write(lake, 2, [5, 5, 5])
    write(lake, 3, ["x"])
    (write(lake, 4, [4]).parent / "q.parquet").write_bytes(BROKEN)
    write(lake, 5, [5])
    write(lake, 6, [6], name="old.parquet")
    report = pqcache.sync(cache, skip_bad=True, force=True)
    assert [(item.partition, item.kept) for item in report.skipped] == [
        ("dt=1", True), ("dt=3", False), ("dt=4", False),
    ]  # fmt: skip
    reasons = {item.partition: item.reason for item in report.skipped}
    assert all(name in reasons[day] for day, name in (("dt=1", "dt=1/"), ("dt=3", "dt=3/"), ("dt=4", "q.parquet")))
    assert not any("--skip-bad" in reason for reason in reasons.values())
    assert values_of(cache) == {"dt=1": [1, 1], "dt=2": [5, 5, 5], "dt=5": [5], "dt=6": [6]}
    assert not any((cache / "tmp").iterdir())
    with pytest.raises(PartitionsSkipped, match=r"3 partitions skipped: dt=1, dt=3, dt=4"):
        report.raise_if_skipped()


def test_each_night_tries_again(lake: Path, cache: Path) -> None:
    write(lake, 2, ["x"])
    first = pqcache.sync(cache, skip_bad=True)
    assert (first.published, [item.partition for item in first.skipped]) == (False, ["dt=2"])
    again = pqcache.sync(cache)  # it is remembered
    assert [item.partition for item in again.skipped] == ["dt=2"]
    write(lake, 2, [7])
    fetched: list[str] = []
    good = pqcache.sync(cache, on_event=lambda e: fetched.append(e.path) if isinstance(e, Fetched) else None)
    assert (good.published, good.skipped, fetched) == (True, (), ["dt=2/p.parquet"])
    write(lake, 2, ["x"])
    with pytest.raises(TypeClash):
        pqcache.sync(cache, skip_bad=False)


ODD = {  # by key: what is said of an object that a cache cannot hold, beside dt=1/p.parquet and dt=2/p.parquet
    "dt=1": ("t/dt=1: is both a file and a directory", "rename one"),
    "/p.parquet": ("t//p.parquet: has an empty segment in its path", "rename"),
    "dt=3/./p.parquet": ("has a '.' or '..' segment in its path", "rename"),
    f"{'x' * 250}.parquet": (f"t/{'x' * 250}.parquet: has a name longer than 255 bytes", "rename"),
    f"dt=3/{'/'.join(['ü' * 100] * 16)}/000000_0": ("has a path longer than 3,072 bytes", "rename"),
    "dt=3/a\tb.parquet": ("t/dt=3/a%09b.parquet: has a control character", "rename"),
    "dt=3/archived.parquet": ("t/dt=3/archived.parquet: is archived (DEEP_ARCHIVE)", "restore it in the store"),
    "archived_0": ("t/archived_0: is archived (DEEP_ARCHIVE)", "restore it in the store"),
}


def test_one_odd_object_does_not_stop_a_table(lake: Path, tmp_path: Path) -> None:
    good = {f"t/dt={day}/p.parquet": (lake / f"dt={day}/p.parquet").read_bytes() for day in (1, 2)}
    objects = dict(good)
    with fake_s3(listing_of(objects), objects) as s3:
        for number, (key, (cause, advice)) in enumerate(ODD.items()):
            objects.clear()
            objects.update({**good, f"t/{key}": good["t/dt=1/p.parquet"]})
            s3.archived = {name for name in objects if "archived" in name}
            cache = tmp_path / f"new{number}"
            with pytest.raises(SourceError, match=re.escape(cause)) as refused:
                pqcache.sync("s3://b/t", cache, options=s3.options)
            assert advice in refused.value.advice
            assert refused.value.advice.endswith(", or leave it out with --skip-bad (skip_bad=True)")
            (skipped,) = pqcache.sync("s3://b/t", cache, options=s3.options, skip_bad=True).skipped
            assert (skipped.kept, cause in skipped.reason) == (False, True)
            assert values_of(cache) == {"dt=1": [1, 1], "dt=2": [2, 2]}, key


def test_objects_without_rows_are_passed_over(lake: Path, tmp_path: Path) -> None:
    table = {"t/dt=1/p.parquet": (lake / "dt=1/p.parquet").read_bytes()}
    no_data = {"t/dt=1/p.parquet/": b"", "t/dt=2/": b""}  # no files to anybody
    others = {"t/dt=1": b"", "t/dt=3": b"", "t/dt=4/": b"a directory, says a gateway"}
    others |= {"t/manifest": b'{"entries": []}' + bytes(999), "t/x_manifest": b'{"entries": []}'}
    objects = {**table, **no_data, **others}
    with fake_s3(listing_of(objects), objects) as s3:
        report = pqcache.sync("s3://b/t", tmp_path / "new", options=s3.options)
    assert report.passed_over is not None
    assert report.passed_over.other == len(others)
    assert values_of(tmp_path / "new") == {"dt=1": [1, 1]}


def test_an_object_that_is_archived_later_stays(lake: Path, tmp_path: Path) -> None:
    objects = {f"t/dt={day}/p.parquet": (lake / f"dt={day}/p.parquet").read_bytes() for day in (1, 2)}
    with fake_s3(listing_of(objects), objects) as s3:
        pqcache.sync("s3://b/t", tmp_path / "new", options=s3.options)
        s3.archived = {"t/dt=1/p.parquet"}
        objects["t/dt=3/p.parquet"] = objects["t/dt=2/p.parquet"]
        assert pqcache.sync(tmp_path / "new", options=s3.options).added == 1
        assert list(values_of(tmp_path / "new")) == ["dt=1", "dt=2", "dt=3"]


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        here = os.open(path.parent, os.O_RDONLY)  # the whole path may be too long for one
        listener.bind(f"/proc/self/fd/{here}/{path.name}")
        os.close(here)


LOCAL = [  # place, what makes it, what is said
    ("dt=2/odd.parquet", make_socket, "not a regular file"),
    ("dt=2/odd.parquet", lambda path: path.symlink_to("nowhere"), "is a link to nothing"),
    ("odd.parquet", lambda path: os.mkfifo(path), "not a regular file"),
    ("odd.parquet", lambda path: path.symlink_to(path.name), "is a link that leads to itself"),
]


def test_one_odd_local_file_does_not_stop_a_table(lake: Path, cache: Path) -> None:
    write(lake, 1, [3])
    write(lake, 2, [4])
    for place, make, cause in LOCAL:
        make(lake / place)
        with pytest.raises(SourceError, match=f"{lake / place}: {cause}; .* or leave it out with --skip-bad"):
            pqcache.sync(cache, skip_bad=False)
        with pytest.raises(SourceError, match=f"{lake / place}: {cause}; [^-]*$"):
            pqcache.inspect(lake)
        report = pqcache.sync(cache, skip_bad=True, force=True)
        assert [item.partition for item in report.skipped] == [place.rpartition("/")[0] or f"./{place}"]
        assert f"{place}: {cause}" in report.skipped[0].reason
        assert values_of(cache) == {"dt=1": [3], "dt=2": [4] if "/" not in place else [2, 2]}, "old, or left out"
        (lake / place).unlink()


@pytest.mark.skipif(os.getuid() != 0, reason="NOT TESTED: only root can become another user")
def test_what_a_user_may_not_read_keeps_its_old_version(lake: Path, cache: Path) -> None:
    """A directory of another user, with all partitions below it, and a file."""
    (lake / "year=2026").mkdir()
    for day in (3, 4, 5):
        write(lake, day, [day]).parent.rename(lake / "year=2026" / f"dt={day}")
    write(lake, 6, [6])
    pqcache.sync(cache)
    (lake / "year=2026").chmod(0)
    write(lake, 2, [7]).chmod(0)
    write(lake, 6, [8])
    for path in [cache, *cache.rglob("*")]:
        os.chown(path, 65534, 65534, follow_symlinks=False)
    above = [path for path in lake.parents if path.stat().st_uid == 0 and not path.stat().st_mode & 1]
    modes = {path: path.stat().st_mode for path in above}
    for path in above:
        path.chmod(0o711)
    os.seteuid(65534)
    try:
        with pytest.raises(
            SourceError, match=r"permission denied; make it readable for this user, or leave it out with"
        ):
            pqcache.sync(cache)
        report = pqcache.sync(cache, skip_bad=True, force=True)
    finally:
        os.seteuid(0)
        for path, mode in modes.items():
            path.chmod(mode)
    assert [(item.partition, item.kept) for item in report.skipped] == [("dt=2", True), ("year=2026", True)]
    held = values_of(cache)
    assert held.pop("dt=6") == [8]
    assert held == {"dt=1": [1, 1], "dt=2": [2, 2], **{f"year=2026/dt={day}": [day] for day in (3, 4, 5)}}


def test_when_all_files_have_the_other_type_nothing_clashes(lake: Path, cache: Path) -> None:
    for day in (1, 2):
        write(lake, day, ["x", "y"])
    assert pqcache.sync(cache, skip_bad=True).skipped == ()
    assert values_of(cache) == {"dt=1": ["x", "y"], "dt=2": ["x", "y"]}


@pytest.mark.parametrize(
    "part", [{"where": "id > 1"}, {"columns": ["a"]}, {"newest": 2}, {"where": "a > 0 and dt > 1"}]
)
def test_parts_of_a_table(part: dict[str, Any], lake: Path, tmp_path: Path) -> None:
    """Whichever file is looked at for the types of columns may be the one that is damaged."""
    write(lake, 3, [3, 3])
    for day in (1, 2, 3):
        place, good = lake / f"dt={day}" / "p.parquet", (lake / f"dt={day}" / "p.parquet").read_bytes()
        place.write_bytes(BROKEN)
        report = pqcache.sync(lake, tmp_path / f"c{day}", skip_bad=True, **part)
        is_taken = day > 1 or not {"where": "a > 0 and dt > 1", "newest": 2}.items() & part.items()
        assert [item.partition for item in report.skipped] == [f"dt={day}"] * is_taken
        place.write_bytes(good)


def test_a_first_copy_leaves_out_what_cannot_be_taken(lake: Path, tmp_path: Path) -> None:
    write(lake, 2, ["x"])
    report = pqcache.sync(lake, tmp_path / "c", skip_bad=True)
    assert [(item.partition, item.kept) for item in report.skipped] == [("dt=2", False)]
    assert values_of(tmp_path / "c") == {"dt=1": [1, 1]}
    flat = tmp_path / "flat"
    flat.mkdir()
    (flat / "a.parquet").write_bytes(BROKEN)
    with pytest.raises(pqcache.ParquetError, match=r"a\.parquet"):  # nothing would be left
        pqcache.sync(flat, tmp_path / "d", skip_bad=True)


@pytest.mark.parametrize(
    ("bad", "row_group_size", "what"),
    [("b.parquet", None, "type"), ("d.parquet", "1MB", "type"), ("b.parquet", "1MB", "page")],
)
def test_of_a_table_without_partitions_one_file_is_left_out(
    bad: str, row_group_size: str | None, what: str, tmp_path: Path
) -> None:
    """Of the files of a first copy, it is the later one that does not fit the others."""
    flat, cache = tmp_path / "flat", tmp_path / "cache"
    flat.mkdir()
    for name in ("a.parquet", "b.parquet", "c.parquet", "d.parquet"):
        kind = pa.string() if (name, what) == (bad, "type") else pa.int64()
        pq.write_table(pa.table({"a": pa.array([7] * 999).cast(kind)}), flat / name, compression="zstd")
    if what == "page":
        flip(flat / bad, 40)
    first = pqcache.sync(flat, tmp_path / "first", skip_bad=True, row_group_size=row_group_size)
    late = [bad, "c.parquet"]
    for name in late:
        (flat / name).rename(tmp_path / name)
    pqcache.sync(flat, cache, row_group_size=row_group_size)
    for name in late:
        (tmp_path / name).rename(flat / name)
    with pytest.raises(ParquetError, match=rf"{bad}: .*{'--skip-bad' if what == 'type' else ''}"):
        pqcache.sync(cache)
    second = pqcache.sync(cache, skip_bad=True)
    for report, place in ((first, tmp_path / "first"), (second, cache)):
        assert [(item.partition, item.kept) for item in report.skipped] == [(f"./{bad}", False)]
        assert values_of(place) == {"": [7] * 3 * 999}


def test_a_table_without_partitions_remains_as_it_was(tmp_path: Path) -> None:
    flat = tmp_path / "flat"
    flat.mkdir()
    pq.write_table(pa.table({"a": [1, 2]}), flat / "a.parquet")
    pqcache.sync(flat, tmp_path / "c")
    (flat / "b.parquet").write_bytes(BROKEN)
    report = pqcache.sync(tmp_path / "c", skip_bad=True)
    assert [(item.partition, item.kept) for item in report.skipped] == [("./b.parquet", False)]
    pq.write_table(pa.table({"a": [3]}), flat / "c.parquet")
    assert pqcache.sync(tmp_path / "c").skipped
    assert files_of(tmp_path / "c" / "current") == ["a.parquet", "c.parquet"], "it holds no new file back"
    (flat / "a.parquet").unlink()
    pq.write_table(pa.table({"a": [4]}), flat / "d.parquet")
    assert pqcache.sync(tmp_path / "c", force=True).skipped
    assert files_of(tmp_path / "c" / "current") == ["a.parquet", "c.parquet"], "b may have what a had"


def test_the_command_line_says_so_and_ends_with_its_own_code(lake: Path, cache: Path) -> None:
    write(lake, 2, ["x"])
    write(lake, 3, [3])
    result = run_pqcache("sync", cache, "--skip-bad", "--json")
    assert result.returncode == 5
    events = [json.loads(line) for line in result.stdout.splitlines()]
    summary = next(event for event in events if event["event"] == "summary")
    assert [(item["partition"], item["kept"]) for item in summary["skipped"]] == [("dt=2", True)]
    assert (events[-1]["kind"], events[-1]["exit_code"]) == ("PartitionsSkipped", 5)
    said = run_pqcache("sync", cache)
    assert said.returncode == 5
    assert "partition dt=2: its old version is kept: dt=2/p.parquet: column 'a'" in said.stderr
    assert said.stdout.rstrip().endswith("; 1 partition skipped")
    quiet = run_pqcache("sync", cache, "-q")
    assert (quiet.returncode, quiet.stdout) == (5, "")
    assert re.search("pqcache: warning: .*: 1 partition skipped: dt=2", quiet.stderr)
    assert "(1 skipped)" in run_pqcache("log", cache).stdout
    checked = run_pqcache("verify", cache)
    assert checked.returncode == 0
    assert "not as at the source: partition dt=2: its old version is kept" in checked.stdout
    assert [item["partition"] for item in pqcache.verify(cache).to_dict()["skipped"]] == ["dt=2"]


def test_a_file_of_a_table_that_no_cache_can_hold_is_named_each_time(tmp_path: Path) -> None:
    deltalake = pytest.importorskip("deltalake")
    table = tmp_path / "table"
    for value in (1, 2):
        deltalake.write_deltalake(str(table), pa.table({"a": [value]}), mode="append")
    log = table / "_delta_log" / f"{1:020}.json"
    name = next(json.loads(line)["add"]["path"] for line in log.read_text().splitlines() if '"add"' in line)
    (table / name).rename(table / "a\nb.parquet")
    log.write_text(log.read_text().replace(name, "a%0Ab.parquet"))
    for _ in range(2):
        report = pqcache.sync(table, tmp_path / "c", skip_bad=True)
        assert ([item.partition for item in report.skipped], report.rows) == (["./a%0Ab.parquet"], 1)


def test_what_becomes_good_while_the_rest_changes_is_taken(lake: Path, cache: Path) -> None:
    write(lake, 1, [9]).write_bytes(BROKEN)
    write(lake, 2, [7, 7])
    listings = 0

    def change(event: Event) -> None:
        nonlocal listings
        listings += isinstance(event, Started) and event.phase == "list"
        if listings == 3 and not (lake / "dt=3").exists():  # the one before the rest would be published
            write(lake, 1, [11, 11])
            write(lake, 3, [3, 3])

    report = pqcache.sync(cache, skip_bad=True, on_event=change)
    assert (report.skipped, values_of(cache)) == ((), {"dt=1": [11, 11], "dt=2": [7, 7], "dt=3": [3, 3]})


def test_what_has_begun_is_ended_before_it_is_taken_over(
    lake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second attempt, without the bad partition, begins when no thread of the first one is at work any more."""
    cache = tmp_path / "cache"
    pqcache.sync(lake, cache, row_group_size="1MB")
    for day in range(3, 9):
        write(lake, day, [day])
    write(lake, 9, [9]).write_bytes(BROKEN)
    real, at_work, rewritten = build_snapshot.rewrite_in_cache, threading.Lock(), []

    def rewrite(job: Any, directory: Any, *rest: Any) -> Any:
        with at_work:
            time.sleep(0.05)  # so that the downloads end first
            rewritten.append((directory.directory, build_snapshot.is_rewritten(job, directory)))
            return real(job, directory, *rest)

    def make_workdir(*what: Any) -> Path:
        assert not at_work.locked()
        return workdir(*what)

    workdir = build_snapshot.make_workdir
    monkeypatch.setattr(build_snapshot, "rewrite_in_cache", rewrite)
    monkeypatch.setattr(build_snapshot, "make_workdir", make_workdir)
    report = pqcache.sync(cache, skip_bad=True)
    assert [item.partition for item in report.skipped] == ["dt=9"]
    assert [day for day, is_done in rewritten if not is_done] == [f"dt={day}" for day in range(3, 9)]
