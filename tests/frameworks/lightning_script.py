"""Runs Lightning in forked ranks: ``lightning_script.py STAGES.json``.

The file holds a list of stages. Each names a number of ranks and what they do, one after the other; its processes are
forked from this one, because importing Lightning takes longer than they do. What a rank finds goes to
``OUT/STAGE-RANK.json``.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import sys
import traceback
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader

from pqcache.torch import Loader, ParquetDataset
from tests.frameworks.forked_ranks import fork_ranks

BATCH = 310  # 21 batches of 6,300 rows: two ranks repeat one


def make_loader(options: dict[str, Any], shuffle: bool = True) -> DataLoader[Any]:
    """Return the loader that a case asks for."""
    dataset = ParquetDataset(
        options["table"],
        columns=["id", "price"],
        batch_size=options.get("batch", BATCH),
        lanes=4,
        seed=options.get("seed", 1),
        shuffle=shuffle and options.get("shuffle", True),
    )
    workers = options.get("workers", 0)
    if options.get("loader") == "plain":
        return DataLoader(dataset, batch_size=None, num_workers=workers)
    return Loader(dataset, num_workers=workers, refresh=options.get("refresh"))


class Model(lightning.LightningModule):
    """Learns nothing, and notes the ids that each step of it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: list[tuple[int, int, list[int]]] = []  # epoch, step, ids
        self.validated: list[list[int]] = []
        self.ranks_out = ""
        self.asks = False  # for lengths, wherever users may

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        if self.asks:
            assert len(self.trainer.train_dataloader.dataset)
        parts = batch if isinstance(batch, list) else [batch]
        ids = [i for part in parts for i in part["id"].tolist()]
        self.seen.append((self.current_epoch, self.trainer.fit_loop.total_batch_idx, ids))
        return self.layer(parts[0]["price"][:, None]).square().mean()

    def on_train_end(self) -> None:
        if self.ranks_out:  # of a process that Lightning spawned, which returns no model
            Path(f"{self.ranks_out}-{self.global_rank}.json").write_text(json.dumps(self.seen))

    def on_validation_start(self) -> None:
        self.validated.append([])

    def validation_step(self, batch: Any) -> None:
        self.validated[-1] += batch["id"].tolist()

    def predict_step(self, batch: Any) -> list[int]:
        ids: list[int] = batch["id"].tolist()
        return ids

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.asks:  # which makes Lightning set up its loaders before it restores them
            assert self.trainer.estimated_stepping_batches
        return torch.optim.SGD(self.parameters(), lr=0.01)


class ModelWithHooks(Model):
    """Saves and restores the place of a dataset in a plain DataLoader, as its documentation says."""

    def __init__(self, dataset: ParquetDataset) -> None:
        super().__init__()
        self.dataset = dataset

    def on_train_epoch_start(self) -> None:
        self.dataset.set_epoch(self.current_epoch)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        self.batch = batch
        return super().training_step(batch, index)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["place"] = self.dataset.state_dict(after=self.batch)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.dataset.load_state_dict(checkpoint["place"])


class Data(lightning.LightningDataModule):
    """Makes another loader of another dataset each time that it is asked, as many do."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        self.options = options

    def train_dataloader(self) -> DataLoader[Any]:
        loader = make_loader(self.options)
        if self.options.get("asks"):
            assert len(ParquetDataset(self.options["table"]))
        return loader

    def val_dataloader(self) -> DataLoader[Any]:
        return make_loader(self.options, shuffle=False)

    predict_dataloader = val_dataloader


def trainer_of(options: dict[str, Any]) -> lightning.Trainer:
    saving = []
    if "saved" in options:
        saving = [ModelCheckpoint(options["saved"], filename="{step}", save_top_k=-1, **options["save"])]
    return lightning.Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=bool(saving),
        callbacks=saving,
        devices=options.get("devices", int(os.environ.get("WORLD_SIZE", "1"))),
        strategy=options.get("strategy", "ddp" if "WORLD_SIZE" in os.environ else "auto"),
        **{"max_epochs": 2, "num_sanity_val_steps": 0, **options.get("trainer", {})},
    )


def fit(options: dict[str, Any]) -> dict[str, Any]:
    """Train, or resume; return what was seen."""
    model, trainer = Model(), trainer_of(options)
    data: dict[str, Any] = {"datamodule": Data(options)} if options.get("module") else {}
    if options.get("combined"):
        pair = [make_loader(options), make_loader({**options, "seed": 2, "batch": 2 * BATCH})]
        data = {"train_dataloaders": CombinedLoader(pair, options["combined"])}
    elif not data:
        data = {"train_dataloaders": make_loader(options)}
        if options.get("looked"):
            _ = next(iter(data["train_dataloaders"]))
        if options.get("hooks"):
            model = ModelWithHooks(data["train_dataloaders"].dataset)
        if options.get("validate"):
            data["val_dataloaders"] = make_loader(options, shuffle=False)
    if "ranks_out" in options:
        model.ranks_out = options["ranks_out"]
    model.asks = options.get("asks", False)
    trainer.fit(model, **data, ckpt_path=options.get("resume"), weights_only=options.get("weights_only"))
    return {"seen": model.seen, "validated": model.validated, "batches": trainer.num_training_batches}


def predict(options: dict[str, Any]) -> dict[str, Any]:
    """Predict of what the module loads."""
    data = {"datamodule": Data(options)} if options.get("module") else {"dataloaders": make_loader(options, False)}
    return {"predicted": trainer_of(options).predict(Model(), **data)}


def fabric(options: dict[str, Any]) -> dict[str, Any]:
    """Train with Fabric; save after some of its steps; or resume."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    runner = Fabric(accelerator="cpu", devices=ranks, strategy="ddp" if ranks > 1 else "auto")
    runner.launch()
    model = torch.nn.Linear(1, 1)
    model, optimizer = runner.setup(model, torch.optim.SGD(model.parameters(), lr=0.01))
    loader = make_loader(options)
    batches = runner.setup_dataloaders(loader, use_distributed_sampler=options.get("sampler", True))
    state = {"model": model, "optimizer": optimizer, "loader": batches}
    if "resume" in options:
        runner.load(options["resume"], state)
    seen, steps = [], 0
    for epoch in range(getattr(loader, "epoch", 0), options.get("epochs", 2)):
        for batch in batches:
            loss = model(batch["price"][:, None]).square().mean()
            runner.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            seen.append((epoch, steps, batch["id"].tolist()))
            steps += 1
            if steps in options.get("save", []):
                runner.save(Path(options["saved"]) / f"{steps}.ckpt", state)
    return {"seen": seen, "batches": len(batches)}


KINDS = {"fit": fit, "predict": predict, "fabric": fabric}


def run_cases(stage: dict[str, Any], rank: int) -> None:
    found = {}
    for name, options in stage["cases"].items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                result = KINDS[options.get("kind", "fit")](options)
            except Exception as error:  # noqa: BLE001
                result = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
        said, of_lightning = [], []
        for warning in caught:
            (of_lightning if "site-packages/lightning" in warning.filename else said).append(str(warning.message))
        found[name] = {**result, "warnings": said, "of lightning": of_lightning}
    (Path(stage["out"]) / f"{stage['name']}-{rank}.json").write_text(json.dumps(found))


def main(path: str) -> int:
    """Run all stages; return how many of them did not end well."""
    logging.getLogger("lightning").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    multiprocessing.set_forkserver_preload(["lightning", "pqcache.torch"])
    stages = json.loads(Path(path).read_text())
    return sum(not fork_ranks(stage["ranks"], partial(run_cases, stage)) for stage in stages)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
