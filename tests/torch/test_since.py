"""ParquetDataset(since=): the files that an older snapshot lacks, whole, also when that is gone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake

import pqcache
from pqcache.errors import UsageError
from pqcache.events import Event, Warned
from pqcache.torch import Loader, Mix, ParquetDataset
from tests.store.tables.iceberg.lakes import Lake as IcebergLake
from tests.store.tables.iceberg.lakes import data_file, local
from tests.torch.conftest import ids_of

pytestmark = pytest.mark.usefixtures("few_cores_are_fine")
ROWS = 100  # of a file


class Lake:
    """A source of one file a night, some of them changed or removed later, and its cache."""

    def __init__(self, root: Path) -> None:
        self.source, self.cache = root / "lake", root / "cache"
        self.nights: list[str] = []

    def write(self, day: int, first: int) -> None:
        path = self.source / f"dt={day}" / "part-0.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        ids = pa.array(range(first, first + ROWS), pa.int64())
        pq.write_table(pa.table({"id": ids}), path, row_group_size=30)

    def sync(self, **options: Any) -> str:
        self.nights.append(pqcache.sync(self.source, self.cache, **options).snapshot)
        return self.nights[-1]

    def new(self, since: Any, **options: Any) -> set[int]:
        ids = ids_of(Loader(ParquetDataset(self.cache, since=since, batch_size=32, drop_last=False, **options)))
        return {i // ROWS for i in ids}


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    """Four nights: day 1 is changed in the third, and day 0 is gone in the fourth."""
    found = Lake(tmp_path)
    found.write(0, 0)
    found.write(1, 100)
    found.sync(keep=10)
    found.write(2, 200)
    found.sync()
    found.write(1, 500)
    found.sync()
    (found.source / "dt=0" / "part-0.parquet").unlink()
    found.write(3, 300)
    found.sync(max_delete="100%")
    return found


@pytest.mark.filterwarnings("ignore:.*no row is left by since")
def test_files_that_the_base_lacks(lake: Lake) -> None:
    expected = [{5, 2, 3}, {5, 3}, {3}, set[int]()]
    for night, days in zip(lake.nights, expected, strict=True):
        assert lake.new(night) == days
    pqcache.pin(lake.cache, lake.nights[1], name="trained")
    state = ParquetDataset(lake.cache, snapshot="2").state_dict()
    for base in ("2", "trained", state):
        assert lake.new(base) == {5, 3}
    assert lake.new("1", snapshot="3") == {5, 2}, "of an older snapshot, too"


@pytest.mark.filterwarnings("ignore:.*no row is left by since")
def test_a_base_that_is_gone(lake: Lake) -> None:
    before = [lake.new(night) for night in lake.nights]
    pqcache.gc(lake.cache, keep=1)
    lake.write(4, 400)
    last = lake.sync(keep=1)
    assert [lake.new(night) for night in lake.nights[:-1]] == [days | {4} for days in before]
    pqcache.repartition(lake.cache, row_group_size="4KB")
    assert [lake.new(night) for night in lake.nights[:-1]] == [days | {4} for days in before], "makes nothing new"
    assert lake.new(last) == set()


def test_no_new_rows(lake: Lake) -> None:
    with pytest.warns(UserWarning, match="no row is left by since, so there are no batches"):
        dataset = ParquetDataset(lake.cache, since=lake.nights[-1], batch_size=32)
    assert len(dataset) == 0
    assert ids_of(Loader(dataset)) == []
    old = ParquetDataset(lake.cache, batch_size=32)
    for how, workers in (
        ({"weights": {"new": 1, "old": 1}}, 2),
        ({"epoch_length": 10}, 0),
        ({"within_batch": True}, 0),
    ):
        mix = Mix({"new": dataset, "old": old}, **how)
        assert mix.drawn() == {"new": 0, "old": 0}
        loader = Loader(mix, num_workers=workers)
        assert (list(loader), list(loader), len(loader)) == ([], [], 0)
        again = Loader(Mix({"new": dataset, "old": old}, **how))
        again.load_state_dict(loader.state_dict())
        assert list(again) == []


def test_the_state_has_base_and_rows(lake: Lake) -> None:
    loader = Loader(ParquetDataset(lake.cache, since="2", batch_size=32), num_workers=2)
    batches = iter(loader)
    read = ids_of([next(batches)])
    state = loader.state_dict()
    assert state["since"] == lake.nights[1]
    lake.write(4, 400)
    lake.sync()
    resumed = Loader(ParquetDataset(lake.cache, since="2", batch_size=32))
    resumed.load_state_dict(state)
    assert {i // ROWS for i in read + ids_of(resumed)} == {5, 3}
    with pytest.raises(UsageError, match="taken with since="):
        ParquetDataset(lake.cache, batch_size=32).load_state_dict(state)
    rows = pqcache.rows(lake.cache, state, 0)
    assert rows.read(lake.cache, ["id"])["id"].to_pylist() == read


def test_refused(lake: Lake, table: Path) -> None:
    for since, reason in (
        ("20260101T000000Z-0001", "never had this snapshot; its last ones are .*-0004"),
        ("9", "never had this snapshot"),
        ("nosuch", "never had this snapshot"),
    ):
        with pytest.raises(UsageError, match=reason):
            ParquetDataset(lake.cache, since=since)
    with pytest.raises(UsageError, match=r"is newer than .*-0001, the one being read"):
        ParquetDataset(lake.cache, since="2", snapshot="1")
    with pytest.raises(UsageError, match="only a cache knows"):
        ParquetDataset(table, since="1")


def days(first: int, *names: str) -> pa.Table:
    """ROWS rows of each day."""
    ids = pa.array(range(first, first + ROWS * len(names)), pa.int64())
    return pa.table({"id": ids, "dt": [name for name in names for _ in range(ROWS)]})


@pytest.mark.filterwarnings("ignore:.*no row is left by since")
def test_compaction_of_a_delta_table_makes_nothing_new(tmp_path: Path) -> None:
    """OPTIMIZE after appends: of rows from before, of old and new ones, and of some that it compacts again."""
    lake = Lake(tmp_path)

    def append(first: int, *names: str) -> None:
        write_deltalake(str(lake.source), days(first, *names), mode="append", partition_by=["dt"])

    def optimize() -> None:
        DeltaTable(str(lake.source)).optimize.compact()

    append(0, "a", "b")  # hundreds 0 and 1
    append(200, "a", "b")
    base = lake.sync(keep=10)
    optimize()
    assert lake.new(lake.sync()) == lake.new(base) == set()
    append(400, "a")
    append(500, "a")
    second = lake.sync()
    assert (lake.new(base), lake.new(second)) == ({4, 5}, set())
    optimize()  # hundreds 4 and 5 came with the second night, and are now in one file with 0 and 2
    lake.sync()
    assert (lake.new(base), lake.new(second)) == ({0, 2, 4, 5}, set())
    append(600, "c")
    append(700, "c")
    optimize()
    DeltaTable(str(lake.source)).update(updates={"id": "id"}, predicate="dt = 'b' AND id = 100")
    lake.sync()
    assert lake.new(second) == {6, 7, 1, 3}, "an update's file is new, whole"
    for snapshot in lake.nights[:-1]:
        before = lake.new(snapshot)
        pqcache.gc(lake.cache, keep=1)
        assert lake.new(snapshot) == before, "also when it is gone"


def test_a_delta_log_that_does_not_reach_back(tmp_path: Path) -> None:
    lake, events = Lake(tmp_path), list[Event]()
    for first in (0, 100):
        write_deltalake(str(lake.source), days(first, "a"), mode="append")
    base = lake.sync(keep=10)
    table = DeltaTable(str(lake.source))
    table.optimize.compact()
    table.create_checkpoint()
    (lake.source / "_delta_log" / f"{2:020}.json").unlink()
    with pytest.warns(UserWarning, match="no row is left"):
        assert lake.new(base) == set()
    lake.sync(on_event=events.append)
    assert lake.new(base) == {0, 1}
    [warned] = [event.message for event in events if isinstance(event, Warned)]
    assert "does not reach back to the last sync, so since= counts all files of tonight as new" in warned


@pytest.mark.filterwarnings("ignore:.*no row is left by since")
def test_a_replace_of_an_iceberg_table_makes_nothing_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    iceberg, lake = IcebergLake(tmp_path / "warehouse"), Lake(tmp_path)
    iceberg.configure(monkeypatch)
    table = iceberg.create("orders", days(0, "a").schema, by=["dt"])

    def sync() -> str:
        lake.nights.append(pqcache.sync("iceberg://lake/shop.orders", lake.cache, keep=10).snapshot)
        return lake.nights[-1]

    def compact(day: str) -> None:
        """As an engine's rewrite_data_files does, which pyiceberg cannot."""
        table.refresh()
        tasks = [task.file for task in table.scan(row_filter=f"dt = '{day}'").plan_files()]
        rows = table.scan(row_filter=f"dt = '{day}'").to_arrow()
        with table.transaction() as transaction, transaction.update_snapshot().overwrite() as update:
            for file in tasks:
                update.delete_data_file(file)
            update.append_data_file(data_file(table, rows, [day]))
        path = local(table.metadata_location)
        metadata = json.loads(path.read_text())
        metadata["snapshots"][-1]["summary"]["operation"] = "replace"
        path.write_text(json.dumps(metadata))

    table.append(days(0, "a", "b"))
    table.append(days(200, "a", "b"))
    base = sync()
    compact("a")
    assert lake.new(sync()) == lake.new(base) == set()
    table.append(days(400, "b"))
    second = sync()
    compact("b")
    table.append(days(500, "a"))
    sync()
    assert lake.new(base) == {1, 3, 4, 5}
    assert lake.new(second) == {5}
    table.overwrite(days(600, "a"), overwrite_filter="dt = 'a'")
    sync()
    assert lake.new(second) == {6}
    iceberg.catalog.close()


def test_a_base_that_a_rollback_has_left(lake: Lake) -> None:
    pqcache.rollback(lake.cache, "2")
    lake.write(5, 800)
    lake.sync(max_delete="100%")
    assert lake.new(lake.nights[3]) == {8}
    assert lake.new(lake.nights[1]) == {5, 3, 8}
    pqcache.gc(lake.cache, keep=1)
    assert lake.new(lake.nights[1]) == {5, 3, 8}
    assert lake.new(lake.nights[3]) == {8}, "as it was found before"
    with pytest.raises(UsageError, match=r"since='.*-0003': it was rolled back and removed"):
        ParquetDataset(lake.cache, since=lake.nights[2])
