"""Workers on other machines behind the interface of ``concurrent.futures``, whichever kind of cluster has them."""

from __future__ import annotations

import socket
from abc import abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import BrokenExecutor, CancelledError, Executor, Future
from functools import partial
from typing import Any, ParamSpec, TypeVar
from urllib.parse import urlsplit

from pqcache.errors import PqcacheError, SourceUnavailable, UsageError

CONNECT = 10.0  # seconds

P = ParamSpec("P")
T = TypeVar("T")
Settle = Callable[[Callable[[], Any]], None]  # gives a future what a call returns or raises


class ClusterExecutor(Executor):
    """An executor whose workers are those of a cluster, in processes that have only pqcache in common with this one.

    An engine does the job again of a worker that died. If it gives up, the job's call raises BrokenExecutor, and
    CancelledError if the engine no longer knows the job.
    """

    def __init__(self, scheduler: str) -> None:
        self.scheduler = scheduler

    @property
    @abstractmethod
    def no_worker(self) -> str:
        """A message for the user while no worker has joined; empty once one has."""

    @abstractmethod
    def on_workers(self, function: Callable[[str], Any], argument: str) -> list[tuple[str, Any]]:
        """Return the address of each worker with what ``function`` returns there, or raises.

        Only functions of the standard library are sent, as pqcache may be what is missing. Workers that have just died
        are left out.
        """

    @abstractmethod
    def begin(self, function: Callable[..., Any], arguments: tuple[Any, ...], name: str, settle: Settle) -> None:
        """Start ``function`` on a worker; when it ends, ``settle`` is called from any thread."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()
        name = " ".join(map(str, args))
        self.begin(partial(fn, **kwargs) if kwargs else fn, args, name, partial(self._settle, future, name))
        return future

    def _settle(self, future: Future[T], name: str, result: Callable[[], T]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(result())
        except BaseException as error:  # noqa: BLE001  raised where the result is asked for
            future.set_exception(self._explained(name, error))

    def _explained(self, name: str, error: BaseException) -> BaseException:
        """Turn ``error`` into one that a user can act on."""
        explained: PqcacheError
        if isinstance(error, PqcacheError):
            return error
        if isinstance(error, CancelledError):
            reason = f"the cluster is gone or has dropped {name}"
            explained = SourceUnavailable(self.scheduler, reason, "start it again and run the same command")
        elif isinstance(error, ImportError):
            explained = UsageError(name, f"a worker lacks a package ({error})", "install it there")
        elif isinstance(error, BrokenExecutor):
            advice = "give them more memory, or smaller --row-group-size"
            explained = PqcacheError(name, "its workers died again and again", advice)
        else:
            return error
        explained.__cause__ = error
        return explained


def check_address(scheduler: str, schemes: Sequence[str], example: str, unreachable: SourceUnavailable) -> None:
    """Raise UsageError unless an address is like ``example``, and ``unreachable`` if nothing listens there."""
    try:
        place = urlsplit(scheduler)
        if place.scheme not in schemes or not place.hostname or not place.port:
            raise ValueError
    except ValueError:
        raise UsageError(f"--scheduler {scheduler}", f"write it like {example}") from None
    try:
        # Fails sooner than a client does, and leaves no threads.
        socket.create_connection((place.hostname, place.port), CONNECT).close()
    except OSError as error:
        raise unreachable from error
