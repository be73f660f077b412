"""This process's rank among others, checks that all ranks read alike, and iterators in forks."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from contextlib import suppress
from traceback import walk_tb
from typing import Any, TypeVar

from pqcache.errors import PqcacheError, UsageError

T = TypeVar("T")
_POLL = 0.02  # seconds
_TURN = 2.0  # seconds for another thread of a rank to begin the epoch that this one begins
_LAUNCHERS = (  # what holds the number of a process, and how many there are
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
)
_epochs: weakref.WeakKeyDictionary[Any, tuple[int, Counter[str]]] = weakref.WeakKeyDictionary()  # by process group
_of_parents: list[Any] = []
_log = logging.getLogger("pqcache.reader")


def count_and_number() -> tuple[int, int]:
    """The number of processes that train together and this one's, by torch.distributed or JAX; else 1 and 0.

    Imports neither, and asks JAX only if that doesn't start its devices. Raises UsageError if both know of several
    processes and disagree.
    """
    places = {"torch.distributed": of_torch() or (1, 0), "JAX": _of_jax()}
    found = {name: place for name, place in places.items() if place[0] > 1}
    if len(set(found.values())) > 1:
        said = " and ".join(f"{name} says {number} of {count}" for name, (count, number) in found.items())
        raise UsageError("num_replicas and rank", f"this process has conflicting numbers: {said}", "give both options")
    return next(iter(found.values()), (1, 0))


def of_torch() -> tuple[int, int] | None:
    """The number of ranks of torch.distributed and this one; None if it isn't initialised."""
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.get_world_size(), distributed.get_rank()


def is_rank() -> bool:
    """Whether this is one of several ranks of torch.distributed, not counting a DataLoader's workers."""
    data: Any = sys.modules.get("torch.utils.data")
    return (of_torch() or (1, 0))[0] > 1 and (data is None or data.get_worker_info() is None)


def worker_of_torch() -> tuple[int, int]:
    """The number of DataLoader workers that divide the reading, and this one's; else 1 and 0.

    Workers don't divide an item of a map-style dataset, as only one of them is asked for it.
    """
    data: Any = sys.modules.get("torch.utils.data")
    info = None if data is None else data.get_worker_info()
    if info is None or not isinstance(info.dataset, data.IterableDataset):
        return 1, 0
    return info.num_workers, info.id


def check_launched(known: int) -> None:
    """Raise UsageError if a launcher started more processes than are ``known``, as each would read every row.

    torchrun, Open MPI, MPICH and Intel MPI, MVAPICH and Slurm's srun set environment variables.
    """
    if of_torch() is not None:
        return
    for number, count in _LAUNCHERS:
        rank, world = os.environ.get(number, ""), os.environ.get(count, "")
        if not (rank.isdecimal() and world.isdecimal()):
            continue
        is_in_step = "SLURM_STEP_ID" in os.environ or "SLURM_STEPID" in os.environ
        if number == "SLURM_PROCID" and rank == "0" and "SLURM_JOB_ID" in os.environ and not is_in_step:
            continue  # a batch script, which runs once
        if int(world) > known:
            raise UsageError(
                f"{count}={world}",
                "this is one of several processes, and torch.distributed is not initialised: each would read every row",
                f"call init_process_group() before anything is read, or give num_replicas={world} and rank={rank} here "
                "(1 and 0 to read every row in this process)",
            )
        return


def _of_jax() -> tuple[int, int]:
    """JAX's processes, if it is connected or started; asking earlier would start it, and rule out connecting."""
    jax: Any = sys.modules.get("jax")
    if not hasattr(jax, "process_count"):
        return 1, 0
    is_connected = getattr(getattr(jax, "distributed", None), "is_initialized", None)
    is_started = getattr(sys.modules.get("jax._src.xla_bridge"), "backends_are_initialized", None)
    asked = [ask for ask in (is_connected, is_started) if ask is not None]
    if asked and not any(ask() for ask in asked):
        return 1, 0
    return int(jax.process_count()), int(jax.process_index())


MIXING = frozenset(("lanes", "window", "piece", "seed"))  # what ranks may differ in where nothing is shuffled


def check_alike(epoch: Mapping[str, tuple[Any, Any]], patience: float) -> None:
    """Raise the same UsageError on every rank of torch.distributed unless all begin the same epoch.

    If ranks differed in rows or order, rows would come twice or never. ``epoch`` has the values that must be equal, by
    name, and how to show them.

    The ranks meet at the store of their process group. After ``patience`` seconds the others warn of a missing rank,
    while a collective operation would wait for it silently. Threads may begin epochs in any order on each rank.
    """
    distributed: Any = sys.modules["torch.distributed"]
    ranks, rank = distributed.get_world_size(), distributed.get_rank()
    values = json.dumps({name: value for name, (value, _) in epoch.items()}, default=str, sort_keys=True)
    here = json.dumps({"rank": rank, "epoch": epoch}, default=str)
    try:
        store, place, begun = _meeting()
        begun.update(["", values])  # "" counts them all
        nth = f"{place}/{begun['']}"
        first = json.loads(store.compare_set(f"{nth}/first", "", here))
    except RuntimeError:
        _log.warning("ranks are not compared: their process group has no store")
        return
    same = f"{place}/{hashlib.blake2b(values.encode(), digest_size=16).hexdigest()}-{begun[values]}"
    if _difference(first["epoch"], json.loads(here)["epoch"]):
        store.compare_set(f"{nth}/differs", "", here)
    store.add(same, 1)
    deadline, differs = time.monotonic() + patience, False
    while (begun_alike := store.add(same, 0)) < ranks:
        if not differs and store.check([f"{nth}/differs"]):
            differs, deadline = True, time.monotonic() + _TURN
        if time.monotonic() > deadline:
            if differs:
                begun[values] -= 1
                store.add(same, -1)
                raise _unlike(first, json.loads(store.get(f"{nth}/differs")))
            message = (
                "rank %d waited %.0f s for %d of %d ranks to begin this epoch and goes on without them: each has to "
                "read it, and a dataset that only some ranks read needs num_replicas=1, rank=0"
            )
            _log.warning(message, rank, patience, ranks - begun_alike, ranks)
            return
        time.sleep(_POLL)


