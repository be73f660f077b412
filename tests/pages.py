"""Footers, pages and page indexes of Parquet files, taken apart to check or to change them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pqcache.parquet import footer, thrift

_DICTIONARY_PAGE = 2


def footer_of(data: bytes) -> bytes:
    """Return the footer of a file's bytes, without its length and the magic."""
    return data[-8 - int.from_bytes(data[-8:-4], "little") : -8]


def edited(data: bytes, change: Callable[[thrift.Struct], object]) -> bytes:
    """Return the bytes of a file with ``change`` made to its footer."""
    fields = thrift.decode(footer_of(data), "footer")
    change(fields)
    return data[: -8 - len(footer_of(data))] + footer.footer_and_magic(fields)


def chunks_of(fields: thrift.Struct) -> list[thrift.Struct]:
    """Return the column chunks of all row groups of a footer."""
    return [chunk for group in fields[4][1].values for chunk in group[1][1].values]


@dataclass(frozen=True)
class Page:
    """A page as an offset index has it, and the minimum and maximum that the column index has, if there is one."""

    offset: int
    size: int
    first_row: int
    extremes: tuple[bytes, bytes] | None


def _chunks(path: Path) -> list[list[Any]]:
    fields = thrift.decode(footer_of(path.read_bytes()), str(path))
    return [group[1][1].values for group in footer.row_groups_of(fields, str(path))]


def index_spans(path: Path) -> list[tuple[int, int]]:
    """Return where each page index lies and how long it is, in the order of the file."""
    chunks = [chunk for group in _chunks(path) for chunk in group]
    return sorted((chunk[at][1], chunk[at + 1][1]) for chunk in chunks for at in (4, 6) if at in chunk)


def indexed_pages(path: Path) -> list[list[list[Page] | None]]:
    """Return the pages of each column chunk of each row group as the page index has them, None where it has none."""
    data = path.read_bytes()

    def pages(chunk: Any) -> list[Page] | None:
        if 4 not in chunk:
            assert 6 not in chunk, "a column index without an offset index"
            return None
        at = chunk[4][1]
        index = thrift.decode(data[at : at + chunk[5][1]], str(path))
        extremes: list[Any] = [None] * len(index[1][1].values)
        if 6 in chunk:
            at = chunk[6][1]
            column = thrift.decode(data[at : at + chunk[7][1]], str(path))
            extremes = list(zip(column[2][1].values, column[3][1].values, strict=True))
        return [
            Page(page[1][1], page[2][1], page[3][1], found)
            for page, found in zip(index[1][1].values, extremes, strict=True)
        ]

    return [[pages(chunk) for chunk in group] for group in _chunks(path)]


def real_pages(path: Path) -> list[list[list[tuple[int, int, int]]]]:
    """Return offset, size with header, and number of values of each data page, read from the pages themselves."""
    data = path.read_bytes()

    def pages(chunk: Any) -> list[tuple[int, int, int]]:
        meta = chunk[3][1]
        at = min(meta[n][1] for n in (9, 11) if n in meta)
        end = at + meta[7][1]
        found = []
        while at < end:
            header = thrift.decode(data[at : at + 65536], str(path))
            size = len(thrift.encode(header)) + header[3][1]
            if header[1][1] != _DICTIONARY_PAGE:
                found.append((at, size, header[5][1][1][1]))
            at += size
        assert at == end
        return found

    return [[pages(chunk) for chunk in group] for group in _chunks(path)]
