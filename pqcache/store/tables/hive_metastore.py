"""A table of a Hive metastore: its partitions, wherever they are, and their current files.

The metastore has no versions of a table. It is asked for each listing, and each location is listed by the driver of its
store. Files are selected as for a directory, see ``data_files.py``.

The client makes the three calls that a listing needs, by Apache Thrift. It declares only the fields that are used; the
library skips all others, so 100,000 partitions take little memory. All versions from 2.3 to 4 have the calls; older
ones lack ``get_table_req``, so ``get_table`` is used.
"""

from __future__ import annotations

import logging
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from itertools import islice
from struct import error as StructError
from sys import intern
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote

from thrift.protocol.TBase import TBase
from thrift.protocol.TBinaryProtocol import TBinaryProtocolAccelerated
from thrift.Thrift import TApplicationException, TException, TMessageType, TType
from thrift.transport import TTransport
from thrift.transport.TSocket import TSocket
from thrift.transport.TTransport import TTransportException

from pqcache.errors import (
    SourceDenied,
    SourceError,
    SourceIncomplete,
    SourceNotFound,
    SourceUnavailable,
    UsageError,
    first_line,
)
from pqcache.events import Warned
from pqcache.store.drivers.base import FIRST_ANSWER_TIMEOUT, Capabilities, Source
from pqcache.store.drivers.registry import open_source
from pqcache.store.drivers.remote import censored, known_cause
from pqcache.store.drivers.timeouts import SourceTooSlow, SpeedFloor, TooSlow
from pqcache.store.manifest import Identity, TableVersion
from pqcache.store.partition_paths import NULL, is_hidden_directory, partition_table
from pqcache.store.tables.base import (
    METASTORE_OPTIONS,
    OpenOptions,
    StoreFiles,
    Table,
    TableFile,
    TableListing,
    partition_path,
    store_options,
    usual_url,
)
from pqcache.store.urls import redact, url_scheme
from pqcache.system.threads import in_parallel
from pqcache.units import format_count, printable

if TYPE_CHECKING:
    import pyarrow as pa


NONE, PLAIN, KERBEROS = "none", "plain", "kerberos"
BUFFERED, FRAMED = "buffered", "framed"
_PORT = 9083
_FORM = "write hive://HOST:9083/DATABASE.TABLE"
_URL = re.compile(r"[^:]+://(?:(?P<login>[^/]*)@)?(?P<hosts>[^/@]+)/(?P<database>[^/.?#]+)\.(?P<name>[^/.?#]+)/?")
_HOST = re.compile(r"(?P<host>[^:\[\]]+|\[[0-9a-fA-F:.]+\])(:(?P<port>\d+))?")


@dataclass(frozen=True, kw_only=True)
class MetastoreTable:
    """A table by its name, with its metastores and how to log in.

    Attributes:
        url: its URL without a password, the subject of errors.
        hosts: host and port of each metastore; they are tried in turn.
        transport: ``buffered`` or ``framed``.
        auth: ``none``, ``plain`` for user and password (LDAP), or ``kerberos``.
        user: with ``plain``.
        password: with ``plain``.
        principal: with ``kerberos``, like ``hive/_HOST@REALM``, of which service and host are used.
        timeout: seconds without a byte.
    """

    url: str
    hosts: tuple[tuple[str, int], ...]
    database: str
    name: str
    transport: str = BUFFERED
    auth: str = NONE
    user: str = ""
    password: str = field(default="", repr=False)
    principal: str = "hive/_HOST"
    timeout: float


def parse_url(url: str, options: OpenOptions) -> MetastoreTable:
    """Parse a ``hive://`` URL and its options; raises UsageError for malformed ones and for missing libraries."""
    shown, found = redact(url).rstrip("/"), _URL.fullmatch(url)
    if found is None:
        raise UsageError(shown, "names no table of a metastore", _FORM)
    given = options.store
    user, _, password = map(unquote, (found["login"] or "").partition(":"))
    user, password = given.get("user") or user, given.get("password") or password
    auth = given.get("auth", PLAIN if password else NONE)
    table = MetastoreTable(
        url=shown,
        hosts=tuple(_host(text, shown) for text in found["hosts"].split(",")),
        database=found["database"],
        name=found["name"],
        transport=given.get("transport", BUFFERED),
        auth=auth,
        user=user,
        password=password,
        principal=given.get("principal", "hive/_HOST"),
        timeout=options.timeout,
    )
    _check_login(table)
    return table


