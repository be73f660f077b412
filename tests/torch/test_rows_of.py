"""rows_of and batch.rows(): where the rows of a batch lie, compared with the rows that it has."""

from __future__ import annotations

import copy
import gc
import json
import pickle
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from torch.utils.data import DataLoader

import pqcache
from pqcache.errors import ParquetError, UsageError
from pqcache.reader.batch_rows import RowPlaces
from pqcache.torch import Batch, Loader, Mix, ParquetDataset, Sequence, Split
from pqcache.torch.batch import to_rows

pytestmark = pytest.mark.usefixtures("few_cores_are_fine")


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """600 rows in three files, whose ids are their numbers in the order of the files."""
    root = tmp_path_factory.mktemp("shop")
    for day in range(3):
        ids = np.arange(day * 200, (day + 1) * 200)
        (root / f"dt={day}").mkdir()
        table = pa.table({"id": ids, "x": ids * 7 % 10, "s": [f"text {i}" for i in ids]})
        path = root / f"dt={day}" / "a.parquet"
        pq.write_table(table, path, row_group_size=30, max_rows_per_page=4, write_page_index=True)
    return root


def ids_at(places: RowPlaces) -> list[Any]:
    """Return the ids at places in the shop, after checking all that they say of the rows."""

    def like_rows(numbers: Any) -> Any:
        return numbers.reshape(-1, *[1] * (places.rows.ndim - 1))

    assert list(places.paths) == [f"dt={day}/a.parquet" for day in range(3)]
    assert (places.groups == 7 * places.files + places.row_groups).all()
    found = 200 * like_rows(places.files) + places.rows_in_file
    assert (found == 200 * like_rows(places.files) + 30 * like_rows(places.row_groups) + places.rows).all()
    return found.tolist()


OPTIONS: list[dict[str, Any]] = [
    {},
    {"shuffle": False},
    {"filters": "dt = '2'", "drop_last": True},
    {"split": Split("x", 0.2, 0.9), "filters": "id < 555"},
    {"sequence": Sequence(3, order_by="id", stride=2), "filters": "x != 4"},
    {"memory": 2_000, "columns": ["id"], "filters": "x > 3"},
    {"weights": {"x": {0: 2.5, ...: 0.5}}, "lanes": 6, "window": 2},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: ",".join(options) or "plain")
