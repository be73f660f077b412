"""Tiny files decoded together: in memory they become one Parquet file, with one footer for all their row groups.

To open a file and to begin a table takes pyarrow longer than to decode a few hundred rows. The bytes of the column
chunks are copied; the new footer has other offsets. Its numbers are those that pyarrow has of the sources' footers, so
none of these is parsed again. Fields are those of parquet.thrift in https://github.com/apache/parquet-format.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from pqcache.errors import ParquetError, first_line
from pqcache.parquet.footer import footer, thrift
from pqcache.parquet.footer.source_footer import SourceFooter, chunks_of
from pqcache.parquet.footer.thrift import Struct
from pqcache.parquet.footer.thrift_fields import CODEC, ENCODINGS, PATH, TYPE
from pqcache.system.disk import open_regular

log = logging.getLogger("pqcache.parquet")

_UNCOMPRESSED, _COMPRESSED, _DATA, _DICTIONARY = range(1, 5)  # of a chunk's numbers, as `_numbers` returns them
_HEADS = b"\x16\x16\x16\x26\x26"  # of the fields with these numbers, VALUES to DICTIONARY
_SLOT = 7  # bytes of a number in a row group: varints may have leading zeros
_LARGEST = 1 << 7 * _SLOT - 2
_SPARE = 100  # bytes: the sizes of some old writers lack a dictionary's header (PARQUET-816)
_MAX_HOLES = 64 << 10  # bytes between chunks that are read for nothing

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class JoinedRows:
    """The rows of some files, and what each leaf column takes in each row group, ``compressed`` and not."""

    table: pa.Table
    compressed: Ints
    uncompressed: Ints


@dataclass(frozen=True, kw_only=True)
class _Kind:
    """What files that are alike have in common: a footer, their codecs, and a row group without its numbers.

    ``source`` is one of them. ``slots`` are the places of the numbers: five for each leaf column, then the bytes and
    the rows of the row group. ``written`` says of files, by the id of the `SourceFooter` that others are like, whether
    they have the same writer and codecs.
    """

    source: SourceFooter
    template: Struct
    codecs: list[str]
    written: dict[int, bool]
    row_group: npt.NDArray[np.uint8]
    slots: Ints

    def is_of(self, source: SourceFooter) -> bool:
        """Return whether a source of the same schema was written by the same writer with the same codecs."""
        if source.template is None:
            return self._is_written_alike(source)
        known = self.written.get(id(source.template))
        if known is None:  # sources keep those that they are like
            known = self.written[id(source.template)] = self._is_written_alike(source.template)
        return known

    def _is_written_alike(self, source: SourceFooter) -> bool:
        groups = map(source.metadata.row_group, range(source.metadata.num_row_groups))
        return source.metadata.created_by == self.source.metadata.created_by and all(
            [chunk.compression for chunk in chunks_of(group)] == self.codecs for group in groups
        )


class FileJoiner:
    """Decodes tiny files together; it remembers what those of a table have in common. Threads may share it."""

    def __init__(self) -> None:
        self._kinds: dict[int, _Kind] = {}  # by the id of their schema, which they keep

    def read(self, parts: Sequence[tuple[SourceFooter, Sequence[int]]]) -> JoinedRows | None:
        """Return the rows of these row groups in order; None where they have to be read file by file.

        The sources have one and the same schema. Damage, too, is left to a reader that knows which file it is in.
        """
        source = parts[0][0]
        kind = self._kinds.get(id(source.schema))
        try:
            if kind is None:
                kind = self._kinds[id(source.schema)] = _kind_of(source)
            return _joined(parts, kind)
        except (pa.ArrowException, OSError, ParquetError) as error:
            log.debug("files from %s on are decoded one by one (%s)", source.path, first_line(error))
            return None


def _kind_of(source: SourceFooter) -> _Kind:
    sink = pa.BufferOutputStream()
    source.metadata.write_metadata_file(sink)
    end = sink.getvalue().to_pybytes()
    template = thrift.decode(end[-8 - int.from_bytes(end[-8:-4], "little") : -8], str(source.path))
    chunks = footer.columns_of(footer.row_groups_of(template, str(source.path))[0], str(source.path))
    out, slots = bytearray(), list[int]()

    def slot(head: int) -> None:
        out.append(head)
        slots.append(len(out))
        out.extend(bytes(_SLOT))

    out += b"\x19\xfc"  # a list of structs
    thrift.put_varint(out, len(chunks))
    for chunk in chunks:
        out += b"\x26\x00\x1c"  # no offset, and the metadata
        out += thrift.encode({field: chunk[field] for field in (TYPE, ENCODINGS, PATH, CODEC)})[:-1]
        for head in _HEADS:
            slot(head)
        out += b"\x00\x00"
    slot(0x16)
    slot(0x16)
    out.append(0)
    return _Kind(
        source=source,
        template=template,
        codecs=[chunk.compression for chunk in chunks_of(source.metadata.row_group(0))],
        written={},
        row_group=np.frombuffer(bytes(out), np.uint8),
        slots=np.array(slots),
    )


def _joined(parts: Sequence[tuple[SourceFooter, Sequence[int]]], kind: _Kind) -> JoinedRows | None:
    firsts, rows = list[int](), list[int]()
    for source, numbers in parts:
        firsts.append(len(rows))
        row_groups = source.row_groups
        rows += [row_groups[number][0] for number in numbers]
        if not kind.is_of(source):
            log.debug("%s is decoded by itself: it was written otherwise than others", source.path)
            return None
    stored = np.concatenate([source.chunks(numbers) for source, numbers in parts])
    spans = _spans(stored, firsts, [source.size for source, _ in parts])
    if spans is None:
        return None
    lows, sizes = spans
    moves = len(footer.MAGIC) + np.cumsum(sizes) - sizes - lows
    by_group = np.repeat(moves, np.diff([*firsts, len(rows)]))[:, None]
    stored[..., _DATA] += by_group
    stored[..., _DICTIONARY] += np.where(stored[..., _DICTIONARY] > 0, by_group, 0)
    reads = zip([source.path for source, _ in parts], lows.tolist(), sizes.tolist(), strict=True)
    table = _decoded(kind, stored, rows, list(reads))
    if table is None or table.num_rows != sum(rows):
        return None
    return JoinedRows(table=table, compressed=stored[..., _COMPRESSED], uncompressed=stored[..., _UNCOMPRESSED])


def _spans(stored: Ints, firsts: Sequence[int], files: Sequence[int]) -> tuple[Ints, Ints] | None:
    """Return where the chunks of each file begin, and how many bytes to read there; None where much lies between them.

    ``firsts`` are the numbers of the files' first row groups, and ``files`` the files' sizes.
    """
    data, dictionary, sizes = stored[..., _DATA], stored[..., _DICTIONARY], stored[..., _COMPRESSED]
    begins = np.where((dictionary > 0) & (dictionary < data), dictionary, data)
    lows = np.minimum.reduceat(begins.min(axis=1), firsts)
    ends = np.maximum.reduceat((begins + sizes).max(axis=1), firsts)
    if (ends - lows > np.add.reduceat(sizes.sum(axis=1), firsts) + _MAX_HOLES).any():
        return None
    return lows, np.minimum(ends + _SPARE, files) - lows


def _decoded(kind: _Kind, chunks: Ints, rows: list[int], reads: Sequence[tuple[Path, int, int]]) -> pa.Table | None:
    """Return the rows of row groups with these ``chunks``, whose bytes are what ``reads`` names, in that order."""
    sizes = chunks[..., _UNCOMPRESSED].sum(axis=1)
    values = np.column_stack([chunks.reshape(len(chunks), -1), sizes, np.array(rows)])
    if values.min() < 0 or values.max() >= _LARGEST:
        return None
    shifts = 7 * np.arange(_SLOT)
    digits = (values[..., None] << 1 >> shifts & 0x7F | np.where(shifts < shifts[-1], 0x80, 0)).astype(np.uint8)
    groups = np.tile(kind.row_group, (len(chunks), 1))
    groups[:, kind.slots[:, None] + np.arange(_SLOT)] = digits
    fields = footer.make_footer(
        kind.template,
        kind.source.elements,
        [group.tobytes() for group in groups],
        sum(rows),
        kind.source.key_values,
    )
    end = footer.footer_and_magic(fields)
    size = len(footer.MAGIC) + sum(length for _, _, length in reads) + len(end)
    data = memoryview(pa.allocate_buffer(size)).cast("B")
    data[: len(footer.MAGIC)] = footer.MAGIC
    data[size - len(end) :] = end
    at = len(footer.MAGIC)
    for path, low, length in reads:
        file = open_regular(path)
        try:
            if os.preadv(file, [data[at : at + length]], low) < length:
                return None
        finally:
            os.close(file)
        at += length
    with pq.ParquetFile(
        pa.BufferReader(data),
        pre_buffer=False,
        coerce_int96_timestamp_unit=kind.source.int96,
        page_checksum_verification=True,
    ) as joined:
        table = joined.read_row_groups(range(len(rows)), use_threads=False)
    table.validate()
    return table
