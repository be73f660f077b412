"""Opens the driver of a URL: the source or the target of its scheme."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from pqcache.errors import UsageError
from pqcache.options import HDFS3, HDFS_NATIVE, TIMEOUT
from pqcache.store.drivers.base import Source
from pqcache.store.drivers.target import Target
from pqcache.store.urls import check_url, local_path, redact, url_scheme, with_usual_scheme

_OBJECT_STORES = {"gs": "gcs", "gcs": "gcs", "az": "azure", "abfs": "azure", "abfss": "azure"}  # scheme -> extra


def open_source(
    url: str, options: Mapping[str, str] | None = None, timeout: float = TIMEOUT, hdfs_driver: str = HDFS_NATIVE
) -> Source:
    """Return the source at ``url``, opened with the store options ``options`` (``-o key=value``).

    A server that sends nothing for ``timeout`` seconds counts as unavailable. Nothing is contacted yet. An unknown
    scheme or option, a malformed URL or a missing extra raises UsageError.
    """
    check_url(url)
    options, url = options or {}, with_usual_scheme(url)
    scheme = url_scheme(url)
    if scheme in ("", "file"):
        from pqcache.store.drivers.local import LocalSource
        from pqcache.store.drivers.snapshot_source import open_snapshot

        return open_snapshot(url, options) or LocalSource(local_path(url), options)
    if scheme == "s3":
        with installed(url, "botocore", "s3"):
            from pqcache.store.drivers.s3 import S3Source
        return S3Source(url, options, timeout)
    if scheme == "hdfs" and hdfs_driver == HDFS3:
        from pqcache.store.drivers.hdfs3 import Hdfs3Source

        return Hdfs3Source(url, options, timeout)
    if scheme == "hdfs":
        with installed(url, "hdfs-native", "hdfs"):
            from pqcache.store.drivers.hdfs import HdfsSource
        return HdfsSource(url, options, timeout)
    if scheme == "webhdfs":
        with installed(url, "fsspec and requests", "hdfs"):
            from pqcache.store.drivers.webhdfs import WebHdfsSource
        return WebHdfsSource(url, options, timeout)
    if scheme in ("pqcache+http", "pqcache+https"):
        from pqcache.store.drivers.served_snapshot import ServedSource

        return ServedSource(url, options, timeout)
    if scheme in _OBJECT_STORES:
        with installed(url, "obstore", _OBJECT_STORES[scheme]):
            from pqcache.store.drivers.object_store import ObjectStoreSource
        return ObjectStoreSource(url, options, timeout)
    if _has_file_system(url):
        from pqcache.store.drivers.fsspec_source import FsspecSource

        return FsspecSource(url, options, timeout)
    advice = "use a path, hdfs://, webhdfs://, s3://, gs://, abfss://, hive://, iceberg:// or a scheme of fsspec"
    raise UsageError(redact(url), f"unknown scheme {scheme}://", advice)


def open_target(
    url: str, options: Mapping[str, str] | None = None, block_size: int | None = None, timeout: float = TIMEOUT
) -> Target:
    """Return the target at ``url``; ``options``, ``timeout`` and errors are as for ``open_source``.

    On HDFS its files get blocks of ``block_size`` bytes; None takes the cluster's. A scheme that cannot be written
    raises UsageError.
    """
    options, url = options or {}, with_usual_scheme(url)
    scheme = url_scheme(url)
    if scheme in ("", "file"):
        from pqcache.store.drivers.local import LocalTarget

        return LocalTarget(local_path(url), options)
    if scheme == "hdfs":
        with installed(url, "hdfs-native", "hdfs"):
            from pqcache.store.drivers.hdfs import HdfsTarget
        return HdfsTarget(url, options, block_size, timeout)
    if scheme == "s3":
        with installed(url, "botocore", "s3"):
            from pqcache.store.drivers.s3 import S3Target
        return S3Target(url, options, timeout)
    if scheme in _OBJECT_STORES:
        with installed(url, "obstore", _OBJECT_STORES[scheme]):
            from pqcache.store.drivers.object_store import ObjectStoreTarget
        return ObjectStoreTarget(url, options, timeout)
    if scheme == "webhdfs":
        raise UsageError(redact(url), "webhdfs:// can be read, not written", "write hdfs:// with the RPC port instead")
    if scheme in ("pqcache+http", "pqcache+https"):
        raise UsageError(redact(url), "a served cache can be read, not written", "write to the machine that serves it")
    if _has_file_system(url):
        advice = "write to hdfs://, s3://, gs://, abfss:// or a path, and copy it from there"
        raise UsageError(redact(url), f"{scheme}:// can be read, not written", advice)
    raise UsageError(
        redact(url), f"unknown scheme {scheme}://", "a target is hdfs://, s3://, gs://, abfss:// or a path"
    )


def _has_file_system(url: str) -> bool:
    """Raises UsageError if fsspec is missing."""
    with installed(url, "fsspec and aiohttp", "http"):
        from pqcache.store.drivers.fsspec_source import is_known

        return is_known(url)


@contextmanager
def installed(url: str, libraries: str, extra: str) -> Iterator[None]:
    """Raise UsageError about ``url`` if an import inside the block finds a library missing."""
    try:
        yield
    except ImportError as error:
        if (error.name or "pqcache").partition(".")[0] == "pqcache":
            raise  # an error of this package's own
        advice = f"install the extra with: pip install 'pqcache[{extra}]'"
        raise UsageError(redact(url), f"needs {libraries}", advice) from error
