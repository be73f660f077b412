"""Footers that differ from one another in numbers only, read many at a time.

The files that a job appends to a table have the same columns, encodings and key-values: their footers have the same
fields in the same order. Where these are is found in one footer. Of the others each field is read for all at once, so
that a footer costs less than a Python call for each of its columns. A footer that is not alike is left to the caller,
and so is one whose counts do not fit together, as it is damaged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pqcache.parquet.footer import footer
from pqcache.parquet.footer.footer_counts import counts_agree
from pqcache.parquet.footer.thrift import BINARY, I16, I64, LIST, STRUCT, Struct, read_varint
from pqcache.parquet.footer.thrift_fields import (
    BYTE_ARRAY,
    COMPRESSED,
    DATA,
    DICTIONARY,
    SIZES,
    STATISTICS,
    TYPE,
    UNCOMPRESSED,
    VALUES,
)
from pqcache.parquet.footer.thrift_walk import items_at, skip_value

CHUNK_NUMBERS = (VALUES, UNCOMPRESSED, COMPRESSED, DATA, DICTIONARY)
"""The fields of a column chunk's metadata that are read, in the order in which `FooterNumbers` has them."""

_LONGEST = 8  # bytes of a number: its sizes are in a file of less than 2 to the power of 55 bytes
_ENDS, _DIGITS = np.uint64(0x8080808080808080), np.uint64(0x7F7F7F7F7F7F7F7F)  # of the bytes of a number
_ONE = np.uint64(1)
_LITERAL, _NUMBER, _NUMBERS, _VALUE, _REFUSED = range(5)  # what is done with a field
_Rules = Mapping[int, "int | _Rules"]

_STATISTICS: _Rules = {1: _VALUE, 2: _VALUE, 3: _NUMBER, 4: _NUMBER, 5: _VALUE, 6: _VALUE, 7: _LITERAL, 8: _LITERAL}
_COLUMN: _Rules = {
    **dict.fromkeys((TYPE, 2, 3, 4, 8, 13), _LITERAL),
    **dict.fromkeys((*CHUNK_NUMBERS, 10, 14, 15), _NUMBER),
    STATISTICS: _STATISTICS,
    SIZES: {1: _NUMBER, 2: _NUMBERS, 3: _NUMBERS},
}
_CHUNK: _Rules = {2: _NUMBER, 3: _COLUMN, 4: _NUMBER, 5: _NUMBER, 6: _NUMBER, 7: _NUMBER}
_GROUP: _Rules = {1: _CHUNK, 2: _NUMBER, 3: _NUMBER, 4: _LITERAL, 5: _NUMBER, 6: _NUMBER, 7: _NUMBER}
_FILE: _Rules = {3: _NUMBER, 4: _GROUP}
_GROUP_BYTES, _GROUP_ROWS, _FILE_ROWS = 2, 3, 3  # of RowGroup and FileMetaData

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class FooterNumbers:
    """The numbers of a footer: of each row group its rows and bytes, and of each leaf column its `CHUNK_NUMBERS`."""

    rows: Ints
    sizes: Ints
    chunks: Ints


@dataclass(frozen=True, kw_only=True)
class _Step:
    """A field that differs from footer to footer: the bytes before it, which do not, and what it is.

    It is a number, or, with ``value``, bytes of any length. ``skipped`` are the bytes of a value that is as long in all
    footers. ``kept`` says that the number is read.
    """

    before: bytes
    value: bool = False
    skipped: int = 0
    kept: bool = False


