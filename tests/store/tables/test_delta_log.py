"""Which files of a log make a version, by their names alone."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pqcache.errors import SourceError
from pqcache.store.manifest import Identity, SourceFile
from pqcache.store.tables.delta import DeltaLog, delta_log, file_url_of
from tests.examples import examples

UUID = "80a083e8-7026-4e79-81be-64bd76c43a11"


def log_of(*names: str) -> DeltaLog:
    return delta_log(SourceFile(name, Identity(1, 1)) for name in names)


def names_of(log: DeltaLog, version: int) -> list[str] | None:
    found = log.files_of(version)
    return None if found is None else [file.path for file in found]


def commit(version: int) -> str:
    return f"{version:020}.json"


def whole(version: int) -> str:
    return f"{version:020}.checkpoint.parquet"


def test_a_version_is_a_checkpoint_and_the_commits_after_it() -> None:
    others = ["_last_checkpoint", f"{0:020}.crc", f"{0:020}.{1:020}.compacted.json", f"_commits/{commit(9)}", "x.json"]
    log = log_of(*map(commit, range(5)), whole(2), *others)
    assert names_of(log, 1) == [commit(0), commit(1)]
    assert names_of(log, 2) == [whole(2)]
    assert names_of(log, 4) == [whole(2), commit(3), commit(4)]
    assert names_of(log, 5) is None
    assert (log.newest(), log_of().newest(), log_of().files_of(0)) == (4, None, None)


def test_a_log_with_gaps() -> None:
    log = log_of(commit(0), commit(2), commit(5), whole(4))
    assert [version for version in range(7) if log.files_of(version) is not None] == [0, 4, 5]


def test_checkpoints_in_parts_are_used_when_they_are_complete() -> None:
    parts = [f"{3:020}.checkpoint.{number:010}.{3:010}.parquet" for number in (1, 2, 3)]
    assert names_of(log_of(*reversed(parts), commit(4)), 4) == [*parts, commit(4)]
    assert names_of(log_of(*parts[:2], commit(4)), 4) is None
    assert names_of(log_of(*parts[:2], *map(commit, range(5))), 4) == list(map(commit, range(5)))


@pytest.mark.parametrize("suffix", ["json", "parquet"])
def test_checkpoints_with_sidecars(suffix: str) -> None:
    named = f"{3:020}.checkpoint.{UUID}.{suffix}"
    log = log_of(named, commit(4), f"_sidecars/{UUID}.parquet")
    assert names_of(log, 4) == [named, commit(4)]
    assert set(log.sidecars) == {f"{UUID}.parquet"}
    assert names_of(log_of(named, whole(3)), 3) == [whole(3)], "the oldest format of several"


@settings(max_examples=examples(100))
@given(st.lists(st.integers(0, 50), min_size=1, max_size=8), st.integers(-5, 60))
def test_the_version_of_a_time_is_the_last_that_was_committed_by_then(times: list[int], time: int) -> None:
    as_delta_does = list(accumulate(times, max))
    expected = max((version for version, at in enumerate(as_delta_does) if at <= time), default=None)
    assert log_of().version_at(time, dict(enumerate(times))) == expected


@pytest.mark.parametrize(
    ("url", "path", "expected"),
    [
        ("/lake/t", "a%20b/c%2520.parquet", "/lake/t/a b/c%20.parquet"),
        ("/lake/t", "file:///other/a%20b", "/other/a b"),
        ("/lake/t", "file:/other/a%20b", "/other/a b"),
        ("/lake/t", "/other/a%23b", "/other/a#b"),
        ("s3://lake/t", "k=a:b/c", "s3://lake/t/k=a:b/c"),
        ("s3://lake/t", "s3a://other/a%20b", "s3a://other/a b"),
        ("hdfs://nn:8020/lake/t", "/other/b", "hdfs://nn:8020/other/b"),
    ],
)
def test_where_a_file_is(url: str, path: str, expected: str) -> None:
    assert file_url_of(url, path) == expected


@pytest.mark.parametrize("path", ["../a", "a/../b", "a//b", "./a", "a/", "%2e%2e/a", "", "file:///etc/a"])
def test_a_path_that_leads_elsewhere_is_refused(path: str) -> None:
    with pytest.raises(SourceError, match=r"leads out of it|names a file of the machine"):
        file_url_of("s3://lake/t", path)
