"""Delta tables as Spark writes them: deletion vectors, column mapping, wider types, and what is refused by name."""

from __future__ import annotations

import datetime as dt
import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

import pqcache
from pqcache.errors import SourceError, UsageError
from tests.damage import flip
from tests.delta_tables import add, commit, field, held, in_order, judged, metadata, protocol, remove, vector
from tests.remote import make_remote

A = (field("a", "long"), field("s", "string"))
UUID = "80a083e8-7026-4e79-81be-64bd76c43a11"


def rows(start: int, stop: int) -> pa.Table:
    return pa.table({"a": pa.array(range(start, stop), pa.int64()), "s": [f"s{i}" for i in range(start, stop)]})


@pytest.fixture
def table(tmp_path: Path) -> Path:
    return tmp_path / "lake" / "t"


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def with_vectors(table: Path) -> None:
    """Write a table of four files, three of which have deletion vectors, stored in three ways."""
    files = [add(table, f"{number}.parquet", rows(100 * number, 100 * number + 100)) for number in range(4)]
    commit(table, 0, protocol("deletionVectors"), metadata(A), *files)
    for number, (deleted, kind, prefix) in enumerate((([0, 99], "u", ""), ([5], "u", "xY"), (range(50), "i", ""))):
        name, found = f"{number}.parquet", vector(table, deleted, kind, prefix)
        commit(table, number + 1, remove(name), add(table, name, deletionVector=found))


def test_rows_that_deletion_vectors_delete_are_not_fetched(table: Path, cache: Path) -> None:
    with_vectors(table)
    report = pqcache.sync(table, cache)
    assert (report.rows, report.version) == (400 - 2 - 1 - 50, "3")
    assert held(cache) == judged(table)
    assert not pqcache.sync(cache).published
    found = vector(table, [1, 2, 3], "p")
    commit(table, 4, remove("3.parquet"), add(table, "3.parquet", deletionVector=found))
    report = pqcache.sync(cache)
    assert (report.changed, report.unchanged, report.rows) == (1, 3, 344)
    more = vector(table, [1, 2, 3, 4])
    commit(table, 5, remove("3.parquet", found), add(table, "3.parquet", deletionVector=more))
    assert pqcache.sync(cache).rows == 343
    assert held(cache) == judged(table)
    flip(cache / "current" / "1.parquet", 50)
    assert pqcache.verify(cache, deep=True, source=True, repair=True).repaired
    assert held(cache) == judged(table), "a repair deletes the rows again"
    shutil.move(table, table.with_name("moved"))
    assert pqcache.sync(table.with_name("moved"), cache, new_source=True).fetched_bytes == 0


def test_deletion_vectors_with_columns_conditions_and_rewriting(table: Path, cache: Path) -> None:
    with_vectors(table)
    expected = judged(table)
    for columns, where, size in ((["s"], "a < 7", None), ([], "a >= 240", "1MB")):
        pqcache.sync(table, cache, force=True, columns=columns, where=where, row_group_size=size)
        kept = [row for row in expected if (row["a"] < 7 if columns else row["a"] >= 240)]
        assert held(cache) == in_order({k: v for k, v in row.items() if k in (columns or row)} for row in kept)


def test_a_file_of_which_every_row_is_deleted_and_one_with_many(table: Path, cache: Path) -> None:
    many = [add(table, "big.parquet", rows(0, 131_500)), add(table, "gone.parquet", rows(0, 10))]
    commit(table, 0, protocol("deletionVectors", "v2Checkpoint"), metadata(A), *many)
    deleted = [0, *range(3, 60_000, 7), 65_535, 65_536, *range(131_072, 131_172), 131_499]
    for number, (name, which) in enumerate((("big.parquet", deleted), ("gone.parquet", range(10)))):
        commit(table, number + 1, remove(name), add(table, name, deletionVector=vector(table, list(which))))
    assert pqcache.sync(table, cache).rows == 131_500 - len(deleted)
    found = pqcache.Cache.open(cache).batches(["a"], batch_size=200_000)
    assert {value for batch in found for value in batch["a"].to_pylist()} == set(range(131_500)) - set(deleted)


