"""The datasets that the oracle reads: made once, as files, as a cache of these, and rewritten by a repartition."""

from __future__ import annotations

import pytest

import pqcache
from tests.epoch.tables import Source, write_kinds, write_wide


@pytest.fixture(scope="session")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Source]:
    """The table of every kind and the wide one: ``files``, ``cache`` and ``repartitioned`` of each."""
    root, found = tmp_path_factory.mktemp("epoch"), {}
    for name, write in (("kinds", write_kinds), ("wide", write_wide)):
        files = write(root / name)
        found[name] = Source(files, files)
        for how in ("cache", "repartitioned"):
            path = root / f"{name} {how}"
            pqcache.sync(files, path)
            if how == "repartitioned":
                pqcache.repartition(path, row_group_size="100KB" if name == "kinds" else "4MB")
            found[f"{name} {how}"] = Source.of_cache(path)
    return found


@pytest.fixture
def kinds(sources: dict[str, Source]) -> Source:
    """The cache of every kind."""
    return sources["kinds cache"]


@pytest.fixture(autouse=True)
def _many_workers(few_cores_are_fine: None) -> None:
    """There may be more workers than cores."""
