"""Workers of Dask, Ray and Spark clusters, behind the interface of ``concurrent.futures``."""

from __future__ import annotations

import importlib.metadata
import logging
import os
import pickle
import signal
import socket
import threading
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, CancelledError, Executor, Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, ParamSpec, TypeVar
from urllib.parse import urlsplit

from pqcache.errors import PqcacheError, SourceUnavailable, UsageError, first_line
from pqcache.events import OnEvent, Warned
from pqcache.store.repartition.partition_job import PartitionJob
from pqcache.store.urls import is_local, url_scheme
from pqcache.units import format_count

_CONNECT = 10.0  # seconds

P = ParamSpec("P")
T = TypeVar("T")
Settle = Callable[[Callable[[], Any]], None]  # gives a future what a call returns or raises
_RAY_CPUS = 2  # of a job, which decodes, encodes and transfers on threads; fewer where no node has as many
_RAY_RETRIES = 3  # of a job whose worker died
_ANSWER = 60.0  # seconds for each node to answer
_SPARK_JOBS = 64  # that Spark knows of at once; each is waited for by a thread
_CHECKS = 4  # tasks for each core, so that every executor gets one
_PACKAGES = ("pqcache", "pyarrow")  # the bytes that are written depend on both


class ClusterExecutor(Executor):
    """An executor of a cluster's workers, whose processes have only pqcache in common with this one.

    If a worker dies, the engine does its job again. If it gives up, the call raises BrokenExecutor; if it has lost the
    job, CancelledError.
    """

    def __init__(self, scheduler: str) -> None:
        self.scheduler = scheduler

    @property
    @abstractmethod
    def no_worker(self) -> str:
        """A message for the user while no worker has joined; empty once one has."""

    @abstractmethod
    def on_workers(self, function: Callable[[str], Any], argument: str) -> list[tuple[str, Any]]:
        """Call ``function`` on all workers; return results or exceptions by the worker's address.

        Only functions of the standard library are sent, as a worker may lack pqcache. Workers that just died are left
        out.
        """

    @abstractmethod
    def begin(self, function: Callable[..., Any], arguments: tuple[Any, ...], name: str, settle: Settle) -> None:
        """Start ``function`` on a worker; at its end, ``settle`` is called on any thread."""

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
        socket.create_connection((place.hostname, place.port), _CONNECT).close()
    except OSError as error:
        raise unreachable from error


class DaskExecutor(ClusterExecutor):
    """The workers of the scheduler that ``client`` is connected to. Cancelling doesn't stop jobs that have begun."""

    def __init__(self, client: Any, scheduler: str) -> None:
        super().__init__(scheduler)
        self._client, self._run = client, os.urandom(4).hex()
        self._begun: set[Any] = set()

    @property
    def no_worker(self) -> str:
        if self._client.scheduler_info(n_workers=-1)["workers"]:
            return ""
        return f"no worker has joined yet; waiting for one ('dask worker {self.scheduler}')"

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
        client = untyped(scheduler, timeout=_CONNECT, set_as_default=False)
    except (OSError, ValueError, RuntimeError) as error:
        raise unreachable from error
    try:
        yield DaskExecutor(client, scheduler)
    finally:
        client.close()


class RayExecutor(ClusterExecutor):
    """The nodes of the cluster that this thread is connected to. Cancelling interrupts jobs."""

    def __init__(self, ray: Any, scheduler: str) -> None:
        super().__init__(scheduler)
        self._ray = ray
        self._tasks: dict[Callable[..., Any], Any] = {}
        self._begun: set[Any] = set()

    @property
    def no_worker(self) -> str:
        return "" if self._cpus() else "no node with a CPU has joined yet; waiting for one"

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
            return self._ray.get(reference, timeout=_ANSWER)
        except errors.GetTimeoutError as error:
            raise SourceUnavailable(f"node {address}", "does not answer", "look at it with 'ray status'") from error
        except errors.RayError as error:
            return getattr(error, "cause", None) or error

    def begin(self, function: Callable[..., Any], arguments: tuple[Any, ...], name: str, settle: Settle) -> None:
        if function not in self._tasks:
            cpus = min(_RAY_CPUS, self._cpus() or 1)
            self._tasks[function] = self._ray.remote(function).options(num_cpus=cpus, max_retries=_RAY_RETRIES)
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
            scheduler, f"refuses clients ({first_line(error)})", "look at the cluster's logs"
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


