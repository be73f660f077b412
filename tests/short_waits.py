"""Takes from pqcache what tests need not wait for: disks, most of what retries wait, botocore's reading of its data.

What runs ``python -m pqcache`` waits as users do.
"""

from __future__ import annotations

import functools
import os
from importlib.util import find_spec

from pqcache.store.drivers import timeouts


def install() -> None:
    """Do so in this process and those it forks: fsync checks its file, and sessions of botocore share a loader."""
    os.fsync = os.fdatasync = _check_open  # type: ignore[assignment]
    timeouts._FIRST_WAIT = 0.01
    timeouts.PATIENT = timeouts.Patience(4, 600.0)
    if find_spec("botocore"):
        import botocore.session

        botocore.session.create_loader = functools.cache(botocore.session.create_loader)


def _check_open(descriptor: int) -> None:
    os.fstat(descriptor)  # an error for what is not open, as that of fsync
