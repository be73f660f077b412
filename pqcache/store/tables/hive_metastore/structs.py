"""The structs of the metastore's Thrift interface, as far as they are used.

A class made by `struct` has the named fields, each None until it is set. Apache Thrift's library reads and writes those
that have a number, and passes over all others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from thrift.protocol.TBase import TBase
from thrift.Thrift import TType

Kind = tuple[int, Any]  # a type of Thrift, and what the library needs to know of it

TEXT: Kind = (TType.STRING, "UTF8")
TEXTS: Kind = (TType.MAP, (*TEXT, *TEXT, False))


def list_of(kind: Kind) -> Kind:
    """Return the kind of a list."""
    return TType.LIST, (*kind, False)


def struct_of(kind: Any) -> Kind:
    """Return the kind of a struct, of which the class is given."""
    return TType.STRUCT, [kind, kind.thrift_spec]


def struct(fields: Mapping[int, tuple[str, Kind]]) -> Any:
    """Return a class of values with the named fields, by their numbers."""
    numbers = range(max(fields) + 1)
    spec = tuple((n, fields[n][1][0], fields[n][0], fields[n][1][1], None) if n in fields else None for n in numbers)

    def begin(self: Any, **values: Any) -> None:
        self.__dict__.update(values)

    names: dict[str, Any] = {name: None for name, _ in fields.values()}
    return type("Struct", (TBase,), {**names, "thrift_spec": spec, "__init__": begin})


def args(*kinds: Kind) -> Any:
    """Return a class for the arguments of a call, ``a1``, ``a2`` and so on."""
    return struct({number: (f"a{number}", kind) for number, kind in enumerate(kinds, 1)})


def result(kind: Kind) -> Any:
    """Return a class for what a call returns: ``success``, or one of three errors."""
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