class SparkExecutor(ClusterExecutor):
    """The executors of the Spark application ``context``. Cancelling interrupts jobs."""

    def __init__(self, context: Any, scheduler: str) -> None:
        super().__init__(scheduler)
        self._context = context
        self._threads = ThreadPoolExecutor(_SPARK_JOBS, thread_name_prefix="pqcache-spark")

    @property
    def no_worker(self) -> str:
        executors = self._context._jsc.sc().getExecutorMemoryStatus().size() - 1  # and the driver
        return "" if executors or self.scheduler.startswith("local") else "no executor has started yet; waiting for one"

    def on_workers(self, function: Callable[[str], Any], argument: str) -> list[tuple[str, Any]]:
        return list(dict(self._outcomes(function, (argument,), _CHECKS * self._context.defaultParallelism)).items())

    def begin(self, function: Callable[..., Any], arguments: tuple[Any, ...], name: str, settle: Settle) -> None:
        def result() -> Any:
            [(_, outcome)] = self._outcomes(function, arguments, 1)
            if isinstance(outcome, BaseException):
                raise outcome
            return outcome

        self._threads.submit(settle, result)

    def _outcomes(self, function: Callable[..., Any], arguments: tuple[Any, ...], tasks: int) -> list[tuple[str, Any]]:
        """Host of each task, with the function's result or exception."""
        from py4j.protocol import Py4JError
        from pyspark import cloudpickle

        sent = cloudpickle.dumps((function, arguments))  # type: ignore[no-untyped-call, unused-ignore]

        def call(_: Iterator[int]) -> list[tuple[str, Any]]:  # sent by value, as the worker may lack pqcache
            import socket

            try:
                called, given = pickle.loads(sent)
                return [(socket.gethostname(), called(*given))]
            except Exception as error:  # noqa: BLE001  raised where the result is asked for
                return [(socket.gethostname(), error)]

        try:
            found: list[tuple[str, Any]] = self._context.parallelize(range(tasks), tasks).mapPartitions(call).collect()
        except Py4JError as error:  # a task failed as often as Spark allows, and not by an exception
            raise BrokenExecutor(first_line(error)) from error
        return found

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._context.cancelAllJobs()


@contextmanager
def spark_executor(master: str) -> Iterator[SparkExecutor]:
    """Start an application at a Spark master: ``spark://HOST:PORT``, ``yarn`` or ``local[N]``."""
    try:
        from pyspark import SparkConf, SparkContext
    except ImportError as error:
        raise UsageError("--scheduler", "needs PySpark", "install it with: pip install 'pqcache[spark]'") from error
    if master.startswith("spark:"):
        unreachable = SourceUnavailable(master, "no Spark master answers", "check the address, and the master's log")
        check_address(master, ("spark",), "spark://host:7077", unreachable)
    conf = SparkConf().setMaster(master).setAppName("pqcache repartition")
    conf.set("spark.ui.enabled", "false").set("spark.ui.showConsoleProgress", "false")
    handler = signal.getsignal(signal.SIGINT)
    try:
        context = SparkContext(conf=conf)
    except ValueError as error:  # one application for each process
        raise UsageError(master, f"cannot be used ({first_line(error)})", "end the other application first") from error
    except Exception as error:  # of a JVM that is missing, or cannot reach the cluster
        advice = "check JAVA_HOME, and HADOOP_CONF_DIR for yarn"
        raise SourceUnavailable(master, f"Spark cannot start ({first_line(error)})", advice) from error
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, handler)  # in place of PySpark's
    try:
        yield SparkExecutor(context, master)
    finally:
        context.stop()


@contextmanager
def connected(scheduler: str, todo: Sequence[PartitionJob], on_event: OnEvent) -> Iterator[ClusterExecutor]:
    """Yield a cluster whose workers can do ``todo``; its unfinished jobs are cancelled at the end.

    Raises SourceUnavailable if no scheduler answers, UsageError if a worker has another version of pqcache or doesn't
    see the source. Workers that join later are checked by their jobs.
    """
    with _opened(scheduler) as cluster:
        if cluster.no_worker:
            on_event(Warned(f"{scheduler}: {cluster.no_worker}"))
        _check_packages(cluster)
        if todo and is_local(todo[0].endpoints.source):
            check_seen(cluster, todo[0].endpoints.source)
        try:
            yield cluster
        finally:
            cluster.shutdown(wait=False, cancel_futures=True)


def _opened(scheduler: str) -> AbstractContextManager[ClusterExecutor]:
    if url_scheme(scheduler) == "ray":
        return ray_executor(scheduler)
    if scheduler == "yarn" or scheduler.startswith(("spark:", "local[")):
        return spark_executor(scheduler)
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
