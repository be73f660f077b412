"""Calls the transform: seeded, optionally on threads, and replacing rows for which it fails."""

from __future__ import annotations

import json
import logging
import os
import random
import tempfile
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import get_worker_info

from pqcache.reader.batch_rows import documents_of
from pqcache.reader.epoch import Epoch
from pqcache.reader.stats import TRANSFORM, Meter
from pqcache.system.locks import try_lock
from pqcache.system.threads import ForkSafeThreadPool
from pqcache.torch.batch import Batch, Position, copied, row_count, take_rows
from pqcache.torch.dataset_options import DatasetOptions

_MOST_TRIES = 32  # batches without a good row, one after the other
_AHEAD = 2  # batches for each thread
_MEASURED = 16  # single rows: the first 16 are timed, then one in 16
_MOST_LISTED = 20  # row groups of an error
_MOST_TEXT = 500  # characters of an error that are kept
_PREFIX, _SUFFIX = "pqcache-errors-", ".jsonl"
_YOUNG = 60  # seconds
log = logging.getLogger("pqcache.torch")


@dataclass(frozen=True, kw_only=True)
class Item:
    """A batch, or a row, to be transformed.

    ``position`` is its position in the training, ``place`` its index in the order of its dataset. It is seeded by
    ``numbers``: the epoch, or the pass of a mix, and the index in it.
    """

    value: Any
    position: Position
    place: int
    numbers: tuple[int, int]


class InTransform(Exception):
    """Added as the cause of a transform's error on Python 3.10, which has no notes."""


def _add_note(error: Exception, text: str) -> None:
    if hasattr(error, "add_note"):
        error.add_note(text)
        return
    first: BaseException = error
    while (before := first.__cause__ or first.__context__) is not None:
        first = before
    first.__cause__ = InTransform(text)


@dataclass(frozen=True, kw_only=True)
class FailedRow:
    """A row for which the transform raised ``error``, in batch (or row) ``index`` of ``epoch``.

    ``row`` is its position in row group ``row_group`` of ``file``. Only rows that pass a filter count; with weights
    each row counts as often as it comes, and with packed documents the sequences count. It is -1 if only the batch as a
    whole failed; file and row group are then those of its first row.
    """

    epoch: int
    index: int
    file: str
    row_group: int
    row: int
    error: str

    def __str__(self) -> str:
        what = f"row {self.row}" if self.row >= 0 else "and others, together"
        return f"{self.file}, row group {self.row_group}, {what}: {self.error}"


class FailureLog:
    """Failed rows in a temporary file to which the workers append; it is removed with its dataset.

    The dataset holds a lock on it. Unlocked files, left by killed processes, are removed when the next one is made.
    """

    def __init__(self) -> None:
        _remove_abandoned(Path(tempfile.gettempdir()))
        descriptor, name = tempfile.mkstemp(prefix=_PREFIX, suffix=_SUFFIX)
        try_lock(descriptor, exclusive=True)
        self.path = Path(name)
        weakref.finalize(self, _remove, self.path, os.getpid(), descriptor)

    def append(self, rows: Sequence[FailedRow]) -> None:
        """Add rows in one write, so that several processes don't interleave theirs."""
        text = "".join(f"{json.dumps(asdict(row))}\n" for row in rows)
        try:
            descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        except FileNotFoundError:
            log.debug("%s: the process that made it has ended, or its dataset is gone: not reported there", self.path)
            return
        try:
            os.write(descriptor, text.encode())
        finally:
            os.close(descriptor)

    def read(self) -> list[FailedRow]:
        try:
            lines = self.path.read_text().splitlines()
        except FileNotFoundError:  # the process that made it has ended
            return []
        return [FailedRow(**json.loads(line)) for line in lines]


def _remove(path: Path, process: int, descriptor: int) -> None:
    if os.getpid() == process:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _remove_abandoned(directory: Path) -> None:
    now = time.time()
    for path in directory.glob(f"{_PREFIX}*{_SUFFIX}"):
        with suppress(OSError):
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                status = os.fstat(descriptor)
                is_old = now - status.st_mtime > _YOUNG  # a new one may not be locked yet
                if status.st_uid == os.getuid() and is_old and try_lock(descriptor, exclusive=True):
                    log.debug("%s: removed, the process that made it has ended", path)
                    path.unlink()
            finally:
                os.close(descriptor)


@dataclass
class _Failed:
    """The result for a batch in which all rows failed, with the last error."""

    error: Exception


