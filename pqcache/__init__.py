"""pqcache keeps lake Parquet (HDFS, S3) on local disk, whole and fresh, and trains from it.

>>> import pqcache
>>> pqcache.sync("lake/shop", "cache/shop").unchanged  # or hdfs://namenode:8020/warehouse/shop, s3://lake/shop
6
>>> pqcache.repartition("cache/shop", row_group_size=128 << 20).files_after
3
>>> from pqcache.torch import ParquetDataset
>>> sum(len(batch["id"]) for batch in ParquetDataset("cache/shop", columns=["id"]))
600
"""

from __future__ import annotations

from pqcache.versions import __version__

TYPE_CHECKING = False  # as in typing, which takes its time to import
if TYPE_CHECKING:
    from pqcache.dataset import Cache
    from pqcache.errors import (
        CacheError,
        CacheLocked,
        DamagedError,
        Interrupted,
        ParquetError,
        PqcacheError,
        SourceChanged,
        SourceDenied,
        SourceError,
        SourceIncomplete,
        SourceNotFound,
        SourceUnavailable,
        UsageError,
    )
    from pqcache.reader.selection.sequences import Sequence
    from pqcache.store.gc import GcReport, gc
    from pqcache.store.history import history
    from pqcache.store.inspect.summary import Inspection, inspect
    from pqcache.store.keys.command import IndexReport, index
    from pqcache.store.repartition.command import repartition
    from pqcache.store.repartition.dense_columns import Proposal, dense_proposals
    from pqcache.store.repartition.to_target import RepartitionReport
    from pqcache.store.snapshot import Snapshot
    from pqcache.store.sync.command import SyncReport, sync
    from pqcache.store.verify.command import VerifyReport, verify
    from pqcache.units import parse_size

__all__ = [
    "Cache",
    "CacheError",
    "CacheLocked",
    "DamagedError",
    "GcReport",
    "IndexReport",
    "Inspection",
    "Interrupted",
    "ParquetError",
    "PqcacheError",
    "Proposal",
    "RepartitionReport",
    "Sequence",
    "Snapshot",
    "SourceChanged",
    "SourceDenied",
    "SourceError",
    "SourceIncomplete",
    "SourceNotFound",
    "SourceUnavailable",
    "SyncReport",
    "UsageError",
    "VerifyReport",
    "__version__",
    "dense_proposals",
    "gc",
    "history",
    "index",
    "inspect",
    "parse_size",
    "repartition",
    "sync",
    "verify",
]

# Nothing is imported before it is asked for: a command starts sooner, and takes signals from its first moment on.
_HOMES = {
    "pqcache.errors": (
        "CacheError",
        "CacheLocked",
        "DamagedError",
        "Interrupted",
        "ParquetError",
        "PqcacheError",
        "SourceChanged",
        "SourceDenied",
        "SourceError",
        "SourceIncomplete",
        "SourceNotFound",
        "SourceUnavailable",
        "UsageError",
    ),
    "pqcache.reader.selection.sequences": ("Sequence",),
    "pqcache.dataset": ("Cache",),
    "pqcache.store.snapshot": ("Snapshot",),
    "pqcache.store.repartition.dense_columns": ("Proposal", "dense_proposals"),
    "pqcache.store.gc": ("GcReport", "gc"),
    "pqcache.store.history": ("history",),
    "pqcache.store.keys.command": ("IndexReport", "index"),
    "pqcache.store.inspect.summary": ("Inspection", "inspect"),
    "pqcache.store.repartition.command": ("repartition",),
    "pqcache.store.repartition.to_target": ("RepartitionReport",),
    "pqcache.store.sync.command": ("SyncReport", "sync"),
    "pqcache.store.verify.command": ("VerifyReport", "verify"),
    "pqcache.units": ("parse_size",),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}


if not TYPE_CHECKING:

    def __getattr__(name):
        if name not in _HOME:
            raise AttributeError(f"module 'pqcache' has no attribute {name!r}")
        from importlib import import_module

        value = globals()[name] = getattr(import_module(_HOME[name]), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
