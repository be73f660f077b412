"""Texts, and lists, that take more than 2 GB once they are decoded: of a row group, and of one batch.

The files are small, as texts of a dictionary are stored once.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pqcache import Cache
from pqcache.errors import UsageError
from pqcache.torch import ParquetDataset

LENGTH = 40_000
WORDS = [f"{number}" * LENGTH for number in range(3)]
MUCH = "64GB"  # of `memory`, for row groups that are decoded only as far as batches need them


def write(
    root: Path, rows: int = 60_000, row_groups: int = 1, kind: pa.DataType | None = None, coded: bool = True
) -> Path:
    """Write texts of 2.4 GB together; the text of row i is that of i % 3. Readers may know that they are ``coded``."""
    ids = np.arange(rows)
    words = pa.DictionaryArray.from_arrays((ids % 3).astype(np.int32), pa.array(WORDS, kind or pa.string()))
    words = words.dictionary_decode() if kind == pa.large_binary() else words  # which a file is not known to have coded
    root.mkdir()
    table = pa.table({"id": ids, "share": ids % 100, "text": words})
    pq.write_table(table, root / "a.parquet", row_group_size=-(-rows // row_groups), store_schema=coded)
    return root


@pytest.mark.slow
def test_a_row_group_whose_texts_are_long_together(tmp_path: Path) -> None:
    root, found = write(tmp_path / "lake"), []
    for batch in ParquetDataset(root, batch_size=3_000, memory=MUCH):
        ids, texts = batch["id"], batch["text"]
        assert texts.lengths().tolist() == [LENGTH] * len(ids)
        assert (texts.values.reshape(-1, LENGTH)[:, [0, -1]] == (ord("0") + ids % 3)[:, None]).all()
        found += ids.tolist()
    assert sorted(found) == list(range(60_000))
    batch = next(Cache(root).batches(batch_size=3_000, memory=MUCH))
    assert batch.schema.field("text").type == pa.string()
    assert [text.as_py()[:1] for text in batch["text"][:9]] == [f"{i.as_py() % 3}" for i in batch["id"][:9]]


@pytest.mark.deep  # of each, 2.4 GB are in memory
@pytest.mark.parametrize(("kind", "row_groups"), [(pa.string(), 4), (pa.large_binary(), 1)])
def test_a_batch_of_more_than_two_gigabytes(tmp_path: Path, kind: pa.DataType, row_groups: int) -> None:
    root = write(tmp_path / "lake", row_groups=row_groups, kind=kind)
    (batch,) = ParquetDataset(root, batch_size=60_000, memory=MUCH)
    assert sorted(batch["id"].tolist()) == list(range(60_000))
    assert batch["text"].values.numel() == 60_000 * LENGTH
    assert batch["text"].offsets[[0, 1, -1]].tolist() == [0, LENGTH, 60_000 * LENGTH]
    for row in (0, 30_000, 59_999):
        text = batch["text"][row]
        assert (text if isinstance(text, str) else text.decode()) == WORDS[batch["id"][row] % 3]
    del batch, text
    batches = Cache(root).batches(batch_size=60_000, memory=MUCH)
    if kind == pa.string():
        with pytest.raises(UsageError, match=r"column 'text': .* more than 2 GB.*; choose a smaller batch_size"):
            next(batches)
    else:
        assert next(batches)["text"].type == kind


@pytest.mark.deep
def test_chosen_rows_of_more_than_two_gigabytes(tmp_path: Path) -> None:
    """Of fewer than half of the rows of a row group no more is kept than these."""
    root, found = write(tmp_path / "lake", rows=120_000), []
    dataset = ParquetDataset(root, batch_size=600, memory=MUCH, filters="share < 48")
    for batch in dataset:
        assert (batch["text"].values.reshape(-1, LENGTH)[:, 0] == ord("0") + batch["id"] % 3).all()
        found += batch["id"].tolist()
    assert sorted(found) == [i for i in range(120_000) if i % 100 < 48]


_PEAK = """
import sys, pqcache
from pqcache import Split
peak = lambda: next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) * 1024
before = peak()
batches = pqcache.Cache(sys.argv[1]).batches(columns=["id"], **eval(sys.argv[2]))
print(sum(batch.num_rows for batch in batches), peak() - before)
"""


@pytest.mark.deep
def test_choosing_by_long_texts_takes_little_memory(tmp_path: Path) -> None:
    root = write(tmp_path / "lake", row_groups=4, coded=False)
    by_text = "'filters': \"text >= '1' and text < '2' and id < 50\""
    for options, expected in (
        (f"{{{by_text}}}", 17),
        (f"{{{by_text}, 'split': Split('text', 0.0, 1.0), 'limit': 9}}", 9),
    ):
        done = subprocess.run([sys.executable, "-c", _PEAK, str(root), options], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        rows, taken = map(int, done.stdout.split())
        assert rows == expected
        assert taken < 250e6


@pytest.mark.deep
def test_texts_inside_of_structs_that_no_batch_can_have(tmp_path: Path) -> None:
    ids = np.arange(20_000)
    words = pa.array(WORDS).take(pa.array(ids % 3))
    rows = pa.table({"id": ids, "about": pa.StructArray.from_arrays([words], ["text"])})
    for number in range(3):
        pq.write_table(rows, tmp_path / f"{number}.parquet")
    how: dict[str, Any] = {"memory": MUCH, "batch_size": 60_000}
    with pytest.raises(UsageError, match=r"column 'about': .*; choose a smaller batch_size"):
        next(Cache(tmp_path).batches(**how))
