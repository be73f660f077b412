"""Hundreds of nights of one cache, as they come: its rows, exit codes, history, status and snapshots always agree."""

from __future__ import annotations

import json
import random
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import pqcache
from pqcache import Cache
from pqcache.store.cache_directory import CacheDirectory
from pqcache.store.snapshot import Lease, Snapshot
from tests.faults.checks import check_clean
from tests.faults.nights import BASE, Judge, Lake, Rows, Verdict, verdict
from tests.faults.runner import Runner, RunResult

DAY = 86400.0
KEEP = 3


@dataclass(frozen=True)
class Age:
    """The time when a source was last listed for a snapshot, and when partitions that it lacks last were as listed."""

    listed: float | None = None
    old: dict[str, float] = field(default_factory=dict)


class Nights:
    """A cache of a table, a model of both, and what may be done with the cache in a night."""

    def __init__(self, root: Path, runner: Runner, seed: int, rewritten: bool) -> None:
        self.dice = random.Random(seed)
        self.lake = Lake(root / "lake", self.dice)
        self.cache, self._runner = root / "caches" / "shop", runner
        self.judge = Judge()
        self.clock = 0.0  # seconds that the machine's clock is ahead of the real one
        self.expected: Rows = {}
        self.runs: list[tuple[str, str, int | None]] = []  # command, result and exit code of each run
        self.pins: dict[str, str] = {}
        self.rows_of: dict[str, Rows] = {}  # of each snapshot
        self.readers: list[tuple[str, Lease]] = []
        self.dry_codes: set[int] = set()
        self.candidate: str | None = None
        self.released = 0
        self.waited = self.shrunk = 0  # partitions that were kept although they are whole, and that were taken
        self.age = Age()
        self.ages: dict[str, Age] = {}  # of each snapshot
        self.said: list[str] = []
        Lake(root / "other", random.Random(seed + 1))
        options = ["--keep", KEEP, "--skip-bad"]
        options += ["--row-group-size", "1MB"] if rewritten else []
        self._sync(self.lake.root, self.cache, *options)

    def night(self, number: int) -> None:
        """Let the source change, do one or two things with the cache, and check everything."""
        step = self.dice.choice([0, 0, 0, 0, 0, -3 * DAY, -3600, 2 * DAY])
        self.clock = self.lake.clock = number * DAY + self.dice.uniform(-200, 200) + step
        self.said = [f"night {number}", *self.lake.change()]
        happen = [self.sync, self.killed, self.other_source, self.locked, self.lost_rows, self.gone, self.dry_run,
                  self.pin, self.unpin, self.rollback, self.gc, self.open_reader, self.close_reader,
                  self.hold]  # fmt: skip
        first = [[self.pin, self.sync], [self.open_reader, self.killed], [self.sync, self.sync], [self.gc, self.sync],
                 [self.rollback, self.other_source], [self.locked, self.gone], [self.dry_run, self.lost_rows],
                 [self.unpin, self.killed], [self.close_reader, self.gc], [self.hold]]  # fmt: skip
        chosen = self.dice.choices(happen, [20, 4, 1, 1, 1, 1, 4, 3, 2, 3, 3, 2, 2, 3], k=2)
        for thing in first[number - 1] if number <= len(first) else chosen:
            self.said.append(thing.__name__)
            thing()
        self.check()

    def pqcache(self, *words: object, instrument: dict[str, Any] | None = None, later: float = 0) -> RunResult:
        ran = self._runner.run(self.cache, *words, instrument=instrument, clock=self.clock + later)
        assert "Traceback" not in ran.stderr + ran.stdout, ran.stderr
        self.said.append(f"{words} -> {ran.code}: {ran.stdout[-500:]} {ran.stderr}")
        return ran

    # what may be done

    def sync(self) -> None:
        self._sync(self.cache)

    def _sync(self, *words: object) -> None:
        """Sync; what is refused is a large deletion that is meant to be."""
        wanted = self._verdict()
        if wanted.refused:
            ran = self.pqcache("sync", *words)
            assert ran.code == 3, ran.stderr
            self.runs.append(("sync", "refused", 3))
            words, wanted = (*words, "--force"), self._verdict(force=True)
        ran = self.pqcache("sync", *words, "--json")
        assert ran.code == (5 if wanted.kept else 0), ran.stderr
        *_, summary = [line for line in map(json.loads, ran.stdout.splitlines()) if line["event"] == "summary"]
        assert sorted(item["partition"] for item in summary["skipped"]) == wanted.kept
        assert summary["rows"] == sum(map(len, wanted.rows.values()))
        assert summary["published"] or summary["candidate"] or wanted.rows == self.expected
        self.candidate = summary["candidate"]
        self.expected = wanted.rows
        self._listed(wanted.kept)
        self.waited += len(set(wanted.kept) - set(self.lake.bad()))
        self.shrunk += len(wanted.shrunk)
        self.runs.append(("sync", "done", None))

    def _listed(self, kept: list[str]) -> None:
        now = time.time() + self.clock
        listed = now if self.age.listed is None else self.age.listed
        self.age = Age(now, {name: self.age.old.get(name, listed) for name in kept})
        self._keep_age()

    def _keep_age(self) -> None:
        self.ages[(self.cache / "current").resolve().name] = self.age

    def killed(self) -> None:
        old, wanted = self.expected, self._verdict()
        before = self._records()
        ran = self.pqcache("sync", self.cache, instrument={"kind": "kill", "at": self.dice.randrange(150)})
        done = ("refused", 3) if wanted.refused else ("done", None)
        assert ran.code in (-9, 3 if wanted.refused else 5 if wanted.kept else 0), ran.stderr
        self.expected = self.judge.held(self.cache / "current")
        assert self.expected == old or (self.expected == wanted.rows and not wanted.refused)
        *_, last = after = self._records()
        assert len(after) - len(before) in (0, 1)
        if len(after) > len(before):  # it was killed before it began, or is known
            ended = (last["result"], last.get("exit_code"))
            assert ended in ([("interrupted", None), done] if ran.code == -9 else [done]), last
            self.runs.append(("sync", *ended))
            if last["result"] == "done":
                self._listed(wanted.kept)
        else:
            assert ran.code == -9
        self._keep_age()

    def other_source(self) -> None:
        ran = self.pqcache("sync", self.lake.root.parent / "other", self.cache)
        assert ran.code == 2
        assert "--new-source" in ran.stderr
        self.runs.append(("sync", "failed", 2))

    def locked(self) -> None:
        self.sync()  # what a killed run has left to record comes before what is refused
        with CacheDirectory(self.cache).lock():
            assert self.pqcache("sync", self.cache).code == 75
        self.runs.append(("sync", "refused", 75))

    def lost_rows(self) -> None:
        """Let a writer of the large partition die half way, force that in the evening, and write it again."""
        self.sync()
        self.lake.write_base(300)
        ran = self.pqcache("sync", self.cache)
        assert ran.code == 3, ran.stderr
        assert BASE in ran.stderr
        self.runs.append(("sync", "refused", 3))
        self.sync()
        assert len(self.expected[BASE]) == 300
        self.lake.write_base()

    def gone(self) -> None:
        away = self.lake.root.with_name("away")
        self.lake.root.rename(away)
        ran = self.pqcache("sync", self.cache)
        away.rename(self.lake.root)
        assert ran.code == 1, ran.stderr
        assert str(self.lake.root) in ran.stderr
        self.runs.append(("sync", "failed", 1))

    def dry_run(self) -> None:
        wanted, bad = self._verdict(), set(self.lake.bad())
        ran = self.pqcache("sync", self.cache, "--dry-run")
        code = 3 if wanted.refused else 5 if wanted.kept else 0
        assert ran.code == code or (ran.code == 0 and bad.issuperset(wanted.kept)), "only damage is found later"
        self.dry_codes.add(ran.code)
        self.sync()

    def pin(self) -> None:
        name = f"pin{len(self.pins)}-{self.dice.randrange(10**6)}"
        chosen = self.dice.choice(self._snapshots())["snapshot"]
        assert self.pqcache("pin", self.cache, chosen, "--name", name).code == 0
        self.pins[chosen] = name
        self.runs.append(("pin", "done", None))

    def unpin(self) -> None:
        if self.pins:
            chosen = self.dice.choice(sorted(self.pins))
            assert self.pqcache("unpin", self.cache, self.pins.pop(chosen)).code == 0
            self.runs.append(("unpin", "done", None))

    def rollback(self) -> None:
        self._check_snapshots()
        chosen = self.dice.choice(self._snapshots())
        ran = self.pqcache("rollback", self.cache, chosen["snapshot"])
        assert ran.code == 0, ran.stderr
        self.runs.append(("rollback", "done", None))
        self.expected, self.age = self.rows_of[chosen["snapshot"]], self.ages[chosen["snapshot"]]
        assert self.pqcache("rollback", self.cache, "nothing").code == 1
        self.runs.append(("rollback", "failed", 1))

    def hold(self) -> None:
        """Hold the cache while the source changes on, then publish what has come."""
        current, served, age = (self.cache / "current").resolve().name, self.expected, self.age
        assert self.pqcache("rollback", self.cache, "--hold").code == 0
        self.runs.append(("rollback", "done", None))
        for _ in range(self.dice.randrange(1, 4)):
            self._sync(self.cache)
            assert self.judge.held(self.cache / "current") == served
            if self.candidate is None:
                age = self.age  # what is served is as the source has it
            else:
                assert self.judge.held(self.cache / "candidate" / self.candidate) == self.expected
                self.ages[current] = age
                self._check_status(age)
            self.said += self.lake.change()
        assert self.pqcache("rollback", self.cache, "--release").code == 0
        self.runs.append(("rollback", "done", None))
        self._keep_age()
        self.released += self.candidate is not None

    def gc(self) -> None:
        keep = self.dice.randrange(1, KEEP + 1)
        assert self.pqcache("gc", self.cache, "--keep", keep).code == 0
        self.runs.append(("gc", "done", None))
        views = self._snapshots()
        held = {name for name, _ in self.readers} | set(self.pins)
        free = [view for view in views if view["snapshot"] not in held]
        assert len(free) <= keep, views

    def open_reader(self) -> None:
        chosen = self.dice.choice(self._snapshots())["snapshot"]
        self.readers.append((chosen, Cache.open(self.cache).snapshot(chosen).lease()))

    def close_reader(self) -> None:
        if self.readers:
            self.readers.pop(0)[1].close()

    def close_readers(self) -> None:
        while self.readers:
            self.close_reader()

    # what must be so

    def check(self) -> None:
        """Compare rows with the model, and what log, snapshots and status say with what was done."""
        assert self.judge.held(self.cache / "current") == self.expected
        self._check_snapshots()
        self._check_log(self._records()[-20:], self.runs[-20:])
        self._check_status()

    def _check_snapshots(self) -> None:
        views = self._snapshots()
        there = {view["snapshot"]: view for view in views}
        for name, view in there.items():
            rows = self.judge.held(self.cache / "snapshots" / name)
            assert self.rows_of.setdefault(name, rows) == rows, f"{name} has changed"
            assert view["rows"] == sum(len(found) for found in rows.values())
            assert view["name"] == self.pins.get(name)
            assert view["leases"] == sum(held == name for held, _ in self.readers)
        assert set(self.pins) | {held for held, _ in self.readers} <= set(there)
        numbers = [Snapshot(Path(name)).number for name in there]
        assert numbers == sorted(numbers)
        numbers = [Snapshot(Path(name)).number for name in self.rows_of]
        assert len(set(numbers)) == len(numbers), "each number has one snapshot, also after a rollback"
        (current,) = (view for view in views if view["current"])
        assert (self.cache / "current").resolve().name == current["snapshot"]

    def _check_log(self, records: list[dict[str, Any]], runs: list[tuple[str, str, int | None]]) -> None:
        for record, (command, result, code) in zip(records, runs, strict=True):
            assert (record["command"], record["result"]) == (command, result)
            assert record.get("exit_code") == code
            assert bool(record.get("error")) is (code is not None)

    def _check_status(self, age_of: Age | None = None) -> None:
        """``age_of`` is of the current snapshot, if that is not what was synced last."""
        known = age_of or self.age
        ran = self.pqcache("status", self.cache.parent, "--json", "--max-age", "30h", later=8 * 3600)
        found = json.loads(ran.stdout.splitlines()[0])
        assert known.listed is not None
        age = time.time() + self.clock + 8 * 3600 - min(known.old.values(), default=known.listed)
        assert ran.code == (1 if age > 30 * 3600 else 0), f"{age}: {ran.stderr}"
        assert abs(found["age"] - max(0.0, age)) < 120
        last = [run for run in self.runs if run[0] == "sync"][-1]
        assert found["last_result"] == last[1]
        assert bool(found["last_error"]) is (last[2] is not None)
        assert found["skipped"] == sorted(known.old)
        assert found["candidate"] == (self.candidate if age_of else None)
        rows = self.judge.held(self.cache / "current") if age_of else self.expected
        assert found["rows"] == sum(map(len, rows.values()))
        assert sorted(found["leased"]) == sorted({name for name, _ in self.readers})

    def _verdict(self, force: bool = False) -> Verdict:
        return verdict(self.lake, self.judge, self.expected, force)

    def _snapshots(self) -> list[dict[str, Any]]:
        return [view.to_dict() for view in pqcache.snapshots(self.cache)]

    def _records(self) -> list[dict[str, Any]]:
        return pqcache.log(self.cache)

    def finish(self) -> None:
        """Check the whole history, and that a last sync leaves nothing behind."""
        self.close_readers()
        self.sync()
        self.judge = Judge()  # reads all files again
        self.check()
        lines = self.pqcache("log", self.cache, "--json", "--last", 10**6).stdout.splitlines()
        self._check_log([json.loads(line) for line in lines], self.runs)
        lines = self.pqcache("snapshots", self.cache, "--json").stdout.splitlines()
        assert [json.loads(line) for line in lines] == self._snapshots()
        check_clean(self.cache)


@pytest.mark.parametrize(
    ("count", "rewritten"),
    [
        pytest.param(11, True, id="quick"),
        pytest.param(60, False, id="copied", marks=pytest.mark.deep),
        pytest.param(60, True, id="rewritten", marks=pytest.mark.deep),
    ],
)
def test_nights(count: int, rewritten: bool, runner: Runner, tmp_path: Path) -> None:
    nights = Nights(tmp_path, runner, seed=count, rewritten=rewritten)
    try:
        for number in range(1, count + 1):
            nights.night(number)
        nights.finish()
        assert nights.waited
        assert nights.shrunk
        assert nights.released
        assert {0, 5} <= nights.dry_codes or count < 50
    except AssertionError as error:
        raise AssertionError("\n".join([str(error), *nights.said])) from error
    finally:
        nights.close_readers()
