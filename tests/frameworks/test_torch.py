"""Ranks with DDP and FSDP2, meshes, distributed checkpoints, torchdata and numpy: every row once, and the place."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from pqcache.store.sync.command import sync
from tests import ROOT
from tests.datasets import write_shop
from tests.frameworks.conftest import ROWS
from tests.frameworks.forked_ranks import Found, run_scenes
from tests.scripts import run_under_torchrun
from tests.test_docs import blocks_of, environment

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torchdata") is None, reason="torchdata is not installed")

BATCHES = 99  # of 64 rows
SCENES = ["error", "epochs", "meshes", "saved"]


@pytest.fixture(scope="module")
def found(rows_table: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Found]:
    """What each rank found, with one process and with two, and in new processes after the states that were saved."""
    root = tmp_path_factory.mktemp("torch")
    sync(str(rows_table), root / "cache")
    return run_scenes("tests.frameworks.torch_ranks", root, SCENES, ["resumed"], rows=rows_table, cache=root / "cache")


def in_order(of_ranks: list[list[list[int]]]) -> list[list[int]]:
    """Return the batches of all ranks in the order of their indices; ranks have the same number."""
    return [batch for step in zip(*of_ranks, strict=True) for batch in step]


def check_epoch(of_ranks: list[list[list[int]]]) -> list[list[int]]:
    """Return the epoch's batches in order, after checking that they are every row, filled up with the first batches."""
    batches = in_order(of_ranks)
    assert sorted(i for batch in batches[:BATCHES] for i in batch) == list(range(ROWS))
    assert batches[BATCHES:] == batches[: -BATCHES % len(of_ranks)]
    return batches[:BATCHES]


def epochs_of(ranks: list[dict[str, Any]]) -> list[list[list[int]]]:
    return [check_epoch([rank["epochs"]["Loader, 0 workers"][epoch] for rank in ranks]) for epoch in range(2)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_kind_of_loader_has_every_row_in_the_same_order(found: dict[int, Found], ranks: int) -> None:
    expected = epochs_of(found[1])  # with lanes=4 also the same on any number of ranks
    assert expected[0] != expected[1]
    names = found[ranks][0]["epochs"].keys()
    assert len(names) == 9
    for name in names:
        for epoch in range(2):
            assert check_epoch([rank["epochs"][name][epoch] for rank in found[ranks]]) == expected[epoch], name


@pytest.mark.parametrize("ranks", [1, 2])
def test_tensor_parallel_ranks_read_the_same_rows(found: dict[int, Found], ranks: int) -> None:
    expected = epochs_of(found[1])[0]
    for name, (*_,) in found[ranks][0]["meshes"].items():
        groups: dict[int, list[list[list[int]]]] = {}
        for rank in found[ranks]:
            place, batches = rank["meshes"][name]
            groups.setdefault(place, []).append(batches)
        data_parallel, tensor_parallel = map(int, name.split(" x "))
        assert [len(groups[place]) for place in range(data_parallel)] == [tensor_parallel] * data_parallel
        assert all(batches == same[0] for same in groups.values() for batches in same)
        assert check_epoch([groups[place][0] for place in range(data_parallel)]) == expected


def test_places_are_kept_in_new_processes(found: dict[int, Found]) -> None:
    first, second = epochs_of(found[1])
    for name, saved_on in {"dcp": 1, "stateful": 2, "stateful, workers": 2, "nodes": 2}.items():
        before = in_order([rank["saved"][name] for rank in found[saved_on]])
        assert before == first[: len(before)], name
        assert len(before) == 11 * saved_on
        after = in_order([rank["resumed"][name][0] for rank in found[2]])
        # lanes belong to ranks: after an odd number of batches the second rank has the next one
        assert sorted((before + after)[:BATCHES]) == sorted(first), name
        assert len(before + after) == BATCHES + (saved_on == 2)
        assert check_epoch([rank["resumed"][name][1] for rank in found[2]]) == second, name


def test_ranks_without_a_process_group_are_refused(found: dict[int, Found]) -> None:
    """They would read all rows each."""
    assert [rank["error"] for rank in found[1]] == [""]
    for rank in found[2]:
        assert "WORLD_SIZE=2" in rank["error"]


def test_the_page_runs_under_torchrun(tmp_path: Path) -> None:
    write_shop(tmp_path / "lake", rows=600)
    sync(str(tmp_path / "lake"), tmp_path / "cache" / "shop")
    texts = [block.text for block in blocks_of(ROOT / "docs" / "frameworks" / "torch.md")]
    (program,) = [text for text in texts if text.startswith("# torchrun ")]
    (tmp_path / "program.py").write_text(program)
    done = run_under_torchrun([str(tmp_path / "program.py")], 2, tmp_path, environment())
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "checkpoint" / ".metadata").exists()
