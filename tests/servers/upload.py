"""Uploads a local directory tree: what the upload_tree of both servers, and tests/remote.py, have in common."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_THREADS = 16


def for_each_file(local_dir: Path, put: Callable[[Path, str], None]) -> int:
    """Call `put(file, path relative to local_dir)` for every file below it, from threads; returns how many.

    The first error is raised, after the others have ended.
    """
    files = sorted(path for path in local_dir.rglob("*") if path.is_file())
    with ThreadPoolExecutor(_THREADS) as pool:
        for done in [pool.submit(put, path, path.relative_to(local_dir).as_posix()) for path in files]:
            done.result()
    return len(files)
