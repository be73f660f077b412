"""Where chunks lie, and where the bytes of a file of some columns are at the source."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import given
from hypothesis import strategies as st

from pqcache.parquet.footer.footer import footer_and_magic, read_local_tail
from pqcache.parquet.footer.thrift import BINARY, decode
from pqcache.parquet.projection import ByteRange
from pqcache.parquet.row_group_stats import read_footer
from pqcache.store.sync.download.download_columns import merged_ranges
from pqcache.store.sync.fill.chunk_ranges import chunk_ranges, row_group_ranges
from pqcache.store.sync.fill.source_ranges import known_from, parts_of, pieces_in


def test_chunks_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(
        pa.table({"a": range(1000), "b": [{"x": i, "y": str(i)} for i in range(1000)]}), path, row_group_size=400
    )
    metadata, _ = read_footer(path)
    found, size = chunk_ranges(path), path.stat().st_size
    assert {name: ranges.shape for name, ranges in found.items()} == {"a": (3, 1, 2), "b": (3, 2, 2)}
    every = np.concatenate([found["a"], found["b"]], axis=1)
    assert every[:, :, 0].min(axis=1).tolist() == row_group_ranges(metadata, size)[:, 0].tolist()
    assert every[:, :, 1].max(axis=1).tolist() == row_group_ranges(metadata, size)[:, 1].tolist()
    lengths = [[c.total_compressed_size for c in map(metadata.row_group(g).column, range(3))] for g in range(3)]
    assert (every[:, :, 1] - every[:, :, 0]).tolist() == lengths


def test_readers_of_old_files_read_more_than_a_chunk(tmp_path: Path) -> None:
    """PARQUET-816: the bytes behind a chunk belong to it, up to the footer."""
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"a": range(1000), "b": range(1000)}), path, row_group_size=500)
    before = row_group_ranges(read_footer(path)[0], path.stat().st_size)
    tail = read_local_tail(path)
    fields = decode(tail.footer, "a")
    fields[6] = (BINARY, b"parquet-mr version 1.2.5")
    path.write_bytes(path.read_bytes()[: tail.limit] + footer_and_magic(fields))
    after = row_group_ranges(read_footer(path)[0], path.stat().st_size)
    assert after[:, 0].tolist() == before[:, 0].tolist()
    assert after[0, 1] == before[0, 1] + 100
    assert after[1, 1] == min(before[1, 1] + 100, tail.limit)
    assert chunk_ranges(path)["a"][0, 0, 1] > chunk_ranges(path)["b"][0, 0, 0]


@given(st.lists(st.tuples(st.integers(0, 90), st.integers(0, 40)), max_size=12), st.data())
def test_a_part_of_a_file_is_fetched_from_where_it_is(spans: list[tuple[int, int]], data: st.DataObject) -> None:
    source = np.random.default_rng(0).bytes(400)
    ranges, position, content = [], 4, b""
    for offset, length in spans:
        ranges.append((position, offset, length))
        content += source[offset : offset + length]
        position += length
    table = np.array(ranges, np.int64).reshape(-1, 3)
    if not len(table) or not content:
        return
    start = data.draw(st.integers(0, len(content)))
    end = data.draw(st.integers(start, len(content)))
    found = b""
    for offset, length, wanted in merged_ranges(parts_of(table, 4 + start, 4 + end)):
        step = data.draw(st.integers(1, 50))
        for at in range(offset, offset + length, step):
            received = memoryview(source[at : min(at + step, offset + length)])
            found += b"".join(bytes(piece) for piece in pieces_in(received, at, wanted))
    assert found == content[start:end]


def test_a_file_that_has_the_bytes_of_the_source() -> None:
    assert list(parts_of(np.zeros((0, 3), np.int64), 10, 30)) == [ByteRange(10, 20)]


def test_what_is_known_with_the_end_of_the_source() -> None:
    ranges = np.array([(4, 100, 50), (54, 300, 20), (74, 340, 10)], np.int64)
    assert known_from(ranges, 84, 400) == 84
    assert known_from(ranges, 84, 345) == 79
    assert known_from(ranges, 84, 340) == 74
    assert known_from(ranges, 84, 310) == 64
    assert known_from(ranges, 84, 0) == 4