class AlikeFooters:
    """Reads footers that are like a given one.

    Args:
        data: the footer that others are like, which has passed `check_footer`.
        begin: where its schema ends.
        elements: its schema's elements.

    Raises:
        ValueError: the footer has fields that are not known here.
    """

    def __init__(self, data: bytes, begin: int, elements: Sequence[Struct], name: str) -> None:
        layout = _Layout(data, begin)
        self._steps = layout.steps
        self._begin, self._end = data[:begin], data[layout.mark :]
        groups = len(layout.groups)
        self._group_slots = np.array(
            [(group[_GROUP_ROWS], group[_GROUP_BYTES]) for group in layout.groups], np.int64
        ).reshape(groups, 2)
        leaves = [leaf for leaf in footer.leaves_of(elements, name) if 1 in elements[leaf.element]]
        self._flat = np.array([2 not in leaf.shape for leaf in leaves], bool)
        if layout.file_rows is None or not groups or len(layout.chunks) != groups * len(leaves):
            raise ValueError("no row groups, or not all columns in each")
        self._file_rows = layout.file_rows
        nothing = layout.kept  # the place of a number that is 0, for chunks without a dictionary
        found = [[chunk.get(field, nothing) for field in CHUNK_NUMBERS] for chunk in layout.chunks]
        self._chunk_slots = np.array(found, np.int64).reshape(groups, len(leaves), len(CHUNK_NUMBERS))
        if (self._chunk_slots[..., :-1] == nothing).any():
            raise ValueError("a column chunk without sizes")
        self._kept = layout.kept

    def read(self, footers: Sequence[bytes], sizes: Sequence[int]) -> list[FooterNumbers | None]:
        """Return the numbers of ``footers``, of files of ``sizes`` bytes; None for those that are not alike."""
        found: list[FooterNumbers | None] = [None] * len(footers)
        like = [n for n, data in enumerate(footers) if data.startswith(self._begin) and data.endswith(self._end)]
        if not like:
            return found
        numbers, alike = self._numbers([footers[n] for n in like])
        rows, nbytes = (numbers[self._group_slots[:, part]].T for part in range(2))
        chunks = np.moveaxis(numbers[self._chunk_slots], -1, 0)
        alike &= counts_agree(numbers[self._file_rows], rows, chunks, self._flat, np.array(sizes, np.int64)[like])
        for place in np.flatnonzero(alike).tolist():
            found[like[place]] = FooterNumbers(rows=rows[place], sizes=nbytes[place], chunks=chunks[place])
        return found

    def _numbers(self, footers: Sequence[bytes]) -> tuple[Ints, npt.NDArray[np.bool_]]:
        """Return the numbers that are kept, and a row of zeros, for all ``footers``, and which of these are alike."""
        ends = np.cumsum([len(data) for data in footers], dtype=np.int64)
        at = np.concatenate([[0], ends[:-1]]) + len(self._begin)
        data = b"".join([*footers, bytes(_LONGEST)])
        words = np.ndarray((len(data) - _LONGEST + 1,), "<u8", data, strides=(1,))  # that begin at each byte
        alike = np.ones(len(footers), bool)
        kept = np.zeros((self._kept + 1, len(footers)), np.uint64)
        place = 0
        for step in self._steps:
            for first in range(0, len(step.before), _LONGEST):
                part = step.before[first : first + _LONGEST]
                mask = np.uint64((1 << 8 * len(part)) - 1)
                alike &= words[at] & mask == np.uint64(int.from_bytes(part, "little"))
                at += len(part)
                np.clip(at, 0, len(words) - 1, out=at)
            if step.skipped:
                at += step.skipped
            else:
                word = words[at]
                last = ~word & _ENDS
                last &= ~last + _ONE  # the bit that says that a number ends, of the first byte in which it is 0
                alike &= last > 0
                at += (last.astype(np.float64).view(np.int64) >> 52) - 1022 >> 3
                if step.kept or step.value:
                    word &= last - _ONE
                if step.kept:
                    kept[place] = word
                    place += 1
                elif step.value:
                    at += _decoded(word).astype(np.int64)
            np.clip(at, 0, len(words) - 1, out=at)
        alike &= at == ends - len(self._end)
        kept = _decoded(kept)
        alike &= ~(kept & _ONE).any(axis=0)  # no number is negative
        return (kept >> _ONE).astype(np.int64), alike


