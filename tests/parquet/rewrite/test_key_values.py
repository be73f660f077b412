"""Key-value metadata of files that are merged or cut, and warnings about rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import pqcache
from tests.parquet.rewrite.rewriting import KB, rewrite


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


def test_a_row_too_large_is_named_among_tiny_files_and_shuffled_ones(tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    for number in range(30):
        blobs = [rng.bytes(100) for _ in range(9)]
        if number == 17:
            blobs[5] = rng.bytes(100_000)
        pq.write_table(pa.table({"blob": blobs}), tmp_path / f"{number:02}.parquet")
    for shuffle in (None, 1):
        result = rewrite(sorted(tmp_path.glob("*.parquet")), tmp_path / f"out {shuffle}", shuffle=shuffle)
        (warning,) = result.warnings
        assert warning.startswith(f"{tmp_path}/17.parquet: row 5 alone takes 97")


def test_warnings_of_a_cache_name_the_source(tmp_path: Path) -> None:
    shop, events = tmp_path / "shop", []
    (shop / "dt=1").mkdir(parents=True)
    pq.write_table(pa.table({"b": [b"x", np.random.default_rng(0).bytes(9_000)]}), shop / "dt=1" / "a.parquet")
    pqcache.sync(str(shop), tmp_path / "cache", row_group_size=4 * KB, on_event=events.append)
    (warning,) = [event.message for event in events if isinstance(event, pqcache.events.Warned)]
    assert warning.startswith(f"{shop}/dt=1/a.parquet: row 1 alone takes 8.8 KB")
