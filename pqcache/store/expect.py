"""What a cache expects of new data: the rules below ``[expect]`` in ``pqcache.toml``, and a judge of them.

`parse_rules` reads them, without pyarrow. `judge` is pure: it compares the index and the files of a snapshot that is
not published yet with those of the current one, and reads no data. docs/contracts.md describes the rules.
"""

from __future__ import annotations

import operator
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from pqcache.errors import UsageError
from pqcache.store.hive import parent, partition_values
from pqcache.store.layout import FILES
from pqcache.store.manifest import FileEntry
from pqcache.units import format_count, format_seconds, parse_duration

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import pyarrow as pa

    from pqcache.store.row_group_index import Index
    from pqcache.store.snapshot import Snapshot

FAILED, WARNED, PASSED = "failed", "warned", "passed"  # levels of findings

_LATER = "judged when the files are here"
_FEWEST = 3  # partitions before one that it can be compared with
_SHOWN = 3  # findings, or values, that a line names
_NUMBER = r"(?P<limit>\d+(?:\.\d+)?)"
_FORMS = {  # of each kind of rule: an example, and how it is written
    "rows": (
        "rows per COLUMN within 30% of the last 7",
        rf"rows per (?P<columns>.+?) within {_NUMBER} ?% of the last (?P<last>\d+)",
    ),
    "nulls": ("nulls.COLUMN < 1%", rf"nulls\.(?P<columns>.*?[^ <>=!]) ?(?P<sign><=|<|=) ?{_NUMBER} ?(?P<share>%?)"),
    "max": ("max(COLUMN) rises", r"max\( ?(?P<columns>.+?) ?\) rises"),
    "new values": ("new values of COLUMN", r"new values of (?P<columns>.+)"),
    "freshness": ("freshness 30h", r"freshness (?P<duration>.+)"),
    "unknown": ("unknown: warn", r"unknown"),
}


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A rule of ``[expect]``: ``text`` as it is written, without ``: warn``, and what it says.

    Attributes:
        kind: a key of _FORMS.
        columns: those that it is about; several of rows per year, month.
        limit: a number, a percentage or, of freshness, seconds.
        sign: how nulls compare with the limit.
        is_share: of nulls, whether the limit is a percentage.
        last: the number of earlier partitions that rows are compared with.
        level: of its findings.
        level_of_unknown: of findings that say that the index does not know.
    """

    text: str
    kind: str
    columns: tuple[str, ...] = ()
    limit: float = 0.0
    sign: str = ""
    is_share: bool = False
    last: int = 0
    level: str = FAILED
    level_of_unknown: str = FAILED


@dataclass(frozen=True)
class Finding:
    """What a rule found at a place, a partition or "" for all of the table; ``level`` says what follows."""

    rule: str
    place: str
    reason: str
    level: str


def parse_rules(texts: Iterable[str]) -> tuple[Rule, ...]:
    """Parse rules as people write them.

    >>> [(rule.kind, rule.columns, rule.limit, rule.level) for rule in parse_rules(["nulls.price < 1%: warn"])]
    [('nulls', ('price',), 1.0, 'warned')]

    Raises UsageError for what is no rule; it names the nearest form.
    """
    rules = [_parse(" ".join(text.split())) for text in texts]
    allows_unknown = any(rule.kind == "unknown" for rule in rules)
    found = (replace(rule, level_of_unknown=WARNED if allows_unknown else rule.level) for rule in rules)
    return tuple(rule for rule in found if rule.kind != "unknown")


def _parse(text: str) -> Rule:
    before, _, ending = text.rpartition(":")
    rule, level = (before.strip(), WARNED) if ending.strip() == "warn" else (text, FAILED)
    for kind, (_, pattern) in _FORMS.items():
        match = re.fullmatch(pattern, rule)
        if match is None or (kind == "unknown" and level != WARNED):
            continue
        found = match.groupdict()
        columns = (found.get("columns") or "").split(",") if kind == "rows" else [found.get("columns") or ""]
        last = int(found.get("last") or 0)
        if kind == "rows" and last < _FEWEST:
            reason = f"fewer than {_FEWEST} partitions are not enough to compare with"
            raise UsageError(f"rule {text!r}", reason, "write 'of the last 7'")
        return Rule(
            text=rule,
            kind=kind,
            columns=tuple(filter(None, map(str.strip, columns))),
            limit=_duration(text, found["duration"]) if kind == "freshness" else float(found.get("limit") or 0),
            sign=found.get("sign") or "",
            is_share=bool(found.get("share")),
            last=last,
            level=level,
        )
    raise UsageError(f"rule {text!r}", "not a rule", f"did you mean {_nearest(text)!r}?")


def _duration(text: str, duration: str) -> float:
    try:
        return parse_duration(duration)
    except UsageError as error:
        raise UsageError(f"rule {text!r}", f"{error.subject} is {error.reason}", error.advice) from error


def _nearest(text: str) -> str:
    """The form that a text is meant to have, by its first word, else by all of it."""
    from difflib import get_close_matches  # correct rules do not need it

    examples = [example for example, _ in _FORMS.values()]
    first = {re.split(r"[ .(:]", example)[0]: example for example in examples}
    word = get_close_matches(re.split(r"[ .(:]", text.lower())[0], first, 1)
    return first[word[0]] if word else get_close_matches(text, examples, 1, 0.0)[0]


def check_columns(rules: Sequence[Rule], directories: Iterable[str], source: str) -> None:
    """Raise UsageError for rules about partition columns that the ``directories`` of a source do not have."""
    if not rules:
        return
    there = list(dict.fromkeys(name for directory in set(directories) for name in partition_values(directory)))
    for rule in rules:
        if rule.kind == "rows" and (missing := [name for name in rule.columns if name not in there]):
            known = f"write one of {', '.join(there)}" if there else "it has none"
            raise UsageError(f"rule {rule.text!r}", f"{missing[0]!r} is not a partition column of {source}", known)


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A snapshot that is judged, or the current one.

    Attributes:
        index: None if it is damaged, or not made yet.
        files: none if its manifest is damaged.
        number: of the current snapshot.
        newest: when the newest source file was written, in seconds since 1970; None if that is not known.
        values: of columns in the files, in its partitions that are judged, or in all of the current snapshot; None of a
            column: too many, or of a type without text.
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
    """Judge the partitions of a ``new`` snapshot that the ``current`` one does not have, or has otherwise.

    Without a current snapshot these are all. ``now`` is in seconds since 1970. What is met has no finding, unless it
    could not be compared.
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
    """Partitions that have other rows than in the ``current`` snapshot, or rows of source files that it lacks."""
    before = _rows_of(() if current is None else current.files)
    changed = {directory for directory, rows in _rows_of(files).items() if before.get(directory) != rows}
    since = 0 if current is None else current.number
    return frozenset(changed | {parent(entry.path) for entry in files if entry.since > since})


