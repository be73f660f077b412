"""Documents of a row group, from which packed sequences are put together when a window takes them.

Pieces of documents are Arrow's binary views, made of where they begin, and are copied once, into a batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pqcache.errors import ParquetError, UsageError
from pqcache.parquet.dense_columns import as_list
from pqcache.reader.kinds import Kind, number_dtype, storage_type
from pqcache.reader.order.epoch_order import Ints
from pqcache.reader.packing.pack import Pack
from pqcache.reader.packing.packed_rows import Pieces
from pqcache.reader.packing.token_batches import TokenBatches
from pqcache.reader.rows import Column, take_views, to_arrow, views_into
from pqcache.store.selected_rows import ranges_of

POSITIONS = "position_ids"


def item_type(kind: pa.DataType) -> np.dtype[Any] | None:
    """Return the dtype of the items of lists of numbers; None for other types."""
    bare = storage_type(kind)
    if not (pa.types.is_list(bare) or pa.types.is_large_list(bare) or pa.types.is_fixed_size_list(bare)):
        return None
    item: np.dtype[Any] | None = number_dtype(bare.value_type)
    return None if pa.types.is_boolean(bare.value_type) else item


def check_columns(pack: Pack | TokenBatches, schema: pa.Schema, partitions: Sequence[str]) -> None:
    """Raise UsageError for columns that cannot be packed."""
    for name in pack.columns:
        if name not in schema.names or name in partitions:
            raise UsageError("pack", f"no column {name!r} in the files", f"they have {', '.join(schema.names)}")
        kind = as_list(schema.field(name)).type
        dtype = item_type(kind)
        if dtype is None:
            raise UsageError("pack", f"{name!r} is {kind}", "name columns of lists of numbers")
        if isinstance(pack, Pack):
            pack.fill(name, dtype)


def items_of(column: Column, name: str, where: object) -> tuple[Ints, npt.NDArray[Any]]:
    """The number of tokens of each document, and all tokens, end to end.

    Raises:
        ParquetError: a document is null, or holds a null.
    """
    array = to_arrow(column)
    array = array.storage if isinstance(array, pa.ExtensionArray) else array
    if nulls := array.null_count:
        reason = f"column {name!r} has documents that are null ({nulls} in one row group), which are not packed"
        raise ParquetError(where, reason, f'leave them out with filters="{name} is not null", or write them empty')
    items = array.flatten()
    if items.null_count:
        raise ParquetError(where, f"column {name!r} has nulls inside its lists", "write them as numbers")
    if pa.types.is_fixed_size_list(array.type):
        lengths = np.full(len(array), array.type.list_size, np.int64)
    else:
        lengths = np.diff(array.offsets.to_numpy()).astype(np.int64)
    dtype: np.dtype[Any] = number_dtype(storage_type(items.type))
    return lengths, np.frombuffer(items.buffers()[1] or b"", dtype, len(items), items.offset * dtype.itemsize)


def tokens_of(
    spec: Pack | TokenBatches, columns: Mapping[str, Column], path: Path
) -> tuple[Ints, dict[str, npt.NDArray[Any]]]:
    """The lengths of documents, and the tokens of each column that is packed, end to end.

    Raises:
        ParquetError: a document is null, holds a null, or has another number of tokens in one of ``fields``.
    """
    lengths, tokens = items_of(columns[spec.column], spec.column, path)
    found = {spec.column: tokens}
    for name in spec.columns[1:]:
        others, found[name] = items_of(columns[name], name, path)
        if not np.array_equal(others, lengths):
            row = int(np.flatnonzero(others != lengths)[0])
            reason = f"a row has {lengths[row]} items in {spec.column!r} and {others[row]} in {name!r}"
            raise ParquetError(path, reason, f"write one item for each token, or leave {name!r} out of fields=")
    return lengths, found


class HeldSequences:
    """Packed sequences of a row group in the order in which a lane takes them, from sequence ``first`` on.

    Item i is sequence ``order[i - first]`` of the ``pieces`` of the documents, whose tokens are ``items``.
    """

    def __init__(
        self, file: int, spec: Pack, items: Mapping[str, npt.NDArray[Any]], pieces: Pieces, order: Ints, first: int
    ) -> None:
        self.file, self.first = file, first
        self._spec, self._order = spec, order
        self._pieces, self._begins = pieces, pieces.begins
        by_start = np.argsort(pieces.start)
        number = np.empty_like(by_start)
        number[by_start] = np.arange(len(number))
        self._columns = {
            name: (values.dtype, _views(values, pieces.start[by_start], number)) for name, values in items.items()
        }

    def slices(self, low: int, high: int) -> list[list[Column]]:
        """Sequences ``low`` up to ``high``: the packed columns, then those of the pack's ``ids``."""
        wanted = self._order[low - self.first : high - self.first]
        begins = self._begins[wanted]
        counts = self._begins[wanted + 1] - begins
        rows = ranges_of(begins, counts)
        pieces = Pieces(self._pieces.start[rows], self._pieces.tokens[rows], np.repeat(np.arange(len(wanted)), counts))
        spec = self._spec
        pads = spec.length - np.bincount(pieces.sequence, pieces.tokens, len(wanted)).astype(np.int64)
        found = []
        for name, (dtype, views) in self._columns.items():
            values = _assembled(take_views(views, rows), dtype, pieces.sequence, pads, spec.fill(name, dtype))
            kind = packed_kind(pa.from_numpy_dtype(dtype), spec.length)
            found.append(Column(kind, values.reshape(len(wanted), spec.length)))
        found += [Column(packed_kind(pa.int32(), spec.length), ids) for ids in _ids(spec, pieces, pads)]
        return [found]


