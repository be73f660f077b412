"""``pqcache demo``: sync, inspect, repartition and train on a generated dataset whose source changes during a training.

Every command is shown with its output, and every claim is checked with pyarrow, which knows nothing of pqcache: a false
one ends the demo with exit code 1. It needs no network, no torch, and nothing that pqcache does not require.

The dataset is a shop's, as a lake holds it: a directory ``dt=YYYY-MM-DD`` of about 9 MB for each day. The second day is
one file with a single large row group, the third is 60 small files, the others are ordinary. The same seed gives the
same files, byte for byte.
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
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date, timedelta
from functools import cache
from importlib.util import find_spec
from multiprocessing.process import BaseProcess
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from pqcache import Cache
from pqcache.errors import Interrupted, PqcacheError, UsageError
from pqcache.units import format_size

MARK = ".pqcache-demo"  # marks a directory that the demo may empty
LIMIT = "4MB"
CLOSED = 141  # the exit code of a training whose output nobody reads
SPAWN = multiprocessing.get_context("spawn")  # trainings are separate processes
Ids = npt.NDArray[np.int64]
RATE = 2.0
FIRST_DAY = date(2026, 11, 16)
ROWS = 1_800  # per day
VOCABULARY = 8_192
SIDE = 40  # pixels
SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False, metadata={"comment": "one per offer, for ever"}),
        pa.field("title", pa.string()),
        pa.field("tokens", pa.list_(pa.int32()), metadata={"comment": "the words of the description, hashed"}),
        pa.field("category", pa.string()),
        pa.field("price", pa.float64(), metadata={"comment": "EUR"}),
        pa.field("image", pa.binary(), metadata={"comment": f"{SIDE} x {SIDE} pixels, RGB"}),
    ],
    metadata={"owner": "catalogue team", "contract": "offers-v3"},
)
CATALOGUE = {  # by category: words of its descriptions, and a usual price
    "backpack": ("backpack rucksack canvas nylon litres strap pocket hiking laptop", 75.0),
    "chair": ("chair stool armchair oak beech seat legs dining backrest", 120.0),
    "jacket": ("jacket parka blazer wool denim sleeve hood zip lining", 110.0),
    "lamp": ("lamp lantern spotlight brass linen shade watt dimmable bulb", 55.0),
    "mug": ("mug cup tumbler stoneware porcelain dishwasher coffee tea handle", 14.0),
    "watch": ("watch chronograph titanium leather strap dial quartz waterproof sapphire", 210.0),
}
CATEGORIES = tuple(CATALOGUE)
COMMON = (
    "Nordvik Halden Orima Castell Mirado slim classic light large compact everyday vintage black white sand navy olive "
    "the of with for new this very made quality design home gift set free best warranty delivery limited edition easy "
    "care detail tested durable season work travel weekend outdoor indoor family"
)


@dataclass
class Demo:
    """The directory of the demo, and the claims that were checked."""

    root: Path
    proved: list[str] = field(default_factory=list)

    @property
    def source(self) -> Path:
        return self.root / "lake" / "offers"

    @property
    def cache(self) -> Path:
        return self.root / "cache"

    @property
    def held(self) -> Path:
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
    """The progress of a training, which waits late in its epoch until the sync, slow on a busy machine, is ``over``."""

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
    """Print text in the terminal's width; without buffering, because child processes print too."""
    width = shutil.get_terminal_size().columns
    for line in text.split("\n"):
        print("\n".join(wrapped(line, width)), flush=True)


def wrapped(line: str, width: int) -> list[str]:
    """Break a line at spaces, and indent what follows its first part."""
    if len(line) <= width:  # as it is, with its spaces
        return [line]
    return textwrap.wrap(line, width, subsequent_indent="     ", break_long_words=False, break_on_hyphens=False)


def chapter(title: str, text: str) -> None:
    say(f"\n\n{title}\n{'-' * len(title)}")
    say(textwrap.fill(text, min(80, shutil.get_terminal_size().columns)))


