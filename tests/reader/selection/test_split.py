"""split=: a row is on one side for ever, by a hash that a few lines of Python can compute from the documentation."""

from __future__ import annotations

import datetime as dt
import struct
import warnings
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

import pqcache
from pqcache.errors import UsageError
from pqcache.reader.selection.split import key_hashes
from pqcache.torch import ParquetDataset, Split
from tests.examples import examples

EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.timezone.utc)
MICRO = dt.timedelta(microseconds=1)
NAN = float("nan")


def canonical(value: Any) -> bytes:
    """Return the canonical form of a value as docs/splits.md has it, one value at a time."""
    if value is None:
        return b""
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, bytes):
        return value
    if isinstance(value, dt.datetime):
        value = (value.replace(tzinfo=value.tzinfo or dt.timezone.utc) - EPOCH) // MICRO
    elif isinstance(value, dt.date):
        value = (value - EPOCH.date()) // MICRO
    elif isinstance(value, dt.time):
        value = dt.timedelta(0, value.hour * 3600 + value.minute * 60 + value.second, value.microsecond) // MICRO
    elif isinstance(value, dt.timedelta):
        value = value // MICRO
    if isinstance(value, float) and value != value:
        return bytes.fromhex("000000000000f87f")
    if not isinstance(value, float | Decimal) or (abs(value) < 2**65 and value == int(value)):
        number = int(value)
        if -(2**63) <= number < 2**64:
            return (number % 2**64).to_bytes(8, "little")
    return struct.pack("<d", float(value))


def slow_hash(value: Any, salt: str = "") -> int:
    return xxhash.xxh3_64_intdigest(canonical(value), xxhash.xxh3_64_intdigest(salt.encode()) if salt else 0)


SECOND = dt.datetime(2026, 11, 1, 12, 30, 5)
MANY: list[tuple[pa.DataType, list[Any]]] = [
    *((kind, [None, 0, 1, 100, 127]) for kind in (pa.int8(), pa.uint8(), pa.int16(), pa.uint16(), pa.uint32())),
    (pa.int32(), [None, -(2**31), -1, 0, 2**31 - 1]),
    (pa.int64(), [None, -(2**63), -1, 0, 2**63 - 1]),
    (pa.uint64(), [None, 0, 1, 2**63, 2**64 - 1]),
    (pa.bool_(), [None, True, False]),
    (pa.float32(), [None, 0.0, -0.0, 1.0, 0.5, NAN, float("inf"), 3e38]),
    (
        pa.float64(),
        [None, 0.0, -0.0, -7.0, 0.1, NAN, -NAN, float("-inf"), 2.0**62, 2.0**63, 1.8e19, 2.0**64, -(2.0**63), 1e300],
    ),
    (pa.decimal128(38, 0), [None, Decimal(-3), Decimal(0), Decimal(2**63), Decimal(10**30)]),
    (pa.decimal128(9, 2), [None, Decimal("1.00"), Decimal("-2.00"), Decimal("0.00")]),
    (pa.decimal128(9, 4), [None, Decimal("1.0000"), Decimal("0.5000"), Decimal("-0.1000")]),
    (pa.decimal256(60, 1), [None, Decimal("1.0"), Decimal(10**40)]),
    (pa.string(), [None, "", "a", "ü%", "x" * 300]),
    (pa.large_string(), [None, "", "a"]),
    (pa.string_view(), [None, "", "a", "y" * 40]),
    (pa.dictionary(pa.int8(), pa.string()), [None, "kr", "jp", "kr"]),
    (pa.binary(), [None, b"", b"a", b"\xff" * 20]),
    (pa.binary(4), [None, b"abcd", b"\0\0\0\0"]),
    (pa.date32(), [None, dt.date(1970, 1, 1), dt.date(1950, 5, 5), dt.date(9999, 12, 31)]),
    (pa.date64(), [None, dt.date(2026, 11, 1)]),
    *((pa.timestamp(unit), [None, SECOND, dt.datetime(1969, 12, 31, 23, 59, 59)]) for unit in ("s", "ms", "us", "ns")),
    (pa.timestamp("ns", "Europe/Berlin"), [None, SECOND.replace(tzinfo=dt.timezone.utc)]),
    (pa.time32("ms"), [None, dt.time(1, 2, 3, 4000)]),
    (pa.time64("ns"), [None, dt.time(1, 2, 3, 4)]),
    (pa.duration("s"), [None, dt.timedelta(days=-2)]),
]


@pytest.mark.parametrize(("kind", "values"), MANY, ids=[str(kind) for kind, _ in MANY])
def test_hashes_are_those_of_the_documented_form(kind: pa.DataType, values: list[Any]) -> None:
    array = pa.array(values, kind)
    values = values if pa.types.is_temporal(kind) else array.to_pylist()
    assert key_hashes(array).tolist() == [slow_hash(value) for value in values]
    assert key_hashes(pa.chunked_array([array.slice(1), array]), 5).tolist() == [
        xxhash.xxh3_64_intdigest(canonical(value), 5) for value in [*values[1:], *values]
    ]


