"""The position of a training: the record that a trainer shares with its workers, saved states, and counts for proofs.

`Progress` says where the next iteration begins. It is in shared memory, so it reaches persistent workers too. The first
worker of a pass copies it and the others follow the copy, so all read the same epoch even if another one is set while
they begin. Two workers that begin just as an epoch is set may both believe to be first; one then raises an error at its
next batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np
from torch.utils.data import get_worker_info

from pqcache.errors import UsageError
from pqcache.reader.order import FORMAT, MOST_DIVISIONS, Division, Divisions, EpochShare, check_format, divisions_of
from pqcache.reader.proof import Part
from pqcache.reader.row_hashes import Hashes, Sums, sums_of
from pqcache.reader.selection.exclude import Exclusions, exclusions_of
from pqcache.torch.transport import WorkerMemory

_S = TypeVar("_S", bound="SavedPlace")
_OPTIONAL = ("worker", "periods", "within_batch", "divisions", "batches", "since", "exclude", "proof")


class Place(NamedTuple):
    """Where a training continues: at place ``batch`` of an epoch, which is the global batch without ``divisions``."""

    epoch: int
    batch: int
    lanes: int
    divisions: Divisions = ()

    def in_state(self, worker: list[int] | None) -> dict[str, Any]:
        """The fields of a state; a trainer's leaves out divisions from which nothing was read yet."""
        found = [list(division) for division in self.divisions if worker is not None or division.start < self.batch]
        return {**self._asdict(), "divisions": found or None, "worker": worker}


@dataclass(frozen=True, kw_only=True)
class SavedPlace:
    """A state: where a training is, and everything its remaining batches depend on. ``batch`` is the next global index.

    If ranks x workers did not divide the lanes there are ``divisions``, and ``batch`` is a place; see
    ``reader/order.py``. Only states that torchdata's StatefulDataLoader takes inside a worker have
    ``worker``: its number, the number of workers, and the batch at which their epoch began.
    """

    owner: ClassVar[str]

    seed: int
    lanes: int
    epoch: int
    batch: int
    worker: list[int] | None = None
    divisions: list[list[int]] | None = None

    def to_dict(self) -> dict[str, Any]:
        """The state as JSON values, with its format number."""
        fields = {"format": FORMAT, **asdict(self)}
        return {name: value for name, value in fields.items() if value is not None or name not in _OPTIONAL}

    @classmethod
    def from_dict(cls: type[_S], state: Mapping[str, Any]) -> _S:
        """Read a ``to_dict``; UsageError for anything else."""
        check_format(state, "state", cls.owner)
        try:
            found = cls(**{key: value for key, value in state.items() if key != "format"})
            found._check()
        except (TypeError, ValueError) as error:
            raise UsageError("state", f"it is not a state of {cls.owner} ({error})") from error
        return found

    def _check(self) -> None:
        for name, least in {"lanes": 1, "window": 1, "piece": 0, "epoch": 0, "batch": 0}.items():
            value = getattr(self, name, least)
            if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
                raise TypeError(f"{name} is {value!r}")

    def check_worker(self) -> None:
        """Raise UsageError if the state belongs to another worker than this process."""
        info = get_worker_info()
        if self.worker is not None and self.worker[:2] != ([info.id, info.num_workers] if info else [None, 0]):
            raise UsageError(
                "state",
                f"it belongs to worker {self.worker[0]} of {self.worker[1]}",
                "StatefulDataLoader must have the same num_workers again; pqcache.torch.Loader may have any",
            )

    def check_options(self, **options: Any) -> None:
        for name, value in options.items():
            if value != (saved := getattr(self, name)):
                raise UsageError(
                    "state",
                    f"it was taken with {name}={saved!r}, this {self.owner} has {name}={value!r}",
                    "construct it as it was, or start the epoch afresh",
                )

    @property
    def place(self) -> Place:
        """The place; UsageError for malformed divisions."""
        return Place(self.epoch, self.batch, self.lanes, divisions_of(self.divisions))


