"""Shares of a source: every file on one node, about as many bytes on each, few of them moved by a change."""

from __future__ import annotations

import json
from pathlib import Path

import duckdb
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pqcache
from pqcache.errors import SourceIncomplete, UsageError
from pqcache.store.cache_directory import CacheDirectory
from pqcache.store.manifest import Identity, Manifest, SourceFile
from pqcache.store.partition_paths import parent
from pqcache.store.table_part import MIN_PARTS, Shard, owners, parse_shard
from tests.datasets import files_of, rows_of, write_day, write_shop
from tests.examples import examples
from tests.forked_commands import run_pqcache

Partitions = dict[str, list[int]]

sizes = st.lists(st.integers(0, 10_000), min_size=1, max_size=6)
tables = st.dictionaries(st.integers(0, 400).map(lambda day: f"dt={day}"), sizes, min_size=1, max_size=60)
nodes = st.integers(1, 9)


def files(table: Partitions) -> list[SourceFile]:
    return [
        SourceFile(f"{directory}/part-{i}.parquet".lstrip("/"), Identity(size, 0))
        for directory, sizes in table.items()
        for i, size in enumerate(sizes)
    ]


def size_of(table: Partitions) -> int:
    return sum(map(sum, table.values()))


def largest(table: Partitions) -> int:
    return max(size for sizes in table.values() for size in sizes)


@given(tables, nodes, st.randoms(use_true_random=False))
def test_every_file_has_one_owner_whatever_the_order_of_the_listing(table: Partitions, n: int, random: object) -> None:
    listing = files(table)
    shuffled = list(listing)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    found = owners(listing, n)
    assert found == owners(shuffled, n)
    assert set(found) == {file.path for file in listing}
    assert set(found.values()) <= set(range(n))


@given(tables, nodes)
def test_shares_differ_from_the_mean_by_at_most_a_file(table: Partitions, n: int) -> None:
    mean = size_of(table) / n
    loads = [0] * n
    found = owners(files(table), n)
    for file in files(table):
        loads[found[file.path]] += file.identity.size
    assert max(abs(load - mean) for load in loads) <= max(largest(table), mean / MIN_PARTS) + 1e-6


@given(st.integers(1, 6), st.integers(3, 8))
def test_small_partitions_are_not_cut(per_partition: int, n: int) -> None:
    table = {f"dt={day}": [100] * per_partition for day in range(n * MIN_PARTS)}
    found = owners(files(table), n)
    nodes_of: dict[str, set[int]] = {}
    for path, node in found.items():
        nodes_of.setdefault(parent(path), set()).add(node)
    assert all(len(where) == 1 for where in nodes_of.values())


@given(tables, sizes, nodes, st.booleans())
@settings(max_examples=examples(300))
def test_a_change_moves_few_of_the_other_files(table: Partitions, new: list[int], n: int, there: bool) -> None:
    """Adding ``new`` bytes, or the same read the other way, removing them: (n - 1) / 2 times as many at most.

    Each cut may besides move the file, or the small partition, in which it lies.
    """
    directory = next(iter(table)) if there else "dt=new"
    grown = {**table, directory: [*table.get(directory, []), *new]}
    before, after = owners(files(table), n), owners(files(grown), n)
    moved = sum(f.identity.size for f in files(table) if before[f.path] != after[f.path])
    unit = max(largest(grown), size_of(grown) / n / MIN_PARTS)
    assert moved <= (n - 1) * (sum(new) / 2 + 2 * unit) + 1e-6


@pytest.mark.parametrize("text", ["3", "3/3", "-1/3", "0/0", "1/2/3", "a/b", ""])
def test_shards_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--shard"):
        parse_shard(text)
    assert parse_shard(" 1/3 ") == Shard(1, 3)


def test_three_nodes_hold_the_whole_once(tmp_path: Path) -> None:
    """And so they do after a night's change, of which each has fetched only what is new to it."""
    shop = write_uneven(tmp_path / "shop")
    caches = [tmp_path / f"node{node}" for node in range(3)]
    for node, cache in enumerate(caches):
        report = pqcache.sync(shop, cache, shard=f"{node}/3")
        assert report.shard == f"{node}/3"
    together(caches, shop)
    listings = {manifest_of(cache).listing for cache in caches}
    assert len(listings) == 1
    assert None not in listings
    assert all(not pqcache.sync(cache).published for cache in caches)

    held = [set(files_of(cache / "current")) for cache in caches]
    write_day(shop, "2026-11-09", first=900_000, files=1)
    for cache, before in zip(caches, held, strict=True):
        report = pqcache.sync(cache)  # from cron: everything is remembered
        assert report.published  # every node, as every node has a part in the new listing
        came = set(files_of(cache / "current")) - before
        assert report.added == len(came)
        assert report.fetched_bytes == sum((shop / path).stat().st_size for path in came)
    together(caches, shop)
    now = {manifest_of(cache).listing for cache in caches}
    assert len(now) == 1
    assert now != listings


