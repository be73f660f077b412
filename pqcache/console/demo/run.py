"""The chapters of ``pqcache demo``: a sync of a changed source during a training is the last but one.

Every command is shown with its output, and every claim is checked: a false one ends the demo with exit code 1. It needs
no network, no torch, and nothing that pqcache does not require.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shlex
import shutil
import subprocess
import sys
import textwrap
import time
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import numpy as np

from pqcache.console.demo import shop
from pqcache.console.demo.checks import all_ids, files, held, row_group_sizes, same_ids, same_rows
from pqcache.console.demo.training import has_torch, save, train
from pqcache.errors import Interrupted, PqcacheError, UsageError

MARK = ".pqcache-demo"  # marks a directory that the demo may empty
LIMIT = "4MB"


def untrue(claim: str) -> PqcacheError:
    """Return the error of a claim that is false."""
    advice = "please report this bug, with the output above and that of 'pqcache --version -v'"
    return PqcacheError("the demo", f"not true on this machine: {claim}", advice)


@dataclass
class Demo:
    """The directory of the demo, and the claims that were checked."""

    root: Path
    proved: list[str] = field(default_factory=list)

    @property
    def source(self) -> Path:
        """The lake's table."""
        return self.root / "lake" / "offers"

    @property
    def cache(self) -> Path:
        """The local cache of it."""
        return self.root / "cache"

    def proves(self, claim: str, holds: bool) -> None:
        """Record a claim that holds; one that does not raises PqcacheError."""
        if not holds:
            raise untrue(claim)
        say(f"  -> {claim}")
        self.proved.append(claim)


def say(text: str) -> None:
    """Print without buffering, because child processes print too."""
    print(text, flush=True)


def chapter(title: str, text: str) -> None:
    """Print a heading and a description."""
    say(f"\n\n{title}\n{'-' * len(title)}")
    say(textwrap.fill(text, 80))


def pqcache(*arguments: str | Path, to: Path | None = None) -> str:
    """Run a pqcache command, show it, and return what it printed; ``to`` shows a redirection instead."""
    return _run("pqcache", ["-m", "pqcache"], arguments, to)


def training_run(*arguments: str | Path) -> str:
    """Run a training in a process of its own, in the same way."""
    return _run("python -m pqcache.console.demo.training", ["-m", "pqcache.console.demo.training"], arguments, None)


