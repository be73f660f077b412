"""The epoch and its first batch, shared between the trainer's process and its workers."""

from __future__ import annotations

import os
import time
from typing import Any, NamedTuple

from torch.utils.data import get_worker_info

from pqcache.errors import UsageError
from pqcache.reader.order.division import MOST_DIVISIONS, Division, Divisions
from pqcache.torch.checkpoint import MixState, State, divisions_in
from pqcache.torch.foreign_loaders import keeps_order, restored_by_torchdata
from pqcache.torch.worker_memory import Numbers, WorkerMemory

_MAX_WORKERS = 4096
_OF_DIVISIONS = 1 + 3 * MOST_DIVISIONS  # values: their number, and the numbers of each
# what each of the shared numbers is; after _FINISHED there is one for each worker
_EPOCH, _START, _GENERATION, _LOADS, _CHANGES, _VERSION, _WORKERS, _ENDED_EPOCH, _ENDED_AT = range(9)
_LOADER, _PASS_NUMBER, _PASS, _PASS_END = 9, 10, 11, 16  # _PASS: the first five of these, as the pass began
_CHOSEN, _WARNED, _UNORDERED, _BEGUN_VERSION, _FINISHED_VERSION, _FINISHED = range(16, 22)
_LATE = 10.0  # seconds that a worker waits for worker 0 to begin a pass


class IterationStart(NamedTuple):
    """Where an iteration begins: at global batch ``start`` of an epoch, and a restored worker at its batch ``next``."""

    epoch: int
    start: int
    next: int | None
    divisions: Divisions = ()


class _Reading(NamedTuple):
    """What all workers of a pass read: ``epoch`` from ``start`` on; its ``generation`` changes when either is set.

    ``loads`` counts the states that were loaded, and ``changes`` those of them that changed lanes, windows or snapshot.
    ``divisions`` are those of the batches before ``start``.
    """

    epoch: int
    start: int
    generation: int
    loads: int
    changes: int
    divisions: Divisions


