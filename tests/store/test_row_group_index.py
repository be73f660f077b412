"""The row-group index: one true line per row group, however it was built."""

from __future__ import annotations

import datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

import pqcache
from pqcache.store.file_checks import IndexedFiles
from pqcache.store.row_group_index import IndexBuilder, build_index
from tests.datasets import files_of, write_shop


def test_lines_are_what_the_footers_say(tmp_path: Path) -> None:
    root = write_shop(tmp_path)
    paths = files_of(root)
    index = build_index(root, paths)
    assert index.paths == tuple(paths)
    assert len(index) == 18
    assert index.rows.sum() == 3 * 3 * 400
    files = IndexedFiles(index)
    for path in paths:
        table = files.get(path)
        assert table is not None
        metadata = pq.read_metadata(root / path)
        assert table.num_rows == metadata.num_row_groups
        for g in range(metadata.num_row_groups):
            group = metadata.row_group(g)
            line = table.slice(g, 1).to_pylist()[0]
            chunks = [group.column(c) for c in range(group.num_columns)]
            assert line["rows"] == group.num_rows
            assert line["bytes"] == sum(chunk.total_compressed_size for chunk in chunks)
            assert line["uncompressed"] == group.total_byte_size
            assert line["offset"] == 4 if g == 0 else line["offset"] > 4
            assert line["id:codec"] == line["tokens:codec"] == "SNAPPY"
            assert (line["id:min"], line["id:max"]) == (chunks[0].statistics.min, chunks[0].statistics.max)
            assert line["note:nulls"] == next(c for c in chunks if c.path_in_schema == "note").statistics.null_count
            assert line["tokens:bytes"] == next(c for c in chunks if "tokens" in c.path_in_schema).total_compressed_size


def test_schema_drift_widens_and_forgets(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": pa.array([1], pa.int32())}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"a": pa.array([2**40]), "b": ["x"]}), tmp_path / "b.parquet")
    both = build_index(tmp_path, ["a.parquet", "b.parquet"])
    assert both.data_schema == pa.schema([("a", pa.int64()), ("b", pa.string())])
    assert both.table["b:min"].to_pylist() == [None, "x"]
    assert both.uncompressed(["b"]).tolist()[0] == 0
    only = IndexBuilder().finish(["a.parquet"], both)
    assert only.data_schema.names == ["a"]


def test_views_have_minima_and_mix_with_strings(tmp_path: Path) -> None:
    """deltalake and DataFusion write views after strings; each batch, and pruning, sees them as strings."""
    lake = tmp_path / "lake"
    lake.mkdir()
    for name, text in (("a", pa.string_view()), ("b", pa.string()), ("c", pa.string_view())):
        data = {"s": [name, None, "x"], "l": [[name], None, []], "b": [name.encode(), None, b"x"]}
        binary = pa.binary_view() if text == pa.string_view() else pa.binary()
        schema = pa.schema([("s", text), ("l", pa.list_(text)), ("b", binary)])
        pq.write_table(pa.table(data, schema), lake / f"{name}.parquet")
    index = build_index(lake, ["a.parquet", "c.parquet"])
    assert index.schema.field("s").type == pa.string_view()
    assert index.table["s:min"].type == pa.string()
    assert index.table["s:min"].to_pylist() == ["a", "c"]
    mixed = build_index(lake, ["a.parquet", "b.parquet", "c.parquet"])
    assert [field.type for field in mixed.schema] == [pa.string(), pa.list_(pa.string()), pa.binary()]
    assert mixed.table["s:min"].to_pylist() == ["a", "b", "c"]
    pqcache.sync(lake, tmp_path / "cache")
    cache = pqcache.Cache.open(tmp_path / "cache")
    found = pa.concat_tables(map(pa.table, cache.batches(["s", "l", "b"], shuffle=False)))
    assert found["s"].to_pylist() == ["a", None, "x", "b", None, "x", "c", None, "x"]
    assert found["l"].to_pylist() == [["a"], None, [], ["b"], None, [], ["c"], None, []]
    assert found["b"].to_pylist() == [b"a", None, b"x", b"b", None, b"x", b"c", None, b"x"]
    assert sum(batch.num_rows for batch in cache.batches(["s"], filters="s = 'c'")) == 1


def test_statistics_of_every_ordered_type(tmp_path: Path) -> None:
    day = datetime.date(2026, 11, 20)
    moment = datetime.datetime(2026, 11, 20, 4, tzinfo=datetime.timezone.utc)
    table = pa.table(
        {
            "b": [True, False],
            "f": [1.5, float("nan")],
            "d": [day, None],
            "t": pa.array([moment, None], pa.timestamp("us", "UTC")),
            "s": pa.array(["kr", "jp"]).dictionary_encode(),
            "long": ["x" * 1000, "y"],
            "x.y": [1, 2],
            "st": [{"a": 1, "b": {"c": "z"}}, None],
            "bin": [b"1", b"2"],
        }
    )
    pq.write_table(table, tmp_path / "a.parquet")
    line = build_index(tmp_path, ["a.parquet"]).table.to_pylist()[0]
    assert (line["b:min"], line["b:max"]) == (False, True)
    assert (line["d:min"], line["d:max"], line["d:nulls"]) == (day, day, 1)
    assert line["t:max"] == moment
    assert (line["s:min"], line["s:max"]) == ("jp", "kr")
    assert line["long:min"] is None
    assert (line["x.y:min"], line["x.y:max"]) == (1, 2)
    assert line["st:bytes"] > 0
    assert "bin:min" not in line
    assert "st:min" not in line
