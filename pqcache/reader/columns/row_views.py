"""Rows of strings, binary and lists as Arrow's binary views: 16 bytes for each row, which point into other data."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pqcache.parquet.numpy_types import numpy_dtype

VIEW = 16  # bytes
_CAST = pc.get_function("cast")
_BYTES, _VIEWS = pc.CastOptions(pa.large_binary()), pc.CastOptions(pa.binary_view())  # made once: that takes long
_MOST_BYTES = 2**31 - 1  # a view reaches this far into its data


def views_of_array(array: pa.Array, width: int) -> pa.Array | None:
    """Return the rows' bytes as binary views into the array's own data; None if an item is null."""
    rows = len(array)
    if pa.types.is_list(array.type) or pa.types.is_large_list(array.type):
        ends = array.offsets.to_numpy().astype(np.int64)
        items = array.values
        if items.slice(int(ends[0]), int(ends[-1] - ends[0])).null_count:
            return None
        ends = (ends + items.offset) * width
        data = items.buffers()[1]
    else:
        large = pa.types.is_large_string(array.type) or pa.types.is_large_binary(array.type)
        kind = np.int64 if large else np.int32
        _, offsets, data = array.buffers()
        if offsets is None or not rows:
            return pa.array([], pa.binary_view())
        if not large:
            bare = pa.Array.from_buffers(pa.binary(), rows, [None, offsets, data], offset=array.offset)
            return _as_views(bare)
        ends = np.frombuffer(offsets, kind, rows + 1, array.offset * kind().itemsize)
    if data is None:
        data = pa.py_buffer(b"")
    parts: list[pa.Array] = []
    start = 0
    while start < rows or not parts:  # usually once: a view's data ends at 2 GB
        stop = int(np.searchsorted(ends, ends[start] + _MOST_BYTES, side="right")) - 1
        stop = rows if stop >= rows else max(stop, start + 1)
        base = int(ends[start])
        part = data.slice(base, int(ends[stop]) - base)
        near = (ends[start : stop + 1] - base).astype(np.int64)
        bare = pa.Array.from_buffers(pa.large_binary(), stop - start, [None, pa.py_buffer(near), part])
        parts.append(_as_views(bare))
        start = stop
    return pa.concat_arrays(parts) if len(parts) > 1 else parts[0]


def views_of_codes(array: pa.DictionaryArray, kind: pa.DataType, valid: npt.NDArray[np.bool_] | None) -> pa.Array:
    """Return texts that are positions in a dictionary, which has no null, as views into the dictionary.

    ``kind`` is the type of the texts. Rows that are not ``valid`` are empty, as those of a file are.
    """
    dictionary, indices = array.dictionary, array.indices
    words = dictionary if dictionary.type == kind else dictionary.cast(kind)
    dtype = numpy_dtype(indices.type)
    codes = np.frombuffer(indices.buffers()[1], dtype, len(array), indices.offset * dtype.itemsize)
    if valid is not None:
        codes = np.where(valid, codes.astype(np.int64), len(words))
    if codes.view(f"u{codes.itemsize}").max() >= len(words) + (valid is not None):
        raise pa.ArrowInvalid("a position beyond the end of its dictionary")
    return take_views(pa.concat_arrays([views_of_array(words, 1), pa.array([b""], pa.binary_view())]), codes)


def _as_views(array: pa.Array) -> pa.Array:
    return _CAST.call([array], _VIEWS)


def copied_views(views: pa.Array) -> pa.Array:
    """Return views of the same rows into a copy of their bytes, which holds nothing else."""
    return _as_views(_CAST.call([views], _BYTES))


def take_views(views: pa.Array, rows: npt.NDArray[np.integer]) -> pa.Array:
    """Return views at positions ``rows``, in their order."""
    _, pointers, *data = views.buffers()
    taken = np.frombuffer(pointers, f"V{VIEW}", len(views), views.offset * VIEW).take(rows, mode="clip")
    return pa.Array.from_buffers(views.type, len(rows), [None, pa.py_buffer(taken), *data])


def lengths_of_views(array: pa.Array) -> npt.NDArray[np.int32]:
    """Return the bytes of each row."""
    return np.frombuffer(array.buffers()[1], np.int32, len(array) * 4, array.offset * VIEW)[::4]


def point_to_little(views: pa.Array) -> bool:
    """Return whether the data that views point into is no larger than they are."""
    return bytes_pointed_into(views) <= VIEW * len(views)


def bytes_pointed_into(views: pa.Array) -> int:
    """Return the bytes of the data that views keep in memory, whether a row has them or none."""
    return int(sum(data.size for data in views.buffers()[2:]))


def packed_views(views: pa.Array) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
    """Return where the rows end if they lie end to end, after a 0, and their bytes, which are copied."""
    array = _CAST.call([views], _BYTES)
    _, ends, data = array.buffers()
    found = np.zeros(1, np.int64) if ends is None else np.frombuffer(ends, np.int64, len(array) + 1)
    return found, np.zeros(0, np.uint8) if data is None else np.frombuffer(data, np.uint8, int(found[-1]))
