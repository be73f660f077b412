"""Sequences against a brute-force generator: which there are, each once, with every type, in any topology."""

from __future__ import annotations

import datetime as dt
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pqcache
from pqcache.errors import ParquetError, UsageError
from pqcache.reader.epoch_options import RowOptions
from pqcache.reader.memory_budget import sizes_of
from pqcache.reader.open_dataset import open_local_dataset
from pqcache.reader.read_plan import make_read_plan
from pqcache.torch import ParquetDataset, Sequence
from tests.examples import examples


@pytest.fixture(autouse=True)
def _no_warnings_of_ours() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This DataLoader will create")
        warnings.filterwarnings("ignore", ".*so there are no batches")
        yield


def brute_force(rows: list[dict[str, Any]], spec: Sequence, group: int) -> list[list[int]]:
    """Return the ids of each sequence of a file whose row groups have ``group`` rows, by looking at every row."""
    found = []
    for first in range(0, len(rows), group):
        of_group = [row for row in rows[first : first + group] if row.get("kept", True)]
        named = [spec.order_by, *spec.groups]
        of_group = [row for row in of_group if all(row[name] is not None and row[name] == row[name] for name in named)]
        groups: dict[Any, list[dict[str, Any]]] = {}
        for row in of_group:
            groups.setdefault(tuple(row[name] for name in spec.groups), []).append(row)
        for members in groups.values():
            runs: list[list[dict[str, Any]]] = []
            for row in sorted(members, key=lambda row: row[spec.order_by]):
                if runs and (spec.max_gap is None or row[spec.order_by] - runs[-1][-1][spec.order_by] <= spec.max_gap):
                    runs[-1].append(row)
                else:
                    runs.append([row])
            for run in runs:
                starts = range(0, len(run) - spec.length + 1, spec.stride)
                found += [[row["id"] for row in run[start : start + spec.length]] for start in starts]
    return found


def ids_of(batches: Any) -> list[list[int]]:
    return [ids for batch in batches for ids in batch["id"].tolist()]


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sequence")


ROWS = st.lists(
    st.tuples(
        st.one_of(st.none(), st.integers(-20, 20)),
        st.sampled_from(["a", "b", "ccc", None]),
        st.integers(0, 1),
        st.booleans(),
    ),
    min_size=1,
    max_size=80,
)


