"""The configuration that libhdfs3 gets: the site's Hadoop configuration and the user's options, checked.

libhdfs3 ends the process over a value that it cannot parse, and hdfs3's own reader of configuration files fails on
valid ones. So the files are read and checked here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from pqcache.errors import UsageError
from pqcache.store.drivers.hadoop_site import read_xml, site_files, with_variables_replaced
from pqcache.store.drivers.hdfs_user import environment_user
from pqcache.store.urls import redact, userinfo

OPTIONS = {
    "user": "user name, as in hdfs://USER@HOST:PORT",
    "effective_user": "user to act for, as a proxy user",
    "ticket_cache": "path of the Kerberos ticket cache",
    "token": "delegation token",
}

# Keys whose values libhdfs3 does not read as text:
# https://github.com/ContinuumIO/libhdfs3-downstream, src/common/SessionConfig.cpp
_TRUE_OR_FALSE = """rpc.client.connect.tcpnodelay dfs.client.read.shortcircuit output.replace-datanode-on-failure
    output.replace-datanode-on-failure.best-effort input.notretry-another-node input.localread.mappedfile
    dfs.client.use.legacy.blockreader.local dfs.encrypt.data.transfer input.read.default.verify
    dfs.block.access.token.enable"""
_AT_LEAST = {  # the smallest number that is allowed
    -(1 << 31): """rpc.client.ping.interval rpc.client.connect.timeout rpc.client.read.timeout
    rpc.client.write.timeout rpc.client.socekt.linger.timeout rpc.client.timeout input.connect.timeout
    input.read.timeout input.write.timeout output.default.packetsize output.connect.timeout
    output.read.timeout output.write.timeout output.close.timeout output.packetpool.size
    output.heeartbeat.interval hadoop.security.crypto.buffer.size kms.send.request.retry.times
    kms.send.request.timeout""",
    0: """dfs.client.failover.max.attempts dfs.client.read.shortcircuit.streams.cache.size
    dfs.client.socketcache.expiryMsec dfs.client.socketcache.capacity""",
    1: """rpc.client.max.idle rpc.client.connect.retry dfs.default.replica input.localread.default.buffersize
    dfs.prefetchsize input.read.getblockinfo.retry input.localread.blockinfo.cachesize input.read.max.retry
    output.default.write.retry""",
    512: "output.default.chunksize dfs.default.blocksize",
}
_BOOLEANS = frozenset(_TRUE_OR_FALSE.split())
_NUMBERS = {name: least for least, names in _AT_LEAST.items() for name in names.split()}
_WORDS = {
    "dfs.client.log.severity": ("FATAL", "ERROR", "WARNING", "INFO", "DEBUG1", "DEBUG2", "DEBUG3"),
    "hadoop.rpc.protection": ("authentication", "integrity", "privacy"),
    "dfs.data.transfer.protection": ("authentication", "integrity", "privacy"),
}
_HOST = re.compile(r"([\w.-]+|\[[0-9a-fA-F:.]+\])(?::(\d{1,5}))?", re.ASCII)


def settings(url: str, options: Mapping[str, str], timeout: float) -> dict[str, str]:
    """Return Hadoop's keys and values for libhdfs3: the site's, over them pqcache's, and over these ``options``.

    An unknown option, and a value that libhdfs3 cannot parse, raise UsageError.
    """
    for name, value in options.items():
        if name not in OPTIONS and "." not in name:
            choices = ", ".join(sorted(OPTIONS))
            raise UsageError(f"-o {name}=...", "hdfs3 has no such option", f"it has: {choices}, and Hadoop's keys")
        if "\0" in value or not value:
            raise UsageError(f"-o {name}=...", "has no value, or one with a NUL character")
    site = _site_configuration()
    milliseconds = max(2, int(timeout * 1000))
    limits = {
        # its own limits allow for an hour of tries; an RPC takes twice its timeout
        **dict.fromkeys(
            ("rpc.client.timeout", "rpc.client.connect.timeout", "rpc.client.write.timeout"),
            str(milliseconds // 2),
        ),
        **dict.fromkeys(("input.connect.timeout", "input.read.timeout", "input.write.timeout"), str(milliseconds)),
        "rpc.client.connect.retry": "1",
        "input.read.max.retry": "1",
        "dfs.client.failover.max.attempts": "4",
        "dfs.client.read.shortcircuit": "false",
        "dfs.client.log.severity": "FATAL",  # else it writes to standard error
    }
    chosen = {name: value for name, value in options.items() if name not in OPTIONS}
    merged = {**site, **limits, **chosen}
    return {name: _checked(url, name, value) for name, value in merged.items() if _is_needed(name, value)}


def _is_needed(name: str, value: str) -> bool:
    return "." in name and (value != "" or name in _BOOLEANS or name in _NUMBERS or name in _WORDS)


def _checked(url: str, name: str, value: str) -> str:
    """Return a value as libhdfs3 can parse it; raises UsageError for one that would end the process."""
    if name in _BOOLEANS:
        if value.lower() not in ("true", "false", "1", "0"):
            raise UsageError(url, f"{name}={value!r} is neither true nor false", f"correct it, or use -o {name}=")
        return value.lower()
    if name in _NUMBERS:
        least, most = _NUMBERS[name], (1 << 31) - 1
        number = int(value) if re.fullmatch(r"[+-]?\d{1,10}", value, re.ASCII) else None
        if number is None or not least <= number <= most or (least == 512 and number % 512):
            what = "a multiple of 512" if least == 512 else f"a whole number from {least} to {most}"
            raise UsageError(url, f"{name}={value!r} is not {what}", f"correct it, or use -o {name}=")
        return str(number)
    if name in _WORDS:
        word = value.partition(",")[0].strip()  # Hadoop allows several; libhdfs3 takes one
        if word.lower() not in map(str.lower, _WORDS[name]):
            raise UsageError(url, f"{name}={value!r} is none of {', '.join(_WORDS[name])}")
        return word
    return value


def login(url: str, options: Mapping[str, str], configuration: Mapping[str, str]) -> dict[str, str]:
    """Return the user, ticket or token to connect with, under the names of hdfs3's parameters."""
    parameters = {name: value for name, value in options.items() if name in OPTIONS}
    if "token" in parameters and "ticket_cache" in parameters:
        raise UsageError(redact(url), "has a token and a ticket cache", "give -o token= or -o ticket_cache=, not both")
    user = parameters.get("user") or userinfo(url)[0]
    if not user and configuration.get("hadoop.security.authentication", "simple").lower() == "simple":
        user = environment_user()
    if user and "token" not in parameters:
        parameters["user"] = user
    return parameters


