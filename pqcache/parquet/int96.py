"""INT96 time stamps that are kept as INT96, beside time stamps that are not.

pyarrow's writer stores either all time stamps as INT96 or none. So those that are not go through it as plain
64-bit integers, which have the same bytes, and the footer says what they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence

import pyarrow as pa
import pyarrow.types as pt

from pqcache.parquet.footer import footer
from pqcache.parquet.footer.source_footer import SourceFooter, one_of_each_schema
from pqcache.parquet.nested import with_changed_types

LeafPlace = tuple[str, int]
"""A leaf: its top-level column, and its position within that."""


def _places(source: SourceFooter) -> dict[LeafPlace, str]:
    """Return each leaf's physical type."""
    found: dict[LeafPlace, str] = {}
    counts: Counter[int] = Counter()
    for number, leaf in enumerate(footer.leaves_of(source.elements, str(source.path))):
        kind = source.metadata.schema.column(number).physical_type
        found[source.schema.names[leaf.column], counts[leaf.column]] = kind
        counts[leaf.column] += 1
    return found


def int96_places(sources: Sequence[SourceFooter]) -> set[LeafPlace]:
    """Return the leaves that are INT96 in every file that has them."""
    places = [_places(source) for source in one_of_each_schema(sources)]
    found = {place for known in places for place, kind in known.items() if kind == "INT96"}
    return {place for place in found if all(known.get(place, "INT96") == "INT96" for known in places)}


def is_uniform(sources: Sequence[SourceFooter]) -> bool:
    """Return whether all files have the same leaves as INT96."""
    found = [
        {place for place, kind in _places(source).items() if kind == "INT96"} for source in one_of_each_schema(sources)
    ]
    return all(places == found[0] for places in found)


def int96_as_int64(schema: pa.Schema, kept: Collection[LeafPlace]) -> pa.Schema:
    """Return ``schema`` with int64 for every time stamp that is not among ``kept``."""
    fields = []
    for field in schema:
        places = iter(range(1 << 62))
        fields.append(field.with_type(_type_as_int64(field.type, field.name, places, kept)))
    return pa.schema(fields, schema.metadata)


def _type_as_int64(kind: pa.DataType, name: str, places: Iterator[int], kept: Collection[LeafPlace]) -> pa.DataType:
    if pt.is_nested(kind):
        return with_changed_types(kind, lambda inner: _type_as_int64(inner, name, places, kept))
    place = name, next(places)
    return pa.int64() if pt.is_timestamp(kind) and place not in kept else kind
