"""Run the jobs of a repartition on an existing Dask cluster.

The scheduler gives a dead worker's jobs to others.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager
from typing import Any

from pqcache.errors import PqcacheError, SourceUnavailable, UsageError
from pqcache.events import Advanced, OnEvent
from pqcache.store.repartition.cluster_errors import CONNECT, check_address, missing_package, workers_died
from pqcache.store.repartition.partition_job import PartitionJob, run_job
from pqcache.store.repartition.target_record import DirectoryResult


class DaskCluster:
    """The workers of the scheduler that ``client`` is connected to (see `Cluster`)."""

    def __init__(self, client: Any, scheduler: str) -> None:
        self._client, self._scheduler = client, scheduler

    @property
    def no_worker(self) -> str:
        """What to tell the user where no worker is there."""
        if self._client.scheduler_info(n_workers=-1)["workers"]:
            return ""
        return f"no worker is there yet; waiting for one ('dask worker {self._scheduler}')"

    def on_workers(self, function: Callable[[str], Any], argument: str) -> list[tuple[str, Any]]:
        """Return each worker's address with what ``function`` returns there, or raises."""
        found = self._client.run(function, argument, on_error="return")
        # an OSError: a worker that has just died, which the scheduler is about to notice
        return [(worker, value) for worker, value in found.items() if not isinstance(value, OSError)]

    def results(
        self, todo: Sequence[PartitionJob], on_event: OnEvent
    ) -> Iterator[tuple[PartitionJob, DirectoryResult]]:
        """Do the jobs; yield each with its result, as they end.

        Raises what a job raises. Jobs that have begun then end on their workers.
        """
        from distributed import as_completed

        in_order: Any = as_completed
        client, run = self._client, os.urandom(4).hex()
        futures = {client.submit(run_job, job, key=f"pqcache-{run}-{job.name}", pure=False): job for job in todo}
        try:
            for future in in_order(list(futures), loop=client.loop):
                job = futures[future]
                result = _result(future, job, client.scheduler.address)
                on_event(Advanced("rewrite", job.size))
                yield job, result
        finally:
            client.cancel(list(futures), force=True)


@contextmanager
def dask_cluster(scheduler: str) -> Iterator[DaskCluster]:
    """Yield the cluster of a scheduler."""
    client = _client(scheduler)
    try:
        yield DaskCluster(client, scheduler)
    finally:
        client.close()


def _client(scheduler: str) -> Any:
    try:
        from distributed import Client
    except ImportError as error:
        raise UsageError(
            "--scheduler", "needs Dask's distributed", "install it with: pip install 'pqcache[dask]'"
        ) from error
    unreachable = SourceUnavailable(
        scheduler, "no Dask scheduler answers", "check the address, and that 'dask scheduler' runs there"
    )
    check_address(scheduler, ("tcp", "tls"), "tcp://host:8786, or ray://host:10001 for Ray", unreachable)
    for name in ("distributed.client", "distributed.core", "distributed.utils", "distributed.comm"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # what they report is raised here as well
    untyped: Any = Client
    try:
        return untyped(scheduler, timeout=CONNECT, set_as_default=False)
    except (OSError, ValueError, RuntimeError) as error:
        raise unreachable from error


def _result(future: Any, job: PartitionJob, scheduler: str) -> DirectoryResult:
    """Return what a job returned, or raise what a user can act on."""
    name = f"partition {job.name}"
    try:
        done: DirectoryResult = future.result()
        return done
    except PqcacheError:
        raise
    except CancelledError as error:
        raise SourceUnavailable(
            scheduler, f"the scheduler is gone or has dropped {name}", "start it again and run the same command"
        ) from error
    except ImportError as error:
        raise missing_package(name, error) from error
    except Exception as error:
        if type(error).__name__ == "KilledWorker":
            raise workers_died(name) from error
        raise