@settings(max_examples=examples(90), deadline=None)
@given(
    rows=ROWS,
    ordered=st.booleans(),
    length=st.integers(1, 5),
    stride=st.integers(1, 6),
    gap=st.sampled_from([None, 0, 1, 3, 1.5]),
    group_by=st.sampled_from([None, "log", ("log",), ("log", "camera")]),
    kind=st.sampled_from([pa.int64(), pa.int8(), pa.float64()]),
    group=st.sampled_from([1, 7, 25, 100]),
    filtered=st.booleans(),
    shuffle=st.booleans(),
)
def test_every_sequence_once(scratch: Path, rows: Any, ordered: bool, kind: pa.DataType, **how: Any) -> None:
    names = ("ts", "log", "camera", "kept")
    found = [dict(zip(names, row, strict=True)) for row in rows]
    if ordered:
        found.sort(key=lambda row: (row["log"] or "", row["camera"], row["ts"] or 0))
    for number, row in enumerate(found):
        row["id"] = number
    spec = Sequence(how["length"], "ts", max_gap=how["gap"], group_by=how["group_by"], stride=how["stride"])
    table = pa.Table.from_pylist(found).cast(
        pa.schema(
            [("ts", kind), ("log", pa.string()), ("camera", pa.int32()), ("kept", pa.bool_()), ("id", pa.int64())]
        )
    )
    pq.write_table(table, scratch / "rows.parquet", row_group_size=how["group"])
    if not how["filtered"]:
        found = [{**row, "kept": True} for row in found]
    expected = brute_force(found, spec, how["group"])
    where = "kept" if how["filtered"] else None
    ds = ParquetDataset(
        scratch / "rows.parquet", ["id"], filters=where, batch_size=7, sequence=spec, shuffle=how["shuffle"], lanes=2
    )
    assert len(ds) == -(-len(expected) // 7)
    got = ids_of(ds)
    assert Counter(map(tuple, got)) == Counter(map(tuple, expected))
    if not how["shuffle"]:
        assert got == expected, "row group by row group, group by group in the order they appear, then by order_by"


@pytest.fixture(scope="module")
def drive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """300 camera frames of three logs, out of order, in row groups of 100 and a partition."""
    root = tmp_path_factory.mktemp("drive")
    ids = np.random.default_rng(0).permutation(300)
    table = pa.table(
        {
            "id": ids,
            "ts": pa.array(ids, pa.timestamp("ms")),
            "log": pa.array([f"log {i // 100}" for i in ids]).dictionary_encode(),
            "text": [f"frame {i} " * (i % 4) for i in ids],
            "tokens": [[int(i)] * (i % 5) for i in ids],
            "box": [{"x": int(i)} for i in ids],
            "maybe": pa.array([None if i % 5 == 0 else i for i in ids], pa.int32()),
            "note": [None if i % 4 == 0 else f"note {i}" for i in ids],
        }
    )
    (root / "day=0").mkdir()
    pq.write_table(table, root / "day=0" / "a.parquet", row_group_size=100)
    return root


SPEC = Sequence(4, "ts", max_gap=dt.timedelta(milliseconds=5), group_by="log", stride=2)


def test_nulls_are_an_error_or_filled(drive: Path) -> None:
    with pytest.raises(ParquetError, match="'maybe': it holds nulls"):
        list(ParquetDataset(drive, ["id", "maybe"], sequence=SPEC))
    ds = ParquetDataset(drive, ["id", "maybe", "note"], sequence=SPEC, nulls={"maybe": -1, "note": "none"})
    for batch in ds:
        ids = batch["id"]
        assert torch.equal(batch["maybe"], torch.where(ids % 5 == 0, -1, ids).int())
        assert batch["note"].to_list() == [[f"note {i}" if i % 4 else "none" for i in of] for of in ids.tolist()]


def test_a_partition_that_is_null_is_no_group(tmp_path: Path) -> None:
    for number, day in enumerate(["a", "__HIVE_DEFAULT_PARTITION__"]):
        path = tmp_path / f"day={day}" / "a.parquet"
        path.parent.mkdir()
        pq.write_table(pa.table({"id": range(10 * number, 10 * number + 4)}), path)
    by_day = ParquetDataset(tmp_path, ["id"], sequence=Sequence(3, "id", group_by="day"), shuffle=False)
    assert ids_of(by_day) == [[0, 1, 2], [1, 2, 3]]
    assert len(ParquetDataset(tmp_path, ["id"], sequence=Sequence(3, "id"), batch_size=1)) == 4


def test_counts_are_remembered(drive: Path, tmp_path: Path) -> None:
    pqcache.sync(str(drive), tmp_path / "cache")
    first = ParquetDataset(tmp_path / "cache", ["id"], sequence=SPEC)
    for path in (tmp_path / "cache").rglob("*.parquet"):
        path.unlink()
    again = ParquetDataset(tmp_path / "cache", ["id"], sequence=SPEC)
    assert len(again) == len(first)
    with pytest.raises(ParquetError, match="gone"):  # other sequences have to be counted
        ParquetDataset(tmp_path / "cache", ["id"], sequence=Sequence(4, "ts", max_gap=6, group_by="log", stride=2))


def test_little_memory_reads_one_row_group_at_a_time(tmp_path: Path) -> None:
    rows = 20_000
    order = np.random.default_rng(0).permutation(rows)
    table = pa.table({"id": order, "x": order.astype(np.float64), "text": [f"number {i}" for i in order]})
    pq.write_table(table, tmp_path / "a.parquet")
    spec = Sequence(5, "id", max_gap=1, stride=2)
    plan = make_read_plan(open_local_dataset(tmp_path)[0], None, RowOptions(sequence=spec))
    ds = ParquetDataset(tmp_path, batch_size=500, memory=3 * sizes_of(plan).largest, sequence=spec)
    with pytest.warns(UserWarning, match="one is read at a time"):
        batches = list(ds)
    assert sorted(ids_of(batches)) == [list(range(i, i + 5)) for i in range(0, rows - 4, 2)]
    for batch in batches[::5]:
        assert torch.equal(batch["x"], batch["id"].double())
        assert batch["text"].to_list() == [[f"number {i}" for i in of] for of in batch["id"].tolist()]
    with pytest.raises(UsageError, match="pqcache repartition"):
        next(iter(ParquetDataset(tmp_path, memory=10_000, sequence=spec)))


ORDERS: list[tuple[pa.DataType, Any, Any]] = [
    (pa.timestamp("s"), 2, dt.timedelta(seconds=2.9)),
    (pa.timestamp("ms", "UTC"), 2, dt.timedelta(milliseconds=2)),
    (pa.timestamp("ns"), 2000, dt.timedelta(microseconds=2)),
    (pa.duration("ms"), 2, dt.timedelta(milliseconds=2)),
    (pa.time64("us"), 2, dt.timedelta(microseconds=2)),
    (pa.date64(), 2 * 86_400_000, dt.timedelta(days=2)),
]


def test_gaps_of_times(tmp_path: Path) -> None:
    for number, (kind, gap, delta) in enumerate(ORDERS):
        path, unit = tmp_path / f"{number}.parquet", gap // 2
        integers = pa.array([0, unit, 3 * unit, 6 * unit, 7 * unit], pa.int64())
        pq.write_table(pa.table({"id": range(5), "ts": integers.cast(kind)}), path)
        near = [[0, 1], [1, 2], [3, 4]]
        same = pq.read_schema(path).field("ts").type == kind  # Parquet has neither seconds nor date64
        for max_gap, expected in ((gap, near), (delta, near), (None, [[0, 1], [1, 2], [2, 3], [3, 4]])):
            if same or max_gap != gap:
                ds = ParquetDataset(path, ["id"], sequence=Sequence(2, "ts", max_gap=max_gap), shuffle=False)
                assert ids_of(ds) == expected, (kind, max_gap)


@pytest.mark.parametrize(
    ("values", "gap", "expected"),
    [
        (pa.array([1.0, float("nan"), 2.0, float("inf"), float("inf")]), 1, [[0, 2]]),
        (pa.array([2**64 - 1, 0, 2**63, 2**64 - 2], pa.uint64()), 1, [[3, 0]]),
        (pa.array([-(2**63), 2**63 - 1], pa.int64()), float("inf"), [[0, 1]]),
        (pa.array(["b", "a", None, "c"]).dictionary_encode(), None, [[1, 0], [0, 3]]),
        (pa.array([3, 1, 2], pa.decimal128(5, 1)), None, [[1, 2], [2, 0]]),
        (pa.array([True, False, None, True]), None, [[1, 0], [0, 3]]),
        (pa.array([5, 5, 5, 4], pa.int16()), 0, [[0, 1], [1, 2]]),
    ],
)
def test_other_orders(tmp_path: Path, values: pa.Array, gap: Any, expected: list[list[int]]) -> None:
    pq.write_table(pa.table({"id": range(len(values)), "ts": values}), tmp_path / "a.parquet")
    assert ids_of(ParquetDataset(tmp_path, ["id"], sequence=Sequence(2, "ts", max_gap=gap), shuffle=False)) == expected


def test_files_that_drifted(tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": [0, 1, 2], "ts": pa.array([3, 2, 1], pa.int64())}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"id": [3, 4], "ts": pa.array([1, 2], pa.int32())}), tmp_path / "b.parquet")
    pq.write_table(pa.table({"id": [5, 6]}), tmp_path / "c.parquet")
    assert ids_of(ParquetDataset(tmp_path, ["id"], sequence=Sequence(2, "ts"), shuffle=False)) == [
        [2, 1],
        [1, 0],
        [3, 4],
    ]


def test_a_column_without_an_order_is_named(tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": [1, 2], "nothing": pa.nulls(2)}), tmp_path / "a.parquet")
    with pytest.raises(UsageError, match="order_by='nothing' is null, which has no order"):
        ParquetDataset(tmp_path, ["id"], sequence=Sequence(2, "nothing"))


def test_none_there(drive: Path) -> None:
    with pytest.warns(UserWarning, match="no sequence of 101 rows"):
        ds = ParquetDataset(drive, ["id"], sequence=Sequence(101, "ts"))
    assert len(ds) == 0
    assert list(ds) == []


@pytest.mark.parametrize(
    ("message", "how"),
    [
        ("length=0", {"length": 0}),
        ("stride=0", {"stride": 0}),
        ("max_gap=-1", {"max_gap": -1}),
        ("max_gap='1s'", {"max_gap": "1s"}),
        ("max_gap=np.timedelta64", {"order_by": "ts", "max_gap": np.timedelta64(1, "ms")}),
        ("length=1000000000000: give at most 1,048,576", {"length": 10**12}),
        ("order_by=None", {"order_by": None}),
        ("group_by=5", {"group_by": 5}),
        ("columns_at=.*: give steps by column", {"columns_at": {"id": 1.0}}),
        ("from 0 to 2, or from -3 to -1", {"columns_at": {"id": 3}}),
        ("no step for 'id'", {"columns_at": {"id": []}}),
        ("no column 'nope'", {"order_by": "nope"}),
        ("'tokens' is list", {"order_by": "tokens"}),
        ("order_by='day' is the same", {"order_by": "day"}),
        ("columns_at names 'nope'", {"columns_at": {"nope": 0}}),
        ("max_gap needs numbers or times; 'text' is string", {"order_by": "text", "max_gap": 1}),
        ("'id' is int64; give max_gap as a number", {"order_by": "id", "max_gap": dt.timedelta(1)}),
    ],
)
def test_what_makes_no_sense_is_named(drive: Path, message: str, how: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=message):
        ParquetDataset(drive, sequence=Sequence(**{"length": 3, "order_by": "ts", **how}))
    with pytest.raises(UsageError, match="give a Sequence"):
        ParquetDataset(drive, sequence=3)  # type: ignore[arg-type]
