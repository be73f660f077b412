"""Footers that are read many at a time: the numbers that pyarrow has of each, and none of a footer that is damaged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pqcache.errors import ParquetError
from pqcache.parquet.footer import footer, source_footer, thrift
from pqcache.parquet.footer.alike_footers import AlikeFooters
from pqcache.parquet.footer.footer_validation import check_footer
from pqcache.parquet.footer.source_footer import SourceFooter, one_of_each_schema, read_source_footers
from tests.parquet.rewrite.rewriting import KB, rewrite
from tests.parquet.rewrite.test_joined_files import write
from tests.parquet.rewrite.test_rewrite_directory import COLUMNS

MANY = source_footer._WORTH_A_LAYOUT


def numbers_of(metadata: pq.FileMetaData) -> tuple[list[tuple[int, int]], list[list[list[int]]]]:
    """Return what pyarrow has of the row groups and of their column chunks."""
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    chunks = [[group.column(leaf) for leaf in range(group.num_columns)] for group in groups]
    return [(group.num_rows, group.total_byte_size) for group in groups], [
        [
            [
                chunk.num_values,
                chunk.total_uncompressed_size,
                chunk.total_compressed_size,
                chunk.data_page_offset,
                chunk.dictionary_page_offset or 0,
            ]
            for chunk in some
        ]
        for some in chunks
    ]


def check(paths: list[Path], sources: list[SourceFooter]) -> None:
    """Assert that ``sources`` are what pyarrow has of the files ``paths``, each by itself."""
    assert [source.path for source in sources] == paths
    for source in sources:
        file = pq.ParquetFile(source.path)
        groups, chunks = numbers_of(file.metadata)
        assert source.rows == file.metadata.num_rows
        assert source.size == source.path.stat().st_size
        assert source.key_values == (file.metadata.metadata or {})
        assert source.schema.equals(file.schema_arrow, check_metadata=True)
        assert source.row_groups == groups
        assert source.chunks(range(len(groups))).tolist() == chunks
        assert source.metadata.equals(file.metadata)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"compression": "none", "use_dictionary": False, "write_statistics": False},
        {"compression": "gzip", "write_page_index": True, "data_page_version": "2.0"},
    ],
)
def test_the_numbers_are_those_of_each_footer(tmp_path: Path, options: dict[str, Any]) -> None:
    rng, names = np.random.default_rng(1), [name for name in COLUMNS if name != "category"]
    many = [pa.table({name: COLUMNS[name](rng, 21 + n % 20) for name in names}) for n in range(MANY + 20)]
    paths = write(tmp_path, many, **options)  # two row groups in each
    sources = read_source_footers(paths)
    check(paths, sources)
    assert sum(source.template is not None for source in sources) > MANY // 2
    assert len(one_of_each_schema(sources)) == 1


def test_files_of_several_kinds_keep_their_order(tmp_path: Path) -> None:
    table = pa.table({"x": pa.array([1, 2, None], pa.int32()), "s": ["a", "bb", "ccc"]})
    paths = []
    for number in range(3 * MANY):
        paths.append(tmp_path / f"{number:03}.parquet")
        rows = table.slice(0, 0 if number == 0 else 1 + number % 2)  # the first one has no row groups
        if number % 3 == 1:
            rows = rows.append_column("y", pa.array([number] * len(rows), pa.int64()))
        if number % 7 == 2:
            rows = rows.replace_schema_metadata({"of": str(number % 2)})
        pq.write_table(rows, paths[-1], compression="zstd" if number % 5 == 3 else "snappy")
    sources = read_source_footers(paths)
    check(paths, sources)
    assert len({id(source.template) for source in sources}) > 2
    for one in one_of_each_schema(sources):
        alike = [source for source in sources if source.schema is one.schema]
        assert all(source.key_values == one.key_values for source in alike)


def test_damage_among_many_names_its_file(tmp_path: Path) -> None:
    paths = write(tmp_path, [pa.table({"x": range(20)})] * (MANY + 10))
    data = bytearray(paths[40].read_bytes())
    place = data.rindex(b"\x16\x28")  # the rows of the row group
    data[place + 1] -= 2
    paths[40].write_bytes(data)
    with pytest.raises(ParquetError, match="rows") as caught:
        read_source_footers(paths)
    assert str(caught.value).startswith(f"{paths[40]}: ")


def test_what_is_read_of_a_changed_footer_passes_all_checks(tmp_path: Path) -> None:
    """Every byte of a footer changed in turn: what is still read must be what pyarrow reads, of a sound footer."""
    table = pa.table({"x": [1, 2, None], "s": ["a", "bb", None], "l": pa.array([[1], [2, 3], []], pa.list_(pa.int8()))})
    path = tmp_path / "x.parquet"
    pq.write_table(table, path, store_schema=False)
    data, size = footer.read_local_tail(path).footer, path.stat().st_size
    fields, begin = thrift.decode_first(data, "x", until=2)
    alike = AlikeFooters(data, begin, footer.schema_of(fields, "x"), "x")
    changed = [
        data[:place] + bytes([data[place] ^ flip]) + data[place + 1 :]
        for place in range(begin, len(data))
        for flip in (1, 2, 4, 128)
    ]
    changed += [data[:place] + data[place + 1 :] for place in range(begin, len(data))]
    changed += [data[:place] + b"\x80" + data[place:] for place in range(begin, len(data))]
    found = alike.read([data, *changed], [size] * (1 + len(changed)))
    assert found[0] is not None
    accepted = [(footer_, numbers) for footer_, numbers in zip(changed, found[1:], strict=True) if numbers is not None]
    assert 50 < len(accepted) < len(changed) // 2
    for one, numbers in accepted:
        check_footer(one, "x", size)
        end = footer.MAGIC + one + len(one).to_bytes(4, "little") + footer.MAGIC
        groups, chunks = numbers_of(pq.read_metadata(pa.BufferReader(end)))
        assert list(zip(numbers.rows.tolist(), numbers.sizes.tolist(), strict=True)) == groups
        assert numbers.chunks.tolist() == chunks


def test_footers_with_fields_that_are_not_known_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"x": [1]}), path)
    fields = thrift.decode(footer.read_local_tail(path).footer, "x")
    fields[4][1].values[0][9] = (thrift.I64, 7)
    data = thrift.encode(fields)
    begin = thrift.decode_first(data, "x", until=2)[1]
    with pytest.raises(ValueError, match="field 9"):
        AlikeFooters(data, begin, footer.schema_of(fields, "x"), "x")


def test_many_tiny_files_are_rewritten_to_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(3)
    some = [
        pa.table({"i": rng.integers(0, 900, 30 + n % 3), "s": [str(k) for k in rng.integers(0, 40, 30 + n % 3)]})
        for n in range(MANY + 30)
    ]
    paths = write(tmp_path, some)
    first = rewrite(paths, tmp_path / "one", size=64 * KB)
    monkeypatch.setattr(source_footer, "_WORTH_A_LAYOUT", 1 << 30)
    second = rewrite(paths, tmp_path / "two", size=64 * KB)
    assert pq.read_table(first.outputs[0].path).equals(pa.concat_tables(some))
    assert [output.path.read_bytes() for output in first.outputs] == [
        output.path.read_bytes() for output in second.outputs
    ]
