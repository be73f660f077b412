"""Lightning and Fabric: every row once an epoch over all ranks, and the place after a resume; or a clear refusal.

Everything runs in one start of ``lightning_script.py``: first trainings that save checkpoints, then, in new processes,
trainings that resume from them. Tests look at what their cases found.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import pqcache
from tests import ROOT
from tests.datasets import write_shop
from tests.frameworks.conftest import ROWS
from tests.frameworks.forked_ranks import run_python
from tests.frameworks.lightning_script import BATCH
from tests.scripts import run_script
from tests.test_docs import environment

HERE = Path(__file__).parent
BATCHES = -(-ROWS // BATCH)
ROUNDS = -(-BATCHES // 2)  # of two ranks
PLAIN: dict[str, Any] = {"loader": "plain"}
HOOKS: dict[str, Any] = {"loader": "plain", "hooks": True}
RELOAD: dict[str, Any] = {"module": True, "trainer": {"reload_dataloaders_every_n_epochs": 1}}
VALIDATE: dict[str, Any] = {"validate": True, "trainer": {"val_check_interval": 0.25, "num_sanity_val_steps": 2}}
ASKS: dict[str, Any] = {"asks": True}
FABRIC: dict[str, Any] = {"kind": "fabric"}

# trainings of one process that save after each 7 of 21 steps, and the steps that others resume from
RESUMED: dict[str, tuple[dict[str, Any], list[int]]] = {
    "loader": ({}, [7, 21, 28, 42]),
    "workers": ({"workers": 2}, [7, 28]),
    "asks": (ASKS, [7, 21, 28]),
    "asks, module": ({**ASKS, "module": True, "workers": 2}, [7]),
    "hooks": (HOOKS, [7, 21, 28]),
    "reload": (RELOAD, [7, 21, 28]),
    "accumulate": ({"trainer": {"accumulate_grad_batches": 2}}, [14]),
    "validation": (VALIDATE, [7, 21]),
    "cycle": ({"combined": "max_size_cycle"}, [7, 14, 21, 28]),
    "fabric": (FABRIC, [7, 21, 28]),
}
ALONE: dict[str, dict[str, Any]] = {  # of one process, that save nothing
    "plain": PLAIN,
    "plain, in order": {**PLAIN, "shuffle": False},
    "plain, one epoch": {**PLAIN, "trainer": {"max_epochs": 1}},
    "plain, fabric": {**PLAIN, **FABRIC},
    "looked": {"looked": True},
    "half": {"trainer": {"limit_train_batches": 0.5}},
    "overfit": {"trainer": {"overfit_batches": 3}},
    "overfit, in order": {"shuffle": False, "trainer": {"overfit_batches": 3}},
    "refresh": {"refresh": "epoch"},
    "predict, module": {"kind": "predict", "module": True},
}
TWO: dict[str, dict[str, Any]] = {  # of two processes; the first three save
    "loader": {},
    "workers": {"workers": 2, "validate": True, "trainer": {"use_distributed_sampler": False}},
    "fabric": FABRIC,
    "fabric, workers": {**FABRIC, "workers": 2, "sampler": False},
    "plain": PLAIN,
    "module": RELOAD,
}

Found = dict[str, list[dict[str, Any]]]


def stages(saved: Path) -> list[dict[str, Any]]:
    """Return what the script does."""

    def saving(name: str, options: dict[str, Any], every: int) -> dict[str, Any]:
        if options.get("kind") == "fabric":
            return {**options, "saved": str(saved / name), "save": list(range(every, 100, every))}
        if name == "accumulate":  # its steps are of two batches
            every = 7
        return {**options, "saved": str(saved / name), "save": {"every_n_train_steps": every}}

    def resuming(name: str, step: int, options: dict[str, Any], of: str = "") -> dict[str, Any]:
        file = f"{step}.ckpt" if options.get("kind") == "fabric" else f"step={step}.ckpt"
        return {f"{name}@{step}": {**options, "resume": str(saved / (of or name) / file)}}

    first = {name: saving(name, options, 7) for name, (options, _) in RESUMED.items()}
    two = {f"2 {name}": TWO[name] for name in TWO}
    two |= {f"2 {name}": saving(f"2 {name}", TWO[name], 1) for name in list(TWO)[:3]}
    first["plain, saved"] = saving("plain, saved", PLAIN, 7)
    first["plain, fabric, saved"] = saving("plain, fabric, saved", {**PLAIN, **FABRIC}, 7)
    later: dict[str, Any] = {}
    for name, (options, steps) in RESUMED.items():
        for step in steps:
            later |= resuming(name, step, options)
    later |= resuming("to plain", 7, PLAIN, "loader")
    later |= resuming("from plain", 7, {}, "plain, saved")
    later |= resuming("from plain", 21, {}, "plain, saved")
    later |= resuming("plain", 7, PLAIN, "plain, saved")
    later |= resuming("plain, fabric, saved", 7, {**PLAIN, **FABRIC})
    later |= resuming("from two, asks", 4, ASKS, "2 loader")
    later |= resuming("from two", 4, {}, "2 loader") | resuming("from two", 11, {}, "2 loader")
    later2: dict[str, Any] = {}
    for name in list(TWO)[:3]:
        for step in (4, 11, 15):
            later2 |= resuming(f"2 {name}", step, TWO[name])
    later2 |= resuming("2 from one", 7, {}, "loader") | resuming("2 from one", 21, {}, "loader")
    spawned = {"spawned": {"devices": 2, "strategy": "ddp_fork", "workers": 2, "ranks_out": str(saved / "forked")}}
    return [
        {"name": "first", "ranks": 1, "cases": first | ALONE},
        {"name": "two", "ranks": 2, "cases": two},
        {"name": "later", "ranks": 1, "cases": later},
        {"name": "later two", "ranks": 2, "cases": later2},
        {"name": "spawned", "ranks": 1, "cases": spawned},
    ]


@pytest.fixture(scope="module")
def found(rows_table: Path, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What each rank found in each case."""
    root = tmp_path_factory.mktemp("lightning")
    plan, cache = stages(root / "saved"), root / "cache"
    pqcache.sync(rows_table, cache)
    (root / "saved").mkdir()
    for stage in plan:
        stage["out"] = str(root)
        for options in stage["cases"].values():
            options["table"] = str(cache if "refresh" in options else rows_table)
    (root / "stages.json").write_text(json.dumps(plan))
    run_python([str(HERE / "lightning_script.py"), str(root / "stages.json")], root)
    files = {stage["name"]: [root / f"{stage['name']}-{rank}.json" for rank in range(stage["ranks"])] for stage in plan}
    ranks = {name: [json.loads(path.read_text()) for path in paths] for name, paths in files.items()}
    results = {case: [rank[case] for rank in ranks[stage["name"]]] for stage in plan for case in stage["cases"]}
    results["spawned"] = [{"seen": json.loads(path.read_text())} for path in sorted(root.glob("saved/forked-*.json"))]
    return results


