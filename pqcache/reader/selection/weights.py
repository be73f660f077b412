"""``weights=`` and ``balance=``: how often each row comes in an epoch.

A row of weight w comes floor(w) times, and once more with the probability of the fraction of w. Systematic sampling
decides which rows come once more: the fractions of all rows are laid end to end, in random order within each row group,
and from a random start on every whole number chooses the row it falls into. So each row has exactly its probability, no
row is chosen twice, and the number of rows from a row group follows from the sum of its weights, without reading
anything. Weights are whole numbers of 2^-32.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import cached_property, partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pqcache.errors import ParquetError, UsageError, first_line
from pqcache.filters.expression import number_against_text
from pqcache.parquet.arrow import is_text, without_views
from pqcache.parquet.schema import cast_exactly
from pqcache.reader.columns import storage_type
from pqcache.reader.order import Ints, random_words, scatter_order
from pqcache.reader.selection.selection import (
    Chosen,
    ChosenColumn,
    Counts,
    Positions,
    Selection,
    digest_of,
)
from pqcache.units import is_number

ONE = 1 << 32  # the unit of weights: one row
MOST = 1_000_000  # of a weight
_WEIGHTS = 4  # what a random stream is for, after those of the order and of mixes
_LANE = (1 << 64) - 1  # no lane of an order, so that its streams are others
_BITS, _REST = np.uint64(32), np.uint64(ONE - 1)
_MOST_LABELS = 100_000


def check_weights(weights: Any, balance: Any) -> None:
    """Check what doesn't need the dataset; names and values are checked when used."""
    if weights is not None and balance is not None:
        raise UsageError("weights and balance", "both set how often rows come", "choose one of them")
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


def _fixed_point(weights: Any) -> Ints:
    """Weights in units of 2^-32."""
    return np.rint(np.asarray(weights, np.float64) * ONE).astype(np.int64)


def _check_label(option: str, column: ChosenColumn) -> None:
    kind = _plain(column)
    known = pa.types.is_integer(kind) or pa.types.is_boolean(kind) or is_text(kind) or pa.types.is_decimal(kind)
    if not (known or (pa.types.is_temporal(kind) and not pa.types.is_interval(kind))):
        raise UsageError(option, f"{column.name!r} is {column.type}", "choose integers, booleans, text, dates or times")


def _check_label_count(column: ChosenColumn, count: int) -> None:
    if count > _MOST_LABELS:
        reason = f"{column.name!r} has more than {_MOST_LABELS:,} values"
        raise UsageError("weights", reason, "write the weights into a column, and name that")


def _plain(column: ChosenColumn) -> pa.DataType:
    return without_views(storage_type(column.type))


@dataclass(frozen=True)
class ColumnWeights:
    """Weights from a column."""

    column: ChosenColumn

    @property
    def name(self) -> str:
        """Equal for equal weights only."""
        return digest_of(["weights", self.column.path])

    def weigh(self, group: int | Ints, values: pa.ChunkedArray) -> Ints:
        """The weights of rows, all from one row group or one from each; invalid ones raise ParquetError."""
        numbers = values.cast(pa.float64()).to_numpy()
        if len(numbers) and not (numbers.min() >= 0 and numbers.max() <= MOST):  # which NaN is not either
            data, row = self.column.data, int(np.flatnonzero(~((numbers >= 0) & (numbers <= MOST)))[0])
            group = int(np.broadcast_to(group, len(numbers))[row])
            raise ParquetError(
                data.path_of(group),
                f"row group {int(data.index.numbers('row_group')[group])} has the weight {values[row].as_py()} "
                f"in column {self.column.name!r}",
                f"weights are numbers from 0 to {MOST:,}: leave such rows out with filters=, or write others",
            )
        return _fixed_point(numbers)


@dataclass(frozen=True)
class ValueWeights:
    """Weights by value. ``others`` is the weight of nulls and unlisted values; -1 makes these an error."""

    column: ChosenColumn
    values: pa.Array
    weights: Ints
    others: tuple[int, int] = (-1, -1)

    @property
    def name(self) -> str:
        """Equal for equal weights only."""
        pairs = sorted((str(value), weight) for value, weight in zip(self.values, self.weights.tolist(), strict=True))
        return digest_of(["values", self.column.path, pairs, self.others])

    def weigh(self, group: int | Ints, values: pa.ChunkedArray) -> Ints:
        """The weights of rows; UsageError for a value without one."""
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
                f"give it one, or give one to all others with ...: {{{value!r}: 1.0, ...: 1.0}}",
            )
        return np.asarray(found, np.int64)


