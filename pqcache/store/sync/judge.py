"""Judges an unpublished snapshot by the rules of ``[expect]``; see `pqcache.store.expect`.

`judge` is a pure function: it compares index and files of the new snapshot with those of the current one. Rules about
new values also need the data: the distinct values of their columns are recorded beside a snapshot.
"""

from __future__ import annotations

import json
import logging
import operator
import os
import stat
import statistics
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from pqcache.errors import MALFORMED, DamagedError
from pqcache.events import Warned
from pqcache.store.expect import FAILED, FEWEST, PASSED, SHOWN, Finding, Rule, judge_freshness, lines_of
from pqcache.store.layout import FILES, ROW_GROUPS, VALUES
from pqcache.store.manifest import FileEntry
from pqcache.store.manifest_file import newest_time
from pqcache.store.partition_paths import parent, partition_values
from pqcache.store.row_group_index import Index, read_index
from pqcache.store.sync.cache_run import CacheRun
from pqcache.system.disk import read_regular, write_durably
from pqcache.units import format_count

_LATER = "judged when the files are here"
log = logging.getLogger("pqcache.sync")

_MOST = 1000  # values of a column
_ROWS = 1 << 16  # decoded at once

Values = frozenset[str] | None
"""The values as text; None if there are more than _MOST, or their type has no text."""


_BY_INDEX = ("rows", "nulls", "max")  # kinds that need more than the paths of files
_WITH_CURRENT = ("max", "new values")  # kinds that compare with the current snapshot


def judged(run: CacheRun, built: Path, files: Sequence[FileEntry]) -> tuple[Finding, ...]:
    """Judge a snapshot before it is published by the rules of ``[expect]``; reports findings that only warn."""
    if not run.config.rules or run.command != "sync":
        return ()
    new = Judged(index=read_index(built / ROW_GROUPS), files=files, newest=newest_time(built / FILES))
    return _judged(run, new, built)


def foreseen(run: CacheRun, paths: Iterable[str], newest: float | None) -> tuple[Finding, ...]:
    """Judge a snapshot before the files with these ``paths`` are fetched."""
    files = [FileEntry(path=path, size=0, rows=0, row_groups=0) for path in paths] if run.config.rules else []
    return _judged(run, Judged(index=None, files=files, newest=newest)) if files else ()


def _judged(run: CacheRun, new: Judged, built: Path | None = None) -> tuple[Finding, ...]:
    """Judge against the snapshot that readers have; damaged parts of it count as unknown."""
    current = None
    if run.current is not None:
        index: Index | None = None
        held: Sequence[FileEntry] = ()
        with suppress(DamagedError):
            index = run.current.checked_index()
        with suppress(DamagedError):
            held = run.current.checked_manifest().files
        current = Judged(index=index, files=held, number=run.current.number)
        if built is not None:
            new, current = _with_columns(
                run.config.rules, new, built, current, run.current.path, not run.options.dry_run
            )
    findings = judge(run.config.rules, new, current, time.time())
    for line in lines_of(finding for finding in findings if finding.level != FAILED):  # the others are the error
        run.options.on_event(Warned(line))
    return findings


def _with_columns(
    rules: Sequence[Rule], new: Judged, built: Path, current: Judged, path: Path, writes: bool
) -> tuple[Judged, Judged]:
    """Add the values compared by rules about new values to both snapshots."""
    known = () if new.index is None else new.index.schema.names
    in_paths = () if new.index is None else new.index.partitions.column_names
    named = dict.fromkeys(rule.columns[0] for rule in rules if rule.kind == "new values")
    columns = [name for name in named if name in known and name not in in_paths]
    if not columns:
        return new, current
    changed = changed_directories(new.files, current)
    paths = [entry.path for entry in new.files if parent(entry.path) in changed]
    before, found = compared_values(columns, path, [entry.path for entry in current.files], built, paths, writes)
    return replace(new, values=found), replace(current, values=before)


@dataclass(frozen=True, kw_only=True)
class Judged:
    """The judged snapshot, or the current one.

    Attributes:
        index: None if it is damaged, or doesn't exist yet.
        files: empty if the manifest is damaged.
        number: of the current snapshot.
        newest: when the newest source file was written, in seconds since 1970; None if unknown.
        values: values of columns in the files: of the judged partitions, or of the whole current snapshot; None if
            there are too many, or they cannot be written as text.
    """

    index: Index | None
    files: Sequence[FileEntry]
    number: int = 0
    newest: float | None = None
    values: Mapping[str, frozenset[str] | None] = field(default_factory=dict)

    @property
    def paths(self) -> Iterable[str]:
        return self.index.paths if self.index is not None else (entry.path for entry in self.files)


