"""Which of several processes this one is, as the framework knows that is imported already."""

from __future__ import annotations

import sys
from typing import Any

from pqcache.errors import UsageError


def count_and_number() -> tuple[int, int]:
    """Return the number of processes that train together and this one's, from torch.distributed or JAX; else 1 and 0.

    Neither is imported for it, and JAX is only asked where that does not start its devices. Where both know of several
    processes and disagree, UsageError is raised.
    """
    places = {"torch.distributed": of_torch() or (1, 0), "JAX": _of_jax()}
    found = {name: place for name, place in places.items() if place[0] > 1}
    if len(set(found.values())) > 1:
        said = " and ".join(f"{name} says {number} of {count}" for name, (count, number) in found.items())
        raise UsageError("num_replicas and rank", f"this process has two numbers: {said}", "give both options")
    return next(iter(found.values()), (1, 0))


def of_torch() -> tuple[int, int] | None:
    """Return the number of ranks of torch.distributed and this one; None where it is not initialised."""
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.get_world_size(), distributed.get_rank()


def _of_jax() -> tuple[int, int]:
    jax: Any = sys.modules.get("jax")
    if not hasattr(jax, "process_count") or not _knows_processes(jax):
        return 1, 0
    return int(jax.process_count()), int(jax.process_index())


def _knows_processes(jax: Any) -> bool:
    """Return whether JAX has been connected or started: to ask before would start it, and it could not be connected."""
    is_connected = getattr(getattr(jax, "distributed", None), "is_initialized", None)
    bridge = sys.modules.get("jax._src.xla_bridge")
    is_started = getattr(bridge, "backends_are_initialized", None)
    asked = [ask for ask in (is_connected, is_started) if ask is not None]
    return not asked or any(ask() for ask in asked)
