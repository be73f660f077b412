"""Weights by the value of a column: ``weights={"label": {0: 1.0, 1: 5.0}}``."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pqcache.errors import UsageError, first_line
from pqcache.filters.expression import number_against_text
from pqcache.parquet.schema_merge import cast_exactly, is_text, without_views
from pqcache.reader.selection.chosen_column import ChosenColumn
from pqcache.store.selected_rows import Ints

ONE = 1 << 32  # the unit of weights: one row
MOST = 1_000_000  # of a weight
BLOCK = 1 << 13  # rows weighed at once: what is made of them is in the processor's cache, and takes no fresh pages


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
    kind = _bare(column.type)
    known = pa.types.is_integer(kind) or pa.types.is_boolean(kind) or is_text(kind) or pa.types.is_decimal(kind)
    if not (known or (pa.types.is_temporal(kind) and not pa.types.is_interval(kind))):
        raise UsageError(option, f"{column.name!r} is {column.type}", "choose integers, booleans, text, dates or times")


def plain_values(values: pa.ChunkedArray | None, kind: pa.DataType) -> pa.ChunkedArray:
    """Return values of a column of type ``kind`` as that type without dictionaries; none of them for None."""
    bare = _bare(kind)
    if values is None:
        return pa.chunked_array([], bare)
    return cast_exactly(values, bare)


def _bare(kind: pa.DataType) -> pa.DataType:
    while isinstance(kind, pa.BaseExtensionType) or pa.types.is_dictionary(kind):
        kind = kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind.value_type
    return without_views(kind)


@dataclass(frozen=True)
class ValueWeights:
    """Weights by value; a `Weigher`. ``others`` are those of null, and of values that are not named; -1: an error."""

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
        kind = plain_values(None, column.type).type
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
    def columns(self) -> tuple[str, ...]:
        """The column, unless its values are in the paths."""
        return self.column.columns

    @property
    def fingerprint(self) -> str:
        """A name for the weights."""
        pairs = sorted((str(value), weight) for value, weight in zip(self.values, self.weights.tolist(), strict=True))
        text = json.dumps(["values", self.column.path, pairs, self.others])
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def weigh(self, group: int | Ints, values: pa.ChunkedArray) -> Ints:
        """Return the weights of rows; a value without one raises UsageError."""
        plain = plain_values(values, self.column.type)
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