def judge(rules: Iterable[Rule], new: Judged, current: Judged | None, now: float) -> tuple[Finding, ...]:
    """Judge the partitions of a ``new`` snapshot that are missing or different in the ``current`` one.

    Without a current snapshot, all partitions are judged. ``now`` is in seconds since 1970. A rule that is met has no
    finding, unless there was nothing to compare with.
    """
    changed = changed_directories(new.files, current)
    found: list[Finding] = []
    for rule in rules:
        if new.index is None and (rule.kind in _BY_INDEX or (rule.kind == "freshness" and new.newest is None)):
            found.append(Finding(rule.text, "", _LATER, PASSED))
        elif rule.kind == "freshness":
            found += judge_freshness(rule, new.newest, now)
        elif changed and rule.kind in _WITH_CURRENT and current is not None and current.index is None:
            reason = "the current snapshot's index cannot be read"
            found.append(Finding(rule.text, "", reason, rule.level_of_unknown))
        elif changed:
            found += _JUDGES[rule.kind](rule, new, current, changed)
    return tuple(found)


def changed_directories(files: Sequence[FileEntry], current: Judged | None) -> frozenset[str]:
    """Partitions whose rows differ from the ``current`` snapshot, or come from source files that it lacks."""
    before = _rows_of(() if current is None else current.files)
    changed = {directory for directory, rows in _rows_of(files).items() if before.get(directory) != rows}
    since = 0 if current is None else current.number
    return frozenset(changed | {parent(entry.path) for entry in files if entry.since > since})


def _rows_of(files: Iterable[FileEntry]) -> Counter[str]:
    rows = Counter[str]()
    for entry in files:
        rows[parent(entry.path)] += entry.rows
    return rows


def _judge_rows(rule: Rule, new: Judged, current: Judged | None, changed: Collection[str]) -> Iterable[Finding]:
    index = _index_of(new)
    columns = [index.partitions[name].to_pylist() for name in rule.columns if name in index.partitions.column_names]
    if len(columns) < len(rule.columns):
        yield Finding(rule.text, "", "no such partition column", rule.level)
        return
    rows, judged = Counter[tuple[Any, ...]](), set[tuple[Any, ...]]()
    values_of = dict(zip(index.paths, zip(*columns, strict=True), strict=True))
    for entry in new.files:
        values = values_of[entry.path]
        rows[values] += entry.rows
        if parent(entry.path) in changed:
            judged.add(values)
    ordered = sorted(values for values in rows if None not in values)  # a null has no place among the others
    position = {values: number for number, values in enumerate(ordered)}
    for values in sorted(judged, key=lambda values: position.get(values, -1)):
        here = position.get(values, 0)
        before = [rows[other] for other in ordered[max(0, here - rule.last) : here]]
        place = "/".join(f"{name}={_text(value)}" for name, value in zip(rule.columns, values, strict=True))
        if len(before) < FEWEST:
            yield Finding(rule.text, place, f"not enough history ({len(before)} of {rule.last})", PASSED)
            continue
        usual, found = statistics.median(before), rows[values]
        if abs(found - usual) * 100 <= rule.limit * usual:
            continue
        much = f"{abs(found - usual) / usual:.1%} " if usual else ""
        side = "below" if found < usual else "above"
        reason = f"{format_count(found, 'row')}, {much}{side} {usual:,g}, the median of the {len(before)} before"
        yield Finding(rule.text, place, reason, rule.level)


def _judge_nulls(rule: Rule, new: Judged, current: Judged | None, changed: Collection[str]) -> Iterable[Finding]:
    index, (column,) = _index_of(new), rule.columns
    if (missing := _missing(rule, index)) is not None:
        yield missing
        return
    nulls = _nulls(index, column)
    meets = {"<": operator.lt, "<=": operator.le, "=": operator.eq}[rule.sign]
    for directory, groups in _row_groups(index, changed).items():
        rows, unknown = int(index.rows[groups].sum()), int((nulls[groups] < 0).sum())
        if unknown:
            yield _unknown(rule, directory, "null count", unknown, len(groups))
            continue
        found = int(nulls[groups].sum())
        share = 100 * found / rows if rows else 0.0
        if rows and not meets(share if rule.is_share else found, rule.limit):
            yield Finding(rule.text, directory, f"{found:,} of {format_count(rows, 'row')} ({share:.3g}%)", rule.level)