class TransformRunner:
    """Transforms the batches, or rows, that one worker reads in a pass over a dataset."""

    def __init__(
        self, options: DatasetOptions, this: Epoch, failures: FailureLog | None, node: int | None, meter: Meter
    ) -> None:
        self._options, self._plan, self._order, self._failures = options, this.plan, this.order, failures
        self._function, self._threads = options.transform, options.transform_workers
        self._in_batches = options.batch_size is not None
        self._seed, self._node, self._meter = options.seed & (2**64 - 1), () if node is None else (node,), meter
        self._count = self._calls = 0  # of failed rows, and of calls for single rows

    def run(
        self, items: Iterator[Item], indices: Sequence[int], lanes: int, total: int, read: Callable[[int], Any]
    ) -> Generator[Any]:
        """Yield the result for each item, in order.

        ``indices`` are the global indices of the items, in an epoch of ``total``. ``read`` fetches a replacement for a
        batch without a good row that is not among the coming items.
        """
        coming: deque[Item] = deque()  # items that are read and not yet yielded
        results: deque[Callable[[], Any]] = deque()  # of the first of them

        def value_of(index: int, after: Item) -> Any:
            """Another batch: one that this worker will read later anyway, or one read for this purpose."""
            if index < after.position.index or index not in indices:
                return read(index)
            while all(item.position.index != index for item in coming):
                coming.append(next(items))
            return next(item.value for item in coming if item.position.index == index)

        with self.threads() as submit:
            while True:
                coming.extend(islice(items, max(0, self.ahead - len(coming))))
                if not coming:
                    return
                for item in islice(coming, len(results), None):
                    results.append(submit(partial(self._result, item)))
                result, item = results.popleft()(), coming.popleft()
                yield (
                    self._from_another(item, result, lanes, total, value_of) if isinstance(result, _Failed) else result
                )

    def one(self, item: Item) -> Any:
        """Transform one batch; raises the error if it has no good row."""
        result = self._result(item)
        if isinstance(result, _Failed):
            raise result.error
        return result

    @property
    def ahead(self) -> int:
        """How many batches may be in the transform or wait for their turn."""
        return 1 if self._threads is None else _AHEAD * self._threads

    @contextmanager
    def threads(self) -> Iterator[Callable[[Callable[[], Any]], Callable[[], Any]]]:
        """Yield a function that begins a call and returns a getter of its result."""
        if self._threads is None or self._function is None:
            yield lambda call: call
            return
        threads = ForkSafeThreadPool(self._threads)
        try:
            yield lambda call: threads.submit(call).result
        finally:
            threads.shutdown(wait=False, cancel_futures=True)

    @contextmanager
    def _located(self, item: Item) -> Iterator[None]:
        """Add the batch's position to an error, keeping its type and traceback."""
        try:
            yield
        except Exception as error:
            kind, position = "batch" if self._in_batches else "row", item.position
            about = "" if position.source is None else f" (of the dataset {position.source!r} of the mix)"
            heading = f"in the transform of {kind} {position.index} of epoch {position.epoch}{about}"
            dataset = f"{self._options.path} ({self._plan.data.snapshot})"
            _add_note(error, "\n  ".join([f"{heading}, {dataset}:", *self._lines(item.place)]))
            raise

    def _places(self, index: int) -> list[tuple[str, int, int]]:
        """The file, row group and row of each row of a batch; a selection counts its own rows.

        A row is a sequence if there are sequences, packed or not; in batches of whole documents it is a document.
        """
        plan = self._plan
        groups, rows = self._order.batch(index)
        if plan.packs is not None and plan.pack is None:
            groups, rows = documents_of(plan, self._order, groups, rows)
        starts = np.zeros(len(groups), np.int64) if plan.piece_starts is None else plan.piece_starts[groups]
        table, numbers = plan.data.index, plan.row_groups[groups]
        files, row_groups = table.numbers("file")[numbers].tolist(), table.numbers("row_group")[numbers].tolist()
        places = zip(files, row_groups, (rows + starts).tolist(), strict=True)
        return [(table.paths[file], row_group, row) for file, row_group, row in places]

    def _lines(self, index: int) -> list[str]:
        plan, rows = self._plan, defaultdict[tuple[str, int], list[int]](list)
        for path, row_group, row in self._places(index):
            rows[path, row_group].append(row)
        what = "row" if plan.sequence is None and plan.pack is None else "sequence"
        selected = not plan.selection.is_all and plan.packs is None
        lines = []
        for (path, row_group), found in sorted(rows.items()):
            first, last = min(found), max(found)
            span = f"{what} {first}" if first == last else f"{len(found)} {what}s from {first} to {last}"
            lines.append(f"{path}, row group {row_group}: {span}{', counted among those that are selected' * selected}")
        more = len(lines) - _MOST_LISTED
        return lines if more <= 0 else [*lines[:_MOST_LISTED], f"and {more} more row groups"]

    def _result(self, item: Item, noted: bool = True) -> Any:
        """Transform a batch, replacing bad rows; `_Failed` if it has no good row."""
        if not self._options.skips_errors:
            with self._located(item):
                return self._call(item, item.value)
        found = self._tried(item, copied(item.value))
        if not isinstance(found, _Failed):
            return found
        if not self._in_batches:
            return self._noted(item, {0: found.error}, noted, found)
        rows = row_count(item.value)
        bad = self._bad_rows(item, range(rows))
        self._noted(item, bad or {-1: found.error}, noted, found)  # or it fails for all rows together
        good = [row for row in range(rows) if row not in bad]
        if not bad or not good:
            return found
        chosen = [row if row not in bad else next((g for g in good if g > row), good[0]) for row in range(rows)]
        repaired = self._tried(item, self._rows(item.value, chosen))
        return self._noted(item, {-1: repaired.error}, noted, repaired) if isinstance(repaired, _Failed) else repaired

    def _call(self, item: Item, value: Any) -> Any:
        function = self._function
        if function is None:
            return value
        seeds, times = (self._seed, *item.numbers, *self._node), 1
        if not self._in_batches:  # to measure takes as long as a short call
            self._calls += 1
            times = 1 if self._calls <= _MEASURED else 0 if self._calls % _MEASURED else _MEASURED
        with self._meter.timed(TRANSFORM, times) if times else nullcontext():
            if self._threads is not None:
                result = function(value, np.random.default_rng(seeds))
            else:
                with _seeded(*seeds):
                    result = function(value)
        return Batch(result, item.position) if type(result) is dict and self._in_batches else result

    def _tried(self, item: Item, value: Any) -> Any:
        try:
            return self._call(item, value)
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - noted, or raised where there is no other row
            return _Failed(error)

    def _bad_rows(self, item: Item, rows: Sequence[int]) -> dict[int, Exception]:
        """Bisect ``rows``, for which the transform fails together, to the bad ones; none if it only fails for several
        at once.
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
        return take_rows(batch, rows, self._plan.pack is not None)

    def _noted(self, item: Item, errors: dict[int, Exception], noted: bool, result: _Failed) -> _Failed:
        """Log failed rows, by number in the batch (-1: all of it), and return ``result``."""
        if not noted:
            return result
        places, rows = self._places(item.place), []
        for row, error in errors.items():
            file, row_group, number = places[max(row, 0)]
            text = " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")[:_MOST_TEXT]
            at = item.position
            failed = FailedRow(epoch=at.epoch, index=at.index, file=file, row_group=row_group, row=number, error=text)
            rows.append(failed if row >= 0 else replace(failed, row=-1))
            log.warning("the transform failed, and another row replaces it: %s", rows[-1])
        if self._failures is not None:
            self._failures.append(rows)
        self._count += len(rows)
        if (most := self._options.max_errors) is not None and self._count > most:
            text = f"the transform has failed for more than max_errors={most} rows, at last for\n  {rows[-1]}"
            _add_note(result.error, text)
            raise result.error
        return result

    def _from_another(
        self, item: Item, failed: _Failed, lanes: int, total: int, value_of: Callable[[int, Item], Any]
    ) -> Any:
        """Replace a batch without a good row by the next batch of its lane, or an earlier one.

        The lane alone decides, so the result is the same for any number of ranks and workers, and after a resume.
        """
        inside = item.position.index % total
        others = chain(range(inside + lanes, total, lanes), range(inside - lanes, -1, -lanes))
        for other in islice(others, _MOST_TRIES):
            value = value_of(other, item)
            if self._in_batches:  # of as many rows, unless batches differ in that
                if self._order.batch_size > 1:
                    value = self._rows(value, [row % row_count(value) for row in range(row_count(item.value))])
                value = Batch(value, item.position)
            found = self._result(replace(item, value=value), noted=False)
            if not isinstance(found, _Failed):
                return found
            failed = found
        with self._located(item):
            raise failed.error


@contextmanager
def _seeded(*numbers: int) -> Iterator[None]:
    """Seed random, numpy and torch, and restore them afterwards in the trainer's process."""
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