@settings(max_examples=examples(30))
@given(st.lists(st.one_of(st.none(), st.binary(max_size=20), st.binary(max_size=300))), st.integers(0, 2**64 - 1))
def test_bytes_are_hashed_as_the_package_hashes_them(values: list[bytes | None], seed: int) -> None:
    expected = [xxhash.xxh3_64_intdigest(value or b"", seed) for value in values]
    for kind in (pa.binary(), pa.large_binary(), pa.binary_view()):
        assert key_hashes(pa.array([b"x", *values, None], kind).slice(1, len(values)), seed).tolist() == expected


def write(root: Path, users: list[Any], *, group: int = 40, files: int = 3, kind: pa.DataType | None = None) -> Path:
    """Write rows of users, with ids in the order of the files, into ``files`` partitions."""
    each = -(-len(users) // files)
    for number in range(files):
        part = users[number * each : (number + 1) * each]
        ids = np.arange(number * each, number * each + len(part))
        user = pa.array(part, kind)
        nested = pa.StructArray.from_arrays([user], ["id"], mask=pa.array(ids % 11 == 0))
        (root / f"dt={number}").mkdir(parents=True)
        table = pa.table({"id": ids, "user": user, "who": nested, "x": ids % 7})
        pq.write_table(table, root / f"dt={number}" / "a.parquet", row_group_size=group)
    return root


def ids_of(batches: Any) -> list[int]:
    return [i for batch in batches for i in np.asarray(batch["id"]).tolist()]


USERS = [None if i % 13 == 0 else f"user {i * 7919 % 60}" for i in range(500)]


@pytest.fixture(scope="module")
def events(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("events"), USERS)


def test_parts_of_every_key_are_disjoint_and_complete(events: Path) -> None:
    for key in ("user", "who.id", "id", "dt", None):
        folds = Split.folds(key, 3, salt="a")
        parts = [ids_of(ParquetDataset(events, ["id"], split=fold)) for fold in folds if len(folds)]
        assert sorted(i for part in parts for i in part) == list(range(500)), key
        train = ids_of(ParquetDataset(events, ["id"], split=folds[1].complement()))
        assert sorted([*train, *parts[1]]) == list(range(500)), key
        assert folds[1].complement().complement() == folds[1]


def test_a_key_is_in_one_part_whatever_the_layout_and_the_type(tmp_path: Path) -> None:
    users = [i * 7919 % 50 for i in range(300)]
    split, wanted = Split("user", 0.25, 0.75), None
    for number, (group, files, kind) in enumerate([(40, 3, pa.int32()), (7, 1, pa.int64()), (300, 2, pa.float64())]):
        root = write(tmp_path / str(number), users, group=group, files=files, kind=kind)
        found = sorted(ids_of(ParquetDataset(root, ["id"], split=split)))
        assert wanted in (None, found)
        wanted = found
    assert wanted
    root = write(tmp_path / "drift", users[:200], kind=pa.int32())
    (root / "dt=9").mkdir()
    pq.write_table(
        pa.table({"id": range(200, 300), "user": pa.array(users[200:], pa.int64())}), root / "dt=9/b.parquet"
    )
    assert sorted(ids_of(ParquetDataset(root, ["id"], split=split))) == wanted


def test_partition_keys_and_rows_without_key_are_counted_without_reading(events: Path, tmp_path: Path) -> None:
    pqcache.sync(events, tmp_path / "cache")
    for file in (tmp_path / "cache").rglob("*.parquet"):
        file.unlink()
    for split in (Split("dt", 0.0, 0.4), Split(None, 0.0, 0.4)):
        halves = split, split.complement()
        parts = [ParquetDataset(tmp_path / "cache", ["id"], split=half, batch_size=1) for half in halves]
        assert sum(map(len, parts)) == 500


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Split("user", 0.5, 0.5), "low must be less than high"),
        (lambda: Split("user", 0, NAN), "high=nan"),
        (lambda: Split(3, 0.0, 0.5), "name one column"),  # type: ignore[arg-type]
        (lambda: Split("user", 0.0, 0.5, salt=1), "salt=1: give text"),  # type: ignore[arg-type]
        (lambda: Split("user").complement(), "its complement has none"),
        (lambda: Split.folds("user", 1), "at least 2"),
    ],
)
def test_splits_that_make_no_sense_are_refused(make: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make()


def test_keys_that_cannot_be_hashed_are_refused_by_name(events: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="split: no column 'nobody'; there are: id, user, who, x, dt"):
        ParquetDataset(events, split=Split("nobody", 0.0, 0.5))
    with pytest.raises(UsageError, match=r"'who'.*it is struct"):
        ParquetDataset(events, split=Split("who", 0.0, 0.5))
    with pytest.raises(UsageError, match="give a Split"):
        ParquetDataset(events, split=0.5)  # type: ignore[arg-type]
    pq.write_table(pa.table({"tokens": [[1], [2]]}), tmp_path / "a.parquet")
    with pytest.raises(UsageError, match=r"'tokens'.*it is list"):
        ParquetDataset(tmp_path, split=Split("tokens", 0.0, 0.5))


def test_a_part_without_rows_warns(tmp_path: Path) -> None:
    root = write(tmp_path, ["one"] * 20, files=1)
    at = slow_hash("one") / 2**64
    empty = Split("user", 0.0, at / 2) if at > 0.5 else Split("user", (1 + at) / 2, 1.0)
    with pytest.warns(UserWarning, match="no row is left by split"):
        assert len(ParquetDataset(root, split=empty)) == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(ParquetDataset(root, split=empty.complement(), nulls="mask")) == 1
