"""What torch does with loaders on each rank: DDP, FSDP2, numpy, states that are saved and resumed; by test_torch.py."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torchdata.nodes
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from pqcache import Cache
from pqcache.torch import Loader, ParquetDataset
from tests.frameworks.forked_ranks import refusal

BATCH = 64
Batches = list[list[int]]


def ids_of(batches: Iterable[Any]) -> Batches:
    return [batch["id"].tolist() for batch in batches]


def read(rows: Path, **options: Any) -> ParquetDataset:
    return ParquetDataset(rows, **{"batch_size": BATCH, "lanes": 4, **options})


def trained(loader: Iterable[Any], model: torch.nn.Module) -> Iterator[Any]:
    """Yield batches after a step on each: ranks with different numbers of batches would hang or fail here."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for batch in loader:
        model(batch["price"][:, None]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        yield batch


def epochs(rows: Path, cache: Cache, made_before: ParquetDataset) -> dict[str, list[Batches]]:
    """Return two epochs' batches of each kind of loader."""
    found = {}
    for workers in (0, 2):
        model = DistributedDataParallel(torch.nn.Linear(1, 1))
        loader = Loader(read(rows), num_workers=workers)
        found[f"Loader, {workers} workers"] = [ids_of(trained(loader, model)) for _ in range(2)]
        for kind in (DataLoader, StatefulDataLoader):
            dataset = read(rows)
            plain = kind(dataset, batch_size=None, num_workers=workers)
            found[f"{kind.__name__}, {workers} workers"] = []
            for epoch in range(2):
                dataset.set_epoch(epoch)
                found[f"{kind.__name__}, {workers} workers"].append(ids_of(plain))
    found["made before the group"] = [ids_of(loader) for loader in [Loader(made_before)] for _ in range(2)]
    nodes = torchdata.nodes.Loader(nodes_over(Loader(read(rows), num_workers=2)))
    found["nodes"] = [ids_of(nodes) for _ in range(2)]
    ranks = {"num_replicas": dist.get_world_size(), "rank": dist.get_rank()}
    found["numpy"] = [
        [
            batch["id"].to_numpy().tolist()
            for batch in cache.batches(["id"], batch_size=BATCH, epoch=e, lanes=4, **ranks)
        ]
        for e in range(2)
    ]
    return found


def nodes_over(loader: Loader) -> Any:
    """Return a pipeline that maps on threads and reads ahead."""
    mapped = torchdata.nodes.ParallelMapper(torchdata.nodes.IterableWrapper(loader), map_fn=dict, num_workers=2)
    return torchdata.nodes.Prefetcher(mapped, prefetch_factor=3)


def meshes(rows: Path) -> dict[str, Any]:
    """Return, for each mesh of data-parallel x tensor-parallel ranks, this rank's place in it and its batches."""
    world, found = dist.get_world_size(), {}
    for parallel in {1, world}:
        mesh = init_device_mesh("cpu", (world // parallel, parallel), mesh_dim_names=("dp", "tp"))
        dp = mesh["dp"]
        model = fully_shard(torch.nn.Linear(1, 1), mesh=dp)
        loader = Loader(read(rows, num_replicas=dp.size(), rank=dp.get_local_rank()))
        found[f"{dp.size()} x {parallel}"] = [dp.get_local_rank(), ids_of(trained(loader, model))]
    return found


def loaders(rows: Path) -> dict[str, Any]:
    """Return the loaders whose places are saved and resumed."""
    return {
        "dcp": Loader(read(rows), num_workers=2),
        "stateful": StatefulDataLoader(read(rows), batch_size=None),
        "stateful, workers": StatefulDataLoader(read(rows), batch_size=None, num_workers=2),
        "nodes": torchdata.nodes.Loader(nodes_over(Loader(read(rows)))),
    }


def save(rows: Path, states: Path) -> dict[str, Batches]:
    """Return the batches up to a state in mid-epoch that is saved below ``states``, for each kind."""
    found, own = {}, {}
    for name, loader in loaders(rows).items():
        batches = iter(loader)
        found[name] = [next(batches)["id"].tolist() for _ in range(11)]
        if name == "dcp":
            model = fully_shard(torch.nn.Linear(1, 1))
            dcp.save({"model": model.state_dict(), "loader": loader}, checkpoint_id=states / "dcp")
        else:
            own[name] = loader.state_dict()
    torch.save(own, states / f"rank-{dist.get_rank()}.pt")
    return found


def resume(rows: Path, dcp_states: Path, states: Path) -> dict[str, list[Batches]]:
    """Return the batches after a state, and those of the next epoch. A state of DCP may be of other ranks."""
    found = {}
    own = torch.load(states / f"rank-{dist.get_rank()}.pt", weights_only=False)
    for name, loader in loaders(rows).items():
        if name == "dcp":
            model = fully_shard(torch.nn.Linear(1, 1))
            dcp.load({"model": model.state_dict(), "loader": loader}, checkpoint_id=dcp_states / "dcp")
        else:
            loader.load_state_dict(own[name])
        rest = ids_of(loader)
        if isinstance(loader, StatefulDataLoader):
            loader.dataset.set_epoch(1)
        found[name] = [rest, ids_of(loader)]
    return found


class Scenes:
    """Each method returns what it saw on this rank, as JSON values."""

    def __init__(self, options: dict[str, Any]) -> None:
        torch.set_num_threads(1)
        self.rows, self.cache, self.states = Path(options["rows"]), options["cache"], Path(options["state"])
        self.made_before = read(self.rows)
        next(iter(read(self.rows, num_replicas=2, rank=0)))  # ranks that are said need no group
        self.before_the_group = refusal(lambda: next(iter(read(self.rows))))
        if options["ranks"] == 1:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        else:
            dist.init_process_group("gloo")

    def error(self) -> str:
        return self.before_the_group

    def epochs(self) -> dict[str, list[Batches]]:
        return epochs(self.rows, Cache.open(self.cache), self.made_before)

    def meshes(self) -> dict[str, Any]:
        return meshes(self.rows)

    def saved(self) -> dict[str, Batches]:
        self.states.mkdir(exist_ok=True)
        found = save(self.rows, self.states)
        dist.barrier()
        return found

    def resumed(self) -> dict[str, list[Batches]]:
        """What is read after the states; the distributed checkpoint is that of one process."""
        found = resume(self.rows, self.states.with_name("state-1"), self.states)
        dist.barrier()
        return found
