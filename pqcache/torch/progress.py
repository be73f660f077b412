"""Where the next iteration of a dataset begins: a record that its trainer writes and its workers read.

The record is in shared memory, so it reaches persistent workers too. A worker reads it when it begins an iteration. The
first worker of a pass notes which record it has found, and the others go by that note: all of them read one epoch, also
where another one is set while they begin, for which the latest records are kept. Two workers that begin in the very
moment in which an epoch is set may both take themselves for the first; one of them raises an error at its next batch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch.utils.data import get_worker_info

from pqcache.errors import UsageError
from pqcache.reader.order.epoch_share import MOST_DIVISIONS, Division, Divisions
from pqcache.torch.checkpoint import Place
from pqcache.torch.worker_memory import WorkerMemory

_KEPT = 8  # records
_LATEST, _PASS, _WORKERS, _FINISHED, _WARNED = range(5)  # of the first row; behind it there is one for each record
_NUMBERS = 9  # of a record, before those of its divisions
_TRAINER = 1  # the key of its passes
_KEYS, _GENERATIONS = 1 << 30, 1 << 32


class Record(NamedTuple):
    """What an iteration reads: an ``epoch`` from batch ``start`` on.

    ``generation`` counts the epochs that were set and the states that were loaded. ``since`` is the one that epoch and
    start are of, and ``loaded`` that of the latest state. ``is_named`` says that ``set_epoch`` chose the epoch. After a
    state from the end of the epoch before this one, ``ended`` is the batch at which that ended. ``layout`` is a
    fingerprint of what else the batches after a state depend on, 0 without one.
    """

    generation: int = 0
    epoch: int = 0
    start: int = 0
    since: int = 0
    loaded: int = 0
    is_named: int = False
    ended: int = 0
    layout: int = 0
    divisions: Divisions = ()

    def place(self, lanes: int) -> Place:
        """The place at which the epoch begins."""
        return Place(self.epoch, self.start, lanes, self.divisions)


class _Pass(NamedTuple):
    """A pass, by its ``key``, and the generation that it reads; ``is_anew`` if from the epoch's first batch on."""

    key: int = 0
    generation: int = 0
    is_anew: bool = False

    @staticmethod
    def of(number: int) -> _Pass:
        """Unpack a pass, which is one number in shared memory so that updates are atomic."""
        key, rest = divmod(int(number), 2 * _GENERATIONS)
        return _Pass(key, rest >> 1, bool(rest & 1))

    @property
    def number(self) -> int:
        """See ``of``."""
        return (self.key * _GENERATIONS + self.generation) * 2 + self.is_anew


