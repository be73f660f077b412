"""Run the jobs of a repartition on an existing Dask cluster.

The scheduler gives a dead worker's jobs to others. Jobs publish a partition in one step and make the same bytes
wherever they run, so one that is done twice does no harm.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from pqcache.errors import PqcacheError, SourceUnavailable, UsageError
from pqcache.events import Advanced, OnEvent, Warned
from pqcache.store.repartition.partition_job import PartitionJob, run_job
from pqcache.store.repartition.target_record import DirectoryResult
from pqcache.store.urls import url_scheme
from pqcache.units import format_count

_CONNECT = 10.0  # seconds
_PACKAGES = ("pqcache", "pyarrow")  # the bytes that are written depend on both


@contextmanager
def connected(scheduler: str, todo: Sequence[PartitionJob], on_event: OnEvent) -> Iterator[Any]:
    """Yield a client of a cluster whose workers can do ``todo``.

    Raises SourceUnavailable where no scheduler answers, UsageError where a worker has another version or does not see
    the source. Workers that come later are checked by their jobs.
    """
    client = _client(scheduler)
    try:
        if not client.scheduler_info(n_workers=-1)["workers"]:
            on_event(Warned(f"{scheduler}: no worker is there yet; waiting for one ('dask worker {scheduler}')"))
        _check_packages(client)
        if todo and url_scheme(todo[0].endpoints.source) in ("", "file"):
            check_seen(client, todo[0].endpoints.source)
        yield client
    finally:
        client.close()


def on_cluster(
    client: Any, todo: Sequence[PartitionJob], on_event: OnEvent
) -> Iterator[tuple[PartitionJob, DirectoryResult]]:
    """Do the jobs on the workers; yield each with its result, as they end.

    Raises what a job raises. Jobs that have begun then end on their workers.
    """
    from distributed import as_completed

    in_order: Any = as_completed
    run = os.urandom(4).hex()
    futures = {client.submit(run_job, job, key=f"pqcache-{run}-{job.name}", pure=False): job for job in todo}
    try:
        for future in in_order(list(futures), loop=client.loop):
            job = futures[future]
            result = _result(future, job, client.scheduler.address)
            on_event(Advanced("rewrite", job.size))
            yield job, result
    finally:
        client.cancel(list(futures), force=True)


def check_seen(client: Any, path: str) -> None:
    """Raise UsageError when a worker does not have a local path."""
    blind = [worker for worker, seen in _on_workers(client, os.path.exists, path).items() if seen is not True]
    if blind:
        raise UsageError(
            path,
            f"{format_count(len(blind), 'worker')} cannot see it ({blind[0]})",
            "use hdfs://, s3:// or a path that is shared by all machines",
        )


def _client(scheduler: str) -> Any:
    try:
        from distributed import Client
    except ImportError as error:
        raise UsageError(
            "--scheduler", "needs Dask's distributed", "install it with: pip install 'pqcache[dask]'"
        ) from error
    try:
        place = urlsplit(scheduler)
        if place.scheme not in ("tcp", "tls") or not place.hostname or not place.port:
            raise ValueError
    except ValueError:
        raise UsageError(f"--scheduler {scheduler}", "write it like tcp://host:8786") from None
    for name in ("distributed.client", "distributed.core", "distributed.utils", "distributed.comm"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # what they report is raised here as well
    untyped: Any = Client
    try:
        socket.create_connection((place.hostname, place.port), _CONNECT).close()  # fails sooner, and leaves no threads
        return untyped(scheduler, timeout=_CONNECT, set_as_default=False)
    except (OSError, ValueError, RuntimeError) as error:
        raise SourceUnavailable(
            scheduler, "no Dask scheduler answers", "check the address, and that 'dask scheduler' runs there"
        ) from error


def _check_packages(client: Any) -> None:
    """Raise UsageError when a worker lacks a package or has another version.

    Only functions that every Python has are sent, since pqcache may be what is missing.
    """
    for package in _PACKAGES:
        here = importlib.metadata.version(package)
        for worker, found in _on_workers(client, importlib.metadata.version, package).items():
            if found != here:
                what = "is not installed" if isinstance(found, Exception) else f"is version {found}"
                raise UsageError(
                    f"worker {worker}",
                    f"{package} {what}, here it is {here}",
                    "install the same packages on all workers",
                )


def _on_workers(client: Any, function: Any, argument: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = client.run(function, argument, on_error="return")
    # an OSError: a worker that has just died, which the scheduler is about to notice
    return {worker: value for worker, value in found.items() if not isinstance(value, OSError)}


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
        raise UsageError(name, f"a worker lacks a package ({error})", "install it there") from error
    except Exception as error:
        if type(error).__name__ == "KilledWorker":
            raise PqcacheError(
                name, "its workers died again and again", "give them more memory, or smaller --row-group-size"
            ) from error
        raise