def test_deletion_vectors_that_cannot_be_right_are_refused(table: Path, cache: Path) -> None:
    with_vectors(table)
    before, found = None, vector(table, [1, 2])
    secret = table.parent / "secret"
    secret.write_bytes(b"root:x:0:0" * 20)
    for number, (about, text) in enumerate(
        (
            ({**found, "cardinality": 3}, r"3\.parquet: its deletion vector, .*: it deletes 2 rows, and 3 in the log"),
            ({**found, "offset": 0}, r"3\.parquet: its deletion vector, at 0 of .*, is damaged: its length or its"),
            ({**found, "offset": 3}, r"deletion_vector_.*\.bin: has .* bytes, and its table needs at least "),
            ({**found, "pathOrInlineDv": "x"}, r"3\.parquet: its deletion vector is damaged"),
            (
                {**found, "sizeInBytes": 2**31 - 1},
                r"deletion_vector_.*\.bin: has .* bytes, and its table needs at least 268,",
            ),
            (vector(table, [100]), r"3\.parquet: its table deletes row 100 of it, and it has 100"),
            (
                {**found, "storageType": "p", "pathOrInlineDv": secret.as_uri(), "offset": 0},
                r"3\.parquet: its deletion vector.* is damaged: its length or its checksum is wrong; check the table",
            ),
            ({**found, "storageType": "p", "pathOrInlineDv": (table / "no.bin").as_uri()}, r"3\.parquet: vanished"),
        )
    ):
        commit(table, 4 + number, remove("3.parquet", before), add(table, "3.parquet", deletionVector=about))
        before = about
        with pytest.raises(pqcache.PqcacheError, match=text):
            pqcache.sync(table, cache)
    commit(table, 5 + number, remove("3.parquet", before), add(table, "3.parquet", deletionVector=found, stats="{}"))
    assert pqcache.sync(table, cache).rows == 400 - 2 - 1 - 50 - 2, "the log need not say how many rows a file has"


MAPPED = (
    field("id", "long", **{"delta.columnMapping.id": 1, "delta.columnMapping.physicalName": "col-1"}),
    field("day", "date", **{"delta.columnMapping.id": 2, "delta.columnMapping.physicalName": "col-2"}),
    field(
        "user",
        {
            "type": "struct",
            "fields": [
                field("age", "integer", **{"delta.columnMapping.id": 4, "delta.columnMapping.physicalName": "col-4"}),
                field("name", "string", **{"delta.columnMapping.id": 5, "delta.columnMapping.physicalName": "col-5"}),
            ],
        },
        **{"delta.columnMapping.id": 3, "delta.columnMapping.physicalName": "col-3"},
    ),
    field(
        "tags",
        {"type": "array", "elementType": "string", "containsNull": True},
        **{"delta.columnMapping.id": 6, "delta.columnMapping.physicalName": "col-6"},
    ),
)


def physical(mode: str) -> pa.Table:
    """Rows as a file has them: under names of its own, or under any names with field IDs."""

    def of(name: str, number: int, kind: pa.DataType) -> pa.Field:
        return pa.field(name, kind, metadata={"PARQUET:field_id": str(number)})

    shift = "x" if mode == "id" else "col"
    user = pa.struct([of(f"{shift}-5", 5, pa.string()), of(f"{shift}-4", 4, pa.int32())])
    schema = [
        of(f"{shift}-6", 6, pa.list_(pa.string())),
        of(f"{shift}-3", 3, user),
        of(f"{shift}-1", 1, pa.int64()),
        of("extra", 9, pa.int64()),
    ]
    values = [[["a"], None], [{f"{shift}-5": "n", f"{shift}-4": 7}, None], [1, 2], [8, 9]]
    return pa.table([pa.array(v, f.type) for v, f in zip(values, schema, strict=True)], schema=pa.schema(schema))


