"""Options that choose rows, and which rows of a source an epoch with them has, found without pqcache."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import pyarrow.compute as pc
import xxhash

from pqcache import SelectedRows, Split
from tests.epoch.tables import Source, every_kind

Values = dict[str, Any]  # of a row, by column
Times = Counter[int]  # how often each row comes, by its number


@dataclass(frozen=True)
class Case:
    """Options, and the rows that an epoch has: all of ``columns``, or of all columns.

    ``is_kept`` says it of a row by its values, ``numbers`` of all by their numbers, and ``check`` of those that have
    come in an epoch, where they are drawn.
    """

    options: dict[str, Any] = field(default_factory=dict)
    columns: list[str] | None = None
    is_kept: Callable[[Values], bool] | None = None
    numbers: Callable[[Source], Iterable[int]] | None = None
    check: Callable[[Source, Times], None] | None = None
    needs: tuple[str, ...] = ()  # columns that `is_kept` looks at
    make: Callable[[Source], dict[str, Any]] | None = None  # options that depend on the source

    def options_for(self, source: Source) -> dict[str, Any]:
        """Return the options for a source."""
        return self.options if self.make is None else {**self.options, **self.make(source)}

    def chosen(self, source: Source) -> list[int] | None:
        """Return the numbers of an epoch's rows, each as often as it comes; None where they are drawn."""
        if self.check is not None:
            return None
        if self.numbers is not None:
            return list(self.numbers(source))
        if self.is_kept is None:
            return list(range(len(source.rows)))
        return [number for number, row in enumerate(values(source, *self.needs)) if self.is_kept(row)]


def values(source: Source, *columns: str) -> list[Values]:
    """Return some columns of all rows."""
    found: list[Values] = source.rows.select(list(columns)).to_pylist()
    return found


SOME = [3, 40, 41, 77, 130, 179, 200, 299, 300]  # rows by their numbers


def some_rows(source: Source) -> dict[str, Any]:
    """Select some rows by their places."""
    places = [
        (group, number - rows.start) for number in SOME for group, rows in enumerate(source.groups) if number in rows
    ]
    groups, rows = zip(*places, strict=True)
    snapshot = source.root.name if source.root != source.path else ""
    return {"rows": SelectedRows.of(groups=groups, rows=rows, snapshot=snapshot)}


def share(data: bytes, seed: int = 0) -> Fraction:
    """Return the hash of a key as docs/splits.md has it, from 0 to 1."""
    return Fraction(xxhash.xxh3_64_intdigest(data, seed), 2**64)


def of_id(row: Values) -> Fraction:
    """Return the share of the split by ``id``."""
    return share(row["id"].to_bytes(8, "little"))


def of_single_rows(source: Source) -> list[int]:
    """Return the rows of ``Split(None, 0.0, 0.4)``, by their file and their number in it."""
    found, first = [], 0
    for file in source.files:
        seed = xxhash.xxh3_64_intdigest(file.relative_to(source.root).as_posix().encode(), 0)
        count = sum(source.groups_of(file))
        found += [first + n for n in range(count) if share(n.to_bytes(8, "little"), seed) < Fraction(4, 10)]
        first += count
    return found


def check_sample(source: Source, times: Times) -> None:
    """Check a sample of three rows of ten, each once."""
    assert times.total() == round(0.3 * len(source.rows))
    assert set(times.values()) == {1}


def check_weights(weight: Callable[[Values], float], *columns: str) -> Callable[[Source, Times], None]:
    """Check that each row came as often as its weight, rounded down or up, and all as often as all weights."""

    def check(source: Source, times: Times) -> None:
        weights = [weight(row) for row in values(source, *columns)]
        for number, wanted in enumerate(weights):
            assert math.floor(wanted) <= times[number] <= math.ceil(wanted), (number, wanted, times[number])
        assert abs(times.total() - sum(weights)) < 1

    return check


def check_balance(source: Source, times: Times) -> None:
    """Check that all labels came equally often, in an epoch of as many rows as there are."""
    rows = values(source, "label")
    labels = Counter(row["label"] for row in rows)
    check_weights(lambda row: len(rows) / (len(labels) * labels[row["label"]]), "label")(source, times)
    found = Counter(rows[number]["label"] for number in times.elements())
    assert all(abs(count - len(rows) / len(labels)) <= len(source.groups) for count in found.values())


BY_LABEL = {0: 0.25, 1: 2.0, ...: 1.5}
NAMES = every_kind(100, 1, 1).column_names
THIRDS = [["id", *NAMES[1 + first :: 3], "day", "hour"] for first in range(3)]

