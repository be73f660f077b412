"""ParquetDataset and Mix while their files arrive: workers, ranks, states, and the run that ``source=`` starts."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import pickle
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pqcache import Cache, Pack, TokenBatches
from pqcache.errors import CacheError, ParquetError, SourceDenied, UsageError
from pqcache.reader.stats import ArrivalStats
from pqcache.store import background_run
from pqcache.store.cache_directory import CacheDirectory
from pqcache.store.config import Config, write_config
from pqcache.system.processes import is_running
from pqcache.torch import Loader, Mix, ParquetDataset, Split
from pqcache.torch.batch import to_rows
from tests.datasets import write_shop
from tests.filling import Filler, FillingThread, publish_copy
from tests.torch.conftest import ids_of
from tests.waiting import wait_for

COLUMNS = ["id", "title", "tokens", "dt"]
BACKGROUND_RUN = background_run.MODULE

pytestmark = pytest.mark.usefixtures("few_cores_are_fine")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three days of four files with two row groups each: 2,400 rows in 24 row groups."""
    return write_shop(tmp_path_factory.mktemp("lake"), files=4, rows=200)


@pytest.fixture(scope="module")
def published(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of it that is published."""
    return publish_copy(source, tmp_path_factory.mktemp("published") / "cache")


@pytest.fixture
def arriving(source: Path, tmp_path: Path) -> Iterator[Path]:
    """A cache of it that is filled while it is read, and published then."""
    filler = Filler(source, tmp_path / "cache")
    thread = FillingThread(filler, 0.004)
    thread.start()
    yield tmp_path / "cache"
    thread.join()


def values_of(batch: Any) -> tuple[Any, ...]:
    """Return a batch as plain values."""
    return batch.index, batch["id"].tolist(), list(batch["title"]), batch["tokens"].values.tolist(), list(batch["dt"])


def epoch(cache: Path, workers: int = 0, context: str | None = None, **options: Any) -> list[tuple[Any, ...]]:
    """Return the batches of an epoch as plain values, as they come."""
    dataset = ParquetDataset(cache, columns=COLUMNS, batch_size=40, **options)
    loader = Loader(dataset, num_workers=workers, multiprocessing_context=context)
    return [values_of(batch) for batch in loader]


def test_no_proof_of_files_without_a_checksum(source: Path, tmp_path: Path) -> None:
    filler = Filler(source, tmp_path / "cache")
    with pytest.raises(
        UsageError, match=r"proof=True: the first copy of .* is still arriving; leave it out until then"
    ):
        ParquetDataset(tmp_path / "cache", proof=True)
    filler.fill()
    filler.publish()
    assert ParquetDataset(tmp_path / "cache", ["id"], proof=True).proof()["proof"]["parts"] == []


@pytest.mark.parametrize(
    "options",
    [
        {"weights": {"dt": {"2026-11-01": 2.5, ...: 0.75}}, "filters": "price > 0.2"},
        {"split": Split("title", 0.0, 0.5), "limit": 500, "shuffle": False},
    ],
    ids=lambda options: ",".join(options),
)
def test_rows_are_chosen_and_weighed_as_they_arrive(arriving: Path, published: Path, options: dict[str, Any]) -> None:
    assert epoch(arriving, **options) == epoch(published, **options)


@pytest.mark.parametrize(
    "pack", [Pack("tokens", length=64, strategy="best_fit"), TokenBatches("tokens", tokens_per_batch=1000)]
)
def test_a_pickled_dataset_finds_its_snapshot_and_packs_after_publishing(
    source: Path, published: Path, tmp_path: Path, pack: Pack | TokenBatches
) -> None:
    filler = Filler(source, tmp_path / "cache")
    filler.fill()
    dataset = ParquetDataset(tmp_path / "cache", ["tokens"], pack=pack)
    before = pickle.dumps(dataset)
    unpickled = pickle.loads(before)
    assert unpickled.snapshot == filler.snapshot.id
    filler.publish()
    expected = [to_rows(batch["tokens"]) for batch in ParquetDataset(published, ["tokens"], pack=pack)]
    for copy in (pickle.loads(pickle.dumps(dataset)), pickle.loads(before), unpickled):
        assert [to_rows(batch["tokens"]) for batch in copy] == expected


def test_a_mix_reads_two_that_arrive(source: Path, published: Path, tmp_path: Path) -> None:
    caches = [tmp_path / name for name in ("a", "b")]
    threads = [FillingThread(Filler(source, cache), 0.004) for cache in caches]
    for thread in threads:
        thread.start()

    def batches(first: Path, second: Path) -> list[Any]:
        parts = {
            "a": ParquetDataset(first, columns=COLUMNS, batch_size=40, seed=1),
            "b": ParquetDataset(second, columns=COLUMNS, batch_size=30, seed=2, filters="price > 0.3"),
        }
        mix = Mix(parts, weights={"a": 2, "b": 1})
        loader = Loader(mix, num_workers=2, multiprocessing_context="fork")
        return [(batch.source, values_of(batch)) for _ in range(2) for batch in loader]

    assert batches(*caches) == batches(published, published)
    for thread in threads:
        thread.join()


def test_a_state_goes_on_after_publishing_in_another_topology(source: Path, published: Path, tmp_path: Path) -> None:
    filler = Filler(source, tmp_path / "cache")
    thread = FillingThread(filler, 0.004, publish=False)
    thread.start()
    dataset = ParquetDataset(tmp_path / "cache", columns=["id"], batch_size=30, lanes=4)
    loader = Loader(dataset, num_workers=2, multiprocessing_context="fork")
    done = ids_of(itertools.islice(loader, 21))
    state = loader.state_dict()
    thread.join()
    filler.publish()
    assert state["snapshot"] == filler.snapshot.id
    for rank in range(4):
        dataset = ParquetDataset(tmp_path / "cache", columns=["id"], batch_size=30, num_replicas=4, rank=rank)
        dataset.load_state_dict(state)
        done += ids_of(dataset)
    expected = sorted(i for batch in Cache(published).batches(["id"]) for i in batch["id"].to_pylist())
    assert sorted(set(done)) == expected
    assert len(done) - len(expected) < 30 * 4  # of padding


def test_stats_count_what_is_wanted(source: Path, published: Path, tmp_path: Path) -> None:
    filler = Filler(source, tmp_path / "cache")
    dataset = ParquetDataset(tmp_path / "cache", columns=["id"], batch_size=100)
    before = dataset.stats().arrivals
    assert 0 < before.wanted_bytes < before.total_bytes == sum(f.stat().st_size for f in source.rglob("*.parquet"))
    assert (before.arrived_bytes, before.wanted_arrived_bytes, before.waited_seconds) == (0, 0, 0.0)
    filler.fill()
    filler.publish()
    assert len(list(Loader(dataset, num_workers=2, multiprocessing_context="fork"))) == 24
    after = dataset.stats().arrivals
    assert after.wanted_arrived_bytes == after.wanted_bytes == before.wanted_bytes
    assert ParquetDataset(published, ["id"]).stats().arrivals == ArrivalStats()


# The run that source= starts. A small one, of tests/filling.py, does what the options of its store say.


@pytest.fixture
def small_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where the caches are; beside them, ``runs`` has a byte for each run that was started."""
    monkeypatch.setattr(background_run, "MODULE", "tests.filling")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    return tmp_path


def runs(directory: Path) -> int:
    """Return how many runs were started."""
    return (directory / "runs").stat().st_size


def test_a_run_is_started_and_read_from(small_run: Path, source: Path, published: Path) -> None:
    options = {"source": str(source), "source_options": {"delay": "0.005"}}
    assert epoch(small_run / "cache", 2, "fork", **options) == epoch(published, 2, "fork")
    wait_until_published(small_run / "cache")
    assert runs(small_run) == 1
    again = ParquetDataset(
        small_run / "cache", ["id"], source=str(source), source_options={"unknown": "x"}
    )  # is not opened
    assert again.snapshot == CacheDirectory(small_run / "cache").snapshot().id
    assert runs(small_run) == 1


def test_of_several_processes_one_starts_the_run(small_run: Path, source: Path) -> None:
    def read(found: Any) -> None:
        batches = Cache(small_run / "cache").batches(["id"], source=source, source_options={"delay": "0.01"})
        found.put(sum(batch.num_rows for batch in batches))

    context = multiprocessing.get_context("fork")
    found = context.SimpleQueue()
    readers = [context.Process(target=read, args=(found,)) for _ in range(2)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(120)
    assert [found.get() for reader in readers if reader.exitcode == 0] == [2400] * 2
    wait_until_published(small_run / "cache")
    assert runs(small_run) == 1


def test_the_error_of_a_run_is_raised(small_run: Path, source: Path) -> None:
    with pytest.raises(SourceDenied, match="failed as it was asked to; ask otherwise"):
        ParquetDataset(small_run / "cache", source=str(source), source_options={"fail": "SourceDenied"})
    late = {"delay": "0.005", "most": "2", "fail_late": "SourceDenied"}
    dataset = ParquetDataset(small_run / "cache", columns=["id"], source=str(source), source_options=late)
    with pytest.raises(SourceDenied, match="failed late; free some"):
        list(Loader(dataset))


def test_a_run_ends_with_the_process_that_started_it_if_asked_to(small_run: Path, source: Path) -> None:
    program = textwrap.dedent("""
        import sys
        from pqcache import Cache
        options = {"endpoint": sys.argv[1], "region": "local"}
        Cache(sys.argv[2]).batches(["id"], source="s3://b/x", source_options=options, keep_filling=False)
    """)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(60)
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        words = [sys.executable, "-c", program, endpoint, str(small_run / "cache")]
        environment = {**os.environ, "AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s"}
        reader = subprocess.Popen(words, env=environment, start_new_session=True)
        with silent.accept()[0]:  # the run is at work
            (run,) = children_of(reader.pid)
            assert "background_run" in command_of(run)
            assert "endpoint" not in command_of(run)
            reader.kill()
            reader.wait()
        wait_for(lambda: not is_running(run))


def test_a_relative_source_is_the_same_one_in_another_directory(
    small_run: Path, source: Path, published: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (small_run / "lake").symlink_to(source)
    (small_run / "elsewhere").mkdir()
    write_shop(small_run / "elsewhere" / "lake", files=4, rows=200, days=1)
    monkeypatch.chdir(small_run)
    options = {"source": "lake", "source_options": {"most": "6"}}  # its runs end early, and readers start others
    dataset = ParquetDataset("cache", columns=COLUMNS, batch_size=40, **options)
    monkeypatch.chdir(small_run / "elsewhere")
    again = pickle.loads(pickle.dumps(dataset))  # as for a worker
    for read in (again, dataset):
        assert [values_of(batch) for batch in Loader(read)] == epoch(published)
    assert runs(small_run) > 1
    assert not (small_run / "elsewhere" / "cache").exists()


def test_no_run_puts_another_source_in_the_place_of_the_one_that_is_read(small_run: Path, source: Path) -> None:
    filler = Filler(source, small_run / "cache")
    dataset = ParquetDataset(small_run / "cache", columns=["id"], batch_size=40, source=str(source))
    write_config(small_run / "cache", Config(source="s3://lake/other"))
    filler.die()
    with pytest.raises(CacheError, match="the cache is now set to copy s3://lake/other"):
        list(Loader(dataset))
    with pytest.raises(UsageError, match="is a copy of s3://lake/other, and not of"):
        background_run.ensure_filling(
            small_run / "cache", background_run.FillRequest(source=str(source)), lambda: False
        )
    assert not (small_run / "runs").exists()


def test_the_source_of_a_first_run_that_failed_binds_nobody(
    small_run: Path,
    source: Path,
    published: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(background_run, "MODULE", BACKGROUND_RUN)
    (small_run / "bad").mkdir()
    (small_run / "bad" / "part-0.parquet").write_bytes(b"PAR1" + bytes(100))
    with pytest.raises(ParquetError, match="part-0"):
        ParquetDataset(small_run / "cache", source=small_run / "bad")
    assert epoch(small_run / "cache", source=source) == epoch(published)
    said = f"{small_run}/cache: the source was {small_run}/bad and is {source} from now on"
    wait_for(lambda: said in caplog.messages)


def test_options_of_a_source_that_make_no_sense(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="source_options: there is no source"):
        ParquetDataset(tmp_path / "cache", source_options={"endpoint": "http://127.0.0.1:1"})
    with pytest.raises(UsageError, match="give names and values as text"):
        ParquetDataset(tmp_path / "cache", source="lake", source_options={"port": 1})  # type: ignore[dict-item]
    with pytest.raises(UsageError, match="give names and values as text"):
        ParquetDataset(tmp_path / "cache", source="lake", source_options=["x"])  # type: ignore[arg-type]
    for nothing in ("", 5, b"lake"):
        with pytest.raises(UsageError, match="give the URL or path"):
            ParquetDataset(tmp_path / "cache", source=nothing)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="keep_filling: there is no source"):
        ParquetDataset(tmp_path / "cache", keep_filling=False)
    assert "secret" not in repr(background_run.FillRequest(source="s3://a/b", options={"secret": "secret"}))


def children_of(process: int) -> list[int]:
    """Return the processes that a process has started."""
    found = Path(f"/proc/{process}/task/{process}/children").read_text()
    return [int(word) for word in found.split()]


def command_of(process: int) -> str:
    """Return the command line of a process."""
    return Path(f"/proc/{process}/cmdline").read_text()


def wait_until_published(cache: Path) -> None:
    """Return when a cache has a snapshot and nothing arrives any more."""
    wait_for(lambda: CacheDirectory(cache).current() is not None)
