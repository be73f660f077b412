"""Prefetch: the batches of a loader on a device; one whose copies are late as can be shows what is not waited for."""

from __future__ import annotations

import copy
import gc
import json
import logging
import sys
import threading
import time
import weakref
from collections import UserDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import MagicMock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from pqcache.errors import UsageError
from pqcache.torch import Batch, Loader, ParquetDataset, Prefetch, Ragged, prefetch
from pqcache.torch.prefetch import DeviceBlock, DeviceCopier, DeviceStream
from tests.forked_commands import true_in_child
from tests.torch.conftest import ROWS, ids_of
from tests.waiting import becomes_true

pytestmark = pytest.mark.usefixtures("few_cores_are_fine")

EVERY_ROW = list(range(ROWS))
DEVICE = "meta"  # stands for one that torch has here; LateDevice is behind it


class LateDevice:
    """A device in host memory that runs everything as late as it may, as one would that is far behind the program.

    Copies run when the program waits for one, or when the work of the trainer that waits for it runs. That work runs
    at the end, so that it sees what was written meanwhile to memory that it should have had for itself.
    """

    def __init__(self) -> None:
        self.pinned_bytes, self.begun, self.fails_from = 0, 0, 1 << 40
        self._copies: deque[tuple[int, Callable[[], Any]]] = deque()
        self._work: list[Callable[[], Any]] = []

    def pinned(self, size: int) -> torch.Tensor:
        if self.pinned_bytes + size > self.fails_from:
            raise RuntimeError("no more memory can be pinned")
        self.pinned_bytes += size
        return torch.full((size,), 0xAA, dtype=torch.uint8)

    def copy(self, pieces: Sequence[torch.Tensor], size: int) -> DeviceBlock:
        block = torch.full((size,), 0xEE, dtype=torch.uint8)
        self.begun += 1
        self._copies.append((self.begun, lambda: torch.cat(list(pieces), out=block)))
        return DeviceBlock(block, self.begun)

    def wait(self, copied: int) -> None:
        while self._copies and self._copies[0][0] <= copied:
            self._copies.popleft()[1]()

    def wait_on_device(self, block: DeviceBlock) -> None:
        self._work.append(lambda: self.wait(block.copied))

    def move(self, value: Any) -> Any:
        return value

    def work(self, function: Callable[[], Any]) -> None:
        """Do something with what is on the device, later."""
        self._work.append(function)

    def results(self) -> list[Any]:
        """Return what the work returns, now that it runs."""
        work, self._work = self._work, []
        return [result for result in [step() for step in work] if result is not None]


def is_packing() -> bool:
    """Return whether there is a thread that packs batches."""
    return any(thread.name.startswith("pqcache-prefetch") for thread in threading.enumerate())


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> LateDevice:
    device = LateDevice()
    monkeypatch.setattr(prefetch, "copy_stream", lambda _: device)
    return device


def dataset(table: Path, **options: Any) -> ParquetDataset:
    return ParquetDataset(table, **{"batch_size": 32, "seed": 3, "lanes": 4, **options})


def content(value: Any) -> Any:
    """Return a value as plain Python, with the types of its containers and tensors."""
    if isinstance(value, Batch):
        return Batch, value.index, value.epoch, {name: content(inner) for name, inner in value.items()}
    if isinstance(value, Ragged):
        return Ragged, value.kind, content(value.values), content(value.offsets)
    if isinstance(value, torch.Tensor):
        return value.dtype, value.layout, value.requires_grad, value.to_dense().tolist()
    if isinstance(value, (dict, UserDict)):
        return type(value), {name: content(inner) for name, inner in value.items()}
    if isinstance(value, Record):
        return Record, content(value.ids), content(value.more)
    if isinstance(value, (list, tuple)):
        return type(value), [content(inner) for inner in value]
    return value


def through(late: LateDevice, loader: Any, memory: int | str = "1GB") -> list[Any]:
    """Return the content of the batches that a trainer gets which is never waited for."""
    for batch in Prefetch(loader, DEVICE, memory=memory):
        late.work(lambda batch=batch: content(batch))
    return late.results()


def test_batches_are_those_of_the_loader(late: LateDevice, table: Path) -> None:
    expected = [content(batch) for batch in Loader(dataset(table))]
    assert through(late, Loader(dataset(table), num_workers=2)) == expected
    assert late.begun == len(expected) == 16
    assert 0 < late.pinned_bytes < 20_000