def _host(text: str, url: str) -> tuple[str, int]:
    found = _HOST.fullmatch(text)
    port = int(found["port"] or _PORT) if found else 0
    if found is None or not 0 < port < 65536:
        raise UsageError(url, f"{text!r} is not HOST:PORT", _FORM)
    return found["host"].strip("[]"), port


def _check_login(table: MetastoreTable) -> None:
    """Raise UsageError for options that contradict each other, or whose libraries are missing."""
    if table.transport not in (BUFFERED, FRAMED):
        raise UsageError(f"-o transport={table.transport}", f"choose {BUFFERED} or {FRAMED}")
    if table.auth not in (NONE, PLAIN, KERBEROS):
        raise UsageError(f"-o auth={table.auth}", f"choose {NONE}, {PLAIN} or {KERBEROS}")
    if table.auth == NONE:
        if table.password:
            raise UsageError("-o password", "is given with -o auth=none", "leave one of them out")
        return
    if table.transport == FRAMED:
        raise UsageError("-o transport=framed", f"does not go with -o auth={table.auth}", "leave it out")
    if table.auth == PLAIN and not (table.user and table.password):
        advice = "give them with -o user=USER -o password=PASSWORD"
        raise UsageError("-o auth=plain", "needs a user and a password", advice)
    if table.auth == KERBEROS and not re.fullmatch(r"[^/@]+/[^/@]+(@[^/@]+)?", table.principal):
        raise UsageError(f"-o principal={table.principal}", "is not a Kerberos principal", "write hive/_HOST@REALM")
    needed = {PLAIN: ["puresasl"], KERBEROS: ["puresasl", "kerberos"]}[table.auth]
    if any(find_spec(name) is None for name in needed):
        raise UsageError(
            f"-o auth={table.auth}",
            f"needs {' and '.join(name.replace('puresasl', 'pure-sasl') for name in needed)}",
            f"install with: pip install '{'pqcache[hive]' if table.auth == PLAIN else 'pure-sasl[gssapi]'}'",
        )


# ---- the structs

Kind = tuple[int, Any]  # a type of Thrift and its parameters

TEXT: Kind = (TType.STRING, "UTF8")
TEXTS: Kind = (TType.MAP, (*TEXT, *TEXT, False))


def list_of(kind: Kind) -> Kind:
    return TType.LIST, (*kind, False)


def struct_of(kind: Any) -> Kind:
    return TType.STRUCT, [kind, kind.thrift_spec]


def struct(fields: Mapping[int, tuple[str, Kind]]) -> Any:
    """Make a class of values with the named fields, by their numbers."""
    numbers = range(max(fields) + 1)
    spec = tuple((n, fields[n][1][0], fields[n][0], fields[n][1][1], None) if n in fields else None for n in numbers)

    def begin(self: Any, **values: Any) -> None:
        self.__dict__.update(values)

    names: dict[str, Any] = {name: None for name, _ in fields.values()}
    return type("Struct", (TBase,), {**names, "thrift_spec": spec, "__init__": begin})


def args(*kinds: Kind) -> Any:
    """Make a class for the arguments of a call, ``a1``, ``a2`` and so on."""
    return struct({number: (f"a{number}", kind) for number, kind in enumerate(kinds, 1)})


def result(kind: Kind) -> Any:
    """Make a class for the result of a call: ``success``, or one of three errors."""
    error = struct_of(ERROR)
    return struct({0: ("success", kind), 1: ("o1", error), 2: ("o2", error), 3: ("o3", error)})


