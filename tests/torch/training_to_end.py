"""A training that a test ends: TABLE KIND PERSISTENT, as a process of its own."""

import sys
import time
from pathlib import Path

from torch.utils.data import DataLoader

from pqcache.torch import Loader, ParquetDataset


def main(table: str, kind: str, persistent: str) -> None:
    """Print the process ids of the workers after three batches, and go on for ever; "leave" keeps an iterator."""
    data = ParquetDataset(table, batch_size=8, seed=1)
    workers = {"num_workers": 2, "persistent_workers": persistent == "persistent"}
    loader = DataLoader(data, batch_size=None, **workers) if kind == "plain" else Loader(data, **workers)
    batches = iter(loader)
    kept = [next(batches) for _ in range(3)]
    print(Path("/proc/self/task", str(Path("/proc/self").readlink()), "children").read_text(), flush=True)
    if kind == "leave":
        return
    epoch = 0
    while True:
        for batch in batches:
            kept[batch.index % 3] = batch
            time.sleep(0.005)
        epoch += 1
        data.set_epoch(epoch)
        batches = iter(loader)


if __name__ == "__main__":
    main(*sys.argv[1:])
