"""Keeps pandas out of a process that does not need it."""

from __future__ import annotations

import sys


def without_pandas() -> None:
    """Let pyarrow find no pandas: it would load it with the first array, a third of a second and 45 MB for nothing."""
    sys.meta_path.insert(0, _WithoutPandas)


class _WithoutPandas:
    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        if name == "pandas":
            raise ModuleNotFoundError(name)
