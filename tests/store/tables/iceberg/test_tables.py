"""Caches of Iceberg tables have the rows that pyiceberg reads of the same snapshot, whatever the table went through."""

from __future__ import annotations

import datetime
import random
import re
import uuid
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.expressions import EqualTo
from pyiceberg.table import Table
from pyiceberg.table.name_mapping import MappedField, NameMapping
from pyiceberg.transforms import BucketTransform, MonthTransform, TruncateTransform
from pyiceberg.types import DoubleType, LongType, StringType

import pqcache
from pqcache.errors import ParquetError, PqcacheError, SourceIncomplete, SourceNotFound, UsageError
from tests.forked_commands import run_pqcache
from tests.store.tables.iceberg.lakes import (
    Lake,
    as_avro,
    change_blocks,
    commit,
    data_file,
    described,
    local,
    place,
    position_deletes,
    rows_in,
    rows_of,
)

DAYS = [datetime.date(2026, 11, day) for day in (1, 2, 3)]


def shop(first: int, count: int) -> pa.Table:
    ids = range(first, first + count)
    return pa.table(
        {
            "id": pa.array(ids, pa.int32()),
            "day": pa.array([DAYS[i % 3] for i in ids]),
            "region": pa.array([("kr", None, "a/b=c d", "")[i % 4] for i in ids]),
            "price": pa.array([i / 2 for i in ids], pa.float32()),
            "cost": pa.array([Decimal(i) / 100 for i in ids], pa.decimal128(9, 2)),
            "place": pa.array(
                [{"city": f"c{i}", "zip": i} for i in ids], pa.struct([("city", "string"), ("zip", "int32")])
            ),
            "tags": pa.array([[f"t{j}" for j in range(i % 3)] for i in ids], pa.list_(pa.string())),
        }
    )


def test_a_table_of_a_catalog_and_its_directory_are_the_same(lake: Lake, tmp_path: Path) -> None:
    table = lake.create("sales", shop(0, 1).schema, by=["day", "region"])
    table.append(shop(0, 40))
    first = pqcache.sync("iceberg://lake/shop.sales", tmp_path / "a")
    assert rows_of(tmp_path / "a") == rows_in(table)
    assert not pqcache.sync(tmp_path / "a").published
    assert first.rows == 40
    pqcache.sync(place(table), tmp_path / "b")
    files = [sorted(str(file.relative_to(path / "current")) for file in (path / "current").rglob("*.parquet"))
             for path in (tmp_path / "a", tmp_path / "b")]  # fmt: skip
    assert files[0] == files[1]
    assert {str(Path(file).parent) for file in files[0]} == {
        f"day={day}{region}" for day in DAYS for region in ("/region=kr", "/region=__HIVE_DEFAULT_PARTITION__",
                                                       "/region=a%2Fb%3Dc d", "")
    }  # fmt: skip
    table.append(shop(40, 5))
    assert pqcache.sync(tmp_path / "a").added == len(list(table.refresh().scan().plan_files())) - len(files[0])
    assert rows_of(tmp_path / "a") == rows_in(table)
    assert rows_of(tmp_path / "a", filters="day = DATE '2026-11-02' AND region = 'kr'") == rows_in(
        table, row_filter="day = '2026-11-02' AND region = 'kr'"
    )