ERROR = struct({1: ("message", TEXT)})
FIELD = struct({1: ("name", TEXT), 2: ("type", TEXT)})
SERDE = struct({2: ("serializationLib", TEXT), 3: ("parameters", TEXTS)})
STORAGE = struct(
    {
        2: ("location", TEXT),
        3: ("inputFormat", TEXT),
        7: ("serdeInfo", struct_of(SERDE)),
        12: ("storedAsSubDirectories", (TType.BOOL, None)),
    }
)
TABLE = struct(
    {
        7: ("sd", struct_of(STORAGE)),
        8: ("partitionKeys", list_of(struct_of(FIELD))),
        9: ("parameters", TEXTS),
        12: ("tableType", TEXT),
    }
)
PARTITION = struct({1: ("values", list_of(TEXT)), 6: ("sd", struct_of(STORAGE))})
CAPABILITIES = struct({1: ("values", list_of((TType.I32, None)))})
GET_TABLE_REQUEST = struct({1: ("dbName", TEXT), 2: ("tblName", TEXT), 3: ("capabilities", struct_of(CAPABILITIES))})
TABLE_RESULT = result(struct_of(TABLE))
GET_TABLE_RESULT = result(struct_of(struct({1: ("table", struct_of(TABLE))})))
NAMES_RESULT = result(list_of(TEXT))
PARTITIONS_RESULT = result(list_of(struct_of(PARTITION)))

GET_TABLE = args(TEXT, TEXT)
GET_TABLE_REQ = args(struct_of(GET_TABLE_REQUEST))
GET_PARTITION_NAMES = args(TEXT, TEXT, (TType.I16, None))
GET_PARTITIONS_BY_NAMES = args(TEXT, TEXT, list_of(TEXT))


# ---- the client

T = TypeVar("T")

BATCH = 500  # partitions of one call; servers may limit how many they send
_MAX_ITEMS = 10_000_000  # of a list, so that a server that is not a metastore cannot make the library reserve memory
_INSERT_ONLY_TABLES = 2  # a capability: without it, a metastore hides why it does not show such a table
_DENIED = re.compile(r"AccessControlException|permission denied|not authorized|access denied", re.IGNORECASE)
_NOT_THRIFT = (TException, StructError, ValueError, TypeError, ArithmeticError, MemoryError, RecursionError)


@dataclass(frozen=True, kw_only=True, slots=True)
class Storage:
    """Location and format of files in the metastore; empty texts if unset.

    ``subdirectories``: whether Hive divides the rows among subdirectories by skewed values.
    """

    location: str
    input_format: str
    serde: str
    subdirectories: bool = False
    path: str = ""  # where Spark keeps the files of a table that it does not store as Hive does


@dataclass(frozen=True, kw_only=True)
class TableEntry:
    """A table in the metastore; ``keys`` are its partition columns with their Hive types."""

    kind: str
    storage: Storage
    keys: tuple[tuple[str, str], ...]
    parameters: Mapping[str, str]


Partition = tuple[tuple[str, ...], Storage]  # its values, as the columns are ordered


def ask(table: MetastoreTable, question: Callable[[Metastore], T]) -> T:
    """Ask one metastore after the other until one answers; any error but SourceUnavailable is raised at once."""
    failed: list[SourceUnavailable] = []
    for host, port in table.hosts:
        try:
            with closing(Metastore(table, host, port)) as metastore:
                return question(metastore)
        except SourceError as error:
            shown = censored(error, [table.password], error)
            if not isinstance(shown, SourceUnavailable):
                raise shown from shown.__cause__
            failed.append(shown)
    if len(failed) == 1:
        raise failed[0]
    reason = "; ".join(error.reason for error in failed)
    raise SourceUnavailable(table.url, f"none of {len(failed)} metastores answers ({reason})")


