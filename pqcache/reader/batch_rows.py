"""Finds the rows of a batch (file, row group and position) by arithmetic over the order of its epoch."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from pqcache.errors import UsageError
from pqcache.options import Unpack, documented, parsed
from pqcache.parquet.arrow import take_of_table
from pqcache.reader.decode import RowGroups
from pqcache.reader.epoch import read_rows
from pqcache.reader.epoch_options import RowArguments, RowOptions
from pqcache.reader.open_dataset import Files, open_local_dataset
from pqcache.reader.order import Ints, Order, batches_at, check_format, divisions_of
from pqcache.reader.read_plan import ReadPlan, document_lengths, make_read_plan
from pqcache.reader.selection.exclude import divided, exclusions_of, left_out_of
from pqcache.reader.selection.selection import Bools
from pqcache.reader.selection.split import first_rows_of
from pqcache.store.key_lookup import SelectedRows
from pqcache.units import is_whole

_STATE = {
    "snapshot": str, "row_groups": str, "columns": list, "shuffle": bool, "seed": int, "batch_size": int | None,
    "lanes": int, "window": int, "piece": int, "epoch": int, "batch": int,
}  # fmt: skip
_LEAST = {"batch_size": 1, "lanes": 1, "window": 1, "piece": 0, "epoch": 0, "batch": 0}


@dataclass(frozen=True, kw_only=True)
class RowPlaces:
    """Where the rows of a batch are stored, in batch order.

    ``epoch``, ``index``   which batch it is: its number in the epoch, counted over all ranks
    ``snapshot``      the snapshot with the rows, or a name for the content of a plain directory
    ``paths``         the dataset's files; ``files`` are numbers of these
    ``files``, ``row_groups``, ``rows``, ``rows_in_file``   for each row of the batch its file, its row group in that,
                      and its position in the row group and in the file, all counted from 0. For sequences, positions
                      have a second axis, for the rows of each. Packed documents have one for each piece of a
                      document, sequence after sequence, as ``cu_seqlens`` counts them without padding
    ``groups``        the row groups as the index of the dataset counts them, over all files
    """

    epoch: int
    index: int
    snapshot: str
    paths: tuple[str, ...]
    files: Ints
    row_groups: Ints
    rows: Ints
    rows_in_file: Ints
    groups: Ints

    def __len__(self) -> int:
        return len(self.files)

    @cached_property
    def selected(self) -> SelectedRows:
        """The rows for ``Cache.read`` and ``ParquetDataset(rows=...)``: in the order of the files, each once."""
        return SelectedRows.of(self._groups_of_rows, self.rows.ravel(), self.snapshot)

    @property
    def _groups_of_rows(self) -> Ints:
        return np.repeat(self.groups, self.rows.size // max(1, len(self)))

    def table(self) -> pa.Table:
        """A table with file, row_group, row and row_in_file; for sequences, the latter two are lists."""
        places = {"row": self.rows, "row_in_file": self.rows_in_file}
        names = pa.DictionaryArray.from_arrays(pa.array(self.files, pa.int32()), pa.array(self.paths, pa.string()))
        columns = {"file": names.dictionary_decode(), "row_group": pa.array(self.row_groups)}
        for name, found in places.items():
            flat = pa.array(found.ravel())
            columns[name] = flat if found.ndim == 1 else pa.FixedSizeListArray.from_arrays(flat, found.shape[1])
        return pa.table(columns)

    def read(self, path: str | os.PathLike[str], columns: Sequence[str] | None = None) -> pa.Table:
        """Read the batch's rows from their cache or directory; for sequences, all rows."""
        found = read_rows(path, self.selected, columns)
        _, position = np.unique(np.stack([self._groups_of_rows, self.rows.ravel()]), axis=1, return_inverse=True)
        return take_of_table(found, position.ravel())


