"""A node that serves while it publishes: what its clients publish is one of its own snapshots, each time."""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path

import pqcache
from pqcache.errors import SourceIncomplete
from pqcache.store.cache_directory import CacheDirectory
from tests.datasets import rows_of, write_day, write_shop
from tests.store.serve.serving import TOKEN, served

NIGHTS = 4
CLIENTS = 2

Files = frozenset[tuple[str, int, str]]


def files_in(cache: Path) -> Files:
    """Return the files of the current snapshot of a cache, which nobody else publishes in meanwhile."""
    manifest = CacheDirectory(cache).snapshot().checked_manifest()
    return frozenset((entry.path, entry.rows, entry.checksum) for entry in manifest.files)


def test_clients_of_a_node_that_publishes(tmp_path: Path) -> None:
    """Without leases a snapshot may go in the middle of a copy: the client begins again, or says so."""
    lake, node = write_shop(tmp_path / "lake", files=2, rows=20), tmp_path / "node"
    published: list[Files] = []
    copies: list[Files] = []
    complete = set[Path]()  # the caches with a copy
    failed: list[BaseException] = []
    over = threading.Event()

    def publish() -> None:
        pqcache.sync(lake, node, keep=1)
        published.append(files_in(node))

    def copy(url: str, cache: Path) -> None:
        try:
            while not (over.is_set() and cache in complete):
                with suppress(SourceIncomplete):
                    if pqcache.sync(url, cache, options={"token": TOKEN}, jobs=2, force=True, keep=1).published:
                        copies.append(files_in(cache))
                        complete.add(cache)
        except BaseException as error:
            failed.append(error)
            raise

    publish()
    with served(node, lease_seconds=0.0) as server:
        caches = [tmp_path / f"copy-{number}" for number in range(CLIENTS)]
        threads = [threading.Thread(target=copy, args=(server.urls["node"], cache)) for cache in caches]
        for thread in threads:
            thread.start()
        for night in range(NIGHTS):
            day = night % 3
            for path in (lake / f"dt=2026-11-{day + 1:02d}").glob("*.parquet"):
                path.unlink()
            write_day(lake, f"2026-11-{day + 1:02d}", first=day * 100_000, files=1 + night % 2, rows=20, seed=night + 1)
            publish()
            pqcache.gc(node, keep=1)
        over.set()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        assert not failed
        assert len(copies) >= CLIENTS
        assert set(copies) <= set(published)
        for cache in caches:
            pqcache.sync(server.urls["node"], cache, options={"token": TOKEN}, force=True)
            assert rows_of(cache / "current") == rows_of(lake)