@pytest.mark.parametrize("mode", ["name", "id"])
def test_columns_have_the_names_of_the_table(mode: str, table: Path, cache: Path) -> None:
    by = {"partitionValues": {"col-2": "2026-11-01"}}
    files = [add(table, f"{number}.parquet", physical(mode), **by) for number in range(2)]
    mapping = {"columnMapping__mode": mode, "columnMapping__maxColumnId": "9"}
    commit(table, 0, protocol("columnMapping"), metadata(MAPPED, ["day"], **mapping), *files)
    assert pqcache.sync(table, cache).rows == 4
    user, day = {"age": 7, "name": "n"}, dt.date(2026, 11, 1)
    full = [{"id": 1, "day": day, "user": user, "tags": ["a"]}, {"id": 2, "day": day, "user": None, "tags": None}]
    assert held(cache) == in_order(full * 2)
    assert mode == "id" or held(cache) == judged(table)  # deltalake 1.6 takes the physical name in both modes
    assert {path.parent.name for path in (cache / "current").glob("day=*/*")} == {"day=2026-11-01"}
    assert [row["id"] for row in held(cache, columns=["id"], filters="user.age = 7 and day = '2026-11-01'")] == [1, 1]
    renamed = json.loads(json.dumps(MAPPED).replace('"name": "id"', '"name": "key"').replace('"age"', '"years"'))
    commit(table, 1, metadata(renamed[:3], ["day"], **mapping))  # and the last column is dropped
    assert pqcache.sync(cache).changed == 2
    assert [(row["key"], row["user"]) for row in held(cache)] == [(1, {"name": "n", "years": 7})] * 2 + [(2, None)] * 2
    assert mode == "id" or held(cache) == judged(table)
    assert set(held(cache)[0]) == {"key", "user", "day"}
    assert not pqcache.sync(cache).published
    added = field("more", "long", **{"delta.columnMapping.id": 10, "delta.columnMapping.physicalName": "col-10"})
    commit(table, 2, metadata([*renamed[:3], added], ["day"], **mapping))
    pqcache.sync(cache)
    assert {row["more"] for row in held(cache)} == {None}
    pqcache.sync(cache, force=True, columns=["key", "more"], where="key = 1 and more is null", row_group_size="1MB")
    assert held(cache, columns=["key", "more"]) == [{"key": 1, "more": None}] * 2


def test_columns_of_change_data_and_of_row_tracking_are_not_the_tables(table: Path, cache: Path) -> None:
    more = rows(0, 3).append_column("_change_type", pa.array([None] * 3, pa.string()))
    commit(table, 0, protocol(), metadata(A, enableChangeDataFeed="true"), add(table, "0.parquet", more))
    pqcache.sync(table, cache)
    assert held(cache) == judged(table) == rows(0, 3).to_pylist()
    commit(table, 1, add(table, "1.parquet", more.slice(1)))
    commit(table, 2, metadata([*A, field("later", "long")], enableChangeDataFeed="true"))
    report = pqcache.sync(cache)
    assert (report.added, report.unchanged) == (1, 1), "a column that is added later changes no file"
    assert held(cache) == judged(table)


