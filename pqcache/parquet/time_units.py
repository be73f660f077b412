"""The unit of a column's times in a cache, which new files don't change."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.types as pt

from pqcache.errors import ParquetError, UsageError
from pqcache.parquet.nested import leaves_in, with_changed_types, with_types_like

UNITS = ("s", "ms", "us", "ns")


@dataclass(frozen=True, kw_only=True)
class TimeUnits:
    """Units that do not change: ``chosen`` for the columns it names, the schema ``before`` for the others."""

    before: pa.Schema = field(default_factory=lambda: pa.schema([]))
    chosen: Mapping[str, str] = field(default_factory=dict)

    def of(self, files: pa.Schema) -> pa.Schema:
        """Apply the fixed units; UsageError if one is chosen for a column that isn't a time."""
        for name, unit in self.chosen.items():
            kind = files.field(name).type if name in files.names else None
            if kind is None or not any(map(_unit_of, leaves_in(kind))):
                reason = f"there is no column {name!r}" if kind is None else f"column {name!r} is {kind}, not a time"
                raise UsageError(f"--time-units {name}={unit}", reason, "name a column of times")

        def fix(kind: pa.DataType, fixed: pa.DataType) -> pa.DataType:
            unit = _unit_of(fixed)
            return _in_unit(kind, unit) if _unit_of(kind) and unit else kind

        return pa.schema([f.with_type(with_types_like(f.type, self._fixed(f), fix)) for f in files], files.metadata)

    def check(self, path: str, file: pa.Schema, int96: Callable[[], Collection[str]]) -> None:
        """Raise ParquetError where a file has times in a finer unit than before, and none is chosen.

        Columns of INT96, which ``int96`` returns, have no unit: they are read in any that holds their values.
        """
        finer: dict[str, tuple[str, str]] = {}
        for column in file:
            if column.name not in self.chosen:
                for here, there in _pairs_of_units(column.type, self._fixed(column)):
                    if UNITS.index(here) > UNITS.index(there):
                        finer[column.name] = here, there
        if finer and (names := [name for name in finer if name not in int96()]):
            kind, (here, there) = file.field(names[0]).type, finer[names[0]]
            change, keep = (",".join(f"{name}={finer[name][which]}" for name in names) for which in (0, 1))
            raise ParquetError(
                path,
                f"column {names[0]!r} is {kind}, and {here} is finer than the unit {there} of its times so far",
                f"--time-units {keep} keeps the unit if the values fit, --time-units {change} changes it, also in "
                "tensors, and --skip-bad publishes the rest",
            )

    def _fixed(self, column: pa.Field) -> pa.DataType:
        if column.name in self.chosen:
            return _all_in_unit(column.type, self.chosen[column.name])
        return self.before.field(column.name).type if column.name in self.before.names else column.type


def changed_units(before: pa.Schema, now: pa.Schema) -> list[str]:
    changed: dict[str, str] = {}
    for column in now:
        was = before.field(column.name).type if column.name in before.names else column.type
        for here, there in _pairs_of_units(column.type, was):
            if here != there:
                changed[column.name] = (
                    f"the times of column {column.name!r} were in {there} and are in {here} from now on"
                )
    return list(changed.values())


def _pairs_of_units(kind: pa.DataType, other: pa.DataType) -> list[tuple[str, str]]:
    """Units of the times in both types, each with the other's."""
    pairs: list[tuple[str, str]] = []

    def compare(here: pa.DataType, there: pa.DataType) -> pa.DataType:
        unit, unit_there = _unit_of(here), _unit_of(there)
        if unit and unit_there:
            pairs.append((unit, unit_there))
        return here

    with_types_like(kind, other, compare)
    return pairs


def _unit_of(kind: pa.DataType) -> str | None:
    """None for types other than times."""
    is_time = pt.is_timestamp(kind) or pt.is_time(kind) or pt.is_duration(kind)
    return str(kind.unit) if is_time else None


def _in_unit(kind: pa.DataType, unit: str) -> pa.DataType:
    if pt.is_timestamp(kind):
        return pa.timestamp(unit, kind.tz)
    if pt.is_duration(kind):
        return pa.duration(unit)
    return pa.time32(unit) if unit in ("s", "ms") else pa.time64(unit)


def _all_in_unit(kind: pa.DataType, unit: str) -> pa.DataType:
    if pt.is_nested(kind):
        return with_changed_types(kind, lambda inner: _all_in_unit(inner, unit))
    return kind if _unit_of(kind) is None else _in_unit(kind, unit)