def _views(items: npt.NDArray[Any], starts: Ints, order: Ints) -> pa.Array:
    """Views of parts of ``items`` that lie end to end, in another order; a part begins at each of ``starts``."""
    ends = np.append(starts, len(items)) * items.itemsize
    return take_views(views_into(ends, pa.py_buffer(items)), order)


def packed_kind(item: pa.DataType, length: int) -> Kind:
    """How packed sequences are held."""
    kind = pa.list_(item, length)
    return Kind(kind, kind, "fixed")


def id_columns(pack: Pack) -> list[str]:
    """The columns that tell documents apart: where these begin follows from ``position_ids``."""
    needed = {POSITIONS if name == "cu_seqlens" else name for name in pack.ids}
    return [name for name in ("document_ids", POSITIONS) if name in needed]


def _ids(pack: Pack, pieces: Pieces, pads: Ints) -> list[npt.NDArray[np.int32]]:
    names = id_columns(pack)
    if not names:
        return []
    sequences = len(pads)
    behind = np.searchsorted(pieces.sequence, np.arange(sequences), "right")  # where the padding of each belongs
    tokens = np.insert(pieces.tokens, behind, pads)
    numbers = np.arange(1, len(pieces.sequence) + 1) - np.searchsorted(pieces.sequence, pieces.sequence)
    found = []
    for name in names:
        if name == POSITIONS:
            ends = np.cumsum(tokens)
            ids = np.arange(sequences * pack.length) - np.repeat(ends - tokens, tokens)
        else:
            ids = np.repeat(np.insert(numbers, behind, 0), tokens)
        found.append(ids.astype(np.int32).reshape(sequences, pack.length))
    return found


def _assembled(views: pa.Array, dtype: np.dtype[Any], sequence: Ints, pads: Ints, fill: Any) -> npt.NDArray[Any]:
    """Lay out pieces sequence by sequence, padding sequence i with ``pads[i]`` times ``fill``."""
    ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(pads)])
    padding = views_into(ends * dtype.itemsize, pa.py_buffer(np.full(int(ends[-1]), fill, dtype)))
    behind = np.searchsorted(sequence, np.arange(len(pads)), "right")
    order = np.insert(np.arange(len(sequence)), behind, len(sequence) + np.arange(len(pads)))
    joined = take_views(pa.concat_arrays([views, padding]), order).cast(pa.large_binary()).buffers()[2]
    return np.frombuffer(b"" if joined is None else joined, dtype)