def test_partition_values_of_every_type_are_typed(lake: Lake, tmp_path: Path) -> None:
    moment = datetime.datetime(2026, 11, 1, 12, 30, 0, 123456)
    columns = {
        "flag": (pa.bool_(), [True, False, None]),
        "small": (pa.int32(), [1, -(2**31), None]),
        "big": (pa.int64(), [2**63 - 1, 7, None]),
        "money": (pa.decimal128(20, 3), [Decimal("-1.500"), Decimal("0.001"), None]),
        "date": (pa.date32(), [datetime.date(1960, 2, 29), DAYS[0], None]),
        "at": (pa.timestamp("us"), [moment, datetime.datetime(1950, 1, 1), None]),
        "zoned": (pa.timestamp("us", "UTC"), [moment, moment, None]),
        "text": (pa.string(), ["007", "__HIVE_DEFAULT_PARTITION__", "%/\n\u20ac'"]),
        "time": (pa.time64("us"), [datetime.time(1, 2, 3), None, None]),
        "single": (pa.float32(), [0.1, 1e30, None]),
        "double": (pa.float64(), [0.1, float("inf"), None]),
        "raw": (pa.binary(), [b"\0\xff", b"", None]),
    }
    data = pa.table({name: pa.array(values, kind) for name, (kind, values) in columns.items()})
    data = data.append_column("id", pa.array(range(3), pa.int64()))
    in_files = ["time", "single", "double", "raw"]
    for kind, names in (("paths", [name for name in columns if name not in in_files]), ("files", in_files)):
        table, cache = lake.create(kind, data.schema, by=names), tmp_path / kind
        table.append(data)
        pqcache.sync(place(table), cache)
        assert rows_of(cache) == rows_in(table)
        schema = next(pqcache.Cache.open(cache).batches(names)).schema
        assert {name: schema.field(name).type for name in names} == {name: columns[name][0] for name in names}
        current = (cache / "current").resolve()
        directories = {part for file in current.rglob("*.parquet") for part in file.parent.relative_to(current).parts}
        assert {part.partition("=")[0] for part in directories} == (set(names) if kind == "paths" else set())


def test_a_value_too_long_for_a_path_is_in_the_file_alone(lake: Lake, tmp_path: Path) -> None:
    long, short = "x" * 300, "\u20ac" * 20
    data = pa.table({"name": [long], "id": pa.array([1], pa.int64())})
    table = lake.create("long", data.schema, by=["name"])
    table.refresh()
    commit(table, [data_file(table, data, [long], value_counts={1: 1, 2: 1}),
                   data_file(table, data.set_column(0, "name", pa.array([short])), [short])])  # fmt: skip
    pqcache.sync(place(table), tmp_path / "cache")
    assert rows_of(tmp_path / "cache") == rows_in(table)
    assert [path.name for path in (tmp_path / "cache" / "current").glob("*=*")] == [f"name={short}"]


def test_specs_side_by_side(lake: Lake, tmp_path: Path) -> None:
    """Values of columns are in paths, and those of hidden partitions are in the files."""
    table = lake.create("evolving", shop(0, 1).schema)

    def hide(spec: Any) -> None:
        spec.add_field("id", BucketTransform(4), "bucket")
        spec.add_field("day", MonthTransform(), "month")
        spec.add_field("region", TruncateTransform(1), "first")

    steps: list[Callable[[Any], object]] = [
        lambda spec: spec.add_identity("region"),
        lambda spec: spec.add_identity("day"),
        lambda spec: spec.remove_field("region"),
        hide,
    ]
    table.append(shop(0, 10))
    for number, change in enumerate(steps, 1):
        with table.update_spec() as spec:
            change(spec)
        table.refresh()
        if change is not hide:
            table.append(shop(number * 10, 10))
    pqcache.sync(place(table), tmp_path / "cache")
    assert rows_of(tmp_path / "cache") == rows_in(table)
    commit(table, [data_file(table, shop(40, 1), [20759, 1, 682, "k"])])
    pqcache.sync(place(table), tmp_path / "cache")
    assert rows_of(tmp_path / "cache") == rows_in(table)
    parts = {part.partition("=")[0] for file in (tmp_path / "cache/current/").rglob("*.parquet") for part in file.parts}
    assert {"region", "day"} <= parts
    assert not {"bucket", "month", "first"} & parts
    for filters in ("day = DATE '2026-11-02'", "region IS NULL AND day > DATE '2026-11-01'"):
        plain = filters.replace("DATE ", "")
        assert rows_of(tmp_path / "cache", filters=filters) == rows_in(table, row_filter=plain)


def evolve(table: Table) -> None:
    """Rename, drop, add, move and widen columns, also inside of a struct, with rows before, between and after."""
    table.append(shop(0, 6))
    with table.update_schema() as change:
        change.rename_column("price", "paid")
        change.rename_column("place.city", "town")
        change.delete_column("place.zip")
        change.delete_column("tags")
        change.add_column("note", StringType())
        change.add_column(("place", "country"), StringType())
    with table.update_schema() as change:
        change.move_first("note")
        change.update_column("id", LongType())
        change.update_column("paid", DoubleType())
    table.refresh()
    more = shop(6, 6).drop_columns(["price", "place", "tags"])
    more = more.set_column(0, "id", more["id"].cast("int64")).append_column("note", pa.array(["n"] * 6))
    more = more.append_column("paid", pa.array([2.5] * 6, pa.float64()))
    table.append(more.append_column("place", pa.array([{"town": "x", "country": "kr"}] * 6)))
    with table.update_schema() as change:
        change.add_column("tags", StringType())  # another column of an old name
    table.refresh()
    table.append(more.append_column("tags", pa.array(["new"] * 6)).drop_columns(["paid"]))


