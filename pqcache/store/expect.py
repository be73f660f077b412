"""What a cache expects of new data: the rules below ``[expect]`` in ``pqcache.toml``.

docs/contracts.md describes them. Only freshness is judged here; `pqcache.store.sync.judge` judges the rest, which needs
pyarrow.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pqcache.errors import UsageError
from pqcache.store.layout import FILES
from pqcache.store.partition_paths import partition_values
from pqcache.units import format_seconds, parse_duration

if TYPE_CHECKING:
    from pqcache.store.snapshot import Snapshot

FAILED, WARNED, PASSED = "failed", "warned", "passed"  # levels of findings

FEWEST = 3  # earlier partitions needed for a comparison
SHOWN = 3  # findings, or values, that a line names
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
    """A rule of ``[expect]``: its ``text`` without ``: warn``, and its parts.

    Attributes:
        kind: a key of _FORMS.
        columns: its columns; several for rows per year, month.
        limit: a number, a percentage or, for freshness, seconds.
        sign: how the nulls are compared with the limit.
        is_share: for nulls, whether the limit is a percentage.
        last: the number of earlier partitions to compare rows with.
        level: the level of its findings.
        level_of_unknown: the level of findings about values missing from the index.
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
    """A rule's result for a partition, or for the whole table (""). ``level`` decides about the snapshot."""

    rule: str
    place: str
    reason: str
    level: str


def parse_rules(texts: Iterable[str]) -> tuple[Rule, ...]:
    """Parse rules as people write them.

    >>> [(rule.kind, rule.columns, rule.limit, rule.level) for rule in parse_rules(["nulls.price < 1%: warn"])]
    [('nulls', ('price',), 1.0, 'warned')]

    Raises UsageError for anything else, with the nearest form.
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
        if kind == "rows" and last < FEWEST:
            reason = f"fewer than {FEWEST} partitions are not enough to compare with"
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
    """The form that was probably meant, by the first word, else by the whole text."""
    from difflib import get_close_matches  # correct rules do not need it

    examples = [example for example, _ in _FORMS.values()]
    first = {re.split(r"[ .(:]", example)[0]: example for example in examples}
    word = get_close_matches(re.split(r"[ .(:]", text.lower())[0], first, 1)
    return first[word[0]] if word else get_close_matches(text, examples, 1, 0.0)[0]


def check_columns(rules: Sequence[Rule], directories: Iterable[str], source: str) -> None:
    """Raise UsageError for rules about partition columns missing from the ``directories`` of a source."""
    if not rules:
        return
    there = list(dict.fromkeys(name for directory in set(directories) for name in partition_values(directory)))
    for rule in rules:
        if rule.kind == "rows" and (missing := [name for name in rule.columns if name not in there]):
            known = f"write one of {', '.join(there)}" if there else "it has none"
            raise UsageError(f"rule {rule.text!r}", f"{missing[0]!r} is not a partition column of {source}", known)


def stale(rules: Iterable[Rule], snapshot: Snapshot, now: float) -> tuple[Finding, ...]:
    """Findings of freshness rules in a published snapshot; raises CacheError if its manifest cannot be read."""
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


def lines_of(findings: Iterable[Finding]) -> list[str]:
    """A line for each rule and level, naming the first partitions."""
    found: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        found.setdefault((finding.rule, finding.level), []).append(finding)
    lines = []
    for (rule, _), some in found.items():
        places = ", ".join(": ".join(filter(None, (item.place, item.reason))) for item in some[:SHOWN])
        lines.append(f"{rule}: {places}{f', and {len(some) - SHOWN:,} more' if len(some) > SHOWN else ''}")
    return lines


def unmet(findings: Iterable[Finding]) -> list[str]:
    """A line for each unmet rule that does more than warn."""
    return lines_of(finding for finding in findings if finding.level == FAILED)
