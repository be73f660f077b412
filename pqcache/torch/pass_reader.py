"""Reads the passes over the datasets of a mix, and makes its batches of them."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from pqcache.reader.meter import TENSORS, Meter
from pqcache.reader.order.epoch_share import EpochShare
from pqcache.reader.order.mixture_history import MixHistory
from pqcache.reader.order.mixture_schedule import DatasetPass
from pqcache.torch.batch import Batch
from pqcache.torch.dataset_reader import DatasetReader
from pqcache.torch.joined_batch import joined
from pqcache.torch.transform_errors import BatchOrigin
from pqcache.torch.transforms import Item, TransformRunner


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
        for number, parts in zip(numbers, draws, strict=True):
            results = {}
            for name, (pass_number, batch) in parts.items():
                results[name] = self._next(name, pass_number, batch, number, waiting)
                left[name, pass_number] -= 1
                if not left[name, pass_number]:
                    self._open.pop((name, pass_number)).close()
            if not self._history.together:
                (result,) = results.values()
                yield number, result[1]
                continue
            position = replace(next(iter(results.values()))[0], source=None)
            with self._meter.timed(TENSORS):
                batch = joined({name: result for name, (_, result) in results.items()}, position)
            self._meter.made(1, 0, 0)  # its rows are counted by the datasets
            yield number, batch

    def _next(
        self, name: str, pass_number: int, seed: int, number: int, waiting: dict[tuple[str, int], DatasetPass]
    ) -> tuple[Any, Any]:
        """Return the position and the transformed batch that comes next in a pass."""
        key, reader = (name, pass_number), self._readers[name]
        if key not in self._open:
            self._open[key] = reader.read_pass(waiting.pop(key), self._share)
        origin, batch = next(self._open[key])
        position = replace(batch.position, epoch=self._epoch, index=number, source=name, dataset=self._token)
        if key not in self._transforms:
            self._transforms[key] = reader.transforms(origin)
        item = Item(value=Batch(batch, position), position=position, place=batch.index, numbers=(pass_number, seed))
        return position, self._transforms[key].one(item)

    def close(self) -> None:
        """Stop reading."""
        for batches in self._open.values():
            batches.close()
        self._open.clear()
