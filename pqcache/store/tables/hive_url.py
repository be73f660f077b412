"""The URL of a table in a Hive metastore, and the options of the metastore and of the stores of its files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from urllib.parse import unquote

from pqcache.errors import UsageError
from pqcache.store.tables.base import OpenOptions
from pqcache.store.urls import redact

NONE, PLAIN, KERBEROS = "none", "plain", "kerberos"
BUFFERED, FRAMED = "buffered", "framed"
OPTIONS = {
    "auth": "none, plain (user and password) or kerberos",
    "principal": "that of the metastore, like hive/_HOST@REALM",
    "transport": "buffered or framed",
    "user": "user name",
    "password": "password",
}
_PORT = 9083
_FORM = "write hive://HOST:9083/DATABASE.TABLE"
_URL = re.compile(r"[^:]+://(?:(?P<login>[^/]*)@)?(?P<hosts>[^/@]+)/(?P<database>[^/.?#]+)\.(?P<name>[^/.?#]+)/?")
_HOST = re.compile(r"(?P<host>[^:\[\]]+|\[[0-9a-fA-F:.]+\])(:(?P<port>\d+))?")


@dataclass(frozen=True, kw_only=True)
class MetastoreAddress:
    """Where metastores are, and how to log in.

    Attributes:
        url: their URL without a password, the subject of errors.
        hosts: host and port of each; they are tried in turn.
        transport: ``buffered`` or ``framed``.
        auth: ``none``, ``plain`` for user and password (LDAP), or ``kerberos``.
        user: with ``plain``.
        password: with ``plain``.
        principal: with ``kerberos``, like ``hive/_HOST@REALM``, of which service and host are used.
        timeout: seconds without a byte.
    """

    url: str
    hosts: tuple[tuple[str, int], ...]
    transport: str = BUFFERED
    auth: str = NONE
    user: str = ""
    password: str = field(default="", repr=False)
    principal: str = "hive/_HOST"
    timeout: float


@dataclass(frozen=True)
class MetastoreTable:
    """A table by its name, and where its metastore is."""

    address: MetastoreAddress
    database: str
    name: str


def parse_url(url: str, options: OpenOptions) -> MetastoreTable:
    """Return what a ``hive://`` URL names; raises UsageError for a malformed one, options or missing libraries."""
    shown, found = redact(url).rstrip("/"), _URL.fullmatch(url)
    if found is None:
        raise UsageError(shown, "names no table of a metastore", _FORM)
    given = options.store
    user, _, password = map(unquote, (found["login"] or "").partition(":"))
    user, password = given.get("user") or user, given.get("password") or password
    auth = given.get("auth", PLAIN if password else NONE)
    address = MetastoreAddress(
        url=shown,
        hosts=tuple(_host(text, shown) for text in found["hosts"].split(",")),
        transport=given.get("transport", BUFFERED),
        auth=auth,
        user=user,
        password=password,
        principal=given.get("principal", "hive/_HOST"),
        timeout=options.timeout,
    )
    _check(address)
    return MetastoreTable(address, found["database"], found["name"])


def store_options(options: Mapping[str, str], scheme: str) -> Mapping[str, str]:
    """Return those of all options that are for the store of a location: names with a dot are Hadoop's."""
    if scheme in ("", "file"):
        return {}
    return {
        name: value for name, value in options.items() if name not in OPTIONS and ("." in name) == (scheme == "hdfs")
    }


def _host(text: str, url: str) -> tuple[str, int]:
    found = _HOST.fullmatch(text)
    port = int(found["port"] or _PORT) if found else 0
    if found is None or not 0 < port < 65536:
        raise UsageError(url, f"{text!r} is no HOST:PORT", _FORM)
    return found["host"].strip("[]"), port


def _check(address: MetastoreAddress) -> None:
    """Raise UsageError for options that make no sense, or whose libraries are missing."""
    if address.transport not in (BUFFERED, FRAMED):
        raise UsageError(f"-o transport={address.transport}", f"choose {BUFFERED} or {FRAMED}")
    if address.auth not in (NONE, PLAIN, KERBEROS):
        raise UsageError(f"-o auth={address.auth}", f"choose {NONE}, {PLAIN} or {KERBEROS}")
    if address.auth == NONE:
        if address.password:
            raise UsageError("-o password", "is given with -o auth=none", "leave one of them out")
        return
    if address.transport == FRAMED:
        raise UsageError("-o transport=framed", f"does not go with -o auth={address.auth}", "leave it out")
    if address.auth == PLAIN and not (address.user and address.password):
        advice = "give them with -o user=USER -o password=PASSWORD"
        raise UsageError("-o auth=plain", "needs a user and a password", advice)
    if address.auth == KERBEROS and not re.fullmatch(r"[^/@]+/[^/@]+(@[^/@]+)?", address.principal):
        raise UsageError(f"-o principal={address.principal}", "is no principal", "write hive/_HOST@REALM")
    needed = {PLAIN: ["puresasl"], KERBEROS: ["puresasl", "kerberos"]}[address.auth]
    if any(find_spec(name) is None for name in needed):
        raise UsageError(
            f"-o auth={address.auth}",
            f"needs {' and '.join(name.replace('puresasl', 'pure-sasl') for name in needed)}",
            f"install with: pip install '{'pqcache[hive]' if address.auth == PLAIN else 'pure-sasl[gssapi]'}'",
        )
