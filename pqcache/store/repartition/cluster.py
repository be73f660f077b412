"""A cluster that does the jobs of a repartition: Dask's, Ray's or Spark's, by its address.

Jobs publish a partition in one step and make the same bytes wherever they run, so one that is done twice does no harm.
"""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

from pqcache.errors import UsageError
from pqcache.events import OnEvent, Warned
from pqcache.store.repartition.executor import ClusterExecutor
from pqcache.store.repartition.partition_job import PartitionJob
from pqcache.store.urls import url_scheme
from pqcache.units import format_count

_PACKAGES = ("pqcache", "pyarrow")  # the bytes that are written depend on both


@contextmanager
def connected(scheduler: str, todo: Sequence[PartitionJob], on_event: OnEvent) -> Iterator[ClusterExecutor]:
    """Yield a cluster whose workers can do ``todo``; what it still has to do then is cancelled.

    Raises SourceUnavailable if no scheduler answers, UsageError if a worker has another version or does not see
    the source. Workers that come later are checked by their jobs.
    """
    with _opened(scheduler) as cluster:
        if cluster.no_worker:
            on_event(Warned(f"{scheduler}: {cluster.no_worker}"))
        _check_packages(cluster)
        if todo and url_scheme(todo[0].endpoints.source) in ("", "file"):
            check_seen(cluster, todo[0].endpoints.source)
        try:
            yield cluster
        finally:
            cluster.shutdown(wait=False, cancel_futures=True)


def _opened(scheduler: str) -> AbstractContextManager[ClusterExecutor]:
    if url_scheme(scheduler) == "ray":
        from pqcache.store.repartition.ray import ray_executor

        return ray_executor(scheduler)
    if scheduler == "yarn" or scheduler.startswith(("spark:", "local[")):
        from pqcache.store.repartition.spark import spark_executor

        return spark_executor(scheduler)
    from pqcache.store.repartition.dask import dask_executor

    return dask_executor(scheduler)


def check_seen(cluster: ClusterExecutor, path: str) -> None:
    blind = [worker for worker, seen in cluster.on_workers(os.path.exists, path) if seen is not True]
    if blind:
        raise UsageError(
            path,
            f"{format_count(len(blind), 'worker')} cannot see it ({blind[0]})",
            "use hdfs://, s3:// or a path that is shared by all machines",
        )


def _check_packages(cluster: ClusterExecutor) -> None:
    for package in _PACKAGES:
        here = importlib.metadata.version(package)
        for worker, found in cluster.on_workers(importlib.metadata.version, package):
            if found != here:
                what = "is not installed" if isinstance(found, Exception) else f"is version {found}"
                raise UsageError(
                    f"worker {worker}",
                    f"{package} {what}, here it is {here}",
                    "install the same packages on all workers",
                )