class Metastore:
    """An open connection to a metastore, for the calls about one table."""

    def __init__(self, named: MetastoreTable, host: str, port: int) -> None:
        self._named, self._place = named, f"{host}:{port}"
        self._socket: Any = None
        self._protocol: Any = None
        self._connect(host, port)

    def table(self) -> TableEntry:
        """Raises SourceNotFound if the metastore has no table of this name."""
        database, name = self._named.database, self._named.name
        able = CAPABILITIES(values=[_INSERT_ONLY_TABLES])
        request = GET_TABLE_REQUEST(dbName=database, tblName=name, capabilities=able)
        try:
            answer = self._call("get_table_req", GET_TABLE_REQ(a1=request), GET_TABLE_RESULT)
            found = answer.success and answer.success.table
        except _UnknownMethod:
            found = self._call("get_table", GET_TABLE(a1=database, a2=name), TABLE_RESULT).success
        if found is None or found.sd is None:
            raise self._no_metastore("it sends no table")
        keys = tuple((key.name or "", key.type or "") for key in found.partitionKeys or ())
        kind = found.tableType or ""
        return TableEntry(kind=kind, storage=_storage(found.sd), keys=keys, parameters=dict(found.parameters or {}))

    def partition_names(self) -> list[str]:
        arguments = GET_PARTITION_NAMES(a1=self._named.database, a2=self._named.name, a3=-1)
        return list(self._call("get_partition_names", arguments, NAMES_RESULT).success or ())

    def partitions(self, names: Sequence[str]) -> list[Partition]:
        """Ask for the partitions of these names, a few hundred at a time; deleted ones are left out.

        Raises SourceIncomplete if the metastore sends fewer than it has, as the others would seem deleted.
        """
        partitions: list[Partition] = []
        for start in range(0, len(names), BATCH):
            some = list(names[start : start + BATCH])
            arguments = GET_PARTITIONS_BY_NAMES(a1=self._named.database, a2=self._named.name, a3=some)
            for sent in self._call("get_partitions_by_names", arguments, PARTITIONS_RESULT).success or ():
                if sent.sd is None:
                    raise self._no_metastore("it sends a partition without a storage")
                partitions.append((tuple(sent.values or ()), _storage(sent.sd)))
        found = {values for values, _ in partitions}
        if len(found) < len(names):
            there = set(self.partition_names()).intersection(names)
            lacking = sorted(name for name in there if _values_in(name) not in found)
            if len(there) > len(found):
                first = f", not {printable(lacking[0])}" if lacking else ""
                reason = f"{self._place} names {format_count(len(there), 'partition')} and sends {len(found):,}{first}"
                raise SourceIncomplete(self._named.url, reason, "nothing was published, check the metastore's log")
        return partitions

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()

    def _connect(self, host: str, port: int) -> None:
        try:
            plain = socket.create_connection((host, port), min(self._named.timeout, FIRST_ANSWER_TIMEOUT))
        except OSError as error:
            advice = "" if len(self._named.hosts) > 1 else "check host and port, and that the metastore runs"
            raise self._unavailable((error.strerror or first_line(error)).lower(), advice) from error
        plain.settimeout(self._named.timeout)
        self._socket = _Socket(self._named.timeout)
        self._socket.setHandle(plain)
        try:
            with self._errors():
                transport = self._transport(host)
            self._protocol = TBinaryProtocolAccelerated(transport, strictRead=True, container_length_limit=_MAX_ITEMS)
        except BaseException:
            plain.close()
            raise

    def _transport(self, host: str) -> Any:
        named = self._named
        if named.auth == NONE:
            kind = TTransport.TFramedTransport if named.transport == FRAMED else TTransport.TBufferedTransport
            return kind(self._socket)
        from puresasl import SASLError

        if named.auth == PLAIN:
            options = {"service": "hive", "mechanism": "PLAIN", "username": named.user, "password": named.password}
            refused: tuple[type[Exception], ...] = (SASLError,)
        else:
            from kerberos import KrbError

            service, _, instance = named.principal.partition("@")[0].partition("/")
            host = host.lower() if instance == "_HOST" else instance
            options = {"service": service, "mechanism": "GSSAPI"}
            refused = (SASLError, KrbError)
        try:
            transport = TTransport.TSaslClientTransport(self._socket, host, **options)
            transport.open()
        except refused as error:
            raise self._denied(first_line(error)) from error
        except TTransportException as error:
            if error.type == TTransportException.NOT_OPEN:
                raise self._denied(first_line(error)) from error
            raise
        return transport

    def _call(self, method: str, arguments: Any, result: Any) -> Any:
        protocol = self._protocol
        with self._errors():
            protocol.writeMessageBegin(method, TMessageType.CALL, 0)
            arguments.write(protocol)
            protocol.writeMessageEnd()
            protocol.trans.flush()
            answered, kind, _ = protocol.readMessageBegin()
            if kind == TMessageType.EXCEPTION:
                error = TApplicationException()
                error.read(protocol)
                if error.type == TApplicationException.UNKNOWN_METHOD:
                    raise _UnknownMethod
                raise SourceError(self._named.url, f"{self._place}: {_shown(error.message)}", _ASK)
            if answered != method:
                raise self._no_metastore(f"it answers {_shown(answered)}")
            found = result()
            found.read(protocol)
            protocol.readMessageEnd()
        self._check(method, found)
        return found

    def _check(self, method: str, found: Any) -> None:
        """Raise the error in an answer."""
        errors = [error for error in (found.o1, found.o2, found.o3) if error is not None]
        if not errors:
            return
        message = _shown(errors[0].message or "an error without a message")
        if method in ("get_table_req", "get_table") and found.o2 is not None:
            raise SourceNotFound(self._named.url, "the metastore has no such table", "check database and name")
        if _DENIED.search(message):
            raise SourceDenied(self._named.url, message, "request permission to read this table")
        raise SourceError(self._named.url, message, _ASK)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Turn errors of the Thrift library into those of this package."""
        try:
            yield
        except TooSlow as error:
            raise SourceTooSlow(self._named.url, f"{self._place} responds too slowly ({error})") from error
        except (TTransportException, EOFError, OSError) as error:
            inner = getattr(error, "inner", None)
            kind = getattr(error, "type", None)
            if isinstance(error, EOFError) or kind == TTransportException.END_OF_FILE:
                raise self._unavailable("closed the connection", _HINT) from error
            if kind in (TTransportException.SIZE_LIMIT, TTransportException.NEGATIVE_SIZE):
                raise self._no_metastore(first_line(error)) from error
            if kind == TTransportException.TIMED_OUT or isinstance(inner, TimeoutError):
                raise self._unavailable(f"no answer within {self._named.timeout:g} seconds", _HINT) from error
            raise self._unavailable(first_line(inner or error).lower()) from error
        except _NOT_THRIFT as error:
            raise self._no_metastore(first_line(error)) from error

    def _unavailable(self, reason: str, advice: str = "") -> SourceUnavailable:
        return SourceUnavailable(self._named.url, f"{self._place}: {reason}", advice)

    def _denied(self, reason: str) -> SourceError:
        if (known := known_cause(self._named.url, reason)) is not None:
            return known
        advice = "check user and password" if self._named.auth == PLAIN else "check the ticket with klist"
        return SourceDenied(self._named.url, f"{self._place} refuses the login ({_shown(reason)})", advice)

    def _no_metastore(self, what: str) -> SourceError:
        reason = f"{self._place} does not answer as a metastore does ({_shown(what)})"
        return SourceError(self._named.url, reason, "name the metastore's Thrift port, mostly 9083; " + _HINT)


class _UnknownMethod(Exception):
    """The metastore has no such call."""


class _Socket(TSocket):  # type: ignore[misc]  # the library has no types
    """A socket with a minimum speed."""

    def __init__(self, timeout: float) -> None:
        super().__init__()
        self._floor, self._limit = SpeedFloor(timeout), timeout

    def read(self, size: int) -> bytes:
        began = time.monotonic()
        data: bytes = super().read(size)
        self._floor.count(len(data), time.monotonic() - began)
        return data

    def write(self, data: bytes) -> None:
        self._floor = SpeedFloor(self._limit)
        super().write(data)


_HINT = "it may need -o auth=kerberos, -o auth=plain or -o transport=framed"
_ASK = "check the metastore's log"


def _values_in(name: str) -> tuple[str, ...]:
    """The values in a partition's name, where Hive encodes them as in a path."""
    return tuple(unquote(part.partition("=")[2]) for part in name.split("/"))


