"""Dense columns: stored as fixed-length bytes, turned back, read as before, refused where lists are not constant."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import pqcache
from pqcache.parquet.dense import Dense, as_dense, as_list, dense_in, dense_of, smallest
from pqcache.parquet.rewrite.directory import rewrite_directory
from pqcache.parquet.rewrite.recipe import RewriteOptions
from pqcache.store.config import read_config
from pqcache.torch import ParquetDataset, Ragged
from tests.datasets import files_of
from tests.examples import examples

KB = 1 << 10
LIMIT = 64 * KB


def lists(values: Any, length: int, kind: str = "list") -> pa.Array:
    """Return an Arrow array of lists of ``length`` of the values."""
    items = pa.array(np.ascontiguousarray(values).reshape(-1))
    rows = len(items) // length
    if kind == "fixed":
        return pa.FixedSizeListArray.from_arrays(items, length)
    if kind == "large":
        return pa.LargeListArray.from_arrays(pa.array(np.arange(rows + 1) * length, pa.int64()), items)
    return pa.ListArray.from_arrays(pa.array(np.arange(rows + 1) * length, pa.int32()), items)


def windows(rng: np.random.Generator, first: int, rows: int) -> pa.Table:
    field = pa.field("tokens", pa.list_(pa.int32()), metadata={"PARQUET:field_id": "7", "unit": "token"})
    columns = {
        "id": pa.array(np.arange(first, first + rows)),
        "tokens": lists(rng.integers(0, 50_000, rows * 32).astype(np.int32), 32),
        "emb": lists(rng.standard_normal(rows * 8).astype(np.float32), 8, "fixed"),
        "small": lists(rng.integers(-3, 100, rows * 4), 4, "large"),
        "half": lists(rng.random(rows * 2).astype(np.float16), 2),
        "one": lists(rng.integers(0, 9, rows), 1),
        "ragged": pa.array([[i] * (i % 4) for i in range(rows)]),
        "title": pa.array([f"row {i}" for i in range(rows)]),
    }
    fields = [field if name == "tokens" else pa.field(name, values.type) for name, values in columns.items()]
    return pa.table(list(columns.values()), schema=pa.schema(fields, {"owner": "us"}))


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    rng = np.random.default_rng(1)
    for day in range(2):
        (tmp_path / "lake" / f"dt={day}").mkdir(parents=True)
        for number in range(2):
            table = windows(rng, day * 10_000 + number * 1_000, 1_000)
            pq.write_table(table, tmp_path / "lake" / f"dt={day}" / f"{number}.parquet", row_group_size=300)
    return tmp_path / "lake"


def table_of(directory: Path) -> pa.Table:
    tables = [pq.ParquetFile(path).read() for path in sorted(directory.rglob("*.parquet"))]
    return pa.concat_tables(tables)


DENSE = ["tokens", "emb", "small", "half", "one"]


@pytest.mark.parametrize("narrow", [False, True])
def test_there_and_back(lake: Path, tmp_path: Path, narrow: bool) -> None:
    there, back = tmp_path / "there", tmp_path / "back"
    before = table_of(lake)
    pqcache.repartition(lake, there, row_group_size=LIMIT, dense=DENSE, narrow=narrow)
    after = table_of(there)
    expected = {"tokens": ("int32", 32), "emb": ("float32", 8), "small": ("int64", 4), "half": ("float16", 2)}
    expected["one"] = ("int64", 1)
    if narrow:
        expected |= {"tokens": ("uint16", 32), "small": ("int8", 4), "one": ("uint8", 1)}
    assert dense_in(after.schema) == {name: Dense(*kind) for name, kind in expected.items()}
    for name, (dtype, length) in expected.items():
        field = after.schema.field(name)
        assert field.metadata[b"pqcache.dtype"] == dtype.encode()  # as other programs read it, by docs/cache-format.md
        assert json.loads(field.metadata[b"pqcache.shape"]) == [length]
        found = np.frombuffer(b"".join(after[name].to_pylist()), dtype).reshape(-1, length)
        values = before[name].combine_chunks()
        known = values.flatten().to_numpy(zero_copy_only=False)
        assert np.array_equal(found, known.reshape(-1, length))
        by_duckdb = duckdb.sql(f"select {name} from read_parquet('{there}/**/*.parquet') order by id").fetchall()
        assert [row[0] for row in by_duckdb] == after[name].to_pylist()
    assert after.schema.field("tokens").metadata[b"unit"] == b"token"
    rest = ["id", "ragged", "title"]
    assert after.select(rest).equals(before.select(rest))
    for path in files_of(there):
        metadata = pq.read_metadata(there / path)
        assert metadata.schema.column(1).physical_type == "FIXED_LEN_BYTE_ARRAY"
        groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
        assert all(sum(g.column(c).total_compressed_size for c in range(g.num_columns)) <= LIMIT for g in groups)

    pqcache.repartition(there, back, row_group_size=LIMIT, dense=[])
    restored = table_of(back)
    assert restored.schema.equals(before.schema, check_metadata=True)
    assert restored.equals(before)
    one, other = (pq.read_metadata(next(path.rglob("*.parquet"))).schema for path in (lake, back))
    assert str(one).split("\n", 1)[1] == str(other).split("\n", 1)[1]


def test_files_without_an_arrow_schema(tmp_path: Path) -> None:
    """What Spark writes has no place for metadata of fields until it is dense, and a schema of its own."""
    rng = np.random.default_rng(2)
    table = pa.table({"id": range(3_000), "tokens": lists(rng.integers(0, 99, 3_000 * 16), 16)})
    key = b"org.apache.spark.sql.parquet.row.metadata"
    (tmp_path / "lake").mkdir()
    with pq.ParquetWriter(tmp_path / "lake" / "a.parquet", table.schema, store_schema=False) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata({key: b'{"type":"struct"}', b"org.apache.spark.version": b"3.5.1"})
    pqcache.repartition(tmp_path / "lake", tmp_path / "there", row_group_size=LIMIT, dense=["tokens"], narrow=True)
    there = table_of(tmp_path / "there").schema
    assert dense_in(there) == {"tokens": Dense("uint8", 16)}
    assert there.metadata == {b"pqcache." + key: b'{"type":"struct"}', b"org.apache.spark.version": b"3.5.1"}
    pqcache.repartition(tmp_path / "there", tmp_path / "back", row_group_size=LIMIT, dense=[])
    back = table_of(tmp_path / "back")
    assert back["tokens"].to_pylist() == table["tokens"].to_pylist()
    assert back.schema.metadata == {key: b'{"type":"struct"}', b"org.apache.spark.version": b"3.5.1"}


def test_a_cache_remembers_and_syncs_alike(lake: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    pqcache.sync(str(lake), cache)
    pqcache.repartition(cache, row_group_size=LIMIT, dense=["tokens"], narrow=True)
    assert read_config(cache).dense == {"tokens": "uint16[32]"}
    assert not pqcache.sync(cache).published
    again = pqcache.repartition(cache, dense=["tokens"], narrow=True)
    assert again.rewritten == 0

    rng = np.random.default_rng(3)
    (lake / "dt=2").mkdir()
    pq.write_table(windows(rng, 30_000, 500), lake / "dt=2" / "0.parquet")
    pq.write_table(windows(rng, 40_000, 50), lake / "dt=1" / "2.parquet")
    report = pqcache.sync(cache)
    assert (report.published, report.rewritten) == (True, 2)
    found = table_of(cache / "current")
    assert dense_in(found.schema) == {"tokens": Dense("uint16", 32)}
    values = np.frombuffer(b"".join(found["tokens"].to_pylist()), "uint16")
    assert np.array_equal(values, table_of(lake)["tokens"].combine_chunks().flatten().to_numpy())

    column = next(column for column in pqcache.inspect(cache).columns if column.name == "tokens")
    assert column.type == "list<element: int32>, dense as uint16[32]"

    unlike = windows(rng, 50_000, 50)
    values = np.full(50 * 32, 1, np.int32)
    values[32 * 49 + 3] = 70_000
    unlike = unlike.set_column(1, unlike.schema.field(1), lists(values, 32))
    pq.write_table(unlike, lake / "dt=2" / "1.parquet")
    with pytest.raises(
        pqcache.ParquetError, match=r"lake/dt=2/1\.parquet: column 'tokens', row 49 has 70000, which uint16"
    ):
        pqcache.sync(cache)
    assert pqcache.repartition(cache, dense=["tokens"]).rewritten == 3  # wider again
    pqcache.sync(cache)
    assert dense_in(table_of(cache / "current").schema) == {"tokens": Dense("int32", 32)}
    pqcache.repartition(cache, dense=[])
    assert table_of(cache / "current").sort_by("id").equals(table_of(lake).sort_by("id"))
    assert not pqcache.sync(cache).published


def test_dense_files_are_left_alone_unless_asked(lake: Path, tmp_path: Path) -> None:
    pqcache.repartition(lake, tmp_path / "one", row_group_size=LIMIT, dense=["tokens"], narrow=True)
    pqcache.repartition(tmp_path / "one", tmp_path / "two", row_group_size=2 * LIMIT)
    assert dense_in(table_of(tmp_path / "two").schema) == {"tokens": Dense("uint16", 32)}
    pqcache.repartition(tmp_path / "one", tmp_path / "three", row_group_size=LIMIT, dense=["tokens"], narrow=True)
    for path in files_of(tmp_path / "one"):
        assert (tmp_path / "one" / path).samefile(tmp_path / "three" / path)


@pytest.mark.parametrize(
    ("row", "value", "why"),
    [(1_234, [1, 2], "has 2 numbers instead of 4"), (1_999, None, "is null"), (1_700, [1, None, 3, 4], "has a null")],
)
def test_what_is_not_constant_is_refused_by_name_and_row(tmp_path: Path, row: int, value: Any, why: str) -> None:
    (tmp_path / "lake").mkdir()
    rows: list[Any] = [[1, 2, 3, 4]] * 2_000
    pq.write_table(pa.table({"v": rows}), tmp_path / "lake" / "a.parquet")
    rows = list(rows)
    rows[row] = value
    pq.write_table(pa.table({"v": rows}), tmp_path / "lake" / "b.parquet", row_group_size=77)
    with pytest.raises(pqcache.ParquetError, match=rf"b\.parquet: column 'v', row {row:,} {why}"):
        pqcache.repartition(tmp_path / "lake", tmp_path / "out", dense=["v"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lake"]


def test_wrong_names_are_refused(lake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def dense(*columns: str, **more: Any) -> None:
        pqcache.repartition(lake, tmp_path / "out", dense=columns or None, **more)

    with pytest.raises(pqcache.ParquetError, match=r"0\.parquet: column 'ragged', row 0 is empty"):
        dense("ragged")
    with pytest.raises(pqcache.UsageError, match="not a list of names"):
        pqcache.repartition(lake, tmp_path / "out", dense="tokens")
    # Nothing may be contacted, not even for credentials.
    monkeypatch.setattr(
        "pqcache.store.repartition.partition_job.open_table", lambda *_: pytest.fail("a source was opened")
    )
    monkeypatch.setattr(
        "pqcache.store.repartition.dense_proposals.open_dataset", lambda *_: pytest.fail("a source was opened")
    )
    with pytest.raises(pqcache.UsageError, match="is not local"):
        pqcache.dense_proposals("s3://lake/shop")
    with pytest.raises(pqcache.UsageError, match="is not local"):
        pqcache.repartition("s3://lake/shop", tmp_path / "out", dense=["tokens"])


def test_a_file_without_the_column_is_refused(lake: Path, tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": [1]}), lake / "dt=1" / "9.parquet")
    with pytest.raises(pqcache.ParquetError, match=r"9\.parquet: has no column 'tokens'"):
        pqcache.repartition(lake, tmp_path / "out", dense=["tokens"])


def test_proposals(lake: Path, tmp_path: Path) -> None:
    found = {item.column: (item.dense, item.narrow) for item in pqcache.dense_proposals(lake)}
    assert found == {
        "tokens": ("int32[32]", "uint16[32]"),
        "emb": ("float32[8]", "float32[8]"),
        "small": ("int64[4]", "int8[4]"),
        "half": ("float16[2]", "float16[2]"),
        "one": ("int64[1]", "uint8[1]"),
    }
    pqcache.repartition(lake, tmp_path / "out", dense=["tokens", "emb"])
    assert [item.column for item in pqcache.dense_proposals(tmp_path / "out")] == ["small", "half", "one"]


def test_files_that_store_a_column_differently_do_not_mix(lake: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for name, dense in (("a", Dense("int32", 4)), ("b", Dense("uint16", 8))):
        (tmp_path / name).mkdir()
        kind = lists(np.arange(800, dtype=np.int32), dense.length)
        pq.write_table(pa.table({"v": kind}), tmp_path / name / "x.parquet")
        rewrite_directory(
            [tmp_path / name / "x.parquet"], out / name, RewriteOptions(row_group_size=LIMIT, dense=(("v", dense),))
        )
    with pytest.raises(pqcache.ParquetError, match=r"column 'v' is stored as uint16\[8\], and as int32\[4\]"):
        ParquetDataset(out, batch_size=10)


@settings(max_examples=examples(30), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    dtype=st.sampled_from(
        ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float32", "float64"]
    ),
    kind=st.sampled_from(["list", "large", "fixed"]),
    length=st.integers(1, 9),
    rows=st.integers(1, 300),
    narrow=st.booleans(),
    data=st.data(),
)
def test_any_numbers_survive_bit_by_bit(
    tmp_path_factory: pytest.TempPathFactory,
    dtype: str,
    kind: str,
    length: int,
    rows: int,
    narrow: bool,
    data: st.DataObject,
) -> None:
    here = tmp_path_factory.mktemp("any")
    (here / "lake").mkdir()
    raw = np.random.default_rng(rows).bytes(rows * length * np.dtype(dtype).itemsize)
    values = np.frombuffer(raw, dtype).copy()
    if np.dtype(dtype).kind in "iu":
        info = np.iinfo(dtype)
        low = data.draw(st.integers(info.min, info.max))
        high = data.draw(st.integers(low, info.max))
        values = np.random.default_rng(rows).integers(low, high, rows * length, dtype, endpoint=True)
    table = pa.table({"v": lists(values, length, kind)})
    pq.write_table(table, here / "lake" / "a.parquet", row_group_size=max(1, rows // 3))
    pqcache.repartition(here / "lake", here / "there", row_group_size=4 * KB, dense=["v"], narrow=narrow)
    pqcache.repartition(here / "there", here / "back", row_group_size=4 * KB, dense=[])
    before, after = table_of(here / "lake"), table_of(here / "back")
    assert after.schema.equals(before.schema, check_metadata=True)
    found = after["v"].combine_chunks().flatten().to_numpy()
    assert found.dtype == values.dtype
    assert found.tobytes() == values.tobytes()
    stored = dense_in(table_of(here / "there").schema)["v"].dtype
    if narrow and np.dtype(dtype).kind in "iu":
        assert stored == smallest(min(0, int(values.min())), max(0, int(values.max())))
    else:
        assert stored == dtype


def test_fields_that_only_look_dense_are_bytes() -> None:
    field = as_dense(pa.field("v", pa.list_(pa.int32()), metadata={"a": "b"}), Dense("uint16", 4))
    assert dense_of(field) == Dense("uint16", 4)
    assert as_list(field).equals(pa.field("v", pa.list_(pa.int32()), metadata={"a": "b"}), check_metadata=True)
    for key, value in (("dtype", "object"), ("dtype", "int64"), ("shape", "[2, 2]"), ("shape", "4"), ("shape", "x")):
        assert dense_of(field.with_metadata({**field.metadata, f"pqcache.{key}".encode(): value.encode()})) is None
    damaged = field.with_metadata({**field.metadata, b"pqcache.list": b"!"})
    assert as_list(damaged).type == pa.list_(pa.uint16())


def test_the_loader_gives_the_same_tensors(lake: Path, tmp_path: Path) -> None:
    pqcache.repartition(lake, tmp_path / "dense", dense=DENSE, narrow=True)
    pqcache.repartition(lake, tmp_path / "plain")
    for options in ({}, {"ragged": ["tokens"], "shuffle": False}):
        before, after = (
            ParquetDataset(tmp_path / name, batch_size=96, seed=4, **options) for name in ("plain", "dense")
        )
        assert before.schema.equals(after.schema)
        for one, other in zip(before, after, strict=True):
            assert list(one) == list(other)
            for name, value in one.items():
                if isinstance(value, Ragged):
                    assert repr(value.to_list()) == repr(other[name].to_list())
                elif isinstance(value, torch.Tensor):
                    assert (value.dtype, value.shape) == (other[name].dtype, other[name].shape), name
                    assert torch.equal(value.view(torch.uint8), other[name].view(torch.uint8)), name
                else:
                    assert list(value) == list(other[name])
