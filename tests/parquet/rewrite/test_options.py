"""Options of repartition: what is written, what is linked, what a cache remembers, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import pqcache
from pqcache.cli import run
from pqcache.parquet.rewrite.directory import rewrite_directory
from pqcache.parquet.rewrite.recipe import RewriteOptions
from pqcache.store.config import read_config
from tests.datasets import files_of, rows_of, write_day, write_shop
from tests.store.repartition.test_command import assert_cut_right

KB = 1 << 10
LIMIT = 32 * KB


def chunks_in(directory: Path) -> list[pq.ColumnChunkMetaData]:
    files = [pq.read_metadata(directory / path) for path in files_of(directory)]
    groups = [file.row_group(number) for file in files for number in range(file.num_row_groups)]
    return [group.column(number) for group in groups for number in range(group.num_columns)]


def codecs_of(directory: Path) -> set[str]:
    return {chunk.compression for chunk in chunks_in(directory)}


def encodings_of(directory: Path) -> set[str]:
    return {encoding for chunk in chunks_in(directory) for encoding in chunk.encodings}


# ---- compression and compat


def test_codecs(tmp_path: Path) -> None:
    shop = write_shop(tmp_path / "shop", days=1, rows=300)
    for number, (options, codec) in enumerate(
        (
            ({}, "LZ4"),
            ({"compression": "zstd:9"}, "ZSTD"),
            ({"compression": "none"}, "UNCOMPRESSED"),
            ({"compression": "keep"}, "SNAPPY"),
            ({"compat": True}, "SNAPPY"),
            ({"compat": True, "compression": "zstd"}, "ZSTD"),
        )
    ):
        out = tmp_path / f"out{number}"
        pqcache.repartition(shop, out, row_group_size=LIMIT, **options)
        assert_cut_right(shop, out, LIMIT)
        assert codecs_of(out) == {codec, "UNCOMPRESSED"}
        modern = encodings_of(out) & {"DELTA_BINARY_PACKED", "BYTE_STREAM_SPLIT"}
        assert bool(modern) != options.get("compat", False), options


def test_keep_goes_by_column_where_files_differ(tmp_path: Path) -> None:
    source, names = tmp_path / "in", [f"name {n % 7}" for n in range(3000)]
    source.mkdir()
    first = pa.table({"a": names, "s": [{"x": name, "y": name} for name in names], "c": names})
    codecs = {"a": "snappy", "s.x": "zstd", "s.y": "zstd", "c": "gzip"}
    pq.write_table(first, source / "a.parquet", compression=codecs, use_dictionary=False)
    pq.write_table(first.drop(["s"]), source / "b.parquet", compression={"a": "snappy", "c": "gzip"}, row_group_size=10)
    for rows in (LIMIT, 1 << 20):  # the first file is rewritten too, and linked
        out = tmp_path / f"out{rows}"
        rewrite_directory(sorted(source.iterdir()), out, RewriteOptions(row_group_size=rows, compression="keep"))
        for path in files_of(out):
            group = pq.read_metadata(out / path).row_group(0)
            found = {group.column(n).path_in_schema: group.column(n).compression for n in range(group.num_columns)}
            assert (found["a"], found["c"]) == ("SNAPPY", "GZIP")


def test_higher_levels_are_smaller(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    words = [f"word{i}" for i in range(500)]
    text = [" ".join(words[i] for i in rng.zipf(1.5, 30) % 500) for _ in range(1_500)]
    (tmp_path / "lake").mkdir()
    pq.write_table(pa.table({"text": text}), tmp_path / "lake" / "a.parquet")
    sizes = []
    for level in (1, 12):
        report = pqcache.repartition(tmp_path / "lake", tmp_path / f"out{level}", compression=f"zstd:{level}")
        sizes.append(report.bytes_after)
    assert sizes[1] < 0.95 * sizes[0]


def test_what_is_as_asked_is_linked_and_the_rest_is_rewritten(tmp_path: Path) -> None:
    shop = write_shop(tmp_path / "shop", rows=150)
    pqcache.repartition(shop, tmp_path / "one", row_group_size=LIMIT, compression="zstd")

    def linked(name: str, **options: Any) -> bool:
        pqcache.repartition(tmp_path / "one", tmp_path / name, row_group_size=LIMIT, **options)
        assert rows_of(tmp_path / name) == rows_of(shop)
        same = [(tmp_path / "one" / p).samefile(tmp_path / name / p) for p in files_of(tmp_path / "one")]
        assert len(set(same)) == 1
        return same[0]

    assert linked("as it is")
    assert linked("zstd", compression="zstd")
    assert linked("keep", compression="keep")
    assert not linked("level", compression="zstd:5")
    assert not linked("lz4", compression="lz4")
    assert not linked("none", compression="none")
    assert not linked("compat", compat=True)
    assert not linked("compat zstd", compat=True, compression="zstd")  # it had DELTA
    assert codecs_of(tmp_path / "lz4") == {"LZ4", "UNCOMPRESSED"}


def test_a_cache_remembers_compression_and_compat(tmp_path: Path) -> None:
    shop, cache = write_shop(tmp_path / "shop", days=1, rows=150), tmp_path / "cache"
    pqcache.sync(str(shop), cache)
    pqcache.repartition(cache, row_group_size=LIMIT, compression="zstd:5", compat=True)
    assert not pqcache.sync(cache).published
    write_day(shop, "2026-11-09", first=900_000)
    assert pqcache.sync(cache).rewritten == 1
    assert codecs_of(cache / "current") == {"ZSTD", "UNCOMPRESSED"}
    assert not encodings_of(cache / "current") & {"DELTA_BINARY_PACKED", "BYTE_STREAM_SPLIT"}
    assert pqcache.repartition(cache, compression="zstd:5").rewritten == 0
    assert pqcache.repartition(cache, compat=False).rewritten == 2
    assert read_config(cache).compression == "zstd:5"
    assert "DELTA_BINARY_PACKED" in encodings_of(cache / "current")
    assert rows_of(cache / "current") == rows_of(shop)


def test_files_made_alike_are_linked_where_only_a_later_one_changes(tmp_path: Path) -> None:
    """A level is nowhere in a file: that the first files have it is known from the manifest."""
    rng = np.random.default_rng(1)
    shop, cache = tmp_path / "shop", tmp_path / "cache"
    shop.mkdir()
    rows = {"text": ["some text"] * 62, "b": [rng.bytes(1000) for _ in range(62)]}
    pq.write_table(pa.table(rows), shop / "0.parquet", compression="zstd", use_dictionary=False)
    pqcache.sync(str(shop), cache)
    size = pq.read_metadata(shop / "0.parquet").row_group(0)
    limit = sum(size.column(number).total_compressed_size for number in range(2)) + 100
    pqcache.repartition(cache, row_group_size=limit, compression="zstd:7")
    (before,) = files_of(cache / "current")
    inode = (cache / "current" / before).stat().st_ino
    pq.write_table(pa.table(rows), shop / "1.parquet")
    pqcache.sync(cache)
    assert inode in {(cache / "current" / path).stat().st_ino for path in files_of(cache / "current")}
    assert rows_of(cache / "current") == rows_of(shop)


def test_a_condition_and_a_column_may_hold_any_mark_of_a_recipe(tmp_path: Path) -> None:
    shop, cache = tmp_path / "shop", tmp_path / "cache"
    shop.mkdir()
    pq.write_table(pa.table({"a": ['x"}', "y"], 'v"|w': [[1, 2], [3, 4]]}), shop / "a.parquet")
    pqcache.sync(str(shop), cache, where="""a <> 'x"}'""")
    pqcache.repartition(cache, dense=['v"|w'], shuffle=2)
    assert not pqcache.sync(cache).published
    again = pqcache.repartition(cache, row_group_size=1 << 20)
    assert (again.rewritten, again.rows) == (1, 1)
    assert not pqcache.sync(cache).published


WRONG = [
    (["--compression", "lzo"], "compression 'lzo': choose one of zstd[:LEVEL], lz4, snappy, none, keep"),
    (["--compression", "zstd:99"], "compression level 99: zstd takes levels 1 to 22"),
    (["--compression", "lz4:3"], "compression level 3: lz4 takes no level"),
    (["--dense", "nope"], "--dense nope: no column 'nope'"),
    (["--dense", "title"], "--dense title: it is string"),
    (["--dense", "title", "--dense", "auto"], "--dense auto: excludes other columns"),
    (["--narrow"], "--narrow: no column is dense"),
]


def test_wrong_options_are_named_and_change_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shop, cache = write_shop(tmp_path / "shop", days=1), tmp_path / "cache"
    before = pqcache.sync(str(shop), cache)
    config = (cache / "pqcache.toml").read_text()
    for arguments, text in WRONG:
        assert run(["repartition", str(cache), *arguments]) == 2
        captured = capsys.readouterr()
        assert text in captured.err
        assert captured.out == ""
    assert (cache / "pqcache.toml").read_text() == config
    assert pqcache.Cache.open(cache).snapshot().id == before.snapshot


def test_a_wrong_value_in_the_config_is_named(tmp_path: Path) -> None:
    shop, cache = write_shop(tmp_path / "shop", days=1), tmp_path / "cache"
    pqcache.sync(str(shop), cache, row_group_size=LIMIT)
    config = cache / "pqcache.toml"
    text = config.read_text()
    for line in ('compression = "lzo"', "shuffle = -4", 'dense = {a = "string[4]"}', "dense = 5", 'shuffle = "x"'):
        config.write_text(f"{line}\n{text}")
        with pytest.raises(pqcache.CacheError, match=r"pqcache\.toml"):
            pqcache.sync(cache)


def test_dense_auto_prints_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "lake").mkdir()
    pq.write_table(pa.table({"a b": [[1, 2, 300]] * 9, "c": [[1.5]] * 9}), tmp_path / "lake" / "x.parquet")
    assert run(["repartition", str(tmp_path / "lake"), str(tmp_path / "out"), "--dense", "auto"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("a b: list<")
    assert lines[0].endswith("can be stored as int64[3], or uint16[3] with --narrow")
    command = f"pqcache repartition {tmp_path}/lake {tmp_path}/out --dense 'a b' --dense c --narrow"
    assert lines[-1] == f"command: {command}"
    assert not (tmp_path / "out").exists()
    assert run(["repartition", str(tmp_path / "lake"), str(tmp_path / "out"), "--dense", "a b", "--narrow", "-q"]) == 0
    (made,) = (tmp_path / "out").iterdir()
    assert pq.read_metadata(made).num_rows == 9