def _decoded(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return the numbers whose bytes are in ``words``, seven bits in each."""
    words = words & _DIGITS
    for shift, low, high in ((1, 0x007F007F007F007F, 8), (2, 0x00003FFF00003FFF, 16), (4, 0x000000000FFFFFFF, 32)):
        words = words & np.uint64(low) | (words & np.uint64(low << high)) >> np.uint64(shift)
    return words


class _Layout:
    """Where a footer has fields that differ from file to file.

    ``steps`` has them in order; behind them, from ``mark`` on, the footers are the same. ``groups`` and ``chunks`` say
    which of the numbers that are kept are their fields, and ``file_rows`` which is the number of rows.
    """

    def __init__(self, data: bytes, begin: int) -> None:
        self.data, self.at, self.mark = data, begin, begin
        self.steps: list[_Step] = []
        self.groups: list[dict[int, int]] = []
        self.chunks: list[dict[int, int]] = []
        self.file_rows: int | None = None
        self.kept = 0
        self._fixed = False  # whether minima and maxima are as long as others of the column
        try:
            self._struct(_FILE, 2, until=4)
        except IndexError:
            raise ValueError("it ends in the middle") from None

    def _struct(self, rules: _Rules, number: int = 0, until: int | None = None) -> None:
        data = self.data
        while number != until and (head := data[self.at]):
            self.at += 1
            if head > 15:
                number += head >> 4
            else:
                number, self.at = read_varint(data, self.at)
                number = (number >> 1) ^ -(number & 1)
            self._field(rules, number, head & 15)
        self.at += until is None

    def _field(self, rules: _Rules, number: int, kind: int) -> None:
        rule = rules.get(number, _REFUSED)
        if rule == _LITERAL:
            if rules is _COLUMN and number == TYPE:
                self._fixed = self.data[self.at] >> 1 != BYTE_ARRAY
            self.at = skip_value(self.data, self.at, kind, 0) if kind > 2 else self.at
        elif rule == _NUMBER and I16 <= kind <= I64:
            self._number(rules, number)
        elif rule == _NUMBERS and kind == LIST:
            count, kind, self.at = items_at(self.data, self.at)
            if count and kind != I64:
                raise ValueError("a histogram of other numbers")
            for _ in range(count):
                self._step(read_varint(self.data, self.at)[1])
        elif rule == _VALUE and kind == BINARY:
            size, start = read_varint(self.data, self.at)
            if self._fixed and size:
                self.at = start
                self._step(start + size, skipped=size)
            else:
                self._step(start + size, value=True)
        elif isinstance(rule, Mapping) and kind == STRUCT:
            self._struct(rule)
        elif isinstance(rule, Mapping) and kind == LIST:
            count, kind, self.at = items_at(self.data, self.at)
            for _ in range(count):
                (self.groups if rule is _GROUP else self.chunks).append({})
                self._struct(rule)
        else:
            raise ValueError(f"field {number} is not known here")

    def _number(self, rules: _Rules, number: int) -> None:
        end = read_varint(self.data, self.at)[1]
        known: dict[int, int] | None = None
        if rules is _COLUMN and number in CHUNK_NUMBERS:
            known = self.chunks[-1]
        elif rules is _GROUP and number in (_GROUP_BYTES, _GROUP_ROWS):
            known = self.groups[-1]
        elif rules is _FILE:
            self.file_rows = self.kept
        if known is not None:
            if number in known:
                raise ValueError(f"field {number} twice")
            known[number] = self.kept
        kept = known is not None or rules is _FILE
        self._step(end, kept=kept)
        self.kept += kept

    def _step(self, end: int, *, value: bool = False, skipped: int = 0, kept: bool = False) -> None:
        before = self.data[self.mark : self.at]
        self.steps.append(_Step(before=before, value=value, skipped=skipped, kept=kept))
        self.at = self.mark = end