def agree(what: str, offer: Callable[[], Any], answer: Callable[[Any], None], patience: float) -> dict[int, str]:
    """Let all ranks of torch.distributed answer an offer of rank 0; return the objections, the same on all.

    Rank 0 calls ``offer``, which returns a JSON value, and all ranks call ``answer`` with it. An objection is a
    PqcacheError or OSError raised by one of them. Waits for missing ranks, with a warning every ``patience`` seconds.
    Raises UsageError if the process group has no store to meet at.
    """
    distributed: Any = sys.modules["torch.distributed"]
    ranks, rank = distributed.get_world_size(), distributed.get_rank()
    try:
        store, place, begun = _meeting()
        begun.update([what])
        nth = f"{place}/{what}/{begun[what]}"
    except RuntimeError as error:
        reason = "ranks agree through the store of their process group, and it has none"
        raise UsageError(what, reason, "use gloo or nccl") from error

    def attempt(act: Callable[..., Any], *given: Any) -> tuple[Any, str]:
        try:
            return act(*given), ""
        except (PqcacheError, OSError) as error:
            return None, str(error)

    def wait(name: str, of: int) -> Any:
        deadline = time.monotonic() + patience
        while not store.check([f"{nth}/{name}"]):
            if time.monotonic() > deadline:
                message = "%s: rank %d waits for rank %d, which has not begun this epoch yet; every rank has to"
                _log.warning(message, what, rank, of)
                deadline += patience
            time.sleep(_POLL)
        return json.loads(store.get(f"{nth}/{name}"))

    if rank == 0:
        store.set(f"{nth}/offer", json.dumps(attempt(offer)))
    offered, failure = wait("offer", 0)
    if failure:
        return {0: failure}
    store.set(f"{nth}/{rank}", json.dumps(attempt(answer, offered)[1]))
    if rank == 0:
        answers = {number: wait(str(number), number) for number in range(ranks)}
        store.set(f"{nth}/all", json.dumps([[number, text] for number, text in answers.items() if text]))
    return dict(wait("all", 0))


def _meeting() -> tuple[Any, str, Counter[str]]:
    """The store of the process group, a prefix of keys for this group, and the number of meetings so far.

    Raises RuntimeError for MPI and torch's fake process group, which have no store.
    """
    distributed: Any = sys.modules["torch.distributed"]
    group, store = distributed.group.WORLD, distributed.distributed_c10d._get_default_store()
    if group not in _epochs:  # a process group may have the store of one before
        _epochs[group] = (store.add("pqcache/ranks", 1) - 1) // distributed.get_world_size(), Counter()
    number, begun = _epochs[group]
    return store, f"pqcache/{number}", begun


def _unlike(one: Mapping[str, Any], two: Mapping[str, Any]) -> UsageError:
    found = _difference(one["epoch"], two["epoch"])
    assert found is not None
    name, value, other = found
    return UsageError(
        "ranks",
        f"rank {one['rank']} begins an epoch with {name}={value!r}, rank {two['rank']} with {name}={other!r}: rows "
        "would come twice or never",
        "give every rank the same snapshot and options and begin epochs in the same order; a dataset that one rank "
        "reads alone needs num_replicas=1, rank=0",
    )


def _difference(one: Mapping[str, Any], two: Mapping[str, Any]) -> tuple[str, Any, Any] | None:
    for name in sorted({**one, **two}, key=lambda name: not name.endswith("snapshot")):  # most else follows from it
        (value, shown), (other, other_shown) = one.get(name, (None, None)), two.get(name, (None, None))
        if value != other:
            return name, shown, other_shown
    return None


def of_this_process(items: Generator[T], what: str) -> Generator[T]:
    """Pass items on; raises UsageError in a forked process, which lacks the threads that read."""
    process = os.getpid()

    def read() -> Generator[T]:
        try:
            _check_process(what, process)
            for item in items:
                yield item
                del item
                _check_process(what, process)
        except Exception as error:
            _clear_frames(error)
            raise
        finally:
            if process == os.getpid():
                items.close()
            else:
                leave_to_parent(items)

    return read()


def _clear_frames(error: BaseException) -> None:
    """Free the rows in pqcache's frames of an error's traceback, which would live as long as the error."""
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        one = left.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        left += [one.__cause__, one.__context__]
        for frame, _ in walk_tb(one.__traceback__):
            if frame.f_globals.get("__name__", "").partition(".")[0] == "pqcache":
                with suppress(RuntimeError):  # it still runs
                    frame.clear()


def _check_process(what: str, process: int) -> None:
    if process != os.getpid():
        raise UsageError(
            what,
            f"this iterator was made in process {process} and cannot go on in a fork, which has none of its threads",
            "make the iterator in the process that reads it, in a DataLoader's dataset within __iter__; "
            'multiprocessing_context="forkserver" forks no iterators',
        )


def leave_to_parent(inherited: object) -> None:
    """Keep an object of the parent alive, since closing it would close resources that the parent uses."""
    _of_parents.append(inherited)
