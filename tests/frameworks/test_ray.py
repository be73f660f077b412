"""Ray Train and plain actors: every row once over all ranks, another order each epoch, the place after a failure."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import ray.train
import ray.train.torch
import torch
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_data_loader
from torch.utils.data import DataLoader

from pqcache.torch import Loader, ParquetDataset
from tests import ROOT
from tests.datasets import write_shop
from tests.frameworks.conftest import ROWS
from tests.frameworks.forked_ranks import note, refusal
from tests.test_docs import blocks_of, environment

BATCH = 64
AHEAD = 3  # batches of the second loader before the first step
ROUNDS = 50  # of two ranks: 99 batches, and the first one again


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """A cluster of this machine alone."""
    with tempfile.TemporaryDirectory(prefix="ray") as directory:  # a short name, as sockets are in it
        ray.init(
            num_cpus=4,
            _node_ip_address="127.0.0.1",
            include_dashboard=False,
            object_store_memory=100 << 20,
            log_to_driver=False,
            logging_level="ERROR",
            _temp_dir=directory,
        )
        assert {node["NodeManagerAddress"] for node in ray.nodes()} == {"127.0.0.1"}
        yield
        ray.shutdown()


def epochs_of(loader: Any, dataset: ParquetDataset | None = None) -> list[list[list[int]]]:
    """Return the ids of two epochs' batches; with ``dataset`` its epoch is set, as a plain DataLoader needs it."""
    found = []
    for epoch in range(2):
        if dataset is not None:
            dataset.set_epoch(epoch)
        found.append([batch["id"].tolist() for batch in loader])
    return found


def fail_once(options: dict[str, Any]) -> None:
    """Train on two loaders at once, two epochs of the first; rank 1 fails after step 53.

    The last state before that is of the end of the first one's epoch, and of the middle of the second one's.
    """
    rank, directory = ray.train.get_context().get_world_rank(), Path(options["out"])
    first = Loader(ParquetDataset(options["rows"], batch_size=BATCH, lanes=4), num_workers=2)
    second = Loader(ParquetDataset(options["rows"], batch_size=BATCH, lanes=4))
    others = endless(prepare_data_loader(second))
    model = ray.train.torch.prepare_model(torch.nn.Linear(1, 1))
    step, restored = 0, ray.train.get_checkpoint()
    if restored is None:
        seen: dict[str, list[Any]] = {"first": [], "second": [next(others)["id"].tolist() for _ in range(AHEAD)]}
    else:  # what was seen belongs to the checkpoint, as a model does
        with restored.as_directory() as name:
            states = json.loads((Path(name) / "states.json").read_text())
        first.load_state_dict(states["first"])
        second.load_state_dict(states["second"])
        step = states["step"]
        seen = json.loads((directory / f"seen-{rank}-{step}.json").read_text())
    for _ in range(first.epoch, 2):
        for batch in first:
            model(batch["price"][:, None]).square().mean().backward()  # all ranks, or this would hang
            seen["first"].append((batch.epoch, batch["id"].tolist()))
            seen["second"].append(next(others)["id"].tolist())
            step += 1
            if step % 10 == 0:
                (directory / f"seen-{rank}-{step}.json").write_text(json.dumps(seen))
                with tempfile.TemporaryDirectory() as name:
                    states = {"step": step, "first": first.state_dict(), "second": second.state_dict()}
                    (Path(name) / "states.json").write_text(json.dumps(states))
                    ray.train.report({"step": step}, checkpoint=Checkpoint(name) if rank == 0 else None)
            if rank == 1 and step == 53 and restored is None:
                raise RuntimeError("a worker fails")
    note(options, rank, {**seen, "step": step, "restored": restored is not None})


def endless(loader: Any) -> Iterator[Any]:
    """Yield the batches of one epoch after the other."""
    while True:
        yield from loader