def test_rows_are_those_of_the_batches(shop: Path, options: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*one is read at a time")
        ds = ParquetDataset(shop, **{"columns": ["id", "s"], "batch_size": 32, "seed": 3, **options})
        ds.set_epoch(2)
        for batch in ds:
            places = batch.rows()
            assert ids_at(places) == batch["id"].tolist()
            assert (places.epoch, places.index, places.snapshot) == (2, batch.index, ds.snapshot)
            if batch.index % 4 == 0:
                assert ids_at(ds.rows_of(2, batch.index)) == batch["id"].tolist()
    assert (ds.state_dict()["piece"] > 0) == ("memory" in options and "filters" not in options)


def test_rows_of_every_rank_and_worker_padding_included(shop: Path) -> None:
    seen = 0
    for rank in range(3):
        ds = ParquetDataset(shop, ["id"], batch_size=16, lanes=6, num_replicas=3, rank=rank, filters="x < 9")
        for batch in DataLoader(ds, batch_size=None, num_workers=2 if rank else 0):
            assert ids_at(batch.rows()) == batch["id"].tolist()
            seen += batch.index >= 34
    assert ds.rows_of(0, 33).rows.size == 540 - 33 * 16
    assert seen == 2  # repeated


def test_without_lanes_they_are_those_of_the_latest_iteration(shop: Path) -> None:
    ds = ParquetDataset(shop, ["id"], batch_size=50)
    batches = list(DataLoader(ds, batch_size=None, num_workers=2))
    assert all(ids_at(ds.rows_of(0, batch.index)) == batch["id"].tolist() for batch in batches)
    list(DataLoader(ds, batch_size=None, num_workers=0))
    assert any(ids_at(ds.rows_of(0, batch.index)) != batch["id"].tolist() for batch in batches)
    assert all(ids_at(batch.rows()) == batch["id"].tolist() for batch in batches)  # a batch knows its own


def test_single_rows(shop: Path) -> None:
    ds = ParquetDataset(shop, ["id"], batch_size=None, seed=5)
    for index, row in enumerate(ds):
        if index % 97 == 0:
            assert ids_at(ds.rows_of(0, index)) == [int(row["id"])]


def test_rows_of_a_mix(shop: Path) -> None:
    parts = {
        "a": ParquetDataset(shop, ["id"], batch_size=16, filters="x < 5", seed=1),
        "b": ParquetDataset(shop, ["id"], batch_size=10, filters="x >= 5", seed=2, drop_last=True),
        "c": ParquetDataset(shop, ["id"], batch_size=30, shuffle=False, filters="x = 5"),
    }
    mix = Mix(parts, weights={"a": 2, "b": 3, "c": 1}, lanes=3, seed=7)
    for epoch, workers in ((0, 3), (3, 0)):
        mix.set_epoch(epoch)
        for batch in Loader(mix, num_workers=workers):
            places = batch.rows()
            assert ids_at(places) == batch["id"].tolist(), (batch.source, batch.index)
            assert (places.epoch, places.index) == (batch.epoch, batch.index)
            if batch.index % 5 == 0:
                assert ids_at(mix.rows_of(batch.epoch, batch.index)) == batch["id"].tolist()
    with pytest.raises(UsageError, match="the epoch has"):
        mix.rows_of(0, len(mix))


def test_rows_of_a_mix_that_has_changed(shop: Path) -> None:
    def part(filters: str, batch_size: int, **options: Any) -> ParquetDataset:
        return ParquetDataset(shop, ["id"], batch_size=batch_size, filters=filters, **options)

    def parts() -> dict[str, ParquetDataset]:
        return {"a": part("x < 5", 16, seed=1), "b": part("x >= 5", 10, shuffle=False)}

    before = Mix(parts(), {"a": 3, "b": 1}, epoch_length=10, lanes=3)
    seen = [i for batch in before if batch.source == "a" for i in batch["id"].tolist()]
    state = before.state_dict()
    mix = Mix({**parts(), "c": part("x = 5", 7)}, {"a": 1, "b": 2, "c": 1}, epoch_length=20, lanes=3)
    mix.load_state_dict(state, changed=True)
    for epoch in range(1, 5):  # the first pass over "a" goes on across the change
        mix.set_epoch(epoch)
        for batch in mix:
            assert ids_at(batch.rows()) == batch["id"].tolist(), (batch.source, epoch, batch.index)
            if batch.index % 5 == 0:
                assert ids_at(mix.rows_of(epoch, batch.index)) == batch["id"].tolist()
            seen += batch["id"].tolist() if batch.source == "a" else []
    assert len(set(seen[:300])) == 300
    with pytest.raises(UsageError, match="the mix was changed from epoch 1 on"):
        mix.rows_of(0, 0)


def test_rows_within_a_batch_of_several_datasets_are_refused(shop: Path) -> None:
    mix = Mix(
        {name: ParquetDataset(shop, ["id"], batch_size=8, seed=n) for n, name in enumerate("ab")}, within_batch=True
    )
    batch = next(iter(mix))
    for ask in (batch.rows, lambda: mix.rows_of(0, 0)):
        with pytest.raises(UsageError, match="within_batch=True the rows of a batch are in several datasets"):
            ask()


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of up to 40 tokens, which are all their number; every ninth one is empty."""
    root = tmp_path_factory.mktemp("documents")
    tokens = [[i] * (i * 7 % 41 if i % 9 else 0) for i in range(300)]
    table = pa.table({"id": range(300), "x": [i % 4 for i in range(300)], "t": tokens})
    for number in range(2):
        pq.write_table(table.slice(150 * number, 150), root / f"{number}.parquet", row_group_size=40)
    return root


PACKS = (
    pqcache.Pack("t", length=16, ids=["document_ids"]),
    pqcache.Pack("t", length=16, ids=["document_ids"], strategy="best_fit"),
    pqcache.TokenBatches("t", tokens_per_batch=80),
)


def documents_of(batch: Any) -> list[int]:
    """Return the document of each piece, or each document, of a batch; of an empty one -1."""
    if "document_ids" not in batch:
        return [row[0] if len(row) else -1 for row in to_rows(batch["t"])]
    pieces = []
    for tokens, numbers in zip(batch["t"].tolist(), batch["document_ids"].tolist(), strict=True):
        pieces += [token for _, token in sorted({(n, t) for n, t in zip(numbers, tokens, strict=True) if n})]
    return pieces


CHOSEN = {"filters": "x > 1", "split": Split("id", 0.1, 0.9), "limit": 100}


@pytest.mark.parametrize(
    ("pack", "how"), list(zip(PACKS, (CHOSEN, {}, CHOSEN), strict=True)), ids=["concat", "best_fit", "batches"]
)
def test_rows_of_packed_documents(documents: Path, pack: Any, how: dict[str, Any]) -> None:
    if isinstance(pack, pqcache.Pack):
        how = {**how, "batch_size": 3}
    ds = ParquetDataset(documents, None if "batch_size" in how else ["t"], pack=pack, lanes=2, window=2, **how)
    ds.set_epoch(1)
    batches = list(ds)
    for batch in batches[:: max(1, len(batches) // 8)]:
        expected = documents_of(batch)
        for places in (batch.rows(), ds.rows_of(1, batch.index)):
            found = (150 * places.files + places.rows_in_file).tolist()
            assert [i if i % 9 and i % 41 else -1 for i in found] == expected
            assert places.read(documents, ["id"])["id"].to_pylist() == found
    state = ds.state_dict(after=batches[0])
    options = {name: value for name, value in how.items() if name in ("filters", "split", "limit")}
    places = batches[-1].rows()
    again = pqcache.rows(documents, state, len(batches) - 1, epoch=1, pack=pack, **options)
    assert (again.rows_in_file == places.rows_in_file).all()
    with pytest.raises(UsageError, match="another split, sequence, pack or weights"):
        pqcache.rows(documents, state, 0, **options)


def test_files_without_rows_of_the_batch_are_not_read(shop: Path, tmp_path: Path) -> None:
    shutil.copytree(shop, tmp_path / "shop")
    plain = ParquetDataset(tmp_path / "shop", ["id"], batch_size=32)
    chosen = ParquetDataset(tmp_path / "shop", ["id"], batch_size=8, filters="x > 8", window=1, lanes=1)
    places = chosen.rows_of(0, 1)
    files = set(places.files.tolist())
    assert len(files) < 3
    for number, file in enumerate(sorted((tmp_path / "shop").rglob("*.parquet"))):
        if number not in files:
            file.unlink()
    assert chosen.rows_of(0, 1).table().equals(places.table())
    shutil.rmtree(tmp_path / "shop")
    assert len(plain.rows_of(0, 3)) == 32, "without a condition nothing is read"
    with pytest.raises(ParquetError, match="the file is gone"):
        chosen.rows_of(0, 1)


def test_rows_can_be_read_and_trained_on_again(shop: Path) -> None:
    ds = ParquetDataset(shop, ["id", "s"], batch_size=32, filters="x > 2")
    batch = next(iter(ds))
    places = batch.rows()
    assert places.read(shop, ["id"])["id"].to_pylist() == batch["id"].tolist()
    again = ParquetDataset(shop, ["id"], rows=places.selected)
    assert sorted(i for part in again for i in part["id"].tolist()) == sorted(batch["id"].tolist())
    table = places.table()
    assert table["file"].to_pylist() == [f"dt={i // 200}/a.parquet" for i in batch["id"].tolist()]
    assert table["row_in_file"].to_pylist() == [i % 200 for i in batch["id"].tolist()]
    spec = Sequence(2, order_by="id", stride=2)
    pairs = ParquetDataset(shop, ["id"], batch_size=8, sequence=spec)
    batch = next(iter(pairs))
    assert batch.rows().table()["row_in_file"].to_pylist() == [[i % 200 for i in pair] for pair in batch["id"].tolist()]
    assert batch.rows().read(shop, ["id"])["id"].to_pylist() == batch["id"].ravel().tolist()


def test_a_batch_finds_its_dataset_where_that_still_is(shop: Path, tmp_path: Path) -> None:
    ds = ParquetDataset(shop, ["id"], batch_size=32, transform=lambda batch: {"id": batch["id"], "n": len(batch["id"])})
    batch = next(iter(ds))
    assert isinstance(batch, Batch)
    other = copy.deepcopy(batch)
    assert ids_at(other.rows()) == batch["id"].tolist()
    assert ids_at(pickle.loads(pickle.dumps(batch)).rows()) == batch["id"].tolist()
    del ds
    gc.collect()
    with pytest.raises(UsageError, match="the dataset that it was read from is gone"):
        batch.rows()
    with pytest.raises(UsageError, match="is gone"):
        Batch({}).rows()
    pqcache.sync(shop, tmp_path / "cache")
    ds = ParquetDataset(tmp_path / "cache", ["id"], batch_size=32)
    old, state = next(iter(ds)), ds.state_dict(after=0)
    (shop / "dt=0" / "extra.parquet").write_bytes((shop / "dt=0" / "a.parquet").read_bytes())
    try:
        pqcache.sync(tmp_path / "cache")
    finally:
        (shop / "dt=0" / "extra.parquet").unlink()
    ds = ParquetDataset(tmp_path / "cache", ["id"], batch_size=32)
    new = next(iter(ds))
    assert len(new.rows()) == 32
    ds.load_state_dict(state)
    with pytest.raises(UsageError, match="has loaded another snapshot"):
        new.rows()
    assert ids_at(ds.rows_of(0, 0)) == old["id"].tolist()
    clone = pickle.loads(pickle.dumps(ds))
    assert ids_at(next(iter(clone)).rows())


def test_the_rows_of_a_batch_by_a_state_alone(shop: Path, tmp_path: Path) -> None:
    choices: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, {}),
        ({"filters": "x > 3", "shuffle": False}, {"filters": "x > 3"}),
        ({"split": Split("x", 0.0, 0.7)}, {"split": Split("x", 0.0, 0.7)}),
        ({"sequence": Sequence(2, order_by="id")}, {"sequence": Sequence(2, order_by="id")}),
        ({"memory": 1_000}, {}),
    ]
    for number, (options, named) in enumerate(choices):
        ds = ParquetDataset(shop, ["id"], batch_size=32, lanes=2, **options)
        ds.set_epoch(4)
        batches = list(ds)
        path = tmp_path / f"{number}.json"
        path.write_text(json.dumps(ds.state_dict(after=batches[0])))
        for batch in batches[::5]:
            found = pqcache.rows(shop, path, batch.index, **named)
            assert ids_at(found) == batch["id"].tolist()
        assert ids_at(pqcache.rows(shop, ds.state_dict(), 0, epoch=4, **named)) == batches[0]["id"].tolist()
        if named:
            with pytest.raises(UsageError, match="it was taken with other filters"):
                pqcache.rows(shop, path, 0)


def test_states_that_do_not_fit_are_refused(shop: Path, tmp_path: Path) -> None:
    state = ParquetDataset(shop, ["id"], batch_size=32).state_dict()
    mix = Mix({"a": ParquetDataset(shop, ["id"], batch_size=32)})
    (tmp_path / "bad.json").write_text("{")
    for given, message in (
        (tmp_path / "none.json", "cannot be read"),
        (tmp_path / "bad.json", "it is not JSON"),
        ({}, "not a state of a ParquetDataset"),
        ([], "not a state of a ParquetDataset"),
        (mix.state_dict(), "the state of a Mix"),
        ({**state, "format": 1}, "format 1, whose order puts other rows into a batch"),
        ({**state, "lanes": "1"}, "no sound 'lanes'"),
        ({**state, "piece": -1}, "no sound 'piece'"),
        ({**state, "batch_size": 0}, "no sound 'batch_size'"),
        ({**state, "snapshot": "listing-12"}, "each of its nodes holds a share"),
        ({**state, "snapshot": "files-12"}, "have changed since"),
    ):
        with pytest.raises(UsageError, match=message):
            pqcache.rows(shop, given, 0)  # type: ignore[arg-type]
    for batch in (-1, 19, 10**9, "x"):
        with pytest.raises(UsageError, match=r"the epoch has 19 batches, counted from 0"):
            pqcache.rows(shop, state, batch)  # type: ignore[arg-type]
