"""pqcache keeps lake Parquet (HDFS, S3) on local disk, whole and fresh, and trains from it.

>>> import pqcache
>>> pqcache.sync("cache/shop", "hdfs://namenode:8020/warehouse/shop")       # doctest: +SKIP
>>> pqcache.repartition("cache/shop", row_group_size=128 << 20)             # doctest: +SKIP
>>> from pqcache.torch import ParquetDataset                                # doctest: +SKIP
"""

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
from pqcache.store.cache import Cache, Snapshot
from pqcache.store.densify import Proposal, dense_proposals
from pqcache.store.gc import GcReport, gc
from pqcache.store.history import history
from pqcache.store.inspect import Inspection, inspect
from pqcache.store.repartition import repartition
from pqcache.store.repartition_to import RepartitionReport
from pqcache.store.sync import SyncReport, sync
from pqcache.store.verify import VerifyReport, verify
from pqcache.units import parse_size

__version__ = "0.1.0"

__all__ = [
    "Cache",
    "CacheError",
    "CacheLocked",
    "DamagedError",
    "GcReport",
    "Inspection",
    "Interrupted",
    "ParquetError",
    "PqcacheError",
    "Proposal",
    "RepartitionReport",
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
    "inspect",
    "parse_size",
    "repartition",
    "sync",
    "verify",
]
