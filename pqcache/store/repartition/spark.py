"""An executor over a Spark cluster: each job is a Spark job of one task."""

from __future__ import annotations

import pickle
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from pqcache.errors import SourceUnavailable, UsageError, first_line
from pqcache.store.repartition.executor import ClusterExecutor, Settle, check_address

_JOBS = 64  # that Spark knows of at once; each is waited for by a thread
_CHECKS = 4  # tasks for each core, so that every executor gets one


class SparkExecutor(ClusterExecutor):
    """The executors of the Spark application that ``context`` is. Jobs that are cancelled are interrupted."""

    def __init__(self, context: Any, scheduler: str) -> None:
        super().__init__(scheduler)
        self._context = context
        self._threads = ThreadPoolExecutor(_JOBS, thread_name_prefix="pqcache-spark")

    @property
    def no_worker(self) -> str:
        executors = self._context._jsc.sc().getExecutorMemoryStatus().size() - 1  # and the driver
        return "" if executors or self.scheduler.startswith("local") else "no executor is there yet; waiting for one"

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

        def call(_: Iterator[int]) -> list[tuple[str, Any]]:  # sent by value, as pqcache may be what is missing
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
