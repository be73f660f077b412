"""A training that a test ends: TABLE KIND PERSISTENT CONTEXT, as a process of its own."""

import multiprocessing
import sys
import time

from torch.utils.data import DataLoader

from pqcache.torch import Loader, ParquetDataset


def main(table: str, kind: str, persistent: str, context: str) -> None:
    """Print the process ids of the workers after three batches, and go on for ever; "leave" keeps an iterator."""
    data = ParquetDataset(table, batch_size=8, seed=1)
    workers = {
        "num_workers": 2,
        "persistent_workers": persistent == "persistent",
        "multiprocessing_context": context,
    }
    loader = DataLoader(data, batch_size=None, **workers) if kind == "plain" else Loader(data, **workers)
    batches = iter(loader)
    kept = [next(batches) for _ in range(3)]
    print(*(process.pid for process in multiprocessing.active_children()), flush=True)
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
