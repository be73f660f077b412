"""Processes that are the ranks of one training after another, so that torch is imported once for all tests."""

from __future__ import annotations

import multiprocessing
import shutil
import threading
import time
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import pqcache
from pqcache.errors import UsageError
from pqcache.reader import ranks as reader_ranks
from pqcache.torch import Loader, Mix, ParquetDataset


class Ranks:
    """At most ``most`` ranks, each a process of its own; see tests/torch/conftest.py for what they begin with."""

    def __init__(self, most: int) -> None:
        context = multiprocessing.get_context("forkserver")
        self._pipes: list[Connection] = []
        self._processes = []
        for number in range(most):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), name=f"rank {number}")
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(
        self, store: Path, caches: list[Path], each: list[dict[str, Any]] | None = None, **options: Any
    ) -> list[dict[str, Any]]:
        """Read each of ``caches`` on a rank; return what each found: see ``_read``, or its ``error``.

        ``store`` is a new file by which the ranks find one another. ``each`` has options of single ranks.
        """
        own = each or [{}] * len(caches)
        for rank, pipe in enumerate(self._pipes[: len(caches)]):
            pipe.send((rank, len(caches), store, caches[rank], options | own[rank]))
        found = []
        for pipe in self._pipes[: len(caches)]:
            assert pipe.poll(120), "a rank does not answer"
            found.append(pipe.recv())
        return found

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            pipe.send(None)
        end = time.monotonic() + 60
        for process in self._processes:
            process.join(max(0.0, end - time.monotonic()))
        codes = [process.exitcode for process in self._processes]
        for process in self._processes:
            process.kill()  # one that waits for others would keep this process from ending
        assert codes == [0] * len(codes)


def _serve(pipe: Connection) -> None:
    torch.set_num_threads(1)
    for rank, world, store, cache, options in iter(pipe.recv, None):
        # patches how long ranks that differ wait for another thread to begin their epoch: only "threads" has any
        reader_ranks._TURN = 2.0 if options.get("loader") == "threads" else 0.1
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
        try:
            pipe.send(_read(cache, **options))
        except UsageError as error:
            pipe.send({"error": str(error)})
        finally:
            dist.destroy_process_group()


def _read(
    cache: Path,
    workers: int = 0,
    state: dict[str, Any] | None = None,
    stop: int | None = None,
    epoch: int = 0,
    loader: str = "DataLoader",
    columns: Sequence[str] = ("id",),
    **options: Any,
) -> dict[str, Any]:
    """Return the ids and indices of an epoch's batches, or of the first ``stop`` and the state after them."""
    context = "fork" if workers else None  # else workers are started as the rank was
    if loader == "Cache.batches":
        batches = pqcache.Cache.open(cache).batches(["id"], epoch=epoch, **options)
        return {"ids": [batch["id"].to_pylist() for batch in batches]}
    if loader == "nights":
        return _read_nights(cache, workers, **options)
    if loader == "threads":
        return {"ids": _read_in_threads(cache)}
    ds: Any = ParquetDataset(cache, columns=columns, **options)
    if loader == "Mix":
        ds = Mix({"a": ds})
    if state is not None:
        ds.load_state_dict(state)
    if epoch:
        ds.set_epoch(epoch)
    found: dict[str, Any] = {"length": len(ds), "ids": [], "indices": []}
    if loader == "DataLoader":
        batches = DataLoader(ds, batch_size=None, num_workers=workers, multiprocessing_context=context)
    else:
        batches = Loader(ds, num_workers=workers, multiprocessing_context=context)
    for batch in batches:
        found["ids"].append(batch["id"].tolist())
        found["indices"].append(batch.index)
        if len(found["ids"]) == stop:
            found["state"] = ds.state_dict(after=batch)
            break
    return found


def _read_nights(
    cache: Path,
    workers: int,
    nights: Sequence[tuple[Path, Path, set[int]]],
    opened_before: bool = False,
    damaged: int | None = None,
    rewritten: int | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Read an epoch for each night, on the newest snapshot that all ranks have.

    A night is a new file, its place at the source, and the ranks that sync then. In the one that is ``damaged`` this
    rank cannot read the manifest of its current snapshot; in the one that is ``rewritten`` it rewrites its copy. The
    dataset is opened after the first one, or before.
    """
    rank, found = dist.get_rank(), dict[str, Any](ids=[], warnings=[])
    loader, ds = None, ParquetDataset(cache, columns=["id"], **options) if opened_before else None
    for number, (new, place, syncing) in enumerate(nights):
        if rank == 0:
            place.parent.mkdir(exist_ok=True, parents=True)
            shutil.copyfile(new, place)
        dist.barrier()
        if rank in syncing:
            pqcache.sync(cache)
        if number == rewritten:
            pqcache.sync(cache, row_group_size="4KB")
        if number == damaged:
            manifest = (cache / "current").resolve() / "_pqcache" / "files.arrow"
            manifest.write_bytes(b"")
        dist.barrier()
        if loader is None:
            context = "fork" if workers else None
            ds = ds or ParquetDataset(cache, columns=["id"], **options)
            loader = Loader(ds, num_workers=workers, multiprocessing_context=context, refresh="epoch")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            batches = [batch["id"].tolist() for batch in loader]
        assert len(batches) == len(loader), number
        found["ids"].append(batches)
        found["warnings"].append([str(w.message) for w in caught if "is read from" in str(w.message)])
    return found


def _read_in_threads(cache: Path) -> list[list[int]]:
    """Return the ids of two datasets that threads read at the same time, begun in another order on each rank."""
    halves = [ParquetDataset(cache, columns=["id"], filters=f"dt = {day}") for day in (0, 1)]
    begun = threading.Event()

    def read(ds: ParquetDataset, is_first: bool) -> list[int]:
        if is_first:
            begun.set()
        else:
            begun.wait(10)
            time.sleep(0.2)
        return [i for batch in Loader(ds) for i in batch["id"].tolist()]

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(read, halves, [dist.get_rank() == day for day in (0, 1)]))
