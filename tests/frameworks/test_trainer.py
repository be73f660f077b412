"""transformers' Trainer on one and two processes: every row, the place kept, each evaluated once, or a refusal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers

from tests.datasets import write_shop
from tests.frameworks import with_trainer
from tests.frameworks.conftest import ROWS
from tests.frameworks.forked_ranks import Found, run_scenes
from tests.scripts import run_script
from tests.test_docs import ROOT, environment

EXAMPLE = ROOT / "examples" / "train_trainer.py"
EVERY_ROW = list(range(ROWS))
BATCHES = 51  # of 124 rows; the last has 100
SCENES = ["whole", "interrupted", "evaluated", "refused", "rows"]


@pytest.fixture(scope="module")
def runs(rows_table: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Found]:
    directory = tmp_path_factory.mktemp("trainer")
    return run_scenes(with_trainer.__name__, directory, SCENES, ["resumed"], table=rows_table)


@pytest.fixture(params=[1, 2], ids=["1 process", "2 processes"])
def found(runs: dict[int, Found], request: pytest.FixtureRequest) -> Found:
    return runs[request.param]


def joined(epochs: list[list[int]]) -> list[int]:
    return [row for rows in epochs for row in rows]


def check_whole(epoch: list[list[int]]) -> None:
    """Check what the ranks read in an epoch: every row, and the same number on all of them."""
    assert len({len(rows) for rows in epoch}) == 1
    assert sorted({row for rows in epoch for row in rows}) == EVERY_ROW
    assert len(epoch[0]) == (ROWS if len(epoch) == 1 else -(-BATCHES // 2) * 124)


@pytest.mark.parametrize("case", ["0", "2", "accumulated"])
def test_epochs_have_every_row_in_another_order(found: Found, case: str) -> None:
    runs = [rank["whole"][case] for rank in found]
    length = -(-BATCHES // len(found))
    for number in range(len(runs[0]["epochs"])):
        check_whole([run["epochs"][number] for run in runs])
    assert runs[0]["epochs"][0] != runs[0]["epochs"][1]
    for run in runs:
        assert run["steps"] == len(run["epochs"]) * (length if case != "accumulated" else -(-length // 4))
        assert run["examples"] == ROWS


def test_max_steps_may_end_within_an_epoch(found: Found) -> None:
    for rank in found:
        whole, run = rank["whole"]["0"]["epochs"], rank["whole"]["max_steps"]
        assert run["steps"] == 60
        assert joined(run["epochs"]) == joined(whole)[: sum(map(len, run["epochs"]))]
        assert len(run["epochs"]) == -(-60 // -(-BATCHES // len(found)))


@pytest.mark.parametrize("case", ["middle", "end", "accumulated", "workers"])
def test_a_new_process_goes_on_at_the_checkpoint(found: Found, case: str) -> None:
    """Together with what was read before, it is what an uninterrupted run reads."""
    for rank in found:
        whole = rank["whole"]["2" if case == "workers" else "0"]
        before, after = rank["interrupted"][case], rank["resumed"][case]
        assert joined(before["epochs"]) + joined(after["epochs"]) == joined(whole["epochs"])
        assert after["epoch"] == len(whole["epochs"])


def test_ignoring_the_place_begins_the_epoch_again_and_is_said(found: Found) -> None:
    for rank in found:
        assert rank["resumed"]["ignored"]["epochs"][0] == rank["whole"]["0"]["epochs"][1]
        assert len(rank["resumed"]["said"]) == 1


def test_a_checkpoint_of_another_place_is_refused(found: Found) -> None:
    for rank in found:
        assert "gradient_accumulation_steps as before" in rank["resumed"]["other steps"]
        assert "has no pqcache.json" in rank["resumed"]["no place"]


@pytest.mark.parametrize("workers", ["0", "2"])
def test_evaluation_counts_every_row_once(found: Found, workers: str) -> None:
    for rank in found:
        evaluated = rank["evaluated"][workers]
        *evaluations, prediction = evaluated["counted"]
        assert len(evaluations) == 3  # twice in training, once for a dict of datasets
        assert all(predicted == labels == EVERY_ROW for predicted, labels in evaluations)
        assert evaluated["mean"] == sum(EVERY_ROW) / ROWS
        assert sorted(evaluated["predicted"]) == sorted(prediction[1]) == EVERY_ROW


@pytest.mark.parametrize("name", [*with_trainer.REFUSED, "data_collator", "eval_dataset"])
def test_what_the_dataset_decides_is_refused_by_name(found: Found, name: str) -> None:
    if name in with_trainer.REFUSED and not hasattr(transformers.TrainingArguments, name):
        pytest.skip(f"this transformers has no {name}")
    assert all(rank["refused"][name].startswith(name) for rank in found)


@pytest.mark.parametrize("case", ["pad=False", "pad=False in training", "mix"])
def test_unequal_processes_are_refused(found: Found, case: str) -> None:
    """The Trainer gathers what all processes have at each batch: it would end in a crash, or count rows twice."""
    subject = "eval_dataset" if case == "mix" else "pad=False"
    for rank in found:
        assert rank["refused"][case].startswith(subject) == (len(found) > 1)


def test_trainer_without_help_is_exact_or_refused(found: Found) -> None:
    """Batches of batches, rows that two share out: refused. Rows of which Accelerate alone makes batches: all there."""
    advice = "from pqcache.torch.trainer import Trainer"
    for rank in found:
        assert advice in rank["refused"]["naive"]
        assert advice in rank["refused"]["naive workers"]
        assert (advice in rank["rows"]["error"]) == (len(found) > 1)
    for of_ranks in zip(*(rank["rows"]["one reader"]["epochs"] for rank in found), strict=True):
        assert sorted({row for rows in of_ranks for row in rows}) == EVERY_ROW
        assert len({len(rows) for rows in of_ranks}) == 1


def test_the_example_goes_on_at_its_last_checkpoint(tmp_path: Path) -> None:
    """4,400 rows in 69 batches, on one process; the first run ends within epoch 1."""
    shop = write_shop(tmp_path / "shop", rows=600)
    for words, step, batch in ((["80"], 80, 11), ([], 138, 69)):
        done = run_script(EXAMPLE, str(shop), "runs", *words, cwd=tmp_path, env=environment())
        assert done.returncode == 0, done.stderr[-3000:]
        assert "'eval_rows': '1000'" in done.stdout
        place = json.loads((tmp_path / "runs" / f"checkpoint-{step}" / "pqcache.json").read_text())
        assert (place["epoch"], place["batch"]) == (1, batch)
