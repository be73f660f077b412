"""How much memory row groups take: exact for numbers, and for texts in the row groups that are looked at."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from pqcache.errors import ParquetError, PqcacheError, first_line
from pqcache.parquet.decoded_size import (
    StoredRowGroup,
    TextsStated,
    decoded_bytes,
    densest_rows,
    stated_bytes,
    texts_stated,
)
from pqcache.parquet.dense_columns import as_list
from pqcache.parquet.footer.footer import read_local_tail
from pqcache.parquet.footer.footer_validation import check_footer
from pqcache.parquet.pages.page_format import NotRead
from pqcache.parquet.pages.page_locations import PageLocations, locations_in_headers
from pqcache.parquet.pages.page_reader import UNREADABLE
from pqcache.parquet.row_group_stats import top_level_names
from pqcache.reader.columns.column_forms import form_of
from pqcache.reader.memory_budget import PiecesOf, RowGroupSizes
from pqcache.reader.order.epoch_order import Ints
from pqcache.reader.packing.packed_columns import packed_forms
from pqcache.reader.packing.packed_rows import PackedRows
from pqcache.reader.piece_borders import rows_along_pages
from pqcache.reader.read_plan import ReadPlan
from pqcache.reader.selection.sequences import SequenceSelection
from pqcache.store.cache_directory import advice_for_file
from pqcache.system.disk import check_regular, open_regular
from pqcache.system.shared_numbers import SharedNumbers

T = TypeVar("T")

log = logging.getLogger("pqcache.reader")

_SAMPLE_ROWS, _SAMPLE_AT_ONCE, _SAMPLE_BYTES = 1024, 128, 8 << 20
_LOOKED_AT = 16  # row groups: of those that stand evenly apart, and of those whose dictionaries may enlarge them most
_STRIDE = 5  # of them between two processes that were forked one after the other
_VIEW = 16  # bytes that point to a string's or a list's bytes
_FILE_NUMBER = 4  # bytes
_LARGE = 8  # times the bytes of a column whose pages matter are more than those of all columns


def estimate_sizes(plan: ReadPlan, found: SharedNumbers | None = None) -> RowGroupSizes:
    """Return the bytes of each of a plan's row groups, or pieces of one.

    ``found`` are the sizes that were found out before; see `known_sizes`. Lists count alike whether they are held
    dense or not, so that the window is the same either way.
    """
    names = [form.name for form in plan.file_forms]
    found = known_sizes(plan) if found is None else found
    if isinstance(plan.packs, PackedRows):
        return _packed_sizes(plan, plan.packs, names, found)
    if plan.packs is not None:
        return _grouped_sizes(plan, names, found)
    selected = _bytes(plan, plan.counts, names, found, plan.sequences)
    rows = plan.data.index.rows[plan.row_groups]
    if plan.selection is None:
        return RowGroupSizes(selected, selected, rows)
    decoded_rows = np.minimum(rows, plan.piece_rows) if plan.piece_rows else rows
    decoded = _bytes(plan, decoded_rows, list(dict.fromkeys([*names, *plan.selection.columns])), found)
    if plan.sequences is None:
        return RowGroupSizes(selected, decoded, rows)
    decoded += selected + 8 * plan.counts * plan.sequences.spec.length  # where the rows of sequences are
    return RowGroupSizes(selected, decoded, plan.counts)


def _packed_sizes(plan: ReadPlan, packs: PackedRows, names: list[str], found: SharedNumbers) -> RowGroupSizes:
    width = sum(form.width for form in packed_forms(plan.file_forms)) * packs.spec.length
    selected = plan.counts * (width + len(names) * _VIEW)
    decoded = _decoded(plan, names, found)
    tokens = _bytes(plan, plan.rows_read, names[:1], found)  # one column is laid end to end at a time
    return RowGroupSizes(selected, decoded + tokens + selected, plan.counts)


def _grouped_sizes(plan: ReadPlan, names: list[str], found: SharedNumbers) -> RowGroupSizes:
    selected = _bytes(plan, plan.rows_read, names, found)
    return RowGroupSizes(selected, _decoded(plan, names, found) + selected, plan.counts)


def _decoded(plan: ReadPlan, names: list[str], found: SharedNumbers) -> Ints:
    others = plan.selection.columns if plan.selection else ()
    return _bytes(plan, plan.data.index.rows[plan.row_groups], list(dict.fromkeys([*names, *others])), found)


def known_sizes(plan: ReadPlan) -> SharedNumbers:
    """Return where the sizes of a plan's columns are remembered, also by processes that are forked later."""
    names = dict.fromkeys([form.name for form in plan.file_forms])
    names |= dict.fromkeys(plan.selection.columns if plan.selection else ())
    return SharedNumbers([name for name in names if _is_varied(plan, name)], len(plan.data.index))