class Progress:
    """The epoch and where it begins, in memory that the trainer shares with its workers, persistent ones included.

    Shared are: the epoch, with a version that changes each time it is set; the batch at which it begins; a generation
    that changes when one of them does; whether ``set_epoch`` was the last to set them; the number of workers; which of
    them have made their last batch of which generation (when all have of the present one, the next iteration begins at
    0); after a state from the end of an epoch, the number of that epoch plus 1 (else 0) and the batch at which it
    ended; whether a repeated epoch was warned of; and whether the loader yields batches in another order than that of
    their numbers.

    All workers of a pass read the same epoch, also where it is set after ``iter(loader)``, when some of them have begun
    and others have not. In their first pass it is the epoch as of their fork, or as of the pickle that they were
    spawned from. In later passes of persistent workers it is the epoch when worker 0 began, which is shared with a
    number of the loader's iterator and of the pass.

    Not shared are ``next``, the next batch of this process, the iteration that is going on in it, and the place that
    torchdata's StatefulDataLoader restores in each worker. Ranks that are forked or spawned, and copies, share nothing
    with the original; nor does a dataset that was made in a worker.
    """

    def __init__(self) -> None:
        self._memory = WorkerMemory((_FINISHED + _MAX_WORKERS + 2 * _OF_DIVISIONS,))
        self._shared[_FINISHED_VERSION] = -1
        self._restored: tuple[int, IterationStart] | None = None  # with the version at which it was restored
        self._at_fork = self._before = self._now()  # as a worker finds it when it is forked or unpickled
        self._reading, self._version = self._at_fork, 0  # of the latest iteration in this process
        self._passes = 0  # of this worker
        self._in_order = True  # in a pickle, whether the loader that makes it keeps the order of batches
        self.current = IterationStart(0, 0, None)  # where the latest iteration of this process began
        self.read: IterationStart | None = None  # the same; None where an epoch or a state was set since
        self.next = 0
        self.running: tuple[IterationStart, int] | None = None  # of an iteration that has more batches: its next one

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_in_order": keeps_order()}

    @property
    def _shared(self) -> Numbers:
        return self._memory.numbers

    @property
    def epoch(self) -> int:
        """The epoch that the next iteration reads."""
        restored = self._restored_begin()
        return int(self._shared[_EPOCH]) if restored is None else restored.epoch

    @property
    def start(self) -> int:
        """The batch at which this epoch begins: 0, or where it was resumed."""
        restored = self._restored_begin()
        return int(self._shared[_START]) if restored is None else restored.start

    @property
    def version(self) -> int:
        """How often the epoch was set or a state was loaded."""
        return int(self._shared[_VERSION])

    @property
    def is_set_since(self) -> bool:
        """Whether an epoch was set or a state was loaded since the latest iteration began."""
        return self.version != int(self._shared[_BEGUN_VERSION])

    @property
    def loads(self) -> int:
        """How often a state was loaded."""
        return int(self._shared[_LOADS])

    @property
    def is_set(self) -> bool:
        """Whether an epoch was set or a state was loaded."""
        return bool(self._shared[_VERSION])

    @property
    def is_resumed(self) -> bool:
        """Whether a state was loaded that the next iteration goes on from."""
        return self.start > 0 or bool(self._shared[_ENDED_EPOCH])

    @property
    def workers(self) -> int:
        """The number of workers of the latest iteration; 0 for none."""
        return int(self._shared[_WORKERS])

    @property
    def unordered(self) -> bool:
        """Whether the loader of the latest iteration yields batches as workers finish them (``in_order=False``)."""
        return bool(self._shared[_UNORDERED])

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch; one that was resumed still begins where its state was taken. UsageError below 0."""
        if epoch < 0:
            raise UsageError(f"set_epoch({epoch})", "epochs count from 0")
        self._shared[_VERSION] += 1
        self._shared[_CHOSEN] = 1
        if epoch != int(self._shared[_EPOCH]):
            start = int(self._shared[_ENDED_AT]) if epoch + 1 == int(self._shared[_ENDED_EPOCH]) else 0
            self._set(epoch, start)
        self._shared[_ENDED_EPOCH] = 0

    def resume(self, state: State | MixState, in_worker: bool, ended: bool, changed: bool) -> None:
        """Set epoch and start to a state's; a state from the end of an epoch (``ended``) begins the next epoch.

        ``changed`` says that workers which are running have other lanes, windows or snapshots. Where ``set_epoch`` then
        names the ended epoch all the same, that one has no batches left.

        torchdata's loaders do this when an iteration begins, so after ``set_epoch``. The epoch that it named has to be
        the state's then, or the next one where the state is from its end; UsageError where not.
        """
        epoch = int(self._shared[_EPOCH])
        chosen = bool(self._shared[_CHOSEN]) and restored_by_torchdata()
        next_chosen = chosen and ended and epoch == state.epoch + 1
        if chosen and epoch != state.epoch and not next_chosen:
            raise UsageError(
                f"set_epoch({epoch})",
                f"the state that the loader was given is of epoch {state.epoch}",
                f"begin with set_epoch({state.epoch}): dataset.epoch does not know of a StatefulDataLoader's state "
                "before it iterates; pqcache.torch.Loader and its epoch do",
            )
        if not in_worker or self._memory.is_own:
            self._shared[_LOADS] += 1
            self._shared[_CHANGES] += changed
        self.running = None
        if in_worker and state.worker is not None:
            begin = IterationStart(state.epoch, state.worker[2], state.batch, divisions_in(state))
            self._restored = None if next_chosen else (int(self._shared[_VERSION]), begin)
            if not chosen:
                self._shared[_EPOCH] = state.epoch
            return
        if chosen and ended and epoch == state.epoch:
            self._set(epoch, state.batch, divisions_in(state))
            return
        self._shared[_VERSION] += 1
        self._shared[_CHOSEN] = 0
        self._set(state.epoch + ended, 0 if ended else state.batch, () if ended else divisions_in(state))
        self._shared[_ENDED_EPOCH] = state.epoch + 1 if ended else 0
        self._shared[_ENDED_AT] = state.batch

    def note_end(self, epoch: int, batch: int) -> None:
        """Note in a worker that a state from the end of ``epoch``, of all workers, was restored after ``set_epoch``.

        StatefulDataLoader then begins again with other workers, which are not given the state.
        """
        if self._restored is not None and self._shared[_CHOSEN]:
            self._shared[_ENDED_EPOCH], self._shared[_ENDED_AT] = epoch + 1, batch

    def begin(self, workers: int) -> IterationStart:
        """Return where an iteration with so many workers (0: in the trainer) begins, and note their number."""
        self._shared[_WORKERS] = workers
        self._shared[_UNORDERED] = bool(workers) and not (self._in_order and keeps_order())
        self._reading = self._pass_of_worker() if workers and not self._memory.is_own else self._now()
        self.running = None
        self._version = int(self._shared[_VERSION])
        info = get_worker_info()
        if info is None or info.id == 0 or self._memory.is_own:
            self._shared[_BEGUN_VERSION] = self._version
        self.current = self.read = self._restored_begin() or self._begin_of(self._reading, workers)
        return self.current

    def _begin_of(self, reading: _Reading, workers: int) -> IterationStart:
        if workers and int(self._shared[_ENDED_EPOCH]) == reading.epoch + 1:  # see note_end
            return IterationStart(reading.epoch, int(self._shared[_ENDED_AT]), None)
        if self._has_finished(reading.generation, workers):
            return IterationStart(reading.epoch, 0, None)
        return IterationStart(reading.epoch, reading.start, None, reading.divisions)

    def next_start(self, workers: int) -> IterationStart:
        """Return where the next iteration with so many workers begins."""
        now = self._now()
        if self._has_finished(now.generation, workers):
            return IterationStart(now.epoch, 0, None)
        return IterationStart(now.epoch, now.start, None, now.divisions)

    def begin_of(self, epoch: int) -> IterationStart:
        """Return where an epoch begins: where a state was taken, or at 0."""
        restored, now = self._restored_begin(), self._now()
        if restored is not None and restored.epoch == epoch:
            return restored
        if self.running is not None and self.running[0].epoch == epoch:
            return self.running[0]
        for known in (now, self._before):  # of the epoch that is read while another one was set
            if known.epoch == epoch:
                return IterationStart(epoch, known.start, None, known.divisions)
        return IterationStart(epoch, 0, None)

    def given(self, begin: IterationStart, following: int, is_last: bool) -> None:
        """Note that an iteration of this process gives a batch, and which one follows."""
        self.running = None if is_last else (begin, following)
        if self.read is begin:
            self.next = following

    def ended(self, begin: IterationStart) -> None:
        """Note that an iteration of this process has ended, perhaps before its last batch."""
        if self.running is not None and self.running[0] is begin:
            self.running = None

    @property
    def reading_loads(self) -> int:
        """How often a state had been loaded when the latest iteration of this process began."""
        return self._reading.loads

    def check_loads(self, loads: int) -> None:
        """Raise UsageError in an iteration that began before the latest state was loaded, or cannot read it."""
        if self.loads != loads:
            raise UsageError(
                "load_state_dict()",
                "a state was loaded while this iteration was going on, which ends here",
                "begin a new one, which goes on where the state was taken",
            )
        if self._at_fork.changes != int(self._shared[_CHANGES]) and not self._memory.is_own:
            raise UsageError(
                "DataLoader(persistent_workers=True)",
                "a state with another snapshot, window or number of lanes was loaded after its workers had started",
                "make a new DataLoader, or use pqcache.torch.Loader, which starts new workers",
            )

    def repeats(self, workers: int) -> bool:
        """Return, once, whether an iteration that begins now reads an epoch that was read, and not set since."""
        same = int(self._shared[_FINISHED_VERSION]) == int(self._shared[_VERSION]) and not self._shared[_WARNED]
        if not same or self._restored_begin() is not None or not self._has_finished(self._now().generation, workers):
            return False
        self._shared[_WARNED] = 1
        return True

    def _set(self, epoch: int, start: int, divisions: Divisions = ()) -> None:
        self._before = self._now()
        self._shared[_EPOCH], self._shared[_START] = epoch, start
        at = self._shared[-_OF_DIVISIONS:]
        numbers = [len(divisions), *(number for division in divisions for number in division)]
        at[: len(numbers)] = numbers
        self._shared[_GENERATION] += 1
        self.next, self.read = start, None
        self._at_fork = self._now()

    def _now(self) -> _Reading:
        return self._reading_at(_EPOCH, self._shared[-_OF_DIVISIONS:])

    def _reading_at(self, first: int, divisions: Numbers) -> _Reading:
        epoch, start, generation, loads, changes = map(int, self._shared[first : first + _CHANGES + 1])
        numbers = divisions.tolist()
        found = [Division(*numbers[3 * i + 1 : 3 * i + 4]) for i in range(numbers[0])]
        return _Reading(epoch, start, generation, loads, changes, tuple(found))

    def _has_finished(self, generation: int, workers: int) -> bool:
        count = 1 if self._memory.is_own else max(1, workers)
        return bool((self._shared[_FINISHED : _FINISHED + count] == generation + 1).all())

    def _pass_of_worker(self) -> _Reading:
        """Return what this worker and all others read in the pass that it begins."""
        info = get_worker_info()
        assert info is not None
        loader, shared = info.seed - info.id, self._shared  # torch's seed of an iterator and its workers
        self._passes += 1
        if self._passes == 1:
            return self._at_fork
        if info.id == 0:
            shared[_PASS:_PASS_END] = shared[_EPOCH : _CHANGES + 1].copy()
            shared[-2 * _OF_DIVISIONS : -_OF_DIVISIONS] = shared[-_OF_DIVISIONS:].copy()
            shared[_LOADER], shared[_PASS_NUMBER] = loader, self._passes
        parent, until = os.getppid(), time.monotonic() + _LATE
        while (int(shared[_LOADER]), int(shared[_PASS_NUMBER])) != (loader, self._passes):  # it may end a batch first
            if os.getppid() != parent:
                raise UsageError("DataLoader", "the trainer has ended")
            if time.monotonic() > until:  # worker 0 does not iterate it as often, in a dataset of the user's own
                return self._now()
            time.sleep(0.001)
        return self._reading_at(_PASS, shared[-2 * _OF_DIVISIONS : -_OF_DIVISIONS])

    def finish(self, worker: int) -> None:
        """Note that a worker is about to yield its last batch of the epoch."""
        self._restored = None
        worker = 0 if self._memory.is_own else worker
        if worker < _MAX_WORKERS:
            self._shared[_FINISHED + worker] = self._reading.generation + 1
            self._shared[_FINISHED_VERSION] = self._version

    def is_finished(self, workers: int) -> bool:
        """Return whether all workers have made their last batch of what this process reads."""
        return self._has_finished(self._reading.generation, workers)

    def _restored_begin(self) -> IterationStart | None:
        """Return where a restored worker begins: until it reaches the end, or until another epoch is set."""
        if self._restored is None:
            return None
        version, begin = self._restored
        if version != int(self._shared[_VERSION]) and int(self._shared[_EPOCH]) != begin.epoch:
            self._restored = None
            return None
        return begin
