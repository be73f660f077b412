"""What the row-group index says of decoded columns, however it was made."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pqcache
from pqcache.errors import CacheError, UsageError
from pqcache.reader.open_dataset import open_local_dataset
from pqcache.store.layout import ROW_GROUPS
from pqcache.store.row_group_index import Index, build_index
from tests.examples import examples
from tests.old_writers import without_sizes, write_without_sizes

ROWS = 1000
TABLE = pa.table(
    {
        "id": range(8 * ROWS),
        "label": [f"label {i % 40}" for i in range(8 * ROWS)],
        "text": [None if i % 9 == 0 else f"{i}" * (i % 30) for i in range(8 * ROWS)],
        "tags": [[f"tag {j}" for j in range(i % 4)] for i in range(8 * ROWS)],
        "tokens": pa.array([list(range(i % 50)) for i in range(8 * ROWS)], pa.list_(pa.int32())),
        "about": [{"x": i, "name": "n" * (i % 5)} for i in range(8 * ROWS)],
    }
)
VARYING = ["label", "text", "tags", "tokens", "about"]


def lake(root: Path, old: bool, **options: object) -> Path:
    """Write the table to two files with four row groups each."""
    root.mkdir()
    for number in range(2):
        file = root / f"{number}.parquet"
        pq.write_table(TABLE.slice(number * 4 * ROWS, 4 * ROWS), file, row_group_size=ROWS, **options)
        if old:
            without_sizes(file)
    return root


def index_of(path: Path) -> Index:
    data, lease = open_local_dataset(path)
    with lease or nullcontext():
        return data.index


def real(name: str, row_group: int) -> int:
    """Return the bytes that Arrow takes for a column of a row group."""
    return int(TABLE.select([name]).take(pa.array(range(row_group * ROWS, (row_group + 1) * ROWS))).nbytes)


@pytest.mark.parametrize(
    ("how", "old"), [("sync", False), ("sync", True), ("fill", True), ("repartition", True), ("plain", False)]
)
def test_the_index_says_how_large_columns_are_decoded(tmp_path: Path, how: str, old: bool) -> None:
    path = lake(tmp_path / "lake", old)
    if how != "plain":
        options = {"row_group_size": "20KB"} if how == "repartition" else {"fill": how == "fill"}
        pqcache.sync(path, path := tmp_path / "cache", **options)
    index = index_of(path)
    assert index.varying == VARYING
    for name in VARYING:
        size, most = (index.optional(f"{name}:{what}") for what in ("decoded", "most"))
        exact = sum(real(name, number) for number in range(8))
        assert 0.95 * exact <= size.sum() <= 1.3 * exact + 64 * len(index), name
        assert (most >= size).all()
        assert (most[0] == size[0]) == (not old or how == "repartition" or name != "text"), name
    assert len(index) == 8 or how == "repartition"


def test_pages_that_left_their_dictionary_count_as_they_are(tmp_path: Path) -> None:
    texts = [f"a short one {i}" for i in range(3000)] + [f"{i}".rjust(400) for i in range(3000)]
    path = write_without_sizes(pa.table({"text": texts}), tmp_path / "a.parquet", dictionary_pagesize_limit=20_000)
    size, most = (int(build_index(tmp_path, [path.name]).optional(f"text:{what}")[0]) for what in ("decoded", "most"))
    exact = sum(map(len, texts))
    assert exact < size < 1.1 * exact
    assert exact < most < 1.2 * exact


def test_an_index_of_another_format_is_refused(tmp_path: Path) -> None:
    pqcache.sync(lake(tmp_path / "lake", old=False), tmp_path / "cache")
    path = tmp_path / "cache" / "current" / ROW_GROUPS
    with pa.memory_map(str(path)) as file:
        table = pa.ipc.open_file(file).read_all()
        for number, advice in ((1, "sync into a new directory"), (3, "upgrade pqcache, or sync into a new directory")):
            about = {**table.schema.metadata, b"pqcache": json.dumps({"format": number}).encode()}
            path.unlink(missing_ok=True)
            with pa.ipc.new_file(str(path), table.schema.with_metadata(about)) as writer:
                writer.write_table(table)
            with pytest.raises(CacheError, match=rf"written in format {number}, this pqcache reads format 2; {advice}"):
                pqcache.Cache.open(tmp_path / "cache").batches()


@settings(max_examples=examples(50), deadline=None)
@given(
    st.lists(st.sampled_from([b"", b"\0", b"a\0\0\0b", b"\0" * 7, b"x" * 255, b"y" * 256, b"z" * 70_000]), min_size=1)
)
def test_dictionaries_of_any_bytes_are_read(tmp_path_factory: pytest.TempPathFactory, values: list[bytes]) -> None:
    path = tmp_path_factory.mktemp("bytes") / "a.parquet"
    write_without_sizes(pa.table({"b": values * 3}), path)
    size, most = (int(build_index(path.parent, [path.name]).optional(f"b:{what}")[0]) for what in ("decoded", "most"))
    exact, other = sum(map(len, values * 3)), 4 * 3 * len(values)
    assert exact + other <= most
    assert most <= max(map(len, values)) * 3 * len(values) + other
    assert size <= most


def test_an_upper_bound_alone_refuses_nothing(tmp_path: Path) -> None:
    """One text is long, and may be in all rows by its dictionary: it is in one, which is seen before it is decoded."""
    texts = [f"a text {i % 50}" for i in range(2000)]
    table = pa.table({"id": range(2000), "text": [*texts[:-1], "z" * 50_000]})
    write_without_sizes(table, tmp_path / "a.parquet", row_group_size=2000)
    index = index_of(tmp_path)
    assert index.optional("text:most")[0] > 2000 * 50_000
    batches = list(pqcache.Cache(tmp_path).batches(batch_size=100, memory="4MB"))
    assert sum(batch.num_rows for batch in batches) == 2000
    often = pa.table({"id": range(2000), "text": [*texts[:1000], *["z" * 50_000] * 1000]})
    write_without_sizes(often, tmp_path / "a.parquet", row_group_size=2000)
    with pytest.raises(UsageError, match=r"a\.parquet: row group 0 takes 47.7 MB decoded, .*too much for memory="):
        list(pqcache.Cache(tmp_path).batches(batch_size=100, memory="40MB"))