def test_types_that_became_wider(table: Path, cache: Path) -> None:
    kinds = {"a": pa.int8(), "b": pa.float32(), "c": pa.int32()}
    narrow = pa.table({name: pa.array([1], kind) for name, kind in kinds.items()})
    wide = pa.table({"a": pa.array([2**40], pa.int64()), "b": pa.array([1e300]), "c": pa.array([0.5])})
    fields = [field("a", "byte"), field("b", "float"), field("c", "integer")]
    commit(table, 0, protocol("typeWidening"), metadata(fields), add(table, "0.parquet", narrow))
    pqcache.sync(table, cache)
    changes = {"delta.typeChanges": [{"fromType": "byte", "toType": "long"}]}
    later = [field("a", "long", **changes), field("b", "double"), field("c", "double")]
    commit(table, 1, metadata(later))
    pqcache.sync(cache)
    [batch] = pqcache.Cache.open(cache).batches()
    assert batch.schema.types == [pa.int64(), pa.float64(), pa.float64()]
    commit(table, 2, add(table, "1.parquet", wide))
    pqcache.sync(cache)
    assert held(cache) == sorted(narrow.to_pylist() + wide.to_pylist(), key=repr)
    to_time = {"delta.typeChanges": [{"fromType": "date", "toType": "timestamp_ntz"}]}
    nested = {"type": "array", "elementType": {"type": "struct", "fields": [field("t", "timestamp_ntz", **to_time)]}}
    for changed in (field("d", "timestamp_ntz", **to_time), field("d", {**nested, "containsNull": True})):
        commit(table, 3, protocol("typeWidening", "timestampNtz"), metadata([*later, changed]))
        with pytest.raises(UsageError, match="column 'd' was dates and is timestamps now"):
            pqcache.sync(cache)


@pytest.mark.parametrize(
    ("actions", "text"),
    [
        ([protocol("fooBar"), metadata(A)], "fooBar"),
        ([protocol("variantType"), metadata(A)], "is a Delta table with variantType, so its rows"),
        ([protocol("columnMapping", reader=4), metadata(A)], "unknown reader version, 4|deltalake cannot read its log"),
        ([protocol("catalogManaged"), metadata(A)], "deltalake cannot read its log"),
        ([protocol(), metadata(A, columnMapping__mode="other")], "column mapping|deltalake cannot read its log"),
        ([protocol(), metadata([*A, field("b", "binary")], ["b"])], "partition column 'b' is binary"),
        ([protocol(), metadata([*A, field("g", "geometry")])], "deltalake cannot read its log"),
        ([metadata(A)], "deltalake cannot read its log"),
    ],
)
def test_what_would_not_come_out_right_is_refused(actions: list[Any], text: str, table: Path, cache: Path) -> None:
    commit(table, 0, *actions, add(table, "0.parquet", rows(0, 3), partitionValues={"b": "x"}))
    with pytest.raises((UsageError, SourceError), match=text) as error:
        pqcache.sync(table, cache)
    assert "\n" not in str(error.value)
    assert not (cache / "current").exists()


@pytest.mark.parametrize("kind", ["path", pytest.param("s3", marks=pytest.mark.s3)])
def test_a_checkpoint_that_names_other_files(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    table, log = tmp_path / "t", tmp_path / "t" / "_delta_log"
    with_vectors(table)
    DeltaTable(table).create_checkpoint()
    whole = log / f"{3:020}.checkpoint.parquet"
    files = pq.read_table(whole, columns=["add"])
    sidecar = log / "_sidecars" / f"{UUID}.parquet"
    sidecar.parent.mkdir()
    pq.write_table(files.filter(files["add"].is_valid()), sidecar)
    about = {"path": sidecar.name, "sizeInBytes": sidecar.stat().st_size, "modificationTime": 0}
    for file in (whole, log / "_last_checkpoint", *(log / f"{version:020}.json" for version in range(4))):
        file.unlink()
    features = protocol("deletionVectors", "v2Checkpoint")
    actions = ({"checkpointMetadata": {"version": 3}}, features, metadata(A), {"sidecar": about})
    (log / f"{3:020}.checkpoint.{UUID}.json").write_text("".join(json.dumps(action) + "\n" for action in actions))
    commit(table, 4, remove("3.parquet"))
    for remote in make_remote(kind, request, tmp_path):
        remote.upload(table)
        assert pqcache.sync(remote.url, tmp_path / "cache").rows == 347 - 100
        assert held(tmp_path / "cache") == judged(table)
