"""An executor over the nodes of a Ray cluster, through Ray Client."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, CancelledError
from contextlib import contextmanager
from typing import Any

from pqcache.errors import PqcacheError, SourceUnavailable, UsageError, first_line
from pqcache.store.repartition.executor import ClusterExecutor, Settle, check_address

_CPUS = 2  # of a job, which decodes, encodes and transfers on threads; fewer where no node has as many
_RETRIES = 3  # of a job whose worker died
_CHECK = 60.0  # seconds for each node to answer


class RayExecutor(ClusterExecutor):
    """The nodes of the cluster that this thread is connected to. Jobs that are cancelled are interrupted."""

    def __init__(self, ray: Any, scheduler: str) -> None:
        super().__init__(scheduler)
        self._ray = ray
        self._tasks: dict[Callable[..., Any], Any] = {}
        self._begun: set[Any] = set()

    @property
    def no_worker(self) -> str:
        return "" if self._cpus() else "no node with a CPU is there yet; waiting for one"

    def _nodes(self) -> list[dict[str, Any]]:
        return [node for node in self._ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]

    def _cpus(self) -> float:
        return max((node["Resources"]["CPU"] for node in self._nodes()), default=0.0)

    def on_workers(self, function: Callable[[str], Any], argument: str) -> list[tuple[str, Any]]:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        task, found = self._ray.remote(function), []
        for node in self._nodes():
            there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            found.append(
                (node["NodeManagerAddress"], task.options(num_cpus=0, scheduling_strategy=there).remote(argument))
            )
        answers = ((address, self._answer(address, reference)) for address, reference in found)
        # a RayError: a node that has just died
        return [item for item in answers if not isinstance(item[1], self._ray.exceptions.RayError)]

    def _answer(self, address: str, reference: Any) -> Any:
        errors = self._ray.exceptions
        try:
            return self._ray.get(reference, timeout=_CHECK)
        except errors.GetTimeoutError as error:
            raise SourceUnavailable(f"node {address}", "does not answer", "look at it with 'ray status'") from error
        except errors.RayError as error:
            return getattr(error, "cause", None) or error

    def begin(self, function: Callable[..., Any], arguments: tuple[Any, ...], name: str, settle: Settle) -> None:
        if function not in self._tasks:
            cpus = min(_CPUS, self._cpus() or 1)
            self._tasks[function] = self._ray.remote(function).options(num_cpus=cpus, max_retries=_RETRIES)
        reference = self._tasks[function].remote(*arguments)
        self._begun.add(reference)

        def ended(future: Any) -> None:
            self._begun.discard(reference)
            settle(lambda: self._result(future))

        reference.future().add_done_callback(ended)

    def _result(self, future: Any) -> Any:
        errors = self._ray.exceptions
        try:
            return future.result()
        except ConnectionError as error:
            raise CancelledError from error
        except errors.RayTaskError as error:
            raise (getattr(error, "cause", None) or error) from None
        except (errors.WorkerCrashedError, errors.NodeDiedError, errors.OutOfMemoryError) as error:
            raise BrokenExecutor from error
        except errors.RayError as error:
            reason = f"Ray cannot do a job ({first_line(error)})"
            raise PqcacheError(self.scheduler, reason, "look at 'ray status'") from error

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        for reference in list(self._begun):
            self._ray.cancel(reference)


@contextmanager
def ray_executor(scheduler: str) -> Iterator[RayExecutor]:
    """Connect to the Ray Client server at ``scheduler``."""
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
            yield RayExecutor(ray, scheduler)
    finally:
        client.disconnect()
