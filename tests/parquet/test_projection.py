"""Footers as a table sees them: judged by what pyarrow reads of the file with the new footer."""

from __future__ import annotations

import io
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pqcache.errors import ParquetError
from pqcache.parquet import footer, thrift
from pqcache.parquet.projection import ColumnKind, TableColumn, as_in_table
from tests.pages import footer_of

_ROWS = 2_500


def _rows() -> pa.Table:
    place = pa.array([None if i % 7 == 0 else {"lat": i / 2, "name": f"p{i % 9}"} for i in range(_ROWS)])
    items = pa.array([[{"sku": j, "n": i} for j in range(i % 4)] for i in range(_ROWS)])
    prices = pa.array(
        [[("kr", {"won": i}), ("jp", {"won": -i})][: i % 3] for i in range(_ROWS)],
        pa.map_(pa.string(), pa.struct([("won", pa.int64())])),
    )
    columns = {"id": pa.array(range(_ROWS)), "old": pa.array(["x"] * _ROWS)}
    return pa.table({**columns, "place": place, "items": items, "prices": prices})


def _with_ids(field: pa.Field, ids: Any) -> pa.Field:
    kind, number = field.type, next(ids)
    if pa.types.is_struct(kind):
        kind = pa.struct([_with_ids(f, ids) for f in kind.fields])
    elif pa.types.is_list(kind):
        kind = pa.list_(_with_ids(kind.value_field, ids))
    elif pa.types.is_map(kind):
        kind = pa.map_(_with_ids(kind.key_field, ids), _with_ids(kind.item_field, ids))
    return pa.field(field.name, kind, field.nullable, {"PARQUET:field_id": str(number)})


def _written(table: pa.Table, ids: bool) -> tuple[bytes, pa.Schema]:
    schema = table.schema
    if ids:
        counter = iter(range(1, 100))
        schema = pa.schema([_with_ids(field, counter) for field in schema])
    out = io.BytesIO()
    pq.write_table(table.cast(schema), out, row_group_size=1_000, store_schema=True)
    return out.getvalue(), schema


def _column(field: pa.Field, names: dict[str, str], by_id: bool, gone: frozenset[str]) -> TableColumn:
    """Return the table's column for a file's field: renamed as ``names`` say, without the fields in ``gone``."""
    kind, inner = field.type, ()
    what = ColumnKind.LEAF
    if pa.types.is_struct(kind):
        what, inner = ColumnKind.STRUCT, tuple(kind.fields)
    elif pa.types.is_list(kind):
        what, inner = ColumnKind.LIST, (kind.value_field,)
    elif pa.types.is_map(kind):
        what, inner = ColumnKind.MAP, (kind.key_field, kind.item_field)
    return TableColumn(
        name=names.get(field.name, field.name),
        field_id=int(field.metadata[b"PARQUET:field_id"]) if by_id else None,
        stored=frozenset() if by_id else frozenset({field.name}),
        kind=what,
        fields=tuple(_column(f, names, by_id, gone) for f in inner if f.name not in gone),
    )


def _read(data: bytes, fields: Any) -> pa.Table:
    metadata = pq.read_metadata(io.BytesIO(b"PAR1" + footer.footer_and_magic(fields)))
    return pq.ParquetFile(pa.BufferReader(data), metadata=metadata).read()


def _footer(data: bytes) -> Any:
    return thrift.decode(footer_of(data), "f.parquet")


def _renamed(value: Any, names: dict[str, str], gone: frozenset[str]) -> Any:
    if isinstance(value, dict):
        return {names.get(k, k): _renamed(v, names, gone) for k, v in value.items() if k not in gone}
    if isinstance(value, list | tuple):
        return type(value)(_renamed(item, names, gone) for item in value)
    return value


@pytest.mark.parametrize("by_id", [False, True])
def test_columns_and_fields_are_renamed_and_dropped_at_every_depth(by_id: bool) -> None:
    names = {"id": "user", "place": "where", "lat": "latitude", "sku": "item", "won": "price"}
    gone = frozenset({"old", "name", "n"})
    table = _rows()
    data, schema = _written(table, by_id)
    columns = [_column(field, names, by_id, gone) for field in schema if field.name not in gone]
    found = _read(data, as_in_table(_footer(data), columns, "f.parquet"))
    expected = [{k: v for k, v in row.items() if k not in gone} for row in table.to_pylist()]
    assert found.to_pylist() == [_renamed(row, names, gone) for row in expected]
    assert found.column_names == ["user", "where", "items", "prices"]


def test_a_file_that_is_as_its_table_has_its_own_footer() -> None:
    data, schema = _written(_rows(), ids=True)
    fields = _footer(data)
    assert as_in_table(fields, [_column(f, {}, True, frozenset()) for f in schema], "f.parquet") is fields


def test_a_struct_without_any_field_of_the_table_is_refused() -> None:
    data, schema = _written(_rows(), ids=True)
    place = _column(schema.field("place"), {}, True, frozenset({"lat", "name"}))
    with pytest.raises(ParquetError, match=r"f\.parquet: column 'place' has none of the table's fields"):
        as_in_table(_footer(data), [place], "f.parquet")


def test_two_columns_for_one_of_the_table_are_refused() -> None:
    data, _ = _written(_rows().select(["id", "old"]), ids=False)
    both = TableColumn(name="id", stored=frozenset({"id", "old"}))
    with pytest.raises(ParquetError, match="has two columns for 'id' of its table"):
        as_in_table(_footer(data), [both], "f.parquet")
