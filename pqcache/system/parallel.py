"""Runs several calls at once, on threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def in_parallel(calls: Sequence[Callable[[], T]], threads: int) -> list[T]:
    """Return what each call returns, in order.

    The first error is raised once all calls that had begun have ended; the others are not begun.
    """
    with ThreadPoolExecutor(threads) as pool:
        futures = [pool.submit(call) for call in calls]
        try:
            return [future.result() for future in futures]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
