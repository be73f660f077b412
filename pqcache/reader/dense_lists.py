"""Which list columns have lists of one length only, so that they can be held as rows of fixed width."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pqcache.reader.files import Files
from pqcache.reader.read_plan import ReadPlan
from pqcache.store.row_group_index import Index

log = logging.getLogger("pqcache.reader")

_SAMPLE_ROWS, _SAMPLE_BYTES = 1024, 8 << 20


def with_dense_lists(plan: ReadPlan, ragged: Sequence[str] = ()) -> ReadPlan:
    """Return the plan with lists that are all of one length held as rows of fixed width, but for columns ``ragged``.

    Decided once for the whole dataset, so that a column is of one kind in every batch: each row group's number of
    values must be rows x length, and the first rows must have that length and no nulls in them. Lists of one item are
    not held so, as a Parquet file counts an empty list or a null as one value too.
    """
    lists = {name: kind.stored for name, kind in plan.kinds.items() if kind.is_list and name not in ragged}
    dense = [(name, stored.length) for name, stored in lists.items() if stored and stored.length > 1]
    candidates = dict(_of_one_length(plan.data.index, [name for name, stored in lists.items() if not stored]))
    sample = _first_rows(plan, list(candidates)) if candidates else None
    for name, length in candidates.items():
        if sample is None or name not in sample.column_names:
            continue
        lengths = pc.fill_null(pc.list_value_length(sample[name]), -1)
        if not pc.all(pc.equal(lengths, length)).as_py():
            log.debug("column %r has %d values a row, in lists of other lengths: they remain lists", name, length)
        elif pc.list_flatten(sample[name]).null_count:
            log.debug("column %r has nulls inside its lists: they remain lists", name)
        else:
            dense.append((name, length))
    return replace(plan, dense=tuple(dense))


def _of_one_length(index: Index, columns: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Yield (name, length) of columns whose number of values in each row group is its rows times a length."""
    rows = index.rows
    for column in columns:
        name = f"{column}:values"
        if name not in index.recorded:  # an index of a version that did not record it
            continue
        values = index.table[name]
        if values.null_count:  # some file lacks the column
            continue
        lengths = np.unique(values.to_numpy()[rows > 0] / rows[rows > 0])
        if len(lengths) == 1 and lengths[0] == int(lengths[0]) > 1:
            yield column, int(lengths[0])


def _first_rows(plan: ReadPlan, names: Sequence[str]) -> pa.Table | None:
    """Return columns of the first rows of the plan's first row group, as many as fit into some megabytes."""
    files = Files(plan.data)

    def read() -> pa.Table:
        found: list[pa.Table] = []
        with closing(files.parts(files.group(int(plan.row_groups[0])), names)) as parts:
            for part in parts:
                found.append(part)
                if sum(map(len, found)) >= _SAMPLE_ROWS or sum(some.nbytes for some in found) > _SAMPLE_BYTES:
                    break
        return pa.concat_tables(found)

    return plan.data.while_moving(read) if len(plan.row_groups) else None
