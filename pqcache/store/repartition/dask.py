"""An executor over the workers of a Dask cluster."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor
from contextlib import contextmanager
from typing import Any

from pqcache.errors import SourceUnavailable, UsageError
from pqcache.store.repartition.executor import CONNECT, ClusterExecutor, Settle, check_address


class DaskExecutor(ClusterExecutor):
    """The workers of the scheduler that ``client`` is connected to. Jobs that have begun end, whatever is cancelled."""

    def __init__(self, client: Any, scheduler: str) -> None:
        super().__init__(scheduler)
        self._client, self._run = client, os.urandom(4).hex()
        self._begun: set[Any] = set()

    @property
    def no_worker(self) -> str:
        if self._client.scheduler_info(n_workers=-1)["workers"]:
            return ""
        return f"no worker is there yet; waiting for one ('dask worker {self.scheduler}')"

    def on_workers(self, function: Callable[[str], Any], argument: str) -> list[tuple[str, Any]]:
        found = self._client.run(function, argument, on_error="return")
        # an OSError: a worker that has just died, which the scheduler is about to notice
        return [(worker, value) for worker, value in found.items() if not isinstance(value, OSError)]

    def begin(self, function: Callable[..., Any], arguments: tuple[Any, ...], name: str, settle: Settle) -> None:
        begun = self._client.submit(function, *arguments, key=f"pqcache-{self._run}-{name}", pure=False)
        self._begun.add(begun)

        def result() -> Any:
            self._begun.discard(begun)
            try:
                return begun.result()
            except Exception as error:
                if type(error).__name__ == "KilledWorker":
                    raise BrokenExecutor from error
                raise

        begun.add_done_callback(lambda _: settle(result))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._client.cancel(list(self._begun), force=True)


@contextmanager
def dask_executor(scheduler: str) -> Iterator[DaskExecutor]:
    try:
        from distributed import Client
    except ImportError as error:
        advice = "install it with: pip install 'pqcache[dask]'"
        raise UsageError("--scheduler", "needs Dask's distributed", advice) from error
    unreachable = SourceUnavailable(
        scheduler, "no Dask scheduler answers", "check the address, and that 'dask scheduler' runs there"
    )
    check_address(scheduler, ("tcp", "tls"), "tcp://host:8786, or ray://host:10001 for Ray", unreachable)
    for name in ("distributed.client", "distributed.core", "distributed.utils", "distributed.comm"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # what they report is raised here as well
    untyped: Any = Client
    try:
        client = untyped(scheduler, timeout=CONNECT, set_as_default=False)
    except (OSError, ValueError, RuntimeError) as error:
        raise unreachable from error
    try:
        yield DaskExecutor(client, scheduler)
    finally:
        client.close()
