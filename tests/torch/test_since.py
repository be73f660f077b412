"""ParquetDataset(since=): the files that an older snapshot lacks, whole, also when that is gone."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import pqcache
from pqcache.errors import UsageError
from pqcache.torch import Loader, Mix, ParquetDataset
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


def test_a_share_of_old_rows_beside_them(lake: Lake) -> None:
    new = ParquetDataset(lake.cache, since="3", batch_size=10)
    old = ParquetDataset(lake.cache, batch_size=10, seed=1)
    mix = Mix({"new": new, "old": old}, weights={"new": 0.5, "old": 0.5})
    found = [(batch.source, {i // ROWS for i in batch["id"].tolist()}) for batch in Loader(mix)]
    assert {source for source, _ in found} == {"new", "old"}
    assert {day for source, days in found if source == "new" for day in days} == {3}


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


def test_what_is_said(lake: Lake, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "pqcache.reader"):
        for _ in range(2):  # the second time the counts are beside the snapshot
            caplog.clear()
            Loader(ParquetDataset(lake.cache, since="2"), num_workers=1)
            assert f"since {lake.nights[1]}: 200 rows in 2 files, of which up to 100 were in it" in caplog.text


def test_refused(lake: Lake, table: Path) -> None:
    for since, reason in (
        ("20260101T000000Z-0001", "never had this snapshot; its last ones are .*-0004"),
        ("9", "never had this snapshot"),
        ("nosuch", "never had this snapshot"),
    ):
        with pytest.raises(UsageError, match=reason):
            ParquetDataset(lake.cache, since=since)
    with pytest.raises(UsageError, match=r"is newer than .*-0001, which is read"):
        ParquetDataset(lake.cache, since="2", snapshot="1")
    with pytest.raises(UsageError, match="only a cache knows"):
        ParquetDataset(table, since="1")
