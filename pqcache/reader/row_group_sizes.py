"""How much memory row groups take: exact for numbers, estimated from a few rows for everything else."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pqcache.errors import ParquetError, first_line
from pqcache.parquet.dense import as_list
from pqcache.reader.columns.column_forms import form_of
from pqcache.reader.memory_budget import RowGroupSizes
from pqcache.reader.order.order import Ints
from pqcache.reader.read_plan import ReadPlan
from pqcache.reader.selection.sequences import SequenceSelection
from pqcache.system.disk import check_regular

_SAMPLE_ROWS, _SAMPLE_AT_ONCE, _SAMPLE_BYTES = 1024, 128, 8 << 20
_OTHER_KIND = 4  # times as many bytes as the first row group may have
_TEXT = (pa.string(), pa.large_string(), pa.binary(), pa.large_binary())
_MOSTLY_DISTINCT = 0.5  # of the values of a sample
_VIEW = 16  # bytes that point to a string's or a list's bytes
_FILE_NUMBER = 4  # bytes


def estimate_sizes(plan: ReadPlan) -> RowGroupSizes:
    """Return the bytes of each of a plan's row groups, or pieces of one.

    Lists count alike whether they are held dense or not, so that the window is the same either way.
    """
    names = [form.name for form in plan.file_forms]
    selected = _bytes(plan, plan.counts, names, plan.sequences)
    rows = plan.data.index.rows[plan.row_groups]
    if plan.selection is None:
        return RowGroupSizes(selected, selected, rows)
    decoded_rows = np.minimum(rows, plan.piece_rows) if plan.piece_rows else rows
    decoded = _bytes(plan, decoded_rows, list(dict.fromkeys([*names, *plan.selection.columns])))
    if plan.sequences is None:
        return RowGroupSizes(selected, decoded, rows)
    decoded += selected + 8 * plan.counts * plan.sequences.spec.length  # where the rows of sequences are
    return RowGroupSizes(selected, decoded, plan.counts)


def _bytes(plan: ReadPlan, counts: Ints, names: Sequence[str], sequences: SequenceSelection | None = None) -> Ints:
    """Return the bytes of ``counts`` rows, or sequences, of each row group, with columns ``names`` of the files."""
    index = plan.data.index
    total = np.zeros(len(plan.row_groups), np.int64)
    forms = [form_of(as_list(index.schema.field(name))) for name in names]
    varied = [form.name for form in forms if form.kind != "fixed"]
    samples = [first_rows(plan, varied, number) for number in _sampled(plan, varied)]
    for form in forms:
        items = counts if sequences is None else counts * len(sequences.spec.steps(form.name))
        if form.kind == "fixed":
            total += items * form.width
            continue
        stored = index.uncompressed([form.name])[plan.row_groups] * items // index.rows[plan.row_groups]
        found = [some for some in samples if some is not None and form.name in some.column_names and some.num_rows]
        sizes = [stored, _list_bytes(plan, form.name) * items // index.rows[plan.row_groups]]
        sizes.extend(_extrapolated(some[form.name], stored, items) for some in found)
        total += np.maximum.reduce(sizes) + _VIEW * items
    return np.asarray(total + _FILE_NUMBER * counts * bool(plan.partitions), np.int64)


def _extrapolated(sample: pa.ChunkedArray, stored: Ints, items: Ints) -> Ints:
    """Return the bytes of ``items`` rows like the sample, of which row groups store ``stored`` bytes.

    Where most values of a sample differ, there is hardly a dictionary that repeats them: the rows after the longest
    ones cannot take more than what is stored.
    """
    size: Ints = (items * (sample.nbytes / len(sample))).astype(np.int64)
    if sample.type not in _TEXT:
        return size
    share = pc.count_distinct(sample, mode="all").as_py() / len(sample)
    if share >= _MOSTLY_DISTINCT:
        size = np.minimum(size, (stored / share).astype(np.int64))
    return size


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


def _sampled(plan: ReadPlan, names: Sequence[str]) -> list[int]:
    """Return the row groups to sample: the first, and if that is another kind, the one that dictionaries enlarge most.

    A value of a dictionary is stored once, and decoded for each row: at most as many bytes as are stored, times rows.
    """
    if not names or not len(plan.row_groups):
        return []
    index = plan.data.index
    most = index.uncompressed(names)[plan.row_groups].astype(float) * index.rows[plan.row_groups]
    largest = int(np.argmax(most))
    return [0, largest] if most[largest] > _OTHER_KIND * most[0] else [0]


def first_rows(plan: ReadPlan, names: Sequence[str], number: int = 0) -> pa.Table | None:
    """Return those of columns ``names`` that a row group of the plan has, for its first rows; None without any.

    These are as many as fit into some megabytes.
    """
    if not names or not len(plan.row_groups):
        return None
    index, row_group = plan.data.index, int(plan.row_groups[number])
    path = plan.data.root / index.paths[int(index.numbers("file")[row_group])]
    try:
        check_regular(path)
        with pq.ParquetFile(path) as file:
            present = [name for name in names if name in file.schema_arrow.names]
            number = int(index.numbers("row_group")[row_group])
            batches, left = [], _SAMPLE_ROWS
            for batch in file.iter_batches(_SAMPLE_AT_ONCE, [number], present, use_threads=False):
                batches.append(batch)
                left -= batch.num_rows
                if left <= 0 or sum(some.nbytes for some in batches) > _SAMPLE_BYTES:
                    break
    except (pa.ArrowException, OSError) as error:
        raise ParquetError(path, f"cannot be read ({first_line(error)})", "open the dataset again") from error
    return pa.Table.from_batches(batches) if batches else None