def density(plan: ReadPlan, number: int) -> float:
    """Return how many times as long as the average row the longest rows next to each other are in a row group."""
    names = [form.name for form in plan.file_forms if form.kind != "fixed"]

    def densest(_: pq.ParquetFile, group: StoredRowGroup) -> float:
        present = [name for name in names if name in group.schema.names]
        return densest_rows(group, present) if present else 1.0

    return _look(plan, number, names, densest)


def has_pages(plan: ReadPlan, number: int) -> bool:
    """Return whether a piece of a row group is read from its own pages: whether it is known where these lie.

    The footer says so: there is an offset index, or the column is not nested, or has lists of what is not. Where rows
    are selected, or packed, all of them are decoded anyway.
    """
    if plan.selection is not None or plan.weights is not None or plan.packs is not None:
        return False
    names = {form.name for form in plan.file_forms}

    def known(file: pq.ParquetFile, group: StoredRowGroup) -> bool:
        chunks, metadata = file.metadata.row_group(group.number), file.metadata
        columns = top_level_names(metadata, group.schema)
        return all(
            chunks.column(leaf).has_offset_index
            or metadata.schema.column(leaf).path == name
            or (metadata.schema.column(leaf).max_repetition_level > 0 and columns.count(name) == 1)
            for leaf, name in enumerate(columns)
            if name in names
        )

    return _look(plan, number, (), known)


def along_pages(plan: ReadPlan, number: int, rows: int) -> int:
    """Return how many rows, at most ``rows``, pieces of a row group have that begin where pages do.

    These are ``rows`` where that makes little difference. Pages of lists do not count: without an offset index, which
    another process may not see while a file is still arriving, all of them would have to be decoded. Nor do small
    columns.
    """
    names = {form.name for form in plan.file_forms}

    def columns_of(_: pq.ParquetFile, group: StoredRowGroup) -> dict[str, int]:
        chunks, schema = group.metadata.row_group(group.number), group.metadata.schema
        columns = top_level_names(group.metadata, group.schema)
        sizes = {leaf: chunks.column(leaf).total_compressed_size for leaf, name in enumerate(columns) if name in names}
        large = [leaf for leaf, size in sizes.items() if _LARGE * size >= sum(sizes.values())]
        return {columns[leaf]: leaf for leaf in large if schema.column(leaf).path == columns[leaf]}

    def aligned(_: pq.ParquetFile, group: StoredRowGroup) -> int:
        try:
            return rows_along_pages(_pages_in_headers(group, list(columns.values())), rows)
        except (PqcacheError, *UNREADABLE) as error:  # it is read from its beginning, or refused
            log.debug("%s: pieces do not begin where pages do: %s", group.path, error)
            return rows

    columns = _look(plan, number, (), columns_of)
    return _look(plan, number, list(columns), aligned) if columns else rows


def _pages_in_headers(group: StoredRowGroup, leaves: Sequence[int]) -> list[PageLocations]:
    """Return where the pages of columns without lists lie, by their headers."""
    tail = read_local_tail(group.path)
    check_footer(tail.footer, str(group.path), tail.size)
    chunks = [group.metadata.row_group(group.number).column(leaf) for leaf in leaves]
    if any(chunk.file_path for chunk in chunks):
        raise NotRead("another file")
    file = open_regular(group.path)
    try:
        return [locations_in_headers(file, chunk, group.rows, None) for chunk in chunks]
    finally:
        os.close(file)


