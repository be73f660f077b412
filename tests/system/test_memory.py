"""The memory of a training is within its budget and what the documentation adds, and does not grow."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pqcache
from pqcache.system.buffers import Buffer, BufferPool
from tests.test_docs import ROOT

OF_RANK, OF_WORKER = 200 << 20, 150 << 20  # as docs/loading.md says
EPOCH, EPOCHS = 16_000 * 8192, 10


@pytest.mark.slow
@pytest.mark.deep
@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="PSS is Linux's")
@pytest.mark.parametrize(("workers", "fixed", "batch_size"), [(0, True, 256), (2, False, 256), (4, True, 64)])
def test_epochs_within_the_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int, fixed: bool, batch_size: int
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import loader_limits

    loader_limits.large_rows(tmp_path / "large", 16_000, fixed)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    found = loader_limits.run("--child", "memory", tmp_path / "large", workers, "200MB", batch_size, EPOCHS)
    assert found["rows"] == EPOCHS * 16_000
    assert found["window"] > 1
    peaks = found["peaks"]
    assert len(peaks) == EPOCHS
    assert max(peaks) <= found["idle"] + pqcache.parse_size("200MB") + OF_RANK + OF_WORKER * workers
    # keeping a quarter of each epoch would add more than an epoch's size from the first half to the second
    assert max(peaks[EPOCHS // 2 :]) <= max(peaks[: EPOCHS // 2]) + EPOCH
    promised = " ".join((ROOT / "docs" / "loading.md").read_text().split())
    assert "at most 200 MB for a rank and 150 MB for each of its workers" in promised


def used(pool: BufferPool) -> int:
    """Return the bytes of all blocks of a pool."""
    return sum(pool._sizes.values())


@given(st.lists(st.tuples(st.integers(0, 8_000_000), st.integers(0, 20)), min_size=1, max_size=60))
def test_a_pool_keeps_hardly_more_than_was_in_use(steps: list[tuple[int, int]]) -> None:
    pool = BufferPool()
    held: list[Buffer] = []
    most = 0
    for size, given_back in steps:
        buffer = pool.acquire(size)
        assert len(buffer) >= size
        assert not any(np.shares_memory(buffer, other) for other in held)
        held.append(buffer)
        most = max(most, sum(map(len, held)))
        largest = max(map(len, [*held, *(idle.buffer for blocks in pool._free.values() for idle in blocks)]))
        assert sum(map(len, held)) <= used(pool) <= most + (16 << 20) + largest
        for _ in range(min(given_back, len(held))):
            pool.release(held.pop(0))
    held.clear()
    del buffer
    pool._free.clear()
    assert used(pool) == 0


def test_blocks_that_were_idle_for_the_longest_time_are_freed_first() -> None:
    """What an epoch uses all the time is kept, whatever sizes are asked for once."""
    pool = BufferPool()
    regular = [pool.acquire(3 << 20) for _ in range(8)]
    places = {block.ctypes.data for block in regular}
    for size in range(50, 150):  # each of another size
        for block in regular:
            pool.release(block)
        pool.release(pool.acquire(size * (100 << 10)))
        regular = [pool.acquire(3 << 20) for _ in range(8)]
        assert {block.ctypes.data for block in regular} == places


def test_a_collection_while_blocks_are_freed_does_not_disturb_that() -> None:
    """Before Python 3.12 it may begin at any allocation, and what runs then may ask for a size never seen before."""
    pool = BufferPool()
    for size in range(200):
        pool._free[size << 16].clear()
    sizes = iter(range(1, 1000))

    class Cycle:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            assert not pool._free[next(sizes)]

    threshold = gc.get_threshold()
    pairs = [(number, object()) for number in range(3000)]  # so that none is left to be used again
    gc.freeze()  # so that collections do not go through the objects of all tests
    try:
        for later in range(0, 400, 10):
            gc.collect()
            Cycle()
            gc.set_threshold(gc.get_count()[0] + later, 1000, 1000)
            pool._free_idle(1)
            gc.set_threshold(*threshold)
    finally:
        gc.set_threshold(*threshold)
        gc.unfreeze()
    assert len(pairs) == 3000


def test_borrowed_blocks_are_released_with_the_last_array() -> None:
    pool = BufferPool()
    lent = pool.borrow(3 << 20)
    place, part = lent.ctypes.data, lent[5:].view("u1")
    del lent
    assert pool.acquire(3 << 20).ctypes.data != place
    del part
    assert pool.acquire(3 << 20).ctypes.data == place


def test_memory_is_freed_with_its_pool() -> None:
    pool = BufferPool()
    pool.release(pool.acquire(1 << 20))
    gone = [weakref.ref(pool)]
    gc.disable()  # reference counts have to suffice
    try:
        del pool
        assert [found() for found in gone] == [None]
    finally:
        gc.enable()
