"""Batches in shared memory, and children that are forked while the trainer holds some of them."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from pqcache.system import buffer_pool
from pqcache.system.process_identity import is_running
from pqcache.torch import Batch, ParquetDataset, shared_memory
from pqcache.torch.shared_memory import SharedPool, Slot, received, worker_pool
from pqcache.torch.transport import message_of, value_of

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="this system has no shared memory of this kind")

_FORK = torch.multiprocessing.get_context("fork")


def _read_later(column: torch.Tensor, go_on: Any, answer: Any) -> None:
    torch.set_num_threads(1)  # OpenMP does not survive a fork
    go_on.wait(60)
    answer.put(column.tolist()[::100])


def test_a_forked_child_keeps_its_batch_while_training_goes_on(tmp_path: Path) -> None:
    ids = np.arange(1_600_000)
    pq.write_table(pa.table({"id": ids}), tmp_path / "t.parquet", row_group_size=20_000)
    expected, children, go_on = [], [], _FORK.Event()
    for batch in DataLoader(ParquetDataset(tmp_path, batch_size=20_000, shuffle=False), batch_size=None, num_workers=1):
        if batch.index % 8 == 0:
            answer = _FORK.SimpleQueue()
            child = _FORK.Process(target=_read_later, args=(batch["id"], go_on, answer))
            child.start()
            children.append((child, answer))
            expected.append(batch["id"].tolist()[::100])
    go_on.set()
    found = [answer.get() for _, answer in children]
    for child, _ in children:
        child.join(60)
        assert child.exitcode == 0
    assert found == expected


def _send_numbered(there: Any, back: Any) -> None:
    """Send batches, each when it is asked for; then how many slots there are, and are mapped and open."""
    torch.set_num_threads(1)
    mapped, opened = _mapped_and_open()
    pool = worker_pool()
    assert isinstance(pool, SharedPool)
    for number in iter(back.get, None):
        memory = torch.from_numpy(pool.borrow(100_000))
        memory[:] = number
        batch = Batch({"a": memory})
        del memory
        there.put(batch)
        del batch
    mapped_now, opened_now = _mapped_and_open()
    there.put((len(pool._slots), mapped_now - mapped, opened_now - opened))


def _mapped_and_open() -> tuple[int, int]:
    """Return how many slots this process has mapped, and how many descriptors of slots are open."""
    mapped = Path("/proc/self/maps").read_text().count("pqcache-batch")
    return mapped, sum("pqcache-batch" in os.readlink(entry.path) for entry in os.scandir("/proc/self/fd"))


def _fork_and_end() -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)


def test_retired_memory_is_given_back() -> None:
    mapped, _ = _mapped_and_open()
    there, back = _FORK.Queue(), _FORK.Queue()
    sender = _FORK.Process(target=_send_numbered, args=(there, back))
    sender.start()
    kept = []
    for number in range(30):
        back.put(number)
        batch = there.get(timeout=60)
        assert bool((batch["a"] == number).all())
        kept.append((number, batch["a"]))
        _fork_and_end()  # the slot is retired
        if number % 3 == 2:
            assert all(bool((column == made).all()) for made, column in kept)
            kept.clear()
        del batch
    back.put(None)
    counts = there.get(timeout=60)
    sender.join(60)
    assert sender.exitcode == 0
    assert max(counts) <= 4, "of 30 slots, which all were retired"
    assert _mapped_and_open()[0] - mapped <= 4


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(1, 6_000_000), st.integers(0, 8), st.booleans()), min_size=1, max_size=60))
def test_slots_take_hardly_more_than_was_in_use(steps: list[tuple[int, int, bool]]) -> None:
    pool = SharedPool()
    held: list[tuple[int, np.ndarray]] = []
    most = 0
    for number, (size, given_back, is_sent) in enumerate(steps):
        memory = pool.borrow(size)
        memory[:] = number % 251
        slot = pool.slot_of(memory.ctypes.data, size)
        assert slot is not None
        if is_sent and (sent := slot.send()) is not None:
            memory = received(sent)[:size]
        held.append((number, memory))
        taken = [(slot.free, os.fstat(slot.descriptor).st_blocks * 512) for slot in pool._slots]
        most = max(most, sum(size for free, size in taken if not free))
        assert sum(size for _, size in taken) <= most + (16 << 20) + size + 4096 * len(taken)
        for _ in range(min(given_back, len(held))):
            made, memory = held.pop(0)
            assert (memory == made % 251).all()
    del memory
    held.clear()
    assert all(slot.free for slot in pool._slots)
    for slot in pool._slots:
        slot.close()


def _taken(pool: SharedPool) -> int:
    """Return the bytes that the slots take, without their headers."""
    return sum(os.fstat(slot.descriptor).st_blocks * 512 - 4096 for slot in pool._slots)


def _borrow(pool: SharedPool, size: int, count: int = 1) -> list[np.ndarray]:
    found = [pool.borrow(size) for _ in range(count)]
    for memory in found:
        memory[:] = 1
    return found


def test_a_small_batch_takes_memory_of_a_larger_one_rather_than_new_memory() -> None:
    pool = SharedPool()
    for size in (8 << 20, 5 << 20, 1_100_000):
        _borrow(pool, size)
        assert len(pool._slots) == 1
    _borrow(pool, 1 << 19)
    assert sorted(len(slot.buffer) for slot in pool._slots) == [1 << 19, 8 << 20]
    for slot in pool._slots:
        slot.close()


def test_slots_that_were_emptied_and_grow_again_give_back_what_others_take() -> None:
    pool = SharedPool()
    for _ in range(2):
        for size, count in ((6_000_000, 10), (1_000_000, 60), (1_100_000, 10), (6_000_000, 10)):
            _borrow(pool, size, count)
        assert _taken(pool) <= 10 * 6_000_000 + (16 << 20) + 6_000_000
    for slot in pool._slots:
        slot.close()


def test_small_batches_that_are_kept_do_not_keep_large_slots() -> None:
    pool, kept = SharedPool(), []
    for _ in range(50):
        _borrow(pool, 8 << 20)
        kept += _borrow(pool, (1 << 20) + 1)
    assert _taken(pool) <= (50 << 20) + (8 << 20) + 2 * (16 << 20)
    kept.clear()
    for slot in pool._slots:
        slot.close()


def test_a_batch_whose_slot_has_too_many_receivers_carries_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "_pool", None)  # this process is no worker afterwards
    monkeypatch.setattr(Slot, "send", lambda _: None)
    shared, column = worker_pool(), torch.arange(100_000)
    assert isinstance(shared, SharedPool)
    message = message_of({"column": column})
    assert isinstance(message.content, bytes)
    assert torch.equal(value_of(message)["column"], column)
    assert all(slot.free for slot in shared._slots)


def test_a_fork_of_the_worker_keeps_what_the_worker_makes() -> None:
    answer = _FORK.SimpleQueue()
    worker = _FORK.Process(target=_fork_with_memory, args=(answer,))
    worker.start()
    assert answer.get() == 7
    worker.join(60)


def _fork_with_memory(answer: Any) -> None:
    pool = worker_pool()
    memory = pool.borrow(100_000)
    memory[:] = 7
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(read, 1)
        os._exit(int(memory.max()))
    del memory
    pool.borrow(100_000)[:] = 9
    os.write(write, b"x")
    answer.put(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


def test_threads_receive_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those do that pin the batches of two loaders: each maps slots that are new to it and looks for old ones."""
    monkeypatch.setattr(shared_memory, "_mapped", {})
    slots = [Slot(4096) for _ in range(200)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(_receive_again_and_again, [slots[number::4] for number in range(4)]))
    finally:
        sys.setswitchinterval(interval)
        for slot in slots:
            slot.close()