def _shown(text: object) -> str:
    return printable(first_line(str(text)))


def _storage(found: Any) -> Storage:
    serde = found.serdeInfo
    return Storage(
        location=found.location or "",
        input_format=intern(found.inputFormat or ""),  # one text for all partitions
        serde=intern((serde and serde.serializationLib) or ""),
        subdirectories=bool(found.storedAsSubDirectories),
        path=((serde and serde.parameters) or {}).get("path", ""),
    )


log = logging.getLogger("pqcache.store")

_THREADS = 16  # of listings
_AT_ONCE = 32  # partitions below the table's own location from which that is listed once instead of each of them
_SHARE = 10  # ... if they are at least a tenth of all that the metastore knows there
_MAX_FILES = 10_000_000  # of a location


@dataclass(frozen=True, slots=True)
class _Partition:
    """A partition, or all of a table without any: its directory in a cache, its location, and its storage."""

    directory: str
    location: str
    storage: Storage


class HiveTable(Table):
    """The table at ``hive://HOST:PORT/DATABASE.TABLE``, which has no versions: every listing asks the metastore.

    Nothing is contacted yet when it is made. An unknown option, a malformed URL or a missing library is a UsageError.
    """

    capabilities = Capabilities()

    def __init__(self, url: str, options: OpenOptions) -> None:
        def open_location(place: str) -> Source:
            given = store_options(options.store, url_scheme(place))
            return open_source(place, given, options.timeout, options.hdfs_driver)

        self._named = parse_url(url, options)
        super().__init__(self._named.url, StoreFiles(None, open_location, options), options)
        self._where: str | None = None
        self._warned: set[str] = set()

    def narrow(self, where: str | None) -> None:
        self._where = where

    def read_table(self) -> TableListing:
        table, found = self._ask()
        version = None
        if table.keys:
            names, schema = [name for name, _ in table.keys], _schema(table)
            known = [self._partition(names, *partition) for partition in found]
            wanted = self._wanted(known, schema)
            version = TableVersion(format="Hive", version="", time="", schema=schema.serialize().to_pybytes())
        else:
            wanted = known = [_Partition("", self._location(table.storage.location, self.url), table.storage)]
        for each in wanted:
            check_parquet(self.url, each.directory, each.storage, table)
        root = _spelled(table.storage.location)
        if root and not url_scheme(root):
            self._files.rebase(root)
        self._check_options(known)
        return TableListing(files=self._taken(known, wanted, root), version=version)

    def _ask(self) -> tuple[TableEntry, list[Partition]]:
        def read(metastore: Metastore) -> tuple[TableEntry, list[Partition]]:
            table = metastore.table()
            check_table(self.url, table)
            return table, metastore.partitions(metastore.partition_names() if table.keys else [])

        table, found = ask(self._named, read)
        if table.keys and not found:
            reason = "has no partitions in the metastore"
            raise SourceIncomplete(self.url, reason, "nothing was published, add them with MSCK REPAIR TABLE")
        return table, found

    def _partition(self, names: Sequence[str], values: Sequence[str], storage: Storage) -> _Partition:
        if len(values) != len(names):
            reason = f"a partition has {len(values)} values for {len(names)} columns"
            raise SourceError(self.url, reason, "check the table with Hive")
        directory = partition_path({name: None if v == NULL else v for name, v in zip(names, values, strict=True)})
        return _Partition(directory, self._location(storage.location, f"{self.url}/{directory}"), storage)

    def _location(self, text: str, of: str) -> str:
        """Normalize a location to the spelling of sources; raises SourceError if it names no store."""
        location = _spelled(text)
        if not location:
            reason = f"has the location {redact(text)!r}, which names no store" if text else "has no location"
            raise SourceError(printable(of), printable(reason), "set it with ALTER TABLE ... SET LOCATION")
        return location

    def _check_options(self, known: Sequence[_Partition]) -> None:
        """Warn about options that neither the metastore nor the store of a location has."""
        given = self._options.store
        used = {name for each in known for name in store_options(given, url_scheme(each.location))}
        for name in sorted(given.keys() - METASTORE_OPTIONS - used):
            self._warn(f"-o {name} was not used, by the metastore or by the stores of the locations")

    def _wanted(self, known: Sequence[_Partition], schema: pa.Schema) -> Sequence[_Partition]:
        """The partitions that may satisfy the condition.

        Raises SourceIncomplete if none does, SourceError if a value doesn't fit its column's type.
        """
        values = partition_table([each.directory for each in known], schema)
        if not self._where:
            return known
        from pqcache.filters.parse import condition_on, rows_matching  # and sqlglot: slow, and not always needed

        condition = condition_on(self._where, values.column_names)
        wanted = [known[row] for row in rows_matching(values, condition)] if condition else known
        if not wanted:
            raise SourceIncomplete(self.url, f"no partition satisfies --where {self._where!r}")
        return wanted

    def _taken(self, known: Sequence[_Partition], wanted: Sequence[_Partition], root: str) -> dict[str, TableFile]:
        """Take the files in the locations of ``wanted``, by their paths in a cache.

        A file belongs to the innermost of the ``known`` locations above it, once for each partition there.
        """
        at: dict[str, list[_Partition]] = {each.location: [] for each in known}
        for each in wanted:
            at[each.location].append(each)
        files: dict[str, TableFile] = {}
        foreign: list[str] = []
        filled: set[str] = set()
        for url, identity in self._listed(at, root).items():
            location = _innermost(url, at)
            below, _, name = (url[len(location) + 1 :] or url.rpartition("/")[2]).rpartition("/")
            is_foreign = "=" in below and not is_hidden_directory(below)
            for each in at.get(location, ()):
                if is_foreign and not each.storage.subdirectories:
                    foreign.append(url)
                    continue
                path = "/".join(filter(None, (each.directory, below.replace("=", "%3D"), name)))
                if path in files:
                    raise SourceError(url, f"has the same path in a cache as {files[path].url}", "rename one of them")
                files[path] = TableFile(path=path, url=url, identity=identity)
                filled.add(each.directory)
        self._report(wanted, filled, foreign)
        return files

    def _listed(self, at: Mapping[str, Sequence[_Partition]], root: str) -> dict[str, Identity]:
        """List the files in all locations with wanted partitions, and others, by their URLs.

        If many partitions are below the table's own location, it is listed once; all others are listed one by one.
        """
        places = [location for location, partitions in at.items() if partitions]
        below = {place for place in places if root and place.startswith(f"{root}/")}
        all_below = sum(location.startswith(f"{root}/") for location in at)
        found: dict[str, Identity] = {}
        if len(below) >= _AT_ONCE and len(below) * _SHARE >= all_below:
            try:
                found = self._list(root)
                places = [place for place in places if place not in below]
            except SourceUnavailable:
                raise
            except SourceError as error:  # it may be about a partition that is not wanted
                log.debug("%s: locations are listed one by one: %s", self.url, error)
        for some in in_parallel([partial(self._list, place) for place in places], _THREADS):
            found.update(some)
        return found

    def _list(self, location: str) -> dict[str, Identity]:
        source = self._files.source_at(location)
        try:
            listed = self._options.tried(lambda: list(islice(source.list(), _MAX_FILES)), source.url)
        except SourceNotFound:
            return {}
        finally:
            source.close()
        if len(listed) == _MAX_FILES:
            raise SourceError(source.url, f"has {_MAX_FILES:,} files or more", "divide it into partitions")
        is_file = [source.url_of(file.path) for file in listed] == [source.url]
        return {location if is_file else f"{location}/{file.path}": file.identity for file in listed}

    def _report(self, wanted: Sequence[_Partition], filled: set[str], foreign: Sequence[str]) -> None:
        """Warn once of empty partitions and of files not taken; raises SourceIncomplete if all are empty."""
        if foreign:
            what = "in directories of partitions that the metastore does not know were not taken"
            self._warn(f"{format_count(len(foreign), 'file')} {what} ({min(foreign)})")
        empty = [each for each in wanted if each.directory not in filled]
        first = redact(empty[0].location) if empty else ""
        if not filled:
            where = f"at {first}" if len(wanted) == 1 else f"at any of {len(wanted):,} locations, the first {first}"
            raise SourceIncomplete(self.url, f"there is no file {where}", "nothing was published, check the locations")
        if empty:
            count = f"{len(empty):,} of {format_count(len(wanted), 'partition')}"
            self._warn(f"no files in {count} ({empty[0].directory} at {first})")

    def _warn(self, warning: str) -> None:
        if warning not in self._warned:
            self._warned.add(warning)
            self._options.on_event(Warned(printable(f"{self.url}: {warning}")))