Weigher = ColumnWeights | ValueWeights


def _column_weights(column: ChosenColumn) -> ColumnWeights:
    kind = column.type
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)):
        advice = "name a column of numbers, or give weights by value"
        raise UsageError(f"weights={column.name!r}", f"it is {kind}", advice)
    return ColumnWeights(column)


def _value_weights(column: ChosenColumn, by_value: Mapping[Any, Any]) -> ValueWeights:
    _check_label("weights", column)
    for value, weight in by_value.items():
        if not is_number(weight) or math.isnan(weight) or not 0 <= weight <= MOST:
            raise UsageError("weights", f"{value!r} has the weight {weight!r}", f"give a number from 0 to {MOST:,}")
    named = {value: weight for value, weight in by_value.items() if value is not None and value is not ...}
    kind = _plain(column)
    plain = [value.item() if isinstance(value, np.generic) else value for value in named]
    odd = next((v for v in plain if isinstance(v, bool | int | float | Decimal)), None)
    if odd is not None and is_text(kind):
        as_text = '{{"{name}": {{"{value}": ' + f"{by_value[odd]!r}" + "}}}}"
        raise number_against_text(str(odd), column.operand, as_text).within("weights")
    try:
        values = pa.array(plain, kind)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        reason = f"not all are values of {column.name!r}, which is {kind}"
        raise UsageError("weights", reason, first_line(error)) from error
    if odd is not None and (pa.types.is_temporal(kind) or values.to_pylist() != plain):
        raise UsageError("weights", f"{odd!r} is not a value of {column.name!r}, which is {kind}")
    of_null, of_others = (int(_fixed_point(by_value[key])) if key in by_value else -1 for key in (None, ...))
    return ValueWeights(column, values, _fixed_point(list(named.values())), (of_null, of_others))