def pqcache(*arguments: str | Path, to: Path | None = None) -> str:
    """Run a pqcache command, show it, and return what it printed; ``to`` shows a redirection instead."""
    words = [shown(word) for word in arguments]
    width = shutil.get_terminal_size().columns
    command = f"$ pqcache {shlex.join(words)}" + (f" > {shown(to)}" if to else "")
    say("\n" + " \\\n".join(wrapped(command, width - 2)))
    done = subprocess.run(
        [sys.executable, "-m", "pqcache", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding=sys.stdout.encoding,
        errors="replace",
        env={**os.environ, "COLUMNS": str(width), "NO_COLOR": "1", "FORCE_COLOR": ""},  # which a CI may set
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
    try:
        say("pqcache in one run: $ marks a command, -> a claim that was checked after it.")
        for part in (first_sync, repartition, training, night, morning):
            part(demo)
    except KeyboardInterrupt:
        raise Interrupted("", "interrupted", "run the command again, which begins anew") from None
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
    make_shop(demo.source)
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
    when = f"at its step {ended_at}" if began_at == ended_at else f"between its steps {began_at} and {ended_at}"
    demo.proves(
        f"the new snapshot was published {when} of {steps}",
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
    added, changed = FIRST_DAY + timedelta(days=4), FIRST_DAY
    make_day(demo.source, added)
    make_day(demo.source, changed, revision=1)
    say(f"\n(at the source dt={added} is added and dt={changed} changes)")
    return {f"dt={added}", f"dt={changed}"}


def nightly_sync(demo: Demo, moved: set[str]) -> dict[str, Any]:
    """Sync while the training runs, and check what was fetched; return the summary."""
    before = {inode_of(demo.held / path): path for path in files(demo.held)}
    lines = pqcache("sync", demo.cache, "--keep", "1", "--json", to=demo.root / "night.json").splitlines()
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
    with training_process(demo, report, epochs):
        pass
    return np.load(demo.root / report)


@contextmanager
def training_process(demo: Demo, report: str, epochs: int = 1, pause: Pause | None = None) -> Iterator[None]:
    """Run a training in its own process while entered; with a ``pause``, wait for its fifth step first."""
    process = SPAWN.Process(target=train_here, args=(demo.cache, epochs, demo.root / report, pause))
    process.start()
    try:
        while pause is not None and not pause.begun.wait(0.2):
            if not process.is_alive():
                raise early_end(process, "the training begins")
        yield
        if pause is not None:
            pause.over.set()
        process.join(300)
    except BaseException:
        process.terminate()
        raise
    if process.exitcode != 0:
        raise early_end(process, "the training comes to its end")


def early_end(process: BaseProcess, claim: str) -> Exception:
    return BrokenPipeError() if process.exitcode == CLOSED else untrue(claim)


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
    except BrokenPipeError:
        os._exit(CLOSED)  # without flushing, which fails again


def files(root: Path) -> list[str]:
    return sorted(path.relative_to(root).as_posix() for path in root.rglob("*.parquet"))


def size_of(root: Path, paths: list[str]) -> int:
    return sum((root / path).stat().st_size for path in paths)


def inode_of(path: Path) -> int:
    return path.stat().st_ino


def row_group_sizes(root: Path) -> list[int]:
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


def has_torch() -> bool:
    return find_spec("torch") is not None


def train(cache: Path, epochs: int, report: Path, after_step: Callable[[int, str], None]) -> None:
    """Train on the snapshot that is current now, even if another is published meanwhile.

    Calls ``after_step`` with each step's number in its epoch and a line about it. Writes the snapshot, and each epoch's
    losses and ids, to the file ``report``.
    """
    if has_torch():
        from pqcache.torch.demo import begin
    else:
        begin = begin_with_numpy
    snapshot, batches_of, learn = begin(cache)
    losses: list[list[float]] = [[] for _ in range(epochs)]
    ids: list[list[int]] = [[] for _ in range(epochs)]
    for epoch in range(epochs):
        for step, batch in enumerate(batches_of(epoch), 1):
            ids[epoch] += np.asarray(batch["id"]).tolist()
            losses[epoch].append(learn(batch))
            after_step(step, f"epoch {epoch + 1}, step {step:>3}: loss {losses[epoch][-1]:.3f}")
    np.savez(report, snapshot=snapshot, losses=np.array(losses), ids=np.array(ids))


def begin_with_numpy(cache: Path) -> tuple[str, Callable[[int], Iterable[Any]], Callable[[Any], float]]:
    """The snapshot, the batches of an epoch, and a step of a linear classifier of the words."""
    opened = Cache.open(cache)
    snapshot = opened.snapshot().id
    weights = np.zeros((VOCABULARY, len(CATEGORIES)))

    def batches_of(epoch: int) -> Iterable[pa.RecordBatch]:
        columns = ["id", "tokens", "category"]
        return opened.batches(columns, batch_size=128, seed=0, epoch=epoch, snapshot=snapshot)

    def learn(batch: pa.RecordBatch) -> float:
        """Update the weights of each word by the gradient of a batch, and return the loss before the update."""
        tokens = batch["tokens"]  # lists of different lengths: their values, and where each begins
        words, begins = tokens.flatten().to_numpy(), tokens.offsets.to_numpy()
        lengths = np.diff(begins)
        rows, labels = np.arange(len(batch)), [CATEGORIES.index(name) for name in batch["category"].to_pylist()]
        logits = np.add.reduceat(weights[words], begins[:-1]) / lengths[:, None]
        likely = np.exp(logits - logits.max(1, keepdims=True))
        likely /= likely.sum(1, keepdims=True)
        loss = float(-np.log(likely[rows, labels]).mean())
        likely[rows, labels] -= 1
        np.add.at(weights, words, np.repeat(likely / lengths[:, None], lengths, axis=0) * -RATE)
        return loss

    return snapshot, batches_of, learn


def make_shop(root: Path, days: int = 4, rows: int = ROWS, seed: int = 0) -> list[date]:
    """Write ``days`` days below ``root`` and return them."""
    made = [FIRST_DAY + timedelta(days=number) for number in range(days)]
    for day in made:
        make_day(root, day, rows, seed)
    return made


def make_day(root: Path, day: date, rows: int = ROWS, seed: int = 0, revision: int = 0) -> pa.Table:
    """Write one day anew and return its rows, in the order in which the files hold them.

    A ``revision`` above 0 has other prices, and rows that came late.
    """
    table = make_rows(day, rows, seed, revision)
    rng = np.random.default_rng([seed, day.toordinal(), revision, 1])
    directory = root / f"dt={day.isoformat()}"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    job, at = rng.bytes(4).hex(), 0
    for number, groups in enumerate(_row_groups(day, table.num_rows, rng)):
        name = f"part-{number:05}-{job}-c000.snappy.parquet"
        with pq.ParquetWriter(directory / name, SCHEMA, use_dictionary=["category"]) as writer:
            for size in groups:
                writer.write_table(table.slice(at, size), row_group_size=size)
                at += size
    (directory / "_SUCCESS").touch()
    return table


def _row_groups(day: date, rows: int, rng: np.random.Generator) -> list[list[int]]:
    """Rows of each row group of each file of a day."""
    number = (day - FIRST_DAY).days
    if number == 1:  # somebody coalesced the day into one task with a large block size
        return [[rows]]
    if number == 2:  # a stream wrote a file every few minutes
        return [[len(part)] for part in np.array_split(np.arange(rows), 60)]
    files = []
    for part in np.array_split(np.arange(rows), 4):
        ends = np.minimum(np.cumsum(rng.integers(40, 560, len(part))), len(part))
        files.append(np.diff(np.unique(ends), prepend=0).tolist())
    return files


def make_rows(day: date, rows: int, seed: int = 0, revision: int = 0) -> pa.Table:
    """The offers of a day; words, price and picture predict the category, with noise."""
    table = _offers(day, rows, np.random.default_rng([seed, day.toordinal()]))
    if revision:
        rng = np.random.default_rng([seed, day.toordinal(), revision])
        table = pa.concat_tables([table, _offers(day, 1 + rows // 20, rng, first=rows)]).combine_chunks()
        prices = np.round(table["price"].to_numpy() * rng.choice([0.8, 0.9, 1.0, 1.1], len(table)), 2)
        table = table.set_column(4, SCHEMA.field("price"), pa.array(prices))
    return table


def _offers(day: date, rows: int, rng: np.random.Generator, first: int = 0) -> pa.Table:
    label = rng.integers(0, len(CATEGORIES), rows)
    words = [_description(CATEGORIES[number], rng) for number in label]
    usual = np.array([price for _, price in CATALOGUE.values()])[label]
    columns: dict[str, Any] = {
        "id": day.toordinal() * 1_000_000 + first + rng.permutation(rows),
        "title": [" ".join(text[:4]) for text in words],
        "tokens": [[token(word) for word in text] for text in words],
        "category": [CATEGORIES[number] for number in label],
        "price": np.round(usual * rng.lognormal(0.0, 0.35, rows), 2),
        "image": [_picture(number, rng) for number in label],
    }
    return pa.table(columns, schema=SCHEMA)


def _description(category: str, rng: np.random.Generator) -> list[str]:
    own, common = (words.split() for words in (CATALOGUE[category][0], COMMON))
    pools = [own if is_own else common for is_own in rng.random(int(np.clip(rng.lognormal(3.1, 0.6), 4, 160))) < 0.1]
    return [pool[rng.integers(len(pool))] for pool in pools]


@cache
def token(word: str) -> int:
    """A word's token, 1 to 8191; 0 is left for padding."""
    return 1 + zlib.crc32(word.encode()) % (VOCABULARY - 1)


def _picture(label: int, rng: np.random.Generator) -> bytes:
    """Stripes before a noisy wall; their angle tells the category."""
    y, x = np.mgrid[:SIDE, :SIDE]
    angle = np.pi * label / len(CATEGORIES)
    stripes = np.sin((x * np.cos(angle) + y * np.sin(angle)) / 2 + rng.uniform(0, 2 * np.pi))
    pixels = rng.uniform(90, 160, 3) + 40 * stripes[:, :, None] + rng.normal(0, 25, (SIDE, SIDE, 3))
    return bytes(np.clip(pixels, 0, 255).astype(np.uint8))
