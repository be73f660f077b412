"""Options of repartition: what is written, what is linked, what a cache remembers, and what is refused."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import pqcache
from pqcache.cli import run
from pqcache.parquet.rewrite.options import RewriteOptions, made_alike, parse_compression, shuffle_of
from pqcache.parquet.rewrite.rewrite import RewriteResult, rewrite_directory
from pqcache.store.config import read_config
from tests.datasets import files_of, rows_of, write_day, write_shop
from tests.store.repartition.test_command import assert_cut_right

KB = 1 << 10
LIMIT = 32 * KB


def codecs_of(directory: Path) -> set[str]:
    found = set()
    for path in files_of(directory):
        metadata = pq.read_metadata(directory / path)
        for number in range(metadata.num_row_groups):
            group = metadata.row_group(number)
            found |= {group.column(position).compression for position in range(group.num_columns)}
    return found


def encodings_of(directory: Path) -> set[str]:
    found: set[str] = set()
    for path in files_of(directory):
        metadata = pq.read_metadata(directory / path)
        for number in range(metadata.num_row_groups):
            group = metadata.row_group(number)
            found.update(*(group.column(position).encodings for position in range(group.num_columns)))
    return found


# ---- compression and compat


@pytest.mark.parametrize(
    ("options", "codecs"),
    [
        ({}, {"LZ4", "UNCOMPRESSED"}),
        ({"compression": "lz4"}, {"LZ4", "UNCOMPRESSED"}),
        ({"compression": "zstd"}, {"ZSTD", "UNCOMPRESSED"}),
        ({"compression": "zstd:9"}, {"ZSTD", "UNCOMPRESSED"}),
        ({"compression": "snappy"}, {"SNAPPY", "UNCOMPRESSED"}),
        ({"compression": "none"}, {"UNCOMPRESSED"}),
        ({"compression": "keep"}, {"SNAPPY", "UNCOMPRESSED"}),
        ({"compat": True}, {"SNAPPY", "UNCOMPRESSED"}),
        ({"compat": True, "compression": "zstd"}, {"ZSTD", "UNCOMPRESSED"}),
    ],
)
def test_codecs(tmp_path: Path, options: dict[str, Any], codecs: set[str]) -> None:
    shop = write_shop(tmp_path / "shop", rows=300)
    pqcache.repartition(shop, tmp_path / "out", row_group_size=LIMIT, **options)
    assert_cut_right(shop, tmp_path / "out", LIMIT)
    assert codecs_of(tmp_path / "out") == codecs
    modern = encodings_of(tmp_path / "out") & {"DELTA_BINARY_PACKED", "BYTE_STREAM_SPLIT"}
    assert bool(modern) != options.get("compat", False)


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
            assert {found[name] for name in ("a", "c")} <= {"SNAPPY", "GZIP"}
            assert (found["a"], found["c"]) == ("SNAPPY", "GZIP")


def test_higher_levels_are_smaller(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    words = [f"word{i}" for i in range(500)]
    text = [" ".join(words[i] for i in rng.zipf(1.5, 30) % 500) for _ in range(4_000)]
    (tmp_path / "lake").mkdir()
    pq.write_table(pa.table({"text": text}), tmp_path / "lake" / "a.parquet")
    sizes = []
    for level in (1, 19):
        report = pqcache.repartition(tmp_path / "lake", tmp_path / f"out{level}", compression=f"zstd:{level}")
        sizes.append(report.bytes_after)
    assert sizes[1] < 0.95 * sizes[0]


def test_what_is_as_asked_is_linked_and_the_rest_is_rewritten(tmp_path: Path) -> None:
    shop = write_shop(tmp_path / "shop", rows=300)
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


def test_a_cache_remembers_and_syncs_alike(tmp_path: Path) -> None:
    shop, cache = write_shop(tmp_path / "shop"), tmp_path / "cache"
    pqcache.sync(str(shop), cache)
    pqcache.repartition(cache, row_group_size=LIMIT, compression="zstd:5", compat=True)
    config = read_config(cache)
    assert (config.row_group_size, config.compression, config.compat) == (LIMIT, "zstd:5", True)
    inodes = {path: (cache / "current" / path).stat().st_ino for path in files_of(cache / "current")}
    assert not pqcache.sync(cache).published

    write_day(shop, "2026-11-09", first=900_000)
    assert pqcache.sync(cache).rewritten == 1
    assert codecs_of(cache / "current") == {"ZSTD", "UNCOMPRESSED"}
    assert not encodings_of(cache / "current") & {"DELTA_BINARY_PACKED", "BYTE_STREAM_SPLIT"}
    assert all((cache / "current" / path).stat().st_ino == inode for path, inode in inodes.items())

    assert pqcache.repartition(cache).rewritten == 0  # as remembered
    assert pqcache.repartition(cache, compression="zstd:5").rewritten == 0
    changed = pqcache.repartition(cache, compat=False)
    assert changed.rewritten == 4
    assert read_config(cache).compression == "zstd:5"
    assert "DELTA_BINARY_PACKED" in encodings_of(cache / "current")
    assert pqcache.repartition(cache, compression="lz4").rewritten == 4
    assert codecs_of(cache / "current") == {"LZ4", "UNCOMPRESSED"}
    assert rows_of(cache / "current") == rows_of(shop)


def test_files_made_alike_stay_linked_where_only_a_later_one_changes(tmp_path: Path) -> None:
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


def test_a_condition_and_a_column_may_hold_the_mark_that_divides_a_recipe(tmp_path: Path) -> None:
    shop, cache = tmp_path / "shop", tmp_path / "cache"
    shop.mkdir()
    pq.write_table(pa.table({"a": ["x|row_group_size=5", "y"], "v|w": [[1, 2], [3, 4]]}), shop / "a.parquet")
    pqcache.sync(str(shop), cache, where="a <> 'x|row_group_size=5'")
    pqcache.repartition(cache, dense=["v|w"], shuffle=2)
    assert not pqcache.sync(cache).published
    again = pqcache.repartition(cache, row_group_size=1 << 20)
    assert (again.rewritten, again.rows) == (1, 1)
    assert not pqcache.sync(cache).published


def test_recipes_and_texts() -> None:
    assert (
        RewriteOptions(row_group_size=1 << 20).recipe == "row_group_size=1048576"
    )  # as before there were other options
    full = RewriteOptions(
        row_group_size=1 << 20,
        compression="zstd",
        compression_level=3,
        compat=True,
        keep_int96=True,
        dense=(),
        shuffle=7,
    )
    assert full.recipe == "row_group_size=1048576;shuffle=7;compression=zstd:3;compat;keep_int96;dense={}"
    assert (shuffle_of(f"|{full.recipe}"), shuffle_of("|row_group_size=5"), shuffle_of("")) == (7, None, None)
    other = RewriteOptions(
        row_group_size=1 << 22,
        compression="zstd",
        compression_level=3,
        compat=True,
        keep_int96=True,
        dense=(),
        shuffle=7,
    )
    assert made_alike(f"|{full.recipe}", f"where=a|{other.recipe}")
    assert not made_alike(f"|{full.recipe}", "|row_group_size=1048576;shuffle=7")
    assert not made_alike("", "")
    assert parse_compression(" ZSTD:3") == ("zstd", 3)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--compression", "lzo"], "compression 'lzo': choose one of zstd[:LEVEL], lz4, snappy, none, keep"),
        (["--compression", "zstd:99"], "compression level 99: zstd takes levels 1 to 22"),
        (["--compression", "zstd:x"], "the level has to be a whole number, as in zstd:3"),
        (["--compression", "lz4:3"], "compression level 3: lz4 takes no level"),
        (["--dense", "nope"], "--dense nope: there is no column of this name"),
        (["--dense", "title"], "--dense title: it is string"),
        (["--dense", "title", "--dense", "auto"], "--dense auto: stands alone"),
        (["--narrow"], "--narrow: no column is dense"),
        (["--narrow", "--dense", "none"], "--narrow: goes with --dense COLUMN"),
    ],
)
def test_wrong_options_are_told_and_change_nothing(
    tmp_path: Path, arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shop, cache = write_shop(tmp_path / "shop", days=1), tmp_path / "cache"
    before = pqcache.sync(str(shop), cache)
    config = (cache / "pqcache.toml").read_text()
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
    assert lines[-1] == f"to do that: {command}"
    assert not (tmp_path / "out").exists()
    assert run(["repartition", str(tmp_path / "lake"), str(tmp_path / "out"), "--dense", "a b", "--narrow", "-q"]) == 0
    assert (
        pq.read_metadata(tmp_path / "out" / "x.parquet" if False else next((tmp_path / "out").iterdir())).num_rows == 9
    )


# ---- INT96


def rewrite(sources: list[Path], target: Path, size: int = 64 * KB, **options: Any) -> RewriteResult:
    return rewrite_directory(sources, target, RewriteOptions(row_group_size=size, **options))


def physical_types(path: Path) -> dict[str, str]:
    schema = pq.read_metadata(path).schema
    return {schema.column(number).path: schema.column(number).physical_type for number in range(len(schema))}


def times(n: int) -> pa.Table:
    some = [
        datetime.datetime(1, 1, 1),
        datetime.datetime(1969, 12, 31, 23, 59, 59, 999999),
        datetime.datetime(9999, 12, 31, 23, 59),
    ]
    rng = np.random.default_rng(9)
    random = pa.array(rng.integers(-62_135_596_800_000_000, 253_402_300_799_999_999, n), pa.timestamp("us")).to_pylist()
    moments = [[*some, None, moment, moment][number % 6] for number, moment in enumerate(random)]
    column = pa.array(moments, pa.timestamp("us"))
    nested = pa.array(
        [[{"at": moment, "n": 1}] for moment in moments],
        pa.list_(pa.struct([("at", pa.timestamp("us")), ("n", pa.int8())])),
    )
    return pa.table({"id": range(n), "at": column, "deep": nested})


def test_int96_stays_int96(tmp_path: Path) -> None:
    """In any year, and inside lists and structs."""
    table = times(3_000)
    source = tmp_path / "a.parquet"
    pq.write_table(table, source, use_deprecated_int96_timestamps=True, row_group_size=700, store_schema=False)
    result = rewrite([source], tmp_path / "out", 4 * KB, keep_int96=True)
    (output,) = result.outputs
    assert output.row_groups > 1
    assert physical_types(output.path) == physical_types(source)
    assert physical_types(source)["at"] == "INT96"
    for unit in ("us", "ms"):
        found, known = (pq.ParquetFile(p, coerce_int96_timestamp_unit=unit).read() for p in (output.path, source))
        assert found.equals(known)
    for query in ('select id, "at" from "{}"', 'select id, deep[1]."at" from "{}"'):
        assert duckdb.sql(query.format(output.path)).fetchall() == duckdb.sql(query.format(source)).fetchall()
    names = [str(pq.read_metadata(path).schema).split("\n", 1)[1] for path in (source, output.path)]
    assert names[0] == names[1]


def test_int96_beside_int64_time_stamps(tmp_path: Path) -> None:
    n = 3_000
    stamps = {
        "s": pa.array(range(n), pa.timestamp("ms", "Asia/Kolkata")),
        "u": pa.array(range(n), pa.timestamp("us")),
        "list": pa.array([[i, None] for i in range(n)], pa.list_(pa.timestamp("ns", "UTC"))),
    }
    parts = {
        "old": pa.table({"at": pa.array([i * 10**9 + 7 for i in range(n)], pa.timestamp("ns"))}),
        "new": pa.table(stamps),
    }
    for name, table in parts.items():
        pq.write_table(table, tmp_path / f"{name}.parquet", use_deprecated_int96_timestamps=name == "old")
    sources = [tmp_path / "old.parquet", tmp_path / "new.parquet"]  # one schema of both
    result = rewrite(sources, tmp_path / "out", keep_int96=True)
    (output,) = result.outputs
    kinds = physical_types(output.path)
    assert kinds == {"at": "INT96", "s": "INT64", "u": "INT64", "list.list.element": "INT64"}
    found = pq.ParquetFile(output.path).read()
    expected = pa.concat_tables([pq.ParquetFile(path).read() for path in sources], promote_options="default")
    assert found.schema.equals(expected.schema)
    assert found.equals(expected)
    again = rewrite([output.path], tmp_path / "again", 4 * KB, keep_int96=True)
    assert physical_types(again.outputs[0].path) == kinds
    assert pq.ParquetFile(again.outputs[0].path).read().equals(expected)


def test_int96_in_some_files_becomes_int64(tmp_path: Path) -> None:
    for number in range(2):
        table = pa.table({"at": pa.array(range(500), pa.timestamp("us"))})
        pq.write_table(table, tmp_path / f"{number}.parquet", use_deprecated_int96_timestamps=number == 1)
    sources = [tmp_path / "0.parquet", tmp_path / "1.parquet"]
    result = rewrite(sources, tmp_path / "out", keep_int96=True)
    assert physical_types(result.outputs[0].path) == {"at": "INT64"}
    assert pq.ParquetFile(result.outputs[0].path).read()["at"].cast(pa.int64()).to_pylist() == [*range(500)] * 2


# ---- key-values


def test_a_range_index_is_right_in_what_is_cut_and_merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pqcache.parquet.rewrite.rewrite._MIN_FILE", 0)
    rng = np.random.default_rng(1)
    blobs = [rng.bytes(1000) for _ in range(1_200)]
    frame = pd.DataFrame({"b": blobs}, index=pd.RangeIndex(100, 100 + 3 * 1_200, 3, name="key"))
    frame.to_parquet(tmp_path / "whole.parquet")
    result = rewrite([tmp_path / "whole.parquet"], tmp_path / "cut")
    assert len(result.outputs) > 1
    cut = [pd.read_parquet(output.path) for output in result.outputs]
    pd.testing.assert_frame_equal(pd.concat(cut), frame)

    halves = [frame[:500], frame[500:]]
    for number, half in enumerate(halves):
        half.to_parquet(tmp_path / f"{number}.parquet")
    merged = rewrite([tmp_path / "0.parquet", tmp_path / "1.parquet"], tmp_path / "merged", 8 << 20)
    assert merged.warnings == ()
    pd.testing.assert_frame_equal(pd.read_parquet(merged.outputs[0].path), frame)


def test_ranges_that_begin_anew_are_dropped(tmp_path: Path) -> None:
    frames = [pd.DataFrame({"n": range(700)}) for _ in range(3)]
    for number, frame in enumerate(frames):
        frame.to_parquet(tmp_path / f"{number}.parquet")
    result = rewrite([tmp_path / f"{number}.parquet" for number in range(3)], tmp_path / "out")
    (output,) = result.outputs
    assert result.warnings == ()
    assert b'"index_columns": []' in pq.read_metadata(output.path).metadata[b"pandas"]
    assert b'"index_columns": []' in pq.read_schema(output.path).metadata[b"pandas"]
    pd.testing.assert_frame_equal(pd.read_parquet(output.path), pd.concat(frames, ignore_index=True))
    shuffled = rewrite([tmp_path / "0.parquet"], tmp_path / "shuffled", shuffle=1)
    found = pd.read_parquet(shuffled.outputs[0].path)
    assert (sorted(found["n"]), list(found.index)) == (list(range(700)), list(range(700)))


def test_conflicting_key_values_are_told(tmp_path: Path) -> None:
    values = [{"owner": "shop", "v": "1"}, {"owner": "shop", "v": "2"}, {"owner": "x" * 99, "v": "3"}]
    for number, metadata in enumerate(values):
        pq.write_table(pa.table({"a": range(700)}).replace_schema_metadata(metadata), tmp_path / f"{number}.parquet")
    sources = [tmp_path / f"{number}.parquet" for number in range(3)]
    result = rewrite(sources, tmp_path / "out")
    long = "x" * 57 + "..."
    assert list(result.warnings) == [
        f"{sources[0]} and {sources[1]}: key-value 'v' differs ('1' and '2'); the first one's is kept",
        f"{sources[0]} and {sources[2]}: key-value 'owner' differs ('shop' and '{long}'); the first one's is kept",
    ]
    assert pq.read_schema(result.outputs[0].path).metadata == {b"owner": b"shop", b"v": b"1"}


@pytest.mark.parametrize("shuffle", [None, 1])
def test_a_row_too_large_is_named_among_tiny_files_and_shuffled_ones(tmp_path: Path, shuffle: int | None) -> None:
    rng = np.random.default_rng(4)
    for number in range(30):
        blobs = [rng.bytes(100) for _ in range(9)]
        if number == 17:
            blobs[5] = rng.bytes(100_000)
        pq.write_table(pa.table({"blob": blobs}), tmp_path / f"{number:02}.parquet")
    result = rewrite(sorted(tmp_path.glob("*.parquet")), tmp_path / "out", shuffle=shuffle)
    (warning,) = result.warnings
    assert warning.startswith(f"{tmp_path}/17.parquet: row 5 alone takes 97")


def test_warnings_of_a_cache_name_the_source(tmp_path: Path) -> None:
    shop, events = tmp_path / "shop", []
    (shop / "dt=1").mkdir(parents=True)
    pq.write_table(pa.table({"b": [b"x", np.random.default_rng(0).bytes(9_000)]}), shop / "dt=1" / "a.parquet")
    pqcache.sync(str(shop), tmp_path / "cache", row_group_size=4 * KB, on_event=events.append)
    (warning,) = [event.message for event in events if isinstance(event, pqcache.events.Warned)]
    assert warning.startswith(f"{shop}/dt=1/a.parquet: row 1 alone takes 8.8 KB")
