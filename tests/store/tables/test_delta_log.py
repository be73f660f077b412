"""Which files of a log make a version, by their names alone."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pqcache.errors import SourceError
from pqcache.store.manifest import Identity, SourceFile
from pqcache.store.tables.delta import delta_log, file_url_of
from tests.examples import examples

UUID = "80a083e8-7026-4e79-81be-64bd76c43a11"


def commit(version: int) -> str:
    return f"{version:020}.json"


def whole(version: int) -> str:
    return f"{version:020}.checkpoint.parquet"


PARTS = [f"{3:020}.checkpoint.{number:010}.{3:010}.parquet" for number in (1, 2, 3)]
NAMED = f"{3:020}.checkpoint.{UUID}.json"
OTHERS = ["_last_checkpoint", f"{0:020}.crc", f"{0:020}.{1:020}.compacted.json", f"_commits/{commit(9)}", "x.json"]


@pytest.mark.parametrize(
    ("names", "versions"),
    [
        (
            [*map(commit, range(4)), whole(2), *OTHERS],
            {0: [commit(0)], 1: [commit(0), commit(1)], 2: [whole(2)], 3: [whole(2), commit(3)], 4: None},
        ),
        (
            [commit(0), commit(2), commit(5), whole(4)],
            {0: [commit(0)], 2: None, 3: None, 4: [whole(4)], 5: [whole(4), commit(5)]},
        ),
        ([*reversed(PARTS), commit(4)], {4: [*PARTS, commit(4)]}),
        ([*PARTS[:2], commit(4)], {4: None}),
        ([*PARTS[:2], *map(commit, range(5))], {4: [*map(commit, range(5))]}),
        ([NAMED, commit(4)], {4: [NAMED, commit(4)]}),
        ([NAMED, whole(3)], {3: [whole(3)]}),  # the oldest format of several
        ([], {0: None}),
    ],
    ids=["commits", "gaps", "parts", "parts missing", "parts not needed", "named", "two formats", "empty"],
)
def test_a_version_is_a_checkpoint_and_the_commits_after_it(
    names: list[str], versions: dict[int, list[str] | None]
) -> None:
    log = delta_log(SourceFile(name, Identity(1, 1)) for name in names)
    for version, expected in versions.items():
        found = log.files_of(version)
        assert (None if found is None else [file.path for file in found]) == expected


@settings(max_examples=examples(100))
@given(st.lists(st.integers(0, 50), min_size=1, max_size=8), st.integers(-5, 60))
def test_the_version_of_a_time_is_the_last_that_was_committed_by_then(times: list[int], time: int) -> None:
    as_delta_does = list(accumulate(times, max))
    expected = max((version for version, at in enumerate(as_delta_does) if at <= time), default=None)
    assert delta_log([]).version_at(time, dict(enumerate(times))) == expected


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