def _spelled(location: str) -> str:
    """Normalize a location to the spelling of sources; empty if it names no store.

    Hadoop does not encode paths in URLs, so nothing is decoded.
    """
    if location.startswith("file:"):
        return "/" + re.sub(r"file:(//[^/]*)?", "", location, count=1).strip("/")
    spelled = usual_url(location).rstrip("/")
    return spelled if url_scheme(spelled) else ""


def _innermost(url: str, locations: Mapping[str, object]) -> str:
    """The innermost location above ``url``; empty if there is none."""
    place = url
    while place and place not in locations:
        place = place.rpartition("/")[0]
    return place


def _schema(table: TableEntry) -> pa.Schema:
    import pyarrow as pa

    simple = {
        "boolean": pa.bool_(), "tinyint": pa.int8(), "smallint": pa.int16(), "int": pa.int32(), "bigint": pa.int64(),
        "float": pa.float32(), "double": pa.float64(), "date": pa.date32(), "timestamp": pa.timestamp("us"),
    }  # fmt: skip

    def arrow(kind: str) -> pa.DataType:
        digits = re.fullmatch(r"decimal\((\d+),(\d+)\)", kind)
        return pa.decimal128(int(digits[1]), int(digits[2])) if digits else simple.get(kind, pa.string())

    return pa.schema([(name, arrow(kind.lower().replace(" ", ""))) for name, kind in table.keys])


