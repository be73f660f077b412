"""on_error="skip": other rows in place of bad ones, batches of the same number and size, the same in any topology."""

from __future__ import annotations

import gc
import json
import logging
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pqcache import Pack, TokenBatches
from pqcache.errors import ParquetError, UsageError
from pqcache.torch import Batch, Loader, Mix, ParquetDataset, transforms
from pqcache.torch.batch import to_rows
from tests.examples import examples
from tests.waiting import becomes_true

pytestmark = pytest.mark.usefixtures("few_cores_are_fine")

ROWS = 200
BAD = frozenset([0, 3, 4, 17, 18, 19, 55, 120, 121, 122, 123, 199])


class BadRowsError(ValueError):
    """What the transform raises."""


class Decode:
    """Fails where a batch (or row) has a bad row; changes it before that, as transforms do."""

    def __init__(self, bad: frozenset[int] = BAD) -> None:
        self.bad = bad

    def __call__(self, batch: Any) -> Any:
        ids = batch["id"]
        rows = set(np.atleast_1d(ids.numpy()).tolist())
        batch["seen"] = ids.clone()
        ids += 1000
        if found := sorted(rows & self.bad):
            raise BadRowsError(f"bad rows {found}")
        ids -= 1000
        batch["random"] = torch.rand(1)
        return batch


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("on_error")
    for number, name in enumerate("ab"):
        ids = np.arange(100) + 100 * number
        words = [["x" * (i % 4)] * (i % 3) for i in ids]
        tokens = pa.array([list(range(i * 100, i * 100 + i % 7)) for i in ids], pa.list_(pa.int32()))
        table = pa.table({"id": ids, "words": words, "one": [{"a": i} for i in ids], "tokens": tokens})
        pq.write_table(table, root / f"{name}.parquet", row_group_size=25)
    return root


def skipping(root: Path, bad: frozenset[int] = BAD, **options: Any) -> ParquetDataset:
    return ParquetDataset(root, **{"batch_size": 16, "transform": Decode(bad), "on_error": "skip", **options})


def replaced(ids: list[int], bad: frozenset[int]) -> list[int]:
    """Return a batch with the next good row of it in place of each bad one."""
    found = []
    for place, row in enumerate(ids):
        following = [other for other in ids[place:] + ids if other not in bad]
        found.append(row if row not in bad else following[0])
    return found


