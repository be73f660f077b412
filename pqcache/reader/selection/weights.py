"""``weights=`` and ``balance=``: how often each row comes in an epoch.

A row of weight w comes floor(w) times, and once more in as many epochs as the rest of w says. Which rows come once more
is decided by systematic sampling: the rests of all rows are laid end to end, in a random order within each row group,
and from a random start on every whole number chooses the row that it falls into. So each row has exactly its
probability, no row is chosen twice, and how many rows of a row group come follows from the sum of its weights: the
counts of an epoch are arithmetic, and nothing is read for them. Weights are whole numbers of 2^-32.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pqcache.errors import ParquetError, UsageError, first_line
from pqcache.reader.open_dataset import LocalDataset
from pqcache.reader.order.epoch_order import Ints, random_words, scatter_order
from pqcache.reader.selection.chosen_column import ChosenColumn
from pqcache.reader.selection.row_filter import SelectedRowGroups
from pqcache.reader.selection.selection import Selection
from pqcache.reader.selection.stored_counts import Counts, count_once, map_row_groups
from pqcache.reader.selection.value_weights import (
    BLOCK,
    MOST,
    ONE,
    ValueWeights,
    check_label,
    fixed_point,
    plain_values,
)

Given = str | Mapping[str, Any] | None
_WEIGHTS = 4  # what a random stream is for, after those of the order and of mixes
_LANE = (1 << 64) - 1  # no lane of an order, so that its streams are others
_BITS, _REST = np.uint64(32), np.uint64(ONE - 1)
_MOST_LABELS = 100_000


def check_weights(weights: Any, balance: Any) -> None:
    """Raise UsageError for options that say nothing of weights; names and values are checked where they are used."""
    if weights is not None and balance is not None:
        raise UsageError("weights and balance", "both say how often rows come", "choose one of them")
    if balance is not None and not isinstance(balance, str):
        raise UsageError(f"balance={balance!r}", "name one column")
    if weights is not None and not callable(weights):
        _check_given(weights, f"weights={weights!r}")


def _check_given(weights: Any, option: str) -> None:
    by_value = isinstance(weights, Mapping) and len(weights) == 1
    if by_value:
        ((name, values),) = weights.items()
        by_value = isinstance(name, str) and isinstance(values, Mapping)
    if not (isinstance(weights, str) or by_value):
        raise UsageError(option, 'name a column, or give weights by value, like {"label": {0: 1.0, 1: 5.0}}')


class Weigher(Protocol):
    """What gives the selected rows of a row group their weights."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns in the files that it looks at."""

    @property
    def fingerprint(self) -> str:
        """A name for the weights."""

    def weigh(self, group: int | Ints, values: pa.ChunkedArray) -> Ints:
        """Return the weights of rows, in units of 2^-32, by their values; others than numbers raise an error.

        ``group`` is the row group of all rows, or of each.
        """

    @property
    def column(self) -> ChosenColumn:
        """The column of the values."""


@dataclass(frozen=True)
class ColumnWeights:
    """Weights that are a column; a `Weigher`."""

    data: LocalDataset
    column: ChosenColumn

    @staticmethod
    def of(data: LocalDataset, name: str) -> ColumnWeights:
        """Return the weights in a column; UsageError where it does not hold numbers."""
        column = ChosenColumn(data, name, "weights")
        kind = column.type
        if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)):
            raise UsageError(f"weights={name!r}", f"it is {kind}", "name a column of numbers, or give weights by value")
        return ColumnWeights(data, column)

    @property
    def columns(self) -> tuple[str, ...]:
        """The column, unless its values are in the paths."""
        return self.column.columns

    @property
    def fingerprint(self) -> str:
        """A name for the weights."""
        return hashlib.blake2b(json.dumps(["weights", self.column.path]).encode(), digest_size=16).hexdigest()

    def weigh(self, group: int | Ints, values: pa.ChunkedArray) -> Ints:
        """Return the weights of rows; what is no weight raises ParquetError with the file."""
        numbers = values.cast(pa.float64()).to_numpy()
        if len(numbers) and not (numbers.min() >= 0 and numbers.max() <= MOST):  # which NaN is not either
            index, row = self.data.index, int(np.flatnonzero(~((numbers >= 0) & (numbers <= MOST)))[0])
            value, group = values[row].as_py(), int(np.broadcast_to(group, len(numbers))[row])
            raise ParquetError(
                self.data.root / index.paths[int(index.numbers("file")[group])],
                f"row group {int(index.numbers('row_group')[group])} has the weight {value} in column "
                f"{self.column.name!r}",
                f"weights are numbers from 0 to {MOST:,}: leave such rows out with filters=, or write others",
            )
        return fixed_point(numbers)