def pieces_of(plan: ReadPlan) -> PiecesOf:
    """Return what is known of a plan's row groups if they are read in pieces; each is looked at once."""
    return PiecesOf(
        lru_cache(partial(density, plan)), lru_cache(partial(has_pages, plan)), lru_cache(partial(along_pages, plan))
    )


def _is_varied(plan: ReadPlan, name: str) -> bool:
    """Return whether the bytes of a column do not follow from its number of rows, or of items."""
    form = form_of(as_list(plan.data.index.schema.field(name)))
    if form.kind == "fixed":
        return False
    return form.kind == "other" or form.width == 1 or f"{name}:values" not in plan.data.index.recorded


def _bytes(
    plan: ReadPlan, counts: Ints, names: Sequence[str], known: SharedNumbers, sequences: SequenceSelection | None = None
) -> Ints:
    """Return the bytes of ``counts`` rows, or sequences, of each row group, with columns ``names`` of the files."""
    index = plan.data.index
    total = np.zeros(len(plan.row_groups), np.int64)
    forms = [form_of(as_list(index.schema.field(name))) for name in names]
    varied = [form.name for form in forms if form.name in known.names]
    looked_at = _looked_at(plan, varied)
    _find_all_sizes(plan, looked_at, varied, known)
    for form in forms:
        items = counts if sequences is None else counts * len(sequences.spec.steps(form.name))
        if form.kind == "fixed":
            total += items * form.width
            continue
        stored = index.uncompressed([form.name])[plan.row_groups]
        size = np.maximum(stored, _list_bytes(plan, form.name))
        if form.name in known.names:
            exact = known.numbers(form.name)[plan.row_groups] - 1  # -1: not looked at
            some = exact[looked_at]
            size = np.maximum(size, stored * (some.sum() / max(1, stored[looked_at].sum())))
            size = np.where(exact >= 0, np.maximum(exact, 0), size)
        total += (size * (items / np.maximum(1, index.rows[plan.row_groups]))).astype(np.int64) + _VIEW * items
    return np.asarray(total + _FILE_NUMBER * counts * bool(plan.partitions), np.int64)


def _looked_at(plan: ReadPlan, names: Sequence[str]) -> Ints:
    """Return the row groups to look at: some that stand evenly apart, and those that dictionaries may enlarge most.

    A value of a dictionary is stored once, and decoded for each row: at most as many bytes as are stored, times rows.
    """
    if not names or not len(plan.row_groups):
        return np.zeros(0, np.int64)
    index, row_groups = plan.data.index, plan.row_groups
    count = len(row_groups)
    most = index.uncompressed(names)[row_groups].astype(float) * index.rows[row_groups]
    apart = np.arange(_LOOKED_AT) * count // _LOOKED_AT
    chosen = np.unique(np.concatenate([apart, _largest(most, _LOOKED_AT), [0]]))
    same = (chosen > 0) & (row_groups[chosen] == row_groups[chosen - 1])  # as the piece before it
    return np.asarray(chosen[~same], np.int64)


def _largest(values: npt.NDArray[Any], most: int) -> Ints:
    """Return where the largest values are, the first ones among equal ones."""
    if len(values) > most:
        least = np.partition(values, len(values) - most)[len(values) - most]
        among = np.flatnonzero(values >= least)
    else:
        among = np.arange(len(values))
    return np.asarray(among[np.argsort(-values[among], kind="stable")[:most]], np.int64)


def unknown_sizes(names: Iterable[str], known: SharedNumbers, row_group: int) -> list[str]:
    """Return those of columns ``names`` of which no size is remembered for a row group of the index."""
    return [name for name in names if not known.numbers(name)[row_group]]


