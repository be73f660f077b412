"""Which files of a listing are a dataset's."""

from __future__ import annotations

import pytest

from pqcache.errors import UsageError
from pqcache.store.manifest import Identity, SourceFile
from pqcache.store.tables.data_files import FileKind, FileRules, check_passed_over, divide_listing, file_kind


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("dt=1/part-0.parquet", FileKind.PARQUET),
        ("dt=1/PART.PARQUET", FileKind.PARQUET),
        ("_id=1/a.parq", FileKind.PARQUET),
        ("dt=1/000000_0", FileKind.UNKNOWN),
        ("dt=1/000012_0_copy_3", FileKind.UNKNOWN),
        ("dt=1/part-m-00000", FileKind.UNKNOWN),
        ("dt=1/20261101_063012_00012_abcde_5f1e0b3a", FileKind.UNKNOWN),
        ("dt=1/bucket_00000", FileKind.UNKNOWN),
        ("part-00000-5f1e.c000", FileKind.UNKNOWN),
        ("dt=1/part-0.orc", FileKind.OTHER_DATA),
        ("dt=1/part-00000.json", FileKind.OTHER_DATA),
        ("dt=1/part-0.parquet.gz", FileKind.OTHER_DATA),
        ("dt=1/README", FileKind.NO_DATA),
        ("metadata/snap-2089285893032715688-0-35b78f35-1911-4284-a123-317c0f7eef60.avro", FileKind.NO_DATA),
        ("log/35b78f35-1911-4284-a123-317c0f7eef60-m0.avro", FileKind.NO_DATA),
        ("metadata/20261101_00012.stats.puffin", FileKind.NO_DATA),
        ("dt=1/35b78f35-1911-4284-a123-317c0f7eef60.avro", FileKind.OTHER_DATA),
        ("lock", FileKind.NO_DATA),
        ("schema.json", FileKind.NO_DATA),
        ("dt=1/notes.txt", FileKind.NO_DATA),
        ("dt=1/part-0.parquet.tmp", FileKind.UNFINISHED),
        ("dt=1/part-0.part", FileKind.UNFINISHED),
        ("dt=1/_SUCCESS", FileKind.HIDDEN),
        ("dt=1/.part-0.parquet.crc", FileKind.HIDDEN),
        ("_temporary/0/a.parquet", FileKind.HIDDEN),
        ("dt=1/part-0.parquet._COPYING_", FileKind.HIDDEN),
        ("dt=1_$folder$", FileKind.HIDDEN),
    ],
)
def test_what_a_name_says(path: str, kind: FileKind) -> None:
    assert file_kind(path) is kind


def files(**sizes: int) -> list[SourceFile]:
    return [SourceFile(path.replace("__", "."), Identity(size, 1)) for path, size in sizes.items()]


def test_a_listing_is_divided_by_names() -> None:
    found = files(a__parquet=100, b=100, c=0, d=5, e__orc=100, f__orc=0, g__txt=100, _SUCCESS=0)
    parts = divide_listing(found)
    assert [[file.path for file in part] for part in (parts.taken, parts.unknown, parts.other)] == [
        ["a.parquet"], ["b"], ["d", "e.orc"],
    ]  # fmt: skip
    marked = divide_listing(found, FileRules(all_files=True, marker="d"))
    assert "d" not in {file.path for file in (*marked.taken, *marked.other)}
    everything = divide_listing(found, FileRules(all_files=True))
    assert {file.path for file in everything.taken} == {"a.parquet", "b", "c", "d", "e.orc", "f.orc", "g.txt"}
    assert not everything.unknown
    assert not everything.other


def test_what_is_passed_over_is_counted_and_half_of_a_table_is_refused() -> None:
    taken, none = files(a__parquet=100, b__parquet=100, c__parquet=100), FileRules()
    assert check_passed_over(taken, [], "lake", none) == ""
    assert check_passed_over(taken, files(x=50), "lake", none) == (
        "lake: 1 file without a Parquet suffix was not taken (x); --all-files takes them"
    )
    assert check_passed_over(taken, files(y=50, x=50), "lake", none) == (
        "lake: 2 files without a Parquet suffix were not taken (x); --all-files takes them"
    )
    unfinished = files(x__tmp=900, y__part=900)
    assert "2 files" in check_passed_over(taken, [], "lake", none, unfinished)
    assert "3 files" in check_passed_over(taken, files(z=50), "lake", none, unfinished)
    for passed in (files(x=300), files(x=1, y=1, z=1)):
        with pytest.raises(UsageError, match=r"would not be taken, beside 3 of Parquet; .*--all-files"):
            check_passed_over(taken, passed, "lake", none)
        assert check_passed_over(taken, passed, "lake", FileRules(as_files=True))
