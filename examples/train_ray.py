# python train_ray.py cache/shop
import sys
import tempfile
from pathlib import Path

import ray.train
import torch
import torch.distributed as dist
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, get_device, prepare_model

from pqcache.torch import Loader, ParquetDataset


def train(config):
    # With 1, 2, 3, 4, 6 or 12 ranks x workers batches come in the same sequence, with others in another one
    dataset = ParquetDataset(config["cache"], columns=["id", "price"], batch_size=64, lanes=12)
    loader = Loader(dataset, num_workers=2, device=get_device())  # in place of prepare_data_loader
    model = prepare_model(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    rank, rows, steps = dist.get_rank(), torch.zeros(1), 0

    def report(metrics, rows):  # on every rank; the loader's state is the same on all
        with tempfile.TemporaryDirectory() as directory:
            state = {"loader": loader.state_dict(), "model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "rows": rows, "steps": steps}, Path(directory) / "state.pt")
            ray.train.report(metrics, checkpoint=Checkpoint(directory) if rank == 0 else None)

    def on_all_ranks(rows):
        total = rows.clone()
        dist.all_reduce(total)
        return total

    restored = ray.train.get_checkpoint()
    if restored:
        with restored.as_directory() as directory:
            saved = torch.load(Path(directory) / "state.pt")
        loader.load_state_dict(saved["loader"])
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        rows, steps = saved["rows"] if rank == 0 else rows, saved["steps"]
    for epoch in range(loader.epoch, 2):
        for batch in loader:  # the same number of batches on every rank
            loss = (model(batch["price"].float()[:, None]) - 1).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            rows, steps = rows + len(batch["id"]), steps + 1
            if steps % 20 == 0:
                report({"epoch": epoch}, on_all_ranks(rows))
                rows = on_all_ranks(rows) * (rank == 0)
            if steps == config["fail_at"] and rank == 0 and not restored:
                raise RuntimeError("a failure, to see the restart")
        report({"epoch": epoch, "rows": int(on_all_ranks(rows))}, torch.zeros(1))
        rows = torch.zeros(1)


def main(cache="cache/shop", fail_at="70"):
    trainer = TorchTrainer(
        train,
        train_loop_config={"cache": str(Path(cache).absolute()), "fail_at": int(fail_at)},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=str(Path("ray").absolute()), failure_config=FailureConfig(max_failures=1)),
    )
    print(trainer.fit().metrics)


if __name__ == "__main__":
    main(*sys.argv[1:3])
