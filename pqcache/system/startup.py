"""Keeps out of a process what it does not need: pandas, threads of BLAS, and frequent garbage collection."""

from __future__ import annotations

import gc
import os
import sys


def limit_blas_threads() -> None:
    """Let numpy's BLAS start no threads, which wait in busy loops; call this before numpy is imported."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def hide_pandas() -> None:
    """Hide pandas from pyarrow, which would import it with the first array, though nothing here needs it."""
    sys.meta_path.insert(0, _NoPandas)


def collect_garbage_rarely() -> None:
    """Let Python look for reference cycles after 200,000 new objects, not 700: imports and listings leave few."""
    gc.set_threshold(200_000)


def collect_no_more_garbage() -> None:
    """Let Python end without a last look for reference cycles; files are closed and threads joined all the same."""
    gc.freeze()


class _NoPandas:
    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        if name == "pandas":
            raise ModuleNotFoundError(name)
