"""INT96 time stamps that are kept, and key-value metadata of files that are merged or cut."""

from __future__ import annotations

import datetime
from pathlib import Path

import duckdb
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import pqcache
from tests.parquet.rewrite.rewriting import KB, rewrite

# ---- INT96


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


def test_int96_is_kept_as_int96(tmp_path: Path) -> None:
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
    monkeypatch.setattr("pqcache.parquet.rewrite.directory._MIN_FILE", 0)
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


def test_conflicting_key_values_are_reported(tmp_path: Path) -> None:
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
