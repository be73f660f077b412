"""Trainings that a test ends, each forked from this process, which has imported torch.

For each line OUTPUT ERRORS TABLE KIND PERSISTENT CONTEXT it prints the process id and, later, the exit status.
"""

import multiprocessing
import os
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
    while line := sys.stdin.readline():
        output, errors, *words = line.split()
        if pid := os.fork():
            print(pid, flush=True)
            print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
        else:
            os.setsid()
            for descriptor, path in ((0, os.devnull), (1, output), (2, errors)):
                os.dup2(os.open(path, os.O_RDWR), descriptor)
            main(*words)
            break
