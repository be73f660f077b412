"""Row groups put together from slices say the same as row groups that were written in one go."""

from __future__ import annotations

import datetime
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pqcache.parquet.rewrite.encode import concatenate_chunks, encode_rows
from pqcache.parquet.rewrite.encodings import Encodings
from pqcache.parquet.rewrite.files import OutputSchema, RowGroupFile, footer_schema_of
from tests.examples import examples

FLOATS = st.floats(width=32)
TYPES: list[tuple[pa.DataType, Any]] = [
    (pa.bool_(), st.booleans()),
    (pa.int8(), st.integers(-128, 127)),
    (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    (pa.uint32(), st.integers(0, 2**32 - 1)),
    (pa.uint64(), st.integers(0, 2**64 - 1)),
    (pa.float32(), FLOATS),
    (pa.float64(), st.floats()),
    (pa.float16(), st.floats(width=16).map(np.float16)),
    (pa.string(), st.text(max_size=5)),
    (pa.binary(), st.binary(max_size=5)),
    (pa.binary(3), st.binary(min_size=3, max_size=3)),
    (pa.decimal128(9, 2), st.integers(-(10**8), 10**8).map(lambda n: Decimal(n) / 100)),
    (pa.decimal128(30, 2), st.integers(-(10**20), 10**20).map(lambda n: Decimal(n) / 100)),
    (pa.date32(), st.dates(datetime.date(1900, 1, 1))),
    (pa.list_(pa.int32()), st.lists(st.one_of(st.none(), st.integers(-9, 9)), max_size=3)),
]


def write(path: Path, table: pa.Table, ends: list[int], dictionary: tuple[str, ...] = ()) -> Path:
    """Write ``table`` as one row group, whose columns without a dictionary are cut at ``ends``."""
    plain = [name for name in table.column_names if name not in dictionary]
    encodings = Encodings(statistics=[*table.column_names, "v.list.item"], dictionary=dictionary, level=None)
    cuts = sorted({0, *ends, table.num_rows})
    slices = [encode_rows(table.select(plain).slice(a, b - a), encodings, "x") for a, b in pairwise(cuts)]
    whole = encode_rows(table.select(list(dictionary)), encodings, "x") if dictionary else None
    chunks = []
    footer_schema = footer_schema_of(
        OutputSchema(working=table.schema, declared=table.schema, elements=None, keyvalues={}), encodings
    )
    for name in table.column_names:
        if whole is not None and name in dictionary:
            chunks.append([whole[dictionary.index(name)]])
        else:
            chunks.append([part[plain.index(name)] for part in slices])
    with ThreadPoolExecutor(1) as disk:
        file = RowGroupFile(path=path, footer_schema=footer_schema, disk=disk)
        file.skip(100)
        file.append(concatenate_chunks(chunks, footer_schema.orders))
        file.finish({})
    return path


@pytest.mark.parametrize(("kind", "values"), TYPES, ids=str)
def test_statistics_are_those_of_one_go(tmp_path: Path, kind: pa.DataType, values: Any) -> None:
    nullable = st.one_of(st.none(), values)

    @settings(max_examples=examples(25), deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(nullable, min_size=2, max_size=12), st.lists(st.integers(1, 11), max_size=3))
    def check(items: list[Any], ends: list[int]) -> None:
        table = pa.table({"v": pa.array(items, kind)})
        path = tmp_path / "concatenated.parquet"
        path.unlink(missing_ok=True)
        write(path, table, [end for end in ends if end < len(items)])
        pq.write_table(table, tmp_path / "one.parquet", use_dictionary=False, version="2.6")
        found, one = (pq.read_metadata(p).row_group(0).column(0) for p in (path, tmp_path / "one.parquet"))
        assert (found.num_values, found.statistics is None) == (one.num_values, one.statistics is None)
        if one.statistics is not None:
            assert found.statistics.null_count == one.statistics.null_count
            if found.statistics.has_min_max:  # a slice of NaN alone leaves them unknown
                assert (found.statistics.min, found.statistics.max) == (one.statistics.min, one.statistics.max)
            else:
                assert not one.statistics.has_min_max or pa.types.is_floating(kind)
        read = pq.read_table(path)["v"].to_pylist()
        assert all(a == b or a != a for a, b in zip(read, table["v"].to_pylist(), strict=True))

    check()


def test_pages_of_slices_beside_a_dictionary(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    rows = 90_000
    table = pa.table(
        {
            "id": np.arange(rows),
            "word": [f"word {n}" for n in rng.integers(0, 50, rows)],
            "down": np.arange(rows, 0, -1),
            "x": rng.standard_normal(rows),
        }
    )
    path = write(tmp_path / "a.parquet", table, [30_000, 50_001], ("word",))
    assert pq.ParquetFile(path).read().equals(table)
    assert pq.ParquetFile(path).read(["word"]).equals(table.select(["word"]))
    for low, high in ((0, 10), (29_990, 30_010), (50_000, 50_002), (89_999, 90_000)):
        found = duckdb.sql(f"select * from '{path}' where id >= {low} and id < {high} order by id").fetchall()
        part = table.slice(low, high - low)
        assert found == list(zip(*(column.to_pylist() for column in part.columns), strict=True))
    assert duckdb.sql(f"select sum(x), count(distinct word), min(down) from '{path}'").fetchall() == [
        (pytest.approx(table["x"].to_numpy().sum()), 50, 1)
    ]