def _judge_max(rule: Rule, new: Judged, current: Judged | None, changed: Collection[str]) -> Iterable[Finding]:
    import pyarrow.compute as pc  # which few syncs need

    index, (column,) = _index_of(new), rule.columns
    if (missing := _missing(rule, index)) is not None:
        yield missing
        return
    if current is None or current.index is None:
        return
    groups = [group for some in _row_groups(index, changed).values() for group in some]
    found, unknown = _maximum(index, column, groups)
    before, unknown_before = _maximum(current.index, column, range(len(current.index)))
    for number, total, where in ((unknown, len(groups), ""), (unknown_before, len(current.index), " before")):
        if number:
            yield _unknown(rule, "", f"maximum{where}", number, total)
            return
    if before is None:
        return
    try:
        rises = found is not None and bool(pc.greater(found, before).as_py())
    except pa.ArrowException:
        yield Finding(rule.text, "", f"the type was {before.type} and is {index.schema.field(column).type}", rule.level)
        return
    if not rises:
        text = "no value" if found is None else _text(found)
        yield Finding(rule.text, "", f"{text} in what is new, {_text(before)} before", rule.level)


def _judge_new_values(rule: Rule, new: Judged, current: Judged | None, changed: Collection[str]) -> Iterable[Finding]:
    (column,) = rule.columns

    def values(snapshot: Judged) -> Collection[str | None] | None:
        if not is_in_paths:
            return snapshot.values.get(column)
        directories = dict.fromkeys(map(parent, snapshot.paths))
        return dict.fromkeys(partition_values(directory).get(column) for directory in directories)

    if current is None:
        return
    is_in_paths = any(column in partition_values(parent(path)) for path in new.paths)
    if new.index is None and not is_in_paths:
        yield Finding(rule.text, "", _LATER, PASSED)
        return
    if not is_in_paths and (missing := _missing(rule, _index_of(new))) is not None:
        yield missing
        return
    found, before = values(new), values(current)
    if found is None or before is None:
        reason = "more values than are recorded, values without a text, or a file that cannot be read"
        yield Finding(rule.text, "", reason, rule.level_of_unknown)
        return
    if added := [_text(value) for value in found if value not in before]:
        added = added if is_in_paths else sorted(added)
        more = f" and {len(added) - SHOWN:,} more" if len(added) > SHOWN else ""
        yield Finding(rule.text, "", f"{', '.join(added[:SHOWN])}{more}", rule.level)


_JUDGES: Mapping[str, Callable[[Rule, Judged, Judged | None, Collection[str]], Iterable[Finding]]] = {
    "rows": _judge_rows,
    "nulls": _judge_nulls,
    "max": _judge_max,
    "new values": _judge_new_values,
}


def _index_of(judged: Judged) -> Index:
    assert judged.index is not None
    return judged.index


def _missing(rule: Rule, index: Index) -> Finding | None:
    """The finding about a missing column."""
    (column,), names = rule.columns, index.schema.names
    if column in names:
        return None
    near = get_close_matches(column, names, 1)
    meant = f"; did you mean {near[0]!r}?" if near else ""
    return Finding(rule.text, "", f"no column {column!r}{meant}", rule.level)


def _unknown(rule: Rule, place: str, what: str, unknown: int, total: int) -> Finding:
    reason = f"no reliable {what} in {unknown:,} of {format_count(total, 'row group')}"
    return Finding(rule.text, place, reason, rule.level_of_unknown)


def _row_groups(index: Index, directories: Collection[str]) -> dict[str, list[int]]:
    """The positions of the row groups in some directories."""
    found: dict[str, list[int]] = {}
    wanted = {number: parent(path) for number, path in enumerate(index.paths) if parent(path) in directories}
    for group, file in enumerate(index.numbers("file").tolist()):
        if file in wanted:
            found.setdefault(wanted[file], []).append(group)
    return found


