"""Documents of a row group, from which packed sequences are put together when a window takes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
from pqcache.reader.packing.packed_rows import PackedRows, Pieces
from pqcache.reader.packing.piece_views import array_of, view_buffers, view_words
from pqcache.reader.packing.token_batches import GroupedRows, TokenBatches
from pqcache.reader.rows import Column, ranges_of, to_arrow
from pqcache.store.cache_directory import advice_for_file

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


class HeldSequences:
    """Documents of a row group, as packed sequences in ``order``, from sequence ``first`` of that on."""

    def __init__(self, packs: PackedRows, documents: Documents, span: tuple[int, int], order: Ints, first: int) -> None:
        self.file, self.first = documents.file, first
        self._spec, self._order = packs.spec, order
        self._items = documents.items(packs)
        self._pieces = packs.read(documents.number, documents.item, *span)
        self._begins = np.searchsorted(self._pieces.sequence, np.arange(span[1] - span[0] + 1))

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
        for name, items in self._items.items():
            fill = np.full(int(pads.max(initial=0)), spec.fill(name, items.dtype), items.dtype)
            values = _assembled(items, pieces, pads, fill).reshape(len(wanted), spec.length)
            found.append(Column(packed_kind(pa.from_numpy_dtype(items.dtype), spec.length), values))
        found += [Column(packed_kind(pa.int32(), spec.length), ids) for ids in _ids(spec, pieces, pads)]
        return [found]


class HeldBatches:
    """Documents of a row group, in batches by their tokens that come in ``order``, from batch ``first`` of that on."""

    def __init__(
        self, packs: GroupedRows, documents: Documents, span: tuple[int, int], order: Ints, first: int
    ) -> None:
        self.file, self.first = documents.file, first
        self._order, self._columns = order, documents.columns
        documents.items(packs)
        self._rows, self._ends = packs.read(documents.number, documents.item, *span)

    def lengths(self, low: int, high: int) -> Ints:
        """The documents of batches ``low`` up to ``high``."""
        return np.diff(self._ends)[self._order[low - self.first : high - self.first]]

    def slices(self, low: int, high: int) -> list[list[Column]]:
        """The documents of batches ``low`` up to ``high``, batch after batch."""
        wanted = self._order[low - self.first : high - self.first]
        rows = self._rows[ranges_of(self._ends[wanted], self._ends[wanted + 1] - self._ends[wanted])]
        return [[column.take(rows) for column in self._columns.values()]]


@dataclass(frozen=True)
class Documents:
    """The documents of row group ``number`` of a plan, which is ``item`` of the index."""

    path: Path
    file: int
    number: int
    item: int
    columns: dict[str, Column]

    def items(self, packs: PackedRows | GroupedRows) -> dict[str, npt.NDArray[Any]]:
        """The tokens of each packed column, once it is checked that documents have the lengths that were counted."""
        lengths, found = packs.lengths_of(self.number), {}
        for name in packs.spec.columns:
            if name in self.columns:
                have, found[name] = items_of(self.columns[name], name, self.path)
                if not np.array_equal(have, lengths):
                    raise _other_lengths(packs.spec, name, have, lengths, self.path)
        return found


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


def _assembled(items: npt.NDArray[Any], pieces: Pieces, pads: Ints, fill: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Pieces of ``items`` sequence after sequence, each with so many ``pads`` of ``fill`` behind it."""
    data, padding, width = items.view(np.uint8), fill.view(np.uint8), items.itemsize
    buffers, numbers = view_buffers(data), np.arange(len(pads))
    words = np.empty((len(pieces.sequence) + len(pads), 4), np.int32)
    words[np.arange(len(pieces.sequence)) + pieces.sequence] = view_words(
        data, pieces.start * width, pieces.tokens * width
    )
    ends = np.searchsorted(pieces.sequence, numbers, "right") + numbers + 1
    words[ends - 1] = view_words(padding, np.zeros_like(pads), pads * width, len(buffers))
    views = array_of(words, [*buffers, *view_buffers(padding)])
    joined = views.cast(pa.large_binary()).buffers()[2]
    return np.frombuffer(
        b"" if joined is None else joined, np.uint8, int(pieces.tokens.sum() + pads.sum()) * width
    ).view(items.dtype)


def _other_lengths(pack: Pack | TokenBatches, name: str, found: Ints, lengths: Ints, path: Path) -> ParquetError:
    if name == pack.column or len(found) != len(lengths):
        advice = advice_for_file(path, "the file was replaced or is damaged: open the dataset again")
        return ParquetError(path, f"column {name!r} has documents of other lengths than were counted", advice)
    row = int(np.flatnonzero(found != lengths)[0])
    reason = f"a row has {lengths[row]} items in {pack.column!r} and {found[row]} in {name!r}"
    return ParquetError(path, reason, f"write one item for each token, or leave {name!r} out of fields=")
