"""Plans: what a sync would do, as a pure function of the listing and what is held."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pqcache.store.manifest import FileEntry, Identity, SourceFile
from pqcache.store.sync.plan import PLAIN, Recipe, plan_sync
from pqcache.store.sync.safety_checks import unsafe_names


def source(path: str, version: int = 1, size: int = 10) -> SourceFile:
    return SourceFile(path, Identity(size, version))


def copy_of(file: SourceFile) -> FileEntry:
    return FileEntry(path=file.path, size=file.identity.size, rows=1, row_groups=1, sources=(file,))


A = source("dt=1/a")
RECIPE = Recipe(rewrite='{"row_group_size":1}')


_FILES = st.builds(
    source,
    st.sampled_from([f"dt={d}/{n}" for d in (1, 2) for n in "abc"]),
    st.integers(1, 3),
)
_LISTING = st.lists(_FILES, unique_by=lambda file: file.path)


@given(_LISTING, _LISTING, st.sampled_from([PLAIN, RECIPE]))
def test_applying_a_plan_gives_the_listing(now: list[SourceFile], before: list[SourceFile], recipe: Recipe) -> None:
    plan = plan_sync(now, [copy_of(file) for file in before], recipe)
    result = []
    for directory in plan.directories:
        result += [file for entry in directory.keep for file in entry.sources]
        result += directory.copy
        for item in directory.rewrite:
            result += item.entry.sources if item.entry else [item.file]
    assert sorted(result, key=lambda file: file.path) == sorted(now, key=lambda file: file.path)
    if recipe.rewrite:
        assert all(not (d.copy or d.keep) for d in plan.directories)
    assert set(plan.downloads) == set(now) - set(before)


HOSTILE = [
    "../x.parquet", "a/../../x", "/etc/x.parquet", "a//b", "a/./b", "a\nb", "a\x00b", "a\x1b[31m", "x" * 256, "é" * 128,
    "d" * 256 + "/a", "..", "a/", "a/..", "a/\udcff", "\x7f/a",
]  # fmt: skip


@pytest.mark.parametrize("path", HOSTILE)
def test_hostile_names_are_refused_by_name(path: str) -> None:
    ((found, error),) = unsafe_names([A, source(path)], "s3://lake/shop").items()
    message = str(error)
    assert found == path
    assert "s3://lake/shop/" in message
    assert message.isprintable()


def test_legitimate_odd_names_pass() -> None:
    names = [source("dt=2026%2F11/a b.parquet"), source("dt=ü/..a"), source("k=a=b/_x")]
    assert unsafe_names(names, "s3://lake/shop") == {}