def test_columns_that_were_renamed_dropped_added_moved_and_widened(lake: Lake, tmp_path: Path) -> None:
    table = lake.create("columns", shop(0, 1).schema, by=["day"])
    evolve(table)
    pqcache.sync(place(table), tmp_path / "cache")
    assert rows_of(tmp_path / "cache") == rows_in(table)
    schema = next(pqcache.Cache.open(tmp_path / "cache").batches()).schema
    assert [schema.field(name).type for name in ("id", "paid", "day")] == [pa.int64(), pa.float64(), pa.date32()]
    pqcache.sync(
        place(table), tmp_path / "part", where="paid > 1 AND note = 'n'", columns=["id", "tags", "paid", "note"]
    )
    kept = rows_in(table, row_filter="paid > 1 AND note = 'n'", selected_fields=("id", "tags", "paid", "note"))
    assert rows_of(tmp_path / "part", columns=["id", "tags", "paid", "note"]) == kept
    pqcache.sync(place(table), tmp_path / "large", row_group_size="64KB")
    assert rows_of(tmp_path / "large") == rows_in(table)
    first = table.metadata.snapshots[0].snapshot_id
    pqcache.sync(place(table), tmp_path / "cache", version=first, force=True)
    assert rows_of(tmp_path / "cache") == rows_in(table, first)


def test_files_without_field_ids_are_read_by_the_name_mapping(lake: Lake, tmp_path: Path) -> None:
    data = pa.table({"id": pa.array([1, 2], pa.int64()), "name": ["a", "b"]})
    table = lake.create("mapped", data.schema)
    commit(table, [data_file(table, data, ids=False)])
    with table.update_schema() as change:
        change.rename_column("name", "label")
    with pytest.raises(PqcacheError, match="no field IDs"):
        pqcache.sync(place(table), tmp_path / "cache")
    mapping = NameMapping(
        [MappedField(**{"field-id": 1}, names=["id"]), MappedField(**{"field-id": 2}, names=["name"])]
    )
    with table.transaction() as change:
        change.set_properties({"schema.name-mapping.default": mapping.model_dump_json()})
    pqcache.sync(place(table), tmp_path / "cache")
    assert rows_of(tmp_path / "cache") == rows_in(table)
    assert ("label", "'a'") in rows_of(tmp_path / "cache")[0]


def test_a_partition_column_that_files_lack_comes_from_the_path(lake: Lake, tmp_path: Path) -> None:
    data = pa.table({"id": pa.array([1, 2], pa.int64()), "day": DAYS[:2], "rate": [0.5, 1.5]})
    table = lake.create("hive", data.schema, by=["day"])
    table.refresh()
    commit(table, [data_file(table, data.drop_columns(["day"]), [20758])])
    pqcache.sync(place(table), tmp_path / "cache")
    assert rows_of(tmp_path / "cache") == rows_in(table)
    with table.update_spec() as spec:
        spec.add_identity("rate")
    table.refresh()
    commit(table, [data_file(table, data.drop_columns(["day", "rate"]), [20759, 0.5])])
    with pytest.raises(UsageError, match="may lack the column 'rate', whose value in it"):
        pqcache.sync(tmp_path / "cache")


