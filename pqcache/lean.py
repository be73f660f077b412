"""Keeps out of a process what it does not need: pandas, and threads for algebra."""

from __future__ import annotations

import os
import sys


def without_algebra() -> None:
    """Let numpy start no threads for products of matrices; they wait in a loop. To be called before its import."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def without_pandas() -> None:
    """Let pyarrow find no pandas: it would load it with the first array, a third of a second and 45 MB for nothing."""
    sys.meta_path.insert(0, _WithoutPandas)


class _WithoutPandas:
    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        if name == "pandas":
            raise ModuleNotFoundError(name)
