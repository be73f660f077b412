"""A process may fork beside threads that read: no child inherits a held lock of Arrow's allocator."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pqcache.reader.epoch import read_record_batches
from pqcache.reader.epoch_options import BatchOptions, RowOptions
from pqcache.reader.open_dataset import open_local_dataset
from pqcache.reader.read_plan import make_read_plan
from pqcache.system import threads
from pqcache.system.threads import ForkSafeThreadPool
from tests.examples import examples
from tests.waiting import becomes_true


def status_of(child: int) -> int:
    """Wait for a process and return its exit status."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_fork_waits_for_running_jobs() -> None:
    begun, done = threading.Event(), []

    def job() -> None:
        begun.set()
        time.sleep(0.3)
        done.append(1)

    with ForkSafeThreadPool(2) as pool:
        pool.submit(job)
        begun.wait()
        child = os.fork()
        if child == 0:
            with ForkSafeThreadPool(1) as fresh:  # the fork that it is made in does not hold it up
                answer = fresh.submit(lambda: 7 if done else 8).result(10)
            os._exit(answer)
        assert status_of(child) == 7
        assert pool.submit(lambda: 9).result(10) == 9


def test_a_job_may_fork() -> None:
    def job() -> int:
        child = os.fork()
        if child == 0:
            os._exit(5)
        return status_of(child)

    with ForkSafeThreadPool(1) as pool:
        assert pool.submit(job).result(threads._MAX_WAIT / 2) == 5


def test_a_fork_waits_for_threads_that_end() -> None:
    go_on = threading.Event()

    class Slow:
        def __del__(self) -> None:
            go_on.wait(60)

    local, begun = threading.local(), []

    def job() -> None:
        begun.append(threading.get_native_id())
        local.slow = Slow()  # freed with its thread

    pool = ForkSafeThreadPool(1)
    pool.submit(job).result()
    pool.shutdown(wait=False)
    assert Path(f"/proc/self/task/{begun[0]}").exists()
    timer = threading.Timer(0.3, go_on.set)
    timer.start()
    try:
        threads._before_fork()
        assert not Path(f"/proc/self/task/{begun[0]}").exists()
    finally:
        threads._after_fork()
    timer.join()
    assert begun[0] not in threads._shutdown  # ended threads are forgotten


def test_a_fork_does_not_wait_for_a_thread_that_waits_for_it() -> None:
    """The pool is shut down while its thread waits to begin a job."""
    pool = ForkSafeThreadPool(1)
    pool.submit(int).result()
    threads._gate.forking.add(0)  # another thread forks
    try:
        job = pool.submit(lambda: 6)
        while not threads._gate.waiting:
            time.sleep(0.01)
        pool.shutdown(wait=False)
        start = time.monotonic()
        child = os.fork()
        if child == 0:
            os._exit(3)
        assert time.monotonic() - start < threads._MAX_WAIT / 2
    finally:
        threads._gate.forking.discard(0)
    assert status_of(child) == 3
    assert job.result(2 * threads._MAX_WAIT) == 6


def test_ctrl_c_while_a_fork_waits_comes_after_it() -> None:
    begun, done, children = threading.Event(), [], []

    def job() -> None:
        begun.set()
        if becomes_true(lambda: bool(threads._gate.forking)):
            os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.1)
        done.append(1)

    def fork() -> None:
        children.append(os.fork())
        if children[0] == 0:
            os._exit(len(done))
        time.sleep(10)

    with ForkSafeThreadPool(1) as pool:
        pool.submit(job)
        begun.wait()
        with pytest.raises(KeyboardInterrupt):
            fork()
    assert status_of(children[0]) == 1


def test_a_fork_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_MAX_WAIT", 0.1)
    go, begun = threading.Event(), threading.Event()

    def job() -> None:
        begun.set()
        go.wait(60)

    with ForkSafeThreadPool(1) as pool:
        pool.submit(job)
        begun.wait()
        child = os.fork()
        if child == 0:
            os._exit(3)
        go.set()
    assert status_of(child) == 3


def reading(root: Path) -> Callable[[], Any]:
    batches = read_record_batches(root, BatchOptions())
    return lambda: next(batches)


def counting(root: Path) -> Callable[[], Any]:
    data, _ = open_local_dataset(root)
    return lambda: make_read_plan(data, None, RowOptions(filters="id BETWEEN 3 AND 50")).counts


@pytest.mark.parametrize("prepare", [reading, counting])
def test_all_that_a_loader_does_waits_for_a_fork(tmp_path: Path, prepare: Callable[[Path], Callable[[], Any]]) -> None:
    pq.write_table(pa.table({"id": range(100)}), tmp_path / "a.parquet")
    job, found = prepare(tmp_path), []
    threads._before_fork()
    try:
        thread = threading.Thread(target=lambda: found.append(job()))
        thread.start()
        thread.join(0.2)
        assert not found
    finally:
        threads._after_fork()
    thread.join(30)
    assert len(found) == 1


def test_a_fork_does_not_wait_for_a_job_that_waits() -> None:
    begun, end, after = threading.Event(), threading.Event(), []

    def job() -> None:
        with threads.letting_forks_go_on():
            begun.set()
            end.wait(20)
        after.append(threading.get_native_id() in threads._gate.running)

    with ForkSafeThreadPool(1) as pool:
        done = pool.submit(job)
        begun.wait()
        child = os.fork()  # else after _MAX_WAIT, when the job would not be waiting any more
        if child == 0:
            os._exit(6)
        assert status_of(child) == 6
        assert not done.done()
        end.set()
        done.result(20)
        assert after == [True]
        pool.shutdown(wait=False)
        assert not threads.is_shut_down()  # this is no thread of a pool


class Waiting:
    """A job that runs until it is let go, and returns the id of its thread."""

    def __init__(self) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()

    def __call__(self) -> int:
        self.begun.set()
        assert self.go_on.wait(60)
        return threading.get_native_id()


def test_some_jobs_come_before_others() -> None:
    wait, order = Waiting(), list[int]()
    with ForkSafeThreadPool(1) as pool:
        pool.submit(wait)
        assert wait.begun.wait(60)
        jobs = [submit(partial(order.append, n)) for n, submit in enumerate([pool.submit, pool.submit_first] * 3)]
        wait.go_on.set()
        for job in jobs:
            job.result(10)
    assert order == [1, 3, 5, 0, 2, 4]


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(1, 4), st.integers(1, 4), st.lists(st.booleans(), max_size=40), st.booleans(), st.integers(0, 20))
def test_every_job_ends(count: int, at_once: int, kinds: list[bool], cancel: bool, later: int) -> None:
    running, most, lock = [0], [0], threading.Lock()

    def job() -> None:
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        time.sleep(0.0002)
        with lock:
            running[0] -= 1

    pool = ForkSafeThreadPool(count, at_once)
    jobs = [pool.submit_first(int) if first else pool.submit(job) for first in kinds]
    time.sleep(0.0001 * later)
    pool.shutdown(cancel_futures=cancel)
    assert all(job.done() for job in jobs)
    assert cancel or not any(job.cancelled() for job in jobs)
    assert most[0] <= at_once