def ids(found: dict[str, Any], epoch: int) -> list[int]:
    assert "error" not in found, found["trace"]
    return [i for e, _, batch in found["seen"] if e == epoch for i in batch]


def lengths(ranks: list[dict[str, Any]], epoch: int) -> list[int]:
    return [sum(e == epoch for e, _, _ in rank["seen"]) for rank in ranks]


@pytest.mark.parametrize("case", ["loader", "workers", "hooks", "reload", "accumulate", "fabric"])
def test_one_process_sees_every_row_once_in_another_order(found: Found, case: str) -> None:
    orders = [ids(found[case][0], epoch) for epoch in (0, 1)]
    assert all(sorted(order) == list(range(ROWS)) for order in orders)
    assert orders[0] != orders[1]
    assert [lengths(found[case], epoch) for epoch in (0, 1)] == [[BATCHES], [BATCHES]]


def test_a_look_at_a_batch_before_is_no_epoch(found: Found) -> None:
    assert [ids(found["looked"][0], epoch) for epoch in (0, 1)] == [ids(found["loader"][0], epoch) for epoch in (0, 1)]


@pytest.mark.parametrize("case", [*(f"2 {name}" for name in TWO), "spawned"])
def test_two_processes_share_every_row(found: Found, case: str) -> None:
    for epoch in (0, 1):
        seen = Counter(i for rank in found[case] for i in ids(rank, epoch))
        assert len(found[case]) == 2
        assert set(seen) == set(range(ROWS))
        assert seen.total() == ROWS + BATCH, "one batch is repeated, so that both have as many"
        assert lengths(found[case], epoch) == [ROUNDS, ROUNDS]
    if case != "2 plain":
        assert ids(found[case][0], 0) != ids(found[case][0], 1)


