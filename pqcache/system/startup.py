"""Keeps out of a process what it does not need: pandas, threads for algebra, and looking for garbage all the time."""

from __future__ import annotations

import gc
import os
import sys


def limit_blas_threads() -> None:
    """Let numpy start no threads for products of matrices; they wait in a loop. To be called before its import."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def hide_pandas() -> None:
    """Let pyarrow find no pandas: it would load it with the first array, a third of a second and 45 MB for nothing."""
    sys.meta_path.insert(0, _WithoutPandas)


def collect_garbage_rarely() -> None:
    """Let Python look for cycles of garbage after 50,000 new objects, not 700: imports and listings make few.

    A sync from S3 that finds nothing to do takes a seventh less.
    """
    gc.set_threshold(50_000)


class _WithoutPandas:
    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        if name == "pandas":
            raise ModuleNotFoundError(name)