def test_columns_of_all_kinds(late: LateDevice, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    columns = {
        "flag": pa.array([bool(i % 3) for i in range(60)]),
        "small": pa.array([None if i % 7 == 0 else i for i in range(60)], pa.int8()),
        "text": [f"row {i} é" for i in range(60)],
        "vector": pa.FixedSizeListArray.from_arrays(pa.array(rng.random(180)), 3),
        "nested": [[[i] * (i % 3)] * (i % 4) for i in range(60)],
        "struct": [{"x": i / 2, "name": b"z" * (i % 5)} for i in range(60)],
        "empty": pa.array([[]] * 60, pa.list_(pa.int32())),
    }
    pq.write_table(pa.table(columns), tmp_path / "a.parquet", row_group_size=20)
    read = {"batch_size": 7, "nulls": "mask", "seed": 1}
    expected = [content(batch) for batch in Loader(ParquetDataset(tmp_path, **read))]
    assert through(late, Loader(ParquetDataset(tmp_path, **read))) == expected


class Pair(NamedTuple):
    ids: torch.Tensor
    names: list[str]


@dataclass
class Record:
    ids: torch.Tensor
    more: dict[str, Any]


SHAPES: dict[str, Callable[[Batch], Any]] = {
    "tensor": lambda batch: batch["id"],
    "pair": lambda batch: Pair(batch["id"], ["a", "b"]),
    "lists": lambda batch: [batch["id"], (batch["tokens"], None, 3)],
    "not contiguous": lambda batch: {"t": batch["id"].reshape(2, -1).T, "bf": batch["id"].to(torch.bfloat16)[::2]},
    "one number": lambda batch: {"rows": torch.tensor(len(batch["id"])), "none": torch.empty(0, 3)},
    "with a gradient": lambda batch: {"g": torch.ones(2, requires_grad=True), "ids": batch["id"]},
    "sparse": lambda batch: {"ids": batch["id"], "s": torch.eye(3).to_sparse()},
    "dataclass": lambda batch: Record(batch["id"], {"n": 1}),
    "user dict": lambda batch: UserDict(ids=batch["id"]),
    "nothing": lambda batch: "text",
}


@pytest.mark.parametrize("shape", SHAPES)
def test_what_transforms_return(late: LateDevice, table: Path, shape: str) -> None:
    expected = [content(batch) for batch in Loader(dataset(table, batch_size=20, transform=SHAPES[shape]))]
    assert through(late, Loader(dataset(table, batch_size=20, transform=SHAPES[shape]))) == expected


def test_tensors_of_a_batch_may_be_changed_in_place(late: LateDevice, table: Path) -> None:
    batch = next(iter(Prefetch(Loader(dataset(table)), DEVICE)))
    late.results()
    weight, offsets = torch.ones(32, requires_grad=True), batch["tokens"].offsets.tolist()
    loss = (weight * batch["id"]).sum()
    batch["tokens"].offsets.add_(1)  # no view of the ids, which the gradient needs as they were
    loss.backward()
    assert weight.grad is not None
    assert batch["tokens"].offsets.tolist() == [end + 1 for end in offsets]
    batch["id"].add_(1)


def test_one_batch_is_copied_ahead_while_the_trainer_works(late: LateDevice) -> None:
    """The copy of a batch begins only after the trainer was given the one before."""
    given, asked, copy = [threading.Event() for _ in range(17)], list[int](), late.copy

    def batches() -> Iterator[torch.Tensor]:
        for number in range(16):
            asked.append(number)
            yield torch.full((10,), number)

    def copy_later(pieces: Sequence[torch.Tensor], size: int) -> DeviceBlock:
        assert late.begun == 0 or given[late.begun].wait(30), "the trainer waits for the batch that it was not given"
        return copy(pieces, size)

    late.copy = copy_later  # type: ignore[method-assign]
    for number, _ in enumerate(Prefetch(batches(), DEVICE), 1):
        assert len(asked) == min(number + 1, 16)
        assert late.begun == number
        given[number].set()
    assert late.begun == number == 16


def test_an_error_of_a_copy_comes_after_the_batches_before_it(late: LateDevice, table: Path) -> None:
    copy, given = late.copy, []

    def copy_or_fail(pieces: Sequence[torch.Tensor], size: int) -> DeviceBlock:
        if late.begun == 5:
            raise torch.OutOfMemoryError("out of memory")
        return copy(pieces, size)

    late.copy = copy_or_fail  # type: ignore[method-assign]
    with pytest.raises(torch.OutOfMemoryError):
        given.extend(batch.index for batch in Prefetch(Loader(dataset(table)), DEVICE))
    assert given == [0, 1, 2, 3, 4]
    assert not is_packing()


def test_two_iterations_at_once(late: LateDevice) -> None:
    """Their threads do not pack into the same pinned memory."""
    copy, inside = late.copy, []

    def copy_slowly(pieces: Sequence[torch.Tensor], size: int) -> DeviceBlock:
        inside.append(threading.get_ident())
        time.sleep(0.002)
        assert inside.pop() == threading.get_ident()
        assert not inside
        return copy(pieces, size)

    late.copy = copy_slowly  # type: ignore[method-assign]
    loader = Prefetch([torch.full((1000,), i) for i in range(30)], DEVICE)
    for one, other in zip(loader, loader, strict=True):
        late.work(lambda pair=(one, other): [int(tensor.sum()) for tensor in pair])
    assert late.results() == [[1000 * i] * 2 for i in range(30)]
    assert late.begun == 60


def test_a_loader_may_write_each_batch_into_the_same_memory(late: LateDevice) -> None:
    class Reusing:
        """Like a DataLoader whose ``collate_fn`` fills one tensor."""

        def __iter__(self) -> Iterator[torch.Tensor]:
            batch = torch.empty(1 << 20)
            for number in range(20):
                yield batch.fill_(number)

    for batch in Prefetch(Reusing(), DEVICE):
        late.work(lambda batch=batch: (float(batch.min()), float(batch.max())))
    assert late.results() == [(number, number) for number in range(20)]


def test_an_iteration_that_its_own_thread_collects(late: LateDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """The garbage collector runs in any thread, and closes the iterations that nobody refers to."""
    copy, is_left, closed_in, problems = late.copy, threading.Event(), list[str](), list[Any]()

    def copy_and_collect(pieces: Sequence[torch.Tensor], size: int) -> DeviceBlock:
        if late.begun == 1:
            assert is_left.wait(30)
            gc.collect()
        return copy(pieces, size)

    class Batches:
        def __iter__(self) -> Iterator[torch.Tensor]:
            try:
                yield from [torch.ones(10)] * 10
            finally:
                closed_in.append(threading.current_thread().name)

    late.copy = copy_and_collect  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "unraisablehook", problems.append)
    loader = Prefetch(Batches(), DEVICE)
    holder: dict[str, Any] = {"iterator": iter(loader)}
    holder["cycle"] = holder
    gc.disable()
    try:
        next(holder["iterator"])
        assert loader._copier is not None
        copier = weakref.ref(loader._copier)
        del holder, loader
        is_left.set()
        assert becomes_true(lambda: not is_packing())
    finally:
        gc.enable()
    assert (closed_in, problems) == (["pqcache-prefetch_0"], [])
    gc.collect()
    assert copier() is None, "pinned memory is held"


def test_an_iteration_is_of_one_process(late: LateDevice) -> None:
    batches = iter(Prefetch([torch.ones(10)] * 5, DEVICE))
    next(batches)

    def is_refused() -> bool:
        with pytest.raises(
            UsageError, match="its iteration was begun before a fork; iterate anew in the child process"
        ):
            next(batches)
        return True

    assert true_in_child(is_refused)
    assert len(list(batches)) == 4


def test_the_end_of_a_program_waits_for_the_thread_that_packs(late: LateDevice) -> None:
    """Python would end it within torch's code, which aborts the process."""
    copy = late.copy

    def copy_slowly(pieces: Sequence[torch.Tensor], size: int) -> DeviceBlock:
        time.sleep(0.3 if late.begun else 0)
        return copy(pieces, size)

    def waits() -> bool:
        late.copy = copy_slowly  # type: ignore[method-assign]
        batches = iter(Prefetch([torch.ones(10)] * 5, DEVICE))
        next(batches)
        threading._shutdown()  # type: ignore[attr-defined]  # what the interpreter's end begins with
        return late.begun == 2

    assert true_in_child(waits)


def test_no_more_is_pinned_than_memory(late: LateDevice, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lengths = [10, 900, 20, 400_000, 3000, 120_000, 50, 400_000, 5]
    table = pa.table({"id": range(9), "tokens": pa.array([[7] * length for length in lengths], pa.list_(pa.int32()))})
    pq.write_table(table, tmp_path / "a.parquet")
    read = {"batch_size": 1, "shuffle": False}
    expected = [content(batch) for batch in Loader(ParquetDataset(tmp_path, **read))]
    with caplog.at_level(logging.WARNING, "pqcache.torch"):
        assert through(late, Loader(ParquetDataset(tmp_path, **read)), memory="1MB") == expected
    assert late.pinned_bytes <= 1 << 20
    assert late.begun == 7
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith("Prefetch: a batch of 1.5 MB does not fit into the 512 KB of pinned memory for each")


def test_batches_are_copied_where_no_more_can_be_pinned(
    late: LateDevice, table: Path, caplog: pytest.LogCaptureFixture
) -> None:
    late.fails_from = 5000
    expected = [content(batch) for batch in Loader(dataset(table))]
    with caplog.at_level(logging.WARNING, "pqcache.torch"):
        assert through(late, Loader(dataset(table))) == expected
    assert late.begun == 8, "one of two slots has its memory"
    assert "Prefetch: no more than 0 B could be pinned: no more memory can be pinned" in caplog.text


def test_the_state_is_that_of_the_batch_which_the_trainer_has(late: LateDevice, table: Path) -> None:
    plain, loader = Loader(dataset(table)), Prefetch(Loader(dataset(table), num_workers=2), DEVICE)
    assert loader.state_dict() == plain.state_dict()
    states = []
    for _, _ in zip(plain, loader, strict=True):
        states.append(json.loads(json.dumps(loader.state_dict())))
        assert loader.state_dict() == loader.loader.state_dict() == plain.state_dict()
    assert loader.state_dict() == plain.state_dict()
    assert loader.epoch == 1
    resumed, expected = Prefetch(Loader(dataset(table)), DEVICE), Loader(dataset(table))
    for state in (states[0], states[15]):
        resumed.load_state_dict(state)
        expected.load_state_dict(state)
        ids = [batch["id"] for batch in resumed]
        late.results()
        assert [i for some in ids for i in some.tolist()] == ids_of(expected)
        assert resumed.state_dict() == expected.state_dict()


def test_the_state_of_a_stateful_data_loader(late: LateDevice, table: Path) -> None:
    def stateful() -> Prefetch:
        return Prefetch(StatefulDataLoader(dataset(table), batch_size=None, num_workers=1), DEVICE)

    loader, seen = stateful(), []
    for batch in loader:
        seen.append(batch["id"])
        state = copy.deepcopy(loader.state_dict())
        if len(seen) == 6:
            break
    assert loader.state_dict() == state, "after a break it is still that of the last batch"
    resumed = stateful()
    resumed.load_state_dict(state)
    seen += [batch["id"] for batch in resumed]
    late.results()
    assert sorted(i for ids in seen for i in ids.tolist()) == EVERY_ROW


def test_the_state_of_a_dataset_without_a_loader(late: LateDevice, table: Path) -> None:
    plain, loader = dataset(table), Prefetch(dataset(table), DEVICE)
    for _, batch in zip(plain, loader, strict=True):
        assert loader.state_dict() == plain.state_dict()
        assert batch.index + 1 == loader.state_dict()["batch"]
    assert loader.state_dict() == plain.state_dict()
    for epoch in (1, 2):  # left early, and then set
        loader.set_epoch(epoch)
        assert loader.state_dict()["batch"] == 0
        next(iter(loader))
        assert (loader.state_dict()["epoch"], loader.state_dict()["batch"]) == (epoch, 1)


def test_a_plain_data_loader_has_no_state(late: LateDevice, table: Path) -> None:
    read = dataset(table)
    loader = Prefetch(DataLoader(read, batch_size=None), DEVICE)
    batches = iter(loader)
    next(batches)
    after = read.state_dict(after=next(batches))
    assert after["batch"] == 2, "batches know their place"
    with pytest.raises(UsageError, match="a DataLoader does not keep its place"):
        loader.state_dict()


def test_a_state_that_cannot_be_had_is_an_error_only_for_who_asks(late: LateDevice) -> None:
    class NoPlace(list[torch.Tensor]):
        def state_dict(self) -> dict[str, Any]:
            raise UsageError("NoPlace", "it has none")

    batches = iter(loader := Prefetch(NoPlace(torch.arange(6).reshape(3, 2)), DEVICE))
    next(batches)
    with pytest.raises(UsageError, match="it has none"):
        loader.state_dict()
    assert len(list(batches)) == 2


def test_an_error_comes_after_the_batches_before_it(late: LateDevice, table: Path) -> None:
    def transform(batch: Batch) -> Batch:
        if batch.index == 5:
            raise ValueError("batch 5 is bad")
        return batch

    loader = Prefetch(Loader(dataset(table, transform=transform)), DEVICE)
    batches = iter(loader)
    seen = [next(batches).index for _ in range(5)]
    with pytest.raises(ValueError, match="batch 5 is bad"):
        next(batches)
    assert seen == [0, 1, 2, 3, 4]
    assert loader.state_dict()["batch"] == 5


def test_an_iteration_that_is_left_early(late: LateDevice, table: Path) -> None:
    loader = Prefetch(Loader(dataset(table)), DEVICE)
    for _ in loader:
        break
    assert loader.state_dict()["batch"] == 1
    ids = [batch["id"] for batch in loader]
    late.results()
    assert sorted(i for some in ids for i in some.tolist()) == EVERY_ROW
    assert loader.epoch == 2


def test_copies_are_measured(late: LateDevice, table: Path) -> None:
    read = dataset(table)
    assert len(list(Prefetch(Loader(read), DEVICE))) == 16
    stats = read.stats().epoch
    assert stats.waited_seconds is not None
    assert 0 < stats.transfer_seconds <= stats.waited_seconds


def test_memory_of_the_trainer_is_let_go_of(late: LateDevice) -> None:
    """Of what was yielded nothing is kept, so that a trainer that deletes a batch has its memory back."""

    class Kept:
        alive = 0

        def __init__(self) -> None:
            Kept.alive += 1

        def __del__(self) -> None:
            Kept.alive -= 1

    batches = iter(Prefetch((Kept() for _ in range(5)), DEVICE))
    alive = []
    for _ in range(5):
        batch = next(batches)
        del batch
        alive.append(Kept.alive)
    assert max(alive) <= 1


def test_on_the_cpu_batches_are_passed_on(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "DeviceCopier", None)
    made = [torch.ones(2), "text"]
    loader = Prefetch(made, "cpu")
    assert [a is b for a, b in zip(loader, made, strict=True)] == [True, True]
    of_loader = Prefetch(Loader(dataset(table)), torch.device("cpu"))
    for number, batch in enumerate(of_loader, 1):
        assert batch["id"].device.type == "cpu"
        assert of_loader.state_dict()["batch"] == number
    assert (len(of_loader), of_loader.epoch, of_loader.num_workers) == (16, 1, 0)


def test_other_devices_are_moved_to(table: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The meta device, which torch has everywhere, has shapes without values."""
    with caplog.at_level(logging.DEBUG, "pqcache.torch"):
        loader = Prefetch(Loader(dataset(table)), "meta")
        batches = [(batch["id"].device.type, batch["tokens"].offsets.shape, loader.state_dict()) for batch in loader]
    assert [(kind, shape[0]) for kind, shape, _ in batches] == [("meta", 33)] * 15 + [("meta", 21)]
    assert [state["batch"] for *_, state in batches] == list(range(1, 17))
    assert "the trainer waits for copies to meta" in caplog.text


@pytest.mark.parametrize(
    ("device", "count", "reason"),
    [
        ("cuda", 0, "finds no such device here"),
        ("cuda:2", 2, "there are 2 such devices here, counted from 0"),
        ("gpu", 2, "Expected one of"),
        ("cuda:x", 2, "nvalid device string"),
    ],
)
def test_devices_that_are_not_there(device: str, count: int, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    with pytest.raises(UsageError, match=reason) as error:
        Prefetch([], device)
    assert error.value.subject == f"Prefetch(device='{device}')"
    assert "\n" not in str(error.value)


def test_a_loader_with_a_device_is_refused(table: Path) -> None:
    with pytest.raises(UsageError, match="leave out the Loader's device="):
        Prefetch(Loader(dataset(table), device="meta"), DEVICE)


def test_the_order_of_calls_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's interface is patched, with host memory in place of the GPU's: tests/torch/test_on_gpu.py needs a GPU."""
    api = MagicMock()
    api.current_device.return_value = 0
    monkeypatch.setattr(torch, "cpu", api)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda _, stream: stream.is_used_by_a_block())
    stream = DeviceStream(torch.device("cpu"))
    monkeypatch.setattr(stream, "pinned", lambda size: torch.empty(size, dtype=torch.uint8))
    copier = DeviceCopier(stream, 1 << 20)
    api.reset_mock()
    batches = [{"a": torch.arange(3) + i, "b": torch.ones(2) * i} for i in range(4)]
    assert [content(copier.finish(*copier.begin(batch))) for batch in batches] == [content(b) for b in batches]
    copied = ["device", "stream", "Event", "Event().record", "stream().__exit__", "device().__exit__"]
    copied += ["current_stream", "current_stream().wait_event", "current_stream().is_used_by_a_block"]
    calls = [name for name, *_ in api.mock_calls if not name.endswith("__enter__")]
    assert calls == [*copied, *copied, *(["Event().synchronize", *copied] * 2)]
    api.device.assert_called_with(torch.device("cpu", 0))
    api.stream.assert_called_with(api.Stream.return_value)