def rows_of_batch(plan: ReadPlan, order: Order, index: int) -> RowPlaces:
    """The rows of batch ``index`` of a plan, in an order.

    If the selection picks rows within row groups, its columns are read, but only from the batch's row groups.
    """
    numbers, rows = order.batch(index)
    if plan.packs is not None:
        numbers, rows = documents_of(plan, order, numbers, rows)
    if plan.piece_starts is not None:
        rows = rows + plan.piece_starts[numbers]
    groups = plan.row_groups[numbers]
    if not plan.selection.is_all:
        rows = _chosen(plan, numbers, rows)
    if plan.left_out:
        kept = ~_are_left_out(plan, groups, rows)
        groups, rows = groups[kept], rows[kept]
    index_table = plan.data.index
    first = first_rows_of(plan.data)[groups]
    return RowPlaces(
        epoch=order.epoch,
        index=index,
        snapshot=plan.data.snapshot,
        paths=index_table.paths,
        files=index_table.numbers("file")[groups],
        row_groups=index_table.numbers("row_group")[groups],
        rows=rows,
        rows_in_file=rows + (first if rows.ndim == 1 else first[:, None]),
        groups=groups,
    )


def _are_left_out(plan: ReadPlan, groups: Ints, rows: Ints) -> Bools:
    left_out, found = left_out_of(Files(plan.data), plan.left_out), np.zeros(len(rows), np.bool_)
    for group in np.unique(groups).tolist():
        where = groups == group
        of_group = plan.data.while_moving(partial(left_out, group))[rows[where]]
        found[where] = of_group if rows.ndim == 1 else of_group.any(axis=1)
    return found


def documents_of(plan: ReadPlan, order: Order, numbers: Ints, items: Ints) -> tuple[Ints, Ints]:
    """The documents of packed sequences, or of batches by tokens, numbered among the packed ones.

    ``items`` are the sequences, ``numbers`` their row groups in the plan. A document is listed once for each piece.
    """
    assert plan.packs is not None
    packs = replace(plan.packs, shuffle=(order.seed, order.epoch) if order.shuffle else None)
    files, found = Files(plan.data), [np.zeros(0, np.int64)] * len(items)
    selection = plan.selection.looking_at([packs.spec.column])
    for number in np.unique(numbers).tolist():
        group = files.group(int(plan.row_groups[number]))
        lengths = selection.look_into(files, group.number, partial(document_lengths, plan, packs.spec.column))
        if plan.pack is None:
            batches = packs.batches(number, lengths, group.number, group.path)
        else:
            batches = packs.pieces(number, lengths, group.number, group.path).documents(lengths)
        for place in np.flatnonzero(numbers == number).tolist():
            found[place] = batches[items[place : place + 1]].each
    counts = [len(documents) for documents in found]
    return np.repeat(numbers, counts), np.concatenate([np.zeros(0, np.int64), *found])


def _chosen(plan: ReadPlan, numbers: Ints, rows: Ints) -> Ints:
    """Convert numbers of chosen rows (or sequences) to positions in row groups."""
    groups, steps = RowGroups(plan), () if plan.sequence is None else (plan.sequence.length,)
    found = np.zeros((len(rows), *steps), np.int64)
    indexed = plan.row_groups[numbers]
    for number in numbers[np.unique(indexed, return_index=True)[1]].tolist():
        where = indexed == plan.row_groups[number]
        positions = plan.data.while_moving(partial(groups.positions, number))
        found[where] = positions[rows[where]].each.reshape(-1, *steps)
    return found


@documented(RowArguments, RowOptions)
def rows(
    target: str | os.PathLike[str],
    state: str | os.PathLike[str] | Mapping[str, Any],
    batch: int,
    *,
    epoch: int | None = None,
    **given: Unpack[RowArguments],
) -> RowPlaces:
    """Find the rows of a training's batch, given a state saved by that training.

    A state doesn't hold the options that choose rows: give those of the training again.

    Args:
        target: the cache or directory that the training reads.
        state: the result of ``state_dict()`` at any batch, or a JSON file of it.
        batch: the number of the batch in its epoch, counted over all ranks: ``batch.index``.
        epoch: its epoch. Default: that of the state.
        given: see pqcache.reader.epoch_options

    >>> from pqcache.torch import ParquetDataset
    >>> dataset = ParquetDataset("cache/shop", columns=["id"], batch_size=4, seed=1)
    >>> found = rows("cache/shop", dataset.state_dict(), batch=7)
    >>> found.table().column_names, len(found)
    (['file', 'row_group', 'row', 'row_in_file'], 4)

    Raises UsageError if state, options and data do not fit together.
    """
    with training_of(target, state, epoch, given) as (plan, order, _):
        return rows_of_batch(plan, order, checked_index(batch, order.batches()))