def _run(name: str, program: list[str], arguments: tuple[str | Path, ...], to: Path | None) -> str:
    words = [shown(word) for word in arguments]
    say(f"\n$ {name} {shlex.join(words)}" + (f" > {shown(to)}" if to else ""))
    # no colours, also where a CI sets FORCE_COLOR
    environment = {key: value for key, value in os.environ.items() if key != "FORCE_COLOR"}
    done = subprocess.run(
        [sys.executable, *program, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding=sys.stdout.encoding,
        errors="replace",
        env={**environment, "NO_COLOR": "1"},
        check=False,
    )
    if to is not None:
        to.write_text(done.stdout, "utf-8")
    else:
        say(done.stdout.rstrip())
    if done.returncode:
        say(done.stdout if to else "")
        raise untrue(f"{name} {words[0]} ends with exit code 0 (it was {done.returncode})")
    return str(done.stdout)


def shown(word: str | Path) -> str:
    """Return a path relative to the working directory if it is below it; return text unchanged."""
    if isinstance(word, str):
        return word
    relative = os.path.relpath(word)
    return str(word) if relative.startswith("..") else relative


def run_demo(directory: Path) -> None:
    """Run the demo in a directory, which an earlier demo may have left; a false claim raises PqcacheError."""
    demo = Demo(directory.absolute())
    begun = time.monotonic()
    if not wipe(demo.root):
        raise UsageError(directory, "not empty, and not from an earlier demo", "name another directory")
    say("pqcache in one run: $ marks a command, -> a claim that was checked after it.")
    for part in (first_sync, repartition, training, night):
        part(demo)
    chapter(
        "What was checked",
        "Rows, ids and row-group sizes were read from the files with pyarrow:",
    )
    for number, claim in enumerate(demo.proved, 1):
        say(f"{number:>3}. {claim}")
    say(f"\nDone in {time.monotonic() - begun:.0f} s. The files are in {shown(demo.root)}.")


def wipe(root: Path) -> bool:
    """Empty the demo's directory; return False for one with other files."""
    if root.exists() and not (root / MARK).exists() and (root.is_file() or any(root.iterdir())):
        return False
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    (root / MARK).touch()
    return True


def first_sync(demo: Demo) -> None:
    """Generate the source and sync it."""
    chapter(
        "1. The source: offers of a shop",
        "Four daily partitions of Parquet with unsuitable row groups: one day is a single large row group, "
        "another is 60 small files. (Here the source is a directory; hdfs:// and s3:// work the same way.)",
    )
    shop.make_shop(demo.source)
    size = sum((demo.source / path).stat().st_size for path in files(demo.source))
    say(f"\n(made: {shown(demo.source)}, 4 days, {len(files(demo.source))} files, {megabytes(size)})")
    chapter("2. The first sync", "Copy the table as a snapshot of plain Parquet.")
    pqcache("sync", demo.source, demo.cache)
    rows = held(demo.cache / "current")
    demo.proves(f"the cache holds all {rows:,} rows of the source", same_rows(demo.source, demo.cache / "current"))


def repartition(demo: Demo) -> None:
    """Inspect, repartition, inspect."""
    chapter("3. Inspect", f"Compare the row groups with a block size of {LIMIT}, which keeps this demo small:")
    pqcache("inspect", demo.cache, "--block-size", LIMIT)
    before, sizes = inspection(demo, "before.json"), row_group_sizes(demo.cache / "current")
    files_and_groups = f"{before['files']} files for {before['row_groups']} row groups"
    demo.proves(
        f"inspect finds unsuitable row groups: {before['over_block']} row group over {LIMIT} "
        f"({megabytes(before['row_group_bytes']['max'])}), {files_and_groups}",
        before["over_block"] == 1 and before["row_group_bytes"]["max"] == max(sizes) and before["files"] > 60,
    )
    chapter(
        "4. Repartition", f"Row groups that fill {LIMIT} and never exceed it; later syncs do the same with new days."
    )
    pqcache("repartition", demo.cache, "--row-group-size", LIMIT)
    pqcache("inspect", demo.cache, "--block-size", LIMIT)
    after, sizes = inspection(demo, "after.json"), row_group_sizes(demo.cache / "current")
    demo.proves(
        f"no row group exceeds {LIMIT}: {after['row_groups']} in {after['files']} files, "
        f"the largest {max(sizes):,} bytes",
        after["over_block"] == 0 and after["row_groups"] == len(sizes) and max(sizes) <= 4 << 20,
    )
    demo.proves(
        "values, the order of rows within a day, the schema and its metadata equal the source's",
        same_rows(demo.source, demo.cache / "current"),
    )


def training(demo: Demo) -> None:
    """Train a model for two epochs."""
    chapter(
        "5. Train",
        "A small torch model reads batches from the cache through a Loader with two workers."
        if has_torch()
        else "torch is not installed, so a linear model in numpy reads the batches of pqcache.Cache.batches.",
    )
    report = demo.root / "train.npz"
    training_run(demo.cache, "--epochs", "2", "--report", report)
    expected, seen = all_ids(demo.source), np.load(report)
    for number, ids in enumerate(seen["ids"], 1):
        demo.proves(
            f"epoch {number} returned each of the {len(expected):,} rows exactly once",
            same_ids(ids, expected),
        )
    demo.proves("the second epoch has another order", not np.array_equal(*seen["ids"]))
    first, second = seen["losses"].mean(1)
    demo.proves(f"the mean loss decreased from {first:.3f} to {second:.3f}", second < 0.8 * first)


def night(demo: Demo) -> None:
    """Sync during a training."""
    chapter(
        "6. A sync in the middle of an epoch",
        "While a training runs, one day is added at the source, an older one changes (prices, and late rows), "
        "and the nightly sync fetches both.",
    )
    old_ids, old = all_ids(demo.source), current(demo)
    report = demo.root / "through.npz"
    context = multiprocessing.get_context("spawn")  # a separate process, as a training is
    begun, landed, step = context.Event(), context.Event(), context.Value("i", 0)
    process = context.Process(target=train_through, args=(demo.cache, report, begun, landed, step))
    process.start()
    try:
        while not begun.wait(0.2):
            if not process.is_alive():
                raise untrue("the training begins")
        moved = change_source(demo)
        began_at, summary = step.value, nightly_sync(demo, moved)
        ended_at, new = step.value, current(demo)
        left = sorted(path.name for path in (demo.cache / "snapshots").iterdir())
    finally:
        landed.set()
        process.join(300)
    if process.exitcode:
        raise untrue("the training comes to its end")
    seen, undisturbed = np.load(report), np.load(demo.root / "train.npz")
    demo.proves(
        f"the new snapshot was published between its steps {began_at} and {ended_at} of {seen['losses'].shape[1]}",
        old != new and summary["snapshot"] == new and 0 < began_at <= ended_at < seen["losses"].shape[1],
    )
    demo.proves(
        f"it finished its epoch on the old snapshot {old}, with exactly those {len(old_ids):,} rows",
        str(seen["snapshot"]) == old and same_ids(seen["ids"][0], old_ids),
    )
    demo.proves(
        "its rows have the same order as in the undisturbed training",
        np.array_equal(seen["ids"][0], undisturbed["ids"][0]),
    )
    demo.proves("the old snapshot was kept for it, despite --keep 1", left == [old, new])
    morning(demo, new)


def change_source(demo: Demo) -> set[str]:
    """Write a new day and a revised old one; return the names of both directories."""
    added, changed = shop.FIRST_DAY + timedelta(days=4), shop.FIRST_DAY
    shop.make_day(demo.source, added)
    shop.make_day(demo.source, changed, revision=1)
    say(f"\n(at the source dt={added} is added and dt={changed} changes)")
    return {f"dt={added}", f"dt={changed}"}


def nightly_sync(demo: Demo, moved: set[str]) -> dict[str, Any]:
    """Sync while the training runs, and check what was fetched; return the summary."""
    inodes = {path: (demo.cache / "current" / path).stat().st_ino for path in files(demo.cache / "current")}
    lines = pqcache("sync", demo.cache, "--keep", "1", "--json").splitlines()
    events = [json.loads(line) for line in lines if line.startswith("{")]
    fetched = [event for event in events if event["event"] == "fetched"]
    summary: dict[str, Any] = events[-1]
    linked = [path for path, inode in inodes.items() if same_file(demo.cache / "current" / path, inode)]
    total = sum((demo.source / path).stat().st_size for path in files(demo.source))
    amount = f"{megabytes(summary['fetched_bytes'])} of {megabytes(total)}"
    demo.proves(
        f"only {' and '.join(sorted(moved))} were fetched: {amount}",
        {event["path"].partition("/")[0] for event in fetched} == moved
        and sum(event["bytes"] for event in fetched) == summary["fetched_bytes"] < total / 2,
    )
    demo.proves(
        f"the {len(linked)} unchanged days are hard links to the same files",
        {path.partition("/")[0] for path in linked} == {path.name for path in demo.source.iterdir()} - moved,
    )
    demo.proves("the new snapshot has the same rows as the source", same_rows(demo.source, demo.cache / "current"))
    return summary


def same_file(path: Path, inode: int) -> bool:
    """Return whether the file at ``path`` is there and is that inode."""
    return path.exists() and path.stat().st_ino == inode


def train_through(cache: Path, report: Path, begun: Event, landed: Event, at: Synchronized[int]) -> None:
    """Train one epoch, slowly enough for a sync in the middle of it."""

    def after_step(step: int) -> None:
        at.value = step
        if step == 5:
            begun.set()
        if step == 45:
            landed.wait(300)  # on a busy machine the sync may need longer than the epoch
        time.sleep(0.03)

    try:
        done = train(cache, 1, log=lambda line: say(f"    [training] {line}"), after_step=after_step)
        save(list(done), report)
    except KeyboardInterrupt:  # of the demo, which says so
        sys.exit(Interrupted.exit_code)


def morning(demo: Demo, new: str) -> None:
    """Train on the new snapshot; a sync removes the old one."""
    chapter("7. The next training", "A new training reads the new rows. No reader holds the old snapshot any more.")
    report = demo.root / "morning.npz"
    training_run(demo.cache, "--epochs", "1", "--report", report)
    expected, seen = all_ids(demo.source), np.load(report)
    demo.proves(
        f"a new process reads the {len(expected):,} rows of the new snapshot, each once",
        str(seen["snapshot"]) == new and same_ids(seen["ids"][0], expected),
    )
    pqcache("sync", demo.cache)
    left = [path.name for path in (demo.cache / "snapshots").iterdir()]
    demo.proves(
        "a sync without changes fetches nothing, and the old snapshot is removed", left == [new] == [current(demo)]
    )


def inspection(demo: Demo, name: str) -> dict[str, Any]:
    """Return the JSON of inspect."""
    text = pqcache("inspect", demo.cache, "--block-size", LIMIT, "--json", to=demo.root / name)
    found: dict[str, Any] = json.loads(text)
    return found


def current(demo: Demo) -> str:
    """Return the name of the current snapshot."""
    return Path(os.readlink(demo.cache / "current")).name


def megabytes(size: float) -> str:
    """Return a size for people."""
    return f"{size / (1 << 20):.1f} MB"
