"""Plans: what a sync would do, as a pure function of the listing and what is held."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pqcache.store.manifest import FileEntry, Identity, SourceFile
from pqcache.store.sync.plan import PLAIN, Recipe, plan_repartition, plan_sync, recipe_of
from pqcache.store.sync.safety_checks import unsafe_names


def source(path: str, version: int = 1, size: int = 10) -> SourceFile:
    return SourceFile(path, Identity(size, version))


def copy_of(file: SourceFile) -> FileEntry:
    return FileEntry(path=file.path, size=file.identity.size, rows=1, row_groups=1, sources=(file,))


A, B, C = source("dt=1/a"), source("dt=1/b"), source("dt=2/c")


RECIPE = Recipe(rewrite='{"row_group_size":1}')
MERGED = FileEntry(path="dt=1/part-00000.parquet", size=15, rows=2, row_groups=1, sources=(A, B), recipe=RECIPE.text)


def test_a_rewritten_directory_that_did_not_change_is_kept() -> None:
    assert plan_sync([A, B], [MERGED], RECIPE).nothing_to_do


def test_a_merged_directory_is_fetched_whole_when_one_file_changes() -> None:
    new = source("dt=1/b", 2)
    plan = plan_sync([A, new], [MERGED], RECIPE)
    assert plan.downloads == [A, new]
    assert plan.changed == ("dt=1/b",)
    assert plan.rewrites == 1


def test_a_recipe_is_read_as_it_was_written() -> None:
    for fetch in ("", '{"columns":["id"],"where":"a = \'|\'"}'):
        for rewrite in ("", '{"row_group_size":1,"shuffle":7}'):
            assert recipe_of(Recipe(fetch, rewrite).text) == Recipe(fetch, rewrite)
    assert PLAIN.text == ""
    assert RECIPE.text == '{"rewrite":{"row_group_size":1}}'


def test_another_recipe_needs_no_download() -> None:
    plan = plan_sync([A, B], [MERGED], Recipe(rewrite='{"row_group_size":2}'))
    assert plan.downloads == []
    assert [item.entry for item in plan.directories[0].rewrite] == [MERGED]
    assert plan_repartition([MERGED], Recipe(rewrite='{"row_group_size":2}')) == plan
    assert plan_repartition([MERGED], RECIPE).nothing_to_do


def test_other_columns_are_fetched_again() -> None:
    column = Recipe(subset='{"columns":["id"]}')
    both = Recipe(column.subset, RECIPE.rewrite)
    plan = plan_sync([A, B], [MERGED], both)
    assert plan.downloads == [A, B]
    held = [FileEntry(path=f.path, size=3, rows=1, row_groups=1, sources=(f,), recipe=column.text) for f in (A, B)]
    assert plan_sync([A, B], held, column).nothing_to_do
    assert plan_sync([A, B], held, PLAIN).downloads == [A, B]
    again = plan_sync([A, B], held, both)
    assert (again.downloads, again.rewrites) == ([], 1)


_FILES = st.builds(
    source,
    st.sampled_from([f"dt={d}/{n}" for d in (1, 2) for n in "abc"]),
    st.integers(1, 3),
)
_LISTING = st.lists(_FILES, unique_by=lambda file: file.path)


@given(_LISTING, _LISTING, st.sampled_from([PLAIN, RECIPE]))
def test_applying_a_plan_gives_the_listing(now: list[SourceFile], before: list[SourceFile], recipe: str) -> None:
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


@pytest.mark.parametrize(
    "path",
    [
        "../x.parquet",
        "a/../../x",
        "/etc/x.parquet",
        "a//b",
        "a/./b",
        "a\nb",
        "a\x00b",
        "a\x1b[31m",
        "x" * 256,
        "é" * 128,
        "d" * 256 + "/a",
        "..",
        "a/",
        "a/..",
        "a/\udcff",
        "\x7f/a",
    ],
)
def test_hostile_names_are_refused_by_name(path: str) -> None:
    ((found, error),) = unsafe_names([A, source(path)], "s3://lake/shop").items()
    message = str(error)
    assert found == path
    assert "s3://lake/shop/" in message
    assert message.isprintable()


def test_legitimate_odd_names_pass() -> None:
    names = [source("dt=2026%2F11/a b.parquet"), source("dt=ü/..a"), source("k=a=b/_x")]
    assert unsafe_names(names, "s3://lake/shop") == {}
