"""Whether two URLs name one source, as far as that is known without asking their stores."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from ipaddress import ip_address
from urllib.parse import urlsplit

from pqcache.store.urls import local_path, url_scheme

_KINDS = {"gcs": "gs", "abfs": "az", "abfss": "az"}
_PORTS = {"hdfs": "8020", "webhdfs": "9870", "http": "80", "https": "443", "pqcache+http": "80", "pqcache+https": "443"}
_ENDPOINT = "endpoint"


def is_same_source(one: str, other: str, options: Mapping[str, str], other_options: Mapping[str, str]) -> bool:
    """Return whether two URLs or paths, each with the options of its store, are known to be one source.

    Other spellings are: a relative path, a link, ``file://``, a trailing slash, ``s3a://``, a user, a default port,
    another name of a host or an endpoint, and a NameNode of an HDFS nameservice. False also where it is not known.

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
    kind = _KINDS.get(scheme, scheme)
    host = (host if kind == "az" else host.rpartition("@")[2]).lower()
    if scheme in _PORTS and host and not host.rpartition(":")[2].isdigit():
        host = f"{host}:{_PORTS[scheme]}"
    return kind, host, path.strip("/")


def _is_same_host(kind: str, one: str, other: str) -> bool:
    """Whether two hosts with ports are one server; web servers may share an address."""
    (name, _, port), (other_name, _, other_port) = one.rpartition(":"), other.rpartition(":")
    if kind not in _PORTS or not port or port != other_port:
        return False
    return bool(_addresses(name) & _addresses(other_name)) if kind == "webhdfs" else _is_here(name, other_name)


def _is_same_endpoint(options: Mapping[str, str], other: Mapping[str, str]) -> bool:
    """Whether two sets of options name one endpoint; an endpoint that is not named may be any."""
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
    from pqcache.store.drivers.hadoop import site_configuration  # and an XML parser, which few syncs need

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
