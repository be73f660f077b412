"""Tables without a catalog: which metadata file is the newest, tables that were moved, and those of other projects."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.io.pyarrow import PyArrowFileIO
from pyiceberg.table import StaticTable
from pyiceberg.table.metadata import TableMetadataUtil

import pqcache
from pqcache.errors import PqcacheError, SourceError, SourceNotFound, UsageError
from pqcache.store.tables.base import OpenOptions
from pqcache.store.tables.iceberg_open import newest_metadata
from pqcache.store.tables.open_table import open_table
from tests.real_files import golden_tables
from tests.store.tables.iceberg.lakes import Lake, local, place, rows, rows_in, rows_of

UUID = "0fd95d6d-ea2d-47ed-91d1-fcdbe51693ce"
OTHER = "1fd95d6d-ea2d-47ed-91d1-fcdbe51693ce"


@pytest.mark.parametrize(
    ("names", "hint", "newest"),
    [
        (["v1.metadata.json", "v10.metadata.json", "v9.metadata.json"], None, "v10.metadata.json"),
        (["v1.metadata.json", "v2.metadata.json", "v3.metadata.json"], "1\n", "v3.metadata.json"),
        (["v1.metadata.json", "v2.gz.metadata.json"], "1", "v2.gz.metadata.json"),
        (["v1.metadata.json", "v2.metadata.json.gz"], "2", "v2.metadata.json.gz"),
        ([f"00009-{UUID}.metadata.json", f"00010-{OTHER}.gz.metadata.json"], None, f"00010-{OTHER}.gz.metadata.json"),
        (
            [f"00001-{UUID}.metadata.json", f"00001-{OTHER}.metadata.json"],
            f"00001-{UUID}",
            f"00001-{UUID}.metadata.json",
        ),
        (["last.metadata.json"], None, "last.metadata.json"),
        (["snap-1.avro", "v1.metadata.json", "v2.metadata.json.tmp"], None, "v1.metadata.json"),
    ],
)
def test_the_newest_metadata_file(names: list[str], hint: str | None, newest: str) -> None:
    assert newest_metadata(names, hint, "lake") == newest


@pytest.mark.parametrize(
    ("names", "hint", "error", "said"),
    [
        ([f"00003-{UUID}.metadata.json", f"00003-{OTHER}.metadata.json"], None, UsageError, f"lake/00003-{OTHER}"),
        (["v2.metadata.json", f"00003-{UUID}.metadata.json"], "2", UsageError, "only a catalog knows"),
        (["v2.metadata.json", "v2.gz.metadata.json"], None, UsageError, "both v2.gz.* and v2"),
        (["v2.metadata.json", "last.metadata.json"], None, UsageError, "both last.* and v2"),
        (["v1.metadata.json"], "7", SourceError, "names '7', which is not there; name a metadata file: lake/v1"),
        (["snap-1.avro"], None, SourceNotFound, "has no metadata file"),
    ],
)  # fmt: skip
def test_what_may_not_be_the_newest_is_refused(names: list[str], hint: str | None, error: type, said: str) -> None:
    with pytest.raises(error, match=said):
        newest_metadata(names, hint, "lake")


def sold(first: int) -> pa.Table:
    return pa.table({"id": pa.array(range(first, first + 5), pa.int64()), "kind": ["a", "b", "a", "b", "c"]})


def test_two_writers_are_distinguished_by_a_metadata_file(lake: Lake, tmp_path: Path) -> None:
    table = lake.create("two", sold(0).schema, by=["kind"])
    table.append(sold(0))
    before = local(table.refresh().metadata_location)
    first = table.current_snapshot()
    assert first is not None
    table.append(sold(5))
    after = local(table.refresh().metadata_location)
    number = after.name.partition("-")[0]
    rival = shutil.copy(before, before.with_name(f"{number}-{UUID}.metadata.json"))
    with pytest.raises(UsageError, match=r"name one: .*\.metadata\.json"):
        pqcache.sync(place(table), tmp_path / "cache")
    pqcache.sync(str(after), tmp_path / "cache")
    assert rows_of(tmp_path / "cache") == rows_in(table)
    pqcache.sync(f"file://{rival}", tmp_path / "cache", force=True, new_source=True)
    assert rows_of(tmp_path / "cache") == rows_in(table, first.snapshot_id)


def test_a_moved_table_is_read_where_an_option_says(lake: Lake, tmp_path: Path) -> None:
    table = lake.create("here", sold(0).schema, by=["kind"])
    table.append(sold(0))
    pqcache.sync(place(table), tmp_path / "cache")
    moved = tmp_path / "moved"
    shutil.copytree(place(table), moved)
    with pytest.raises(UsageError, match=r"is not at the location in its metadata: .*-o moved=true .*-o moved=false"):
        pqcache.sync(moved, tmp_path / "other")
    kept = [file.stat().st_ino for file in (tmp_path / "cache/current/").rglob("*.parquet")]
    report = pqcache.sync(moved, tmp_path / "cache", options={"moved": "true"}, new_source=True)
    assert report.added == report.changed == 0, "its files are the same"
    assert [file.stat().st_ino for file in (tmp_path / "cache/current/").rglob("*.parquet")] == kept
    shutil.rmtree(moved / "data")
    pqcache.sync(moved, tmp_path / "there", options={"moved": "false"})
    assert rows_of(tmp_path / "there") == rows_in(table)
    link = tmp_path / "link"
    link.symlink_to(place(table))
    pqcache.sync(link, tmp_path / "linked")
    assert rows_of(tmp_path / "linked") == rows_in(table)
    with pytest.raises(UsageError, match="is not an Iceberg table, for -o moved"):
        pqcache.sync(moved / "metadata", tmp_path / "none", options={"moved": "true"}, as_files=True)


def test_metadata_may_be_compressed_damaged_or_of_a_later_format(lake: Lake, tmp_path: Path) -> None:
    table = lake.create("metadata", sold(0).schema)
    table.append(sold(0))
    newest = local(table.refresh().metadata_location)
    said = json.loads(newest.read_bytes())
    for name in ("v1.gz.metadata.json", "v1.metadata.json.gz"):
        (newest.parent / name).write_bytes(gzip.compress(newest.read_bytes()))
        pqcache.sync(newest.parent / name, tmp_path / name)
        assert rows_of(tmp_path / name) == rows_in(table)
        (newest.parent / name).unlink()
    changes: list[tuple[bytes, type[PqcacheError], str]] = [
        (json.dumps({**said, "format-version": 4}).encode(), UsageError, "is of version 4 of Iceberg's format"),
        (newest.read_bytes()[:-50], SourceError, "pyiceberg cannot read it"),
        (b"\x1f\x8bxx", SourceError, "is not metadata of an Iceberg table"),
        (b"[]", SourceError, "pyiceberg cannot read it"),
        (json.dumps({**said, "schemas": []}).encode(), SourceError, "pyiceberg cannot read it"),
    ]
    for data, error, match in changes:
        newest.write_bytes(data)
        with pytest.raises(error, match=match):
            pqcache.sync(place(table), tmp_path / "cache")
    newest.write_text(json.dumps(said))
    manifest = next(newest.parent.glob("*-m0.avro"))
    good = manifest.read_bytes()
    for data in (*(good[:size] for size in range(0, len(good), 97)), b"{" + good, good[:-1] + bytes([good[-1] ^ 1])):
        manifest.write_bytes(data)
        with pytest.raises(SourceError, match="this manifest is damaged"):
            pqcache.sync(place(table), tmp_path / "cache")
    manifest.unlink()
    with pytest.raises(SourceNotFound, match=r"m0\.avro: no such file"):
        pqcache.sync(place(table), tmp_path / "cache")


def test_metadata_that_a_writer_removes_meanwhile(lake: Lake) -> None:
    table = lake.create("cleaned", sold(0).schema)
    table.append(sold(0))
    source = open_table(place(table), OpenOptions())  # which lists the metadata files
    older = list((local(table.location()) / "metadata").glob("*.metadata.json"))
    table.append(sold(5))
    for file in older:
        file.unlink()
    assert len(list(source.list())) == 2
    source.close()


def test_metadata_that_a_writer_completes_meanwhile(
    lake: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = lake.create("arriving", sold(0).schema)
    table.append(sold(0))
    file, parse = local(table.metadata_location), TableMetadataUtil.parse_raw
    complete = file.read_bytes()

    def completed(text: str) -> Any:
        file.write_bytes(complete)
        return parse(text)

    monkeypatch.setattr(TableMetadataUtil, "parse_raw", completed)
    file.write_bytes(b"")
    pqcache.sync(place(table), tmp_path / "cache")
    assert rows_of(tmp_path / "cache") == rows_in(table)


def test_a_default_for_rows_before_a_column_is_refused(lake: Lake, tmp_path: Path) -> None:
    table = lake.create("defaults", sold(0).schema)
    table.append(sold(0))
    newest = local(table.refresh().metadata_location)
    said = json.loads(newest.read_bytes())
    fields = [*said["schemas"][0]["fields"],
              {"id": 3, "name": "new", "type": "int", "required": False, "initial-default": 5}]  # fmt: skip
    added = {**said["schemas"][0], "schema-id": 1, "fields": fields}
    more = {"format-version": 3, "next-row-id": 10, "schemas": [*said["schemas"], added], "current-schema-id": 1}
    newest.write_text(json.dumps({**said, **more}))
    with pytest.raises(UsageError, match="column 'new' was added with a default value"):
        pqcache.sync(place(table), tmp_path / "cache")


def test_a_table_below_a_directory_and_a_part_of_one_are_refused(lake: Lake, tmp_path: Path) -> None:
    table = lake.create("part", sold(0).schema, by=["kind"])
    table.append(sold(0))
    for source in (Path(place(table)).parent, Path(place(table)) / "data", Path(place(table)) / "data" / "kind=a"):
        with pytest.raises(UsageError, match="Iceberg table"):
            pqcache.sync(source, tmp_path / "cache")
    report = pqcache.sync(place(table), tmp_path / "cache", as_files=True)
    assert report.rows == 5


@pytest.mark.parametrize(
    ("name", "version", "count"),
    [
        ("merch_v1", None, 4),
        ("merch_v1", 381223374871251311, 6),
        ("case_sensitive_names", None, 3),
        ("legacy_bare_deletion_vector", None, 2),
    ],
)
def test_tables_of_other_projects(name: str, version: int | None, count: int, tmp_path: Path) -> None:
    source = next((path for path in golden_tables().rglob(name) if (path / "metadata").is_dir()), None)
    if source is None:
        pytest.skip("PQCACHE_GOLDEN_TABLES names no directory with the tables of duckdb-iceberg")
    pqcache.sync(source, tmp_path / "cache", options={"moved": "true"}, version=version)
    found = rows_of(tmp_path / "cache")
    assert len(found) == count
    if name == "legacy_bare_deletion_vector":  # which is as DuckDB wrote it before there was a Puffin file around it
        assert [dict(row)["id"] for row in found] == ["1", "3"]
        return

    class Moved(PyArrowFileIO):
        def new_input(self, location: str) -> Any:
            return super().new_input(str(source) + location.removeprefix(table.location()))

    newest = max(source.glob("metadata/*.metadata.json"), key=lambda file: file.name)
    table = StaticTable.from_metadata(str(newest))
    table.io = Moved()
    assert found == rows(table.scan(snapshot_id=version).to_arrow().to_batches())
