"""What fits into memory: windows, threads, decoded rows that are kept, and pieces of row groups that are too large."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pqcache.errors import UsageError
from pqcache.parquet.decoded_size import StoredRowGroup, count_decoded, decoded_size
from pqcache.reader.epoch import read_record_batches
from pqcache.reader.epoch_options import BatchOptions
from pqcache.reader.memory_budget import Budget, RowGroupSizes, Window, fit, largest_window
from tests.examples import examples
from tests.old_writers import without_sizes
from tests.reader.reading import groups_of, write


def sizes_of(*sizes: int) -> RowGroupSizes:
    each = np.array(sizes, np.int64)
    return RowGroupSizes(each, each, each)


def budget_of(
    memory: int, sizes: RowGroupSizes, lanes: int = 1, all_lanes: int = 1, threads: int = 2, shuffle: bool = True
) -> Budget:
    return Budget.within(memory, sizes, 16, lanes=lanes, all_lanes=all_lanes, threads=threads, shuffle=shuffle)


def test_the_window_follows_memory() -> None:
    sizes = sizes_of(*[10 << 20] * 100)
    assert [largest_window(sizes, memory << 20, 1) for memory in (20, 56, 1000, 100_000)] == [0, 1, 16, 32]
    assert largest_window(replace(sizes, complete=False), 100_000 << 20, 1) == 16, "there may be more"
    assert largest_window(sizes_of(*[10 << 20] * 30), 2 << 30, 1) == 30
    assert largest_window(sizes_of(*[10 << 20] * 30), 2 << 30, 2) == 16
    assert largest_window(sizes_of(*[10 << 20] * 30), 2 << 30, 1, all_lanes=2) == 16, "as on one rank"
    assert largest_window(sizes, 400 << 20, 4) == largest_window(sizes, 100 << 20, 1)
    assert largest_window(sizes_of(), 1, 1) == 1


PAGES = {"max_rows_per_page": 500, "write_page_index": True}


def test_row_groups_without_known_pages_are_read_one_at_a_time(tmp_path: Path) -> None:
    table = pa.table({"id": range(20_000), "s": [f"{i}" * 10 for i in range(20_000)]})
    write(tmp_path, {"a.parquet": table}, 5_000)
    largest = groups_of(tmp_path).sizes.largest
    how = BatchOptions(batch_size=700, memory=2 * largest)
    with pytest.warns(UserWarning, match=r"too much for memory=.*: one is read at a time.*; run 'pqcache repartition'"):
        batches = list(read_record_batches(tmp_path, how))
    assert pa.Table.from_batches(batches).sort_by("id").equals(table)
    with pytest.raises(UsageError, match=r"a row group takes .* too much .*pqcache repartition"):
        read_record_batches(tmp_path, replace(how, memory=2 * largest - 1))


def test_reading_in_file_order_keeps_to_memory(tmp_path: Path) -> None:
    sizes = sizes_of(10 << 20, 30 << 20)
    assert fit(sizes, 90 << 20, 1, False) == Window(1)
    with pytest.raises(UsageError, match=r"shop: a row group takes 30 MB decoded, .*give memory='90\.9 MB'"):
        fit(sizes_of(30 << 20), 1 << 20, 1, False, "shop")
    assert fit(sizes_of(), 1, 1, False) == Window(1)
    budgets = [budget_of(memory << 20, sizes, threads=8, shuffle=False) for memory in (1, 90, 120, 150, 10_000)]
    assert [budget.decoding for budget in budgets] == [1, 1, 2, 3, 8]
    table = pa.table({"id": range(20_000), "s": [f"{i}" * 10 for i in range(20_000)]})
    write(tmp_path, {"a.parquet": table}, 20_000, **PAGES)
    memory = int(groups_of(tmp_path).sizes.selected.max())
    batches = list(read_record_batches(tmp_path, BatchOptions(batch_size=999, shuffle=False, memory=memory)))
    assert pa.Table.from_batches(batches).equals(table)


TEXTS = ["", "b", "c" * 50, "d" * 4_000, "e" * 30_000]
CODES = st.lists(st.integers(0, len(TEXTS) - 1), min_size=1, max_size=60)


@settings(max_examples=examples(60), deadline=None)
@given(
    codes=CODES,
    repeated=st.integers(1, 40),
    shape=st.sampled_from(["flat", "list", "struct", "map", "structs"]),
    nulls=st.booleans(),
    how=st.fixed_dictionaries(
        {
            "use_dictionary": st.booleans(),
            "compression": st.sampled_from(["none", "snappy", "zstd", "gzip"]),
            "data_page_version": st.sampled_from(["1.0", "2.0"]),
        }
    ),
    encoding=st.sampled_from([None, "DELTA_BYTE_ARRAY", "DELTA_LENGTH_BYTE_ARRAY"]),
)
def test_what_rows_take_is_known_before_they_are_decoded(
    tmp_path_factory: pytest.TempPathFactory,
    codes: list[int],
    repeated: int,
    shape: str,
    nulls: bool,
    how: dict[str, Any],
    encoding: str | None,
) -> None:
    texts = pa.array(
        [None if nulls and i % 3 == 1 else TEXTS[code] for i, code in enumerate(np.repeat(codes, repeated))]
    )
    ends = pa.array(np.minimum(np.arange(0, len(texts) + 3, 3), len(texts)), pa.int32())
    keys = pa.array([f"k{i}" for i in range(len(texts))])
    numbers = pa.array(np.arange(len(texts)))
    columns: dict[str, Callable[[], pa.Array]] = {
        "flat": lambda: texts,
        "list": lambda: pa.ListArray.from_arrays(ends, texts),
        "struct": lambda: pa.StructArray.from_arrays([texts, numbers], ["text", "number"]),
        "map": lambda: pa.MapArray.from_arrays(ends, keys, texts),
        "structs": lambda: pa.ListArray.from_arrays(ends, pa.StructArray.from_arrays([texts], ["text"])),
    }
    path = tmp_path_factory.mktemp("sizes") / "a.parquet"
    leaves = {"flat": "t", "list": "t.list.element", "struct": "t.text", "map": "t.key_value.value"}
    leaf = leaves.get(shape, "t.list.element.text")
    pq.write_table(
        pa.table({"t": columns[shape]()}),
        path,
        column_encoding=None if how["use_dictionary"] or encoding is None else {leaf: encoding},
        data_page_size=2_000,
        dictionary_pagesize_limit=40_000,
        write_batch_size=16,
        write_statistics=False,  # which are in the headers of pages
        **how,
    )
    without_sizes(path)
    with pq.ParquetFile(path) as file:
        group = StoredRowGroup(path, file.metadata, file.schema_arrow, 0)
        size, (about, most) = count_decoded(group, ["t"]), decoded_size(group, ["t"])
        table = file.read()
        taken = pa.concat_tables([table.slice(i, 1) for i in range(table.num_rows)]).combine_chunks().nbytes
    assert taken <= size + 64
    assert most is None or (taken <= most + 64 and about is not None and about <= most)
    assert most is not None or encoding == "DELTA_BYTE_ARRAY", "dictionaries are looked at without decoding"
    assert size <= 1.3 * taken + 12 * len(texts) + 4_000, "honest row groups are not refused"


def test_a_row_group_that_was_not_looked_at_is_refused_before_it_is_decoded(tmp_path: Path) -> None:
    """Of 60 row groups one repeats a long text; the estimate is of others."""
    with pq.ParquetWriter(tmp_path / "a.parquet", pa.schema([("s", pa.string())]), store_schema=False) as writer:
        for number in range(60):
            texts = [f"a text that is stored {number} {i}" for i in range(200)]
            writer.write_table(pa.table({"s": ["z" * 5_000] * 160 if number == 50 else texts}))
    without_sizes(tmp_path / "a.parquet")
    loader = groups_of(tmp_path)
    assert int(loader.sizes.decoded.max()) < 100_000, "the case is one that is not looked at"
    options = BatchOptions(batch_size=10, memory=2_000_000)
    with pytest.raises(UsageError, match=r"a\.parquet: row group 50 takes .* too much for memory=1\.9 MB; run"):
        list(read_record_batches(tmp_path, options))
    assert sum(batch.num_rows for batch in read_record_batches(tmp_path, BatchOptions(batch_size=10))) == 59 * 200 + 160


def test_the_advice_of_a_refusal_is_enough() -> None:
    sizes = sizes_of(1 << 20)
    budget = budget_of(64 << 20, sizes, lanes=2, all_lanes=2)
    budget.check(4 << 20, "a.parquet", 0)
    with pytest.raises(UsageError, match=r"a\.parquet: row group 3 takes 5 MB .*memory='80\.8 MB'"):
        budget.check(5 << 20, "a.parquet", 3)
    budget_of(81 << 20, sizes, lanes=2, all_lanes=2).check(5 << 20, "a.parquet", 3)