@dataclass(frozen=True, kw_only=True)
class WeightedSelection:
    """The rows of a dataset as often as they come in one epoch; a `Selection` whose positions repeat.

    ``starts`` are where the rests of each of ``groups``, row groups of the index, begin, modulo 1.
    """

    data: LocalDataset
    base: Selection | None
    weigher: Weigher
    groups: Ints
    starts: npt.NDArray[np.uint64]
    seed: int
    epoch: int

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of the weights, and of what chooses rows before."""
        return tuple(dict.fromkeys([*(self.base.columns if self.base else ()), *self.weigher.columns]))

    @property
    def fingerprint(self) -> str:
        """A name for the rows of this epoch."""
        base = self.base.fingerprint if self.base else ""
        return f"{base}-{self.weigher.fingerprint}-{self.seed}-{self.epoch}"

    def positions(self, group: int, parts: Iterable[pa.Table]) -> Ints:
        """Return the rows of a row group in ascending order, each as often as it comes."""
        rows, weights = weighed(self.base, self.weigher, group, parts)
        rests = np.asarray(weights, "<i8").view("<u4")[::2]
        once_more = None
        if rests.any():
            order = scatter_order(len(rests), self.seed, self.epoch, _LANE, group)
            once_more = _once_more(rests, order, self.starts[np.searchsorted(self.groups, group)])
        weights >>= 32
        return np.repeat(rows, weights if once_more is None else np.add(weights, once_more, out=weights))


def _once_more(rests: npt.NDArray[np.uint32], order: Ints, start: np.uint64) -> npt.NDArray[np.bool_]:
    """Return the rows whose rests, laid end to end in ``order`` from ``start`` on, a whole number falls into.

    There a sum of 32 bits overflows, so that it is less than what was added last.
    """
    chosen = np.empty(len(order), np.bool_)
    end = np.uint32(start)
    for low in range(0, len(order), BLOCK):
        rows = order[low : low + BLOCK]
        added = rests[rows]
        ends = np.cumsum(added, dtype=np.uint32)
        ends += end
        chosen[rows] = ends < added
        end = ends[-1]
    return chosen


def weighed(base: Selection | None, weigher: Weigher, group: int, parts: Iterable[pa.Table]) -> tuple[Ints, Ints]:
    """Return the rows that ``base`` chooses of a row group (None: all), and their weights."""
    rows, values = _values(base, weigher.column, group, parts)
    return rows, weigher.weigh(group, values)


def _values(
    base: Selection | None, column: ChosenColumn, group: int, parts: Iterable[pa.Table]
) -> tuple[Ints, pa.ChunkedArray]:
    parts = list(parts)
    count = sum(part.num_rows for part in parts)
    rows = np.arange(count, dtype=np.int64) if base is None else base.positions(group, parts)
    found = [column.values(group, part) for part in parts]
    values = pa.chunked_array([chunk for one in found for chunk in one.chunks], found[0].type)
    return rows, values.take(pa.array(rows)) if len(rows) < count else values


class RowWeights:
    """How often the rows of a dataset come, epoch by epoch, among those that were ``found``."""

    def __init__(self, data: LocalDataset, found: SelectedRowGroups, given: Any, counts: Counts | None) -> None:
        """``given`` is ``weights=``, or (``balance=``,)."""
        self._data, self._base, self._groups, self._given = data, found.selection, found.row_groups, given
        self._rows = data.index.rows[found.row_groups] if found.selected is None else found.selected
        self._counts: Counts = {} if counts is None else counts
        if not callable(given):
            self._weigher(0)  # refuses what makes no sense

    @property
    def varies(self) -> bool:
        """Whether another epoch may have other weights."""
        return callable(self._given)

    def fingerprint(self, epoch: int) -> str:
        """Return a name for the weights of an epoch."""
        weigher = self._weigher(epoch)
        return "equal" if weigher is None else weigher.fingerprint

    def at(self, epoch: int, seed: int, constant: bool = False) -> tuple[Ints, Selection | None]:
        """Return how many rows of each row group come in an epoch, and which.

        With ``constant`` all epochs have the same number of rows, which changes probabilities by one row in all.
        """
        weigher = self._weigher(epoch)
        if weigher is None:
            return self._rows, self._base
        whole, rests = self._totals(weigher)
        if len(whole) and not (whole.any() or rests.any()):
            warnings.warn(
                f"{self._data.root}: the weights in {weigher.column.name!r} are all 0, so there are no batches",
                stacklevel=2,
            )
        start = int(random_words(1, seed, epoch, _WEIGHTS, 1, 0)[0]) % ONE
        if constant:
            start = _start_of_constant(start, int(rests.sum() & _REST))
        starts = (np.cumsum(rests) - rests + np.uint64(start)) & _REST  # modulo 2^64, which does not matter
        counts = whole + ((starts + rests) >> _BITS).astype(np.int64)
        selection = WeightedSelection(
            data=self._data,
            base=self._base,
            weigher=weigher,
            groups=self._groups,
            starts=starts,
            seed=seed,
            epoch=epoch,
        )
        return counts, selection

    def _weigher(self, epoch: int) -> Weigher | None:
        """Return what weighs the rows of an epoch; None where all weigh the same."""
        given = self._given
        if isinstance(given, tuple):
            return self._balanced
        if callable(given):
            given = given(epoch)
            if given is None:
                return None
            _check_given(given, f"weights({epoch}), which is {given!r}")
        if isinstance(given, str):
            return ColumnWeights.of(self._data, given)
        ((name, by_value),) = given.items()
        return ValueWeights.of(ChosenColumn(self._data, name, "weights"), by_value)

    @cached_property
    def _balanced(self) -> Weigher | None:
        (name,) = self._given
        column = ChosenColumn(self._data, name, "balance")
        check_label(f"balance={name!r}", column)
        found = self._value_counts(column).group_by("value").aggregate([("rows", "sum")])
        if found["value"].null_count:
            rows = found.filter(pc.is_null(found["value"]))["rows_sum"][0].as_py()
            raise UsageError(f"balance={name!r}", f"it is null in {rows:,} rows", "leave them out with filters=")
        rows = found["rows_sum"].to_numpy().astype(float)
        if not len(rows):
            return None
        return ValueWeights(column, found["value"].combine_chunks(), fixed_point(rows.sum() / len(rows) / rows))

    def _totals(self, weigher: Weigher) -> tuple[Ints, Any]:
        """Return for each row group the sum of the whole parts of its weights, and that of the rests."""
        if isinstance(weigher, ValueWeights):
            table = self._value_counts(weigher.column)
            weights, rows = weigher.weigh(-1, table["value"]), table["rows"].to_numpy()
            number = np.searchsorted(self._groups, table["group"].to_numpy())
            whole, rests = np.zeros(len(self._groups), np.int64), np.zeros(len(self._groups), np.int64)
            np.add.at(whole, number, rows * (weights >> 32))
            np.add.at(rests, number, rows * (weights & (ONE - 1)))
            return whole, rests.astype(np.uint64)

        if weigher.column.in_paths:
            weights, used = np.zeros(len(self._groups), np.int64), self._rows > 0
            weights[used] = weigher.weigh(self._groups[used], weigher.column.values_of(self._groups[used]))
            return self._rows * (weights >> 32), (self._rows * (weights & (ONE - 1))).astype(np.uint64)

        def total(group: int, parts: Iterable[pa.Table]) -> tuple[int, int]:
            _, weights = weighed(self._base, weigher, group, parts)
            return int((weights >> 32).sum()), int((weights & (ONE - 1)).sum())

        found = self._once("weights", weigher.column, lambda columns: _table(self._groups, self._map(columns, total)))
        return found["whole"].to_numpy().astype(np.int64), found["rests"].to_numpy().astype(np.uint64)

    def _value_counts(self, column: ChosenColumn) -> pa.Table:
        """Return how many rows of each row group have which value of a column."""
        check_label("weights", column)
        if column.in_paths:
            used = self._groups[self._rows > 0]
            values = plain_values(column.values_of(used), column.type)
            return self._checked(column, pa.table({"group": used, "value": values, "rows": self._rows[self._rows > 0]}))

        def count(group: int, parts: Iterable[pa.Table]) -> pa.Table:
            _, values = _values(self._base, column, group, parts)
            try:
                found = pc.value_counts(plain_values(values, column.type))
            except pa.ArrowException as error:
                raise UsageError(f"column {column.name!r}", first_line(error)) from error
            self._check_labels(column, len(found))
            counted = {
                "group": np.full(len(found), group),
                "value": found.field("values"),
                "rows": found.field("counts"),
            }
            return pa.table(counted)

        def every(columns: tuple[str, ...]) -> pa.Table:
            empty = pa.table({"group": pa.array([], pa.int64()), "value": plain_values(None, column.type),
                              "rows": pa.array([], pa.int64())})  # fmt: skip
            return self._checked(column, pa.concat_tables([empty, *self._map(columns, count)]).combine_chunks())

        return self._once("values", column, every)

    def _checked(self, column: ChosenColumn, found: pa.Table) -> pa.Table:
        self._check_labels(column, len(pc.unique(found["value"])))
        return found

    def _check_labels(self, column: ChosenColumn, count: int) -> None:
        if count > _MOST_LABELS:
            reason = f"{column.name!r} has more than {_MOST_LABELS:,} values"
            raise UsageError("weights", reason, "write the weights into a column, and name that")

    def _map(self, columns: tuple[str, ...], use: Callable[[int, Iterable[pa.Table]], Any]) -> list[Any]:
        return map_row_groups(self._data, columns, self._groups, use)

    def _once(self, what: str, column: ChosenColumn, count: Callable[[tuple[str, ...]], pa.Table]) -> pa.Table:
        base = self._base.fingerprint if self._base else None
        name = hashlib.blake2b(json.dumps([what, column.path, base]).encode(), digest_size=16).hexdigest()
        columns = tuple(dict.fromkeys([*(self._base.columns if self._base else ()), *column.columns]))
        return count_once(self._data, name, self._groups, self._counts, lambda: count(columns))


def _table(groups: Ints, totals: list[tuple[int, int]]) -> pa.Table:
    found = np.array(totals, np.int64).reshape(-1, 2)
    return pa.table({"group": groups, "whole": found[:, 0], "rests": found[:, 1]})


def _start_of_constant(start: int, rest: int) -> int:
    """Return a start with which a sum whose rest is ``rest`` is always rounded to the same side, the nearer one."""
    if rest <= ONE - rest:
        return start * (ONE - rest) >> 32
    return ONE - rest + (start * rest >> 32)