CASES: dict[str, Case] = {
    "all rows": Case(),
    "one lane in order": Case({"shuffle": False}),
    "partition columns alone": Case(columns=["day", "hour"]),
    "one partition column": Case({"filters": "hour = 8"}, ["day"], lambda row: row["hour"] == 8, needs=("hour",)),
    "one nested column": Case(columns=["list of struct"]),
    "columns in another order": Case(columns=["hour", "tensor", "dictionary", "id", "string_view"]),
    "few rows, by a column that is read": Case(
        {"filters": "id in (100, 177, 395)"}, None, lambda row: row["id"] in (100, 177, 395), needs=("id",)
    ),
    "few rows, by a column that is not read": Case(
        {"filters": [("string null", "in", ["row 101", "row 244", "row 400"])]},
        ["float", "list null", "day"],
        lambda row: row["id"] in (101, 244, 400),
        needs=("id",),
    ),
    "most rows, by SQL": Case(
        {"filters": "(label in (0, 1) and double < 40) or hour is null"},
        None,
        lambda row: (row["label"] in (0, 1) and row["double"] < 40) or row["hour"] is None,
        needs=("label", "double", "hour"),
    ),
    "most rows, by an expression": Case(
        {"filters": (pc.field("double null") < 38) | (pc.field("bool"))},
        ["user", "string", "struct null"],
        lambda row: row["bool"] or (row["double null"] is not None and row["double null"] < 38),
        needs=("double null", "bool"),
    ),
    "partitions": Case(
        {"filters": "day >= '2026-11-02' and hour is not null"},
        THIRDS[2],
        lambda row: row["day"] >= "2026-11-02" and row["hour"] is not None,
        needs=("day", "hour"),
    ),
    "a field of a struct": Case(
        {"filters": "struct.a >= 200 and struct.b.c != '300'"},
        THIRDS[0],
        lambda row: 200 <= row["id"] != 300,
        needs=("id",),
    ),
    "rows by their places": Case(columns=THIRDS[1], numbers=lambda _: SOME, make=some_rows),
    "rows by their places and a filter": Case(
        {"filters": "label > 0"},
        THIRDS[1],
        numbers=lambda source: [n for n in SOME if values(source, "label")[n]["label"] > 0],
        make=some_rows,
    ),
    "a split by a key": Case(
        {"split": Split("id", 0.2, 0.7)},
        THIRDS[0],
        lambda row: Fraction(0.2) <= of_id(row) < Fraction(0.7),
        needs=("id",),
    ),
    "the rest of a split": Case(
        {"split": Split("user", 0.0, 0.4).complement()},
        THIRDS[2],
        lambda row: share(row["user"].encode()) >= Fraction(0.4),
        needs=("user",),
    ),
    "a split of single rows": Case({"split": Split(None, 0.0, 0.4)}, THIRDS[0], numbers=of_single_rows),
    "a sample": Case({"sample": 0.3}, THIRDS[1], check=check_sample),
    "a limit": Case({"limit": 130}, THIRDS[2], numbers=lambda _: range(130)),
    "a limit of filtered rows": Case(
        {"limit": 40, "filters": "label = 2"},
        THIRDS[1],
        numbers=lambda source: [n for n, row in enumerate(values(source, "label")) if row["label"] == 2][:40],
    ),
    "weights of a column": Case({"weights": "weight"}, check=check_weights(lambda row: row["weight"], "weight")),
    "weights by value": Case(
        {"weights": {"label": BY_LABEL}},
        THIRDS[2],
        check=check_weights(lambda row: BY_LABEL.get(row["label"], BY_LABEL[...]), "label"),
    ),
    "balance": Case({"balance": "label"}, THIRDS[0], check=check_balance),
    "weights of filtered rows": Case(
        {"weights": {"label": {0: 3.0, ...: 0.5}}, "filters": "id < 250"},
        ["id", "list items null", "uuid"],
        check=check_weights(lambda row: (3 if row["label"] == 0 else 0.5) * (row["id"] < 250), "label", "id"),
    ),
    "a window of one and lanes": Case({"window": 1, "lanes": 5, "seed": 9}, THIRDS[1]),
    "a window of all": Case({"window": 100, "lanes": 2}, THIRDS[2]),
    "batches of one row": Case({"batch_size": 1}, ["id", "list", "struct", "day", "string null", "map"]),
    "batches of seven rows": Case({"batch_size": 7}, THIRDS[0]),
    "one batch": Case({"batch_size": 1000}),
    "the last batch is left out": Case({"batch_size": 64, "drop_last": True}, THIRDS[1]),
    "little memory": Case({"memory": "3MB", "lanes": 3}),
}
