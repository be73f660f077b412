"""Where the next iteration of a dataset begins: a record that the trainer writes and its workers read.

The record is in shared memory, so it reaches persistent workers too. The first worker of a pass copies it and the
others follow the copy, so all read the same epoch even if another one is set while they begin. Two workers that begin
at the very moment an epoch is set may both take themselves for the first; one then raises an error at its next batch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch.utils.data import get_worker_info

from pqcache.errors import UsageError
from pqcache.reader.order.epoch_share import MOST_DIVISIONS, Division, Divisions
from pqcache.torch.checkpoint import Place
from pqcache.torch.worker_memory import WorkerMemory

_HEADER, _PASS, _FIRST_RECORD = range(3)  # rows; there are two of records, so that one is read while one is written
_LATEST, _KEY, _WORKERS, _FINISHED, _WARNED = range(5)  # of the header
_NUMBERS = 9  # of a record, before those of its divisions
_TRAINER = 1  # the key of its passes


class Record(NamedTuple):
    """Where an iteration begins: at batch ``start`` of an ``epoch``.

    Each ``set_epoch`` and each loaded state begins a new ``generation``. ``moved`` is the generation in which the place
    (epoch and start) last changed, ``loaded`` the one of the latest state. ``is_named`` says that ``set_epoch`` chose
    the epoch. If the state was taken at the end of the epoch before this one, ``ended`` is its batch. ``layout`` is a
    fingerprint of whatever else the batches after a state depend on; 0 without a state.
    """

    generation: int = 0
    epoch: int = 0
    start: int = 0
    moved: int = 0
    loaded: int = 0
    is_named: int = False
    ended: int = 0
    layout: int = 0
    divisions: Divisions = ()

    def place(self, lanes: int) -> Place:
        return Place(self.epoch, self.start, lanes, self.divisions)


class Progress:
    """The record of a dataset, and whether its iterations have begun and ended.

    Copies, and ranks that are forked or spawned, share nothing with the original.
    """

    def __init__(self) -> None:
        self._memory = WorkerMemory((4, _NUMBERS + 3 * MOST_DIVISIONS))
        self._passes = 0  # of this worker
        self.pass_key = _TRAINER  # of the latest pass: the same in all its workers, and unique to it
        self._generation = 0  # that this process reads

    @property
    def record(self) -> Record:
        """The place that was set last; where the next iteration begins unless that epoch ``is_finished``."""
        return self._read(_FIRST_RECORD + int(self._memory.seen[_HEADER, _LATEST]) % 2)

    @property
    def next(self) -> Record:
        """Where the next iteration begins; a resumed epoch that is finished begins at its first batch."""
        record = self.record
        return record._replace(start=0, divisions=()) if self.is_finished(record) else record

    @property
    def workers(self) -> int:
        """The number of workers of the latest iteration; 0 without workers."""
        return int(self._memory.seen[_HEADER, _WORKERS])

    @property
    def is_own(self) -> bool:
        """Whether this process made its record itself, unlike a worker that shares its trainer's."""
        return self._memory.is_own

    @property
    def has_begun(self) -> bool:
        """Whether an iteration has begun since an epoch was set or a state was loaded."""
        numbers = self._memory.seen
        return int(numbers[_HEADER, _KEY]) > 0 and int(numbers[_PASS, 0]) == self.record.generation

    @property
    def is_lost(self) -> bool:
        """Whether workers have read since the latest state was loaded, so that the place is unknown here."""
        return self.workers > 0 and int(self._memory.seen[_PASS, 0]) >= self.record.loaded

    def set_epoch(self, epoch: int, anew: bool = False) -> None:
        """Set the epoch; a resumed one still begins at its state, unless it is finished or read ``anew``."""
        if epoch < 0:
            raise UsageError(f"set_epoch({epoch})", "epochs count from 0")
        record = self.record
        if epoch != record.epoch or anew or self.is_finished(record):
            has_ended = epoch + 1 == record.epoch and not anew and not self.has_begun
            self.move(Place(epoch, record.ended if has_ended else 0, 0), is_named=True, ended=0)
        else:
            self._publish(record._replace(generation=record.generation + 1, is_named=True, ended=0))

    def move(self, place: Place, **changes: Any) -> None:
        record, generation = self.record, self.record.generation + 1
        at = record._replace(epoch=place.epoch, start=place.batch, divisions=place.divisions)
        self._publish(at._replace(generation=generation, moved=generation, **changes))

    def load(self, place: Place, layout: int, ended: int = 0) -> None:
        """Go on at the place of a state; ``ended`` is the batch of a state from the end of an epoch, else 0."""
        self.move(place, loaded=self.record.generation + 1, is_named=False, layout=layout, ended=ended)

    def begin(self) -> Record:
        numbers = self._memory.numbers
        worker = None if self._memory.is_own else get_worker_info()
        self._passes += 1
        self.pass_key = _TRAINER
        if worker is not None:  # a key that all workers of one start share; torch's seed may be that of earlier ones
            self.pass_key = 2 + hash((self._memory.started - worker.id, self._passes)) % (1 << 62)
        numbers[_HEADER, _WORKERS] = 0 if worker is None else worker.num_workers
        if worker is not None and int(numbers[_HEADER, _KEY]) == self.pass_key:
            record = self._read(_PASS)
        else:
            record = self.next
            self._write(_PASS, record)
            numbers[_HEADER, _KEY] = self.pass_key  # last, as other workers look at it first
        self._generation = record.generation
        return record

    def check(self, record: Record) -> None:
        """Raise UsageError if this iteration reads another record than the other workers, or an outdated one."""
        numbers = self._memory.numbers
        is_of_workers = int(numbers[_HEADER, _KEY]) == self.pass_key != _TRAINER
        if is_of_workers and int(numbers[_PASS, 0]) != self._generation:
            raise UsageError(
                "set_epoch()",
                "an epoch was set in the moment in which the workers began to read another one",
                "set it before the iteration begins, or after its first batch",
            )
        if int(numbers[_HEADER, _LATEST]) != record.generation and self.record.loaded > record.generation:
            raise UsageError(
                "load_state_dict()",
                "a state was loaded while this iteration was going on, or another Loader began on a new snapshot: it "
                "ends here",
                "begin a new one, which goes on from there",
            )

    def finish(self, record: Record) -> None:
        header = self._memory.numbers[_HEADER]
        header[_FINISHED] = max(int(header[_FINISHED]), record.generation + 1)

    def is_finished(self, record: Record) -> bool:
        return int(self._memory.seen[_HEADER, _FINISHED]) > record.moved

    def repeats(self) -> bool:
        """Whether an iteration that begins now reads an epoch again that was not set since; true only once."""
        header = self._memory.numbers[_HEADER]
        if int(header[_FINISHED]) != int(header[_LATEST]) + 1 or header[_WARNED]:
            return False
        header[_WARNED] = 1
        return True

    def _publish(self, record: Record) -> None:
        self._write(_FIRST_RECORD + record.generation % 2, record)
        self._memory.numbers[_HEADER, _LATEST] = record.generation  # last, as workers look at it first

    def _write(self, at: int, record: Record) -> None:
        *found, divisions = record
        numbers = [*found, len(divisions), *(number for division in divisions for number in division)]
        self._memory.numbers[at, : len(numbers)] = numbers

    def _read(self, at: int) -> Record:
        row = self._memory.seen[at].tolist()
        begins = range(_NUMBERS, _NUMBERS + 3 * row[_NUMBERS - 1], 3)
        divisions = tuple(Division(*row[begin : begin + 3]) for begin in begins)
        return Record._make([*row[: _NUMBERS - 1], divisions])
