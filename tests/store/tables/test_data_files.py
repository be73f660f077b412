"""Which files of a listing are a dataset's."""

from __future__ import annotations

import pytest

from pqcache.store.tables.data_files import FileKind, file_kind


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
