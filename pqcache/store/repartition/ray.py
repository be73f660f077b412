"""Run the jobs of a repartition on an existing Ray cluster, over Ray Client.

Ray gives the jobs of a worker that died to others.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

from pqcache.errors import PqcacheError, SourceUnavailable, UsageError, first_line
from pqcache.events import Advanced, OnEvent
from pqcache.store.repartition.cluster_errors import check_address, missing_package, workers_died
from pqcache.store.repartition.partition_job import PartitionJob, run_job
from pqcache.store.repartition.target_record import DirectoryResult

_CPUS = 2  # of a job, which decodes, encodes and transfers on threads; fewer where no node has as many
_RETRIES = 3  # of a job whose worker died
_OUTSTANDING = 256  # jobs that Ray knows of at once
_CHECK = 60.0  # seconds for each node to answer


class RayCluster:
    """The nodes of the cluster that this thread is connected to (see `Cluster`)."""

    def __init__(self, ray: Any, scheduler: str) -> None:
        self._ray, self._scheduler = ray, scheduler

    @property
    def no_worker(self) -> str:
        """What to tell the user where no node does jobs."""
        return "" if self._cpus() else "no node with a CPU is there yet; waiting for one"

    def _nodes(self) -> list[dict[str, Any]]:
        return [node for node in self._ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]

    def _cpus(self) -> float:
        return max((node["Resources"]["CPU"] for node in self._nodes()), default=0.0)

    def on_workers(self, function: Callable[[str], Any], argument: str) -> list[tuple[str, Any]]:
        """Return each node's address with what ``function`` returns there, or raises."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        task, found = self._ray.remote(function), []
        for node in self._nodes():
            there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            found.append(
                (node["NodeManagerAddress"], task.options(num_cpus=0, scheduling_strategy=there).remote(argument))
            )
        answers = ((address, self._answer(address, reference)) for address, reference in found)
        return [(address, answer) for address, answer in answers if not self._is_dead(answer)]

    def _answer(self, address: str, reference: Any) -> Any:
        """Return what a node answers, or the error."""
        errors = self._ray.exceptions
        try:
            return self._ray.get(reference, timeout=_CHECK)
        except errors.GetTimeoutError as error:
            raise SourceUnavailable(f"node {address}", "does not answer", "look at it with 'ray status'") from error
        except errors.RayError as error:
            return getattr(error, "cause", None) or error

    def _is_dead(self, answer: Any) -> bool:
        """Return whether an answer is that of a node which has just died."""
        return isinstance(answer, self._ray.exceptions.RayError)

    def results(
        self, todo: Sequence[PartitionJob], on_event: OnEvent
    ) -> Iterator[tuple[PartitionJob, DirectoryResult]]:
        """Do the jobs; yield each with its result, as they end.

        Raises what a job raises. Jobs that have begun are then interrupted.
        """
        ray, waiting = self._ray, iter(todo)
        task = ray.remote(run_job).options(num_cpus=min(_CPUS, self._cpus() or 1), max_retries=_RETRIES)
        begun: dict[Any, PartitionJob] = {}
        try:
            while True:
                begun |= {task.remote(job): job for job in islice(waiting, _OUTSTANDING - len(begun))}
                if not begun:
                    return
                for reference in ray.wait(list(begun))[0]:
                    job = begun.pop(reference)
                    result = self._result(reference, job)
                    on_event(Advanced("rewrite", job.size))
                    yield job, result
        except ConnectionError as error:
            raise SourceUnavailable(
                self._scheduler, "the cluster is gone", "start it again and run the same command"
            ) from error
        finally:
            for reference in begun:
                ray.cancel(reference)

    def _result(self, reference: Any, job: PartitionJob) -> DirectoryResult:
        """Return what a job returned, or raise what a user can act on."""
        name, errors = f"partition {job.name}", self._ray.exceptions
        try:
            done: DirectoryResult = self._ray.get(reference)
            return done
        except errors.RayTaskError as error:
            cause = getattr(error, "cause", None) or error
            if isinstance(cause, ImportError) and not isinstance(cause, PqcacheError):
                raise missing_package(name, cause) from error
            raise cause from None
        except (errors.WorkerCrashedError, errors.NodeDiedError, errors.OutOfMemoryError) as error:
            raise workers_died(name) from error
        except errors.RayError as error:
            raise PqcacheError(name, f"Ray cannot do it ({first_line(error)})", "look at 'ray status'") from error


@contextmanager
def ray_cluster(scheduler: str) -> Iterator[RayCluster]:
    """Yield the cluster whose Ray Client server is at ``scheduler``."""
    try:
        import grpc  # noqa: F401 - what Ray Client needs beside Ray
        import ray
    except ImportError as error:
        raise UsageError("--scheduler", "needs Ray Client", "install it with: pip install 'pqcache[ray]'") from error
    unreachable = SourceUnavailable(
        scheduler,
        "no Ray cluster answers",
        "check the address, which is that of Ray Client's server, and RAY_AUTH_TOKEN if the cluster wants one",
    )
    check_address(scheduler, ("ray",), "ray://host:10001", unreachable)
    try:
        with warnings.catch_warnings():  # what they say is raised as well
            warnings.simplefilter("ignore")
            # Not the connection that the process may have for others.
            client: Any = ray.init(scheduler, allow_multiple=True, log_to_driver=False, logging_level=logging.CRITICAL)
    except ConnectionAbortedError as error:
        raise SourceUnavailable(
            scheduler, f"lets nobody in ({first_line(error)})", "look at the cluster's logs"
        ) from error
    except ConnectionError as error:
        raise unreachable from error
    except RuntimeError as error:
        raise UsageError(scheduler, first_line(error), "install the same versions of Ray and Python here") from error
    try:
        with client:
            yield RayCluster(ray, scheduler)
    finally:
        client.disconnect()
