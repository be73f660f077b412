"""``weights=`` and ``balance=``: how often each row comes in an epoch.

A row of weight w comes floor(w) times, and once more in as many epochs as the rest of w says. Which rows come once more
is decided by systematic sampling: the rests of all rows are laid end to end, in a random order within each row group,
and from a random start on every whole number chooses the row that it falls into. So each row has exactly its
probability, no row is chosen twice, and how many rows of a row group come follows from the sum of its weights: the
counts of an epoch are arithmetic, and nothing is read for them. Weights are whole numbers of 2^-32.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pqcache.errors import ParquetError, UsageError, first_line
from pqcache.filters.expression import number_against_text
from pqcache.parquet.schema_merge import cast_exactly, is_text, without_views
from pqcache.reader.kinds import storage_type
from pqcache.reader.open_dataset import LocalDataset
from pqcache.reader.order.epoch_order import Ints, random_words, scatter_order
from pqcache.reader.selection.selection import (
    ChosenColumn,
    Counts,
    Found,
    Parts,
    Positions,
    Selection,
    count_once,
    digest_of,
    map_row_groups,
)

ONE = 1 << 32  # the unit of weights: one row
MOST = 1_000_000  # of a weight
BLOCK = 1 << 13  # rows weighed at once: what is made of them is in the processor's cache, and takes no fresh pages
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


def fixed_point(weights: Any) -> Ints:
    """Return weights in units of 2^-32."""
    numbers = np.asarray(weights, np.float64)
    found = np.empty(numbers.shape, np.int64)
    flat, into = numbers.reshape(-1), found.reshape(-1)
    for low in range(0, len(flat), BLOCK):
        into[low : low + BLOCK] = np.rint(flat[low : low + BLOCK] * ONE)
    return found


def check_label(option: str, column: ChosenColumn) -> None:
    """Raise UsageError where the values of a column are no labels."""
    kind = _plain(column)
    known = pa.types.is_integer(kind) or pa.types.is_boolean(kind) or is_text(kind) or pa.types.is_decimal(kind)
    if not (known or (pa.types.is_temporal(kind) and not pa.types.is_interval(kind))):
        raise UsageError(option, f"{column.name!r} is {column.type}", "choose integers, booleans, text, dates or times")


def _plain(column: ChosenColumn) -> pa.DataType:
    """The type of labels, without dictionaries."""
    return without_views(storage_type(column.type))


@dataclass(frozen=True)
class ColumnWeights:
    """Weights that are a column."""

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
    def name(self) -> str:
        """The same only for the same weights."""
        return digest_of(["weights", self.column.path])

    def weigh(self, group: int | Ints, values: pa.ChunkedArray) -> Ints:
        """Return the weights of rows by their values; what is no weight raises ParquetError with the file.

        ``group`` is the row group of all rows, or of each.
        """
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


@dataclass(frozen=True)
class ValueWeights:
    """Weights by value. ``others`` are those of null, and of values that are not named; -1: an error."""

    column: ChosenColumn
    values: pa.Array
    weights: Ints
    others: tuple[int, int] = (-1, -1)

    @staticmethod
    def of(column: ChosenColumn, by_value: Mapping[Any, Any]) -> ValueWeights:
        """Return the weights that a user gives; UsageError for what makes no sense."""
        check_label("weights", column)
        for value, weight in by_value.items():
            number = isinstance(weight, int | float | np.integer | np.floating) and not isinstance(weight, bool)
            if not number or math.isnan(weight) or not 0 <= weight <= MOST:
                raise UsageError("weights", f"{value!r} has the weight {weight!r}", f"give a number from 0 to {MOST:,}")
        named = {value: weight for value, weight in by_value.items() if value is not None and value is not ...}
        kind = _plain(column)
        plain = [getattr(value, "item", lambda v=value: v)() for value in named]
        odd = next((v for v in plain if isinstance(v, bool | int | float | Decimal)), None)
        if odd is not None and is_text(kind):
            as_text = '{{"{name}": {{"{value}": ' + f"{by_value[odd]!r}" + "}}}}"
            raise number_against_text(str(odd), column.operand, as_text).within("weights")
        try:
            values = pa.array(plain, kind)
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            raise UsageError(
                "weights", f"not all are values of {column.name!r}, which is {kind}", first_line(error)
            ) from error
        if odd is not None and (pa.types.is_temporal(kind) or values.to_pylist() != plain):
            raise UsageError("weights", f"{odd!r} is not a value of {column.name!r}, which is {kind}")
        others = [int(fixed_point(by_value[key])) if key in by_value else -1 for key in (None, ...)]
        return ValueWeights(column, values, fixed_point(list(named.values())), (others[0], others[1]))

    @property
    def name(self) -> str:
        """The same only for the same weights."""
        pairs = sorted((str(value), weight) for value, weight in zip(self.values, self.weights.tolist(), strict=True))
        return digest_of(["values", self.column.path, pairs, self.others])

    def weigh(self, group: int | Ints, values: pa.ChunkedArray) -> Ints:
        """Return the weights of rows; a value without one raises UsageError."""
        plain = cast_exactly(values, _plain(self.column))
        codes = pc.index_in(plain, value_set=self.values)
        codes = (pc.fill_null(codes, -1) if codes.null_count else codes).to_numpy()
        found = np.append(self.weights, self.others[1]).take(codes)  # the last one for -1
        if plain.null_count:
            found[plain.is_null().to_numpy()] = self.others[0]
        if len(found) and found.min() < 0:
            value = plain[int(np.flatnonzero(found < 0)[0])].as_py()
            raise UsageError(
                f"weights of {self.column.name!r}",
                f"there are rows with {value!r}, which has no weight",
                f"name it, or all that are not named with ...: {{{value!r}: 1.0, ...: 1.0}}",
            )
        return np.asarray(found, np.int64)


Weigher = ColumnWeights | ValueWeights


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


class RowWeights:
    """How often the rows of a selection come, epoch by epoch; ``given`` is ``weights=``, or (``balance=``,)."""

    def __init__(self, found: Selection, given: Any, known: Counts | None) -> None:
        self._found, self._data, self._given = found, found.data, given
        self._known: Counts = {} if known is None else known
        if not callable(given):
            self._weigher(0)  # refuses what makes no sense

    def name(self, epoch: int) -> str:
        """Return a name for the weights of an epoch."""
        weigher = self._weigher(epoch)
        return "equal" if weigher is None else weigher.name

    def at(self, epoch: int, seed: int, constant: bool = False) -> Selection:
        """Return the rows of an epoch, each as often as it comes.

        With ``constant`` all epochs have the same number of rows, which changes probabilities by one row in all.
        """
        weigher, found = self._weigher(epoch), self._found
        if weigher is None:
            return found
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

        def choose(group: int, parts: Parts) -> Positions:
            rows, weights = self._weighed(weigher, group, parts)
            rests = np.asarray(weights, "<i8").view("<u4")[::2]
            once_more = None
            if rests.any():
                order = scatter_order(len(rests), seed, epoch, _LANE, group)
                once_more = _once_more(rests, order, starts[np.searchsorted(found.row_groups, group)])
            weights >>= 32
            return Positions(np.repeat(rows, weights if once_more is None else np.add(weights, once_more, out=weights)))

        return replace(
            found,
            counts=whole + ((starts + rests) >> _BITS).astype(np.int64),
            choose=choose,
            columns=self._columns(weigher.column),
            name=digest_of([found.name, weigher.name, seed, epoch]),
            once=False,
        )

    def _columns(self, column: ChosenColumn) -> tuple[str, ...]:
        return tuple(dict.fromkeys([*self._found.columns, *column.columns]))

    def _weighed(self, weigher: Weigher, group: int, parts: Parts) -> tuple[Ints, Ints]:
        """The rows of a row group, and their weights."""
        rows, values = self._values(weigher.column, group, parts)
        return rows, weigher.weigh(group, values)

    def _values(self, column: ChosenColumn, group: int, parts: Parts) -> tuple[Ints, pa.ChunkedArray]:
        parts, choose = list(parts), self._found.choose
        count = sum(part.num_rows for part in parts)
        rows = np.arange(count, dtype=np.int64) if choose is None else choose(group, parts).rows
        found = [column.values(group, part) for part in parts]
        values = pa.chunked_array([chunk for one in found for chunk in one.chunks], found[0].type)
        return rows, values.take(pa.array(rows)) if len(rows) < count else values

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
        groups, rows_of = self._found.row_groups, self._found.counts
        if isinstance(weigher, ValueWeights):
            table = self._value_counts(weigher.column)
            weights, rows = weigher.weigh(-1, table["value"]), table["rows"].to_numpy()
            number = np.searchsorted(groups, table["group"].to_numpy())
            whole, rests = np.zeros(len(groups), np.int64), np.zeros(len(groups), np.int64)
            np.add.at(whole, number, rows * (weights >> 32))
            np.add.at(rests, number, rows * (weights & (ONE - 1)))
            return whole, rests.astype(np.uint64)

        if weigher.column.in_paths:
            weights = weigher.weigh(groups, weigher.column.values_of(groups))
            return rows_of * (weights >> 32), (rows_of * (weights & (ONE - 1))).astype(np.uint64)

        def total(group: int, parts: Parts) -> tuple[int, int]:
            _, weights = self._weighed(weigher, group, parts)
            return int((weights >> 32).sum()), int((weights & (ONE - 1)).sum())

        def totals(each: list[tuple[int, int]]) -> pa.Table:
            found = np.array(each, np.int64).reshape(-1, 2)
            return pa.table({"group": groups, "whole": found[:, 0], "rests": found[:, 1]})

        found = self._once("weights", weigher.column, total, totals)
        return found["whole"].to_numpy().astype(np.int64), found["rests"].to_numpy().astype(np.uint64)

    def _value_counts(self, column: ChosenColumn) -> pa.Table:
        """Return how many rows of each row group have which value of a column."""
        check_label("weights", column)
        if column.in_paths:
            groups, counts = self._found.row_groups, self._found.counts
            values = cast_exactly(column.values_of(groups), _plain(column))
            return self._checked(column, pa.table({"group": groups, "value": values, "rows": counts}))

        def count(group: int, parts: Parts) -> pa.Table:
            _, values = self._values(column, group, parts)
            try:
                found = pc.value_counts(cast_exactly(values, _plain(column)))
            except pa.ArrowException as error:
                raise UsageError(f"column {column.name!r}", first_line(error)) from error
            self._check_labels(column, len(found))
            groups, values, rows = np.full(len(found), group), found.field("values"), found.field("counts")
            return pa.table({"group": groups, "value": values, "rows": rows})

        def joined(each: list[pa.Table]) -> pa.Table:
            kinds = {"group": pa.int64(), "value": _plain(column), "rows": pa.int64()}
            return self._checked(column, pa.concat_tables([pa.schema(kinds).empty_table(), *each]).combine_chunks())

        return self._once("values", column, count, joined)

    def _checked(self, column: ChosenColumn, found: pa.Table) -> pa.Table:
        self._check_labels(column, len(pc.unique(found["value"])))
        return found

    def _check_labels(self, column: ChosenColumn, count: int) -> None:
        if count > _MOST_LABELS:
            reason = f"{column.name!r} has more than {_MOST_LABELS:,} values"
            raise UsageError("weights", reason, "write the weights into a column, and name that")

    def _once(
        self,
        what: str,
        column: ChosenColumn,
        use: Callable[[int, Parts], Found],
        join: Callable[[list[Found]], pa.Table],
    ) -> pa.Table:
        """Return what ``use`` finds in each row group, joined; it is found once."""
        name, groups = digest_of([what, column.path, self._found.name]), self._found.row_groups
        columns = self._columns(column)
        return count_once(
            self._data, name, groups, self._known, lambda: join(map_row_groups(self._data, columns, groups, use))
        )


def _start_of_constant(start: int, rest: int) -> int:
    """Return a start with which a sum whose rest is ``rest`` is always rounded to the same side, the nearer one."""
    if rest <= ONE - rest:
        return start * (ONE - rest) >> 32
    return ONE - rest + (start * rest >> 32)
