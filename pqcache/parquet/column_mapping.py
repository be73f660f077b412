"""How the files of a table know its columns, where a table renames or drops columns without writing files again.

Delta calls this column mapping, Iceberg schema evolution.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class ColumnKind(Enum):
    """Whether a column has no columns inside: fields of a struct, list elements, or keys and values of a map."""

    LEAF = "leaf"
    STRUCT = "struct"
    LIST = "list"
    MAP = "map"


@dataclass(frozen=True, kw_only=True)
class TableColumn:
    """A column of a table, or a field in one, and how files know it.

    Attributes:
        name: its name in the table.
        field_id: its ID in files that have IDs; None where it is known by name.
        stored: its names in files without IDs.
        kind: the meaning of ``fields``.
        fields: those of a struct; the element of a list; key and value of a map. Their names don't matter in lists
            and maps.
    """

    name: str
    field_id: int | None = None
    stored: frozenset[str] = frozenset()
    kind: ColumnKind = ColumnKind.LEAF
    fields: tuple[TableColumn, ...] = ()
