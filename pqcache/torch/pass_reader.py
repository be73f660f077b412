"""Reads the passes over the datasets of a mix, and makes its batches of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from pqcache.reader.meter import TENSORS, Meter
from pqcache.reader.order.epoch_share import EpochShare
from pqcache.reader.order.mixture_history import MixHistory
from pqcache.reader.order.mixture_schedule import DatasetPass
from pqcache.torch.batch import Batch, Position
from pqcache.torch.dataset_reader import DatasetReader
from pqcache.torch.joined_batch import joined
from pqcache.torch.transform_errors import BatchOrigin
from pqcache.torch.transforms import Item, TransformRunner

Result = Callable[[], Any]  # waits for a transform
Submit = Callable[[Result], Result]
Parts = dict[str, tuple[Position, Result]]  # of a batch, by dataset


class PassReader:
    """Reads the current pass of each dataset; at the end of one, also the next."""

    def __init__(
        self,
        readers: Mapping[str, DatasetReader],
        history: MixHistory,
        sizes: Mapping[str, int],
        share: EpochShare,
        of_mix: tuple[int, int],  # the epoch, and the number by which batches name the mix
        meter: Meter,  # of the mix, which counts batches of several datasets
    ) -> None:
        self._readers, self._history, self._sizes, self._share = readers, history, sizes, share
        self._epoch, self._token = of_mix
        self._meter = meter
        self._open: dict[tuple[str, int], Generator[tuple[BatchOrigin, Batch]]] = {}
        self._transforms: dict[tuple[str, int], TransformRunner] = {}
        self._submits: dict[str, Submit] = {}  # by dataset, whose transform may have threads
        self._threads = ExitStack()

    def read(self, indices: list[int], numbers: list[int]) -> Iterator[tuple[int, Any]]:
        """Yield (number, transformed batch) for batches ``indices`` of the epoch, in order."""
        wanted = np.array(indices, np.int64)
        waiting: dict[tuple[str, int], DatasetPass] = {}
        draws: list[dict[str, tuple[int, int]]] = [{} for _ in indices]  # by dataset: pass, batch in it
        for name, size in self._sizes.items():
            for reading in self._history.passes(name, size, self._epoch, wanted):
                waiting[name, reading.number] = reading
                for place, batch in zip(reading.positions.tolist(), reading.batches.tolist(), strict=True):
                    draws[place][name] = reading.number, batch
        left = {key: len(reading.positions) for key, reading in waiting.items()}
        coming: deque[tuple[int, Parts]] = deque()  # batches that are read, and in their transforms
        for number, draw in zip(numbers, draws, strict=True):
            parts: Parts = {}
            for name, (pass_number, batch) in draw.items():
                parts[name] = self._next(name, pass_number, batch, number, waiting)
                left[name, pass_number] -= 1
                if not left[name, pass_number]:
                    self._open.pop((name, pass_number)).close()
            coming.append((number, parts))
            while len(coming) >= max(runner.ahead for runner in self._transforms.values()):
                yield self._made(*coming.popleft())
        while coming:
            yield self._made(*coming.popleft())

    def _made(self, number: int, parts: Parts) -> tuple[int, Any]:
        """Return a batch of the mix, once the transforms of its parts have returned."""
        if not self._history.together:
            ((_, result),) = parts.values()
            return number, result()
        position = replace(next(iter(parts.values()))[0], source=None)
        results = {name: result() for name, (_, result) in parts.items()}
        with self._meter.timed(TENSORS):
            batch = joined(results, position)
        self._meter.made(1, 0, 0)  # its rows are counted by the datasets
        return number, batch

    def _next(
        self, name: str, pass_number: int, seed: int, number: int, waiting: dict[tuple[str, int], DatasetPass]
    ) -> tuple[Position, Result]:
        """Return the position of the batch that comes next in a pass, and what waits for its transform."""
        key, reader = (name, pass_number), self._readers[name]
        if key not in self._open:
            self._open[key] = reader.read_pass(waiting.pop(key), self._share)
        origin, batch = next(self._open[key])
        position = replace(batch.position, epoch=self._epoch, index=number, source=name, dataset=self._token)
        if key not in self._transforms:
            self._transforms[key] = reader.transforms(origin)
        runner = self._transforms[key]
        if name not in self._submits:
            self._submits[name] = self._threads.enter_context(runner.threads())
        item = Item(value=Batch(batch, position), position=position, place=batch.index, numbers=(pass_number, seed))
        return position, self._submits[name](partial(runner.one, item))

    def close(self) -> None:
        """Stop reading."""
        self._threads.close()
        self._submits.clear()
        for batches in self._open.values():
            batches.close()
        self._open.clear()
