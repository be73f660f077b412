# torchrun --nproc-per-node=2 train_ddp.py
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from pqcache.torch import Loader, ParquetDataset


def main(cache: str = "cache/shop", checkpoint: Path = Path("ddp.json"), epochs: int = 2) -> None:
    dist.init_process_group("gloo")  # "nccl" with GPUs
    rank = dist.get_rank()
    # With 1, 2, 3, 4, 6 or 12 ranks x workers the batches come in the same sequence
    dataset = ParquetDataset(cache, columns=["id", "price"], batch_size=64, lanes=12)
    loader = Loader(dataset, num_workers=2)
    model = DistributedDataParallel(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    if checkpoint.exists():
        loader.load_state_dict(json.loads(checkpoint.read_text()))
    for epoch in range(loader.epoch, epochs):
        rows = torch.zeros(1)
        for step, batch in enumerate(loader):  # the same number of batches on every rank
            loss = (model(batch["price"].float()[:, None]) - 1).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            rows += len(batch["id"])
            if rank == 0 and step % 100 == 0:  # add the states of model and optimizer
                new = checkpoint.with_suffix(".new")
                new.write_text(json.dumps(loader.state_dict()))  # the same on every rank
                new.replace(checkpoint)  # at once: a training that is killed here keeps the old checkpoint
        dist.all_reduce(rows)
        if rank == 0:
            print(f"epoch {epoch}: {int(rows)} rows")
    if rank == 0:
        checkpoint.unlink()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:2])
