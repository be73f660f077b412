"""Opens the source or target for a URL's scheme, and compares URLs without contacting their stores."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from ipaddress import ip_address
from urllib.parse import urlsplit

from pqcache.errors import UsageError
from pqcache.options import HDFS3, HDFS_NATIVE, TIMEOUT
from pqcache.store.drivers.base import Source, Target
from pqcache.store.urls import check_url, local_path, redact, url_scheme, with_usual_scheme

_OBJECT_STORES = {"gs": "gcs", "gcs": "gcs", "az": "azure", "abfs": "azure", "abfss": "azure"}  # scheme -> extra


def open_source(
    url: str, options: Mapping[str, str] | None = None, timeout: float = TIMEOUT, hdfs_driver: str = HDFS_NATIVE
) -> Source:
    """Open the source at ``url`` with the store options ``options`` (``-o key=value``).

    A server that sends nothing for ``timeout`` seconds counts as unavailable. Nothing is contacted yet. An unknown
    scheme or option, a malformed URL or a missing extra raises UsageError.
    """
    check_url(url)
    options, url = options or {}, with_usual_scheme(url)
    scheme = url_scheme(url)
    if scheme in ("", "file"):
        from pqcache.store.drivers.local import LocalSource, open_snapshot

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
    """Open the target at ``url``; ``options``, ``timeout`` and errors are as for ``open_source``.

    On HDFS its files get blocks of ``block_size`` bytes, or the cluster's default if None. A scheme that cannot be
    written raises UsageError.
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
def installed(url: str, libraries: str, extra: str, table: str = "") -> Iterator[None]:
    """Raise UsageError about ``url`` if an import inside the block finds a library missing.

    ``table`` is the kind of table found there, if the table needs the library.
    """
    try:
        yield
    except ImportError as error:
        if (error.name or "pqcache").partition(".")[0] == "pqcache":
            raise  # an error of this package's own
        reason, advice = f"needs {libraries}", f"install the extra with: pip install 'pqcache[{extra}]'"
        if table:
            reason = f"is {table}, which {reason}"
            advice = f"{advice}, or take its files as they are with --as-files (as_files=True)"
        raise UsageError(redact(url), reason, advice) from error


KINDS = {"gcs": "gs", "abfs": "az", "abfss": "az"}  # schemes of one store
_PORTS = {"hdfs": "8020", "webhdfs": "9870", "http": "80", "https": "443", "pqcache+http": "80", "pqcache+https": "443"}
_ENDPOINT = "endpoint"


def is_same_source(one: str, other: str, options: Mapping[str, str], other_options: Mapping[str, str]) -> bool:
    """Whether two URLs or paths, each with its store options, are known to be the same source.

    They may differ in spelling: a relative path, a link, ``file://``, a trailing slash, ``s3a://``, a user, a default
    port, another name of a host or an endpoint, and a NameNode of an HDFS nameservice. False if unknown.

    >>> is_same_source("s3a://lake/shop/", "s3://lake/shop", {}, {}), is_same_source("lake/a", "lake/b", {}, {})
    (True, False)
    """
    (kind, host, path), (other_kind, other_host, other_path) = _parts(one), _parts(other)
    if (kind, path) != (other_kind, other_path):
        return False
    if kind == "hdfs":
        both = {**options, **other_options}
        return host == other_host or bool(_name_nodes(host, both) & _name_nodes(other_host, both))
    if kind == "az":  # the account may be an option
        container, _, account = host.partition("@")
        other_container, _, other_account = other_host.partition("@")
        same = container == other_container and (account == other_account or not (account and other_account))
        return same and _is_same_endpoint(options, other_options)
    return (host == other_host or _is_same_host(kind, host, other_host)) and _is_same_endpoint(options, other_options)


def _parts(url: str) -> tuple[str, str, str]:
    """Kind of store, host or bucket with port, and path."""
    scheme = url_scheme(url)
    if scheme in ("", "file"):
        return "file", "", os.path.realpath(os.path.expanduser(local_path(url)))
    host, _, path = url.partition("://")[2].partition("/")
    kind = KINDS.get(scheme, scheme)
    host = (host if kind == "az" else host.rpartition("@")[2]).lower()
    if scheme in _PORTS and host and not host.rpartition(":")[2].isdigit():
        host = f"{host}:{_PORTS[scheme]}"
    return kind, host, path.strip("/")


def _is_same_host(kind: str, one: str, other: str) -> bool:
    """Whether two hosts with ports are the same server; web servers may share an address."""
    (name, _, port), (other_name, _, other_port) = one.rpartition(":"), other.rpartition(":")
    if kind not in _PORTS or not port or port != other_port:
        return False
    return bool(_addresses(name) & _addresses(other_name)) if kind == "webhdfs" else _is_here(name, other_name)


def _is_same_endpoint(options: Mapping[str, str], other: Mapping[str, str]) -> bool:
    """Whether two sets of options may have one endpoint; an unnamed one may be any."""
    one, two = options.get(_ENDPOINT), other.get(_ENDPOINT)
    if one is None or two is None or one.rstrip("/") == two.rstrip("/"):
        return True
    try:
        here, there = urlsplit(one), urlsplit(two)
        ports = here.port or _PORTS.get(here.scheme), there.port or _PORTS.get(there.scheme)
    except ValueError:
        return False
    if here.path.rstrip("/") != there.path.rstrip("/") or str(ports[0]) != str(ports[1]):
        return False
    return here.hostname == there.hostname or bool(_addresses(here.hostname or "") & _addresses(there.hostname or ""))


def _name_nodes(host: str, options: Mapping[str, str]) -> set[tuple[str, str]]:
    """Addresses and ports of an HDFS host or nameservice; an empty one is the default."""
    from pqcache.store.drivers.hdfs import site_configuration  # and an XML parser, which few syncs need

    known = {**site_configuration(), **options}
    if not host:
        host = urlsplit(known.get("fs.defaultFS", known.get("fs.default.name", ""))).netloc.rpartition("@")[2]
    service = host.removesuffix(f":{_PORTS['hdfs']}").lower()
    prefix = "dfs.namenode.rpc-address."
    nodes = [value for name, value in known.items() if name.lower().startswith(f"{prefix}{service}.")]
    found: set[tuple[str, str]] = set()
    for node in nodes or [host]:
        name, _, port = node.lower().rpartition(":")
        name, port = (name, port) if port.isdigit() else (node.lower(), _PORTS["hdfs"])
        found |= {(address, port) for address in _addresses(name)}
    return found


def _addresses(name: str) -> set[str]:
    """The host's name, and its addresses if it resolves."""
    found = {name.strip("[]")}
    with suppress(OSError, UnicodeError):
        found |= {str(item[4][0]) for item in socket.getaddrinfo(name.strip("[]"), None)}
    return found


def _is_here(*names: str) -> bool:
    def is_loopback(name: str) -> bool:
        try:
            return name == "localhost" or ip_address(name.strip("[]")).is_loopback
        except ValueError:
            return False

    return all(map(is_loopback, names))