def test_position_deletes_are_applied_while_files_are_fetched(lake: Lake, tmp_path: Path) -> None:
    table = lake.create("deletes", shop(0, 1).schema)
    commit(table, [data_file(table, shop(start, 30)) for start in (0, 30, 60)])
    pqcache.sync(place(table), tmp_path / "cache")
    uris = sorted(task.file.file_path for task in table.scan().plan_files())
    commit(table, [position_deletes(table, [(uris[0], 3), (uris[0], 3), (uris[1], 29)])])
    commit(table, [position_deletes(table, [(uris[0], row) for row in range(20, 30)] + [(uris[0], 0)])])
    commit(table, [data_file(table, shop(90, 5))])  # younger than the deletes
    report = pqcache.sync(tmp_path / "cache")
    assert rows_of(tmp_path / "cache") == rows_in(table)
    assert report.rows == 95 - 1 - 1 - 11
    pqcache.repartition("iceberg://lake/shop.deletes", tmp_path / "plain", row_group_size="64KB")
    pqcache.sync(tmp_path / "plain", tmp_path / "of_plain")
    assert rows_of(tmp_path / "of_plain") == rows_in(table)
    pqcache.sync(place(table), tmp_path / "part", where="id >= 25 AND price < 40", columns=["id"])
    kept = rows_in(table, row_filter="id >= 25 AND price < 40", selected_fields=("id",))
    assert rows_of(tmp_path / "part") == kept
    commit(table, [position_deletes(table, [(uris[2], row) for row in range(30)])])
    pqcache.sync(tmp_path / "cache")
    assert rows_of(tmp_path / "cache") == rows_in(table)


def test_what_cannot_be_read_right_is_refused_by_name(lake: Lake, tmp_path: Path) -> None:
    from pyiceberg.manifest import DataFileContent, FileFormat

    data = pa.table({"id": pa.array([1, 2], pa.int64())})

    def refused(name: str, match: str, *files: Any, error: type[PqcacheError] = UsageError) -> None:
        table = lake.create(name, data.schema)
        commit(table, [data_file(table, data)])
        commit(table, [make(table) for make in files])
        with pytest.raises(error, match=match):
            pqcache.sync(place(table), tmp_path / name)
        assert not (tmp_path / name / "current").exists()

    def other(**more: Any) -> Any:
        def make(table: Table) -> Any:
            path = Path(place(table)) / "data" / f"x-{uuid.uuid4()}.bin"
            path.write_bytes(b"x" * 100)
            return described(table, path, 2, **more)

        return make

    refused("orc", r"is a data file of an Iceberg table in ORC", other(file_format=FileFormat.ORC))
    refused("avro", r"is a data file of an Iceberg table in AVRO", other(file_format=FileFormat.AVRO))
    refused("keyed", "is an encrypted file", other(key_metadata=b"k"))
    deletes = DataFileContent.POSITION_DELETES
    refused("old", "is a delete file of an Iceberg table in AVRO", other(file_format=FileFormat.AVRO, content=deletes))
    equality = DataFileContent.EQUALITY_DELETES
    refused("equal", "equality deletes: .*rewrite_data_files", other(content=equality, equality_ids=[1]))
    refused("damaged", "delete file cannot be read", other(content=deletes), error=PqcacheError)
    table = lake.create("twice", data.schema)
    file = data_file(table, data)
    commit(table, [file, file])
    with pytest.raises(UsageError, match=r"has the file .* twice"):
        pqcache.sync(place(table), tmp_path / "twice")


def test_versions_are_snapshots_tags_and_times(lake: Lake, tmp_path: Path) -> None:
    table = lake.create("versions", shop(0, 1).schema)
    with pytest.raises(SourceIncomplete):
        pqcache.sync(place(table), tmp_path / "cache")
    for start in (0, 10, 20):
        table.append(shop(start, 10))
    first, second, last = table.refresh().metadata.snapshots
    table.manage_snapshots().create_tag(second.snapshot_id, "good").create_tag(second.snapshot_id, "20261101").commit()
    url = "iceberg://lake/shop.versions"
    for version, snapshot in ((first.snapshot_id, first), ("good", second), ("main", last), ("20261101", second)):
        pqcache.sync(url, tmp_path / "cache", version=version, force=True)
        assert rows_of(tmp_path / "cache") == rows_in(table, snapshot.snapshot_id)
    assert not pqcache.sync(url, tmp_path / "cache").published, "the version is remembered"
    moment = datetime.datetime.fromtimestamp(second.timestamp_ms / 1000, datetime.timezone.utc)
    for text in (moment.isoformat(), moment.replace(tzinfo=None).isoformat()):
        pqcache.sync(url, tmp_path / "cache", version="", as_of=text, force=True)
        assert rows_of(tmp_path / "cache") == rows_in(table, second.snapshot_id)
    pqcache.sync(url, tmp_path / "cache", as_of="", version="")
    assert rows_of(tmp_path / "cache") == rows_in(table)
    table.maintenance.expire_snapshots().by_id(first.snapshot_id).commit()
    for how, said in (
        ({"version": first.snapshot_id}, f"has no snapshot {first.snapshot_id} .*expired"),
        ({"version": 20261101040000}, rf"no snapshot 20261101040000 \(the newest is {last.snapshot_id} of "),
        ({"version": "9" * 5000}, rf"\(the newest is {last.snapshot_id} of "),
        ({"version": -1}, rf"has no snapshot -1 \(the newest is {last.snapshot_id} of "),
        ({"version": "none"}, "has no branch or tag 'none'"),
        ({"as_of": "2020-01-01"}, "has no snapshot at 2020-01-01"),
    ):
        with pytest.raises(SourceNotFound, match=said):
            pqcache.sync(url, tmp_path / "cache", **how)
    with pytest.raises(UsageError, match="is not an ISO 8601 time"):
        pqcache.sync(url, tmp_path / "cache", as_of="yesterday")


