"""The run that a reader starts: what it leaves beside the cache, what it warns of, and what keeps it from starting."""

from __future__ import annotations

import logging
import os
import stat
import sys
import time
from pathlib import Path

import pytest

from pqcache.errors import CacheError
from pqcache.store import background_run
from pqcache.store.background_run import FillRequest, RunFiles, ensure_filling, is_filled_or_filling, run_error
from pqcache.store.cache_directory import CacheDirectory
from pqcache.system.processes import ProcessIdentity
from tests.datasets import write_shop
from tests.waiting import wait_for

BACKGROUND_RUN = background_run.MODULE


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One day of two files."""
    return write_shop(tmp_path_factory.mktemp("lake"), days=1, files=2, rows=200)


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> CacheDirectory:
    """Where the cache will be; the small run of tests/filling.py fetches it."""
    monkeypatch.setattr(background_run, "MODULE", "tests.filling")
    use_temporary(tmp_path / "tmp", monkeypatch)
    return CacheDirectory(tmp_path / "cache")


def use_temporary(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have temporary files in a directory of the test."""
    directory.mkdir()
    monkeypatch.setenv("TMPDIR", str(directory))
    monkeypatch.setattr("tempfile.tempdir", None)


def fill(cache: CacheDirectory, source: Path, **options: str) -> None:
    """Return when the cache can be read."""
    request = FillRequest(source=str(source), options=options)
    ensure_filling(cache.path, request, lambda: is_filled_or_filling(cache))


def test_a_run_that_ends_well_leaves_nothing_beside_the_cache(
    cache: CacheDirectory, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background_run, "MODULE", BACKGROUND_RUN)
    for _ in range(2):
        fill(cache, source)
        wait_for(lambda: cache.current() is not None and background_run._started[-1].poll() is not None)
        assert left_beside(cache) == []


def test_one_that_fails_leaves_its_report_to_all_who_wait(cache: CacheDirectory, source: Path) -> None:
    begun = time.time()
    with pytest.raises(CacheError, match="failed as it was asked to"):
        fill(cache, source, fail="CacheError")
    assert isinstance(run_error(cache.path, begun), CacheError)


def test_its_warnings_are_logged_once_also_the_last_one(
    cache: CacheDirectory, source: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fill(cache, source, warn="the source does not answer")
    fill(cache, source)
    wait_for(lambda: any("it has ended" in record.getMessage() for record in caplog.records))
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert said == [f"{cache.path}: the source does not answer", f"{cache.path}: and it has ended"]


def test_a_lock_that_is_removed_while_somebody_waits_for_it(cache: CacheDirectory) -> None:
    place = RunFiles(cache.path)
    first = place.try_lock()
    assert first is not None
    assert place.try_lock() is None
    assert place.is_held()
    place.lock.unlink()
    assert not place.is_held()
    second = place.try_lock()
    assert second is not None
    assert place.is_held()
    os.close(first)
    os.close(second)
    assert not place.is_held()


def test_the_directory_of_another_user_is_named_with_its_owner(
    cache: CacheDirectory, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = os.getuid() + 1
    taken = Path(os.environ["TMPDIR"]) / f"pqcache-{other}"
    taken.mkdir()
    monkeypatch.setattr(os, "getuid", lambda: other)
    with pytest.raises(CacheError, match=f"{taken}: belongs to {taken.owner()}; set TMPDIR to a directory of your own"):
        fill(cache, source)
    assert run_error(cache.path, 0.0) is None


def test_temporary_files_that_cannot_be_made(
    cache: CacheDirectory, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = RunFiles(cache.path)
    place.report.mkdir()
    with pytest.raises(CacheError, match="set TMPDIR to a directory that you can write to"):
        fill(cache, source)
    place.report.rmdir()
    place.lock.symlink_to("elsewhere")
    with pytest.raises(CacheError, match="set TMPDIR"):
        fill(cache, source)
    place.lock.unlink()
    place.lock.parent.rmdir()
    place.lock.parent.write_text("a file")
    with pytest.raises(CacheError, match="is not a directory; remove it"):
        fill(cache, source)
    assert stat.S_ISREG(place.lock.parent.stat().st_mode)


def test_a_run_that_cannot_be_started(cache: CacheDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    for executable in ("/nonexistent/python", None):
        monkeypatch.setattr(sys, "executable", executable)
        with pytest.raises(CacheError) as failed:
            fill(cache, Path("/the lake/shop"))
        assert "the run that fetches it cannot be started" in failed.value.reason
        assert failed.value.advice == f"start it from a shell: pqcache sync '/the lake/shop' {cache.path} --fill"
    assert left_beside(cache) == []


def test_a_number_that_another_process_has_now_is_not_the_one_that_is_meant() -> None:
    here = ProcessIdentity()
    assert here.is_alive()
    if sys.platform == "linux":
        assert not ProcessIdentity(here.number, "1").is_alive()


def left_beside(cache: CacheDirectory) -> list[str]:
    """Return the temporary files of runs."""
    return [path.name for path in RunFiles(cache.path).lock.parent.iterdir()]
