"""What tells the documents of packed sequences apart: their numbers, the positions of tokens, where documents end."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pqcache.reader.columns.batch_layout import NumberColumns
from pqcache.reader.columns.column_forms import ColumnForm
from pqcache.reader.columns.row_bytes import ViewEnds
from pqcache.reader.order.epoch_order import Ints
from pqcache.reader.packing.pack import Pack
from pqcache.system.buffer_pool import BufferPool

_CU_SEQLENS = {"cu_seqlens": ColumnForm(name="cu_seqlens", type=pa.int32(), kind="fixed", width=4)}

_Int32s = npt.NDArray[np.int32]


class _Ids(NamedTuple):
    """Ids of all sequences that were packed together.

    ``of_tokens`` has shape (names, sequences, length). ``ends`` are where pieces and padding end, after a 0; padding
    that is not there has no end of its own. Those of sequence i are behind ``ends[before[i]]``.
    """

    of_tokens: _Int32s
    ends: _Int32s
    before: list[int]


def ids_of(pack: Pack, views: ViewEnds, width: int, rows: int, memory: BufferPool) -> list[NumberColumns]:
    """Return what ``pack.ids`` names for ``rows`` sequences: ``views`` are their pieces, each with its padding last.

    Tokens have ``width`` bytes. Ids of tokens are in ``memory``. What was packed together is asked for once.
    """
    whole, first, past = views.whole or views, views.first, views.first + rows
    names = tuple(name for name in ("document_ids", "position_ids") if name in pack.ids)
    ids = whole.made.get("ids") or whole.made.setdefault("ids", _ids_of(names, whole, width, pack.length, memory))
    found = [NumberColumns(_forms(names, pack.length), ids.of_tokens[:, first:past])] if names else []
    if "cu_seqlens" in pack.ids:
        ends = ids.ends[ids.before[first] : ids.before[past] + 1]
        found.append(NumberColumns(_CU_SEQLENS, (ends - ends[0])[None]))
    return found


def _ids_of(names: tuple[str, ...], views: ViewEnds, width: int, length: int, memory: BufferPool) -> _Ids:
    ends = (views.ends // width).astype(np.int32)
    tokens, size = ends[1:] - ends[:-1], int(ends[-1])
    there = np.ones(len(ends), np.int64)
    there[1:] = tokens != 0
    found = memory.borrow(4 * len(names) * size).view(np.int32).reshape(len(names), size)
    for name, out in zip(names, found, strict=True):
        if name == "document_ids":
            out[:] = _document_numbers(views.rows).repeat(tokens)
        else:
            np.subtract(_counted(size), ends[:-1].repeat(tokens), out=out)
    before = (there.cumsum() - 1)[views.rows].tolist()
    return _Ids(found.reshape(len(names), len(views.rows) - 1, length), ends[there > 0], before)


def _document_numbers(rows: Ints) -> _Int32s:
    """Return the number of each view among those of its row, from 1 on; the last one is padding, and has 0."""
    numbers = np.arange(1, rows[-1] + 1)
    numbers -= rows[:-1].repeat(rows[1:] - rows[:-1])
    numbers[rows[1:] - 1] = 0
    return numbers.astype(np.int32)


@lru_cache(maxsize=4)
def _counted(tokens: int) -> _Int32s:
    return np.arange(tokens, dtype=np.int32)


@cache
def _forms(names: tuple[str, ...], length: int) -> dict[str, ColumnForm]:
    kind = pa.list_(pa.int32())
    return {name: ColumnForm(name=name, type=kind, kind="fixed", width=4 * length, dense=length) for name in names}
