"""Batches in shared memory, and children that are forked while the trainer holds some of them."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from pqcache.system.processes import is_running
from pqcache.torch import Batch, ParquetDataset, transport
from pqcache.torch.transport import Slot, message_of, value_of
from tests.examples import examples

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="this system has no shared memory of this kind")

_FORK = torch.multiprocessing.get_context("fork")


def _read_later(column: torch.Tensor, go_on: Any, answer: Any) -> None:
    torch.set_num_threads(1)  # OpenMP does not survive a fork
    go_on.wait(60)
    answer.put(column.tolist()[::100])


def test_a_forked_child_keeps_its_batch_while_training_goes_on(tmp_path: Path) -> None:
    ids = np.arange(500_000)
    pq.write_table(pa.table({"id": ids}), tmp_path / "t.parquet", row_group_size=20_000)
    expected, children, go_on = [], [], _FORK.Event()
    for batch in DataLoader(ParquetDataset(tmp_path, batch_size=20_000, shuffle=False), batch_size=None, num_workers=1):
        if batch.index % 6 == 0:
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
    for number in iter(back.get, None):
        there.put(Batch({"a": torch.full((100_000,), number, dtype=torch.uint8)}))
    mapped_now, opened_now = _mapped_and_open()
    there.put((len(transport._slots().all), mapped_now - mapped, opened_now - opened))


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
    for number in range(12):
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
    assert max(counts) <= 4, "of 12 slots, which all were retired"
    assert _mapped_and_open()[0] - mapped <= 4


@pytest.fixture
def slots(monkeypatch: pytest.MonkeyPatch) -> Iterator[transport.Slots]:
    """The slots of this process, which is no worker afterwards."""
    found = transport.Slots()
    monkeypatch.setattr(transport, "_own", found)
    yield found
    for slot in found.all:
        slot.close()


def _sent(size: int, value: int = 1) -> torch.Tensor:
    """Return what a trainer makes of a message of this size."""
    found: torch.Tensor = value_of(message_of(torch.full((size,), value, dtype=torch.uint8)))
    return found


def _taken(slot: Slot) -> int:
    """Return the bytes that a slot takes, without its header."""
    return os.fstat(slot.reference.descriptor).st_blocks * 512 - transport._HEADER


@settings(max_examples=examples(120), suppress_health_check=[HealthCheck.function_scoped_fixture])
@example([(100_000, 0), (100_000, 1)])  # the second must not have the memory of the first
@given(st.lists(st.tuples(st.integers(1, 6_000_000), st.integers(0, 8)), min_size=1, max_size=60))
def test_slots_take_hardly_more_than_was_in_use(slots: transport.Slots, steps: list[tuple[int, int]]) -> None:
    held: list[tuple[int, torch.Tensor]] = []
    slots._most = most = 0
    for slot in slots.all:
        slot.empty()
    for number, (size, given_back) in enumerate(steps):
        held.append((number, _sent(size, number % 251)))
        most = max(most, sum(_taken(slot) for slot in slots.all if slot.state))
        assert sum(map(_taken, slots.all)) <= most + (16 << 20) + size
        assert all(bool((memory == made % 251).all()) for made, memory in held[:given_back])
        del held[:given_back]
    held.clear()
    assert not any(slot.state for slot in slots.all)


def test_threads_receive_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those do that pin the batches of two loaders: each maps slots that are new to it and looks for old ones."""
    monkeypatch.setattr(transport, "_mapped", {})
    slots = [Slot(4096) for _ in range(100)]
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
    for _ in range(4):
        for slot in slots:
            slot.take(4096)
            assert len(transport._bytes_of(slot.reference)) == 4096
        for slot in slots:
            transport._mapped.pop(slot.reference.token, None)


@pytest.mark.parametrize("ends", ["descriptors first", "first thread first"])
def test_memory_of_a_worker_that_is_ending_is_asked_for_until_it_has_ended(ends: str) -> None:
    there = _FORK.SimpleQueue()
    worker = _FORK.Process(target=_close_memory_and_end, args=(there, ends == "first thread first"))
    worker.start()
    message = there.get()
    while ends == "first thread first" and is_running(message.content.process):
        time.sleep(0.001)
    with pytest.raises(RuntimeError, match="it may have been killed"):
        value_of(message)
    assert not worker.is_alive()  # what DataLoader looks at to name it


def _close_memory_and_end(there: Any, first_thread: bool) -> None:
    """End 0.3 s after the memory; before it, if wanted, the first thread alone: a zombie whose others still run."""
    message = message_of(np.zeros(100_000))
    transport._slots().all[0].close()
    there.put(message)
    if first_thread:
        threading.Thread(target=lambda: time.sleep(0.3) or os._exit(1)).start()
        ctypes.CDLL(None).pthread_exit(None)
    time.sleep(0.3)
