"""The content of ``state_dict``, and the checks that a dataset or a mix can go on from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np
from torch.utils.data import get_worker_info

from pqcache.errors import UsageError
from pqcache.reader.order.epoch_order import FORMAT, check_format
from pqcache.reader.order.epoch_share import Divisions, divisions_of
from pqcache.reader.selection.exclude import Exclusions, exclusions_of

_S = TypeVar("_S", bound="SavedPlace")
_OPTIONAL = ("worker", "periods", "within_batch", "divisions", "batches", "since", "exclude", "proof")


class Place(NamedTuple):
    """Where a training goes on: at place ``batch`` of an epoch, which is the global batch without ``divisions``."""

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
    """A state: where a training is, and all that its remaining batches depend on. ``batch`` is the next global index.

    If ranks x workers did not divide the lanes there are ``divisions``, and ``batch`` is a place; see
    ``reader/order/epoch_share.py``. Only states that torchdata's StatefulDataLoader takes inside a worker have
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
        """Raise TypeError for values that no training has."""
        for name, least in {"lanes": 1, "window": 1, "piece": 0, "epoch": 0, "batch": 0}.items():
            value = getattr(self, name, least)
            if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
                raise TypeError(f"{name} is {value!r}")

    def check_worker(self) -> None:
        """Raise UsageError if the state is of one worker and this process is not it."""
        info = get_worker_info()
        if self.worker is not None and self.worker[:2] != ([info.id, info.num_workers] if info else [None, 0]):
            raise UsageError(
                "state",
                f"it is of worker {self.worker[0]} of {self.worker[1]}",
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

    ``exclude`` has rows that are left out, and the first epoch that does not have them.
    ``proof`` is of this rank alone, with ``proof=True``: which rows it was given of the epoch.
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

    The datasets' states have no ``epoch`` and ``batch``. A mix that was changed has ``periods``: the first epoch of
    each, and the counts of its epochs, the last being ``counts``. With ``within_batch`` batches have rows of all
    datasets.
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