def test_bad_rows_are_replaced_within_their_batch(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    plain = [batch["id"].tolist() for batch in ParquetDataset(root, batch_size=16)]
    dataset = skipping(root)
    with caplog.at_level(logging.WARNING, "pqcache.torch"):
        batches = list(dataset)
    assert [batch["id"].tolist() for batch in batches] == [replaced(ids, BAD) for ids in plain]
    assert all(batch["seen"].equal(batch["id"]) for batch in batches)
    for batch in batches:
        ids = batch["id"].tolist()
        assert to_rows(batch["words"]) == [["x" * (i % 4)] * (i % 3) for i in ids]
        assert to_rows(batch["one"]) == [{"a": i} for i in ids]
        assert [row.tolist() for row in batch["tokens"]] == [list(range(i * 100, i * 100 + i % 7)) for i in ids]
    failed = dataset.errors()
    ids_of = [100 * "ab".index(row.file[0]) + 25 * row.row_group + row.row for row in failed]
    assert sorted(ids_of) == sorted(BAD)
    assert {row.error for row in failed} == {f"BadRowsError: bad rows [{i}]" for i in BAD}
    assert all(ids_of[i] in plain[row.index] and row.epoch == 0 for i, row in enumerate(failed))
    assert len(caplog.records) == len(BAD)
    assert "a.parquet, row group 0, row 3: BadRowsError: bad rows [3]" in caplog.text


@pytest.mark.parametrize("batch_size", [16, None])
def test_the_same_in_any_topology_and_resumed(root: Path, batch_size: int | None) -> None:
    def collect(ranks: int, threads: int | None = None) -> dict[int, Any]:
        found = {}
        for rank in range(ranks):
            dataset = skipping(root, batch_size=batch_size, lanes=4, num_replicas=ranks, rank=rank)
            for place, batch in enumerate(dataset):
                ids = batch["id"].tolist()
                found[batch.index if batch_size else rank + place * ranks] = ids
        return found

    one = collect(1)
    for ranks in (2, 4):
        some = collect(ranks)
        assert {index: some[index] for index in one} == one
    dataset = skipping(root, batch_size=batch_size, lanes=4)
    for index in range(0, len(one) - 1, 1 if batch_size else 23):
        resumed = skipping(root, batch_size=batch_size)
        resumed.load_state_dict(json.loads(json.dumps(dataset.state_dict(after=index))))
        assert next(iter(resumed))["id"].tolist() == one[index + 1]


def test_with_workers_the_report_is_of_all(root: Path) -> None:
    dataset = skipping(root, lanes=2)
    batches = list(Loader(dataset, num_workers=2))
    assert [b["id"].tolist() for b in batches] == [b["id"].tolist() for b in skipping(root, lanes=2)]
    assert sorted(100 * "ab".index(r.file[0]) + 25 * r.row_group + r.row for r in dataset.errors()) == sorted(BAD)
    log = dataset._reader.failures
    assert log is not None
    path = log.path
    assert path.exists()
    del dataset, batches, log
    assert becomes_true(lambda: not path.exists())


def test_reports_of_killed_processes_are_removed(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(transforms, "_YOUNG", 0.0)  # patches the age that a report must have, to be removed
    names = "pqcache-errors-abcd.jsonl", "pqcache-other-abcd.jsonl", "pqcache-errors-link.jsonl"
    abandoned, other, link = (tmp_path / name for name in names)
    for path in (abandoned, other):
        path.touch()
        os.utime(path, (0, 0))
    link.symlink_to(other)
    kept = skipping(root)
    assert not abandoned.exists()
    for path in tmp_path.iterdir():
        os.utime(path, (0, 0), follow_symlinks=False)
    again = skipping(root)  # the report of the first one is locked
    assert list(kept)
    assert (len(kept.errors()), again.errors()) == (len(BAD), [])
    del kept, again
    gc.collect()
    assert becomes_true(lambda: {path.name for path in tmp_path.iterdir()} == {other.name, link.name})


def test_rows_one_by_one(root: Path) -> None:
    dataset = skipping(root, batch_size=None, shuffle=False)
    ids = [int(row["id"]) for row in dataset]
    good = [i for i in range(ROWS) if i not in BAD]
    assert ids == [next((g for g in good if g >= i), 198) for i in range(ROWS)]  # after the last, the one before it
    assert sorted(row.index for row in dataset.errors()) == sorted(BAD)


def test_a_batch_of_bad_rows_is_another_of_its_lane(root: Path) -> None:
    plain = [batch["id"].tolist() for batch in ParquetDataset(root, batch_size=16, lanes=3)]
    bad = frozenset([*plain[4], *plain[11], plain[7][2], *plain[-1]])  # of lanes 1, 2 and the last, which is short
    batches = list(skipping(root, bad, lanes=3))
    expected = [replaced(ids, bad) if set(ids) - bad else [] for ids in plain]
    last = len(plain) - 1
    expected[4] = replaced(plain[7], bad)
    expected[11] = expected[8] if last < 14 else plain[14]
    expected[last] = plain[last - 3][: len(plain[last])]
    assert [batch["id"].tolist() for batch in batches] == expected
    assert [batch.index for batch in batches] == list(range(len(plain)))


def test_too_many_errors_end_the_epoch(root: Path) -> None:
    with pytest.raises(BadRowsError) as caught:
        list(skipping(root, max_errors=5))
    text = "\n".join(getattr(caught.value, "__notes__", [])) or str(caught.value.__cause__)
    assert "the transform has failed for more than max_errors=5 rows, at last for\n  " in text
    assert len(list(skipping(root, max_errors=None))) == 13
    assert len(list(skipping(root, max_errors=len(BAD)))) == 13


def test_what_always_fails_is_an_error(root: Path) -> None:
    for options in ({"batch_size": 16}, {"batch_size": None}, {"batch_size": 2, "max_errors": None}):
        with pytest.raises(BadRowsError):
            list(skipping(root, frozenset(range(ROWS)), **options))


def test_rows_that_fail_only_together(root: Path) -> None:
    def even(batch: Batch) -> Any:
        ids = batch["id"].tolist()
        if 3 in ids and len(ids) > 1:
            raise BadRowsError("3 is not alone")
        return batch

    dataset = ParquetDataset(root, batch_size=8, shuffle=False, transform=even, on_error="skip")
    batches = [batch["id"].tolist() for batch in dataset]
    assert batches[0] == batches[1] == list(range(8, 16))
    (failed,) = dataset.errors()
    assert (failed.row, failed.index, failed.error) == (-1, 0, "BadRowsError: 3 is not alone")


def test_errors_of_files_remain_errors(root: Path, tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes((root / "a.parquet").read_bytes())
    dataset = skipping(tmp_path)
    (tmp_path / "a.parquet").unlink()
    with pytest.raises(ParquetError, match=r"a\.parquet"):
        list(dataset)


def test_packed_sequences_and_batches_by_tokens(root: Path) -> None:
    def fail(batch: Batch) -> Any:
        tokens = batch["tokens"]
        if 1900 in (tokens if isinstance(tokens, torch.Tensor) else tokens.values).reshape(-1).tolist():
            raise BadRowsError("1900")
        return batch

    for pack, size in ((Pack("tokens", 16), 4), (TokenBatches("tokens", tokens_per_batch=30), 256)):
        dataset = ParquetDataset(root, pack=pack, batch_size=size, transform=fail, on_error="skip")
        batches = list(dataset)
        assert len(batches) == len(dataset)
        assert len(dataset.errors()) == 1
        if isinstance(pack, Pack):
            for batch in batches:
                lengths, places = batch["cu_seqlens"].diff(), batch["position_ids"].reshape(-1)
                assert torch.equal(torch.cat([torch.arange(int(n)) for n in lengths]), places)


def test_in_a_mix(root: Path) -> None:
    mix = Mix({"good": ParquetDataset(root, batch_size=16), "bad": skipping(root)})
    batches = [(batch.source, batch["id"].tolist()) for batch in mix]
    assert all(set(ids).isdisjoint(BAD) for source, ids in batches if source == "bad")
    assert sum(len(ids) for source, ids in batches if source == "bad") == ROWS
    assert len(mix.datasets["bad"].errors()) == len(BAD)
    with pytest.raises(BadRowsError):
        list(Mix({"bad": skipping(root, frozenset(range(ROWS)), batch_size=4, max_errors=None)}))


@settings(max_examples=examples(60), deadline=None)
@given(st.data())
def test_any_rows_may_be_bad(root: Path, data: st.DataObject) -> None:
    size = data.draw(st.sampled_from([1, 3, 16, 64]))
    bad = frozenset(data.draw(st.lists(st.integers(0, ROWS - 1), max_size=150)))
    lanes = data.draw(st.integers(1, 3))
    plain = [batch["id"].tolist() for batch in ParquetDataset(root, columns=["id"], batch_size=size, lanes=lanes)]
    dataset = skipping(root, bad, columns=["id"], batch_size=size, lanes=lanes, max_errors=None)
    batches = [batch["id"].tolist() for batch in dataset]
    assert list(map(len, batches)) == list(map(len, plain))
    for ids, found in zip(plain, batches, strict=True):
        assert bad.isdisjoint(found)
        if set(ids) - bad:
            assert found == replaced(ids, bad)
    assert len(dataset.errors()) == len(bad)


@pytest.mark.parametrize(
    "options", [{"on_error": "ignore"}, {"max_errors": 0}, {"max_errors": True}, {"transform_workers": 0}]
)
def test_options_that_make_no_sense(root: Path, options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(options))):
        ParquetDataset(root, transform=lambda batch, generator: batch, **options)