@dataclass(frozen=True, kw_only=True)
class State(SavedPlace):
    """Where a training is in a dataset; its epoch has ``batches`` on all ranks of this node.

    ``exclude`` has rows left out, and the first epoch without them. ``proof``, with ``proof=True``, has the rows that
    this rank received in the epoch.
    """

    owner = "ParquetDataset"

    snapshot: str
    row_groups: str
    columns: list[str]
    shuffle: bool
    batch_size: int | None
    window: int
    piece: int
    batches: int | None = None
    since: str | None = None
    exclude: list[Any] | None = None
    proof: dict[str, Any] | None = None

    def _check(self) -> None:
        super()._check()
        _ = self.exclusions

    @property
    def exclusions(self) -> Exclusions:
        return exclusions_of(self.exclude)


@dataclass(frozen=True, kw_only=True)
class MixState(SavedPlace):
    """Where a training is in a mix: the batches of each dataset in an epoch, and each one's state.

    The datasets' states have no ``epoch`` and ``batch``. A changed mix has ``periods``: the first epoch of each, and
    the counts of its epochs, the last being ``counts``. With ``within_batch``, batches have rows of all datasets.
    """

    owner = "Mix"

    counts: dict[str, int]
    datasets: dict[str, dict[str, Any]]
    periods: list[Any] | None = None
    within_batch: bool | None = None

    def _check(self) -> None:
        if not isinstance(self.datasets, Mapping) or not all(isinstance(s, Mapping) for s in self.datasets.values()):
            raise TypeError("it has no states of datasets")
        super()._check()


_HEADER, _PASS, _FIRST_RECORD = range(3)  # rows; there are two of records, so that one is read while one is written
_LATEST, _KEY, _WORKERS, _FINISHED, _WARNED = range(5)  # of the header
_NUMBERS = 9  # of a record, before those of its divisions
_TRAINER = 1  # the key of its passes


class Record(NamedTuple):
    """Where an iteration begins: at batch ``start`` of an ``epoch``.

    Each ``set_epoch`` and each loaded state begins a new ``generation``. ``moved`` is the generation in which the place
    (epoch and start) last changed, ``loaded`` the one of the latest state. ``is_named`` says that ``set_epoch`` chose
    the epoch. If the state was taken at the end of the previous epoch, ``ended`` is its batch. ``layout`` is a
    fingerprint of everything else that the batches after a state depend on; 0 without a state.
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

    Copies, and forked or spawned ranks, share nothing with the original.
    """

    def __init__(self) -> None:
        self._memory = WorkerMemory((4, _NUMBERS + 3 * MOST_DIVISIONS))
        self._passes = 0  # of this worker
        self.pass_key = _TRAINER  # of the latest pass: the same in all its workers, and unique to it
        self._generation = 0  # that this process reads

    @property
    def record(self) -> Record:
        """The place set last; the next iteration begins there unless that epoch ``is_finished``."""
        return self._read(_FIRST_RECORD + int(self._memory.seen[_HEADER, _LATEST]) % 2)

    @property
    def next(self) -> Record:
        """Where the next iteration begins; a finished resumed epoch begins at its first batch."""
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
        """Continue at the place of a state; ``ended`` is the batch of a state from the end of an epoch, else 0."""
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
                "an epoch was set just as the workers began to read another one",
                "set it before the iteration begins, or after its first batch",
            )
        if int(numbers[_HEADER, _LATEST]) != record.generation and self.record.loaded > record.generation:
            raise UsageError(
                "load_state_dict()",
                "a state was loaded during this iteration, or another Loader began on a new snapshot: it ends here",
                "begin a new one, which goes on from there",
            )

    def finish(self, record: Record) -> None:
        header = self._memory.numbers[_HEADER]
        header[_FINISHED] = max(int(header[_FINISHED]), record.generation + 1)

    def is_finished(self, record: Record) -> bool:
        return int(self._memory.seen[_HEADER, _FINISHED]) > record.moved

    def repeats(self) -> bool:
        """Whether an iteration that begins now repeats an epoch without ``set_epoch``; true only once."""
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