def _rows_of(files: Iterable[FileEntry]) -> Counter[str]:
    rows = Counter[str]()
    for entry in files:
        rows[parent(entry.path)] += entry.rows
    return rows


def stale(rules: Iterable[Rule], snapshot: Snapshot, now: float) -> tuple[Finding, ...]:
    """What rules of freshness find in a published snapshot; raises CacheError if its manifest cannot be read."""
    rules = [rule for rule in rules if rule.kind == "freshness"]
    if not rules:
        return ()
    from pqcache.store.manifest_file import newest_time  # and pyarrow, which a sync with nothing to do does not need

    newest = newest_time(snapshot.path / FILES)
    return tuple(finding for rule in rules for finding in judge_freshness(rule, newest, now))


def judge_freshness(rule: Rule, newest: float | None, now: float) -> list[Finding]:
    if newest is None:
        return [Finding(rule.text, "", "the source does not say when its files were written", rule.level_of_unknown)]
    if now - newest <= rule.limit:
        return []
    over = format_seconds(now - newest - rule.limit)
    return [
        Finding(rule.text, "", f"the newest file is {format_seconds(now - newest)} old, {over} too old", rule.level)
    ]


def _judge_rows(rule: Rule, new: Judged, current: Judged | None, changed: Collection[str]) -> Iterable[Finding]:
    import statistics

    index = _index_of(new)
    columns = [index.partitions[name].to_pylist() for name in rule.columns if name in index.partitions.column_names]
    if len(columns) < len(rule.columns):
        yield Finding(rule.text, "", "there is no such partition column", rule.level)
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
        if len(before) < _FEWEST:
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
    import pyarrow as pa
    import pyarrow.compute as pc

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
        reason = "more values than are recorded, or values without a text"
        yield Finding(rule.text, "", reason, rule.level_of_unknown)
        return
    if added := [_text(value) for value in found if value not in before]:
        added = added if is_in_paths else sorted(added)
        more = f" and {len(added) - _SHOWN:,} more" if len(added) > _SHOWN else ""
        yield Finding(rule.text, "", f"{', '.join(added[:_SHOWN])}{more}", rule.level)


_JUDGES: Mapping[str, Callable[[Rule, Judged, Judged | None, Collection[str]], Iterable[Finding]]] = {
    "rows": _judge_rows,
    "nulls": _judge_nulls,
    "max": _judge_max,
    "new values": _judge_new_values,
}
_BY_INDEX = ("rows", "nulls", "max")  # kinds that need more than the paths of files
_WITH_CURRENT = ("max", "new values")  # kinds that compare with the current snapshot


def _index_of(judged: Judged) -> Index:
    assert judged.index is not None
    return judged.index


def _missing(rule: Rule, index: Index) -> Finding | None:
    """The finding about a column that is not there."""
    from difflib import get_close_matches

    (column,), names = rule.columns, index.schema.names
    if column in names:
        return None
    near = get_close_matches(column, names, 1)
    meant = f"; did you mean {near[0]!r}?" if near else ""
    return Finding(rule.text, "", f"there is no column {column!r}{meant}", rule.level)


def _unknown(rule: Rule, place: str, what: str, unknown: int, total: int) -> Finding:
    reason = f"no sound {what} in {unknown:,} of {format_count(total, 'row group')}"
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
    """The nulls of a column in each row group; -1 if they are not known."""
    import numpy as np

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
    """The largest value of a column in some row groups, None without one, and how many of these do not tell theirs."""
    import pyarrow as pa
    import pyarrow.compute as pc

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
    import pyarrow as pa

    if isinstance(value, pa.Scalar):
        value = value.cast(pa.string()).as_py()  # Python's types do not hold nanoseconds
    return "null" if value is None else str(value)


def lines_of(findings: Iterable[Finding]) -> list[str]:
    """A line for each rule and level, which names the first places."""
    found: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        found.setdefault((finding.rule, finding.level), []).append(finding)
    lines = []
    for (rule, _), some in found.items():
        places = ", ".join(": ".join(filter(None, (item.place, item.reason))) for item in some[:_SHOWN])
        lines.append(f"{rule}: {places}{f', and {len(some) - _SHOWN:,} more' if len(some) > _SHOWN else ''}")
    return lines


def unmet(findings: Iterable[Finding]) -> list[str]:
    """A line for each rule that is not met and does not only warn."""
    return lines_of(finding for finding in findings if finding.level == FAILED)
