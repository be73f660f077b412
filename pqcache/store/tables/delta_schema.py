"""What a Delta table's protocol and schema ask of a reader, and how its files know its columns."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pqcache.errors import UsageError
from pqcache.parquet.column_mapping import ColumnKind, TableColumn

DELETION_VECTORS = "deletionVectors"
_READ_RIGHT = frozenset(
    {
        "columnMapping",
        DELETION_VECTORS,
        "timestampNtz",
        "typeWidening",
        "typeWidening-preview",
        "v2Checkpoint",
        "vacuumProtocolCheck",
    }
)
_MAX_READER_VERSION = 3
_MORE_COLUMNS = frozenset({"changeDataFeed", "rowTracking"})  # features with which files have columns of their own
PLAIN = "write it to plain Parquet with an engine that reads it, or take its files as they are with --as-files"
_KINDS = {"struct": ColumnKind.STRUCT, "array": ColumnKind.LIST, "map": ColumnKind.MAP}


@dataclass(frozen=True, kw_only=True)
class DeltaSchema:
    """The schema of a Delta table, and what says how to read it.

    Attributes:
        fields: its columns, as the log has them.
        partitions: the names of the partition columns, outermost first.
        configuration: the table's properties.
        writer_features: what its writers do.
    """

    fields: Sequence[Mapping[str, Any]]
    partitions: Sequence[str]
    configuration: Mapping[str, str]
    writer_features: Collection[str]

    @property
    def mode(self) -> str:
        """How files know columns: ``id``, ``name`` (by a name of their own), or ``none`` (by the table's names)."""
        return self.configuration.get("delta.columnMapping.mode") or "none"

    @property
    def in_files(self) -> tuple[TableColumn, ...] | None:
        """The columns as files know them; None where files have just these, under the table's names."""
        change_data = self.configuration.get("delta.enableChangeDataFeed") == "true"
        if self.mode == "none" and not change_data and _MORE_COLUMNS.isdisjoint(self.writer_features):
            return None
        return tuple(_column(field, self.mode) for field in self.fields)


def check_features(url: str, version: int, features: Collection[str]) -> None:
    """Raise UsageError where a table asks more of a reader than is known to come out right."""
    if version > _MAX_READER_VERSION:
        raise UsageError(url, f"is a Delta table of reader version {version}, which is not known", PLAIN)
    unknown = sorted(set(features) - _READ_RIGHT)
    if unknown:
        names = ", ".join(unknown)
        raise UsageError(url, f"is a Delta table with {names}, whose rows would not come out right", PLAIN)


def check_schema(url: str, schema: DeltaSchema) -> None:
    """Raise UsageError where the values of a column would not come out right."""
    if schema.mode not in ("none", "name", "id"):
        raise UsageError(url, f"is a Delta table with column mapping by {schema.mode!r}, which is not known", PLAIN)
    for field in schema.fields:
        kind = field["type"]
        if field["name"] in schema.partitions and kind == "binary":
            raise UsageError(url, f"partition column {field['name']!r} is binary, which a path cannot hold", PLAIN)
        for inner in _types(kind):
            if inner == "variant":
                raise UsageError(url, f"column {field['name']!r} holds a {inner}, which is not known", PLAIN)
        if any(change.get("toType") == "timestamp_ntz" for change in _changes(field)):
            reason = f"column {field['name']!r} was dates and is timestamps now, which old files are not read as"
            raise UsageError(url, reason, "write the table again with the engine that it is from")


def _types(kind: Any) -> Iterator[str]:
    """Yield the names of a type and of those inside of it."""
    if isinstance(kind, str):
        yield kind
        return
    yield kind["type"]
    for _, inner in _inside(kind):
        yield from _types(inner)


def _changes(field: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the changes of a column's type, and of those inside of it."""
    yield from (field.get("metadata") or {}).get("delta.typeChanges", ())
    if not isinstance(field["type"], str):
        for name, inner in _inside(field["type"]):
            of_struct = next((f for f in field["type"].get("fields", ()) if f["name"] == name), None)
            yield from _changes(of_struct or {"name": name, "type": inner})


def _inside(kind: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return the names and types of what a nested type holds."""
    if kind["type"] == "struct":
        return [(field["name"], field["type"]) for field in kind["fields"]]
    if kind["type"] == "array":
        return [("element", kind["elementType"])]
    return [("key", kind["keyType"]), ("value", kind["valueType"])]


def _column(field: Mapping[str, Any], mode: str) -> TableColumn:
    """Return a field of a table or a struct as files know it."""
    metadata = field.get("metadata") or {}
    stored, field_id = field["name"], None
    if mode != "none":
        stored = metadata.get("delta.columnMapping.physicalName", stored)
        field_id = metadata.get("delta.columnMapping.id") if mode == "id" else None
    return _named(field["name"], field["type"], mode, stored, field_id)


def _named(name: str, kind: Any, mode: str, stored: str, field_id: int | None = None) -> TableColumn:
    fields: tuple[TableColumn, ...] = ()
    if not isinstance(kind, str):
        if kind["type"] == "struct":
            fields = tuple(_column(field, mode) for field in kind["fields"])
        else:
            fields = tuple(_named(inner, of, mode, inner) for inner, of in _inside(kind))
    return TableColumn(
        name=name,
        field_id=field_id,
        stored=frozenset({stored}),
        kind=ColumnKind.LEAF if isinstance(kind, str) else _KINDS[kind["type"]],
        fields=fields,
    )