def _nulls(index: Index, column: str) -> npt.NDArray[np.int64]:
    """The nulls of a column in each row group; -1 if unknown."""
    rows = index.rows
    if column in index.partitions.column_names:
        of_file = index.partitions[column].is_null().to_numpy()
        return np.where(of_file[index.numbers("file")], rows, 0)
    if f"{column}:bytes" not in index.recorded:
        return rows
    is_known = f"{column}:nulls" in index.statistics.column_names
    known = index.optional(f"{column}:nulls") if is_known else np.full(len(rows), -1)
    known = np.where(index.table[f"{column}:bytes"].is_valid().to_numpy(), known, rows)  # a file without the column
    return np.where(rows == 0, 0, known)


def _maximum(index: Index, column: str, groups: Sequence[int]) -> tuple[pa.Scalar | None, int]:
    """The largest value of a column in some row groups, None without one, and the number of row groups without
    statistics.
    """
    import pyarrow.compute as pc  # which few syncs need

    chosen, name = pa.array(groups, pa.int64()), f"{column}:max"
    if column in index.partitions.column_names:
        values = index.partitions[column].take(pa.array(index.numbers("file"))).take(chosen)
    elif name in index.statistics.column_names:
        values = index.statistics[name].take(chosen)
    else:
        values = pa.nulls(len(groups))
    has_values = (_nulls(index, column) != index.rows)[groups] if len(groups) else []
    unknown = sum(1 for known, has in zip(values.is_valid().to_pylist(), has_values, strict=True) if has and not known)
    found = pc.max(
        values.cast(pa.float32()) if values.type == pa.float16() else values
    )  # which pyarrow does not compare
    return (found if found.is_valid else None), unknown


def _text(value: Any) -> str:
    if isinstance(value, pa.Scalar):
        value = value.cast(pa.string()).as_py()  # Python's types do not hold nanoseconds
    return "null" if value is None else str(value)


def compared_values(
    columns: Collection[str], current: Path, held: Sequence[str], built: Path, new: Sequence[str], writes: bool
) -> tuple[dict[str, Values], dict[str, Values]]:
    """The values of columns up to the ``current`` snapshot, and in the ``new`` files of the one being built.

    If the current one's values were not recorded, they are read from its ``held`` files. The values of both are
    recorded.
    """
    recorded = _read(current)
    before = {name: recorded[name] for name in columns if name in recorded}
    before |= _values_in(current, held, [name for name in columns if name not in before]) if held else {}
    found = _values_in(built, new, columns)
    if writes:
        both = [(name, before[name], found[name]) for name in columns if name in before and name in found]
        seen = {name: None if one is None or other is None else sorted(one | other) for name, one, other in both}
        mode = stat.S_IMODE(os.stat(built / ROW_GROUPS).st_mode)  # which has values of the files, too
        write_durably(built / VALUES, json.dumps(seen).encode(), (built / VALUES).parent, mode)
    return {name: before.get(name) for name in columns}, {name: found.get(name) for name in columns}


def _read(snapshot: Path) -> dict[str, Values]:
    """The recorded values of a snapshot, by column; empty if the record is damaged, so that they are read again."""
    try:
        recorded = json.loads(read_regular(snapshot / VALUES))
        return {str(name): None if found is None else frozenset(map(str, found)) for name, found in recorded.items()}
    except (OSError, *MALFORMED):
        return {}


def _values_in(root: Path, paths: Iterable[str], columns: Collection[str]) -> dict[str, Values]:
    """Read the values of columns from some files of a snapshot, without nulls; empty if a file cannot be read."""
    found: dict[str, set[str] | None] = {name: set() for name in columns}
    try:
        for path in paths:
            with pq.ParquetFile(root / path) as file:
                wanted = [name for name in columns if found[name] is not None and name in file.schema_arrow.names]
                for batch in file.iter_batches(_ROWS, columns=wanted) if wanted else ():
                    for name in wanted:
                        found[name] = _with_values(found[name], batch.column(name))
    except (OSError, pa.ArrowException) as error:  # which verify will name
        log.debug("%s: values of columns are not known: %s", root, error)
        return {}
    return {name: None if some is None else frozenset(some) for name, some in found.items()}


def _with_values(found: set[str] | None, column: pa.Array) -> set[str] | None:
    import pyarrow.compute as pc  # which few syncs need

    if found is None or pa.types.is_nested(column.type):
        return None
    column = column.storage if isinstance(column, pa.ExtensionArray) else column
    try:
        found |= set(pc.unique(column.drop_null()).cast(pa.string()).to_pylist())
    except (pa.ArrowException, NotImplementedError):
        return None
    return found if len(found) <= _MOST else None
