"""Every file of a cache ends in ``.parquet``, whatever it is called at the source."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pqcache
from pqcache.events import Event, Fetched
from pqcache.store.manifest_file import read_manifest
from pqcache.store.sync.plan import cached_paths
from pqcache.torch import ParquetDataset
from tests.damage import flip
from tests.datasets import files_of, rows_of, write_day
from tests.examples import examples

NAMES = ("000000_0", "000001_0", "part-2.PARQUET", "part-3.pq")
CACHED = [f"dt=2026-11-0{day}/{name}.parquet" for day in (1, 2) for name in NAMES]


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    """Two partitions of files without the usual suffix."""
    for day in (1, 2):
        add_day(tmp_path / "lake", day)
    return tmp_path / "lake"


def add_day(root: Path, day: int, names: tuple[str, ...] = NAMES) -> None:
    write_day(root, f"2026-11-0{day}", first=day * 1000, files=len(names), rows=10)
    directory = root / f"dt=2026-11-0{day}"
    for path, name in zip(sorted(directory.glob("*.parquet")), names, strict=True):
        path.rename(directory / name)


def sync(source: Path | str, cache: Path, **options: object) -> list[str]:
    """Sync, and return the source files that were fetched."""
    events: list[Event] = []
    pqcache.sync(source, cache, on_event=events.append, **options)
    return sorted(event.path for event in events if isinstance(event, Fetched))


def ids(dataset: str | Path) -> list[int]:
    rows = ParquetDataset(dataset, columns=["id"], batch_size=None, shuffle=False)
    return [int(row["id"]) for row in rows]


def sources_in(cache: Path) -> dict[str, list[str]]:
    entries = read_manifest(cache / "current" / "_pqcache" / "files.arrow").files
    return {entry.path: [file.path for file in entry.sources] for entry in entries}


@pytest.mark.parametrize("fill", [False, True])
def test_every_file_is_found_by_its_suffix(fill: bool, lake: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    assert len(sync(lake, cache, fill=fill)) == 8
    assert files_of(cache / "current") == CACHED
    assert len(rows_of(cache / "current")) == 80
    assert sources_in(cache) == {path: [path.removesuffix(".parquet")] for path in CACHED}
    assert sorted(ids(cache)) == sorted(ids(lake))


def test_only_what_changes_is_fetched(lake: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    sync(lake, cache)
    assert sync(lake, cache) == []
    shutil.copy(lake / "dt=2026-11-02" / "000000_0", lake / "dt=2026-11-01" / "000001_0")
    (lake / "dt=2026-11-02" / "part-3.pq").unlink()
    assert sync(lake, cache) == ["dt=2026-11-01/000001_0"]
    assert files_of(cache / "current") == CACHED[:-1]
    assert sorted(ids(cache)) == sorted(ids(lake))


def test_damage_is_repaired(lake: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    sync(lake, cache)
    flip(cache / "current" / CACHED[0], 20)
    assert not pqcache.verify(cache, deep=True).ok
    assert pqcache.verify(cache, deep=True, repair=True).ok
    assert (cache / "current" / CACHED[0]).read_bytes() == (lake / "dt=2026-11-01" / "000000_0").read_bytes()


def test_two_files_of_one_name_keep_apart(tmp_path: Path) -> None:
    """Which of them is there first does not matter."""
    lake, cache, directory = tmp_path / "lake", tmp_path / "cache", tmp_path / "lake" / "dt=2026-11-01"
    add_day(lake, 1, ("a", "b", "c"))
    sync(lake, cache)
    (directory / "b").rename(directory / "a.parquet")
    assert sync(lake, cache) == ["dt=2026-11-01/a.parquet"]
    held = sources_in(cache)
    assert held["dt=2026-11-01/a.parquet"] == ["dt=2026-11-01/a.parquet"]
    assert sorted(held.values()) == [[f"dt=2026-11-01/{name}"] for name in ("a", "a.parquet", "c")]
    assert sorted(ids(cache)) == sorted(ids(lake))
    assert len(rows_of(cache / "current")) == 30
    assert pqcache.verify(cache, deep=True).ok
    (directory / "a.parquet").unlink()
    sync(lake, cache)
    assert sorted(ids(cache)) == sorted(ids(lake))
    assert len(rows_of(cache / "current")) == 20


def test_rewritten_files_have_the_suffix(lake: Path, tmp_path: Path) -> None:
    pqcache.repartition(lake, tmp_path / "out", row_group_size="1MB")
    sync(lake, tmp_path / "cache", row_group_size="1MB")
    for made in (tmp_path / "out", tmp_path / "cache" / "current"):
        assert len(rows_of(made)) == 80
        assert not [path for path in made.rglob("dt=*/*") if path.suffix != ".parquet"]
    lone = tmp_path / "lone" / "dt=1"
    lone.mkdir(parents=True)
    shutil.copy(next((tmp_path / "out").rglob("*.parquet")), lone / "000000_0")  # it fits as it is
    assert pqcache.repartition(lone.parent, tmp_path / "linked", row_group_size="1MB").rows > 0
    assert files_of(tmp_path / "linked") == ["dt=1/part-00000.parquet"]


segments = st.text(st.sampled_from("aAb."), min_size=1, max_size=3).filter(lambda name: name.strip("."))
names = st.lists(st.sampled_from(["", ".parquet", ".PARQUET", "/x", ".parquet/x"]), max_size=2).map("".join)


def test_a_copy_becomes_as_private_as_its_source(lake: Path, tmp_path: Path) -> None:
    sync(lake, tmp_path / "cache")
    (lake / "dt=2026-11-01" / "000000_0").chmod(0o600)
    sync(lake, tmp_path / "cache")
    modes = [(tmp_path / "cache" / "current" / path).stat().st_mode & 0o777 for path in CACHED]
    assert modes == [0o400, *[0o444] * 7]


@given(st.sets(st.builds(str.__add__, segments, names), max_size=8))
@settings(max_examples=examples(200))
def test_no_two_files_get_one_path(paths: set[str]) -> None:
    directories = {path.rpartition("/")[0] for path in paths}
    paths = {path for path in paths if path not in directories}
    found = cached_paths(paths)
    cached = [found.get(path, path) for path in paths]
    assert all(path.endswith(".parquet") for path in cached)
    assert len(set(cached)) == len(paths)
    assert not directories.intersection(cached)
    assert not {path for path in found if path.endswith(".parquet")}, "a name that has the suffix is kept"


def test_long_names_are_cut() -> None:
    paths = [f"dt=1/{'ü' * 127}{number}" for number in (1, 2)]
    cached = cached_paths(paths)
    assert len(set(cached.values())) == 2
    assert all(len(path.rpartition("/")[2].encode()) <= 255 for path in cached.values())