@documented(RowArguments, RowOptions)
def last_rows(
    target: str | os.PathLike[str],
    state: str | os.PathLike[str] | Mapping[str, Any],
    last: int,
    **given: Unpack[RowArguments],
) -> list[RowPlaces]:
    """Find the rows of the last batches of all ranks before a state, in reading order.

    Only batches of the state's own epoch are found, so there may be fewer.

    Args:
        target: the cache or directory that the training reads.
        state: the result of ``state_dict()``, or a JSON file of it.
        last: how many batches.
        given: see pqcache.reader.epoch_options

    Raises UsageError as ``rows``.
    """
    if not is_whole(last) or last < 1:
        raise UsageError(f"last={last!r}", "has to be at least 1")
    with training_of(target, state, None, given) as (plan, order, known):
        end, divisions = min(known["batch"], order.batches()), divisions_of(known.get("divisions"))
        batches = np.arange(max(0, known["batch"] - last), end)
        if divisions:
            batches = batches_at(order.batches(), order.lanes, divisions)[batches]
        return [rows_of_batch(plan, order, batch) for batch in batches.tolist()]


@contextmanager
def training_of(
    target: str | os.PathLike[str],
    state: str | os.PathLike[str] | Mapping[str, Any],
    epoch: int | None,
    given: Mapping[str, Any],
) -> Iterator[tuple[ReadPlan, Order, dict[str, Any]]]:
    """The plan and order of one epoch of a training, by default its state's epoch, and the state."""
    known, chosen = checked_state(state), RowOptions(**parsed(given, RowOptions))
    if chosen.since is None:
        chosen = replace(chosen, since=known.get("since"))
    chosen.check_pack(known["columns"])
    data, lease = open_local_dataset(target, known["snapshot"])
    with lease or nullcontext():

        def plan_at(epoch: int) -> ReadPlan:
            left_out, later = divided(known["exclude"], epoch)
            some = replace(chosen, exclude=left_out) if left_out else chosen
            return replace(make_read_plan(data, known["columns"], some, seed=known["seed"]), left_out=later)

        plan = plan_at(known["epoch"])
        if plan.fingerprint_at(known["epoch"]) != known["row_groups"]:
            raise UsageError(
                "state",
                "it was taken with other filters or rows, or another split, sequence, pack or weights",
                "give those of the training",
            )
        number = known["epoch"] if epoch is None else epoch
        plan = plan_at(number).at_epoch(number, known["seed"]).split(known["piece"])
        order = Order(
            counts=plan.counts,
            batch_size=known["batch_size"] or 1,
            lanes=known["lanes"],
            window=known["window"],
            seed=known["seed"],
            epoch=number,
            shuffle=known["shuffle"],
        )
        yield plan, order, known


def checked_index(index: int, total: int) -> int:
    """The number of a batch; UsageError if an epoch of ``total`` batches has no such batch."""
    if not is_whole(index) or not 0 <= index < total:
        raise UsageError(f"batch {index!r}", f"the epoch has {total:,} batches, counted from 0")
    return int(index)


def checked_state(state: str | os.PathLike[str] | Mapping[str, Any], name: str = "state") -> dict[str, Any]:
    """A state, given as such or as a JSON file; anything else raises a UsageError about ``name``."""
    if isinstance(state, str | os.PathLike):
        name, path = os.fspath(state), Path(state)
        try:
            state = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise UsageError(name, f"cannot be read ({error.strerror})", "name a file of json.dumps(state)") from error
        except ValueError as error:
            raise UsageError(name, "it is not JSON", "name a file of json.dumps(loader.state_dict())") from error
    if isinstance(state, Mapping) and "datasets" in state:
        raise UsageError(name, "it is the state of a Mix", "call rows_of(epoch, batch) of the mix in Python")
    check_format(state, name, "a ParquetDataset")
    assert isinstance(state, Mapping)
    for field, kind in _STATE.items():
        value = state.get(field)
        if not isinstance(value, kind) or (isinstance(value, int) and value < _LEAST.get(field, value)):
            raise UsageError(name, f"it has no sound {field!r}", "give what state_dict() of a dataset returned")
    if state["snapshot"].startswith("listing-"):
        raise UsageError(name, "each of its nodes holds a share", "call rows_of(epoch, batch) of the dataset")
    try:
        return {**state, "exclude": exclusions_of(state.get("exclude"))}
    except (TypeError, ValueError) as error:
        raise UsageError(name, "it has no sound 'exclude'", "give what state_dict() of a dataset returned") from error
