"""What Accelerate does with a Loader and with plain loaders, on each rank; run by test_accelerate.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, skip_first_batches
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader

from pqcache.torch import Batch, Loader, ParquetDataset
from tests.frameworks.forked_ranks import refusal

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "dispatch": {"dispatch_batches": True},
    "no dispatch": {"dispatch_batches": False},
    "split": {"split_batches": True},
    "not even": {"even_batches": False},
    "stateful": {"use_stateful_dataloader": True},
    "others": {"non_blocking": True, "use_seedable_sampler": True, "data_seed": 3},
}


def ids(batches: Any) -> list[int]:
    return [i for batch in batches for i in batch["id"].reshape(-1).tolist()]


class Scenes:
    """Each method returns what it saw on this rank, as JSON values."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.table, self.state = options["table"], Path(options["state"])
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)

    def dataset(self, **options: Any) -> ParquetDataset:
        return ParquetDataset(self.table, **{"batch_size": 64, "seed": 1, **options})

    def configure(self, name: str) -> Accelerator:
        self.accelerator.dataloader_config = DataLoaderConfiguration(**CONFIGURATIONS[name])
        return self.accelerator

    def prepared(self) -> dict[str, Any]:
        found = {}
        for name in CONFIGURATIONS:
            loader = Loader(self.dataset())
            assert self.configure(name).prepare(loader) is loader
            found[name] = [ids(loader) for _ in range(2 if name == "default" else 1)]
        return found

    def of_workers(self) -> dict[str, Any]:
        loader = self.configure("default").prepare(Loader(self.dataset(), num_workers=2, device="cpu"))
        epochs = []
        for _ in range(2):
            batches = list(loader)
            assert all(type(batch) is Batch and batch["id"].device.type == "cpu" for batch in batches)
            epochs.append(ids(batches))
        return {"epochs": epochs, "length": len(loader)}

    def naive(self) -> dict[str, Any]:
        """What most write first: epochs in one process, errors with several."""
        found: dict[str, Any] = {}
        for name in ("default", "no dispatch"):
            for size in (64, None):
                dataset = self.dataset(batch_size=size)
                plain = DataLoader(dataset, batch_size=None if size else 64, num_workers=2 if size else 0)
                loader = self.configure(name).prepare(plain)
                epochs: list[Any] = []
                error = refusal(lambda: epochs.extend(ids(loader) for _ in range(2)))  # noqa: B023
                found[f"{name} {size}"] = {"error": error, "epochs": epochs}
                if not error:
                    _ = next(iter(loader))
                    found[f"{name} {size}"]["no place"] = refusal(dataset.state_dict)
        return found

    def one_reader(self) -> dict[str, Any]:
        """Rows of a dataset that does not divide them, by loaders of Accelerate's that do."""
        found = {}
        for name in ("dispatch", "no dispatch", "split"):
            dataset = self.dataset(batch_size=None, num_replicas=1, rank=0)
            loader = self.configure(name).prepare(DataLoader(dataset, batch_size=64))
            found[name] = [ids(loader) for _ in range(2)]
        return found

    def skipped(self) -> str:
        return refusal(lambda: skip_first_batches(self.configure("default").prepare(Loader(self.dataset())), 3))

    def accumulated(self) -> list[int]:
        """The batches after which the optimizer made a step."""
        accelerator = self.configure("default")
        model = torch.nn.Linear(1, 1)
        loader, model, optimizer = accelerator.prepare(
            Loader(self.dataset()), model, torch.optim.SGD(model.parameters(), lr=1e-6)
        )
        steps = []
        for number, batch in enumerate(loader, 1):
            with accelerator.accumulate(model):
                accelerator.backward(model(batch["price"][:, None]).mean())
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                steps.append(number)
        assert not accelerator.gradient_state.in_dataloader
        return steps

    def evaluated(self) -> dict[str, Any]:
        """The rows that metrics count, within a training that has a loader of its own."""
        accelerator, found = self.configure("default"), {}
        for workers in (0, 2):
            for shuffle in (False, True):
                training = iter(accelerator.prepare(Loader(self.dataset())))
                next(training)
                loader = accelerator.prepare(Loader(self.dataset(shuffle=shuffle), num_workers=workers))
                counted: list[int] = []
                objects: list[int] = []
                for batch in loader:
                    number, price = accelerator.gather_for_metrics((batch["id"], batch["price"]))
                    assert len(number) == len(price)
                    counted += number.tolist()
                    objects += accelerator.gather_for_metrics(batch["id"].tolist(), use_gather_object=True)
                assert objects == counted
                assert not accelerator.gradient_state.end_of_dataloader, "the training is not at its end"
                found[f"{workers} {shuffle}"] = counted
        return found

    def save(self) -> dict[str, Any]:
        """Save the state within epoch 1 and at its end, and read on."""
        found = {}
        for workers in (0, 2):
            accelerator = self.configure("default")
            accelerator._dataloaders.clear()
            loader = accelerator.prepare(Loader(self.dataset(), num_workers=workers))
            list(loader)
            batches = iter(loader)
            for _ in range(20):
                next(batches)
            accelerator.save_state(str(self.state / f"middle-{workers}"))
            middle = ids(batches)
            accelerator.save_state(str(self.state / f"end-{workers}"))
            after = ids(loader)
            found[f"middle-{workers}"], found[f"end-{workers}"] = [middle, after], [after, ids(loader)]
        return found

    def resume(self) -> dict[str, Any]:
        """What is read after ``load_state`` in a new process."""
        found = {}
        for workers in (0, 2):
            for place in (f"middle-{workers}", f"end-{workers}"):
                accelerator = self.configure("default")
                accelerator._dataloaders.clear()
                loader = accelerator.prepare(Loader(self.dataset(), num_workers=workers))
                accelerator.load_state(str(self.state / place))
                found[place] = [ids(loader) for _ in range(2)]
        return found