def name_node(url: str, host: str, configuration: Mapping[str, str]) -> tuple[str, int | None]:
    """Return the host and port to connect to, or the HA nameservice and None."""
    default = configuration.get("fs.defaultFS") or configuration.get("fs.default.name") or ""
    if not host and default.startswith("hdfs://"):
        host = default.removeprefix("hdfs://").partition("/")[0]
    match = _HOST.fullmatch(host)
    if match is None:
        raise UsageError(url, "no host", "write hdfs://HOST:PORT/PATH or set HADOOP_CONF_DIR")
    services = [name.strip() for name in configuration.get("dfs.nameservices", "").split(",")]
    if match[2] is None and match[1] in services:
        return match[1], None
    port = int(match[2] or 8020)
    if not 0 < port < 65536:
        raise UsageError(url, f"{port} is not a port", "write hdfs://HOST:PORT/PATH")
    return match[1], port


def _site_configuration() -> dict[str, str]:
    """Return the properties in the site's configuration files, and where these have none, in libhdfs3's own file."""
    file = os.environ.get("LIBHDFS3_CONF", "")  # libhdfs3 reads this one by itself, from after a '='
    file = file.partition("=")[2] or file
    values = read_xml(file or "hdfs-client.xml", strict=True, missing="correct LIBHDFS3_CONF" if file else "")
    return with_variables_replaced({**values, **site_files()})
