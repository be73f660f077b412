"""Accelerate on one and two processes: every row, another order each epoch, the place kept, or a refusal."""

from __future__ import annotations

from pathlib import Path

import accelerate.data_loader
import pytest
from accelerate import Accelerator
from accelerate.state import GradientState

from pqcache.torch import Loader, ParquetDataset
from tests.datasets import write_shop
from tests.frameworks import with_accelerate
from tests.frameworks.conftest import ROWS
from tests.frameworks.forked_ranks import Found, run_scenes
from tests.scripts import run_script, run_under_torchrun
from tests.test_docs import ROOT, environment

EVERY_ROW = list(range(ROWS))
BATCHES = 99  # of 64 rows; the last has 28
SCENES = ["prepared", "of_workers", "one_reader", "skipped", "accumulated", "evaluated", "save", "naive"]


@pytest.fixture(scope="module")
def runs(rows_table: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Found]:
    directory = tmp_path_factory.mktemp("accelerate")
    return run_scenes(with_accelerate.__name__, directory, SCENES, ["resume"], table=rows_table)


@pytest.fixture(params=[1, 2], ids=["1 process", "2 processes"])
def found(runs: dict[int, Found], request: pytest.FixtureRequest) -> Found:
    return runs[request.param]


def check_epochs(epochs: list[list[list[int]]]) -> None:
    """Check the rows of each rank's epochs: all there, of one number on all ranks, and in another order each time."""
    for of_ranks in zip(*epochs, strict=True):
        assert len({len(rows) for rows in of_ranks}) == 1
        assert len(of_ranks[0]) == (ROWS if len(of_ranks) == 1 else BATCHES // 2 * 64 + 64)
        assert sorted({row for rows in of_ranks for row in rows}) == EVERY_ROW
    assert len({tuple(rows) for rows in epochs[0]}) == len(epochs[0])


@pytest.mark.parametrize("configuration", with_accelerate.CONFIGURATIONS)
def test_a_prepared_loader_yields_every_row(found: Found, configuration: str) -> None:
    check_epochs([rank["prepared"][configuration] for rank in found])


def test_a_prepared_loader_with_workers_yields_every_row(found: Found) -> None:
    check_epochs([rank["of_workers"]["epochs"] for rank in found])
    assert {rank["of_workers"]["length"] for rank in found} == {-(-BATCHES // len(found))}


@pytest.mark.parametrize("case", ["default 64", "default None", "no dispatch 64", "no dispatch None"])
def test_a_plain_loader_is_exact_or_refused(found: Found, case: str) -> None:
    """``accelerator.prepare(DataLoader(dataset, ...))``, of batches and of rows."""
    results = [rank["naive"][case] for rank in found]
    if len(found) == 1:
        check_epochs([result["epochs"] for result in results])
        assert "use pqcache.torch.Loader" in results[0]["no place"]
    for result in results:
        assert len(found) == 1 or "use pqcache.torch.Loader(dataset)" in result["error"]


@pytest.mark.parametrize("case", ["dispatch", "no dispatch", "split"])
def test_accelerate_may_divide_the_rows_of_a_dataset_that_does_not(found: Found, case: str) -> None:
    epochs = [rank["one_reader"][case] for rank in found]
    for of_ranks in zip(*epochs, strict=True):
        assert len({len(rows) for rows in of_ranks}) == 1
        assert sorted({row for rows in of_ranks for row in rows}) == EVERY_ROW
        assert sum(map(len, of_ranks)) < ROWS + 64 * 2
    assert epochs[0][0] != epochs[0][1]


def test_skipping_is_refused_as_the_place_is_kept(found: Found) -> None:
    assert all("after accelerator.load_state()" in rank["skipped"] for rank in found)


def test_gradients_are_synchronized_at_the_last_batch(found: Found) -> None:
    length = -(-BATCHES // len(found))
    assert all(rank["accumulated"] == [*range(4, length, 4), length] for rank in found)


@pytest.mark.parametrize("case", ["0 False", "2 False", "0 True", "2 True"])
def test_metrics_count_every_row_once(found: Found, case: str) -> None:
    for rank in found:
        counted = rank["evaluated"][case]
        assert sorted(counted) == EVERY_ROW
        assert (counted == EVERY_ROW) == ("False" in case)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("place", ["middle", "end"])
def test_a_new_process_goes_on_where_the_state_was_saved(found: Found, workers: int, place: str) -> None:
    """In the middle of epoch 1, and after its last batch; the epoch that follows is right too."""
    for rank in found:
        assert rank["resume"][f"{place}-{workers}"] == rank["save"][f"{place}-{workers}"]
        assert len(rank["resume"][f"{place}-{workers}"][1]) > len(rank["resume"][f"middle-{workers}"][0])


def test_accelerate_still_has_the_names_that_the_loader_uses(rows_table: Path) -> None:
    """They are names of its own: without them ``prepare`` divides the rows again, and save_state loses the place."""
    accelerator = Accelerator(cpu=True)
    loader = Loader(ParquetDataset(rows_table, batch_size=64))
    assert accelerator.prepare(loader) is loader
    assert loader in accelerator._dataloaders
    batches = iter(loader)
    next(batches)
    assert accelerator.gradient_state.active_dataloader is loader
    batches.close()
    assert not accelerator.gradient_state.in_dataloader
    assert GradientState._shared_state
    for name in ("DataLoaderShard", "DataLoaderDispatcher", "IterableDatasetShard", "skip_first_batches"):
        assert hasattr(accelerate.data_loader, name), f"foreign_loaders.py knows {name}"


def test_the_example_goes_on_with_fewer_processes(tmp_path: Path) -> None:
    """4,400 rows in 69 batches; 40 of epoch 1 are consumed when the last checkpoint is written."""
    shop = write_shop(tmp_path / "shop", rows=600)
    script = str(ROOT / "examples" / "train_accelerate.py")
    first = run_under_torchrun([script, str(shop), "checkpoint", "25"], 2, tmp_path, environment())
    assert first.stdout.splitlines() == ["epoch 0: 4480 rows, evaluated on 1000"], first.stderr[-3000:]
    again = run_script(Path(script), str(shop), "checkpoint", cwd=tmp_path, env=environment())
    assert again.stdout.splitlines() == ["epoch 1: 1840 rows, evaluated on 1000"], again.stderr[-3000:]