_PARQUET_INPUT = {
    "org.apache.hadoop.hive.ql.io.parquet.mapredparquetinputformat",
    "parquet.hive.mapredparquetinputformat",
    "parquet.hive.deprecatedparquetinputformat",
}
_PARQUET_SERDE = {
    "org.apache.hadoop.hive.ql.io.parquet.serde.parquethiveserde",
    "parquet.hive.serde.parquethiveserde",
}
_TABLES = ("MANAGED_TABLE", "EXTERNAL_TABLE")
_EXPORT = "write it to an external table of Parquet with Hive or Spark"


def check_table(url: str, table: TableEntry) -> None:
    """Raise UsageError for a view, or a table with a log of its own; see `check_parquet` too."""
    known = {name.lower(): value.lower() for name, value in table.parameters.items()}
    provider, handler = known.get("spark.sql.sources.provider", ""), known.get("storage_handler", "")
    location = printable(redact(table.storage.location))
    if table.kind and table.kind not in _TABLES:
        raise UsageError(url, f"is a {table.kind.lower().replace('_', ' ')}, not a table", "name the table behind it")
    if "iceberg" in (known.get("table_type"), provider) or "iceberg" in handler:
        raise UsageError(url, "is an Iceberg table, whose metadata say which files count", "name it by iceberg://")
    if "delta" in (known.get("table_type"), provider) or "delta" in handler:
        advice = f"name its location, {location}" if location else "name its location"
        raise UsageError(url, "is a Delta table, whose log says which files count", advice)
    if provider == "hudi" or "hudi" in table.storage.input_format.lower():
        raise UsageError(url, "is a Hudi table, whose timeline says which files count", _EXPORT)
    if handler:
        raise UsageError(url, f"is stored by {printable(table.parameters['storage_handler'])}", _EXPORT)
    if known.get("transactional") == "true":
        reason = "is a transactional Hive table, whose files are changes to rows"
        if known.get("transactional_properties") == "insert_only":
            reason = "is a transactional Hive table, whose transactions say which files count"
        raise UsageError(url, reason, _EXPORT)


def check_parquet(url: str, directory: str, storage: Storage, table: TableEntry) -> None:
    """Raise UsageError if Hive does not read the files of a partition, or of an unpartitioned table, as Parquet."""
    of = printable(f"{url}/{directory}" if directory else url)
    if "hudi" in storage.input_format.lower():
        raise UsageError(of, "belongs to a Hudi table, whose timeline says which files count", _EXPORT)
    if storage.input_format.lower() in _PARQUET_INPUT and storage.serde.lower() in _PARQUET_SERDE:
        return
    provider = table.parameters.get("spark.sql.sources.provider", "")
    if provider.lower() == "parquet":
        advice = f"name its directory, {printable(redact(table.storage.path))}" if table.storage.path else _EXPORT
        raise UsageError(of, "is stored by Spark in a way that Hive does not know", advice)
    if storage.input_format.endswith(".SymlinkTextInputFormat"):
        raise UsageError(of, "has lists of files in its location and not files", "name the table that it refers to")
    read = " and ".join(name.rpartition(".")[2] for name in (storage.input_format, storage.serde) if name)
    raise UsageError(of, f"is not stored as Parquet; its files are read by {printable(read) or 'nothing'}", _EXPORT)