_RECENT = 256  # batches after which a state may be taken
_NOTHING = (0, 0, 0, 0, 0)  # rows, sums of their hashes and of the squares, rows that were padded, and excluded


class Hashed(NamedTuple):
    """A batch, or the result of its transform, sent to the trainer with the hashes of its rows, including those of the
    ``excluded`` rows dropped from it.
    """

    value: Any
    hashes: Hashes
    excluded: int = 0


class Tally:
    """The parts of an epoch from a state, and the sums of the batches given since."""

    def __init__(self) -> None:
        self._loaded: tuple[Place, Sequence[Part]] | None = None
        self._earlier: Sequence[Part] = ()
        self._epoch, self._share = -1, EpochShare(total=0, lanes=1)
        self._coming: deque[tuple[Sums, int]] = deque()  # of batches that are here, but not given yet
        self._given = 0
        self._recent = deque([_NOTHING], _RECENT)  # what was given after each of the last batches

    def load(self, place: Place, parts: Sequence[Part] | None) -> None:
        """Continue from a state; one without a proof leaves a gap."""
        self._loaded, self._epoch = (place, parts or ()), -1

    def begin(self, epoch: int, share: EpochShare) -> None:
        """Begin an iteration over this rank's share."""
        loaded, self._earlier = self._loaded, ()
        if loaded is not None and share.start and (loaded[0].epoch, loaded[0].batch) == (epoch, share.start):
            self._earlier = loaded[1]
        self._epoch, self._share = epoch, share
        self._given = 0
        self._coming.clear()
        self._recent = deque([_NOTHING], _RECENT)

    def take(self, batch: Hashed) -> Any:
        """Sum the rows of a batch that has arrived; `give` counts the batches in this order."""
        self._coming.append((sums_of(batch.hashes), batch.excluded))
        return batch.value

    def give(self) -> None:
        """Count the next batch as given to the trainer."""
        ((rows, hashes, squares), left_out), share = self._coming.popleft(), self._share
        before, before_hashes, before_squares, padded, excluded = self._recent[-1]
        place = share.start + (share.rank - share.start) % share.ranks + self._given * share.ranks
        if place >= share.total and self._given < share.count():
            self._recent.append((before, before_hashes, before_squares, padded + rows - left_out, excluded))
        else:
            sums = before + rows, before_hashes + hashes, before_squares + squares
            self._recent.append((*sums, padded, excluded + left_out))
        self._given += 1

    def skip(self, begin: Place, end: Place) -> None:
        """Continue at ``end``: no rank receives earlier batches."""
        self.load(end, [*self.parts(begin), Part.of(begin.batch, end.batch)])

    def parts(self, place: Place) -> list[Part]:
        """The parts of the epoch given before ``place``."""
        if not place.batch:
            return []
        if place.epoch != self._epoch:
            if self._loaded is None or self._loaded[0].epoch != place.epoch or self._loaded[0].batch > place.batch:
                return []
            return list(self._loaded[1])
        share, given = self._share, self._given
        if place.batch < share.end:
            given = min(given, -(-(place.batch - share.start) // share.ranks))
        back = self._given - given
        if back >= len(self._recent):
            reason = f"it only tracks the last {_RECENT:,} batches"
            raise UsageError("proof=True", reason, "take the state sooner, or from the Loader")
        if not given:
            return list(self._earlier)
        end = min(share.start + given * share.ranks, share.total)
        *sums, padded, excluded = self._recent[-1 - back]
        return [*self._earlier, Part.of(share.start, end, share.ranks, share.rank, Sums(*sums), padded, excluded)]
