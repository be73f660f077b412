"""pqcache rows: the rows of a batch on the command line, by a state that was saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import pqcache
from pqcache import Pack
from pqcache.torch import Loader, ParquetDataset, Split
from tests.datasets import write_shop
from tests.forked_commands import run_pqcache


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("rows")
    pqcache.sync(write_shop(root / "lake", days=2, files=1, rows=60), root / "cache")
    return root / "cache"


def save(path: Path, dataset: ParquetDataset) -> list[list[int]]:
    """Save a state from the middle of epoch 1, and return the ids of its batches."""
    dataset.set_epoch(1)
    batches = [batch["id"].tolist() for batch in dataset]
    path.write_text(json.dumps(dataset.state_dict(after=1)))
    return batches


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({}, []),
        ({"filters": "price > 0.3"}, ["--filters", "price > 0.3"]),
        ({"split": Split("id", 0.0, 0.75, salt="a:b")}, ["--split", "id:0:0.75:a:b"]),
        ({"split": Split(None, 0.25, 1.0)}, ["--split", ":0.25:1"]),
        ({"weights": "price"}, ["--weights", "price"]),
        ({"balance": "dt"}, ["--balance", "dt"]),
        ({"sample": 0.5}, ["--sample-share", "0.5"]),
        ({"limit": 70}, ["--limit", "70"]),
    ],
)
def test_the_values_are_those_of_the_batch(cache: Path, tmp_path: Path, options: Any, named: list[str]) -> None:
    state = tmp_path / "state.json"
    batches = save(state, ParquetDataset(cache, ["id"], batch_size=16, **options))
    done = run_pqcache(
        "rows", cache, "--state", state, "--batch", "2", *named, "--sample", "--columns", "id,image", "--json"
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["values"]["id"] for row in rows] == batches[2]
    assert rows[0]["values"]["image"].startswith("<binary, ")
    assert list(rows[0]) == ["epoch", "batch", "file", "row_group", "row", "row_in_file", "values"]
    assert {(row["epoch"], row["batch"]) for row in rows} == {(1, 2)}
    assert [row["row_group"] * 30 + row["row"] for row in rows] == [row["row_in_file"] for row in rows]
    assert [row["row_in_file"] + 100_000 * ("11-02" in row["file"]) for row in rows] == batches[2]


@pytest.mark.parametrize("strategy", ["concat", "best_fit"])
def test_rows_of_packed_sequences(cache: Path, tmp_path: Path, strategy: Any) -> None:
    state = tmp_path / "state.json"
    pack = Pack("tokens", length=16, strategy=strategy)
    dataset = ParquetDataset(cache, ["tokens"], batch_size=4, pack=pack)
    state.write_text(json.dumps(dataset.state_dict()))
    documents = pqcache.rows(cache, state, 2, pack=pack)
    done = run_pqcache("rows", cache, "--state", state, "--batch", "2", "--pack", f"tokens:16:{strategy}", "--json")
    assert done.returncode == 0, done.stderr
    assert [json.loads(line)["row_in_file"] for line in done.stdout.splitlines()] == documents.rows_in_file.tolist()
    for text, said in (("tokens", "not COLUMN:LENGTH"), (":9", "not COLUMN:LENGTH"), ("tokens:9:x", "strategy='x'")):
        done = run_pqcache("rows", cache, "--state", state, "--batch", "2", "--pack", text)
        assert (done.returncode, said in done.stderr) == (2, True), done.stderr


def test_as_text(cache: Path, tmp_path: Path) -> None:
    state = tmp_path / "state.json"
    batches = save(state, ParquetDataset(cache, ["id"], batch_size=16))
    done = run_pqcache("rows", cache, "--state", state, "--batch", "5", "--epoch", "1")
    assert done.returncode == 0, done.stderr
    first, *lines = done.stdout.splitlines()
    assert first.startswith("batch 5 of epoch 1: 16 rows of 4 row groups in 2 files of ")
    assert len(lines) == 16
    assert all("id=" not in line for line in lines)
    done = run_pqcache("rows", cache, "--state", state, "--batch", "0", "--columns", "id")
    assert [line.strip() for line in done.stdout.splitlines()[2::2]] == [f"id={i}" for i in batches[0]]


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--batch", "99"], 2, "batch 99: the epoch has 8 batches"),
        (["--batch", "0", "--filters", "id > 3"], 2, "state: it was taken with other filters"),
        (["--batch", "0", "--split", "id:0.5"], 2, "--split 'id:0.5': not KEY:LOW:HIGH"),
        (["--batch", "0", "--split", "id:0.9:0.1"], 2, "low must be less than high"),
        (["--batch", "0", "--sample", "--columns", "nothing"], 2, "no column 'nothing'"),
    ],
)
def test_what_does_not_fit_is_one_line(cache: Path, tmp_path: Path, words: list[str], code: int, message: str) -> None:
    state = tmp_path / "state.json"
    save(state, ParquetDataset(cache, ["id"], batch_size=16))
    done = run_pqcache("rows", cache, "--state", state, *words)
    assert (done.returncode, done.stdout) == (code, "")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.usefixtures("few_cores_are_fine")
@pytest.mark.parametrize("workers", [0, 3])  # 3 workers do not divide the lanes, so batches come in another sequence
def test_the_last_batches_before_a_state(cache: Path, tmp_path: Path, workers: int) -> None:
    loader = Loader(ParquetDataset(cache, ["id"], batch_size=8, lanes=4, seed=2))
    batches = iter(loader)
    read = [next(batches)["id"].tolist() for _ in range(3)]
    resumed = Loader(ParquetDataset(cache, ["id"], batch_size=8, seed=2), num_workers=workers)
    resumed.load_state_dict(loader.state_dict())
    batches = iter(resumed)
    read += [next(batches)["id"].tolist() for _ in range(4)]
    state = tmp_path / "state.json"
    state.write_text(json.dumps(resumed.state_dict()))
    found = pqcache.last_rows(cache, state, 5)
    assert [places.read(cache, ["id"])["id"].to_pylist() for places in found] == read[-5:]
    assert len(pqcache.last_rows(cache, state, 100)) == len(read)
    done = run_pqcache("rows", cache, "--state", state, "--last", "5", "--columns", "id", "--json")
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["values"]["id"] for row in rows] == [i for ids in read[-5:] for i in ids]
    shown = run_pqcache("rows", cache, "--state", state, "--last", "2").stdout.splitlines()
    assert [line.partition(":")[0] for line in shown if line.startswith("batch")] == [
        f"batch {places.index} of epoch 0" for places in found[-2:]
    ]
    rest = [batch["id"].tolist() for batch in batches]
    state.write_text(json.dumps(resumed.state_dict()))
    ends = [places.read(cache, ["id"])["id"].to_pylist() for places in pqcache.last_rows(cache, state, 2)]
    assert ends == rest[-2:]
    state.write_text(json.dumps(ParquetDataset(cache, ["id"]).state_dict()))
    none = "no batch of the state's epoch was read before it\n"
    assert run_pqcache("rows", cache, "--state", state, "--last", "2").stdout == none
    assert run_pqcache("rows", cache, "--state", state, "--last", "2", "--json").stdout == ""


def test_which_batches_has_to_be_said(cache: Path, tmp_path: Path) -> None:
    for words in ([], ["--batch", "1", "--last", "1"]):
        done = run_pqcache("rows", cache, "--state", "state.json", *words)
        assert (done.returncode, done.stderr) == (
            2,
            "pqcache: error: rows: no batch is named; give either --batch or --last\n",
        )
    done = run_pqcache("rows", cache, "--state", "state.json", "--last", "1", "--epoch", "0")
    assert done.returncode == 2
    assert "leave it out" in done.stderr