class Progress:
    """The record of a dataset, and whether the iterations that go by it have begun and ended.

    Ranks that are forked or spawned, and copies, share nothing with the original.
    """

    def __init__(self) -> None:
        self._memory = WorkerMemory((1 + _KEPT, _NUMBERS + 3 * MOST_DIVISIONS))
        self._passes = 0  # of this worker
        self._noted = 0  # the number of the latest one

    @property
    def record(self) -> Record:
        """What the next iteration reads, unless it ``is_finished``."""
        return self._read(int(self._memory.seen[0, _LATEST]))

    @property
    def next(self) -> Record:
        """What the next iteration reads: a resumed epoch that is finished is read from its first batch on."""
        record = self.record
        return record._replace(start=0, divisions=()) if self.is_finished(record) else record

    @property
    def workers(self) -> int:
        """The number of workers of the latest iteration; 0 for none."""
        return int(self._memory.seen[0, _WORKERS])

    @property
    def is_own(self) -> bool:
        """Whether no other process reads the record of this one, or writes it."""
        return self._memory.is_own

    @property
    def pass_key(self) -> int:
        """A number that all workers give the pass that they have begun, and no other one."""
        return _Pass.of(self._noted).key

    @property
    def has_begun(self) -> bool:
        """Whether an iteration has begun since an epoch was set or a state was loaded."""
        noted = _Pass.of(self._memory.seen[0, _PASS])
        return noted.key > 0 and noted.generation == self.record.generation

    @property
    def is_lost(self) -> bool:
        """Whether workers have begun to read since the latest state was loaded: their place is not known here."""
        return self.workers > 0 and _Pass.of(self._memory.seen[0, _PASS]).generation >= self.record.loaded

    def set_epoch(self, epoch: int, anew: bool = False) -> None:
        """Set the epoch; one that was resumed still begins at its state, unless it was finished or is read ``anew``."""
        if epoch < 0:
            raise UsageError(f"set_epoch({epoch})", "epochs count from 0")
        record = self.record
        if epoch != record.epoch or anew or self.is_finished(record):
            has_ended = epoch + 1 == record.epoch and not anew and not self.has_begun
            self.move(Place(epoch, record.ended if has_ended else 0, 0), is_named=True, ended=0)
        else:
            self._write(record._replace(generation=record.generation + 1, is_named=True, ended=0))

    def move(self, place: Place, **changes: Any) -> None:
        """Let the next iteration begin at a place, with other ``changes`` of the record."""
        generation, (epoch, start, _, divisions) = self.record.generation + 1, place
        moved = self.record._replace(generation=generation, since=generation, epoch=epoch, start=start)
        self._write(moved._replace(divisions=divisions, **changes))

    def load(self, place: Place, layout: int, ended: int = 0) -> None:
        """Go on at the place of a state; after one from the end of an epoch, ``ended`` is the batch of that end."""
        self.move(place, loaded=self.record.generation + 1, is_named=False, layout=layout, ended=ended)

    def begin(self) -> Record:
        """Begin an iteration, and return what it reads."""
        header = self._memory.numbers[0]
        worker = None if self._memory.is_own else get_worker_info()
        self._passes += 1
        key = _TRAINER
        if worker is not None:  # workers are started one after the other; their seed may be that of others before
            key = 2 + hash((self._memory.started - worker.id, self._passes)) % (_KEYS - 2)
        latest = self.record
        noted = _Pass(key, latest.generation, self.is_finished(latest))
        if worker is None or _Pass.of(header[_PASS]).key != key:
            header[_PASS] = noted.number
        else:
            noted = _Pass.of(header[_PASS])
        header[_WORKERS] = 0 if worker is None else worker.num_workers
        self._noted = noted.number
        record = self._read(noted.generation)
        return record._replace(start=0, divisions=()) if noted.is_anew else record

    def check(self, record: Record) -> None:
        """Raise UsageError in an iteration that reads another record than the other workers, or an outdated one."""
        header = self._memory.numbers[0]
        if int(header[_PASS]) != self._noted and _Pass.of(header[_PASS]).key == _Pass.of(self._noted).key != _TRAINER:
            raise UsageError(
                "set_epoch()",
                "an epoch was set in the moment in which the workers began to read another one",
                "set it before the iteration begins, or after its first batch",
            )
        if int(header[_LATEST]) != record.generation and self.record.loaded > record.generation:
            raise UsageError(
                "load_state_dict()",
                "a state was loaded while this iteration was going on, which ends here",
                "begin a new one, which goes on where the state was taken",
            )

    def finish(self, record: Record) -> None:
        """Note that the epoch is read to its end."""
        header = self._memory.numbers[0]
        header[_FINISHED] = max(int(header[_FINISHED]), record.generation + 1)

    def is_finished(self, record: Record) -> bool:
        """Whether an epoch was read to its end, from the start that it has in a record."""
        return int(self._memory.seen[0, _FINISHED]) > record.since

    def repeats(self) -> bool:
        """Return, once, whether an iteration that begins now reads an epoch that was read, and not set since."""
        header = self._memory.numbers[0]
        if int(header[_FINISHED]) != int(header[_LATEST]) + 1 or header[_WARNED]:
            return False
        header[_WARNED] = 1
        return True

    def _write(self, record: Record) -> None:
        numbers = self._memory.numbers
        *found, divisions = record
        row = numbers[1 + record.generation % _KEPT]
        row[:_NUMBERS] = *found, len(divisions)
        row[_NUMBERS : _NUMBERS + 3 * len(divisions)] = [number for division in divisions for number in division]
        numbers[0, _LATEST] = record.generation  # at last, as it is what workers look at first

    def _read(self, generation: int) -> Record:
        *found, count = self._memory.seen[1 + generation % _KEPT, :_NUMBERS].tolist()
        if found[0] != generation:
            raise UsageError("set_epoch()", f"it was called more than {_KEPT} times while an iteration began")
        numbers = self._memory.seen[1 + generation % _KEPT, _NUMBERS : _NUMBERS + 3 * count].tolist()
        divisions = tuple(Division(*numbers[at : at + 3]) for at in range(0, len(numbers), 3))
        return Record(*found)._replace(divisions=divisions)