def _find_all_sizes(plan: ReadPlan, numbers: Ints, names: Sequence[str], known: SharedNumbers) -> None:
    """Find out how many bytes columns take in each of some row groups of a plan, and remember it.

    What footers do not say is looked at, where it is still arriving once all of it is there. Forked processes begin at
    different row groups, as each need not look at those that another one has seen.
    """
    texts: dict[Path, TextsStated] = {}  # by file

    def find(number: int, row_group: int, in_footer: bool) -> None:
        def found(_: pq.ParquetFile, group: StoredRowGroup) -> dict[str, int]:
            if not in_footer:
                return decoded_bytes(group, missing)
            if group.path not in texts:
                texts[group.path] = texts_stated(read_local_tail(group.path).footer, str(group.path))
            return stated_bytes(group, texts[group.path], missing)

        missing = unknown_sizes(names, known, row_group)
        if missing:
            _remember(_look(plan, number, () if in_footer else missing, found), known, row_group)

    row_groups = [(int(number), int(plan.row_groups[number])) for number in numbers]
    for number, row_group in row_groups:
        find(number, row_group, in_footer=True)
    missing = {row_group: unknown_sizes(names, known, row_group) for _, row_group in row_groups}
    left = [row_group for row_group, columns in missing.items() if columns]
    plan.data.wait(np.array(left, np.int64), list({name for row_group in left for name in missing[row_group]}))
    first = os.getpid() * _STRIDE % max(1, len(row_groups))
    for number, row_group in [*row_groups[first:], *row_groups[:first]]:
        find(number, row_group, in_footer=False)


def _remember(sizes: Mapping[str, int], known: SharedNumbers, row_group: int) -> None:
    for name, size in sizes.items():
        known.numbers(name)[row_group] = 1 + size


def find_sizes(group: StoredRowGroup, names: Sequence[str], known: SharedNumbers, row_group: int) -> None:
    """Find out how many bytes columns take that are stored as ``group``, and remember it for that of the index."""
    _remember(decoded_bytes(group, names), known, row_group)


def _list_bytes(plan: ReadPlan, name: str) -> Ints:
    """Return the bytes of all items of a column of flat lists in each row group, 0 where they are not counted."""
    index = plan.data.index
    kind = index.schema.field(name).type
    if f"{name}:values" not in index.recorded or not (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        return np.zeros(len(plan.row_groups), np.int64)
    try:
        width = kind.value_type.bit_width // 8
    except ValueError:  # strings and the like
        width = 0
    counted: Ints = np.nan_to_num(index.table[f"{name}:values"].to_numpy()).astype(np.int64)
    sizes: Ints = counted[plan.row_groups] * width
    return sizes


def _look(plan: ReadPlan, number: int, names: Sequence[str], look: Callable[[pq.ParquetFile, StoredRowGroup], T]) -> T:
    """Return what ``look`` sees of columns ``names`` of a row group of the plan, once they are there."""
    plan.data.wait(plan.row_groups[number : number + 1], names)

    def looked() -> T:
        with _opened(plan, number) as (file, group):
            return look(file, group)

    return plan.data.while_moving(looked)


@contextmanager
def _opened(plan: ReadPlan, number: int) -> Iterator[tuple[pq.ParquetFile, StoredRowGroup]]:
    """Open the file of a row group of the plan; what goes wrong with it raises ParquetError."""
    index, row_group = plan.data.index, int(plan.row_groups[number])
    path = plan.data.root / index.paths[int(index.numbers("file")[row_group])]
    try:
        check_regular(path)
        with pq.ParquetFile(path, pre_buffer=False) as file:
            yield (
                file,
                StoredRowGroup(path, file.metadata, file.schema_arrow, int(index.numbers("row_group")[row_group])),
            )
    except (pa.ArrowException, OSError) as error:
        advice = advice_for_file(path, "open the dataset again")
        raise ParquetError(path, f"cannot be read ({first_line(error)})", advice) from error


def first_rows(plan: ReadPlan, names: Sequence[str]) -> pa.Table | None:
    """Return those of columns ``names`` that the plan's first row group has, for its first rows; None without any.

    These are as many as fit into some megabytes.
    """
    if not names or not len(plan.row_groups):
        return None

    def first(file: pq.ParquetFile, group: StoredRowGroup) -> pa.Table | None:
        present = [name for name in names if name in group.schema.names]
        batches, left = [], _SAMPLE_ROWS
        for batch in file.iter_batches(_SAMPLE_AT_ONCE, [group.number], present, use_threads=False):
            batches.append(batch)
            left -= batch.num_rows
            if left <= 0 or sum(some.nbytes for some in batches) > _SAMPLE_BYTES:
                break
        return pa.Table.from_batches(batches) if batches else None

    return _look(plan, 0, names, first)