def _receive_again_and_again(slots: list[Slot]) -> None:
    for _ in range(150):
        for slot in slots:
            reference = slot.send()
            assert reference is not None
            assert len(received(reference)) == 4096
        for slot in slots:
            shared_memory._mapped.pop(slot.token, None)


@pytest.mark.parametrize("ends", ["descriptors first", "first thread first"])
def test_memory_of_a_worker_that_is_ending_is_asked_for_until_it_has_ended(ends: str) -> None:
    there = _FORK.SimpleQueue()
    worker = _FORK.Process(target=_close_memory_and_end, args=(there, ends == "first thread first"))
    worker.start()
    reference = there.get()
    while ends == "first thread first" and is_running(reference.pid):
        time.sleep(0.001)
    with pytest.raises(RuntimeError, match="has the worker been killed"):
        received(reference)
    assert not worker.is_alive()  # what DataLoader looks at to name it


def _close_memory_and_end(there: Any, first_thread: bool) -> None:
    """End 0.3 s after the memory; before it, if wanted, the first thread alone: a zombie whose others still run."""
    slot = Slot(4096)
    reference = slot.send()
    slot.close()
    there.put(reference)
    if first_thread:
        threading.Thread(target=lambda: time.sleep(0.3) or os._exit(1)).start()
        ctypes.CDLL(None).pthread_exit(None)
    time.sleep(0.3)


@pytest.mark.parametrize("kind", [buffer_pool._Borrowed, shared_memory._BorrowedSlot])
def test_an_interrupt_before_memory_is_borrowed_leaves_no_second_error(kind: Any) -> None:
    kind.__new__(kind).__del__()
