"""Which files of a listing are a dataset's."""

from __future__ import annotations

import pytest

from pqcache.errors import UsageError
from pqcache.store.manifest import Identity, SourceFile
from pqcache.store.tables.data_files import FileRules, Kind, check_passed_over, divide, kind_of


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("dt=1/part-0.parquet", Kind.PARQUET),
        ("dt=1/PART.PARQUET", Kind.PARQUET),
        ("_id=1/a.parq", Kind.PARQUET),
        ("dt=1/000000_0", Kind.UNKNOWN),
        ("dt=1/000012_0_copy_3", Kind.UNKNOWN),
        ("dt=1/part-m-00000", Kind.UNKNOWN),
        ("dt=1/20261101_063012_00012_abcde_5f1e0b3a", Kind.UNKNOWN),
        ("dt=1/bucket_00000", Kind.UNKNOWN),
        ("part-00000-5f1e.c000", Kind.UNKNOWN),
        ("dt=1/part-0.orc", Kind.OTHER_DATA),
        ("dt=1/part-00000.json", Kind.OTHER_DATA),
        ("dt=1/part-0.parquet.gz", Kind.OTHER_DATA),
        ("dt=1/README", Kind.NO_DATA),
        ("metadata/snap-2089285893032715688-0-35b78f35-1911-4284-a123-317c0f7eef60.avro", Kind.NO_DATA),
        ("log/35b78f35-1911-4284-a123-317c0f7eef60-m0.avro", Kind.NO_DATA),
        ("metadata/20261101_00012.stats.puffin", Kind.NO_DATA),
        ("dt=1/35b78f35-1911-4284-a123-317c0f7eef60.avro", Kind.OTHER_DATA),
        ("lock", Kind.NO_DATA),
        ("schema.json", Kind.NO_DATA),
        ("dt=1/notes.txt", Kind.NO_DATA),
        ("dt=1/part-0.parquet.tmp", Kind.UNFINISHED),
        ("dt=1/part-0.part", Kind.UNFINISHED),
        ("dt=1/_SUCCESS", Kind.HIDDEN),
        ("dt=1/.part-0.parquet.crc", Kind.HIDDEN),
        ("_temporary/0/a.parquet", Kind.HIDDEN),
        ("dt=1/part-0.parquet._COPYING_", Kind.HIDDEN),
        ("dt=1_$folder$", Kind.HIDDEN),
    ],
)
def test_what_a_name_says(path: str, kind: Kind) -> None:
    assert kind_of(path) is kind


def files(**sizes: int) -> list[SourceFile]:
    return [SourceFile(path.replace("__", "."), Identity(size, 1)) for path, size in sizes.items()]


def test_a_listing_is_divided_by_names() -> None:
    found = files(a__parquet=100, b=100, c=0, d=5, e__orc=100, f__orc=0, g__txt=100, _SUCCESS=0)
    parts = divide(found)
    assert [[file.path for file in part] for part in (parts.taken, parts.unknown, parts.other)] == [
        ["a.parquet"], ["b"], ["d", "e.orc"],
    ]  # fmt: skip
    marked = divide(found, FileRules(all_files=True, marker="d"))
    assert "d" not in {file.path for file in (*marked.taken, *marked.other)}
    everything = divide(found, FileRules(all_files=True))
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