@pytest.mark.parametrize(
    ("case", "step"),
    [(name, step) for name, (_, steps) in RESUMED.items() for step in steps]
    + [(f"2 {name}", step) for name in list(TWO)[:3] for step in (4, 11, 15)],
)
def test_a_new_process_goes_on_where_the_old_one_was(found: Found, case: str, step: int) -> None:
    """With the very batches that the undisturbed run had after that step."""
    batches = {"accumulate": 21 + 6}.get(case, step)  # 14 steps of two batches, the eleventh of an epoch of one
    for whole, resumed in zip(found[case], found[f"{case}@{step}"], strict=True):
        assert "error" not in resumed, resumed["trace"]
        expected = [(epoch, batch) for epoch, _, batch in whole["seen"][batches:]]
        assert [(epoch, batch) for epoch, _, batch in resumed["seen"]] == expected


def test_parts_of_epochs(found: Found) -> None:
    orders = [ids(found["half"][0], epoch) for epoch in (0, 1)]
    assert [len(set(order)) for order in orders] == [BATCHES // 2 * BATCH] * 2
    assert orders[0] != orders[1]


def test_validation_and_prediction_see_every_row(found: Found) -> None:
    sanity, *rest = found["validation"][0]["validated"]
    assert len(sanity) == 2 * BATCH
    assert len(rest) == 8
    assert all(sorted(ids) == list(range(ROWS)) for ids in rest)
    for epoch in (0, 1):
        assert {i for rank in found["2 workers"] for i in rank["validated"][epoch]} == set(range(ROWS))
    assert sorted(i for batch in found["predict, module"][0]["predicted"] for i in batch) == list(range(ROWS))


@pytest.mark.parametrize("case", ["plain", "2 plain", "plain, fabric"])
def test_the_order_of_epoch_0_again_is_warned_of(found: Found, case: str) -> None:
    for rank in found[case]:
        assert ids(rank, 0) == ids(rank, 1)
        assert any("use pqcache.torch.Loader" in said.replace("Use", "use") for said in rank["warnings"])


@pytest.mark.parametrize("case", ["hooks", "plain, in order", "plain, one epoch", "loader", "2 loader", "fabric"])
def test_nothing_else_is_warned_of(found: Found, case: str) -> None:
    assert [rank["warnings"] for rank in found[case]] == [[]] * len(found[case])


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("from plain@7", "UsageError.* after 7 batches .* goes on after 0"),
        ("to plain@7", "0 stateful loaders, but found 1 states"),
        ("from two, asks@4", "UsageError.* after 4 batches .* goes on after 8"),
        ("from two@4", "UsageError.* after 4 batches .* goes on after 8"),
        ("from two@11", "UsageError.* after 11 batches .* goes on after 0.*save_on_train_epoch_end"),
        ("2 from one@7", "UsageError.* after 7 batches .* goes on after 3.5"),
        ("plain, fabric, saved@7", "UnpicklingError.*Weights only load failed"),  # a loader that has no place
        ("refresh", "UsageError.*refresh='epoch'.*reload_dataloaders_every_n_epochs=1"),
        ("overfit", "UsageError.*overfit_batches=3.*shuffle=False"),
    ],
)
def test_what_cannot_be_right_is_refused(found: Found, case: str, says: str) -> None:
    for rank in found[case]:
        with pytest.raises(AssertionError, match=says):
            raise AssertionError(rank.get("error", "it was not refused"))


def test_lightning_warns_where_a_plain_loader_goes_on_without_its_place(found: Found) -> None:
    for rank in found["plain@7"]:
        assert any("your dataloader is not resumable" in said for said in rank["of lightning"])


def test_the_same_batches_are_fitted_again(found: Found) -> None:
    assert ids(found["overfit, in order"][0], 0) == ids(found["overfit, in order"][0], 1) == list(range(3 * BATCH))


def test_other_ranks_resume_at_the_end_of_an_epoch(found: Found) -> None:
    assert {i for rank in found["2 from one@21"] for i in ids(rank, 1)} == set(range(ROWS))
    assert sorted(ids(found["from plain@21"][0], 1)) == list(range(ROWS))


def test_the_example_resumes_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    shop = write_shop(tmp_path / "shop", days=2, files=2, rows=400)  # 25 batches
    printed = []
    for steps in ("10", "-1"):
        words = [str(shop), steps]
        done = run_script(ROOT / "examples" / "train_lightning.py", *words, cwd=tmp_path, env=environment())
        assert done.returncode == 0, done.stderr[-3000:]
        printed.append([line for line in done.stdout.splitlines() if line.startswith("rank")])
    assert printed == [
        ["rank 0, epoch 0: 640 rows"],
        ["rank 0, epoch 0: 960 rows", "rank 0, epoch 1: 1600 rows"],
    ]