def test_where_prunes_before_sharing_and_columns_and_rewriting_go_with_it(tmp_path: Path) -> None:
    shop = write_uneven(tmp_path / "shop")
    caches = [tmp_path / f"node{node}" for node in range(3)]
    for node, cache in enumerate(caches):
        how = {"where": "dt >= '2026-11-03' and price < 0.5", "columns": ["id", "price"], "marker": "_SUCCESS"}
        pqcache.sync(str(shop), cache, shard=f"{node}/3", row_group_size=64 << 10, **how)  # type: ignore[arg-type]
        recipes = {entry.recipe for entry in manifest_of(cache).files}
        assert len(recipes) == 1
        assert "row_group_size" in recipes.pop()
    rows = [row for cache in caches for row in rows_of(cache / "current")]
    wanted = duckdb.sql(
        f"select id, price, dt from read_parquet('{shop}/**/*.parquet', hive_partitioning = true) "
        "where dt >= '2026-11-03' and price < 0.5 order by all"
    )
    assert wanted is not None
    assert sorted(rows) == wanted.fetchall()
    assert all(rows_of(cache / "current") for cache in caches)
    before = manifest_of(caches[0])
    pqcache.repartition(caches[0], row_group_size=128 << 10)  # the share is remembered
    assert (manifest_of(caches[0]).shard, manifest_of(caches[0]).listing) == ("0/3", before.listing)


def test_another_number_of_nodes_keeps_what_it_can_and_asks_first(tmp_path: Path) -> None:
    shop = write_uneven(tmp_path / "shop")
    cache = tmp_path / "cache"
    pqcache.sync(str(shop), cache, shard="0/2")
    held = set(files_of(cache / "current"))
    with pytest.raises(SourceIncomplete, match=r"--shard 1/2 \(before: 0/2\).*--force"):
        pqcache.sync(cache, shard="1/2")
    assert set(files_of(cache / "current")) == held
    assert pqcache.sync(cache).shard == "0/2"
    plan = pqcache.sync(cache, shard="1/2", dry_run=True, force=True)
    assert plan.removed == len(held)
    assert plan.added
    assert not plan.published
    report = pqcache.sync(cache, shard="0/3", force=True)
    now = set(files_of(cache / "current"))
    assert report.fetched_bytes == sum((shop / path).stat().st_size for path in now - held)
    assert now & held
    assert not pqcache.sync(cache, shard="").removed  # all of it again: nothing is lost by that
    assert rows_of(cache / "current") == rows_of(shop)
    assert manifest_of(cache).shard is None


def test_files_that_change_nodes_do_not_count_as_dropped(tmp_path: Path) -> None:
    shop = tmp_path / "shop"
    for i in range(6):
        write_day(shop, f"2026-11-0{i + 1}", files=1, first=i * 1000)
    caches = [tmp_path / f"node{node}" for node in range(2)]
    for node, cache in enumerate(caches):
        pqcache.sync(str(shop), cache, shard=f"{node}/2", max_delete="0")
    for i in range(6, 9):
        write_day(shop, f"2026-11-0{i + 1}", files=1, first=i * 1000, rows=1500)
    reports = [pqcache.sync(cache) for cache in caches]
    assert any(report.removed for report in reports)  # or this would show nothing
    together(caches, shop)
    gone = files_of(caches[0] / "current")[0]
    (shop / gone).unlink()
    with pytest.raises(SourceIncomplete, match="gone at the source"):
        pqcache.sync(caches[0])


def test_a_share_without_a_file_is_refused(tmp_path: Path) -> None:
    shop = write_shop(tmp_path / "shop", days=1, files=2)
    for node in range(3):
        if node == 1:
            with pytest.raises(SourceIncomplete, match=r"--shard 1/3 is left without a file; 2 files .* fewer nodes"):
                pqcache.sync(str(shop), tmp_path / f"node{node}", shard=f"{node}/3")
        else:
            pqcache.sync(str(shop), tmp_path / f"node{node}", shard=f"{node}/3")


def test_the_command_line_remembers_and_shows_it(tmp_path: Path) -> None:
    write_uneven(tmp_path / "shop")

    def run(*words: str) -> str:
        done = run_pqcache(*words, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "for share 1/3" in run("sync", "shop", "cache", "--shard", "1/3", "--dry-run")
    assert run("sync", "shop", "cache", "--shard", "1/3").rstrip().endswith(", share 1/3; not taken: 8 hidden")
    assert 'shard = "1/3"' in (tmp_path / "cache" / "pqcache.toml").read_text()
    assert "nothing to do" in run("sync", "cache")
    listing = manifest_of(tmp_path / "cache").listing
    assert f"share        1/3 of listing {listing}" in run("inspect", "cache")
    found = json.loads(run("inspect", "cache", "--json"))
    assert (found["shard"], found["listing"]) == ("1/3", listing)


def write_uneven(root: Path) -> Path:
    """Write eight partitions of one to three files with up to 320 rows."""
    for day in range(8):
        write_day(root, f"2026-11-{day + 1:02d}", files=1 + day % 3, rows=20 << (day % 5), first=day * 100_000)
    return root


def manifest_of(cache: Path) -> Manifest:
    return CacheDirectory.open(cache).snapshot().manifest()


def together(caches: list[Path], shop: Path) -> None:
    """Check that the caches hold every file of the source once, in about as many bytes each."""
    held = [files_of(cache / "current") for cache in caches]
    assert sorted(path for paths in held for path in paths) == files_of(shop)
    assert sorted(row for cache in caches for row in rows_of(cache / "current")) == rows_of(shop)
    sizes = {path: (shop / path).stat().st_size for path in files_of(shop)}
    mean = sum(sizes.values()) / len(caches)
    for paths in held:
        assert abs(sum(sizes[path] for path in paths) - mean) <= max(sizes.values())