@pytest.fixture(scope="module")
def directory(rows_table: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two workers wrote in one training for all tests, as it is its start that takes time.

    It fails and restarts once; what each kind of loader does is found before that.
    """
    made_in_driver = ParquetDataset(rows_table, batch_size=BATCH)
    loader_of_driver = Loader(ParquetDataset(rows_table, batch_size=BATCH))

    def function(options: dict[str, Any]) -> None:
        def new() -> ParquetDataset:
            return ParquetDataset(rows_table, batch_size=BATCH)

        def plain(dataset: ParquetDataset, workers: int, **how: Any) -> list[list[list[int]]]:
            loader = DataLoader(dataset, batch_size=None, num_workers=workers)
            return epochs_of(prepare_data_loader(loader, **how), dataset)

        device = ray.train.torch.get_device()
        found: dict[str, Any] = {
            "of the driver": epochs_of(loader_of_driver),
            "dataset of the driver": plain(made_in_driver, 0),
            "plain": plain(new(), 2),
            "loader, not prepared": epochs_of(Loader(new(), device=device, num_workers=2)),
            "prepared": epochs_of(prepare_data_loader(Loader(new(), num_workers=2))),
            "prepared, no sampler": epochs_of(prepare_data_loader(Loader(new()), add_dist_sampler=False)),
        }
        note(options, ray.train.get_context().get_world_rank(), {"epochs": found, **others(new)})

    def all_parts(options: dict[str, Any]) -> None:
        if ray.train.get_checkpoint() is None:
            function({"out": f"{options['out']}/loaders"})
        fail_once(options)

    directory = tmp_path_factory.mktemp("training")
    (directory / "loaders").mkdir()
    TorchTrainer(
        all_parts,
        train_loop_config={"out": str(directory), "rows": str(rows_table)},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=str(directory / "runs"), failure_config=FailureConfig(max_failures=1)),
    ).fit()
    return directory


@pytest.fixture(scope="module")
def ranks(directory: Path) -> list[dict[str, Any]]:
    """What each rank found in each kind of loader."""
    return [json.loads((directory / "loaders" / f"rank-{rank}.json").read_text()) for rank in range(2)]


def others(new: Callable[[], ParquetDataset]) -> dict[str, Any]:
    """Return what a rank finds of epochs set on a prepared loader, of places, and of what is refused."""
    prepared: Any = prepare_data_loader(Loader(new()))
    prepared.sampler.set_epoch(5)  # as Ray's documentation has it
    set_by_sampler = next(iter(prepared))["id"].tolist()
    places = []
    loader = Loader(new(), num_workers=2)
    prepared = prepare_data_loader(loader)
    for _ in prepared:
        state = loader.state_dict()
        places.append((state["epoch"], state["batch"]))
    stopped = Loader(new())
    for _ in zip(range(7), prepare_data_loader(stopped), strict=False):
        pass
    dataset = new()
    batches = iter(prepare_data_loader(DataLoader(dataset, batch_size=None)))
    batch = next(batches)
    return {
        "length": len(prepared),
        "set by sampler": set_by_sampler,
        "places": places,
        "place where it was stopped": stopped.state_dict()["batch"],
        "no place": refusal(dataset.state_dict),
        "no place of a dict": refusal(lambda: dataset.state_dict(after=batch)),
        "batches of batches": refusal(lambda: next(iter(prepare_data_loader(DataLoader(new(), batch_size=8))))),
    }


def test_every_row_comes_in_every_epoch(ranks: list[dict[str, Any]]) -> None:
    first, second = (rank["epochs"] for rank in ranks)
    for name in first:
        orders = []
        for epoch in range(2):
            mine, theirs = first[name][epoch], second[name][epoch]
            assert len(mine) == len(theirs) == ROUNDS, name
            rounds = [batch for both in zip(mine, theirs, strict=True) for batch in both]
            assert sorted(i for batch in rounds[:-1] for i in batch) == list(range(ROWS)), name
            assert rounds[-1] == rounds[0], name
            orders.append(rounds)
        assert orders[0] != orders[1], name


def test_the_epoch_may_be_set_where_ray_says(ranks: list[dict[str, Any]], rows_table: Path) -> None:
    for rank, found in enumerate(ranks):
        dataset = ParquetDataset(rows_table, batch_size=BATCH, num_replicas=2, rank=rank)
        dataset.set_epoch(5)
        assert found["set by sampler"] == next(iter(dataset))["id"].tolist()


def test_a_prepared_loader_knows_what_was_yielded(ranks: list[dict[str, Any]]) -> None:
    """Ray's wrapper asks for a batch more than it yields, also before the first."""
    for found in ranks:
        assert found["length"] == ROUNDS
        assert found["places"] == [[0, min(99, 2 * (index + 1))] for index in range(ROUNDS)]
        assert found["place where it was stopped"] == 14


def test_what_is_not_exact_is_refused(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert "reads one batch ahead of the trainer" in found["no place"]
        assert "use pqcache.torch.Loader" in found["no place of a dict"]
        assert "use pqcache.torch.Loader(dataset)" in found["batches of batches"]


def test_a_restart_goes_on_at_the_checkpoint(directory: Path) -> None:
    found = [json.loads((directory / f"rank-{rank}.json").read_text()) for rank in range(2)]
    assert [(rank["step"], rank["restored"]) for rank in found] == [(2 * ROUNDS, True)] * 2
    assert [len(rank["second"]) for rank in found] == [2 * ROUNDS + AHEAD] * 2
    for epoch in range(2):
        rounds = slice(epoch * ROUNDS, (epoch + 1) * ROUNDS)
        mine, theirs = (rank["first"][rounds] for rank in found)
        assert {number for number, _ in (*mine, *theirs)} == {epoch}
        batches = [ids for step in zip(mine, theirs, strict=True) for _, ids in step]
        assert Counter(i for ids in batches[:-1] for i in ids) == Counter(range(ROWS))  # never or twice: none
        assert batches[-1] == batches[0]
        prepared = [ids for step in zip(*(rank["second"][rounds] for rank in found), strict=True) for ids in step]
        assert prepared == batches


def test_the_example_restarts(tmp_path: Path) -> None:
    texts = [block.text for block in blocks_of(ROOT / "docs" / "frameworks" / "ray.md")]
    assert (ROOT / "examples" / "train_ray.py").read_text().rstrip() in texts
    shop = write_shop(tmp_path / "shop", days=2, files=2, rows=1065)
    env = {**environment(), "RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    command = [sys.executable, str(ROOT / "examples" / "train_ray.py"), str(shop), "50"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "a failure, to see the restart" in done.stderr + done.stdout
    metrics = ast.literal_eval(done.stdout.splitlines()[-1])
    assert metrics == {"epoch": 1, "rows": 4260 + 64}  # 67 batches, and the first again


def test_actors_read_what_they_are_given(rows_table: Path) -> None:
    """An actor has no ranks but those that it is given."""

    @ray.remote(num_cpus=1)
    class Reader:
        def read(self, dataset: ParquetDataset) -> list[int]:
            return [i for batch in Loader(dataset) for i in batch["id"].tolist()]

    readers = [Reader.remote() for _ in range(2)]  # type: ignore[attr-defined]
    halves = [ParquetDataset(rows_table, batch_size=BATCH, num_replicas=2, rank=rank) for rank in range(2)]
    rows = ray.get([reader.read.remote(half) for reader, half in zip(readers, halves, strict=True)])
    assert set(rows[0]) | set(rows[1]) == set(range(ROWS))
    assert len(rows[0]) + len(rows[1]) == ROWS + BATCH
    complete = ray.get(readers[0].read.remote(ParquetDataset(rows_table)))
    assert sorted(complete) == list(range(ROWS))
    for reader in readers:
        ray.kill(reader)
