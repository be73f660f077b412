"""The summary of a manifest: by it a sync sees that nothing has changed, and never where something has."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import pqcache
from pqcache.store.manifest import FileEntry, Identity, Manifest, SourceFile, digest_of_sources, summarize
from pqcache.store.snapshot import Snapshot, digest_of_held, read_summary
from pqcache.store.sync.plan import plan_sync
from tests.datasets import rows_of, write_shop

_PATHS = st.sampled_from(["dt=1/a", "dt=1/b", "dt=2/a", "dt=2/b\u3042", "c"])
_IDENTITIES = st.builds(Identity, st.integers(1, 2), st.integers(-1, 1), st.sampled_from(["", "t"]))
_LISTINGS = st.dictionaries(_PATHS, _IDENTITIES, min_size=1).map(
    lambda found: [SourceFile(path, identity) for path, identity in found.items()]
)


@given(_LISTINGS, _LISTINGS, st.randoms(use_true_random=False))
def test_digests_agree_with_the_plan(before: list[SourceFile], now: list[SourceFile], random: object) -> None:
    """They are equal where the plan has nothing to do, and differ where it has."""
    entries = tuple(
        FileEntry(path=file.path, size=file.identity.size, rows=1, row_groups=1, sources=(file,)) for file in before
    )
    summary = summarize(Manifest(files=entries, source="source", created="now"))
    random.shuffle(now)  # type: ignore[attr-defined]
    for listing in (now, [*reversed(before)]):
        assert (summary.sources == digest_of_sources(listing)) == plan_sync(listing, entries).nothing_to_do
    assert (summary.recipe, summary.source_files, summary.totals.files) == ("", len(before), len(before))


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    return write_shop(tmp_path / "shop", rows=20)


@pytest.fixture
def snapshot(shop: Path, tmp_path: Path) -> Snapshot:
    pqcache.sync(str(shop), tmp_path / "cache")
    return pqcache.Cache(tmp_path / "cache").snapshot()


def without_pyarrow(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a command where importing pyarrow or numpy fails."""
    code = "import sys; sys.modules.update(pyarrow=None, numpy=None); from pqcache.cli import main; main()"
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60)


def test_what_was_published_is_as_its_summary_says(snapshot: Snapshot) -> None:
    assert read_summary(snapshot) == summarize(snapshot.manifest())
    assert digest_of_held(snapshot.path) == summarize(snapshot.manifest()).held


EVERY_OPTION: dict[str, Any] = {
    "row_group_size": 16 << 10, "marker": "_SUCCESS", "settle": 0.001, "keep": 1, "max_delete": "3", "newest": 2,
    "partition_types": {"dt": "date"}, "ignore_case": True,
}  # fmt: skip


@pytest.mark.parametrize("how", [{}, EVERY_OPTION], ids=["plain", "options"])
def test_nothing_to_do_needs_neither_manifest_nor_pyarrow(how: dict[str, Any], shop: Path, tmp_path: Path) -> None:
    cache = tmp_path / "c"
    first = pqcache.sync(str(shop), cache, **how)
    changes = {"published": False, "added": 0, "unchanged": first.added, "rewritten": 0, "fetched_bytes": 0}
    expected = {**json.loads(json.dumps(first.to_dict())), **changes, "touched": [], "seconds": 0}
    done = without_pyarrow(["sync", str(cache), "--json"])
    assert (done.returncode, done.stderr) == (0, "")
    summary = json.loads(done.stdout.splitlines()[-1])
    summary.pop("event")
    assert {**summary, "seconds": 0} == expected


def link_instead(path: Path) -> None:
    """Move what is there to outside of the snapshot, and leave a link to it."""
    path.rename(path.parents[2] / "moved")
    path.symlink_to(path.parents[2] / "moved")


DAMAGE: dict[str, Callable[[Path], object]] = {
    "gone": Path.unlink,
    "another size": lambda path: (path.chmod(0o644), os.truncate(path, 100)),
    "a link": link_instead,
    "a directory": lambda path: (path.unlink(), path.mkdir()),
    "reached by a link": lambda path: link_instead(path.parent),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_local_damage_is_seen(damage: str, snapshot: Snapshot, shop: Path) -> None:
    cache = snapshot.path.parents[1]
    DAMAGE[damage](snapshot.path / snapshot.manifest().files[4].path)
    assert pqcache.sync(cache).published
    assert rows_of(cache / "current") == rows_of(shop)
    assert not [path for path in (cache / "current/").rglob("*") if path.is_symlink()]


def test_a_file_that_is_not_ours_changes_nothing(snapshot: Snapshot) -> None:
    (snapshot.path / "dt=2026-11-02" / "notes").write_text("mine")
    assert not pqcache.sync(snapshot.path.parents[1]).published
