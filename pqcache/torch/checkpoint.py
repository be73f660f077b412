"""What ``state_dict`` holds, and the checks that a dataset or a mix can go on from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
from torch.utils.data import get_worker_info

from pqcache.errors import UsageError
from pqcache.reader.order.epoch_order import FORMAT, check_format
from pqcache.reader.order.epoch_share import MOST_DIVISIONS, Division, Divisions


@dataclass(frozen=True, kw_only=True)
class State:
    """Where a training is in a dataset: all that its remaining batches depend on. ``batch`` is the next global index.

    ``divisions`` are there where ranks x workers did not divide the lanes, and ``batch`` is a place then; see
    ``reader/order/epoch_share.py``.
    ``worker`` is only in the states that torchdata's StatefulDataLoader takes inside each worker: its number,
    the number of workers, and the batch at which their epoch began.
    """

    snapshot: str
    row_groups: str
    columns: list[str]
    shuffle: bool
    seed: int
    batch_size: int | None
    lanes: int
    window: int
    piece: int
    epoch: int
    batch: int
    worker: list[int] | None = None
    divisions: list[list[int]] | None = None

    def __post_init__(self) -> None:
        _check_numbers(self, lanes=1, window=1, piece=0, epoch=0, batch=0)

    def to_dict(self) -> dict[str, Any]:
        """Return the state as a dict of JSON values, with its format number."""
        return _to_dict(self)

    @staticmethod
    def from_dict(state: Mapping[str, Any]) -> State:
        """Return what ``to_dict`` wrote; anything else raises UsageError."""
        return _from_dict(State, state, "ParquetDataset")


@dataclass(frozen=True, kw_only=True)
class MixState:
    """Where a training is in a mix: the batches that each dataset gives in an epoch, and each one's state.

    The datasets' states are without ``epoch`` and ``batch``. ``periods`` is there where the mix was changed: the first
    epoch of each period, and what its epochs have of each dataset, the last one being ``counts``. ``within_batch`` says
    that batches have rows of all datasets.
    """

    counts: dict[str, int]
    datasets: dict[str, dict[str, Any]]
    seed: int
    lanes: int
    epoch: int
    batch: int
    worker: list[int] | None = None
    periods: list[Any] | None = None
    within_batch: bool | None = None
    divisions: list[list[int]] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.datasets, Mapping) or not all(isinstance(s, Mapping) for s in self.datasets.values()):
            raise TypeError("it has no states of datasets")
        _check_numbers(self, lanes=1, epoch=0, batch=0)

    def to_dict(self) -> dict[str, Any]:
        """Return the state as a dict of JSON values, with its format number."""
        return _to_dict(self)

    @staticmethod
    def from_dict(state: Mapping[str, Any]) -> MixState:
        """Return what ``to_dict`` wrote; anything else raises UsageError."""
        return _from_dict(MixState, state, "Mix")


class Place(NamedTuple):
    """Where a training goes on: at place ``batch`` of an epoch, which is the global batch without ``divisions``."""

    epoch: int
    batch: int
    lanes: int
    divisions: Divisions = ()

    def in_state(self, worker: list[int] | None) -> dict[str, Any]:
        """Return the place as a state has it; it names no division of which nothing was read, unless of a worker."""
        found = [list(division) for division in self.divisions if worker is not None or division.start < self.batch]
        return {"epoch": self.epoch, "batch": self.batch, "lanes": self.lanes, "divisions": found or None}


_OPTIONAL = ("worker", "periods", "within_batch", "divisions")
_S = TypeVar("_S", State, MixState)


def _check_numbers(state: State | MixState, **least: int) -> None:
    """Raise TypeError for numbers of a state that no training has."""
    for name, number in least.items():
        value = getattr(state, name)
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < number:
            raise TypeError(f"{name} is {value!r}")


def _to_dict(state: State | MixState) -> dict[str, Any]:
    fields = {"format": FORMAT, **asdict(state)}
    return {name: value for name, value in fields.items() if value is not None or name not in _OPTIONAL}


def _from_dict(kind: type[_S], state: Mapping[str, Any], owner: str) -> _S:
    check_format(state, "state", owner)
    try:
        return kind(**{key: value for key, value in state.items() if key != "format"})
    except TypeError as error:
        raise UsageError("state", f"it is not a state of {owner} ({error})") from error


def check_options(state: State | MixState, options: Mapping[str, Any], owner: str) -> None:
    """Raise UsageError for the first of a dataset's or mix's (``owner``) options that differs from the state's."""
    for name, value in options.items():
        saved = getattr(state, name)
        if value != saved:
            raise UsageError(
                "state",
                f"it was taken with {name}={saved!r}, this {owner} has {name}={value!r}",
                "construct it as it was, or start the epoch afresh",
            )


def check_rows_of_state(state: State, row_groups: str) -> None:
    """Raise UsageError unless a state is of the rows that ``row_groups`` names."""
    if state.row_groups != row_groups:
        raise UsageError(
            "state",
            "it was taken with other filters or rows, or another split, sequence, pack or weights",
            "construct the dataset with the same ones",
        )


def check_worker(saved: list[int] | None) -> None:
    """Raise UsageError where another process loads the state of one worker; see ``State.worker``."""
    info = get_worker_info()
    if saved is not None and saved[:2] != ([info.id, info.num_workers] if info else [None, 0]):
        raise UsageError(
            "state",
            f"it is of worker {saved[0]} of {saved[1]}",
            "StatefulDataLoader must have the same num_workers again; pqcache.torch.Loader may have any",
        )


def divisions_in(state: State | MixState) -> Divisions:
    """Return the divisions of a state; UsageError where they are none."""
    wrong = UsageError("state", f"its divisions are {state.divisions!r}", "load what state_dict() returned")
    try:
        found = tuple(Division(*map(int, numbers)) for numbers in state.divisions or ())
    except (TypeError, ValueError) as error:
        raise wrong from error
    sound = all(division.start >= 0 and division.ranks > 0 and division.workers > 0 for division in found)
    if len(found) > MOST_DIVISIONS or not sound:
        raise wrong
    return found


def check_lanes(lanes: int, ranks: int) -> None:
    """Raise UsageError where a state's lanes cannot be divided among so many ranks."""
    if lanes % ranks:
        raise UsageError(
            "state",
            f"it has lanes={lanes}, which {ranks} ranks cannot share",
            "resume on a number of ranks that divides it",
        )
