"""pqcache keeps lake Parquet (HDFS, S3) on local disk, complete and fresh, and trains from it.

>>> import pqcache
>>> pqcache.sync("lake/shop", "cache/shop").unchanged  # or hdfs://namenode:8020/warehouse/shop, s3://lake/shop
6
>>> pqcache.repartition("cache/shop", row_group_size="128MB").files_after
3
>>> from pqcache.torch import ParquetDataset
>>> sum(len(batch["id"]) for batch in ParquetDataset("cache/shop", columns=["id"]))
600

Names are imported when they are first used, so that a command starts sooner and loads only what it needs.
"""

from __future__ import annotations

from pqcache.versions import __version__ as __version__

TYPE_CHECKING = False  # as in typing, which takes its time to import
if TYPE_CHECKING:  # the only list of the public names: type checkers read it, and so does _homes()
    from pqcache import errors as errors
    from pqcache import events as events
    from pqcache.benchmark import BenchReport as BenchReport
    from pqcache.benchmark import bench as bench
    from pqcache.dataset import Cache as Cache
    from pqcache.errors import AccessExpired as AccessExpired
    from pqcache.errors import CacheError as CacheError
    from pqcache.errors import CacheLocked as CacheLocked
    from pqcache.errors import ContractNotMet as ContractNotMet
    from pqcache.errors import DamagedError as DamagedError
    from pqcache.errors import Interrupted as Interrupted
    from pqcache.errors import ParquetError as ParquetError
    from pqcache.errors import PqcacheError as PqcacheError
    from pqcache.errors import SourceChanged as SourceChanged
    from pqcache.errors import SourceDenied as SourceDenied
    from pqcache.errors import SourceError as SourceError
    from pqcache.errors import SourceIncomplete as SourceIncomplete
    from pqcache.errors import SourceNotFound as SourceNotFound
    from pqcache.errors import SourceUnavailable as SourceUnavailable
    from pqcache.errors import UsageError as UsageError
    from pqcache.reader.batch_rows import RowPlaces as RowPlaces
    from pqcache.reader.batch_rows import last_rows as last_rows
    from pqcache.reader.batch_rows import rows as rows
    from pqcache.reader.order import Mixing as Mixing
    from pqcache.reader.order import Order as Order
    from pqcache.reader.order import mixing as mixing
    from pqcache.reader.packing import Pack as Pack
    from pqcache.reader.packing import TokenBatches as TokenBatches
    from pqcache.reader.proof import EpochProof as EpochProof
    from pqcache.reader.proof import prove as prove
    from pqcache.reader.selection.sequences import Sequence as Sequence
    from pqcache.reader.selection.split import Split as Split
    from pqcache.reader.stats import DatasetStats as DatasetStats
    from pqcache.store.cache_root import RemoveReport as RemoveReport
    from pqcache.store.cache_root import add as add
    from pqcache.store.cache_root import remove as remove
    from pqcache.store.gc import GcReport as GcReport
    from pqcache.store.gc import gc as gc
    from pqcache.store.history import log as log
    from pqcache.store.inspect import Inspection as Inspection
    from pqcache.store.inspect import inspect as inspect
    from pqcache.store.key_index import IndexReport as IndexReport
    from pqcache.store.key_index import index as index
    from pqcache.store.key_lookup import SelectedRows as SelectedRows
    from pqcache.store.repartition.command import repartition as repartition
    from pqcache.store.repartition.dense_proposals import Proposal as Proposal
    from pqcache.store.repartition.dense_proposals import dense_proposals as dense_proposals
    from pqcache.store.repartition.to_target import RepartitionReport as RepartitionReport
    from pqcache.store.serve import CacheServer as CacheServer
    from pqcache.store.serve import serve as serve
    from pqcache.store.snapshot import Snapshot as Snapshot
    from pqcache.store.snapshots import PinReport as PinReport
    from pqcache.store.snapshots import RollbackReport as RollbackReport
    from pqcache.store.snapshots import SnapshotView as SnapshotView
    from pqcache.store.snapshots import pin as pin
    from pqcache.store.snapshots import rollback as rollback
    from pqcache.store.snapshots import snapshots as snapshots
    from pqcache.store.snapshots import unpin as unpin
    from pqcache.store.status import CacheStatus as CacheStatus
    from pqcache.store.status import StatusReport as StatusReport
    from pqcache.store.status import status as status
    from pqcache.store.sync.cache_run import SyncReport as SyncReport
    from pqcache.store.sync.command import TableResult as TableResult
    from pqcache.store.sync.command import sync as sync
    from pqcache.store.sync.command import sync_all as sync_all
    from pqcache.store.verify import VerifyReport as VerifyReport
    from pqcache.store.verify import verify as verify
    from pqcache.units import parse_size as parse_size
else:

    def __getattr__(name):
        if name == "__all__":
            return sorted(_homes())
        home = _homes().get(name)
        if home is None:
            raise AttributeError(f"module 'pqcache' has no attribute {name!r}")
        from importlib import import_module

        value = import_module(f"pqcache.{name}") if home == "pqcache" else getattr(import_module(home), name)
        globals()[name] = value
        return value


def _homes() -> dict[str, str]:
    """Return the module of each public name, as the imports for type checkers above have it."""
    if not _known:
        import dis

        home, found = "", {}  # from the compiled module, which is in a zip file too, and there without its source
        for step in dis.get_instructions(__loader__.get_code(__name__)):  # type: ignore[name-defined]
            if step.opname == "IMPORT_NAME":
                home = step.argval
            elif step.opname == "IMPORT_FROM" and home.partition(".")[0] == "pqcache":
                found[step.argval] = home
        _known.update(found)
    return _known


_known: dict[str, str] = {}


def __dir__() -> list[str]:
    return sorted({*globals(), *_homes()})
