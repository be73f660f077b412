"""Calls the transform: seeded, on threads if wanted, and with other rows in place of those for which it fails."""

from __future__ import annotations

import inspect
import itertools
import logging
import random
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.data import get_worker_info

from pqcache.errors import UsageError
from pqcache.reader.meter import NO_METER, TRANSFORM, Meter
from pqcache.system.fork_safe_threads import ForkSafeThreadPool
from pqcache.torch.batch import Batch, Position, copied, row_count, take_rows
from pqcache.torch.failed_rows import FailedRow, FailureLog, text_of
from pqcache.torch.transform_errors import BatchOrigin, add_note, located

OnError = Literal["raise", "skip"]
MAX_ERRORS = 100
_MOST_TRIES = 32  # batches without a good row, one after the other
_AHEAD = 2  # batches for each thread
_MEASURED = 16  # of so many single rows the time of one is measured, after as many first ones
log = logging.getLogger("pqcache.torch")


@dataclass(frozen=True, kw_only=True)
class Transform:
    """The transform of a dataset and how it is called; see ``ParquetDataset``."""

    function: Callable[..., Any] | None = None
    on_error: OnError = "raise"
    max_errors: int | None = MAX_ERRORS
    threads: int | None = None

    def __post_init__(self) -> None:
        function = self.function
        if function is not None and not callable(function):
            raise UsageError(f"transform={function!r}", "give a function that takes a batch (or row)")
        if self.on_error not in ("raise", "skip"):
            raise UsageError(f"on_error={self.on_error!r}", "choose 'raise' or 'skip'")
        for name, value in (("max_errors", self.max_errors), ("transform_workers", self.threads)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise UsageError(f"{name}={value!r}", "give a whole number of at least 1, or None")
        if self.threads is not None and function is not None and not _takes_two(function):
            raise UsageError(
                "transform_workers",
                "the transform takes no generator: threads share those of random, numpy and torch",
                "write it as transform(batch, generator), with a numpy.random.Generator; it may leave it unused",
            )

    @property
    def skips(self) -> bool:
        """Whether rows for which it fails are replaced."""
        return self.function is not None and self.on_error == "skip"


def _takes_two(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind(None, None)
    except TypeError:
        return False
    except ValueError:  # it has no signature
        return True
    return True


@dataclass(frozen=True, kw_only=True)
class Item:
    """A batch, or a row, to be transformed.

    ``position`` is where it is in the training, ``place`` where it is in the order of its dataset. Of ``numbers`` its
    seed is made: the epoch, or the pass of a mix, and the index in it.
    """

    value: Any
    position: Position
    place: int
    numbers: tuple[int, int]


class _Failed:
    """What a transform makes of a batch without any good row, with the error of the last try."""

    def __init__(self, error: Exception) -> None:
        self.error = error


class TransformRunner:
    """Transforms the batches, or rows, of a dataset: those of one pass of one worker.

    ``seeds`` go before the numbers of a batch into its seed.
    """

    def __init__(
        self,
        transform: Transform,
        origin: BatchOrigin,
        failures: FailureLog | None,
        seed: int,
        node: Sequence[int] = (),
        meter: Meter = NO_METER,
    ) -> None:
        self._transform, self._origin, self._failures = transform, origin, failures
        self._seed, self._node = seed & (2**64 - 1), tuple(node)
        self._packed = origin.plan.pack is not None
        self._count, self._calls, self._meter = 0, 0, meter

    def run(
        self, items: Iterable[Item], indices: Sequence[int], lanes: int, total: int, read: Callable[[int], Any]
    ) -> Generator[Any]:
        """Yield what the transform makes of each item, in order.

        ``indices`` are their global indices. ``read`` returns a batch by its index, of an epoch of ``total``, in place
        of one that has no good row, where no later item is of its lane.
        """
        coming = _Coming(iter(items), indices)
        with self.threads() as submit:
            while (item := coming.first(self.ahead)) is not None:
                results = coming.results
                for ahead in itertools.islice(coming.items, len(results), None):
                    results.append(submit(partial(self._result, ahead)))
                result = results.popleft()()
                coming.items.popleft()
                if isinstance(result, _Failed):
                    result = self._from_another(item, result, coming, lanes, total, read)
                yield result

    def one(self, item: Item) -> Any:
        """Return what the transform makes of one batch; one without a good row raises its error."""
        result = self._result(item)
        if isinstance(result, _Failed):
            raise result.error
        return result

    @property
    def ahead(self) -> int:
        """How many batches are to be in the transform at the same time, or wait for their turn."""
        return 1 if self._transform.threads is None else _AHEAD * self._transform.threads

    @contextmanager
    def threads(self) -> Iterator[Callable[[Callable[[], Any]], Callable[[], Any]]]:
        """Yield what begins a call and returns how to get its result."""
        if self._transform.threads is None or self._transform.function is None:
            yield lambda call: call
            return
        threads = ForkSafeThreadPool(self._transform.threads)
        try:
            yield lambda call: threads.submit(call).result
        finally:
            threads.shutdown(wait=False, cancel_futures=True)

    def _result(self, item: Item, noted: bool = True) -> Any:
        """Return what the transform makes of a batch, with other rows in place of bad ones, or that there are none."""
        if not self._transform.skips:
            with located(item.position, self._origin, item.place):
                return self._call(item, item.value)
        found = self._tried(item, copied(item.value))
        if not isinstance(found, _Failed):
            return found
        if not self._origin.in_batches:
            return self._noted(item, {0: found.error}, noted, found)
        rows = row_count(item.value)
        bad = self._bad_rows(item, range(rows))
        if not bad:  # it fails for all rows together
            return self._noted(item, {-1: found.error}, noted, found)
        self._noted(item, bad, noted, found)
        if len(bad) == rows:
            return found
        good = [row for row in range(rows) if row not in bad]
        chosen = [row if row not in bad else next((g for g in good if g > row), good[0]) for row in range(rows)]
        repaired = self._tried(item, self._rows(item.value, chosen))
        return self._noted(item, {-1: repaired.error}, noted, repaired) if isinstance(repaired, _Failed) else repaired

    def _call(self, item: Item, value: Any) -> Any:
        """Return what the transform makes of a value, with generators seeded for the item."""
        function, threads = self._transform.function, self._transform.threads
        if function is None:
            return value
        seeds = (self._seed, *item.numbers, *self._node)
        with self._measured():
            if threads is not None:
                result = function(value, np.random.default_rng(seeds))
            else:
                with _seeded(*seeds):
                    result = function(value)
        return Batch(result, item.position) if type(result) is dict and self._origin.in_batches else result

    def _measured(self) -> AbstractContextManager[Any]:
        """Return what measures a call; of single rows it measures some, because that takes as long as a short call."""
        if self._origin.in_batches:
            return self._meter.timed(TRANSFORM)
        self._calls += 1
        if self._calls <= _MEASURED:
            return self._meter.timed(TRANSFORM, 1)
        return nullcontext() if self._calls % _MEASURED else self._meter.timed(TRANSFORM, _MEASURED)

    def _tried(self, item: Item, value: Any) -> Any:
        try:
            return self._call(item, value)
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - noted, or raised where there is no other row
            return _Failed(error)

    def _bad_rows(self, item: Item, rows: Sequence[int]) -> dict[int, Exception]:
        """Return the rows for which the transform fails, by halves; none where it fails only for several together.

        It has failed for all of ``rows``.
        """
        if len(rows) == 1:
            found = self._tried(item, self._rows(item.value, rows))
            return {rows[0]: found.error} if isinstance(found, _Failed) else {}
        bad: dict[int, Exception] = {}
        middle = len(rows) // 2
        for half in (rows[:middle], rows[middle:]):
            if isinstance(self._tried(item, self._rows(item.value, half)), _Failed):
                of_half = self._bad_rows(item, half)
                if not of_half:
                    return {}
                bad |= of_half
        return bad

    def _rows(self, batch: Batch, rows: Sequence[int]) -> Batch:
        return take_rows(batch, rows, self._packed)

    def _noted(self, item: Item, errors: dict[int, Exception], noted: bool, result: _Failed) -> _Failed:
        """Note failed rows, by their numbers in the batch; -1 is the batch as a whole. Return ``result``."""
        if not noted:
            return result
        places = self._origin.places(item.place)
        rows = [
            FailedRow(
                epoch=item.position.epoch,
                index=item.position.index,
                file=places[max(row, 0)].file,
                row_group=places[max(row, 0)].row_group,
                row=places[row].row if row >= 0 else -1,
                error=text_of(error),
            )
            for row, error in errors.items()
        ]
        for row in rows:
            log.warning("the transform failed, and another row comes in its place: %s", row)
        if self._failures is not None:
            self._failures.append(rows)
        self._count += len(rows)
        if (most := self._transform.max_errors) is not None and self._count > most:
            error = result.error
            add_note(error, f"the transform has failed for more than max_errors={most} rows, at last for\n  {rows[-1]}")
            raise error
        return result

    def _from_another(
        self, item: Item, failed: _Failed, coming: _Coming, lanes: int, total: int, read: Callable[[int], Any]
    ) -> Any:
        """Return the result for a batch without a good row: of the next batch of its lane, or of one before.

        That depends on the lane only, so it is the same in any topology, and after a resume.
        """
        inside = item.position.index % total
        ahead = range(inside + lanes, total, lanes)
        for other in itertools.islice(itertools.chain(ahead, range(inside - lanes, -1, -lanes)), _MOST_TRIES):
            value = coming.find(other) if other > inside and item.position.index < total else None
            value = read(other) if value is None else value
            found = self._result(replace(item, value=self._sized(value, item.value)), noted=False)
            if not isinstance(found, _Failed):
                return found
            failed = found
        with located(item.position, self._origin, item.place):
            raise failed.error

    def _sized(self, value: Any, like: Any) -> Any:
        """Return a batch with as many rows as another, unless batches differ in that."""
        if not self._origin.in_batches:
            return value
        if self._origin.order.batch_size > 1:
            value = self._rows(value, [row % row_count(value) for row in range(row_count(like))])
        return Batch(value, like.position)


@contextmanager
def _seeded(*numbers: int) -> Iterator[None]:
    """Seed the generators of random, numpy and torch, and restore them afterwards in the trainer's process."""
    in_worker = get_worker_info() is not None
    saved = None if in_worker else (random.getstate(), np.random.get_state(), torch.get_rng_state())
    seeds = np.random.SeedSequence(list(numbers)).generate_state(3)
    random.seed(int(seeds[0]))
    np.random.seed(int(seeds[1]))  # numpy's global generator, as transforms use it
    torch.default_generator.manual_seed(int(seeds[2]))
    try:
        yield
    finally:
        if saved is not None:
            random.setstate(saved[0])
            np.random.set_state(saved[1])
            torch.set_rng_state(saved[2])


class _Coming:
    """Items that are read and not yet yielded, and the results of the first of them; ``indices`` are all that come."""

    def __init__(self, source: Iterator[Item], indices: Sequence[int]) -> None:
        self._source, self._indices = source, indices
        self.items: deque[Item] = deque()
        self.results: deque[Callable[[], Any]] = deque()

    def first(self, count: int) -> Item | None:
        """Return the next item, with at least ``count`` read; None at the end."""
        while len(self.items) < count and (item := next(self._source, None)) is not None:
            self.items.append(item)
        return self.items[0] if self.items else None

    def find(self, index: int) -> Any:
        """Return the value of the item with this index, which comes later; None if it does not."""
        if index not in self._indices:  # another worker reads it, or nobody
            return None
        for item in self.items:
            if item.position.index == index:
                return item.value
        for item in self._source:
            self.items.append(item)
            if item.position.index == index:
                return item.value
        return None
