"""The chapters of ``pqcache demo``: a sync of a changed source during a training is the last but one.

Every command is shown with its output, and every claim is checked, with pyarrow, which knows nothing of pqcache: a
false one ends the demo with exit code 1. It needs no network, no torch, and nothing that pqcache does not require.
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
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from pqcache.console.demo import shop
from pqcache.console.demo.training import has_torch, train
from pqcache.errors import Interrupted, PqcacheError, UsageError
from pqcache.units import format_size

MARK = ".pqcache-demo"  # marks a directory that the demo may empty
LIMIT = "4MB"
SPAWN = multiprocessing.get_context("spawn")  # trainings are separate processes
Ids = npt.NDArray[np.int64]


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
        return self.root / "cache"

    @property
    def held(self) -> Path:
        """The files of the current snapshot."""
        return self.cache / "current"

    @property
    def snapshot(self) -> str:
        return Path(os.readlink(self.held)).name

    @property
    def snapshots(self) -> list[str]:
        return sorted(path.name for path in (self.cache / "snapshots").iterdir())

    def proves(self, claim: str, holds: bool) -> None:
        """Record a claim that holds; one that does not raises PqcacheError."""
        if not holds:
            raise untrue(claim)
        say(f"  -> {claim}")
        self.proved.append(claim)


@dataclass
class Pause:
    """How far a training is, which waits late in its epoch until a sync, slow on a busy machine, is ``over``."""

    begun: Event = field(default_factory=SPAWN.Event)
    over: Event = field(default_factory=SPAWN.Event)
    step: Synchronized[int] = field(default_factory=lambda: SPAWN.Value("i", 0))

    def after(self, step: int) -> None:
        self.step.value = step
        if step == 5:
            self.begun.set()
        if step == 45:
            self.over.wait(300)
        time.sleep(0.03)


def untrue(claim: str) -> PqcacheError:
    advice = "please report this bug, with the output above and that of 'pqcache --version -v'"
    return PqcacheError("the demo", f"not true on this machine: {claim}", advice)


def say(text: str) -> None:
    """Print without buffering, because child processes print too."""
    print(text, flush=True)


def chapter(title: str, text: str) -> None:
    say(f"\n\n{title}\n{'-' * len(title)}")
    say(textwrap.fill(text, 80))


def pqcache(*arguments: str | Path, to: Path | None = None) -> str:
    """Run a pqcache command, show it, and return what it printed; ``to`` shows a redirection instead."""
    words = [shown(word) for word in arguments]
    say(f"\n$ pqcache {shlex.join(words)}" + (f" > {shown(to)}" if to else ""))
    done = subprocess.run(
        [sys.executable, "-m", "pqcache", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding=sys.stdout.encoding,
        errors="replace",
        env={**os.environ, "NO_COLOR": "1", "FORCE_COLOR": ""},  # which a CI may set
        check=False,
    )
    if to is not None:
        to.write_text(done.stdout, "utf-8")
    if to is None or done.returncode:
        say(done.stdout.rstrip())
    if done.returncode:
        raise untrue(f"pqcache {words[0]} ends with exit code 0 (it was {done.returncode})")
    return str(done.stdout)


def shown(word: str | Path) -> str:
    """A path relative to the working directory if it is below it; text unchanged."""
    relative = word if isinstance(word, str) else os.path.relpath(word)
    return str(word) if relative.startswith("..") else relative


def run_demo(directory: Path) -> None:
    """Run the demo in a directory, which an earlier demo may have left; a false claim raises PqcacheError."""
    demo = Demo(directory.absolute())
    begun = time.monotonic()
    if not wipe(demo.root):
        raise UsageError(directory, "not empty, and not from an earlier demo", "name another directory")
    say("pqcache in one run: $ marks a command, -> a claim that was checked after it.")
    for part in (first_sync, repartition, training, night, morning):
        part(demo)
    chapter("What was checked", "Rows, ids and row-group sizes were read from the files with pyarrow:")
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
    chapter(
        "1. The source: offers of a shop",
        "Four daily partitions of Parquet with unsuitable row groups: one day is a single large row group, "
        "another is 60 small files. (Here the source is a directory; hdfs:// and s3:// work the same way.)",
    )
    shop.make_shop(demo.source)
    found = files(demo.source)
    say(f"\n(made: {shown(demo.source)}, 4 days, {len(found)} files, {format_size(size_of(demo.source, found))})")
    chapter("2. The first sync", "Copy the table as a snapshot of plain Parquet.")
    pqcache("sync", demo.source, demo.cache)
    rows = len(all_ids(demo.held))
    demo.proves(f"the cache holds all {rows:,} rows of the source", same_rows(demo.source, demo.held))


def repartition(demo: Demo) -> None:
    chapter("3. Inspect", f"Compare the row groups with a block size of {LIMIT}, which keeps this demo small:")
    before, sizes = inspection(demo, "before.json"), row_group_sizes(demo.held)
    files_and_groups = f"{before['files']} files for {before['row_groups']} row groups"
    demo.proves(
        f"inspect finds unsuitable row groups: {before['over_block']} row group over {LIMIT} "
        f"({format_size(before['row_group_bytes']['max'])}), {files_and_groups}",
        before["over_block"] == 1 and before["row_group_bytes"]["max"] == max(sizes) and before["files"] > 60,
    )
    chapter(
        "4. Repartition", f"Row groups that fill {LIMIT} and never exceed it; later syncs do the same with new days."
    )
    pqcache("repartition", demo.cache, "--row-group-size", LIMIT)
    after, sizes = inspection(demo, "after.json"), row_group_sizes(demo.held)
    demo.proves(
        f"no row group exceeds {LIMIT}: {after['row_groups']} in {after['files']} files, "
        f"the largest {max(sizes):,} bytes",
        after["over_block"] == 0 and after["row_groups"] == len(sizes) and max(sizes) <= 4 << 20,
    )
    claim = "values, the order of rows within a day, the schema and its metadata equal the source's"
    demo.proves(claim, same_rows(demo.source, demo.held))


def inspection(demo: Demo, name: str) -> dict[str, Any]:
    """Show an inspection, and return its JSON."""
    pqcache("inspect", demo.cache, "--block-size", LIMIT)
    text = pqcache("inspect", demo.cache, "--block-size", LIMIT, "--json", to=demo.root / name)
    found: dict[str, Any] = json.loads(text)
    return found


def training(demo: Demo) -> None:
    chapter(
        "5. Train",
        "A small torch model reads batches from the cache through a Loader with two workers."
        if has_torch()
        else "torch is not installed, so a linear model in numpy reads the batches of pqcache.Cache.batches.",
    )
    seen, expected = trained(demo, "train.npz", epochs=2), all_ids(demo.source)
    for number, ids in enumerate(seen["ids"], 1):
        demo.proves(f"epoch {number} returned each of the {len(expected):,} rows exactly once", same_ids(ids, expected))
    demo.proves("the second epoch has another order", not np.array_equal(*seen["ids"]))
    first, second = seen["losses"].mean(1)
    demo.proves(f"the mean loss decreased from {first:.3f} to {second:.3f}", second < 0.8 * first)


def night(demo: Demo) -> None:
    chapter(
        "6. A sync in the middle of an epoch",
        "While a training runs, one day is added at the source, an older one changes (prices, and late rows), "
        "and the nightly sync fetches both.",
    )
    old_ids, old = all_ids(demo.source), demo.snapshot
    pause = Pause()
    with training_process(demo, "through.npz", pause=pause):
        moved = change_source(demo)
        began_at, summary = pause.step.value, nightly_sync(demo, moved)
        ended_at, new, left = pause.step.value, demo.snapshot, demo.snapshots
    seen, undisturbed = np.load(demo.root / "through.npz"), np.load(demo.root / "train.npz")
    steps, ids = seen["losses"].shape[1], seen["ids"][0]
    demo.proves(
        f"the new snapshot was published between its steps {began_at} and {ended_at} of {steps}",
        old != new and summary["snapshot"] == new and 0 < began_at <= ended_at < steps,
    )
    demo.proves(
        f"it finished its epoch on the old snapshot {old}, with exactly those {len(old_ids):,} rows",
        str(seen["snapshot"]) == old and same_ids(ids, old_ids),
    )
    claim = "its rows have the same order as in the undisturbed training"
    demo.proves(claim, np.array_equal(ids, undisturbed["ids"][0]))
    demo.proves("the old snapshot was kept for it, despite --keep 1", left == [old, new])


def change_source(demo: Demo) -> set[str]:
    """Write a new day and a revised old one; return the names of both directories."""
    added, changed = shop.FIRST_DAY + timedelta(days=4), shop.FIRST_DAY
    shop.make_day(demo.source, added)
    shop.make_day(demo.source, changed, revision=1)
    say(f"\n(at the source dt={added} is added and dt={changed} changes)")
    return {f"dt={added}", f"dt={changed}"}


def nightly_sync(demo: Demo, moved: set[str]) -> dict[str, Any]:
    """Sync while the training runs, and check what was fetched; return the summary."""
    before = {inode_of(demo.held / path): path for path in files(demo.held)}
    lines = pqcache("sync", demo.cache, "--keep", "1", "--json").splitlines()
    *events, summary = [json.loads(line) for line in lines if line.startswith("{")]
    fetched = [event for event in events if event["event"] == "fetched"]
    linked = [path for path in files(demo.held) if before.get(inode_of(demo.held / path)) == path]
    total = size_of(demo.source, files(demo.source))
    amount = f"{format_size(summary['fetched_bytes'])} of {format_size(total)}"
    demo.proves(
        f"only {' and '.join(sorted(moved))} were fetched: {amount}",
        {event["path"].partition("/")[0] for event in fetched} == moved
        and sum(event["bytes"] for event in fetched) == summary["fetched_bytes"] < total / 2,
    )
    demo.proves(
        f"the {len(linked)} unchanged days are hard links to the same files",
        {path.partition("/")[0] for path in linked} == {path.name for path in demo.source.iterdir()} - moved,
    )
    demo.proves("the new snapshot has the same rows as the source", same_rows(demo.source, demo.held))
    found: dict[str, Any] = summary
    return found


def morning(demo: Demo) -> None:
    chapter("7. The next training", "A new training reads the new rows. No reader holds the old snapshot any more.")
    seen, expected = trained(demo, "morning.npz", epochs=1), all_ids(demo.source)
    demo.proves(
        f"a new process reads the {len(expected):,} rows of the new snapshot, each once",
        str(seen["snapshot"]) == demo.snapshot and same_ids(seen["ids"][0], expected),
    )
    pqcache("sync", demo.cache)
    claim = "a sync without changes fetches nothing, and the old snapshot is removed"
    demo.proves(claim, demo.snapshots == [str(seen["snapshot"])] == [demo.snapshot])


def trained(demo: Demo, report: str, epochs: int) -> Any:
    """Train in a process of its own, and return what it has seen."""
    with training_process(demo, report, epochs):
        pass
    return np.load(demo.root / report)


@contextmanager
def training_process(demo: Demo, report: str, epochs: int = 1, pause: Pause | None = None) -> Iterator[None]:
    """A training at work in a process of its own, from its fifth step on if it has a ``pause``; ended afterwards."""
    process = SPAWN.Process(target=train_here, args=(demo.cache, epochs, demo.root / report, pause))
    process.start()
    try:
        while pause is not None and not pause.begun.wait(0.2):
            if not process.is_alive():
                raise untrue("the training begins")
        yield
        if pause is not None:
            pause.over.set()
        process.join(300)
    except BaseException:
        process.terminate()
        raise
    if process.exitcode != 0:
        raise untrue("the training comes to its end")


def train_here(cache: Path, epochs: int, report: Path, pause: Pause | None) -> None:
    def after_step(step: int, text: str) -> None:
        if step == 1 or step % 25 == 0:
            say(f"    [training] {text}")
        if pause is not None:
            pause.after(step)

    try:
        train(cache, epochs, report, after_step)
    except KeyboardInterrupt:  # of the demo, which says so
        sys.exit(Interrupted.exit_code)


def files(root: Path) -> list[str]:
    """The Parquet files below a directory, in order."""
    return sorted(path.relative_to(root).as_posix() for path in root.rglob("*.parquet"))


def size_of(root: Path, paths: list[str]) -> int:
    return sum((root / path).stat().st_size for path in paths)


def inode_of(path: Path) -> int:
    return path.stat().st_ino


def row_group_sizes(root: Path) -> list[int]:
    """The compressed bytes of each row group below a directory, by its footers."""
    footers = [pq.read_metadata(root / path) for path in files(root)]
    groups = [footer.row_group(number) for footer in footers for number in range(footer.num_row_groups)]
    return [sum(g.column(c).total_compressed_size for c in range(g.num_columns)) for g in groups]


def all_ids(root: Path) -> Ids:
    ids: Ids = np.concatenate([pq.ParquetFile(root / path).read(["id"])["id"].to_numpy() for path in files(root)])
    return ids


def same_ids(seen: Ids, expected: Ids) -> bool:
    """Whether ``seen`` has each expected id once and no other."""
    return len(np.unique(seen)) == len(seen) and np.array_equal(np.sort(seen), np.sort(expected))


def same_rows(source: Path, copy: Path) -> bool:
    """Whether each day's rows are equal in every value, in order, with schema and metadata."""
    days = sorted({path.partition("/")[0] for path in files(source)})
    return days == sorted({path.partition("/")[0] for path in files(copy)}) and all(
        day_rows(source / day).equals(day_rows(copy / day), check_metadata=True) for day in days
    )


def day_rows(directory: Path) -> pa.Table:
    return pa.concat_tables(pq.ParquetFile(directory / path).read() for path in files(directory))