def step(table: Table, chance: random.Random, number: int) -> None:
    """Make one commit of a random kind."""
    schema = table.schema()
    names = [field.name for field in schema.fields]

    def data(count: int) -> pa.Table:
        rows = pa.table({"id": pa.array([number * 100 + i for i in range(count)], schema_type("id"))})
        for field in schema.fields[1:]:
            values = [chance.choice([None, "a", "b/c", "d"]) for _ in range(count)]
            rows = rows.append_column(field.name, pa.array(values, pa.string()))
        return rows

    def schema_type(name: str) -> pa.DataType:
        return pa.int64() if isinstance(schema.find_type(name), LongType) else pa.int32()

    kind = chance.choice("aaaoddppprnmgws")
    tasks = list(table.scan().plan_files())
    if kind == "a" or not tasks:
        table.append(data(chance.randrange(1, 12)))
    elif kind == "o":
        table.overwrite(data(5), overwrite_filter=EqualTo(chance.choice(names[1:]), "a"))
    elif kind == "d":
        table.delete(f"id = {chance.choice(table.scan().to_arrow()['id'].to_pylist() or [0])}")
    elif kind == "p":
        some = [task for task in tasks if task.file.spec_id == table.spec().spec_id][:2]
        made = []
        for task in some:
            gone = chance.sample(range(task.file.record_count), chance.randrange(1, task.file.record_count + 1) // 2)
            if gone:
                positions = [(task.file.file_path, row) for row in gone]
                made.append(position_deletes(table, positions, list(task.file.partition._data)))
        if made:
            commit(table, made)
    elif kind == "s":
        with table.update_spec() as spec:
            fields = [field.name for field in table.spec().fields if str(field.transform) == "identity"]
            spec.remove_field(fields[0]) if fields else spec.add_identity(chance.choice(names[1:]))
    else:
        with table.update_schema() as change:
            partitioned = {field.source_id for spec in table.specs().values() for field in spec.fields}
            free = [field.name for field in schema.fields[1:] if field.field_id not in partitioned]
            if kind == "r":
                change.rename_column(chance.choice(names[1:]), f"c{number}")
            elif kind == "g" and free and len(names) > 3:
                change.delete_column(chance.choice(free))
            elif kind == "m":
                change.move_first(chance.choice(names[1:]))
                change.move_first("id")
            elif kind == "w":
                change.update_column("id", LongType())
            else:
                change.add_column(chance.choice([f"c{number}", f"new{number}"]), StringType())
    table.refresh()


@pytest.mark.parametrize(
    ("seed", "commits"), [(1, 8), *(pytest.param(seed, 20, marks=pytest.mark.deep) for seed in range(2, 9))]
)
def test_a_sync_after_each_of_many_commits_has_the_rows_of_that_snapshot(
    lake: Lake, tmp_path: Path, seed: int, commits: int
) -> None:
    chance = random.Random(seed)
    data = pa.schema([("id", pa.int32()), ("one", pa.string()), ("two", pa.string())])
    table = lake.create("random", data, by=["one"] if seed % 2 else [])
    table.refresh()
    source = place(table) if seed % 3 else "iceberg://lake/shop.random"
    for number in range(commits):
        step(table, chance, number)
        expected = rows_in(table)
        if not list(table.scan().plan_files()):
            continue
        pqcache.sync(source, tmp_path / "cache", force=True)
        assert rows_of(tmp_path / "cache") == expected, number


def test_the_command_line(lake: Lake, tmp_path: Path) -> None:
    table = lake.create("cli", shop(0, 1).schema, by=["day"])
    table.append(shop(0, 9))
    cache = tmp_path / "cache"
    done = run_pqcache("sync", "iceberg://lake/shop.cli", cache)
    snapshot = table.current_snapshot()
    assert snapshot is not None
    assert done.returncode == 0, done.stderr
    assert f"version {snapshot.snapshot_id}" in done.stdout
    assert "nothing to do" in run_pqcache("sync", cache).stdout
    assert f"Iceberg version {snapshot.snapshot_id}" in run_pqcache("inspect", cache).stdout
    for words, code, said in (
        (("iceberg://none/shop.cli", tmp_path / "x"), 2, "there is no catalog 'none'"),
        (("iceberg://lake/shop.none", tmp_path / "x"), 1, "no such table"),
        (("iceberg://lake/cli", tmp_path / "x"), 2, "names no table of a catalog"),
        (("iceberg://me:secret@lake/shop.cli", tmp_path / "x"), 2, "has more than a catalog and a table"),
        (("iceberg://lake/shop.cli", tmp_path / "x", "--version", "5"), 1, "has no snapshot 5"),
        (("iceberg://lake/shop.cli", tmp_path / "x", "-o", "key=x"), 2, "no such option"),
    ):
        done = run_pqcache("sync", *words)
        assert (done.returncode, "Traceback" in done.stderr) == (code, False), done.stderr
        assert said in done.stderr
        assert "secret" not in done.stderr.replace("its secrets", "")


def test_a_damaged_manifest_is_named(lake: Lake, tmp_path: Path) -> None:
    """In a process of its own, as pyiceberg's decoder crashed it."""
    table = lake.create("damaged", shop(0, 1).schema)
    table.append(shop(0, 10))
    [manifest] = table.refresh().metadata.current_snapshot().manifests(table.io)
    [entry] = manifest.fetch_manifest_entry(table.io)
    name = entry.data_file.file_path
    file, null = local(manifest.manifest_path), name.replace("/data/", "/dat\0/").encode()
    good = file.read_bytes()
    changes: list[tuple[Callable[[int, bytes], tuple[int, bytes]], str]] = [
        (lambda _, block: (-1, block), "this manifest is damaged: .* cannot have -1 entries"),
        (lambda _, block: (10**9, block), "this manifest is damaged: .* cannot have 1,000,000,000 entries"),
        (lambda count, block: (count, block.replace(as_avro(name), as_avro(name, 500 << 20))), "cannot read it"),
        (lambda count, block: (count, block.replace(name.encode(), null)), "a file with this name, which is invalid"),
    ]
    for change, said in changes:
        file.write_bytes(good)
        change_blocks(file, change)
        done = run_pqcache("sync", place(table), tmp_path / "cache")
        assert done.returncode == 1
        assert re.search(said, done.stderr)
        assert len(done.stderr.splitlines()) == 1


def test_a_damaged_delete_file_is_refused(lake: Lake, tmp_path: Path) -> None:
    table = lake.create("deletes", shop(0, 1).schema)
    file = data_file(table, shop(0, 10))
    deletes = position_deletes(table, [(file.file_path, 1)])
    commit(table, [file])
    commit(table, [deletes])
    path, right = local(deletes.file_path), {"file_path": [file.file_path], "pos": [1]}
    data = path.read_bytes()
    for wrong in ({"pos": [1.5]}, {"pos": ["1"]}, {"file_path": [1]}, {"file_path": pa.nulls(1, pa.string())}, None):
        if wrong is None:
            path.write_bytes(data[:4] + b"\xff" * 16 + data[20:])
        else:
            pq.write_table(pa.table({**right, **wrong}), path)
        with pytest.raises(ParquetError, match="this delete file cannot be read"):
            pqcache.sync(place(table), tmp_path / "cache")
