"""Files as their tables see them: columns renamed and dropped, and rows deleted, while they are downloaded."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pqcache.parquet.projection import TableColumn
from pqcache.store.drivers.base import FileShape
from pqcache.store.drivers.local import LocalSource
from pqcache.store.manifest import SourceFile
from pqcache.store.sync.download.download_columns import download_columns
from pqcache.store.sync.download.subset import Subset
from tests.examples import examples

_ROWS, _GROUP = 1_200, 250
_COLUMNS = tuple(
    TableColumn(name=name, stored=frozenset({stored})) for name, stored in (("user", "c1"), ("label", "c2"))
)


class _Shaped(LocalSource):
    """A local source that is a table of one file."""

    def __init__(self, root: Path, shape: FileShape) -> None:
        super().__init__(str(root), {})
        self.shape = shape

    def shape_of(self, path: str) -> FileShape:
        return self.shape


def _table() -> pa.Table:
    rows = range(_ROWS)
    columns = {"c1": rows, "c2": [None if i % 11 == 0 else f"l{i % 5}" for i in rows], "c3": [i / 3 for i in rows]}
    return pa.table({name: pa.array(values) for name, values in columns.items()})


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("table")
    pq.write_table(_table(), root / "a.parquet", row_group_size=_GROUP)
    return root


def _shape(deleted: npt.NDArray[np.int64] | None, mapped: bool) -> FileShape:
    return FileShape(columns=_COLUMNS if mapped else None, deleted_rows=None if deleted is None else lambda: deleted)


def _download(root: Path, shape: FileShape, subset: Subset) -> tuple[pa.Table, int]:
    """Return what is downloaded of the file, and the bytes that were received."""
    received: list[int] = []
    source = _Shaped(root, shape)
    with tempfile.TemporaryDirectory() as directory:
        target = Path(directory) / "out.parquet"
        file = SourceFile("a.parquet", source.stat("a.parquet"))
        download_columns(source, file, target, subset, received.append)
        return pq.read_table(target), sum(received)


_deleted = (
    st.none()
    | st.lists(st.integers(0, _ROWS - 1), max_size=40)
    | st.sampled_from([list(range(_GROUP)), list(range(_GROUP, 3 * _GROUP)), list(range(_ROWS)), [_ROWS - 1]])
)


@settings(max_examples=examples(60), deadline=None)
@given(deleted=_deleted, mapped=st.booleans(), limit=st.none() | st.integers(-1, _ROWS), some=st.booleans())
def test_rows_and_columns_are_those_of_the_table(
    root: Path, deleted: list[int] | None, mapped: bool, limit: int | None, some: bool
) -> None:
    expected = _table()
    kept = np.ones(_ROWS, np.bool_)
    kept[deleted or []] = False
    expected = expected.filter(pa.array(kept))
    user, label = ("user", "label") if mapped else ("c1", "c2")
    if mapped:
        expected = expected.select(["c1", "c2"]).rename_columns([user, label])
    if limit is not None:
        expected = expected.filter(pc.field(user) >= limit)
    if some:
        expected = expected.select([label])
    positions = None if deleted is None else np.unique(np.array(deleted, np.int64))
    subset = Subset(columns=(label,) if some else None, where=None if limit is None else f"{user} >= {limit}")
    found, _ = _download(root, _shape(positions, mapped), subset)
    assert found.equals(expected)


def test_a_row_group_of_which_all_rows_are_deleted_is_not_downloaded(tmp_path: Path) -> None:
    numbers = np.random.default_rng(3).integers(0, 1 << 60, 60_000)
    pq.write_table(pa.table({"c1": numbers}), tmp_path / "a.parquet", row_group_size=20_000, use_dictionary=False)
    everything = _download(tmp_path, _shape(None, mapped=True), Subset())[1]
    found, received = _download(tmp_path, _shape(np.arange(20_000), mapped=True), Subset())
    assert found["user"].to_numpy().tolist() == numbers[20_000:].tolist()
    assert received < everything - 100_000