class RowWeights:
    """How often the rows of a selection come in each epoch, by ``weights=`` or ``balance=``."""

    def __init__(self, found: Selection, weights: Any, balance: str | None, known: Counts | None) -> None:
        self._found, self._data, self._weights, self._balance = found, found.data, weights, balance
        self._known: Counts = {} if known is None else known
        if not callable(weights):
            self._weigher(0)  # refuses what makes no sense

    def name(self, epoch: int) -> str:
        weigher = self._weigher(epoch)
        return "equal" if weigher is None else weigher.name

    def at(self, epoch: int, seed: int, constant: bool = False) -> Selection:
        """The rows of an epoch, each as often as it comes.

        With ``constant``, all epochs have the same number of rows: at most one more or less than the weights alone
        would give.
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

        def arrange(group: int, chosen: Chosen) -> Positions:
            rows, weights = _weighed(weigher, group, chosen)
            times, rests = weights >> 32, np.asarray(weights, "<i8").view("<u4")[::2]
            if rests.any():
                order = scatter_order(len(rests), seed, epoch, _LANE, group)
                added, once_more = rests[order], np.empty(len(order), np.bool_)
                ends = np.cumsum(added, dtype=np.uint32)
                ends += np.uint32(starts[np.searchsorted(found.row_groups, group)])
                once_more[order] = ends < added  # the sum of 32 bits overflowed: a whole number was passed
                times += once_more
            return Positions(np.repeat(rows, times))

        return replace(
            found.looking_at(weigher.column.columns),
            counts=whole + ((starts + rests) >> _BITS).astype(np.int64),
            arrange=arrange,
            name=digest_of([found.name, weigher.name, seed, epoch]),
        )

    def _weigher(self, epoch: int) -> Weigher | None:
        """None if all rows weigh the same in this epoch."""
        if self._balance is not None:
            return self._balanced
        given = self._weights
        if callable(given):
            given = given(epoch)
            if given is None:
                return None
            _check_given(given, f"weights({epoch}), which is {given!r}")
        if isinstance(given, str):
            return _column_weights(ChosenColumn(self._data, given, "weights"))
        ((name, by_value),) = given.items()
        return _value_weights(ChosenColumn(self._data, name, "weights"), by_value)

    @cached_property
    def _balanced(self) -> Weigher | None:
        name = str(self._balance)
        column = ChosenColumn(self._data, name, "balance")
        _check_label(f"balance={name!r}", column)
        found = self._values(column).group_by("value").aggregate([("rows", "sum")])
        if found["value"].null_count:
            rows = found.filter(pc.is_null(found["value"]))["rows_sum"][0].as_py()
            raise UsageError(f"balance={name!r}", f"it is null in {rows:,} rows", "leave them out with filters=")
        rows = found["rows_sum"].to_numpy().astype(float)
        if not len(rows):
            return None
        return ValueWeights(column, found["value"].combine_chunks(), _fixed_point(rows.sum() / len(rows) / rows))

    def _totals(self, weigher: Weigher) -> tuple[Ints, Any]:
        """The sums of the integer parts and of the fractions of the weights in each row group."""
        groups, column = self._found.row_groups, weigher.column
        if isinstance(weigher, ValueWeights):
            table = self._values(column)
            weights, rows = weigher.weigh(-1, table["value"]), table["rows"].to_numpy()
            number = np.searchsorted(groups, table["group"].to_numpy())
            whole, rests = np.zeros(len(groups), np.int64), np.zeros(len(groups), np.int64)
            np.add.at(whole, number, rows * (weights >> 32))
            np.add.at(rests, number, rows * (weights & (ONE - 1)))
            return whole, rests.astype(np.uint64)
        if column.in_paths:
            weights = weigher.weigh(groups, column.values_of(groups))
            return self._found.counts * (weights >> 32), (self._found.counts * (weights & (ONE - 1))).astype(np.uint64)

        def total(group: int, chosen: Chosen) -> list[Any]:
            _, weights = _weighed(weigher, group, chosen)
            return [[(weights >> 32).sum()], [(weights & (ONE - 1)).sum()]]

        table = self._counted("weights", column, {"whole": pa.int64(), "rests": pa.int64()}, total)
        return table["whole"].to_numpy().astype(np.int64), table["rests"].to_numpy().astype(np.uint64)

    def _values(self, column: ChosenColumn) -> pa.Table:
        """How many rows of each row group have each value of a column."""
        _check_label("weights", column)
        groups, kind = self._found.row_groups, _plain(column)
        if column.in_paths:
            values = cast_exactly(column.values_of(groups), kind)
            table = pa.table({"group": groups, "value": values, "rows": self._found.counts})
        else:
            table = self._counted("values", column, {"value": kind, "rows": pa.int64()}, partial(_value_counts, column))
        _check_label_count(column, len(pc.unique(table["value"])))
        return table

    def _counted(
        self, what: str, column: ChosenColumn, kinds: dict[str, pa.DataType], count: Callable[[int, Chosen], list[Any]]
    ) -> pa.Table:
        name = digest_of([what, column.path, self._found.name])
        return self._found.looking_at(column.columns).count_by_group(name, kinds, count, self._known)


def _value_counts(column: ChosenColumn, group: int, chosen: Chosen) -> list[Any]:
    """The values of a column in a row group, and how many rows have each."""
    found: pa.Table = None
    for _, rows, part in chosen:
        try:
            counts = pc.value_counts(cast_exactly(column.values(group, part, rows), _plain(column)))
        except pa.ArrowException as error:
            raise UsageError(f"column {column.name!r}", first_line(error)) from error
        of_part = pa.table(counts.flatten(), names=["value", "rows"])
        if found is not None:  # a usual row group has one part
            both = pa.concat_tables([found, of_part])
            of_part = both.group_by("value").aggregate([("rows", "sum")]).rename_columns(["value", "rows"])
        found = of_part
        _check_label_count(column, len(found))
    return [counts.combine_chunks() for counts in found.columns]


def _weighed(weigher: Weigher, group: int, chosen: Chosen) -> tuple[Ints, Ints]:
    rows, weights = [], []
    for first, some, part in chosen:
        rows.append(first + some)
        weights.append(weigher.weigh(group, weigher.column.values(group, part, some)))
    return np.concatenate(rows), np.concatenate(weights)


def _start_of_constant(start: int, rest: int) -> int:
    """A start from which a sum with this ``rest`` is always rounded to the nearest whole number."""
    if rest <= ONE - rest:
        return start * (ONE - rest) >> 32
    return ONE - rest + (start * rest >> 32)
